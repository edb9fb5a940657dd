"""`hfgen.ray.Generate` as Ray calls it, in one event loop; with Ray itself: tests/clients/test_ray.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hfgen
from hfgen.ray import FACTS, Generate, plain
from tests import tiny

MODEL = hfgen.mix_into(tiny.llama())


def texts(*values: Any) -> Any:
    return np.array(values, dtype=object)


def column(*rows: Any) -> Any:
    found = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        found[index] = np.array(row)
    return found


def answer(generate: Generate, *batches: dict[str, Any]) -> list[dict[str, Any]]:
    """What becomes of batches that are in flight at the same time; the rows stay in their order."""

    async def one(batch: dict[str, Any]) -> list[dict[str, Any]]:
        return [found async for found in generate(batch)]

    async def all_of_them() -> list[list[dict[str, Any]]]:
        try:
            return await asyncio.gather(*map(one, batches))
        finally:
            if generate._service is not None:
                await (await generate._service).close()

    return [found for (found,) in asyncio.run(all_of_them())]


def test_rows_get_what_solo_calls_give():
    model, tokenizer = hfgen.builtin_model()
    prompts = ["import os\n", "def f(x):", "class A:"]
    generate = Generate(
        lambda: (model, tokenizer),
        arguments={"seed": "id", "max_new_tokens": "length"},
        columns={name: name for name in FACTS},
        do_sample=True,
        num_return_sequences=2,
    )
    batch = {"id": np.arange(3), "prompt": texts(*prompts), "length": np.array([4.0, 7.0, 5.0])}
    (found,) = answer(generate, batch)
    assert list(found["id"]) == [0, 1, 2]
    for row, prompt in enumerate(prompts):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs,
            tokenizer=tokenizer,
            do_sample=True,
            seed=row,
            num_return_sequences=2,
            max_new_tokens=int(batch["length"][row]),
            return_dict_in_generate=True,
        )
        assert found["texts"][row] == output.texts
        assert found["text"][row] == output.texts[0]
        n_prompt = inputs.input_ids.shape[1]
        assert found["token_ids"][row] == output.sequences[0, n_prompt:].tolist()
        assert found["n_tokens"][row] == 2 * batch["length"][row]
        assert found["n_prompt_tokens"][row] == n_prompt
        assert (found["finish_reason"][row], found["error"][row]) == ("length", None)


def test_batches_in_flight_decode_together():
    """Each has 2 rows, the engine decodes 6 at once."""
    generate = Generate(lambda: MODEL, max_rows=6, max_new_tokens=8, eos_token_id=None, columns={})
    n_rows: list[int] = []
    step = generate.engine.step

    def counting() -> Any:
        events = step()
        n_rows.append(generate.engine.n_rows)
        return events

    generate.engine.step = counting  # type: ignore[method-assign]
    ids = [row.tolist() for row in tiny.prompt(6, 5)]
    batches = [{"prompt": column(*ids[2 * n : 2 * n + 2])} for n in range(3)]
    assert len(answer(generate, *batches)) == 3
    assert max(n_rows) == 6


def test_a_row_that_cannot_be_used_has_its_error():
    generate = Generate(
        lambda: MODEL, max_new_tokens=3, arguments={"temperature": "t"}, do_sample=True
    )
    good = tiny.prompt(1, 4)[0].tolist()
    batch = {"prompt": column(good, [], good), "t": np.array([np.nan, 1.0, -1.0])}
    (found,) = answer(generate, batch)
    errors = list(found["generate_error"])
    assert errors[0] is None
    assert "empty" in errors[1]
    assert "temperature" in errors[2]
    assert list(found["finish_reason"][1:]) == ["error", "error"]


def test_any_other_error_is_raised():
    def lost(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("device lost")

    generate = Generate(lambda: MODEL, logits_processor=[lost], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="device lost"):
        answer(generate, {"prompt": column([5, 6], [7, 8, 9])})
    assert generate.engine.n_rows == 0


def test_columns_are_checked():
    with pytest.raises(ValueError, match="'txt'"):
        Generate(lambda: MODEL, columns={"txt": "a"})
    prompts = column([5, 6])
    with pytest.raises(ValueError, match=r"'finish_reason'.*already"):
        answer(Generate(lambda: MODEL), {"prompt": prompts, "finish_reason": texts("x")})
    with pytest.raises(ValueError, match="'question'"):
        answer(Generate(lambda: MODEL, prompt="question"), {"prompt": prompts})


def test_models_by_name(tmp_path: Path):
    tiny.llama(vocab_size=258).save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    for tokenizer in None, str(tmp_path), tiny.byte_tokenizer():
        generate = Generate(str(tmp_path), tokenizer, max_new_tokens=3)
        (found,) = answer(generate, {"prompt": texts("abc")})
        assert (found["n_prompt_tokens"][0], found["generate_error"][0]) == (3, None)


def test_values_of_columns():
    message = {"role": "user", "content": "hi", "name": None}
    chat = np.array([message], dtype=object)
    assert plain(chat) == [{"role": "user", "content": "hi"}]
    assert plain(np.float64("nan")) is None
    assert type(plain(np.int64(3))) is int
    assert plain(np.str_("a")) == "a"
