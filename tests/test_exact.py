"""``hfgen.exact``: what it changes and undoes, what it refuses, and that its tests can fail."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import (
    CompileConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
)
from typer.testing import CliRunner

import hfgen
from hfgen.families import CACHE
from hfgen.running.exact import followed, is_exact, spans, tiles, trial
from hfgen.running.exact.followed import with_followed_calls
from hfgen.tools.cli import app
from tests import tiny
from tests.parity import exact as trials


def tiny_llama(**sizes: int) -> Any:
    return hfgen.mix_into(tiny.llama(**sizes)).eval()


def state(model: Any) -> tuple[Any, ...]:
    """What ``exact`` may change: implementations, and what modules have of their own."""
    own = {name: sorted(vars(module)) for name, module in model.named_modules()}
    return model.config._attn_implementation, model.config._experts_implementation, own


@pytest.fixture
def model() -> Any:
    return tiny_llama().eval()


INPUTS = {"input_ids": torch.arange(10, 22).view(2, 6)}


def test_restore_leaves_no_trace(model: Any) -> None:
    before, logits = state(model), model(**INPUTS).logits
    assert hfgen.exact(model) is model
    assert is_exact(model)
    assert hfgen.restore(model) is model
    assert state(model) == before
    assert torch.equal(model(**INPUTS).logits, logits)


def test_the_end_of_a_block_restores(model: Any) -> None:
    before = state(model)
    with hfgen.exact(model) as prepared:
        assert prepared is model
        assert is_exact(model)
    assert state(model) == before
    with pytest.raises(TypeError, match=r"hfgen\.exact"), model:
        pass


def test_a_report_has_a_line_for_each_kind_of_operation(model: Any) -> None:
    lines = str(hfgen.exact(model).exactness).splitlines()
    assert any(line.startswith("Linear(") for line in lines)
    assert any(line.startswith("attention") for line in lines)
    assert all(line.endswith(": exact") for line in lines)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_exact_with_layers_of_their_own(model: Any, how: Any) -> None:
    copied = how(hfgen.exact(model))
    for one, other in zip(model.modules(), copied.modules(), strict=True):
        for module in (one, other):
            if (forward := vars(module).get("forward")) is not None:
                assert (
                    forward.args[0] if isinstance(forward, partial) else forward.module
                ) is module
    assert torch.equal(copied(**INPUTS).logits, model(**INPUTS).logits)


def assert_exact(trial: trials.Trial, *ways: Callable[[], list[Any]]) -> None:
    """Each way gives four rows the bits that they have alone."""
    for way in ways:
        pairs = zip(way(), trial.alone, strict=True)
        assert [row.differs_from(own) for row, own in pairs] == 4 * [None]


POWERS = {
    "a power": lambda x: x.abs() ** 1.7,
    "a power of two": lambda x: 2.0**x,
    "sinh": torch.sinh,
    "cosh": lambda x: x.cosh(),
    "exp2": lambda x: x.exp2(),
}


@pytest.mark.parametrize("name", POWERS)
def test_functions_of_a_layer_of_yours_are_computed_in_vectors(name: str) -> None:
    """Rows of 36 numbers are no whole vectors: torch rounds the last ones of a tensor otherwise."""

    class Power(nn.Module):
        is_row_wise = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return POWERS[name](x)

    values = torch.randn(64, 36, generator=torch.Generator().manual_seed(0))
    assert trial.try_rows(Power(), values) is not None
    model = tiny_llama(intermediate_size=36)
    for layer in model.model.layers:
        layer.mlp.act_fn = Power()
    trial_of = trials.Trial(hfgen.exact(model))
    assert_exact(trial_of, trial_of.decode, trial_of.trainer)


def test_without_exact_mode_rows_differ(model: Any) -> None:
    found = trials.differences(model.requires_grad_(True))  # the comparison is able to fail
    assert found[0].startswith("batch: ")
    assert found[-1].startswith(
        "in the trial, the first layer with another output is model.layers.0."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_end_anywhere_in_a_block_have_the_bits_of_one_forward(dtype: torch.dtype) -> None:
    """Of 240 to 330 keys, for example, torch's kernel sums otherwise than of 512."""
    made = tiny_llama(max_position_embeddings=2048, head_dim=64)
    model = hfgen.exact(made.to(dtype).requires_grad_(True))
    generator = torch.Generator().manual_seed(0)
    lengths = (700, 245, 1, 120, 310, 505)
    rows = [torch.randint(10, 90, (n,), generator=generator) for n in lengths]
    n_new = 12  # past a multiple of 64 in five rows
    options = {**trials.SAMPLING, "max_new_tokens": n_new, "output_logits": False}
    for order in ([0, 1, 2, 3, 4, 5], [1], [2, 5]):
        inputs = trials.padded([rows[i] for i in order])
        output = model.generate(**inputs, seed=[*order], **options)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n_new), value=1)
        scored = hfgen.token_logprobs(model, output.sequences, mask)[:, -n_new:]
        assert torch.equal(scored.detach(), output.logprobs.token_logprobs)
        for row, i in enumerate(order):
            whole = torch.cat([rows[i], output.sequences[row, -n_new:]])
            alone = hfgen.token_logprobs(model, whole[None])[0, -n_new:]
            assert torch.equal(alone, scored[row])


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimised_models_are_exact(weights: str | None, dtype: torch.dtype) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=128).to(dtype).eval()
    hfgen.optimize(model, weights=weights)
    kernels = model.optimization.kernels
    hfgen.exact(model)
    trial = trials.Trial(model)
    assert_exact(trial, trial.decode, trial.shuffled, trial.engine)
    inputs = trials.padded(trial.rows)
    if weights is None or not any(name.startswith("int") for name in kernels.values()):
        assert hfgen.token_logprobs(model, **inputs).requires_grad
    else:
        with pytest.raises(ValueError, match="no gradients"):
            hfgen.token_logprobs(model, **inputs)
        with torch.no_grad():
            assert hfgen.token_logprobs(model, **inputs).isfinite().all()
    hfgen.restore(model)
    assert "forward" not in vars(model.lm_head)


