"""Log-probabilities of the tokens of a prompt, each given the tokens before it."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call import Run, Step, Strategy
from ..execution.prompt_logits import Body, PromptLogits
from .result import Logprobs, Measures, measure
from .settings import Asked, Settings, mode_of


class PromptRecorder:
    """Collects ``prompt_logprobs``: a row for each prompt, however many sequences are returned of it.

    The first token has none, nor has one behind padding. Processors do not see prompts: processed
    scores are the raw ones. What stands for a part of an image or of sound has the value of its id,
    none if that is no token of the vocabulary. Of an encoder-decoder, prompts are the decoder's.
    """

    def __init__(self, run: Run) -> None:
        self.prompt = PromptLogits(run)
        asked = [Asked.of_prompt(config) for config in run.configs]
        self.settings = Settings(asked, mode_of(run.config))
        run.body = Body.of_prefill(run)

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        """After the first step, measure the prompts' tokens."""
        if "prompt_logprobs" not in run.extras:
            run.extras["prompt_logprobs"] = self.measured(run.body)
            run.body = None
            self.prompt.kwargs.clear()

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Tensor | None]) -> None:
        """Measure them, if there was no step."""
        if "prompt_logprobs" not in run.extras:
            run.extras["prompt_logprobs"] = self.measured()

    def measured(self, body: Body | None = None) -> Logprobs:
        """The prompts' log-probabilities, by what the prefill's ``body`` has given or a new forward.

        Raises ``ValueError`` for a model that does not predict each token from those before.
        """
        ids, vocab, start = self.prompt.ids, 0, 0
        found: list[Measures] = []
        for logits in self.prompt.of(body):
            n, vocab = logits.shape[1:]
            tokens = ids[:, start + 1 : start + 1 + n].to(logits.device)
            start += n
            found.append(_measured(logits[:, : tokens.shape[1]], tokens, self.settings))
            del logits  # before there are others
        if start != ids.shape[1]:
            raise ValueError(
                "`prompt_logprobs` are read off logits of each token, but "
                f"{type(self.prompt.model).__name__} gives {start} for a prompt of {ids.shape[1]} "
                "tokens. Leave `prompt_logprobs` out."
            )
        is_token = self.prompt.is_token & (ids >= 0) & (ids < vocab)
        is_token[:, 1:] &= self.prompt.is_token[:, :-1]
        is_token[:, 0] = False
        columns = (torch.cat([getattr(m, f.name) for m in found], dim=1) for f in fields(Measures))
        measures = Measures(*(_behind_first(column.to(ids.device)) for column in columns))
        return Logprobs.of(ids, is_token, measures, None, self.settings, is_prompt=True)


def _measured(logits: Tensor, tokens: Tensor, settings: Settings) -> Measures:
    """What ``logits (rows, n, vocab)`` say of ``tokens (rows, n)``, which may be outside of it."""
    shape, vocab = tokens.shape, logits.shape[-1]
    inside = tokens.clamp(0, vocab - 1).flatten()
    flat = measure(logits.flatten(0, 1).float(), inside, settings)
    columns = (getattr(flat, f.name) for f in fields(Measures))
    return Measures(*(column.reshape(*shape, *column.shape[1:]) for column in columns))


def _behind_first(column: Tensor) -> Tensor:
    """``(rows, n, …)`` with one more position in front."""
    return pad(column, (*(0, 0) * (column.ndim - 2), 1, 0))
