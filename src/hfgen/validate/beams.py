"""The checks of diverse and constrained beam search; ``validate`` calls them."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .. import constraints, quirks


def check_mode(model: Any, mode: GenerationMode, config: GenerationConfig) -> None:
    """Raise ``ValueError`` for numbers, groups or constraints that cannot be searched with."""
    if "beam" in mode.value:
        _check_numbers(config)
    if mode == GenerationMode.GROUP_BEAM_SEARCH:
        _check_groups(config)
    elif mode == GenerationMode.CONSTRAINED_BEAM_SEARCH:
        _check_constraints(model, config)


def _check_numbers(config: GenerationConfig) -> None:
    if config.low_memory and not (config.num_beam_groups or 1) > 1:
        raise ValueError(
            "`low_memory=True` is no longer a way to search with beams. Leave it out; "
            "`cache_implementation='offloaded'` saves memory."
        )
    length = config.max_length if config.max_new_tokens is None else config.max_new_tokens
    try:
        float(max(length, 1)) ** float(config.length_penalty)
    except OverflowError:
        raise ValueError(
            f"`length_penalty` is the power of the length that scores are divided by: {length} to the "
            f"power of {config.length_penalty} is too large for a float."
        ) from None


def _check_groups(config: GenerationConfig) -> None:
    beams, groups, penalty = config.num_beams, config.num_beam_groups, config.diversity_penalty
    if config.do_sample:
        raise ValueError(
            f"`num_beam_groups`={groups} asks for diverse beam search, which does not sample. Set "
            "`do_sample=False`, or leave the groups out."
        )
    if beams % groups != 0:
        raise ValueError(
            f"`num_beam_groups` has to divide `num_beams`, but they are {groups} and {beams}."
        )
    if penalty is None or not penalty > 0:
        raise ValueError(
            "`diversity_penalty` has to be above 0 for groups of beams to differ, but is "
            f"{penalty}."
        )


def _check_constraints(model: Any, config: GenerationConfig) -> None:
    name = "constraints" if config.force_words_ids is None else "force_words_ids"
    if config.do_sample:
        raise ValueError(
            f"`{name}` asks for constrained beam search, which does not sample. Set "
            "`do_sample=False`."
        )
    if (config.num_beam_groups or 1) != 1:
        raise ValueError(
            f"`{name}` and `num_beam_groups` (={config.num_beam_groups}) do not go together. Leave "
            "one of them out."
        )
    if (config.num_beams or 1) < 2:
        raise ValueError(
            f"`{name}` needs beams to search with: `num_beams` has to be at least 2, but is "
            f"{config.num_beams}."
        )
    built = constraints.of_config(config)
    size = _vocabulary_size(model)
    for constraint in built:
        outside = [token for token in constraints.tokens_of(constraint) if token >= size]
        if outside:
            raise ValueError(
                f"`{name}` asks for the token {outside[0]}, but the model's vocabulary has the ids 0 "
                f"to {size - 1:.0f}."
            )
    if config.max_new_tokens is not None:
        check_room(config, int(config.max_new_tokens))


def _vocabulary_size(model: Any) -> float:
    """How many tokens the model scores; infinity if it does not tell."""
    head = model.get_output_embeddings()
    if hasattr(head, "weight"):
        return int(head.weight.shape[0])
    embedding = quirks.token_embedding(model)
    return float("inf") if embedding is None else embedding.num_embeddings


def check_room(config: GenerationConfig, n_new: int) -> None:
    """Raise ``ValueError`` if the constraints take more than the ``n_new`` tokens to come."""
    if config.constraints is None and config.force_words_ids is None:
        return
    needed = sum(map(constraints.n_tokens, constraints.of_config(config)))
    room = n_new - (config.forced_eos_token_id is not None)
    if needed > room:
        last = "" if room == n_new else ", one of which is `forced_eos_token_id`"
        raise ValueError(
            f"The constraints take at least {needed} tokens, but at most {n_new} are to be "
            f"generated{last}. Raise `max_new_tokens`."
        )
