"""The offloaded cache: keys and values are on the host or in mapped files, not on the device.

Its layers are those of the dynamic cache with ``Offloaded`` tensors. Sliding windows stay on the device.
The operating system keeps in memory what fits of the mapped files.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import math
import mmap
import os
import shutil
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ...settings.cache_settings import path_of
from .dynamic import CacheRequest, GrowingCache, GrowingLayer
from .growing import GrowableTensor, GrowthPolicy, Spare

HOST = torch.device("cpu")


#: Linux's advice to write pages back and drop them. Older kernels refuse it, and nothing happens.
MADV_PAGEOUT = 21


class Folder:
    """A folder for tensors in files without a name; a file is deleted with its last tensor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in a new file, whose space is reserved. Raises ``OSError`` if there is none."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                _reserve(file.fileno(), n_bytes)
                return _tensor(mmap.mmap(file.fileno(), n_bytes), shape, dtype)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The folder {self.path!r} of the offloaded cache has no place for a file of "
                f"{n_bytes:,} bytes: {error.strerror}. {shutil.disk_usage(self.path).free:,} bytes "
                "are free",
            ) from error

    def holding(self, values: Tensor) -> Tensor:
        """A copy of ``values`` in a new file, of which only pages that are read come into memory.

        Raises ``OSError`` if there is no space.
        """
        with tempfile.TemporaryFile(dir=self.path) as file:
            file.write(values.detach().view(torch.uint8).numpy().data)
            file.flush()
            memory = mmap.mmap(file.fileno(), values.nbytes)
            if sys.platform == "linux":
                # Pages in the system's cache would come back with each that is read, as would those behind it.
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                memory.madvise(mmap.MADV_RANDOM)
                _page_out(values)
            return _tensor(memory, tuple(values.shape), values.dtype)


def _page_out(values: Tensor) -> None:
    """Take a mapped checkpoint's ``values`` out of memory; other memory is freed with its tensor."""
    if values.untyped_storage().resizable():
        return
    start = -(-values.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    n_bytes = max(values.data_ptr() + values.nbytes - start, 0)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), MADV_PAGEOUT)


def _tensor(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Detached, so that no tensor but this one holds the storage.
    return torch.frombuffer(memory, dtype=dtype).view(shape).detach()


def _reserve(file: int, n_bytes: int) -> None:
    """Give a file its space now: to write to a mapping that the disk has no room for is fatal."""
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except (AttributeError, OSError) as error:  # some systems, and some of their disks, cannot
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(file, n_bytes)


class Offloaded(GrowableTensor):
    """A tensor ``(…, length, size)`` on the host; ``append`` returns it on the model's device.

    In files, a buffer has room until the end of the call. Copies are in files, too; pickles are not.
    """

    __slots__ = ("folder", "growth")

    def __init__(
        self, growth: GrowthPolicy, folder: Folder | None = None, view: Tensor | None = None
    ) -> None:
        super().__init__(view)
        self.growth, self.folder = growth, folder

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

    def take(self, rows: Tensor) -> None:
        """Row ``i`` becomes old row ``rows[i]``; those of a file are written to another one."""
        if self.folder is None or self.buffer is None or not self.view.numel():
            super().take(rows)
            return
        view, length, self.shared = self.view, self.view.shape[-2], 0
        buffer = self._empty((len(rows), *view.shape[1:]), view)
        torch.index_select(view, 0, rows.to(HOST), out=buffer.narrow(-2, 0, length))
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
    """The dynamic cache with growing tensors on the host: in files of ``path``, or in memory."""

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


class CrossAttention(DynamicCache):
    """The dynamic cache, even with ``offloading``, which T5Gemma passes to this class without CUDA."""

    def __init__(self, config: Any = None, offloading: bool = False) -> None:
        super().__init__(config=config)


# Code that asks for a cache by its name finds upstream's dynamic one.
OffloadedCache.__name__ = CrossAttention.__name__ = DynamicCache.__name__


def check_settings(options: Any, config: Any = None) -> None:
    """Raise ``ValueError`` for a ``cache_config``, or a folder, that cannot be used."""
    if (path := path_of(options)) is None:
        return
    try:
        with tempfile.TemporaryFile(dir=os.path.abspath(path)):
            pass
    except OSError as error:
        raise ValueError(
            f"`path`={os.path.abspath(path)!r} in `cache_config` has to be a folder that files can be made "
            f"in, but: {error.strerror}."
        ) from error


def make_offloaded(request: CacheRequest) -> Cache:
    """On the host, in memory or in files; upstream's, which copies ahead, on CUDA without files."""
    path = path_of(request.config.cache_config)
    if path is None and is_on_cuda(request.model):
        return DynamicCache(config=request.decoder_config, offloading=True)
    return OffloadedCache(request.decoder_config, path, max_length=request.max_length)


def make_cross_attention(request: CacheRequest) -> Cache:
    """The encoder's keys and values, which come once: upstream's where ``make_offloaded`` is."""
    if path_of(request.config.cache_config) is None and is_on_cuda(request.model):
        return DynamicCache(config=request.decoder_config, offloading=True)
    return CrossAttention(request.decoder_config)


def is_on_cuda(model: Any) -> bool:
    """Whether the model, or a part of it, computes where upstream's offloaded caches work."""
    devices = [model.device, *getattr(model, "hf_device_map", {}).values()]
    return torch.cuda.is_available() and any(
        isinstance(device, int) or str(device).startswith("cuda") for device in devices
    )
