"""``logprobs``, ``logprob_token_ids`` and ``logprobs_mode``, against upstream's scores and by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

import hfgen
from hfgen.decoding.strategies import Sample
from hfgen.logits.logprobs.result import LogprobRequest, Settings, measure
from tests import tiny
from tests.markov import Markov
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.family import sharpen
from tests.parity.harness import FAMILIES
from tests.simulated_accelerator import Accelerator, on_device, to_device

MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

#: One call per way to decode.
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, processed": {"repetition_penalty": 1.3, "min_new_tokens": 3},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams, all returned": {"num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.3},
    "beam samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {"num_beams": 3, "force_words_ids": [[9]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "high"},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookup, processed": {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.3},
    "lookup, sampling": {"prompt_lookup_num_tokens": 3, "do_sample": True, "top_k": 20},
    "chunks": {"prefill_chunk_size": 3},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized"},
    "dropped": {"drop_finished": True, "do_sample": True},
    "no cache": {"use_cache": False},
    "beams, dropped": {"num_beams": 3, "drop_finished": True, "num_return_sequences": 2},
    "groups, all returned": {
        "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4,
        "repetition_penalty": 1.3,
    },
    "constrained, all returned": {
        "num_beams": 3, "force_words_ids": [[9], [40, 41]], "num_return_sequences": 3,
    },
    "contrastive, one by one": {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
    "early exit": {"assistant_early_exit": 1},
    "drafts of samples": {"assistant_early_exit": 1, "do_sample": True, "num_return_sequences": 2},
    "seeded": {"do_sample": True, "seed": 3, "temperature": 0.8},
    "seeded drafts": {"do_sample": True, "seed": 3, "prompt_lookup_num_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Any:
    """Its rows end at different lengths: two tokens of three are ends in the calls below."""
    return hfgen.mix_into(sharpen(tiny.llama(), 2.0))


def padded(rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    """A batch whose prompts repeat themselves, with padding on the left."""
    ids = tiny.prompt(rows, length)
    ids[:, 5:] = ids[:, 1 : length - 4]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def decode(model: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**inputs, **kwargs, return_dict_in_generate=True)


def lengths(output: Any, n_prompt: int, eos: list[int]) -> list[int]:
    """How many tokens each row of a batch generated, its EOS included."""
    found = []
    for row in output.sequences[:, n_prompt:].tolist():
        ends = [place + 1 for place, token in enumerate(row) if token in eos]
        found.append(min(ends, default=len(row)))
    return found


def expected(output: Any, mode: str) -> Tensor:
    """``(rows, n, vocab)``: of the returned sequences, by the scores that upstream records."""
    entries = output.logits if mode.startswith("raw") else output.scores
    scores = torch.stack(entries, dim=1).float()
    scores = scores if mode.endswith("logits") else scores.log_softmax(dim=-1)
    if (paths := output.get("beam_indices")) is None:
        return scores
    steps = torch.arange(paths.shape[1]).expand_as(paths)
    return scores[paths.clamp(min=0).long(), steps]


# ---------------------------------------------------------------- against upstream's scores


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_they_are_those_of_the_recorded_scores(llama: Any, call: str, mode: str) -> None:
    eos, inputs = [*range(2, 30)], padded()
    asked = {"logprobs": 4, "logprob_token_ids": [40, 3], "logprobs_mode": mode}
    options = {"max_new_tokens": 12, "eos_token_id": eos, "output_logits": True}
    output = decode(llama, inputs, **options, **CALLS[call], **asked, output_scores=True)
    scores, found = expected(output, mode), output.logprobs

    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    assert [len(row) for row in found] == lengths(output, inputs["input_ids"].shape[1], eos)
    for row, (entries, ids) in enumerate(zip(found, tokens.tolist(), strict=True)):
        for step, entry in enumerate(entries):
            of_all = scores[row, step]
            best = of_all.topk(4).values.tolist()
            assert entry.token_id == ids[step]
            assert entry.logprob == pytest.approx(float(of_all[ids[step]]), abs=1e-5)
            assert entry.rank == int((of_all > of_all[ids[step]]).sum()) + 1
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-5)
            assert [value for _, value in entry.top] == pytest.approx(
                [float(of_all[token]) for token, _ in entry.top], abs=1e-5
            )
            assert [token for token, _ in entry.asked] == [40, 3]
            assert [value for _, value in entry.asked] == pytest.approx(
                of_all[[40, 3]].tolist(), abs=1e-5
            )


@pytest.mark.parametrize("call", CALLS)
def test_tokens_are_those_of_a_call_without(llama: Any, call: str) -> None:
    options = {"max_new_tokens": 12, "eos_token_id": [*range(2, 30)], **CALLS[call]}
    output = decode(llama, padded(), **options, logprobs=2)
    assert output.sequences.equal(decode(llama, padded(), **options).sequences)
    assert output.get("scores") is None
    assert output.get("logits") is None


def test_rows_end_at_different_lengths(llama: Any) -> None:
    """Else the tests above would not see what follows an end."""
    options = {"max_new_tokens": 12, "eos_token_id": [*range(2, 30)]}
    found = decode(llama, padded(), **options, prompt_lookup_num_tokens=3, logprobs=0).logprobs
    assert len({len(row) for row in found}) > 1
    assert not found.is_token.all()
    assert found.token_logprobs.isnan().equal(~found.is_token)
    assert found.ranks.eq(0).equal(~found.is_token)


@pytest.mark.parametrize("normalised", [False, True])
def test_of_beams_they_are_the_transition_scores(llama: Any, normalised: bool) -> None:
    mode = "processed_logprobs" if normalised else "processed_logits"
    options = {"num_beams": 4, "num_return_sequences": 2, "repetition_penalty": 1.2}
    output = decode(
        llama, padded(), max_new_tokens=10, output_scores=True, logprobs=1, logprobs_mode=mode,
        eos_token_id=[*range(2, 30)], **options,
    )  # fmt: skip
    transition = llama.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices, normalize_logits=normalised
    )
    torch.testing.assert_close(output.logprobs.token_logprobs.nan_to_num(0.0), transition)


SMALL = [
    family
    for family in DECODER_FAMILIES
    if family.name in ("gpt2", "qwen3", "gemma3_text", "mamba2")
]


@pytest.mark.parametrize("family", SMALL, ids=str)
def test_families(family: Any) -> None:
    model = family.build()
    inputs = family.inputs(model, 2, True, 0)
    options = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    upstreams = model.generate(**inputs, **options)
    output = hfgen.mix_into(model).generate(**inputs, **options, logprobs=0)
    assert output.sequences.equal(upstreams.sequences)
    logprobs = expected(upstreams, "raw_logprobs")
    tokens = upstreams.sequences[:, inputs["input_ids"].shape[1] :, None]
    of_tokens = logprobs.gather(2, tokens).squeeze(2).masked_fill(~output.logprobs.is_token, 0.0)
    torch.testing.assert_close(
        output.logprobs.token_logprobs.nan_to_num(0.0), of_tokens, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("build", [tiny.t5, tiny.bart], ids=["t5", "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoders(build: Callable[[], Any], beams: int) -> None:
    model = hfgen.mix_into(build())
    output = decode(
        model, {"input_ids": tiny.prompt(2)}, max_new_tokens=6, num_beams=beams, logprobs=1,
        output_logits=True,
    )  # fmt: skip
    logprobs = expected(output, "raw_logprobs")
    tokens = output.sequences[:, 1:, None]
    of_tokens = logprobs.gather(2, tokens).squeeze(2)
    is_token = output.logprobs.is_token
    torch.testing.assert_close(output.logprobs.token_logprobs[is_token], of_tokens[is_token])


def test_what_a_prefix_cache_holds_changes_nothing(llama: Any) -> None:
    prefixes = hfgen.PrefixCache()
    options = {"max_new_tokens": 4, "logprobs": 2, "eos_token_id": None}
    first, second = (
        decode(llama, {"input_ids": tiny.prompt(1, 20)}, prefix_cache=prefixes, **options)
        for _ in range(2)
    )
    assert prefixes.stats.tokens_saved > 0
    torch.testing.assert_close(first.logprobs.top_logprobs, second.logprobs.top_logprobs)


def test_minimum_bayes_risk_returns_those_of_the_samples_it_chose(llama: Any) -> None:
    recipe = hfgen.minimum_bayes_risk(utility=hfgen.token_f1, on_tokens=True)
    output = decode(
        llama, {"input_ids": tiny.prompt(2)}, custom_generate=recipe, do_sample=True,
        num_return_sequences=4, max_new_tokens=6, logprobs=1, output_logits=True,
        eos_token_id=[*range(2, 30)],
    )  # fmt: skip
    of_all = expected(output, "raw_logprobs").gather(2, output.sequences[:, 7:, None]).squeeze(2)
    is_token = output.logprobs.is_token
    torch.testing.assert_close(output.logprobs.token_logprobs[is_token], of_all[is_token])


class InPlace(LogitsProcessor):
    """Writes to the scores that it gets, as callers' own may."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 30:] = -math.inf
        return scores


