"""``prompt_logprobs``, against a forward of the whole prompt and by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import hfgen
from hfgen.families import CACHE
from hfgen.running import prompt_logits
from hfgen.tools.evaluate.live_bytes import LiveBytes
from tests import tiny
from tests.markov import Markov
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.harness import FAMILIES
from tests.simulated_accelerator import Accelerator, on_device, to_device
from tests.test_logprobs import CALLS, CHANCES, decode, padded


@pytest.fixture(scope="module")
def llama() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prompts, too, go through the head in several pieces."""
    monkeypatch.setattr(prompt_logits, "POSITIONS", 3)


@torch.no_grad()
def forwarded(model: Any, **inputs: Any) -> Tensor:
    """Log-probabilities ``(rows, length, vocab)`` of a forward without a cache."""
    if "position_ids" not in inputs and (mask := inputs.get("attention_mask")) is not None:
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logprobs: Tensor = model(**inputs, use_cache=False).logits.float().log_softmax(dim=-1)
    return logprobs


def check(found: hfgen.Logprobs, logprobs: Tensor, ids: Tensor, is_token: Tensor) -> None:
    """``found`` is what ``logprobs (rows, length, vocab)`` say of ``ids``, where ``is_token``."""
    for row, entries in enumerate(found):
        assert entries is not None
        assert [entry is not None for entry in entries] == is_token[row].tolist()
        for place, entry in enumerate(entries):
            if entry is None:
                continue
            before, token = logprobs[row, place - 1], int(ids[row, place])
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(before[token]), abs=1e-5)
            assert entry.rank == int((before > before[token]).sum()) + 1
            best = before.topk(len(entry.top)).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-5)


def behind_another(mask: Tensor) -> Tensor:
    """Which tokens have one before them."""
    is_token = mask.bool()
    is_token[:, 1:] &= mask[:, :-1].bool()
    is_token[:, 0] = False
    return is_token


@pytest.mark.parametrize("call", CALLS)
def test_they_are_those_of_a_forward(llama: Any, call: str) -> None:
    inputs, options = padded(), {"max_new_tokens": 4, **CALLS[call]}
    output = decode(llama, inputs, **options, prompt_logprobs=3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert len(output.prompt_logprobs) == 3
    assert {len(e.top) for row in output.prompt_logprobs for e in row if e is not None} == {3}
    check(output.prompt_logprobs, forwarded(llama, **inputs), ids, behind_another(mask))
    assert output.sequences.equal(decode(llama, inputs, **options).sequences)


# Every fourth of all; of what stands between the states and the logits, each kind is among the others.
OTHERS = {
    "opt",
    "cohere",
    "gemma2",
    "granite",
    "gemma4_text",
    "whisper_decoder",
    "prophetnet",
    "mamba",
}
REFUSED = {"flaubert", "xlm", "xlnet"}
SOME = [
    family
    for index, family in enumerate(DECODER_FAMILIES)
    if (index % 4 == 0 or family.name in OTHERS) and family.name not in REFUSED
]


@pytest.mark.parametrize("family", SOME, ids=str)
def test_families(family: Any) -> None:
    model = family.build()
    inputs = family.inputs(model, 2, False, 0)
    ids = inputs["input_ids"]
    logprobs = forwarded(model, **inputs, **as_generated(model, ids))
    options = {"max_new_tokens": 3, "return_dict_in_generate": True}
    sequences = model.generate(**inputs, **options).sequences
    output = hfgen.mix_into(model).generate(**inputs, **options, prompt_logprobs=2)
    check(output.prompt_logprobs, logprobs, ids, behind_another(torch.ones_like(ids)))
    assert output.sequences.equal(sequences)


def as_generated(model: Any, ids: Tensor) -> dict[str, Any]:
    """What generation passes besides: positions from 0 on; and that all logits are wanted."""
    given = {"logits_to_keep": 0, "position_ids": torch.arange(ids.shape[1])[None]}
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in accepted}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_predict_other_tokens_are_refused(name: str) -> None:
    family: Any = FAMILIES[name]
    model = hfgen.mix_into(family.build())
    with pytest.raises(ValueError, match=f"{type(model).__name__} gives [0-9]+ for a prompt of 7"):
        decode(model, family.inputs(model, 1, False, 0), max_new_tokens=1, prompt_logprobs=1)


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gemma3"])
def test_prompts_with_images(name: str) -> None:
    family: Any = FAMILIES[name]
    model = family.build()
    inputs = family.inputs(model, 2, False, 0)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "num_return_sequences": 2}
    options |= {"do_sample": True, "top_k": 1}
    sequences = model.generate(**inputs, **options).sequences
    logprobs, ids = forwarded(model, **inputs), inputs["input_ids"]
    output = hfgen.mix_into(model).generate(**inputs, **options, prompt_logprobs=2)
    check(output.prompt_logprobs, logprobs, ids, behind_another(torch.ones_like(ids)))
    assert output.sequences.equal(sequences)


