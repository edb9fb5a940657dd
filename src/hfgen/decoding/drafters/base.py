"""The interface of a drafter: it guesses the next tokens, which the target model then verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ...state.run import Run
    from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The input of ``Drafter.draft``.

    ``ids (rows, length)``: row ``r`` is known up to ``known[r]``, what follows in it means nothing.
    All rows are known up to ``start``, some further. ``n_tokens``: how many positions after
    ``start`` may be filled. ``is_done[r]``: row ``r`` has ended and counts as known up to ``end``.
    ``host_ids``: ``ids`` on the CPU, if they are there.
    ``needs_all``: whether drafts are of no use unless each row that knows no more than ``start`` has one.
    """

    ids: torch.Tensor
    known: tuple[int, ...]
    is_done: tuple[bool, ...]
    start: int
    n_tokens: int
    host_ids: torch.Tensor | None = None
    needs_all: bool = False

    @property
    def end(self) -> int:
        """The first position that may not be filled."""
        return self.start + self.n_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for the positions from ``DraftContext.start`` on.

    ``tokens (rows, n)``, ``n <= DraftContext.n_tokens``: column ``j`` is for position ``start + j``. Where
    a row is known, its entries are ignored; -1 ends the draft of a row. ``logits (rows, n, vocab)``:
    the scores that the tokens were drawn from, if there are any: sampling accepts more with them.
    ``lengths``: the number of filled columns of each row, known ones included, or a bound of it, if
    the host knows one; ``tokens`` are then not read off the device at once, and not checked.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of a draft: drafted and accepted tokens of each row, and the new common length."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    start: int


class Drafter:
    """Guesses tokens; a wrong guess costs time, never a token.

    Pass one of your own to ``generate`` as ``assistant_model``; ``draft`` and ``observe`` will do.
    """

    #: Further arguments of the target model's forward: ``{"output_hidden_states": True}``.
    forward_arguments: dict[str, Any] = {}  # noqa: RUF012
    cost: float = 0.0  # time that drafting one token takes, in forwards of the target model
    overshoots: bool = False  # whether drafts may go beyond the last token of the call
    is_always_asked: bool = False  # also for the last token, for which no draft is needed
    #: Models with a ``generate`` of their own may write flags to the assistant's, as Whisper does.
    generation_config: Any = SimpleNamespace()
    schedule: Schedule | None = None  # how many tokens to draft; ``None``: as the call asks

    def begin(self, run: Run) -> Drafter:
        """The drafter of one call: itself, unless it serves several calls at once."""
        return self

    def draft(self, context: DraftContext) -> Draft | None:
        """Guess how the rows go on; ``None`` if there is no guess."""
        raise NotImplementedError(f"{type(self).__name__} has no `draft()`.")

    def observe(self, verdict: Acceptance) -> None:
        """Learn what became of the last draft; called after every round that had one."""

    def see(self, run: Run, model_outputs: Any, scores: Any, n_advanced: int) -> None:
        """Learn what the target model said; called after every round, last of all.

        ``run.ids`` are ``n_advanced`` tokens longer than before the round. ``model_outputs`` are of
        the token that was last then, or of the prompt, and of drafts after it; the first ``n_advanced
        - 1`` drafts are valid for every row. ``scores``: a tuple of ``(rows, vocab)`` for each position from
        that token on; those that verification did not come to are the model's logits.
        """


class Adapted(Drafter):
    """A caller's object that has ``draft`` and ``observe`` alone."""

    def __init__(self, drafter: Any) -> None:
        self.adapted = drafter
        self.draft, self.observe = drafter.draft, drafter.observe  # type: ignore[method-assign]


def name_of(drafter: Drafter) -> str:
    """The name of a drafter in errors: its class, or that of the caller's object."""
    return type(drafter.adapted if isinstance(drafter, Adapted) else drafter).__name__


def check(name: str, draft: Any, context: DraftContext) -> Draft | None:
    """``draft``, or ``None`` if empty; ``TypeError`` or ``ValueError`` for tokens of another kind."""
    if draft is None:
        return None
    if not isinstance(draft, Draft):
        raise _wrong(TypeError, name, "a hfgen.Draft or None", type(draft).__name__)
    rows, n, tokens = len(context.known), context.n_tokens, draft.tokens
    expected = f"int64 tokens of shape ({rows}, at most {n})"
    if not isinstance(tokens, torch.Tensor):
        raise _wrong(TypeError, name, expected, type(tokens).__name__)
    shape = tuple(tokens.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] > n or tokens.dtype != torch.long:
        raise _wrong(ValueError, name, expected, f"{tokens.dtype} of shape {shape}")
    return draft if shape[1] else None


