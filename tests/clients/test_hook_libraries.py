"""Libraries that work by hooks: kvpress, which drops keys of the cache, and nnsight, which edits activations.

kvpress 0.5.5 asks for transformers before 5.3, whose attention layers get ``cache_position``; ``positions``
passes it to them. Without, its hooks raise a ``KeyError``, also without hfgen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kvpress import (
    AdaKVPress,
    DecodingPress,
    ExpectedAttentionPress,
    KeyRerotationPress,
    KnormPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    ThinKPress,
)
from nnsight import LanguageModel
from torch import Tensor

import hfgen
from tests import tiny
from tests.clients.conftest import model as byte_model

N = 14
PRESSES: dict[str, Callable[[], Any]] = {
    "knorm": lambda: KnormPress(0.5),
    "snapkv": lambda: SnapKVPress(0.5, window_size=4),
    "streaming": lambda: StreamingLLMPress(0.5),
    "expected": lambda: ExpectedAttentionPress(0.5, n_future_positions=8),
    "rerotated": lambda: KeyRerotationPress(KnormPress(0.5)),
    "think": lambda: ThinKPress(0.5, window_size=4),
    "adakv": lambda: AdaKVPress(KnormPress(0.5)),
    "pyramid": lambda: PyramidKVPress(0.5, window_size=4),
    "decoding": lambda: DecodingPress(KnormPress(), compression_interval=4, target_size=12),
}
PADDED = torch.tensor([[1] * 24, [0] * 6 + [1] * 18])


def build() -> Any:
    model = tiny.llama(num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def positions(model: Any) -> Iterator[None]:
    """Pass ``cache_position`` to attention layers, as transformers did when kvpress was written."""

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        n = kwargs["hidden_states"].shape[1]
        first = kwargs["position_ids"].max() + 1 - n
        return args, kwargs | {"cache_position": torch.arange(n) + first}

    layers = [layer.self_attn for layer in model.model.layers]
    handles = [each.register_forward_pre_hook(add, with_kwargs=True) for each in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pressed(press: str, ids: Tensor, model: Any = None, **options: Any) -> Tensor:
    model = build() if model is None else model
    torch.manual_seed(0)
    with positions(model), PRESSES[press]()(model):
        tokens: Tensor = model.generate(ids, max_new_tokens=N, **options)
    return tokens


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 3}, {"attention_mask": PADDED}],
    ids=["greedy", "sampling", "beams", "padded"],
)
def test_a_press_has_the_same_tokens(both: Callable, press: str, options: dict[str, Any]) -> None:
    ids = tiny.prompt(2, length=24)
    if press == "pyramid" and "attention_mask" in options:
        # The layers keep different lengths, and transformers makes one mask for all of them.
        for model in (build(), hfgen.mix_into(build())):
            with pytest.raises(RuntimeError, match="must match the size"):
                pressed(press, ids, model, **options)
        return
    theirs, ours = both(lambda: pressed(press, ids, **options))
    assert torch.equal(ours, theirs)
    torch.manual_seed(0)
    assert not torch.equal(theirs, build().generate(ids, max_new_tokens=N, **options))


def test_without_its_argument_kvpress_does_not_run() -> None:
    for model in (build(), hfgen.mix_into(build())):
        with KnormPress(0.5)(model), pytest.raises(KeyError, match="cache_position"):
            model.generate(tiny.prompt(1), max_new_tokens=2)


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize(
    "drafts", ["prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model"]
)
def test_drafts_under_a_press(press: str, drafts: str) -> None:
    """The greedy tokens of the press, or an error: transformers returns other ones."""
    ids = tiny.prompt(1, length=24)
    options = {drafts: build() if drafts == "assistant_model" else 1}
    if press in ("decoding", "pyramid"):
        with pytest.raises((ValueError, RuntimeError), match=r"drops keys|must match the size"):
            pressed(press, ids, hfgen.mix_into(build()), **options)
        return
    tokens = pressed(press, ids, hfgen.mix_into(build()), **options)
    assert torch.equal(tokens, pressed(press, ids))


@pytest.mark.parametrize("press", PRESSES)
def test_a_prefix_cache_is_left_alone(press: str) -> None:
    model, prefixes, ids = hfgen.mix_into(build()), hfgen.PrefixCache(), tiny.prompt(1, length=24)
    plain = model.generate(ids, max_new_tokens=N, prefix_cache=prefixes)
    expected = pressed(press, ids)
    for _ in range(2):
        assert torch.equal(pressed(press, ids, model, prefix_cache=prefixes), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=N, prefix_cache=prefixes), plain)


@pytest.mark.parametrize("press", ["knorm", "think", "adakv", "pyramid"])
def test_the_engine_takes_requests_one_at_a_time(press: str) -> None:
    model, prompts = hfgen.mix_into(build()), tiny.prompt(3, length=24)
    with positions(model), PRESSES[press]()(model), hfgen.Engine(model) as engine:
        requests = [engine.add(prompt, max_new_tokens=N) for prompt in prompts]
        found = [request.result().token_ids for request in requests]
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == pressed(press, prompt[None])[0, 24:].tolist()


# ---------------------------------------------------------------- nnsight

TWO = ["Hello world", "Hi"]


def edited(prompt: Any, row: int | None = None, **options: Any) -> Any:
    """Tokens of a call whose second layer returns zeros, for all rows or for one."""
    model = byte_model()
    model.generation_config.eos_token_id = None
    language_model = LanguageModel(model, tokenizer=tiny.byte_tokenizer())
    torch.manual_seed(0)
    with language_model.generate(prompt, max_new_tokens=8, **options):
        if row is None:
            language_model.model.layers[1].output[:] = 0
        else:
            language_model.model.layers[1].output[row] = 0
        tokens = language_model.generator.output.save()
    return [sequence.tolist() for sequence in tokens]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Hello world", {}),
        (TWO, {}),
        (TWO, {"row": 1}),
        (TWO, {"do_sample": True}),
        ("Hello world", {"do_sample": True, "num_return_sequences": 3, "row": 1}),
        ("Hello world", {"num_beams": 3, "row": 1}),
        ("abcabcabcabc", {"prompt_lookup_num_tokens": 3}),
        ("Hello world", {"cache_implementation": "static"}),
        ("Hello world", {"prefill_chunk_size": 4}),
    ],
    ids=str,
)
def test_an_edit_has_the_same_tokens(both: Callable, prompt: Any, options: dict[str, Any]) -> None:
    theirs, ours = both(lambda: edited(prompt, **options))
    assert ours == theirs


def test_activations_of_each_step_are_seen(both: Callable) -> None:
    def shapes() -> list[tuple[int, ...]]:
        language_model = LanguageModel(byte_model(), tokenizer=tiny.byte_tokenizer())
        with language_model.generate("Hello world", max_new_tokens=5) as tracer:
            seen = list().save()  # noqa: C408 -- nnsight adds the method to lists that it sees made
            for _ in tracer.iter[:]:
                seen.append(language_model.model.layers[0].output)
        return [tuple(states.shape) for states in seen]

    theirs, ours = both(shapes)
    assert ours == theirs
    assert ours[:2] == [(1, 11, 32), (1, 1, 32)]


def test_early_exit_under_nnsight_is_refused_by_name() -> None:
    with hfgen.patched(), pytest.raises(Exception, match="first 1 layers alone"):
        edited("abcabcabcabc", assistant_early_exit=1)
