"""What holds of every mode without asking upstream: ``python -m tests.parity.invariants``.

A case is a random call of the parity sweep in one of hfgen's modes, also of those that upstream has no
more, and a law that relates it to a second call: see ``LAWS``. Each failing one is printed with the
command that runs it alone; the exit code is 1 when there was any. What is left out is counted by reason.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import hfgen
from tests.parity.cache_kinds import has_indexer
from tests.parity.family import Family, Limit
from tests.parity.harness import (
    FAMILIES,
    Case,
    Outcome,
    _differences,
    forget_models,
    ours,
    run,
    sequences,
    settle,
    versions,
)
from tests.parity.options import (
    BEAM,
    BEAM_SAMPLE,
    BY_NAME,
    GREEDY,
    SAMPLE,
    SAMPLING,
    TEXT,
    Call,
    Recorder,
    usable_modes,
)
from tests.parity.speculation import LIMITS

#: Several EOS tokens, so that rows end at different times.
MANY_EOS = list(range(8, 60, 4))

#: Families of which upstream decodes other tokens with a static cache, besides those that look up keys by an
#: index: masks or positions depend on how long it is (of LED and Moshi, for a batch of several rows); a
#: static layer of Unlimited-OCR goes on with the keys of before when its rows are reordered; upstream makes
#: PP-FormulaNet's cross-attention as long as the image is high, and its decoder attends to the empty rest.
STATIC_COUNTS = (
    *("fsmt", "gpt_neo", "imagegpt", "kyutai_speech_to_text", "led", "moshi", "nllb_moe"),
    *("pp_formulanet", "unlimited_ocr"),
)

#: Families that compute a row with the states of the others (``(rows, 1, size) + (rows, size)``).
MIXES_ROWS = ("rwkv",)
#: Models whose `generate` returns other ids than a streamer sees; the sweep compares both with upstream's.
RETURNS_OTHER_IDS = ("bark_semantic", "dia")

#: Families whose own ``generate`` takes no streamer, returns no scores of sequences, or cuts ids off.
OWN_GENERATE = ("csm", "rag_token", "whisper")

#: Options that a case may have: none of them tells rows apart or is about what a law turns.
OPTIONS = (
    "mask max_new_tokens min_new_tokens eos_token_id repetition_penalty no_repeat_ngram_size "
    "bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens forced_eos_token_id "
    "renormalize_logits remove_invalid_values user_processors temperature top_p length_penalty "
    "early_stopping encoder_outputs embeds"
).split()


@dataclass(frozen=True)
class Mode:
    """A mode: the one of the parity sweep that it is called in, and what its calls have besides."""

    base: str
    settings: tuple[dict[str, Any], ...] = ({},)
    streams: bool = True
    drops_rows: bool = True
    #: Feeds several tokens at a time, which some models answer otherwise.
    feeds_several: bool = False


MODES: dict[str, Mode] = {
    "greedy": Mode(GREEDY),
    "sampling": Mode(SAMPLE),
    "beams": Mode(BEAM, ({"num_beams": 2}, {"num_beams": 3})),
    "beam sampling": Mode(BEAM_SAMPLE, ({"num_beams": 3},)),
    "group beams": Mode(
        BEAM,
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
            {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 2.0},
        ),
        streams=False,
        drops_rows=False,
    ),
    "constrained beams": Mode(
        BEAM,
        (
            {"num_beams": 2, "force_words_ids": [[7]]},
            {"num_beams": 4, "force_words_ids": [[7, 9], [[10], [11, 13]]]},
        ),
        streams=False,
        drops_rows=False,
    ),
    "contrastive": Mode(
        GREEDY,
        ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.3, "top_k": 2}),
        drops_rows=False,
        feeds_several=True,
    ),
    "DoLa": Mode(GREEDY, ({"dola_layers": "low"}, {"dola_layers": "high"}, {"dola_layers": [0]})),
    "minimum Bayes risk": Mode(
        SAMPLE, ({"num_return_sequences": 2}, {"num_return_sequences": 5}), streams=False
    ),
}


@dataclass(frozen=True)
class Lawful:
    """A call, its mode with the number of its setting, and the law that it has to keep."""

    case: Case
    mode: str
    setting: int
    law: str

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Lawful:
        values = json.loads(line)
        return cls(**values | {"case": Case(**values["case"])})

    @property
    def command(self) -> str:
        """The shell command that checks this alone."""
        return f"python -m tests.parity.invariants --only {shlex.quote(str(self))}"

    def run(self, *amends: Callable[[Call], None], **arguments: Any) -> Outcome:
        """Call hfgen in this mode; ``arguments`` and ``amends`` are what the law changes."""

        def amend(call: Call) -> None:
            call.kwargs.update(MODES[self.mode].settings[self.setting])
            if self.mode == "minimum Bayes risk":
                risk = hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True)
                call.kwargs["custom_generate"] = risk
            call.kwargs.update(arguments)
            for each in amends:
                each(call)

        return run(ours(self.case.family), self.case, amend)


class LeftOutError(Exception):
    """There is nothing to compare; the message is the reason."""


# ---------------------------------------------------------------- laws


def same(first: Outcome, second: Outcome, what: str = "sequences") -> list[str]:
    """Differences in what was generated, in what was raised, and in the state of the random numbers."""
    if second.error is not None:
        return [f"raised: {second.error}({second.message[:120]!r})"]
    found = _differences(what, sequences(first), sequences(second), 0.0)
    return found + _differences("random state", first.random_state, second.random_state, 0.0)


def check_twice(lawful: Lawful) -> list[str]:
    """The same seed gives the same output, to the last bit."""
    first, second = (plain(lawful, **WITH_SCORES) for _ in range(2))
    scores = [getattr(each.returned, "scores", None) for each in (first, second)]
    return same(first, second) + _differences("scores", *scores, 0.0)


def check_dictionary(lawful: Lawful) -> list[str]:
    """What is recorded has no say in what is generated."""
    recorded = lawful.run(**WITH_SCORES, output_logits=True)
    return same(plain(lawful), recorded)


def check_streamed(lawful: Lawful) -> list[str]:
    """A streamer gets the prompt, then the tokens of the output, then its end."""
    if lawful.case.family in RETURNS_OTHER_IDS:
        raise LeftOutError("the model returns other ids than are streamed")
    streamer = Recorder()
    expected = plain(lawful)
    outcome = lawful.run(streamer=streamer)
    found = same(expected, outcome)
    if found:
        return found
    tokens, generated = streamer.seen, sequences(outcome)
    assert generated is not None
    if tokens.count(None) != 1 or tokens[-1] is not None:
        return [f"streamed: ended {tokens.count(None)} times"]
    joined = torch.cat([each.reshape(len(generated), -1) for each in tokens[:-1]], dim=1)
    if lawful.case.options.keys() & {"embeds"}:  # there is no prompt of ids to stream
        joined = joined[:, -generated.shape[1] :]
    return _differences("streamed", generated, joined, 0.0)


def check_finished(lawful: Lawful) -> list[str]:
    """Rows that leave when they have ended are missed by nobody."""
    return same(plain(lawful), lawful.run(drop_finished=True))


def check_static(lawful: Lawful) -> list[str]:
    """A static cache holds what a dynamic one does."""
    family = FAMILIES[lawful.case.family]
    if {Limit.STATIC, Limit.NO_CACHE} & family.unsupported.keys():
        raise LeftOutError("the family has no static cache")
    if family.name in STATIC_COUNTS or has_indexer(family.name):
        raise LeftOutError("upstream's tokens with a static cache are others")
    return same(plain(lawful), lawful.run(cache_implementation="static"))


def check_alone(lawful: Lawful) -> list[str]:
    """A row of a batch is decoded as it is alone; what follows its end is padding."""
    if FAMILIES[lawful.case.family].kind not in TEXT:
        raise LeftOutError("media of a batch are not cut into rows here")
    if lawful.case.family in MIXES_ROWS:
        raise LeftOutError("the model mixes the rows of a batch")
    whole = plain(lawful, **WITH_SCORES)
    together, n_steps = sequences(whole), len(whole.returned.scores)
    assert together is not None
    found = []
    n_rows = lawful.case.rows
    for row in range(n_rows):
        outcome = lawful.run(taking_row(row, n_rows))
        alone = sequences(outcome)
        part = together[row : row + 1]
        if outcome.error == "InvalidScoresError":  # which ends a row of a batch
            step = int(outcome.message.split(" at step ")[1].split(",")[0])
            if len(part[:, part.shape[1] - n_steps + step :].unique()) > 1:
                found += [f"row {row} goes on after scores of NaN at step {step}: {part.tolist()}"]
            continue
        if alone is None:
            return [f"row {row} raised: {outcome.error}({outcome.message[:120]!r})"]
        found += _differences(f"row {row}", part[:, : alone.shape[1]], alone, 0.0)
        if len(part[:, alone.shape[1] :].unique()) > 1:
            found += [f"row {row} goes on after its end: {part[0].tolist()}"]
    return found


def taking_row(row: int, n_rows: int) -> Callable[[Call], None]:
    """Amend a call of ``n_rows`` to one of a single row."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == n_rows:
            return value[row : row + 1]
        if isinstance(value, hfgen.decoding.outputs.ModelOutput):
            return type(value)(**{name: take(each) for name, each in value.items()})
        return value

    def amend(call: Call) -> None:
        call.kwargs.update({name: take(value) for name, value in call.kwargs.items()})

    return amend


