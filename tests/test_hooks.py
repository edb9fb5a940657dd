"""The hooks: called as upstream calls them, and overridden as model classes override them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StoppingCriteria, SuppressTokensLogitsProcessor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import ModelOutput

import hfgen
from hfgen.families import CACHE
from hfgen.memory.caches.dynamic import GrowingCache
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.versions import IS_5_23

FAMILIES = {family.name: family for family in (*DECODER_FAMILIES, *ENCODER_FAMILIES)}

#: Hooks that model classes of transformers override.
OVERRIDDEN = (
    "prepare_inputs_for_generation",
    "generate",
    "_prepare_position_ids_for_generation",
    "create_masks_for_generate",
    "_update_model_kwargs_for_generation",
    "_prepare_generation_config",
    "_prepare_model_inputs",
    "_prepare_cache_for_generation",
    "_expand_multimodal_outputs",
    "_get_logits_processor",
    "_sample",
    "_prepare_generated_length",
    "_get_stopping_criteria",
    "_prepare_decoder_input_ids_for_generation",
    "_prepare_static_cache",
    "_maybe_prepare_encoder_kwargs_for_generation",
    "_maybe_initialize_input_ids_for_generation",
    "_reorder_cache",
    "_prefill",
    "_has_unfinished_sequences",
    "_expand_inputs_for_generation",
    "_prepare_attention_mask_for_generation",
    "_prepare_multimodal_encoder_kwargs_for_generation",
)
#: Hooks that the code of model classes calls, though none overrides them.
CALLED = (
    "_validate_model_kwargs",
    "_prepare_special_tokens",
    "_valid_auto_compile_criteria",
    "_validate_generation_mode",
    "_validate_generated_length",
    "_extract_generation_mode_kwargs",
    "_optimize_model_for_decode",
    "_prepare_text_encoder_decoder_kwargs_for_generation",
    "_get_static_cache_init_shape",
    "_supports_logits_to_keep",
    "heal_tokens",
)
#: The methods that decode; ``_sample`` is in the first table.
DECODING = ("_beam_search", "_assisted_decoding")
HOOKS = OVERRIDDEN + CALLED + DECODING

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beam": {"num_beams": 2},
    "beam sample": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


# ---------------------------------------------------------------- models and outcomes


@functools.cache
def _built(family: str) -> nn.Module:
    return FAMILIES[family].build()


def upstream(family: str) -> Any:
    return copy.deepcopy(_built(family))


def ours(family: str) -> Any:
    return hfgen.mix_into(upstream(family))


def prompt(family: str, rows: int = 1, padded: bool = False) -> dict[str, Any]:
    return FAMILIES[family].inputs(_built(family), rows, padded, 0)


def outcome(model: Any, **kwargs: Any) -> Any:
    """What ``generate`` returns, or the exception that it raises."""
    torch.manual_seed(0)
    try:
        return model.generate(**copy.deepcopy({"max_new_tokens": 6} | kwargs))
    except Exception as error:
        return error


def is_same(a: Any, b: Any) -> bool:
    """Whether two outcomes are equal, floats up to rounding errors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    if isinstance(a, Cache) and isinstance(b, Cache):
        if _kind(a) is not _kind(b):
            return False
        shapes = [[layer.keys.shape for layer in getattr(c, "layers", ())] for c in (a, b)]
        return shapes[0] == shapes[1] and bool(a.get_seq_length() == b.get_seq_length())
    if type(a) is not type(b):
        return False
    if isinstance(a, Exception):
        return str(a) == str(b)
    if isinstance(a, ModelOutput):
        return is_same(dict(a), dict(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _kind(cache: Cache) -> type:
    """The cache's class; upstream's for the one that hfgen has in its place."""
    return DynamicCache if type(cache) is GrowingCache else type(cache)


# ---------------------------------------------------------------- traces


def record(model: Any, calls: list[tuple], role: str = "") -> None:
    """Note each call of a hook in ``calls``: name, positional arguments, names of the others."""
    cls = type(model)

    def recording(name: str) -> Any:
        hook = getattr(cls, name)

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((role + name, len(args), sorted(kwargs)))
            return hook(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
        return staticmethod(call) if is_static else call

    namespace = {name: recording(name) for name in HOOKS if hasattr(cls, name)}
    model.__class__ = type(cls)(cls.__name__, (cls,), namespace)


def trace(model: Any, assistant: Any = None, **kwargs: Any) -> list[tuple]:
    calls: list[tuple] = []
    record(model, calls)
    if assistant is not None:
        record(assistant, calls, "assistant's ")
        kwargs["assistant_model"] = assistant
    torch.manual_seed(0)
    model.generate(**{"max_new_tokens": 6} | kwargs)
    return calls


def assert_same_trace(family: str, rows: int = 1, **kwargs: Any) -> list[tuple]:
    given = prompt(family, rows) | kwargs
    theirs = trace(upstream(family), **copy.deepcopy(given))
    mine = trace(ours(family), **copy.deepcopy(given))
    assert mine == theirs
    assert mine[0][0] == "generate"
    return mine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bart_seq2seq", "llava", "qwen2_vl"])
def test_trace_of_each_mode(family: str, mode: str) -> None:
    rows = 1 if mode == "prompt lookup" else 2
    assert_same_trace(family, rows, **MODES[mode])


@pytest.mark.parametrize("family", ["llama", "bart_seq2seq"])
def test_trace_with_an_assistant(family: str) -> None:
    """The target's hooks are called as upstream calls them; the assistant is prepared only once."""
    given = prompt(family) | {"num_assistant_tokens_schedule": "constant"}
    theirs = trace(upstream(family), upstream(family), **given)
    mine = trace(ours(family), ours(family), **given)
    assert targets(mine) == targets(theirs)
    assistants = [name for name, *_ in mine if name.startswith("assistant's ")]
    assert assistants.count("assistant's _prepare_cache_for_generation") == 1
    assert "assistant's _sample" not in assistants


def targets(calls: list[tuple]) -> list[tuple]:
    return [call for call in calls if not call[0].startswith("assistant's ")]


ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "all outputs": ("llama", ALL_OUTPUTS),
    "all outputs, beams": ("bart_seq2seq", ALL_OUTPUTS | {"num_beams": 2}),
    "no cache": ("llama", {"use_cache": False}),
    "no cache, encoder-decoder": ("t5", {"use_cache": False}),
    "no cache, images": ("qwen2_vl", {"use_cache": False}),
    "static cache": ("llama", {"cache_implementation": "static"}),
    "static cache, own masks": ("gemma3_text", {"cache_implementation": "static"}),
    "static cache, encoder-decoder": ("bart_seq2seq", {"cache_implementation": "static"}),
    "prefill in chunks": ("llama", {"prefill_chunk_size": 3}),
    "prefill in chunks, static cache": (
        "llama",
        {"prefill_chunk_size": 3, "cache_implementation": "static"},
    ),
    "no synchronisation": ("llama", {"synced_gpus": False}),
    "several sequences": ("llama", {"num_return_sequences": 2, "do_sample": True}),
    "several beams": ("t5", {"num_return_sequences": 2, "num_beams": 3}),
    "guidance": ("llama", {"guidance_scale": 1.5}),
    "maximum length": ("llama", {"max_new_tokens": None, "max_length": 14}),
    "early end": ("llama", {"eos_token_id": list(range(5, 60)), "min_new_tokens": 2}),
    "cache under another name": ("mamba", {}),
    "images, several sequences": ("qwen2_vl", {"num_return_sequences": 2, "do_sample": True}),
}


#: Before 5.23 the chunks of a prefill were not told that they are the first iteration.
CHUNKED = [option for option in OPTIONS if option.startswith("prefill in chunks")]


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if IS_5_23 or option not in CHUNKED]
)
def test_trace_of_each_option(option: str) -> None:
    family, kwargs = OPTIONS[option]
    assert_same_trace(family, rows=2, **kwargs)


