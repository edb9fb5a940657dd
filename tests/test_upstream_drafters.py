"""Speculation through upstream's own generator objects: heads, blocks, Gemma's assistants, the caller's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

import hfgen
from hfgen.decoding.drafters.upstream import SINGLE_POSITION
from hfgen.families import CACHE
from tests.drafting_models import with_diffusion, with_heads, with_single_position
from tests.tiny import VOCAB, llama, prompt

LACKS_KINDS = not hasattr(transformers, "MuseGlimmerAssistantModel")
pytestmark = pytest.mark.skipif(LACKS_KINDS, reason="this release lacks some of the kinds")

KINDS = ("one head", "three heads", "blocks", "single position")
NEW = 18


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: Any) -> dict[str, tuple[PreTrainedModel, dict[str, Any]]]:
    """Of each kind, upstream's model and the arguments that make it speculate."""
    blocks, block_assistant = with_diffusion()
    gemma, gemma_assistant = with_single_position()
    heads = {n: with_heads(tmp_path_factory.mktemp(f"heads_{n}"), n) for n in (1, 3)}
    return {
        "one head": (heads[1], {"use_mtp": True}),
        "three heads": (heads[3], {"use_mtp": True}),
        "blocks": (blocks, {"assistant_model": block_assistant, "speculation_type": "dflash"}),
        "single position": (gemma, {"assistant_model": gemma_assistant}),
    }


def mixed(model: PreTrainedModel) -> Any:
    """A copy that generates with hfgen."""
    return hfgen.mix_into(copy.deepcopy(model))


class Streamer:
    """Keeps the chunks that it gets."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.chunks.append([])


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The lengths of what the model forwards within."""
    lengths: list[int] = []
    forward = type(model).forward

    @functools.wraps(forward)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", counting)
        yield lengths


def observed(model: Any, **kwargs: Any) -> dict[str, Any]:
    """All that a call at one row shows."""
    streamer = Streamer()
    torch.manual_seed(3)
    with counted(model) as forwards:
        output = model.generate(
            prompt(rows=1, seed=kwargs.pop("seed", 0)),
            streamer=streamer,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            max_new_tokens=NEW,
            **kwargs,
        )
    return {
        "sequences": output.sequences,
        "scores": torch.stack(output.scores),
        "logits": torch.stack(output.logits),
        "chunks": streamer.chunks,
        "forwards": len(forwards),
        "draws": torch.get_rng_state(),
    }


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(ours[name], value, msg=lambda text, n=name: f"{n}: {text}")
        else:
            assert ours[name] == value, name


