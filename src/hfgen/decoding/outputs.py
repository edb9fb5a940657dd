"""The outputs of a call: recording each step, and building the ``Generate*Output``."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from transformers.generation import utils as upstream
from transformers.utils import ModelOutput

from .. import families
from ..memory.caches import layers as cache_layers
from ..state.run import Observer, Run, Step, Strategy

#: The return type of ``generate`` if that is not a tensor of ids.
GenerateOutput: TypeAlias = upstream.GenerateNonBeamOutput | upstream.GenerateBeamOutput
#: The class of the output: of an encoder-decoder or not, with beams or without.
OUTPUTS: dict[tuple[bool, bool], type[GenerateOutput]] = {
    (False, False): upstream.GenerateDecoderOnlyOutput,
    (False, True): upstream.GenerateBeamDecoderOnlyOutput,
    (True, False): upstream.GenerateEncoderDecoderOutput,
    (True, True): upstream.GenerateBeamEncoderDecoderOutput,
}


def _recorded_fields(run: Run) -> list[str]:
    """The fields of a ``Step`` to record, as the config asks for them."""
    config = run.config
    if not config.return_dict_in_generate:
        return []
    fields = ("logits", "attentions", "hidden_states")
    names = [name for name in fields if getattr(config, f"output_{name}")]
    is_cross = run.is_encoder_decoder and "attentions" in names
    return [*names, "cross_attentions"] if is_cross else names


def observe(run: Run, outputs: ModelOutput) -> dict[str, Any]:
    """The attentions and hidden states of a forward, as fields of a ``Step``, if asked for."""
    if not (run.config.output_attentions or run.config.output_hidden_states):
        return {}
    prefix = "decoder_" if run.is_encoder_decoder else ""
    names = {name: prefix + name for name in ("attentions", "hidden_states")}
    names["cross_attentions"] = "cross_attentions"
    fields = [name for name in _recorded_fields(run) if name in names]
    return {name: (getattr(outputs, names[name]),) for name in fields}


def observe_each(run: Run, outputs: ModelOutput, width: int, n_tokens: int) -> dict[str, Any]:
    """``observe`` where the last ``width`` positions were verified: ``n_tokens`` entries, those of plain decoding."""
    observed = observe(run, outputs)
    for name, (layers,) in observed.items():
        if not layers or layers[0] is None:  # the model has none
            observed[name] = (layers,) * n_tokens
            continue
        windows, of_images = _windows(run, len(layers)), families.layers_of_images(run.model)
        entries: list[list[torch.Tensor]] = [[] for _ in range(n_tokens)]
        for token, entry in enumerate(entries):
            n_later = width - 1 - token  # positions after the token's own
            for index, layer in enumerate(layers):  # (…, positions, keys or size)
                n_fed, last = layer.shape[-2:]
                first = n_fed - n_later - 1 if token else 0
                keys = slice(0, last)
                if name == "attentions" and windows is not None and index not in of_images:
                    start = max(last - n_later - windows[index], 0) if token else 0
                    keys = slice(int(start), last - n_later)
                entry.append(layer[..., first : n_fed - n_later, keys])
        observed[name] = tuple(map(tuple, entries))
    return observed


def _windows(run: Run, n_layers: int) -> list[float] | None:
    """How many keys a position sees in each layer; one that reads another's keys, those of its kind."""
    windows = cache_layers.windows(run.model_kwargs.get("past_key_values"))
    if windows is None:
        return None
    kinds = getattr(run.model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if len(windows) != n_layers:
        return [math.inf] * n_layers
    if len(kinds) != n_layers:
        return [window or math.inf for window in windows]
    pairs = [*zip(kinds, windows, strict=True)]
    of_kind = {kind: window for kind, window in pairs if window is not None}
    return [of_kind.get(kind, math.inf) if own is None else own for kind, own in pairs]


class Recording(Observer):
    """One entry per generated token for each thing that the config asks for."""

    def __init__(self, run: Run) -> None:
        self.recorded: dict[str, list[Any]] = {name: [] for name in _recorded_fields(run)}

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        for name, entries in self.recorded.items():
            entries.extend(getattr(step, name))

    def output(self, run: Run, result: dict[str, Any]) -> GenerateOutput | torch.Tensor:
        """The return value of ``generate``: ``result``'s sequences alone, or all in an output."""
        if not run.config.return_dict_in_generate:
            return result["sequences"]
        recorded = {name: tuple(entries) for name, entries in self.recorded.items()}
        prefix = "decoder_" if run.is_encoder_decoder else ""
        fields = {prefix + n: recorded.get(n) for n in ("attentions", "hidden_states")} | result
        fields |= {"scores": run.scores, "logits": recorded.get("logits")}
        name = None if run.rows_have_left else families.cache_name(run.model_kwargs)
        fields["past_key_values"] = None if name is None else run.model_kwargs[name]
        if run.is_encoder_decoder:
            encoder = run.model_kwargs.get("encoder_outputs") or {}
            fields["cross_attentions"] = recorded.get("cross_attentions")
            for name in ("attentions", "hidden_states"):
                is_asked = getattr(run.config, f"output_{name}")
                fields[f"encoder_{name}"] = encoder.get(name) if is_asked else None
        output: Any = OUTPUTS[run.is_encoder_decoder, "beam_indices" in result](**fields)
        # A recipe may run on a model that is not mixed, whose config lacks the field.
        if getattr(run.config, "output_speculation", False):
            output.speculation = run.speculation
        for name, value in run.extras.items():
            setattr(output, name, value)
        return output


def compute_transition_scores(
    self: Any,
    sequences: torch.Tensor,
    scores: tuple[torch.Tensor, ...],
    beam_indices: torch.Tensor | None = None,
    normalize_logits: bool = False,
) -> torch.Tensor:
    """The score of each generated token, given the output of ``generate``.

    ``sequences (returned, length)``; ``scores``: a tuple of ``(rows, vocab)``, one per step;
    ``beam_indices (returned, n_steps)``: the row that each token was scored in, negative after a
    beam's end. With ``normalize_logits``, scores are log-probabilities. Returns
    ``(returned, n_steps)``, zero after the end of a beam.
    """
    rows, vocab = scores[0].shape
    if beam_indices is None:
        beam_indices = torch.arange(rows, device=sequences.device)[:, None].expand(-1, len(scores))
    n_steps = int((beam_indices >= 0).sum(-1).max())
    beam_indices = beam_indices[:, :n_steps]
    last = torch.stack(scores).permute(1, 2, 0)  # (rows, vocab, steps): rounds as upstream's
    last = last.log_softmax(dim=1) if normalize_logits else last
    flat = beam_indices.clamp(min=0) * vocab + sequences[:, sequences.shape[1] - n_steps :]
    chosen = last.reshape(rows * vocab, len(scores)).gather(0, flat)
    return chosen.masked_fill(beam_indices < 0, 0)
