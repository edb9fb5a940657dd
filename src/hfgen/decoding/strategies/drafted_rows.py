"""The rows of assisted decoding: known and drafted tokens of each row, and which rows have finished."""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers import MaxLengthCriteria

from ...logits import stopping
from ...logits.processors.lists import is_row_wise
from ...state.run import Run
from .base import InvalidScores, padding


class DraftedRows:
    """The rows of a call, on the device and, since the last ``read``, on the host."""

    def __init__(self, run: Run, max_length: int) -> None:
        (n_rows, length), device = run.ids.shape, run.ids.device
        self.prompt_length, self.max_length = length, max_length
        self.invalid = run.invalid = InvalidScores()
        self.has_padding = n_rows == 1 or stopping.may_end_rows(run.criteria)
        self.pad = padding(run) if self.has_padding and n_rows > 1 else None
        self.is_row_wise = all(map(is_row_wise, (*run.processors, *run.criteria)))
        length_ends = all(isinstance(criterion, MaxLengthCriteria) for criterion in run.criteria)
        #: Rows advance together if functions count on it, or if rows that have ended run on.
        self.is_in_step = not self.is_row_wise or not (self.has_padding or length_ends)
        #: Whether a look at a tensor after every position is free, or is asked for anyway.
        self.may_look = device.type == "cpu" or self.is_in_step
        self.tokens = run.ids.to(torch.long, copy=True)  # ``(rows, …)``: known, then drafted ones
        self.guesses = self.tokens[:, :0]  # ``(rows, n_new)``: drafted tokens of the round, or -1
        #: ``(rows,)``: the length known of each row, and whether it ends there.
        self.device_known = torch.full((n_rows,), length, device=device)
        self.device_ended = ~stopping.may_begin(run.criteria, run.ids)
        #: ``(rows,)``: whether a row met a criterion, where no row ends before all do.
        self.is_hit = torch.zeros_like(self.device_ended)
        # The same on the host; on the CPU the tokens are the same tensor.
        self.host_tokens = self.tokens.cpu()
        self.known, self.has_ended = [length] * n_rows, [False] * n_rows
        if run.rows is not None:
            self.has_ended = self.device_ended.tolist()
        self.drafted = [0] * n_rows

    def place(self, tokens: torch.Tensor | None, start: int, width: int) -> None:
        """Write drafted ``tokens (rows, n)``, if any, into ``width`` columns from ``start`` on: padding where a
        row has ended, and nothing where it knows better. Sets ``guesses``.
        """
        if width == 0:
            self.guesses = self.tokens[:, :0]
            return
        self.reserve(start + width)
        window = self.tokens[:, start : start + width]
        positions = torch.arange(start, start + width, device=window.device)
        tokens = window[:, :0] if tokens is None else tokens.to(window.device)
        tokens = pad(tokens, (0, width - tokens.shape[1]), value=-1)  # a negative width cuts
        is_new = (positions >= self.device_known[:, None]) & ~self.device_ended[:, None]
        is_over = ((tokens < 0) & is_new).cumsum(dim=1) > 0  # behind the end of a draft
        self.guesses = tokens.masked_fill(~is_new | is_over, -1)
        window.copy_(torch.where(self.guesses >= 0, self.guesses, window))
        if any(self.has_ended):
            self.write_padding(start, width)

    def write_padding(self, start: int, width: int) -> None:
        """Pad rows behind their end, in ``width`` columns from ``start`` on."""
        if self.pad is None:
            return
        window = self.tokens[:, start : start + width]
        positions = torch.arange(start, start + width, device=window.device)
        is_behind = self.device_ended[:, None] & (positions >= self.device_known[:, None])
        window.copy_(torch.where(is_behind, self.pad, window))

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens a row."""
        capacity = self.tokens.shape[1]
        if length > capacity:
            more = max(length, min(2 * capacity, self.max_length)) - capacity
            is_one = self.host_tokens is self.tokens
            self.tokens = pad(self.tokens, (0, more))
            self.host_tokens = self.tokens if is_one else pad(self.host_tokens, (0, more))

    def ids(self, length: int) -> torch.Tensor:
        """All rows up to ``length``; functions of the caller's may count on ids that are contiguous."""
        return self.tokens[:, :length] if self.is_row_wise else self.tokens[:, :length].contiguous()

    def end(self, ends: torch.Tensor) -> None:
        """End the rows in ``ends (rows,)`` with their known tokens; without padding, all rows at once."""
        if not self.has_padding:
            self.is_hit = self.is_hit | ends
            ends = self.is_hit.all()
        self.device_ended = self.device_ended | ends

    def read(self, start: int, width: int, invalid_at: torch.Tensor) -> None:
        """Copy the round's state to the host: the one wait for the device. Rows end at ``invalid_at (rows,)``, or -1."""
        self.write_padding(start, width)
        drafted = (self.guesses >= 0).sum(dim=1)
        state = torch.stack([self.device_known, self.device_ended, invalid_at, drafted], dim=1)
        table = torch.cat([state, self.tokens[:, start : start + width]], dim=1).cpu()
        self.host_tokens[:, start : start + width] = table[:, 4:]
        self.known, ended, invalid, self.drafted = table[:, :4].T.tolist()
        self.has_ended = [bool(e) for e in ended]
        self.end_invalid(invalid)

    def set_known(self, known: list[int], has_ended: list[bool]) -> None:
        """Set how many tokens of each row are known, and which rows have ended."""
        self.device_known = torch.tensor(known, device=self.tokens.device)
        if has_ended != self.has_ended:
            self.device_ended = torch.tensor(has_ended, device=self.tokens.device)
        self.known, self.has_ended = known, has_ended

    def end_invalid(self, invalid_at: list[int]) -> None:
        """End rows at the lengths where scores are NaN, -1 for nowhere; raise if no valid row is left."""
        invalid_rows = {row: length for row, length in enumerate(invalid_at) if length >= 0}
        if not invalid_rows:
            return
        if self.invalid.since is None:
            self.invalid.since = torch.full((len(self.known),), -1)
        known, has_ended = [*self.known], [*self.has_ended]
        for row, length in invalid_rows.items():
            self.invalid.since[row] = length - self.prompt_length
            known[row], has_ended[row] = length, True
        self.invalid.steps()
        self.set_known(known, has_ended)
        self.has_padding = True
        self.pad = self.tokens.new_zeros(()) if self.pad is None else self.pad
        first = min(invalid_rows.values())
        self.write_padding(first, self.tokens.shape[1] - first)
