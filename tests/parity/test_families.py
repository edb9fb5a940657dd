"""The families are what the parity tests take them for: repeatable, distinct and clear-cut."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.parity.decoder_families import DECODER_FAMILIES, NOT_BUILT
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.parity.family import Family
from tests.parity.harness import upstream
from tests.parity.multimodal_families import MULTIMODAL_FAMILIES
from tests.versions import IS_5_24, since_5_23

FAMILIES = [*DECODER_FAMILIES, *ENCODER_FAMILIES, *MULTIMODAL_FAMILIES]

#: Folders of transformers with a class that generates, and without a family here: the reason.
FOLDERS_NOT_BUILT = {
    "diffusion_gemma": "its own loop denoises blocks of tokens",
    "gemma4_assistant": "drafts from the keys and values of a gemma4, cannot generate alone",
    "gemma4_unified_assistant": "drafts from the keys and values of a gemma4_unified",
    "granite_speech5": "no decoding: an argmax of one forward pass",
    "lasr": "no decoding: an argmax of one forward pass",
}
if IS_5_24:
    FOLDERS_NOT_BUILT["omniasr_ctc"] = "no decoding: an argmax of one forward pass"

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


def folder_of(model_class: type) -> str:
    return model_class.__module__.split(".")[2]


def generating_folders() -> set[str]:
    """The folders of ``transformers.models`` with a class that generates."""
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if "GenerationMixin" in path.read_text(encoding="utf-8"):
            module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            classes = [c for c in vars(module).values() if isinstance(c, type)]
            own = [c for c in classes if c.__module__ == module.__name__]
            if any(issubclass(c, PreTrainedModel) and c.can_generate() for c in own):
                found.add(path.parent.name)
    return found


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


@since_5_23
def test_every_folder_that_generates_is_built_or_explained() -> None:
    built = {folder_of(getattr(transformers, family.build.model)) for family in FAMILIES}
    assert generating_folders() - built == set(FOLDERS_NOT_BUILT)


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
def test_a_family_has_the_same_weights_on_every_build_and_tokens_that_lead_clearly(
    family: Family,
) -> None:
    before = torch.random.get_rng_state()
    model = family.build()
    assert torch.random.get_rng_state().equal(before)
    assert not model.training

    weights, others = model.state_dict(), upstream(family.name).state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.device.type == "cpu", name
        assert weight.dtype == torch.float32 or not weight.is_floating_point(), name
        assert weight.equal(others[name]), name

    # XLM feeds a mask token at each step; since 5.24 it keeps these in its cache, and its logits become constant.
    if family.name not in NO_LOGITS and not (IS_5_24 and family.name == "xlm"):
        can_pad = family.kind == "decoder" and "padding" not in family.unsupported
        for seed, padded in ((0, False), (1, can_pad)):
            assert leads(family, model, padded, seed).min() >= MARGIN