@pytest.mark.parametrize("call", ["greedy", "sampling", "beams", "lookup"])
def test_raw_is_raw_whatever_processors_write(llama: Any, call: str) -> None:
    options = CALLS[call] | {"max_new_tokens": 4, "logits_processor": [InPlace()]}
    found = decode(llama, padded(), **options, logprobs=-1).logprobs
    assert found.top_logprobs[found.is_token].isfinite().all()
    mode = "processed_logprobs"
    found = decode(llama, padded(), **options, logprobs=-1, logprobs_mode=mode).logprobs
    assert found.top_logprobs[found.is_token].isinf().any()


class Fifth(StoppingCriteria):
    """Ends a row, by itself, at the fifth token that it generates."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 7 + 5)


def test_where_no_eos_ends_rows_all_tokens_count(llama: Any) -> None:
    options = {"eos_token_id": None, "stopping_criteria": [Fifth()], "max_new_tokens": 9}
    found = decode(llama, {"input_ids": tiny.prompt(2)}, **options, logprobs=0).logprobs
    assert [len(row) for row in found] == [5, 5]


@pytest.mark.parametrize("call", ["greedy", "sampling", "beams", "lookup"])
def test_an_accelerator_is_not_read_for_them(llama: Any, call: str) -> None:
    model, counts = on_device(llama), []
    for asked in ({}, {"logprobs": 3, "logprob_token_ids": [5]}):
        torch.manual_seed(0)
        with Accelerator() as accelerator:
            model.generate(
                to_device(tiny.prompt(2)), max_new_tokens=6, eos_token_id=[3], **CALLS[call],
                **asked, return_dict_in_generate=True,
            )  # fmt: skip
        counts.append([len(accelerator.of_kind(kind)) for kind in ("read", "copy")])
    assert counts[1][0] == counts[0][0]
    assert counts[1][1] - counts[0][1] == 1  # the ids that are asked for


def test_little_is_kept(llama: Any) -> None:
    """Of each step, a few numbers; and nothing of the vocabulary is seen through them."""
    output = decode(llama, {"input_ids": tiny.prompt(2)}, max_new_tokens=5, logprobs=2)
    found = output.logprobs
    for tensor in (found.token_logprobs, found.ranks, found.top_token_ids, found.top_logprobs):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------- by hand

#: After 0 comes 1 or 2, after 1 always 2, after 2 always 0.
CHANCES = [[0.0, 0.75, 0.25], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


def test_by_hand() -> None:
    output = decode(
        Markov(CHANCES), {"input_ids": torch.tensor([[0], [1]])}, max_new_tokens=2, logprobs=2,
        logprob_token_ids=[0],
    )  # fmt: skip
    assert output.sequences.tolist() == [[0, 1, 2], [1, 2, 0]]
    first, second = output.logprobs[0]
    assert (first.token_id, first.rank, second.token_id, second.rank) == (1, 1, 2, 1)
    assert math.exp(first.logprob) == pytest.approx(0.75)
    assert [(token, pytest.approx(math.exp(p))) for token, p in first.top] == [(1, 0.75), (2, 0.25)]
    assert math.exp(first.asked[0][1]) == pytest.approx(0.0, abs=1e-6)
    assert output.logprobs.cumulative_logprobs.exp().tolist() == pytest.approx([0.75, 1.0])


def test_ranks_of_equals() -> None:
    """Those with a higher value count, equals do not."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 1.0]]).expand(5, -1)
    found = measure(scores, torch.arange(5), Settings([LogprobRequest(0)]))
    assert found.ranks.tolist() == [4, 1, 1, 3, 4]
    total = math.log(2 * math.e + 2 * math.e**3 + math.e**2)
    assert found.logprobs.tolist() == pytest.approx([value - total for value in (1, 3, 3, 2, 1)])
    assert found.top_ids.shape == (5, 0)


