"""The quantised cache: keys and values in 8, 4 or 2 bits, in plain torch.

The method is KIVI (Liu et al. 2024). Some channels of keys are far larger than others in all tokens,
so the tokens of a channel share a scale. Values have no such channels: the channels of a token share one.

A group of ``bits`` bits holds ``x`` as ``code = round((x - zero) / scale)``, with ``zero`` its
smallest number and ``scale`` its range over ``2**bits - 1``. Scales and zero points have the dtype of
the states, so the smallest number of a group is exact.

A forward pass attends to what it computes itself in full precision. For attention, one layer at a
time is unpacked, into memory that the layers use in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers import QuantizedCache as UpstreamQuantizedCache
from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs

from ...settings.cache_settings import Settings, upstream_backend
from ...settings.logs import logger
from .dynamic import CacheRequest, GrowingCache, TakesRows
from .growing import use_count

#: Dimensions of grouped states ``(rows, heads, groups, tokens, parts, channels)``.
GROUPS, TOKENS, CHANNELS = 2, 3, 5

#: Numbers that are unpacked, or packed, at a time: on a CPU few enough to stay in its caches.
UNPACKED_AT_ONCE, PACKED_AT_ONCE, ON_ACCELERATORS = 2**19, 2**17, 2**23


@dataclass(frozen=True, slots=True)
class Grouping:
    """How states ``(rows, heads, length, size)`` are cut into blocks of ``tokens`` and of ``channels``.

    ``axis`` says which of the two share a scale: ``TOKENS`` of one channel, or ``CHANNELS`` of one token.
    """

    bits: int
    axis: int
    tokens: int
    channels: int

    def split(self, states: Tensor) -> Tensor:
        """A view ``(rows, heads, groups, tokens, parts, channels)``; whole groups only."""
        return states.unflatten(-1, (-1, self.channels)).unflatten(2, (-1, self.tokens))

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed codes, scales and zero points of grouped states; the latter two with a ``1`` at ``axis``."""
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        zero, high = torch.aminmax(exact, dim=self.axis, keepdim=True)
        n_steps = 2**self.bits - 1
        scale = ((high - zero) / n_steps).to(states.dtype)
        step = scale.to(exact.dtype)
        step = step.masked_fill(step == 0, 1)  # all numbers of the group are equal
        codes = ((exact - zero) / step).round_().clamp_(0, n_steps).to(torch.uint8)
        return pack(codes, self.bits), scale, zero.to(states.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``(…, tokens, parts, channels)`` as bytes ``(…, tokens * bits / 8, parts, channels)``."""
    # The codes of a byte are far apart, so that unpacking writes whole runs of tokens.
    first, *others = codes.chunk(8 // bits, dim=-3)
    packed = first.clone()
    for index, part in enumerate(others, start=1):
        packed |= part << (bits * index)
    return packed


def unpack(packed: Tensor, bits: int, out: Tensor) -> None:
    """Reverse ``pack``: write the codes to ``out``, of any dtype."""
    n_per_byte, n_bytes = 8 // bits, packed.shape[-3]
    for index in range(n_per_byte):
        codes = packed >> (bits * index) if index else packed
        if index < n_per_byte - 1:
            codes = codes & (2**bits - 1)
        out.narrow(-3, index * n_bytes, n_bytes).copy_(codes)


@dataclass(frozen=True, slots=True)
class Packed:
    """States of whole groups: ``codes (rows, heads, groups, bytes, parts, channels)``, uint8, and
    the ``scale`` and ``zero`` of each group."""

    grouping: Grouping
    codes: Tensor
    scale: Tensor
    zero: Tensor

    @classmethod
    def empty(cls, grouping: Grouping, like: Tensor) -> Packed:
        """No groups yet, of states like ``like (rows, heads, length, size)``."""
        group = like.new_zeros(*like.shape[:2], grouping.tokens, like.shape[3])
        return cls(grouping, *grouping.encode(grouping.split(group))).first_groups(0)

    @property
    def length(self) -> int:
        return self.codes.shape[GROUPS] * self.grouping.tokens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scale, self.zero

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Apply ``change`` to all tensors, whose first dimension is that of the rows."""
        return Packed(self.grouping, *(change(tensor) for tensor in self.tensors))

    def first_groups(self, n_groups: int) -> Packed:
        """The first groups, as copies: the memory of the others is free again."""
        return self.map(lambda tensor: tensor[:, :, :n_groups].clone())

    def extended(self, states: Tensor) -> Packed:
        """Append the groups of ``states (rows, heads, length, size)``; return all groups."""
        parts = _blocks((), self.grouping.split(states), PACKED_AT_ONCE)
        added = [self.grouping.encode(part) for (part,) in parts]
        tensors = zip(self.tensors, *added, strict=True)
        return Packed(self.grouping, *(torch.cat(same, GROUPS) for same in tensors))

    def write_to(self, out: Tensor) -> None:
        """Write the states into ``out (rows, heads, length, size)``, a few groups at a time."""
        grouped, exact = self.grouping.split(out), torch.promote_types(out.dtype, torch.float32)
        for codes, scale, zero, part in _blocks(self.tensors, grouped, UNPACKED_AT_ONCE):
            states = part if out.dtype == exact else torch.empty_like(part, dtype=exact)
            unpack(codes, self.grouping.bits, states)
            states.mul_(scale.to(exact)).add_(zero.to(exact))
            if states is not part:
                part.copy_(states)


class Scratch:
    """Memory that layers unpack into in turn, if no tensor shares it: new memory is slow to fill on a CPU."""

    #: A new buffer is larger than needed by this share, since the next tokens need more.
    SPARE = 1 / 16

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of ``shape``, with the dtype and device of ``like``, to be written to."""
        is_reused = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if like.device.type != "cpu" or not is_reused:
            return like.new_empty(shape)
        buffer, n_numbers = self.buffer, math.prod(shape)
        if (
            buffer is None
            or buffer.dtype != like.dtype
            or not n_numbers <= buffer.numel() <= 4 * n_numbers
            or buffer.is_inference() != torch.is_inference_mode_enabled()
            or use_count(buffer.untyped_storage()._cdata) > 2  # seen by more than these two
        ):
            self.buffer = buffer = like.new_empty(n_numbers + int(n_numbers * self.SPARE))
        return buffer[:n_numbers].view(shape)

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()  # copies begin empty


def _blocks(
    tensors: Sequence[Tensor], grouped: Tensor, on_cpu: int
) -> Iterator[tuple[Tensor, ...]]:
    """The parts of ``tensors`` and of ``grouped`` states that are computed at a time, ``on_cpu`` numbers."""
    n_numbers = on_cpu if grouped.is_cpu else ON_ACCELERATORS
    step = max(1, n_numbers // max(1, grouped[:, :, :1].numel()))
    return zip(*(tensor.split(step, GROUPS) for tensor in (*tensors, grouped)), strict=True)


class States:
    """The keys, or the values, of one layer: old ones packed, ``recent`` ones as they are."""

    def __init__(self, grouping: Grouping, like: Tensor) -> None:
        self.packed = Packed.empty(grouping, like)
        self.recent = like[:, :, :0].clone()  # (rows, heads, length, size)

    def __len__(self) -> int:
        return self.packed.length + int(self.recent.shape[2])

    def joined(self, new: Tensor | None = None, scratch: Scratch | None = None) -> Tensor:
        """All states, and ``new`` ones behind them, ``(rows, heads, length, size)``, in one tensor."""
        new = self.recent[:, :, :0] if new is None else new
        n_packed, n_old = self.packed.length, len(self)
        rows, heads, n_new, size = new.shape
        joined = (scratch or Scratch()).empty((rows, heads, n_old + n_new, size), new)
        if n_packed:
            self.packed.write_to(joined[:, :, :n_packed])
        joined[:, :, n_packed:n_old] = self.recent
        joined[:, :, n_old:] = new
        return joined

    def extend(self, new: Tensor, n_exact: int, scratch: Scratch) -> Tensor:
        """Append ``new`` states, and return all of them for attention; ``n_exact``: see ``keep``."""
        joined = self.joined(new, scratch) if len(self) else new
        self.keep(joined, n_exact)
        return joined

    def keep(self, states: Tensor, n_exact: int) -> None:
        """Store all ``states``; pack whole groups of those before the last ``n_exact``."""
        states = states.detach()
        start, tokens = self.packed.length, self.packed.grouping.tokens
        end = start + max(0, states.shape[2] - start - n_exact) // tokens * tokens
        if end > start:
            self.packed = self.packed.extended(states[:, :, start:end])
        self.recent = states[:, :, end:].clone()  # a view would keep all of the states alive

    def crop(self, n_tokens: int) -> None:
        """Drop the last ``n_tokens``. What is left of a packed group is unpacked."""
        length = max(0, len(self) - n_tokens)
        if length >= self.packed.length:
            self.recent = self.recent[:, :, : length - self.packed.length]
            return
        n_groups, n_rest = divmod(length, self.packed.grouping.tokens)
        cut = self.packed.map(lambda tensor: tensor[:, :, n_groups : n_groups + 1])
        unpacked = self.recent.new_empty(*self.recent.shape[:2], cut.length, self.recent.shape[3])
        cut.write_to(unpacked)
        self.recent = unpacked[:, :, :n_rest].clone()
        self.packed = self.packed.first_groups(n_groups)

    def take(self, rows: Tensor) -> None:
        """Row ``i`` becomes old row ``rows[i]``."""
        rows = rows.to(self.recent.device)
        self.packed = self.packed.map(lambda tensor: tensor.index_select(0, rows))
        self.recent = self.recent.index_select(0, rows)


def _unpacked(name: str) -> Any:
    """An attribute that is unpacked when read, and packed when assigned."""

    def get(layer: QuantizedLayer) -> Tensor | None:
        return layer.states[name].joined() if name in layer.states else None

    def assign(layer: QuantizedLayer, states: Tensor | None) -> None:
        if states is None:
            layer.states.pop(name, None)
        else:
            layer.states[name] = States(layer._grouping(name, states.shape[-1]), states)
            layer.states[name].keep(states, layer.settings.residual_length)

    return property(get, assign)


class QuantizedLayer(TakesRows, DynamicLayer):
    """A layer of full attention. Its ``keys`` and ``values`` are unpacked when read."""

    def __init__(self, settings: Settings, scratch: tuple[Scratch, Scratch] | None = None) -> None:
        self.settings = settings
        self.scratch = scratch or (Scratch(), Scratch())  # what keys, and values, are unpacked into
        self.record_past = False  # whether an update may be taken back before the next one
        self.states: dict[str, States] = {}
        super().__init__()

    keys: Any = _unpacked("keys")
    values: Any = _unpacked("values")

    def _grouping(self, name: str, size: int) -> Grouping:
        settings = self.settings
        kind, size = (TOKENS, size) if name == "keys" else (CHANNELS, settings.channels(size))
        return Grouping(settings.bits, kind, settings.tokens, size)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n_exact = self.settings.residual_length
        if self.record_past and self.get_seq_length():  # a prompt is not taken back
            n_exact += key_states.shape[2]
        keys = self.states["keys"].extend(key_states, n_exact, self.scratch[0])
        return keys, self.states["values"].extend(value_states, n_exact, self.scratch[1])

    def get_seq_length(self) -> int:
        return len(self.states["keys"]) if self.is_initialized else 0

    def activate_past_recording(self) -> None:
        """From now on, keep what an update adds in full precision until the next update."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens out. Those left of a packed group stay rounded."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes minus the number of tokens to remove, but was given {tokens_to_remove}."
            )
        for states in self.states.values():
            states.crop(-tokens_to_remove)

    def _take(self, rows: Tensor) -> None:
        for states in self.states.values():
            states.take(rows)

    @property
    def n_bytes(self) -> int:
        """Bytes of what is kept between updates."""
        states = self.states.values()
        return sum(tensor.nbytes for s in states for tensor in (*s.packed.tensors, s.recent))


