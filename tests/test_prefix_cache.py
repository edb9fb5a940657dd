"""Prefixes kept across calls: the same tokens as without, and only what is new is forwarded."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import pickle
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes
from torch import Tensor

import hfgen
from hfgen.decoding.strategies import Sample
from hfgen.families import CACHE
from hfgen.memory import fingerprint
from hfgen.memory.caches.dynamic import GrowingCache
from hfgen.running.prefix import cache as prefix_files
from hfgen.running.prefix import radix
from hfgen.running.prefix.cache import PrefixStats
from hfgen.running.prefix.radix import Forest, KeyValues, size
from hfgen.running.prefix.session import PrefixSession
from tests import tiny
from tests.parity.harness import FAMILIES

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}


def llama(**overrides: Any) -> Any:
    return hfgen.mix_into(tiny.llama(**overrides))


def tokens(n: int, seed: int = 0, vocab: int = 90) -> Tensor:
    """Ids ``(n,)``, none of them special."""
    return torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def batch(*rows: Tensor) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the left."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(rows):
        ids[row, length - len(own) :] = own
        mask[row, length - len(own) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def fed(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the ids that are forwarded."""
    shapes: list[tuple[int, ...]] = []
    forward = type(model).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    counting.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", counting)
        yield shapes


def check_same(model: Any, prefixes: hfgen.PrefixCache, **call: Any) -> int:
    """Compare a call with itself without prefixes; how many tokens were not forwarded."""
    call = {"return_dict_in_generate": True, "output_scores": True} | call
    torch.manual_seed(0)
    plain = model.generate(**call)
    before = prefixes.stats.tokens_saved
    model.prefix_cache = prefixes
    torch.manual_seed(0)
    try:
        ours = model.generate(**call)
    finally:
        del model.prefix_cache
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.scores, plain.scores, atol=1e-4, rtol=1e-4)
    for own, other in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert type(own) is type(other)
        if getattr(other, "keys", None) is not None:
            assert own.keys.shape == other.keys.shape
            assert own.get_seq_length() == other.get_seq_length()
    return prefixes.stats.tokens_saved - before


# ---------------------------------------------------------------- the same tokens, fewer forwards


def test_only_what_is_new_is_forwarded() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    first = model.generate(tokens(20)[None], prefix_cache=prefixes, **GREEDY)
    again = torch.cat([first, tokens(6, seed=1)[None]], dim=1)
    with fed(model) as shapes:
        model.generate(again, prefix_cache=prefixes, **GREEDY)
    assert shapes == [(1, 7)] + 4 * [(1, 1)]  # the last of the answer was never forwarded
    with fed(model) as shapes:
        model.generate(again[:, :9], prefix_cache=prefixes, **GREEDY)
    assert shapes[0] == (1, 1)  # the logits of the last token are needed


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several of the beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "forced words": {"num_beams": 3, "force_words_ids": [[20]]},
    "DoLa": {"dola_layers": "high"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4},
    "static": {"cache_implementation": "static"},
    "static, in chunks": {"cache_implementation": "static", "prefill_chunk_size": 4},
    "static, samples": {
        "cache_implementation": "static",
        "do_sample": True,
        "num_return_sequences": 2,
    },
    "static, beams": {"cache_implementation": "static", "num_beams": 2},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_decodes_as_without(mode: str) -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    call = GREEDY | MODES[mode]
    rows = tokens(12), tokens(9, seed=1)
    assert check_same(model, prefixes, **batch(*rows), **call) == 0
    longer = (
        torch.cat([rows[0], tokens(5, seed=2)]),
        torch.cat([rows[1][:4], tokens(5, seed=3)]),
    )
    assert check_same(model, prefixes, **batch(*longer), **call) >= 16
    assert check_same(model, prefixes, **batch(longer[1], tokens(7, seed=4)), **call) >= 2
    assert not prefixes.stats.bypassed


@pytest.mark.parametrize("assistant", ["model", "early exit"])
def test_assistants(assistant: str) -> None:
    model, prefixes = llama(num_hidden_layers=3), hfgen.PrefixCache()
    drafts = {"assistant_model": llama()} if assistant == "model" else {"assistant_early_exit": 1}
    ids = tokens(15)
    check_same(model, prefixes, input_ids=ids[None], **drafts, **GREEDY)
    longer = torch.cat([ids, tokens(4, seed=1)])
    assert check_same(model, prefixes, input_ids=longer[None], **drafts, **GREEDY) == 15


# One for each way to attend, to share keys and to count positions.
KINDS = (
    "mistral",  # windows
    "gemma3_text",  # windows between layers of full attention
    "gemma3n_text",  # layers that share others' keys
    "llama4_text",  # chunks
    "deepseek_v3",  # latent attention
    "bloom",  # no positions
    "gpt2",  # learned positions
    "opt",  # positions that the model counts itself
    "gpt_oss",  # attention sinks
)


@pytest.mark.parametrize("name", KINDS)
def test_families(name: str) -> None:
    model, prefixes = hfgen.mix_into(FAMILIES[name].build()), hfgen.PrefixCache()
    ids = tokens(14)
    answer = model.generate(ids[None], prefix_cache=prefixes, **GREEDY)[0]
    chat = torch.cat([answer, tokens(4, seed=1)])
    other = torch.cat([ids[:6], tokens(6, seed=2)])
    assert check_same(model, prefixes, input_ids=chat[None], **GREEDY) == 18
    assert check_same(model, prefixes, input_ids=other[None], **GREEDY) == 6
    assert check_same(model, prefixes, input_ids=ids[None, :5], **GREEDY) == 4
    rows = chat[:16], torch.cat([other, tokens(1, seed=3)]), tokens(9, seed=4), ids[:8]
    assert check_same(model, prefixes, **batch(*rows), **GREEDY) > 0
    rows = torch.cat([rows[2], tokens(3, seed=5)]), torch.cat([chat[:9], tokens(9, seed=6)])
    assert check_same(model, prefixes, **batch(*rows), num_beams=2, **GREEDY) > 0
    assert not prefixes.stats.bypassed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "cannot be cut"),
        ("jamba", "cannot be cut"),
        ("moshi", "forwarded with a token"),
        ("cpmant", "one state per token"),
        ("recurrent_gemma", "elsewhere"),
        ("glm_moe_dsa", "cannot be cut"),
    ],
)
def test_what_cannot_be_reused_is_counted(name: str, reason: str) -> None:
    model, prefixes = hfgen.mix_into(FAMILIES[name].build()), hfgen.PrefixCache()
    for n in (9, 12):
        call = {"input_ids": tokens(n)[None], **GREEDY}
        assert torch.equal(model.generate(**call, prefix_cache=prefixes), model.generate(**call))
    (text,) = prefixes.stats.bypassed
    assert reason in text
    assert prefixes.stats.bypassed[text] == 2
    assert prefixes.stats.tokens_saved == prefixes.stats.bytes == 0


