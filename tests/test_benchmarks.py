"""The benchmarks, on a tiny model: what they measure, what they write, and when they refuse."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import typer

import hfgen
from benchmarks import (
    cache_cases,
    cache_report,
    caches,
    controls,
    execution,
    first_call,
    gpu,
    grammar,
    lm_eval_tails,
    logprobs,
    output,
    overhead,
    peers,
    sampling,
    side_by_side,
    speculation,
    stopping,
)
from benchmarks.cost import (
    Costs,
    best_gain,
    expected_tokens,
    first_layers,
    needed_ratio,
    predicted_gain,
)
from benchmarks.edits import EDITS, Edit, Reference
from benchmarks.models import Subject
from benchmarks.plots import apart
from benchmarks.race import Forwards, Result, Variant, race
from benchmarks.side_by_side import (
    LIBRARIES,
    Spread,
    UnequalTokensError,
    call,
    frozen_garbage,
    unmixed,
)
from hfgen.decoding.strategies.sample import Sample
from tests import tiny


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests have frozen stays so when a benchmark ends."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(overhead, "NEW_TOKENS", 8)
    model = hfgen.mix_into(tiny.llama(tie_word_embeddings=True))
    return Subject("tiny", "Tiny Llama", model, tiny.prompt(rows=1, length=16))


def test_all_modes_are_measured(subject: Subject) -> None:
    done: list[str] = []
    result = overhead.measure(subject, list(overhead.MODES), 1, 1e9, done.append)

    assert done == [*overhead.MODES] * 2  # the warm-up and one pair
    rows = overhead.table(result).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(overhead.MODES)
    for comparison in result.comparisons:
        assert comparison.n_pairs == 1
        assert all(seconds[0] > 0 for seconds in comparison.wall.values())
        assert comparison.ratio.low == comparison.ratio.median == comparison.ratio.high
    assert result.per_token("hfgen") == pytest.approx(
        result.comparisons[1].milliseconds("hfgen") / 8
    )


def test_what_is_written(subject: Subject, tmp_path: Path) -> None:
    result = overhead.measure(subject, [overhead.FLOOR_MODE], 1, 1e9)
    overhead.write([result], overhead.machine(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "overhead.md",
        "overhead.json",
        "overhead.png",
    }
    raw = json.loads((tmp_path / "overhead.json").read_text())
    assert list(raw["models"]["tiny"]["modes"]) == [overhead.FLOOR_MODE]
    assert "times the floor" in (tmp_path / "overhead.md").read_text()


def test_sections_of_earlier_runs_stay(tmp_path: Path) -> None:
    for key in ("second", "first", "second"):
        output.write_section(
            tmp_path, "page", "Title", key, {"text": f"{key}\n"}, ["first", "second"]
        )
    assert (tmp_path / "page.md").read_text() == "# Title\n\nfirst\n\nsecond\n"
    assert list(json.loads((tmp_path / "page.json").read_text())) == ["second", "first"]


def test_lm_eval_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lm_eval_tails, "find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        lm_eval_tails.main()
    assert ended.value.exit_code == 2
    assert "pip install 'hfgen[clients]'" in capsys.readouterr().err


def test_other_tokens_are_an_error(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample, "choose", lambda self, run, scores: scores.argmin(dim=-1))
    with pytest.raises(UnequalTokensError, match="'greedy'"):
        overhead.measure(subject, ["greedy"], 1, 1e9)


def test_each_library_runs_its_own_code(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    original = Sample.step
    monkeypatch.setattr(
        Sample, "step", lambda *arguments: used.append("hfgen") or original(*arguments)
    )
    for library in LIBRARIES:
        used.clear()
        call(library, subject.model, overhead.arguments(subject, "greedy"), seed=0)
        assert bool(used) == (library == "hfgen")


def test_unmixing_is_undone(subject: Subject) -> None:
    mixed = type(subject.model)
    with unmixed(subject.model):
        assert not isinstance(subject.model, hfgen.GenerationMixin)
    assert type(subject.model) is mixed
    with pytest.raises(KeyboardInterrupt), unmixed(subject.model):
        raise KeyboardInterrupt
    assert type(subject.model) is mixed


def test_batch_is_padded_on_the_left(subject: Subject) -> None:
    batch = subject.batch()
    assert batch["attention_mask"].sum(dim=1).tolist() == [16, 12, 8, 4]
    assert (batch["attention_mask"].diff(dim=1) >= 0).all()
    assert torch.equal(batch["input_ids"][3, -4:], subject.prompt[0, -4:])


def test_bytes_per_token_count_tied_weights_once(subject: Subject) -> None:
    untied = Subject("untied", "", tiny.llama(), subject.prompt)
    table = tiny.VOCAB * 32
    assert subject.bytes_per_token == 4 * subject.n_parameters
    assert untied.n_parameters == subject.n_parameters + table
    assert untied.bytes_per_token == subject.bytes_per_token + 4 * 32  # one row of the input table


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)


# --- speculation --------------------------------------------------------------------------------

LOOKUP = Variant("lookup", options={"prompt_lookup_num_tokens": 3})


def test_speculation_at_its_smallest(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = Edit("rename `x`", "def f(x):\n    return x\n" * 4, (("x", "y"),))
    monkeypatch.setattr(speculation, "EDITS", (edit, edit))
    monkeypatch.setattr(speculation, "PAST", 16)
    size = speculation.Size(
        rounds=1,
        random_rounds=1,
        texts=1,
        rows=2,
        edits=8,
        new_tokens=4,
        completed=4,
        random_new_tokens=6,
        lookup_lengths=(3,),
        assistant_lengths=(1,),
        layers=(1,),
        scales=(1.0, 40.0),
        repeat=1,
    )
    steps: list[str] = []
    report = speculation.measure(size, lambda: subject, steps.append)
    text = speculation.write(report, tmp_path / "results")

    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {"speculation.md", "speculation.json", "speculation.png"}
    for task in report.builtin.tasks:
        assert f"### {task.name}" in text
        assert steps.count(task.name) == 2  # the warm-up and one round
        assert [result.variant for result in task.results] == [v.name for v in task.variants]
        assert task.greedy.tokens_per_forward == task.greedy.width == 1.0
        assert task.greedy.acceptance is None
    editing = report.builtin.tasks[0]
    assert all(result.tokens_per_forward > 1 for result in editing.drafting())
    assert len(text.split("## Targets")[1].split("##")[0].strip().splitlines()) == 5
    ratios = [early_exit.agreement for early_exit in report.exits]
    assert len(ratios) == 2
    assert ratios[0] != ratios[1]  # what layers add counts more, so the first says less
    raw = json.loads((tmp_path / "results" / "speculation.json").read_text())
    assert list(raw["tasks"]) == [task.name for task in report.builtin.tasks]
    assert raw["early_exit"][0]["result"]["rows"] == 1
    optimized = replace(size, optimize=True)
    assert optimized.name == "speculation_optimized"
    assert optimized.prepared(subject.model).optimization is not None


def test_race_counts_what_is_forwarded(subject: Subject) -> None:
    given = overhead.arguments(subject, "greedy, no EOS")
    variants = [
        Variant("greedy"),
        *(Variant(library, library, LOOKUP.options) for library in LIBRARIES),
        Variant("early exit", options={"assistant_early_exit": 1}),
    ]
    greedy, first, second, early = race(subject.model, [given], variants, 1)

    assert greedy.forwards[0].target == [16] + [1] * 7
    assert first.new_tokens == second.new_tokens == [8]
    assert first.forwards[0].draft == []
    assert early.forwards[0].draft[0] == 16
    assert early.forwards[0].target[0] > 16
    for result in (first, second):
        assert result.drafted == sum(result.forwards[0].target) - 16 - (result.n_forwards - 1)
        assert result.tokens_per_forward == 8 / result.n_forwards


def test_race_notices_other_tokens(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample, "choose", lambda self, run, scores: scores.argmin(dim=-1))
    given = overhead.arguments(subject, "greedy, no EOS")
    with pytest.raises(UnequalTokensError, match="'lookup'"):
        race(subject.model, [given], [Variant("greedy"), LOOKUP], 1)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.request)
def test_edits_change_something(edit: Edit) -> None:
    assert all(old in edit.before for old, _ in edit.changes[:1])
    changed = [new for _, new in edit.changes if new not in edit.before]
    assert changed
    assert all(new in edit.after for new in changed)
    compile(edit.after, edit.request, "exec")


def test_reference_decides() -> None:
    processor = Reference(torch.tensor([[5, 6], [7, 0]]), prompt_length=3)
    scores = torch.randn(2, 9)
    for length, expected in ((3, [5, 7]), (4, [6, 0]), (9, [6, 0])):
        ids = torch.zeros(2, length, dtype=torch.long)
        assert processor(ids, scores).argmax(dim=-1).tolist() == expected


def test_formula_of_the_gain() -> None:
    costs = Costs(past=8, prompt=3.0, widths={1: 2.0, 2: 2.5, 4: 3.0, 8: 5.0, 16: 9.0})
    assert costs.of(3) == pytest.approx(2.75)
    assert costs.of(20) == pytest.approx(11.0)
    assert costs.all_of([16, 1, 4]) == pytest.approx(6.0 + 2.0 + 3.0)
    assert expected_tokens(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))
    assert expected_tokens(1.0, 3) == 4
    assert predicted_gain(1.0, 3, 0.5, costs) == pytest.approx(4 * 2.0 / (1.5 + 3.0))
    ratio = needed_ratio(0.9, 1.5, costs)
    assert best_gain(0.9, ratio * costs.of(1), costs)[1] == pytest.approx(1.5)
    assert needed_ratio(0.1, 1.5, costs) < 0


def test_first_layers_are_put_back(subject: Subject) -> None:
    before = subject.model(subject.prompt).logits
    with first_layers(subject.model, 1):
        assert not torch.equal(subject.model(subject.prompt).logits, before)
    assert torch.equal(subject.model(subject.prompt).logits, before)


# --- caches -------------------------------------------------------------------------------------

SMALLEST = cache_cases.Size(
    pairs=1,
    contexts=(40,),
    batches=(1, 2),
    prompts=(24, 16),
    new_tokens=4,
    beams=2,
    samples=3,
    ends=(1, 3, 2),
    shared=32,
    repeat=1,
)


def test_caches_at_their_smallest(subject: Subject, tmp_path: Path) -> None:
    steps: list[tuple[str, int]] = []
    everything = [*cache_cases.CASES, caches.MEMORY]
    results, memories = caches.measure_all(
        subject, SMALLEST, everything, lambda name, total: steps.append((name, total))
    )
    text = cache_report.write(results, memories, caches.machine(), tmp_path)

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"caches.md", "caches.json", "caches.png"}
    assert list(dict.fromkeys(name.partition(",")[0] for name, _ in steps)) == everything
    for name, total in set(steps):
        assert steps.count((name, total)) == total
    assert [(r.case, r.length, r.rows) for r in results[:4]] == [
        ("decoding", 40, 1),
        ("decoding", 40, 2),
        ("beams", 24, 2),
        ("beams", 16, 2),
    ]
    for result in results:
        assert f"## {result.case.capitalize()}" in text
        assert all(n_bytes > 0 for n_bytes in result.peak_bytes.values())
        for comparison, floor in result.parts().values():
            assert comparison.n_pairs == 1
            assert floor > 0
        if result.first is not None:
            assert all(seconds[0] > 0 for seconds in result.first.wall.values())
            assert result.floor.first < result.floor.whole
    chat = next(result for result in results if result.case == "chat")
    assert (chat.kept_bytes["hfgen"] > 0, chat.kept_bytes["upstream"]) == (True, 0)
    (memory,) = memories
    assert set(memory.peaks) == set(cache_cases.KINDS)
    assert memory.peaks["in files"] < memory.peaks["hfgen dynamic"]
    raw = json.loads((tmp_path / "caches.json").read_text())
    assert [each["case"] for each in raw["results"]] == [r.case for r in results]


def test_missed_and_met_targets_are_told(subject: Subject) -> None:
    (work,) = cache_cases.finished(subject, SMALLEST, prompt_length=8)
    result = cache_cases.measure(subject, work, 1)
    for ours, verdict in ((1.0, "met"), (4.0, "missed; 25% of what the floor allows")):
        result.whole.wall.update(upstream=[2.0], hfgen=[ours])
        quick = replace(result, floor=cache_cases.Floor(None, 1.0))
        assert cache_report.targets_table([quick]).endswith(f"| 2.00 | {verdict} |")


def test_stopwatch_reads_the_first_token(subject: Subject) -> None:
    watch = cache_cases.Stopwatch()
    reads = []

    class Watched(cache_cases.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object) -> torch.Tensor:
            is_done = watch(input_ids, scores)
            reads.append((input_ids.shape[1], watch.read))
            return is_done

    arguments = cache_cases.prompted(subject.prompt, 3, stopping_criteria=[Watched()])
    call("hfgen", subject.model, arguments, seed=0)
    assert [length for length, _ in reads] == [17, 18, 19]
    assert len({read for _, read in reads}) == 1


def test_rows_end_where_they_should(subject: Subject) -> None:
    (work,) = cache_cases.finished(subject, SMALLEST, prompt_length=8)
    tokens = call("hfgen", subject.model, work.arguments("hfgen", 0), seed=0).tokens
    assert tokens.shape == (3, 8 + 3)
    assert ((tokens[:, 8:] == 2).int().argmax(dim=1) + 1).tolist() == list(SMALLEST.ends)


def test_other_tokens_are_an_error_for_caches(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sample, "choose", lambda self, run, scores: scores.argmin(dim=-1))
    with pytest.raises(UnequalTokensError, match="tiny: decoding, 40 tokens, 1 rows"):
        caches.measure_all(subject, SMALLEST, ["decoding"])


def test_long_work_has_two_pairs(subject: Subject) -> None:
    (work,) = cache_cases.finished(subject, SMALLEST, prompt_length=8)
    with frozen_garbage():
        for seconds, n_pairs in ((0.0, 2), (1e9, 3)):
            assert cache_cases.measure(subject, work, 3, seconds).whole.n_pairs == n_pairs


def test_time_between_measured_rows() -> None:
    at = {1: 1.0, 4: 2.5, 16: 4.0}
    assert [cache_cases._between(at, n) for n in (1, 2, 4, 10)] == [1.0, 1.5, 2.5, 3.25]


# ---------------------------------------------------------------- log-probabilities


def test_log_probabilities_take_little_memory(tmp_path: Path) -> None:
    logprobs.main(vocab=5000, length=300, new_tokens=2, turns=1, threads=1, out=tmp_path)
    raw = json.loads((tmp_path / "logprobs.json").read_text())
    assert [peak["name"] for peak in raw["peaks"]] == [*logprobs.WAYS] * 2
    assert raw["peaks"][1]["n_bytes"] > 4 * 5000 * 300
    asked = {tokens["name"]: tokens["kept"] for tokens in raw["tokens"]}
    assert (asked["nothing"], asked["`logprobs=0`"]) == (0, 8)
    assert asked["`output_logits=True`"] == 4 * 5000
    assert "target" not in (tmp_path / "logprobs.md").read_text()  # it is of another vocabulary


def test_ways_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.WAYS, "all logits at once", lambda model, ids: torch.zeros(100))
    with pytest.raises(AssertionError):
        [*logprobs.measure_peaks(200, 100, torch.float32)]


def test_the_target_of_log_probabilities() -> None:
    def verdict(n_bytes: int) -> str:
        peak = logprobs.Peak(next(iter(logprobs.WAYS)), "float32", 8000, n_bytes, 1.0)
        return logprobs.verdict([peak], logprobs.TARGET_VOCAB)

    assert "500 MB at most (less than 700 MB): met" in verdict(500_000_000)
    assert "**missed**" in verdict(800_000_000)
    assert logprobs.verdict([], logprobs.TARGET_VOCAB) == ""


def test_controls_over_long_outputs(tmp_path: Path) -> None:
    model = controls.build(vocab=300)
    curves = [
        controls.measure(model, control, library, text, 2, (8, 16), 2)
        for control, library in controls.cases()
        for text in controls.TEXTS
    ]
    assert {curve.control for curve in curves} == {*controls.CONTROLS}
    assert all(min(curve.microseconds) > 0 for curve in curves)
    text = controls.write(curves, controls.machine(), 300, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"controls.{e}" for e in ("md", "json", "png")
    }
    assert text.count("\n| ") == 1 + len(curves)
    assert len(json.loads((tmp_path / "controls.json").read_text())["curves"]) == len(curves)


def test_sampling_from_a_large_vocabulary(tmp_path: Path) -> None:
    model = controls.build(vocab=9000)
    results = [sampling.measure(model, case, 2, 1) for case in sampling.CASES]
    for result in results:
        assert len(result.upstream) == len(result.uniforms) == 1
        assert min(*result.hfgen, *result.seeded) > 0
    text = sampling.write(results, sampling.machine(), 9000, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sampling.md", "sampling.json"}
    assert text.count("\n| ") == 1 + len(results)
    assert len(json.loads((tmp_path / "sampling.json").read_text())["results"]) == len(results)


@pytest.mark.parametrize(
    ("ours", "word"), [(2.0, "10.0 times faster (target 3: met)"), (10.0, "missed")]
)
def test_targets_of_sampling(ours: float, word: str) -> None:
    case = next(iter(sampling.CASES))
    results = [sampling.Result(case, n, [20.0], [ours * 8 / n], [1.0], [1.0]) for n in (1, 8)]
    assert word in sampling.verdict(results)
    assert "20.0 times faster (target 15: met)" in sampling.verdict(results)


def test_what_is_flat() -> None:
    def verdict(*microseconds: float) -> str:
        curve = controls.Curve("x", "hfgen", "loop", 1, (1, 2, 3), microseconds)
        return controls.verdict([curve])

    assert "are flat" in verdict(10.0, 10.0, 15.0)
    assert "are flat" in verdict(1.0, 1.0, 20.0)
    assert "Not flat" in verdict(50.0, 60.0, 90.0)


def test_costs_of_grammars_are_measured(tmp_path: Path) -> None:
    _, tokenizer = hfgen.builtin_model()
    costs = grammar.measure_costs(tokenizer, 9, 3)
    assert costs.n_tokens == 2048
    assert len(costs.compiling) == 9
    for cost, rows in zip(costs.costs, grammar.ROWS, strict=True):
        assert cost.rows == rows
        assert len(cost.steps) == len(cost.matchers) == len(cost.again) > 0
        assert all(0 <= mask <= step for mask, step in zip(cost.matchers, cost.steps, strict=True))
    plain = Result("plain", 1, [2.0], [2.0], [10])
    forced = Result("forced tokens", 1, [1.0], [1.0], [10], drafted=4, accepted=4)
    for result in (plain, forced):
        result.forwards.append(grammar_forwards(5))
    text = grammar.write(costs, [[plain, forced]], side_by_side.machine(), tmp_path)
    assert "| 1 | forced tokens | 2.00 | 100% | 1000 | 2.000 (2.000 to 2.000) |" in text
    assert (tmp_path / "grammar.md").read_text() == text
    raw = json.loads((tmp_path / "grammar.json").read_text())
    assert raw["gains"][0][1]["variant"] == "forced tokens"


def grammar_forwards(n: int) -> Forwards:
    """``n`` forwards of one token."""
    return Forwards([1] * n)


def test_what_stopping_costs_is_measured(tmp_path: Path) -> None:
    stopping.main(vocab=2000, longest=500, calls=2, threads=1, out=tmp_path)
    raw = json.loads((tmp_path / "stopping.json").read_text(encoding="utf-8"))
    assert raw["vocab"] == 2000
    assert [use["name"] for use in raw["first_use"]] == ["transformers", "hfgen"] * 2
    assert all(len(each["microseconds"]) == 2 for each in raw["per_token"])
    assert {each["source"] for each in raw["per_token"]} == {"transformers", "hfgen"}
    assert "first use within" not in (tmp_path / "stopping.md").read_text(encoding="utf-8")


def test_the_target_of_stop_strings() -> None:
    def verdict(seconds: float) -> str:
        uses = [stopping.FirstUse("hfgen", 3, seconds, 0.0), stopping.FirstUse("x", 3, 9.0, 9.0)]
        return stopping.verdict(uses, stopping.TARGET_VOCAB)

    assert "first use within 50 ms: 12.0 ms at most: met" in verdict(0.012)
    assert "**missed**" in verdict(0.06)


def test_ways_to_run_a_step_are_measured(subject: Subject, tmp_path: Path) -> None:
    rows = (1, 8)
    result = execution.measure(execution.as_checkpoint(subject), 1e9, 2, rows, 4)
    ways = [name for name, way in execution.WAYS.items() if not way.only]
    assert result.ways == ways
    assert [(times.way, times.rows) for times in result.times] == [
        (way, n) for n in rows for way in ways
    ]
    assert all(len(times.wall) == 2 for times in result.times)
    equal = {times.way: times.equal for times in result.of(8)}
    assert equal["upstream, float32"] == equal["hfgen"] == equal["optimize"] == 1.0
    text = execution.write([result], side_by_side.machine(), tmp_path)
    assert (tmp_path / "execution.md").read_text() == text
    assert text.count("| 8 |") == len(ways)
    raw = json.loads((tmp_path / "execution.json").read_text())
    assert len(raw["subjects"]["tiny"]["times"]) == 2 * len(ways)
    assert (tmp_path / "execution.png").stat().st_size > 0


def test_lines_on_each_other_are_drawn_once() -> None:
    lines = {"a": [1.0, 10.0], "b": [2.0, 10.0], "c": [1.02, 9.9], "d": [1.0, 12.0]}
    assert apart(lines, nearest=0.05) == {"a, c": lines["a"], "b": lines["b"], "d": lines["d"]}
    assert apart(lines, nearest=0.0) == lines


def test_the_benchmark_for_gpus_runs_dry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        gpu, "on_the_cpu", lambda make, size: f"{make().title} in {size.n_rounds} round"
    )
    monkeypatch.setattr(gpu, "run_tests", lambda is_dry: (is_dry, "3 passed"))
    gpu.main(dry_run=True, out=tmp_path)
    page = capsys.readouterr().out
    assert page.startswith("# On a GPU: a dry run on the CPU")
    assert "* Tests for GPUs: 3 passed." in page
    assert "Target 12, decoding on this machine's CPU: Tiny Llama in 1 round" in page
    for way in gpu.WAYS:
        (one, two) = (line for line in page.splitlines() if line.startswith(f"| {way} |"))
        assert one.count("|") == two.count("|") == 8
        assert ("100%" in one) == ("sampled" not in way)
    assert "| engine |" in page
    assert list(tmp_path.iterdir()) == []


def test_a_way_that_fails_on_a_gpu_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    ways = {"upstream": gpu.WAYS["upstream"], "bad": gpu.Way("hfgen", {"num_beams": -1})}
    monkeypatch.setattr(gpu, "WAYS", ways)
    good, bad = gpu.decode(subject, gpu.Size(4, 2, 0.0, (1,)))
    assert (len(good.per_token), good.error) == (2, None)
    assert "num_beams" in str(bad.error)
    assert gpu._gain([good, bad], "upstream", "bad") == "not measured"
    assert gpu.surely(lambda: 1 / 0) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as ended:
        gpu.main(out=tmp_path)
    assert ended.value.exit_code == gpu.NO_GPU
    assert "finds no CUDA device" in capsys.readouterr().err


def test_first_calls_are_held_against_their_targets() -> None:
    text = first_call.report([14.0, 16.0, 15.5], [2.0, 3.5, 2.5], 0.2, side_by_side.machine())
    assert "| empty | 15.5 (14.0 to 16.0) | 15: **missed** |" in text
    assert "| filled | 2.5 (2.0 to 3.5) | 3: met |" in text


# ---------------------------------------------------------------- peers


def test_peers_take_turns_in_processes_of_their_own(tmp_path: Path, subject: Subject) -> None:
    ways = ["transformers, float32", "hfgen.optimize"]
    peers.write_files(subject, tmp_path)
    absent: dict[str, str] = {}
    with_a_crash = [*ways, "llama.cpp, F16"]  # it has no file
    results = peers.measure(tiny.VOCAB, tmp_path, with_a_crash, 1, 3, 1, absent, prompt=24)
    assert absent == {"llama.cpp, F16": "its process ended with 1"}
    for result in results:
        assert all(len(result.steps(rows)) == 1 for rows in peers.ROWS)
        assert result.peak_bytes > 10**8
        assert 0 < result.prompt[0] < 60
    assert results[0].equal == 1.0
    text = peers.report(results, {"other": "it is not installed"}, subject, 1e9, peers.machine())
    assert text.count("\n| ") == 1 + len(ways)
    assert "* Not measured: other: it is not installed." in text
    peers.plot(results, tmp_path / "peers.png")
    raw = {"results": [asdict(result) for result in results], "machine": peers.machine()}
    raw = json.loads(json.dumps(raw | {"bandwidth": 1e9, "bytes_per_bit": 1e6}))
    assert peers.block(raw).count("\n| ") == len(ways)


def test_ways_without_their_library_or_files_have_no_row(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    absent = {way for way in peers.WAYS if peers.missing(way, tmp_path) is not None}
    assert absent == {way for way in peers.WAYS if "transformers" not in way and "hfgen" not in way}
