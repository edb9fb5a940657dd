"""Run one call of ``generate`` on upstream transformers and on hfgen, and list what differs.

A ``Case`` says everything about a call in one line of JSON. ``run`` builds fresh arguments from
it, calls ``generate`` and keeps what a caller can observe in an ``Outcome``; ``compare`` returns
one line per difference, an empty list when the two sides agree.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import random
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import isroutine
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput
from transformers.utils.logging import disable_progress_bar

import hfgen
from hfgen.families import position_pad
from hfgen.memory.caches.dynamic import upstream_kind
from hfgen.running import prompts
from tests.parity.bare_families import BARE_FAMILIES
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.parity.family import Family
from tests.parity.multimodal_families import MULTIMODAL_FAMILIES
from tests.parity.options import (
    ASSISTED,
    BEAMS,
    BY_NAME,
    GREEDY,
    NEW_TOKENS,
    OPTIONS,
    SAMPLING,
    WITH_INVALID,
    Call,
    excluded,
    usable_modes,
)

ALL_FAMILIES = (*DECODER_FAMILIES, *ENCODER_FAMILIES, *MULTIMODAL_FAMILIES, *BARE_FAMILIES)
FAMILIES: dict[str, Family] = {family.name: family for family in ALL_FAMILIES}

#: Floats may differ by this much, absolutely and relatively.
TOLERANCE = 1e-5
#: The same in float64, where norms and scores are in float32 still. What differs by more than the one
#: in float32, and by no more than the other in float64, is a rounding error.
DOUBLE_TOLERANCE = 1e-6

#: Families that amplify rounding, and how far a shared prefill may be from one of each row there.
UNSTEADY = {"hrm_text": 1e-2, "glmasr": 1e-3, "moonshine": 1e-3, "moonshine_streaming": 1e-3}

#: Share of random calls that are bad on purpose.
BAD_CALLS = 0.08

#: Up to which share of the options a random call has at once.
MOST_OPTIONS = 0.12


# ---------------------------------------------------------------- a case


@dataclass(frozen=True)
class Case:
    """One call: which model, which mode, which prompt, which options (JSON values only)."""

    family: str
    mode: str
    rows: int = 1
    padded: bool = False
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def parse(cls, line: str) -> Case:
        return cls(**json.loads(line))

    @property
    def command(self) -> str:
        """The shell command that runs this case alone."""
        return f"python -m tests.parity.sweep --only {shlex.quote(str(self))}"

    def without(self, *names: str) -> Case:
        return replace(self, options={k: v for k, v in self.options.items() if k not in names})


def settle(case: Case, left_out: Counter[str] | None = None) -> Case:
    """The case without the options that do not fit its family or each other.

    ``left_out`` counts the reasons.
    """
    family = FAMILIES[case.family]
    misfits = [name for name in case.options if not BY_NAME[name].fits(family, case.mode)]
    case = case.without(*misfits)
    while exclusion := next(excluded(family, case), None):
        case = case.without(exclusion.drop)
        if left_out is not None:
            left_out[exclusion.reason] += 1
    return case


def draw_case(
    rng: random.Random, families: Sequence[str] = (), left_out: Counter[str] | None = None
) -> Case:
    """A random combination: family, mode, prompt, and from no to about twelve options.

    ``left_out`` counts why options that were drawn are not in it.
    """
    family = FAMILIES[rng.choice(list(families) or list(FAMILIES))]
    mode = rng.choice(usable_modes(family))
    rows = 1 if mode == ASSISTED else rng.choice((1, 2, 2, 3, 4))
    padded = rows > 1 and "padding" not in family.unsupported and rng.random() < 0.5
    options = [option for option in OPTIONS if option.fits(family, mode)]
    if BY_NAME["invalid"] in options and rng.random() < BAD_CALLS:
        drawn = [BY_NAME["invalid"], *(BY_NAME[name] for name in rng.sample(WITH_INVALID, 2))]
    else:
        share = rng.uniform(0.0, MOST_OPTIONS)
        drawn = [option for option in options if rng.random() < share * option.weight]
    values = {option.name: rng.choice(option.values) for option in drawn}
    return settle(Case(family.name, mode, rows, padded, rng.randrange(1000), values), left_out)


# ---------------------------------------------------------------- models


class Pristine:
    """A model as it was built: attributes, buffers and hooks, to start every call from there."""

    def __init__(self, model: nn.Module) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else [model]
        self.attributes = [(module, dict(vars(module))) for module in modules]
        self.tables = [  # buffers, hooks, …
            (table, dict(table))
            for _, attributes in self.attributes
            for table in attributes.values()
            if isinstance(table, dict)
        ]
        self.generation_config = copy.deepcopy(vars(model.generation_config))

    def restore(self, model: nn.Module) -> None:
        for module, attributes in self.attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for table, content in self.tables:
            table.clear()
            table.update(content)
        vars(model.generation_config).clear()
        vars(model.generation_config).update(copy.deepcopy(self.generation_config))
        hfgen.free_caches(model)  # as transformers' static cache is, an attribute of the model


_PRISTINE: WeakKeyDictionary[nn.Module, Pristine] = WeakKeyDictionary()


def _built(family: str) -> nn.Module:
    with quiet():
        model = FAMILIES[family].build()
    _PRISTINE[model] = Pristine(model)
    return model


@cache
def upstream(family: str, role: str = "target") -> nn.Module:
    """The family's model as transformers builds it; ``role`` tells target and assistant apart."""
    return _built(family)


