"""``hfgen.trace`` and ``hfgen inspect``: what a trace says of a call, and its page as text."""

from __future__ import annotations

import gc
import json
import math
import weakref
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hfgen
from hfgen import grammar
from hfgen.tools.cli import app, loading
from hfgen.tools.inspect import Trace
from hfgen.tools.inspect.tracer import spelled
from tests import tiny
from tests.simulated_accelerator import Accelerator, on_device, to_device

LENGTH = {"max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}

#: Arguments of each mode, and whether there are two prompts.
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({}, True),
    "penalty": ({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, True),
    "sampling": (SAMPLED, True),
    "several samples": ({**SAMPLED, "num_return_sequences": 3}, True),
    "seeds": ({**SAMPLED, "seed": [3, 4]}, True),
    "parameters of each prompt": ({"do_sample": True, "top_k": [3, 50], "top_p": [1.0, 0.5]}, True),
    "processors with a state": ({**SAMPLED, "mirostat": 2, "min_p": 0.01, "seed": 3}, True),
    "guidance": ({"guidance_scale": 1.5, "frequency_penalty": 0.4}, True),
    "watermark": ({**SAMPLED, "watermarking_config": {"bias": 2.0}}, True),
    "static cache": ({"cache_implementation": "static", "disable_compile": True}, True),
    "no cache": ({"use_cache": False}, True),
    "beams": ({"num_beams": 3}, True),
    "beams, several returned": ({"num_beams": 4, "num_return_sequences": 3}, True),
    "beams, penalised": ({"num_beams": 3, "length_penalty": 0.3, "no_repeat_ngram_size": 2}, True),
    "beam sampling": ({**SAMPLED, "num_beams": 3}, True),
    "rows leave": ({"num_beams": 2, "drop_finished": True}, True),
    "constrained": ({"num_beams": 3, "force_words_ids": [[40, 41]]}, True),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, True),
    "dola": ({"dola_layers": "low"}, True),
    "lookup": ({"prompt_lookup_num_tokens": 3}, True),
    "assistant": ({"assistant_model": "assistant"}, True),
    "assistant, sampling": ({"assistant_model": "assistant", **SAMPLED}, False),
    "assistant, penalty": ({"assistant_model": "assistant", "repetition_penalty": 1.3}, True),
}


def case(name: str) -> tuple[Any, dict[str, Any]]:
    """A model, and the arguments of a mode."""
    arguments, has_two = MODES[name]
    arguments = {**LENGTH, **arguments, "eos_token_id": [2, 11, 12, 13, 14, 15]}
    if "assistant_model" in arguments:
        assistant = tiny.llama()
        with torch.no_grad():
            assistant.lm_head.weight.add_(0.05 * torch.randn_like(assistant.lm_head.weight))
        arguments["assistant_model"] = assistant
    ids = tiny.prompt(2 if has_two else 1)
    mask = torch.ones_like(ids)
    if has_two:
        mask[0, :3] = 0
    return hfgen.mix_into(tiny.llama()), {**arguments, "input_ids": ids, "attention_mask": mask}


def softmax(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).float().softmax(dim=-1)


@pytest.mark.parametrize("name", list(MODES))
def test_tokens_are_those_of_generate(name: str) -> None:
    model, arguments = case(name)
    torch.manual_seed(5)
    expected = model.generate(**arguments, return_dict_in_generate=True)
    torch.manual_seed(5)
    trace = hfgen.trace(model, **arguments)
    assert len(trace.sequences) == len(expected.sequences)
    n_prompt = arguments["input_ids"].shape[1]
    for row, sequence in enumerate(trace.sequences):
        n = len(sequence.tokens)
        ids = expected.sequences[row, n_prompt:].tolist()
        assert sequence.token_ids == ids[:n]
        assert set(ids[n:]) <= {0}  # padding
        assert sequence.finish_reason == expected.finish_reasons[row]
    assert len(trace.prompts) == len(arguments["input_ids"])
    is_token = arguments["attention_mask"][0].bool()
    assert list(trace.prompts[0].token_ids) == arguments["input_ids"][0][is_token].tolist()
    json.loads(trace.to_json())


