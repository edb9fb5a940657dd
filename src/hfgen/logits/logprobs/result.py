"""What a call asks of log-probabilities, and the returned ones: tensors, an object per token on access, OpenAI's format.

Names and meanings are vLLM's (``SamplingParams`` and its engine's ``logprobs_mode``). One differs: ``logprobs``
and ``logprob_token_ids`` may be given together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...settings.kinds import LOGPROBS_MODES as MODES
from ...state.run import Run
from ...state.text import Pieces

ALL = -1  # stands for all tokens of the vocabulary
LEAST = -9999.0  # the least value in OpenAI's format: JSON has no infinity


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The request of one row: the ``n_top`` likeliest tokens (``None``: nothing), and ``token_ids``."""

    n_top: int | None = None
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> LogprobRequest:
        """The request for generated tokens. ``logprob_token_ids`` alone ask for the chosen token, too."""
        # A recipe may run on a model that is not mixed, whose config lacks the fields.
        n_top, ids = (getattr(config, name, None) for name in ("logprobs", "logprob_token_ids"))
        has_more = ids is not None or getattr(config, "logprobs_support", None)
        return cls(0 if n_top is None and has_more else n_top, tuple(ids or ()))


@dataclass(frozen=True, slots=True)
class Settings:
    """The requests of the prompts of a call, and which scores they are about."""

    requests: Sequence[LogprobRequest]  # one per prompt, or a single one for all
    mode: str = MODES[0]

    @property
    def n_top(self) -> int | None:
        """The largest ``n_top`` of any row; ``None`` if none asks for anything."""
        counts = [request.n_top for request in self.requests if request.n_top is not None]
        return ALL if ALL in counts else max(counts, default=None)

    @property
    def is_processed(self) -> bool:
        return self.mode.startswith("processed")

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for calls that ask for the same."""
        return (self.mode, *self.requests)

    def of_row(self, row: int, n_rows: int) -> LogprobRequest:
        """The request of a row of ``n_rows``; rows of a prompt are next to each other."""
        return self.requests[row * len(self.requests) // n_rows]

    def token_ids(self, n_rows: int, device: torch.device) -> torch.Tensor | None:
        """``(n_rows, m)``: the ids that rows ask for, padded with zeros."""
        rows = [request.token_ids for request in self.requests]
        if (width := max(map(len, rows))) == 0:
            return None
        ids = torch.tensor([row + (width - len(row)) * (0,) for row in rows], device=device)
        return ids.repeat_interleave(n_rows // len(ids), dim=0, output_size=n_rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a sequence, and others that were likely in its place.

    ``logprob``: natural logarithm of its probability, or the value of another ``logprobs_mode``.
    ``rank``: 1 and the number of tokens with a higher value. ``top``: pairs ``(id, logprob)`` of the
    likeliest tokens, best first. ``asked``: pairs of the ``logprob_token_ids``, in their order.
    ``support``: with ``logprobs_support=True``, the ids that processors and samplers left.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[tuple[int, float], ...] = ()
    support: tuple[int, ...] = ()


class Measures(NamedTuple):
    """Recorded log-probabilities: of ``(…)`` tokens, the ``k`` likeliest and the ``m`` asked ids there."""

    logprobs: Tensor  # (…): of the tokens
    ranks: Tensor  # (…)
    top_ids: Tensor  # (…, k)
    top_logprobs: Tensor  # (…, k)
    asked: Tensor  # (…, m)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs(Sequence["list[TokenLogprob] | None"]):
    """Log-probabilities of the tokens of each row, up to ``n`` of them.

    ``logprobs[row]`` is a list of ``TokenLogprob`` up to the row's end; ``None`` if the row asks for
    nothing. Of prompts, the list has ``None`` for padding and for the first token. These objects are made
    on first access, from tensors on the model's device:

    ``token_ids``, ``token_logprobs``, ``ranks``: ``(rows, n)``. ``top_token_ids``, ``top_logprobs``:
    ``(rows, n, k)`` with the largest ``k`` of any row. ``asked_token_ids (rows, m)``,
    ``asked_logprobs (rows, n, m)``. Where a row has no token, ``is_token (rows, n)``
    is ``False``, values are NaN and ranks 0.
    """

    token_ids: Tensor
    is_token: Tensor
    token_logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor
    asked_token_ids: Tensor
    asked_logprobs: Tensor
    settings: Settings
    is_prompt: bool = False
    #: Of each position: pairs ``(m, 2)`` of scored rows and tokens left, and which scored row each row
    #: has, ``(rows,)``, ``None`` for all in order.
    support: Sequence[Any] | None = field(default=None, repr=False)
    _rows: dict[int, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        token_ids: Tensor,
        is_token: Tensor,
        measures: Measures,
        asked_ids: Tensor | None,
        settings: Settings,
        is_prompt: bool = False,
        support: Sequence[Any] | None = None,
    ) -> Logprobs:
        """``token_ids`` and ``is_token (rows, n)``; ``measures`` of ``(rows, n)`` positions."""
        if asked_ids is None:
            asked_ids = token_ids.new_zeros(len(token_ids), 0)
        logprobs, ranks, top_ids, *tops = measures
        logprobs = logprobs.masked_fill(~is_token, torch.nan)
        ranks = ranks.masked_fill(~is_token, 0)
        top, asked = (values.masked_fill(~is_token[..., None], torch.nan) for values in tops)
        of_tokens = token_ids, is_token, logprobs, ranks, top_ids, top
        return cls(*of_tokens, asked_ids, asked, settings, is_prompt, support)

    @classmethod
    def empty(cls, token_ids: Tensor, asked_ids: Tensor | None, settings: Settings) -> Logprobs:
        """Of ``token_ids (rows, 0)``, integers of any kind."""
        ids, n_rows = token_ids.long(), len(token_ids)
        top_ids = ids.new_zeros(n_rows, 0, max(settings.n_top or 0, 0))
        asked = ids.new_zeros(n_rows, 0, 0 if asked_ids is None else asked_ids.shape[1])
        measures = Measures(ids.float(), ids, top_ids, top_ids.float(), asked.float())
        return cls.of(ids, ids.bool(), measures, asked_ids, settings)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, row: Any) -> Any:
        """The tokens of a row, or of each row of a slice; ``IndexError`` for a row that does not exist."""
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        index = range(len(self))[row]
        if index not in self._rows:
            self._rows[index] = self._tokens_of(index)
        return self._rows[index]

    @property
    def cumulative_logprobs(self) -> Tensor:
        """``(rows,)``: the sum over each row's tokens."""
        return self.token_logprobs.masked_fill(~self.is_token, 0.0).sum(dim=1)

    def to_openai(self, tokenizer: Any = None) -> list[dict[str, Any] | None]:
        """Each row as ``choices[…].logprobs`` of OpenAI's chat completions: ``{"content": […]}``.

        Each token has ``token``, ``logprob``, ``bytes`` and ``top_logprobs``: the likeliest, then the
        asked ids. Without a ``tokenizer``, ``token`` is ``"token_id:17"`` and ``bytes`` is ``None``.
        Values below -9999 become -9999.0, since JSON has no infinity.
        """
        pieces = None if tokenizer is None else Pieces(tokenizer)
        return [None if row is None else {"content": content(row, pieces)} for row in self]

    def _tokens_of(self, row: int) -> list[TokenLogprob | None] | None:
        request = self.settings.of_row(row, len(self))
        if request.n_top is None:
            return None
        k = None if request.n_top < 0 else request.n_top
        measures = Measures(
            self.token_logprobs[row],
            self.ranks[row],
            self.top_token_ids[row, :, :k],
            self.top_logprobs[row, :, :k],
            self.asked_logprobs[row, :, : len(request.token_ids)],
        )
        entries = token_logprobs(self.token_ids[row], measures, request.token_ids)
        tokens: list[TokenLogprob | None] = []
        supports = self.support or [None] * len(entries)
        columns = zip(self.is_token[row].tolist(), entries, supports, strict=True)
        for is_token, entry, pairs in columns:
            if is_token and pairs is not None:
                rows_and_tokens, scored_rows = pairs
                scored = row if scored_rows is None else scored_rows[row]
                support = rows_and_tokens[rows_and_tokens[:, 0] == scored, 1].tolist()
                entry = replace(entry, support=tuple(support))
            if is_token or self.is_prompt:
                tokens.append(entry if is_token else None)
        return tokens


