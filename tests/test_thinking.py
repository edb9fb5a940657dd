"""The thinking budget: thoughts that have become too long are closed, wherever they began."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfgen
from hfgen.logits.thinking import ThinkingBudget
from tests import tiny
from tests.scripted import PROMPT, generated, ids_of, model, tokenizer, write
from tests.test_stops import MODES

MARKERS = {"thinking_start": "[t]", "thinking_end": "[/t]"}
IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES)


def forced(budget: int, ids: list[int], prompt_length: int, message: list[int]) -> int | None:
    """What a row has to go on with, by reading it from its start: markers are 1 2 and 3 4."""
    n, is_open, closing = 0, False, [*message, 3, 4]
    for at in range(1, len(ids) + 1):
        n += is_open
        if ids[max(at - 2, 0) : at] == [1, 2]:
            is_open, n = True, 0
        elif ids[max(at - 2, 0) : at] == [3, 4]:
            is_open = False
        if at == prompt_length:
            n = min(n, budget)
    return closing[n - budget] if is_open and n >= budget else None


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(0, 5),
    message=st.sampled_from([[], [7], [7, 8, 9]]),
    ids=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 12, 34]), min_size=1, max_size=30),
    prompt_length=st.integers(0, 8),
    drafts=st.lists(st.lists(st.sampled_from([1, 2, 3, 4, 5]), max_size=3), max_size=30),
)
def test_a_row_is_closed_by_the_count_of_its_tokens(
    budget: int, message: list[int], ids: list[int], prompt_length: int, drafts: list[list[int]]
) -> None:
    """As the processor is called: with each prefix, and with drafts behind it that are rejected."""
    whole = [
        one
        for token in ids
        for one in ([1, 2] if token == 12 else [3, 4] if token == 34 else [token])
    ]
    prompt_length = min(prompt_length, len(whole))
    processor = ThinkingBudget(budget, [1, 2], [3, 4], message, prompt_length)
    row, rest = whole[:prompt_length], whole[prompt_length:]
    while rest:
        scores = processor(torch.tensor([row] if row else [[]]).long(), torch.zeros(1, 10))
        allowed = scores.isfinite().nonzero()[:, 1].tolist()
        expected = forced(budget, row, prompt_length, message)
        assert allowed == (list(range(10)) if expected is None else [expected])
        for n in range(1, len(draft := drafts.pop() if drafts else []) + 1):
            processor(torch.tensor([row + draft[:n]]), torch.zeros(1, 10))
        row.append(rest.pop(0) if expected is None else expected)


@IN_EVERY_MODE
def test_thoughts_are_closed(mode: str) -> None:
    """The forced tokens take the place of the script's, which goes on where it would have been."""
    output = write(
        "[t]abcdefghijklmnopqrst<eos>",
        "ab[t]cd[/t]efghijklmnop<eos>",
        "abcdefghijklmnopqrstuvw<eos>",
        thinking_token_budget=6,
        **MARKERS,
        **MODES[mode],
    )
    assert generated(output) == [
        "[t]abcdef[/t]klmnopqrst<eos>",
        "ab[t]cd[/t]efghijklmnop<eos>",
        "abcdefghijklmnopqrstuvw<eos>",
    ]


def test_a_message_and_thoughts_that_the_prompt_begins() -> None:
    options = {"thinking_token_budget": 3, "thinking_message": ". So", **MARKERS}
    output = write("abcdefghijklm<eos>", prompts=["x[t]yz"], **options)
    assert generated(output, 6) == ["a. So[/t]jklm<eos>"]  # two thoughts are in the prompt
    output = write("abcdefghijklm<eos>", prompts=["x[t]uvwxyz"], **options)
    assert generated(output, 10) == [". So[/t]ijklm<eos>"]
    output = write("abcdefg<eos>", prompts=["[t]yz[/t]"], **options)
    assert generated(output, 9) == ["abcdefg<eos>"]
    output = write("t]abcdefghijklmn<eos>", prompts=["x["], **options)
    assert generated(output, 2) == ["t]abc. So[/t]lmn<eos>"]


def test_prompts_have_budgets_and_markers_of_their_own() -> None:
    configs = [
        hfgen.GenerationConfig(thinking_token_budget=0, **MARKERS),
        hfgen.GenerationConfig(thinking_token_budget=2, **MARKERS),
        hfgen.GenerationConfig(
            thinking_token_budget=1, thinking_start=ids_of("e"), thinking_end=ids_of("!")
        ),
        hfgen.GenerationConfig(),
    ]
    for config in configs:
        config.return_dict_in_generate, config.max_new_tokens = True, 12
    output = write(
        *["[t]abcdefghijk<eos>"] * 4,
        generation_config=configs,
        return_dict_in_generate=None,
        max_new_tokens=None,
    )
    assert generated(output) == ["[t][/t]efghi", "[t]ab[/t]ghi", "[t]abcdef!hi", "[t]abcdefghi"]


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beam_groups": 2, "diversity_penalty": 0.5}]
)
def test_each_beam_has_its_budget(options: dict[str, Any]) -> None:
    output = model().generate(
        torch.tensor([ids_of(PROMPT + "[t]")]),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        thinking_token_budget=3,
        tokenizer=tokenizer(),
        ignore_eos=True,
        **MARKERS,
        **options,
    )
    texts = tokenizer().batch_decode(output[:, len(PROMPT) + 3 :])
    ends = tokenizer().encode("[/t]", add_special_tokens=False)
    assert all(row[3:7] == ends for row in output[:, len(PROMPT) + 3 :].tolist()), texts


def test_a_plain_call_has_no_budget() -> None:
    one = hfgen.mix_into(tiny.llama())
    processors = one._get_logits_processor(hfgen.GenerationConfig(do_sample=False, num_beams=1))
    assert not processors