def test_zero_is_the_chosen_token_alone(llama: Any) -> None:
    output = decode(llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=2, logprobs=0)
    assert [entry.top for entry in output.logprobs[0]] == [(), ()]


def test_ids_may_be_asked_for_alone(llama: Any) -> None:
    output = decode(
        llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, logprob_token_ids=[7, 8]
    )
    (entry,) = output.logprobs[0]
    assert ([token for token, _ in entry.asked], entry.top) == ([7, 8], ())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", [MODES[0], MODES[1]])
def test_the_support_is_what_processors_have_left(llama: Any, call: str, mode: str) -> None:
    options = CALLS[call] | {"max_new_tokens": 6, "eos_token_id": [2, 11], "pad_token_id": 0}
    options |= {"suppress_tokens": [5, 6], "logprobs_support": True, "output_scores": True}
    options |= {"logprobs": 1} if mode == MODES[1] else {}
    output = decode(llama, padded(), **options, logprobs_mode=mode)
    assert torch.equal(
        output.sequences,
        decode(llama, padded(), **options | {"logprobs_support": None, "logprobs": 0}).sequences,
    )
    paths = getattr(output, "beam_indices", None)
    for row, entries in enumerate(output.logprobs):
        for place, entry in enumerate(entries):
            scored = row if paths is None else int(paths[row, place])
            left = (output.scores[place][scored] > -math.inf).nonzero().flatten().tolist()
            assert list(entry.support) == left
            assert not {5, 6} & set(left)


