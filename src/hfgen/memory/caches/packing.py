"""Quantised storage: groups of numbers share a scale and a zero point and are packed into bytes.

A group of ``bits`` bits holds ``x`` as ``code = round((x - zero) / scale)``, with ``zero`` its
smallest number and ``scale`` its range over ``2**bits - 1``. Scales and zero points have the dtype of
the states, so the smallest number of a group is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .growing import use_count

#: Dimensions of grouped states ``(rows, heads, groups, tokens, parts, channels)``.
GROUPS, TOKENS, CHANNELS = 2, 3, 5

#: Numbers that are unpacked, or packed, at a time: on a CPU few enough to stay in its caches.
UNPACKED_AT_ONCE = {"cpu": 2**19}
PACKED_AT_ONCE = {"cpu": 2**17}
ON_ACCELERATORS = 2**23


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
        exact = states.to(_exact(states.dtype))
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
    def n_groups(self) -> int:
        return int(self.codes.shape[GROUPS])

    @property
    def length(self) -> int:
        return self.n_groups * self.grouping.tokens

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
        n_old, tokens = self.n_groups, self.grouping.tokens
        n_new = states.shape[2] // tokens
        room = [0] * 2 * (CHANNELS - GROUPS) + [0, n_new]  # behind the groups
        longer = self.map(lambda tensor: F.pad(tensor, room))
        for start, end in _blocks(n_new, states, tokens, PACKED_AT_ONCE):
            grouped = self.grouping.split(states[:, :, start * tokens : end * tokens])
            for tensor, part in zip(longer.tensors, self.grouping.encode(grouped), strict=True):
                tensor[:, :, n_old + start : n_old + end] = part
        return longer

    def write_to(self, out: Tensor) -> None:
        """Write the states into ``out (rows, heads, length, size)``, a few groups at a time."""
        grouped, exact = self.grouping.split(out), _exact(out.dtype)
        for start, end in _blocks(self.n_groups, out, self.grouping.tokens, UNPACKED_AT_ONCE):
            codes, scale, zero = (tensor[:, :, start:end] for tensor in self.tensors)
            part = grouped[:, :, start:end]
            states = part if out.dtype == exact else torch.empty_like(part, dtype=exact)
            unpack(codes, self.grouping.bits, states)
            states.mul_(scale.to(exact)).add_(zero.to(exact))
            if states is not part:
                part.copy_(states)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What states of ``dtype`` are computed in."""
    return torch.promote_types(dtype, torch.float32)


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
    n_groups: int, states: Tensor, tokens: int, at_once: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """Ranges of groups that have about as many numbers as are computed at a time."""
    rows, heads, _, size = states.shape
    n_numbers = at_once.get(states.device.type, ON_ACCELERATORS)
    step = max(1, n_numbers // max(1, rows * heads * tokens * size))
    for start in range(0, n_groups, step):
        yield start, min(start + step, n_groups)
