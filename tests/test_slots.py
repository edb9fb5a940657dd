"""Rows of one layer in its buffer: what is written, what is never seen, and what is given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from hfgen.memory.caches import growing, slots
from hfgen.memory.caches.dynamic import GrowingCache, GrowingLayer, as_growing
from hfgen.memory.caches.growing import GrowableTensor, GrowthPolicy

HEADS, SIZE = 2, 4


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(growing, "CONCATENATED", 0)
    with torch.no_grad():
        yield


def states(rows: int, n_tokens: int) -> Tensor:
    return torch.randn(rows, HEADS, n_tokens, SIZE)


def growable(rows: int, n_tokens: int) -> GrowableTensor:
    grown = GrowableTensor(states(rows, 0))
    grown.append(states(rows, n_tokens), spare)
    return grown


def leaving(row: int, n_rows: int) -> tuple[Tensor, Tensor]:
    """The arguments of ``move`` by which ``row`` leaves and the last of ``n_rows`` takes its place."""
    index = torch.arange(n_rows - 1)
    index[row : row + 1] = n_rows - 1
    return index, torch.tensor([row] * (row < n_rows - 1), dtype=torch.long)


def leave(tensor: GrowableTensor, row: int) -> None:
    tensor.move(*leaving(row, len(tensor.view)))


def spare(length: int) -> int:
    return 32


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Written(TorchDispatchMode):
    """Counts the numbers that are written to tensors, new or old."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_copy_.default:
            self.count += args[3].numel()
        elif func._schema.is_mutable:
            self.count += args[0].numel()
        elif isinstance(result, Tensor) and not func.is_view and "empty" not in func.name():
            self.count += result.numel()
        return result


def written(operation: Callable[[], Any]) -> int:
    with Written() as mode:
        operation()
    return mode.count


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("n_tokens", [3, 50])
def test_a_join_writes_the_row_that_joins(rows: int, n_tokens: int) -> None:
    tensor, row = growable(rows, 50), states(1, n_tokens)
    tensor.join(states(1, 50), spare)  # makes room for twice the rows
    first = place(tensor.view)
    assert written(lambda: tensor.join(row, spare)) == HEADS * 50 * SIZE
    assert place(tensor.view) == first
    assert torch.equal(tensor.view[-1:, :, 50 - n_tokens :], row)
    assert not tensor.view[-1, :, : 50 - n_tokens].any()


def test_a_longer_row_begins_further_left_in_the_same_buffer() -> None:
    tensor = growable(2, 50)
    before = tensor.view.clone()
    tensor.join(states(1, 50), spare)
    first, row = place(tensor.view), states(1, 60)
    assert written(lambda: tensor.join(row, spare)) == HEADS * SIZE * (60 + 3 * 10)
    assert place(tensor.view) == first
    assert torch.equal(tensor.view[-1:], row)
    assert torch.equal(tensor.view[:2, :, 10:], before)
    assert not tensor.view[:3, :, :10].any()


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("row", [0, -1], ids=["first", "last"])
def test_a_leave_moves_one_row_at_most(rows: int, row: int) -> None:
    tensor = growable(rows, 50)
    before, first = tensor.view.clone(), place(tensor.view)
    arguments = leaving(row % rows, rows)
    n_written = written(lambda: tensor.move(*arguments))
    assert n_written == (0 if row else 2 * HEADS * 50 * SIZE + 1)  # with a copy, and its number
    assert place(tensor.view) == first
    expected = before[:-1] if row else before[[rows - 1, *range(1, rows - 1)]]
    assert torch.equal(tensor.view, expected)


def test_a_move_writes_the_rows_that_move() -> None:
    tensor = growable(4, 50)
    before, first = tensor.view.clone(), place(tensor.view)
    index = torch.tensor([0, 3, 2, 1])
    n_written = written(lambda: tensor.move(index, torch.tensor([1, 3])))
    assert n_written == 2 * HEADS * 50 * SIZE * 2 + 2  # with a copy of them, and their numbers
    assert place(tensor.view) == first
    assert torch.equal(tensor.view, before[index])


