"""The offloaded cache: keys and values are on the host or in mapped files, not on the device.

Its layers are those of the dynamic cache with ``Offloaded`` tensors. Sliding windows stay on the device.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from ...settings.cache_settings import path_of
from . import mapped
from .dynamic import GrowingCache, GrowingLayer
from .growing import GrowableTensor, GrowthPolicy, Spare
from .mapped import Folder

if TYPE_CHECKING:
    from . import CacheRequest

HOST = torch.device("cpu")

#: Bytes that are in memory at a time while rows of a file are chosen.
CHUNK_BYTES = 2**20


def check_settings(options: Any, config: Any = None) -> None:
    """Raise ``ValueError`` for a ``cache_config``, or a folder, that cannot be used."""
    if (path := path_of(options)) is not None:
        Folder(path).check()


class Offloaded(GrowableTensor):
    """A tensor ``(…, length, size)`` on the host; ``append`` returns it on the model's device.

    In files, a buffer has room until the end of the call. Copies are in files, too; pickles are not.
    After a fork, which shares the file, both processes copy the tensor before they write.
    """

    __slots__ = ("folder", "growth", "n_forks")

    def __init__(
        self, growth: GrowthPolicy, folder: Folder | None = None, view: Tensor | None = None
    ) -> None:
        super().__init__(view)
        self.growth, self.folder = growth, folder
        #: ``mapped.n_forks`` when the buffer was made.
        self.n_forks = 0

    def append(self, new: Tensor, spare: Spare) -> Tensor:
        """Append ``new (…, n, size)`` and return all tokens, on the device of ``new``."""
        if self.view is not None and self.view.device != HOST:
            self.assign(self.view.to(HOST))  # the layer begins with nothing, on the model's device
        return super().append(new.to(HOST), spare).to(new.device)

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self.folder is None:
            return super()._empty(shape, like)
        *lead, capacity, size = shape
        end = self.growth.max_length
        room = end if end is not None and end >= capacity else capacity + capacity // 4
        return self.folder.empty((*lead, room, size), like.dtype)

    def _adopt(self, buffer: Tensor, start: int, length: int, n_rows: int | None = None) -> None:
        if buffer is not self.buffer:
            self.n_forks = mapped.n_forks
        super()._adopt(buffer, start, length, n_rows)

    def _takes(self, new: Tensor) -> bool:
        return not self._was_forked() and super()._takes(new)

    def _is_shared(self) -> bool:
        return self._was_forked() or super()._is_shared()

    def _was_forked(self) -> bool:
        return self.folder is not None and self.n_forks != mapped.n_forks

    def map_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows by ``take(rows)``; of a file, some tokens at a time."""
        view = self.view
        if self.folder is None or self.buffer is None or not view.numel():
            super().map_rows(take)
            return
        *_, length, size = view.shape
        step = max(1, CHUNK_BYTES * length // view.nbytes)
        taken = take(view[..., :0, :])
        buffer = self._empty((*taken.shape[:-2], length, size), taken)
        places = buffer.narrow(-2, 0, length).split(step, dim=-2)
        for place, chunk in zip(places, view.split(step, dim=-2), strict=True):
            place.copy_(take(chunk))
        self.shared = 0
        self._adopt(buffer, 0, length)

    def __copy__(self) -> Offloaded:
        return Offloaded(self.growth, self.folder, self.view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloaded:
        twin = Offloaded(copy.deepcopy(self.growth, memo), self.folder)
        if self.buffer is None:
            twin.view = copy.deepcopy(self.view, memo)
        else:
            twin._move(self.view, self.view.shape[-2])
        return twin


class OffloadedCache(GrowingCache):
    """The dynamic cache whose growing tensors are on the host: in files of ``path``, or in memory.

    ``max_length``: tokens at the end of the call.
    """

    def __init__(
        self,
        config: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        max_length: int | None = None,
    ) -> None:
        super().__init__(config=config, max_length=max_length)
        folder = None if path is None else Folder(path)
        for layer in self.layers:
            if isinstance(layer, GrowingLayer) and not isinstance(layer, DynamicSlidingWindowLayer):
                for name in layer._names:
                    setattr(layer, name, Offloaded(self._growth, folder))


# Code that asks for a cache by its name finds upstream's dynamic one.
OffloadedCache.__name__ = GrowingCache.__name__


def make_offloaded(request: CacheRequest) -> Cache:
    """On the host, in memory or in files; upstream's, which copies ahead, on CUDA without files.

    Raises ``ValueError`` if the folder has less space than the whole call takes, as far as is known.
    """
    config, path = request.decoder_config, path_of(request.config.cache_config)
    if path is None and is_on_cuda(request.model):
        return DynamicCache(config=config, offloading=True)
    if path is not None and (needed := _needed_bytes(request)) > (free := Folder(path).free_bytes):
        raise ValueError(
            f"`path`={os.path.abspath(path)!r} in `cache_config` has {free:,} bytes free, but keys and values "
            f"of {request.rows} sequences of up to {request.max_length:,} tokens take {needed:,}. "
            "Generate fewer tokens, or name a folder with more space."
        )
    return OffloadedCache(config, path, max_length=request.max_length)


class CrossAttention(DynamicCache):
    """The dynamic cache, even with ``offloading``, which T5Gemma passes to this class without CUDA."""

    def __init__(self, config: Any = None, offloading: bool = False) -> None:
        super().__init__(config=config)


CrossAttention.__name__ = DynamicCache.__name__


def make_cross_attention(request: CacheRequest) -> Cache:
    """The encoder's keys and values, which come once: upstream's where ``make_offloaded`` is."""
    config = request.decoder_config
    if path_of(request.config.cache_config) is None and is_on_cuda(request.model):
        return DynamicCache(config=config, offloading=True)
    return CrossAttention(config)


def is_on_cuda(model: Any) -> bool:
    """Whether the model, or a part of it, computes where upstream's offloaded caches work."""
    devices = [model.device, *getattr(model, "hf_device_map", {}).values()]
    return torch.cuda.is_available() and any(
        isinstance(device, int) or str(device).startswith("cuda") for device in devices
    )


def _needed_bytes(request: CacheRequest) -> int:
    """Bytes of the layers that grow; 0 for those whose heads the config does not tell for sure."""
    config, numbers = request.decoder_config, 0
    kinds, _ = get_layer_types_and_kwargs(config)
    for kind, layer in zip(kinds, config.per_layer_config, strict=False):
        heads = getattr(layer, "num_key_value_heads", None)
        is_latent = getattr(layer, "qk_head_dim", None) is not None
        if kind != "full_attention" or not isinstance(heads, int) or is_latent:
            continue
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        numbers += 2 * heads * size
    return int(numbers * request.rows * request.max_length * request.model.dtype.itemsize)