def token_logprobs(
    tokens: Tensor, measures: Measures, asked_ids: Sequence[int]
) -> list[TokenLogprob]:
    """The entries of ``tokens (n,)`` with ``measures (n, …)``, read off the device at once."""
    integers = (tokens[:, None], measures.ranks[:, None], measures.top_ids)
    numbers = (measures.logprobs[:, None], measures.top_logprobs, measures.asked)
    tables = (torch.cat(columns, dim=1).tolist() for columns in (integers, numbers))
    k, entries = measures.top_ids.shape[1], []
    for (token, rank, *ids), (logprob, *values) in zip(*tables, strict=True):
        top, asked = zip(ids, values[:k], strict=True), zip(asked_ids, values[k:], strict=True)
        entries.append(TokenLogprob(token, logprob, rank, tuple(top), tuple(asked)))
    return entries


def measure(
    scores: Tensor,
    tokens: Tensor,
    settings: Settings,
    asked_ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> Measures:
    """The measures of ``tokens (n,)`` and ``asked_ids (n, m)`` by ``scores (n, vocab)``, in float32.

    With ``rows (m,)``, the tokens ``(m,)`` are those of these rows. The result keeps no memory of the scores.
    """
    n_top = settings.n_top or 0
    k = scores.shape[-1] if n_top < 0 else min(n_top, scores.shape[-1])
    index = tokens[:, None]
    own_scores = scores if rows is None else scores[rows]
    ranks = (own_scores > own_scores.gather(1, index)).sum(dim=1, dtype=torch.int32) + 1
    del own_scores
    top_ids = scores.topk(k).indices
    values = scores if settings.mode.endswith("logits") else scores.log_softmax(dim=-1)
    logprobs = values.gather(1, index).squeeze(1) if rows is None else values[rows, tokens]
    asked_ids = top_ids[:, :0] if asked_ids is None else asked_ids
    top, asked = values.gather(1, top_ids), values.gather(1, asked_ids)
    return Measures(logprobs, ranks, top_ids, top, asked)


def spelled(token_id: int, pieces: Pieces | None) -> str:
    """The text of a token; its number if nothing spells it."""
    return f"token_id:{token_id}" if pieces is None else pieces[token_id].decode("utf-8", "replace")


def content(tokens: Iterable[Any], pieces: Pieces | None) -> list[dict[str, Any]]:
    """Chat completions': one entry for each ``TokenLogprob``; positions without one are left out."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelled(token_id, pieces),
            "logprob": max(logprob, LEAST),
            "bytes": None if pieces is None else list(pieces[token_id]),
        }

    return [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(*pair) for pair in dict.fromkeys(token.top + token.asked)]}
        for token in tokens
        if token is not None
    ]


def legacy(
    ids: Iterable[int], tokens: Iterable[Any], pieces: Pieces | None
) -> dict[str, list[Any]]:
    """The tokens ``ids`` as completions have them; of ``tokens``, the first of a prompt is ``None``."""
    texts = [spelled(token_id, pieces) for token_id in ids]
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        values.append(None if token is None else max(token.logprob, LEAST))
        # Of tokens that are spelled alike, the likeliest is kept.
        pairs = () if token is None else reversed(token.top + token.asked)
        top = {spelled(token_id, pieces): max(value, LEAST) for token_id, value in pairs}
        tops.append(None if token is None else top)
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def mode_of(config: Any) -> str:
    return getattr(config, "logprobs_mode", None) or MODES[0]


def asks_for_any(config: Any) -> bool:
    """Whether a config asks for log-probabilities, of the prompt or of what follows it."""
    of_prompt = getattr(config, "prompt_logprobs", None)
    return of_prompt is not None or LogprobRequest.of(config).n_top is not None


def reads(run: Run, which: str) -> bool:
    """Whether ``which``, "raw" or "processed" scores, must not be written to before a step is over."""
    if which == "processed" and getattr(run.config, "logprobs_support", None):
        return True
    return run.asks_for("logprobs", "logprob_token_ids") and mode_of(run.config).startswith(which)
