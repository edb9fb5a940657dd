"""Random calls whose steps are recorded, on a CPU, give all that eager ones on a static cache give."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hfgen.running import ahead
from tests.host_recorder import recording_on_the_cpu
from tests.parity.harness import Case, Outcome, compare, draw_case, ours, run, settle
from tests.parity.invariants import MANY_EOS
from tests.parity.options import Call
from tests.simulated_accelerator import Recorder

SEED, COUNT = 5, 40

#: All that is recorded is the same for them but for the model's own code.
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen3", "phi", "olmo2", "granite", "cohere", "qwen2_moe")


def drawn(seed: int, count: int) -> list[Case]:
    """Random calls on a static cache, which an EOS may end early."""
    rng = random.Random(seed)
    cases = []
    while len(cases) < count:
        case = draw_case(rng, FAMILIES)
        options: dict[str, Any] = {**case.options, "cache_implementation": "static"}
        if "eos_token_id" in options or case.seed % 2:
            options["eos_token_id"] = MANY_EOS
        case = settle(replace(case, options=options))
        if case.options.get("cache_implementation") == "static":
            cases.append(case)
    return cases


def record(call: Call) -> None:
    call.kwargs["use_cuda_graph"] = True


def without_what_was_asked(outcome: Outcome) -> Outcome:
    """Less ``use_cuda_graph``, and the warning that steps are not recorded."""
    outcome.arguments.pop("use_cuda_graph", None)
    (outcome.passed_config or {}).pop("use_cuda_graph", None)
    return replace(outcome, logged=[])


def test_random_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, scores, caches, streamers, exceptions and the state of torch's generator; every other checks late."""
    failed, modes = [], Counter[str]()
    for number, case in enumerate(drawn(SEED, COUNT)):
        monkeypatch.setattr(ahead, "ALWAYS", False)
        expected = without_what_was_asked(run(ours(case.family), case))
        monkeypatch.setattr(ahead, "ALWAYS", bool(number % 2))
        before = Recorder.count
        with recording_on_the_cpu():
            recorded = without_what_was_asked(run(ours(case.family), case, record))
        found = compare(expected, recorded, 0.0)
        failed += [line for line in [*found, case.command] if found]
        modes[case.mode] += Recorder.count > before
    assert not failed, "\n".join(failed)
    assert sum(modes.values()) > COUNT / 2
    assert len([mode for mode, n in modes.items() if n]) >= 4, modes
