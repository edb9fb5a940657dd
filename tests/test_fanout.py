"""Beams and samples share the prefill of their prompt."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import accelerate
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfgen
from hfgen.families import CACHE
from hfgen.settings.logs import logger
from tests import tiny
from tests.parity.harness import FAMILIES
from tests.versions import with_cache

IDS = torch.tensor([[11, 12, 13, 14, 15, 16], [0, 0, 5, 6, 7, 8]])
MASK = (IDS != 0).long()


def rows_and_lengths(model: Any, inputs: Any, **kwargs: Any) -> tuple[list[tuple], Any]:
    """The shapes of the ids that the decoder is fed, forward by forward, and the output."""
    shapes: list[tuple] = []
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"

    def watch(module: Any, args: tuple, given: dict[str, Any]) -> None:
        shapes.append(tuple(given[name].shape))

    watch.is_row_wise = True  # else rows would not share their prompt
    with model.register_forward_pre_hook(watch, with_kwargs=True):
        output = model.generate(inputs, max_new_tokens=4, **kwargs)
    return shapes, output


def test_images_of_a_prompt_stay_in_order() -> None:
    """GLM-4V repeats images one by one for rows, and gives upstream's second image of a row to the first place."""
    model, n_images = FAMILIES["glm4v"].build(), 2
    inputs = FAMILIES["glm4v"].inputs(model, n_images, False, 0)
    for name in ("input_ids", "mm_token_type_ids"):
        inputs[name] = inputs[name].flatten()[None]  # one prompt with both images
    call = {**inputs, "max_new_tokens": 6}
    alone = model.generate(**call)
    samples = {**call, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert model.generate(**samples).tolist() != [*alone.tolist()] * 2
    assert hfgen.mix_into(model).generate(**samples).tolist() == [*alone.tolist()] * 2


@pytest.mark.parametrize("fraction", [0.25, 0.0])
def test_rows_that_compete_for_experts_do_not_share_their_prompt(fraction: float) -> None:
    """NLLB-MoE's experts take a fraction of a forward's tokens, of all rows together, or a fixed number."""
    model = FAMILIES["nllb_moe"].build()
    for module in model.modules():
        if hasattr(module, "moe_eval_capacity_token_fraction"):
            module.moe_eval_capacity_token_fraction = fraction
            module.expert_capacity = 9
    inputs = FAMILIES["nllb_moe"].inputs(model, 2, False, 0)
    call = {**inputs, "decoder_input_ids": IDS, "num_beams": 3, "max_new_tokens": 4}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    theirs = model.generate(**call)
    mine = hfgen.mix_into(model).generate(**call)
    assert torch.equal(mine.sequences, theirs.sequences)
    torch.testing.assert_close(mine.logits, theirs.logits)


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
    from hfgen.running import prompts

    model = hfgen.mix_into(tiny.llama())
    kwargs = MODES[mode] | {"attention_mask": MASK, "return_dict_in_generate": True}
    outputs = []
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(prompts, "_can_fan_out", lambda *_: False)
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


def test_models_that_remember_rows_elsewhere_are_not_shared(monkeypatch) -> None:
    from hfgen.running import prompts

    monkeypatch.setattr(prompts, "_NOT_SHARED", WeakSet())  # other tests have found out
    upstream = FAMILIES["recurrent_gemma"].build()
    model, ids = hfgen.mix_into(FAMILIES["recurrent_gemma"].build()), IDS[:1] % 60 + 5
    expected = upstream.generate(ids, num_beams=2, max_new_tokens=4)
    for n_rows in ([1, 2, 2, 2, 2], [2, 2, 2, 2]):  # the first call finds out
        shapes, output = rows_and_lengths(model, ids, num_beams=2)
        assert [rows for rows, _ in shapes] == n_rows
        assert torch.equal(output, expected)


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
    from hfgen.memory.caches import layers as rows

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
    from hfgen.memory.caches import layers as rows

    model = hfgen.mix_into(tiny.llama())
    cache = hfgen.memory.caches.dynamic.GrowingCache(config=model.config)
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


# ---------------------------------------------------------------- what counts on a row per sequence


class PositionsOnModules(transformers.LlamaForCausalLM):
    """Keeps positions of its rows on a module from the prefill on, as GLM-Image does."""

    @with_cache
    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        n_cached = past_key_values.get_seq_length()
        if n_cached == 0:
            mask = kwargs["attention_mask"]
            self.model.positions = (mask.cumsum(-1) - 1).clamp(min=0)
            positions = self.model.positions
        else:
            # Not by broadcasting: there has to be one row for each.
            last = self.model.positions[:, -1:] + torch.ones_like(input_ids) * (
                n_cached - self.model.positions.shape[1] + 1
            )
            assert len(self.model.positions) == len(input_ids)
            positions = last
        return super().forward(
            input_ids, **{CACHE: past_key_values}, position_ids=positions, **kwargs
        )


def with_positions() -> Any:
    model = tiny.llama()
    model.__class__ = PositionsOnModules
    return model


@pytest.mark.parametrize("is_given", [False, True], ids=["own cache", "caller's cache"])
@pytest.mark.parametrize("mode", ["beams", "samples", "beam samples"])
def test_positions_that_the_prefill_leaves_on_a_module(mode: str, is_given: bool) -> None:
    kwargs = MODES[mode] | {"attention_mask": MASK, "max_new_tokens": 6}
    results = []
    for model in (with_positions(), hfgen.mix_into(with_positions())):
        cache = {CACHE: transformers.DynamicCache()} if is_given else {}
        torch.manual_seed(0)
        results.append(model.generate(IDS, **kwargs, **cache))
        if is_given:
            assert cache[CACHE].get_seq_length() == IDS.shape[1] + 5
    assert torch.equal(*results)
    shapes, _ = rows_and_lengths(model, IDS, **MODES[mode], attention_mask=MASK)
    assert shapes[0][0] == len(IDS) * max(
        MODES[mode].get(name, 1) for name in ("num_beams", "num_return_sequences")
    )


def test_positions_on_a_module_behind_a_prompt_that_is_cached() -> None:
    """What the prefill added to a filled cache is taken back before rows are forwarded one by one."""

    class Fresh(PositionsOnModules):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            self.model.seen = input_ids.clone()
            kwargs["attention_mask"] = None
            return transformers.LlamaForCausalLM.forward(self, input_ids, **kwargs)

    ids = IDS[:1]
    results = []
    for mix in (lambda model: model, hfgen.mix_into):
        model = tiny.llama()
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
        model.__class__ = Fresh
        model = mix(model)
        if model.__class__ is Fresh:  # upstream's needs a row for each beam
            cache.batch_repeat_interleave(3)
        results.append(model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=5))
    assert torch.equal(*results)


