"""`hfgen eval perplexity`: equal to log-probabilities of whole forwards, file by file and in total."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import hfgen
from hfgen.tools.cli import app
from hfgen.tools.evaluate.metrics import interval
from hfgen.tools.evaluate.perplexity import Perplexity, score, sizes, windows
from tests import tiny

TEXT = Path(hfgen.__file__).read_text(encoding="utf-8")[:1800]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["eval", "perplexity", *map(str, arguments)])


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return hfgen.builtin_model()


def test_each_token_but_the_first_is_scored_once():
    for n in (1, 2, 5, 16, 17, 40):
        for window, stride in ((2, 1), (8, 4), (8, 7), (16, 5)):
            found = list(windows(n, window, stride))
            scored = [i for _, first, end in found for i in range(first, end)]
            assert scored == list(range(1, n))
            assert all(0 < end - start <= window for start, _, end in found)
            assert all(min(first, window - stride) <= first - start for start, first, _ in found)


def test_one_window_is_a_whole_forward(builtin: tuple[Any, Any]):
    model, tokenizer = builtin
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    assert ids.shape[1] < 1024
    with torch.no_grad():
        nats = cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum")
    found = Perplexity.of([score(model, tokenizer, "text", TEXT, window=1024, stride=512)])
    n = ids.shape[1] - 1
    assert found.n_tokens == n
    assert found.perplexity == pytest.approx(math.exp(nats / n), rel=1e-5)
    assert found.n_bytes == len(TEXT.encode()) - len(tokenizer.decode(ids[0, :1]).encode())
    assert found.bits_per_byte == pytest.approx(float(nats) / math.log(2) / found.n_bytes, rel=1e-5)
    assert found.interval is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_scores_are_the_same_at_any_batch_size(dtype: torch.dtype):
    model, tokenizer = hfgen.builtin_model()
    hfgen.exact(model.to(dtype))
    alone, together = (
        score(model, tokenizer, "text", TEXT[:900], window=24, stride=16, batch_size=n)
        for n in (1, 16)
    )
    assert len(alone.nats) > 16
    assert alone == together


@pytest.mark.parametrize("batch_size", [1, 3])
def test_strided_windows_are_forwards_of_their_own(builtin: tuple[Any, Any], batch_size: int):
    model, tokenizer = builtin
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    total, end = 0.0, 0
    for start in range(0, ids.shape[1], 48):  # as transformers' page on perplexity has it
        before, end = end, min(start + 64, ids.shape[1])
        labels = ids[:, start:end].clone()
        labels[:, : before - start] = -100
        with torch.no_grad():
            logits = model(ids[:, start:end]).logits
        total += float(cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        if end == ids.shape[1]:
            break
    found = score(model, tokenizer, "text", TEXT, window=64, stride=48, batch_size=batch_size)
    assert sum(found.nats) == pytest.approx(total, rel=1e-4)
    assert len(found.nats) > 3


def test_files_and_their_total(tmp_path: Path):
    paths = [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "empty.py", tmp_path / "latin.py"]
    paths[0].write_text(TEXT[:500])
    paths[1].write_text(TEXT[500:])
    paths[2].write_text("")
    paths[3].write_bytes("é".encode("latin-1") * 9)
    result = run(*paths, "--window", 64, "--json")
    assert result.exit_code == 1
    assert "latin.py' is not UTF-8" in result.stderr
    report = json.loads(result.stdout)
    assert [each["file"] for each in report["failed"]] == [str(paths[2]), str(paths[3])]
    a, b = report["files"]
    total = report["total"]
    assert total["n_tokens"] == a["n_tokens"] + b["n_tokens"]
    nats = sum(each["n_tokens"] * math.log(each["perplexity"]) for each in (a, b))
    assert total["perplexity"] == pytest.approx(math.exp(nats / total["n_tokens"]))
    for each in (a, b, total):
        assert each["interval"]["low"] <= each["perplexity"] <= each["interval"]["high"]
    table = run(*paths[:2], "--window", 64, "--resample", "documents")
    assert table.exit_code == 0
    assert "total" in table.stdout
    assert f"{total['perplexity']:.3f}" in table.stdout


def test_bytes_are_those_of_the_file(tmp_path: Path, builtin: tuple[Any, Any]):
    tokenizer = builtin[1]
    texts = {"plain": "漢字 = 1\r\nx = 2\r\n", "marked": "\ufeff漢字 = 1\r\nx = 2\r\n"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    ids = tokenizer(texts["plain"]).input_ids
    assert tokenizer.decode(ids[:1]) == "\ufffd"  # a part of a character
    result = run(*(tmp_path / name for name in texts), tmp_path / "plain", "--json")
    plain, marked = json.loads(result.stdout)["files"]  # one that is given twice counts once
    assert plain["n_tokens"] == marked["n_tokens"] == len(ids) - 1
    first = len(tokenizer.convert_ids_to_tokens(ids[0]))  # a character of a token is a byte
    assert plain["n_bytes"] == marked["n_bytes"] == len(texts["plain"].encode()) - first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", 4096], "`window` has to be from 2 to 1024"),
        (["--stride", 1024], "`stride` has to be from 1 to 1023"),
        (["--window", 8, "--stride", 8], "--stride has to be below --window 8"),
        (["--resample", "lines"], "'--resample': 'lines' is not one of 'windows', 'documents'"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, arguments: list[Any], message: str):
    path = tmp_path / "a.py"
    path.write_text(TEXT)
    result = run(path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_files_and_encoders_are_refused(tmp_path: Path):
    assert "does not exist" in run(tmp_path / "none.txt").stderr
    with pytest.raises(ValueError, match="encoder-decoder"):
        sizes(tiny.t5())


def test_the_interval_is_seeded_and_holds_the_mean():
    torch.manual_seed(0)
    values = torch.randn(400, 1).double() + 5
    parts = torch.cat([values, torch.ones(400, 1)], dim=1)
    found = interval(parts, lambda sums: sums[0] / sums[1], seed=3)
    assert found == interval(parts, lambda sums: sums[0] / sums[1], seed=3)
    assert found is not None
    assert found.low < float(values.mean()) < found.high
    error = float(values.std()) / 20  # of the mean of 400
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
