"""Assisted (speculative) decoding: a drafter guesses, one forward of the model verifies.

A round feeds the tokens of the positions ``start - 1 … start + n - 1``, with ``start`` the length that
all rows have reached; its logits tell the tokens of ``start … start + n``. Rows accept different
numbers of tokens. A row that is ahead feeds, in the next round, tokens that it knows already
in the place of drafts; so all rows keep the cache layout of plain decoding, and any cache that can
be rolled back will do. What all rows know leaves the round as a ``Step``.

A round of three rows. All know 8 tokens (``start`` = 8), row 1 knows 10; the cache holds 7 columns::

                 known  column 7 │ 8   9   10  11
    row 0          8       31    │ 41  42  43  44     drafts 41 42 43 44
    row 1         10       32    │ 51  52  53  ·      knows 51 52, drafts 53
    row 2          8       33    │ 61  62  63  64     drafts 61 62 63 64

Columns 7 to 11 are fed, 5 tokens a row. The model's choices for the positions 8 to 12::

    row 0      41  42  43  44  45     4 drafts accepted, and one more token: known 13
    row 1       ·   ·  59   ·   ·     the draft 53 is rejected, 59 is its token: known 11
    row 2      61  70   ·   ·   ·     61 accepted, 62 rejected, 70 is its token: known 10

The least of these is 10: all rows advance by 2. Of the 5 columns fed, the cache keeps 2 (it holds 9), and
takes 3 back. The step's tokens are 41 42, 51 52 and 61 70. The next round starts at 10: row 0 feeds 43, 44
and 45 again, in place of drafts, and row 1 feeds 59.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from .. import families, outputs, stopping
from ..caches import layers
from ..caches.layers import roll_back
from ..call import Run, Speculation, Step
from ..drafters import (
    Acceptance,
    Draft,
    DraftContext,
    Drafter,
    Schedule,
    Setup,
    make_drafter,
    make_schedule,
)
from ..drafters.base import check, check_logits, n_filled, name_of
from ..execution import Executor, prefill, shared_prompt
from ..loop import commit
from ..processors import is_row_wise
from .base import InvalidScoresError, padding
from .verification import (
    DraftColumn,
    GreedyMatch,
    SpeculativeSampling,
    UpstreamSampling,
    Verification,
)


class Assisted:
    """Verify what ``drafter`` guesses, as many tokens a round as ``schedule`` says."""

    continues_cache = rolls_back = True
    shares_prefill = False  # the prompt may be forwarded with a draft

    def __init__(
        self, run: Run, drafter: Drafter, schedule: Schedule, verification: Verification
    ) -> None:
        self.drafter, self.schedule, self.verification = drafter, schedule, verification
        #: Arguments of the model's forward that the drafter asks for.
        self.overrides = drafter.forward_arguments
        self.executor = Executor(run)
        self.cache: Any = run.model_kwargs.get("past_key_values")
        _check_cache(run, self.cache)
        rows, length = run.ids.shape
        device = run.ids.device
        self.max_length = int(run.criteria.max_length or run.config.max_length)
        self.prompt_length = length
        self.has_padding = rows == 1 or stopping.has_eos_criterion(run.criteria)
        self.pad = padding(run) if self.has_padding and rows > 1 else None
        self.is_row_wise = all(map(is_row_wise, (*run.processors, *run.criteria)))
        #: Rows advance together if functions count on it, or if rows that have ended run on.
        self.is_in_step = not self.is_row_wise or not (self.has_padding or _length_ends(run))
        #: Whether a look at a tensor after every position is free, or is asked for anyway.
        self.may_look = device.type == "cpu" or self.is_in_step
        self.is_at_once = _is_plain(run, verification)
        self.eos = _eos_tokens(run)
        embedding = families.token_embedding(run.model)
        self.vocab = math.inf if embedding is None else embedding.num_embeddings

        # What rows are, on the device: known tokens, then drafted ones ``(rows, …)``; the length
        # known of each; the length at which it has ended, or -1; whether it met a criterion.
        self.tokens = run.ids.to(torch.long, copy=True)
        self.device_known = torch.full((rows,), length, device=device)
        self.device_ends = torch.full((rows,), -1, device=device)
        self.is_hit = torch.zeros(rows, dtype=torch.bool, device=device)
        #: ``(rows, n_new)``: drafted tokens of the round, -1 where there is none.
        self.guesses = self.tokens[:, :0]
        # The same on the host, written by the one read of a round.
        self.host_tokens = self.tokens.cpu()
        self.known = [length] * rows
        self.ends: list[int | None] = [None] * rows
        self.drafted = [0] * rows
        self.draft: Draft | None = None
        self.n_new = 0
        self.is_first = True
        self.placeholders = families.placeholder_tokens(run.model)
        self.stats = run.speculation = Speculation()

    def prefill(self, run: Run) -> ModelOutput | None:
        """Nothing, since the first round takes the prompt; but some prompts go alone.

        Those that rows share, those that come in chunks, and embeddings.
        """
        is_shared = shared_prompt.is_possible(run) and not self.overrides
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
        return layers.recording(self.cache)

    # --- one round ------------------------------------------------------------------------------

    def forward(self, run: Run) -> ModelOutput:
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
        self.draft, self.n_new = None, 0
        nothing = self.tokens[:, :0]
        if all(end is not None for end in self.ends):  # known to the end, not yet in the cache
            self.n_new = 0 if run.finished else self.final_length() - 1 - start
            self.place(nothing, start)
            return
        room = self.max_length - 1 - start  # the last token is not forwarded
        n = self.schedule.n_tokens
        if not self.drafter.is_always_asked and not (self.drafter.overshoots and room > 0):
            n = min(n, room)
        n = int(min(n, layers.capacity(self.cache) - start))
        tokens, filled = self.ask(start, n) if n > 0 else (nothing, [0] * len(nothing))
        ahead = (
            max(known - start, length)
            for known, length, end in zip(self.known, filled, self.ends, strict=True)
            if end is None
        )
        self.n_new = max(0, min(max(ahead), n))
        self.place(tokens, start)

    def ask(self, start: int, n: int) -> tuple[torch.Tensor, Sequence[int]]:
        """Up to ``n`` tokens a row from ``start`` on, ``(rows, …)``, and how many columns each fills."""
        is_done = tuple(end is not None for end in self.ends)
        known = tuple(start + n if done else k for k, done in zip(self.known, is_done, strict=True))
        self.reserve(start + n)
        device_known = torch.where(self.device_ends < 0, self.device_known, start + n)
        context = DraftContext(
            self.tokens, known, is_done, start, n, self.host_tokens, device_known
        )
        name = name_of(self.drafter)
        self.draft = check(name, self.drafter.draft(context), context)
        if self.draft is None:
            return self.tokens[:, :0], [0] * len(known)
        tokens, lengths = self.draft.tokens, self.draft.lengths
        if self.placeholders and self.is_first:  # the model would look for their features
            is_media = torch.isin(tokens, tokens.new_tensor(self.placeholders))
            tokens, lengths = tokens.masked_fill(is_media, -1), None
        filled = (
            n_filled(name, tokens.tolist(), context, self.vocab) if lengths is None else lengths
        )
        return tokens.to(self.tokens.device), filled

    def place(self, tokens: torch.Tensor, start: int) -> None:
        """Write drafted ``tokens (rows, n)`` from ``start`` on: padding where a row has ended, and
        nothing where it knows better. Sets ``guesses``.
        """
        self.reserve(start + self.n_new)
        positions = torch.arange(start, start + self.n_new, device=self.tokens.device)
        window = self.tokens[:, start : start + self.n_new]
        has_ended = (self.device_ends >= 0)[:, None]
        tokens = tokens[:, : self.n_new]
        tokens = torch.nn.functional.pad(tokens, (0, self.n_new - tokens.shape[1]), value=-1)
        is_new = (positions >= self.device_known[:, None]) & ~has_ended
        is_over = ((tokens < 0) & is_new).cumsum(dim=1) > 0
        self.guesses = tokens.masked_fill(~is_new | is_over, -1)
        window.copy_(torch.where(self.guesses >= 0, self.guesses, window))
        self.write_padding(start, self.n_new)

    def write_padding(self, start: int, width: int) -> None:
        """Pad rows behind their end, in ``width`` columns from ``start`` on."""
        if self.pad is None:
            return
        window, ends = self.tokens[:, start : start + width], self.device_ends[:, None]
        positions = torch.arange(start, start + width, device=window.device)
        window.copy_(torch.where((ends >= 0) & (positions >= ends), self.pad, window))

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens a row."""
        capacity = self.tokens.shape[1]
        if length > capacity:
            more = max(length, min(2 * capacity, self.max_length)) - capacity
            is_shared = self.host_tokens is self.tokens
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))
            self.host_tokens = (
                self.tokens if is_shared else torch.nn.functional.pad(self.host_tokens, (0, more))
            )

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        start = run.ids.shape[1]
        width = self.n_new + 1
        self.reserve(start + width)
        logits = model_outputs.logits[:, -width:]
        logits = logits.to(copy=True, dtype=torch.float32, device=run.ids.device)
        if self.draft is not None:
            check_logits(name_of(self.drafter), self.draft, logits.shape[-1])
        before, had_ended = list(self.known), [end is not None for end in self.ends]
        verify = self.verify_at_once if self.is_at_once else self.verify
        verified, invalid_at = verify(run, logits)
        self.read(start, width, invalid_at)
        n_advanced = self.advanced(start, had_ended, width)
        roll_back(self.cache, width - n_advanced)
        self.observe(run, before, n_advanced)
        commit(run, model_outputs, num_new_tokens=n_advanced)
        new = self.tokens[:, start : start + n_advanced]
        run.ids = self.tokens[:, : start + n_advanced]
        scores = verified[:n_advanced]
        if run.scores is not None:
            run.scores += scores
        unverified = logits[:, len(verified) :].unbind(dim=1)
        self.drafter.see(run, model_outputs, (*verified, *unverified), n_advanced)
        return Step(
            tokens=new,
            scores=scores,
            logits=tuple(logits[:, i] for i in range(n_advanced)),
            settled=lambda: new,
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
        verdict = Acceptance(tuple(self.drafted), tuple(accepted), run.ids.shape[1] + n_advanced)
        if self.draft is not None:
            self.drafter.observe(verdict)
            self.stats.rounds += 1
        self.schedule.observe(verdict, n_advanced, self.n_new)
        self.stats.drafted += sum(self.drafted)
        self.stats.accepted += sum(accepted)
        self.stats.generated += sum(gained)

    # --- verification ---------------------------------------------------------------------------

    def verify(
        self, run: Run, logits: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Take ``logits (rows, width, vocab)`` position by position.

        Returns the processed scores, and the lengths at which those of a row were invalid.

        Processors and criteria are asked as in plain decoding: once for each length, before and
        after its token. Those that look at each row by itself are also asked about rows that are
        further ahead or behind; these answers are left aside.
        """
        start, width = run.ids.shape[1], logits.shape[1]
        had_ended = self.device_ends >= 0
        is_open = ~had_ended
        invalid_at = torch.full_like(self.device_ends, -1)
        draft_logits = None if self.draft is None else self.draft.logits
        if draft_logits is not None:
            draft_logits = draft_logits.to(logits.device)
        self.verification.begin(logits, width - 1, draft_logits is not None)
        all_scores: list[torch.Tensor] = []
        for position in range(width):
            raw, length = logits[:, position], start + position
            is_active = is_open & (self.device_known == length)
            if self.may_look and not is_active.any():
                # Scores of known tokens are wanted if all rows have got here, and so will return them.
                is_behind = ~had_ended & (self.device_known <= length)
                is_wanted = run.scores is not None and not is_behind.any()
                all_scores.append(self.processed(run, raw, length) if is_wanted else raw)
                continue
            scores = self.processed(run, raw, length)
            all_scores.append(scores)
            column = self.tokens[:, length]
            is_drafted = torch.zeros_like(is_active)
            if position < self.n_new:
                is_drafted = is_active & (self.guesses[:, position] >= 0)
            guess = DraftColumn(column, is_drafted, _at(draft_logits, position))
            tokens, is_accepted = self.verification.choose(position, scores, guess)
            is_invalid = is_active & scores.gather(1, tokens[:, None]).isnan().squeeze(1)
            invalid_at = torch.where(is_invalid & (invalid_at < 0), length, invalid_at)
            column.copy_(torch.where(is_active, tokens, column))
            self.device_known = self.device_known + is_active
            so_far = None if run.scores is None else (*run.scores, *all_scores)
            ends = is_active & run.criteria(self.ids(length + 1), so_far)
            self.end(ends, length + 1)
            is_open = is_open & (is_accepted | ~is_active) & (self.device_ends < 0)
            if self.may_look and not is_open.any():
                break
            if self.is_in_step and (ends.any() or not is_accepted[is_active].all()):
                break
        return tuple(all_scores), invalid_at

    def processed(self, run: Run, logits: torch.Tensor, length: int) -> torch.Tensor:
        """Scores ``(rows, vocab)`` of the position after ``length`` tokens."""
        if not run.processors:
            return logits
        logits = logits.clone() if run.config.output_logits else logits
        return run.processors(self.ids(length), logits)

    def verify_at_once(
        self, run: Run, logits: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """``verify`` for greedy decoding that only an EOS or the length ends: all positions together."""
        start, width = run.ids.shape[1], logits.shape[1]
        lengths = torch.arange(start, start + width, device=logits.device)
        window = self.tokens[:, start : start + width]
        is_new = lengths >= self.device_known[:, None]
        guesses = torch.nn.functional.pad(self.guesses, (0, 1), value=-1)
        choice = logits.argmax(dim=-1)  # of a position with a NaN: the index of that NaN
        longest = min(c.max_length for c in run.criteria if isinstance(c, MaxLengthCriteria))
        is_end = lengths + 1 >= longest
        if self.eos is not None:
            is_end = is_end | torch.isin(choice, self.eos)
        goes_on = ~is_new | ((choice == guesses) & ~is_end)
        # A row knows what it went on through, and the choice after that.
        n_known = (goes_on.cumprod(dim=1).sum(dim=1) + 1).clamp(max=width)
        has_ended = self.device_ends >= 0
        is_chosen = is_new & (lengths < start + n_known[:, None]) & ~has_ended[:, None]
        is_invalid = is_chosen & logits.gather(2, choice[:, :, None]).squeeze(2).isnan()
        window.copy_(torch.where(is_chosen, choice, window))
        known = torch.maximum(self.device_known, start + n_known)
        self.device_known = torch.where(has_ended, self.device_known, known)
        self.device_ends = torch.where(
            (is_chosen & is_end).any(dim=1), self.device_known, self.device_ends
        )
        first = torch.where(is_invalid, lengths, -1).amax(dim=1)
        return tuple(logits.unbind(dim=1)), first

    def read(self, start: int, width: int, invalid_at: torch.Tensor) -> None:
        """Take what the device has found out to the host: the one wait for it in a round.

        Raises ``InvalidScoresError`` if a row's choice rests on scores that are NaN.
        """
        self.write_padding(start, width)
        drafted = (self.guesses >= 0).sum(dim=1)
        state = torch.stack([self.device_known, self.device_ends, invalid_at, drafted], dim=1)
        window = self.tokens[:, start : start + width]
        found = torch.cat([state, window], dim=1).cpu()
        if self.host_tokens is not self.tokens:
            self.host_tokens[:, start : start + width] = found[:, 4:]
        self.known, ends, invalid, self.drafted = found[:, :4].T.tolist()
        self.ends = [None if end < 0 else end for end in ends]
        if (first := min((length for length in invalid if length >= 0), default=-1)) >= 0:
            rows = [row for row, length in enumerate(invalid) if length == first]
            raise InvalidScoresError(rows, first - self.prompt_length)

    def ids(self, length: int) -> torch.Tensor:
        """All rows up to ``length``; functions of the caller's may count on ids that are contiguous."""
        ids = self.tokens[:, :length]
        return ids if self.is_row_wise else ids.contiguous()

    def end(self, ends: torch.Tensor, length: int) -> None:
        """Let the rows in ``ends (rows,)`` end at ``length``.

        Without an EOS token there is no padding either: rows run on until all are to end.
        """
        if not self.has_padding:
            self.is_hit = self.is_hit | ends
            ends = self.is_hit.all()
        self.device_ends = torch.where(ends & (self.device_ends < 0), length, self.device_ends)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self.schedule.finish()
        return {"sequences": run.ids.contiguous()}

    def stop(self, run: Run) -> None:
        has_ended = all(end is not None for end in self.ends)
        run.finished = has_ended and run.ids.shape[1] == self.final_length()


def _at(logits: torch.Tensor | None, position: int) -> torch.Tensor | None:
    """The drafter's scores ``(rows, vocab)`` of a position, if it gave any."""
    return None if logits is None or position >= logits.shape[1] else logits[:, position]


def _length_ends(run: Run) -> bool:
    """Whether nothing but the length ends rows, and so all of them together."""
    return all(isinstance(criterion, MaxLengthCriteria) for criterion in run.criteria)


def _eos_tokens(run: Run) -> torch.Tensor | None:
    """The tokens ``(n,)`` that end a row."""
    ends = [
        c.eos_token_id.to(run.ids.device) for c in run.criteria if isinstance(c, EosTokenCriteria)
    ]
    return torch.cat([end.flatten() for end in ends]) if ends else None


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
    for layer in layers.layers_of(cache):
        if layers.is_static_layer(layer) and layers.is_foreign_part(layer):
            raise ValueError(
                f"{type(run.model).__name__} has a static cache of its own kind "
                f"({type(layer).__name__}), out of which drafted tokens cannot be taken back. Use a "
                "dynamic cache."
            )


def assisted(run: Run, setup: Setup) -> Assisted:
    """Assisted decoding with the drafter, schedule and verification that the call asks for."""
    drafter = make_drafter(setup)
    config = run.config
    verification: Verification = GreedyMatch(config.assistant_ensemble_weight)
    if config.do_sample:
        kind = UpstreamSampling if setup.is_exact else SpeculativeSampling
        verification = kind(config.assistant_ensemble_weight)
    return Assisted(run, drafter, make_schedule(setup, drafter), verification)