@pytest.mark.parametrize("build", [tiny.t5, tiny.bart], ids=["t5", "bart"])
def test_of_encoder_decoders_they_are_the_decoders(build: Callable[[], Any]) -> None:
    model, ids = hfgen.mix_into(build()), tiny.prompt(2)
    start = torch.full((2, 1), model.generation_config.decoder_start_token_id)
    prompt = torch.cat([start, tiny.prompt(2, 5, seed=1)], dim=1)
    options = {"decoder_input_ids": prompt, "max_new_tokens": 2, "num_beams": 2}
    output = decode(model, {"input_ids": ids}, **options, prompt_logprobs=2)
    logprobs = forwarded(model, input_ids=ids, decoder_input_ids=prompt)
    check(output.prompt_logprobs, logprobs, prompt, behind_another(torch.ones_like(prompt)))
    alone = decode(model, {"input_ids": ids}, max_new_tokens=2, prompt_logprobs=2).prompt_logprobs
    assert [*alone] == [[None], [None]]


def test_what_a_prefix_cache_holds_is_computed_again(llama: Any) -> None:
    prefixes, ids = hfgen.PrefixCache(), tiny.prompt(1, 20)
    for _ in range(2):
        output = decode(
            llama, {"input_ids": ids}, prefix_cache=prefixes, max_new_tokens=2, prompt_logprobs=1
        )
        expected = forwarded(llama, input_ids=ids)
        check(output.prompt_logprobs, expected, ids, behind_another(torch.ones_like(ids)))
    assert prefixes.stats.tokens_saved > 0


def test_a_prompt_is_scored_without_generating(llama: Any) -> None:
    ids, n_forwards = tiny.prompt(2, 9), []
    hook = llama.model.register_forward_hook(lambda *args: n_forwards.append(1))
    output = decode(llama, {"input_ids": ids}, max_new_tokens=0, prompt_logprobs=0)
    hook.remove()
    assert len(n_forwards) == 1
    assert output.sequences.equal(ids)
    expected = forwarded(llama, input_ids=ids)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(output.prompt_logprobs.cumulative_logprobs, expected.sum(dim=1))


#: Calls whose prefill cannot be watched, so that another forward follows.
FORWARDED_AGAIN = {
    *("lookup", "lookup, processed", "lookup, sampling", "chunks", "early exit", "seeded drafts")
}


@pytest.mark.parametrize("call", CALLS)
def test_the_prefill_is_enough(llama: Any, call: str) -> None:
    counts = []
    for asked in ({}, {"prompt_logprobs": 1}):
        n_tokens: list[int] = []

        def note(module: Any, inputs: Any, seen: list[int] = n_tokens) -> None:
            seen.append(inputs[0].shape[0] * inputs[0].shape[1])

        note.is_row_wise = True  # type: ignore[attr-defined]  # else rows do not share their prompt
        hook = llama.model.layers[0].register_forward_pre_hook(note)
        decode(llama, padded(), max_new_tokens=3, **CALLS[call], **asked)
        hook.remove()
        counts.append(sum(n_tokens))
    assert counts[1] - counts[0] == (3 * 9 if call in FORWARDED_AGAIN else 0)


class Leaving(LlamaForCausalLM):
    """Counts its forwards, on itself and on its body."""

    n_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.n_forwards += 1
        self.model.n_seen = self.n_forwards
        return super().forward(*args, **kwargs)