@cache
def ours(family: str, role: str = "target") -> nn.Module:
    """The same weights, generating with hfgen."""
    model = hfgen.mix_into(_built(family))
    _PRISTINE[model] = Pristine(model)
    return model


@cache
def in_double(family: str, role: str = "target") -> nn.Module:
    """The same as ``ours``, in float64."""
    model = hfgen.mix_into(_built(family)).double()
    _PRISTINE[model] = Pristine(model)
    return model


@contextmanager
def computing_in_double(family: str) -> Iterator[None]:
    """Within, both sides of a family compute in float64."""
    for build in (upstream, ours):
        model = build(family).double()
        _PRISTINE[model] = Pristine(model)
    try:
        yield
    finally:
        forget_models()


def forget_models() -> None:
    """Free the models built so far."""
    for build in (upstream, ours, in_double):
        build.cache_clear()


# ---------------------------------------------------------------- one call


@dataclass
class Outcome:
    """Everything about a call that its caller can observe."""

    returned: Any = None
    error: str | None = None  # the exception's class
    error_bases: tuple[str, ...] = ()
    message: str = ""
    streamed: list[Any] = field(default_factory=list)  # tensors put, None for end()
    random_state: Tensor | None = None
    model_config: dict[str, Any] = field(default_factory=dict)
    passed_config: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # the caller's, after the call
    warned: list[str] = field(default_factory=list)  # categories, sorted
    logged: list[str] = field(default_factory=list)  # "logger level", sorted


