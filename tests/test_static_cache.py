"""Static caches: kept between calls, seen as far as they are filled, compiled once; beside upstream's."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CompileConfig,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

import hfgen
from hfgen.families import CACHE
from hfgen.memory.caches import pool, static_layers
from hfgen.memory.caches.layers import layers_of
from hfgen.memory.caches.pool import CacheBuffers, Pool, Size, pool_of
from hfgen.memory.caches.static_layers import SlicedStaticLayer, VisibleLength
from tests import tiny
from tests.parity import harness
from tests.parity.harness import Case
from tests.versions import IS_5_23, holders_are_told, models_compile

STATIC = {"cache_implementation": "static"}


@pytest.fixture
def model() -> PreTrainedModel:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture
def fine_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sees a multiple of four tokens, so that short calls cross many steps."""
    monkeypatch.setattr(static_layers, "GRAIN", 4)


def greedy(model: Any, ids: Tensor, n: int = 8, **options: Any) -> Any:
    """``n`` new tokens, whatever is EOS."""
    lengths = {"max_new_tokens": n, "min_new_tokens": n}
    return model.generate(ids, do_sample=False, **(lengths | options))


def addresses(model: Any) -> list[int]:
    """Where the idle memory of a model's caches is."""
    (buffers,) = pool_of(model).idle
    return [buffer.data_ptr() for buffer in buffers.tensors.values()]


def filled(cache: Any) -> SlicedStaticLayer:
    return next(layer for layer in layers_of(cache) if isinstance(layer, SlicedStaticLayer))


# ---------------------------------------------------------------- one memory for many calls


@holders_are_told
def test_calls_that_are_no_larger_use_the_memory_of_the_first(model):
    ids = tiny.prompt(4, 12)
    expected = [greedy(model, ids, 20), greedy(model, ids[:2, :5]), greedy(model, ids[:1, :9], 3)]
    assert torch.equal(greedy(model, ids, 20, **STATIC), expected[0])
    before = addresses(model)
    assert torch.equal(greedy(model, ids[:2, :5], **STATIC), expected[1])
    assert torch.equal(greedy(model, ids[:1, :9], 3, **STATIC), expected[2])
    assert torch.equal(greedy(model, ids, 20, **STATIC), expected[0])
    assert addresses(model) == before


@holders_are_told
def test_nothing_of_the_size_of_a_cache_is_allocated_again(model, monkeypatch):
    greedy(model, tiny.prompt(2), 20, **STATIC)
    taken = []
    monkeypatch.setattr(Tensor, "new_zeros", lambda *args, **_: taken.append(args) or 1 / 0)
    greedy(model, tiny.prompt(2), 20, **STATIC)
    assert not taken


def test_the_first_memory_is_what_the_call_needs(model):
    greedy(model, tiny.prompt(3, 7), 20, **STATIC)
    (buffers,) = pool_of(model).idle
    assert buffers.size == Size(3, 26)
    # Two layers of two heads of eight numbers in four bytes; one token more, for the compiler.
    assert buffers.n_bytes == 3 * 27 * (2 * 2) * (2 * 8) * 4


@holders_are_told
@pytest.mark.parametrize("beams", [1, 3])
def test_beams_and_samples_are_reordered_in_the_same_memory(model, beams):
    options = {"num_beams": beams, "num_return_sequences": 3, "do_sample": beams == 1}
    options |= {"max_new_tokens": 12}
    results = []
    for cache in ({}, STATIC, STATIC):
        torch.manual_seed(0)
        results.append(model.generate(tiny.prompt(2), **options, **cache))
        if cache:
            results.append(addresses(model))
    expected, first, before, second, after = results
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert before == after
    (buffers,) = pool_of(model).idle
    assert buffers.size.rows == 6


@holders_are_told
def test_an_encoder_decoder_keeps_both_of_its_caches():
    model = hfgen.mix_into(tiny.bart())
    long, short = tiny.prompt(3, 20), tiny.prompt(2, 6, seed=1)
    expected = [greedy(model, long), greedy(model, short)]
    assert torch.equal(greedy(model, long, **STATIC), expected[0])
    before = addresses(model)
    assert torch.equal(greedy(model, short, **STATIC), expected[1])
    assert addresses(model) == before
    kinds = {kind for (kind, _, _) in pool_of(model).idle[0].tensors}
    assert kinds == {pool.FILLED, pool.CROSS}


