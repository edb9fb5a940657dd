"""The objects of one ``generate()`` call: its arguments, the prepared inputs, and the state of its loop.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .seeds import RowChoice

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import ModelOutput

    from .execution.ahead import Ahead
    from .execution.prompt_logits import Body
    from .modes import Mode
    from .outputs import Speculation
    from .rows import RowParams

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

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Request:
        """The request of a call ``generate(*args, **kwargs)``."""
        named = {name: kwargs.pop(name) for name in cls.__slots__[:-1] if name in kwargs}
        return cls(*args, **named | {"kwargs": kwargs})


@dataclass(slots=True)
class Prompt:
    """What will be decoded: the tensors that the stages prepare for the loop."""

    #: ``(batch, …)``: what the model, or its encoder, is conditioned on.
    main_input: torch.Tensor
    main_input_name: str | None
    batch_size: int
    model_kwargs: ModelKwargs
    #: ``(rows, length)``: written by ``inputs.prepare_ids``, empty until then.
    ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))


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
    #: The resolved config: a copy that belongs to this call.
    config: GenerationConfig
    mode: Mode
    #: Arguments of the decoding method that are not the model's.
    mode_kwargs: dict[str, Any]
    has_default_max_length: bool
    has_default_min_length: bool
    #: The function that decodes: a method of the model's class, or the caller's callable.
    method: Callable[..., Any]
    rows: RowParams | None = None  # what each prompt asks for, where they differ
    #: ``(rows,)``: keys of the noise of each row, if a row has a seed; written by ``rows.set_keys``.
    row_keys: torch.Tensor | None = None
    #: The written prompt; the fields below are written by the stages in this order.
    prompt: Prompt | None = None
    prompt_length: int = 0  # tokens: stop strings are looked for after it
    shared_prompt: SharedPrompt | None = None  # by ``inputs.prepare_ids``; the prefill takes it
    processors: Any = None
    criteria: Any = None
    prefixes: Any = None  # the ``PrefixCache`` that it may use
    prefix_session: Any = None  # its use of it, written by ``prefix.begin``
    ranks: Any = None  # the processes that forward the model together
    started: float = field(default_factory=time.perf_counter)  # when the call began

    def __post_init__(self) -> None:
        self.adopt(self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of this call's config is for another call, an assistant's."""

    def adopt(self, config: GenerationConfig) -> None:
        """Decode by ``config``, which a hook may have made of the one before."""
        self.config = config
        config._call = self

    @property
    def strategy(self) -> Any:
        """The strategy's class, if the method is known to decode with one; it says what it can do."""
        own = self.mode.strategy if self.is_own_method else None
        return own or getattr(self.method, "strategy_class", None)

    @property
    def is_own_method(self) -> bool:
        """Whether hfgen's method of the mode decodes, and no override of it."""
        return self.method is self.mode.decode

    @property
    def who(self) -> str:
        """What decodes, for messages: the mode, or the strategy in its place."""
        if self.is_own_method:
            return self.mode.name
        return getattr(self.strategy, "__name__", "the decoding method")

    @property
    def configs(self) -> list[GenerationConfig]:
        """What the prompts ask for: one config, or one for each prompt where they differ."""
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
        return self.prompt and self.prompt.model_kwargs.get("past_key_values")

    def decode(self, model: Any) -> Any:
        """Let the method decode; returns what it returns."""
        prompt = self.prompt
        assert prompt is not None
        try:
            return self.method(
                model,
                prompt.ids,
                logits_processor=self.processors,
                stopping_criteria=self.criteria,
                generation_config=self.config,
                **self.mode_kwargs,
                **prompt.model_kwargs,
            )
        finally:
            self.release()

    def run(self, model: Any) -> Run:
        """The state of a loop, for callers that drive it themselves; the method does not decode."""
        prompt = self.prompt
        assert prompt is not None
        kwargs = self.mode_kwargs | prompt.model_kwargs
        arguments = self.processors, self.criteria, self.config, kwargs.pop("synced_gpus", False)
        return Run.of(model, prompt.ids, *arguments, kwargs)

    def start(self, model: Any) -> tuple[Run, Strategy]:
        """The run, and the strategy that the method decodes with; it has to be hfgen's or a recipe."""
        run, source = self.run(model), self.mode if self.is_own_method else self.method
        return run, source.start(run, self.mode_kwargs)  # type: ignore[union-attr]

    def release(self) -> None:
        """Let go of the config: a cycle would keep prompt and cache in memory after the call."""
        self.config._call = None


#: Arguments of one mode or another that no model's forward takes.
OF_MODES = ("tokenizer", "streamer", "assistant_tokenizer", "assistant_model", "inputs_tensor")


