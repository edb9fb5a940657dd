"""Write what README.md and docs/ quote of benchmarks, from benchmarks/results/*.json.

A page marks each place by ``<!-- results: NAME -->`` and ``<!-- /results -->``. NAME is a key of ``BLOCKS``,
``summary``, or the name of a benchmark; of a benchmark, the first table of its page is quoted. If there is no result,
nothing is written between the marks. A test compares the pages with the results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
if str(ROOT) not in sys.path:  # run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks import cache_report, execution, peers, quantized_cache  # noqa: E402
from benchmarks.cache_cases import Floor, Result  # noqa: E402
from benchmarks.side_by_side import Comparison, Spread  # noqa: E402

MARKED = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)

Raw = dict[str, Any]
MODELS = {"small": "built-in model", "135m": "random 135M model"}


def pages() -> list[Path]:
    """The pages that quote results."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if MARKED.search(page.read_text(encoding="utf-8"))]


def updated(page: str, results: Path = RESULTS, folder: Path = ROOT) -> str:
    """The text of a page in ``folder`` with its blocks as they have to be."""
    return MARKED.sub(lambda found: marked(found[1], results, folder), page)


def updated_page(path: Path) -> str:
    """The text of the page at ``path`` with its blocks as they have to be."""
    return updated(path.read_text(encoding="utf-8"), folder=path.parent)


def marked(name: str, results: Path, folder: Path) -> str:
    """The block called ``name``, between its marks. Its links start at the page's folder."""
    stem, write = BLOCKS.get(name, (name, None))
    path = results / f"{stem}.json"
    text = ""
    if name == "summary":
        text = summary_block(results)
    elif path.exists() and write is not None:
        text = write(json.loads(path.read_text(encoding="utf-8")))
    elif path.exists():
        text = first_table(results / f"{stem}.md")
    if folder != ROOT:
        text = text.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")
    return (
        f"<!-- results: {name} -->\n"
        + (f"\n{text.strip()}\n\n" if text else "")
        + "<!-- /results -->"
    )


# --- pieces -------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    cells = (head, ["---", *["--:"] * (len(head) - 1)], *rows)
    lines = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", line) for line in lines)


def measured_on(facts: Raw) -> str:
    """The processor and its threads; README.md and the benchmark's page have the versions."""
    threads = facts["threads"]
    return f"{facts['processor']}, {threads} thread{'s' * (threads not in (1, '1'))}"


def model_name(name: str) -> str:
    return (MODELS | {"1b": "random 1B model, 8 of its 16 layers"}).get(name, name)


def columns_of(name: str, cells: list[str]) -> tuple[str, str, str]:
    """Of a row of the table of benchmark ``name``: the row, the column and the value of the quoted table."""
    if name == "exact":
        kind, n_rows, prompt, _, ratio, _ = cells
        return kind, f"{n_rows} row{'s' * (n_rows != '1')}, prompt of {prompt}", ratio
    if name == "rollout":
        completions, way, *_, ratio = cells
        return way, completions, ratio
    program, _, prompt = cells[0].rpartition(", ")  # sessions
    forwarded = cells[2].replace(" · ", " of ")
    return (
        program,
        f"prompt of {prompt}: tokens forwarded; times as fast",
        f"{forwarded}; {cells[3]}",
    )


