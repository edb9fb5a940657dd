"""Compare every kind of cache with its reference: ``python -m tests.parity.caches``.

A case is a call, or several in a row, of the parity sweep: any family, mode, batch and options, with one
kind of cache. Each failing one is printed with the command that runs it alone; the exit code is 1 when
there was any difference. ``cache_kinds.py`` says what each kind promises.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.parity import cache_kinds
from tests.parity.cache_kinds import Cached
from tests.parity.family import Family
from tests.parity.harness import (
    FAMILIES,
    Case,
    computing_in_double,
    draw_case,
    forget_models,
    ours,
    settle,
    versions,
)
from tests.parity.options import ASSISTED, BEAM_SAMPLE, GREEDY, TEXT
from tests.parity.speculation import LIMITS, UNSTEADY

#: Options that have nothing to do with this, or that ask for a cache themselves.
LEFT_OUT = (
    "cache_implementation max_cache_len user_cache continue use_cache "
    "invalid config_object default_length ignored_output"
).split()

#: Options whose part in the comparison depends on the cache: masks and positions are as long as it.
INSIDES = ("attentions", "hidden_states")

#: Options that bring another prompt than the kind's own.
PROMPTS = (
    "mask no_prompt position_ids decoder_ids start_per_row encoder_outputs embeds encoder_embeds "
    "token_healing positional negative_prompt guidance_scale stop_strings streamer"
).split()

#: Several EOS tokens, so that rows end at different times.
MANY_EOS = list(range(8, 60, 4))

Settings = dict[str, Any]
Draw = Callable[[random.Random, Case], tuple[tuple[Case, ...], Settings]]


@dataclass(frozen=True)
class Kind:
    """A kind of cache: what it promises, and which calls are drawn for it."""

    check: Callable[[Cached], list[str] | None]
    draw: Draw
    left_out: Sequence[str] = ()
    #: Keys of ``Family.unsupported`` that rule a family out.
    needs: Sequence[str] = ("no_cache",)
    kinds: Sequence[str] | None = None

    def fits(self, family: Family) -> bool:
        is_of_kind = self.kinds is None or family.kind in self.kinds
        return is_of_kind and not any(need in family.unsupported for need in self.needs)


# ---------------------------------------------------------------- drawing


def with_options(case: Case, **options: Any) -> Case:
    return settle(replace(case, options={**case.options, **options}))


def scored(case: Case) -> Case:
    """With the outputs that tell most."""
    return with_options(case, outputs=["scores"])


def longer(rng: random.Random, case: Case) -> Case:
    """Half of the time with more new tokens than the sweep's."""
    if rng.random() < 0.5 or {"max_length", "user_criteria"} & case.options.keys():
        return case
    return with_options(case, max_new_tokens=rng.choice((12, 24, 40)))


def widely(rng: random.Random, case: Case) -> Case:
    """In any mode, with any number of rows: for references that are hfgen's own calls."""
    if case.mode != ASSISTED:
        return case
    rows = rng.choice((1, 2, 3))
    padded = rows > 1 and "padding" not in FAMILIES[case.family].unsupported
    return replace(case, rows=rows, padded=padded)


def contrastive(rng: random.Random, case: Case) -> Settings:
    """A part of the greedy calls becomes contrastive search."""
    is_possible = case.mode == GREEDY and not {"prefill_chunk_size", *INSIDES} & case.options.keys()
    return {"contrastive": True} if is_possible and rng.random() < 0.25 else {}


