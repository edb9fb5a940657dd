"""Every option of ``generate`` that the parity tests turn, as one visible table.

An option's value is plain JSON, so that a failing call can be printed and rebuilt; what is not
JSON (tensors, caches, callables, tokenizers) is made fresh from the value for each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from hfgen.families import CACHE
from tests.parity.family import MODES, Family, Limit
from tests.versions import IS_5_23

if TYPE_CHECKING:
    from tests.parity.harness import Case

GREEDY, SAMPLE, BEAM, BEAM_SAMPLE, ASSISTED = MODES
SAMPLING = (SAMPLE, BEAM_SAMPLE)
BEAMS = (BEAM, BEAM_SAMPLE)
ONE_BEAM = (GREEDY, SAMPLE, ASSISTED)
DECODER = ("decoder",)
SEQ2SEQ = ("encoder-decoder",)
TEXT = DECODER + SEQ2SEQ
KINDS = (*TEXT, "speech", "vision", "audio", "documents")

#: New tokens where no option says how many.
NEW_TOKENS = 6


class Recorder(BaseStreamer):
    """A streamer that remembers what it was given; ``None`` stands for ``end()``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.clone())

    def end(self) -> None:
        self.seen.append(None)


@dataclass
class Call:
    """The arguments of one call of ``generate`` while options fill them in."""

    family: Family
    model: nn.Module
    case: Case
    kwargs: dict[str, Any]
    #: Lets an option build the assistant model of its own side.
    assistant: Callable[[], nn.Module]
    streamer: Recorder | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def ids(self) -> Tensor:
        return self.kwargs["input_ids"]

    @property
    def mask(self) -> Tensor:
        """``(rows, length)``, all ones where the call has none."""
        return self.kwargs.get("attention_mask", torch.ones_like(self.ids))

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def ids_length(self) -> int:
        """Tokens in front of the first generated one, as stopping criteria see them."""
        if self.model.config.is_encoder_decoder:
            ids = self.kwargs.get("decoder_input_ids")
            return ids.shape[1] if ids is not None else 1
        ids = self.kwargs.get("input_ids")
        if ids is None:
            return 0 if "inputs_embeds" in self.kwargs else 1
        return ids.shape[1]

    @property
    def prompt_length(self) -> int:
        """The same as ``max_length`` and ``min_length`` count them: embeddings too."""
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is not None and not self.model.config.is_encoder_decoder:
            return embeds.shape[1]
        return self.ids_length

    def random_ids(self, rows: int, length: int) -> Tensor:
        return torch.randint(5, vocab_size(self.model), (rows, length), generator=self.generator)


def vocab_size(model: nn.Module) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


#: Families that read text, but not as ``input_ids``.
OTHER_KINDS = {"rag_token": "documents"}


def usable_modes(family: Family) -> tuple[str, ...]:
    """The modes in which a family is compared."""
    without = {BEAM: Limit.BEAMS, BEAM_SAMPLE: Limit.BEAMS}
    return tuple(mode for mode in family.modes if without.get(mode) not in family.unsupported)


@dataclass(frozen=True)
class Option:
    """One option, the values that are tried, and where it makes sense."""

    name: str
    values: tuple[Any, ...]
    #: How a value enters the call; without it the option is the keyword argument of its name.
    apply: Callable[[Call, Any], None] | None = None
    modes: tuple[str, ...] = MODES
    kinds: tuple[str, ...] = KINDS
    #: Keys of ``Family.unsupported`` that rule the option out.
    needs: tuple[str, ...] = ()
    #: How often random combinations have it, relative to the others.
    weight: float = 1.0

    def fits(self, family: Family, mode: str) -> bool:
        return (
            mode in usable_modes(family)
            and mode in self.modes
            and OTHER_KINDS.get(family.name, family.kind) in self.kinds
            and not any(need in family.unsupported for need in self.needs)
        )

    def enter(self, call: Call, value: Any) -> None:
        if self.apply is None:
            call.kwargs[self.name] = value
        else:
            self.apply(call, value)


# ---------------------------------------------------------------- prompts


