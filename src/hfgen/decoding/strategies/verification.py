"""Which drafted tokens the target model accepts, and its own token at the first rejection.

Greedy: a draft is accepted as far as it is what the target would have chosen. Sampling (Leviathan et
al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1): a token drafted
with probability ``q`` is accepted with probability ``min(1, p / q)``, else one is drawn from what
``p`` has more than ``q``; the result is distributed as ``p``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import EosTokenCriteria, MaxLengthCriteria

from ...logits import logprobs
from ...logits.processors.lists import reads_scores_only
from ...logits.stopping import StoppingCriteriaList
from ...state.run import Run
from ...state.seeds import RowChoice
from .drafted_rows import DraftedRows


@dataclass(frozen=True, slots=True)
class DraftColumn:
    tokens: Tensor  # (rows,)
    is_drafted: Tensor  # (rows,): whether a row has a draft there
    logits: Tensor | None  # (rows, vocab): what tokens were drawn from, if known
    length: int = 0  # tokens before it


class GreedyMatch:
    """Accepts what the target would choose, by the row's seed if it has one; with a weight, what both models would."""

    def __init__(self, weight: float | None = None, row_choice: RowChoice | None = None) -> None:
        self.weight, self.row_choice = weight, row_choice
        #: Whether tokens are drawn: then there has to be one that can be, as in sampling without drafts.
        self.draws = row_choice is not None

    def begin(self, logits: Tensor, has_draft_logits: bool) -> None:
        """Start a round whose logits are ``(rows, n_drafted + 1, vocab)``."""

    def choose(self, position: int, scores: Tensor, draft: DraftColumn) -> tuple[Tensor, Tensor]:
        """Tokens ``(rows,)`` for ``scores (rows, vocab)``, and in which rows it is the draft's."""
        if self.row_choice is not None:
            tokens, _ = self.row_choice.choose(scores, draft.length)
        else:
            tokens = scores.argmax(dim=-1)
        if self.weight is not None and draft.logits is not None:
            mixed = self.weight * scores.softmax(dim=-1)
            mixed = mixed + (1.0 - self.weight) * draft.logits.softmax(dim=-1)
            tokens = torch.where(draft.is_drafted, mixed.argmax(dim=-1), tokens)
        return tokens, draft.is_drafted & (tokens == draft.tokens)


class SpeculativeSampling:
    """Accepts so that what is returned is distributed as the target's own samples.

    Draws one uniform number per drafted token and one row of exponential noise per sequence and
    round, in upstream's order: at one row the draws are upstream's. With an ensemble weight ``w``
    tokens are accepted with probability ``1 - w + w * p / q`` (as upstream does; no longer exact).

    ``is_upstreams``: draws are upstream's also in rounds whose drafts have no scores. Every position
    is then sampled, with noise of its own, and drafts are accepted as long as they are the samples.
    """

    draws = True

    def __init__(self, weight: float | None = None, is_upstreams: bool = False) -> None:
        self.weight, self.is_upstreams = weight, is_upstreams

    def begin(self, logits: Tensor, has_draft_logits: bool) -> None:
        rows, n_positions, vocab = logits.shape
        self.uniform: Tensor | None = None
        n_noise = n_positions
        if has_draft_logits or not self.is_upstreams:
            self.uniform = torch.rand(rows, n_positions - 1, device=logits.device)
            n_noise = 1
        self.noise = exponential_noise((rows * n_noise, vocab), logits).view(rows, n_noise, vocab)

    def choose(self, position: int, scores: Tensor, draft: DraftColumn) -> tuple[Tensor, Tensor]:
        p = scores.softmax(dim=-1)
        if self.uniform is None:
            tokens = gumbel_choice(p, self.noise[:, position])
            return tokens, draft.is_drafted & (tokens == draft.tokens)
        noise = self.noise[:, 0]
        if position >= self.uniform.shape[1]:
            return gumbel_choice(p, noise), torch.zeros_like(draft.is_drafted)
        index = draft.tokens[:, None]
        if draft.logits is None:  # drafted for certain
            q = torch.zeros_like(p).scatter_(1, index, 1.0)
        else:
            q = draft.logits.softmax(dim=-1)
        ratio = (p.gather(1, index) / q.gather(1, index)).squeeze(1)
        if self.weight is not None:
            ratio = 1.0 - self.weight + self.weight * ratio
        is_accepted = draft.is_drafted & (self.uniform[:, position] <= ratio)
        residual = (p - q).clamp(min=0)
        total = residual.sum(dim=-1, keepdim=True)
        is_usable = draft.is_drafted[:, None] & (total > torch.finfo(p.dtype).tiny)
        tokens = gumbel_choice(torch.where(is_usable, residual / total, p), noise)
        return torch.where(is_accepted, draft.tokens, tokens), is_accepted