def draw_dynamic(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    case = longer(rng, case)
    return (case,), {"concatenates": rng.random() < 0.3}


def draw_plain(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    case = widely(rng, longer(rng, case))
    return (case,), contrastive(rng, case)


def draw_offloaded(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    cases, settings = draw_plain(rng, case)
    return cases, settings | {"in_files": rng.random() < 0.6}


def draw_finished(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    while case.mode == ASSISTED:
        case = _drawn(rng, [case.family], INSIDES)
    padded = "padding" not in FAMILIES[case.family].unsupported and rng.random() < 0.5
    case = replace(longer(rng, case), rows=rng.choice((2, 3, 4)), padded=padded)
    case = case.without("user_criteria", "stop_strings")  # ends that are not seen in the tokens
    return (scored(with_options(case, eos_token_id=MANY_EOS)),), {}


def draw_quantized(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    case = scored(widely(rng, longer(rng, case)))
    group = rng.choice((None, 4))
    config: Settings = {"bits": rng.choice((8, 4, 2)), "group_size": group}
    config["residual_length"] = rng.choice((512, 1, 2, 5))
    return (case,), {"cache_config": config, **contrastive(rng, case)}


def draw_continued(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    case = scored(widely(rng, longer(rng, case)))
    how = rng.choice(("full", "new")) if FAMILIES[case.family].kind == "decoder" else "full"
    if how == "new":
        case = case.without(*(name for name in case.options if name not in cache_kinds.NEUTRAL))
    settings: Settings = {"how": how, "by": rng.choice(("hfgen", "upstream"))}
    settings |= {"n_before": rng.choice((1, 3, 8)), "n_new": rng.choice((0, 1, 4))}
    return (case,), settings


def draw_reused(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    """Calls of several sizes and modes on one model."""
    cases = [longer(rng, case)]
    while len(cases) < 3:
        other = _drawn(rng, [case.family], INSIDES)
        if other.mode != ASSISTED:  # upstream refuses
            cases.append(longer(rng, other))
    return tuple(replace(c, mode=GREEDY) if c.mode == ASSISTED else c for c in cases), {}


def draw_prefix(rng: random.Random, case: Case) -> tuple[tuple[Case, ...], Settings]:
    cases = [case, *(_drawn(rng, [case.family], (*INSIDES, *PROMPTS)) for _ in range(4))]
    is_small = rng.random() < 0.2  # so that prompts have to go
    settings = {"seed": rng.randrange(1000), "max_bytes": 200_000 if is_small else 2**26}
    return tuple(scored(widely(rng, c)) for c in cases), settings


def _drawn(rng: random.Random, families: Sequence[str], left_out: Sequence[str]) -> Case:
    return settle(draw_case(rng, families).without(*LEFT_OUT, *left_out))


KINDS: dict[str, Kind] = {
    "dynamic": Kind(cache_kinds.check_dynamic, draw_dynamic, needs=()),
    "static": Kind(cache_kinds.check_static, draw_plain, INSIDES, ("no_cache", "static")),
    "offloaded": Kind(cache_kinds.check_offloaded, draw_offloaded),
    "quantized": Kind(cache_kinds.check_quantized, draw_quantized, INSIDES),
    "continued": Kind(
        cache_kinds.check_continued,
        draw_continued,
        (*INSIDES, *PROMPTS, "max_length", "min_length", "assistant", "start_per_row"),
        ("no_cache", "continuation"),
        TEXT,
    ),
    "reused": Kind(cache_kinds.check_reused, draw_reused, INSIDES, ("no_cache", "static")),
    "prefix": Kind(
        cache_kinds.check_prefix,
        draw_prefix,
        (*INSIDES, *PROMPTS),
        ("no_cache", "continuation"),
        ("decoder",),
    ),
    "finished": Kind(cache_kinds.check_finished, draw_finished, INSIDES, ()),
}


def draw(
    seed: int, count: int, families: Sequence[str] = (), kinds: Sequence[str] = ()
) -> list[Cached]:
    """``count`` cases, the kinds in turns, grouped by family so that few models are held at a time."""
    rng = random.Random(seed)
    drawn: list[Cached] = []
    names = list(kinds) or list(KINDS)
    for turn in range(count):
        name = names[turn % len(names)]
        kind = KINDS[name]
        fitting = [f for f in families or FAMILIES if kind.fits(FAMILIES[f])]
        if fitting:
            case = _drawn(rng, fitting, kind.left_out)
            cases, settings = kind.draw(rng, case)
            drawn.append(Cached(name, cases, settings))
    return sorted(drawn, key=lambda cached: cached.case.family)


# ---------------------------------------------------------------- checking


def takes_one(case: Case) -> bool:
    """Whether the model answers otherwise if it gets several tokens at once."""
    return LIMITS.get(case.family, lambda case: False)(case)


def check(cached: Cached) -> list[str] | None:
    """Differences from what the kind promises; ``None`` if there is nothing to compare."""
    if not ours(cached.case.family)._supports_default_dynamic_cache():
        return None
    is_contrastive = cached.settings.get("contrastive", False)
    if any((case.mode == ASSISTED or is_contrastive) and takes_one(case) for case in cached.cases):
        return None
    is_drafted = cached.case.mode == ASSISTED and cached.kind in ("static", "offloaded")
    if cached.case.family in UNSTEADY and is_drafted:
        # Rounding is amplified: tokens are compared.
        cached = replace(cached, cases=tuple(case.without("outputs") for case in cached.cases))
    found = KINDS[cached.kind].check(cached)
    # Rounding, by forwards as wide as drafts, or of two scores beside the cut of a sampler?
    if found and cached.case.mode in (ASSISTED, BEAM_SAMPLE):
        with computing_in_double(cached.case.family):
            exact = KINDS[cached.kind].check(cached)
        found = exact if exact == [] else found
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.caches", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default 0)")
    parser.add_argument("--count", type=int, default=800, help="how many (default 800)")
    parser.add_argument(
        "--family", action="append", default=[], choices=sorted(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--kind", action="append", default=[], choices=list(KINDS))
    parser.add_argument(
        "--only", action="append", default=[], type=Cached.parse, metavar="CASE_JSON"
    )
    options = parser.parse_args(arguments)
    cases = options.only or draw(options.seed, options.count, options.family, options.kind)
    counts: dict[str, Counter[str]] = {}
    family, begin = None, time.perf_counter()
    for cached in cases:
        if cached.case.family != family:
            forget_models()
            family = cached.case.family
        try:
            differences = check(cached)
        except Exception as error:  # of the arguments' making, or a defect
            differences = [f"not run: {type(error).__name__}: {error}"]
        result = "left out" if differences is None else "differ" if differences else "equal"
        counts.setdefault(cached.kind, Counter())[result] += 1
        for line in differences or ():
            print(f"  {line}")
        if differences:
            print(cached.command, flush=True)
    for kind, counter in counts.items():
        print(f"{kind}: " + ", ".join(f"{n} {what}" for what, n in sorted(counter.items())))
    print(f"{len(cases)} cases in {time.perf_counter() - begin:.0f} s ({versions()})")
    return 1 if any(counter["differ"] for counter in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
