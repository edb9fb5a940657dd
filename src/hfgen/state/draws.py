"""The same draws as ``torch.multinomial``, computed from the few tokens that samplers kept.

With exponential ``q``, torch draws the token with the largest ``p / q``. On the CPU it computes each ``q``
from a uniform number in float64. Here uniform numbers are drawn for all tokens, so that the generator ends in
the same state, and logarithms are computed only for the kept tokens.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import survivors

#: torch's ``p`` and ``q`` are rounded to float32: if two ratios are nearer than this, torch has to draw.
MARGIN = 1e-5

#: Probabilities that are smaller than this share of the largest might be 0 in float32.
TINY = 1e-30


def draw(scores: Tensor, n: int) -> Tensor | None:
    """Indices ``(rows, n)`` that ``torch.multinomial(scores.softmax(dim=-1), n)`` would draw.

    Returns ``None``, and draws nothing, if torch has to draw: many tokens are left, scores are invalid,
    two ratios are too near to each other, or another version of torch draws in another way.
    """
    few = survivors.left_in(scores)
    if few is None or n > few.values.shape[1] or not draws_by_uniforms():
        return None
    state = torch.get_rng_state()
    uniforms = torch.empty(few.vocab, dtype=torch.float64)  # of a row, to stay in the cache
    uniform = torch.stack([uniforms.uniform_()[tokens] for tokens in few.tokens])
    ratios = few.weights() / -torch.log1p(-uniform)
    best, places = pad(ratios, (0, 1)).topk(n + 1)
    is_clear = (best[:, 1:] < best[:, :-1] * (1 - MARGIN)).all(dim=1) & (best[:, n - 1] > TINY)
    if not is_clear.all():
        torch.set_rng_state(state)
        return None
    return few.tokens.gather(1, places[:, :n])


def multinomial(scores: Tensor) -> Tensor:
    """One index ``(rows, 1)`` for each row, drawn by the softmax of ``scores (rows, vocab)``."""
    drawn = draw(scores, 1)
    return torch.multinomial(scores.softmax(dim=-1), 1) if drawn is None else drawn


@cache
def draws_by_uniforms() -> bool:
    """Whether this version of torch draws as described above; tried once, with a separate generator."""
    generator = torch.Generator()
    for shape in ((1, 7), (3, 5000)):
        exponential = torch.empty(shape).exponential_(generator=generator.manual_seed(1))
        after = generator.get_state()
        uniform = torch.empty(shape, dtype=torch.float64)
        uniform.uniform_(generator=generator.manual_seed(1))
        if not torch.equal(generator.get_state(), after):
            return False
        expected = (-torch.log1p(-uniform)).float()
        if not torch.allclose(exponential, expected, rtol=MARGIN / 10, atol=0.0):
            return False
        p = torch.rand(shape, generator=generator).softmax(dim=-1)
        drawn = torch.multinomial(p, 1, generator=generator.manual_seed(1))
        if not torch.equal(drawn, (p / expected).argmax(dim=-1, keepdim=True)):
            return False
    return True
