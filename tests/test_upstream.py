"""The defects in ``upstream/`` are still there; one that is mended leaves docs/differences.md."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from tests.versions import IS_5_24, since_5_23
from upstream import DEFECTS, Defect
from upstream.table import defect

#: They stay until 5.23 is the past.
MENDED_IN_5_24 = ("cache_implementation_of_a_draft", "training_mode_with_checkpointed_activations")


@since_5_23
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("each", DEFECTS, ids=lambda each: each.check.__name__)
def test_it_is_still_there(each: Defect) -> None:
    state, error = each.state()
    expected = "mended" if IS_5_24 and each.check.__name__ in MENDED_IN_5_24 else "still there"
    assert state == expected, f"{state} {error}: mend docs/differences.md, and drop it here"


@pytest.mark.parametrize("each", DEFECTS, ids=lambda each: each.check.__name__)
def test_it_is_shown_in_ten_lines_and_placed(each: Defect) -> None:
    """Ten lines besides nested functions and classes, which stand for what users write."""
    source = inspect.getsource(each.check)
    (function,) = ast.parse(textwrap.dedent(source)).body
    nested = sum(
        node.end_lineno - node.lineno + 1
        for node in function.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    statements = function.body[1:]  # without the docstring
    assert statements[-1].end_lineno - statements[0].lineno + 1 - nested <= 10
    assert each.name
    assert ".py, " in each.cause or "continuous_batching: " in each.cause
    assert each.mend
    assert each.lines >= 1


def test_a_mended_defect_and_another_error_show() -> None:
    before = [*DEFECTS]
    try:
        passing = defect(ValueError, "wrong", "cause", "mend", 1)(lambda: None)
        failing = defect(ValueError, "wrong", "cause", "mend", 1)(lambda: int("x"))
        states = {d.check: d.state() for d in DEFECTS if d not in before}
        assert states[passing] == ("mended", "")
        assert states[failing][0] == "fails otherwise"
        assert "invalid literal" in states[failing][1]
    finally:
        DEFECTS[:] = before
