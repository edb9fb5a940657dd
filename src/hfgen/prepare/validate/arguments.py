"""Checks of the arguments of ``generate``: their types, and whether the model knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig

from ...running.signatures import accepted_names
from ...settings.cancellation import Cancellation
from ...settings.fields import FIELDS, with_suggestions
from ...state.call import Request


def _has(*methods: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, method) for method in methods)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_assistant(value: Any) -> bool:
    # Whether a model generates is asked when the mode is known.
    is_drafter = _has("draft", "observe")(value) or hasattr(value, "get_candidates")
    return isinstance(value, nn.Module) or hasattr(value, "generate") or is_drafter


#: Arguments that are no tensors: the test of each, and what it has to do.
ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "generation_config": (
        lambda value: (
            isinstance(value, GenerationConfig)
            or (_is_list(value) and all(isinstance(one, GenerationConfig) for one in value))
        ),
        "be a GenerationConfig, or a list with one for each prompt (fields may be passed as keyword "
        "arguments)",
    ),
    "logits_processor": (_is_list, "be a list"),
    "stopping_criteria": (_is_list, "be a list"),
    "streamer": (_has("put", "end"), "have the methods put() and end()"),
    "prefix_allowed_tokens_fn": (callable, "be callable"),
    "assistant_model": (
        _is_assistant,
        "be a model that generates, a drafter with the methods draft() and observe(), or a "
        "CandidateGenerator",
    ),
    "custom_generate": (
        lambda value: callable(value) or isinstance(value, str),
        "be a callable or a repository's name or path",
    ),
}

#: Arguments that are tensors with a row per prompt, if they are given.
TENSORS = (
    "inputs input_ids inputs_embeds attention_mask position_ids decoder_input_ids "
    "decoder_attention_mask negative_prompt_ids negative_prompt_attention_mask"
).split()


def check_request(request: Request) -> None:
    """Raise ``TypeError`` for an argument of ``generate`` that is of the wrong kind."""
    for name, (accepts, what) in ARGUMENTS.items():
        value = getattr(request, name)
        if value is not None and not accepts(value):
            raise TypeError(f"`{name}` has to {what}, but is {_kind(value)}.")
    for name in ("tokenizer", "assistant_tokenizer"):
        tokenizer = request.kwargs.get(name)
        if isinstance(tokenizer, str):  # a name; tokenizers have no class in common
            loaded = "AutoTokenizer.from_pretrained() loads it"
            raise TypeError(
                f"`{name}` has to be a tokenizer, as {loaded}, but is {_kind(tokenizer)}."
            )
    cancellation = request.kwargs.get("cancel")
    if cancellation is not None and not isinstance(cancellation, Cancellation):
        raise TypeError(f"`cancel` has to be a hfgen.Cancellation, but is {_kind(cancellation)}.")
    for name in ("logits_processor", "stopping_criteria"):
        for function in getattr(request, name) or ():
            if not callable(function):
                raise TypeError(f"`{name}` has to hold callables, but holds {_kind(function)}.")
    for name in TENSORS:
        tensor = getattr(request, name, request.kwargs.get(name))
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            advice = _advice(tensor)
            raise TypeError(f"`{name}` has to be a tensor, but is {_kind(tensor)}. {advice}")
        if tensor is not None and tensor.ndim == 0:
            raise IndexError(f"`{name}` has to be (batch, …), but is one number, {tensor}.")


def _advice(value: Any) -> str:
    if hasattr(value, "input_ids") or isinstance(value, dict):
        return "Unpack it: generate(**inputs)."
    if isinstance(value, str) or (_is_list(value) and any(isinstance(text, str) for text in value)):
        return "Tokenize it: generate(**tokenizer(text, return_tensors='pt'))."
    return "Use torch.tensor(...)."


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:60]})"


def validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for keyword arguments that the model does not take; typos end here."""
    known = accepted_names(self)
    given = (name for name, value in model_kwargs.items() if value is not None)
    if unknown := [name for name in given if name not in known]:
        named = with_suggestions(unknown, known | FIELDS.keys())
        raise ValueError(
            f"{type(self).__name__}.generate() does not know {named}: neither the generation config "
            "nor the model's forward takes it."
        )
