"""What builders of processors and criteria read, the rows of their tables, and functions of some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from ...settings.fields import OWN_FIELDS
from ...state.run import RowParams, all_equal
from .lists import is_row_wise
from .per_row import as_column, rows_of


def n_ending_tokens(config: Any) -> int:
    """How many tokens end a row: its EOS tokens, and ``stop_token_ids``."""
    eos, stops = (getattr(config, name, None) for name in ("_eos_token_tensor", "stop_token_ids"))
    n_stops = 1 if isinstance(stops, int) else len(stops or ())
    return n_stops + (0 if eos is None else len(eos))


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of one ``generate`` call that decide which processors and stopping criteria it needs.

    ``prompt_length``: ids that the decoder starts from, with pads. ``encoder_input_ids``: the main input.
    """

    model: Any
    config: GenerationConfig
    prompt_length: int = 0
    encoder_input_ids: torch.Tensor | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    device: Any = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    negative_prompt_ids: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None
    rows: RowParams | None = None  # the configs of the prompts, where they differ
    #: ``(rows,)`` int64: keys of the noise of each row (``hfgen.state.seeds``), if the call has seeds.
    seeds: torch.Tensor | None = None
    tokenizer: Any = None  # the call's, if it was given one

    @property
    def eos(self) -> torch.Tensor | None:
        """EOS ids ``(n,)``, or ``None`` where generation has no EOS token."""
        return getattr(self.config, "_eos_token_tensor", None)

    @property
    def ending_tokens(self) -> torch.Tensor | None:
        """EOS ids and ``stop_token_ids``, ``(n,)``; ``None`` where no token ends a row."""
        if not (stops := getattr(self.config, "stop_token_ids", None)):
            return self.eos
        tokens = torch.atleast_1d(torch.tensor(stops, device=self.device))
        return tokens if self.eos is None else torch.cat([self.eos.to(tokens.device), tokens])

    def encoder_ids(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The main input ``(batch, length)`` and bools of its tokens; ``None`` if it is not token ids."""
        ids, mask = self.encoder_input_ids, self.model_kwargs.get("attention_mask")
        if ids is None or ids.dim() != 2 or (ids < 0).any():  # some models fill in -100 for none
            return None
        if mask is None or mask.ndim != 2 or len(mask) % len(ids) or mask.shape[1] < ids.shape[1]:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        # The mask is expanded to beams, the input is not.
        return ids, mask[:: len(mask) // len(ids), -ids.shape[1] :].to(ids.device) != 0

    @property
    def n_pads(self) -> torch.Tensor | None:
        """``(rows,)``: how many columns of padding the ids of each row of the decoder's prompt begin with."""
        is_encoder_decoder = self.model.config.is_encoder_decoder
        name = "decoder_attention_mask" if is_encoder_decoder else "attention_mask"
        if (mask := self.model_kwargs.get(name)) is None or self.prompt_length == 0:
            return None  # embeddings have no ids
        # Of what a cache holds, the mask has columns, and there are no ids.
        return (mask[:, -self.prompt_length :] != 0).int().argmax(dim=1)

    @property
    def min_tokens_to_keep(self) -> int:
        """Tokens that a warper has to leave: beams need one that ends none to go on with."""
        is_search = (self.config.num_beams or 1) > 1
        return max(2, n_ending_tokens(self.config) + 1) if is_search else 1

    @property
    def configs(self) -> list[GenerationConfig]:
        return [self.config] if self.rows is None else self.rows.configs

    def own(self, name: str) -> Any:
        """The value of one of hfgen's own fields, or its default; upstream's configs lack them."""
        value = getattr(self.config, name, None)
        return OWN_FIELDS[name] if value is None else value

    def of_prompts(self, prompts: list[int]) -> Context:
        """The context of those prompts, which ask for the same."""
        assert self.rows is not None
        index, n = torch.tensor(prompts, device=self.device), len(self.rows)

        def take(value: Any) -> Any:
            """The rows of these prompts in a tensor with as many rows for each prompt, or ``value``."""
            is_of_rows = isinstance(value, torch.Tensor) and value.ndim > 0 and not len(value) % n
            return value[rows_of(index, len(value) // n)] if is_of_rows else value

        return replace(
            self,
            config=self.rows.configs[prompts[0]],
            rows=None,
            encoder_input_ids=take(self.encoder_input_ids),
            model_kwargs={name: take(value) for name, value in self.model_kwargs.items()},
            seeds=take(self.seeds),
        )


#: A row of a table of processors or criteria: of the context of a call it makes one, or ``None``.
Builder: TypeAlias = Callable[[Any], Any]


def built(table: Iterable[Builder], context: Any) -> Iterator[Any]:
    """Yield what the builders of ``table`` make for a call, in order; idle and unset fields are skipped."""
    for builder in table:
        field = getattr(builder, "field", None)
        if context.rows is None and field is not None:
            value = getattr(context.config, field, None)
            idle = builder.idle  # type: ignore[attr-defined]
            # A tensor of EOS tokens, whose comparison with None takes long, is never idle.
            if value is None or (idle is not None and value == idle):
                continue
        if (function := builder(context)) is not None:
            if field is not None:  # that asks for it, and those that it reads besides
                function.asked_by = (field, *builder.reads)  # type: ignore[attr-defined]
            yield function


@dataclass(frozen=True, slots=True)
class Row:
    """Builds a processor or criterion from a config's ``field``.

    Nothing is built for ``None``, for the value ``idle``, and for those that ``is_off`` tells. Where prompts
    differ, ``build`` gets a tensor ``(prompts, 1)`` in place of the value if there is a ``neutral`` one,
    which leaves a row as it is. Else one is built for each value, or for each combination of the field and
    those that the builder ``reads`` besides; or one for all prompts together, if it is ``of_all``.
    """

    field: str
    build: Callable[[Any, Any], Any]
    idle: Any = None
    is_off: Callable[[Any], bool] | None = None
    neutral: Any = None
    reads: tuple[str, ...] = ()
    #: Leaves ``min_tokens_to_keep`` tokens, whose number depends on the EOS tokens where there are beams.
    keeps_tokens: bool = False
    of_sampling: bool = False  # is not built for greedy prompts
    of_all: bool = False

    def __call__(self, context: Context) -> Any:
        if context.rows is None:
            value = self.value(context.config)
            return None if value is None else self.build(value, context)
        values = [self.value(config) for config in context.configs]
        if all(value is None for value in values):
            return None
        if self.of_all:
            return self.build(values[0], context)
        reads = self.reads
        if self.keeps_tokens and (context.config.num_beams or 1) > 1:
            reads += ("eos_token_id", "stop_token_ids")
        others_differ = context.rows.differ_in(*reads)
        if all_equal(values) and not others_differ:
            return self.build(values[0], context)
        if self.neutral is not None and not others_differ:
            column = [self.neutral if value is None else value for value in values]
            return self.build(as_column(column, context.device), context)
        groups: list[tuple[tuple[Any, ...], list[int]]] = []
        for index, (value, config) in enumerate(zip(values, context.configs, strict=True)):
            key = (value, *(getattr(config, name, None) for name in reads))
            same = next((prompts for other, prompts in groups if all_equal([key, other])), [])
            if not same:
                groups.append((key, same))
            same.append(index)
        made = [
            (self.build(key[0], context.of_prompts(prompts)), prompts)
            for key, prompts in groups
            if key[0] is not None
        ]
        parts = [part for part in made if part[0] is not None]
        if not parts:
            return None
        is_criterion = isinstance(parts[0][0], StoppingCriteria)
        kind = CriteriaByRows if is_criterion else ProcessorsByRows
        return kind(parts, len(context.rows), context.device)

    def value(self, config: Any) -> Any:
        """The value of a config; ``None`` if it asks for nothing."""
        value = getattr(config, self.field, None)
        if value is None or (self.of_sampling and not config.do_sample):
            return None
        if self.idle is not None and value == self.idle:
            return None
        return None if self.is_off is not None and self.is_off(value) else value


class _OfPrompts:
    """Functions of ids, each for some of ``n_prompts``; no two have a prompt in common."""

    def __init__(self, parts: list[tuple[Any, list[int]]], n_prompts: int, device: Any) -> None:
        self.n_prompts = n_prompts
        self.parts = [(function, torch.tensor(p, device=device)) for function, p in parts]

    @property
    def is_row_wise(self) -> bool:
        return all(is_row_wise(function) for function, _ in self.parts)

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows within their prompts: row ``i`` becomes old row ``index[i]``."""
        for function, prompts in self.parts:
            if hasattr(function, "reorder"):
                rows = rows_of(prompts, len(index) // self.n_prompts).to(index.device)
                function.reorder(torch.searchsorted(rows, index[rows].to(rows.dtype)))


class ProcessorsByRows(_OfPrompts, LogitsProcessor):
    """Calls each processor with the rows of its own prompts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for processor, prompts in self.parts:
            rows = rows_of(prompts, len(scores) // self.n_prompts)
            scores[rows] = processor(input_ids[rows], scores[rows])
        return scores


class CriteriaByRows(_OfPrompts, StoppingCriteria):
    """Calls each criterion with the rows of its own prompts."""

    ends_rows = True  # rows may end before the others do, and are padded then

    def of_row(self, row: int, n_rows: int) -> Any:
        """The criterion of a row of ``n_rows``; ``None`` if it has none."""
        prompt = row * self.n_prompts // n_rows
        return next((part for part, prompts in self.parts if prompt in prompts.tolist()), None)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        for criterion, prompts in self.parts:
            rows = rows_of(prompts, len(input_ids) // self.n_prompts)
            is_done[rows] = criterion(input_ids[rows], scores, **kwargs)
        return is_done