@holders_are_told
def test_what_an_earlier_call_left_behind_does_not_matter(model):
    ids, bad = tiny.prompt(2), tiny.prompt(2, 15, seed=3)
    expected = greedy(model, ids)
    embedding = model.get_input_embeddings().weight
    unused = next(
        i for i in range(5, tiny.VOCAB) if not (expected == i).any() and not (ids == i).any()
    )
    row = embedding[unused].detach().clone()
    with torch.no_grad():
        embedding[unused] = torch.inf
    bad[:, 3:] = unused
    with pytest.raises(hfgen.InvalidScoresError):
        greedy(model, bad, **STATIC)
    with torch.no_grad():
        embedding[unused] = row
    before = addresses(model)
    assert any(buffer.isnan().any() for buffer in pool_of(model).idle[0].tensors.values())
    assert torch.equal(greedy(model, ids, **STATIC), expected)
    assert addresses(model) == before


def test_a_cache_is_as_if_it_were_new(model):
    """Also what lies behind the filled part, which callers and models can read."""
    options = STATIC | {"return_dict_in_generate": True}
    greedy(model, tiny.prompt(3, 20), 10, **STATIC)
    used = greedy(model, tiny.prompt(2), **options).past_key_values
    fresh = greedy(hfgen.mix_into(tiny.llama()), tiny.prompt(2), max_cache_len=29, **options)
    for a, b in zip(used.layers, fresh.past_key_values.layers, strict=True):
        assert a.keys.shape == b.keys.shape == (2, 2, 29, 8)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


# ---------------------------------------------------------------- whose memory it is


def test_a_returned_cache_is_the_callers(model):
    options = STATIC | {"return_dict_in_generate": True}
    first = greedy(model, tiny.prompt(2), **options)
    kept = [layer.keys.clone() for layer in first.past_key_values.layers]
    second = greedy(model, tiny.prompt(2, seed=5), **options)
    greedy(model, tiny.prompt(2, seed=6), **STATIC)
    for keys, layer, other in zip(
        kept, first.past_key_values.layers, second.past_key_values.layers, strict=True
    ):
        assert torch.equal(layer.keys, keys)
        assert layer.keys.data_ptr() != other.keys.data_ptr()


@holders_are_told
def test_a_returned_cache_comes_back_when_it_is_dropped(model):
    returned = greedy(model, tiny.prompt(2), **STATIC, return_dict_in_generate=True)
    before = returned.past_key_values.layers[0].keys.data_ptr()
    assert not pool_of(model).idle
    del returned
    greedy(model, tiny.prompt(2), **STATIC)
    assert before in addresses(model)


def test_a_tensor_that_somebody_kept_is_not_overwritten(model):
    returned = greedy(model, tiny.prompt(2), **STATIC, return_dict_in_generate=True)
    keys = returned.past_key_values.layers[1].keys[:, :, 2:4]
    values = keys.clone()
    del returned
    greedy(model, tiny.prompt(2, seed=5), **STATIC)
    assert torch.equal(keys, values)


