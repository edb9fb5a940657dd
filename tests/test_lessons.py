"""What each lesson of learn/ adds to the twin."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import hfgen
from learn import lessons, show, shrink
from tests import tiny
from tests.parity.harness import FAMILIES, quiet, upstream

PROMPTS = ["def f(x):\n    return x", "import os\nimport", "x", "for i in range(10):\n    print(i"]


def after(number: int) -> ModuleType:
    """The twin after a lesson."""
    return lessons.modules()[number]


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return hfgen.builtin_model()


@pytest.fixture(scope="module")
def ids(builtin: tuple[Any, Any]) -> list[Tensor]:
    """The tokens of each prompt ``(length,)``."""
    return [builtin[1](text, return_tensors="pt")["input_ids"][0] for text in PROMPTS]


@pytest.fixture(scope="module")
def padded(builtin: tuple[Any, Any]) -> dict[str, Tensor]:
    inputs = builtin[1](PROMPTS, return_tensors="pt", padding=True)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Within, collect the rows and columns of each forward pass."""
    shapes: list[tuple[int, int]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()


def new_tokens(twin: ModuleType, model: Any, ids: Tensor, **options: Any) -> list[int]:
    """The new tokens of one prompt ``(length,)``, decoded alone."""
    return twin.generate(model, ids[None], **options)[0, len(ids) :].tolist()


# ---------------------------------------------------------------- 1: streaming


def test_a_stream_has_the_tokens_of_generate(builtin: Any, padded: Any) -> None:
    model, twin = builtin[0], after(1)
    options = {"max_new_tokens": 12, "eos_token_id": [352, 1333, 10], "pad_token_id": 1}
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for row, token in twin.stream(model, **padded, **options):
        rows[row].append(token)
    whole = twin.generate(model, **padded, **options)[:, padded["input_ids"].shape[1] :]
    assert len({len(row) for row in rows}) > 1
    for row, tokens in zip(whole.tolist(), rows, strict=True):
        assert row == tokens + [1] * (len(row) - len(tokens))


def test_a_stream_decodes_when_asked(builtin: Any, ids: Any) -> None:
    model, twin = builtin[0], after(1)
    with forwards(model) as shapes:
        events = twin.stream(model, ids[0][None], max_new_tokens=12)
        assert shapes == []
        next(events)
        assert shapes == [(1, len(ids[0]))]
        assert torch.is_grad_enabled()
        next(events)
        events.close()
        assert shapes[1:] == [(1, 1)]
    with pytest.raises(ValueError, match="num_beams=2"):
        next(twin.stream(model, ids[0][None], num_beams=2))


# ---------------------------------------------------------------- 2: processors


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "top_p": 0.8}])
def test_repetition_is_penalized_as_by_transformers(options: dict[str, Any]) -> None:
    model = upstream("llama")
    inputs = FAMILIES["llama"].inputs(model, 3, False, 1)
    options = {"repetition_penalty": 3.0, "max_new_tokens": 8, "pad_token_id": 1, **options}
    with quiet():
        torch.manual_seed(0)
        theirs = model.generate(**inputs, **options)
    torch.manual_seed(0)
    assert torch.equal(after(2).generate(model, **inputs, **options), theirs)
    torch.manual_seed(0)
    options["repetition_penalty"] = 1.0
    assert not torch.equal(after(2).generate(model, **inputs, **options), theirs)


def test_padding_is_not_penalized() -> None:
    twin, scores = after(2), torch.ones(1, 97)
    batch = twin.Batch(tiny.llama(), torch.tensor([[0, 0, 5]]), torch.tensor([[0, 0, 1]]))
    config = twin.Config(repetition_penalty=2.0)
    assert twin.process(scores, batch, config)[0, :6].tolist() == [1, 1, 1, 1, 1, 0.5]


def test_a_processor_is_a_function_and_a_row(monkeypatch: Any, builtin: Any, ids: Any) -> None:
    model, twin = builtin[0], after(2)
    best = new_tokens(twin, model, ids[0], max_new_tokens=1)

    def ban(scores: Tensor, batch: Any, config: Any) -> Tensor:
        return scores.index_fill(1, torch.tensor(best), -torch.inf)

    row = twin.Processor("num_beams", None, False, ban)  # an option that is never off
    monkeypatch.setattr(twin, "PROCESSORS", [*twin.PROCESSORS, row])
    assert new_tokens(twin, model, ids[0], max_new_tokens=1) != best


