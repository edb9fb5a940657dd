"""Stop flags that are read behind the next forward give what flags give that are read at once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfgen
from hfgen.decoding.strategies.sample import Sample
from hfgen.families import CACHE
from hfgen.running import ahead
from tests import tiny
from tests.parity.harness import Case, compare, draw_case, ours, run
from tests.parity.invariants import MANY_EOS
from tests.simulated_accelerator import Accelerator, on_device, to_device, to_host

#: Random calls of a test; more until one has been forwarded once too often.
LEAST = 8


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Within the test all calls check late that can; how many forwards were ahead, and dropped."""
    counts = Counter[str]()
    forward = ahead.forward_ahead

    def counted(run: Any, strategy: Any) -> Any:
        at_limit = run.ids.shape[1] >= getattr(run.criteria, "max_length", float("inf"))
        outputs = forward(run, strategy)
        counts["ahead"] += 1
        counts["dropped"] += outputs is None and not at_limit
        return outputs

    monkeypatch.setattr(ahead, "ALWAYS", True)
    monkeypatch.setattr(ahead, "forward_ahead", counted)
    return counts


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hfgen.mix_into(tiny.llama())


def prompt(rows: int) -> Tensor:
    return tiny.prompt(rows, seed=2)


@pytest.fixture(scope="module")
def eos(model: nn.Module) -> int:
    """The fourth token that the first row generates, which is none of its first three."""
    tokens = model.generate(prompt(1), eos_token_id=None, max_new_tokens=4)[0, -4:].tolist()
    assert tokens[3] not in tokens[:3]
    return int(tokens[3])


# ---------------------------------------------------------------- the same in every mode


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_of_all_families(
    late: Counter[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tokens, scores, caches, streamers, exceptions, warnings, and the state of torch's generator."""
    failed, rng, n_calls = [], random.Random(seed), 0
    while n_calls < LEAST or not late["dropped"]:
        case = draw_case(rng)
        if "eos_token_id" in case.options or case.seed % 4:  # which may end it early
            case = replace(case, options={**case.options, "eos_token_id": MANY_EOS})
        monkeypatch.setattr(ahead, "ALWAYS", False)
        at_once = run(ours(case.family), case)
        monkeypatch.setattr(ahead, "ALWAYS", True)
        found = compare(at_once, run(ours(case.family), case), 0.0)
        failed += [line for line in [*found, case.command] if found]
        n_calls += 1
        assert n_calls < 20 * LEAST, "no call dropped a forward"
    assert not failed, "\n".join(failed)


def test_moshi_checks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its steps draws audio, keeps it on the model, and warns: a forward that is dropped would show."""
    options = {"repetition_penalty": 1.3, "eos_token_id": MANY_EOS, "suppress_tokens": [10, 11, 12]}
    case = Case("moshi_speech", "sample", 3, False, 731, options | {"min_p": 0.1})
    at_once = run(ours(case.family), case)
    monkeypatch.setattr(ahead, "ALWAYS", True)
    assert compare(at_once, run(ours(case.family), case), 0.0) == []


class Streamer(list[Any]):
    """What a streamer is given."""

    def put(self, tokens: Tensor) -> None:
        self.append(tokens.tolist())

    def end(self) -> None:
        self.append(None)


def ends_on_the_host(ids: Tensor, scores: Any) -> Tensor:
    """A criterion of the caller's, which looks at the tokens."""
    return torch.tensor([sum(row[7:]) > 300 for row in ids.tolist()])


BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams that stop early": {"num_beams": 3, "early_stopping": True},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[7, 8]]},
}

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "seeds": {"do_sample": True, "seed": [3, 4]},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "minimum Bayes risk": {
        "custom_generate": hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True),
        "do_sample": True,
        "num_return_sequences": 3,
    },
    "a value per prompt": {"max_new_tokens": [5, 12], "temperature": [0.5, 1.5], "do_sample": True},
    **BEAMS,
    "DoLa": {"dola_layers": "high"},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "mirostat": {"do_sample": True, "mirostat": 2},
    "repeats": {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
    "stop strings": {"stop_strings": ["zz", "a"], "tokenizer": tiny.byte_tokenizer()},
    "a time": {"max_time": 1000.0},
    "a criterion of one's own": {"stopping_criteria": [ends_on_the_host]},
    "guidance": {"guidance_scale": 1.5},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized"},
    "no cache": {"use_cache": False},
}

