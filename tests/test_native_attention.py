"""Attention of compiled layers on a CPU: torch's numbers, of a query's own keys alone, and where it is used."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.cpu_vec_isa import VecAVX512
from torch.profiler import ProfilerActivity, profile
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import hfgen
from hfgen.families import CACHE
from hfgen.running.optimization import compiled_layers, native
from tests import tiny

# torch's compiler imports what warns so.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

NAME = "hfgen_native::attention"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Rows, heads, heads of keys, queries, keys, size of a key, and of a value, in vectors.
SHAPES = [
    (1, 9, 3, 1, 33, 4, 4),
    (3, 4, 4, 1, 7, 1, 1),
    (2, 14, 2, 5, 101, 8, 4),
    (2, 8, 1, 3, 1, 3, 5),
    (1, 6, 2, 6, 18, 1, 2),
]


def need_operator() -> None:
    if (reason := native.failure()) is not None:
        pytest.skip(reason=f"no operator here: {reason}")


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """As ``scaled_dot_product_attention``, by the operator."""
    need_operator()
    operator = torch.ops.hfgen_native.attention
    return operator(query.transpose(1, 2), key, value, mask, query.shape[3] ** -0.5).transpose(1, 2)


def states(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values in the front of a longer memory."""
    rows, heads, shared, n_new, n_keys, size, size_out = shape
    torch.manual_seed(0)
    query = torch.randn(rows, n_new, heads, size * native.LANES).to(dtype).transpose(1, 2)
    memory = [torch.randn(rows, shared, n_keys + 9, n * native.LANES) for n in (size, size_out)]
    key, value = (states.to(dtype)[:, :, :n_keys] for states in memory)
    return query, key, value


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor | None]:
    rows, heads, _, n_new, n_keys, *_ = shape
    shown = torch.rand(rows, 1, n_new, n_keys) > 0.3
    shown[..., -1] = True
    causal = torch.ones(n_new, n_keys, dtype=torch.bool).tril(max(n_keys - n_new, 0))
    return {
        "none": None,
        "bools": shown,
        "of all rows": causal[None, None],
        "numbers": torch.randn(rows, heads, n_new, n_keys).to(dtype),
        "of all queries": torch.zeros(rows, 1, 1, n_keys).masked_fill(~shown[:, :, :1], -torch.inf),
        "columns": shown.transpose(2, 3).contiguous().transpose(2, 3),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_the_exact_result_as_torchs(shape, dtype):
    query, key, value = states(shape, dtype)
    for kind, mask in masks(shape, dtype).items():
        numbers = mask is not None and mask.dtype != torch.bool
        wide = mask.double() if numbers else mask
        mask = mask.to(dtype) if numbers else mask
        doubles = (each.double() for each in (query, key, value))
        exact = F.scaled_dot_product_attention(*doubles, attn_mask=wide, enable_gqa=True)
        torchs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        error = (attention(query, key, value, mask) - exact).abs().max()
        allowed = 3 * (torchs - exact).abs().max() + torch.finfo(dtype).eps
        assert error <= allowed, (kind, error, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_depends_on_its_own_keys_alone(dtype):
    """Bits are the same beside other rows and queries, behind padding, and before keys that are hidden."""
    shape = (5, 6, 2, 7, 50, 4, 4)
    query, key, value = states(shape, dtype)
    shown = torch.ones(5, 1, 7, 50, dtype=torch.bool).tril(43)
    shown[2, ..., :11], shown[4, ..., :30] = False, False
    together = attention(query, key, value, shown)
    for row, start in enumerate((0, 0, 11, 0, 30)):
        for new in range(7):
            stop = 44 + new
            own = (states[row : row + 1, :, start:stop] for states in (key, value))
            alone = attention(query[row : row + 1, :, new : new + 1], *own, None)
            assert torch.equal(alone, together[row : row + 1, :, new : new + 1]), (row, new)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = [each.repeat(9, 1, 1, 1) for each in (query, key, value, shown)]
        assert torch.equal(attention(*many), together.repeat(9, 1, 1, 1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_and_numbers_that_are_not_finite(dtype):
    query, key, value = states((4, 4, 2, 2, 9, 1, 1), dtype)
    shown = torch.ones(4, 1, 1, 9, dtype=torch.bool)
    shown[1] = False
    key[2, 0, 3, 1], value[3, 1, 8, 2] = torch.nan, torch.inf
    out = attention(query, key, value, shown)
    assert out[0].isfinite().all()
    assert not out[1].any()
    assert out[2, :2].isnan().all()
    assert out[2, 2:].isfinite().all()
    assert out[3].isinf().sum() == 4  # one value of two queries of two heads
    large = attention(query * 1e4, key[:1].repeat(4, 1, 1, 1), value[:1].repeat(4, 1, 1, 1), None)
    assert large.isfinite().all()


def test_shapes_that_do_not_fit_each_other_are_errors():
    """Nothing is read behind the end of a tensor."""
    query, key, value = states((2, 4, 2, 1, 5, 1, 1), torch.float32)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    assert attention(query, key, value, mask).shape == query.shape
    for wrong in (
        (query, key, value, mask[..., :4]),
        (query, key, value, mask.expand(2, 3, 1, 5)),
        (query, key[:1], value[:1], None),
        (query, key[:, :0], value[:, :0], None),
        (query[:, :3], key, value, None),
        (query, key, value[:, :, :3], None),
        (query[..., :3], key[..., :3], value, None),
    ):
        with pytest.raises(RuntimeError, match="shapes that do not fit each other"):
            attention(*wrong)
    none = attention(query, key[:, :, :0], value[:, :, :0], None)
    assert not none.any()


# --- in a model ----------------------------------------------------------------------------------


def llama(**overrides: Any) -> Any:
    """Its heads are of two vectors."""
    size = {"hidden_size": 8 * native.LANES, "head_dim": 2 * native.LANES}
    return hfgen.mix_into(tiny.llama(**{**size, "initializer_range": 0.1, **overrides})).eval()


LENGTH = {"max_new_tokens": 4, "eos_token_id": None}
PROMPTS = {"input_ids": tiny.prompt(2, 9)}
MASK = (torch.arange(9) >= torch.tensor([0, 5])[:, None]).long()
PADDED = {"input_ids": PROMPTS["input_ids"] * MASK, "attention_mask": MASK}


def calls(model: Any, **inputs: Any) -> tuple[int, Tensor]:
    """How often a call attends by the operator, when all is compiled, and its tokens."""
    model.generate(**inputs, **LENGTH)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        tokens = model.generate(**inputs, **LENGTH)
    return sum(event.count for event in events.key_averages() if event.key == NAME), tokens


@pytest.fixture
def quick(monkeypatch):
    """Graphs are made by the compiler's front end, and run operator by operator."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")


def check(**inputs: Any) -> None:
    need_operator()
    plain, model = llama(), hfgen.optimize(llama(), compile=True)
    n, tokens = calls(model, **inputs)
    assert model.optimization.graph.failure is None
    assert n == 3 * 2  # behind the prompt, in each layer
    assert torch.equal(tokens, plain.generate(**inputs, **LENGTH))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("inputs", [PADDED, {"input_ids": tiny.prompt(1, 9)}], ids=["two", "one"])
def test_compiled_layers_attend_by_it(inputs):
    check(**inputs)


def test_the_compilers_own_code_attends_by_it_with_a_static_cache():
    check(**PADDED, cache_implementation="static", disable_compile=True)


@pytest.mark.usefixtures("quick")
def test_drafts_attend_by_it():
    need_operator()
    model = hfgen.optimize(llama(), compile=True)
    drafts = {"input_ids": tiny.prompt(1, 4).repeat(1, 4), "prompt_lookup_num_tokens": 3}
    n, tokens = calls(model, **drafts)
    assert n > 0
    assert torch.equal(tokens, llama().generate(**drafts, **LENGTH))


def test_keys_of_a_group_of_heads_are_read_where_they_are(monkeypatch):
    """transformers repeats them for each head where there is a mask."""
    (operator,) = operators_of(monkeypatch, "attention", kernels="own")
    assert [node.op for node in operator.args[1:4]] == ["placeholder"] * 3


def operators_of(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> list[Any]:
    """The calls of an operator in the graph of the layers."""
    need_operator()
    operators: list[Any] = []

    def noting(module: Any, inputs: Any) -> Any:
        target = getattr(torch.ops.hfgen_native, name).default
        operators.extend(module.graph.find_nodes(op="call_function", target=target))
        return module.forward

    monkeypatch.setattr(compiled_layers, "BACKEND", noting)
    hfgen.optimize(llama(), compile=True, **options).generate(**PADDED, **LENGTH)
    return operators


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}], ids=["float", "int8"])
def test_products_of_the_same_activations_are_one_call(monkeypatch, options):
    if native.LANES == 4 and not options:
        pytest.skip(reason="torch's products are faster with such vectors")
    joined = operators_of(monkeypatch, "linears", **options)
    assert [len(node.args[3]) for node in joined] == [3, 2]  # q, k, v; gate, up
    alone = operators_of(monkeypatch, "linear8" if options else "linear", **options)
    assert len(alone) == 2  # o, down


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vectors of other processors")
def test_the_compiler_is_not_tried_out_again():
    need_operator()
    if native._supports_amx() and not native._has_amx():
        pytest.skip(reason="the library does not use all instructions of this processor")
    plain, newer = VecAVX512(), VecAVX512()
    newer._arch_flags += " -mamx-fp16"
    with native.known_compiler():
        assert plain.check_build("no C++")
        assert not newer.check_build("no C++")  # the library does not show that it knows these
    assert not plain.check_build("no C++")


def test_the_compilers_own_code_copies_no_cache():
    """It copies what an operator wants in another layout: no step allocates as much as a layer's keys."""
    need_operator()
    model = hfgen.optimize(llama(max_position_embeddings=2048), compile=True)
    inputs = {"input_ids": tiny.prompt(1, 999), **LENGTH}
    model.generate(**inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        model.generate(**inputs)
    found = {event.nbytes() for event in events.profiler.kineto_results.events()}
    of_token = model.config.num_key_value_heads * model.config.head_dim * 4
    assert 1002 * of_token in found  # the cache itself
    assert found.isdisjoint(n_keys * of_token for n_keys in (1000, 1001))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "other",
    [{"head_dim": native.LANES + 2}, {"attn_implementation": "eager"}, {"dtype": torch.float64}],
    ids=["a size of no whole vectors", "eager", "float64"],
)
def test_others_attend_as_before(other):
    def made() -> Any:
        model = llama(**({"head_dim": other["head_dim"]} if "head_dim" in other else {}))
        if "attn_implementation" in other:
            model.set_attn_implementation(other["attn_implementation"])
        return model.to(other.get("dtype", torch.float32))

    model = hfgen.optimize(made(), compile=True, kernels="own")
    n, tokens = calls(model, **PROMPTS)
    assert model.optimization.graph.failure is None
    assert n == 0
    assert model.optimization.graph.n_layers == 2
    assert torch.equal(tokens, made().generate(**PROMPTS, **LENGTH))


@pytest.mark.usefixtures("quick")
def test_another_attention_between_calls_is_seen():
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    before, tokens = calls(model, **PROMPTS)
    model.set_attn_implementation("eager")
    after, eager = calls(model, **PROMPTS)
    assert (before > 0, after) == (native.failure() is None, 0)
    assert torch.equal(tokens, eager)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_registered", [True, False])
def test_another_function_in_torchs_place_is_called(monkeypatch, is_registered):
    """A user's own, or one that wraps torch's."""
    torchs = F.scaled_dot_product_attention

    def registered(module: Any, *states: Any, scaling: float, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, *states, scaling=scaling / 20, **kwargs)

    def patched(*states: Any, scale: float, **kwargs: Any) -> Tensor:
        return torchs(*states, scale=scale / 20, **kwargs)

    model = hfgen.optimize(llama(), compile=True, kernels="own")
    before = calls(model, **PROMPTS)
    if is_registered:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", registered)
    else:
        monkeypatch.setattr(F, "scaled_dot_product_attention", patched)
    tokens = model.generate(**PROMPTS, **LENGTH)
    assert torch.equal(tokens, llama().generate(**PROMPTS, **LENGTH))
    assert not torch.equal(tokens, before[1])
    monkeypatch.undo()
    assert calls(model, **PROMPTS)[0] == before[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
def test_flex_attention_whose_masks_are_no_tensors():
    need_operator()  # flex attention needs a compiler as well
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    before = calls(model, **PROMPTS)
    model.set_attn_implementation("flex_attention")
    after = calls(model, **PROMPTS)
    assert after[0] == 0
    assert torch.equal(after[1], before[1])
    model.set_attn_implementation("sdpa")
    assert calls(model, **PROMPTS)[0] == before[0]
    assert model.optimization.graph.failure is None


class Asking(LlamaAttention):
    """It prepares what it gives to torch's attention, as that of DeepSeek V3.2 does its mask."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa"):
            hidden_states = -hidden_states
        return super().forward(hidden_states, *args, **kwargs)


@pytest.mark.usefixtures("quick")
def test_attention_that_asks_for_torchs_by_name_is_told_of_it():
    def asking() -> Any:
        model = llama()
        for layer in model.model.layers:
            layer.self_attn.__class__ = Asking
        return model

    model = hfgen.optimize(asking(), compile=True, kernels="own")
    n, tokens = calls(model, **PROMPTS)
    assert (n > 0) == (native.failure() is None)
    assert model.optimization.graph.n_layers == 2
    assert torch.equal(tokens, asking().generate(**PROMPTS, **LENGTH))
    assert not torch.equal(tokens, llama().generate(**PROMPTS, **LENGTH))


@pytest.mark.usefixtures("quick")
def test_masks_of_other_sizes_are_torchs():
    """One size for all keys is repeated; others do not fit."""
    plain, model = llama(), hfgen.optimize(llama(), compile=True, kernels="own")

    def step(model: Any, mask: Tensor) -> Tensor:
        seen = model.generate(**PROMPTS, **LENGTH, return_dict_in_generate=True)
        more = {CACHE: seen.past_key_values, "attention_mask": mask}
        with torch.no_grad():
            return model(input_ids=seen.sequences[:, -1:], **more).logits

    for mask in (torch.randn(2, 4, 1, 13), torch.rand(2, 1, 1, 1) > 0.4):
        expected = step(plain, mask)
        torch.testing.assert_close(step(model, mask), expected, rtol=1e-4, atol=1e-4)
    assert model.optimization.graph.failure is None
    for each in (plain, model):
        with pytest.raises(RuntimeError, match="must match"):
            step(each, torch.zeros(2, 1, 1, 15))
