"""Greedy decoding and multinomial sampling: one token per sequence and step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.utils import ModelOutput

from ...logits import logprobs, stopping
from ...running import last_logits
from ...state.run import Run, Step
from .. import outputs
from ..loop import commit
from .base import NextToken, padding


class Sample(NextToken):
    """The likeliest token, or one drawn with the probability that the scores give it."""

    drops_rows = joins = may_compile = may_record = takes_rows = checks_late = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # Processors of the caller's may write to the ids, as upstream's may: what follows has it.
        run.ids = run.ids.to(torch.long, copy=True, memory_format=torch.contiguous_format)
        rows = len(run.ids)
        self.unfinished = stopping.may_begin(run.criteria, run.ids)
        self.was_unfinished = self.unfinished  # as it was when the newest tokens were chosen
        # Processors of the caller's may write to the scores that they get.
        self.keeps_logits = len(run.processors) > 0 and logprobs.reads(run, "raw")
        self.n_steps = 0
        # An EOS ends a row before the others, and then pads follow; a row alone ends the loop.
        self.is_padded = rows > 1 and stopping.may_end_rows(run.criteria)
        self.pad: Any = padding(run)

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        return run.model._optimize_model_for_decode()

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        commit(run, model_outputs)
        if self.active is not None:
            self.active.widen(run, model_outputs)
        logits = last_logits(model_outputs, run.ids.device)
        raw_logits = logits.clone() if self.keeps_logits else logits
        scores = run.processors(run.ids, self.adjust(raw_logits, model_outputs))
        if run.scores is not None:
            run.scores += (scores,)
        tokens = self.choose(run, scores)
        if self.invalid.since is not None:
            self.end_invalid()
        if self.is_padded:
            tokens = torch.where(self.unfinished, tokens, self.pad)
        tokens = tokens[:, None]
        run.ids = torch.cat([run.ids, tokens], dim=1)
        self.n_steps += 1
        return Step(tokens, (scores,), (logits,), **outputs.observe(run, model_outputs))

    def end_invalid(self) -> None:
        """End the rows whose scores were invalid; padding follows in them."""
        assert self.invalid.since is not None
        self.unfinished = self.unfinished & (self.invalid.since < 0)
        self.is_padded = len(self.unfinished) > 1
        self.pad = self.unfinished.new_zeros((), dtype=torch.long) if self.pad is None else self.pad

    def adjust(self, logits: torch.Tensor, model_outputs: ModelOutput) -> torch.Tensor:
        """The processors' input ``(rows, vocab)`` for the model's ``logits (rows, vocab)``."""
        return logits

    def choose(self, run: Run, scores: torch.Tensor) -> torch.Tensor:
        if run.row_choice is not None:
            tokens, is_invalid = run.row_choice.choose(scores, run.ids.shape[1])
            self.invalid.mark(is_invalid, self.n_steps, self.unfinished)
            return tokens
        if not run.config.do_sample:
            tokens = scores.argmax(dim=-1, keepdim=True)  # NaN counts as the largest
            self.invalid.note(scores.gather(1, tokens)[:, 0], self.n_steps, self.unfinished)
        else:
            tokens = self.invalid.draw(scores, 1, self.n_steps, self.unfinished)
        return tokens.squeeze(1)

    def stop(self, run: Run) -> None:
        done = run.criteria(run.ids, run.scores)
        self.was_unfinished = self.unfinished
        if self.stops_by_length_only:  # the host knows the length: nothing to wait for
            run.finished = run.ids.shape[1] >= run.criteria.max_length
            return
        if self.invalid.since is not None:
            done = done | (self.invalid.since >= 0)
        if done.is_cpu and run.ahead is None and not any(done.tolist()):  # most steps end no row
            return
        self.unfinished = self.unfinished & ~done

        def settle(values: list[int]) -> None:
            (n_unfinished,) = values
            run.finished = n_unfinished == 0
            if self.active is not None:
                self.active.keep(run, self.unfinished, n_unfinished)

        self.check(run, settle, self.unfinished.sum())

    def row_ends(self, run: Run) -> list[int | None]:
        length = run.ids.shape[1]
        had_begun, goes_on = torch.stack([self.was_unfinished, self.unfinished]).tolist()
        return [
            None if goes and not run.finished else length if began else length - 1
            for began, goes in zip(had_begun, goes_on, strict=True)
        ]

    def is_token(self, run: Run, step: Step) -> torch.Tensor | None:
        """``(rows, 1)``: whose newest token is not padding; ``None`` for all."""
        return self.was_unfinished[:, None] if self.is_padded else None

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self.invalid.conclude()
        return {"sequences": run.ids.contiguous()}