def test_a_cache_that_a_callable_kept_is_not_overwritten(model):
    kept = []

    def decode(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        model(input_ids, **{CACHE: kwargs[CACHE]})
        kept.append(kwargs[CACHE])
        return input_ids

    model.generate(tiny.prompt(2), custom_generate=decode, max_new_tokens=5, **STATIC)
    keys = kept[0].layers[0].keys.clone()
    greedy(model, tiny.prompt(2, seed=5), **STATIC)
    assert torch.equal(kept[0].layers[0].keys, keys)


class Failing(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        raise KeyError("stop here")


@holders_are_told
def test_an_exception_gives_the_memory_back(model):
    greedy(model, tiny.prompt(2), **STATIC)
    before = addresses(model)
    with pytest.raises(KeyError, match="stop here"):
        greedy(model, tiny.prompt(2), stopping_criteria=StoppingCriteriaList([Failing()]), **STATIC)
    assert torch.equal(greedy(model, tiny.prompt(2), **STATIC), greedy(model, tiny.prompt(2)))
    assert addresses(model) == before


class Meanwhile(LogitsProcessor):
    """Does something else at every step."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.act()
        return scores


def test_a_call_within_a_call_has_memory_of_its_own(model):
    inner_ids = tiny.prompt(2, seed=8)
    expected = greedy(model, tiny.prompt(2)), greedy(model, inner_ids, 3)
    inner = []
    processor = Meanwhile(lambda: inner.append(greedy(model, inner_ids, 3, **STATIC)))
    processors = LogitsProcessorList([processor])
    assert torch.equal(
        greedy(model, tiny.prompt(2), logits_processor=processors, **STATIC), expected[0]
    )
    assert len(inner) == 8
    assert all(torch.equal(tokens, expected[1]) for tokens in inner)


def test_threads_have_memory_of_their_own(model):
    n = 3
    prompts = [tiny.prompt(2, 5 + i, seed=i) for i in range(n)]
    expected = [greedy(model, ids) for ids in prompts]
    barrier, results = threading.Barrier(n, timeout=30), [None] * n

    def call(i: int) -> None:
        processors = LogitsProcessorList([Meanwhile(barrier.wait)])
        for _ in range(3):
            results[i] = greedy(model, prompts[i], logits_processor=processors, **STATIC)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tokens, wanted in zip(results, expected, strict=True):
        assert torch.equal(tokens, wanted)
    assert len(pool_of(model).idle) == 1


# ---------------------------------------------------------------- growing


@holders_are_told
def test_slowly_growing_calls_are_rarely_given_new_memory(model):
    seen = set()
    for length in range(8, 120, 4):
        greedy(model, tiny.prompt(1, length), 2, **STATIC)
        seen.add(tuple(addresses(model)))
        (buffers,) = pool_of(model).idle
        assert buffers.size.length <= 1.5 * (length + 1)
    assert 3 <= len(seen) <= 9


@holders_are_told
def test_the_old_memory_goes_before_the_new_one_comes(monkeypatch):
    lender = Pool()
    lease = lender.lend(Size(1, 10))
    lease.buffers.take(("filled", 0, "keys"), torch.ones(1, 2, 1, 4), 10, 11)
    buffer = weakref.ref(lease.buffers.tensors["filled", 0, "keys"])
    del lease
    assert buffer() is not None
    alive = []
    monkeypatch.setattr(
        pool, "CacheBuffers", lambda size: alive.append(buffer()) or CacheBuffers(size)
    )
    lender.lend(Size(1, 20))
    assert alive == [None]


@pytest.mark.parametrize(
    ("had", "asked", "size"),
    [
        (Size(1, 100), Size(1, 101), Size(1, 150)),
        (Size(1, 100), Size(1, 200), Size(1, 200)),
        (Size(8, 50), Size(1, 2000), Size(1, 2000)),  # not eight rows of 2,000
        (Size(1, 2000), Size(8, 50), Size(8, 50)),
        (Size(2, 10, 40), Size(2, 10, 41), Size(2, 10, 60)),
    ],
)
def test_what_replaces_a_cache_that_is_too_small(had, asked, size):
    assert not had.holds(asked)
    assert had.enlarged(asked) == size
    assert size.holds(asked)


def test_other_numbers_get_other_memory(model):
    greedy(model, tiny.prompt(2), **STATIC)
    model.double()
    assert torch.equal(greedy(model, tiny.prompt(2), **STATIC), greedy(model, tiny.prompt(2)))
    assert all(b.dtype is torch.float64 for b in pool_of(model).idle[0].tensors.values())


# ---------------------------------------------------------------- what attention sees


@pytest.fixture
def seen(monkeypatch) -> Iterator[list[tuple[int, int]]]:
    """Queries and keys of each attention of the first layer."""
    lengths = []
    update = SlicedStaticLayer.update

    def recording(self: Any, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, key_states, *args, **kwargs)
        if self._index == 0:
            lengths.append((key_states.shape[2], keys.shape[2]))
        return keys, values

    monkeypatch.setattr(SlicedStaticLayer, "update", recording)
    return lengths


@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_sees_what_is_filled(model, seen, is_padded):
    ids = tiny.prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :10] = 1 - int(is_padded)
    expected = greedy(model, ids, 8, attention_mask=mask)
    tokens = greedy(model, ids, 8, attention_mask=mask, max_cache_len=200, **STATIC)
    assert torch.equal(tokens, expected)
    assert seen == [(60, 64), *[(1, 64)] * 4, *[(1, 128)] * 3]


def test_chunks_of_a_prompt_see_what_is_filled(model, seen, fine_grain):
    options = STATIC | {"max_cache_len": 100, "prefill_chunk_size": 3}
    assert torch.equal(
        greedy(model, tiny.prompt(2), 3, **options), greedy(model, tiny.prompt(2), 3)
    )
    assert seen == [(3, 4), (3, 8), (1, 8), (1, 8), (1, 12)]


def test_compiled_calls_see_few_lengths():
    visible = VisibleLength(is_whole=False)
    visible.is_coarse = True
    shown = {visible.show(1, total, 10**6) for total in range(1, 8193)}
    assert sorted(shown) == [
        64,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
    ]
    for total in range(129, 8193):
        assert total <= visible.show(1, total, 10**6) <= 1.5 * total


def test_attentions_have_upstreams_shapes(model):
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_cache_len": 90}
    model.set_attn_implementation("eager")
    upstream = tiny.llama()
    upstream.set_attn_implementation("eager")
    mine, theirs = (greedy(m, tiny.prompt(2), 3, **options, **STATIC) for m in (model, upstream))
    for a, b in zip(mine.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(a, b)
    assert mine.attentions[0][0].shape[-1] == 90


def test_a_mask_for_the_whole_cache_is_taken(model):
    """As callers make it who fill a static cache themselves."""
    returned = greedy(
        model, tiny.prompt(2, 5), 3, max_cache_len=100, **STATIC, return_dict_in_generate=True
    )
    cache, ids = returned.past_key_values, returned.sequences
    mask = torch.zeros(2, 1, 1, 100, dtype=torch.bool)
    mask[..., : ids.shape[1]] = True
    with torch.no_grad():
        logits = model(
            ids[:, -1:],
            past_key_values=cache,
            attention_mask=mask,
            position_ids=torch.tensor([[ids.shape[1] - 1]]),
        ).logits[:, -1]
        torch.testing.assert_close(logits, model(ids).logits[:, -1])


def test_a_returned_cache_is_decoded_with_by_hand(model, fine_grain):
    returned = greedy(
        model, tiny.prompt(2), 3, max_cache_len=60, **STATIC, return_dict_in_generate=True
    )
    cache, ids = returned.past_key_values, returned.sequences
    with torch.no_grad():
        for _ in range(20):
            token = model(ids[:, -1:], past_key_values=cache).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, token[:, None]], dim=1)
    expected = greedy(model, tiny.prompt(2), 23, eos_token_id=None, min_new_tokens=None)
    assert torch.equal(ids, expected)
    assert int(cache.get_seq_length()) == 29


CASES = [
    {"family": "llama", "mode": "greedy_search", "rows": 3, "padded": True},
    {"family": "llama", "mode": "sample", "options": {"prefill_chunk_size": 2}},
    {"family": "llama", "mode": "beam_search", "rows": 2, "padded": True},
    {"family": "llama", "mode": "beam_sample", "rows": 2, "options": {"num_return_sequences": 2}},
    {"family": "gemma3_text", "mode": "greedy_search", "rows": 2, "padded": True},
    {"family": "gemma3_text", "mode": "beam_search", "rows": 2},
    {"family": "bart_seq2seq", "mode": "beam_search", "rows": 2, "padded": True},
    {"family": "t5", "mode": "sample", "rows": 2},
    {"family": "bloom", "mode": "greedy_search", "rows": 2, "padded": True},
    {"family": "deepseek_v3", "mode": "greedy_search", "rows": 2, "padded": True},
    {"family": "falcon_h1", "mode": "greedy_search", "rows": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['family']}-{case['mode']}")
def test_everything_is_as_with_upstreams_static_cache(case, fine_grain):
    options = case.get("options", {}) | STATIC
    outputs = {"outputs": ["scores", "logits"], "eos_token_id": None}
    # Both libraries remember the longest static cache of a model, and other tests share these models.
    hfgen.free_caches(harness.ours(case["family"]))
    vars(harness.upstream(case["family"])).pop("_previous_max_cache_length", None)
    for seed in (1, 2):  # the second one is decoded in the memory of the first
        drawn = Case(**(case | {"seed": seed, "options": options | outputs}))
        report = harness.check(harness.settle(drawn))
        assert report.case.options["cache_implementation"] == "static"
        assert not report.differences, str(report)
        assert report.theirs.error is None


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2", "llama"])
def test_a_second_turn_forwards_what_a_cache_with_recurrent_states_lacks(family):
    """The layers of the first two have such states and attention, and count tokens."""
    ids, more = tiny.prompt(1, 9) % 60, torch.tensor([[7, 8, 9]])
    lengths, texts = [], []
    for model in (harness.upstream(family), harness.ours(family)):
        output = greedy(model, ids, 3, max_cache_len=40, return_dict_in_generate=True, **STATIC)
        text, given = torch.cat([output.sequences, more], dim=1), output.past_key_values
        output = greedy(model, text, 6, return_dict_in_generate=True, **{CACHE: given})
        lengths.append(int(output.past_key_values.get_seq_length()))
        texts.append(output.sequences)
    assert lengths == [9 + 3 + 3 + 6 - 1] * 2
    assert torch.equal(*texts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fewer_keys_are_the_same_numbers(model, attention):
    upstream = tiny.llama()
    options = {"max_cache_len": 250, "return_dict_in_generate": True, "output_logits": True}
    for each in (model, upstream):
        each.set_attn_implementation(attention)
    mine, theirs = (
        greedy(m, tiny.prompt(3, 50), 30, **options, **STATIC) for m in (model, upstream)
    )
    tolerance = 0.0 if IS_5_23 or attention == "eager" else 1e-5  # 5.21: the last digit
    torch.testing.assert_close(
        torch.stack(mine.logits), torch.stack(theirs.logits), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("lookup", [2, 6])
def test_drafting_takes_tokens_back(model, fine_grain, lookup):
    ids = tiny.prompt(2, 6).repeat(1, 3)
    expected = greedy(model, ids, 30)
    for _ in range(2):
        tokens = greedy(model, ids, 30, prompt_lookup_num_tokens=lookup, **STATIC)
        assert torch.equal(tokens, expected)


# ---------------------------------------------------------------- compiling


class Counting:
    """A backend for ``torch.compile`` that runs the graphs as they are, and counts them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs = 0

    def config(self) -> CompileConfig:
        def backend(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return graph.forward

        return CompileConfig(backend=backend, mode=None)


@models_compile
def test_the_second_call_compiles_nothing(model, fine_grain):
    counting = Counting()
    options = STATIC | {"compile_config": counting.config()}
    expected = greedy(model, tiny.prompt(4, 20), 12)
    assert torch.equal(greedy(model, tiny.prompt(4, 20), 12, **options), expected)
    assert counting.graphs == 1
    for rows, length, n in ((3, 5, 9), (1, 7, 12), (2, 40, 20), (6, 3, 40)):
        ids = tiny.prompt(rows, length)
        assert torch.equal(greedy(model, ids, n, **options), greedy(model, ids, n))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(
        greedy(model, tiny.prompt(2), **beams, **options), greedy(model, tiny.prompt(2), **beams)
    )
    assert counting.graphs == 1


@models_compile
def test_a_single_row_is_one_graph(model, fine_grain):
    counting = Counting()
    options = STATIC | {"compile_config": counting.config()}
    for length, n in ((20, 12), (5, 20), (50, 20)):
        ids = tiny.prompt(1, length)
        assert torch.equal(greedy(model, ids, n, **options), greedy(model, ids, n))
    assert counting.graphs == 1


@models_compile
def test_an_encoder_decoder_is_compiled_once(fine_grain):
    model, counting = hfgen.mix_into(tiny.t5()), Counting()
    options = STATIC | {"compile_config": counting.config(), "eos_token_id": None}
    for rows, length, n in ((3, 20, 12), (2, 9, 5)):
        ids = tiny.prompt(rows, length)
        tokens = greedy(model, ids, n, **options)
        assert torch.equal(tokens, greedy(model, ids, n, eos_token_id=None))
    assert counting.graphs == 1


@models_compile
def test_the_config_of_the_model_compiles_as_well(model):
    counting = Counting()
    model.generation_config.compile_config = counting.config()
    greedy(model, tiny.prompt(2), **STATIC)
    greedy(model, tiny.prompt(2), **STATIC)
    assert counting.graphs == 1
    greedy(model, tiny.prompt(2), **STATIC, disable_compile=True)
    assert counting.graphs == 1


def test_nothing_is_compiled_unasked_or_without_a_static_cache(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    greedy(model, tiny.prompt(2), **STATIC)
    greedy(model, tiny.prompt(2), compile_config=Counting().config())


@models_compile
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_compiled_model_runs_itself(model, copied):
    options = STATIC | {"compile_config": Counting().config()}
    greedy(model, tiny.prompt(2), **options)
    twin = copied(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    expected = greedy(twin, tiny.prompt(2))
    assert not torch.equal(expected, greedy(model, tiny.prompt(2)))
    assert torch.equal(greedy(twin, tiny.prompt(2), **options), expected)


@models_compile
def test_a_forward_that_the_caller_compiled(model, fine_grain):
    counting = Counting()
    expected = greedy(model, tiny.prompt(2))
    model.forward = torch.compile(model.forward, backend=counting.config().backend)
    assert torch.equal(greedy(model, tiny.prompt(2), **STATIC), expected)
    assert torch.equal(greedy(model, tiny.prompt(2), **STATIC), expected)
    assert 0 < counting.graphs < 8


# ---------------------------------------------------------------- giving memory back; copies


def test_free_caches_gives_the_memory_back(model):
    assert hfgen.free_caches(model) == 0
    greedy(model, tiny.prompt(2, 100), 3, **STATIC)
    buffers = pool_of(model).idle[0]
    n_bytes, dead = buffers.n_bytes, weakref.ref(buffers.tensors["filled", 0, "keys"])
    del buffers
    assert hfgen.free_caches(model) == n_bytes > 0
    assert dead() is None
    assert hfgen.free_caches(model) == 0
    greedy(model, tiny.prompt(2, 5), 3, **STATIC)
    assert pool_of(model).idle[0].size == Size(2, 7)


class Wrapper(nn.Module):
    """As PEFT and ``torch.compile`` wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model


def test_free_caches_finds_the_model_in_a_wrapper():
    model = tiny.llama()
    with hfgen.patched():
        greedy(model, tiny.prompt(2), **STATIC)
    assert hfgen.free_caches(Wrapper(model)) > 0
    with pytest.raises(TypeError, match="free_caches\\(\\) takes a model, but got StaticCache"):
        hfgen.free_caches(StaticCache(config=model.config, max_cache_len=4))


def test_free_caches_leaves_what_is_in_use(model):
    returned = greedy(model, tiny.prompt(2), **STATIC, return_dict_in_generate=True)
    assert hfgen.free_caches(model) == 0
    assert returned.past_key_values.layers[0].keys.abs().sum() > 0


def test_the_memory_goes_with_the_model():
    model = hfgen.mix_into(tiny.llama())
    greedy(model, tiny.prompt(2), **STATIC)
    dead = weakref.ref(pool_of(model).idle[0])
    del model
    gc.collect()
    assert dead() is None


def test_copies_of_a_model_start_without_caches(model, tmp_path):
    greedy(model, tiny.prompt(2), **STATIC)
    saved = io.BytesIO()
    torch.save(model, saved)
    n_bytes = len(saved.getvalue())
    greedy(model, tiny.prompt(4, 150), **STATIC)
    saved = io.BytesIO()
    torch.save(model, saved)
    assert len(saved.getvalue()) == n_bytes
    model.save_pretrained(tmp_path)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not pool_of(twin).idle
        assert torch.equal(greedy(twin, tiny.prompt(2), **STATIC), greedy(model, tiny.prompt(2)))
        assert addresses(twin) != addresses(model)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bart_seq2seq"])
def test_copies_of_a_cache_are_upstreams(how, family):
    model = harness.ours(family)
    ids = tiny.prompt(2, 6) % 60
    greedy(model, tiny.prompt(3, 30) % 60, **STATIC)  # so that the cache is a part of something
    cache = greedy(model, ids, 4, **STATIC, return_dict_in_generate=True).past_key_values
    twin = how(cache)
    pairs = [(cache, twin)]
    if isinstance(cache, EncoderDecoderCache):
        pairs = [
            (cache.self_attention_cache, twin.self_attention_cache),
            (cache.cross_attention_cache, twin.cross_attention_cache),
        ]
    for mine, copied in pairs:
        assert type(mine) is type(copied) is StaticCache
        for a, b in zip(mine.layers, copied.layers, strict=True):
            assert type(b) in (StaticLayer, StaticSlidingWindowLayer)
            assert torch.equal(a.keys, b.keys)
            assert b.keys.is_contiguous()
            assert b.keys.untyped_storage().nbytes() == b.keys.nbytes
            assert int(a.get_seq_length()) == int(b.get_seq_length())
            assert a.keys.data_ptr() != b.keys.data_ptr()


# ---------------------------------------------------------------- bad input


def forbid_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: pytest.fail("forward ran"))


def test_a_cache_that_is_too_short_is_an_error(model, monkeypatch):
    cache = StaticCache(config=model.config, max_cache_len=14)
    expected = greedy(model, tiny.prompt(2))
    assert torch.equal(greedy(model, tiny.prompt(2), past_key_values=cache), expected)
    cache = StaticCache(config=model.config, max_cache_len=13)
    forbid_forward(model, monkeypatch)
    with pytest.raises(ValueError, match="a static cache of 13 tokens, but the call needs 14"):
        greedy(model, tiny.prompt(2), past_key_values=cache, eos_token_id=None)
    assert cache.get_seq_length() == 0


def test_a_cache_that_is_too_short_for_the_next_turn_is_an_error(model, monkeypatch):
    cache = StaticCache(config=model.config, max_cache_len=20)
    ids = greedy(model, tiny.prompt(2), past_key_values=cache)
    forbid_forward(model, monkeypatch)
    with pytest.raises(ValueError, match="a static cache of 20 tokens, but the call needs 22"):
        greedy(model, ids, past_key_values=cache, eos_token_id=None)
    mask = torch.ones(2, 17, dtype=torch.long)
    with pytest.raises(ValueError, match="a static cache of 20 tokens, but the call needs 24"):
        greedy(
            model,
            tiny.prompt(2, 3),
            past_key_values=cache,
            attention_mask=mask,
            eos_token_id=None,
        )


def test_a_cache_that_would_be_too_short_but_for_an_early_end(model, monkeypatch):
    """Whether it is, is only known when it is full: what upstream finishes is finished here."""
    ids = tiny.prompt(2)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, eos_token_id=None, **options)
    ends = tokens[:, 10].tolist()
    expected = model.generate(ids, eos_token_id=ends, **options)
    short = StaticCache(config=model.config, max_cache_len=expected.shape[1] - 1)
    assert torch.equal(
        model.generate(ids, eos_token_id=ends, past_key_values=short, **options), expected
    )
    full = StaticCache(config=model.config, max_cache_len=expected.shape[1] - 2)
    with pytest.raises(ValueError, match="all of which are in use"):
        model.generate(ids, eos_token_id=ends, past_key_values=full, **options)
    forbid_forward(model, monkeypatch)
    short = StaticCache(config=model.config, max_cache_len=6)
    with pytest.raises(ValueError, match="of 6 tokens, but the call needs 7, and may reach 36"):
        model.generate(ids, eos_token_id=ends, past_key_values=short, **options)


def test_a_cache_of_another_batch_is_an_error(model, monkeypatch):
    cache = StaticCache(config=model.config, max_cache_len=60)
    ids = greedy(model, tiny.prompt(2), past_key_values=cache)
    forbid_forward(model, monkeypatch)
    with pytest.raises(ValueError, match="holds 2 sequences, but the call has 3 prompts"):
        greedy(model, ids[[0, 1, 1]], past_key_values=cache)


def test_a_max_cache_len_that_is_too_small_is_told(model, caplog):
    with caplog.at_level(logging.WARNING, logger="transformers"):
        logging.getLogger("transformers").propagate = True
        tokens = greedy(model, tiny.prompt(2), max_cache_len=13, **STATIC)
    assert "`max_cache_len`=13 is less than the 14 tokens" in caplog.text
    assert torch.equal(tokens, greedy(model, tiny.prompt(2)))


HUGE = 10**15


@pytest.mark.parametrize("field", ["max_cache_len", "max_new_tokens"])
def test_a_length_that_cannot_be_allocated_is_forgotten(model, field):
    ids = tiny.prompt(2)
    expected = greedy(model, ids)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="memory"):
            model.generate(ids, **STATIC, **({"max_new_tokens": 4} | {field: HUGE}))
        assert torch.equal(greedy(model, ids, **STATIC), expected)
    (buffers,) = pool_of(model).idle
    assert buffers.size == Size(2, ids.shape[1] + 7)


def test_a_length_that_was_asked_for_and_not_needed_is_not_asked_for_again(model):
    ids = tiny.prompt(1)
    output = greedy(model, ids, max_cache_len=500, return_dict_in_generate=True, **STATIC)
    assert output.past_key_values.layers[0].max_cache_len == 500
    again = greedy(model, ids, 4, return_dict_in_generate=True, **STATIC)
    needed = ids.shape[1] + 7  # by the first of the calls
    assert again.past_key_values.layers[0].max_cache_len == needed
    assert again.past_key_values.layers[0].keys.untyped_storage().nbytes() < 10_000