def first_table(page: Path) -> str:
    """The first table of a benchmark's own page, without quartiles, with a link to the page."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r"(^\|.*\n)+", text, re.MULTILINE)
    quoted = re.sub(r" \(([\d.]+ to [\d.]+|quartiles)\)", "", found[0].strip() if found else "")
    if page.stem in ("exact", "rollout", "sessions"):
        quoted = pivoted(page.stem, quoted)
    source = f"`python -m benchmarks.{page.stem}`; all figures: [{page.stem}.md](benchmarks/results/{page.name})."
    return f"{source}\n\n{quoted}"


def pivoted(name: str, quoted: str) -> str:
    """The table of benchmark ``name`` with one column for each setting."""
    values: dict[str, dict[str, str]] = {}
    for line in quoted.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row, column, value = columns_of(name, cells)
        values.setdefault(row, {})[column] = value
    columns = list(dict.fromkeys(column for of_row in values.values() for column in of_row))
    rows = (
        [row, *(of_row.get(column, "") for column in columns)] for row, of_row in values.items()
    )
    return table(["", *columns], rows)


# --- the blocks ---------------------------------------------------------------------------------


def speculation_block(raw: Raw) -> str:
    def gain(found: Raw, greedy: Raw) -> float:
        pairs = zip(greedy["wall"], found["wall"], strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs]).median

    rows = []
    for task, variants in raw["tasks"].items():
        greedy = variants["greedy"]
        gains = {name: gain(found, greedy) for name, found in variants.items()}
        upstream = [g for name, g in gains.items() if re.match("upstream: (?!greedy)", name)]
        ours = next(g for n, g in gains.items() if n != "greedy" and not n.startswith("upstream"))
        best = f"{max(upstream):.2f}" if upstream else "no batches"
        rows.append([task, f"**{ours:.2f}**", best])
    head = ["gain", "default", "transformers, best"]
    agreement = f"The draft agrees with the model on {raw['agreement']:.0%} of the tokens."
    return f"{table(head, rows)}\n\n{measured_on(raw['machine'])}. {agreement}"


def engine_block(raw: Raw) -> str:
    """Tokens per second, and how many times faster the engine is; a column per model."""
    cells: dict[str, list[str]] = {}
    for of in raw.values():
        all_of_them = statistics.median(of["timed"][0]["seconds"])
        for each in of["timed"]:
            way, seconds = each["name"], statistics.median(each["seconds"])
            n_tokens, ours = each.get("n_tokens", of["n_tokens"]), each.get("engine") or all_of_them
            speed = f"{n_tokens / seconds:,.0f}"
            is_ours = way == "engine"
            cell = f"**{speed}**" if is_ours else f"{speed} · **{seconds / ours:.2f}**"
            cells.setdefault("`hfgen.Engine`" if is_ours else way, []).append(cell)
        if prefix := of.get("prefix"):
            row = "`prefix_cache` over none, prompts that share 256 tokens"
            cells.setdefault(row, []).append(f"**{prefix['without'] / prefix['with']:.2f}**")
    head = ["tokens per second · times faster with the engine", *map(model_name, raw)]
    threads = " and ".join(str(of["machine"]["threads"]) for of in raw.values())
    machine = measured_on(next(iter(raw.values()))["machine"] | {"threads": threads})
    rows = ([way, *each] for way, each in cells.items())
    return f"{table(head, rows)}\n\n{machine}."


#: Label, case, context length in tokens (``None``: any), and the part that is timed.
CACHE_ROWS = (
    ("greedy decoding after 8,192 tokens", "decoding", 8192, "whole call"),
    ("4 beams, prompt of 1,024, 32 new tokens", "beams", 1024, "whole call"),
    ("8 samples of a prompt of 1,024, 32 new tokens", "samples", 1024, "whole call"),
    ("second turn of a chat, `prefix_cache`: first token", "chat", None, "first token"),
    (
        "16 rows that finish after 8 to 256 tokens, `drop_finished=True`",
        "finished",
        None,
        "whole call",
    ),
)


def caches_block(raw: Raw) -> str:
    results = [cache_result(each) for each in raw["results"]]
    models = list(dict.fromkeys(result.model for result in results))
    rows = []
    for label, case, length, part in CACHE_ROWS:
        found = [r for r in results if r.case == case and length in (None, r.length)]
        for n_rows in sorted({result.rows for result in found}):
            cells = []
            for model in models:
                mine = next((r for r in found if (r.model, r.rows) == (model, n_rows)), None)
                if mine is None or part not in mine.parts():
                    cells.append("")
                    continue
                comparison, _ = mine.parts()[part]
                cells.append(f"{cache_report.speed(comparison):.2f}")
            several = f", batch {n_rows}" if case == "decoding" else ""
            rows.append([label + several, *cells])
    peaks = {(r.model, r.case, r.length): r.peak_bytes for r in results}
    of_samples = [peaks.get((model, "samples", 1024)) for model in models]
    if any(of_samples):
        sizes = [
            f"{p['upstream'] / 1e6:.0f} · {p['hfgen'] / 1e6:.0f}" if p else "" for p in of_samples
        ]
        rows.append(["8 samples, peak memory in MB: transformers · hfgen", *sizes])
    head = ["speed-up", *map(model_name, models)]
    return f"{table(head, rows)}\n\n{measured_on(raw['machine'])}."


def cache_result(raw: Raw) -> Result:
    first = Comparison(**raw["first"]) if raw["first"] else None
    parts = {"whole": Comparison(**raw["whole"]), "first": first}
    return Result(**{**raw, **parts, "floor": Floor(**raw["floor"])})


def cache_costs(raw: Raw) -> list[quantized_cache.Costs]:
    return [
        quantized_cache.Costs(**{**of, "costs": [quantized_cache.Cost(**c) for c in of["costs"]]})
        for of in raw["costs"]
    ]


def cache_speed(raw: Raw, model: str, case: str, length: int | None, n_rows: int | None) -> float:
    """The speed-up of a whole call of one case, or of the first token of a chat's second turn."""
    results = [cache_result(each) for each in raw["results"]]
    found = next(
        r
        for r in results
        if (r.model, r.case) == (model, case)
        and length in (None, r.length)
        and n_rows in (None, r.rows)
    )
    comparison, _ = found.parts()["first token" if case == "chat" else "whole call"]
    return cache_report.speed(comparison)