def exponential_noise(shape: tuple[int, int], like: Tensor) -> Tensor:
    """The noise ``(rows, vocab)`` that ``torch.multinomial`` draws for one sample of each row."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).exponential_()


def gumbel_choice(probabilities: Tensor, noise: Tensor) -> Tensor:
    """One sample ``(rows,)`` of ``probabilities (rows, vocab)``, as ``torch.multinomial`` draws it."""
    return (probabilities / noise).argmax(dim=-1)


def verify(
    run: Run,
    rows: DraftedRows,
    verification: GreedyMatch | SpeculativeSampling,
    logits: Tensor,
    draft_logits: Tensor | None,
) -> tuple[Tensor, ...]:
    """Verify ``logits (rows, width, vocab)`` position by position; write the tokens that ``rows`` gain.

    ``draft_logits (rows, n, vocab)``: the drafter's scores, if any. Returns the processed scores. Functions are called
    once for each length; their results for rows that are further ahead or behind are not used.
    """
    start, width = run.ids.shape[1], logits.shape[1]
    had_ended, is_open = rows.device_ended, ~rows.device_ended
    guesses = pad(rows.guesses, (0, 1), value=-1)
    invalid_at = torch.full_like(rows.device_known, -1)
    if draft_logits is not None:
        draft_logits = draft_logits.to(logits.device)
    verification.begin(logits, draft_logits is not None)
    all_scores: list[Tensor] = []
    for position in range(width):
        raw, length = logits[:, position], start + position
        is_active = is_open & (rows.device_known == length)
        if rows.may_look and not is_active.any():
            # Scores of known tokens are wanted if all rows have got here, and so will return them.
            is_behind = ~had_ended & (rows.device_known <= length)
            is_kept = run.scores is not None or logprobs.reads(run, "processed")
            is_wanted = is_kept and not is_behind.any()
            all_scores.append(_processed(run, rows, raw, length) if is_wanted else raw)
            continue
        all_scores.append(scores := _processed(run, rows, raw, length))
        column = rows.tokens[:, length]
        is_drafted = is_active & (guesses[:, position] >= 0)
        column_logits = None
        if draft_logits is not None and position < draft_logits.shape[1]:
            column_logits = draft_logits[:, position]
        draft = DraftColumn(column, is_drafted, column_logits, length)
        tokens, is_accepted = verification.choose(position, scores, draft)
        chosen = scores.gather(1, tokens[:, None]).squeeze(1)
        is_invalid = is_active & (chosen.isnan() | (chosen == -torch.inf) & verification.draws)
        invalid_at = torch.where(is_invalid & (invalid_at < 0), length, invalid_at)
        column.copy_(torch.where(is_active, tokens, column))
        rows.device_known = rows.device_known + is_active
        scores_so_far = None if run.scores is None else (*run.scores, *all_scores)
        ends = is_active & run.criteria(rows.ids(length + 1), scores_so_far)
        rows.end(ends)
        is_open = is_open & (is_accepted | ~is_active) & ~rows.device_ended
        if rows.may_look and not is_open.any():
            break
        if rows.is_in_step and (ends.any() or not is_accepted[is_active].all()):
            break
    rows.read(start, width, invalid_at)
    return tuple(all_scores)


def _processed(run: Run, rows: DraftedRows, logits: Tensor, length: int) -> Tensor:
    """Scores ``(rows, vocab)`` of the position after ``length`` tokens."""
    if not run.processors:
        return logits
    is_kept = run.config.output_logits or logprobs.reads(run, "raw")
    return run.processors(rows.ids(length), logits.clone() if is_kept else logits)


def is_plain(run: Run, verification: GreedyMatch | SpeculativeSampling) -> bool:
    """Whether tokens depend on logits alone, and ends on tokens and a length that nobody warns of."""
    criteria: Any = run.criteria
    for criterion in criteria:  # of lengths beyond the model's positions
        positions = getattr(criterion, "max_position_embeddings", None)
        if positions is not None and criterion.max_length > positions + 1:
            return False
    return (
        type(verification) is GreedyMatch
        and verification.weight is None
        and all(map(reads_scores_only, run.processors))
        and type(criteria) is StoppingCriteriaList
        and criteria.ids_only
    )


class PlainMatch:
    """``verify`` for a call that ``is_plain``: the host compares tokens; there is one read of a device."""

    def __init__(self, run: Run) -> None:
        criteria = run.criteria
        self.max_length = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
        eos = [c.eos_token_id.tolist() for c in criteria if isinstance(c, EosTokenCriteria)]
        self.eos = {token for tokens in eos for token in tokens}

    def verify(self, run: Run, rows: DraftedRows, logits: Tensor) -> tuple[Tensor, ...]:
        """Write the tokens that ``rows`` gain by ``logits (rows, width, vocab)``; return the processed scores."""
        start, raw = run.ids.shape[1], enumerate(logits.unbind(dim=1), run.ids.shape[1])
        choices: Any = (self._choice(run, rows, each, length) for length, each in raw)
        if logits.is_cpu:  # to read is free, and later positions may not matter
            guesses = rows.guesses.tolist()
        else:  # one copy: tokens and flags of all positions, and the guesses
            choices = [*choices]
            columns = [part[:, None] for _, *parts in choices for part in parts]
            table, n = torch.cat([*columns, rows.guesses], dim=1).cpu(), len(columns)
            pairs = zip(choices, table[:, :n].T.split(2), strict=True)
            choices, guesses = [(each[0], *pair) for each, pair in pairs], table[:, n:].tolist()
        rows.drafted = [sum(guess >= 0 for guess in row) for row in guesses]
        known, ended = [*rows.known], [*rows.has_ended]
        # A round of ended rows forwards known tokens, and all their scores are returned.
        has_open_rows = not all(ended)
        goes_on, invalid_at = [not has_ended for has_ended in ended], [-1] * len(known)
        gained: list[list[int]] = [[] for _ in known]
        all_scores: list[Tensor] = []
        for scores, tokens, flags in choices:
            length, is_invalid = start + len(all_scores), flags.tolist()
            all_scores.append(scores)
            for row, token in enumerate(tokens.tolist()):
                if not goes_on[row] or known[row] > length:
                    continue
                gained[row].append(token)
                known[row] += 1
                ended[row] = token in self.eos or known[row] >= self.max_length
                is_right = guesses[row][length - start : length - start + 1] == [token]
                goes_on[row] = is_right and not ended[row]
                if is_invalid[row] and invalid_at[row] < 0:
                    invalid_at[row] = length
            if has_open_rows and not any(goes_on):
                break
        host_array = rows.host_tokens.numpy()  # their memory, which is quicker to write to
        for row, new in enumerate(gained):
            host_array[row, known[row] - len(new) : known[row]] = new
        if rows.host_tokens is not rows.tokens:
            window = slice(start, start + logits.shape[1])
            rows.tokens[:, window] = rows.host_tokens[:, window].to(rows.tokens.device)
        rows.set_known(known, ended)
        rows.write_padding(start, logits.shape[1])
        rows.end_invalid(invalid_at)
        return tuple(all_scores)

    @staticmethod
    def _choice(
        run: Run, rows: DraftedRows, logits: Tensor, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores ``(rows, vocab)`` behind ``length`` tokens, tokens ``(rows,)``, and which of them are none."""
        scores = _processed(run, rows, logits, length)
        if run.row_choice is not None:
            return scores, *run.row_choice.choose(scores, length)
        tokens = scores.argmax(dim=-1)  # with a NaN: its index
        return scores, tokens, scores.gather(1, tokens[:, None])[:, 0].isnan()
