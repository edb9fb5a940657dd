"""``hfgen generate``: complete one prompt."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hfgen.cli import measure, options
from hfgen.cli.loading import load, quiet
from hfgen.cli.report import Answers, CliError, duration, err, mebibytes, print_json, say

NEW_TOKENS = 64

#: Fields whose results are no text.
LOGPROBS = {"logprobs", "logprob_token_ids", "prompt_logprobs"}


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to complete; - or a pipe: standard input.")
    ] = None,
    model: options.ModelOption = "builtin",
    assistant: options.AssistantOption = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, tokens, times, memory.")
    ] = False,
    seed: options.SeedOption = None,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Complete a prompt; the prompt itself is not printed.

    Every field of GenerationConfig is an option, as in
    --max-new-tokens 64 --do-sample --temperature 0.7 --eos-token-id '\\[1, 2]' --no-use-cache.
    Without a length it stops after 64 new tokens.
    """
    fields: dict[str, Any] = context.obj
    if stream and as_json:
        raise CliError("--stream and --json exclude each other: leave one out")
    if LOGPROBS & fields.keys():
        if not as_json:
            raise CliError("log-probabilities are printed with --json: add it")
        fields["return_dict_in_generate"] = True
    given = options.read_prompt(prompt)
    with quiet(debug):
        loaded = load(model, assistant, dtype, device, trust_remote_code)
        config = options.generation_config(fields, loaded.model, NEW_TOKENS)
        options.note_idle(fields, config, loaded.model)
        inputs = measure.encode(loaded, [given])
        if stream:
            own = loaded.model.generation_config
            answers = Answers(config.num_return_sequences or own.num_return_sequences or 1)
            result = measure.stream(loaded, inputs, config, seed, answers)
        else:
            result = measure.generate(loaded, inputs, config, seed)
        tokenizer = loaded.tokenizer
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in result.rows]
        if as_json:  # times in seconds, memory in bytes
            pairs = zip(texts, result.rows, strict=True)
            sequences = [{"text": text, "tokens": row} for text, row in pairs]
            if (found := getattr(result.output, "logprobs", None)) is not None:
                for sequence, logprobs in zip(sequences, found.to_openai(tokenizer), strict=True):
                    sequence["logprobs"] = logprobs
            of_prompt = getattr(result.output, "prompt_logprobs", None)
            prompts = (
                {} if of_prompt is None else {"prompt_logprobs": of_prompt.to_openai(tokenizer)[0]}
            )
            print_json(
                {
                    "model": loaded.name,
                    "prompt": given,
                    "prompt_tokens": inputs["input_ids"][0].tolist(),
                    **prompts,
                    "options": fields,
                    "seed": seed,
                    **sequences[0],
                    "sequences": sequences,
                    "timings": {
                        "total": result.seconds,
                        "time_to_first_token": result.first,
                        "time_per_output_token": result.per_token,
                        "tokens_per_second": result.per_second,
                    },
                    "peak_memory": measure.peak_memory(),
                }
            )
        elif not stream:
            answers = Answers(len(texts))
            for row, text in enumerate(texts):
                answers.add(row, text, has_ended=True)
        if err.is_terminal and not as_json:
            say(
                f"[dim]{result.tokens} tokens · first after {duration(result.first)} · "
                f"{duration(result.per_token)} per token · {result.per_second:,.0f} tokens/s · "
                f"peak {mebibytes(measure.peak_memory())}[/]"
            )
