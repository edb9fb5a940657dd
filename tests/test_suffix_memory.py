"""``SuffixMemory``: what it drafts, what it forgets, its file, and that it changes no token."""

from __future__ import annotations

import copy
import math
import os
import pickle
import stat
import threading
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import hfgen
from hfgen import SuffixMemory
from hfgen.decoding.drafters import memory as module
from tests import tiny

MIB = 2**20
TOKENS = st.lists(st.integers(0, 3), max_size=60)
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 1.3},
    "several": {"do_sample": True, "seed": 2, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
    "grammar": {"grammar": hfgen.grammar.regex("[a-f]{30}"), "tokenizer": tiny.ascii_tokenizer()},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama())


def by_brute_force(texts: list[list[int]], tail: list[int], n: int) -> list[int]:
    """The draft by the definition: the newest places, the longest suffix, the votes."""
    places = [
        (text, end) for text in texts for end in range(module.KEY, len(text) + 1)
        if text[end - module.KEY : end] == tail[-module.KEY :]
    ][::-1][: module.PLACES]  # fmt: skip
    places = [(text, end) for text, end in places if end < len(text)]

    def length(text: list[int], end: int) -> int:
        pairs = zip(text[:end][::-1], tail[::-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    longest = max((length(*place) for place in places), default=0)
    going_on = [text[end:] for text, end in places if length(text, end) == longest]
    draft: list[int] = []
    probability = 1.0
    while going_on and len(draft) < n:
        token, count = Counter(text[0] for text in going_on).most_common(1)[0]
        probability *= count / len(going_on)
        if probability < module.CONFIDENCE:
            break
        draft.append(token)
        going_on = [text[1:] for text in going_on if text[0] == token and len(text) > 1]
    return draft


@settings(max_examples=int(os.environ.get("HFGEN_FUZZ", 100)), deadline=None)
@given(texts=st.lists(TOKENS, max_size=6), tail=TOKENS, n=st.integers(0, 12))
def test_drafts_are_the_votes_of_the_longest_suffix(
    texts: list[list[int]], tail: list[int], n: int
) -> None:
    memory = SuffixMemory(MIB)
    for text in texts:
        memory.add(text)
    tail = tail[-module.LONGEST :]
    expected = by_brute_force(texts, tail, n) if len(tail) >= module.KEY else []
    assert memory.continuation(tail, n) == expected
    assert len(memory) == sum(map(len, texts))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))]
)
def test_a_copy_is_a_memory_of_its_own(copied: Any) -> None:
    memory = SuffixMemory(MIB)
    memory.add([1, 2, 3, 4, 5])
    other = copied(memory)
    memory.add([1, 2, 3, 6, 6])
    memory.add([1, 2, 3, 6, 6])
    assert (memory.continuation([1, 2, 3], 2), other.continuation([1, 2, 3], 2)) == ([6, 6], [4, 5])


def test_it_forgets_by_bytes_what_was_used_least() -> None:
    memory = SuffixMemory(MIB)
    used, tail = [*range(100, 1100)], [*range(100, 110)]
    memory.add(used)
    assert memory.continuation(tail, 3) == [110, 111, 112]
    for start in range(40):
        memory.add([start * 7 + i * 31 % 4999 + 2000 for i in range(5000)])
        assert memory.nbytes <= MIB
    assert memory.continuation(tail, 3) == [110, 111, 112]
    assert 0 < len(memory) < 40 * 5000
    for start in range(5000):
        memory.add([start][: start % 2])  # a text is more than its tokens
        assert memory.nbytes <= MIB
    memory.clear()
    assert len(memory) == 0
    assert memory.continuation(tail, 3) == []


