"""The logits of a prompt, computed for some positions at a time to limit memory.

A forward of the prompt keeps the hidden states that go into the model's head. Then the model's own
forward runs again on some of them after another, with a stand-in for all that comes before the head.
So scaling, caps and whatever else follows is the model's, whose parts need not be known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .. import families
from ..memory.batch import take_rows
from ..memory.caches.dynamic import GrowingCache
from ..state.run import Run
from ..state.vocabularies import n_scores
from .executor import forward_prompt
from .row_states import restored
from .shared_prompt import with_own_states
from .views import replaced

#: Positions of a row that go through the head together, at most, and bytes of their logits in float32.
POSITIONS, BYTES = 1024, 2**27

#: Arguments of a forward that are about the loop, or about more than the logits.
LEFT_OUT = ("past_key_values", "cache_params", "output_attentions", "output_hidden_states")


class PromptLogits:
    """Logits ``(prompts, n, vocab)`` of some positions of the prompts after another, in the model's dtype.

    Of the states that the call's own prefill has given, if it was watched; else a forward follows,
    without the call's cache: in chunks, if the call asks for ``prefill_chunk_size``. The head's part
    takes ``BYTES`` at most. Where a model has no such part, and of encoder-decoders, whose decoders'
    prompts are short, all logits are made at once.
    """

    def __init__(self, run: Run) -> None:
        self.model, self.config = run.model, run.config
        self.is_encoder_decoder = run.is_encoder_decoder
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
        name = "decoder_attention_mask" if self.is_encoder_decoder else "attention_mask"
        mask = self.kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == self.ids.shape:
            return mask.bool()
        return torch.ones_like(self.ids, dtype=torch.bool)

    def of(self, watched: Body | None = None) -> Iterator[Tensor]:
        """The logits; ``watched``, the body of the call's own forward_prompt, if there was one."""
        for body in (watched, None if self.is_encoder_decoder else Body.of_model(self.model)):
            if body is None:
                continue
            if body is not watched:
                self.forward(body)
            if body.covers(self.ids):
                return body.logits(self.ids)
        return self.at_once()

    def forward(self, body: Body) -> None:
        """Forward the prompts for what their ``body`` gives."""
        kwargs = self.kwargs
        if self.config.prefill_chunk_size is not None:
            decoder = self.model.config.get_text_config(decoder=True)
            kwargs = kwargs | {"past_key_values": GrowingCache(config=decoder), "use_cache": True}
        with restored(self.model):
            forward_prompt(body.view(), self.ids, self.config, kwargs)

    def at_once(self) -> Iterator[Tensor]:
        """Pieces of all logits."""
        model: Any = self.model
        with restored(model):
            model_inputs = model.prepare_inputs_for_generation(
                self.ids, next_sequence_length=None, is_first_iteration=True, **self.kwargs
            )
            logits = model(**model_inputs, return_dict=True).logits
        yield from logits.split(POSITIONS, dim=1)


