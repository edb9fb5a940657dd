"""Log-probabilities of the tokens of a prompt, each given the tokens before it."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...running.prompt_logits import Body, PromptLogits
from ...state.run import Run, Step, Strategy
from .result import Logprobs, Measures, measure
from .settings import Asked, Settings, ids_at, mode_of


class PromptRecorder:
    """Collects ``prompt_logprobs``: a row for each prompt, however many sequences are returned of it.

    The first token has none, nor has one behind padding. Processors do not see prompts: processed
    scores are the raw ones. What stands for a part of an image or of sound has the value of its id,
    none if that is no token of the vocabulary. Of an encoder-decoder, prompts are the decoder's.
    """

    def __init__(self, run: Run) -> None:
        self.prompt = PromptLogits(run)
        asked = [Asked.of_prompt(config) for config in run.configs]
        self.settings, self.configs = Settings(asked, mode_of(run.config)), run.configs
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
        ids, vocab, start, asked = self.prompt.ids, 0, 0, self.asked_ids()
        found: list[Measures] = []
        for logits in self.prompt.of(body):
            n, vocab = logits.shape[1:]
            tokens = ids[:, start + 1 : start + 1 + n].to(logits.device)
            of_tokens = asked[:, start + 1 : start + 1 + n].to(logits.device)
            start += n
            logits = logits[:, : tokens.shape[1]]
            found.append(_measured(logits, tokens, self.settings, of_tokens))
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
        return Logprobs.of(ids, is_token, measures, asked, self.settings, is_prompt=True)

    def asked_ids(self) -> Tensor:
        """``(prompts, length, m)``: ids to score at each token; -1 behind those of tokens with fewer."""
        ids = self.prompt.ids
        if all(config.prompt_logprob_token_ids is None for config in self.configs):
            return ids.new_zeros((*ids.shape, 0))
        n_pads = (self.prompt.is_token.cumsum(dim=1) == 0).sum(dim=1).tolist()
        each = len(ids) // len(self.configs)
        rows = [
            [ids_at(self.configs[row // each], place - pads) for place in range(ids.shape[1])]
            for row, pads in enumerate(n_pads)
        ]
        width = max(len(asked) for row in rows for asked in row)
        padded = [[asked + [-1] * (width - len(asked)) for asked in row] for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=ids.device).view(*ids.shape, width)


def _measured(logits: Tensor, tokens: Tensor, settings: Settings, asked: Tensor) -> Measures:
    """What ``logits (rows, n, vocab)`` say of ``tokens (rows, n)``, which may be outside, and ``asked (rows, n, m)``."""
    shape, vocab = tokens.shape, logits.shape[-1]
    inside = tokens.clamp(0, vocab - 1).flatten()
    flat = measure(logits.flatten(0, 1).float(), inside, settings, asked.clamp(min=0).flatten(0, 1))
    columns = (getattr(flat, f.name) for f in fields(Measures))
    return Measures(*(column.reshape(*shape, *column.shape[1:]) for column in columns))


def _behind_first(column: Tensor) -> Tensor:
    """``(rows, n, …)`` with one more position in front."""
    return pad(column, (*(0, 0) * (column.ndim - 2), 1, 0))
