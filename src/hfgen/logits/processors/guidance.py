"""Classifier-free guidance: scores are moved away from those of an unconditional branch.

That branch has a negative prompt. Sanchez et al., "Stay on topic with Classifier-Free Guidance" (2023).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import logits_process as upstream
from transformers.modeling_outputs import BaseModelOutput

from ... import running as execution
from ...families import CACHE
from ...running.ranks import Ranks, of_config
from .context import Context
from .per_row import expand


class UnbatchedClassifierFreeGuidanceLogitsProcessor(
    upstream.UnbatchedClassifierFreeGuidanceLogitsProcessor
):
    """Guidance for decoder-only models; all beams of a prompt use its negative prompt.

    ``guidance_scale`` may be a column ``(prompts, 1)``, in which 1 leaves a row as it is.
    """

    ranks: Ranks | None = None  # who takes part in each forward, if parameters are sharded

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
        for name in ("input_ids", "attention_mask") if context["first_pass"] else ():
            if context[name] is not None:
                context[name] = _expand(context[name], len(input_ids))
        if self.ranks is not None:
            self.ranks.announce()
        return super().get_unconditional_logits(input_ids)


class EncoderDecoderGuidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Guidance for encoder-decoders.

    transformers gives the negative prompt to the model without decoder ids. Where models derive these from
    the encoder's ids (BART, mBART), the same is done here, for equal tokens. Where that raises, or would
    for a padded negative prompt, the encoder reads that prompt and the decoder the tokens so far.
    """

    encoded: dict[str, Any] | None = None  # the decoder's arguments besides ids
    #: The decoder's cache, and the ids that it holds.
    past: Any = None
    cached_ids: Any = None

    def __init__(
        self,
        scale: Any,
        model: Any,
        ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        use_cache: bool = True,
        default_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__(scale, model, ids, mask, use_cache)
        self.encoder_ids = default_ids if ids is None else ids
        self.encoder_mask = None if ids is None else mask
        self.decoder_mask, self.use_cache = decoder_attention_mask, use_cache

    def get_unconditional_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``(rows, n, vocab)``; raises ``ValueError`` without a prompt for the encoder."""
        if self.encoded is None:
            first_pass, mask = self.unconditional_context["first_pass"], self.encoder_mask
            # The second token would fail: its mask covers more ids than the encoder is given.
            fails = first_pass and self.use_cache and mask is not None and bool((mask == 0).any())
            try:
                if not fails:
                    return super().get_unconditional_logits(input_ids)
            except (RuntimeError, TypeError, ValueError):
                if not first_pass:
                    raise
            self.encoded = self._encode(len(input_ids))
        return self._decode(input_ids, self.encoded)

    def _encode(self, rows: int) -> dict[str, Any]:
        """The decoder's arguments for the negative prompt, for ``rows`` sequences."""
        ids, mask = self.encoder_ids, self.encoder_mask
        if ids is None:
            raise ValueError(
                f"`guidance_scale` (={self.guidance_scale}) needs `negative_prompt_ids` here: the "
                f"input of {type(self.model).__name__} is not token ids, so there is no default."
            )
        mask = torch.ones_like(ids) if mask is None else mask
        encoder = self.model.get_encoder()
        states = encoder(ids, attention_mask=mask, return_dict=True).last_hidden_state
        outputs = BaseModelOutput(last_hidden_state=_expand(states, rows))
        return {"encoder_outputs": outputs, "attention_mask": _expand(mask, rows)}

    def _decode(self, input_ids: torch.Tensor, encoded: dict[str, Any]) -> torch.Tensor:
        """Logits ``(rows, n, vocab)`` of the ``input_ids`` behind the cache; of all if beams were reordered."""
        length = input_ids.shape[1]
        n_cached = 0 if self.past is None else self.cached_ids.shape[1]
        if n_cached >= length or (n_cached and not self.cached_ids.equal(input_ids[:, :n_cached])):
            n_cached = 0
        if (mask := self.decoder_mask) is not None:
            mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
            encoded = encoded | {"decoder_attention_mask": mask}
        outputs = execution.call(
            self.model,
            decoder_input_ids=input_ids[:, n_cached:],
            **{CACHE: self.past if n_cached else None},
            use_cache=self.use_cache,
            **encoded,
        )
        self.past, self.cached_ids = outputs.get(CACHE), input_ids.clone()
        return outputs.logits


def guidance(scale: Any, context: Context) -> UnbatchedClassifierFreeGuidanceLogitsProcessor:
    negative = context.negative_prompt_ids, context.negative_prompt_attention_mask
    branch = scale, context.model, *negative, context.config.use_cache
    if context.model.config.is_encoder_decoder:
        mask = context.model_kwargs.get("decoder_attention_mask")
        return EncoderDecoderGuidance(*branch, _last_encoder_token(context), mask)
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(*branch)
    ranks = of_config(context.config)
    if ranks is not None and ranks.forwards_beside(context.model, is_own=True):
        processor.ranks = ranks
    return processor


def _last_encoder_token(context: Context) -> torch.Tensor | None:
    """The last token ``(rows, 1)`` that the encoder attends to: the default negative prompt."""
    if (ids_and_mask := context.encoder_ids()) is None:
        return None
    ids, is_token = ids_and_mask
    positions = torch.arange(ids.shape[1], device=ids.device)
    return ids.gather(1, (positions * is_token).argmax(dim=1, keepdim=True))


def _expand(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """``tensor (n, ...)`` with each row repeated in place, up to ``rows`` rows."""
    if rows % len(tensor) != 0:
        raise ValueError(
            f"`negative_prompt_ids` and its mask have {len(tensor)} rows, which do not divide the "
            f"{rows} rows that are generated."
        )
    return tensor if len(tensor) == rows else tensor.repeat_interleave(rows // len(tensor), dim=0)
