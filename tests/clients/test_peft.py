"""PEFT: adapters chosen per row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

import hfgen
from tests import tiny

PAD = 3  # upstream takes 0 for none in beam search
NAMES = ["first", "second", "__base__"]


@pytest.fixture(scope="module")
def adapted() -> Any:
    """A model with two adapters that matter."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    return model.eval()


def generate(model: Any, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(0)
    ids = tiny.prompt(rows=1).repeat(len(NAMES), 1)
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        adapter_names=NAMES,
        max_new_tokens=8,
        pad_token_id=PAD,
        **kwargs,
    )


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_each_row_has_its_adapter(adapted: Any, both: Callable, mode: dict[str, Any]) -> None:
    theirs, ours = both(lambda: generate(adapted, **mode))
    assert torch.equal(ours, theirs)
    assert len({tuple(row.tolist()) for row in theirs}) >= len(NAMES), "an adapter does nothing"


@pytest.mark.parametrize("n_beams", [1, 3])
def test_rows_keep_their_adapters_when_others_have_ended(adapted: Any, n_beams: int) -> None:
    plain = generate(adapted, num_beams=n_beams)
    ends = [int(row[9]) for row in plain[:1]]  # ends the first row early, and it alone
    mode = {"eos_token_id": ends, "num_beams": n_beams}
    expected = generate(adapted, **mode)
    with hfgen.patched():
        assert torch.equal(generate(adapted, **mode, drop_finished=True), expected)
    lengths = (expected[:, 7:] != PAD).sum(1)
    assert lengths.min() < lengths.max()


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_that_only_generate_applies_are_refused_elsewhere(config: Any) -> None:
    """The model within, which they decode, gives the tokens of a model without adapter."""
    model = hfgen.mix_into(get_peft_model(tiny.llama(), config).eval())
    ids, options = tiny.prompt(rows=1), {"max_new_tokens": 3}
    base = tiny.llama().generate(ids, **options)
    ways: list[Callable[[], Any]] = [
        lambda: [event.token_ids[0] for event in model.stream(ids, **options)],
        lambda: model.generate_batch(ids.tolist(), **options)["req_0"].generated_tokens,
        lambda: next(hfgen.generate_many(model, ids.tolist(), **options)).sequences[0].token_ids,
        lambda: [int(event.token_ids[0]) for event in model.session(ids, **options).step(3)],
        lambda: [event.token_ids[0] for event in hfgen.Session(model, ids, **options).step(3)],
    ]
    for way in ways:
        with pytest.raises(TypeError, match="in its own `generate`"):
            way()
        with model.disable_adapter():
            assert list(way()) == base[0, ids.shape[1] :].tolist()


def test_log_probabilities_are_those_of_the_unpadded_row_and_exact_ones_of_generate() -> None:
    ids, options = tiny.prompt(rows=1), {"logprobs": 0, "return_dict_in_generate": True}
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (padded != 0).long()
    layers = {"r": 2, "init_lora_weights": False}
    learned = get_peft_model(tiny.gpt2(), LoraConfig(**layers, target_modules=["c_attn"])).eval()
    with torch.no_grad():
        expected = hfgen.token_logprobs(learned, ids)
        scored = hfgen.token_logprobs(learned, padded, mask)[:, 3:]
        torch.testing.assert_close(scored, expected, rtol=0, atol=1e-4)

    model = hfgen.mix_into(get_peft_model(tiny.llama(), LoraConfig(**layers)).eval())
    hfgen.exact(model.get_base_model())
    output = model.generate(input_ids=ids, max_new_tokens=4, **options)
    longer = torch.nn.functional.pad(output.sequences, (3, 0))
    with torch.no_grad():
        scored = hfgen.token_logprobs(model, longer, (longer != 0).long())[:, -4:]
    assert torch.equal(scored, output.logprobs.token_logprobs)
    hfgen.restore(model)
    assert not hasattr(model, "exactness")
