"""Every row of docs/differences.md: what hfgen does, and that upstream still does otherwise.

The second half shows when a difference has gone from upstream, so that the page stays true.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteriaList,
)

import hfgen
from hfgen.families import CACHE
from tests import tiny
from tests.test_bad_input import Recorder
from tests.versions import IS_5_24, since_5_23, with_cache


def both(build: Any = tiny.llama) -> tuple[Any, Any]:
    """The same model twice: upstream's, and mixed."""
    return build(), hfgen.mix_into(build())


def tokenizer() -> PreTrainedTokenizerFast:
    return hfgen.builtin_model(draft=True)[1]


def test_beam_search_pads_with_a_pad_id_of_zero():
    options = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 12,
        "length_penalty": -2.0,
    }
    theirs, ours = (m.generate(tiny.prompt(4), **options) for m in both())
    ends = (ours[:, 7:] == 2).float().argmax(dim=1)
    is_after_end = (ours[:, 7:] == 2).any(dim=1, keepdim=True) & (
        torch.arange(ours.shape[1] - 7) > ends[:, None]
    )
    assert is_after_end.any(), "no beam ended early, so nothing was padded"
    assert (ours[:, 7:][is_after_end] == 0).all()
    assert (theirs[:, 7:][is_after_end] == 2).all()
    assert torch.equal(ours[:, 7:][~is_after_end], theirs[:, 7:][~is_after_end])


def test_a_streamer_with_beam_sampling_gets_tokens_and_is_ended():
    options = {"num_beams": 2, "do_sample": True, "max_new_tokens": 4}
    for model, puts, ends in zip(both(), (1, 2), (0, 1), strict=True):
        streamer = Recorder()
        model.generate(tiny.prompt(1), streamer=streamer, **options)
        assert min(len(streamer.puts), 2) == puts
        assert streamer.ends == ends


def test_a_streamer_with_beam_search_is_an_error_upstream():
    upstream, model = both()
    options = {"num_beams": 2, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="beam search"):
        upstream.generate(tiny.prompt(1), streamer=Recorder(), **options)
    model.generate(tiny.prompt(1), streamer=Recorder(), **options)


def test_stop_strings_count_generated_text_only():
    model, words = hfgen.builtin_model(draft=True)
    prompt = words("x = 1\n", return_tensors="pt").input_ids
    newline = words.convert_tokens_to_ids(words.tokenize("\n"))[-1]

    def always_newline(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([newline]), 1e4)

    options = {
        "max_new_tokens": 4,
        "stop_strings": ["\n\n"],
        "tokenizer": words,
        "logits_processor": [always_newline],
    }
    upstream = copy.deepcopy(model)
    upstream.__class__ = type(model)._unmixed_class
    assert upstream.generate(prompt, **options).shape[1] - prompt.shape[1] == 1
    assert model.generate(prompt, **options).shape[1] - prompt.shape[1] == 2


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}],
    ids=["beams", "samples"],
)
def test_a_cache_of_the_caller_is_expanded(options):
    model, upstream, ids = hfgen.mix_into(tiny.llama()), tiny.llama(), tiny.prompt(2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    kept = copy.deepcopy(cache)
    with pytest.raises(RuntimeError):
        upstream.generate(ids, past_key_values=copy.deepcopy(cache), max_new_tokens=6, **options)

    torch.manual_seed(0)
    continued = model.generate(ids, past_key_values=cache, max_new_tokens=6, **options)
    torch.manual_seed(0)
    assert torch.equal(continued, upstream.generate(ids, max_new_tokens=6, **options))
    for layer, before in zip(cache.layers, kept.layers, strict=True):
        assert torch.equal(layer.keys, before.keys)


def test_a_cache_of_another_number_of_rows_is_an_error():
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:1, :5], past_key_values=cache)
    with pytest.raises(ValueError, match=f"`{CACHE}` holds 1 sequences, but the call has 2"):
        model.generate(ids, past_key_values=cache, max_new_tokens=6)


