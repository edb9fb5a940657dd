"""Features that are refused when several processes run one model together."""

from __future__ import annotations

from typing import Any

from .. import families
from ..call import Call

IN_STEP = "With `synced_gpus` all ranks have to forward as often"


def check_ranks(model: Any, call: Call) -> None:
    """Raise ``ValueError`` for what the ranks of a call cannot do together.

    With ``synced_gpus``, the default for sharded parameters: forwards whose number depends on tokens. With
    tensor parallelism: heads that cannot be divided, and what ends at another token on another rank.
    """
    if (ranks := call.ranks) is None:
        return
    if ranks.is_synced:
        _check_forwards(model, call)
    if ranks.tensor_group is not None:
        _check_heads(model, int(model._tp_size))
        if not ranks.is_synced:
            _check_clocks(call)


def _check_forwards(model: Any, call: Call) -> None:
    config, assistant = call.config, call.request.assistant_model
    if any(each.guidance_scale not in (None, 1) for each in call.configs):
        raise ValueError(
            f"{IN_STEP}, but `guidance_scale` forwards a second branch until this rank's rows have ended. "
            "Leave it out."
        )
    if config.assistant_early_exit is not None or getattr(config, "use_mtp", False):
        name = "use_mtp" if config.assistant_early_exit is None else "assistant_early_exit"
        raise ValueError(
            f"{IN_STEP}, but `{name}` forwards parts of the model for as many drafts as are accepted. "
            "Draft with `prompt_lookup_num_tokens`, or with an assistant that each rank has whole."
        )
    if hasattr(assistant, "modules") and families.is_sharded(assistant):
        raise ValueError(
            f"{IN_STEP}, but the parameters of `assistant_model` are sharded too, and how often it drafts "
            "depends on what is accepted. Give each rank the whole assistant."
        )


def _check_heads(model: Any, n_ranks: int) -> None:
    text, plan = model.config.get_text_config(decoder=True), model.tp_plan or {}
    n_heads = getattr(text, "num_attention_heads", None)
    counts = {
        "num_key_value_heads": getattr(text, "num_key_value_heads", n_heads),
        "num_attention_heads": n_heads,
    }
    for name, count in counts.items():
        if count is not None and families.heads_per_rank(plan, count, n_ranks) is None:
            raise ValueError(
                f"{type(model).__name__} has `{name}`={count}, which {n_ranks} ranks of tensor parallelism "
                "cannot divide among them. Take a number of ranks that divides it, or a plan that leaves "
                "attention whole."
            )


def _check_clocks(call: Call) -> None:
    given = {
        "max_time": any(each.max_time is not None for each in call.configs),
        "cancel": call.request.kwargs.get("cancel") is not None,
    }
    if (name := next((name for name, is_given in given.items() if is_given), None)) is not None:
        raise ValueError(
            f"`{name}` may end one rank a token before another, which then waits for ever. Pass "
            "`synced_gpus=True` with it, by which ranks that end keep the others company."
        )
