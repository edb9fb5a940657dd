"""The simulated engine, on which policies are compared: its clock, its counts, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scheduler
from benchmarks.simulated import Costs, Outcome, Requests, aging, simulate
from hfgen.engine import scheduler as engine_scheduler

COSTS = Costs(step=1.0, token=0.01, row=0.1, move=0.001)


def requests(*given: tuple[float, int, int]) -> Requests:
    """Requests of (arrival, prompt, output)."""
    arrivals, prompts, outputs = map(np.array, zip(*given, strict=True))
    return Requests(arrivals, prompts, outputs, np.zeros(len(given), dtype=int))


def served(*given: tuple[float, int, int], **options: object) -> Outcome:
    return simulate(requests(*given), 1.0, COSTS, **{"max_rows": 4} | options)


def test_a_request_alone() -> None:
    outcome = served((5.0, 30, 4))
    assert outcome.first_token == pytest.approx([1.3])
    assert outcome.per_token == pytest.approx([1.1])
    assert outcome.waited == [0.0]
    assert (outcome.n_steps, outcome.n_decoded, outcome.n_tokens) == (4, 3, 4)
    assert outcome.seconds == pytest.approx(5.0 + 1.3 + 3 * 1.1)


def test_a_prompt_goes_beside_rows_that_decode() -> None:
    outcome = served((0.0, 30, 3), (1.0, 50, 2))
    assert outcome.first_token == pytest.approx([1.3, 1.3 + 1.0 + 0.5 + 0.1 - 1.0])
    assert outcome.per_token == pytest.approx([(1.6 + 1.2) / 2, 1.2])
    assert outcome.mean_rows == 3 / 3


def test_one_row_after_the_other() -> None:
    outcome = served((0.0, 10, 3), (0.0, 10, 3), max_rows=1)
    assert outcome.waited == pytest.approx([0.0, 1.1 + 2 * 1.1])
    assert outcome.longest_queue == 1


def test_taken_out_and_back() -> None:
    given = [(0.0, 10, 30), (0.0, 10, 30)]
    options = {"max_bytes": 50, "max_new_tokens": 40, "max_rows": 2}
    cautious = served(*given, **options)
    assert (cautious.n_taken_out, cautious.mean_rows) == (0, pytest.approx(58 / 60))
    optimistic = served(*given, **options, optimistic=True)
    # With 16 tokens each, 52 are held: one row waits until the other ends.
    assert optimistic.n_taken_out == 1
    assert optimistic.n_decoded == cautious.n_decoded == 2 * 29
    assert optimistic.seconds < cautious.seconds


def test_drawn_requests() -> None:
    drawn = Requests.drawn(20_000)
    assert (drawn.prompts.min(), drawn.prompts.max()) == (8, 2000)
    assert (drawn.outputs.min(), drawn.outputs.max()) == (8, 500)
    assert np.median(drawn.prompts) == pytest.approx(150, rel=0.05)
    assert np.diff(drawn.arrivals).mean() == pytest.approx(1, rel=0.05)
    assert drawn.priorities.mean() == pytest.approx(0.1, rel=0.1)


def test_all_rows_decode_at_capacity() -> None:
    drawn = Requests.drawn(2000)
    outcome = simulate(drawn, 3 * Costs().capacity(drawn, 8), Costs(), max_rows=8)
    served_per_second = len(drawn.arrivals) / outcome.seconds
    assert served_per_second == pytest.approx(Costs().capacity(drawn, 8), rel=0.05)


def test_another_rate_of_aging_holds_within() -> None:
    before = engine_scheduler.AGING
    with aging(7.0):
        assert engine_scheduler.AGING == 7.0
    assert before == engine_scheduler.AGING


def test_policies_are_compared(tmp_path: Path) -> None:
    names: list[str] = []
    found = scheduler.study(
        150, Costs(), (8,), (0.5, 1.5), lambda result: names.append(result.name)
    )
    text = scheduler.write(found, {"processor": "x", "load": 0.0, "python": "3"}, tmp_path)
    assert names[:6] == [*engine_scheduler.POLICIES] * 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
    raw = json.loads((tmp_path / "scheduler.json").read_text())
    assert [run["name"] for run in raw["policies"]] == names[:6]
    assert len(raw["rates"]) == len(scheduler.RATES)
    for result in found.policies:
        assert list(result.first_token) == sorted(result.first_token)
        assert result.distribution[0] <= result.first_token[0] <= result.distribution[-1]
        assert f"| {result.load} | {result.name} |" in text
    _, optimistic = found.admissions
    assert optimistic.mean_rows > found.admissions[0].mean_rows
