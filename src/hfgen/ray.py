"""``hfgen.ray.Generate``: a class for ``ray.data``'s ``map_batches`` with one engine per actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from .engine import Engine, RequestOutput
from .engine.many import ENGINE_OPTIONS, failed
from .engine.serving import Service
from .patching import AutoModelForCausalLM
from .tools.builtin import builtin_model

#: What can be known of an output, and how it is found.
FACTS: dict[str, Callable[[RequestOutput], Any]] = {
    "text": lambda output: output.text,
    "texts": lambda output: [sequence.text for sequence in output.sequences],
    "token_ids": lambda output: output.token_ids,
    "finish_reason": lambda output: str(output.finish_reason),
    "n_prompt_tokens": lambda output: len(output.prompt_token_ids),
    "n_tokens": lambda output: sum(len(sequence.token_ids) for sequence in output.sequences),
    "error": lambda output: None if output.error is None else str(output.error),
}

#: Facts and their columns, unless others are asked for.
COLUMNS = {
    "text": "generated_text",
    "finish_reason": "finish_reason",
    "n_prompt_tokens": "n_prompt_tokens",
    "n_tokens": "n_tokens",
    "error": "generate_error",
}


class Generate:
    """A class for ``dataset.map_batches(Generate, fn_constructor_kwargs={…})``, which adds columns.

    Each actor has a model and an engine of its own. Batches are asynchronous: those of an actor decode
    together, so that the engine stays full where one ends and another begins. A row depends on nothing
    but its own columns; with a ``seed``, or greedy, one that is done again after a failure is the same.

    Args:
        model: A folder or a hub id, ``"builtin"``, or a function that returns a model, or a model and
            its tokenizer. It is called in the actor.
        tokenizer: A tokenizer, or the name of one; that of the ``model`` if it is left out.
        prompt: The column of the prompts: text, lists of token ids, or lists of chat messages.
        arguments: Arguments of ``generate`` that are in columns: ``{"seed": "id"}``. A null is not given.
        columns: What is added: which fact (``text``, ``texts``, ``token_ids``, ``finish_reason``,
            ``n_prompt_tokens``, ``n_tokens``, ``error``) goes into which column.
        kwargs: Those of ``generate``, ``timeout`` and ``priority`` for all rows; and the engine's
            ``max_rows``, ``memory``, ``prefill_tokens``, ``policy`` and ``prefix_cache``.

    A row that cannot be used (``ValueError``, ``TypeError``) has its error in a column. Any other error
    is raised, and ends or repeats the task as Ray is told to. Raises ``ValueError`` for a fact that
    there is not, and for columns that the rows have already.
    """

    def __init__(
        self,
        model: str | Callable[[], Any],
        tokenizer: Any = None,
        *,
        prompt: str = "prompt",
        arguments: Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.columns = dict(COLUMNS if columns is None else columns)
        if unknown := self.columns.keys() - FACTS.keys():
            raise ValueError(
                f"`columns` has to have some of {sorted(FACTS)}, but has {sorted(unknown)}."
            )
        self.prompt, self.arguments = prompt, dict(arguments or {})
        options = {name: kwargs.pop(name) for name in ENGINE_OPTIONS if name in kwargs}
        self.kwargs = kwargs
        self.engine = Engine(*loaded(model, tokenizer), **options)
        self._service: asyncio.Task[Service] | None = None

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """``batch`` with the columns of what was generated."""
        if taken := batch.keys() & set(self.columns.values()):
            raise ValueError(
                f"The rows have columns {sorted(taken)} already: give others by `columns`."
            )
        if self._service is None:  # of the loop that Ray runs all calls in
            self._service = asyncio.ensure_future(self.engine.serving().__aenter__())
        service = await asyncio.shield(self._service)
        names = [self.prompt, *self.arguments.values()]
        if missing := [name for name in names if name not in batch]:
            raise ValueError(f"The rows have no columns {missing}, but {sorted(batch)}.")
        rows = zip(*(batch[name] for name in names), strict=True)
        tasks = [asyncio.ensure_future(self._answer(service, *map(plain, row))) for row in rows]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        columns = {
            column: as_column([FACTS[fact](output) for output in outputs])
            for fact, column in self.columns.items()
        }
        yield batch | columns

    async def _answer(self, service: Service, prompt: Any, *values: Any) -> RequestOutput:
        of_row = zip(self.arguments, values, strict=True)
        kwargs = self.kwargs | {name: value for name, value in of_row if value is not None}
        try:
            return await service.generate(prompt, **kwargs)
        except (TypeError, ValueError) as error:
            return failed(error, has_text=True)


def loaded(source: Any, tokenizer: Any) -> tuple[Any, Any]:
    """A model and its tokenizer, of what ``Generate`` is given."""
    if callable(source):
        made = source()
        model, default = made if isinstance(made, tuple) else (made, None)
    elif source == "builtin":
        model, default = builtin_model()
    else:
        default = source
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        if torch.cuda.is_available():
            model = model.to("cuda")
    tokenizer = default if tokenizer is None else tokenizer
    if isinstance(tokenizer, str):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return model, tokenizer


def plain(value: Any) -> Any:
    """A value of a column without numpy; ``None`` for a null, also within chat messages."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if item is not None}
    return None if isinstance(value, float) and value != value else value


def as_column(values: list[Any]) -> Any:
    """An array ``(rows,)``; lists, of any lengths, and texts are objects in it."""
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
