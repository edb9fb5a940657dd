"""The card of a call: what its tokens depended on, and digests of what came out. ``hfgen replay`` reads it.

A card is plain data: no path, no code, and no text or ids of a prompt unless that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from ..running import environment
from ..settings.fields import FIELDS, OWN_FIELDS
from ..state.run import Observer, Run, Strategy

#: Of the format. A card of another one is refused.
VERSION = 1
MAX_SIZE, MAX_DEPTH = 2**26, 7  # characters of a card, and levels of lists and dicts in it, at most
#: Fields that say what a call returns, or hold for a process; they decide no token.
UNSAVED = ("output_card", "transformers_version", "_from_model_config", "compile_config")
#: Arguments of ``generate`` that are in the card in another form, or decide no token.
SAVED = "input_ids inputs attention_mask generation_config tokenizer cancel use_cache".split()


class CardError(ValueError):
    """A file is no card, or a card cannot be replayed."""


@dataclass(frozen=True)
class Card:
    """``output.card``: what the tokens of a call depended on. ``str()`` is JSON."""

    versions: dict[str, str]  # of hfgen, transformers, torch, Python
    machine: dict[str, str]  # processor, device, kernels' instructions, threads, precision
    model: dict[str, str]  # class, dtype, attention and configs
    kernels: dict[str, str]  # what ``hfgen.exact`` has probed and ``hfgen.optimize`` has chosen
    weights: dict[str, str]  # digests by name
    tokenizer: dict[str, str]
    operations: dict[str, str]  # digests of what each layer gives for the same few tokens
    #: The resolved config of each prompt, or one for all.
    parameters: list[dict[str, Any]] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # what a call depended on and no card can hold
    #: ``digest``; with ``output_card="prompt"`` also ``input_ids`` and ``attention_mask``.
    prompt: dict[str, Any] = field(default_factory=dict)
    #: Of each returned row, digests up to each generated token; and one of all log-probabilities.
    tokens: list[list[str]] = field(default_factory=list)
    logprobs: str = ""
    version: int = VERSION

    def __str__(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, text: str) -> Card:
        """The card that ``str()`` wrote. Raises ``CardError`` for anything else."""
        if len(text) > MAX_SIZE:
            raise CardError(f"A card has at most {MAX_SIZE:,} characters; this has {len(text):,}.")
        try:
            values = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise CardError(f"This is no card: {error}") from None
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise CardError(f"This is no card of version {VERSION}, which this hfgen reads.")
        if odd := sorted(KINDS.keys() ^ values.keys()):
            raise CardError(f"This is no card: {odd[0]!r} is missing, or is no field of a card.")
        for name, value in values.items():
            if not _fits(value, KINDS[name]):
                kind = cls.__annotations__[name]
                raise CardError(f"{name!r} of a card has to be {kind}, but is {value!r:.80}.")
        if odd := sorted({name for config in values["parameters"] for name in config} - {*FIELDS}):
            raise CardError(f"{odd[0]!r} in the parameters is no field of a generation config.")
        if any("path" in str(config.get("cache_config")) for config in values["parameters"]):
            raise CardError("A card names no folder, but `cache_config` of this one does.")
        return cls(**values)


KINDS = get_type_hints(Card)  # the types of a card's fields, by name


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _fits(value: Any, kind: Any, depth: int = 1) -> bool:
    """Whether a value of JSON is of the ``kind`` that a field of ``Card`` declares, and not too deep."""
    if kind is not Any and type(value) is not (get_origin(kind) or kind):
        return False
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    *_, of_parts = Any, *get_args(kind)
    return depth <= MAX_DEPTH and all(_fits(part, of_parts, depth + 1) for part in parts)


def card(model: nn.Module, tokenizer: Any = None) -> Card:
    """The card of a model as it is here and now, without a call: reads all weights, forwards one prompt."""
    sections: dict[str, Any] = environment.of(model, tokenizer)
    return Card(**sections)


class CardWriter(Observer):
    """An observer that sets ``output.card`` when a call has ended; see ``loop.begin``."""

    def __init__(self, run: Run) -> None:
        call: Any = run.call
        kwargs, defaults = call.request.kwargs, getattr(run.model, "generation_config", None)
        ids, mask = kwargs.get("input_ids", call.request.inputs), kwargs.get("attention_mask")
        if getattr(mask, "shape", None) != getattr(ids, "shape", None):  # of embeddings, or a cache
            mask = None
        pairs = {"input_ids": ids, "attention_mask": mask}.items()
        inputs = {name: value.tolist() for name, value in pairs if isinstance(value, Tensor)}
        prompt: dict[str, Any] = {"digest": digest_of_inputs(inputs)}
        prompt |= inputs if run.config.output_card == "prompt" else {}
        parameters = [parameters_of(config, defaults) for config in call.configs]
        self.sections = {"parameters": parameters, "beside": beside(run), "prompt": prompt}

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Any]) -> None:
        sections: dict[str, Any] = self.sections | environment.of(run.model, run.tokenizer)
        sections["tokens"] = digests_of_rows(result["sequences"][:, run.prompts.shape[1] :])
        if (logprobs := run.extras.get("logprobs")) is not None:
            sections["logprobs"] = environment.digest(logprobs.token_logprobs)
        run.extras["card"] = Card(**sections)


def beside(run: Run) -> list[str]:
    call: Any = run.call
    request = call.request
    others = request.__slots__[2:-1]  # behind the inputs and the config
    names = [name for name in others if getattr(request, name) not in (None, [], False)]
    unsaved = ((name, value) for name, value in request.kwargs.items() if name not in SAVED)
    names += [name for name, value in unsaved if not (value is None or _is_json(value))]
    if not isinstance(request.kwargs.get("input_ids", request.inputs), Tensor):
        names.append("a prompt that is no tensor of ids")
    if run.config.do_sample and any(config.seed is None for config in call.configs):
        names.append("sampling without `seed`")
    for config in call.configs:
        names += [name for name, value in _set_values(config).items() if not _is_json(value)]
    return sorted(set(names))


def _set_values(config: Any) -> dict[str, Any]:
    values = config.to_diff_dict()
    if values.get("cache_implementation") == "offloaded":
        values.pop("cache_config", None)  # a folder
    unsaved = [*UNSAVED, "max_length"] if values.get("max_new_tokens") is not None else UNSAVED
    return {name: value for name, value in values.items() if name not in unsaved and name[0] != "_"}


def parameters_of(config: Any, defaults: Any) -> dict[str, Any]:
    """What a resolved config has set, as values of JSON; ``None`` where the model has another default."""
    values = {
        name: value
        for name, value in _set_values(config).items()
        if _is_json(value) and value != OWN_FIELDS.get(name, ...)
    }
    for name in FIELDS:
        is_unset = name not in UNSAVED and getattr(config, name, None) is None
        if is_unset and getattr(defaults, name, None) is not None:
            values[name] = None
    return dict(json.loads(json.dumps(values)))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def digest_of_inputs(inputs: Mapping[str, Any]) -> str:
    """The digest of the ids of prompts that their mask shows; padding does not count."""
    ids = inputs.get("input_ids", [])
    mask = inputs.get("attention_mask") or [[1] * len(row) for row in ids]
    pairs = (zip(*row, strict=True) for row in zip(ids, mask, strict=True))
    rows = [[token for token, is_shown in row if is_shown] for row in pairs]
    return sha256(json.dumps(rows).encode()).hexdigest()


def digests_of_rows(tokens: Tensor) -> list[list[str]]:
    """Of each row of ``tokens (rows, n)``, a digest of the tokens up to each one."""
    rows: list[list[str]] = []
    for row in tokens.tolist():
        checksum = sha256()
        rows.append([])
        for token in row:
            checksum.update(f"{token} ".encode())
            rows[-1].append(checksum.hexdigest()[: environment.DIGITS])
    return rows


def replay(
    card: Card, model: Any, tokenizer: Any = None, inputs: Mapping[str, Any] | None = None
) -> Card:
    """Decode the call of ``card`` with ``model``, and return the card of that.

    ``inputs``: ``input_ids (batch, length)`` and ``attention_mask``; by default those in the card. Raises
    ``CardError`` for a call that depended on more than a card holds, and for other prompts.
    """
    if card.beside:
        raise CardError(f"The call depended on what a card cannot hold: {', '.join(card.beside)}.")
    if not card.parameters or not card.tokens:
        raise CardError("This is the card of a model, without a call: there is nothing to decode.")
    lists = inputs or {name: v for name, v in card.prompt.items() if name != "digest"}
    if not lists:
        raise CardError(
            "The card has no prompt (output_card='prompt' keeps it): give the prompts of the call."
        )
    names = [name for name in ("input_ids", "attention_mask") if name in lists]
    try:
        tensors = {name: torch.as_tensor(lists[name], device=model.device) for name in names}
        digest = digest_of_inputs({name: value.tolist() for name, value in tensors.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise CardError(f"The prompts are no rows of ids of one length: {error}") from None
    if digest != card.prompt.get("digest"):
        raise CardError("These are not the prompts of the call: their ids have another digest.")
    options: dict[str, Any] = card.parameters[0]
    if len(card.parameters) > 1:
        # In a config, ``None`` would be the model's default.
        unset = [n for n in options if all(v.get(n, 0) is None for v in card.parameters)]
        configs = [GenerationConfig(**values) for values in card.parameters]
        options = dict.fromkeys(unset) | {"generation_config": configs}
    options = tensors | options | ({"tokenizer": tokenizer} if card.tokenizer else {})
    options |= {"return_dict_in_generate": True, "output_card": True}
    return model.generate(**options).card


def differences(expected: Card, found: Card) -> list[str]:
    """What differs, by name and in order: versions, machine, model, kernels, weights, tokenizer, operations."""
    lines = []
    for section in environment.SECTIONS:
        ours, theirs = getattr(found, section), getattr(expected, section)
        if section == "tokenizer" and not (ours and theirs):  # the call had none
            continue
        names = [*theirs, *(name for name in ours if name not in theirs)]
        if differing := [name for name in names if ours.get(name) != theirs.get(name)]:
            name = differing[0]
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            values = f"{theirs.get(name, 'nothing')!r:.80} in the card, {ours.get(name, 'nothing')!r:.80} here"
            lines.append(f"{section}: {name!r:.80} ({values}){more}")
    return lines


def first_token(expected: Card, found: Card) -> str | None:
    """Where the tokens differ first, or the log-probabilities; ``None`` if all are the same bytes."""
    if len(expected.tokens) != len(found.tokens):
        return f"rows: {len(expected.tokens)} in the card, {len(found.tokens)} here"
    for row, (theirs, ours) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        if theirs != ours:
            differ = (n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            place = next(differ, min(len(theirs), len(ours)))
            return f"row {row}: the tokens differ from generated token {place} on"
    if expected.logprobs != found.logprobs:
        return "the log-probabilities differ in their bits"
    return None
