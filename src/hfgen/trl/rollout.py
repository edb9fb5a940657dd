"""The sampler's side: prompts of a trainer to completions with log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch
from trl.data_utils import is_conversational
from trl.models.utils import unwrap_model_for_generation

from .. import families
from ..decoding.card import Card, card
from ..engine import Engine
from ..engine.request import EngineRequest, RequestMetrics, RequestOutput, SequenceOutput
from ..mixin import mixed_view
from ..running import ranks
from ..tools.prompts import padded
from .scoring import prepare_exact

#: Options of ``generate`` that the trainer sets from its ``GRPOConfig``, where its loss reads some of them, too.
OF_TRAINER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
#: Values with which these options change no score.
NEUTRAL = {
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}

#: Receives the prompts and their sequences; returns further fields, with a value for each prompt.
Fields = Callable[[list[Any], list[RequestOutput]], dict[str, list[Any]]]


class Rollout:
    """A ``rollout_func`` of TRL's ``GRPOTrainer`` that generates with continuous batching.

    Up to ``max_rows`` completions are one batch; more of them, and drafts and the like, go through an engine. Equal
    prompts that follow each other, as ``num_generations`` makes them, are forwarded once. The noise of a
    sample is a function of ``seed``, the trainer's step, and the places of prompt and sample: two runs write the
    same. The model is the trainer's, without a copy of its weights; it is in ``eval()`` meanwhile.

    Args:
        engine: Decodes in this engine, whose model has to be the trainer's. By default it makes one.
        exact: Make the model exact (``hfgen.exact``) at the first call, and let the trainer compute
            log-probabilities as the sampler does. A model that will be sharded has to be exact before.
        seed: By default the trainer's ``args.seed``.
        fields: ``fields(prompts, outputs)`` returns further fields, as rewards of an environment: TRL hands them to the
            reward functions. ``outputs`` are ``RequestOutput`` with one sequence for each prompt.
        max_rows: Rows that decode at once, without an ``engine``.
        kwargs: Arguments of ``generate`` beside those of ``GRPOConfig``: drafts, grammars, stop strings, ….

    The result has ``prompt_ids``, ``completion_ids`` and ``logprobs`` (see ``docs/training.md`` for their meaning),
    and ``kept_ids`` where samplers truncate: for each token the ids that were left to draw from.

    Raises:
        TypeError, ValueError: An argument is of another type, or names an option that ``GRPOConfig`` has.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        exact: bool = False,
        seed: int | None = None,
        fields: Fields | None = None,
        max_rows: int = 32,
        **kwargs: Any,
    ) -> None:
        if not isinstance(engine, Engine | None):
            raise TypeError(
                f"rollout(): `engine` has to be an hfgen.Engine, but is {type(engine).__name__}."
            )
        if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool))):
            raise TypeError(f"rollout(): `seed` has to be an integer, but is {seed!r}.")
        if doubled := [name for name in OF_TRAINER if name in kwargs]:
            raise ValueError(
                f"rollout(): `{doubled[0]}` is an option of GRPOConfig, which the trainer's loss has to know: set it "
                "there (`max_completion_length` for `max_new_tokens`)."
            )
        self.engine, self.exact, self.seed, self.fields = engine, exact, seed, fields
        self.max_rows, self.kwargs = max_rows, kwargs
        #: Those of the last call, one for each prompt.
        self.outputs: list[RequestOutput] = []
        #: The engine of the last call, without one of the caller's.
        self.own_engine: Engine | None = None
        #: The trainer's mode and step of the last call, and how many calls this step had before it.
        self.last_step: tuple[Any, int] = (None, 0)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Generate a completion for each prompt. Raises what ``engine.add`` raises, and the error of a request."""
        check(trainer)
        arguments = {**trainer.generation_kwargs, **self.kwargs, "synced_gpus": False}
        arguments |= log_probability_options(arguments, self.exact)
        prompt_ids = tokenized(prompts, trainer)
        seeds = self._seeds(trainer, len(prompts))
        tokenizer = families.text_tokenizer(trainer.processing_class)
        with generating(trainer) as model:
            if self.exact:
                prepare_exact(model, trainer)
            self.outputs = self._decode(model, tokenizer, prompt_ids, arguments, seeds)
        sequences = [output.sequences[0] for output in self.outputs]
        result: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "completion_ids": [sequence.token_ids for sequence in sequences],
            "logprobs": [
                [entry.logprob for entry in sequence.logprobs or ()] for sequence in sequences
            ],
        }
        if arguments.get("logprobs_support"):
            result["kept_ids"] = [
                [list(entry.support or ()) for entry in sequence.logprobs or ()]
                for sequence in sequences
            ]
        if self.fields is not None:
            result |= checked_fields(self.fields(prompts, self.outputs), len(prompts))
        return result

    def card(self, trainer: Any) -> Card:
        """``hfgen.card`` of the trainer's model as it is now."""
        return card(families.transformers_model(trainer.model), trainer.processing_class)

    def _seeds(self, trainer: Any, n: int) -> list[int]:
        """``n`` seeds of this call, the same in each run; ranks of a trainer have their own."""
        step = (trainer.model.training, trainer.state.global_step)
        n_calls = self.last_step[1] + 1 if self.last_step[0] == step else 0
        self.last_step = step, n_calls
        seed = trainer.args.seed if self.seed is None else self.seed
        place = (seed, *step, n_calls, trainer.accelerator.process_index)
        texts = (repr((*place, number)).encode() for number in range(n))
        return [int.from_bytes(blake2b(text, digest_size=7).digest(), "big") for text in texts]

    def _decode(
        self,
        model: Any,
        tokenizer: Any,
        prompt_ids: list[list[int]],
        arguments: dict[str, Any],
        seeds: list[int],
    ) -> list[RequestOutput]:
        """An output with one sequence for each prompt."""
        sizes = [len(list(equal)) for _, equal in groupby(prompt_ids)]
        # All rows at once cost less than requests do; drafts and the like are for the engine.
        fits = len(prompt_ids) <= self.max_rows and len(set(sizes)) == 1
        if fits and self.engine is None and not self.kwargs:
            return in_a_batch(model, tokenizer, prompt_ids, sizes[0], arguments, seeds)
        engine, embeddings = self.engine or self.own_engine, model.get_input_embeddings()
        if engine is None or engine.model.get_input_embeddings() is not embeddings:
            if self.engine is not None:
                raise ValueError(
                    "rollout(): the engine's model is not the trainer's. Make the engine of that, or leave it out."
                )
            engine = self.own_engine = Engine(model, tokenizer, max_rows=self.max_rows)
        requests: list[EngineRequest] = []
        try:
            for ids, equal in groupby(prompt_ids):
                options = {"num_return_sequences": len(list(equal)), "seed": seeds.pop(0)}
                requests.append(engine.add(ids, **arguments, **options))
            outputs = [request.result() for request in requests]
        finally:
            for request in requests:  # those that are not done: the engine may go on for others
                request.cancel()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if reason := {"cancelled", "timeout"} & {one.finish_reason for one in output.sequences}:
                raise RuntimeError(f"rollout(): a completion was {reason.pop()} in the engine.")
        return [replace(o, sequences=[sequence]) for o in outputs for sequence in o.sequences]


