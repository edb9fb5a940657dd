"""Features that are refused when several processes run one model together."""

from __future__ import annotations

from typing import Any

from ... import families
from ...state.call import Call

IN_STEP = "With `synced_gpus` all ranks have to forward as often"


def check_ranks(model: Any, call: Call) -> None:
    """Raise ``ValueError`` for what the ranks of a call cannot do together."""
    if call.ranks.is_synced:
        _check_forwards(model, call)
    if call.ranks.tensor_group is not None:
        _check_heads(model, int(model._tp_size))
        _check_clocks(call, families.is_sharded(model))


def _check_forwards(model: Any, call: Call) -> None:
    config, assistant = call.config, call.request.assistant_model
    is_assistant_sharded = hasattr(assistant, "modules") and families.is_sharded(assistant)
    if any(each.guidance_scale not in (None, 1) for each in call.configs):
        reason = ""
        if model.config.is_encoder_decoder:
            reason = f"the second branch of {type(model).__name__} runs its encoder as well"
        elif config.penalty_alpha is not None:
            reason = "contrastive search forwards its candidates within a step"
        elif config.assistant_early_exit is not None or is_assistant_sharded:
            reason = "drafts of sharded parameters are forwarded besides the loop, too"
        if reason:
            raise ValueError(
                f"{IN_STEP}: `guidance_scale` is refused, since {reason}. Leave it out."
            )
    if getattr(config, "use_mtp", False):
        raise ValueError(
            f"{IN_STEP}: `use_mtp` is refused, since its layers read the embeddings and the head of the "
            "model outside of its forward, where they are not gathered. Draft with "
            "`prompt_lookup_num_tokens` or `assistant_early_exit`."
        )
    if config.assistant_early_exit is not None and not families.takes_only_text(model):
        raise ValueError(
            f"{IN_STEP}: `assistant_early_exit` is refused, since {type(model).__name__} would encode its "
            "images or sounds for a draft, on some ranks and not on others. Draft with "
            "`prompt_lookup_num_tokens`."
        )
    if is_assistant_sharded and assistant.config.is_encoder_decoder:
        raise ValueError(
            f"{IN_STEP}: a sharded `assistant_model` that has an encoder is refused, since the encoder runs "
            "when a rank drafts for the first time. Give each rank the whole assistant."
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


def _check_clocks(call: Call, is_sharded: bool) -> None:
    has_limit = any(each.max_time is not None for each in call.configs)
    if not has_limit and call.request.kwargs.get("cancel") is None:
        return
    if not call.ranks.is_synced:
        advice = "Pass `synced_gpus=True` with it: all ranks then end with the first"
    elif is_sharded:
        advice = "Leave it out: ranks that compute other rows go on"
    elif len(call.configs) > 1:
        advice = "Pass it for all prompts alike, which then end together on all ranks"
    else:
        return
    name = "max_time" if has_limit else "cancel"
    raise ValueError(f"`{name}` may end one rank a token before another. {advice}.")
