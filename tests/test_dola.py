"""DoLa, beside the definition in the paper, and what 4.49.0 could not do."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    ElectraConfig,
    ElectraForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

import hfgen
from hfgen.decoding.strategies.dola import candidate_layers
from tests import tiny
from tests.golden import models
from tests.parity.family import seeded
from tests.test_bad_input import Recorder, Untouched

LAYERS = ("low", "high", [1], [0, 1, 3])


def llama() -> Any:
    """Four layers, embeddings that are not tied."""
    model = tiny.llama(num_hidden_layers=4, tie_word_embeddings=False)
    models.fill(model, seed=0, spread=3.0, gain=2.0)
    return model


def gpt2() -> Any:
    """Six layers, tied embeddings."""
    config = GPT2Config(
        **tiny.SPECIAL, vocab_size=tiny.VOCAB, n_embd=32, n_layer=6, n_head=4, n_positions=64
    )
    model = seeded(lambda: GPT2LMHeadModel(config))
    models.fill(model, seed=3, spread=3.0, gain=2.0)
    return model


def mamba() -> Any:
    config = MambaConfig(
        **tiny.SPECIAL, vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=4, state_size=8
    )
    model = seeded(lambda: MambaForCausalLM(config))
    models.fill(model, seed=0, spread=3.0, gain=1.0)
    return model


BUILD = {"llama": llama, "gpt2": gpt2, "mamba": mamba}


@cache
def built(name: str) -> Any:
    return hfgen.mix_into(BUILD[name]())


@pytest.fixture(params=BUILD)
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


@torch.no_grad()
def by_definition(model: Any, ids: torch.Tensor, layers: list[int], n_new: int) -> torch.Tensor:
    """Each token by the formulas of the paper and its code, without a cache, for one row."""
    for _ in range(n_new):
        out = model(ids, output_hidden_states=True, use_cache=False)
        final = out.logits[0, -1].log_softmax(-1)
        early = [model.lm_head(out.hidden_states[i][0, -1]).log_softmax(-1) for i in layers]

        def divergence(other: torch.Tensor, final: torch.Tensor = final) -> torch.Tensor:
            mean = (final.exp() + other.exp()) / 2
            return sum(F.kl_div(log_p, mean, reduction="sum") for log_p in (final, other))

        contrast = final - max(early, key=divergence)
        contrast[final.exp() < 0.1 * final.exp().max()] = -torch.inf
        ids = torch.cat([ids, contrast.argmax().view(1, 1)], dim=1)
        if ids[0, -1] == 2:
            break
    return ids


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_is_the_definition(model, layers):
    prompt = tiny.prompt(1)
    output = model.generate(prompt, dola_layers=layers, max_new_tokens=12)
    expected = by_definition(model, prompt, candidate_layers(model, layers), 12)
    assert torch.equal(output, expected)


def test_differs_from_greedy(model):
    prompt = tiny.prompt(3)
    greedy = model.generate(prompt, max_new_tokens=12)
    assert not torch.equal(model.generate(prompt, dola_layers=[1], max_new_tokens=12), greedy)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_each_row_chooses_its_own_layer(layers):
    """A padded batch is what its rows are alone; 4.49.0 took one layer for all of them."""
    model, ids = built("llama"), tiny.prompt(3)
    mask = torch.ones_like(ids)
    for row, pads in ((1, 2), (2, 4)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    options = {"dola_layers": layers, "max_new_tokens": 12}
    batch = model.generate(ids, attention_mask=mask, **options)
    for row in range(3):
        alone = model.generate(ids[row, mask[row].bool()][None], **options)[0]
        n_new = len(alone) - int(mask[row].sum())
        assert batch[row, 7 : 7 + n_new].tolist() == alone[-n_new:].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_caches_change_nothing(name):
    model, prompt = built(name), tiny.prompt(3)
    options = {"dola_layers": "high", "max_new_tokens": 12}
    expected = model.generate(prompt, **options)
    for given in (
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 3},
    ):
        assert torch.equal(model.generate(prompt, **options, **given), expected)


def test_streams_token_by_token(model):
    streamer = Recorder()
    output = model.generate(tiny.prompt(1), dola_layers="low", max_new_tokens=6, streamer=streamer)
    assert torch.equal(torch.cat([put.reshape(-1) for put in streamer.puts]), output[0])
    assert {put.numel() for put in streamer.puts[1:]} == {1}
    assert streamer.ends == 1


def test_samples_several_sequences():
    """4.49.0 returned one, whatever `num_return_sequences` was."""
    model, prompt = built("llama"), tiny.prompt(2)
    options = {"dola_layers": "high", "do_sample": True, "temperature": 3.0, "max_new_tokens": 8}
    torch.manual_seed(0)
    output = model.generate(
        prompt,
        **options,
        num_return_sequences=3,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences.shape == (6, 15)
    assert len({tuple(row) for row in output.sequences.tolist()}) > 2
    scores = model.compute_transition_scores(output.sequences, output.scores)
    assert scores.isfinite().all()  # no token that the filter rules out


def test_what_is_recorded(model):
    prompt = tiny.prompt(2)
    options = {"dola_layers": [1], "max_new_tokens": 4, "return_dict_in_generate": True}
    options |= {"eos_token_id": None}
    output = model.generate(
        prompt, **options, output_logits=True, output_scores=True, output_hidden_states=True
    )
    with torch.no_grad():
        logits = model(prompt).logits[:, -1]
    torch.testing.assert_close(output.logits[0], logits)
    assert torch.equal(
        output.scores[0].isinf(), logits < logits.amax(-1, True) + torch.tensor(0.1).log()
    )
    assert len(output.hidden_states) == 4
    n_layers = model.config.num_hidden_layers
    assert all(len(step) == n_layers + 1 for step in output.hidden_states)
    assert output.hidden_states[0][0].shape == (2, 7, 32)
    unasked = model.generate(prompt, **options)
    assert (unasked.hidden_states, unasked.logits, unasked.scores) == (None, None, None)
    assert torch.equal(unasked.sequences, output.sequences)


@pytest.mark.parametrize(
    ("n_layers", "is_tied", "low", "high"),
    [
        (1, False, [0], [0]),
        (1, True, [0], [0]),
        (2, True, [1], [1]),
        (3, False, [0], [1]),
        (3, True, [2], [1]),
        (4, True, [2], [2]),
        (8, False, [0, 2], [4, 6]),
        (8, True, [2], [4, 6]),
        (40, False, list(range(0, 20, 2)), list(range(20, 40, 2))),
        (60, True, list(range(2, 20, 2)), list(range(40, 60, 2))),
    ],
)
def test_candidate_layers(n_layers, is_tied, low, high):
    table, other = nn.Embedding(3, 2), nn.Linear(2, 3)
    config = SimpleNamespace(num_hidden_layers=n_layers)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config),
        get_input_embeddings=lambda: table,
        get_output_embeddings=lambda: table if is_tied else other,
    )
    assert candidate_layers(model, "low") == low
    assert candidate_layers(model, "high") == high
    assert candidate_layers(model, [1, 0]) == [1, 0]


@pytest.mark.parametrize("layers", [[4], [-1], [0, 9], [], ["low"], "middle", 2, [True], [1.0]])
def test_layers_that_are_none(layers):
    untouched = Untouched(llama)
    with pytest.raises(
        ValueError, match="`dola_layers` has to be 'low', 'high' or a list of layers"
    ):
        untouched.model.generate(tiny.prompt(2), dola_layers=layers)
    untouched.check()


def test_encoder_decoders():
    untouched = Untouched(tiny.bart)
    with pytest.raises(ValueError, match="BartForConditionalGeneration is an encoder-decoder"):
        untouched.model.generate(tiny.prompt(2), dola_layers="low")
    untouched.check()


def test_hidden_states_that_the_head_does_not_read():
    config = ElectraConfig(
        vocab_size=tiny.VOCAB,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=True,
    )
    model = hfgen.mix_into(seeded(lambda: ElectraForCausalLM(config)))
    with pytest.raises(ValueError, match=r"\(rows, length, 16\) .* layer 1 are \(2, 7, 32\)"):
        model.generate(tiny.prompt(2), dola_layers=[1], max_new_tokens=4)
