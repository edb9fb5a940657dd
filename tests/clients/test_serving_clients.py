"""Libraries that people use with OpenAI's interface, in their default modes, and `hfgen serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import hfgen
from tests.clients.server import Running, running
from tests.clients.test_lm_eval_model import ANSWER_TASK, CHOICE_TASK, CHOICES

#: A chat of lines, in which tools stand first.
TEMPLATE = (
    "{% for t in tools or [] %}# {{ t.function.name }}: {{ t.function.parameters }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content or m.tool_calls }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model, tokenizer = hfgen.builtin_model()
    tokenizer.chat_template = TEMPLATE
    with running(hfgen.mix_into(model), tokenizer) as found:
        yield found
        found.wait_until_idle()


# ------------------------------------------------------------ lm_eval and echoed prompts


def test_lm_eval(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``local-completions`` scores and generates as ``hf`` does."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "choices": c}) for p, c in CHOICES))
    for name, text in ("choice", CHOICE_TASK), ("answer", ANSWER_TASK):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    server.tokenizer.save_pretrained(tmp_path / "tokenizer")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    shared = {"tasks": ["local_choice", "local_answer"], "task_manager": manager}
    shared |= {"bootstrap_iters": 0}
    served = {"model": "tiny", "base_url": f"{server.url}/v1/completions"}
    served |= {"tokenizer": str(tmp_path / "tokenizer")}
    ours = simple_evaluate("local-completions", served, batch_size=2, **shared)
    alone = HFLM(pretrained=server.model, tokenizer=server.tokenizer, device="cpu")
    theirs = simple_evaluate(alone, **shared)
    assert ours["results"] == theirs["results"]
    for our, their in zip(*(r["samples"]["local_choice"] for r in (ours, theirs)), strict=True):
        for (ours_of, is_greedy), (theirs_of, was_greedy) in zip(
            our["filtered_resps"], their["filtered_resps"], strict=True
        ):
            assert ours_of == pytest.approx(theirs_of, abs=1e-3)
            assert is_greedy == was_greedy


def test_echo(server: Running) -> None:
    client, prompt = server.client(), "import os\n"
    ids = server.tokenizer(prompt).input_ids
    usual: Any = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(prompt=prompt, logprobs=2, **usual).choices[0]
    for given in prompt, ids:
        both = client.completions.create(prompt=given, logprobs=2, echo=True, **usual).choices[0]
        assert both.text == prompt + plain.text
        assert both.logprobs.token_logprobs[0] is None
        assert both.logprobs.top_logprobs[0] is None
        assert "".join(both.logprobs.tokens) == both.text
        assert both.logprobs.tokens[len(ids) :] == plain.logprobs.tokens
        assert both.logprobs.top_logprobs[len(ids) :] == plain.logprobs.top_logprobs
        assert all(len(top) == 2 for top in both.logprobs.top_logprobs[1:])
        places = zip(both.logprobs.text_offset, both.logprobs.tokens, strict=True)
        assert all(both.text.startswith(token, at) for at, token in places)
    usual["max_tokens"] = 0
    sampled = usual | {"temperature": 1}
    mixed = client.completions.create(prompt=["x = 1", ids], n=2, echo=True, **sampled)
    assert [choice.text for choice in mixed.choices] == ["x = 1", "x = 1", prompt, prompt]
    alone = client.completions.create(prompt=prompt, logprobs=2, echo=True, **usual).choices[0]
    assert alone.logprobs.top_logprobs == both.logprobs.top_logprobs[: len(ids)]
    chunks = client.completions.create(prompt=prompt, echo=True, stream=True, **usual)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == prompt
    with pytest.raises(openai.BadRequestError, match="`stream` has to be false"):
        client.completions.create(prompt=prompt, echo=True, logprobs=1, stream=True, **usual)
