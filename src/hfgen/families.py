"""What hfgen asks of a model: the arguments that it takes, and what is specific to one family or version."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging import version
from torch import nn
from transformers import cache_utils
from transformers.distributed import tensor_parallel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.distributed.utils import _get_torch_distributed_world_size as world_size
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import TransformersKwargs

#: The name of exact attention in configs, and the keys of one of its blocks.
EXACT_ATTENTION, EXACT_KEYS = "hfgen_exact", 512

#: The name under which forwards take and return the KV cache: ``past_key_values`` before transformers 5.24.
CACHE: str = ALL_CACHE_NAMES[0]
IS_5_24 = CACHE == "cache"
IS_5_23 = version.parse(transformers.__version__) >= version.parse("5.23.0")
#: The cache's names in older code.
FORMER_NAMES = {"past_key_values", "cache_params"} if IS_5_24 else set()

#: Cache layers that hold nothing, since they read another layer's keys: since transformers 5.23.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))

#: Names of generation parameters, which a model's config may have in old checkpoints.
OF_GENERATION = {*transformers.GenerationConfig._get_default_generation_params()} - {"use_cache"}

_PARAMETERS: WeakKeyDictionary[Callable[..., Any], frozenset[str]] = WeakKeyDictionary()


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's or method's parameters, but for ``self``; looked up once."""
    owner = getattr(function, "__func__", function)  # methods are made anew at each access
    with suppress(KeyError, TypeError):  # TypeError: nothing that a dictionary can hold
        return _PARAMETERS[owner]
    names = frozenset(inspect.signature(function).parameters) - {"self"}
    with suppress(TypeError):
        _PARAMETERS[owner] = names
    return names


def decodes_by_itself(model: Any) -> bool:
    """Whether a wrapper of PEFT applies its adapter in its own ``generate``, of which the model within knows nothing.

    It puts virtual tokens before the prompt, computes a row's scalings or offset, or passes a task's number.
    """
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(model, "_adapters_disabled", False):
        return False
    of_call = config.is_prompt_learning or config.peft_type in ("POLY", "XLORA")
    return of_call or bool(getattr(config, "alora_invocation_tokens", None))


@functools.cache
def may_have_parameters(kind: Any) -> bool:
    """Whether the class of a model's config has attributes with names of generation parameters."""
    return not OF_GENERATION.isdisjoint({*dir(kind), *kind.attribute_map})


def accepted_names(model: Any) -> set[str]:
    """The keyword arguments that the model takes, through its forward or a hook."""
    known = set(parameters(model.prepare_inputs_for_generation))
    if known & {"kwargs", "model_kwargs"}:  # it passes on whatever forward takes
        known |= parameters(model.forward)
    if model.config.is_encoder_decoder:
        known.add("decoder_input_ids")
        owners = model, getattr(model, model.base_model_prefix, None)
        for part, prefix in (("encoder", ""), ("decoder", "decoder_")):
            found = (getattr(owner, part, None) for owner in owners)
            if (module := next((one for one in found if one is not None), None)) is not None:
                known |= {prefix + name for name in parameters(module.forward)}
    return known | TransformersKwargs.__optional_keys__ | {"debug_io", "mm_encoder_outputs"}


def modules_of(model: Any) -> Iterable[nn.Module]:
    """All modules of a model; none of a class that only generates, as Optimum's."""
    return model.modules() if isinstance(model, nn.Module) else ()


def transformers_model(model: Any) -> Any:
    """The model of transformers in ``model``, around which there may be adapters; else ``model``."""
    parts = (part for part in modules_of(model) if isinstance(part, transformers.PreTrainedModel))
    return next(parts, model)


def is_sharded(model: Any) -> bool:
    """Whether parameters live on several devices that have to forward in step (ZeRO-3, FSDP).

    transformers asks the model alone; its layers may be sharded, and the model around them whole.
    """
    if world_size() == 1:
        return False
    return is_deepspeed_zero3_enabled() or any(map(is_fsdp_managed_module, modules_of(model)))


def head_width(model: Any) -> int | None:
    """How many tokens the language modelling head scores; ``None`` if it has no weight that tells."""
    weight = None
    with suppress(AttributeError, NotImplementedError):  # of the model's own method
        weight = model.get_output_embeddings().weight
    if not isinstance(weight, torch.Tensor):  # torch's quantised layers have a method of this name
        return None
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # ZeRO-3 leaves it empty here


