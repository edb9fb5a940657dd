"""A fixed sample of what ``tests.parity.caches`` draws, and that its checks see what they are there to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hfgen.families import CACHE
from hfgen.running.prefix.radix import Match
from tests.parity import cache_kinds
from tests.parity.cache_kinds import Cached, comparable, unlike
from tests.parity.caches import KINDS, MANY_EOS, check, draw, main
from tests.parity.harness import Case, ours, run

#: One for each way of keeping or placing tokens.
FAMILIES = (
    "llama gpt2 gemma3_text deepseek_v3 qwen3_next t5 bart_seq2seq whisper qwen2_vl jamba"
).split()

SEED, PER_KIND = 3, 10

#: Kinds whose cases are several calls.
IN_A_ROW = ("reused", "prefix")


@pytest.mark.parametrize("kind", KINDS)
def test_sample(kind: str) -> None:
    count = PER_KIND // 2 if kind in IN_A_ROW else PER_KIND
    cases = draw(SEED, count, FAMILIES, [kind])
    results = [(cached, check(cached)) for cached in cases]
    failed = [(*found, cached.command) for cached, found in results if found]
    assert not failed, "\n".join(line for lines in failed for line in lines)
    compared = sum(found is not None for _, found in results)
    assert compared > count / 2


def test_draws_repeat_and_cover() -> None:
    cases = draw(1, 400)
    assert cases == draw(1, 400)
    assert {cached.kind for cached in cases} == set(KINDS)
    assert len({cached.case.family for cached in cases}) > 100
    assert all(Cached.parse(str(cached)) == cached for cached in cases)
    assert any(cached.settings.get("contrastive") for cached in cases)
    assert any(cached.settings.get("in_files") for cached in cases)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = str(draw(1, 1, ["llama"], ["dynamic"])[0])
    assert main(["--only", line]) == 0
    assert "dynamic: 1 equal" in capsys.readouterr().out
    monkeypatch.setitem(KINDS, "dynamic", replace(KINDS["dynamic"], check=lambda cached: ["x: 1"]))
    assert main(["--only", line]) == 1
    out = capsys.readouterr().out
    assert "  x: 1" in out
    assert "python -m tests.parity.caches --only" in out


GREEDY = Case("llama", "greedy_search", 3, True, 5, {"outputs": ["scores"]})


def test_other_tokens_and_lengths_are_seen() -> None:
    model = ours("llama")
    plain = comparable(run(model, GREEDY))
    longer = run(model, replace(GREEDY, options={**GREEDY.options, "max_new_tokens": 9}))
    assert any(CACHE in line for line in unlike(plain, longer))
    other = run(model, replace(GREEDY, seed=6))
    assert any("sequences" in line for line in unlike(plain, other))


def test_scores_after_the_end_alone_are_not_compared() -> None:
    case = replace(GREEDY, options={"outputs": ["scores"], "eos_token_id": MANY_EOS})
    plain = run(ours("llama"), case)
    ended = torch.isin(plain.returned.sequences[:, 7:], torch.tensor(MANY_EOS))
    row = int(ended.any(dim=1).nonzero()[0])
    step = int(ended[row].nonzero()[0])
    for at, expected in ((step, True), (step + 1, False)):
        changed = run(ours("llama"), case)
        changed.returned.scores[at][row] += 1.0
        both = (cache_kinds.until_end(each, MANY_EOS) for each in (plain, changed))
        assert bool(unlike(*both)) == expected


def test_a_wrong_prefix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = next(c for c in draw(2, 60, ["llama"], ["prefix"]) if c.settings["max_bytes"] > 1e6)
    assert check(cached) == []
    runs = Match.runs

    def stale(self: Match, length: int) -> Iterator[tuple[int, Any]]:
        for start, states in runs(self, length):
            yield start, [each * 1.5 for each in states]

    monkeypatch.setattr(Match, "runs", stale)
    assert check(cached)
