"""Assistants with another tokenizer (``decoding/drafters/translated.py``)."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import hfgen
from hfgen.decoding.drafters.base import DraftContext
from hfgen.decoding.drafters.translated import Row, UniversalDrafter
from hfgen.families import CACHE
from hfgen.state.text import Spelling, shared_tokens
from tests.parity.family import seeded
from tests.tiny import llama
from tests.versions import with_cache

#: Old sources of this project, which no change to the present ones changes.
CORPUS = Path(__file__).parent / "golden" / "corpus.txt"
#: What the trained models know by heart: indents, repetitions, characters of several bytes.
TEXT = '''def mean(values: list[float]) -> float:
    """The average, or 0.0 where there are no values: même à la fin."""
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values) if values else 0.0
'''


def wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


@cache
def byte_level(size: int = 400, pattern: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's; pads with 0, ends with 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    return wrapped(tokenizer, pad_token="<pad>", eos_token="</s>")


@cache
def sentence_piece(size: int = 300) -> PreTrainedTokenizerFast:
    """BPE with ``▁`` for spaces, one before the text, and BOS, as Llama's; unknown characters occur."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "<end>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(set(TEXT)),
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<end>")


@cache
def words(size: int = 200) -> PreTrainedTokenizerFast:
    """Words in lower case without the spaces between them: the text cannot be had back."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[EOS]"]
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    tokenizer.train([str(CORPUS)], trainer)
    return wrapped(tokenizer, unk_token="[UNK]", eos_token="[EOS]")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_level(330, pattern=False),
    "sentencepiece": sentence_piece,
    "words": words,
}


def untrained(tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Any:
    """A tiny model of random weights for the tokenizer."""
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return hfgen.mix_into(llama(vocab_size=len(tokenizer), **special, **overrides))


class Reader(PreTrainedModel, hfgen.GenerationMixin):
    """Says ``TEXT`` from wherever the context has got to in it, then EOS, in the tokens of its tokenizer.

    Its cache holds the ids themselves, so that a cache that was not rolled back right shows. After
    every ``slips`` characters or so it errs.
    """

    config_class = PreTrainedConfig

    def __init__(self, tokenizer: PreTrainedTokenizerFast, slips: int = 0) -> None:
        vocab = len(tokenizer)
        super().__init__(PreTrainedConfig(vocab_size=vocab, num_hidden_layers=1))
        self.embedding = nn.Embedding(vocab, 1)
        self.generation_config.update(pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
        self.spelling, self.slips = Spelling(tokenizer, vocab), slips
        canonical = [*self.spelling.ids(TEXT), tokenizer.eos_token_id]
        #: Which token comes after which beginning of the text.
        self.after = {
            self.spelling.text(canonical[:n]): canonical[n] for n in range(len(canonical))
        }
        tokens = tokenizer.convert_ids_to_tokens(range(vocab))
        for sign, character in {"Ġ": " ", "▁": " ", "Ċ": "\n"}.items():
            tokens = [token.replace(sign, character) for token in tokens]
        self.pieces = tokens
        self.known: dict[str, Tensor] = {}
        self.forwarded = 0
        self.eval()

    @with_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        columns = input_ids[:, None, :, None].float()
        everything = past_key_values.update(columns, columns, 0)[0][:, 0, :, 0].long()
        rows, n = input_ids.shape
        self.forwarded += n
        logits = torch.zeros(rows, n, self.config.vocab_size)
        for row in range(rows):
            for position in range(n):
                end = everything.shape[1] - n + position + 1
                ids = everything[row, :end]
                if attention_mask is not None:
                    ids = ids[attention_mask[row, :end].bool()]
                text = self.spelling.text(ids.tolist())
                if text not in self.known:
                    self.known[text] = self.scores(text)
                logits[row, position] = self.known[text]
        return CausalLMOutputWithPast(logits=logits, **{CACHE: past_key_values})

    def scores(self, text: str) -> Tensor:
        """The text's own next token first, then other ways to write what comes next."""
        rest = TEXT[len(text) :] if TEXT.startswith(text) else ""
        goes_on = torch.tensor([bool(piece) and rest.startswith(piece) for piece in self.pieces])
        length = torch.tensor([len(piece) for piece in self.pieces])
        scores = torch.where(goes_on, 10.0 + length.clamp(max=8), 0.0)
        ids = self.spelling.ids(rest)
        eos = int(self.spelling.tokenizer.eos_token_id)
        scores[self.after.get(text, ids[0] if ids else eos)] = 20.0
        if self.slips and len(text) % self.slips == 0:
            scores[len(text) % len(scores)] = 25.0
        return scores

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def prompts(texts: list[str]) -> dict[str, Tensor]:
    """Left-padded, in the target's tokens."""
    return dict(byte_level()(texts, return_tensors="pt", padding=True, return_token_type_ids=False))


