"""What does drafting gain? Prompt lookup, the built-in draft and early exit against plain decoding.

``python -m benchmarks.speculation`` writes ``speculation.md``, ``.json`` and ``.png``; with ``--optimize``,
``speculation_optimized.md`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

import hfgen

from . import output
from .cost import (
    WIDTHS,
    Costs,
    best_gain,
    choices,
    first_layers,
    forwards_alone,
    measure_costs,
    needed_ratio,
    predicted_gain,
)
from .edits import EDITS, beginnings, editing
from .models import random_135m
from .output import RESULTS, OutOption
from .plots import legend_below, save, subplots
from .race import Result, Variant, race
from .side_by_side import UnequalTokensError, frozen_garbage, machine

#: hfgen's gain over its own greedy decoding that each way is to reach.
LOOKUP_TARGET, ASSISTANT_TARGET = 2.0, 1.3

GREEDY = Variant("greedy")
UPSTREAM_GREEDY = Variant("upstream: greedy", "upstream")

#: Tokens in the cache when forwards are timed.
PAST = 384


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured, and whether models are prepared by ``hfgen.optimize``, and compiled."""

    rounds: int = 5
    random_rounds: int = 3
    texts: int = 4  # that are decoded one at a time
    rows: int = 8
    edits: int | None = None  # tokens of an edited text that are written; all of them by default
    new_tokens: int = 128
    completed: int = 256
    random_new_tokens: int = 32
    lookup_lengths: tuple[int, ...] = (3, 5, 10, 20)
    assistant_lengths: tuple[int, ...] = (1, 2, 3)
    layers: tuple[int, ...] = (1, 2, 4, 8, 15)
    scales: tuple[float, ...] = (1.0, 1.7, 2.0)
    repeat: int = 15
    optimize: bool = False

    @property
    def name(self) -> str:
        """Of the files that are written."""
        return "speculation_optimized" if self.optimize else "speculation"

    def prepared(self, model: Any) -> Any:
        return hfgen.optimize(model, compile=True) if self.optimize else model


@dataclass(slots=True)
class Task:
    """One piece of work, and all ways to do it."""

    name: str
    inputs: list[dict[str, Any]]
    variants: list[Variant]
    target: float | None = None
    uses_draft: bool = False
    results: list[Result] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.inputs[0]["input_ids"])

    @property
    def greedy(self) -> Result:
        return next(result for result in self.results if result.variant == GREEDY.name)

    def best(self) -> Result:
        """hfgen's fastest way that drafts."""
        return max(self.drafting(), key=lambda result: result.gain(self.greedy).median)

    def drafting(self) -> list[Result]:
        return [r for r in self.results if r is not self.greedy and not r.variant.startswith("up")]


# --- the built-in model -------------------------------------------------------------------------


def lookup_variants(size: Size, is_batch: bool) -> list[Variant]:
    longest = max(size.lookup_lengths)
    constant = [
        Variant(
            f"lookup, {n}",
            options={"prompt_lookup_num_tokens": n, "num_assistant_tokens_schedule": "constant"},
        )
        for n in size.lookup_lengths
    ]
    adaptive = Variant(f"lookup, up to {longest}", options={"prompt_lookup_num_tokens": longest})
    theirs = [
        Variant(f"upstream: lookup, {n}", "upstream", {"prompt_lookup_num_tokens": n})
        for n in size.lookup_lengths[-2:]
    ]
    return [GREEDY, adaptive, *constant, *([] if is_batch else theirs)]


def assistant_variants(size: Size, draft: Any, is_batch: bool) -> list[Variant]:
    """``draft``: an ``assistant_model``."""
    constant = [
        Variant(
            f"assistant, {n}",
            options={
                "assistant_model": draft,
                "num_assistant_tokens": n,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            },
        )
        for n in size.assistant_lengths
    ]
    adaptive = Variant("assistant, default", options={"assistant_model": draft})
    theirs = Variant("upstream: assistant", "upstream", {"assistant_model": draft})
    return [GREEDY, adaptive, *constant, UPSTREAM_GREEDY, *([] if is_batch else [theirs])]


