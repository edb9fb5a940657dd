"""What a call returns, computed by hand: transition scores, rows of outputs, and what is recorded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.utils import ModelOutput

import hfgen
from hfgen.memory.batch import map_outputs
from tests import tiny
from tests.markov import Markov

#: After 0 comes 1 or 2, after 1 always 2, after 2 always 0.
CHANCES = [[0.0, 0.75, 0.25], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def markov() -> Any:
    return Markov(CHANCES)


@pytest.fixture(scope="module")
def bart() -> Any:
    return eager(tiny.bart())


def eager(model: Any) -> Any:
    """With attention that returns its weights."""
    model.set_attn_implementation("eager")
    return hfgen.mix_into(model)


def transition(*args: Any, **kwargs: Any) -> Any:
    return hfgen.GenerationMixin.compute_transition_scores(None, *args, **kwargs)


# ---------------------------------------------------------------- transition scores


def test_each_tokens_score_is_looked_up():
    scores = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    sequences = torch.tensor([[9, 1, 0], [9, 0, 1]])
    assert transition(sequences, scores).tolist() == [[2.0, 5.0], [3.0, 8.0]]


def test_scores_are_normalised():
    scores = (torch.tensor([[0.0, math.log(3.0)]]),)
    result = transition(torch.tensor([[9, 1]]), scores, normalize_logits=True)
    assert result.exp().tolist() == [[pytest.approx(0.75)]]


def test_a_beam_is_scored_in_the_rows_that_it_came_through():
    """Two beams: the returned one was in row 0, then in row 1, and ended."""
    scores = tuple(torch.tensor([[10.0, 11.0], [20.0, 21.0]]) + 100 * step for step in range(3))
    result = transition(torch.tensor([[9, 1, 0]]), scores, torch.tensor([[0, 1, -1]]))
    assert result.tolist() == [[11.0, 120.0]]


def test_a_beam_that_ended_early_scores_nothing():
    scores = tuple(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) for _ in range(2))
    beam_indices = torch.tensor([[0, -1], [1, 1]])
    result = transition(torch.tensor([[9, 1, 0], [9, 0, 1]]), scores, beam_indices)
    assert result.tolist() == [[2.0, 0.0], [3.0, 4.0]]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["rows", "beams"])
@pytest.mark.parametrize("normalize_logits", [False, True])
def test_they_are_upstreams_to_the_last_bit(options: dict[str, Any], normalize_logits: bool):
    output = hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(3),
        max_new_tokens=8,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    arguments = output.sequences, output.scores, getattr(output, "beam_indices", None)
    upstream = tiny.llama().compute_transition_scores(*arguments, normalize_logits)
    assert torch.equal(transition(*arguments, normalize_logits), upstream)


def test_they_agree_with_the_model(markov: Any) -> None:
    output = markov.generate(
        torch.tensor([[0], [1]]),
        max_new_tokens=3,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == [[0, 1, 2, 0], [1, 2, 0, 1]]
    scores = markov.compute_transition_scores(output.sequences, output.scores)
    expected = [[0.75, 1.0, 1.0], [1.0, 1.0, 0.75]]
    torch.testing.assert_close(scores.exp(), torch.tensor(expected))


# ---------------------------------------------------------------- rows of outputs


def take_second(states: Tensor, dim: int) -> Tensor:
    return states.narrow(dim, 1, 1)


def test_all_that_a_step_reads_has_rows():
    outputs = ModelOutput(
        logits=torch.tensor([[[1.0]], [[2.0]]]),
        attentions=(torch.tensor([[[[3.0]]], [[[4.0]]]]),),
        encoder_last_hidden_state=torch.zeros(5, 1),
        loss=torch.tensor([7.0, 8.0]),
    )
    map_outputs(outputs, take_second, 0)
    assert outputs.logits.tolist() == [[[2.0]]]
    assert outputs.attentions[0].tolist() == [[[[4.0]]]]
    assert outputs.encoder_last_hidden_state.shape == (5, 1)
    assert outputs.loss.tolist() == [7.0, 8.0]


def test_rows_of_stacked_hidden_states_are_elsewhere():
    """Some models have several streams in front: ``(streams, rows, length, size)``."""
    outputs = ModelOutput(hidden_states=(torch.zeros(4, 2, 3, 5), torch.zeros(2, 3, 5), None))
    map_outputs(outputs, take_second, 1)
    stacked, plain, nothing = outputs.hidden_states
    assert stacked.shape == (4, 1, 3, 5)
    assert plain.shape == (1, 3, 5)
    assert nothing is None


# ---------------------------------------------------------------- what is returned


def test_ids_alone_unless_asked(markov: Any) -> None:
    ids = markov.generate(torch.tensor([[0]]), max_new_tokens=2, output_scores=True)
    assert ids.tolist() == [[0, 1, 2]]


def test_what_is_not_asked_for_is_none(markov: Any) -> None:
    output = markov.generate(torch.tensor([[0]]), max_new_tokens=2, return_dict_in_generate=True)
    assert type(output) is GenerateDecoderOnlyOutput
    assert dict(output).keys() == {"sequences"}


def test_logits_are_before_the_processors(markov: Any) -> None:
    output = markov.generate(
        torch.tensor([[0]]),
        max_new_tokens=2,
        suppress_tokens=[1],
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert output.sequences.tolist() == [[0, 2, 0]]
    assert [len(output.scores), len(output.logits)] == [2, 2]
    torch.testing.assert_close(output.logits[0][0, 1:].exp(), torch.tensor([0.75, 0.25]))
    assert output.scores[0][0, 1] == -math.inf
    assert output.logits[0].dtype == torch.float32


def test_beams_say_where_they_were(markov: Any) -> None:
    """1 2 0 with probability 3/4, and 2 0 1 with 3/16."""
    output = markov.generate(
        torch.tensor([[0]]),
        max_new_tokens=3,
        num_beams=2,
        num_return_sequences=2,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert type(output) is GenerateBeamDecoderOnlyOutput
    assert output.sequences.tolist() == [[0, 1, 2, 0], [0, 2, 0, 1]]
    torch.testing.assert_close(output.sequences_scores.exp(), torch.tensor([3 / 4, 3 / 16]))
    scores = markov.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices, normalize_logits=False
    )
    torch.testing.assert_close(scores.sum(dim=1), output.sequences_scores)


def test_an_encoder_is_recorded_once(bart: Any) -> None:
    output = bart.generate(
        tiny.prompt(2, 7),
        max_new_tokens=3,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert type(output) is GenerateEncoderDecoderOutput
    assert [tuple(each.shape) for each in output.encoder_attentions] == 2 * [(2, 4, 7, 7)]
    assert [tuple(each.shape) for each in output.encoder_hidden_states] == 3 * [(2, 7, 32)]
    for step, n_keys in enumerate((1, 2, 3)):
        assert output.decoder_attentions[step][0].shape == (2, 4, 1, n_keys)
        assert output.cross_attentions[step][0].shape == (2, 4, 1, 7)
        assert output.decoder_hidden_states[step][0].shape == (2, 1, 32)


def test_the_first_entry_has_the_prompt() -> None:
    model = eager(tiny.llama())
    output = model.generate(
        tiny.prompt(1, 5),
        max_new_tokens=3,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert [tuple(step[0].shape) for step in output.attentions] == [
        (1, 4, 5, 5),
        (1, 4, 1, 6),
        (1, 4, 1, 7),
    ]
    assert [step[0].shape[1] for step in output.hidden_states] == [5, 1, 1]
    assert output.past_key_values.get_seq_length() == 7  # the last token was not fed


@pytest.mark.parametrize("flag", [[0, 2], True, torch.tensor(True)])
def test_hidden_states_of_some_layers(flag: Any) -> None:
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "eos_token_id": None}
    ours = hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(1), output_hidden_states=flag, **options
    )
    asked = flag if isinstance(flag, list) else bool(flag)
    theirs = tiny.llama().generate(tiny.prompt(1), output_hidden_states=asked, **options)
    for mine, expected in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        for a, b in zip(mine, expected, strict=True):  # None for a layer that is not asked for
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b)
