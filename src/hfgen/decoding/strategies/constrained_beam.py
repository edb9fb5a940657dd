"""Constrained beam search: the result contains all required words.

Dynamic beam allocation (Post and Vilar 2018; Hu et al. 2019). Candidates are the likeliest continuations, and those
that bring a constraint one token further. Banks, by how far these are, share the beams.

The rules are those of transformers 4.x, by which no hypothesis that meets all constraints may be left at the end.
So a guard lets enough go on that can still meet them in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...families import n_scores
from ...settings.logs import logger
from ...state.run import Run
from .. import constraints
from ..constraints import n_tokens, wanted
from .group_beam import NBestBeam
from .hypotheses import NEG_INF, Hypotheses

ANY = -1  # the likeliest token that is no EOS, known only after the forward


class Progress:
    """How far one hypothesis is with all constraints, which are met one at a time. Immutable."""

    def __init__(self, met: int, current: Any, pending: tuple[Any, ...], unit: int) -> None:
        #: How many constraints are met, the one that is worked on, and those still to come.
        self.met, self.current, self.pending = met, current, pending
        self.unit = unit  # tokens of the longest constraint: what each is worth in ``bank``
        #: How many tokens are missing, at least.
        self.missing = sum(map(n_tokens, pending)) + (0 if current is None else n_tokens(current))
        self._next: dict[int, Progress] = {}

    @property
    def is_met(self) -> bool:
        return self.current is None and not self.pending

    @property
    def bank(self) -> int:
        """How far the hypothesis is, in tokens. Only those of the same bank compete for beams."""
        begun = 0 if self.current is None else self.unit - self.current.remaining()
        return int(self.met * self.unit + begun)

    @property
    def wanted(self) -> list[int]:
        """Tokens that bring the constraint that is worked on, else any, one step further."""
        open_ones = self.pending if self.current is None else (self.current,)
        return list(dict.fromkeys(token for one in open_ones for token in wanted(one)))

    def after(self, token: int) -> Progress:
        if (after := self._next.get(token)) is not None:
            return after
        after, constraint = self, self.current
        if constraint is None:
            constraint = next((one for one in self.pending if one.does_advance(token)), None)
        if constraint is not None:
            others = tuple(one for one in self.pending if one is not constraint)
            # A deep copy: a shallow one of the caller's may share what update() changes.
            moved = deepcopy(constraint)
            _, is_met, is_reset = moved.update(token)
            if is_reset:
                others = (*others, constraint.copy(stateful=False))
            current = None if is_met or is_reset else moved
            after = Progress(self.met + (is_met and not is_reset), current, others, self.unit)
        self._next[token] = after
        return after


@dataclass(frozen=True, slots=True)
class Candidate:
    """One continuation of a prompt's beams; ``index`` is its place among them."""

    index: int
    key: tuple[int, int]  # beam and token
    score: float
    ends: bool  # it may not go on
    progress: Progress

    @property
    def may_go_on(self) -> bool:
        """Whether it does not end, nor continues an empty beam, or by a token that is ruled out."""
        return not self.ends and self.score > NEG_INF / 2


