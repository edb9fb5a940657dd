"""Compare many random calls: ``python -m tests.parity.sweep --seed 0 --count 2000``.

Each failing combination is printed with the command that runs it alone; the exit code is 1 when
there was any difference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.parity.harness import (
    FAMILIES,
    Case,
    Report,
    check,
    draw_case,
    forget_models,
    summary_keys,
    versions,
)


def draw(seed: int, count: int, families: Sequence[str] = ()) -> list[Case]:
    """The sweep's cases, grouped by family so that few models are held at a time."""
    rng = random.Random(seed)
    return sorted((draw_case(rng, families) for _ in range(count)), key=lambda c: c.family)


def by_family(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases in one list per family."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.family, []).append(case)
    return list(groups.values())


def _check_group(cases: list[Case]) -> list[tuple[Case, list[str], str | None]]:
    """Check one family's cases; returns what a parent process needs to know of each."""
    reports: list[Report] = [check(case) for case in cases]
    forget_models()
    return [(report.case, report.differences, report.theirs.error) for report in reports]


def check_all(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, list[str], str | None]]:
    """``(case, differences, upstream's exception class)`` in no particular order."""
    chunks = [group[i : i + 25] for group in by_family(cases) for i in range(0, len(group), 25)]
    if jobs == 1:
        for chunk in chunks:
            yield from _check_group(chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for done in pool.imap_unordered(_check_group, chunks):
            yield from done


def summary(title: str, total: Counter, failed: Counter, raised: Counter) -> Table:
    """Cases, raised alike and differing, for each value of one kind of group."""
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("", "left"),
        ("cases", "right"),
        ("raised", "right"),
        ("differ", "right"),
    ):
        table.add_column(column, justify=justify)
    for (kind, name), count in sorted(total.items(), key=lambda item: (-failed[item[0]], item[0])):
        if kind == title:
            marked = f"[red]{failed[kind, name]}" if failed[kind, name] else "0"
            table.add_row(name, str(count), str(raised[kind, name]), marked)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.sweep", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default 0)")
    parser.add_argument("--count", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument(
        "--family", action="append", default=[], choices=sorted(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--only", action="append", default=[], type=Case.parse, metavar="CASE_JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--summary", action="store_true", help="show the tables even if all is equal"
    )
    options = parser.parse_args(arguments)

    console = Console(file=sys.stdout)  # models print, and their prints are dropped
    cases = options.only or draw(options.seed, options.count, options.family)
    total, failed, raised = Counter(), Counter(), Counter()
    differing, errors, begin = 0, 0, time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("parity", total=len(cases))
        for case, differences, error in check_all(cases, options.jobs):
            keys = summary_keys(case)
            if error:
                errors += 1
                keys[("exception", error)] += 1
                raised += keys
            total += keys
            if differences:
                differing += 1
                failed += keys
                for line in differences:
                    console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
                console.print(case.command, markup=False, highlight=False, soft_wrap=True)
            progress.update(task, advance=1, description=case.family)
    seconds = time.perf_counter() - begin

    if failed or options.summary:
        for title in ("family", "mode", "option", "exception"):
            console.print(summary(title, total, failed, raised))
    console.print(
        f"{len(cases)} calls, {errors} of them raised on upstream, {differing} differ; "
        f"{len(cases) / seconds:.0f} calls/s ({versions()})",
        highlight=False,
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
