"""Calls of several threads with one model: each holds another one at the place that matters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
import transformers

import hfgen
from hfgen.decoding import activations
from hfgen.running import prompts, shared_prefix
from hfgen.running.exact import spans, switch, trial
from tests import tiny
from tests.test_fanout import IDS, MASK, rows_and_lengths

GREEDY = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function in another thread, and returns what it does."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda function: threads.submit(function).result(60)


@contextmanager
def recording(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another thread is about to forward what it records of a call with ``model``: its hooks are there."""
    is_inside, may_go_on, forward = threading.Event(), threading.Event(), activations.forward

    def held(*args: Any, **kwargs: Any) -> Any:
        is_inside.set()
        assert may_go_on.wait(60)
        return forward(*args, **kwargs)

    monkeypatch.setattr(activations, "forward", held)
    options = {**GREEDY, "record": ["model.layers.*.mlp"], "return_dict_in_generate": True}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(model.generate, tiny.prompt(1, 9, seed=1), **options)
        try:
            assert is_inside.wait(60)
            assert model.model.layers[0].mlp._forward_hooks
            yield
        finally:
            may_go_on.set()
        assert len(call.result().activations) == len(model.model.layers)


@contextmanager
def held(function: Callable[[Any], Any], model: Any) -> Iterator[None]:
    """Another thread is in the first forward that ``function(model)`` makes."""
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_inside.set()
            assert may_go_on.wait(60)

    with ThreadPoolExecutor(1) as threads, model.lm_head.register_forward_hook(hold):
        call = threads.submit(function, model)
        try:
            assert is_inside.wait(60)
            yield
        finally:
            may_go_on.set()
        call.result(60)


@pytest.mark.parametrize(
    "function", [hfgen.card, lambda model: shared_prefix.forward(model, [[5, 6, 7]])]
)
def test_a_trial_leaves_what_other_threads_set_on_the_model(function: Any, model: Any) -> None:
    """A training loop's mode, and that transformers has put its hooks for hidden states on the layers."""
    ids = tiny.prompt(1, 6)
    options = {**GREEDY, "output_hidden_states": True, "return_dict_in_generate": True}
    with held(function, model):
        during = model.generate(ids, **options)
        model.train()
    assert all(module.training for module in model.modules())
    after = model.eval().generate(ids, **options)
    assert [len(states) for states in after.hidden_states] == [3, 3, 3, 3]
    assert torch.equal(after.sequences, during.sequences)


def test_a_card_is_made_in_eval_mode_beside_one_that_trains(model: Any) -> None:
    """The trial leaves the mode to the thread that trains, from its first forward on."""
    expected = hfgen.card(model)
    model.train()
    model.lm_head.register_forward_hook(lambda *_: modes.append(model.training))
    modes: list[bool] = []
    assert hfgen.card(model).operations == expected.operations
    assert modes == [True]
    assert model.training