#: The class by the name of what is passed to a trainer: ``rollout_func=rollout()``.
rollout = Rollout


def in_a_batch(
    model: Any,
    tokenizer: Any,
    prompt_ids: list[list[int]],
    n_samples: int,
    arguments: dict[str, Any],
    seeds: list[int],
) -> list[RequestOutput]:
    """An output for each prompt by one call of ``generate``; ``n_samples`` prompts after another are equal."""
    rows = [torch.tensor(ids) for ids in prompt_ids[::n_samples]]
    view = mixed_view(model)
    output = view.generate(
        **padded(rows, view, arguments.get("pad_token_id") or 0),
        tokenizer=tokenizer,
        num_return_sequences=n_samples,
        seed=seeds[: len(rows)],
        drop_finished=len(prompt_ids) > 1,
        return_dict_in_generate=True,
        **arguments,
    )
    start = max(map(len, rows))
    outputs = []
    columns = output.logprobs, output.sequences, output.texts, output.finish_reasons
    for ids, logprobs, row, text, reason in zip(prompt_ids, *columns, strict=True):
        tokens = row[start : start + len(logprobs)].tolist()
        sequence = SequenceOutput(tokens, text, reason, logprobs)
        outputs.append(RequestOutput("", ids, [sequence], RequestMetrics()))
    return outputs


