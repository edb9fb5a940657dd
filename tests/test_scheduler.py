"""The scheduler alone: budgets, order, chunks, items taken out and back, and that nobody starves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hfgen.engine.errors import DoesNotFitError, QueueFullError
from hfgen.engine.scheduler import (
    AGING,
    MAX_OVERTAKEN,
    POLICIES,
    SECONDS_PER_LEVEL,
    Chunk,
    Item,
    Scheduler,
)

policies = st.sampled_from([*POLICIES])


def run_step(scheduler: Scheduler, now: float = 0.0) -> list[tuple[Item, int]]:
    """One step's chunks, all of them prefilled."""
    chunks = scheduler.plan(now)
    for chunk in chunks:
        scheduler.advance(chunk.item, chunk.n_tokens)
    return [(chunk.item, chunk.n_tokens) for chunk in chunks]


def added(scheduler: Scheduler, *items: Item, now: float = 0.0) -> None:
    for index, item in enumerate(items):
        scheduler.add(item, now + index)


# --- invariants after every operation, whatever the order --------------------------------------


class Operations(RuleBasedStateMachine):
    """All operations in any order, beside what they should add up to."""

    @initialize(
        max_rows=st.integers(1, 6),
        max_bytes=st.integers(20, 100),
        prefill_tokens=st.integers(1, 20),
        policy=policies,
        max_queue=st.none() | st.integers(1, 6),
        optimistic=st.booleans(),
    )
    def begin(self, **options: int) -> None:
        self.scheduler = Scheduler(**options)
        self.now = 0.0
        self.alive: list[Item] = []
        self.to_prefill: dict[Item, int] = {}  # what should still come in chunks

    @rule(
        n_tokens=st.integers(0, 60),
        n_cached=st.integers(0, 60),
        n_rows=st.integers(1, 7),
        n_bytes=st.integers(0, 120),
        share=st.none() | st.floats(0, 1),
        priority=st.integers(-2, 2),
        is_whole=st.booleans(),
        seconds=st.sampled_from([0.0, 1.0, 100.0]),
    )
    def add(
        self,
        n_tokens: int,
        n_cached: int,
        n_bytes: int,
        share: float | None,
        seconds: float,
        **item,
    ) -> None:
        self.now += seconds
        n_bytes_now = None if share is None else int(share * n_bytes)
        n_done = min(n_cached, n_tokens)
        new = Item(n_tokens, n_bytes=n_bytes, n_bytes_now=n_bytes_now, n_done=n_done, **item)
        scheduler = self.scheduler
        try:
            scheduler.add(new, self.now)
        except DoesNotFitError:
            assert new.n_rows > scheduler.max_rows or n_bytes > scheduler.max_bytes
        except QueueFullError:
            assert len(scheduler.waiting) >= scheduler.max_queue
        else:
            self.alive.append(new)
            self.to_prefill[new] = new.n_left

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1.0]))
    def step(self, data: st.DataObject, seconds: float) -> None:
        scheduler = self.scheduler
        self.now += seconds
        waiting, n_bytes = set(scheduler.waiting), scheduler.n_bytes
        chunks = scheduler.plan(self.now)
        self.check_chunks(chunks)
        if waiting != set(scheduler.waiting):
            assert scheduler.n_bytes <= scheduler.max_bytes
        else:
            assert scheduler.n_bytes == n_bytes
        for chunk in chunks:  # some may be cancelled before their turn, some fail
            if data.draw(st.integers(0, 9)):
                scheduler.advance(chunk.item, chunk.n_tokens)
                self.to_prefill[chunk.item] -= chunk.n_tokens
                assert (chunk.item.state == "decoding") == (self.to_prefill[chunk.item] == 0)

    def check_chunks(self, chunks: list[Chunk]) -> None:
        items = [chunk.item for chunk in chunks]
        assert len(set(items)) == len(items)
        assert all(item.state == "prefill" for item in items)
        assert all(0 <= chunk.n_tokens <= chunk.item.n_left for chunk in chunks)
        assert all(c.n_tokens > 0 or c.item.n_left == 0 for c in chunks)
        assert all(c.n_tokens == c.item.n_left for c in chunks if c.item.is_whole)
        keys = [(chunk.item.key[0], chunk.n_tokens) for chunk in chunks]
        assert keys == sorted(keys)
        if sum(chunk.n_tokens for chunk in chunks) > self.scheduler.prefill_tokens:
            assert len(chunks) == 1
            assert items[0].is_whole

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.alive))
        self.scheduler.leave(item)
        self.scheduler.leave(item)
        assert item.state == "done"
        self.alive.remove(item)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), n_bytes=st.integers(0, 120), share=st.none() | st.floats(0, 1))
    def resize(self, data: st.DataObject, n_bytes: int, share: float | None) -> None:
        n_bytes_now = None if share is None else int(share * n_bytes)
        self.scheduler.resize(data.draw(st.sampled_from(self.alive)), n_bytes, n_bytes_now)

    @rule(max_bytes=st.integers(20, 100))
    def change_budget(self, max_bytes: int) -> None:
        self.scheduler.max_bytes = max_bytes

    @rule()
    def take_out(self) -> None:
        scheduler = self.scheduler
        needed, victims = self.n_held() - scheduler.max_bytes, scheduler.victims()
        assert not victims or sum(item.n_held for item in victims[:-1]) < needed
        for item in victims:
            scheduler.readmit(item)
        assert self.n_held() <= scheduler.max_bytes

    def n_held(self) -> float:
        in_use = self.scheduler.prefilling + self.scheduler.decoding
        return sum(
            item.n_bytes if item.n_bytes_now is None else item.n_bytes_now for item in in_use
        )

    @invariant()
    def nobody_is_lost_or_twice(self) -> None:
        scheduler = self.scheduler
        lists = {
            "waiting": scheduler.waiting,
            "prefill": scheduler.prefilling,
            "decoding": scheduler.decoding,
        }
        everyone = [item for items in lists.values() for item in items]
        assert len(everyone) == len(set(everyone)) == len(self.alive)
        assert set(everyone) == set(self.alive)
        assert all(item.state == state for state, items in lists.items() for item in items)
        assert all(left == i.n_left for i, left in self.to_prefill.items() if i in self.alive)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda item: item.key)

    @invariant()
    def budgets_are_held_and_balance(self) -> None:
        scheduler = self.scheduler
        in_use = scheduler.prefilling + scheduler.decoding
        assert scheduler.n_rows == sum(item.n_rows for item in in_use) <= scheduler.max_rows
        assert scheduler.n_bytes == sum(item.n_reserved for item in in_use)
        assert all(item.n_reserved == 0 for item in scheduler.waiting)
        assert all(item.n_reserved >= (item.n_bytes_now or 0) for item in in_use)
        if not scheduler.optimistic:
            assert all(item.n_reserved == item.n_bytes for item in in_use)

    def teardown(self) -> None:
        """When no more come, all that can fit are served, each step doing something."""
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        for item in scheduler.never_fit():
            scheduler.leave(item)
        steps = 2 * len(self.alive) + sum(item.n_left for item in self.alive)
        for _ in range(steps):
            for item in scheduler.decoding[:1]:
                scheduler.leave(item)
            run_step(scheduler)
        assert not scheduler.waiting + scheduler.prefilling + scheduler.decoding
        assert (scheduler.n_rows, scheduler.n_bytes) == (0, 0)


