"""Random schedules: each request equals its solo call, whatever arrives, leaves and fails beside it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import hfgen
from hfgen.engine import Engine
from tests import exact, tiny
from tests.parity.family import Limit, text_prompt
from tests.parity.harness import FAMILIES, in_double, ours
from tests.parity.rows import CHOICES
from tests.schedules import Asked, Play, Schedule, Subject, Trouble

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, of tiny configs

#: How many times as many examples are tried: ``SCHEDULES=20 pytest tests/test_engine_schedules.py``.
MORE = int(os.environ.get("SCHEDULES", "1"))


def profile(n: int) -> Any:
    """Settings for ``n`` examples; with a ``seed``, the same in each run."""
    return settings(
        max_examples=n * MORE,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate] if os.environ.get("QUICK") else tuple(Phase),
    )


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "copies": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2},
    "beam sample": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "sampled lookup": {"prompt_lookup_num_tokens": 10, "do_sample": True},
    "memory": {"assistant_model": hfgen.SuffixMemory()},
    "sampled memory": {"assistant_model": hfgen.SuffixMemory(), "do_sample": True},
    "copies of memory": {
        "assistant_model": hfgen.SuffixMemory(),
        "do_sample": True,
        "num_return_sequences": 2,
    },
}
DRAFTING = [way for way in WAYS if "lookup" in way or "memory" in way]
#: What rules a way out.
OF_WAYS = {
    "copies": Limit.NUM_RETURN_SEQUENCES,
    "beams": Limit.BEAMS,
    "beam sample": Limit.BEAMS,
    **dict.fromkeys(DRAFTING, Limit.ASSISTED),
}
#: How a prompt is given; see ``schedules.arguments_of``.
FORMS = ("tensor", "list", "mask", "padded")
TROUBLE = ("cancel", "timeout", "processor", "criterion", "allowed")
#: Options of text and of outputs, beside those of ``CHOICES``.
OF_TEXT: dict[str, list[Any]] = {
    "stop_strings": [["a", "B"], "x", ["ab", "q", "7"]],
    "logprobs": [0, 2],
    "prompt_logprobs": [1],
    "grammar": [hfgen.grammar.regex("[a-f]{2,6}"), hfgen.grammar.choice(["yes", "no"])],
}


@st.composite
def requests(
    draw: Any,
    ways: list[str],
    names: list[str],
    has_text: bool,
    n_steps: int,
    forms: Sequence[str] = FORMS,
) -> Asked:
    """One request, with options and maybe with trouble."""
    options: dict[str, Any] = {
        "max_new_tokens": draw(st.sampled_from([14, 9, 5, 2, 1])),
        "eos_token_id": draw(st.sampled_from([2, None, [2, *range(10, 30)]])),
        "seed": draw(st.integers(0, 5)),
        **WAYS[draw(st.sampled_from(ways))],
    }
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        options.setdefault(name, draw(st.sampled_from(CHOICES[name])))
    if has_text:
        for name in draw(st.lists(st.sampled_from(sorted(OF_TEXT)), max_size=2, unique=True)):
            options[name] = draw(st.sampled_from(OF_TEXT[name]))
    trouble = st.builds(Trouble, st.sampled_from(TROUBLE), st.sampled_from([1, 2, 3, 5, 8]))
    return Asked(
        at=draw(st.integers(0, n_steps)),
        length=draw(st.sampled_from([1, 2, 4, 7, 12, 19])),
        seed=draw(st.integers(0, 3)),
        options={"pad_token_id": 0, **options},
        form=draw(st.sampled_from(forms)),
        trouble=draw(st.none() | trouble),
        priority=draw(st.integers(0, 2)),
    )


@st.composite
def schedules(draw: Any, asked: Any, most: int, n_bytes: int) -> Schedule:
    """Up to ``most`` requests, and an engine of any size; ``n_bytes``: of a request that is long."""
    engine = {
        "max_rows": draw(st.sampled_from([32, 8, 5, 2])),
        "prefill_tokens": draw(st.sampled_from([2048, 8, 3, 1])),
        "policy": draw(st.sampled_from(["fcfs", "srpt", "priority"])),
        "optimistic": draw(st.booleans()),
    }
    # Bytes for one to three requests of the longest kind, by a guess that is refined by the engine.
    if n_bytes and draw(st.booleans()):
        engine["memory"] = n_bytes * draw(st.sampled_from([3, 5, 8]))
    failing = draw(st.frozensets(st.integers(1, 30), max_size=2)) if draw(st.booleans()) else ()
    return Schedule(
        tuple(draw(st.lists(asked, min_size=most // 2, max_size=most))),
        engine,
        has_prefix_cache=draw(st.booleans()),
        splits=draw(st.booleans()),
        failing=frozenset(failing),
        squeezed=draw(st.frozensets(st.integers(1, 30), max_size=4)),
    )


NAMES = sorted(CHOICES.keys() - {"max_new_tokens", "eos_token_id"})


@cache
def exact_subject() -> Subject:
    model = exact.model()
    # What the model says by itself: prompts of one seed begin alike, and go on as requests do.
    said = [
        model.generate(tiny.prompt(1, 1, i), max_new_tokens=20, eos_token_id=None) for i in range(4)
    ]
    return Subject(
        model,
        lambda length, seed: {"input_ids": said[seed][:, :length]},
        tiny.ascii_tokenizer(),
        {"dry_sequence_breakers": []},
    )


#: Families that compute a part in float32, whatever the weights are.
ONLY_SINGLE = ("deepseek_v2", "deepseek_v3", "jamba", "qwen3_next")


def subject_of(name: str, options: dict[str, Any]) -> Subject:
    """A tiny model of the family, in float64: rounding decides nothing."""
    family = FAMILIES[name]
    dtype = torch.float32 if name in ONLY_SINGLE else torch.float64
    model = ours(name) if name in ONLY_SINGLE else in_double(name)

    def inputs(length: int, seed: int) -> dict[str, Any]:
        given = {
            n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in family.inputs(model, 1, False, seed).items()
        }
        if set(given) <= {"input_ids", "attention_mask"}:
            return text_prompt(60, 1, False, seed, length)
        if family.kind == "vision" and seed % 2:  # text alone
            return text_prompt(60, 1, False, seed, length)
        return given

    return Subject(model, inputs, None, {"dry_sequence_breakers": []} | options)


#: Families of every kind of state that rows have.
FAMILIES_OF_KINDS = {
    "full": "llama gpt2 bloom",
    "a window": "mistral gemma3_text",
    "chunks": "llama4_text",
    "latent": "deepseek_v2 deepseek_v3",
    "recurrent": "mamba mamba2 falcon_mamba",
    "hybrid": "falcon_h1 bamba jamba lfm2 qwen3_next",
    "encoder-decoder": "t5 bart_seq2seq",
    "images": "llava qwen2_vl gemma3",
}
#: The model of each subject, and what all of its calls get.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for names in FAMILIES_OF_KINDS.values() for name in names.split()
} | {
    "quantized": ("llama", {"cache_implementation": "quantized"}),
    "offloaded": ("llama", {"cache_implementation": "offloaded"}),
}


def bytes_of(subject: Subject) -> int:
    """Of a row of 24 tokens, as an engine measures it; 0 if it cannot tell before the first request."""
    return int(Engine(subject.model).steps.memory.needed(1, 24))


def crowded(n_bytes: int) -> Schedule:
    """More requests than there is memory for, some of whose rows are taken out and come back."""
    own = {"pad_token_id": 0, "eos_token_id": None, "seed": 1, "max_new_tokens": 14}
    ways = ({}, {"do_sample": True}, {}, {"num_return_sequences": 2, "do_sample": True}, {}, {})
    asked = [Asked(i // 2, 2 + 3 * i, i % 4, own | way) for i, way in enumerate(ways)]
    engine = {"max_rows": 8, "prefill_tokens": 8, "optimistic": True}
    return Schedule(
        tuple(asked), engine | ({"memory": 4 * n_bytes} if n_bytes else {}), splits=True
    )


def cancelled_in_prefill() -> Schedule:
    """A prompt that takes 19 steps to prefill, cancelled in its third, beside a request that goes on."""
    own = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 9}
    asked = (Asked(0, 2, 1, own), Asked(0, 19, 2, own, trouble=Trouble("cancel", 3)))
    return Schedule(asked, {"max_rows": 8, "prefill_tokens": 1})


def for_two_rows() -> Schedule:
    """A request that its grammar ends, and one of three beams, for which there are too few rows."""
    own = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 9}
    grammar = {"grammar": hfgen.grammar.choice(["yes", "no"])}
    asked = (Asked(0, 4, 1, own | grammar), Asked(0, 4, 2, own | {"num_beams": 3}))
    return Schedule(asked, {"max_rows": 2, "prefill_tokens": 8})


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_of_every_kind_of_state(kind: str) -> None:
    name, options = KINDS[kind]
    unsupported = FAMILIES[name].unsupported
    ways = [way for way in WAYS if OF_WAYS.get(way) not in unsupported]
    subject = subject_of(name, options)
    # In float64, eager attention makes NaN of padding: it takes the softmax of its mask in float32.
    forms = FORMS if name in ONLY_SINGLE else FORMS[:-1]
    counts: Counter[str] = Counter()

    @seed(1)
    @profile(3)
    @given(schedules(requests(ways, NAMES, False, 6, forms), 5, bytes_of(subject)))
    def check(schedule: Schedule) -> None:
        counts.update(Play(subject, schedule).run())

    check()
    counts.update(Play(subject, crowded(bytes_of(subject))).run())
    assert counts["equal"] >= 6


#: What has to come to pass in the schedules, so that they prove something.
SEEN = (
    *("equal", "eos", "length", "stop", "grammar", "does not fit"),
    *("cancel while waiting", "cancel while prefill", "cancel while decoding"),
    "cancel while done",
    *("cancelled", "timed out", "Planned", "requests of failed forwards"),
    *("beginnings with tokens", "batches side by side", "taken out"),
)


def test_random_schedules_of_a_model_that_computes_exactly() -> None:
    counts: Counter[str] = Counter()
    asked = requests(list(WAYS), NAMES, True, 8)

    def check(schedule: Schedule) -> None:
        counts.update(Play(exact_subject(), schedule).run())

    for schedule in (crowded(bytes_of(exact_subject())), cancelled_in_prefill(), for_two_rows()):
        counts.update(Play(exact_subject(), schedule).run())
    for part in range(6):  # one seed's examples are much alike
        drawn = schedules(asked, 8, bytes_of(exact_subject()))
        seed(part)(profile(12)(given(drawn)(check)))()
        if part and all(counts[name] for name in SEEN):
            break
    assert [name for name in SEEN if not counts[name]] == []