def test_compiled_models_and_models_with_hooks() -> None:
    inputs, options = padded(), {"max_new_tokens": 1, "prompt_logprobs": 1}
    expected = decode(hfgen.mix_into(tiny.llama()), inputs, **options).prompt_logprobs
    compiled, hooked = (hfgen.mix_into(tiny.llama()) for _ in range(2))
    compiled.compile(backend="eager")
    for module in (hooked, hooked.model, *hooked.model.layers):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    for model in (compiled, hooked):
        found = decode(model, inputs, **options).prompt_logprobs
        torch.testing.assert_close(
            found.token_logprobs, expected.token_logprobs, equal_nan=True, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("call", ["greedy", "samples", "lookup", "chunks"])
def test_a_model_is_left_as_by_a_call_without(call: str) -> None:
    left = []
    for asked in ({}, {"prompt_logprobs": 1}):
        model = hfgen.mix_into(Leaving(tiny.llama().config).eval())
        decode(model, padded(), max_new_tokens=2, **CALLS[call], **asked)
        left.append((model.n_forwards, vars(model.model)["n_seen"]))
    assert left[0] == left[1]


def test_an_accelerator_is_not_read_for_them(llama: Any) -> None:
    model, counts = on_device(llama), []
    for asked in ({}, {"prompt_logprobs": 2}):
        with Accelerator() as accelerator:
            model.generate(
                to_device(tiny.prompt(2)), attention_mask=to_device(torch.ones(2, 7).long()),
                max_new_tokens=3, eos_token_id=None, **asked, return_dict_in_generate=True,
            )  # fmt: skip
        counts.append([len(accelerator.of_kind(kind)) for kind in ("read", "copy")])
    assert counts[0] == counts[1]


def test_by_hand() -> None:
    output = decode(
        Markov(CHANCES), {"input_ids": torch.tensor([[0, 1, 2], [0, 2, 0]])}, max_new_tokens=1,
        prompt_logprobs=1,
    )  # fmt: skip
    (nothing, one, two), (_, other, _) = output.prompt_logprobs
    assert nothing is None
    assert (math.exp(one.logprob), one.rank, one.top[0][0]) == (pytest.approx(0.75), 1, 1)
    assert (math.exp(two.logprob), two.rank, two.top[0][0]) == (pytest.approx(1.0), 1, 2)
    assert (math.exp(other.logprob), other.rank, other.top[0][0]) == (pytest.approx(0.25), 2, 1)
    rows = output.prompt_logprobs.to_openai()
    assert [len(row["content"]) for row in rows] == [2, 2]


def test_logits_in_place_of_logprobs(llama: Any) -> None:
    ids = tiny.prompt(1)
    options = {"max_new_tokens": 1, "prompt_logprobs": 0, "logprobs_mode": "processed_logits"}
    found = decode(llama, {"input_ids": ids}, **options, suppress_tokens=[7]).prompt_logprobs
    with torch.no_grad():
        logits = llama(ids).logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(found.token_logprobs[:, 1:], logits)


def test_each_prompt_gets_what_it_asked_for(llama: Any) -> None:
    options = {"max_new_tokens": 1, "prompt_logprobs": [2, None, 0], "num_beams": 2}
    found = decode(llama, padded(), **options).prompt_logprobs
    assert found[1] is None
    assert [{len(e.top) for e in found[row] if e is not None} for row in (0, 2)] == [{2}, {0}]


def test_half_precision_is_measured_in_full(llama: Any) -> None:
    model = hfgen.mix_into(tiny.llama().bfloat16())
    found = decode(model, {"input_ids": tiny.prompt(2)}, max_new_tokens=1, prompt_logprobs=-1)
    chances = found.prompt_logprobs.top_logprobs[:, 1:].exp().sum(dim=-1)
    torch.testing.assert_close(chances, torch.ones_like(chances))


def test_the_model_stays_as_it_was(llama: Any) -> None:
    modules = {name: id(module) for name, module in llama.named_modules()}
    attributes = {name: id(value) for name, value in vars(llama).items()}
    decode(llama, {"input_ids": tiny.prompt(1)}, max_new_tokens=1, prompt_logprobs=1)
    assert {name: id(module) for name, module in llama.named_modules()} == modules
    assert {name: id(value) for name, value in vars(llama).items()} == attributes


def test_not_all_logits_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, length, limit = 20_000, 400, 2**20
    model = hfgen.mix_into(tiny.llama(vocab_size=vocab, max_position_embeddings=512))
    monkeypatch.setattr(prompt_logits, "POSITIONS", 1024)
    monkeypatch.setattr(prompt_logits, "BYTES", limit)
    ids = tiny.prompt(1, length)
    with LiveBytes() as live:
        decode(model, {"input_ids": ids}, max_new_tokens=1, prompt_logprobs=3)
    assert live.peak < 4 * limit
    assert live.peak < 4 * vocab * length / 8
    with LiveBytes() as live, torch.no_grad():  # else it would measure nothing
        model(ids).logits.float()
    assert live.peak > 4 * vocab * length


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "`inputs_embeds`. Pass `input_ids`"),
        ({"input_ids": tiny.prompt(1), "prompt_logprobs": 98}, "`prompt_logprobs`=98 .* 97"),
        ({"input_ids": tiny.prompt(1), "synced_gpus": True}, "`synced_gpus`"),
    ],
)
def test_bad_input(llama: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(llama, {}, **{"prompt_logprobs": 1, "max_new_tokens": 1} | kwargs)


def test_a_cache_that_holds_tokens_is_refused(llama: Any) -> None:
    ids, cache = tiny.prompt(1), DynamicCache()
    options = {"prompt_logprobs": 1, "max_new_tokens": 1}
    decode(llama, {"input_ids": ids}, past_key_values=cache, **options)  # an empty one is not
    with pytest.raises(ValueError, match=f"`{CACHE}`"):
        decode(llama, {"input_ids": ids}, past_key_values=cache, **options)