def tasks(size: Size, tokenizer: Any, draft: Any) -> list[Task]:
    """All work of the built-in model."""
    one_by_one = [[edit] for edit in EDITS[: size.texts]]
    together = list(EDITS[: size.rows])

    def edited(edits: Sequence[Any]) -> dict[str, Any]:
        given = editing(edits, tokenizer)
        return given | {"max_new_tokens": min(size.edits or 10**6, given["max_new_tokens"])}

    def begun(edits: Sequence[Any], n_new: int) -> dict[str, Any]:
        limits = {"max_new_tokens": n_new, "eos_token_id": None}
        return beginnings(edits, tokenizer, 64) | limits

    alone, batch = lookup_variants(size, False), lookup_variants(size, True)
    n_rows = f"batch {size.rows}"
    return [
        Task("Editing, batch 1", [edited(edits) for edits in one_by_one], alone, LOOKUP_TARGET),
        Task(f"Editing, {n_rows}", [edited(together)], batch, LOOKUP_TARGET),
        Task(f"Editing, {n_rows} of one text", [edited(EDITS[:1] * size.rows)], batch),
        Task(
            "Completion with lookup, batch 1",
            [begun(edits, size.completed) for edits in one_by_one],
            alone,
        ),
        Task(f"Completion with lookup, {n_rows}", [begun(together, size.completed)], batch),
        Task(
            "Completion with the draft, batch 1",
            [begun(edits, size.new_tokens) for edits in one_by_one],
            assistant_variants(size, draft, is_batch=False),
            ASSISTANT_TARGET,
            uses_draft=True,
        ),
        Task(
            f"Completion with the draft, {n_rows}",
            [begun(together, size.new_tokens)],
            assistant_variants(size, draft, is_batch=True),
            ASSISTANT_TARGET,
            uses_draft=True,
        ),
    ]


@dataclass(slots=True)
class BuiltIn:
    """All tasks, and by the number of rows what forwards cost: of the model, and of its draft."""

    tasks: list[Task]
    target: dict[int, Costs]
    draft: dict[int, Costs]
    agreement: float  # of the draft with the model, on what the model writes

    def alone(self, task: Task, result: Result) -> float:
        """Seconds of the forwards of a call by themselves."""
        draft = self.draft[task.rows] if task.uses_draft else None
        return forwards_alone(result.forwards, self.target[task.rows], draft)

    def ceiling(self, task: Task, result: Result) -> float:
        """The gain if all but the forwards were free, for greedy decoding as for this."""
        return self.alone(task, task.greedy) / self.alone(task, result)


def measure_builtin(size: Size, advance: Callable[[str], None]) -> BuiltIn:
    model, tokenizer = hfgen.builtin_model()
    draft, _ = hfgen.builtin_model(draft=True)
    model, draft = size.prepared(model), size.prepared(draft)
    done = tasks(size, tokenizer, draft)
    for task in done:
        task.results = race(
            model, task.inputs, task.variants, size.rounds, partial(advance, task.name)
        )
    rows = {task.rows for task in done}
    given = beginnings(EDITS, tokenizer, 64)
    written = model.generate(
        **given, max_new_tokens=size.new_tokens, eos_token_id=None, do_sample=False
    )
    chosen, drafted = (choices(part, written, size.new_tokens) for part in (model, draft))
    return BuiltIn(
        done,
        {n: measure_costs(model, n, PAST, repeat=size.repeat) for n in rows},
        {n: measure_costs(draft, n, PAST, repeat=size.repeat) for n in rows},
        float((chosen == drafted).float().mean()),
    )


# --- random models ------------------------------------------------------------------------------

#: Tokens of a draft of the random model.
N_DRAFTED = 4


@dataclass(slots=True)
class Exit:
    """Drafts by the first ``layers``, of a model whose layers add ``scale`` times as much."""

    layers: int
    scale: float
    ratio: float  # of the cost of a draft step to that of the model
    agreement: float
    predicted: float
    result: Result
    greedy: Result


def walking(model: Any) -> Any:
    """``model`` (Llama, random), with an output that tells each token from another one's embedding.

    With tied embeddings a random model repeats one token. With this output it walks through the
    vocabulary, and its layers, which are small beside the larger embeddings, lead it astray: the
    larger their output, the more often, and the less the first layers tell about all of them.
    """
    table = model.get_input_embeddings().weight
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(len(table))
        model.lm_head.weight = torch.nn.Parameter(table[order].clone())
        table.mul_(20.0)
    model.config.tie_word_embeddings = False
    return model