# ---------------------------------------------------------------- 3: prefill once


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_sliding", "lfm2"])
def test_sequences_of_a_prompt_are_those_of_transformers(
    family: str, options: dict[str, Any]
) -> None:
    model = upstream(family)
    inputs = FAMILIES[family].inputs(model, 2, True, 1)
    options = {"num_return_sequences": 3, "max_new_tokens": 8, "pad_token_id": 1, **options}
    with quiet():
        torch.manual_seed(0)
        theirs = model.generate(**inputs, **options)
    with quiet(), forwards(model) as shapes:
        torch.manual_seed(0)
        assert torch.equal(after(3).generate(model, **inputs, **options), theirs)
    assert shapes[:2] == [(2, 7), (6, 1)]


# ---------------------------------------------------------------- 4: a growing cache


def test_a_growing_layer_is_a_dynamic_layer() -> None:
    """Whatever is done to both."""
    rng, twin = random.Random(0), after(4)
    mine, theirs, rows = twin.GrowingLayer(), DynamicLayer(), 2
    for _ in range(200):
        action = rng.choice(["update"] * 5 + ["crop", "select", "repeat"])
        length = theirs.get_seq_length()
        if action == "update":
            new = torch.randn(2, rows, 3, rng.randint(1, 3), 4)
            results = [layer.update(*new) for layer in (mine, theirs)]
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        elif action == "crop" and length > 3:
            n_removed = rng.randint(1, 3)
            for layer in (mine, theirs):
                layer.crop(-n_removed)
        elif action == "select" and length:
            indices = torch.tensor([rng.randrange(rows) for _ in range(rng.randint(1, 3))])
            rows = len(indices)
            for layer in (mine, theirs):
                layer.reorder_cache(indices)
        elif action == "repeat" and length and rows < 3:
            rows *= 2
            for layer in (mine, theirs):
                layer.batch_repeat_interleave(2)
        if length:
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


def test_a_growing_layer_rarely_copies() -> None:
    layer, buffers = after(4).GrowingLayer(), set()
    for _ in range(1000):
        layer.update(*torch.zeros(2, 1, 1, 1, 2))
        buffers.add(layer.key_buffer.data_ptr())
    assert len(buffers) <= 10
    assert layer.get_seq_length() == 1000


# ---------------------------------------------------------------- 5: drafts


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}])
def test_drafts_change_no_token(builtin: Any, options: dict[str, Any]) -> None:
    model, tokenizer = builtin
    text = "import sys\nimport os\n" * 4
    prompt = tokenizer(text, return_tensors="pt")["input_ids"][0]
    options = {"max_new_tokens": 24, **options}
    for eos in (None, 200):  # a newline ends within a draft
        torch.manual_seed(1)
        plain = new_tokens(after(5), model, prompt, eos_token_id=eos, **options)
        with forwards(model) as shapes:
            torch.manual_seed(1)
            drafted = new_tokens(
                after(5), model, prompt, eos_token_id=eos, prompt_lookup_num_tokens=6, **options
            )
        assert drafted == plain
        if eos is None:
            assert len(shapes) < 0.9 * len(plain)


@pytest.mark.parametrize("family", ["qwen2_sliding", "gemma2", "gpt2", "bloom"])
def test_rejected_drafts_leave_no_trace(family: str) -> None:
    model = upstream(family)
    prompt = FAMILIES[family].inputs(model, 1, False, 1)["input_ids"]
    prompt = prompt[:, torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 4, 5, 0, 1])]
    plain = after(5).generate(model, prompt, max_new_tokens=20, top_k=4)
    for n in (1, 3, 8):
        drafted = after(5).generate(
            model, prompt, max_new_tokens=20, top_k=4, prompt_lookup_num_tokens=n
        )
        assert torch.equal(drafted, plain)
    with pytest.raises(ValueError, match="got 2 rows"):
        after(5).generate(model, prompt.repeat(2, 1), prompt_lookup_num_tokens=1)


# ---------------------------------------------------------------- 6: continuous batching


