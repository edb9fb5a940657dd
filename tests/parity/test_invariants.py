"""A fixed sample of what ``tests.parity.invariants`` draws, and that its laws see what breaks them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.parity.harness import Case, ours, run, sequences
from tests.parity.invariants import LAWS, MODES, Lawful, check, draw, main
from tests.parity.options import GREEDY, SAMPLING

#: One for each way of keeping or placing tokens.
FAMILIES = (
    "llama gpt2 gemma3_text deepseek_v3 qwen3_next mamba bloom t5 bart_seq2seq moonshine qwen2_vl jamba"
).split()

SEED, PER_LAW = 11, 24

#: Why cases of the sample are left out, and how often.
LEFT_OUT: dict[str, dict[str, int]] = {
    "same seed twice": {"raises ValueError in mode DoLa": 1},
    "dictionary or ids": {"raises ValueError in mode DoLa": 1},
    "streamed or returned": {"raises ValueError in mode contrastive": 2},
    "finished rows leave": {},
    "static or dynamic": {"raises ValueError in mode DoLa": 1},
    "rows alone": {"media of a batch are not cut into rows here": 6},
}


@pytest.mark.parametrize("law", LAWS)
def test_sample(law: str) -> None:
    cases = draw(SEED, PER_LAW, FAMILIES, [law])
    results = [(lawful, check(lawful)) for lawful in cases]
    left_out = Counter(found for _, found in results if isinstance(found, str))
    failed = [
        line
        for each, found in results
        if isinstance(found, list)
        for line in [*found, each.command]
        if found
    ]
    assert not failed, "\n".join(failed)
    assert left_out == LEFT_OUT[law]


def test_draws_repeat_and_cover() -> None:
    cases = draw(1, 600)
    assert cases == draw(1, 600)
    assert {lawful.law for lawful in cases} == set(LAWS)
    assert {lawful.mode for lawful in cases} == set(MODES)
    assert len({lawful.case.family for lawful in cases}) > 150
    assert all(Lawful.parse(str(lawful)) == lawful for lawful in cases)


#: Several sequences of a greedy search would be equal.
SEVERAL = [(mode, n) for mode in MODES for n in (1, 2) if n == 1 or MODES[mode].base != GREEDY]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("mode", "n_sequences"), SEVERAL)
def test_the_same_seed_twice(mode: str, n_sequences: int, rows: int) -> None:
    """And another seed gives something else, where anything is drawn."""
    options = {"num_return_sequences": n_sequences} if n_sequences > 1 else {}
    case = Case("gpt2", MODES[mode].base, rows, False, 5, options)
    assert check(Lawful(case, mode, 0, "same seed twice")) == []
    first, other = (
        Lawful(Case(**vars(case) | {"seed": s}), mode, 0, "").run(keep_prompt) for s in (5, 6)
    )
    assert sequences(first).equal(sequences(other)) == (MODES[mode].base not in SAMPLING)


def keep_prompt(call: Any) -> None:
    """The prompt is drawn with the seed, too: here it is always the same."""
    generator = torch.Generator().manual_seed(0)
    call.kwargs["input_ids"] = torch.randint(5, 90, (call.case.rows, 7), generator=generator)


# ---------------------------------------------------------------- what the laws see


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every second call of a Llama return something else."""
    kind = type(ours("llama"))
    generate, calls = kind.generate, []

    def changed(self: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        returned = generate(self, **kwargs)
        return change(returned, kwargs) if len(calls) % 2 == 0 else returned

    monkeypatch.setattr(kind, "generate", changed)


def other_token(returned: Any, kwargs: dict[str, Any]) -> Any:
    ids = returned if isinstance(returned, torch.Tensor) else returned.sequences
    ids[-1, -1] += 1
    return returned


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_another_token_is_seen(monkeypatch: pytest.MonkeyPatch, law: str, mode: str) -> None:
    lawful = Lawful(Case("llama", MODES[mode].base, 2, True, 3), mode, 0, law)
    assert check(lawful) == []
    broken(monkeypatch, other_token)
    assert check(lawful)


def test_another_draw_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lawful = Lawful(Case("llama", "sample", 2, True, 3), "sampling", 0, "dictionary or ids")
    assert check(lawful) == []
    broken(monkeypatch, lambda returned, _: (torch.rand(1), returned)[1])
    assert "random state" in check(lawful)[0]


def test_a_streamer_that_is_not_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lawful = Lawful(
        Case("llama", "greedy_search", 1, False, 3), "greedy", 0, "streamed or returned"
    )
    broken(monkeypatch, lambda returned, kwargs: (kwargs["streamer"].seen.pop(), returned)[1])
    assert check(lawful) == ["streamed: ended 0 times"]


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = str(Lawful(Case("llama", "greedy_search", 2, True, 3), "DoLa", 0, "rows alone"))
    assert main(["--only", line]) == 0
    assert "1 cases, 0 differ" in capsys.readouterr().out
    broken(monkeypatch, other_token)
    assert main(["--only", line]) == 1
    assert "python -m tests.parity.invariants --only" in capsys.readouterr().out


def test_a_case_without_a_reference_says_why() -> None:
    lawful = Lawful(
        Case("mamba", "greedy_search", 1, False, 3), "contrastive", 0, "same seed twice"
    )
    assert check(lawful) == "raises ValueError in mode contrastive"
    assert run(ours("mamba"), lawful.case).error is None
