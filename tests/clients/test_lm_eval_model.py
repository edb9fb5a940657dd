"""lm_eval's model type `hfgen`: the results of `hf` on tasks of local files, without a network."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import LoraConfig, PromptTuningConfig, get_peft_model

import hfgen
from benchmarks import lm_eval_tails, lm_eval_tasks
from hfgen import lm_eval
from hfgen.lm_eval import HfgenLM
from hfgen.tools.evaluate import continuations
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


TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)

#: Arguments of ``simple_evaluate`` that change the prompts or the answers.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chat": {
        "apply_chat_template": True,
        "system_instruction": "Complete the code.",
        "num_fewshot": 2,
        "fewshot_as_multiturn": True,
    },
    "few": {
        "num_fewshot": 1,
        "limit": 2,
        "gen_kwargs": {"max_gen_toks": 5, "until": ["(", "\n"], "repetition_penalty": 1.2},
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_local_task_gives_what_hf_gives(
    tmp_path: Path, models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, setting: str
):
    monkeypatch.setattr(models[0].tokenizer, "chat_template", TEMPLATE)
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
            **SETTINGS[setting],
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
    for pair in (
        ("too long", [5], long[:1025]),
        ("no continuation", [5], []),
        ("no context", [], [5]),
    ):
        with pytest.raises(ValueError, match=f"{pair[0]}' has {len(pair[1])} and {len(pair[2])}"):
            models[1]._loglikelihood_tokens([pair])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_share_their_contexts(builtin: tuple[Any, Any], dtype: torch.dtype):
    model, tokenizer = copy.deepcopy(builtin[0]).to(dtype), builtin[1]
    given = {"pretrained": model, "tokenizer": tokenizer, "device": "cpu"}
    n_tokens: list[int] = []
    embedding = model.get_input_embeddings()
    embed = embedding.forward

    def counting(ids: torch.Tensor) -> torch.Tensor:
        n_tokens.append(ids.numel())
        return embed(ids)

    counting.is_row_wise = True  # type: ignore[attr-defined]
    embedding.forward = counting  # a hook would rule stored contexts out
    # Else `hf` rounds the values of a bfloat16 model.
    hf = HFLM(**given, batch_size=1, softmax_dtype="float32")
    examples = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n" * 6
    pairs = [
        (before + head, end) for before in ("", examples) for head, ends in CHOICES for end in ends
    ]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    theirs, forwarded = hf.loglikelihood(requests, True), sum(n_tokens)
    expected = [value for value, _ in theirs]
    truth = expected
    if dtype != torch.float32:
        in_float32 = HFLM(**given | {"pretrained": builtin[0]}, batch_size=1)
        truth = [value for value, _ in in_float32.loglikelihood(requests, True)]
    for batch_size in "auto", 1:
        n_tokens.clear()
        found = HfgenLM(**given, batch_size=batch_size).loglikelihood(requests, True)
        assert sum(n_tokens) < forwarded / 4
        values = [value for value, _ in found]
        if dtype == torch.float32:
            assert values == pytest.approx(expected, rel=1e-4)
        else:  # passes of other shapes round otherwise: as near to float32 as lm_eval's own
            assert math.dist(values, truth) < 2 * math.dist(expected, truth)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in theirs]


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

    forward.is_row_wise = True  # type: ignore[attr-defined]  # else rows decode one at a time
    monkeypatch.setattr(ours.mixed, "forward", forward)
    asked = {"until": ["\n\n\n"], "max_gen_toks": 24}
    requests = [
        Instance("generate_until", {}, (text, asked), i) for i, (text, _) in enumerate(CHOICES)
    ]
    texts = ours.generate_until(requests, disable_tqdm=True)
    assert max(widths) > 1
    assert texts == models[0].generate_until(requests, disable_tqdm=True)


def test_contexts_that_begin_alike(models: tuple[Any, Any]):
    examples = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n" * 3
    contexts = [examples + text for text, _ in CHOICES]
    assert lm_eval.begin_alike(contexts)
    assert not lm_eval.begin_alike([text for text, _ in CHOICES])
    assert not lm_eval.begin_alike([])
    asked = {"until": ["\n"], "max_gen_toks": 12}
    requests = [Instance("generate_until", {}, (text, asked), i) for i, text in enumerate(contexts)]
    theirs, ours = (model.generate_until(requests, disable_tqdm=True) for model in models)
    assert ours == theirs


def test_an_empty_stop_string_ends_at_once(models: tuple[Any, Any]):
    requests = [Instance("generate_until", {}, ("def f(", {"until": [""], "max_gen_toks": 4}), 0)]
    theirs, ours = (model.generate_until(requests, disable_tqdm=True) for model in models)
    assert ours == theirs


def test_an_adapter(tmp_path: Path, builtin: tuple[Any, Any]):
    model = builtin[0]
    for part in builtin:
        part.save_pretrained(tmp_path)
    base = type(model).from_pretrained(tmp_path)
    settings = LoraConfig("CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    given = {"pretrained": str(tmp_path), "peft": str(tmp_path / "adapter"), "device": "cpu"}
    texts = ["def f(x):\n    return", "import os\n"]
    asked = {"until": ["\n\n"], "max_gen_toks": 8}
    answers = [Instance("generate_until", {}, (text, asked), i) for i, text in enumerate(texts)]
    pairs = [Instance("loglikelihood", {}, (text, " x"), i) for i, text in enumerate(texts)]
    theirs, ours = (
        (harness.generate_until(answers, True), harness.loglikelihood(pairs, True))
        for harness in (HFLM(**given), HfgenLM(**given))
    )
    assert ours[0] == theirs[0]
    values = [[value for value, _ in each[1]] for each in (ours, theirs)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtin: tuple[Any, Any]
):
    for part in builtin:
        part.save_pretrained(tmp_path / "model")
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "choices": c}) for p, c in CHOICES))
    (tmp_path / "answer.yaml").write_text(ANSWER_TASK.format(file=file))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "hfgen.lm_eval", "run", "--model", "hfgen"]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},dtype=float32"]
    command += ["--tasks", "local_answer", "--include_path", str(tmp_path), "--device", "cpu"]
    command += ["--batch_size", "auto", "--gen_kwargs", "max_gen_toks=6", "--log_samples"]
    command += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == len(CHOICES)
    assert all(row["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] == 6 for row in rows)


def test_the_benchmark_at_its_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = {"batch_sizes": [1, 2], "n_rounds": 1}
    answers, choices = lm_eval_tasks.small(), lm_eval_tasks.examples()
    tasks = {
        "small": replace(answers, prompts=answers.prompts[:2], max_new=4, **few),
        "examples": replace(choices, pairs=choices.pairs[:8], **few),
    }
    for name, task in tasks.items():
        monkeypatch.setitem(lm_eval_tails.TASKS, name, lambda task=task: task)
    lm_eval_tails.main(["small", "examples"], out=tmp_path)
    raw = json.loads((tmp_path / "lm_eval_tails.json").read_text())
    for name in tasks:
        assert [each["name"] for each in raw[name]["timed"]] == [
            "hf, 1",
            "hf, 2",
            lm_eval_tails.OURS,
        ]
    assert raw["small"]["tokens"] <= 8
    assert "8 requests, 2 contexts" in (tmp_path / "lm_eval_tails.md").read_text()


def test_the_tasks_of_the_benchmark(builtin: tuple[Any, Any]):
    """What they are said to be: answers of one token, and contexts that begin alike."""
    tokenizer = builtin[1]
    letters, examples = lm_eval_tasks.letters(), lm_eval_tasks.examples()
    for context, letter in letters.pairs[:8]:
        ids = [tokenizer(text).input_ids for text in (context, context + letter)]
        assert len(ids[1]) == len(ids[0]) + 1
    assert lm_eval.begin_alike([context for context, _ in examples.pairs])
    assert examples.longest() < 1024


def test_importing_registers_and_encoders_are_refused():
    assert get_model("hfgen") is HfgenLM
    with pytest.raises(ValueError, match="use 'hf'"):
        HfgenLM(tiny.t5(), tokenizer=tiny.byte_tokenizer(), device="cpu")
    virtual = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="virtual tokens before the prompt: use 'hf'"):
        HfgenLM(
            get_peft_model(tiny.llama(), virtual), tokenizer=tiny.byte_tokenizer(), device="cpu"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_results_have_the_same_bits_in_every_way(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every batch size, in any order, and with or without contexts that are forwarded once."""
    model, tokenizer = hfgen.builtin_model()
    model = model.to(dtype)
    examples = "import json\n\n\ndef parse(text):\n    return json.loads(text)\n\n\n"
    until = {"until": ["\n"], "max_gen_toks": 8}
    requests = {
        "loglikelihood": [
            (examples + text, choice) for text, choices in CHOICES for choice in choices
        ],
        "generate_until": [(examples + text, until) for text, _ in CHOICES],
        "loglikelihood_rolling": [(3 * text,) for text, _ in CHOICES],
    }
    results = []
    for batch_size, seed, shares in (1, 0, True), (8, 1, False), ("auto", 2, True):
        if not shares:
            monkeypatch.setattr(continuations.shared_prefix, "may_share", lambda *_: False)
        lm = HfgenLM(model, batch_size, exact=True, tokenizer=tokenizer, device="cpu")
        answers = {}
        for kind, arguments in requests.items():
            order = random.Random(seed).sample(range(len(arguments)), len(arguments))
            instances = [Instance(kind, {}, arguments[number], number) for number in order]
            values = getattr(lm, kind)(instances, disable_tqdm=True)
            answers[kind] = [value for _, value in sorted(zip(order, values, strict=True))]
        results.append(answers)
        monkeypatch.undo()
    assert all(answers == results[0] for answers in results)


@pytest.mark.parametrize("batch_size", [0, -1, "many", 1.5])
def test_a_batch_size_that_is_none_is_named(batch_size: Any, builtin: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=f"'auto' or at least 1, but is {batch_size!r}"):
        HfgenLM(builtin[0], batch_size, tokenizer=builtin[1], device="cpu")
