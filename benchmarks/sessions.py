"""What does a session save beside calls of ``generate`` anew? The programs of docs/sessions.md, run both ways.

``python -m benchmarks.sessions`` writes ``benchmarks/results/sessions.{md,json}``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json.decoder
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from .output import RESULTS, OutOption, ThreadsOption, set_threads, write
from .side_by_side import Spread, described, frozen_garbage, machine

PAGE = Path(__file__).parent.parent / "docs" / "sessions.md"
PROGRAMS = ("banned phrases", "best of eight", "tree search", "tool loop")
WAYS = ("session", "anew")
#: As the page has them.
BANNED = ["list of", "relative"]
#: Tokens of the second prompt: the first one behind a file of source.
LONG = 448


class Anew:
    """The operations of a session that the programs use, without a cache between two of them.

    Each ``step`` is a streamed call of ``generate`` with all ids so far; ``logits`` is a forward of them.
    """

    def __init__(self, model: Any, tokenizer: Any, input_ids: torch.Tensor, **options: Any) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, input_ids[0].tolist()
        self.max_new_tokens = options.pop("max_new_tokens")
        asked = {n: v for n, v in options.items() if n != "attention_mask"}
        self.options = asked | {"return_dict_in_generate": True}
        self.tokens: list[list[int]] = [[]]
        self.has_ended = [False]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> list[str]:
        return [self.tokenizer.decode(tokens) for tokens in self.tokens]

    def batch(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Ids and mask of some rows, padded on the left."""
        ids = [torch.tensor(self.prompt + self.tokens[row]) for row in rows]
        masks = [torch.ones_like(each) for each in ids]
        return {
            name: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side="left")
            for name, parts in (("input_ids", ids), ("attention_mask", masks))
        }

    @property
    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            outputs = self.model(**self.batch(list(range(len(self)))))
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def step(self, n: int) -> Iterator[Any]:
        most = self.max_new_tokens
        rows = [r for r in range(len(self)) if not self.has_ended[r] and len(self.tokens[r]) < most]
        if not rows:
            return
        n = min(n, most - min(len(self.tokens[row]) for row in rows))
        call = self.batch(rows) | self.options | {"tokenizer": self.tokenizer, "max_new_tokens": n}
        with self.model.stream(**call) as stream:
            for event in stream:
                row = rows[event.row]
                self.tokens[row] = self.tokens[row] + list(event.token_ids)
                self.has_ended[row] = event.finish_reason not in (None, "length")
                yield dataclasses.replace(event, row=row)

    def keep(self, rows: list[int]) -> Anew:
        other = copy.copy(self)
        other.tokens = [self.tokens[row] for row in rows]
        other.has_ended = [self.has_ended[row] for row in rows]
        return other

    def fork(self, n: int) -> Anew:
        return self.keep([row for row in range(len(self)) for _ in range(n)])

    def rewind(self, n: int) -> None:
        self.tokens = [tokens[: len(tokens) - n] for tokens in self.tokens]
        self.has_ended = [False] * len(self)

    def feed(self, tokens: list[Any]) -> None:
        ids = [self.tokenizer(t).input_ids if isinstance(t, str) else t for t in tokens]
        self.tokens = [old + new for old, new in zip(self.tokens, ids, strict=True)]
        self.has_ended = [False] * len(self)


@dataclasses.dataclass(slots=True)
class Numbers:
    """Of one program and one way: seconds of each round, in all and in forwards; what the last one forwarded."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    in_forwards: list[float] = dataclasses.field(default_factory=list)
    n_forwards: int = 0
    n_tokens: int = 0


class Counter:
    """Counts a model's forwards, and their tokens and seconds."""

    def __init__(self, model: Any) -> None:
        self.clear()
        before, after = self._before, self._after
        for hook in (before, after):
            hook.__func__.is_row_wise = True  # rows may share forwards
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    def clear(self) -> None:
        self.n_forwards = self.n_tokens = 0
        self.seconds = 0.0

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.n_forwards += 1
        self.n_tokens += kwargs["input_ids"].numel()
        self.start = time.perf_counter()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.seconds += time.perf_counter() - self.start


def measure(n_rounds: int) -> dict[int, dict[str, dict[str, Numbers]]]:
    """Length of the prompt -> program -> way -> numbers; the ways take turns, program by program."""
    setup, *programs = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(setup, names)
    names["report"] = lambda name: None
    model, tokenizer, short = names["model"], names["tokenizer"], names["prompt"]
    model._forward_pre_hooks.clear()  # the page's own counter
    counter, session = Counter(model), model.session
    source = tokenizer(Path(json.decoder.__file__).read_text("utf-8"), return_tensors="pt")
    n_before = LONG - short["input_ids"].shape[1]
    ids = torch.cat([source.input_ids[:, :n_before], short["input_ids"]], dim=1)
    long = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    results: dict[int, dict[str, dict[str, Numbers]]] = {}
    for prompt in (short, long):
        found = {name: {way: Numbers() for way in WAYS} for name in PROGRAMS}
        banned = BANNED
        if prompt is long:  # words that the model would write
            plain = model.generate(**prompt, max_new_tokens=48)[0, ids.shape[1] :]
            banned = tokenizer.decode(plain).split()[4::6]
        names["prompt"] = prompt
        for turn in range(n_rounds + 1):  # the first warms up
            for name, program in zip(PROGRAMS, programs, strict=True):
                program = program.replace(repr(BANNED).replace("'", '"'), repr(banned))
                for way in WAYS if turn % 2 else reversed(WAYS):
                    model.session = session if way == "session" else _anew(model)
                    counter.clear()
                    start = time.perf_counter()
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(program, names)
                    spent, numbers = time.perf_counter() - start, found[name][way]
                    numbers.n_forwards, numbers.n_tokens = counter.n_forwards, counter.n_tokens
                    if turn:
                        numbers.seconds.append(spent)
                        numbers.in_forwards.append(counter.seconds)
        results[prompt["input_ids"].shape[1]] = found
    return results


def _anew(model: Any) -> Any:
    return lambda **arguments: Anew(model, **arguments)


def table(results: dict[int, dict[str, dict[str, Numbers]]]) -> list[str]:
    """Rows of Markdown; a session beside calls anew."""
    lines = [
        "| program, tokens of the prompt | forwards | tokens forwarded | times as fast (quartiles) | by the time of "
        "forwards alone |",
        "|---|--:|--:|--:|--:|",
    ]
    for length, found in results.items():
        for name, ways in found.items():
            ours, anew = ways["session"], ways["anew"]
            gain = Spread.of([a / b for a, b in zip(anew.seconds, ours.seconds, strict=True)])
            pairs = zip(anew.in_forwards, ours.in_forwards, strict=True)
            lines.append(
                f"| {name}, {length} | {ours.n_forwards} · {anew.n_forwards} | {ours.n_tokens:,} · "
                f"{anew.n_tokens:,} | {gain} | {Spread.of([a / b for a, b in pairs]).median:.2f} |"
            )
    return lines


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Run each program both ways, with the built-in model."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    facts = machine()
    with frozen_garbage():
        results = measure(rounds)
    text = "\n".join(
        [
            "# Sessions beside calls anew",
            "",
            *table(results),
            "",
            f"Session · `generate` anew with all ids at each step. Built-in model, float32, {described(facts)}.",
            "",
        ]
    )
    raw = {
        length: {
            name: {way: dataclasses.asdict(n) for way, n in ways.items()}
            for name, ways in found.items()
        }
        for length, found in results.items()
    }
    write(out, "sessions", text, {"machine": facts, "results": raw})
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
