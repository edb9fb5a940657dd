"""What the tests of client libraries share: the same call with transformers' generation and hfgen's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hfgen
from hfgen.decoding import loop
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model() -> Any:
    """A Llama that reads and writes bytes, with the ids of ``tiny.byte_tokenizer``."""
    return tiny.llama(vocab_size=258, eos_token_id=0, bos_token_id=0, pad_token_id=1)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """``model()`` and its tokenizer, with a chat template, as ``save_pretrained`` writes them."""
    path = tmp_path / "model"
    model().save_pretrained(path)
    tiny.byte_tokenizer(TEMPLATE).save_pretrained(path)
    return str(path)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """``both(call)``: what ``call()`` returns with transformers, and under ``hfgen.patched()``.

    It is certain that hfgen's loop has not run the first time, and has the second time.
    """
    steps = 0
    original = loop.steps

    def counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal steps
        for step in original(*args, **kwargs):
            steps += 1
            yield step

    monkeypatch.setattr(loop, "steps", counting)

    def run(call: Callable[[], Any]) -> tuple[Any, Any]:
        theirs = call()
        assert steps == 0
        with hfgen.patched():
            ours = call()
        assert steps > 0
        return theirs, ours

    return run
