"""llama.cpp's samplers, called through ctypes on the ``xllamacpp`` wheel: what ours are compared with.

The signatures are those of the version that ``pyproject.toml`` pins. ``test_samplers.py`` checks values by hand,
too: a call with an older signature reads garbage and changes nothing.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

IS_MISSING = importlib.util.find_spec("xllamacpp") is None
with_llama_cpp = pytest.mark.skipif(IS_MISSING, reason="xllamacpp (optional) is not installed")


class Token(c.Structure):
    _fields_ = [("id", c.c_int32), ("logit", c.c_float), ("p", c.c_float)]


class Tokens(c.Structure):
    _fields_ = [
        ("data", c.POINTER(Token)),
        ("size", c.c_size_t),
        ("selected", c.c_int64),
        ("sorted", c.c_bool),
    ]


class Vector(c.Structure):
    """A ``std::vector``: begin, end, end of its memory."""

    _fields_ = [("begin", c.c_void_p), ("end", c.c_void_p), ("capacity", c.c_void_p)]


_int, _unsigned, _float, _size = c.c_int32, c.c_uint32, c.c_float, c.c_size_t

#: The arguments of each sampler.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "top_k": (_int,),
    "top_p": (_float, _size),
    "min_p": (_float, _size),
    "typical": (_float, _size),
    "top_n_sigma": (_float,),
    "temp_ext": (_float, _float, _float),  # temperature, range, exponent
    "xtc": (_float, _float, _size, _unsigned),  # probability, threshold, tokens to keep, seed
    "penalties": (_int, _int, _float, _float, _float),  # vocabulary, last n, the three penalties
    "mirostat": (_int, _unsigned, _float, _float, _int),  # vocabulary, seed, tau, eta, m
    "mirostat_v2": (_unsigned, _float, _float),
    "adaptive_p": (_float, _float, _unsigned),  # target, decay, seed
}


class Sampler:
    """One sampler with its state; ``Sampler.dry`` makes that of repeats."""

    loaded: Any = None

    def __init__(self, name: str, *arguments: Any) -> None:
        make = getattr(_library(), f"llama_sampler_init_{name}")
        make.restype, make.argtypes = c.c_void_p, SIGNATURES[name]
        self.pointer = make(*arguments)

    @classmethod
    def dry(
        cls,
        multiplier: float,
        base: float,
        allowed: int,
        last_n: int,
        breakers: Sequence[Sequence[int]],
    ) -> Sampler:
        arrays = [(_int * len(ids))(*ids) for ids in breakers]
        inner = (Vector * len(arrays))(*map(_vector, arrays))
        outer = _vector(inner)
        make = _library()._Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE
        make.restype = c.c_void_p
        make.argtypes = [_float, _float, _int, _int, c.POINTER(Vector)]
        made = cls.__new__(cls)
        made.pointer = make(multiplier, base, allowed, last_n, c.byref(outer))
        return made

    def accept(self, *tokens: int) -> Sampler:
        for token in tokens:
            _library().llama_sampler_accept(self.pointer, token)
        return self

    def apply(
        self, logits: Sequence[float] | dict[int, float]
    ) -> tuple[dict[int, float], dict[int, float], int | None]:
        """Of all tokens, or of some: the logits that are left, by token, in its order; their
        probabilities, where it sets them; and the token that it has chosen, if it does.
        """
        given = logits if isinstance(logits, dict) else dict(enumerate(logits))
        data = (Token * len(given))(*[Token(token, value, 0.0) for token, value in given.items()])
        tokens = Tokens(data, len(given), -1, False)
        _library().llama_sampler_apply(self.pointer, c.byref(tokens))
        left = [tokens.data[i] for i in range(tokens.size) if tokens.data[i].logit > -float("inf")]
        chosen = tokens.data[tokens.selected].id if tokens.selected >= 0 else None
        return {t.id: t.logit for t in left}, {t.id: t.p for t in left}, chosen

    def __del__(self) -> None:
        _library().llama_sampler_free(self.pointer)


def _vector(array: Any) -> Vector:
    start = c.addressof(array)
    return Vector(start, start + c.sizeof(array), start + c.sizeof(array))


def _library() -> Any:
    if Sampler.loaded is None:
        spec = importlib.util.find_spec("xllamacpp")
        assert spec is not None
        assert spec.origin is not None
        path = next(pathlib.Path(spec.origin).parent.glob("xllamacpp*.so"))
        library = c.CDLL(str(path))
        library.llama_sampler_apply.argtypes = [c.c_void_p, c.POINTER(Tokens)]
        library.llama_sampler_accept.argtypes = [c.c_void_p, _int]
        library.llama_sampler_free.argtypes = [c.c_void_p]
        for name in ("apply", "accept", "free"):
            getattr(library, f"llama_sampler_{name}").restype = None
        Sampler.loaded = library
    return Sampler.loaded
