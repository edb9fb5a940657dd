"""What a forward costs by the number of tokens, and what speculation can gain at that cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .race import Forwards

WIDTHS = (1, 2, 4, 8, 16)

#: Drafts that are considered where the best length is sought.
LENGTHS = range(1, WIDTHS[-1])


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of processor time of a forward.

    ``widths``: by the number of tokens of each row, with ``past`` tokens in the cache; ``prompt``:
    of ``past`` tokens with an empty cache.
    """

    past: int
    prompt: float
    widths: dict[int, float]

    def of(self, width: float) -> float:
        """Of a forward of ``width`` tokens: on the line through the two nearest that were measured."""
        known = sorted(self.widths)
        low = max([w for w in known[:-1] if w <= width], default=known[0])
        high = known[known.index(low) + 1]
        slope = (self.widths[high] - self.widths[low]) / (high - low)
        return self.widths[low] + slope * (width - low)

    def relative(self, width: float) -> float:
        """The same, in forwards of one token."""
        return self.of(width) / self.of(1)

    def all_of(self, widths: Sequence[int]) -> float:
        """Of the forwards of one call, of which the first has the prompt."""
        if not widths:
            return 0.0
        return self.prompt * widths[0] / self.past + sum(map(self.of, widths[1:]))


@torch.no_grad()
def measure_costs(
    model: Any,
    rows: int,
    past: int,
    widths: Sequence[int] = WIDTHS,
    repeat: int = 15,
) -> Costs:
    """Medians of ``repeat`` forwards of each width, which take turns; random ids."""
    ids = torch.randint(5, model.config.vocab_size, (rows, past + max(widths)))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    prompts = []
    for _ in range(3):
        start = time.process_time()
        output = model(input_ids=ids[:, :past], use_cache=True, logits_to_keep=1)
        prompts.append(time.process_time() - start)
    cache = output.past_key_values
    for turn in range(repeat + 1):
        for width in widths:
            start = time.process_time()
            model(input_ids=ids[:, past : past + width], past_key_values=cache, use_cache=True)
            if turn:
                seconds[width].append(time.process_time() - start)
            cache.crop(-width)
    return Costs(
        past,
        statistics.median(prompts),
        {width: statistics.median(taken) for width, taken in seconds.items()},
    )


@contextmanager
def first_layers(model: Any, n_layers: int) -> Iterator[None]:
    """Within, ``model`` has its first ``n_layers`` layers only."""
    decoder = model.get_decoder()
    layers, n_before = decoder.layers, decoder.config.num_hidden_layers
    decoder.layers, decoder.config.num_hidden_layers = layers[:n_layers], n_layers
    try:
        yield
    finally:
        decoder.layers, decoder.config.num_hidden_layers = layers, n_before


@torch.no_grad()
def choices(model: Any, ids: torch.Tensor, n_new: int) -> torch.Tensor:
    """What ``model`` chooses at each of the last ``n_new`` positions of ``ids``: ``(rows, n_new)``."""
    logits = model(input_ids=ids, logits_to_keep=n_new + 1).logits[:, :-1]
    return logits.argmax(dim=-1)


# --- the formula of Leviathan et al. 2023 -------------------------------------------------------


def expected_tokens(agreement: float, n: int) -> float:
    """Tokens that a round with a draft of ``n`` yields, each accepted with the same probability."""
    return sum(agreement**i for i in range(n + 1))


def predicted_gain(agreement: float, n: int, draft: float, target: Costs) -> float:
    """Gain over decoding without drafts; ``draft``: seconds of one of its steps."""
    return expected_tokens(agreement, n) * target.of(1) / (n * draft + target.of(n + 1))


def best_gain(agreement: float, draft: float, target: Costs) -> tuple[int, float]:
    """The best length of a draft, and the gain there."""
    gains = {n: predicted_gain(agreement, n, draft, target) for n in LENGTHS}
    best = max(gains, key=lambda n: gains[n])
    return best, gains[best]


def needed_ratio(agreement: float, gain: float, target: Costs) -> float:
    """The cost of a draft step, by that of a target step, at which ``gain`` is just possible.

    Negative if a draft that costs nothing is not enough.
    """
    return max((expected_tokens(agreement, n) / gain - target.relative(n + 1)) / n for n in LENGTHS)


def forwards_alone(forwards: Sequence[Forwards], target: Costs, draft: Costs | None) -> float:
    """Seconds that the forwards of some calls take by themselves, on average of a call."""
    total = sum(
        target.all_of(f.target) + (draft.all_of(f.draft) if draft else 0.0) for f in forwards
    )
    return total / len(forwards)
