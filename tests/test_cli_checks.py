"""Wrong options of every command: one line that says what was given, and exit code 2."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from typer.testing import CliRunner

import hfgen
from hfgen.settings.fields import FIELDS
from hfgen.tools.cli import app, field_options
from hfgen.tools.cli.field_options import Fields
from hfgen.tools.cli.report import CliError
from tests.tiny import byte_tokenizer, llama

#: A command line, and words of its error. FILE is one that can be read.
WRONG = """
foo                                                       | foo
generate x --tempratur 1                                  | --tempratur --temperature
generate x --modle a                                      | --modle --model
generate x --temp 1                                       | --temp --temperature
generate x --stpo y                                       | --stpo --stop
generate x --temperature hot                              | --temperature number 'hot'
generate x --max-new-tokens 1.5                           | --max-new-tokens integer '1.5'
generate x --max-new-tokens                               | --max-new-tokens requires argument
generate x --do-sample=maybe                              | --do-sample true false 'maybe'
generate x --no-do-sample=1                               | --no-do-sample
generate x --seed y                                       | --seed integer 'y'
generate x --do-sample --seed -1                          | --seed from 0 to 2**63 -1
generate x --stop                                         | --stop requires argument
generate x --stop a --stop-strings b                      | --stop --stop-strings
generate x --regex a --json-object                        | --regex --json-object
generate x --json-object=1                                | --json-object does not take a value
generate x --json-schema /no/such                         | --json-schema /no/such No such file
generate x --regex (                                      | --regex unclosed group
generate x --lark FILE                                    | --lark lexer error
generate x --device cuda:99                               | --device cuda:99 cannot be used here
generate x --device meta                                  | --device meta cannot be used
generate x --device tpu9                                  | tpu9 cannot be used here
generate ''                                               | prompt is empty
generate                                                  | prompt is empty
generate x --stream --json                                | --stream --json
generate x --logprobs -2                                  | --logprobs -2
generate x --dtype int3                                   | int3 bfloat16
generate x --model /no/such                               | /no/such save_pretrained
generate x --model FILE                                   | it is a file
generate x --compile-config '{"foo": 1}'                  | --compile-config fullgraph 'foo'
compare x --seed y                                        | --seed
compare x --repetition-penalty -1                         | --repetition-penalty above 0 -1
chat --num-return-sequences 2                             | --num-return-sequences one answer
chat --foo                                                | --foo
generate x --bogus                                        | --bogus hfgen generate --help
generate x y                                              | quotes
generate x --assistant ''                                 | the model is empty
generate x --model ''                                     | the model is empty
generate x --num-beams 0                                  | --num-beams at least 1 0
generate x --logprobs-mode raw                            | --logprobs-mode raw_logprobs
generate x --max-length 0                                 | --max-length 0 room
generate x --bad-words-ids abc                            | --bad-words-ids list of lists of token ids abc
generate x --bad-words-ids [[-1]]                         | --bad-words-ids [[-1]]
generate x --sequence-bias [[5,1]]                        | --sequence-bias [[5, 1]]
generate x --watermarking-config '{"bais": 2}'            | --watermarking-config fields bais
generate x --repetition-detection {}                      | --repetition-detection max_pattern_size
generate x --sampler-order topk                           | --sampler-order llama.cpp topk
generate x --stop-regex (                                 | --stop-regex compile
generate x --stop-regex a*                                | --stop-regex empty text
generate x --stop ''                                      | --stop value
generate x --choice ''                                    | --choice value
generate x --json-schema FILE                             | --json-schema not JSON
generate x --cache-implementation statc                   | --cache-implementation static statc
generate x --cache-config '{"bits": 5}' --cache-implementation quantized  | bits 8 5
generate x --cache-config '{"bit": 4}' --cache-implementation quantized   | --cache-config bits bit
generate x --cache-config '{"path": 5}' --cache-implementation offloaded  | --cache-config path 5
generate x --compile-config fast                          | --compile-config fullgraph fast
generate x --dola-layers lo                               | --dola-layers low high lo
generate x --dola-layers [-1]                             | --dola-layers low [-1]
generate x --dola-layers true                             | --dola-layers low True
generate x --assistant-early-exit 0                       | --assistant-early-exit layer
generate x --num-beams 4 --assistant builtin-draft        | --num-beams 4 --assistant builtin-draft
generate x --num-beams 4 --dola-layers low                | --num-beams 4 --dola-layers low
generate x --penalty-alpha 0.6 --do-sample                | --penalty-alpha --do-sample
generate x --penalty-alpha 2                              | --penalty-alpha 0 and 1
generate x --dola-layers low --json-object                | --dola-layers grammar
generate x --prompt-lookup-num-tokens 3 --assistant-early-exit 1 | lookup exit
generate x --num-beams 4 --num-beam-groups 3              | --num-beams --num-beam-groups 3 4
generate x --num-beams 4 --num-beam-groups 2              | --diversity-penalty
generate x --num-beams 4 --num-beam-groups 2 --diversity-penalty 1 --top-k 4 | not sample
generate x --max-new-tokens 3 --min-new-tokens 9          | 3 --min-new-tokens 9
generate x --max-new-tokens 3 --max-length 9              | 3 --max-length 9
generate x --no-use-cache --assistant builtin-draft       | --no-use-cache
generate x --drop-finished --cache-implementation static  | --drop-finished static
generate x --drop-finished --prompt-lookup-num-tokens 3    | --drop-finished assisted
generate x --stream --num-return-sequences 3 --num-beams 2 | --num-return-sequences 3 --num-beams 2
chat                                                      | needs a model --model hfgen generate
chat --system                                             | --system hfgen chat --help
chat --dtype int3                                         | --dtype bfloat16 int3
compare x --device 9                                      | --device 9
chat --model builtin --logprobs 2                         | hfgen chat --logprobs
compare x --output-metrics true                           | hfgen compare --output-metrics
compare x --seed -1                                       | --seed -1
compare x --repeat 0                                      | --repeat 0
inspect x -o no-such-folder/page.html                     | no-such-folder
inspect x -o page.html --logprobs 2                       | hfgen inspect --logprobs
inspect x -o page.pdf                                     | .html page.pdf
inspect x -o page.html --top=abc                          | --top abc
batch FILE -o b --model /no/such                          | /no/such
batch FILE -o b --memory -1                               | --memory -1
batch FILE -o b --shard ''                                | --shard 1/4
batch FILE -o b --chat-template no-such-file              | --chat-template no-such-file
batch FILE -o b --chat-template BROKEN                    | --chat-template line 1
bench --new-tokens 0                                      | --new-tokens 0
eval perplexity FILE --window 1                           | --window 2 1
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


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hfgen, "builtin_model", lambda draft=False: (llama(), byte_tokenizer()))
    (tmp_path / "broken.jinja").write_text("{{ messages }")
    paths = {"FILE": __file__, "BROKEN": "broken.jinja"}
    line, words = case.rsplit("|", 1)
    result = CliRunner().invoke(app, [paths.get(part, part) for part in shlex.split(line)])
    assert (result.exit_code, result.stdout) == (2, "")
    *_, error = result.stderr.splitlines()
    assert error.startswith("hfgen: ")
    assert [word for word in words.split() if word not in error] == [], error


@pytest.mark.parametrize("name", field_options.KNOWN_FIELDS)
def test_an_empty_value_is_refused(name: str) -> None:
    with pytest.raises(CliError, match=field_options.option_name(name)):
        Fields(**{name: ""})


@pytest.mark.parametrize(
    ("texts", "notes"),
    [
        ({"num_assistant_tokens": "3"}, ["--assistant or --prompt-lookup-num-tokens"]),
        ({"num_assistant_tokens": "3", "prompt_lookup_num_tokens": "2"}, []),
        ({"dry_base": "2"}, ["--dry-multiplier"]),
        ({"dry_base": "2", "dry_multiplier": "1"}, []),
        ({"mirostat_tau": "3", "xtc_threshold": "0.2"}, ["--mirostat", "--xtc-probability"]),
        ({"cache_config": "{}"}, ["--cache-implementation"]),
        ({"top_k": "4", "penalty_alpha": "0.5"}, []),
    ],
)
def test_an_option_that_does_nothing_alone_is_noted(
    texts: dict[str, str], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fields = Fields(**texts)
    model = SimpleNamespace(generation_config=transformers.GenerationConfig())
    loaded = SimpleNamespace(model=model, assistant=None)
    field_options.note_idle(fields, field_options.generation_config(fields, model, 8), loaded)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(notes)
    for line, note in zip(lines, notes, strict=True):
        assert f"does nothing without {note}" in line


def test_the_table_of_idle_options_names_fields() -> None:
    names = {
        *field_options.NEEDS,
        *(name for needs in field_options.NEEDS.values() for name in needs),
    }
    assert names - {*FIELDS} == {"--assistant"}
