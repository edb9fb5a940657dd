"""Classifier-free guidance: scores are moved away from those of an unconditional branch.

That branch has a negative prompt. Sanchez et al., "Stay on topic with Classifier-Free Guidance" (2023).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import logits_process as upstream

from ...running.ranks import Ranks, announce, of_config
from .columns import expand
from .context import Context


class UnbatchedClassifierFreeGuidanceLogitsProcessor(
    upstream.UnbatchedClassifierFreeGuidanceLogitsProcessor
):
    """Guidance; all beams of a prompt use its negative prompt.

    ``guidance_scale`` may be a column ``(prompts, 1)``, in which 1 leaves a row as it is. An encoder-decoder
    gets the negative prompt without decoder ids, as in transformers: BART derives these from it, T5 raises.
    """

    #: The processes that take part in each forward, if parameters are sharded.
    ranks: Ranks | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not isinstance(scale := self.guidance_scale, torch.Tensor):
            return super().__call__(input_ids, scores)
        column = expand(scale, len(scores)).to(scores)
        unconditional = self.get_unconditional_logits(input_ids)[:, -1].log_softmax(dim=-1)
        guided = column * (scores.log_softmax(dim=-1) - unconditional) + unconditional
        return torch.where(column == 1, scores, guided)

    def get_unconditional_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``(rows, length, vocab)`` of the unconditional branch for ``input_ids (rows, length)``."""
        context = self.unconditional_context
        if context["first_pass"]:
            for name in ("input_ids", "attention_mask"):
                if context[name] is not None:
                    context[name] = _expand(context[name], len(input_ids))
        if self.ranks is not None:
            announce(self.ranks)
        return super().get_unconditional_logits(input_ids)


def guidance(scale: Any, context: Context) -> UnbatchedClassifierFreeGuidanceLogitsProcessor:
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(
        scale,
        context.model,
        unconditional_ids=context.negative_prompt_ids,
        unconditional_attention_mask=context.negative_prompt_attention_mask,
        use_cache=context.config.use_cache,
    )
    ranks = of_config(context.config)
    if ranks is not None and ranks.forwards_beside(context.model, is_own=True):
        processor.ranks = ranks
    return processor


def _expand(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor (n, ...)`` with each row repeated in place, up to ``rows`` rows."""
    if rows % len(tensor) != 0:
        raise ValueError(
            f"`negative_prompt_ids` and its mask have {len(tensor)} rows, which do not divide the "
            f"{rows} rows that are generated."
        )
    return tensor if len(tensor) == rows else tensor.repeat_interleave(rows // len(tensor), dim=0)
