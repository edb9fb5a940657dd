"""Strategies for ``custom_generate``: your own, and minimum Bayes risk decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..settings.fields import require_tokenizer
from ..state.run import Run, Strategy
from .loop import finish
from .outputs import GenerateOutput
from .strategies.minimum_bayes_risk import MinimumBayesRisk, Utility, chrf

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
        run = Run.of(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            model_kwargs | passed,
        )
        return finish(run, self.start(run))

    def start(self, run: Run, arguments: dict[str, Any] | None = None) -> Strategy:
        """The strategy that decodes ``run``; the call's ``arguments`` are not its own."""
        return self.strategy_class(run, **self.options)


def recipe(strategy_class: type, **options: Any) -> Recipe:
    """Make a strategy's class into a value of ``generate(custom_generate=…)``.

    The call is prepared, streamed, stopped and recorded as any other. See docs/write-a-strategy.md.

    ``strategy_class`` has the methods of ``hfgen.state.run.Strategy``; its constructor takes the
    ``hfgen.state.run.Run`` of a call and the ``options``. Raises ``TypeError`` if that is not so.
    """
    if not isinstance(strategy_class, type):
        raise TypeError(
            f"recipe() takes a strategy's class, but got {type(strategy_class).__name__} "
            f"({str(strategy_class)[:60]}). An instance is made for each call."
        )
    name = strategy_class.__name__
    missing = [m for m in METHODS if not callable(getattr(strategy_class, m, None))]
    if missing:
        raise TypeError(
            f"{name} is not a strategy: it lacks {', '.join(f'{m}()' for m in missing)}. See "
            "hfgen.state.run.Strategy; hfgen.decoding.strategies.NextToken has some of them."
        )
    try:
        inspect.signature(strategy_class).bind(None, **options)
    except TypeError as error:
        raise TypeError(f"{name} is called as {name}(run, **options), but {error}.") from None
    return Recipe(strategy_class, options)


class _MinimumBayesRisk(Recipe):
    def check_call(self, config: GenerationConfig, arguments: dict[str, Any]) -> None:
        n_best, samples = self.options["n_best"], config.num_return_sequences
        if arguments.get("streamer") is not None:
            raise ValueError(
                "`streamer` cannot follow minimum_bayes_risk(), which chooses among ended samples."
            )
        if not config.do_sample or config.num_beams > 1 or samples < 2:
            raise ValueError(
                "minimum_bayes_risk() needs `do_sample=True` (with a `temperature` above 0), "
                "`num_beams=1` and `num_return_sequences` of 2 or more, but got "
                f"`do_sample`={config.do_sample}, `num_beams`={config.num_beams}, "
                f"`num_return_sequences`={samples}."
            )
        if n_best > samples:
            raise ValueError(
                f"`n_best` (={n_best}) of minimum_bayes_risk() has to be at most "
                f"`num_return_sequences` (={samples})."
            )
        if not self.options["on_tokens"]:
            name = getattr(self.options["utility"], "__name__", self.options["utility"])
            require_tokenizer(arguments.get("tokenizer"), "utility", name)


def minimum_bayes_risk(
    utility: Utility | None = None, n_best: int = 1, on_tokens: bool = False
) -> Recipe:
    """Draw samples and return those that are most like the others.

    ``generate(ids, custom_generate=hfgen.minimum_bayes_risk(), do_sample=True,
    num_return_sequences=16, tokenizer=tokenizer)`` returns the sample with the highest mean utility
    against the other 15 of its prompt; the earlier one where two are equal. ``sequences_scores`` are
    these means. What is recorded, and the cache, are of all samples; ``beam_indices`` says in which
    row each returned token is recorded, as for beams.

    Args:
        utility: ``(hypothesis, reference) -> float`` on the generated texts, more is better.
            Default: sacrebleu's chrF (``pip install hfgen[mbr]``).
        n_best: How many per prompt, best first. Repetitions of a sample come after all others.
        on_tokens: The utility takes token ids without padding and EOS, not texts: ``hfgen.token_f1``.

    Raises:
        ImportError: No utility was passed, and sacrebleu is not installed.
        TypeError, ValueError: A wrong ``utility`` or ``n_best``.
    """
    if utility is None and on_tokens:
        raise ValueError(
            "minimum_bayes_risk(on_tokens=True) needs a `utility` on token ids: hfgen.token_f1, …"
        )
    if utility is not None and not callable(utility):
        raise TypeError(f"`utility` of minimum_bayes_risk() has to be callable, not {utility!r}.")
    if not isinstance(n_best, int) or isinstance(n_best, bool):
        raise TypeError(f"`n_best` has to be an integer, but is {n_best!r}.")
    if n_best < 1:
        raise ValueError(f"`n_best` has to be at least 1, but is {n_best}.")
    options = {"utility": utility or chrf(), "n_best": n_best, "on_tokens": on_tokens}
    return _MinimumBayesRisk(MinimumBayesRisk, options)
