"""Builders of the processors and the criterion for the field ``grammar`` of a call, with checks."""

from __future__ import annotations

from typing import Any

from ...settings.fields import require_tokenizer
from ...settings.grammar import Grammar
from ...state.vocabularies import n_scores
from ..markers import marker_ids
from .follower import Follower, Thinking
from .llguidance import LLGuidance, library_of
from .processor import GrammarCriterion, GrammarProcessor


def check(model: Any, call: Any) -> None:
    """Compile the grammars of a call.

    Raises ``ValueError`` for DoLa, for no tokenizer or one that is not read or has more tokens than the
    model, and for a grammar that llguidance refuses; ``ImportError`` without llguidance.
    """
    if call.config.dola_layers is not None:
        raise ValueError(
            "`grammar` does not go together with DoLa (`dola_layers`), which drops all but the likely "
            "tokens before a grammar can choose among them. Leave one of them out."
        )
    for config in call.configs:
        if config.grammar is not None:
            library_for(call, model, config.grammar).matcher(config.grammar)


def library_for(call: Any, model: Any, grammar: Grammar) -> LLGuidance:
    """The grammars of a call's tokenizer; raises as ``check`` does."""
    tokenizer = tokenizer_of(call)
    require_tokenizer(tokenizer, "grammar", grammar)
    library, size = library_of(tokenizer), n_scores(model)
    if library.n_tokens > size:
        raise ValueError(
            f"`tokenizer` has {library.n_tokens} tokens and the model scores {size}: `grammar` needs the "
            "tokenizer that the model was trained with."
        )
    return library


def tokenizer_of(call: Any) -> Any:
    """The caller's tokenizer, also where the decoding mode takes none."""
    return call.request.kwargs.get("tokenizer")


def processor(_: Any, context: Any) -> GrammarProcessor | None:
    """One processor for all rows."""
    call = getattr(context.config, "_call", None)
    if call is None:
        return None
    configs = call.configs * (1 if call.rows else call.prompt.batch_size)
    grammar = next(config.grammar for config in configs if config.grammar is not None)
    library = library_for(call, context.model, grammar)
    starts = [config.grammar and library.matcher(config.grammar) for config in configs]
    eos_tensors = [getattr(config, "_eos_token_tensor", None) for config in configs]
    eos = [frozenset(() if eos is None else eos.tolist()) for eos in eos_tensors]
    # A forced BOS is no part of the text.
    n, is_first = context.prompt_length, context.prompt_length == 1
    begins = [n + (is_first and config.forced_bos_token_id is not None) for config in configs]
    thinking = [thinking_of(config, tokenizer_of(call)) for config in configs]
    follower = Follower(starts, eos, begins, library.n_tokens, thinking)
    return GrammarProcessor(library, follower, is_search=(context.config.num_beams or 1) > 1)


def thinking_of(config: Any, tokenizer: Any) -> Thinking | None:
    """The section of thoughts that a prompt's config describes."""
    start, end = (marker_ids(getattr(config, f"thinking_{n}"), tokenizer) for n in ("start", "end"))
    if not start or not end:
        return None
    return Thinking(start, end, may_begin=config.thinking_token_budget is not None)


def criterion(_: Any, context: Any) -> GrammarCriterion | None:
    """The criterion, if a prompt has no EOS; it shares the rows' states with the processor."""
    call = getattr(context.config, "_call", None)
    processors = () if call is None else call.processors
    followers = (p.follower for p in processors if isinstance(p, GrammarProcessor))
    follower = next(followers, None)
    return None if follower is None or all(follower.eos) else GrammarCriterion(follower)
