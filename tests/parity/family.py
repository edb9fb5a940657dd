"""What a model family is, for the parity tests: how to build it tiny, and what to feed it.

A family is built from a config in code, with random weights from a fixed seed, so nothing is
downloaded. Random weights give nearly flat logits, where a rounding error decides an argmax;
``sharpen`` scales the output weights until the best token leads by a clear margin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["decoder", "encoder-decoder", "speech", "vision", "audio"]
Inputs = dict[str, Any]

#: Decoding modes a family can be tested in; the names are those of ``GenerationMode`` values.
MODES = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")


class Limit(str, Enum):
    """What upstream itself rejects or breaks on for a family: option, or kind of call."""

    #: Drafted tokens: the model answers otherwise if it gets several at once, or keeps too much.
    ASSISTED = "assisted"
    #: Drafts of an assistant alone: nobody gives it what it needs beside ids.
    ASSISTANT = "assistant"
    ATTENTIONS = "attentions"
    BEAMS = "beams"
    CHUNKED = "chunked"
    CONTINUATION = "continuation"
    DECODER_INPUT_IDS = "decoder_input_ids"
    EMBEDS = "embeds"
    HIDDEN_STATES = "hidden_states"
    NO_CACHE = "no_cache"
    NUM_RETURN_SEQUENCES = "num_return_sequences"
    PADDING = "padding"
    STATIC = "static"


@dataclass(frozen=True)
class Family:
    """One tiny model architecture.

    ``build()`` returns the model in eval mode, float32, on CPU, the same weights on every call.
    ``inputs(model, rows, padded, seed)`` returns the keyword arguments that ``generate`` needs
    besides options: ``input_ids (rows, length)``, ``pixel_values``, ``input_features``, …  With
    ``padded`` (text prompts only) rows have different lengths, left-padded, and an
    ``attention_mask`` is given; without it no mask is given.
    """

    name: str
    kind: Kind
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int, bool, int], Inputs]
    modes: tuple[str, ...] = MODES[:4]
    #: What is not compared for this family, each with the reason, which is for readers alone.
    unsupported: Mapping[Limit, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {Limit(name): reason for name, reason in self.unsupported.items()}
        object.__setattr__(self, "unsupported", limits)
        if Limit.ASSISTED in limits:
            modes = tuple(mode for mode in self.modes if mode != MODES[-1])
            object.__setattr__(self, "modes", modes)

    def __str__(self) -> str:
        return self.name


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model from random weights without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build().eval()


def text_prompt(
    vocab: int, rows: int, padded: bool, seed: int, length: int = 7, pad: int = 0
) -> Inputs:
    """Random prompt ids in ``[5, vocab)`` (ids below are special), left-padded if asked.

    ``input_ids (rows, length)``; with padding also ``attention_mask (rows, length)``.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocab, (rows, length), generator=generator)
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row in range(1, rows):  # row 0 keeps the full length
        pads = 1 + (row + seed) % (length - 2)
        ids[row, :pads], mask[row, :pads] = pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def sharpen(model: nn.Module, margin: float) -> nn.Module:
    """Rescale the output weights in place, so that logits spread with about ``margin`` as deviation.

    Assumes final hidden states of about unit size per feature, which the last norm of nearly
    every model gives.  A model without output embeddings is returned as it is.
    """
    head = model.get_output_embeddings()
    if head is not None:
        weight = head.weight.data  # (vocab, hidden)
        weight.mul_(margin / (weight.std() * weight.shape[-1] ** 0.5))
    return model