def test_a_hook_of_the_callers_sees_a_row_for_each_beam() -> None:
    model, n_rows = hfgen.mix_into(tiny.llama()), []
    kwargs = {"num_beams": 3, "max_new_tokens": 4, "attention_mask": MASK}
    expected = model.generate(IDS, **kwargs)

    def per_row(module: Any, args: tuple) -> None:
        n_rows.append(len(args[0]))

    model.model.layers[0].mlp.register_forward_pre_hook(per_row)
    assert torch.equal(model.generate(IDS, **kwargs), expected)
    assert set(n_rows) == {6}
    n_rows.clear()
    per_row.is_row_wise = True
    assert torch.equal(model.generate(IDS, **kwargs), expected)
    assert n_rows[0] == 2


def test_a_list_with_an_entry_per_row_is_of_rows() -> None:
    """Upstream repeats tensors only, so such a list is the caller's, for all rows."""

    class Named(type(tiny.llama())):
        def forward(self, input_ids: Any, names: Any = None, **kwargs: Any) -> Any:
            assert len(names) == len(input_ids)
            return super().forward(input_ids, **kwargs)

    model = hfgen.mix_into(tiny.llama())
    kwargs = {"num_beams": 2, "max_new_tokens": 4}
    expected = model.generate(IDS, attention_mask=torch.ones_like(IDS), **kwargs)
    model.__class__ = hfgen.mix_into(Named)
    assert torch.equal(model.generate(IDS, names=list("abcd"), **kwargs), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"drop_finished": True}],
    ids=lambda options: next(iter(options)),
)
def test_adapters_per_row(options: dict[str, Any]) -> None:
    """PEFT hooks into each adapted layer, with one adapter's name for each row."""
    peft = pytest.importorskip("peft")

    def adapted(base: Any) -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config, adapter_name="one")
        model.add_adapter("two", config)
        return model.eval()

    names = ["one", "two"]
    if "num_return_sequences" in options:
        names = ["one", "one", "two", "two"]
    kwargs = {
        "attention_mask": MASK,
        "max_new_tokens": 6,
        "adapter_names": names,
        "eos_token_id": 7,
    }
    plain = {name: value for name, value in options.items() if name != "drop_finished"}
    results = []
    for model, asked in ((tiny.llama(), plain), (hfgen.mix_into(tiny.llama()), options)):
        torch.manual_seed(0)
        results.append(adapted(model).generate(input_ids=IDS, **kwargs, **asked))
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}], ids=str)
def test_a_great_length_takes_no_memory(options: dict[str, Any]) -> None:
    """A beam is as long as its tokens; what may still come is not allocated."""
    model = hfgen.mix_into(tiny.llama())
    kwargs = {"num_beams": 2, "attention_mask": MASK, "eos_token_id": None, "pad_token_id": 0}
    limit = [transformers.MaxLengthCriteria(10)]
    output = model.generate(IDS, max_length=10**12, stopping_criteria=limit, **kwargs, **options)
    assert torch.equal(output, model.generate(IDS, max_length=10, **kwargs, **options))


