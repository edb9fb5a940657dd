"""Drafters: they guess the next tokens, and ``decoding/strategies/assisted.py`` verifies them; one file per drafter.

``DRAFTERS`` says which call drafts how. To add one, write a subclass of ``Drafter`` and add a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from .assistant import Assistant
from .base import Acceptance, Adapted, Draft, DraftContext, Drafter, Setup
from .costs import Costs
from .early_exit import EarlyExit
from .forced import ForcedTokens
from .lookup import PromptLookup, n_allowed
from .schedule import (
    DEFAULT_TOKENS,
    SCHEDULES,
    Adaptive,
    Constant,
    Heuristic,
    Schedule,
    schedule_named,
)
from .translated import BySharedTokens, ByText
from .upstream import FromGenerators, make_newer, make_overridden

__all__ = [
    "DRAFTERS",
    "SCHEDULES",
    "Acceptance",
    "Adaptive",
    "Assistant",
    "Constant",
    "Draft",
    "DraftContext",
    "Drafter",
    "EarlyExit",
    "ForcedTokens",
    "FromGenerators",
    "Heuristic",
    "PromptLookup",
    "Schedule",
    "Setup",
    "make_drafter",
    "make_schedule",
]


def early_exit(setup: Setup) -> Drafter | None:
    n_layers = setup.run.config.assistant_early_exit
    return None if n_layers is None else EarlyExit(setup, int(n_layers))


def prompt_lookup(setup: Setup) -> Drafter | None:
    run, config = setup.run, setup.run.config
    if config.prompt_lookup_num_tokens is None:
        return None
    allowed = None
    if run.processors and (
        setup.is_exact or setup.is_streamed_row
    ):  # draws, or chunks, show drafts
        allowed = partial(n_allowed, run.processors, run.model.config.get_text_config().vocab_size)
    max_ngram = config.max_matching_ngram_size or 2
    return PromptLookup(int(max_ngram), config._eos_token_tensor, allowed, _overshoots(setup))


def _overshoots(setup: Setup) -> bool:
    """Whether a lookup drafts beyond the last token, as upstream's does.

    For draws, and for logits: they depend, in the last digits, on how many tokens are forwarded.
    """
    run, config = setup.run, setup.run.config
    model_config = run.model.config.get_text_config(decoder=True)
    positions = getattr(model_config, "max_position_embeddings", None) or math.inf
    fits = setup.max_length + config.prompt_lookup_num_tokens <= positions
    shows = len(run.ids) == 1 and config.return_dict_in_generate and config.output_logits
    return setup.is_exact or bool(shows and fits)


def own(setup: Setup) -> Drafter | None:
    """The caller's own object."""
    drafter = setup.assistant_model
    if isinstance(drafter, Drafter):
        return drafter
    return Adapted(drafter) if hasattr(drafter, "draft") else None


def translated(setup: Setup) -> Drafter | None:
    """An assistant with another tokenizer."""
    if None in (setup.assistant_model, setup.tokenizer, setup.assistant_tokenizer):
        return None
    return BySharedTokens(setup) if setup.run.config.do_sample else ByText(setup)


def assistant(setup: Setup) -> Drafter | None:
    return None if setup.assistant_model is None else Assistant(setup)


#: Asked in this order; the first that answers drafts.
DRAFTERS: tuple[Callable[[Setup], Drafter | None], ...] = (
    make_overridden,
    early_exit,
    prompt_lookup,
    make_newer,
    own,
    translated,
    assistant,
)


def make_drafter(setup: Setup) -> Drafter:
    """The drafter that the call asks for."""
    for make in DRAFTERS:
        if (drafter := make(setup)) is not None:
            return drafter
    raise ValueError(
        "Assisted decoding needs something that drafts: `assistant_model`, "
        "`prompt_lookup_num_tokens` or `assistant_early_exit`."
    )


def make_schedule(setup: Setup, drafter: Drafter) -> Schedule:
    """How many tokens to draft: the drafter's own schedule, the one asked for, or a default.

    By default the length adapts to what is accepted. It is upstream's where that shows: in the draws
    of a sampled row, and in the chunks that a streamer gets of one row; and for prompt lookup of one.
    """
    if drafter.schedule is not None:
        return drafter.schedule
    config = setup.run.config
    is_one, is_lookup = len(setup.run.ids) == 1, isinstance(drafter, PromptLookup)
    if is_lookup:
        n_tokens, name = config.prompt_lookup_num_tokens, config.num_assistant_tokens_schedule
    else:
        n_tokens, name = None, setup.of_assistant("num_assistant_tokens_schedule", always=True)
    if n_tokens is None:
        n_tokens = setup.of_assistant("num_assistant_tokens") or DEFAULT_TOKENS
    is_fixed = setup.is_exact or setup.is_streamed_row or (is_one and is_lookup)
    make = schedule_named(name, default="constant" if is_fixed else "adaptive")
    rows, length = setup.run.ids.shape
    # Prompt lookup may overshoot, by no more than it knows.
    longest = setup.max_length if is_lookup else setup.max_length - length
    schedule = make(max(min(int(n_tokens), longest), 1), Costs(rows, drafter.cost))
    if name == "heuristic" and isinstance(schedule, Heuristic) and isinstance(drafter, Assistant):
        schedule.kept_in = drafter.model.generation_config
    return schedule
