"""``hfgen inspect``: a page that shows what happened at each token of a completion."""

from __future__ import annotations

from pathlib import Path

from typer import Argument, Option

from . import files, options
from .field_options import FieldsWithoutResults, generation_config, note_idle
from .measure import named_errors
from .report import one_line, refused, say

NEW_TOKENS = 48

SUFFIXES = (".html", ".htm", ".json")


def inspect(
    source: options.ModelOptions,
    fields: FieldsWithoutResults,
    output: Path = Option(..., "--output", "-o", metavar="PAGE.html", help="Page, or .json: data."),
    prompts: list[str] | None = Argument(
        None,
        metavar="PROMPT",
        help="Texts to complete, one tab each; - or a pipe reads standard input.",
    ),
    top: int = Option(10, min=1, help="Number of likely tokens to keep at each position."),
) -> None:
    """Complete prompts, and write a page that shows what happened at each token.

    It shows probabilities, alternatives with their scores after each processor, entropy, beams, drafts and times,
    and is one file that needs no network. Every field of GenerationConfig is an option, as in
    --temperature 0.8 --top-p 0.9 --num-beams 4.
    """
    files.check_output(output, suffixes=SUFFIXES)
    texts = [files.read_prompt(prompt) for prompt in prompts or (None,)]
    with source.loaded(fields.assistant) as loaded:
        import hfgen

        config = generation_config(fields, loaded.model, NEW_TOKENS)
        note_idle(fields, config, loaded)
        kwargs = {**loaded.mode_kwargs(), "generation_config": config}
        with named_errors():
            trace = hfgen.trace(loaded.model, texts, top=top, **kwargs)
    with refused(OSError, before=f"-o: cannot write {str(output)!r}: "):
        trace.save(output)
    size = output.stat().st_size
    n_tokens = sum(len(sequence.tokens) for sequence in trace.sequences)
    answers = "1 answer" if len(trace.sequences) == 1 else f"{len(trace.sequences)} answers"
    say(f"{n_tokens} tokens of {answers} · {size / 1000:,.0f} kB in {one_line(str(output))}")
