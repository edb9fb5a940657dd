"""Assisted decoding beyond parity: batches, criteria per token, functions with a state, statistics."""

from __future__ import annotations

import copy
import random
import re
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    Phi3Config,
    Phi3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hfgen
from hfgen.decoding.drafters.assistant import first_layers
from hfgen.decoding.drafters.base import Acceptance, Draft, DraftContext
from hfgen.decoding.drafters.lookup import PromptLookup
from hfgen.decoding.drafters.schedule import (
    Adaptive,
    Costs,
    Heuristic,
    Schedule,
    relative_cost,
)
from hfgen.decoding.strategies.verification import (
    DraftColumn,
    SpeculativeSampling,
    exponential_noise,
    gumbel_choice,
)
from hfgen.running import Executor
from tests import tiny
from tests.parity import speculation
from tests.parity.family import seeded
from tests.parity.harness import FAMILIES, Case, ours, run, sequences, upstream
from tests.parity.options import GREEDY, SAMPLE
from tests.parity.options import tokenizer as letters
from tests.versions import since_5_21, since_5_23

IDS = torch.tensor(
    [[11, 12, 13, 11, 12, 13, 11, 12], [0, 0, 5, 6, 7, 5, 6, 7], [9, 9, 8, 9, 9, 8, 9, 9]]
)
MASK = (IDS != 0).long()


def noisy(model: Any, scale: float = 0.15) -> Any:
    """A model that agrees with ``model`` now and then."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(scale * parameter.std() * noise if parameter.numel() > 1 else 0)
    return assistant


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture(scope="module")
def assistant(model: Any) -> Any:
    return noisy(model)


class Script:
    """Drafts given tokens per row, and remembers what it was asked and told."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.contexts: list[DraftContext] = []
        self.verdicts: list[Acceptance] = []

    def draft(self, context: DraftContext) -> Draft | None:
        self.contexts.append(context)
        return Draft(self.sequences[:, context.start : context.end])

    def observe(self, verdict: Acceptance) -> None:
        self.verdicts.append(verdict)


# ---------------------------------------------------------------- rows


def compare_drawn(drafter: str, least: int, **kwargs: Any) -> None:
    """The random cases of ``drafter`` that ``kwargs`` draw; ``least`` of them have to be compared."""
    drawn = [each for each in speculation.draw(**kwargs) if each.drafter == drafter]
    found = [(each, speculation.check(each)) for each in drawn]
    left_out = Counter(reason for _, reason in found if isinstance(reason, str))
    compared = [(each, differences) for each, differences in found if isinstance(differences, list)]
    failed = [f"{each}: {differences}" for each, differences in compared if differences]
    assert not failed, "\n".join(failed)
    assert len(compared) >= least, left_out
    assert left_out["the plain call raises"] <= 1


@since_5_21
@pytest.mark.parametrize("drafter", speculation.DRAFTERS)
def test_speculation_is_plain_decoding_row_for_row(drafter: str) -> None:
    """All drafters on random families, batches and options; more with ``tests.parity.speculation``."""
    compare_drawn(drafter, 8, seed=11, count=160)


@pytest.mark.parametrize("error", [0.0, 1e-5, 1e-2])
def test_only_rounding_errors_are_excused(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """A wrong hidden state is found, in float64 even if it is less wrong than float32 rounds."""
    verify = Executor.verify

    def wrong(*args: Any, **kwargs: Any) -> Any:
        outputs = verify(*args, **kwargs)
        outputs.hidden_states = tuple(states + error for states in outputs.hidden_states)
        return outputs

    monkeypatch.setattr(Executor, "verify", wrong)
    options = {"repetition_penalty": 1.3, "hidden_states": ["hidden_states", "scores"]}
    case = Case("mllama", GREEDY, 3, seed=375, options=options)
    tokens = sequences(run(ours(case.family), case))
    enter = speculation.DRAFTERS["assistant"]
    assert bool(speculation.differences_in_double(case, enter, tokens)) == (error > 0.0)
    if error != 1e-5:  # which float32 may show or not
        found = speculation.check(speculation.Speculated(case, "assistant"))
        assert bool(found) == (error > 0.0)


@torch.no_grad()
def test_a_text_as_long_as_the_image_leaves_the_image_in_the_cache() -> None:
    """Mllama's image has 5 keys here; the text is that long in the first rounds."""
    model = ours("mllama")
    call = FAMILIES["mllama"].inputs(model, 1, False, 3)
    for name in ("input_ids", "cross_attention_mask"):
        call[name] = call[name][:, :2]
    call |= {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**call)
    for n in range(1, 5):
        wrong = Script(torch.where(plain == 7, 8, 7))
        drafted = model.generate(**call, assistant_model=wrong, num_assistant_tokens=n)
        assert torch.equal(plain, drafted)


def test_early_exit_without_room_for_a_draft_refuses_no_model() -> None:
    case = Case("lfm2", GREEDY, 4, seed=312, options={"max_length": 1})
    reason = speculation.check(speculation.Speculated(case, "early exit"))
    assert reason == speculation.NO_EARLY_EXIT["lfm2"]


@since_5_23  # which has all of these families
def test_which_families_are_not_speculated_for() -> None:
    """Of these, without any option: what no drafter can do, and what an assistant cannot."""
    names = (
        "llama bart t5 whisper lfm3 nllb_moe mamba rwkv recurrent_gemma fsmt kosmos2 moshi_speech "
        "reformer minimax cpmant musicgen blip"
    ).split()
    expected = {
        None: 8,
        "a state that cannot be rolled back": 3,
        "several tokens at once are answered otherwise": 2,
        "upstream sees no cache under the model's own cache name": 2,
        "upstream's output changes with drafted tokens": 1,
        "more than one token is written at a time": 1,
    }
    media = {None: 7, "the assistant is not given the media": 1}
    for drafter, reasons in {"oracle": expected, "assistant": expected | media}.items():
        cases = [speculation.Speculated(Case(name, GREEDY, rows=2), drafter) for name in names]
        assert Counter(map(speculation.left_out, cases)) == reasons


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_behind_change_what_minimax_says_of_a_padded_prompt(padded: bool) -> None:
    """Of upstream's own forward, without a cache. So it is not speculated for with padding."""
    case = Case("minimax_m3_vl_text", GREEDY, 3, padded, 623)
    model = upstream(case.family)
    inputs = FAMILIES[case.family].inputs(model, case.rows, padded, case.seed)
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))

    def logits_before(n: int) -> Tensor:
        """Logits of the prompt's tokens, if ``n`` more are fed with them; positions as in generate()."""
        longer = pad(mask, (0, n), value=1)
        positions = (longer.cumsum(dim=1) - 1).clamp(min=0)
        output = model(pad(ids, (0, n), value=9), attention_mask=longer, position_ids=positions)
        return output.logits[:, : ids.shape[1]][mask == 1]

    is_same = torch.allclose(logits_before(0), logits_before(2), atol=1e-4)
    assert is_same == (not padded)
    reason = speculation.left_out(speculation.Speculated(case, "oracle"))
    assert reason == ("several tokens at once are answered otherwise" if padded else None)