def test_an_emptied_static_cache_takes_a_smaller_batch():
    (upstream, model), ids = both(), tiny.prompt(3)
    for each, context in ((model, contextlib.nullcontext()), (upstream, pytest.raises(Exception))):  # noqa: PT011
        cache = StaticCache(config=model.config, max_cache_len=32)
        each.generate(ids, past_key_values=cache, max_new_tokens=4)
        cache.reset()
        with context:
            out = each.generate(ids[:2], past_key_values=cache, max_new_tokens=4)
    assert torch.equal(out if each is model else model.generate(ids[:2], max_new_tokens=4), upstream.generate(ids[:2], max_new_tokens=4))  # fmt: skip


def test_encoder_outputs_of_the_caller_stay_as_they_are():
    (upstream, model), ids = both(tiny.t5), tiny.prompt(2)
    encoded = model.get_encoder()(ids, return_dict=True)
    first = model.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=5)
    assert encoded.last_hidden_state.shape[0] == 2
    assert torch.equal(
        first, model.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=5)
    )
    assert torch.equal(first, upstream.generate(ids, num_beams=3, max_new_tokens=5))
    upstream.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=5)
    assert encoded.last_hidden_state.shape[0] == 6


def test_beams_follow_a_longer_max_length_criterion():
    (upstream, model), ids = both(), tiny.prompt(2)
    options = {"num_beams": 2, "eos_token_id": None, "max_new_tokens": 4}
    criteria = StoppingCriteriaList([MaxLengthCriteria(7 + 9)])
    with pytest.raises(IndexError):
        upstream.generate(ids, stopping_criteria=criteria, **options)
    longer = model.generate(ids, stopping_criteria=criteria, **options)
    assert torch.equal(longer, upstream.generate(ids, **options | {"max_new_tokens": 9}))


@since_5_23
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_are_prefilled_in_chunks(with_ids):
    (upstream, model), ids = both(), tiny.prompt(2)
    mask = torch.tensor([[1] * 7, [0, 0, *[1] * 5]])
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    inputs |= {"input_ids": ids} if with_ids else {}
    whole = upstream.generate(**inputs, max_new_tokens=5)
    chunked = model.generate(**inputs, max_new_tokens=5, prefill_chunk_size=3)
    assert torch.equal(chunked, whole)
    theirs = None
    with contextlib.suppress(Exception):
        theirs = upstream.generate(**inputs, max_new_tokens=5, prefill_chunk_size=3)
    assert theirs is None or not torch.equal(theirs, whole)


def test_prompt_lookup_forwards_the_prompt_in_chunks() -> None:
    """Upstream's takes no notice of ``prefill_chunk_size``."""
    call: dict[str, Any] = {"prefill_chunk_size": 3, "prompt_lookup_num_tokens": 2}
    call |= {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 3}
    lengths = []
    for model in both():
        output: Any = model.generate(tiny.prompt(rows=1), **call)
        lengths.append(output.hidden_states[0][0].shape[1])
    assert lengths == [7, 1]


def test_guidance_on_an_encoder_decoder():
    (upstream, model), ids = both(tiny.t5), tiny.prompt(2)
    options = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": tiny.prompt(2, seed=1),
        "max_new_tokens": 5,
    }
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        upstream.generate(ids, **options)
    guided = model.generate(ids, **options)
    assert not torch.equal(guided, model.generate(ids, max_new_tokens=5))


