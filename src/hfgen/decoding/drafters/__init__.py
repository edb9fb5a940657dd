"""Drafters: they guess the next tokens, and ``decoding/strategies/assisted.py`` verifies them.

``make_drafter`` says which call drafts how. To add one, write a subclass of ``Drafter`` and make it there.
"""

from __future__ import annotations

import math
from functools import partial

from ...settings.fields import FieldError
from .assistant import Assistant, EarlyExit
from .base import Adapted, Drafter, Setup
from .checks import has_foreign_generator
from .lookup import PromptLookup, n_allowed
from .schedule import DEFAULT_TOKENS, Costs, Heuristic, Schedule, schedule_named
from .translated import BySharedTokens, UniversalDrafter
from .upstream import FromGenerator, has_own_hook


def make_drafter(setup: Setup) -> Drafter:
    """The drafter that the call asks for."""
    config, assistant = setup.run.config, setup.assistant_model
    if has_own_hook(setup.run.model):
        return FromGenerator(setup)
    if config.assistant_early_exit is not None:
        return EarlyExit(setup, int(config.assistant_early_exit))
    if config.prompt_lookup_num_tokens is not None:
        return _prompt_lookup(setup)
    if hasattr(assistant, "get_candidates"):
        return FromGenerator(setup, assistant)
    if has_foreign_generator(config, assistant):
        return FromGenerator(setup)
    if isinstance(assistant, Drafter):
        return assistant.begin(setup.run)
    if hasattr(assistant, "draft"):
        return Adapted(assistant)
    if assistant is None:
        raise ValueError(
            "Assisted decoding needs something that drafts: `assistant_model`, "
            "`prompt_lookup_num_tokens` or `assistant_early_exit`."
        )
    if None in (setup.tokenizer, setup.assistant_tokenizer):
        return Assistant(setup)
    return BySharedTokens(setup) if config.do_sample else UniversalDrafter(setup)


def _prompt_lookup(setup: Setup) -> PromptLookup:
    """A lookup; it drafts beyond the last token where upstream's does and that shows: in draws and logits."""
    run, config, allowed = setup.run, setup.run.config, None
    model_config = run.model.config.get_text_config(decoder=True)
    if run.processors and (setup.is_exact or setup.is_streamed_row):  # draws or chunks show drafts
        allowed = partial(n_allowed, run.processors, run.model.config.get_text_config().vocab_size)
    positions = getattr(model_config, "max_position_embeddings", None) or math.inf
    fits = setup.max_length + config.prompt_lookup_num_tokens <= positions
    shows = len(run.ids) == 1 and config.return_dict_in_generate and config.output_logits
    size, overshoots = int(config.max_matching_ngram_size or 2), bool(shows and fits)
    return PromptLookup(size, config._eos_token_tensor, allowed, setup.is_exact or overshoots)


def make_schedule(setup: Setup, drafter: Drafter) -> Schedule:
    """How many tokens to draft: the drafter's own schedule, the one asked for, or a default.

    That adapts to what is accepted, and is upstream's where it shows: in draws and chunks of one row, and for lookup.
    """
    if drafter.schedule is not None:
        return drafter.schedule
    config, (rows, length) = setup.run.config, setup.run.ids.shape
    n_tokens, name = config.prompt_lookup_num_tokens, config.num_assistant_tokens_schedule
    if not (is_lookup := isinstance(drafter, PromptLookup)):
        name = setup.of_assistant("num_assistant_tokens_schedule", always=True)
    if n_tokens is None or not is_lookup:
        n_tokens = setup.of_assistant("num_assistant_tokens")
        n_tokens = DEFAULT_TOKENS if n_tokens is None else n_tokens
    is_fixed = setup.is_exact or setup.is_streamed_row or (rows == 1 and is_lookup)
    make = schedule_named(name, default="constant" if is_fixed else "adaptive")
    # Prompt lookup may overshoot, by no more than it knows.
    longest = setup.max_length if is_lookup else setup.max_length - length
    if n_tokens == 0 and make is Heuristic:
        raise FieldError(f"`num_assistant_tokens` has to be at least 1 with {name!r}, but is 0.")
    schedule = make(max(min(int(n_tokens), longest), 0), Costs(rows, drafter.cost))
    if name == "heuristic" and isinstance(schedule, Heuristic) and isinstance(drafter, Assistant):
        schedule.kept_in = drafter.model.generation_config
    return schedule