@since_5_21
@pytest.mark.parametrize("drafter", speculation.DRAFTERS)
def test_a_seed_fixes_samples_of_all_families(drafter: str) -> None:
    compare_drawn(drafter, 4, seed=5, count=70, mode=SAMPLE)


@pytest.mark.parametrize(
    "drafting",
    [{"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 1}, {"assistant_model": None}],
    ids=["lookup", "early exit", "assistant"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_row_is_what_it_is_alone(
    model: Any, assistant: Any, drafting: Any, cache: str
) -> None:
    drafting = drafting | ({"assistant_model": assistant} if "assistant_model" in drafting else {})
    kwargs = {"max_new_tokens": 24, "cache_implementation": cache}
    together = model.generate(IDS, attention_mask=MASK, **drafting, **kwargs)
    for row in range(len(IDS)):
        ids = IDS[row : row + 1, MASK[row].bool()]
        alone = model.generate(ids, **kwargs)[0, ids.shape[1] :]
        assert together[row, IDS.shape[1] :][: len(alone)].tolist() == alone.tolist()


def test_drafts_are_cut_to_what_a_static_cache_holds(model: Any) -> None:
    kwargs = {"attention_mask": MASK, "max_new_tokens": 8, "cache_implementation": "static"}
    plain = model.generate(IDS, **kwargs)
    assert torch.equal(model.generate(IDS, prompt_lookup_num_tokens=50, **kwargs), plain)


LONGROPE = {"rope_type": "longrope", "short_factor": 4 * [1.0], "long_factor": 4 * [2.0]}


def phi3(**overrides: Any) -> Any:
    """A model that forwards all tokens again, into another cache, when it has more than 16."""
    config = Phi3Config(
        **tiny.SPECIAL,
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        initializer_range=0.3,
        rope_parameters=LONGROPE | {"rope_theta": 1e4},
        **overrides,
    )
    return seeded(lambda: Phi3ForCausalLM(config))


CHANGING_POSITIONS = {
    "another cache": phi3,
    "another cache, windows": partial(phi3, sliding_window=12),
    "longrope": lambda: tiny.llama(
        rope_parameters=LONGROPE
        | {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    ),
    "dynamic": lambda: tiny.llama(
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 20.0},
    ),
}


@pytest.mark.parametrize("n_pads", [0, 6, 20])
@pytest.mark.parametrize("length", [12, 20])
@pytest.mark.parametrize("kind", CHANGING_POSITIONS)
def test_rotary_positions_that_change_with_the_length(kind: str, length: int, n_pads: int) -> None:
    """No forward verifies drafts beyond the change with tokens before it; rejected ones leave a new cache.

    Where all rows are padded, frequencies change at a later column than Phi-3's cache does.
    """
    ids = torch.nn.functional.pad(tiny.prompt(1, length // 2).repeat(1, 2), (n_pads, 0))
    mask = (torch.arange(n_pads + length) >= n_pads).long()[None]
    options = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None}

    def generate(**drafting: Any) -> Tensor:
        # A model of its own: frequencies stay as the last call left them.
        model = hfgen.mix_into(CHANGING_POSITIONS[kind]())
        return model.generate(ids, **options, **drafting)

    plain = generate()
    assert torch.equal(generate(prompt_lookup_num_tokens=3), plain)  # most are rejected
    assert torch.equal(generate(assistant_model=Script(plain), num_assistant_tokens=3), plain)


@pytest.mark.parametrize("drafting", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_that_begins_another_cache(do_sample: bool, drafting: dict[str, int]) -> None:
    ids = tiny.prompt(1, 10).repeat(1, 2)
    results = []
    for make in (phi3, lambda: hfgen.mix_into(phi3())):
        torch.manual_seed(0)
        results.append(make().generate(ids, max_new_tokens=12, do_sample=do_sample, **drafting))
    assert torch.equal(*results)


def test_rows_advance_at_their_own_pace(model: Any) -> None:
    """One row's draft is right, the other's wrong: the first runs ahead and waits for nobody's draft."""
    plain = model.generate(IDS[[0, 2]], max_new_tokens=12, eos_token_id=None)
    scripted = plain.clone()
    scripted[1, IDS.shape[1] :] = (scripted[1, IDS.shape[1] :] + 1) % 90 + 5
    drafter = Script(scripted)
    result = model.generate(
        IDS[[0, 2]],
        max_new_tokens=12,
        eos_token_id=None,
        assistant_model=drafter,
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="constant",
        return_dict_in_generate=True,
        output_speculation=True,
    )
    assert torch.equal(result.sequences, plain)
    first, second = drafter.contexts[:2]
    assert first.known == (8, 8)
    assert second.start == 9  # one token further, all that the second row has
    assert second.known == (12, 9)  # three accepted and one more
    assert result.speculation.generated == 24
    assert 0 < result.speculation.acceptance_rate < 1


def test_several_sequences_per_prompt(model: Any) -> None:
    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5, "top_k": 1}
    plain = model.generate(IDS, attention_mask=MASK, **kwargs)
    drafted = model.generate(IDS, attention_mask=MASK, prompt_lookup_num_tokens=3, **kwargs)
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize("make", [tiny.t5, tiny.bart])
def test_encoder_decoders_in_batches(make: Any) -> None:
    model = hfgen.mix_into(make())
    kwargs = {"attention_mask": MASK, "max_new_tokens": 16}
    plain = model.generate(IDS, **kwargs)
    assert torch.equal(model.generate(IDS, assistant_model=noisy(model), **kwargs), plain)
    assert torch.equal(model.generate(IDS, prompt_lookup_num_tokens=3, **kwargs), plain)


def test_the_assistant_stays_as_it_was(model: Any) -> None:
    assistant = noisy(tiny.llama())
    kind, config = type(assistant), assistant.generation_config.to_dict()
    model.generate(IDS, attention_mask=MASK, assistant_model=assistant, max_new_tokens=6)
    assert type(assistant) is kind
    assert assistant.generation_config.to_dict() == config


# ---------------------------------------------------------------- stopping


class StopAt(StoppingCriteria):
    """Ends all rows at a length, and keeps the lengths at which it was asked."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_is_asked_once_for_each_length(model: Any, rows: int) -> None:
    plain = model.generate(
        IDS[:rows], attention_mask=MASK[:rows], max_new_tokens=12, eos_token_id=None
    )
    criterion = StopAt(13)
    result = model.generate(
        IDS[:rows],
        attention_mask=MASK[:rows],
        max_new_tokens=12,
        eos_token_id=None,
        assistant_model=Script(plain),
        stopping_criteria=StoppingCriteriaList([criterion]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert criterion.asked == [9, 10, 11, 12, 13]
    assert torch.equal(result.sequences, plain[:, :13])
    assert len(result.scores) == 5
    assert result.past_key_values.get_seq_length() == 12  # nothing after the stop


class Streamed:
    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.chunks.append(value)

    def end(self) -> None:
        self.chunks.append(torch.empty(0))


class Uneven(LogitsProcessor):
    """Penalises some tokens; looks at each row by itself, and says so."""

    is_row_wise = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 3.0 * (torch.arange(scores.shape[1]) % 3 == 0)


def test_an_assistant_drafts_with_row_wise_processors(model: Any, assistant: Any) -> None:
    """Chunks of a streamer are upstream's, which hands all processors on."""
    chunks = []
    for library in (tiny.llama(), model):
        streamer = Streamed()
        library.generate(
            IDS[:1], assistant_model=copy.deepcopy(assistant), logits_processor=[Uneven()],
            max_new_tokens=24, eos_token_id=None, streamer=streamer,
        )  # fmt: skip
        chunks.append([chunk.flatten().tolist() for chunk in streamer.chunks])
    assert chunks[0] == chunks[1]
    assert max(map(len, chunks[1][1:])) > 1


#: Fields that work on text, or end a section of it; each changes what the built-in model writes.
ON_TEXT: dict[str, Any] = {
    "bad_words": ["items", "return"],
    "stop_regex": r"\n\s*\w+",
    "thinking_token_budget": 3,
    "dry_multiplier": 0.8,
    "stop_strings": ["return"],
}


@pytest.mark.parametrize("drafting", ["assistant", "early exit"])
@pytest.mark.parametrize("field", ON_TEXT)
def test_fields_that_need_a_tokenizer_with_an_assistant(field: str, drafting: str) -> None:
    model, tokenizer = hfgen.builtin_model()
    texts = ["def quicksort(items):\n", "class Stack:\n    def push(self, item):\n"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    draft: dict[str, Any] = {"assistant_early_exit": 1}
    if drafting == "assistant":
        draft = {"assistant_model": hfgen.builtin_model(draft=True)[0]}
    call = {"tokenizer": tokenizer, "max_new_tokens": 12, "thinking_start": "def"}
    call |= {"thinking_end": "\n"} if field == "thinking_token_budget" else {}
    for value in (ON_TEXT[field], [None, ON_TEXT[field]]):
        plain = model.generate(**inputs, **call, **{field: value})
        assert torch.equal(model.generate(**inputs, **call, **draft, **{field: value}), plain)


#: Two values of fields, for two rows that a model itself drafts for.
OF_TWO_ROWS: dict[str, list[Any]] = {
    "repetition_penalty": [1.0, 3.0],
    "sequence_bias": [{(7,): 50.0}, {(8,): 50.0}],
    "suppress_tokens": [list(range(40)), None],
    "bad_words_ids": [None, [[token] for token in range(10, 60)]],
    "no_repeat_ngram_size": [None, 1],
    "frequency_penalty": [0.0, 2.0],
    "allowed_token_ids": [None, list(range(20, 30))],
    "eos_token_id": [list(range(3, 90)), 2],
    "ignore_eos": [False, True],
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("field", OF_TWO_ROWS)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": [3, 4], "top_k": [5, 60]}])
def test_an_assistant_drafts_with_the_parameters_of_each_row(
    model: Any, sampling: dict[str, Any], field: str, order: int
) -> None:
    call: dict[str, Any] = {field: OF_TWO_ROWS[field][::order], "max_new_tokens": 12, **sampling}
    call |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_speculation": True}
    ids, twin = tiny.prompt(2), copy.deepcopy(model)
    call |= {"assistant_confidence_threshold": 0.0}
    output = model.generate(ids, assistant_model=twin, **call)
    plain = model.generate(ids, **call | {"output_speculation": False})
    assert torch.equal(output.sequences, plain.sequences)
    n_ended = output.finish_reasons.count("eos")  # a draft that ends a row does not count
    assert output.speculation.drafted - output.speculation.accepted <= n_ended
    assert output.speculation.accepted > 0 or n_ended == 2


def test_stop_strings_with_an_assistant(model: Any, assistant: Any) -> None:
    tokenizer = letters(tiny.VOCAB)
    plain = model.generate(IDS[:1], max_new_tokens=16)
    stop = tokenizer.decode(plain[0, 12:14])
    expected = model.generate(IDS[:1], max_new_tokens=16, stop_strings=[stop], tokenizer=tokenizer)
    for drafting in ({"assistant_model": assistant}, {"assistant_model": Script(plain)}):
        streamer = Streamed()
        result = model.generate(
            IDS[:1],
            max_new_tokens=16,
            stop_strings=[stop],
            tokenizer=tokenizer,
            streamer=streamer,
            **drafting,
        )
        assert torch.equal(result, expected)
        assert torch.equal(
            torch.cat([chunk.flatten() for chunk in streamer.chunks[:-1]]), result[0]
        )


def test_a_later_maximum_length_of_the_callers_ends_the_call(model: Any) -> None:
    """Upstream's prompt lookup never ends here."""
    from transformers import MaxLengthCriteria

    criteria = StoppingCriteriaList([MaxLengthCriteria(20)])
    kwargs = {"max_new_tokens": 4, "eos_token_id": None, "stopping_criteria": criteria}
    plain = model.generate(IDS[:1], **kwargs)
    assert plain.shape == (1, 20)
    assert torch.equal(model.generate(IDS[:1], prompt_lookup_num_tokens=3, **kwargs), plain)


# ---------------------------------------------------------------- functions with a state


class Grammar(LogitsProcessor):
    """Has to see every length once, in order, with all rows; allows tokens by the last one's parity."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.length is None or input_ids.shape[1] == self.length + 1
        assert input_ids.is_contiguous()
        self.length = input_ids.shape[1]
        self.seen.append(input_ids[:, -1].tolist())
        parity = input_ids[:, -1:] % 2
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == parity, -torch.inf)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_with_a_state_sees_each_prefix_once(
    model: Any, assistant: Any, rows: int, do_sample: bool
) -> None:
    for drafting in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        grammar = Grammar()
        result = model.generate(
            IDS[:rows],
            attention_mask=MASK[:rows],
            max_new_tokens=10,
            eos_token_id=None,
            do_sample=do_sample,
            logits_processor=[grammar],
            **drafting,
        )
        assert torch.tensor(grammar.seen).T.tolist() == result[:, 7:-1].tolist()
        assert ((result[:, 8:] + result[:, 7:-1]) % 2 == 1).all()


# ---------------------------------------------------------------- sampling


def test_noise_draws_what_multinomial_draws() -> None:
    probabilities = torch.randn(50, 30, generator=torch.Generator().manual_seed(1)).softmax(-1)
    torch.manual_seed(3)
    expected, state = torch.multinomial(probabilities, 1).squeeze(1), torch.get_rng_state()
    torch.manual_seed(3)
    drawn = gumbel_choice(probabilities, exponential_noise((50, 30), probabilities))
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("has_logits", [True, False])
def test_speculative_samples_are_distributed_as_the_targets(has_logits: bool) -> None:
    """100,000 draws of one position; total variation distance as of as many plain draws."""
    rows, vocab = 100_000, 12
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(vocab, generator=generator) * 2
    proposal = torch.randn(vocab, generator=generator) * 2
    torch.manual_seed(0)
    guesses = torch.multinomial(proposal.softmax(-1), rows, replacement=True)
    verification = SpeculativeSampling()
    scores = target.expand(rows, vocab)
    verification.begin(scores[:, None].expand(rows, 2, vocab), has_logits)
    logits = proposal.expand(rows, vocab) if has_logits else None
    guess = DraftColumn(guesses, torch.ones(rows, dtype=torch.bool), logits)
    tokens, is_accepted = verification.choose(0, scores, guess)
    assert 0 < is_accepted.float().mean() < 1
    frequencies = tokens.bincount(minlength=vocab) / rows
    distance = (frequencies - target.softmax(-1)).abs().sum() / 2
    assert distance < 0.01  # plain draws: 0.004 on average


@pytest.mark.parametrize("drafting", ["lookup", "assistant"])
def test_sequences_of_a_batch_are_distributed_as_plain_samples(
    model: Any, assistant: Any, drafting: str
) -> None:
    """20,000 sequences of three tokens; their joint distribution against the model's own."""
    rows, n = 20_000, 3
    small = hfgen.mix_into(tiny.llama(vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    prompt = torch.tensor([[3, 4, 5, 3, 4]])
    kwargs = (
        {"prompt_lookup_num_tokens": 2}
        if drafting == "lookup"
        else {"assistant_model": noisy(small, 0.5)}
    )
    torch.manual_seed(0)
    drawn = small.generate(
        prompt, do_sample=True, top_k=0, temperature=2.0, num_return_sequences=rows,
        max_new_tokens=n, eos_token_id=None, num_assistant_tokens=2, **kwargs,
    )[:, -n:]  # fmt: skip
    index = torch.cartesian_prod(*[torch.arange(8)] * n)
    ids = torch.cat([prompt.expand(len(index), -1), index], dim=1)
    with torch.no_grad():
        log_probs = (small(ids).logits / 2.0).log_softmax(-1)
    log_probs = log_probs[:, -n - 1 : -1].gather(2, index[:, :, None]).squeeze(2)
    expected = log_probs.sum(1).exp()
    weights = torch.tensor([64, 8, 1])
    frequencies = (drawn * weights).sum(1).bincount(minlength=512) / rows
    distance = float((frequencies - expected).abs().sum() / 2)
    plain = torch.multinomial(expected, rows, replacement=True).bincount(minlength=512) / rows
    assert distance < 1.3 * float((plain - expected).abs().sum() / 2)


def test_a_greedy_ensemble_of_one_row_is_upstreams() -> None:
    """Tokens depend on where drafts end: what was not drafted for is the target's choice alone."""
    theirs, mine = tiny.llama(), hfgen.mix_into(tiny.llama())
    kwargs: dict[str, Any] = {"max_new_tokens": 14, "assistant_ensemble_weight": 0.1}
    for seed in range(4):
        helper = noisy(theirs, 0.3)
        torch.manual_seed(seed)
        ids = torch.randint(5, 97, (1, 8))
        expected = theirs.generate(ids, assistant_model=helper, **kwargs)
        found = mine.generate(ids, assistant_model=hfgen.mix_into(copy.deepcopy(helper)), **kwargs)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("schedule", [None, "constant", "heuristic", "heuristic_transient"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_that_is_to_draft_nothing(do_sample: bool, schedule: str | None) -> None:
    theirs, mine, helper = tiny.llama(), hfgen.mix_into(tiny.llama()), tiny.llama()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": do_sample, "eos_token_id": None}
    helper.generation_config.num_assistant_tokens = 0
    helper.generation_config.num_assistant_tokens_schedule = schedule
    if schedule in ("heuristic", "heuristic_transient"):
        with pytest.raises(RuntimeError):
            theirs.generate(IDS[:1], assistant_model=copy.deepcopy(helper), **options)
        with pytest.raises(ValueError, match="`num_assistant_tokens` has to be at least 1"):
            mine.generate(IDS[:1], assistant_model=helper, **options)
        return
    found = []
    for model in theirs, mine:
        torch.manual_seed(0)
        found.append(model.generate(IDS[:1], assistant_model=copy.deepcopy(helper), **options))
    assert found[0].tolist() == found[1].tolist()
    output = mine.generate(
        IDS[:1], assistant_model=tiny.llama(), num_assistant_tokens=0, output_speculation=True,
        return_dict_in_generate=True, **options | {"do_sample": False},
    )  # fmt: skip
    assert output.speculation.drafted == 0


class Rambling(Script):
    """Drafts tokens of its own, right by chance; has the two methods alone."""

    def draft(self, context: DraftContext) -> Draft | None:
        self.contexts.append(context)
        columns = torch.arange(context.start, context.end).expand(len(context.ids), -1)
        return Draft(5 + (columns * 7 + len(self.contexts)) % 90)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "drafting", ["lookup", "assistant", "early exit", "own", "several", "several drafted"]
)
def test_a_seed_fixes_the_samples(model: Any, assistant: Any, drafting: str, rows: int) -> None:
    """However long the forwards take, and so whatever else the machine does."""
    kwargs: dict[str, Any] = {
        "lookup": lambda: {"prompt_lookup_num_tokens": 4},
        "assistant": lambda: {"assistant_model": assistant},
        "early exit": lambda: {"assistant_early_exit": 1},
        "own": lambda: {"assistant_model": Rambling(IDS)},
        "several": lambda: {"prompt_lookup_num_tokens": 4, "num_return_sequences": 3},
        "several drafted": lambda: {"assistant_model": assistant, "num_return_sequences": 3},
    }
    drawn, delays = set(), random.Random(0)
    with model.model.register_forward_hook(lambda *_: time.sleep(delays.choice((0.0, 0.004)))):
        for _ in range(3):
            torch.manual_seed(3)
            tokens = model.generate(
                IDS[:rows], attention_mask=MASK[:rows], do_sample=True, temperature=0.7,
                max_new_tokens=16, eos_token_id=None, **kwargs[drafting](),
            )  # fmt: skip
            drawn.add(str(tokens.tolist()))
    assert len(drawn) == 1


# ---------------------------------------------------------------- drafting


def draft_of(drafter: PromptLookup, ids: list[list[int]], known: tuple[int, ...], n: int) -> list:
    tensor = torch.tensor(ids)
    context = DraftContext(tensor, known, (False,) * len(ids), min(known), n)
    draft = drafter.draft(context)
    return [[]] * len(ids) if draft is None else draft.tokens.tolist()


def test_prompt_lookup_by_hand() -> None:
    drafter = PromptLookup(max_ngram=2)
    # (2, 3) was followed by 4, 5; 3 alone first by 9; the longest n-gram goes first
    assert draft_of(drafter, [[3, 9, 2, 3, 4, 5, 2, 3]], (8,), 3) == [[4, 5, 2]]
    # of two occurrences the earliest; the draft ends with what is known
    assert draft_of(drafter, [[1, 2, 7, 1, 2, 8, 1, 2]], (8,), 8) == [[7, 1, 2, 8, 1, 2]]
    # nothing occurred before
    assert draft_of(drafter, [[1, 2, 3, 4]], (4,), 2) == [[]]
    # an EOS is not drafted, nor what follows it
    eos = PromptLookup(max_ngram=2, eos=torch.tensor([5]))
    assert draft_of(eos, [[3, 9, 2, 3, 4, 5, 2, 3]], (8,), 3) == [[4]]


def test_prompt_lookup_of_rows_of_different_length() -> None:
    drafter = PromptLookup(max_ngram=2)
    ids = [[1, 2, 7, 1, 2, 99, 99, 99], [4, 5, 6, 4, 5, 6, 4, 99]]
    # columns stand for positions 5, 6, 7: the second row knows the first two of them
    (first, second) = draft_of(drafter, ids, (5, 7), 3)
    assert first == [7, 1, 2]
    assert second[2] == 5  # what it knows is not looked at


def test_heuristic_schedule_and_what_it_keeps(model: Any) -> None:
    schedule = Heuristic(5)
    schedule.observe(Acceptance((5,), (5,), 0), 6, 5)
    assert schedule.n_tokens == 7
    schedule.observe(Acceptance((7,), (2,), 0), 3, 7)
    assert schedule.n_tokens == 6
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    model.generate(IDS[:1], assistant_model=assistant, max_new_tokens=12, eos_token_id=None)
    assert assistant.generation_config.num_assistant_tokens > 4  # it is always right


def played(schedule: Adaptive, accepts: float, n_rounds: int) -> tuple[list[int], float]:
    """Lengths of the drafts, and tokens in the time of a plain forward, by the schedule's own costs."""
    generator = torch.Generator().manual_seed(0)
    costs, lengths, tokens, spent = schedule.costs, [], 0, 0.0
    for _ in range(n_rounds):
        n = schedule.width([schedule.n_tokens]) if schedule.n_tokens else 0
        accepted = 0
        while accepted < n and torch.rand((), generator=generator) < accepts:
            accepted += 1
        lengths.append(n)
        tokens, spent = tokens + accepted + 1, spent + costs.forward(n) + costs.drafter * n
        schedule.observe(Acceptance((n,), (accepted,), 0), accepted + 1, n)
    return lengths, tokens / spent


@pytest.mark.parametrize(
    ("accepts", "cost", "rows", "expected"),
    [
        (1.0, 0.1, 1, range(8, 9)),
        (1.0, 0.0, 8, range(8, 9)),
        (0.8, 0.1, 1, range(2, 8)),
        (0.0, 0.1, 1, range(1)),
        (0.9, 1.0, 1, range(1)),
        (0.2, 0.0, 8, range(1)),
    ],
)
def test_adaptive_schedule(accepts: float, cost: float, rows: int, expected: range) -> None:
    """Long drafts where they are accepted and cheap, none where they do not pay but for rare trials."""
    lengths, speed = played(Adaptive(8, Costs(rows, cost)), accepts, 300)
    settled = lengths[30:]
    assert sum(n in expected for n in settled) > 0.8 * len(settled)
    if expected.stop > 1:
        assert speed > 1.1
    else:
        assert speed > 0.97
        assert 0 < sum(n > 0 for n in lengths) < 20


def test_what_a_call_may_lose_is_bounded() -> None:
    """Whatever is accepted at first: an account pays for drafts, and holds no more than ``MOST``."""
    schedule = Adaptive(20, Costs(rows=8))
    _, speed = played(schedule, 1.0, 100)
    assert speed > 2
    n_rounds = 500
    _, speed = played(schedule, 0.0, n_rounds)
    assert n_rounds / speed <= n_rounds * (1 + Adaptive.SHARE) + Adaptive.MOST


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 8}, {"assistant_early_exit": 1}])
def test_drafts_change_tokens_in_bfloat16_only_where_two_are_equally_likely(
    options: dict[str, Any],
) -> None:
    """A forward of several tokens rounds differently; docs/speculation.md says so."""
    model = hfgen.mix_into(tiny.llama()).to(torch.bfloat16)
    call: dict[str, Any] = {"do_sample": False, "max_new_tokens": 160, "eos_token_id": None}
    both = [model.generate(tiny.prompt(8), **call, **more) for more in ({}, options)]
    for plain, drafted in zip(*both, strict=True):
        if (differs := plain != drafted).any():
            at = int(differs.nonzero()[0])
            with torch.no_grad():
                logits = model(plain[None, :at]).logits[0, -1].float()
            likely = logits[torch.stack([plain[at], drafted[at]])]
            assert logits.max() - likely.min() <= 4 * 2.0**-7 * logits.abs().max()


def test_columns_that_a_row_cannot_fill_are_not_fed() -> None:
    assert Schedule(8).width([8, 3, 5]) == 8
    schedule = Adaptive(8)
    assert schedule.width([8, 0, 5]) == 0
    assert 0 < schedule.width([8, 3, 5]) <= 3


def test_cost_of_a_draft_is_the_measured_one() -> None:
    """8 of 30 layers of a 135M model take 0.40 of its time in a call, and the built-in draft 0.24 of its model's.

    Its forwards alone take 0.14; in a call, a step of a draft takes 1.7 times the forward.
    """
    (target, _), (draft, _) = hfgen.builtin_model(), hfgen.builtin_model(draft=True)
    assert relative_cost(draft, target) == pytest.approx(0.24, abs=0.03)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for n_layers, measured in ((1, 0.20), (4, 0.26), (8, 0.40), (15, 0.56)):
        cost = relative_cost(first_layers(model, n_layers), model)
        assert cost == pytest.approx(measured, abs=0.04)


HUGE = 10**6


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": HUGE},
        {"prompt_lookup_num_tokens": HUGE},
        {"prompt_lookup_num_tokens": HUGE, "num_assistant_tokens_schedule": "adaptive"},
        {"assistant_early_exit": 1, "num_assistant_tokens": HUGE},
        {"prompt_lookup_num_tokens": 2, "num_assistant_tokens_schedule": "heuristic"},
    ],
)
def test_numbers_cost_what_the_sequence_can_use(
    model: Any, kwargs: dict[str, Any], do_sample: bool
) -> None:
    """Counted in operations, which a loop or a tensor of the given size would multiply."""
    for rows in (1, 2):
        call = {"attention_mask": MASK[:rows], "max_new_tokens": 6, "do_sample": do_sample}
        counted = Operations()
        with counted:
            model.generate(IDS[:rows], **call, **kwargs)
        assert counted.number < 20_000
        assert counted.largest < 200_000


class Operations(TorchDispatchMode):
    """Counts operations, and the elements of the largest result."""

    number = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.number += 1
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_statistics(model: Any) -> None:
    plain = model.generate(IDS[:1], max_new_tokens=12, eos_token_id=None)
    result = model.generate(
        IDS[:1], max_new_tokens=12, eos_token_id=None, assistant_model=Script(plain),
        num_assistant_tokens=3, return_dict_in_generate=True, output_speculation=True,
    )  # fmt: skip
    # 3 drafted and 1 more, three times; one position is left without a draft in the end
    stats = result.speculation
    assert (stats.drafted, stats.accepted, stats.generated) == (9, 9, 12)
    assert (stats.rounds, stats.forwards) == (3, 3)
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_forward == 4.0
    config = GenerationConfig(
        output_speculation=True, return_dict_in_generate=True, max_new_tokens=4
    )
    assert model.generate(IDS[:1], config, prompt_lookup_num_tokens=2).speculation.forwards > 0


def test_other_devices_are_kept_company(model: Any) -> None:
    """With ``synced_gpus``, a device that is done forwards on until all are."""
    left = [3]

    class Synced(type(model)):
        def _has_unfinished_sequences(self, finished: bool, synced: bool, device: Any) -> bool:
            assert synced
            left[0] -= finished
            return not finished or left[0] >= 0

    plain = model.generate(IDS[:1], max_new_tokens=6, eos_token_id=None)
    other = hfgen.mix_into(tiny.llama())
    other.__class__ = Synced
    forwards = []
    with other.register_forward_hook(lambda *_: forwards.append(1)):
        result = other.generate(
            IDS[:1], max_new_tokens=6, eos_token_id=None, assistant_model=Script(plain),
            num_assistant_tokens=5, num_assistant_tokens_schedule="constant", synced_gpus=True,
        )  # fmt: skip
    assert torch.equal(result, plain)
    assert len(forwards) == 2 + 3  # the prompt, a round, and company


# ---------------------------------------------------------------- failures


def _early_exit_watched(model: Any, hook: Any) -> Tensor:
    """Drafts with the first of two layers; ``hook`` is called in every forward of that layer."""
    layer = model.model.layers[0]
    forward = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        hook()
        return forward(*args, **kwargs)

    layer.forward = watched
    try:
        result: Tensor = model.generate(IDS[:1], assistant_early_exit=1, max_new_tokens=6)
    finally:
        del layer.forward
    return result


def test_early_exit_leaves_the_model_alone_while_it_drafts(model: Any) -> None:
    layers, config, seen = model.model.layers, model.config, []
    plain = model.generate(IDS[:1], max_new_tokens=6)

    def watch() -> None:
        seen.append((len(model.model.layers), model.config.num_hidden_layers))

    assert torch.equal(_early_exit_watched(model, watch), plain)
    assert set(seen) == {(2, 2)}
    assert model.model.layers is layers
    assert model.config is config


def test_a_call_from_a_hook_while_the_first_layers_draft(model: Any) -> None:
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=6)
    inner, calls = [], iter(range(3))

    def call() -> None:
        if next(calls, None) is not None:  # the call inside comes by here, too
            inner.append(model.generate(IDS, attention_mask=MASK, max_new_tokens=6))

    _early_exit_watched(model, call)
    assert len(inner) == 3
    assert all(torch.equal(tokens, plain) for tokens in inner)


def test_a_plain_call_beside_one_that_exits_early(model: Any) -> None:
    """Two threads on one model, which meet in every forward of the draft."""
    kwargs = {"attention_mask": MASK, "max_new_tokens": 8}
    plain = model.generate(IDS, **kwargs)
    drafting, done, beside = threading.Event(), threading.Event(), []

    def decode() -> None:
        drafting.wait(10)
        beside.append(model.generate(IDS, **kwargs))
        done.set()

    thread = threading.Thread(target=decode)
    thread.start()

    def meet() -> None:
        if threading.current_thread() is not thread:
            drafting.set()
            done.wait(10)

    _early_exit_watched(model, meet)
    thread.join()
    assert torch.equal(beside[0], plain)


def test_a_draft_that_fails_leaves_the_model_alone(model: Any) -> None:
    def fail() -> None:
        raise RuntimeError("while drafting")

    with pytest.raises(ValueError, match=r"first 1 layers .*while drafting"):
        _early_exit_watched(model, fail)
    assert len(model.model.layers) == model.config.num_hidden_layers == 2


def test_first_layers_of_a_model_whose_forward_was_replaced() -> None:
    """Dispatched models have a forward of their own on the instance, bound to it."""
    accelerate = pytest.importorskip("accelerate")
    model: Any = tiny.llama()
    for module in (model, model.model):
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    view, calls = first_layers(model, 1), []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    view(IDS)
    model(IDS)
    assert calls == [0, 0, 1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt_lookup_num_tokens": 0}, "`prompt_lookup_num_tokens` has to be at least 1"),
        ({"assistant_early_exit": 3}, "1 to 2, but is 3"),
        ({"assistant_early_exit": 0}, "1 to 2, but is 0"),
        ({"prompt_lookup_num_tokens": 2, "use_cache": False}, "use_cache"),
        (
            {"prompt_lookup_num_tokens": 2, "assistant_ensemble_weight": 0.5},
            "`assistant_ensemble_weight`",
        ),
        (
            {"prompt_lookup_num_tokens": 2, "num_assistant_tokens_schedule": "slow"},
            "has to be one of",
        ),
        ({"prompt_lookup_num_tokens": 2, "output_speculation": True}, "return_dict_in_generate"),
    ],
)
def test_bad_input(model: Any, kwargs: dict[str, Any], message: str) -> None:
    calls = []
    hook = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(IDS[:1], **{"max_new_tokens": 4} | kwargs)
    hook.remove()
    assert not calls


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_that_returns_the_last_logits_alone(do_sample: bool) -> None:
    """Drafts cannot be verified by them: upstream raises from within its loop, or returns other tokens."""

    class LastLogits(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits[:, -1:]
            return outputs

    theirs = tiny.llama()
    theirs.__class__ = LastLogits
    drafting = {"prompt_lookup_num_tokens": 3, "do_sample": do_sample, "max_new_tokens": 8}
    with pytest.raises((RuntimeError, IndexError)):
        theirs.generate(IDS[:1], **drafting)
    with pytest.raises(RuntimeError, match="LastLogits was fed 3 drafted tokens"):
        hfgen.mix_into(theirs).generate(IDS[:1], **drafting)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_assistant_with_an_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    assistant = peft.get_peft_model(tiny.llama(), config).eval()
    kwargs = {"attention_mask": MASK, "max_new_tokens": 8}
    plain = model.generate(IDS, **kwargs)
    assert torch.equal(model.generate(IDS, assistant_model=assistant, **kwargs), plain)


def test_an_assistant_that_is_none(model: Any) -> None:
    with pytest.raises(TypeError, match=r"`assistant_model` has to be a model.* but is str"):
        model.generate(IDS[:1], assistant_model="small")


def test_an_assistant_with_a_state_that_cannot_be_rolled_back(model: Any) -> None:
    from tests.parity.harness import FAMILIES

    mamba = FAMILIES["mamba"].build()
    mamba.config.vocab_size = tiny.VOCAB
    with pytest.raises(ValueError, match="cannot be rolled back"):
        model.generate(IDS[:1], assistant_model=mamba)


ROWS = 2
FINE = torch.full((ROWS, 2), 7)
INT64 = r"int64 tokens of shape \(2, at most 3\)"

#: What a drafter may get wrong in its answer to rows, and what it is told.
NONSENSE: dict[str, tuple[Any, type[Exception], str]] = {
    "no draft": (FINE, TypeError, r"hfgen.Draft or None.*returned Tensor"),
    "tokens in a list": (Draft([[7, 7]]), TypeError, r"int64 tokens.*returned list"),
    "one dimension": (Draft(FINE[0]), ValueError, INT64 + r".*shape \(2,\)"),
    "rows": (Draft(FINE[:1]), ValueError, INT64 + r".*shape \(1, 2\)"),
    "columns": (Draft(FINE.repeat(1, 4)), ValueError, INT64 + r".*shape \(2, 8\)"),
    "type": (Draft(FINE.float()), ValueError, INT64 + r".*torch.float32"),
    "above the vocabulary": (Draft(FINE + 90), ValueError, r"0 to 96, or -1.*returned 97 for row 0"),
    "below -1": (Draft(FINE - 9), ValueError, r"0 to 96, or -1.*returned -2 for row 0"),
    "shape of logits": (
        Draft(FINE, torch.zeros(ROWS, 97)), ValueError, r"logits of shape \(2, 2, 97\).*\(2, 97\)",
    ),
    "width of logits": (
        Draft(FINE, torch.zeros(ROWS, 2, 5)), ValueError, r"logits of shape \(2, 2, 97\).*\(2, 2, 5\)",
    ),
    "logits in a list": (Draft(FINE, [0.0]), TypeError, r"logits .*returned list"),
    "an exception of its own": (KeyError("mine"), KeyError, "mine"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_drafter_that_answers_nonsense(model: Any, name: str, do_sample: bool) -> None:
    answer, error, message = NONSENSE[name]

    class Wrong(Script):
        def draft(self, context: DraftContext) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    drafter = Wrong(IDS)
    if not isinstance(answer, Exception):
        message = r"Wrong\.draft\(\) has to return.*" + message
    with pytest.raises(error, match=message):
        model.generate(
            IDS[[0, 2]], assistant_model=drafter, num_assistant_tokens=3, max_new_tokens=8,
            do_sample=do_sample,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["draft", "observe"])
def test_a_drafter_that_lacks_a_method(model: Any, name: str) -> None:
    kind = type("Half", (), {name: lambda self, context: None})
    calls = []
    with (
        model.model.register_forward_pre_hook(lambda *_: calls.append(1)),
        pytest.raises(TypeError, match=r"methods draft\(\) and observe\(\).*but is Half"),
    ):
        model.generate(IDS[:1], assistant_model=kind(), max_new_tokens=4)
    assert not calls


@pytest.mark.parametrize("base", [object, hfgen.Drafter])
def test_a_drafter_with_the_two_methods_alone(model: Any, base: type) -> None:
    """With the base class ``observe`` may be left out, and int tokens of another device are moved."""
    plain = model.generate(IDS[:1], max_new_tokens=8, eos_token_id=None)

    class Known(base):  # type: ignore[misc, valid-type]
        def draft(self, context: DraftContext) -> Draft:
            return Draft(plain[:, context.start : context.end])

    if base is object:
        Known.observe = lambda self, verdict: None  # type: ignore[attr-defined]
    result = model.generate(
        IDS[:1], max_new_tokens=8, eos_token_id=None, assistant_model=Known(),
        return_dict_in_generate=True, output_speculation=True,
    )  # fmt: skip
    assert torch.equal(result.sequences, plain)
    assert result.speculation.acceptance_rate == 1.0
