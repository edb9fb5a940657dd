"""Classes that generate and are no ``PreTrainedModel``: they have what transformers' mixin asks for, no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfgen.families import CACHE
from tests.parity.decoder_families import SIZES, VOCAB
from tests.parity.family import MODES, Family, Inputs, seeded, sharpen, text_prompt
from tests.versions import with_cache


class Bare(GenerationMixin):
    """What transformers' mixin reads of a class in any call."""

    main_input_name = "input_ids"
    base_model_prefix = "model"
    _is_stateful = False
    device = torch.device("cpu")
    dtype = torch.float32
    config: LlamaConfig

    def is_remote_code(self) -> bool:
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        return {}


class BareModule(nn.Module, Bare):
    """A module written by hand around layers of transformers; its forward takes a ``Cache``."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        self.layers, self.head, self.config = inner.model, inner.lm_head, inner.config
        self.generation_config = GenerationConfig.from_model_config(inner.config)

    @with_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.layers(input_ids, attention_mask, position_ids, past_key_values, **kwargs)
        return CausalLMOutputWithPast(
            logits=self.head(outputs.last_hidden_state),
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class Wrapper(Bare):
    """No module, but calls one, as TRL's mixture of two models: its caches are transformers' own."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        self.inner, self.config = inner, inner.config
        self.generation_config = GenerationConfig.from_model_config(inner.config)

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        outputs = self.inner(*args, **kwargs)
        outputs.logits = outputs.logits.log_softmax(-1)
        return outputs

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.prepare_inputs_for_generation(*args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self.inner._validate_model_kwargs(model_kwargs)


class Session(Bare):
    """No module, as Optimum's classes: a graph runs, and keys and values are tuples of tensors."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], config: LlamaConfig) -> None:
        self.run, self.config = run, config
        self.generation_config = GenerationConfig.from_model_config(config)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return self.forward(*args, **kwargs)

    @with_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: tuple[tuple[Tensor, ...], ...] | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        flat = sum(past_key_values or (), ())
        logits, *states = self.run(input_ids, attention_mask, position_ids, *flat)
        layers = tuple((states[i], states[i + 1]) for i in range(0, len(states), 2))
        return CausalLMOutputWithPast(logits=logits, **{CACHE: layers if use_cache else None})

    @with_cache
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        kwargs.pop("next_sequence_length", None)
        n_cached = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=input_ids.shape[1] - n_cached,
            **{CACHE: past_key_values},
            **kwargs,
        )

    @staticmethod
    def _reorder_cache(states: tuple[tuple[Tensor, ...], ...], beam_idx: Tensor) -> Any:
        return tuple(tuple(s.index_select(0, beam_idx) for s in layer) for layer in states)


def _llama() -> LlamaForCausalLM:
    names = LlamaConfig().to_dict()
    config = LlamaConfig(**{name: value for name, value in SIZES.items() if name in names})
    return sharpen(LlamaForCausalLM(config), 6.0)  # type: ignore[return-value]


def build_module() -> nn.Module:
    return seeded(lambda: BareModule(_llama()))


def build_wrapper() -> Any:
    return Wrapper(seeded(_llama))


def build_session() -> Any:
    inner = seeded(_llama)

    def run(ids: Tensor, mask: Tensor | None, positions: Tensor | None, *states: Tensor) -> Any:
        cache = DynamicCache()
        for layer in range(len(states) // 2):
            cache.update(*states[2 * layer : 2 * layer + 2], layer)
        outputs = inner(ids, mask, positions, cache)
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return outputs.logits, *tensors

    return Session(run, inner.config)


def _inputs(model: Any, rows: int, padded: bool, seed: int) -> Inputs:
    return text_prompt(VOCAB, rows, padded, seed)


NO_EMBEDS = {"embeds": "forward takes ids alone"}
OF_TUPLES = {
    "assisted": "upstream: assisted decoding needs a Cache",
    "attentions": "the graph returns logits, keys and values",
    "chunked": "upstream: chunks need a Cache",
    "continuation": "upstream: a cache of tuples has no length",
    "hidden_states": "the graph returns logits, keys and values",
    "static": "keys and values are tuples",
}

BARE_FAMILIES = [
    Family("bare_module", "decoder", build_module, _inputs, MODES, NO_EMBEDS),
    Family("wrapper", "decoder", build_wrapper, _inputs, MODES, NO_EMBEDS),
    Family("session", "decoder", build_session, _inputs, MODES, NO_EMBEDS | OF_TUPLES),
]
