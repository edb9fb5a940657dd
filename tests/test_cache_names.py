"""The cache under the names that it had before transformers 5.24."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hfgen
from hfgen.families import CACHE, FORMER_NAMES
from tests import tiny
from tests.parity.harness import FAMILIES
from tests.versions import IS_5_24

pytestmark = pytest.mark.skipif(not IS_5_24, reason="transformers before 5.24 has these names")

IDS = tiny.prompt(1, 6)
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}


def filled(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :4], **{CACHE: cache})
    return cache


@pytest.mark.parametrize("name", sorted(FORMER_NAMES))
def test_a_call_takes_a_former_name_with_a_warning(name: str) -> None:
    outputs = []
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama())):
        with pytest.warns(FutureWarning, match=f"`{name}`.*`{CACHE}`"):
            outputs.append(model.generate(IDS, **OPTIONS, **{name: filled(model)}))
    assert torch.equal(*outputs)
    with pytest.warns(FutureWarning, match=f"`{name}`"):
        stream = model.stream(IDS, **OPTIONS, **{name: filled(model)})
    assert [token for event in stream for token in event.token_ids] == outputs[0][0, 6:].tolist()


def test_of_two_names_the_new_one_counts() -> None:
    model = hfgen.mix_into(tiny.llama())
    with pytest.warns(FutureWarning):
        found = model.generate(
            IDS, **OPTIONS, **{CACHE: filled(model)}, past_key_values=DynamicCache()
        )
    assert torch.equal(found, tiny.llama().generate(IDS, **OPTIONS))


def test_an_override_may_pass_on_the_former_name() -> None:
    class Old(type(tiny.llama())):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            kwargs["past_key_values"] = kwargs.pop(CACHE)
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    model = tiny.llama()
    model.__class__ = hfgen.mix_into(Old)
    with pytest.warns(FutureWarning, match="`past_key_values`.*`cache`") as caught:
        assert torch.equal(model.generate(IDS, **OPTIONS), tiny.llama().generate(IDS, **OPTIONS))
    assert {warning.filename for warning in caught} == {__file__}


def test_an_override_may_make_a_cache_under_the_former_name() -> None:
    class Old(type(tiny.llama())):  # type: ignore[misc]
        def _prepare_cache_for_generation(self, config: Any, kwargs: Any, *_: Any) -> None:
            kwargs.setdefault("past_key_values", DynamicCache(config=self.config))

    model, old = hfgen.mix_into(tiny.llama()), tiny.llama()
    old.__class__ = hfgen.mix_into(Old)
    expected = model.generate(IDS, **OPTIONS)
    for decodes, options in (
        (old, {}),
        (old, {"prefill_chunk_size": 4}),
        (old, {"prompt_lookup_num_tokens": 2}),
        (model, {"assistant_model": old}),
    ):
        with pytest.warns(FutureWarning, match="`past_key_values`"):
            found = decodes.generate(IDS, **OPTIONS, **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [CACHE, *sorted(FORMER_NAMES)])
def test_a_session_refuses_each_name(name: str) -> None:
    model = hfgen.mix_into(tiny.llama())
    with pytest.raises(ValueError, match="a session makes its own cache"):
        model.session(IDS, **{name: DynamicCache()})


@pytest.mark.parametrize("name", ["dory", "inkling2_loop_text"])
def test_a_cache_of_repeated_layers_is_continued(name: str) -> None:
    outputs = []
    for model in (FAMILIES[name].build(), hfgen.mix_into(FAMILIES[name].build())):
        options = OPTIONS | {"return_dict_in_generate": True}
        first = model.generate(IDS % 90 + 3, **options)
        assert len(first[CACHE].layers) > model.config.num_hidden_layers
        more = torch.cat([first.sequences, torch.full((1, 2), 5)], dim=1)
        outputs.append(model.generate(more, **OPTIONS, **{CACHE: first[CACHE]}))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_cache_of_recurrent_states_is_continued(name: str) -> None:
    outputs = []
    for model in (FAMILIES[name].build(), hfgen.mix_into(FAMILIES[name].build())):
        first = model.generate(IDS % 90 + 3, **OPTIONS, return_dict_in_generate=True)
        outputs.append(model.generate(IDS[:, :2], **OPTIONS, **{CACHE: first[CACHE]}))
    assert torch.equal(*outputs)
