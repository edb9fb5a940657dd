"""Drafts by transformers' own candidate generators, for the kinds that its models define.

Those are: heads that predict several tokens (``use_mtp=True``); assistants that denoise a block of
tokens (``speculation_type="dflash"``); Gemma's assistants, which attend to the target's keys; and any
``CandidateGenerator`` passed as ``assistant_model`` or returned by ``_get_candidate_generator``. At
one row the object is asked what, and when, upstream's loop would ask it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import candidate_generator as kinds
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from ...logits.processors import for_drafts, is_row_wise
from ...memory.batch import row_dim
from ...running.row_states import is_replaced
from ...state.call import ModelKwargs
from ...state.run import Run
from .base import Draft, DraftContext, Drafter, Setup, draft_of_rows
from .schedule import DEFAULT_TOKENS, Constant

#: More than a generator drafts at once, unless the call has room for still more.
MANY_TOKENS = 128


def _kind(name: str) -> Any:
    """A class of upstream's, or one that nothing is an instance of in a release without it."""
    return getattr(kinds, name, type(name, (), {}))


MTP = _kind("MTPCandidateGenerator")
DFLASH = _kind("DFlashTokenCandidateGenerator")
SINGLE_POSITION = _kind("SinglePositionMultiTokenCandidateGenerator")