def test_trace_with_padding() -> None:
    given = prompt("gpt2", rows=2, padded=True)
    assert trace(ours("gpt2"), **given) == trace(upstream("gpt2"), **given)


def test_trace_without_a_prompt() -> None:
    mine = trace(ours("gpt2"), bos_token_id=1)
    assert mine == trace(upstream("gpt2"), bos_token_id=1)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_trace_of_embeddings(num_beams: int) -> None:
    ids = prompt("llama", rows=2)["input_ids"]
    given = {
        "inputs_embeds": _built("llama").get_input_embeddings()(ids).detach(),
        "num_beams": num_beams,
    }
    assert trace(ours("llama"), **given) == trace(upstream("llama"), **given)


@pytest.mark.parametrize("only_new", [False, True])
def test_trace_of_a_continuation(only_new: bool) -> None:
    def continued(model: Any) -> list[tuple]:
        ids = prompt("llama")["input_ids"]
        output = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
        ids = output.sequences
        cache = output.past_key_values
        mask = torch.ones_like(ids)
        if only_new:
            ids = ids[:, cache.get_seq_length() :]
        return trace(model, input_ids=ids, attention_mask=mask, past_key_values=cache)

    assert continued(ours("llama")) == continued(upstream("llama"))


def test_trace_of_a_patched_model() -> None:
    given = prompt("t5")
    with hfgen.patched():
        mine = trace(upstream("t5"), **given)
    assert mine == trace(upstream("t5"), **given)


