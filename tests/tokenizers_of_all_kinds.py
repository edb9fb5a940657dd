"""Small tokenizers, one per way to make text of tokens, trained or written in the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hfgen.tools.builtin import builtin_model

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "Der Zug fährt über die Brücke, nicht wahr? It's fine.",
    "Москва слезам не верит. ሰላም ለዓለም",
    "今日は良い天気ですね。 你好,世界!",
    "naïve café 👩‍👩‍👧 emoji 🎉🎉  two  spaces",
]
SPECIAL = ["<pad>", "<s>", "</s>"]


def fast(backend: Tokenizer, **kwargs: Any) -> PreTrainedTokenizerFast:
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **kwargs)


@cache
def builtin() -> Any:
    return builtin_model()[1]


@cache
def byte_level() -> Any:
    """GPT-2's kind: characters of several bytes are mostly several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return fast(backend)


@cache
def byte_fallback() -> Any:
    """Llama 2's kind: a sign for spaces, and single bytes for what has no token."""
    pieces = sorted({character for text in TEXTS[:2] for character in text} - {" ", "\n"})
    pieces = ["▁", *pieces, "▁de", "▁x", "re", "turn", "▁re", "▁▁"]
    vocab = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [(piece, -float(place) / 100) for place, piece in enumerate(vocab)]
    backend = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([*SPECIAL, "<unk>"])
    return fast(backend, unk_token="<unk>")


@cache
def metaspace() -> Any:
    """T5's kind."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return fast(backend, unk_token="<unk>")


@cache
def word_piece() -> Any:
    """BERT's kind, with its clean-up of spaces in the decoder and after it."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return fast(backend, unk_token="<unk>", clean_up_tokenization_spaces=True)


@cache
def slow() -> Any:
    """Written in Python: each byte is a token."""
    return ByT5Tokenizer()


ALL: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (builtin, byte_level, byte_fallback, metaspace, word_piece, slow)
}