Operations.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOperations = Operations.TestCase


# --- nobody starves ------------------------------------------------------------------------------


def overtakers(
    scheduler: Scheduler, item: Item, newcomers: Callable[[], list[Item]], n_steps: int = 3000
) -> list[Item]:
    """Those of the endless stream after ``item`` that begin in a step before its prefill ends."""
    stream: list[Item] = []
    for now in range(n_steps):
        for new in newcomers():
            stream.append(new)
            scheduler.add(new, now)
        for decoded in scheduler.decoding[:2]:  # the oldest two end, the others stay
            scheduler.leave(decoded)
        begun = [new for new in stream if new.state != "waiting"]
        run_step(scheduler, now)
        if item.state == "decoding":
            return begun
    raise AssertionError("it starves")


@settings(max_examples=40, deadline=None)
@given(
    policy=policies,
    big=st.sampled_from([{"n_bytes": 100}, {"n_rows": 8}, {"n_bytes": 60, "n_rows": 5}, {}]),
    is_whole=st.booleans(),
    n_tokens=st.integers(1, 80),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    per_step=st.integers(2, 4),
    level=st.integers(0, 2),
)
def test_a_big_item_is_not_overtaken_for_ever(
    policy: str,
    big: dict[str, int],
    is_whole: bool,
    n_tokens: int,
    sizes: list[int],
    per_step: int,
    level: int,
) -> None:
    scheduler = Scheduler(max_rows=8, max_bytes=100, prefill_tokens=64, policy=policy)
    for _ in range(6):
        scheduler.add(Item(3, n_bytes=10), 0)
    run_step(scheduler)
    item = Item(n_tokens, is_whole=is_whole, **big)
    scheduler.add(item, 0)
    key = item.key
    drawn = cycle(sizes)

    def newcomers() -> list[Item]:
        return [Item(next(drawn), n_bytes=10, priority=level) for _ in range(per_step)]

    passed = overtakers(scheduler, item, newcomers)
    before = [new for new in passed if new.key < key]  # by the policy, which itself is bounded
    if policy == "fcfs":
        assert not before
    if policy == "srpt":
        latest = item.clock_at_arrival + n_tokens / AGING
        assert all(new.clock_at_arrival <= latest for new in before)
    if policy == "priority":
        assert all(new.arrived <= SECONDS_PER_LEVEL * level for new in before)
    assert len(passed) - len(before) <= MAX_OVERTAKEN


