"""Cases in which random sweeps once found a difference; see ``sweep.py`` and its neighbours."""

from __future__ import annotations

import pytest

from tests.parity import caches, invariants, speculation
from tests.parity.cache_kinds import Cached
from tests.parity.harness import Case, check, compare, ours, run, sequences, upstream
from tests.parity.invariants import Lawful
from tests.parity.options import ASSISTED, BEAM, BEAM_SAMPLE, GREEDY, SAMPLE
from tests.parity.speculation import Speculated
from tests.versions import IS_5_23

MANY_EOS = list(range(5, 17))

#: Why each differed.
BESIDE_UPSTREAM = {
    "chunks of a streamer, where a function bans what a lookup finds": Case(
        "phi",
        ASSISTED,
        seed=422,
        options={
            "min_new_tokens": 20,
            "remove_invalid_values": True,
            "prefix_fn": True,
            "user_processors": ["temperature", "own"],
            "outputs": ["logits"],
            "streamer": True,
            "max_new_tokens": 12,
        },
    ),
    "logits of a drafted row, where the last draft goes beyond the end": Case(
        "hrm_text",
        ASSISTED,
        1,
        seed=177,
        options={"renormalize_logits": True, "max_cache_len": 40, "outputs": ["logits"]},
    ),
    # Before 5.23, transformers' own chunks decode other tokens.
    **(
        {
            "chunks of a prompt whose tokens all have one position": Case(
                "clvp", GREEDY, 2, seed=1, options={"prefill_chunk_size": 3}
            )
        }
        if IS_5_23
        else {}
    ),
    "a model that writes to the attribute of a processor": Case(
        "dia", GREEDY, 2, seed=379, options={"repetition_penalty": 1.3}
    ),
    "fewer sequences than rows of encoder input": Case(
        "rag_token", SAMPLE, 2, options={"encoder_no_repeat_ngram_size": 2}
    ),
    "no logged reminder of a length beyond the positions": Case(
        "seamless_m4t_speech", ASSISTED, seed=419, options={"max_length": 1}
    ),
}

CACHED = {
    "a config that does not say how large its heads are": Cached(
        "prefix",
        (Case("blt", BEAM, seed=886, options={"eos_token_id": MANY_EOS}),),
        {"seed": 411, "max_bytes": 200_000},
    ),
    "two scores that differ in the last digit, between which top_k cuts": Cached(
        "continued",
        (
            Case(
                "codegen", BEAM_SAMPLE, 3, True, 156, {"eos_token_id": None, "outputs": ["scores"]}
            ),
        ),
        {"how": "full", "by": "upstream", "n_before": 3, "n_new": 0},
    ),
}

SPECULATED = {
    "positions of embeddings, of which an assistant sees nothing": Speculated(
        Case(
            "minimax_m3_vl_text",
            GREEDY,
            2,
            seed=590,
            options={"position_ids": True, "embeds": "only", "eos_token_id": MANY_EOS},
        ),
        "assistant",
    ),
    "an encoder that adds the parts of an image to the mask": Speculated(
        Case("udop", GREEDY, 2, True, 869), "assistant"
    ),
    "start tokens of prompts with several samples": Speculated(
        Case("t5", SAMPLE, 2, options={"start_per_row": True, "num_return_sequences": 2}),
        "assistant",
    ),
    "drafted tokens that stand for a part of the image": Speculated(
        Case("ovis2", GREEDY, 2, True, 170, {"eos_token_id": list(range(5, 17))}), "assistant"
    ),
    # LFM3 is new in 5.23
    **(
        {
            "windows of attention beside layers that have none": Speculated(
                Case("lfm3", GREEDY, 2, seed=194, options={"attentions": ["attentions"]}), "oracle"
            ),
            "a convolution that is wider than the text": Speculated(
                Case("lfm3", GREEDY, 3, seed=294, options={"no_prompt": True, "outputs": []}),
                "lookup",
            ),
        }
        if IS_5_23
        else {}
    ),
    "attentions of a model that returns none": Speculated(
        Case("big_bird", GREEDY, seed=706, options={"attentions": ["attentions"]}), "oracle"
    ),
    "attentions of layers that attend to the image alone": Speculated(
        Case("mllama", GREEDY, 4, seed=258, options={"attentions": ["attentions"]}), "oracle"
    ),
    "rounding errors of hidden states as large as a thousand": Speculated(
        Case(
            "mllama",
            GREEDY,
            3,
            seed=375,
            options={"repetition_penalty": 1.3, "hidden_states": ["hidden_states", "scores"]},
        ),
        "assistant",
    ),
    "positions that are counted from ids, behind a padded prompt": Speculated(
        Case("kosmos2", GREEDY, 3, True, 154), "oracle"
    ),
    "the same, where an assistant gets the image": Speculated(
        Case("kosmos2", GREEDY, 4, True, 154), "assistant"
    ),
    "positions that are counted from ids, behind a pad that was generated": Speculated(
        Case("seamless_m4t_v2_speech", GREEDY, 2, False, 57, {"max_length": 1, "eos_token_id": 7}),
        "oracle",
    ),
    "a prompt of padding alone": Speculated(
        Case("kyutai_speech_to_text", GREEDY, 4, True, 481, {"pad_token_id": 1}), "oracle"
    ),
    "a generate of its own that samples at a temperature": Speculated(
        Case("whisper", GREEDY, 2, True, 594, {"temperature": 0.6}), "oracle"
    ),
    "scores of tokens that a row knew when all rows had ended": Speculated(
        Case(
            "got_ocr2",
            GREEDY,
            3,
            seed=678,
            options={
                "eos_token_id": list(range(8, 57, 4)),
                "prefill_chunk_size": 3,
                "outputs": ["scores"],
            },
        ),
        "memory",
    ),
    "a prompt's token that is the pad token": Speculated(
        Case(
            "qwen2_audio", GREEDY, 4, seed=423, options={"pad_token_id": 7, "outputs": ["scores"]}
        ),
        "early exit",
    ),
}
if IS_5_23:  # 5.21 keeps these layers differently
    SPECULATED["attentions of layers that read the keys of others, of which some have a window"] = (
        Speculated(
            Case(
                "gemma3n_text",
                GREEDY,
                3,
                seed=838,
                options={
                    "eos_token_id": 7,
                    "repetition_penalty": 0.8,
                    "exponential_decay_length_penalty": [2, 1.5],
                    "prefill_chunk_size": 3,
                    "outputs": ["logits"],
                    "attentions": ["attentions"],
                },
            ),
            "assistant",
        )
    )


