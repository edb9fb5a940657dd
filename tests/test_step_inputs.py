"""Tensors that grow by a column: what they hold, computed by hand, and when memory is shared."""

from __future__ import annotations

import pytest
import torch

from hfgen.running import step_inputs
from hfgen.running.step_inputs import grow

ones, count_on, repeat_last, zeros = step_inputs._fillers(False).values()


def test_a_mask_grows_by_ones():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert grow(mask, 2, ones).tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_positions_count_on():
    positions = torch.tensor([[0, 0, 1], [0, 1, 2]])
    assert grow(positions, 2, count_on).tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_positions_of_three_dimensions_count_on():
    positions = torch.tensor([[[0, 4]], [[0, 2]], [[0, 9]]])  # (3, rows, length)
    assert grow(positions, 1, count_on).tolist() == [[[0, 4, 5]], [[0, 2, 3]], [[0, 9, 10]]]


def test_token_types_repeat_their_last_or_are_text():
    types = torch.tensor([[1, 0, 2]])
    assert grow(types, 2, repeat_last).tolist() == [[1, 0, 2, 2, 2]]
    assert grow(types, 2, zeros).tolist() == [[1, 0, 2, 0, 0]]


def test_what_was_passed_is_left_alone():
    mask = torch.tensor([[0, 1]])
    grown = grow(mask, 1, ones)
    grown[0, 0] = 7
    assert mask.tolist() == [[0, 1]]


def test_growing_a_view_copies_nothing():
    first = grow(torch.ones(2, 3, dtype=torch.long), 1, ones)
    second = grow(first, 5, ones)
    assert second.data_ptr() == first.data_ptr()
    assert (first.shape, second.shape) == ((2, 4), (2, 9))


def test_a_view_can_be_grown_twice():
    """A draft grows what the next draft will grow again."""
    positions = grow(torch.tensor([[5]]), 1, count_on)
    assert grow(positions, 3, count_on).tolist() == [[5, 6, 7, 8, 9]]
    assert grow(positions, 1, count_on).tolist() == [[5, 6, 7]]
    assert positions.tolist() == [[5, 6]]


def test_a_view_that_was_written_to_gets_a_new_buffer():
    positions = grow(torch.tensor([[0, 1]]), 1, count_on)
    positions += 10  # as models that shift their positions do
    grown = grow(positions, 2, count_on)
    assert grown.tolist() == [[10, 11, 12, 13, 14]]
    assert grown.data_ptr() != positions.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_many_columns_one_by_one(mode):
    """Past the spare columns, where a new buffer is made, too."""
    with mode():
        positions = torch.tensor([[0], [100]])
        for _ in range(3 * step_inputs.SPARE_COLUMNS):
            positions = grow(positions, 1, count_on)
    n = 3 * step_inputs.SPARE_COLUMNS + 1
    assert positions.tolist() == [list(range(n)), list(range(100, 100 + n))]