# ---------------------------------------------------------------- noise, and states of the model's own


class Noisy(transformers.LlamaForCausalLM):
    """Adds noise to its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + torch.randn_like(outputs.logits)
        return outputs


class NoisyButDeclared(Noisy):
    """Says that it is row-wise, and is not: its draws are found out, and taken back."""

    is_row_wise = True


class WithField(transformers.LlamaForCausalLM):
    """Carries an output of its own from step to step."""

    def forward(
        self, input_ids: Any, attention_mask: Any = None, own_states: Any = None, **kwargs: Any
    ) -> Any:
        outputs = super().forward(input_ids, attention_mask, **kwargs)
        states = outputs.logits[:, -1:] if own_states is None else own_states[0] / 2
        assert len(states) == len(input_ids)
        outputs.logits = outputs.logits + states
        outputs["own_states"] = [outputs.logits[:, -1:]]
        return outputs

    def prepare_inputs_for_generation(
        self, *args: Any, own_states: Any = None, **kwargs: Any
    ) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"own_states": own_states}

    def _update_model_kwargs_for_generation(self, outputs: Any, kwargs: Any, **others: Any) -> Any:
        kwargs = super()._update_model_kwargs_for_generation(outputs, kwargs, **others)
        return kwargs | {"own_states": outputs["own_states"]}


class WithList(transformers.LlamaForCausalLM):
    """Keeps the rows of its forwards in a list, and attends to none but those."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        if kwargs[CACHE].get_seq_length() == 0:
            self.seen = []
        self.seen.append(input_ids[:, -1])
        outputs = super().forward(input_ids, **kwargs)
        for tokens in self.seen:
            outputs.logits[torch.arange(len(input_ids)), -1, tokens] -= 1.0
        return outputs


class Memory:
    """An object of an attention layer, as H2O and SnapKV patch them in."""

    mean: torch.Tensor

    def follow(self, states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] > 1:
            self.mean = states.mean(1, keepdim=True)
        assert len(self.mean) == len(states)
        self.mean = (self.mean + states[:, -1:]) / 2
        return states + self.mean


