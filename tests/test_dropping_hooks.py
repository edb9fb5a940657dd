"""Forward hooks that drop keys from the cache: what is decoded right, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.families import CACHE
from tests import tiny

N = 14


def build() -> Any:
    model = tiny.llama(num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    return model


def drop_all_but(kept: Callable[[int, int, int], int]) -> Callable[[Any], Any]:
    """A context that drops the oldest keys after each forward: ``kept(layer, held, fed)`` stay."""

    @contextmanager
    def dropping(model: Any) -> Iterator[None]:
        def drop(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            layer = kwargs[CACHE].layers[module.layer_idx]
            held, fed = layer.keys.shape[-2], kwargs["hidden_states"].shape[1]
            n = kept(module.layer_idx, held, fed)
            layer.keys, layer.values = layer.keys[:, :, -n:], layer.values[:, :, -n:]

        layers = [layer.self_attn for layer in model.model.layers]
        handles = [each.register_forward_hook(drop, with_kwargs=True) for each in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return dropping


#: A prompt loses half of its keys; a window of 12 keys; a prompt keeps other numbers in other layers.
OF_PROMPTS = drop_all_but(lambda layer, held, fed: held // 2 if held == fed else held)
ALWAYS = drop_all_but(lambda layer, held, fed: min(held, 12))
UNEVEN = drop_all_but(lambda layer, held, fed: held // (layer + 2) if held == fed else held)


def decode(model: Any, dropping: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    with dropping(model):
        tokens: Tensor = model.generate(ids, max_new_tokens=N, **options)
    return tokens


PADDED = torch.tensor([[1] * 24, [0] * 6 + [1] * 18])
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 9},
    "padded": {"attention_mask": PADDED},
}


@pytest.mark.parametrize("dropping", [OF_PROMPTS, ALWAYS], ids=["prompts", "always"])
@pytest.mark.parametrize("call", PLAIN)
def test_the_tokens_are_transformers(call: str, dropping: Any) -> None:
    ids = tiny.prompt(2, length=24)
    expected = decode(build(), dropping, ids, **PLAIN[call])
    assert torch.equal(decode(hfgen.mix_into(build()), dropping, ids, **PLAIN[call]), expected)
    torch.manual_seed(0)
    undisturbed = build().generate(ids, max_new_tokens=N, **PLAIN[call])
    assert not torch.equal(expected, undisturbed), "the hook does nothing"


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "assistant": lambda: {"assistant_model": build()},
    "early exit": lambda: {"assistant_early_exit": 1},
}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_behind_a_prompt_that_lost_keys(drafts: str) -> None:
    """The prompt is forwarded alone, so that no drafted key is dropped with its keys."""
    ids = tiny.prompt(1, length=12).repeat(1, 2)
    expected = decode(build(), OF_PROMPTS, ids)
    assert torch.equal(
        decode(hfgen.mix_into(build()), OF_PROMPTS, ids, **DRAFTS[drafts]()), expected
    )


@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_are_refused_if_their_keys_are_dropped(drafts: str) -> None:
    ids = tiny.prompt(1, length=12).repeat(1, 2)
    with pytest.raises(ValueError, match=r"was fed \d+, and has 12: .* hook, drops keys"):
        decode(hfgen.mix_into(build()), ALWAYS, ids, **DRAFTS[drafts]())


def test_sampled_drafts_are_refused_behind_a_prompt_that_lost_keys() -> None:
    """Speculative sampling draws as transformers does, from the first forward with drafts on."""
    ids = tiny.prompt(1, length=12).repeat(1, 2)
    options = {"assistant_model": build(), "do_sample": True}
    with pytest.raises(ValueError, match=r"was fed \d+, and has \d+: .* hook, drops keys"):
        decode(hfgen.mix_into(build()), OF_PROMPTS, ids, **options)


@pytest.mark.parametrize("low_memory", [False, True])
def test_candidates_behind_a_prompt_that_lost_keys(low_memory: bool) -> None:
    ids = tiny.prompt(2, length=24)
    options = {"penalty_alpha": 0.6, "top_k": 4}
    model = hfgen.mix_into(build())
    tokens = decode(model, OF_PROMPTS, ids, low_memory=low_memory, **options)
    assert torch.equal(tokens, decode(model, OF_PROMPTS, ids, low_memory=False, **options))
    assert not torch.equal(tokens, model.generate(ids, max_new_tokens=N, **options))


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("dropping", "message"),
    [(ALWAYS, "and has 12: "), (UNEVEN, "another number than the first: ")],
    ids=["always", "uneven"],
)
def test_candidates_are_refused_if_they_cannot_be_taken_back(
    dropping: Any, message: str, low_memory: bool
) -> None:
    options = {"penalty_alpha": 0.6, "top_k": 4, "low_memory": low_memory}
    with pytest.raises(ValueError, match=message):
        decode(hfgen.mix_into(build()), dropping, tiny.prompt(1, length=24), **options)


def test_a_prefix_cache_stores_nothing_of_it() -> None:
    model, prefixes, ids = hfgen.mix_into(build()), hfgen.PrefixCache(), tiny.prompt(1, length=24)
    plain = model.generate(ids, max_new_tokens=N, prefix_cache=prefixes)
    dropped = decode(build(), OF_PROMPTS, ids)
    for _ in range(2):
        assert torch.equal(decode(model, OF_PROMPTS, ids, prefix_cache=prefixes), dropped)
    assert torch.equal(model.generate(ids, max_new_tokens=N, prefix_cache=prefixes), plain)


def test_the_engine_decodes_one_request_at_a_time() -> None:
    model, prompts = hfgen.mix_into(build()), tiny.prompt(3, length=24)
    with OF_PROMPTS(model), hfgen.Engine(model) as engine:
        requests = [engine.add(prompt, max_new_tokens=N) for prompt in prompts]
        found = [request.result().token_ids for request in requests]
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = decode(build(), OF_PROMPTS, prompt[None])
        assert tokens == expected[0, 24:].tolist()
