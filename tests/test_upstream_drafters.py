"""Speculation through upstream's own generator objects: heads, blocks, Gemma's assistants, the caller's."""

from __future__ import annotations

import copy
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
from hfgen.decoding.drafters import Setup, make_drafter
from hfgen.decoding.drafters.upstream import SINGLE_POSITION, FromGenerators
from hfgen.state.run import Run
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

    def count(module: Any, arguments: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


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


def padded(rows: int = 3) -> dict[str, Tensor]:
    """A batch, the second row of which is shorter."""
    ids = prompt(rows=rows)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


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
@pytest.mark.parametrize(
    "options",
    [{"eos_token_id": None}, {"eos_token_id": [7, 9]}, {"repetition_penalty": 1.2}],
    ids=["plain", "eos", "penalty"],
)
def test_rows_of_a_batch_are_plain_decoding_s(
    speculating: Any, kind: str, options: dict[str, Any]
) -> None:
    upstream, drafting = speculating[kind]
    model = mixed(upstream)
    plain = model.generate(**padded(), max_new_tokens=NEW, **options)
    drafted = model.generate(
        **padded(),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_speculation=True,
        **options,
        **drafting,
    )
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.speculation.drafted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_batch_is_drafted_for_as_if_alone(speculating: Any, kind: str) -> None:
    """Twice the same prompt, once with padding: as many rounds as that prompt alone takes."""
    upstream, drafting = speculating[kind]
    model = mixed(upstream)
    ids = prompt(rows=1, length=6)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True}
    alone = model.generate(ids, output_speculation=True, **options, **drafting)
    pads = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.cat([pads, torch.ones_like(ids)], dim=1).repeat(2, 1)
    both = model.generate(
        torch.cat([pads, ids], dim=1).repeat(2, 1),
        attention_mask=mask,
        output_speculation=True,
        **options,
        **drafting,
    )
    assert both.sequences[:, 4:].tolist() == alone.sequences.repeat(2, 1).tolist()
    assert alone.speculation.accepted > 0
    assert both.speculation.forwards == alone.speculation.forwards
    assert both.speculation.accepted == 2 * alone.speculation.accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