@settings(max_examples=30, deadline=None)
@given(n_tokens=st.integers(30, 400), sizes=st.lists(st.integers(1, 30), min_size=1))
def test_short_prompts_pass_a_long_one_for_a_while(n_tokens: int, sizes: list[int]) -> None:
    scheduler = Scheduler(max_rows=4, prefill_tokens=16, policy="srpt")
    item = Item(n_tokens)
    scheduler.add(item, 0)
    drawn = cycle(sizes)
    passed = overtakers(scheduler, item, lambda: [Item(next(drawn)) for _ in range(2)])
    assert all(new.clock_at_arrival <= n_tokens / AGING for new in passed)


def test_a_prompt_of_sixty_tokens_does_not_wait_for_six_hundred_short_ones() -> None:
    scheduler = Scheduler(max_rows=1, prefill_tokens=64, policy="srpt")
    added(scheduler, Item(3))
    run_step(scheduler)
    item = Item(60)
    scheduler.add(item, 0)
    assert 20 <= len(overtakers(scheduler, item, lambda: [Item(3)])) <= 60


@given(
    policy=policies,
    items=st.lists(
        st.tuples(st.integers(1, 99), st.integers(0, 3), st.integers(0, 200)), min_size=2
    ),
    wait=st.integers(0, 1000),
)
def test_the_queue_is_in_the_order_of_the_aged_formula(
    policy: str, items: list[tuple[int, int, int]], wait: int
) -> None:
    scheduler = Scheduler(max_rows=1, policy=policy)
    now = 0
    for n_tokens, priority, seconds in items:
        now += seconds
        scheduler._clock += 7 * seconds  # what was prefilled meanwhile
        scheduler.add(Item(n_tokens, priority=priority), now)

    def aged(item: Item) -> float:
        waited = now + wait - item.arrived
        prefilled_meanwhile = scheduler._clock + 9 * wait - item.clock_at_arrival
        return {
            "fcfs": -waited,
            "srpt": item.n_left - AGING * prefilled_meanwhile,
            "priority": -(item.priority + waited / SECONDS_PER_LEVEL),
        }[policy]

    assert all(aged(a) <= aged(b) + 1e-9 for a, b in pairwise(scheduler.waiting))


# --- order and chunks ----------------------------------------------------------------------------


def test_a_prompt_in_chunks() -> None:
    scheduler = Scheduler(max_rows=2, prefill_tokens=10)
    long, short = Item(25), Item(3)
    added(scheduler, long, short)
    dealt = [run_step(scheduler) for _ in range(3)]
    assert dealt == [[(long, 10)], [(long, 10)], [(long, 5), (short, 3)]]
    assert (scheduler.decoding, scheduler.n_rows) == ([long, short], 2)