def test_gradients_of_a_packed_kernel_are_those_of_the_layer() -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=128).eval()
    rows = trials.padded(trials.prompts(model.config.vocab_size))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        hfgen.token_logprobs(model, **rows)[:, -2:].sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    hfgen.exact(hfgen.optimize(model, kernels="onednn"))
    for own, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------- refusals


class Doubled(nn.Linear):
    """A layer that mixes the rows of its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input.mean() * 0


def in_float64(model: Any) -> None:
    model.double()


def with_dropout(model: Any) -> None:
    model.model.layers[0].mlp.add_module("dropout", nn.Dropout(0.1))
    model.train()


def with_a_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output)


def with_a_class_of_ones_own(model: Any) -> None:
    model.lm_head.__class__ = Doubled


def on_another_device(model: Any) -> None:
    model.lm_head.to("meta")


def compiled_by_layer(model: Any) -> None:
    hfgen.optimize(model, compile=True)


def compiled_by_torch(model: Any) -> None:
    model.model.layers[0].compile(backend="eager")


def with_another_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states: states + states.mean()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (in_float64, "torch.float64; allowed are torch.float32"),
        (with_dropout, r"'model.layers.0.mlp.dropout' drops values at random"),
        (with_a_hook, "with_a_hook.<locals>.<lambda> is not known to compute each row by itself"),
        (with_a_class_of_ones_own, "Doubled is not known to compute each row by itself"),
        (on_another_device, "on several devices"),
        (compiled_by_layer, "has a forward that was set on it"),
        (compiled_by_torch, "has a forward that was set on it"),
    ],
)
def test_what_cannot_be_exact_is_refused_and_stays_as_it_was(
    prepare: Any, message: str, model: Any
) -> None:
    prepare(model)
    before = state(model)
    with pytest.raises(ValueError, match=f"^exact: .*{message}"):
        hfgen.exact(model)
    assert state(model) == before


def test_families_are_refused_by_the_operation_that_is_not_exact() -> None:
    sizes = {"hidden_size": 32, "vocab_size": 90}
    mpt = MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=90)).eval()
    with pytest.raises(ValueError, match=r"MptAttention makes its attention mask by itself"):
        hfgen.exact(mpt)
    mamba = MambaForCausalLM(MambaConfig(num_hidden_layers=1, **sizes)).eval()
    before = state(mamba)
    with pytest.raises(ValueError, match="MambaMixer"):
        hfgen.exact(mamba)
    assert state(mamba) == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "short_factor": 4 * [1.0],
            "long_factor": 4 * [2.0],
        },
    ],
)
def test_positions_that_depend_on_the_longest_row_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^exact: rotary positions of all rows change"):
        hfgen.exact(tiny_llama(rope_parameters=rope | {"rope_theta": 1e4}))


def test_an_operation_that_fails_the_probe_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_passed", {})
    monkeypatch.setattr(tiles, "_passing", lambda *_: tuple(range(1, 513)))
    with pytest.raises(ValueError, match=r"Linear\(.* in float32 is not exact on this machine"):
        hfgen.exact(model)
    assert not is_exact(model)


def added_in_orders(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that adds from the front for 12 to 32 rows, from the back for fewer, odd columns first for more."""
    columns = list(range(weight.shape[0]))
    if len(rows) < 12:
        columns.reverse()
    elif len(rows) > 32:
        columns.sort(key=lambda column: column % 2 == 0)
    return sum((rows[:, [c]] * weight[c] for c in columns), torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_computed_in_calls_of_sizes_that_give_the_same_bits(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(100, 64), torch.randn(64, 8)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return added_in_orders(rows.float(), weight.float()).to(dtype)

    expected = product(rows[:12].to(dtype), weight.to(dtype))
    for n in (*range(1, 13), 33, 40, 100):
        output = tiles.tiled(product, rows[:n].to(dtype), weight.to(dtype))
        assert output.shape == (n, 8)
        assert torch.equal(output[:12], expected[:n])
    assert tiles.tiled(product, rows[:0].to(dtype), weight.to(dtype)).shape == (0, 8)
    passed = next(sizes for kind, sizes in tiles._passed.items() if kind[0] is product)
    assert passed == (12, 16, 20, 24, 28, 32)


def test_the_last_block_has_as_many_keys_as_pass_for_all_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "LAST_KEYS", keys := {})
    monkeypatch.setattr(trial, "LAST_KEYS", keys)
    passing = {3: (64, 192, spans.KEYS), 5: (64, 128, spans.KEYS)}
    monkeypatch.setattr(
        trial, "_try_last", lambda n, heads, *rest: None if n in passing[heads] else "differs"
    )
    for heads in passing:
        trial.of_attention.__wrapped__(heads, heads, 8, torch.float32, 1)
    assert keys == {(torch.float32, 8): (64, spans.KEYS)}


def test_the_probe_says_which_rows_differ() -> None:
    values = torch.randn(trial.ROWS, 8)
    assert trial.try_rows(lambda x: x * 2, values) is None
    assert trial.try_rows(lambda x: x + len(x), values) == "1 rows from row 0 on of 64"
    by_place = trial.try_rows(lambda x: x + torch.arange(len(x))[:, None], values)
    assert by_place == "1 rows from row 1 on of 64"


def test_calls_that_would_not_be_exact_raise(model: Any) -> None:
    hfgen.exact(model)
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(**INPUTS)
    with pytest.raises(ValueError, match="already"):
        hfgen.exact(model)
    with pytest.raises(ValueError, match=r"exact already: call hfgen\.restore"):
        hfgen.optimize(model, compile=True)
    static = {"cache_implementation": "static", "compile_config": CompileConfig()}
    with pytest.raises(ValueError, match="compiled graph"):
        model.generate(**INPUTS, max_new_tokens=2, **static)
    with pytest.raises(ValueError, match="makes its attention mask by itself"):
        model(**INPUTS, attention_mask=torch.zeros(2, 1, 6, 6))
    for position_ids in ([[0, 1, 2, 0, 1, 2]], [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5]]):
        with pytest.raises(ValueError, match="positions begin anew within a row"):
            model(**INPUTS, position_ids=torch.tensor(position_ids), use_cache=False)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attention has been set to 'eager'"):
        model.generate(**INPUTS, max_new_tokens=2)
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    changes: list[tuple[Callable[[Any], Any], str]] = [
        (lambda model: model.resize_token_embeddings(99), "lm_head' has been added since"),
        (
            lambda model: inject_adapter_in_model(adapter, model),
            "q_proj.base_layer' has been added since",
        ),
        (compiled_by_torch, "model.layers.0' has been compiled since"),
        (with_another_forward, "model.layers.0.mlp' got another forward since"),
        (with_a_hook, r"with_a_hook.<locals>.<lambda> is not known to compute each row by itself"),
    ]
    for change, message in changes:
        model = hfgen.exact(hfgen.mix_into(tiny.llama()))
        change(model)
        with pytest.raises(ValueError, match=message):
            model.generate(**INPUTS, max_new_tokens=2)
        hfgen.restore(model)
        if change not in (compiled_by_torch, with_another_forward, with_a_hook):
            hfgen.exact(model).generate(**INPUTS, max_new_tokens=2)
    with pytest.raises(TypeError, match="takes a transformers model, but got Linear"):
        hfgen.exact(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids has to be a tensor"),
        ({"input_ids": torch.ones(3)}, ValueError, r"\(rows, 2 or more tokens\), got \(3,\)"),
        ({"input_ids": torch.ones(2, 1)}, ValueError, r"got \(2, 1\)"),
        (
            {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(3, 2)},
            ValueError,
            r"attention_mask has to be \(2, 3\)",
        ),
    ],
)
def test_bad_input_of_token_logprobs(arguments: Any, error: type, message: str, model: Any) -> None:
    with pytest.raises(error, match=message):
        hfgen.token_logprobs(model, **arguments)


