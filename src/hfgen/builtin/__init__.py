"""The model that comes with the package: a small Llama that completes Python code, and its draft.

The weights, their tokenizer and the model card lie beside this file; nothing is downloaded.
`scripts/train_builtin_model.py` made them.
"""

from __future__ import annotations

from importlib import resources

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ..patching import mix_into

__all__ = ["builtin_model"]


def builtin_model(draft: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the built-in model, or its draft, and the tokenizer that both share.

    Args:
        draft: load the draft model, which costs less than a sixth of the model per token and proposes its
            tokens in assisted decoding.

    Returns:
        The model (float32, on the CPU, in evaluation mode, at most 1,024 positions) and the tokenizer (2,048
        tokens, pads on the left). Each call loads anew: changing one result leaves the others alone.

    Raises:
        TypeError: `draft` is not a bool.
    """
    if not isinstance(draft, bool):
        raise TypeError(f"draft must be True or False, got {draft!r} ({type(draft).__name__})")
    with resources.as_file(resources.files(__name__)) as folder:
        weights = folder / ("draft" if draft else "model")
        model = LlamaForCausalLM.from_pretrained(
            weights, dtype=torch.float32, local_files_only=True
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder / "tokenizer", local_files_only=True
        )
    return mix_into(model.eval()), tokenizer
