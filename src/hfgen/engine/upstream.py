"""transformers' ``generate_batch`` on hfgen's engine: its arguments and results are translated here."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from .. import families
from ..prepare import rows, validate
from ..prepare.config import resolve
from ..state.call import Request
from .engine import Engine
from .many import outputs
from .request import EngineEvent, RequestOutput, model_inputs

logger = logging.get_logger("ContinuousBatchingLogger")

#: Arguments of ``Engine.add`` that are not those of ``generate``.
OF_ENGINE = ("priority", "timeout", "stop")

#: Fields of a ``ContinuousBatchingConfig`` that are arguments of ``Engine``.
OPTIONS = {
    "max_requests_per_batch": "max_rows",
    "max_batch_tokens": "prefill_tokens",
    "max_memory_percent": "memory",
}

#: Fields that apply here, or whose other values ask for what the engine always does.
HOLD = (
    "scheduler_type max_queue_size return_logprobs seed auto_switch_to_flash allow_block_sharing "
    "per_request_processors drop_unsupported_processors"
).split()

#: Finish reasons of sequences that count as failed.
FAILURES = ("error", "cancelled", "timeout")

#: Upstream's attention for continuous batching: it takes only upstream's packed batches.
PAGED = "paged|eager"

#: How many calls use a config whose attention is ``PAGED``, by its id.
_users: Counter[int] = Counter()
_users_lock = threading.Lock()


def generate_batch(
    self: Any,
    inputs: list[Any],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Continue each of ``inputs``, many at a time: each gets what its own ``generate()`` gives.

    Args:
        inputs: Prompts: lists of ids, or what else ``Engine.add`` takes.
        generation_config: Of all prompts. Default: the model's.
        continuous_batching_config: Of it hold ``max_requests_per_batch``, ``max_batch_tokens`` (of a
            step's prefill), ``max_memory_percent``, ``scheduler_type`` (also ``"srpt"`` and
            ``"priority"``), ``return_logprobs``, and ``seed``: the ``i``-th prompt has ``seed + i``. Other
            fields that differ from their defaults are named by a warning.
        record_timestamps: Fill ``timestamps`` with the ``time.perf_counter()`` of each token.
        progress_bar: Show one, of sequences.
        persistent_manager: Not needed here, as ``warmup``.
        kwargs: Those of ``generate``, for all prompts.

    Returns:
        The results by their ids, in the order of ``inputs``. With ``num_return_sequences``, those of
        a prompt are ``"req_0__child#0"``, …, and ``"req_0"`` as the last. A request that fails has its
        ``error``, and the others go on.

    Raises:
        ValueError, TypeError: Arguments that no prompt could be decoded with.
    """
    if not inputs:
        return {}
    config = generation_config
    arguments = _arguments(self, len(inputs), config, kwargs)
    config = config if isinstance(config, GenerationConfig) else self.generation_config
    batching = continuous_batching_config or getattr(config, "continuous_batching_config", None)
    if not isinstance(batching, ContinuousBatchingConfig):
        batching = ContinuousBatchingConfig()
    prompts, results = [], []
    for index, (prompt, options) in enumerate(zip(inputs, arguments, strict=True)):
        with suppress(Exception):  # the engine says what is wrong with a prompt
            prompt = model_inputs(prompt, options.get("tokenizer"), families.device_of(self))
        tensor = prompt.get("input_ids") if isinstance(prompt, Mapping) else None
        ids = tensor.flatten().tolist() if isinstance(tensor, Tensor) else []
        options = _request_arguments(self, config, batching, index, len(ids), options)
        prompts.append((prompt, options))
        configs = options.get("generation_config"), self.generation_config
        counts = (getattr(each, "num_return_sequences", None) for each in configs)
        n = options.get("num_return_sequences") or next((n for n in counts if n is not None), 1)
        names = [*(f"req_{index}__child#{i}" for i in range(n - 1)), f"req_{index}"]
        results.append([GenerationOutput(name, ids) for name in names])
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def note_times(events: list[EngineEvent]) -> None:
        now = time.perf_counter()
        for event in events if record_timestamps else ():
            times[event.request.id, event.row] += [now] * len(event.token_ids)

    bar = tqdm(total=sum(map(len, results)), unit="sequence", disable=not progress_bar)
    with bar, _eager_for_paged(self):
        engine = Engine(self.eval(), **_engine_options(batching))
        numbered = outputs(engine, prompts, {}, in_order=False, on_events=note_times)
        with closing(numbered):
            for index, output in numbered:
                for row, result in enumerate(results[index]):
                    _fill(result, output, row)
                    result.timestamps = times.pop((output.id, row), None)
                bar.update(len(results[index]))
    by_name = {result.request_id: result for each in results for result in each}
    if failed := [result for result in by_name.values() if result.error is not None]:
        first = failed[0]
        logger.error(f"{len(failed)} of {len(by_name)} failed; {first.request_id}: {first.error}")
    return by_name


