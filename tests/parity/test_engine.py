"""Requests of an engine, on random families, equal their solo calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import hfgen
from tests.parity.engine import ENTANGLED, EngineCase, differences, draw_cases
from tests.parity.harness import FAMILIES, quiet

FAMILIES_OF_TEXT = [
    family.name
    for family in FAMILIES.values()
    if family.kind in ("decoder", "encoder-decoder") and family.name not in ENTANGLED
]

#: Each of a kind of rows: what ignores padding, selects keys, has states, other names of caches, windows.
OF_EACH_KIND = "bart blt deepseek_v32 mamba qwen3_next gemma3_text prophetnet t5 llava".split()

CASES = [EngineCase(name, 3) for name in OF_EACH_KIND if name in FAMILIES]
#: Cases that have differed once.
CASES += [
    EngineCase("openai-gpt", 223007),
    EngineCase("openai-gpt", 635060),
    EngineCase("roformer", 267025),
    EngineCase("speech_to_text", 847096),
    EngineCase("xlm", 165807),
]
CASES += [EngineCase("pp_formulanet", 641029)] if "pp_formulanet" in FAMILIES else []
CASES += draw_cases(11, 24, FAMILIES_OF_TEXT)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.seed}")
def test_requests_equal_solo_calls(case: EngineCase) -> None:
    counts = Counter[str]()
    with quiet(), torch.no_grad():
        assert differences(case, counts) == []
    assert counts["tokens"] > 0 or any(what.startswith("refused") for what in counts)


@pytest.mark.parametrize("name", ["prophetnet", "prophetnet_seq2seq"])
def test_no_mask_is_added_where_it_would_overflow(name: str) -> None:
    """ProphetNet's masks in float64 are -inf in its softmax in float32."""
    model = hfgen.mix_into(FAMILIES[name].build().to(torch.float64))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    asked = {"max_new_tokens": 6, "do_sample": False}
    alone = [model.generate(torch.tensor([ids]), **asked)[0, -6:].tolist() for ids in prompts]
    outputs = hfgen.generate_many(model, prompts, **asked)
    assert [output.token_ids[-6:] for output in outputs] == alone
