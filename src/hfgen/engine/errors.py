"""The errors of the engine: a full queue, a closed engine, a result requested twice, …"""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine refuses a call; its other requests go on."""

    __str__ = BaseException.__str__  # without the quotes that KeyError puts around its message


def as_exception(error: BaseException) -> Exception:
    """Return ``error`` as an ``Exception``: a panic of a library or an exit in a request ends no thread."""
    if isinstance(error, Exception):
        return error
    wrapped = EngineError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class QueueFullError(EngineError):
    """As many requests wait as ``max_queue`` allows."""


class EngineClosedError(EngineError):
    """The engine was used after ``close()``."""


class ResultTakenError(EngineError):
    """A result was taken before: each is handed over once."""


class UnknownRequestError(EngineError, KeyError):
    """No request of this engine has that id."""


class DoesNotFitError(EngineError, ValueError):
    """A request needs more rows or bytes than there are, even alone."""
