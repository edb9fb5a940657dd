"""The numbers that a trace keeps for one position, instead of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .records import Candidate, Token

#: A token is ruled out below this score; grammars give it to beams that have ended.
LOWEST = -1e29


@dataclass(frozen=True, slots=True)
class Position:
    """The numbers of one generated position, on the host: of scored ``rows`` and ``m`` chosen tokens.

    Rows are those of the loop; of beams, those that the step began with.
    """

    step: int
    #: ``(rows, c)``: likely tokens, some of them twice.
    ids: Tensor
    #: ``(stages, rows, c)``, and the model's and the final probabilities ``(2, rows, c)``.
    scores: Tensor
    probabilities: Tensor
    #: ``(2, rows)``: in bits, of the model's probabilities and of the final ones.
    entropies: Tensor
    #: ``(stages, rows)``.
    left: Tensor
    mass: Tensor
    #: ``(row, token)`` → its number among the chosen.
    chosen: dict[tuple[int, int], int]
    #: ``(m,)``, ``(stages, m)`` and ``(2, m)``.
    ranks: Tensor
    chosen_scores: Tensor
    chosen_probabilities: Tensor

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
        """The record of a token that was chosen in ``row``.

        One that was never scored, written by a processor of the caller's, has NaN for its numbers.
        """
        number = self.chosen.get((row, token))
        rank, probability, final_probability = 0, math.nan, math.nan
        scores: tuple[float, ...] = (math.nan,) * len(self.scores)
        if number is not None:
            rank = int(self.ranks[number])
            probability, final_probability = self.chosen_probabilities[:, number].tolist()
            scores = tuple(self.chosen_scores[:, number].tolist())
        entropy, final_entropy = self.entropies[:, row].tolist()
        return Token(
            token,
            probability,
            final_probability,
            scores,
            rank,
            entropy,
            final_entropy,
            tuple(self.left[:, row].tolist()),
            tuple(self.mass[:, row].tolist()),
            tuple(self.candidates(row)),
            self.step,
            is_drafted,
        )

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
