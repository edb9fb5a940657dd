"""Contrastive search (Su et al. 2022), decoded by hfgen."""

from __future__ import annotations

from typing import Any

from hfgen.mixin import mixed_view


def generate(
    model: Any,
    generation_config: Any = None,
    penalty_alpha: float | None = None,
    top_k: int | None = None,
    **arguments: Any,
) -> Any:
    """Return what ``model.generate`` returns; ``model`` and its class stay as they are.

    ``penalty_alpha``: the weight of the penalty, above 0 and at most 1. ``top_k``: the number of
    candidates, at least 2. They default to those of ``generation_config``, then to 0.6 and 4.
    ``arguments``: those of ``generate``.

    Raises ``ValueError`` for values out of range, and for arguments that ask for another mode.
    """
    if penalty_alpha is None:
        penalty_alpha = getattr(generation_config, "penalty_alpha", None)
    if top_k is None:
        top_k = getattr(generation_config, "top_k", None)
    penalty_alpha = 0.6 if penalty_alpha is None else penalty_alpha
    top_k = 4 if top_k is None else top_k
    if not isinstance(penalty_alpha, int | float) or not 0 < penalty_alpha <= 1:
        raise ValueError(
            f"`penalty_alpha` of contrastive search has to be a number above 0 and at most 1, but is {penalty_alpha!r}."
        )
    if not isinstance(top_k, int) or top_k < 2:
        raise ValueError(
            f"`top_k` of contrastive search has to be an integer of at least 2, but is {top_k!r}."
        )
    mode = {"do_sample": False, "num_beams": 1}
    for name, value in mode.items():
        if arguments.get(name, value) != value:
            raise ValueError(
                f"Contrastive search has `{name}={value}`, but got `{name}={arguments[name]}`. Leave it out."
            )
    view = mixed_view(model)
    return type(view).generate(
        view,
        generation_config=generation_config,
        penalty_alpha=penalty_alpha,
        top_k=top_k,
        **arguments | mode,
    )
