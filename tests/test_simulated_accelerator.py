"""What decoding asks of an accelerator: how often it waits for one, and what it copies there.

The budget, per step after the first: one read of the device where an EOS can end the call, none where
only its length can; no copies to the device; no operation on tensors of two devices. All calls also
give the tokens of a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfgen
from tests import tiny
from tests.drafting_models import whisper
from tests.parity.family import Family
from tests.parity.harness import FAMILIES, ours, quiet
from tests.parity.options import Recorder
from tests.simulated_accelerator import DEVICE, Accelerator, Event, on_device, to_device, to_host
from tests.versions import IS_5_23, IS_5_24

EOS = 3  # which no call here generates, unless it says so
SHORT, LONG = 3, 9


@pytest.fixture(autouse=True)
def _checks_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On, as torch has them; compiling a model, which other tests do, switches them off for good."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Its early layers know the next token often enough for drafts to be accepted."""
    return hfgen.mix_into(whisper(tiny.llama(), 0.3))


@pytest.fixture(scope="module")
def device_model(model: nn.Module) -> nn.Module:
    return on_device(model)


@pytest.fixture(scope="module")
def assistants() -> tuple[nn.Module, nn.Module]:
    """The model's first layer, on the CPU and on the device."""
    assistant: Any = hfgen.mix_into(whisper(tiny.llama(), 0.3))
    assistant.model.layers = assistant.model.layers[:1]
    assistant.config.num_hidden_layers = 1
    return assistant, on_device(assistant)


def prompt() -> Tensor:
    """Two rows of seven tokens that repeat themselves, so that there is something to look up."""
    return torch.tensor([[11, 12, 13, 11, 12, 13, 11], [21, 22, 21, 22, 21, 22, 21]])


def both(
    model: nn.Module, device_model: nn.Module, ids: Tensor | None = None, **kwargs: Any
) -> tuple[Any, Accelerator]:
    """What a call returns on the device, once it is what it returns on the CPU; and what happened."""
    ids = prompt() if ids is None else ids
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    kwargs = {"eos_token_id": None, "pad_token_id": 0} | kwargs
    torch.manual_seed(0)
    expected = model.generate(ids, attention_mask=mask, **to_host(kwargs))
    torch.manual_seed(0)
    with Accelerator() as accelerator:
        kwargs = {
            k: kwargs["on_device"] if k == "assistant_model" else v for k, v in kwargs.items()
        }
        output = device_model.generate(to_device(ids), attention_mask=to_device(mask), **kwargs)
    tokens, wanted = (getattr(each, "sequences", each) for each in (output, expected))
    assert tokens.device == DEVICE
    assert to_host(tokens).equal(wanted)
    return output, accelerator


def more(short: Accelerator, long: Accelerator) -> list[str]:
    """The reads and copies that a longer call has besides a shorter one's, and how many of each."""
    counts = Counter(str(event) for event in long.events if event.kind != "kernel")
    counts.subtract(str(event) for event in short.events if event.kind != "kernel")
    return [f"{count} {event}" for event, count in counts.items() if count]


# ---------------------------------------------------------------- what is counted


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with Accelerator() as active:
        yield active


def kinds(accelerator: Accelerator) -> list[str]:
    return [event.kind for event in accelerator.events]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool(x[0]),
        lambda x: x.tolist(),
        lambda x: f"{x[0]}",
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: (x > 0).nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.repeat_interleave(x.long().clamp(min=0)),
    ],
)
def test_a_read_is_counted(accelerator: Accelerator, read: Any) -> None:
    read(to_device(torch.tensor([1.0, -2.0, 3.0])))
    assert kinds(accelerator).count("read") == 1
    assert "copy" not in kinds(accelerator)


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: torch.tensor([1, 2, 3], device=DEVICE),
        lambda x: torch.ones(3).to(DEVICE),
        lambda x: x.new_tensor([1.0]),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x[torch.tensor([0, 2])],
    ],
)
def test_a_copy_is_counted(accelerator: Accelerator, copied: Any) -> None:
    assert copied(to_device(torch.zeros(3))).device == DEVICE
    assert kinds(accelerator).count("copy") == 1
    assert "read" not in kinds(accelerator)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x: x + 1,
        lambda x: x * torch.tensor(2.0),  # a number from the host is an argument
        lambda x: x.masked_fill_(x > 0, 0.0),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device=DEVICE)),
        lambda x: x.to(DEVICE, torch.float64),
        lambda x: torch.arange(3, device=DEVICE),
        lambda x: x.clone(),
    ],
)
def test_everything_else_is_a_kernel(accelerator: Accelerator, kernel: Any) -> None:
    assert kernel(to_device(torch.tensor([1.0, -2.0, 3.0]))).device == DEVICE
    assert set(kinds(accelerator)) == {"kernel"}


