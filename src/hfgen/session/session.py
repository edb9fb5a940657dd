"""``Session``: decoding that is stepped, forked, rewound, fed and joined."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .. import families
from ..decoding.strategies.base import InvalidScoresError
from ..memory.batch import TOKEN_DIM
from ..mixin import mixed_view
from ..settings.kinds import check_integer
from ..state.call import Request
from ..streaming import StreamEvent
from ..streaming.plain import Choices
from .arguments import IDS, REFUSED, check_each, edits_of, ids_of, split
from .row import Row
from .states import MayJoinStates, forward, logits_of


class SessionError(RuntimeError):
    """A session refuses an operation, and stays as it was."""


class SessionClosedError(SessionError):
    """A session was used after ``close()``."""


class SessionBusyError(SessionError):
    """Two threads use a session at once, or a callback of a step uses its session."""


class Session(AbstractContextManager["Session"]):
    """Rows that decode step by step, each with the tokens of its own ``generate``, and keep their cache.

    Args:
        model: A model with hfgen's mixin; any other is used through a view that has it.
        args, kwargs: Those of ``generate``. Nothing is decoded yet. A row that samples without a ``seed`` gets
            a random one.
        snapshot_every: So many tokens lie between two snapshots, if the cache cannot be cropped.
        snapshot_bytes: For all snapshots; the oldest go first, and those of the prompts stay.

    Raises:
        ValueError, TypeError, IndexError: What ``generate`` raises, and arguments that no session takes.
    """

    def __init__(
        self,
        model: Any,
        *args: Any,
        snapshot_every: int = 32,
        snapshot_bytes: int = 2**28,
        **kwargs: Any,
    ) -> None:
        check_integer(snapshot_every, "snapshot_every", 1)
        check_integer(snapshot_bytes, "snapshot_bytes", 0)
        self.model: Any = mixed_view(model)
        self.snapshot_every, self.snapshot_bytes = snapshot_every, snapshot_bytes
        self._may_join, self._choices = MayJoinStates(self.model), Choices()
        self._lock = threading.Lock()
        self._is_closed = False
        if families.keeps_other_state(self.model):
            raise ValueError(
                f"{type(self.model).__name__} keeps per-row state on its modules, which a session can neither "
                "fork nor rewind. Decode with `generate`."
            )
        with torch.inference_mode(False), torch.no_grad():
            self._rows = [
                Row.prepared(self.model, each)
                for each in split(self.model, Request.of(*args, **kwargs))
            ]

    def _of(self, rows: list[Row]) -> Session:
        session = copy.copy(self)
        session._rows, session._lock, session._choices = rows, threading.Lock(), Choices()
        return session

    # ------------------------------------------------------------ what it holds

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each row as ``generate`` returns them: prompt and generated tokens, no padding."""
        return [row.run.ids[0].tolist() for row in self._rows]

    @property
    def tokens(self) -> list[list[int]]:
        """The generated tokens of each row, fed ones included."""
        return [row.tokens for row in self._rows]

    @property
    def text(self) -> list[str]:
        """The text of the generated tokens. Raises ``ValueError`` without a tokenizer."""
        return [row.text() for row in self._rows]

    @property
    def finish_reasons(self) -> list[Any]:
        """Why each row has ended; ``None`` for rows that go on."""
        return [row.reason for row in self._rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, snapshots included; what sessions share counts in each."""
        every = [row.states for row in self._rows]
        every += [snapshot.states for row in self._rows for snapshot in row.snapshots]
        return sum(states.nbytes for states in {*every} if states is not None)

    @property
    def logits(self) -> Tensor:
        """The model's logits of the next token of each row, ``(rows, vocab)`` float32; forwarded once."""
        with self._turn():
            self._forward(self._rows)
            return logits_of(self._rows)

    @property
    def activations(self) -> dict[str, list[Tensor]]:
        """What the modules of ``record=`` return for each row, ``(tokens, width)``, by a forward of its ids."""
        with self._turn():
            by_module: dict[str, list[Tensor]] = {}
            for number, row in enumerate(self._rows):
                row.activations(number, by_module)
            return by_module

    def call(self, row: int) -> dict[str, Any]:
        """Arguments with which ``model.generate`` decodes ``row`` alone, from an empty cache.

        Its tokens are those of the row, and, if that has not ended, what comes after them.
        """
        with self._turn():
            return self._rows[self._index(row)].as_call()

    # ------------------------------------------------------------ operations

    def step(self, n: int = 1) -> Iterator[StreamEvent]:
        """Decode up to ``n`` tokens of each row that has not ended, as the events are iterated over.

        Other operations may come between two events. An exception leaves the rows as they were before the token.
        """
        check_integer(n, "n", 0)
        with self._turn():
            return self._steps(n)

    def _steps(self, n: int) -> Iterator[StreamEvent]:
        for _ in range(n):
            with self._turn():
                if not (active := [row for row in self._rows if not row.run.finished]):
                    return
                events = self._token(active)
            yield from events

    def _token(self, active: list[Row]) -> list[StreamEvent]:
        """Decode one token of each of the rows ``active``."""
        self._forward(active)
        before = [(row, row.tokens, row.outputs) for row in active]
        events: list[StreamEvent] = []
        try:
            if together := [row for row in active if row.plain is not None]:
                plain: Any = [row.plain for row in together]
                self._choices.choose(plain, logits_of(together))
            for row in active:
                number = self._rows.index(row)
                try:
                    new = row.take()
                except InvalidScoresError as error:  # which counts the rows of its own call
                    raise InvalidScoresError([number], error.step) from None
                events += [dataclasses.replace(event, row=number) for event in new]
        except BaseException:
            for row, tokens, outputs in before:
                row.set_tokens(tokens, row.n_foreign)
                row.outputs = outputs
            raise
        return events

    def fork(self, n: int = 1) -> Session:
        """A session with each row ``n`` times, next to each other; this one stays as it is.

        The first copy goes on with the seed of its row; the others have seeds of their own, by their number and
        the length of the row. States are copied when a copy is first stepped.
        """
        with self._turn():
            check_integer(n, "n", 1)
            if n > 1:  # the copies share what is forwarded of their row
                self._forward([row for row in self._rows if row.states is None])
            copies = [row.copy(number) for row in self._rows for number in range(n)]
            for row in (*self._rows, *copies):
                row.take_snapshot()
            return self._of(copies)

    def keep(self, rows: Sequence[int]) -> Session:
        """A session of some rows, in this order; this one stays as it is."""
        with self._turn():
            places = [self._index(row) for row in rows]
            if not places:
                raise ValueError("`rows` is empty: a session has at least one row.")
            return self._of([self._rows[place].copy() for place in places])

    def join(self, other: Session) -> Session:
        """A session of the rows of both, which stay as they are."""
        if not isinstance(other, Session):
            raise TypeError(f"`other` has to be a Session, but is {other!r:.80}.")
        if vars(other.model).get("_modules") is not vars(self.model).get("_modules"):
            raise ValueError(
                "Sessions of two models cannot be joined: their caches are of other weights."
            )
        with self._turn(), nullcontext() if other is self else other._turn():
            return self._of([row.copy() for row in (*self._rows, *other._rows)])

    def rewind(self, n: int | Sequence[int]) -> None:
        """Remove the last ``n`` generated tokens, of all rows or one number for each; they go on from there.

        Raises ``ValueError`` for more tokens than a row has behind its prompt.
        """
        with self._turn():
            numbers: Any = [n] * len(self) if isinstance(n, Integral) else n
            check_each(numbers, "n", len(self))
            for index, (row, number) in enumerate(zip(self._rows, numbers, strict=True)):
                check_integer(number, "n", 0)
                if number > (most := row.n_tokens - row.n_prompt):
                    raise ValueError(
                        f"Row {index} has {most} tokens behind its prompt, so that {number} cannot be removed."
                    )
            for row, number in zip(self._rows, numbers, strict=True):
                row.rewind(number)

    def feed(self, tokens: Sequence[Any]) -> None:
        """Append tokens that somebody else chose: for each row a list of ids, or text with a tokenizer.

        They count as generated, and are forwarded with the next token. A row that had ended goes on.
        """
        with self._turn():
            check_each(tokens, "tokens", len(self))
            fed = [ids_of(each, row) for each, row in zip(tokens, self._rows, strict=True)]
            for row, ids in zip(self._rows, fed, strict=True):
                row.feed(ids)

    def set(self, *, row: int | None = None, **arguments: Any) -> None:
        """Set arguments of ``generate``, but for inputs, of one row or of all, from the next token on.

        Raises what ``generate`` raises for values that cannot be used.
        """
        with self._turn():
            places = range(len(self)) if row is None else [self._index(row)]
            for name, value in arguments.items():
                if name in REFUSED and value:
                    raise ValueError(f"`{name}` cannot be used in a session: {REFUSED[name]}.")
                held = self._rows[0].arguments.get(name)
                if name in (*IDS, *TOKEN_DIM) or isinstance(held, Tensor):
                    raise ValueError(
                        f"`{name}` is an input of the prompt, which is forwarded already."
                    )
            changed = {}
            for place in places:
                of_row = dict(arguments)
                if edits := arguments.get("interventions"):
                    of_row["interventions"] = edits_of(edits, place, len(self))
                changed[place] = self._rows[place].copy(**of_row)
            for place, row_after in changed.items():
                if (states := row_after.states) is None:
                    self._rows[place].leave_states()
                elif not states.is_shared:
                    states.rows[row_after.place] = row_after
                self._rows[place] = row_after

    def close(self) -> None:
        """Drop the rows and their caches; other sessions keep theirs."""
        if self._is_closed:
            return
        with self._turn():
            for row in self._rows:
                row.leave_states()
            self._rows, self._is_closed = [], True

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "Session(closed)"
        return f"Session({type(self.model).__name__}, {len(self)} rows)"

    # ------------------------------------------------------------ forwards and snapshots

    def _forward(self, rows: list[Row]) -> None:
        """Forward what the caches lack of ``rows``, and drop the oldest snapshots while they take too many bytes.

        Those of the prompts stay.
        """
        forward(rows, self._may_join, self.snapshot_every)
        while True:
            states = {s.states for row in self._rows for s in row.snapshots if s.states}
            longest = max(self._rows, key=lambda row: len(row.snapshots)).snapshots
            n_bytes = sum(each.nbytes for each in states)
            if n_bytes <= self.snapshot_bytes or len(longest) < 2:
                return
            del longest[1]

    # ------------------------------------------------------------ checks

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Without gradients, unless the session is closed or in use."""
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError(
                "The session is in use: by another thread, or by the step that calls this. fork() it for a second "
                "thread."
            )
        try:
            if self._is_closed:
                raise SessionClosedError("The session was closed: make another one.")
            with torch.inference_mode(False), torch.no_grad():
                yield
        except (KeyboardInterrupt, SystemExit):  # a row may be half changed
            for row in self._rows:
                row.leave_states()
                row.snapshots = []
            raise
        finally:
            self._lock.release()

    def _index(self, row: Any) -> int:
        if isinstance(row, bool) or not isinstance(row, Integral):
            raise TypeError(f"A row has to be a number, but is {row!r:.80}.")
        if not 0 <= int(row) < len(self):
            raise IndexError(f"There is no row {row}: the session has {len(self)}.")
        return int(row)
