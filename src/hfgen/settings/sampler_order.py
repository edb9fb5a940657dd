"""The order of samplers: their names, and the orders of other libraries."""

from __future__ import annotations

from typing import Any

from .fields import with_suggestions

#: The name of a sampler, and the fields that turn it on.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "temperature": ("dynatemp_range", "temperature"),
    "smoothing": ("smoothing_factor",),
    "top_n_sigma": ("top_n_sigma",),
    "top_h": ("top_h",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "top_a": ("top_a",),
    "typical_p": ("typical_p",),
    "epsilon_cutoff": ("epsilon_cutoff",),
    "eta_cutoff": ("eta_cutoff",),
    "p_less": ("p_less",),
    "xtc": ("xtc_probability",),
    "mirostat": ("mirostat",),
    "adaptive_p": ("adaptive_target",),
}

#: The order of other libraries. ``"hf"`` is that of ``logits/processors/__init__.py``, which transformers has, too.
PRESETS: dict[str, tuple[str, ...]] = {
    "hf": (),
    "vllm": ("penalties", "temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": (
        *("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p"),
        *("xtc", "temperature"),
    ),
}


def fields_of(order: str | list[str] | None) -> tuple[str, ...]:
    """The fields of the samplers that ``order`` names, in that order: a preset, or a list of names.

    Raises ``ValueError`` for names that there are none of, and for a sampler that is named twice.
    """
    names: Any = [] if order is None else order
    if isinstance(names, str):
        if names not in PRESETS:
            presets = ", ".join(map(repr, PRESETS))
            raise ValueError(
                f"`sampler_order` has to be one of {presets}, or a list of samplers, but is "
                f"{with_suggestions([names], PRESETS)}."
            )
        names = PRESETS[names]
    if unknown := [name for name in names if name not in SAMPLERS]:
        raise ValueError(
            f"`sampler_order` names what is no sampler: {with_suggestions(unknown, SAMPLERS)}. There "
            f"are {', '.join(SAMPLERS)}."
        )
    if twice := {name for name in names if list(names).count(name) > 1}:
        raise ValueError(f"`sampler_order` names {', '.join(sorted(twice))} more than once.")
    return tuple(field for name in names for field in SAMPLERS[name])