class _Records(logging.Handler):
    """Collects which logger spoke, and how loud.

    A message that lists a set may come in two orders in one call, and what is said once is then
    said twice, by chance: such permutations count once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []
        self.messages: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self.messages.setdefault("".join(sorted(message)), message) == message:
            self.seen.append(f"{record.name} {record.levelname}")


#: What is compared of a call that raised, and of one that returned.
OBSERVED_RAISED = ("model_config", "passed_config")
OBSERVED = (
    *OBSERVED_RAISED,
    "returned",
    "streamed",
    "random_state",
    "arguments",
    "warned",
    "logged",
)


@contextmanager
def quiet() -> Iterator[tuple[list[warnings.WarningMessage], list[str]]]:
    """Yield the Python warnings and log records of a block instead of showing them.

    What models print is dropped. What upstream says only once per process is said again in each block.
    """
    root = logging.getLogger("transformers")
    logging.Logger.warning_once.cache_clear()
    records, before = _Records(), (root.handlers, root.propagate, root.level)
    root.handlers, root.propagate = [records], False
    # An assignment would not reach loggers that have answered before.
    root.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield caught, records.seen
    finally:
        root.handlers, root.propagate = before[:2]
        root.setLevel(before[2])


def build_call(model: nn.Module, case: Case, assistant: Callable[[], nn.Module]) -> Call:
    """Fresh arguments for one call, options applied in the order of the table."""
    family = FAMILIES[case.family]
    kwargs = dict(family.inputs(model, case.rows, case.padded, case.seed))
    call = Call(family, model, case, kwargs, assistant)
    call.generator.manual_seed(case.seed)
    kwargs["max_new_tokens"] = NEW_TOKENS
    if "max_length" in case.options and "max_new_tokens" not in case.options:
        del kwargs["max_new_tokens"]
    if case.mode in SAMPLING:
        kwargs["do_sample"] = True
    if case.mode in BEAMS:
        kwargs["num_beams"] = 2
        if not model.generation_config.pad_token_id:
            kwargs["pad_token_id"] = 1  # upstream pads with EOS if the pad token's id is 0
    if case.mode == ASSISTED:
        kwargs["prompt_lookup_num_tokens"] = 3
    for option in OPTIONS:
        if option.name in case.options:
            option.enter(call, copy.deepcopy(case.options[option.name]))
    return call


def run(model: nn.Module, case: Case, amend: Callable[[Call], None] = lambda call: None) -> Outcome:
    """Call ``generate`` on a model of ``upstream`` or ``ours``, with arguments made afresh.

    The model starts as it was built, whatever ran on it before, and torch's generator from the
    case's seed. ``amend`` may change the arguments at last. Exceptions of ``generate`` are part of
    the outcome.
    """
    _PRISTINE[model].restore(model)
    outcome = Outcome()
    with quiet() as (caught, logged), torch.no_grad():
        call = build_call(model, case, lambda: _assistant(model, case.family))
        amend(call)
        caught.clear()
        logged.clear()
        torch.default_generator.manual_seed(case.seed)  # `torch.manual_seed` takes a millisecond
        try:
            outcome.returned = model.generate(**call.kwargs)
        except Exception as error:  # any class: it is compared
            outcome.error, outcome.message = type(error).__name__, str(error)
            outcome.error_bases = tuple(base.__name__ for base in type(error).__mro__)
        outcome.random_state = torch.get_rng_state()
    outcome.warned = sorted(warning.category.__name__ for warning in caught)
    outcome.logged = sorted(logged)
    outcome.streamed = call.streamer.seen if call.streamer else []
    outcome.model_config = model.generation_config.to_dict()
    passed = call.kwargs.pop("generation_config", None)
    if isinstance(passed, GenerationConfig):
        outcome.passed_config = passed.to_dict()
    outcome.arguments = {key: call.kwargs[key] for key in call.kwargs if _is_data(call.kwargs[key])}
    if case.mode in BEAMS or "num_return_sequences" in case.options:
        # Documented difference: upstream expands the caller's encoder outputs in place.
        outcome.arguments.pop("encoder_outputs", None)
    return outcome


def _assistant(model: nn.Module, family: str) -> nn.Module:
    single = ours if model is ours(family) else upstream
    build = in_double if model.dtype == torch.float64 else single
    assistant = build(family, "assistant")
    _PRISTINE[assistant].restore(assistant)
    return assistant


def _is_data(value: Any) -> bool:
    plain = (Tensor, Cache, ModelOutput, dict, list, tuple, int, float, str)
    return value is None or isinstance(value, plain)


# ---------------------------------------------------------------- comparing


def compare(theirs: Outcome, mine: Outcome, tolerance: float = TOLERANCE) -> list[str]:
    """One line per difference between upstream's outcome and hfgen's; empty when equal.

    Where upstream raises, hfgen raises the same or a subclass, and may do so earlier: how far the
    call had come by then is not compared.
    """
    if theirs.error != mine.error and theirs.error not in mine.error_bases:
        return [f"raised: {_raised(theirs)} != {_raised(mine)}"]
    names = OBSERVED_RAISED if theirs.error else OBSERVED
    found = []
    for name in names:
        found += _differences(name, getattr(theirs, name), getattr(mine, name), tolerance)
    return found


def _raised(outcome: Outcome) -> str:
    return f"{outcome.error}({outcome.message[:120]!r})" if outcome.error else "nothing"


def _differences(path: str, a: Any, b: Any, tolerance: float) -> list[str]:
    """Differences of two nested values; within one tuple or list only the first entry's."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_differences(path, a, b, tolerance)
    if isinstance(a, Cache):
        same_kind = type(a).__name__ in {base.__name__ for base in type(b).__mro__}
        if not same_kind:
            return [f"{path}: {type(a).__name__} != {type(b).__name__}"]
        return _differences(path, _cache_contents(a), _cache_contents(b), tolerance)
    if type(a).__name__ != type(b).__name__:
        return [f"{path}: {_short(a)} != {_short(b)}"]
    if isinstance(a, Mapping):
        found = [f"{path}: only one side has {key!r}" for key in a.keys() ^ b.keys()]
        for key in a.keys() & b.keys():
            found += _differences(f"{path}.{key}", a[key], b[key], tolerance)
        return sorted(found)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} entries != {len(b)} entries"]
        each = (
            _differences(f"{path}[{i}]", x, y, tolerance)
            for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
        return next((found for found in each if found), [])
    if hasattr(a, "__dict__") and not isroutine(a):
        return _differences(path, _tensors(a), _tensors(b), tolerance)
    return [] if a == b else [f"{path}: {_short(a)} != {_short(b)}"]


def _tensor_differences(path: str, a: Tensor, b: Tensor, tolerance: float) -> list[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{path}: {tuple(a.shape)} {a.dtype} != {tuple(b.shape)} {b.dtype}"]
    if torch.equal(a, b):
        return []
    if a.is_floating_point():
        unequal = ~torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        unequal = a != b
    if not unequal.any():
        return []
    where = tuple(unequal.nonzero()[0].tolist())
    count = int(unequal.sum())
    return [f"{path}: {count} of {a.numel()} values, first at {where}: {a[where]} != {b[where]}"]


def _cache_contents(cache: Cache) -> dict[str, Any]:
    """What is compared of a cache: its length, and its layers' types and tensors."""
    contents = {name: value for name, value in vars(cache).items() if isinstance(value, Cache)}
    if "layers" in vars(cache):
        contents["layers"] = [
            (upstream_kind(layer).__name__, _tensors(layer) | _states(layer))
            for layer in cache.layers
        ]
    try:
        contents["length"] = int(cache.get_seq_length())
    except Exception as error:  # not every layer type has a length
        contents["length"] = type(error).__name__
    return contents


def _states(layer: Any) -> dict[str, Tensor]:
    """What a layer grows, which hfgen's layers have behind properties."""
    states = {name: getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")}
    return {name: value for name, value in states.items() if isinstance(value, Tensor)}


def _tensors(thing: Any) -> dict[str, Any]:
    """The tensors among an object's attributes, one level of lists and dicts deep."""
    values = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor)
        or (isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor))
        or (isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()))
    }


