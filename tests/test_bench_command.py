"""`hfgen bench`: both libraries on every shape, what was asked for; wrong input is named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hfgen
from hfgen.tools.cli import app, loading, measure
from hfgen.tools.cli import compare as bench
from hfgen.tools.evaluate.live_bytes import LiveBytes
from tests.tiny import byte_tokenizer, llama


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> loading.Loaded:
    model = hfgen.mix_into(llama(vocab_size=258, eos_token_id=0, pad_token_id=1))
    loaded = loading.Loaded("tiny", model, byte_tokenizer())
    monkeypatch.setattr(loading, "load", lambda *_: loaded)
    return loaded


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_every_shape_under_both_libraries(
    tiny_model: loading.Loaded, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    original = measure.new_tokens

    def new_tokens(loaded: Any, inputs: Any, output: Any) -> Any:
        rows = original(loaded, inputs, output)
        is_ours = isinstance(loaded.model, hfgen.GenerationMixin)
        seen.append((is_ours, *inputs["input_ids"].shape, *{len(row) for row in rows}))
        return rows

    monkeypatch.setattr(measure, "new_tokens", new_tokens)
    sizes = ["--prompt-tokens", "3,5", "--new-tokens", 4, "--batch-sizes", "1,2", "--repeat", 2]
    result = run(*sizes, "--json")
    assert result.exit_code == 0, result.stderr
    for is_ours in (True, False):  # a warm-up, two timed, and one for memory
        for length, rows in ((3, 1), (3, 2), (5, 1), (5, 2)):
            assert seen.count((is_ours, rows, length, 4)) == 4
            assert seen.count((is_ours, rows, length, 1)) == 3
    report = json.loads(result.stdout)
    assert len(report["cases"]) == 4
    for case in report["cases"]:
        assert len(case["speedup"]) == 2
        for name in measure.LIBRARIES:
            found = case[name]
            times = zip(found["first"], found["total"], found["tokens_per_second"], strict=True)
            for first, total, speed in times:
                assert first > 0
                assert total > 0
                assert speed == pytest.approx(4 * case["batch_size"] / total)
            assert found["peak_bytes"] > 0
    table = run("--prompt-tokens", 5, "--new-tokens", 4, "--batch-sizes", 2, "--repeat", 1)
    assert "2 x 5+4" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "1,x"], "--batch-sizes takes numbers from 1 on"),
        (["--new-tokens", "0"], "--new-tokens takes numbers from 1 on"),
        (["--prompt-tokens", "100000"], "positions, but 100032 tokens"),
    ],
)
def test_wrong_input_is_named(tiny_model: loading.Loaded, arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_plain_call_is_timed(tiny_model: loading.Loaded, monkeypatch: pytest.MonkeyPatch):
    """A streamer, or a processor that holds back the end, costs the two libraries different times."""
    calls = []
    monkeypatch.setattr(
        type(tiny_model.model),
        "generate",
        lambda self, **call: calls.append(call) or torch.ones(1, 9),
    )
    bench.seconds(tiny_model, {"input_ids": torch.ones(1, 5)}, 4)
    plain = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False, "num_beams": 1}
    assert [call | {"input_ids": 0} for call in calls] == [plain | {"input_ids": 0}]


def test_times_are_those_of_forwards(tiny_model: loading.Loaded, monkeypatch: pytest.MonkeyPatch):
    """By a clock that each forward puts on by a second: one forward of the prompt, one per token after it."""
    now = [0.0]

    def advance(*_: Any) -> None:
        now[0] += 1

    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    handle = tiny_model.model.register_forward_pre_hook(advance)
    case = bench.run_case(tiny_model, 4, 5, 2, 2)
    handle.remove()
    for library in measure.LIBRARIES:
        assert case[library]["first"] == case[library]["per_token"] == [1.0, 1.0]
        assert case[library]["total"] == [5.0, 5.0]
        assert case[library]["tokens_per_second"] == [2.0, 2.0]
    assert case["speedup"] == [1.0, 1.0]


def test_live_bytes_are_the_peak_of_what_is_alive():
    with LiveBytes() as live:
        for _ in range(3):
            x = torch.zeros(1000)
            del x
        kept = [torch.zeros(1000) for _ in range(2)]
    assert live.peak == len(kept) * 4000