def attention_with_memory(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not hasattr(self, "memory"):
        self.memory = Memory()
    return PLAIN_ATTENTION(self, self.memory.follow(hidden_states), *args, **kwargs)


PLAIN_ATTENTION = transformers.models.llama.modeling_llama.LlamaAttention.forward


class Follow(accelerate.hooks.ModelHook):
    """A hook of accelerate's kind, of the caller's, with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def post_forward(self, module: Any, output: Any) -> Any:
        return self.memory.follow(output)


def as_class(cls: type) -> Any:
    model = tiny.llama()
    model.__class__ = cls
    return model


def with_own_forward() -> Any:
    model, memory = tiny.llama(), Memory()
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda states: forward(memory.follow(states))
    return model


def with_model_hook() -> Any:
    model = tiny.llama()
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, Follow())
    return model


def with_patched_attention() -> Any:
    model = tiny.llama()
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(attention_with_memory, layer.self_attn)
    return model


def with_registered_attention() -> Any:
    """An attention function that is registered by name, and keeps what it has seen on the layer."""

    def attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)
        if output.shape[1] > 1:
            module.memory = Memory()
        return module.memory.follow(output.flatten(2)).view_as(output), weights

    transformers.AttentionInterface.register("with_memory", attention)
    model = tiny.llama()
    model.config._attn_implementation = "with_memory"
    return model


def with_adapter_that_trains() -> Any:
    """LoRA with dropout in the adapters alone."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = tiny.llama()
    peft.inject_adapter_in_model(config, model)
    for module in model.modules():
        module.train("Dropout" in type(module).__name__)
    return model


OWN: dict[str, Callable[[], Any]] = {
    "trains": lambda: tiny.gpt2().train(),  # with the dropout of its config, 0.1
    "adapter trains": with_adapter_that_trains,
    "noise": lambda: as_class(Noisy),
    "noise, declared row-wise": lambda: as_class(NoisyButDeclared),
    "output field": lambda: as_class(WithField),
    "list": lambda: as_class(WithList),
    "own forward of a layer": with_own_forward,
    "accelerate hook": with_model_hook,
    "patched attention of layers": with_patched_attention,
    "registered attention": with_registered_attention,
}


@pytest.mark.parametrize("mode", [*BEAMS_AND_SAMPLES[:3], "several of the beams", "greedy"])
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_what_is_not_known_to_be_row_wise_is_not_shared(
    make: Callable[[], Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfgen.running import prompts

    monkeypatch.setattr(prompts, "_NOT_SHARED", WeakSet())
    kwargs = {"attention_mask": MASK, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    kwargs |= {"return_dict_in_generate": True, "output_logits": True} | MODES.get(mode, {})
    results = []
    for mix in (lambda model: model, hfgen.mix_into):
        model = mix(make())
        torch.manual_seed(3)
        outputs = model.generate(IDS, **kwargs)
        results.append((outputs.sequences, outputs.logits[0], torch.get_rng_state()))
    for theirs, mine in zip(*results, strict=True):
        assert torch.equal(theirs, mine)


def test_attention_that_a_library_patches_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is seen to be patched after a call that was shared."""
    model = hfgen.mix_into(tiny.llama())
    assert rows_and_lengths(model, IDS, num_beams=3)[0][0] == (2, 6)
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", attention_with_memory)
    shapes, output = rows_and_lengths(model, IDS, num_beams=3)
    assert shapes[0] == (6, 6)
    assert torch.equal(output, tiny.llama().generate(IDS, num_beams=3, max_new_tokens=4))
    model.train()
    monkeypatch.undo()
    assert rows_and_lengths(model, IDS, num_beams=3)[0][0] == (6, 6)
    assert rows_and_lengths(model.eval(), IDS, num_beams=3)[0][0] == (2, 6)


def test_a_class_that_says_that_it_is_row_wise_is_shared() -> None:
    class Mine(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = hfgen.mix_into(as_class(Mine))
    assert rows_and_lengths(model, IDS, num_beams=2)[0][0] == (4, 6)
    Mine.is_row_wise = True
    assert rows_and_lengths(model, IDS, num_beams=2)[0][0] == (2, 6)


def prepared(way: str) -> Any:
    model = hfgen.mix_into(tiny.llama())
    if way == "adapters":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)
        peft.inject_adapter_in_model(config, model)
        return model.eval()
    if way == "offloaded":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return hfgen.optimize(model, weights="int8")


@pytest.mark.parametrize("way", ["adapters", "offloaded", "optimized"])
def test_libraries_layers_are_shared(way: str) -> None:
    assert rows_and_lengths(prepared(way), IDS, num_beams=2)[0][0] == (2, 6)


@pytest.mark.parametrize("name", list(OWN)[4:])
def test_requests_to_a_model_with_states_of_its_own_do_not_mix(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning_once", said.append)
    model = hfgen.mix_into(OWN[name]())
    prompts = [[11, 12, 13, 14], [12, 13, 14, 15], [16, 17, 18, 19, 20, 21]]
    kwargs = {"max_new_tokens": 5, "eos_token_id": None}
    expected = [model.generate(torch.tensor([ids]), **kwargs)[0, len(ids) :] for ids in prompts]
    results = hfgen.generate_many(model, prompts, **kwargs)
    for result, tokens in zip(results, expected, strict=True):
        assert result.sequences[0].token_ids == tokens.tolist()
    assert said[0].startswith("The engine decodes one request at a time")
