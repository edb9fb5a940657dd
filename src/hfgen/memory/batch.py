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
from .caches import growing, layers, slots

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
    """The dimension of the rows: the first, or of rotary positions ``(3, rows, length)`` the second."""
    return 1 if name.endswith("position_ids") and tensor.ndim == 3 else 0


def take_rows(value: Any, index: Tensor, n_rows: int, name: str = "") -> Any:
    """The rows ``index (wanted,)`` of an argument of forward that has ``n_rows``; others stay."""
    if isinstance(value, ModelOutput):
        return type(value)(**{key: take_rows(v, index, n_rows, key) for key, v in value.items()})
    if not isinstance(value, Tensor):
        return value
    dim = row_dim(name, value)
    if value.ndim <= dim or value.shape[dim] != n_rows:
        return value
    return value.index_select(dim, index.to(value.device))


def outputs_of(outputs: ModelOutput, index: Tensor, n_rows: int, cache: Any = None) -> ModelOutput:
    """The rows ``index (wanted,)`` of the outputs of a forward of ``n_rows``, with another ``cache``."""
    fields = {
        name: cache if isinstance(value, Cache) else take_rows(value, index, n_rows, name)
        for name, value in outputs.items()
    }
    return type(outputs)(**fields)


def map_outputs(outputs: ModelOutput, take: Change, rows_of_states: int) -> None:
    """Replace the outputs that a step reads by ``take(output, dimension of its rows)``.

    ``rows_of_states`` is the dimension of the rows in four-dimensional hidden states.
    """
    for name in PER_ROW:
        value = outputs.get(name)
        if isinstance(value, Tensor):
            outputs[name] = take(value, 0)
        elif isinstance(value, tuple):
            dim = rows_of_states if name.endswith("hidden_states") else 0
            outputs[name] = tuple(
                take(v, dim if v.ndim == 4 else 0) if isinstance(v, Tensor) else v for v in value
            )


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of a decoding step: ``ids (rows, length)``, and arguments with a cache of all but the last.

    With a ``model``, it can be forwarded as a ``Run``.
    """

    ids: Tensor
    model_kwargs: ModelKwargs
    model: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def caches(self) -> dict[str, Any]:
        """The caches among the arguments, by name; each once."""
        named = {id(v): n for n, v in self.model_kwargs.items() if isinstance(v, Cache)}
        return {name: self.model_kwargs[name] for name in named.values()}

    def take(self, index: Tensor) -> None:
        """Row ``i`` becomes old row ``index[i]``, caches in place: ``index (wanted,)``."""
        for cache in self.caches.values():
            layers.take(cache, index.to(self.ids.device))
        self.take_arguments(index)

    def take_arguments(self, index: Tensor) -> None:
        """``take`` of all but the caches."""
        n_rows = len(self)
        self.model_kwargs = {
            name: take_rows(value, index, n_rows, name) for name, value in self.model_kwargs.items()
        }
        self.ids = self.ids[index.to(self.ids.device)]

    def repeat(self, n: int) -> None:
        """Repeat each row ``n`` times in place: ``A B`` becomes ``A A B B``."""
        self.take(torch.arange(len(self), device=self.ids.device).repeat_interleave(n))

    def append(self, other: Batch, pad_token_id: int = 0) -> None:
        """Append the rows of ``other``, which stays as it was.

        The shorter batch is padded on the left: ``pad_token_id`` in the ids, zeros in the cache, and
        a mask that hides both. Raises ``ValueError``, before anything is changed, if arguments or
        caches cannot be joined. A cache writes the rows that join, and seldom the others.
        """
        both: Any = [batch.model_kwargs.get("encoder_outputs") for batch in (self, other)]
        if None not in both and getattr(self.model, "main_input_name", "input_ids") != "input_ids":
            length, other_length = (states[0].shape[1] for states in both)
            if length != other_length:  # a mask over frames of speech has another unit than states
                raise ValueError(
                    f"Encoder's states of {other_length} cannot be padded to {length}."
                )
        arguments, added = _with_masks(self, other)
        joined: ModelKwargs = {}
        for name in arguments.keys() | added.keys():
            values = arguments.get(name), added.get(name)
            if not any(isinstance(value, Cache) for value in values):
                joined[name] = _joined(name, *values, (len(self), len(other)))
        if self.caches.keys() != other.caches.keys():
            names = sorted(other.caches), sorted(self.caches)
            raise ValueError(f"A batch with the caches {names[0]} cannot join one with {names[1]}.")
        for name, cache in self.caches.items():
            if isinstance(cache, EncoderDecoderCache) and not joined.get("encoder_outputs"):
                raise ValueError(
                    f"Rows of `{name}` cannot be joined: without `encoder_outputs`, it is not known what "
                    "its other part attends to. Decode these prompts with `generate`."
                )
            slots.check(cache, other.caches[name])
        for name, cache in self.caches.items():
            slots.append(cache, other.caches[name])
            joined[name] = cache
        ids = (self.ids, other.ids)
        length = max(each.shape[1] for each in ids)
        padded = [F.pad(each, (length - each.shape[1], 0), value=pad_token_id) for each in ids]
        self.ids, self.model_kwargs = torch.cat(padded), joined

    def leave(self, row: int) -> None:
        """Remove ``row``: the last row takes its place, caches in place.

        Raises ``ValueError``, before anything is changed, for the only row, one that is not there, and
        caches whose layers do not declare how rows leave.
        """
        last = len(self) - 1
        if not 0 <= row <= last or last == 0:
            raise ValueError(
                f"`row`={row!r} cannot leave a batch of {last + 1}: "
                + ("drop the batch." if last == 0 else f"it has to be 0 to {last}.")
            )
        self.move(torch.tensor([last if i == row else i for i in range(last)]))

    def extract(self, index: Tensor) -> Batch:
        """A batch of copies of the rows ``index (wanted,)``; these stay. Raises as ``leave``."""
        index = index.to(self.ids.device)
        extracted = {id(cache): slots.extract(cache, index) for cache in self.caches.values()}
        kwargs: ModelKwargs = {
            name: extracted.get(id(value)) or take_rows(value, index, len(self), name)
            for name, value in self.model_kwargs.items()
        }
        return Batch(self.ids[index], kwargs, self.model)

    def move(self, index: Tensor) -> None:
        """``take`` of no more rows, without writing those that stay. Raises as ``leave``."""
        changed = (index != torch.arange(len(index), device=index.device)).nonzero().flatten()
        if len(changed) or len(index) < len(self):
            index, changed = index.to(self.ids.device), changed.to(self.ids.device)
            for cache in self.caches.values():
                slots.move(cache, index, changed)
            self.take_arguments(index)

    def move_gaps(self, is_gap: Tensor) -> None:
        """Move the columns of each row that ``is_gap (rows, length)`` before its others, where padding is.

        Masks have to hide them, the newest column is none, and caches have to be of full attention.
        """
        columns = is_gap.logical_not().long().argsort(dim=1, stable=True)
        for cache in self.caches.values():
            slots.arrange(cache, columns[:, :-1])
        for name, value in self.model_kwargs.items():
            if TOKEN_DIM.get(name) == -1 and isinstance(value, Tensor):
                self.model_kwargs[name] = value.gather(-1, columns.expand_as(value))
        self.ids = self.ids.gather(1, columns)

    def trim(self, n_tokens: int) -> None:
        """Drop the first ``n_tokens`` columns, padding in all rows; an encoder's stay. Nothing is copied.

        Raises ``ValueError``, before anything is changed, if there are no more columns; else as ``leave``.
        """
        length = self.ids.shape[1]
        if not 0 <= n_tokens < length:
            raise ValueError(f"`n_tokens`={n_tokens!r} cannot be trimmed from {length} columns.")
        for cache in self.caches.values():
            slots.trim(cache, n_tokens)
        encoder_masks = {"attention_mask"} - {own_mask(self.model_kwargs)}
        for name, value in self.model_kwargs.items():
            dim = None if name in encoder_masks else TOKEN_DIM.get(name)
            if dim is None or not isinstance(value, Tensor) or value.ndim < -dim:
                continue
            if value.shape[dim] == length:
                self.model_kwargs[name] = value.narrow(dim, n_tokens, length - n_tokens)
        self.ids = self.ids[:, n_tokens:]

    def trim_to(self, length: int) -> None:
        """Drop the columns before the last ``length``, if there are more: padding in all rows."""
        if (n_tokens := self.ids.shape[1] - length) > 0:
            self.trim(n_tokens)


def own_mask(kwargs: ModelKwargs) -> str:
    """The name of the mask over the ids: with an encoder, ``attention_mask`` is the encoder's."""
    is_encoder_decoder = kwargs.get("encoder_outputs") is not None
    return "decoder_attention_mask" if is_encoder_decoder else "attention_mask"


