"""Beam search and beam sampling: ``rows = batch * beams``, and ``n_candidates`` of each prompt in a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from ... import families
from ...logits.processors.context import n_ending_tokens
from ...memory.caches import layers
from ...running import last_logits
from ...state.run import Run, Step
from .. import outputs
from ..loop import commit
from .base import NextToken
from .hypotheses import NEG_INF, Hypotheses, take


class Beam(NextToken):
    """Keep the ``num_beams`` likeliest sequences of each prompt; return the best that ended.

    Greedy, the candidates of a step are the likeliest continuations of all beams; sampling, they
    are drawn without replacement. They are enough to go on with even if the best all end in an EOS.
    """

    drops_rows = joins = may_record = takes_rows = checks_late = True

    @classmethod
    def refusals(cls, model: Any, config: GenerationConfig) -> Iterator[str]:
        """Why a model or fields cannot be searched with."""
        if config.low_memory and not (config.num_beam_groups or 1) > 1:
            yield "`low_memory=True` is no longer supported with beam search; `cache_implementation='offloaded'` is."
        length = config.max_length if config.max_new_tokens is None else config.max_new_tokens
        try:
            float(max(length, 1)) ** float(config.length_penalty)
        except OverflowError:
            power = f"{length!s:.40} to the power of {config.length_penalty}"
            yield (
                "`length_penalty` is the power of the length (`max_new_tokens`) that scores are divided by: "
                f"{power} is too large for a float."
            )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config = run.config
        rows, self.prompt_length = run.ids.shape
        self.beams = int(config.num_beams) // (config.num_beam_groups or 1)
        self.batch = rows // self.beams
        functions = (*run.processors, *run.criteria)
        self.with_rows = [f for f in functions if hasattr(f, "reorder")]  # they remember rows
        device, eos, pad = run.ids.device, config._eos_token_tensor, config._pad_token_tensor
        differ = run.rows is not None and run.rows.differ_in("_eos_token_tensor", "stop_token_ids")
        # Enough beams are left even if all ending tokens are among the candidates.
        factors = [max(2, 1 + n_ending_tokens(c)) for c in (run.configs if differ else [config])]
        self.n_candidates = max(factors) * self.beams
        #: How many candidates each prompt has, where prompts have ending tokens of their own.
        self.n_per_prompt = [factor * self.beams for factor in factors] if differ else None
        # Only the best may end; the others are there to go on with.
        self.may_end = torch.arange(self.n_candidates, device=device) < self.beams
        self.row_offsets = torch.arange(self.batch, device=device).view(-1, 1) * self.beams
        #: The token behind the end of a sequence. Without an EOS, only the caller's criteria end one early.
        is_padded = eos is not None or (getattr(config, "ignore_eos", False) and pad is not None)
        self.fill = int(eos[0] if pad is None else pad) if is_padded else -1
        shape = (self.batch, self.beams)
        ids = run.ids.reshape(*shape, self.prompt_length).clone()
        parents = torch.empty((*shape, 0), dtype=torch.int32, device=device)
        is_done = torch.zeros(shape, dtype=torch.bool, device=device)
        none_yet = torch.full(shape, NEG_INF, device=device, dtype=torch.float32)
        self.finished = Hypotheses(ids, parents, none_yet, is_done)
        # All beams start alike: only the first may be continued, or they would stay alike.
        scores = none_yet.clone()
        scores[:, 0] = 0.0
        self.running = Hypotheses(ids, parents, scores, is_done)
        self.can_improve = torch.ones((self.batch, 1), dtype=torch.bool, device=device)
        self.is_over = ~self.can_improve  # ``(batch, 1)``: whether the search of a prompt is over
        self.n_settled = self.prompt_length  # settled tokens of each sequence; a streamer has them

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        commit(run, model_outputs)
        if self.active is not None:
            self.active.widen(run, model_outputs)
        logits = last_logits(model_outputs, run.ids.device)
        observed = outputs.observe(run, model_outputs)
        del model_outputs
        candidates, scores = self.propose(run, logits.log_softmax(dim=-1))
        self.running = self.advance(run, candidates)
        parents = self.running.parents[..., -1].flatten()
        self.reorder_cache(run, parents)
        for function in self.with_rows:
            function.reorder(parents)
        # A view: what a processor writes changes the beams.
        run.ids, settled = self.running.ids.flatten(0, 1), partial(self.settled, run)
        return Step(run.ids[:, -1:], (scores,), (logits,), settled=settled, **observed)

    def propose(self, run: Run, log_probs: torch.Tensor) -> tuple[Hypotheses, torch.Tensor]:
        """Candidates ``(batch, n)``, the likeliest first, and processed scores ``(rows, vocab)``."""
        scores = run.processors(run.ids, log_probs)
        if run.scores is not None:
            run.scores += (scores.clone(),)
        return self.candidates(run, scores), scores

    def advance(self, run: Run, candidates: Hypotheses) -> Hypotheses:
        """Return the candidates ``(batch, beams)`` that go on; those that end replace worse ones in ``finished``."""
        are_done = candidates.is_done.all(dim=1, keepdim=True)
        self.all_done = are_done.all()
        ends_now = candidates.is_done & self.may_end
        scores = self.normalised(run, candidates.scores, candidates.ids.shape[2])
        # Sums, not one mask: scores of candidates that may not enter keep the order of upstream's.
        if run.config.early_stopping is True:
            is_full = self.finished.is_done.all(dim=-1, keepdim=True)
            scores = scores + is_full.float() * NEG_INF
        scores = scores + (~self.can_improve).float() * NEG_INF
        scores = scores + (~ends_now).float() * NEG_INF
        newcomers = Hypotheses(candidates.ids, candidates.parents, scores, ends_now)
        both = self.finished.beside(newcomers, self.fill)
        n_per_prompt = self.n_per_prompt and [self.beams + n for n in self.n_per_prompt]
        self.finished = both.best(self.beams, n_per_prompt, self.is_over)
        self.is_over = self.is_over | are_done
        candidates.scores = candidates.scores + candidates.is_done.float() * NEG_INF
        return candidates.best(self.beams, self.n_per_prompt)

    def candidates(
        self, run: Run, log_probs: torch.Tensor, searches: slice = slice(None)
    ) -> Hypotheses:
        """The ``n_candidates`` continuations of each of the ``searches``, of ``log_probs (rows, vocab)``."""
        totals = self.totals(log_probs, searches)
        if run.row_choice is not None:
            choice = run.row_choice.of_prompts(searches)
            index = self.likeliest(run, choice.perturbed(totals, run.ids.shape[1]))
            index = self.by_score(totals, index)
        elif run.config.do_sample:
            step = run.ids.shape[1] - self.prompt_length
            index = self.by_score(totals, self.invalid.draw(totals, self.n_candidates, step))
        else:
            index = self.likeliest(run, totals)
        return self.continued(run, totals, index, searches)

    def totals(self, log_probs: torch.Tensor, searches: slice = slice(None)) -> torch.Tensor:
        """Scores ``(batch, beams * vocab)`` of all continuations."""
        by_beam = log_probs.reshape(-1, self.beams, log_probs.shape[-1])
        return (by_beam + self.running.scores[searches, :, None]).flatten(1)

    def continued(
        self, run: Run, totals: torch.Tensor, index: torch.Tensor, searches: slice = slice(None)
    ) -> Hypotheses:
        """The continuations at ``index (batch, n)`` of ``totals (batch, beams * vocab)``."""
        vocab = totals.shape[1] // self.beams
        beam, token = index // vocab, index % vocab
        parent = (beam + self.row_offsets[searches]).to(torch.int32)
        ids = torch.cat([take(self.running.ids[searches], beam), token[:, :, None]], dim=2)
        parents = take(self.running.parents[searches], beam)
        parents = torch.cat([parents, parent[:, :, None]], dim=2)
        is_done = run.criteria(ids.flatten(0, 1), run.scores).view(index.shape)
        scores = totals.gather(1, index)
        if (since := self.invalid.since) is not None:
            is_invalid = (since >= 0).repeat_interleave(self.batch // len(since))
            self.end(is_invalid[:, None])
            scores = scores.masked_fill(is_invalid[searches, None], 2 * NEG_INF)
        if self.n_per_prompt is not None:
            is_done = is_done | self.is_beyond(index)
        return Hypotheses(ids, parents, scores, is_done)

    def by_score(self, totals: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The draws ``index (batch, n)``, the best first; before transformers 5.24, as they were drawn."""
        if not families.IS_5_24:
            return index
        scores = totals.gather(1, index)
        if self.n_per_prompt is not None:
            scores = scores.masked_fill(self.is_beyond(index), -torch.inf)
        return index.gather(1, scores.argsort(descending=True))

    def is_beyond(self, index: torch.Tensor) -> torch.Tensor:
        """Which of the continuations ``index (batch, n)`` are more than those of a prompt."""
        n_per_prompt = torch.tensor(self.n_per_prompt, device=index.device)[:, None]
        return torch.arange(index.shape[1], device=index.device) >= n_per_prompt

    def end(self, searches: torch.Tensor) -> None:
        self.is_over, self.can_improve = self.is_over | searches, self.can_improve & ~searches

    def likeliest(self, run: Run, totals: torch.Tensor) -> torch.Tensor:
        """Indices ``(batch, n_candidates)`` of the highest of ``totals (batch, beams * vocab)``."""
        if self.n_per_prompt is None:
            index = torch.topk(totals, k=self.n_candidates).indices
        else:
            pairs = zip(totals, self.n_per_prompt, strict=True)
            index = pad_sequence([row.topk(n).indices for row, n in pairs], batch_first=True)
        best = totals.gather(1, index[:, :1])[:, 0]  # NaN counts as the largest
        self.invalid.note(best, run.ids.shape[1] - self.prompt_length)
        return index

    def normalised(self, run: Run, scores: torch.Tensor, length: int) -> torch.Tensor:
        return scores / (length - self.prompt_length) ** float(run.config.length_penalty)

    def reorder_cache(self, run: Run, rows: torch.Tensor) -> None:
        """Reorder the cache: each row becomes ``rows (rows,)``, that of the beam which it now continues."""
        if (name := families.cache_name(run.model_kwargs)) is None:
            return
        cache = run.model_kwargs[name]
        rows = rows if self.active is None else self.active.local(rows)
        if hasattr(run.model, "_reorder_cache"):  # RAG reorders documents, too
            run.model_kwargs[name] = run.model._reorder_cache(cache, rows)
        elif not hasattr(cache, "reorder_cache"):
            raise ValueError(
                f"{type(run.model).__name__} cannot search with beams: its cache "
                f"({type(cache).__name__}) cannot be reordered. Set `use_cache=False`."
            )
        # Looking is free where no device has to be waited for; copying the cache is not.
        elif not rows.is_cpu or rows.tolist() != list(range(len(rows))):
            if run.shares_prompts:
                layers.reorder_beams(cache, rows, run.is_encoder_decoder)
            else:
                cache.reorder_cache(rows)

    def stop(self, run: Run) -> None:
        """End a search whose best running beam cannot beat its worst ended one; with "never", at any length."""
        config = run.config
        is_never = config.early_stopping == "never" and config.length_penalty > 0.0
        lengths = [config.max_length if is_never else run.ids.shape[1]]
        if is_never and run.rows is not None:  # each prompt has its own greatest length
            lengths = run.rows.values("max_length")
        best = self.running.scores[:, :1]
        parts = zip(best.split(len(best) // len(lengths)), lengths, strict=True)
        possible = torch.cat([self.normalised(run, part, length) for part, length in parts])
        worst = self.finished.scores.min(dim=1, keepdim=True)[0]
        worst = torch.where(self.finished.is_done, worst, NEG_INF)
        self.can_improve = self.can_improve & (possible > worst).any(dim=-1, keepdim=True)
        if self.stops_by_length_only and not run.ids.is_cpu:  # nothing to wait for
            run.finished = run.ids.shape[1] >= run.criteria.max_length
            return
        is_open = self.is_open(run)
        self.is_over = self.is_over | ~is_open

        def settle(values: list[int]) -> None:
            all_done, is_full, can_improve, n_open = values
            is_full = run.config.early_stopping is True and is_full
            run.finished = bool(all_done or is_full or not can_improve)
            if self.active is not None and self.active.may_leave and not run.finished:
                rows = is_open.expand(-1, self.beams).flatten()
                self.active.keep(run, rows, n_open * self.beams)

        is_full, can_improve = self.finished.is_done.all(), self.can_improve.any()
        self.check(run, settle, self.all_done, is_full, can_improve, is_open.sum())

    def is_open(self, run: Run) -> torch.Tensor:
        """``(batch, 1)``: whether anything may still change what is returned for a prompt."""
        if run.config.early_stopping is not True:
            return self.can_improve
        return self.can_improve & ~self.finished.is_done.all(dim=1, keepdim=True)

    def scored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and newest tokens ``(m,)`` of the running and of the finished hypotheses."""
        searches = [one for one in (self.running, self.finished) if one.parents.shape[2]]
        rows = torch.cat([one.parents[..., -1].flatten() for one in searches])
        tokens = torch.cat([one.ids[..., -1].flatten() for one in searches])
        return rows.clamp(min=0).long(), tokens.clamp(min=0)

    def settled(self, run: Run) -> torch.Tensor:
        """Tokens ``(batch, n)`` that have become settled, for a streamer; read after ``stop``.

        A token is settled when all that may yet be returned as the best of its prompt have it: the
        running beams, while they may improve on what has ended, and the best that has ended. The
        slowest prompt decides how far the batch gets; those that are decided do not hold it back.
        """
        start, length = self.n_settled, run.ids.shape[1]
        running, finished = self.running, self.finished
        is_open = self.is_open(run) & (not run.finished)
        scores = finished.scores.masked_fill(~finished.is_done, -torch.inf)
        is_best = finished.is_done & (scores == scores.amax(dim=1, keepdim=True))
        if run.finished:  # among equals, the first is returned
            is_best = torch.arange(self.beams, device=scores.device).expand_as(scores) == 0
        may_win = torch.cat([is_best, is_open & (running.scores > -torch.inf)], dim=1)
        both = finished.beside(running, self.fill)
        ids, ends = both.ids[:, :, start:], self.prompt_length + (both.parents >= 0).sum(dim=-1)
        is_token = torch.arange(start, length, device=ids.device) < ends[:, :, None]
        first = may_win.int().argmax(dim=1, keepdim=True)
        example = take(ids, first)
        agree = (is_token & (ids == example) | ~may_win[:, :, None]).all(dim=1)
        n_agreed = agree.int().cumprod(dim=1).sum(dim=1)
        waits = is_open.squeeze(1) | (may_win.sum(dim=1) > 1)
        slowest = torch.where(waits, n_agreed, length).amin()
        n = int(torch.where(waits.any(), slowest, n_agreed.amax()))
        self.n_settled += n
        self.settled_ends = take(ends, first).squeeze(1).masked_fill(waits, -1)
        parents = take(both.parents, first)[:, 0, start - self.prompt_length :]
        self.settled_parents = parents[:, :n]
        return example[:, 0, :n]

    def row_ends(self, run: Run) -> list[int | None]:
        """Of the best of each prompt, read after ``settled``."""
        return [None if end < 0 else end for end in self.settled_ends.tolist()]

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self.invalid.conclude()
        n, finished = run.config.num_return_sequences, self.finished
        scores = finished.scores[:, :n].flatten() if run.config.output_scores else None
        parents = finished.parents[:, :n].flatten(0, 1)
        n_steps = int((parents >= 0).sum(dim=1).max())
        return {
            "sequences": finished.ids[:, :n, : self.prompt_length + n_steps].flatten(0, 1),
            "sequences_scores": scores,
            "beam_indices": parents[:, :n_steps],
        }
