"""Beam search and beam sampling.

Symbols: ``batch`` prompts, ``beams`` hypotheses per prompt, ``rows = batch * beams`` as the model
sees them, ``kept`` candidates per prompt and step, ``length`` tokens so far, ``prompt`` tokens at
the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from .. import outputs, quirks
from ..caches import layers
from ..call import Run, Step
from ..execution import last_logits
from ..loop import commit
from .base import InvalidScoresError, NextToken

#: Stands for minus infinity where a difference between two of them must not be NaN.
UNREACHABLE = -1.0e9


@dataclass(slots=True)
class Hypotheses:
    """Scored sequences of each prompt.

    ``ids (batch, n, length)``; ``parents (batch, n, steps)``: in which row each generated token
    was scored, -1 where there is none; ``scores (batch, n)``; ``is_done (batch, n)``.
    """

    ids: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    is_done: torch.Tensor

    def best(self, n: int) -> Hypotheses:
        """The ``n`` of each prompt with the best scores, in descending order."""
        return self.at(torch.topk(self.scores, k=n).indices)

    def at(self, index: torch.Tensor) -> Hypotheses:
        """Those at ``index (batch, m)`` of each prompt."""
        return Hypotheses(
            ids=_take(self.ids, index),
            parents=_take(self.parents, index),
            scores=_take(self.scores, index),
            is_done=_take(self.is_done, index),
        )


def _take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``tensor (batch, n, …)`` at ``index (batch, m)``: ``(batch, m, …)``."""
    shape = (*index.shape, *tensor.shape[2:])
    return tensor.gather(1, index.view(*index.shape, *[1] * (tensor.ndim - 2)).expand(shape))


