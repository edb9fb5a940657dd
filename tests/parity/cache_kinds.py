"""What each kind of cache promises, as checks of calls of the parity sweep; see ``caches.py``.

A check returns one line per difference, or ``None`` where there is nothing to compare: the reference
raises, or the family does not go with the kind.
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput

import hfgen
from hfgen import families
from hfgen.decoding.modes import MODES
from hfgen.families import CACHE
from hfgen.memory.caches import growing
from tests import SHIPPED
from tests.parity.family import Family
from tests.parity.harness import (
    FAMILIES,
    TOLERANCE,
    UNSTEADY,
    Case,
    Outcome,
    _has_nan,
    check,
    compare,
    is_expanded,
    ours,
    prefill_of_each_row,
    run,
    sequences,
    tokens_by_drafts,
    unlike_greedy,
    upstream,
)
from tests.parity.options import ASSISTED, BEAMS, GREEDY, Call, vocab_size

#: Where the same numbers come from other kernels, floats may differ by this much.
NEAR = 1e-4

#: Families whose masks of their own are cut by the keys' length, or that have none with a cache (FSMT):
#: they attend to what a static cache does not hold yet, so its length counts.
LENGTH_COUNTS = ("fsmt", "gpt_neo", "led", "nllb_moe")

Amend = Callable[[Call], None]


@dataclass(frozen=True)
class Cached:
    """Calls one after the other, and the kind of cache that they decode with (JSON values only)."""

    kind: str
    cases: tuple[Case, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return self.cases[0]

    @property
    def family(self) -> Family:
        return FAMILIES[self.case.family]

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Cached:
        values = json.loads(line)
        return cls(values["kind"], tuple(Case(**c) for c in values["cases"]), values["settings"])

    @property
    def command(self) -> str:
        """The shell command that checks this alone."""
        return f"python -m tests.parity.caches --only {shlex.quote(str(self))}"


# ---------------------------------------------------------------- outcomes


def leave_alone(call: Call) -> None:
    """Amend nothing."""


def adding(**arguments: Any) -> Amend:
    """Amend a call by ``arguments`` of ``generate``."""
    return lambda call: call.kwargs.update(arguments)


def both(*amends: Amend) -> Amend:
    def amend(call: Call) -> None:
        for each in amends:
            each(call)

    return amend


def mode_of(cached: Cached) -> Amend:
    """What makes a greedy case one of contrastive search, which upstream has no more."""
    is_contrastive = cached.settings.get("contrastive", False)
    return adding(penalty_alpha=0.6, top_k=4) if is_contrastive else leave_alone


def comparable(outcome: Outcome) -> Outcome:
    """What does not depend on the kind of cache: of a cache, its length."""
    returned = outcome.returned
    if isinstance(returned, Mapping):
        returned = {k: _length(v) if isinstance(v, Cache) else v for k, v in returned.items()}
    return replace(outcome, returned=returned, arguments={}, warned=[], logged=[], model_config={})


def _length(cache: Cache) -> int | None:
    """Tokens in a cache; ``None`` if it does not count them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


def unlike(theirs: Outcome, mine: Outcome, tolerance: float = TOLERANCE) -> list[str]:
    """Differences that no other kind of cache excuses."""
    return compare(comparable(theirs), comparable(mine), tolerance)


def unlike_upstream(
    case: Case, theirs: Outcome, mine: Callable[[], Outcome], tolerance: float = TOLERANCE
) -> list[str]:
    """The same; a prefill that rows share may be further off than one of each row.

    Where upstream's drafts change its tokens, greedy decoding's are what counts.
    """
    shared = mine()
    if shared.error == "InvalidScoresError" and _has_nan(case):
        return []  # documented difference: upstream goes on with NaN scores
    found = unlike(theirs, shared, tolerance)
    if found and is_expanded(case):
        with prefill_of_each_row():
            each = mine()
        found = unlike(theirs, each, tolerance) + unlike(each, shared, tolerance_of(case))
    if found and tokens_by_drafts(case, theirs):
        found = unlike_greedy(case, shared)
    return found


def tolerance_of(case: Case) -> float:
    """How far floats may be off that come from other kernels: states of linear attention add up."""
    return UNSTEADY.get(case.family, 1e-3 if ours(case.family)._is_stateful else NEAR)


# ---------------------------------------------------------------- one call


@contextmanager
def concatenating(cached: Cached) -> Iterator[None]:
    """Within, small tensors are concatenated, as outside of tests, if the case says so."""
    before = growing.CONCATENATED
    growing.CONCATENATED = SHIPPED if cached.settings.get("concatenates") else before
    try:
        yield
    finally:
        growing.CONCATENATED = before


