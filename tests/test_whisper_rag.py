"""Families that drive ``generate`` themselves: Whisper's segments, RAG's documents, sound codes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hfgen
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.test_hooks import is_same

FAMILIES = {family.name: family for family in ENCODER_FAMILIES}


def check(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Any:
    """What both libraries return under the same seed; hfgen must not need upstream's loops."""
    mine = hfgen.mix_into(copy.deepcopy(model))
    expected = run(model, **kwargs)
    for method in ("_sample", "_beam_search"):
        monkeypatch.delattr(transformers.GenerationMixin, method)
    result = run(mine, **kwargs)
    monkeypatch.undo()
    assert is_same(result, expected), (result, expected)
    assert is_same(torch.get_rng_state(), model.state_after)
    return expected


def run(model: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    result = model.generate(**copy.deepcopy(kwargs))
    model.state_after = torch.get_rng_state()
    return result


# ---------------------------------------------------------------- Whisper

#: Frames that one segment holds: two for each of the encoder's positions.
SEGMENT = 40
LANGUAGES = {"<|en|>": 30, "<|de|>": 31}
TASKS = {"transcribe": 32, "translate": 33}
NO_TIMESTAMPS = 40  # timestamps follow: 41 for the start of a segment up to 61 for its end


@functools.cache
def _whisper() -> nn.Module:
    model = FAMILIES["whisper"].build()
    fields = {
        "is_multilingual": True,
        "lang_to_id": LANGUAGES,
        "task_to_id": TASKS,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": 34,
        "max_initial_timestamp_index": 12,
        "suppress_tokens": list(range(41, 49)),  # so that each round gets some way
        "alignment_heads": [[0, 0], [1, 1]],
        "max_length": 64,
        "return_timestamps": False,
    }
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


def whisper() -> Any:
    return copy.deepcopy(_whisper())


def sound(rows: int, frames: int) -> Tensor:
    """Mel bins ``(rows, 8, frames)``."""
    return torch.randn(rows, 8, frames, generator=torch.Generator().manual_seed(3))


WHISPER_SHORT: dict[str, dict[str, Any]] = {
    "greedy": {"language": "en"},
    "unknown language": {},
    "a language per row": {"language": ["de", "en"], "task": "translate"},
    "timestamps": {"language": "en", "return_timestamps": True},
    "beams": {"language": "en", "num_beams": 2, "return_timestamps": True},
    "sample": {"language": "en", "do_sample": True, "temperature": 0.7},
    "token timestamps": {"language": "en", "return_token_timestamps": True},
    "all outputs": {
        "language": "en",
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_attentions": True,
    },
    "prompt": {"language": "en", "prompt_ids": torch.tensor([34, 12, 13])},
}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # Whisper's own numpy calls
@pytest.mark.parametrize("case", WHISPER_SHORT)
def test_whisper_short_form(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"input_features": sound(2, SEGMENT), "max_new_tokens": 12} | WHISPER_SHORT[case]
    check(whisper(), monkeypatch, **kwargs)


FALLBACK = {
    "temperature": (0.0, 0.5, 1.0),
    "logprob_threshold": -0.6,  # some rows of some rounds are below it
    "compression_ratio_threshold": 1.35,
    "no_speech_threshold": 0.9,
}
WHISPER_LONG: dict[str, dict[str, Any]] = {
    "greedy": {},
    "fallback to sampling": FALLBACK,
    "fallback from beams": FALLBACK | {"num_beams": 2},
    "conditioned on the text before": FALLBACK | {"condition_on_prev_tokens": True},
    "token timestamps": {"return_token_timestamps": True},
    "all outputs": {"return_dict_in_generate": True, "output_scores": True},
    "prompt": {
        "prompt_ids": torch.tensor([34, 12, 13]),
        "prompt_condition_type": "all-segments",
        "condition_on_prev_tokens": True,
    },
}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # Whisper's own numpy calls
@pytest.mark.parametrize("case", WHISPER_LONG)
def test_whisper_long_form(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound longer than one segment, in rows of different lengths."""
    frames = 3 * SEGMENT - 10
    mask = torch.ones(2, frames, dtype=torch.long)
    mask[1, 2 * SEGMENT :] = 0
    kwargs: dict[str, Any] = {
        "input_features": sound(2, frames),
        "attention_mask": mask,
        "return_timestamps": True,
        "return_segments": True,
        "language": "en",
        "max_new_tokens": 24,
    }
    model = whisper()
    result = check(model, monkeypatch, **kwargs | WHISPER_LONG[case])
    assert [len(segments) >= 2 for segments in result["segments"]] == [True, True]
    torch.manual_seed(0)
    has_sampled = not torch.equal(model.state_after, torch.get_rng_state())
    assert has_sampled == ("temperature" in WHISPER_LONG[case])


@pytest.mark.parametrize("timestamps", [False, True])
def test_whisper_assistant(timestamps: bool) -> None:
    """Drafts change no token; upstream's assistant moves the place where the model's time stamps begin."""
    kwargs: dict[str, Any] = {
        "input_features": sound(1, SEGMENT),
        "language": "en",
        "max_new_tokens": 20,
        "return_timestamps": timestamps,
    }
    plain = whisper().generate(**kwargs)
    assistants = whisper(), whisper()
    upstream = whisper().generate(**kwargs, assistant_model=assistants[0])
    drafted = hfgen.mix_into(whisper()).generate(**kwargs, assistant_model=assistants[1])
    assert drafted.tolist() == plain.tolist()
    assert (upstream.tolist() == plain.tolist()) is not timestamps


# ---------------------------------------------------------------- RAG

#: Upstream pads with EOS if the id of the pad token is 0.
BEAMS = {"num_beams": 3, "pad_token_id": 3}
RAG_MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": BEAMS,
    "several beams": BEAMS | {"num_return_sequences": 2},
}


def rag(head: str) -> Any:
    """RAG over a tiny BART; both heads share their weights."""
    token = FAMILIES["rag_token"].build()
    if head == "token":
        return token
    model = transformers.RagSequenceForGeneration(token.config).eval()
    model.load_state_dict(token.state_dict())
    return model


@pytest.mark.parametrize("mode", RAG_MODES)
@pytest.mark.parametrize("head", ["token", "sequence"])
def test_rag(head: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rag(head)
    inputs = FAMILIES["rag_token"].inputs(model, 2, False, 0)
    assert inputs.keys() == {"context_input_ids", "context_attention_mask", "doc_scores"}
    tokens = check(model, monkeypatch, **inputs, **RAG_MODES[mode], max_new_tokens=6)
    assert len(tokens) == 2 * RAG_MODES[mode].get("num_return_sequences", 1)


def test_rag_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rag("token")
    inputs = FAMILIES["rag_token"].inputs(model, 2, False, 0)
    check(model, monkeypatch, **inputs, do_sample=True, max_new_tokens=6)


# ---------------------------------------------------------------- sound


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", ["csm", "higgs_audio_v2", "musicgen", "dia"])
def test_sound(family: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families with their own ``_sample``, with a decoder inside that generates, or with delays."""
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, 2, False, 0)
    check(model, monkeypatch, **inputs, do_sample=do_sample, max_new_tokens=6)
