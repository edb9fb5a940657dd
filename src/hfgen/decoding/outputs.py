"""The output of a call: each step recorded, the ``Generate*Output``, and hfgen's additions to it."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.generation import utils as upstream
from transformers.utils import ModelOutput

from .. import families
from ..families import CACHE
from ..logits.stopping import FinishReason, StoppingCriteriaList
from ..logits.stopping.reasons import Causes, at_end, first
from ..logits.stopping.strings import TextCriteria, text_until
from ..memory.caches import layers as cache_layers
from ..state.run import Observer, Run, Step, Strategy
from ..state.text import context_of, decode

#: The return type of ``generate`` if that is not a tensor of ids.
GenerateOutput: TypeAlias = upstream.GenerateNonBeamOutput | upstream.GenerateBeamOutput
#: The class of the output: of an encoder-decoder or not, with beams or without.
OUTPUTS = {
    (False, False): "GenerateDecoderOnlyOutput",
    (False, True): "GenerateBeamDecoderOnlyOutput",
    (True, False): "GenerateEncoderDecoderOutput",
    (True, True): "GenerateBeamEncoderDecoderOutput",
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
    prefix = "decoder_" if run.is_encoder_decoder else ""
    names = {"attentions": prefix + "attentions", "hidden_states": prefix + "hidden_states"}
    fields = [name for name in _recorded_fields(run) if name != "logits"]
    return {name: (getattr(outputs, names.get(name, name)),) for name in fields}


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
    windows = cache_layers.windows(run.model_kwargs.get(CACHE))
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
        fields[CACHE] = None if name is None else run.model_kwargs[name]
        if run.is_encoder_decoder:
            encoder = run.model_kwargs.get("encoder_outputs") or {}
            fields["cross_attentions"] = recorded.get("cross_attentions")
            for name in ("attentions", "hidden_states"):
                is_asked = getattr(run.config, f"output_{name}")
                fields[f"encoder_{name}"] = encoder.get(name) if is_asked else None
        name = OUTPUTS[run.is_encoder_decoder, "beam_indices" in result]
        output: Any = getattr(upstream, name)(**fields)  # a library may have replaced it
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


@dataclass(frozen=True, slots=True)
class Metrics:
    """Times of a call in seconds, and its memory: ``output.metrics``, with ``output_metrics=True``.

    Tokens per second are those of all rows together. Times without a token to measure are ``None``.
    """

    total_time: float
    time_to_first_token: float | None  # with the call's preparation and the forward of the prompt
    time_per_output_token: float | None  # mean time from one token of the longest row to its next
    prefill_tokens_per_second: float | None  # of the prompts as they were given, padding included
    decode_tokens_per_second: float | None
    #: Of the device, since the call began; without a GPU, the largest resident set of the process so far.
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How one returned row ended."""

    ids: list[int]  # generated ids up to the end, without padding
    reason: FinishReason
    cause: Any = None  # the criterion that ended it, if one did

    @classmethod
    def of(
        cls, run: Run, causes: list[Any], row: int, n_rows: int, ids: list[int], is_end: bool
    ) -> Ending:
        """The ending of a row of ``n_rows`` with ``causes``; ``is_end``: it ended with the last of its ``ids``.

        For an EOS, a processor's ``finish_reason_of(row, ids) -> str | None`` on generated ids may say why.
        """
        lost = None if run.invalid is None else run.invalid.step_of(row, n_rows)
        if lost is not None and not (is_end and ids):
            return cls(ids[:lost], FinishReason("error"))
        if not ids:
            return cls(ids, FinishReason("length"))
        n, reason, cause = (at_end if is_end else first)(causes, ids)
        if lost is not None and reason == "unfinished":
            reason = FinishReason("error")
        for processor in run.processors if reason == "eos" else ():
            say = getattr(processor, "finish_reason_of", None)
            if say is not None and (own := say(row, ids[:n])) is not None:
                return cls(ids[:n], FinishReason(own, reason.stop), cause)
        return cls(ids[:n], reason, cause)


