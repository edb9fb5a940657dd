"""Translating tokens between two tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from .. import families

#: The character that an incomplete one is decoded to.
INCOMPLETE = "\ufffd"


def n_scores(model: Any) -> int:
    """The width of the model's logits."""
    return families.head_width(model) or int(model.config.get_text_config().vocab_size)


@dataclass(frozen=True, slots=True)
class Spelling:
    """A tokenizer without special tokens, and without ids from ``size`` on, which the model lacks."""

    tokenizer: Any
    size: int

    def text(self, ids: list[int]) -> str:
        known = [token for token in ids if token < self.size]
        return self.tokenizer.decode(
            known, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        return [token for token in ids if token < self.size]

    def opening(self, text: str) -> list[int]:
        """The special tokens that the tokenizer puts before ``text``; BOS if the text is empty."""
        if not (plain := self.ids(text)):
            bos = getattr(self.tokenizer, "bos_token_id", None)
            return [] if bos is None else [bos]
        whole = list(self.tokenizer.encode(text))
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)]


def shared_tokens(target: Spelling, other: Spelling) -> dict[int, int]:
    """Map ``other``'s ids, ascending, to ``target``'s of the same text; signs of spaces may differ."""
    vocab, others = target.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    sign, other_sign = _space_sign(target.tokenizer), _space_sign(other.tokenizer)
    if sign and other_sign and sign != other_sign:
        others = {
            sign + token[len(other_sign) :] if token.startswith(other_sign) else token: index
            for token, index in sorted(others.items())
        }
    pairs = sorted((index, vocab[token]) for token, index in others.items() if token in vocab)
    return {mine: theirs for mine, theirs in pairs if mine < other.size and theirs < target.size}


def _space_sign(tokenizer: Any) -> str:
    """The sign of a leading space in tokens, ``Ġ`` or ``▁``; empty if the tokenizer has none."""
    ids = tokenizer.encode(" ", add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(list(ids)[:1])
    return str(tokens[0])[:1] if tokens else ""


def check_translation(
    model: Any, assistant: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    """Raise ``TypeError`` or ``ValueError`` if the assistant's tokens cannot be translated."""
    sampling = ["get_vocab", "convert_ids_to_tokens"] if config.do_sample else []
    needed = ["decode", "encode", *sampling]
    for name in ("tokenizer", "assistant_tokenizer"):
        tokenizer = mode_kwargs[name]
        if missing := [f"{method}()" for method in needed if not hasattr(tokenizer, method)]:
            raise TypeError(
                f"`{name}` has to be a tokenizer, but is {type(tokenizer).__name__}, which has no "
                f"{' and no '.join(missing)}."
            )
    if model.config.is_encoder_decoder and not assistant.config.is_encoder_decoder:
        raise ValueError(
            f"`assistant_model` ({type(assistant).__name__}) is decoder-only and has another "
            "vocabulary than the encoder-decoder that it drafts for. Choose one with an encoder."
        )
    if config.do_sample and not shared_tokens(
        Spelling(mode_kwargs["tokenizer"], n_scores(model)),
        Spelling(mode_kwargs["assistant_tokenizer"], n_scores(assistant)),
    ):
        raise ValueError(
            "`tokenizer` and `assistant_tokenizer` have no token in common, so the assistant cannot "
            "sample for the model. Choose an assistant with a related tokenizer, or decode greedily."
        )
