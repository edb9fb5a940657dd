"""Log-probabilities of the tokens of a prompt, each given the tokens before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...running.prompt_logits import Body, PromptLogits
from ...state.run import Run, Step, Strategy
from .result import Logprobs, Measures, measure
from .settings import LogprobRequest, Settings, mode_of


class PromptRecorder:
    """Collects ``prompt_logprobs``: one row per prompt, however many sequences are returned for it.

    The first token has none, nor has one behind padding. Processors do not see prompts, so processed
    scores are the raw ones. A placeholder of an image or of sound has the value of its id, none if that is no
    token of the vocabulary. Of an encoder-decoder, prompts are the decoder's.
    """

    def __init__(self, run: Run) -> None:
        self.prompt = PromptLogits(run)
        counts = [getattr(config, "prompt_logprobs", None) for config in run.configs]
        self.settings = Settings([LogprobRequest(n_top) for n_top in counts], mode_of(run.config))
        run.body = Body.of_prefill(run)

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        """After the first step, measure the prompts' tokens."""
        if "prompt_logprobs" not in run.extras:
            run.extras["prompt_logprobs"] = self.measured(run.body)
            run.body = None
            self.prompt.kwargs.clear()

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Tensor | None]) -> None:
        """Measure the prompts' tokens, if there was no step."""
        if "prompt_logprobs" not in run.extras:
            run.extras["prompt_logprobs"] = self.measured()

    def measured(self, body: Body | None = None) -> Logprobs:
        """The prompts' log-probabilities, by the prefill's recorded ``body`` or a new forward.

        Raises ``ValueError`` for a model that does not predict each token from those before.
        """
        ids, vocab, start = self.prompt.ids, 0, 0
        measures: list[Measures] = []
        for logits in self.prompt.of(body):
            n, vocab = logits.shape[1:]
            tokens = ids[:, start + 1 : start + 1 + n].to(logits.device)
            start += n
            logits = logits[:, : tokens.shape[1]]
            flat = measure(
                logits.flatten(0, 1).float(),
                tokens.clamp(0, vocab - 1).flatten(),  # some are outside of the vocabulary
                self.settings,
            )
            measures.append(Measures(*(column.unflatten(0, tokens.shape) for column in flat)))
            del logits  # before the next ones are computed
        if start != ids.shape[1]:
            raise ValueError(
                "`prompt_logprobs` are read off logits of each token, but "
                f"{type(self.prompt.model).__name__} gives {start} for a prompt of {ids.shape[1]} "
                "tokens. Leave `prompt_logprobs` out."
            )
        is_token = self.prompt.is_token & (ids >= 0) & (ids < vocab)
        is_token[:, 1:] &= self.prompt.is_token[:, :-1]
        is_token[:, 0] = False
        columns = (
            torch.cat(column, dim=1).to(ids.device) for column in zip(*measures, strict=True)
        )
        # One more position in front, for the first token.
        padded = (pad(column, (*(0, 0) * (column.ndim - 2), 1, 0)) for column in columns)
        return Logprobs.of(ids, is_token, Measures(*padded), None, self.settings, is_prompt=True)
