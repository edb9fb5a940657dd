"""The ways to make a model generate with hfgen, and what has to stay as it was."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast

import hfgen
from hfgen import patching
from tests.parity.bare_families import BARE_FAMILIES
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.encoder_families import ENCODER_FAMILIES

FAMILIES = {family.name: family for family in (*DECODER_FAMILIES, *ENCODER_FAMILIES)}
IDS = torch.tensor([[5, 17, 42, 8], [9, 9, 61, 30]])


@functools.cache
def _built(family: str) -> nn.Module:
    return FAMILIES[family].build()


@pytest.fixture
def model() -> Any:
    """A model of upstream's, to be mixed or not."""
    return copy.deepcopy(_built("llama"))


@pytest.fixture
def expected() -> Tensor:
    """What upstream generates."""
    return generated(_built("llama"))


def generated(model: Any, **kwargs: Any) -> Any:
    """What ``generate`` returns for two text prompts, or for the inputs in ``kwargs``."""
    torch.manual_seed(0)
    return model.generate(**{"max_new_tokens": 6} | (kwargs or {"inputs": IDS}))


class Spy:
    """Counts the steps of hfgen's loop, so that a test knows whose loop ran."""

    steps = 0


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    original = hfgen.decoding.loop.steps

    def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for step in original(*args, **kwargs):
            spy.steps += 1
            yield step

    monkeypatch.setattr(hfgen.decoding.loop, "steps", steps)
    return spy


# ---------------------------------------------------------------- models and classes


def test_mixing_switches_the_instance_in_place(model: Any, expected: Tensor, spy: Spy) -> None:
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert torch.equal(generated(model), expected)
    assert spy.steps == 0
    assert hfgen.mix_into(model) is model
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights


def test_mixing_a_class_leaves_the_class_as_it_was(expected: Tensor, spy: Spy) -> None:
    mixed = hfgen.mix_into(LlamaForCausalLM)
    assert issubclass(mixed, LlamaForCausalLM)
    assert issubclass(mixed, hfgen.GenerationMixin)
    assert not issubclass(LlamaForCausalLM, hfgen.GenerationMixin)
    model = mixed(_built("llama").config).eval()
    model.load_state_dict(_built("llama").state_dict())
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6


def test_mixing_twice_changes_nothing(model: Any) -> None:
    mixed_class = type(hfgen.mix_into(model))
    assert hfgen.mix_into(hfgen.mix_into(model)) is model
    assert type(model) is mixed_class
    assert hfgen.mix_into(mixed_class) is mixed_class
    assert hfgen.mix_into(LlamaForCausalLM) is mixed_class


def test_names_are_kept(model: Any) -> None:
    mixed = type(hfgen.mix_into(model))
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(mixed, name) == getattr(LlamaForCausalLM, name)
    assert mixed.can_generate()
    assert repr(model).startswith("LlamaForCausalLM(\n")


def test_subclass_in_the_documented_order(expected: Tensor, spy: Spy) -> None:
    class Mine(LlamaForCausalLM, hfgen.GenerationMixin):
        pass

    model = Mine(_built("llama").config).eval()
    model.load_state_dict(_built("llama").state_dict())
    assert Mine.can_generate()
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6
    assert hfgen.mix_into(Mine) is Mine
    assert type(hfgen.mix_into(model)) is Mine


@pytest.mark.parametrize(
    ("family", "part"), [("csm", "depth_decoder"), ("blip_2", "language_model")]
)
def test_models_inside_of_a_model_are_mixed_as_well(family: str, part: str) -> None:
    model = hfgen.mix_into(copy.deepcopy(_built(family)))
    assert isinstance(model, hfgen.GenerationMixin)
    assert isinstance(getattr(model, part), hfgen.GenerationMixin)
    assert not isinstance(getattr(_built(family), part), hfgen.GenerationMixin)


def test_what_cannot_generate_is_refused() -> None:
    encoder = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    before = type(encoder)
    for thing in (encoder, transformers.BertModel, nn.Linear(2, 2), nn.Linear, "gpt2", None):
        with pytest.raises(TypeError, match=r"cannot generate|takes a transformers model"):
            hfgen.mix_into(thing)
    assert type(encoder) is before


def test_a_mixin_before_the_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\(LlamaForCausalLM, hfgen\.GenerationMixin\)"):
        type("Mine", (hfgen.GenerationMixin, LlamaForCausalLM), {})
    extended = type("Extended", (hfgen.GenerationMixin,), {})  # a mixin of one's own
    assert hfgen.is_active(type("Mine", (LlamaForCausalLM, extended), {}))
    with pytest.raises(TypeError, match="before LlamaForCausalLM"):
        type("Mine", (extended, LlamaForCausalLM), {})
    mixed = hfgen.mix_into(LlamaForCausalLM)
    with pytest.raises(TypeError, match=r"before LlamaForCausalLM|consistent method"):
        type("Mine", (hfgen.GenerationMixin, mixed), {})