def test_order_of_each_policy() -> None:
    def order(policy: str) -> list[str]:
        scheduler = Scheduler(max_rows=9, policy=policy)
        items = {"long": Item(30), "short": Item(10), "urgent": Item(20, priority=1)}
        added(scheduler, *items.values())
        names = {item: name for name, item in items.items()}
        return [names[chunk.item] for chunk in scheduler.plan(5.0)]

    assert order("fcfs") == ["long", "short", "urgent"]
    assert order("srpt") == ["short", "urgent", "long"]
    assert order("priority") == ["urgent", "long", "short"]


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one() -> None:
    scheduler = Scheduler(max_rows=2, prefill_tokens=10, policy="srpt")
    long, short = Item(100), Item(4)
    added(scheduler, long)
    assert run_step(scheduler) == [(long, 10)]
    added(scheduler, short)
    assert run_step(scheduler) == [(short, 4), (long, 6)]


def test_equal_lengths_are_neighbours_where_keys_tie() -> None:
    scheduler = Scheduler(max_rows=9)
    for n_tokens in (5, 3, 5, 3):
        scheduler.add(Item(n_tokens), now=1.0)
    scheduler.add(Item(3), now=2.0)
    assert [n_tokens for _, n_tokens in run_step(scheduler)] == [3, 3, 5, 5, 3]


def test_a_whole_prompt_is_not_cut() -> None:
    scheduler = Scheduler(max_rows=9, prefill_tokens=10)
    first, whole, small, huge, last = (
        Item(4),
        Item(8, is_whole=True),
        Item(5),
        Item(30, is_whole=True),
        Item(2),
    )
    added(scheduler, first, whole, small, huge, last)
    assert run_step(scheduler) == [(first, 4), (small, 5), (last, 1)]
    assert scheduler.waiting == [whole, huge]  # nothing is reserved before it can begin
    assert run_step(scheduler) == [(whole, 8), (last, 1)]
    assert run_step(scheduler) == [(huge, 30)]


def test_what_a_prefix_cache_has_is_not_prefilled() -> None:
    scheduler = Scheduler(max_rows=1, prefill_tokens=10)
    item = Item(25, n_done=20)
    added(scheduler, item)
    assert run_step(scheduler) == [(item, 5)]


def test_rows_are_admitted_when_their_prefill_begins() -> None:
    scheduler = Scheduler(max_rows=9, prefill_tokens=10)
    first, second = Item(25, n_bytes=5), Item(10, n_bytes=5)
    added(scheduler, first, second)
    scheduler.plan(now=3.0)
    assert (scheduler.prefilling, scheduler.waiting) == ([first], [second])
    assert (first.admitted, second.admitted, scheduler.n_bytes) == (3.0, None, 5)


# --- what does not fit ---------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = Scheduler(max_rows=2, max_bytes=1000, max_queue=1)
    numbers = "3 rows and 2,000 bytes, but there are 2 rows and 1,000 bytes"
    with pytest.raises(DoesNotFitError, match=numbers):
        scheduler.add(Item(5, n_rows=3, n_bytes=2000), 0)
    scheduler.add(Item(5), 0)
    with pytest.raises(QueueFullError, match="1 requests wait, and `max_queue` is 1"):
        scheduler.add(Item(5), 0)


