"""``hfgen.recipe``: a strategy's class behind ``generate(custom_generate=…)``."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.decoding.strategies import Beam, NextToken, Sample
from hfgen.state.run import Run, Step
from tests import tiny
from tests.parity.harness import prefill_of_each_row
from tests.test_streaming_beams import Recorder


class Rank(Sample):
    """The token of a given rank: 1 is greedy."""

    def __init__(self, run: Run, rank: int, start: int = 0) -> None:
        super().__init__(run)
        self.rank, self.start = rank, start

    def choose(self, run: Run, scores: Tensor) -> Tensor:
        rank = self.rank if self.n_steps >= self.start else 1
        return scores.topk(rank).indices[:, -1]


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    return a is b is None or type(a).__name__ == type(b).__name__  # each library's own cache


CALLS: dict[str, tuple[type, dict[str, Any]]] = {
    "greedy": (Sample, {}),
    "samples": (Sample, {"do_sample": True, "num_return_sequences": 2, "top_k": 5}),
    "beams": (Beam, {"num_beams": 3, "length_penalty": -1.0}),
    "static cache": (Sample, {"cache_implementation": "static"}),
    "chunks": (Sample, {"prefill_chunk_size": 3}),
    "processors": (Sample, {"repetition_penalty": 1.3, "min_new_tokens": 4}),
    "no new tokens": (Sample, {"max_new_tokens": 0}),
}
RECORDED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


CASES = [
    (call, is_mixed)
    for call in CALLS
    for is_mixed in (True, False)
    if is_mixed or call != "no new tokens"  # upstream takes at least one
]


@pytest.mark.parametrize(("call", "is_mixed"), CASES)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5, tiny.bart])
def test_a_built_in_strategy_gives_what_its_mode_gives(build, call, is_mixed):
    strategy, options = CALLS[call]
    options = {"max_new_tokens": 9} | options | RECORDED
    model = build()
    model.set_attn_implementation("eager")
    ids = tiny.prompt(3)
    torch.manual_seed(0)
    hfgen.mix_into(model)
    with nullcontext() if is_mixed else prefill_of_each_row():  # upstream's generate shares none
        expected = model.generate(ids, **options)
    if not is_mixed:
        model.__class__ = type(model)._unmixed_class
    torch.manual_seed(0)
    result = model.generate(ids, custom_generate=hfgen.recipe(strategy), **options)
    assert type(result) is type(expected)
    assert list(result) == list(expected)
    for name in result:
        assert is_same(result[name], expected[name]), name


def test_options_reach_the_strategy():
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(2)
    greedy = model.generate(ids, max_new_tokens=5)
    second = model.generate(ids, max_new_tokens=5, custom_generate=hfgen.recipe(Rank, rank=2))
    late = hfgen.recipe(Rank, rank=2, start=3)
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    assert torch.equal(second[:, 7], logits.topk(2).indices[:, 1])
    late = model.generate(ids, max_new_tokens=5, custom_generate=late)
    assert torch.equal(late[:, :10], greedy[:, :10])
    assert not torch.equal(late[:, 10], greedy[:, 10])


def test_each_call_gets_an_instance_of_its_own():
    model, rank = hfgen.mix_into(tiny.llama()), hfgen.recipe(Rank, rank=3)
    first = model.generate(tiny.prompt(2), max_new_tokens=5, custom_generate=rank)
    assert torch.equal(
        model.generate(tiny.prompt(2), max_new_tokens=5, custom_generate=rank), first
    )


def test_streaming():
    model, streamer = hfgen.mix_into(tiny.llama()), Recorder()
    out = model.generate(
        tiny.prompt(1),
        custom_generate=hfgen.recipe(Rank, rank=2),
        max_new_tokens=5,
        streamer=streamer,
    )
    assert [tuple(put.shape) for put in streamer.puts[:3]] == [(1, 7), (1,), (1,)]
    assert torch.equal(streamer.tokens(1), out)
    assert streamer.ends == 1


class Pairs(Sample):
    """Two tokens per step, the second a copy of the first."""

    def step(self, run: Run, model_outputs: Any) -> Step:
        once = super().step(run, model_outputs)
        run.ids = torch.cat([run.ids, once.tokens], dim=1)
        return Step(tokens=run.ids[:, -2:])

    def forward(self, run: Run) -> Any:
        return run.model(input_ids=run.ids, use_cache=False, return_dict=True)


def test_steps_of_several_tokens_are_streamed():
    model = hfgen.mix_into(tiny.llama())
    for rows in (1, 2):
        streamer = Recorder()
        out = model.generate(
            tiny.prompt(rows),
            custom_generate=hfgen.recipe(Pairs),
            max_new_tokens=6,
            streamer=streamer,
            use_cache=False,
            eos_token_id=None,
        )
        assert torch.equal(streamer.tokens(rows), out)
        assert [tuple(put.shape) for put in streamer.puts[1:]] == [(rows, 2)] * 3


def test_stop_strings_and_criteria():
    model, tokenizer = hfgen.builtin_model(draft=True)
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    options = {"custom_generate": hfgen.recipe(Sample), "max_new_tokens": 40}
    n_prompt = inputs.input_ids.shape[1]
    free = model.generate(**inputs, **options)[0, n_prompt:]
    stop = tokenizer.decode(free[3:5])
    stopped = model.generate(**inputs, **options, stop_strings=stop, tokenizer=tokenizer)
    lengths = (n for n in range(1, 41) if stop in tokenizer.decode(free[:n]))
    assert stopped[0, n_prompt:].equal(free[: next(lengths)])
    assert stopped.shape[1] <= n_prompt + 5
    short = model.generate(
        **inputs, **options, stopping_criteria=[lambda ids, scores, **_: ids[:, -1] > -1]
    )
    assert short.shape[1] == n_prompt + 1


def test_the_strategy_sees_the_run():
    seen = {}

    class Look(Sample):
        def __init__(self, run: Run) -> None:
            super().__init__(run)
            seen["run"] = run

    model = hfgen.mix_into(tiny.llama())
    tokenizer = hfgen.builtin_model(draft=True)[1]
    model.generate(
        tiny.prompt(2),
        custom_generate=hfgen.recipe(Look),
        max_new_tokens=3,
        tokenizer=tokenizer,
        synced_gpus=False,
    )
    run = seen["run"]
    assert run.model is model
    assert run.tokenizer is tokenizer
    assert run.config.max_length == 10
    assert "tokenizer" not in run.model_kwargs


class Empty:
    def __init__(self, run: Run) -> None: ...


class WithoutStop(NextToken):
    step = result = lambda self, *_: None


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (Sample,),
            {"rank": 2},
            "Sample is called as Sample(run, **options), but got an unexpected",
        ),
        ((Rank,), {}, "Rank is called as Rank(run, **options), but missing a required"),
        (("sample",), {}, "takes a strategy's class, but got str (sample)"),
        ((lambda run: Sample(run),), {}, "takes a strategy's class, but got function"),
        (
            (Empty,),
            {},
            "lacks prefill(), decoding(), forward(), step(), stop(), result(). See",
        ),
        ((WithoutStop,), {}, "WithoutStop is not a strategy: it lacks stop(). See"),
    ],
    ids=["unknown option", "missing option", "name", "function", "no methods", "one method"],
)
def test_what_is_no_strategy(arguments, options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        hfgen.recipe(*arguments, **options)


def test_what_a_constructor_raises_reaches_the_caller():
    class Picky(Sample):
        def __init__(self, run: Run) -> None:
            raise ValueError("only on Sundays")

    streamer = Recorder()
    with pytest.raises(ValueError, match="only on Sundays"):
        hfgen.mix_into(tiny.llama()).generate(
            tiny.prompt(1), custom_generate=hfgen.recipe(Picky), streamer=streamer, max_new_tokens=3
        )
    assert streamer.ends == 1


class Unfinished(Sample):
    """Decodes, but has no result to give."""

    def result(self, run: Run) -> dict[str, Tensor | None]:
        raise ValueError("no result")


def test_a_streamer_ends_once_and_after_the_result():
    model = hfgen.mix_into(tiny.llama())
    events: list[str] = []

    class Listener:
        def put(self, tokens: Tensor) -> None:
            events.append("put")

        def end(self) -> None:
            events.append("end")

    class Told(Sample):
        def result(self, run: Run) -> dict[str, Tensor | None]:
            events.append("result")
            return super().result(run)

    for strategy, expected in (
        (Told, ["put", "put", "result", "end"]),
        (Unfinished, ["put", "put", "end"]),
    ):
        events.clear()
        with (
            pytest.raises(ValueError, match="no result")
            if strategy is Unfinished
            else nullcontext()
        ):
            model.generate(
                tiny.prompt(1),
                max_new_tokens=1,
                streamer=Listener(),
                custom_generate=hfgen.recipe(strategy),
            )
        assert events == expected


@pytest.mark.parametrize(
    ("hook", "options"),
    [
        ("_beam_search", {"num_beams": 2}),
        ("_sample", {"num_return_sequences": 2, "do_sample": True}),
    ],
)
def test_prompts_before_they_were_repeated_are_let_go(hook: str, options: dict[str, Any]) -> None:
    """What only the prefill needs is not in memory while the rest is decoded."""
    model, configs, shared = hfgen.mix_into(tiny.llama()), [], []

    def look(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Any:
        configs.append(generation_config)
        assert generation_config._call.shared_prompt is not None
        return getattr(type(model), hook)(
            model, input_ids, generation_config=generation_config, **kwargs
        )

    def held(ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        shared.append(configs[0]._call.shared_prompt)
        return False

    criteria = [held]
    model.generate(
        tiny.prompt(2),
        max_new_tokens=3,
        custom_generate=look,
        stopping_criteria=criteria,
        **options,
    )
    assert shared
    assert shared == [None] * len(shared)
