"""Thousands of requests through one engine, with cancels, failures and all kinds of options: is memory flat?

``python -m benchmarks.engine_soak`` writes ``benchmarks/results/engine_soak.md``, ``.json`` and ``.png``. It
fails if a request is lost, a result is not what its solo call gives, or memory grows.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from torch import Tensor

import hfgen
from benchmarks import output
from benchmarks.output import RESULTS, OutOption
from benchmarks.plots import save, subplots
from benchmarks.side_by_side import machine
from hfgen.engine import Engine, EngineRequest
from hfgen.engine.errors import ResultTakenError
from hfgen.engine.request import SequenceOutput

#: Live tensors and the resident set may be larger in the last fifth than in the second by this share.
GROWTH = 0.03

#: Scores closer than this are a near-tie: rounding decides between them.
NEAR = 1e-3

#: Requests that are waiting or decoding at once.
OUTSTANDING = 96

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3, "stop_strings": ["\n"]},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "min_p": 0.1, "typical_p": 0.9, "frequency_penalty": 0.5},
    {"do_sample": True, "num_return_sequences": 3},
    {"logprobs": 3, "stop_strings": ["):", "\n\n"]},
    {"num_beams": 3},
    {"num_beams": 2, "do_sample": True},
    {"prompt_lookup_num_tokens": 4},
    {"stop_token_ids": [13, 14, 15], "min_new_tokens": 2},
    {"grammar": hfgen.grammar.regex("[a-z_]{1,8}\\n")},
)


class Planned(Exception):
    """What a request, or the model, is to fail with."""


class Fails:
    """Raises when it is called for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        self.at = at

    def count(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise Planned(type(self).__name__)


class Processor(Fails):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.count()
        return scores


class Criterion(Fails):
    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count()
        return torch.zeros(len(ids), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; ``trouble`` befalls it after so many steps, calls or milliseconds, if anything does."""

    prompt: str
    options: dict[str, Any]
    trouble: str | None
    at: int

    @classmethod
    def draw(cls, rng: random.Random, lines: list[str]) -> Asked:
        first = rng.randrange(len(lines) - 6)
        prompt = "\n".join(lines[first : first + rng.randint(1, 4)])[: rng.randint(4, 160)]
        options = {
            "max_new_tokens": rng.choice((1, 2, 4, 8, 12, 16, 24)),
            "seed": rng.randrange(2**40),
            **rng.choice(WAYS),
        }
        troubles = [None] * 14 + ["cancel", "cancel", "cancel", "processor", "criterion", "timeout"]
        return cls(prompt or "x", options, rng.choice(troubles), rng.randint(1, 20))

    @property
    def own(self) -> dict[str, Any]:
        """What of its own raises."""
        if self.trouble == "processor":
            return {"logits_processor": [Processor(self.at)]}
        return {"stopping_criteria": [Criterion(self.at)]} if self.trouble == "criterion" else {}


@dataclass(slots=True)
class Sample:
    """What there is after ``n_done`` requests, rows that decode included."""

    n_done: int
    seconds: float
    rss: int
    #: Bytes of all tensors that are alive, but for the model's and those of the prefix cache.
    tensors: int
    #: Of these, bytes of a row that decodes.
    rows: int
    objects: int


@dataclass(slots=True)
class Soak:
    """One run; ``outcomes`` counts the requests by how they ended."""

    n_requests: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0
    n_compared: int = 0
    n_equal: int = 0
    n_near: int = 0
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def mean(self, name: str, share: tuple[float, float]) -> float:
        """The mean of a field over a part of the run."""
        values = [
            float(getattr(sample, name))
            for sample in self.samples
            if share[0] <= sample.n_done / self.n_requests < share[1]
        ]
        return sum(values) / max(len(values), 1)


def tensor_bytes(left_out: set[int]) -> tuple[int, int]:
    """Bytes of the storages that are alive, each once; and how many objects the collector tracks."""
    gc.collect()
    objects = gc.get_objects()
    storages = {}
    for each in objects:
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(n for key, n in storages.items() if key not in left_out), len(objects)


class Runner:
    """The requests of a soak, on one engine."""

    def __init__(self, n_requests: int, n_compared: int, seed: int) -> None:
        self.model, self.tokenizer = hfgen.builtin_model()
        self.model = hfgen.mix_into(self.model)
        self.rng = random.Random(seed)
        self.lines = inspect.getsource(argparse).splitlines()
        self.soak = Soak(n_requests)
        self.prefixes = hfgen.PrefixCache(max_bytes=8 * 2**20)
        self.engine = Engine(self.model, self.tokenizer, prefix_cache=self.prefixes)
        self.compared = set(self.rng.sample(range(n_requests), min(n_compared, n_requests)))
        #: What is compared at the end: what was asked, its sequences, and whether they are whole.
        self.kept: list[tuple[Asked, list[SequenceOutput], bool]] = []
        self.of_model = {
            tensor.untyped_storage()._cdata
            for tensor in [*self.model.parameters(), *self.model.buffers()]
        }
        self.failing = {self.rng.randrange(10 * n_requests) for _ in range(n_requests // 500)}
        self.n_forwards = 0
        #: The open requests, with their number, what was asked, and the step in which they were added.
        self.open: dict[str, tuple[EngineRequest, int, Asked, int]] = {}

    def run(self) -> Soak:
        soak, engine, started = self.soak, self.engine, time.monotonic()
        hook = self.model.register_forward_pre_hook(self._count_forward)
        n_added = n_done = n_told = 0
        while n_done < soak.n_requests:
            while n_added < soak.n_requests and len(self.open) < OUTSTANDING:
                self._add(n_added)
                n_added += 1
            for request, _, asked, at in list(self.open.values()):
                if asked.trouble == "cancel" and engine.stats.n_steps == at + asked.at:
                    request.cancel()
            ended = []
            for event in engine.step():
                n_told += len(event.token_ids)
                if event.request.done and event.request.id in self.open:
                    ended.append(self.open.pop(event.request.id))
            for request, number, asked, _ in ended:
                self._take(request, number, asked)
            before, n_done = n_done, n_done + len(ended)
            if n_done // 100 > before // 100:
                self._sample(n_done, started)
        hook.remove()
        soak.seconds = time.monotonic() - started
        self._check_end(n_told)
        for kept in self.kept:
            self._compare(*kept)
        return soak

    def _count_forward(self, *_: Any) -> None:
        self.n_forwards += 1
        if self.n_forwards in self.failing:
            raise Planned("forward")

    def _add(self, number: int) -> None:
        asked = Asked.draw(self.rng, self.lines)
        timeout = asked.at / 100 if asked.trouble == "timeout" else None
        options = asked.options | asked.own
        request = self.engine.add(asked.prompt, timeout=timeout, **options)
        self.open[request.id] = (request, number, asked, self.engine.stats.n_steps)

    def _take(self, request: EngineRequest, number: int, asked: Asked) -> None:
        """Take a result, and count it."""
        output = request.result()
        try:
            request.result()
            self.soak.problems.append(f"request {number} was handed over twice")
        except ResultTakenError:
            pass
        self.soak.outcomes[str(output.finish_reason)] += 1
        self.soak.n_tokens += sum(len(sequence.token_ids) for sequence in output.sequences)
        if output.error is not None and not isinstance(output.error, Planned):
            self.soak.problems.append(f"request {number}: {output.error!r}")
        if number in self.compared:
            is_whole = output.generate_output is not None
            self.kept.append((asked, output.sequences, is_whole))

    def _sample(self, n_done: int, started: float) -> None:
        stored = self.prefixes.stats.bytes
        tensors, objects = tensor_bytes(self.of_model)
        rss = psutil.Process().memory_info().rss
        rows = self.engine.n_rows
        seconds = time.monotonic() - started
        self.soak.samples.append(Sample(n_done, seconds, rss, tensors - stored, rows, objects))
        typer.echo(f"{n_done:,} requests in {seconds:,.0f} s, {rss / 2**20:,.0f} MiB", err=True)

    def _check_end(self, n_told: int) -> None:
        """Nothing is left in the engine, and its counts are those of the results."""
        soak, engine, stats = self.soak, self.engine, self.engine.stats
        left = (engine.n_rows, engine.n_waiting, len(engine.requests), len(engine.steps.joined))
        if any(left) or engine.has_work or engine.scheduler.n_bytes:
            soak.problems.append(f"rows, waiting, requests and batches that are left: {left}")
        n_ended = stats.n_finished + stats.n_failed + stats.n_cancelled
        if not n_ended == soak.outcomes.total() == soak.n_requests:
            soak.problems.append(f"{n_ended} ended and {soak.outcomes.total()} were handed over")
        if not soak.n_tokens == n_told == stats.decoded_tokens:
            soak.problems.append(f"tokens: {soak.n_tokens}, {n_told}, {stats.decoded_tokens}")
        for name in ("tensors", "rss"):
            early, late = soak.mean(name, (0.2, 0.4)), soak.mean(name, (0.8, 1.0))
            if late > early * (1 + GROWTH):
                soak.problems.append(f"{name} grew from {early:,.0f} to {late:,.0f} bytes")

    def _compare(self, asked: Asked, sequences: list[SequenceOutput], is_whole: bool) -> None:
        """Whether each sequence is that of the solo call, or a beginning of it if the request was cut off."""
        inputs = self.tokenizer(asked.prompt, return_tensors="pt")
        own = {"tokenizer": self.tokenizer, "return_dict_in_generate": True, "output_scores": True}
        solo = self.model.generate(**inputs, **own, **asked.options)
        self.soak.n_compared += 1
        for row, sequence in enumerate(sequences):
            there = solo.sequences[row, inputs.input_ids.shape[1] :].tolist()
            here = sequence.token_ids
            is_same = here == there[: len(here)] and (
                not is_whole
                or (sequence.text, sequence.finish_reason)
                == (solo.texts[row], solo.finish_reasons[row])
            )
            if is_same:
                continue
            step = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
            best, second = solo.scores[step][row].float().topk(2).values.tolist()
            if best - second <= NEAR and not asked.options.get("do_sample"):
                self.soak.n_near += 1
                return
            self.soak.problems.append(f"{asked}: {here} beside {there}")
            return
        self.soak.n_equal += 1


# ------------------------------------------------------------ what is written


def report(soak: Soak) -> str:
    mib = 2.0**20
    lines = [
        "# Soak of the engine",
        "",
        f"{soak.n_requests:,} requests on the built-in model, {OUTSTANDING} at a time, with a prefix cache of 8 MiB, in "
        f"{soak.seconds / 60:.0f} minutes: {soak.n_tokens:,} tokens.",
        "",
        "| ended as | requests |",
        "|---|---:|",
        *(f"| {name} | {n:,} |" for name, n in soak.outcomes.most_common()),
        f"| together | {soak.outcomes.total():,} |",
        "",
        f"Compared with solo calls: {soak.n_compared}; equal {soak.n_equal}, other tokens from a near-tie on "
        f"{soak.n_near}. Requests that were cut off have a beginning of their solo call's tokens.",
        "",
        "| memory, mean | second fifth | last fifth |",
        "|---|---:|---:|",
    ]
    for name, what in (("tensors", "live tensors, MiB"), ("rss", "resident set, MiB")):
        early, late = soak.mean(name, (0.2, 0.4)) / mib, soak.mean(name, (0.8, 1.0)) / mib
        lines.append(f"| {what} | {early:,.1f} | {late:,.1f} |")
    early, late = soak.mean("objects", (0.2, 0.4)), soak.mean("objects", (0.8, 1.0))
    lines += [
        f"| Python objects | {early:,.0f} | {late:,.0f} |",
        "",
        "Live tensors are those besides the weights and the prefix cache.",
        "",
        f"Problems: {len(soak.problems) or 'none'}.",
        *(f"- {problem}" for problem in soak.problems[:20]),
        "",
        "![memory and rows over requests](engine_soak.png)",
        "",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in machine().items()),
    ]
    return "\n".join(lines) + "\n"


def plot(soak: Soak, path: Path) -> None:

    figure, (above, below) = subplots(2, 1, figsize=(7, 4.2), sharex=True, layout="constrained")
    done = [sample.n_done for sample in soak.samples]
    above.plot(done, [sample.rss / 2**20 for sample in soak.samples], label="resident set")
    above.plot(done, [sample.tensors / 2**20 for sample in soak.samples], label="live tensors")
    above.set_ylim(bottom=0)
    above.set_ylabel("MiB")
    below.plot(done, [sample.rows for sample in soak.samples], color="#9aa5b1")
    below.set_ylim(bottom=0)
    below.set_ylabel("rows")
    below.set_xlabel("requests that have ended")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path, dpi=120)


def main(
    requests: Annotated[int, typer.Option(min=500, help="How many.")] = 10_000,
    compared: Annotated[int, typer.Option(min=0, help="Of these, compared with solo calls.")] = 300,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    out: OutOption = RESULTS,
) -> None:
    """Run the requests, check what has to hold, and write the report."""
    torch.set_num_threads(1)
    soak = Runner(requests, compared, seed).run()
    raw = asdict(soak) | {"outcomes": dict(soak.outcomes), "machine": machine()}
    print(output.write(out, "engine_soak", report(soak), raw, lambda path: plot(soak, path)))
    sys.exit(bool(soak.problems))


if __name__ == "__main__":
    typer.run(main)
