"""``Executor``: the interface through which a strategy runs the model."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from ..families import parameters
from ..memory.caches.layers import decoder_cache
from ..memory.caches.static import visible_length
from ..settings.logs import logger
from ..state.call import ModelKwargs
from ..state.run import Run
from . import shared_prompt
from .graphs import Recorded, recorded_forward
from .prefill import prefill_in_chunks
from .step_inputs import resized

#: What forward may take tokens as.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")
#: By number of dimensions of an input, those whose sizes differ between calls: rows, keys, and lengths.
DYNAMIC_DIMS = {4: (0, 3), 3: (0, 1), 2: (0, 1), 1: (0,)}

#: Compiled layers look at their guards again where one cache is in another call.
_numbers = itertools.count()


class Executor:
    """Runs the model of one call, through the hooks of its class.

    Decoding steps may be compiled, or recorded: then each forward overwrites what the last one returned.
    """

    def __init__(self, run: Run, may_compile: bool = False, may_record: bool = False) -> None:
        if isinstance(cache := run.model_kwargs.get("past_key_values"), Cache):
            cache.call_number = next(_numbers)
        self.call: Callable[..., ModelOutput] = run.model.__call__
        is_recorded = may_record and getattr(run.config, "use_cuda_graph", False)
        if is_recorded and (recorded := recorded_forward(run)) is not None:
            self.call = recorded
        elif may_compile:
            self.call = fastest_forward(run.model, run.config, run.model_kwargs)
        #: Whether the host has asked for a forward long before the device has computed it.
        self.is_quick_to_launch = isinstance(self.call, Recorded | Compiled)
        #: Whether a forward writes to what the last one returned.
        self.overwrites = isinstance(self.call, Recorded)

    def prefill(self, run: Run, is_first_iteration: bool = True) -> ModelOutput:
        """Forward the prompt of each row, once where rows have the same one."""
        with nullcontext() if run.body is None else run.body.watching(run):
            if run.call is not None and run.call.shared_prompt is not None:
                return shared_prompt.prefill(run, is_first_iteration)
            return run.model._prefill(
                run.ids, run.config, run.model_kwargs, is_first_iteration=is_first_iteration
            )

    def forward(self, run: Run, ids: torch.Tensor | None = None, n_new: int = 1) -> ModelOutput:
        """``next_token``, compiled where possible."""
        return next_token(run, self.call, ids, n_new)

    def verify(
        self, run: Run, ids: torch.Tensor, n_new: int, *, is_first: bool, **overrides: Any
    ) -> ModelOutput:
        """Forward ``ids (rows, length)``, of which ``n_new`` come after ``run.ids``.

        Logits are those of the last known token and of the ``n_new`` ones. The first forward includes
        what the cache lacks of the prompt. ``overrides``: other arguments of forward.
        """
        model_kwargs = resized(run, n_new)
        n_fed: int | None = n_new + 1
        if is_first:
            n_fed = uncached_length(run.model, run.ids, run.config, run.model_kwargs)
            n_fed = None if n_fed in (None, run.ids.shape[1]) else n_fed + n_new
        model_inputs = run.model.prepare_inputs_for_generation(
            ids, next_sequence_length=n_fed, is_first_iteration=is_first, **model_kwargs
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = n_new + 1
        execute = run.model if is_first else self.call
        return execute(**model_inputs | overrides)

    def reorder(self, rows: torch.Tensor) -> bool:
        """Reorder the rows of a recorded cache by ``rows (rows,)``; return False if nothing is recorded."""
        return isinstance(self.call, Recorded) and self.call.reorder(rows)


def next_token(
    run: Run, execute: Callable, ids: torch.Tensor | None = None, n_new: int = 1
) -> ModelOutput:
    """Forward the ``n_new`` last tokens of ``ids (rows, length)`` or ``run.ids``; all without a cache."""
    model_inputs = run.model.prepare_inputs_for_generation(
        run.ids if ids is None else ids,
        next_sequence_length=n_new if run.model_kwargs["use_cache"] else None,
        **run.model_kwargs,
    )
    return execute(**model_inputs, return_dict=True)


def prefill(
    model: Any,
    ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward ``ids (rows, length)`` by the model's hook, as far as the cache does not hold them."""
    return model._prefill(ids, config, model_kwargs, is_first_iteration=is_first_iteration)


def forward_prompt(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward the prompt, or as much of it as the cache does not hold; returns the last outputs.

    A continued prompt comes in full, or only its new tokens with a mask over all of it.
    """
    reads_embeds = is_first_iteration and not self.config.is_encoder_decoder
    embeds = model_kwargs.get("inputs_embeds") if reads_embeds else None
    new_length = uncached_length(self, input_ids, generation_config, model_kwargs, embeds)
    if generation_config.prefill_chunk_size is not None:
        execute = fastest_forward(self, generation_config, model_kwargs)
        return prefill_in_chunks(
            self,
            execute,
            input_ids,
            embeds,
            generation_config,
            model_kwargs,
            new_length,
            is_first_iteration,
        )
    model_inputs = self.prepare_inputs_for_generation(
        input_ids,
        next_sequence_length=new_length,
        is_first_iteration=is_first_iteration,
        **model_kwargs,
    )
    return self(**model_inputs, return_dict=True)


def uncached_length(
    self: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    embeds: torch.Tensor | None = None,
) -> int | None:
    """How many tokens of the prompt the cache does not hold; ``None`` for all that is given.

    Raises ``ValueError`` if it holds all that a decoder is given, so that nothing has logits.
    """
    if (cache := model_kwargs.get("past_key_values")) is None:
        return None
    if embeds is not None:
        return int(embeds.shape[1] - cache.get_seq_length())
    prefix = "decoder_" if self.config.is_encoder_decoder else ""
    mask = model_kwargs.get(prefix + "attention_mask")
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if input_ids.shape[1] != width:
        return None
    n_new = int(input_ids.shape[1] - cache.get_seq_length())
    if n_new < 1 and self.config.is_encoder_decoder and not config.is_assistant:
        raise ValueError(
            f"`past_key_values` holds {cache.get_seq_length()} tokens and `decoder_input_ids` has "
            f"{input_ids.shape[1]}, so that none is new. Pass all tokens from the start; or only the "
            "new ones, with a `decoder_attention_mask` over all of them."
        )
    return n_new


def call(model: Any, **inputs: Any) -> ModelOutput:
    """Forward ``inputs`` as they are: guidance's second branch, which decodes beside the loop."""
    return model(**inputs, return_dict=True)


def last_logits(outputs: ModelOutput, device: torch.device) -> torch.Tensor:
    """The last position's logits ``(rows, vocab)``, float32: a copy, for a view keeps all alive."""
    return outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=device)


