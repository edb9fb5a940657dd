"""Measured times in a small file, by processor, version of torch, threads and shape."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .forward import ROWS
from .measure import OWN, Times

#: Of the file; another number there, and it is written anew.
FORMAT = 2
#: Bytes. Of a larger file the rest is not read, so that it is not well-formed.
MAX_SIZE = 2**22
#: What is said of a processor in /proc/cpuinfo that decides how fast it computes.
CPU_FACTS = ("vendor_id", "model name", "cpu family", "model", "stepping", "cache size", "flags")


def path() -> Path:
    """``$XDG_CACHE_HOME/hfgen/linears.json``, by default in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hfgen" / "linears.json"


def key(shape: tuple[int, int, torch.dtype, bool], n_modules: int, weights: str | None) -> str:
    """What times depend on, as text. ``shape``: out, in, type, whether there is a bias."""
    n_out, n_in, dtype, has_bias = shape
    layer = f"{n_out}x{n_in} {dtype} bias={has_bias} layers={n_modules} weights={weights}"
    return f"{_processor()} torch={torch.__version__} threads={torch.get_num_threads()} {layer}"


def key_of_steps(layers: list[str]) -> str:
    """What the times of a whole step depend on; ``layers``: what computes each shape of them."""
    digest = hashlib.sha256("\n".join(sorted(layers)).encode()).hexdigest()[:16]
    return f"{_processor()} torch={torch.__version__} threads={torch.get_num_threads()} {digest}"


@cache
def _processor() -> str:
    facts = [platform.machine(), platform.processor(), str(os.cpu_count())]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
        facts += [line for line in lines if line.partition("\t")[0].strip() in CPU_FACTS]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def read() -> dict[str, Times]:
    """What the file says, by ``key``; nothing of what is not well-formed, or another user's."""
    try:
        with path().open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_uid != os.getuid():
                return {}
            content = json.loads(file.read(MAX_SIZE))
    except (OSError, ValueError, RecursionError, RuntimeError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}
    entries = content.get("times")
    if not isinstance(entries, dict):
        return {}
    return {name: times for name, entry in entries.items() if (times := _times(entry))}


def write(found: dict[str, Times]) -> None:
    """Add to the file, in one piece; readable by this user only. What cannot be written is not kept."""
    partial = None
    try:
        target = path()
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {"format": FORMAT, "times": read() | found}
        handle, partial = tempfile.mkstemp(prefix=".linears", dir=target.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(partial, target)
        partial = None
    except (OSError, RuntimeError):
        return
    finally:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)


def _times(entry: Any) -> Times | None:
    """Times as ``measure`` gives them, or None."""
    if not isinstance(entry, dict) or OWN not in entry:
        return None
    found: Times = {}
    for name, by_rows in entry.items():
        if not isinstance(by_rows, dict) or not set(by_rows) <= set(map(str, ROWS)):
            return None
        for took in by_rows.values():
            if type(took) not in (int, float) or not 0 < took <= sys.float_info.max:
                return None
        found[name] = {int(rows): float(took) for rows, took in by_rows.items()}
    return found
