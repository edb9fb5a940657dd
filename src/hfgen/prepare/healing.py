"""Token healing: the last token of a prompt is replaced by a token that continues the same text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.tokenization_python import ExtensionsTrie

from ..settings.fields import require_tokenizer
from ..state.call import Prompt


def heal_tokens(self: Any, input_ids: torch.Tensor, tokenizer: Any = None) -> torch.Tensor:
    """Replace the last token of each prompt by the likeliest token that starts with its text.

    Returns ids ``(rows, length)`` of the stripped and retokenised prompts, whose length may differ.
    """
    require_tokenizer(tokenizer, "token_healing", True)
    bos_id, pad_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    prompts = [text.strip() for text in tokenizer.decode(input_ids, skip_special_tokens=True)]
    ids = tokenizer(prompts, return_tensors="pt", padding=True).input_ids.to(input_ids.device)
    ids = torch.where(ids == bos_id, pad_id, ids)  # healing is not to be conditioned on BOS
    if ids.numel() == 0:
        return ids

    vocabulary = tokenizer.get_vocab()
    trie = ExtensionsTrie(vocabulary)
    space_id = tokenizer.convert_tokens_to_ids(" ")
    space = None if space_id is None else tokenizer.convert_ids_to_tokens(space_id)[0]
    one_token = GenerationConfig(max_new_tokens=1, pad_token_id=pad_id)
    for row in ids:
        if (row == pad_id).all():
            continue
        tail_id = row[-1].item()
        tail = tokenizer.decode(tail_id)
        tail = tail if space is None else tail.replace(" ", space)  # as the vocabulary spells it
        # A part of a character has no spelling, and then nothing in the vocabulary extends it.
        extensions = (token for token in trie.extensions(tail) if token in vocabulary)
        bias = {(vocabulary[token],): 10.0 for token in extensions}
        if not bias.keys() - {(tail_id,)} or len(row) == 1:
            continue  # nothing to choose from, or nothing to choose by
        bias[(tail_id,)] = 11.0  # a whole word is rather kept than extended
        one_token.update(sequence_bias=bias)
        context = row[:-1]
        if (row != pad_id).sum() == 1:
            context[-1] = bos_id
        row[:] = self.generate(context.unsqueeze(0), generation_config=one_token)[0]
    return ids


def follow_length(model: Any, prompt: Prompt, ids: torch.Tensor, pad: Any) -> None:
    """Mask and positions for healed ``prompt.ids``, longer than ``ids`` or padded, as upstream has them."""
    model_kwargs, healed = prompt.model_kwargs, prompt.ids
    is_padded = model_kwargs.get("attention_mask") is not None
    if healed.shape == ids.shape or not (is_padded or healed.shape[1] > ids.shape[1]):
        return
    if is_padded:
        model_kwargs["attention_mask"] = healed.ne(pad).long()
    if model_kwargs.get("position_ids") is not None:
        position_ids = model._prepare_position_ids_for_generation(healed, model_kwargs)
        model_kwargs["position_ids"] = position_ids