def _short(value: Any) -> str:
    text = f"{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return f"{type(value).__name__} {text[:160]}"


# ---------------------------------------------------------------- both sides


@dataclass
class Report:
    """Both outcomes of a case and how they differ."""

    case: Case
    theirs: Outcome
    mine: Outcome
    differences: list[str]
    #: Why differences from upstream are none.
    excused: str | None = None

    def __str__(self) -> str:
        return "\n".join([*self.differences, self.case.command])


def is_expanded(case: Case) -> bool:
    return case.mode in BEAMS or "num_return_sequences" in case.options


@contextmanager
def prefill_of_each_row() -> Iterator[None]:
    """Within, beams and samples forward their prompt each for itself, as upstream's do."""
    can_fan_out = prompts._can_fan_out
    prompts._can_fan_out = lambda *_: False
    try:
        yield
    finally:
        prompts._can_fan_out = can_fan_out


def check(case: Case) -> Report:
    """Compare both sides of a case; where forwards have other shapes, by drafts or a shared prefill, also in float64."""
    report = _check(case)
    has_other_shapes = case.mode == ASSISTED or is_expanded(case)
    may_be_rounding = report.differences and has_other_shapes and report.theirs.error is None
    if may_be_rounding and isinstance(upstream(case.family), nn.Module):  # sessions have one dtype
        with computing_in_double(case.family):
            exact = _check(case, DOUBLE_TOLERANCE, as_double)
        if exact.theirs.error is None and not exact.differences:
            report.differences, report.excused = [], "rounding: there is none in float64"
    return report


