"""``MODES``: the decoding modes, each with its hook and its strategy, which declares what it can do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from ..logits.logprobs import asks_for_any
from ..logits.processors.lists import reads_replaced
from ..memory.caches import cache_kind
from ..running import graphs
from ..running.row_states import is_replaced
from ..settings.kinds import is_zero
from ..state.call import Call
from ..state.run import Run, Strategy
from .drafters import Setup, refusals
from .loop import finish
from .outputs import GenerateOutput
from .strategies import Beam, ConstrainedBeam, Contrastive, Dola, GroupBeam, Sample
from .strategies.assisted import Assisted


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to decode: the hook of the model's class, and the strategy behind it."""

    kind: GenerationMode
    hook: str
    #: ``refusals(model, config)``, if it has that, yields why it cannot decode with these.
    strategy: type

    @property
    def name(self) -> str:
        """As people say it: "beam search"."""
        return str(self.kind.value).replace("_", " ")

    def start(self, run: Run, arguments: dict[str, Any]) -> Strategy:
        """The strategy of a run, and of the ``arguments`` of the mode where it drafts."""
        if self.strategy is not Assisted:
            return self.strategy(run)
        if is_zero(run.config.max_new_tokens):  # nothing to draft: the prompt as it is
            return Sample(run)
        names = ("assistant_model", "tokenizer", "assistant_tokenizer", "inputs_tensor")
        return Assisted(Setup(run, *(arguments.get(name) for name in names)))

    @property
    def decode(self) -> Callable[..., Any]:
        return HOOKS[self.hook]

    def method_of(self, cls: type) -> Any:
        """The function with which ``cls`` decodes; transformers' own if parts of it are replaced."""
        method, upstreams = getattr(cls, self.hook), _UPSTREAMS.get(self.hook)
        if upstreams is None or method is not self.decode:
            return method
        parts = PARTS_OF_BEAM_SEARCH if self.hook == "_beam_search" else ()
        is_changed = reads_replaced(upstreams) or any(is_replaced(name, cls) for name in parts)
        return upstreams if is_changed else method


#: The parts of transformers' beam search that are methods, which hfgen's does not call.
PARTS_OF_BEAM_SEARCH = (
    *("_flatten_beam_dim", "_unflatten_beam_dim", "_gather_beams", "_check_early_stop_heuristic"),
    *("_beam_search_has_unfinished_sequences", "_get_top_k_continuations"),
    *("_get_running_beams_for_next_iteration", "_update_finished_beams"),
)

_OF_PARTS = "_beam_search", "_assisted_decoding"
_UPSTREAMS = {name: getattr(transformers.GenerationMixin, name) for name in _OF_PARTS}
_K = GenerationMode
_ROWS = (
    Mode(_K.GREEDY_SEARCH, "_sample", Sample),
    Mode(_K.SAMPLE, "_sample", Sample),
    Mode(_K.BEAM_SEARCH, "_beam_search", Beam),
    Mode(_K.BEAM_SAMPLE, "_beam_search", Beam),
    Mode(_K.ASSISTED_GENERATION, "_assisted_decoding", Assisted),
    Mode(_K.CONTRASTIVE_SEARCH, "_contrastive_search", Contrastive),
    Mode(_K.DOLA_GENERATION, "_dola_decoding", Dola),
    Mode(_K.GROUP_BEAM_SEARCH, "_group_beam_search", GroupBeam),
    Mode(_K.CONSTRAINED_BEAM_SEARCH, "_constrained_beam_search", ConstrainedBeam),
)
MODES: dict[GenerationMode, Mode] = {mode.kind: mode for mode in _ROWS}


