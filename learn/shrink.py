"""Write the table of sizes into README.md: ``python -m learn.shrink``."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import tokenize
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from .lessons import FOLDER, LESSONS, sources

#: Methods of transformers' ``GenerationMixin`` that greedy search, sampling and beams pass through.
CALL = """generate _prepare_generation_config _prepare_special_tokens _prepare_model_inputs
_prepare_attention_mask_for_generation _prepare_position_ids_for_generation
_prepare_generated_length _prepare_cache_for_generation _get_stopping_criteria
prepare_inputs_for_generation _update_model_kwargs_for_generation _prefill _sample _beam_search
_get_top_k_continuations _get_running_beams_for_next_iteration _update_finished_beams
_check_early_stop_heuristic _beam_search_has_unfinished_sequences""".split()
MIXIN = "transformers.generation.utils.GenerationMixin"


class Idea(NamedTuple):
    """What is counted for one row of the table: dotted names of modules, classes and functions."""

    name: str
    upstream: list[str]
    hfgen: list[str]


IDEAS = [
    Idea(
        "greedy search, sampling, beams",
        [f"{MIXIN}.{name}" for name in CALL],
        [
            "hfgen.prepare.config",
            "hfgen.prepare.inputs",
            "hfgen.prepare.stages",
            "hfgen.decoding.loop",
            "hfgen.decoding.strategies.sample",
            "hfgen.decoding.strategies.beam",
            "hfgen.decoding.strategies.hypotheses",
        ],
    ),
    Idea("streaming", ["transformers.generation.streamers"], ["hfgen.streaming"]),
    Idea(
        "processors",
        ["transformers.generation.logits_process", f"{MIXIN}._get_logits_processor"],
        ["hfgen.logits.processors"],
    ),
    Idea("prefill once", [], ["hfgen.running.prompts", "hfgen.running.shared_prefix"]),
    Idea(
        "growing cache",
        ["transformers.cache_utils.DynamicLayer"],
        ["hfgen.memory.caches.growing", "hfgen.memory.caches.dynamic"],
    ),
    Idea(
        "drafts",
        [
            "transformers.generation.candidate_generator",
            f"{MIXIN}._assisted_decoding",
            f"{MIXIN}._get_candidate_generator",
        ],
        [
            "hfgen.decoding.drafters",
            "hfgen.decoding.strategies.assisted",
            "hfgen.decoding.strategies.drafted_rows",
            "hfgen.decoding.strategies.verification",
        ],
    ),
    Idea(
        "continuous batching",
        ["transformers.generation.continuous_batching"],
        ["hfgen.engine", "hfgen.memory.caches.slots"],
    ),
    Idea("grammars", [], ["hfgen.logits.grammar"]),
    Idea(
        "seeds",
        [],
        [
            "hfgen.state.seeds",
            "hfgen.state.survivors.draw",
            "hfgen.state.survivors.draws_by_uniforms",
        ],
    ),
    Idea("exact rows", [], []),
]


def find(name: str) -> Any:
    """Return the module, class or function of a dotted name."""
    module, _, rest = name, "", []
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = [last, *rest]
            if not module:
                raise
    for each in rest:
        found = getattr(found, each)
    return found


def code_lines(source: str) -> int:
    """Count the lines of code: without blank lines, comments and docstrings."""
    lines = set()
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*kinds, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def size(name: str) -> int:
    """Count the lines of code of a module, a package with all that is in it, a class or a function."""
    found = find(name)
    if hasattr(found, "__path__"):
        paths = [path for folder in found.__path__ for path in Path(folder).rglob("*.py")]
        return sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)
    return code_lines(inspect.cleandoc("\n" + inspect.getsource(found)))


def table() -> str:
    """The table in Markdown."""
    lengths = [code_lines(source) for source in sources()]
    twin = [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]
    names = ["generate.py", *(f"{lesson}.diff" for lesson in LESSONS)]
    lines = ["| idea | transformers | hfgen | the twin |", "|---|--:|--:|--:|"]
    for idea, name, n_twin in zip(IDEAS, names, twin, strict=True):
        counts = [sum(map(size, idea.upstream)), sum(map(size, idea.hfgen)), n_twin]
        cells = " | ".join(f"{n:,}" if n else "none" for n in counts)
        lines.append(f"| [{idea.name}]({name}) | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from .show import replaced

    page = FOLDER / "README.md"
    page.write_text(replaced(page.read_text("utf-8"), "sizes", table()), encoding="utf-8")
