"""Parameters per prompt of a batch: lists of values, or one config per prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from ..settings.fields import FIELDS, PER_CALL, PER_ROW, FieldError
from ..state import seeds
from ..state.call import Call, Prompt, Request
from ..state.run import RowParams


def each(value: Any) -> list[Any]:
    """The values of a field that may have one per prompt."""
    return list(value) if isinstance(value, list | tuple) else [value]


def lists_in(values: dict[str, Any]) -> dict[str, list[Any]]:
    """The fields in ``values`` that have a list with a value for each prompt.

    It is one if a list is no value of the field; of fields that take lists, if each item is a value.
    """
    lists: dict[str, list[Any]] = {}
    for name, value in values.items():
        if not isinstance(value, list | tuple) or (row := PER_ROW.get(name)) is None:
            continue
        accepts = row.kind.accepts
        is_each = value and all(v is None or accepts(v) for v in value) and not accepts(value)
        if is_each or not row.kind.may_be_list:
            lists[name] = list(value)
    return lists


def with_stop_strings(request: Request) -> Request:
    """``request`` with ``stop_strings`` in place of ``stop``; ``ValueError`` if both are set."""
    kwargs = dict(request.kwargs)
    stop = kwargs.pop("stop")
    if stop is not None and kwargs.get("stop_strings") is not None:
        raise ValueError("`stop` is another name of `stop_strings`: pass one of them.")
    return replace(request, kwargs=kwargs if stop is None else kwargs | {"stop_strings": stop})


def split(request: Request) -> tuple[list[Request], tuple[str, ...]] | None:
    """Return one request for each prompt, and the names of the list arguments; ``None`` without lists.

    ``None`` in a list leaves the field to the config and the defaults. Raises ``ValueError`` if lists of
    values have different lengths, or none.
    """
    caller_config = request.generation_config
    for name, value in request.kwargs.items():
        row = PER_CALL.get(name)
        if isinstance(value, list) and row is not None and not row.kind.may_be_list:
            raise FieldError(
                f"`{name}` has to be {row.kind.words}, but is {value}. It holds for all rows of a call: "
                "split the prompts into one call for each value."
            )
    configs = list(caller_config) if isinstance(caller_config, list | tuple) else None
    lists = lists_in(request.kwargs)
    one_config = {} if configs is not None or caller_config is None else vars(caller_config)
    of_config = {n: v for n, v in lists_in(one_config).items() if request.kwargs.get(n) is None}
    lengths = {name: len(values) for name, values in (of_config | lists).items()}
    if configs is not None:
        lengths["generation_config"] = len(configs)
    if not lengths:
        return None
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        named = ", ".join(f"`{name}` has {n}" for name, n in lengths.items())
        raise ValueError(f"Lists of values need one for each prompt of the batch, but {named}.")
    requests = []
    for index in range(next(iter(lengths.values()))):
        config = copy.copy(caller_config if configs is None else configs[index])
        for name, values in of_config.items():
            setattr(config, name, values[index])
        kwargs = {name: value for name, value in request.kwargs.items() if name not in lists}
        kwargs |= {n: values[index] for n, values in lists.items() if values[index] is not None}
        if configs is not None:  # what holds for all prompts is an argument beside the list
            config, kwargs = with_fields(config, kwargs)
        requests.append(replace(request, generation_config=config, kwargs=kwargs))
    return requests, tuple(lengths)


def for_each_prompt(request: Request, n: int) -> list[Request]:
    """``split`` for ``n`` prompts; without lists, the same request for each."""
    requests, names = split(request) or ([request] * n, ())
    if len(requests) != n:
        lists = ", ".join(f"`{name}`" for name in names)
        raise ValueError(
            f"A list has to have one value for each prompt, but {lists} has {len(requests)}: there are "
            f"{len(requests)} values and {n} prompts."
        )
    return requests


def with_fields(config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of ``config`` that has what ``kwargs`` say of its fields, and the rest of these."""
    config, fields = copy.copy(config), {n: v for n, v in kwargs.items() if n in FIELDS}
    for name, value in fields.items():
        if value is not None:
            setattr(config, name, value)
    return config, {name: v for name, v in kwargs.items() if fields.get(name) is None}


