"""The commands that README and docs/ show run, as they are written, on the built-in model."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hfgen
from hfgen.tools.cli import app

ROOT = Path(__file__).parent.parent

#: Commands that are tested elsewhere: by `tests/test_doctor.py`, and by `tests/clients`.
ELSEWHERE = {"doctor", "serve"}

#: What stands for something of the reader's, and what is put in its place.
PLACEHOLDERS = {
    r"(\./my-(chat-)?model|\bMODEL)\b": "builtin",
    r"\bFILE…": "prompt.txt",
    r"\bFILE\.jsonl\b": "lines.jsonl",
    r"\$i\b": "1",
}

#: Added to commands that measure: what is tested is that they run.
FEWER = {
    "bench": ["--repeat", "1", "--prompt-tokens", "16", "--new-tokens", "4"],
    "compare": ["--repeat", "1", "--max-new-tokens", "8"],
}

FILES = {
    "prompt.txt": "import os\n",
    "schema.json": json.dumps({"type": "array", "items": {"enum": ["int", "str"]}, "maxItems": 2}),
    "lines.jsonl": json.dumps({"prompt": "def add(a, b):", "reference": "return a + b"}),
    "requests.jsonl": json.dumps(
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}
    ),
}


def commands() -> dict[str, str]:
    """``page: command`` → the command, of each line of a code block that runs hfgen."""
    found: dict[str, str] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for block in (block for language, block in blocks if language in ("", "bash")):
            for line in re.findall(r"^(?:[^\n#]*[|)] )?(hfgen \w.*)$", block, re.MULTILINE):
                command = re.sub(r"( +# .*| &)$", "", line)
                if command.split()[1] not in ELSEWHERE:
                    found[f"{page.name}: {command}"] = command
    return found


def written_card() -> hfgen.Card:
    """The card of a call of the built-in model."""
    model, tokenizer = hfgen.builtin_model()
    inputs = tokenizer("def add(a, b):", return_tensors="pt")
    options = {"output_card": "prompt", "return_dict_in_generate": True, "max_new_tokens": 4}
    card: hfgen.Card = model.generate(**inputs, **options).card
    return card


def test_commands_are_found() -> None:
    names = {command.split()[1] for command in commands().values()}
    assert {"batch", "bench", "chat", "compare", "eval", "generate", "inspect", "replay"} <= names


@pytest.mark.parametrize("command", commands().values(), ids=commands())
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    if "card.json" in command:
        (tmp_path / "card.json").write_text(str(written_card()), encoding="utf-8")
    for pattern, mine in PLACEHOLDERS.items():
        command = re.sub(pattern, mine, command)
    arguments = shlex.split(command)[1:]
    arguments += FEWER.get(arguments[0], [])
    result = CliRunner().invoke(app, arguments, input=FILES["prompt.txt"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr or result.exception
    assert result.stdout.strip() or result.stderr.strip()
    for option, path in itertools.pairwise(arguments):
        if option == "-o":
            assert (tmp_path / path).stat().st_size > 0
