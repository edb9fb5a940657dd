"""The benchmarks, on a tiny model: what they measure, what they write, and when they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hfgen
from benchmarks import overhead
from benchmarks.models import Subject
from benchmarks.side_by_side import LIBRARIES, Spread, UnequalTokensError, call, unmixed
from hfgen.strategies.sample import Sample
from tests import tiny


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(overhead, "NEW_TOKENS", 8)
    model = hfgen.mix_into(tiny.llama(tie_word_embeddings=True))
    return Subject("tiny", "Tiny Llama", model, tiny.prompt(rows=1, length=16))


def test_all_modes_are_measured(subject: Subject) -> None:
    done: list[str] = []
    result = overhead.measure(subject, list(overhead.MODES), 1, 1e9, done.append)

    assert done == [*overhead.MODES] * 2  # the warm-up and one pair
    rows = overhead.table(result).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(overhead.MODES)
    for comparison in result.comparisons:
        assert comparison.n_pairs == 1
        assert all(seconds[0] > 0 for seconds in comparison.wall.values())
        assert comparison.ratio.low == comparison.ratio.median == comparison.ratio.high
    assert result.per_token("hfgen") == pytest.approx(
        result.comparisons[1].milliseconds("hfgen") / 8
    )


def test_what_is_written(subject: Subject, tmp_path: Path) -> None:
    result = overhead.measure(subject, [overhead.FLOOR_MODE], 1, 1e9)
    overhead.write([result], overhead.machine(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "overhead.md",
        "overhead.json",
        "overhead.png",
    }
    raw = json.loads((tmp_path / "overhead.json").read_text())
    assert list(raw["models"]["tiny"]["modes"]) == [overhead.FLOOR_MODE]
    assert "times the floor" in (tmp_path / "overhead.md").read_text()


def test_other_tokens_are_an_error(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample, "choose", lambda self, run, scores: scores.argmin(dim=-1))
    with pytest.raises(UnequalTokensError, match="'greedy'"):
        overhead.measure(subject, ["greedy"], 1, 1e9)


def test_each_library_runs_its_own_code(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    original = Sample.step
    monkeypatch.setattr(
        Sample, "step", lambda *arguments: used.append("hfgen") or original(*arguments)
    )
    for library in LIBRARIES:
        used.clear()
        call(library, subject.model, overhead.arguments(subject, "greedy"), seed=0)
        assert bool(used) == (library == "hfgen")


def test_unmixing_is_undone(subject: Subject) -> None:
    mixed = type(subject.model)
    with unmixed(subject.model):
        assert not isinstance(subject.model, hfgen.GenerationMixin)
    assert type(subject.model) is mixed
    with pytest.raises(KeyboardInterrupt), unmixed(subject.model):
        raise KeyboardInterrupt
    assert type(subject.model) is mixed


def test_batch_is_padded_on_the_left(subject: Subject) -> None:
    batch = subject.batch()
    assert batch["attention_mask"].sum(dim=1).tolist() == [16, 12, 8, 4]
    assert (batch["attention_mask"].diff(dim=1) >= 0).all()
    assert torch.equal(batch["input_ids"][3, -4:], subject.prompt[0, -4:])


def test_bytes_per_token_count_tied_weights_once(subject: Subject) -> None:
    untied = Subject("untied", "", tiny.llama(), subject.prompt)
    table = tiny.VOCAB * 32
    assert subject.bytes_per_token == 4 * subject.n_parameters
    assert untied.n_parameters == subject.n_parameters + table
    assert untied.bytes_per_token == subject.bytes_per_token + 4 * 32  # one row of the input table


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