def test_calls_do_not_drop_values(model: Any) -> None:
    hfgen.exact(model)
    model.model.layers[0].mlp.add_module("dropout", nn.Dropout(0.1))
    model.train()
    with pytest.raises(ValueError, match=r"^exact: 'model.layers.0.mlp.dropout' drops values"):
        hfgen.token_logprobs(model, torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^exact: 'model.layers.0.mlp.dropout' drops values"):
        model.generate(**INPUTS, max_new_tokens=2)


def test_quantised_caches_are_refused(model: Any) -> None:
    options = {"max_new_tokens": 2, "cache_implementation": "quantized"}
    given = model.generate(**INPUTS, **options, return_dict_in_generate=True).past_key_values
    hfgen.exact(model)
    longer = {name: torch.cat([ids, ids], dim=1) for name, ids in INPUTS.items()}
    for call in (INPUTS | options, longer | {CACHE: given, "max_new_tokens": 2}):
        with pytest.raises(ValueError, match=r"^exact: a quantised cache rounds keys"):
            model.generate(**call)


def test_calls_with_more_threads_than_were_tried_are_refused(model: Any) -> None:
    hfgen.exact(model)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads + 1)
    try:
        for call in (model.generate, partial(hfgen.token_logprobs, model)):
            with pytest.raises(ValueError, match=r"^exact: torch has \d threads now"):
                call(**INPUTS)
    finally:
        torch.set_num_threads(n_threads)


