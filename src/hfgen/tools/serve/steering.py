"""Steering vectors that requests ask for by name: the files of ``hfgen serve --steering FOLDER``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...running.interventions import Steer, modules_named

MAX_SCALE = 1000.0  # a scale of a request is at most this, or its negative


def read_sets(folder: Path, model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the vectors ``(width,)`` of each file ``NAME.safetensors`` by name, and by module of ``model``.

    Each set is tried with one token. Raises ``ValueError`` for a file that cannot be used, and names it.
    """
    sets = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            vectors = load(path.read_bytes())  # not the file's pages, which change with it
            for name in vectors:
                modules_named(model, name)
            edits = [Steer(name, vector) for name, vector in vectors.items()]
            ids = torch.tensor([[0]], device=model.device)
            model.generate(ids, max_new_tokens=1, interventions=edits)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no steering vectors of this model: {error}") from error
        sets[path.stem] = vectors
    if not sets:
        raise ValueError(f"{folder} has no file NAME.safetensors")
    return sets


def steers_of(scales: Any, sets: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Steer]:
    """Return the interventions of a request, whose ``interventions`` map names to ``scales``.

    Raises ``ValueError`` for unknown names, and for scales that are no numbers within ``MAX_SCALE``.
    """
    if not isinstance(scales, dict) or not scales.keys() <= sets.keys():
        names = ", ".join(sets) or "none: the server was started without --steering"
        has_to = f"has to map names to scales, but is {scales!r:.80}"
        raise ValueError(f"`interventions` {has_to}. Names: {names}.")
    for name, scale in scales.items():
        if type(scale) not in (int, float) or not abs(scale) <= MAX_SCALE:
            numbers = f"a number from {-MAX_SCALE:g} to {MAX_SCALE:g}"
            has_to = f"the scale of {name!r} has to be {numbers}, but is {scale!r:.80}"
            raise ValueError(f"`interventions`: {has_to}.")
    return [
        Steer(module, vector, float(scale))
        for name, scale in scales.items()
        for module, vector in sets[name].items()
    ]
