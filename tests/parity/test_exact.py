"""A part of ``make exact`` in each run of the tests: all ways to decode, the same bits."""

from __future__ import annotations

import pytest

from tests.parity.exact import judge

#: Full attention, windows, experts, a recurrence, learned positions, an encoder with position biases; attention that
#: models compute by themselves, with biases of keys, and windows of buffers.
CASES = [
    ("llama", "float32"),
    ("gemma3_text", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("qwen3_next", "bfloat16"),
    ("gpt2", "bfloat16"),
    ("t5", "float32"),
    ("bloom", "bfloat16"),
    ("gpt_neo", "float32"),
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_rows_have_the_same_bits_in_all_ways(family: str, dtype: str) -> None:
    is_exact, text = judge(family, dtype)
    if is_exact is None and "on this machine" in text:
        pytest.skip(reason=text)
    assert is_exact, text


def test_a_family_with_a_scan_is_refused() -> None:
    is_exact, text = judge("mamba", "float32")
    assert is_exact is None
    assert text.startswith("MambaMixer calls torch's matmul on activations")
