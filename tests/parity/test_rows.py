"""Rows of random batches, on random families, equal their solo calls."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.parity.rows import differences, draw_case, of_the_builtin

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, of tiny configs

CASES = sorted(map(draw_case, [random.Random(5)] * 60), key=lambda case: case.family)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.way}-{case.seed}")
def test_rows_equal_solo_calls(case):
    counts = Counter()
    assert differences(case, torch.float32, counts) == []
    assert counts["tokens"] > 0


def test_rows_of_a_trained_model_equal_solo_calls():
    counts = Counter()
    assert of_the_builtin(0, 4, torch.float32, counts) == []
    assert counts["tokens"] > 100
