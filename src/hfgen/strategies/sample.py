"""Greedy decoding and multinomial sampling: one token per sequence and step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.utils import ModelOutput

from .. import forward, outputs, stopping
from ..buffers import TokenBuffer
from ..loop import commit
from ..types import Run, Step
from .base import InvalidScoresError, NextToken


class Sample(NextToken):
    """The likeliest token, or one drawn with the probability that the scores give it."""

    def __init__(self, run: Run) -> None:
        self.execute = forward.executor(run.model, run.config, run.model_kwargs)
        self.buffer = TokenBuffer(run.ids, run.config.max_length)
        rows, device = run.ids.shape[0], run.ids.device
        self.unfinished = torch.ones(rows, dtype=torch.long, device=device)
        #: At which step a row's scores were first invalid; -1 if they never were.
        self.invalid_since = torch.full((rows,), -1, device=device)
        self.n_steps = 0
        # An EOS ends a sequence before the others; then pads follow.
        self.has_eos = stopping.has_eos_criterion(run.criteria)
        self.stops_by_length_only = getattr(run.criteria, "length_only", False)
        if self.has_eos and run.config._pad_token_tensor is None:
            raise TypeError(
                "A stopping criterion ends rows at an EOS token, but `pad_token_id` is None and so is "
                "`eos_token_id`, which would stand in for it. Set one of them."
            )
        self.pad: Any = run.config._pad_token_tensor
        if self.pad is not None:  # multimodal models may have it beside their encoder's inputs
            self.pad = self.pad.to(device)

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        return run.model._optimize_model_for_decode()

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        commit(run, model_outputs)
        logits = forward.last_logits(model_outputs, run.ids.device)
        scores = run.processors(run.ids, logits)
        if run.scores is not None:
            run.scores += (scores,)
        tokens = self.choose(run, scores)
        if self.has_eos:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        run.ids = self.buffer.append(tokens[:, None])
        self.n_steps += 1
        return Step(
            tokens=tokens[:, None],
            scores=(scores,),
            logits=(logits,),
            **outputs.observe(run, model_outputs),
        )

    def choose(self, run: Run, scores: torch.Tensor) -> torch.Tensor:
        """Tokens ``(rows,)`` from scores ``(rows, vocab)``."""
        if not run.config.do_sample:
            tokens = scores.argmax(dim=-1)  # of a row with a NaN: the index of that NaN
            self._note_invalid(scores.gather(1, tokens[:, None]).squeeze(1).isnan())
            return tokens
        probabilities = scores.softmax(dim=-1)
        if scores.is_cpu:
            try:
                return torch.multinomial(probabilities, num_samples=1).squeeze(1)
            except RuntimeError:  # some row is invalid; it is an error only if the row still counts
                pass
        # On an accelerator an invalid row would end the process, so it is looked for beforehand.
        is_invalid = probabilities.sum(dim=-1).isnan()
        self._note_invalid(is_invalid)
        probabilities = probabilities.masked_fill(is_invalid[:, None], 1.0)
        return torch.multinomial(probabilities, num_samples=1).squeeze(1)

    def _note_invalid(self, is_invalid: torch.Tensor) -> None:
        is_first = is_invalid & (self.unfinished == 1) & (self.invalid_since < 0)
        self.invalid_since = self.invalid_since.masked_fill(is_first, self.n_steps)
        if is_invalid.is_cpu and is_first.any():
            self._raise_if_invalid(True)

    def _raise_if_invalid(self, is_invalid: bool) -> None:
        if is_invalid:
            step = int(self.invalid_since[self.invalid_since >= 0].min())
            raise InvalidScoresError(
                (self.invalid_since == step).nonzero().flatten().tolist(), step
            )

    def stop(self, run: Run) -> None:
        done = run.criteria(run.ids, run.scores)
        if self.stops_by_length_only:  # the host knows the length: nothing to wait for
            run.finished = run.ids.shape[1] >= run.criteria.max_length
            return
        self.unfinished = self.unfinished & ~done
        # One read of the device tells both.
        flags = torch.stack([self.unfinished.max() == 0, (self.invalid_since >= 0).any()])
        run.finished, is_invalid = flags.tolist()
        self._raise_if_invalid(is_invalid)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self._raise_if_invalid(bool((self.invalid_since >= 0).any()))
        return {"sequences": run.ids.contiguous()}
