"""``generate`` to read from top to bottom: the twin of transformers' for decoder-only models.

The options have the names and defaults of transformers' ``GenerationConfig``, and the tokens are
those of ``model.generate``: of greedy search, of sampling with the same random state, and of
beams. What is left out is what the nine lessons beside this file add, and what only some models need.

Shapes: ``rows`` are the prompts of a batch, ``length`` is that of the prompt and all new tokens,
``vocab`` is the size of the vocabulary. In beam search, a batch has ``rows * beams`` rows.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Config:
    """The options of one call."""

    max_new_tokens: int = 20
    eos_token_id: int | list[int] | None = None  # a row ends with any of these tokens
    pad_token_id: int | None = None  # what rows are filled with that have ended
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50  # 0: all tokens
    top_p: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"

    @classmethod
    def resolve(cls, model: PreTrainedModel, options: dict) -> Config:
        """Combine the options of the call, the model's generation config, and the defaults.

        An option of the call wins over the model's value, which wins over the default. An unknown
        option is a ``TypeError``.
        """
        names = [field.name for field in fields(cls)]
        of_model = {name: getattr(model.generation_config, name, None) for name in names}
        config = {name: value for name, value in of_model.items() if value is not None} | options
        return cls(**config)

    @property
    def eos(self) -> list[int]:
        """The tokens that end a row."""
        if self.eos_token_id is None:
            return []
        return self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]

    @property
    def pad(self) -> int:
        """The token behind the end of a row. Without an EOS token, all rows have the same length."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos[0] if self.eos else 0


@torch.no_grad()
def generate(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None, **options
) -> Tensor:
    """Return ``input_ids (rows, length)`` with up to ``max_new_tokens`` more columns.

    Shorter prompts are padded on the left, so that the newest tokens of all rows are one column.
    ``attention_mask (rows, length)`` is 0 at padding; without it, every pad token is padding.
    """
    config = Config.resolve(model, options)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
        if config.pad_token_id is not None and config.pad_token_id not in config.eos:
            attention_mask = input_ids.ne(config.pad_token_id).long()
    decode = beam_search if config.num_beams > 1 else greedy_or_sample
    return decode(model, input_ids, attention_mask, config)


class Batch:
    """The rows of a forward pass: their tokens, and the KV cache of those that were forwarded."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
        self.ids = ids  # (rows, length)
        self.mask = mask  # (rows, length): 1 for a token, 0 for padding
        # For each layer: keys and values (rows, heads, length, head size); at first of length 0.
        self.cache = DynamicCache(config=model.config)

    def append(self, tokens: Tensor) -> None:
        """Add a column: the next token of each row, ``tokens (rows,)``."""
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(tokens[:, None])], dim=1)

    def select(self, rows: Tensor) -> None:
        """Row ``i`` becomes the old row ``rows[i]``; a row may be there twice, or no more."""
        self.ids, self.mask = self.ids[rows], self.mask[rows]
        self.cache.reorder_cache(rows)


def forward(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Forward the columns that are not in the cache; return the logits of the next token.

    At first these are the columns of the prompt (the prefill), then one column for each step. The
    model adds their keys and values to the cache. Returns float32 ``(rows, vocab)``.
    """
    start = batch.cache.get_seq_length()
    inputs = {
        "input_ids": batch.ids[:, start:],
        "attention_mask": batch.mask,  # of all columns: attention reads the cached ones, too
        "past_key_values": batch.cache,
        "use_cache": True,
    }
    # The first token of a row has position 0, whatever padding is on its left.
    positions = (batch.mask.cumsum(dim=1) - 1).clamp(min=0)  # (rows, length)
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[:, start:]
    return model(**inputs).logits[:, -1].float()  # only the last column predicts the next token


def process(scores: Tensor, config: Config, min_tokens: int = 1) -> Tensor:
    """Shape the distribution for sampling: temperature, then top-k, then top-p.

    ``scores (rows, vocab)`` are logits or log-probabilities. Tokens that may not be drawn get
    ``-inf``; at least ``min_tokens`` are kept.
    """
    if not config.do_sample:
        return scores
    scores = scores / config.temperature
    if config.top_k:
        k = min(max(config.top_k, min_tokens), scores.shape[-1])
        kth_best = scores.topk(k).values[:, -1:]  # (rows, 1)
        scores = scores.masked_fill(scores < kth_best, -torch.inf)
    if config.top_p < 1.0:
        # The least likely tokens go, as long as they have no more than 1 - top_p together.
        ascending, tokens = scores.sort()
        is_dropped = ascending.softmax(-1).cumsum(-1) <= 1 - config.top_p
        is_dropped[:, -min_tokens:] = False
        scores = scores.masked_fill(is_dropped.scatter(1, tokens, is_dropped), -torch.inf)
    return scores