def test_a_file_has_all_of_it_and_is_private(tmp_path: Path, model: Any) -> None:
    memory = SuffixMemory(MIB)
    model.generate(tiny.prompt(2), max_new_tokens=12, assistant_model=memory)
    memory.save(path := tmp_path / "memory.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [path.name]
    loaded = SuffixMemory.load(path, MIB)
    assert (len(loaded), loaded.vocab) == (len(memory), memory.vocab)
    tail = tiny.prompt(2)[0].tolist()
    assert loaded.continuation(tail, 8) == memory.continuation(tail, 8) != []


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SuffixMemory(MIB)
    memory.save(path := tmp_path / "memory")
    before = path.read_bytes()
    memory.add([3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: os.close(-1))
        for _ in range(2):
            with pytest.raises(OSError, match="Bad file"):
                memory.save(path)
    assert (os.listdir(tmp_path), path.read_bytes()) == ([path.name], before)
    memory.save(path)
    assert len(SuffixMemory.load(path)) == 3


def file_of(**changes: Any) -> bytes:
    tensors = {
        "tokens": torch.arange(6, dtype=torch.int32),
        "lengths": torch.tensor([4, 2]),
        "uses": torch.tensor([0, 1]),
        "vocab": torch.tensor(10),
    }
    tensors |= changes
    return save({name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        (2**60).to_bytes(8, "little") + b"{}",
        file_of()[:-3],
        file_of(tokens=None),
        file_of(tokens=torch.arange(6)),
        file_of(tokens=torch.arange(6, dtype=torch.int32) + 5),
        file_of(tokens=-torch.arange(6, dtype=torch.int32)),
        file_of(lengths=torch.tensor([4, 3])),
        file_of(lengths=torch.tensor([-4, 10])),
        file_of(lengths=torch.tensor([*[2**62] * 4, 6]), uses=torch.zeros(5, dtype=torch.int64)),
        file_of(vocab=torch.tensor(math.inf)),
        file_of(lengths=torch.tensor([[4, 2]])),
        file_of(uses=torch.tensor([1])),
        file_of(vocab=torch.tensor([1, 2])),
    ],
)
def test_a_file_of_another_kind_is_refused(data: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "memory").write_bytes(data)
    with pytest.raises(ValueError, match=r"no file that SuffixMemory\.save has written"):
        SuffixMemory.load(path)


@settings(max_examples=int(os.environ.get("HFGEN_FUZZ", 60)), deadline=None)
@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    data = bytearray(file_of())
    data[place % len(data)] = value
    (path := tmp_path_factory.getbasetemp() / "damaged").write_bytes(data)
    try:
        memory = SuffixMemory.load(path, MIB)
    except ValueError:
        return
    assert len(memory) == 6


@pytest.mark.parametrize("call", CALLS)
def test_no_token_changes_and_a_second_epoch_takes_few_forwards(model: Any, call: str) -> None:
    memory, n_forwards = SuffixMemory(MIB), []
    arguments = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, **CALLS[call]}
    ids = tiny.prompt(3, length=9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :3] = inputs["input_ids"][1, :3] = 0
    plain = model.generate(**inputs, **arguments)
    for _ in range(2):
        output = model.generate(
            **inputs, **arguments, assistant_model=memory,
            return_dict_in_generate=True, output_speculation=True,
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        n_forwards.append(output.speculation.forwards)
    assert n_forwards[1] < n_forwards[0] / 2
    assert 0 < memory.n_accepted <= memory.n_drafted


def test_rows_learn_from_each_other_while_they_decode(model: Any) -> None:
    """A request that begins while the same one decodes drafts what that has generated so far."""
    memory, ids = SuffixMemory(MIB), tiny.prompt(1)
    asked = {"max_new_tokens": 40, "eos_token_id": None, "assistant_model": memory}
    plain = model.generate(ids, max_new_tokens=40, eos_token_id=None)
    engine = hfgen.Engine(model)
    first = engine.add(ids, **asked, output_speculation=True)
    for _ in range(12):
        engine.step()
    second = engine.add(ids, **asked, output_speculation=True)
    outputs = [request.result().generate_output for request in (first, second)]
    assert all(torch.equal(output.sequences, plain) for output in outputs)
    n_forwards = [output.speculation.forwards for output in outputs]
    assert n_forwards[1] < n_forwards[0]


def test_calls_of_several_threads_share_it(model: Any) -> None:
    memory, found = SuffixMemory(MIB), {}
    plain = {seed: model.generate(tiny.prompt(1, 1, seed), max_new_tokens=20) for seed in range(4)}

    def decode(seed: int) -> None:
        for _ in range(3):
            ids = tiny.prompt(1, 1, seed)
            found[seed] = model.generate(ids, max_new_tokens=20, assistant_model=memory)

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in plain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], plain[seed]) for seed in plain)


def test_a_row_that_ends_leaves_no_padding(model: Any) -> None:
    memory, ids = SuffixMemory(MIB), tiny.prompt(2)
    plain = model.generate(ids, max_new_tokens=20, eos_token_id=None)
    rows = plain[:, ids.shape[1] :].tolist()
    eos = next(token for token in rows[0][3:] if token not in rows[1])
    asked = {"max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": 0}
    model.generate(ids, **asked, assistant_model=memory)
    assert len(memory) == ids.numel() + rows[0].index(eos) + 1 + len(rows[1])


def test_wrong_arguments(model: Any) -> None:
    with pytest.raises(TypeError, match="`max_bytes` has to be an integer, but is '9'"):
        SuffixMemory("9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1048576"):
        SuffixMemory(5)
    with pytest.raises(ValueError, match="`token_ids` have to be"):
        SuffixMemory(MIB).add([3, -1])
    memory = SuffixMemory(MIB)
    memory.add([3, 5000])
    with pytest.raises(ValueError, match="a vocabulary of more tokens, and LlamaForCausalLM has"):
        model.generate(tiny.prompt(1), max_new_tokens=4, assistant_model=memory)
    memory.vocab = 7
    with pytest.raises(ValueError, match="a vocabulary of 7 tokens, and LlamaForCausalLM has"):
        model.generate(tiny.prompt(1), max_new_tokens=4, assistant_model=memory)
    with pytest.raises(ValueError, match="`token_ids` have to be 0 to 6"):
        memory.add([7])
