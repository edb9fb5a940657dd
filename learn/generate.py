"""``generate`` for decoder-only models in one file, with the tokens of transformers.

The twin has greedy search, sampling and beam search. Its options have the names and defaults of
transformers' ``GenerationConfig``, and sampling draws the same tokens from the same random state.
Nine lessons, the pages and diffs beside this file, add one idea each.

Names of shapes: ``rows`` is the number of sequences in a batch (in beam search, prompts times
beams), ``length`` counts the tokens of a sequence with its padding, and ``vocab`` is the size of
the vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES


@dataclass(frozen=True)
class Config:
    """The options of one call."""

    max_new_tokens: int = 20
    eos_token_id: int | list[int] | None = None  # each of them ends a row
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50  # 0 keeps all tokens
    top_p: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"

    @classmethod
    def resolve(cls, model: PreTrainedModel, options: dict) -> Config:
        """Take each value from the call, else from the model's generation config, else the default.

        Raises ``TypeError`` for an unknown option.
        """
        names = [each.name for each in fields(cls)]
        of_model = {name: getattr(model.generation_config, name, None) for name in names}
        return cls(**{k: v for k, v in of_model.items() if v is not None} | options)

    @property
    def eos(self) -> list[int]:
        """The tokens that end a row."""
        if self.eos_token_id is None:
            return []
        return self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]

    @property
    def pad(self) -> int:
        """The token that fills a row after its end. Without EOS tokens, it is never used."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos[0] if self.eos else 0

    @property
    def min_tokens_to_keep(self) -> int:
        """The number of tokens that top-k and top-p always keep; beams need some besides EOS."""
        return 1 if self.num_beams == 1 else 1 + max(1, len(self.eos))


@torch.no_grad()
def generate(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None, **options
) -> Tensor:
    """Return ``input_ids (rows, length)`` with up to ``max_new_tokens`` more columns.

    Shorter prompts have their padding on the left, so the newest tokens of all rows are in one
    column. ``attention_mask (rows, length)`` is 0 at padding. Without it, pad tokens are padding.
    """
    config = Config.resolve(model, options)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
        if config.pad_token_id is not None and config.pad_token_id not in config.eos:
            attention_mask = input_ids.ne(config.pad_token_id).long()
    batch = Batch(model, input_ids, attention_mask)
    search = beam_search if config.num_beams > 1 else greedy_or_sample
    return search(model, batch, config)


