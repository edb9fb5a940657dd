"""Layers of the static cache: a pool owns their memory, and attention gets only the filled part.

``keys`` and ``values`` have upstream's shapes and are parts of buffers of ``pool.py``. Before a forward
pass, ``get_mask_sizes`` decides how many tokens attention gets: the filled ones, rounded up.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from .dynamic import stands_for, upstream_kind
from .pool import CROSS, FILLED, WINDOW, Lease, Place

#: Attention sees a multiple of this many tokens.
GRAIN = 64


def mark_dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """Tell the compiler that these sizes may change; one row or one token is a graph of its own."""
    for dim in dims:
        if tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


class VisibleLength:
    """How many cached tokens attention may see. All layers of full attention share one object."""

    def __init__(self, is_whole: bool) -> None:
        #: Whether everything is shown, as upstream does: always, or to a prompt.
        self.is_whole = self.is_whole_to_prompts = is_whole
        #: Whether sizes are few, since each costs a compilation or a recorded graph.
        self.is_coarse = False
        #: How many tokens the last ``show`` returned, and for which ``total``; ``None`` until then.
        self.shown: int | None = None
        self.total = 0
        #: Whether the forward pass to come sees ``shown`` tokens: read by compiled graphs.
        self.is_open = False
        #: Whether forwards are recorded. Then lengths are numbers, which masks are made of without a read.
        self.is_recorded = False
        #: Whether a graph of the forward is being recorded, which may not depend on the length.
        self.is_recording = False
        self.layers: WeakSet[SlicedStaticLayer] = WeakSet()

    def show(self, start: int, total: int, capacity: int) -> int:
        """Return how many of ``capacity`` tokens attention sees in a forward of tokens ``start:total``."""
        is_prompt = start == 0 or total - start > 1
        grain = GRAIN
        if self.is_coarse:  # two sizes for each doubling
            grain = max(GRAIN, (1 << max(total - 1, 1).bit_length()) // 4)
        is_whole = self.is_whole or (self.is_whole_to_prompts and is_prompt)
        self.shown = capacity if is_whole else min(-(-total // grain) * grain, capacity)
        self.total, self.is_open = total, True
        for layer in self.layers:
            layer._adopt()
        return self.shown

    def close(self) -> None:
        """Note the tokens of a compiled forward, unless ``update`` outside of the graph has."""
        if self.is_open:
            for layer in self.layers:
                layer._note(self.total)
        self.is_open = False


class Pooled:
    """A static layer whose keys and values are in a pool's buffers."""

    _kind = ""
    #: Dimensions of ``keys`` and ``values`` that differ from call to call.
    _dynamic: tuple[int, ...] = (0, 2)
    _lease: Lease
    _index: int

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        """Take buffers for as many rows and heads as the states have."""
        if torch.compiler.is_compiling():
            super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
            return
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        buffers, length, capacity = self._lease.buffers, self.max_cache_len, self._capacity()
        if self.device.type == "cpu":
            self.cumulative_length = self.cumulative_length.to(self.device)
        else:
            self.cumulative_length = buffers.counter(self._place("count"), self)
        for name, states in (("keys", key_states), ("values", value_states)):
            setattr(self, name, buffers.take(self._place(name), states, length, capacity))
        torch._dynamo.mark_static_address(self.cumulative_length)
        self.is_initialized = True
        pool = self._lease.pool  # allocating succeeded: later caches may be as long
        pool.needed = max(pool.needed, self._lease.needed)
        self._adopt()

    def _capacity(self: Any) -> int:
        """How many tokens a new buffer has."""
        size = self._lease.buffers.size
        # One more than are seen: the compiler must not take the stride of heads for a product of sizes.
        return 1 + int(size.source_length if self._kind == CROSS else size.length)

    def _adopt(self: Any) -> None:
        """Tell the compiler what may change: the rows, and where it is not a window, the length."""
        self._mark(self.keys, self.values)

    def _mark(self, *states: Tensor) -> None:
        """Tell the compiler that addresses stay while the sizes ``_dynamic`` may change."""
        if torch.compiler.is_compiling():
            return
        for tensor in states:
            torch._dynamo.mark_static_address(tensor)
            mark_dynamic(tensor, *self._dynamic)

    def _length(self: Any) -> int:
        """How many tokens from the start of ``keys`` hold something."""
        return int(self.keys.shape[2])

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        """Row ``i`` becomes old row ``beam_idx[i]``, in place; there may be more or fewer rows."""
        if not self.is_initialized:  # its length would be a read of the device
            return
        filled, rows = self._length(), len(beam_idx)
        for name in ("keys", "values"):
            states = getattr(self, name)
            chosen = states[:, :, :filled].index_select(0, beam_idx.to(states.device))
            target = states
            if len(states) != rows:
                found = self._lease.buffers.with_rows(self._place(name), rows, states)
                target = states.new_zeros((rows, *states.shape[1:])) if found is None else found
            target[:, :, :filled].copy_(chosen)
            setattr(self, name, target)
        if len(self.keys) != self.batch_size:
            self.batch_size = rows
            self._adopt()

    def _place(self, name: str) -> Place:
        return self._kind, self._index, name

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Copy as upstream's layer, without the rest of the buffers."""
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.clone(memory_format=torch.contiguous_format)
        return object.__new__, (upstream_kind(self),), state


