"""The twin of learn/ has the tokens of transformers, before the lessons and after each of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import learn.generate
from learn import lessons
from learn.generate import Config, generate
from tests.parity.decoder_families import DECODER_FAMILIES, ROWS
from tests.parity.family import Limit
from tests.parity.harness import FAMILIES, quiet, upstream
from tests.versions import IS_5_23, IS_5_24

#: Decoder-only families whose tokens are not the twin's, and why.
FORCED = (
    "its generation config forces an EOS token at the full length, which the twin does not know"
)
OWN_CACHE = "its cache is no DynamicCache"
OWN_INPUTS = "its forward takes other inputs, which prepare_inputs_for_generation makes"
NO_LENGTH = "its state has no length by which the twin could tell what was forwarded"
LEFT_OUT = {
    "bart": FORCED,
    "blenderbot": FORCED,
    "blenderbot-small": FORCED,
    "marian": FORCED,
    "mbart": FORCED,
    "pegasus": FORCED,
    "plbart": FORCED,
    "minimax": OWN_CACHE,
    "reformer": OWN_CACHE,
    "rwkv": OWN_CACHE,
    "blt": OWN_CACHE,
    "cpmant": OWN_INPUTS,
    "flaubert": OWN_INPUTS,
    "xlm": OWN_INPUTS,
    "xlnet": OWN_INPUTS,
    "falcon_mamba": NO_LENGTH,
    "mamba": NO_LENGTH,
    "mamba2": NO_LENGTH,
}
if not IS_5_23:
    LEFT_OUT["recurrent_gemma"] = "before 5.23, it makes masks that are shorter than its keys"
if IS_5_24:
    LEFT_OUT["xlstm"] = OWN_CACHE
PASSING = [family.name for family in DECODER_FAMILIES if family.name not in LEFT_OUT]

LEARN = Path(learn.generate.__file__).parent

#: Several EOS tokens, so that rows end at different times.
EOS = [2, 7, 11, 13, 23, 29, 31]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"eos_token_id": EOS},
    "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3, "eos_token_id": EOS},
    "early": {"num_beams": 2, "eos_token_id": EOS, "early_stopping": True},
    "never": {
        "num_beams": 2,
        "eos_token_id": EOS,
        "early_stopping": "never",
        "length_penalty": 2.0,
    },
    "beam sample": {"num_beams": 2, "eos_token_id": EOS, "do_sample": True, "top_p": 0.9},
}


def arguments(family: str, mode: str, padded: bool) -> dict[str, Any]:
    """The inputs and options of a call: three padded rows, or a single one."""
    padded = padded and Limit.PADDING not in FAMILIES[family].unsupported
    inputs = FAMILIES[family].inputs(upstream(family), 3 if padded else 1, padded, 3)
    return inputs | {"max_new_tokens": 6, "pad_token_id": 1, **MODES[mode]}


@cache
def tokens_of_transformers(family: str, mode: str, padded: bool) -> Tensor:
    with quiet():
        torch.manual_seed(0)
        return upstream(family).generate(**arguments(family, mode, padded))


#: Modes, and whether the batch has three padded rows.
CALLS = (("greedy", True), ("sample", False), ("beams", True))


def check(twin: ModuleType, family: str, *calls: tuple[str, bool]) -> None:
    """The twin returns what transformers returns for the same call and the same random state."""
    for mode, padded in calls:
        if mode == "beams" and Limit.BEAMS in FAMILIES[family].unsupported:
            continue
        theirs = tokens_of_transformers(family, mode, padded)
        with quiet():
            torch.manual_seed(0)
            mine = twin.generate(upstream(family), **arguments(family, mode, padded))
        assert torch.equal(theirs, mine), mode


def test_most_families_are_not_left_out() -> None:
    assert len(PASSING) > (150 if IS_5_23 else 100)  # as the first page says
    assert LEFT_OUT.keys() <= {family.name for family in ROWS}


@pytest.mark.parametrize("family", PASSING)
def test_tokens_of_transformers(family: str) -> None:
    greedy, *others = CALLS
    check(learn.generate, family, greedy, others[PASSING.index(family) % 2])


#: Some with sliding windows, with a state, with experts, without positions or a cache.
SOME = ("llama", "gpt2", "bloom", "openai-gpt", "qwen2_sliding", "gemma2", "mixtral", "lfm2")


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("number", range(1, 10))
def test_tokens_of_transformers_after_each_lesson(number: int, family: str) -> None:
    check(lessons.modules()[number], family, *CALLS, ("sample", True), ("beams", False))


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("mode", ["early", "never", "beam sample"])
def test_beams_of_all_kinds(mode: str, family: str) -> None:
    if IS_5_24 and mode == "beam sample":
        pytest.skip(reason="transformers 5.24 sorts what it has drawn, the twin does not")
    for twin in (lessons.modules()[0], lessons.modules()[-1]):
        check(twin, family, (mode, True))


def test_lessons_are_small() -> None:
    sources = lessons.sources()
    assert len(sources[0].splitlines()) <= 250
    diffs = sorted(lessons.FOLDER.glob("*.diff"))
    assert [diff.stem for diff in diffs] == lessons.LESSONS
    assert all(len(diff.read_text("utf-8").splitlines()) < 120 for diff in diffs)


def test_packing_what_was_unpacked_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    written = tmp_path / "learn"
    written.mkdir()
    lessons.unpack(tmp_path / "versions")
    monkeypatch.setattr(lessons, "FOLDER", written)
    lessons.pack(tmp_path / "versions")
    for path in written.iterdir():
        assert path.read_text("utf-8") == (LEARN / path.name).read_text("utf-8"), path.name
    assert len(list(written.iterdir())) == 10


def test_values_of_the_call_win_over_those_of_the_model() -> None:
    model = upstream("llama")  # its generation config has EOS 2 and pad 0
    config = Config.resolve(model, {"eos_token_id": [5, 6], "top_k": 3})
    assert (config.eos, config.pad, config.top_k, config.top_p) == ([5, 6], 0, 3, 1.0)
    assert Config.resolve(model, {"eos_token_id": None, "pad_token_id": None}).eos == []
    with pytest.raises(TypeError, match="top_z"):
        generate(model, torch.tensor([[5]]), top_z=1)


def test_pad_tokens_are_padding_without_a_mask() -> None:
    model = upstream("llama")
    inputs = FAMILIES["llama"].inputs(model, 3, True, 1)
    ids = inputs["input_ids"]
    assert (ids == 0).any()
    assert torch.equal(generate(model, ids), generate(model, **inputs))
    assert not torch.equal(generate(model, ids), generate(model, ids, torch.ones_like(ids)))
