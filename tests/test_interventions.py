"""``interventions=`` and ``record=``: beside permanent hooks in transformers, alone and in a batch."""

from __future__ import annotations

import copy
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache

import hfgen
from hfgen import Ablate, Edit, Patch, Record, Steer
from hfgen.decoding import activations
from hfgen.families import CACHE
from tests import tiny
from tests.parity.family import text_prompt
from tests.parity.harness import FAMILIES, UNSTEADY, ours

NAMES = (
    "llama gpt2 gpt_neox mistral gemma gemma2 gemma3_text qwen2 qwen3 phi phi3 opt bloom falcon mixtral olmo2 "
    "starcoder2 stablelm cohere granite glm mamba mamba2 falcon_h1 bamba jamba lfm2 t5 bart_seq2seq"
).split()
LAYER = re.compile(r"^(?!.*encoder\.).*\b(layers|h|blocks?|block)\.\d+$")
ASKED = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
WITH_SCORES = {**ASKED, "return_dict_in_generate": True, "output_scores": True}


def layer_of(model: nn.Module) -> str:
    """The name of its last decoder layer."""
    return [name for name, _ in model.named_modules() if LAYER.match(name)][-1]


def width_of(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).hidden_size)


def vector_of(model: Any, seed: int = 0) -> Tensor:
    return torch.randn(width_of(model), generator=torch.Generator().manual_seed(seed))


def inputs_of(name: str, rows: int = 3, padded: bool = True) -> dict[str, Tensor]:
    model = ours(name)
    if model.config.is_encoder_decoder:
        return dict(FAMILIES[name].inputs(model, rows, padded, 0))
    return text_prompt(60, rows, padded, 0, length=9)


def hooks(model: nn.Module) -> list[Any]:
    """hfgen's hooks: transformers leaves some that record outputs."""
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hook.__module__.startswith("hfgen.")
    ]


@contextmanager
def permanent(module: nn.Module, change: Any) -> Iterator[None]:
    """A hook as people write them today."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def model(plain: Any) -> Any:
    return hfgen.mix_into(copy.deepcopy(plain))


@pytest.mark.parametrize("name", NAMES)
def test_a_steered_row_is_that_row_alone_and_others_stay(name: str) -> None:
    model, inputs = ours(name), inputs_of(name)
    layer, tolerance = layer_of(model), UNSTEADY.get(name, 1e-4)

    def steer(**where: Any) -> list[Edit]:
        return [Steer(layer, vector_of(model), scale=5, tokens="generated", **where)]

    base = model.generate(**inputs, **WITH_SCORES)
    steered = model.generate(**inputs, **WITH_SCORES, interventions=steer(rows=[1]))
    mask = inputs.get("attention_mask")
    n = 0 if mask is None or model.config.is_encoder_decoder else int((mask[1] == 0).sum())
    one = {key: value[1:2, n:] for key, value in inputs.items()}
    alone = model.generate(**one, **WITH_SCORES, interventions=steer())
    assert torch.equal(steered.sequences[1:2, n:], alone.sequences)
    for step, (ours_, base_, alone_) in enumerate(
        zip(steered.scores, base.scores, alone.scores, strict=True)
    ):
        torch.testing.assert_close(ours_[[0, 2]], base_[[0, 2]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours_[1:2], alone_, rtol=tolerance, atol=tolerance)
        if step == 1:  # the first that a generated token was forwarded for
            assert not torch.allclose(ours_[1], base_[1], atol=1e-3)
    assert torch.equal(steered.scores[0], base.scores[0])
    assert not hooks(model)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_is_what_decoding_saw(name: str) -> None:
    """The rows' own ``hidden_states``, of each token as it was decoded."""
    model, inputs = ours(name), inputs_of(name)
    layer, tolerance = layer_of(model), UNSTEADY.get(name, 1e-4)
    asked = {**WITH_SCORES, "output_hidden_states": True, "record": [layer, f"{layer}:in"]}
    output = model.generate(**inputs, **asked)
    is_seq2seq = model.config.is_encoder_decoder
    states = output.decoder_hidden_states if is_seq2seq else output.hidden_states
    # Of each step, the state before the last: what goes into the last layer. Mamba lists what comes out.
    what = layer if name in ("mamba", "mamba2") else f"{layer}:in"
    seen = torch.cat([step[-2] for step in states], dim=1)
    for row in range(3):
        recorded = output.activations[what][row]
        n = len(recorded) - 1  # the last token was not forwarded while it decoded
        torch.testing.assert_close(recorded[:n], seen[row, -n:], rtol=tolerance, atol=tolerance)
        assert output.activations[layer][row].shape == recorded.shape
    assert set(output.activations) == {layer, f"{layer}:in"}
    assert not hooks(model)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "beams": {"num_beams": 3},
    "returned beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 4},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_all_rows_and_tokens_are_as_with_a_permanent_hook(
    plain: Any, model: Any, mode: str
) -> None:
    inputs, vector = text_prompt(90, 3, True, 1, length=9), vector_of(model)
    with permanent(plain.model.layers[0], lambda hidden: hidden + 4 * vector):
        torch.manual_seed(0)
        expected = plain.generate(**inputs, **ASKED, **MODES[mode])
    torch.manual_seed(0)
    edits = [Steer("model.layers.0", vector, 4)]
    assert torch.equal(
        model.generate(**inputs, **ASKED, **MODES[mode], interventions=edits), expected
    )
    assert not torch.equal(model.generate(**inputs, **ASKED, **MODES[mode]), expected)


