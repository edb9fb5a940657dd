"""Diverse beam search (Vijayakumar et al., "Diverse Beam Search", 2016).

The beams of a prompt are divided into groups of ``size``. Within a step the groups choose one after
the other, and a token costs ``diversity_penalty`` for each beam of an earlier group that has just
chosen it. One forward serves all groups. Rows are ordered by prompt, group and beam.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from ...logits.processors import DiversityPenalty, LogitsProcessorList
from ...state.run import Run
from .hypotheses import Hypotheses, ranking
from .nbest import NBestBeam


class GroupBeam(NBestBeam):
    """A search per group; the best of all groups are returned."""

    joins = checks_late = may_record = True

    @classmethod
    def check_config(cls, model: Any, config: GenerationConfig) -> None:
        super().check_config(model, config)
        beams, groups, penalty = config.num_beams, config.num_beam_groups, config.diversity_penalty
        if config.do_sample:
            raise ValueError(
                f"`num_beam_groups`={groups} asks for diverse beam search, which does not sample. Set "
                "`do_sample=False`, or leave the groups out."
            )
        if beams % groups != 0:
            raise ValueError(
                f"`num_beam_groups` has to divide `num_beams`, but they are {groups} and {beams}."
            )
        if penalty is None or not penalty > 0:
            raise ValueError(
                f"`diversity_penalty` has to be above 0 for `num_beam_groups`={groups}, but is {penalty}."
            )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.groups = int(run.config.num_beam_groups)
        self.size = self.beams
        # The penalty keeps its place among the processors: what comes before it sees all rows once
        # per step, what comes after it sees them once per group, of which each reads its own.
        functions = list(run.processors)
        self.penalty = next((f for f in functions if isinstance(f, DiversityPenalty)), None)
        place = 0 if self.penalty is None else functions.index(self.penalty)
        self.before = LogitsProcessorList(functions[:place])
        self.after = LogitsProcessorList(functions[place:])

    @staticmethod
    def beams_of(config: GenerationConfig) -> int:
        return int(config.num_beams) // int(config.num_beam_groups)

    def propose(self, run: Run, log_probs: torch.Tensor) -> tuple[Hypotheses, torch.Tensor]:
        log_probs = self.before(run.ids, log_probs)
        scores = torch.zeros_like(log_probs)
        if run.scores is not None:
            run.scores += (scores,)
        tokens = run.ids.new_zeros(self.batch // self.groups, 0)  # chosen by the groups so far
        proposals = []
        for group in range(self.groups):
            searches = slice(group, None, self.groups)
            processed = log_probs
            if self.penalty is not None:
                processed = self.penalty.penalised(tokens, log_probs)
            processed = self.of_group(self.after(run.ids, processed), group)
            self.of_group(scores, group).copy_(processed)
            candidates = self.candidates(run, processed, searches)
            proposals.append(candidates)
            tokens = torch.cat([tokens, self.tokens_of(run, candidates, searches)], dim=1)
        fields = zip(*(candidates.fields for candidates in proposals), strict=True)
        return Hypotheses(*(torch.stack(field, dim=1).flatten(0, 1) for field in fields)), scores

    def of_group(self, tensor: torch.Tensor, group: int) -> torch.Tensor:
        """The part of ``tensor (rows, vocab)`` that is a group's: ``(prompts, size, vocab)``."""
        return tensor.unflatten(0, (-1, self.groups, self.size))[:, group]

    def tokens_of(self, run: Run, candidates: Hypotheses, searches: slice) -> torch.Tensor:
        """What a group has chosen, ``(prompts, size)``: pads where its list is closed."""
        tokens = candidates.ids[..., -1].gather(1, self.select(run, candidates).going_on)
        if (pad := run.config._pad_token_tensor) is None:
            return tokens
        return torch.where(self.is_closed[searches, None], pad.to(tokens.device), tokens)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        per_prompt = [f.unflatten(0, (-1, self.groups)).flatten(1, 2) for f in self.finished.fields]
        found = Hypotheses(*per_prompt)
        self.finished = found.at(ranking(found)[:, : run.config.num_return_sequences])
        return super().result(run)