@pytest.mark.parametrize("build", [tiny.bart, tiny.t5])
@pytest.mark.parametrize("n_decoder_ids", [0, 5])
def test_chunks_of_a_decoders_prompt_leave_the_encoders_mask_whole(build, n_decoder_ids):
    (upstream, model), ids = both(build), tiny.prompt(2)
    call = {"attention_mask": torch.tensor([[0, 0, *[1] * 5], [1] * 7]), "max_new_tokens": 8}
    start = torch.full((2, 1), model.config.decoder_start_token_id)
    prompt = torch.cat([start, tiny.prompt(2, 5, seed=1)[:, :n_decoder_ids]], dim=1)
    call |= {"decoder_input_ids": prompt, "num_beams": 3}
    whole = upstream.generate(ids, **call)
    for size in (1, 2, 4):
        assert torch.equal(model.generate(ids, prefill_chunk_size=size, **call), whole)
    theirs = None
    with contextlib.suppress(RuntimeError):
        theirs = upstream.generate(ids, prefill_chunk_size=1, **call)
    assert theirs is None or not torch.equal(theirs, whole)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(
    "build", [tiny.gpt2] + [tiny.llama] * (not IS_5_24)
)  # which keeps it since
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
def test_training_mode_with_gradient_checkpointing_decodes_without_a_cache(build, options):
    options = {"max_new_tokens": 6, **options}
    model, ids = hfgen.mix_into(build()), tiny.prompt(2)
    for dropout in (m for m in model.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    expected = model.generate(ids, **options)
    model.train().gradient_checkpointing_enable()
    assert model.generate(ids, **options).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=f"`{CACHE}` cannot be read: in training mode"):
        model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    model.eval()
    assert model.generate(
        ids, use_cache=True, **options, return_dict_in_generate=True
    ).past_key_values


def test_guidance_away_from_a_negative_prompt_with_beams():
    (upstream, model), ids = both(), tiny.prompt(2)
    negative = tiny.prompt(2, length=4, seed=1)
    options = {"negative_prompt_ids": negative, "guidance_scale": 2.0, "max_new_tokens": 5}
    with pytest.raises(RuntimeError):
        upstream.generate(ids, num_beams=2, **options)
    guided = model.generate(ids, num_beams=2, **options)
    assert guided.shape[0] == 2
    assert not torch.equal(guided, model.generate(ids, num_beams=2, max_new_tokens=5))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_paged_leaves_padding_out():
    model = hfgen.mix_into(tiny.llama())
    ids = tiny.prompt(2)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3], mask[1, :3] = 0, 0
    options = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    out = model.generate(
        padded,
        attention_mask=mask,
        cache_implementation="paged",
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=8, max_batch_tokens=32
        ),
        **options,
    )
    assert out.shape == (1, 2, 11)
    alone = model.generate(ids[1:, 3:], **options)
    assert out[0, 0].tolist() == model.generate(ids[:1], **options)[0].tolist()
    assert out[0, 1].tolist() == [*alone[0].tolist(), 0, 0, 0]


def test_healing_a_token_whose_text_is_not_its_spelling():
    model, words = hfgen.builtin_model(draft=True)
    prompt = words("price = '€'[0:1] # é", return_tensors="pt").input_ids[:, :-1]
    healed = model.generate(prompt, token_healing=True, tokenizer=words, max_new_tokens=2)
    assert healed.shape[0] == 1
    assert healed.shape[1] > prompt.shape[1] - 2


def test_healing_that_shortens_a_padded_batch():
    model, words = hfgen.builtin_model(draft=True)
    spelled = [words.convert_tokens_to_ids(list(text)) for text in ("return", "ret")]
    pads = len(spelled[0]) - len(spelled[1])
    ids = torch.tensor([spelled[0], [words.pad_token_id] * pads + spelled[1]])
    mask = torch.tensor([[1] * 6, [0] * pads + [1] * 3])
    healed = model.heal_tokens(ids, words)
    assert healed.shape[1] < ids.shape[1]
    out = model.generate(
        ids, attention_mask=mask, token_healing=True, tokenizer=words, max_new_tokens=4
    )
    is_text = healed.ne(words.pad_token_id).long()
    assert torch.equal(out, model.generate(healed, attention_mask=is_text, max_new_tokens=4))


def test_healing_with_an_assistant():
    model, words = hfgen.builtin_model(draft=True)
    options = {"token_healing": True, "tokenizer": words, "max_new_tokens": 4}
    ids = words("def fibo", return_tensors="pt").input_ids
    healed = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=model, **options), healed)


