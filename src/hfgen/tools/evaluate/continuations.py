"""Log-likelihoods of continuations of contexts; what several have in common is forwarded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from typing import Any

import torch

from ...running import shared_prefix
from ...running.shared_prefix import Prefixes

#: Without a batch size: tokens that are forwarded at once. Logits of prompts are made some positions
#: at a time, so that tokens bound little more than hidden states.
TOKENS = 8192

HELD = 2**29  # bytes of keys and values that rows may take together, if `TOKENS` take less

#: What a forward costs besides its tokens, in tokens: no batch has more padding. On an accelerator, an
#: estimate: launching a forward takes some 20 ms, and models forward 30,000 to 300,000 tokens per second.
ON_CPU, ON_ACCELERATOR = 64, 2048

#: How many forwards a prefix that contexts share has to save: it costs its own, and batches of fewer rows.
WORTH = 4

#: Texts share a prefix if that saves so large a share of their tokens. Each forward has a cost of its own.
SHARE = 0.3

Pair = tuple[list[int], list[int]]  # ids of a context, and ids of a continuation

#: By number of the pair: the continuation's log-probability, and whether each token is the likeliest one.
Found = dict[int, tuple[float, bool]]


@dataclass(frozen=True, slots=True)
class Text:
    """The forwarded ``tokens``: all but the last one of each continuation, which ``numbers`` tell."""

    tokens: tuple[int, ...]
    continuations: dict[int, list[int]]

    @property
    def n_context(self) -> int:
        """Tokens of the shortest context."""
        return len(self.tokens) + 1 - max(map(len, self.continuations.values()))


@dataclass(frozen=True, slots=True)
class Group:
    """Texts of one context, and the ``prefix`` that they share; a text alone is its own prefix."""

    prefix: tuple[int, ...]
    texts: list[Text]

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the first column whose logits are wanted."""
        return self.prefix[: min(text.n_context for text in self.texts) - 1]


