"""The quantised cache: keys and values in 8, 4 or 2 bits, in plain torch.

The method is KIVI (Liu et al. 2024). Some channels of keys are far larger than others in all tokens,
so the tokens of a channel share a scale. Values have no such channels: the channels of a token share
one. When there is a group more than ``residual_length`` of unpacked tokens, the oldest is packed.

A forward pass attends to what it computes itself in full precision. For attention, one layer at a
time is unpacked, into memory that the layers use in turn.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers import QuantizedCache as UpstreamQuantizedCache
from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs

from ...settings.cache_settings import Settings, upstream_backend
from ...settings.logs import logger
from .dynamic import CacheRequest, GrowingCache, TakesRows
from .packing import CHANNELS, TOKENS, Grouping, Packed, Scratch


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
        bits, tokens = self.settings.bits, self.settings.tokens
        if name == "keys":
            return Grouping(bits, TOKENS, tokens, size)
        return Grouping(bits, CHANNELS, tokens, self.settings.channels(size))

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
        layers = [
            QuantizedLayer(settings or Settings(), self.scratch)
            if kind == "full_attention"
            else layer
            for kind, layer in zip(kinds, GrowingCache(config=config).layers, strict=True)
        ]
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