def test_drafts_behind_a_prompt_of_padding():
    ids = torch.tensor([[36, 13, 12]])
    options = {"attention_mask": torch.zeros_like(ids), "max_new_tokens": 5, "do_sample": False}
    results = []
    for model in both():
        model.set_attn_implementation("eager")
        results.append(model.generate(ids, **options))
        results.append(model.generate(ids, assistant_model=tiny.llama(), **options))
    greedy, upstreams, *mine = results
    assert not torch.equal(greedy, upstreams)
    assert all(torch.equal(greedy, each) for each in mine)


def test_stop_strings_on_a_forward_that_takes_no_other_kwargs():
    class Strict(type(tiny.llama())):  # type: ignore[misc]
        @with_cache
        def forward(  # type: ignore[no-untyped-def]
            self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, return_dict=None
        ):  # fmt: skip
            return super().forward(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE: past_key_values},
                use_cache=use_cache,
            )

    upstream, model = tiny.llama(), tiny.llama()
    upstream.__class__ = Strict
    model.__class__ = hfgen.mix_into(Strict)
    options = {"stop_strings": "x", "tokenizer": tokenizer(), "max_new_tokens": 3}
    with pytest.raises(TypeError, match="tokenizer"):
        upstream.generate(tiny.prompt(), **options)
    assert model.generate(tiny.prompt(), **options).shape[0] == 2


def test_transition_scores_of_logits_wider_than_the_vocabulary():
    sequences = torch.tensor([[5, 3, 0], [6, 1, 3]])
    scores = (torch.arange(8.0).view(2, 4), torch.arange(8.0, 16.0).view(2, 4))
    model = hfgen.mix_into(tiny.llama(vocab_size=3))
    got = model.compute_transition_scores(sequences, scores)
    assert got.tolist() == [[3.0, 8.0], [5.0, 15.0]]


def test_early_exit_of_the_models_own_config_is_that_of_the_call():
    found = []
    for model in both(lambda: tiny.llama(num_hidden_layers=3)):
        options = {"do_sample": True, "max_new_tokens": 12}
        torch.manual_seed(0)
        in_call = model.generate(tiny.prompt(1), assistant_early_exit=1, **options)
        model.generation_config.assistant_early_exit = 1
        torch.manual_seed(0)
        found.append((in_call, model.generate(tiny.prompt(1), **options)))
    (theirs, their_own), (ours, our_own) = found
    assert torch.equal(theirs, ours)
    assert torch.equal(ours, our_own)
    assert not torch.equal(theirs, their_own)


def test_an_ensemble_of_an_encoder_decoder_with_itself_is_greedy_decoding():
    """Upstream's assistant reads its text twice from round 2 on, and so weighs other scores."""
    n_other = {False: 0, True: 0}
    for seed in range(4):
        ids = tiny.prompt(1, seed=seed)
        greedy = tiny.bart().generate(ids, max_new_tokens=14)
        for is_ours, build in ((False, tiny.bart), (True, lambda: hfgen.mix_into(tiny.bart()))):
            options = {"assistant_model": tiny.bart(), "assistant_ensemble_weight": 0.2}
            found = build().generate(ids, max_new_tokens=14, **options)
            n_other[is_ours] += not torch.equal(found, greedy)
    assert n_other[True] == 0 < n_other[False]


# --- accepted here, an error upstream -----------------------------------------------------------


def test_temperature_zero_is_greedy():
    (upstream, model), ids = both(), tiny.prompt(2)
    state = torch.random.get_rng_state()
    cold = model.generate(ids, do_sample=True, temperature=0, max_new_tokens=6)
    assert torch.equal(cold, upstream.generate(ids, max_new_tokens=6))
    assert torch.equal(torch.random.get_rng_state(), state)
    config = GenerationConfig(do_sample=True, temperature=0.0, max_new_tokens=6)
    assert torch.equal(model.generate(ids, generation_config=config), cold)
    assert (config.do_sample, config.temperature) == (True, 0.0)
    with pytest.raises(ValueError, match="temperature"):
        upstream.generate(ids, do_sample=True, temperature=0, max_new_tokens=6)