#: What is forwarded in one row: a row of prefixes, how many of the tokens those have, the tokens, and texts.
Part = tuple[int, int, tuple[int, ...], list[Text]]


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Log-likelihoods by ``model``, a decoder; computed in ``dtype``.

    ``batch_size``: contexts that are forwarded at once; ``None``: as ``TOKENS`` says. Texts that
    continue them are forwarded together as far as ``TOKENS`` and ``HELD`` allow.
    """

    model: Any
    max_length: int
    batch_size: int | None = None
    dtype: torch.dtype | None = None

    def of(self, pairs: Sequence[Pair]) -> Iterator[Found]:
        """Score some pairs after another. Of one that is too long, the first tokens are left out."""
        may_share = shared_prefix.may_share(self.model, self.max_length)
        groups = list(grouped(pairs, self.max_length, may_share))
        least = WORTH * self._cost
        for n_shared, some in clusters(groups, least) if may_share else [(0, groups)]:
            some.sort(key=lambda group: -len(group.prefix))
            prefixes = None
            if n_shared:
                first = [some[0].prefix[:n_shared]]
                prefixes = shared_prefix.forward(self.model, first, keeps=True).prefixes
            while some:
                longest = len(some[0].prefix)
                most = self.batch_size or _rows(longest, longest - n_shared, prefixes)
                n = self._n_alike([len(group.prefix) for group in some[:most]], most)
                yield self._of_groups(some[:n], n_shared, prefixes)
                del some[:n]

    def _of_groups(self, groups: list[Group], n_shared: int, shared: Prefixes | None) -> Found:
        """Score the continuations of ``groups``; their first ``n_shared`` tokens are the row of ``shared``."""
        found: Found = defaultdict(lambda: (0.0, True))
        longer: list[Part] = [
            (row, len(group.prefix), text.tokens, [text])
            for row, group in enumerate(groups)
            for text in group.texts
            if len(text.tokens) > len(group.prefix)
        ]
        parts: list[Part] = [(0, n_shared, group.prefix, group.texts) for group in groups]
        prefixes = self._add(found, shared, parts, keeps=bool(longer))
        longer.sort(key=lambda part: part[1] - len(part[2]))
        while longer:
            assert prefixes is not None
            sizes = [len(tokens) - start for _, start, tokens, _ in longer]
            longest = max(len(tokens) for _, _, tokens, _ in longer)
            most = max(self.batch_size or 1, _rows(longest, sizes[0], prefixes))
            n = self._n_alike(sizes, most)
            self._add(found, prefixes, longer[:n])
            del longer[:n]
        return found

    @property
    def _cost(self) -> int:
        return ON_CPU if self.model.device.type == "cpu" else ON_ACCELERATOR

    def _n_alike(self, sizes: list[int], most: int) -> int:
        """How many rows of ``sizes``, the largest first, to forward at once: at most ``most``."""
        padding = accumulate(sizes[0] - size for size in sizes[:most])
        return sum(n <= self._cost for n in padding)

    def _add(
        self, found: Found, prefixes: Prefixes | None, parts: list[Part], keeps: bool = False
    ) -> Prefixes | None:
        """Forward ``parts``, add the log-probabilities of what follows in them; returns what is kept of them."""
        rows, starts, _, _ = zip(*parts, strict=True)
        new_tokens = [tokens[start:] for _, start, tokens, _ in parts]
        if prefixes is not None:
            prefixes = prefixes.expand(self.model, rows, starts, max(map(len, new_tokens)))
        forwarded = shared_prefix.forward(self.model, new_tokens, prefixes, keeps=keeps)
        wanted = [
            (row, column - start, token, number)
            for row, (_, start, tokens, texts) in enumerate(parts)
            for text in texts
            for number, continuation in text.continuations.items()
            for column, token in enumerate(continuation, len(text.tokens) - len(continuation))
            if start <= column < len(tokens)
        ]
        row, column, token, number = torch.tensor(wanted).T
        width = forwarded.ids.shape[1]
        places, index = (row * width + column).unique(return_inverse=True)
        for logits in forwarded.logits(places // width, places % width):
            here = (index >= 0) & (index < len(logits))
            at, tokens = index[here].to(logits.device), token[here].to(logits.device)
            logprobs = logits.log_softmax(dim=-1, dtype=self.dtype or torch.float32)[at, tokens]
            is_best = logits.argmax(dim=-1)[at] == tokens
            index = index - len(logits)
            columns = number[here].tolist(), logprobs.tolist(), is_best.tolist()
            for which, logprob, is_likeliest in zip(*columns, strict=True):
                total, is_greedy = found[which]
                found[which] = total + logprob, is_greedy and is_likeliest
        return forwarded.prefixes


def _rows(longest: int, n_new: int, prefixes: Prefixes | None) -> int:
    """How many rows of up to ``longest`` tokens are forwarded at once, ``n_new`` of each."""
    held = TOKENS if prefixes is None else max(TOKENS, HELD // prefixes.bytes_per_token)
    return max(1, min(TOKENS // n_new, held // longest))


def grouped(pairs: Sequence[Pair], max_length: int, may_share: bool = True) -> Iterator[Group]:
    """Yield the groups to forward for ``pairs``: each text once, texts of a context together if it saves enough."""
    texts: dict[tuple[int, ...], Text] = {}
    for number, (context, continuation) in enumerate(pairs):
        tokens = tuple((context + continuation)[-(max_length + 1) :][:-1])
        texts.setdefault(tokens, Text(tokens, {})).continuations[number] = continuation
    of_contexts: dict[tuple[int, ...], list[Text]] = defaultdict(list)
    for text in texts.values():
        of_contexts[text.tokens[: text.n_context]].append(text)
    for some in of_contexts.values():
        prefix: Any = commonprefix([text.tokens for text in some])  # noqa: RUF071 - of any sequences
        saved = (len(some) - 1) * len(prefix)
        if may_share and saved > SHARE * sum(len(text.tokens) for text in some):
            yield Group(prefix, some)
        else:
            yield from (Group(text.tokens, [text]) for text in some)


def clusters(groups: Iterable[Group], least: int) -> Iterator[tuple[int, list[Group]]]:
    """Groups that begin alike, as those with the same few-shot examples do, and with how many tokens.

    Those of which too few begin alike to save ``least`` tokens come first, with 0.
    """
    merged: list[tuple[Any, list[Group]]] = [((), [])]
    for group in sorted(groups, key=lambda group: group.prefix):
        context, (prefix, some) = group.context, merged[-1]
        n = len(some)
        common: Any = commonprefix([prefix, context])  # noqa: RUF071 - of any sequences
        # Two have to be alike; another one is taken in if together they save no less.
        longer = SHARE * max(len(prefix), len(context))
        if 0 < len(common) >= (longer if n < 2 else (n - 1) / n * len(prefix)):
            some.append(group)
            merged[-1] = common, some
        else:
            merged.append((context, [group]))
    alone: list[Group] = []
    alike = []
    for prefix, some in merged[1:]:
        if len(prefix) * (len(some) - 1) >= max(least, 1):
            alike.append((len(prefix), some))
        else:
            alone += some
    yield from [*([(0, alone)] if alone else []), *alike]
