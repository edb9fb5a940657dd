"""The logits of a prompt, computed for some positions at a time to limit memory.

A forward of the prompt keeps the hidden states that go into the model's head. Then the model's own
forward runs again on some of them after another, with a stand-in for all that comes before the head.
So scaling, caps and whatever else follows is the model's, whose parts need not be known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .. import families
from ..families import CACHE
from ..memory.batch import take_rows
from ..memory.caches.dynamic import GrowingCache
from ..state.run import Run
from .executor import forward_prompt
from .prompts import with_own_states
from .views import replaced, view_of_all

#: Positions of a row that go through the head together, at most, and bytes of their logits in float32.
POSITIONS, BYTES = 1024, 2**27

#: Arguments of a forward that concern the loop, or more than the logits.
LEFT_OUT = (CACHE, "cache_params", "output_attentions", "output_hidden_states")


class PromptLogits:
    """Logits ``(prompts, n, vocab)`` of some positions of the prompts after another, in the model's dtype.

    They are made of the states of the call's own prefill, if it was watched; else of another forward
    without the call's cache, in chunks if the call sets ``prefill_chunk_size``. A piece takes ``BYTES`` at
    most. A model whose head cannot be told from its body, and an encoder-decoder, whose decoder's prompt is
    short, makes all logits at once.
    """

    def __init__(self, run: Run) -> None:
        self.model, self.config = run.model, run.config
        self.is_encoder_decoder = run.is_encoder_decoder
        shared = None if run.call is None else run.call.shared_prompt
        ids, kwargs = run.ids, run.model_kwargs
        if shared is not None:  # the prompts before rows were repeated
            ids, kwargs = shared.ids, kwargs | shared.model_kwargs
        kwargs = {name: v for name, v in kwargs.items() if name not in LEFT_OUT}
        if run.call is not None and run.call.prompt is not None:
            index = torch.arange(0, len(ids), len(ids) // run.call.prompt.batch_size)
            if len(index) < len(ids):
                kwargs = {n: take_rows(v, index, len(ids), n) for n, v in kwargs.items()}
                ids = ids[index.to(ids.device)]
        self.ids = ids  # ``(prompts, length)``
        self.kwargs = with_own_states(kwargs) | {"use_cache": False}
        if run.model._supports_logits_to_keep():
            self.kwargs["logits_to_keep"] = 0

    @property
    def is_token(self) -> Tensor:
        """``(prompts, length)``: bools, false where there is padding."""
        prefix = "decoder_" if self.is_encoder_decoder else ""
        mask: Any = self.kwargs.get(prefix + "attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != self.ids.shape:
            mask = torch.ones_like(self.ids)
        return mask.bool()

    def of(self, watched: Body | None = None) -> Iterator[Tensor]:
        """The logits; ``watched``: the body of the call's own prefill, if it was watched."""
        if watched is not None and watched.covers(self.ids):
            return watched.logits(self.ids)
        body = None if self.is_encoder_decoder else Body.of_model(view_of_all(self.model))
        if body is None:
            return self.at_once()
        kwargs = self.kwargs
        if self.config.prefill_chunk_size is not None:
            decoder = self.model.config.get_text_config(decoder=True)
            kwargs = kwargs | {CACHE: GrowingCache(config=decoder), "use_cache": True}
        forward_prompt(body.view(), self.ids, self.config, kwargs)
        return body.logits(self.ids) if body.covers(self.ids) else self.at_once()

    def at_once(self) -> Iterator[Tensor]:
        """All logits of one forward, in pieces."""
        model: Any = view_of_all(self.model)
        model_inputs = model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=None, is_first_iteration=True, **self.kwargs
        )
        logits = model(**model_inputs, return_dict=True).logits
        yield from logits.split(POSITIONS, dim=1)


