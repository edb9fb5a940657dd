"""``hfgen batch``: answers a file in OpenAI's batch format with one engine; a job that was killed goes on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument, Option

import hfgen

from . import options
from .field_options import FieldsWithoutAssistant, generation_config
from .loading import check_output
from .report import CliError, err, note, refused, say

PREFIX = b'{"id": "batch_req_'  # what each line of an output begins with


def batch(
    source: options.ModelOptions,
    engine: options.EngineOptions,
    fields: FieldsWithoutAssistant,
    requests: Path = Argument(
        metavar="IN.jsonl", help="Requests, one JSON object on each line.", **options.FILE
    ),
    output: Path = Option(..., "--output", "-o", metavar="OUT.jsonl", help="Append answers here."),
    shard: str | None = Option(None, metavar="i/n", help="Only every n-th line, from the i-th."),
    policy: Literal["fcfs", "srpt"] = Option(
        "fcfs", metavar="ORDER", help="fcfs, or srpt (short prompts first)."
    ),
    card: Path | None = Option(None, metavar="CARD.json", help="Write hfgen.card of the answers."),
) -> None:
    """Answer a file of requests in OpenAI's batch format, and go on where a killed job was.

    Each line of the output has the custom_id of its request, and a response or an error. Fields of
    GenerationConfig, as --temperature 0.7, hold where a request says nothing. The exit code is 0 if all
    requests have an answer, 1 if some have an error, 2 for wrong input.
    """
    lines = Requests(requests, shard)
    check_output(output, requests)
    if card is not None:
        check_output(card, option="--card")
    lines.check()
    with Output(output) as file:
        if file.was_cut:
            note("the last line of the output was not finished, and is done again")
        is_open = [not file.has(line) for line in lines]
        n_lines, n_open = len(is_open), sum(is_open)
        if not n_open:
            say(f"all {n_lines} requests were done before, {file.n_failed} of them with an error")
            raise typer.Exit(1 if file.n_failed else 0)
        with source.loaded() as loaded:
            from .job import Job, JobProgress

            if engine.chat_template is not None:
                loaded.tokenizer.chat_template = engine.chat_template
            generation_config(fields, loaded.model, 1)  # checks the fields
            if card is not None:
                text = str(hfgen.card(loaded.model, loaded.tokenizer))
                with refused(OSError, before=f"--card: cannot write to {str(card)!r}: "):
                    card.write_text(text + "\n", encoding="utf-8")
            running = engine.engine(loaded.model, loaded.tokenizer, policy=policy)
            progress = JobProgress(n_open)
            job = Job(loaded, lines, file, fields, progress)
            try:
                with progress if err.is_terminal else nullcontext():
                    job.run(running)
            except KeyboardInterrupt:
                say(f"{job.summary(n_lines - n_open)}\n[dim]the same command goes on from here[/]")
                raise
        say(job.summary(n_lines - n_open))
        raise typer.Exit(1 if file.n_failed else 0)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the requests: its number from 1, and its request, or what is wrong with it."""

    number: int
    digest: str  # of its content: an output with another digest is of another request
    request: dict[str, Any]
    custom_id: str | None = None
    error: str | None = None

    @property
    def key(self) -> str | int:
        """The key of its output: the ``custom_id``; without one, the number."""
        return self.number if self.custom_id is None else self.custom_id

    @classmethod
    def of(cls, number: int, content: bytes) -> Line:
        """Read a line; one without a usable ``custom_id`` has an ``error``."""
        digest, request, error = hashlib.sha256(content).hexdigest()[:16], None, None
        try:
            request = json.loads(content)
        except RecursionError:
            error = "is nested too deeply"
        except ValueError as wrong:  # also what is not UTF-8
            error = f"is not JSON: {wrong}"
        if not isinstance(request, dict):
            request, error = {}, error or "is not a JSON object"
        elif not isinstance(custom_id := request.get("custom_id"), str):
            error = "has no `custom_id` that is text"
        elif re.search("[\ud800-\udfff]", custom_id):
            error = f"has a `custom_id` with a lone surrogate: {custom_id!a}"
        if error is not None:
            return cls(number, digest, request, None, f"line {number} {error}")
        return cls(number, digest, request, custom_id)


class Requests:
    """The lines of a file; of the ``shard`` ``"2/4"``, every 4th from the 2nd on. ``CliError`` for another text."""

    def __init__(self, path: Path, shard: str | None = None) -> None:
        i, _, n = ("1/1" if shard is None else shard).partition("/")
        if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
            takes = "--shard takes 1/4, 2/4, 3/4 or 4/4, and the like"
            raise CliError(f"{takes}, but {shard!r} was given")
        self.path, self.i, self.n = path, int(i), int(n)

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


class Output(AbstractContextManager["Output"]):
    """An output file that is only appended to, and that one job at a time writes to.

    Opening it finds out what is ``done``; a last line that a killed job did not finish is cut off.
    Raises ``CliError`` if another job has it open, for a file that has other content, and for a device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str | int, str | None] = {}  # key of a line with an output → its digest
        self.n_failed = 0  # how many of these are errors
        self.was_cut = False  # whether an unfinished line was cut off
        if path.exists() and not path.is_file():
            raise CliError(f"cannot write to {str(path)!r}: it is no file")
        with refused(OSError, before=f"cannot write to {str(path)!r}: "):
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Lock the file for this process; the system unlocks it however the process ends."""
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            else:
                import fcntl

                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            writes = f"another job writes to {str(self.path)!r}"
            raise CliError(f"{writes}: give each its own file") from error

    def _read(self) -> None:
        self._file.seek(0)
        n_bytes = 0
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                try:
                    if not line.endswith(b"\n") and line[: len(PREFIX)] == PREFIX[: len(line)]:
                        self.was_cut = True
                        break
                    record = json.loads(line)
                    custom_id, error = record["custom_id"], record["error"]
                    key = error["line"] if custom_id is None else custom_id
                    self.done[key] = record.get("request_digest")
                except (KeyError, TypeError, ValueError, RecursionError):
                    wrong = f"line {number} of {str(self.path)!r} is not one of an output"
                    raise CliError(f"{wrong}: give another file to -o") from None
                self.n_failed += error is not None
                n_bytes += len(line)
        if self.was_cut:
            self._file.truncate(n_bytes)

    def has(self, line: Line) -> bool:
        """Whether ``line`` has an output; raises ``CliError`` if that is of another request."""
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
        line = json.dumps(record, ensure_ascii=False) + "\n"
        unwritten = memoryview(line.encode(errors="replace"))
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise CliError(
                f"cannot write to {str(self.path)!r}: {error.strerror}. The answers in it are kept; make "
                "room, and the same command goes on from there"
            ) from error

    def __exit__(self, *exception: object) -> None:
        self._file.close()