def _with_masks(batch: Batch, other: Batch) -> list[ModelKwargs]:
    """The arguments of both, with masks of ones where only one has a mask, or lengths differ."""
    both = [dict(batch.model_kwargs), dict(other.model_kwargs)]
    masked = [(own_mask(batch.model_kwargs), [batch.ids, other.ids])]
    encoded: list[Any] = [kwargs.get("encoder_outputs") for kwargs in both]
    if None not in encoded:
        masked.append(("attention_mask", [output[0] for output in encoded]))
    for name, tokens in masked:  # (rows, length) ids, or (rows, length, size) states
        has_mask = any(kwargs.get(name) is not None for kwargs in both)
        if has_mask or tokens[0].shape[1] != tokens[1].shape[1]:
            for kwargs, of_mask in zip(both, tokens, strict=True):
                if kwargs.get(name) is None:
                    # ProphetNet multiplies a mask by float64's lowest number: others would overflow.
                    dtype = torch.float64 if of_mask.dtype == torch.float64 else torch.long
                    kwargs[name] = of_mask.new_ones(of_mask.shape[:2], dtype=dtype)
    return both


def _joined(name: str, one: Any, two: Any, n_rows: tuple[int, int]) -> Any:
    """An argument of both, padded on the left along tokens. ``ValueError`` for what does not fit."""
    if isinstance(one, ModelOutput) and isinstance(two, ModelOutput) and one.keys() == two.keys():
        return type(one)(**{key: _joined(key, one[key], two[key], n_rows) for key in one})
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        try:
            is_same = one is two or bool(one == two)
        except RuntimeError:  # lists of tensors, which may have rows
            is_same = False
        if is_same:
            return one
        raise ValueError(f"Rows cannot be joined: `{name}` is {one!r:.60} in one and {two!r:.60}.")
    dim, parts = row_dim(name, one), []
    for tensor, n in zip((one, two), n_rows, strict=True):
        if tensor.ndim > dim and tensor.shape[dim] == 1 != n:  # shared by all rows
            tensor = tensor.expand(*tensor.shape[:dim], n, *tensor.shape[dim + 1 :])
        parts.append(tensor)
    if columns := TOKEN_DIM.get(name):
        length = max(tensor.shape[columns] for tensor in parts)
        parts = [growing.padded(tensor, columns, length) for tensor in parts]
    shapes = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in parts]
    if shapes[0] != shapes[1]:
        pair = f"{tuple(one.shape)} and {tuple(two.shape)}"
        raise ValueError(f"Rows cannot be joined: `{name}` has the shapes {pair}.")
    return torch.cat([parts[0], parts[1].to(parts[0].device)], dim=dim)