def test_the_support_in_streams_and_engines(llama: Any) -> None:
    options = {"do_sample": True, "seed": 3, "top_k": 4, "max_new_tokens": 6}
    options |= {"logprobs_support": True, "eos_token_id": None, "pad_token_id": 0}
    prompt = tiny.prompt(1)
    expected = decode(llama, {"input_ids": prompt}, **options).logprobs[0]
    assert {len(entry.support) for entry in expected} == {4}
    events = llama.stream(prompt, **options, return_dict_in_generate=True)
    assert [entry for event in events for entry in event.logprobs or ()] == expected
    engine = hfgen.Engine(llama)
    requests = [engine.add(ids, **options) for ids in (prompt, tiny.prompt(1, seed=2))]
    found = engine.result(requests[0]).sequences[0].logprobs
    assert [entry.support for entry in found or ()] == [entry.support for entry in expected]


def test_minus_one_is_the_whole_vocabulary(llama: Any) -> None:
    output = decode(llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, logprobs=-1)
    (entry,) = output.logprobs[0]
    assert sorted(token for token, _ in entry.top) == [*range(tiny.VOCAB)]
    assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0)


@pytest.mark.parametrize("beams", [1, 2])
def test_nothing_is_generated(llama: Any, beams: int) -> None:
    options = {"max_new_tokens": 0, "logprobs": 2, "logprob_token_ids": [3], "num_beams": beams}
    found = decode(llama, {"input_ids": tiny.prompt(2)}, **options).logprobs
    assert [*found] == [[], []]
    assert (found.top_logprobs.shape, found.asked_logprobs.shape) == ((2, 0, 2), (2, 0, 1))


