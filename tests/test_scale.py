"""The simulation of a batch job on many workers: what has to hold for any numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import HOUR, Job, simulate

#: Workers that are alike and never fail, and rows that take the same time.
QUIET = Job(
    rows=4000, block=100, row=1.0, row_spread=0.0, per_block=0.0, start=0.0, speed_spread=0.0,
    slow_share=0.0, worker_fails=1e12, job_fails=1e12,
)  # fmt: skip


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_quiet_workers_take_the_ideal_time(workers: int) -> None:
    outcome = simulate(QUIET, workers, seed=0)
    assert outcome.seconds == pytest.approx(4000 / workers)
    assert outcome.useful == pytest.approx(1.0)


def test_the_last_blocks_are_waited_for() -> None:
    outcome = simulate(QUIET, 30, seed=0)  # 40 blocks: ten workers have two
    assert outcome.seconds == pytest.approx(200)
    assert outcome.waiting == pytest.approx(20 / 60)


@pytest.mark.parametrize("resumes", [True, False])
def test_all_time_is_accounted_for(resumes: bool) -> None:
    job = replace(Job(), rows=200_000, worker_fails=2 * HOUR, job_fails=HOUR, resumes=resumes)
    for seed in range(3):
        outcome = simulate(job, 20, seed)
        parts = outcome.useful + outcome.lost + outcome.starting + outcome.waiting
        assert parts == pytest.approx(1.0)
        assert outcome.n_failures > 0
        assert outcome == simulate(job, 20, seed)
        work = outcome.useful * outcome.seconds * 20
        assert work == pytest.approx(job.ideal + job.n_blocks * job.per_block, rel=0.1)


def test_what_is_written_is_kept_when_a_job_fails() -> None:
    job = replace(QUIET, job_fails=1500.0, block=10)
    kept = [simulate(job, 2, seed) for seed in range(20)]
    anew = [simulate(replace(job, resumes=False), 2, seed) for seed in range(20)]
    assert all(a.seconds >= b.seconds - 1e-6 for a, b in zip(anew, kept, strict=True))
    assert max(outcome.lost for outcome in kept) < 0.05 < max(outcome.lost for outcome in anew)


def test_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LONG", 50_000)
    job = Job(rows=20_000)
    found = scale.study(job, 2, workers=(1, 20), compared=(2,))
    text = scale.write(job, 2, found, tmp_path)
    assert "| 20 | 20,000 rows |" in text
    assert {file.name for file in tmp_path.iterdir()} == {"scale.md", "scale.json", "scale.png"}
