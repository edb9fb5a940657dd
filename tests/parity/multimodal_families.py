"""More tiny models that read images, videos or sound: one of each folder of transformers."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from tests.parity.decoder_families import DRAFTS, STATEFUL
from tests.parity.encoder_families import (
    AUDIO_ENCODER,
    BART,
    BERT,
    BLIND,
    CLIP,
    CLIP_LLAMA,
    EMBEDDED,
    FLOWING,
    GRANITE_SPEECH,
    LLAMA,
    MEDIA,
    MEDIA2,
    NO_EMBEDS,
    NO_IDS,
    NO_PLACES,
    ONE_BEAM,
    PAD,
    PLACE,
    QWEN,
    QWEN2_AUDIO_ENCODER,
    QWEN_VIT,
    SIGLIP,
    SLIDING,
    SOUND,
    SPECIAL,
    TOKENIZER,
    TOKENS_ONLY,
    UNSPLIT,
    VIT,
    VOCAB,
    WAV2VEC2,
    MakeMedia,
    Sizes,
    audio,
    ending,
    image,
    images,
    like,
    mel,
    mel_and_mask,
    noise,
    only,
    patches,
    samples,
    sized_image,
    speech,
    text,
    vision,
    within,
)
from tests.parity.family import Family, Inputs

MOE: Sizes = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
QWEN_TEXT: Sizes = QWEN["text_config"]
#: Latent attention, a dense layer before one of experts.
LATENT: Sizes = (
    LLAMA
    | MOE
    | {
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    }
)


# -------------------------------------------------------------------------- media


def patch_rows(*shape: int, grid: str = "image_grid_thw", **more: int) -> MakeMedia:
    """Images of 4 x 4 patches of ``shape`` each, row after row; ``more`` are numbers of each image."""
    dimensions = [1, 4, 4][-len(grid.rpartition("_")[2]) :]

    def media(rows: int, seed: int) -> Inputs:
        return {
            "pixel_values": noise(rows * 16, *shape, seed=seed),
            grid: torch.tensor([dimensions] * rows),
            **{name: torch.full((rows,), value) for name, value in more.items()},
        }

    return media


def two_resolutions(rows: int, seed: int) -> Inputs:
    """One image a row, in 8 x 8 and in 16 x 16 pixels."""
    return image()(rows, seed) | {"high_res_pixel_values": noise(rows, 3, 16, 16, seed=seed + 1)}


def masked_tiles(rows: int, seed: int) -> Inputs:
    """Two tiles of 16 x 16 pixels a row, and a mask of tiles."""
    pixels = noise(rows, 2, 3, 16, 16, seed=seed)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(rows, 2, dtype=torch.bool)}


def video(size: int = 8, frames: int = 2) -> MakeMedia:
    """One video a row: ``pixel_values_videos (rows, frames, 3, size, size)``."""
    return lambda rows, seed: {"pixel_values_videos": noise(rows, frames, 3, size, size, seed=seed)}


def asked_video(rows: int, seed: int) -> Inputs:
    """A video of two frames, and a question that the bridge between the two models reads as well."""
    pixels = noise(rows, 2, 3, 8, 8, seed=seed)
    return {"pixel_values": pixels, "qformer_input_ids": torch.full((rows, 3), 7)}


def packed_strip(rows: int, seed: int) -> Inputs:
    """Images of 4 x 4 patches, packed side by side into one strip as high as a patch."""
    strip = noise(1, 3, 4, rows * 16 * 4, seed=seed)
    return {"pixel_values": strip, "target_sizes": torch.tensor([[4, 4]] * rows)}


def wide_tiles(rows: int, seed: int) -> Inputs:
    """An overview and one tile of 16 x 16 pixels."""
    sizes = torch.tensor([[16, 16]] * rows)
    return {"pixel_values": noise(rows, 2, 3, 16, 16, seed=seed), "image_sizes": sizes}


def pooled_patches(rows: int, seed: int) -> Inputs:
    """One crop of 4 x 4 flattened patches a row, of which 2 x 2 are pooled to a token."""
    first = torch.tensor([[0], [2], [8], [10]]) + torch.tensor([0, 1, 4, 5])
    crops = 16 * torch.arange(rows)[:, None, None]
    return {
        "pixel_values": noise(rows, 16, 48, seed=seed),
        "image_token_pooling": (crops + first).flatten(0, 1),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * rows),
        "image_num_crops": torch.ones(rows, dtype=torch.long),
    }


def proteins(model: nn.Module, rows: int, padded: bool, seed: int) -> Inputs:
    """A question and a protein of six amino acids."""
    ids = torch.randint(5, VOCAB, (rows, 6), generator=torch.Generator().manual_seed(seed))
    given = {"protein_input_ids": ids, "protein_attention_mask": torch.ones_like(ids)}
    return text(model, rows, padded, seed) | given


def conditioning(rows: int, seed: int) -> Inputs:
    """What CLVP's conditioning encoder makes of a text and a voice: ``(rows, 4, 16)``."""
    return {"conditioning_embeds": noise(rows, 4, 16, seed=seed)}


