"""Stage 3: run encoders once, before the loop."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import GenerationConfig

from ..families import CACHE, parameters
from ..state.call import ModelKwargs

#: Arguments of generate that are the decoder's: an encoder does not get them.
DECODER_PREFIXES = ("decoder_", "cross_attn", "use_cache", CACHE, "cache_params")
#: The names under which vision encoders take pixels.
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")


def prepare_text_encoder_decoder_kwargs_for_generation(
    self: Any,
    inputs_tensor: torch.Tensor,
    model_kwargs: ModelKwargs,
    model_input_name: str | None,
    generation_config: GenerationConfig,
) -> ModelKwargs:
    """Run the encoder on ``inputs_tensor`` and the kwargs that it has names for."""
    encoder = self.get_encoder()
    if hasattr(self, "hf_device_map"):  # placed by accelerate: outputs have to be where inputs are
        if hasattr(encoder, "_hf_hook"):
            encoder._hf_hook.io_same_device = True
        else:
            add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))
    accepted = parameters(encoder.forward)
    takes_all = bool(accepted & {"kwargs", "model_kwargs"})
    encoder_kwargs = {
        name: value
        for name, value in model_kwargs.items()
        if not name.startswith(DECODER_PREFIXES) and (takes_all or name in accepted)
    }
    encoder_kwargs |= {
        "output_attentions": generation_config.output_attentions,
        "output_hidden_states": generation_config.output_hidden_states,
        "return_dict": True,
        model_input_name or self.main_input_name: inputs_tensor,
    }
    model_kwargs["encoder_outputs"] = encoder(**encoder_kwargs)
    return model_kwargs


def prepare_multimodal_encoder_kwargs_for_generation(
    self: Any, model_kwargs: ModelKwargs
) -> ModelKwargs:
    """Encode images and videos ahead of the prefill; their raw inputs leave the kwargs."""
    encoded = dict(model_kwargs.get("mm_encoder_outputs") or {})
    model_kwargs["mm_encoder_outputs"] = encoded
    consumed: set[str] = set()
    for modality in ("image", "video"):
        encoder = getattr(self.base_model, f"get_{modality}_features", None)
        if modality not in self.input_modalities or encoder is None:
            continue
        accepted = parameters(encoder)
        names = accepted & model_kwargs.keys()
        consumed |= names
        if names.isdisjoint(PIXELS):
            continue
        if encoded.get(modality) is not None:
            both = f"as pixels and encoded, in `mm_encoder_outputs['{modality}']`"
            raise ValueError(f"The {modality} input was passed both {both}. Pass one of them.")
        encoded[modality] = encoder(**{n: model_kwargs[n] for n in names}, return_dict=True)
    for name in consumed:  # only now: modalities may share arguments
        model_kwargs.pop(name, None)
    return model_kwargs
