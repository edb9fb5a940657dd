"""The engine as its users may use it: from several threads, interrupted, with odd arguments, and for long."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import threading
from typing import Any

import numpy
import pytest
import torch

import hfgen
from hfgen.engine import Engine
from hfgen.engine.errors import EngineError, UnknownRequestError
from tests.test_engine import TEXTS, alone, check


@pytest.fixture(scope="module")
def builtin() -> Any:
    model, tokenizer = hfgen.builtin_model()
    return hfgen.mix_into(model), tokenizer


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rows": 0}, "`max_rows`"),
        ({"max_rows": True}, "`max_rows`"),
        ({"memory": -1}, "`memory`"),
        ({"memory": "lots"}, "`memory`"),
        ({"memory": math.nan}, "`memory`"),
        ({"prefill_tokens": 0}, "`prefill_tokens`"),
        ({"policy": "x"}, "`policy`"),
        ({"policy": ["fcfs"]}, "`policy`"),
        ({"max_queue": 0}, "`max_queue`"),
        ({"prefix_cache": True}, "`prefix_cache`"),
        ({"tokenizer": "gpt2"}, "`tokenizer`"),
        ({"model": "gpt2"}, "`model`"),
        ({"model": None}, "`model`"),
    ],
)
def test_arguments_of_an_engine_are_checked(
    builtin: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(**{"model": builtin[0]} | arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": math.nan}, "`timeout`"),
        ({"timeout": "soon"}, "`timeout`"),
        ({"timeout": True}, "`timeout`"),
        ({"priority": None}, "`priority`"),
        ({"priority": 1.5}, "`priority`"),
        ({"stop": "a", "stop_strings": "b"}, "`stop`"),
        ({"input_ids": torch.tensor([[1, 2]])}, "`input_ids`"),
    ],
)
def test_options_of_a_request_are_checked(
    builtin: Any, options: dict[str, Any], message: str
) -> None:
    engine = Engine(*builtin)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.add(TEXTS[0], **options)
    assert not engine.has_work


def test_prompts_of_all_kinds(builtin: Any) -> None:
    model, tokenizer = builtin
    engine, solo = Engine(model, tokenizer), alone(model, tokenizer, TEXTS[0], max_new_tokens=5)
    encoded = tokenizer(TEXTS[0], return_tensors="pt")
    ids = encoded.input_ids[0]
    flat = {name: value[0] for name, value in encoded.items()}
    prompts = [TEXTS[0], ids.tolist(), tuple(ids.numpy()), ids, ids[None], encoded, flat]
    options = {"max_new_tokens": 5, "priority": numpy.int64(1), "timeout": numpy.float32(600)}
    for request in [engine.add(prompt, **options) for prompt in prompts]:
        check(request.result(), solo)
    embeds = model.get_input_embeddings()(ids[None])
    solo = model.generate(inputs_embeds=embeds, max_new_tokens=5)
    output = engine.add({"inputs_embeds": embeds}, max_new_tokens=5).result()
    assert torch.equal(output.generate_output.sequences, solo)
    with pytest.raises(ValueError, match="`inputs_embeds` has 2 rows"):
        engine.add({"inputs_embeds": embeds.repeat(2, 1, 1)}, max_new_tokens=5)


def test_a_prompt_may_be_chat_messages(monkeypatch: pytest.MonkeyPatch, builtin: Any) -> None:
    model, tokenizer = builtin
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    message = {"role": "user", "content": "import"}
    solo = alone(model, tokenizer, "user: import\n", max_new_tokens=5)
    check(Engine(model, tokenizer).add([message], max_new_tokens=5).result(), solo)


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1]])
@pytest.mark.parametrize("has_prefixes", [False, True])
def test_masks_with_padding_and_holes(builtin: Any, mask: list[int], has_prefixes: bool) -> None:
    model, tokenizer = builtin
    engine = Engine(model, prefix_cache=hfgen.PrefixCache() if has_prefixes else None)
    inputs = tokenizer(TEXTS[0], return_tensors="pt") | {"attention_mask": torch.tensor([mask])}
    other = engine.add([5, 6, 7], max_new_tokens=12)
    output = engine.add(inputs, max_new_tokens=10).result()
    assert output.error is None
    solo = model.generate(**inputs, max_new_tokens=10)
    assert torch.equal(output.generate_output.sequences, solo)
    other.cancel()


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_no_token_is_decoded_for_a_request_that_wants_none(
    builtin: Any, way: dict[str, Any]
) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    nothing, other = (engine.add(TEXTS[0], max_new_tokens=n, **way) for n in (0, 3))
    check(nothing.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=0, **way))
    check(other.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=3, **way))
    assert engine.n_rows == engine.scheduler.n_bytes == 0


# ---------------------------------------------------------------- threads and callbacks


@pytest.mark.parametrize("n_steppers", [1, 3])
def test_any_thread_may_add_cancel_and_step(builtin: Any, n_steppers: int) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, max_rows=8)
    wanted = {
        (text, n): alone(model, tokenizer, text, max_new_tokens=n) for text in TEXTS for n in (1, 3)
    }
    asked: list[Any] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def add(seed: int) -> None:
        chooser = random.Random(seed)
        for i in range(15):
            key = chooser.choice(list(wanted))
            request = engine.add(key[0], max_new_tokens=key[1])
            asked.append((request, wanted[key]))
            if i % 7 == seed:
                request.cancel()

    def step() -> None:
        while engine.has_work or not is_over.is_set():
            engine.step()

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    steppers = [threading.Thread(target=guarded, args=(step,)) for _ in range(n_steppers)]
    adders = [threading.Thread(target=guarded, args=(add, i)) for i in range(4)]
    for thread in [*steppers, *adders]:
        thread.start()
    for thread in adders:
        thread.join()
    outputs = [(request.result(), solo) for request, solo in asked]  # while others step
    is_over.set()
    for thread in steppers:
        thread.join()
    assert errors == []
    assert len(outputs) == 60
    for output, solo in outputs:
        if output.finish_reason != "cancelled":
            check(output, solo)
    assert engine.n_rows == engine.n_waiting == engine.scheduler.n_bytes == 0


def test_a_callback_may_add_but_not_step_or_close(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    added: list[Any] = []

    def adds(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        added.append(engine.add(TEXTS[1], max_new_tokens=2))
        return scores

    def calls(method: Any) -> Any:
        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            method()
            return scores

        return processor

    good = engine.add(TEXTS[0], max_new_tokens=3, logits_processor=[adds])
    bad = [
        engine.add(TEXTS[2], max_new_tokens=3, logits_processor=[calls(method)])
        for method in (engine.step, engine.close)
    ]
    check(good.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=3))
    for request in bad:
        assert isinstance(request.result().error, EngineError)
    for request in added:
        check(request.result(), alone(model, tokenizer, TEXTS[1], max_new_tokens=2))
    assert len(added) == 3


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize("forward", [1, 2, 3])
def test_an_interrupted_step_ends_what_it_may_have_broken(builtin: Any, forward: int) -> None:
    """In the first or second prompt's forward, or in that of the rows that decode."""
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, max_rows=3)
    first = engine.add(TEXTS[0], max_new_tokens=12)
    engine.step()
    engine.step()
    others = [engine.add(TEXTS[1], max_new_tokens=12), engine.add([5, 6], max_new_tokens=12)]
    waiting = engine.add(TEXTS[2], max_new_tokens=4, num_beams=3)
    calls = []

    def interrupt(*arguments: Any) -> None:
        calls.append(0)
        if len(calls) == forward:
            raise KeyboardInterrupt

    interrupt.is_row_wise = True  # type: ignore[attr-defined]  # else requests decode one at a time
    hook = model.model.layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        hook.remove()
    for request in (first, *others):
        assert request.done
        output = request.result()
        assert isinstance(output.error, KeyboardInterrupt)
        assert output.finish_reason == "error"
    check(waiting.result(), alone(model, tokenizer, TEXTS[2], max_new_tokens=4, num_beams=3))
    assert engine.n_rows == engine.scheduler.n_bytes == 0


