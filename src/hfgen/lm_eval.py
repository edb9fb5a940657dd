"""lm_eval's model type ``hfgen``: the engine generates, and contexts of likelihoods are forwarded once.

Importing this registers it. ``python -m hfgen.lm_eval`` is lm_eval's command line with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from . import families
from .engine.many import generate_many
from .mixin import mixed_view
from .running import environment
from .running.exact import exact as make_exact
from .running.exact.switch import is_exact
from .running.prefix import PrefixCache
from .tools.evaluate.continuations import Likelihoods

#: With ``batch_size="auto"``: rows that decode at once.
ROWS = 32

#: Keys and values of contexts are kept for those that begin alike, up to so many bytes, where so large a share
#: of all contexts' text is also the beginning of another one. Elsewhere, keeping them costs more than it saves.
KEPT, SHARE = 2**29, 0.3


@register_model("hfgen")
class HfgenLM(HFLM):
    """lm_eval's ``hf``, with its arguments, on hfgen. A model that is passed stays as it is without ``exact``.

    ``batch_size``: answers that are decoded at once, and contexts that are forwarded at once for
    likelihoods. ``"auto"``, the default, tries nothing out: ``ROWS``, and what
    ``evaluate.continuations`` says. ``exact``: make the model exact (``hfgen.exact``), so that results have the
    same bits at every batch size and in every order. Raises ``ValueError`` for a batch size below 1, an
    encoder-decoder, virtual tokens, and a model that cannot be exact.
    """

    def __init__(
        self,
        pretrained: Any,
        batch_size: int | str = "auto",
        *,
        exact: bool = False,
        **kwargs: Any,
    ) -> None:
        if not (str(batch_size).startswith("auto") or re.fullmatch("[1-9][0-9]*", str(batch_size))):
            raise ValueError(f"`batch_size` has to be 'auto' or at least 1, but is {batch_size!r}.")
        super().__init__(pretrained, batch_size=batch_size, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                "lm_eval's model type 'hfgen' supports decoder-only models, but "
                f"{type(self.model).__name__} is an encoder-decoder: use 'hf'."
            )
        if families.decodes_by_itself(self.model):
            raise ValueError(
                "lm_eval's model type 'hfgen' supports adapters of weights, and none of calls, such as "
                "virtual tokens before the prompt: use 'hf'."
            )
        if exact and not is_exact(self.model):
            make_exact(self.model)
        self.mixed = mixed_view(self.model)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        return ROWS  # `loglikelihood_rolling` asks for it

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into the config of its results; ``card`` is ``hfgen.card`` of the model."""
        return super().get_model_info() | {"card": environment.of(self.mixed, self.tokenizer)}

    @contextmanager
    def _running(self, n_requests: int, disable_tqdm: bool) -> Iterator[tqdm]:
        """The mixed precision of the model, and a progress bar."""
        dtype = self.mixed_precision_dtype
        with (
            torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None),
            tqdm(total=n_requests, disable=disable_tqdm or self.rank != 0) as bar,
        ):
            yield bar

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each continuation the sum of its log-probabilities, and whether it is the greedy one.

        Raises ``ValueError`` for a context or a continuation without tokens, and for one that does not fit.
        """
        for text, context, continuation in requests:
            if not (context and 0 < len(continuation) <= self.max_length):
                raise ValueError(
                    f"A context has to have a token, and a continuation 1 to {self.max_length}, but "
                    f"{text!r:.200} has {len(context)} and {len(continuation)}."
                )
        likelihoods: dict[int, tuple[float, bool]] = {}
        size = None if self.batch_size == "auto" else int(self.batch_size)
        scorer = Likelihoods(self.mixed, self.max_length, size, self.softmax_dtype)
        with self._running(len(requests), disable_tqdm) as bar:
            for answers in scorer.of([pair for _, *pair in requests]):
                for number, answer in answers.items():
                    likelihoods[number] = answer
                    if (text := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", text, answer)
                bar.update(len(answers))
        return [likelihoods[number] for number in range(len(requests))]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """The text of each answer, cut at its stop strings; all in one engine."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        rows = ROWS if self.batch_size == "auto" else self.batch_size
        rows *= max((request.args[1].get("num_beams") or 1 for request in requests), default=1)
        stops: list[list[str]] = []  # of the requests that were read

        def prompts() -> Iterator[tuple[list[int], dict[str, Any]]]:
            for request in requests:
                context, kwargs = request.args
                kwargs = normalize_gen_kwargs(kwargs, self.max_gen_toks)
                stops.append(handle_stop_sequences(kwargs.pop("until", None), eos=eos))
                yield self._request(context, kwargs, stops[-1])

        texts: list[str] = []
        with self._running(len(requests), disable_tqdm) as bar:
            alike = begin_alike([request.args[0] for request in requests])
            outputs = generate_many(
                self.mixed,
                prompts(),
                self.tokenizer,
                max_rows=rows,
                prefix_cache=PrefixCache(KEPT) if alike else None,
                on_error="raise",
            )
            for request, output in zip(requests, outputs, strict=True):
                texts.append(self._text(output.token_ids, stops[len(texts)]))
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
                bar.update()
        return texts

    def _request(
        self, context: str, kwargs: dict[str, Any], stop: list[str]
    ) -> tuple[list[int], dict[str, Any]]:
        """The ids of a context, and arguments of ``generate``."""
        n_new = kwargs.pop("max_gen_toks")
        room = self.max_length - n_new
        if room <= 0:
            raise ValueError(
                f"`max_gen_toks` has to be less than the model's {self.max_length} positions, but is "
                f"{n_new}."
            )
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=self.truncation
        )
        if kwargs.setdefault("temperature", 0.0) == 0.0 and not kwargs.get("do_sample"):
            kwargs["do_sample"] = False
            del kwargs["temperature"]
        length = {} if "max_length" in kwargs else {"max_new_tokens": n_new}
        if "" in stop:  # for `hf`, it is in any text
            length, stop = {"max_new_tokens": 1}, [text for text in stop if text]
        pad = self.tokenizer.pad_token_id
        return ids[0].tolist(), {**kwargs, **length, "stop": stop or None, "pad_token_id": pad}

    def _text(self, token_ids: list[int], stop: list[str]) -> str:
        """The text of an answer behind its thoughts and before its stop strings."""
        end: Any = self.think_end_token
        if isinstance(end, int):
            if end in token_ids:
                token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
            text, end = self.tok_decode(token_ids).lstrip(), None
        else:
            text = self.tok_decode(token_ids)
        return postprocess_generated_text(generation=text, stop=stop, think_end_token=end)


def begin_alike(contexts: Sequence[str]) -> bool:
    """Whether enough of the contexts' text is in beginnings that others have, as examples of a task are."""
    pairs = pairwise(sorted(contexts))
    shared = sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 - texts are no paths
    return shared > SHARE * sum(map(len, contexts))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