def _mask(call: Call, how: str) -> None:
    """``ones`` is a redundant mask; ``absent`` leaves upstream to find pads in the ids."""
    if how == "ones":
        call.kwargs["attention_mask"] = torch.ones_like(call.ids)
    else:
        mask = call.kwargs.pop("attention_mask", None)
        default = call.kwargs.get("pad_token_id", call.model.generation_config.pad_token_id)
        pad = call.case.options.get("pad_token_id", default)
        if mask is not None and isinstance(pad, int):
            call.ids[mask == 0] = pad


def _positional(call: Call, _: bool) -> None:
    call.kwargs["inputs"] = call.kwargs.pop("input_ids")


def _no_prompt(call: Call, _: bool) -> None:
    del call.kwargs["input_ids"]
    call.kwargs.pop("attention_mask", None)
    call.kwargs["bos_token_id"] = 5


def _embeds(call: Call, how: str) -> None:
    call.kwargs["inputs_embeds"] = call.model.get_input_embeddings()(call.ids).detach().clone()
    if how == "only":
        call.kwargs["attention_mask"] = call.mask
        del call.kwargs["input_ids"]


def _position_ids(call: Call, _: bool) -> None:
    call.kwargs["position_ids"] = (call.mask.cumsum(-1) - 1).clamp_min(0)


def _decoder_ids(call: Call, how: str) -> None:
    """Two decoder ids, after the start token (``start``) or without it (``bare``)."""
    ids = call.random_ids(call.case.rows, 2)
    if how != "bare":
        config = call.model.generation_config
        first = config.decoder_start_token_id
        start = torch.full((call.case.rows, 1), first if first is not None else config.bos_token_id)
        ids = torch.cat([start, ids], dim=1)
    call.kwargs["decoder_input_ids"] = ids
    if how == "masked":
        call.kwargs["decoder_attention_mask"] = torch.ones_like(ids)


def _start_per_row(call: Call, _: bool) -> None:
    call.kwargs["decoder_start_token_id"] = [5 + row for row in range(call.case.rows)]


def _encoder_outputs(call: Call, how: str) -> None:
    encoder = call.model.get_encoder()
    call.kwargs["encoder_outputs"] = encoder(
        input_ids=call.ids, attention_mask=call.mask, return_dict=True
    )
    if how == "alone":
        call.kwargs["attention_mask"] = call.mask
        del call.kwargs["input_ids"]


# ---------------------------------------------------------------- lengths


def _max_length(call: Call, extra: int) -> None:
    call.kwargs["max_length"] = call.prompt_length + extra


def _min_length(call: Call, extra: int) -> None:
    call.kwargs["min_length"] = call.prompt_length + extra


def _default_length(call: Call, _: bool) -> None:
    call.kwargs.pop("max_new_tokens", None)


# ---------------------------------------------------------------- processors and criteria


def _sequence_bias(call: Call, how: str) -> None:
    bias = [[[9], -8.0], [[11], 4.0], [[6, 7], 9.0]]
    tuples = {tuple(ids): value for ids, value in bias}
    call.kwargs["sequence_bias"] = bias if how == "lists" else tuples


def _watermark(call: Call, how: str) -> None:
    if how == "synthid":
        config = SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[654, 400, 836], context_history_size=16
        )
    else:
        config = WatermarkingConfig(bias=3.0, seeding_scheme=how)
    call.kwargs["watermarking_config"] = config


def _negative_prompt(call: Call, how: str) -> None:
    ids = call.random_ids(call.case.rows, 4)
    call.kwargs["negative_prompt_ids"] = ids
    if how == "masked":
        mask = torch.ones_like(ids)
        mask[1:, 0] = 0
        call.kwargs["negative_prompt_attention_mask"] = mask


def _prefix_fn(call: Call, _: bool) -> None:
    """Half of the vocabulary, depending on the last token and on the row."""
    vocab = vocab_size(call.model)

    def allowed(row: int, ids: Tensor) -> list[int]:
        last = int(ids[-1]) if len(ids) else 0
        return [token for token in range(5, vocab) if (token + last + row) % 2]

    call.kwargs["prefix_allowed_tokens_fn"] = allowed


