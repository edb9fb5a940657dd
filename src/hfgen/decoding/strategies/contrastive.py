"""Contrastive search (Su et al. 2022, "A Contrastive Framework for Neural Text Generation").

Symbols: ``rows`` sequences, ``k`` candidates for the next token of each, ``tried = rows * k``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ... import families
from ...families import CACHE
from ...memory.batch import Batch, map_outputs
from ...memory.caches import layers
from ...memory.caches.growing import GrowableTensor
from ...state.run import Run, Step
from .sample import Sample


class Contrastive(Sample):
    """Of the ``top_k`` likeliest tokens, the one that is likely and unlike what is there already.

    A candidate's worth is ``(1 - penalty_alpha) * probability - penalty_alpha * similarity``, where
    the similarity is the highest cosine between its hidden state and those of the context. The
    candidates of a step run as ``tried`` rows of one forward; with ``low_memory=True`` as ``k``
    forwards of ``rows`` rows. The next step starts from the chosen one's outputs.
    """

    continues_cache = drops_rows = False
    may_record = True
    fields_of_call = ("top_k",)
    shares_prefill = rolls_back = True
    tokens_ahead = 1  # candidates for the last token are forwarded too

    @classmethod
    def refusals(cls, model: Any, config: GenerationConfig) -> Iterator[str]:
        name = f"Contrastive search (`penalty_alpha`={config.penalty_alpha})"
        if not 0 < config.penalty_alpha <= 1:
            yield f"`penalty_alpha` has to be between 0 and 1, but is {config.penalty_alpha!r}."
        if config.dola_layers is not None:
            yield f"{name} and `dola_layers`={config.dola_layers!r} each ask for a mode. Leave one out."
        if model._is_stateful:
            yield f"{name} takes tokens back, and {type(model).__name__} keeps a state that cannot be rolled back."
        if not config.use_cache:
            yield f"{name} needs a cache: leave out `use_cache=False`."
        if config.prefill_chunk_size is not None:
            yield f"{name} reads all of the prompt: leave out `prefill_chunk_size`={config.prefill_chunk_size}."

    def __init__(self, run: Run) -> None:
        self.cache_name = families.cache_argument(run.model)
        _check_cache(run, cache := run.model_kwargs.get(self.cache_name))
        super().__init__(run)
        config = run.config
        self.alpha, self.top_k = float(config.penalty_alpha), int(config.top_k)
        self.is_sequential = bool(config.low_memory)
        # A cache that the caller gets to see holds all tokens but the last, as after greedy decoding.
        is_given = getattr(cache, "_is_user_defined", False)
        self.returns_cache = bool(config.return_dict_in_generate or is_given)
        self.is_recording = self.is_sequential or self.returns_cache
        run.model_kwargs["output_hidden_states"] = True
        self.n_expanded = 1  # how many rows of the cache belong to one sequence
        self.chosen: Any = None  # of the token that was chosen last: what the next step starts from
        self.candidates: Any = None  # probabilities and tokens ``(rows, k)`` of a step's candidates
        #: Whether the candidates of this step have been forwarded; ``None`` within the forward.
        self.has_looked: bool | None = False

    def prefill(self, run: Run) -> ModelOutput | None:
        outputs = super().prefill(run)
        hidden, mask = _last_hidden(run, outputs), run.mask
        is_padding = None if mask is None or mask.ndim != 2 else mask[:, -hidden.shape[1] :] == 0
        self.context = Context(hidden, is_padding)
        return outputs

    @contextmanager
    def decoding(self, run: Run) -> Iterator[None]:
        cache = run.model_kwargs[self.cache_name]
        with super().decoding(run), layers.recording(cache) if self.is_recording else nullcontext():
            yield
            # Leave the cache as greedy decoding does: one row per sequence, all tokens but the last.
            if self.returns_cache and self.chosen is not None:
                layers.roll_back(cache := run.model_kwargs[self.cache_name], 1)
                if self.n_expanded > 1:
                    rows = torch.arange(len(run.ids), device=run.ids.device)
                    cache.reorder_cache(rows * self.n_expanded)

    def forward(self, run: Run) -> ModelOutput:
        if run.finished:  # other devices still decode: forward as often as they do
            self.look_ahead(run)
        return self.chosen

    def choose(self, run: Run, scores: torch.Tensor) -> torch.Tensor:
        k = min(self.top_k, scores.shape[-1])
        probabilities, tokens = scores.softmax(dim=-1).topk(k)
        # One NaN makes all of its row.
        self.invalid.note(probabilities[:, 0], self.n_steps, self.unfinished)
        # A token that a processor rules out is no candidate, however unlike the context it is.
        is_ruled_out = scores.gather(1, tokens) == -torch.inf
        self.candidates = probabilities.masked_fill(is_ruled_out, -torch.inf), tokens
        return self.look_ahead(run)

    def look_ahead(self, run: Run) -> torch.Tensor:
        """Forward the candidates, keep the outputs of the chosen ones, and return these ``(rows,)``."""
        self.has_looked = None
        look = self.look_ahead_one_by_one if self.is_sequential else self.look_ahead_at_once
        chosen = look(run)
        self.has_looked = True
        return chosen

    def make_up(self, run: Run) -> bool:
        """After an error, forward as often as other devices do in this step; whether that is done."""
        if self.has_looked is False:
            if self.candidates is None:
                tokens = run.ids.new_zeros(len(run.ids), self.top_k)
                self.candidates = torch.zeros_like(tokens, dtype=torch.float32), tokens
            self.look_ahead(run)
        return self.has_looked is True

    def look_ahead_at_once(self, run: Run) -> torch.Tensor:
        probabilities, tokens = self.candidates
        rows, k = tokens.shape
        if self.n_expanded != k:
            batch = Batch(run.ids, run.model_kwargs)
            batch.repeat(k)
            run.model_kwargs, self.n_expanded = batch.model_kwargs, k
        ids = run.ids.repeat_interleave(k, dim=0)
        outputs = self.forward_candidates(run, torch.cat([ids, tokens.reshape(-1, 1)], dim=1))
        best = self.best(probabilities, _last_hidden(run, outputs)[:, -1].view(rows, k, -1))
        chosen = best + torch.arange(rows, device=best.device) * k
        _copy_rows(run.model_kwargs[self.cache_name], chosen.repeat_interleave(k))

        def take(states: torch.Tensor, dim: int) -> torch.Tensor:
            return states.index_select(dim, chosen.to(states.device))

        map_outputs(outputs, take, families.rows_of_states(run.model))
        self.chosen = outputs
        return tokens.gather(1, best[:, None]).squeeze(1)

    def look_ahead_one_by_one(self, run: Run) -> torch.Tensor:
        probabilities, tokens = self.candidates
        cache, hidden = run.model_kwargs[self.cache_name], []
        for candidate in tokens.split(1, dim=1):
            outputs = self.forward_candidates(run, torch.cat([run.ids, candidate], dim=1))
            newest = _last_hidden(run, outputs)[:, -1]
            hidden.append(newest.clone() if self.executor.overwrites else newest)
            layers.roll_back(cache, 1)
        best = self.best(probabilities, torch.stack(hidden, dim=1))
        chosen = tokens.gather(1, best[:, None])
        self.chosen = self.executor.forward(run, torch.cat([run.ids, chosen], dim=1))
        return chosen.squeeze(1)

    def forward_candidates(self, run: Run, ids: torch.Tensor) -> ModelOutput:
        """Forward the last of ``ids (rows, length)``, which the cache has to keep until one is chosen."""
        cache = run.model_kwargs[self.cache_name]
        before = layers.n_keys(cache)
        outputs = self.executor.forward(run, ids)
        layers.check_growth(cache, before, 1, run.model)
        return outputs

    def best(self, probabilities: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Which of the candidates ``(rows, k)`` is worth most; it joins the context: ``(rows,)``."""
        similarity = self.context.similarity(hidden)
        worth = (1.0 - self.alpha) * probabilities - self.alpha * similarity
        worth = worth.masked_fill(probabilities == -torch.inf, -torch.inf)  # for an alpha of 1
        best = worth.argmax(dim=-1)
        self.context.append(hidden[torch.arange(len(best), device=best.device), best])
        return best

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        self.has_looked = False
        if self.is_recording:
            # Forget what no one takes back now.
            layers.roll_back(run.model_kwargs[self.cache_name], 0)
        return super().step(run, model_outputs)


