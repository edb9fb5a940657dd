"""``output.card`` and ``hfgen replay``: the same bytes, or what differs by name; forged cards do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

import hfgen
from hfgen.decoding.card import Card, CardError, card, differences, first_token
from hfgen.decoding.card import replay as decode_again
from hfgen.families import CACHE
from hfgen.tools.cli import app
from tests import tiny

TEXTS = ["def add(a, b):", "x = "]


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return hfgen.builtin_model()


def call(builtin: tuple[Any, Any], keeps: Any = "prompt", **options: Any) -> Card:
    model, tokenizer = builtin
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 8, "tokenizer": tokenizer, **options}
    output = model.generate(**inputs, **options, output_card=keeps, return_dict_in_generate=True)
    found: Card = output.card
    return found


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeds": {"do_sample": True, "seed": [1, 2], "temperature": [0.5, 1.5], "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "stops": {"stop": ["\n"], "repetition_penalty": 1.2, "logprobs": 1},
    "drafts": {"prompt_lookup_num_tokens": 3, "do_sample": True, "seed": 5},
    "a folder": {"cache_implementation": "offloaded", "cache_config": {"path": "."}},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_card_replays(way: str, builtin: tuple[Any, Any]) -> None:
    written = Card.read(str(call(builtin, **WAYS[way])))
    assert written.beside == []
    found = decode_again(written, *builtin)
    assert (differences(written, found), first_token(written, found)) == ([], None)
    assert replace(found, prompt=written.prompt) == written


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": [8, 6]}], ids=["all", "lists"])
def test_what_a_call_unsets_of_the_models_config_stays_unset(
    options: dict[str, Any], builtin: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin[0].generation_config, "repetition_penalty", 1.9)
    written = Card.read(str(call(builtin, **options, repetition_penalty=None)))
    assert first_token(written, decode_again(written, *builtin)) is None


def test_the_command_gives_the_same_bytes_in_another_process(
    tmp_path: Path, builtin: tuple[Any, Any]
) -> None:
    written = call(builtin, keeps=True, logprobs=0, do_sample=True, seed=3)
    path = tmp_path / "card.json"
    path.write_text(str(written), encoding="utf-8")
    texts = [part for text in TEXTS for part in ("--prompt", text)]
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()}); "
    code = threads + "from hfgen.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "replay", str(path), *texts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "The same bytes."), done.stderr
    without = CliRunner().invoke(app, ["replay", str(path)])
    assert without.exit_code == 2
    assert "The card has no prompt" in without.stderr
    path.write_text(
        str(replace(written, tokens=[[*row[:2], "0", *row[3:]] for row in written.tokens]))
    )
    other = CliRunner().invoke(app, ["replay", str(path), *texts, "--json"])
    assert other.exit_code == 1
    report = json.loads(other.stdout)
    assert report["first_token"] == "row 0: the tokens differ from generated token 2 on"


def test_the_command_makes_the_model_of_an_exact_card_exact(tmp_path: Path) -> None:
    model, tokenizer = hfgen.builtin_model()
    exact = hfgen.exact(model), tokenizer
    written = call(exact, logprobs=0, do_sample=True, seed=3, max_new_tokens=3)
    path = tmp_path / "card.json"
    path.write_text(str(written), encoding="utf-8")
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert (done.exit_code, done.stdout.strip()) == (0, "The same bytes."), done.stderr


def test_nothing_of_the_prompt_is_kept_unless_it_is_asked_for(builtin: tuple[Any, Any]) -> None:
    written = call(builtin, keeps=True)
    assert list(written.prompt) == ["digest"]
    with pytest.raises(CardError, match="give the prompts of the call"):
        decode_again(written, *builtin)
    inputs = builtin[1](["def sub(a, b):", "x = "], return_tensors="pt", padding=True)
    with pytest.raises(CardError, match="not the prompts of the call"):
        decode_again(written, *builtin, inputs)
    assert list(call(builtin).prompt) == ["digest", "input_ids", "attention_mask"]
    assert not hasattr(
        builtin[0].generate(torch.tensor([[5]]), max_new_tokens=1, return_dict_in_generate=True),
        "card",
    )


def weights_of_one_bit() -> Any:
    model, tokenizer = hfgen.builtin_model()
    with torch.no_grad():
        weight = model.model.layers[2].mlp.up_proj.weight
        weight.view(torch.int32)[3, 4] ^= 1
    return model, tokenizer


def in_bfloat16() -> Any:
    model, tokenizer = hfgen.builtin_model()
    return model.bfloat16(), tokenizer


def optimized() -> Any:
    model, tokenizer = hfgen.builtin_model()
    return hfgen.optimize(model, kernels="onednn"), tokenizer


def with_eager_attention() -> Any:
    model, tokenizer = hfgen.builtin_model()
    model.set_attn_implementation("eager")
    return model, tokenizer


def with_another_tokenizer() -> Any:
    return hfgen.builtin_model()[0], tiny.byte_tokenizer()


@pytest.mark.parametrize(
    ("change", "section", "name"),
    [
        (weights_of_one_bit, "weights", "model.layers.2.mlp.up_proj.weight"),
        (in_bfloat16, "model", "dtype"),
        (optimized, "kernels", "optimized"),
        (with_eager_attention, "model", "attention"),
        (with_another_tokenizer, "tokenizer", "vocabulary and rules"),
    ],
)
def test_what_differs_is_named(
    change: Any, section: str, name: str, builtin: tuple[Any, Any]
) -> None:
    first = differences(card(*builtin), card(*change()))[0]
    assert first.startswith(f"{section}: {name!r} (")


def test_threads_versions_and_operations_are_named(builtin: tuple[Any, Any]) -> None:
    here = card(*builtin)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads + 1)
    try:
        assert differences(here, card(*builtin)) == [
            f"machine: 'threads' ('{n_threads}' in the card, '{n_threads + 1}' here)"
        ]
    finally:
        torch.set_num_threads(n_threads)
    older = replace(here, versions=here.versions | {"torch": "1.0"})
    assert differences(older, here) == [
        f"versions: 'torch' ('1.0' in the card, '{torch.__version__}' here)"
    ]
    operations = here.operations | {"model.norm": "0"}
    (line,) = differences(replace(here, operations=operations), here)
    assert line.startswith("operations: 'model.norm' (")


def test_what_a_card_cannot_hold_is_named(builtin: tuple[Any, Any]) -> None:
    written = call(builtin, do_sample=True, logits_processor=[lambda ids, scores: scores])
    assert written.beside == ["logits_processor", "sampling without `seed`"]
    with pytest.raises(CardError, match="cannot hold: logits_processor, sampling without `seed`"):
        decode_again(written, *builtin)
    with pytest.raises(CardError, match="without a call"):
        decode_again(card(*builtin), *builtin)


def test_a_mask_of_other_tokens_than_the_ids(builtin: tuple[Any, Any]) -> None:
    """Of embeddings, or of a cache, too."""
    model, tokenizer = builtin
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_card": "prompt"}
    embeds = model.get_input_embeddings()(ids)
    written = model.generate(inputs_embeds=embeds, attention_mask=mask, **options).card
    assert written.beside == ["a prompt that is no tensor of ids", "inputs_embeds"]
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
    continued = {"input_ids": ids[:, -1:], "attention_mask": mask, CACHE: cache}
    assert model.generate(**continued, **options).card.beside == [CACHE]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


FORGED: dict[str, dict[str, Any]] = {
    "an unknown key": {"model_path": "/etc/passwd"},
    "a missing key": {"weights": None},
    "code": {"parameters": [{"custom_generate": "evil/repo"}]},
    "a folder": {"parameters": [{"cache_config": {"path": "/tmp"}}]},
    "a class": {"parameters": [{"__class__": "os.system"}]},
    "numbers for texts": {"versions": {"torch": 2}},
    "a list for a dict": {"machine": []},
    "a deep dict": {"prompt": nested(50)},
    "another version": {"version": 2},
    "a version that is true": {"version": True},
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_cards_are_refused(case: str, builtin: tuple[Any, Any]) -> None:
    with pytest.raises(CardError):
        Card.read(json.dumps(asdict(card(*builtin)) | FORGED[case]))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "[" * 100_000, '{"version": NaN}', "\x00", "1e999"]
)
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(CardError):
        Card.read(text)


def test_forged_values_run_no_code_and_open_nothing(builtin: tuple[Any, Any]) -> None:
    """Prompts and parameters of any kind: a named error, and no file, process or import."""
    seen: list[str] = []
    is_watching = [False]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if is_watching[0] and event in (
            "open",
            "exec",
            "os.system",
            "subprocess.Popen",
            "socket.connect",
        ):
            seen.append(f"{event} {args[:1]}")

    sys.addaudithook(watch)
    written = call(builtin)
    decode_again(written, *builtin)  # what is imported late
    forgeries: list[dict[str, Any]] = [
        {"prompt": {"digest": written.prompt["digest"], "input_ids": value}}
        for value in ([["a"]], "text", [[1], [1, 2]], {"a": 1}, None, [[2**70]], [[-5]])
    ]
    forgeries += [
        {"parameters": [written.parameters[0] | values]}
        for values in (
            {"temperature": "hot"},
            {"cache_implementation": "/etc/passwd"},
            {"watermarking_config": {"a": 1}},
            {"num_beams": -3},
            {"max_new_tokens": "many"},
        )
    ]
    for forged in forgeries:
        is_watching[0] = True
        try:
            with pytest.raises((ValueError, TypeError, IndexError)):
                decode_again(Card.read(json.dumps(asdict(written) | forged)), *builtin)
        finally:
            is_watching[0] = False
    assert [
        event for event in seen if "site-packages" not in event and "/hfgen/" not in event
    ] == []