class LengthBias(LogitsProcessor):
    """A user's own processor: pushes one token that depends on the length so far."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        pushed = scores.clone()
        pushed[:, 5 + input_ids.shape[1] % 8] += 2.0
        return pushed


class LastToken(StoppingCriteria):
    """A user's own criterion: a row stops at a token that a third of the vocabulary fulfils."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 3 == 0


def _user_processors(call: Call, names: list[str]) -> None:
    build: dict[str, Callable[[], LogitsProcessor]] = {
        "own": LengthBias,
        "temperature": lambda: TemperatureLogitsWarper(0.6),
        "repetition": lambda: RepetitionPenaltyLogitsProcessor(1.7),
    }
    call.kwargs["logits_processor"] = LogitsProcessorList(build[name]() for name in names)


def _user_criteria(call: Call, names: list[str]) -> None:
    build: dict[str, Callable[[], StoppingCriteria]] = {
        "own": LastToken,
        "length": lambda: MaxLengthCriteria(call.ids_length + 2),
        "eos": lambda: EosTokenCriteria(list(range(5, 20))),
        "time": lambda: MaxTimeCriteria(1000.0),
    }
    call.kwargs["stopping_criteria"] = StoppingCriteriaList(build[name]() for name in names)


@lru_cache
def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of exactly ``vocab`` tokens: 5 special ones, letters, then pairs of letters."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]
    letters = list(ascii_lowercase[:13])
    longer = ["".join(word) for size in (2, 3) for word in product(letters, repeat=size)]
    tokens = [*special, *letters, *longer][:vocab]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [(token[:-1], token[-1]) for token in tokens[len(special) + len(letters) :]]
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def _stop_strings(call: Call, strings: list[str]) -> None:
    """The prompt ends with a special token, so that no match starts inside the prompt."""
    call.kwargs["stop_strings"] = strings
    call.kwargs["tokenizer"] = tokenizer(vocab_size(call.model))
    if "input_ids" in call.kwargs and not call.model.config.is_encoder_decoder:
        call.ids[:, -1] = 3


def _token_healing(call: Call, _: bool) -> None:
    """The prompt is what the tokenizer makes of a text, so that encoding it again gives as many ids."""
    tokens = tokenizer(vocab_size(call.model))
    mask = call.mask
    for row, ids in enumerate(call.ids):
        drawn = torch.randint(13, (3 * len(ids),), generator=call.generator).tolist()
        text = "".join(ascii_lowercase[letter] for letter in drawn)
        call.ids[row] = torch.tensor(tokens.encode(text)[: len(ids)])
    call.ids[mask == 0] = tokens.pad_token_id
    call.kwargs["token_healing"] = True
    call.kwargs["tokenizer"] = tokens


def _streamer(call: Call, _: bool) -> None:
    call.streamer = call.kwargs["streamer"] = Recorder()


# ---------------------------------------------------------------- caches, outputs, config


def _user_cache(call: Call, how: str) -> None:
    def build() -> Any:
        if how == "dynamic":
            return DynamicCache(config=call.text_config)
        return StaticCache(config=call.text_config, max_cache_len=40)

    seq2seq = call.model.config.is_encoder_decoder
    cache = (
        EncoderDecoderCache(build(), DynamicCache(config=call.text_config)) if seq2seq else build()
    )
    call.kwargs[CACHE] = cache


def _continue(call: Call, how: str) -> None:
    """A cache of the prompt but its last two tokens, then all ids or only the two new ones."""
    ids, mask = call.ids, call.mask
    cache = DynamicCache(config=call.text_config)
    call.model(
        input_ids=ids[:, :-2],
        attention_mask=mask[:, :-2],
        past_key_values=cache,
        use_cache=True,
    )
    call.kwargs[CACHE] = cache
    call.kwargs["attention_mask"] = mask
    if how == "new":
        call.kwargs["input_ids"] = ids[:, -2:].clone()


def _outputs(call: Call, flags: list[str]) -> None:
    call.kwargs["return_dict_in_generate"] = True
    for flag in flags:
        call.kwargs[f"output_{flag}"] = True


def _ignored_output(call: Call, flag: str) -> None:
    call.kwargs[f"output_{flag}"] = True


