"""Calls that do not use hfgen's loop: a repository's own generate, and continuous batching."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from . import families
from .prepare import rows
from .running import prefix
from .settings.logs import logger
from .state.call import Request


def run(model: Any, request: Request) -> Any:
    """Run a call whose ``request.runs_elsewhere``; returns what that code returns.

    ``custom_generate/generate.py`` of a repository runs only with ``trust_remote_code=True``.
    """
    if not isinstance(request.custom_generate, str):
        return generate_paged(model, request)
    kwargs = dict(request.kwargs)
    # Never None, for which transformers asks on standard input.
    trust = {"trust_remote_code": bool(kwargs.pop("trust_remote_code", False))}
    function = model.load_custom_generate(request.custom_generate, **trust, **kwargs)
    names = (name for name in request.__slots__ if name not in ("kwargs", "custom_generate"))
    return function(model=model, **{name: getattr(request, name) for name in names}, **kwargs)


def get_deprecated_gen_repo(
    self: Any, generation_mode: Any, trust_remote_code: bool | None, custom_generate: Any = None
) -> None:
    """The hub repository that upstream moved a mode to: none, since every mode runs here."""


@functools.wraps(transformers.GenerationMixin.generate_batch)
def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
    from .engine import upstream  # only now: the engine imports the mixin

    return upstream.generate_batch(self, *args, **kwargs)


generate_batch.__doc__ = "See ``hfgen.engine.upstream``; arguments and results are transformers'."


def session(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``hfgen.Session`` of this model: ``generate`` in steps that can be taken back. Nothing is decoded yet."""
    from .session import Session  # only now: sessions import the mixin

    return Session(self, *args, **kwargs)


#: Arguments that continuous batching does not take: they know the rows of a batch, or ask for more than ids.
NOT_BATCHED = (
    "prefix_allowed_tokens_fn streamer negative_prompt_ids negative_prompt_attention_mask interventions record "
    "logprobs logprob_token_ids prompt_logprobs logprobs_support output_speculation output_metrics output_card"
).split()


def generate_paged(model: Any, request: Request) -> torch.Tensor:
    """Continue the prompts by continuous batching (``cache_implementation="paged"``).

    Returns ``(1, rows, length)``, as upstream does, without masked tokens and padded on the right.

    Raises ``NotImplementedError`` for encoder-decoders and what is in ``NOT_BATCHED``; ``RuntimeError`` if
    decoding a prompt fails.
    """
    logger.warning(
        "`cache_implementation='paged'` uses continuous batching; generate_batch() does this directly."
    )
    prefix.take_argument(model, request)  # which is refused
    kwargs = {name: v for name, v in request.kwargs.items() if name != "prefix_cache"}
    ids = kwargs.pop("input_ids", None) if request.inputs is None else request.inputs
    if ids is None:
        raise ValueError("Continuous batching needs a prompt: pass `inputs` or `input_ids`.")
    if ids.ndim not in (1, 2):
        raise ValueError(
            f"`input_ids` has to be (length,) or (batch, length), but has shape {tuple(ids.shape)}."
        )
    if model.config.is_encoder_decoder:
        raise NotImplementedError(
            "`cache_implementation='paged'` is for decoder-only models: call generate_batch()."
        )
    names = request.__slots__[1:-1]
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    configs = rows.each(request.generation_config or model.generation_config)
    for config, name in product(configs, NOT_BATCHED):
        value = (vars(config) | kwargs | given).get(name)
        if value is not None and value is not False:
            raise NotImplementedError(f"Continuous batching does not take `{name}` (={value}).")
    if given.pop("synced_gpus", None) is not None:
        logger.warning(f"Continuous batching ignores `synced_gpus` (={request.synced_gpus}).")

    ids = torch.atleast_2d(ids)
    mask = kwargs.pop("attention_mask", None)
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.atleast_2d(mask).bool()
    prompts = [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)]
    del kwargs["cache_implementation"]
    results = model.generate_batch(inputs=prompts, **given, **kwargs).values()
    if failed := [result for result in results if result.error is not None]:
        raise RuntimeError(f"Continuous batching of {failed[0].request_id}: {failed[0].error}")
    sequences = [torch.tensor(row.prompt_ids + row.generated_tokens) for row in results]
    config, _ = model._prepare_generation_config(configs[0])
    pad = kwargs.get("pad_token_id", config.pad_token_id)
    pad = config.eos_token_id if pad is None else pad
    pad = (pad[0] if isinstance(pad, list) else pad) or 0
    return pad_sequence(sequences, True, pad).to(families.device_of(model)).unsqueeze(0)