def test_draws_of_another_thread_are_not_taken_for_the_models(
    model: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers would come again, and no later call of a model of this class would share its prompts."""
    monkeypatch.setattr(prompts, "_NOT_SHARED", WeakSet())
    expected = tiny.llama().generate(IDS, attention_mask=MASK, num_beams=3, max_new_tokens=4)
    drawn: list[torch.Tensor] = []

    def draw(*_: Any) -> None:
        drawn.append(other(lambda: torch.rand(())))

    draw.is_row_wise = True
    torch.manual_seed(0)
    with model.register_forward_hook(draw):
        tokens = model.generate(IDS, attention_mask=MASK, num_beams=3, max_new_tokens=4)
    assert torch.equal(tokens, expected)
    torch.manual_seed(0)
    assert torch.equal(torch.stack(drawn), torch.rand(len(drawn)))
    shapes, tokens = rows_and_lengths(model, IDS, attention_mask=MASK, num_beams=3)
    assert shapes[0] == (2, 6)
    assert torch.equal(tokens, expected)


def test_records_of_another_thread_leave_stored_prefixes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, ids = hfgen.PrefixCache(), tiny.prompt(1, 9)

    def call() -> Any:
        return model.generate(ids, **GREEDY, prefix_cache=prefixes)

    expected = call()
    with recording(model, monkeypatch):
        assert torch.equal(call(), expected)
    assert torch.equal(call(), expected)
    assert (prefixes.stats.lookups, prefixes.stats.hits) == (3, 2)
    assert not prefixes.stats.bypassed


def test_hooks_that_come_and_go_while_a_call_looks_at_them(model: Any, other: Any) -> None:
    """As it is looked at, another thread adds a hook to the module and removes it."""
    lm_head, ids, prefixes = model.lm_head, tiny.prompt(1, 9), hfgen.PrefixCache()

    class Hook:
        def __call__(self, *_: Any) -> None:
            pass

        @property
        def __module__(self) -> str:
            other(lambda: lm_head.register_forward_pre_hook(Hook.__call__).remove())
            return "torch"

    expected = model.generate(ids, **GREEDY)
    for _ in range(2):
        lm_head.register_forward_pre_hook(Hook())
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY, prefix_cache=prefixes), expected)
    assert prefixes.stats.hits == 1


def test_methods_that_are_patched_while_a_call_looks_at_them(
    model: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows may share their prompt is seen by all methods, those of transformers' mixin among them."""

    class Method:
        @property
        def __func__(self) -> None:
            other(hfgen.patch)

    monkeypatch.setattr(transformers.GenerationMixin, "looked_at", Method(), raising=False)
    try:
        shapes, _ = rows_and_lengths(model, IDS, attention_mask=MASK, num_beams=3)
    finally:
        hfgen.unpatch()
    assert shapes[0] == (2, 6)


def test_a_call_of_transformers_goes_on_where_another_thread_patches(other: Any) -> None:
    """Its config, which upstream has prepared, lacks hfgen's own fields."""

    class Patching(transformers.GenerationConfig):
        def get_generation_mode(self, *args: Any) -> Any:
            other(hfgen.patch)
            return super().get_generation_mode(*args)

    model, options = tiny.llama(), {**GREEDY, "num_beams": 3}
    expected = model.generate(IDS, attention_mask=MASK, **options)
    try:
        found = model.generate(IDS, Patching(), attention_mask=MASK, **options)
    finally:
        while hfgen.is_active(model):
            hfgen.unpatch()
    assert torch.equal(found, expected)


def test_two_threads_mix_a_class_at_once(other: Any) -> None:
    """All of its models have one class: the other thread mixes it while this one makes the mixed class."""
    classes = list[Any]()

    class Meta(type(transformers.LlamaForCausalLM)):  # type: ignore[misc]
        def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
            if hfgen.GenerationMixin in bases and not classes:
                classes.append(None)
                classes[0] = other(lambda: hfgen.mix_into(Model))
            return super().__new__(cls, name, bases, names)

    class Model(transformers.LlamaForCausalLM, metaclass=Meta):
        pass

    assert hfgen.mix_into(Model) is classes[0] is hfgen.mix_into(Model)


def test_two_threads_prepare_exact_models_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that records first does not lose sight of its attention when the other one ends."""
    models, run_model, second = [tiny.llama(), tiny.llama()], switch.trial.run_model, list[Any]()

    def begins_second(model: Any) -> None:
        if not second:
            second.append(threads.submit(hfgen.exact, models[1]))
            wait(second, timeout=1)
        run_model(model)

    monkeypatch.setattr(switch.trial, "run_model", begins_second)
    with ThreadPoolExecutor(1) as threads:
        reports = [hfgen.exact(models[0]).exactness, second[0].result(60).exactness]
    assert str(reports[0]) == str(reports[1])
    assert "attention" in str(reports[0])


def test_a_trial_of_attention_is_of_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact models of other threads go on with numbers of keys that have passed, also where it is interrupted."""
    monkeypatch.setattr(spans, "LAST_KEYS", keys := {(torch.float32, 24): (64, 512)})
    monkeypatch.setattr(trial, "LAST_KEYS", keys)
    during: list[Any] = []

    def interrupted(*_: Any) -> None:
        during.append(dict(keys))
        if len(during) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(trial, "_try_last", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.of_attention(4, 2, 24, torch.float32, -1)
    assert [*during, keys] == [{(torch.float32, 24): (64, 512)}] * 3
    assert spans.local.tried_keys is None