def quantized_block(raw: Raw) -> str:
    """Perplexity of the built-in model; costs of a step of the 135M model in bfloat16 at the targets' context."""
    subject = (quantized_cache.TARGET_CONTEXT, "135m", "bfloat16")
    of = next(c for c in cache_costs(raw) if (c.context, c.model, c.dtype) == subject)
    perplexity = {each["name"]: each["token_by_token"] for each in raw["quality"]}
    rows = [
        [
            cost.name,
            f"{perplexity.get(cost.name, perplexity['full precision']):.3f}",
            f"{cost.n_bytes / 2 / of.numbers:.3f}",
            f"{cost.peak / 1e6:.1f}",
            f"{1e3 * statistics.median(cost.seconds):.1f}",
        ]
        for cost in of.costs
    ]
    head = ["cache", "perplexity", "bytes, of float16", "peak, MB", "ms per token"]
    return f"{table(head, rows)}\n\n{measured_on(raw['machine'])}."


#: Of hfgen's ways that `benchmarks.execution` measures, those that a reader chooses between.
EXECUTION_WAYS = (
    "hfgen",
    "optimize",
    "optimize, int8",
    "optimize, int4",
    "optimize, compiled",
    "optimize, compiled, int8",
)


def execution_block(raw: Raw) -> str:
    """The speed-up at 1 and 8 rows over the fastest way of upstream."""
    measured = {
        name: [execution.Times(**each) for each in of["times"]]
        for name, of in raw["subjects"].items()
    }

    def cell(way: str, count: int, times: list[execution.Times]) -> str:
        of_count = [each for each in times if each.rows == count]
        found = next((each for each in of_count if each.way == way), None)
        return f"{execution.gain(found, of_count).median:.2f}" if found else ""

    rows = [
        [
            way,
            *(
                " · ".join(cell(way, count, times) for count in (1, 8))
                for times in measured.values()
            ),
        ]
        for way in EXECUTION_WAYS
    ]
    head = ["speed-up, 1 row · 8 rows", *map(model_name, measured)]
    return (
        f"{table(head, rows)}\n\n{measured_on(raw['machine'])}. "
        "All figures: [execution.md](benchmarks/results/execution.md)."
    )