#: Modes that read the device between choice and forward for another reason, or have nothing to queue.
AT_ONCE: dict[str, dict[str, Any]] = {
    "drop_finished": {"drop_finished": True},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.parametrize("mode", [*MODES, *AT_ONCE])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_tokens_streams_and_the_random_state(
    model: nn.Module, late: Counter[str], eos: int, mode: str, n_rows: int
) -> None:
    kwargs: dict[str, Any] = {
        "max_new_tokens": 12,
        "eos_token_id": [eos, 5, 6, 7],
        **(MODES | AT_ONCE)[mode],
    }
    if n_rows == 1:
        of_prompts = kwargs.keys() & {"seed", "max_new_tokens", "temperature"}
        kwargs |= {n: kwargs[n][0] for n in of_prompts if isinstance(kwargs[n], list)}
    # Beams stream what has become settled; those of lists and samples that are compared, nothing.
    may_stream = n_rows == 1 and mode not in ("group beams", "constrained beams", "several")
    found = []
    for always in (False, True):
        ahead.ALWAYS = always
        streamer = Streamer()
        if may_stream and mode != "minimum Bayes risk":
            kwargs["streamer"] = streamer
        torch.manual_seed(1)
        tokens = model.generate(prompt(n_rows), **kwargs)
        found.append((tokens.tolist(), torch.get_rng_state().tolist(), streamer))
    assert found[0] == found[1]
    # Of one row, none leaves.
    assert bool(late["ahead"]) == (mode in MODES or (mode == "drop_finished" and n_rows == 1))


def test_an_end_costs_a_forward(model: nn.Module, late: Counter[str], eos: int) -> None:
    ids = prompt(1)
    out = model.generate(ids, eos_token_id=eos, max_new_tokens=9)
    assert out.shape[1] == ids.shape[1] + 4
    assert late == {"ahead": 4, "dropped": 1}


def test_a_length_ends_without_a_forward_ahead(
    model: nn.Module, late: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = []
    forward = Sample.forward
    monkeypatch.setattr(Sample, "forward", lambda *a: forwards.append(1) or forward(*a))
    model.generate(prompt(1), eos_token_id=96, max_new_tokens=6)
    assert len(forwards) == 5  # and the prefill
    assert late["dropped"] == 0


def test_streams_and_stops_of_text(late: Counter[str]) -> None:
    model, tokenizer = hfgen.builtin_model()
    ids = torch.tensor([tokenizer("for line in sys.stdin:\n").input_ids])
    kwargs = {"tokenizer": tokenizer, "stop_strings": ["\n"], "max_new_tokens": 30}
    found = []
    for always in (False, True):
        ahead.ALWAYS = always
        output = model.generate(ids, return_dict_in_generate=True, **kwargs)
        events = list(model.stream(ids, **kwargs))
        found.append((output.sequences.tolist(), output.texts, output.finish_reasons, events))
    assert found[0] == found[1]
    assert late["dropped"] == 1  # of the stream


# ---------------------------------------------------------------- where flags are read at once


def test_what_sees_each_forward_or_draws_in_it_checks_at_once(
    model: nn.Module, late: Counter[str], eos: int
) -> None:
    kwargs = {"eos_token_id": [eos, 96], "max_new_tokens": 9}
    model.generate(prompt(2), drop_finished=True, **kwargs)
    assert not late, "rows leave between two forwards"

    handle = model.model.norm.register_forward_hook(lambda *args: None)
    try:
        model.generate(prompt(1), **kwargs)
    finally:
        handle.remove()
    assert not late, "somebody may count forwards"

    noisy = hfgen.mix_into(tiny.llama(attention_dropout=0.5))
    noisy.train()
    noisy.generate(prompt(1), **kwargs)
    assert not late, "a forward draws"

    model.generate(prompt(1), eos_token_id=None, max_new_tokens=9)
    assert not late, "the host knows the length"


def test_a_subclass_has_to_declare_it(model: nn.Module, late: Counter[str]) -> None:
    class Own(Sample):
        def stop(self, run: Any) -> None:
            super().stop(run)

    class Declared(Own):
        checks_late = True

    for strategy, expected in ((Own, False), (Declared, True)):
        recipe = hfgen.recipe(strategy)
        model.generate(prompt(1), custom_generate=recipe, eos_token_id=96, max_new_tokens=4)
        assert bool(late) == expected


def test_a_cpu_checks_at_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("checked late")

    monkeypatch.setattr(ahead, "forward_ahead", fail)
    model.generate(prompt(2), max_new_tokens=5)


@pytest.mark.parametrize("options", [{"return_dict_in_generate": True}, {CACHE: None}])
def test_a_cache_that_is_seen_checks_at_once(
    model: nn.Module, late: Counter[str], options: dict[str, Any]
) -> None:
    if CACHE in options:
        options = {CACHE: hfgen.memory.caches.dynamic.GrowingCache(config=model.config)}
    model.generate(prompt(1), eos_token_id=96, max_new_tokens=4, **options)
    model.generate(prompt(1), eos_token_id=96, max_new_tokens=4, prefix_cache=hfgen.PrefixCache())
    assert not late


def test_invalid_scores_raise(late: Counter[str]) -> None:
    model = on_device(hfgen.mix_into(tiny.llama()))

    def spoil(ids: Tensor, scores: Tensor) -> Tensor:
        return scores * float("nan") if ids.shape[1] == start + 2 else scores

    ids = to_device(prompt(1))
    start = ids.shape[1]
    with Accelerator(), pytest.raises(hfgen.InvalidScoresError, match="step 2"):
        model.generate(ids, logits_processor=[spoil], eos_token_id=96, max_new_tokens=9)
    assert late["ahead"] > 0


# ---------------------------------------------------------------- what it is for


def test_flags_are_copied_before_the_forward_and_waited_for_behind_it(
    model: nn.Module, late: Counter[str], eos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that copies while it computes, of which this event is a stand-in."""
    seen: list[str] = []

    class Event:
        def __init__(self, device: Any, enable_timing: bool) -> None:
            assert torch.device(device) == torch.device("cpu")
            assert not enable_timing

        def record(self, stream: Any) -> None:
            assert isinstance(stream, torch.cpu.Stream)  # of the flags' device
            seen.append("copy")

        def synchronize(self) -> None:
            seen.append("wait")

    forward = Sample.forward
    monkeypatch.setattr(Sample, "forward", lambda *a: seen.append("forward") or forward(*a))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(ahead, "ASYNCHRONOUS", ("cpu",))
    monkeypatch.setattr(ahead, "generator_states", lambda device: [torch.get_rng_state()])
    tokens = model.generate(prompt(1), eos_token_id=eos, max_new_tokens=9)
    assert tokens.shape[1] == 7 + 4
    assert seen == 4 * ["copy", "forward", "wait"]


@pytest.fixture(scope="module")
def device_model(model: nn.Module) -> nn.Module:
    return on_device(model)


@pytest.mark.parametrize("mode", ["greedy", "sampled", "seeds", "beams", "static"])
def test_the_read_comes_behind_the_next_forward(
    model: nn.Module, device_model: nn.Module, late: Counter[str], mode: str
) -> None:
    """In each step: the kernels of a forward, the read of the flags before it, the choice."""
    kwargs = {"eos_token_id": 96, "max_new_tokens": 7, "disable_compile": True, **MODES[mode]}
    torch.manual_seed(0)
    expected = model.generate(prompt(2), **kwargs)
    torch.manual_seed(0)
    with Accelerator(device_model) as accelerator:
        tokens = device_model.generate(to_device(prompt(2)), **kwargs)
    assert to_host(tokens).equal(expected)
    steps = accelerator.steps()[1:]
    assert len(steps) == 6
    for step in steps[:-1]:
        logits = max(i for i, event in enumerate(step) if event.name in ("mm", "addmm", "bmm"))
        (read,) = (i for i, event in enumerate(step) if event.kind == "read")
        choice = [
            i for i, event in enumerate(step) if event.name in ("argmax", "topk", "multinomial")
        ]
        assert logits < read < min(choice)