@pytest.mark.parametrize("bases", ["mt", "tm", "mtu"])
@pytest.mark.parametrize("way", ["before", "after", "patch"])
def test_a_library_adds_its_mixin_to_the_type_of_a_model(
    model: Any, bases: str, way: str, spy: Spy
) -> None:
    """As lm-polygraph's ensembles do: its own mixin goes before hfgen's, as before transformers'."""

    class Theirs(transformers.GenerationMixin):
        calls = 0

        def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
            config, rest = super()._prepare_generation_config(*args, **kwargs)
            config.repetition_penalty = 1.7
            return config, rest

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            Theirs.calls += 1
            return super()._sample(*args, **kwargs)

    def derived(model: Any) -> Any:
        parts = {"m": type(model), "t": Theirs, "u": transformers.GenerationMixin}
        model.__class__ = type("Ensemble", tuple(parts[name] for name in bases), {})
        return model

    expected = generated(derived(copy.deepcopy(model)))
    assert Theirs.calls == 1
    assert not torch.equal(expected, generated(model))
    with hfgen.patched() if way == "patch" else nullcontext():
        if way == "before":
            hfgen.mix_into(model)
        derived(model)
        if way == "after":
            hfgen.mix_into(model)
        assert hfgen.is_active(model)
        assert isinstance(model, type(_built("llama")))
        assert torch.equal(generated(model), expected)
    assert Theirs.calls == 2
    assert spy.steps == 6
    assert ("generation=hfgen" in repr(model)) == (way != "patch")


def test_a_model_says_whether_it_is_active(model: Any) -> None:
    assert not hfgen.is_active(model)
    assert not hfgen.is_active(LlamaForCausalLM)
    assert not hfgen.is_active(transformers.LlamaModel)
    assert hfgen.is_active(hfgen.mix_into(LlamaForCausalLM))
    with hfgen.patched():
        assert hfgen.is_active(model)
        assert hfgen.is_active(LlamaForCausalLM)
        assert not hfgen.is_active(transformers.LlamaModel)
        assert not hfgen.is_active(nn.Linear(2, 2))
    assert not hfgen.is_active(model)
    hfgen.mix_into(model)
    assert hfgen.is_active(model)
    assert hfgen.is_active(nn.Sequential(model))
    assert not hfgen.is_active(nn.Sequential(model, copy.deepcopy(_built("gpt2"))))
    with pytest.raises(TypeError, match="is_active"):
        hfgen.is_active("llama")


def test_a_printed_model_says_who_generates(model: Any) -> None:
    before = repr(model)
    lines = repr(hfgen.mix_into(model)).splitlines()
    assert lines.pop(1) == "  generation=hfgen"
    assert lines == before.splitlines()


def test_a_printed_model_keeps_its_own_line() -> None:
    class Mine(LlamaForCausalLM):
        def extra_repr(self) -> str:
            return "mine=1"

    mixed = hfgen.mix_into(Mine(_built("llama").config))  # type: ignore[arg-type]
    assert repr(mixed).splitlines()[1:3] == ["  mine=1", "  generation=hfgen"]


def test_a_printed_model_with_the_mixin_as_a_base_says_who_generates(model: Any) -> None:
    extended = type("Extended", (hfgen.GenerationMixin,), {})  # a mixin of one's own
    for mixin in (hfgen.GenerationMixin, extended):
        mine = type("Mine", (LlamaForCausalLM, mixin), {})
        for cls in (mine, type("Derived", (mine,), {}), hfgen.mix_into(mine)):
            printed = repr(cls(model.config))
            assert printed.splitlines()[1] == "  generation=hfgen"
            assert printed.count("hfgen") == 1
    assert "hfgen" not in repr(model)


def test_a_pipeline_is_refused_with_advice(model: Any) -> None:
    pipeline = transformers.pipeline("text-generation", model, tokenizer=tiny_tokenizer())
    with pytest.raises(TypeError, match=r"TextGenerationPipeline: pass its `\.model`"):
        hfgen.mix_into(pipeline)


FAMILIES_OF_ALL_KINDS = (
    "llama gpt2 bloom mamba rwkv xlnet reformer gemma3_text t5 bart whisper speech_to_text "
    "parakeet_tdt kyutai_speech_to_text csm dia musicgen qwen2_vl blip_2 rag_token"
).split()


@pytest.mark.parametrize("family", FAMILIES_OF_ALL_KINDS)
def test_the_model_keeps_what_it_overrides(family: str) -> None:
    """hfgen's hooks stand right before upstream's, behind everything that the model defines."""
    cls: type = type(_built(family))
    mixed = hfgen.mix_into(cls)
    order = list(mixed.__mro__)
    place = order.index(hfgen.GenerationMixin)
    assert order[place + 1] is transformers.GenerationMixin
    assert order[:place] + order[place + 1 :] == [mixed, *cls.__mro__]


class Registered(LlamaForCausalLM):
    """A class that asks its subclasses for a name and knows each once, and whose models are frozen."""

    known: ClassVar[dict[str, type]] = {}
    is_frozen = False

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name in cls.known:
            raise ValueError(name)
        cls.known[name] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_frozen:
            raise AttributeError(name)
        super().__setattr__(name, value)


