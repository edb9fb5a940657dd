"""The checks of contrastive search and DoLa; ``validate`` calls them."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode


def check_mode(model: Any, mode: GenerationMode, config: GenerationConfig) -> None:
    """Raise ``ValueError`` for a model or fields that these modes cannot decode with."""
    if mode == GenerationMode.CONTRASTIVE_SEARCH:
        _check_contrastive(model, config)
    elif mode == GenerationMode.DOLA_GENERATION:
        _check_dola(model, config)


def _check_contrastive(model: Any, config: GenerationConfig) -> None:
    name = f"Contrastive search (`penalty_alpha`={config.penalty_alpha})"
    if not 0 < config.penalty_alpha <= 1:
        raise ValueError(
            f"`penalty_alpha` has to be between 0 and 1, but is {config.penalty_alpha!r}."
        )
    if config.dola_layers is not None:
        raise ValueError(
            f"{name} and `dola_layers`={config.dola_layers!r} each ask for a mode. Leave one out."
        )
    if model._is_stateful:
        raise ValueError(
            f"{name} tries several tokens from one state and takes them back, but "
            f"{type(model).__name__} keeps a state that cannot be rolled back."
        )
    if not config.use_cache:
        raise ValueError(f"{name} tries its candidates on a cache: leave out `use_cache=False`.")
    if config.prefill_chunk_size is not None:
        raise ValueError(
            f"{name} needs the hidden states of the whole prompt at once: leave out "
            f"`prefill_chunk_size`={config.prefill_chunk_size}."
        )


def _check_dola(model: Any, config: GenerationConfig) -> None:
    layers = config.dola_layers
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"DoLa (`dola_layers`={layers!r}) decodes with decoder-only models, and {name} is an "
            "encoder-decoder."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"DoLa (`dola_layers`={layers!r}) reads the layers with the model's output embeddings, "
            f"and {name} has none."
        )
    n_layers = model.config.get_text_config().num_hidden_layers
    if layers in ("low", "high") if isinstance(layers, str) else _are_layers(layers, n_layers):
        return
    raise ValueError(
        f"`dola_layers` has to be 'low', 'high' or a list of layers from 0, the embeddings, to "
        f"{n_layers - 1}, the last but one of {name}; it is {layers!r}."
    )


def _are_layers(layers: Any, n_layers: int) -> bool:
    return (
        isinstance(layers, list | tuple)
        and len(layers) > 0
        and all(type(layer) is int and 0 <= layer < n_layers for layer in layers)
    )
