"""From the arguments of ``generate`` to a call that is ready to decode: the stages in order."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from .. import families
from ..decoding import activations, modes
from ..logits.grammar import processor as grammar
from ..memory import caches
from ..running import interventions, prefix, prompts
from ..running.ranks import Ranks
from ..settings.fields import FIELDS
from ..state.call import Call, Prompt, Request
from . import config, inputs, rows, validate


def prepare(
    model: Any, request: Request, *, fills_prefix: bool = True, prefix_cache: Any = None
) -> Call:
    """Resolve, check and prepare a call; an encoder is run, the decoder is not.

    ``fills_prefix``: stored prefixes are looked up now, and not by ``prefix.begin`` later.
    ``prefix_cache``: for a call that has none of its own and can use one.

    Raises ``ValueError``, ``TypeError`` or ``IndexError`` for arguments that cannot be used, and
    ``RankError`` for those of other processes that forward the model together with this one.
    """
    families.rename_cache(request.kwargs, stacklevel=5)
    # Arguments of the caller's function and of the model that only share a name with hfgen's.
    of_callable: dict[str, Any] = {}
    of_model: dict[str, Any] = {}
    if callable(decode := request.custom_generate):
        names = (config.OWN_NAMES | FIELDS.keys()) & families.parameters(decode)
        request, of_callable = _without(request, names)
    if names := config.OWN_NAMES & request.kwargs.keys():
        request, of_model = _without(request, names & families.accepted_names(model))
    ranks = None if families.world_size() == 1 else Ranks.of_request(model, request)
    call: Call | None = None
    try:
        validate.check_request(request)
        if "tokenizer" in request.kwargs:
            tokenizer = families.text_tokenizer(request.kwargs["tokenizer"])
            request = replace(request, kwargs=request.kwargs | {"tokenizer": tokenizer})
        prefixes = None
        if "prefix_cache" in request.kwargs or prefix_cache or hasattr(model, "prefix_cache"):
            prefixes = prefix.take_argument(model, request, prefix_cache)
        call, model_kwargs = config.resolve(model, request)
        call.mode_kwargs |= of_callable
        model_kwargs |= of_model
        call.ranks = ranks
        model._validate_model_kwargs(model_kwargs.copy())
        model._validate_generation_mode(call.mode.kind, call.config, call.mode_kwargs)
        validate.check_config(call)
        modes.check_call(call)
        if hasattr(model, "exactness"):
            model.exactness.check(model)
        if ranks is not None:
            validate.check_ranks(model, call)
        for row_config in call.configs:
            if getattr(row_config, "grammar", None) is not None:
                grammar.check(model, call)
                break
        if prefixes is not None:
            call.prefixes = prefix.check(prefixes, model, call, model_kwargs)
        call.prompt = prompt = inputs.prepare(model, call, model_kwargs)
        if request.streamer is not None:  # beams start alike: one row stands for those of a prompt
            request.streamer.put(prompt.ids[:: call.config.num_beams].cpu())
        config.set_lengths(model, call, prompt)
        if "interventions" in request.kwargs or "record" in request.kwargs:
            call.interventions = interventions.of_call(model, call)
            call.record = activations.of_call(model, call)
        fans_out = call.shared_prompt is not None and prompts.will_share_prefill(
            model, call, prompt
        )
        caches.prepare(model, call, prompt, fans_out)
        place = prompt.ids.device.type
        # From the CPU, ids are moved for each forward.
        if place != "cpu" and place != (device := model.device.type):
            warnings.warn(
                f"`input_ids` is on {place} and the model on {device}; every step copies between them. "
                f"Call input_ids.to('{device}') first.",
                stacklevel=2,
            )
        if call.config.do_sample:
            rows.set_keys(call, prompt)
        prepare_functions(model, call, prompt)
        if call.has_foreign_cache:
            caches.check_room(model, call, prompt)
        if fills_prefix and call.prefixes is not None:
            prefix.begin(model, call, prompt)
        prompt.model_kwargs["use_cache"] = call.config.use_cache
        if ranks is not None:
            ranks.agree(model, call, prompt)
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        if call is not None:
            call.release()
        raise
    return call


def _without(request: Request, names: Collection[str]) -> tuple[Request, dict[str, Any]]:
    """``request`` without the arguments ``names``, and those that it had."""
    taken = {name: value for name, value in request.kwargs.items() if name in names}
    others = {name: value for name, value in request.kwargs.items() if name not in names}
    return replace(request, kwargs=others), taken


def prepare_functions(model: Any, call: Call, prompt: Prompt) -> None:
    """The logits processors and stopping criteria of the call."""
    request = call.request
    call.processors = model._get_logits_processor(
        generation_config=call.config,
        input_ids_seq_length=prompt.ids.shape[1],
        encoder_input_ids=prompt.main_input,
        prefix_allowed_tokens_fn=request.prefix_allowed_tokens_fn,
        logits_processor=request.logits_processor or LogitsProcessorList(),
        device=prompt.main_input.device,
        model_kwargs=prompt.model_kwargs,
        negative_prompt_ids=request.negative_prompt_ids,
        negative_prompt_attention_mask=request.negative_prompt_attention_mask,
    )
    criteria = request.stopping_criteria or StoppingCriteriaList()
    if (cancellation := request.kwargs.get("cancel")) is not None:
        criteria = StoppingCriteriaList([*criteria, cancellation])
    call.criteria = model._get_stopping_criteria(
        generation_config=call.config,
        stopping_criteria=criteria,
        tokenizer=call.mode_kwargs.get("tokenizer"),
    )
