"""The objects of one ``generate()`` call: its arguments and what the stages prepare.

Shapes, everywhere in hfgen:

* ``batch``: prompts that the caller passed.
* ``rows``: sequences that the model sees, ``batch * max(num_beams, num_return_sequences)``.
* ``length``: tokens in a sequence so far, prompt included; ``n_new``: tokens added by one step.
* ``vocab``: width of the logits.

``model_kwargs`` is an open dict, as in the hooks of model classes: of ``Prompt``, then of ``Run``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..families import CACHE
from ..settings.vllm import TO_LAST_POSITION
from .run import RowParams, Run, Strategy

ModelKwargs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``generate``, verbatim."""

    inputs: torch.Tensor | None = None
    generation_config: GenerationConfig | None = None
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    synced_gpus: bool | None = None
    assistant_model: Any = None
    streamer: BaseStreamer | None = None
    negative_prompt_ids: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None
    custom_generate: str | Callable | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that are set, by name; ``None`` may take the place of the model's own value of a field."""
        named = {name: getattr(self, name) for name in self.__slots__[:-1]}
        return {name: value for name, value in named.items() if value is not None} | self.kwargs

    @property
    def runs_elsewhere(self) -> bool:
        """A repository's own ``generate`` or continuous batching runs the call, not hfgen's loop."""
        cache_name = str(self.kwargs.get("cache_implementation"))  # an array equals no text
        return cache_name == "paged" or isinstance(self.custom_generate, str)

    def has_default_lengths(self, model: Any) -> tuple[bool, bool]:
        """Return two bools: nobody set ``max_length``; nobody set ``min_length``."""
        config: Any = self.generation_config
        lengths: dict[str, Any] = dict.fromkeys(("max_new_tokens", "max_length", "min_length"))
        for values in (self.kwargs, config and vars(config), vars(model.generation_config)):
            for name in lengths if values else ():
                if lengths[name] is None:
                    lengths[name] = values.get(name)
        is_endless = lengths["max_new_tokens"] == TO_LAST_POSITION
        return lengths["max_length"] is None and not is_endless, lengths["min_length"] is None

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Request:
        """The request of a call ``generate(*args, **kwargs)``."""
        named = {name: kwargs.pop(name) for name in cls.__slots__[:-1] if name in kwargs}
        return cls(*args, **named | {"kwargs": kwargs})


@dataclass(slots=True)
class Prompt:
    """The prompt: the tensors that the stages prepare for the loop."""

    main_input: torch.Tensor  # ``(batch, …)``: what the model, or its encoder, is conditioned on
    main_input_name: str | None
    batch_size: int
    model_kwargs: ModelKwargs
    ids: torch.Tensor = field(init=False)  # ``(rows, length)``: written by ``inputs.prepare_ids``


@dataclass(slots=True)
class SharedPrompt:
    """Inputs before each row is repeated ``n`` times: ``ids (batch, length)``, and other arguments."""

    ids: torch.Tensor
    model_kwargs: ModelKwargs
    n: int


@dataclass(slots=True)
class Call:
    """One call, from its arguments to the method that decodes it; made by ``prepare.prepare``.

    The method finds it as ``config._call``, since the hook's signature is upstream's.
    """

    request: Request
    config: GenerationConfig  # the resolved config: a copy that belongs to this call
    mode: Any  # a row of ``decoding.modes.MODES``
    mode_kwargs: dict[str, Any]  # arguments of the decoding method that are not the model's
    has_default_max_length: bool
    has_default_min_length: bool
    #: The function that decodes: a method of the model's class, or the caller's callable.
    method: Callable[..., Any]
    rows: RowParams | None = None  # the parameters of each prompt, if they differ
    #: ``(rows,)``: keys of the noise of each row, if a row has a seed; written by ``rows.set_keys``.
    row_keys: torch.Tensor | None = None
    #: ``None`` until ``inputs.prepare``. The fields below are written by the stages in this order.
    prompt: Prompt = None  # type: ignore[assignment]
    prompt_length: int = 0  # tokens: stop strings are looked for after it
    shared_prompt: SharedPrompt | None = None  # by ``inputs.prepare_ids``; the prefill takes it
    processors: Any = None
    criteria: Any = None
    prefixes: Any = None  # the ``PrefixCache`` that it may use
    prefix_session: Any = None  # its use of it, written by ``prefix.begin``
    interventions: Any = None  # a ``running.interventions.Interventions``
    record: Any = None  # a ``decoding.activations.Record``
    ranks: Any = None  # the processes that forward the model together
    started: float = field(default_factory=time.perf_counter)  # when the call began

    #: hfgen's method of the mode decodes, and no override of it.
    is_own_method: bool = field(init=False)
    #: The strategy's class, if the method is known to decode with one; it declares what it can do.
    strategy: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config._call = self
        self.is_own_method = self.method is self.mode.decode
        own_strategy = self.mode.strategy if self.is_own_method else None
        self.strategy = own_strategy or getattr(self.method, "strategy_class", None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """``None``: a copy or a pickle of this call's config is for another call, an assistant's."""
        return type(None), ()

    @property
    def who(self) -> str:
        """Return the name of the mode, or of the strategy in its place, for messages."""
        if self.is_own_method:
            return self.mode.name
        return getattr(self.strategy, "__name__", "the decoding method")

    @property
    def configs(self) -> list[GenerationConfig]:
        return [self.config] if self.rows is None else self.rows.configs

    @property
    def row_keys_of_beams(self) -> torch.Tensor | None:
        """``row_keys``, repeated for the beams of a prompt: ``(rows,)``."""
        if (keys := self.row_keys) is None or self.prompt is None:
            return None
        return keys.repeat_interleave(len(self.prompt.ids) // len(keys))

    @property
    def cache(self) -> Any:
        """The cache that decoding starts with, if there is one."""
        return self.prompt and self.prompt.model_kwargs.get(CACHE)

    @property
    def has_foreign_cache(self) -> bool:
        """The cache is the caller's, or of a class that is not hfgen's: its updates may not fit."""
        cache = self.cache
        if not type(cache).__module__.startswith("hfgen.") or hasattr(cache, "_is_user_defined"):
            return True
        for layer in getattr(cache, "layers", ()):
            if not type(layer).__module__.startswith(("hfgen.", "transformers.")):
                return True
        return False

    def decode(self, model: Any) -> Any:
        try:
            return self.method(
                model,
                self.prompt.ids,
                logits_processor=self.processors,
                stopping_criteria=self.criteria,
                generation_config=self.config,
                **self.mode_kwargs,
                **self.prompt.model_kwargs,
            )
        finally:
            self.release()

    def run(self, model: Any) -> Run:
        """The state of a loop, for callers that drive it themselves; the method does not decode."""
        kwargs = self.mode_kwargs | self.prompt.model_kwargs
        arguments = self.processors, self.criteria, self.config, kwargs.pop("synced_gpus", False)
        return Run(model, self.prompt.ids, *arguments, kwargs)

    def start(self, model: Any) -> tuple[Run, Strategy]:
        """The run, and the strategy that the method decodes with; it has to be hfgen's or a recipe."""
        run, source = self.run(model), self.mode if self.is_own_method else self.method
        return run, source.start(run, self.mode_kwargs)  # type: ignore[union-attr]

    def release(self) -> None:
        """Remove the call from its config: the cycle would keep prompt and cache in memory."""
        self.config._call = None
