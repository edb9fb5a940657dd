"""The engine's requests that draft share forwards, and each equals its solo call without drafts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, seed

import hfgen
from hfgen.engine import Engine
from hfgen.engine.joined import DraftingRows
from hfgen.running.padding import hides_padding
from tests import tiny
from tests.parity.harness import in_double
from tests.schedules import Asked, Play, Schedule
from tests.test_engine import TEXTS, alone, check
from tests.test_engine_schedules import (
    DRAFTING,
    NAMES,
    bytes_of,
    exact_subject,
    profile,
    requests,
    schedules,
)
from tests.test_joining import begun

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, of tiny configs


class Watched(Play):
    """A schedule in which rows are looked at that have accepted different numbers of tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.n_gaps: dict[Any, int] = {}

    def step(self) -> None:
        super().step()
        for rows in self.engine.steps.joined:
            is_gap = rows.batch.ids < 0
            assert rows.drafts is isinstance(rows, DraftingRows)
            assert rows.drafts or not is_gap.any()
            if is_gap.any():
                assert not rows.batch.model_kwargs["attention_mask"][is_gap].any()
            for decoding in rows.members:
                n_gaps = is_gap[decoding.places].sum(dim=1).tolist()
                assert n_gaps == [decoding.n_gaps] * decoding.n_rows
                self.counts["moved"] += decoding.n_gaps < self.n_gaps.get(decoding, 0)
                self.n_gaps[decoding] = decoding.n_gaps
            self.counts["shared"] += rows.drafts and len(rows.members) > 1
            self.counts["gaps"] += bool(is_gap.any())


SEEN = ("equal", "eos", "length", "shared", "gaps", "moved", "cancelled", "Planned", "taken out")


def remembered(n: int, memory: hfgen.SuffixMemory) -> Schedule:
    """Some requests draft what the same ones have said before, and accept more tokens than the others."""
    own = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 14, "seed": 1}
    own |= {"assistant_model": memory}
    sampled = ({}, {"do_sample": True})
    asked = [Asked(i // 2, 2 + 3 * i, i % 3, own | sampled[i % 2]) for i in range(n)]
    return Schedule(tuple(asked), {"max_rows": 8})


def test_random_schedules_of_requests_that_draft() -> None:
    counts: Counter[str] = Counter()
    asked = requests([*DRAFTING, *DRAFTING, "greedy", "beams"], NAMES, True, 8)

    def play(schedule: Schedule) -> None:
        counts.update(Watched(exact_subject(), schedule).run())

    memory = hfgen.SuffixMemory()
    for n in (3, 4):
        play(remembered(n, memory))
    for part in range(6):
        drawn = schedules(asked, 10, bytes_of(exact_subject()))
        seed(part)(profile(12)(given(drawn)(play)))()
        if all(counts[name] for name in SEEN):
            break
    assert [name for name in SEEN if not counts[name]] == []


#: Whether layers tell tokens apart by their positions, and not by the columns between them.
HIDES_GAPS = {
    "llama": True,
    "gpt2": True,
    "bloom": True,
    "falcon": True,
    "gptj": True,
    "mpt": False,
}


@torch.no_grad()
@pytest.mark.parametrize("family", HIDES_GAPS)
def test_gaps_are_made_only_where_a_model_hides_them(family: str) -> None:
    model = in_double(family)
    batch = begun(model, input_ids=tiny.prompt(2) % 60)
    assert hides_padding(model, batch)
    assert hides_padding(model, batch, between=True) is HIDES_GAPS[family]
    memory = hfgen.SuffixMemory()
    asked = [{"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0} for _ in range(5)]
    for i, options in enumerate(asked):
        if i > 1:
            options |= {"do_sample": True, "temperature": 0.3, "seed": 0}
    prompts = [tiny.prompt(1, 5 + i % 3, i % 2) % 60 for i in range(len(asked))]
    pairs = list(zip(prompts, asked, strict=True))
    plain = [model.generate(ids, **options) for ids, options in pairs]
    memory.add(plain[0][0].tolist())
    memory.add(plain[3][0].tolist())
    engine = Engine(model)
    added = [engine.add(ids, **options, assistant_model=memory) for ids, options in pairs]
    n_rows = 0
    while engine.has_work:
        engine.step()
        n_rows = max([n_rows, *map(len, engine.steps.joined)])
    assert n_rows == (len(asked) if HIDES_GAPS[family] else 1)
    for request, sequences in zip(added, plain, strict=True):
        assert torch.equal(request.result().generate_output.sequences, sequences)


@pytest.fixture(scope="module")
def builtin() -> Any:
    model, tokenizer = hfgen.builtin_model()
    return hfgen.mix_into(model), tokenizer


@pytest.mark.parametrize(("way", "drafter"), [("greedy", "memory"), ("sampled", "lookup")])
def test_eight_requests_that_draft_share_forwards(builtin: Any, way: str, drafter: str) -> None:
    model, tokenizer = builtin
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": 6}
    if drafter == "memory":
        drafts = {"assistant_model": hfgen.SuffixMemory()}
    own: dict[str, Any] = {"max_new_tokens": 24}
    if way == "sampled":
        own |= {"do_sample": True, "temperature": 0.7}
    asked = [(TEXTS[i % len(TEXTS)], own | {"seed": i % 3}) for i in range(8)]
    engine = Engine(model, tokenizer)
    drafts |= {"output_speculation": True}
    added = [engine.add(text, **options, **drafts) for text, options in asked]
    n_rounds = 0
    for request, (text, options) in zip(added, asked, strict=True):
        output = request.result()
        check(output, alone(model, tokenizer, text, **options))
        n_rounds += output.generate_output.speculation.forwards
    assert engine.stats.n_forwards < min(n_rounds / 4, 24)


def test_without_a_seed_one_is_drawn_when_a_request_is_added(builtin: Any) -> None:
    model, tokenizer = builtin
    drafts = {"prompt_lookup_num_tokens": 6}, {"assistant_model": hfgen.SuffixMemory()}
    texts = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        engine = Engine(model, tokenizer)
        asked = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.5}
        added = [engine.add(TEXTS[0], **asked, **drafts[i % 2]) for i in range(6)]
        torch.manual_seed(3)  # nothing more is drawn
        engine.step()
        assert [len(rows) for rows in engine.steps.joined] == [6]
        texts.append([request.result().text for request in added])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 6


def test_drafts_of_an_exact_model_are_verified_beside_the_batch() -> None:
    """Gaps would move the blocks of its sums; its prompts share forwards as before."""
    with hfgen.exact(hfgen.mix_into(tiny.llama())) as model:
        asked = {"max_new_tokens": 12, "eos_token_id": None, "logprobs": 0}
        asked |= {"return_dict_in_generate": True}
        solo = [model.generate(tiny.prompt(1, 5 + i), **asked) for i in range(3)]
        engine = Engine(model)
        lookup = asked | {"prompt_lookup_num_tokens": 3}
        added = [engine.add(tiny.prompt(1, 5 + i), **lookup) for i in range(3)]
        assert all(request.decoding.reads_ids_alone for request in added)
        assert not any(request.decoding.drafts for request in added)
        for request, alone_ in zip(added, solo, strict=True):
            output = request.result().generate_output
            assert torch.equal(output.sequences, alone_.sequences)
            assert torch.equal(output.logprobs.token_logprobs, alone_.logprobs.token_logprobs)
