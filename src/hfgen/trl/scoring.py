"""The trainer's side of exact mode: its log-probabilities are computed as the sampler's are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from trl.trainer.utils import FusedCausalLMOutput

from .. import families
from ..running.exact import exact, restore
from ..running.exact.logprobs import scored
from ..running.exact.switch import is_exact


def prepare_exact(model: Any, trainer: Any) -> None:
    """Make ``model`` exact with its adapters, once, and let it score as the sampler does.

    Raises ``ValueError`` if it cannot be exact, and with mixed precision.
    """
    if trainer.accelerator.mixed_precision != "no":
        raise ValueError(
            f"rollout(exact=True): mixed precision ({trainer.accelerator.mixed_precision}) changes dtypes between "
            "kernels. Load the model in one dtype, and set `bf16=False`, `fp16=False`."
        )
    base = families.transformers_model(model)
    fused_forward = vars(base)["forward"]
    if getattr(fused_forward, "temperature", None) == trainer.temperature and is_exact(base):
        return
    if not families.is_sharded(base):  # a sharded one has been made exact before
        if is_exact(base):  # perhaps without the adapters
            restore(base)
        del base.forward  # TRL's own, which calls the class's
        exact(base)
    elif not is_exact(base):
        raise ValueError(
            "rollout(exact=True): call hfgen.exact(model) before the trainer shards the model."
        )
    base.forward = scoring(base, fused_forward, trainer.temperature)


def scoring(
    model: Any, fused_forward: Callable[..., Any], temperature: float
) -> Callable[..., Any]:
    """A forward in place of TRL's ``fused_forward``, whose log-probabilities are those of ``token_logprobs``."""

    @functools.wraps(fused_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head") or not is_exact(model):
            return fused_forward(*args, **kwargs)
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        labels = kwargs["labels"][:, 1:]
        is_scored = labels != -100
        n_before = int(is_scored.any(dim=0).int().argmax())  # columns of prompts alone
        n = labels.shape[1] - n_before
        outputs = scored(model, fused_forward, ids, mask, n, temperature)
        logprobs, entropy = (F.pad(x, (n_before, 0)).masked_fill(~is_scored, 0) for x in outputs)
        loss = -logprobs.sum() / is_scored.sum().clamp(min=1)
        return FusedCausalLMOutput(loss=loss, log_probs=logprobs, entropy=entropy)

    forward.temperature = temperature  # type: ignore[attr-defined]
    forward.is_row_wise = True  # type: ignore[attr-defined]
    return forward
