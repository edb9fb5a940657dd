"""``native.cpp``: its compiled operators, and weights in the order in which they read them."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import library as operators
from torch.nn import functional

from .pages import in_huge_pages

SOURCE = Path(__file__).with_suffix(".cpp")
IS_ARM = platform.machine() in ("aarch64", "arm64")
#: Numbers of float32 in a vector of the processor.
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
#: Outputs whose weights are next to each other in memory. With eight rows, three vectors fill 32 registers with sums.
PANEL = (4 if IS_ARM else 3 if LANES == 16 else 2) * LANES
#: The first torch whose stable interface for C++ has what the source needs.
OLDEST_TORCH = (2, 10)
#: Seconds that a compiler may take; two are usual.
TIMEOUT = 120


# ---------------------------------------------------------------- the operators

_OPERATORS = operators.Library("hfgen_native", "FRAGMENT")
# The source defines the others, without tags. Without this one, inductor copies all keys and values at each step.
_OPERATORS.define(
    "attention(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


@cache
def failure() -> str | None:
    """Load the operators, compiled by the first process that needs them; return why they cannot be, or None."""
    try:
        library = _library()
        if hasattr(torch.ops.hfgen_native, "linear8"):  # a second definition would end the process
            return None
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    for name in ("linear", "linear8"):
        operators.register_fake(f"hfgen_native::{name}", shape_of_linear)
    operators.register_fake(
        "hfgen_native::linears",
        lambda x, biases, packed, n_outs: [shape_of_linear(x, None, n) for n in n_outs],
    )
    operators.register_fake(
        "hfgen_native::attention", lambda q, k, v, *_: q.new_empty((*q.shape[:-1], v.shape[-1]))
    )
    return None


def shape_of_linear(x: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    """The shape of a product, whose operator has the number of outputs as its last argument."""
    return x.new_empty((*x.shape[:-1], others[-1]))


def _library() -> Path:
    """The compiled source. Raises ``RuntimeError`` and others if there is no compiler, or it fails."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if version < OLDEST_TORCH:
        raise RuntimeError(f"torch {torch.__version__} has no stable interface for C++")
    if compiler is None or platform.system() not in ("Linux", "Darwin"):
        raise RuntimeError("there is no C++ compiler")
    folder = Path(torch.__file__).parent
    processor = "-mcpu=native" if IS_ARM else "-march=native"
    target = f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
    flags = ["-O3", processor, "-ffp-contract=off", "-std=c++20", "-fPIC", "-shared", target]
    flags += [f"-DLANES={LANES}", f"-DPANEL={PANEL}", f"-I{folder / 'include'}"]
    linking = [f"-L{folder / 'lib'}", "-ltorch_cpu"]
    library = _folder() / f"native-{_key(compiler, flags)}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *flags, str(SOURCE), *linking, "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            partial.unlink(missing_ok=True)
            raise RuntimeError(f"the C++ compiler failed: {done.stderr[:500]}")
        with open(partial, "rb+") as file:  # a library that a crash cut off would end each process
            os.fsync(file.fileno())
        partial.replace(library)
    return library


@contextmanager
def known_compiler() -> Iterator[None]:
    """Within: inductor takes it that the compiler knows this processor's instructions, as the library shows.

    It would build and load ten libraries to find out: 5 s of a first call, 1.4 s where they lie in its cache.
    """
    isa: Any = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
    check = getattr(isa, "check_build", None)
    is_known = (
        failure() is None and _supports_amx() == _has_amx() and platform.machine() == "x86_64"
    )
    if check is None or not is_known:
        yield
        return
    # These instructions need a newer compiler than the library.
    isa.check_build = lambda self, code: "amx-fp16" not in self._arch_flags or check(self, code)
    try:
        yield
    finally:
        isa.check_build = check


