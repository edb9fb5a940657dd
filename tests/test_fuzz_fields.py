"""Bad values for every field of the config, and bad prompts: each works, or is refused at once.

Refused means: an exception before the first forward of the model or of its encoder, and its message
names the argument. ``HFGEN_FUZZ=20000 pytest tests/test_fuzz_fields.py -k pairs`` tries as many
random pairs of bad values; 400 by default. With it, ``-k field`` tries every value with both models.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hfgen
from hfgen.settings.fields import FIELDS
from tests import tiny

ROWS, LENGTH = 2, 5
SECONDS = 5.0  # a call takes a hundredth of that
INF, NAN = float("inf"), float("nan")

#: Of every kind some that are fine for one field or another, and bad for the rest.
VALUES: tuple[Any, ...] = (
    *("", "x", "2", "dflsh", b"x", True, False),
    *(0, 1, 3, -1, 97, 400, 10**12, -(10**12), 10**400),
    *(1.0, 2.5, NAN, INF, -INF),
    *([], [[]], [[1]], [3], [None], [True], [97], [[97]], [-1], [[-1]], [[[97], 2.0]], ["x"]),
    *((), (2,), (1, "x"), (3, 1.5)),
    *({}, {3: 2}, {(3,): "a"}, {(97,): 1.0}, {"x": 1}),
    torch.tensor([1, 2]),
    torch.tensor([[1.5]]),
    torch.tensor([]),
    torch.tensor(2),
    torch.ones(2, 2, 2),
    object,
    *("\ud800", ["a", ""], "a" * 3000, {"kind": "x"}, {"type": "foo"}, "(", ["a*"]),
    *(frozenset({1}), range(3), [1.5], [[1], [2, [3]]], [0] * 2000, [10**30]),
    *(np.array([1, 2]), np.int64(3), np.float32(0.5), Decimal("0.5"), 1 + 2j, 2**63, 1e-320),
    *({(1,): NAN}, {(): 1.0}, torch.tensor(True), torch.tensor(NAN), slice(1)),
    *([2, 3], [0.5, 0.7], ["a", "b"], [None, None], [1, "x"], [[2], [3]], [True, None]),
    {"max_pattern_size": 2, "min_count": "a"},
)

#: Tried in turn, one per value: together with the field, the mode decides what is looked at.
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 2},
    {"penalty_alpha": 0.6, "top_k": 3},
)

IDS = tiny.prompt(ROWS, LENGTH)
ONES = torch.ones_like(IDS)
OUTSIDE, NEGATIVE = IDS.clone(), IDS.clone()
OUTSIDE[1, 2], NEGATIVE[0, 0] = tiny.VOCAB, -1

#: What may be given as ids, as a mask, as positions.
TENSORS: tuple[Any, ...] = (
    *(OUTSIDE, NEGATIVE, IDS[0], IDS[None], torch.tensor(3), IDS[:, :0], IDS[:0], IDS[:1]),
    *(IDS.float(), IDS > 9, IDS.to(torch.int8), IDS.short(), IDS.to(torch.uint8), IDS.int()),
    *(ONES, ONES[:, 1:], ONES[0], ONES[:, None], ONES.bool(), ONES * NAN, ONES * 0),
    *(torch.arange(LENGTH), torch.arange(LENGTH - 1)[None], torch.arange(9)[None], -ONES),
    *("hello", ["hello"], IDS.tolist(), {"input_ids": IDS}, 3, 2.5, [], None),
    torch.rand(ROWS, LENGTH, 32),
    torch.rand(ROWS, LENGTH, 31),
    torch.rand(LENGTH, 32),
)

PROMPTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)


FAMILIES = ("llama", "gpt2", "t5", "bart")


class TooSlow(BaseException):
    """Not an ``Exception``, so that nothing on the way handles it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(10 * seconds, exit=True)  # where no signal gets through
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Caller:
    """A mixed model, called with bad arguments; it counts forwards, also those of its encoder."""

    def __init__(self, family: str) -> None:
        self.model = hfgen.mix_into(getattr(tiny, family)())
        self.forwards = 0
        start = 1 if self.model.config.is_encoder_decoder else LENGTH
        self.end = start + 2
        self.model.register_forward_pre_hook(self._count)
        if self.model.config.is_encoder_decoder:
            self.model.get_encoder().register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _is_long(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.end)

    def __call__(self, names: tuple[str, ...], **arguments: Any) -> str | None:
        """What is wrong with how the call ended; the message has to have one of ``names``."""
        self.forwards = 0
        torch.manual_seed(0)
        try:
            with limit(SECONDS):
                self.model.generate(
                    **{"max_new_tokens": 2} | arguments, stopping_criteria=[self._is_long]
                )
        except TooSlow:
            return "took too long"
        except Exception as error:
            if self.forwards:
                return f"failed after {self.forwards} forwards: {error!r}"
            if not any(name in str(error) for name in names):
                return f"named nothing: {error!r}"
            if not isinstance(error, ValueError | TypeError | IndexError):
                return f"is of another class: {error!r}"
        return None


@cache
def caller(family: str) -> Caller:
    return Caller(family)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(level)


def _report(failures: list[str], n_calls: int, least: int) -> None:
    assert n_calls >= least
    assert not failures, f"{len(failures)} of {n_calls}:\n" + "\n".join(failures[:40])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIELDS)
def test_field(name: str) -> None:
    """A third of the values with each model."""
    failures, n_calls = [], 0
    texts: tuple[dict[str, Any], ...] = ({}, {"tokenizer": tiny.ascii_tokenizer()})
    callers = caller("llama"), caller("t5")
    for n, value in enumerate(VALUES, [*FIELDS].index(name)):
        mode = MODES[n % len(MODES)] | texts[n // len(MODES) % 2]
        for call in callers if "HFGEN_FUZZ" in os.environ else callers[n % 3 : n % 3 + 1]:
            n_calls += 1
            if wrong := call((name,), input_ids=IDS, **mode | {name: value}):
                failures.append(f"{mode} {str(value)[:40]}: {wrong}")
    _report(failures, n_calls, len(VALUES) // 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt(family: str, name: str) -> None:
    failures = []
    given: dict[str, Any] = {"guidance_scale": 2.0} if "negative" in name else {}
    given |= {} if name in ("input_ids", "inputs_embeds") else {"input_ids": IDS}
    given |= {"negative_prompt_ids": IDS} if "negative" in name else {}
    given |= {"decoder_input_ids": IDS} if name == "decoder_attention_mask" else {}
    for n, tensor in enumerate(TENSORS):
        mode = MODES[n % 3]
        if wrong := caller(family)((name, *given, "input_ids"), **given | mode | {name: tensor}):
            failures.append(f"{mode} {str(tensor)[:60]}: {wrong}")
    _report(failures, len(TENSORS), 30)


@pytest.mark.filterwarnings("ignore")
def test_pairs_of_fields() -> None:
    n_calls = int(os.environ.get("HFGEN_FUZZ", "400"))
    choose, failures = random.Random(0), []
    for _ in range(n_calls):
        first, second = choose.sample(list(FIELDS), 2)
        fields = {first: choose.choice(VALUES), second: choose.choice(VALUES)}
        mode = choose.choice(MODES)
        names = (first, second, *mode)
        if wrong := caller(choose.choice(FAMILIES))(names, input_ids=IDS, **mode | fields):
            failures.append(f"{mode} {str(fields)[:90]}: {wrong}")
    _report(failures, n_calls, n_calls)