class OfRegistry(Registered, name="of a registry"):
    """Pickled by a function of its own, with its class among the arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self.config, self.state_dict())


def rebuilt(cls: type, config: Any, weights: Any) -> Any:
    model: Any = cls(config)
    model.load_state_dict(weights)
    model.is_rebuilt = True
    return model.eval()


def test_a_class_with_rules_of_its_own_is_mixed(model: Any, expected: Tensor, spy: Spy) -> None:
    own = rebuilt(OfRegistry, model.config, model.state_dict())
    own.is_frozen = True
    assert torch.equal(generated(hfgen.mix_into(own)), expected)
    assert spy.steps == 6
    assert type(own).__bases__ == (OfRegistry, hfgen.GenerationMixin)
    assert Registered.known == {"of a registry": OfRegistry}

    class Next(type(own), name="the next"):  # type: ignore[misc]
        """Subclasses of the mixed class are announced."""

    assert Registered.known.pop("the next") is Next


# ---------------------------------------------------------------- copies


def test_copies_by_a_method_of_the_class(model: Any, expected: Tensor, spy: Spy) -> None:
    own = hfgen.mix_into(rebuilt(OfRegistry, model.config, model.state_dict()))
    del own.is_rebuilt
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert copied.is_rebuilt
        assert type(copied) is type(own)
        assert torch.equal(generated(copied), expected)
    assert spy.steps == 12


def test_pickle(model: Any, expected: Tensor) -> None:
    copied = pickle.loads(pickle.dumps(hfgen.mix_into(model)))
    assert type(copied) is type(model)
    assert torch.equal(generated(copied), expected)


def test_deepcopy(model: Any, expected: Tensor) -> None:
    copied = copy.deepcopy(hfgen.mix_into(model))
    assert type(copied) is type(model)
    assert copied.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    assert torch.equal(generated(copied), expected)


def test_torch_save_and_load(model: Any, expected: Tensor) -> None:
    file = io.BytesIO()
    torch.save(hfgen.mix_into(model), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(model)
    assert torch.equal(generated(loaded), expected)


class Polite(hfgen.mix_into(LlamaForCausalLM)):  # type: ignore[misc]
    """A subclass of a mixed class, with a method of its own."""

    def greet(self) -> str:
        return "hello"


def test_copies_of_a_subclass_of_a_mixed_class(expected: Tensor) -> None:
    model = Polite(_built("llama").config).eval()
    model.load_state_dict(_built("llama").state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.greet() == "hello"
        assert type(copied) is Polite
        assert torch.equal(generated(copied), expected)


def test_subprocess(model: Any, expected: Tensor) -> None:
    generate = hfgen.mix_into(model).generate
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        # Upstream would not take this temperature: hfgen generates over there, too.
        result = pool.submit(generate, IDS, max_new_tokens=6, do_sample=True, temperature=0.0)
        assert torch.equal(result.result(timeout=600), expected)


def test_saved_weights_load_in_upstream(model: Any, expected: Tensor, tmp_path: Path) -> None:
    hfgen.mix_into(model).save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(generated(loaded.eval()), expected)
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(auto) is LlamaForCausalLM


# ---------------------------------------------------------------- hooks and wrappers


def test_forward_hooks_are_kept(model: Any) -> None:
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    generated(hfgen.mix_into(model))
    assert calls == ["before", "after"] * 6


def test_a_head_whose_weight_is_a_method(model: Any) -> None:
    """As in torch's quantised layers, which unpack it."""

    class Packed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def weight(self) -> Any:
            return self.layer.weight

        def forward(self, states: Tensor) -> Any:
            return self.layer(states)

    model.lm_head = Packed(model.lm_head)
    for options in ({}, {"num_beams": 2}):
        expected = generated(model, inputs=IDS, **options)
        mixed = hfgen.mix_into(copy.deepcopy(model))
        assert torch.equal(generated(mixed, inputs=IDS, **options), expected)


def test_replaced_forward_is_kept(model: Any) -> None:
    forward, calls = model.forward, []

    @functools.wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return forward(*args, **kwargs)

    model.forward = counting
    generated(hfgen.mix_into(model))
    assert len(calls) == 6


#: PEFT still asks models by the former name.
old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def lora(model: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config).eval()


@old_name
@pytest.mark.parametrize("mixed", ["before", "after", "both"])
def test_peft_lora(model: Any, expected: Tensor, spy: Spy, mixed: str) -> None:
    adapted = generated(lora(copy.deepcopy(model)))
    assert not torch.equal(adapted, expected), "the adapter does nothing"
    wrapped = lora(model if mixed == "after" else hfgen.mix_into(model))
    if mixed != "before":
        assert hfgen.mix_into(wrapped) is wrapped
    assert torch.equal(generated(wrapped), adapted)
    assert spy.steps == 6
    with wrapped.disable_adapter():
        assert torch.equal(generated(wrapped), expected)
    beams = {"inputs": IDS, "num_beams": 2}
    assert torch.equal(generated(wrapped, **beams), generated(lora(_copy()), **beams))
    assert torch.equal(generated(wrapped.merge_and_unload()), adapted)


