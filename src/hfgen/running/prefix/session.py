"""One call with a ``PrefixCache``: fills the call's cache from the store, and adds to the store.

Columns are positions in the padded batch. The cache is filled up to the same column in all rows, and the
ordinary prefill goes on from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ... import families
from ...families import CACHE
from ...memory import fingerprint
from ...memory.caches.dynamic import GrowingCache, GrowingSlidingWindowLayer
from ...settings.kinds import is_zero
from ...state.call import Call, ModelKwargs, Prompt, Request, SharedPrompt
from ...state.run import Run, Step
from .. import prompts
from . import eligibility
from .cache import PrefixCache
from .eligibility import Layout, Reason
from .radix import KeyValues, bytes_per_token, size


def refuse(prefixes: PrefixCache, request: Request, reason: Reason) -> None:
    """Count a call without stored prefixes. Raises ``ValueError`` if two arguments contradict."""
    if reason.is_choice and "prefix_cache" in request.kwargs:  # and not the model's attribute
        raise ValueError(f"`prefix_cache` cannot be used: {reason.text}. Leave one out.")
    prefixes._bypass(reason.text)


def take_argument(model: Any, request: Request, default: Any = None) -> PrefixCache | None:
    """The call's ``prefix_cache`` if it has one, else ``default``, else the model's."""
    prefixes = request.kwargs.get("prefix_cache", default or getattr(model, "prefix_cache", None))
    if prefixes is None:
        return None
    if not isinstance(prefixes, PrefixCache):
        name = "prefix_cache" if "prefix_cache" in request.kwargs else "model.prefix_cache"
        value = f"{type(prefixes).__name__} ({str(prefixes)[:60]})"
        raise TypeError(f"`{name}` has to be a hfgen.PrefixCache, but is {value}.")
    if request.kwargs.get("cache_implementation") == "paged":
        refuse(prefixes, request, Reason("`cache_implementation` is 'paged'"))
        return None
    return prefixes


def check(
    prefixes: PrefixCache, model: Any, call: Call, model_kwargs: ModelKwargs
) -> PrefixCache | None:
    """``prefixes``, or ``None`` if the call's arguments rule them out. Raises as ``refuse``."""
    if call.config.is_assistant or is_zero(call.config.max_new_tokens):
        return None
    if (reason := eligibility.of_arguments(model, call, model_kwargs)) is None:
        return prefixes
    refuse(prefixes, call.request, reason)
    return None


def begin(model: Any, call: Call, prompt: Prompt) -> None:
    """Fill the call's cache with stored prefixes, and set ``call.prefix_session``; or ``refuse``."""
    if call.prefixes is None:
        return
    rows: Any = call.shared_prompt if prompts.will_share_prefill(model, call, prompt) else prompt
    layout = eligibility.of_prompt(model, call, prompt) or Layout.of(rows.ids, rows.model_kwargs)
    if isinstance(layout, Reason):
        refuse(call.prefixes, call.request, layout)
        return
    cache = prompt.model_kwargs[CACHE]
    session = PrefixSession(call.prefixes, model, call.config, cache, rows, layout)
    session.fill()
    call.prefix_session = session


