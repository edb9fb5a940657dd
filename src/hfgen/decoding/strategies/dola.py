"""DoLa (Chuang et al. 2023, "Decoding by Contrasting Layers Improves Factuality")."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from ...running import last_logits
from ...state.run import Run
from .sample import Sample

PLAUSIBLE = 0.1  # tokens below this share of the likeliest one's probability are never chosen
DEEP, OF_DEEP = 40, 20  # deeper models contrast with this many layers, not with half of them


class Dola(Sample):
    """Sample's choice, from what the last layer makes more likely than the candidate layer that diverges most."""

    checks_late = may_record = True

    @classmethod
    def refusals(cls, model: Any, config: GenerationConfig) -> Iterator[str]:
        layers, name = config.dola_layers, type(model).__name__
        if model.config.is_encoder_decoder:
            yield f"DoLa (`dola_layers`={layers!r}) is for decoder-only models; {name} is an encoder-decoder."
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            yield f"DoLa (`dola_layers`={layers!r}) reads layers by output embeddings, and {name} has none."
        n_layers = model.config.get_text_config().num_hidden_layers
        is_list = isinstance(layers, list | tuple) and len(layers) > 0
        is_list = is_list and all(type(n) is int and 0 <= n < n_layers for n in layers)
        if not is_list and not (isinstance(layers, str) and layers in ("low", "high")):
            yield f"`dola_layers` has to be 'low', 'high' or a list of layers from 0 to {n_layers - 1}; it is {layers!r}."

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.layers = candidate_layers(run.model, run.config.dola_layers)
        self.model, self.head = run.model, run.model.get_output_embeddings()
        #: Whether the head's weight may be in parts outside of the model's forward (FSDP 2).
        self.gathers = hasattr(self.model, "unshard") and not hasattr(self.head, "unshard")
        run.model_kwargs["output_hidden_states"] = True

    def forward(self, run: Run) -> ModelOutput:
        model_outputs = super().forward(run)
        if run.finished:  # other devices still decode: use the head as often as they do
            self.adjust(last_logits(model_outputs, run.ids.device), model_outputs)
        return model_outputs

    def adjust(self, logits: torch.Tensor, model_outputs: ModelOutput) -> torch.Tensor:
        """The contrast ``(rows, vocab)`` of the last layer's logits with an earlier layer's."""
        if self.gathers:
            self.model.unshard()
        early = torch.stack([self.read(model_outputs, layer) for layer in self.layers])
        log_early = early.to(logits.device).float().log_softmax(dim=-1)  # (layers, rows, vocab)
        log_final = logits.log_softmax(dim=-1)  # (rows, vocab)
        # Divergences from the mean of both distributions, as 4.49.0 and the paper's code take them.
        mean = 0.5 * (log_early.exp() + log_final.exp())
        from_mean = [F.kl_div(p, mean, reduction="none") for p in (log_final, log_early)]
        furthest = (from_mean[0].mean(dim=-1) + from_mean[1].mean(dim=-1)).argmax(dim=0)
        log_early = log_early[furthest, torch.arange(len(furthest), device=furthest.device)]
        threshold = log_final.amax(dim=-1, keepdim=True) + math.log(PLAUSIBLE)
        return (log_final - log_early).masked_fill(log_final < threshold, -torch.inf)

    def read(self, model_outputs: Any, layer: int) -> torch.Tensor:
        """The logits ``(rows, vocab)`` that a layer's hidden states would give."""
        states = model_outputs.get("hidden_states") or ()
        size = getattr(self.head, "in_features", states[-1].shape[-1] if states else "size")
        shape = tuple(states[layer].shape) if layer < len(states) - 1 else ()
        if len(shape) != 3 or shape[-1] != size:
            raise ValueError(
                f"DoLa reads hidden states (rows, length, {size}) with the output embeddings, but "
                f"those of layer {layer} are {shape or 'none'}. Leave `dola_layers` out."
            )
        return self.head(states[layer][:, -1])


def candidate_layers(model: Any, dola_layers: str | list[int]) -> list[int]:
    """Which hidden states to contrast with: 0 are the embeddings, the last layer is left out.

    ``"low"`` and ``"high"``: every second layer of the lower or the upper half. With tied embeddings,
    which would predict the token that is there, "low" starts at layer 2 (1 of two layers).
    """
    if not isinstance(dola_layers, str):
        return [int(layer) for layer in dola_layers]
    n_layers = model.config.get_text_config().num_hidden_layers
    part = OF_DEEP if n_layers > DEEP else n_layers // 2
    if dola_layers == "high":
        return list(range(n_layers - part if n_layers > DEEP else part, n_layers, 2))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    # Either may be a module that has its weights inside another one.
    is_tied = not set(head.parameters()).isdisjoint(embeddings.parameters())
    start = min(2, n_layers - 1) if is_tied else 0
    return list(range(start, part, 2)) or [start]
