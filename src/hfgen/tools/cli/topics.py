"""Tables of the generation options: topics with lines of help, short forms, and other libraries' names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...settings import grammar
from .files import read_text

#: What stands for a value of each kind.
METAVARS = {"an integer": "N", "a number": "X", "text or JSON": "…", "true or false": ""}

LEGEND = (
    "N is an integer, X a number, … text or JSON. Options without a value are flags: "
    "--no-… turns them off. --top_k=5 is --top-k 5."
)

#: Names that llama.cpp, vLLM and OpenAI's interface have for fields.
OTHER_NAMES = {
    "temp": "temperature",
    "n_predict": "max_new_tokens",
    "predict": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "num_beams",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "samplers": "sampler_order",
    "grammar_file": "--lark",
    "guided_json": "--json-schema",
    "guided_regex": "--regex",
    "guided_choice": "--choice",
}

#: Topic → field or short form (``--stop``) → its line. Every field that can be written as text is here.
TOPICS: dict[str, dict[str, str]] = {
    "Length": {
        "max_new_tokens": "generate at most N tokens",
        "min_new_tokens": "generate at least N tokens",
        "min_tokens": "no stop of any kind before N tokens",
        "max_length": "at most N tokens, with the prompt",
        "min_length": "at least N tokens, with the prompt",
        "max_time": "stop after X seconds",
        "exponential_decay_length_penalty": "[n, x]: favour EOS from token n on",
    },
    "Stopping": {
        "--stop": "stop at this text (\\n: new line); repeatable",
        "stop_strings": "stop at a text, or at any text of a JSON list",
        "stop_regex": "stop at a regular expression, or any of a list",
        "include_stop_str_in_output": "keep the stop string in the text",
        "stop_token_ids": "stop at these tokens",
        "eos_token_id": "end-of-sequence ids instead of the model's",
        "ignore_eos": "continue after an end-of-sequence token",
        "repetition_detection": '{"max_pattern_size": 20, …}: stop a loop',
    },
    "Sampling (each of these switches it on)": {
        "do_sample": "sample instead of taking the most likely token",
        "seed": "seed of the samples; the batch does not matter",
        "temperature": "above 1 more random, below 1 less; 0: greedy",
        "dynatemp_range": "vary the temperature by ±X with the entropy",
        "dynatemp_exponent": "exponent of the entropy in dynatemp-range",
        "smoothing_factor": "lower scores by their squared distance to the best",
        "top_k": "keep the N most likely tokens",
        "top_p": "keep the most likely tokens with total probability X",
        "min_p": "keep tokens at least X times as likely as the best",
        "typical_p": "keep the most typical tokens, total probability X",
        "top_h": "keep likely tokens up to the share X of the entropy",
        "top_n_sigma": "keep scores within X standard deviations of the best",
        "top_a": "keep tokens above X times the best one squared",
        "p_less": "keep tokens above the sum of all squares",
        "epsilon_cutoff": "keep tokens with at least the probability X",
        "eta_cutoff": "like epsilon-cutoff, lower when entropy is high",
        "xtc_probability": "how often to drop all likely tokens but the last",
        "xtc_threshold": "tokens above this probability count as likely",
        "mirostat": "keep the surprise constant: version 1 or 2; 0: off",
        "mirostat_tau": "the surprise of mirostat, in bits",
        "mirostat_eta": "the learning rate of mirostat",
        "adaptive_target": "prefer tokens near this probability",
        "adaptive_decay": "decay of the average in adaptive-target",
        "sampler_order": "hf, vllm, llama.cpp, or a JSON list of samplers",
    },
    "Repetition": {
        "repetition_penalty": "above 1: penalise tokens of the text",
        "frequency_penalty": "subtract X per occurrence in the answer",
        "presence_penalty": "subtract X from tokens in the answer, once",
        "penalty_window": "penalties use the last N tokens only",
        "penalty_exclude_ids": "tokens without penalties",
        "no_repeat_ngram_size": "no sequence of N tokens occurs twice",
        "dry_multiplier": "penalise tokens that continue a repetition",
        "dry_base": "growth of this penalty per repeated token",
        "dry_allowed_length": "penalise repetitions of N tokens and more",
        "dry_penalty_last_n": "look for repetitions in the last N tokens",
        "dry_sequence_breakers": "repetitions end at these texts or ids",
        "encoder_repetition_penalty": "above 1: favour tokens of the prompt",
        "encoder_no_repeat_ngram_size": "no N tokens of the prompt occur again",
    },
    "Words and tokens": {
        "bad_words": "exclude these texts",
        "bad_words_ids": "exclude these lists of ids",
        "allowed_token_ids": "allow only these tokens",
        "suppress_tokens": "exclude these tokens",
        "begin_suppress_tokens": "exclude these tokens at the first position",
        "sequence_bias": "[[[id, …], bias], …]: add to scores",
        "forced_bos_token_id": "force this token at the first position",
        "forced_eos_token_id": "force this token at the maximum length",
        "force_words_ids": "beam search for texts that contain these ids",
        "guidance_scale": "above 1: classifier-free guidance",
        "watermarking_config": "watermark the text: JSON of a WatermarkingConfig",
        "remove_invalid_values": "replace NaN and infinite scores",
        "renormalize_logits": "normalise scores after all processors",
        "token_healing": "let the last token of the prompt be completed",
    },
    "Grammars (at most one)": {
        "--json-schema": "JSON that matches the schema in a file",
        "--json-object": "any JSON object",
        "--regex": "text that matches a regular expression",
        "--choice": "one of these texts; repeatable",
        "--lark": "text of the Lark grammar in a file",
    },
    "Thinking": {
        "thinking_token_budget": "close the thinking section after N tokens",
        "thinking_start": "the start marker: <think>",
        "thinking_end": "the end marker: </think>",
        "thinking_message": "text before the end marker, if the budget ends it",
    },
    "Beams and other modes": {
        "num_beams": "beam search with N beams",
        "early_stopping": "stop when there are as many answers as beams",
        "length_penalty": "above 0: favour longer answers",
        "num_beam_groups": "diverse beam search with N groups",
        "diversity_penalty": "penalty on tokens that other groups chose",
        "penalty_alpha": "contrastive search with this penalty",
        "low_memory": "contrastive search: one candidate at a time",
        "dola_layers": "DoLa, with these layers: low, high, or a list",
    },
    "Output": {
        "num_return_sequences": "return N answers",
        "logprobs": "show log-probabilities and the N best tokens",
        "logprob_token_ids": "show log-probabilities of these tokens too",
        "prompt_logprobs": "show log-probabilities of the prompt too",
        "logprobs_support": "return the tokens that sampling kept",
        "logprobs_mode": "raw_ or processed_, then logprobs or logits",
        "skip_special_tokens": "leave special tokens out of texts: the default",
        "return_dict_in_generate": "return an object: always on here",
        "output_metrics": "return times and memory",
        "output_card": "return what the tokens depended on",
        "output_speculation": "return counts of drafted tokens",
        "output_scores": "return scores after all processors",
        "output_logits": "return scores of the model",
        "output_attentions": "return attentions",
        "output_hidden_states": "return hidden states",
    },
    "Drafting (see also --assistant)": {
        "prompt_lookup_num_tokens": "draft N tokens by prompt lookup",
        "max_matching_ngram_size": "prompt lookup matches at most N tokens",
        "assistant_early_exit": "draft with the first N layers",
        "use_mtp": "draft with the model's MTP layers",
        "speculation_type": "the model's own drafting: dflash",
        "num_assistant_tokens": "draft N tokens per round",
        "num_assistant_tokens_schedule": "adaptive, heuristic or constant",
        "assistant_confidence_threshold": "end a draft below this probability",
        "assistant_ensemble_weight": "weight of the assistant's scores",
        "assistant_lookbehind": "align the last N tokens of the assistant",
        "target_lookbehind": "align the last N tokens of the model",
        "is_assistant": "the model drafts for another one",
    },
    "Cache and compilation": {
        "use_cache": "use a KV cache: the default",
        "cache_implementation": "static, quantized, offloaded, …",
        "cache_config": "JSON with options of the cache",
        "max_cache_len": "size of a static cache, in tokens",
        "prefill_chunk_size": "forward the prompt N tokens at a time",
        "drop_finished": "do not forward finished rows any longer",
        "compile_config": "JSON of a CompileConfig",
        "disable_compile": "do not compile",
        "use_cuda_graph": "replay steps on a static cache as CUDA graphs",
    },
    "Special tokens": {
        "pad_token_id": "the token that pads shorter rows",
        "bos_token_id": "the token that starts a text",
        "decoder_start_token_id": "first token of an encoder-decoder",
    },
}

#: What a backslash and a letter stand for in ``--stop``.
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

#: Between the tokens of JSON: small models may write spaces without end.
WHITESPACE = " ?"


class ShortForm(NamedTuple):
    """An option that sets a field under another name.

    ``read`` makes the value of the text behind it, or of a list of texts if it ``is_repeated``.
    """

    field: str
    metavar: str
    read: Callable[[Any], Any]
    is_repeated: bool = False


def unescaped(text: str) -> str:
    r"""``text`` with a line feed for ``\n``, and so on for ``\t``, ``\r`` and ``\\``."""
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), text)


def read_schema(path: str) -> grammar.Grammar:
    """The grammar of the JSON schema in a file. Raises ``ValueError``."""
    try:
        schema = json.loads(read_text(Path(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path!r} is not JSON: {error}") from error
    return grammar.json(schema, whitespace=WHITESPACE)


SHORT_FORMS: dict[str, ShortForm] = {
    "--stop": ShortForm("stop_strings", "TEXT", lambda texts: list(map(unescaped, texts)), True),
    "--json-schema": ShortForm("grammar", "FILE", read_schema),
    "--json-object": ShortForm("grammar", "", lambda _: grammar.json_object(whitespace=WHITESPACE)),
    "--regex": ShortForm("grammar", "PATTERN", grammar.regex),
    "--choice": ShortForm("grammar", "TEXT", grammar.choice, True),
    "--lark": ShortForm("grammar", "FILE", lambda path: grammar.lark(read_text(Path(path)))),
}


def panels(metavars: dict[str, str], own: Collection[str]) -> Iterator[Panel]:
    """A panel for each topic. ``metavars``: option → what its value is; those of ``own`` are left out."""
    for topic, lines in TOPICS.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(no_wrap=True)
        for name, line in lines.items():
            if (option := option_name(name)) not in own:
                table.add_row(f"{option} {metavars[option]}".rstrip(), Text(line))
        yield Panel(table, title=topic, title_align="left", border_style="dim")


def option_name(field: str) -> str:
    """The option of a field; a short form is one."""
    return field if field.startswith("--") else "--" + field.replace("_", "-")
