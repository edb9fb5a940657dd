"""``hfgen serve``: a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any

import typer

from ..serve.limits import Limits
from . import options
from .generate import optimize_model
from .loading import BUILTIN, Loaded, first_line, load, make_exact, quiet
from .report import CliError, say

POLICIES = ("fcfs", "srpt", "priority")
LEVELS = ("critical", "error", "warning", "info", "debug")


def with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each field of ``Limits``, in place of its argument ``limits``."""

    @functools.wraps(command)
    def whole(**arguments: Any) -> None:
        values = {each.name: arguments.pop(each.name) for each in fields(Limits)}
        try:
            limits = Limits(**values)
        except ValueError as error:
            raise CliError(str(error)) from error
        command(**arguments, limits=limits)

    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    del parameters["limits"]
    for each in fields(Limits):
        kind = type(each.default)
        name = "--" + each.name.replace("_", "-")
        option = typer.Option(name, help=each.metadata["help"], rich_help_panel="Limits")
        parameters[each.name] = inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[kind, option],
        )
    whole.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    whole.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    del whole.__wrapped__
    return whole


@with_limits
def serve(
    model: options.ModelOption = "builtin",
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="HFGEN_API_KEY",
            help="The key that clients must send; other requests get 401.",
        ),
    ] = None,
    max_rows: options.RowsOption = 32,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", min=1, help="Requests that may wait; further ones get 429."),
    ] = 256,
    memory: options.MemoryOption = 0.8,
    prefill_tokens: options.PrefillOption = 2048,
    policy: Annotated[
        str, options.one_of_option("--policy", POLICIES, f"{', '.join(POLICIES)}.")
    ] = "fcfs",
    assistant: options.AssistantOption = None,
    optimize: options.OptimizeOption = False,
    exact: options.ExactOption = False,
    prefix_cache: options.PrefixOption = False,
    chat_template: options.TemplateOption = None,
    log_level: Annotated[
        str,
        options.one_of_option(
            "--log-level", LEVELS, f"{', '.join(LEVELS)}; info prints a line per request."
        ),
    ] = "warning",
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = None,
    trust_remote_code: options.TrustOption = False,
    debug: options.DebugOption = False,
    *,
    limits: Limits,
) -> None:
    """Serve a model with OpenAI's interface, at http://HOST:PORT/v1, until Ctrl-C.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /health and /metrics.
    Requests decode together, each with parameters of its own.
    """
    if not host:
        raise CliError("--host is empty: give an address, such as 127.0.0.1")
    if api_key == "":
        raise CliError("--api-key is empty: give a key, or leave it out")
    try:
        from ..serve import check_requirements

        check_requirements()
    except ImportError as error:
        raise CliError(str(error)) from error
    with quiet(debug):
        from ...engine.errors import EngineError
        from ..serve.server import LOCAL, Settings, bound, serve

        try:
            listener = bound(host, port)
        except OSError as error:
            raise CliError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error

        import hfgen

        served, processor = load_served(model, dtype, device, trust_remote_code)
        if chat_template is not None:
            processor.chat_template = chat_template
        drafts = assistant and load(assistant, None, dtype, device, trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", processor)
        loaded = Loaded(model, served, tokenizer, drafts or None)
        if optimize:
            optimize_model(loaded, compile=False)
        if exact:
            make_exact(loaded)
        try:
            engine = hfgen.Engine(
                served,
                tokenizer,
                max_rows=max_rows,
                memory=memory,
                prefill_tokens=prefill_tokens,
                policy=policy,
                max_queue=max_queue,
                prefix_cache=hfgen.PrefixCache() if prefix_cache else None,
            )
        except (TypeError, ValueError) as error:
            raise CliError(str(error)) from error
    if api_key is None and host not in LOCAL:
        say(f"[yellow]hfgen:[/] anybody who reaches {host} may use the model: give --api-key")
    settings = Settings(host, listener.getsockname()[1], api_key, limits, log_level)
    running = serve(
        model,
        served,
        processor,
        engine,
        settings,
        lambda _: say(f"{model} at http://{host}:{settings.port}/v1 (Ctrl-C ends it)"),
        drafts=loaded.drafting(),
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