def _folder() -> Path:
    """The user's folder of compiled kernels; one of this process if others may write there, or nobody."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfgen"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        is_private = about.st_uid == os.getuid() and not about.st_mode & 0o022
        if is_private and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hfgen-"))


def _key(compiler: str, flags: list[str]) -> str:
    """What a compiled library depends on: source, torch, compiler, and the processor that it is for."""
    processor, cpuinfo = platform.processor(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        names = ("model name", "flags", "Features", "CPU part")
        processor = "".join(line for line in lines if line.startswith(names))
    about = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    files = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    source = [file.read_text(encoding="utf-8") for file in files]
    parts = [*source, torch.__version__, about.stdout, processor, *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


# ---------------------------------------------------------------- products


class Native:
    """A product with packed weights: activations ``(..., in)`` and a bias ``(out,)`` or None to ``(..., out)``.

    ``tensors``: arguments of the operator behind these two; ``n_out`` is the last one.
    """

    def __init__(self, linear: Callable[..., Tensor], tensors: tuple[Tensor, ...], n_out: int):
        self.linear, self.tensors, self.n_out = linear, tensors, n_out

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, bias, *self.tensors, self.n_out)


def of_numbers(weight: Tensor, dtype: torch.dtype) -> Native:
    """A weight ``(out, in)`` as numbers of ``dtype``: float32, float16, or bfloat16, which is for an even width.

    With AMX, a weight of bfloat16 is used as it is, without a copy. Raises ``RuntimeError`` without the operator.
    """
    if (reason := failure()) is not None:
        raise RuntimeError(reason)
    packed = weight.detach().to(dtype)
    if not has_tiles(packed):
        packed = _words(_panels(packed), 2 if dtype == torch.bfloat16 else 1)
    if packed.data_ptr() != weight.data_ptr():
        packed = in_huge_pages(packed)
    return Native(torch.ops.hfgen_native.linear.default, (packed,), len(weight))


def of_int8(weight: Tensor) -> Native:
    """A weight ``(out, in)`` rounded to int8 with a scale for each output, as are activations for each row.

    Without the operator, torch computes the same numbers, more slowly.
    """
    values = weight.detach().float()
    scales = (values.abs().amax(-1) / 127).clamp(min=1e-12)
    rounded = (values / scales[:, None]).round().to(torch.int8)
    if failure() is not None:
        return Native(_linear8, (rounded.T.contiguous(), scales), len(weight))
    panels = _panels(functional.pad(rounded, (0, -weight.shape[1] % 4)))
    packed = in_huge_pages(_words(panels, 4))
    offsets = -128 * panels.sum(-1, dtype=torch.int32).flatten()
    scales = functional.pad(scales, (0, len(offsets) - len(scales)))
    return Native(torch.ops.hfgen_native.linear8.default, (packed, scales, offsets), len(weight))


def _linear8(x: Tensor, bias: Tensor | None, weights: Tensor, scales: Tensor, n_out: int) -> Tensor:
    """As the operator ``linear8``, with weights ``(in, out)``."""
    rows = x.flatten(0, -2).float()
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    is_finite = largest.isfinite()
    # A number divided by a tensor is a reciprocal in torch, rounded once more.
    most = largest.new_tensor(127)
    values = torch.where(is_finite, rows * (most / largest), 0).round().to(torch.int8)
    sums = torch._int_mm(values, weights).float()
    steps = torch.where(is_finite, largest / most, torch.nan)
    result = sums * scales * steps
    result = result if bias is None else result + bias.float()
    return result.to(x.dtype).unflatten(0, x.shape[:-1])


def has_tiles(weight: Tensor) -> bool:
    """Whether the operators take a weight ``(out, in)`` as it is: bfloat16, on a processor with AMX."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or not weight.numel():
        return False
    return weight.shape[1] % 32 == 0 and weight.is_contiguous() and _has_amx()


@cache
def _has_amx() -> bool:
    return _supports_amx() and failure() is None and torch.ops.hfgen_native.has_tiles()


def _supports_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _panels(weight: Tensor) -> Tensor:
    """``(panels, PANEL, in)``; outputs that are missing in the last one are zeros."""
    return functional.pad(weight, (0, 0, 0, -len(weight) % PANEL)).unflatten(0, (-1, PANEL))


def _words(panels: Tensor, n: int) -> Tensor:
    """``(panels, in / n, PANEL, n)``: ``n`` inputs of an output are next to each other."""
    return panels.unflatten(2, (-1, n)).transpose(1, 2).contiguous()