SAM: Sizes = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 32,
    "downsample_channels": [8, 16],
}


def frames_and_mask(bins: int, frames: int) -> MakeMedia:
    """``input_features (rows, frames, bins)`` and a mask of ones ``(rows, frames)``."""

    def media(rows: int, seed: int) -> Inputs:
        mask = torch.ones(rows, frames, dtype=torch.long)
        return mel(bins=bins, frames=frames)(rows, seed) | {"input_features_mask": mask}

    return media


# fmt: off
IMAGES: list[Family] = [
    vision("glm46v", "Glm46V", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": like("glm4v_text", QWEN_TEXT),
        "vision_config": like("glm4v_vision", QWEN_VIT, image_size=16)}, seed=6, unsupported=NO_PLACES),
    vision("glm4v_moe", "Glm4vMoe", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": QWEN_TEXT | MOE | {"rope_parameters": QWEN_TEXT["rope_parameters"] |
        {"partial_rotary_factor": 1.0}}, "vision_config": QWEN_VIT | {"image_size": 16}},
        seed=1, unsupported=NO_PLACES),
    vision("glm_ocr", "GlmOcr", within(patches, 4, "mm_token_type_ids"), QWEN |
        {"vision_config": QWEN_VIT | {"image_size": 16}}, seed=11, unsupported=NO_PLACES),
    vision("paddleocr_vl", "PaddleOCRVL", within(patch_rows(3, 4, 4), 4, "mm_token_type_ids"), QWEN |
        {"vision_config": VIT | {"image_size": 16}}, seed=3, unsupported=NO_PLACES),
    vision("ernie4_5_vl_moe", "Ernie4_5_VLMoe", within(patch_rows(48), 4, "mm_token_type_ids"),
        QWEN | {"text_config": QWEN_TEXT | {"moe_num_experts": 2, "moe_k": 1,
        "moe_intermediate_size": [16, 16], "moe_num_shared_experts": 1},
        "vision_config": QWEN_VIT}, unsupported=NO_PLACES),
    vision("exaone4_5", "Exaone4_5_", within(patches, 4), QWEN | {
        "text_config": like("exaone4", SLIDING), "vision_config": QWEN_VIT | {"window_size": 16,
        "fullatt_block_indexes": [1], "num_key_value_heads": 2}}, seed=6, unsupported=NO_PLACES),
    vision("video_llama_3", "VideoLlama3", within(patch_rows(48, image_merge_sizes=2), 4), QWEN | {
        "text_config": like("qwen2"), "vision_config": VIT}, seed=1, unsupported=NO_PLACES),
    vision("lfm3_vl", "Lfm3Vl", within(patches, 4), QWEN | {"text_config": like("lfm3", SLIDING),
        "tie_word_embeddings": False,
        "vision_config": VIT | {"num_key_value_heads": 2}, "projector_hidden_size": 16},
        seed=1, unsupported=NO_PLACES),
    vision("hyperclovax_vision_v2", "HyperCLOVAXVisionV2", within(patches, 4), QWEN | {
        "text_config": like("hyperclovax"), "tie_word_embeddings": False, "vision_config": like("qwen2_5_vl_vision", QWEN_VIT,
        window_size=16, fullatt_block_indexes=[1])}, seed=11, unsupported=NO_PLACES),
    vision("hy_v4_vl", "HYV4VL", within(patch_rows(48), 6, "mm_token_type_ids"), QWEN | {
        "text_config": LATENT | {"rope_parameters": QWEN_TEXT["rope_parameters"], "head_dim": 8},
        "vision_config": VIT | {"out_hidden_size": 16, "max_image_size": 16}}, seed=1, unsupported=NO_PLACES | DRAFTS),
    vision("hunyuan_vl", "HunYuanVL", within(patch_rows(48), 8), QWEN | {"vision_config": VIT |
        {"out_hidden_size": 16, "text_hidden_size": 16, "max_image_size": 16,
        "min_image_size": 8, "max_vit_seq_len": 16, "img_max_token_num": 16}},
        seed=2, unsupported=NO_PLACES),
    vision("kimi_k25", "Kimi_K25", within(patch_rows(3, 4, 4), 4), QWEN | {
        "text_config": like("deepseek_v3", LATENT), "vision_config": VIT | {"pos_emb_height": 4,
        "pos_emb_width": 4}, "projection_hidden_size": 16}, seed=12, unsupported=NO_PLACES),
    vision("cosmos3_edge", "Cosmos3Edge", within(patch_rows(48), 4, "mm_token_type_ids"), QWEN | {
        "vision_config": VIT | {"num_patches": 16}, "projector_hidden_size": 16},
        seed=3, unsupported=NO_PLACES),
    vision("cosmos3_omni", "Cosmos3Omni", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": like("qwen3_vl_text", QWEN_TEXT), "vision_config": like(
        "qwen3_vl_vision", QWEN_VIT, num_position_embeddings=16, deepstack_visual_indexes=[0])},
        seed=7, unsupported=NO_PLACES),
    vision("muse_glimmer", "MuseGlimmer", within(patches, 4), QWEN | {"text_config": SLIDING,
        "vision_config": VIT | {"pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 64, "projector_hidden_size": 16}, seed=11, unsupported=NO_PLACES),
    vision("muse_spark", "MuseSpark", within(patches, 4), QWEN | {"text_config": SLIDING | {
        "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "moe_hidden_size": 16, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": VIT | {"pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {"patch_sizes": (2, 2), "hidden_sizes": (8, 8), "depths": (1, 1),
        "num_hidden_layers": 2, "out_hidden_size": 16},
        "out_hidden_size": 64, "projector_hidden_size": 16}, seed=5, unsupported=NO_PLACES),
    vision("minicpmv4_6", "MiniCPMV4_6", within(packed_strip, 1), QWEN | {"text_config":
        like("qwen3"), "vision_config": VIT | {"image_size": 16}, "insert_layer_id": 0},
        seed=13, unsupported=NO_PLACES | STATEFUL),
    vision("minicpmv4_7", "MiniCPMV4_7", within(packed_strip, 1), QWEN | {"text_config":
        like("qwen3"), "vision_config": VIT | {"image_size": 16}, "insert_layer_id": 0},
        seed=13, unsupported=NO_PLACES | STATEFUL),
    vision("minicpm_ocr", "MiniCPMOcr", within(packed_strip, 4), QWEN | {"text_config":
        like("qwen3"), "vision_config": VIT | {"image_size": 16}, "insert_layer_id": 0},
        seed=1, unsupported=NO_PLACES | STATEFUL),
    vision("glm5_next", "Glm5Next", within(patches, 4, "mm_token_type_ids"), QWEN | {
        "text_config": LATENT | {"qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 4,
        "index_head_dim": 8, "index_n_heads": 2, "linear_head_dim": 8, "linear_num_heads": 2,
        "hc_mult": 2, "index_kpool": 2, "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"]}, "vision_config": QWEN_VIT | {"image_size": 16,
        "projection_intermediate_size": 16}}, seed=8, unsupported=NO_PLACES | STATEFUL),
    vision("mistral_large4", "MistralLarge4", within(sized_image, 4), PLACE | {
        "vision_config": like("pixtral", VIT, image_size=16, head_dim=8),
        "text_config": LATENT | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}},
        seed=9, unsupported=NO_PLACES | DRAFTS),
    vision("lighton_ocr", "LightOnOcr", within(sized_image, 4), PLACE | {
        "vision_config": like("pixtral", VIT, image_size=16, head_dim=8),
        "text_config": like("qwen3")}, seed=10, unsupported=NO_PLACES),
    vision("ovis2", "Ovis2", within(image(16), 4), PLACE | {"vision_config": VIT | {"image_size": 16, "vocab_size": 24, "hidden_stride": 2}, "text_config": like("qwen2"),
        "visual_indicator_token_ids": [55, 56, 57, 58, 59], "hidden_size": 16,
        "vocab_size": VOCAB}, seed=2, unsupported=NO_PLACES),
    vision("perception_lm", "PerceptionLM", within(images(16), 4), PLACE | {
        "vision_config": CLIP | {"image_size": 16, "model_args": {"embed_dim": 16}},
        "text_config": like("llama"), "projector_pooling_ratio": 2}, seed=11, unsupported=NO_PLACES),
    vision("qianfan_ocr", "QianfanOCR", within(image(16), 4), {"vision_config": VIT |
        {"image_size": [16, 16], "patch_size": [4, 4]}, "text_config": like("qwen3"),
        "image_token_id": MEDIA, "image_seq_length": 4}, seed=1, unsupported=NO_PLACES),
    vision("deepseek_vl_hybrid", "DeepseekVLHybrid", within(two_resolutions, 4), PLACE | {
        "vision_config": SIGLIP, "text_config": like("llama"), "high_res_vision_config": like(
        "sam_vision_model", VIT, image_size=16, output_channels=8, window_size=2,
        global_attn_indexes=[1], mlp_dim=32)}, seed=5, unsupported=NO_PLACES),
    vision("fast_vlm", "FastVlm", within(image(16), 4), PLACE | {"vision_config": like("resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "hidden_size": 16,
        "layer_type": "basic"}), "text_config": like("qwen2")}, seed=9, unsupported=NO_PLACES),
    vision("granite_docling", "GraniteDocling", within(masked_tiles, 8), {"vision_config": VIT |
        {"image_size": 16, "out_hidden_size": 16, "scale_factor": 2,
        "deepstack_visual_indexes": [0]}, "text_config": LLAMA, "image_token_id": MEDIA,
        "pad_token_id": PAD, "tie_word_embeddings": False}, seed=12, unsupported=NO_PLACES),
    vision("video_llava", "VideoLlava", within(video(), 10), CLIP_LLAMA |
        {"video_token_index": MEDIA, "image_token_index": MEDIA2, "vision_feature_layer": -1},
        seed=7, unsupported=NO_PLACES),
    vision("llava_next_video", "LlavaNextVideo", within(video(), 2), CLIP_LLAMA |
        {"video_token_index": MEDIA, "image_token_index": MEDIA2, "vision_feature_layer": -1,
        "image_grid_pinpoints": [[8, 8]]}, seed=9, unsupported=NO_PLACES),
    vision("instructblipvideo", "InstructBlipVideo", within(asked_video, 8), {
        "vision_config": VIT, "text_config": like("opt", ffn_dim=32, word_embed_proj_dim=16),
        "qformer_config": BERT | {"encoder_hidden_size": 16, "cross_attention_frequency": 1},
        "num_query_tokens": 4, "video_token_index": MEDIA}, seed=9, unsupported=EMBEDDED |
        NO_EMBEDS | {"chunked": "the mask is not split"}),
    vision("step3p7", "Step3p7", within(image(32), 4), {"vision_config": VIT | {"image_size": 32,
        "mlp_ratio": 2.0, "max_position_embeddings": 64}, "text_config": SLIDING | MOE |
        {"share_expert_dim": 16, "mlp_layer_types": ["dense", "sparse"]}, "image_token_id": MEDIA},
        seed=9, unsupported=NO_PLACES),
    vision("deepseek_ocr2", "DeepseekOcr2", within(image(32), 145), {"vision_config": {
        "sam_config": SAM, "encoder_config": LLAMA}, "text_config": LLAMA | MOE | {
        "n_shared_experts": 1, "max_position_embeddings": 256,
        "mlp_layer_types": ["dense", "sparse"]}, "image_token_id": MEDIA}, seed=2, unsupported=NO_PLACES),
    vision("unlimited_ocr", "UnlimitedOcr", within(image(32), 7), {"vision_config": {
        "sam_config": SAM, "encoder_config": VIT | {"image_size": 8, "num_channels": 16}}, "text_config": LLAMA |
        MOE | {"n_shared_experts": 1, "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse"]}, "image_token_id": MEDIA}, seed=7, unsupported=NO_PLACES),
    vision("granite4_vision", "Granite4Vision", within(wide_tiles, 10), PLACE | {
        "vision_config": SIGLIP | {"hidden_size": 64, "image_size": 16}, "text_config": LLAMA,
        "qformer_config": like("blip_2_qformer", BERT, num_hidden_layers=1, cross_attention_frequency=1),
        "image_grid_pinpoints": [[16, 16]], "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 1, 1, 1],
        "vision_feature_select_strategy": "full"}, seed=5, unsupported=NO_PLACES | UNSPLIT),
    vision("molmo2", "Molmo2", within(pooled_patches, 4, "mm_token_type_ids"), {"vision_config":
        VIT | {"num_key_value_heads": 2, "head_dim": 8, "image_size": [16, 16]}, "adapter_config":
        {"hidden_size": 16, "vision_feature_layer": [-1, -2], "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "text_hidden_size": 16},
        "text_config": LLAMA | {"additional_vocab_size": 8}, "image_patch_id": MEDIA},
        seed=9, unsupported=NO_PLACES),
    vision("pp_formulanet", "PPFormulaNet", only(image(32)), SPECIAL | {"text_config": BART |
        {"tie_word_embeddings": False}, "vision_config": SAM | {"post_conv_in_channels": 8,
        "post_conv_mid_channels": 8, "post_conv_out_channels": 16, "decoder_hidden_size": 16}},
        seed=2, unsupported=NO_IDS),
    vision("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", within(patch_rows(48, grid="image_grid_hw"), 4), {
        "vision_config": like("radio", VIT, image_size=16, max_img_size=16, num_registers=1, summary_idxs=[0],
        video_temporal_patch_size=2), "text_config":
        like("nemotron_h", LLAMA, num_hidden_layers=2, layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=2, mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=4), "vision_hidden_size": 16, "projector_hidden_size": 16,
        "image_token_id": MEDIA}, head="", config_class="NemotronH_Omni_Reasoning_V3_Config",
        seed=9, unsupported=NO_PLACES | STATEFUL),
    vision("evolla", "Evolla", proteins, LLAMA | {"protein_encoder_config": BERT | {
        "mask_token_id": 4}, "aligner_num_add_layers": 1, "resampler_depth": 1,
        "resampler_dim_head": 8, "resampler_heads": 2, "resampler_num_latents": 4,
        "use_cache": True}, head="ForProteinText2Text",
        unsupported={"static": "its cross-attention mask is as long as the prompt"}),
    vision("qwen2_5_omni", "Qwen2_5OmniThinker", within(patches, 4), QWEN | PLACE | {
        "video_token_index": MEDIA2, "audio_token_index": 62,
        "vision_config": QWEN_VIT | {"window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": QWEN2_AUDIO_ENCODER | {"n_window": 4, "output_dim": 16}},
        seed=7, unsupported=NO_PLACES),
    vision("qwen3_omni_moe", "Qwen3OmniMoeThinker", within(patches, 4), QWEN | {
        "audio_token_id": 62, "text_config": QWEN_TEXT |
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
        "vision_config": QWEN_VIT |
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, "audio_config":
        QWEN2_AUDIO_ENCODER | {"n_window": 4, "output_dim": 16, "downsample_hidden_size": 4}},
        seed=3, unsupported=NO_PLACES),
]

SOUNDS: list[Family] = [
    speech("fun_asr_nano", "FunAsrNano", within(frames_and_mask(16, 8), 8), SOUND | {"text_config": like("qwen3"),
        "audio_config": like("fun_asr_nano_encoder", BERT, num_mel_bins=8, num_stacked_frames=2,
        num_timestamp_prediction_layers=1, fsmn_kernel_size=3), "adaptor_config": {
        "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 4,
        "num_hidden_layers": 1, "projector_hidden_size": 16}}, seed=8, unsupported=NO_PLACES | UNSPLIT),
    speech("moss_transcribe_diarize", "MossTranscribeDiarize",
        within(mel_and_mask("input_features_mask", 16), 2), SOUND | {"text_config": like("qwen3"),
        "audio_config": AUDIO_ENCODER | {"max_source_positions": 8}, "audio_chunk_size": 64}, seed=12, unsupported=NO_PLACES | UNSPLIT),
    speech("qwen3_asr", "Qwen3ASR", within(mel_and_mask("input_features_mask", 100), 13), SOUND | {
        "pad_token_id": PAD, "text_config": like("qwen3"), "audio_config": like("qwen3_asr_encoder",
        QWEN2_AUDIO_ENCODER, n_window_infer=100, output_dim=16, downsample_hidden_size=4)},
        seed=3, unsupported=NO_PLACES | UNSPLIT),
    speech("musicflamingo", "MusicFlamingo", within(mel_and_mask("input_features_mask", 32), 8),
        SOUND | {"text_config": like("qwen2"),
        "audio_config": like("audioflamingo3_encoder", AUDIO_ENCODER), "audio_bos_token_id": 60, "audio_eos_token_id": 61}, seed=4, unsupported=NO_PLACES | UNSPLIT),
    speech("granite_speech_plus", "GraniteSpeechPlus", within(mel(frames=8), 4), GRANITE_SPEECH,
        seed=13, unsupported=NO_PLACES | UNSPLIT | NO_EMBEDS),
    speech("nemotron3_5_transcribe", "Nemotron3_5Transcribe",
        within(frames_and_mask(8, 16), 2), SOUND | {"text_config": like("qwen3"),
        "audio_config": {"asr_config": LLAMA | {"num_mel_bins": 8, "num_key_value_heads": 2},
        "diarization_config": {"model_type": "nemotron3_diarization", "audio_config": LLAMA |
        {"num_mel_bins": 8, "num_key_value_heads": 2}, "head_config": {"hidden_size": 16, "audio_hidden_size": 16}}},
        "word_timestamp_config": LLAMA | {"blank_token_id": 63, "num_key_value_heads": 2}},
        seed=1, unsupported=NO_PLACES | UNSPLIT | STATEFUL),
    speech("vibevoice_asr", "VibeVoiceAsr", within(samples(16, 1), 4), SOUND | {
        "text_config": like("qwen2"), "acoustic_tokenizer_encoder_config": TOKENIZER |
        {"model_type": "vibevoice_acoustic_tokenizer_encoder"},
        "semantic_tokenizer_encoder_config": TOKENIZER |
        {"model_type": "vibevoice_acoustic_tokenizer_encoder"}, "audio_bos_token_id": 60,
        "audio_eos_token_id": 61, "acoustic_tokenizer_chunk_size": 16}, seed=2, unsupported=NO_PLACES | UNSPLIT),
    speech("omniasr", "OmniASR", within(samples(36, 1), 3), SOUND | {"initializer_range": 0.35,
        "text_config": like("llama"), "audio_config": {key: value for key, value in WAV2VEC2.items()
        if key != "num_feat_extract_layers"} | {"initializer_range": 0.35}}, seed=1,
        unsupported=NO_PLACES),
    audio("clvp", "Clvp", only(conditioning), SPECIAL | {"bos_token_id": 6, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "n_inner": 32,
        "max_position_embeddings": 64, "max_text_tokens": 64, "num_mel_attn_blocks": 1}, head="ForCausalLM",
        config_class="ClvpDecoderConfig", seed=1, unsupported=NO_IDS | BLIND | DRAFTS),
    audio("gradium_phonon_tts", "GradiumPhononTTS",
        ending(60, frames_after_eos=1, eos_threshold=1.0, min_frames_before_eos=3),
        FLOWING | {"audio_prompt_dim": 8}, modes=ONE_BEAM, unsupported=TOKENS_ONLY | NO_EMBEDS |
        {"continuation": "a prompt ends with the start of sound"}),
]
# fmt: on

INSTALLED = set(dir(transformers))
MULTIMODAL_FAMILIES: list[Family] = [f for f in (*IMAGES, *SOUNDS) if f.build.model in INSTALLED]
