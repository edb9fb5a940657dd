"""Schedules of requests, played on an engine: what has to hold after each step, and at the end.

Each request has to end with what its solo call gives; one that is cancelled, runs out of time or
fails has a beginning of that. ``play`` raises an ``AssertionError`` where this, or an invariant of
the engine, does not hold.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.engine import Engine, RequestOutput
from hfgen.engine.errors import DoesNotFitError, ResultTakenError
from hfgen.logits.logprobs import TokenLogprob

NEVER = 10**9
#: Log probabilities may differ by this much.
NEAR = 1e-4


class Planned(Exception):
    """What a schedule lets something raise."""


# ------------------------------------------------------------ what is played


@dataclass(frozen=True)
class Subject:
    """A model, and the prompts that it gets: ``inputs(length, seed)``, of one row each."""

    model: Any
    inputs: Callable[[int, int], dict[str, Any]]
    tokenizer: Any = None
    #: What each request gets beside its own options.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Outcomes of solo calls, by what was asked.
    solos: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trouble:
    """What befalls a request: ``"cancel"`` so many steps after it was added, ``"timeout"`` after so many
    seconds; or what is its own raises when it is called for the ``at``-th time: see ``RAISING``."""

    kind: str
    at: int


@dataclass(frozen=True)
class Asked:
    """A request that is added before step ``at``."""

    at: int
    length: int
    seed: int
    options: Mapping[str, Any]
    form: str = "tensor"
    trouble: Trouble | None = None
    priority: int = 0

    @property
    def key(self) -> str:
        """What its solo call depends on."""
        raises = self.trouble if self.trouble and self.trouble.kind in RAISING else None
        return repr((self.length, self.seed, sorted(self.options.items()), self.form, raises))


@dataclass(frozen=True)
class Schedule:
    asked: tuple[Asked, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    has_prefix_cache: bool = False
    #: Whether batches are split by length as if a forward cost nothing.
    splits: bool = False
    #: Which forwards of the model raise, counted from the first of the engine.
    failing: frozenset[int] = frozenset()
    #: Steps for which there are half the bytes that are held, if admission is optimistic.
    squeezed: frozenset[int] = frozenset()


# ------------------------------------------------------------ what raises


class Raising:
    """Raises ``Planned`` when it is called for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        self.at, self.n_calls = at, 0

    def count(self) -> None:
        self.n_calls += 1
        if self.n_calls == self.at:
            raise Planned(f"{type(self).__name__} {self.at}")


class Processor(Raising):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.count()
        return scores


class Criterion(Raising):
    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count()
        return torch.zeros(len(ids), dtype=torch.bool)


class Allowed(Raising):
    def __call__(self, prompt: int, ids: Tensor) -> list[int]:
        self.count()
        return list(range(3, 50))


RAISING: dict[str, Callable[[int], dict[str, Any]]] = {
    "processor": lambda at: {"logits_processor": [Processor(at)]},
    "criterion": lambda at: {"stopping_criteria": [Criterion(at)]},
    "allowed": lambda at: {"prefix_allowed_tokens_fn": Allowed(at)},
}


# ------------------------------------------------------------ solo calls


def arguments_of(subject: Subject, asked: Asked, *, fails: bool = True) -> dict[str, Any]:
    """Its inputs and options as arguments of ``generate``, made anew."""
    given = {**subject.inputs(asked.length, asked.seed), **subject.options, **asked.options}
    if asked.form in ("mask", "padded") and "attention_mask" not in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if asked.form == "padded":  # two tokens that count for nothing
            for name in ("input_ids", "attention_mask"):
                given[name] = torch.nn.functional.pad(given[name], (2, 0))
    if subject.tokenizer is not None:
        given["tokenizer"] = subject.tokenizer
    if asked.trouble is not None and asked.trouble.kind in RAISING:
        given |= RAISING[asked.trouble.kind](asked.trouble.at if fails else NEVER)
    return given


def solo(subject: Subject, asked: Asked, *, fails: bool = True) -> Any:
    """What its own call returns, or the exception that it raises."""
    key = f"{fails} {asked.key}"
    if key not in subject.solos:
        given = arguments_of(subject, asked, fails=fails)
        try:
            outcome = subject.model.generate(**given, return_dict_in_generate=True)
        except Exception as error:
            outcome = error.with_traceback(None)
        subject.solos[key] = outcome
    return subject.solos[key]