@old_name
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # by this adapter
def test_peft_prompt_tuning(model: Any, spy: Spy) -> None:
    def tuned(base: Any) -> Any:
        torch.manual_seed(1)
        config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        return get_peft_model(base, config).eval()

    mask = torch.ones_like(IDS)
    adapted = generated(tuned(_copy()), input_ids=IDS, attention_mask=mask)
    wrapped = hfgen.mix_into(tuned(model))
    result = generated(wrapped, input_ids=IDS, attention_mask=mask)
    assert torch.equal(result, adapted)
    assert spy.steps == 6


def _copy() -> Any:
    return copy.deepcopy(_built("llama"))


@pytest.mark.parametrize("mixed", ["before", "after"])
def test_compiled_wrapper(model: Any, expected: Tensor, spy: Spy, mixed: str) -> None:
    if mixed == "before":
        model = hfgen.mix_into(model)
    compiled = torch.compile(model, backend="eager")
    if mixed == "after":
        assert hfgen.mix_into(compiled) is compiled
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
    assert torch.equal(generated(compiled), expected)
    assert spy.steps == 6


def test_bfloat16(model: Any, spy: Spy) -> None:
    model = model.to(torch.bfloat16)
    asked = {"inputs": IDS, "return_dict_in_generate": True, "output_scores": True}
    expected = generated(model, **asked)
    result = generated(hfgen.mix_into(model), **asked)
    assert spy.steps == 6
    assert torch.equal(result.sequences, expected.sequences)
    assert torch.equal(torch.stack(result.scores), torch.stack(expected.scores))
    assert result.scores[0].dtype == torch.float32
    assert result.past_key_values.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("mixed", ["before", "after"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_accelerate_offload(family: str, mixed: str, spy: Spy) -> None:
    expected = generated(_built(family))
    model = copy.deepcopy(_built(family))
    if mixed == "before":
        model = hfgen.mix_into(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    model = hfgen.mix_into(model)
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6


def test_accelerate_dispatch(model: Any, expected: Tensor, spy: Spy) -> None:
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "cpu", "lm_head": "cpu"}
    model = accelerate.dispatch_model(model, device_map, force_hooks=True)
    assert torch.equal(generated(hfgen.mix_into(model)), expected)
    assert model.hf_device_map == device_map
    assert model.lm_head._hf_hook is not None
    assert spy.steps == 6


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{token}": token for token in range(4, 96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


@pytest.mark.parametrize("way", ["mixed model", "patched"])
def test_pipeline(model: Any, spy: Spy, way: str) -> None:
    def texts(model: Any) -> Any:
        pipeline = transformers.pipeline("text-generation", model, tokenizer=tiny_tokenizer())
        prompts = ["w5 w17 w42", "w9", "w61 w30 w12 w8"]
        return pipeline(prompts, batch_size=2, max_new_tokens=5, do_sample=False)

    expected = texts(_copy())
    assert spy.steps == 0
    if way == "patched":
        with hfgen.patched():
            result = texts(model)
    else:
        result = texts(hfgen.mix_into(model))
    assert result == expected
    assert spy.steps == 10  # two batches


# ---------------------------------------------------------------- auto classes

AUTO_CLASSES = {
    "llama": hfgen.AutoModelForCausalLM,
    "t5": hfgen.AutoModelForSeq2SeqLM,
    "whisper": hfgen.AutoModelForSpeechSeq2Seq,
    "llava": hfgen.AutoModelForImageTextToText,
}


@pytest.mark.parametrize("family", AUTO_CLASSES)
def test_auto_class(family: str, tmp_path: Path, spy: Spy) -> None:
    auto = AUTO_CLASSES[family]
    assert auto.__name__ == auto.__mro__[2].__name__
    original = _built(family)
    original.save_pretrained(tmp_path)
    inputs = FAMILIES[family].inputs(original, 2, False, 0)
    expected = generated(original, **inputs)
    assert spy.steps == 0

    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set()
    placed = auto.from_pretrained(tmp_path, device_map="cpu", dtype=torch.float32)
    for model in (loaded, placed):
        assert isinstance(model, hfgen.GenerationMixin)
        assert isinstance(model, type(original))
        assert torch.equal(generated(model.eval(), **inputs), expected)
    assert spy.steps > 0
    made = auto.from_config(original.config, dtype=torch.bfloat16)
    assert isinstance(made, hfgen.GenerationMixin)
    assert made.dtype == torch.bfloat16


def test_auto_class_in_bfloat16(tmp_path: Path) -> None:
    _built("llama").save_pretrained(tmp_path)
    expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = hfgen.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(generated(loaded), generated(expected))


def test_auto_class_refuses_what_upstream_refuses(tmp_path: Path) -> None:
    _built("t5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        hfgen.AutoModelForCausalLM.from_pretrained(tmp_path)


# ---------------------------------------------------------------- everything


def attributes() -> dict[str, Any]:
    """Of upstream's mixin; Python adds ``__annotations__`` when somebody looks for it."""
    found = vars(transformers.GenerationMixin).items()
    return {name: value for name, value in found if name != "__annotations__"}


#: Before any test could patch.
UPSTREAM = attributes()


def test_unpatch_restores_upstream_exactly(model: Any, expected: Tensor, spy: Spy) -> None:
    hfgen.patch()
    try:
        during = attributes()
        assert torch.equal(generated(model), expected)
        assert spy.steps == 6
    finally:
        hfgen.unpatch()
    assert during["generate"] is hfgen.GenerationMixin.generate
    assert during.keys() >= UPSTREAM.keys()
    assert attributes() == UPSTREAM
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6


@pytest.mark.parametrize("name", ["patch", "unpatch", "patched"])
def test_patching_takes_no_model(model: Any, name: str) -> None:
    advice = rf"{name}\(\) takes no arguments, but got LlamaForCausalLM: .*hfgen\.mix_into\(model\)"
    with pytest.raises(TypeError, match=advice), getattr(hfgen, name)(model):
        pass
    assert attributes() == UPSTREAM


def test_each_patch_takes_an_unpatch() -> None:
    hfgen.patch()
    once = attributes()
    hfgen.patch()
    assert attributes() == once
    hfgen.unpatch()
    assert attributes() == once, "the first patch() still holds"
    hfgen.unpatch()
    assert attributes() == UPSTREAM
    hfgen.unpatch()  # one too many is not remembered
    hfgen.patch()
    assert attributes() == once
    hfgen.unpatch()
    assert attributes() == UPSTREAM


def test_patched_can_be_nested() -> None:
    with hfgen.patched():
        during = attributes()
        with hfgen.patched():
            assert attributes() == during
        assert attributes() == during
    assert attributes() == UPSTREAM
    hfgen.patch()
    with hfgen.patched():
        pass
    assert attributes() == during, "a patch from outside outlives the context"
    hfgen.unpatch()
    assert attributes() == UPSTREAM


def test_the_first_thread_to_leave_takes_nothing_from_the_other(model: Any, spy: Spy) -> None:
    entered, left = threading.Event(), threading.Event()

    def stay() -> Tensor:
        with hfgen.patched():
            entered.set()
            assert left.wait(60)
            return generated(model)

    with ThreadPoolExecutor(1) as pool:
        with hfgen.patched():
            staying = pool.submit(stay)
            assert entered.wait(60)
        left.set()
        staying.result(60)
    assert spy.steps == 6
    assert attributes() == UPSTREAM


def test_threads_that_patch_at_once() -> None:
    """Every thread finds all of hfgen's attributes between its own ``patch`` and ``unpatch``."""
    with hfgen.patched():
        during = attributes()
    together = threading.Barrier(4)

    def enter(_: int) -> bool:
        together.wait(60)
        complete = True
        for _ in range(50):
            with hfgen.patched():
                complete &= attributes() == during
        return complete

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(enter, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert attributes() == UPSTREAM


@pytest.mark.parametrize("at", [0, 5])
def test_an_exception_while_patching_leaves_nothing_replaced(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    calls = itertools.count()

    def interrupted(*arguments: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        setattr(*arguments)

    with monkeypatch.context() as context:
        context.setattr(patching, "setattr", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            hfgen.patch()
    assert attributes() == UPSTREAM
    with hfgen.patched():
        assert attributes() != UPSTREAM
    assert attributes() == UPSTREAM


def test_patched_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), hfgen.patched():
        raise KeyError
    assert attributes() == UPSTREAM


def test_models_built_while_patched(expected: Tensor, spy: Spy, tmp_path: Path) -> None:
    _built("llama").save_pretrained(tmp_path)
    with hfgen.patched():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert type(model) is LlamaForCausalLM
        assert torch.equal(generated(model), expected)
        assert torch.equal(generated(hfgen.mix_into(_copy())), expected)
    assert spy.steps == 12
    assert torch.equal(generated(model), expected)
    assert spy.steps == 12


def test_mixed_models_stay_mixed_after_unpatch(model: Any, expected: Tensor, spy: Spy) -> None:
    with hfgen.patched():
        hfgen.mix_into(model)
    assert torch.equal(generated(model), expected)
    assert spy.steps == 6


def test_patched_models_of_one_class_and_another(spy: Spy) -> None:
    """Subclasses that call ``super()`` reach hfgen's hooks."""

    class Shifted(GPT2LMHeadModel):
        def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._prepare_position_ids_for_generation(*args, **kwargs) + 3

    model = copy.deepcopy(_built("gpt2"))
    plain = generated(model)
    model.__class__ = Shifted
    expected = generated(model)
    assert not torch.equal(expected, plain)
    with hfgen.patched():
        assert torch.equal(generated(model), expected)
    assert spy.steps == 6


# ---------------------------------------------------------------- methods that libraries replace


def contrasting_sample(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """In the shape of VCD, OPERA, …: logits are contrasted with those of the last token alone."""
    unfinished = torch.ones(len(input_ids), dtype=torch.long)
    outputs = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
    while True:
        kwargs = self._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=self.config.is_encoder_decoder
        )
        logits = 2 * outputs.logits[:, -1] - self(input_ids[:, -1:], use_cache=False).logits[:, -1]
        scores = logits_processor(input_ids, logits.float())
        if generation_config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            tokens = scores.argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, tokens], dim=1)
        unfinished = unfinished & ~stopping_criteria(input_ids, None)
        if unfinished.max() == 0:
            return input_ids
        inputs = self.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs)
        outputs, model_kwargs = self(**inputs, return_dict=True), kwargs


def wrapped(name: str) -> Any:
    """Transformers' method, with another result: the shape of patches that call what they replace."""
    upstreams = getattr(transformers.GenerationMixin, name)

    @functools.wraps(upstreams)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = upstreams(self, *args, **kwargs)
        if name == "_get_logits_processor":
            result.append(transformers.SuppressTokensLogitsProcessor(range(0, 96, 2)))
        elif name == "generate":
            result = result.flip(1)
        elif name == "_get_top_k_continuations":
            result = (result[0] - torch.arange(result[0].shape[1]) / 2, *result[1:])
        elif name == "_expand_inputs_for_generation":
            result = (result[0] + 1, result[1])
        return result

    return method


REPLACEMENTS = {
    "_sample": contrasting_sample,
    **{
        name: wrapped(name)
        for name in (
            *("generate", "_get_logits_processor", "_expand_inputs_for_generation"),
            "_get_top_k_continuations",
        )
    },
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam samples": {"num_beams": 2, "do_sample": True},
}


def of_all_calls(model: Any) -> dict[str, list]:
    calls = {name: {"inputs": IDS, "pad_token_id": 3} | kwargs for name, kwargs in CALLS.items()}
    return {name: generated(model, **kwargs).tolist() for name, kwargs in calls.items()}


@pytest.mark.parametrize("name", REPLACEMENTS)
@pytest.mark.parametrize("way", ["mixed", "base class", "patched"])
@pytest.mark.parametrize("is_first", [True, False], ids=["replaced before", "replaced after"])
def test_a_method_that_a_library_replaces_is_called(
    way: str, is_first: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As upstream, in all orders of events; and no longer once it is put back."""
    plain = of_all_calls(_built("llama"))
    with monkeypatch.context() as context:
        context.setattr(transformers.GenerationMixin, name, REPLACEMENTS[name])
        expected = of_all_calls(_built("llama"))
    assert expected != plain
    with ExitStack() as stack:

        def replace() -> None:
            context = stack.enter_context(monkeypatch.context())
            context.setattr(transformers.generation.utils.GenerationMixin, name, REPLACEMENTS[name])

        if is_first:
            replace()
        model = _copy()
        if way == "mixed":
            hfgen.mix_into(model)
        elif way == "patched":
            stack.enter_context(hfgen.patched())
        else:
            model.__class__ = type("Mine", (LlamaForCausalLM, hfgen.GenerationMixin), {})
        if not is_first:
            replace()
        assert of_all_calls(model) == expected
    assert of_all_calls(model) == plain
    assert attributes() == UPSTREAM


@pytest.mark.parametrize("mixed", ["before", "after"])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_method_that_a_library_puts_on_a_model_class_is_called(
    name: str, mixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hfgen.mix_into(_copy()) if mixed == "before" else _copy()
    monkeypatch.setattr(LlamaForCausalLM, name, REPLACEMENTS[name], raising=False)
    assert of_all_calls(hfgen.mix_into(model)) == of_all_calls(_built("llama"))


def shaken(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """What a library may put in the place of a processor's ``__call__``: other scores in each column and step."""
    noise = torch.arange(scores.shape[1]) * (input_ids.shape[1] + 3) % 7
    return scores + noise


def at_odd_ids(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    """The same for criteria: rows end with the first odd id after the prompt."""
    is_over = input_ids[:, -1] % 2 == 1
    return is_over & (input_ids.shape[1] > IDS.shape[1]) | (input_ids.shape[1] >= 14)


class Forgetful(transformers.DynamicCache):
    """A cache that loses what the first layer saw."""

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        return keys, values * (layer_idx > 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (transformers.TemperatureLogitsWarper, {"temperature": 0.5, "top_k": 20}),
        (transformers.TopKLogitsWarper, {"top_k": 20}),
        (transformers.RepetitionPenaltyLogitsProcessor, {"repetition_penalty": 1.3}),
        (transformers.SuppressTokensLogitsProcessor, {"suppress_tokens": [3, 5]}),
        (transformers.LogitsProcessorList, {}),
        (transformers.MaxLengthCriteria, {"max_length": 9}),
        (transformers.StoppingCriteriaList, {}),
        (transformers.DynamicCache, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_class_of_transformers_that_a_library_changes_is_used(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``__call__``, also of the class that hfgen's own stands for; or the name in upstream's module."""
    modes: list[dict[str, Any]] = [{"do_sample": "top_k" in options}]
    modes += [{"do_sample": True, "num_beams": 2}]
    modes += [{"prompt_lookup_num_tokens": 2, "inputs": IDS[:1], "do_sample": "top_k" in options}]
    calls = [{"inputs": IDS, "pad_token_id": 3} | mode | options for mode in modes]

    def of_both(model: Any) -> list[Any]:
        return [generated(model, **call).tolist() for call in calls]

    plain = of_both(_built("llama"))
    if kind is transformers.DynamicCache:
        monkeypatch.setattr(transformers.generation.utils, "DynamicCache", Forgetful)
    else:
        is_end = "Criteria" in kind.__name__
        monkeypatch.setattr(kind, "__call__", at_odd_ids if is_end else shaken)
    expected = of_both(_built("llama"))
    assert expected != plain
    assert of_both(hfgen.mix_into(_copy())) == expected


def no_draft(ids: Any, drafted: Any, length: int, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the place of transformers' speculative sampling: the model's likeliest token, and no drafted one."""
    return logits[:, :1].argmax(dim=-1), torch.tensor(0)


def repeating(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the place of ``get_candidates``: the two newest tokens again; counts how often it is asked."""
    repeating.asked += 1  # type: ignore[attr-defined]
    return torch.cat([input_ids, input_ids[:, -2:]], dim=1), None


@pytest.mark.parametrize(
    ("name", "replacement", "options"),
    [
        ("TopKLogitsWarper", shaken, {"do_sample": True, "top_k": 20}),
        ("RepetitionPenaltyLogitsProcessor", shaken, {"repetition_penalty": 1.3}),
        ("LogitsProcessorList", shaken, {"num_beams": 2}),
        ("MaxLengthCriteria", at_odd_ids, {"max_length": 9}),
        ("StoppingCriteriaList", at_odd_ids, {}),
        ("StoppingCriteriaList", at_odd_ids, {"prompt_lookup_num_tokens": 2}),
        ("MaxLengthCriteria", at_odd_ids, {"prompt_lookup_num_tokens": 2, "max_length": 9}),
        ("_speculative_sampling", no_draft, {"do_sample": True}),  # and an assistant
        ("PromptLookupCandidateGenerator", repeating, {"prompt_lookup_num_tokens": 2}),
        (
            "PromptLookupCandidateGenerator.get_candidates",
            repeating,
            {"prompt_lookup_num_tokens": 2},
        ),
    ],
)
@pytest.mark.parametrize("way", ["mixed", "patched"])
def test_a_name_in_transformers_module_that_a_library_replaces_is_used(
    way: str, name: str, replacement: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subclass or function in the place of the one that ``generate`` reads; also while ``patch()`` holds."""
    call = {"inputs": IDS[:1], "pad_token_id": 3} | options
    if replacement is no_draft:
        call["assistant_model"] = _copy()
    plain = generated(_built("llama"), **call).tolist()
    generated(hfgen.mix_into(_copy()), **call)  # nothing is looked up once and for all
    repeating.asked = 0  # type: ignore[attr-defined]
    with hfgen.patched() if way == "patched" else nullcontext():
        module: Any = transformers.generation.utils
        kind, _, method = name.partition(".")
        if method:
            monkeypatch.setattr(getattr(module, kind), method, replacement)
        elif isinstance(getattr(module, kind), type):
            method = "get_candidates" if replacement is repeating else "__call__"
            attributes = {method: replacement, "__module__": __name__}
            subclass = type(kind, (getattr(module, kind),), attributes)
            monkeypatch.setattr(module, kind, subclass)
        else:
            monkeypatch.setattr(module, kind, replacement)
        tokens = generated(hfgen.mix_into(_copy()) if way == "mixed" else _copy(), **call).tolist()
    assert bool(repeating.asked) == (replacement is repeating)  # type: ignore[attr-defined]
    assert tokens == generated(_built("llama"), **call).tolist()
    assert (tokens == plain) == (replacement is repeating)  # drafts change no greedy token


def test_criteria_of_a_subclass_of_the_list_are_asked_where_drafts_are_verified() -> None:
    class EndsAtOddIds(transformers.StoppingCriteriaList):
        __call__ = at_odd_ids

    class Model(LlamaForCausalLM):
        def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
            return EndsAtOddIds(super()._get_stopping_criteria(*args, **kwargs))

    model = _copy()
    model.__class__ = Model
    call = {"inputs": IDS[:1], "prompt_lookup_num_tokens": 2}
    expected = generated(model, **call)
    assert expected.shape[1] < 14
    assert torch.equal(generated(hfgen.mix_into(model), **call), expected)


def test_classes_of_results_that_a_library_replaces_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = transformers.generation.utils
    model = hfgen.mix_into(copy.deepcopy(_built("bart_seq2seq")))
    for name in ("GenerateEncoderDecoderOutput", "DynamicCache"):
        subclass = type(f"My{name}", (getattr(module, name),), {"__module__": __name__})
        monkeypatch.setattr(module, name, subclass)
    output = generated(model, return_dict_in_generate=True)
    parts = (
        output.past_key_values.self_attention_cache,
        output.past_key_values.cross_attention_cache,
    )
    names = [type(each).__name__ for each in (output, *parts)]
    assert names == ["MyGenerateEncoderDecoderOutput", "MyDynamicCache", "MyDynamicCache"]


def test_a_head_that_the_model_does_not_show(model: Any, expected: Tensor) -> None:
    def get_output_embeddings() -> Any:
        raise NotImplementedError

    model.get_output_embeddings = get_output_embeddings
    assert torch.equal(generated(hfgen.mix_into(model)), expected)


@pytest.mark.parametrize("way", ["mixed", "patched"])
def test_generate_may_be_compiled(way: str, model: Any, expected: Tensor) -> None:
    """The call runs as it is, and a compiled forward of the model stays compiled."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with hfgen.patched() if way == "patched" else nullcontext():
        hfgen.mix_into(model) if way == "mixed" else None
        compiled = torch.compile(model.generate, backend=backend)
        torch.manual_seed(0)
        assert torch.equal(compiled(IDS, max_new_tokens=6), expected)
        assert not graphs
        model.forward = torch.compile(model.forward, backend=backend)
        assert torch.equal(compiled(IDS, max_new_tokens=1), expected[:, :5])
        assert graphs


def test_what_a_library_replaces_while_patched_outlives_it(model: Any, expected: Tensor) -> None:
    mixin: Any = transformers.GenerationMixin
    upstreams = mixin._sample
    with hfgen.patched():
        mixin._sample = contrasting_sample
        assert not torch.equal(generated(model), expected)
    try:
        assert mixin._sample is contrasting_sample
        assert mixin.generate is UPSTREAM["generate"]
        assert not torch.equal(generated(model), expected)
        with pytest.raises(TypeError, match="has a `_sample` of its own"):
            hfgen.mix_into(model).stream(IDS)
    finally:
        mixin._sample = upstreams
    assert attributes() == UPSTREAM


def test_a_candidate_generator_that_a_library_replaces_is_asked(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    upstreams = transformers.GenerationMixin._get_candidate_generator

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(type(self).__name__)
        return upstreams(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GenerationMixin, "_get_candidate_generator", method)
    generated(hfgen.mix_into(model), inputs=IDS[:1], prompt_lookup_num_tokens=2)
    assert asked == ["LlamaForCausalLM"]


# ---------------------------------------------------------------- classes that are no PreTrainedModel


def of_bare_class(build: Any, way: str) -> Any:
    model = build()
    if way == "instance":
        assert hfgen.mix_into(model) is model
    elif way == "class":
        model.__class__ = hfgen.mix_into(type(model))
    elif way == "base class":
        model.__class__ = type("Mine", (type(model), hfgen.GenerationMixin), {})
    return model


@pytest.mark.parametrize("family", BARE_FAMILIES, ids=str)
@pytest.mark.parametrize("way", ["instance", "class", "base class", "patched"])
def test_a_class_that_is_no_pretrained_model_generates(family: Any, way: str, spy: Spy) -> None:
    expected = of_all_calls(family.build())
    assert spy.steps == 0
    model = of_bare_class(family.build, way)
    with hfgen.patched() if way == "patched" else nullcontext():
        assert hfgen.is_active(model)
        assert hfgen.is_active(type(model))
        assert of_all_calls(model) == expected
        assert spy.steps > 0
        assert len(list(hfgen.mix_into(model).stream(IDS[:1], max_new_tokens=3))) == 3
        assert hfgen.free_caches(model) == 0


@pytest.mark.parametrize("family", BARE_FAMILIES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"drop_finished": True},
        {"logprobs": 2, "prompt_logprobs": 2, "return_dict_in_generate": True},
        {"prefix_cache": hfgen.PrefixCache()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_hfgens_own_options_with_such_a_class(family: Any, options: dict[str, Any]) -> None:
    model, kwargs = hfgen.mix_into(family.build()), {"pad_token_id": 3, "max_new_tokens": 6}
    expected = model.generate(IDS, **kwargs)
    for _ in range(2):
        output = model.generate(IDS, **kwargs, **options)
        assert torch.equal(getattr(output, "sequences", output), expected)


def test_what_such_a_class_lacks_is_named() -> None:
    module, wrapper, session = (hfgen.mix_into(family.build()) for family in BARE_FAMILIES)
    for model in (module, wrapper, session):
        with pytest.raises(ValueError, match="has none"):
            model.generate(IDS, dola_layers="low")
    with pytest.raises(TypeError, match="`model` has to be"):
        hfgen.Engine(session)
    result = next(iter(hfgen.generate_many(module, [IDS[0].tolist()], max_new_tokens=6)))
    assert result.sequences[0].token_ids == generated(module, inputs=IDS[:1])[0, 4:].tolist()
