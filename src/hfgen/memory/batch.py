"""The rows of a batch: the tensors that have rows, and how to select, repeat, join and remove rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from ..state.call import ModelKwargs
from .caches import growing, joining, layers, slots

#: ``change(tensor, dim)``: what a tensor with rows in dimension ``dim`` becomes.
Change = Callable[[Tensor, int], Tensor]

#: Arguments of forward with a column per token of the decoder, of the encoder in one case, and the
#: encoder's output: which dimension has the tokens.
TOKEN_DIM = {
    **dict.fromkeys(("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"), -1),
    **dict.fromkeys(("decoder_attention_mask", "decoder_position_ids"), -1),
    "cross_attention_mask": -3,
    "image_attention_mask": -2,
    "last_hidden_state": -2,
}

#: The outputs of forward that have a row for each sequence.
PER_ROW = (
    *("logits", "last_hidden_state", "hidden_states", "attentions", "cross_attentions"),
    *("decoder_hidden_states", "decoder_attentions"),
)


def row_dim(name: str, tensor: Tensor) -> int:
    """Which dimension has the rows: the first, or of rotary positions ``(3, rows, length)`` the second."""
    return 1 if name.endswith("position_ids") and tensor.ndim == 3 else 0


def take_rows(value: Any, index: Tensor, n_rows: int, name: str = "") -> Any:
    """An argument of forward for the rows ``index (wanted,)`` of ``n_rows``.

    Tensors with another number of rows, as positions ``(1, length)``, and tuples of states stay.
    """
    if isinstance(value, ModelOutput):
        return type(value)(**{key: take_rows(v, index, n_rows, key) for key, v in value.items()})
    if not isinstance(value, Tensor):
        return value
    dim = row_dim(name, value)
    if value.ndim <= dim or value.shape[dim] != n_rows:
        return value
    return value.index_select(dim, index.to(value.device))


def map_outputs(outputs: ModelOutput, take: Change, rows_of_states: int) -> None:
    """Let ``take(states, dim of the rows)`` replace the outputs of a model that a step reads.

    ``rows_of_states``: that dimension of four-dimensional hidden states.
    """
    for name in PER_ROW:
        value = outputs.get(name)
        if isinstance(value, Tensor):
            outputs[name] = take(value, 0)
        elif isinstance(value, tuple):
            dim = rows_of_states if name.endswith("hidden_states") else 0
            outputs[name] = tuple(
                take(v, dim if v.ndim == 4 else 0) if isinstance(v, torch.Tensor) else v
                for v in value
            )


@dataclass(slots=True)
class Batch:
    """What a decoding step reads: ``ids (rows, length)``, and arguments with a cache of all but the last."""

    ids: Tensor
    model_kwargs: ModelKwargs

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def caches(self) -> dict[str, Any]:
        """The caches among the arguments, by name; each once."""
        named = {id(v): n for n, v in self.model_kwargs.items() if isinstance(v, Cache)}
        return {name: self.model_kwargs[name] for name in named.values()}

    def take(self, index: Tensor) -> None:
        """Let row ``i`` become what row ``index[i]`` was, the cache in place: ``index (wanted,)``."""
        for cache in self.caches.values():
            layers.take(cache, index.to(self.ids.device))
        self.model_kwargs = {
            name: take_rows(value, index, len(self), name)
            for name, value in self.model_kwargs.items()
        }
        self.ids = self.ids[index]

    def repeat(self, n: int) -> None:
        """Repeat each row ``n`` times in place: ``A B`` becomes ``A A B B``."""
        self.take(torch.arange(len(self), device=self.ids.device).repeat_interleave(n))

    def append(self, other: Batch, pad_token_id: int = 0) -> None:
        """Put the rows of ``other`` behind these; it stays as it was.

        The shorter batch is padded on the left: ``pad_token_id`` in the ids, zeros in the cache, and
        a mask that hides both. Raises ``ValueError``, before anything is changed, if arguments or
        caches cannot be joined. A cache writes the rows that join, and seldom the others.
        """
        joined = self.joined_arguments(other)
        for name, cache in self.caches.items():
            joining.append(cache, other.caches[name])
            joined[name] = cache
        both = (self.ids, other.ids)
        length = max(ids.shape[1] for ids in both)
        padded = [F.pad(ids, (length - ids.shape[1], 0), value=pad_token_id) for ids in both]
        self.ids, self.model_kwargs = torch.cat(padded), joined

    def joined_arguments(self, other: Batch) -> ModelKwargs:
        """The arguments of both, but for caches. Raises ``ValueError`` if ``other`` cannot be appended."""
        joined = _joined_kwargs(self, other)
        if self.caches.keys() != other.caches.keys():
            theirs, ours = sorted(other.caches), sorted(self.caches)
            raise ValueError(f"A batch with the caches {theirs} cannot join one with {ours}.")
        for name, cache in self.caches.items():
            if isinstance(cache, EncoderDecoderCache) and not joined.get("encoder_outputs"):
                raise ValueError(
                    f"Rows of `{name}` cannot be joined: without `encoder_outputs`, it is not known what "
                    "its other part attends to. Decode these prompts with `generate`."
                )
            joining.check(cache, other.caches[name])
        return joined

    def leave(self, row: int) -> None:
        """Let the last row take the place of ``row``, the cache in place; there is one row less then.

        Raises ``ValueError``, before anything is changed, for a row that is not there, for the only one,
        and for caches whose layers do not declare how rows leave.
        """
        last = len(self) - 1
        if not 0 <= row <= last or last == 0:
            raise ValueError(
                f"`row`={row!r} cannot leave a batch of {last + 1}: "
                + ("drop the batch." if last == 0 else f"it has to be 0 to {last}.")
            )
        for cache in self.caches.values():
            joining.leave(cache, row)
        index = growing.moved(row, last, self.ids.device)
        self._change_rows(index, lambda states: slots.leave_row(states, row))

    def extract(self, index: Tensor) -> Batch:
        """A batch of the rows ``index (wanted,)``, states copied; these rows stay.

        Raises ``ValueError`` for caches whose layers do not declare how rows leave.
        """
        index = index.to(self.ids.device)
        own = {id(cache): joining.extract(cache, index) for cache in self.caches.values()}
        kwargs: ModelKwargs = {
            name: own.get(id(value)) or take_rows(value, index, len(self), name)
            for name, value in self.model_kwargs.items()
        }
        return Batch(self.ids[index], kwargs)

    def move(self, index: Tensor) -> None:
        """``take`` for as many rows as there are: ``index (rows,)``. Caches do not write rows that stay.

        Raises ``ValueError``, before anything is changed, for caches whose layers do not declare how rows
        join and leave.
        """
        changed = growing.changed(index)
        if len(changed):
            for cache in self.caches.values():
                joining.move(cache, index, changed)
            self._change_rows(index, lambda states: slots.move_rows(states, index, changed))

    def take_arguments(self, index: Tensor) -> None:
        """``take`` for as many rows as there are, of all but the caches: ``index (rows,)``."""
        index = index.to(self.ids.device)
        changed = growing.changed(index)
        self._change_rows(index, lambda states: slots.move_rows(states, index, changed))

    def _change_rows(self, index: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Take the rows ``index`` of all but the caches; ``change`` does it for states of an encoder."""

        def taken(value: Any, name: str) -> Any:
            if isinstance(value, ModelOutput):
                return type(value)(**{key: taken(v, key) for key, v in value.items()})
            if name == "last_hidden_state":
                return change(value)
            return take_rows(value, index, n_rows, name)

        n_rows = len(self)
        self.model_kwargs = {name: taken(value, name) for name, value in self.model_kwargs.items()}
        self.ids = self.ids[index]

    def trim(self, n_tokens: int) -> None:
        """Forget the first ``n_tokens`` columns, which are padding in all rows; caches do not copy.

        Columns of an encoder stay. Raises ``ValueError``, before anything is changed, if there are not
        more columns than that, and for caches whose layers do not declare how columns are trimmed.
        """
        length = self.ids.shape[1]
        if not 0 <= n_tokens < length:
            raise ValueError(f"`n_tokens`={n_tokens!r} cannot be trimmed from {length} columns.")
        for cache in self.caches.values():
            joining.trim(cache, n_tokens)
        is_encoders = {"attention_mask"} - {_own_mask(self.model_kwargs)}
        for name, value in self.model_kwargs.items():
            dim = None if name in is_encoders else TOKEN_DIM.get(name)
            if (
                dim
                and isinstance(value, Tensor)
                and value.ndim >= -dim
                and value.shape[dim] == length
            ):
                self.model_kwargs[name] = value.narrow(dim, n_tokens, length - n_tokens)
        self.ids = self.ids[:, n_tokens:]

    @property
    def padding(self) -> list[int]:
        """How many columns on the left are padding, for each row: the smallest number can be trimmed."""
        mask = self.model_kwargs.get(_own_mask(self.model_kwargs))
        if mask is None:
            return [0] * len(self)
        return (mask.cumsum(dim=-1) == 0).sum(dim=-1).tolist()


