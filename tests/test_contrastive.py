"""Contrastive search, beside the definition in the paper, and what 4.49.0 could not do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
)
from transformers.cache_utils import Cache, DynamicLayer

import hfgen
from hfgen.families import CACHE
from tests import tiny
from tests.golden import models
from tests.parity.family import seeded
from tests.test_bad_input import Recorder, Untouched

OPTIONS: dict[str, Any] = {"penalty_alpha": 0.8, "top_k": 4, "max_new_tokens": 12}


def mistral() -> Any:
    """A window of 6, shorter than prompt and output."""
    config = MistralConfig(
        **tiny.SPECIAL,
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=6,
        initializer_range=0.3,
    )
    return seeded(lambda: MistralForCausalLM(config))


def mamba() -> Any:
    config = MambaConfig(
        **tiny.SPECIAL, vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8
    )
    return seeded(lambda: MambaForCausalLM(config))


def bart() -> Any:
    """Weights for which the embeddings do not decide the next token."""
    model = tiny.bart()
    models.fill(model, seed=2, spread=1.5, gain=4.0)
    return model


BUILD = {"mistral": mistral, "llama": tiny.llama, "gpt2": tiny.gpt2}
BUILD |= {"bart": bart, "t5": tiny.t5}
DECODERS = ("llama", "gpt2", "mistral")


@cache
def built(name: str) -> Any:
    model = hfgen.mix_into(BUILD[name]())
    model.set_attn_implementation("eager")  # which returns attentions
    return model


@pytest.fixture(params=BUILD)
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


@torch.no_grad()
def forward(model: Any, prompt: torch.Tensor, ids: torch.Tensor, **kwargs: Any) -> Any:
    """The model's outputs for ``ids``, which include ``prompt`` if it is decoder-only."""
    if model.config.is_encoder_decoder:
        return model(input_ids=prompt, decoder_input_ids=ids, **kwargs)
    return model(input_ids=ids, **kwargs)


def by_definition(model: Any, prompt: torch.Tensor, alpha: float, k: int, n_new: int) -> Any:
    """Each token by the formula of the paper, without a cache, for one row."""
    is_encoder_decoder = model.config.is_encoder_decoder
    start = model.config.decoder_start_token_id if is_encoder_decoder else None
    ids = torch.tensor([[start]]) if is_encoder_decoder else prompt

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = forward(model, prompt, ids, output_hidden_states=True)
        hidden = out.decoder_hidden_states if is_encoder_decoder else out.hidden_states
        return out.logits[0, -1], hidden[-1][0]

    for _ in range(n_new):
        logits, _ = run(ids)
        probabilities, tokens = logits.softmax(-1).topk(k)
        worth = []
        for probability, token in zip(probabilities, tokens, strict=True):
            hidden = run(torch.cat([ids, token.view(1, 1)], dim=1))[1]
            similarity = F.cosine_similarity(hidden[:-1], hidden[-1:], dim=-1).max()
            worth.append((1 - alpha) * probability - alpha * similarity)
        ids = torch.cat([ids, tokens[torch.stack(worth).argmax()].view(1, 1)], dim=1)
        if ids[0, -1] == model.config.eos_token_id:
            break
    return ids


@pytest.mark.parametrize(("alpha", "k"), [(0.6, 4), (0.2, 6), (1.0, 3)])
def test_is_the_definition(model, alpha, k):
    prompt = tiny.prompt(1)
    output = model.generate(prompt, penalty_alpha=alpha, top_k=k, max_new_tokens=12)
    assert torch.equal(output, by_definition(model, prompt, alpha, k, 12))


