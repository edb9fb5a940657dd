"""Encoded images and videos: to which rows, and to which part of a prompt, they belong."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from transformers.utils import ModelOutput


def expand_multimodal_outputs(
    self: Any,
    input_ids: torch.Tensor | None,
    mm_encoder_output: dict[str, Any],
    expand_size: int = 1,
    inputs_embeds: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Repeat encoded images and videos like the rows that show them.

    Those of a row, as its placeholder tokens tell, stay together: ``A B`` becomes ``A B A B``.
    """
    for modality in ("image", "video"):
        outputs: Any = mm_encoder_output.get(modality)
        features = getattr(outputs, "pooler_output", None)
        if features is None:
            continue
        token_id = getattr(self.config, f"{modality}_token_id")
        if (input_ids is None or input_ids.numel() == 0) and inputs_embeds is not None:
            token = torch.tensor(token_id, dtype=torch.long, device=inputs_embeds.device)
            placeholders = (inputs_embeds == self.get_input_embeddings()(token)).all(-1).sum(-1)
        else:
            placeholders = (input_ids == token_id).sum(-1)
        row_ends = set(accumulate(placeholders.tolist()))
        feature_ends = accumulate(len(feature) for feature in features)
        # The features of a row end where as many placeholders have been filled.
        ends = [index + 1 for index, end in enumerate(feature_ends) if end in row_ends]
        groups = list(zip([0, *ends[:-1]], ends, strict=True))
        repeated = [f for start, end in groups for f in list(features[start:end]) * expand_size]
        is_tensor = isinstance(features, torch.Tensor)
        outputs.pooler_output = torch.stack(repeated) if is_tensor else repeated
        layers = getattr(outputs, "deepstack_features", None)
        # Some models keep (layer index, features) pairs there instead, which are left alone.
        if layers is not None and isinstance(layers[0][0], torch.Tensor):
            outputs.deepstack_features = [
                [f for start, end in groups for f in list(layer[start:end]) * expand_size]
                for layer in layers
            ]
    return mm_encoder_output


def media_by_chunk(
    self: Any, prompt: torch.Tensor, chunks: tuple[torch.Tensor, ...], encoded: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """The encoded images and videos of each chunk: feature row ``i`` fills the ``i``-th placeholder."""
    media: dict[int, dict[str, Any]] = {}
    for modality, outputs in encoded.items():
        if outputs is None:
            continue
        is_placeholder = prompt == getattr(self.config, f"{modality}_token_id")
        feature_rows = is_placeholder.flatten().cumsum(0).view_as(is_placeholder) - 1
        widths = [chunk.shape[1] for chunk in chunks]
        parts = zip(is_placeholder.split(widths, 1), feature_rows.split(widths, 1), strict=True)
        for index, (is_filled, rows) in enumerate(parts):
            if is_filled.any():
                media.setdefault(index, {})[modality] = _take_features(outputs, rows[is_filled])
    return media


def _take_features(outputs: ModelOutput, rows: torch.Tensor) -> ModelOutput:
    """Rows of encoded features, in the container that the model reads them from."""

    def take(features: Any) -> Any:
        flat = torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])[rows]
        return flat.unsqueeze(0) if isinstance(features, torch.Tensor) else [flat]

    taken = {"pooler_output": take(outputs["pooler_output"])}
    if (layers := outputs.get("deepstack_features")) is not None:
        is_per_layer = isinstance(layers[0][0], torch.Tensor)
        taken["deepstack_features"] = [take(layer) for layer in layers] if is_per_layer else layers
    return type(outputs)(**taken)
