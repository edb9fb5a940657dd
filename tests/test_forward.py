"""What a forward is given, computed by hand: cut ids, masks and positions, prefills and chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

import hfgen
from hfgen.families import CACHE
from hfgen.running import last_logits, next_token
from tests import tiny
from tests.versions import IS_5_24


@pytest.fixture(scope="module")
def shared() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture
def model(shared: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama that remembers in ``model.fed`` the ids of each forward, and its other arguments."""
    forward, fed = shared.forward, []

    def remember(input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        fed.append((None if input_ids is None else input_ids.tolist(), kwargs))
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(shared, "forward", remember)
    monkeypatch.setattr(shared, "fed", fed, raising=False)
    return shared


IDS = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])


# ---------------------------------------------------------------- arguments of a forward


def test_the_newest_token_is_cut_out(shared: Any) -> None:
    """Of ids, positions and token types; the mask covers the cache, too."""
    inputs = shared.prepare_inputs_for_generation(
        IDS,
        next_sequence_length=1,
        attention_mask=MASK,
        position_ids=POSITIONS,
        token_type_ids=torch.tensor([[1, 1, 2, 3], [4, 5, 6, 7]]),
        use_cache=True,
    )
    assert inputs["input_ids"].tolist() == [[7], [11]]
    assert inputs["position_ids"].tolist() == [[2], [3]]
    assert inputs["token_type_ids"].tolist() == [[3], [7]]
    assert inputs["attention_mask"] is MASK
    assert inputs["use_cache"] is True


def test_everything_is_fed_if_nothing_is_cut(shared: Any) -> None:
    inputs = shared.prepare_inputs_for_generation(IDS, position_ids=POSITIONS)
    assert inputs["input_ids"].equal(IDS)
    assert inputs["input_ids"].data_ptr() != IDS.data_ptr()
    assert inputs["position_ids"] is POSITIONS


def test_what_is_fed_is_contiguous(shared: Any) -> None:
    """Whatever the ids are a view of: a compiled graph sees one layout."""
    wide = torch.arange(20).view(2, 10)
    inputs = shared.prepare_inputs_for_generation(wide[:, :6], next_sequence_length=3)
    assert inputs["input_ids"].tolist() == [[3, 4, 5], [13, 14, 15]]
    assert inputs["input_ids"].stride() == (3, 1)


def test_embeddings_stand_in_for_the_prompt_alone(shared: Any) -> None:
    embeds = torch.randn(2, 4, 32)
    first = shared.prepare_inputs_for_generation(IDS, inputs_embeds=embeds, is_first_iteration=True)
    assert first["input_ids"] is None
    assert first["inputs_embeds"].equal(embeds)
    later = shared.prepare_inputs_for_generation(IDS, next_sequence_length=1, inputs_embeds=embeds)
    assert later["input_ids"].tolist() == [[7], [11]]
    assert "inputs_embeds" not in later


def test_images_are_fed_once(shared: Any) -> None:
    """They are in the cache afterwards; without one, they are needed again."""
    images = torch.zeros(2, 3, 4, 4)

    def names(**kwargs: Any) -> set[str]:
        return set(shared.prepare_inputs_for_generation(IDS, pixel_values=images, **kwargs))

    assert "pixel_values" in names(is_first_iteration=True)
    assert "pixel_values" not in names(is_first_iteration=False)
    assert "pixel_values" in names(is_first_iteration=False, use_cache=False)


def test_a_decoder_has_names_of_its_own() -> None:
    model = hfgen.mix_into(tiny.t5())
    encoder_mask, decoder_mask = torch.ones(2, 9), torch.ones(2, 4)
    inputs = model.prepare_inputs_for_generation(
        IDS,
        next_sequence_length=1,
        attention_mask=encoder_mask,
        decoder_attention_mask=decoder_mask,
    )
    assert inputs["decoder_input_ids"].tolist() == [[7], [11]]
    assert inputs["attention_mask"] is encoder_mask
    assert inputs["decoder_attention_mask"] is decoder_mask
    assert "input_ids" not in inputs


# ---------------------------------------------------------------- from step to step


def updated(model: Any, outputs: ModelOutput, n_new: int = 1, **kwargs: Any) -> dict[str, Any]:
    return model._update_model_kwargs_for_generation(outputs, kwargs, num_new_tokens=n_new)


