"""Beams and samples share the prefill of their prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

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
    "drafts": {"prompt_lookup_num_tokens": 3, "do_sample": True, "num_return_sequences": 2},
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
    assert {rows for rows, _ in shapes[1:]} == {2 * n}
    assert {length for _, length in shapes[1:]} <= ({1, 2, 3, 4} if mode == "drafts" else {1})


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


BEAMS_AND_SAMPLES = ("beams", "beam samples", "samples", "groups")


@pytest.mark.parametrize("mode", BEAMS_AND_SAMPLES)
def test_a_callers_cache_is_expanded_after_the_prefill(mode: str) -> None:
    """What follows the cached tokens is forwarded once, and the caller's cache stays as it was."""
    model = hfgen.mix_into(tiny.llama())
    first = model.generate(
        IDS, attention_mask=MASK, max_new_tokens=3, return_dict_in_generate=True, eos_token_id=None
    )
    cache, n_cached = first.past_key_values, first.past_key_values.get_seq_length()
    keys = cache.layers[0].keys.clone()
    ids = torch.cat([first.sequences, torch.tensor([[20, 21, 22], [23, 24, 25]])], dim=1)
    kwargs = MODES[mode] | {"attention_mask": torch.cat([MASK, torch.ones(2, 6).long()], dim=1)}
    torch.manual_seed(0)
    shapes, with_cache = rows_and_lengths(model, ids, past_key_values=cache, **kwargs)
    torch.manual_seed(0)
    assert shapes[0] == (2, ids.shape[1] - n_cached)
    assert torch.equal(with_cache, model.generate(ids, max_new_tokens=4, **kwargs))
    assert cache.get_seq_length() == n_cached
    assert torch.equal(cache.layers[0].keys, keys)


def test_an_empty_cache_of_the_callers_has_a_row_for_each_beam_at_the_end() -> None:
    model, cache = hfgen.mix_into(tiny.llama()), transformers.DynamicCache()
    shapes, _ = rows_and_lengths(
        model, IDS, num_beams=3, past_key_values=cache, attention_mask=MASK, eos_token_id=None
    )
    assert shapes[0][0] == 2
    assert cache.layers[0].keys.shape[0] == 6
    assert cache.get_seq_length() == IDS.shape[1] + 3


@pytest.mark.parametrize("family", ["llama", "gemma2", "jamba", "deepseek_v3", "bart", "blt"])
def test_beams_move_only_what_they_do_not_share(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reordering in place gives what reordering all of the cache gives."""
    from hfgen.caches import rows

    in_place = rows.reorder_beams
    n_moved: list[int] = []

    def both(cache: Any, order: torch.Tensor, is_encoder_decoder: bool) -> None:
        layers = [la for la in rows.decoder_cache(cache).layers if hasattr(la, "_keys")]
        wanted = [(la.keys[order], la.values[order]) for la in layers]
        before = [(la._keys.buffer, la._keys.shared) for la in layers]
        in_place(cache, order, is_encoder_decoder)
        for layer, (buffer, shared), (keys, values) in zip(layers, before, wanted, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
            if shared:  # a window may have left the prompt behind
                assert layer._keys.buffer is buffer
                n_moved.append(keys.shape[-2] - shared)

    monkeypatch.setattr(rows, "reorder_beams", both)
    model = hfgen.mix_into(FAMILIES[family].build())
    model.generate(
        IDS, attention_mask=MASK, num_beams=4, max_new_tokens=12, do_sample=True, eos_token_id=None
    )
    assert 0 < max(n_moved) <= 12


def test_a_kept_view_of_the_cache_is_not_reordered_in_place() -> None:
    from hfgen.caches import rows

    model = hfgen.mix_into(tiny.llama())
    cache = hfgen.caches.dynamic.GrowingCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        rows.repeat(cache, torch.tensor([0, 0, 1, 1]))
        for _ in range(2):
            model(torch.tensor([[7], [8], [9], [10]]), past_key_values=cache)
    kept = cache.layers[0].keys
    copy = kept.clone()
    rows.reorder_beams(cache, torch.tensor([1, 1, 2, 2]), is_encoder_decoder=False)
    assert torch.equal(kept, copy)
    assert torch.equal(cache.layers[0].keys, copy[[1, 1, 2, 2]])
