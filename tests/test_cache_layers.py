"""Rows of one cache behind those of another; what drafting leaves of a static cache."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import StaticSlidingWindowLayer

import hfgen
from hfgen.memory.caches import layers
from hfgen.memory.caches.dynamic import GrowingCache
from hfgen.memory.caches.slots import append
from tests import tiny
from tests.parity.family import seeded

WINDOW = 6


def mistral() -> PreTrainedModel:
    """Sliding windows of six tokens."""
    config = MistralConfig(
        **tiny.SPECIAL,
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        initializer_range=0.3,
    )
    return seeded(lambda: MistralForCausalLM(config))


def test_appended_columns_by_hand() -> None:
    config = LlamaConfig(num_hidden_layers=1)
    one, two = GrowingCache(config=config), GrowingCache(config=config)
    states = torch.arange(1.0, 7.0).view(1, 1, 6, 1)
    one.update(states[:, :, :2], -states[:, :, :2], 0)
    two.update(states[:, :, 2:5], -states[:, :, 2:5], 0)
    append(one, two)
    assert one.layers[0].keys.view(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert one.layers[0].values.view(2, 3).tolist() == [[0, -1, -2], [-3, -4, -5]]
    assert two.layers[0].keys.flatten().tolist() == [3, 4, 5]


def filled(cache: Any, rows: int = 1, heads: int = 2, dtype: Any = torch.float32) -> Any:
    states = torch.ones(rows, heads, 3, 4, dtype=dtype)
    for index in range(2):
        cache.update(states, states, index)
    return cache


def growing_cache(**options: Any) -> Any:
    return filled(GrowingCache(config=LlamaConfig(num_hidden_layers=2)), **options)


class Own(type(GrowingCache(config=LlamaConfig(num_hidden_layers=1)).layers[0])):  # type: ignore[misc]
    """A layer that may have more states than its base."""


def with_own_layer() -> Any:
    cache = growing_cache()
    cache.layers[1].__class__ = Own
    return cache


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: growing_cache(heads=4), r"\(4, 4, torch.float32\).*\(2, 4, torch.float32\)"),
        (lambda: growing_cache(dtype=torch.float64), "torch.float64"),
        (lambda: filled(StaticCache(LlamaConfig(num_hidden_layers=2), 8)), "StaticLayer"),
        (lambda: filled(DynamicCache()), None),
        (lambda: GrowingCache(config=LlamaConfig(num_hidden_layers=3)), "3 layers .* 2 layers"),
        (lambda: GrowingCache(config=LlamaConfig(num_hidden_layers=2)), "DynamicLayer"),
        (with_own_layer, "not known how rows join and leave a Own"),
    ],
    ids=["heads", "dtype", "static", "upstream's", "layers", "empty", "unknown"],
)
def test_rows_that_do_not_fit_are_refused_and_change_nothing(other: Any, match: str | None) -> None:
    cache = growing_cache()
    if match is None:
        append(cache, other())
        assert layers.count(cache) == 2
        return
    with pytest.raises(ValueError, match=match):
        append(cache, other())
    assert [layer.keys.shape[0] for layer in cache.layers] == [1, 1]


# ---------------------------------------------------------------- drafting, and what it leaves

LOOKUP = {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize(
    "options",
    [
        LOOKUP,
        {"penalty_alpha": 0.6, "top_k": 3},
        {"penalty_alpha": 0.6, "top_k": 3, "low_memory": True},
    ],
    ids=["lookup", "contrastive", "one by one"],
)
def test_static_windows_are_what_they_were_before_drafting(options: dict[str, Any]) -> None:
    model = hfgen.mix_into(mistral())
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    cache = StaticCache(config=model.config, max_cache_len=64)
    own = list(cache.layers)
    lengths = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    result = model.generate(ids, past_key_values=cache, **lengths, **options)
    expected = model.generate(ids, **lengths, **options)
    assert torch.equal(result, expected)
    assert cache.layers == own
    assert {type(layer) for layer in cache.layers} == {StaticSlidingWindowLayer}
    assert all("update" not in vars(layer) for layer in cache.layers)
    pickle.loads(pickle.dumps(cache))
    assert cache.get_seq_length() == result.shape[1] - 1


def test_static_windows_are_released_after_an_error() -> None:
    model = hfgen.mix_into(mistral())
    cache = StaticCache(config=model.config, max_cache_len=64)

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 12:
            raise RuntimeError("enough")
        return scores

    with pytest.raises(RuntimeError, match="enough"):
        model.generate(
            tiny.prompt(1, 10),
            past_key_values=cache,
            max_new_tokens=8,
            logits_processor=[fail],
            **LOOKUP,
        )
    assert all("update" not in vars(layer) for layer in cache.layers)


def test_what_is_recorded_is_taken_back_by_hand() -> None:
    config = MistralConfig(num_hidden_layers=1, sliding_window=4)
    cache = StaticCache(config=config, max_cache_len=16)
    states = torch.arange(1.0, 13.0).view(1, 1, 12, 1)
    cache.update(states[:, :, :5], states[:, :, :5], 0)
    with layers.recording(cache):
        cache.update(states[:, :, 5:8], states[:, :, 5:8], 0)
        layers.roll_back(cache, 2)
        assert cache.layers[0].keys.flatten().tolist() == [3, 4, 5, 6]
        assert cache.get_seq_length() == 6
        cache.update(states[:, :, 8:9], states[:, :, 8:9], 0)
        layers.roll_back(cache, 0)
    assert cache.layers[0].keys.flatten().tolist() == [4, 5, 6, 9]