def test_views_are_neither(accelerator: Accelerator) -> None:
    x = to_device(torch.zeros(2, 3))
    row = x[1].view(3, 1).transpose(0, 1)[:, 1:]
    assert accelerator.events == []
    row.add_(1)
    assert kinds(accelerator) == ["kernel"]
    assert x.tolist() == [[0, 0, 0], [0, 1, 1]]


def test_two_devices_do_not_meet(accelerator: Accelerator) -> None:
    x = to_device(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"tensors of two devices.*\(3,\)"):
        x + torch.zeros(3)
    with pytest.raises(TypeError, match="not on the CPU"):
        x.numpy()


def test_a_read_says_where(device_model: nn.Module) -> None:
    scores = tuple(to_device(torch.zeros(2, tiny.VOCAB)) for _ in range(3))
    with Accelerator() as accelerator:
        device_model.compute_transition_scores(to_device(prompt()), scores)
    (read,) = accelerator.of_kind("read")
    assert read.where.startswith("hfgen/decoding/outputs.py:")


def test_steps_begin_with_the_embedding(device_model: nn.Module) -> None:
    with Accelerator(device_model) as accelerator:
        device_model.generate(to_device(prompt()), eos_token_id=None, max_new_tokens=4)
    assert [step[0].name for step in accelerator.steps()] == 4 * ["embedding"]


# ---------------------------------------------------------------- the budget of each mode


