"""Each option alone on a few families, and every family in every mode, against upstream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.parity.family import Family
from tests.parity.harness import ALL_FAMILIES, FAMILIES, Case, check, settle
from tests.parity.options import ASSISTED, OPTIONS, Option, usable_modes

#: Families on which options are tried: one for each way of keeping or placing tokens.
REPRESENTATIVES = (
    "llama",  # rotary positions
    "gpt2",  # learned positions
    "gemma3_text",  # sliding windows between full layers
    "deepseek_v3",  # latent attention, experts
    "qwen3_next",  # linear attention between full layers
    "t5",  # relative positions, an encoder
    "bart",  # learned positions, an encoder
    "whisper",  # speech
    "qwen2_vl",  # images, positions of three dimensions
    "bare_module",  # no PreTrainedModel
    "wrapper",  # no module, around one
    "session",  # no module, a cache of tuples
)

#: What an option needs beside it to be seen at work.
COMPANIONS: dict[str, dict[str, object]] = {
    "exponential_decay_length_penalty": {"eos_token_id": list(range(5, 17))},
    "negative_prompt": {"guidance_scale": 1.5},
    "max_cache_len": {"cache_implementation": "static"},
    "min_length": {"eos_token_id": list(range(5, 17))},
    "min_new_tokens": {"eos_token_id": list(range(5, 17))},
    "pad_token_id": {"eos_token_id": list(range(8, 60, 4))},
    "early_stopping": {"eos_token_id": list(range(8, 60, 4)), "num_beams": 3},
    "length_penalty": {"eos_token_id": list(range(8, 60, 4)), "num_beams": 3},
    "renormalize_logits": {"outputs": ["scores"], "suppress_tokens": [10, 11, 12]},
}


def singles(option: Option, family: Family) -> Iterator[Case]:
    """One option alone: each of its values and each mode at least once, prompts in turns."""
    modes = [mode for mode in usable_modes(family) if option.fits(family, mode)]
    turns = range(max(len(modes), len(option.values)))
    prompts = cycle([(2, "padding" not in family.unsupported), (1, False), (3, False)])
    for turn, mode, value, (rows, padded) in zip(
        turns, cycle(modes), cycle(option.values), prompts
    ):
        if mode == ASSISTED:
            rows, padded = 1, False
        options = {**COMPANIONS.get(option.name, {}), option.name: value}
        case = settle(Case(family.name, mode, rows, padded, turn, options))
        if option.name in case.options:
            yield case


#: How many of these each option is tried on, in turns; `make parity` draws from all families.
N_FAMILIES = 4

SINGLES = [
    pytest.param(option, FAMILIES[name], id=f"{option.name}-{name}")
    for place, name in enumerate(REPRESENTATIVES)
    for turn, option in enumerate(OPTIONS)
    if (place - 2 * turn) % len(REPRESENTATIVES) < N_FAMILIES
    and any(option.fits(FAMILIES[name], mode) for mode in usable_modes(FAMILIES[name]))
]


@pytest.mark.parametrize(("option", "family"), SINGLES)
def test_option(option: Option, family: Family) -> None:
    reports = [check(case) for case in singles(option, family)]
    failed = [str(report) for report in reports if report.differences]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_family(family: Family) -> None:
    """All outputs of a batch with several EOS ids in each mode, and the bare tokens of one prompt in one of them."""
    failed = []
    modes = usable_modes(family)
    bare = modes[list(FAMILIES).index(family.name) % len(modes)]
    for mode in modes:
        rows = 1 if mode == ASSISTED else 2
        padded = rows > 1 and "padding" not in family.unsupported
        recorded = {
            "outputs": ["scores", "logits"],
            "hidden_states": ["hidden_states"],
            "attentions": ["attentions"],
            "eos_token_id": list(range(8, 60, 4)),
            "streamer": True,
        }
        cases = [Case(family.name, mode, rows, padded, 1, recorded)]
        if mode == bare:
            cases.append(Case(family.name, mode, 1, False, 2, {}))
        for case in cases:
            report = check(settle(case))
            failed += [str(report)] if report.differences else []
    assert not failed, "\n".join(failed)


def test_there_are_enough_families() -> None:
    assert len(FAMILIES) == len(ALL_FAMILIES), "a name is used twice"
    assert len(FAMILIES) >= 70