def test_what_does_not_fit_any_more_is_found_and_not_waited_for() -> None:
    scheduler = Scheduler(max_rows=2, max_bytes=100)
    first, second, third = Item(5, n_bytes=90), Item(5, n_bytes=20), Item(5, n_bytes=30)
    added(scheduler, first, second, third)
    assert scheduler.never_fit() == []
    scheduler.max_bytes = 60
    assert scheduler.never_fit() == [first]
    scheduler.resize(second, 70)
    assert scheduler.never_fit() == [first, second]
    assert run_step(scheduler) == [(third, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "`max_rows` has to be an integer of 1 or more, but is 0"),
        ({"prefill_tokens": 2.5}, "`prefill_tokens` has to be an integer of 1 or more, but is 2.5"),
        ({"max_queue": 0}, "`max_queue` has to be an integer of 1 or more, but is 0"),
        ({"max_bytes": float("nan")}, "`max_bytes` has to be positive, but is nan"),
        (
            {"policy": "lifo"},
            r"`policy` has to be one of \['fcfs', 'srpt', 'priority'\], but is 'lifo'",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(**({"max_rows": 1} | options))


def test_wrong_states_are_named() -> None:
    scheduler = Scheduler(max_rows=1)
    item = Item(5)
    added(scheduler, item)
    with pytest.raises(ValueError, match="has to be in prefill or decoding, but is 'waiting'"):
        scheduler.readmit(item)
    scheduler.plan(0)
    with pytest.raises(ValueError, match=r"`n_tokens` is 6, but .* 'prefill', with 5 tokens left"):
        scheduler.advance(item, 6)


# --- optimistic admission ------------------------------------------------------------------------


def test_more_are_admitted_with_a_share_of_their_growth() -> None:
    def n_admitted(optimistic: bool) -> int:
        scheduler = Scheduler(max_rows=9, max_bytes=100, optimistic=optimistic)
        added(scheduler, *(Item(5, n_bytes=50, n_bytes_now=10) for _ in range(9)))
        return len(run_step(scheduler))

    assert (n_admitted(False), n_admitted(True)) == (2, 5)  # of 50 bytes, and of 10 + 40 / 4


def test_the_last_are_taken_out_and_come_back_first() -> None:
    scheduler = Scheduler(max_rows=9, max_bytes=100, optimistic=True)
    items = [Item(5, n_bytes=50, n_bytes_now=10) for _ in range(6)]
    added(scheduler, *items)
    run_step(scheduler)
    assert scheduler.victims() == []

    scheduler.resize(items[0], 50, 45)
    assert scheduler.victims() == []  # 85 bytes are held
    scheduler.resize(items[1], 50, 45)
    assert scheduler.victims() == [items[4], items[3]]
    scheduler.readmit(items[3])
    assert scheduler.victims() == [items[4]]
    scheduler.readmit(items[4])
    assert scheduler.waiting == items[3:]
    assert (items[3].n_done, items[3].n_reserved, scheduler.n_bytes) == (5, 0, 110)

    scheduler.leave(items[1])
    assert run_step(scheduler) == [(items[5], 5)]  # the others need all of their 50 bytes now
    scheduler.leave(items[0])
    assert run_step(scheduler) == [(items[3], 0)]


@settings(max_examples=40, deadline=None)
@given(
    policy=policies,
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=40
    ),
    max_bytes=st.integers(80, 200),
)
def test_each_is_taken_out_once_at_most_and_all_end(
    policy: str, lengths: list[tuple[int, int, float]], max_bytes: int
) -> None:
    scheduler = Scheduler(
        max_rows=8, max_bytes=max_bytes, prefill_tokens=32, policy=policy, optimistic=True
    )
    to_decode: dict[Item, int] = {}
    for prompt, growth, share in lengths:
        item = Item(prompt, n_bytes=prompt + growth, n_bytes_now=prompt)
        to_decode[item] = int(share * growth)
        scheduler.add(item, 0)
    taken_out: list[Item] = []
    for _ in range(sum(a + b for a, b, _ in lengths) + 5 * len(lengths)):
        run_step(scheduler)
        for item in list(scheduler.decoding):
            if to_decode[item] == 0:
                scheduler.leave(item)
                continue
            to_decode[item] -= 1
            scheduler.resize(item, item.n_bytes, item.n_bytes_now + 1)
        for item in scheduler.victims():
            taken_out.append(item)
            scheduler.readmit(item)
        in_use = scheduler.prefilling + scheduler.decoding
        assert sum(item.n_bytes_now for item in in_use) <= max_bytes
    assert len(taken_out) == len(set(taken_out))
    assert all(item.state == "done" for item in to_decode)


@pytest.mark.parametrize("name", ["errors", "scheduler"])
def test_only_the_standard_library_is_imported(name: str) -> None:
    source = Path(inspect.getfile(Scheduler)).with_name(f"{name}.py").read_text()
    imported = re.findall(r"^ *(?:from|import) +([\w.]+)", source, flags=re.MULTILINE)
    assert imported[0] == "__future__"
    own = {".errors"}
    assert {each.partition(".")[0] or each for each in imported} <= sys.stdlib_module_names | own