@pytest.mark.parametrize("name", ["greedy", "penalty", "sampling", "beams", "assistant, penalty"])
def test_numbers_are_those_of_logits_and_scores(name: str) -> None:
    model, arguments = case(name)
    outputs = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    torch.manual_seed(5)
    expected = model.generate(**arguments, **outputs)
    torch.manual_seed(5)
    trace = hfgen.trace(model, **arguments)
    paths = getattr(expected, "beam_indices", None)
    for row, sequence in enumerate(trace.sequences):
        for place, token in enumerate(sequence.tokens):
            scored = row if paths is None else int(paths[row, place])
            logits, scores = expected.logits[place][scored], expected.scores[place][scored]
            at = token.token_id
            assert token.probability == pytest.approx(float(softmax(logits)[at]), rel=1e-4)
            assert token.final_probability == pytest.approx(float(softmax(scores)[at]), rel=1e-4)
            assert token.scores[0] == pytest.approx(float(logits[at]), rel=1e-4)
            assert token.scores[-1] == pytest.approx(float(scores[at]), rel=1e-4)
            assert token.rank == 1 + int((logits > logits[at]).sum())
            p = softmax(logits)
            assert token.entropy == pytest.approx(float(-(p * p.log2()).sum()), rel=1e-3)
            assert token.left[-1] == int((scores > -torch.inf).sum())
            kept = float(p[scores > -torch.inf].sum())
            assert token.mass[-1] == pytest.approx(kept, rel=1e-3)
            top = [candidate.token_id for candidate in token.candidates[:10]]
            assert top == logits.topk(10).indices.tolist()
            assert set(scores.topk(3).indices.tolist()) <= {c.token_id for c in token.candidates}


def test_samplers_of_a_large_vocabulary_draw_the_same() -> None:
    """There, generate() applies those that follow each other in one pass."""
    model, ids = hfgen.mix_into(tiny.llama(vocab_size=30_000)), tiny.prompt(2)
    torch.manual_seed(5)
    expected = model.generate(ids, **LENGTH, **SAMPLED)[:, ids.shape[1] :]
    torch.manual_seed(5)
    trace = hfgen.trace(model, ids, **LENGTH, **SAMPLED)
    assert [sequence.token_ids for sequence in trace.sequences] == expected.tolist()
    assert {token.left[2] for sequence in trace.sequences for token in sequence.tokens} == {20}


def test_a_stage_for_each_processor() -> None:
    model, arguments = case("sampling")
    trace = hfgen.trace(model, **arguments, top=5)
    assert [stage.name for stage in trace.stages] == ["logits", "temperature", "top k", "top p"]
    assert [stage.settings for stage in trace.stages[1:3]] == [{"temperature": 0.7}, {"top_k": 20}]
    for token in trace.sequences[0].tokens:
        assert token.left[:3] == (tiny.VOCAB, tiny.VOCAB, 20)
        assert token.left[3] <= 20
        assert token.mass[0] == pytest.approx(1)
        assert all(a >= b for a, b in pairwise(token.left))
        for candidate in token.candidates[:5]:
            logit, warm, *_ = candidate.scores
            assert warm == pytest.approx(logit / 0.7, rel=1e-4)
            assert (candidate.scores[-1] == -math.inf) == (candidate.final_probability == 0)


