"""A row of a left-padded batch is decoded as it is alone, whatever its length and the model's mask.

One batch has rows of all lengths from 1 to 65, so that windows, chunks and blocks begin everywhere.
Causal models never see what is on the right: a single forward of all rows, padded there and without a
mask, gives the logits of each row alone. Others are called for each row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import ours, quiet
from tests.versions import IS_5_23

LONGEST, N_NEW = 65, 3

#: Ids below are special, as are placeholders above.
LOWEST, HIGHEST = 5, 60

#: By what differs in how padding is masked, or tokens are placed.
CAUSAL = {
    "full attention, rotary positions": "llama",
    "latent attention": "deepseek_v3",
    "learned positions": "gpt2",
    "learned positions with an offset": "opt",
    "alibi": "bloom",
    "alibi of its own": "mpt",
    "alibi from the mask": "falcon_alibi",
    "relative positions inside attention": "gpt_neo",
    "sliding windows": "gemma3_text",
    "sliding windows, shared caches": "gemma3n_text",
    "sliding windows, sinks": "gpt_oss",
    "chunked attention": "llama4_text",
    "linear and full attention": "qwen3_next",
    "linear attention, experts": "kimi_linear",
    "state space and attention in each layer": "falcon_h1",
    "state space and attention in turns": "jamba",
    "short convolutions": "lfm2",
    "state space alone": "mamba2",
    "recurrent, with windows": "recurrent_gemma",
}
if not IS_5_23:  # left padding changes what the model's own code says before
    del CAUSAL["recurrent, with windows"]


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(LOWEST, HIGHEST, (length,), generator=generator)
        for length in range(1, LONGEST + 1)
    ]


def padded(rows: list[Tensor], width: int, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(rows, width)``."""
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def generated(model: Any, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """New tokens ``(rows, N_NEW)`` and their logits ``(rows, N_NEW, vocab)``."""
    output = model.generate(
        ids,
        **kwargs,
        max_new_tokens=N_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("family", CAUSAL.values(), ids=CAUSAL)
def test_causal(family: str) -> None:
    model, prompts = ours(family), rows()
    ids, mask = padded(prompts, LONGEST, "left")
    with quiet(), torch.no_grad():
        tokens, logits = generated(model, ids, attention_mask=mask)
        known = [torch.cat([row, new[:-1]]) for row, new in zip(prompts, tokens, strict=True)]
        alone = model(padded(known, LONGEST + N_NEW - 1, "right")[0], use_cache=False).logits
    for row, length in enumerate(range(1, LONGEST + 1)):
        expected = alone[row, length - 1 : length - 1 + N_NEW]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-3, msg=f"{length} tokens")
        assert tokens[row].equal(expected.argmax(dim=-1)), length


@pytest.mark.parametrize("family", ["llama", "llama4_text", "gemma3_text", "bloom", "qwen3_next"])
def test_alone_is_what_it_is_taken_for(family: str) -> None:
    """Calls for a row each agree with the batch: at the ends, and where windows begin."""
    model, prompts = ours(family), rows()
    ids, mask = padded(prompts, LONGEST, "left")
    with quiet():
        tokens, _ = generated(model, ids, attention_mask=mask)
        for length in (1, 5, 6, 7, 64, 65):
            alone, _ = generated(model, prompts[length - 1][None])
            assert tokens[length - 1].equal(alone[0]), length


@pytest.mark.parametrize("cache", [{"cache_implementation": "static"}, {"use_cache": False}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "gpt2"])
def test_with_other_caches(family: str, cache: dict[str, Any]) -> None:
    model = ours(family)
    ids, mask = padded(rows(), LONGEST, "left")
    with quiet():
        tokens, logits = generated(model, ids, attention_mask=mask)
        others, other_logits = generated(model, ids, attention_mask=mask, **cache)
    assert tokens.equal(others)
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["paligemma", "gemma3"])
def test_prompts_that_see_what_follows(family: str) -> None:
    """PaliGemma's whole prompt attends in both directions; of Gemma 3, the tokens of type 1 do."""
    model, prompts = ours(family), rows()
    types = [
        (row % 3 == 0).long() if family == "gemma3" else torch.zeros_like(row) for row in prompts
    ]
    ids, mask = padded(prompts, LONGEST, "left")
    type_ids = padded(types, LONGEST, "left")[0]
    with quiet():
        tokens, logits = generated(model, ids, attention_mask=mask, token_type_ids=type_ids)
        _, causal = generated(model, ids, attention_mask=mask, token_type_ids=torch.ones_like(ids))
        for row in range(0, LONGEST, 3):
            alone = generated(model, prompts[row][None], token_type_ids=types[row][None])
            assert tokens[row].equal(alone[0][0]), row + 1
            torch.testing.assert_close(logits[row], alone[1][0], rtol=0, atol=1e-3)
    if family == "gemma3":
        assert not logits.allclose(causal, atol=1e-3), "the types have no say"