def test_models_that_attend_to_later_tokens() -> None:
    model, prefixes = hfgen.mix_into(FAMILIES["gemma3_text"].build()), hfgen.PrefixCache()
    model.config.use_bidirectional_attention = True
    model.generate(tokens(9)[None], prefix_cache=prefixes, **GREEDY)
    (reason,) = prefixes.stats.bypassed
    assert "later tokens" in reason


def test_rows_are_filled_up_to_the_first_state_that_is_not_stored() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    system = tokens(20)
    model.generate(system[None], prefix_cache=prefixes, **GREEDY)
    prompts = [torch.cat([system, tokens(n, seed=n)]) for n in (3, 9)]
    with fed(model) as shapes:
        model.generate(**batch(*prompts), prefix_cache=prefixes, **GREEDY)
    assert shapes[0] == (2, 9)
    rows = batch(system, tokens(20, seed=1))
    with fed(model) as shapes:
        model.generate(**rows, prefix_cache=prefixes, **GREEDY)
    assert shapes[0] == (2, 20)


def test_positions_of_the_first_token_are_part_of_the_key() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(12)[None]
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    shifted = {"input_ids": ids, "position_ids": torch.arange(3, 15)[None]}
    assert check_same(model, prefixes, **shifted, **GREEDY) == 0
    assert check_same(model, prefixes, **shifted, **GREEDY) == 11


def test_padding_is_no_part_of_a_prefix() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(10)
    model.generate(**batch(ids, tokens(17, seed=1)), prefix_cache=prefixes, **GREEDY)
    assert check_same(model, prefixes, input_ids=ids[None], **GREEDY) == 9


def test_recipes() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    call = {
        "input_ids": tokens(10)[None],
        "custom_generate": hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True),
        "do_sample": True,
        "num_return_sequences": 3,
        "max_new_tokens": 4,
    }
    outputs = []
    for prefix_cache in (None, prefixes, prefixes):
        torch.manual_seed(0)
        outputs.append(model.generate(**call, prefix_cache=prefix_cache))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert prefixes.stats.hits > 0


class OwnPrefill(Sample):
    """Forwards the whole prompt, whatever the cache holds."""

    def prefill(self, run: Any) -> Any:
        model_inputs = run.model.prepare_inputs_for_generation(run.ids, **run.model_kwargs)
        return run.model(**model_inputs, return_dict=True)


class Continuing(OwnPrefill):
    continues_cache = True

    def prefill(self, run: Any) -> Any:
        return super(OwnPrefill, self).prefill(run)


def test_recipes_with_a_prefill_of_their_own() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    call = {"input_ids": tokens(10)[None], **GREEDY}
    plain = model.generate(**call)
    model.prefix_cache = prefixes
    for strategy, saved in ((OwnPrefill, 0), (OwnPrefill, 0), (Continuing, 0), (Continuing, 9)):
        before = prefixes.stats.tokens_saved
        ours = model.generate(**call, custom_generate=hfgen.recipe(strategy))
        assert torch.equal(ours, plain)
        assert prefixes.stats.tokens_saved - before == saved
    ((reason, n),) = prefixes.stats.bypassed.items()
    assert "OwnPrefill does not declare" in reason
    assert n == 2


def test_inference_mode_and_back() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(12)[None]
    with torch.inference_mode():
        model.generate(ids, prefix_cache=prefixes, **GREEDY)
    other = torch.cat([ids[:, :7], tokens(4, seed=1)[None]], dim=1)
    assert check_same(model, prefixes, input_ids=other, **GREEDY) == 7
    with torch.inference_mode():
        assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 11
        assert check_same(model, prefixes, input_ids=other, **GREEDY) == 10


def test_masks_of_other_types() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    rows = batch(tokens(9), tokens(12, seed=1))
    for dtype in (torch.bool, torch.float32, torch.int32):
        call = rows | {"attention_mask": rows["attention_mask"].to(dtype)}
        model.generate(**call, prefix_cache=prefixes, **GREEDY)
    assert prefixes.stats.tokens_saved == 2 * (8 + 11)


def calls_objects() -> set[int]:
    """The objects in memory that belong to one call each."""
    return {id(o) for o in gc.get_objects() if type(o) in (PrefixSession, GrowingCache)}


def test_a_call_leaves_nothing_behind_but_what_is_stored() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    gc.collect()
    gc.disable()  # cycles would keep the cache of each call until the next collection
    try:
        before = calls_objects()  # of other tests, whose tracebacks may be kept
        for _ in range(2):
            model.generate(tokens(12)[None], prefix_cache=prefixes, **GREEDY)
        alive = calls_objects() - before
    finally:
        gc.enable()
    assert not alive


def test_beams_store_what_is_returned() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(10)[None]
    best = model.generate(ids, num_beams=3, prefix_cache=prefixes, **GREEDY)
    longer = torch.cat([best, tokens(3, seed=1)[None]], dim=1)
    assert check_same(model, prefixes, input_ids=longer, **GREEDY) == 14


