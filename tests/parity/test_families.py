"""The families are what the parity tests take them for: repeatable, distinct and clear-cut."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.parity.decoder_families import DECODER_FAMILIES, NOT_BUILT
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.parity.family import Family

FAMILIES = [*DECODER_FAMILIES, *ENCODER_FAMILIES]

#: Smallest lead of the best token over the second: far above rounding errors (1e-5 at most).
MARGIN = 1e-3

#: Families whose own ``generate`` returns no logits, so that leads cannot be measured.
NO_LOGITS = {
    "bark_semantic",
    "nemotron3_5_asr",
    "nemotron_asr_streaming",
    "parakeet_rnnt",
    "parakeet_tdt",
}


def leads(family: Family, model: torch.nn.Module, padded: bool, seed: int) -> torch.Tensor:
    """How far the best token leads at each step of a greedy run, ``(rows * steps,)``."""
    inputs = family.inputs(model, 2, padded, seed)
    outputs = model.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(outputs.logits, dim=-2).float()  # (rows, steps, vocab)
    best, second = logits.topk(2).values.unbind(-1)
    return (best - second).flatten()


def test_there_are_enough_families() -> None:
    assert len(DECODER_FAMILIES) >= 50
    assert len(FAMILIES) >= 70


def test_names_are_unique() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)


def test_every_causal_language_model_is_built_or_explained() -> None:
    built = {family.build.model for family in DECODER_FAMILIES}
    missing = {
        name for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model not in built
    }
    assert missing - set(NOT_BUILT) == set()
    assert not set(NOT_BUILT) & {family.name for family in DECODER_FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_same_weights_on_every_build(family: Family) -> None:
    before = torch.random.get_rng_state()
    model, again = family.build(), family.build()
    assert torch.random.get_rng_state().equal(before)
    assert not model.training

    weights, others = model.state_dict(), again.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.device.type == "cpu", name
        assert weight.dtype == torch.float32 or not weight.is_floating_point(), name
        assert weight.equal(others[name]), name


CLEAR_CUT = [family for family in FAMILIES if family.name not in NO_LOGITS]


@pytest.mark.parametrize("family", CLEAR_CUT, ids=str)
def test_best_tokens_lead_clearly(family: Family) -> None:
    model = family.build()
    can_pad = family.kind == "decoder" and "padding" not in family.unsupported
    for seed, padded in ((0, False), (1, can_pad)):
        assert leads(family, model, padded, seed).min() >= MARGIN
