"""Minimum-Bayes-risk decoding over samples (Eikema & Aziz 2020), decoded by hfgen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hfgen
from hfgen.mixin import mixed_view

#: The utilities that have a name, and whether they compare token ids instead of texts.
UTILITIES = {"chrf": (None, False), "token_f1": (hfgen.token_f1, True)}


def generate(
    model: Any,
    generation_config: Any = None,
    num_return_sequences: int | None = None,
    utility: str | Callable[[Any, Any], float] = "chrf",
    on_tokens: bool = False,
    n_best: int = 1,
    **arguments: Any,
) -> Any:
    """Return what ``model.generate`` returns, of the ``n_best`` samples per prompt; ``model`` stays as it is.

    ``num_return_sequences``: the number of samples, at least 2. It defaults to that of
    ``generation_config``, then to 16. ``utility``: ``"chrf"``, which needs ``tokenizer=``;
    ``"token_f1"``; or ``(hypothesis, reference) -> float`` on texts, or with ``on_tokens`` on token
    ids. ``arguments``: those of ``generate``.

    Raises ``ValueError`` and ``TypeError`` for wrong arguments, ``ImportError`` for chrF without sacrebleu.
    """
    if isinstance(utility, str):
        if utility not in UTILITIES:
            raise ValueError(
                f"`utility` of minimum-Bayes-risk decoding has to be one of {', '.join(map(repr, UTILITIES))}, "
                f"or a function of two texts, but is {utility!r}."
            )
        utility, on_tokens = UTILITIES[utility]
    if num_return_sequences is None:
        num_return_sequences = getattr(generation_config, "num_return_sequences", None) or 16
    view = mixed_view(model)
    return type(view).generate(
        view,
        generation_config=generation_config,
        custom_generate=hfgen.minimum_bayes_risk(utility, n_best, on_tokens),
        num_return_sequences=num_return_sequences,
        **{"do_sample": True, "num_beams": 1} | arguments,
    )
