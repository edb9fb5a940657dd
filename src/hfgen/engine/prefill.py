"""Prompts of several requests in one forward pass: similar lengths, padded on the left."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from .. import running as execution
from ..decoding.strategies.sample import Sample
from ..memory.batch import Batch
from ..memory.caches import layers
from .decoding import Decoding
from .joined import JoinedRows
from .scheduler import Chunk

#: A prompt shares a forward with longer ones if it has at least this share of the longest's tokens.
SHORTEST = 0.75


def may_share(decoding: Decoding) -> bool:
    """Whether the forward pass of a prompt depends on its ids alone."""
    run, call = decoding.run, decoding.call
    return (
        type(decoding.strategy) is Sample
        and decoding.n_rows == 1
        and decoding.reads_ids_alone
        and layers.count(run.model_kwargs["past_key_values"]) is None
        and call.prefixes is None
        and run.config.prefill_chunk_size is None
        and not decoding.is_apart
    )


def groups(may_be_grouped: dict[Chunk, bool]) -> list[list[Chunk]]:
    """Chunks to forward together: whole prompts of similar length; each other one by itself."""
    grouped: list[list[Chunk]] = []
    for chunk in sorted(may_be_grouped, key=lambda chunk: -chunk.n_tokens):
        last = grouped[-1] if grouped else []
        is_near = bool(last) and chunk.n_tokens >= SHORTEST * last[0].n_tokens
        if is_near and may_be_grouped[chunk] and may_be_grouped[last[0]]:
            last.append(chunk)
        else:
            grouped.append([chunk])
    return grouped


def forward(model: Any, decodings: list[Decoding]) -> tuple[JoinedRows, list[ModelOutput]]:
    """Forward whole prompts at once; returns their rows, and the outputs of each request."""
    parts = []
    for decoding in decodings:
        kwargs = dict(decoding.run.model_kwargs)
        cache = kwargs.pop("past_key_values")
        parts.append((Batch(decoding.run.ids, kwargs), cache))
    batch, cache = parts[0]
    for other, _ in parts[1:]:
        batch.append(other)
    length = batch.ids.shape[1]
    cache.expect(max(decoding.longest for decoding in decodings))
    kwargs = batch.model_kwargs | {"past_key_values": cache}
    config: GenerationConfig = decodings[0].run.config
    if "attention_mask" not in kwargs:
        kwargs["attention_mask"] = torch.ones_like(batch.ids)
    outputs = execution.prefill(model, batch.ids, config, kwargs)
    assert layers.decoder_cache(kwargs["past_key_values"]).get_seq_length() == length
    batch.model_kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
    rows = JoinedRows(model, decodings, batch)
    return rows, [rows.outputs_of(decoding, outputs) for decoding in decodings]
