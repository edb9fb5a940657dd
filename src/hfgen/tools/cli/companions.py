"""Options beside other options: those that exclude each other, and those that do nothing alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...settings import cache_settings
from ...settings.fields import FIELDS, OWN_FIELDS, is_on
from .checks import OLD_CACHES
from .loading import Loaded
from .report import CliError, say
from .topics import option_name

#: Fields of which each makes the model draft; ``--assistant`` does, too.
DRAFTING = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
ANY_DRAFTER = ("--assistant", *DRAFTING)

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

#: Fields with results of their own.
RESULTS = (
    *("logprobs", "logprob_token_ids", "logprobs_support"),
    *("prompt_logprobs", "prompt_logprob_token_ids"),
    *("output_metrics", "output_speculation"),
)

#: Kinds of cache with options, and the checks of these.
CACHE_SETTINGS = {
    "quantized": cache_settings.check_quantized,
    "offloaded": cache_settings.path_of,
    "offloaded_static": cache_settings.check_none,
}
DRAFTS_OR_TRIES = "what drafts or tries several tokens (--assistant, --penalty-alpha, …)"
STATIC = ("static", "offloaded_static")

#: Field → what it does nothing without: one of these fields, besides ``Field.needs``.
NEEDS: dict[str, tuple[str, ...]] = {
    "seed": ("do_sample",),
    "num_beam_groups": ("num_beams",),
    "diversity_penalty": ("num_beam_groups",),
    "dynatemp_exponent": ("dynatemp_range",),
    "xtc_threshold": ("xtc_probability",),
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "adaptive_decay": ("adaptive_target",),
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_penalty_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
    "penalty_window": PENALTIES,
    "penalty_exclude_ids": PENALTIES,
    "low_memory": ("penalty_alpha", "num_beam_groups"),
    "thinking_message": ("thinking_token_budget",),
    "max_matching_ngram_size": ("prompt_lookup_num_tokens",),
    "num_assistant_tokens": ANY_DRAFTER,
    "num_assistant_tokens_schedule": ANY_DRAFTER,
    "assistant_confidence_threshold": ANY_DRAFTER,
    "output_speculation": ANY_DRAFTER,
    "assistant_ensemble_weight": ("--assistant",),
    "assistant_lookbehind": ("--assistant",),
    "target_lookbehind": ("--assistant",),
    "cache_config": ("cache_implementation",),
    "compile_config": ("cache_implementation",),
    "max_cache_len": ("cache_implementation",),
    "use_cuda_graph": ("cache_implementation",),
}


def check_companions(fields: dict[str, Any], assistant: str | None = None) -> None:
    """Raise ``CliError`` for options that exclude each other; ``assistant`` is that of ``--assistant``."""
    check_modes(fields, assistant)
    check_lengths(fields)
    check_answers(fields)
    check_groups(fields)
    check_caches(fields, assistant)


def shown(fields: dict[str, Any], *names: str) -> Iterator[str]:
    """Yield the fields among ``names`` that are set, as options with their values."""
    for name in names:
        value = fields.get(name)
        if value is not None and value is not False:
            yield option_name(name) if value is True else f"{option_name(name)} {value}"


def check_modes(fields: dict[str, Any], assistant: str | None) -> None:
    """Raise ``CliError`` for two ways to decode; transformers takes one of them, and ignores the other."""
    drafters = [*([f"--assistant {assistant}"] if assistant else ()), *shown(fields, *DRAFTING)]
    beams = ["force_words_ids", *(["num_beams"] if (fields.get("num_beams") or 1) > 1 else ())]
    contrast = list(shown(fields, "penalty_alpha")) if fields.get("penalty_alpha") else []
    ways = [*drafters, *contrast, *shown(fields, "dola_layers"), *list(shown(fields, *beams))[:1]]
    if contrast and fields.get("do_sample"):
        ways.append("--do-sample")
    if fields.get("grammar") is not None and fields.get("dola_layers") is not None:
        ways.append("a grammar")
    if len(ways) > 1:
        raise CliError(f"{ways[0]} and {ways[1]} exclude each other: leave one out")


def check_lengths(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for a length that is given twice, and for a minimum above a maximum."""
    if len(both := list(shown(fields, "max_new_tokens", "max_length"))) > 1:
        raise CliError(f"{both[0]} and {both[1]} exclude each other: leave one out")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = fields.get(least), fields.get(most)
        if low is not None and high is not None and low > high:
            raise CliError(f"{option_name(least)} {low} is more than {option_name(most)} {high}")


