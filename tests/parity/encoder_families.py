"""Tiny models that read something before they write: text to text, speech, images, audio.

All share their token ids: 0 pads, 1 begins, 2 ends, 3 and 4 hold the place of an image or of
sound, text is 5 and up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.bark.generation_configuration_bark import BarkSemanticGenerationConfig

from tests.parity.family import MODES, Family, Inputs, Kind, seeded, sharpen, text_prompt
from tests.versions import IS_5_24

VOCAB = 64
PAD, BOS, EOS, MEDIA, MEDIA2 = range(5)

Sizes = dict[str, Any]
MakeConfig = Callable[[], Any]
MakeInputs = Callable[[nn.Module, int, bool, int], Inputs]
MakeMedia = Callable[[int, int], Inputs]  # (rows, seed) -> pixels, mel bins, samples

#: Parts of models that turn tokens into sound: they choose none, and would amplify rounding errors.
CODECS = ("codec", "audio_encoder", "tokenizer", "audio_tower.encoder", "audio_tower.decoder")


# -------------------------------------------------------------------------- weights


def lively(model: nn.Module, spread: float) -> nn.Module:
    """Redraw the weights so that the next token depends on the whole prefix, not on the last token.

    Default initialisations (deviation 0.02) leave the residual stream untouched at these widths:
    tied models repeat one token for ever, and a wrong cache or mask goes unseen.  Strong
    feed-forward layers amplify what the weaker attention layers mix in.  ``spread`` is the
    deviation of the logits.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad or weight.dim() < 2 or any(part in name for part in CODECS):
                continue  # fixed position tables; biases and norms; codecs
            fan_in = 1 if id(weight) in embeddings else math.prod(weight.shape[1:])
            gain = 0.8 if "att" in name.lower() else 8.0
            weight.normal_(std=1.0 if fan_in == 1 else gain / math.sqrt(fan_in))
        for name, buffer in model.named_buffers():
            if name.endswith(("codebook.embed", "codebook.embed_sum")):
                buffer.normal_()  # zeros, which would make all sound alike
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):  # a model of sound may have several
            sharpen(model, spread)
            head.weight[[MEDIA, MEDIA2]] = 0.0  # a placeholder would call for an image
    return model


def config(name: str, **sizes: Any) -> MakeConfig:
    """A builder of the config class named ``name``."""
    return lambda: getattr(transformers, name)(**copy.deepcopy(sizes))


@dataclass(frozen=True)
class Tiny:
    """Builds the class named ``model`` from ``config()``, with eager attention.

    ``generation`` holds what the family expects in ``model.generation_config``.
    """

    model: str
    config: MakeConfig
    seed: int = 0
    spread: float = 3.0
    generation: Sizes = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        return seeded(self._build, self.seed)

    def _build(self) -> nn.Module:
        model_class = getattr(transformers, self.model)
        made = model_class._from_config(self.config(), attn_implementation="eager")
        for name, value in self.generation.items():
            setattr(made.generation_config, name, value)
        return lively(made, self.spread)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values of this shape, from their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------- prompts