def test_outputs_that_are_asked_for_are_whole(speculating: Any, kind: str, rows: int) -> None:
    """Kinds that read some hidden states do not keep the caller from the others."""
    upstream, drafting = speculating[kind]
    model = mixed(upstream)
    options = {
        "max_new_tokens": 12,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    plain = model.generate(prompt(rows), **options)
    drafted = model.generate(prompt(rows), **options, **drafting)
    assert len(drafted.hidden_states) == len(plain.hidden_states) == 12
    for theirs, ours in zip(plain.hidden_states, drafted.hidden_states, strict=True):
        for expected, layer in zip(theirs, ours, strict=True):
            torch.testing.assert_close(layer, expected, atol=1e-4, rtol=1e-4)
    unasked = model.generate(
        prompt(rows), **(options | {"output_hidden_states": False}), **drafting
    )
    assert unasked.hidden_states is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_sampled(speculating: Any, kind: str) -> None:
    """With one token left to sample from, the tokens are those of greedy decoding."""
    upstream, drafting = speculating[kind]
    model = mixed(upstream)
    greedy = model.generate(**padded(), max_new_tokens=12)
    torch.manual_seed(0)
    sampled = model.generate(**padded(), max_new_tokens=12, do_sample=True, top_k=1, **drafting)
    assert sampled.tolist() == greedy.tolist()


def test_scores_that_nothing_was_drawn_from_are_used_only_where_upstream_uses_them() -> None:
    """Gemma's drafts are the likeliest tokens: a batch takes them as certain, so samples stay exact."""
    target, assistant = with_single_position()
    model = mixed(target)
    for rows, has_logits in ((1, True), (2, False)):
        drafted: list[Any] = []

        class Spy(FromGenerators):
            def draft(self, context: Any, kept: list[Any] = drafted) -> Any:
                kept.append(super().draft(context))
                return kept[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hfgen.decoding.drafters.upstream.FromGenerators", Spy)
            model.generate(
                prompt(rows), assistant_model=assistant, do_sample=True, max_new_tokens=8
            )
        logits = [draft.logits is not None for draft in drafted if draft is not None]
        assert set(logits) == {has_logits}


def test_a_gemma_assistant_without_a_number_of_tokens() -> None:
    target, assistant = with_single_position(n_tokens=None)
    ids = prompt(rows=2)
    model = mixed(target)
    plain = model.generate(ids, max_new_tokens=12, eos_token_id=None)
    drafted = model.generate(
        ids, assistant_model=assistant, num_assistant_tokens=4, max_new_tokens=12, eos_token_id=None
    )
    assert drafted.tolist() == plain.tolist()
    assert assistant.generation_config.num_assistant_tokens is None


@pytest.mark.parametrize("kind", KINDS[:1])
def test_rows_share_the_weights_that_draft(speculating: Any, kind: str) -> None:
    model, _ = speculating[kind]
    run = _run(mixed(model), prompt(rows=3), use_mtp=True)
    drafter = make_drafter(Setup(run))
    assert isinstance(drafter, FromGenerators)
    generators: list[Any] = drafter.generators
    assert len({id(generator.mtp_model) for generator in generators}) == 1
    assert len({id(generator.mtp_cache) for generator in generators}) == 3


def _run(model: Any, ids: Tensor, **kwargs: Any) -> Run:
    """What ``generate`` prepares."""

    def prepared(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Run:
        return Run(
            model, input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs
        )

    run: Run = model.generate(ids, custom_generate=prepared, max_new_tokens=4, **kwargs)
    return run


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


def _length(entry: Any) -> int:
    """The ids that an entry of the log was made with."""
    return len((entry["ids"] if isinstance(entry, dict) else entry[0])[0])


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
    ours_log = Copying.made[-1].log
    if not do_sample:  # the last drafts are cut to what there is room for
        expected, ours_log = (
            [e for e in log if _length(e) < 7 + NEW - 8] for log in (expected, ours_log)
        )
    assert ours_log == expected


def test_a_hook_is_called_for_each_row_of_a_batch(looping: PreTrainedModel) -> None:
    model = mixed(overriding(looping, Copying))
    before = len(Copying.made)
    plain = model.generate(**padded(), max_new_tokens=NEW, eos_token_id=None)
    drafted = model.generate(
        **padded(), max_new_tokens=NEW, eos_token_id=None, prompt_lookup_num_tokens=3
    )
    assert drafted.tolist() == plain.tolist()
    generators = Copying.made[before:]
    assert len(generators) == 3
    for row, generator in enumerate(generators):
        rounds = [entry for entry in generator.log if isinstance(entry, dict)]
        assert rounds[0]["ids"] == padded()["input_ids"][row : row + 1].tolist()
        assert rounds[0]["mask"] == padded()["attention_mask"][row : row + 1].tolist()
        assert {state[0] for entry in rounds[1:] for state in entry["states"]} == {1}


class Guessing(CandidateGenerator):
    """Two tokens from scores of its own, or, where the first token is odd, the last tokens again."""

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        if input_ids[0, -1] % 2:
            return torch.cat([input_ids, input_ids[:, -2:]], dim=1), None
        scores = torch.linspace(0, 3, VOCAB).expand(1, 2, VOCAB)
        tokens = torch.multinomial(scores[0].softmax(dim=-1), 1).T
        return torch.cat([input_ids, tokens], dim=1), scores


def test_samples_of_a_batch_are_distributed_as_the_model_s(looping: PreTrainedModel) -> None:
    """The second token of many rows, which rows with and without scores draw, against its true odds."""
    rows, ids = 1500, prompt(rows=1)
    torch.manual_seed(0)
    sampled = mixed(overriding(looping, Guessing)).generate(
        ids,
        assistant_model=looping,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        max_new_tokens=2,
        num_return_sequences=rows,
    )
    every = torch.cat([ids.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
    with torch.no_grad():
        odds = looping(every).logits.softmax(dim=-1)
    true = odds[0, -2] @ odds[:, -1]
    found = torch.bincount(sampled[:, -1], minlength=VOCAB) / rows
    plain = torch.bincount(torch.multinomial(true, rows, replacement=True), minlength=VOCAB) / rows
    distance, noise = ((x - true).abs().sum() / 2 for x in (found, plain))
    assert distance < 1.1 * noise


def test_one_generator_cannot_follow_several_rows(looping: PreTrainedModel) -> None:
    model = mixed(looping)
    with counted(model) as forwards, pytest.raises(ValueError, match=r"one Copying.*there are 2"):
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
            {"use_mtp": True, "past_key_values": cache},
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