def choose(scores: Tensor, config: Config) -> Tensor:
    """Return the next token of each row, ``(rows,)``: the best one, or one drawn at random."""
    if not config.do_sample:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)


def is_eos(tokens: Tensor, config: Config) -> Tensor:
    """Return whether each of ``tokens`` ends its row; bools of the same shape."""
    return torch.isin(tokens, tokens.new_tensor(config.eos))


def greedy_or_sample(model: PreTrainedModel, ids: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Choose one token after the other, in all rows at once."""
    batch = Batch(model, ids, mask)
    is_running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)  # (rows,)
    for _ in range(config.max_new_tokens):
        scores = process(forward(model, batch), config)  # (rows, vocab)
        tokens = choose(scores, config)  # (rows,)
        tokens = tokens.where(is_running, config.pad)  # a row that has ended waits for the others
        batch.append(tokens)
        is_running = is_running & ~is_eos(tokens, config)
        if not is_running.any():
            break
    return batch.ids


@dataclass
class Hypotheses:
    """The best sequences of one row that have ended, at most ``num_beams``."""

    config: Config
    best: list[tuple[float, Tensor]] = field(
        default_factory=list
    )  # scores descending, ids (length,)
    is_done: bool = False  # no running beam is worth waiting for

    def add(self, total: float, ids: Tensor, n_new: int) -> None:
        """Score a sequence by its ``total`` log-probability per token; keep it if it is good."""
        if not self.is_done:
            ended = [*self.best, (total / n_new**self.config.length_penalty, ids)]
            self.best = sorted(ended, key=lambda each: -each[0])[: self.config.num_beams]

    def update(self, best_total: float, n_new: int) -> None:
        """Decide whether a running beam can still be better; ``best_total`` is that of the best one.

        A total only falls with more tokens, but ``length_penalty`` favours long sequences, so this
        is a guess: at the present length, or with "never" at the length that suits the beam best.
        """
        config = self.config
        if config.early_stopping == "never" and config.length_penalty > 0:
            n_new = config.max_new_tokens
        is_full = len(self.best) == config.num_beams
        is_hopeless = is_full and best_total / n_new**config.length_penalty <= self.best[-1][0]
        self.is_done |= is_hopeless or (is_full and config.early_stopping is True)


def beam_search(model: PreTrainedModel, ids: Tensor, mask: Tensor, config: Config) -> Tensor:
    """Follow the ``num_beams`` likeliest continuations of each row; return the best that ended."""
    rows, beams = len(ids), config.num_beams
    batch = Batch(model, ids.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0))
    first_beam = torch.arange(0, rows * beams, beams, device=ids.device)[:, None]  # (rows, 1)
    # The sum of log-probabilities of each beam. At first all beams of a row are equal: one counts.
    totals = torch.full((rows, beams), -1e9, device=ids.device)
    totals[:, 0] = 0
    hypotheses = [Hypotheses(config) for _ in range(rows)]
    # Each beam can end in as many ways as there are EOS tokens; this many leave enough to go on.
    n_candidates = max(2, 1 + len(config.eos)) * beams

    for n_new in range(1, config.max_new_tokens + 1):
        log_probs = forward(model, batch).log_softmax(-1)
        log_probs = process(log_probs, config, min_tokens=1 + max(1, len(config.eos)))
        vocab = log_probs.shape[-1]
        extended = (totals.view(-1, 1) + log_probs).view(rows, beams * vocab)
        if config.do_sample:
            index = torch.multinomial(extended.softmax(-1), n_candidates)  # (rows, candidates)
            candidates = extended.gather(1, index)
        else:
            candidates, index = extended.topk(n_candidates)  # (rows, candidates)
        parents, tokens = first_beam + index // vocab, index % vocab  # row of the batch, new token

        # Candidates that end are hypotheses, if they are among the best: the others are spare.
        is_end = is_eos(tokens, config) | (n_new == config.max_new_tokens)  # (rows, candidates)
        for row, candidate in is_end[:, :beams].nonzero().tolist():
            sequence = [batch.ids[parents[row, candidate]], tokens[row, candidate].view(1)]
            hypotheses[row].add(candidates[row, candidate], torch.cat(sequence), n_new)

        # The best that do not end are the next beams.
        totals, index = candidates.masked_fill(is_end, -1e9).topk(beams)  # (rows, beams)
        batch.select(parents.gather(1, index).flatten())
        batch.append(tokens.gather(1, index).flatten())
        for row in range(rows):
            hypotheses[row].update(totals[row, 0], n_new)
        if all(each.is_done for each in hypotheses):
            break

    sequences = [each.best[0][1] for each in hypotheses]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=config.pad)
