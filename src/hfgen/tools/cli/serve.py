"""``hfgen serve``: a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer import Option

from ..serve import check_requirements
from ..serve.limits import Limits
from . import loading, options
from .loading import BUILTIN, Loaded, first_line, load, make_exact, quiet
from .report import CliError, say

POLICIES = ("fcfs", "srpt", "priority")
LEVELS = ("critical", "error", "warning", "info", "debug")


def serve(
    source: options.ModelOptions,
    engine: options.EngineOptions,
    limits: Limits,
    host: str = Option("127.0.0.1", help="The address to listen on."),
    port: int = Option(8000, min=0, max=65535),
    api_key: str | None = Option(
        None,
        envvar="HFGEN_API_KEY",
        help="The key that clients must send; other requests get 401.",
    ),
    max_queue: int = Option(256, min=1, help="Requests that may wait; further ones get 429."),
    policy: str = options.choice("fcfs", POLICIES, f"{', '.join(POLICIES)}.", "--policy"),
    assistant: str | None = options.model_source(
        None, "Draft tokens with this smaller model.", "--assistant"
    ),
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
    log_level: str = options.choice(
        "warning", LEVELS, f"{', '.join(LEVELS)}; info prints a line per request.", "--log-level"
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
    try:
        check_requirements()
    except ImportError as error:
        raise CliError(str(error)) from error
    with quiet(source.debug):
        from ... import SuffixMemory
        from ...engine.errors import EngineError
        from ..serve.server import LOCAL, Settings, bound, serve
        from ..serve.steering import read_sets

        try:
            listener = bound(host, port)
        except OSError as error:
            raise CliError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error

        settings = source.dtype, source.device, source.trust_remote_code
        model, processor = load_served(source.model, *settings)
        if engine.chat_template is not None:
            processor.chat_template = engine.chat_template
        tokenizer = getattr(processor, "tokenizer", processor)
        drafts = None if assistant is None else load(assistant, None, *settings)
        loaded = Loaded(source.model, model, tokenizer, drafts)
        if optimize:
            loading.optimize(loaded)
        if source.exact:
            make_exact(loaded)
        drafting = loaded.drafting()
        if suffix_memory is not None:
            drafting = {"assistant_model": SuffixMemory(suffix_memory * 2**20)}
        try:
            sets = {} if steering is None else read_sets(steering, model)
        except ValueError as error:
            raise CliError(str(error)) from error
        running_engine = engine.engine(model, tokenizer, policy=policy, max_queue=max_queue)
    if api_key is None and host not in LOCAL:
        say(f"[yellow]hfgen:[/] anybody who reaches {host} may use the model: give --api-key")
    listening = Settings(host, listener.getsockname()[1], api_key, limits, log_level)
    running = serve(
        source.model,
        model,
        processor,
        running_engine,
        listening,
        lambda _: say(f"{source.model} at http://{host}:{listening.port}/v1 (Ctrl-C ends it)"),
        drafts=drafting,
        steering=sets,
        listener=listener,
    )
    with suppress(KeyboardInterrupt):
        try:
            asyncio.run(running)
        except EngineError as error:
            raise CliError(str(error)) from error


def load_served(
    name: str, dtype: str, device: str | None, trust_remote_code: bool
) -> tuple[Any, Any]:
    """A model as ``transformers serve`` loads it, with its processor; or the built-in one."""
    if name in BUILTIN:
        loaded = load(name, None, dtype, device, trust_remote_code)
        return loaded.model, loaded.tokenizer
    from transformers.cli.serving.model_manager import ModelManager

    import hfgen

    try:
        manager = ModelManager(device or "auto", dtype, trust_remote_code)
        source = name if "@" in name else f"{name}@main"
        model, processor = manager._load_model(source), manager._load_processor(source)
    except Exception as error:
        raise CliError(f"cannot load {name!r}: {first_line(error)}") from error
    return hfgen.mix_into(model).eval(), processor