def check(trainer: Any) -> None:
    """Raise ``ValueError`` for a trainer whose rollouts cannot be generated here."""
    if trainer.use_vllm:
        raise ValueError(
            "rollout(): GRPOConfig has `use_vllm`, which generates elsewhere. Leave it out."
        )
    if getattr(trainer.processing_class, "pad_token_id", 0) is None:
        raise ValueError(
            "rollout(): the tokenizer has no `pad_token`, which the trainer needs: set one."
        )
    if trainer.tools or trainer.environment_factories is not None:
        raise ValueError(
            "rollout(): TRL's tool loop generates without log-probabilities, so tools and environments cannot go "
            "with a rollout_func. Leave out `rollout_func`, and call hfgen.patch()."
        )


def log_probability_options(arguments: dict[str, Any], is_exact: bool) -> dict[str, Any]:
    """Options of ``generate`` that record what the trainer computes: a softmax at the trainer's temperature.

    Raises ``ValueError`` if exact log-probabilities would be of other scores than the trainer's.
    """
    temperature = arguments.get("temperature")
    changes = [name for name, values in NEUTRAL.items() if arguments.get(name) not in values]
    options: dict[str, Any] = {"logprobs": 0}
    if temperature not in (None, 1.0):
        if is_exact and changes:
            raise ValueError(
                f"rollout(exact=True): with a temperature of {temperature}, `{changes[0]}`="
                f"{arguments[changes[0]]!r} gives log-probabilities that the trainer does not compute. Leave it out, "
                "or take a temperature of 1."
            )
        options["logprobs_mode"] = "processed_logprobs"
    if any(name != "repetition_penalty" for name in changes):
        options["logprobs_support"] = True
    return options


def tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """The ids of each prompt, a text or a chat. Raises ``ValueError`` for images and for empty prompts."""
    if not prompts:
        raise ValueError("rollout(): TRL gave no prompts.")
    tokenizer = trainer.processing_class
    if is_conversational({"prompt": prompts[0]}):
        contents = (message["content"] for prompt in prompts for message in prompt)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        if other := next((part for part in parts if part.get("type") != "text"), None):
            raise ValueError(
                f"rollout(): a prompt has a part of type {other.get('type')!r}; allowed is text. Leave out "
                "`rollout_func`, and call hfgen.patch()."
            )
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )
    else:
        inputs = tokenizer(text=prompts)
    ids: list[list[int]] = inputs["input_ids"]
    if not all(ids):
        raise ValueError(f"rollout(): prompt {prompts[ids.index([])]!r:.80} has no tokens.")
    return ids


@contextmanager
def generating(trainer: Any) -> Iterator[Any]:
    """The trainer's model, ready to generate: unwrapped, in ``eval()``, without gradients and checkpoints.

    Ranks of a sharded model forward as often as each other within, whatever each has to decode. If one fails,
    the others raise ``RankError``.
    """
    settings = {
        "gather_deepspeed3_params": trainer.args.ds3_gather_for_generation,
        "gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs,
    }
    base = families.transformers_model(trainer.accelerator.unwrap_model(trainer.model_wrapped))
    own = vars(base)
    if (forward := own.get("forward")) is not None:  # TRL's, whose head the sampler does not use
        getattr(forward, "__func__", forward).is_row_wise = True
    was_training, of_fsdp = trainer.model.training, own.pop("generate", None)
    wrapped = unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **settings)
    try:
        with wrapped as model, torch.no_grad(), ranks.together(base):
            model.eval()
            yield model
    finally:
        trainer.model.train(was_training)
        if of_fsdp is not None:
            own["generate"] = of_fsdp


def checked_fields(fields: Any, n: int) -> dict[str, list[Any]]:
    """``fields``, if they have a value for each of ``n`` prompts; else raises ``ValueError``."""
    if not isinstance(fields, dict):
        raise ValueError(
            f"rollout(): `fields` has to return a dict of lists, but got {fields!r:.80}."
        )
    for name, values in fields.items():
        if not isinstance(values, list) or len(values) != n:
            raise ValueError(
                f"rollout(): field {name!r} has to be a list with a value for each of {n} prompts, but is "
                f"{values!r:.80}."
            )
    return fields
