"""Loading models and tokenizers by name, and running one with both libraries; prompts, and files that options name."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import hfgen

from .report import CliError, err, note, one_line, refused, say

BUILTIN = {"builtin": False, "builtin-draft": True}  # name → whether it is the draft model

OFFLINE = "it has not been downloaded before, and the hub cannot be reached: no network"
#: Class of an exception, or words of its message → why a model cannot be loaded, and what to do.
CAUSES = {
    "GatedRepoError": "it is gated; ask for access at its page on the hub, then: hf auth login",
    "RepositoryNotFoundError": "the hub has no such model, or it is private: check the name, or log in: "
    "hf auth login",
    "LocalEntryNotFoundError": OFFLINE,
    "OfflineModeIsEnabled": OFFLINE,
    "SafetensorError": "its weights are damaged or incomplete, so save or download them again",
    "ignore_mismatched_sizes": "its weights do not fit its config.json: they have other shapes (--debug "
    "lists them)",
    "trust_remote_code": "it brings Python code of its own, which is not run: read it, and give "
    "--trust-remote-code if you trust it",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that generates with hfgen, its tokenizer, and the model that drafts for it."""

    name: str
    model: Any
    tokenizer: Any
    assistant: Loaded | None = None

    def mode_kwargs(self) -> dict[str, Any]:
        """The arguments of ``generate`` that stand beside the config and the inputs."""
        return {"tokenizer": self.tokenizer, **self.drafting()}

    def drafting(self) -> dict[str, Any]:
        """The arguments of ``generate`` with which the assistant drafts; none without one."""
        if self.assistant is None:
            return {}
        model, tokenizer = self.assistant.model, self.assistant.tokenizer
        is_same = len(tokenizer) == len(self.tokenizer)
        return {"assistant_model": model} | ({} if is_same else {"assistant_tokenizer": tokenizer})


def load(
    name: str, assistant: str | None, dtype: str, device: str | None, trusts_code: bool = False
) -> Loaded:
    """Load ``name`` (a folder, a hub id, ``builtin`` or ``builtin-draft``); raises ``CliError``.

    ``device``: a torch device, ``auto`` for all of them, or None for the GPU where there is one.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device="cpu" if device == "auto" else device).item()
    except (AssertionError, RuntimeError) as error:  # the former without CUDA in torch's build
        cannot = f"--device {device}: it cannot be used here"
        raise CliError(f"{cannot} ({first_line(error)})") from error
    drafts = None if assistant is None else load(assistant, None, dtype, device, trusts_code)
    try:
        if name in BUILTIN:
            model, tokenizer = hfgen.builtin_model(draft=BUILTIN[name])
            model = model.to(None if dtype == "auto" else getattr(torch, dtype))
            model = model if device == "auto" else model.to(device)
        else:
            model, tokenizer = _load(name, dtype, device, trusts_code)
        return Loaded(name, hfgen.mix_into(model).eval(), tokenizer, drafts)
    except CliError:
        raise
    except Exception as error:
        raise CliError(f"cannot load {name!r}: {cause(error, name)}") from error


def _load(name: str, dtype: str, device: str, trusts_code: bool) -> tuple[Any, Any]:
    import transformers

    source = str(check_source(name) or name)
    shared = {"local_files_only": offline(), "trust_remote_code": trusts_code}
    config = transformers.AutoConfig.from_pretrained(source, **shared)
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    auto: Any = kinds[bool(config.is_encoder_decoder)]
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **shared)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        reason = "" if first_line(error).endswith("one of") else f" ({first_line(error)})"
        advice = f"save one to the same folder{reason}"
        raise CliError(f"no tokenizer with {name!r}: {advice}") from error
    settings = {"dtype": dtype, "device_map": device, "output_loading_info": True}
    model, info = auto.from_pretrained(source, **settings, **shared)
    if missing := sorted(info["missing_keys"]):
        lacks = "lacks weights, which are random now, so that answers mean nothing"
        note(f"{name} {lacks} ({missing[0]}, …): is it a model that generates?")
    return model, tokenizer


def change(loaded: Loaded, optimize: bool, exact: bool, compile: bool = False) -> Loaded:
    """``hfgen.optimize`` the model and the one that drafts for it, make it exact; raises ``CliError``."""
    for part in filter(None, (loaded, loaded.assistant) if optimize else ()):
        with refused(ValueError, before="--optimize: "):
            hfgen.optimize(part.model, compile=compile)
        if err.is_terminal:
            say(f"[dim]{one_line(str(part.model.optimization), 2000)}[/]")
    if exact:
        with refused(ValueError, before="--"):  # the message begins with "exact: "
            hfgen.exact(loaded.model)
    return loaded


def check_source(name: str) -> Path | None:
    """The folder of a model; None for a hub id or a built-in one. ``CliError`` for a path without one."""
    if not name.strip():
        raise CliError("the name of the model is empty: give a folder, a hub id, or builtin")
    path = Path(name).expanduser()
    is_path = path.exists() or path.is_absolute() or name[0] in ".~" or name.count("/") > 1
    if name in BUILTIN or not is_path:
        return None
    if (path / "config.json").exists():
        return path
    if (path / "adapter_config.json").exists():
        merged = "merge it into its model (merge_and_unload) and save that"
        raise CliError(f"{name!r} is an adapter of PEFT without its model: {merged}")
    reason = "the folder has no config.json" if path.is_dir() else "it is a file"
    raise CliError(
        f"no model at {name!r}, {reason if path.exists() else 'there is no such folder'}: give a folder "
        "with a config.json, as save_pretrained writes it, a hub id, or builtin"
    )


def cause(error: BaseException, name: str) -> str:
    """Why a model could not be loaded, and what to do: the first cause that is known."""
    words = "".join(traceback.format_exception(error, limit=0))
    known = next((reason for sign, reason in CAUSES.items() if sign in words), None)
    if known is None and name not in BUILTIN and check_source(name) is None and offline():
        known = OFFLINE
    advice = "Give a folder written by save_pretrained, a hub id, or builtin."
    return known or f"{first_line(error)}. {advice}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its class if it has none."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(" .:")


def offline() -> bool:
    """Whether the hub's name cannot be resolved; without this, loading retries for half a minute."""
    from huggingface_hub.constants import ENDPOINT

    try:
        return not getproxies() and not socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return True