def test_rows_that_join_have_the_tokens_of_their_own_call(builtin: Any, ids: Any) -> None:
    model, twin = builtin[0], after(6)
    options = {"max_new_tokens": 12, "eos_token_id": [352, 1333, 10]}
    prompts = [*ids, *reversed(ids)]
    served: list[list[int]] = [[] for _ in prompts]
    with forwards(model) as shapes:
        for request, token in twin.serve(model, prompts, 3, **options):
            served[request].append(token)
    assert served == [new_tokens(twin, model, prompt, **options) for prompt in prompts]
    assert len({len(tokens) for tokens in served}) > 2
    assert max(rows for rows, _ in shapes) == 3
    assert sum(rows for rows, _ in shapes) == sum(map(len, served))  # no row waits


def test_rows_with_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot join"):
        next(after(6).serve(upstream("qwen2_sliding"), [torch.tensor([5])], 2))


# ---------------------------------------------------------------- 7: grammars


def random_regex(twin: ModuleType, rng: random.Random, depth: int) -> tuple[Any, str]:
    """An expression, and how ``re`` spells it."""
    kind = rng.choice(["chars", "seq", "either", "star"]) if depth else "chars"
    if kind == "chars":
        allowed = "".join(rng.sample("ab", rng.randint(1, 2)))
        return twin.chars(allowed), f"[{allowed}]"
    one, its = random_regex(twin, rng, depth - 1)
    if kind == "star":
        return twin.star(one), f"(?:{its})*"
    other, others = random_regex(twin, rng, depth - 1)
    if kind == "seq":
        return twin.seq(one, other), f"(?:{its})(?:{others})"
    return twin.either(one, other), f"(?:{its}|{others})"


def test_a_regex_matches_what_re_matches() -> None:
    rng, twin, matched = random.Random(0), after(7), 0
    for _ in range(300):
        regex, pattern = random_regex(twin, rng, 3)
        for _ in range(10):
            text, state = "".join(rng.choices("ab", k=rng.randint(0, 5))), regex
            for char in text:
                state = twin.after(state, char)
            assert twin.is_complete(state) == bool(re.fullmatch(pattern, text)), (pattern, text)
            matched += twin.is_complete(state)
    assert 300 < matched < 2700


def test_new_text_matches_the_grammar(builtin: Any, ids: Any, padded: Any) -> None:
    model, tokenizer = builtin
    twin = after(7)
    vocabulary = range(model.config.vocab_size)
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in vocabulary]
    digits = twin.seq(twin.chars("123456789"), twin.star(twin.chars("0123456789")))
    grammar = twin.Grammar(twin.seq(twin.chars("["), twin.seq(digits, twin.chars("]"))), texts)
    options = {"grammar": grammar, "max_new_tokens": 16, "pad_token_id": 1}
    torch.manual_seed(0)
    for more in ({}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        inputs = {"input_ids": ids[0][None]} if "prompt_lookup_num_tokens" in more else padded
        out = twin.generate(model, **inputs, **options, **more)[:, inputs["input_ids"].shape[1] :]
        for text in tokenizer.batch_decode(out, skip_special_tokens=True):
            assert re.fullmatch(r"\[[1-9][0-9]*(\])?", text), more
    served: list[list[int]] = [[] for _ in ids]
    for request, token in twin.serve(model, ids, 2, grammar=grammar, max_new_tokens=16):
        served[request].append(token)
    assert served == [
        new_tokens(twin, model, prompt, grammar=grammar, max_new_tokens=16) for prompt in ids
    ]
    assert len(grammar.masks) == 4  # before "[", a digit, digits, and the end


# ---------------------------------------------------------------- 8: seeds


def test_a_seeded_row_does_not_depend_on_its_batch(builtin: Any, ids: Any, padded: Any) -> None:
    model, twin = builtin[0], after(8)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "eos_token_id": None}
    length = padded["input_ids"].shape[1]
    batch = twin.generate(model, **padded, seed=5, **options)[:, length:].tolist()
    served: list[list[int]] = [[] for _ in ids]
    for request, token in twin.serve(model, ids, 2, seed=5, **options):
        served[request].append(token)
    assert served == batch
    alone = new_tokens(twin, model, ids[0], seed=5, **options)
    drafted = new_tokens(twin, model, ids[0], seed=5, prompt_lookup_num_tokens=4, **options)
    assert alone == drafted == batch[0]
    assert new_tokens(twin, model, ids[0], seed=6, **options) != alone
    copies = twin.generate(model, ids[0][None], num_return_sequences=3, seed=5, **options)
    assert copies[0, len(ids[0]) :].tolist() == alone
    assert len({tuple(row) for row in copies.tolist()}) == 3
    with pytest.raises(ValueError, match="beams"):
        twin.generate(model, ids[0][None], num_beams=2, seed=5)