def folded(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with their fields in the ``generation_config``, if there is one: ``generate`` warns of both."""
    if not isinstance(config := arguments.get("generation_config"), GenerationConfig):
        return dict(arguments)
    config, others = with_fields(config, arguments)
    return others | {"generation_config": config}


def resolve(model: Any, requests: list[Request], list_arguments: tuple[str, ...]) -> RowParams:
    """The config of each prompt. Raises ``ValueError`` for fields that prompts cannot differ in."""
    configs = [
        model._prepare_generation_config(request.generation_config, **request.kwargs)[0]
        for request in requests
    ]
    params = RowParams(configs, [r.has_default_lengths(model) for r in requests], list_arguments)
    for name in PER_CALL:
        if params.differ_in(name):
            raise ValueError(
                f"`{name}` holds for all rows of a call, but the prompts ask for "
                f"{params.values(name)}. Split them into one call for each value."
            )
    return params


def common_mode(params: RowParams, do_sample: bool, assistant_model: Any) -> Any:
    """The mode of all prompts; a greedy one among sampled counts as sampled."""
    modes = set()
    for config in params.configs:
        own_do_sample, config.do_sample = config.do_sample, do_sample
        modes.add(config.get_generation_mode(assistant_model))
        config.do_sample = own_do_sample
    if len(modes) > 1:
        names = ", ".join(sorted(mode.value.replace("_", " ") for mode in modes))
        raise ValueError(
            f"The prompts of one call cannot be decoded in different modes ({names}). Split them into "
            "one call for each mode."
        )
    return modes.pop()


def check_call(call: Call, rows: RowParams, prompt: Prompt) -> None:
    """Raise ``ValueError`` if there is not one value for each prompt, or nobody to read them."""
    if len(rows) != prompt.batch_size:
        names = ", ".join(f"`{name}`" for name in rows.list_arguments)
        raise ValueError(
            f"A list has to have one value for each prompt: {names} has {len(rows)}, and the batch has "
            f"{prompt.batch_size} prompts."
        )
    if not getattr(call.strategy, "takes_rows", False):
        raise ValueError(
            f"The prompts of a call with {call.who} cannot have parameters of their own: it does not "
            "declare `takes_rows`. Pass one value for all."
        )
    fields = getattr(call.strategy, "fields_of_call", ())
    if name := next((name for name in fields if rows.differ_in(name)), None):
        raise ValueError(
            f"`{name}` holds for all rows in {call.who}, but the prompts ask for {rows.values(name)}."
        )


def prepare_special_tokens(model: Any, call: Call, rows: RowParams, prompt: Prompt) -> None:
    """Write each prompt's special tokens to its config; those of any prompt are the call's."""
    device = prompt.main_input.device
    for config in rows.configs:
        model._prepare_special_tokens(config, None, device=device)
    eos_tokens = [eos for eos in rows.values("_eos_token_tensor") if eos is not None]
    call.config._eos_token_tensor = torch.cat(eos_tokens).unique() if eos_tokens else None
    pads = [pad for pad in rows.values("_pad_token_tensor") if pad is not None]
    if call.config._pad_token_tensor is None and pads:
        call.config._pad_token_tensor = pads[0]


def set_lengths(model: Any, call: Call, rows: RowParams, fix: Callable[..., Any]) -> None:
    """Set each prompt's lengths by ``fix``, the model's hook; the call takes the largest."""
    for index, (has_default_max, has_default_min) in enumerate(rows.has_defaults):
        rows.configs[index] = config = fix(
            generation_config=rows.configs[index],
            has_default_max_length=has_default_max,
            has_default_min_length=has_default_min,
        )
        model._validate_generated_length(config, call.prompt_length, has_default_max)
    if call.config.num_beams > 1 and 0 in rows.values("max_new_tokens"):
        raise ValueError(
            "`max_new_tokens` of a prompt is 0, and there is nothing to search with beams for. Leave the "
            "prompt out of the batch."
        )
    call.config.max_length = max(rows.values("max_length"))
    if call.config.max_new_tokens is not None:
        call.config.max_new_tokens = call.config.max_length - call.prompt_length


def set_keys(call: Call, prompt: Prompt) -> None:
    """Write ``call.row_keys``, if a prompt has a seed, or if greedy and sampled prompts are mixed."""
    seed_of_prompt = [getattr(config, "seed", None) for config in call.configs]
    is_mixed = not all(config.do_sample for config in call.configs)  # the call samples
    if all(seed is None for seed in seed_of_prompt) and not is_mixed:
        return
    if not getattr(call.strategy, "takes_rows", False):
        raise ValueError(
            f"`seed` fixes what a row samples, but {call.who} does not declare `takes_rows`: it draws "
            "from torch's generator. Leave `seed` out and call torch.manual_seed()."
        )
    if call.config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` lets drafts decide what is sampled, so that no `seed` can fix "
            "it. Use only one of them."
        )
    if call.rows is None:
        seed_of_prompt *= prompt.batch_size
    # Beams of a prompt draw together, each continuation by its own index.
    copies = 1 if call.config.num_beams > 1 else call.config.num_return_sequences
    call.row_keys = seeds.keys_of(seed_of_prompt, copies, prompt.ids.device)