def test_top_k_of_minus_one_is_off():
    (upstream, model), ids = both(), tiny.prompt(2)
    torch.manual_seed(3)
    off = model.generate(ids, do_sample=True, top_k=-1, max_new_tokens=6)
    torch.manual_seed(3)
    assert torch.equal(off, upstream.generate(ids, do_sample=True, top_k=0, max_new_tokens=6))
    with pytest.raises(ValueError, match="top_k"):
        upstream.generate(ids, do_sample=True, top_k=-1, max_new_tokens=6)


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}],
    ids=["greedy", "sample", "beam", "assisted"],
)
@pytest.mark.parametrize("as_config", [False, True])
def test_zero_new_tokens_return_the_prompt(options, as_config):
    model, ids, forwards = hfgen.mix_into(tiny.llama()), tiny.prompt(1), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    asked = {"max_new_tokens": 0, "return_dict_in_generate": True, "output_scores": True} | options
    if as_config:
        asked = {"generation_config": hfgen.GenerationConfig(**asked)}
    out = model.generate(ids, **asked)
    assert torch.equal(out.sequences, ids)
    assert out.scores == ()
    assert forwards == []
    with pytest.raises(ValueError, match="max_new_tokens"):
        tiny.llama().generate(ids, max_new_tokens=0)


def test_zero_new_tokens_of_an_encoder_decoder_and_a_streamer():
    model, streamer = hfgen.mix_into(tiny.t5()), Recorder()
    out = model.generate(tiny.prompt(1), max_new_tokens=0, streamer=streamer)
    assert out.tolist() == [[0]]
    assert ([put.tolist() for put in streamer.puts], streamer.ends) == ([[[0]]], 1)


def test_whole_floats_count():
    (upstream, model), ids = both(), tiny.prompt(2)
    expected = upstream.generate(ids, num_beams=2, num_return_sequences=2, max_new_tokens=6)
    given = {"num_beams": 2.0, "num_return_sequences": 2.0, "max_new_tokens": 6.0}
    assert torch.equal(model.generate(ids, **given), expected)
    with pytest.raises(TypeError):
        upstream.generate(ids, **given)


def test_strict_config_names_the_nearest_field(tmp_path):
    with pytest.raises(ValueError, match=r"`temprature`.*did you mean `temperature`"):
        hfgen.GenerationConfig(strict=True, temprature=0.5)
    assert hfgen.GenerationConfig(temprature=0.5).temprature == 0.5  # upstream's way, by default
    config = hfgen.GenerationConfig(strict=True, do_sample=True, temperature=0.5)
    config.save_pretrained(tmp_path)
    assert "strict" not in (tmp_path / "generation_config.json").read_text()
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.5
    assert hfgen.GenerationConfig.from_pretrained(tmp_path) == config


# --- kept, though it surprises ------------------------------------------------------------------


def test_min_new_tokens_is_exact_per_row_where_min_length_counts_pads():
    (upstream, model), ids = both(), tiny.prompt(2)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :5], mask[1, :5] = 0, 0

    def wants_to_end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([2]), scores.max().item() + 1)

    class Ending:
        """Upstream merges processors by type, so this one needs its own."""

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_banned = scores[:, 2:3].isneginf()
            return torch.where(is_banned, scores, wants_to_end(ids, scores))

    for options, new_tokens in (({"min_new_tokens": 4}, 5), ({"min_length": 9}, 3)):
        for each in (upstream, model):
            out = each.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=9,
                logits_processor=[Ending()],
                **options,
            )
            assert out.shape[1] - 7 == new_tokens


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sample", "beam"]
)
def test_a_processor_may_write_to_the_ids(options, rows):
    """What follows has what was written, as upstream's has; the caller's own ids are left alone."""

    def rewrite(ids, scores):
        ids[:, 1] = ids[:, -1]
        ids[:, -1] = 9
        return scores

    results = []
    for model in both():
        torch.manual_seed(0)
        ids = tiny.prompt(rows)
        results.append(model.generate(ids, max_new_tokens=5, logits_processor=[rewrite], **options))
    assert torch.equal(*results)
    assert torch.equal(ids, tiny.prompt(rows))
