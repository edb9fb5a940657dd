"""``Executor``: the interface through which a strategy runs the model. All forwards are made here."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from transformers import Cache, GenerationConfig
from transformers import GenerationMixin as UpstreamMixin
from transformers.utils import ModelOutput

from .. import families
from ..families import CACHE, parameters
from ..memory.batch import Batch
from ..memory.caches import layers
from ..memory.caches.static import visible_length
from ..memory.caches.static_layers import mark_dynamic
from ..state.call import ModelKwargs
from ..state.run import Run
from . import prompts
from .graphs import Recorded, recorded_forward
from .step_inputs import resized

#: Bound here, since ``hfgen.patch`` sets hfgen's in its place.
_upstream_criteria = UpstreamMixin._valid_auto_compile_criteria

#: Compiled layers look at their guards again where one cache is in another call.
_numbers = itertools.count()

#: By number of dimensions of an input, those whose sizes differ between calls: rows, keys, and lengths.
DYNAMIC_DIMS = {4: (0, 3), 3: (0, 1), 2: (0, 1), 1: (0,)}
#: Names of forward's inputs that have a row per row.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")


class Executor:
    """Runs the model of one call, through the hooks of its class."""

    def __init__(self, run: Run, may_compile: bool = False, may_record: bool = False) -> None:
        if isinstance(cache := run.model_kwargs.get(CACHE), Cache):
            cache.call_number = next(_numbers)
        self.call: Callable[..., ModelOutput] = run.model.__call__
        is_recorded = may_record and getattr(run.config, "use_cuda_graph", False)
        if is_recorded and (recorded := recorded_forward(run)) is not None:
            self.call = recorded
        elif may_compile:
            self.call = fastest_forward(run.model, run.config, run.model_kwargs)
        #: Whether the host launches a forward long before the device has computed it.
        self.is_quick_to_launch = isinstance(self.call, Recorded | Compiled)
        #: Whether a forward writes to what the last one returned.
        self.overwrites = isinstance(self.call, Recorded)

    def prefill(self, run: Run, is_first_iteration: bool = True) -> ModelOutput:
        """Forward the prompt of each row, once where rows have the same one."""
        with nullcontext() if run.body is None else run.body.watching(run):
            if run.call is not None and run.call.shared_prompt is not None:
                return prompts.prefill(run, is_first_iteration)
            return run.model._prefill(
                run.ids, run.config, run.model_kwargs, is_first_iteration=is_first_iteration
            )

    def forward(self, run: Run, ids: torch.Tensor | None = None, n_new: int = 1) -> ModelOutput:
        """Forward the newest ``n_new`` tokens of each row, by the way that was chosen."""
        return next_token(run, self.call, ids, n_new)

    def verify(
        self, run: Run, ids: torch.Tensor, n_new: int, *, is_first: bool, **overrides: Any
    ) -> ModelOutput:
        """``verify``, by the way that was chosen; the first forward is plain."""
        execute = run.model if is_first else self.call
        return verify(run, execute, ids, n_new, is_first=is_first, **overrides)


def verify(
    run: Run,
    execute: Callable[..., ModelOutput],
    ids: torch.Tensor,
    n_new: int,
    *,
    is_first: bool = False,
    **overrides: Any,
) -> ModelOutput:
    """Forward ``ids (rows, length)``, of which ``n_new`` come after ``run.ids``.

    Logits are those of the last known token and of the ``n_new`` ones. The first forward includes what the
    cache lacks of the prompt. ``overrides``: other arguments of forward.
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
    cache = model_inputs.get(CACHE)
    n_keys = layers.n_keys(cache)
    is_plain = is_first or not families.IS_5_24
    with nullcontext() if is_plain else run.model._optimize_model_for_decode():
        outputs = execute(**model_inputs | overrides)
    layers.check_growth(cache, n_keys, ids.shape[1] if n_fed is None else n_fed, run.model)
    if (n_positions := outputs.logits.shape[1]) <= n_new:
        raise RuntimeError(
            f"{type(run.model).__name__} was fed {n_new} drafted tokens and returned logits of {n_positions} "
            f"positions; to verify them takes {n_new + 1}. Its forward drops the others: decode without drafts."
        )
    return outputs


def next_token(
    run: Run | Batch, execute: Callable, ids: torch.Tensor | None = None, n_new: int = 1
) -> ModelOutput:
    """Forward the last ``n_new`` tokens of ``ids (rows, length)`` or ``run.ids``; all of them without a cache."""
    model_inputs = run.model.prepare_inputs_for_generation(
        run.ids if ids is None else ids,
        next_sequence_length=n_new if run.model_kwargs["use_cache"] else None,
        **run.model_kwargs,
    )
    return execute(**model_inputs, return_dict=True)