def test_it_is_a_sequence_of_rows(llama: Any) -> None:
    found = decode(llama, {"input_ids": tiny.prompt(2)}, max_new_tokens=2, logprobs=1).logprobs
    assert len(found) == 2
    assert found[-1] is found[1]
    assert found[:1] == [found[0]]
    with pytest.raises(IndexError):
        found[2]


# ---------------------------------------------------------------- a value for each prompt


def test_each_prompt_gets_what_it_asked_for(llama: Any) -> None:
    inputs, options = {"input_ids": tiny.prompt(3)}, {"max_new_tokens": 3, "eos_token_id": None}
    output = decode(llama, inputs, **options, logprobs=[2, None, 0], num_return_sequences=2,
                    do_sample=True)  # fmt: skip
    found = output.logprobs
    assert [found[row] is None for row in range(6)] == [False, False, True, True, False, False]
    assert [{len(entry.top) for entry in found[row]} for row in (0, 1, 4, 5)] == [
        {2},
        {2},
        {0},
        {0},
    ]
    assert [row is None for row in found.to_openai()] == [row is None for row in found]


def test_each_prompt_gets_the_ids_it_asked_for(llama: Any) -> None:
    own = [{"logprob_token_ids": [8, 3]}, {"logprobs": 1}, {"logprob_token_ids": [5]}]
    common = {"max_new_tokens": 2, "num_beams": 2, "eos_token_id": [tiny.VOCAB - 1]}
    configs = [
        hfgen.GenerationConfig(**common, **each, return_dict_in_generate=True) for each in own
    ]
    together = llama.generate(**padded(), generation_config=configs)
    asked = [[[token for token, _ in entry.asked] for entry in row] for row in together.logprobs]
    assert asked == [[[8, 3]] * 2, [[]] * 2, [[5]] * 2]
    inputs = padded()
    for row, config in enumerate(configs):
        alone = decode(
            llama, {k: v[row : row + 1] for k, v in inputs.items()}, generation_config=config
        )
        for entry, other in zip(together.logprobs[row], alone.logprobs[0], strict=True):
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert dict(entry.asked) == pytest.approx(dict(other.asked), abs=1e-5)
            assert dict(entry.top) == pytest.approx(dict(other.top), abs=1e-5)


def test_rows_of_different_lengths(llama: Any) -> None:
    options = {"max_new_tokens": [2, 5, 0], "eos_token_id": None, "logprobs": 1}
    found = decode(llama, padded(), **options).logprobs
    assert [len(row) for row in found] == [2, 5, 0]


# ---------------------------------------------------------------- OpenAI's shape


def test_openais_shape(llama: Any) -> None:
    output = decode(
        llama, {"input_ids": tiny.prompt(2)}, max_new_tokens=2, logprobs=2, logprob_token_ids=[5]
    )
    tokenizer = tiny.byte_tokenizer()
    rows = output.logprobs.to_openai(tokenizer)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row, entries in zip(rows, output.logprobs, strict=True):
        assert row.keys() == {"content"}
        for written, entry in zip(row["content"], entries, strict=True):
            assert written.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert written["token"] == bytes(written["bytes"]).decode("utf-8", "replace")
            assert written["logprob"] == entry.logprob
            assert len(written["top_logprobs"]) == len({*entry.top, *entry.asked})
            assert written["top_logprobs"][0]["logprob"] == entry.top[0][1]


