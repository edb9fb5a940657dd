"""Write the values of real calls into the pages: ``python -m learn.show``.

Between ``<!-- values -->`` and ``<!-- end -->``, a page shows lines of the twin beside what they
computed with hfgen's built-in model; between ``<!-- number -->`` and ``<!-- end -->``, what was
counted in a call. A test compares the pages with what this file would write.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

import hfgen

from .lessons import FOLDER, LESSONS, modules, sources


class Table(NamedTuple):
    """Some lines of a function beside their values."""

    function: str
    columns: dict[str, int]  # heading -> which run of each line: 0 is its first
    call: Callable[[ModuleType], Any]  # makes a call, given the twin after the lesson
    only: str = ""  # a regular expression: which lines


# ---------------------------------------------------------------- the calls

AREA = "def area(width, height):\n    return width *"
IMPORTS = "import sys\nimport sys\nimport"
LISTS = "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1,"


@cache
def builtin() -> tuple[Any, Any]:
    """The model and the tokenizer of all calls."""
    return hfgen.builtin_model()


def run(twin: ModuleType, *texts: str, **options: Any) -> Tensor:
    """Generate after some texts, padded on the left."""
    model, tokenizer = builtin()
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
    return twin.generate(model, inputs["input_ids"], inputs["attention_mask"], **options)


def ids_of(text: str) -> Tensor:
    return builtin()[1](text, return_tensors="pt")["input_ids"][0]


def call_stream(twin: ModuleType) -> None:
    for _ in twin.stream(builtin()[0], ids_of(AREA)[None], max_new_tokens=3):
        pass


def call_serve(twin: ModuleType) -> None:
    prompts = [ids_of(text) for text in (AREA, "import os\n", "x = [")]
    for _ in twin.serve(builtin()[0], prompts, max_rows=3, max_new_tokens=3):
        pass


def grammar(twin: ModuleType, first: str, separator: str) -> Any:
    """A list of numbers with a separator, behind ``first``."""
    model, tokenizer = builtin()
    vocabulary = range(model.config.vocab_size)
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in vocabulary]
    digit = twin.chars("0123456789")
    item = twin.seq(digit, twin.seq(twin.star(digit), twin.chars(separator)))
    return twin.Grammar(twin.seq(twin.chars(first), twin.seq(item, twin.star(item))), texts)


def call_grammar(twin: ModuleType) -> None:
    run(twin, "sizes =", grammar=grammar(twin, " [(", ","), max_new_tokens=4)


def call_seeds(twin: ModuleType) -> None:
    options = {"do_sample": True, "seed": 7, "max_new_tokens": 1}
    run(twin, AREA, **options)
    run(twin, AREA, "import os\n", **options)


def call_exact(twin: ModuleType) -> None:
    with twin.ExactRows():
        run(twin, AREA, "import os\n", max_new_tokens=1)


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
#: Page -> number of the lesson, and its tables.
TABLES = {
    "README": [
        Table(
            "forward",
            {"prefill": 0, "next step": 1},
            lambda twin: run(twin, AREA, "import os\n", max_new_tokens=2),
        ),
        Table(
            "greedy_or_sample",
            {"first step": 0, "next step": 1},
            lambda twin: run(twin, AREA, "import os\n", max_new_tokens=2),
        ),
    ],
    LESSONS[0]: [
        Table("stream", {"first token": 0, "second": 1, "third": 2}, call_stream, "for|yield")
    ],
    LESSONS[1]: [
        Table(
            "process",
            {"first row": 0, "second": 1, "third": 2, "fourth": 3},
            lambda twin: run(twin, IMPORTS, repetition_penalty=1.2, max_new_tokens=1, **SAMPLING),
            "for|scores =",
        )
    ],
    LESSONS[2]: [
        Table(
            "prepare",
            {"value": 0},
            lambda twin: run(twin, AREA, "import os\n", num_return_sequences=4, max_new_tokens=1),
        )
    ],
    LESSONS[3]: [
        Table(
            "GrowingLayer.update",
            {"prefill": 0, "next step": 8, "when the buffer is full": 8 * 16},
            lambda twin: run(twin, AREA, max_new_tokens=18),
            "length|end|buffer =",
        )
    ],
    LESSONS[4]: [
        Table(
            "drafted_steps",
            {"first round": 0, "second": 1, "third": 2},
            lambda twin: run(twin, LISTS, prompt_lookup_num_tokens=4, max_new_tokens=12),
            "n_left|draft =|logits =|crop",
        )
    ],
    LESSONS[5]: [
        Table(
            "Batch.join", {"third prompt joins": 0, "second prompt joins": 1}, call_serve, "missing"
        )
    ],
    LESSONS[6]: [
        Table(
            "follow_grammar",
            {"first token": 0, "second": 1, "third": 2},
            call_grammar,
            "text|masks.|return",
        )
    ],
    LESSONS[7]: [
        Table("gumbel", {"alone": 0, "with a neighbour": 1}, call_seeds, "^(seeds|bits|return)")
    ],
    LESSONS[8]: [
        Table(
            "attention_by_queries",
            {"last token of the padded row": -1},
            call_exact,
            r"^for row|seen|scores|result\[",
        )
    ],
}


# ---------------------------------------------------------------- what is counted


def forwards(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """Make a call; return the rows and columns of each of its forward passes."""
    shapes: list[tuple[int, int]] = []
    handle = builtin()[0].register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    call()
    handle.remove()
    return shapes


def count_streaming(twin: ModuleType) -> str:
    events = twin.stream(builtin()[0], ids_of(AREA)[None], max_new_tokens=24)
    first = len(forwards(lambda: next(events)))
    rest = len(forwards(lambda: list(events)))
    return (
        f"The first of {1 + rest} tokens is there after {first} forward pass, where `generate` "
        f"needs {first + rest}."
    )


def count_processors(twin: ModuleType) -> str:
    model, _ = builtin()
    batch = twin.Batch(model, ids_of(IMPORTS)[None], torch.ones_like(ids_of(IMPORTS)[None]))
    config = twin.Config(**SAMPLING)
    left = (twin.process(twin.forward(model, batch), batch, config) > -torch.inf).sum()
    return (
        f"After the prompt of the table below, temperature {config.temperature}, top-k "
        f"{config.top_k} and top-p {config.top_p} leave {left} of the {model.config.vocab_size:,} "
        "tokens of the built-in model."
    )


def count_prefill(twin: ModuleType) -> str:
    prompt, n = ids_of(AREA * 8), 16
    shapes = forwards(
        lambda: twin.generate(
            builtin()[0], prompt[None], num_return_sequences=n, max_new_tokens=8, do_sample=True
        )
    )
    forwarded = sum(rows * columns for rows, columns in shapes)
    without = forwarded + (n - 1) * len(prompt)
    return (
        f"{n} samples of 8 tokens after a prompt of {len(prompt)} tokens: {forwarded:,} tokens are "
        f"forwarded; without the lesson, {without:,}."
    )


def count_copies(twin: ModuleType) -> str:
    layer, n, copied, buffers = twin.GrowingLayer(), 1000, 0, set()
    for length in range(n):
        layer.update(*torch.zeros(2, 1, 1, 1, 1))
        if layer.key_buffer.data_ptr() not in buffers:
            buffers.add(layer.key_buffer.data_ptr())
            copied += length
    return (
        f"A text of {n:,} tokens: concatenation copies old tokens {n * (n - 1) // 2:,} times, the "
        f"buffer {copied:,} times."
    )


def count_drafts(twin: ModuleType) -> str:
    prompt, n = ids_of(LISTS)[None], 32
    shapes = forwards(
        lambda: twin.generate(builtin()[0], prompt, prompt_lookup_num_tokens=4, max_new_tokens=n)
    )
    return f"{n} greedy tokens after the prompt of the table below: {len(shapes)} forward passes instead of {n}."


PROMPTS = [
    "import os, sys\nimport", "def f(x):\n    return", "x = [1, 2,", "for name in",
    "class Stack:\n    def __init__(self", "print(", "try:\n    value =", "assert", "if not",
    "    raise ValueError(", "while", "with open(path) as",
]  # fmt: skip


def count_rows(twin: ModuleType) -> str:
    """Count the rows of all forward passes: of batches one after the other, and of ``serve``."""
    model, tokenizer = builtin()
    newline = tokenizer("\n")["input_ids"][-1]
    options = {"eos_token_id": newline, "max_new_tokens": 40}
    groups = [PROMPTS[i : i + 4] for i in range(0, len(PROMPTS), 4)]
    fixed = forwards(lambda: [run(twin, *group, **options) for group in groups])
    prompts = [ids_of(text) for text in PROMPTS]
    joined = forwards(lambda: list(twin.serve(model, prompts, max_rows=4, **options)))
    return (
        f"{len(PROMPTS)} prompts, each completed to the end of its line, 4 at a time: "
        f"{sum(rows for rows, _ in fixed)} rows are forwarded in batches that wait for their longest "
        f"row, {sum(rows for rows, _ in joined)} if rows leave and join."
    )


def count_masks(twin: ModuleType) -> str:
    numbers = grammar(twin, "[", ",")
    run(twin, "sizes = ", grammar=numbers, max_new_tokens=64)
    return (
        f"64 tokens that have to be a list of numbers, such as `[12,3,40,`, are in "
        f"{len(numbers.masks)} states, so {len(numbers.masks)} masks are computed."
    )


def count_equal(twin: ModuleType) -> str:
    """Count the rows that have the same tokens in a batch of eight and alone."""

    def n_equal(seed: int | None) -> int:
        options = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, "seed": seed}
        torch.manual_seed(0)
        together, equal = run(twin, *PROMPTS[:8], **options)[:, -16:], 0
        for request, text in enumerate(PROMPTS[:8]):
            config, batch = twin.prepare(builtin()[0], ids_of(text)[None], None, options)
            batch.requests += request
            torch.manual_seed(0)
            with torch.no_grad():
                alone = [tokens for tokens, _ in twin.steps(builtin()[0], batch, config)]
            equal += torch.equal(torch.cat(alone), together[request])
        return equal

    return (
        f"8 prompts, 16 sampled tokens each: {n_equal(None)} of the 8 rows are in a batch what they "
        f"are alone; with a seed, {n_equal(7)}."
    )


NUMBERS = {
    LESSONS[0]: count_streaming,
    LESSONS[1]: count_processors,
    LESSONS[2]: count_prefill,
    LESSONS[3]: count_copies,
    LESSONS[4]: count_drafts,
    LESSONS[5]: count_rows,
    LESSONS[6]: count_masks,
    LESSONS[7]: count_equal,
}


# ---------------------------------------------------------------- what lines compute


def head(statement: ast.stmt) -> range:
    """The lines of a statement; of a loop or a condition those before its body."""
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1)


def parts(target: ast.expr) -> list[str]:
    """The expressions that are assigned to."""
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return [ast.unparse(each) for each in targets]


def results(statement: ast.stmt) -> list[str]:
    """The expressions that show what a statement has done."""
    if isinstance(statement, ast.Assign):
        return parts(statement.targets[0])
    if isinstance(statement, ast.AugAssign | ast.For):
        return parts(statement.target)
    if isinstance(statement, ast.If | ast.While):
        return [ast.unparse(statement.test)]
    called = getattr(getattr(statement, "value", None), "func", None)
    if isinstance(statement, ast.Expr) and isinstance(called, ast.Attribute):
        return [ast.unparse(called.value)]  # a method changes its object
    return []


def record(source: str, code: CodeType, call: Callable[[], Any]) -> dict[ast.stmt, list[str]]:
    """Make a call; return for each statement of a function the descriptions of its values, in turn.

    ``source`` is the text of the whole module, ``code`` is that of the function.
    """
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    of_line = {
        line: each
        for each in statements
        if not isinstance(each, ast.FunctionDef)
        for line in head(each)
    }
    seen: dict[ast.stmt, list[str]] = {}
    running: dict[FrameType, ast.stmt] = {}

    def end_statement(frame: FrameType) -> None:
        statement = running.pop(frame, None)
        if statement is not None and (names := results(statement)):
            values = [eval(name, frame.f_globals, frame.f_locals) for name in names]
            seen.setdefault(statement, []).append(described(names, values))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        statement = of_line.get(frame.f_lineno)
        if event == "line" and statement is not running.get(frame):
            end_statement(frame)
            running[frame] = statement
        elif event == "return" and re.match("return|yield", ast.unparse(statement)):
            seen.setdefault(statement, []).append(described([""], [argument]))
            del running[frame]
        elif event == "return":
            end_statement(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace if frame.f_code is code else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


# ---------------------------------------------------------------- Markdown


def spelled(token: int) -> str:
    text = builtin()[1].decode([token]).replace(" ", "␣").replace("\n", "↵").replace("|", "\\|")
    return f"`{text}`"


def described(names: list[str], values: list[Any]) -> str:
    return "; ".join(filter(None, map(describe, names, values)))


def describe(name: str, value: Any) -> str:
    """Write a value for a page. ``name`` is the expression that it is the value of."""
    if isinstance(value, Tensor):
        return f"`{tuple(value.shape)}`{content(name, value)}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return described([name] * len(value), list(value))
    if isinstance(value, list):
        return ", ".join(describe(name, each) for each in value[:2])
    if isinstance(value, Cache):
        return f"`{value.get_seq_length()}` columns"
    if hasattr(value, "cache"):
        return f"ids `{tuple(value.ids.shape)}`, cache of `{value.cache.get_seq_length()}` columns"
    if hasattr(value, "option"):
        return f"`{value.option}`"
    if isinstance(value, bool | int | str):
        return f"`{value!r}`"
    return ""


def content(name: str, value: Tensor) -> str:
    """Write what is in a tensor, as far as it fits: tokens, the best ones of scores, or numbers."""
    flat = value.flatten().tolist() if value.numel() <= 16 else []
    if value.ndim and value.shape[-1] == builtin()[0].config.vocab_size:
        row = value.reshape(-1, value.shape[-1])[0]
        if value.dtype == torch.bool:
            return f", {row.sum()} of {len(row)}"
        if not value.is_floating_point():
            return ""
        best = " ".join(map(spelled, row.topk(3).indices.tolist()))
        n_left = int((row > -torch.inf).sum())
        return f", best {best}" + (f" of {n_left}" if n_left < len(row) else "")
    if value.dtype == torch.bool and len(flat) > 2:
        return f", {sum(flat)} of {len(flat)}"
    if re.search(r"\b(ids|tokens?|draft)$", name) and flat:
        return " " + " ".join(map(spelled, flat))
    return f" `{value.tolist()}`" if flat and not value.is_floating_point() else ""


def written(table: Table, source: str, twin: ModuleType) -> str:
    """The table in Markdown."""
    function: Any = twin
    for name in table.function.split("."):
        function = getattr(function, name)
    rows = [[f"`{table.function}`", *table.columns], ["---"] * (1 + len(table.columns))]
    seen = record(source, inspect.unwrap(function).__code__, lambda: table.call(twin))
    for statement in sorted(seen, key=lambda each: each.lineno):
        lines = [source.splitlines()[i - 1] for i in head(statement)]
        text = " ".join(re.sub(r"(^|  )# .*", "", line.strip()) for line in lines).strip()
        values = seen[statement]
        cells = [values[i] if i < len(values) else "" for i in table.columns.values()]
        if any(cells) and re.search(table.only, text):
            rows.append([f"`{text}`".replace("|", "\\|"), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def replaced(text: str, mark: str, content: str) -> str:
    """Put ``content`` between a mark and its end."""
    before, start, rest = text.partition(f"<!-- {mark} -->\n")
    end = rest[rest.index("<!-- end -->") :]
    return f"{before}{start}\n{content}\n{end}"


def updated(page: str) -> str:
    """Return the text of a page with the present values."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    number = 1 + LESSONS.index(page) if page in LESSONS else 0
    twin = modules()[number]
    tables = [written(table, sources()[number], twin) for table in TABLES[page]]
    text = replaced(text, "values", "\n".join(tables))
    return replaced(text, "number", NUMBERS[page](twin) + "\n") if page in NUMBERS else text


if __name__ == "__main__":
    for page in TABLES:
        (FOLDER / f"{page}.md").write_text(updated(page), encoding="utf-8")
