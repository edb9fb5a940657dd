"""Compare speculation with plain decoding, row for row: ``python -m tests.parity.speculation``.

Every case is a greedy call of the parity sweep, any family, batch and options, once as it is and once
with a drafter: tokens, scores, logits, attentions, hidden states and cache have to be the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfgen.decoding.drafters.base import Acceptance, Draft, DraftContext, Drafter
from hfgen.decoding.drafters.memory import SuffixMemory
from hfgen.families import CACHE
from hfgen.memory.caches.growing import padded
from hfgen.memory.caches.layers import decoder_cache
from tests.parity.family import Limit
from tests.parity.harness import (
    DOUBLE_TOLERANCE,
    FAMILIES,
    Case,
    Outcome,
    as_double,
    compare,
    draw_case,
    forget_models,
    in_double,
    ours,
    run,
    sequences,
)
from tests.parity.options import GREEDY, SAMPLE, Call, vocab_size
from tests.versions import IS_5_24


class Oracle(Drafter):
    """Drafts the true continuation, with errors and gaps at random: every pattern of acceptance."""

    def __init__(self, truth: Tensor, vocab: int, seed: int) -> None:
        self.truth, self.vocab = truth, vocab
        self.rng = random.Random(seed)
        self.error_rate = self.rng.choice((0.0, 0.2, 0.5, 1.0))
        self.verdicts: list[Acceptance] = []

    def draft(self, context: DraftContext) -> Draft | None:
        rows, length = self.truth.shape
        tokens = torch.full((rows, context.n_tokens), -1)
        for row in range(rows):
            last = self.rng.choice((context.end, context.end, self.rng.randint(0, context.end)))
            for position in range(context.start, min(length, last)):
                is_wrong = self.rng.random() < self.error_rate
                token = self.rng.randrange(5, self.vocab) if is_wrong else self.truth[row, position]
                tokens[row, position - context.start] = token
        return Draft(tokens)

    def observe(self, verdict: Acceptance) -> None:
        self.verdicts.append(verdict)


@dataclass(frozen=True)
class Speculated:
    """A greedy case, and how it is drafted for: ``drafter`` is a key of ``DRAFTERS``."""

    case: Case
    drafter: str


def _oracle(call: Call, plain: Outcome) -> None:
    truth = sequences(plain)
    assert truth is not None
    call.kwargs["assistant_model"] = Oracle(truth, vocab_size(call.model), call.case.seed)
    call.kwargs["num_assistant_tokens"] = 1 + call.case.seed % 6


def _lookup(call: Call, plain: Outcome) -> None:
    call.kwargs["prompt_lookup_num_tokens"] = 1 + call.case.seed % 5


def _assistant(call: Call, plain: Outcome) -> None:
    call.kwargs["assistant_model"] = call.assistant()


def _memory(call: Call, plain: Outcome) -> None:
    """A memory that has seen the true continuation, or one with errors."""
    truth, rng = sequences(plain), random.Random(call.case.seed)
    assert truth is not None
    memory = SuffixMemory(2**20)
    for row in truth.tolist():
        memory.add(
            [t if rng.random() < 0.9 else rng.randrange(vocab_size(call.model)) for t in row]
        )
    call.kwargs["assistant_model"] = memory


def _early_exit(call: Call, plain: Outcome) -> None:
    call.kwargs["assistant_early_exit"] = 1


#: How each drafter enters a call.
DRAFTERS: dict[str, Callable[[Call, Outcome], None]] = {
    "oracle": _oracle,
    "lookup": _lookup,
    "assistant": _assistant,
    "memory": _memory,
    "early exit": _early_exit,
}

#: Options that have nothing to do with this, or that ask for something else.
LEFT_OUT = ("streamer", "use_cache", "config_object", "invalid", "default_length", "ignored_output")


#: Several positions at once take other kernels than one: floats may differ by this much.
TOLERANCE = 1e-4

#: Families that amplify such differences: their tokens are compared.
UNSTEADY = ("hrm_text",)


def is_sampled(case: Case) -> bool:
    """Whether tokens are drawn: Whisper's own ``generate`` does so at any temperature above 0."""
    return case.mode == SAMPLE or (case.family == "whisper" and "temperature" in case.options)