WITH_SCORES = {"return_dict_in_generate": True, "output_scores": True}


def plain(lawful: Lawful, **arguments: Any) -> Outcome:
    """The call as it is, which is compared with only if it returns ids."""
    outcome = lawful.run(**arguments)
    if outcome.error is not None:
        raise LeftOutError(f"raises {outcome.error} in mode {lawful.mode}")
    ids = sequences(outcome)
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise LeftOutError("returns no ids")
    return outcome


@dataclass(frozen=True)
class Law:
    check: Callable[[Lawful], list[str]]
    modes: tuple[str, ...] = tuple(MODES)
    #: Needs several rows.
    is_of_batches: bool = False
    #: Arguments that the case gets, so that there is something to see.
    options: tuple[tuple[str, Any], ...] = ()


_NOT_SAMPLED = tuple(name for name, mode in MODES.items() if mode.base not in SAMPLING)

LAWS: dict[str, Law] = {
    "same seed twice": Law(check_twice),
    "dictionary or ids": Law(check_dictionary),
    "streamed or returned": Law(
        check_streamed, tuple(name for name, mode in MODES.items() if mode.streams)
    ),
    "finished rows leave": Law(
        check_finished,
        tuple(name for name, mode in MODES.items() if mode.drops_rows),
        is_of_batches=True,
        options=(("eos_token_id", MANY_EOS),),
    ),
    "static or dynamic": Law(check_static),
    "rows alone": Law(check_alone, _NOT_SAMPLED, is_of_batches=True),
}


