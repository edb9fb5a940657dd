"""Assisted (speculative) decoding: a drafter guesses, one forward pass of the model verifies.

A round feeds the tokens of the positions ``start - 1 … start + n - 1``, with ``start`` the length that
all rows have reached; its logits tell the tokens of ``start … start + n``. Rows accept different
numbers of tokens. A row that is ahead feeds, in the next round, tokens that it knows already
in the place of drafts; so all rows keep the cache layout of plain decoding, and any cache that can
be rolled back will do. What all rows know leaves the round as a ``Step``.

A round of three rows. All know 8 tokens (``start`` = 8), row 1 knows 10; the cache holds 7 columns::

                 known  column 7 │ 8   9   10  11
    row 0          8       31    │ 41  42  43  44     drafts 41 42 43 44
    row 1         10       32    │ 51  52  53  ·      knows 51 52, drafts 53
    row 2          8       33    │ 61  62  63  64     drafts 61 62 63 64

Columns 7 to 11 are fed, 5 tokens a row. The model's choices for the positions 8 to 12::

    row 0      41  42  43  44  45     4 drafts accepted, and one more token: known 13
    row 1       ·   ·  59   ·   ·     the draft 53 is rejected, 59 is its token: known 11
    row 2      61  70   ·   ·   ·     61 accepted, 62 rejected, 70 is its token: known 10

The least of these is 10: all rows advance by 2. Of the 5 columns fed, the cache keeps 2 (it holds 9), and
takes 3 back. The step's tokens are 41 42, 51 52 and 61 70. The next round starts at 10: row 0 feeds 43, 44
and 45 again, in place of drafts, and row 1 feeds 59.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import StaticLayer
from transformers.utils import ModelOutput

from ... import families
from ...families import CACHE
from ...logits.grammar.processor import GrammarProcessor
from ...memory.caches import layers
from ...running import Executor, prefill, prompts, ranks
from ...running.prefix.eligibility import rotary_limits
from ...running.row_states import has_own_hooks
from ...state.call import Call
from ...state.run import Run, Speculation, Step
from .. import outputs
from ..drafters import base as drafting
from ..drafters import has_foreign_generator, make_drafter, make_schedule
from ..drafters.base import Acceptance, Draft, DraftContext, Setup
from ..drafters.forced import UnderGrammar
from ..drafters.lookup import PromptLookup
from ..drafters.memory import DrafterOfCall
from ..loop import commit
from .drafted_rows import DraftedRows
from .verification import GreedyMatch, PlainMatch, SpeculativeSampling, is_plain, verify


class Assisted:
    """Verify what the drafter of a call guesses, as many tokens a round as its schedule says."""

    continues_cache = may_record = rolls_back = takes_rows = True
    shares_prefill = False  # the prompt may be forwarded with a draft

    @staticmethod
    def reads_prompt(model: Any, call: Call) -> bool:
        """Whether the drafter of ``call`` may read hidden states of the whole prompt."""
        assistant = call.request.assistant_model
        hook = type(model)._get_candidate_generator
        return (
            not hook.__module__.startswith(("hfgen.", "transformers.generation."))
            or hasattr(assistant, "get_candidates")
            or bool(getattr(assistant, "forward_arguments", None))
            or has_foreign_generator(call.config, assistant)
        )

    def __init__(self, setup: Setup) -> None:
        run, config = setup.run, setup.run.config
        self.drafter = make_drafter(setup)
        self.schedule = make_schedule(setup, self.drafter)
        if followers := [p.follower for p in run.processors if isinstance(p, GrammarProcessor)]:
            self.drafter = UnderGrammar(self.drafter, followers[0])
        weight = config.assistant_ensemble_weight
        self.verification: GreedyMatch | SpeculativeSampling = GreedyMatch(weight)
        if run.row_choice is not None:
            self.verification = GreedyMatch(row_choice=run.row_choice)
        elif config.do_sample:
            self.verification = SpeculativeSampling(weight, is_upstreams=setup.is_exact)
        self.plain = PlainMatch(run) if is_plain(run, self.verification) else None
        #: Whether the tokens do not depend on what is drafted.
        self.is_free_of_drafts = run.row_choice is not None or not (config.do_sample or weight)
        self.overrides = self.drafter.forward_arguments  # the drafter's arguments of the forward
        self.executor = Executor(run, may_compile=families.IS_5_24, may_record=True)
        self.cache: Any = run.model_kwargs.get(CACHE)
        _check_cache(run, self.cache)
        self.keeps_all_tokens = layers.keeps_all_tokens(self.cache)
        self.recorders = ExitStack()  # of caches while they decode
        self.rotary_limits = rotary_limits(run.model)
        self.rows = DraftedRows(run, setup.max_length)
        embedding = families.token_embedding(run.model)
        self.vocab = math.inf if embedding is None else embedding.num_embeddings
        self.placeholders = families.placeholder_tokens(run.model)
        #: A token that shifts the positions of those that are fed behind it, in the same forward.
        self.position_pad = families.position_pad(run.model)
        self.draft: Draft | None = None
        self.n_new = 0  # how many tokens the round feeds after the last that all rows know
        self.is_first = True
        self.stats = run.speculation = Speculation()

    @property
    def shares_rounds(self) -> bool:
        """Whether its rounds may be forwarded with other calls': no token depends on drafts, no draft on more than ids."""
        drafter = self.drafter.drafter if type(self.drafter) is UnderGrammar else self.drafter
        return (
            self.is_free_of_drafts
            and type(drafter) in (PromptLookup, DrafterOfCall)
            and self.position_pad is None
            and self.keeps_all_tokens
        )

    def prefill(self, run: Run) -> ModelOutput | None:
        """Forward a prompt that rows share, in chunks, of embeddings or padding alone; any where devices are in step."""
        is_shared = prompts.can_share_prefill(run) and not self.overrides
        has_chunks = run.config.prefill_chunk_size is not None and not self.overrides
        has_embeds = run.model_kwargs.get("inputs_embeds") is not None
        has_embeds = has_embeds and not run.is_encoder_decoder
        # Of a prompt that is all padding, eager attention takes the mean over all keys, also drafts'.
        mask = run.mask
        masks_a_row = mask is not None and mask.ndim == 2 and not (mask != 0).any(dim=1).all()
        is_shifted = self.position_pad is not None and bool((run.ids == self.position_pad).any())
        # A hook may drop keys of the prompt, and should not see drafts among its tokens; an ensemble and
        # speculative sampling choose other tokens without these drafts.
        is_watched = self.is_free_of_drafts and has_own_hooks(run.model)
        alone = is_shared, has_chunks, has_embeds, masks_a_row, is_shifted, is_watched
        if not any(alone) and not run.synced_gpus:
            return None
        self.is_first = False
        self.stats.forwards += 1
        if is_shared:
            return self.executor.prefill(run)
        model_kwargs = run.model_kwargs | self.overrides if self.overrides else run.model_kwargs
        return prefill(run.model, run.ids, run.config, model_kwargs)

    def decoding(self, run: Run) -> AbstractContextManager[Any]:
        self.recorders.enter_context(layers.recording(self.cache))
        return self.recorders

    def forward(self, run: Run) -> ModelOutput:
        start = run.ids.shape[1]
        self.make_draft(run, start)
        ranks.wait(run)
        ids, is_first = self.rows.tokens[:, : start + self.n_new], self.is_first
        self.is_first = False
        return self.executor.verify(run, ids, self.n_new, is_first=is_first, **self.overrides)

    def make_draft(self, run: Run, start: int) -> None:
        """Write drafted tokens behind the known ones; set how many tokens are new to the cache."""
        self.stats.forwards += 1
        rows = self.rows
        self.draft, self.n_new = None, 0
        n, room = self.schedule.n_tokens, self.rows.max_length - 1 - start
        if not self.drafter.is_always_asked and not (self.drafter.overshoots and room > 0):
            n = min(n, room)  # the last token is not forwarded
        if not self.keeps_all_tokens:
            n = int(min(n, layers.capacity(self.cache) - start))
        for kind, limit in self.rotary_limits:  # one forward rotates all its tokens as its last
            positions = run.model_kwargs.get("position_ids")
            length = start if positions is None else int(positions[..., -1].max()) + 1
            # Phi-3 counts columns, and begins a cache that has not recorded the drafts.
            may_replace_cache = not self.keeps_all_tokens and (self.is_first or start == limit + 1)
            if (kind == "dynamic" and length > limit) or (may_replace_cache and start > limit):
                n = 0
            n = min([n, *(limit - count for count in (start, length) if count <= limit)])
        if all(rows.has_ended):  # known to the end, not yet in the cache
            self.n_new = 0 if run.finished else max(rows.known) - 1 - start
        elif n > 0:
            filled = self.ask(start, n)
            triples = zip(rows.known, filled, rows.has_ended, strict=True)
            ahead = [max(known - start, length) for known, length, ended in triples if not ended]
            self.n_new = min(self.schedule.width(ahead), n)
        rows.place(None if self.draft is None else self.draft.tokens, start, self.n_new)
        if self.position_pad is not None:  # no further than the first such token of a row
            is_pad = rows.tokens[:, start - 1 : start + self.n_new] == self.position_pad
            columns = (is_pad & ~rows.device_ended[:, None]).any(dim=0).nonzero()
            if len(columns):
                self.shorten(int(columns[0]))

    def shorten(self, n: int) -> None:
        """Let the round feed no more than ``n`` tokens after the last that all rows know."""
        self.n_new = min(self.n_new, n)
        self.rows.guesses = self.rows.guesses[:, : self.n_new]

    def ask(self, start: int, n: int) -> Sequence[int]:
        """Set the draft of up to ``n`` tokens a row from ``start`` on; return how many columns each row fills."""
        rows = self.rows
        rows.reserve(start + n)
        pairs = zip(rows.known, rows.has_ended, strict=True)
        known = tuple(start + n if ended else known for known, ended in pairs)
        facts = tuple(rows.has_ended), start, n, rows.host_tokens, self.schedule.needs_all
        context = DraftContext(rows.tokens, known, *facts)
        name = drafting.name_of(self.drafter)
        self.draft = drafting.check(name, self.drafter.draft(context), context)
        if self.draft is None:
            return [0] * len(rows.known)
        tokens, lengths = self.draft.tokens, self.draft.lengths
        if self.placeholders and self.is_first:  # the model would look for their features
            is_media = torch.isin(tokens, tokens.new_tensor(self.placeholders))
            tokens, lengths = tokens.masked_fill(is_media, -1), None
            self.draft = replace(self.draft, tokens=tokens)
        if lengths is None or tokens.is_cpu:  # reading is asked for, or free
            filled = drafting.n_filled(name, tokens, context, self.vocab)
            # What a drafter says holds on all devices alike: draws depend on it.
            lengths = filled if lengths is None else lengths
        return lengths

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        rows, width = self.rows, self.n_new + 1
        n_rows, start = run.ids.shape
        rows.reserve(start + width)
        # A copy, unless nobody can write to it or keep it.
        is_copied = bool(self.plain is None or run.processors or run.config.return_dict_in_generate)
        logits = model_outputs.logits[:, -width:]
        logits = logits.to(copy=is_copied, dtype=torch.float32, device=run.ids.device)
        if self.draft is not None:
            drafting.check_logits(drafting.name_of(self.drafter), self.draft, logits.shape[-1])
        before, had_ended = [*rows.known], [*rows.has_ended]
        if self.plain is not None:
            verified = self.plain.verify(run, rows, logits)
        else:
            draft_logits = None if self.draft is None else self.draft.logits
            verified = verify(run, rows, self.verification, logits, draft_logits)
        # No further than where a row has just ended: it fed drafts after that, and not its padding.
        pairs = enumerate(zip(rows.known, had_ended, strict=True))
        is_lost = rows.invalid.step_of
        lengths = [k for row, (k, had) in pairs if not had and is_lost(row, n_rows) is None]
        n_advanced = max(min(min(lengths or [max(rows.known)]) - start, width), 1)
        cache = getattr(model_outputs, CACHE, None)
        # Phi-3 begins another cache above a rotary limit.
        if cache is not None and cache is not self.cache:
            self.cache, self.keeps_all_tokens = cache, layers.keeps_all_tokens(cache)
            self.recorders.enter_context(layers.recording(cache))
        if n_advanced < width or not self.keeps_all_tokens:
            layers.roll_back(self.cache, width - n_advanced, families.layers_of_images(run.model))
        self.observe(before, start + n_advanced, n_advanced)
        commit(run, model_outputs, num_new_tokens=n_advanced)
        run.ids = rows.tokens[:, : start + n_advanced]
        new, scores = run.ids[:, start:], verified[:n_advanced]
        if run.scores is not None:
            run.scores += scores
        if len(verified) < width:
            verified = (*verified, *logits[:, len(verified) :].unbind(dim=1))
        self.drafter.see(run, model_outputs, verified, n_advanced)
        return Step(
            tokens=new,
            scores=scores,
            logits=logits[:, :n_advanced].unbind(dim=1),
            settled=lambda: new,
            **outputs.observe_each(run, model_outputs, width, n_advanced),
        )

    def observe(self, before: list[int], length: int, n_advanced: int) -> None:
        """Tell drafter and schedule what became of the round that brought all rows to ``length``."""
        drafted = self.rows.drafted
        gained = [k - b for k, b in zip(self.rows.known, before, strict=True)]
        accepted = [min(max(g - 1, 0), d) for g, d in zip(gained, drafted, strict=True)]
        verdict = Acceptance(tuple(drafted), tuple(accepted), length)
        if self.draft is not None:
            self.drafter.observe(verdict)
            self.stats.rounds += 1
        self.schedule.observe(verdict, n_advanced, self.n_new)
        self.stats.drafted += sum(drafted)
        self.stats.accepted += sum(accepted)
        self.stats.generated += sum(gained)

    def row_ends(self, run: Run) -> list[int | None] | None:
        if not self.rows.has_padding:  # rows that have ended run on until all have
            return None
        pairs = zip(self.rows.known, self.rows.has_ended, strict=True)
        return [known if has_ended or run.finished else None for known, has_ended in pairs]

    def is_token(self, run: Run, step: Step) -> torch.Tensor | None:
        """``(rows, n_new)``: which tokens are not padding behind a row's end; ``None`` for all."""
        if self.rows.pad is None:
            return None
        length = run.ids.shape[1]
        positions = torch.arange(length - step.tokens.shape[1], length, device=run.ids.device)
        return positions < self.rows.device_known[:, None]

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        self.schedule.finish()
        self.rows.invalid.conclude()
        return {"sequences": run.ids.contiguous()}

    def stop(self, run: Run) -> None:
        run.finished = all(self.rows.has_ended) and run.ids.shape[1] >= max(self.rows.known)


def _check_cache(run: Run, cache: Any) -> None:
    """Raise before the first forward if what is rejected could not be taken back, or not fit in."""
    name = type(run.model).__name__
    if cache is None:
        raise RuntimeError(f"Assisted decoding needs a cache: {name} has no `{CACHE}`.")
    if not hasattr(cache, "crop"):
        raise ValueError(
            f"Drafted tokens cannot be taken back out of a {type(cache).__name__}: assisted decoding "
            "does not work with it."
        )
    for layer in layers.layers_of(cache):
        if isinstance(layer, StaticLayer) and layers.is_foreign_part(layer):
            raise ValueError(
                f"{name} has a static cache of its own kind ({type(layer).__name__}), out of which "
                "drafted tokens cannot be taken back. Use a dynamic cache."
            )
