"""``custom_generate``: a callable that decodes, or a repository whose ``generate`` runs instead."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hfgen
from hfgen.families import CACHE
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.parity.encoder_families import ENCODER_FAMILIES

FAMILIES = {family.name: family for family in (*DECODER_FAMILIES, *ENCODER_FAMILIES)}
IDS = torch.tensor([[5, 17, 42, 8], [9, 9, 61, 30]])


@functools.cache
def _built(family: str) -> nn.Module:
    return FAMILIES[family].build()


def fresh(family: str = "llama") -> Any:
    model: Any = copy.deepcopy(_built(family))
    model.generation_config.max_new_tokens = 6
    return model


@pytest.fixture
def theirs() -> Any:
    return fresh()


@pytest.fixture
def mine() -> Any:
    return hfgen.mix_into(fresh())


class Collected(BaseStreamer):
    """Keeps what it is given; ``None`` for the end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append(None)


# ---------------------------------------------------------------- callables


def greedy(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    every: int = 1,
    **model_kwargs: Any,
) -> Any:
    """A loop as users write it, on the model's hooks; ``every`` is an argument of its own."""
    is_done = torch.zeros(len(input_ids), dtype=torch.bool)
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    while not is_done.all():
        if outputs is None:
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1, **model_kwargs
            )
            outputs = model(**inputs, return_dict=True)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        scores = logits_processor(input_ids, outputs.logits[:, -1])
        tokens = scores.topk(every).indices[:, -1:]
        input_ids = torch.cat([input_ids, tokens], dim=1)
        is_done = is_done | stopping_criteria(input_ids, None)
        outputs = None
    return input_ids


@pytest.mark.parametrize("every", [None, 2])
def test_a_loop_on_the_hooks(theirs: Any, mine: Any, every: int | None) -> None:
    own = {} if every is None else {"every": every}
    # No EOS, so that the loop needs no padding.
    kwargs: dict[str, Any] = {"suppress_tokens": [2, 60]}
    expected = theirs.generate(IDS, custom_generate=greedy, **kwargs, **own)
    result = mine.generate(IDS, custom_generate=greedy, **kwargs, **own)
    assert torch.equal(result, expected)
    assert torch.equal(mine.generate(IDS, **kwargs), expected) == (every is None)