def as_double(call: Call) -> None:
    """Convert the floats among a call's inputs to float64."""
    for name, value in call.kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            call.kwargs[name] = value.double()


def _check(
    case: Case, tolerance: float = TOLERANCE, amend: Callable[[Call], None] = lambda call: None
) -> Report:
    """Run a case on both sides; where sequences differ, say by how little the choice was made."""
    try:
        theirs = run(upstream(case.family), case, amend=amend)
        mine = run(ours(case.family), case, amend=amend)
    except Exception as error:  # of the model's or the arguments' making, not of generate
        return Report(case, Outcome(), Outcome(), [f"not run: {type(error).__name__}: {error}"])
    if "assistant" in case.options:  # upstream's warns again in every round
        theirs.warned = mine.warned = theirs.logged = mine.logged = []
    differences = compare(theirs, mine, tolerance)
    if differences and is_expanded(case):  # equal but for the kernels that a shared prefill takes?
        with prefill_of_each_row():
            unshared = run(ours(case.family), case, amend=amend)
        differences = compare(theirs, unshared, tolerance)
        differences += compare(unshared, mine, UNSTEADY.get(case.family, 1e-4))
    excused = None
    if differences and breaks_by_drafts(case, theirs):
        differences, excused = unlike_greedy(case, mine), "upstream raises while it drafts"
    if differences and (reason := tokens_by_drafts(case, theirs)):
        differences, excused = unlike_greedy(case, mine), reason
    if differences and (reason := drafts_otherwise(case, theirs)):
        theirs, mine = (replace(o, streamed=_as_one_chunk(o.streamed)) for o in (theirs, mine))
        differences, excused = compare(theirs, mine, tolerance), reason
    if mine.error == "InvalidScoresError" and _has_nan(case):
        differences, excused = [], "upstream goes on with NaN scores"
    has_invalid_rows = theirs.message.startswith("probability tensor contains") and mine.logged
    if has_invalid_rows and mine.error is None:  # and goes on with the valid rows
        differences, excused = [], "upstream raises for all rows where some have NaN scores"
    if any(line.startswith("returned") for line in differences):
        differences += _explain(case, theirs, mine)
    return Report(case, theirs, mine, differences, excused)


def breaks_by_drafts(case: Case, theirs: Outcome) -> bool:
    """Whether upstream's assisted decoding raises where hfgen decodes: documented differences.

    It takes the image's keys out of mllama's cache, sizes bans for ids that ImageGPT does not score,
    drafts placeholders of media and positions that the model has not, and lets an assistant encode ids of -100 where the caller gave encoder outputs
    alone, or ids beside embeddings.
    """
    if case.mode != ASSISTED:
        return False
    has_lost_keys = case.family in ("mllama", "imagegpt") and "size of tensor" in theirs.message
    has_no_ids = case.options.get("encoder_outputs") == "alone" and theirs.error == "IndexError"
    has_both = case.options.get("encoder_embeds") == "only" and "inputs_embeds" in theirs.message
    placeholders = r"features and \w+ tokens do not match|source < number of ones in mask"
    has_placeholders = re.search(placeholders, theirs.message, re.I)
    is_beyond_end = "must match the existing size" in theirs.message  # of learned positions
    return has_lost_keys or has_no_ids or has_both or is_beyond_end or bool(has_placeholders)


def tokens_by_drafts(case: Case, theirs: Outcome) -> str | None:
    """Why upstream's drafts change its tokens at padding, images or ends of sound: documented differences."""
    ids, pad = sequences(theirs), case.options.get("pad_token_id")
    if case.mode != ASSISTED or ids is None:
        return None
    shifting = position_pad(ours(case.family))
    if shifting is not None and (ids == shifting).any():
        return "upstream's drafts behind a pad have other positions"
    if getattr(ours(case.family).config, "visual_indicator_token_ids", None) is not None:
        return "upstream drafts tokens that stand for a part of an image"
    if pad is not None and (ids[:, 0] == pad).all():  # of one token: prompts of several are text
        return "upstream chooses the first token by drafts of later ones"
    if case.family == "unlimited_ocr":
        return "upstream keeps what is drafted with the prompt beyond the window, as a part of the prompt"
    if case.family == "kyutai_speech_to_text":  # the codes of its last frames are then replaced
        return "upstream drafts beyond the end of the sound"
    return None


