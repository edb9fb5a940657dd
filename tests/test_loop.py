"""The loop, driven by a strategy and a model that only count."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfgen
from hfgen.decoding import loop
from hfgen.state.run import Step
from tests import tiny


class Model:
    """As much of a model as the loop calls: two hooks."""

    config = SimpleNamespace(is_encoder_decoder=False)
    _has_unfinished_sequences = loop.has_unfinished_sequences

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict, is_encoder_decoder: bool, **counts: int
    ) -> dict:
        return model_kwargs | {"committed": outputs, "counts": counts}


class Counting:
    """Appends 1, 2, 3, … to the ids, until there are ``n`` new ones; tells what was called."""

    def __init__(self, n: int, prefills: bool = True) -> None:
        self.n, self.prefills, self.calls = n, prefills, []
        self.n_new = 0

    def prefill(self, run: Any) -> Any:
        self.calls.append("prefill")
        return "prompt" if self.prefills else None

    @contextmanager
    def decoding(self, run: Any) -> Any:
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
        run.finished = self.n_new >= self.n

    def result(self, run: Any) -> dict[str, Any]:
        return {"sequences": run.ids}


def a_run(synced: bool = False, **config: Any) -> Any:
    fields = {
        "max_new_tokens": None,
        "return_dict_in_generate": False,
        "output_logits": False,
        "output_attentions": False,
        "output_hidden_states": False,
        "output_speculation": False,
    }
    return SimpleNamespace(
        asks_for=lambda *names: False,
        model=Model(),
        ids=torch.tensor([[7, 8]]),
        config=SimpleNamespace(**fields | config),
        model_kwargs={},
        synced_gpus=synced,
        finished=False,
        is_encoder_decoder=False,
        observers=[],
        streamer=None,
        call=None,
        ahead=None,
        speculation=None,
    )


class Streamer:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.got.append(tokens.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_the_prefills_outputs_are_those_of_the_first_step() -> None:
    run, strategy = a_run(), Counting(3)
    tokens = [step.tokens.tolist() for step in loop.steps(run, strategy)]
    assert tokens == [[[1]], [[2]], [[3]]]
    assert run.ids.tolist() == [[7, 8, 1, 2, 3]]
    assert strategy.calls == (
        ["prefill", "enter", "prompt", "forward", "token 1", "forward", "token 2", "exit"]
    )


def test_without_a_prefill_the_first_forward_takes_the_prompt() -> None:
    strategy = Counting(2, prefills=False)
    assert len(list(loop.steps(a_run(), strategy))) == 2
    assert strategy.calls[:4] == ["prefill", "enter", "forward", "token 0"]


def test_a_step_is_yielded_after_the_stop() -> None:
    run = a_run()
    finished = [run.finished for _ in loop.steps(run, Counting(2))]
    assert finished == [False, True]


def test_closing_the_steps_leaves_the_context_of_decoding() -> None:
    strategy = Counting(9)
    steps = loop.steps(a_run(), strategy)
    next(steps)
    steps.close()
    assert strategy.calls == ["prefill", "enter", "prompt", "exit"]


def test_an_exception_leaves_the_context_of_decoding() -> None:
    class Failing(Counting):
        def stop(self, run: Any) -> None:
            raise KeyError("no")

    strategy = Failing(9)
    with pytest.raises(KeyError):
        list(loop.steps(a_run(), strategy))
    assert strategy.calls[-1] == "exit"


def test_a_device_that_is_done_goes_on_forwarding_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This device ends after 1 token, another one after 3: two forwards follow, and no step."""
    others = iter([1, 1, 1, 0])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(next(others)))
    run, strategy = a_run(synced=True), Counting(1)
    assert len(list(loop.steps(run, strategy))) == 1
    assert strategy.calls == ["prefill", "enter", "prompt", "forward", "forward", "exit"]
    assert run.model_kwargs["committed"] == "token 1"


def test_commit_passes_the_number_of_tokens_only_if_it_is_given() -> None:
    run = a_run()
    loop.commit(run, "one")
    assert run.model_kwargs == {"committed": "one", "counts": {}}
    loop.commit(run, "three", num_new_tokens=3)
    assert run.model_kwargs == {"committed": "three", "counts": {"num_new_tokens": 3}}


def test_observers_are_told_of_each_step_before_it_is_yielded() -> None:
    seen: list[Any] = []
    run = a_run()
    run.observers = [SimpleNamespace(add=lambda run, strategy, step: seen.append(int(step.tokens)))]
    for step in loop.drive(run, Counting(3)):
        seen.append(-int(step.tokens))
    assert seen == [1, -1, 2, -2, 3, -3]


def test_no_new_tokens_are_no_steps() -> None:
    strategy = Counting(3)
    assert list(loop.drive(a_run(max_new_tokens=0), strategy)) == []
    assert strategy.calls == []


def test_a_streamer_gets_the_tokens_of_each_step_and_an_end() -> None:
    run = a_run()
    run.streamer = Streamer()
    run.scores, run.rows_have_left = None, False
    assert loop.finish(run, Counting(3)).tolist() == [[7, 8, 1, 2, 3]]
    assert run.streamer.got == [[1], [2], [3], "end"]


def test_a_streamer_gets_what_a_step_says_is_settled() -> None:
    streaming = loop.Streaming(Streamer())
    for settled in (torch.tensor([[4, 5]]), torch.empty(1, 0), torch.tensor([[6]])):
        step = Step(tokens=torch.tensor([[9]]), settled=lambda settled=settled: settled)
        streaming.add(None, None, step)
    assert streaming.streamer.got == [[[4, 5]], [[6]]]  # nothing is not put


@pytest.mark.parametrize("rows", [1, 3])
def test_ids_that_a_processor_keeps_stay_as_they_were(rows: int) -> None:
    kept, before, prompt = [], [], tiny.prompt(rows)

    def keep(ids: Any, scores: Any) -> Any:
        kept.append(ids)
        before.append(ids.clone())
        return scores

    call = {"max_new_tokens": 6, "eos_token_id": None, "logits_processor": [keep]}
    model, asked = hfgen.mix_into(tiny.llama()), prompt.clone()
    model.generate(prompt, **call)
    assert all(map(torch.equal, kept, before))
    assert all(ids.is_contiguous() for ids in kept)
    kept[0][:] = 0
    assert torch.equal(prompt, asked)
