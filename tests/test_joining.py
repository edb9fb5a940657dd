"""Rows that join, leave and are trimmed in place: each gets what it gets alone, whatever its layers keep."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EncoderDecoderCache

import hfgen
from hfgen.decoding.loop import steps
from hfgen.decoding.strategies import Sample
from hfgen.families import CACHE
from hfgen.memory.batch import Batch, own_mask
from hfgen.memory.caches import growing, slots
from hfgen.prepare.stages import prepare
from hfgen.running.padding import hides_padding
from hfgen.state.call import Request
from tests import SHIPPED, tiny
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.harness import FAMILIES
from tests.versions import IS_5_24

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


def begun(model: Any, **options: Any) -> Batch:
    """The batch of a prompt after its first token."""
    greedy = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    run = prepare(model, Request(kwargs=options | greedy)).run(model)
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


def padding_of(batch: Batch) -> list[int]:
    """The number of padding columns on the left of each row; the smallest of them can be trimmed."""
    mask = batch.model_kwargs.get(own_mask(batch.model_kwargs))
    if mask is None:
        return [0] * len(batch)
    return (mask.cumsum(dim=-1) == 0).sum(dim=-1).tolist()


@dataclass
class Alone:
    """A prompt, and what follows it when it is decoded alone."""

    model: Any
    inputs: dict[str, Any]  # and other arguments of generate
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

    def move(self, index: list[int]) -> None:
        if self.batch is not None:
            self.batch.move(torch.tensor(index))
            self.rows = [dataclasses.replace(self.rows[i]) for i in index]

    def trim(self) -> None:
        if self.batch is not None:
            self.batch.trim(min(padding_of(self.batch)))
            assert min(padding_of(self.batch)) == 0

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
        name = rng.choice(["join", "join", "leave", "move", "trim", "decode", "decode", "decode"])
        if name == "join" and len(together.rows) < 6:
            together.join(rng.choices(prompts, k=rng.choice([1, 1, 1, 2])))
        elif name == "leave" and together.rows:
            together.leave(rng.randrange(len(together.rows)))
        elif name == "move":
            together.move(rng.choices(range(len(together.rows)), k=len(together.rows)))
        elif name == "trim":
            together.trim()
        else:
            together.decode()


def prompts_of(model: Any, **options: Any) -> list[Alone]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 60, (1, n), generator=generator) for n in (1, 3, 4, 9, 17)]
    return [Alone(model, {"input_ids": each} | options) for each in ids]


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
        pytest.skip(reason="the installed transformers is too old for this family")
    model = built(family)
    play(model, prompts_of(model), seed=0)


def test_each_row_of_an_encoder_decoder_gets_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", 0)
    model = hfgen.mix_into(tiny.t5())
    play(model, prompts_of(model), seed=0)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "offloaded", "cache_config": {"path": "."}},
    ],
    ids=["offloaded", "in files"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_each_row_gets_what_it_gets_alone_in_another_cache(
    family: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", 0)
    monkeypatch.chdir(tmp_path)
    model = built(family)
    play(model, prompts_of(model, **options), seed=0)


# ---------------------------------------------------------------- what is refused


def refused(batch: Batch, other: Batch, match: str) -> None:
    """Rows are refused, and nothing has changed."""
    length, ids = layers_length(batch), batch.ids
    with pytest.raises(ValueError, match=match):
        batch.append(other)
    assert layers_length(batch) == length
    assert batch.ids is ids


def layers_length(batch: Batch) -> list[Any]:
    return [getattr(cache, "get_seq_length", int)() for cache in batch.caches.values()]


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("minimax", "a MiniMaxCache"),
        ("deepseek_v4", "a DeepseekV4CSACache, a layer of DynamicCache"),
        ("minimax_m3_vl_text", "a MiniMaxM3VLSparseCacheLayer"),
        ("blt", "without `encoder_outputs`"),
        ("rwkv", "`state`"),
        ("xlstm", "`cache`" if IS_5_24 else "`cache_params`"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(family: str, match: str) -> None:
    if family not in DECODERS:
        pytest.skip(reason="the installed transformers is too old for this family")
    model = built(family)
    refused(*(begun(model, input_ids=tiny.prompt(1) % 60) for _ in range(2)), match)


def test_static_caches_are_refused() -> None:
    model = built("llama")
    ids = tiny.prompt(2) % 60
    one, two = (begun(model, input_ids=ids, cache_implementation="static") for _ in range(2))
    message = "a StaticLayer, a layer of .*Decode these prompts with `generate`"
    refused(one, two, message)
    for operation in (lambda: one.leave(0), lambda: one.trim(1)):
        with pytest.raises(ValueError, match=message):
            operation()


@pytest.mark.parametrize(("row", "match"), [(3, "0 to 2"), (-1, "0 to 2")])
def test_rows_that_are_not_there_cannot_leave(row: int, match: str) -> None:
    model = built("llama")
    batch = begun(model, input_ids=tiny.prompt(3) % 60)
    with pytest.raises(ValueError, match=match):
        batch.leave(row)
    assert len(batch) == 3


def test_the_only_row_leaves_with_its_batch() -> None:
    batch = begun(built("llama"), input_ids=tiny.prompt(1) % 60)
    with pytest.raises(ValueError, match="drop the batch"):
        batch.leave(0)


@pytest.mark.parametrize("n", [-1, 8, 100])
def test_no_more_is_trimmed_than_there_is(n: int) -> None:
    batch = begun(built("llama"), input_ids=tiny.prompt(1) % 60)
    with pytest.raises(ValueError, match=f"`n_tokens`={n} cannot be trimmed from 8 columns"):
        batch.trim(n)
    assert layers_length(batch) == [7]


# ---------------------------------------------------------------- models that padding changes


@pytest.mark.parametrize("family", [*(KINDS[kind] for kind in KINDS if kind != "indexed"), "t5"])
def test_a_model_that_hides_padding_is_found(family: str) -> None:
    if family not in (*DECODERS, "t5"):
        pytest.skip(reason="the installed transformers is too old for this family")
    model = hfgen.mix_into(tiny.t5()) if family == "t5" else built(family)
    batch = begun(model, input_ids=tiny.prompt(2) % 60)
    twin = copy.deepcopy(batch)
    assert hides_padding(model, batch)
    assert torch.equal(batch.ids, twin.ids)
    assert torch.equal(decode(model, batch), decode(model, twin))


@pytest.mark.parametrize(
    "family", ["bart", "whisper_decoder", "cpmant", "encoder-decoder", "deepseek_v32"]
)
def test_a_model_that_padding_changes_is_found(family: str) -> None:
    is_whole = family == "encoder-decoder"
    model = hfgen.mix_into(tiny.bart()) if is_whole else built(family)
    assert not hides_padding(model, begun(model, input_ids=tiny.prompt(1) % 60))


def test_a_model_that_keeps_rows_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    forward = type(model).forward

    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        self.remembered = outputs.logits
        return outputs

    monkeypatch.setattr(type(model), "forward", remember)
    assert not hides_padding(model, begun(model, input_ids=tiny.prompt(1) % 60))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_not_taken_for_padding(dtype: torch.dtype) -> None:
    builders = tiny.llama, tiny.bart, FAMILIES["t5gemma"].build
    models = [hfgen.mix_into(build().to(dtype)) for build in builders]
    ids = torch.randint(10, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    batches = [begun(model, input_ids=ids) for model in models]
    assert list(map(hides_padding, models, batches)) == [True, False, False]


# ---------------------------------------------------------------- columns, and bytes


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "llama4_text", "qwen3_next"])
def test_a_trimmed_batch_is_one_that_was_shorter_from_the_start(family: str) -> None:
    model = built(family)
    short, long = prompts_of(model)[1], prompts_of(model)[4]
    batch = short.batch()
    batch.append(long.batch())
    assert padding_of(batch) == [14, 0]
    batch.leave(1)
    assert padding_of(batch) == [14]
    batch.trim(14)
    alone = short.batch()
    assert torch.equal(batch.ids, alone.ids)
    assert padding_of(batch) == [0]
    cache, expected = (each.model_kwargs[CACHE] for each in (batch, alone))
    for _ in range(8):
        assert cache.get_seq_length() == expected.get_seq_length()
        for index, layer in enumerate(expected.layers):
            if hasattr(layer, "get_mask_sizes"):
                assert cache.get_mask_sizes(1, index) == expected.get_mask_sizes(1, index)
                assert torch.equal(cache.layers[index].keys, layer.keys)
        torch.testing.assert_close(decode(model, batch), decode(model, alone))


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "deepseek_v3", "deepseek_v32", "qwen3_next", "mamba2", "t5"]
)
def test_the_bytes_of_a_row_are_foretold(family: str) -> None:
    model = hfgen.mix_into(tiny.t5()) if family == "t5" else built(family)
    batch = begun(model, input_ids=tiny.prompt(2) % 60)
    (cache,) = batch.caches.values()
    now = 1 if model.config.is_encoder_decoder else 7
    for n_more in range(1, 40):
        decode(model, batch)
        if n_more % 13 == 0:
            foretold = slots.bytes_of_row(cache, 100), slots.bytes_of_row(cache, now + n_more)
            assert foretold[1] == held_bytes(cache) // 2
    start = begun(model, input_ids=tiny.prompt(2) % 60)
    (cache,) = start.caches.values()
    assert foretold == (slots.bytes_of_row(cache, 100), slots.bytes_of_row(cache, now + 39))


def held_bytes(cache: Any) -> int:
    """Bytes of all tensors that the layers of a cache hold, without room."""
    if isinstance(cache, EncoderDecoderCache):
        return held_bytes(cache.self_attention_cache) + held_bytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys", "conv_states", "recurrent_states"):
            states = getattr(layer, name, None)
            each = states.values() if isinstance(states, dict) else [states]
            total += sum(tensor.nbytes for tensor in each if tensor is not None)
    return total
