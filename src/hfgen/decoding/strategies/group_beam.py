"""Diverse beam search, and what it shares with constrained beam search: a list of the best finished hypotheses.

Both follow the rules of transformers 4.x, for equal tokens. Other than in ``Beam``, a list is closed by the
best candidate of a step, ended or not, and takes nothing afterwards. At the last step, what ended by itself
enters before what is cut off, which enters only a list that is still open.

A *search* is what fills one list: a prompt, or a group of its beams. ``batch`` counts searches here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig

from ...logits.processors.lists import LogitsProcessorList
from ...logits.processors.repetition import DiversityPenalty
from ...state.run import Run
from .beam import Beam
from .hypotheses import NEG_INF, Hypotheses

LOWEST = torch.finfo(torch.float32).min  # minus infinity where an empty place has that score


class NBestBeam(Beam):
    """Search until each list holds ``beams`` hypotheses that nothing can beat."""

    drops_rows = streams = False
    checks_late = may_record = True
    # Lists close by the call's EOS tokens and greatest length.
    fields_of_call = ("eos_token_id", "max_length", "max_new_tokens", "forced_eos_token_id")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.finished.scores = torch.full_like(self.finished.scores, -torch.inf)
        #: ``(batch, beams)``: which running hypotheses count although they did not end by themselves.
        self.is_met = torch.ones_like(self.finished.is_done)

    def advance(self, run: Run, candidates: Hypotheses) -> Hypotheses:
        going_on, ends, finished = self.select(run, candidates)
        is_last = self.is_last(candidates)
        chosen = candidates.at(going_on)
        # A place for which nothing is left holds a hypothesis that ended.
        chosen.scores = chosen.scores + ends.gather(1, going_on).float() * NEG_INF
        self.add(run, candidates, finished & ~self.is_over)
        self.close(run, candidates)
        if not is_last.is_cpu or is_last.any():  # to look at an accelerator is to wait for it
            is_cut_off = is_last & ~self.is_over
            chosen.is_done = self.is_met
            self.add(run, chosen, is_cut_off.expand_as(chosen.is_done))
            self.is_over = self.is_over | is_last
        return chosen

    def is_open(self, run: Run) -> torch.Tensor:
        return ~self.is_over

    def is_last(self, candidates: Hypotheses) -> torch.Tensor:
        """``(batch, 1)``: whether criteria leave a search nothing to go on with."""
        return candidates.is_done[:, : self.n_candidates].all(dim=1, keepdim=True)

    def ends(self, run: Run, candidates: Hypotheses) -> torch.Tensor:
        """``(batch, n)``: candidates that end by themselves; at a last step, those with an EOS."""
        newest, is_eos = candidates.ids[..., -1], torch.zeros_like(candidates.is_done)
        if (eos := run.config._eos_token_tensor) is not None:
            is_eos = torch.isin(newest, eos.to(newest.device))
        return torch.where(self.is_last(candidates), is_eos, candidates.is_done)

    def select(
        self, run: Run, candidates: Hypotheses
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Indices ``(batch, beams)`` of what goes on, and masks ``(batch, n)``: what may not, and what joins the list."""
        ends = self.ends(run, candidates)
        going_on = ends.to(torch.int8).argsort(dim=1, stable=True)[:, : self.beams]
        return going_on, ends, ends & self.may_end

    def add(self, run: Run, newcomers: Hypotheses, is_let_in: torch.Tensor) -> None:
        """Replace finished hypotheses by better ``newcomers (batch, n)``; those that are done go first."""
        if is_let_in.is_cpu and not is_let_in.any():
            return
        scores = self.normalised(run, newcomers.scores, newcomers.ids.shape[2])
        scores = scores.clamp(min=LOWEST)  # better than an empty place
        scores, is_done = scores.masked_fill(~is_let_in, -torch.inf), newcomers.is_done & is_let_in
        let_in = Hypotheses(newcomers.ids, newcomers.parents, scores, is_done)
        self.finished = self.finished.beside(let_in, self.fill).ranked(self.beams)

    def close(self, run: Run, candidates: Hypotheses) -> None:
        """Close full lists: with ``early_stopping=True`` all, else those that the best candidate cannot improve.

        That counts by its score as it is, a heuristic; with ``"never"``, at the greatest length.
        """
        config = run.config
        is_full = self.finished.is_done.all(dim=1, keepdim=True)
        if config.early_stopping is not True:
            is_never = config.early_stopping is not False and config.length_penalty > 0.0
            length = config.max_length if is_never else candidates.ids.shape[2]
            best = self.normalised(run, candidates.scores[:, :1], length)
            is_full = is_full & (self.finished.scores.amin(dim=1, keepdim=True) >= best)
        self.is_over = self.is_over | is_full

    def stop(self, run: Run) -> None:
        if self.stops_by_length_only and not run.ids.is_cpu:  # nothing to wait for
            run.finished = run.ids.shape[1] >= run.criteria.max_length
            return

        def settle(values: list[int]) -> None:
            run.finished = bool(values[0])

        self.check(run, settle, self.is_over.all())

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        scores = self.finished.scores
        self.finished.scores = scores.masked_fill(scores <= LOWEST, -torch.inf)
        return super().result(run)


