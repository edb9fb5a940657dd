"""outlines: a logits processor with a state per row, which a grammar steers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import outlines
import pytest
import torch

from tests import tiny
from tests.clients.conftest import model


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """outlines compiles a kernel that masks scores, which takes longer than all of this."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def steered() -> Any:
    return outlines.from_transformers(model(), tiny.byte_tokenizer())


@pytest.mark.parametrize("asked", [{}, {"do_sample": True}], ids=str)
def test_regular_expression(steered: Any, both: Callable, asked: dict[str, Any]) -> None:
    generator = outlines.Generator(steered, outlines.regex(r"[a-f]{3}-[0-9]{2}"))

    def run() -> Any:
        torch.manual_seed(0)
        return generator.batch(["one", "another"], max_new_tokens=8, **asked)

    theirs, ours = both(run)
    assert ours == theirs
    assert all(re.fullmatch(r"[a-f]{3}-[0-9]{2}", text) for text in ours)


def test_json_of_a_schema(steered: Any, both: Callable) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["good", "size"],
    }
    generator = outlines.Generator(steered, outlines.json_schema(schema))
    theirs, ours = both(lambda: generator("what is it?", max_new_tokens=64))
    assert ours == theirs
    assert json.loads(ours).keys() == {"good", "size"}


def test_choice_in_several_samples(steered: Any, both: Callable) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        return steered("x", Literal["yes", "no", "perhaps"], num_return_sequences=3, do_sample=True)

    theirs, ours = both(run)
    assert ours == theirs
    assert set(ours) <= {"yes", "no", "perhaps"}
