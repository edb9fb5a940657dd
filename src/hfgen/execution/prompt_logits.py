"""The logits of a prompt, some positions at a time: all of them would be larger than most models.

A forward of the prompt keeps the hidden states that go into the model's head. Then the model's own
forward runs again on some of them after another, with a stand-in for all that comes before the head.
So scaling, caps and whatever else follows is the model's, whose parts need not be known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .. import families
from ..batch import take_rows
from ..caches.dynamic import GrowingCache
from ..call import ModelKwargs, Run
from .prefill import prefill
from .shared_prompt import with_own_states
from .views import replaced

#: Positions of a row that go through the head together, at most, and bytes of their logits in float32.
POSITIONS, BYTES = 1024, 2**27

#: Arguments of a forward that are about the loop, or about more than the logits.
LEFT_OUT = ("past_key_values", "cache_params", "output_attentions", "output_hidden_states")


class PromptLogits:
    """Logits ``(prompts, n, vocab)`` of some positions of the prompts after another, in the model's dtype.

    A forward of its own, without the call's cache: in chunks, if the call asks for ``prefill_chunk_size``.
    The head's part of it takes ``BYTES`` at most. Where a model has no such part, and of
    encoder-decoders, whose decoders' prompts are short, all logits are made at once.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        shared = None if run.call is None else run.call.shared_prompt
        ids, kwargs = run.ids, run.model_kwargs
        if shared is not None:  # the prompts before rows were repeated
            added = {name: v for name, v in kwargs.items() if name not in shared.model_kwargs}
            ids, kwargs = shared.ids, shared.model_kwargs | added
        kwargs = {name: v for name, v in kwargs.items() if name not in LEFT_OUT}
        if run.call is not None and run.call.prompt is not None:
            index = torch.arange(0, len(ids), len(ids) // run.call.prompt.batch_size)
            if len(index) < len(ids):
                kwargs = {n: take_rows(v, index, len(ids), n) for n, v in kwargs.items()}
                ids = ids[index.to(ids.device)]
        #: ``(prompts, length)``
        self.ids = ids
        self.kwargs = with_own_states(kwargs) | {"use_cache": False}
        if run.model._supports_logits_to_keep():
            self.kwargs["logits_to_keep"] = 0

    @property
    def is_token(self) -> Tensor:
        """``(prompts, length)``: bools, false where there is padding."""
        name = "decoder_attention_mask" if self.run.is_encoder_decoder else "attention_mask"
        mask = self.kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == self.ids.shape:
            return mask.bool()
        return torch.ones_like(self.ids, dtype=torch.bool)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.run.is_encoder_decoder:
            body = Body.of(self.run, self.ids, self.kwargs)
            if body is not None:
                return body.logits(self.ids)
        return self.at_once()

    def at_once(self) -> Iterator[Tensor]:
        model = self.run.model
        model_inputs = model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=None, is_first_iteration=True, **self.kwargs
        )
        yield from model(**model_inputs, return_dict=True).logits.split(POSITIONS, dim=1)


class Body:
    """A model without its head, and what it returned for the prompts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        #: Of each module that may be what comes before the head: its path, and what it has returned.
        self.found: dict[str, list[Any]] = {path: [] for path in _bodies(model)}
        self.vocab = self.depth = 0

    @classmethod
    def of(cls, run: Run, ids: Tensor, kwargs: ModelKwargs) -> Body | None:
        """What a forward of ``ids (prompts, length)`` gives; ``None`` if it is not one body and a head."""
        body, config = cls(run.model), run.config
        if not body.found:
            return None
        if config.prefill_chunk_size is not None:
            decoder = run.model.config.get_text_config(decoder=True)
            kwargs = kwargs | {"past_key_values": GrowingCache(config=decoder), "use_cache": True}
        outputs = prefill(body.view(), ids, config, kwargs)
        body.vocab = outputs.logits.shape[-1]
        body.found = {path: found for path, found in body.found.items() if _cover(found, ids.shape)}
        while len(body.found) > 1:
            body.found.popitem()
        return body if body.found else None

    def view(self) -> Any:
        """A view of the model that keeps what its body returns, and makes logits of the last position."""
        view = self.model
        for path in reversed(self.found):  # the innermost first
            view = self._keeping(view, path)
        return view

    def _keeping(self, view: Any, path: str) -> Any:
        module = view.get_submodule(path)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            outputs = module(*args, **kwargs)
            self.depth -= 1
            self.found[path].append(outputs)
            if self.depth or (states := _states(outputs)) is None:
                return outputs
            return _with_states(outputs, states[:, -1:])

        return replaced(view, path, called)

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Logits ``(prompts, n, vocab)`` of some positions after another."""
        ((path, found),) = self.found.items()
        given: list[Any] = []
        view = replaced(self.model, path, lambda *args, **kwargs: given[0])
        view._forward_hooks, view._forward_pre_hooks = {}, {}
        n = max(1, min(POSITIONS, BYTES // (4 * len(ids) * self.vocab)))
        keep = {"logits_to_keep": 0} if self.model._supports_logits_to_keep() else {}
        start = 0
        for outputs in found:
            for states in _states(outputs).split(n, dim=1):
                given[:] = [_with_states(outputs, states)]
                part = ids[:, start : start + states.shape[1]]
                start += states.shape[1]
                yield view(input_ids=part, use_cache=False, return_dict=True, **keep).logits


def _bodies(model: Any) -> list[str]:
    """The paths of the modules that may be all of a model but its head, the outermost first."""
    if not families.has_plain_head(model):
        return []
    names = (model.base_model_prefix, "model")
    paths = [name for name in names if model._modules.get(name) is not None][:1]
    # OPT and decoders taken out of encoder-decoders call the decoder within, and not its owner.
    decoder = model.get_decoder() if paths else None
    inner = [path for path, module in model.named_modules() if module is decoder]
    return paths + [path for path in inner if path not in ("", *paths)]


def _states(outputs: Any) -> Any:
    """The hidden states ``(rows, n, size)`` that a body returns."""
    states = outputs[0] if isinstance(outputs, tuple | ModelOutput) else None
    return states if isinstance(states, Tensor) and states.ndim == 3 else None


def _with_states(outputs: Any, states: Tensor) -> Any:
    """``outputs`` of a body with other hidden states."""
    if isinstance(outputs, ModelOutput):
        outputs = copy.copy(outputs)
        outputs[next(iter(outputs))] = states
        return outputs
    return (states, *outputs[1:])


def _cover(found: list[Any], shape: torch.Size) -> bool:
    """Whether outputs of a body are of all positions of ids ``(rows, length)``."""
    states = [_states(outputs) for outputs in found]
    if not states or any(each is None for each in states):
        return False
    return (len(states[0]), sum(each.shape[1] for each in states)) == tuple(shape)