class QuantizedCache(DynamicCache, UpstreamQuantizedCache):
    """Quantises the layers of full attention; layers of another kind are the dynamic cache's."""

    def __init__(self, config: Any, settings: Settings | None = None) -> None:
        config = config.get_text_config(decoder=True)
        kinds, _ = get_layer_types_and_kwargs(config)
        if "full_attention" not in kinds:
            logger.warning_once(
                "`cache_implementation='quantized'` quantises layers of kind 'full_attention', "
                f"and this model has none: its layers are {sorted(set(kinds))}."
            )
        self.scratch = (Scratch(), Scratch())  # what the layers unpack keys, and values, into
        layers = GrowingCache(config=config).layers
        for index, kind in enumerate(kinds):
            if kind == "full_attention":
                layers[index] = QuantizedLayer(settings or Settings(), self.scratch)
        Cache.__init__(self, layers=layers)

    @property
    def n_bytes(self) -> int:
        """Bytes that the quantised layers keep between updates, without ``scratch``."""
        return sum(getattr(layer, "n_bytes", 0) for layer in self.layers)


def make_quantized(request: CacheRequest) -> Cache:
    """Keys and values in few bits: hfgen's own, or the backend that ``cache_config`` names."""
    options, model = request.config.cache_config, request.model
    if (backend := upstream_backend(options)) is None:
        return QuantizedCache(request.decoder_config, Settings.of(options, request.decoder_config))
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The backend {backend!r} of `cache_implementation='quantized'` does not work with "
            f"encoder-decoder models such as {type(model).__name__}. Leave `backend` out."
        )
    return UpstreamQuantizedCache(**{"config": request.decoder_config, **options})