#: One row; rows of different lengths, one of which ends amid a word.
BATCHES = ([TEXT[:30]], [TEXT[:30], TEXT[:77], TEXT[:5]])


def both(
    model: Any, inputs: dict[str, Tensor], assistant: Any, other: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """The same call without the assistant and with it."""
    kwargs |= {"return_dict_in_generate": True, "output_speculation": True}
    kwargs = {"tokenizer": byte_level(), "max_new_tokens": 160, "do_sample": False} | kwargs
    plain = model.generate(**inputs, **kwargs)
    drafted = model.generate(
        **inputs, **kwargs, assistant_model=assistant, assistant_tokenizer=other
    )
    return plain, drafted


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slips", [0, 7])
@pytest.mark.parametrize("texts", BATCHES, ids=["row", "batch"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_greedy_tokens_are_those_without_the_assistant(
    name: str, texts: list[str], slips: int
) -> None:
    other = TOKENIZERS[name]()
    model, assistant = Reader(byte_level()), Reader(other, slips)
    n_new = 40 if name == "words" else 160
    kwargs = {"max_new_tokens": n_new, "num_assistant_tokens_schedule": "constant"}
    plain, drafted = both(model, prompts(texts), assistant, other, **kwargs)
    assert torch.equal(plain.sequences, drafted.sequences)
    if name == "words":  # of which hardly one can be had back
        return
    assert byte_level().decode(drafted.sequences[0], skip_special_tokens=True) == TEXT
    stats = drafted.speculation
    assert stats.acceptance_rate > (0.6 if slips else 0.9)
    assert stats.forwards < (40 if slips else 20)
    if len(texts) == 1:
        assert assistant.forwarded < 1000  # the cache is kept: the text has about 130 tokens


@pytest.mark.parametrize("texts", BATCHES, ids=["row", "batch"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_greedy_tokens_of_models_that_disagree(name: str, texts: list[str]) -> None:
    other = TOKENIZERS[name]()
    model = untrained(byte_level())
    plain, drafted = both(
        model, prompts(texts), untrained(other), other,
        max_new_tokens=40, num_assistant_tokens_schedule="constant",
    )  # fmt: skip
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.speculation.drafted > 0


def test_the_end_is_translated() -> None:
    other = sentence_piece()
    plain, drafted = both(
        Reader(byte_level()), prompts([TEXT[:-12]]), Reader(other), other,
        num_assistant_tokens=20, num_assistant_tokens_schedule="constant",
    )  # fmt: skip
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.sequences[0, -1] == byte_level().eos_token_id
    assert drafted.speculation.forwards == 1


def test_stop_strings_and_streamers() -> None:
    class Collector:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    other = TOKENIZERS["bytes"]()
    model, assistant = Reader(byte_level()), Reader(other, 11)
    plain, drafted = both(model, prompts(BATCHES[1]), assistant, other, stop_strings=["total +"])
    assert torch.equal(plain.sequences, drafted.sequences)
    streamer = Collector()
    drafted = model.generate(
        **prompts(BATCHES[0]),
        max_new_tokens=60,
        tokenizer=byte_level(),
        assistant_model=assistant,
        assistant_tokenizer=other,
        streamer=streamer,
    )
    assert streamer.tokens == [*drafted[0].tolist(), -1]


@pytest.mark.parametrize("kind", ["sliding", "positions"])
def test_assistants_of_other_kinds(kind: str) -> None:
    """Whose cache can hardly be rolled back; whose positions end before the text."""
    other = sentence_piece()
    config = {"vocab_size": len(other), "num_hidden_layers": 1, "hidden_size": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 2}
    config |= {"intermediate_size": 16, "bos_token_id": 1, "pad_token_id": None}
    if kind == "sliding":
        assistant: Any = seeded(
            lambda: MistralForCausalLM(MistralConfig(**config, sliding_window=9, head_dim=8))
        )
    else:
        positions = GPT2Config(
            vocab_size=len(other), n_positions=60, n_embd=16, n_layer=1, n_head=2, eos_token_id=2
        )
        assistant = seeded(lambda: GPT2LMHeadModel(positions))
    assistant = hfgen.mix_into(assistant)
    plain, drafted = both(
        Reader(byte_level()),
        prompts(BATCHES[1]),
        assistant,
        other,
        assistant_confidence_threshold=0.0,
        num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant",
        max_new_tokens=40,
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.speculation.drafted > 0


def t5(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_ff=16,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        initializer_factor=3.0,
    )
    return hfgen.mix_into(seeded(lambda: T5ForConditionalGeneration(config)))


def test_encoders_read_their_own_tokens() -> None:
    other = TOKENIZERS["words"]()
    assistant = t5(other)
    seen: list[Tensor] = []
    assistant.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    texts = ["def mean", "return total / total for value in values"]
    plain, drafted = both(t5(byte_level()), prompts(texts), assistant, other, max_new_tokens=20)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.speculation.drafted > 0
    assert seen[0][1].tolist() == other.encode(texts[1])


# --- the text window ------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.encoded = tokenizer, 0

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.encoded += len(text)
        return self.tokenizer.encode(text, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_long_texts_are_encoded_once(name: str) -> None:
    target, other = byte_level(), TOKENIZERS[name]()
    text = CORPUS.read_text(encoding="utf-8")[:5000]
    text = "".join(character for character in text if character.isascii())
    tokens = target.encode(text)
    counting = Counting(other)
    row = Row(Spelling(target, len(target)), Spelling(counting, len(other)), 10, 10)
    row.tokens += tokens[:1500]
    row.context()
    counting.encoded = 0
    for start in range(1500, len(tokens), 4):
        row.tokens += tokens[start : start + 4]
        context = row.context()
        whole = target.decode(tokens[: start + 4])
        assert other.decode(context) == whole or other.decode(context[1:]) == whole
    n_rounds = len(range(1500, len(tokens), 4))
    assert counting.encoded / n_rounds < 150  # characters, of 5,000
    canonical = other.encode(text, add_special_tokens=False)
    assert len(context) <= 1.01 * len(canonical)  # cuts leave hardly a trace


def test_characters_of_several_bytes_are_left_to_the_assistant() -> None:
    target, other = byte_level(), sentence_piece()
    text = "values: mê"
    tokens = target.encode(text)
    assert target.decode(tokens[:-1]).endswith("\ufffd")
    row = Row(Spelling(target, len(target)), Spelling(other, len(other)), 10, 10)
    row.tokens += tokens[:-1]
    assert other.decode(row.context()) == "values: m"
    assert row.follow(other.encode("ême", add_special_tokens=False)) in ([], tokens[-1:])
    drafted = [other.convert_tokens_to_ids(token) for token in ("ê", "m", "e")]
    assert target.decode(tokens[:-1] + row.follow(drafted)) == "values: même"


@pytest.mark.parametrize("n_open", [1, 3])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_drafts_do_not_depend_on_the_rounds_before(kind: str, n_open: int) -> None:
    """What was fed and is no longer so is forgotten, and rows that drift apart are read anew."""
    target, other = byte_level(), sentence_piece()
    window = {"sliding_window": 9} if kind == "sliding" else {}
    config = MistralConfig(
        vocab_size=len(other), hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, eos_token_id=2,
        initializer_range=0.5, **({"sliding_window": None} | window),
    )  # fmt: skip
    assistant = hfgen.mix_into(seeded(lambda: MistralForCausalLM(config)))
    drafter, inputs = captured(untrained(target), assistant, other)
    length = inputs["input_ids"].shape[1]
    texts = [
        "return total / len(values) ",
        "e$f$r$t$y$u$i$d$h$j$k$q$z$x",
        "total values total values ",
    ]
    new = [[target.encode(character)[0] for character in (2 * text)[:28]] for text in texts]
    ids = torch.cat([inputs["input_ids"], torch.tensor(new)], dim=1)
    forwards: list[int] = []
    assistant.register_forward_pre_hook(lambda *_: forwards.append(1))
    is_done = tuple(row >= n_open for row in range(3))
    for known in range(length, ids.shape[1] - 4, n_open):
        context = DraftContext(ids, (known, known + known % 2, known), is_done, known, 4)
        forwards.clear()
        draft = drafter.draft(context)
        assert len(forwards) <= 4 + 8
        fresh = type(drafter)(drafter.setup)
        fresh.threshold = 0.0
        assert torch.equal(draft.tokens, fresh.draft(context).tokens)
        assert (draft.tokens[0] >= 0).any()


# --- sampling -------------------------------------------------------------------------------------


def test_shared_tokens_are_spelled_alike() -> None:
    target, other = byte_level(), sentence_piece()
    shared = shared_tokens(Spelling(target, len(target)), Spelling(other, len(other)))
    assert len(shared) > 50
    assert len(set(shared.values())) == len(shared)
    assert list(shared) == sorted(shared)
    spelled = target.convert_ids_to_tokens(list(shared.values()))
    expected = other.convert_ids_to_tokens(list(shared))
    assert [token.replace("Ġ", "▁", 1) for token in spelled] == expected
    assert any(token.startswith("▁") for token in expected)
    assert all(
        theirs < 100
        for theirs in shared_tokens(Spelling(target, 100), Spelling(other, 90)).values()
    )


def joint(model: Any, inputs: dict[str, Tensor], processors: Any, width: int) -> Tensor:
    """Probabilities ``(vocab, vocab)`` of the first two tokens, computed without any sampling."""
    ids = inputs["input_ids"]
    with torch.no_grad():
        first = processors(ids, model(ids).logits[:, -1].float()).softmax(-1)[0]
        result = torch.zeros(width, width)
        for token in first.nonzero().flatten():
            longer = torch.cat([ids, token.view(1, 1)], dim=1)
            second = processors(longer, model(longer).logits[:, -1].float()).softmax(-1)[0]
            result[token] = first[token] * second
    return result


def test_samples_are_distributed_as_the_models() -> None:
    """6,000 draws of two tokens: chi-square below its 99.99% quantile, and the assistant has a say."""
    target, other = byte_level(), sentence_piece()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = untrained(target, **small, head_dim=2, initializer_range=0.6)
    assistant = untrained(other, **small, head_dim=2, initializer_range=0.3)
    to_target = shared_tokens(Spelling(target, 400), Spelling(other, 300))
    shared = sorted(to_target.values())
    # The draws are among six tokens, of which the assistant lacks two.
    lacking = [token for token in range(260, 400) if token not in shared]
    likely = [*shared[100:104], *lacking[:2]]
    inputs = prompts(["def mean(values"])
    kwargs: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.3,
        "repetition_penalty": 1.2,
        "sequence_bias": [[[token], 25.0] for token in likely],
    }
    sampled = model.generate(
        **inputs,
        **kwargs,
        max_new_tokens=3,
        num_return_sequences=6_000,
        num_assistant_tokens=2,
        assistant_confidence_threshold=0.0,
        num_assistant_tokens_schedule="constant",
        tokenizer=target,
        assistant_model=assistant,
        assistant_tokenizer=other,
        return_dict_in_generate=True,
        output_speculation=True,
    )
    assert 0.2 < sampled.speculation.acceptance_rate < 0.8
    config, _ = model._prepare_generation_config(None, **kwargs)
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=inputs["input_ids"].shape[1]
    )
    length = inputs["input_ids"].shape[1]
    expected = 6_000 * joint(model, inputs, processors, len(target)).flatten()
    pairs = sampled.sequences[:, length] * len(target) + sampled.sequences[:, length + 1]
    counts = torch.bincount(pairs, minlength=len(expected)).float()
    assert counts[expected == 0].sum() == 0
    possible = expected > 5
    counts = torch.cat([counts[possible], counts[~possible].sum()[None]])
    expected = torch.cat([expected[possible], expected[~possible].sum()[None]])
    chi_square = float(((counts - expected) ** 2 / expected.clamp(min=1.0)).sum())
    freedom = len(expected) - 1
    assert freedom > 8
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < bound


@pytest.mark.parametrize("texts", BATCHES, ids=["row", "batch"])
def test_a_seed_fixes_the_samples(texts: list[str]) -> None:
    """However long the forwards take: draft lengths do not follow a clock."""
    target, other = byte_level(), sentence_piece()
    model, assistant = untrained(target), untrained(other)
    delays, drawn = random.Random(0), set()
    with model.model.register_forward_hook(lambda *_: time.sleep(delays.choice((0.0, 0.003)))):
        for _ in range(3):
            torch.manual_seed(5)
            tokens = model.generate(
                **prompts(texts), do_sample=True, temperature=0.5, max_new_tokens=20,
                eos_token_id=None, tokenizer=target, assistant_model=assistant,
                assistant_tokenizer=other,
            )  # fmt: skip
            drawn.add(str(tokens.tolist()))
    assert len(drawn) == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "repetition_penalty": 1.5}])
def test_drafts_have_the_probability_they_were_drawn_with(options: dict[str, Any]) -> None:
    """Rows at different places: each one's logits are those of its own tokens, in the target's ids."""
    target, other = byte_level(), TOKENIZERS["bytes"]()
    model, assistant = untrained(target), untrained(other)
    drafter, inputs = captured(model, assistant, other, do_sample=True, top_k=0, **options)
    torch.manual_seed(0)
    ids = torch.cat([inputs["input_ids"], torch.full((3, 8), 7)], dim=1)
    length = inputs["input_ids"].shape[1]
    ids[1, length : length + 2] = torch.tensor(target.encode(" va")[:2])
    context = DraftContext(ids, (length, length + 2, length), (False, False, True), length, 6)
    draft = drafter.draft(context)
    assert draft.tokens.shape[0] == 3
    assert draft.logits.shape == (3, 6, len(target))
    assert (draft.tokens[2] == -1).all()
    assert (draft.tokens[1, :2] == -1).all()
    shared = torch.tensor(list(drafter.to_target.values()))
    mine = {theirs: own for own, theirs in drafter.to_target.items()}
    for row, start in ((0, 0), (1, 2)):
        so_far = ids[row, : length + start].tolist()
        own_ids = drafter.rows[row].context()
        for position in range(start, 6):
            token = int(draft.tokens[row, position])
            logits = draft.logits[row, position]
            lacking = torch.ones(len(target), dtype=torch.bool).index_fill(0, shared, False)
            assert (logits[lacking] == -torch.inf).all()
            expected = assistant(torch.tensor([own_ids])).logits[0, -1].float()
            restricted = torch.full((1, len(target)), -torch.inf)
            restricted[0, shared] = expected[list(drafter.to_target)]
            processors = drafter.processors
            restricted = processors(torch.tensor([so_far] * 3), restricted.repeat(3, 1))[row]
            compared = shared[shared != 0]  # rows behind the longest are padded, and so penalised
            torch.testing.assert_close(logits[compared], restricted[compared], rtol=1e-4, atol=1e-4)
            so_far.append(token)
            own_ids = [*own_ids, mine[token]]


def captured(model: Any, assistant: Any, other: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The drafter that a call is given, and the call's prompt."""
    inputs = prompts(["total = total", "for value in values: ", "re"])
    made: list[Any] = []
    original = UniversalDrafter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniversalDrafter, "__init__", init)
        model.generate(
            **inputs,
            **kwargs,
            max_new_tokens=1,
            tokenizer=byte_level(),
            assistant_model=assistant,
            assistant_tokenizer=other,
        )
    drafter = made[0]
    drafter.threshold = 0.0
    drafter.setup.run.ids = inputs["input_ids"]  # as it was before the call
    return drafter, inputs


def test_what_the_assistant_lacks_may_be_forced() -> None:
    """A processor that leaves no shared token costs the draft, not the call."""
    other = sentence_piece()
    sampled = untrained(byte_level()).generate(
        **prompts(BATCHES[1]),
        do_sample=True,
        forced_eos_token_id=1,
        max_new_tokens=6,
        tokenizer=byte_level(),
        assistant_model=untrained(other),
        assistant_tokenizer=other,
    )
    assert (sampled[:, -1] == 1).all()


# --- the caller's objects, and errors -------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_assistant_is_left_as_it_was(do_sample: bool) -> None:
    """Upstream replaces its embeddings and head, and drops its repetition penalty."""
    other = sentence_piece()
    model, assistant = untrained(byte_level()), untrained(other)
    assistant.generation_config.repetition_penalty = 1.1
    before = {name: value.clone() for name, value in assistant.state_dict().items()}
    modules = list(map(type, assistant.modules()))
    config = copy.deepcopy(assistant.generation_config).to_dict()
    both(model, prompts(BATCHES[1]), assistant, other, do_sample=do_sample, max_new_tokens=8)
    assert list(map(type, assistant.modules())) == modules
    assert assistant.generation_config.to_dict() == config
    after = assistant.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_errors_come_before_the_first_forward() -> None:
    target, other = byte_level(), sentence_piece()
    model, assistant = untrained(target), untrained(other)
    calls: list[str] = []
    for part in (model, assistant):
        part.register_forward_pre_hook(lambda *_: calls.append("forward"))

    def call(**kwargs: Any) -> None:
        model.generate(**prompts(BATCHES[0]), max_new_tokens=2, assistant_model=assistant, **kwargs)

    with pytest.raises(ValueError, match="both `tokenizer` and `assistant_tokenizer`"):
        call(tokenizer=target)
    with pytest.raises(
        TypeError, match=r"`assistant_tokenizer` has to be a tokenizer, but is dict"
    ):
        call(tokenizer=target, assistant_tokenizer={})
    partly = type("Partly", (), {"encode": None, "decode": None, "convert_ids_to_tokens": None})
    with pytest.raises(TypeError, match=r"`tokenizer` .* has no get_vocab\(\)"):
        call(tokenizer=partly(), assistant_tokenizer=other, do_sample=True)
    foreign = wrapped(Tokenizer(models.WordLevel({"#1": 0, "#2": 1}, unk_token="#1")))
    with pytest.raises(ValueError, match="no token in common"):
        call(tokenizer=target, assistant_tokenizer=foreign, do_sample=True)
    with pytest.raises(ValueError, match="Choose one with an encoder"):
        t5(target).generate(
            **prompts(BATCHES[0]),
            tokenizer=target,
            assistant_model=assistant,
            assistant_tokenizer=other,
        )
    assistant = untrained(target)
    with pytest.raises(ValueError, match="`assistant_tokenizer` is for assistants with another"):
        call(tokenizer=target, assistant_tokenizer=target)
    assert calls == []