def text(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """``input_ids (rows, 7)``, and a mask where there are pads."""
    return text_prompt(VOCAB - 4, rows, padded, seed, pad=PAD)


def only(media: MakeMedia) -> MakeInputs:
    """Inputs without any text: rows have one length, so there is nothing to pad."""
    return lambda model, rows, padded, seed: media(rows, seed)


def beside(media: MakeMedia) -> MakeInputs:
    """A text prompt, and media that take no place in it."""
    return lambda model, rows, padded, seed: text(model, rows, padded, seed) | media(rows, seed)


def within(media: MakeMedia, places: int, types: str | None = None) -> MakeInputs:
    """A text prompt with ``places`` placeholder tokens before its last token, and the media.

    ``input_ids (rows, 7 + places)``; ``types`` names the argument that marks the placeholders.
    """

    def inputs(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
        given = text(model, rows, padded, seed)
        for key, value in given.items():
            fill = MEDIA if key == "input_ids" else 1
            given[key] = torch.cat(
                [value[:, :-1], value.new_full((rows, places), fill), value[:, -1:]], dim=1
            )
        if types:
            given[types] = (given["input_ids"] == MEDIA).long()
        return given | media(rows, seed)

    return inputs


def ending(token: int, **more: Any) -> MakeInputs:
    """A text prompt whose last token is ``token``, and keyword arguments ``more``."""

    def inputs(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
        given = text(model, rows, padded, seed)
        given["input_ids"][:, -1] = token
        return {"attention_mask": torch.ones_like(given["input_ids"])} | given | more

    return inputs


# -------------------------------------------------------------------------- sizes

SPECIAL: Sizes = {
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
}
BART: Sizes = SPECIAL | {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
T5: Sizes = SPECIAL | {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
}
PROPHETNET: Sizes = SPECIAL | {
    "hidden_size": 16,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "num_buckets": 8,
    "relative_max_distance": 16,
}
BERT: Sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: Sizes = BERT | {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SLIDING: Sizes = LLAMA | {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
VIT: Sizes = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
CLIP: Sizes = VIT | {"model_type": "clip_vision_model"}
SIGLIP: Sizes = VIT | {"model_type": "siglip_vision_model", "vision_use_head": False}
SEAMLESS: Sizes = BART | {
    "hidden_size": 16,
    "speech_encoder_layers": 1,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 32,
    "feature_projection_input_dim": 8,
    "t2u_vocab_size": VOCAB,
    "char_vocab_size": VOCAB,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 3,
    "adaptor_kernel_size": 2,
    "adaptor_stride": 2,
    "max_source_positions": 64,
}
WAV2VEC2: Sizes = BERT | {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
PARAKEET: Sizes = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_mel_bins": 8,
    "conv_kernel_size": 3,
    "subsampling_factor": 2,
    "subsampling_conv_channels": 4,
}
MIMI: Sizes = {
    "model_type": "mimi",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_filters": 4,
    "upsampling_ratios": [2, 2],
    "codebook_size": 16,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 3,
    "upsample_groups": 16,
    "sliding_window": 16,
}


def like(model_type: str, sizes: Sizes = LLAMA, **more: Any) -> Sizes:
    """``sizes`` as the part of a larger config that is of this type."""
    return sizes | {"model_type": model_type} | more


# -------------------------------------------------------------------------- rows of the tables

GREEDY, ONE_BEAM = MODES[:1], MODES[:2]

# Why a family does not take an option; each was tried on transformers.
NO_IDS = {"embeds": "there are no ids to embed"}
NO_EMBEDS = {"embeds": "prompts are ids"}
NO_PLACES = {"continuation": "the ids left after the cache hold no places for the media"}
UNSPLIT = {"chunked": "media are not split into chunks"}
TWO_POSITIONS = {"chunked": "the decoder is given its positions twice"}
BLIND = {"assistant": "the assistant is not given the media"}
EMBEDDED = {"assisted": "passes embeddings on, and upstream loses what is drafted behind them"}
TOKENS_ONLY = {"assisted": "more than one token is written at a time"}
UNCACHED = {"no_cache": "the mask grows, the inputs do not"}
NOT_RETURNED = {"attentions": "only ids are returned", "hidden_states": "only ids are returned"}
ONE_ID = "takes one decoder id at a time with a cache"
LOST_ENCODER = "looks for encoder outputs that it has dropped"
TRANSDUCER = NO_IDS | {
    "no_cache": "keeps the state of its decoder",
    "chunked": "has no attention cache",
    "attentions": "there are none",
    "hidden_states": "there are none",
    "num_return_sequences": "does not sample",
    "assisted": "walks along the sound, one frame or token a step",
    "continuation": "returns no cache",
    "decoder_input_ids": "reads one token at a time",
}
RAG_UNSUPPORTED = {
    "embeds": "documents are ids",
    "assisted": "refused",
    "attentions": "names its outputs in its own way",
    "hidden_states": "names its outputs in its own way",
    "continuation": "passes decoder ids twice",
    "decoder_input_ids": "passes decoder ids twice",
}


def family(
    kind: Kind,
    name: str,
    prefix: str,
    inputs: MakeInputs,
    sizes: Sizes,
    head: str = "ForConditionalGeneration",
    config_class: str = "",
    modes: tuple[str, ...] = MODES,
    unsupported: dict[str, str] | None = None,
    **weights: Any,
) -> Family:
    """The family of class ``{prefix}{head}`` and config ``{prefix}Config``; ``weights`` go to ``Tiny``."""
    build = Tiny(prefix + head, config(config_class or f"{prefix}Config", **sizes), **weights)
    return Family(name, kind, build, inputs, modes, unsupported or {})


def seq2seq(name: str, prefix: str, sizes: Sizes, **more: Any) -> Family:
    """Text to text."""
    return family("encoder-decoder", name, prefix, text, sizes, **more)


def vision(name: str, prefix: str, inputs: MakeInputs, sizes: Sizes, **more: Any) -> Family:
    """Images and text to text."""
    return family("vision", name, prefix, inputs, sizes, **more)


def speech(name: str, prefix: str, inputs: MakeInputs, sizes: Sizes, **more: Any) -> Family:
    """Sound to text."""
    return family("speech", name, prefix, inputs, sizes, **more)


def audio(name: str, prefix: str, inputs: MakeInputs, sizes: Sizes, **more: Any) -> Family:
    """Text to sound."""
    return family("audio", name, prefix, inputs, sizes, **more)


def documents(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """Two documents found for each question, ``(rows * 2, 7)``, and how well they fit."""
    found = text(model, 2 * rows, padded, seed)
    mask = found.get("attention_mask", torch.ones_like(found["input_ids"]))
    return {
        "context_input_ids": found["input_ids"],
        "context_attention_mask": mask,
        "doc_scores": noise(rows, 2, seed=seed),
    }


RAG = SPECIAL | {
    "question_encoder": like("dpr", BERT),
    "generator": like("bart", BART),
    "n_docs": 2,
}

# fmt: off
TEXT: list[Family] = [
    seq2seq("bart_seq2seq", "Bart", BART, seed=14),
    seq2seq("mbart_seq2seq", "MBart", BART, seed=2),
    seq2seq("plbart_seq2seq", "PLBart", BART),
    seq2seq("mvp_seq2seq", "Mvp", BART),
    seq2seq("blenderbot_seq2seq", "Blenderbot", BART | {"encoder_no_repeat_ngram_size": 0},
        seed=6),
    seq2seq("blenderbot_small", "BlenderbotSmall", BART),
    seq2seq("pegasus_seq2seq", "Pegasus", BART, seed=3),
    seq2seq("pegasus_x", "PegasusX", BART | {"block_size": 4, "num_global_tokens": 2}),
    seq2seq("bigbird_pegasus_seq2seq", "BigBirdPegasus", BART |
        {"attention_type": "original_full"}, seed=2),
    seq2seq("m2m_100", "M2M100", BART, spread=1.0),
    seq2seq("nllb_moe", "NllbMoe", BART |
        {"num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}),
    seq2seq("led", "LED", BART | {"attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}, seed=14),
    seq2seq("marian_seq2seq", "Marian", BART, head="MTModel", seed=12),
    seq2seq("fsmt", "FSMT", BART |
        {"langs": ["en", "de"], "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "num_beams": 1},
        unsupported=NO_EMBEDS | {"assisted": "with a cache there is no causal mask: what is fed "
        "together sees all of itself"}),
    seq2seq("t5", "T5", T5, seed=5),
    seq2seq("mt5", "MT5", T5),
    seq2seq("umt5", "UMT5", T5),
    seq2seq("longt5", "LongT5", T5 | {"local_radius": 3}, seed=5),
    seq2seq("longt5_global", "LongT5", T5 |
        {"local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"}),
    seq2seq("switch_transformers", "SwitchTransformers", T5 |
        {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        seed=6),
    seq2seq("prophetnet_seq2seq", "ProphetNet", PROPHETNET, unsupported={
        "static": "does not know this cache", "assisted": ONE_ID, "continuation": ONE_ID}),
    seq2seq("t5gemma", "T5Gemma", SPECIAL | {"encoder": SLIDING, "decoder": SLIDING |
        {"cross_attention_hidden_size": 16}, "tie_word_embeddings": False}),
    seq2seq("t5gemma2", "T5Gemma2", SPECIAL | {"encoder": {"text_config": SLIDING,
        "vision_config": SIGLIP, "eoi_token_index": 60, "image_token_index": MEDIA,
        "mm_tokens_per_image": 4}, "decoder": SLIDING, "eoi_token_index": 60,
        "image_token_index": MEDIA, "tie_word_embeddings": False}),
    seq2seq("bert2bert", "EncoderDecoder", SPECIAL | {"encoder": like("bert", BERT),
        "decoder": like("bert", BERT, is_decoder=True, add_cross_attention=True)}, head="Model",
        seed=11),
    family("encoder-decoder", "rag_token", "RagToken", documents, RAG, head="ForGeneration",
        config_class="RagConfig", seed=7, unsupported=RAG_UNSUPPORTED),
    seq2seq("seamless_m4t", "SeamlessM4T", SEAMLESS, head="ForTextToText", spread=1.0),
    seq2seq("seamless_m4t_v2", "SeamlessM4Tv2", SEAMLESS, head="ForTextToText", spread=1.0),
]
# fmt: on


# -------------------------------------------------------------------------- images


def image(size: int = 8) -> MakeMedia:
    """One RGB image a row: ``pixel_values (rows, 3, size, size)``."""
    return lambda rows, seed: {"pixel_values": noise(rows, 3, size, size, seed=seed)}


def images(size: int = 8) -> MakeMedia:
    """A list of one image a row: ``pixel_values (rows, 1, 3, size, size)``."""
    return lambda rows, seed: {"pixel_values": noise(rows, 1, 3, size, size, seed=seed)}


def sized_image(rows: int, seed: int) -> Inputs:
    """Images of 16 x 16 and their ``image_sizes (rows, 2)``."""
    return image(16)(rows, seed) | {"image_sizes": torch.tensor([[16, 16]] * rows)}


def tiles(rows: int, seed: int) -> Inputs:
    """An overview and one 8 x 8 tile: 4 tokens, and 2 x 2 tokens with a line break after each 2."""
    sizes = torch.tensor([[8, 8]] * rows)
    return {"pixel_values": noise(rows, 2, 3, 8, 8, seed=seed), "image_sizes": sizes}


def patches(rows: int, seed: int) -> Inputs:
    """Images of 4 x 4 flattened patches of 4 x 4 pixels in two frames; 2 x 2 patches make a token."""
    return {
        "pixel_values": noise(rows * 16, 3 * 2 * 4 * 4, seed=seed),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
    }


def glm_image(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """An image between its marks, and the mark that begins another one; 4 x 4 patches each.

    There are as many patches as hidden units, which upstream takes for patches where it repeats
    images for beams; and it repeats the sizes of images one by one, which have to be alike.
    """
    given = text(model, rows, padded, seed)
    for key, value in given.items():
        begin, place, end = (60, MEDIA, 61) if key == "input_ids" else (1, 1, 1)
        parts = [value.new_full((rows, n), fill) for fill, n in ((begin, 1), (place, 16), (end, 1))]
        given[key] = torch.cat([value[:, :-1], *parts, value[:, -1:], parts[0]], dim=1)
    return given | {
        "pixel_values": noise(rows * 16, 3 * 4 * 4, seed=seed),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2 * rows),
        "images_per_sample": torch.full((rows,), 2),
    }


def placed_patches(rows: int, seed: int) -> Inputs:
    """Four flattened 4 x 4 patches a row, each after its row and column."""
    where = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]]).expand(rows, 4, 2)
    flat = torch.cat([where, noise(rows, 4, 3 * 4 * 4, seed=seed)], dim=-1)
    return {"flattened_patches": flat, "attention_mask": torch.ones(rows, 4)}


def fuyu_patches(rows: int, seed: int) -> Inputs:
    """Four flattened 4 x 4 patches a row."""
    return {"image_patches": noise(rows, 4, 3 * 4 * 4, seed=seed)}


def question(rows: int, seed: int) -> Inputs:
    """An image, and a question that the bridge between the two models reads as well."""
    return image()(rows, seed) | {"qformer_input_ids": torch.full((rows, 3), 7)}


def mllama(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """One image of one tile, which every token may look at."""
    given = within(lambda rows, seed: {}, 1)(model, rows, padded, seed)
    return given | {
        "pixel_values": noise(rows, 1, 1, 3, 8, 8, seed=seed),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(rows, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(
            rows, given["input_ids"].shape[1], 1, 1, dtype=torch.long
        ),
    }


def kosmos(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """An image, and where its four tokens are."""
    given = within(image(), 4)(model, rows, padded, seed)
    return given | {"image_embeds_position_mask": given["input_ids"] == MEDIA}


def idefics(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """One image, which every token may look at."""
    given = text(model, rows, padded, seed)
    look = torch.ones(rows, given["input_ids"].shape[1], 1, dtype=torch.long)
    return given | images()(rows, seed) | {"image_attention_mask": look}


def ragged_patches(rows: int, seed: int) -> Inputs:
    """Images of 4 x 4 flattened patches, of which none are padding."""
    return {
        "pixel_values": noise(rows, 16, 3 * 4 * 4, seed=seed),
        "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * rows),
    }


def document(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """A page, its words and the box of each word, ``bbox (rows, 7, 4)``."""
    given = text(model, rows, padded, seed) | image()(rows, seed)
    corner = torch.arange(7).expand(rows, 7) / 8
    return given | {"bbox": torch.stack([corner, corner, corner + 0.1, corner + 0.1], dim=-1)}


def kosmos_document(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """A page in patches, and where its four tokens are."""
    given = within(lambda rows, seed: {}, 4)(model, rows, padded, seed)
    return given | {
        "flattened_patches": placed_patches(rows, seed)["flattened_patches"],
        "image_embeds_position_mask": (given["input_ids"] == MEDIA).long(),
    }


CHAMELEON_MAP = {
    "<image>": MEDIA,
    **{f"IMGIMG{letter}Z": 50 + i for i, letter in enumerate("ABCDEFGH")},
}
PLACE: Sizes = {"image_token_index": MEDIA, "image_token_id": MEDIA}
QWEN: Sizes = {
    "text_config": LLAMA
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "image_token_id": MEDIA,
    "video_token_id": MEDIA2,
    "vision_start_token_id": 60,
    "vision_end_token_id": 61,
}
QWEN_VIT: Sizes = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 16,
}
BLIP: Sizes = {
    "vision_config": VIT,
    "text_config": like("opt", ffn_dim=32, word_embed_proj_dim=16),
    "qformer_config": BERT | {"encoder_hidden_size": 16, "cross_attention_frequency": 1},
    "num_query_tokens": 4,
    "image_token_index": MEDIA,
}
CROSS: Sizes = {"is_decoder": True, "add_cross_attention": True}
CLIP_LLAMA = PLACE | {"vision_config": CLIP, "text_config": like("llama")}

# fmt: off
VISION: list[Family] = [
    vision("llava", "Llava", within(image(), 4), CLIP_LLAMA | {"vision_feature_layer": -1},
        unsupported=NO_PLACES),
    vision("llava_next", "LlavaNext", within(tiles, 10), CLIP_LLAMA |
        {"vision_feature_layer": -1, "image_grid_pinpoints": [[8, 8]]}, seed=1,
        unsupported=NO_PLACES),
    vision("llava_onevision", "LlavaOnevision", within(tiles, 10), PLACE | {
        "vision_config": SIGLIP, "text_config": like("qwen2"), "vision_feature_layer": -1,
        "image_grid_pinpoints": [[8, 8]], "video_token_index": MEDIA2}, seed=3,
        unsupported=NO_PLACES),
    vision("vipllava", "VipLlava", within(image(), 4), CLIP_LLAMA |
        {"vision_feature_layers": [-1, -2]}, unsupported=NO_PLACES),
    vision("qwen2_vl", "Qwen2VL", within(patches, 4, "mm_token_type_ids"), QWEN | {"vision_config": {
        "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4,
        "mlp_ratio": 2}}, seed=1, unsupported=NO_PLACES),
    vision("qwen2_5_vl", "Qwen2_5_VL", within(patches, 4, "mm_token_type_ids"), QWEN |
        {"vision_config": QWEN_VIT | {"window_size": 16, "fullatt_block_indexes": [1]}}, seed=1,
        unsupported=NO_PLACES),
    vision("qwen3_vl", "Qwen3VL", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "vision_config": QWEN_VIT |
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}, unsupported=NO_PLACES),
    vision("qwen3_vl_moe", "Qwen3VLMoe", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": QWEN["text_config"] |
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
        "vision_config": QWEN_VIT |
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}, unsupported=NO_PLACES),
    vision("glm4v", "Glm4v", within(patches, 4, "mm_token_type_ids"), QWEN |
        {"vision_config": QWEN_VIT | {"image_size": 16}}, seed=1, unsupported=NO_PLACES),
    vision("glm_image", "GlmImage", glm_image, {"text_config": QWEN["text_config"] |
        {"vision_vocab_size": VOCAB}, "vision_config": {"depth": 1, "hidden_size": 16,
        "num_heads": 2, "image_size": 16, "patch_size": 4, "intermediate_size": 32}, "vq_config":
        {"embed_dim": 8, "num_embeddings": 48, "latent_channels": 16}, "image_token_id": MEDIA,
        "image_start_token_id": 60, "image_end_token_id": 61}, unsupported=NO_PLACES |
        {"assisted": "a draft may hold places for an image, and there is none"}),
    vision("paligemma", "PaliGemma", within(image(), 4), PLACE | {"vision_config": SIGLIP |
        {"projection_dim": 16}, "text_config": like("gemma"), "projection_dim": 16,
        "tie_word_embeddings": False}, seed=1, unsupported=NO_PLACES | NO_EMBEDS),
    vision("idefics2", "Idefics2", within(images(), 4), {"vision_config": VIT,
        "text_config": like("mistral"), "perceiver_config": {"hidden_size": 16,
        "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
        "resampler_head_dim": 8, "num_key_value_heads": 1}, "image_token_id": MEDIA},
        unsupported=NO_PLACES),
    vision("idefics3", "Idefics3", within(images(16), 4), {"vision_config": VIT |
        {"image_size": 16}, "text_config": like("llama"), "image_token_id": MEDIA,
        "pad_token_id": PAD}, unsupported=NO_PLACES),
    vision("smolvlm", "SmolVLM", within(images(16), 4), {"vision_config": VIT | {"image_size": 16},
        "text_config": like("llama"), "image_token_id": MEDIA, "pad_token_id": PAD}, seed=1,
        unsupported=NO_PLACES),
    vision("blip_2", "Blip2", within(image(), 4), BLIP, seed=2, unsupported=EMBEDDED |
        NO_EMBEDS | {"chunked": "the mask is not split"}),
    vision("instructblip", "InstructBlip", within(question, 4), BLIP, seed=2, unsupported=EMBEDDED |
        NO_EMBEDS | {"chunked": "the mask is not split"}),
    vision("gemma3", "Gemma3", within(image(16), 4, "token_type_ids"), PLACE | {
        "vision_config": SIGLIP | {"image_size": 16}, "text_config": SLIDING,
        "mm_tokens_per_image": 4, "tie_word_embeddings": False}, unsupported=NO_PLACES |
        NO_EMBEDS),
    vision("mllama", "Mllama", mllama, {"text_config": LLAMA | {"cross_attention_layers": [1]}, "vision_config": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "vision_output_dim": 32, "image_size": 8, "patch_size": 4,
        "max_num_tiles": 1, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]]}, "image_token_index": MEDIA}, unsupported=UNSPLIT |
        {"continuation": "the cross-attention mask is as long as the ids that are left out"}),
    vision("florence2", "Florence2", within(image(16), 17), {"text_config": like("bart", BART), "vision_config": {
        "depths": [1], "patch_size": [7], "patch_stride": [4], "patch_padding": [3],
        "patch_prenorm": [False], "embed_dim": [16], "num_heads": [2], "num_groups": [2],
        "window_size": 4, "projection_dim": 16}, "image_token_id": MEDIA,
        "is_encoder_decoder": True}, seed=3, unsupported=NO_EMBEDS),
    vision("kosmos2", "Kosmos2", kosmos, {"text_config": SPECIAL | {"embed_dim": 16, "layers": 2,
        "ffn_dim": 32, "attention_heads": 2, "max_position_embeddings": 64}, "vision_config": VIT,
        "latent_query_num": 4}, spread=1.0, seed=10, unsupported={
        "static": "does not know this cache", "chunked": "the image mask is not split"}),
    vision("git", "Git", beside(image()), SPECIAL | BERT | {"vision_config": VIT},
        head="ForCausalLM", seed=13, unsupported=UNSPLIT | {"static": "does not know this cache"}),
    vision("pix2struct", "Pix2Struct", only(placed_patches), SPECIAL | {"text_config": SPECIAL | {
        "hidden_size": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "use_cache": True}, "vision_config": {"hidden_size": 16, "patch_embed_hidden_size": 48,
        "d_ff": 32, "d_kv": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "seq_len": 8}},
        unsupported=NO_IDS),
    vision("vit2bert", "VisionEncoderDecoder", only(image()), SPECIAL |
        {"encoder": like("vit", VIT), "decoder": like("bert", BERT | CROSS)}, head="Model",
        unsupported=NO_IDS),
    vision("vit2trocr", "VisionEncoderDecoder", only(image()), SPECIAL |
        {"encoder": like("vit", VIT), "decoder": like("trocr", BART | CROSS)}, head="Model",
        unsupported=NO_IDS),
    vision("donut", "VisionEncoderDecoder", only(image(16)), SPECIAL | {"encoder": {
        "model_type": "donut-swin", "image_size": 16, "patch_size": 4, "embed_dim": 8,
        "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
        "decoder": like("mbart", BART | CROSS)}, head="Model", seed=2, unsupported=NO_IDS),
    vision("internvl", "InternVL", within(image(16), 4), {"vision_config": VIT |
        {"image_size": [16, 16], "patch_size": [4, 4]}, "text_config": like("qwen2"),
        "image_token_id": MEDIA, "image_seq_length": 4}, unsupported=NO_PLACES),
    vision("aya_vision", "AyaVision", within(image(16), 4), PLACE |
        {"vision_config": SIGLIP | {"image_size": 16}, "text_config": like("cohere2", SLIDING)},
        seed=1, unsupported=NO_PLACES),
    vision("mistral3", "Mistral3", within(sized_image, 4), PLACE | {
        "vision_config": like("pixtral", VIT, image_size=16, head_dim=8),
        "text_config": like("mistral")}, unsupported=NO_PLACES),
    vision("fuyu", "Fuyu", within(fuyu_patches, 4), {"text_config": like("persimmon"),
        "patch_size": 4, "image_size": 8, "image_token_id": MEDIA}, head="ForCausalLM",
        unsupported=NO_PLACES | UNSPLIT),
    vision("blip", "Blip", beside(image()), {"vision_config": VIT, "text_config": BERT | SPECIAL |
        {"sep_token_id": EOS, "encoder_hidden_size": 16}}, unsupported=BLIND | NO_EMBEDS |
        {"static": "the cache is one position short"}),
    vision("janus", "Janus", within(image(), 4), {"text_config": like("llama"),
        "vision_config": VIT | {"projection_dim": 16, "num_image_tokens": 4, "mlp_ratio": 2}, "vq_config": {
        "embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1, "num_patches": 8, "projection_dim": 16,
        "image_token_embed_dim": 16, "num_hidden_layers": 1}, "image_token_id": MEDIA},
        unsupported=NO_PLACES),
    vision("chameleon", "Chameleon", within(image(2), 4), LLAMA | {"vq_config": {"embed_dim": 4,
        "num_embeddings": 8, "latent_channels": 4, "resolution": 2, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1}, "vocabulary_map": CHAMELEON_MAP,
        "num_key_value_heads": 2}, unsupported=NO_PLACES),
    vision("idefics", "Idefics", idefics, LLAMA | {"vision_config": {"embed_dim": 16,
        "image_size": 8, "intermediate_size": 32, "patch_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2}, "alpha_initializer": "ones", "cross_layer_interval": 2,
        "freeze_text_layers": False, "freeze_vision_layers": False, "num_key_value_heads": 2},
        head="ForVisionText2Text", unsupported=UNSPLIT),
    vision("cohere2_vision", "Cohere2Vision", within(image(16), 4), {"vision_config": SIGLIP |
        {"image_size": 16}, "text_config": like("cohere2", SLIDING), "image_token_id": MEDIA,
        "alignment_intermediate_size": 32}, unsupported=NO_PLACES),
    vision("deepseek_vl", "DeepseekVL", within(image(), 4),
        {"vision_config": SIGLIP, "text_config": like("llama"), "image_token_id": MEDIA},
        unsupported=NO_PLACES),
    vision("lfm2_vl", "Lfm2Vl", within(ragged_patches, 4), {
        "vision_config": like("siglip2_vision_model", VIT, num_patches=16), "text_config": like(
        "lfm2", SLIDING, layer_types=["conv", "full_attention"], block_multiple_of=16),
        "image_token_id": MEDIA, "projector_hidden_size": 16}, unsupported=NO_PLACES),
    vision("llama4", "Llama4", within(image(16), 4), PLACE | {"vision_config": {"hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "vision_output_dim": 16, "image_size": 16, "patch_size": 4, "projector_input_dim": 16,
        "projector_output_dim": 16}, "text_config": LLAMA | {"intermediate_size_mlp": 32,
        "num_local_experts": 2, "attention_chunk_size": 8, "num_hidden_layers": 4,
        "moe_layers": [1]}}, seed=1, modes=ONE_BEAM, unsupported=NO_PLACES | {
        "chunked": "images are encoded in every chunk",
        "num_return_sequences": "images are not repeated"}),
    vision("qwen3_5", "Qwen3_5", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": QWEN["text_config"] | {
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
        "vision_config": QWEN_VIT | {"num_position_embeddings": 16}}, unsupported=NO_PLACES |
        {"assisted": "a linear-attention state cannot be taken back"}),
    vision("udop", "Udop", document, T5 | {"relative_attention_num_buckets": 32, "image_size": 8,
        "patch_size": 4, "max_2d_position_embeddings": 32}, seed=7),
    vision("kosmos2_5", "Kosmos2_5", kosmos_document, {"text_config": SPECIAL | {"embed_dim": 16,
        "layers": 2, "ffn_dim": 32, "attention_heads": 2, "max_position_embeddings": 64}, "vision_config": {
        "hidden_size": 16, "patch_embed_hidden_size": 48, "intermediate_size": 32, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_num_patches": 8},
        "latent_query_num": 4}, seed=12, unsupported=NO_EMBEDS |
        {"chunked": "the image mask is not split"}),
    vision("got_ocr2", "GotOcr2", within(image(32), 4), PLACE | {"vision_config": {
        "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 4, "window_size": 2, "global_attn_indexes": [1],
        "mlp_dim": 32}, "text_config": like("qwen2"), "image_seq_length": 4},
        unsupported=NO_PLACES),
]
# fmt: on


# -------------------------------------------------------------------------- speech


def mel(
    name: str = "input_features", bins: int = 8, frames: int = 16, time_first: bool = True
) -> MakeMedia:
    """Mel bins of a short sound: ``(rows, frames, bins)``, or ``(rows, bins, frames)``."""
    shape = (frames, bins) if time_first else (bins, frames)
    return lambda rows, seed: {name: noise(rows, *shape, seed=seed)}


def samples(length: int, *channels: int) -> MakeMedia:
    """Sound as samples: ``input_values (rows, *channels, length)``."""
    return lambda rows, seed: {"input_values": noise(rows, *channels, length, seed=seed)}


def mel_and_mask(mask: str, frames: int = 16) -> MakeMedia:
    """``input_features (rows, 8, frames)`` and a mask of ones ``(rows, frames)``."""

    def media(rows: int, seed: int) -> Inputs:
        return mel(time_first=False, frames=frames)(rows, seed) | {
            mask: torch.ones(rows, frames, dtype=torch.long)
        }

    return media


WHISPER: Sizes = BART | {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
}
RNNT: Sizes = {
    "vocab_size": VOCAB,
    "decoder_hidden_size": 16,
    "num_decoder_layers": 1,
    "max_symbols_per_step": 3,
    "pad_token_id": PAD,
    "blank_token_id": VOCAB - 1,
}
BLANK: Sizes = {"decoder_start_token_id": VOCAB - 1}
DURATIONS = list(range(VOCAB, VOCAB + 5))  # scored next to the tokens
STREAMING = PARAKEET | {"sliding_window": 5, "default_num_lookahead_tokens": 1}
QWEN2_AUDIO_ENCODER: Sizes = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "max_source_positions": 8,
}
AUDIO_ENCODER: Sizes = {
    "num_mel_bins": 8,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_source_positions": 16,
    "head_dim": 8,
}
SOUND: Sizes = {"audio_token_id": MEDIA, "audio_token_index": MEDIA}
GRANITE_SPEECH: Sizes = SOUND | {
    "text_config": like("granite"),
    "encoder_config": {
        "input_dim": 8,
        "num_layers": 1,
        "hidden_dim": 16,
        "feedforward_mult": 2,
        "num_heads": 2,
        "dim_head": 8,
        "output_dim": 8,
        "context_size": 4,
        "max_pos_emb": 8,
        "conv_kernel_size": 3,
    },
    "projector_config": like(
        "blip_2_qformer", BERT, encoder_hidden_size=16, cross_attention_frequency=1
    ),
    "has_lora_adapter": False,
    "downsample_rate": 2,
    "window_size": 4,
}

# fmt: off
SPEECH: list[Family] = [
    speech("whisper", "Whisper", only(mel(frames=40, time_first=False)), WHISPER,
        unsupported=NO_IDS | TWO_POSITIONS),
    speech("speech_to_text", "Speech2Text", only(mel()), BART | {"input_feat_per_channel": 8,
        "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64}, seed=3,
        unsupported=NO_IDS),
    speech("moonshine", "Moonshine", only(samples(3000)), SPECIAL | {"hidden_size": 16,
        "intermediate_size": 32, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
        "encoder_num_key_value_heads": 2, "decoder_num_key_value_heads": 2}, unsupported=NO_IDS |
        TWO_POSITIONS),
    speech("moonshine_streaming", "MoonshineStreaming", only(samples(1600)), SPECIAL | BERT | {
        "num_key_value_heads": 2, "head_dim": 8, "encoder_config": {"hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "sliding_windows": [[4, 2], [4, 0]]}}, unsupported=NO_IDS |
        TWO_POSITIONS),
    speech("wav2vec2bert", "SpeechEncoderDecoder", only(samples(100)), SPECIAL |
        {"encoder": like("wav2vec2", WAV2VEC2), "decoder": like("bert", BERT | CROSS)},
        head="Model", unsupported=NO_IDS),
    speech("speecht5", "SpeechT5", only(samples(100)), SPECIAL | WAV2VEC2 | {"encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}, head="ForSpeechToText", seed=4,
        unsupported=NO_IDS),
    speech("seamless_m4t_speech", "SeamlessM4T", only(mel()), SEAMLESS, head="ForSpeechToText",
        spread=1.0, seed=1, unsupported=NO_IDS | BLIND),
    speech("seamless_m4t_v2_speech", "SeamlessM4Tv2", only(mel()), SEAMLESS,
        head="ForSpeechToText", spread=1.0, unsupported=NO_IDS | BLIND),
    speech("canary", "Canary", only(mel()), SPECIAL | {
        "encoder_config": like("parakeet_encoder", PARAKEET), "decoder_config": LLAMA |
        {"num_key_value_heads": 2}}, unsupported=NO_IDS | TWO_POSITIONS),
    speech("cohere_asr", "CohereAsr", only(mel()), SPECIAL | LLAMA |
        {"num_key_value_heads": 2, "encoder_config": like("parakeet_encoder", PARAKEET)},
        unsupported=NO_IDS | TWO_POSITIONS),
    speech("parakeet_rnnt", "Parakeet", only(mel()), RNNT | {"encoder_config": PARAKEET},
        head="ForRNNT", config_class="ParakeetRNNTConfig", generation=BLANK, modes=GREEDY,
        unsupported=TRANSDUCER),
    speech("parakeet_tdt", "Parakeet", only(mel()), RNNT | {"encoder_config": PARAKEET},
        head="ForTDT", config_class="ParakeetTDTConfig", generation=BLANK |
        {"suppress_tokens": DURATIONS}, modes=GREEDY, unsupported=TRANSDUCER),
    speech("nemotron_asr_streaming", "NemotronAsrStreaming", only(mel()), RNNT |
        {"encoder_config": STREAMING}, head="ForRNNT", generation=BLANK, modes=GREEDY,
        unsupported=TRANSDUCER),
    speech("nemotron3_5_asr", "Nemotron3_5Asr", only(mel()), RNNT | {
        "encoder_config": like("nemotron_asr_streaming_encoder", STREAMING), "num_prompts": 4,
        "prompt_intermediate_size": 16, "default_prompt_id": 1}, head="ForRNNT", generation=BLANK,
        modes=GREEDY, unsupported=TRANSDUCER),
    speech("pop2piano", "Pop2Piano", only(mel(bins=16)), T5 | {"composer_vocab_size": 2},
        generation={"composer_to_feature_token": {"composer1": 5, "composer2": 6}},
        unsupported=NO_IDS | {"assisted": "the sound is passed as embeddings, next to ids"}),
    speech("granite_speech", "GraniteSpeech", within(mel(frames=8), 4), GRANITE_SPEECH,
        unsupported=NO_PLACES | UNSPLIT | NO_EMBEDS),
    speech("qwen2_audio", "Qwen2Audio", within(mel_and_mask("feature_attention_mask"), 4), SOUND |
        {"text_config": like("qwen2"), "audio_config": QWEN2_AUDIO_ENCODER}, unsupported=UNSPLIT),
    speech("voxtral", "Voxtral", within(mel(frames=32, time_first=False), 4), SOUND |
        {"text_config": like("llama"), "audio_config": AUDIO_ENCODER}, unsupported=NO_PLACES |
        UNSPLIT),
    speech("audioflamingo3", "AudioFlamingo3", within(mel_and_mask("input_features_mask", 32), 8),
        SOUND | {"text_config": like("qwen2"), "audio_config": AUDIO_ENCODER}, seed=1,
        unsupported=NO_PLACES | UNSPLIT),
    speech("glmasr", "GlmAsr", within(mel_and_mask("input_features_mask", 32), 4), SOUND |
        {"text_config": like("llama"), "audio_config": AUDIO_ENCODER}, unsupported=NO_PLACES |
        UNSPLIT),
    speech("voxtral_realtime", "VoxtralRealtime", beside(mel(frames=200, time_first=False)),
        SOUND | {"text_config": like("voxtral_realtime_text", SLIDING | {"sliding_window": 32}),
        "audio_config": AUDIO_ENCODER | {"sliding_window": 16, "max_position_embeddings": 200}},
        unsupported=NO_EMBEDS |
        {"static": "its encoder keeps a cache of its own, which is a dict",
         "assisted": "sound comes in with the tokens"}),
    speech("kyutai_speech_to_text", "KyutaiSpeechToText", only(samples(200, 1)), LLAMA | {
        "num_key_value_heads": 2, "ffn_dim": 32, "codebook_vocab_size": 17, "num_codebooks": 3,
        "audio_bos_token_id": 16, "audio_pad_token_id": 17, "frame_size": 8, "sliding_window": 32,
        "codec_config": MIMI}, unsupported=NO_IDS),
]
# fmt: on


# -------------------------------------------------------------------------- sound


class Straight:
    """A noise scheduler that walks from noise to sound in equal steps."""

    timesteps = torch.tensor([])

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]

    def step(self, velocity: Tensor, timestep: Tensor, sample: Tensor) -> SimpleNamespace:
        return SimpleNamespace(prev_sample=sample - velocity / len(self.timesteps))


CODES = 16
ENCODEC: Sizes = {
    "model_type": "encodec",
    "hidden_size": 8,
    "num_filters": 4,
    "upsampling_ratios": [2, 2],
    "codebook_size": CODES,
    "codebook_dim": 8,
    "num_lstm_layers": 1,
    "sampling_rate": 16,
    "target_bandwidths": [0.048],
    "normalize": False,
}
MUSIC_DECODER: Sizes = {
    "vocab_size": CODES,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "ffn_dim": 32,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "num_codebooks": 3,
    "pad_token_id": CODES,
    "bos_token_id": CODES,
}
MUSICGEN: Sizes = {
    "text_encoder": like("t5", T5),
    "audio_encoder": ENCODEC,
    "decoder": MUSIC_DECODER,
}
DIA_DECODER: Sizes = LLAMA | {
    "vocab_size": CODES + 4,
    "num_channels": 3,
    "cross_num_attention_heads": 2,
    "cross_head_dim": 8,
    "cross_num_key_value_heads": 2,
    "cross_hidden_size": 16,
    "eos_token_id": CODES,
    "pad_token_id": CODES + 1,
    "bos_token_id": CODES + 2,
}
FLOWING: Sizes = LLAMA | {
    "num_key_value_heads": 2,
    "latent_dim": 4,
    "audio_prompt_token_id": MEDIA,
    "audio_latent_token_id": MEDIA2,
    "audio_bos_token_id": 60,
    "audio_prompt_bos_token_id": 61,
    "flow_head_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "latent_dim": 4,
        "condition_dim": 16,
        "frequency_embedding_size": 8,
        "loss_weighting_hidden_size": 8,
        "loss_weighting_num_layers": 1,
    },
}
TOKENIZER: Sizes = {
    "hidden_size": 8,
    "num_filters": 4,
    "downsampling_ratios": [2, 2],
    "depths": [1, 1, 1],
    "kernel_size": 3,
}


def conversation(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """What the model wrote, said and heard so far: ids ``(rows, 7)`` and codes ``(rows, 3, 7)``."""
    generator = torch.Generator().manual_seed(seed)
    said, heard = torch.randint(CODES, (2, rows, 3, 7), generator=generator)
    codes = {"moshi_audio_codes": said, "user_audio_codes": heard}
    given = text(model, rows, padded, seed)
    mask = torch.ones_like(given["input_ids"])  # without one, upstream fails to make its own
    return {"attention_mask": mask} | given | codes | {"return_audio_waveforms": False}


BARK: Sizes = {
    "block_size": 64,
    "input_vocab_size": VOCAB,
    "output_vocab_size": VOCAB,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_size": 16,
}


def bark(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """Text, and the config that says how it is read."""
    reading = BarkSemanticGenerationConfig(
        eos_token_id=60,
        max_new_tokens=None,
        text_encoding_offset=0,
        text_pad_token=PAD,
        semantic_pad_token=60,
        semantic_infer_token=61,
        semantic_vocab_size=60,
        max_input_semantic_length=7,
    )
    return text(model, rows, padded, seed) | {"semantic_generation_config": reading}


# fmt: off
AUDIO: list[Family] = [
    audio("csm", "Csm", text, LLAMA | {"vocab_size": CODES, "text_vocab_size": VOCAB,
        "num_codebooks": 3, "audio_token_id": MEDIA, "audio_eos_token_id": MEDIA2,
        "codebook_pad_token_id": CODES - 1, "codebook_eos_token_id": 0, "codec_config": MIMI,
        "depth_decoder_config": LLAMA | {"vocab_size": CODES, "num_codebooks": 3,
        "backbone_hidden_size": 16, "max_position_embeddings": 4}}, modes=ONE_BEAM,
        unsupported=TOKENS_ONLY | NO_EMBEDS |
        {"continuation": "generated frames are not prompt ids"}),
    audio("higgs_audio_v2", "HiggsAudioV2", ending(60), LLAMA | {"num_codebooks": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "codebook_size": CODES + 2, "audio_bos_token_id": 60, "audio_token_id": 61,
        "audio_delay_token_id": 62, "audio_stream_bos_id": CODES,
        "audio_stream_eos_id": CODES + 1}, seed=13, modes=ONE_BEAM, unsupported=TOKENS_ONLY |
        NO_EMBEDS | UNCACHED),
    audio("pocket_tts", "PocketTTS",
        ending(60, frames_after_eos=1, eos_threshold=1.0, min_frames_before_eos=3), FLOWING,
        modes=ONE_BEAM, unsupported=TOKENS_ONLY | NO_EMBEDS |
        {"continuation": "a prompt ends with the start of sound"}),
    audio("vibevoice", "VibeVoice", ending(60, noise_scheduler=Straight(), num_diffusion_steps=2), {
        "text_config": like("qwen2"), "audio_config": TOKENIZER |
        {"model_type": "vibevoice_acoustic_tokenizer"}, "semantic_model_config": TOKENIZER |
        {"model_type": "vibevoice_acoustic_tokenizer_encoder"}, "diffusion_head_config": {
        "hidden_size": 16, "latent_size": 8, "num_hidden_layers": 1, "intermediate_size": 16,
        "frequency_embedding_size": 8}, "pad_token_id": PAD, "eos_token_id": EOS,
        "audio_bos_token_id": 60, "audio_eos_token_id": 61, "audio_token_id": 62},
        seed=7, unsupported=UNCACHED | {"continuation": "returns sound, not ids", "assistant":
        "upstream's assistant makes sound of what it drafts, and draws noise for it"}),
    audio("dia", "Dia", text, {"encoder_config": LLAMA | {"num_key_value_heads": 2},
        "decoder_config": DIA_DECODER, "delay_pattern": [0, 1, 2]}, modes=ONE_BEAM,
        unsupported=TOKENS_ONLY | NO_EMBEDS | TWO_POSITIONS | {"num_return_sequences": "refused"}),
    audio("musicgen", "Musicgen", text, MUSICGEN, modes=ONE_BEAM, unsupported=TOKENS_ONLY |
        {"continuation": "returns sound, not ids"} | NOT_RETURNED |
        {"chunked": "makes its first step without a cache"}),
    audio("musicgen_melody", "MusicgenMelody", text, MUSICGEN |
        {"num_chroma": 4, "chroma_length": 4}, modes=ONE_BEAM, unsupported=TOKENS_ONLY |
        {"continuation": "returns sound, not ids"} | {"static": LOST_ENCODER,
        "attentions": LOST_ENCODER, "hidden_states": LOST_ENCODER,
        "num_return_sequences": LOST_ENCODER}),
    audio("bark_semantic", "BarkSemantic", bark, BARK, head="Model", unsupported=NOT_RETURNED |
        NO_EMBEDS | EMBEDDED | {"chunked": "the prompt is passed as embeddings, next to longer ids",
        "continuation": "returns new ids alone"}),
    audio("moshi_speech", "Moshi", conversation, LLAMA | {"ffn_dim": 32, "num_codebooks": 3,
        "audio_vocab_size": CODES, "audio_encoder_config": MIMI, "depth_decoder_config": LLAMA | {
        "ffn_dim": 32, "input_size": 16, "num_codebooks": 3, "audio_vocab_size": CODES,
        "max_position_embeddings": 4}}, unsupported=BLIND |
        {"continuation": "ids, speech and what was heard have to be of one length",
         "chunked": "it makes embeddings of its prompt, and upstream feeds all of them with each chunk",
         "assisted": "its step makes the sound codes of one position, and drafts are several"}),
]
# fmt: on


# -------------------------------------------------------------------------- long sound


def whisper_longform(seed: int = 0) -> nn.Module:
    """A Whisper that transcribes more than its window of 40 frames, with time stamps.

    Ids 48 to 55 are start, two languages, two tasks, previous start, no speech, no time stamps;
    56 to 76 are time stamps, 0.02 s apart.  ``generate`` needs ``return_timestamps=True``.
    """
    generation = {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 49, "<|fr|>": 50},
        "task_to_id": {"translate": 51, "transcribe": 52},
        "prev_sot_token_id": 53,
        "no_timestamps_token_id": 55,
        "max_initial_timestamp_index": 10,
        "alignment_heads": [[0, 0], [1, 1]],
        "return_timestamps": True,
    }
    sizes = WHISPER | {"vocab_size": 77, "decoder_start_token_id": 48, "median_filter_width": 3}
    make_config = config("WhisperConfig", **sizes)
    return Tiny("WhisperForConditionalGeneration", make_config, seed, generation=generation)()


def long_sound(rows: int, seed: int, frames: int = 100) -> Inputs:
    """``input_features (rows, 8, frames)`` and a mask; each row is 20 frames shorter than the last."""
    mask = torch.ones(rows, frames, dtype=torch.long)
    for row in range(rows):
        mask[row, frames - 20 * row :] = 0
    features = noise(rows, 8, frames, seed=seed) * mask[:, None]
    return {"input_features": features, "attention_mask": mask}


# -------------------------------------------------------------------------- what tests import

#: Its forward reads images from the output of its text model in 5.24, which has none.
BROKEN = ("llama4",) if IS_5_24 else ()
ENCODER_FAMILIES: list[Family] = [
    row for row in (*TEXT, *VISION, *SPEECH, *AUDIO) if row.name not in BROKEN
]

#: Classes that are not here, each with the reason; for folders see ``test_families``.
NOT_BUILT: dict[str, str] = {
    "rag_sequence": "no GenerationMixin: calls generate of the BART inside it",
    "speecht5_tts": "no GenerationMixin: its own loop over mel frames",
    "parakeet_ctc": "no decoding: an argmax of one forward pass",
    "gemma3n": "its vision tower needs timm",
    "bark": "chains three models, of which bark_semantic is one",
    "seamless_m4t_tts": "the text decoder of seamless_m4t, then one without a choice of tokens",
}