# ------------------------------------------------------------ playing


@dataclass(eq=False)
class Played:
    """A request of a schedule, and what became of it."""

    asked: Asked
    request: Any
    added: int
    #: In the step before which it was cancelled.
    cancelled: int | None = None
    admitted: int | None = None
    events: list[Any] = field(default_factory=list)


class Play:
    """A schedule on an engine, step by step. The clock ticks once a step."""

    def __init__(self, subject: Subject, schedule: Schedule) -> None:
        self.subject, self.schedule = subject, schedule
        self.now = self.n_forwards = self.n_failures = 0
        options = dict(schedule.engine)
        if schedule.has_prefix_cache:
            options["prefix_cache"] = hfgen.PrefixCache()
        self.engine = Engine(subject.model, subject.tokenizer, **options)
        if schedule.splits:
            self.engine.steps.classes.fixed_cost = 0.0
        self.played: list[Played] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Play it to the end; counts of what has happened."""
        waiting = sorted(self.schedule.asked, key=lambda asked: asked.at)
        with clock_of(lambda: float(self.now)), self.failures():
            while waiting or self.engine.has_work:
                while waiting and waiting[0].at <= self.now:
                    self.add(waiting.pop(0))
                self.cancel()
                self.step()
                self.now += 1
                assert self.now < 2000, "the engine does not come to an end"
        self.check_end()
        self.counts["taken out"] += self.engine.stats.n_taken_out
        for played in self.played:
            try:
                self.check_result(played)
            except AssertionError as error:
                raise AssertionError(f"{played.asked}\n{error}") from error
        assert not self.engine.requests
        return self.counts

    def add(self, asked: Asked) -> None:
        given = arguments_of(self.subject, asked)
        prompt: Any = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        options = {n: v for n, v in given.items() if n not in prompt}
        if asked.form == "list" and prompt.keys() == {"input_ids"}:
            prompt = prompt["input_ids"][0].tolist()
        timeout = None
        if asked.trouble is not None and asked.trouble.kind == "timeout":
            timeout = float(asked.trouble.at)
        try:
            request = self.engine.add(prompt, priority=asked.priority, timeout=timeout, **options)
        except DoesNotFitError:
            n_rows = max(options.get(n) or 1 for n in ("num_beams", "num_return_sequences"))
            assert n_rows > self.engine.scheduler.max_rows or self.is_tight
            self.counts["does not fit"] += 1
        except Exception as error:
            self.counts["refused"] += 1
            check_error(error, solo(self.subject, asked))
        else:
            self.played.append(Played(asked, request, self.now))

    @property
    def is_tight(self) -> bool:
        return "memory" in self.schedule.engine

    def cancel(self) -> None:
        for played in self.played:
            trouble = played.asked.trouble
            is_due = trouble is not None and trouble.kind == "cancel"
            if is_due and self.now == played.added + trouble.at:
                self.counts[f"cancel while {played.request.state}"] += 1
                played.cancelled = self.now
                played.request.cancel()

    def step(self) -> None:
        engine, before = self.engine, self.progress
        had_work = engine.has_work
        by_request = {id(played.request): played for played in self.played}
        for event in self.squeezed_step():
            by_request[id(event.request)].events.append(event)
        assert self.progress != before or not had_work, "an idle step"
        check_invariants(engine, [played.request for played in self.played])
        self.counts["batches side by side"] += len(engine.steps.joined) > 1
        for played in self.played:
            request = played.request
            if request.state != "waiting" and played.admitted is None:
                played.admitted = self.now
            if request.deadline is not None and request.deadline <= self.now:
                assert request.done, "a request outlives its time"
            assert played.cancelled is None or request.done, "a request outlives its end"

    def squeezed_step(self) -> list[Any]:
        """A step, for which there may be too few bytes for what is there."""
        scheduler = self.engine.scheduler
        limit, in_use = scheduler.max_bytes, scheduler.prefilling + scheduler.decoding
        may_be = scheduler.optimistic and self.engine.steps.memory.measured and in_use
        if may_be and self.now in self.schedule.squeezed:
            held = sum(item.n_held for item in in_use)
            scheduler.max_bytes = min(limit, max(0.5 * held, 1))
        try:
            return self.engine.step()
        finally:
            scheduler.max_bytes = limit

    @property
    def progress(self) -> Any:
        """What a step changes, if there is something to do."""
        stats = self.engine.stats
        numbers = [getattr(stats, name) for name in stats.__slots__ if name != "n_steps"]
        requests = [played.request for played in self.played]
        lengths = [r.decoding and r.decoding.run.ids.shape[1] for r in requests]  # of beams, too
        return numbers, lengths, [request.state for request in requests]

    # -------------------------------------------------------- forwards that fail

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Let the forwards fail that are to."""

        model = self.subject.model
        forward = model.forward

        @wraps(forward)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.n_forwards += 1
            if self.n_forwards in self.schedule.failing:
                self.n_failures += 1
                raise Planned(f"forward {self.n_forwards}")
            return forward(*args, **kwargs)

        # Else requests decode one at a time. A hook would keep prompts whole.
        failing.is_row_wise = True  # type: ignore[attr-defined]
        model.forward = failing
        try:
            yield
        finally:
            del model.forward

    # -------------------------------------------------------- the end

    def check_end(self) -> None:
        """Nothing is left; each token was counted; nobody waited for longer than all others take."""
        engine = self.engine
        assert not engine.steps.joined
        assert not engine.steps.requests
        assert engine.n_rows == engine.n_waiting == engine.scheduler.n_bytes == 0
        assert all(played.request.decoding is None for played in self.played)
        stats = engine.stats
        n_ended = stats.n_finished + stats.n_failed + stats.n_cancelled
        assert n_ended == len(self.played)
        n_tokens = sum(len(e.token_ids) for played in self.played for e in played.events)
        assert stats.decoded_tokens == n_tokens
        work = [asked.length + 4 + asked.options["max_new_tokens"] for asked in self.schedule.asked]
        for played in self.played:
            until = self.now if played.admitted is None else played.admitted
            assert until - played.added <= sum(work), "a request starves"
        if self.n_failures:
            self.counts["failed forwards"] += self.n_failures
            assert stats.n_failed >= 1

    def check_result(self, played: Played) -> None:
        """It ended with what its solo call gives, or with a beginning of that."""
        output, asked = played.request.result(), played.asked
        with pytest.raises(ResultTakenError):
            played.request.result()
        check_events(played, output)
        expected = solo(self.subject, asked)
        reasons = {str(s.finish_reason) for s in output.sequences}
        if isinstance(output.error, Planned) and str(output.error).startswith("forward"):
            self.counts["requests of failed forwards"] += 1
        elif output.error is not None:
            check_error(output.error, expected)
            self.counts[type(expected).__name__] += 1
        elif reasons & {"cancelled", "timeout"}:
            assert asked.trouble is not None
            assert asked.trouble.kind in ("cancel", "timeout")
            self.counts["cancelled" if asked.trouble.kind == "cancel" else "timed out"] += 1
        else:
            assert not isinstance(expected, Exception), f"no {expected!r}"
            self.counts["equal"] += 1
            self.counts.update(reasons)
            check_equal(output, expected, asked.options["eos_token_id"] is not None)
            return
        assert output.generate_output is None
        whole = solo(self.subject, asked, fails=False)
        if not isinstance(whole, Exception):
            self.counts["beginnings with tokens"] += bool(output.token_ids)
            check_beginning(output, whole)