INVARIANT = {
    "DoLa where the token embeddings are a module with a table inside": Lawful(
        Case("kyutai_speech_to_text", GREEDY, 2, seed=3), "DoLa", 0, "same seed twice"
    ),
}


#: Where upstream's drafts change its tokens, and hfgen's are greedy decoding's.
GREEDY_BESIDE_UPSTREAM = {
    "upstream chooses the first token by drafts of later ones": Case(
        "kyutai_speech_to_text",
        ASSISTED,
        seed=481,
        options={"assistant": "same", "pad_token_id": 1},
    ),
    "upstream drafts beyond the end of the sound": Case(
        "kyutai_speech_to_text", ASSISTED, seed=743, options={"config_object": "both"}
    ),
    "upstream's drafts behind a pad have other positions": Case(
        "seamless_m4t_v2",
        ASSISTED,
        seed=598,
        options={
            "mask": "absent",
            "max_length": 5,
            "eos_token_id": [8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56],
            "watermark": "selfhash",
        },
    ),
}


def test_rows_that_have_ended_beside_rows_whose_scores_are_infinite() -> None:
    options = {
        "eos_token_id": MANY_EOS,
        "exponential_decay_length_penalty": [2, 1.5],
        "remove_invalid_values": True,
        "outputs": ["scores"],
    }
    report = check(Case("pegasus_x", SAMPLE, 4, seed=425, options=options))
    reason = "upstream raises for all rows where some have NaN scores"
    assert (report.differences, report.excused) == ([], reason)
    assert report.theirs.error == "RuntimeError"
    assert len(sequences(report.mine)) == 4


@pytest.mark.parametrize(("reason", "case"), GREEDY_BESIDE_UPSTREAM.items())
def test_greedy_beside_upstream(reason: str, case: Case) -> None:
    report = check(case)
    assert sequences(report.theirs).tolist() != sequences(report.mine).tolist()
    assert (report.differences, report.excused) == ([], reason)


@pytest.mark.parametrize("case", BESIDE_UPSTREAM.values(), ids=BESIDE_UPSTREAM)
def test_beside_upstream(case: Case) -> None:
    report = check(case)
    assert (report.differences, report.excused) == ([], None)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("moonshine_streaming", BEAM, 2), "position_ids"),
        (Case("whisper", SAMPLE, 2), "num_beams"),
        (Case("dia", GREEDY, 2), "num_beams"),
    ],
)
def test_arguments_that_are_none(case: Case, name: str) -> None:
    theirs, mine = (
        run(build(case.family), case, amend=lambda call: call.kwargs.update({name: None}))
        for build in (upstream, ours)
    )
    assert theirs.error is None
    assert compare(theirs, mine) == []


@pytest.mark.parametrize("cached", CACHED.values(), ids=CACHED)
def test_caches(cached: Cached) -> None:
    assert caches.check(cached) == []


@pytest.mark.parametrize("speculated", SPECULATED.values(), ids=SPECULATED)
def test_speculation(speculated: Speculated) -> None:
    assert speculation.check(speculated) == []


@pytest.mark.parametrize("lawful", INVARIANT.values(), ids=INVARIANT)
def test_invariants(lawful: Lawful) -> None:
    assert invariants.check(lawful) == []
