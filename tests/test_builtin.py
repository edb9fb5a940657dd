"""The built-in model: what is shipped, how it loads, and that it is good enough to be of use."""

from __future__ import annotations

import ast
import math
import socket
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hfgen.tools import builtin
from hfgen.tools.builtin import builtin_model
from hfgen.tools.cli import demo

FOLDER = Path(builtin.__file__).parent
STDLIB = Path(sysconfig.get_path("stdlib"))
HELD_OUT_FILES = ["_collections_abc.py", "ftplib.py", "pydoc.py"]  # not among the training texts


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return builtin_model()[0]


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return builtin_model(draft=True)[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return builtin_model()[1]


@pytest.fixture(scope="module")
def held_out(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Ids `(6, 1024)`: the first two full rows of each held-out file."""
    texts = [(STDLIB / name).read_text(encoding="utf-8") for name in HELD_OUT_FILES]
    ids = tokenizer(texts, truncation=True, max_length=2048, return_tensors="pt").input_ids
    return ids.view(6, 1024)


@pytest.fixture(scope="module")
@torch.no_grad()
def logits(
    model: PreTrainedModel, draft: PreTrainedModel, held_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the model and of its draft, for each position of the held-out rows."""
    found = (each(input_ids=held_out, use_cache=False).logits for each in (model, draft))
    return next(found), next(found)


def test_all_files_together_are_small() -> None:
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 24_000_000


def test_license_and_card_lie_beside_the_weights() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (FOLDER / "LICENSE-PSF.txt").read_text()
    assert "perplexity" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("is_draft", [False, True])
def test_loads_without_a_network(is_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the built-in model must not ask for a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, tokenizer = builtin_model(draft=is_draft)
    assert isinstance(model, PreTrainedModel)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32
    assert not model.training
    assert model.generation_config.bos_token_id == tokenizer.bos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == model.config.max_position_embeddings


@pytest.mark.parametrize("value", [1, "draft", None])
def test_draft_must_be_a_bool(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"draft must be True or False, got .*\(" + type(value).__name__
    ):
        builtin_model(value)


def test_each_call_loads_anew(model: PreTrainedModel) -> None:
    other, _ = builtin_model()
    assert other is not model
    other.generation_config.max_new_tokens = 3
    assert model.generation_config.max_new_tokens is None


def test_held_out_files_were_held_out() -> None:
    """The rule of `scripts/train_builtin_model.py`."""
    assert all(zlib.crc32(name.encode()) % 33 == 0 for name in HELD_OUT_FILES)


def test_vocabularies_are_equal(
    model: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert model.config.vocab_size == draft.config.vocab_size == len(tokenizer) == 2048


def test_draft_costs_at_most_a_sixth(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Every parameter is used by every token; the tied embedding counts once, as the output layer."""
    assert model.config.tie_word_embeddings
    assert draft.config.tie_word_embeddings
    assert draft.num_parameters() * 6 <= model.num_parameters()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(a, b):\n    return a  +  b\n",
        "class A:\n\tx = 1   \r\n\r\n\n        # deep\n  ",
        "naïve — 日本語 🐍 \u200b\x00\x7f",
        "a\tb  c   d.\u00a0e , f ! don't it 's",
        '"""Doc."""  # 12345678 0x1F 1e-9',
    ],
)
def test_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_gives_source_back(tokenizer: PreTrainedTokenizerFast) -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    ids = tokenizer(source).input_ids
    assert tokenizer.decode(ids) == source
    assert len(source.encode()) / len(ids) > 2


def test_newline_stands_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """A prompt cut after any line has the ids that the whole text begins with."""
    text = "def f(x):\n    if x:\n\n        return 1\n"
    ids = tokenizer(text).input_ids
    for end in (index + 1 for index, char in enumerate(text) if char == "\n"):
        prompt = tokenizer(text[:end]).input_ids
        assert ids[: len(prompt)] == prompt


def test_greedy_completion_is_python_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = tokenizer("def ", return_tensors="pt")
    first = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    again = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    assert torch.equal(first, again)
    text = tokenizer.decode(first[0], skip_special_tokens=True)
    assert text.startswith("def ")
    assert "(self" in text or "):" in text


def test_padded_batch_completes_as_single_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompts = ["import os\nimport ", "class Stack:\n    def __init__(self, items):\n        self."]
    batch = model.generate(
        **tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=12
    )
    for prompt, row in zip(prompts, batch, strict=True):
        single = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12)
        assert row[-12:].tolist() == single[0, -12:].tolist()


@pytest.mark.parametrize(("is_draft", "bound"), [(False, 9.0), (True, 18.0)])
def test_perplexity_on_held_out_text(
    logits: tuple[torch.Tensor, torch.Tensor], held_out: torch.Tensor, is_draft: bool, bound: float
) -> None:
    predicted = logits[is_draft][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(predicted, held_out[:, 1:].flatten()).item()
    assert math.exp(loss) < bound


def test_draft_agrees_with_the_model_on_held_out_text(
    logits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    chosen, drafted = (each.argmax(-1) for each in logits)
    assert (chosen == drafted).float().mean().item() >= 0.55


def test_late_positions_are_as_good_as_early_ones(
    logits: tuple[torch.Tensor, torch.Tensor], held_out: torch.Tensor
) -> None:
    """All positions of the config were trained: the second half of a full row is no worse than the first."""
    predicted = logits[0][:, :-1].transpose(1, 2)
    losses = F.cross_entropy(predicted, held_out[:, 1:], reduction="none")
    assert losses[:, 512:].mean().item() < losses[:, :512].mean().item() + 0.2


def test_the_demo_completes_a_function(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    call = {"stop_strings": "\n\n", "tokenizer": tokenizer, "return_dict_in_generate": True}
    inputs = tokenizer(demo.PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=demo.NEW_TOKENS, do_sample=False, **call)
    assert output.finish_reasons == ["stop"]
    ast.parse(demo.PROMPT + output.texts[0])