class ConstrainedBeam(NBestBeam):
    """A hypothesis ends, and is returned before others, only if it meets the constraints."""

    joins = checks_late = may_record = True

    @classmethod
    def refusals(cls, model: Any, config: GenerationConfig) -> Iterator[str]:
        yield from super().refusals(model, config)
        name = "constraints" if config.force_words_ids is None else "force_words_ids"
        if config.do_sample:
            yield f"`{name}` asks for constrained beam search, which does not sample: set `do_sample=False`."
        if (config.num_beam_groups or 1) != 1:
            yield f"`{name}` and `num_beam_groups` (={config.num_beam_groups}) do not go together."
        if (config.num_beams or 1) < 2:
            yield f"`{name}` needs beams to search with: `num_beams` has to be at least 2, not {config.num_beams}."
        size = n_scores(model)
        for constraint in constraints.of_config(config):
            if outside := [token for token in constraints.tokens_of(constraint) if token >= size]:
                yield f"`{name}` asks for the token {outside[0]}, but the model's vocabulary has the ids 0 to {size - 1}."
        if config.max_new_tokens is not None:
            constraints.check_room(config, int(config.max_new_tokens))

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config = run.config
        pending = tuple(constraints.of_config(config))
        start = Progress(0, None, pending, max(one.remaining() for one in pending))
        #: Of each prompt: how far each running beam is; and which beams are continued by which token in any case.
        self.progress = [[start] * self.beams for _ in range(self.batch)]
        # All beams start alike: what is forced upon the first would be a duplicate in the others.
        self.forced = [[(0, token) for token in start.wanted] for _ in range(self.batch)]
        #: ``(batch, width)``: the same on the device, beams and tokens.
        columns = torch.tensor(self.forced, device=run.ids.device).view(self.batch, -1, 2)
        self.forced_beams, self.forced_tokens = columns.unbind(dim=2)
        self.is_met = torch.zeros_like(self.is_met)
        self.n_returned = int(config.num_return_sequences)
        last = run.criteria.max_length or config.max_length
        #: Length at which constraints have to be met; a forced EOS takes the last place.
        self.deadline = int(last) - (config.forced_eos_token_id is not None)

    def candidates(self, run: Run, log_probs: Tensor, searches: slice = slice(None)) -> Hypotheses:
        """The ``n_candidates`` likeliest continuations, then the forced ones, with any in empty places."""
        totals = self.totals(log_probs)
        index, beams, tokens = self.likeliest(run, totals), self.forced_beams, self.forced_tokens
        if beams.shape[1] > 0:
            if (eos := run.config._eos_token_tensor) is not None:
                log_probs = log_probs.index_fill(1, eos.to(log_probs.device), -torch.inf)
            best = log_probs.argmax(dim=1).view(self.batch, self.beams).gather(1, beams)
            forced = beams * log_probs.shape[1] + torch.where(tokens == ANY, best, tokens)
            index = torch.cat([index, forced], dim=1)
        return self.continued(run, totals, index)

    def select(self, run: Run, candidates: Hypotheses) -> tuple[Tensor, Tensor, Tensor]:
        ends, scores = self.ends(run, candidates), candidates.scores
        n, n_left = scores.shape[1], self.deadline - candidates.ids.shape[2]
        beams = candidates.parents[..., -1] - self.row_offsets
        n_done = self.finished.is_done.sum(dim=1, keepdim=True)
        facts = (beams, candidates.ids[..., -1], scores, ends, n_done, self.is_over)
        # All in one read: such numbers are exact in the dtype of the scores.
        table = torch.cat([fact.to(scores.dtype) for fact in facts], dim=1).tolist()
        going_on, finished = [], []
        for prompt, (*row, n_finished, is_closed) in enumerate(table):
            options = []
            columns = row[:n], row[n : 2 * n], row[2 * n : 3 * n], row[3 * n :]
            for i, (beam, token, score, end) in enumerate(zip(*columns, strict=True)):
                progress = self.progress[prompt][int(beam)].after(int(token))
                options.append(Candidate(i, (int(beam), int(token)), score, bool(end), progress))
            likeliest, forced = options[: self.n_candidates], options[self.n_candidates :]
            # Behind the forced ones are empty places.
            forced = forced[: len(self.forced[prompt])]
            tokens = zip(forced, self.forced[prompt], strict=True)
            named = [one for one, (_, token) in tokens if token != ANY]
            # Those that end and meet the constraints, each text once.
            texts = {one.key: one for one in (named[::-1] + likeliest[: self.beams][::-1])}
            ended = {one.index for one in texts.values() if one.ends and one.progress.is_met}
            chosen = self.divide(likeliest, named)
            n_lacking = 0 if is_closed else self.n_returned - int(n_finished) - len(ended)
            guard(chosen, likeliest + forced, n_lacking, n_left)
            finished.append([one.index in ended for one in options])
            going_on.append([one.index for one in chosen])
            self.progress[prompt] = [one.progress for one in chosen]
            self.forced[prompt] = [
                (beam, token)
                for beam, one in enumerate(chosen)
                if one.may_go_on and not is_closed
                for token in (one.progress.wanted or [ANY])
            ]
        # What the host has decided goes to the device in one copy, since each may wait.
        width = max(map(len, self.forced))
        rows = []
        for prompt, pairs in enumerate(self.forced):
            empty = [0] * (width - len(pairs))
            on = [*(beam for beam, _ in pairs), *empty, *(token for _, token in pairs), *empty]
            are_met = [one.is_met for one in self.progress[prompt]]
            rows.append([*going_on[prompt], *finished[prompt], *are_met, *on])
        sizes = [self.beams, n, self.beams, width, width]
        parts = torch.tensor(rows, device=ends.device).split(sizes, dim=1)
        indices, done, is_met, self.forced_beams, self.forced_tokens = parts
        self.is_met = is_met.bool()
        return indices, ends, done.bool()

    def divide(self, likeliest: list[Candidate], named: list[Candidate]) -> list[Candidate]:
        """The ``beams`` candidates that go on by the rules of dynamic beam allocation."""
        ended = [one for one in likeliest if one.ends]
        chosen = [one for one in likeliest if not one.ends][: self.beams]
        taken = {one.key for one in chosen}
        named = [one for one in named if one.may_go_on and one.key not in taken]
        if named:
            both = chosen + named
            banks, scores = [one.progress.bank for one in both], [one.score for one in both]
            chosen = [both[place] for place in allocate(banks, scores, self.beams)]
        return chosen + ended[: self.beams - len(chosen)]  # criteria may leave too few

    def result(self, run: Run) -> dict[str, Tensor | None]:
        n = self.n_returned
        for prompt, n_met in enumerate(self.finished.is_done[:, :n].sum(dim=1).tolist()):
            if n_met < n:
                logger.warning(
                    f"{n_met} of the {n} sequences returned for row {prompt} meet the constraints; no "
                    "other hypothesis did. Raise `max_new_tokens` or `num_beams`."
                )
        return super().result(run)


def allocate(banks: list[int], scores: list[float], n: int) -> list[int]:
    """``n`` indices: the best of each bank, highest bank first, then each second best, …; -inf last."""
    ranks: defaultdict[int, count[int]] = defaultdict(count)
    order = sorted(range(len(banks)), key=lambda index: (-banks[index], -scores[index]))
    rounds = {index: next(ranks[banks[index]]) for index in order}
    order.sort(key=lambda index: (scores[index] <= NEG_INF / 2, rounds[index]))
    return order[:n]


def guard(chosen: list[Candidate], options: list[Candidate], n: int, n_left: int) -> None:
    """Replace the last of ``chosen`` by the best of ``options``, till ``n`` can meet all in ``n_left`` more tokens."""

    def can_make_it(one: Candidate) -> bool:
        return one.may_go_on and one.progress.missing <= n_left

    n_lacking = n - sum(map(can_make_it, chosen))
    if n_lacking <= 0:
        return
    taken = {one.key for one in chosen}
    spare = {one.key: one for one in options if one.key not in taken and can_make_it(one)}
    best_first = sorted(spare.values(), key=lambda one: (-one.progress.bank, -one.score))
    places = [place for place, one in enumerate(chosen) if not can_make_it(one)][::-1]
    for place, one in zip(places[:n_lacking], best_first, strict=False):
        chosen[place] = one
