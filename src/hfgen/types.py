"""The types that travel through one ``generate()`` call.

Shapes, everywhere in hfgen:

* ``batch``: prompts that the caller passed.
* ``rows``: sequences that the model sees, ``batch * max(num_beams, num_return_sequences)``.
* ``length``: tokens in a sequence so far, prompt included; ``n_new``: tokens added by one step.
* ``vocab``: width of the logits.

``model_kwargs`` is the one open dict, because the hooks of model classes speak it. It lives in
``Prompt`` while the stages prepare it, then in ``Run`` while the loop decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import ModelOutput

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


@dataclass(slots=True)
class Plan:
    """What will be done: the resolved config (a private copy) and the decoding mode."""

    config: GenerationConfig
    mode: GenerationMode
    mode_kwargs: dict[str, Any]
    #: The function that decodes: a method of the model's class, or the user's callable.
    method: Callable | None
    has_default_max_length: bool
    has_default_min_length: bool


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
class Speculation:
    """How well drafting went: ``output.speculation``, with ``output_speculation=True``.

    Counts over all rows: ``drafted`` and ``accepted`` tokens, ``generated`` tokens in all; and over the
    call: ``rounds`` with a draft, ``forwards`` of the target model.
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
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    model_kwargs: ModelKwargs
    synced_gpus: bool = False
    #: Nothing is left to decode on this device; written by the strategy's ``stop``.
    finished: bool = False
    #: Processed scores of each step, if asked for, as stopping criteria see them; written by ``step``.
    scores: tuple[torch.Tensor, ...] | None = None
    #: How well drafting went; written by ``strategies/assisted.py``.
    speculation: Speculation | None = None
    #: Rows of one prompt share its forward pass and its part of the cache; written by ``fanout``.
    shares_prompts: bool = False
    #: The cache has fewer rows than ``ids``; written by ``active_rows``.
    rows_have_left: bool = False
    #: The caller's tokenizer, for strategies that work on text.
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores = ()

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the loop yields.

    ``tokens (rows, n_new)``; ``scores`` and ``logits`` are ``n_new``-tuples of ``(rows, vocab)``
    float32, or ``None`` if not asked for; attentions and hidden states come as the model returned
    them, one entry per new token. A step never holds whole model outputs: the logits of a long
    prompt must not outlive the step that read them.

    A streamer gets ``tokens``. A strategy that may revise them says with ``streamed`` what it gets
    in their place: tokens ``(batch, n)`` that no later step changes, in the order of the result.
    It is called only if there is a streamer, after the strategy's ``stop``.
    """

    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    attentions: tuple | None = None
    cross_attentions: tuple | None = None
    hidden_states: tuple | None = None
    streamed: Callable[[], torch.Tensor] | None = None


class Strategy(Protocol):
    """How the next tokens are chosen. ``loop.steps`` pulls it; see ``strategies/sample.py``."""

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