def test_stages_have_the_settings_that_were_asked_for() -> None:
    model, arguments = case("parameters of each prompt")
    arguments |= {"frequency_penalty": 0.3, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    trace = hfgen.trace(model, **arguments)
    assert [(stage.name, stage.settings) for stage in trace.stages[1:]] == [
        ("frequency penalty", {"frequency_penalty": 0.3}),
        ("top k", {"top_k": [3, 50]}),
        ("top p", {"top_p": [1.0, 0.5]}),
        ("xtc", {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
    ]


def test_stages_have_the_names_of_the_fields_that_ask_for_them() -> None:
    fields = {
        "sequence_bias": {(9,): 1.0},
        "repetition_penalty": 1.2,
        "penalty_window": 8,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": [5],
        "min_tokens": 2,
        "eos_token_id": 1,
    }
    trace = hfgen.trace(tiny.llama(), tiny.prompt(1), **LENGTH, **fields)
    dry = {name: trace.stages[3].settings[name] for name in ("dry_multiplier", "dry_base")}
    assert dry == {"dry_multiplier": 0.8, "dry_base": 1.75}
    assert [(stage.name, stage.settings) for stage in (*trace.stages[1:3], trace.stages[4])] == [
        ("sequence bias", {}),
        ("repetition penalty", {"repetition_penalty": 1.2, "penalty_window": 8}),
        ("min tokens", {"min_tokens": 2}),
    ]
    assert trace.stages[3].name == "dry multiplier"


def test_beams_are_a_tree() -> None:
    model, arguments = case("beams, several returned")
    trace = hfgen.trace(model, **arguments)
    assert len(trace.beams) == 2
    for prompt, steps in enumerate(trace.beams):
        returned = [s for s in trace.sequences if s.prompt == prompt]
        assert len(steps) >= max(len(sequence.tokens) for sequence in returned)
        for step, nodes in enumerate(steps):
            for node in nodes:
                assert (node.parent is None) == (step == 0)
                assert step == 0 or steps[step - 1][node.parent].fate in ("open", "returned")
            parents = {node.parent for node in steps[step + 1]} if step + 1 < len(steps) else None
            for number, node in enumerate(nodes):
                if node.fate == "died":
                    assert parents is not None
                    assert number not in parents
        for sequence in returned:
            # The path is found from its end by its tokens, and scores add up along it.
            n = len(sequence.tokens)
            last = [
                node
                for node in steps[n - 1]
                if node.fate == "returned" and node.score == pytest.approx(sequence.score)
            ]
            assert last
            total = sum(token.scores[-1] for token in sequence.tokens)
            assert sequence.score == pytest.approx(total / n, rel=1e-4)
            node, path = last[0], []
            for step in range(n - 1, -1, -1):
                assert node.fate == "returned"
                path.append(node.token_id)
                node = steps[step - 1][node.parent] if step else node
            assert path[::-1] == sequence.token_ids


@pytest.mark.parametrize("name", ["lookup", "assistant", "assistant, penalty"])
def test_rounds_add_up_to_what_was_drafted(name: str) -> None:
    model, arguments = case(name)
    arguments |= {"eos_token_id": None, "max_new_tokens": 20}
    counts = {"return_dict_in_generate": True, "output_speculation": True}
    expected = model.generate(**arguments, **counts).speculation
    trace = hfgen.trace(model, **arguments)
    drafts = [draft for step in trace.steps for draft in step.drafts]
    assert drafts
    assert sum(len(draft.token_ids) for draft in drafts) == expected.drafted
    accepted = sum(draft.n_accepted for draft in drafts)
    assert (
        expected.accepted <= accepted <= expected.accepted + len(trace.sequences)
    )  # the last token
    assert accepted == sum(t.is_drafted for sequence in trace.sequences for t in sequence.tokens)
    for draft in drafts:
        ids, n = trace.sequences[draft.sequence].token_ids, draft.n_accepted
        assert list(draft.token_ids[:n]) == ids[draft.position : draft.position + n]
        rejected = draft.token_ids[n : n + 1]
        assert list(rejected) != ids[draft.position + n : draft.position + n + 1] or not rejected
    assert sum(step.n_tokens for step in trace.steps) == 20


def test_a_grammar_is_a_stage_that_masks() -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    model, tokenizer = hfgen.builtin_model()
    trace = hfgen.trace(
        model, "x = ", tokenizer, grammar=grammar.choice(["True", "False"]), max_new_tokens=8
    )
    assert [stage.name for stage in trace.stages] == ["logits", "grammar"]
    (place,) = (n for n, stage in enumerate(trace.stages) if stage.is_grammar)
    assert trace.text in ("True", "False")
    assert trace.sequences[0].tokens[0].left[place] < 20
    assert trace.vocabulary_size == 2048


def test_encoder_decoders_show_what_the_encoder_reads() -> None:
    model, ids = hfgen.mix_into(tiny.t5()), tiny.prompt(2)
    for arguments in ({}, {"num_beams": 3}):
        expected = model.generate(ids, **LENGTH, **arguments)
        trace = hfgen.trace(model, ids, **LENGTH, **arguments)
        assert [prompt.token_ids for prompt in trace.prompts] == [
            tuple(row) for row in ids.tolist()
        ]
        for sequence, row in zip(trace.sequences, expected.tolist(), strict=True):
            assert sequence.token_ids == row[1 : 1 + len(sequence.tokens)]


def test_settings_are_those_that_were_asked_for() -> None:
    config = hfgen.GenerationConfig(max_new_tokens=3, do_sample=True, top_k=7)
    trace = hfgen.trace(tiny.llama(), tiny.prompt(1), generation_config=config)
    own = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    asked = {"max_new_tokens": 3, "do_sample": True, "top_k": 7}
    assert {name: trace.settings[name] for name in (own | asked)} == own | asked
    assert len(trace.settings) < 12


def test_dola_and_beams_show_what_comes_before_processors() -> None:
    for name, stage in ("dola", "contrast of layers"), ("beams", "log-probability"):
        model, arguments = case(name)
        trace = hfgen.trace(model, **arguments)
        assert [each.name for each in trace.stages[:2]] == ["logits", stage]


@pytest.mark.parametrize("name", ["greedy", "several samples", "beams", "lookup"])
def test_interventions_are_shown_by_what_the_model_would_do_without(name: str) -> None:
    model, arguments = case(name)
    steer = hfgen.Steer("model.layers.0", torch.linspace(-9, 9, 32), rows=[0], tokens="generated")
    trace = hfgen.trace(model, **arguments, interventions=[steer])
    for sequence in trace.sequences:
        prompt = torch.tensor(trace.prompts[sequence.prompt].token_ids)
        ids = torch.cat([prompt, torch.tensor(sequence.token_ids)])[None]
        plain = hfgen.token_logprobs(model, ids)[0, len(prompt) - 1 :].exp().tolist()
        assert [t.unedited_probability for t in sequence.tokens] == pytest.approx(plain, rel=1e-4)
        edited = [token.probability for token in sequence.tokens]
        assert (edited == pytest.approx(plain, rel=1e-3)) is (sequence.prompt == 1)
    without = hfgen.trace(model, **arguments)
    assert without.sequences[0].tokens[0].unedited_probability is None


def test_texts_and_ids() -> None:
    model, tokenizer = hfgen.mix_into(tiny.llama()), tiny.ascii_tokenizer()
    texts = ["ab <b>", "c"]
    trace = hfgen.trace(model, texts, tokenizer, **LENGTH)
    assert [prompt.text for prompt in trace.prompts] == texts
    ids = tokenizer("c", return_tensors="pt").input_ids
    alone = hfgen.trace(model, ids, **LENGTH)  # no tokenizer: ids
    assert alone.sequences[0].token_ids == trace.sequences[1].token_ids
    assert (alone.text, alone.spelling, alone.prompts[0].text) == (None, {}, None)
    assert hfgen.trace(model, ids[0].tolist(), **LENGTH).sequences == alone.sequences
    assert hfgen.trace(model, {"input_ids": ids}, **LENGTH).sequences == alone.sequences


def test_a_model_that_is_not_mixed_stays_as_it_is() -> None:
    model = tiny.llama()
    trace = hfgen.trace(model, tiny.prompt(1), **LENGTH)
    assert type(model) is transformers.LlamaForCausalLM
    assert len(trace.sequences[0].tokens) == 6  # it ends by itself


def test_processors_of_the_callers_may_write_to_what_they_get() -> None:
    class Writes(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, 5:90] = -torch.inf
            return scores

    processors = transformers.LogitsProcessorList([Writes()])
    trace = hfgen.trace(tiny.llama(), tiny.prompt(1), logits_processor=processors, **LENGTH)
    token = trace.sequences[0].tokens[0]
    assert (token.left, trace.stages[1].name) == ((tiny.VOCAB, tiny.VOCAB - 85), "writes")
    assert token.candidates[0].scores[0] > -math.inf


def test_nothing_to_generate() -> None:
    for arguments in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        trace = hfgen.trace(tiny.llama(), tiny.prompt(1), max_new_tokens=0, **arguments)
        assert (trace.sequences[0].tokens, trace.steps) == ((), ())
        assert "</html>" in trace.to_html()


def test_what_cannot_be_shown_is_named() -> None:
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(1)
    groups = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
    with pytest.raises(ValueError, match="ask for group beam search"):
        hfgen.trace(model, ids, **groups, **LENGTH)
    sampled = {"do_sample": True, "num_return_sequences": 2}
    best = hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True)
    with pytest.raises(ValueError, match="MinimumBayesRisk"):
        hfgen.trace(model, ids, custom_generate=best, **sampled, **LENGTH)
    with pytest.raises(ValueError, match="needs a `tokenizer`"):
        hfgen.trace(model, "text")
    with pytest.raises(TypeError, match="`prompt` has to be text"):
        hfgen.trace(model, 7)
    with pytest.raises(TypeError, match=r"`\(batch, length\)`, or .* but is \[\[1, 2\], \[3\]\]"):
        hfgen.trace(model, [[1, 2], [3]])
    with pytest.raises(ValueError, match="`top` has to be at least 1, but is 0"):
        hfgen.trace(model, ids, top=0)
    with pytest.raises(TypeError, match="`top` has to be an integer"):
        hfgen.trace(model, ids, top="3")
    with pytest.raises(TypeError, match="`model` has to be a model that generates, but is str"):
        hfgen.trace("model", ids)
    with pytest.raises(ValueError, match="`streamer`"):
        hfgen.trace(model, ids, streamer=transformers.TextStreamer(tiny.ascii_tokenizer()))


@pytest.mark.parametrize("name", ["greedy", "beams", "lookup"])
def test_nothing_of_the_call_stays_in_memory(name: str) -> None:
    model, arguments = case(name)
    caches = []

    class Cache(transformers.DynamicCache):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            caches.append(weakref.ref(self))

    gc.disable()
    try:
        trace = hfgen.trace(model, **arguments, past_key_values=Cache(config=model.config))
        assert trace.steps
        assert [cache() for cache in caches] == [None]
    finally:
        gc.enable()


# --- the page --------------------------------------------------------------------------------


class Page(HTMLParser):
    """Scripts by their id, the tags, and all attributes that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[list[str]] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.is_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]
        self.is_script = tag == "script"
        if self.is_script:
            self.scripts.append([])

    def handle_endtag(self, tag: str) -> None:
        self.is_script = False

    def handle_data(self, data: str) -> None:
        if self.is_script:
            self.scripts[-1].append(data)


NASTY = "</script><script>alert(1)</script><!-- <u>&amp; \u2028 \\u003c {{script}} {{data}} 'é\""


def nasty_trace() -> Trace:
    model, tokenizer = hfgen.mix_into(tiny.llama(vocab_size=300)), tiny.byte_tokenizer()
    return hfgen.trace(model, NASTY, tokenizer, top=25, **LENGTH, **SAMPLED)


def test_text_does_not_break_the_page() -> None:
    trace = nasty_trace()
    page = Page(trace.to_html())
    data, code = ("".join(script) for script in page.scripts)
    assert json.loads(data) == trace.to_dict()
    assert json.loads(data)["prompts"][0]["text"] == NASTY
    assert "alert(1)" not in code
    assert page.tags.count("script") == 2
    assert "u" not in page.tags


def test_the_page_loads_nothing() -> None:
    text = nasty_trace().to_html()
    assert Page(text).loads == []
    assert "default-src 'none'" in text
    assert text.count("http") == 2  # the namespace of SVG, and "http-equiv"
    assert "@import" not in text
    assert "url(" not in text
    assert len(text) < 150_000


def test_notebooks_show_the_page_in_a_frame() -> None:
    trace = nasty_trace()
    assert Page(trace._repr_html_()).tags == ["iframe"]
    assert repr(trace) == (
        "<Trace of sample: 1 sequences, 8 tokens, 8 steps; .save('page.html') writes a page>"
    )


def test_json_has_no_infinities(tmp_path: Path) -> None:
    trace = nasty_trace()
    trace.save(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    assert found == trace.to_dict()
    scores = [c["scores"][-1] for c in found["sequences"][0]["tokens"][0]["candidates"]]
    assert None in scores


@pytest.mark.parametrize(
    ("name", "expected"),
    [("TopK", "top k"), ("NoRepeatNGram", "no repeat n gram"), ("DRY", "dry"), ("Own2", "own 2")],
)
def test_names_of_processors(name: str, expected: str) -> None:
    assert spelled(name) == expected


# --- the command -----------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.stderr


def test_the_command_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def builtin(draft: bool = False) -> Any:
        return hfgen.mix_into(tiny.llama()), tiny.ascii_tokenizer()

    monkeypatch.setattr(hfgen, "builtin_model", builtin)
    page = tmp_path / "page.html"
    code, said = run("def", "class", "-o", str(page), "--top-k", "5", "--max-new-tokens", "4")
    assert (code, "2 answers" in said) == (0, True)
    found = json.loads("".join(Page(page.read_text()).scripts[0]))
    assert [prompt["text"] for prompt in found["prompts"]] == ["def", "class"]
    assert found["settings"]["top_k"] == 5
    code, _ = run("def", "-o", str(tmp_path / "t.json"), "--assistant", "builtin", "--top", "2")
    found = json.loads((tmp_path / "t.json").read_text())
    assert (code, found["mode"]) == (0, "assisted generation")
    groups = "--num-beams 4 --num-beam-groups 2 --diversity-penalty 1".split()
    code, said = run("a", "-o", str(page), *groups)
    assert (code, "ask for group beam search" in said) == (2, True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none/page.html", "no such folder"),
        ("folder.html", "is a folder"),
        ("page.txt", "takes a file that ends in"),
    ],
)
def test_a_page_that_cannot_be_written_is_said_first(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded"))
    (tmp_path / "folder.html").mkdir()
    code, said = run("a", "-o", str(tmp_path / path))
    assert (code, message in " ".join(said.split())) == (2, True)


@pytest.mark.parametrize("name", ["penalty", "sampling", "beams", "assistant, penalty"])
def test_on_an_accelerator(name: str) -> None:
    model, arguments = case(name)
    torch.manual_seed(5)
    expected = hfgen.trace(model, **arguments)
    arguments = {n: on_device(v) if n == "assistant_model" else v for n, v in arguments.items()}
    torch.manual_seed(5)
    with Accelerator():
        found = hfgen.trace(on_device(model), **to_device(arguments))
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in expected.sequences]
    pairs = zip(found.sequences, expected.sequences, strict=True)
    for here, there in (pair for s, t in pairs for pair in zip(s.tokens, t.tokens, strict=True)):
        assert here.probability == pytest.approx(there.probability, rel=1e-4)
        assert (here.rank, here.left, here.is_drafted) == (there.rank, there.left, there.is_drafted)
    fates = [[[[b.fate for b in n] for n in p] for p in t.beams] for t in (found, expected)]
    assert fates[0] == fates[1]