def drafts_otherwise(case: Case, theirs: Outcome) -> str | None:
    """Why hfgen's assistant drafts other tokens than upstream's: documented differences.

    The tokens of the call are the same. How many come at once, which a streamer sees, is not.
    """
    if "assistant" not in case.options:
        return None
    if upstream(case.family).config.is_encoder_decoder:
        return "upstream's assistant goes on from a text that nobody wrote"
    if case.family in ("kosmos2", "kosmos2_5"):
        return "upstream drafts by the assistant's own generate, in which a part of it decodes"
    pad = case.options.get("pad_token_id", upstream(case.family).generation_config.pad_token_id)
    # The first chunk is the prompt.
    if pad is not None and any((c == pad).any() for c in theirs.streamed[1:] if c is not None):
        return "upstream's assistant may mask a token equal to the pad"
    return None


def _as_one_chunk(streamed: list[Any]) -> list[Any]:
    """What was streamed, all tokens in one; the calls of ``end()`` stay."""
    tokens = [chunk.reshape(1, -1) for chunk in streamed if chunk is not None]
    return [*([torch.cat(tokens, dim=1)] if tokens else []), *[None] * streamed.count(None)]


def unlike_greedy(case: Case, mine: Outcome) -> list[str]:
    """How hfgen's assisted outcome differs from upstream's greedy tokens."""
    greedy = run(upstream(case.family), settle(replace(case, mode=GREEDY)))
    return _differences("greedy tokens", sequences(greedy), sequences(mine), 0.0)


def sequences(outcome: Outcome) -> Tensor | None:
    """``(rows, length)`` ids, however the call returned them."""
    returned = outcome.returned
    return returned if isinstance(returned, Tensor) else getattr(returned, "sequences", None)


def _scored(case: Case) -> Outcome:
    """Upstream's outcome of a case, with scores."""
    case = case.without("ignored_output")
    case = replace(case, options={**case.options, "outputs": ["scores"]})
    return run(upstream(case.family), case)


def _has_nan(case: Case) -> bool:
    """Whether upstream decodes from NaN; sums of beams have one where infinite scores cancel out."""
    scores = getattr(_scored(case).returned, "scores", None) or ()
    return any(
        bool(score.isnan().any() or (case.mode in BEAMS and score.isposinf().any()))
        for score in scores
    )


def _explain(case: Case, theirs: Outcome, mine: Outcome) -> list[str]:
    """The first differing token, and how far apart upstream's two best scores were there."""
    a, b = sequences(theirs), sequences(mine)
    if a is None or b is None or a.shape[0] != b.shape[0]:
        return []
    length = min(a.shape[1], b.shape[1])
    unequal = (a[:, :length] != b[:, :length]).nonzero().tolist()
    if not unequal:
        return []
    row, position = min(unequal, key=lambda place: place[1])
    again = _scored(case).returned
    where = f"first differing token: row {row}, position {position}"
    if getattr(again, "scores", None) is None:
        return [where]
    step = position - (again.sequences.shape[1] - len(again.scores))
    beam_indices = getattr(again, "beam_indices", None)
    if not 0 <= step < len(again.scores if beam_indices is None else beam_indices[row]):
        return [where]
    beam = row if beam_indices is None else int(beam_indices[row, step])
    if beam < 0:
        return [where]
    best, second = again.scores[step][beam].topk(2).values.tolist()
    return [f"{where}, step {step}; gap of upstream's two best scores there: {best - second:.2e}"]


def summary_keys(case: Case) -> Counter[tuple[str, str]]:
    """The groups that a case counts for in a summary: its family, its mode, its options."""
    keys = [("family", case.family), ("mode", case.mode)]
    return Counter([*keys, *(("option", name) for name in case.options)])


def versions() -> str:
    """One line that says what was compared."""
    return f"transformers {transformers.__version__}, hfgen {hfgen.__version__}, torch {torch.__version__}"


disable_progress_bar()
torch.set_num_threads(1)  # the models are tiny: a second thread would only wait
torch.set_warn_always(True)  # else only the side that runs first is warned
