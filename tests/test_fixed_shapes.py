"""With ``fixed_shapes``, an engine's model decodes 1, 2, 4, 8, … rows, and no request can tell."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hfgen
from hfgen.engine import Engine
from hfgen.memory.caches import growing
from tests import tiny
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.test_length_classes import WAYS, check, prompt, solo

DECODERS = {family.name: family for family in DECODER_FAMILIES}


def decoded_shapes(model: Any) -> tuple[list[tuple[int, ...]], Any]:
    """The shapes of ``input_ids (rows, 1)`` that a model gets from now on, and the hook that notes them."""
    shapes = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", kwargs.get("decoder_input_ids"))
        if ids.shape[1] == 1:
            shapes.append(tuple(ids.shape))

    note.is_row_wise = True  # type: ignore[attr-defined]
    return shapes, model.register_forward_pre_hook(note, with_kwargs=True)


def same_as_alone(
    model: Any, engine: Engine, asked: list[tuple[torch.Tensor, dict[str, Any]]]
) -> set[int]:
    """Decode all, each of which has to equal its own call; how many rows the model has seen at once."""
    shapes, hook = decoded_shapes(model)
    requests = []
    for number, (inputs, options) in enumerate(asked):
        requests.append(engine.add(inputs, **options))
        for _ in range(number % 3):
            engine.step()
    for _ in engine.events():
        for rows in engine.steps.joined:
            assert len(rows.batch) == len(rows.owners)
            assert len(rows) == sum(decoding.n_rows for decoding in rows.members)
            for decoding in rows.members:
                assert {rows.owners[place] for place in decoding.places} == {decoding}
    hook.remove()
    for request, (inputs, options) in zip(requests, asked, strict=True):
        check(request.result(), solo(model, inputs, options))
    return {n_rows for n_rows, _ in shapes}


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen3_next"])
def test_the_model_sees_powers_of_two(family: str) -> None:
    model = hfgen.mix_into(DECODERS[family].build()).eval()
    chance = random.Random(family)
    asked = []
    for number in range(11):
        options = chance.choice(WAYS) | {"max_new_tokens": chance.randint(2, 14)}
        asked.append((prompt(chance.randint(3, 20), number), options | {"eos_token_id": None}))
    seen = same_as_alone(model, Engine(model, fixed_shapes=True, max_rows=13), asked)
    assert seen <= {1, 2, 4, 8, 16}
    assert len(seen) > 2


def test_spare_rows_stay_within_the_positions_of_the_model() -> None:
    """What a request of 62 tokens leaves behind has no 65th, of a model with 64 positions."""
    model = hfgen.mix_into(tiny.gpt2())
    options = [{"max_new_tokens": n, "eos_token_id": None} for n in (4, 30, 30, 30)]
    asked = [(prompt(n, n), each) for n, each in zip((58, 5, 6, 7), options, strict=True)]
    engine = Engine(model, fixed_shapes=True)
    engine.steps.classes.fixed_cost = float("inf")
    assert same_as_alone(model, engine, asked) <= {1, 2, 4}


def test_encoder_decoders_too() -> None:
    model = hfgen.mix_into(tiny.t5())
    options = [{"max_new_tokens": n, "eos_token_id": None} for n in (4, 12, 9)]
    asked = [(prompt(n, n), each) for n, each in zip((9, 5, 14), options, strict=True)]
    assert same_as_alone(model, Engine(model, fixed_shapes=True), asked) <= {1, 2, 4}


def test_the_cache_stays_where_it_is_while_rows_take_the_places_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", 0)
    model = hfgen.mix_into(tiny.llama())
    engine = Engine(model, fixed_shapes=True)

    def buffers() -> list[int]:
        (rows,) = engine.steps.joined
        layers = rows.batch.caches["past_key_values"].layers
        return [layer._keys.buffer.data_ptr() for layer in layers]

    requests = [
        engine.add(prompt(12 - n, n), max_new_tokens=25, eos_token_id=None) for n in range(5)
    ]
    for _ in range(3):
        engine.step()
    before = buffers()
    shapes, hook = decoded_shapes(model)
    for number in range(5):  # five to eight rows, and five again
        requests.append(engine.add(prompt(9, 10 + number), max_new_tokens=4, eos_token_id=None))
        engine.step()
        assert buffers() == before
    requests[1].cancel()
    engine.step()
    assert buffers() == before
    hook.remove()
    assert set(shapes) == {(8, 1)}
    engine.close()