def _assistant(call: Call, _: str) -> None:
    call.kwargs.pop("prompt_lookup_num_tokens", None)
    call.kwargs["assistant_model"] = call.assistant()


def _config_object(call: Call, how: str) -> None:
    """Moves all generation options, or every second one, into a ``GenerationConfig``."""
    fields = [key for key in call.kwargs if hasattr(GenerationConfig(), key)]
    mode = [key for key in fields if key in ("do_sample", "num_beams")]
    rest = [key for key in fields if key not in mode]
    moved = fields if how == "all" else [*mode, *rest[::2]]
    config = GenerationConfig()
    for key in moved:
        setattr(config, key, call.kwargs.pop(key))
    call.kwargs["generation_config"] = config


# ---------------------------------------------------------------- bad calls


def _invalid(call: Call, what: str) -> None:
    kwargs = call.kwargs
    if what == "both inputs":
        kwargs["inputs"] = kwargs["input_ids"].clone()
    elif what == "short max_length":
        kwargs.pop("max_new_tokens", None)
        kwargs["max_length"] = call.prompt_length
    elif what == "cache twice":
        _user_cache(call, "dynamic")
        kwargs["cache_implementation"] = "dynamic"
    elif what == "tuple cache":
        kwargs[CACHE] = ((torch.zeros(1, 1, 1, 1),) * 2,)
    elif what == "mask of three dimensions":
        kwargs["attention_mask"] = torch.ones(call.case.rows, 1, call.ids.shape[1])
    elif what == "stop strings without tokenizer":
        kwargs["stop_strings"] = ["ab"]
    elif what == "criterion in the config":
        kwargs["generation_config"] = GenerationConfig()
        kwargs["generation_config"].logits_processor = []
    elif what == "wrong decoder start":
        kwargs["decoder_start_token_id"] = [5] * (call.case.rows + 1)
    else:
        kwargs |= BAD_ARGUMENTS[what]


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "typo": {"max_new_token": 3},
    "unknown tensor": {"pixel_valuez": torch.ones(1)},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3},
    "greedy sequences": {"do_sample": False, "num_beams": 1, "num_return_sequences": 2},
    "negative max_new_tokens": {"max_new_tokens": -1},
    "unknown cache": {"cache_implementation": "dynamite"},
    "unknown early_stopping": {"num_beams": 2, "early_stopping": "sometimes"},
    "temperature": {"do_sample": True, "temperature": -1.0},
    "top_p": {"do_sample": True, "top_p": -0.5},
    "top_k": {"do_sample": True, "top_k": -7},
    "min_p": {"do_sample": True, "min_p": 1.5},
    "top_h": {"do_sample": True, "top_h": 1.5},
    "typical_p": {"do_sample": True, "typical_p": -0.1},
    "repetition_penalty": {"repetition_penalty": -1.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": "two"},
    "bad_words_ids": {"bad_words_ids": []},
    "sequence_bias": {"sequence_bias": {(): 1.0}},
    "forced and suppressed": {"forced_eos_token_id": 7, "suppress_tokens": [7]},
    "min_length": {"min_length": -1},
    "low_memory beams": {"num_beams": 2, "low_memory": True},
    "lookup with beams": {"num_beams": 2, "prompt_lookup_num_tokens": 2, "pad_token_id": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=2.0)},
    "healing without tokenizer": {"token_healing": True},
    "chunks without a cache": {"use_cache": False, "prefill_chunk_size": 2},
}
#: Calls that are wrong in one way; upstream raises for all but a few, where it warns.
_BAD_CALLS = (
    *BAD_ARGUMENTS,
    "both inputs",
    "short max_length",
    "cache twice",
    "tuple cache",
    "mask of three dimensions",
    "stop strings without tokenizer",
    "criterion in the config",
)


# ---------------------------------------------------------------- the table

#: Options that a bad call may have besides what is wrong with it.
WITH_INVALID = ("eos_token_id", "pad_token_id", "outputs", "temperature")

