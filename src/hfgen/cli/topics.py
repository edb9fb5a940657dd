"""The generation options grouped by topic, each with a line of help."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

#: What stands for a value of each kind.
METAVARS = {"an integer": "N", "a number": "X", "text or JSON": "…", "true or false": ""}

LEGEND = (
    "N is an integer, X a number, … text or JSON. Options without a value are switches: "
    "--no-… turns them off. --top_k=5 is --top-k 5."
)

#: Topic → field or short form (``--stop``) → its line. Every field that can be written as text is here.
TOPICS: dict[str, dict[str, str]] = {
    "Length": {
        "max_new_tokens": "write at most N tokens",
        "min_new_tokens": "write at least N tokens",
        "max_length": "the same, prompt included: at most",
        "min_length": "the same, prompt included: at least",
        "max_time": "stop after X seconds",
        "exponential_decay_length_penalty": "[n, x]: EOS gains from token n on",
    },
    "Stopping": {
        "--stop": "stop at this text (\\n: a line end); repeatable",
        "stop_strings": "stop at a text, or at any of a JSON list",
        "stop_regex": "stop at a regular expression, or any of a list",
        "include_stop_str_in_output": "keep the text that stopped it",
        "stop_token_ids": "stop at these tokens",
        "eos_token_id": "end-of-sequence ids in place of the model's",
        "ignore_eos": "go on at an end-of-sequence token",
        "repetition_detection": '{"max_pattern_size": 20, …}: stop a loop',
    },
    "Sampling (a parameter of it switches it on)": {
        "do_sample": "draw tokens by their probability",
        "seed": "fix what is drawn, also in other batches",
        "temperature": "flatter above 1, sharper below; 0: the likeliest",
        "dynatemp_range": "let the temperature follow the entropy, ±X",
        "dynatemp_exponent": "… to this power",
        "smoothing_factor": "lower scores by their squared distance to the best",
        "top_k": "keep the N likeliest tokens",
        "top_p": "keep the likeliest that have X together",
        "min_p": "keep those at least X times as likely as the best",
        "typical_p": "keep the most typical that have X together",
        "top_h": "keep the likeliest, up to the share X of the entropy",
        "top_n_sigma": "keep scores within X standard deviations of the best",
        "top_a": "keep those above X times the best one squared",
        "p_less": "keep those above the sum of all squares",
        "epsilon_cutoff": "keep those with at least the probability X",
        "eta_cutoff": "… or less where the entropy is high",
        "xtc_probability": "how often all likely tokens but the last are dropped",
        "xtc_threshold": "… with at least this probability",
        "mirostat": "keep the surprise level: version 1 or 2; 0 is off",
        "mirostat_tau": "… at X bits",
        "mirostat_eta": "… corrected at this rate",
        "adaptive_target": "prefer tokens of about this probability",
        "adaptive_decay": "… on average, with this decay",
        "sampler_order": "hf, vllm, llama.cpp, or a JSON list of samplers",
    },
    "Repetition": {
        "repetition_penalty": "make tokens of the text unlikelier: >1",
        "frequency_penalty": "… by X for each time in the answer",
        "presence_penalty": "… by X once",
        "penalty_window": "look at the last N tokens only",
        "penalty_exclude_ids": "leave these tokens alone",
        "no_repeat_ngram_size": "let no N tokens come twice",
        "dry_multiplier": "make what continues a repeat unlikelier",
        "dry_base": "… by this factor for each token of it",
        "dry_allowed_length": "… of N tokens and more",
        "dry_sequence_breakers": "… and none of these is between",
        "encoder_repetition_penalty": "above 1: favour the prompt's tokens",
        "encoder_no_repeat_ngram_size": "let no N tokens of the prompt come",
    },
    "Words and tokens": {
        "bad_words": "let none of these texts come",
        "bad_words_ids": "let none of these lists of ids come",
        "allowed_token_ids": "let only these tokens come",
        "suppress_tokens": "let none of these tokens come",
        "begin_suppress_tokens": "let none of these come first",
        "sequence_bias": "[[[id, …], bias], …]: add to their scores",
        "forced_bos_token_id": "let this token come first",
        "forced_eos_token_id": "let this token come last, at the length",
        "force_words_ids": "search with beams for texts with these ids",
        "guidance_scale": "move away from what follows no prompt: above 1",
        "watermarking_config": "mark the text: JSON of a WatermarkingConfig",
        "remove_invalid_values": "replace NaN and infinite scores",
        "renormalize_logits": "normalise scores at the end",
        "token_healing": "let the prompt's last token be completed",
    },
    "Grammars (one of them)": {
        "--json-schema": "write JSON that the schema in a file describes",
        "--json-object": "write any JSON object",
        "--regex": "write what this regular expression matches",
        "--choice": "write one of these texts; repeatable",
        "--lark": "write a text of the Lark grammar in a file",
    },
    "Thinking": {
        "thinking_token_budget": "end the thinking after N tokens",
        "thinking_start": "what it starts with: <think>",
        "thinking_end": "what it ends with: </think>",
        "thinking_message": "what is written before, if the budget ends it",
    },
    "Beams and other modes": {
        "num_beams": "search with N beams",
        "early_stopping": "end with as many answers as beams; or never",
        "length_penalty": "favour longer answers: above 0",
        "num_beam_groups": "search with N diverse groups of beams",
        "diversity_penalty": "… that avoid each other's tokens by X",
        "penalty_alpha": "contrastive search with this penalty",
        "low_memory": "… one candidate after the other",
        "dola_layers": "DoLa, against layers: low, high, or a list",
    },
    "Output": {
        "num_return_sequences": "return N answers",
        "logprobs": "show how likely tokens were, and the N likeliest",
        "logprob_token_ids": "… and these tokens",
        "prompt_logprobs": "show it for the prompt, too",
        "logprobs_mode": "raw_ or processed_, then logprobs or logits",
        "skip_special_tokens": "leave special tokens out of texts: the default",
        "return_dict_in_generate": "return an object: on in any case here",
        "output_metrics": "… with times and memory",
        "output_speculation": "… with counts of drafted tokens",
        "output_scores": "… with scores as processors leave them",
        "output_logits": "… with scores of the model",
        "output_attentions": "… with attentions",
        "output_hidden_states": "… with hidden states",
    },
    "Drafting (beside --assistant)": {
        "prompt_lookup_num_tokens": "draft N tokens from the text itself",
        "max_matching_ngram_size": "… where the last N tokens were before",
        "assistant_early_exit": "draft with the first N layers",
        "use_mtp": "draft with the model's own heads",
        "speculation_type": "draft with the model's own way: dflash",
        "num_assistant_tokens": "draft N tokens at once",
        "num_assistant_tokens_schedule": "… at first: heuristic; always: constant",
        "assistant_confidence_threshold": "… while they are this likely",
        "assistant_ensemble_weight": "mix the assistant in, so much",
        "assistant_lookbehind": "align its tokens by N of its own",
        "target_lookbehind": "… and N of the model's",
        "is_assistant": "the model drafts for another one",
    },
    "Cache and compilation": {
        "use_cache": "keep keys and values: the default",
        "cache_implementation": "static, quantized, offloaded, …",
        "cache_config": "JSON of its settings",
        "max_cache_len": "let a static cache hold N tokens",
        "prefill_chunk_size": "forward the prompt N tokens at a time",
        "drop_finished": "forward rows until they end, and no longer",
        "compile_config": "JSON of a CompileConfig",
        "disable_compile": "compile nothing",
        "use_cuda_graph": "replay steps on a static cache as CUDA graphs",
    },
    "Special tokens": {
        "pad_token_id": "what fills shorter rows",
        "bos_token_id": "what starts a text",
        "decoder_start_token_id": "what starts an encoder-decoder's answer",
    },
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
