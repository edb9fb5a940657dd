"""``GenerationMixin``: ``generate()`` as the list of its stages, and the table of hooks.

A stage is a function that takes ``self`` first and is assigned here, under the name by which models
override and call it. Names and signatures are those of the installed transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from . import delegate, families
from .decoding import loop, modes, outputs
from .decoding.modes import HOOKS, Method
from .decoding.outputs import GenerateOutput
from .logits import processors, stopping
from .memory import caches
from .memory.checks import explaining_misfit
from .prepare import config, encode, healing, inputs, validate
from .prepare.stages import prepare
from .running import exact, executor, step_inputs, views
from .settings.versions import warn_if_untested
from .state.call import Request
from .streaming import AsyncStream, Stream


def mixed_view(model: Any) -> Any:
    """An object that shares everything with ``model``, which stays as it is, but generates with hfgen.

    Of a wrapper (PEFT, ``torch.compile``) it is a view of the model within. Raises ``TypeError`` for an adapter
    that would have no effect there.
    """
    if families.decodes_by_itself(model):
        raise TypeError(
            f"PEFT applies {type(model.active_peft_config).__name__} (virtual tokens, scalings, offsets or tasks of a "
            "call) in its own `generate` alone, which cannot be decoded step by step. Call generate(), with a streamer."
        )
    if isinstance(model, nn.Module):
        parts = (part for part in model.modules() if isinstance(part, transformers.GenerationMixin))
        model = next(parts, model)
    if not isinstance(model, transformers.GenerationMixin) or isinstance(model, GenerationMixin):
        return model
    view = object.__new__(mixed_class(model.__class__))  # a sharded class would call __init__
    vars(view).update(vars(model))
    return view


_MIXED: dict[Any, Any] = {}  # two threads may mix a class at once: the first result counts


@functools.cache
def mixed_class(cls: Any) -> Any:
    """``cls`` with hfgen's mixin behind it; ``cls`` itself if it has it. The same class each time, in all threads.

    Raises ``TypeError`` for a class that cannot generate.
    """
    if not issubclass(cls, transformers.GenerationMixin):
        raise TypeError(
            f"{cls.__name__} cannot generate: there is no transformers.GenerationMixin in it. Load the model "
            "with a class that has a language modelling head, such as AutoModelForCausalLM's."
        )
    if issubclass(cls, GenerationMixin):
        return cls
    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"__reduce_ex__": _reduce, "_unmixed_class": cls}
    mixed = type(cls)(cls.__name__, (_Unannounced, cls, GenerationMixin), namespace)
    mixed.__bases__ = cls, GenerationMixin
    return _MIXED.setdefault(cls, mixed)


class _Unannounced:
    """Hides a mixed class from ``__init_subclass__`` of the model's, which may register classes or ask for keywords."""

    def __init_subclass__(cls) -> None:
        GenerationMixin.__init_subclass__.__func__(cls)  # type: ignore[attr-defined]


def _reduce(self: Any, protocol: Any) -> str | tuple:
    """Pickle as the class that can be imported does; mix again on the other side."""
    mixed = type(self)
    if "_unmixed_class" not in vars(mixed):  # a subclass of a mixed class, importable itself
        return object.__reduce_ex__(self, protocol)
    function, given, *others = mixed._unmixed_class.__reduce_ex__(self, protocol)
    if others and isinstance(others[0], dict):  # a copy needs a compiled forward of its own
        others[0] = {name: v for name, v in others[0].items() if name not in views.COMPILED}
    parts = (mixed._unmixed_class if part is mixed else part for part in (function, *given))
    return _remixed, tuple(parts), *others


def _remixed(function: Callable[..., Any], *given: Any) -> Any:
    model = function(*given)
    object.__setattr__(model, "__class__", mixed_class(model.__class__))
    return model


