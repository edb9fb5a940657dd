"""`hfgen eval generate`: predictions of solo calls, metrics of their libraries, broken lines counted."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from typer.testing import CliRunner

import hfgen
from hfgen.tools.cli import app, loading
from hfgen.tools.evaluate import metrics
from tests.tiny import byte_tokenizer, llama

PREDICTIONS = ["the cat sat on the mat", "a dog is here now", "nothing", "two birds fly away"]
REFERENCES = [
    ["the cat sat on a mat", "a cat sat on the mat"],
    ["a dog is there now"],
    ["nothing"],
    ["two birds fly home", "birds fly away", "both birds fly away"],
]


@pytest.fixture(scope="module")
def loaded() -> loading.Loaded:
    model = hfgen.mix_into(llama(vocab_size=258, eos_token_id=0, pad_token_id=1))
    return loading.Loaded("tiny", model, byte_tokenizer())


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch, loaded: loading.Loaded) -> loading.Loaded:
    monkeypatch.setattr(loading, "load", lambda *_: loaded)
    return loaded


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["eval", "generate", *map(str, arguments)])


def write(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def solo(loaded: loading.Loaded, prompt: str, **kwargs: Any) -> str:
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    output = loaded.model.generate(**inputs, **kwargs)
    new = output[0, inputs["input_ids"].shape[1] :]
    return loaded.tokenizer.decode(new, skip_special_tokens=True)


def test_predictions_are_those_of_solo_calls(tmp_path: Path, tiny_model: loading.Loaded):
    expected = [
        solo(tiny_model, "abc", max_new_tokens=6),
        solo(tiny_model, "a long prompt", max_new_tokens=3),
    ]
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "abc", "reference": expected[0]},
        {"prompt": "a long prompt", "reference": ["x", "y"], "options": {"max_new_tokens": 3}},
    )
    done = tmp_path / "out.jsonl"
    result = run(source, "-o", done, "--max-new-tokens", 6, "--json", "--metric", "exact_match")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in done.read_text().splitlines()]
    assert [row["prediction"] for row in rows] == expected
    assert [row["scores"]["exact_match"] for row in rows] == [1.0, 0.0]
    assert [row["references"] for row in rows] == [[expected[0]], ["x", "y"]]
    report = json.loads(result.stdout)
    assert report["metrics"]["exact_match"]["value"] == 0.5
    assert report["metrics"]["exact_match"]["interval"] == {"low": 0.0, "high": 1.0}
    assert report["tokens"] == 9


def test_exact_predictions_are_the_same_beside_any_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: loading.Loaded
):
    monkeypatch.setattr(loading, "load", lambda *_: copy.deepcopy(loaded))
    source = write(
        tmp_path / "in.jsonl",
        *({"prompt": "abcde"[: n + 1], "reference": "x"} for n in range(5)),
    )
    files = []
    for max_rows in (1, 5):
        done = tmp_path / f"{max_rows}.jsonl"
        sampled = ("--temperature", 1.5, "--seed", 4, "--max-new-tokens", 6)
        result = run(source, "-o", done, "--exact", "--max-rows", max_rows, *sampled)
        assert result.exit_code == 0, result.stderr
        files.append(done.read_bytes())
    assert files[0] == files[1]


def test_broken_lines_are_counted_and_the_rest_goes_on(tmp_path: Path, tiny_model: loading.Loaded):
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "abc", "reference": "x"},
        "",
        "{broken",
        {"prompt": "abc"},
        {"prompt": "abc", "reference": []},
        {"prompt": 3, "reference": "x"},
        {"prompt": "abc", "reference": "x", "options": {"num_beams": -1}},
        {"prompt": "abc", "reference": "x"},
        {"prompt": "abc", "reference": "x", "options": {"num_return_sequences": 2, "num_beams": 2}},
        {"prompt": "half of a pair: \ud800", "reference": "x"},
        "[" * 100_000,
    )
    done = tmp_path / "out.jsonl"
    result = run(source, "--max-new-tokens", 2, "--json", "-o", done)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["lines"], report["scored"]) == (11, 2)
    assert [each["line"] for each in report["failed"]] == [2, 3, 4, 5, 6, 7, 9, 10, 11]
    errors = [each["error"] for each in report["failed"]]
    words = ["empty", "not JSON", "`reference`", "`reference`", "`prompt`", "num_beams"]
    words += ["`num_return_sequences`", "surrogates", "recursion"]
    for error, word in zip(errors, words, strict=True):
        assert word in error
    assert [json.loads(line)["line"] for line in done.read_text().splitlines()] == [*range(1, 12)]
    table = run(source, "--max-new-tokens", 2)
    assert "2 of 11 lines" in table.stdout
    assert "line 2: the line is empty" in table.stderr
    assert "4 more lines failed" in table.stderr


def test_a_users_metric(
    tmp_path: Path, tiny_model: loading.Loaded, monkeypatch: pytest.MonkeyPatch
):
    source = write(tmp_path / "in.jsonl", *[{"prompt": "abc", "reference": ["x", "y"]}] * 2)
    (tmp_path / "own_metric.py").write_text(
        "def count(prediction, references):\n    return len(references)\n"
        "def fails(prediction, references):\n    raise KeyError('it')\n"
        "def nothing(prediction, references):\n    return float('nan')\n"
    )
    (tmp_path / "broken_metric.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["--metric", "own_metric:count", "--metric", "own_metric:fails"]
    names += ["--metric", "own_metric:nothing"]
    result = run(source, "--max-new-tokens", 2, "--json", *names)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["metrics"]["own_metric:count"]["value"] == 2
    assert "KeyError" in report["failed_metrics"]["own_metric:fails"]
    assert "is nan" in report["failed_metrics"]["own_metric:nothing"]
    for name in ("own_metric:none", "no_such_module:f", "broken_metric:f", ":f", "nonsense"):
        wrong = run(source, "--metric", name)
        assert wrong.exit_code == 2, name
        assert repr(name) in wrong.stderr


def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "in.jsonl", {"prompt": "abc", "reference": "x"})
    assert "does not exist" in run(tmp_path / "none").stderr
    assert "has no line that can be used: line 1" in run(write(tmp_path / "b", "{")).stderr
    assert "no such folder" in run(source, "-o", tmp_path / "no" / "out").stderr
    assert "the file that is read" in run(source, "-o", source).stderr
    several = ["--num-return-sequences", 2, "--num-beams", 2]
    assert "leave --num-return-sequences out" in run(source, *several).stderr
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    missing = run(source, "--metric", "rouge")
    assert missing.exit_code == 2
    assert "pip install rouge-score" in missing.stderr
    assert metrics.installed() == ["exact_match"]
    assert (
        "--metric: A metric is one of exact_match, bleu"
        in run(source, "--metric", "nonsense").stderr
    )


def test_corpus_scores_are_sacrebleus():
    scores = {
        score.name: score
        for name in ("bleu", "chrf", "exact_match")
        for score in metrics.score(metrics.metrics_of(name), PREDICTIONS, REFERENCES, seed=1)
    }
    streams = [[among[i] if i < len(among) else None for among in REFERENCES] for i in range(3)]
    expected = {
        "bleu": sacrebleu.corpus_bleu(PREDICTIONS, streams).score,
        "chrf": sacrebleu.corpus_chrf(PREDICTIONS, streams).score,
        "exact_match": 0.25,
    }
    assert {name: score.value for name, score in scores.items()} == pytest.approx(expected)
    for name, score in scores.items():
        assert score.interval is not None
        assert score.interval.low <= score.value <= score.interval.high, name
        again = metrics.score(metrics.metrics_of(name), PREDICTIONS, REFERENCES, seed=1)
        assert again == [score]
    assert scores["exact_match"].of_lines == [0, 0, 1, 0]


HAS_ROUGE = importlib.util.find_spec("rouge_score") is not None


@pytest.mark.skipif(not HAS_ROUGE, reason="rouge-score (optional) is not installed")
def test_rouge_takes_the_best_reference():
    names = [score.name for score in metrics.score(metrics.metrics_of("rouge"), ["a b"], [["a b"]])]
    assert names == ["rouge1", "rouge2", "rougeL"]
    one, two, longest = metrics.score(
        metrics.metrics_of("rouge"), ["cat sat down", "x y"], [["dog", "cat sat up"], ["x z"]]
    )
    assert one.of_lines == pytest.approx([2 / 3, 1 / 2])
    assert two.of_lines == pytest.approx([1 / 2, 0])
    assert longest.value == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_references_of_another_length_are_refused():
    chosen = metrics.metrics_of("exact_match")
    with pytest.raises(ValueError, match="each of 2 predictions, but has 1"):
        metrics.score(chosen, ["a", "b"], [["a"]])
    with pytest.raises(ValueError, match=r"`references\[1\]` has to have at least one"):
        metrics.score(chosen, ["a", "b"], [["a"], []])
