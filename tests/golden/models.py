"""Tiny models that are the same in every version of transformers.

How a version initialises weights does not matter here: every parameter is drawn from its name, its
shape and the model's seed, by numpy's ``RandomState``, whose numbers never change. Imported by the
tests and, in an environment without hfgen, by ``scripts/make_golden_outputs.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn


def build(family: Mapping[str, Any]) -> nn.Module:
    """The model of a family.

    ``model`` and ``config`` name classes, ``fields`` go into the config; ``fill`` tells the rest.
    """
    config = getattr(transformers, family["config"])(
        **family["fields"], attn_implementation="eager"
    )
    model = getattr(transformers, family["model"])(config).eval()
    fill(model, family["seed"], family["spread"], family["gain"])
    return model


@torch.no_grad()
def fill(model: nn.Module, seed: int, spread: float, gain: float) -> None:
    """Write every parameter anew, in place.

    ``spread`` is about the standard deviation of the logits: far enough apart that no rounding
    error decides. Norms scale by about 1, biases are small, and matrices multiply the size of what
    they are given by ``gain``, so that the layers, not the embeddings, decide the next token.
    """
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is head:
            name = "output embeddings"  # the one name that depends on the version
        draw = np.random.RandomState(zlib.crc32(f"{seed} {name} {tuple(parameter.shape)}".encode()))
        values = torch.from_numpy(draw.standard_normal(tuple(parameter.shape))).to(parameter.dtype)
        if parameter is head:
            values *= spread / parameter.shape[-1] ** 0.5
        elif parameter.ndim < 2:
            values = 0.1 * values + float(name.endswith("weight"))
        else:
            values *= gain / parameter.shape[-1] ** 0.5
        parameter.copy_(values)


def inputs(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Lists of ids and masks as tensors."""
    return {name: torch.tensor(rows) for name, rows in given.items()}
