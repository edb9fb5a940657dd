"""Drafts under a grammar: the tokens that it forces, and other drafts cut to what it allows."""

from __future__ import annotations

from dataclasses import replace

from ...logits.grammar.follower import Follower
from . import base
from .base import Acceptance, Draft, DraftContext, Drafter
from .schedule import Schedule

LONGEST = 64  # the largest number of forced tokens that one forward verifies


class ForcedTokens(Drafter):
    """Drafts only what a grammar forces, as the keys of JSON; the model may spell it with other tokens."""

    schedule = Schedule(LONGEST)

    def draft(self, context: DraftContext) -> None:
        return


class UnderGrammar(Drafter):
    """Another drafter's drafts, as far as the grammars of the rows allow them; forced tokens go first."""

    def __init__(self, drafter: Drafter, follower: Follower) -> None:
        self.drafter, self.follower, self.see = drafter, follower, drafter.see  # type: ignore[method-assign]
        self.forward_arguments, self.overshoots = drafter.forward_arguments, drafter.overshoots
        self.is_always_asked = drafter.is_always_asked
        self.has_asked = False  # whether the last draft asked the other drafter, too

    def draft(self, context: DraftContext) -> Draft | None:
        host_ids = context.ids.cpu() if context.host_ids is None else context.host_ids
        grammars = self.follower.follow(host_ids, context.known)
        rows: list[list[int]] = []
        self.has_asked = self.is_always_asked
        for grammar, known, is_done in zip(grammars, context.known, context.is_done, strict=True):
            n = 0 if is_done else max(context.end - known, 0)
            is_open = n > 0 and self.follower.is_open(grammar)
            rows.append(grammar.matcher.compute_ff_tokens()[:n] if is_open else [])
            self.has_asked = self.has_asked or (n > 0 and not rows[-1])
        logits, draft = None, None
        if self.has_asked:
            context = replace(context, needs_all=False)  # what is forced will do
            draft = base.check(base.name_of(self.drafter), self.drafter.draft(context), context)
        if draft is not None:
            # A token that is not drawn from scores has none, and then no row has.
            logits = None if any(rows) else draft.logits
            drafted = base.drafted_tokens(draft.tokens, context)
            for row, (grammar, new) in enumerate(zip(grammars, drafted, strict=True)):
                if not rows[row]:
                    is_open = self.follower.is_open(grammar)
                    rows[row] = new[: self.follower.n_allowed(grammar, new) if is_open else None]
        return base.draft_of_rows(rows, context, logits)

    def observe(self, verdict: Acceptance) -> None:
        if self.has_asked:
            self.drafter.observe(verdict)