class PrefixSession:
    """Fills the cache of a call, then stores its prompt and what it generates."""

    def __init__(
        self,
        prefixes: PrefixCache,
        model: Any,
        config: Any,
        cache: Any,
        prompt: Prompt | SharedPrompt,
        layout: Layout,
    ) -> None:
        self.prefixes, self.model, self.cache = prefixes, model, cache
        # Not the config, which holds this call: the cache would outlive it by a cycle.
        self.eos, self.pad = config._eos_token_tensor, config._pad_token_tensor
        self.ids, self.layout = prompt.ids, layout
        self.identity = fingerprint.identity(model)
        self.keys = [(self.identity, offset) for offset in layout.offsets]
        self.is_prompt_stored = False
        self.is_given_up = False

    @property
    def layers(self) -> list[Any]:
        """The layers of the cache that hold keys and values; a forward may replace them."""
        return [] if self.cache is None else attention_layers(self.cache)

    def detach(self) -> None:
        """Release the cache: the rows move to the cache of a batch, with windows of the usual size."""
        _stop(self.cache)
        self.cache = None

    def fill(self) -> None:
        """Fill the call's cache with stored states, up to the first column in which a row has none."""
        n_rows, length = self.ids.shape
        pads = self.layout.pads
        tokens = [self.layout.tokens(row, length - 1) for row in range(n_rows)]
        matches = self.prefixes._match(self.keys, tokens)
        end = min(pad + match.length for pad, match in zip(pads, matches, strict=True))
        self.prefixes._count(tokens, [end - pad for pad in pads])
        _record(self.cache)
        if not any(end > pad for pad in pads):
            return
        sample = next(match.nodes[0].states for match in matches if match.nodes)

        def filled(index: int) -> Tensor:
            """The keys, or the values, of one layer."""
            heads, _, head_size = sample[index].shape
            states = sample[index].new_zeros(n_rows, heads, end, head_size)
            for row, (pad, match) in enumerate(zip(pads, matches, strict=True)):
                for start, run in match.runs(end - pad):
                    column = pad + start
                    states[row, :, column : column + run[index].shape[1]] = run[index]
            return states

        for i, layer in enumerate(self.layers):
            layer.update(filled(2 * i), filled(2 * i + 1))

    def add(self, run: Run, strategy: Any, step: Step) -> None:
        """Store the prompts after the first step; later steps do nothing."""
        if self.is_prompt_stored or self.is_given_up:
            return
        self.is_prompt_stored = True
        name, layers, length = type(self.model).__name__, self.layers, run.ids.shape[1]
        lengths = {int(layer.get_seq_length()) for layer in layers}
        # A model that puts tokens before the prompt has more, or not the same number everywhere.
        is_even = len(lengths) == 1 and lengths <= {length - 1, length}
        n_longest, states = self.ids.shape[1] - min(self.layout.pads), key_values(layers)
        if run.model_kwargs.get(CACHE) is not self.cache:
            self.give_up(f"{name} puts another cache in the place of its own")
        elif not is_even or any(layer.keys.shape[-2] < length - 1 for layer in layers):
            self.give_up(f"{name} does not cache one state per token")
        elif self.prefixes.max_bytes < size(n_longest, bytes_per_token(states), len(states)):
            self.give_up("the prompt is larger than `max_bytes`")
        elif not self._has_changed():
            repeats = len(run.ids) // len(self.ids)
            for cache_row, run_row in enumerate(self._cached_rows(run, strategy)):
                row, is_repeated = divmod(run_row, repeats)
                if not is_repeated:
                    self._store(row, cache_row, self.layout.tokens(row))

    def _has_changed(self) -> bool:
        """Give up if the model is another than when the call began: an adapter was switched."""
        if not fingerprint.is_unchanged(self.model, self.identity):
            self.give_up("the model was changed during the call")
        return self.is_given_up

    def give_up(self, reason: str) -> None:
        """Store nothing more of this call."""
        self.is_given_up = True
        self.prefixes._bypass(reason)

    def adopt(self, cache: Any, rows: list[int], length: int) -> None:
        """Take ``rows`` of a cache that is shared with other calls: the last ``length`` tokens of each."""
        shared_layers = attention_layers(cache)
        if any(layer.keys.shape[-2] < length for layer in shared_layers):  # a window dropped some
            self.is_given_up = True
            return
        self.cache = recording_cache(self.model, length)
        for own_layer, layer in zip(self.layers, shared_layers, strict=True):
            own_layer.update(layer.keys[rows, :, -length:], layer.values[rows, :, -length:])

    def finish(self, run: Run, strategy: Any, result: dict[str, Any]) -> None:
        """Store each of ``sequences (wanted, length)`` from the row that agrees with it longest."""
        rows = self._cached_rows(run, strategy) if self.is_prompt_stored else []
        if rows and not self.is_given_up and not self._has_changed():
            sequences: Tensor = result["sequences"]
            n = min(int(self.layers[0].get_seq_length()), sequences.shape[1], run.ids.shape[1])
            cached = run.ids[rows, :n].cpu()
            repeats = len(run.ids) // len(self.ids)
            for sequence in sequences[:, :n].cpu():
                agreement = (cached == sequence).long().cumprod(dim=1).sum(dim=1)
                best = int(agreement.argmax())
                row = rows[best] // repeats
                end = min(int(agreement[best]), self._end(sequence))
                self._store(row, best, sequence[self.layout.pads[row] : end].long())
        if self.cache is not None:
            _stop(self.cache)

    def _end(self, sequence: Tensor) -> int:
        """Where a sequence ends: behind its first EOS token, or before its padding."""
        n_prompt = self.ids.shape[1]
        generated = sequence[n_prompt:]
        if self.eos is not None and (ends := torch.isin(generated, self.eos.cpu())).any():
            return n_prompt + int(ends.int().argmax()) + 1
        if self.pad is None:
            return len(sequence)
        not_padding = (generated != self.pad.cpu()).nonzero()
        return n_prompt + int(not_padding[-1]) + 1 if len(not_padding) else n_prompt

    def _cached_rows(self, run: Run, strategy: Any) -> list[int]:
        """Which row of ``run.ids`` each row of the cache is; empty if that is unknown."""
        active = getattr(getattr(strategy, "active", None), "index", None)
        rows = list(range(len(run.ids))) if active is None else active.tolist()
        layers = self.layers
        is_known = layers and layers[0].is_initialized and len(layers[0].keys) == len(rows)
        return rows if is_known else []

    def _store(self, row: int, cache_row: int, tokens: Tensor) -> None:
        """Store ``tokens``, with which prompt ``row`` begins, from a row of the cache."""
        states = tuple(s[cache_row, :, self.layout.pads[row] :] for s in key_values(self.layers))
        self.prefixes._insert(self.keys[row], tokens, states)


