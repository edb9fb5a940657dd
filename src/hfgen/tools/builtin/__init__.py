"""The built-in model, a small Llama that completes Python code, and its draft model.

The weights, their tokenizer and the model card lie beside this file.
`scripts/train_builtin_model.py` made them.
"""

from __future__ import annotations

from importlib import resources

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ...patching import mix_into


def builtin_model(draft: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the built-in model and its tokenizer, anew at each call and without a network.

    Args:
        draft: Load the draft model for assisted decoding, at less than a sixth of the model's cost
            per token.

    Returns:
        The model (float32, on the CPU, in evaluation mode, at most 1,024 positions) and the
        tokenizer (2,048 tokens, pads on the left), which both models share.

    Raises:
        TypeError: ``draft`` is not a bool.
    """
    if not isinstance(draft, bool):
        raise TypeError(f"draft must be True or False, got {draft!r} ({type(draft).__name__})")
    with resources.as_file(resources.files(__name__)) as folder:
        local = {"local_files_only": True}
        weights = folder / ("draft" if draft else "model")
        model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, **local)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", **local)
    return mix_into(model.eval()), tokenizer
