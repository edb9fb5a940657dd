"""Tests of what older versions of transformers and torch do otherwise."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging import version

from hfgen.families import CACHE

INSTALLED = version.parse(transformers.__version__)
IS_5_24 = version.parse("5.24.0") <= INSTALLED
IS_5_23 = version.parse("5.23.0") <= INSTALLED

since_5_23 = pytest.mark.skipif(not IS_5_23, reason="transformers before 5.23 does this otherwise")
IS_5_21 = version.parse("5.21.0") <= INSTALLED
since_5_21 = pytest.mark.skipif(not IS_5_21, reason="some families are new in 5.21")

FORMER = "past_key_values"  # the name of the cache before 5.24


def with_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its parameter ``past_key_values`` under the name of the installed transformers."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs[FORMER] = kwargs.pop(CACHE)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    values = [
        p.replace(name=CACHE) if p.name == FORMER else p for p in signature.parameters.values()
    ]
    renamed.__signature__ = signature.replace(parameters=values)  # type: ignore[attr-defined]
    return renamed


#: CPU builds of torch 2.6 do not tell how many objects hold a storage: layers then copy, and static caches get new
#: memory in each call.
NO_COUNT = not hasattr(torch._C, "_storage_Use_Count")
holders_are_told = pytest.mark.skipif(NO_COUNT, reason="this torch has no _storage_Use_Count")

#: torch 2.6 has no ``torch.compiler.is_exporting``, which transformers calls: a compiled forward fails there, with
#: transformers' own ``generate`` too.
NO_COMPILER = not hasattr(torch.compiler, "is_exporting")
models_compile = pytest.mark.skipif(NO_COMPILER, reason="torch 2.6 compiles no such model")

#: Python 3.10's ``contextlib`` leaves a cycle of an exception and the frame that it was thrown into: what an
#: abandoned generator held is freed by the next garbage collection.
OLD_CONTEXTLIB = sys.version_info < (3, 11)
freed_at_once = pytest.mark.skipif(OLD_CONTEXTLIB, reason="Python 3.10 leaves a cycle behind")
