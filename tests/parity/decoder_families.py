"""Decoder-only text families, one row each: name, class stem, what differs from ``SIZES``."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any

import transformers
from torch import nn

from tests.parity.family import MODES, Family, Inputs, seeded, sharpen, text_prompt

VOCAB = 96

#: Sizes shared by all families; a config takes those that it declares, under its own names.
SIZES: dict[str, Any] = {
    # vocabulary and special tokens
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # weights: above 1 / sqrt(hidden_size), so that layers, not embeddings, decide the next token
    "initializer_range": 0.35,
    "init_std": 0.35,
    # shape
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "is_decoder": True,
    # decoders of encoder-decoder models
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
    # windows shorter than prompt + output
    "sliding_window": 6,
    "attention_window_size": 6,
    "attention_chunk_size": 6,
    "window_size": 6,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    # state-space layers
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "use_mamba_kernels": False,
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}

#: Layer types of two-layer models with both kinds of layer.
SLIDING = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]

# What upstream rejects or breaks on: option -> reason.
NO_EMBEDS = {"embeds": "the model does not take inputs_embeds while generating"}
STATEFUL = {"assisted": "a state that cannot be rolled back"}
NO_BEAMS = {"beams": "the state cannot be reordered"}
OWN_CACHE = {
    "chunked": "upstream sees no cache under the model's own cache name",
    "assisted": "upstream sees no cache under the model's own cache name",
    "continuation": "upstream does not take the model's own cache back",
}
NO_CACHE = {
    "chunked": "the model has no cache",
    "assisted": "the model has no cache",
    "continuation": "the model has no cache",
}
LEFT_PADS = {"padding": "pads count as trailing, so a left-padded row gives constant logits"}
DRAFTS = {"assisted": "upstream's output changes with drafted tokens"}
NO_STATIC = {"static": "the mask is built for the prompt, not for the whole static cache"}
ONE_TOKEN = "with a filled cache the decoder takes one token at a time"
STATES = OWN_CACHE | STATEFUL | {"attentions": "there are no attentions"}

BLT_PART = {
    key: SIZES[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "initializer_range",
    )
}


@dataclasses.dataclass(frozen=True)
class Build:
    """Builds a tiny model: ``SIZES``, then ``overrides``, go into the config."""

    config: str
    model: str
    overrides: dict[str, Any]
    seed: int
    margin: float

    def __call__(self) -> nn.Module:
        config_class = getattr(transformers, self.config)
        fields = {field.name for field in dataclasses.fields(config_class)}
        sizes: dict[str, Any] = {}
        for key, value in SIZES.items():
            own = key if key in fields else config_class.attribute_map.get(key, key)
            if own in fields or key.endswith("_token_id"):
                sizes[own] = value
        config = config_class(**deepcopy(sizes | self.overrides), attn_implementation="eager")
        model_class = getattr(transformers, self.model)
        return seeded(lambda: sharpen(model_class(config), self.margin), self.seed)


def prompt(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """Random ids, whatever the model."""
    return text_prompt(VOCAB, rows, padded, seed)


def text(
    name: str,
    stem: str,
    head: str = "ForCausalLM",
    *,
    config: str = "Config",
    unsupported: dict[str, str] | None = None,
    seed: int = 0,
    margin: float = 3.0,
    **overrides: Any,
) -> Family:
    """The family of ``transformers.<stem><head>``, configured by ``<stem><config>``.

    ``seed`` is one of the first few that give clear margins and output that does not repeat
    itself; ``margin`` is the deviation of the logits; ``overrides`` go into the config.
    """
    unsupported = unsupported or {}
    modes = MODES
    if "beams" in unsupported:
        modes = tuple(mode for mode in modes if "beam" not in mode)
    build = Build(stem + config, stem + head, overrides, seed, margin)
    return Family(name, "decoder", build, prompt, modes, unsupported)


#: All rows, also those that the installed transformers may be too old for.
ROWS: list[Family] = [
    # plain decoders, rotary or relative positions
    text("apertus", "Apertus", seed=6),
    text("arcee", "Arcee", seed=7),
    text("bitnet", "BitNet", seed=1),
    text("bloom", "Bloom", initializer_range=0.2, seed=6),
    text("codegen", "CodeGen", rotary_dim=8, seed=7),
    text("cohere", "Cohere", logit_scale=1.0, seed=7),
    text(
        "cpmant",
        "CpmAnt",
        dim_head=8,
        dim_ff=48,
        prompt_length=4,
        prompt_types=4,
        segment_types=4,
        init_std=0.5,
        seed=3,
        unsupported=NO_STATIC
        | NO_EMBEDS
        | {"chunked": "the prompt embedding is prepended to every chunk"}
        | DRAFTS,
    ),
    text("cwm", "Cwm", layer_types=SLIDING, seed=6),
    text("diffllama", "DiffLlama", initializer_range=0.2),
    text("doge", "Doge", seed=4),
    text("emu3_text", "Emu3", config="TextConfig", seed=6),
    text("ernie4_5", "Ernie4_5", initializer_range=0.2, seed=3),
    text("falcon", "Falcon", seed=6),
    text(
        "falcon_alibi",
        "Falcon",
        alibi=True,
        seed=7,
        unsupported={"static": "alibi is built from the two-dimensional mask only"},
    ),
    text("falcon_40b", "Falcon", new_decoder_architecture=True, num_kv_heads=2),
    text("flint", "Flint", layer_types=SLIDING),
    text("gemma", "Gemma", seed=3),
    text("glm", "Glm", initializer_range=0.5, seed=5),
    text("glm4", "Glm4"),
    text("gpt_neox", "GPTNeoX", seed=6),
    text("gpt_neox_japanese", "GPTNeoXJapanese", seed=5),
    text("gptj", "GPTJ", rotary_dim=8, seed=2),
    text("granite", "Granite", initializer_range=0.2, seed=2),
    text("helium", "Helium", seed=3),
    text("hrm_text", "HrmText", seed=3),
    text("hunyuan_v1_dense", "HunYuanDenseV1", seed=2),
    text("hyperclovax", "HyperCLOVAX", seed=3),
    text("jais2", "Jais2", seed=3),
    text("llama", "Llama", seed=1),
    text("ministral3", "Ministral3"),
    text("mllama_text", "Mllama", config="TextConfig"),
    text("modernbert-decoder", "ModernBertDecoder", local_attention=12, seed=2),
    text("mpt", "Mpt", use_cache=True, seed=6),
    text("nanochat", "NanoChat", initializer_range=0.2, seed=5),
    text("nemotron", "Nemotron", seed=2),
    text("olmo", "Olmo", seed=6),
    text("olmo2", "Olmo2", initializer_range=0.2),
    text("persimmon", "Persimmon", initializer_range=0.2, seed=5),
    text("phi", "Phi", initializer_range=0.2),
    text("phi3", "Phi3", initializer_range=0.2, seed=1),
    text(
        "phi4_multimodal",
        "Phi4Multimodal",
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
            "input_size": 8,
        },
        seed=5,
    ),
    text("qwen2", "Qwen2", seed=2),
    text("qwen2_sliding", "Qwen2", use_sliding_window=True, layer_types=SLIDING, seed=7),
    text("qwen3", "Qwen3", seed=2),
    text("seed_oss", "SeedOss", seed=2),
    text("smollm3", "SmolLM3", seed=1),
    text("stablelm", "StableLm", seed=4),
    # learned or sinusoidal absolute positions
    text("biogpt", "BioGpt", seed=3),
    text(
        "ctrl", "CTRL", "LMHeadModel", dff=48, initializer_range=0.5, seed=5, unsupported=NO_EMBEDS
    ),
    text(
        "flaubert",
        "Flaubert",
        "WithLMHeadModel",
        mask_token_id=5,
        embed_init_std=0.2,
        causal=True,
        seed=7,
        unsupported=NO_CACHE | NO_EMBEDS | LEFT_PADS,
    ),
    text("gpt2", "GPT2", "LMHeadModel", initializer_range=0.2, seed=1),
    text("gpt_bigcode", "GPTBigCode"),
    text("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]]),
    text("imagegpt", "ImageGPT", "ForCausalImageModeling", seed=1),
    text("openai-gpt", "OpenAIGPT", "LMHeadModel", unsupported=NO_CACHE | NO_EMBEDS),
    text("opt", "OPT", seed=1),
    text("xglm", "XGLM", seed=1),
    text(
        "xlm",
        "XLM",
        "WithLMHeadModel",
        mask_token_id=5,
        embed_init_std=0.2,
        causal=True,
        seed=7,
        unsupported=NO_CACHE | NO_EMBEDS | LEFT_PADS,
    ),
    # sliding windows
    text("afmoe", "Afmoe", layer_types=SLIDING, seed=3),
    text("cohere2", "Cohere2", logit_scale=1.0, layer_types=SLIDING, seed=5),
    text(
        "cohere_compass_text",
        "CohereCompass",
        config="TextConfig",
        logit_scale=1.0,
        layer_types=SLIDING,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in SLIDING
        },
        initializer_range=0.2,
        seed=2,
    ),
    text("exaone4", "Exaone4", layer_types=SLIDING, seed=2),
    text("gemma2", "Gemma2"),
    text("gemma3_text", "Gemma3", config="TextConfig", layer_types=SLIDING, seed=2),
    text(
        "gemma3n_text",
        "Gemma3n",
        config="TextConfig",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=2 * SLIDING,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=8,
        initializer_range=0.2,
    ),
    text(
        "gemma4_text",
        "Gemma4",
        config="TextConfig",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=2 * SLIDING,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        seed=7,
    ),
    text(
        "gemma4_text_moe",
        "Gemma4",
        config="TextConfig",
        layer_types=SLIDING,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        top_k_experts=2,
        seed=4,
    ),
    text(
        "gemma4_unified_text",
        "Gemma4Unified",
        config="TextConfig",
        layer_types=SLIDING,
        global_head_dim=16,
        seed=2,
    ),
    text("granite_swa", "GraniteSWA", seed=2),
    text("ministral", "Ministral", layer_types=SLIDING, seed=1),
    text("mistral", "Mistral", seed=3),
    text("moshi", "Moshi", seed=1, unsupported=DRAFTS),
    text("olmo3", "Olmo3", layer_types=SLIDING, seed=3),
    text("starcoder2", "Starcoder2"),
    text("vaultgemma", "VaultGemma", initializer_range=0.2, seed=1),
    # chunked attention
    text(
        "llama4_text",
        "Llama4",
        config="TextConfig",
        no_rope_layer_interval=2,
        initializer_range=0.2,
        seed=1,
    ),
    # mixtures of experts
    text("aria_text", "AriaText", seed=5),
    text("beam", "Beam", mlp_layer_types=["dense", "sparse"], seed=1),
    text("cohere2_moe", "Cohere2Moe", logit_scale=1.0, layer_types=SLIDING, seed=3),
    text(
        "dbrx",
        "Dbrx",
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        seed=2,
    ),
    text("dots1", "Dots1", layer_types=SLIDING),
    text("ernie4_5_moe", "Ernie4_5_Moe", seed=2),
    text("exaone_moe", "ExaoneMoe", layer_types=SLIDING),
    text("flex_olmo", "FlexOlmo", seed=2),
    text("glm4_moe", "Glm4Moe", seed=3),
    text("gpt_oss", "GptOss", seed=4),
    text("granitemoe", "GraniteMoe", initializer_range=0.2, seed=1),
    text("granitemoe_swa", "GraniteMoeSWA"),
    text("granitemoeshared", "GraniteMoeShared", initializer_range=0.2, seed=1),
    text("hunyuan_v1_moe", "HunYuanMoEV1", seed=3),
    text("hy_v3", "HYV3", initializer_range=0.2, seed=1),
    text(
        "inkling_text",
        "Inkling",
        config="TextConfig",
        layer_types=["hybrid_sliding", "hybrid"],
        logits_mup_width_multiplier=1.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        rel_extent=16,
        initializer_range=0.2,
        seed=1,
        unsupported=NO_STATIC,
    ),
    text(
        "inkling2_text",
        "Inkling2",
        config="TextConfig",
        layer_types=["hybrid_sliding", "hybrid"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        rel_extent=16,
        seed=6,
        unsupported=NO_STATIC,
    ),
    text("jetmoe", "JetMoe"),
    text(
        "lara_mini",
        "LaraMini",
        layer_types=["linear_attention", *SLIDING],
        num_hidden_layers=3,
        unsupported=STATEFUL,
    ),
    text("kolibri1", "Kolibri1", layer_types=SLIDING),
    text("laguna", "Laguna", layer_types=SLIDING),
    text("mellum", "Mellum", layer_types=SLIDING, seed=6),
    text("mimo_v2_flash", "MiMoV2Flash"),
    text("minimax_m2", "MiniMaxM2"),
    text(
        "minimax_m3_vl_text",
        "MiniMaxM3VL",
        config="TextConfig",
        dense_intermediate_size=48,
        shared_intermediate_size=16,
        rotary_dim=8,
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_block_size=4,
        index_topk_blocks=2,
        initializer_range=0.2,
        seed=3,
    ),
    text("mixtral", "Mixtral", seed=2),
    text("olmoe", "Olmoe", seed=7),
    text("phimoe", "Phimoe", seed=5),
    text("qwen2_moe", "Qwen2Moe", seed=4),
    text("qwen3_moe", "Qwen3Moe", seed=5),
    text("solar_open", "SolarOpen", seed=1),
    text(
        "zaya",
        "Zaya",
        num_experts_per_tok=1,
        router_hidden_size=16,
        layer_types=["hybrid_sliding", "hybrid"],
        initializer_range=0.2,
        seed=1,
        unsupported=NO_STATIC | STATEFUL,
    ),
    # latent attention
    text("axk1", "AXK1", num_key_value_heads=4),
    text("axk2", "AXK2", num_key_value_heads=4, seed=5, unsupported=DRAFTS),
    text("deepseek_v2", "DeepseekV2", num_key_value_heads=4, initializer_range=0.2),
    text("deepseek_v3", "DeepseekV3", num_key_value_heads=4, seed=7),
    text("deepseek_v32", "DeepseekV32", num_key_value_heads=4, seed=5, unsupported=DRAFTS),
    text(
        "deepseek_v4",
        "DeepseekV4",
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        hc_mult=2,
        o_groups=2,
        o_lora_rank=8,
        seed=6,
        unsupported=NO_EMBEDS
        | STATEFUL
        | {"static": "there is no static layer for compressed attention"},
    ),
    text(
        "dots3_note_text",
        "Dots3Note",
        config="TextConfig",
        num_key_value_heads=4,
        shared_experts_intermediate_size=16,
        seed=5,
        unsupported=DRAFTS,
    ),
    text("glm4_moe_lite", "Glm4MoeLite", num_key_value_heads=4, seed=7),
    text("glm_moe_dsa", "GlmMoeDsa", num_key_value_heads=4, seed=5, unsupported=DRAFTS),
    text("hy_v4", "HYV4", num_key_value_heads=4, seed=1, unsupported=DRAFTS),
    text(
        "longcat_flash",
        "LongcatFlash",
        num_layers=1,
        num_key_value_heads=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    text("minicpm3", "MiniCPM3", num_key_value_heads=4, dim_model_base=32, scale_emb=1.0, seed=1),
    text("mistral4", "Mistral4", num_key_value_heads=4, seed=1),
    text("youtu", "Youtu", num_key_value_heads=4, initializer_range=0.2, seed=1),
    # state-space models
    text("falcon_mamba", "FalconMamba", initializer_range=0.2, unsupported=STATES),
    text("mamba", "Mamba", initializer_range=0.2, seed=2, unsupported=STATES),
    text("mamba2", "Mamba2", num_heads=8, n_groups=2, state_size=8, unsupported=STATES),
    # hybrids of attention and state-space or convolution layers
    text("bamba", "Bamba", attn_layer_indices=[1], seed=3, unsupported=STATEFUL | NO_EMBEDS),
    text("falcon_h1", "FalconH1", mamba_d_ssm=32, seed=4, unsupported=STATEFUL | NO_EMBEDS),
    text(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        layer_types=LINEAR,
        shared_intermediate_size=16,
        seed=5,
        unsupported=STATEFUL,
    ),
    text("jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1, unsupported=STATEFUL),
    text("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    text("lfm2_moe", "Lfm2Moe", layer_types=["conv", "full_attention"], num_dense_layers=1, seed=4),
    text("lfm3", "Lfm3", layer_types=["conv", *SLIDING], num_hidden_layers=3, seed=2),
    text(
        "nemotron_h",
        "NemotronH",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        moe_shared_expert_intermediate_size=16,
        seed=1,
        unsupported=STATEFUL | NO_EMBEDS,
    ),
    text(
        "zamba",
        "Zamba",
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "linear_attention", "hybrid"],
        seed=1,
        unsupported=STATEFUL | NO_EMBEDS,
    ),
    text(
        "zamba2",
        "Zamba2",
        layers_block_type=["linear_attention", "hybrid"],
        n_mamba_heads=4,
        adapter_rank=8,
        seed=5,
        unsupported=STATEFUL | NO_EMBEDS,
    ),
    # linear attention and recurrence
    text(
        "bailing_hybrid",
        "BailingHybrid",
        layer_types=LINEAR,
        num_key_value_heads=4,
        unsupported=STATEFUL,
    ),
    text(
        "kimi_linear", "KimiLinear", layer_types=LINEAR, num_key_value_heads=4, unsupported=STATEFUL
    ),
    text(
        "minimax",
        "MiniMax",
        unsupported={
            "chunked": OWN_CACHE["chunked"],
            "assisted": OWN_CACHE["assisted"],
            "continuation": "takes no cache but its own",
        },
    ),
    text("olmo_hybrid", "OlmoHybrid", seed=1, unsupported=STATEFUL),
    text(
        "qwen3_5_text",
        "Qwen3_5",
        config="TextConfig",
        layer_types=LINEAR,
        initializer_range=0.2,
        seed=2,
        unsupported=STATEFUL,
    ),
    text(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        config="TextConfig",
        layer_types=LINEAR,
        unsupported=STATEFUL,
    ),
    text("qwen3_next", "Qwen3Next", layer_types=LINEAR, seed=3, unsupported=STATEFUL),
    text(
        "qwen4_exp_text",
        "Qwen4Exp",
        config="TextConfig",
        margin=6.0,
        layer_types=["linear_attention", "indexed_attention"],
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
        ple_layer_ids=[1],
        heads_per_ngram=2,
        ngram_vocab_size_base=64,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=2,
        initializer_range=0.2,
        unsupported=STATEFUL,
    ),
    text(
        "recurrent_gemma",
        "RecurrentGemma",
        num_hidden_layers=3,
        seed=5,
        unsupported=STATEFUL | {"chunked": "the output carries no cache"},
    ),
    text("rwkv", "Rwkv", margin=6.0, seed=5, unsupported=OWN_CACHE | STATEFUL | NO_BEAMS),
    text("xlstm", "xLSTM", hidden_size=128, num_heads=4, seed=1, unsupported=STATES | NO_BEAMS),
    # bytes grouped into patches
    text(
        "blt",
        "Blt",
        num_hidden_layers=2,
        encoder_hash_byte_group_vocab=64,
        encoder_hash_byte_group_size=[3],
        patcher_config=BLT_PART,
        encoder_config=BLT_PART | {"hidden_size_global": 32},
        decoder_config=BLT_PART | {"hidden_size_global": 32},
        global_config=BLT_PART,
        seed=7,
        unsupported=NO_STATIC | NO_EMBEDS | {"assisted": "byte patches are not rolled back"},
    ),
    # layers that are run several times
    *(
        text(
            name,
            "Dory",
            layer_types=[*SLIDING, *SLIDING],
            num_hidden_layers=4,
            n_input_layers=1,
            n_output_layers=1,
            recurrent_kv_cache_mode=mode,
            unsupported=unsupported,
        )
        for name, mode, unsupported in (
            ("dory", "per_loop", {}),
            ("dory_last_loop", "last_loop", NO_STATIC),
        )
    ),
    text(
        "inkling2_loop_text",
        "Inkling2Loop",
        config="TextConfig",
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        num_hidden_layers=4,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        rel_extent=16,
        n_layers_per_attn_res_block=1,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        loop_num_passes=2,
        loop_gate_rank=8,
        unsupported=NO_STATIC,
    ),
    # caches under other names
    text(
        "reformer",
        "Reformer",
        "ModelWithLMHead",
        attn_layers=["local", "lsh"],
        attention_head_size=8,
        feed_forward_size=48,
        axial_pos_embds=False,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=64,
        num_buckets=2,
        hash_seed=0,
        seed=5,
        unsupported=OWN_CACHE | NO_EMBEDS,
    ),
    text(
        "xlnet",
        "XLNet",
        "LMHeadModel",
        d_inner=48,
        initializer_range=0.5,
        seed=6,
        unsupported=OWN_CACHE | NO_EMBEDS,
    ),
    text("apertus1p5_text", "Apertus1p5Text", output_vocab_size=90, seed=1),
    # encoders and decoders of other architectures as language models
    text("bart", "Bart", init_std=0.2, seed=3),
    text("bert", "Bert", "LMHeadModel", initializer_range=0.2, seed=3),
    text("bert-generation", "BertGeneration", "Decoder", initializer_range=0.2, seed=4),
    text("big_bird", "BigBird", initializer_range=0.2, seed=2),
    text("bigbird_pegasus", "BigBirdPegasus"),
    text("blenderbot", "Blenderbot", encoder_no_repeat_ngram_size=0, seed=1),
    text("blenderbot-small", "BlenderbotSmall", init_std=0.2),
    text("camembert", "Camembert", initializer_range=0.2, seed=2),
    text("data2vec-text", "Data2VecText", initializer_range=0.2, seed=1),
    text("electra", "Electra", embedding_size=16, seed=1),
    text("ernie", "Ernie", initializer_range=0.2, seed=3),
    text("marian", "Marian", init_std=0.5),
    text("mbart", "MBart", seed=2),
    text("megatron-bert", "MegatronBert"),
    text("mvp", "Mvp", init_std=0.2, seed=3),
    text("pegasus", "Pegasus", init_std=0.5, seed=4),
    text("plbart", "PLBart", init_std=0.2, seed=5),
    text(
        "prophetnet",
        "ProphetNet",
        init_std=0.2,
        seed=1,
        unsupported=NO_STATIC | {"chunked": ONE_TOKEN, "assisted": ONE_TOKEN},
    ),
    text(
        "rembert",
        "RemBert",
        input_embedding_size=16,
        output_embedding_size=32,
        initializer_range=0.5,
        seed=6,
    ),
    text("roberta", "Roberta", initializer_range=0.2, seed=1),
    text("roberta-prelayernorm", "RobertaPreLayerNorm", initializer_range=0.5, seed=1),
    text(
        "roc_bert",
        "RoCBert",
        pronunciation_vocab_size=8,
        pronunciation_embed_dim=8,
        shape_vocab_size=8,
        shape_embed_dim=8,
        initializer_range=0.2,
        seed=2,
        unsupported=NO_EMBEDS,
    ),
    text("roformer", "RoFormer", initializer_range=0.2, seed=4),
    text("trocr", "TrOCR", init_std=0.2, seed=3),
    text("whisper_decoder", "Whisper", init_std=0.5, seed=7),
    text("xlm-roberta", "XLMRoberta", initializer_range=0.2, seed=2),
    text("xlm-roberta-xl", "XLMRobertaXL", initializer_range=0.5, seed=7),
    text("xmod", "Xmod", default_language="en_XX", initializer_range=0.2, seed=1),
]

INSTALLED = set(dir(transformers))
DECODER_FAMILIES: list[Family] = [row for row in ROWS if row.build.model in INSTALLED]

#: Families that transformers loads as causal language models and that are not here: reason.
NOT_BUILT: dict[str, str] = {
    row.name: f"transformers {transformers.__version__} does not have it yet"
    for row in ROWS
    if row.build.model not in INSTALLED
} | {
    "fuyu": "reads images, see encoder_families",
    "gemma3": "reads images, see encoder_families; its text decoder is gemma3_text",
    "gemma3n": "its vision tower needs timm; its text decoder is gemma3n_text",
    "gemma4": "reads images; its text decoder is gemma4_text",
    "gemma4_unified": "reads images; its text decoder is gemma4_unified_text",
    "gemma4_assistant": "drafts from the keys and values of a gemma4, cannot generate alone",
    "gemma4_unified_assistant": "drafts from the keys and values of a gemma4_unified",
    "git": "reads images, see encoder_families",
    "got_ocr2": "reads images, see encoder_families",
    "moss_transcribe_diarize": "reads sound; its text decoder is a qwen3",
    "musicgen": "reads and writes sound codes, see encoder_families",
    "musicgen_melody": "reads and writes sound codes, see encoder_families",
}