def test_differs_from_greedy(model):
    prompt = tiny.prompt(3)
    greedy = model.generate(prompt, max_new_tokens=12)
    assert not torch.equal(model.generate(prompt, **OPTIONS), greedy)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_row_is_as_it_is_alone(name, low_memory):
    model, ids = built(name), tiny.prompt(3)
    mask = torch.ones_like(ids)
    for row, pads in ((1, 2), (2, 4)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    options = OPTIONS | {"low_memory": low_memory}
    batch = model.generate(ids, attention_mask=mask, **options)
    for row in range(3):
        alone = model.generate(ids[row, mask[row].bool()][None], **options)[0]
        n_new = len(alone) - int(mask[row].sum())
        assert batch[row, 7 : 7 + n_new].tolist() == alone[-n_new:].tolist()
        assert not batch[row, 7 + n_new :].any()


@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
def test_one_by_one_and_static_caches_change_nothing(model, cache_implementation):
    prompt = tiny.prompt(3)
    expected = model.generate(prompt, **OPTIONS)
    for low_memory in (False, True):
        output = model.generate(
            prompt,
            **OPTIONS,
            low_memory=low_memory,
            cache_implementation=cache_implementation,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, expected)


class Odd(DynamicLayer):
    """A layer of a kind that the strategy does not know: its rows are copied whole."""


def test_other_kinds_of_layers():
    model, prompt = built("llama"), tiny.prompt(2)
    cache = Cache(layers=[Odd(), Odd()])
    output = model.generate(prompt, past_key_values=cache, **OPTIONS)
    assert torch.equal(output, model.generate(prompt, **OPTIONS))
    assert [tuple(layer.keys.shape[:3]) for layer in cache.layers] == 2 * [(2, 2, 18)]


@pytest.mark.parametrize("low_memory", [False, True])
def test_the_returned_cache_goes_on(model, low_memory):
    prompt = tiny.prompt(2)
    options = OPTIONS | {"return_dict_in_generate": True, "eos_token_id": None}
    output = model.generate(prompt, **options, low_memory=low_memory)
    length = output.sequences.shape[1]
    assert int(output.past_key_values.get_seq_length()) == length - 1
    newest = forward(
        model, prompt, output.sequences[:, -1:], past_key_values=output.past_key_values
    )
    whole = forward(model, prompt, output.sequences)
    torch.testing.assert_close(newest.logits[:, -1], whole.logits[:, -1], rtol=1e-3, atol=1e-3)


def test_what_is_recorded_is_what_the_chosen_tokens_give(model):
    prompt = tiny.prompt(2)
    options = OPTIONS | {"eos_token_id": None, "repetition_penalty": 1.3}
    asked = ("scores", "logits", "attentions", "hidden_states")
    output = model.generate(
        prompt,
        **options,
        return_dict_in_generate=True,
        **{f"output_{name}": True for name in asked},
    )
    assert torch.equal(output.sequences, model.generate(prompt, **options))
    is_encoder_decoder = model.config.is_encoder_decoder
    prefix = "decoder_" if is_encoder_decoder else ""
    whole = forward(model, prompt, output.sequences, output_hidden_states=True)
    first = output.sequences.shape[1] - 12 - 1
    logits = torch.stack(output.logits, dim=1)
    torch.testing.assert_close(logits, whole.logits[:, first:-1], rtol=1e-3, atol=1e-3)
    assert len(output.scores) == 12
    assert not torch.equal(output.scores[5], output.logits[5])
    hidden = torch.cat([step[-1] for step in output[prefix + "hidden_states"]], dim=1)
    expected = whole[prefix + "hidden_states"][-1][:, :-1]
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
    attentions = output[prefix + "attentions"]
    assert [step[0].shape[-2] for step in attentions] == [first + 1] + 11 * [1]
    assert all(len(layer) == 2 for step in attentions for layer in step)
    if is_encoder_decoder:
        assert [step[0].shape for step in output.cross_attentions] == 12 * [(2, 4, 1, 7)]
        assert output.encoder_hidden_states is not None


def test_nothing_is_recorded_unasked(model):
    output = model.generate(tiny.prompt(1), **OPTIONS, return_dict_in_generate=True)
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    assert output.scores is None
    assert output[prefix + "hidden_states"] is None if prefix + "hidden_states" in output else True


def test_streams_token_by_token(model):
    streamer = Recorder()
    output = model.generate(tiny.prompt(1), **OPTIONS, streamer=streamer)
    assert torch.equal(torch.cat([put.reshape(-1) for put in streamer.puts]), output[0])
    assert {put.numel() for put in streamer.puts[1:]} == {1}
    assert streamer.ends == 1


class Five(StoppingCriteria):
    """Ends row 0 after two new tokens, all after five."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        n_new = input_ids.shape[1] - self.start
        ends = torch.full((len(input_ids),), n_new >= 5)
        ends[0] = n_new >= 2
        return ends


def test_criteria_of_the_caller():
    model, prompt = built("llama"), tiny.prompt(2)
    output = model.generate(prompt, **OPTIONS, stopping_criteria=[Five(7)])
    expected = model.generate(prompt, **OPTIONS)[:, :12]
    expected[0, 9:] = 0
    assert torch.equal(output, expected)


@pytest.mark.parametrize("alpha", [0.95, 1.0])
def test_forbidden_tokens_are_not_candidates(alpha):
    """With one token allowed, the others have no probability, but may be less similar."""
    model, prompt = built("llama"), tiny.prompt(2)
    allowed = [[7, 9, 11, 7, 7, 7, 9, 9, 8, 7, 7, 7], [5, 6, 5, 5, 5, 6, 6, 8, 9, 9, 9, 9]]

    def allow(row: int, ids: torch.Tensor) -> list[int]:
        return [allowed[row][len(ids) - 7]]

    options = OPTIONS | {"penalty_alpha": alpha, "top_k": 8}
    output = model.generate(prompt, **options, prefix_allowed_tokens_fn=allow)
    assert output[:, 7:].tolist() == allowed


def test_more_candidates_than_tokens():
    model, prompt = built("llama"), tiny.prompt(1)
    expected = model.generate(prompt, **OPTIONS | {"top_k": tiny.VOCAB})
    assert torch.equal(model.generate(prompt, **OPTIONS | {"top_k": 1000}), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "leave out `use_cache=False`"),
        ({"penalty_alpha": 1.5}, "`penalty_alpha` has to be between 0 and 1, but is 1.5"),
        ({"top_k": 2.5}, "`top_k` has to be an integer, but is 2.5"),
        ({"prefill_chunk_size": 3}, "leave out `prefill_chunk_size`=3"),
    ],
)
def test_fields_that_cannot_be_used(options, message):
    untouched = Untouched()
    with pytest.raises(ValueError, match=message):
        untouched.model.generate(tiny.prompt(2), **OPTIONS | options)
    untouched.check()


def test_models_with_a_state_that_cannot_be_rolled_back():
    untouched = Untouched(mamba)
    with pytest.raises(ValueError, match="MambaForCausalLM keeps a state that cannot be rolled"):
        untouched.model.generate(tiny.prompt(2), **OPTIONS)
    untouched.check()


def test_a_cache_without_its_hidden_states():
    model, prompt = built("llama"), tiny.prompt(2)
    cache = DynamicCache(config=model.config)
    model(prompt[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match=f"`{CACHE}` holds 4 tokens without theirs"):
        model.generate(prompt, past_key_values=cache, **OPTIONS)
    assert cache.get_seq_length() == 4
