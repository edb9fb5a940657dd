"""``hfgen chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from typer import Option

from . import measure, options
from .field_options import FieldsWithoutResults, generation_config, note_idle
from .loading import Loaded
from .report import Answers, CliError, end_reason, err, note, one_line, refused, say

NEW_TOKENS = 256
NO_MODEL = (
    "a chat needs a model that was trained for it: give --model, a folder or a hub id such as "
    "HuggingFaceTB/SmolLM2-360M-Instruct, which is downloaded. The built-in model only completes Python: "
    "hfgen generate 'def '"
)
HELP = "[dim]/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer[/]"


@dataclass(slots=True)
class Conversation:
    """The messages so far, as the model gets them."""

    loaded: Loaded
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def inputs(self) -> dict[str, Any]:
        """Model inputs ``(1, length)`` for the next answer; plain lines without a chat template."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages, tokenizer = opening + self.messages, self.loaded.tokenizer
        if not tokenizer.chat_template:
            text = "".join(message["content"] + "\n" for message in messages)
            return measure.encode(self.loaded, [text])
        settings = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        # A template raises errors of its own: no system message, roles out of turn.
        with refused(Exception, before="the chat template fails: "):
            encoded = tokenizer.apply_chat_template(messages, **settings)
        device = self.loaded.model.device
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def chat(
    source: options.ChatModelOptions,
    fields: FieldsWithoutResults,
    system: str | None = Option(None, help="The system message."),
) -> None:
    """Talk with a model, turn by turn, in its chat template where its tokenizer has one.

    It needs --model: the built-in model completes Python code, and cannot talk.

    Ctrl-C stops the answer and not the program; Ctrl-D or /exit leaves; /reset forgets; /help.
    An answer has at most 256 new tokens unless told otherwise.
    """
    if (fields.get("num_return_sequences") or 1) > 1:
        raise CliError("a chat goes on from one answer: leave --num-return-sequences out")
    if not source.model:
        raise CliError(NO_MODEL)
    with source.loaded(fields.assistant) as loaded:
        import hfgen

        config = generation_config(fields, loaded.model, NEW_TOKENS)
        note_idle(fields, config, loaded)
        loaded.model.prefix_cache = hfgen.PrefixCache()  # a turn begins with those before it
        conversation = Conversation(loaded, system)
        if sys.stdin.isatty():
            say(HELP)
        if not loaded.tokenizer.chat_template:
            reason = "this tokenizer has no chat template"
            note(f"{reason}, so the model continues the conversation as plain text")
        while (line := read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.messages.clear()
                say("[dim]forgotten[/]")
            elif line == "/help":
                say(HELP)
            elif line.startswith("/"):
                say(f"no command {one_line(line.split()[0])}; {HELP}")
            elif line:
                turn(conversation, line, config)


def read_line() -> str | None:
    """The next line of the user without spaces around it; None at the end of the input."""
    if not sys.stdin.isatty():
        return next((line.strip() for line in sys.stdin), None)
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print()
            say(HELP)


def turn(conversation: Conversation, line: str, config: Any) -> None:
    """Stream the answer to ``line``; Ctrl-C keeps what was said so far, an error undoes the turn."""
    conversation.messages.append({"role": "user", "content": line})
    answers = Answers()
    try:
        result = measure.stream(conversation.loaded, conversation.inputs(), config, show=answers)
        if err.is_terminal:
            speed = f"{result.n_tokens} tokens · {result.per_second:,.0f} tokens/s"
            say(f"[dim]{speed} · {end_reason(result.reasons[0])}[/]")
    except KeyboardInterrupt:
        answers.end()
        say("[dim]stopped[/]")
    except CliError as error:
        conversation.messages.pop()
        say(f"[red]hfgen:[/] {one_line(str(error))} (/reset starts again)")
        return
    conversation.messages.append({"role": "assistant", "content": answers.texts[0]})
