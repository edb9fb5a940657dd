"""A fixed sample of random combinations of options; ``tests.parity.sweep`` draws larger ones."""

from __future__ import annotations

import pytest

from tests.parity.harness import Case, check
from tests.parity.sweep import by_family, draw

SEED, COUNT = 5, 600


@pytest.mark.parametrize("cases", by_family(draw(SEED, COUNT)), ids=lambda cases: cases[0].family)
def test_combinations(cases: list[Case]) -> None:
    failed = [str(report) for report in map(check, cases) if report.differences]
    assert not failed, "\n".join(failed)
