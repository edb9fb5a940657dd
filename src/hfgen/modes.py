"""The decoding modes: ``MODES`` says which hook and which strategy stand behind each.

What a mode can do is declared by its strategy (``call.Strategy``) and read here: whether it streams,
lets rows leave, continues a filled cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from .caches import cache_kind
from .call import Call, Run
from .drafters import Setup
from .loop import finish
from .outputs import GenerateOutput
from .strategies import Beam, ConstrainedBeam, Contrastive, Dola, GroupBeam, Sample
from .strategies.assisted import Assisted, assisted
from .validate import beams, contrast, is_zero, speculation


def sample(
    self: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateOutput | torch.Tensor:
    """Decode greedily, or by sampling with ``do_sample``. Returns what ``generate`` returns."""
    model_kwargs["streamer"] = streamer
    run = Run.of(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        model_kwargs,
    )
    return finish(run, Sample(run))


def beam_search(
    self: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GenerateOutput | torch.Tensor:
    """Search with ``num_beams`` beams, or sample them with ``do_sample``.

    Returns what ``generate`` returns. A streamer gets what all beams of a prompt agree on.
    """
    run = Run.of(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        model_kwargs,
    )
    return finish(run, Beam(run))


def assisted_decoding(
    self: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: torch.Tensor | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateOutput | torch.Tensor:
    """Decode speculatively: tokens are drafted, and verified by one forward for several.

    Returns what ``generate`` returns. ``assistant_model`` is a model or a ``hfgen.Drafter``.
    """
    model_kwargs |= {"streamer": streamer, "tokenizer": tokenizer}
    run = Run.of(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        model_kwargs,
    )
    if is_zero(generation_config.max_new_tokens):  # nothing to draft: the prompt as it is
        return finish(run, Sample(run))
    has_streamer = streamer is not None
    setup = Setup(run, assistant_model, tokenizer, assistant_tokenizer, inputs_tensor, has_streamer)
    return finish(run, assisted(run, setup))


def _decoder(name: str, strategy: Callable[[Run], Any], doc: str) -> Callable[..., Any]:
    """A decoding method with the arguments of ``sample``."""

    def method(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | torch.Tensor:
        model_kwargs["streamer"] = streamer
        run = Run.of(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            model_kwargs,
        )
        return finish(run, strategy(run))

    method.__name__, method.__doc__ = name, doc + " Returns what ``generate`` returns."
    return method


contrastive_search = _decoder(
    "contrastive_search", Contrastive, "Contrastive search (Su et al. 2022)."
)
dola_decoding = _decoder(
    "dola_decoding", Dola, "Decoding by contrasting layers (Chuang et al. 2023)."
)
group_beam_search = _decoder(
    "group_beam_search", GroupBeam, "Diverse beam search (Vijayakumar et al. 2016)."
)
constrained_beam_search = _decoder(
    "constrained_beam_search",
    ConstrainedBeam,
    "Beam search under constraints (Post and Vilar 2018).",
)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to decode."""

    kind: GenerationMode
    #: The hook of the model's class that decodes, and hfgen's function behind it.
    hook: str
    decode: Callable[..., Any]
    #: The class that ``decode`` makes; its attributes declare what it can do.
    strategy: type

    @property
    def name(self) -> str:
        """As people say it: "beam search"."""
        return str(self.kind.value).replace("_", " ")


def _table(*modes: Mode) -> dict[GenerationMode, Mode]:
    return {mode.kind: mode for mode in modes}


_K = GenerationMode
MODES: dict[GenerationMode, Mode] = _table(
    Mode(_K.GREEDY_SEARCH, "_sample", sample, Sample),
    Mode(_K.SAMPLE, "_sample", sample, Sample),
    Mode(_K.BEAM_SEARCH, "_beam_search", beam_search, Beam),
    Mode(_K.BEAM_SAMPLE, "_beam_search", beam_search, Beam),
    Mode(_K.ASSISTED_GENERATION, "_assisted_decoding", assisted_decoding, Assisted),
    Mode(_K.CONTRASTIVE_SEARCH, "_contrastive_search", contrastive_search, Contrastive),
    Mode(_K.DOLA_GENERATION, "_dola_decoding", dola_decoding, Dola),
    Mode(_K.GROUP_BEAM_SEARCH, "_group_beam_search", group_beam_search, GroupBeam),
    Mode(
        _K.CONSTRAINED_BEAM_SEARCH,
        "_constrained_beam_search",
        constrained_beam_search,
        ConstrainedBeam,
    ),
)


def validate_generation_mode(
    self: Any,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Raise ``ValueError`` for a mode that the model, or the other arguments, rule out.

    The hook ``GenerationMixin._validate_generation_mode``.
    """
    supported = getattr(self, "_supported_generation_modes", None)
    if supported is not None and generation_mode not in supported:
        names = ", ".join(mode.value for mode in supported)
        raise ValueError(
            f"{type(self).__name__} decodes with {names}; the arguments ask for "
            f"{generation_mode.value}."
        )
    mode = MODES[generation_mode]
    if "streamer" in generation_mode_kwargs and not getattr(mode.strategy, "streams", True):
        raise ValueError(
            f"`streamer` cannot follow {mode.name}, whose tokens are not final before the end. "
            "Drop the streamer, or decode in another mode."
        )
    beams.check_mode(self, generation_mode, generation_config)
    contrast.check_mode(self, generation_mode, generation_config)
    speculation.check_mode(self, generation_mode, generation_config, generation_mode_kwargs)


def check_call(call: Call) -> None:
    """Raise for what the strategy of the call has not declared that it can do.

    A callable of the caller's may have a method ``check_call(config, arguments)``, which is asked;
    ``arguments`` are those that it will get: the streamer, the tokenizer, ….
    """
    if (check := getattr(call.request.custom_generate, "check_call", None)) is not None:
        check(call.config, call.mode_kwargs)
    config = call.config
    if not getattr(config, "drop_finished", False):
        return
    if not getattr(call.strategy, "drops_rows", False):
        dropping = (mode for mode in MODES.values() if getattr(mode.strategy, "drops_rows", False))
        names = ", ".join(mode.name for mode in dropping)
        raise ValueError(
            f"`drop_finished=True` works with {names}, and with strategies that declare "
            f"`drops_rows`, but the arguments ask for {call.who}. Leave it out."
        )
    if not cache_kind(config.cache_implementation).loses_rows:
        raise ValueError(
            "`drop_finished=True` takes rows out of the cache, and "
            f"`cache_implementation={config.cache_implementation!r}` has a fixed number of them, or "
            "does not declare `loses_rows`. Leave one of the two out."
        )