def test_mask_and_positions_grow(shared: Any) -> None:
    cache = DynamicCache()
    kwargs = updated(
        shared,
        BaseModelOutputWithPast(**{CACHE: cache}),
        3,
        attention_mask=MASK,
        position_ids=POSITIONS,
    )
    assert kwargs["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert kwargs["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert kwargs[CACHE] is cache


def test_token_types_go_on(shared: Any) -> None:
    types = torch.tensor([[0, 1]])
    nothing = ModelOutput()
    kwargs = updated(shared, nothing, token_type_ids=types, mm_token_type_ids=types)
    assert kwargs["token_type_ids"].tolist() == [[0, 1, 1]]
    assert kwargs["mm_token_type_ids"].tolist() == [[0, 1, 0]]
    drafted = updated(shared, nothing, 2, token_type_ids=types)
    assert drafted["token_type_ids"].tolist() == [[0, 1, 0, 1]]  # as upstream's


def test_caches_of_other_names(shared: Any) -> None:
    renamed = {} if IS_5_24 else {CACHE: [1]}  # since 5.24, the models do it themselves
    assert updated(shared, ModelOutput(mems=[1])) == renamed
    if not IS_5_24:
        assert updated(shared, ModelOutput(cache_params=[2]))["cache_params"] == [2]


def test_the_next_token_is_fed(model: Any) -> None:
    """With a cache the newest alone, without one all of them."""
    for use_cache, expected in ((True, [[7], [11]]), (False, IDS.tolist())):
        kwargs = {"use_cache": use_cache, "attention_mask": MASK}
        if use_cache:
            kwargs[CACHE] = filled(model, IDS[:, :3])
        model.fed.clear()
        run = SimpleNamespace(model=model, ids=IDS, model_kwargs=kwargs)
        outputs = next_token(run, model.__call__)
        assert [ids for ids, _ in model.fed] == [expected]
        assert outputs.logits.shape == (2, len(expected[0]), tiny.VOCAB)


def test_last_logits_are_a_float_copy() -> None:
    logits = torch.arange(12, dtype=torch.float16).view(2, 3, 2)
    last = last_logits(ModelOutput(logits=logits), torch.device("cpu"))
    assert last.tolist() == [[4.0, 5.0], [10.0, 11.0]]
    assert last.dtype == torch.float32
    last[0, 0] = 99.0
    assert logits[0, 2, 0] == 4.0


# ---------------------------------------------------------------- prefill


def filled(model: Any, ids: Tensor) -> DynamicCache:
    """A cache of the first tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache}, use_cache=True)
    return cache


def prefilled(model: Any, ids: Tensor, chunk: int | None = None, **kwargs: Any) -> list[Any]:
    """The ids of each forward of a prefill."""
    model.fed.clear()
    config = GenerationConfig(prefill_chunk_size=chunk)
    with torch.no_grad():
        model._prefill(ids, config, kwargs)
    return [ids for ids, _ in model.fed]


def test_a_prompt_is_fed_whole(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    assert prefilled(model, IDS, **{CACHE: cache}, attention_mask=MASK) == [IDS.tolist()]
    assert cache.get_seq_length() == 4


def test_what_the_cache_holds_is_not_fed(model: Any) -> None:
    """The mask says how long the prompt is: its ids, or what of them is new."""
    fed = prefilled(model, IDS, **{CACHE: filled(model, IDS[:, :2])}, attention_mask=MASK)
    assert fed == [[[6, 7], [10, 11]]]
    new = IDS[:, 3:]
    fed = prefilled(model, new, **{CACHE: filled(model, IDS[:, :3])}, attention_mask=MASK)
    assert fed == [[[7], [11]]]


def test_chunks(model: Any) -> None:
    """Each sees the mask so far and its own positions; both are whole again at the end."""
    kwargs = {"attention_mask": MASK, "position_ids": POSITIONS}
    cache = DynamicCache(config=model.config)
    model.fed.clear()
    with torch.no_grad():
        model._prefill(IDS, GenerationConfig(prefill_chunk_size=3), kwargs | {CACHE: cache})
    (first, given), (second, then) = model.fed
    assert (first, second) == ([[0, 5, 6], [8, 9, 10]], [[7], [11]])
    assert given["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert given["position_ids"].tolist() == [[0, 0, 1], [0, 1, 2]]
    assert then["attention_mask"].equal(MASK)
    assert then["position_ids"].tolist() == [[2], [3]]
    assert cache.get_seq_length() == 4


def test_chunks_of_what_is_not_cached(model: Any) -> None:
    cache = filled(model, IDS[:, :1])
    fed = prefilled(model, IDS, 2, **{CACHE: cache}, attention_mask=MASK)
    assert fed == [[[5, 6], [9, 10]], [[7], [11]]]


def test_chunks_need_a_cache(model: Any) -> None:
    with pytest.raises(ValueError, match="`prefill_chunk_size`=2 needs a cache"):
        prefilled(model, IDS, 2)
    assert model.fed == []


@pytest.mark.skipif(IS_5_24, reason="since 5.24, it is the KV cache")
@pytest.mark.parametrize("use_cache", [True, False])
def test_an_argument_named_cache_is_the_models_own(use_cache: bool) -> None:
    seen: list[Any] = []

    class Mine(type(tiny.llama())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
            seen.append(cache)
            return super().forward(input_ids, **kwargs)

    results = []
    for cls in (Mine, hfgen.mix_into(Mine)):
        model = tiny.llama()
        model.__class__ = cls
        results.append(model.generate(IDS, cache="mine", max_new_tokens=3, use_cache=use_cache))
    assert torch.equal(*results)
    assert seen == ["mine"] * 6