@dataclass(frozen=True)
class Mode:
    """A kind of decoding: how it is asked for, and what it costs beyond the budget."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Why it is over the budget today.
    over: str | None = None
    #: Reads per step that lines of transformers make, whoever generates.
    theirs: int = 0
    #: Reads, and copies to the device, per step for objects of the caller's that live on the host.
    for_objects: int = 0
    #: Another model than the Llama.
    model: str = "llama"

    def param(self) -> Any:
        marks = [pytest.mark.xfail(strict=True, reason=self.over)] if self.over else []
        return pytest.param(self, id=self.name, marks=marks)


#: For the two rows of ``prompt()``.
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])

MODES = [
    Mode("greedy"),
    Mode("sampling", {"do_sample": True, "top_k": 10, "top_p": 0.9, "temperature": 0.8}),
    Mode("several sequences", {"do_sample": True, "num_return_sequences": 3}),
    Mode("beams", {"num_beams": 3}),
    Mode("beam sampling", {"num_beams": 3, "do_sample": True}),
    Mode(
        "group beams",
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ),
    Mode(
        "constrained beams",
        {"num_beams": 3, "force_words_ids": [[7, 8]]},
        for_objects=1,  # constraints may be of any class, and are asked about tokens
    ),
    Mode("contrastive", {"penalty_alpha": 0.5, "top_k": 4}),
    Mode("DoLa", {"dola_layers": "high"}),
    Mode("drop_finished", {"drop_finished": True}),
    Mode(
        "processors",
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[8], [9, 10]],
            "min_new_tokens": 2,
            "sequence_bias": {(14,): 1.0, (15, 16): -1.0},
            "suppress_tokens": [17],
        },
    ),
    Mode(
        "penalties",
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "penalty_exclude_ids": [9, 10]},
    ),
    Mode("penalties of a window", {"repetition_penalty": 1.5, "penalty_window": 4}),
    Mode("penalties, beams", {"num_beams": 3, "frequency_penalty": 1.0, "penalty_window": 5}),
    Mode(
        "DRY",
        {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
        "repeats are looked up on the host",
    ),
    Mode("truncation", {"do_sample": True, "top_n_sigma": 2.0, "top_a": 0.1, "p_less": True}),
    Mode("temperatures", {"do_sample": True, "dynatemp_range": 0.5, "smoothing_factor": 0.2}),
    Mode("XTC", {"do_sample": True, "xtc_probability": 0.5}),
    Mode("mirostat", {"do_sample": True, "mirostat": 1}),
    Mode("adaptive p", {"do_sample": True, "adaptive_target": 0.3}),
    Mode("a value per prompt", {"do_sample": True, "temperature": [0.5, 1.5], "top_p": [0.9, 0.5]}),
    Mode("warpers", {"do_sample": True, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4}, theirs=1),
    Mode("typical", {"do_sample": True, "typical_p": 0.9, "min_p": 0.01}),
    Mode("top-h", {"do_sample": True, "top_h": 0.9}, theirs=1),
    Mode("guidance", {"guidance_scale": 1.5}, theirs=1),  # a mask is looked at
    Mode("left padding", {"attention_mask": LEFT_PADDED}, theirs=1),
    Mode("beams with left padding", {"attention_mask": LEFT_PADDED, "num_beams": 2}, theirs=1),
    Mode(
        "lengths",
        {
            "min_length": 8,
            "forced_eos_token_id": EOS,
            "begin_suppress_tokens": [9],
        },
    ),
    Mode("invalid values", {"remove_invalid_values": True, "renormalize_logits": True}),
    Mode(
        "minimum Bayes risk",
        {
            "custom_generate": hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True),
            "do_sample": True,
            "num_return_sequences": 3,
        },
    ),
    Mode("chunks", {"prefill_chunk_size": 3}),
    Mode("encoder-decoder", theirs=1, model="t5"),
    Mode("encoder-decoder beams", {"num_beams": 3}, theirs=1, model="t5"),
    Mode(
        "n-grams of the encoder",
        {"encoder_no_repeat_ngram_size": 3},
        theirs=1,
        model="t5",
    ),
    Mode(
        "static cache, beams",
        {"cache_implementation": "static", "disable_compile": True, "num_beams": 2},
    ),
    Mode("quantised cache, beams", {"cache_implementation": "quantized", "num_beams": 2}),
    Mode(
        "quantised cache, contrastive",
        {"cache_implementation": "quantized", "penalty_alpha": 0.5, "top_k": 4},
    ),
    Mode("static cache", {"cache_implementation": "static", "disable_compile": True}),
    Mode("quantised cache", {"cache_implementation": "quantized"}),
    Mode(
        "outputs", {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ),
]


@pytest.fixture(scope="module")
def models(model: nn.Module, device_model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    t5 = hfgen.mix_into(tiny.t5())
    return {"llama": (model, device_model), "t5": (t5, on_device(t5))}


def calls(models: Any, mode: Mode, **kwargs: Any) -> list[Accelerator]:
    """What happened in a call for few tokens and in one for more, which no EOS ended."""
    done, started = [], 1 if mode.model == "t5" else prompt().shape[1]
    for n_new in (SHORT, LONG):
        output, accelerator = both(
            *models[mode.model], max_new_tokens=n_new, **kwargs | mode.kwargs
        )
        assert getattr(output, "sequences", output).shape[1] == started + n_new
        done.append(accelerator)
    return done


def of_transformers(events: list[Event]) -> int:
    return sum(event.where.startswith("transformers/") for event in events)


@pytest.mark.parametrize("mode", [mode.param() for mode in MODES])
@pytest.mark.parametrize("eos", [EOS, None], ids=["EOS", "length alone"])
def test_reads_per_step(models: Any, mode: Mode, eos: int | None) -> None:
    """One if an EOS can end the call, none if only its length can; nothing is copied there.

    Objects of the caller's that decide at every step cost a read and a copy more.
    """
    short, long = calls(models, mode, eos_token_id=eos)
    reads, before = long.of_kind("read"), short.of_kind("read")
    n_theirs = of_transformers(reads) - of_transformers(before)
    assert n_theirs == mode.theirs * (LONG - SHORT), more(short, long)
    n_ours = len(reads) - len(before) - n_theirs
    assert n_ours <= (LONG - SHORT) * (bool(eos) + mode.for_objects), more(short, long)
    n_copies = len(long.of_kind("copy")) - len(short.of_kind("copy"))
    assert n_copies == (LONG - SHORT) * mode.for_objects, more(short, long)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"return_dict_in_generate": True}])
@pytest.mark.parametrize(
    ("stop", "n_reads"),
    [
        ({"stop_strings": ["zz"]}, 2),  # the newest tokens, besides whether all have ended
        ({"stop_regex": "z{9}"}, 2),
        ({"stop_token_ids": [EOS]}, 1),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 9}}, 1),
        (
            {"thinking_token_budget": 1, "thinking_start": [EOS], "thinking_end": [4]},
            0,
        ),
    ],
)
def test_what_stops_cost_per_step(
    models: Any, mode: dict[str, Any], stop: dict[str, Any], n_reads: int
) -> None:
    tokenizer = {"tokenizer": tiny.byte_tokenizer()} if n_reads == 2 else {}
    short, long = calls(models, Mode("stops", mode), **stop, **tokenizer)
    reads = len(long.of_kind("read")) - len(short.of_kind("read"))
    assert reads <= n_reads * (LONG - SHORT), more(short, long)
    assert len(long.of_kind("copy")) == len(short.of_kind("copy")), more(short, long)


def test_rows_that_leave_cost_a_read_each_time(model: nn.Module, device_model: nn.Module) -> None:
    plain = model.generate(prompt(), eos_token_id=None, max_new_tokens=LONG)
    eos = int(plain[0, 9])  # the third new token of the first row
    kwargs = {"eos_token_id": eos, "max_new_tokens": LONG}
    _, stays = both(model, device_model, **kwargs)
    _, leaves = both(model, device_model, drop_finished=True, **kwargs)
    n_rows = len(prompt())
    assert len(leaves.of_kind("read")) <= len(stays.of_kind("read")) + n_rows - 1
    assert len(leaves.of_kind("copy")) == len(stays.of_kind("copy"))


def test_a_streamer_costs_a_read_per_step(model: nn.Module, device_model: nn.Module) -> None:
    done = []
    for n_new in (SHORT, LONG):
        streamers = [Recorder(), Recorder()]
        for each, streamer in zip((model, device_model), streamers, strict=True):
            on = each is device_model
            with Accelerator() as accelerator:
                ids = to_device(prompt()) if on else prompt()
                each.generate(ids, streamer=streamer, eos_token_id=None, max_new_tokens=n_new)
        assert [None if x is None else x.tolist() for x in streamers[0].seen] == [
            None if x is None else x.tolist() for x in streamers[1].seen
        ]
        assert all(x is None or x.device.type == "cpu" for x in streamers[1].seen)
        done.append(accelerator)
    short, long = done
    assert len(long.of_kind("read")) - len(short.of_kind("read")) == LONG - SHORT
    assert len(long.of_kind("copy")) == len(short.of_kind("copy"))


# ---------------------------------------------------------------- drafting


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"assistant_model": None},
    ],
    ids=["prompt lookup", "early exit", "assistant"],
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_one_read_per_round_of_drafting(
    model: nn.Module,
    device_model: nn.Module,
    assistants: tuple[nn.Module, nn.Module],
    kwargs: dict[str, Any],
    do_sample: bool,
) -> None:
    """A round: a draft, one forward of the target, a verdict."""
    done = []
    for n_new in (SHORT, 24):
        runs = []
        for on, each in ((False, model), (True, device_model)):
            given = dict(kwargs)
            if "assistant_model" in kwargs:
                given["assistant_model"] = assistants[on]
            torch.manual_seed(0)
            with Accelerator() as accelerator:
                output = each.generate(
                    to_device(prompt()) if on else prompt(),
                    eos_token_id=EOS,
                    pad_token_id=0,
                    max_new_tokens=n_new,
                    do_sample=do_sample,
                    temperature=0.2 if do_sample else None,
                    return_dict_in_generate=True,
                    output_speculation=True,
                    num_assistant_tokens=3,
                    num_assistant_tokens_schedule="constant",
                    **given,
                )
            runs.append(output)
        assert to_host(runs[1].sequences).equal(runs[0].sequences)
        done.append((runs[1].speculation, accelerator))
    (few, short), (many, long) = done
    assert many.accepted > 2
    n_rounds = many.forwards - few.forwards
    n_reads = len(long.of_kind("read")) - len(short.of_kind("read"))
    assert n_reads <= n_rounds, more(short, long)
    # The verdict, right after the read: tokens, and the state of the rows; what an assistant knows.
    n_copies = len(long.of_kind("copy")) - len(short.of_kind("copy"))
    assert n_copies <= 3 * n_rounds, more(short, long)


# ---------------------------------------------------------------- a step that can be captured


def cached_tensors(cache: Any) -> list[Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def test_a_static_step_can_be_captured(device_model: nn.Module) -> None:
    """The forwards of a static cache differ in values alone: then a graph of one stands for all.

    No reads or copies, the same kernels with the same arguments and shapes, the cache where it was.
    """
    addresses = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        addresses.append([states.data_ptr() for states in cached_tensors(cache)])
        return scores

    cache = device_model._prepare_static_cache("static", 2, 64, None, {})
    with Accelerator(device_model) as accelerator:
        device_model.generate(
            to_device(prompt()),
            past_key_values=cache,
            logits_processor=[watch],
            eos_token_id=None,
            disable_compile=True,
            max_new_tokens=8,
        )
    steps = [forward_of(step) for step in accelerator.steps()[1:]]
    assert len(steps) == 7
    assert all(step == steps[0] for step in steps)
    assert {event.kind for event in steps[0]} == {"kernel"}
    assert all(each == addresses[0] for each in addresses)
    assert len({*addresses[0]}) == 4


def forward_of(step: list[Event]) -> list[Event]:
    """A step's events up to its logits: the last matrix product."""
    last = max(i for i, event in enumerate(step) if event.name in ("mm", "addmm", "bmm"))
    return step[: last + 1]


