"""Beams and samples share the prefill of their prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hfgen
from tests import tiny
from tests.parity.harness import FAMILIES

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [0, 0, 5, 6, 7, 8]])
MASK = (IDS != 0).long()


def rows_and_lengths(model: Any, inputs: Any, **kwargs: Any) -> tuple[list[tuple], Any]:
    """The shapes of the ids that the decoder is fed, forward by forward, and the output."""
    shapes: list[tuple] = []
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    hook = model.register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given[name].shape)), with_kwargs=True
    )
    with hook:
        output = model.generate(inputs, max_new_tokens=4, **kwargs)
    return shapes, output


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "several of the beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 4},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "forced words": {"num_beams": 3, "force_words_ids": [[20]]},
    "DoLa": {"dola_layers": "high", "do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_forwarded_once(mode: str, cache: str) -> None:
    model = hfgen.mix_into(tiny.llama())
    kwargs = MODES[mode] | {"cache_implementation": cache, "attention_mask": MASK}
    torch.manual_seed(0)
    shapes, _ = rows_and_lengths(model, IDS, **kwargs)
    n = max(kwargs.get("num_beams", 1), kwargs.get("num_return_sequences", 1))
    assert shapes[0] == (2, 6)
    assert set(shapes[1:]) == {(2 * n, 1)}


@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_tokens_are_those_of_expanded_prompts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hfgen import fanout

    model = hfgen.mix_into(tiny.llama())
    kwargs = MODES[mode] | {"attention_mask": MASK, "return_dict_in_generate": True}
    outputs = []
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(fanout, "_can_fan_out", lambda *_: False)
        torch.manual_seed(0)
        shapes, output = rows_and_lengths(model, IDS, output_scores=True, **kwargs)
        assert (shapes[0][0] == 2) is allowed
        outputs.append(output)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for shared, expanded in zip(outputs[0].scores, outputs[1].scores, strict=True):
        torch.testing.assert_close(shared, expanded)


def test_the_decoder_of_an_encoder_decoder_is_shared_too() -> None:
    model = hfgen.mix_into(tiny.bart())
    shapes, output = rows_and_lengths(model, IDS, num_beams=3, attention_mask=MASK)
    assert shapes[0] == (2, 1)
    assert shapes[1] == (6, 1)
    torch.testing.assert_close(
        output, tiny.bart().generate(IDS, num_beams=3, attention_mask=MASK, max_new_tokens=4)
    )


def test_models_that_remember_rows_elsewhere_are_not_shared() -> None:
    model = hfgen.mix_into(FAMILIES["recurrent_gemma"].build())
    shapes, _ = rows_and_lengths(model, IDS[:1] % 60 + 5, num_beams=2)
    assert shapes[0][0] == 2


def test_a_callers_hook_sees_its_rows() -> None:
    """Who overrides how rows are expanded may do more than repeat them."""

    class Mine(type(tiny.llama())):
        def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super()._expand_inputs_for_generation(*args, **kwargs)

    model = hfgen.mix_into(tiny.llama())
    model.__class__ = hfgen.mix_into(Mine)
    shapes, _ = rows_and_lengths(model, IDS, num_beams=2, attention_mask=MASK)
    assert shapes[0][0] == 4