def test_a_row_with_nan_leaves_the_others_as_they_are(model: Any) -> None:
    hfgen.exact(model)
    rows = trials.prompts(model.config.vocab_size)[:2]
    rows = [row[-3:] for row in rows]
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("nan")
        own = model(rows[0][None]).logits[0]
        beside = model(torch.stack([rows[0], torch.full((3,), 5)])).logits[0]
    assert torch.equal(own, beside)


# --------------------------------------------------------------- command line


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "name", "generate chat compare bench batch inspect serve perplexity eval_generate".split()
)
def test_every_command_that_loads_a_model_has_the_option(name: str) -> None:
    names = {"eval_generate": ["eval", "generate"], "perplexity": ["eval", "perplexity"]}
    assert "--exact" in command(*names.get(name, [name]), "--help").stdout


def test_generate_with_exact_gives_what_an_exact_model_gives() -> None:
    options = [
        "--max-new-tokens",
        "6",
        "--temperature",
        "0.8",
        "--do-sample",
        "--seed",
        "3",
        "--json",
    ]
    answer = json.loads(command("generate", "def f(x):", "--exact", *options).stdout)
    model, tokenizer = hfgen.builtin_model()
    inputs = tokenizer("def f(x):", return_tensors="pt")
    sampling = {"max_new_tokens": 6, "temperature": 0.8, "do_sample": True, "seed": 3}
    with hfgen.exact(model):
        expected = model.generate(**inputs, **sampling)[0, inputs["input_ids"].shape[1] :]
    assert answer["tokens"] == expected.tolist()