@dataclass(slots=True)
class Run:
    """The state of one decoding loop. A strategy's own state stays on the strategy."""

    model: Any
    #: ``(rows, length)``: the sequences so far; written by the strategy's ``step``.
    ids: torch.Tensor
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    model_kwargs: ModelKwargs
    synced_gpus: bool = False
    finished: bool = False  # nothing is left to decode on this device; by the strategy's ``stop``
    #: Processed scores of each step, if asked for, as stopping criteria see them; written by ``step``.
    scores: tuple[torch.Tensor, ...] | None = None
    speculation: Speculation | None = None  # how drafting went; by ``strategies/assisted.py``
    shares_prompts: bool = False  # in prefill and in the cache; by ``execution``
    rows_have_left: bool = False  # the cache has fewer than ``ids``; by ``execution.active_rows``
    tokenizer: Any = None
    streamer: BaseStreamer | None = None
    rows: RowParams | None = None  # what each prompt asks for, where they differ
    #: How rows choose tokens if they have seeds, or some are greedy and others sampled.
    row_choice: RowChoice | None = None
    observers: list[Observer] = field(default_factory=list)  # told of each step; by ``loop.begin``
    extras: dict[str, Any] = field(default_factory=dict)  # hfgen's own attributes of the output
    ahead: Ahead | None = None  # reads stop flags late; written by ``execution.ahead``
    is_streamed: bool = False  # somebody waits for each token
    invalid: Any = None  # which rows are lost (``strategies.base.InvalidScores``); by the strategy
    body: Body | None = None  # keeps what the prefill gives besides logits, for ``prompt_logprobs``
    prompts: torch.Tensor = field(init=False)  # the first ``ids``

    def __post_init__(self) -> None:
        self.prompts = self.ids
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores = ()

    @classmethod
    def of(
        cls,
        model: Any,
        ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        synced_gpus: bool,
        model_kwargs: ModelKwargs,
    ) -> Run:
        """The state that a decoding method starts with; ``model_kwargs`` without the mode's own."""
        kwargs = {name: value for name, value in model_kwargs.items() if name not in OF_MODES}
        run = cls(model, ids, config, processors, criteria, kwargs, synced_gpus)
        run.tokenizer, run.streamer = model_kwargs.get("tokenizer"), model_kwargs.get("streamer")
        run.is_streamed = run.streamer is not None
        if run.call is not None:
            run.rows, keys = run.call.rows, run.call.row_keys
            if keys is not None:
                run.row_choice = RowChoice.of(keys, run.rows, ids.shape[1])
        return run

    @property
    def call(self) -> Call | None:
        """The call that prepared this run; ``None`` if upstream's ``generate`` did."""
        return getattr(self.config, "_call", None)

    @property
    def configs(self) -> list[GenerationConfig]:
        """What the prompts ask for: one config, or one for each prompt where they differ."""
        return [self.config] if self.rows is None else self.rows.configs

    def asks_for(self, *fields: str) -> bool:
        """Whether any row has set one of ``fields``; an upstream config lacks hfgen's own."""
        return any(getattr(c, name, None) is not None for c in self.configs for name in fields)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the loop yields.

    ``tokens (rows, n_new)``; ``scores`` and ``logits`` are ``n_new``-tuples of ``(rows, vocab)``
    float32, or ``None`` if not asked for; attentions and hidden states come as the model returned
    them, one entry per new token. It never holds whole model outputs, which are large.

    A streamer gets ``tokens``, or what ``settled`` returns: tokens ``(batch, n)`` that no later step
    changes, in the order of the result. It is called after the strategy's ``stop``.
    """

    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    attentions: tuple | None = None
    cross_attentions: tuple | None = None
    hidden_states: tuple | None = None
    settled: Callable[[], torch.Tensor] | None = None


class Strategy(Protocol):
    """How the next tokens are chosen. ``loop.steps`` pulls it; see ``strategies/sample.py``.

    What else it can do is declared by attributes of its class, and not assumed otherwise:

    * ``checks_late = True``: its ``stop`` reads flags by ``check``, maybe behind the next ``forward``.
    * ``continues_cache = True``: its prefill forwards only what the cache lacks (``PrefixCache``).
    * ``may_record = True``: it reads what a forward returns before the next one (``use_cuda_graph``).
    * ``joins = True``: its rows may be forwarded with those of other calls (``hfgen.Engine``).
    * ``drops_rows = True``: rows that have finished may leave the batch (``drop_finished``).
    * ``rolls_back = True``: it takes tokens out of the cache, which has to be of a kind that can.
    * ``shares_prefill = True``: its prefill forwards each prompt once for all its rows.
    * ``tokens_ahead = n``: a cache of fixed length gets room for ``n`` more tokens. Default: 0.
    * ``streams = False``: no token is final before the end, so a streamer is refused.
    * ``takes_rows = True``: prompts may differ (``hfgen.rows``), but for the fields in ``fields_of_call``.
    * ``row_ends(run)``: see ``streaming.events.Rows``; without it, rows end at an EOS.

    Observers ask two more methods, if it has them, about the newest step, behind ``stop``:

    * ``is_token(run, step)``: bools ``(rows, n_new)``, false for padding; ``None``: all are tokens.
    * ``scored()``: rows and tokens ``(m,)`` that the step scored and that may be returned, where rows
      have changed places since: beams. Then ``result`` has ``beam_indices``.
    """

    def prefill(self, run: Run) -> ModelOutput | None:
        """Forward the prompt. ``None`` if the first ``forward`` takes the prompt itself."""

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        """The context in which everything after the prefill runs."""

    def forward(self, run: Run) -> ModelOutput:
        """Forward the newest tokens."""

    def step(self, run: Run, outputs: ModelOutput) -> Step:
        """Choose the next tokens from ``outputs`` and append them to ``run.ids``."""

    def stop(self, run: Run) -> None:
        """Apply the stopping criteria; set ``run.finished``."""

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        """Fields of the output that only the strategy knows; ``sequences`` at least."""


class Observer(Protocol):
    """Told of each step of a run, and of its result: the recording, a streamer, a prefix cache."""

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        """Called after each step, when the strategy has applied the stopping criteria."""

    def finish(self, run: Run, strategy: Strategy, result: dict[str, torch.Tensor | None]) -> None:
        """Called once, with the strategy's result, unless the run ended in an exception."""
