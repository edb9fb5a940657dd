"""The command line, on a tiny random model that is built here."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import typer
from rich.cells import cell_len
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import hfgen
from hfgen import StreamEvent, grammar
from hfgen.logits.stopping import FinishReason
from hfgen.running.optimization import compiled_layers
from hfgen.settings.fields import FIELDS
from hfgen.tools.cli import (
    app,
    compare,
    demo,
    field_options,
    generate,
    loading,
    main,
    measure,
    options,
    report,
    topics,
)
from hfgen.tools.cli.field_options import Fields, FieldsWithoutResults
from hfgen.tools.cli.options import Command, with_groups
from hfgen.tools.cli.report import CliError
from tests.tiny import byte_tokenizer as tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    special = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    config = LlamaConfig(vocab_size=258, initializer_range=0.5, **sizes, **heads, **special)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat")
    llama().save_pretrained(path)
    tokenizer(TEMPLATE).save_pretrained(path)
    return str(path)


@pytest.fixture
def loaded(folder: str) -> loading.Loaded:
    with loading.quiet():
        return loading.load(folder, None, "auto", "cpu")


@pytest.fixture
def tiny_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hfgen, "builtin_model", lambda draft=False: (llama(draft), tokenizer()))


def run(*arguments: str, stdin: str = "") -> SimpleNamespace:
    result = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "80"})
    assert isinstance(result.exception, SystemExit | None), result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def upstream_ids(folder: str, prompt: str, **kwargs: object) -> list[int]:
    """New tokens of transformers' own `generate`."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    model = LlamaForCausalLM.from_pretrained(folder)
    return model.generate(ids, **kwargs)[0, ids.shape[1] :].tolist()


def fields_of(*arguments: str) -> tuple[str | None, dict[str, object]]:
    """The prompt and the fields that ``hfgen generate`` gets."""
    seen: list[tuple[str | None, dict[str, object]]] = []

    def command(fields: Fields, prompt: str | None = typer.Argument(None)) -> None:
        seen.append((prompt, dict(fields)))

    program = typer.Typer(context_settings=dict(app.info.context_settings))
    command.__annotations__ = {"fields": Fields, "prompt": str | None, "return": None}
    program.command(cls=Command)(with_groups(command))
    program(list(arguments), standalone_mode=False)
    return seen[0]


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--max-new-tokens", "5"], {"max_new_tokens": 5}),
        (["--max_new_tokens=5"], {"max_new_tokens": 5}),
        (["--do-sample", "--temperature", ".5"], {"do_sample": True, "temperature": 0.5}),
        (["--do-sample=1"], {"do_sample": 1}),
        (["--do-sample", "false"], {"do_sample": False}),
        (["--no-use-cache"], {"use_cache": False}),
        (["--early-stopping", "never"], {"early_stopping": "never"}),
        (["--eos-token-id", "[1, 2]"], {"eos_token_id": [1, 2]}),
        (["--eos-token-id=None"], {"eos_token_id": None}),
        (["--top-k", "-1"], {"top_k": -1, "do_sample": True}),
        (["--stop-strings", "7"], {"stop_strings": "7"}),
        (["--stop-strings", '["a", "b"]'], {"stop_strings": ["a", "b"]}),
        (["--stop-strings", "--"], {"stop_strings": "--"}),
        (["--cache-implementation", "static"], {"cache_implementation": "static"}),
        (["--bad-words", "7"], {"bad_words": "7"}),
        (["--stop", r"\n\n", "--stop", r"a\\tb\t\d"], {"stop_strings": ["\n\n", "a\\tb\t\\d"]}),
        (["--stop=--"], {"stop_strings": ["--"]}),
        (["--regex", "[0-9]+"], {"grammar": grammar.regex("[0-9]+")}),
        (["--choice", "yes", "--choice=no"], {"grammar": grammar.choice(["yes", "no"])}),
        (["--json-object"], {"grammar": grammar.json_object(whitespace=" ?")}),
        (["--watermarking-config", '{"bias": 2}'], {"watermarking_config": {"bias": 2}}),
    ],
)
def test_fields_are_parsed(arguments: list[str], fields: dict[str, object]) -> None:
    assert fields_of("prompt", *arguments) == ("prompt", fields)


def test_a_flag_does_not_swallow_the_prompt() -> None:
    assert fields_of("--drop-finished", "prompt") == ("prompt", {"drop_finished": True})


def test_what_follows_two_dashes_is_no_option() -> None:
    assert fields_of("--", "--top-k") == ("--top-k", {})


def test_a_flag_with_words_of_its_own_takes_the_next_argument() -> None:
    with pytest.raises(CliError, match="--early-stopping takes true, false or never, but 'maybe'"):
        fields_of("--early-stopping", "maybe")


