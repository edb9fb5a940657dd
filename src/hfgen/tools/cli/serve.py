"""``hfgen serve``: a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from typer import Option

import hfgen

from ..serve import check_requirements
from ..serve.limits import Limits
from . import options
from .loading import BUILTIN, Loaded, change, first_line, load, quiet
from .report import CliError, refused, say


def serve(
    source: options.ModelOptions,
    engine: options.EngineOptions,
    limits: Limits,
    host: str = Option("127.0.0.1", help="The address to listen on."),
    port: int = Option(8000, min=0, max=65535),
    api_key: str | None = Option(
        None, envvar="HFGEN_API_KEY", help="The key that clients must send; others get 401."
    ),
    max_queue: int = Option(256, min=1, help="Requests that may wait; further ones get 429."),
    policy: Literal["fcfs", "srpt", "priority"] = Option(
        "fcfs", metavar="ORDER", help="fcfs, srpt, priority."
    ),
    assistant: str | None = Option(None, help="Draft with this model.", **options.SOURCE),
    suffix_memory: int | None = Option(
        None,
        min=1,
        help="Draft what followed the newest tokens in earlier texts; MiB. For clients of one owner: how fast an "
        "answer comes tells whether its text was seen before.",
    ),
    steering: Path | None = Option(
        None,
        exists=True,
        file_okay=False,
        help="A folder of NAME.safetensors: vectors by module, which requests ask for by name.",
    ),
    optimize: bool = options.OPTIMIZE,
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Option(
        "warning",
        metavar="LEVEL",
        help="critical, error, warning, info, debug; info prints a line per request.",
    ),
) -> None:
    """Serve a model with OpenAI's interface, at http://HOST:PORT/v1, until Ctrl-C.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /health and /metrics.
    Requests decode together, each with parameters of its own.
    """
    if not host:
        raise CliError("--host is empty: give an address, such as 127.0.0.1")
    if suffix_memory is not None and assistant is not None:
        raise CliError("--suffix-memory and --assistant both draft: give one of them")
    if api_key == "":
        raise CliError("--api-key is empty: give a key, or leave it out")
    with refused(ImportError):
        check_requirements()
    with quiet(source.debug):
        from ...engine.errors import EngineError
        from ...families import text_tokenizer
        from ..serve.server import LOCAL, Settings, bound, serve
        from ..serve.steering import read_sets

        with refused(OSError, before=f"cannot listen on {host}:{port}: "):
            listener = bound(host, port)
        settings = source.dtype, source.device, source.trust_remote_code
        model, processor = load_served(source.model, *settings)
        if engine.chat_template is not None:
            processor.chat_template = engine.chat_template
        tokenizer = text_tokenizer(processor)
        drafts = None if assistant is None else load(assistant, None, *settings)
        loaded = change(Loaded(source.model, model, tokenizer, drafts), optimize, source.exact)
        drafting = loaded.drafting()
        if suffix_memory is not None:
            drafting = {"assistant_model": hfgen.SuffixMemory(suffix_memory * 2**20)}
        with refused(ValueError):
            sets = {} if steering is None else read_sets(steering, model)
        running_engine = engine.engine(model, tokenizer, policy=policy, max_queue=max_queue)
    if api_key is None and host not in LOCAL:
        say(f"[yellow]hfgen:[/] anybody who reaches {host} may use the model: give --api-key")
    name, port = source.model, listener.getsockname()[1]
    listening = Settings(host, port, api_key, limits, log_level)
    running = serve(
        *(name, model, processor, running_engine, listening),
        lambda _: say(f"{name} at http://{host}:{port}/v1 (Ctrl-C ends it)"),
        drafts=drafting,
        steering=sets,
        listener=listener,
    )
    with suppress(KeyboardInterrupt), refused(EngineError):
        asyncio.run(running)


def load_served(name: str, dtype: str, device: str | None, trusts_code: bool) -> tuple[Any, Any]:
    """A model as ``transformers serve`` loads it, with its processor; or the built-in one."""
    if name in BUILTIN:
        loaded = load(name, None, dtype, device, trusts_code)
        return loaded.model, loaded.tokenizer
    from transformers.cli.serving.model_manager import ModelManager

    try:
        manager = ModelManager(device or "auto", dtype, trusts_code)
        source = name if "@" in name else f"{name}@main"
        model, processor = manager._load_model(source), manager._load_processor(source)
    except Exception as error:
        raise CliError(f"cannot load {name!r}: {first_line(error)}") from error
    return hfgen.mix_into(model).eval(), processor