def reference(cached: Cached) -> Outcome:
    """With a dynamic cache: upstream's call, or hfgen's where upstream lacks the mode."""
    case = cached.case
    if cached.settings.get("contrastive") or (case.mode == ASSISTED and case.rows > 1):
        return run(ours(case.family), case, mode_of(cached))
    return run(upstream(case.family), case)


def check_dynamic(cached: Cached) -> list[str] | None:
    """As upstream's, the cache's contents included: the sweep's own check, with longer outputs."""
    with concatenating(cached):
        report = check(cached.case)
    return None if report.theirs.error and not report.differences else report.differences


def check_static(cached: Cached) -> list[str] | None:
    """As upstream's static cache; where that does not go with the mode, as its dynamic one."""
    case, static = cached.case, adding(cache_implementation="static")
    if case.family in LENGTH_COUNTS:
        return None
    is_like = case.mode != ASSISTED and not cached.settings.get("contrastive")
    theirs = run(upstream(case.family), case, static) if is_like else reference(cached)
    if theirs.error or (not is_like and has_indexer(case.family)):
        return None
    amend = both(mode_of(cached), static)
    if case.mode == ASSISTED and case.options.get("max_length", 20) <= 3:
        return None  # drafts of three tokens are refused where the cache holds fewer
    # For several tokens, ImageGPT's mask is cut from the end of a static cache. A static layer of
    # Unlimited-OCR goes on with the keys of before when its rows are reordered.
    if not is_like and case.family in ("imagegpt", "unlimited_ocr"):
        return None
    tolerance = TOLERANCE if is_like else tolerance_of(case)
    return unlike_upstream(case, theirs, lambda: run(ours(case.family), case, amend), tolerance)


def check_offloaded(cached: Cached) -> list[str] | None:
    """As upstream's dynamic cache, on the host and in files."""
    case, theirs = cached.case, reference(cached)
    if theirs.error:
        return None
    with tempfile.TemporaryDirectory() as folder:
        is_file = cached.settings.get("in_files", False)
        options = {"cache_config": {"path": folder}} if is_file else {}
        amend = both(mode_of(cached), adding(cache_implementation="offloaded", **options))
        return unlike_upstream(case, theirs, lambda: run(ours(case.family), case, amend))


def check_finished(cached: Cached) -> list[str] | None:
    """Rows that have ended may leave: every row is the same up to its end."""
    case, amend = cached.case, mode_of(cached)
    model = ours(case.family)
    plain = run(model, case, amend)
    if plain.error or getattr(sequences(plain), "ndim", 0) != 2:  # else: codes of sound
        return None
    if (mode := MODES[GenerationMode(case.mode)]).decode is not getattr(type(model), mode.hook):
        return None  # the model's own method declares nothing
    dropping = run(model, case, both(amend, adding(drop_finished=True)))
    if dropping.error:
        return [f"raised: {dropping.error}: {dropping.message[:200]}"]
    ended = case.options["eos_token_id"]
    return unlike(until_end(plain, ended), until_end(dropping, ended), tolerance_of(case))


def until_end(outcome: Outcome, eos: list[int]) -> Outcome:
    """Scores of rows that have ended are not compared, nor is the cache, which has not all rows.

    Of beams, scores of a step do not tell which prompt has ended: their sums are compared.
    """
    returned = outcome.returned
    if not isinstance(returned, ModelOutput):
        return outcome
    fields = {name: value for name, value in returned.items() if not isinstance(value, Cache)}
    for name in ("scores", "logits"):
        if "sequences_scores" in fields:
            fields.pop(name, None)
        elif (steps := fields.get(name)) is not None:
            tokens = returned.sequences[:, -len(steps) :]
            is_end = torch.isin(tokens, torch.tensor(eos))
            has_ended = (is_end.cumsum(1) - is_end.long()) > 0  # (rows, steps): before this step
            fields[name] = tuple(
                step.masked_fill(has_ended[:, i].view(-1, *[1] * (step.ndim - 1)), 0.0)
                for i, step in enumerate(steps)
            )
    return replace(outcome, returned=fields)


# ---------------------------------------------------------------- quantised