def test_trimming_writes_nothing() -> None:
    tensor = growable(3, 50)
    before = tensor.view.clone()
    assert written(lambda: tensor.drop_first(7)) == 0
    assert torch.equal(tensor.view, before[:, :, 7:])
    assert tensor.view.untyped_storage().data_ptr() == place(tensor.view)


def test_steps_of_a_batch_with_room_for_rows_write_their_tokens() -> None:
    tensor = growable(2, 50)
    tensor.join(states(1, 50), spare)
    first = place(tensor.view)
    for _ in range(32):
        new = states(3, 1)
        assert written(lambda new=new: tensor.append(new, spare)) == new.numel()
        assert torch.equal(tensor.view[:, :, -1:], new)
    assert place(tensor.view) == first


def test_all_joins_together_cost_a_few_times_what_is_there() -> None:
    tensor = growable(1, 40)

    def fill() -> None:
        for _ in range(63):
            tensor.join(states_of_one, spare)

    states_of_one = states(1, 40)
    assert written(fill) <= 3 * tensor.view.numel()
    assert len(tensor.view) == 64


def test_rows_that_each_are_longer_cost_a_few_times_what_is_there() -> None:
    tensor = growable(1, 1)
    rows = [states(1, n) for n in range(2, 202)]

    def grow() -> None:
        for index, row in enumerate(rows):
            tensor.join(row, spare)
            if index % 2:
                leave(tensor, 0)

    n_written = written(grow)
    assert tensor.view.shape[0] == 101
    assert n_written <= 12 * tensor.view.numel()


