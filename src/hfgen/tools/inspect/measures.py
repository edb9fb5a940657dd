"""The numbers that a trace keeps for one position, instead of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .records import Candidate, Token

LOWEST = -1e29  # a token is ruled out below this score; grammars give it to beams that have ended


class Position:
    """The numbers of one generated position, on the host: of scored ``rows`` and ``m`` chosen tokens.

    Rows are those of the loop; of beams, those that the step began with.
    """

    def __init__(
        self, step: int, stages: list[Tensor], rows: Tensor, tokens: Tensor, top: int
    ) -> None:
        """Measure scores ``(rows, vocab)`` of each stage; ``tokens (m,)`` were chosen in ``rows (m,)``."""
        scores = torch.stack([stage.float() for stage in stages])
        logits, is_left = scores[0], scores > LOWEST
        both = scores[[0, -1]].softmax(dim=-1)  # the model's probabilities and the final ones
        top = min(top, logits.shape[-1])
        ids = torch.cat([logits.topk(top).indices, scores[-1].topk(top).indices], dim=1)
        of_chosen = logits[rows]
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        self.step = step
        self.ids = ids.cpu()  # (rows, c): likely tokens, some of them twice
        self.scores = scores.take_along_dim(ids[None], dim=-1).cpu()  # (stages, rows, c)
        self.probabilities = both.take_along_dim(ids[None], dim=-1).cpu()  # (2, rows, c)
        self.entropies = torch.special.entr(both).sum(dim=-1).cpu() / math.log(2)  # (2, rows): bits
        self.left = is_left.sum(dim=-1).cpu()  # (stages, rows)
        self.mass = both[0].masked_fill(~is_left, 0.0).sum(dim=-1).cpu()  # (stages, rows)
        #: (row, token) → its number among the chosen
        self.chosen = {pair: number for number, pair in enumerate(pairs)}
        self.ranks = (of_chosen > of_chosen.gather(1, tokens[:, None])).sum(dim=1).cpu() + 1  # (m,)
        self.chosen_scores = scores[:, rows, tokens].cpu()  # (stages, m)
        self.chosen_probabilities = both[:, rows, tokens].cpu()  # (2, m)

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