@stands_for(StaticLayer)
class PooledLayer(Pooled, StaticLayer):
    """Cross-attention: keys and values of the encoder, all of which attention gets."""

    _kind = CROSS


@stands_for(StaticSlidingWindowLayer)
class PooledSlidingWindowLayer(Pooled, StaticSlidingWindowLayer):
    """Sliding-window and chunked attention."""

    _kind = WINDOW
    _dynamic = (0,)

    def _capacity(self: Any) -> int:
        # A window that is longer than the call is cut to it, and may be longer in the next one.
        is_cut = self.max_cache_len == self._lease.requested.length
        return super()._capacity() if is_cut else self.max_cache_len


@stands_for(StaticLayer)
class SlicedStaticLayer(Pooled, StaticLayer):
    """Full attention: ``keys (rows, heads, max_cache_len, size)``, of which the filled part is shown."""

    _kind = FILLED
    #: The keys and values that attention sees; they are the first tokens of ``_source``: number, keys, values.
    _seen: tuple[Tensor, Tensor]
    _source: tuple[int | None, Tensor | None, Tensor | None] = (None, None, None)
    _known = 0  # tokens held, as read when ``cumulative_length`` had the version ``_version``
    _version = -1

    def __init__(self, max_cache_len: int, visible: VisibleLength) -> None:
        super().__init__(max_cache_len)
        self._visible = visible
        visible.layers.add(self)

    def get_seq_length(self) -> Any:
        """Tokens held: a tensor, or a number; see ``VisibleLength.is_recorded``."""
        visible = self._visible
        if visible.is_recorded and self.is_initialized and not visible.is_recording:
            return self._length()
        return super().get_seq_length()

    def _length(self) -> int:
        """Tokens held. Reads the device only if ``cumulative_length`` was changed from outside."""
        count = self.cumulative_length
        if count.is_cpu:
            return int(count)
        if count.is_inference() or self._version != count._version:
            self._note(int(count))
        return self._known

    def _note(self, length: int) -> None:
        self._known = length
        count = self.cumulative_length
        if not count.is_inference():
            self._version = count._version

    def take_back(self, n_tokens: int) -> None:
        """Drop the newest tokens; what lies behind the length is overwritten."""
        length = self._length()
        self.cumulative_length.sub_(n_tokens)
        self._note(length - n_tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a forward of ``query_length`` tokens sees, and the first one's position: 0."""
        visible = self._visible
        if torch.compiler.is_compiling():
            return (visible.shown if visible.is_open else None) or self.max_cache_len, 0
        start = self._length()
        return visible.show(start, start + query_length, self.max_cache_len), 0

    def _adopt(self) -> None:
        """Set the keys and values that attention sees to those that ``_visible`` shows."""
        if not self.is_initialized:
            return
        shown, keys, values = self._visible.shown, self.keys, self.values
        if self._source[0] == shown and self._source[1] is keys and self._source[2] is values:
            return
        self._source = (shown, keys, values)
        self._seen = (keys[:, :, :shown], values[:, :, :shown])
        self._mark(*self._seen)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens and return the keys and values that attention sees."""
        if torch.compiler.is_compiling() or self._visible.is_recording:
            return self._update_in_graph(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added, shape = key_states.shape[-2], self.keys.shape
        if key_states.shape[:2] != shape[:2]:
            raise RuntimeError(
                f"The static cache holds {shape[0]} rows of {shape[1]} heads, but gets "
                f"{key_states.shape[0]} of {key_states.shape[1]}."
            )
        keys, values, start = self.reserve(added)
        for states, new in ((keys, key_states), (values, value_states)):
            if type(new) is type(states):
                states.narrow(2, start, added).copy_(new)
            else:  # numbers that a library has quantised: they know upstream's operation
                states.index_copy_(2, torch.arange(start, start + added, device=self.device), new)
        return keys, values

    def reserve(self, n: int) -> tuple[Tensor, Tensor, int]:
        """Room for ``n`` tokens, which the caller writes: keys and values as attention sees them, its start.

        The layer is initialised. Raises ``IndexError`` if it has no room.
        """
        start = self._length()
        end, visible = start + n, self._visible
        if end > self.keys.shape[2]:
            raise IndexError(f"The static cache holds {self.keys.shape[2]} tokens, but gets {end}.")
        visible.is_open = False
        if visible.total == end:
            self._adopt()
            keys, values = self._seen
        else:  # get_mask_sizes was not called: the mask is for the whole cache
            keys, values = self.keys, self.values
        if not self.cumulative_length.add_(n).is_cpu:
            self._note(end)
        return keys, values, start

    def _update_in_graph(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """``update`` in a graph, which must not read the length."""
        visible = self._visible
        if not (self.is_initialized and visible.is_open):
            keys, values = super().update(key_states, value_states)
            if visible.is_open:
                keys, values = keys[:, :, : visible.shown], values[:, :, : visible.shown]
            return keys, values
        (keys, values), count, n = self._seen, self.cumulative_length, key_states.shape[2]
        places = count.view(1) if n == 1 else count + torch.arange(n, device=count.device)
        keys.index_copy_(2, places, key_states)
        values.index_copy_(2, places, value_states)
        count.add_(n)
        return keys, values