def test_tokens_shift_only_where_that_makes_room() -> None:
    tensor = growable(2, 1000)
    written_by_steps = written(lambda: [step_and_trim(tensor) for _ in range(320)])
    assert written_by_steps <= 2 * HEADS * SIZE * (320 + 1000 * 320 // 16)
    assert tensor.buffer.shape[-2] <= 1000 + 64


def step_and_trim(tensor: GrowableTensor) -> None:
    tensor.append(states(2, 1), spare)
    tensor.drop_first(1)


# ---------------------------------------------------------------- what is never seen


def test_what_a_row_left_behind_is_never_seen() -> None:
    tensor = growable(2, 20)
    tensor.join(torch.full((2, HEADS, 25, SIZE), torch.nan), spare)
    tensor.append(torch.cat([states(2, 1), torch.full((2, HEADS, 1, SIZE), torch.nan)]), spare)
    for row in (3, 2):
        leave(tensor, row)
    tensor.drop_first(5)
    assert tensor.view.isfinite().all()
    tensor.join(states(1, 4), spare)
    tensor.join(states(1, 26), spare)
    assert tensor.view.isfinite().all()


def test_a_view_that_someone_kept_stays_as_it_was() -> None:
    tensor = growable(3, 20)
    kept = tensor.view
    before = kept.clone()
    leave(tensor, 0)
    tensor.join(states(1, 20), spare)
    assert torch.equal(kept, before)
    assert place(kept) != place(tensor.view)


def test_what_joins_stays_as_it_was() -> None:
    tensor, other = growable(2, 20), growable(1, 25)
    before = other.view.clone()
    tensor.join(other.view, spare)
    tensor.append(states(3, 1), spare)
    assert torch.equal(other.view, before)


def test_a_buffer_of_inference_mode_is_left_behind_outside_of_it() -> None:
    with torch.inference_mode():
        tensor = growable(3, 20)
        tensor.join(states(1, 20), spare)
    before = tensor.view.clone()
    tensor.join(states(1, 20), spare)
    leave(tensor, 0)
    assert torch.equal(tensor.view[1:4], before[1:])


def test_gradients_flow_through_rows_that_join() -> None:
    with torch.enable_grad():
        tensor, row = GrowableTensor(states(1, 3)), states(1, 5).requires_grad_()
        tensor.join(row, spare)
        tensor.view.sum().backward()
    assert row.grad is not None
    assert row.grad.eq(1).all()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_hold_their_rows_and_go_on_alone(how: Any) -> None:
    layer: Any = as_growing(DynamicLayer(), GrowthPolicy())
    layer.update(states(2, 9), states(2, 9))
    slots.append(Cache(layers=[layer]), Cache(layers=[layer_of(1, 4)]))
    twin = how(layer)
    before = layer.keys.clone()
    assert torch.equal(twin.keys, before)
    slots.append(Cache(layers=[twin]), Cache(layers=[layer_of(1, 12)]))
    slots.move(Cache(layers=[twin]), *leaving(0, len(twin.keys)))
    assert torch.equal(layer.keys, before)


def layer_of(rows: int, n_tokens: int) -> GrowingLayer:
    layer: GrowingLayer = as_growing(DynamicLayer(), GrowthPolicy())
    layer.update(states(rows, n_tokens), states(rows, n_tokens))
    return layer


# ---------------------------------------------------------------- what is given back


def test_the_next_buffer_gives_the_memory_of_rows_and_columns_back() -> None:
    tensor = growable(1, 1000)
    for _ in range(31):
        tensor.join(states(1, 1000), spare)
    assert len(tensor.buffer) == 32
    while len(tensor.view) > 1:
        before = tensor.view.clone()
        leave(tensor, 0)
        assert torch.equal(tensor.view[1:], before[1:-1])
    tensor.drop_first(900)
    last = tensor.view.clone()
    for _ in range(100):
        tensor.append(states(1, 1), spare)
    assert torch.equal(tensor.view[:, :, :100], last)
    assert len(tensor.buffer) == 1
    assert tensor.buffer.shape[-2] <= 200 + 64


def test_a_window_keeps_its_room_for_rows() -> None:
    layer: Any = as_growing(DynamicSlidingWindowLayer(sliding_window=9), GrowthPolicy())
    other = copy.deepcopy(layer)
    layer.update(states(1, 30), states(1, 30))
    other.update(states(1, 4), states(1, 4))
    slots.append(Cache(layers=[layer]), Cache(layers=[other]))
    slots.append(Cache(layers=[layer]), Cache(layers=[other]))
    assert len(layer._keys.buffer) == 4
    for _ in range(50):
        keys, _ = layer.update(states(3, 1), states(3, 1))
        assert keys.shape == (3, HEADS, 9, SIZE)
    assert len(layer._keys.buffer) == 4
    assert layer.get_seq_length() == 80


# ---------------------------------------------------------------- states that do not grow


def linear(rows: int) -> LinearAttentionLayer:
    layer = LinearAttentionLayer(number_of_states=2)
    for index in range(2):
        layer.update_conv_state(torch.randn(rows, 6, 4), state_idx=index)
        layer.update_recurrent_state(torch.randn(rows, 2, 3, 3), state_idx=index)
    return layer


def all_states(layer: LinearAttentionLayer) -> list[Tensor]:
    return [states[i] for states in (layer.conv_states, layer.recurrent_states) for i in range(2)]  # type: ignore[misc]


def test_linear_states_join_leave_and_move() -> None:
    layer, other = linear(3), linear(1)
    before = [torch.cat(pair) for pair in zip(all_states(layer), all_states(other), strict=True)]
    slots.append(Cache(layers=[layer]), Cache(layers=[other]))
    assert all(map(torch.equal, all_states(layer), before))
    slots.move(Cache(layers=[layer]), *leaving(1, 4))
    for now, then in zip(all_states(layer), before, strict=True):
        assert torch.equal(now, then[[0, 3, 2]])
    slots.move(Cache(layers=[layer]), torch.tensor([2, 1, 2]), torch.tensor([0]))
    for now, then in zip(all_states(layer), before, strict=True):
        assert torch.equal(now, then[[2, 3, 2]])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_linear_states_go_on_alone(how: Any) -> None:
    layer, other = linear(3), linear(1)
    slots.append(Cache(layers=[layer]), Cache(layers=[other]))
    twin = how(layer)
    before = [tensor.clone() for tensor in all_states(layer)]
    slots.append(Cache(layers=[twin]), Cache(layers=[other]))
    slots.move(Cache(layers=[twin]), *leaving(0, 5))
    assert all(map(torch.equal, all_states(layer), before))
    for now, then, added in zip(all_states(twin), before, all_states(other), strict=True):
        assert torch.equal(now, torch.cat([added, then[1:]]))


# ---------------------------------------------------------------- caches


def test_the_keys_of_encoders_join_in_place_and_stay_when_columns_are_trimmed() -> None:
    def made(n_encoded: int) -> EncoderDecoderCache:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache.self_attention_cache.update(states(1, 3), states(1, 3), 0)
        cache.cross_attention_cache.update(states(1, n_encoded), states(1, n_encoded), 0)
        return cache

    cache, other = made(40), made(30)
    for _ in range(2):
        slots.append(cache, other)
    layer = cache.cross_attention_cache.layers[0]
    first = place(layer.keys)
    slots.append(cache, other)
    slots.move(cache, *leaving(1, 4))
    slots.trim(cache, 2)
    layer = cache.cross_attention_cache.layers[0]
    assert place(layer.keys) == first
    assert layer.keys.shape == (3, HEADS, 40, SIZE)
    assert cache.get_seq_length() == 1


def test_a_cache_that_moves_its_layers_is_refused() -> None:
    cache = DynamicCache()
    cache.update(states(2, 3), states(2, 3), 0)
    other = copy.deepcopy(cache)
    cache.offloading = True
    with pytest.raises(ValueError, match="DynamicCache that moves layers between devices"):
        slots.append(cache, other)


class Plain(DynamicLayer):
    """A layer of somebody's own, of which nothing is known."""


class Counting(DynamicLayer):
    """A layer of somebody's own that declares how rows join and leave."""

    def join_rows(self, other: Any) -> None:
        length = max(self.keys.shape[2], other.keys.shape[2])
        for name in ("keys", "values"):
            rows = [getattr(layer, name) for layer in (self, other)]
            setattr(self, name, torch.cat([growing.padded(s, -2, length) for s in rows]))

    def trim_tokens(self, n_tokens: int) -> None:
        self.keys, self.values = self.keys[:, :, n_tokens:], self.values[:, :, n_tokens:]

    def bytes_of_row(self, n_tokens: int) -> int:
        return 1000 + n_tokens

    def form_of_rows(self) -> dict[str, Any]:
        return {"size": self.keys.shape[-1]}


class Own(Cache):
    """The cache of such layers."""


def own(kind: type, n_tokens: int, size: int = SIZE) -> Own:
    cache = Own(layers=[kind()])
    new = torch.randn(1, HEADS, n_tokens, size)
    cache.update(new, -new, 0)
    return cache


def test_a_layer_of_ones_own_declares_by_its_methods() -> None:
    cache, other = own(Counting, 3), own(Counting, 5)
    keys, added = cache.layers[0].keys, other.layers[0].keys
    slots.append(cache, other)
    assert torch.equal(cache.layers[0].keys[:1, :, 2:], keys)
    slots.move(cache, *leaving(0, 2))
    assert torch.equal(cache.layers[0].keys, added)
    slots.trim(cache, 2)
    assert cache.get_seq_length() == 3
    assert slots.bytes_of_row(cache, 7) == 1007
    with pytest.raises(ValueError, match=r"Counting with {'size': 8} cannot be put into"):
        slots.append(cache, own(Counting, 3, size=8))


def test_a_layer_of_ones_own_that_declares_nothing_is_refused() -> None:
    cache = own(Plain, 3)
    inside = GrowingCache()
    inside.layers = [cache.layers[0]]
    for each, name in ((cache, "a Own"), (inside, "a Plain, a layer of DynamicCache")):
        for operation in (
            lambda each=each: slots.append(each, copy.deepcopy(each)),
            lambda each=each: slots.move(each, *leaving(0, 2)),
            lambda each=each: slots.trim(each, 1),
            lambda each=each: slots.bytes_of_row(each, 1),
        ):
            with pytest.raises(ValueError, match=f"{name}.*`hfgen.memory.caches.slots.Slots`"):
                operation()