class Batch:
    """The rows of a forward pass: their tokens, and the KV cache of the tokens forwarded so far."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
        self.ids = ids  # (rows, length)
        self.mask = mask  # (rows, length): 1 at tokens, 0 at padding
        # Keys and values of each layer: (rows, heads, forwarded length, head size).
        self.cache = DynamicCache(config=model.config)

    def append(self, tokens: Tensor) -> None:
        """Add columns: the next tokens of each row, ``tokens (rows, new)``."""
        self.ids = torch.cat([self.ids, tokens], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], dim=1)

    def select(self, rows: Tensor) -> None:
        """Row ``i`` becomes the old row ``rows[i]``. Rows can be repeated, dropped and reordered."""
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        self.cache.reorder_cache(rows)


def forward(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Forward the columns that are not in the cache, and return the next token's logits.

    The first call forwards the whole prompt (the prefill), each later call one column. The model
    adds their keys and values to the cache. Returns float32 ``(rows, vocab)``.
    """
    start = batch.cache.get_seq_length()
    inputs = {
        "input_ids": batch.ids[:, start:],
        "attention_mask": batch.mask,  # of all columns: attention also reads the cache
        ALL_CACHE_NAMES[0]: batch.cache,
        "use_cache": True,
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        # The first token of a row has position 0, however much padding there is on its left.
        positions = (batch.mask.cumsum(dim=1) - 1).clamp(min=0)  # (rows, length)
        inputs["position_ids"] = positions[:, start:]
    return model(**inputs).logits[:, -1].float()  # the last column predicts the next token


def process(scores: Tensor, config: Config) -> Tensor:
    """Reshape the distribution for sampling: temperature, then top-k, then top-p.

    ``scores (rows, vocab)`` are logits or log-probabilities. Excluded tokens get ``-inf``.
    """
    if not config.do_sample:
        return scores
    scores = scores / config.temperature
    if config.top_k:
        k = min(max(config.top_k, config.min_tokens_to_keep), scores.shape[-1])
        worst_kept = scores.topk(k).values[:, -1:]  # (rows, 1)
        scores = scores.masked_fill(scores < worst_kept, -torch.inf)
    if config.top_p < 1.0:
        # Drop the least likely tokens whose probabilities sum to at most 1 - top_p.
        ascending, tokens = scores.sort()  # (rows, vocab) each
        is_dropped = ascending.softmax(-1).cumsum(-1) <= 1 - config.top_p
        is_dropped[:, -config.min_tokens_to_keep :] = False
        scores = scores.masked_fill(is_dropped.scatter(1, tokens, is_dropped), -torch.inf)
    return scores


def choose(scores: Tensor, config: Config) -> Tensor:
    """Return the next token of each row ``(rows,)``: the best one, or a random draw."""
    if not config.do_sample:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def is_eos(tokens: Tensor, config: Config) -> Tensor:
    """Return a bool for each of ``tokens``, in the same shape: it ends its row."""
    return torch.isin(tokens, tokens.new_tensor(config.eos))


def greedy_or_sample(model: PreTrainedModel, batch: Batch, config: Config) -> Tensor:
    """Choose one token per step and row until all rows have ended. Returns ``(rows, length)``."""
    is_running = torch.ones_like(batch.ids[:, 0], dtype=torch.bool)  # (rows,)
    for _ in range(config.max_new_tokens):
        logits = forward(model, batch)  # (rows, vocab)
        tokens = choose(process(logits, config), config)  # (rows,)
        tokens = tokens.where(is_running, config.pad)  # an ended row waits for the others
        batch.append(tokens[:, None])
        is_running = is_running & ~is_eos(tokens, config)
        if not is_running.any():
            break
    return batch.ids


@dataclass
class Hypotheses:
    """The best ended sequences of one prompt, at most ``num_beams``."""

    config: Config
    best: list[tuple[float, Tensor]] = field(default_factory=list)  # (score, ids), best first
    is_done: bool = False

    def add(self, total: float, ids: Tensor, n_new: int) -> None:
        """Keep a sequence if its score, the ``total`` log-probability by length, is good enough."""
        if not self.is_done:
            ended = [*self.best, (total / n_new**self.config.length_penalty, ids)]
            self.best = sorted(ended, key=lambda each: -each[0])[: self.config.num_beams]

    def update(self, total: float, n_new: int) -> None:
        """Set ``is_done`` if the best running beam, with sum ``total``, cannot improve the result.

        Its final score is a guess. With each token, the total falls, but the score divides it by
        more. The guess is the score at this length, or with "never" that at the full length.
        """
        config = self.config
        if len(self.best) < config.num_beams:
            return
        if config.early_stopping == "never" and config.length_penalty > 0:
            n_new = config.max_new_tokens
        can_improve = total / n_new**config.length_penalty > self.best[-1][0]
        self.is_done |= config.early_stopping is True or not can_improve


def beam_search(model: PreTrainedModel, batch: Batch, config: Config) -> Tensor:
    """Follow the ``num_beams`` likeliest sequences of each prompt; return the best ended ones."""
    n_prompts, n_beams, device = len(batch.ids), config.num_beams, batch.ids.device
    batch.select(torch.arange(n_prompts, device=device).repeat_interleave(n_beams))
    first_beam = torch.arange(n_prompts, device=device)[:, None] * n_beams  # row in the batch
    # Sums of log-probabilities. The beams of a prompt start equal, so only the first one counts.
    totals = torch.full((n_prompts, n_beams), -1e9, device=device)
    totals[:, 0] = 0
    hypotheses = [Hypotheses(config) for _ in range(n_prompts)]
    # A beam ends in at most one candidate per EOS token, so n_beams candidates always go on.
    n_candidates = max(2, 1 + len(config.eos)) * n_beams

    for n_new in range(1, config.max_new_tokens + 1):
        log_probs = process(forward(model, batch).log_softmax(-1), config)  # (rows, vocab)
        vocab = log_probs.shape[-1]
        extended = (totals.view(-1, 1) + log_probs).view(n_prompts, n_beams * vocab)
        if config.do_sample:
            index = torch.multinomial(extended.softmax(-1), n_candidates)
            candidates = extended.gather(1, index)  # (prompts, candidates)
        else:
            candidates, index = extended.topk(n_candidates)
        parents, tokens = first_beam + index // vocab, index % vocab  # (prompts, candidates) each

        # A candidate that ends becomes a hypothesis if it is among the n_beams best.
        is_end = is_eos(tokens, config) | (n_new == config.max_new_tokens)
        for prompt, rank in is_end[:, :n_beams].nonzero().tolist():
            ids = torch.cat([batch.ids[parents[prompt, rank]], tokens[prompt, rank, None]])
            hypotheses[prompt].add(candidates[prompt, rank].item(), ids, n_new)

        # The best candidates that do not end are the next beams.
        totals, index = candidates.masked_fill(is_end, -1e9).topk(n_beams)  # (prompts, beams)
        batch.select(parents.gather(1, index).flatten())
        batch.append(tokens.gather(1, index).view(-1, 1))
        for prompt in range(n_prompts):
            hypotheses[prompt].update(totals[prompt, 0].item(), n_new)
        if all(each.is_done for each in hypotheses):
            break

    sequences = [each.best[0][1] for each in hypotheses]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=config.pad)