#: In the order in which they enter a call: prompt first, what rearranges arguments last.
OPTIONS: tuple[Option, ...] = (
    # prompt
    Option("mask", ("absent", "ones"), _mask, kinds=TEXT, weight=3),
    Option("no_prompt", (True,), _no_prompt, kinds=DECODER, weight=0.3),
    Option("position_ids", (True,), _position_ids, kinds=DECODER),
    Option("decoder_ids", ("start", "bare", "masked"), _decoder_ids, kinds=SEQ2SEQ, needs=("decoder_input_ids",), weight=2),
    Option("start_per_row", (True,), _start_per_row, kinds=SEQ2SEQ, needs=("decoder_input_ids",)),
    Option("continue", ("full", "new"), _continue, kinds=DECODER, needs=("continuation", "no_cache"), weight=1.5),
    Option("encoder_outputs", ("alone", "with_ids"), _encoder_outputs, kinds=SEQ2SEQ, weight=1.5),
    Option("embeds", ("only", "with_ids"), _embeds, kinds=DECODER, needs=("embeds",), weight=2),
    Option("encoder_embeds", ("only",), _embeds, kinds=SEQ2SEQ, needs=("embeds",)),
    # lengths
    Option("max_new_tokens", (1, 4, 9)),
    Option("max_length", (1, 5), _max_length),
    Option("min_new_tokens", (3, 20)),
    Option("min_length", (4,), _min_length),
    Option("default_length", (True,), _default_length, weight=0.2),
    Option("max_time", (1000.0,), weight=0.3),
    # special tokens
    Option("eos_token_id", (None, 7, list(range(5, 17)), list(range(8, 60, 4))), weight=8),
    Option("pad_token_id", (0, 1, None, 7), weight=2),
    Option("bos_token_id", (6,), weight=0.3),
    # logits processors
    Option("repetition_penalty", (1.3, 0.8)),
    Option("encoder_repetition_penalty", (1.4,)),
    Option("no_repeat_ngram_size", (1, 2)),
    Option("encoder_no_repeat_ngram_size", (2,)),
    Option("bad_words_ids", ([[8], [9, 10]], [[11, 12, 13]])),
    Option("sequence_bias", ("lists", "tuples"), _sequence_bias),
    Option("forced_bos_token_id", (8,)),
    Option("forced_eos_token_id", (7, [7, 9])),
    Option("suppress_tokens", ([10, 11, 12],)),
    Option("begin_suppress_tokens", ([13, 14, 15, 16],)),
    Option("exponential_decay_length_penalty", ([2, 1.5],)),
    Option("remove_invalid_values", (True,)),
    Option("renormalize_logits", (True,)),
    Option("guidance_scale", (1.5, 1.0), kinds=DECODER, needs=("no_cache",)),
    Option("negative_prompt", ("ids", "masked"), _negative_prompt, kinds=DECODER, weight=0.5),
    Option("watermark", ("lefthash", "selfhash", "synthid"), _watermark),
    Option("temperature", (0.6, 1.8), modes=(*SAMPLING, GREEDY)),
    Option("top_k", (3, 20, 0), modes=(*SAMPLING, ASSISTED)),
    Option("top_p", (0.7, 1.0), modes=SAMPLING),
    Option("min_p", (0.1,), modes=SAMPLING),
    Option("top_h", (0.5,), modes=SAMPLING),
    Option("typical_p", (0.6,), modes=SAMPLING),
    Option("epsilon_cutoff", (0.02,), modes=SAMPLING),
    Option("eta_cutoff", (0.02,), modes=SAMPLING),
    Option("prefix_fn", (True,), _prefix_fn),
    Option("user_processors", (["own"], ["temperature", "own"], ["repetition"]), _user_processors),
    Option("user_criteria", (["own"], ["length"], ["own", "eos"], ["time"]), _user_criteria),
    Option("stop_strings", (["a", "bc"], ["dd"], ["aab"]), _stop_strings, kinds=TEXT, weight=1.5),
    Option("token_healing", (True,), _token_healing, kinds=DECODER, weight=0.2),
    # beams and sequences
    Option("num_beams", (2, 3, 4), modes=BEAMS, weight=4),
    Option("early_stopping", (True, False, "never"), modes=BEAMS, weight=4),
    Option("length_penalty", (0.0, 2.0, -1.5), modes=BEAMS, weight=3),
    Option("num_return_sequences", (2,), modes=(SAMPLE, *BEAMS), needs=("num_return_sequences",), weight=2),
    # assisted
    Option("prompt_lookup_num_tokens", (1, 5), modes=(ASSISTED,)),
    Option("max_matching_ngram_size", (1,), modes=(ASSISTED,)),
    Option("assistant", ("same",), _assistant, modes=(ASSISTED,), needs=("assistant",)),
    # caches
    Option("use_cache", (False, True), needs=("no_cache",), modes=MODES[:4]),
    Option("cache_implementation", ("dynamic", "static"), needs=("no_cache", "static")),
    Option("max_cache_len", (40,), needs=("no_cache", "static"), weight=0.3),
    Option("user_cache", ("dynamic", "static"), _user_cache, kinds=TEXT, needs=("no_cache", "static", "continuation")),
    Option("prefill_chunk_size", (3,), needs=("chunked", "no_cache")),
    # outputs
    Option("outputs", ([], ["scores"], ["logits"], ["scores", "logits"]), _outputs, weight=6),
    Option("attentions", (["attentions"],), _outputs, needs=("attentions",)),
    Option("hidden_states", (["hidden_states"], ["hidden_states", "scores"]), _outputs, needs=("hidden_states",)),
    Option("ignored_output", ("scores",), _ignored_output, weight=0.3),
    Option("streamer", (True,), _streamer, modes=ONE_BEAM, weight=1.5),
    # what rearranges the arguments
    Option("positional", (True,), _positional, kinds=TEXT, weight=0.5),
    Option("config_object", ("all", "both"), _config_object, weight=1.5),
    Option("invalid", _BAD_CALLS, _invalid, kinds=TEXT, weight=0.0),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}