# ---------------------------------------------------------------- overrides

Change = Callable[..., Any]
#: Per hook: the family and the arguments with which its override shows, and the override. It gets
#: the base class's method, bound to the model, and the arguments; ``None`` where no base has one.
OVERRIDES: dict[str, tuple[str, dict[str, Any], Change]] = {}


def overrides(name: str, family: str = "llama", **kwargs: Any) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        OVERRIDES[name] = (family, kwargs, change)
        return change

    return register


class Refused(Exception):
    """Raised by overrides of hooks whose result does not show."""


@overrides("prepare_inputs_for_generation")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = base(*args, **kwargs)
    return inputs | {"input_ids": (inputs["input_ids"] + 1) % 90}


@overrides("generate")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    return base(*args, **kwargs | {"max_new_tokens": 3})


@overrides("_prepare_position_ids_for_generation", "gpt2")
def _(base: Any, inputs_tensor: Any, model_kwargs: Any) -> Any:
    return base(inputs_tensor, model_kwargs) + 3


@overrides("create_masks_for_generate", cache_implementation="static")
def _(base: None, **kwargs: Any) -> Any:
    mask = create_masks_for_generate(**kwargs)
    mask[..., 1] = torch.finfo(mask.dtype).min
    return mask


@overrides("_update_model_kwargs_for_generation", "gpt2", rows=2, padded=True)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    model_kwargs = base(*args, **kwargs)
    model_kwargs["position_ids"] = model_kwargs["position_ids"] + 2
    model_kwargs["attention_mask"] = model_kwargs["attention_mask"].clone()
    model_kwargs["attention_mask"][:, 3] = 0
    return model_kwargs


@overrides("_prepare_generation_config")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    config, model_kwargs = base(*args, **kwargs)
    config.max_new_tokens = 2
    return config, model_kwargs


@overrides("_prepare_model_inputs")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    tensor, name, model_kwargs = base(*args, **kwargs)
    return tensor.flip(1), name, model_kwargs


class OtherCache(DynamicCache):
    """Told apart by its type."""


