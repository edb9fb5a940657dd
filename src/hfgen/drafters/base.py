"""What a drafter is: it guesses the next tokens, which the target model then verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from ..call import Run


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter has to go by.

    ``ids (rows, length)``: row ``r`` is known up to ``known[r]``, what follows in it means nothing.
    All rows are known up to ``start``, some further. ``n_tokens``: how many positions after
    ``start`` may be filled. ``is_done[r]``: row ``r`` has ended and needs no draft.
    """

    ids: torch.Tensor
    known: tuple[int, ...]
    is_done: tuple[bool, ...]
    start: int
    n_tokens: int

    @property
    def end(self) -> int:
        """The first position that may not be filled."""
        return self.start + self.n_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for the positions from ``DraftContext.start`` on.

    ``tokens (rows, n)``, ``n <= DraftContext.n_tokens``: column ``j`` is for position ``start + j``. Where
    a row is known, its entries are ignored; -1 ends the draft of a row. ``logits (rows, n, vocab)``:
    the scores that the tokens were drawn from, if the drafter has any. Sampling then accepts more;
    without them every token counts as drafted with certainty. Either is exact.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """What became of a draft: tokens drafted and accepted of each row, and the new common length."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    start: int

    @property
    def is_all_accepted(self) -> bool:
        return self.accepted == self.drafted


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens; a wrong guess costs time, never a token.

    Pass one of your own to ``generate`` as ``assistant_model``.
    """

    def draft(self, context: DraftContext) -> Draft | None:
        """Guess how the rows go on; ``None`` if there is no guess."""

    def observe(self, verdict: DraftVerdict) -> None:
        """Learn what became of the last draft; called after every round that had one."""


class Seeing(Protocol):
    """What a drafter may have besides, if it drafts from what the target model said."""

    #: Other arguments of the target model's forward: ``{"output_hidden_states": True}``.
    forward_arguments: dict[str, Any]

    def see(
        self,
        run: Run,
        model_outputs: ModelOutput,
        scores: tuple[torch.Tensor, ...],
        n_advanced: int,
    ) -> None:
        """Called after every round, last of all.

        ``run.ids`` are ``n_advanced`` tokens longer than before the round. The forward fed the last
        token that they had then, or all of the prompt, and drafts after it: in ``model_outputs`` the
        positions of the last known token and of the first ``n_advanced - 1`` after it are valid for
        every row. ``scores``, one ``(rows, vocab)`` for each of these positions and of the other
        drafts; those that verification did not come to are the model's logits.
        """


@dataclass(frozen=True, slots=True)
class Setup:
    """What a drafter may be made from: the call that it drafts for."""

    run: Any
    assistant_model: Any = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    #: The encoder's input ``(batch, …)``, for assistants that have an encoder of their own.
    encoder_input: torch.Tensor | None = None
    has_streamer: bool = False

    @property
    def max_length(self) -> int:
        """Tokens that a row may have in the end, prompt included."""
        return int(self.run.criteria.max_length or self.run.config.max_length)

    @property
    def is_exact(self) -> bool:
        """Whether draws have to be upstream's: one row is sampled."""
        return bool(self.run.config.do_sample) and len(self.run.ids) == 1

    @property
    def needs_logits(self) -> bool:
        """Whether verification compares probabilities and not only tokens."""
        config = self.run.config
        return bool(config.do_sample) or config.assistant_ensemble_weight is not None