# ---------------------------------------------------------------- windows that keep all tokens


class RecordingWindow(GrowingSlidingWindowLayer):
    """``keys`` and ``values`` hold all tokens, also after ``crop``, which upstream's cuts to a window."""

    def crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = self.keys.shape[-2] if self.is_initialized else 0


def attention_layers(cache: Any) -> list[Any]:
    """The layers that hold keys and values; those that share others' hold none."""
    return [layer for layer in cache.layers if not isinstance(layer, families.EMPTY_LAYERS)]


def key_values(layers: list[Any]) -> KeyValues:
    """Keys and values of each layer in turn, ``(rows, heads, length, size)``."""
    return tuple(states for layer in layers for states in (layer.keys, layer.values))


def recording_cache(model: Any, max_length: int) -> GrowingCache:
    """An empty cache for up to ``max_length`` tokens whose windows keep all tokens."""
    cache = GrowingCache(config=model.config.get_text_config(decoder=True), max_length=max_length)
    _record(cache)
    return cache


def _record(cache: Any) -> None:
    """Make the windows of ``cache`` keep all tokens, from now on."""
    for layer in cache.layers:
        if type(layer) is GrowingSlidingWindowLayer:
            layer.__class__ = RecordingWindow
            layer.activate_past_recording()


def _stop(cache: Any) -> None:
    """Cut the windows of ``cache`` to the tokens that they would hold without ``_record``."""
    for layer in cache.layers:
        if type(layer) is not RecordingWindow:
            continue
        layer.__class__, layer.record_past = GrowingSlidingWindowLayer, False
        if layer.is_initialized and (n_before := layer.sliding_window - 1):
            for states in (layer._keys, layer._values):
                states.keep_last(n_before, layer._growth.behind_window(n_before))
