"""Memory-mapped tensors in files of a folder; the operating system keeps in memory what fits."""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile

import torch
from torch import Tensor

#: How often this process and its parents were forked. What was mapped before a fork is shared after it.
n_forks = 0


def _count_fork() -> None:
    global n_forks
    n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


class Folder:
    """A folder for tensors in files without a name; a file is deleted with its last tensor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def check(self) -> None:
        """Raise ``ValueError`` if no files can be made here."""
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(
                f"`path`={self.path!r} in `cache_config` has to be a folder that files can be made "
                f"in, but: {error.strerror}."
            ) from error

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in a new file, whose space is reserved. Raises ``OSError`` if there is none."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                _reserve(file.fileno(), n_bytes)
                return _mapped(file.fileno(), n_bytes, shape, dtype)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The folder {self.path!r} of the offloaded cache has no place for a file of "
                f"{n_bytes:,} bytes: {error.strerror}. {self.free_bytes:,} bytes are free",
            ) from error

    def holding(self, values: Tensor) -> Tensor:
        """A copy of ``values`` in a new file, not in memory yet. Raises ``OSError`` if there is no space."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            file.write(values.detach().view(torch.uint8).numpy().data)
            file.flush()
            return _mapped(file.fileno(), values.nbytes, tuple(values.shape), values.dtype)


def _mapped(file: int, n_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Detached, so that no tensor but this one holds the storage.
    return torch.frombuffer(mmap.mmap(file, n_bytes), dtype=dtype).view(shape).detach()


def _reserve(file: int, n_bytes: int) -> None:
    """Give a file its space now: to write to a mapping that the disk has no room for is fatal."""
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except (AttributeError, OSError) as error:  # some systems, and some of their disks, cannot
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(file, n_bytes)
