"""Defects of ``generate`` without drafts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StaticCache,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .models import Streamer, bart, byte_tokenizer, gpt2, llama, prompt, t5
from .table import defect


@defect(
    AssertionError,
    "padded with EOS",
    cause="generation/utils.py, _beam_search: `pad_token_id or eos_token_id[0]` takes a pad id of 0 for none",
    mend="`pad_token_id if pad_token_id is not None else eos_token_id[0]`",
    lines=1,
)
def pad_token_of_zero() -> None:
    """Beam search pads finished beams with `pad_token_id=0`"""
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -2.0}
    out = llama().generate(prompt(16), max_new_tokens=14, **options)[:, 7:]
    is_behind = (out == 2).cumsum(dim=1) - (out == 2).long() > 0
    assert is_behind.any(), "no beam ended early"
    assert (out[is_behind] == 0).all(), "padded with EOS"


@defect(
    AssertionError,
    "other tokens",
    cause="modeling_layers.py, GradientCheckpointingLayer: drops the cache of a forward that has the newest token alone",
    mend="generation/utils.py, generate: `use_cache = False` if the model trains with checkpointed activations",
    lines=2,
)
def training_mode_with_checkpointed_activations() -> None:
    """A model in training mode that checkpoints activations generates the tokens of its evaluation mode"""
    model = llama()
    expected = model.generate(prompt(), max_new_tokens=6)
    model.train().gradient_checkpointing_enable()
    assert model.generate(prompt(), max_new_tokens=6).equal(expected), "other tokens"


@defect(
    RuntimeError,
    "Could not infer dtype of NoneType",
    cause="generation/utils.py, _get_logits_processor: ExponentialDecayLengthPenalty gets None as `eos_token_id`",
    mend="raise ValueError there if no EOS token is set",
    lines=3,
)
def exponential_decay_without_eos() -> None:
    """`exponential_decay_length_penalty` without an EOS token raises an error that says so"""
    penalty = {"exponential_decay_length_penalty": (2, 1.1), "eos_token_id": None}
    with suppress(ValueError):
        llama().generate(prompt(), max_new_tokens=3, **penalty)


@defect(
    AssertionError,
    "has 6 rows",
    cause="generation/utils.py, _expand_inputs_for_generation: writes to the caller's `encoder_outputs`",
    mend="expand `copy.copy(encoder_outputs)`",
    lines=1,
)
def encoder_outputs_of_the_caller() -> None:
    """Beams leave the `encoder_outputs` that the caller passed as they are"""
    model = bart()
    encoded = model.get_encoder()(prompt(2), return_dict=True)
    model.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=3)
    rows = len(encoded.last_hidden_state)
    assert rows == 2, f"has {rows} rows"


@defect(
    AssertionError,
    "dropped",
    cause="generation/utils.py, _extract_generation_mode_kwargs: with a callable, only names that `_sample` lacks are passed",
    mend="also pass those of the collected arguments that the callable's signature names",
    lines=2,
)
def streamer_of_a_callable() -> None:
    """`custom_generate=<callable>` gets the streamer that its signature names"""

    def decode(model: Any, input_ids: Any, streamer: Any = None, **kwargs: Any) -> Any:
        return streamer

    assert llama().generate(prompt(), custom_generate=decode, streamer=Streamer()), "dropped"


@defect(
    AssertionError,
    "never ended",
    cause="generation/utils.py, generate: no decoding method ends the streamer if it raises",
    mend="`except BaseException: streamer.end(); raise` around the decoding method",
    lines=5,
)
def streamer_after_an_exception() -> None:
    """An exception ends the streamer, so that its consumer does not wait"""

    def fail(ids: Any, scores: Any) -> Any:
        raise KeyboardInterrupt

    streamer = Streamer()
    with suppress(KeyboardInterrupt):
        llama().generate(prompt(), streamer=streamer, logits_processor=[fail])
    assert streamer.ends == 1, "never ended"


@defect(
    AssertionError,
    "never ended",
    cause="generation/utils.py, _validate_generation_mode: refuses a streamer for beam search, not for beam sampling",
    mend="refuse it for `num_beams > 1`",
    lines=1,
)
def streamer_of_beam_sampling() -> None:
    """Beam sampling refuses a streamer as beam search does, or ends it"""
    streamer = Streamer()
    options = {"num_beams": 2, "do_sample": True, "max_new_tokens": 4}
    with suppress(ValueError):
        llama().generate(prompt(), streamer=streamer, **options)
        assert streamer.ends == 1, "never ended"


@defect(
    AssertionError,
    "wrong scores",
    cause="generation/utils.py, compute_transition_scores: rows are `config.vocab_size` apart, not as wide as the scores",
    mend="use `scores[0].shape[-1]`",
    lines=2,
)
def transition_scores_of_wide_logits() -> None:
    """`compute_transition_scores` takes logits that are wider than the vocabulary"""
    model, ids = llama(vocab_size=3), torch.tensor([[5, 3, 0], [6, 1, 3]])
    scores = (torch.arange(8.0).view(2, 4), torch.arange(8.0, 16.0).view(2, 4))
    found = model.compute_transition_scores(ids, scores).tolist()
    assert found == [[3.0, 8.0], [5.0, 15.0]], "wrong scores"


@defect(
    IndexError,
    "index",
    cause="generation/utils.py, _beam_search: buffers have `generation_config.max_length` columns",
    mend="`stopping_criteria.max_length`, if it has one that is larger",
    lines=2,
)
def longer_criterion_with_beams() -> None:
    """Beam search decodes to a `MaxLengthCriteria` above `max_length`, as sampling does"""
    options = {"max_new_tokens": 4, "eos_token_id": None}
    criteria = [MaxLengthCriteria(7 + 9)]
    out = llama().generate(prompt(), num_beams=2, stopping_criteria=criteria, **options)
    assert out.shape[1] == 7 + 9


@defect(
    TypeError,
    "tokenizer",
    cause="generation/utils.py, generate: the tokenizer is among the arguments of `_sample`, which forwards what it does not know",
    mend="drop it once the criteria are made, unless the method names it",
    lines=2,
)
def stop_strings_and_a_strict_forward() -> None:
    """`stop_strings` work with a forward that takes no other kwargs"""

    class Strict(LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, return_dict=None, cache=None):  # type: ignore  # fmt: skip
            arguments = (input_ids, attention_mask, position_ids, past_key_values or cache)
            return super().forward(*arguments, use_cache=use_cache)

    model = llama(Strict, vocab_size=259)
    model.generate(prompt(), stop_strings="x", tokenizer=byte_tokenizer(), max_new_tokens=3)


@defect(
    AssertionError,
    "stopped by the prompt",
    cause="generation/stopping_criteria.py, StopStringCriteria.__call__: looks at the prompt, too",
    mend="cut `input_ids` at the prompt's length, which generate() knows",
    lines=4,
)
def stop_strings_that_begin_in_the_prompt() -> None:
    """`stop_strings` are looked for in generated text"""
    words, model = byte_tokenizer(), llama(vocab_size=259)
    ids = words("axx", return_tensors="pt").input_ids
    bias = {"sequence_bias": {(int(ids[0, -1]),): 1e4}}
    out = model.generate(ids, stop_strings="xxx", tokenizer=words, max_new_tokens=5, **bias)
    assert out.shape[1] == 3 + 3, "stopped by the prompt"


@defect(
    RuntimeError,
    "",
    cause="generation/utils.py, generate: `past_key_values` is not expanded with the inputs",
    mend="`past_key_values.batch_repeat_interleave(expand_size)` on a copy in _expand_inputs_for_generation",
    lines=3,
)
def cache_with_several_sequences() -> None:
    """A cache that the caller passes is expanded for beams and `num_return_sequences`"""
    model, ids = llama(), prompt(2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    out = model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=4)
    assert torch.equal(out, model.generate(ids, num_beams=3, max_new_tokens=4))


@defect(
    Exception,
    "",
    cause="cache_utils.py, StaticLayer.reset: keeps its tensors, which have the rows of the last batch",
    mend="set `is_initialized = False`, or allocate again if the rows differ",
    lines=3,
)
def emptied_static_cache() -> None:
    """A static cache takes a smaller batch after `reset()`"""
    model, ids = llama(), prompt(3)
    cache = StaticCache(config=model.config, max_cache_len=32)
    model.generate(ids, past_key_values=cache, max_new_tokens=4)
    cache.reset()
    model.generate(ids[:2], past_key_values=cache, max_new_tokens=4)


@defect(
    Exception,
    "",
    cause="generation/utils.py, _prefill: splits `input_ids` into chunks, which are empty beside `inputs_embeds`",
    mend="split the embeddings if there are any",
    lines=6,
)
def embeddings_in_chunks() -> None:
    """`inputs_embeds` can be prefilled in chunks"""
    model, mask = llama(), torch.ones(1, 7).long()
    embeds = model.get_input_embeddings()(prompt()).detach()
    call = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": 5}
    chunked = model.generate(**call, prefill_chunk_size=3)
    assert torch.equal(chunked, model.generate(**call))


@defect(
    AssertionError,
    "padding counts as text",
    cause="generation/logits_process.py, NoRepeatNGramLogitsProcessor.__call__: does not know the mask",
    mend="let generate() pass the prompt's mask, as it does to RepetitionPenaltyLogitsProcessor",
    lines=10,
)
def ngrams_of_padding() -> None:
    """`no_repeat_ngram_size` does not count padding as text (here, pad and EOS are one token)"""
    options = {"no_repeat_ngram_size": 1, "sequence_bias": {(2,): 1e4}, "pad_token_id": 2}
    ids, mask = prompt(), torch.tensor([[0, 0, *[1] * 7]])
    padded = torch.cat([torch.tensor([[2, 2]]), ids], dim=1)
    alone = llama().generate(ids, max_new_tokens=4, **options)
    out = llama().generate(padded, attention_mask=mask, max_new_tokens=4, **options)
    assert out[0, 9:].tolist() == alone[0, 7:].tolist(), "padding counts as text"


@defect(
    RuntimeError,
    "must match the size",
    cause="generation/utils.py, _prefill: cuts `attention_mask` to the chunk, which is the encoder's in an encoder-decoder",
    mend="cut `decoder_attention_mask` there",
    lines=4,
)
def chunks_of_an_encoder_decoder() -> None:
    """`prefill_chunk_size` works on encoder-decoders with padded inputs"""
    mask = torch.tensor([[0, 0, *[1] * 5], [1] * 7])
    call = {"attention_mask": mask, "decoder_input_ids": prompt(2, 5), "max_new_tokens": 4}
    chunked = bart().generate(prompt(2), prefill_chunk_size=2, **call)
    assert torch.equal(chunked, bart().generate(prompt(2), **call))


@defect(
    ValueError,
    "input_ids or inputs_embeds",
    cause="generation/logits_process.py, UnbatchedClassifierFreeGuidanceLogitsProcessor: passes the decoder's ids to the encoder",
    mend="encode the negative prompt once, and pass ids as `decoder_input_ids`",
    lines=12,
)
def guidance_of_an_encoder_decoder() -> None:
    """`guidance_scale` works on encoder-decoders"""
    options = {"guidance_scale": 2.0, "negative_prompt_ids": prompt(1, 5)}
    t5().generate(prompt(), max_new_tokens=5, **options)


@defect(
    RuntimeError,
    "",
    cause="generation/logits_process.py, UnbatchedClassifierFreeGuidanceLogitsProcessor: one row per prompt, and its cache does not follow the beams",
    mend="expand `negative_prompt_ids` with the inputs, and reorder the cache with the beams",
    lines=15,
)
def guidance_of_beams() -> None:
    """`guidance_scale` with `negative_prompt_ids` works with beams"""
    options = {"guidance_scale": 2.0, "negative_prompt_ids": prompt(2, 5)}
    llama().generate(prompt(2), num_beams=2, max_new_tokens=5, **options)


@defect(
    AssertionError,
    "other tokens",
    cause="generation/utils.py, generate: heals ids after mask and positions were made, which keep the old length",
    mend="heal right after _prepare_model_inputs",
    lines=4,
)
def healing_that_shortens_the_prompt() -> None:
    """`token_healing` that drops spaces gives the tokens of the prompt without them"""
    words, model = byte_tokenizer(), gpt2(vocab_size=259)
    options = {"token_healing": True, "tokenizer": words, "max_new_tokens": 8}
    ids = words("xy", return_tensors="pt").input_ids
    spaced = words("xy   ", return_tensors="pt").input_ids
    out = model.generate(spaced, **options)
    assert torch.equal(out, model.generate(ids, **options)), "other tokens"


@defect(
    AssertionError,
    "was written to",
    cause="generation/continuous_batching: writes -1 into a config that has no `eos_token_id`",
    mend="keep None, or copy the config",
    lines=1,
)
def config_of_a_batch_job() -> None:
    """`generate_batch` leaves the caller's config as it is"""
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32)
    model = llama()
    model.generate_batch([[5, 6]], generation_config=config, continuous_batching_config=batching)
    assert config.eos_token_id is None, "was written to"


@defect(
    AssertionError,
    "padding is text",
    cause='generation/utils.py, generate: `cache_implementation="paged"` passes ids without their mask',
    mend="drop masked ids before `inputs.tolist()`",
    lines=2,
)
def padding_of_paged() -> None:
    """`cache_implementation="paged"` does not read padding as text"""
    ids, mask = prompt(), torch.tensor([[0, 0, *[1] * 5]])
    ids[0, :2] = 0
    options = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 4}
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32)
    paged = {"cache_implementation": "paged", "continuous_batching_config": batching}
    out = llama().generate(ids, attention_mask=mask, **options, **paged)
    alone = llama().generate(ids[:, 2:], **options)
    assert out[0, 0, -4:].tolist() == alone[0, -4:].tolist(), "padding is text"
