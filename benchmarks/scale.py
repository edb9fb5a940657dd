"""A batch job on 1 to 1,000 workers, simulated: stragglers, restarts, and how often results are written.

``python -m benchmarks.scale`` writes ``scale.md``, ``scale.json`` and ``scale.png`` to
``benchmarks/results``. No model runs and no clock is read: what a block of rows takes is a formula
(``Job``), so that the figures are the same on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import output
from benchmarks.output import RESULTS, OutOption
from benchmarks.plots import save, subplots

WORKERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
BLOCKS = (16, 64, 256, 1024, 4096)
#: Rows per worker of a job that takes most of a day, its blocks, and hours until a worker fails.
LONG, LONG_BLOCKS, FAILS = 500_000, (4096, 32_768), (6, 48, 1000)
#: Numbers of workers for which block sizes, failures and stragglers are compared.
COMPARED = (10, 100, 1000)
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a job has to do and what may happen to it. Times are seconds.

    The defaults are round numbers for a model of 8 billion parameters on one accelerator each. A worker
    that has failed starts again, and its block is done again by whoever is free. When the job itself
    fails (its driver, or the machine of it), all workers start again, and blocks that are written are kept.
    """

    rows: int = 1_000_000
    block: int = (
        256  # rows that are written together: what a failure can lose, and a worker's last piece
    )
    row: float = 0.1  # of a worker whose batch is full
    row_spread: float = (
        1.0  # standard deviation of a row's time, by its mean: lengths of outputs differ
    )
    per_block: float = 2.0  # reading, scheduling, writing, noting it in the checkpoint
    start: float = 90.0  # until a worker's model is loaded
    speed_spread: float = 0.08  # sigma of the lognormal of workers' speeds
    slow_share: float = 0.01  # of workers that are slow for the whole job
    slow_factor: float = 3.0
    worker_fails: float = 48 * HOUR  # in the mean, of one worker
    job_fails: float = 240 * HOUR
    resumes: bool = True  # behind what is written, when the job has failed; else from the start

    @property
    def n_blocks(self) -> int:
        return -(-self.rows // self.block)

    @property
    def ideal(self) -> float:
        """Seconds of work, with nothing besides."""
        return self.rows * self.row


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job took: seconds from its start, and shares of all workers' time."""

    seconds: float
    useful: float  # rows that were kept
    lost: float  # rows that were begun and not written
    starting: float
    waiting: float  # for others, when no block was left
    n_failures: int


def simulate(job: Job, n_workers: int, seed: int) -> Outcome:
    """One run of ``job``."""
    random = np.random.default_rng(seed)
    speeds = np.exp(random.normal(0.0, job.speed_spread, n_workers))
    speeds[random.random(n_workers) < job.slow_share] /= job.slow_factor
    left, in_flight = job.n_blocks, 0
    idle: list[int] = []
    fails = random.exponential(job.worker_fails, n_workers)
    job_fails = random.exponential(job.job_fails)
    #: Events: time, number (earlier ones first), worker, what ends, when that began, which life it is of.
    events: list[tuple[float, int, int, str, float, int]] = []
    life, number, now, end = 0, 0, 0.0, 0.0
    useful = lost = starting = 0.0
    n_failures = 0

    def push(at: float, worker: int, what: str, began: float) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, worker, what, began, life))

    def begin(worker: int, at: float) -> None:
        nonlocal left, in_flight
        left, in_flight = left - 1, in_flight + 1
        if fails[worker] < at:  # while it waited
            fails[worker] = at + random.exponential(job.worker_fails)
        spread = job.row_spread / np.sqrt(job.block)
        work = job.block * job.row * max(random.normal(1.0, spread), 0.1)
        done = at + job.per_block + work / speeds[worker]
        push(min(done, fails[worker]), worker, "done" if done <= fails[worker] else "failed", at)

    def start(worker: int, at: float) -> None:
        fails[worker] = at + job.start + random.exponential(job.worker_fails)
        push(at + job.start, worker, "started", at)

    for worker in range(n_workers):
        start(worker, 0.0)
    while left or in_flight:
        now, _, worker, what, began, of_life = heapq.heappop(events)
        if of_life != life:
            continue
        if now > job_fails:  # what is not written is lost, and all start again
            running = [e for e in [*events, (now, 0, worker, what, began, life)] if e[5] == life]
            for _, _, _, kind, since, _ in running:
                starting += (job_fails - since) * (kind == "started")
                lost += (job_fails - since) * (kind != "started")
            left, in_flight, life, idle = left + in_flight, 0, life + 1, []
            if not job.resumes:
                lost, useful, left = lost + useful, 0.0, job.n_blocks
            n_failures += 1
            for each in range(n_workers):
                start(each, job_fails)
            job_fails += random.exponential(job.job_fails)
            continue
        if what == "started":
            starting += now - began
        elif what == "done":
            useful, in_flight = useful + now - began, in_flight - 1
            end = now
        else:
            lost, in_flight = lost + now - began, in_flight - 1
            left, n_failures = left + 1, n_failures + 1
            start(worker, now)
        if what != "failed":
            idle.append(worker)
        while left and idle:
            begin(idle.pop(), now)
    total = end * n_workers
    # What was still starting, or waiting for a block, when the last one was written.
    starting += sum(end - e[4] for e in events if e[3] == "started" and e[4] < end and e[5] == life)
    waiting = max(total - useful - lost - starting, 0.0)
    shares = (part / total for part in (useful, lost, starting, waiting))
    return Outcome(end, *shares, n_failures)


