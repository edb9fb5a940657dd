"""Drafts under a grammar: the tokens that it forces, and other drafts cut to what it allows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from ...logits.grammar.follower import Follower
from ...logits.grammar.processor import GrammarProcessor
from ...state.run import Run
from .base import Acceptance, Draft, DraftContext, Drafter, check, name_of
from .schedule import Constant

#: So many forced tokens are verified in one forward.
LONGEST = 64


class ForcedTokens(Drafter):
    """Drafts nothing but what a grammar forces, such as the keys of JSON: for ``assistant_model``.

    The model may spell the forced text with other tokens; then they count, as with every draft.
    """

    def __init__(self) -> None:
        self.schedule = Constant(LONGEST)

    def draft(self, context: DraftContext) -> Draft | None:
        return None


class UnderGrammar(Drafter):
    """Another drafter's drafts, as far as the grammars of the rows allow them; forced tokens go first."""

    def __init__(self, own: Drafter, follower: Follower) -> None:
        self.own, self.follower = own, follower
        self.forward_arguments, self.overshoots = own.forward_arguments, own.overshoots
        self.is_always_asked = own.is_always_asked
        #: Whether the last draft asked the other drafter, too.
        self.has_asked = False

    def draft(self, context: DraftContext) -> Draft | None:
        host_ids = context.ids.cpu() if context.host_ids is None else context.host_ids
        rows = self.follower.follow(host_ids, context.known)
        forced, needs_own = [], self.is_always_asked
        for row, known, is_done in zip(rows, context.known, context.is_done, strict=True):
            n = 0 if is_done else max(context.end - known, 0)
            is_open = n > 0 and self.follower.is_open(row)
            forced.append(row.matcher.compute_ff_tokens()[:n] if is_open else [])
            needs_own = needs_own or (n > 0 and not forced[-1])
        self.has_asked, draft = needs_own, None
        if needs_own:
            asked = replace(context, needs_all=False)  # what is forced will do
            draft = check(name_of(self.own), self.own.draft(asked), asked)
        drafted = [[]] * len(rows) if draft is None else drafted_tokens(draft, context)
        tokens = []
        for row, given, other in zip(rows, forced, drafted, strict=True):
            is_open = self.follower.is_open(row)
            tokens.append(
                given or other[: self.follower.n_allowed(row, other) if is_open else None]
            )
        if not any(tokens):
            return None
        return merged(tokens, forced, draft, context)

    def observe(self, verdict: Acceptance) -> None:
        if self.has_asked:
            self.own.observe(verdict)

    def see(
        self,
        run: Run,
        model_outputs: ModelOutput,
        scores: tuple[torch.Tensor, ...],
        n_advanced: int,
    ) -> None:
        self.own.see(run, model_outputs, scores, n_advanced)


def drafted_tokens(draft: Draft, context: DraftContext) -> list[list[int]]:
    """The tokens of each row behind those that are known, up to the end of its draft."""
    found: list[list[int]] = []
    for row, columns in enumerate(draft.tokens.tolist()):
        end = len(columns) if draft.lengths is None else draft.lengths[row]
        new = columns[context.known[row] - context.start : end]
        found.append(new[: new.index(-1)] if -1 in new else new)
    return found


def merged(
    tokens: list[list[int]], forced: list[list[int]], draft: Draft | None, context: DraftContext
) -> Draft:
    """The draft of ``tokens``; those that are ``forced`` are drafted for certain."""
    leads = [min(known - context.start, context.n_tokens) for known in context.known]
    lengths = [lead + len(new) for lead, new in zip(leads, tokens, strict=True)]
    width, device = max(lengths), context.ids.device
    columns = [
        [-1] * lead + new + [-1] * (width - lead - len(new))
        for lead, new in zip(leads, tokens, strict=True)
    ]
    logits: Any = None if draft is None else draft.logits
    if logits is not None:
        n_more = max(width - logits.shape[1], 0)
        logits = torch.nn.functional.pad(logits, (0, 0, 0, n_more))[:, :width].clone()
        for row, (lead, new) in enumerate(zip(leads, forced, strict=True)):
            for column, token in enumerate(new, start=lead):
                logits[row, column] = -math.inf
                logits[row, column, token] = 0.0
    return Draft(torch.tensor(columns, device=device), logits, tuple(lengths))


def under_grammar(drafter: Drafter, processors: Any) -> Drafter:
    """``drafter``, which minds the grammar if a call has one."""
    found = (p for p in processors if isinstance(p, GrammarProcessor))
    processor = next(found, None)
    return drafter if processor is None else UnderGrammar(drafter, processor.follower)
