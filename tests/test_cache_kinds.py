"""Kinds of caches that are registered from outside: one assignment, and only what they declare."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
)
from transformers.cache_utils import Cache, CacheLayerMixin

import hfgen
from hfgen.logits import stopping as criteria
from hfgen.memory.caches import CACHES, CacheKind, CacheRequest
from hfgen.memory.caches.dynamic import GrowingCache
from tests import tiny


class Layer(CacheLayerMixin):
    """A layer of nobody's kind: two lists of tensors, joined when attention asks."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2]) if self.is_initialized else 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self.keys, self.values = (s[:, :, :tokens_to_remove] for s in (self.keys, self.values))


class Mine(Cache):
    """The cache of these layers."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[Layer() for _ in range(n_layers)])


made: list[CacheRequest] = []


def make(request: CacheRequest) -> Cache:
    made.append(request)
    return Mine(request.decoder_config.num_hidden_layers)


@pytest.fixture
def model() -> PreTrainedModel:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHES, "mine", make)
    able = CacheKind("able", make, rolls_back=True, loses_rows=True)
    monkeypatch.setitem(CACHES, "able", able)
    made.clear()


def greedy(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, do_sample=False, **{"max_new_tokens": 12} | options)


# ---------------------------------------------------------------- by name


def test_a_factory_is_enough_for_plain_decoding(model: Any) -> None:
    ids = tiny.prompt(2)
    expected = greedy(model, ids)
    assert torch.equal(greedy(model, ids, cache_implementation="mine"), expected)
    (request,) = made
    assert (request.rows, request.max_length) == (2, ids.shape[1] + 11)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    expected = greedy(model, ids, **beams)
    assert torch.equal(greedy(model, ids, cache_implementation="mine", **beams), expected)


@pytest.mark.parametrize("where", ["config", "model", "own config", "zero tokens"])
def test_its_name_may_stand_in_any_config(model: Any, where: str) -> None:
    ids = tiny.prompt(2)
    options: dict[str, Any] = {}
    if where == "model":
        model.generation_config.cache_implementation = "mine"
    elif where == "own config":
        options["generation_config"] = hfgen.GenerationConfig(cache_implementation="mine")
        options["generation_config"].validate()
    else:
        options["generation_config"] = GenerationConfig(max_new_tokens=12)
        options["generation_config"].cache_implementation = "mine"
    if where == "zero tokens":
        assert torch.equal(greedy(model, ids, **options, max_new_tokens=0), ids)
        return
    greedy(model, ids, **options)
    assert len(made) == 1
    if where == "model":  # an argument still wins over the model's own
        greedy(model, ids, cache_implementation=None)
        greedy(model, ids, cache_implementation="static")
        assert len(made) == 1


def test_an_unknown_name_is_still_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match=r"'mine'.*'minee' \(did you mean 'mine'\?\)"):
        greedy(model, tiny.prompt(), cache_implementation="minee")


def test_what_is_no_cache_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHES, "mine", lambda request: {})
    with pytest.raises(TypeError, match=r"'mine'.*transformers\.Cache, but returned \{\}"):
        greedy(model, tiny.prompt(), cache_implementation="mine")


def test_an_encoder_decoder_gets_a_cross_attention_beside_it() -> None:
    model = hfgen.mix_into(tiny.bart())
    ids = tiny.prompt(2)
    assert torch.equal(greedy(model, ids, cache_implementation="mine"), greedy(model, ids))


# ---------------------------------------------------------------- what is declared, and what is not

LOOKUP = {"prompt_lookup_num_tokens": 3}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 3}


@pytest.mark.parametrize("options", [LOOKUP, CONTRASTIVE], ids=["lookup", "contrastive"])
def test_tokens_are_taken_back_only_if_that_is_declared(
    model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    expected = greedy(model, ids, **options)
    assert torch.equal(greedy(model, ids, cache_implementation="able", **options), expected)
    monkeypatch.setattr(model, "forward", lambda input_ids: pytest.fail("forwarded"))
    with pytest.raises(ValueError, match=r"'mine'.*`rolls_back`"):
        greedy(model, ids, cache_implementation="mine", **options)


def test_rows_leave_only_if_that_is_declared(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny.prompt(4)
    ends = greedy(model, ids)[:, ids.shape[1]].tolist()  # the first row's first token ends rows
    options = {"eos_token_id": ends[0], "drop_finished": True}
    expected = greedy(model, ids, eos_token_id=ends[0])
    batches: list[int] = []
    forward = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        batches.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    counted.is_row_wise = True  # type: ignore[attr-defined]  # rows leave only code that says so
    monkeypatch.setattr(model, "forward", counted)
    assert torch.equal(greedy(model, ids, cache_implementation="able", **options), expected)
    assert batches[0] == 4
    assert min(batches) < 4
    with pytest.raises(ValueError, match=r"`loses_rows`.*'mine'"):
        greedy(model, ids, cache_implementation="mine", **options)


def test_settings_are_checked_by_the_kind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(options: Any, config: Any) -> None:
        raise ValueError(f"{options} for {config.num_hidden_layers} layers")

    monkeypatch.setitem(CACHES, "mine", CacheKind("mine", make, settings=check))
    with pytest.raises(ValueError, match=r"{'a': 1} for 2 layers"):
        greedy(model, tiny.prompt(), cache_implementation="mine", cache_config={"a": 1})


def test_a_cache_of_the_callers_with_unknown_layers_is_refused_by_name(model: Any) -> None:
    ids = tiny.prompt(1)
    assert torch.equal(greedy(model, ids, past_key_values=Mine(2)), greedy(model, ids))
    with pytest.raises(ValueError, match=r"take tokens back out of a Layer, a layer of Mine"):
        greedy(model, ids, past_key_values=Mine(2), **LOOKUP)


# ---------------------------------------------------------------- a path, and whose


def test_only_the_caller_says_where_files_are_made(model: Any, tmp_path: Path) -> None:
    ids, made_in = tiny.prompt(1), {"path": str(tmp_path / "missing")}
    model.generation_config.cache_implementation = "offloaded"
    model.generation_config.cache_config = made_in
    expected = greedy(model, ids, cache_implementation="dynamic")
    for config in (None, model.generation_config, copy.deepcopy(model.generation_config)):
        assert torch.equal(greedy(model, ids, generation_config=config), expected)
    with pytest.raises(ValueError, match="missing"):
        greedy(model, ids, cache_config=made_in)
    config = GenerationConfig(cache_config={"path": str(tmp_path / "elsewhere")})
    with pytest.raises(ValueError, match="elsewhere"):
        greedy(model, ids, generation_config=config)


# ---------------------------------------------------------------- static caches: how long, and how much


def test_a_criterion_that_was_added_may_end_a_call_early(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    model.generation_config.eos_token_id = None
    ids = tiny.prompt(1, 7)
    cache = StaticCache(config=model.config, max_cache_len=10)
    with pytest.raises(ValueError, match="static cache of 10 tokens"):
        greedy(model, ids, past_key_values=cache)
    monkeypatch.setattr(criteria, "CRITERIA", (*criteria.CRITERIA, lambda context: Stop()))
    assert greedy(model, ids, past_key_values=cache).shape[1] == 9


@pytest.mark.parametrize("field", ["prompt_lookup_num_tokens", "num_assistant_tokens"])
def test_drafts_are_cut_to_the_static_cache(model: Any, field: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 4, field: 100}
    if field == "num_assistant_tokens":
        options["assistant_model"] = hfgen.mix_into(tiny.llama())
    expected = greedy(model, ids, max_new_tokens=4)
    assert torch.equal(greedy(model, ids, cache_implementation="static", **options), expected)


def test_the_default_kind_may_be_replaced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHES, "dynamic", lambda request: DynamicCache())
    output = greedy(model, tiny.prompt(1), return_dict_in_generate=True)
    assert type(output.past_key_values) is DynamicCache


# ---------------------------------------------------------------- caches that break the protocol


def test_what_is_no_cache_at_all_names_what_it_lacks(model: Any) -> None:
    class Half:
        def get_seq_length(self) -> int:
            return 0

    with pytest.raises(ValueError, match="Half, which has no `get_mask_sizes`"):
        greedy(model, tiny.prompt(1), past_key_values=Half())


def test_a_prefix_is_put_into_it_only_if_that_is_declared(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(request: CacheRequest) -> Cache:
        return GrowingCache(config=request.decoder_config)

    ids, prefixes = tiny.prompt(1, 20), hfgen.PrefixCache(max_bytes=2**20)
    options: dict[str, Any] = {"cache_implementation": "mine", "prefix_cache": prefixes}
    monkeypatch.setitem(CACHES, "mine", growing)
    with pytest.raises(ValueError, match="'mine'"):
        greedy(model, ids, **options)
    monkeypatch.setitem(CACHES, "mine", CacheKind("mine", growing, may_hold_prefix=True))
    for _ in range(2):
        assert torch.equal(greedy(model, ids, **options), greedy(model, ids))
    assert prefixes.stats.hits == 1
