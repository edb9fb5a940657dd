"""Metrics of predictions: BLEU, chrF, ROUGE, exact match, or your own function; bootstrap intervals of sums."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

#: Metric → the module that computes it, which has the name of its package but for hyphens.
PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}
NAMES = ("exact_match", *PACKAGES)

References = Sequence[Sequence[str]]

DRAWS, LEVEL = 1000, 0.95  # resamples of an interval, and the share of them that lies within it


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle ``LEVEL`` of a statistic's values over ``DRAWS`` resamples."""

    low: float
    high: float


def interval(
    parts: Tensor, statistic: Callable[[list[float]], float], seed: int = 0
) -> Interval | None:
    """The percentile bootstrap interval (Efron 1979) of ``statistic(parts.sum(dim=0))``.

    ``parts (units, k)``: what each unit adds to the ``k`` sums that ``statistic`` is computed from. Units
    are drawn with replacement, by a generator with ``seed``. ``None`` for fewer than two units.
    """
    n = len(parts)
    if n < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(DRAWS):
        drawn = torch.randint(n, (n,), generator=generator).bincount(minlength=n)
        values.append(statistic((drawn.double() @ parts.double()).tolist()))
    quantiles = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    return Interval(*torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist())


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of sums over lines, so that it can be computed of any resample of them."""

    name: str
    parts: Callable[[Sequence[str], References], Tensor]  # what lines add to the sums, (lines, k)
    statistic: Callable[[list[float]], float]


@dataclass(frozen=True, slots=True)
class Score:
    """A metric of all lines, its bootstrap interval over lines, and its value of each line alone."""

    name: str
    value: float
    interval: Interval | None
    of_lines: list[float]


def installed() -> list[str]:
    """The names of the metrics whose packages are there."""
    return [name for name in NAMES if name not in PACKAGES or find_spec(PACKAGES[name])]


def metrics_of(name: str) -> list[Metric]:
    """The metrics of a name of ``NAMES``, or of ``module:function``; ROUGE is three.

    A function gets a prediction and its list of references, and returns a number; its metric is the mean.

    Raises ``ValueError`` for another name, ``ImportError`` for a package that is not installed, for a module
    that cannot be imported, and for one that has no such function.
    """
    if ":" in name:
        return [_mean(name, _users(name))]
    if name not in NAMES:
        known = f"{', '.join(NAMES)} or module:function"
        raise ValueError(f"A metric is one of {known}, but is {name!r}.")
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        package = PACKAGES[name].replace("_", "-")
        raise ImportError(
            f"The metric {name!r} needs {package}: pip install {package}, or pip install 'hfgen[eval]'."
        )
    if name == "rouge":
        return [_rouge(kind) for kind in ("rouge1", "rouge2", "rougeL")]
    return [_mean(name, exact_match) if name == "exact_match" else _of_sacrebleu(name)]


def score(
    metrics: Sequence[Metric], predictions: Sequence[str], references: References, seed: int = 0
) -> list[Score]:
    """Each metric of the predictions. ``ValueError`` for none, and for one without references."""
    if len(predictions) != len(references):
        needs = f"needs one entry for each of {len(predictions)} predictions"
        raise ValueError(f"`references` {needs}, but has {len(references)}.")
    if not predictions:
        raise ValueError("`predictions` is empty, but at least one prediction is needed.")
    if empty := [number for number, each in enumerate(references) if not each]:
        raise ValueError(f"`references[{empty[0]}]` has to have at least one, but is empty.")
    scores = []
    for metric in metrics:
        parts, statistic = metric.parts(predictions, references).double(), metric.statistic
        of_lines, of_all = map(statistic, parts.tolist()), statistic(parts.sum(dim=0).tolist())
        between = interval(parts, statistic, seed)
        scores.append(Score(metric.name, of_all, between, list(of_lines)))
    return scores


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction is one of the references, but for white space around them."""
    return float(prediction.strip() in [reference.strip() for reference in references])


def _mean(name: str, of_line: Callable[[str, list[str]], Any]) -> Metric:
    def parts(predictions: Sequence[str], references: References) -> Tensor:
        pairs = zip(predictions, references, strict=True)
        values = [float(of_line(text, list(among))) for text, among in pairs]
        return torch.tensor([(value, 1.0) for value in values], dtype=torch.float64)

    return Metric(name, parts, lambda sums: sums[0] / sums[1])


def _rouge(kind: str) -> Metric:
    """Lin 2004, the F-measure of the best reference, by Google's rouge-score without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind])
    return _mean(kind, lambda text, among: scorer.score_multi(among, text)[kind].fmeasure)


def _of_sacrebleu(name: str) -> Metric:
    """Papineni et al. 2002 and Popović 2015 of the corpus, with sacrebleu's defaults (Post 2018)."""
    import sacrebleu

    scorer: Any = sacrebleu.BLEU() if name == "bleu" else sacrebleu.CHRF()

    def parts(predictions: Sequence[str], references: References) -> Tensor:
        streams = [list(stream) for stream in zip_longest(*references)]
        rows = scorer._extract_corpus_statistics(list(predictions), streams)
        return torch.tensor(rows, dtype=torch.float64)

    def statistic(sums: list[float]) -> float:
        return float(scorer._compute_score_from_stats([round(each) for each in sums]).score)

    return Metric(name, parts, statistic)


def _users(name: str) -> Callable[[str, list[str]], float]:
    """The function of ``module:function``; modules of the working directory are found, too.

    It raises ``ValueError`` for what it cannot score, and for what it gives that is no finite number.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        users = getattr(import_module(module), function)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ImportError(f"The metric {name!r} cannot be loaded: {why}") from error
    if not callable(users):
        raise ValueError(f"A metric module:function has to be callable, but {name!r} is {users!r}.")

    def of_line(prediction: str, references: list[str]) -> float:
        try:
            value = float(users(prediction, references))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"no score for the prediction {prediction!r:.80}: {why}") from error
        if not math.isfinite(value):
            raise ValueError(f"the score of the prediction {prediction!r:.80} is {value}")
        return value

    return of_line
