"""Drafts by the generator objects of transformers itself, for the kinds that its models bring along.

Those are: heads that predict several tokens (``use_mtp=True``); assistants that denoise a block of
tokens (``speculation_type="dflash"``); Gemma's assistants, which attend to the target's keys; and any
``CandidateGenerator`` that a caller passes as ``assistant_model`` or that a model's class returns from
``_get_candidate_generator``. The object decides how much to draft; at one row it is asked what, and
when, upstream's loop would ask it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import candidate_generator as kinds
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from ..processors import is_row_wise
from ..processors.lists import public_type
from ..types import ModelKwargs, Run
from ..validate_speculation import has_foreign_generator
from .base import Context, Draft, Setup, Verdict
from .schedule import Constant

#: More than a generator drafts at once, unless the call has room for still more.
MANY_TOKENS = 128

#: What a Gemma assistant drafts if neither its config nor the call says; upstream's default.
DEFAULT_TOKENS = 20


def _kind(name: str) -> Any:
    """A class of upstream's, or one that nothing is an instance of in a release without it."""
    return getattr(kinds, name, type(name, (), {}))


MTP = _kind("MTPCandidateGenerator")
DFLASH = _kind("DFlashTokenCandidateGenerator")
SINGLE_POSITION = _kind("SinglePositionMultiTokenCandidateGenerator")

#: Processors that hold something of each row, and find it by the row's number.
OF_A_BATCH = (
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)