def drafted_tokens(tokens: torch.Tensor, context: DraftContext) -> list[list[int]]:
    """The tokens of each row of a draft behind those that it knows, up to the end of the draft."""
    rows = []
    for columns, known in zip(tokens.tolist(), context.known, strict=True):
        new = columns[known - context.start :]
        rows.append(new[: new.index(-1)] if -1 in new else new)
    return rows


def prompts_of(run: Run) -> list[list[int]]:
    """The prompt of each row without its padding."""
    if (mask := run.mask) is None or mask.shape != run.ids.shape:
        mask = torch.ones_like(run.ids)
    rows = zip(run.ids.cpu(), mask.bool().cpu(), strict=True)
    return [ids[is_token].tolist() for ids, is_token in rows]


def draft_of_rows(
    rows: Sequence[list[int]], context: DraftContext, logits: torch.Tensor | None = None
) -> Draft | None:
    """The draft of ``rows``, tokens behind those that each row knows, and of ``logits`` from ``start`` on, if any."""
    if not any(rows):
        return None
    leads = [known - context.start for known in context.known]
    lengths = tuple(lead + len(new) if new else 0 for lead, new in zip(leads, rows, strict=True))
    width, pairs = max(lengths), zip(leads, rows, strict=True)
    columns = [([-1] * lead + new + [-1] * width)[:width] for lead, new in pairs]
    tokens = torch.tensor(columns, device=context.ids.device)
    return Draft(tokens, None if logits is None else logits[:, :width], lengths)


def n_filled(
    name: str, tokens: torch.Tensor, context: DraftContext, vocab: float
) -> tuple[int, ...]:
    """Columns that each row of ``tokens`` fills, known ones too; ``ValueError`` beyond the vocabulary."""
    lengths = []
    for row, new in enumerate(drafted_tokens(tokens, context)):
        if (token := next((t for t in new if not 0 <= t < vocab), None)) is not None:
            expected = f"tokens from 0 to {vocab - 1:.0f}, or -1 where a draft ends"
            raise _wrong(ValueError, name, expected, f"{token} for row {row}")
        lengths.append(min(context.known[row] - context.start, tokens.shape[1]) + len(new))
    return tuple(lengths)


def check_logits(name: str, draft: Draft, vocab: int) -> None:
    """Raise if ``draft.logits`` are not scores of ``draft.tokens`` over the target's vocabulary."""
    logits, expected = draft.logits, (*draft.tokens.shape, vocab)
    if logits is None:
        return
    if not isinstance(logits, torch.Tensor):
        raise _wrong(TypeError, name, f"logits of shape {expected}", type(logits).__name__)
    if logits.shape != expected:
        raise _wrong(ValueError, name, f"logits of shape {expected}", str(tuple(logits.shape)))


def _wrong(kind: type[Exception], name: str, expected: str, returned: str) -> Exception:
    return kind(f"{name}.draft() has to return {expected}, but returned {returned}.")


class Setup:
    """The call that a drafter is made for.

    ``encoder_input (batch, …)``: the encoder's input, for assistants that have an encoder of their own.
    """

    def __init__(
        self, run: Run, assistant: Any, tokenizer: Any, assistant_tokenizer: Any, encoder_input: Any
    ) -> None:
        self.run, self.assistant_model, self.encoder_input = run, assistant, encoder_input
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer
        config, is_one = run.config, len(run.ids) == 1
        #: Tokens that a row may have in the end, prompt included.
        self.max_length = int(run.criteria.max_length or config.max_length)
        self.is_streamed_row = run.streamer is not None and is_one  # draft lengths show in chunks
        #: Whether tokens are drawn from torch's generator; whether verification compares probabilities.
        self.is_drawn = bool(config.do_sample) and run.row_choice is None
        self.needs_logits = self.is_drawn or config.assistant_ensemble_weight is not None
        #: Whether drafts have to be upstream's: the draws of one row, or the tokens of an ensemble, depend on them.
        self.is_exact = self.needs_logits and is_one

    def of_assistant(self, name: str, always: bool = False) -> Any:
        """A setting of the call, unless draws have to be upstream's, or of the assistant's own config."""
        config = self.run.config
        model = self.assistant_model if config.assistant_early_exit is None else self.run.model
        value = getattr(config, name)
        if value is not None and (always or not self.is_exact):
            return value
        return getattr(getattr(model, "generation_config", None), name, None)
