"""``drop_finished=True``: rows that have ended are no longer forwarded, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import hfgen
from hfgen.families import CACHE
from tests import tiny
from tests.parity.harness import FAMILIES

EOS, PAD = 3, 0
#: At which step the rows end; the last one goes on.
ENDS = (2, 8, 4, 11)
NEW_TOKENS = 12

IDS = tiny.prompt(4, 6)
MASK = torch.ones_like(IDS)
IDS[1, :3], MASK[1, :3] = PAD, 0


class EndAt(LogitsProcessor):
    """Forces an EOS upon each row at its step, and none before."""

    def __init__(self, ends: tuple[int, ...] = ENDS, per_row: int = 1) -> None:
        self.ends = torch.tensor(ends).repeat_interleave(per_row)
        self.step = 0
        self.n_rows: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.n_rows.add(len(input_ids))
        scores = scores.clone()
        scores[:, EOS] = -torch.inf
        ends = self.ends == self.step
        scores[ends] = -torch.inf
        scores[ends, EOS] = 0.0
        self.step += 1
        return scores


class Chunks:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.chunks.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.chunks.append([])


def run(
    model: Any, inputs: dict[str, Any], ends: tuple[int, ...] = ENDS, **kwargs: Any
) -> tuple[list[int], Any]:
    """How many rows each forward had, and the output."""
    n_rows: list[int] = []
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"

    def watch(module: Any, args: tuple, given: dict[str, Any]) -> None:
        n_rows.append(len((*args, given.get(name))[0]))

    watch.is_row_wise = True  # else no row would leave
    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    defaults = {
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "max_new_tokens": NEW_TOKENS,
        "return_dict_in_generate": True,
        "logits_processor": LogitsProcessorList([EndAt(ends)]),
    }
    torch.manual_seed(0)
    with hook:
        output = model.generate(**inputs, **defaults | kwargs)
    return n_rows, output


def both(model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple[list[int], Any, Any]:
    """The rows of each forward, the output, and that of a call in which all rows stay."""
    _, plain = run(model, inputs, **kwargs)
    n_rows, dropping = run(model, inputs, drop_finished=True, **kwargs)
    assert torch.equal(dropping.sequences, plain.sequences)
    return n_rows, dropping, plain


TEXT = {"input_ids": IDS, "attention_mask": MASK}
KINDS = ["llama", "gemma2", "mamba", "jamba", "deepseek_v3", "qwen2_vl", "gemma3n_text", "bloom"]


@pytest.mark.parametrize("family", [*KINDS, "bart", "t5", "whisper", "mllama"])
def test_rows_that_ended_are_not_forwarded(family: str) -> None:
    model = hfgen.mix_into(FAMILIES[family].build())
    inputs = FAMILIES[family].inputs(model, 4, FAMILIES[family].kind == "decoder", 1)
    n_rows, dropping, plain = both(
        model, inputs, output_logits=True, output_hidden_states=True, output_scores=True
    )
    assert n_rows == [4, 4, 4, 3, 3, 2, 2, 2, 2, 1, 1, 1]
    assert dropping.past_key_values is None
    states = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
    for step in range(NEW_TOKENS):
        going = [row for row, end in enumerate(ENDS) if step <= end]
        for name in ("logits", "scores"):
            mine, theirs = getattr(dropping, name)[step], getattr(plain, name)[step]
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine[going], theirs[going], atol=1e-4, rtol=1e-4)
        mine, theirs = getattr(dropping, states)[step][-1], getattr(plain, states)[step][-1]
        assert mine.shape == theirs.shape
        if mine.ndim == 3:
            torch.testing.assert_close(mine[going], theirs[going], atol=1e-4, rtol=1e-4)


def test_attentions_are_in_their_places() -> None:
    model = hfgen.mix_into(tiny.llama(attn_implementation="eager"))
    _, dropping, plain = both(model, TEXT, output_attentions=True)
    for step, (mine, theirs) in enumerate(zip(dropping.attentions, plain.attentions, strict=True)):
        going = [row for row, end in enumerate(ENDS) if step <= end]
        for layer, wanted in zip(mine, theirs, strict=True):
            assert layer.shape == wanted.shape
            torch.testing.assert_close(layer[going], wanted[going])


def test_draws_do_not_depend_on_who_has_ended() -> None:
    model = hfgen.mix_into(tiny.llama())
    n_rows, *_ = both(model, TEXT, do_sample=True, top_k=0, temperature=2.0)
    assert n_rows[-1] == 1


def test_streamers_get_all_rows() -> None:
    model = hfgen.mix_into(tiny.llama())
    streamers = [Chunks(), Chunks()]
    for streamer, drop in zip(streamers, (False, True), strict=True):
        run(model, TEXT, streamer=streamer, drop_finished=drop)
    assert streamers[0].chunks == streamers[1].chunks


def test_processors_and_criteria_see_all_rows() -> None:
    model, ends = hfgen.mix_into(tiny.llama()), EndAt()
    seen: set[tuple[int, ...]] = set()

    class Look(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.add((len(input_ids),))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    allowed: set[int] = set()

    def allow(row: int, ids: torch.Tensor) -> list[int]:
        allowed.add(row)
        return list(range(1, 60))

    n_rows, _ = run(
        model,
        TEXT,
        drop_finished=True,
        logits_processor=[ends],
        stopping_criteria=[Look()],
        prefix_allowed_tokens_fn=allow,
    )
    assert n_rows[-1] == 1
    assert ends.n_rows == {4}
    assert seen == {(4,)}
    assert allowed == {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["llama", "gemma2", "jamba", "bart"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_prompts_whose_search_is_over_leave(
    family: str, early_stopping: Any, do_sample: bool
) -> None:
    model = hfgen.mix_into(FAMILIES[family].build())
    inputs = FAMILIES[family].inputs(model, 4, FAMILIES[family].kind == "decoder", 1)

    def options() -> dict[str, Any]:
        return {
            "num_beams": 2,
            "early_stopping": early_stopping,
            "do_sample": do_sample,
            "output_scores": True,
            "num_return_sequences": 2,
            "logits_processor": [EndAt((2, 9, 4, 11), per_row=2)],
        }

    _, plain = run(model, inputs, **options())
    n_rows, dropping = run(model, inputs, drop_finished=True, **options())
    assert torch.equal(dropping.sequences, plain.sequences)
    assert torch.equal(dropping.beam_indices, plain.beam_indices)
    torch.testing.assert_close(dropping.sequences_scores, plain.sequences_scores)
    assert all(n % 2 == 0 for n in n_rows[1:])
    if early_stopping is True:  # otherwise a better hypothesis may yet come
        assert n_rows[-1] < 8


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "quantized", "cache_config": {"residual_length": 64}},
        {"use_cache": False},
        {"dola_layers": "low", "repetition_penalty": 1.2},
        {"prefill_chunk_size": 2},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
def test_with_other_options(options: dict[str, Any]) -> None:
    n_rows, *_ = both(hfgen.mix_into(tiny.llama()), TEXT, **options)
    assert min(n_rows) == 1


def test_samples_of_one_prompt() -> None:
    model = hfgen.mix_into(tiny.llama())
    text = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
    n_rows, *_ = both(model, text, do_sample=True, num_return_sequences=4)
    assert n_rows == [1, 4, 4, 3, 3, 2, 2, 2, 2, 1, 1, 1]


def test_models_that_remember_rows_elsewhere_keep_them_all() -> None:
    model = hfgen.mix_into(FAMILIES["recurrent_gemma"].build())
    inputs = FAMILIES["recurrent_gemma"].inputs(model, 4, False, 1)
    n_rows, dropping, plain = both(model, inputs)
    assert set(n_rows) == {4}
    assert (dropping.past_key_values is None) == (plain.past_key_values is None)


def test_few_rows_of_many_do_not_leave_one_by_one() -> None:
    """Each time rows leave, the cache is copied: it has to become smaller by an eighth."""
    model = hfgen.mix_into(tiny.llama())
    ids = tiny.prompt(16, 5)
    n_rows, *_ = both(model, {"input_ids": ids}, ends=tuple(range(16)), max_new_tokens=20)
    assert n_rows == [16, 16, 14, 14, 12, 12, 10, 10, 8, 7, 6, 5, 4, 3, 2, 1]


def test_without_an_end_all_rows_stay() -> None:
    model = hfgen.mix_into(tiny.llama())
    n_rows, dropping, _ = both(model, TEXT, eos_token_id=None, logits_processor=[])
    assert set(n_rows) == {4}
    assert dropping.past_key_values is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"cache_implementation": "static"}, "static"),
        ({CACHE: DynamicCache()}, CACHE),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ],
    ids=["assisted", "static", "own cache", "contrastive"],
)
def test_what_rows_cannot_leave(options: dict[str, Any], words: str) -> None:
    model = hfgen.mix_into(tiny.llama())
    with pytest.raises(ValueError, match=f"(?s)drop_finished.*{words}"):
        model.generate(**TEXT, drop_finished=True, **options)


def test_the_flag_is_a_flag() -> None:
    with pytest.raises(TypeError, match="drop_finished"):
        hfgen.mix_into(tiny.llama()).generate(**TEXT, drop_finished="yes")