def has_padding(case: Case) -> bool:
    """Whether tokens of the prompt are masked, also those that upstream takes for pads.

    A masked position may attend to nothing: it then takes the mean over all keys, also later ones.
    """
    model = ours(case.family)
    ids = FAMILIES[case.family].inputs(model, case.rows, case.padded, case.seed).get("input_ids")
    if case.padded or ids is None or model.config.is_encoder_decoder:
        return case.padded
    pad = case.options.get("pad_token_id")
    is_found = pad is not None and bool((ids == pad).any())
    return is_found and case.options.get("mask") != "ones"


#: Models whose forward answers otherwise if it gets several tokens at once, and when.
LIMITS: dict[str, Callable[[Case], bool]] = {
    # with a cache there is no causal mask
    "fsmt": lambda case: True,
    # masks of its own, cut by the length of the keys
    "gpt_neo": lambda case: is_static(case),
    "nllb_moe": lambda case: is_static(case),
    "imagegpt": lambda case: is_static(case),
    # it attends to all keys of a static cache, those of refused drafts included
    "led": lambda case: is_static(case),
    # a query's blocks of keys are counted from its position without padding: one that holds padding
    # alone leaves it the mean over all keys, and keys of padding, which are such means, choose others
    "minimax_m3_vl_text": has_padding,
    # its layers that read the protein take the mask of all tokens for that of the queries
    "evolla": has_padding,
    # its cache takes what is drafted with the prompt for a part of the prompt, which no window ends
    "unlimited_ocr": lambda case: True,
    # another model runs for every token
    "moshi_speech": lambda case: True,
    # sound comes in with the tokens, through layers with a memory of their own
    "voxtral_realtime": lambda case: True,
}

#: Families that cannot draft with their first layers, and why. The call has to say so.
NO_EARLY_EXIT = {
    name: reason
    for reason, names in {
        "its decoder has no list of as many layers as its config says": (
            "fsmt hrm_text longcat_flash modernbert-decoder"
        ),
        "its last layers have no keys of their own": "gemma3n_text gemma4_text"
        + " gemma4_unified_text" * IS_5_24,
        "it runs as many layers as another config says": "git",
        "its layers are run several times": "dory dory_last_loop inkling2_loop_text",
        "its first layers are convolutions, which know no length": "lfm2 lfm2_moe lfm2_vl lfm3",
    }.items()
    for name in names.split()
}


#: Families with a static cache of a kind of their own. The call has to say that it cannot be rolled back.
OWN_STATIC_CACHE = ("minimax_m3_vl_text",)


def left_out(speculated: Speculated) -> str | None:
    """Why a case cannot be speculated for, if so."""
    case, drafter = speculated.case, speculated.drafter
    family, model = FAMILIES[case.family], ours(case.family)
    if LIMITS.get(case.family, lambda case: False)(case):
        return "several tokens at once are answered otherwise"
    if model._is_stateful:
        return "a state that cannot be rolled back"
    if GREEDY not in family.modes:
        return "no greedy decoding"
    limits = [Limit.NO_CACHE, Limit.ASSISTED] + [Limit.ASSISTANT] * (drafter == "assistant")
    reason = next(
        (family.unsupported[limit] for limit in limits if limit in family.unsupported), None
    )
    if reason is None and not model._supports_default_dynamic_cache():
        return "no cache that can be rolled back"
    return reason


def draw(
    seed: int, count: int, families: Sequence[str] = (), mode: str = GREEDY
) -> list[Speculated]:
    rng = random.Random(seed)
    drawn: list[Speculated] = []
    while len(drawn) < count:
        case = draw_case(rng, families)
        case = case.without(*LEFT_OUT)
        if case.mode == mode:
            drawn.append(Speculated(case, rng.choice(["oracle", *DRAFTERS])))
    return sorted(drawn, key=lambda speculated: speculated.case.family)


