"""The common base of strategies that forward one token per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.utils import ModelOutput

from ...logits import stopping
from ...running import Executor
from ...running.active_rows import ActiveRows
from ...settings.logs import logger
from ...state import survivors
from ...state.run import Run


class NextToken:
    """Prefill, then forward one new token per sequence and step."""

    # What it can do; see ``run.Strategy``.
    continues_cache = shares_prefill = streams = True
    takes_rows = joins = drops_rows = checks_late = may_record = False
    may_compile = False  # whether its steps may be compiled
    tokens_ahead = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reset the capabilities that a subclass does not declare: its own methods may lack them."""
        super().__init_subclass__(**kwargs)
        names = ["joins", "checks_late", "may_record"]
        names += ["continues_cache", "shares_prefill"] if "prefill" in vars(cls) else []
        for name in names:
            if name not in vars(cls):
                setattr(cls, name, False)

    def __init__(self, run: Run) -> None:
        self.executor = Executor(run, self.may_compile, self.may_record)
        #: Which rows are forwarded, where finished ones leave; else ``None``, for all.
        # A recipe may run on a model that is not mixed, whose config lacks the field.
        drops = getattr(run.config, "drop_finished", False) and len(run.ids) > 1
        self.active = ActiveRows(run) if drops else None
        self.invalid = run.invalid = InvalidScores()
        self.stops_by_length_only = getattr(run.criteria, "length_only", False)

    def prefill(self, run: Run) -> ModelOutput:
        return self.executor.prefill(run, is_first_iteration=not run.config.is_assistant)

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, run: Run) -> ModelOutput:
        return self.executor.forward(run, None if self.active is None else self.active.ids(run))

    def check(self, run: Run, settle: Callable[[list[int]], None], *flags: torch.Tensor) -> None:
        """Call ``settle`` with the values of ``flags``, which are scalars: now, or after the next forward."""
        if run.ahead is not None:
            run.ahead.ask(torch.stack(flags), settle)
        elif flags[0].is_cpu:
            settle([int(flag) for flag in flags])
        else:
            settle(torch.stack(flags).tolist())


def padding(run: Run) -> torch.Tensor | None:
    """The token that follows the EOS of a row while others go on; ``TypeError`` if there is none."""
    pad: Any = run.config._pad_token_tensor
    if pad is None and any(hasattr(criterion, "eos_token_id") for criterion in run.criteria):
        raise TypeError(
            "A stopping criterion ends rows at an EOS token, but `pad_token_id` is None and so is "
            "`eos_token_id`, which would stand in for it. Set one of them."
        )
    if pad is None and stopping.may_end_rows(run.criteria):
        return run.ids.new_zeros(())
    # Multimodal models may have the pad beside their encoder's inputs.
    return pad if pad is None else pad.to(run.ids.device)


class InvalidScoresError(ValueError, RuntimeError):
    """No token can be chosen from ``rows`` of scores (of prompt number ``prompt``). Upstream raises RuntimeError here."""

    def __init__(self, rows: list[int], step: int, prompt: int | None = None) -> None:
        self.rows, self.step, self.prompt = rows, step, prompt
        of_prompt = "" if prompt is None else f" of prompt {prompt}"
        super().__init__(
            f"The scores of row {', '.join(map(str, rows))}{of_prompt} are NaN or infinite at step {step}, so no "
            "token can be chosen. Check the attention mask, the dtype (float16 overflows), and what "
            "rules tokens out (a `grammar` with `min_new_tokens`, a processor), or set "
            "`remove_invalid_values=True`."
        )

    def __reduce__(self) -> tuple[type[InvalidScoresError], tuple[Any, ...]]:
        return type(self), (self.rows, self.step, self.prompt)


class InvalidScores:
    """The step at which the scores of each row, or of each prompt's beams, were first invalid.

    An invalid row ends there, and the others go on. ``InvalidScoresError`` is raised if no valid row is
    left: at once on the CPU, else at the end of the call.
    """

    since: torch.Tensor | None = None  # ``(rows,)``: the step, or -1; ``None``: no row is invalid

    def note(self, best: torch.Tensor, step: int, among: torch.Tensor | None = None) -> None:
        """Mark the rows of ``among (rows,)``, or of all, whose ``best (rows,)`` score is NaN."""
        if not best.is_cpu or any(map(math.isnan, best.tolist())):
            self.mark(best.isnan(), step, among)

    def mark(self, is_invalid: torch.Tensor, step: int, among: torch.Tensor | None = None) -> None:
        """Mark the rows of ``among (rows,)``, or of all, that are true in ``is_invalid (rows,)``."""
        if is_invalid.is_cpu and not is_invalid.any():
            return
        if self.since is None:
            self.since = torch.full_like(is_invalid, -1, dtype=torch.long)
        newly_invalid = is_invalid if among is None else is_invalid & among
        self.since = self.since.masked_fill(newly_invalid & (self.since < 0), step)
        if is_invalid.is_cpu:
            self.steps()

    def draw(
        self, scores: torch.Tensor, n: int, step: int, among: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Indices ``(rows, n)`` drawn without replacement by the softmax of ``scores (rows, m)``; marks rows with NaN."""
        if (drawn := survivors.draw(scores, n)) is not None:
            return drawn
        probabilities = scores.softmax(dim=-1)
        if probabilities.is_cpu:
            try:
                return torch.multinomial(probabilities, n)
            except RuntimeError:  # some row is invalid; it is an error only if the row still counts
                pass
        # On an accelerator an invalid row would end the process, so it is looked for beforehand.
        self.note(totals := probabilities.sum(dim=-1), step, among)
        return torch.multinomial(probabilities.masked_fill(totals.isnan()[:, None], 1.0), n)

    def steps(self) -> list[int]:
        """``since`` on the host; empty if no row is invalid. Raises ``InvalidScoresError`` if all are."""
        steps = [] if self.since is None else self.since.tolist()
        if steps and (first := min(steps)) >= 0:
            raise InvalidScoresError([i for i, step in enumerate(steps) if step == first], first)
        return steps if any(step >= 0 for step in steps) else []

    def conclude(self) -> None:
        """Warn once, at the end of a call, of its invalid rows. Raises ``InvalidScoresError`` if all are."""
        if steps := self.steps():
            rows = [row for row, step in enumerate(steps) if step >= 0]
            error = InvalidScoresError(rows, min(steps[row] for row in rows))
            logger.warning(f"{error} These rows have ended there, with the finish reason 'error'.")

    def step_of(self, row: int, n_rows: int) -> int | None:
        """The step at which row ``row`` of ``n_rows`` was invalid; ``None`` if it never was."""
        steps = [] if self.since is None else self.since.tolist()
        step = steps[row * len(steps) // n_rows] if steps else -1
        return None if step < 0 else step