def sampling_block(raw: Raw) -> str:
    """The gain in sampling 8 rows, without and with a seed."""
    rows = []
    for of in raw["results"]:
        if of["rows"] == 8:
            gains = (
                statistics.median(t / o for t, o in zip(of["upstream"], of[way], strict=True))
                for way in ("hfgen", "seeded")
            )
            rows.append([of["case"], *(f"{gain:.2f}" for gain in gains)])
    head = ["samplers", "times faster than transformers", "with `seed`"]
    more = "[All figures](benchmarks/results/sampling.md)"
    return f"{table(head, rows)}\n\n{measured_on(raw['machine'])}. {more}."


def lm_eval_block(raw: Raw) -> str:
    rows = []
    for of in raw.values():
        title = of["text"].partition("\n")[0].partition(", ")[2]
        theirs = [each for each in of["timed"] if each["name"].startswith("hf,")]
        best = min(theirs, key=lambda each: each["seconds"][0])["name"].partition(", ")[2]
        rows.append([title, best, f"**{of['gain']['median']:.2f}**"])
    head = ["task, built-in model", "best batch size of `hf`", "times as fast with `hfgen`"]
    machine = next(iter(raw.values()))["machine"]
    more = f"lm_eval {machine['lm_eval']}. [All batch sizes](benchmarks/results/lm_eval_tails.md)"
    return f"{table(head, rows)}\n\n{measured_on(machine)}, {more}."


def scale_block(raw: Raw) -> str:
    """Efficiency of the two jobs by numbers of workers."""
    points: dict[int, list[Raw]] = {}
    for point in raw["workers"]:
        points.setdefault(point["workers"], []).append(point)
    jobs = [point["name"] for point in points[max(points)]]
    useful = {
        n: [
            f"{point['rows'] * raw['job']['row'] / n / point['seconds']:.0%}" for point in points[n]
        ]
        for n in sorted(points)
        if n in (1, 10, 100, 1000)
    }
    return table(["workers", *jobs], ([f"{n:,}", *shares] for n, shares in useful.items()))


#: Work, what a reader would use instead, and case, context length and rows of `cache_speed`.
SUMMARISED_CACHES = (
    ("8 samples of 1,024 tokens", "the same call", ("samples", 1024, None)),
    ("4 beams after 1,024 tokens", "the same call", ("beams", 1024, None)),
    ("second chat turn, `PrefixCache`: first token", "forwarding all", ("chat", None, None)),
    ("batch of 4 after 8,192 tokens", "the same call", ("decoding", 8192, 4)),
)