def _joined_kwargs(batch: Batch, other: Batch) -> ModelKwargs:
    """The arguments of both, but for caches."""
    both, name = (batch, other), _own_mask(batch.model_kwargs)
    has_mask = any(b.model_kwargs.get(name) is not None for b in both)
    needs_mask = has_mask or batch.ids.shape[1] != other.ids.shape[1]
    needs_encoders = _needs_encoder_mask(*both)
    ours, theirs = (_completed(b, needs_mask, needs_encoders) for b in both)
    joined: ModelKwargs = {}
    for name in ours.keys() | theirs.keys():
        one, two = ours.get(name), theirs.get(name)
        if not isinstance(one, Cache) and not isinstance(two, Cache):
            joined[name] = _joined(name, one, two, (len(batch), len(other)))
    return joined


def _own_mask(kwargs: ModelKwargs) -> str:
    """The name of the mask over the ids: with an encoder, ``attention_mask`` is the encoder's."""
    is_encoder_decoder = kwargs.get("encoder_outputs") is not None
    return "decoder_attention_mask" if is_encoder_decoder else "attention_mask"


def _needs_encoder_mask(*batches: Batch) -> bool:
    """Whether an encoder's states need a mask: if a batch has one, or their lengths differ."""
    states: list[Any] = [b.model_kwargs.get("encoder_outputs") for b in batches]
    if None in states:
        return False
    has_mask = any(b.model_kwargs.get("attention_mask") is not None for b in batches)
    return has_mask or len({one[0].shape[1] for one in states}) > 1


