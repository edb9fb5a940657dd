"""Translates transformers' arguments of continuous batching to those of the engine and its requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .. import families
from ..prepare import rows
from ..settings.logs import logger
from .delivery import Sequences

#: Fields of a ``ContinuousBatchingConfig`` that are arguments of ``Engine``.
OF_ENGINE = {
    "max_requests_per_batch": "max_rows",
    "max_batch_tokens": "prefill_tokens",
    "max_memory_percent": "memory",
}

#: Fields that apply here, or whose other values ask for what the engine always does.
HOLD = (
    "scheduler_type max_queue_size return_logprobs seed auto_switch_to_flash allow_block_sharing "
    "per_request_processors drop_unsupported_processors"
).split()

#: Policies of the engine by upstream's names; its own names are allowed, too.
POLICIES = {"fifo": "fcfs"}

#: Upstream's attention for continuous batching: it takes only upstream's packed batches.
PAGED = "paged|eager"

#: How many managers use a config whose attention is ``PAGED``, by its id.
_users: Counter[int] = Counter()
_users_lock = threading.Lock()


def engine_options(config: ContinuousBatchingConfig) -> dict[str, Any]:
    """The arguments of ``Engine`` for a config; warns of its fields that do not apply."""
    defaults = vars(ContinuousBatchingConfig())
    changed = {name for name, value in vars(config).items() if value != defaults.get(name)}
    ignored = sorted(changed - {*OF_ENGINE, *HOLD})
    policy = POLICIES.get(config.scheduler_type, config.scheduler_type)
    if policy not in ("fcfs", "srpt", "priority"):  # as upstream: the default, and a warning
        ignored, policy = [*ignored, f"scheduler_type={policy!r}"], "fcfs"
    if ignored:
        logger.warning_once(
            f"Of the continuous batching config, hfgen's engine does not need {', '.join(ignored)}: it "
            "has no pages, graphs or streams that these would set."
        )
    values = {new: getattr(config, old) for old, new in OF_ENGINE.items()}
    return {name: v for name, v in values.items() if v is not None} | {"policy": policy}


def n_sequences(model: Any, config: GenerationConfig, arguments: dict[str, Any]) -> int:
    """How many sequences a request with ``arguments`` returns; ``config`` holds for those without one."""
    counts = (
        arguments.get("num_return_sequences"),
        getattr(arguments.get("generation_config", config), "num_return_sequences", None),
        model.generation_config.num_return_sequences,
    )
    return next((n for n in counts if n is not None), 1)


def request_arguments(
    model: Any,
    config: GenerationConfig,
    batching: ContinuousBatchingConfig,
    sequences: Sequences,
) -> dict[str, Any]:
    """The arguments of ``Engine.add`` for a request.

    Its own arguments override ``config``, which overrides the model's, as in ``generate``.
    """
    kwargs = {name: value for name, value in sequences.arguments.items() if value is not None}
    config = kwargs.pop("generation_config", config)
    configs = config, model.generation_config

    def is_set(name: str) -> bool:
        return name in kwargs or any(getattr(c, name, None) is not None for c in configs)

    if batching.return_logprobs and not is_set("logprobs"):
        kwargs |= {"logprobs": 0, "logprobs_mode": "processed_logprobs"}
    if batching.seed is not None and not is_set("seed"):
        kwargs["seed"] = (batching.seed + sequences.index) % 2**63
    if not is_set("max_new_tokens") and not is_set("max_length"):
        positions = families.max_positions(model)
        n_before = 1 if model.config.is_encoder_decoder else len(sequences.ids)
        if positions is not None and n_before > 0:
            kwargs["max_new_tokens"] = max(positions - n_before, 1)
    eos = kwargs.get("eos_token_id", config.eos_token_id)
    if eos is not None and any(one < 0 for one in rows.each(eos)):  # which stand for none
        valid = [one for one in rows.each(eos) if one >= 0]
        kwargs |= {"eos_token_id": valid} if valid else {"eos_token_id": 0, "ignore_eos": True}
    if config is model.generation_config:
        return kwargs
    config, kwargs = rows.with_fields(config, kwargs)
    return kwargs | {"generation_config": config}


@contextmanager
def eager_for_paged(model: Any) -> Iterator[None]:
    """Run ``"paged|eager"`` attention as ``"eager"``, until the last manager of the model has ended."""
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