class Results(Observer):
    """Collects while a call decodes what can only be known then; the rest is found out at the end."""

    def __init__(self, run: Run) -> None:
        self.has_metrics = bool(getattr(run.config, "output_metrics", False))
        self.started = time.perf_counter() if run.call is None else run.call.started
        self.first: float | None = None
        if isinstance(run.criteria, StoppingCriteriaList):
            run.criteria.take_notes()
        if self.has_metrics and run.ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(run.ids.device)

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        if self.has_metrics and self.first is None:
            self.first = _now(run)

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Any]) -> None:
        """Give the output ``finish_reasons``, and ``texts`` and ``metrics`` if they are asked for."""
        has_texts, n_rows = hasattr(run.tokenizer, "decode"), len(result["sequences"])
        is_lost = run.invalid is not None and run.invalid.steps()
        needs_look = has_texts or self.has_metrics or is_lost
        if getattr(run.criteria, "length_only", False) and not needs_look:
            run.extras["finish_reasons"] = [FinishReason("length")] * n_rows
            return
        found = endings(run, result)
        run.extras["finish_reasons"] = [ending.reason for ending in found]
        if has_texts:
            rows = enumerate(found)
            run.extras["texts"] = [text_of(run, row, ending, n_rows) for row, ending in rows]
        if self.has_metrics:
            run.extras["metrics"] = self.metrics(run, [len(ending.ids) for ending in found])

    def metrics(self, run: Run, lengths: list[int]) -> Metrics:
        """The times up to now; ``lengths``: generated tokens of each returned row."""
        peak, total = peak_bytes(run.ids.device), _now(run) - self.started
        if self.first is None:
            return Metrics(total, None, None, None, None, peak)
        first = self.first - self.started
        rest, n_steps = total - first, max(lengths) - 1
        prompt = None if run.call is None else run.call.prompt
        n_prompt = math.prod((run.ids if prompt is None else prompt.main_input).shape[:2])
        per_token = rest / n_steps if n_steps > 0 else None
        speed = (sum(lengths) - len(lengths)) / rest if n_steps > 0 else None
        return Metrics(total, first, per_token, n_prompt / first, speed, peak)


def endings(run: Run, result: dict[str, Any]) -> list[Ending]:
    """How each returned row ended. Of hypotheses, whose length is known, only the end is looked at."""
    prompt_length = run.prompts.shape[1]
    rows = result["sequences"][:, prompt_length:].tolist()
    causes = Causes(run.criteria, prompt_length)
    if is_search := (parents := result.get("beam_indices")) is not None:
        lengths = (parents >= 0).sum(dim=1).tolist()
        rows = [ids[:n] for ids, n in zip(rows, lengths, strict=True)]
    return [
        Ending.of(run, causes.of(row, len(rows), is_search), row, len(rows), ids, is_search)
        for row, ids in enumerate(rows)
    ]


def text_of(run: Run, row: int, ending: Ending, n_rows: int) -> str:
    """The text of a returned row, without what stopped it unless that is asked for."""
    ids, cause, (skips, includes, before) = ending.ids, ending.cause, spelling(run, row, n_rows)
    if isinstance(cause, TextCriteria) and (found := cause.found(ids, len(ids))) is not None:
        n_bytes = found.end if includes else found.begin
        return text_until(cause.pieces, ids, n_bytes, skips, before)
    if ending.reason.stop is not None and not includes:
        ids = ids[:-1]
    return decode(run.tokenizer, ids, skips, before)


def spelling(run: Run, row: int, n_rows: int) -> tuple[bool, bool, list[int]]:
    """Whether the text of a returned row skips special tokens and includes its stop string, and its prompt's end."""
    config: Any = run.configs[row * len(run.configs) // n_rows]
    skips = getattr(config, "skip_special_tokens", None) in (None, True)
    includes = bool(getattr(config, "include_stop_str_in_output", False))
    prompt = run.prompts[row * len(run.prompts) // n_rows].tolist()
    has_texts = hasattr(run.tokenizer, "decode")
    return skips, includes, context_of(run.tokenizer, prompt) if has_texts else []


def _now(run: Run) -> float:
    """The time when all that was asked of the device is done."""
    if run.ids.is_cuda:
        torch.cuda.synchronize(run.ids.device)
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int | None:
    """The largest memory so far: of a GPU since it was last reset, else of the process; in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