def n_scores(model: Any) -> int:
    """The width of the model's logits."""
    return head_width(model) or int(model.config.get_text_config().vocab_size)


def tensor_parallel_group(model: Any) -> Any:
    """The processes that compute each layer together; ``None`` without tensor parallelism."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh["tp"].get_group()


def heads_per_rank(plan: dict[str, str], heads: int | list[int], ranks: int) -> Any:
    """How many of a layer's ``heads`` each rank of tensor parallelism has; a list has one value per layer.

    ``None`` if they cannot be divided. transformers before 5.20 divides them whatever its ``plan`` says.
    """
    divided = getattr(tensor_parallel, "get_kv_heads_per_rank", None)
    if divided is not None:
        return divided(plan, heads, ranks)
    layers = [heads] if isinstance(heads, int) else heads
    if any(count % ranks for count in layers):
        return None
    return heads // ranks if isinstance(heads, int) else [count // ranks for count in layers]


def device_of(model: Any) -> torch.device:
    """The device that inputs belong on: ``model.device`` is "meta" if accelerate loads weights per forward."""
    if (device := torch.device(model.device)).type != "meta":  # each look at it takes a while
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    each = (one for hook in hooks for one in getattr(hook, "hooks", [hook]))
    devices = (getattr(hook, "execution_device", None) for hook in each)
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with all tensors in it on ``device``. transformers has this since 5.20."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((name, moved(item, device)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def cache_argument(model: Any) -> str:
    """The name under which forward takes the cache: before transformers 5.24, Mamba's is another one."""
    return CACHE if IS_5_24 or "mamba" not in type(model).__name__.lower() else "cache_params"