class FromGenerators(Drafter):
    """Drafts what upstream's ``CandidateGenerator`` objects draft, one of them for each row.

    Each is asked about its row up to the length that all rows have reached.
    """

    def __init__(self, setup: Setup, generators: list[Any]) -> None:
        self.setup, self.generators = setup, generators
        first = generators[0]
        #: Drafts may go beyond the last token, and are made for it too, where draws depend on them.
        self.overshoots = self.is_always_asked = setup.is_exact
        room = setup.max_length - setup.run.ids.shape[1]
        self.schedule = Constant(max(room, MANY_TOKENS))
        #: Whether ``get_candidates`` takes what the target model returned in the last round.
        self.reads_outputs = bool(getattr(first, "requires_model_outputs", False))
        if self.reads_outputs:
            self.forward_arguments = dict(getattr(first, "model_kwargs_overrides", {}))
            if setup.run.config.output_hidden_states:  # all, and not only those that it reads
                self.forward_arguments.pop("output_hidden_states", None)
        self.outputs: ModelOutput | None = None
        self.n_matches, self.is_prompt = 0, False
        self.padding = _padding(setup.run) if _is_known(first) else [0] * len(generators)

    def draft(self, context: DraftContext) -> Draft | None:
        rows: list[list[int]] = []
        logits: list[Any] = []
        for row, (known, is_done) in enumerate(zip(context.known, context.is_done, strict=True)):
            if is_done:
                rows.append([])
                continue
            drafted, scores = self.ask(row, context)
            tokens, lead = drafted.tolist(), known - context.start
            # What was drafted after another token than the row knows is not worth a try.
            is_alike = tokens[:lead] == context.ids[row, context.start : known].tolist()
            rows.append(tokens[lead:] if is_alike else [])
            logits.append(scores)
        # Gemma's tokens are the likeliest, not drawn: their scores are for upstream's draws alone.
        is_drawn = not isinstance(self.generators[0], SINGLE_POSITION)
        is_used = is_drawn or self.setup.is_exact or not self.setup.run.config.do_sample
        if not (is_used and self.setup.needs_logits) or any(scores is None for scores in logits):
            return draft_of_rows(rows, context)
        padded = pad_sequence(logits, batch_first=True)
        is_open = torch.tensor([not is_done for is_done in context.is_done], device=padded.device)
        all_logits = padded.new_zeros(len(rows), *padded.shape[1:])
        all_logits[is_open] = padded
        return draft_of_rows(rows, context, all_logits)

    def ask(self, row: int, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens ``(n,)`` drafted for a row, and their scores ``(n, vocab)`` if there are any."""
        generator = self.generators[row]
        ids = context.ids[row : row + 1, self.padding[row] : context.start]
        arguments: dict[str, Any] = {}
        if self.reads_outputs:
            arguments = {
                "model_kwargs": self.model_kwargs(row),
                "model_outputs": self.row_outputs(row),
                "is_first_iteration": self.outputs is None,
                "n_last_matches": self.n_matches,
            }
        candidates, logits = generator.get_candidates(ids, **arguments)
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

    def model_kwargs(self, row: int) -> ModelKwargs:
        """The target's arguments for a row; a mask and positions are among them even if plain."""
        run, n_pads = self.setup.run, self.padding[row]
        kwargs = dict(run.model_kwargs)
        if not run.is_encoder_decoder:
            kwargs.setdefault("attention_mask", None)  # which is: there is no padding
            if kwargs.get("position_ids") is None:
                positions = torch.arange(run.ids.shape[1], device=run.ids.device)
                kwargs["position_ids"] = positions.expand_as(run.ids)
        if len(self.generators) == 1:
            return kwargs
        kwargs = _of_row(kwargs, row, len(self.generators))
        for name in ("attention_mask", "position_ids") if n_pads else ():
            kwargs[name] = kwargs[name][..., n_pads:]
        return kwargs

    def row_outputs(self, row: int) -> ModelOutput | None:
        """What the target model returned in the last round for a row, without its padding."""
        if self.outputs is None or len(self.generators) == 1:
            return self.outputs
        outputs: Any = _of_row(self.outputs, row, len(self.generators))
        n_pads = self.padding[row]
        if n_pads and self.is_prompt and outputs.hidden_states is not None:  # (1, length, size)
            outputs["hidden_states"] = tuple(
                None if layer is None else layer[:, n_pads:] for layer in outputs.hidden_states
            )
        if n_pads and (shared := getattr(outputs, "shared_kv_states", None)):
            length = max(keys.shape[2] for keys, _ in shared.values())  # sliding windows hold less
            outputs["shared_kv_states"] = {
                kind: tuple(kv[:, :, max(n_pads - (length - kv.shape[2]), 0) :] for kv in pair)
                for kind, pair in shared.items()
            }
        return outputs

    def see(
        self,
        run: Run,
        model_outputs: ModelOutput,
        scores: tuple[torch.Tensor, ...],
        n_advanced: int,
    ) -> None:
        """Keep what the generators are told about the round with the next call."""
        self.is_prompt = self.outputs is None
        self.outputs, self.n_matches = model_outputs, n_advanced - 1
        idle: Any = CandidateGenerator.update_candidate_strategy
        for row, generator in enumerate(self.generators):
            if getattr(type(generator), "update_candidate_strategy", idle) is not idle:
                row_scores = torch.stack([score[row] for score in scores])[None]
                ids = run.ids[row : row + 1]
                generator.update_candidate_strategy(ids, row_scores, self.n_matches)


def _of_row(value: Any, row: int, rows: int, name: str = "") -> Any:
    """``value`` with all tensors in it cut to one row; ``None`` for a cache, which holds all rows."""
    if isinstance(value, Mapping):
        items = {key: _of_row(item, row, rows, key) for key, item in value.items()}
        return type(value)(**items) if isinstance(value, ModelOutput) else items
    if isinstance(value, tuple | list):
        kind = list if isinstance(value, list) else tuple
        return kind(_of_row(item, row, rows, name) for item in value)
    if not isinstance(value, torch.Tensor):
        return None if isinstance(value, Cache) else value
    dim = row_dim(name, value)
    is_of_rows = value.ndim > dim and value.shape[dim] == rows
    return value.narrow(dim, row, 1) if is_of_rows else value


def _is_known(generator: Any) -> bool:
    """Whether it is one of upstream's newer kinds, whose rows have to come without padding."""
    return type(generator) in (MTP, DFLASH, SINGLE_POSITION)


def _padding(run: Run) -> list[int]:
    """How many pads each row of a batch starts with. At one row upstream's objects see them too."""
    mask = run.model_kwargs.get("attention_mask")
    rows = len(run.ids)
    if rows == 1 or mask is None or mask.ndim != 2:
        return [0] * rows
    counts: list[int] = (mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
    return counts


def has_own_hook(model: Any) -> bool:
    """Whether ``_get_candidate_generator`` of ``model`` is not transformers' own."""
    hook = getattr(model._get_candidate_generator, "__func__", None)
    is_inherited = hook is GenerationMixin._get_candidate_generator
    return not is_inherited or is_replaced("_get_candidate_generator")


def from_hook(setup: Setup) -> FromGenerators:
    """What the model's hook makes: one generator, or one for each row."""
    first = _call_hook(setup)
    if isinstance(first, SINGLE_POSITION) and first.num_assistant_tokens is None:
        first.num_assistant_tokens = setup.run.config.num_assistant_tokens or DEFAULT_TOKENS
    if _is_known(first):
        return one_per_row(setup, first)
    others = (_call_hook(setup, row) for row in range(1, len(setup.run.ids)))
    return FromGenerators(setup, [first, *others])


def one_per_row(setup: Setup, generator: Any) -> FromGenerators:
    """From one generator that is there, twins for all rows: the same weights, caches of their own."""
    run, rows = setup.run, len(setup.run.ids)
    kind = type(generator).__name__
    cache = run.model_kwargs.get("past_key_values")
    if not _is_known(generator) and rows > 1:
        raise ValueError(
            f"`assistant_model` is one {kind}, which follows one sequence, and "
            f"there are {rows}. Return one from `_get_candidate_generator` of the model's class, "
            "which is called for each, or pass a `hfgen.Drafter`."
        )
    if _is_known(generator):  # the prompt has to be all there
        if run.model_kwargs.get("inputs_embeds") is not None and not run.is_encoder_decoder:
            raise ValueError(
                f"{kind} reads the ids of the prompt: pass `input_ids` in place of `inputs_embeds`."
            )
        if cache is not None and (n_cached := cache.get_seq_length()) > 0:
            raise ValueError(
                f"{kind} reads the hidden states of the whole prompt, and `past_key_values` holds "
                f"{n_cached} tokens already. Leave it out."
            )
    if rows == 1:
        return FromGenerators(setup, [generator])
    twins = []
    for row, n_pads in enumerate(_padding(run)):
        twin = copy.copy(generator)
        caches = {k: copy.deepcopy(v) for k, v in vars(twin).items() if isinstance(v, Cache)}
        vars(twin).update(caches)
        if hasattr(twin, "logits_processor"):
            twin.logits_processor = _ForRow(run, row, n_pads)
        twins.append(twin)
    return FromGenerators(setup, twins)


def _call_hook(setup: Setup, row: int = 0) -> Any:
    """The generator that the model's hook makes: for all of the call, or for a row of a batch."""
    run, rows = setup.run, len(setup.run.ids)
    model_kwargs, encoder_input = run.model_kwargs, setup.encoder_input
    processors = LogitsProcessorList(for_drafts(run.processors))
    if rows > 1:
        processors = LogitsProcessorList([_ForRow(run, row)])
        model_kwargs = _of_row(model_kwargs, row, rows)
        if encoder_input is not None and len(run.ids) % len(encoder_input) == 0:
            row_of_batch = row * len(encoder_input) // rows
            encoder_input = encoder_input[row_of_batch : row_of_batch + 1]
    return run.model._get_candidate_generator(
        generation_config=run.config,
        input_ids=run.ids[row : row + 1],
        inputs_tensor=encoder_input,
        assistant_model=setup.assistant_model,
        logits_processor=processors,
        target_tokenizer=setup.tokenizer,
        assistant_tokenizer=setup.assistant_tokenizer,
        model_kwargs=model_kwargs,
    )


class _ForRow(LogitsProcessor):
    """The processors of a batch, asked about one row of it and about drafts.

    Some hold something of each row, so each row keeps its place. Those with a state are left out.
    """

    def __init__(self, run: Run, row: int, n_pads: int = 0) -> None:
        self.processors = LogitsProcessorList(for_drafts(filter(is_row_wise, run.processors)))
        self.row, self.rows = row, len(run.ids)
        self.pads = run.ids[row : row + 1, :n_pads]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids (1, length)`` without the pads, ``scores (1, vocab)``."""
        ids = torch.cat([self.pads, input_ids], dim=1).expand(self.rows, -1)
        processed: Any = self.processors(ids, scores.repeat(self.rows, 1))
        return processed[self.row : self.row + 1]