class Body:
    """All of a model but its head, and the outputs that it has returned."""

    def __init__(self, model: Any, paths: list[str]) -> None:
        self.model = model
        #: Outputs by path of each module that may be the body, the outermost first.
        self.outputs: dict[str, list[Any]] = {path: [] for path in paths}
        self.depth = 0  # how many of these modules are running

    @classmethod
    def of_model(cls, model: Any, n_paths: int | None = None) -> Body | None:
        """The body of ``model``, at the first ``n_paths`` paths where it may be; ``None`` if unknown.

        The outermost path is the first.
        """
        if not (families.has_plain_head(model) and hasattr(model, "_modules")):
            return None
        names = (getattr(model, "base_model_prefix", ""), "model")
        paths = [name for name in names if model._modules.get(name) is not None][:1]
        # OPT and decoders taken out of encoder-decoders call the decoder within, and not its owner.
        decoder = model.get_decoder() if paths and hasattr(model, "get_decoder") else None
        inner = [path for path, module in model.named_modules() if module is decoder]
        paths += [path for path in inner if path not in ("", *paths)]
        return cls(model, paths[:n_paths]) if paths else None

    @classmethod
    def of_prefill(cls, run: Run) -> Body | None:
        """The body to watch in the prefill of ``run``; ``None`` if watching would change the prefill."""
        if (
            (run.call is not None and run.call.prefix_session is not None)
            or run.config.prefill_chunk_size is not None
            or getattr(run.model, "_compiled_call_impl", None) is not None
            or run.is_encoder_decoder
            or not run.model._supports_logits_to_keep()
        ):
            return None
        return cls.of_model(run.model, n_paths=1)

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """Replace the run's model, within, by a view that keeps what its body returns."""
        view = self.view()
        before, logits_to_keep = dict(vars(view)), run.model_kwargs.get("logits_to_keep")
        run.model, run.model_kwargs["logits_to_keep"] = view, 0
        try:
            yield
        finally:
            run.model, run.model_kwargs["logits_to_keep"] = self.model, logits_to_keep
            written = {name: v for name, v in vars(view).items() if before.get(name) is not v}
            vars(self.model).update(written)

    def view(self) -> Any:
        """A view of the model that keeps what its body returns, and makes logits of the last position."""
        view = self.model
        for path in reversed(self.outputs):  # the innermost first
            view = replaced(view, path, partial(self._call, view.get_submodule(path), path))
        return view

    def _call(self, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        outputs = module(*args, **kwargs)
        self.depth -= 1
        states = _states(outputs)
        bare = None if states is None else _with_states(outputs, states, is_bare=True)
        self.outputs[path].append(bare)
        if self.depth or states is None:
            return outputs
        return _with_states(outputs, states[:, -1:])

    def covers(self, ids: Tensor) -> bool:
        """Whether a module returned the states of all ``ids (prompts, length)``; drops those of others."""
        for path, outputs in self.outputs.items():
            if not outputs or any(part is None for part in outputs):
                continue
            states = [_states(part) for part in outputs]
            length = sum(part.shape[1] for part in states)
            if len(states[0]) % len(ids) == 0 and length == ids.shape[1]:
                self.outputs = {path: outputs}
                return True
        self.outputs = {}
        return False

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Logits ``(prompts, n, vocab)`` of some positions after another."""
        start = 0
        (outputs_of_chunks,) = self.outputs.values()
        for outputs in outputs_of_chunks:
            states = _states(outputs)
            states = states[:: len(states) // len(ids)]
            yield from self._logits(outputs, states, ids[:, start : start + states.shape[1]])
            start += states.shape[1]

    def logits_at(self, ids: Tensor, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Logits ``(n, vocab)`` of the positions ``rows (m,)``, ``columns (m,)``, some after another."""
        ((outputs,),) = self.outputs.values()
        states = _states(outputs)[rows, columns][None]
        for logits in self._logits(outputs, states, ids[rows, columns][None]):
            yield logits[0]

    def _logits(self, outputs: Any, states: Tensor, ids: Tensor) -> Iterator[Tensor]:
        """Logits ``(rows, n, vocab)`` of ``states (rows, length, size)``, some positions after another."""
        (path,), body_outputs = self.outputs, [None]
        view = replaced(self.model, path, lambda *args, **kwargs: body_outputs[0], is_copied=True)
        view._forward_hooks, view._forward_pre_hooks = {}, {}
        keep = {"logits_to_keep": 0} if self.model._supports_logits_to_keep() else {}
        n = max(1, min(POSITIONS, BYTES // (4 * len(states) * families.n_scores(self.model))))
        for part, tokens in zip(states.split(n, dim=1), ids.split(n, dim=1), strict=True):
            body_outputs[:] = [_with_states(outputs, part)]
            yield view(input_ids=tokens, use_cache=False, return_dict=True, **keep).logits


def _states(outputs: Any) -> Any:
    """The hidden states ``(rows, n, size)`` that a body returns."""
    states = outputs[0] if isinstance(outputs, tuple | ModelOutput) else None
    return states if isinstance(states, Tensor) and states.ndim == 3 else None


def _with_states(outputs: Any, states: Tensor, is_bare: bool = False) -> Any:
    """``outputs``, a tuple or ``ModelOutput``, with other states; ``is_bare``: and nothing besides."""
    if not isinstance(outputs, ModelOutput):
        return (states, *(None if is_bare else part for part in outputs[1:]))
    name = next(iter(outputs))
    if is_bare:
        return type(outputs)(**{name: states})
    outputs = copy.copy(outputs)
    outputs[name] = states
    return outputs