@pytest.mark.parametrize("rows", [None, [0, 2]])
@pytest.mark.parametrize("drafts", ["lookup", "assistant", "early exit", "memory"])
def test_drafts_change_no_token(model: Any, drafts: str, rows: list[int] | None) -> None:
    inputs = text_prompt(90, 3, True, 2, length=9)
    edits = [Steer("model.layers.1", vector_of(model), 4, rows=rows, tokens="generated")]
    asked = {**ASKED, "max_new_tokens": 14, "interventions": edits}
    drafting = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": model},
        "early exit": {"assistant_early_exit": 1},
        "memory": {"assistant_model": hfgen.SuffixMemory(2**20)},
    }[drafts]
    expected = model.generate(**inputs, **asked)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **asked, **drafting), expected)


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
def test_requests_of_an_engine_are_their_own(model: Any, ways: dict[str, Any]) -> None:
    prompts = [tiny.prompt(1, n, n) for n in (5, 8, 6)]
    edits = [None, [Steer("model.layers.1", vector_of(model), 5)], [Ablate("model.layers.0.mlp")]]
    asked = {**ASKED, "max_new_tokens": 9, **ways, "return_dict_in_generate": True}
    asked["record"] = "model.layers.1"
    expected = [
        model.generate(ids, **asked, interventions=edit)
        for ids, edit in zip(prompts, edits, strict=True)
    ]
    with hfgen.Engine(model) as engine:
        asked.pop("return_dict_in_generate")
        requests = [
            engine.add(ids, **asked, interventions=edit)
            for ids, edit in zip(prompts, edits, strict=True)
        ]
        outputs = [request.result().generate_output for request in requests]
    for output, solo in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, solo.sequences)
        pairs = zip(
            output.activations["model.layers.1"], solo.activations["model.layers.1"], strict=True
        )
        for ours_, theirs in pairs:
            torch.testing.assert_close(ours_, theirs, rtol=1e-5, atol=1e-5)


def test_prompts_that_are_steered_are_forwarded_alone(model: Any) -> None:
    """The first round tells the engine that rows may be padded; prompts of one step are then forwarded at once."""
    prompts = [tiny.prompt(1, 6, seed) for seed in range(3)]
    edits = [None, [Steer("model.layers.1", vector_of(model), 5)], None]
    pairs = list(zip(prompts, edits, strict=True))
    expected = [model.generate(ids, max_new_tokens=4, interventions=edit) for ids, edit in pairs]
    with hfgen.Engine(model) as engine:
        for ids in tiny.prompt(1, 9, 7), tiny.prompt(1, 4, 8):
            engine.add(ids, max_new_tokens=9)
        engine.step()
        requests = [engine.add(ids, max_new_tokens=4, interventions=edit) for ids, edit in pairs]
        outputs = [request.result() for request in requests]
    for output, ids in zip(outputs, expected, strict=True):
        assert output.error is None
        assert torch.equal(output.generate_output.sequences, ids)


