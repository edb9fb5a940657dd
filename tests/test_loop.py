"""The loop, driven by a strategy that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hfgen
from hfgen.state.run import Step
from tests import tiny


class Counting:
    """Appends 1, 2, 3, … to the ids, until there are ``n`` new ones; notes in ``calls`` what is called."""

    def __init__(self, run: Any, n: int, calls: list[str], prefills: bool = True) -> None:
        self.n, self.prefills, self.calls = n, prefills, calls
        self.n_new = 0

    def prefill(self, run: Any) -> Any:
        self.calls.append("prefill")
        return "prompt" if self.prefills else None

    @contextmanager
    def decoding(self, run: Any) -> Iterator[None]:
        self.calls.append("enter")
        try:
            yield
        finally:
            self.calls.append("exit")

    def forward(self, run: Any) -> str:
        self.calls.append("forward")
        return f"token {self.n_new}"

    def step(self, run: Any, outputs: Any) -> Step:
        self.calls.append(outputs)
        self.n_new += 1
        run.ids = torch.cat([run.ids, torch.full((len(run.ids), 1), self.n_new)], dim=1)
        return Step(tokens=run.ids[:, -1:])

    def stop(self, run: Any) -> None:
        self.calls.append("stop")
        run.finished = self.n_new >= self.n

    def result(self, run: Any) -> dict[str, Any]:
        self.calls.append("result")
        return {"sequences": run.ids}


class Failing(Counting):
    def stop(self, run: Any) -> None:
        raise KeyError("no")


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama())


def test_the_prefills_outputs_are_those_of_the_first_step(model: Any) -> None:
    calls: list[str] = []
    counting = hfgen.recipe(Counting, n=2, calls=calls)
    tokens = model.generate(tiny.prompt(1), custom_generate=counting, max_new_tokens=9)
    assert tokens[0, 7:].tolist() == [1, 2]
    first, second = ["prompt", "stop"], ["forward", "token 1", "stop"]
    assert calls == ["prefill", "enter", *first, *second, "exit", "result"]


def test_without_a_prefill_the_first_forward_takes_the_prompt(model: Any) -> None:
    calls: list[str] = []
    counting = hfgen.recipe(Counting, n=1, calls=calls, prefills=False)
    model.generate(tiny.prompt(1), custom_generate=counting, max_new_tokens=9)
    assert calls == ["prefill", "enter", "forward", "token 0", "stop", "exit", "result"]


def test_a_closed_stream_and_an_exception_leave_the_context_of_decoding(model: Any) -> None:
    calls: list[str] = []
    recipe = hfgen.recipe(Counting, n=9, calls=calls)
    with model.stream(tiny.prompt(1), custom_generate=recipe, max_new_tokens=9) as stream:
        next(stream)
    assert calls[-1] == "exit"
    calls.clear()
    failing = hfgen.recipe(Failing, n=9, calls=calls)
    with pytest.raises(KeyError):
        model.generate(tiny.prompt(1), custom_generate=failing, max_new_tokens=9)
    assert calls[-1] == "exit"


@pytest.mark.parametrize("rows", [1, 3])
def test_ids_that_a_processor_keeps_stay_as_they_were(model: Any, rows: int) -> None:
    kept, before, prompt = [], [], tiny.prompt(rows)

    def keep(ids: Any, scores: Any) -> Any:
        kept.append(ids)
        before.append(ids.clone())
        return scores

    asked = prompt.clone()
    model.generate(prompt, max_new_tokens=6, eos_token_id=None, logits_processor=[keep])
    assert all(map(torch.equal, kept, before))
    assert all(ids.is_contiguous() for ids in kept)
    kept[0][:] = 0
    assert torch.equal(prompt, asked)
