"""The tables of docs/controls.md say what is so; its code runs in tests/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hfgen.logits.logprobs.result import MODES
from hfgen.settings.fields import FIELDS, OWN_FIELDS, PER_ROW, PRESETS
from hfgen.settings.vllm import PARAMS
from tests.test_vllm import TAKEN

PAGE = (Path(__file__).parent.parent / "docs" / "controls.md").read_text(encoding="utf-8")

#: The parameters of TGI's ``generate``, as its API has them.
TGI = """
    adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar
    max_new_tokens repetition_penalty return_full_text seed stop temperature top_k top_n_tokens
    top_p truncate typical_p watermark
""".split()


def rows_of(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading, without the tables' first rows."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip(" |") for cell in row] for row in rows]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


CONTROLS = rows_of("The controls")


def test_every_field_of_its_own_is_a_control() -> None:
    named = {name for row in CONTROLS for name in names_in(row[0])}
    assert OWN_FIELDS.keys() <= named
    assert named <= FIELDS.keys()


@pytest.mark.parametrize("row", CONTROLS, ids=lambda row: row[0])
def test_what_holds_per_row(row: list[str]) -> None:
    assert row[-1] in ("row", "call")
    for name in names_in(row[0]):
        assert (name in PER_ROW) == (row[-1] == "row"), name


def test_values_are_named() -> None:
    described = {name: row[1] for row in CONTROLS for name in names_in(row[0])}
    assert all(f'"{mode}"' in described["logprobs_mode"] for mode in MODES)
    assert all(f'"{preset}"' in described["sampler_order"] for preset in PRESETS)
    for name in ("thinking_start", "thinking_end"):
        assert f"`{OWN_FIELDS[name]}`" in described[name]


def test_every_field_of_vllm() -> None:
    rows = [(names_in(row[0]), row[1]) for row in rows_of("Coming from vLLM")]
    assert sorted(name for names, _ in rows for name in names) == sorted(PARAMS)
    for names, says in rows:
        for name in names:
            if PARAMS[name].reason is not None:
                assert says == "refused"  # its error has the reason
            elif says == "the same":
                assert name in FIELDS
                assert TAKEN[name][1].keys() == {name}
            else:
                fields = TAKEN[name][1]
                assert all(re.search(rf"`{field}\b", says) for field in fields), name
                assert fields or "nothing" in says


def test_every_parameter_of_tgi() -> None:
    rows = rows_of("Coming from TGI")
    assert sorted(name for row in rows for name in names_in(row[0])) == sorted(TGI)
    for names, says in ((names_in(row[0]), row[1]) for row in rows):
        assert set(names) <= FIELDS.keys() or not says.startswith("the same")