def test_an_interrupted_choice_ends_what_it_may_have_broken(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)

    def interrupts(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 9:
            raise KeyboardInterrupt
        return scores

    requests = [
        engine.add(TEXTS[1], max_new_tokens=9),
        engine.add(TEXTS[0], max_new_tokens=9, logits_processor=[interrupts]),
        engine.add(TEXTS[2], max_new_tokens=9, num_beams=2),
    ]
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.events():
            pass
    assert [type(request.result().error) for request in requests] == [KeyboardInterrupt] * 3
    later = engine.add(TEXTS[0], max_new_tokens=3)
    check(later.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=3))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_the_callers_gradient_mode_does_not_matter(builtin: Any, mode: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    first = engine.add(TEXTS[0], max_new_tokens=8)
    engine.step()
    with mode():
        second = engine.add(TEXTS[1], max_new_tokens=8)
        engine.step()
        engine.step()
    check(first.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=8))
    check(second.result(), alone(model, tokenizer, TEXTS[1], max_new_tokens=8))


# ---------------------------------------------------------------- for long


def test_what_nobody_keeps_does_not_accumulate(
    builtin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfgen.engine.engine.MAX_DONE", 3)
    engine = Engine(*builtin)
    kept = engine.add(TEXTS[0], max_new_tokens=2)
    for _ in range(6):  # of results alone, events do not pile up
        engine.add(TEXTS[0], max_new_tokens=2).result()
    assert sum(map(len, engine._ready.values())) <= 2
    ids = []
    for _ in range(6):
        ids.append(engine.add(TEXTS[0], max_new_tokens=2).id)
        for event in engine.events():
            last = event.request
    gc.collect()
    assert len(engine.requests) == 4
    assert last.result().token_ids == engine.result(ids[-2]).token_ids == kept.result().token_ids
    with pytest.raises(UnknownRequestError, match="3 others"):
        engine.result(ids[0])


def test_the_last_events_come_after_close(builtin: Any) -> None:
    engine = Engine(*builtin)
    request = engine.add(TEXTS[0], max_new_tokens=20)
    next(events := engine.events())
    engine.close()
    engine.close()
    assert [event.finish_reason for event in events][-1] == "cancelled"
    assert request.result().finish_reason == "cancelled"
    assert list(engine.events()) == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(builtin: Any, copied: Any) -> None:
    engine = Engine(*builtin)
    request = engine.add(TEXTS[0], max_new_tokens=2)
    with pytest.raises(TypeError, match="make another one"):
        copied(engine)
    assert repr(request) == "EngineRequest('req_0', 'waiting')"
    assert len(repr(request.result())) < 600


def test_a_processor_may_return_another_dtype(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    options = {"max_new_tokens": 4, "logits_processor": [lambda ids, scores: scores.double()]}
    check(engine.add(TEXTS[0], **options).result(), alone(model, tokenizer, TEXTS[0], **options))


def test_a_request_that_has_come_to_its_end_is_not_cancelled(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    request = engine.add(TEXTS[0], max_new_tokens=4)
    end = engine.steps.end
    engine.steps.end = lambda *arguments: (request.cancel(), end(*arguments))[1]  # type: ignore
    check(request.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=4))
    assert engine.stats.n_finished == 1
