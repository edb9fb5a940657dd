"""Input and output file of a batch job: one request per line, and an output with which a killed job resumes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import CliError

#: What each line of an output begins with.
PREFIX = b'{"id": "batch_req_'

#: Seconds between two times that the output is made to reach the disk.
SYNC_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the requests: its number from 1, and what it asks for, or what is wrong with it."""

    number: int
    custom_id: str | None
    request: dict[str, Any]
    error: str | None = None
    #: Of its content: an output is that of this request only if it has the same digest.
    digest: str = ""

    @property
    def key(self) -> str | int:
        """The key of its output: the ``custom_id``; without one, the number."""
        return self.number if self.custom_id is None else self.custom_id

    @classmethod
    def of(cls, number: int, content: bytes) -> Line:
        """Read a line; one without a usable ``custom_id`` has an ``error``."""
        digest = hashlib.sha256(content).hexdigest()[:16]

        def wrong(words: str, request: dict[str, Any]) -> Line:
            return cls(number, None, request, f"line {number} {words}", digest)

        try:
            request = json.loads(content)
        except RecursionError:
            return wrong("is nested too deeply", {})
        except ValueError as error:  # also what is not UTF-8
            return wrong(f"is not JSON: {error}", {})
        if not isinstance(request, dict):
            return wrong("is not a JSON object", {})
        custom_id = request.get("custom_id")
        if not isinstance(custom_id, str):
            return wrong("has no `custom_id` that is text", request)
        if re.search("[\ud800-\udfff]", custom_id):
            return wrong(f"has a `custom_id` with a lone surrogate: {custom_id!a}", request)
        return cls(number, custom_id, request, None, digest)


@dataclass(frozen=True, slots=True)
class Requests:
    """The lines of a file that are those of one shard of several: every ``n``-th, from the ``i``-th."""

    path: Path
    i: int = 1
    n: int = 1

    @classmethod
    def of(cls, path: Path, shard: str | None) -> Requests:
        """``shard`` as ``"2/4"``. Raises ``CliError`` for another one, and for a file that is none."""
        i, _, n = ("1/1" if shard is None else shard).partition("/")
        if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
            raise CliError(
                f"--shard takes 1/4, 2/4, 3/4 or 4/4, and the like, but {shard!r} was given"
            )
        if not path.is_file():
            raise CliError(f"no file of requests at {str(path)!r}")
        return cls(path, int(i), int(n))

    def __iter__(self) -> Iterator[Line]:
        return (line for line in self.lines() if line.number % self.n == self.i % self.n)

    def lines(self) -> Iterator[Line]:
        """The lines of all shards; empty ones are left out."""
        with open(self.path, "rb") as file:
            for number, content in enumerate(file, start=1):
                if content := content.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                    yield Line.of(number, content)

    def check(self) -> None:
        """Raise ``CliError`` if two lines, of any shards, have the same ``custom_id``."""
        numbers: dict[str, int] = {}
        for line in self.lines():
            if line.custom_id is None:
                continue
            if (first := numbers.setdefault(line.custom_id, line.number)) != line.number:
                raise CliError(
                    f"lines {first} and {line.number} of {str(self.path)!r} have the same custom_id, "
                    f"{line.custom_id!r}: outputs are told apart by it"
                )


class Output:
    """An output file that is only appended to, and that one job at a time writes to.

    Opening it finds out what is ``done``; a last line that a killed job did not finish is cut off.
    Raises ``CliError`` if another job has it open, and for a file that has other content.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Key of each line that has an output → digest of that line; how many of these are errors.
        self.done: dict[str | int, str | None] = {}
        self.n_failed = 0
        #: Whether an unfinished line was cut off.
        self.was_cut = False
        self._synced = time.monotonic()
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise CliError(f"cannot write to {str(path)!r}: {error.strerror}") from error
        try:
            _lock(self._file.fileno(), path)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    if line[: len(PREFIX)] != PREFIX[: len(line)]:
                        raise self._is_other(number)
                    self.was_cut = True
                    break
                end += len(line)
                self._note(number, line)
        if self.was_cut:
            self._file.truncate(end)

    def _note(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            custom_id, error = record["custom_id"], record["error"]
            key = error["line"] if custom_id is None else custom_id
            self.done[key] = record.get("request_digest")
        except (KeyError, TypeError, ValueError):
            raise self._is_other(number) from None
        self.n_failed += error is not None

    def _is_other(self, number: int) -> CliError:
        return CliError(
            f"line {number} of {str(self.path)!r} is not one of an output: give another file to -o"
        )

    def check(self, line: Line) -> bool:
        """Return whether ``line`` has an output; raise ``CliError`` if that is of another request."""
        if line.key not in self.done:
            return False
        if self.done[line.key] not in (None, line.digest):
            raise CliError(
                f"line {line.number} is not the request that {str(self.path)!r} has an answer of, but "
                f"has the same key, {line.key!r}: give another custom_id, or another file to -o"
            )
        return True

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, in one piece where the system does so. Raises ``CliError`` on a full disk."""
        unwritten = memoryview(
            json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
        )
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise CliError(
                f"cannot write to {str(self.path)!r}: {error.strerror}. The answers in it are kept; make "
                "room, and the same command goes on from there"
            ) from error

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError) if exception[0] else nullcontext():
            self.sync()
        self._file.close()


def _lock(fd: int, path: Path) -> None:
    """Lock an open file for this process; the system unlocks it however the process ends."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise CliError(f"another job writes to {str(path)!r}: give each its own file") from error
