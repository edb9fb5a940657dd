"""Memory for weights in huge pages: a virtual machine can read them up to twice as fast as those of 4 KiB."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

#: Bytes of a huge page, of what is asked of the system at once, and between the weights in it.
PAGE, CHUNK, LINE = 1 << 21, 1 << 26, 64

_lock = threading.Lock()
#: The newest memory, while a weight is in it, and its next free byte.
_newest: tuple[weakref.ref[mmap.mmap], int] | None = None


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU with a storage of its own; the tensor itself where the system has no such pages.

    Memory goes back to the system when all tensors in ``CHUNK`` bytes, or in those of a larger one, are gone.
    """
    global _newest
    n_bytes = tensor.nbytes
    with _lock, suppress(AttributeError, OSError):  # not Linux; no memory
        memory, start = _newest[0]() if _newest else None, _newest[1] if _newest else 0
        if memory is None or start + n_bytes > len(memory):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(CHUNK, n_bytes) + PAGE, flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)
            start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
        copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        _newest = weakref.ref(memory), start + -(-n_bytes // LINE) * LINE
        return copy.view(tensor.shape).copy_(tensor)
    return tensor