# ---------------------------------------------------------------- families

#: Families that are not run, and why.
NOT_SIMULATED = {
    name: reason
    for reason, names in {
        "the model makes a tensor of numbers on the device, which torch does behind the simulation": (
            "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v glm4v_moe glm46v glm_ocr glm_image qwen3_5 "
            "paddleocr_vl ernie4_5_vl_moe cosmos3_edge cosmos3_omni udop kyutai_speech_to_text"
        ),
        "torch runs recurrent layers of other devices by a kernel that the CPU lacks": (
            "parakeet_rnnt parakeet_tdt nemotron_asr_streaming nemotron3_5_asr "
            "musicgen musicgen_melody"
        ),
        "its own generate() calls ours once per token": "csm moshi_speech",
        "its own generate() returns no tokens": "pocket_tts vibevoice gradium_phonon_tts",
        "its encoder adds noise of torch's generator, which two calls draw anew": "vibevoice_asr",
        "its class says that it is on the CPU, and inputs follow": "bare_module wrapper session",
    }.items()
    for name in names.split()
}
if IS_5_24:
    NOT_SIMULATED["hy_v4_vl"] = NOT_SIMULATED["qwen2_vl"]

#: Families that have an EOS or a loop of their own, whatever the call says, so that each step reads.
OWN_EOS = ("blip", "higgs_audio_v2", "janus", "whisper")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_SIMULATED])
def test_family(name: str) -> None:
    """Decoding itself neither reads nor copies; what the model's code does is not ours."""
    family, model = FAMILIES[name], ours(name)
    with quiet(), torch.no_grad():
        device_model = on_device(model)
        expected = tokens_of(family, model, 2, lambda inputs: inputs)
        done = []
        for n_new in (1, 2):
            with Accelerator() as accelerator:
                tokens = tokens_of(family, device_model, n_new, to_device)
            done.append(accelerator)
    assert to_host(tokens).equal(expected)
    ours_alone = [line for line in more(*done) if " hfgen/" in line.split("<")[0]]
    assert len(ours_alone) == (name in OWN_EOS), ours_alone


