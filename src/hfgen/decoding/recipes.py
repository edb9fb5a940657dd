"""Strategies for ``custom_generate``: your own, and minimum Bayes risk decoding."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..settings.fields import require_tokenizer
from ..settings.kinds import check_integer
from ..state.run import Run, Step, Strategy
from .loop import finish
from .outputs import GenerateOutput
from .strategies.sample import Sample

#: The methods that a strategy has to have.
METHODS = tuple(name for name in vars(Strategy) if not name.startswith("_"))


@dataclass(frozen=True)
class Recipe:
    """A strategy's class and its options, to be called for decoding. Made by ``recipe``."""

    strategy_class: Callable[..., Strategy]
    options: dict[str, Any]

    def check_call(self, config: GenerationConfig, arguments: dict[str, Any]) -> None:
        """Raise for what the strategy cannot do; ``arguments`` has the streamer and tokenizer."""

    # generate() passes `synced_gpus`, `streamer` and `tokenizer` since they are named here.
    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | torch.Tensor:
        """Decode what ``generate`` has prepared; returns what ``generate`` returns."""
        passed = {"streamer": streamer, "tokenizer": tokenizer}
        self.check_call(generation_config, passed)  # upstream's generate has not
        functions, kwargs = (logits_processor, stopping_criteria), model_kwargs | passed
        run = Run(model, input_ids, *functions, generation_config, synced_gpus, kwargs)
        return finish(run, self.start(run))

    def start(self, run: Run, arguments: dict[str, Any] | None = None) -> Strategy:
        """The strategy that decodes ``run``; the call's ``arguments`` are not its own."""
        return self.strategy_class(run, **self.options)


def recipe(strategy_class: type, **options: Any) -> Recipe:
    """Make a strategy's class into a value of ``generate(custom_generate=…)``.

    ``strategy_class`` has the methods of ``hfgen.state.run.Strategy``; its constructor takes the ``Run`` of a
    call and the ``options``. Raises ``TypeError`` if that is not so.
    """
    if not isinstance(strategy_class, type):
        raise TypeError(
            f"recipe() takes a strategy's class, but got {type(strategy_class).__name__} "
            f"({str(strategy_class)[:60]}). An instance is made for each call."
        )
    name = strategy_class.__name__
    if missing := [m for m in METHODS if not callable(getattr(strategy_class, m, None))]:
        raise TypeError(
            f"{name} is not a strategy: it lacks {', '.join(f'{m}()' for m in missing)}. See "
            "hfgen.state.run.Strategy; hfgen.decoding.strategies.NextToken has some of them."
        )
    try:
        inspect.signature(strategy_class).bind(None, **options)
    except TypeError as error:
        raise TypeError(f"{name} is called as {name}(run, **options), but {error}.") from None
    return Recipe(strategy_class, options)


# ------------------------------------------------------------ minimum Bayes risk
# Kumar and Byrne 2004; over samples Eikema and Aziz 2020; with learned utilities Freitag et al. 2022.

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

    def __init__(self, run: Run, utility: Utility, n_best: int, on_tokens: bool) -> None:
        super().__init__(run)
        self.utility, self.n_best, self.on_tokens = utility, n_best, on_tokens
        #: ``(rows,)``: tokens generated until each sample's end, an EOS included.
        self.lengths = torch.zeros(len(run.ids), dtype=torch.long, device=run.ids.device)

    def step(self, run: Run, model_outputs: ModelOutput) -> Step:
        self.lengths = self.lengths + self.unfinished
        return super().step(run, model_outputs)

    def result(self, run: Run) -> dict[str, torch.Tensor | None]:
        """The best samples, their expected utilities, and which rows they were, as beams say it."""
        ids: Any = super().result(run)["sequences"]
        n, samples = run.config.num_return_sequences, self.samples(run, ids)
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
            "sequences": ids[chosen, : run.prompts.shape[1] + n_steps],
            "sequences_scores": torch.tensor(utilities, device=ids.device),
            "beam_indices": chosen[:, None].expand(-1, n_steps).masked_fill(is_past_end, -1),
        }

    def samples(self, run: Run, ids: torch.Tensor) -> list[Hashable]:
        """The generated part of each row of ``ids (rows, length)``, without its EOS: a text, or a tuple of ids."""
        eos = run.config._eos_token_tensor
        ends = set() if eos is None else set(eos.tolist())
        pairs = zip(ids[:, run.prompts.shape[1] :].tolist(), self.lengths.tolist(), strict=True)
        rows = [row[:length] for row, length in pairs]
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
                        f"`utility` returned NaN for the hypothesis {hypothesis!r} and the reference {reference!r}."
                    )
                total += weight * value
        expected[hypothesis] = total / (len(samples) - 1)
    return [expected[sample] for sample in samples]