def _completed(batch: Batch, needs_mask: bool, needs_encoders: bool) -> ModelKwargs:
    """The arguments of a batch, with masks of ones where they were left out."""
    kwargs = dict(batch.model_kwargs)
    name, states = _own_mask(kwargs), kwargs.get("encoder_outputs")
    if needs_mask and kwargs.get(name) is None:
        kwargs[name] = torch.ones_like(batch.ids)
    if needs_encoders and states is not None and kwargs.get("attention_mask") is None:
        # ProphetNet multiplies a mask by float64's lowest number, which overflows if the mask is no float64.
        dtype = torch.float64 if states[0].dtype == torch.float64 else None
        kwargs["attention_mask"] = batch.ids.new_ones(states[0].shape[:2], dtype=dtype)
    return kwargs


def _joined(name: str, one: Any, two: Any, n_rows: tuple[int, int]) -> Any:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _joined_tensors(name, one, two, n_rows)
    if isinstance(one, ModelOutput) and isinstance(two, ModelOutput) and one.keys() == two.keys():
        return type(one)(**{key: _joined(key, one[key], two[key], n_rows) for key in one})
    if one is not two and not _is_same(one, two):
        raise ValueError(f"Rows cannot be joined: `{name}` is {one!r:.60} in one and {two!r:.60}.")
    return one


def _is_same(one: Any, two: Any) -> bool:
    """Whether two arguments that have no rows are equal."""
    try:
        return bool(one == two)
    except RuntimeError:  # lists of tensors, which may have rows
        return False


def _joined_tensors(name: str, one: Tensor, two: Tensor, n_rows: tuple[int, int]) -> Tensor:
    """Both along the rows; what has a column per token is padded on the left to the longer."""
    dim = row_dim(name, one)
    parts = []
    for tensor, n in zip((one, two), n_rows, strict=True):
        if tensor.ndim > dim and tensor.shape[dim] == 1 != n:  # shared by all rows
            tensor = tensor.expand(*tensor.shape[:dim], n, *tensor.shape[dim + 1 :])
        parts.append(tensor)
    if columns := TOKEN_DIM.get(name):
        longest = max(tensor.shape[columns] for tensor in parts)
        behind = (0, 0) * (-columns - 1)  # dimensions that are not padded
        parts = [
            F.pad(t, (*behind, longest - t.shape[columns], 0)) if t.shape[columns] < longest else t
            for t in parts
        ]
    shapes = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in parts]
    if shapes[0] != shapes[1]:
        given = f"{tuple(one.shape)} and {tuple(two.shape)}"
        raise ValueError(f"Rows cannot be joined: `{name}` has the shapes {given}.")
    if name == "last_hidden_state":  # by far the largest, of a long input
        return slots.join_rows(parts[0], parts[1])
    return torch.cat([parts[0], parts[1].to(parts[0].device)], dim=dim)