def test_nothing_behind_the_end_of_a_row_is_stored() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    rows = batch(tokens(8), tokens(8, seed=1))
    plain = model.generate(**rows, **GREEDY)
    eos = int(plain[0, 9])  # the second token that row 0 generates
    assert eos not in plain[1, 8:].tolist()
    ended = model.generate(**rows, prefix_cache=prefixes, **GREEDY | {"eos_token_id": eos})
    assert (ended[0, 10:] == 0).all()
    stored = stored_sequences(prefixes)
    assert sorted(map(len, stored)) == [10, 12]
    assert ended[0, :10].tolist() in stored


@pytest.mark.parametrize("ended", [0, 1])
def test_rows_that_left_the_batch(ended: int) -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    rows = batch(tokens(8), tokens(8, seed=1))
    plain = model.generate(**rows, **GREEDY)
    eos = int(plain[ended, 9])
    assert eos not in plain[1 - ended, 8:].tolist()
    call = GREEDY | {"eos_token_id": eos, "drop_finished": True}
    assert torch.equal(
        model.generate(**rows, prefix_cache=prefixes, **call), model.generate(**rows, **call)
    )
    for row in range(2):  # states are those of the tokens that they are stored for
        longer = torch.cat([plain[row], tokens(3, seed=2)])[None]
        assert check_same(model, prefixes, input_ids=longer, **GREEDY) >= 8


def stored_sequences(prefixes: hfgen.PrefixCache) -> list[list[int]]:
    """What is stored, from the first token to each end."""
    found = []
    for leaf in prefixes._forest.nodes:
        if not leaf.children:
            run: list[int] = []
            node: Any = leaf
            while node is not None:
                run, node = node.tokens.tolist() + run, node.parent
            found.append(run)
    return found


def room(n_tokens: int, n_nodes: int = 1) -> int:
    """Bytes of nodes of ``llama()``: ids; layers, keys and values, heads, size, float32."""
    return n_tokens * (8 + 2 * 2 * 2 * 8 * 4) + n_nodes * size(0, 0, 4)


# ---------------------------------------------------------------- the key