class FromGenerators:
    """Drafts what upstream's ``CandidateGenerator`` objects draft, one of them for each row.

    Each is asked about its row up to the length that all rows have reached; what the row knows after
    that stands in the place of a draft.
    """

    def __init__(self, setup: Setup, generators: list[CandidateGenerator]) -> None:
        self.setup, self.generators = setup, generators
        #: Drafts may go beyond the last token, and are made for it too, where draws depend on them.
        self.overshoots = self.is_always_asked = setup.is_exact
        room = setup.max_length - setup.run.ids.shape[1]
        self.schedule = Constant(max(room, MANY_TOKENS))
        #: What the target model's forward gets besides its inputs.
        self.forward_arguments = _overrides(setup.run, generators[0])
        self.outputs: ModelOutput | None = None
        self.n_matches = 0
        self.is_prompt = False
        self.padding = _padding(setup.run) if _can_strip(generators[0]) else [0] * len(generators)

    def draft(self, context: Context) -> Draft | None:
        drafted: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for row, is_done in enumerate(context.is_done):
            nothing = context.ids.new_empty(0), None
            drafted.append(nothing if is_done else self.ask(row, context))
        width = max(len(tokens) for tokens, _ in drafted)
        if width == 0:
            return None
        tokens = context.ids.new_full((len(drafted), width), -1)
        for row, (drafts, _) in enumerate(drafted):
            tokens[row, : len(drafts)] = drafts
        return Draft(_as_far_as_known(tokens, context), self.scores(drafted, width))

    def ask(self, row: int, context: Context) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens ``(n,)`` drafted for a row, and their scores ``(n, vocab)`` if there are any."""
        generator: Any = self.generators[row]
        n_pads = self.padding[row]
        ids = context.ids[row : row + 1, n_pads : context.start]
        if generator.requires_model_outputs:
            candidates, logits = generator.get_candidates(
                ids,
                model_kwargs=self.model_kwargs(row, ids),
                model_outputs=self.row_outputs(row),
                is_first_iteration=self.outputs is None,
                n_last_matches=self.n_matches,
            )
        else:
            candidates, logits = generator.get_candidates(ids)
        length, shape = ids.shape[1], tuple(candidates.shape)
        if len(shape) != 2 or shape[0] != 1 or shape[1] < length:
            raise ValueError(
                f"{type(generator).__name__}.get_candidates() has to return the {length} ids that it "
                f"was given and drafted ones after them, (1, {length} or more), but returned {shape}."
            )
        tokens = candidates[0, length:][: context.n_tokens].to(context.ids)
        if logits is not None:
            logits = logits[0, : len(tokens)].to(context.ids.device)
        return tokens, logits

    def scores(
        self, drafted: list[tuple[torch.Tensor, torch.Tensor | None]], width: int
    ) -> torch.Tensor | None:
        """The scores ``(rows, width, vocab)`` that tokens were drawn from, if any row has some.

        Gemma's tokens are the likeliest, not drawn: next to their scores, samples would not be
        distributed as the target's. So these are used only where draws have to be upstream's.
        """
        is_drawn = not isinstance(self.generators[0], SINGLE_POSITION)
        if not self.setup.needs_logits or not (
            is_drawn or self.setup.is_exact or not self.setup.run.config.do_sample
        ):
            return None
        first = next((logits for _, logits in drafted if logits is not None), None)
        if first is None or (len(drafted) == 1 and len(first) == 0):
            return None
        scores = first.new_zeros(len(drafted), width, first.shape[-1])
        for row, (tokens, logits) in enumerate(drafted):
            if logits is not None:
                scores[row, : len(tokens)] = logits
            else:  # drafted for certain
                scores[row, : len(tokens)] = -torch.inf
                scores[row, : len(tokens)].scatter_(1, tokens[:, None], 0.0)
        return scores

    def model_kwargs(self, row: int, ids: torch.Tensor) -> ModelKwargs:
        """The target's arguments for a row; mask and positions are there even if they are plain."""
        run, n_pads = self.setup.run, self.padding[row]
        kwargs = dict(run.model_kwargs)
        if not run.is_encoder_decoder:
            rows, length = len(self.generators), ids.shape[1] + n_pads
            if kwargs.get("attention_mask") is None:
                kwargs["attention_mask"] = ids.new_ones(rows, length)
            if kwargs.get("position_ids") is None:
                positions = kwargs["attention_mask"].cumsum(dim=-1) - 1
                kwargs["position_ids"] = positions.clamp(min=0)
        if len(self.generators) == 1:
            return kwargs
        kwargs = {name: self.slice(name, value, row) for name, value in kwargs.items()}
        for name in ("attention_mask", "position_ids") if n_pads else ():
            kwargs[name] = kwargs[name][..., n_pads:]
        return kwargs

    def row_outputs(self, row: int) -> ModelOutput | None:
        """What the target model said in the last round about a row."""
        if self.outputs is None or len(self.generators) == 1:
            return self.outputs
        outputs: Any = self.slice("", self.outputs, row)
        if n_pads := self.padding[row]:
            _strip(outputs, n_pads, self.is_prompt)
        return outputs  # type: ignore[no-any-return]

    def slice(self, name: str, value: Any, row: int) -> Any:
        """``value`` with the batch dimension of every tensor in it cut to one row.

        A cache is left out: what it holds is all rows' together.
        """
        if isinstance(value, torch.Tensor):
            rows = len(self.generators)
            if name == "position_ids" and value.ndim == 3:  # (3, rows, length)
                return value[:, row : row + 1]
            return value[row : row + 1] if value.ndim and len(value) == rows else value
        if isinstance(value, ModelOutput):
            sliced = copy.copy(value)
            for key, item in value.items():
                sliced[key] = self.slice(key, item, row)
            return sliced
        if isinstance(value, Mapping):
            return {key: self.slice(key, item, row) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)([self.slice(name, item, row) for item in value])
        return None if isinstance(value, Cache) else value

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn: ``see`` tells the generators all of it."""

    def see(
        self,
        run: Run,
        model_outputs: ModelOutput,
        scores: tuple[torch.Tensor, ...],
        n_advanced: int,
    ) -> None:
        """Keep what the generators are told about the round with the next call; see ``Seeing``."""
        self.is_prompt = self.outputs is None
        self.outputs, self.n_matches = model_outputs, n_advanced - 1
        unchanged = CandidateGenerator.update_candidate_strategy
        for row, generator in enumerate(self.generators):
            if type(generator).update_candidate_strategy is not unchanged:
                row_scores = torch.stack([score[row] for score in scores])[None]
                generator.update_candidate_strategy(
                    run.ids[row : row + 1],  # type: ignore[arg-type]
                    row_scores,  # type: ignore[arg-type]
                    self.n_matches,
                )


def _overrides(run: Run, generator: Any) -> dict[str, Any]:
    """Arguments that a generator wants the target's forward to get.

    All hidden states are returned to a caller who asks for them, not only those that it reads.
    """
    if not generator.requires_model_outputs:
        return {}
    overrides = dict(getattr(generator, "model_kwargs_overrides", {}))
    if run.config.output_hidden_states:
        overrides.pop("output_hidden_states", None)
    return overrides


def _as_far_as_known(tokens: torch.Tensor, context: Context) -> torch.Tensor:
    """``tokens (rows, n)`` with -1 after the first that differs from one that its row knows.

    What was drafted after another token is not worth a try.
    """
    known = torch.tensor(context.known, device=tokens.device)[:, None] - context.start
    ids = context.ids[:, context.start : context.start + tokens.shape[1]]
    is_other = (torch.arange(tokens.shape[1], device=tokens.device) < known) & (tokens != ids)
    return tokens.masked_fill(is_other.cumsum(dim=1) > 0, -1)


# --- padding ------------------------------------------------------------------------------------


def _can_strip(generator: Any) -> bool:
    """Whether it is known what of the target's outputs a kind reads.

    These kinds ignore the mask, or count positions from the ids: rows come without their padding.
    """
    return type(generator) in (MTP, DFLASH, SINGLE_POSITION)


def _padding(run: Run) -> list[int]:
    """How many pads each row of a batch starts with. At one row upstream's objects see them too."""
    mask = run.model_kwargs.get("attention_mask")
    rows = len(run.ids)
    if rows == 1 or mask is None or mask.ndim != 2:
        return [0] * rows
    counts: list[int] = (mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
    return counts


def _strip(outputs: Any, n_pads: int, is_prompt: bool) -> None:
    """Cut the padding off hidden states ``(1, length, size)`` of a prompt, and off shared keys."""
    if is_prompt and outputs.hidden_states is not None:
        outputs["hidden_states"] = tuple(
            None if layer is None else layer[:, n_pads:] for layer in outputs.hidden_states
        )
    if shared := getattr(outputs, "shared_kv_states", None):
        length = max(keys.shape[2] for keys, _ in shared.values())  # sliding windows hold less
        outputs["shared_kv_states"] = {
            kind: tuple(
                states[:, :, max(n_pads - (length - states.shape[2]), 0) :] for states in pair
            )
            for kind, pair in shared.items()
        }


# --- making them --------------------------------------------------------------------------------


def make_overridden(setup: Setup) -> FromGenerators | None:
    """What a model's own ``_get_candidate_generator`` returns."""
    hook = setup.run.model._get_candidate_generator
    if getattr(hook, "__func__", None) is GenerationMixin._get_candidate_generator:
        return None
    return _from_hook(setup)


def make_newer(setup: Setup) -> FromGenerators | None:
    """The kinds that upstream's ``_get_candidate_generator`` makes and hfgen has no drafter for."""
    if isinstance(setup.assistant_model, CandidateGenerator):
        return _made(setup, [setup.assistant_model])
    if has_foreign_generator(setup.run.config, setup.assistant_model):
        return _from_hook(setup)
    return None


def _from_hook(setup: Setup) -> FromGenerators:
    """One generator per row, made by the model's hook; upstream's kinds share their weights."""
    run, rows = setup.run, len(setup.run.ids)
    generators = [_call_hook(setup, slice(None) if rows == 1 else slice(0, 1))]
    _fill(setup, generators[0])
    for row in range(1, rows):
        if _can_strip(generators[0]):
            generators.append(_twin(generators[0]))
        else:
            generators.append(_call_hook(setup, slice(row, row + 1)))
    _check_prompt(run, generators[0])
    return FromGenerators(setup, generators)


def _made(setup: Setup, generators: list[CandidateGenerator]) -> FromGenerators:
    """A generator that the caller made."""
    rows = len(setup.run.ids)
    if rows > 1:
        kind = type(generators[0]).__name__
        if not _can_strip(generators[0]):
            raise ValueError(
                f"`assistant_model` is one {kind}, which follows one sequence, and there are {rows}. "
                "Return one from `_get_candidate_generator` of the model's class, which is called for "
                "each, or pass a `hfgen.Drafter`."
            )
        generators = [_twin(generators[0]) for _ in range(rows)]
    _check_prompt(setup.run, generators[0])
    return FromGenerators(setup, generators)


def _call_hook(setup: Setup, rows: slice) -> CandidateGenerator:
    """The generator that the model's hook makes for ``rows``."""
    run = setup.run
    model_kwargs = run.model_kwargs
    if rows != slice(None):
        model_kwargs = dict(model_kwargs)
        for name, value in model_kwargs.items():
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(run.ids):
                model_kwargs[name] = value[rows]
    encoder_input: Any = setup.encoder_input
    if encoder_input is not None and len(encoder_input) == len(run.ids):
        encoder_input = encoder_input[rows]
    generator: CandidateGenerator = run.model._get_candidate_generator(
        generation_config=run.config,
        input_ids=run.ids[rows],
        inputs_tensor=encoder_input,
        assistant_model=setup.assistant_model,
        logits_processor=run.processors if rows == slice(None) else _of_one_row(run),
        target_tokenizer=setup.tokenizer,
        assistant_tokenizer=setup.assistant_tokenizer,
        model_kwargs=model_kwargs,
    )
    return generator


def _of_one_row(run: Run) -> LogitsProcessorList:
    """The processors of a batch that can be asked about one row of it, and about drafts."""
    asked = (p for p in run.processors if is_row_wise(p) and _public_name(p) not in OF_A_BATCH)
    return LogitsProcessorList(asked)


def _public_name(processor: Any) -> str:
    return public_type(processor).__name__


def _fill(setup: Setup, generator: Any) -> None:
    """Give a Gemma assistant a number of tokens to draft if its config has none."""
    if isinstance(generator, SINGLE_POSITION) and generator.num_assistant_tokens is None:
        generator.num_assistant_tokens = setup.run.config.num_assistant_tokens or DEFAULT_TOKENS


def _twin(generator: CandidateGenerator) -> CandidateGenerator:
    """Another one for another row: the same weights, a cache of its own."""
    twin = copy.copy(generator)
    for name, value in vars(twin).items():
        if isinstance(value, Cache):
            setattr(twin, name, copy.deepcopy(value))
    return twin


def _check_prompt(run: Run, generator: Any) -> None:
    """Raise ``ValueError`` for a prompt that is not all there: of embeddings, or in a cache."""
    if not _can_strip(generator):
        return
    kind = type(generator).__name__
    embeds = run.model_kwargs.get("inputs_embeds")
    if embeds is not None and embeds.shape[1] != run.ids.shape[1]:
        raise ValueError(
            f"{kind} reads the prompt's ids, and there are only `inputs_embeds`. Pass `input_ids`."
        )
    cache = run.model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"{kind} reads the hidden states of the whole prompt, and `past_key_values` holds "
            f"{cache.get_seq_length()} tokens already. Leave it out."
        )