@contextmanager
def scaled(model: Any, factor: float) -> Iterator[None]:
    """Within, what each layer adds is ``factor`` times as large."""
    weights = [
        weight
        for layer in model.get_decoder().layers
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)


def measure_random(
    model: Any, prompt: torch.Tensor, size: Size, advance: Callable[[str], None]
) -> tuple[list[Exit], Costs]:
    """Early exit after each of ``size.layers`` at each of ``size.scales``."""
    model = size.prepared(walking(model))
    past = prompt.shape[1] + size.random_new_tokens
    target = measure_costs(model, 1, past, (1, 2, 4, N_DRAFTED + 1, 8, 16), size.repeat)
    drafts = {}
    for n_layers in size.layers:
        with first_layers(model, n_layers):
            drafts[n_layers] = measure_costs(model, 1, past, (1, 2), size.repeat).of(1)
    given = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": size.random_new_tokens,
        "eos_token_id": None,
    }
    variants = [
        GREEDY,
        *(
            Variant(
                f"{n} layers",
                options={
                    "assistant_early_exit": n,
                    "num_assistant_tokens": N_DRAFTED,
                    "num_assistant_tokens_schedule": "constant",
                    "assistant_confidence_threshold": 0.0,
                },
            )
            for n in size.layers
        ),
    ]
    exits = []
    for scale in size.scales:
        with scaled(model, scale):
            greedy, *others = race(
                model,
                [given],
                variants,
                size.random_rounds,
                partial(advance, f"random, layers times {scale}"),
            )
            written = model.generate(**given, do_sample=False)
            chosen = choices(model, written, size.random_new_tokens)
            for n_layers, result in zip(size.layers, others, strict=True):
                with first_layers(model, n_layers):
                    drafted = choices(model, written, size.random_new_tokens)
                agreement = float((chosen == drafted).float().mean())
                seconds = drafts[n_layers]
                exits.append(
                    Exit(
                        n_layers,
                        scale,
                        seconds / target.of(1),
                        agreement,
                        predicted_gain(agreement, N_DRAFTED, seconds, target),
                        result,
                        greedy,
                    )
                )
    return exits, target


# --- the report ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """Everything that was measured."""

    size: Size
    builtin: BuiltIn
    exits: list[Exit]
    random_target: Costs
    facts: dict[str, Any]


def markdown(report: Report) -> str:
    facts, size = report.facts, report.size
    lookup = [task for task in report.builtin.tasks if not task.uses_draft]
    assistant = [task for task in report.builtin.tasks if task.uses_draft]
    parts = [
        "# Speculation against greedy decoding" + ", with `hfgen.optimize`" * size.optimize,
        *(["All models ran through `hfgen.optimize(model, compile=True)`."] * size.optimize),
        "All ways to decode run in one process on the same weights, by turns on the same prompt, and all of "
        "them gave the same tokens. Gain: how many times faster than hfgen's greedy decoding, wall time, "
        "call by call; the median, with quartiles. CPU gain: the same of processor time. Accepted: of the drafted "
        "tokens. Per forward: tokens that a row gains by a forward of the model, and those that it feeds. "
        "Forwards alone: the share of the processor time that the forwards, of model and draft, take by "
        "themselves. Ceiling: the CPU gain if all else were free. A number is the length of the drafts; the "
        "defaults adapt it.",
        f"{facts['processor']}, {facts['cores']} cores, 1 thread, load {facts['load']} at the start. "
        f"torch {facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}, "
        f"Python {facts['python']}.",
        "## Targets",
        verdicts(report),
        "## Prompt lookup, built-in model",
        f"Editing: the prompt is a function of this project (`benchmarks/edits.py`) and a small change "
        f"asked for, the output the function with the change, 280 to 340 tokens. **The built-in model is too "
        f"small to edit by instruction: a logits processor replaces its choices by the tokens of the edited "
        f"text, in all variants alike.** Forwards, drafts, verification and caches are real, and "
        f"what is accepted is that of a real edit. Completion: nothing is replaced; the model continues 64 tokens "
        f"of a function by {size.completed}, and its loops make lookup succeed.",
        *(section(report.builtin, task) for task in lookup),
        "## Assistant: the built-in model and its draft",
        f"The model continues 64 tokens of a function of this project by {size.new_tokens}. "
        + assistant_text(report),
        *(section(report.builtin, task) for task in assistant),
        "## Floors of the built-in model",
        floors(report.builtin),
        "## Gain by cost ratio: a random Llama of SmolLM-135M's shape, early exit",
        random_text(report),
        random_table(report.exits),
        f"![gain by way, and by cost ratio]({size.name}.png)",
    ]
    return "\n\n".join(parts) + "\n"