def edit_in_place(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def edit_data(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 1.5)


def load_state(model: Any) -> None:
    model.load_state_dict({name: 1.1 * t for name, t in model.state_dict().items()})


def change_dtype(model: Any) -> None:
    model.to(torch.bfloat16)


def change_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def change_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


def change_rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 100.0


def change_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def change_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def change_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU().eval()


def change_function(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = torch.relu


def change_method(model: Any) -> None:
    model.model.norm.forward = lambda hidden: hidden


def change_list(model: Any) -> None:
    model.model.layers[0].mlp.factors = [1.0, 2.0]


CHANGES = (
    change_config,
    change_rope,
    change_scaling,
    change_epsilon,
    change_activation,
    change_function,
    change_method,
    change_list,
    edit_in_place,
    edit_data,
    replace_parameter,
    load_state,
    change_dtype,
    change_attention,
)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_states_of_a_model_that_has_changed_are_not_reused(change: Callable[[Any], None]) -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(15)[None]
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 14
    change(model)
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 14


def test_hooks_see_the_whole_prompt() -> None:
    """What a hook does may depend on all tokens of a forward: nothing is left out, and nothing stored."""
    model, prefixes, ids = llama(), hfgen.PrefixCache(), tokens(15)[None]
    model.generate(ids, prefix_cache=prefixes, **GREEDY)

    def shift(module: Any, args: Any, out: Tensor) -> Tensor:
        return out + out.mean(dim=1, keepdim=True) * (out.shape[1] > 1)

    with model.model.layers[0].register_forward_hook(shift):
        for _ in range(2):
            assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0
    (reason,) = prefixes.stats.bypassed
    assert "hooks would not see" in reason
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 14


def test_a_window_that_changes() -> None:
    model, prefixes = hfgen.mix_into(FAMILIES["mistral"].build()), hfgen.PrefixCache()
    ids = tokens(15)[None]
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0
    model.config.sliding_window = 3
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0


def test_a_part_of_a_model_in_training_mode() -> None:
    model, prefixes = llama(attention_dropout=0.5), hfgen.PrefixCache()
    model.model.layers[0].train()
    model.generate(tokens(15)[None], prefix_cache=prefixes, **GREEDY)
    assert list(prefixes.stats.bypassed) == ["the model, or a part of it, is in training mode"]


def test_kernels_that_only_decoding_uses_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators, mixtures of experts have another implementation while they decode."""
    model, prefixes = hfgen.mix_into(FAMILIES["mixtral"].build()), hfgen.PrefixCache()
    assert model.get_experts_implementation()

    @contextmanager
    def other(self: Any) -> Iterator[None]:
        before = self.get_experts_implementation()
        self.set_experts_implementation("eager" if "eager" not in str(before) else "batched_mm")
        try:
            yield
        finally:
            self.set_experts_implementation(before)

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", other)
    model.generate(tokens(9)[None], prefix_cache=prefixes, **GREEDY)
    assert not prefixes.stats.bypassed
    assert prefixes.stats.bytes > 0


def test_a_model_that_changes_during_a_call() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()

    def edit(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 17:
            edit_in_place(model)
        return scores

    model.generate(tokens(15)[None], prefix_cache=prefixes, logits_processor=[edit], **GREEDY)
    assert stored_sequences(prefixes) == [tokens(15).tolist()]  # its prompt was stored before
    assert list(prefixes.stats.bypassed) == ["the model was changed during the call"]


def test_autocast_is_part_of_the_key() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(15)[None]
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids, prefix_cache=prefixes, **GREEDY)
        assert prefixes.stats.tokens_saved == 0
        model.generate(ids, prefix_cache=prefixes, **GREEDY)
        assert prefixes.stats.tokens_saved == 14


def test_models_do_not_share_states() -> None:
    prefixes, ids = hfgen.PrefixCache(), tokens(15)[None]
    first = llama()
    second = copy.deepcopy(first)
    for model in (first, second):
        assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0
    for model in (first, second):
        assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 14
    for _ in range(5):  # a new model may lie where the last one was
        model = llama()
        assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 0
        del model
        gc.collect()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_part_of_the_key() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = llama()
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config, adapter_name="first")
    adapted.add_adapter("second", config)
    adapted.eval()
    prefixes, ids = hfgen.PrefixCache(), tokens(15)[None]

    def saved() -> int:
        plain = adapted.generate(input_ids=ids, **GREEDY)
        before = prefixes.stats.tokens_saved
        ours = adapted.generate(input_ids=ids, prefix_cache=prefixes, **GREEDY)
        assert torch.equal(ours, plain)
        return prefixes.stats.tokens_saved - before

    assert (saved(), saved()) == (0, 14)
    adapted.set_adapter("second")
    assert (saved(), saved()) == (0, 14)
    with adapted.disable_adapter():
        assert (saved(), saved()) == (0, 14)
    assert saved() == 14
    adapted.set_adapter("first")
    assert saved() == 14
    adapted.merge_adapter()
    assert (saved(), saved()) == (0, 14)
    adapted.unmerge_adapter()
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling["first"] *= 2
    assert (saved(), saved()) == (0, 14)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_per_row_go_by_without() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(llama(), config, adapter_name="first")
    adapted.add_adapter("second", config)
    adapted.eval()
    prefixes, ids = hfgen.PrefixCache(), torch.stack([tokens(15), tokens(15)])
    adapted.base_model.model.prefix_cache = prefixes
    for _ in range(2):
        adapted.generate(input_ids=ids, adapter_names=["first", "second"], **GREEDY)
    ((reason, n),) = prefixes.stats.bypassed.items()
    assert "adapter_names" in reason
    assert n == 2
    assert prefixes.stats.bytes == 0


def test_offloaded_weights_go_by_without(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    model, prefixes = llama(), hfgen.PrefixCache()
    call = {"input_ids": tokens(9)[None], **GREEDY}
    plain = model.generate(**call)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.device.type == "meta"
    for _ in range(2):
        assert torch.equal(model.generate(**call, prefix_cache=prefixes), plain)
    ((reason, n),) = prefixes.stats.bypassed.items()
    assert "offloaded" in reason
    assert n == 2
    with pytest.raises(ValueError, match="offloaded weights"):
        prefixes.save(tmp_path / "file", model)


def test_rotary_positions_that_change_with_the_length() -> None:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": 4 * [1.0],
        "long_factor": 4 * [3.0],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model, prefixes = llama(rope_parameters=scaling), hfgen.PrefixCache()
    for n, saved in ((20, 0), (24, 20), (40, 0), (44, 0), (25, 24)):
        assert check_same(model, prefixes, input_ids=tokens(n)[None], **GREEDY) == saved
    assert sum(prefixes.stats.bypassed.values()) == 2


# ---------------------------------------------------------------- the trees


def states(sequence: Tensor) -> KeyValues:
    """Keys ``(1, n, 2)`` and values ``(1, n, 1)`` that are their tokens."""
    values = sequence.to(torch.float32).view(1, -1, 1)
    return values.repeat(1, 1, 2), values


PER_TOKEN = 8 + 3 * 4
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), sequences), min_size=1, max_size=12),
    st.integers(1, 40),
)
@example([("b", [1]), ("b", [1, 0, 0]), ("b", [1, 0, 1])], 3)  # a split below a node without room
def test_trees_hold_what_was_inserted(inserted: list[tuple[str, list[int]]], n: int) -> None:
    forest = Forest(n * size(3, PER_TOKEN, 2))
    for key, sequence in inserted:
        ids = torch.tensor(sequence)
        forest.insert(key, ids, states(ids))
        nodes = list(forest.nodes)
        assert set(nodes) == reachable(forest)
        assert all(nodes.index(c) < i for i, n in enumerate(nodes) for c in n.children.values())
        assert forest.n_bytes == sum(node.n_bytes for node in nodes) <= forest.max_bytes
        assert forest.n_bytes == sum(size(len(node.tokens), PER_TOKEN, 2) for node in nodes)
        # Nothing else is kept alive behind the states.
        assert all(s.untyped_storage().nbytes() == s.nbytes for n in nodes for s in n.states)
        match = forest.match(key, ids)
        # The newest is there, as far as it fits into the nodes that it is in, and one more.
        fits = (forest.max_bytes - (len(match.nodes) + 1) * size(0, 0, 2)) // PER_TOKEN
        assert match.length >= min(fits, len(sequence))
        found = torch.cat([run[0][0, :, 0] for _, run in match.runs(match.length)])
        assert found.tolist() == sequence[: match.length]
        assert all(len(root.children) for root in forest.roots.values())
    if forest.n_evicted == 0 and n == 40:
        for key, sequence in inserted:
            probe = torch.tensor([*sequence, 0, 1])
            known = [s for k, s in inserted if k == key]
            longest = max(shared(s, probe.tolist()) for s in known)
            assert forest.match(key, probe).length == longest


def reachable(forest: Forest) -> set[Any]:
    found, waiting = set(), list(forest.roots.values())
    while waiting:
        children = waiting.pop().children.values()
        found.update(children)
        waiting.extend(children)
    return found


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_the_least_recently_used_go_first() -> None:
    forest = Forest(12 * PER_TOKEN + 4 * size(0, 0, 2))
    root = [1, 1, 1]
    a, b, c = (torch.tensor([*root, n, n, n]) for n in (2, 3, 4))
    for ids in (a, b, c):
        forest.insert("k", ids, states(ids))
    assert forest.n_bytes == forest.max_bytes
    forest.match("k", a)
    forest.insert("k", d := torch.tensor([*root, 5, 5]), states(d))
    assert [forest.match("k", ids).length for ids in (a, b, c, d)] == [6, 3, 6, 5]
    assert forest.n_evicted == 1
    other = torch.full((400,), 7)
    forest.insert("other", other, states(other))
    assert list(forest.roots) == ["other"]
    assert forest.match("other", other).length == (forest.max_bytes - size(0, 0, 2)) // PER_TOKEN


def test_evicting_does_not_look_at_what_stays() -> None:
    """As many steps of Python for an insert into a full forest of 20 sequences as of 400."""

    def n_events(n: int) -> int:
        forest, count = Forest(n * size(4, PER_TOKEN, 2)), 0
        sequences = [torch.arange(4) + 10 * i for i in range(n + 2)]
        for ids in sequences[:-1]:
            forest.insert("k", ids, states(ids))
        assert forest.n_evicted == 1

        def seen(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += 1
            return seen

        sys.settrace(seen)  # calls and lines
        try:
            forest.insert("k", sequences[-1], states(sequences[-1]))
        finally:
            sys.settrace(None)
        assert forest.n_evicted == 2
        return count

    assert n_events(400) == n_events(20)


def test_nodes_count_their_own_cost() -> None:
    """100,000 sequences of one token are more than 100,000 tokens."""
    forest = Forest(10 * size(1, PER_TOKEN, 2))
    for i in range(50):
        ids = torch.tensor([i])
        forest.insert("k", ids, states(ids))
    assert len(forest.nodes) == 10
    assert size(1, PER_TOKEN, 2) > 3 * 512  # three tensors, each of an object and a storage


# ---------------------------------------------------------------- counts, memory, errors


def test_stats_and_bytes() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(16)
    model.generate(ids[None], prefix_cache=prefixes, **GREEDY)
    expected = PrefixStats(
        lookups=1,
        hits=0,
        tokens=16,
        tokens_saved=0,
        bytes=room(20, 2),
        sequences=1,
        evictions=0,
        bypassed={},
    )
    assert prefixes.stats == expected
    rows = batch(torch.cat([ids[:9], tokens(3, seed=1)]), tokens(12, seed=2))
    model.generate(**rows, prefix_cache=prefixes, **GREEDY)
    stats = prefixes.stats
    assert (stats.lookups, stats.tokens, stats.sequences) == (3, 40, 3)
    assert stats.bytes == room(20 + 16 - 9 + 16, 7)
    prefixes.clear()
    stats = prefixes.stats
    assert (stats.bytes, stats.sequences, stats.lookups) == (0, 0, 3)
    assert check_same(model, prefixes, input_ids=ids[None], **GREEDY) == 0


def test_memory_limit() -> None:
    model = llama()
    prefixes = hfgen.PrefixCache(max_bytes=room(30))
    for seed in range(4):
        model.generate(tokens(12, seed=seed)[None], prefix_cache=prefixes, **GREEDY)
        assert 0 < prefixes.stats.bytes <= prefixes.max_bytes
    assert prefixes.stats.evictions > 0
    assert check_same(model, prefixes, input_ids=tokens(12, seed=3)[None], **GREEDY) == 11
    assert check_same(model, prefixes, input_ids=tokens(12, seed=0)[None], **GREEDY) == 0
    # An answer is stored as far as it fits.
    model.generate(tokens(28, seed=9)[None], prefix_cache=prefixes, **GREEDY)
    assert room(28) <= prefixes.stats.bytes <= prefixes.max_bytes


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_a_prompt_larger_than_the_memory_limit(make: Callable[[], Any]) -> None:
    model, prefixes = hfgen.mix_into(make()), hfgen.PrefixCache(max_bytes=3000)
    for _ in range(2):
        assert check_same(model, prefixes, input_ids=tokens(20)[None], **GREEDY) == 0
    assert dict(prefixes.stats.bypassed) == {"the prompt is larger than `max_bytes`": 2}
    call = {"input_ids": tokens(20)[None], **GREEDY}
    assert torch.equal(model.generate(**call, prefix_cache=prefixes), model.generate(**call))


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)],
)
def test_max_bytes(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`max_bytes` has to be"):
        hfgen.PrefixCache(max_bytes=value)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "use_cache": {"use_cache": False},
    CACHE: {CACHE: "empty"},
    "cache_implementation": {"cache_implementation": "quantized"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 7, 32), "input_ids": None},
    "attention_mask": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 7]])},
    "decoding method": {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_rule_prefixes_out(name: str) -> None:
    from transformers import DynamicCache

    model, prefixes = llama(), hfgen.PrefixCache()
    call = {"input_ids": tokens(7)[None]} | GREEDY | CONTRADICTIONS[name]
    if CACHE in call:
        call[CACHE] = DynamicCache(config=model.config)
    with fed(model) as shapes, pytest.raises(ValueError, match=rf"`prefix_cache`.*{name}"):
        model.generate(**call, prefix_cache=prefixes)
    assert shapes == []
    assert not prefixes.stats.bypassed
    model.prefix_cache = prefixes
    call = {k: copy.deepcopy(v) for k, v in call.items()}
    ours = model.generate(**call)
    del model.prefix_cache
    assert sum(prefixes.stats.bypassed.values()) == 1
    plain = model.generate(**{k: v for k, v in call.items() if k != CACHE})
    sequences = [out if isinstance(out, Tensor) else out.sequences for out in (ours, plain)]
    assert torch.equal(*sequences)
    assert prefixes.stats.bytes == 0


def test_continuous_batching_goes_by_without() -> None:
    call = {"cache_implementation": "paged", "prefix_cache": hfgen.PrefixCache()}
    with pytest.raises(ValueError, match=r"`prefix_cache`.*paged"):
        llama().generate(tokens(7)[None], **call, **GREEDY)


def test_encoder_decoders_go_by_without() -> None:
    model, prefixes = hfgen.mix_into(tiny.bart()), hfgen.PrefixCache()
    for _ in range(2):
        model.generate(tokens(7)[None], prefix_cache=prefixes, max_new_tokens=3)
    (reason,) = prefixes.stats.bypassed
    assert "encoder" in reason


def test_what_is_no_prefix_cache() -> None:
    model = llama()
    with pytest.raises(
        TypeError, match=r"`prefix_cache` has to be a hfgen\.PrefixCache, but is dict"
    ):
        model.generate(tokens(7)[None], prefix_cache={}, **GREEDY)
    model.prefix_cache = True
    with pytest.raises(TypeError, match=r"`model\.prefix_cache` has to be .* bool"):
        model.generate(tokens(7)[None], **GREEDY)


def test_the_attribute_of_a_model() -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    model.prefix_cache = prefixes
    model.generate(tokens(7)[None], **GREEDY)
    assert prefixes.stats.lookups == 1
    model.generate(tokens(7)[None], prefix_cache=None, **GREEDY)
    assert prefixes.stats.lookups == 1
    twin = copy.deepcopy(model)
    assert twin.prefix_cache is prefixes
    twin.generate(tokens(7)[None], **GREEDY)
    assert (prefixes.stats.lookups, prefixes.stats.tokens_saved) == (2, 0)
    restored = pickle.loads(pickle.dumps(prefixes))
    assert (restored.max_bytes, restored.stats.bytes) == (prefixes.max_bytes, 0)


def test_a_call_that_raises_leaves_whole_prompts() -> None:
    class Stop(Exception):
        pass

    def fails_at(n: int) -> Callable[..., Any]:
        def fail(ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] == n:
                raise Stop
            return scores

        return fail

    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(12)[None]
    with pytest.raises(Stop):
        model.generate(ids, prefix_cache=prefixes, logits_processor=[fails_at(12)], **GREEDY)
    assert prefixes.stats.bytes == 0
    with pytest.raises(Stop):
        model.generate(ids, prefix_cache=prefixes, logits_processor=[fails_at(14)], **GREEDY)
    assert stored_sequences(prefixes) == [ids[0].tolist()]
    assert check_same(model, prefixes, input_ids=ids, **GREEDY) == 11


def is_interrupted(function: Callable[[], Any], at: int) -> bool:
    """Whether a call of ``function`` has as many lines in ``radix.py``; it gets a KeyboardInterrupt at this one."""
    n, former = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal n
        if frame.f_globals is not vars(radix):
            return None
        n += event == "line"
        if n == at and event == "line":
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


def test_a_store_can_be_used_when_it_was_interrupted() -> None:
    """At any line: a node that is half in the tree would fail each later call with its tokens."""
    texts = [tokens(8), torch.cat([tokens(8)[:4], tokens(4, seed=1)])]
    states = tuple(torch.zeros(1, 8, 2) for _ in range(2))
    n, goes_on = 0, True
    while goes_on:
        n += 1
        prefixes = hfgen.PrefixCache()
        prefixes._insert("model", texts[0], states)
        goes_on = is_interrupted(lambda: prefixes._insert("model", texts[1], states), n)  # noqa: B023
        for text in texts:
            prefixes._insert("model", text, states)
        matches = prefixes._match(["model", "model"], texts)
        assert [match.length for match in matches] == [8, 8]
        assert prefixes.stats.bytes == sum(node.n_bytes for node in prefixes._forest.nodes)
    assert n > 50


def test_streaming() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.chunks: list[list[int]] = []
            self.n_ends = 0

        def put(self, value: Tensor) -> None:
            self.chunks.append(value.flatten().tolist())

        def end(self) -> None:
            self.n_ends += 1

    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(12)[None]
    seen = []
    for prefix_cache in (None, prefixes, prefixes):
        streamer = Streamer()
        model.generate(ids, streamer=streamer, prefix_cache=prefix_cache, **GREEDY)
        seen.append((streamer.chunks, streamer.n_ends))
    assert seen[0] == seen[1] == seen[2]
    assert prefixes.stats.tokens_saved == 11


def test_the_first_token_does_not_wait_for_the_store() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.stored: list[int] = []

        def put(self, value: Tensor) -> None:
            self.stored.append(prefixes.stats.bytes)

        def end(self) -> None:
            pass

    model, prefixes, streamer = llama(), hfgen.PrefixCache(), Streamer()
    model.generate(tokens(12)[None], streamer=streamer, prefix_cache=prefixes, **GREEDY)
    assert streamer.stored[:2] == [0, 0]  # the prompt, and the first token
    assert streamer.stored[2] > 0


def test_threads() -> None:
    model = llama()
    prefixes = hfgen.PrefixCache(max_bytes=room(60, 10))  # some are evicted while others look up
    system = tokens(20)
    prompts = [torch.cat([system, tokens(6 + n, seed=n)])[None] for n in range(6)]
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    errors: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for n in range(18):
                which = (offset + n) % len(prompts)
                ours = model.generate(prompts[which], prefix_cache=prefixes, **GREEDY)
                assert torch.equal(ours, expected[which])
                assert prefixes.stats.bytes <= prefixes.max_bytes
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = prefixes.stats
    assert stats.lookups == 4 * 18
    assert stats.tokens_saved >= (stats.lookups - 4) * 20  # the first of each may come too early
    assert stats.evictions > 0


def test_chat() -> None:
    model, tokenizer = hfgen.builtin_model()
    prefixes = hfgen.PrefixCache()
    text = "def is_prime(n):\n    " * 30
    ids = tokenizer(text, return_tensors="pt").input_ids
    call = {"max_new_tokens": 12, "do_sample": False}
    assert check_same(model, prefixes, input_ids=ids, **call) == 0
    answer = model.generate(ids, **call)
    more = tokenizer("\n\nprint(is_prime(7))\n", return_tensors="pt").input_ids
    saved = check_same(model, prefixes, input_ids=torch.cat([answer, more], dim=1), **call)
    assert saved >= ids.shape[1]


# ---------------------------------------------------------------- files


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, hfgen.PrefixCache]:
    """A file of two prompts that begin alike, and of one at other positions."""
    model, prefixes = llama(), hfgen.PrefixCache()
    ids = tokens(16)
    model.generate(ids[None], prefix_cache=prefixes, **GREEDY)
    other = torch.cat([ids[:9], tokens(5, seed=1)])
    model.generate(other[None], prefix_cache=prefixes, **GREEDY)
    positions = torch.arange(2, 18)[None]
    model.generate(ids[None], position_ids=positions, prefix_cache=prefixes, **GREEDY)
    path = tmp_path / "prefixes.safetensors"
    prefixes.save(path, model)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    return path, prefixes


def test_files(saved: tuple[Path, hfgen.PrefixCache]) -> None:
    path, prefixes = saved
    model = llama()  # the same weights, elsewhere
    loaded = hfgen.PrefixCache.load(path, model)
    assert loaded.stats.bytes == prefixes.stats.bytes
    assert sorted(stored_sequences(loaded)) == sorted(stored_sequences(prefixes))
    ids = tokens(16)[None]
    assert check_same(model, loaded, input_ids=ids, **GREEDY) == 15
    shifted = {"input_ids": ids, "position_ids": torch.arange(2, 18)[None]}
    assert check_same(model, loaded, **shifted, **GREEDY) == 15
    assert check_same(model, loaded, input_ids=ids[:, :9], **GREEDY) == 8


def test_files_keep_what_was_used_last(saved: tuple[Path, hfgen.PrefixCache]) -> None:
    path, _ = saved
    model = llama()
    loaded = hfgen.PrefixCache.load(path, model, max_bytes=room(20, 2))
    assert stored_sequences(loaded) == [stored_sequences(saved[1])[-1]]
    loaded = hfgen.PrefixCache.load(path, model, max_bytes=room(38, 5))
    assert loaded.stats.bytes == room(38, 5)
    ids = torch.cat([tokens(9), tokens(5, seed=1)])[None]
    assert check_same(model, loaded, input_ids=ids, **GREEDY) == 13
    assert check_same(model, loaded, input_ids=tokens(16)[None], **GREEDY) == 9


def bigger(model: Any) -> Any:
    return llama(num_hidden_layers=3)


def other_weights(model: Any) -> Any:
    model.model.norm.weight.data[3] *= 2
    return model


def half(model: Any) -> Any:
    return model.to(torch.bfloat16)


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [(bigger, "config"), (other_weights, "weights"), (half, "dtype"), (eager, "attention 'sdpa")],
)
def test_files_of_another_model(
    saved: tuple[Path, hfgen.PrefixCache], change: Callable[[Any], Any], named: str
) -> None:
    model = change(llama())
    with pytest.raises(ValueError, match=f"another model.*{named}"):
        hfgen.PrefixCache.load(saved[0], model)


def test_files_that_are_damaged(saved: tuple[Path, hfgen.PrefixCache], tmp_path: Path) -> None:
    path, model = saved[0], llama()
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        hfgen.PrefixCache.load(tmp_path / "no-such-file", model)
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:-1], whole[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be loaded as stored prefixes"):
            hfgen.PrefixCache.load(path, model)
    flipped = bytearray(whole)
    flipped[-5] ^= 64
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="are not those that were saved"):
        hfgen.PrefixCache.load(path, model)
    path.write_bytes(whole)
    foreign = tmp_path / "foreign.safetensors"
    save_file(load_file(path), foreign)
    with pytest.raises(ValueError, match="its format is None"):
        hfgen.PrefixCache.load(foreign, model)


def rewritten(path: Path, edit: Callable[[list[dict[str, Any]], dict[str, Tensor]], None]) -> None:
    """Edit the nodes and tensors of a file, and compute its checksums anew."""
    with safe_open(path, framework="pt") as file:
        texts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    nodes = json.loads(texts["nodes"])
    edit(nodes, tensors)
    names = ["tokens", *range(6)]
    for index, node in enumerate(nodes):
        if not isinstance(node, dict):
            continue
        own = {
            name: t for name in map(str, names) if (t := tensors.get(f"{index}.{name}")) is not None
        }
        node["checksum"] = fingerprint.digest(own)
    texts["nodes"] = json.dumps(nodes)
    del texts["checksum"]
    save_file(
        tensors, path, texts | {"checksum": fingerprint.digest_of_text(sorted(texts.items()))}
    )


def set_node(index: int, **fields: Any) -> Callable[..., None]:
    return lambda nodes, tensors: nodes[index].update(fields)


def set_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    return lambda nodes, tensors: tensors.update({name: change(tensors[name]).contiguous()})


def twice(nodes: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    nodes.append(dict(nodes[-1]))
    for name in ("tokens", *range(4)):
        tensors[f"{len(nodes) - 1}.{name}"] = tensors[f"{len(nodes) - 2}.{name}"].clone()


def of_all(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[..., None]:
    """Change the states of all nodes alike."""

    def edit(nodes: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        for index in range(len(nodes)):
            states = [tensors.pop(f"{index}.{i}") for i in range(4)]
            changed = {f"{index}.{i}": s.clone() for i, s in enumerate(change(states))}
            tensors |= changed

    return edit


FORGED: dict[str, Callable[..., None]] = {
    "a parent behind its child": set_node(1, parent=3),
    "its own parent": set_node(1, parent=1),
    "a parent that is no number": set_node(1, parent="0"),
    "a parent below the root": set_node(0, parent=-2),
    "a parent that is true": set_node(2, parent=True),
    "no position": set_node(0, offset=None),
    "a position that is no number": set_node(0, offset=["position", "2"]),
    "two positions": set_node(1, offset=["position", 2]),
    "an unknown field": set_node(1, more=1),
    "a node that is no object": lambda nodes, tensors: nodes.append(7),
    "a node without tensors": lambda nodes, tensors: nodes.append(nodes[1]),
    "tensors without a node": lambda nodes, tensors: nodes.pop(),
    "no tokens": set_tensor("1.tokens", lambda t: t[:0]),
    "tokens of another type": set_tensor("1.tokens", lambda t: t.float()),
    "fewer states than tokens": set_tensor("1.2", lambda t: t[:, :-1]),
    "other heads": set_tensor("1.2", lambda t: t[:1]),
    "states of another type": set_tensor("1.2", lambda t: t.half()),
    "numbers without a head": set_tensor("1.2", lambda t: t[0]),
    "a brother that begins alike": twice,
    "fewer layers": of_all(lambda states: states[:2]),
    "more layers": of_all(lambda states: [*states, *states[:2]]),
    "other heads everywhere": of_all(lambda states: [s[:1] for s in states]),
    "other sizes everywhere": of_all(lambda states: [s[..., :4] for s in states]),
    "another type everywhere": of_all(lambda states: [s.double() for s in states]),
}


@pytest.mark.parametrize("name", FORGED)
def test_files_with_checksums_that_are_right(
    saved: tuple[Path, hfgen.PrefixCache], name: str
) -> None:
    path, model = saved[0], llama()
    rewritten(path, lambda nodes, tensors: None)
    assert len(hfgen.PrefixCache.load(path, model)._forest.nodes) == 7
    rewritten(path, FORGED[name])
    with pytest.raises(ValueError, match=f"{path.name}.* cannot be loaded as stored prefixes"):
        hfgen.PrefixCache.load(path, model)


def test_files_with_any_byte_changed(
    saved: tuple[Path, hfgen.PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either it is noticed, or what is loaded is what was saved."""
    path, model = saved[0], llama()
    monkeypatch.setattr(
        fingerprint, "content", functools.cache(fingerprint.content)
    )  # of one model
    expected, whole = everything(hfgen.PrefixCache.load(path, model)), path.read_bytes()
    end_of_header = 8 + int.from_bytes(whole[:8], "little")
    digits = [i for i in range(8, end_of_header) if whole[i : i + 1].isdigit()]
    rng, messages = random.Random(0), []
    for i in range(300):
        damaged = bytearray(whole)
        if i % 2:
            where = rng.choice(digits)
            damaged[where] = rng.choice(b"0123456789".replace(whole[where : where + 1], b""))
        else:
            where = rng.randrange(end_of_header if i % 4 else len(whole))
            damaged[where] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = hfgen.PrefixCache.load(path, model)
        except ValueError as error:
            messages.append(str(error))
        else:
            assert everything(loaded) == expected, where
    assert len(messages) > 280
    assert all(path.name in message for message in messages)


def test_a_file_that_is_overwritten_later_changes_nothing(
    saved: tuple[Path, hfgen.PrefixCache],
) -> None:
    loaded = hfgen.PrefixCache.load(saved[0], llama())
    expected, n_bytes = everything(loaded), saved[0].stat().st_size
    with saved[0].open("rb+") as file:
        file.write(bytes(n_bytes))
        assert everything(loaded) == expected
        file.truncate(0)
    assert everything(loaded) == expected


def everything(prefixes: hfgen.PrefixCache) -> list[Any]:
    """All that is stored, in its order: position, tokens to the end of each node, and its states."""
    found = []
    for node, (_, offset) in prefixes._forest.nodes.items():
        run, above = node.tokens.tolist(), node.parent
        while above is not None:
            run, above = above.tokens.tolist() + run, above.parent
        found.append((offset, run, [states.tolist() for states in node.states]))
    return found


# ---------------------------------------------------------------- whose files, and where


def save_as_before(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """As safetensors below 0.8 does: into the file that is there, with the mode that is usual."""
    path.write_bytes(to_bytes(tensors, metadata))


def test_files_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "save_file", save_as_before)
    model, prefixes = llama(), hfgen.PrefixCache()
    model.generate(tokens(9)[None], prefix_cache=prefixes, **GREEDY)
    path, other = tmp_path / "prefixes", tmp_path / "other"
    other.write_text("kept")
    path.symlink_to(other)
    before = os.umask(0)
    try:
        prefixes.save(path, model)
    finally:
        os.umask(before)
    assert other.read_text() == "kept"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [other, path]
    assert hfgen.PrefixCache.load(path, model).stats.sequences == 1


def test_nobody_else_reads_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prefixes, seen = llama(), hfgen.PrefixCache(), []

    def spy(tensors: Any, file: Path, metadata: Any) -> None:
        seen.append((file.parent.parent, stat.S_IMODE(file.parent.stat().st_mode)))
        save_file(tensors, file, metadata)

    monkeypatch.setattr(prefix_files, "save_file", spy)
    for _ in range(2):
        prefixes.save(tmp_path / "prefixes", model)
    assert seen == 2 * [(tmp_path, 0o700)]


def test_threads_that_save_to_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_have_written = threading.Barrier(4)

    def save_together(*arguments: Any) -> None:
        save_as_before(*arguments)
        all_have_written.wait(10)

    monkeypatch.setattr(prefix_files, "save_file", save_together)
    model, prefixes, errors = llama(), hfgen.PrefixCache(), []
    model.generate(tokens(9)[None], prefix_cache=prefixes, **GREEDY)
    path = tmp_path / "prefixes"

    def save() -> None:
        try:
            for _ in range(3):
                prefixes.save(path, model)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]
    assert hfgen.PrefixCache.load(path, model).stats.sequences == 1


def test_files_of_models_with_hooks(tmp_path: Path) -> None:
    model, prefixes = llama(), hfgen.PrefixCache()
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model.generate(tokens(9)[None], prefix_cache=prefixes, **GREEDY)
    with pytest.raises(ValueError, match="forward hooks"):
        prefixes.save(tmp_path / "file", model)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- costs


def test_looking_at_a_model_is_cheap() -> None:
    """The fingerprint of each call against one forward of the smallest model there is here."""
    model, _ = hfgen.builtin_model()
    ids = torch.ones(1, 1, dtype=torch.long)

    def n_steps(function: Callable[[], Any]) -> int:
        """Calls of functions, of Python and of C."""
        count = 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            function()
        finally:
            sys.setprofile(None)
        return count

    with torch.no_grad():
        assert n_steps(lambda: fingerprint.identity(model)) < 2 * n_steps(lambda: model(ids))