def test_without_a_tokenizer_tokens_are_numbers(llama: Any) -> None:
    output = decode(llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, logprobs=0)
    (written,) = output.logprobs.to_openai()[0]["content"]
    token = output.sequences[0, -1]
    assert (written["token"], written["bytes"]) == (f"token_id:{token}", None)


def test_bytes_are_those_of_parts_of_a_character() -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer.encode("é", add_special_tokens=False)
    model = hfgen.mix_into(tiny.llama(vocab_size=300))
    output = decode(
        model, {"input_ids": torch.tensor([ids])}, max_new_tokens=1, logprob_token_ids=ids
    )
    (written,) = output.logprobs.to_openai(tokenizer)[0]["content"]
    assert [entry["bytes"] for entry in written["top_logprobs"]] == [[0xC3], [0xA9]]


def test_json_has_no_infinity(llama: Any) -> None:
    options = {"logprobs_mode": "processed_logprobs", "suppress_tokens": [7]}
    output = decode(
        llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, logprob_token_ids=[7], **options
    )
    assert output.logprobs[0][0].asked == ((7, -math.inf),)
    (written,) = output.logprobs.to_openai()[0]["content"]
    assert written["top_logprobs"][0]["logprob"] == -9999.0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": -2}, "`logprobs` has to be at least 0, or -1"),
        ({"logprobs": 98}, "`logprobs`=98 asks for more tokens than .* 97"),
        ({"logprobs": "five"}, "`logprobs` has to be an integer"),
        ({"logprob_token_ids": [97]}, "`logprob_token_ids` has the token 97"),
        ({"logprob_token_ids": 3}, "`logprob_token_ids` has to be a list of token ids"),
        ({"logprobs": 1, "logprobs_mode": "raw_logprob"}, "did you mean `raw_logprobs`"),
    ],
)
def test_bad_input(llama: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        decode(llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, **options)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_output_has_to_be_an_object(llama: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`=0 .* `return_dict_in_generate=True`"):
        llama.generate(tiny.prompt(1), max_new_tokens=1, **{name: 0})


class WithoutLogits(Sample):
    def step(self, run: Any, model_outputs: Any) -> Any:
        return dataclasses.replace(super().step(run, model_outputs), logits=None)


def test_a_strategy_has_to_say_what_the_model_gave(llama: Any) -> None:
    options = {"custom_generate": hfgen.recipe(WithoutLogits), "max_new_tokens": 1, "logprobs": 1}
    with pytest.raises(ValueError, match=r"`Step.logits`, which WithoutLogits does not set"):
        decode(llama, {"input_ids": tiny.prompt(1)}, **options)
    options["logprobs_mode"] = "processed_logprobs"
    assert len(decode(llama, {"input_ids": tiny.prompt(1)}, **options).logprobs[0]) == 1


def test_a_function_that_decodes_by_itself_is_refused(llama: Any) -> None:
    def by_itself(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return input_ids

    with pytest.raises(ValueError, match="by_itself"):
        decode(
            llama, {"input_ids": tiny.prompt(1)}, custom_generate=by_itself, max_new_tokens=1,
            logprobs=1,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["whisper", "parakeet_tdt", "bark_semantic"])
def test_models_that_make_their_own_output_are_refused(name: str) -> None:
    family: Any = FAMILIES[name]
    model = hfgen.mix_into(family.build())
    inputs = family.inputs(model, 1, False, 0)
    for asked in ({"logprobs": 1}, {"prompt_logprobs": 1}):
        with pytest.raises(ValueError, match=f"{type(model).__name__}.generate.* of its own"):
            decode(model, inputs, max_new_tokens=2, **asked)


def test_continuous_batching_refuses_them(llama: Any) -> None:
    with pytest.raises(NotImplementedError, match="`logprobs`"):
        llama.generate(tiny.prompt(1), cache_implementation="paged", logprobs=1)
