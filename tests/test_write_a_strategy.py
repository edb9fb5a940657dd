"""The code of docs/write-a-strategy.md: run as it stands, and checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hfgen
from tests import tiny

PAGE = Path(__file__).parent.parent / "docs" / "write-a-strategy.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    return names


def test_the_strategy_is_short():
    assert len(BLOCKS) == 4
    assert "class DynamicTemperature" in BLOCKS[0]
    assert len(BLOCKS[0].splitlines()) < 40


def test_what_the_page_streams_is_what_it_returns(capsys):
    names: dict[str, Any] = {}
    for block in BLOCKS[:2]:
        exec(block, names)
    output, tokenizer = names["output"], names["tokenizer"]
    prompt = tokenizer("def is_even(number):\n").input_ids
    text = tokenizer.decode(output.sequences[0, len(prompt) :])
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")
    assert len(output.scores) == output.sequences.shape[1] - len(prompt) <= 60
    assert len(output.scores) == 60 or "\n\n" in text or text.endswith(tokenizer.eos_token)
    assert "\n\n" not in text[:-4]


def test_the_batch(page):
    batch = page["batch"]
    assert batch.shape[0] == 4
    assert not torch.equal(batch[0], batch[1])


def test_the_limits_of_the_dynamic_temperature(page):
    """With theta 0 it is plain sampling, with a large one greedy, and in between neither."""
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(4)

    def sample(**options: float) -> torch.Tensor:
        torch.manual_seed(0)
        recipe = hfgen.recipe(page["DynamicTemperature"], **options) if options else None
        return model.generate(ids, do_sample=True, custom_generate=recipe, max_new_tokens=12)

    plain, greedy = sample(), model.generate(ids, max_new_tokens=12)
    assert torch.equal(sample(temperature=1.0, theta=0.0), plain)
    assert torch.equal(sample(temperature=1.0, theta=1e4), greedy)
    between = sample(temperature=1.0, theta=2.0)
    assert not torch.equal(between, plain)
    assert not torch.equal(between, greedy)


def test_the_temperature_of_each_row(page):
    """Row 0 is flat over 97 tokens, row 1 has two likely ones: known entropies."""
    seen = {}

    class Look(page["Sample"]):  # what `super().choose` is given
        def choose(self, run: Any, scores: torch.Tensor) -> torch.Tensor:
            seen["scores"] = scores
            return super().choose(run, scores)

    class Dynamic(page["DynamicTemperature"], Look):
        pass

    two = torch.full((97,), -torch.inf)
    two[[5, 6]] = 3.0
    given = torch.stack([torch.full((97,), 3.0), two])
    hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(2),
        do_sample=True,
        custom_generate=hfgen.recipe(Dynamic, temperature=2.0, theta=0.5),
        logits_processor=[lambda ids, scores: given.clone()],
        max_new_tokens=1,
    )
    entropy = torch.tensor([97.0, 2.0]).log()
    expected = 3.0 / (2.0 * 0.8 ** (0.5 / entropy))
    assert torch.allclose(seen["scores"][:, 5], expected)
    assert (seen["scores"][1, 7:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("call", "options"),
    [({}, {}), ({"do_sample": True}, {"temperature": 0.0}), ({"do_sample": True}, {"theta": -1.0})],
    ids=["greedy", "cold", "negative"],
)
def test_wrong_options(page, call, options):
    with pytest.raises(ValueError, match=r"DynamicTemperature samples|`temperature` has to be"):
        hfgen.mix_into(tiny.llama()).generate(
            tiny.prompt(1),
            custom_generate=hfgen.recipe(page["DynamicTemperature"], **options),
            max_new_tokens=4,
            **call,
        )


def test_from_scratch_on_the_page(page):
    inputs = page["tokenizer"](page["prompts"], return_tensors="pt", padding=True)
    assert torch.equal(page["greedy"], page["model"].generate(**inputs, max_new_tokens=20))


@pytest.mark.parametrize("build", [tiny.llama, tiny.t5, tiny.bart])
def test_from_scratch_is_greedy_decoding(page, build):
    model = hfgen.mix_into(build())
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "eos_token_id": list(range(8, 60, 4)),
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    expected = model.generate(tiny.prompt(4), **options)
    result = model.generate(tiny.prompt(4), custom_generate=hfgen.recipe(page["Greedy"]), **options)
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(result[name]) == len(expected[name])
        assert all(map(torch.equal, result[name], expected[name]))
    assert list(result) == list(expected)


def test_what_it_says_of_the_methods_and_shapes(page):
    """The tables name what there is."""
    text = PAGE.read_text(encoding="utf-8")
    tables = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    named = {name for cell in tables for name in re.findall(r"`(\w+)", cell)}
    from hfgen.decoding.recipes import METHODS

    assert set(METHODS) <= named
    assert {"batch", "rows", "length", "n_new", "vocab"} == named - set(METHODS)
