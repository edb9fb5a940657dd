"""Translates transformers' arguments of continuous batching to those of the engine and its requests."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .. import families
from ..prepare import rows
from ..settings.logs import logger
from .sequences import Sequences

#: Fields of a ``ContinuousBatchingConfig`` that are arguments of ``Engine``.
OF_ENGINE = {
    "max_requests_per_batch": "max_rows",
    "max_batch_tokens": "prefill_tokens",
    "max_memory_percent": "memory",
}

#: Fields that hold here, or whose other values ask for what is so anyhow.
HOLD = (
    "scheduler_type max_queue_size return_logprobs seed auto_switch_to_flash allow_block_sharing "
    "per_request_processors drop_unsupported_processors"
).split()

#: Policies of the engine, by upstream's names; its own names hold, too.
POLICIES = {"fifo": "fcfs"}


def engine_options(config: ContinuousBatchingConfig) -> dict[str, Any]:
    """The arguments of ``Engine`` that a config asks for; says which fields of it do not apply."""
    usual = vars(ContinuousBatchingConfig())
    changed = {name for name, value in vars(config).items() if value != usual.get(name)}
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


def request_arguments(
    model: Any,
    config: GenerationConfig,
    batching: ContinuousBatchingConfig,
    sequences: Sequences,
) -> dict[str, Any]:
    """The arguments of ``Engine.add`` for a request.

    Its own go before ``config``, and that before the model's, as in ``generate``.
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