# ------------------------------------------------------------ what has to hold


def check_invariants(engine: Engine, requests: list[Any]) -> None:
    """What holds between two steps, of rows, budgets and states."""
    steps, scheduler = engine.steps, engine.scheduler
    live = [request for request in requests if not request.done]
    assert set(steps.requests.values()) == set(live)
    assert {request.id for request in requests} == set(engine.requests)
    # Each row of a batch is of a request that decodes, and each of those has its rows there.
    owners = [each for rows in steps.joined for each in rows.members for _ in each.places]
    decoding = [request for request in live if request.state == "decoding"]
    joined = [request for request in decoding if not request.stays]
    assert Counter(map(id, owners)) == Counter(
        {id(request.decoding): request.decoding.n_rows for request in joined}
    )
    for rows in steps.joined:
        places = [place for each in rows.members for place in each.places]
        assert sorted(places) == list(range(len(rows.batch.ids)))
        for request in joined:
            if request.decoding in rows.moves:
                ids = request.decoding.run.ids
                if request.decoding.plain is not None:
                    columns = [ids.new_tensor(c)[:, None] for c in request.decoding.plain.unwritten]
                    ids = torch.cat([ids, *columns], 1)
                own = rows.batch.ids[request.decoding.places]
                tokens = own[own >= 0].view(len(own), -1)  # without gaps of rejected drafts
                assert torch.equal(tokens[:, -ids.shape[1] :], ids)
    # What is reserved is that of the requests that were admitted, and within the budgets.
    admitted = [*scheduler.prefilling, *scheduler.decoding]
    waiting = {id(request) for request in live} - set(map(id, admitted))
    assert engine.n_waiting == len(waiting)
    for request in live:
        decoding = request.decoding
        if id(request) in waiting:
            assert request.state == "waiting"
        elif request.state != "waiting":
            assert request.n_rows == decoding.n_rows
    assert engine.n_rows == sum(item.n_rows for item in admitted) <= scheduler.max_rows
    # Optimistic, what is held counts: the shares of growth that are reserved may be more together.
    is_held = scheduler.optimistic
    n_bytes = sum(item.n_held for item in admitted) if is_held else scheduler.n_bytes
    assert 0 <= n_bytes <= scheduler.max_bytes


