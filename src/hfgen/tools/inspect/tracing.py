"""``hfgen.trace``: a call of generate with a record of what happened at each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import families
from ...decoding import loop
from ...decoding.outputs import Results
from ...decoding.recipes import MinimumBayesRisk
from ...decoding.strategies import Beam as Search
from ...decoding.strategies import GroupBeam, Sample
from ...decoding.strategies.assisted import Assisted
from ...memory.checks import explaining_misfit
from ...mixin import GenerationMixin, driven, mixed_view
from ...prepare.stages import prepare
from ...running.exact.logprobs import token_logprobs
from ...running.step_inputs import MEDIA
from ...settings.fields import FIELDS
from ...settings.kinds import check_integer
from ...state.call import Call
from ...state.call import Request as GenerateRequest
from ...state.run import Run, all_equal
from ...state.text import Pieces, decode
from ..prompts import encode
from .records import Prompt, Sequence, Trace
from .tracer import Tracer, Watched

#: What strategies have to be, or to be derived from; and those of them that do otherwise.
SHOWN = (Sample, Search, Assisted)
NOT_SHOWN = (GroupBeam, MinimumBayesRisk)
MODES = (
    "greedy decoding, sampling, beam search and sampling, assisted decoding, contrastive search, DoLa and "
    "constrained beam search"
)


@torch.no_grad()
def trace(
    model: Any, prompt: Any = None, tokenizer: Any = None, *, top: int = 10, **kwargs: Any
) -> Trace:
    """Run ``model.generate`` and record what happened at each token.

    The tokens are those of ``generate`` with the same arguments. A call without this does no more work
    than before. Times include copies of the scores, and are those of a call that is watched.

    Args:
        model: Any model; one without hfgen's mixin stays as it is.
        prompt: Text, a list of texts, ids ``(length,)`` or ``(batch, length)``, or a mapping of model
            inputs, as a tokenizer returns it. Inputs may also come by name, among the ``kwargs``.
        tokenizer: For prompts that are text, and to spell tokens; without one, ids are shown.
        top: How many of the likeliest tokens to keep of each position, by the model's logits, and again
            by the last scores.
        kwargs: Those of ``generate``.

    Returns:
        A ``hfgen.tools.inspect.Trace``: ``.save("page.html")`` writes a page, ``.to_dict()`` is JSON, and a
        notebook shows it.

    Raises:
        ValueError: ``top`` below 1, text without a tokenizer, or a mode that cannot be shown: diverse
            beam search, minimum Bayes risk, strategies that are not derived from hfgen's.
        TypeError: A prompt of another kind; a model that cannot generate, or with a ``generate`` or
            decoding method of its own.
    """
    check_integer(top, "top", 1)
    model = mixed_view(model)
    if not isinstance(model, GenerationMixin):
        raise TypeError(
            f"`model` has to be a model that generates, but is {type(model).__name__}: load it with "
            "AutoModelForCausalLM, for example."
        )
    if kwargs.get("streamer") is not None:
        raise ValueError("`streamer` does not work with a traced call. Leave it out.")
    if tokenizer is not None:
        kwargs["tokenizer"] = tokenizer
    kwargs |= model_inputs(prompt, tokenizer, model)
    call = prepare(model, driven(model, GenerateRequest.of(**kwargs)))
    try:
        kind = call.strategy
        if not (isinstance(kind, type) and issubclass(kind, SHOWN)) or issubclass(kind, NOT_SHOWN):
            raise ValueError(f"trace() shows {MODES}, but the arguments ask for {call.who}.")
        call.processors = watched = Watched(call.processors)
        run, strategy = call.start(model)
        recording = loop.begin(run)
        tracer = Tracer(run, strategy, watched, top)
        prepare_seconds = tracer.since - call.started
        prompts = list(prompts_of(run, call))
        if not any(isinstance(observer, Results) for observer in run.observers):
            run.observers.append(Results(run))  # why rows ended
        run.observers.append(tracer)
        with explaining_misfit(model, call.cache):
            for _ in loop.drive(run, strategy):
                pass
            result, _ = loop.conclude(run, strategy, recording)
        pieces = Pieces(tokenizer) if hasattr(tokenizer, "convert_ids_to_tokens") else None

        def text(ids: list[int]) -> str | None:
            return None if pieces is None else decode(tokenizer, ids)

        sequences = tuple(sequences_of(run, tracer, result, len(prompts), text))
        beams: Any = ()
        if tracer.tree is not None:
            beams = tracer.tree.result(result["beam_indices"], result["sequences"])
        ids = all_ids(prompts, sequences, beams, tracer.steps)
        return Trace(
            mode=call.who,
            model=type(model).__name__,
            settings=settings_of(call, model),
            stages=tracer.stages,
            prompts=tuple(Prompt(tuple(prompt), text(prompt)) for prompt in prompts),
            sequences=sequences,
            steps=tuple(tracer.steps),
            beams=beams,
            prepare_seconds=prepare_seconds,
            vocabulary_size=int(model.config.get_text_config(decoder=True).vocab_size),
            spelling={} if pieces is None else {i: spelled(pieces[i]) for i in sorted(ids)},
        )
    finally:
        call.release()


def model_inputs(prompt: Any, tokenizer: Any, model: Any) -> dict[str, Any]:
    """The inputs of ``generate`` for what ``trace`` takes as its prompt."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts, list | tuple) and texts and all(isinstance(t, str) for t in texts):
        if tokenizer is None:
            raise ValueError("A prompt that is text needs a `tokenizer`.")
        prompt = encode(texts, tokenizer, model)
    elif isinstance(prompt, list | tuple):
        with suppress(TypeError, ValueError):  # rows of several lengths, or no ids
            prompt = torch.tensor(prompt, dtype=torch.long)
    if isinstance(prompt, Tensor):
        prompt = {"inputs": torch.atleast_2d(prompt)}
    if not isinstance(prompt, Mapping | None):
        raise TypeError(
            "`prompt` has to be text, a list of texts, token ids `(length,)` or `(batch, length)`, or a "
            f"mapping of model inputs, but is {prompt!r:.80}."
        )
    device, inputs = families.device_of(model), dict(prompt or {})
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def prompts_of(run: Run, call: Call) -> Iterable[list[int]]:
    """The ids of each prompt, without padding; none where the input is not ids."""
    assert call.prompt is not None
    n_prompts = call.prompt.batch_size
    ids = call.prompt.main_input if run.is_encoder_decoder else run.ids
    mask = run.model_kwargs.get("attention_mask")
    if ids.ndim != 2 or ids.is_floating_point():
        ids, mask = run.ids[:, :0], None
    ids = ids[:: max(len(ids) // n_prompts, 1)]
    keep = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == ids.shape[1]:
        keep = mask[:: max(len(mask) // n_prompts, 1)] != 0
    for row, kept in zip(ids, keep, strict=True):
        yield row[kept].tolist()


def unedited_probabilities(run: Run, sequences: Tensor) -> list[list[float]] | None:
    """Return the probability of each generated token without ``interventions``, by a forward of each text.

    ``None`` if there are none, and for encoder-decoders and prompts with images or sound.
    """
    call = run.call
    assert call is not None
    assert call.prompt is not None
    kwargs, prompt_length = call.prompt.model_kwargs, run.prompts.shape[1]
    has_media = any(kwargs.get(name) is not None for name in MEDIA)
    if call.interventions is None or run.is_encoder_decoder or has_media:
        return None
    is_token, mask = torch.ones_like(sequences), kwargs.get("attention_mask")
    if mask is not None and mask.shape == run.prompts.shape:
        rows = torch.arange(len(sequences), device=mask.device) * len(mask) // len(sequences)
        is_token[:, :prompt_length] = mask[rows]
    logprobs = token_logprobs(run.model, sequences, is_token)
    return logprobs[:, prompt_length - 1 :].exp().tolist()


def sequences_of(
    run: Run,
    tracer: Tracer,
    result: Mapping[str, Any],
    n_prompts: int,
    text_of: Callable[[list[int]], str | None],
) -> Iterable[Sequence]:
    """The sequences that are returned, with what is known of their tokens."""
    rows, paths = result["sequences"], result.get("beam_indices")
    unedited = unedited_probabilities(run, rows)
    texts, scores = run.extras.get("texts", [None] * len(rows)), [None] * len(rows)
    if tracer.search is not None:
        scores = tracer.search.finished.scores[:, : len(rows) // n_prompts].flatten().tolist()
    drafted = {
        (draft.sequence, draft.position + place)
        for step in tracer.steps
        for draft in step.drafts
        for place in range(draft.n_accepted)
    }
    for index, ids in enumerate(rows[:, tracer.prompt_length :].tolist()):
        tokens = []
        for place, (position, token) in enumerate(zip(tracer.positions, ids, strict=False)):
            row = index if paths is None else int(paths[index, place])
            is_token = tracer.is_token[place]
            if row < 0 or (is_token is not None and not is_token[row]):
                break
            record = position.token(row, token, (index, place) in drafted)
            if unedited is not None:
                record = replace(record, unedited_probability=unedited[index][place])
            tokens.append(record)
        prompt, reason = index * n_prompts // len(rows), run.extras["finish_reasons"][index]
        stop = getattr(reason, "stop", None)
        text = texts[index] if texts[index] is not None else text_of(ids[: len(tokens)])
        yield Sequence(prompt, tuple(tokens), text, str(reason), stop, score=scores[index])


def settings_of(call: Call, model: Any) -> dict[str, Any]:
    """The fields of the config that the call, or the model's own config, has set."""
    configs = call.request.generation_config, model.generation_config
    sources = call.request.kwargs, *(vars(each) for each in configs if each is not None)
    names = [n for source in sources for n, v in source.items() if n in FIELDS and v is not None]
    settings = {}
    for name in dict.fromkeys(n for n in names if n != "transformers_version"):
        values = [getattr(config, name, None) for config in call.configs]
        value = values[0] if all_equal(values) else values
        settings[name] = value if isinstance(value, int | float | str | list) else repr(value)
    return settings


def spelled(piece: bytes) -> str:
    """``piece`` as text; bytes that are no characters by themselves as ``<0xE2>``."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in piece)


def all_ids(prompts: Any, sequences: Any, beams: Any, steps: Any) -> set[int]:
    ids = {token for prompt in prompts for token in prompt}
    for sequence in sequences:
        for token in sequence.tokens:
            ids |= {token.token_id, *(candidate.token_id for candidate in token.candidates)}
    ids |= {beam.token_id for each in beams for nodes in each for beam in nodes}
    return ids | {token for step in steps for draft in step.drafts for token in draft.token_ids}