def check_no_results(command: str, fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for fields whose results ``command`` does not show."""
    if (option := next(shown(fields, *RESULTS), None)) is not None:
        raise CliError(f"{command} does not show what {option} returns: leave it out")


def check_answers(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for more answers than a call can have."""
    n, n_beams = fields.get("num_return_sequences") or 1, fields.get("num_beams") or 1
    if 1 < n_beams < n:
        raise CliError(
            f"--num-return-sequences {n} needs as many beams, but --num-beams is {n_beams}"
        )
    is_greedy = fields.get("do_sample") is False or fields.get("temperature") == 0
    if n > 1 and fields.get("num_beams") in (None, 1) and is_greedy:
        raise CliError(
            f"--num-return-sequences {n} needs sampling or beams: greedy decoding has one answer"
        )


def check_groups(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for groups of beams that cannot be searched."""
    n_groups, n_beams = fields.get("num_beam_groups") or 1, fields.get("num_beams")
    if n_groups == 1 or n_beams is None:
        return
    if n_beams % n_groups:
        raise CliError(
            f"--num-beams {n_beams} is no multiple of --num-beam-groups {n_groups}: all groups have "
            "as many beams"
        )
    if not (fields.get("diversity_penalty") or 0) > 0:
        raise CliError(
            "--num-beam-groups needs --diversity-penalty above 0, by which the groups differ"
        )
    if fields.get("do_sample"):
        raise CliError("--num-beam-groups does not sample: leave the options of sampling out")


def check_caches(fields: dict[str, Any], assistant: str | None) -> None:
    """Raise ``CliError`` for options of a cache that the cache, or the way to decode, cannot have."""
    kind, settings = fields.get("cache_implementation"), fields.get("cache_config")
    if settings is not None and kind is not None:
        if kind not in CACHE_SETTINGS:
            raise CliError(
                f"--cache-config is for --cache-implementation quantized or offloaded, but not {kind}"
            )
        try:
            CACHE_SETTINGS[kind](settings)
        except ValueError as error:
            named = str(error).replace("`cache_config`", "it").rstrip(".")
            raise CliError(f"--cache-config of {kind}: {named}") from error
    for name in ("compile_config", "max_cache_len"):
        if fields.get(name) is not None and kind not in (None, *STATIC, *OLD_CACHES):
            raise CliError(
                f"{option_name(name)} is for --cache-implementation static, but not {kind}"
            )
    if fields.get("disable_compile") and fields.get("compile_config") is not None:
        raise CliError("--compile-config and --disable-compile exclude each other: leave one out")
    drafts = bool(assistant) or any(shown(fields, *DRAFTING))
    tries = drafts or fields.get("penalty_alpha")
    if fields.get("use_cache") is False and (kind is not None or tries):
        used = f"--cache-implementation {kind}" if kind else DRAFTS_OR_TRIES
        raise CliError(f"{used} cannot go without a cache: leave --no-use-cache out")
    if fields.get("drop_finished") and (kind in STATIC or tries):
        other = f"--cache-implementation {kind}" if kind in STATIC else DRAFTS_OR_TRIES
        raise CliError(f"--drop-finished and {other} exclude each other: leave one out")


def note_idle(fields: dict[str, Any], config: Any, loaded: Loaded) -> None:
    """Say which of the given fields do nothing in the chosen mode."""

    def chosen(name: str) -> Any:
        if name == "--assistant":
            return loaded.assistant
        value = getattr(config, name)
        return getattr(loaded.model.generation_config, name, None) if value is None else value

    for name in fields:
        own = FIELDS[name].needs
        needs = NEEDS.get(name, () if own is None else (own,))
        if not needs or any(is_on(each, chosen(each)) for each in needs):
            continue
        if name != "top_k" or not chosen("penalty_alpha"):  # contrastive search reads top_k
            needed = " or ".join(map(option_name, needs))
            say(f"[yellow]note:[/] {option_name(name)} does nothing without {needed}")


def note_length(model: Any, config: Any, prompt_tokens: int) -> None:
    """Say that more tokens were asked for than the model has positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    n_tokens = prompt_tokens + (config.max_new_tokens or 0)
    if isinstance(limit, int) and n_tokens > limit and not model.config.is_encoder_decoder:
        say(
            f"[yellow]note:[/] the model has {limit:,} positions, and prompt and answer may take {n_tokens:,}: "
            "what comes after is worse, or an error"
        )


def note_own(fields: dict[str, Any]) -> None:
    """Note the fields that transformers does not have, and ignores."""
    options = ["a grammar" if n == "grammar" else option_name(n) for n in fields if n in OWN_FIELDS]
    if options:
        say(f"[yellow]note:[/] transformers does not know {', '.join(options)}, and runs without")