# ---------------------------------------------------------------- drawing and checking


def draw(
    seed: int, count: int, families: Sequence[str] = (), laws: Sequence[str] = ()
) -> list[Lawful]:
    """``count`` cases, laws and modes in turns, grouped by family so that few models are held."""
    rng = random.Random(seed)
    names, drawn = list(laws or LAWS), []
    while len(drawn) < count:
        law = names[len(drawn) % len(names)]
        mode = rng.choice(LAWS[law].modes)
        family = FAMILIES[rng.choice(list(families or FAMILIES))]
        if MODES[mode].base in usable_modes(family):
            drawn.append(_draw_case(rng, family, mode, law))
    return sorted(drawn, key=lambda lawful: lawful.case.family)


def _draw_case(rng: random.Random, family: Family, mode: str, law: str) -> Lawful:
    base, settings = MODES[mode].base, MODES[mode].settings
    rows = rng.choice((2, 3, 4) if LAWS[law].is_of_batches else (1, 2, 3))
    padded = rows > 1 and Limit.PADDING not in family.unsupported and rng.random() < 0.5
    fitting = [BY_NAME[name] for name in OPTIONS if BY_NAME[name].fits(family, base)]
    values = {option.name: rng.choice(option.values) for option in fitting if rng.random() < 0.12}
    values |= dict(LAWS[law].options)
    case = settle(Case(family.name, base, rows, padded, rng.randrange(1000), values))
    return Lawful(case, mode, rng.randrange(len(settings)), law)


def check(lawful: Lawful) -> list[str] | str:
    """Differences from the law, or the reason why there is nothing to compare."""
    case = lawful.case
    if MODES[lawful.mode].feeds_several and LIMITS.get(case.family, lambda case: False)(case):
        return "the model answers otherwise if it gets several tokens at once"
    if case.family in OWN_GENERATE:
        return "the family's own generate() takes and returns other things"
    try:
        return LAWS[lawful.law].check(lawful)
    except LeftOutError as reason:
        return str(reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.invariants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random cases (default 0)")
    parser.add_argument("--count", type=int, default=800, help="how many (default 800)")
    parser.add_argument(
        "--family", action="append", default=[], choices=sorted(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--law", action="append", default=[], choices=list(LAWS))
    parser.add_argument(
        "--only", action="append", default=[], type=Lawful.parse, metavar="CASE_JSON"
    )
    options = parser.parse_args(arguments)
    cases = options.only or draw(options.seed, options.count, options.family, options.law)
    counts, left_out = Counter[str](), Counter[str]()
    family, begin = None, time.perf_counter()
    for lawful in cases:
        if lawful.case.family != family:
            forget_models()
            family = lawful.case.family
        found = check(lawful)
        if isinstance(found, str):
            left_out[found] += 1
            continue
        counts["differ" if found else "equal"] += 1
        for line in found:
            print(f"  {line}")
        if found:
            print(lawful.command, flush=True)
    for reason, count in left_out.most_common():
        print(f"left out: {count}, {reason}")
    print(
        f"{len(cases)} cases, {counts['differ']} differ, {left_out.total()} left out, "
        f"in {time.perf_counter() - begin:.0f} s ({versions()})"
    )
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