def _hook(mode: Mode) -> Callable[..., Any]:
    """The decoding method of a mode, with upstream's signature, which models and callers inspect."""

    def decode(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        *others: Any,
        **model_kwargs: Any,
    ) -> GenerateOutput | torch.Tensor:
        functions = logits_processor, stopping_criteria
        kwargs = model_kwargs | {"streamer": streamer}
        kwargs |= dict(zip(names[: len(others)], others, strict=True))
        run = Run(self, input_ids, *functions, generation_config, synced_gpus, kwargs)
        return finish(run, mode.start(run, kwargs))

    summary = (mode.strategy.__doc__ or "").partition("\n")[0]
    decode.__name__, decode.__doc__ = mode.hook, f"{summary} Returns what ``generate`` returns."
    signature = inspect.signature(vars(transformers.GenerationMixin).get(mode.hook, decode))
    decode.__signature__ = signature  # type: ignore[attr-defined]
    names = [*signature.parameters][7:-1]  # of upstream's that may come by position
    return decode


HOOKS = {mode.hook: _hook(mode) for mode in _ROWS}  # the decoding methods of the mixin, by name


class Method:
    """A method of hfgen's mixin, or what somebody has put into transformers' mixin in its place."""

    def __init__(self, name: str, own: Any) -> None:
        self.name, self.own = name, own
        self.known: Any = None  # transformers', once it is known to be theirs

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        theirs = getattr(transformers.GenerationMixin, self.name, None)
        if theirs is not self.own and theirs != self.known:
            if is_replaced(self.name):
                theirs = inspect.getattr_static(transformers.GenerationMixin, self.name)
                bind = getattr(theirs, "__get__", None)
                return theirs if bind is None else bind(instance, owner)
            self.known = theirs
        return self.own.__get__(instance, owner)


def validate_generation_mode(
    self: Any,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Raise ``ValueError`` for a mode that the model, or the other arguments, rule out."""
    supported = getattr(self, "_supported_generation_modes", None)
    if supported is not None and generation_mode not in supported:
        names = ", ".join(str(getattr(mode, "value", mode)) for mode in supported)
        asked = f"the arguments ask for {generation_mode.value}"
        raise ValueError(f"{type(self).__name__} decodes with {names}; {asked}.")
    mode = MODES[generation_mode]
    if "streamer" in generation_mode_kwargs and not getattr(mode.strategy, "streams", True):
        raise ValueError(
            f"`streamer` cannot follow {mode.name}, whose tokens are not final before the end of the call."
        )
    if hasattr(mode.strategy, "refusals"):
        for reason in mode.strategy.refusals(self, generation_config):
            raise ValueError(reason)
    if mode.strategy is Assisted or generation_mode_kwargs.get("assistant_model") is not None:
        drafting = generation_mode, generation_config, generation_mode_kwargs
        for reason in refusals(self, *drafting):
            raise ValueError(reason)


def check_call(call: Call) -> None:
    """Raise for what the strategy of the call has not declared, and what ``check_call`` of a callable raises."""
    if (check := getattr(call.request.custom_generate, "check_call", None)) is not None:
        check(call.config, call.mode_kwargs)
    config = call.config
    if call.strategy is None and any(map(asks_for_any, call.configs)):
        raise ValueError(
            "`logprobs`, `logprob_token_ids`, `prompt_logprobs` and the like are collected where hfgen decodes, "
            f"but {getattr(call.method, '__qualname__', call.method)} does here. Leave them out."
        )
    if getattr(config, "use_cuda_graph", False) and not getattr(call.strategy, "may_record", False):
        graphs.warn(f"{call.who} does not declare `may_record`")
    if not getattr(config, "drop_finished", False):
        return
    if not getattr(call.strategy, "drops_rows", False):
        dropping = (mode for mode in _ROWS if getattr(mode.strategy, "drops_rows", False))
        names = ", ".join(mode.name for mode in dropping)
        raise ValueError(
            f"`drop_finished=True` works with {names} and strategies that declare `drops_rows`, not {call.who}."
        )
    if not cache_kind(config.cache_implementation).loses_rows:
        raise ValueError(
            "`drop_finished=True` takes rows out of the cache, and does not go with one that does not declare "
            f"`loses_rows`: `cache_implementation={config.cache_implementation!r}`."
        )
