"""Random calls with random controls: a stream says what ``generate()`` returns, to the last field."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import hfgen
from tests import tiny
from tests.test_stream import EOS, rows_of
from tests.test_stream_text import texts_of

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"num_beams": 2},
    {"num_beams": 3, "do_sample": True},
    {"prompt_lookup_num_tokens": 3},
    {"prompt_lookup_num_tokens": 3, "do_sample": True},
    {"penalty_alpha": 0.5, "top_k": 3},
    {"dola_layers": "low"},
)


def draw(rng: random.Random, rows: int) -> dict[str, Any]:
    """Options of a call; some of them exclude each other."""

    def each(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(rows)]

    maybe: dict[str, Any] = {
        "eos_token_id": rng.choice([EOS, EOS, None]),
        "num_return_sequences": 2,
        "drop_finished": True,
        "cache_implementation": rng.choice(["static", "quantized", "offloaded"]),
        "logprobs": rng.choice([0, 3]),
        "seed": rng.choice([5, each(0, 9)]),
        "repetition_penalty": rng.choice([1.5, [1 + rng.random() for _ in range(rows)]]),
        "max_new_tokens": rng.choice([each(0, 15), each(1, 15), 1]),
        "temperature": [0.2 + rng.random() for _ in range(rows)],
        "stop_token_ids": [17, 30],
        "stop_strings": rng.choice([["a", "b"], "c"]),
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
        "ignore_eos": True,
    }
    chosen = {name: value for name, value in maybe.items() if rng.random() < 0.25}
    return {"max_new_tokens": 15, "eos_token_id": EOS, **rng.choice(KINDS), **chosen}


def outcome(call: Any, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    """What a call returns, or its error."""
    torch.manual_seed(0)
    try:
        return call(ids, **options)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("seed", range(9))
def test_random_calls(seed: int) -> None:
    special = {"eos_token_id": 0, "pad_token_id": 1}
    model, tokenizer = hfgen.mix_into(tiny.llama(vocab_size=258, **special)), tiny.byte_tokenizer()
    rng, n_decoded = random.Random(seed), 0
    for _ in range(10):
        rows = rng.choice([1, 2, 4])
        ids, options = tiny.prompt(rows, seed=rng.randint(0, 9)), draw(rng, rows)
        options |= {"return_dict_in_generate": True, "tokenizer": tokenizer}
        output = outcome(model.generate, ids, options)
        stream = outcome(model.stream, ids, options)
        if isinstance(output, str):
            assert stream == output
            continue
        torch.manual_seed(0)
        events, n_decoded = list(stream), n_decoded + 1
        assert torch.equal(stream.result.sequences, output.sequences), options
        found = rows_of(events)
        assert len(found) == len(output.sequences)
        for row, tokens in found.items():
            assert output.sequences[row, 7:].tolist()[: len(tokens)] == tokens, options
        assert texts_of(events) == dict(enumerate(output.texts)), options
        reasons = {event.row: event.finish_reason for event in events}
        assert reasons == dict(enumerate(output.finish_reasons)), options
        if "logprobs" in options:
            for row, entries in enumerate(output.logprobs):
                own = [entry for e in events if e.row == row for entry in e.logprobs or ()]
                assert [entry.token_id for entry in own] == found[row], options
                assert own == entries[: len(own)], options
    assert n_decoded > 2