# --- the kinds that models bring ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "eos_token_id": None},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"do_sample": True, "eos_token_id": None},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "seed": 1},
    ],
    ids=["greedy", "penalty", "sample", "warped"],
)
def test_one_row_is_upstreams(speculating: Any, kind: str, options: dict[str, Any]) -> None:
    model, drafting = speculating[kind]
    assert_same(
        observed(model, **options, **drafting), observed(mixed(model), **options, **drafting)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_are_asked_for_are_whole(speculating: Any, kind: str) -> None:
    """Kinds that read some hidden states do not keep the caller from the others."""
    upstream, drafting = speculating[kind]
    model = mixed(upstream)
    options = {
        "max_new_tokens": 12,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    plain = model.generate(prompt(1), **options)
    drafted = model.generate(prompt(1), **options, **drafting)
    assert len(drafted.hidden_states) == len(plain.hidden_states) == 12
    for theirs, ours in zip(plain.hidden_states, drafted.hidden_states, strict=True):
        for expected, layer in zip(theirs, ours, strict=True):
            torch.testing.assert_close(layer, expected, atol=1e-4, rtol=1e-4)
    unasked = model.generate(prompt(1), **(options | {"output_hidden_states": False}), **drafting)
    assert unasked.hidden_states is None


def test_a_gemma_assistant_without_a_number_of_tokens() -> None:
    target, assistant = with_single_position(n_tokens=None)
    ids = prompt(rows=1)
    model = mixed(target)
    plain = model.generate(ids, max_new_tokens=12, eos_token_id=None)
    drafted = model.generate(
        ids, assistant_model=assistant, num_assistant_tokens=4, max_new_tokens=12, eos_token_id=None
    )
    assert drafted.tolist() == plain.tolist()
    assert assistant.generation_config.num_assistant_tokens is None


# --- generators of the caller's -----------------------------------------------------------------


class Copying(CandidateGenerator):
    """Drafts what followed the last token before, one token more after each success; keeps a log."""

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar = {"output_hidden_states": True}
    made: ClassVar[list[Copying]] = []

    def __init__(self, n_tokens: int = 2) -> None:
        self.n_tokens = n_tokens
        self.log: list[Any] = []
        Copying.made.append(self)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        outputs = kwargs["model_outputs"]
        states = None if outputs is None else outputs.hidden_states
        self.log.append(
            {
                "ids": input_ids.tolist(),
                "first": kwargs["is_first_iteration"],
                "matches": kwargs["n_last_matches"],
                "mask": _listed(kwargs["model_kwargs"]["attention_mask"]),
                "positions": kwargs["model_kwargs"]["position_ids"].tolist(),
                "states": states and [tuple(state.shape) for state in states],
                "logits": None if outputs is None else tuple(outputs.logits.shape),
            }
        )
        ids = input_ids[0].tolist()
        earlier = [i for i in range(len(ids) - 1) if ids[i] == ids[-1]]
        if not earlier:
            return input_ids, None
        guess = input_ids[:, earlier[-1] + 1 :][:, : self.n_tokens]
        return torch.cat([input_ids, guess], dim=1), None

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        self.log.append((input_ids.tolist(), tuple(scores.shape), int(num_matches)))
        self.n_tokens = self.n_tokens + 1 if num_matches else 2


def _listed(tensor: Tensor | None) -> list | None:
    return None if tensor is None else tensor.tolist()


class Sampling(Copying):
    """Has scores in some rounds and none in others, and draws its tokens from them."""

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        super().get_candidates(input_ids, **kwargs)
        if input_ids.shape[1] % 3 == 0:
            return torch.cat([input_ids, input_ids[:, -2:]], dim=1), None
        scores = torch.zeros(1, self.n_tokens, VOCAB)
        scores[:, :, input_ids[0, -3:]] = 6.0  # the model repeats itself
        tokens = torch.multinomial(scores[0].softmax(dim=-1), 1).T
        return torch.cat([input_ids, tokens], dim=1), scores


@pytest.fixture
def looping() -> PreTrainedModel:
    """A model that repeats itself, with accidents."""
    return llama(initializer_range=0.2)


def overriding(model: PreTrainedModel, kind: type[CandidateGenerator]) -> PreTrainedModel:
    """``model``, with a class whose ``_get_candidate_generator`` returns a ``kind``."""

    def hook(self: Any, **kwargs: Any) -> CandidateGenerator:
        assert len(kwargs["input_ids"]) == 1
        return kind()

    cls = type(model)
    model = copy.deepcopy(model)
    model.__class__ = type(cls.__name__, (cls,), {"_get_candidate_generator": hook})
    return model


@pytest.mark.parametrize("kind", [Copying, Sampling])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("is_hook", [False, True], ids=["passed", "hook"])
def test_a_generator_of_ones_own_sees_what_upstream_shows_it(
    looping: PreTrainedModel, kind: type[Copying], do_sample: bool, is_hook: bool
) -> None:
    options: dict[str, Any] = {"do_sample": do_sample, "eos_token_id": None, "temperature": 0.3}
    options = options if do_sample else {"do_sample": False, "eos_token_id": None}
    theirs_model = overriding(looping, kind)
    theirs = observed(theirs_model, assistant_model=looping, **options)
    expected = Copying.made[-1].log
    if is_hook:
        ours = observed(mixed(theirs_model), assistant_model=looping, **options)
    else:
        ours = observed(mixed(looping), assistant_model=kind(), **options)
    assert_same(theirs, ours)
    assert any(isinstance(entry, tuple) and entry[2] > 0 for entry in expected)
    assert Copying.made[-1].log == expected


def test_a_generator_is_asked_for_the_last_token_too(looping: PreTrainedModel) -> None:
    theirs, logs = overriding(looping, Copying), []
    for model in theirs, mixed(theirs):
        model.generate(prompt(rows=1), assistant_model=looping, max_new_tokens=1)
        logs.append(Copying.made[-1].log)
    assert [len(log) for log in logs] == [2, 2]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("is_hook", [False, True], ids=["passed", "hook"])
def test_a_generator_cannot_follow_several_rows(looping: PreTrainedModel, is_hook: bool) -> None:
    model = mixed(overriding(looping, Copying) if is_hook else looping)
    name = "transformers' generator" if is_hook else "Copying"
    with (
        counted(model) as forwards,
        pytest.raises(ValueError, match=f"{name} drafts for one.*are 2"),
    ):
        model.generate(prompt(rows=2), assistant_model=Copying(), max_new_tokens=4)
    assert forwards == []


def test_what_a_generator_returns_is_checked(looping: PreTrainedModel) -> None:
    class Wrong(CandidateGenerator):
        def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return input_ids[:, -1:], None

    with pytest.raises(ValueError, match=r"Wrong.get_candidates\(\) has to return the 7 ids"):
        mixed(looping).generate(prompt(rows=1), assistant_model=Wrong(), max_new_tokens=4)


# --- errors -------------------------------------------------------------------------------------


def _errors(speculating: Any) -> dict[str, tuple[Any, dict[str, Any], type[Exception], str]]:
    blocks, block_call = speculating["blocks"]
    _, gemma_call = speculating["single position"]
    heads, _ = speculating["one head"]
    homeless = copy.deepcopy(heads)
    homeless.config.name_or_path = ""
    narrow = copy.deepcopy(gemma_call["assistant_model"])
    narrow.config.backbone_hidden_size = 16
    gemma, _ = speculating["single position"]
    deep = copy.deepcopy(block_call["assistant_model"])
    deep.config.target_layer_ids = [0, 5]
    dflash = {"speculation_type": "dflash"}
    no_heads = (blocks, {"use_mtp": True}, ValueError, "has no `num_mtp_layers`")
    embeds = {"inputs_embeds": torch.zeros(1, 4, 32), "input_ids": None}
    cache = DynamicCache(config=heads.config)
    with torch.no_grad():
        heads(prompt(rows=1)[:, :3], past_key_values=cache)
    return {
        "heads, none there": no_heads,
        "heads, no checkpoint": (homeless, {"use_mtp": True}, ValueError, "not loaded from one"),
        "heads, embeddings": (heads, {"use_mtp": True} | embeds, ValueError, "pass `input_ids`"),
        "heads, a cached prompt": (
            heads,
            {"use_mtp": True, CACHE: cache},
            ValueError,
            "holds 3 tokens",
        ),
        "blocks, other assistant": (
            blocks,
            dflash | {"assistant_model": llama()},
            ValueError,
            "its config has no target_layer_ids, block_size, mask_token_id",
        ),
        "blocks, other depth": (
            blocks,
            dflash | {"assistant_model": deep},
            ValueError,
            r"reads the layers \[0, 5\]",
        ),
        "blocks, not asked for": (
            blocks,
            {"assistant_model": block_call["assistant_model"]},
            TypeError,
            "speculation_type='dflash'",
        ),
        "gemma, other target": (
            blocks,
            gemma_call,
            ValueError,
            "cannot draft for LlamaForCausalLM",
        ),
        "gemma, other size": (gemma, {"assistant_model": narrow}, ValueError, "of size 16"),
    }


ERRORS = (
    "heads, none there",
    "heads, no checkpoint",
    "heads, embeddings",
    "heads, a cached prompt",
    "blocks, other assistant",
    "blocks, other depth",
    "blocks, not asked for",
    "gemma, other target",
    "gemma, other size",
)


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_draft_is_an_error_before_the_first_forward(
    speculating: Any, name: str
) -> None:
    model, kwargs, error, message = _errors(speculating)[name]
    model = mixed(model)
    with counted(model) as forwards, pytest.raises(error, match=message):
        model.generate(**({"input_ids": prompt(rows=1), "max_new_tokens": 4} | kwargs))
    assert forwards == []


@pytest.mark.parametrize("name", ["heads, none there", "gemma, other target"])
def test_upstream_raises_the_same_class(speculating: Any, name: str) -> None:
    model, kwargs, error, _ = _errors(speculating)[name]
    with pytest.raises(error):
        model.generate(prompt(rows=1), max_new_tokens=4, **kwargs)


def test_single_position_is_upstreams_class() -> None:
    """The kinds are looked up by name: a renamed one would silently become a stranger."""
    assert issubclass(SINGLE_POSITION, CandidateGenerator)