class Beam(NextToken):
    """Keep the ``num_beams`` likeliest sequences of each prompt; return the best that ended.

    Greedy, the candidates of a step are the likeliest continuations of all beams; sampling, they
    are drawn without replacement. There are enough of them to go on with even if the best all end
    in an EOS.
    """

    drops_rows = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config = run.config
        if config.low_memory:
            raise ValueError(
                "`low_memory=True` is no longer a way to search with beams. Leave it out; "
                "`cache_implementation='offloaded'` saves memory."
            )
        rows, self.prompt_length = run.ids.shape
        self.beams = self.beams_of(config)
        self.batch = rows // self.beams
        device = run.ids.device
        eos = config._eos_token_tensor
        self.kept = max(2, 1 + (0 if eos is None else eos.shape[0])) * self.beams
        # Only the best may end; the others are there to go on with.
        self.may_end = torch.arange(self.kept, device=device) < self.beams
        self.unmoved = list(range(rows))
        self.row_offsets = torch.arange(self.batch, device=device).view(-1, 1) * self.beams

        # Without an EOS nothing ends early, but for a criterion of the caller's.
        pad = config._pad_token_tensor
        fill = -1 if eos is None else int(eos[0] if pad is None else pad)
        # A criterion of the caller's may allow more than the config.
        self.max_length = int(max(config.max_length, run.criteria.max_length or 0))
        n_steps = self.max_length - self.prompt_length
        shape = (self.batch, self.beams)
        ids = torch.full((*shape, self.max_length), fill, dtype=torch.long, device=device)
        ids[:, :, : self.prompt_length] = run.ids.reshape(*shape, self.prompt_length)
        parents = torch.full((*shape, n_steps), -1, dtype=torch.int32, device=device)
        is_done = torch.zeros(shape, dtype=torch.bool, device=device)
        # All beams start alike: only the first may be continued, or they would stay alike.
        scores = torch.zeros(shape, device=device)
        scores[:, 1:] = UNREACHABLE
        self.running = Hypotheses(ids, parents, scores, is_done)
        none_yet = torch.full(shape, UNREACHABLE, device=device)
        self.ended = Hypotheses(ids.clone(), parents.clone(), none_yet, is_done)
        self.can_improve = torch.ones((self.batch, 1), dtype=torch.bool, device=device)
        self.all_hit = False
        #: So many tokens of each prompt are settled, and a streamer has them.
        self.settled = self.prompt_length

    @staticmethod
    def beams_of(config: GenerationConfig) -> int:
        """How many beams search together."""
        return int(config.num_beams)

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        commit(run, model_outputs)
        self.active.widen(run, model_outputs)
        logits = last_logits(model_outputs, run.ids.device)
        log_probs = run.processors(run.ids, logits.log_softmax(dim=-1))
        if run.scores is not None:
            run.scores += (log_probs.clone(),)
        observed = outputs.observe(run, model_outputs)
        del model_outputs

        candidates = self.candidates(run, log_probs)
        length = candidates.ids.shape[2]
        self.all_hit = bool(candidates.is_done.all())
        self.add_ended(run, candidates)
        candidates.scores = candidates.scores + candidates.is_done.float() * UNREACHABLE
        write(self.running, candidates.best(self.beams))
        self.reorder_cache(
            run, self.running.parents[..., length - 1 - self.prompt_length].flatten()
        )
        run.ids = self.running.ids[:, :, :length].flatten(0, 1)
        return Step(
            tokens=run.ids[:, -1:],
            scores=(log_probs,),
            logits=(logits,),
            streamed=partial(self.newly_settled, run),
            **observed,
        )

    def candidates(
        self, run: Run, log_probs: torch.Tensor, searches: slice = slice(None)
    ) -> Hypotheses:
        """The ``kept`` continuations of each prompt to choose from, of ``log_probs (rows, vocab)``.

        Those that a stopping criterion ends are done. ``searches`` are those of the batch to which
        the rows belong.
        """
        totals = self.totals(log_probs, searches)
        if run.config.do_sample:
            index = self.draw(run, totals)
        else:
            scores, index = torch.topk(totals, k=self.kept)
            self.check(run, scores[:, 0].isnan())  # NaN counts as the largest
        return self.continued(run, totals, index, searches)

    def totals(self, log_probs: torch.Tensor, searches: slice = slice(None)) -> torch.Tensor:
        """Scores ``(batch, beams * vocab)`` of all continuations."""
        by_beam = log_probs.reshape(-1, self.beams, log_probs.shape[-1])
        return (by_beam + self.running.scores[searches, :, None]).flatten(1)

    def continued(
        self, run: Run, totals: torch.Tensor, index: torch.Tensor, searches: slice = slice(None)
    ) -> Hypotheses:
        """The continuations at ``index (batch, n)`` of ``totals (batch, beams * vocab)``."""
        vocab, length = totals.shape[1] // self.beams, run.ids.shape[1]
        beam, token = index // vocab, index % vocab
        n_steps = length - self.prompt_length
        parent = (beam + self.row_offsets[searches]).to(torch.int32)
        ids = _take(self.running.ids[searches, :, :length], beam)
        ids = torch.cat([ids, token[:, :, None]], dim=2)
        parents = _take(self.running.parents[searches, :, :n_steps], beam)
        hits = run.criteria(ids.flatten(0, 1), run.scores)
        return Hypotheses(
            ids=ids,
            parents=torch.cat([parents, parent[:, :, None]], dim=2),
            scores=totals.gather(1, index),
            is_done=hits.view(index.shape),
        )

    def draw(self, run: Run, totals: torch.Tensor) -> torch.Tensor:
        """Indices ``(batch, kept)`` into ``totals (batch, beams * vocab)``, without replacement."""
        probabilities = totals.softmax(dim=-1)
        if totals.is_cpu:
            try:
                return torch.multinomial(probabilities, num_samples=self.kept)
            except RuntimeError:  # some prompt is invalid: say which
                pass
        self.check(run, probabilities.sum(dim=-1).isnan())
        return torch.multinomial(probabilities, num_samples=self.kept)

    def check(self, run: Run, is_invalid: torch.Tensor) -> None:
        """Raise if the scores of a prompt cannot be used: ``is_invalid (batch,)``."""
        if is_invalid.any():
            step = run.ids.shape[1] - self.prompt_length
            raise InvalidScoresError(is_invalid.nonzero().flatten().tolist(), step)

    def add_ended(self, run: Run, candidates: Hypotheses) -> None:
        """Let candidates that ended replace worse ones, by score per length to the penalty's power."""
        config, length = run.config, candidates.ids.shape[2]
        ends_now = candidates.is_done & self.may_end
        scores = candidates.scores / (length - self.prompt_length) ** config.length_penalty
        # Sums and not one mask: so rows that none may enter stay ordered as upstream's are.
        if config.early_stopping is True:
            is_full = self.ended.is_done.all(dim=-1, keepdim=True)
            scores = scores + is_full.float() * UNREACHABLE
        scores = scores + (~self.can_improve).float() * UNREACHABLE
        scores = scores + (~ends_now) * UNREACHABLE
        n_steps = length - self.prompt_length
        merged = Hypotheses(
            ids=torch.cat([self.ended.ids[:, :, :length], candidates.ids], dim=1),
            parents=torch.cat([self.ended.parents[:, :, :n_steps], candidates.parents], dim=1),
            scores=torch.cat([self.ended.scores, scores], dim=1),
            is_done=torch.cat([self.ended.is_done, ends_now], dim=1),
        )
        write(self.ended, merged.best(self.beams))

    def reorder_cache(self, run: Run, rows: torch.Tensor) -> None:
        """Let each row of the cache be that of the beam which the row now continues."""
        name = quirks.cache_name(run.model_kwargs)
        if name is None:
            return
        cache = run.model_kwargs[name]
        rows = self.active.local(rows)
        if hasattr(run.model, "_reorder_cache"):  # RAG and others know better
            run.model_kwargs[name] = run.model._reorder_cache(cache, rows)
        elif hasattr(cache, "reorder_cache"):
            # Looking is free where no device has to be waited for; copying the cache is not.
            if rows.is_cpu and rows.tolist() == self.unmoved[: len(rows)]:
                return
            if run.shares_prompts:
                layers.reorder_beams(cache, rows, run.is_encoder_decoder)
            else:
                cache.reorder_cache(rows)
        else:
            raise ValueError(
                f"{type(run.model).__name__} cannot search with beams: its cache "
                f"({type(cache).__name__}) cannot be reordered. Set `use_cache=False`."
            )

    def stop(self, run: Run) -> None:
        self.update_can_improve(run)
        config = run.config
        is_full = config.early_stopping is True and bool(self.ended.is_done.all())
        run.finished = self.all_hit or is_full or not bool(self.can_improve.any())
        if self.active.may_leave and not run.finished:
            rows = self.is_open(run).expand(-1, self.beams).flatten()
            self.active.keep(run, rows, int(rows.sum()))

    def is_open(self, run: Run) -> torch.Tensor:
        """``(batch, 1)``: whether anything may still change what is returned for a prompt."""
        is_full = (run.config.early_stopping is True) & self.ended.is_done.all(dim=1, keepdim=True)
        return self.can_improve & ~is_full & (not run.finished)

    def update_can_improve(self, run: Run) -> None:
        """Whether the best running beam of a prompt may still beat its worst ended one.

        With ``early_stopping="never"``, by the best score that it can have at any length; else by
        its score as it is now, which is a heuristic.
        """
        config = run.config
        is_never = config.early_stopping == "never" and config.length_penalty > 0.0
        length = config.max_length if is_never else run.ids.shape[1]
        possible = self.running.scores[:, :1] / (
            (length - self.prompt_length) ** config.length_penalty
        )
        worst = self.ended.scores.min(dim=1, keepdim=True)[0]
        worst = torch.where(self.ended.is_done, worst, UNREACHABLE)
        self.can_improve = self.can_improve & (possible > worst).any(dim=-1, keepdim=True)

    def newly_settled(self, run: Run) -> torch.Tensor:
        """Tokens ``(batch, n)`` that have become settled, for a streamer; read after ``stop``.

        A token is settled when all that may yet be returned as the best of its prompt have it: the
        running beams, while they may improve on what has ended, and the best that has ended. The
        slowest prompt decides how far the batch gets; those that are decided do not hold it back.
        (If processors forbid every continuation nothing can end, and what is returned is arbitrary.)
        """
        start, length = self.settled, run.ids.shape[1]
        running, ended = self.running, self.ended
        is_open = self.is_open(run)
        scores = ended.scores.masked_fill(~ended.is_done, -torch.inf)
        is_best = ended.is_done & (scores == scores.amax(dim=1, keepdim=True))
        if run.finished:  # among equals, the first is returned
            is_best = torch.arange(self.beams, device=scores.device).expand_as(scores) == 0
        may_win = torch.cat([is_best, is_open & (running.scores > -torch.inf)], dim=1)

        ids = torch.cat([ended.ids, running.ids], dim=1)[:, :, start:length]
        ends = self.prompt_length + (ended.parents >= 0).sum(dim=-1)
        ends = torch.cat([ends, torch.full_like(ends, length)], dim=1)
        is_token = torch.arange(start, length, device=ids.device) < ends[:, :, None]
        example = _take(ids, may_win.int().argmax(dim=1, keepdim=True))
        agree = (is_token & (ids == example) | ~may_win[:, :, None]).all(dim=1)
        n_agreed = agree.int().cumprod(dim=1).sum(dim=1)
        waits = is_open.squeeze(1) | (may_win.sum(dim=1) > 1)
        n = int(n_agreed[waits].min() if waits.any() else n_agreed.max())
        self.settled += n
        return example[:, 0, :n]

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        n = run.config.num_return_sequences
        parents = self.ended.parents[:, :n].flatten(0, 1)
        n_steps = int((parents >= 0).sum(dim=1).max())
        ids = self.ended.ids[:, :n].flatten(0, 1)
        scores = self.ended.scores[:, :n].flatten()
        return {
            "sequences": ids[:, : self.prompt_length + n_steps],
            "sequences_scores": scores if run.config.output_scores else None,
            "beam_indices": parents[:, :n_steps],
        }


def write(pool: Hypotheses, chosen: Hypotheses) -> None:
    """Write ``chosen`` into the buffers of ``pool``; what lies after its length stays padding."""
    pool.ids[:, :, : chosen.ids.shape[2]] = chosen.ids
    pool.parents[:, :, : chosen.parents.shape[2]] = chosen.parents
    pool.scores, pool.is_done = chosen.scores, chosen.is_done
