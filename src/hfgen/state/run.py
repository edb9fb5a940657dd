"""The state of a decode loop, and the interfaces of its strategy and its observers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .seeds import RowChoice

if TYPE_CHECKING:
    from .call import Call, ModelKwargs

#: Arguments of one mode or another that no model's forward takes.
OF_MODES = ("tokenizer", "streamer", "assistant_tokenizer", "assistant_model", "inputs_tensor")


@dataclass(slots=True)
class RowParams:
    """The resolved config of each prompt of a batch, where they differ.

    Row ``r`` of ``n`` belongs to prompt ``r // (n // len)``.
    """

    configs: list[GenerationConfig]
    #: Of each prompt, two bools: ``max_length`` is unset; ``min_length`` is unset.
    has_defaults: list[tuple[bool, bool]]
    list_arguments: tuple[str, ...] = ()  # the arguments that came as lists

    def __len__(self) -> int:
        return len(self.configs)

    def values(self, name: str) -> list[Any]:
        """A field's values, one per prompt."""
        return [getattr(config, name, None) for config in self.configs]

    def differ_in(self, *names: str) -> bool:
        """Whether the prompts have different values of any of these fields."""
        return any(not all_equal(self.values(name)) for name in names)


def all_equal(values: list[Any]) -> bool:
    """Whether all values of a field are the same; tensors only if they are of the same type."""
    return all(_is_equal(value, values[0]) for value in values[1:])


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_is_equal, one, two))
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return type(one) is type(two) and torch.equal(one, two)
    if one is two:
        return True
    # Upstream's dataclasses of watermarks declare no fields, so that all of a class are equal.
    return bool(one == two) and getattr(one, "__dict__", None) == getattr(two, "__dict__", None)


@dataclass(slots=True)
class Speculation:
    """How well drafting went: ``output.speculation``, with ``output_speculation=True``.

    Tokens are counted over all rows. ``rounds`` have a draft; ``forwards`` are the target model's.
    """

    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    rounds: int = 0
    forwards: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens, of all rows together, per forward of the target model."""
        return self.generated / self.forwards if self.forwards else 0.0


@dataclass(slots=True)
class Run:
    """The state of one decoding loop. A strategy's own state stays on the strategy."""

    model: Any
    #: ``(rows, length)``: the sequences so far; written by the strategy's ``step``.
    ids: torch.Tensor
    processors: LogitsProcessorList  # a hook of a model's may return one function, as for criteria
    criteria: StoppingCriteriaList
    config: GenerationConfig
    synced_gpus: bool
    model_kwargs: ModelKwargs  # the mode's own are taken out
    finished: bool = False  # nothing is left to decode on this device; by the strategy's ``stop``
    #: Processed scores of each step, if asked for, as stopping criteria see them; written by ``step``.
    scores: tuple[torch.Tensor, ...] | None = None
    speculation: Speculation | None = None  # how drafting went; by ``strategies/assisted.py``
    shares_prompts: bool = False  # in prefill and in the cache; by ``execution``
    rows_have_left: bool = False  # the cache has fewer than ``ids``; by ``execution.active_rows``
    tokenizer: Any = field(init=False)
    streamer: BaseStreamer | None = field(init=False)
    rows: RowParams | None = None  # what each prompt asks for, where they differ
    #: How rows choose tokens if they have seeds, or some are greedy and others sampled.
    row_choice: RowChoice | None = None
    observers: list[Observer] = field(default_factory=list)  # told of each step; by ``loop.begin``
    extras: dict[str, Any] = field(default_factory=dict)  # hfgen's own attributes of the output
    ahead: Any = None  # reads stop flags late; a ``running.ahead.Ahead``, written there
    is_streamed: bool = field(init=False)  # somebody waits for each token
    invalid: Any = None  # which rows are lost (``strategies.base.InvalidScores``); by the strategy
    body: Any = None  # for ``prompt_logprobs``: states of the prefill, a ``prompt_logits.Body``
    prompts: torch.Tensor = field(init=False)  # the first ``ids``

    def __post_init__(self) -> None:
        self.prompts, kwargs = self.ids, self.model_kwargs
        self.tokenizer, self.streamer = kwargs.get("tokenizer"), kwargs.get("streamer")
        self.is_streamed = self.streamer is not None
        self.model_kwargs = {name: v for name, v in kwargs.items() if name not in OF_MODES}
        if not isinstance(self.processors, list):
            self.processors = LogitsProcessorList([self.processors])
        if not isinstance(self.criteria, list):
            self.criteria = StoppingCriteriaList([self.criteria])
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores = ()
        if self.call is not None:
            self.rows, keys = self.call.rows, self.call.row_keys
            if keys is not None:
                self.row_choice = RowChoice.of(keys, self.rows, self.ids.shape[1])

    @property
    def call(self) -> Call | None:
        """The call that prepared this run; ``None`` if upstream's ``generate`` did."""
        return getattr(self.config, "_call", None)

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask of ``ids``: with an encoder, ``attention_mask`` is the encoder's."""
        prefix = "decoder_" if self.is_encoder_decoder else ""
        return self.model_kwargs.get(prefix + "attention_mask")

    @property
    def configs(self) -> list[GenerationConfig]:
        """Return one config, or one for each prompt if they differ."""
        return [self.config] if self.rows is None else self.rows.configs

    def asks_for(self, *fields: str) -> bool:
        """Return whether any row sets one of ``fields``; an upstream config lacks hfgen's own."""
        for config in self.configs:
            for name in fields:
                if getattr(config, name, None) is not None:
                    return True
        return False

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step of the loop.

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
    """How the next tokens are chosen. ``loop.steps`` pulls it; see ``decoding/strategies/sample.py``.

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
    * ``takes_rows = True``: prompts may differ (``RowParams``), but for the fields in ``fields_of_call``.
    * ``reads_prompt(model, call)``: whether it needs hidden states of the whole prompt; default: no.
    * ``row_ends(run)``: see ``streaming.events.Rows``; without it, rows end at an EOS.
    * ``is_token(run, step)``: bools ``(rows, n_new)``, false for padding; ``None``: all are tokens.
    * ``scored()``: rows and tokens ``(m,)`` that the newest step scored and that may be returned, where
      rows have changed places since: beams. Then ``result`` has ``beam_indices``.
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


class Observer:
    """Told of each step of a run, and of its result: the recording, a streamer, a prefix cache."""

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        """Called after each step, when the strategy has applied the stopping criteria."""

    def finish(self, run: Run, strategy: Strategy, result: dict[str, torch.Tensor | None]) -> None:
        """Called once, with the strategy's result, unless the run ended in an exception."""
