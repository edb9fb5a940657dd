"""What a step of the engine asks of an accelerator: how often it waits for one, and what it copies there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfgen
from hfgen.engine import Engine
from tests import tiny
from tests.drafting_models import whisper
from tests.simulated_accelerator import Accelerator, on_device, to_device, to_host

EOS = 3
N_REQUESTS = 8
SEEDED = {"do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 10}


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(whisper(tiny.llama(), 0.3))


@pytest.fixture(scope="module")
def device_model(model: nn.Module) -> Any:
    return on_device(model)


def prompt(i: int) -> torch.Tensor:
    return (torch.arange(5 + i)[None] * 7) % 50 + 5


@pytest.mark.parametrize(
    ("options", "n_reads"),
    [
        ([{}], 1),
        ([{"do_sample": True, "seed": 3}], 1),
        ([{}, SEEDED], 1),
        ([{"stop_token_ids": [EOS]}, {"repetition_penalty": 1.2}], 1),
        ([{}, SEEDED, {"no_repeat_ngram_size": 2, "do_sample": True, "seed": 1}], 1),
        ([{"logprobs": 2}], 3),  # two for what was measured
        ([{"logprobs": 2}, {}, {"logprobs": 1, "do_sample": True, "seed": 1}], 5),
        ([{"do_sample": True, "seed": 1, "num_return_sequences": 2}], 1),
        # Each request by itself: whether it has ended, and its tokens.
        ([{"num_beams": 2}], N_REQUESTS * 4 + 1),
    ],
    ids=[
        *("greedy", "seeded", "mixed", "penalties", "n-grams beside others"),
        *("log-probabilities", "log-probabilities of some", "several sequences", "beams"),
    ],
)
def test_reads_and_copies_per_step(
    model: nn.Module, device_model: nn.Module, options: list[dict[str, Any]], n_reads: int
) -> None:
    """Plain rows are read together, once a step, and nothing is copied there while nobody joins or leaves."""
    asked = [
        {"max_new_tokens": 14, "eos_token_id": EOS, "pad_token_id": 0, "min_new_tokens": 14}
        | options[i % len(options)]
        for i in range(N_REQUESTS)
    ]
    with Accelerator() as accelerator:
        engine = Engine(device_model, memory=1e9, max_rows=2 * N_REQUESTS)
        requests = [engine.add(to_device(prompt(i)), **option) for i, option in enumerate(asked)]
        while any(request.state != "decoding" for request in requests):
            engine.step()
        engine.step()  # the first with these rows
        for _ in range(4):
            before = len(accelerator.events)
            engine.step()
            # A mask over padding is looked at by transformers, once a forward.
            reads = [
                event
                for event in accelerator.of_kind("read", before)
                if not event.where.startswith("transformers/")
            ]
            assert len(reads) <= n_reads, [*map(str, reads)]
            copies = accelerator.of_kind("copy", before)
            assert copies == [], [*map(str, copies)]
        outputs = [request.result() for request in requests]
    for i, (output, option) in enumerate(zip(outputs, asked, strict=True)):
        assert output.error is None
        solo = model.generate(prompt(i), return_dict_in_generate=True, **option)  # type: ignore[operator]
        assert to_host(output.generate_output.sequences).equal(solo.sequences)
