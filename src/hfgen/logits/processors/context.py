"""What a builder of a logits processor may read, and how it builds one for all rows or for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import GenerationConfig

from ...settings.fields import OWN_FIELDS
from ...state.rows import RowParams, all_equal
from .by_rows import ProcessorsByRows
from .columns import as_column, expand, take_prompts

__all__ = ["Builder", "Context", "OfAll", "Row", "expand"]

PrefixFunction: TypeAlias = Callable[[int, torch.Tensor], list[int]]


def n_ending_tokens(config: Any) -> int:
    """How many tokens end a row: its EOS tokens, and ``stop_token_ids``."""
    eos, stops = (getattr(config, name, None) for name in ("_eos_token_tensor", "stop_token_ids"))
    n_stops = 1 if isinstance(stops, int) else len(stops or ())
    return n_stops + (0 if eos is None else len(eos))


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of one ``generate`` call that decide which processors it needs.

    ``prompt_length`` counts the ids that the decoder starts from, pads included; 0 if there are only
    embeddings. ``encoder_input_ids`` is the main input of the call, of any shape.
    """

    model: Any
    config: GenerationConfig
    prompt_length: int = 0
    encoder_input_ids: torch.Tensor | None = None
    prefix_allowed_tokens_fn: PrefixFunction | None = None
    device: Any = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    negative_prompt_ids: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None

    #: What each prompt asks for, where they differ; greedy prompts have no warpers.
    rows: RowParams | None = None
    of_sampling: bool = False
    #: ``(rows,)`` int64: keys of the noise of each row (``hfgen.state.seeds``), if the call has seeds.
    seeds: torch.Tensor | None = None
    #: The call's, if it was given one.
    tokenizer: Any = None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

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

    @property
    def encoder_ids(self) -> torch.Tensor | None:
        """The main input ``(rows, length)`` if it is token ids; some models fill in -100 for none."""
        ids = self.encoder_input_ids
        return ids if ids is not None and ids.dim() == 2 and not (ids < 0).any() else None

    @property
    def n_pads(self) -> torch.Tensor | None:
        """``(rows,)``: how many columns of padding each row of the decoder's prompt begins with."""
        name = "decoder_attention_mask" if self.is_encoder_decoder else "attention_mask"
        mask = self.model_kwargs.get(name)
        return None if mask is None else (mask != 0).int().argmax(dim=1)

    @property
    def min_tokens_to_keep(self) -> int:
        """Tokens that a warper has to leave: beams need one that ends none to go on with."""
        if self.config.num_beams is None or self.config.num_beams <= 1:
            return 1
        return max(2, n_ending_tokens(self.config) + 1)

    def values(self, name: str) -> list[Any]:
        """A field's values, one per prompt; one in all where prompts do not differ."""
        if self.rows is None:
            return [getattr(self.config, name, None)]
        return [
            getattr(config, name, None) if config.do_sample or not self.of_sampling else None
            for config in self.rows.configs
        ]

    def own(self, name: str) -> Any:
        """The value of one of hfgen's own fields, or its default; upstream's configs lack them."""
        value = getattr(self.config, name, None)
        return OWN_FIELDS[name] if value is None else value

    def by_rows(self, parts: list[tuple[Any, list[int]]]) -> Any:
        """One processor that is each of ``parts`` for its prompts."""
        assert self.rows is not None
        return ProcessorsByRows(parts, len(self.rows), self.device)

    def of_prompts(self, prompts: list[int]) -> Context:
        """The context of those prompts, which ask for the same."""
        assert self.rows is not None
        index = torch.tensor(prompts, device=self.device)
        take = partial(take_prompts, prompts=index, n_prompts=len(self.rows))
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
            if value is None or value == builder.idle:  # type: ignore[attr-defined]
                continue
        if (function := builder(context)) is not None:
            yield function


@dataclass(frozen=True, slots=True)
class OfAll:
    """Builds one processor or criterion for all rows together, if a prompt sets ``field``."""

    field: str
    build: Callable[[Any], Any]
    idle: ClassVar[Any] = None

    def __call__(self, context: Any) -> Any:
        is_set = any(value is not None for value in context.values(self.field))
        return self.build(context) if is_set else None


@dataclass(frozen=True, slots=True)
class Row:
    """Builds a processor or criterion from a config's ``field``.

    Nothing is built for ``None``, for the value ``idle``, and for those that ``is_off`` tells. Where prompts
    differ, ``build`` gets a tensor ``(prompts, 1)`` in place of the value if there is a ``neutral`` one,
    which leaves a row as it is. Else one is built for each value, or for each combination of the field and
    those that the builder ``reads`` besides.
    """

    field: str
    build: Callable[[Any, Any], Any]
    idle: Any = None
    is_off: Callable[[Any], bool] | None = None
    neutral: Any = None
    reads: tuple[str, ...] = ()
    #: Leaves ``min_tokens_to_keep`` tokens, whose number depends on the EOS tokens where there are beams.
    keeps_tokens: bool = False

    def __call__(self, context: Any) -> Any:
        values = []
        for value in context.values(self.field):
            is_idle = value is None or value == self.idle
            is_idle = is_idle or (self.is_off is not None and self.is_off(value))
            values.append(None if is_idle else value)
        if context.rows is None:
            return None if values[0] is None else self.build(values[0], context)
        if all(value is None for value in values):
            return None
        others_differ = context.rows.differ_in(*self.all_reads(context))
        if all_equal(values) and not others_differ:
            return self.build(values[0], context)
        if self.neutral is not None and not others_differ:
            column = [self.neutral if value is None else value for value in values]
            return self.build(as_column(column, context.device), context)
        return self.build_groups(values, context)

    def all_reads(self, context: Any) -> tuple[str, ...]:
        """The fields that the builder reads besides its own."""
        has_beams = self.keeps_tokens and (context.config.num_beams or 1) > 1
        return (*self.reads, "eos_token_id", "stop_token_ids") if has_beams else self.reads

    def build_groups(self, values: list[Any], context: Any) -> Any:
        """One for each group of prompts that ask for the same."""
        configs = context.rows.configs
        groups: list[tuple[tuple[Any, ...], list[int]]] = []
        for index, value in enumerate(values):
            if value is None:
                continue
            key = (
                value,
                *(getattr(configs[index], name, None) for name in self.all_reads(context)),
            )
            group = next((prompts for other, prompts in groups if all_equal([key, other])), None)
            if group is None:
                groups.append((key, [index]))
            else:
                group.append(index)
        functions = [(self.build(key[0], context.of_prompts(p)), p) for key, p in groups]
        parts = [(function, prompts) for function, prompts in functions if function is not None]
        return context.by_rows(parts) if parts else None