def section(builtin: BuiltIn, task: Task) -> str:
    lines = [
        f"### {task.name}",
        "",
        "| | ms | gain | quartiles | CPU gain | accepted | gained per forward | fed per forward | forwards alone | ceiling |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in task.results:
        gain, cpu = result.gain(task.greedy), result.cpu_gain(task.greedy)
        share = builtin.alone(task, result) * len(result.cpu) / sum(result.cpu)
        accepted = "" if result.acceptance is None else f"{result.acceptance:.0%}"
        lines.append(
            f"| {result.variant} | {result.milliseconds:.0f} | **{gain.median:.2f}** "
            f"| {gain.low:.2f} to {gain.high:.2f} | {cpu.median:.2f} | {accepted} "
            f"| {result.tokens_per_forward:.2f} | {result.width:.1f} | {share:.0%} "
            f"| {builtin.ceiling(task, result):.2f} |"
        )
    return "\n".join(lines)


def verdicts(report: Report) -> str:
    """One line per target: met, or missed and why."""
    lines = [verdict(report, task) for task in report.builtin.tasks if task.target is not None]
    for task in report.builtin.tasks:
        for theirs in task.results:
            if theirs.variant != "upstream: assistant":
                continue
            ours = max(task.drafting()[0], task.best(), key=lambda r: r.gain(theirs).median)
            gain = ours.gain(theirs).median
            is_met = gain >= ASSISTANT_TARGET
            lines.append(
                f"* {task.name}, over upstream's assisted decoding, {ASSISTANT_TARGET}: "
                f"{'met' if is_met else '**missed**'}, {gain:.2f} ({ours.variant}); "
                f"{task.drafting()[0].gain(theirs).median:.2f} by default."
            )
    return "\n".join(lines)


def verdict(report: Report, task: Task) -> str:
    builtin, target = report.builtin, task.target or 1.0
    default, best = task.drafting()[0], task.best()
    gain = best.gain(task.greedy).median
    line = (
        f"* {task.name}, over greedy, {target}: {'met' if gain >= target else '**missed**'}, "
        f"{gain:.2f} ({best.variant}); {default.gain(task.greedy).median:.2f} by default."
    )
    if gain >= target:
        return line
    costs = builtin.target[task.rows]
    ceilings = {r.variant: builtin.ceiling(task, r) for r in task.drafting()}
    highest = max(ceilings, key=lambda name: ceilings[name])
    line += (
        f" The floor: with forwards alone and all else free the gain would be {ceilings[highest]:.2f} "
        f"at most ({highest})."
    )
    if not task.uses_draft:
        if task.rows == 1:
            return line
        same = next(other for other in builtin.tasks if other.name.endswith("of one text"))
        return line + (
            f" A forward of 16 tokens in each of {task.rows} rows costs {costs.relative(16):.1f} times one "
            "of a single token, and rows share the columns of the cache: where one row's draft fails, the "
            f"others feed again what they know. It gains {same.best().gain(same.greedy).median:.2f} "
            f"({same.best().variant}) where all rows write one text, so that they fail together."
        )
    step = builtin.draft[task.rows].of(1)
    n, possible = best_gain(builtin.agreement, step, costs)
    needed = needed_ratio(builtin.agreement, target, costs)
    line += (
        f" By the formula, rows each at their own pace: {possible:.2f} with drafts of {n}, since a draft step "
        f"costs {step / costs.of(1):.2f} of the model's, and verifying 4 tokens "
        f"{costs.relative(4):.2f}. "
    )
    line += (
        f"{target} needs a draft of the same quality at {needed:.2f} of the model's cost."
        if needed > 0
        else f"No draft of this quality reaches {target}, however cheap."
    )
    return line + met_setting(report, target)


def met_setting(report: Report, target: float) -> str:
    """Where the random models reach ``target``: the least agreement."""
    met = [e for e in report.exits if e.result.gain(e.greedy).median >= target]
    if not met:
        return ""
    least = min(met, key=lambda e: (e.agreement, -e.ratio))
    return (
        f" The random 135M model reaches it at batch 1: {least.result.gain(least.greedy).median:.2f} at a cost ratio of "
        f"{least.ratio:.2f} with {least.agreement:.0%} agreement."
    )


def assistant_text(report: Report) -> str:
    builtin = report.builtin
    return (
        f"The draft's choice is the model's at {builtin.agreement:.0%} of the tokens that the model writes. "
        "Numbers draft so many tokens each round; the default adapts, and stops while it does not pay. "
        "Upstream's assisted decoding takes no batches."
    )


def floors(builtin: BuiltIn) -> str:
    """The cost of forwards, and the best gain of each row count for the draft's agreement."""
    lines = [
        f"Processor time of a forward, ms, with {PAST} tokens in the cache; in brackets, by that of one "
        "token. On this processor several tokens cost much more than one, most of all in a batch: the "
        "products are bound by arithmetic there, not by reading weights.",
        "",
        "| | " + " | ".join(f"{width} tokens" for width in WIDTHS) + " |",
        "|---|" + "--:|" * len(WIDTHS),
    ]
    texts = []
    for rows in sorted(builtin.target):
        target, draft = builtin.target[rows], builtin.draft[rows]
        for name, costs in (("model", target), ("draft", draft)):
            cells = (f"{1e3 * costs.of(w):.2f} ({costs.relative(w):.2f})" for w in WIDTHS)
            lines.append(f"| {name}, batch {rows} | " + " | ".join(cells) + " |")
        n, gain = best_gain(builtin.agreement, draft.of(1), target)
        texts.append(
            f"Batch {rows}: a draft step costs {draft.of(1) / target.of(1):.2f} of the model's; with "
            f"{builtin.agreement:.0%} of the drafts accepted, one by one, the best possible gain is "
            f"{gain:.2f}, with drafts of {n}."
        )
    return "\n".join(lines) + "\n\n" + " ".join(texts)


def random_text(report: Report) -> str:
    costs = report.random_target
    return (
        f"The draft is the model's first layers (`assistant_early_exit`), {N_DRAFTED} tokens a round, "
        f"{report.size.random_new_tokens} new tokens, batch 1. What the layers add is scaled, so that the first "
        "ones agree more or less with all. Cost ratio: of a draft step to one of the model, both with the "
        "output layer, which alone is a fifth of the model. Agreement: of the tokens that greedy "
        "decoding wrote. Predicted: Leviathan et al. 2023, tokens of a round by its cost, with the measured "
        f"cost of verifying {N_DRAFTED + 1} tokens, {costs.relative(N_DRAFTED + 1):.2f} times that of one."
    )


def random_table(exits: Sequence[Exit]) -> str:
    lines = [
        "| layers of 30 | scale | cost ratio | agreement | accepted | gained per forward | predicted gain | measured | quartiles | CPU gain |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for e in exits:
        gain, cpu = e.result.gain(e.greedy), e.result.cpu_gain(e.greedy)
        lines.append(
            f"| {e.layers} | {e.scale} | {e.ratio:.2f} | {e.agreement:.0%} | {e.result.acceptance or 0:.0%} "
            f"| {e.result.tokens_per_forward:.2f} | {e.predicted:.2f} | **{gain.median:.2f}** "
            f"| {gain.low:.2f} to {gain.high:.2f} | {cpu.median:.2f} |"
        )
    return "\n".join(lines)


def as_object(report: Report) -> dict[str, Any]:
    """Everything that was measured; times in seconds, in the order of the calls."""
    builtin = report.builtin
    return {
        "machine": report.facts,
        "size": asdict(report.size),
        "agreement": builtin.agreement,
        "targets": {task.name: task.target for task in builtin.tasks if task.target},
        "costs": {
            "model": {rows: asdict(costs) for rows, costs in builtin.target.items()},
            "draft": {rows: asdict(costs) for rows, costs in builtin.draft.items()},
            "random": asdict(report.random_target),
        },
        "tasks": {
            task.name: {result.variant: result.as_object() for result in task.results}
            for task in builtin.tasks
        },
        "early_exit": [
            {
                name: value.as_object() if isinstance(value, Result) else value
                for name, value in ((name, getattr(e, name)) for name in e.__slots__)
            }
            for e in report.exits
        ],
    }


def plot(report: Report, path: Path) -> None:
    """Left: the gain of each way at each task. Right: the gain by the cost ratio."""
    n_rows = sum(len(task.results) for task in report.builtin.tasks)
    figure, (left, right) = subplots(ncols=2, figsize=(13, 2 + 0.24 * n_rows), layout="constrained")
    labels: list[str] = []
    for task in report.builtin.tasks:
        first = len(labels)
        spreads = [r.gain(task.greedy) for r in task.results if r is not task.greedy]
        labels += [r.variant for r in task.results if r is not task.greedy]
        left.errorbar(
            [s.median for s in spreads],
            range(first, len(labels)),
            xerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
            fmt="o",
            capsize=3,
            label=task.name,
        )
        if task.target is not None:
            left.vlines(
                task.target, first - 0.4, len(labels) - 0.6, color="tab:red", linestyle="--"
            )
        left.axhline(len(labels) - 0.5, color="0.85", linewidth=1)
    left.axvline(1, color="0.35", linewidth=1)
    left.set_yticks(range(len(labels)), labels, fontsize=8)
    left.set_ylim(len(labels) - 0.5, -0.5)
    left.set_xlabel("times faster than hfgen's greedy decoding (red: target)")
    left.set_title("Built-in model: median of calls, quartiles", fontsize=10)
    left.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.06), ncols=2)

    costs = report.random_target
    scales = sorted({e.scale for e in report.exits})
    for color, scale in zip(
        ("tab:blue", "tab:orange", "tab:green", "tab:red"), scales, strict=False
    ):
        points = sorted((e for e in report.exits if e.scale == scale), key=lambda e: e.ratio)
        ratios = [e.ratio for e in points]
        agreement = sum(e.agreement for e in points) / len(points)
        label = f"{agreement:.0%} agreement"
        right.plot(
            ratios, [e.predicted for e in points], "--", color=color, label=f"{label}, predicted"
        )
        spreads = [e.result.gain(e.greedy) for e in points]
        right.errorbar(
            ratios,
            [s.median for s in spreads],
            yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
            fmt="o",
            color=color,
            capsize=3,
            label=f"{label}, measured",
        )
    right.axhline(1, color="0.35", linewidth=1)
    right.set_xlim(left=0)
    right.set_xlabel("cost of a draft step / cost of a step of the model")
    right.set_ylabel("times faster than greedy")
    right.set_title(
        f"Random Llama, 135M, early exit, drafts of {N_DRAFTED}\n"
        f"(verifying {N_DRAFTED + 1} tokens costs {costs.relative(N_DRAFTED + 1):.2f} of one)",
        fontsize=10,
    )
    right.grid(color="0.92")
    legend_below(right, columns=3)
    save(figure, path, dpi=130)