class GenerationMixin(transformers.GenerationMixin):
    """Generation for any transformers model: ``class Mine(LlamaForCausalLM, hfgen.GenerationMixin)``.

    See ``hfgen.mix_into`` for models that are loaded already. Raises ``TypeError`` for a class in which it
    comes before the model, whose own methods would not be called; in a class that a library derives from a
    mixed one, it moves behind the library's mixins.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        upstream = transformers.GenerationMixin
        for behind in cls.__mro__[cls.__mro__.index(GenerationMixin) + 1 :]:
            if issubclass(behind, upstream) and behind is not upstream:
                unmixed = [vars(base).get("_unmixed_class", base) for base in cls.__bases__]
                if tuple(unmixed) != cls.__bases__:  # a library derived it from the type of a model
                    bases = [base for base in unmixed if base is not upstream]
                    cls.__bases__ = (*bases, GenerationMixin)
                    break
                raise TypeError(
                    f"{cls.__name__} has hfgen.GenerationMixin before {behind.__name__}, whose own methods would "
                    f"not be called: write class {cls.__name__}({behind.__name__}, hfgen.GenerationMixin)."
                )
        warn_if_untested()
        models = [base for base in cls.__bases__ if issubclass(base, nn.Module)]
        if models and not any(issubclass(base, GenerationMixin) for base in models):
            # One more line in a printed model; class names stay as they are.
            shown = cls.extra_repr
            cls.extra_repr = lambda self: "\n".join(filter(None, (shown(self), "generation=hfgen")))

    def __enter__(self) -> Any:
        """``with hfgen.exact(model):`` ends exact mode behind the block."""
        if not exact.is_exact(self):
            raise TypeError(
                f"with takes hfgen.exact(model), but this {type(self).__name__} is not exact."
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if exact.is_exact(self):
            exact.undo(self)

    @torch.no_grad()
    @torch.compiler.disable  # for torch.compile(model.generate); a compiled forward within stays so
    def generate(
        self: Any,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: BaseStreamer | None = None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate: str | Callable | None = None,
        **kwargs: Any,
    ) -> GenerateOutput | torch.Tensor:
        """Continue a prompt, or answer an input.

        Args:
            inputs: The main input: ``input_ids (batch, length)`` of a decoder-only model, what the
                encoder takes otherwise. May also come under its own name; without any, decoding
                starts from ``bos_token_id``.
            generation_config: What to do. ``kwargs`` go before it, the model's own config after.
            logits_processor: Processors that run after the config's, before temperature, top-k, ….
                One of the same type as one of the config's takes its place.
            stopping_criteria: Criteria besides the config's, merged likewise.
            prefix_allowed_tokens_fn: ``(row of the batch, its ids so far) -> allowed next ids``.
            synced_gpus: Go on until every device is done. Default: if parameters are sharded.
            assistant_model: A smaller model that drafts tokens for this one to verify.
            streamer: Gets the prompt, then each token, through ``put()``; of beams, the tokens that
                all of them agree on. ``end()`` is called at the end, also if that is an exception.
            negative_prompt_ids: What ``guidance_scale`` guides away from, ``(batch, length)``.
            negative_prompt_attention_mask: Its mask, ``(batch, length)``.
            custom_generate: A callable that decodes in place of the methods here, after everything
                is prepared (``hfgen.recipe`` makes one of a strategy); or a repository whose
                ``generate`` runs instead (needs ``trust_remote_code=True``).
            prefix_cache: A ``hfgen.PrefixCache``, among the ``kwargs``: what it has stored of the
                prompts is not forwarded again. Default: ``model.prefix_cache``, if it is set.
            kwargs: Fields of the generation config, and inputs of the model's forward. Those of a
                decoder start with ``decoder_``.

        Returns:
            Ids ``(batch * num_return_sequences, length)``, the prompt included if the model is
            decoder-only and the prompt came as ids. With ``return_dict_in_generate``, one of
            transformers' ``Generate*Output``.

        Raises:
            ValueError, TypeError, IndexError: An argument that cannot be used, before the first
                forward. The model and the caller's objects are left as they were.
            InvalidScoresError: Scores of all rows are NaN, so that no token can be chosen.
        """
        request = Request(
            inputs,
            generation_config,
            logits_processor,
            stopping_criteria,
            prefix_allowed_tokens_fn,
            synced_gpus,
            assistant_model,
            streamer,
            negative_prompt_ids,
            negative_prompt_attention_mask,
            custom_generate,
            kwargs,
        )
        try:
            if request.runs_elsewhere:
                return delegate.run(self, request)
            call = prepare(self, request)
            with explaining_misfit(self, call.cache) if call.has_foreign_cache else nullcontext():
                return call.decode(self)
        except BaseException:
            # The server of transformers sends the error behind what it has, and nothing behind an end.
            is_of_server = type(streamer).__module__.startswith("transformers.cli.")
            if hasattr(streamer, "end") and not is_of_server:
                with suppress(Exception):  # the first exception is the one to report
                    streamer.end()  # type: ignore[union-attr]
            raise

    def stream(self: Any, *args: Any, **kwargs: Any) -> Stream:
        """``generate``, as an iterator over ``StreamEvent``s: what each row gains, step by step.

        Takes the arguments of ``generate``. The call is prepared at once, and decodes as the iterator is
        asked. In modes whose tokens are not final before the end, all events come at the end.

        Raises what ``generate`` raises; ``TypeError`` for a model that has a ``generate`` or a decoding
        method of its own; ``ValueError`` for a ``streamer``, and for a ``custom_generate`` that is not
        ``hfgen.recipe``'s.
        """
        return Stream(self, driven(self, Request.of(*args, **kwargs)))

    def astream(self: Any, *args: Any, **kwargs: Any) -> AsyncStream:
        """``stream``, for ``async for``: the call is prepared and decodes in a thread of its own.

        Wrong arguments are raised with the first event. Autocasting is the consumer's.
        """
        return AsyncStream(self, driven(self, Request.of(*args, **kwargs)))

    # Stage 1: config
    _extract_generation_mode_kwargs = config.extract_generation_mode_kwargs
    _prepare_generation_config = config.prepare_generation_config
    _prepare_special_tokens = config.prepare_special_tokens
    _prepare_generated_length = config.prepare_generated_length
    _get_deprecated_gen_repo = delegate.get_deprecated_gen_repo
    _validate_model_kwargs = validate.validate_model_kwargs
    _validate_generation_mode = modes.validate_generation_mode
    _validate_generated_length = validate.validate_generated_length

    # Stage 2: inputs
    _prepare_model_inputs = inputs.prepare_model_inputs
    _maybe_initialize_input_ids_for_generation = inputs.maybe_initialize_input_ids_for_generation
    _prepare_attention_mask_for_generation = inputs.prepare_attention_mask_for_generation
    _prepare_decoder_input_ids_for_generation = inputs.prepare_decoder_input_ids_for_generation
    _expand_inputs_for_generation = inputs.expand_inputs_for_generation
    heal_tokens = healing.heal_tokens

    # Stage 3: encoders
    _maybe_prepare_encoder_kwargs_for_generation = (
        inputs.maybe_prepare_encoder_kwargs_for_generation
    )
    _prepare_text_encoder_decoder_kwargs_for_generation = (
        encode.prepare_text_encoder_decoder_kwargs_for_generation
    )
    _prepare_multimodal_encoder_kwargs_for_generation = (
        encode.prepare_multimodal_encoder_kwargs_for_generation
    )
    _supports_mm_encoder_outputs = inputs.supports_mm_encoder_outputs

    # Stage 4: caches
    _prepare_cache_for_generation = caches.prepare_cache_for_generation
    _prepare_static_cache = caches.prepare_static_cache

    # Stage 5: processors and criteria
    _get_logits_processor = processors.get_logits_processor
    _get_stopping_criteria = stopping.get_stopping_criteria
    _merge_criteria_processor_list = processors.merge_criteria_processor_list

    # The loop
    prepare_inputs_for_generation = step_inputs.prepare_inputs_for_generation
    _update_model_kwargs_for_generation = step_inputs.update_model_kwargs_for_generation
    _prefill = executor.forward_prompt
    _supports_logits_to_keep = executor.supports_logits_to_keep
    _valid_auto_compile_criteria = executor.valid_auto_compile_criteria
    _has_unfinished_sequences = loop.has_unfinished_sequences
    compute_transition_scores = outputs.compute_transition_scores

    # Continuous batching
    generate_batch = delegate.generate_batch

    # Sessions
    session = delegate.session

    # For drafters, which a model that generates makes: prepare another model, or look at it.
    _prepare_call = prepare
    _mixed_view = staticmethod(mixed_view)

    # The modes
    _sample = HOOKS["_sample"]
    _beam_search = HOOKS["_beam_search"]
    _assisted_decoding = HOOKS["_assisted_decoding"]
    _contrastive_search = HOOKS["_contrastive_search"]
    _dola_decoding = HOOKS["_dola_decoding"]
    _group_beam_search = HOOKS["_group_beam_search"]
    _constrained_beam_search = HOOKS["_constrained_beam_search"]


_signature = inspect.signature(GenerationMixin.generate)
for _method in (GenerationMixin.stream, GenerationMixin.astream):  # they take what generate takes
    _returned = inspect.signature(_method).return_annotation
    _method.__signature__ = _signature.replace(return_annotation=_returned)  # type: ignore[union-attr]

#: hfgen's methods; see ``modes.Method``.
OWN = {name: value for name, value in vars(GenerationMixin).items() if not name.startswith("__")}
for _name, _own in OWN.items():
    if isinstance(_own, FunctionType):  # the stages are known as methods, in messages and to code
        _own.__name__, _own.__qualname__ = _name, f"{GenerationMixin.__name__}.{_name}"
    if hasattr(transformers.GenerationMixin, _name):
        setattr(GenerationMixin, _name, Method(_name, _own))


def driven(model: Any, request: Request) -> Request:
    """``request``, if the loop that decodes it is hfgen's, and can be driven step by step.

    Raises ``TypeError`` for a model with methods of its own, and ``ValueError`` for the arguments.
    """
    methods = ["generate"] if request.custom_generate else ["generate", *HOOKS]
    for method in methods:
        if getattr(getattr(model, method), "__func__", None) is not OWN[method]:
            raise TypeError(
                f"{type(model).__name__} has a `{method}` of its own, which cannot be decoded step by step. "
                "Call generate(), with a streamer if it takes one."
            )
    if request.streamer is not None:
        raise ValueError("`streamer` would get what stream() yields: leave it out.")
    if request.custom_generate is not None and not hasattr(request.custom_generate, "start"):
        raise ValueError(
            "`custom_generate` decodes by itself, not step by step: pass what hfgen.recipe() makes."
        )
    if request.runs_elsewhere:
        raise ValueError(
            "`cache_implementation='paged'` does not decode step by step: leave it out."
        )
    return request