def _fill(result: GenerationOutput, output: RequestOutput, row: int) -> None:
    """Write a sequence of ``output``; one that was refused has a single one for all rows."""
    now, metrics = time.perf_counter(), output.metrics
    sequence = output.sequences[min(row, len(output.sequences) - 1)]
    result.generated_tokens = sequence.token_ids
    result.logprobs = [entry.logprob for entry in sequence.logprobs or ()]
    if metrics.queue_time is not None and metrics.total_time is not None:
        result.lifespan = now - metrics.total_time + metrics.queue_time, now
    result.status = RequestStatus.FINISHED
    if sequence.finish_reason in FAILURES:
        error = output.error or RuntimeError(f"The request ended as {sequence.finish_reason!s}.")
        result.status, result.error = RequestStatus.FAILED, str(error) or repr(error)


def _request_arguments(
    model: Any,
    config: GenerationConfig,
    batching: ContinuousBatchingConfig,
    index: int,
    n_tokens: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of ``Engine.add``: the prompt's own ones override the config, which the model's."""
    kwargs = {name: value for name, value in arguments.items() if value is not None}
    config = kwargs.pop("generation_config", config)
    configs = config, model.generation_config

    def is_set(name: str) -> bool:
        return name in kwargs or any(getattr(c, name, None) is not None for c in configs)

    if batching.return_logprobs and not is_set("logprobs"):
        kwargs |= {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    if batching.seed is not None and not is_set("seed"):
        kwargs["seed"] = (batching.seed + index) % 2**63
    if not is_set("max_new_tokens") and not is_set("max_length"):
        positions = families.max_positions(model)
        n_before = 1 if model.config.is_encoder_decoder else n_tokens
        if positions is not None and n_before > 0:
            kwargs["max_new_tokens"] = max(positions - n_before, 1)
    eos = kwargs.get("eos_token_id", config.eos_token_id)
    if eos is not None and any(token < 0 for token in rows.each(eos)):  # which stand for none
        valid = [token for token in rows.each(eos) if token >= 0]
        kwargs |= {"eos_token_id": valid} if valid else {"eos_token_id": 0, "ignore_eos": True}
    if config is model.generation_config:
        return kwargs
    return rows.folded(kwargs | {"generation_config": config})


def _arguments(model: Any, n: int, config: Any, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each of ``n`` prompts; what none could have is raised."""
    of_engine = {name: kwargs.pop(name) for name in OF_ENGINE if name in kwargs}
    request = Request.of(**rows.folded(kwargs | {"generation_config": config}))
    validate.check_request(request)
    call, model_kwargs = resolve(model, request)
    call.release()
    model._validate_model_kwargs(model_kwargs)
    return [each.arguments | of_engine for each in rows.for_each_prompt(request, n)]


def _engine_options(config: ContinuousBatchingConfig) -> dict[str, Any]:
    """The arguments of ``Engine`` for a config; warns of its fields that do not apply."""
    defaults = vars(ContinuousBatchingConfig())
    changed = {name for name, value in vars(config).items() if value != defaults.get(name)}
    ignored = sorted(changed - {*OPTIONS, *HOLD})
    policy = {"fifo": "fcfs"}.get(config.scheduler_type, config.scheduler_type)
    if policy not in ("fcfs", "srpt", "priority"):  # as upstream: the default, and a warning
        ignored, policy = [*ignored, f"scheduler_type={policy!r}"], "fcfs"
    if ignored:
        logger.warning_once(
            f"Of the continuous batching config, hfgen's engine does not need {', '.join(ignored)}: it "
            "has no pages, graphs or streams that these would set."
        )
    values = {new: getattr(config, old) for old, new in OPTIONS.items()}
    return {name: v for name, v in values.items() if v is not None} | {"policy": policy}


@contextmanager
def _eager_for_paged(model: Any) -> Iterator[None]:
    """Run ``"paged|eager"`` attention as ``"eager"``, until the last call of the model has ended."""
    parts = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    with _users_lock:
        configs = [
            config
            for key, config in parts.items()
            if _users[key] or getattr(config, "_attn_implementation", None) == PAGED
        ]
        for config in configs:
            config._attn_implementation_internal = "eager"
        _users.update(map(id, configs))
    try:
        yield
    finally:
        with _users_lock:
            _users.subtract(map(id, configs))
            for config in configs:
                if not _users[id(config)]:
                    config._attn_implementation_internal = PAGED