def tokens_of(family: Family, model: nn.Module, n_new: int, move: Any) -> Tensor:
    """What two rows generate greedily."""
    inputs = move(dict(family.inputs(model, 2, False, 1)))
    kwargs = {} if family.name == "blip" else {"eos_token_id": None}  # its own generate() sets it
    output = model.generate(**inputs, **kwargs, max_new_tokens=n_new, do_sample=False)
    return getattr(output, "sequences", output)


def test_most_families_are_run() -> None:
    assert set(NOT_SIMULATED) <= set(FAMILIES)
    assert len(FAMILIES) - len(NOT_SIMULATED) >= (256 if IS_5_23 else 200)


@pytest.mark.parametrize(
    ("options", "n_reads"),
    [({}, 2), ({"do_sample": True, "seed": 3}, 2), ({"num_beams": 3}, 2)],
    ids=["greedy", "sampled", "beams"],
)
def test_a_grammar_reads_the_ids_once_a_step(
    model: nn.Module, device_model: nn.Module, options: dict[str, Any], n_reads: int
) -> None:
    """The host follows the text: one read of the ids beside that for an EOS, and one copy of the masks."""
    tokenizer = tiny.ascii_tokenizer()
    given: dict[str, Any] = {
        "grammar": [hfgen.grammar.regex("[a-z]{30}"), hfgen.grammar.regex("[0-9]{30}")],
        "tokenizer": tokenizer,
        "eos_token_id": 2,
        **options,
    }
    both(model, device_model, **given, max_new_tokens=1)  # a table is kept on the device
    _, short = both(model, device_model, **given, max_new_tokens=SHORT)
    _, long = both(model, device_model, **given, max_new_tokens=LONG)
    for kind, n in (("read", n_reads), ("copy", 1)):
        n_more = len(long.of_kind(kind)) - len(short.of_kind(kind))
        assert n_more == n * (LONG - SHORT), more(short, long)