@dataclass(frozen=True, slots=True)
class Point:
    """Runs of one job on one number of workers: the median, and the 90th percentile of the time."""

    name: str
    workers: int
    job: Job
    outcome: Outcome
    slow: float  # seconds, p90

    @property
    def efficiency(self) -> float:
        """The ideal time on so many workers by the time it took."""
        return self.job.ideal / self.workers / self.outcome.seconds

    @classmethod
    def of(cls, name: str, job: Job, workers: int, runs: int) -> Point:
        found = [simulate(job, workers, seed) for seed in range(runs)]
        rows = np.array([list(asdict(outcome).values()) for outcome in found])
        middle = np.median(rows, axis=0)
        outcome = Outcome(*middle[:-1].tolist(), int(middle[-1]))
        return cls(name, workers, job, outcome, float(np.percentile(rows[:, 0], 90)))


def study(
    job: Job,
    runs: int,
    workers: Iterable[int] = WORKERS,
    compared: Iterable[int] = COMPARED,
    on_point: Callable[[Point], None] = lambda point: None,
) -> dict[str, list[Point]]:
    """Points by section: numbers of workers, block sizes, failures, resumed jobs, stragglers."""
    found: dict[str, list[Point]] = {}

    def add(section: str, name: str, of: Job, n: int) -> None:
        found.setdefault(section, []).append(Point.of(name, of, n, runs))
        on_point(found[section][-1])

    for n in workers:
        add("workers", f"{job.rows:,} rows", job, n)
        grown = replace(job, rows=max(job.rows // 100, 1) * n)
        add("workers", f"{grown.rows // n:,} rows a worker", grown, n)
    for n in compared:
        for block in BLOCKS:
            add("blocks", f"{block:,}", replace(job, block=block), n)
        long = replace(job, rows=LONG * n, block=LONG_BLOCKS[0], job_fails=24 * HOUR)
        for block in LONG_BLOCKS:
            for hours in FAILS:
                of = replace(long, block=block, worker_fails=hours * HOUR)
                add("failures", f"{block:,} rows, {hours} h", of, n)
        for resumes in (True, False):
            add("resumes", "resumed" if resumes else "anew", replace(long, resumes=resumes), n)
        for share in (0.0, 0.01, 0.1):
            add("stragglers", f"{share:.0%}", replace(job, slow_share=share), n)
    return found


# --- what is written ----------------------------------------------------------------------------


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


def table(first: str, points: Iterable[Point]) -> str:
    columns = "time | p90 | efficiency | lost | starting | waiting | failures"
    lines = [f"| {first} | {columns} |", "|---" * (first.count("|") + 1) + "|--:" * 7 + "|"]
    for point in points:
        o = point.outcome
        shares = " | ".join(f"{share:.1%}" for share in (o.lost, o.starting, o.waiting))
        lines.append(
            f"| {point.workers:,} | {point.name} | {duration(o.seconds)} | {duration(point.slow)} | "
            f"{point.efficiency:.0%} | {shares} | {o.n_failures} |"
        )
    return "\n".join(lines)


def report(job: Job, runs: int, found: dict[str, list[Point]]) -> str:
    fixed = [p for p in found["workers"] if p.name == f"{job.rows:,} rows"]
    good = max((p.workers for p in fixed if p.efficiency >= 0.8), default=1)
    best = {
        n: max((p for p in found["blocks"] if p.workers == n), key=lambda p: p.efficiency)
        for n in dict.fromkeys(p.workers for p in found["blocks"])
    }
    chosen = "; ".join(f"{p.name} rows with {n:,} workers" for n, p in best.items())
    kept, anew = (
        max((p for p in found["resumes"] if p.name == name), key=lambda p: p.workers)
        for name in ("resumed", "anew")
    )
    return f"""# A batch job on many workers, simulated

Nothing here was run on so many machines: it is a cost model of a job of Ray Data (`docs/batch-jobs.md`) with `hfgen.ray.Generate`, and its assumptions are these. `python -m benchmarks.scale`; medians of {runs} seeded runs.

- {job.rows:,} rows; {job.row:g} s of a worker per row with its batch full, with a standard deviation of {job.row_spread:g} times that.
- Rows are written in blocks of {job.block}; a block takes {job.per_block:g} s besides its rows, and its worker decodes nothing else meanwhile. What is not written is lost with its worker. A worker takes {job.start:g} s to start.
- Workers' speeds are lognormal with sigma {job.speed_spread:g}; {job.slow_share:.0%} are {job.slow_factor:g} times slower for the whole job. No block is given to a second worker while the first still has it.
- A worker fails after {job.worker_fails / HOUR:g} hours in the mean and starts again; the job after {job.job_fails / HOUR:g} hours, and then all start again behind what is written.
- Efficiency: the time that the rows would take with nothing besides them, by the time it took. Lost, starting, waiting: shares of all workers' time; waiting is that for the last blocks.

With these numbers, the job stays above 80% up to {good:,} workers. The best block sizes of those tried: {chosen}. Small blocks lose less to a failure and wait less for the last of them; large ones cost fewer writes. A job of most of a day on {kept.workers:,} workers takes {duration(kept.outcome.seconds)} (p90 {duration(kept.slow)}) if it is resumed when it fails, and {duration(anew.outcome.seconds)} (p90 {duration(anew.slow)}) if it begins anew.

{table("workers | job", found["workers"])}

## Rows that are written together

{table("workers | rows", found["blocks"])}

## A long job: blocks, and hours until a worker fails

{LONG:,} rows per worker, and a job that fails after 24 hours in the mean.

{table("workers | block, hours", found["failures"])}

## A long job that is resumed when it fails, or not

Blocks of {LONG_BLOCKS[0]:,} rows; workers fail after {job.worker_fails / HOUR:g} hours in the mean.

{table("workers | after a failure", found["resumes"])}

## Slow workers

{table("workers | share", found["stragglers"])}

![efficiency by workers and by block size](scale.png)
"""


def plot(job: Job, found: dict[str, list[Point]], path: Path) -> None:
    """Efficiency by workers for both jobs, and by block size for each number of workers."""
    figure, (by_workers, by_block) = subplots(1, 2, figsize=(10, 4), layout="constrained")
    fixed = [p for p in found["workers"] if p.name == f"{job.rows:,} rows"]
    grown = [p for p in found["workers"] if p not in fixed]
    for points, label in ((fixed, f"{job.rows:,} rows"), (grown, "rows grow with the workers")):
        x = [p.workers for p in points]
        by_workers.plot(x, [p.efficiency for p in points], "o-", label=label)
    by_workers.set(xscale="log", xlabel="workers", ylabel="efficiency", ylim=(0, 1.05))
    for n in dict.fromkeys(p.workers for p in found["blocks"]):
        points = [p for p in found["blocks"] if p.workers == n]
        x = [p.job.block for p in points]
        by_block.plot(x, [p.efficiency for p in points], "o-", label=f"{n:,} workers")
    by_block.set(xscale="log", xlabel="rows that are written together", ylim=(0, 1.05))
    for axis in (by_workers, by_block):
        axis.grid(color="0.9")
        axis.legend(frameon=False, loc="lower left")
    save(figure, path, dpi=150)


def write(job: Job, runs: int, found: dict[str, list[Point]], folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text = report(job, runs, found)
    raw: dict[str, Any] = {
        section: [
            {"name": p.name, "workers": p.workers, "rows": p.job.rows, "p90": round(p.slow, 1)}
            | {key: round(value, 4) for key, value in asdict(p.outcome).items()}
            for p in points
        ]
        for section, points in found.items()
    }
    raw = {"job": asdict(job), "runs": runs} | raw
    return output.write(folder, "scale", text, raw, lambda path: plot(job, found, path))


def main(
    rows: Annotated[int, typer.Option(min=100)] = Job().rows,
    row: Annotated[float, typer.Option(help="Seconds of a full worker per row.")] = Job().row,
    block: Annotated[
        int, typer.Option(min=1, help="Rows that are written together.")
    ] = Job().block,
    start: Annotated[float, typer.Option(help="Seconds until a worker decodes.")] = Job().start,
    fails: Annotated[float, typer.Option(help="Hours until a worker fails.")] = Job().worker_fails
    / HOUR,
    runs: Annotated[int, typer.Option(min=1)] = 15,
    out: OutOption = RESULTS,
) -> None:
    """Simulate the job on 1 to 1,000 workers, with other blocks, failures and stragglers."""
    job = Job(rows=rows, row=row, block=block, start=start, worker_fails=fails * HOUR)

    def tell(point: Point) -> None:
        print(f"{point.workers} workers, {point.name}: {point.efficiency:.0%}", flush=True)

    print(write(job, runs, study(job, runs, on_point=tell), out))


if __name__ == "__main__":
    typer.run(main)
