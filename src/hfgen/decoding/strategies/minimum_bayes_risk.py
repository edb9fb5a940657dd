"""Minimum-Bayes-risk decoding over samples (Kumar & Byrne 2004, Eikema & Aziz 2020).

Of several samples, the one is returned that is most like the others, under a utility that compares
two texts (Freitag et al. 2022 with learned ones).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from transformers.utils import ModelOutput

from ...state.run import Run, Step
from .sample import Sample

#: ``(hypothesis, reference) -> how good``: two texts, or two sequences of token ids.
Utility: TypeAlias = Callable[[Any, Any], float]


def chrf() -> Utility:
    """sacrebleu's sentence-level chrF, 0 to 100. Raises ``ImportError`` without sacrebleu."""
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise ImportError(
            "minimum_bayes_risk() compares samples by sacrebleu's chrF unless a `utility` is passed, "
            "and sacrebleu is not installed: pip install hfgen[mbr]"
        ) from error
    metric = CHRF()
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score


def token_f1(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The share of tokens that two sequences have in common, in any order, 0 to 1."""
    total = len(hypothesis) + len(reference)
    return 2 * (Counter(hypothesis) & Counter(reference)).total() / total if total else 1.0


class MinimumBayesRisk(Sample):
    """Draw ``num_return_sequences`` samples per prompt, return the ``n_best`` likest to the others."""

    streams = False
    checks_late = may_record = True

    def __init__(
        self, run: Run, utility: Utility, n_best: int = 1, on_tokens: bool = False
    ) -> None:
        super().__init__(run)
        self.utility, self.n_best, self.on_tokens = utility, n_best, on_tokens
        self.prompt_length = run.ids.shape[1]
        #: ``(rows,)``: tokens generated until each sample's end, an EOS included.
        self.lengths = torch.zeros(len(run.ids), dtype=torch.long, device=run.ids.device)

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        self.lengths = self.lengths + self.unfinished
        return super().step(run, model_outputs)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        """The best samples, their expected utilities, and which rows they were, as beams say it."""
        ids = super().result(run)["sequences"]
        assert ids is not None
        n = run.config.num_return_sequences
        samples = self.samples(run, ids)
        rows, utilities = [], []
        for start in range(0, len(samples), n):
            expected = expected_utilities(samples[start : start + n], self.utility)
            for index in best_distinct(samples[start : start + n], expected)[: self.n_best]:
                rows.append(start + index)
                utilities.append(expected[index])
        chosen = torch.tensor(rows, device=ids.device)
        n_steps = int(self.lengths[chosen].max())
        is_past_end = torch.arange(n_steps, device=ids.device) >= self.lengths[chosen, None]
        return {
            "sequences": ids[chosen, : self.prompt_length + n_steps],
            "sequences_scores": torch.tensor(utilities, device=ids.device),
            "beam_indices": chosen[:, None].expand(-1, n_steps).masked_fill(is_past_end, -1),
        }

    def samples(self, run: Run, ids: torch.Tensor) -> list[Hashable]:
        """The generated part of each row of ``ids (rows, length)``, without its EOS: a text, or a tuple of ids."""
        eos = run.config._eos_token_tensor
        ends = set() if eos is None else set(eos.tolist())
        generated = ids[:, self.prompt_length :].tolist()
        rows = [row[:length] for row, length in zip(generated, self.lengths.tolist(), strict=True)]
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        if self.on_tokens:
            return [tuple(row) for row in rows]
        return [run.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def expected_utilities(samples: Sequence[Hashable], utility: Utility) -> list[float]:
    """The mean utility of each sample against all others; ``ValueError`` if one is no number."""
    counts = Counter(samples)
    expected = {}
    for hypothesis in counts:
        total = 0.0
        for reference, count in counts.items():
            if weight := count - (reference == hypothesis):  # not against itself
                value = float(utility(hypothesis, reference))
                if math.isnan(value):
                    raise ValueError(
                        f"`utility` returned NaN for the hypothesis {hypothesis!r} and the reference "
                        f"{reference!r}; samples cannot be ranked by it."
                    )
                total += weight * value
        expected[hypothesis] = total / (len(samples) - 1)
    return [expected[sample] for sample in samples]


def best_distinct(samples: Sequence[Hashable], expected: Sequence[float]) -> list[int]:
    """Indices of ``samples``, best first, the earlier first where equal; repetitions come last."""
    is_repeated = [sample in samples[:index] for index, sample in enumerate(samples)]
    return sorted(range(len(samples)), key=lambda i: (is_repeated[i], -expected[i], i))