@overrides("_prepare_cache_for_generation", return_dict_in_generate=True)
def _(base: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> None:
    base(generation_config, model_kwargs, *args)
    model_kwargs[CACHE] = OtherCache(config=base.__self__.config)


@overrides("_expand_multimodal_outputs", "qwen2_vl", num_beams=2)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    encoded = base(*args, **kwargs)
    encoded["image"].pooler_output = [-features for features in encoded["image"].pooler_output]
    return encoded


@overrides("_get_logits_processor")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    processors = base(*args, **kwargs)
    processors.append(SuppressTokensLogitsProcessor(list(range(5, 80))))
    return processors


class AtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@overrides("_get_stopping_criteria")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    criteria = base(*args, **kwargs)
    criteria.append(AtLength(10))
    return criteria


@overrides("_sample", return_dict_in_generate=True, output_scores=True)
def _(base: Any, input_ids: Any, generation_config: Any, **kwargs: Any) -> Any:
    generation_config.do_sample = True
    output = base(input_ids, generation_config=generation_config, **kwargs)
    output.sequences = output.sequences[:, 2:]
    return output


@overrides("_prepare_generated_length")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    config = base(*args, **kwargs)
    config.max_length -= 2
    return config


@overrides("_prepare_decoder_input_ids_for_generation", "t5")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    ids, model_kwargs = base(*args, **kwargs)
    return torch.cat([ids, torch.full_like(ids, 7)], dim=1), model_kwargs


@overrides("_prepare_static_cache", cache_implementation="static", return_dict_in_generate=True)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    return base(*args, **kwargs | {"max_cache_len": 50})


@overrides("_maybe_prepare_encoder_kwargs_for_generation", "bart_seq2seq", num_beams=2)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    model_kwargs = base(*args, **kwargs)
    encoded = model_kwargs["encoder_outputs"]
    encoded.last_hidden_state = -encoded.last_hidden_state
    return model_kwargs


@overrides("_maybe_initialize_input_ids_for_generation")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    return base(*args, **kwargs) + 5


@overrides("_reorder_cache", num_beams=3, do_sample=True)
def _(base: None, past_key_values: Any, beam_idx: Any) -> Any:
    past_key_values.reorder_cache(beam_idx.flip(0))
    return past_key_values


@overrides("_prefill")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = base(*args, **kwargs)
    outputs.logits = outputs.logits.flip(-1)
    return outputs


@overrides("_has_unfinished_sequences", synced_gpus=True, return_dict_in_generate=True)
def _(base: Any, this_peer_finished: Any, synced_gpus: Any, device: Any) -> bool:
    # Two more rounds, as if other devices were still decoding: they only show in the cache.
    assert synced_gpus
    model = base.__self__
    model.rounds_after_end = getattr(model, "rounds_after_end", 0) + bool(this_peer_finished)
    return base(this_peer_finished, False, device) or model.rounds_after_end < 3


@overrides("_expand_inputs_for_generation", num_return_sequences=2, do_sample=True)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    ids, model_kwargs = base(*args, **kwargs)
    return ids.flip(1), model_kwargs


@overrides("_prepare_attention_mask_for_generation", "gpt2")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    mask = base(*args, **kwargs)
    mask[:, :2] = 0
    return mask


@overrides("_prepare_multimodal_encoder_kwargs_for_generation", "qwen2_vl", rows=2)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    model_kwargs = base(*args, **kwargs)
    encoded = model_kwargs["mm_encoder_outputs"]["image"]
    encoded.pooler_output = [-features for features in encoded.pooler_output]
    return model_kwargs


@overrides("_validate_model_kwargs", speed="high")
def _(base: Any, model_kwargs: Any) -> None:
    model_kwargs.pop("speed")  # of a copy: the forward gets it all the same
    base(model_kwargs)


@overrides("_prepare_special_tokens")
def _(base: Any, generation_config: Any, *args: Any, **kwargs: Any) -> None:
    base(generation_config, *args, **kwargs)
    generation_config._eos_token_tensor = torch.arange(5, 60)


@overrides("_valid_auto_compile_criteria")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    raise Refused(base(*args, **kwargs))


@overrides("_validate_generation_mode")
def _(base: Any, mode: Any, config: Any, mode_kwargs: Any) -> Any:
    base(mode, config, mode_kwargs)
    raise Refused(mode, sorted(mode_kwargs))


@overrides("_validate_generated_length")
def _(base: Any, config: Any, length: int, is_default: bool) -> Any:
    base(config, length, is_default)
    raise Refused(config.max_length, length, is_default)


@overrides("_extract_generation_mode_kwargs", tokenizer=None)
def _(base: Any, custom_generate: Any, kwargs: Any, *args: Any) -> Any:
    kwargs["max_new_tokens"] = 4
    return base(custom_generate, kwargs, *args)


@overrides("_optimize_model_for_decode")
def _(base: Any) -> Any:
    @contextmanager
    def context() -> Iterator[None]:
        with base():
            base.__self__.lm_head.weight.data = base.__self__.lm_head.weight.data.flip(0)
            yield

    return context()


@overrides("_prepare_text_encoder_decoder_kwargs_for_generation", "t5")
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    model_kwargs = base(*args, **kwargs)
    encoded = model_kwargs["encoder_outputs"]
    encoded.last_hidden_state = -encoded.last_hidden_state
    return model_kwargs


@overrides("_get_static_cache_init_shape", cache_implementation="static", prefill_chunk_size=3)
def _(base: Any) -> Any:
    raise Refused(base())


@overrides("_supports_logits_to_keep")
def _(base: Any) -> Any:
    raise Refused(base())


@overrides("heal_tokens", token_healing=True)
def _(base: Any, input_ids: Any, tokenizer: Any = None) -> Any:
    return input_ids.flip(1)  # the base would need a tokenizer


@overrides("_beam_search", num_beams=2)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    return base(*args, **kwargs).flip(1)


@overrides("_assisted_decoding", prompt_lookup_num_tokens=3)
def _(base: Any, *args: Any, **kwargs: Any) -> Any:
    return base(*args, **kwargs).flip(1)


def overriding(cls: Any, name: str, change: Change, calls: list[str]) -> Any:
    """A subclass of a model class, as a user writes it, that overrides the hook ``name``."""

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return change(getattr(super(subclass, self), name, None), *args, **kwargs)

    if hasattr(cls, name):
        functools.update_wrapper(override, getattr(cls, name))  # inputs_embeds is looked for in it
    subclass = type(cls)(cls.__name__, (cls,), {name: override})
    return subclass


def test_every_hook_has_an_override() -> None:
    assert sorted(OVERRIDES) == sorted(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_override(name: str) -> None:
    family, kwargs, change = OVERRIDES[name]
    kwargs = dict(kwargs)
    given = prompt(family, kwargs.pop("rows", 1), kwargs.pop("padded", False)) | kwargs
    model, theirs, mine = upstream(family), upstream(family), upstream(family)
    their_calls: list[str] = []
    my_calls: list[str] = []
    theirs.__class__ = overriding(type(model), name, change, their_calls)
    mine.__class__ = hfgen.mix_into(overriding(type(model), name, change, my_calls))
    expected, result = outcome(theirs, **given), outcome(mine, **given)
    assert isinstance(expected, Refused) or not isinstance(expected, Exception), expected
    assert is_same(result, expected), (result, expected)
    assert not is_same(expected, outcome(model, **given)), "the override does not show"
    assert my_calls == their_calls != []


@pytest.mark.parametrize("name", HOOKS)
def test_override_of_a_mixed_class(name: str) -> None:
    """A subclass of a mixed class, and a mixed subclass, are the same to their user."""
    family, kwargs, change = OVERRIDES[name]
    kwargs = dict(kwargs)
    given = prompt(family, kwargs.pop("rows", 1), kwargs.pop("padded", False)) | kwargs
    theirs, mine = upstream(family), ours(family)
    theirs.__class__ = overriding(type(theirs), name, change, [])
    mine.__class__ = overriding(type(mine), name, change, [])
    expected, result = outcome(theirs, **given), outcome(mine, **given)
    assert is_same(result, expected), (result, expected)


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_override_that_edits_in_place(name: str) -> None:
    """What is grown from one step to the next is grown from what the override left."""

    def edit(base: Any, *args: Any, **kwargs: Any) -> Any:
        model_kwargs = base(*args, **kwargs)
        model_kwargs[name][:, -1] += 2 if name == "position_ids" else -1
        return model_kwargs

    hook, given = "_update_model_kwargs_for_generation", prompt("gpt2", rows=2, padded=True)
    theirs, mine = upstream("gpt2"), ours("gpt2")
    theirs.__class__ = overriding(type(theirs), hook, edit, [])
    mine.__class__ = overriding(type(mine), hook, edit, [])
    expected = outcome(theirs, **given)
    assert not is_same(expected, outcome(upstream("gpt2"), **given))
    assert is_same(outcome(mine, **given), expected)


@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
def test_an_override_may_return_one_function(mode: str) -> None:
    """In place of a list, where upstream only calls it."""

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lambda ids, scores: scores.flip(-1)

    theirs, mine = upstream("llama"), ours("llama")
    for model in (theirs, mine):
        model.__class__ = type("Mine", (type(model),), {"_get_logits_processor": override})
    given = prompt("llama", rows=2) | MODES[mode]
    expected = outcome(theirs, **given)
    assert not isinstance(expected, Exception)
    assert is_same(outcome(mine, **given), expected)


def test_assisted_decoding_takes_its_arguments_by_position() -> None:
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = [*inspect.signature(transformers.GenerationMixin._assisted_decoding).parameters]
        named = [kwargs.pop(name, None) for name in names[1 + len(args) : -1]]
        return super(type(self), self)._assisted_decoding(*args, *named, **kwargs)

    given, outcomes = prompt("llama"), []
    for model in (upstream("llama"), ours("llama")):
        members = {"_assisted_decoding": assisted_decoding}
        model.__class__ = type("Mine", (type(model),), members)
        drafts = {"assistant_model": upstream("llama")}, {"prompt_lookup_num_tokens": 3}
        outcomes.append([outcome(model, **given, **drafting) for drafting in drafts])
    assert not any(isinstance(each, Exception) for each in outcomes[0]), outcomes[0]
    assert is_same(*outcomes)


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_override_gets_contiguous_ids(use_cache: bool) -> None:
    def flat(base: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return base(input_ids.view(-1).view_as(input_ids), *args, **kwargs)

    model = ours("llama")
    model.__class__ = overriding(type(model), "prepare_inputs_for_generation", flat, [])
    given = prompt("llama", rows=2) | {"use_cache": use_cache}
    assert is_same(outcome(model, **given), outcome(upstream("llama"), **given))


@pytest.mark.parametrize("name", ["seed", "stop", "record", "cancel", "prefix_cache", "logprobs"])
def test_a_forward_may_have_arguments_with_names_of_hfgens(name: str) -> None:
    seen: list[Any] = []

    def overriding_forward(cls: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs.pop(name))
            return cls.forward(self, *args, **kwargs)

        own = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        usual = inspect.signature(cls.forward).parameters.values()
        *named, rest = (p for p in usual)
        forward.__signature__ = inspect.Signature([*named, own, rest])  # type: ignore[attr-defined]
        return type("Mine", (cls,), {"forward": forward})

    outcomes = []
    for model in (upstream("llama"), ours("llama")):
        model.__class__ = overriding_forward(type(model))
        seen.clear()
        outcomes.append((outcome(model, **prompt("llama", rows=2), **{name: "x"}), [*seen]))
    (expected, passed), (result, mine) = outcomes
    assert is_same(result, expected)
    assert mine == passed == ["x"] * 6


@pytest.mark.parametrize("name", ["seed", "stop", "record", "cancel", "prefix_cache", "logprobs"])
def test_a_hook_may_have_arguments_with_names_of_hfgens(name: str) -> None:
    """Code of remote models names in ``prepare_inputs_for_generation`` what forward does not take."""
    seen: list[Any] = []

    def overriding_hook(cls: Any) -> Any:
        def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs.pop(name))
            return cls.prepare_inputs_for_generation(self, *args, **kwargs)

        own = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        *named, rest = inspect.signature(cls.prepare_inputs_for_generation).parameters.values()
        hook: Any = prepare_inputs_for_generation
        hook.__signature__ = inspect.Signature([*named, own, rest])
        return type("Mine", (cls,), {"prepare_inputs_for_generation": hook})

    outcomes = []
    for model in (upstream("llama"), ours("llama")):
        model.__class__ = overriding_hook(type(model))
        seen.clear()
        outcomes.append((outcome(model, **prompt("llama", rows=2), **{name: "x"}), [*seen]))
    (expected, passed), (result, mine) = outcomes
    assert is_same(result, expected)
    assert mine == passed == ["x"] * 6


def test_methods_have_their_names() -> None:
    """By which pickle finds them, and decorators put them back."""
    mixin = vars(hfgen.GenerationMixin)
    for name in HOOKS:
        if hasattr(transformers.GenerationMixin, name) and name in mixin:
            assert getattr(hfgen.GenerationMixin, name).__name__ == name


# ---------------------------------------------------------------- unbound calls


def calling_unbound(cls: Any, names: list[str]) -> Any:
    """A subclass that calls the base mixin's hooks by its name, past its other base classes."""

    def calling(name: str) -> Any:
        @functools.wraps(getattr(transformers.GenerationMixin, name))
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(transformers.GenerationMixin, name)(self, *args, **kwargs)

        return override

    return type(cls)(cls.__name__, (cls,), {name: calling(name) for name in names})


UNBOUND = [name for name in HOOKS if hasattr(transformers.GenerationMixin, name)]
#: A call that gets to the hook; one without arguments gets to most.
REACHED_BY = {
    name: OVERRIDES[name][:2]
    for name in UNBOUND
    if name not in ("heal_tokens", "_has_unfinished_sequences", "_validate_model_kwargs")
}


@pytest.mark.parametrize("name", [*REACHED_BY, "all of them"])
def test_unbound_call(name: str) -> None:
    family, kwargs = REACHED_BY.get(name, ("t5", {"num_beams": 2}))
    names = [name] if name in REACHED_BY else UNBOUND
    kwargs = dict(kwargs)
    given = prompt(family, kwargs.pop("rows", 1), kwargs.pop("padded", False)) | kwargs
    model, theirs, mine = upstream(family), upstream(family), upstream(family)
    subclass = calling_unbound(type(model), names)
    theirs.__class__ = subclass
    mine.__class__ = hfgen.mix_into(subclass)
    expected = outcome(theirs, **given)
    assert not isinstance(expected, Exception)
    assert is_same(outcome(mine, **given), expected)
    with hfgen.patched():
        assert is_same(outcome(theirs, **given), expected)


@pytest.mark.parametrize(
    "family", ["parakeet_tdt", "nemotron_asr_streaming", "kyutai_speech_to_text"]
)
def test_families_that_call_the_mixin_by_name(family: str) -> None:
    given = prompt(family, rows=2)
    expected = outcome(upstream(family), **given)
    assert not isinstance(expected, Exception), expected
    assert is_same(outcome(ours(family), **given), expected)
    with hfgen.patched():
        assert is_same(outcome(upstream(family), **given), expected)