def test_noise_draws_from_the_softmax() -> None:
    twin, n = after(8), 20_000
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    batch = twin.Batch(tiny.llama(), torch.zeros(n, 1, dtype=torch.long), torch.ones(n, 1))
    config = twin.Config(do_sample=True, seed=3)
    for position in range(3):
        batch.n_new[:] = position
        tokens = twin.choose(probabilities.log().expand(n, 4), batch, config)
        shares = tokens.bincount(minlength=4) / n
        assert (shares - probabilities).abs().max() < 0.015  # four standard deviations


# ---------------------------------------------------------------- 9: exact rows


def test_exact_rows_have_the_same_bits_in_any_batch(builtin: Any, ids: Any, padded: Any) -> None:
    model, twin = builtin[0], after(9)
    with torch.no_grad(), twin.ExactRows():
        batch = twin.Batch(model, padded["input_ids"], padded["attention_mask"])
        together = [twin.forward(model, batch)]
        best = together[0].argmax(-1, keepdim=True)
        batch.append(best)
        together.append(twin.forward(model, batch))
        for row, prompt in enumerate(ids):
            alone = twin.Batch(model, prompt[None], torch.ones_like(prompt[None]))
            assert torch.equal(twin.forward(model, alone), together[0][row, None])
            alone.append(best[row, None])
            assert torch.equal(twin.forward(model, alone), together[1][row, None])
            # All columns at once, as a draft is verified, not one after the other:
            whole = torch.cat([prompt, best[row]])[None]
            verified = twin.forward(model, twin.Batch(model, whole, torch.ones_like(whole)), 2)
            assert torch.equal(verified[0], together[0][row])
            assert torch.equal(verified[1], together[1][row])


def test_exact_rows_choose_the_same_tokens(builtin: Any, ids: Any) -> None:
    model, twin = builtin[0], after(9)
    plain = new_tokens(twin, model, ids[0], max_new_tokens=5)
    with twin.ExactRows():
        assert new_tokens(twin, model, ids[0], max_new_tokens=5) == plain


def test_what_is_not_exact_is_refused() -> None:
    prompt = torch.tensor([[5, 6]])
    with after(9).ExactRows(), pytest.raises(NotImplementedError, match="matmul"):
        after(9).generate(upstream("llama"), prompt)  # attends eagerly
    assert isinstance(after(9).growing_cache(upstream("llama")), DynamicCache)


# ---------------------------------------------------------------- the pages


PAGES = sorted(lessons.FOLDER.glob("*.md"))


def prose(page: Path) -> str:
    """The text of a page that nobody computed."""
    return re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)


def test_there_is_a_short_page_for_each_lesson() -> None:
    assert [page.stem for page in PAGES] == [*lessons.LESSONS, "README"]
    assert {
        page.stem: len(prose(page).split())
        for page in PAGES
        if not 250 <= len(prose(page).split()) <= 500
    } == {}
    for lesson in lessons.LESSONS:
        assert f"[{lesson}.diff]({lesson}.diff)" in prose(lessons.FOLDER / f"{lesson}.md")
        assert f"]({lesson}.md)" in prose(lessons.FOLDER / "README.md")


@pytest.mark.parametrize("page", [*lessons.LESSONS, "README"])
def test_values_of_the_pages_are_current(page: str) -> None:
    text = (lessons.FOLDER / f"{page}.md").read_text("utf-8")
    assert text == show.updated(page), "run: python -m learn.show"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Whoever moves a module of hfgen that a page names sees it here."""
    names = set(re.findall(r"`(hfgen(?:\.\w+)+)", page.read_text("utf-8")))
    assert names or page.stem == "README"
    for name in names:
        shrink.find(name)


def test_the_table_of_sizes_has_the_twin_as_it_is() -> None:
    def twins(table: str) -> list[list[str]]:
        rows = [row.split("|") for row in table.splitlines() if row.startswith("| [")]
        return [[row[1], row[-2]] for row in rows]

    text = (lessons.FOLDER / "README.md").read_text("utf-8").partition("<!-- sizes -->")[2]
    assert twins(text) == twins(shrink.table()), "run: python -m learn.shrink"


def test_the_code_of_the_first_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (lessons.FOLDER / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["True"] * 3