def check_quantized(cached: Cached) -> list[str] | None:
    """Exact while all tokens are in the window; otherwise exact for a prompt in one go."""
    case, amend = cached.case, mode_of(cached)
    model = ours(case.family)
    plain = run(model, case, amend)
    if plain.error:
        return None
    options = dict(cached.settings["cache_config"])
    is_long = options["residual_length"] > 100
    packing = adding(cache_implementation="quantized", cache_config=options)
    packed = run(model, case, both(amend, packing))
    if is_long:
        is_timed = case.mode == ASSISTED  # how much is drafted at once depends on the clock
        if is_timed:
            plain.streamed, packed.streamed = [], []
        # Eager attention takes other kernels for a prompt's states that are not contiguous.
        is_exact = not is_timed and model.config._attn_implementation != "eager"
        return unlike(plain, packed, 0.0 if is_exact else NEAR)
    if packed.error:
        return [f"raised: {packed.error}: {packed.message[:200]}"]
    return _implausible(case, plain, packed)


def _implausible(case: Case, plain: Outcome, packed: Outcome) -> list[str]:
    a, b = sequences(plain), sequences(packed)
    assert a is not None
    assert b is not None
    found = [] if len(a) == len(b) else [f"{len(a)} rows != {len(b)} rows"]
    length, fields = b.shape[1], packed.returned
    if not isinstance(fields, ModelOutput):
        return found
    is_as_long = a.shape[1] == length and case.mode not in BEAMS  # whose steps are not their length
    if is_as_long and (cache := fields.get(CACHE)) is not None:
        expected = _length(plain.returned[CACHE])
        if _length(cache) != expected:
            found.append(f"a cache of {_length(cache)} tokens, not {expected}")
    scores = fields.get("scores")
    if scores and "prefill_chunk_size" not in case.options:
        first = plain.returned.scores[0]
        if not torch.allclose(first, scores[0], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            found.append("the scores of the first token differ")
    return found


# ---------------------------------------------------------------- the caller's cache


#: Options that do not look at the prompt: a call with the new ids alone is then one with all.
NEUTRAL = (
    "max_new_tokens min_new_tokens eos_token_id pad_token_id num_beams early_stopping length_penalty "
    "num_return_sequences temperature top_k top_p outputs prompt_lookup_num_tokens renormalize_logits"
).split()


def feed_back(cached: Cached, with_cache: bool) -> Amend:
    """Let the call go on from an earlier one's output, with its cache or without."""

    def amend(call: Call) -> None:
        settings, first = cached.settings, {}
        arguments = {k: v for k, v in call.kwargs.items() if k in ("input_ids", "attention_mask")}
        # On both sides: a model's first call may draw random numbers (BigBird then makes layers).
        for name, side in (("hfgen", ours), ("upstream", upstream)):
            first[name] = side(cached.case.family).generate(
                **arguments,
                max_new_tokens=settings["n_before"],
                eos_token_id=None,
                do_sample=False,
                return_dict_in_generate=True,
            )
        ids, cache = (first[settings["by"]][key] for key in ("sequences", CACHE))
        new = call.random_ids(cached.case.rows, settings["n_new"])
        ids = torch.cat([ids, new], dim=1)
        if with_cache:
            call.kwargs[CACHE] = cache
        if call.model.config.is_encoder_decoder:
            call.kwargs["decoder_input_ids"] = ids
            # Without a mask as long as the ids, upstream takes all of them for new ones.
            call.kwargs["decoder_attention_mask"] = torch.ones_like(ids)
            return
        added = torch.ones(len(ids), ids.shape[1] - call.ids.shape[1], dtype=torch.long)
        # Given, since one of the generated tokens may be that for pads.
        call.kwargs["attention_mask"] = torch.cat([call.mask, added], dim=1)
        is_cut = with_cache and settings["how"] == "new"
        call.kwargs["input_ids"] = ids[:, int(cache.get_seq_length()) :] if is_cut else ids

    return amend


def check_continued(cached: Cached) -> list[str] | None:
    """As upstream's; where upstream refuses a cache, as the call without it."""
    case = cached.case
    model, fed = ours(case.family), feed_back(cached, True)
    if families.keeps_other_state(model):  # of the last call that this copy of the model made
        return None
    if not is_expanded(case) and case.mode != ASSISTED:
        theirs = run(upstream(case.family), case, fed)
        return None if theirs.error else unlike(generated(theirs), generated(run(model, case, fed)))
    plain = run(model, case, feed_back(cached, False))
    if plain.error or not takes_back(cached):
        return None
    continued = run(model, case, fed)
    if continued.error:
        return [f"raised: {continued.error}: {continued.message[:200]}"]
    return unlike(generated(plain), generated(continued), tolerance_of(case))


def has_indexer(family: str) -> bool:
    """Whether a model attends to tokens that it chooses."""
    config = ours(family).config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    return any(
        hasattr(layer, "update_indexer") or hasattr(layer, "update_index") for layer in layers
    )


def takes_back(cached: Cached) -> bool:
    """Whether the model itself computes the same with its cache as without, given several tokens.

    Not with an indexer, whose choices of what to attend to change with the last digit.
    """
    if has_indexer(cached.case.family):
        return False
    kept = ("min_new_tokens", "max_new_tokens", "prefill_chunk_size", "outputs")
    options = {name: value for name, value in cached.case.options.items() if name in kept}
    case = replace(cached.case, mode=GREEDY, options=options)
    model = upstream(case.family)
    with_cache, without = (run(model, case, feed_back(cached, fed)) for fed in (True, False))
    both = (with_cache.returned, without.returned)
    return all(r is not None for r in both) and not compare(
        *(Outcome(returned=r.scores) for r in both), NEAR
    )


def generated(outcome: Outcome) -> Outcome:
    """Sequences without the prompt, which may have been given in part."""
    if outcome.error:
        return outcome
    fields, given = dict(outcome.returned), outcome.arguments
    prompt = given.get("decoder_input_ids", given["input_ids"])
    fields["sequences"] = fields["sequences"][:, prompt.shape[1] :]
    return replace(outcome, returned=fields)


# ---------------------------------------------------------------- calls in a row


def check_reused(cached: Cached) -> list[str] | None:
    """A static cache that stays with the model: each call as upstream's with one of its own."""
    family = cached.case.family
    if has_indexer(family) or family in (*LENGTH_COUNTS, "imagegpt"):
        return None  # the length of the cache changes choices, ImageGPT's for prompts of several tokens
    static = adding(cache_implementation="static")
    found = []
    hfgen.free_caches(ours(family))
    for turn, case in enumerate(cached.cases):
        theirs = run(upstream(case.family), case, static)
        if theirs.error:
            return None
        # What is returned is let go: who keeps a cache keeps its memory from later calls.
        mine = comparable(run(ours(case.family), case, static))
        if mine.error == "InvalidScoresError" and _has_nan(case):
            continue  # documented difference: upstream goes on with NaN scores
        tolerance = tolerance_of(case) if is_expanded(case) else TOLERANCE
        found += [f"call {turn}: {line}" for line in unlike(theirs, mine, tolerance)]
    return found


@dataclass(frozen=True)
class Prompts:
    """Related prompts: rows ``(length,)`` that share beginnings with one another."""

    rows: tuple[Tensor, ...]

    def enter(self, call: Call) -> None:
        """Left-padded to one length."""
        length = max(len(row) for row in self.rows)
        ids = torch.zeros(len(self.rows), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(self.rows):
            ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
        call.kwargs["input_ids"], call.kwargs["attention_mask"] = ids, mask


def related(rng: random.Random, known: list[Tensor], vocab: int, rows: int, pads: bool) -> Prompts:
    """Prompts that extend, cut or leave what is ``known``, and a beginning that all share."""
    made = []
    for _ in range(rows):
        base = rng.choice(known)
        kept = base[: rng.choice((len(base), rng.randint(0, len(base)), 6))][:24]
        new = torch.tensor([rng.randrange(5, vocab) for _ in range(rng.randint(0, 5))])
        row = torch.cat([kept, new.long()])
        made.append(row if len(row) > 0 else base)
    if not pads:  # the shortest says how long all are
        length = min(map(len, made))
        made = [row[:length] for row in made]
    return Prompts(tuple(made))


def check_prefix(cached: Cached) -> list[str] | None:
    """Each of several calls with related prompts: as without what was kept of those before."""
    model, rng = ours(cached.case.family), random.Random(cached.settings["seed"])
    vocab, pads = vocab_size(model), "padding" not in cached.family.unsupported
    prefixes = hfgen.PrefixCache(max_bytes=cached.settings["max_bytes"])
    known = [torch.tensor([rng.randrange(5, vocab) for _ in range(12)])]
    found = []
    for turn, case in enumerate(cached.cases):
        prompts = related(rng, known, vocab, case.rows, pads)
        plain = run(model, case, prompts.enter)
        if plain.error:
            return None
        mine = run(model, case, both(prompts.enter, adding(prefix_cache=prefixes)))
        found += [f"call {turn}: {line}" for line in unlike(plain, mine, tolerance_of(case))]
        known += [*prompts.rows, *_answers(plain, prompts)]
    return found


def _answers(outcome: Outcome, prompts: Prompts) -> list[Tensor]:
    """What the next turn of a chat begins with: prompt and answer, without pads."""
    ids = sequences(outcome)
    assert ids is not None
    n = len(ids) // len(prompts.rows)  # beams and samples: the first of each prompt
    length = max(len(row) for row in prompts.rows)
    return [full[length - len(row) :] for full, row in zip(ids[::n], prompts.rows, strict=True)]
