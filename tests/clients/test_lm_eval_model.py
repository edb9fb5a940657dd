"""lm_eval's model type `hfgen`: the results of `hf` on tasks of local files, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import hfgen
import hfgen.lm_eval
from hfgen.lm_eval import HfgenLM
from tests import tiny

CHOICES = [
    ("for i in range(10", [")", "):", " and", ")"]),
    ("import", [" os", " numpy as np", " sys"]),
    ("def read(path):\n    with open(path", [") as file:", ", 'r') as f:", " + 1"]),
    ("class Node", [":", "(object):", " ="]),
]

CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ANSWER_TASK = """
task: local_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return hfgen.builtin_model()


@pytest.fixture
def models(builtin: tuple[Any, Any]) -> tuple[Any, Any]:
    model, tokenizer = builtin
    shared = {"pretrained": model, "tokenizer": tokenizer, "device": "cpu"}
    return HFLM(**shared, batch_size=2), HfgenLM(**shared)


def test_a_local_task_gives_what_hf_gives(
    tmp_path: Path, models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "docs.jsonl"
    docs = [json.dumps({"prompt": p, "choices": c}) for p, c in CHOICES]
    file.write_text("\n".join(docs))
    for name, text in ("choice", CHOICE_TASK), ("answer", ANSWER_TASK):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs, ours = (
        simple_evaluate(
            model=model,
            tasks=["local_choice", "local_answer"],
            task_manager=manager,
            bootstrap_iters=0,
        )
        for model in models
    )
    assert set(ours["results"]) == {"local_choice", "local_answer"}
    assert ours["results"] == theirs["results"]
    for task in ours["results"]:
        pairs = zip(ours["samples"][task], theirs["samples"][task], strict=True)
        for our, their in pairs:
            if task == "local_answer":
                assert our["filtered_resps"] == their["filtered_resps"]
                continue
            for (value, is_greedy), (expected, expected_greedy) in zip(
                our["filtered_resps"], their["filtered_resps"], strict=True
            ):
                assert float(value) == pytest.approx(float(expected), rel=1e-4)
                assert is_greedy == expected_greedy


def test_likelihoods_of_any_lengths(models: tuple[Any, Any], builtin: tuple[Any, Any]):
    model, tokenizer = builtin
    long = tokenizer("x = [1, 2, 3]\n" * 300).input_ids[:1030]
    assert len(long) == 1030  # more than the model's 1,024 positions
    pairs = [
        ("a", [5, 6], [7]),
        ("b", [5, 6], [8]),
        ("c", [5], [6, 7]),
        ("d", long[:-20], long[-20:]),
        ("e", long[:1020], long[1020:1025]),
    ]
    # With its cache of logits, `hf` gives "a" and "b" the logits of the first token of "c", whose
    # prompt is the same.
    hf = HFLM(model, tokenizer=tokenizer, device="cpu", batch_size=2, logits_cache=False)
    theirs, ours = (each._loglikelihood_tokens(pairs, True) for each in (hf, models[1]))
    for (value, is_greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, rel=1e-4)
        assert is_greedy == expected_greedy
    assert models[1]._loglikelihood_tokens([]) == []


def test_rolling_likelihoods(models: tuple[Any, Any]):
    texts = ["def f(x):\n    return x\n", "import os\n" * 500]
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    theirs, ours = (model.loglikelihood_rolling(requests, True) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_auto_decodes_several_rows_at_once(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    ours, widths = models[1], []
    assert ours.batch_size == "auto"
    original = ours.mixed.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        widths.append(len(kwargs["input_ids"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(ours.mixed, "forward", forward)
    asked = {"until": ["\n\n\n"], "max_gen_toks": 24}
    requests = [
        Instance("generate_until", {}, (text, asked), i) for i, (text, _) in enumerate(CHOICES)
    ]
    texts = ours.generate_until(requests, disable_tqdm=True)
    assert max(widths) > 1
    assert texts == models[0].generate_until(requests, disable_tqdm=True)


def test_importing_registers_and_encoders_are_refused():
    assert get_model("hfgen") is HfgenLM
    with pytest.raises(ValueError, match="use 'hf'"):
        HfgenLM(tiny.t5(), tokenizer=tiny.byte_tokenizer(), device="cpu")
