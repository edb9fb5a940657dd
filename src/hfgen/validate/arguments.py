"""The arguments of ``generate``: of the right kind, and known to the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils import TransformersKwargs

from ..call import Request
from .fields import with_suggestions

#: Arguments that are tensors with a row per prompt, if they are given.
TENSORS = (
    "inputs input_ids inputs_embeds attention_mask position_ids decoder_input_ids "
    "decoder_attention_mask negative_prompt_ids negative_prompt_attention_mask"
).split()


def check_request(request: Request) -> None:
    """Raise ``TypeError`` for an argument of ``generate`` that is of the wrong kind."""
    config = request.generation_config
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(
            f"`generation_config` has to be a GenerationConfig, but is {_kind(config)}. "
            "Write GenerationConfig(**fields), or pass the fields as keyword arguments."
        )
    for name in ("logits_processor", "stopping_criteria"):
        functions = getattr(request, name)
        if functions is not None and not isinstance(functions, list | tuple):
            raise TypeError(
                f"`{name}` has to be a list, but is {_kind(functions)}. Put it into a list."
            )
        for function in functions or ():
            if not callable(function):
                raise TypeError(f"`{name}` has to hold callables, but holds {_kind(function)}.")
    streamer = request.streamer
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"`streamer` has to have the methods put() and end(), but is {_kind(streamer)}."
        )
    function = request.prefix_allowed_tokens_fn
    if function is not None and not callable(function):
        raise TypeError(f"`prefix_allowed_tokens_fn` has to be callable, but is {_kind(function)}.")
    assistant = request.assistant_model
    if assistant is not None and not (
        isinstance(assistant, nn.Module)  # whether it generates is asked when the mode is known
        or hasattr(assistant, "generate")
        or hasattr(assistant, "get_candidates")
        or (hasattr(assistant, "draft") and hasattr(assistant, "observe"))
    ):
        raise TypeError(
            "`assistant_model` has to be a model that generates, a drafter with the methods draft() "
            f"and observe(), or a CandidateGenerator, but is {_kind(assistant)}."
        )
    custom = request.custom_generate
    if custom is not None and not (callable(custom) or isinstance(custom, str)):
        raise TypeError(
            "`custom_generate` has to be a callable or a repository's name or path, but is "
            f"{_kind(custom)}."
        )
    for name in TENSORS:
        tensor = getattr(request, name, request.kwargs.get(name))
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"`{name}` has to be a tensor, but is {_kind(tensor)}. {_advice(tensor)}"
            )
        if tensor is not None and tensor.ndim == 0:
            raise IndexError(f"`{name}` has to be (batch, …), but is one number, {tensor}.")


def _advice(value: Any) -> str:
    if hasattr(value, "input_ids") or isinstance(value, dict):
        return "Unpack it: generate(**inputs)."
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and any(isinstance(text, str) for text in texts):
        return (
            "Pass what the tokenizer makes of it: generate(**tokenizer(text, return_tensors='pt'))."
        )
    return "Use torch.tensor(...)."


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:60]})"


def accepted_names(model: Any) -> set[str]:
    """The keyword arguments that the model takes, through its forward or a hook."""
    known = set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    if known & {"kwargs", "model_kwargs"}:  # it passes on whatever forward takes
        known |= set(inspect.signature(model.forward).parameters)
    if model.config.is_encoder_decoder:
        known.add("decoder_input_ids")
        base_model = getattr(model, model.base_model_prefix, None)
        for part, prefix in (("encoder", ""), ("decoder", "decoder_")):
            module = getattr(model, part, None)
            if module is None:
                module = getattr(base_model, part, None)
            if module is not None:
                known |= {prefix + name for name in inspect.signature(module.forward).parameters}
    known |= TransformersKwargs.__optional_keys__ | {"debug_io", "mm_encoder_outputs"}
    return known


def validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for keyword arguments that the model does not take; typos end here."""
    known = accepted_names(self)
    unknown = [
        name for name, value in model_kwargs.items() if value is not None and name not in known
    ]
    if unknown:
        fields = GenerationConfig().__dict__
        raise ValueError(
            f"{type(self).__name__}.generate() does not know {with_suggestions(unknown, known | set(fields))}: "
            "neither the generation config nor the model's forward takes it."
        )