class GroupBeam(NBestBeam):
    """Diverse beam search (Vijayakumar et al. 2016): a search per group; the best of all groups are returned.

    Within a step the groups of ``beams`` beams choose one after the other, and a token costs
    ``diversity_penalty`` for each beam of an earlier group that has just chosen it. One forward serves
    all groups. Rows are ordered by prompt, group and beam.
    """

    joins = checks_late = may_record = True

    @classmethod
    def refusals(cls, model: Any, config: GenerationConfig) -> Iterator[str]:
        yield from super().refusals(model, config)
        beams, groups, penalty = config.num_beams, config.num_beam_groups, config.diversity_penalty
        if config.do_sample:
            yield f"`num_beam_groups`={groups} asks for diverse beam search, which does not sample: set `do_sample=False`."
        if beams % groups != 0:
            yield f"`num_beam_groups` has to divide `num_beams`, but they are {groups} and {beams}."
        if penalty is None or not penalty > 0:
            yield f"`diversity_penalty` has to be above 0 for `num_beam_groups`={groups}, but is {penalty}."

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.groups = int(run.config.num_beam_groups)
        # The penalty keeps its place among the processors: what comes before it sees all rows once
        # per step, what comes after it sees them once per group, of which each reads its own.
        functions = list(run.processors)
        self.penalty = next((f for f in functions if isinstance(f, DiversityPenalty)), None)
        place = 0 if self.penalty is None else functions.index(self.penalty)
        self.before = LogitsProcessorList(functions[:place])
        self.after = LogitsProcessorList(functions[place:])

    def propose(self, run: Run, log_probs: torch.Tensor) -> tuple[Hypotheses, torch.Tensor]:
        log_probs = self.before(run.ids, log_probs)
        scores = torch.zeros_like(log_probs)
        if run.scores is not None:
            run.scores += (scores,)
        tokens = run.ids.new_zeros(self.batch // self.groups, 0)  # chosen by the groups so far
        proposals = []
        for group in range(self.groups):
            searches, penalised = slice(group, None, self.groups), log_probs
            if self.penalty is not None:
                penalised = self.penalty.penalised(tokens, log_probs)
            processed = self.of_group(self.after(run.ids, penalised), group)
            self.of_group(scores, group).copy_(processed)
            candidates = self.candidates(run, processed, searches)
            proposals.append(candidates)
            chosen = candidates.ids[..., -1].gather(1, self.select(run, candidates)[0])
            if (pad := run.config._pad_token_tensor) is not None:
                chosen = torch.where(self.is_over[searches], pad.to(chosen.device), chosen)
            tokens = torch.cat([tokens, chosen], dim=1)
        fields = zip(*(candidates.fields for candidates in proposals), strict=True)
        return Hypotheses(*(torch.stack(field, dim=1).flatten(0, 1) for field in fields)), scores

    def of_group(self, tensor: torch.Tensor, group: int) -> torch.Tensor:
        """The part of ``tensor (rows, vocab)`` that is a group's: ``(prompts, beams, vocab)``."""
        return tensor.unflatten(0, (-1, self.groups, self.beams))[:, group]

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        per_prompt = [f.unflatten(0, (-1, self.groups)).flatten(1, 2) for f in self.finished.fields]
        self.finished = Hypotheses(*per_prompt).ranked(run.config.num_return_sequences)
        return super().result(run)
