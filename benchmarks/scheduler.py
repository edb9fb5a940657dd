"""The scheduler alone, on a simulated clock: time to first token and per token of each policy.

``python -m benchmarks.scheduler`` writes ``scheduler.md``, ``scheduler.json`` and ``scheduler.png`` to
``benchmarks/results``. No model runs: what a step takes is a formula (``simulated.Costs``), so that the
figures are the same on every machine, but for the time that the scheduler itself takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import output
from benchmarks.output import RESULTS, OutOption
from benchmarks.plots import apart, legend_below, save, subplots
from benchmarks.side_by_side import machine
from benchmarks.simulated import Costs, Outcome, Requests, aging, simulate
from hfgen.engine.scheduler import AGING, POLICIES, RESERVED_SHARE, SECONDS_PER_LEVEL

#: Arrivals by what can be served.
LOADS = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5)
ROWS = (32, 256)

#: The load at which rates of aging are compared, and whole distributions are drawn.
BUSY = 0.9
RATES = (1.0, 1 / 8, AGING, 1 / 128, 0.0)

#: Tokens that fit in memory where admission is compared, with so many rows at most, and the load.
MEMORY, MEMORY_ROWS, MEMORY_LOAD = 16_000, 128, 1.5

SHORT, LONG = 100, 1000  # prompts of fewer, and of at least so many tokens
PERCENTILES = (50, 90, 99)
SHARES = np.concatenate([np.arange(0, 99), np.arange(99, 100.001, 0.02)]).clip(0, 100)


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Percentiles are those of ``PERCENTILES``; seconds, but ``per_token``: milliseconds."""

    name: str
    rows: int
    load: float
    first_token: tuple[float, ...]
    per_token: tuple[float, ...]
    mean_first_token: float
    longest_wait: float  # in the queue
    short: float  # the last percentile of the first token's time, of short prompts
    long: float
    urgent: float
    throughput: float  # tokens per second
    mean_rows: float
    n_taken_out: int
    longest_queue: int
    cpu_seconds: float  # of this machine, for the whole run
    n_steps: int
    distribution: tuple[float, ...]  # of the first token's time, at `SHARES`

    @classmethod
    def of(cls, name: str, rows: int, load: float, outcome: Outcome, seconds: float) -> Result:
        def last(which: Any) -> float:
            return float(np.percentile(outcome.first_token[which], PERCENTILES[-1]))

        first = outcome.first_token
        return cls(
            name=name,
            rows=rows,
            load=load,
            first_token=tuple(np.percentile(first, PERCENTILES).tolist()),
            per_token=tuple((1e3 * np.percentile(outcome.per_token, PERCENTILES)).tolist()),
            mean_first_token=float(first.mean()),
            longest_wait=float(outcome.waited.max()),
            short=last(outcome.prompts < SHORT),
            long=last(outcome.prompts >= LONG),
            urgent=last(outcome.priorities > 0),
            throughput=outcome.throughput,
            mean_rows=outcome.mean_rows,
            n_taken_out=outcome.n_taken_out,
            longest_queue=outcome.longest_queue,
            cpu_seconds=seconds,
            n_steps=outcome.n_steps,
            distribution=tuple(np.percentile(first, SHARES).round(5).tolist()),
        )


@dataclass(frozen=True, slots=True)
class Study:
    """All runs on the same requests."""

    requests: Requests
    costs: Costs
    policies: list[Result]
    rates: list[Result]
    admissions: list[Result]


def run(
    name: str, requests: Requests, costs: Costs, rows: int, load: float, **options: Any
) -> Result:
    start = time.process_time()
    per_second = load * costs.capacity(requests, rows)
    outcome = simulate(requests, per_second, costs, max_rows=rows, **options)
    return Result.of(name, rows, load, outcome, time.process_time() - start)