# ---------------------------------------------------------------- prompts


def forward_prompt(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward the part of a prompt that the cache does not hold; return the last outputs.

    The hook ``_prefill``. A continued prompt comes in full, or as its new tokens with a mask over all of it.
    """
    reads_embeds = is_first_iteration and not self.config.is_encoder_decoder
    embeds = model_kwargs.get("inputs_embeds") if reads_embeds else None
    new_length = uncached_length(self, input_ids, generation_config, model_kwargs, embeds)
    if generation_config.prefill_chunk_size is not None:
        execute = fastest_forward(self, generation_config, model_kwargs)
        prompt = input_ids, embeds, new_length, is_first_iteration
        return prompts.prefill_in_chunks(self, execute, generation_config, model_kwargs, *prompt)
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
    """How many tokens of the prompt the cache does not hold; ``None``: forward all ``input_ids``."""
    if (cache := model_kwargs.get(CACHE)) is None:
        return None
    if all(getattr(cache, "is_linear", (False,))) and not layers.counts_tokens(cache):
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
            f"`{CACHE}` holds {cache.get_seq_length()} tokens and `decoder_input_ids` has "
            f"{input_ids.shape[1]}, so that none is new. Pass all tokens from the start; or only the "
            "new ones, with a `decoder_attention_mask` over all of them."
        )
    return n_new


# ---------------------------------------------------------------- how a step is launched


class Compiled:
    """A model's compiled forward, not compiled again for another batch or another filled length."""

    def __init__(self, model: Any, compile_config: Any, cache: Any) -> None:
        compiled = getattr(vars(model).get("_compiled_call"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__self__", model) is not model:
            del model._compiled_call  # a copied model has that of the one that it is a copy of
        self.forward = model.get_compiled_call(compile_config)
        self.visible = visible_length(cache)
        if self.visible is not None:
            self.visible.is_coarse = True

    def __call__(self, **inputs: Any) -> Any:
        from torch._dynamo.utils import counters  # takes a second: not for those who do not compile

        for value in inputs.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor):
                    mark_dynamic(tensor, *DYNAMIC_DIMS.get(tensor.ndim, ()))
        ids = next((inputs[n] for n in IDS if inputs.get(n) is not None), ())
        # A graph for several rows takes a single one, too. An older torch compiles again.
        is_general = len(ids) > 1 and hasattr(fx_config, "backed_size_oblivious")
        n_graphs = counters["stats"]["unique_graphs"]
        with fx_config.patch(backed_size_oblivious=True) if is_general else nullcontext():  # type: ignore[attr-defined]
            outputs = self.forward(**inputs)
        if counters["stats"]["unique_graphs"] != n_graphs:
            gc.collect()  # the compiler leaves cycles behind, and the cache would wait in them
        if self.visible is not None:
            self.visible.close()
        return outputs


def fastest_forward(model: Any, config: GenerationConfig, model_kwargs: ModelKwargs) -> Callable:
    """Return the model's forward, compiled where cache and device allow it."""
    if model._valid_auto_compile_criteria(model_kwargs, config):
        return Compiled(model, config.compile_config, model_kwargs.get(CACHE))
    return model.__call__


def valid_auto_compile_criteria(
    self: Any, model_kwargs: ModelKwargs, generation_config: GenerationConfig
) -> bool:
    """Return whether to compile forward: as transformers does, and on a CPU with a ``compile_config``."""
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
    if compile_config is not None and self.device.type == "cpu":
        generation_config = copy.copy(generation_config)
        generation_config.compile_config = copy.copy(compile_config)
        generation_config.compile_config._compile_all_devices = True
    return bool(_upstream_criteria(self, model_kwargs, generation_config))


def supports_logits_to_keep(self: Any) -> bool:
    """Return whether forward can leave out the logits of all but the last positions."""
    return "logits_to_keep" in parameters(self.forward)


# ---------------------------------------------------------------- for callers without an executor


def prefill(
    model: Any,
    ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward ``ids (rows, length)`` by the model's hook, as far as the cache does not hold them."""
    return model._prefill(ids, config, model_kwargs, is_first_iteration=is_first_iteration)


def call(model: Any, **inputs: Any) -> ModelOutput:
    """Forward ``inputs`` as they are: guidance's second branch, which decodes beside the loop."""
    return model(**inputs, return_dict=True)


def last_logits(outputs: ModelOutput, device: torch.device) -> torch.Tensor:
    """The last position's logits ``(rows, vocab)``, float32: a copy, for a view keeps all alive."""
    return outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=device)
