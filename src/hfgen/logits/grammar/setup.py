"""From the field ``grammar`` of a call to its processors and criterion, with checks."""

from __future__ import annotations

from typing import Any

from ...settings.grammar import Grammar
from ...settings.markers import marker_ids
from ...settings.requirements import require_tokenizer
from ...state.vocabularies import n_scores
from .follower import Follower
from .llguidance import library_of
from .matcher import Library
from .processor import GrammarCriterion, GrammarProcessor, NoTokenLeft
from .thinking import Thinking


def check(model: Any, call: Any) -> None:
    """Compile the grammars of a call that has some.

    Raises ``ValueError`` without a tokenizer, for one that is not read or does not fit the model, for
    a grammar that is refused and a mode that cannot follow one; ``ImportError`` without the library.
    """
    if call.config.dola_layers is not None:
        raise ValueError(
            "`grammar` does not go together with DoLa (`dola_layers`), which drops all but the likely "
            "tokens before a grammar can choose among them. Leave one of them out."
        )
    for config in call.configs:
        if config.grammar is not None:
            library_for(call, model, config.grammar).matcher(config.grammar)


def library_for(call: Any, model: Any, grammar: Grammar) -> Library:
    """The library for the tokenizer of a call; raises as ``check`` does."""
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
    """The caller's, also where what decodes does not take it."""
    return call.request.kwargs.get("tokenizer")


def processor(context: Any) -> GrammarProcessor | None:
    """The builder of the processor, of all rows together."""
    call = getattr(context.config, "_call", None)
    if call is None:
        return None
    configs = call.configs * (1 if call.rows else call.prompt.batch_size)
    given = next(config.grammar for config in configs if config.grammar is not None)
    library = library_for(call, context.model, given)
    starts = [config.grammar and library.matcher(config.grammar) for config in configs]
    eos = [frozenset(eos_of(config)) for config in configs]
    # A forced BOS is no part of the text.
    n, is_first = context.prompt_length, context.prompt_length == 1
    begins = [n + (is_first and config.forced_bos_token_id is not None) for config in configs]
    thinking = [thinking_of(config, tokenizer_of(call)) for config in configs]
    follower = Follower(starts, eos, begins, library.n_tokens, thinking)
    return GrammarProcessor(library, follower, is_search=(context.config.num_beams or 1) > 1)


def thinking_of(config: Any, tokenizer: Any) -> Thinking | None:
    """How a prompt's thoughts are told from its text."""
    start, end = (marker_ids(getattr(config, f"thinking_{n}"), tokenizer) for n in ("start", "end"))
    if not start or not end:
        return None
    return Thinking(start, end, may_begin=config.thinking_token_budget is not None)


def eos_of(config: Any) -> list[int]:
    """The EOS ids of a prompt."""
    tokens = getattr(config, "_eos_token_tensor", None)
    return [] if tokens is None else tokens.tolist()


def no_token_left(context: Any) -> NoTokenLeft:
    """The builder of what reports that nothing is left to choose."""
    return NoTokenLeft(context.config.num_beams or 1)


def criterion(context: Any) -> GrammarCriterion | None:
    """The builder of the criterion, for rows without an EOS; it shares the state of the processor."""
    call = getattr(context.config, "_call", None)
    processors = () if call is None else call.processors
    found = (p for p in processors if isinstance(p, GrammarProcessor))
    follower = next((p.follower for p in found), None)
    return None if follower is None or all(follower.eos) else GrammarCriterion(follower)
