"""Counts, distinct tokens and n-grams that are kept from call to call, against a look at all ids."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfgen.logits.processors import history
from hfgen.logits.processors.history import Counted, Counts, Distinct, RowStates
from hfgen.logits.processors.ngrams import NGrams
from hfgen.logits.processors.suffixes import SuffixAutomaton

VOCAB, ROWS = 7, 3


class Calls:
    """A random sequence of calls: longer ids, shorter ones, rows that go on with others."""

    def __init__(self, seed: int, alphabet: int = VOCAB + 1) -> None:
        self.draw, self.alphabet = random.Random(seed), alphabet
        self.ids = self.tokens(self.draw.randint(1, 6))

    def tokens(self, n: int) -> torch.Tensor:
        return torch.tensor(
            [[self.draw.randrange(self.alphabet) for _ in range(n)] for _ in range(ROWS)]
        )

    def step(self, follower: Any) -> torch.Tensor:
        kind = self.draw.choice(["extend", "extend", "extend", "rewind", "reorder", "again"])
        if kind == "rewind":
            length = self.draw.randint(1, self.ids.shape[1])
            self.ids = self.ids[:, :length].clone()
            self.ids[:, -1:] = self.tokens(1)  # what was rejected is another token now
        elif kind == "reorder":
            # The first two rows are beams of one prompt.
            index = torch.tensor([self.draw.randrange(2), self.draw.randrange(2), 2])
            follower.reorder(index)
            self.ids = torch.cat([self.ids[index], self.tokens(1)], dim=1)
        elif kind == "extend":
            self.ids = torch.cat([self.ids, self.tokens(self.draw.randint(1, 3))], dim=1)
        return self.ids


def recount(ids: torch.Tensor, counted: Counted) -> torch.Tensor:
    length = ids.shape[1]
    start = max(length - counted.window, 0) if counted.window else counted.first
    counts = torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    excluded = [] if counted.excluded is None else counted.excluded.tolist()
    for row in range(ROWS):
        pads = 0 if counted.n_pads is None else int(counted.n_pads[row])
        for token, n in Counter(ids[row, max(start, pads) :].tolist()).items():
            if token < VOCAB and token not in excluded:
                counts[row, token] = n
    return counts


COUNTED = [
    Counted(),
    Counted(first=4),
    Counted(window=1),
    Counted(window=5),
    Counted(window=5, n_pads=torch.tensor([2, 2, 3])),
    Counted(first=2, n_pads=torch.tensor([2, 2, 3]), excluded=torch.tensor([1, 6])),
]

seeds = st.integers(0, 2**32)


@settings(max_examples=200, deadline=None)
@given(seeds, st.sampled_from(COUNTED), st.booleans())
def test_counts(seed: int, counted: Counted, is_told: bool) -> None:
    calls, counts = Calls(seed), Counts(counted, VOCAB)
    for _ in range(12):
        # On the CPU, calls are right even if nobody says that rows have changed.
        ids = calls.step(counts if is_told else Counts(counted, VOCAB))
        counts.follow(ids)
        assert torch.equal(counts.counts[:, :-1], recount(ids, counted))


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from(COUNTED))
def test_counts_where_nothing_is_compared(seed: int, counted: Counted) -> None:
    class Elsewhere(Counts):
        """As on an accelerator: what was counted is not compared with the ids."""

        def _n_same(self, ids: torch.Tensor) -> int:
            n = min(self.length, ids.shape[1])
            return n if n < ids.shape[1] else n - 1

    calls, counts = Calls(seed), Elsewhere(counted, VOCAB)
    for _ in range(12):
        ids = calls.step(counts)
        counts.follow(ids)
        assert torch.equal(counts.counts[:, :-1], recount(ids, counted))


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from(COUNTED))
def test_distinct(seed: int, counted: Counted) -> None:
    calls, distinct = Calls(seed), Distinct(counted)
    before, history.BLOCK = history.BLOCK, 4
    try:
        for _ in range(12):
            ids = calls.step(distinct)
            tokens = distinct.tokens(ids, VOCAB)
            expected = [set(row.nonzero()[:, 0].tolist()) for row in recount(ids, counted)]
            assert [set(row.tolist()) - {VOCAB} for row in tokens] == expected
    finally:
        history.BLOCK = before


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(2, 4))
def test_ngrams(seed: int, size: int) -> None:
    calls, states = Calls(seed, alphabet=3), RowStates(lambda: NGrams(size))
    for _ in range(12):
        ids = calls.step(states)
        states.follow(ids)
        for state, row in zip(states.states, ids.tolist(), strict=True):
            last = row[len(row) - size + 1 :]
            starts = range(len(row) - size + 1)
            expected = [row[i + size - 1] for i in starts if row[i : i + size - 1] == last]
            assert set(state.repeating()) == set(expected)
            assert set(copy.deepcopy(state).repeating()) == set(expected)


def longest_repeats(row: list[int], least: int) -> dict[int, int]:
    """By definition: for each earlier place, how many tokens before it are those at the end."""
    found: dict[int, int] = {}
    for place in range(len(row) - 1):
        n = 0
        while n <= place and row[place - n] == row[len(row) - 1 - n]:
            n += 1
        if n >= least:
            found[row[place + 1]] = max(found.get(row[place + 1], 0), n)
    return found


class Repeats(SuffixAutomaton):
    """As ``RowStates`` wants it."""

    def copy(self) -> Any:
        other = super().copy()
        other.__class__ = Repeats
        return other


@settings(max_examples=300, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 3))
def test_suffix_automaton(seed: int, least: int, alphabet: int) -> None:
    calls, states = Calls(seed, alphabet), RowStates(lambda: Repeats(least))
    for _ in range(14):
        ids = calls.step(states)
        states.follow(ids)
        for state, row in zip(states.states, ids.tolist(), strict=True):
            assert state.repeats() == longest_repeats(row, least)


def test_pads_are_left_out_of_states() -> None:
    states = RowStates(lambda: NGrams(2), torch.tensor([0, 2, 5]))
    ids = torch.tensor([[1, 2, 3, 1], [0, 0, 3, 1], [0, 0, 0, 0]])
    for end in (1, 3, 4, 2, 4):
        states.follow(ids[:, :end])
    assert [state.tokens for state in states.states] == [[1, 2, 3, 1], [3, 1], []]


def test_a_changed_number_of_rows_starts_again() -> None:
    counts = Counts(Counted(), VOCAB)
    counts.follow(torch.tensor([[1, 2], [3, 3]]))
    counts.follow(torch.tensor([[4]]))
    assert counts.counts[:, :-1].tolist() == [[0, 0, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize("length", [10, 2000])
def test_long_texts_cost_a_state_per_token(length: int) -> None:
    draw = random.Random(0)
    automaton = SuffixAutomaton(2)
    for _ in range(length):
        automaton.push(draw.randrange(50))
    assert len(automaton.lengths) <= 2 * length
    assert sum(map(len, automaton.next)) <= 3 * length + 1
    for _ in range(length):
        automaton.pop()
    assert (automaton.lengths, automaton.links, automaton.next) == ([0], [-1], [{}])
