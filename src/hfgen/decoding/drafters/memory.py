"""``SuffixMemory``: drafts what followed the newest tokens in any text that it has seen.

As SuffixDecoding (arXiv 2411.04975), it votes among the places where the longest suffix of a row occurred; places
that follow the same few tokens are a chain, as in LZ77 coders.
"""

from __future__ import annotations

import os
import tempfile
from _thread import RLock
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...settings.kinds import is_integer
from ...state.run import Run
from .base import Acceptance, Draft, DraftContext, Drafter, draft_of_rows, prompts_of

KEY = 3  # tokens that have to match: a chain goes through the places that follow the same ones
LONGEST = 32  # tokens that are compared: longer matches count as this long
PLACES = 48  # places of a chain that are looked at, the newest first
CONFIDENCE = 0.2  # a draft ends where it is less likely than this, by the votes of the places
OFFSET_BITS = 24  # a place is the number of its text and an offset of so many bits
BYTES_PER_TOKEN = 12  # of a stored token: the token and the place before it in its chain
TOKENS_PER_TEXT = 40  # a text takes the bytes of so many tokens besides its own
KEPT_SHARE = 0.5  # what remains of the tokens, and of each text's uses, when the memory was full


@dataclass(eq=False, slots=True)
class Text:
    """The tokens of a row; ``previous[i]`` is the place before ``KEY + i`` in its chain, 0 at the end of it."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    previous: array[int] = field(default_factory=lambda: array("q"))
    n_used: int = 0


class Lock(RLock):  # type: ignore[misc]
    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()  # a copy, or one in another process, is of another memory


class SuffixMemory(Drafter):
    """Remembers prompts and generated tokens, and drafts what followed them: ``assistant_model=memory``.

    One memory serves any number of calls, one after another or at once, with one vocabulary. It never
    changes tokens: the model verifies each of them. Keep one for each owner of texts, since how fast a call
    is tells whether its text was seen before.

    When ``max_bytes`` are full, it forgets half of the tokens, texts that were used least and longest ago
    first. Raises ``TypeError`` if these are not an integer, ``ValueError`` for less than 1 MiB.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        if not is_integer(max_bytes):
            raise TypeError(f"`max_bytes` has to be an integer, but is {max_bytes!r:.80}.")
        if max_bytes < 2**20:
            raise ValueError(f"`max_bytes` has to be at least {2**20} (1 MiB), but is {max_bytes}.")
        self.max_bytes = int(max_bytes)
        self.vocab: int | None = None  # tokens of the vocabulary of the first model
        self.n_drafted = self.n_accepted = 0  # tokens that it has drafted, and how many were right
        n_slots = 2 ** ((self.max_bytes // 4 // 8).bit_length() - 1)
        self._max_tokens = (self.max_bytes - 8 * n_slots) // BYTES_PER_TOKEN
        #: By the hash of ``KEY`` tokens, the newest place that follows them; 0 for none.
        self._newest = array("q", bytes(8 * n_slots))
        self._texts: dict[int, Text] = {}
        self._prompts: set[int] = set()
        self._n_tokens, self._n_texts = 0, 0
        self._lock = Lock()

    def __len__(self) -> int:
        """How many tokens it remembers."""
        return self._n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its texts and of its index."""
        return 8 * len(self._newest) + BYTES_PER_TOKEN * self._n_held

    @property
    def _n_held(self) -> int:
        """Its tokens, and those that its texts count for."""
        return self._n_tokens + TOKENS_PER_TEXT * len(self._texts)

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a text, for instance an answer from elsewhere. Raises ``ValueError`` for no token ids."""
        tokens, end = [int(token) for token in token_ids], self.vocab or 2**31
        if any(not 0 <= token < end for token in tokens):
            raise ValueError(f"`token_ids` have to be 0 to {end - 1}, but are {tokens!r:.80}.")
        with self._lock:
            self.extend(self.text(), tokens)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._rebuild([])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write its tokens to a safetensors file that only the user can read."""
        with self._lock:
            texts, n = list(self._texts.values()), torch.int64
            tokens = [token for text in texts for token in text.tokens]
            tensors = {
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=n),
                "uses": torch.tensor([text.n_used for text in texts], dtype=n),
                "vocab": torch.tensor(self.vocab or 0, dtype=n),
            }
        target = Path(path)
        with tempfile.TemporaryDirectory(".partial", f".{target.name}.", target.parent) as folder:
            partial = Path(folder, "file")
            partial.touch(0o600)
            partial.write_bytes(save(tensors))
            os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = 64 * 2**20) -> SuffixMemory:
        """Read a file that ``save`` has written. Raises ``ValueError`` for any other file."""
        memory, data = cls(max_bytes), Path(path).read_bytes()
        try:
            tensors = load(data)
            tokens, lengths, uses = (tensors[name] for name in ("tokens", "lengths", "uses"))
            vocab = int(tensors["vocab"])
            kinds = [(t.dtype, t.ndim) for t in (tokens, lengths, uses)]
            if kinds != [(torch.int32, 1), (torch.int64, 1), (torch.int64, 1)]:
                raise ValueError(f"its tensors are {kinds}")
            if len(lengths) != len(uses) or bool((lengths < 0).any() or (uses < 0).any()):
                raise ValueError("its lengths and uses are no counts of texts")
            if sum(lengths.tolist()) != len(tokens):  # which does not overflow
                raise ValueError("its lengths do not sum up to its tokens")
            if bool((tokens < 0).any() or (tokens.long() >= (vocab or 2**31)).any()):
                raise ValueError("a token is outside of its vocabulary")
        except (SafetensorError, KeyError, OverflowError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{os.fspath(path)!r} is no file that SuffixMemory.save has written: {error}."
            ) from None
        memory.vocab = vocab or None
        for part, n_used in zip(tokens.split(lengths.tolist()), uses.tolist(), strict=True):
            text = memory.text()
            text.n_used = n_used
            memory.extend(text, part.tolist())
        return memory

    def begin(self, run: Run) -> Drafter:
        """The drafter of one call. Raises ``ValueError`` if its model has another vocabulary."""
        vocab = int(run.model.config.get_text_config(decoder=True).vocab_size)
        with self._lock:
            if self.vocab is None:
                tops = (max(text.tokens, default=0) for text in self._texts.values())
                self.vocab = vocab if max(tops, default=0) < vocab else None
        if self.vocab != vocab:
            raise ValueError(
                f"This SuffixMemory has texts of a vocabulary of {self.vocab or 'more'} tokens, and "
                f"{type(run.model).__name__} has {vocab}. Use one memory for each tokenizer."
            )
        return DrafterOfCall(self, run)

    def text(self) -> Text:
        self._n_texts += 1
        return self._texts.setdefault(self._n_texts, Text(self._n_texts))

    def prompt(self, tokens: list[int]) -> Text:
        """A text that begins with a prompt: its end alone, if the prompt is known."""
        key = hash(tuple(tokens))
        with self._lock:
            text, is_known = self.text(), key in self._prompts
            self._prompts.add(key)
            self.extend(text, tokens[-LONGEST:] if is_known else tokens)
            return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        with self._lock:
            room = min(self._max_tokens // 2, 2**OFFSET_BITS - 1) - len(text.tokens)
            tokens = tokens[: max(room, 0)]
            if self._n_held + len(tokens) > self._max_tokens:
                self._forget()
            if text.number not in self._texts:  # forgotten: its beginning is lost
                return
            self._n_tokens += len(tokens)
            for token in tokens:
                text.tokens.append(token)
                self._link(text, len(text.tokens))

    def _link(self, text: Text, end: int) -> None:
        """Put the place behind the first ``end`` tokens of a text at the head of its chain."""
        if end >= KEY:
            slot = self._slot(text.tokens[end - KEY : end])
            text.previous.append(self._newest[slot])
            self._newest[slot] = text.number << OFFSET_BITS | end

    def _slot(self, key: Sequence[int]) -> int:
        return hash(tuple(key)) & (len(self._newest) - 1)

    def _forget(self) -> None:
        """Drop the texts that were used least, and of these the oldest, and halve the uses of the others."""
        kept, n = [], 0
        for text in sorted(self._texts.values(), key=lambda t: (t.n_used, t.number), reverse=True):
            n_of_text = TOKENS_PER_TEXT + len(text.tokens)
            if n + n_of_text <= KEPT_SHARE * self._max_tokens:
                n += n_of_text
                text.n_used = int(text.n_used * KEPT_SHARE)
                kept.append(text)
        self._rebuild(sorted(kept, key=lambda text: text.number))

    def _rebuild(self, texts: list[Text]) -> None:
        self._texts = {text.number: text for text in texts}
        self._n_tokens = sum(len(text.tokens) for text in texts)
        self._prompts.clear()
        self._newest = array("q", bytes(8 * len(self._newest)))
        for text in texts:
            text.previous = array("q")
            for end in range(len(text.tokens) + 1):
                self._link(text, end)

    def continuation(self, tail: list[int], n: int) -> list[int]:
        """Up to ``n`` tokens that are likely to follow ``tail``, the newest tokens of a row."""
        with self._lock:
            places = self._places(tail)
            draft, probability = list[int](), 1.0
            while places and len(draft) < n:
                votes = Counter(text.tokens[place] for text, place in places)
                token, count = votes.most_common(1)[0]
                probability *= count / len(places)
                if probability < CONFIDENCE:
                    break
                draft.append(token)
                agreeing = [(t, place) for t, place in places if t.tokens[place] == token]
                for text, _ in agreeing if len(draft) == 1 else ():
                    text.n_used += 1
                places = [(t, place + 1) for t, place in agreeing if place + 1 < len(t.tokens)]
            return draft

    def _places(self, tail: list[int]) -> list[tuple[Text, int]]:
        """The places that follow the longest suffix of ``tail``: texts and offsets, the newest first."""
        if len(tail) < KEY:
            return []
        longest, places = KEY, list[tuple[Text, int]]()
        place = self._newest[self._slot(tail[-KEY:])]
        for _ in range(PLACES):
            if (text := self._texts.get(place >> OFFSET_BITS)) is None:  # the end of the chain
                break
            at, length = place & (2**OFFSET_BITS - 1), 0
            place = text.previous[at - KEY]
            if at == len(text.tokens):  # nothing follows
                continue
            while length < min(at, len(tail)) and text.tokens[at - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append((text, at))
        return places


class DrafterOfCall(Drafter):
    """Drafts from a memory for one call, whose tokens the memory learns while they are generated."""

    def __init__(self, memory: SuffixMemory, run: Run) -> None:
        self.memory = memory
        self.texts: list[Text | None] = [memory.prompt(prompt) for prompt in prompts_of(run)]
        eos = run.config._eos_token_tensor
        self.ends: set[int] = set() if eos is None else set(eos.flatten().tolist())

    def draft(self, context: DraftContext) -> Draft | None:
        host_ids = context.ids.cpu() if context.host_ids is None else context.host_ids
        rows: list[list[int]] = []
        for row, known in enumerate(context.known):
            n = max(context.end - known, 0)
            tail = host_ids[row, max(known - LONGEST, 0) : known].tolist() if n else []
            rows.append(self.memory.continuation(tail, n))
            if context.needs_all and known == context.start and not rows[-1]:
                return None
        return draft_of_rows(rows, context)

    def observe(self, verdict: Acceptance) -> None:
        with self.memory._lock:
            self.memory.n_drafted += sum(verdict.drafted)
            self.memory.n_accepted += sum(verdict.accepted)

    def see(self, run: Run, model_outputs: Any, scores: Any, n_advanced: int) -> None:
        for row, tokens in enumerate(run.ids[:, -n_advanced:].tolist()):
            if (text := self.texts[row]) is None:
                continue
            end = next((n for n, token in enumerate(tokens, 1) if token in self.ends), None)
            self.memory.extend(text, tokens[:end])
            if end is not None:  # padding follows
                self.texts[row] = None