def best_distinct(samples: Sequence[Hashable], expected: Sequence[float]) -> list[int]:
    """Indices of ``samples``, best first, the earlier first where equal; repetitions come last."""
    is_repeated = [sample in samples[:index] for index, sample in enumerate(samples)]
    return sorted(range(len(samples)), key=lambda i: (is_repeated[i], -expected[i], i))


class _MinimumBayesRisk(Recipe):
    def check_call(self, config: GenerationConfig, arguments: dict[str, Any]) -> None:
        n_best, samples = self.options["n_best"], config.num_return_sequences
        if arguments.get("streamer") is not None:
            raise ValueError("`streamer` cannot follow minimum_bayes_risk(), which chooses last.")
        if not config.do_sample or config.num_beams > 1 or samples < 2:
            raise ValueError(
                "minimum_bayes_risk() needs `do_sample=True` (with a `temperature` above 0), `num_beams=1` "
                "and `num_return_sequences` of 2 or more, but got `do_sample`="
                f"{config.do_sample}, `num_beams`={config.num_beams}, `num_return_sequences`={samples}."
            )
        if n_best > samples:
            raise ValueError(
                f"`n_best` (={n_best}) of minimum_bayes_risk() has to be at most `num_return_sequences`={samples}."
            )
        if not self.options["on_tokens"]:
            name = getattr(self.options["utility"], "__name__", self.options["utility"])
            require_tokenizer(arguments.get("tokenizer"), "utility", name)


def minimum_bayes_risk(
    utility: Utility | None = None, n_best: int = 1, on_tokens: bool = False
) -> Recipe:
    """Draw samples and return those that are most like the others.

    ``generate(ids, custom_generate=hfgen.minimum_bayes_risk(), do_sample=True, num_return_sequences=16,
    tokenizer=tokenizer)`` returns the sample with the highest mean utility (``sequences_scores``) against the other 15
    of its prompt; the earlier one where two are equal. What is recorded, and the cache, are of all samples;
    ``beam_indices`` says in which row each returned token is recorded, as for beams.

    Args:
        utility: ``(hypothesis, reference) -> float`` on the generated texts, more is better. By default
            sacrebleu's chrF (``pip install hfgen[mbr]``); ``ImportError`` without it.
        n_best: How many per prompt, best first. Repetitions of a sample come after all others.
        on_tokens: The utility takes token ids without padding and EOS, not texts: ``hfgen.token_f1``.
    """
    if utility is None and on_tokens:
        raise ValueError(
            "minimum_bayes_risk(on_tokens=True) needs a `utility` on token ids: hfgen.token_f1, …"
        )
    if utility is not None and not callable(utility):
        raise TypeError(f"`utility` of minimum_bayes_risk() has to be callable, not {utility!r}.")
    check_integer(n_best, "n_best", 1)
    options = {"utility": utility or chrf(), "n_best": n_best, "on_tokens": on_tokens}
    return _MinimumBayesRisk(MinimumBayesRisk, options)