def summary_block(results: Path) -> str:
    """Speed-ups over what a reader would use instead: a row per kind of work, a column per model."""
    raw = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in ("overhead", "caches", "engine", "execution", "peers", "speculation")
        if (path := results / f"{name}.json").exists()
    }
    rows: list[list[str]] = []

    def add(work: str, instead: str, find: Callable[[str], str], page: str) -> None:
        cells = []
        for model in MODELS:
            try:
                cells.append(find(model))
            except (KeyError, StopIteration):  # not measured
                cells.append("")
        if any(cells):
            rows.append([f"[{work}]({page})", instead, *cells])

    def of_modes(model: str) -> str:
        modes = raw["overhead"]["models"][model]["modes"].values()
        speeds = [1 / Comparison(**mode).ratio.median for mode in modes]
        return f"{min(speeds):.2f} to {max(speeds):.2f}"

    def of_engine(model: str) -> str:
        timed = {each["name"]: each for each in raw["engine"][model]["timed"]}
        whole = statistics.median(timed["engine"]["seconds"])
        ways = (timed["padded, sorted"], timed["upstream's generate_batch"])
        return " · ".join(
            f"{statistics.median(way['seconds']) / (way.get('engine') or whole):.2f}"
            for way in ways
        )

    def of_optimize(model: str) -> str:
        times = [execution.Times(**each) for each in raw["execution"]["subjects"][model]["times"]]
        gains = []
        for n_rows in (1, 8):
            mine = [each for each in times if each.rows == n_rows]
            ours = next(each for each in mine if each.way == "optimize, compiled")
            gains.append(f"{execution.gain(ours, mine).median:.2f}")
        return " · ".join(gains)

    def of_peers(model: str) -> str:
        results = peers.results_in(raw["peers"]) if model == "135m" else []
        ways = {result.way: result for result in results}
        ours = ways["hfgen.optimize, bfloat16 model, compiled"]

        def gain(way: str, rows: int) -> str:
            theirs = Spread.of(ways[way].steps(rows)).median
            return f"{theirs / Spread.of(ours.steps(rows)).median:.2f}"

        others = ("llama.cpp, F16", "OpenVINO GenAI, fp16")
        return "; ".join(" · ".join(gain(way, n) for n in peers.ROWS) for way in others)

    def of_drafting(model: str, task: str) -> str:
        """Over greedy decoding, and over the fastest of upstream's own drafting."""
        if model != "small":
            raise KeyError(model)
        ways = raw["speculation"]["tasks"][task]
        greedy, default = list(ways.values())[:2]
        theirs = [w for name, w in ways.items() if re.match("upstream: (?!greedy)", name)]
        over_greedy, *over_theirs = (
            Spread.of([t / o for t, o in zip(way["wall"], default["wall"], strict=True)]).median
            for way in (greedy, *theirs)
        )
        return f"{over_greedy:.2f} · {min(over_theirs):.2f}"

    add("short calls, 10 modes", "the same call", of_modes, "benchmarks/results/overhead.md")
    for work, instead, case in SUMMARISED_CACHES:
        add(
            work,
            instead,
            lambda model, of=case: f"{cache_speed(raw['caches'], model, *of):.2f}",
            "docs/caches.md",
        )
    add(
        "64 requests, `Engine`",
        "padded batches sorted by length · `generate_batch`",
        of_engine,
        "docs/engine.md",
    )
    add(
        "`optimize(model, compile=True)`: 1 row · 8 rows",
        "the faster of float32 and bfloat16, compiled or not",
        of_optimize,
        "docs/optimize.md",
    )
    add("the same in bfloat16", "llama.cpp F16; OpenVINO fp16", of_peers, "docs/optimize.md")
    for work, task in (
        ("prompt lookup, editing", "Editing, batch 1"),
        ("built-in draft model", "Completion with the draft, batch 1"),
    ):
        add(
            work,
            "greedy · its own drafting",
            lambda model, task=task: of_drafting(model, task),
            "docs/speculation.md",
        )
    if not rows:
        return ""
    machines = [
        of["machine"] for of in (*raw.values(), *raw.get("engine", {}).values()) if "machine" in of
    ]
    threads = sorted({facts["threads"] for facts in machines})
    facts = machines[0] | {"threads": " or ".join(map(str, threads))}
    head = ["hfgen", "beside", *map(model_name, MODELS)]
    cores, torch = facts["cores"], facts["torch"].partition("+")[0]
    return (
        f"{table(head, rows)}\n\n{facts['processor']}, {cores} core{'s' * (cores != 1)}, {facts['threads']} "
        f"thread{'s' * (facts['threads'] != '1')}, torch {torch}, transformers {facts['transformers']}."
    )


#: Name of a block → the file of results, and the function that writes the block.
BLOCKS: dict[str, tuple[str, Callable[[Raw], str]]] = {
    "speculation": ("speculation", speculation_block),
    "engine": ("engine", engine_block),
    "caches": ("caches", caches_block),
    "quantized": ("quantized_cache", quantized_block),
    "execution": ("execution", execution_block),
    "sampling": ("sampling", sampling_block),
    "peers": ("peers", peers.block),
    "lm-eval": ("lm_eval_tails", lm_eval_block),
    "scale": ("scale", scale_block),
}


if __name__ == "__main__":
    for path in pages():
        before = path.read_text(encoding="utf-8")
        if (after := updated_page(path)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"updated: {path.relative_to(ROOT)}")
