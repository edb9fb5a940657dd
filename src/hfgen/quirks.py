"""Everything that is about one model family, or one version of transformers, with its reason."""

from __future__ import annotations

import functools
from typing import Any

import transformers
from packaging import version
from torch import nn
from transformers import cache_utils
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.distributed.utils import _get_torch_distributed_world_size as world_size
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

#: Kinds of cache layers that hold nothing, since they read another's keys: since transformers 5.23.
EMPTY_LAYERS: tuple[type, ...] = tuple(
    kind for kind in [getattr(cache_utils, "DummyLayer", None)] if kind is not None
)

#: What prompts may hold besides text, as configs call it.
MEDIA = ("image", "video", "audio")


def is_sharded(model: Any) -> bool:
    """Whether parameters live on several devices that have to forward in step (ZeRO-3, FSDP)."""
    return (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and world_size() > 1


@functools.cache
def penalty_spares_padding() -> bool:
    """Whether ``repetition_penalty`` leaves left padding out: since transformers 5.23."""
    return version.parse(transformers.__version__) >= version.parse("5.23.0")


def cache_argument(model: Any) -> str:
    """Under which name forward takes the cache: Mamba's predate ``past_key_values``."""
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


def given_cache(model: Any, model_kwargs: dict[str, Any]) -> Any:
    """The cache in ``model_kwargs``, under whichever name, or ``None``."""
    names = (cache_argument(model), *ALL_CACHE_NAMES)
    return next((model_kwargs[n] for n in names if model_kwargs.get(n) is not None), None)


def makes_its_own_cache(class_name: str) -> bool:
    """Whether the model builds a cache that is no ``Cache`` by itself.

    MiniMax's first release does; M2 and M3 are ordinary attention models.
    """
    name = class_name.lower()
    if "minimaxm2" in name or "minimaxm3" in name:
        return False
    return any(family in name for family in ("reformer", "minimax", "xlnet", "rwkv", "xlstm"))


def masks_filled_static_cache(model: Any) -> bool:
    """Whether the model masks as many keys as a static cache says that it sees.

    Models that can be compiled do. Others cut masks of their own by the length of the keys, or attend
    to all of them (GPT-Neo, FSMT, LED, …). Bloom, whose positions are counted from its mask, pads
    that to the length of the cache.
    """
    return bool(model._can_compile_fullgraph) and model.config.model_type != "bloom"


def tokens_before_prompt(model: Any) -> int:
    """How many tokens of its own the model puts before a prompt, and into the cache: CPM-Ant does."""
    return int(getattr(model.config, "prompt_length", None) or 0)


def keeps_other_state(model: Any) -> bool:
    """Whether something besides the cache remembers the rows that were forwarded.

    RecurrentGemma's modules do; Voxtral's realtime encoder has a cache of its own.
    """
    return model.config.model_type in ("recurrent_gemma", "voxtral_realtime")


def rows_of_states(model: Any) -> int:
    """Which dimension of four-dimensional hidden states has the rows.

    Gemma 3n has its streams before them, the others behind the positions.
    """
    return 1 if model.config.model_type.startswith("gemma3n") else 0


def keeps_decoder_prompt(model: Any) -> bool:
    """Whether decoder ids are used as given, with no start token put before them.

    Whisper's prompts and Donut's task prompts start with other special tokens. Donut checkpoints
    are vision encoder-decoders, told by their encoder.
    """
    config = model.config
    return (
        "donut" in type(model).__name__.lower()
        or config.model_type == "whisper"
        or (
            config.model_type == "vision-encoder-decoder"
            and "donut" in config.encoder.model_type.lower()
        )
    )


def takes_only_text(model: Any) -> bool:
    """Whether ids are looked up as they are.

    Multimodal models use ids outside of the vocabulary as placeholders and replace them first.
    """
    modalities = getattr(model, "input_modalities", "text")
    return modalities == "text" or list(modalities) == ["text"]


def placeholder_tokens(model: Any) -> list[int]:
    """Ids that stand for parts of an image, a video or sound in the prompt, and are never text."""
    names = [f"{kind}_token_{end}" for kind in MEDIA for end in ("id", "index")]
    ids = (getattr(model.config, name, None) for name in names)
    return [] if takes_only_text(model) else [i for i in ids if isinstance(i, int)]


def token_embedding(model: Any) -> nn.Embedding | None:
    """The table of token embeddings, if it is an ordinary one."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return (
        embedding
        if type(embedding).__name__.endswith("Embedding") and isinstance(embedding, nn.Embedding)
        else None
    )


def cache_name(model_kwargs: dict[str, Any]) -> str | None:
    """The name under which ``model_kwargs`` has a cache, be it ``None``; ``None`` if it has none."""
    return next((name for name in ALL_CACHE_NAMES if name in model_kwargs), None)


def returned_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache as it is after decoding, for the output."""
    name = cache_name(model_kwargs)
    return None if name is None else model_kwargs[name]