def check_events(played: Played, output: RequestOutput) -> None:
    """All events of a sequence together are what the output has of it; the last one has the reason."""
    by_row: dict[int, list[Any]] = defaultdict(list)
    for event in played.events:
        by_row[event.row].append(event)
    assert sorted(by_row) == list(range(len(output.sequences)))
    for row, events in by_row.items():
        sequence = output.sequences[row]
        assert [token for event in events for token in event.token_ids] == sequence.token_ids
        assert "".join(event.text for event in events) == (sequence.text or "")
        entries = [entry for event in events for entry in event.logprobs or ()]
        assert entries == (sequence.logprobs or [])
        assert all(event.finish_reason is None for event in events[:-1])
        assert events[-1].finish_reason == sequence.finish_reason


def check_error(error: BaseException, expected: Any) -> None:
    """What a request raises is what its solo call raises."""
    if not isinstance(expected, Exception):
        raise error
    assert (type(error), str(error)) == (type(expected), str(expected))


def check_equal(output: RequestOutput, expected: Any, has_eos: bool) -> None:
    """The output has all that the solo call returns."""
    got, start = output.generate_output, len(output.prompt_token_ids)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert [sequence.finish_reason for sequence in output.sequences] == expected.finish_reasons
    for row, sequence in enumerate(output.sequences):
        tokens = expected.sequences[row, start:].tolist()
        assert sequence.token_ids == tokens[: len(sequence.token_ids)]
        if has_eos:  # else, rows that have ended are not padded
            assert len(set(tokens[len(sequence.token_ids) :])) <= 1
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(got, name, None), getattr(expected, name, None)
        assert (ours is None) == (theirs is None), name
        for one, two in zip(ours or (), theirs or (), strict=True):
            check_logprobs(one, two)
    texts = getattr(expected, "texts", None)
    assert [sequence.text for sequence in output.sequences] == (
        texts or [None] * len(output.sequences)
    )


def check_beginning(output: RequestOutput, whole: Any) -> None:
    """Each sequence begins the one of the solo call."""
    start = len(output.prompt_token_ids)
    for row, sequence in enumerate(output.sequences):
        n = len(sequence.token_ids)
        assert sequence.token_ids == whole.sequences[row, start : start + n].tolist()
        if sequence.text:
            assert whole.texts[row].startswith(sequence.text)
        if sequence.logprobs:
            check_logprobs(sequence.logprobs, whole.logprobs[row][:n])


def check_logprobs(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        if not isinstance(one, TokenLogprob):  # the first token of a prompt has none
            assert one == two
            continue
        assert (one.token_id, one.rank) == (two.token_id, two.rank)
        assert one.logprob == pytest.approx(two.logprob, abs=NEAR)
        for mine, other in zip(one.top + one.asked, two.top + two.asked, strict=True):
            assert mine[1] == pytest.approx(other[1], abs=NEAR)


# ------------------------------------------------------------ the clock


@contextmanager
def clock_of(now: Callable[[], float]) -> Iterator[None]:
    """Let the engine read its time from ``now``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("hfgen.engine") and hasattr(module, "time"):
                patch.setattr(module, "time", SimpleNamespace(monotonic=now))
        yield
