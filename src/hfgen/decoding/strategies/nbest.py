"""Beam search that keeps a list of the best finished hypotheses.

What diverse and constrained beam search share, by the rules of transformers 4.x for equal tokens.
They differ from ``Beam``'s in three points. A list is closed by the best candidate of a step, ended
or not, and takes nothing afterwards. At the last step, what ended by itself enters before what is cut
off. What is cut off enters only a list that is still open.

A *search* is what fills one list: a prompt, or a group of its beams. ``batch`` counts searches here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...state.run import Run
from .beam import Beam
from .hypotheses import NEG_INF, Hypotheses, ranking

#: Stands for minus infinity where an empty place has that score.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Selection:
    """What becomes of a step's candidates ``(batch, n)``."""

    going_on: torch.Tensor  # (batch, beams): indices of those that run on
    ends: torch.Tensor  # (batch, n): those that may not
    finished: torch.Tensor  # (batch, n): those that end and go to the list


class NBestBeam(Beam):
    """Search until each list holds ``beams`` hypotheses that nothing can beat."""

    drops_rows = streams = False
    checks_late = may_record = True
    # Lists close by the call's EOS tokens and greatest length.
    fields_of_call = ("eos_token_id", "max_length", "max_new_tokens", "forced_eos_token_id")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.finished.scores = torch.full_like(self.finished.scores, -torch.inf)
        self.is_closed = torch.zeros(self.batch, dtype=torch.bool, device=run.ids.device)

    def advance(self, run: Run, candidates: Hypotheses) -> Hypotheses:
        selection = self.select(run, candidates)
        is_last = self.is_last(candidates)
        chosen = candidates.at(selection.going_on)
        # A place for which nothing is left holds a hypothesis that ended.
        chosen.scores = chosen.scores + selection.ends.gather(1, selection.going_on) * NEG_INF
        self.add(run, candidates, selection.finished & ~self.is_closed[:, None])
        self.close(run, candidates)
        if not is_last.is_cpu or is_last.any():  # to look at an accelerator is to wait for it
            is_cut_off = is_last & ~self.is_closed[:, None]
            chosen.is_done = self.may_be_cut_off(chosen)
            self.add(run, chosen, is_cut_off.expand_as(chosen.is_done))
            self.is_closed = self.is_closed | is_last.squeeze(1)
        return chosen

    def end(self, searches: torch.Tensor) -> None:
        self.is_closed = self.is_closed | searches.squeeze(1)

    def is_last(self, candidates: Hypotheses) -> torch.Tensor:
        """``(batch, 1)``: whether criteria leave a search nothing to go on with."""
        return candidates.is_done[:, : self.n_candidates].all(dim=1, keepdim=True)

    def ends(self, run: Run, candidates: Hypotheses) -> torch.Tensor:
        """``(batch, n)``: candidates that end by themselves; at a last step, those with an EOS."""
        eos = run.config._eos_token_tensor
        newest, is_eos = candidates.ids[..., -1], torch.zeros_like(candidates.is_done)
        if eos is not None:
            is_eos = torch.isin(newest, eos.to(newest.device))
        return torch.where(self.is_last(candidates), is_eos, candidates.is_done)

    def select(self, run: Run, candidates: Hypotheses) -> Selection:
        """The likeliest that do not end go on; those that end count if they are the likeliest."""
        ends = self.ends(run, candidates)
        going_on = ends.to(torch.int8).argsort(dim=1, stable=True)[:, : self.beams]
        return Selection(going_on, ends, ends & self.may_end)

    def may_be_cut_off(self, chosen: Hypotheses) -> torch.Tensor:
        """``(batch, beams)``: hypotheses that count although they did not end by themselves."""
        return torch.ones_like(chosen.is_done)

    def add(self, run: Run, newcomers: Hypotheses, is_let_in: torch.Tensor) -> None:
        """Let ``newcomers (batch, n)`` in where they are better; those that are done go first."""
        if is_let_in.is_cpu and not is_let_in.any():
            return
        scores = self.normalised(run, newcomers.scores, newcomers.ids.shape[2])
        scores = scores.clamp(min=LOWEST)  # better than an empty place
        scores, is_done = scores.masked_fill(~is_let_in, -torch.inf), newcomers.is_done & is_let_in
        let_in = Hypotheses(newcomers.ids, newcomers.parents, scores, is_done)
        merged = self.finished.beside(let_in, self.fill)
        self.finished = merged.at(ranking(merged)[:, : self.beams])

    def close(self, run: Run, candidates: Hypotheses) -> None:
        """Close full lists whose worst entry is as good as the best candidate may get.

        With ``early_stopping=True``, all full lists. With ``"never"``, a candidate may get what its
        score is at the greatest length; else its score as it is, a heuristic.
        """
        config = run.config
        is_full = self.finished.is_done.all(dim=1)
        if config.early_stopping is not True:
            is_never = config.early_stopping is not False and config.length_penalty > 0.0
            length = config.max_length if is_never else candidates.ids.shape[2]
            best = self.normalised(run, candidates.scores[:, 0], length)
            is_full = is_full & (self.finished.scores.amin(dim=1) >= best)
        self.is_closed = self.is_closed | is_full

    def stop(self, run: Run) -> None:
        if self.stops_by_length_only and not run.ids.is_cpu:  # nothing to wait for
            run.finished = run.ids.shape[1] >= run.criteria.max_length
            return

        def settle(values: list[int]) -> None:
            run.finished = bool(values[0])

        self.check(run, settle, self.is_closed.all())

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        scores = self.finished.scores
        self.finished.scores = scores.masked_fill(scores <= LOWEST, -torch.inf)
        return super().result(run)