def test_grammars_are_read_from_files(tmp_path: Path) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "é.lark"
    schema.write_text('{"enum": ["é"]}', encoding="utf-8")
    lark.write_text('start: "é"', encoding="utf-8")
    by_schema = grammar.json({"enum": ["é"]}, whitespace=" ?")
    assert fields_of("x", "--json-schema", str(schema)) == ("x", {"grammar": by_schema})
    assert fields_of("x", f"--lark={lark}") == ("x", {"grammar": grammar.lark('start: "é"')})


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({}, None),
        ({"max_new_tokens": 3}, None),
        ({"seed": 3}, None),
        ({"temperature": 0.7}, True),
        ({"xtc_probability": 0.5}, True),
        ({"temperature": 0}, None),
        ({"temperature": 0, "top_k": 3}, None),
        ({"temperature": 0.7, "do_sample": False}, False),
        ({"top_k": 4, "penalty_alpha": 0.6}, None),
    ],
)
def test_a_parameter_of_sampling_switches_it_on(
    fields: dict[str, object], samples: bool | None
) -> None:
    found = Fields(**{name: str(value) for name, value in fields.items()})
    assert found.get("do_sample") is samples
    assert found | fields == found


@pytest.mark.parametrize(
    ("arguments", "is_sampled"),
    [
        (["--num-return-sequences", "3"], True),
        (["--num-return-sequences", "3", "--stream"], True),
        (["--num-return-sequences", "3", "--num-beams", "3"], False),
    ],
    ids=["plain", "streamed", "beams"],
)
def test_several_answers_are_sampled_or_those_of_beams(
    folder: str, arguments: list[str], is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    made = field_options.generation_config
    monkeypatch.setattr(
        options, "generation_config", lambda *given: seen.append(made(*given)) or seen[0]
    )
    result = run("generate", "x", "--model", folder, "--max-new-tokens", "3", *arguments)
    assert result.code == 0, result.err
    assert result.out.count(" of 3 ---") == 3
    assert bool(seen[0].do_sample) == is_sampled


def test_several_answers_are_those_of_the_beams_of_the_model(folder: str) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config.num_beams = 4
    config = field_options.generation_config({"num_return_sequences": 2}, model, 3)
    assert (config.num_beams, config.do_sample) == (4, False)


def test_more_tokens_than_positions_are_noted(folder: str) -> None:
    result = run("generate", "x", "--model", folder, "--max-new-tokens", "140", "--stop", "x")
    assert "note: the model has 128 positions" in result.err
    assert run("generate", "x", "--model", folder, "--max-new-tokens", "4").err == ""


def test_an_option_per_field_of_the_table() -> None:
    """Except for objects, which cannot be written as text."""
    objects = {"constraints", "continuous_batching_config", "grammar", "transformers_version"}
    assert set(field_options.KNOWN_FIELDS) == set(FIELDS) - objects


# --- wrong input -----------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_builtin")
def test_a_prompt_that_is_no_text_is_one_line_and_exit_code_2() -> None:
    result = run("generate", "x\udcff")
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("hfgen: ")
    assert "UTF-8" in line


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"adapter_config.json": "{}"}, "adapter of PEFT"),
        ({"config.json": "{"}, "cannot load"),
        ({"config.json": '{"model_type": "zzz"}'}, "zzz"),
        ({"config.json": '{"model_type": "llama"}'}, "no tokenizer"),
    ],
)
def test_unloadable_folder(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = run("generate", "x", "--model", str(tmp_path))
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert words in line


def damaged(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def of_other_shapes(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 64}))


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damaged, "weights are damaged or incomplete"),
        (of_other_shapes, "weights do not fit its config.json"),
        (without_tokenizer, "save one to the same folder"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    folder: str, tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    harm(tmp_path)
    result = run("generate", "x", "--model", str(tmp_path))
    assert result.code == 2
    assert words in result.err
    assert len(result.err.splitlines()) == 1


def test_weights_that_a_checkpoint_lacks_are_noted(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path)  # without the output layer
    tokenizer().save_pretrained(tmp_path)
    result = run("generate", "x", "--model", str(tmp_path), "--max-new-tokens", "2")
    assert result.code == 0
    assert "lacks weights" in result.err
    assert "lm_head.weight" in result.err


def test_model_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "offline", lambda: True)
    result = run("generate", "x", "--model", "no-such/model")
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert "no-such/model" in line
    assert "the hub cannot be reached" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "the hub has no such model")],
)
def test_what_the_hub_refuses_is_named(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("See the page.") from type(name, (Exception,), {})("403")

    monkeypatch.setattr(loading, "offline", lambda: False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(CliError, match=words):
        loading.load("some/model", None, "auto", "cpu")


@pytest.mark.usefixtures("tiny_builtin")
def test_debug_lets_the_exception_through() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--device", "tpu9", "--debug"])
    assert isinstance(result.exception, CliError)


def test_an_unexpected_exception_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr(measure, "encode", lambda *_: {}["boom"])
    result = run("generate", "x", "--model", folder)
    assert result.code == 1
    assert result.err == "hfgen: unexpected KeyError: 'boom' (--debug shows the traceback)\n"


# --- code that a checkpoint brings -----------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = "brings-code"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(params=["config", "model", "tokenizer"])
def code(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a checkpoint whose config, model or tokenizer is Python code of its own.

    The code makes the file ``ran`` beside the folder.
    """
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the cache is put into it
    path = tmp_path / request.param
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    (path / "theirs.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    autos = {"config": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    autos["model"] = {"AutoModelForCausalLM": "theirs.Model"}
    if request.param == "tokenizer":
        edit = {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "theirs.Tokens"]}}
        file = path / "tokenizer_config.json"
    else:
        edit = {"auto_map": autos[request.param]}
        edit |= {"config": {"model_type": "brings-code"}, "model": {}}[request.param]
        file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    return path


@pytest.mark.parametrize("command", ["generate -", "chat", "compare -"])
def test_code_is_not_run_by_an_answer_on_standard_input(code: Path, command: str) -> None:
    result = run(*command.split(), "--model", str(code), stdin="yes\n" * 4)
    if code.name == "model":  # of a known type: transformers' own class takes the place of the code
        assert result.code == 0
    else:
        assert (result.code, result.out) == (2, "")
        (line,) = result.err.splitlines()
        assert "Python code of its own" in line
        assert "--trust-remote-code" in line
    assert not (code.parent / "ran").exists()


def test_code_of_an_assistant_is_not_run(folder: str, code: Path) -> None:
    run("generate", "-", "--model", folder, "--assistant", str(code), stdin="yes\n" * 4)
    assert not (code.parent / "ran").exists()


def test_code_is_run_if_asked_for(code: Path) -> None:
    result = run("generate", "x", "--model", str(code), "--trust-remote-code")
    assert (result.code, result.err) == (0, "")
    assert (code.parent / "ran").exists()


# --- control codes ---------------------------------------------------------------------------

#: Colours, a title by OSC (BEL and ST end it), a DCS string, a reset, C1 controls.
CODED = (
    "a\x1b[31;1mb\x1b[0m\x1b]0;title\x07c\x1b]52;c;Zm9v\x1b\\d\x1bP1$qm\x1b\\e\x1bcf\x9b2Jg"
    "\x9d0;t\x9ch\x85i\r\x08\x7fj\x1b(Bk\tl\nm \x1b]0;never ended\nn o\x1b[3"
)
CLEAN = "".join(c for c in CODED if c in "\n\t" or unicodedata.category(c) != "Cc")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of `generate` gives CODED."""

    def answer(loaded, inputs, config, seed=None, show=None):  # type: ignore[no-untyped-def]
        row = loaded.tokenizer(CODED).input_ids
        if show is not None:
            for character in CODED:
                show(StreamEvent(0, (), character))
            show(StreamEvent(0, (), "", None, "eos"))
        output = SimpleNamespace(texts=[CODED])
        return measure.Generated([row], [row], 1.0, 0.1, output, ["eos"])

    monkeypatch.setattr(measure, "generate", answer)


@pytest.mark.parametrize("command", ["generate x", "generate x --stream", "chat"])
@pytest.mark.usefixtures("coded")
def test_a_pipe_gets_control_codes_and_a_terminal_does_not(
    chat_folder: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*command.split(), "--model", chat_folder]
    piped = run(*arguments, stdin="hi\n").out
    assert piped.rstrip("\n") == CODED
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(SystemExit):
        app(arguments)
    assert sys.stdout.getvalue().rstrip("\n") == CLEAN  # type: ignore[attr-defined]


@pytest.mark.usefixtures("coded")
def test_json_is_the_same_without_control_codes(folder: str) -> None:
    out = run("generate", "x", "--model", folder, "--json").out
    assert json.loads(out)["text"] == CODED
    assert not any(unicodedata.category(c) == "Cc" for c in out.removesuffix("\n"))


def test_messages_are_without_control_codes() -> None:
    said = report.one_line("no model \x1b[31mred\x9b2J at \x1b]0;t\x07here")
    assert not any(unicodedata.category(c) == "Cc" for c in said)
    words = tokenizer()
    escape, tab = words("\x1b\t").input_ids
    output = SimpleNamespace(logits=[])
    line = compare.described(compare.find_difference(0, [escape], [tab], output), words)
    assert not any(unicodedata.category(c) == "Cc" for c in line)


# --- generate --------------------------------------------------------------------------------


def test_generate_prints_the_text_of_the_same_tokens(folder: str) -> None:
    result = run("generate", "def f", "--model", folder, "--max-new-tokens", "6")
    expected = upstream_ids(folder, "def f", max_new_tokens=6)
    assert result.code == 0
    assert result.out.removesuffix("\n") == tokenizer().decode(expected).removesuffix("\n")


@pytest.mark.parametrize("beams", ["1", "3"])
def test_generate_streams_the_same_text(folder: str, beams: str) -> None:
    arguments = ["generate", "def f", "--model", folder, "--max-new-tokens", "6"]
    arguments += ["--num-beams", beams]
    assert run(*arguments, "--stream").out.rstrip("\n") == run(*arguments).out.rstrip("\n")


def test_several_sequences_are_streamed_in_turn(folder: str) -> None:
    arguments = ["generate", "def f", "--model", folder, "--max-new-tokens", "6", "--seed", "1"]
    arguments += ["--do-sample", "--num-return-sequences", "3"]
    streamed = run(*arguments, "--stream").out
    assert streamed == run(*arguments).out
    assert [line for line in streamed.splitlines() if line.startswith("---")] == [
        "--- 1 of 3 ---",
        "--- 2 of 3 ---",
        "--- 3 of 3 ---",
    ]


def test_rows_that_come_mixed_are_written_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    answers = report.Answers(3)
    written = []
    for event in [
        StreamEvent(1, (), "b1"),
        StreamEvent(0, (), ""),
        StreamEvent(0, (), "a1"),
        StreamEvent(2, (), "c\n", None, "eos"),
        StreamEvent(0, (), "a2", None, "eos"),
        StreamEvent(1, (), "b2", None, "length"),
    ]:
        answers(event)
        written.append(capsys.readouterr().out)
    a, b, c = (f"--- {n} of 3 ---\n" for n in (1, 2, 3))
    assert written == ["", a, "a1", "", f"a2\n{b}b1", f"b2\n{c}c\n"]


def test_json_has_log_probabilities(folder: str) -> None:
    arguments = ("--max-new-tokens", "2", "--logprobs", "2", "--prompt-logprobs", "0", "--json")
    report = json.loads(run("generate", "def f", "--model", folder, *arguments).out)
    content = report["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    of_prompt = report["prompt_logprobs"]["content"]
    assert "".join(entry["token"] for entry in of_prompt) == "ef f"


def test_a_table_of_log_probabilities(folder: str, loaded: loading.Loaded) -> None:
    arguments = ["--max-new-tokens", "3", "--logprobs", "2", "--prompt-logprobs", "0"]
    text = run("generate", "def f", "--model", folder, *arguments).out
    ids = tokenizer()("def f", return_tensors="pt").input_ids
    output = loaded.model.generate(
        ids, max_new_tokens=3, logprobs=2, return_dict_in_generate=True, tokenizer=tokenizer()
    )
    assert text.startswith(output.texts[0])
    of_prompt, of_answer = text[len(output.texts[0]) :].split("answer\n")
    rows = [line.split() for line in of_prompt.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows] == [["2", "e"], ["3", "f"], ["4", "␣"], ["5", "f"]]
    lines = of_answer.splitlines()[1:]
    assert max(map(len, text.splitlines())) <= 80
    for number, (line, token) in enumerate(zip(lines, output.logprobs[0], strict=True), 1):
        cells = line.split()
        assert (int(cells[0]), int(cells[3])) == (number, token.rank)
        assert cells[2] == generate.probability(token.logprob, is_logit=False)
        assert f"{cells[1]}\u00a0{cells[2]}" in line  # greedy: it is the likeliest, too


def test_what_a_table_says_of_rare_tokens_and_of_logits() -> None:
    said = [generate.probability(math.log(p), False) for p in (1.0, 0.12345, 0.0006, 0.0004)]
    assert said == ["100.0%", "12.3%", "0.1%", "<0.1%"]
    assert generate.probability(-math.inf, False) == "0.0%"
    assert generate.probability(-2.5, True) == "-2.500"


def test_the_rest_of_a_line_is_said_in_words(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.err, "_force_terminal", True)
    arguments = ["generate", "abc", "--model", folder, "--max-new-tokens", "6"]
    assert "6 tokens · cut off by its length · first after" in run(*arguments).err
    tokens = map(tokenizer().decode, upstream_ids(folder, "abc", max_new_tokens=6))
    n, stop = next((n, text) for n, text in enumerate(tokens, 1) if text.isascii())
    for mode in [], ["--stream"]:
        said = run(*arguments, *mode, "--stop-strings", json.dumps([stop])).err
        assert f"{n} tokens · stopped by {stop!r} · first after" in said


@pytest.mark.usefixtures("tiny_builtin")
def test_an_answer_by_a_schema(tmp_path: Path) -> None:
    schema = {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "type": "object"}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    arguments = ["generate", "x", "--json-schema", str(tmp_path / "schema.json")]
    assert json.loads(run(*arguments).out)["n"] in (1, 2)
    said = json.loads(run(*arguments, "--json").out)
    assert json.loads(said["text"])["n"] in (1, 2)
    assert said["options"]["grammar"]["kind"] == "json"


def test_seeded_samples_do_not_depend_on_how_many_there_are(folder: str) -> None:
    arguments = ["generate", "x", "--model", folder, "--temperature", "2", "--seed", "5", "--json"]
    alone = json.loads(run(*arguments).out)["tokens"]
    several = json.loads(run(*arguments, "--num-return-sequences", "3").out)["sequences"]
    assert several[0]["tokens"] == alone
    assert several[1]["tokens"] != alone


def test_rows_end_where_they_end() -> None:
    eos, stop = FinishReason("eos", 5), FinishReason("stop", "x")
    row = [3, 5, 0, 5, 0, 0]
    assert measure.without_padding(row, None, [5, None], 0) == [3, 5]
    assert measure.without_padding(row, eos, [7], 0) == [3, 5]
    assert measure.without_padding(row, stop, [5], 0) == [3, 5, 0, 5]
    assert measure.without_padding(row, FinishReason("length"), [5], 0) == row
    assert measure.without_padding(row, stop, [5], None) == row


def test_compare_says_what_transformers_does_not_know(folder: str) -> None:
    arguments = ["compare", "x", "--model", folder, "--repeat", "1", "--max-new-tokens", "3"]
    said = run(*arguments, "--drop-finished", "--choice", "a")
    assert said.code == 1
    assert said.err == (
        "note: transformers does not know a grammar, --drop-finished, and runs without\n"
    )


def test_json(folder: str, loaded: loading.Loaded) -> None:
    result = run(
        *("generate", "def f", "--model", folder, "--json", "--seed", "3"),
        *("--do-sample", "--max-new-tokens", "6"),
    )
    report = json.loads(result.out)
    ids = tokenizer()("def f", return_tensors="pt").input_ids
    output = loaded.model.generate(ids, do_sample=True, max_new_tokens=6, seed=3)
    assert report["tokens"] == output[0, ids.shape[1] :].tolist()
    assert report["text"] == tokenizer().decode(report["tokens"], skip_special_tokens=True)
    end = {"finish_reason": "length", "stopped_by": None}
    assert report["sequences"] == [{"text": report["text"], "tokens": report["tokens"]} | end]
    assert report["prompt_tokens"] == tokenizer()("def f").input_ids
    assert report["options"] == {"seed": 3, "do_sample": True, "max_new_tokens": 6}
    assert (report["model"], report["prompt"]) == (folder, "def f")
    times = report["timings"]
    assert 0 < times["time_to_first_token"] < times["total"]
    assert times["time_per_output_token"] > 0
    assert times["tokens_per_second"] == pytest.approx(len(report["tokens"]) / times["total"])
    assert report["peak_memory"] > 2**20


def test_several_sequences_and_beams(folder: str) -> None:
    beams = ["--num-beams", "2", "--num-return-sequences", "2", "--max-new-tokens", "3"]
    result = run("generate", "x", "--model", folder, *beams)
    assert result.out.startswith("--- 1 of 2 ---\n")
    report = json.loads(run("generate", "x", "--model", folder, *beams, "--json").out)
    assert len(report["sequences"]) == 2
    assert report["timings"]["time_to_first_token"] is None


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_prompt_from_a_pipe(folder: str, arguments: list[str]) -> None:
    result = run("generate", *arguments, "--model", folder, "--json", stdin="a\nb\n")
    assert json.loads(result.out)["prompt"] == "a\nb"


def test_stop_strings_end_the_output(folder: str) -> None:
    whole = upstream_ids(folder, "abc", max_new_tokens=6)
    texts = [tokenizer().decode([token]) for token in whole]
    stop = next(text for text in texts if text.isascii())
    arguments = ("--max-new-tokens", "6", "--stop-strings", json.dumps([stop]), "--json")
    report = json.loads(run("generate", "abc", "--model", folder, *arguments).out)
    assert report["tokens"] == whole[: texts.index(stop) + 1]
    assert len(report["tokens"]) < 6
    assert report["text"] == "".join(texts[: texts.index(stop)])
    assert (report["finish_reason"], report["stopped_by"]) == ("stop", stop)


def test_length_defaults(folder: str, loaded: loading.Loaded) -> None:
    assert field_options.generation_config({}, loaded.model, 64).max_new_tokens == 64
    assert (
        field_options.generation_config({"max_length": 9}, loaded.model, 64).max_new_tokens is None
    )
    loaded.model.generation_config.max_new_tokens = 7
    assert field_options.generation_config({}, loaded.model, 64).max_new_tokens is None


def test_options_without_effect_are_noted(folder: str) -> None:
    arguments = ["generate", "x", "--model", folder, "--max-new-tokens", "1"]
    idle = ("--temperature", "0.5", "--no-do-sample", "--seed", "3", "--length-penalty", "2")
    assert run(*arguments, *idle).err.splitlines() == [
        "note: --seed does nothing without --do-sample",
        "note: --temperature does nothing without --do-sample",
        "note: --length-penalty does nothing without --num-beams",
    ]
    assert run(*arguments, "--temperature", "0.5", "--seed", "3").err == ""


@pytest.mark.usefixtures("tiny_builtin")
def test_assistant_gives_the_same_tokens() -> None:
    arguments = ["generate", "def f", "--max-new-tokens", "8"]
    assert run(*arguments, "--assistant", "builtin-draft").out == run(*arguments).out


def test_encoder_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=258, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=1, eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    arguments = ["--max-new-tokens", "3", "--min-new-tokens", "3", "--json"]
    report = json.loads(run("generate", "a long prompt", "--model", str(tmp_path), *arguments).out)
    assert len(report["tokens"]) == 3


# --- chat ------------------------------------------------------------------------------------


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is given at each turn of a chat, as text; its answers are "yes"."""
    seen: list[str] = []

    def answer(loaded, inputs, config, show):  # type: ignore[no-untyped-def]
        seen.append(loaded.tokenizer.decode(inputs["input_ids"][0]))
        for character in "yes":
            show(StreamEvent(0, (1,), character))
            if seen[-1].endswith("interrupt[assistant]"):
                raise KeyboardInterrupt
        show(StreamEvent(0, (), "", None, "eos"))
        return measure.Generated([[1] * 3], [[1] * 3], 1.5, 0.5, None, ["eos"])

    monkeypatch.setattr(measure, "generate", answer)
    return seen


def test_chat_uses_the_template_and_remembers(chat_folder: str, prompts: list[str]) -> None:
    result = run("chat", "--model", chat_folder, "--system", "S", stdin="hi\n\nwhy\n")
    assert (result.code, result.err, result.out) == (0, "", "yes\nyes\n")
    assert prompts == [
        "[system]S[user]hi[assistant]",
        "[system]S[user]hi[assistant]yes[user]why[assistant]",
    ]


def test_chat_without_template_continues_the_text(folder: str, prompts: list[str]) -> None:
    result = run("chat", "--model", folder, stdin="hi\nwhy\n")
    assert result.err.count("no chat template") == 1
    assert prompts == ["hi\n", "hi\nyes\nwhy\n"]


def test_chat_commands(chat_folder: str, prompts: list[str]) -> None:
    result = run("chat", "--model", chat_folder, stdin="a\n/reset\nb\n/help\n/what\n/exit\nc\n")
    assert result.code == 0
    assert prompts == ["[user]a[assistant]", "[user]b[assistant]"]
    assert result.err.count("/exit or Ctrl-D leaves") == 2
    assert "no command /what; /reset forgets" in result.err


def test_ctrl_c_stops_the_answer_and_not_the_program(chat_folder: str, prompts: list[str]) -> None:
    result = run("chat", "--model", chat_folder, stdin="interrupt\ngo on\n")
    assert result.code == 0
    assert result.err == "stopped\n"
    assert prompts[1] == "[user]interrupt[assistant]y[user]go on[assistant]"


@pytest.mark.usefixtures("prompts")
def test_chat_says_how_fast_it_was_and_why_it_ended(
    chat_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.err, "_force_terminal", True)
    assert (
        "3 tokens · 2 tokens/s · ended by itself"
        in run("chat", "--model", chat_folder, stdin="a").err
    )


def test_a_turn_continues_what_is_cached_of_the_turns_before(
    chat_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, load = [], loading.load
    monkeypatch.setattr(loading, "load", lambda *given: models.append(load(*given)) or models[0])
    run("chat", "--model", chat_folder, "--max-new-tokens", "4", stdin="hi there\nwhy\n")
    stats = models[0].model.prefix_cache.stats
    assert (stats.lookups, stats.hits) == (2, 1)
    assert stats.tokens_saved >= len(tokenizer()("[user]hi there[assistant]").input_ids)


def test_ctrl_c_within_a_forward(chat_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = loading.load(chat_folder, None, "auto", "cpu")
    forwards: list[int] = []

    def interrupt(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 3:
            raise KeyboardInterrupt

    loaded.model.register_forward_pre_hook(interrupt)
    messages: list[dict[str, str]] = []
    config = hfgen.GenerationConfig(max_new_tokens=9, eos_token_id=None)
    generate.turn(loaded, messages, "hi", config)
    assert len(forwards) == 3
    assert capsys.readouterr().out.endswith("\n")
    generate.turn(loaded, messages, "hi", config)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_an_error_undoes_the_turn(chat_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CliError("too long")

    monkeypatch.setattr(measure, "generate", fail)
    messages: list[dict[str, str]] = []
    generate.turn(loading.load(chat_folder, None, "auto", "cpu"), messages, "hi", None)
    assert messages == []


def test_a_template_that_refuses_undoes_the_turn(
    chat_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, messages = loading.load(chat_folder, None, "auto", "cpu"), list[dict[str, str]]()
    template = "{{ raise_exception('no such role') }}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    lines: list[str] = []
    monkeypatch.setattr(generate, "say", lines.append)
    generate.turn(loaded, messages, "hi", None)
    assert messages == []
    assert "the chat template fails: no such role" in lines[0]


def test_chat_answers_are_real(chat_folder: str) -> None:
    result = run("chat", "--model", chat_folder, "--max-new-tokens", "4", stdin="hi\n")
    expected = upstream_ids(chat_folder, "[user]hi[assistant]", max_new_tokens=4)
    assert result.out.rstrip("\n") == tokenizer().decode(expected).rstrip("\n")


# --- compare and demo ------------------------------------------------------------------------


def test_upstream_switches_the_class_and_back(loaded: loading.Loaded) -> None:
    mixed = type(loaded.model)
    assert issubclass(mixed, hfgen.GenerationMixin)
    loaded.model.inner = hfgen.mix_into(llama())  # as RAG has its generator
    with loading.upstream(loaded):
        assert type(loaded.model) is type(loaded.model.inner) is LlamaForCausalLM
    assert type(loaded.model) is type(loaded.model.inner) is mixed


@pytest.mark.parametrize("mode", [[], ["--do-sample"], ["--num-beams", "2"], ["--batch"]])
def test_compare_says_that_tokens_are_the_same(folder: str, mode: list[str]) -> None:
    shared = ["--model", folder, "--repeat", "1", "--max-new-tokens", "4", *mode]
    result = run("compare", "one", "second", *shared)
    assert result.code == 0
    rows = result.out.splitlines()[1:]
    assert len(rows) == (1 if "--batch" in mode else 2)
    assert all(" yes " in row for row in rows)
    assert [line for line in result.out.splitlines() if len(line) > 80] == []


@contextmanager
def other_weights(loaded: loading.Loaded):  # type: ignore[no-untyped-def]
    """Other tokens than transformers': the output layer is turned round."""
    loaded.model.lm_head.weight.data.neg_()
    yield
    loaded.model.lm_head.weight.data.neg_()


def test_compare_finds_the_first_difference(
    folder: str, loaded: loading.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measure.LIBRARIES, "hfgen", other_weights)
    arguments = ("compare", "abc", "--model", folder, "--repeat", "1", "--max-new-tokens", "3")
    result = run(*arguments, "--json")
    assert result.code == 1
    (call,) = json.loads(result.out)["calls"]
    (difference,) = call["differences"]
    ids = tokenizer()("abc", return_tensors="pt").input_ids
    logits = loaded.model(ids).logits[0, -1]
    best = logits.topk(2).values
    assert not call["identical"]
    assert (difference["row"], difference["position"]) == (0, 0)
    assert difference["tokens"] == {"transformers": logits.argmax(), "hfgen": logits.argmin()}
    assert difference["logit_gap"] == pytest.approx((best[0] - best[1]).item(), rel=1e-4)
    table = run(*arguments)
    assert table.code == 1
    assert "row 0, new token 1: transformers has" in table.out


def test_a_row_that_ends_earlier_differs_where_it_ends() -> None:
    output = SimpleNamespace(logits=[torch.tensor([[0.0, 3.0, 1.0]])] * 2)
    found = compare.find_difference(0, [5, 6], [5], output)
    assert (found["position"], found["logit_gap"]) == (1, 2.0)
    assert found["tokens"] == {"transformers": 6, "hfgen": None}


def test_logit_gap_follows_the_beam() -> None:
    logits = [torch.tensor([[0.0, 1.0], [0.0, 4.0]])]
    output = SimpleNamespace(logits=logits, beam_indices=torch.tensor([[1, -1]]))
    assert compare.logit_gap(output, 0, 0) == 4.0
    assert compare.logit_gap(output, 0, 1) is None


@pytest.mark.usefixtures("tiny_builtin")
def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "REQUESTS", 3)
    monkeypatch.setattr(demo, "LONG", 40)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    result = run("demo")
    assert (result.code, result.err) == (0, ""), result.out
    for words in (
        "first token after",
        "seed=2",
        "4 beams",
        "8 samples",
        "second turn",
    ):
        assert words in result.out
    assert result.out.count(" same") == len(demo.ROWS) + 5 + 4  # 4 are in sentences
    answer = next(json.loads(line) for line in result.out.splitlines() if line.startswith("{"))
    assert list(answer) == list(demo.SCHEMA["required"])
    assert "It fits the schema." in result.out
    assert result.out.endswith("Every token is the same.\n")
    assert [line for line in result.out.splitlines() if cell_len(line) > 80] == []
    monkeypatch.setitem(measure.LIBRARIES, "transformers", other_weights)
    differing = run("demo")
    assert differing.code == 1
    assert "tokens differ" in differing.out


@pytest.mark.parametrize(
    ("arguments", "has_penalties"),
    [
        ([], True),
        (["--max-new-tokens", "4", "--stop", "x", "--logprobs", "1"], True),
        (["--num-beams", "2"], False),
        (["--do-sample", "false"], False),
        (["--repetition-penalty", "1.1"], False),
        (["--model", "builtin-draft"], False),
    ],
)
@pytest.mark.usefixtures("tiny_builtin")
def test_the_builtin_model_gets_penalties_unless_an_option_says_how_to_decode(
    arguments: list[str], has_penalties: bool
) -> None:
    options = json.loads(run("generate", "ab", "--json", *arguments).out)["options"]
    assert (options | generate.BUILTIN_FIELDS == options) == has_penalties


def test_the_demo_without_grammars(
    loaded: loading.Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    demo.show_json(loaded)
    assert "'hfgen[grammar]'" in capsys.readouterr().out


# --- the program -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in typer.main.get_command(app).commands), ("eval", "perplexity")],
)
def test_help_has_no_types_of_flags_and_no_sentence_that_is_broken(
    command: tuple[str, ...],
) -> None:
    text = run(*command, "-h").out
    assert "bool" not in text
    for line, following in pairwise(text.partition("╭")[0].splitlines()):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + len(following.split()[0]) >= 79


def test_version_and_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--version").out == f"{hfgen.__version__}\n"
    assert all(command in run().out for command in ("generate", "chat", "compare", "demo"))
    monkeypatch.setattr(sys, "argv", ["hfgen", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{hfgen.__version__}\n"


@pytest.mark.parametrize(
    ("command", "fields"), [("generate", Fields), ("chat", FieldsWithoutResults)]
)
def test_help_has_a_line_for_every_option(command: str, fields: type[Fields]) -> None:
    text = run(command, "--help").out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    for field in [*field_options.KNOWN_FIELDS, *field_options.SHORT_FORMS]:
        pattern = rf"│ {field_options.option_name(field)} .*│"
        n = 0 if field in fields.left_out else 1
        assert len([line for line in lines if re.match(pattern, line)]) == n, field
    for lines_of_topic in topics.TOPICS.values():
        assert all(
            line in text for name, line in lines_of_topic.items() if name not in fields.left_out
        )
    options = [line for line in lines if line.startswith("│ --")]
    assert options[0].startswith("│ --model ")
    assert run(command, "-h").out == text


def test_every_option_has_one_topic() -> None:
    names = [name for lines in topics.TOPICS.values() for name in lines]
    assert sorted(names) == sorted([*field_options.KNOWN_FIELDS, *field_options.SHORT_FORMS])


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['hfgen', '--help']\n"
        "import hfgen.tools.cli\n"
        "try: hfgen.tools.cli.main()\n"
        "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_an_output_that_is_not_unicode(tmp_path: Path) -> None:
    """As a console of Windows: what it cannot write is written by its code, and JSON stays JSON."""
    code = (
        "import sys, hfgen.tools.cli\n"
        "from hfgen.tools.cli import generate, report\n"
        "def show(*_, prompt, **__):\n"
        "    print(prompt)\n"
        "    report.out.print(prompt)\n"
        "    report.print_json({'text': prompt})\n"
        "hfgen.tools.cli.app = lambda **_: show(prompt='é␣')\n"
        "hfgen.tools.cli.main()\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *lines, last = done.stdout.splitlines()
    assert lines == [r"\xe9\u2423"] * 2
    assert json.loads(last) == {"text": "é␣"}


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "hfgen", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hfgen.__version__


def test_generate_optimised() -> None:
    arguments = ("generate", "import os\n\ndef ", "--json", "--max-new-tokens", "8")
    plain, optimised = (json.loads(run(*arguments, *more).out) for more in ([], ["--optimize"]))
    assert optimised["tokens"] == plain["tokens"]
    assert any(line.startswith("tokens: ") for line in optimised["optimization"])
    assert "optimization" not in plain


def test_generate_compiled(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    arguments = ("generate", "7", "--model", folder, "--json", "--max-new-tokens", "8")
    plain = json.loads(run(*arguments).out)
    compiled = json.loads(run(*arguments, "--optimize", "--compile").out)
    assert compiled["tokens"] == plain["tokens"]
    assert any("decoder layers compiled" in line for line in compiled["optimization"])
    result = run(*arguments, "--compile")
    assert result.code == 2
    assert "--compile is a part of --optimize" in result.err


def test_a_model_that_cannot_be_optimised_is_an_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: object, compile: bool) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(hfgen, "optimize", refuse)
    result = run("generate", "7", "--model", folder, "--optimize")
    assert result.code == 2
    assert "--optimize: no such model" in result.err
