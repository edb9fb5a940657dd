"""transformers' methods for continuous batching, run by hfgen's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..prepare import rows, validate
from ..prepare.config import resolve
from ..state.call import Request
from .manager import Manager, logger

#: Arguments of ``Engine.add`` that are not those of ``generate``.
OF_ENGINE = ("priority", "timeout", "stop")


def init_continuous_batching(
    self: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> Manager:
    """A manager of requests that are decoded together; ``start()`` it, add requests, ``stop()`` it.

    Args:
        generation_config: Of requests that have no arguments of their own. Default: the model's.
        continuous_batching_config: Of it hold ``max_requests_per_batch``, ``max_batch_tokens`` (of a
            step's prefill), ``max_memory_percent``, ``max_queue_size``, ``scheduler_type`` (also
            ``"srpt"`` and ``"priority"``), ``return_logprobs``, and ``seed``: the ``i``-th request has
            ``seed + i``. Other fields that differ from their defaults are named by a warning.
        workload_hints: Not needed here.

    A manager that was kept with ``keep_for_next_session`` is returned again.
    """
    config = generation_config or self.generation_config
    manager = getattr(self, "_cached_continuous_batching_manager", None)
    if isinstance(manager, Manager):
        manager.generation_config = config
        return manager
    batching = continuous_batching_config
    if not isinstance(batching, ContinuousBatchingConfig):
        batching = getattr(config, "continuous_batching_config", None)
    if not isinstance(batching, ContinuousBatchingConfig):
        batching = ContinuousBatchingConfig()
    return Manager(self, config, batching, workload_hints)


@contextmanager
def continuous_batching_context_manager(
    self: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
) -> Iterator[Manager]:
    """A manager that runs within the context; arguments as of ``init_continuous_batching`` and ``stop``.

    At the end of the context its requests are decoded to their ends; after an exception they fail.
    ``warmup`` is not needed here.
    """
    manager = init_continuous_batching(
        self, generation_config, continuous_batching_config, workload_hints
    )
    manager.start()
    hard_stop = True
    try:
        yield manager
        hard_stop = False
    finally:
        manager.stop(block, timeout, persistent_manager, hard_stop)


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
        continuous_batching_config: See ``init_continuous_batching``.
        record_timestamps: Fill ``timestamps`` of the results.
        progress_bar: Show one, of sequences.
        persistent_manager: Keep the manager for the next call.
        warmup: Not needed here.
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
    each = _arguments(self, len(inputs), generation_config, kwargs)
    context = self.continuous_batching_context_manager(
        generation_config if isinstance(generation_config, GenerationConfig) else None,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
    )
    results: dict[str, GenerationOutput] = {}
    with context as manager:
        names: list[str] = []
        for prompt, arguments in zip(inputs, each, strict=True):
            names += manager.enter(prompt, None, arguments, False, record_timestamps).names
        manager.stop(block=False)
        outputs = tqdm(manager, total=len(names), unit="sequence") if progress_bar else manager
        results |= {output.request_id: output for output in outputs}
    if failed := [output for output in results.values() if output.error is not None]:
        first = failed[0]
        logger.error(f"{len(failed)} of {len(names)} failed; {first.request_id}: {first.error}")
    return {name: results[name] for name in names}


def _arguments(model: Any, n: int, config: Any, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of ``add_request`` for each of ``n`` prompts; what none could have is raised."""
    of_engine = {name: kwargs.pop(name) for name in OF_ENGINE if name in kwargs}
    if isinstance(config, GenerationConfig):
        config, kwargs = rows.with_fields(config, kwargs)
    request = Request.of(generation_config=config, **kwargs)
    validate.check_request(request)
    call, model_kwargs = resolve(model, request)
    call.release()
    model._validate_model_kwargs(model_kwargs)
    split = rows.split(request)
    requests = [request] * n if split is None else split[0]
    if len(requests) != n:
        raise ValueError(
            f"A list has to have one value for each prompt, but there are {len(requests)} values and "
            f"{n} prompts."
        )
    return [
        {name: v for name in Request.__slots__[:-1] if (v := getattr(each, name)) is not None}
        | each.kwargs
        | of_engine
        for each in requests
    ]