class Body:
    """All of a model but its head, and what it has returned."""

    def __init__(self, model: Any, paths: list[str]) -> None:
        self.model = model
        #: Of each module that may be the body, the outermost first: its path, and what it returned.
        self.found: dict[str, list[Any]] = {path: [] for path in paths}
        #: How many of them are running.
        self.depth = 0

    @classmethod
    def of_model(cls, model: Any) -> Body | None:
        paths = _bodies(model)
        return cls(model, paths) if paths else None

    @classmethod
    def of_prefill(cls, run: Run) -> Body | None:
        """To watch the prefill of ``run``; ``None`` where it could not be as it is without that.

        That is so if all logits are made anyway, if it is in chunks or compiled, if a stored
        prefix takes the place of a part of it, and for encoder-decoders.
        """
        is_stored = run.call is not None and run.call.prefix_session is not None
        is_whole = not is_stored and run.config.prefill_chunk_size is None
        is_plain = getattr(run.model, "_compiled_call_impl", None) is None
        is_plain = is_plain and not run.is_encoder_decoder and run.model._supports_logits_to_keep()
        if not (is_whole and is_plain):
            return None
        paths = _bodies(run.model)[:1]
        return cls(run.model, paths) if paths else None

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """Within, the run's model is a view that keeps what its body returns."""
        view = self.view()
        before, kept = dict(vars(view)), run.model_kwargs.get("logits_to_keep")
        run.model, run.model_kwargs["logits_to_keep"] = view, 0
        try:
            yield
        finally:
            run.model, run.model_kwargs["logits_to_keep"] = self.model, kept
            left = {name: v for name, v in vars(view).items() if before.get(name) is not v}
            vars(self.model).update(left)

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
            states = _states(outputs)
            self.found[path].append(None if states is None else _bare(outputs, states))
            if self.depth or states is None:
                return outputs
            return _with_states(outputs, states[:, -1:])

        return replaced(view, path, called)

    def covers(self, ids: Tensor) -> bool:
        """Whether one of the modules has given states of ``ids (prompts, length)``; others are forgotten."""
        self.found = {path: found for path, found in self.found.items() if _cover(found, ids.shape)}
        while len(self.found) > 1:
            self.found.popitem()
        return bool(self.found)

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Logits ``(prompts, n, vocab)`` of some positions after another."""
        start = 0
        for outputs in self.outputs:
            states = _states(outputs)
            states = states[:: len(states) // len(ids)]
            yield from self._logits(outputs, states, ids[:, start : start + states.shape[1]])
            start += states.shape[1]

    def logits_at(self, ids: Tensor, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Logits ``(n, vocab)`` of the positions ``rows (m,)``, ``columns (m,)``, some after another."""
        (outputs,) = self.outputs
        states = _states(outputs)[rows, columns][None]
        for logits in self._logits(outputs, states, ids[rows, columns][None]):
            yield logits[0]

    @property
    def outputs(self) -> list[Any]:
        """What the body has returned, without what is not needed for logits."""
        (found,) = self.found.values()
        return found

    def _logits(self, outputs: Any, states: Tensor, ids: Tensor) -> Iterator[Tensor]:
        """Logits ``(rows, n, vocab)`` of ``states (rows, length, size)``, some positions after another."""
        (path,), given = self.found, [None]
        view = replaced(self.model, path, lambda *args, **kwargs: given[0], is_copied=True)
        view._forward_hooks, view._forward_pre_hooks = {}, {}
        keep = {"logits_to_keep": 0} if self.model._supports_logits_to_keep() else {}
        n = max(1, min(POSITIONS, BYTES // (4 * len(states) * n_scores(self.model))))
        for part, tokens in zip(states.split(n, dim=1), ids.split(n, dim=1), strict=True):
            given[:] = [_with_states(outputs, part)]
            yield view(input_ids=tokens, use_cache=False, return_dict=True, **keep).logits


def _bodies(model: Any) -> list[str]:
    """The paths of the modules that may be all of a model but its head, the outermost first."""
    if not (families.has_plain_head(model) and hasattr(model, "_modules")):
        return []
    names = (getattr(model, "base_model_prefix", ""), "model")
    paths = [name for name in names if model._modules.get(name) is not None][:1]
    # OPT and decoders taken out of encoder-decoders call the decoder within, and not its owner.
    decoder = model.get_decoder() if paths and hasattr(model, "get_decoder") else None
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


def _bare(outputs: Any, states: Tensor) -> Any:
    """``outputs`` of a body without a cache, other layers' states and so on."""
    if isinstance(outputs, ModelOutput):
        return type(outputs)(**{next(iter(outputs)): states})
    return (states, *(None for _ in outputs[1:]))


def _cover(found: list[Any], shape: torch.Size) -> bool:
    """Whether outputs of a body are of all positions of ids ``(prompts, length)``, or of rows of theirs."""
    if not found or any(outputs is None for outputs in found):
        return False
    states = [_states(outputs) for outputs in found]
    n_rows, length = len(states[0]), sum(each.shape[1] for each in states)
    return n_rows % shape[0] == 0 and length == shape[1]