def check(speculated: Speculated) -> list[str] | str:
    """Differences between plain and speculative decoding; or why there is nothing to compare."""
    case, enter = speculated.case, DRAFTERS[speculated.drafter]
    if reason := left_out(speculated):
        return reason
    model = ours(case.family)
    if case.family in UNSTEADY:
        case = case.without("outputs", "attentions", "hidden_states")
    if hides_states(case):
        case = case.without("attentions", "hidden_states")
    plain = run(model, case)
    if plain.error is not None or sequences(plain) is None:
        return "the plain call raises"
    drafted = run(model, case, amend=lambda call: enter(call, plain))
    if speculated.drafter == "early exit" and (reason := NO_EARLY_EXIT.get(case.family)):
        is_refused = "assistant_early_exit" in drafted.message
        n_new = case.options.get("max_new_tokens", case.options.get("max_length"))
        is_drafting = n_new not in (0, 1)  # else nothing is drafted
        return reason if is_refused or not is_drafting else [f"should be refused: {reason}"]
    if is_static(case) and case.family in OWN_STATIC_CACHE:
        reason = "a static cache of its own kind cannot be rolled back"
        says_so = "static cache of its own kind" in drafted.message
        return reason if says_so else [f"should be refused: {reason}"]
    if is_sampled(case):
        again = run(model, case, amend=lambda call: enter(call, plain))
        is_same = str(sequences(drafted)) == str(sequences(again))
        wrong = drafted.error is not None or not is_same
        return [f"one seed: {drafted.message}, {sequences(drafted)}, {sequences(again)}"] * wrong
    expected, ids = sequences(plain), sequences(drafted)
    found = differences(case, plain, drafted, TOLERANCE)
    if found and drafted.error is None and torch.equal(expected, ids):
        return differences_in_double(case, enter, expected) and found
    return found


def is_static(case: Case) -> bool:
    return "static" in (case.options.get("cache_implementation"), case.options.get("user_cache"))


def hides_states(case: Case) -> bool:
    """Whether states are not compared: those at padding, and those that static caches took back.

    The former depend on what else is forwarded; the latter stay behind the end of the cache.
    """
    return is_static(case) or has_padding(case)


def differences(case: Case, plain: Outcome, drafted: Outcome, tolerance: float) -> list[str]:
    """How what is returned differs; if the drafted call raised, what it raised."""
    if drafted.error is None:
        for outcome in (plain, drafted):  # an assistant warns for itself
            outcome.warned, outcome.logged, outcome.arguments = [], [], {}
            outcome.model_config, outcome.random_state = {}, None
            fill_convolutions(outcome)
            if hides_states(case) and not isinstance(outcome.returned, Tensor):
                outcome.returned = {
                    name: value for name, value in outcome.returned.items() if name != CACHE
                }
    return compare(plain, drafted, tolerance)


def fill_convolutions(outcome: Outcome) -> None:
    """Put zeros before the states of a text that is shorter than a convolution's kernel.

    With drafts, transformers keeps the columns of the text alone. Its convolution pads them with zeros.
    """
    cache = getattr(outcome.returned, CACHE, None)
    for layer in getattr(decoder_cache(cache), "layers", []):
        for index, states in getattr(layer, "conv_states", {}).items():
            if states is not None and (width := layer.conv_kernel_size[index]):
                layer.conv_states[index] = padded(states, -1, width)


def differences_in_double(
    case: Case, enter: Callable[[Call, Outcome], None], expected: Tensor
) -> list[str]:
    """Differences of the same two calls in float64, where the plain one has to give ``expected``."""
    model = in_double(case.family)
    plain = run(model, case, amend=as_double)
    if plain.error is not None:
        return [f"in float64: {plain.error}: {plain.message}"]
    if not torch.equal(sequences(plain), expected):
        return ["in float64 the plain call gives other tokens"]

    def amend(call: Call) -> None:
        as_double(call)
        enter(call, plain)

    return differences(case, plain, run(model, case, amend=amend), DOUBLE_TOLERANCE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.speculation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument(
        "--family", action="append", default=[], choices=sorted(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--sampled", action="store_true", help="one seed has to fix the samples")
    options = parser.parse_args(arguments)
    mode = SAMPLE if options.sampled else GREEDY
    counts: Counter[str] = Counter()
    family = None
    for speculated in draw(options.seed, options.count, options.family, mode):
        if speculated.case.family != family:
            forget_models()
            family = speculated.case.family
        found = check(speculated)
        if isinstance(found, str):
            counts[f"left out ({found})"] += 1
            continue
        counts["differ" if found else "equal"] += 1
        for line in found:
            print(f"  {line}")
        if found:
            print(speculated.drafter, speculated.case)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