def given_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache in ``model_kwargs`` under any name, or ``None``."""
    caches = map(model_kwargs.get, ALL_CACHE_NAMES)
    return next((cache for cache in caches if cache is not None), None)


def rename_cache(kwargs: dict[str, Any], stacklevel: int) -> None:
    """Give the cache in ``kwargs`` its name of today, with a warning, if it has a former one."""
    for name in FORMER_NAMES & kwargs.keys():
        text = f"`{name}` is called `{CACHE}` since transformers 5.24: name the cache so."
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
        kwargs.setdefault(CACHE, kwargs.pop(name))


def drops_cache(module: Any) -> bool:
    """Whether it drops the cache in training mode: since transformers 5.24, few that checkpoint activations do."""
    may_drop = not IS_5_24 or type(module).__name__.endswith(("GPT2Model", "BlipTextEncoder"))
    return may_drop and getattr(module, "gradient_checkpointing", False)


def repeats_layers(config: Any) -> bool:
    """Whether a forward runs layers several times, and appends cache layers for the later times."""
    return any("loop" in name for name in vars(config))


def masks_filled_static_cache(model: Any) -> bool:
    """Whether the model masks as many keys as a static cache says are visible: compilable ones do.

    Others cut their masks, or attend to all keys (GPT-Neo, FSMT, LED, …). Bloom counts by its mask.
    """
    return getattr(model, "_can_compile_fullgraph", False) and model.config.model_type != "bloom"


def keeps_other_state(model: Any) -> bool:
    """Whether RecurrentGemma's modules or Voxtral's encoder keep states of rows, or GLM-Image its positions."""
    return model.config.model_type in ("glm_image", "recurrent_gemma", "voxtral_realtime")


def separates_texts(mask: Any) -> bool:
    """Whether a mask function of transformers, or one that it calls, separates the texts of a packed row."""
    if isinstance(mask, tuple):
        return any(map(separates_texts, mask))
    if getattr(mask, "__qualname__", "").startswith("packed_sequence_mask_function."):
        return True
    return any(separates_texts(c.cell_contents) for c in getattr(mask, "__closure__", None) or ())


def selects_keys(model: Any) -> bool:
    """Whether layers attend to the likeliest keys alone (DeepSeek's sparse attention).

    Many are equally unlikely: which of them are taken depends on how many there are, padding included.
    """
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "index_topk", None) is not None


def rows_of_states(model: Any) -> int:
    """The dimension of the rows in four-dimensional hidden states: after Gemma 3n's streams."""
    return 1 if model.config.model_type.startswith("gemma3n") else 0


def keeps_decoder_prompt(model: Any) -> bool:
    """Whether decoder ids get no start token: Whisper's and Donut's prompts start with other ones."""
    config, names = model.config, type(model).__name__
    if config.model_type == "vision-encoder-decoder":
        names += config.encoder.model_type
    return config.model_type == "whisper" or "donut" in names.lower()


def takes_only_text(model: Any) -> bool:
    """Whether all ids are of the vocabulary: multimodal models replace others, their placeholders."""
    return getattr(model, "input_modalities", "text") in ("text", ("text",), ["text"])


def text_tokenizer(given: Any) -> Any:
    """The tokenizer of a processor; ``given`` itself if that is a tokenizer, or has none."""
    return given if hasattr(given, "get_vocab") else getattr(given, "tokenizer", given)


def makes_its_own_output(model: Any) -> bool:
    """Whether the model's class has a ``generate`` that makes an output of what hfgen's returns."""
    kinds = "whisper parakeet_rnnt parakeet_tdt nemotron_asr_streaming nemotron3_5_asr"
    of_bark = "semantic coarse_acoustics fine_acoustics"
    has_own = not type(model).generate.__module__.startswith("hfgen.")
    return has_own and model.config.model_type in (*kinds.split(), *of_bark.split())


def has_plain_head(model: Any) -> bool:
    """Whether the head reads the last states alone: ProphetNet's reads one more state per n-gram."""
    return model.config.model_type != "prophetnet"


def placeholder_tokens(model: Any) -> list[int]:
    """Ids that stand for parts of an image, a video or sound in the prompt, never for text.

    Ovis's indicators of an image do so, too, where the image is forwarded.
    """
    names = [f"{kind}_token_{e}" for kind in ("image", "video", "audio") for e in ("id", "index")]
    ids = [getattr(model.config, name, None) for name in names]
    ids += getattr(model.config, "visual_indicator_token_ids", None) or ()
    return [] if takes_only_text(model) else [i for i in ids if isinstance(i, int)]


def layers_of_images(model: Any) -> Sequence[int]:
    """Which layers attend to the image alone, whose keys do not grow: Mllama's."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "cross_attention_layers", None) or ()


def position_pad(model: Any) -> int | None:
    """The pad token of a decoder that counts positions from the ids of one forward, else ``None``.

    There (M2M-100, NLLB, SeamlessM4T, Kosmos) a pad takes no position: of ids fed together, those
    behind it have other positions than if they were fed one by one.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    # RoBERTa's embeddings count so too, but only where no positions are given.
    tables: Any = (m for m in modules_of(decoder) if "Positional" in type(m).__name__)
    counting = (m for m in tables if hasattr(m, "create_position_ids_from_input_ids"))
    return next((module.padding_idx for module in counting), None)


def counts_positions_of_ids(model: Any) -> bool:
    """Whether positions that are not given are counted from ids, and begin behind the pad's: RoBERTa's do."""
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in modules_of(model))


def token_embedding(model: Any) -> nn.Embedding | None:
    """The table of token embeddings, if it is an ordinary one."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    is_ordinary = isinstance(embedding, nn.Embedding)
    return embedding if is_ordinary and type(embedding).__name__.endswith("Embedding") else None


def has_foreign_inputs(model: Any) -> bool:
    """Whether code outside of transformers reads the inputs: it may embed other ids, or add to masks and positions."""
    methods = (type(model).forward, type(model).prepare_inputs_for_generation)
    return any(m.__module__.partition(".")[0] not in ("transformers", "hfgen") for m in methods)


def position_table(model: Any) -> nn.Embedding | None:
    """The table of learned positions, if the decoder has one; that of an image's patches is another."""
    decoder = (model.get_decoder() if hasattr(model, "get_decoder") else None) or model
    for name, module in decoder.named_modules() if isinstance(decoder, nn.Module) else ():
        if isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe")):
            return module
    return None


def n_positions(table: nn.Embedding) -> int:
    return int(table.num_embeddings - getattr(table, "offset", 0))


def max_positions(model: Any) -> int | None:
    """How many tokens fit into the decoder's learned positions, or its config's; ``None`` for any number."""
    if (table := position_table(model)) is not None:
        return n_positions(table)
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def cache_name(model_kwargs: dict[str, Any]) -> str | None:
    """The name of the cache in ``model_kwargs``, which may be ``None`` there; ``None`` without one."""
    return next((name for name in ALL_CACHE_NAMES if name in model_kwargs), None)
