"""Compare requests of the engine with their solo calls, on any family: ``python -m tests.parity.engine``.

Every case is one engine with random limits, and some requests with random prompts, options and times of
arrival; some are cancelled. Each has to get the tokens of its own ``generate``, and log-probabilities
within 1e-4, or to leave them at a near-tie; what was cancelled has to have the first of them. Refusals
are counted by what they say.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import hfgen
from hfgen.engine import RequestOutput
from tests.parity.family import Family
from tests.parity.harness import FAMILIES, UNSTEADY, forget_models, ours, quiet
from tests.parity.rows import NEAR, RULED_OUT, margin_of, random_config

#: Ways to decode a request, of those of ``rows.WAYS``.
WAYS = ("plain", "plain", "plain", "copies", "beams", "lookup")

#: Log-probabilities may differ by this much, and scores of beams by ``NEAR``.
TOLERANCE = 1e-4

#: Families of which a request is no solo call, in transformers neither.
ENTANGLED = {
    "rwkv": "its attention in plain torch mixes the states of all rows",
    "rag_token": "its inputs have a row per document",
    "vibevoice_asr": "its encoder adds noise of torch's generator to the sound",
}


@dataclass(frozen=True)
class EngineCase:
    """Some requests of one engine, all random by ``seed``."""

    family: str
    seed: int

    @property
    def command(self) -> str:
        """The shell command that runs this case alone."""
        return f"python -m tests.parity.engine --only {self.family}:{self.seed}"


@dataclass
class Asked:
    """One request: what it asks for, when it comes, and when it is cancelled."""

    inputs: dict[str, Any]
    config: GenerationConfig
    arrives: int
    cancelled: int | None
    solo: Any = None


def ways_of(family: Family) -> list[str]:
    return [way for way in WAYS if RULED_OUT.get(way) not in family.unsupported]


def prompt(rng: random.Random, family: Family, model: Any) -> dict[str, Any]:
    """Inputs of one row; texts of random lengths."""
    inputs = dict(family.inputs(model, 1, False, rng.randrange(1000)))
    ids = inputs.get("input_ids")
    if family.kind == "decoder" and list(inputs) == ["input_ids"] and isinstance(ids, Tensor):
        more = family.inputs(model, 1, False, rng.randrange(1000))["input_ids"]
        length = rng.choice((1, 2, rng.randint(3, 7), rng.randint(8, 14)))
        inputs["input_ids"] = torch.cat([ids, more], dim=1)[:, :length]
    return inputs


def draw(rng: random.Random, family: Family, model: Any) -> Asked:
    way = rng.choice(ways_of(family))
    config = random_config(rng, way)
    recorded = {"logprobs": rng.choice((None, None, 0, 3)), "output_scores": True}
    values = config.to_dict() | recorded | {"return_dict_in_generate": True}
    cancelled = rng.randrange(1, 12) if rng.random() < 0.1 else None
    inputs, config = prompt(rng, family, model), GenerationConfig.from_dict(values)
    return Asked(inputs, config, rng.randrange(8), cancelled)


def solo(model: Any, asked: Asked) -> Any:
    """What ``generate`` gives, or the exception."""
    try:
        return model.generate(**asked.inputs, generation_config=asked.config)
    except Exception as error:
        return error


def outputs_of(engine: hfgen.Engine, requests: list[Asked]) -> list[RequestOutput | Exception]:
    """Let the requests arrive, step by step; what each ends with."""
    found: dict[int, Any] = {}
    at, coming = 0, dict(enumerate(requests))
    while coming or engine.has_work:
        for i, asked in [(i, asked) for i, asked in coming.items() if asked.arrives <= at]:
            try:
                found[i] = engine.add(coming.pop(i).inputs, generation_config=asked.config)
            except Exception as error:
                found[i] = error
        for i, asked in enumerate(requests):
            if asked.cancelled == at and isinstance(found.get(i), hfgen.engine.EngineRequest):
                found[i].cancel()
        engine.step()
        at += 1
    return [
        entry if isinstance(entry, Exception) else entry.result()
        for _, entry in sorted(found.items())
    ]


def differences(case: EngineCase, counts: Counter[str]) -> list[str]:
    """What is not as in the solo calls."""
    rng, family = random.Random(case.seed), FAMILIES[case.family]
    model = ours(case.family)
    requests = [draw(rng, family, model) for _ in range(rng.randint(2, 6))]
    for asked in requests:
        asked.solo = solo(model, asked)
    options = {
        "max_rows": rng.choice((2, 4, 32)),
        "prefill_tokens": rng.choice((1, 3, 64)),
        "policy": rng.choice(("fcfs", "srpt", "priority")),
    }
    try:
        engine = hfgen.Engine(model, **options)
    except (TypeError, ValueError) as error:
        counts[f"refused: {family.name}: {error!s:.120}"] += len(requests)
        return []
    with engine:
        outputs = outputs_of(engine, requests)
        left = engine.n_rows, len(engine.steps.joined), len(engine.steps.requests)
    found = [f"rows, batches and requests that are left: {left}"] if any(left) else []
    for i, (asked, output) in enumerate(zip(requests, outputs, strict=True)):
        found += [f"request {i}: {line}" for line in compare(family, asked, output, counts)]
    return [*found, f"{options}"] if found else []


def compare(
    family: Family, asked: Asked, output: RequestOutput | Exception, counts: Counter[str]
) -> list[str]:
    """How a request differs from its solo call."""
    error = output if isinstance(output, Exception) else output.error
    counts["requests"] += 1
    if isinstance(asked.solo, Exception):
        counts["of these, the solo call raises"] += 1
        is_same = type(error) is type(asked.solo) or asked.cancelled is not None
        return [] if is_same else [f"{error!r} beside the solo {asked.solo!r}"]
    if error is not None:
        if isinstance(error, ValueError | TypeError | NotImplementedError):
            counts[f"refused: {family.name}: {error!s:.120}"] += 1
            return []
        return [f"{type(error).__name__}: {error}"]
    there = asked.solo.sequences.tolist()
    start = len(there[0]) - len(asked.solo.scores)
    if output.generate_output is None:
        if asked.cancelled is None:
            return [f"ended as {output.finish_reason!r}"]
        counts["of these, cancelled"] += 1
        here = [sequence.token_ids for sequence in output.sequences]
        there = [row[start : start + len(own)] for row, own in zip(there, here, strict=False)]
        if asked.config.num_beams in (None, 1):
            return off(asked, here, there, counts)
        return []
    here = output.generate_output.sequences.tolist()
    counts["tokens"] += sum(len(row) - start for row in there)
    if asked.config.num_beams not in (None, 1):
        if here == there:
            return []
        counts["sequences with other tokens"] += 1
        scores = asked.solo.sequences_scores, output.generate_output.sequences_scores
        if torch.allclose(*scores, atol=NEAR):
            counts["of these, from a near-tie on"] += 1
            return []
        return [f"beams: {here} with {scores[1].tolist()} beside {there} with {scores[0].tolist()}"]
    found = off(asked, [row[start:] for row in here], [row[start:] for row in there], counts)
    if not found and here == there and asked.config.logprobs is not None:
        ours_, theirs = (of.logprobs.token_logprobs for of in (output.generate_output, asked.solo))
        limit = UNSTEADY.get(family.name, TOLERANCE)
        if not torch.allclose(ours_, theirs, rtol=1e-4, atol=limit, equal_nan=True):
            found.append(f"log-probabilities off by {(ours_ - theirs).abs().nan_to_num().max()}")
    return found


def off(
    asked: Asked, here: list[list[int]], there: list[list[int]], counts: Counter[str]
) -> list[str]:
    """Which sequences have other tokens, other than from a near-tie on."""
    found = []
    for copy, (own, solo_) in enumerate(zip(here, there, strict=True)):
        pairs = enumerate(zip(own, solo_, strict=False))
        step = next((i for i, (one, two) in pairs if one != two), None)
        if step is None and len(own) == len(solo_):
            continue
        counts["sequences with other tokens"] += 1
        margin = None
        if step is not None:
            best, second = margin_of(asked.solo.scores[step][copy], asked.config, copy, step)
            if (margin := best - second) <= NEAR:
                counts["of these, from a near-tie on"] += 1
                continue
        place = f"{copy}, step {step}, margin {margin}"
        found.append(f"{place}: {own} beside {solo_}, {asked.config.to_diff_dict()}")
    return found


def draw_cases(seed: int, count: int, families: Sequence[str]) -> list[EngineCase]:
    rng = random.Random(seed)
    cases = [EngineCase(rng.choice(families), rng.randrange(10**6)) for _ in range(count)]
    return sorted(cases, key=lambda case: case.family)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.engine", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default 0)")
    parser.add_argument("--count", type=int, default=200, help="how many engines (default 200)")
    parser.add_argument("--kind", action="append", default=[], help="families of this kind alone")
    parser.add_argument("--family", action="append", default=[], choices=sorted(FAMILIES))
    parser.add_argument("--only", help="one case, as a difference prints it")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    named = [f for f in FAMILIES.values() if not options.family or f.name in options.family]
    families = [f.name for f in named if not options.kind or f.kind in options.kind]
    families = [name for name in families if name not in ENTANGLED]
    cases = draw_cases(options.seed, options.count, families)
    if options.only:
        name, _, seed = options.only.partition(":")
        cases = [EngineCase(name, int(seed))]
    counts, n_different, last = Counter[str](), 0, None
    for case in cases:
        if case.family != last:
            forget_models()
            last = case.family
        with quiet(), torch.no_grad():
            try:
                found = differences(case, counts)
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
        n_different += bool(found)
        if found:
            print(*found, case.command, sep="\n", flush=True)
    print(f"{len(cases)} engines, {n_different} with differences")
    print(*(f"{n} {what}" for what, n in sorted(counts.items())), sep="\n")
    return int(n_different > 0)


if __name__ == "__main__":
    sys.exit(main())