# ---------------------------------------------------------------- what does not go together


@dataclass(frozen=True)
class Exclusion:
    """A combination that is not compared; ``drop`` is the option that gives way."""

    drop: str
    reason: str
    hits: Callable[[Family, Case], bool]


def _expands(case: Case) -> bool:
    return case.mode in BEAMS or case.options.get("num_return_sequences", 1) > 1


def _with(*names: str) -> Callable[[Family, Case], bool]:
    return lambda family, case: any(name in case.options for name in names)


def _assisted(**values: Any) -> Callable[[Family, Case], bool]:
    return lambda family, case: (
        case.mode == ASSISTED
        and all(case.options.get(name) == value for name, value in values.items())
    )


#: Options that each replace the prompt; the first one present stays.
_PROMPTS = ("embeds", "encoder_embeds", "encoder_outputs", "no_prompt", "positional")
_BOTH_SAME = "both set the same argument"
INTENDED = "documented difference: "

#: Families whose own ``generate`` puts a pad token of 0 in the place of ``None``.
_PADS_WITH_ZERO = ("janus", "moshi_speech", "whisper")

EXCLUSIONS: tuple[Exclusion, ...] = (
    # intended differences (docs/differences.md)
    Exclusion("pad_token_id", INTENDED + "beam search pads with the pad token even if its id is 0", lambda f, c: c.mode in BEAMS and (c.options["pad_token_id"] == 0 or (c.options["pad_token_id"] is None and ("config_object" in c.options or f.name in _PADS_WITH_ZERO)))),
    Exclusion("exponential_decay_length_penalty", INTENDED + "without EOS a clear error", lambda f, c: "eos_token_id" not in c.options or c.options["eos_token_id"] is None),
    Exclusion("user_cache", INTENDED + "a user's cache is expanded", lambda f, c: _expands(c)),
    Exclusion("continue", INTENDED + "a user's cache is expanded", lambda f, c: _expands(c)),
    Exclusion("prefill_chunk_size", INTENDED + "inputs_embeds with prefill_chunk_size work", lambda f, c: "embeds" in c.options or f.name == "clvp"),
    Exclusion("prefill_chunk_size", INTENDED + "chunks of a decoder's prompt leave the encoder's mask whole", lambda f, c: f.kind in ("encoder-decoder", "speech") and (c.padded or not {"pad_token_id", "mask", "decoder_ids"}.isdisjoint(c.options))),
    Exclusion("stop_strings", INTENDED + "generated text only, and the prompt's end is not known to be special", _with("embeds", "decoder_ids", "start_per_row")),
    Exclusion("user_criteria", "beyond max_length: upstream's beams raise, its drafting never ends", lambda f, c: c.options["user_criteria"] == ["length"] and c.mode in (*BEAMS, ASSISTED) and 1 in (c.options.get("max_new_tokens"), c.options.get("max_length"))),
    Exclusion("prefill_chunk_size", "before 5.23 upstream's chunks do not get their part of the images", lambda f, c: not IS_5_23 and f.kind == "vision"),
    Exclusion("cache_implementation", INTENDED + "drafting works with a static cache, and with an assistant", _assisted()),
    Exclusion("user_cache", INTENDED + "drafting works with a static cache", _assisted(user_cache="static")),
    Exclusion("prefill_chunk_size", INTENDED + "upstream's drafting takes no notice", _assisted()),
    Exclusion("embeds", INTENDED + "upstream's drafting loses drafted tokens, or the embeddings", _assisted()),
    Exclusion("continue", INTENDED + "upstream's drafting forwards again what the cache holds", _assisted()),
    Exclusion("stop_strings", INTENDED + "upstream's drafting overshoots, or asks for a tokenizer", _assisted()),
    Exclusion("user_criteria", INTENDED + "upstream's drafting overshoots", _assisted()),
    Exclusion("token_healing", INTENDED + "upstream's assistant heals again, without a tokenizer", _with("assistant")),
    Exclusion("watermark", INTENDED + "upstream's SynthID remembers rejected tokens", _assisted(watermark="synthid")),
    Exclusion("guidance_scale", INTENDED + "upstream's guidance remembers rejected tokens", _assisted()),
    Exclusion("hidden_states", INTENDED + "upstream's first round gives those of the prompt", _assisted()),
    Exclusion("attentions", INTENDED + "upstream's first round gives those of the prompt", _assisted()),
    *(Exclusion(name, INTENDED + "padding does not count", lambda f, c: c.padded or not {"pad_token_id", "mask", "decoder_ids"}.isdisjoint(c.options)) for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty")),
    Exclusion("repetition_penalty", INTENDED + "columns of embeddings and caches are no ids", lambda f, c: c.padded and (c.options.get("embeds") == "only" or c.options.get("continue") == "new")),
    # one argument, two writers
    *(Exclusion(name, _BOTH_SAME, _with(*_PROMPTS[:i])) for i, name in enumerate(_PROMPTS) if i),
    Exclusion("mask", _BOTH_SAME, _with("no_prompt", "continue", "embeds", "encoder_embeds", "encoder_outputs", "token_healing")),
    Exclusion("continue", _BOTH_SAME, _with("no_prompt", "embeds", "position_ids", "positional", "token_healing")),
    Exclusion("position_ids", _BOTH_SAME, _with("no_prompt", "token_healing")),
    Exclusion("user_cache", _BOTH_SAME, _with("continue", "cache_implementation", "use_cache")),
    Exclusion("cache_implementation", _BOTH_SAME, _with("continue", "use_cache")),
    Exclusion("start_per_row", _BOTH_SAME, _with("decoder_ids")),
    Exclusion("token_healing", _BOTH_SAME, _with("stop_strings", "embeds", "no_prompt", "positional")),
    Exclusion("prompt_lookup_num_tokens", _BOTH_SAME, _with("assistant")),
    Exclusion("invalid", "one bad thing at a time", lambda f, c: not {*WITH_INVALID, "invalid"}.issuperset(c.options)),
    # nothing to compare
    Exclusion("negative_prompt", "only with guidance", lambda f, c: c.options.get("guidance_scale", 1.0) == 1.0),
    Exclusion("negative_prompt", "has one row per prompt", lambda f, c: _expands(c)),
    Exclusion("prefill_chunk_size", "needs a cache", lambda f, c: c.options.get("use_cache") is False),
)  # fmt: skip


def excluded(family: Family, case: Case) -> Iterator[Exclusion]:
    """The exclusions that a combination runs into, first in the table first."""
    for exclusion in EXCLUSIONS:
        if exclusion.drop in case.options and exclusion.hits(family, case):
            yield exclusion