@contextmanager
def upstream(loaded: Loaded) -> Iterator[None]:
    """Inside, the model, its assistant and the models inside of them generate with transformers."""
    parts = [part for each in (loaded, loaded.assistant) if each for part in each.model.modules()]
    mixed = [(part, type(part)) for part in parts if hasattr(part, "_unmixed_class")]
    for part, cls in mixed:
        part.__class__ = cls._unmixed_class
    try:
        yield
    finally:
        for part, cls in mixed:
            part.__class__ = cls


@contextmanager
def quiet(debug: bool = False) -> Iterator[None]:
    """Inside, transformers' log lines, loading bars and warnings are off, unless ``debug``."""
    from transformers.utils import logging as bars

    if debug:
        yield
        return
    level, has_bars = logging.root.manager.disable, bars.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if has_bars:
            bars.enable_progress_bar()


def read_text(path: Path) -> str:
    """The text of a file, its line ends as they are. Raises ``ValueError`` if there is none."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8: {error}") from error


def read_template(path: str | None) -> str | None:
    """The chat template in a file; ``None`` without one. Raises ``CliError`` for what is no template."""
    if path is None:
        return None
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with refused(ValueError, before="--chat-template: "):
        template = read_text(Path(path))
    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        place = f"line {error.lineno} of {path!r}"
        raise CliError(f"--chat-template: {place} is wrong: {error.message}") from error
    return template


def check_output(
    path: Path, source: Path | None = None, suffixes: tuple[str, ...] = (), option: str = "-o"
) -> None:
    """Raise ``CliError`` for a path that cannot be written or is ``source``, before a model is loaded."""
    name = f"{option}: {str(path)!r}"
    if suffixes and path.suffix not in suffixes:
        takes = f"takes a file that ends in {', '.join(suffixes)}"
        raise CliError(f"{option} {takes}, but is {str(path)!r}")
    if path.is_dir():
        raise CliError(f"{name} is a folder: give a file")
    if not path.parent.is_dir():
        raise CliError(f"{name} cannot be written: no such folder")
    if source is not None and path.exists() and path.samefile(source):
        raise CliError(f"{name} is the file that is read: give another one")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"{name} may not be written")


def read_prompt(prompt: str | None) -> str:
    """The prompt, or standard input (a pipe or ``-``) without its line end; ``CliError`` for no text."""
    if prompt is None and sys.stdin.isatty():
        raise CliError("no prompt: write one after the command, or pipe one in")
    try:
        if prompt is None or prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        prompt.encode()  # what cannot be decoded comes as lone surrogates
    except UnicodeError as error:
        raise CliError("the prompt is not UTF-8 text") from error
    if not prompt:
        raise CliError("the prompt is empty: give at least one character")
    return prompt