def test_a_loop_runs_on_an_encoder_decoder_model() -> None:
    def decode(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return input_ids, kwargs["encoder_outputs"].last_hidden_state

    expected = fresh("t5").generate(IDS, custom_generate=decode)
    result = hfgen.mix_into(fresh("t5")).generate(IDS, custom_generate=decode)
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


class Seen(Exception):
    """Carries what a callable was called with."""


def names_only(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).__name__, len(args), sorted(kwargs)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beams": {"num_beams": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "no cache": {"use_cache": False},
    "outputs": {"return_dict_in_generate": True, "output_attentions": True},
    "tokenizer": {"tokenizer": object()},
    "streamer": {"streamer": Collected()},
    "sync": {"synced_gpus": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_callable_gets_the_arguments_that_upstream_passes(
    theirs: Any, mine: Any, call: str
) -> None:
    kwargs = CALLS[call]
    expected = theirs.generate(IDS, custom_generate=names_only, **kwargs)
    assert mine.generate(IDS, custom_generate=names_only, **kwargs) == expected


def test_the_config_has_upstreams_values(theirs: Any, mine: Any) -> None:
    def look(model: Any, input_ids: Tensor, generation_config: Any, **kwargs: Any) -> Any:
        return generation_config.to_dict()

    for assistant in (None, theirs):
        kwargs = {"custom_generate": look, "assistant_model": assistant}
        expected, found = (model.generate(IDS[:1], **kwargs) for model in (theirs, mine))
        assert expected["num_assistant_tokens"] == 20
        assert {name: found.get(name) for name in expected} == expected


def test_everything_is_prepared(mine: Any) -> None:
    def look(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return input_ids, kwargs

    processor = transformers.SuppressTokensLogitsProcessor([7])
    criterion = transformers.MaxTimeCriteria(60.0)
    ids, kwargs = mine.generate(
        IDS,
        custom_generate=look,
        num_beams=2,
        max_new_tokens=5,
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert torch.equal(ids, IDS.repeat_interleave(2, dim=0))
    assert processor in kwargs["logits_processor"]
    assert criterion in kwargs["stopping_criteria"]
    assert kwargs["generation_config"].max_length == 9
    assert kwargs["generation_config"]._eos_token_tensor.tolist() == [2]
    assert kwargs[CACHE].get_seq_length() == 0
    assert kwargs["use_cache"] is True


def test_the_callable_gets_what_its_signature_names(mine: Any) -> None:
    """Upstream drops the streamer and ``synced_gpus``, which every method of its own gets."""

    def decode(
        model: Any, input_ids: Tensor, streamer: Any, synced_gpus: Any, tokenizer: Any, **_: Any
    ) -> Any:
        streamer.put(input_ids[:1, -1])
        streamer.end()
        return streamer, synced_gpus, tokenizer

    streamer, tokenizer = Collected(), object()
    result = mine.generate(
        IDS[:1], custom_generate=decode, streamer=streamer, synced_gpus=False, tokenizer=tokenizer
    )
    assert result == (streamer, False, tokenizer)
    assert streamer.seen == [IDS[:1].tolist(), [8], None]


def test_the_default_of_synced_gpus_is_passed(mine: Any) -> None:
    def decode(model: Any, input_ids: Tensor, synced_gpus: Any = None, **_: Any) -> Any:
        return synced_gpus

    assert mine.generate(IDS, custom_generate=decode) is False


def test_own_defaults_hold(mine: Any) -> None:
    def decode(model: Any, input_ids: Tensor, streamer: Any = 1, depth: int = 2, **_: Any) -> Any:
        return streamer, depth

    assert mine.generate(IDS, custom_generate=decode) == (1, 2)
    assert mine.generate(IDS, custom_generate=decode, depth=5) == (1, 5)


def test_an_argument_that_the_models_own_method_takes_too(theirs: Any, mine: Any) -> None:
    def sample(self: Any, input_ids: Tensor, depth: int = 0, **_: Any) -> Any:
        raise AssertionError

    def decode(model: Any, input_ids: Tensor, depth: int = 2, **_: Any) -> Any:
        return depth

    for model in (theirs, mine):
        model.__class__ = type("Mine", (type(model),), {"_sample": sample})
        assert model.generate(IDS, custom_generate=decode, depth=5) == 5


#: An argument that only has the name of a field or of hfgen's, and the parameter of the callable.
NAMED: dict[str, Any] = {
    "temperature": [1.0, 0.5, 0.2],
    "top_k": "all",
    "num_beams": [1, 2],
    "max_length": None,
    "stop": ["a", "b", "c"],
    "grammar": "expr",
    "record": ["scores"],
    "cancel": False,
    "interventions": 3,
    "prefix_cache": "dir",
}


@pytest.mark.parametrize("name", NAMED)
def test_an_argument_that_the_callable_names_is_its_own(theirs: Any, mine: Any, name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def decode(model, input_ids, {name}='unset', **_): return {name}", scope)
    for model in (theirs, mine):
        value = model.generate(IDS, custom_generate=scope["decode"], **{name: NAMED[name]})
        assert value == NAMED[name]


def test_the_config_may_be_pickled_and_copied_while_the_call_runs(mine: Any) -> None:
    def decode(model: Any, input_ids: Tensor, generation_config: Any, **_: Any) -> Any:
        copies = copy.deepcopy(generation_config), pickle.loads(pickle.dumps(generation_config))
        return [twin.to_dict() for twin in copies], generation_config.to_dict()

    function: Any = lambda ids, scores: scores  # noqa: E731
    processors = LogitsProcessorList([function])  # a lambda, which cannot be pickled
    copies, config = mine.generate(IDS, custom_generate=decode, logits_processor=processors)
    assert repr(copies) == repr([config, config])


def test_a_callable_that_counts_as_false_decodes(mine: Any) -> None:
    """As a list of modules that is empty does."""

    class Method(nn.ModuleList):
        def forward(self, model: Any, input_ids: Tensor, **_: Any) -> str:
            return "decoded"

    assert mine.generate(IDS, custom_generate=Method()) == "decoded"


def test_a_config_without_defaults_gets_a_cache(theirs: Any, mine: Any) -> None:
    """Code that decodes by itself passes what the model has, and not what ``generate`` makes of it."""
    for model in (theirs, mine):
        for config in (GenerationConfig(), model.generation_config):
            model_kwargs: dict[str, Any] = {}
            mode = config.get_generation_mode()
            model._prepare_cache_for_generation(config, model_kwargs, mode, 2, 12)
            assert isinstance(model_kwargs[CACHE], transformers.DynamicCache)


def test_an_unknown_argument_is_refused(theirs: Any, mine: Any) -> None:
    for model in (theirs, mine):
        with pytest.raises(ValueError, match="evry"):
            model.generate(IDS, custom_generate=greedy, evry=2)


@pytest.mark.parametrize("value", [None, "text", (1, {"a": 2})])
def test_the_return_value_is_passed_through(mine: Any, value: Any) -> None:
    assert mine.generate(IDS, custom_generate=lambda *_, **__: value) is value


def test_an_exception_reaches_the_caller_and_ends_the_streamer(mine: Any) -> None:
    def fail(model: Any, input_ids: Tensor, **_: Any) -> Any:
        raise Seen("here")

    streamer = Collected()
    with pytest.raises(Seen, match="here"):
        mine.generate(IDS[:1], custom_generate=fail, streamer=streamer)
    assert streamer.seen[-1] is None


def test_sample_keeps_its_named_parameters() -> None:
    """By these upstream tells a callable's own arguments from those of any method."""
    expected = inspect.signature(transformers.GenerationMixin._sample).parameters
    assert list(inspect.signature(hfgen.GenerationMixin._sample).parameters) == list(expected)


# ---------------------------------------------------------------- repositories

GENERATE = '''
def generate(model, marker="none", **kwargs):
    """Says what it was called with, and lets the model go on from a reversed prompt."""
    ids = kwargs.pop("inputs")
    tokens = model.__class__.generate(model, ids.flip(1), max_new_tokens=kwargs["max_new_tokens"])
    return {"marker": marker, "arguments": sorted(kwargs), "tokens": tokens}
'''


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local repository with weights and a ``generate`` of its own."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the cache is put into it
    folder = tmp_path / "repository"
    _built("llama").save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(GENERATE)
    return str(folder)


def test_repository(theirs: Any, mine: Any, repository: str) -> None:
    kwargs = {"custom_generate": repository, "trust_remote_code": True, "max_new_tokens": 4}
    expected = theirs.generate(IDS, **kwargs, marker="mine", streamer=None)
    result = mine.generate(IDS, **kwargs, marker="mine", streamer=None)
    assert result["marker"] == "mine"
    assert result["arguments"] == expected["arguments"]
    assert torch.equal(result["tokens"], expected["tokens"])
    assert torch.equal(result["tokens"], mine.generate(IDS.flip(1), max_new_tokens=4))


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}])
def test_repository_needs_trust(theirs: Any, mine: Any, repository: str, trust: Any) -> None:
    messages = []
    for model in (theirs, mine):
        with pytest.raises(ValueError, match="trust_remote_code") as raised:
            model.generate(IDS, custom_generate=repository, max_new_tokens=4, **trust)
        assert raised.type is ValueError
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_trust_is_not_asked_for_on_standard_input(
    mine: Any, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        mine.generate(IDS, custom_generate=repository, max_new_tokens=4)


def test_repository_without_a_generate_of_its_own(theirs: Any, mine: Any, tmp_path: Path) -> None:
    for model in (theirs, mine):
        with pytest.raises(OSError, match="custom_generate"):
            model.generate(IDS, custom_generate=str(tmp_path), trust_remote_code=True)


def test_from_pretrained_of_a_repository(mine: Any, repository: str) -> None:
    """The repository's ``generate`` takes the place of the model's, here as with upstream."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    model = hfgen.AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    assert isinstance(model, hfgen.GenerationMixin)
    result = model.generate(inputs=IDS, max_new_tokens=4)
    assert torch.equal(result["tokens"], expected.generate(inputs=IDS, max_new_tokens=4)["tokens"])
    plain = hfgen.AutoModelForCausalLM.from_pretrained(repository)
    assert torch.equal(plain.generate(IDS, max_new_tokens=4), mine.generate(IDS, max_new_tokens=4))


def test_a_callable_goes_before_the_mode(mine: Any) -> None:
    result = mine.generate(IDS, custom_generate=names_only, penalty_alpha=0.6, top_k=4)
    assert result[0] == "LlamaForCausalLM"
