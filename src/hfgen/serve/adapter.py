"""The application of ``transformers serve``, with the parts that are replaced to use an engine.

Of upstream's server, these stay: the application with its routes, the reading of messages and of media,
chat templates, the parsing of thoughts and tool calls, and ``/v1/responses`` but for its parameters.
Replaced are where models and generation come from, and the answers of chat and completions, which have
one choice there and no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from ..engine.serving import Service
from ..openai_api import error_body
from .handlers import ChatHandler, TextHandler
from .metrics import Metrics
from .responses import ResponsesHandler


def application(manager: OneModel, service: Service, metrics: Metrics) -> FastAPI:
    """The web application: upstream's routes, ``/metrics``, and errors in the shape of OpenAI's."""
    state = EngineState(service)
    app: FastAPI = build_server(
        manager,
        ChatHandler(manager, state),
        completion_handler=TextHandler(manager, state),
        response_handler=ResponsesHandler(manager, state),
        transcription_handler=NotOffered(),
        systemone_handler=NotOffered(),
        generation_state=state,
    )

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models/{model:path}")
    def show_model(model: str) -> dict[str, Any]:
        (only,) = manager.get_gen_models()
        if model != only["id"]:
            raise HTTPException(404, f"The only model here is {only['id']!r}, not {model!r}.")
        return only

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Any, error: StarletteHTTPException) -> JSONResponse:
        status = 400 if error.status_code == 422 else error.status_code
        return JSONResponse(error_body(str(error.detail), status), status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body("The body has to be a JSON object, but is not."), 400)

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(error, 500), 500)

    return app


class OneModel(ModelManager):
    """Holds the model that was loaded at the start, and no other."""

    def __init__(self, name: str, model: Any, processor: Any, drafts: Mapping[str, Any]) -> None:
        self.only, self.drafts = (model, processor), drafts
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Without a revision: answers name the model as requests do."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        if model_id_and_revision != self.force_model:
            raise ValueError(f"`model` has to be {self.force_model!r}.")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": self.force_model, "cached": True})
        return self.only

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "hfgen", "created": 0}]

    def shutdown(self) -> None:
        """Nothing: the engine goes on with the model."""


class EngineState(GenerationState):
    """Gives every handler the one engine."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service = service

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Whether upstream's own engine is used: no, so that handlers make tensors, of images too."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> Service:
        return self.service

    def is_cb_alive(self) -> bool:
        return self.service.is_running


class NotOffered:
    """In place of upstream's handlers that do not generate text."""

    async def handle_request(self, *_: Any) -> None:
        raise HTTPException(501, "`hfgen serve` does not offer this: use `transformers serve`.")
