"""Observers of ``loop.drive`` that record log-probabilities: of each step, and of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...running.prompt_logits import Body, PromptLogits
from ...state.run import Observer, Run, Step, Strategy
from .result import LogprobRequest, Logprobs, Measures, Settings, measure, mode_of


@dataclass(frozen=True, slots=True)
class Position:
    """One generated position with ``m`` tokens: one of each row, or those that beams may return."""

    tokens: Tensor  # (m,)
    rows: Tensor | None  # (m,): the rows that scored them; ``None`` for all in order
    is_token: Tensor | None  # (m,): and no padding; ``None`` for all
    measures: Measures  # top and asked ones are those of all rows
    support: Tensor | None = None  # (n, 2): rows and tokens left, with ``logprobs_support``


class Recorder(Observer):
    """Collects ``logprobs``: of each step only ``(rows, k)`` numbers, left on the device.

    Raw are the model's own logits: of beams before the search adds its scores, of DoLa the last
    layer's, of contrastive search before similarity counts, of drafted tokens the target model's.
    Processed are the scores that processors return: for DoLa, of the contrast; for beams, of
    log-probabilities, which are not normalised again in ``"processed_logits"``.
    """

    def __init__(self, run: Run) -> None:
        requests = [LogprobRequest.of(config) for config in run.configs]
        self.settings, self.n_rows = Settings(requests, mode_of(run.config)), len(run.ids)
        self.nothing = run.ids[:, :0]
        self.has_support = bool(getattr(run.config, "logprobs_support", None))
        self.asked_ids = self.settings.token_ids(len(run.ids), run.ids.device)
        self.positions: list[Position] = []

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        name = "scores" if self.settings.is_processed else "logits"
        scores: Any = getattr(step, name)
        if scores is None:
            raise ValueError(
                f"`logprobs` need `Step.{name}`, which {type(strategy).__name__} does not set."
            )
        processed: Any = step.scores
        if self.has_support and processed is None:
            raise ValueError(
                f"`logprobs_support` needs `Step.scores`, which {type(strategy).__name__} does not set."
            )
        columns, n_rows = step.tokens.unbind(dim=1), len(step.tokens)
        rows = is_token = None
        if hasattr(strategy, "scored"):
            rows, *columns = strategy.scored()
            n_rows = self.n_rows
        elif hasattr(strategy, "is_token"):
            is_token = strategy.is_token(run, step)
        for place, tokens in enumerate(columns):
            # A model with guidance of its own scores each row twice: first with its prompt.
            of_rows = scores[place][:n_rows]
            measures = measure(of_rows, tokens, self.settings, self.asked_ids, rows)
            is_counted = None if is_token is None else is_token[:, place]
            support = None
            if self.has_support:
                support = (processed[place][:n_rows] > -torch.inf).nonzero()
            self.positions.append(Position(tokens, rows, is_counted, measures, support))

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Tensor | None]) -> None:
        """Set ``output.logprobs`` to those of the returned sequences."""
        paths: Any = result.get("beam_indices")
        sequences: Any = result["sequences"]
        logprobs = self.collected() if paths is None else self.of_paths(sequences, paths)
        run.extras["logprobs"] = logprobs

    def collected(self, start: int = 0) -> Logprobs:
        """Log-probabilities of all rows from generated position ``start`` on; not for beams."""
        if not (positions := self.positions[start:]):
            return Logprobs.empty(self.nothing, self.asked_ids, self.settings)
        tokens = torch.stack([p.tokens for p in positions], dim=1)
        is_token = torch.ones_like(tokens, dtype=torch.bool)
        for place, position in enumerate(positions):
            if position.is_token is not None:
                is_token[:, place] = position.is_token
        facts = tokens, is_token, _stacked([p.measures for p in positions])
        support = [(p.support, None) for p in positions] if self.has_support else None
        return Logprobs.of(*facts, self.asked_ids, self.settings, support=support)

    def of_paths(self, sequences: Tensor, paths: Tensor, start: int = 0) -> Logprobs:
        """Log-probabilities of the last ``n`` tokens of ``sequences (returned, length)``.

        The rows ``paths (returned, n)`` scored them, from generated position ``start`` on.
        """
        n, n_tokens = paths.shape
        if (asked_ids := self.asked_ids) is not None:  # the same in all rows of a prompt
            asked_ids = asked_ids[torch.arange(n, device=asked_ids.device) * self.n_rows // n]
        if n_tokens == 0:
            return Logprobs.empty(paths, asked_ids, self.settings)
        tokens, rows = sequences[:, sequences.shape[1] - n_tokens :], paths.clamp(min=0).long()
        columns = zip(self.positions[start : start + n_tokens], tokens.T, rows.T, strict=True)
        table = [(p.support, of_rows, _at(p, ids, of_rows)) for p, ids, of_rows in columns]
        measures = _stacked([measures for *_, measures in table])
        support = [place[:2] for place in table] if self.has_support else None
        return Logprobs.of(tokens, paths >= 0, measures, asked_ids, self.settings, support=support)


def _at(position: Position, tokens: Tensor, rows: Tensor) -> Measures:
    """The measures of ``tokens (n,)`` by the scores of ``rows (n,)``."""
    measures, scored_rows = position.measures, position.rows
    if scored_rows is None:
        scored_rows = torch.arange(len(position.tokens), device=tokens.device)
    is_same = (scored_rows == rows[:, None]) & (position.tokens == tokens[:, None])
    index = is_same.int().argmax(dim=1)
    # A token that a caller's processor wrote into the ids was never scored.
    logprobs = measures.logprobs[index].masked_fill(~is_same.any(dim=1), torch.nan)
    of_rows = (column[rows] for column in measures[2:])  # of top and asked ids
    return Measures(logprobs, measures.ranks[index], *of_rows)


def _stacked(measures: list[Measures]) -> Measures:
    """``(n, …)`` of each position as ``(n, positions, …)``."""
    return Measures(*(torch.stack(column, dim=1) for column in zip(*measures, strict=True)))


class PromptRecorder(Observer):
    """Collects ``prompt_logprobs``: one row per prompt, however many sequences are returned for it.

    The first token has none, nor has one behind padding. Processed scores are the raw ones. A placeholder of an
    image or of sound has the value of its id, none outside of the vocabulary. Of an encoder-decoder, prompts
    are the decoder's.
    """

    def __init__(self, run: Run) -> None:
        self.prompt = PromptLogits(run)
        counts = [getattr(config, "prompt_logprobs", None) for config in run.configs]
        self.settings = Settings([LogprobRequest(n_top) for n_top in counts], mode_of(run.config))
        run.body = Body.of_prefill(run)

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        if "prompt_logprobs" not in run.extras:
            run.extras["prompt_logprobs"] = self.measured(run.body)
            run.body = None
            self.prompt.kwargs.clear()

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Tensor | None]) -> None:
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
            inside = tokens.clamp(0, vocab - 1).flatten()
            flat = measure(logits.flatten(0, 1).float(), inside, self.settings)
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
        columns = (torch.cat(parts, dim=1).to(ids.device) for parts in zip(*measures, strict=True))
        # One more position in front, for the first token.
        padded = (pad(column, (*(0, 0) * (column.ndim - 2), 1, 0)) for column in columns)
        return Logprobs.of(ids, is_token, Measures(*padded), None, self.settings, is_prompt=True)
