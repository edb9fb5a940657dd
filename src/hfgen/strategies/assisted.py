"""Assisted (speculative) decoding: a drafter guesses, one forward of the model verifies.

A round feeds the tokens of the positions ``start - 1 … start + n - 1``, with ``start`` the length that
all rows have reached; its logits tell the tokens of ``start … start + n``. Rows accept different
numbers of tokens. A row that is ahead feeds, in the next round, tokens that it knows already
in the place of drafts; so all rows keep the cache layout of plain decoding, and any cache that can
be rolled back will do. What all rows know leaves the round as a ``Step``.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, takewhile
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.cache_utils import StaticLayer
from transformers.utils import ModelOutput

from .. import fanout, outputs, quirks, stopping
from ..caches.rollback import record_past, roll_back
from ..caches.rows import decoder_cache
from ..call import Run, Speculation, Step
from ..drafters import (
    Draft,
    DraftContext,
    Drafter,
    DraftVerdict,
    Schedule,
    Setup,
    checked,
    make_drafter,
    make_schedule,
)
from ..execution import Executor, prefill
from ..loop import commit
from ..processors import is_row_wise
from .base import InvalidScoresError, padding
from .verification import (
    GreedyMatch,
    Guess,
    SpeculativeSampling,
    UpstreamSampling,
    Verification,
)


class Assisted:
    """Verify what ``drafter`` guesses, as many tokens a round as ``schedule`` says."""

    continues_cache = True
    shares_prefill = False  # the prompt may be forwarded with a draft

    def __init__(
        self, run: Run, drafter: Drafter, schedule: Schedule, verification: Verification
    ) -> None:
        self.drafter, self.schedule, self.verification = drafter, schedule, verification
        #: Arguments of the model's forward that the drafter asks for.
        self.overrides: dict[str, Any] = getattr(drafter, "forward_arguments", {})
        self.executor = Executor(run)
        self.cache: Any = run.model_kwargs.get("past_key_values")
        _check_cache(run, self.cache)
        record_past(self.cache)
        rows, length = run.ids.shape
        self.max_length = int(run.criteria.max_length or run.config.max_length)
        self.prompt_length = length
        self.has_padding = rows == 1 or stopping.has_eos_criterion(run.criteria)
        self.pad = padding(run) if self.has_padding and rows > 1 else None
        self.is_row_wise = all(map(is_row_wise, (*run.processors, *run.criteria)))
        #: Rows advance together if functions count on it, or if rows that have ended run on.
        self.is_in_step = not self.is_row_wise or not (self.has_padding or _length_ends(run))
        self.is_at_once = _is_plain(run, verification)
        self.eos = _eos_tokens(run)
        #: ``(rows, …)``: known tokens of each row, then drafted ones.
        self.tokens = run.ids.to(torch.long, copy=True)
        self.known = [length] * rows
        #: Length at which a row has ended.
        self.ends: list[int | None] = [None] * rows
        self.is_hit = torch.zeros(rows, dtype=torch.bool, device=run.ids.device)
        self.drafted = [0] * rows
        self.draft: Draft | None = None
        self.n_new = 0
        self.is_first = True
        self.placeholders = quirks.placeholder_tokens(run.model)
        self.stats = run.speculation = Speculation()
        self.started = time.perf_counter()

    def prefill(self, run: Run) -> ModelOutput | None:
        """Nothing, since the first round takes the prompt; but some prompts go alone.

        Those that rows share, those that come in chunks, and embeddings.
        """
        is_shared = fanout.is_possible(run) and not self.overrides
        has_embeds = run.model_kwargs.get("inputs_embeds") is not None
        has_chunks = run.config.prefill_chunk_size is not None and not self.overrides
        if not (is_shared or has_chunks) and (run.is_encoder_decoder or not has_embeds):
            return None
        self.is_first = False
        self.stats.forwards += 1
        if is_shared:
            return self.executor.prefill(run)
        model_kwargs = run.model_kwargs | self.overrides if self.overrides else run.model_kwargs
        return prefill(run.model, run.ids, run.config, model_kwargs)

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext()

    # --- one round ------------------------------------------------------------------------------

    def forward(self, run: Run) -> ModelOutput:
        self.started = time.perf_counter()
        start = run.ids.shape[1]
        self.make_draft(run, start)
        candidates = self.tokens[:, : start + self.n_new]
        result = self.executor.verify(
            run, candidates, self.n_new, is_first=self.is_first, **self.overrides
        )
        self.is_first = False
        self.stats.forwards += 1
        return result

    def make_draft(self, run: Run, start: int) -> None:
        """Write drafted tokens behind the known ones; set how many tokens are new to the cache."""
        self.draft, self.drafted = None, [0] * len(self.known)
        if all(end is not None for end in self.ends):  # known to the end, not yet in the cache
            self.n_new = 0 if run.finished else self.final_length() - 1 - start
            return
        room = self.max_length - 1 - start  # the last token is not forwarded
        n = self.schedule.n_tokens
        is_always_asked = getattr(self.drafter, "is_always_asked", False)
        overshoots = getattr(self.drafter, "overshoots", False) and room > 0
        if not (overshoots or is_always_asked):
            n = min(n, room)
        n = int(min(n, _room_in_cache(self.cache, start)))
        if n > 0:
            known = tuple(
                k if end is None else start + n
                for k, end in zip(self.known, self.ends, strict=True)
            )
            is_done = tuple(end is not None for end in self.ends)
            self.reserve(start + n)
            context = DraftContext(self.tokens, known, is_done, start, n)
            self.draft = checked(self.drafter, self.drafter.draft(context), context)
        if self.draft is not None:
            tokens = self.draft.tokens.to(self.tokens.device)
            if self.placeholders and self.is_first:  # it would look for their features
                is_media = torch.isin(tokens, tokens.new_tensor(self.placeholders))
                tokens = tokens.masked_fill(is_media, -1)
            self.place(tokens, start)
        reached = (
            k + d
            for k, d, end in zip(self.known, self.drafted, self.ends, strict=True)
            if end is None
        )
        self.n_new = max(0, min(max(reached) - start, max(n, 0)))

    def place(self, tokens: torch.Tensor, start: int) -> None:
        """Write ``tokens (rows, n)`` from ``start`` on, where rows know nothing better."""
        for row, drafted in enumerate(tokens.tolist()):
            if self.ends[row] is not None:
                continue
            lead = self.known[row] - start
            n_drafted = len(list(takewhile(lambda token: token >= 0, drafted[lead:])))
            self.drafted[row] = n_drafted
            span = slice(lead, lead + n_drafted)
            self.tokens[row, start:][span] = tokens[row, span]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens a row."""
        rows, capacity = self.tokens.shape
        if length > capacity:
            more = self.tokens.new_zeros(
                rows, max(length, min(2 * capacity, self.max_length)) - capacity
            )
            for row, end in enumerate(self.ends):
                if end is not None and self.pad is not None:
                    more[row] = self.pad
            self.tokens = torch.cat([self.tokens, more], dim=1)

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        start = run.ids.shape[1]
        width = self.n_new + 1
        self.reserve(start + width)
        logits = model_outputs.logits[:, -width:]
        logits = logits.to(copy=True, dtype=torch.float32, device=run.ids.device)
        before, had_ended = list(self.known), [end is not None for end in self.ends]
        verify = self.verify_at_once if self.is_at_once else self.verify
        verified = verify(run, logits)
        n_advanced = self.advanced(start, had_ended, width)
        roll_back(self.cache, width - n_advanced)
        self.observe(run, before, n_advanced)
        commit(run, model_outputs, num_new_tokens=n_advanced)
        new = self.tokens[:, start : start + n_advanced]
        run.ids = self.tokens[:, : start + n_advanced]
        scores = verified[:n_advanced]
        if run.scores is not None:
            run.scores += scores
        if (see := getattr(self.drafter, "see", None)) is not None:
            unverified = logits[:, len(verified) :].unbind(dim=1)
            see(run, model_outputs, (*verified, *unverified), n_advanced)
        return Step(
            tokens=new,
            scores=scores,
            logits=tuple(logits[:, i] for i in range(n_advanced)),
            streamed=lambda: new,
            **outputs.observe_each(run, model_outputs, width, n_advanced),
        )

    def advanced(self, start: int, had_ended: list[bool], width: int) -> int:
        """By how many tokens all rows have advanced.

        No further than where a row has just ended: it fed drafts after that, and not its padding.
        """
        lengths = [k for k, end in zip(self.known, self.ends, strict=True) if end is None]
        lengths += [
            end
            for end, had in zip(self.ends, had_ended, strict=True)
            if end is not None and not had
        ]
        return min(min(lengths or [self.final_length()]) - start, width)

    def final_length(self) -> int:
        """The length of the result, once all rows have ended."""
        return max(end for end in self.ends if end is not None)

    def observe(self, run: Run, before: list[int], n_advanced: int) -> None:
        """Tell drafter and schedule what became of the round."""
        gained = [k - b for k, b in zip(self.known, before, strict=True)]
        accepted = [min(max(g - 1, 0), d) for g, d in zip(gained, self.drafted, strict=True)]
        verdict = DraftVerdict(tuple(self.drafted), tuple(accepted), run.ids.shape[1] + n_advanced)
        if self.draft is not None:
            self.drafter.observe(verdict)
            self.stats.rounds += 1
        self.schedule.observe(verdict, n_advanced, time.perf_counter() - self.started)
        self.stats.drafted += sum(self.drafted)
        self.stats.accepted += sum(accepted)
        self.stats.generated += sum(gained)

    # --- verification ---------------------------------------------------------------------------

    def verify(self, run: Run, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take ``logits (rows, width, vocab)`` position by position; returns the processed scores.

        Processors and criteria are asked as in plain decoding: once for each length, before and
        after its token. Those that look at each row by itself are also asked about rows that are
        further ahead or behind; these answers are left aside.
        """
        start, width = run.ids.shape[1], logits.shape[1]
        rows = _Rows(self, start, logits.device)
        has_ended = ~rows.is_open
        draft_logits = None if self.draft is None else self.draft.logits
        self.verification.begin(logits, width - 1, draft_logits is not None)
        all_scores: list[torch.Tensor] = []
        for position in range(width):
            raw = logits[:, position]
            is_active = rows.is_open & (rows.n_known == position)
            if not is_active.any():
                # Scores of known tokens are wanted if all rows have got here, and so will return them.
                is_behind = ~has_ended & (rows.n_known <= position)
                if run.scores is None or is_behind.any():
                    all_scores.append(raw)
                else:
                    all_scores.append(self.processed(run, raw, start + position))
                continue
            scores = self.processed(run, raw, start + position)
            all_scores.append(scores)
            column = self.tokens[:, start + position]
            guess = Guess(column, is_active & (position < rows.limit), _at(draft_logits, position))
            tokens, is_accepted = self.verification.choose(position, scores, guess)
            self.check(tokens, scores, is_active, start + position)
            column.copy_(torch.where(is_active, tokens, column))
            rows.n_known += is_active
            so_far = None if run.scores is None else (*run.scores, *all_scores)
            ends = is_active & run.criteria(self.ids(start + position + 1), so_far)
            self.end(ends, start + position + 1)
            rows.is_open &= is_accepted | ~is_active
            rows.is_open &= torch.tensor([end is None for end in self.ends], device=ends.device)
            if not rows.is_open.any():
                break
            if self.is_in_step and (ends.any() or not is_accepted[is_active].all()):
                break
        self.known = (start + rows.n_known).tolist()
        return tuple(all_scores)

    def processed(self, run: Run, logits: torch.Tensor, length: int) -> torch.Tensor:
        """Scores ``(rows, vocab)`` of the position after ``length`` tokens."""
        if not run.processors:
            return logits
        logits = logits.clone() if run.config.output_logits else logits
        return run.processors(self.ids(length), logits)

    def verify_at_once(self, run: Run, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``verify`` for greedy decoding that only an EOS or the length ends: all positions together."""
        start, width = run.ids.shape[1], logits.shape[1]
        window = self.tokens[:, start : start + width]
        choice = logits.argmax(dim=-1)  # of a position with a NaN: the index of that NaN
        is_invalid = logits.gather(2, choice[:, :, None]).squeeze(2).isnan()
        chosen, guessed, invalid = torch.stack([choice, window, is_invalid.long()]).tolist()
        longest = min(c.max_length for c in run.criteria if isinstance(c, MaxLengthCriteria))
        bad = []
        for row, end in enumerate(self.ends):
            position = self.known[row] - start
            if end is not None or position >= width:
                continue
            limit, is_accepted = position + self.drafted[row], True
            while is_accepted and position < width and self.ends[row] is None:
                if invalid[row][position]:
                    bad.append(row)
                    break
                token = chosen[row][position]
                is_accepted = position < limit and token == guessed[row][position]
                guessed[row][position] = token
                position += 1
                if token in self.eos or start + position >= longest:
                    self.ends[row] = start + position
            self.known[row] = start + position
        if bad:
            raise InvalidScoresError(bad, start - self.prompt_length)
        window.copy_(torch.tensor(guessed))
        for row, end in enumerate(self.ends):
            if end is not None and end > start:
                self.end_row(row, end)
        return tuple(logits.unbind(dim=1))

    def ids(self, length: int) -> torch.Tensor:
        """All rows up to ``length``; functions of the caller's may count on ids that are contiguous."""
        ids = self.tokens[:, :length]
        return ids if self.is_row_wise else ids.contiguous()

    def end(self, ends: torch.Tensor, length: int) -> None:
        """Let the rows in ``ends (rows,)`` end at ``length``.

        Without an EOS token there is no padding either: rows run on until all are to end.
        """
        if not self.has_padding:
            self.is_hit |= ends
            if self.is_hit.all():
                self.ends = [length] * len(self.ends)
            return
        for row in ends.nonzero().flatten().tolist():
            self.end_row(row, length)

    def end_row(self, row: int, length: int) -> None:
        self.ends[row] = length
        if self.pad is not None:
            self.tokens[row, length:] = self.pad

    def check(
        self, tokens: torch.Tensor, scores: torch.Tensor, is_active: torch.Tensor, length: int
    ) -> None:
        """Raise ``InvalidScoresError`` if a row's choice rests on scores that are NaN."""
        is_invalid = is_active & scores.gather(1, tokens[:, None]).isnan().squeeze(1)
        if is_invalid.any():
            rows = is_invalid.nonzero().flatten().tolist()
            raise InvalidScoresError(rows, length - self.prompt_length)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self.schedule.finish()
        return {"sequences": run.ids.contiguous()}

    def stop(self, run: Run) -> None:
        has_ended = all(end is not None for end in self.ends)
        run.finished = has_ended and run.ids.shape[1] == self.final_length()


class _Rows:
    """Where each row is in a round: ``(rows,)`` tensors, counted from the common length on.

    ``n_known``: tokens known; ``limit``: the first position without a draft; ``is_open``: still
    being verified.
    """

    def __init__(self, state: Assisted, start: int, device: torch.device) -> None:
        self.n_known = torch.tensor(state.known, device=device) - start
        self.limit = self.n_known + torch.tensor(state.drafted, device=device)
        self.is_open = torch.tensor([end is None for end in state.ends], device=device)


def _at(logits: torch.Tensor | None, position: int) -> torch.Tensor | None:
    """The drafter's scores ``(rows, vocab)`` of a position, if it gave any."""
    return None if logits is None or position >= logits.shape[1] else logits[:, position]


def _length_ends(run: Run) -> bool:
    """Whether nothing but the length ends rows, and so all of them together."""
    return all(isinstance(criterion, MaxLengthCriteria) for criterion in run.criteria)


def _eos_tokens(run: Run) -> set[int]:
    """The tokens that end a row."""
    ends = (c.eos_token_id.tolist() for c in run.criteria if isinstance(c, EosTokenCriteria))
    return set(chain.from_iterable(ends))


def _is_plain(run: Run, verification: Verification) -> bool:
    """Whether tokens depend on logits alone, and ends on tokens and length alone."""
    plain = (MaxLengthCriteria, EosTokenCriteria)
    return (
        isinstance(verification, GreedyMatch)
        and verification.weight is None
        and not run.processors
        and all(type(criterion) in plain for criterion in run.criteria)
        and any(type(criterion) is MaxLengthCriteria for criterion in run.criteria)
    )


def _check_cache(run: Run, cache: Any) -> None:
    """Raise before the first forward if what is rejected could not be taken back, or not fit in."""
    if cache is None:
        raise RuntimeError(
            f"Assisted decoding needs a cache, and {type(run.model).__name__} has none under "
            "`past_key_values`."
        )
    if not hasattr(cache, "crop"):
        raise ValueError(
            f"Drafted tokens cannot be taken back out of a {type(cache).__name__}: assisted decoding "
            "does not work with it."
        )
    for layer in getattr(decoder_cache(cache), "layers", ()):
        if isinstance(layer, StaticLayer) and fanout.is_foreign_part(layer):
            raise ValueError(
                f"{type(run.model).__name__} has a static cache of its own kind "
                f"({type(layer).__name__}), out of which drafted tokens cannot be taken back. Use a "
                "dynamic cache."
            )
    room = _room_in_cache(cache, 0)
    for name in ("prompt_lookup_num_tokens", "num_assistant_tokens"):
        if (n := getattr(run.config, name)) is not None and n > room:
            raise ValueError(
                f"`{name}`={n} does not fit into the static cache, which holds {room:.0f} tokens."
            )


def _room_in_cache(cache: Any, start: int) -> float:
    """How many more tokens than ``start`` a cache of fixed length holds."""
    lengths = [
        layer.max_cache_len
        for layer in getattr(decoder_cache(cache), "layers", ())
        if isinstance(layer, StaticLayer) and not layer.is_sliding
    ]
    return min(lengths, default=math.inf) - start


def assisted(run: Run, setup: Setup) -> Assisted:
    """Assisted decoding with the drafter, schedule and verification that the call asks for."""
    drafter = make_drafter(setup)
    config = run.config
    verification: Verification = GreedyMatch(config.assistant_ensemble_weight)
    if config.do_sample:
        kind = UpstreamSampling if setup.is_exact else SpeculativeSampling
        verification = kind(config.assistant_ensemble_weight)
    return Assisted(run, drafter, make_schedule(setup, drafter), verification)