def test_doctor_lists_operations(tmp_path: Any) -> None:
    result = command("doctor", "--exact", "builtin", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["exact"] is True
    assert {"name", "shape", "dtype", "differs"} == set(found["operations"][0])
    assert "The model is exact here." in command("doctor", "--exact", "builtin").stdout


def test_doctor_and_generate_say_why_a_model_cannot_be_exact(tmp_path: Any) -> None:
    config = MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=2048)
    MptForCausalLM(config).save_pretrained(tmp_path)
    hfgen.builtin_model()[1].save_pretrained(tmp_path)
    result = command("doctor", "--exact", str(tmp_path))
    assert result.exit_code == 1
    assert "Refused: MptAttention makes its attention mask by itself" in result.stdout
    result = command("generate", "x", "--exact", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "--exact: MptAttention makes its attention mask by itself" in result.stderr
    result = command("generate", "x", "--exact", "--optimize", "--compile")
    assert "leave one out" in result.stderr


# ------------------------------------------ attention that a module computes by itself


class OwnAttention(torch.nn.Module):
    """Attention of one head, as old models write it; ``change`` is applied to its scores."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, states: torch.Tensor, mask: torch.Tensor | None) -> Any:
        scores = torch.matmul(states, states.transpose(-1, -2)) / 4.0
        scores = scores if mask is None else scores + mask
        weights = torch.nn.functional.softmax(self.change(scores), dim=-1)
        return torch.matmul(weights, states), weights


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores,
        lambda scores: (scores.float() * 2 + torch.arange(9.0)).to(scores.dtype),
        lambda scores: scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9),
        lambda scores: torch.where(torch.ones(9, 9).tril().bool(), scores, torch.tensor(-1e30)),
        lambda scores: torch.max(scores, torch.tensor(torch.finfo(torch.float32).min)),
        lambda scores: scores.view(2, 9, 9).view(2, 1, 9, 9),
        lambda scores: torch.nn.functional.dropout(scores, 0.5, False).contiguous(),
    ],
)
def test_attention_of_a_module_is_followed(change: Any) -> None:
    module = OwnAttention(change)
    states, mask = (
        torch.randn(2, 1, 9, 16),
        spans.exact_mask(batch_size=2, q_length=9, kv_length=9),
    )
    expected, _ = module(states, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))
    output, weights = with_followed_calls(module, states, mask)
    assert weights is None
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    "change",
    [
        torch.tanh,
        lambda scores: scores[..., :3],
        lambda scores: scores.transpose(-1, -2),
        lambda scores: scores * -1.0,
        lambda scores: torch.nn.functional.dropout(scores, 0.5, True),
        lambda scores: scores.masked_fill(torch.ones(9, 9).bool(), 0.0),
        lambda scores: torch.nn.functional.softmax(scores, dim=1),
    ],
)
def test_what_is_not_known_of_attention_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"^exact: OwnAttention calls torch's matmul"):
        with_followed_calls(OwnAttention(change), torch.randn(2, 1, 9, 16), None)


def test_attention_that_is_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that differ by more than rounding from those without exact mode."""
    monkeypatch.setattr(followed, "with_hidden", lambda product, hidden: product)
    config = GPTNeoConfig(
        hidden_size=32,
        vocab_size=90,
        num_layers=1,
        num_heads=2,
        window_size=4,
        attention_types=[[["local"], 1]],
    )
    with pytest.raises(ValueError, match="not by rounding alone"):
        hfgen.exact(GPTNeoForCausalLM(config).eval())
