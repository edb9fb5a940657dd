"""Rows that join, leave and are trimmed in place: each gets what it gets alone, whatever its layers keep."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.batch import Batch
from hfgen.caches import growing
from hfgen.call import Request
from hfgen.loop import steps
from hfgen.prepare import prepare
from hfgen.strategies import Sample
from tests import SHIPPED, tiny
from tests.parity.decoder_families import DECODER_FAMILIES

DECODERS = {family.name: family for family in DECODER_FAMILIES}

#: One family for each way in which rows are remembered.
KINDS = {
    "full": "llama",
    "learned positions": "gpt2",
    "alibi": "bloom",
    "sliding": "mistral",
    "sliding and full": "gemma3_text",
    "chunked": "llama4_text",
    "keys of another layer": "gemma3n_text",
    "keys and values of different sizes": "deepseek_v3",
    "indexed": "deepseek_v32",
    "linear and full": "qwen3_next",
    "linear and indexed": "qwen4_exp_text",
    "linear beside full": "falcon_h1",
    "convolutions and full": "lfm2",
    "recurrent alone": "mamba2",
}
N_STEPS = 12


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def begun(model: Any, **inputs: Any) -> Batch:
    """The batch of a prompt after its first token."""
    options = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    run = prepare(model, Request(kwargs=inputs | options)).run(model)
    iterator = steps(run, Sample(run))
    next(iterator)
    iterator.close()
    return Batch(run.ids, dict(run.model_kwargs))


def decode(model: Any, batch: Batch) -> Tensor:
    """One greedy token for each row; the logits ``(rows, vocab)`` that it was chosen by."""
    inputs = model.prepare_inputs_for_generation(
        batch.ids, next_sequence_length=1, **batch.model_kwargs
    )
    outputs = model(**inputs, return_dict=True)
    logits = outputs.logits[:, -1]
    batch.model_kwargs = model._update_model_kwargs_for_generation(
        outputs, batch.model_kwargs, model.config.is_encoder_decoder
    )
    batch.ids = torch.cat([batch.ids, logits.argmax(-1)[:, None]], dim=1)
    return logits


@dataclass
class Alone:
    """A prompt, and what follows it when it is decoded alone."""

    model: Any
    inputs: dict[str, Tensor]
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        batch = begun(self.model, **self.inputs)
        self.logits = [decode(self.model, batch)[0] for _ in range(N_STEPS)]

    def batch(self) -> Batch:
        return begun(self.model, **self.inputs)


@dataclass
class Row:
    alone: Alone
    n_steps: int = 0


@dataclass
class Together:
    """Rows that join, leave and decode, each of which is compared with itself alone."""

    model: Any
    batch: Batch | None = None
    rows: list[Row] = field(default_factory=list)

    def join(self, prompts: list[Alone]) -> None:
        """Rows of a batch of one prompt each, or of several that have joined before."""
        others = [prompt.batch() for prompt in prompts]
        for other in others[1:]:
            others[0].append(other)
        if self.batch is None:
            self.batch = others[0]
        else:
            self.batch.append(others[0])
        self.rows += map(Row, prompts)

    def leave(self, row: int) -> None:
        if len(self.rows) == 1:
            self.batch, self.rows = None, []
            return
        assert self.batch is not None
        self.batch.leave(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def trim(self) -> None:
        if self.batch is not None:
            self.batch.trim(min(self.batch.padding))
            assert min(self.batch.padding) == 0

    def decode(self) -> None:
        if self.batch is None:
            return
        logits = decode(self.model, self.batch)
        for row, got in zip(self.rows, logits, strict=True):
            expected = row.alone.logits[row.n_steps]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
            assert got.argmax() == expected.argmax()
            row.n_steps += 1
        for index in reversed(range(len(self.rows))):
            if index < len(self.rows) and self.rows[index].n_steps == N_STEPS:
                self.leave(index)


def play(model: Any, prompts: list[Alone], seed: int, n_operations: int = 40) -> None:
    """Random operations, so that rows of all lengths meet."""
    rng, together = random.Random(seed), Together(model)
    for _ in range(n_operations):
        name = rng.choice(["join", "join", "leave", "trim", "decode", "decode", "decode"])
        if name == "join" and len(together.rows) < 6:
            together.join(rng.choices(prompts, k=rng.choice([1, 1, 1, 2])))
        elif name == "leave" and together.rows:
            together.leave(rng.randrange(len(together.rows)))
        elif name == "trim":
            together.trim()
        else:
            together.decode()


def prompts_of(model: Any, lengths: tuple[int, ...] = (1, 3, 4, 9, 17)) -> list[Alone]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 60, (1, n), generator=generator) for n in lengths]
    return [Alone(model, {"input_ids": each}) for each in ids]


def built(family: str) -> Any:
    build: Any = DECODERS[family].build
    if family == KINDS["indexed"]:
        # Of few heads, all scores of some tokens are zero, and ties are broken by column.
        build = dataclasses.replace(build, overrides=build.overrides | {"index_n_heads": 24})
    return hfgen.mix_into(build()).eval()


@pytest.mark.parametrize("concatenated", [0, SHIPPED], ids=["in place", "concatenated"])
@pytest.mark.parametrize("family", KINDS.values(), ids=list(KINDS))
def test_each_row_gets_what_it_gets_alone(
    family: str, concatenated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", concatenated)
    monkeypatch.setattr(growing, "SMALLEST_BLOCK", 4)
    if family not in DECODERS:
        pytest.skip("the installed transformers is too old for this family")
    model = built(family)
    prompts = prompts_of(model)
    for seed in range(3):
        play(model, prompts, seed)


def test_each_row_of_an_encoder_decoder_gets_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", 0)
    model = hfgen.mix_into(tiny.t5())
    prompts = prompts_of(model)
    for seed in range(3):
        play(model, prompts, seed)