class Context:
    """Hidden states ``(rows, length, size)`` of all tokens so far, scaled to length 1; some of ``is_padding``."""

    def __init__(self, hidden: torch.Tensor, is_padding: torch.Tensor | None) -> None:
        self.is_padding = is_padding
        self.states = GrowableTensor(F.normalize(hidden.float(), dim=-1))

    def append(self, hidden: torch.Tensor) -> None:
        """Add the hidden states ``(rows, size)`` of one more token."""
        newest = F.normalize(hidden.float(), dim=-1)[:, None]
        self.states.append(newest, spare=lambda length: length)

    def similarity(self, hidden: torch.Tensor) -> torch.Tensor:
        """The highest cosine of each of ``hidden (rows, k, size)`` with the context: ``(rows, k)``."""
        context: Any = self.states.view
        cosines = F.normalize(hidden.float(), dim=-1) @ context.transpose(1, 2)
        if self.is_padding is not None:
            prompt = cosines[..., : self.is_padding.shape[1]]
            prompt.masked_fill_(self.is_padding[:, None], -torch.inf)
        return cosines.amax(dim=-1)


def _check_cache(run: Run, cache: Any) -> None:
    """Raise ``ValueError`` for a cache that candidates cannot be tried on."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"Contrastive search (`penalty_alpha`={run.config.penalty_alpha}) needs a cache of the usual kind, "
            f"but {type(run.model).__name__} has a {type(cache).__name__}. Leave `penalty_alpha` out."
        )
    if (length := int(cache.get_seq_length())) > 0:
        raise ValueError(
            f"Contrastive search compares with the hidden states of the whole context, but "
            f"`{CACHE}` holds {length} tokens without theirs. Pass the prompt without a cache."
        )


def _last_hidden(run: Run, outputs: Any) -> torch.Tensor:
    """The hidden states ``(…, length, size)`` that the logits are made of."""
    states = outputs.get("decoder_hidden_states" if run.is_encoder_decoder else "hidden_states")
    hidden: Any = states[-1] if states else None
    if hidden is None or hidden.ndim != 3:
        shape = "none" if hidden is None else f"some of shape {tuple(hidden.shape)}"
        raise ValueError(
            f"Contrastive search compares hidden states (rows, length, size), but "
            f"{type(run.model).__name__} returns {shape}. Leave `penalty_alpha` out."
        )
    return hidden


def _copy_rows(cache: Any, rows: torch.Tensor) -> None:
    """Make row ``i`` of the cache old row ``rows[i]``: its newest column is all that differs, if it is known."""
    for layer in layers.layers_of(cache):
        if (newest := layers.newest_column(layer)) is None:
            layer.reorder_cache(rows)
            continue
        for states in (layer.keys, layer.values):  # (tried, heads, length, size)
            at = newest.to(states.device)
            column = states.index_select(-2, at).index_select(0, rows.to(states.device))
            states.index_copy_(-2, at, column)
