"""The numbers that a trace keeps for one position, instead of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .records import Candidate, Token

LOWEST = -1e29  # a token is ruled out below this score; grammars give it to beams that have ended


@dataclass(frozen=True, slots=True)
class Position:
    """The numbers of one generated position, on the host: of scored ``rows`` and ``m`` chosen tokens.

    Rows are those of the loop; of beams, those that the step began with.
    """

    step: int
    ids: Tensor  # (rows, c): likely tokens, some of them twice
    scores: Tensor  # (stages, rows, c)
    probabilities: Tensor  # (2, rows, c): the model's and the final ones
    entropies: Tensor  # (2, rows): of both, in bits
    left: Tensor  # (stages, rows)
    mass: Tensor  # (stages, rows)
    chosen: dict[tuple[int, int], int]  # (row, token) → its number among the chosen
    ranks: Tensor  # (m,)
    chosen_scores: Tensor  # (stages, m)
    chosen_probabilities: Tensor  # (2, m)

    @classmethod
    def of(
        cls, step: int, stages: list[Tensor], rows: Tensor, tokens: Tensor, top: int
    ) -> Position:
        """Measure scores ``(rows, vocab)`` of each stage; ``tokens (m,)`` were chosen in ``rows (m,)``."""
        logits, final = stages[0].float(), stages[-1].float()
        both = torch.stack([logits.softmax(dim=-1), final.softmax(dim=-1)])
        entropies = torch.special.entr(both).sum(dim=-1) / math.log(2)
        top = min(top, logits.shape[-1])
        ids = torch.cat([logits.topk(top).indices, final.topk(top).indices], dim=1)
        is_left = [stage.float() > LOWEST for stage in stages]
        of_chosen = logits[rows]
        ranks = (of_chosen > of_chosen.gather(1, tokens[:, None])).sum(dim=1) + 1
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        return cls(
            step,
            ids.cpu(),
            torch.stack([stage.float().gather(1, ids) for stage in stages]).cpu(),
            torch.stack([p.gather(1, ids) for p in both]).cpu(),
            entropies.cpu(),
            torch.stack([mask.sum(dim=1) for mask in is_left]).cpu(),
            torch.stack([both[0].masked_fill(~mask, 0.0).sum(dim=1) for mask in is_left]).cpu(),
            {pair: number for number, pair in enumerate(pairs)},
            ranks.cpu(),
            torch.stack([stage.float()[rows, tokens] for stage in stages]).cpu(),
            both[:, rows, tokens].cpu(),
        )

    def token(self, row: int, token: int, is_drafted: bool = False) -> Token:
        """The record of a token chosen in ``row``; NaN where it was never scored (a caller's processor wrote it)."""
        number = self.chosen.get((row, token))
        numbers: list[Any] = [math.nan, math.nan, (math.nan,) * len(self.scores), 0]
        if number is not None:
            both, scores = self.chosen_probabilities[:, number], self.chosen_scores[:, number]
            numbers = [*both.tolist(), tuple(scores.tolist()), int(self.ranks[number])]
        left, mass = (tuple(each[:, row].tolist()) for each in (self.left, self.mass))
        entropies, others = self.entropies[:, row].tolist(), tuple(self.candidates(row))
        return Token(token, *numbers, *entropies, *[left, mass, others, self.step, is_drafted])

    def candidates(self, row: int) -> Iterable[Candidate]:
        """The likely tokens of ``row``; of those that the processors favour, only what is left."""
        ids, top = self.ids[row].tolist(), self.ids.shape[1] // 2
        model, final = self.probabilities[:, row].tolist()
        scores = self.scores[:, row].T.tolist()
        seen = set[int]()
        for place, token in enumerate(ids):
            is_out = place >= top and final[place] == 0
            if token not in seen and not is_out:
                yield Candidate(token, model[place], final[place], tuple(scores[place]))
            seen.add(token)
