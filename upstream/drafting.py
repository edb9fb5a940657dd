"""Defects of assisted decoding."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, MaxLengthCriteria
from transformers.generation.utils import ALL_CACHE_NAMES

from .models import bart, byte_tokenizer, gpt2, llama, prompt
from .table import defect

LOOKUP = {"prompt_lookup_num_tokens": 4, "eos_token_id": None}


@defect(
    AssertionError,
    "has 1 layers",
    cause="generation/candidate_generator.py, EarlyExitCandidateGenerator.get_candidates: the shared config is cut while the draft is generated",
    mend="restore `num_hidden_layers` in a `finally`",
    lines=2,
)
def early_exit_after_an_exception() -> None:
    """`assistant_early_exit` leaves the model whole after an exception"""
    model = llama()

    def fail(ids: Any, scores: Any) -> Any:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        model.generate(prompt(), assistant_early_exit=1, logits_processor=[fail])
    n_layers = model.config.num_hidden_layers
    assert n_layers == 3, f"has {n_layers} layers"


@defect(
    IndexError,
    "",
    cause="models/gpt2/modeling_gpt2.py, GPT2Model.forward: runs all layers, whatever `config.num_hidden_layers` says",
    mend="`self.h[: self.config.num_hidden_layers]`, as in Llama",
    lines=1,
)
def early_exit_of_gpt2() -> None:
    """`assistant_early_exit` works with GPT-2"""
    gpt2().generate(prompt(), assistant_early_exit=1, max_new_tokens=5)


@defect(
    AssertionError,
    "other tokens",
    cause="generation/candidate_generator.py, EarlyExitCandidateGenerator: the draft's `generate` takes `assistant_early_exit` from the model's generation config again",
    mend="also set it to None in a copy of the model's generation config",
    lines=3,
)
def early_exit_in_the_models_config() -> None:
    """`assistant_early_exit` in the generation config means what it means in the call"""
    model, found = llama(), []
    for options in ({"assistant_early_exit": 1}, {}):
        torch.manual_seed(0)
        found.append(model.generate(prompt(), do_sample=True, max_new_tokens=12, **options))
        model.generation_config.assistant_early_exit = 1
    assert torch.equal(*found), "other tokens"


@defect(
    ValueError,
    "cache_implementation",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator.__init__: the draft's config keeps `cache_implementation` beside the draft's cache",
    mend="set it to None in the draft's config",
    lines=1,
)
def cache_implementation_of_a_draft() -> None:
    """`cache_implementation` works with an assistant"""
    options = {"cache_implementation": "dynamic", "eos_token_id": None}
    llama().generate(prompt(), assistant_model=llama(), max_new_tokens=20, **options)


@defect(
    ValueError,
    "tokenizer",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator.__init__: the draft's config keeps `token_healing`",
    mend="set it to False in the draft's config",
    lines=1,
)
def healing_with_an_assistant() -> None:
    """`token_healing` heals a prompt once, not in the assistant again"""
    words, model = byte_tokenizer(), llama(vocab_size=259)
    ids = words("xy", return_tensors="pt").input_ids
    options = {"token_healing": True, "tokenizer": words, "max_new_tokens": 4}
    model.generate(ids, assistant_model=llama(vocab_size=259), **options)


@defect(
    AssertionError,
    "the same number of forwards",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator.__init__: reads `num_assistant_tokens` from the assistant's config alone",
    mend="take the call's value, if it has one",
    lines=3,
)
def number_of_assistant_tokens() -> None:
    """`num_assistant_tokens` of the call counts"""
    found = []
    for n in (1, 20):
        model, calls = llama(), []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        options = {"num_assistant_tokens": n, "num_assistant_tokens_schedule": "constant"}
        model.generate(prompt(), assistant_model=llama(), max_new_tokens=20, **options)
        found.append(len(calls))
    assert found[0] > found[1], "the same number of forwards"


@defect(
    IndexError,
    "",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator.__init__: encodes `inputs_tensor`, which is -100 where only `encoder_outputs` came",
    mend="raise ValueError, or encode what the caller passed",
    lines=3,
)
def encoder_outputs_with_an_assistant() -> None:
    """`encoder_outputs` alone work with an assistant that has an encoder, or are refused by name"""
    model = bart()
    encoded = model.get_encoder()(prompt(), return_dict=True)
    with suppress(ValueError):
        model.generate(encoder_outputs=encoded, assistant_model=bart(), max_new_tokens=5)


@defect(
    AssertionError,
    "forwards more",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator._prepare_generation_args: an assistant with an encoder gets all ids beside its cache, and no mask by which `_prefill` would cut them",
    mend="pass only the ids that its cache does not hold",
    lines=4,
)
def rounds_of_an_encoder_decoder() -> None:
    """An encoder-decoder assistant forwards only new tokens after its first round"""
    assistant, lengths = bart(), []
    decoder = assistant.get_decoder()
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assistant.generation_config.update(num_assistant_tokens=2)
    bart().generate(prompt(), assistant_model=assistant, max_new_tokens=16)
    assert max(lengths) <= 3, "forwards more"


@defect(
    AssertionError,
    "other tokens",
    cause="generation/utils.py, _assisted_decoding: the first forward has the whole prompt, whatever the cache holds",
    mend="cut `next_sequence_length` by `get_seq_length()` in the first round, as `_prefill` does",
    lines=4,
)
def cache_of_the_caller() -> None:
    """Prompt lookup continues a cache"""
    model, ids = llama(), prompt().repeat(1, 2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=8, **LOOKUP)
    assert torch.equal(out, model.generate(ids, max_new_tokens=8)), "other tokens"


@defect(
    RuntimeError,
    "tensor of 0 elements",
    cause="generation/candidate_generator.py, AssistedCandidateGenerator.get_candidates: the assistant gets ids, which are empty beside `inputs_embeds`",
    mend="raise ValueError, or forward the prompt without drafts and show the assistant generated tokens only",
    lines=5,
)
def embeddings_with_drafts() -> None:
    """`inputs_embeds` work with an assistant"""
    model, options = llama(), {"max_new_tokens": 8, "eos_token_id": None}
    embeds = model.get_input_embeddings()(prompt()).detach()
    call = {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 7).long(), **options}
    out = model.generate(**call, assistant_model=llama())
    assert torch.equal(out, model.generate(**call)), "other tokens"


@defect(
    AssertionError,
    "behind the end",
    cause="generation/utils.py, _assisted_decoding: criteria are asked once per round, so a token amid accepted drafts does not end the text",
    mend="ask the criteria for each accepted token, and cut `valid_tokens` there",
    lines=5,
)
def criteria_amid_drafts() -> None:
    """A stopping criterion holds for each token of a round"""

    def at_length(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 7 + 11)

    model = llama()
    options = {"max_new_tokens": 30, "eos_token_id": None, "stopping_criteria": [at_length]}
    out = model.generate(prompt(), assistant_model=llama(), **options)
    assert out.shape[1] == 7 + 11, "behind the end"


@defect(
    RecursionError,
    "does not end",
    cause="generation/candidate_generator.py, PromptLookupCandidateGenerator, and generation/utils.py, _assisted_decoding: a budget below zero cuts accepted tokens from their end",
    mend="`stopping_criteria.max_length` as the length of the call",
    lines=3,
)
def longer_criterion_with_lookup() -> None:
    """Prompt lookup decodes to a `MaxLengthCriteria` above `max_length`"""
    calls = []

    def count(ids: Any, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 200:
            raise RecursionError("does not end")
        return scores

    options = {"stopping_criteria": [MaxLengthCriteria(7 + 12)], "logits_processor": [count]}
    llama().generate(prompt(), max_new_tokens=4, **options, **LOOKUP)


@defect(
    AssertionError,
    "saw rejected tokens",
    cause="generation/utils.py, _assisted_decoding: processors are called with drafted tokens before these are verified (PromptLookupCandidateGenerator calls them, too)",
    mend="choose token by token, and stop at the first that is rejected",
    lines=8,
)
def processors_with_a_state() -> None:
    """Logits processors see each accepted prefix, and no rejected token"""
    seen: list[list[int]] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    ids = prompt().repeat(1, 2)
    out = llama().generate(ids, logits_processor=[note], max_new_tokens=8, **LOOKUP)[0].tolist()
    assert all(out[: len(each)] == each for each in seen), "saw rejected tokens"


@defect(
    AssertionError,
    "of other positions",
    cause="generation/utils.py, _split_model_outputs: in the first round, states of drafted tokens are cut from the prompt's first columns",
    mend="cut them from column `cur_len` on in the first round",
    lines=3,
)
def hidden_states_of_drafts() -> None:
    """Hidden states of tokens that round 1 has drafted are those of the tokens"""
    model = llama()
    options = {"max_new_tokens": 8, "eos_token_id": None}
    call = options | {"return_dict_in_generate": True, "output_hidden_states": True}
    drafted = model.generate(prompt(), assistant_model=llama(), **call).hidden_states
    plain = model.generate(prompt(), **call).hidden_states
    pairs = zip(drafted[1:7], plain[1:7], strict=True)
    assert all(torch.allclose(a[-1], b[-1], atol=1e-4) for a, b in pairs), "of other positions"


@defect(
    AssertionError,
    "other tokens",
    cause="generation/utils.py, _assisted_decoding: eager attention of a row that is all padding takes the mean over all keys, those of drafts among them",
    mend="forward such a prompt without drafts",
    lines=4,
)
def a_prompt_of_padding() -> None:
    """An assistant does not change the tokens behind a prompt that is all padding"""
    model, ids = llama(), torch.tensor([[36, 13, 12]])
    model.set_attn_implementation("eager")
    call = {"attention_mask": torch.zeros_like(ids), "max_new_tokens": 5, "do_sample": False}
    out = model.generate(ids, assistant_model=llama(), **call)
    assert torch.equal(out, model.generate(ids, **call)), "other tokens"


@defect(
    AssertionError,
    "other tokens",
    cause="generation/utils.py, _assisted_decoding: `crop(-n)` takes back the last keys, whether or not a hook has dropped keys of drafts",
    mend="forward the prompt without drafts, and raise if the cache has not grown by what was fed",
    lines=6,
)
def keys_that_a_hook_drops() -> None:
    """A hook that drops keys of the prompt does not change the tokens of drafting, or is refused"""

    def drop(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer, n_fed = kwargs[ALL_CACHE_NAMES[0]].layers[module.layer_idx], output[0].shape[1]
        if layer.keys.shape[-2] == n_fed:
            layer.keys, layer.values = (x[:, :, n_fed // 2 :] for x in (layer.keys, layer.values))

    model, ids = llama(), prompt(1, 24)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop, with_kwargs=True)
    options = {"max_new_tokens": 12, "eos_token_id": None}
    with suppress(ValueError):
        out = model.generate(ids, assistant_model=llama(), **options)
        assert torch.equal(out, model.generate(ids, **options)), "other tokens"
