"""Wrong options of every command: one line that says what was given, before torch is imported."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import transformers

from hfgen.decoding.drafters.schedule import SCHEDULES
from hfgen.memory import caches
from hfgen.settings.fields import FIELDS
from hfgen.tools.cli import checks, companions, options
from hfgen.tools.cli.report import CliError

#: A command line, and words of its error. FILE is one that can be read.
WRONG = """
generate x --bogus                                        | --bogus
generate x y                                              | quotes
generate x --assistant ''                                 | the model is empty
generate x --num-beams 0                                  | --num-beams at least 1 0
generate x --logprobs-mode raw                            | --logprobs-mode raw_logprobs
generate x --max-time -1                                  | --max-time above 0 -1
generate x --max-length 0                                 | --max-length at least 1
generate x --min-length -3                                | --min-length at least 0 -3
generate x --max-new-tokens 99999999999999999999          | --max-new-tokens 64 bits
generate x --no-repeat-ngram-size -1                      | --no-repeat-ngram-size at least 0
generate x --suppress-tokens [-1]                         | --suppress-tokens from 0
generate x --bad-words-ids abc                            | --bad-words-ids [[5], [6, 7]] abc
generate x --bad-words-ids [[-1]]                         | --bad-words-ids [[-1]]
generate x --sequence-bias [[5,1]]                        | --sequence-bias [[5, 1]]
generate x --force-words-ids [[[5],6]]                    | --force-words-ids [[[5], 6]]
generate x --watermarking-config '{"bais": 2}'            | --watermarking-config bais bias
generate x --repetition-detection {}                      | --repetition-detection max_pattern_size
generate x --sampler-order topk                           | --sampler-order llama.cpp topk
generate x --stop-regex (                                 | --stop-regex compile
generate x --stop-regex a*                                | --stop-regex empty text
generate x --stop ''                                      | --stop TEXT
generate x --choice ''                                    | --choice TEXT
generate x --json-schema no-such-file                     | --json-schema no-such-file
generate x --json-schema FILE                             | --json-schema not JSON
generate x --regex (                                      | --regex
generate x --cache-implementation statc                   | --cache-implementation static statc
generate x --cache-config abc                             | --cache-config object abc
generate x --cache-config '{"bits": 4}' --cache-implementation static     | quantized static
generate x --cache-config '{"bits": 5}' --cache-implementation quantized  | --cache-config bits 8 5
generate x --cache-config '{"bit": 4}' --cache-implementation quantized   | --cache-config bits bit
generate x --cache-config '{"path": 5}' --cache-implementation offloaded  | --cache-config path 5
generate x --max-cache-len 9 --cache-implementation dynamic | --max-cache-len static dynamic
generate x --compile-config fast                          | --compile-config fullgraph fast
generate x --compile-config '{"mode": "fast"}'            | --compile-config mode default fast
generate x --compile-config '{"fullgraph": 1}'            | --compile-config fullgraph true 1
generate x --compile-config {} --disable-compile          | --compile-config --disable-compile
generate x --dola-layers lo                               | --dola-layers low high lo
generate x --dola-layers [-1]                             | --dola-layers low [-1]
generate x --dola-layers true                             | --dola-layers low True
generate x --num-assistant-tokens-schedule fast           | constant fast
generate x --assistant-early-exit 0                       | --assistant-early-exit at least 1
generate x --num-beams 4 --assistant builtin-draft        | --num-beams 4 --assistant builtin-draft
generate x --num-beams 4 --dola-layers low                | --num-beams 4 --dola-layers low
generate x --penalty-alpha 0.6 --do-sample                | --penalty-alpha --do-sample
generate x --penalty-alpha 2                              | --penalty-alpha 0 and 1
generate x --dola-layers low --json-object                | --dola-layers grammar
generate x --prompt-lookup-num-tokens 3 --assistant-early-exit 1 | lookup exit
generate x --num-beams 4 --num-beam-groups 3              | --num-beams 4 --num-beam-groups 3
generate x --num-beams 4 --num-beam-groups 2              | --diversity-penalty
generate x --num-beams 4 --num-beam-groups 2 --diversity-penalty 1 --top-k 4 | not sample
generate x --max-new-tokens 3 --min-new-tokens 9          | 3 --min-new-tokens 9
generate x --max-new-tokens 3 --max-length 9              | 3 --max-length 9
generate x --no-use-cache --assistant builtin-draft       | --no-use-cache
generate x --drop-finished --cache-implementation static  | --drop-finished static
generate x --drop-finished --prompt-lookup-num-tokens 3    | --drop-finished --assistant
generate x --stream --num-return-sequences 3 --num-beams 2 | --num-return-sequences 3 --num-beams 2
chat                                                      | --model
chat --system                                             | --system hfgen chat --help
chat --dtype int3                                         | --dtype bfloat16 int3
compare x --device 9                                      | --device cuda 9
chat --model builtin --logprobs 2                         | hfgen chat --logprobs 2
compare x --output-metrics                                | hfgen compare --output-metrics
compare x --seed -1                                       | seed 2**63 -1
compare x --repeat 0                                      | --repeat 0
inspect x -o no-such-folder/page.html                     | no-such-folder
inspect x -o page.html --logprobs 2                       | hfgen inspect --logprobs 2
inspect x -o page.pdf                                     | .html page.pdf
inspect x -o page.html --top=abc                          | --top abc
batch FILE -o b --model /no/such                          | /no/such
batch FILE -o b --memory -1                               | --memory bytes -1
batch FILE -o b --memory inf                              | --memory bytes inf
batch FILE -o b --shard ''                                | --shard 1/4
batch FILE -o b --chat-template no-such-file              | --chat-template no-such-file
batch FILE -o b --chat-template BROKEN                    | --chat-template line 1
bench --plot a.bmp                                        | --plot .png a.bmp
bench --plot no-such-folder/a.png                         | --plot no-such-folder
bench --new-tokens 0                                      | --new-tokens 0
eval perplexity FILE --window 1                           | --window at least 2 1
eval perplexity FILE --bootstrap-seed -1                  | seed -1
eval perplexity FILE --batch-size 0                       | --batch-size 0 eval perplexity --help
eval generate FILE --metric blue                          | --metric bleu blue
eval generate FILE --num-return-sequences 2               | --num-return-sequences
eval generate FILE -o no-such-folder/out.jsonl            | no-such-folder
serve --policy last                                       | --policy fcfs last
serve --host ''                                           | --host 127.0.0.1
serve --api-key ''                                        | --api-key
serve --max-request-mb 0                                  | --max-request-mb above 0
serve --chat-template no-such-file                        | --chat-template no-such-file
""".strip().splitlines()


def test_options_are_checked_before_torch_is_imported(tmp_path) -> None:
    (tmp_path / "broken.jinja").write_text("{{ messages }")
    paths = {"FILE": __file__, "BROKEN": str(tmp_path / "broken.jinja")}
    cases = [line.rsplit("|", 1) for line in WRONG]
    commands = [[paths.get(part, part) for part in shlex.split(line)] for line, _ in cases]
    code = (
        "import sys, hfgen.tools.cli\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = ['hfgen', *command]\n"
        "    try: hfgen.tools.cli.main()\n"
        "    except SystemExit as end:\n"
        "        print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    folder = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", code], **folder)
    statuses, errors = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(statuses) == len(errors) == len(cases)
    for (line, words), status, error in zip(cases, statuses, errors, strict=True):
        assert status == "2 False False", line
        assert error.startswith("hfgen: "), line
        assert [word for word in words.split() if word not in error] == [], (line, error)


@pytest.mark.parametrize("name", options.KNOWN_FIELDS)
def test_an_empty_value_is_refused(name: str) -> None:
    option = options.option_name(name)
    with pytest.raises(CliError, match=option):
        checks.check_fields(options.split_fields([f"{option}="], [])[1])


def test_names_of_other_modules_are_known_without_torch() -> None:
    upstream = transformers.generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert list(checks.CACHES) == caches.names()
    assert {*checks.CACHES, *checks.OLD_CACHES} == {*upstream, "paged"}
    with_settings = [n for n in caches.names() if caches.cache_kind(n).settings is not None]
    assert sorted(companions.CACHE_SETTINGS) == with_settings
    assert list(checks.SCHEDULES) == sorted(SCHEDULES)
    keys = [field.name for field in dataclasses.fields(transformers.CompileConfig)]
    assert list(checks.COMPILE) == keys
    watermark = inspect.signature(transformers.WatermarkingConfig.__init__).parameters
    assert ["self", *checks.WATERMARK_KEYS] == list(watermark)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        (["--num-assistant-tokens", "3"], ["--assistant or --prompt-lookup-num-tokens"]),
        (["--num-assistant-tokens", "3", "--prompt-lookup-num-tokens", "2"], []),
        (["--dry-base", "2"], ["--dry-multiplier"]),
        (["--dry-base", "2", "--dry-multiplier", "1"], []),
        (["--mirostat-tau", "3", "--xtc-threshold", "0.2"], ["--mirostat", "--xtc-probability"]),
        (["--cache-config", "{}"], ["--cache-implementation"]),
        (["--top-k", "4", "--penalty-alpha", "0.5"], []),
    ],
)
def test_an_option_that_does_nothing_alone_is_noted(
    arguments: list[str], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fields = options.with_sampling(options.split_fields(arguments, [])[1])
    model = SimpleNamespace(generation_config=transformers.GenerationConfig())
    loaded = SimpleNamespace(model=model, assistant=None)
    companions.note_idle(fields, options.generation_config(fields, model, 8), loaded)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(notes)
    for line, note in zip(lines, notes, strict=True):
        assert f"does nothing without {note}" in line


def test_the_table_of_companions_names_fields() -> None:
    names = {*companions.NEEDS, *(name for needs in companions.NEEDS.values() for name in needs)}
    assert names - {*FIELDS} == {"--assistant"}
    assert {*checks.CHECKS, *checks.LIMITS} <= {*FIELDS}