class Compiled:
    """A compiled forward that is not compiled again for another batch or another filled length."""

    def __init__(self, forward: Callable, cache: Any) -> None:
        self.forward = forward
        self.visible = visible_length(cache)
        if self.visible is not None:
            self.visible.is_coarse = True

    def __call__(self, **inputs: Any) -> Any:
        from torch._dynamo.utils import counters  # takes a second: not for those who do not compile

        for value in inputs.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor):
                    for dim in DYNAMIC_DIMS.get(tensor.ndim, ()):
                        if tensor.shape[dim] > 1:  # one row or one token is a graph of its own
                            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        ids = next((inputs[n] for n in IDS if inputs.get(n) is not None), None)
        n_graphs = counters["stats"]["unique_graphs"]
        several_rows: Any = nullcontext()
        # A graph for several rows takes a single one, too. An older torch compiles again.
        if ids is not None and len(ids) > 1 and hasattr(fx_config, "backed_size_oblivious"):
            several_rows = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with several_rows:
            outputs = self.forward(**inputs)
        if counters["stats"]["unique_graphs"] != n_graphs:
            gc.collect()  # the compiler leaves cycles behind, and the cache would wait in them
        if self.visible is not None:
            self.visible.close()
        return outputs


def fastest_forward(model: Any, config: GenerationConfig, model_kwargs: ModelKwargs) -> Callable:
    """The model's forward, compiled where cache and device allow it."""
    if model._valid_auto_compile_criteria(model_kwargs, config):
        cache = model_kwargs.get("past_key_values")
        compiled = getattr(vars(model).get("_compiled_call"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__self__", model) is not model:
            del model._compiled_call  # a copied model has that of the one that it is a copy of
        return Compiled(model.get_compiled_call(config.compile_config), cache)
    return model.__call__


def valid_auto_compile_criteria(
    self: Any, model_kwargs: ModelKwargs, generation_config: GenerationConfig
) -> bool:
    """Whether to compile forward: the cache has a fixed shape, and nothing is offloaded.

    Accelerators compile by default, a CPU if there is a ``compile_config``.
    """
    compile_config = generation_config.compile_config
    if generation_config.disable_compile:
        return False
    if "exactness" in vars(self):
        if compile_config is None:
            return False
        raise ValueError(
            "exact: a compiled graph fuses operations that were probed one by one. Leave `compile_config`, or "
            "call hfgen.restore(model)."
        )
    cache = model_kwargs.get("past_key_values", model_kwargs.get("cache_params"))
    quantizer = getattr(self, "hf_quantizer", None)
    places = set(getattr(self, "hf_device_map", {}).values())
    is_for_device = self.device.type in ("cuda", "xpu", "neuron", "tpu") or (
        compile_config is not None
        and (self.device.type == "cpu" or compile_config._compile_all_devices)
    )
    can_compile = bool(
        cache is not None
        and cache.is_compileable
        # A dynamic cache with linear attention alone has fixed shapes too, but was not asked for.
        and type(decoder_cache(cache)) is not DynamicCache
        and is_for_device
        and (quantizer is None or quantizer.is_compileable)
        and "disk" not in places
        and (len(places) < 2 or "cpu" not in places)
    )
    if compile_config is not None and not can_compile:
        logger.warning_once(
            "`compile_config` is set, but the forward pass is not compiled: this needs a static cache, no "
            "offloading, and an accelerator or a CPU."
        )
    if can_compile:
        os.environ["TOKENIZERS_PARALLELISM"] = "0"  # its threads do not survive the forks
        is_flash = is_flash_attention_requested(self.config)
        if is_flash and compile_config is not None and compile_config.fullgraph:
            logger.warning_once(
                "`compile_config.fullgraph` is set to False: flash attention breaks the graph."
            )
            compile_config.fullgraph = False
    return can_compile


def supports_logits_to_keep(self: Any) -> bool:
    """Whether forward can leave out the logits of all but the last positions."""
    return "logits_to_keep" in parameters(self.forward)


@contextmanager
def optimize_model_for_decode(self: Any) -> Iterator[None]:
    """Let experts on accelerators use ``batched_mm``, which is faster for few tokens."""
    implementations = self.get_experts_implementation()
    if self.device.type == "cpu" or "grouped_mm" not in implementations.values():
        yield
        return
    logger.info_once("Decoding with the `batched_mm` experts instead of `grouped_mm`.")
    faster = {"grouped_mm": "batched_mm"}
    self.set_experts_implementation({k: faster.get(v, v) for k, v in implementations.items()})
    try:
        yield
    finally:
        self.set_experts_implementation(implementations)