def study(
    n: int,
    costs: Costs,
    rows: Iterable[int] = ROWS,
    loads: Iterable[float] = LOADS,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Study:
    """Every policy at every load; the rates of aging; cautious and optimistic admission."""
    requests = Requests.drawn(n)
    found = Study(requests, costs, [], [], [])

    def add(results: list[Result], *arguments: Any, **options: Any) -> None:
        results.append(run(arguments[0], requests, costs, *arguments[1:], **options))
        on_result(results[-1])

    for count in rows:
        for load in loads:
            for policy in POLICIES:
                add(found.policies, policy, count, load, policy=policy)
    for rate in RATES:
        with aging(rate):
            add(found.rates, f"{rate:.4g}", ROWS[0], BUSY, policy="srpt")
    for optimistic in (False, True):
        name = "optimistic" if optimistic else "all that may be needed"
        options = {"max_bytes": MEMORY, "optimistic": optimistic}
        add(found.admissions, name, MEMORY_ROWS, MEMORY_LOAD, **options)
    return found


# --- what is written ----------------------------------------------------------------------------


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def row(first: Iterable[str], result: Result) -> str:
    cells = [
        *first,
        *map(seconds, (result.mean_first_token, *result.first_token)),
        *(f"{value:.0f}" for value in result.per_token),
        *map(seconds, (result.short, result.long, result.urgent, result.longest_wait)),
    ]
    return f"| {' | '.join(cells)} |"


def table(first: str, rows: Iterable[str]) -> str:
    columns = "first token, mean | p50 | p90 | p99 | ms per token, p50 | p90 | p99"
    columns += " | p99 short | p99 long | p99 urgent | longest wait"
    lines = [f"| {first} | {columns} |", "|---" * first.count("|") + "|---" + "|--:" * 11 + "|"]
    return "\n".join([*lines, *rows])


def summary(found: Study) -> str:
    """What the policies do for whom, on the fewest rows and near the busy load."""
    load = min((result.load for result in found.policies), key=lambda load: abs(load - BUSY))
    rows = min(result.rows for result in found.policies)
    fcfs, srpt, urgent = (
        next(r for r in found.policies if (r.name, r.rows, r.load) == (name, rows, load))
        for name in ("fcfs", "srpt", "priority")
    )
    cautious, optimistic = found.admissions
    gain = optimistic.throughput / cautious.throughput
    return (
        f"At load {load} with {rows} rows, beside `fcfs`: `srpt` changes the mean time to the first "
        f"token from {seconds(fcfs.mean_first_token)} to {seconds(srpt.mean_first_token)} s, p99 of "
        f"short prompts from {seconds(fcfs.short)} to {seconds(srpt.short)} s, and p99 of long ones "
        f"from {seconds(fcfs.long)} to {seconds(srpt.long)} s (p99 of all: "
        f"{seconds(fcfs.first_token[-1])} and {seconds(srpt.first_token[-1])} s); `priority` changes "
        f"p99 of urgent requests from {seconds(fcfs.urgent)} to {seconds(urgent.urgent)} s. Optimistic admission "
        f"generates {gain:.2f} times the tokens per second where memory is short."
    )


def report(found: Study, facts: dict[str, Any]) -> str:
    requests, costs = found.requests, found.costs
    n = len(requests.arrivals)
    prompts, outputs = requests.PROMPTS, requests.OUTPUTS
    sections = []
    for count in dict.fromkeys(result.rows for result in found.policies):
        results = [result for result in found.policies if result.rows == count]
        sections.append(
            f"## {count} rows\n\nCapacity: {costs.capacity(requests, count):.1f} requests per second.\n\n"
            + table("load | policy", (row((f"{r.load}", r.name), r) for r in results))
        )
    rates = table("rate", (row((r.name,), r) for r in found.rates))
    admissions = "\n".join(
        f"| {r.name} | {r.throughput:,.0f} | {r.mean_rows:.1f} | {r.n_taken_out:,} | "
        f"{' | '.join(f'{value:.0f}' for value in r.per_token)} |"
        for r in found.admissions
    )
    slowest = max(result.cpu_seconds for result in found.policies)
    microseconds = max(1e6 * result.cpu_seconds / result.n_steps for result in found.policies)
    queue = max(result.longest_queue for result in found.policies)
    return f"""# The scheduler, simulated

{n:,} requests in each run; the same ones for all policies. `python -m benchmarks.scheduler`.

- Arrivals: Poisson. Prompts: lognormal, median {prompts[0]:.0f}, sigma {prompts[1]}, {prompts[2]} to {prompts[3]:,} tokens, {requests.prompts.mean():.0f} in the mean. Outputs: lognormal, median {outputs[0]:.0f}, sigma {outputs[1]}, {outputs[2]} to {outputs[3]}, {requests.outputs.mean():.0f} in the mean. {requests.URGENT:.0%} of the requests have priority 1, the others 0.
- A step takes {1e3 * costs.step:g} ms, {1e6 * costs.token:g} µs per token of prefill (2,048 at most), and {1e6 * costs.row:g} µs per decoding row. Load 1: as many requests as can be served with all rows decoding.
- Seconds to the first token, from arrival: the mean, p50, p90, p99, and p99 of short prompts (fewer than {SHORT} tokens), of long ones ({LONG:,} or more), and of the urgent ones. Milliseconds per output token after the first: p50, p90, p99. The longest wait: seconds until prefill begins, the worst of all requests.
- From load 1 on the queue grows as long as requests arrive, so that these waits are those of a run of {n:,} requests.

{summary(found)}

`fcfs`: first come, first served. `srpt`: shortest remaining prefill first; a request is moved ahead by {AGING:g} tokens per token prefilled since it arrived. `priority`: one level is worth {SECONDS_PER_LEVEL:g} seconds of waiting, so that it helps while waits are not much longer than that; `max_queue` bounds them.

{(chr(10) * 2).join(sections)}

![time to the first token and per token](scheduler.png)

## Rates of aging

`srpt`, {ROWS[0]} rows, load {BUSY}. With 0, a long prompt waits as long as shorter ones come.

{rates}

## Memory

{MEMORY:,} tokens fit, load {MEMORY_LOAD}, {MEMORY_ROWS} rows at most, `max_new_tokens={outputs[3]}`. Optimistic: the prompt and {RESERVED_SHARE:.0%} of `max_new_tokens` are reserved; what then does not fit is moved to the host and back, {1e6 * costs.move:g} µs per token each way.

| reserved | tokens per second | rows | taken out | ms per token, p50 | p90 | p99 |
|---|--:|--:|--:|--:|--:|--:|
{admissions}

## The scheduler's own time

A run takes {slowest:.1f} s of CPU at most, {microseconds:.0f} µs per step, with the simulation around it ({facts["processor"]}, Python {facts["python"]}). The longest queue has {queue:,} requests.
"""


def plot(found: Study, path: Path) -> None:
    """Per number of rows: the first token by load, its distribution at one load, and per token by load."""
    from matplotlib import ticker

    counts = [*dict.fromkeys(result.rows for result in found.policies)]
    figure, axes = subplots(
        len(counts), 3, figsize=(12, 1 + 3.8 * len(counts)), squeeze=False, layout="constrained"
    )
    for (by_load, whole, per_token), count in zip(axes, counts, strict=True):
        results = {
            policy: [r for r in found.policies if (r.rows, r.name) == (count, policy)]
            for policy in POLICIES
        }
        # On the first panel's five decades, 15% are less than a line is wide.
        for panel, name, near in ((by_load, "first_token", 0.15), (per_token, "per_token", 0.05)):
            for place, line, label in ((0, "o-", "p50"), (-1, "x--", "p99")):
                values = {p: [getattr(r, name)[place] for r in of] for p, of in results.items()}
                for policies, numbers in apart(values, nearest=near).items():
                    style = {"markersize": 4, "label": f"{label}: {policies}"}
                    panel.plot([r.load for r in results["fcfs"]], numbers, line, **style)
        busy = {p: min(of, key=lambda r: abs(r.load - BUSY)) for p, of in results.items()}
        distributions = {policy: result.distribution for policy, result in busy.items()}
        for policies, numbers in apart(distributions, nearest=0.05).items():
            whole.plot(numbers, 1 - SHARES / 100, label=policies)
        by_load.set(yscale="log", ylabel="seconds to the first token", xlabel="load")
        whole.set(xscale="log", yscale="log", ylabel="share of requests that wait longer")
        whole.set(xlabel=f"seconds to the first token, load {busy['fcfs'].load}", ylim=(1e-4, 1.1))
        whole.xaxis.set_minor_formatter(ticker.NullFormatter())
        per_token.set(ylabel="milliseconds per token", xlabel="load", ylim=(0, None))
        for axis in (by_load, whole, per_token):
            axis.set_title(f"{count} rows", fontsize=10)
            axis.grid(color="0.9")
            legend_below(axis)
    save(figure, path, dpi=150)


def write(found: Study, facts: dict[str, Any], folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text = report(found, facts)
    runs = {
        name: [*map(asdict, getattr(found, name))] for name in ("policies", "rates", "admissions")
    }
    raw = {"machine": facts, "requests": len(found.requests.arrivals), "costs": asdict(found.costs)}
    shares = SHARES.round(4).tolist()
    return output.write(
        folder,
        "scheduler",
        text,
        raw | {"shares": shares} | runs,
        lambda path: plot(found, path),
        indent=None,
    )


def main(
    requests: Annotated[int, typer.Option(min=100, help="In each run.")] = 100_000,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Default: 32 and 256.")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Default: 0.5 to 1.5.")] = None,
    step: Annotated[float, typer.Option(help="Seconds of a step.")] = Costs().step,
    token: Annotated[float, typer.Option(help="Seconds per token of prefill.")] = Costs().token,
    row: Annotated[float, typer.Option(help="Seconds per decoding row.")] = Costs().row,
    move: Annotated[float, typer.Option(help="Seconds per token moved.")] = Costs().move,
    out: OutOption = RESULTS,
) -> None:
    """Serve simulated requests with each policy, at each load."""
    costs = Costs(step, token, row, move)

    def tell(result: Result) -> None:
        print(f"{result.rows} rows, load {result.load}, {result.name}", flush=True)

    print(write(study(requests, costs, rows or ROWS, load or LOADS, tell), machine(), out))


if __name__ == "__main__":
    typer.run(main)