def write(report: Report, folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    return output.write(
        folder,
        report.size.name,
        markdown(report),
        as_object(report),
        lambda path: plot(report, path),
        indent=None,
    )


def measure(
    size: Size,
    random: Callable[[], Any] = random_135m,
    advance: Callable[[str], None] = lambda name: None,
) -> Report:
    """Everything; ``random`` makes the random ``Subject``. ``advance`` is told what was run."""
    facts = machine()
    with frozen_garbage():
        builtin = measure_builtin(size, advance)
        subject = random()
        exits, costs = measure_random(subject.model, subject.prompt, size, advance)
    return Report(size, builtin, exits, costs, facts)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of all tasks of the built-in model.")] = 5,
    random_rounds: Annotated[int, typer.Option(min=1, help="Of the random model.")] = 3,
    optimize: Annotated[bool, typer.Option(help="Measure models that were prepared so.")] = False,
    out: OutOption = RESULTS,
) -> None:
    """Measure speculation on one thread; exit code 1 if any way gives other tokens."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size, console = Size(rounds, random_rounds, optimize=optimize), Console()
    n_inputs = 3 * size.texts + 4
    total = n_inputs * (rounds + 1) + len(size.scales) * (random_rounds + 1)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between the calls, not during them.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=total)
        try:
            report = measure(
                size,
                advance=lambda name: progress.update(
                    bar, advance=1, description=name, refresh=True
                ),
            )
        except UnequalTokensError as error:
            console.print(f"[red]Other tokens:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
    console.print(Markdown(write(report, out)))
    console.print(f"Written to {out}: {size.name}.md, {size.name}.json, {size.name}.png.")


if __name__ == "__main__":
    typer.run(main)
