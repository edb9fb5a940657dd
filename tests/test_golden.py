"""The strategies that transformers 4.49.0 had, against what it made of them: `tests/golden/`.

Each family runs an eighth of its cases, another one than the next family. `HFGEN_GOLDEN_EVERY=1`
runs them all.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hfgen
from tests.golden import models

MODES = ("contrastive", "dola", "group_beam", "constrained_beam")
FOLDER = Path(models.__file__).parent
GOLDEN: dict[str, Any] = {
    mode: json.loads((FOLDER / f"{mode}.json").read_text(encoding="utf-8")) for mode in MODES
}
FAMILIES = [(mode, name) for mode in MODES for name in GOLDEN[mode]["families"]]
EVERY_FAMILY = {name: mode for mode, name in reversed(FAMILIES)}

#: Each family runs every so many of its cases.
EVERY = int(os.environ.get("HFGEN_GOLDEN_EVERY", "8"))

#: Floats were rounded to five digits.
TOLERANCE = 2e-4


def built(mode: str, name: str) -> Any:
    family = GOLDEN[mode]["families"][name]
    parts = ("model", "config", "fields", "seed", "spread", "gain")
    return _build(json.dumps({part: family[part] for part in parts}))


@cache
def _build(description: str) -> Any:
    return hfgen.mix_into(models.build(json.loads(description)))


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**models.inputs(inputs), **options)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_models_are_those_of_the_golden_files(name: str) -> None:
    """If this fails, the model is another one, and nothing is wrong with a strategy."""
    family = GOLDEN[EVERY_FAMILY[name]]["families"][name]
    model = built(EVERY_FAMILY[name], name)
    inputs = models.inputs(family["inputs"]["single"])
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[family["fields"]["decoder_start_token_id"]]])
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1, :8]
    expected = torch.tensor(family["reference"]["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    padded = family["inputs"]["padded"]
    assert generate(model, padded).tolist() == family["reference"]["greedy"]
    assert generate(model, padded, num_beams=3).tolist() == family["reference"]["beam"]


@pytest.mark.parametrize(("mode", "name"), FAMILIES, ids=map("-".join, FAMILIES))
def test_same_as_4_49(mode: str, name: str) -> None:
    family = GOLDEN[mode]["families"][name]
    offset = list(GOLDEN[mode]["families"]).index(name) % EVERY
    wrong = []
    for case in family["cases"][offset::EVERY]:
        torch.manual_seed(case.get("seed", 0))
        inputs = family["inputs"][case["inputs"]]
        model = built(mode, name)
        output = generate(model, inputs, return_dict_in_generate=True, **case["kwargs"])
        is_encoder_decoder = model.config.is_encoder_decoder
        case["prompt_length"] = 1 if is_encoder_decoder else len(inputs["input_ids"][0])
        wrong += [
            f"{case['inputs']} {case['kwargs']}: {line}" for line in differences(output, case)
        ]
    assert not wrong, "\n" + "\n".join(wrong)


def differences(output: Any, case: dict[str, Any]) -> list[str]:
    """What of a golden case the output does not have; empty if nothing."""
    if "force_words_ids" in case["kwargs"]:
        return constrained_differences(output, case)
    found = []
    if output.sequences.tolist() != case["sequences"]:
        found.append(f"sequences\n  {output.sequences.tolist()}\n  {case['sequences']}")
    if "n_scores" in case and len(output.scores) != case["n_scores"]:
        found.append(f"{len(output.scores)} scores, not {case['n_scores']}")
    if "scores" in case:
        scores = torch.stack([step[:, :6] for step in output.scores[:2]])
        found += far_apart("scores", scores, case["scores"])
    if "sequences_scores" in case:
        found += far_apart("sequences_scores", output.sequences_scores, case["sequences_scores"])
    # Within groups, 4.49.0 counts beams from the group's first, not rows.
    if "beam_indices" in case and "num_beam_groups" not in case["kwargs"]:
        indices = output.beam_indices
        expected = torch.tensor(case["beam_indices"])[:, : indices.shape[1]]  # the rest is -1
        if not torch.equal(indices, expected.to(indices.dtype)):
            found.append(f"beam_indices\n  {indices.tolist()}\n  {expected.tolist()}")
    return found


def constrained_differences(output: Any, case: dict[str, Any]) -> list[str]:
    """The same for forced words, prompt by prompt.

    Where 4.49.0 returns a sequence that lacks a word, or took the prompt for a part of the output,
    it is no reference (docs/differences.md): what is returned has to have the words.
    """
    kwargs, n_prompt = case["kwargs"], case["prompt_length"]
    words = [word if isinstance(word[0], list) else [word] for word in kwargs["force_words_ids"]]
    n = kwargs.get("num_return_sequences", 1)
    sequences, golden = output.sequences.tolist(), case["sequences"]
    found = []
    for start in range(0, len(sequences), n):
        rows = range(start, start + n)
        if not all(has_all(words, sequences[row][n_prompt:]) for row in rows):
            found.append(f"a word is missing in rows {rows}\n  {sequences}")
        in_prompt = any(p[0] in golden[start][:n_prompt] for word in words for p in word)
        if in_prompt or not all(has_all(words, golden[row][n_prompt:]) for row in rows):
            continue
        for row in rows:
            if without_padding(sequences[row]) != without_padding(golden[row]):
                found.append(f"row {row}\n  {sequences[row]}\n  {golden[row]}")
            elif "sequences_scores" in case:
                score, expected = output.sequences_scores[row], case["sequences_scores"][row]
                found += far_apart("score", score, expected)
    return found


def has_all(words: list[list[list[int]]], text: list[int]) -> bool:
    return all(has_one_of(phrases, text) for phrases in words)


def has_one_of(phrases: list[list[int]], text: list[int]) -> bool:
    return any(
        text[start : start + len(phrase)] == phrase
        for phrase in phrases
        for start in range(len(text))
    )


def without_padding(ids: list[int]) -> list[int]:
    """Without the padding on the right, of which a row has as much as others are longer."""
    while ids and ids[-1] == 0:
        ids = ids[:-1]
    return ids


def far_apart(name: str, values: torch.Tensor, golden: list[Any]) -> list[str]:
    expected = torch.tensor(numbers(golden))
    if values.shape == expected.shape and torch.allclose(
        values, expected, rtol=TOLERANCE, atol=TOLERANCE
    ):
        return []
    return [f"{name}\n  {values.tolist()}\n  {golden}"]


def numbers(value: Any) -> Any:
    """Lists of numbers, of which JSON has the infinite ones as text."""
    return [numbers(item) for item in value] if isinstance(value, list) else float(value)


@pytest.mark.parametrize("mode", MODES)
def test_golden_files_cover_enough(mode: str) -> None:
    """Twelve families that have most of their cases, in the release that they are said to be from."""
    golden = GOLDEN[mode]
    assert golden["provenance"]["transformers"] == "4.49.0"
    families = golden["families"].values()
    full = [family for family in families if len(family["cases"]) > len(family["skipped"])]
    assert len(full) >= 12