def test_a_patch_stands_at_positions_of_the_text(model: Any) -> None:
    """Patching in a row's own activations changes nothing; those of another row make that one's logits."""
    inputs = text_prompt(90, 2, True, 3, length=9)
    n = int((inputs["attention_mask"][1] == 0).sum())
    asked = {**WITH_SCORES, "record": "model.layers.0"}
    base = model.generate(**inputs, **asked)
    own = base.activations["model.layers.0"][1]
    patch = Patch("model.layers.0", own[: 9 - n], tokens=range(9 - n), rows=[1])
    same = model.generate(**inputs, **WITH_SCORES, interventions=[patch])
    torch.testing.assert_close(same.scores[0], base.scores[0], rtol=1e-5, atol=1e-5)
    other = model.generate(tiny.prompt(1, 9 - n, 77), **asked)
    values = other.activations["model.layers.0"][0][: 9 - n]
    patch = Patch("model.layers.0", values, tokens=range(9 - n), rows=[1])
    patched = model.generate(**inputs, **WITH_SCORES, interventions=[patch])
    torch.testing.assert_close(patched.scores[0][1], other.scores[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(patched.scores[0][0], base.scores[0][0], rtol=1e-5, atol=1e-5)


def test_an_ablated_direction_is_gone_and_a_function_is_told_where(model: Any) -> None:
    inputs, direction = text_prompt(90, 2, True, 4, length=7), vector_of(model, 5)
    asked = {**WITH_SCORES, "record": ["model.layers.1", "lm_head:in"]}
    edits = [Ablate("model.layers.1", direction)]
    output = model.generate(**inputs, **asked, interventions=edits)
    for hidden in output.activations["model.layers.1"]:
        assert (hidden @ direction).abs().max() < 1e-3
    seen = []

    def note(hidden: Tensor, where: Any) -> Tensor:
        seen.append((where.prompts.tolist(), where.positions.tolist(), where.is_generated.tolist()))
        return hidden

    model.generate(**inputs, **ASKED, interventions=[Edit("model.layers.0:in", note)])
    n = int((inputs["attention_mask"][1] == 0).sum())
    assert seen[0] == ([0, 1], [[*range(7)], [*range(-n, 7 - n)]], [False] * 7)
    assert seen[1:] == [([0, 1], [[7 + i], [7 - n + i]], [True]) for i in range(5)]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_embeddings_are_a_prompt(name: str, padded: bool) -> None:
    model, seen = ours(name), []

    def note(hidden: Tensor, where: hfgen.Where) -> Tensor:
        seen.append((where.positions.tolist(), where.is_generated.tolist()))
        return hidden

    inputs = inputs_of(name, padded=padded)
    calls = []
    for prompt in inputs["input_ids"], model.get_input_embeddings()(inputs["input_ids"]):
        kind = "inputs_embeds" if prompt.is_floating_point() else "input_ids"
        edit = Edit(layer_of(model), note)
        model.generate(**inputs | {"input_ids": None, kind: prompt}, **ASKED, interventions=[edit])
        calls.append([*seen])
        seen.clear()
    assert calls[0] == calls[1]
    positions, is_generated = calls[0][0]
    assert (min(map(min, positions)) < 0) is padded
    assert is_generated == [False] * 9


@pytest.mark.parametrize("padded", [True, False])
def test_tokens_in_a_cache_are_of_the_prompt(model: Any, padded: bool) -> None:
    inputs, seen = text_prompt(90, 2, True, 4, length=7), []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    mask = mask if padded else torch.ones_like(mask)

    def note(hidden: Tensor, where: hfgen.Where) -> Tensor:
        seen.append((where.positions[:, -3:].tolist(), where.is_generated[-3:].tolist()))
        return hidden

    asked = {**ASKED, "attention_mask": mask, "interventions": [Edit("model.layers.0", note)]}
    model.generate(ids, **asked)
    whole, cache = [*seen], DynamicCache(config=model.config)
    seen.clear()
    model(input_ids=ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
    model.generate(ids[:, 4:], **asked, past_key_values=cache)
    assert seen == whole


def test_a_text_that_is_not_all_in_its_ids_is_not_recorded(model: Any) -> None:
    ids, cache = tiny.prompt(2, 7), DynamicCache(config=model.config)
    asked = {**ASKED, "return_dict_in_generate": True, "record": "model.layers.1"}
    expected = model.generate(ids, **asked).activations["model.layers.1"]
    model(input_ids=ids[:, :4], past_key_values=cache)
    held = {"attention_mask": torch.ones_like(ids), CACHE: cache}
    with pytest.raises(ValueError, match=r"`input_ids` \(3 of 7\) lack"):
        model.generate(ids[:, 4:], **asked, **held)
    found = model.generate(ids, **asked, **held).activations["model.layers.1"]
    torch.testing.assert_close(found, expected)


def test_padding_amid_a_prompt_is_not_recorded(model: Any) -> None:
    ids, mask = tiny.prompt(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, 3] = mask[1, 6] = 0
    seen: list[Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda _, __, out: seen.append(out))
    asked = {"record": "model.layers.1", "return_dict_in_generate": True, "max_new_tokens": 1}
    output = model.generate(ids, attention_mask=mask, **asked)
    handle.remove()
    for row, found in enumerate(output.activations["model.layers.1"]):
        torch.testing.assert_close(found[:6], seen[0][row][mask[row] == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_and_records_have_equal_bits(dtype: torch.dtype) -> None:
    model = hfgen.mix_into(tiny.llama().to(dtype))
    hfgen.exact(model)
    inputs = text_prompt(90, 3, True, 1, length=9)
    n = int((inputs["attention_mask"][1] == 0).sum())

    def steer(**where: Any) -> list[Edit]:
        return [Steer("model.layers.0", vector_of(model), 2, tokens="generated", **where)]

    asked = {**WITH_SCORES, "record": ["model.layers.1"]}
    output = model.generate(**inputs, **asked, interventions=steer(rows=[1]))
    alone = model.generate(inputs["input_ids"][1:2, n:], **asked, interventions=steer())
    assert torch.equal(output.sequences[1:2, n:], alone.sequences)
    for ours_, theirs in zip(output.scores, alone.scores, strict=True):
        assert torch.equal(ours_[1], theirs[0])
    recorded = output.activations["model.layers.1"]
    assert torch.equal(recorded[1], alone.activations["model.layers.1"][0])
    found: list[Tensor] = []
    with (
        permanent(model.model.layers[1], lambda h: found.append(h[0].clone()) or h),
        torch.no_grad(),
    ):
        model(output.sequences[:1])
    assert torch.equal(recorded[0], found[0])


def test_a_prefix_cache_and_other_threads_are_left_alone(model: Any) -> None:
    prefixes, ids = hfgen.PrefixCache(), tiny.prompt(1, 12)
    expected = model.generate(ids, **ASKED)
    steered = {**ASKED, "interventions": [Steer("model.layers.0", vector_of(model), 6)]}
    with_edit = model.generate(ids, **steered)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **ASKED, prefix_cache=prefixes), expected)
        assert torch.equal(model.generate(ids, **steered, prefix_cache=prefixes), with_edit)
    found: dict[bool, list[Tensor]] = {True: [], False: []}

    def decode(is_steered: bool) -> None:
        for _ in range(12):
            found[is_steered].append(model.generate(ids, **(steered if is_steered else ASKED)))

    threads = [threading.Thread(target=decode, args=(each,)) for each in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(tokens, with_edit) for tokens in found[True])
    assert all(torch.equal(tokens, expected) for tokens in found[False])


def test_records_and_cards_are_of_their_own_threads(model: Any) -> None:
    """Each call's hooks look at the forwards of its own thread, whatever others forward with the model meanwhile."""
    prompts = [tiny.prompt(1, n) for n in (5, 9)]
    options = {**ASKED, "record": ["model.layers.0", "lm_head:in"], "output_card": True}
    options |= {"return_dict_in_generate": True}

    def call(ids: Tensor) -> Any:
        return model.generate(ids, **options)

    expected = [call(ids) for ids in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(call, prompts * 6))
    finally:
        sys.setswitchinterval(interval)
    for one, other in zip(found, expected * 6, strict=True):
        assert str(one.card) == str(other.card)
        for name, recorded in other.activations.items():
            assert torch.equal(one.activations[name][0], recorded[0])


@pytest.mark.parametrize("asked", ["record", "interventions"])
def test_hooks_removed_while_another_thread_forwards(model: Any, asked: str) -> None:
    """torch lists the hooks of a module when its forward begins, and calls also those removed since."""
    ids, is_inside, may_go_on = tiny.prompt(1, 5), threading.Event(), threading.Event()
    expected, own, found = model(ids).logits, threading.get_ident(), list[Any]()

    def begin(*_: Any) -> None:
        """The other thread's forward begins while the hooks of this call are there."""
        has_hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) > 1
        if threading.get_ident() == own and has_hooks and not found:
            found.append(threads.submit(lambda: model(ids).logits))
            assert is_inside.wait(60)

    def wait(*_: Any) -> None:
        if threading.get_ident() != own:
            is_inside.set()
            assert may_go_on.wait(60)

    edits = [Steer("model.layers.0", vector_of(model))]
    values: dict[str, Any] = {"record": ["lm_head:in"], "interventions": edits}
    module = model if asked == "interventions" else model.lm_head
    with (
        ThreadPoolExecutor(1) as threads,
        module.register_forward_pre_hook(wait),
        model.model.layers[0].register_forward_hook(begin),
    ):
        try:
            options = {**ASKED, asked: values[asked], "return_dict_in_generate": True}
            model.generate(ids, **options)
        finally:
            may_go_on.set()
        assert torch.equal(found[0].result(), expected)


@pytest.mark.parametrize("asked", ["interventions", "record"])
def test_a_hook_that_is_registered_as_an_interrupt_comes_does_nothing(
    model: Any, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has its handle, so that it stays on the module."""
    name = layer_of(model)
    inputs = inputs_of("llama")
    values: dict[str, Any] = {"record": [name], "interventions": [Steer(name, vector_of(model))]}
    expected, module = model.generate(**inputs, **WITH_SCORES), model.get_submodule(name)
    n_before, register = len(hooks(model)), module.register_forward_hook

    def interrupted(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "register_forward_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**inputs, **WITH_SCORES, **{asked: values[asked]})
    assert len(hooks(model)) == n_before + 1
    found = model.generate(**inputs, **WITH_SCORES)
    assert all(map(torch.equal, found.scores, expected.scores))
    for each in module._forward_hooks, module._forward_pre_hooks:
        for key in [key for key, hook in each.items() if hook.__module__.startswith("hfgen.")]:
            del each[key]


def test_no_hook_stays(model: Any) -> None:
    ids = tiny.prompt(1)

    def breaks(hidden: Tensor, where: Any) -> Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        model.generate(ids, **ASKED, interventions=[Edit("model.layers.0", breaks)])
    assert not hooks(model)
    edits = [Steer("model.layers.0", vector_of(model))]
    stream = model.stream(ids, **ASKED, interventions=edits)
    next(stream)
    assert not hooks(model)  # the consumer's own forwards are not changed
    stream.close()
    assert not hooks(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="has to return a tensor of the shape"):
            model.generate(
                ids,
                **ASKED,
                interventions=[Edit("model.layers.0", lambda hidden, _: hidden[:, :1])],
            )
    assert not hooks(model)


def test_records_of_rows_in_files_and_their_limit(model: Any, tmp_path: Path) -> None:
    inputs = text_prompt(90, 2, True, 4, length=7)
    asked = {**ASKED, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **asked, record="model.layers.*").activations
    record = Record("model.layers.*", folder=tmp_path, max_bytes=0)
    assert model.generate(**inputs, **asked, record=record).activations == {}
    for row in range(2):
        found = load_file(tmp_path / f"{row}.safetensors")
        assert all(torch.equal(found[name], rows[row]) for name, rows in expected.items())
    with pytest.raises(ValueError, match=r"take about 3,328 bytes, more than `max_bytes`=3,000"):
        model.generate(**inputs, **asked, record=Record("model.norm", max_bytes=3000))


def test_rows_that_end_early_have_no_padding(model: Any) -> None:
    ids = tiny.prompt(2, 6)
    rows = model.generate(ids, **ASKED)[:, 6:].tolist()
    eos = next(token for token in rows[0][1:] if token not in rows[1])
    asked = {**ASKED, "eos_token_id": eos, "return_dict_in_generate": True}
    recorded = model.generate(ids, **asked, record="lm_head").activations["lm_head"]
    assert [len(row) for row in recorded] == [6 + rows[0].index(eos) + 1, 12]


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (
            lambda v: Steer("model.layer.0", v),
            {},
            "no module 'model.layer.0'. Nearest: model.layers",
        ),
        (lambda v: Steer("model.layers.0", v[:5]), {}, "returns 32 numbers a token, not 5"),
        (lambda v: Steer("model.layers.0", v * torch.nan), {}, "NaN or infinite"),
        (lambda v: Steer("model.layers.0", v, rows=[2]), {}, "are .2., but there are 1"),
        (lambda v: Steer("model.layers.0", v, rows=[]), {}, "`rows` has to hold integers"),
        (lambda v: Steer("model.layers.0", v, tokens="last"), {}, "`tokens` has to be one of"),
        (lambda v: Ablate("model.layers.0", v * 0), {}, "`direction` is zero"),
        (
            lambda v: Patch("model.layers.0", v, [0, 1]),
            {},
            "`values` have to be a tensor .2, width",
        ),
        (lambda v: Steer("model.layers.0.self_attn.rotary", v), {}, "no module"),
        (lambda v: Ablate("model.embed_tokens:in"), {}, "need .rows, tokens, width"),
        (lambda v: Steer("model.layers.0", v), {"guidance_scale": 2.0}, "`guidance_scale`"),
        (lambda v: Steer("model.layers.0", v), {"drop_finished": True}, "`drop_finished`"),
        (lambda v: Steer("model.layers.0", v), {"use_cuda_graph": True}, "`use_cuda_graph`"),
    ],
)
def test_what_cannot_be_done_is_named(
    model: Any, edit: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(tiny.prompt(1), **ASKED, **options, interventions=[edit(vector_of(model))])
    assert not hooks(model)


def test_modules_that_are_not_called_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = ours("t5"), inputs_of("t5")
    with pytest.raises(ValueError, match=r"'encoder.block.0'. of `interventions` are not called"):
        model.generate(**inputs, **ASKED, interventions=[Ablate("encoder.block.0")])
    assert not hooks(model)
    asked = {**ASKED, "return_dict_in_generate": True, "record": "encoder.block.0"}
    warnings: list[str] = []
    monkeypatch.setattr(activations.logger, "warning_once", warnings.append)
    assert model.generate(**inputs, **asked).activations == {}
    assert "encoder.block.0 were not called" in warnings[0]


def test_layers_of_optimize_are_steered_or_refused(model: Any) -> None:
    optimized = copy.deepcopy(model)
    ids, edits = tiny.prompt(2), [Steer("model.layers.0", vector_of(model), 5)]
    expected = model.generate(ids, **ASKED, interventions=edits)
    hfgen.optimize(optimized)
    assert torch.equal(optimized.generate(ids, **ASKED, interventions=edits), expected)


def test_other_kinds_of_arguments_are_named(model: Any) -> None:
    ids = tiny.prompt(1)
    with pytest.raises(TypeError, match="has to be a list of hfgen"):
        model.generate(ids, **ASKED, interventions=["model.layers.0"])
    with pytest.raises(TypeError, match="has to be a list of hfgen"):
        model.generate(ids, **ASKED, interventions=Ablate("model.norm"))
    with pytest.raises(TypeError, match="`record` has to hold names of modules"):
        model.generate(ids, **ASKED, record=[3])
    with pytest.raises(ValueError, match="set `return_dict_in_generate=True`"):
        model.generate(ids, **ASKED, record="model.norm")
    with pytest.raises(TypeError, match="`vector` has to be a tensor of numbers"):
        Steer("model.norm", [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`function` has to be callable"):
        Edit("model.norm", 3)  # type: ignore[arg-type]
