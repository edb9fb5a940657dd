"""Compare the bits of rows in every way to decode them: ``python -m tests.parity.exact``.

Every case is a family in one dtype, made exact. Four rows with seeds are sampled alone, and then in all other ways:
tokens, logits and log-probabilities have to be the same bits, and so have the trainer's log-probabilities of the
finished rows. A family that cannot be exact says so by name. ``--all`` takes all families of text, not only
``NAMED``; ``--write`` puts what they say into ``benchmarks/results/exact_families.md``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hfgen
from hfgen import families
from hfgen.running.exact import trial as whole_model
from tests.parity.family import Limit
from tests.parity.harness import FAMILIES, forget_models, ours
from tests.parity.rows import LENGTH_OF_CACHE

#: The families that ``docs/exact.md`` promises first.
NAMED = (
    *("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral", "qwen3_moe", "qwen3_next"),
    *("t5", "bart_seq2seq"),
)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "exact_families.md"

#: What models refuse in some ways, exact or not.
REFUSALS = (
    "keeps a state that cannot be rolled back",
    "needs a list of decoder layers",
    "has a `generate` of its own",
    "It is not known how rows join and leave",
    "without a cache of a known kind",
    "keeps per-row state on its modules",
    "`prefix_cache` cannot be used",
    # Early exits of Gemma 4, whose later layers read earlier keys, and of LFM, whose first ones have none.
    "list assignment index out of range",
    "`get_seq_length` can only be called on Attention layers",
)

LENGTHS = (3, 40, 17, 29)
SEEDS = [11, 12, 13, 14]
N_NEW = 12
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SAMPLING: dict[str, Any] = {
    "max_new_tokens": N_NEW,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "pad_token_id": 0,
    "ignore_eos": True,
    "return_dict_in_generate": True,
    "output_logits": True,
    "logprobs": 2,
}


@dataclass
class Row:
    """What a row got: ``tokens (n,)``, ``logits (n, vocab)`` if they were recorded, ``logprobs (n,)``."""

    tokens: Tensor
    logits: Tensor | None
    logprobs: Tensor

    def differs_from(self, alone: Row) -> str | None:
        """What is not the same bits as in the row alone, of which this row may have the first tokens."""
        n = len(self.tokens)
        if not torch.equal(self.tokens, alone.tokens[:n]):
            return f"tokens {self.tokens.tolist()} beside {alone.tokens[:n].tolist()}"
        if not torch.equal(self.logprobs, alone.logprobs[:n]):
            return f"log-probabilities by {(self.logprobs - alone.logprobs[:n]).abs().max():.2g}"
        if (
            self.logits is None
            or alone.logits is None
            or torch.equal(self.logits, alone.logits[:n])
        ):
            return None
        return f"logits by {(self.logits - alone.logits[:n]).abs().max():.2g}"


class LastToken(hfgen.Drafter):
    """Drafts the newest token of each row again, three times."""

    def draft(self, context: hfgen.DraftContext) -> hfgen.Draft:
        return hfgen.Draft(context.ids[:, -1:].repeat(1, min(3, context.n_tokens)))


def prompts(vocab: int) -> list[Tensor]:
    """Rows of random ids with repetitions, so that lookup drafts are accepted now and then."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(10, vocab, (6,), generator=generator)
    return [
        torch.cat([pattern.repeat(9)[: n - 2], torch.randint(10, vocab, (2,), generator=generator)])
        for n in LENGTHS
    ]


def padded(rows: Sequence[Tensor], is_right: bool = False) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of the rows as one batch."""
    side = "right" if is_right else "left"
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(list(rows), batch_first=True, padding_side=side),
        "attention_mask": pad(
            [torch.ones_like(r) for r in rows], batch_first=True, padding_side=side
        ),
    }


class Trial:
    """One exact model and its rows; a method for each way to decode them, as a list of ``Row``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_seq2seq = bool(model.config.is_encoder_decoder)
        self.rows = prompts(
            min(model.config.get_text_config().vocab_size, families.n_scores(model))
        )
        self.alone = [self.decode([i])[0] for i in range(len(self.rows))]

    def decode(self, order: Sequence[int] | None = None, **options: Any) -> list[Row]:
        """The rows ``order`` in one batch, in that order."""
        order = range(len(self.rows)) if order is None else order
        rows = [self.rows[i] for i in order]
        seeds = [SEEDS[i] for i in order]
        inputs = padded(rows, is_right=self.is_seq2seq)
        output = self.model.generate(**inputs, seed=seeds, **{**SAMPLING, **options})
        start = 1 if self.is_seq2seq else inputs["input_ids"].shape[1]
        n = len(output.sequences) // len(rows)
        return [self.row(output, i * n, start) for i in range(len(rows))]

    def row(self, output: Any, row: int, start: int) -> Row:
        tokens, logits = output.sequences[row, start:], None
        if output.logits is not None:
            logits = torch.stack([step[row] for step in output.logits])
        return Row(tokens, logits, output.logprobs.token_logprobs[row])

    def shuffled(self) -> list[Row]:
        order = [2, 0, 3, 1]
        rows = self.decode(order)
        return [rows[order.index(i)] for i in range(len(order))]

    def drop_finished(self) -> list[Row]:
        lengths = [4, N_NEW, 7, N_NEW]
        rows = self.decode(drop_finished=True, max_new_tokens=lengths, output_logits=False)
        return [
            Row(row.tokens[:n], None, row.logprobs[:n])
            for row, n in zip(rows, lengths, strict=True)
        ]

    def prefix_cache(self) -> list[Row]:
        """Prompts that are stored, in memory and then from a file."""
        prefixes = hfgen.PrefixCache()
        for _ in range(2):
            rows = [self.decode([i], prefix_cache=prefixes)[0] for i in range(len(self.rows))]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prefixes.safetensors"
            prefixes.save(path, self.model)
            loaded = hfgen.PrefixCache.load(path, self.model)
            return rows + self.decode(prefix_cache=loaded)

    def stream(self) -> list[Row]:
        """The events of a stream: tokens and log-probabilities."""
        inputs = padded(self.rows, is_right=self.is_seq2seq)
        options = {**SAMPLING, "output_logits": False}
        tokens: list[list[int]] = [[] for _ in self.rows]
        logprobs: list[list[float]] = [[] for _ in self.rows]
        for event in self.model.stream(**inputs, seed=SEEDS, **options):
            tokens[event.row] += event.token_ids
            logprobs[event.row] += [entry.logprob for entry in event.logprobs or ()]
        return [
            Row(torch.tensor(t), None, torch.tensor(p))
            for t, p in zip(tokens, logprobs, strict=True)
        ]

    def engine(self) -> list[Row]:
        """Requests that join one by one; prompts are forwarded nine tokens at a time."""
        with hfgen.Engine(self.model, max_rows=3, prefill_tokens=9) as engine:
            requests = []
            for ids, seed in zip(self.rows, SEEDS, strict=True):
                config = hfgen.GenerationConfig(**SAMPLING, seed=seed)
                requests.append(engine.add(ids[None], generation_config=config))
                engine.step()
                engine.step()
            while engine.has_work:
                engine.step()
            results = [request.result() for request in requests]
        for result in results:
            if result.error is not None:
                raise result.error
        outputs = [result.generate_output for result in results]
        starts = [1 if self.is_seq2seq else len(ids) for ids in self.rows]
        return [self.row(o, 0, start) for o, start in zip(outputs, starts, strict=True)]

    def copies(self) -> list[Row]:
        """The second of two sequences of each row; what is compared is one call per row."""
        together = self.second_copies(range(len(self.rows)))
        apart = [self.second_copies([i])[0] for i in range(len(self.rows))]
        if any((wrong := own) for own in map(Row.differs_from, together, apart)):
            raise AssertionError(wrong)
        return []

    def second_copies(self, order: Sequence[int]) -> list[Row]:
        inputs = padded([self.rows[i] for i in order], is_right=self.is_seq2seq)
        seeds = [SEEDS[i] for i in order]
        output = self.model.generate(**inputs, seed=seeds, num_return_sequences=2, **SAMPLING)
        start = 1 if self.is_seq2seq else inputs["input_ids"].shape[1]
        return [self.row(output, 2 * i + 1, start) for i in range(len(order))]

    def beams(self) -> list[Row]:
        """Three beams: sequences and scores of the batch, beside one call per row."""
        options = {**SAMPLING, "do_sample": False, "num_beams": 3, "output_scores": True}
        options |= {"output_logits": False, "logprobs": None}

        def search(order: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
            inputs = padded([self.rows[i] for i in order], is_right=self.is_seq2seq)
            output = self.model.generate(**inputs, **options)
            start = 1 if self.is_seq2seq else inputs["input_ids"].shape[1]
            return list(zip(output.sequences[:, start:], output.sequences_scores, strict=True))

        for i, (tokens, score) in enumerate(search(range(len(self.rows)))):
            ((own_tokens, own_score),) = search([i])
            assert torch.equal(tokens, own_tokens), f"beams {tokens.tolist()} beside {own_tokens}"
            assert torch.equal(score, own_score), f"beam scores {score} beside {own_score}"
        return []

    def prompt_logprobs(self) -> list[Row]:
        """Of the prompts' tokens, however many likely ones are asked for beside them: the trainer's."""
        inputs = padded(self.rows)
        with torch.no_grad():
            expected = hfgen.token_logprobs(self.model, **inputs)
        for n_top in (0, 5):
            options = {**SAMPLING, "max_new_tokens": 1, "prompt_logprobs": n_top}
            output = self.model.generate(**inputs, **options)
            own = output.prompt_logprobs.token_logprobs
            for row, length in enumerate(LENGTHS):
                part = slice(1 - length, None)
                assert torch.equal(own[row, part], expected[row, part]), f"row {row}, {n_top=}"
        return []

    def trainer(self) -> list[Row]:
        """Log-probabilities by one forward of the finished rows, padded, with gradients."""
        finished = [
            torch.cat([ids, row.tokens]) for ids, row in zip(self.rows, self.alone, strict=True)
        ]
        rows = []
        for is_right in (False, True):
            logprobs = hfgen.token_logprobs(self.model, **padded(finished, is_right))
            assert logprobs.requires_grad
            ends = [len(f) - 1 if is_right else logprobs.shape[1] for f in finished]
            rows = [
                Row(alone.tokens, None, own[end - N_NEW : end].detach())
                for alone, own, end in zip(self.alone, logprobs, ends, strict=True)
            ]
            for row, alone in zip(rows, self.alone, strict=True):
                assert (wrong := row.differs_from(alone)) is None, f"padded {is_right=}: {wrong}"
        return rows

    def ways(self) -> dict[str, Callable[[], list[Row]]]:
        """All ways to decode the rows, by name."""
        static = {"cache_implementation": "static", "disable_compile": True}
        found: dict[str, Callable[[], list[Row]]] = {
            "batch": self.decode,
            "shuffled": self.shuffled,
            "drop_finished": self.drop_finished,
            "static cache": lambda: self.decode(**static),
            "offloaded cache": lambda: self.decode(cache_implementation="offloaded"),
            "no cache": lambda: self.decode(use_cache=False),
            "lookup drafts": lambda: self.decode(prompt_lookup_num_tokens=3),
            "an assistant's drafts": lambda: self.decode(assistant_model=self.model),
            "early-exit drafts": lambda: self.decode(assistant_early_exit=1),
            "engine": self.engine,
            "a drafter of one's own": lambda: self.decode(assistant_model=LastToken()),
            "stream": self.stream,
            "copies": self.copies,
            "beams": self.beams,
        }
        if (
            self.is_seq2seq
        ):  # transformers cuts the encoder's mask, too, and has forced tokens at the end
            return {name: way for name, way in found.items() if name != "drop_finished"}
        found["chunked prefill"] = lambda: self.decode(prefill_chunk_size=7)
        found["prefix cache"] = self.prefix_cache
        found["prompt log-probabilities"] = self.prompt_logprobs
        found["trainer"] = self.trainer
        return found


def differences(model: Any, family: str = "") -> list[str]:
    """Which ways give other bits; ways that a model refuses without exact mode as well do not count."""
    trial, found = Trial(model), []
    limits = FAMILIES[family].unsupported if family else {}
    ways = trial.ways()
    if Limit.STATIC in limits or family in LENGTH_OF_CACHE:
        del ways["static cache"]
    if families.position_pad(model) is not None:  # it counts positions otherwise without a cache
        del ways["no cache"]
    for name, way in ways.items():
        try:
            pairs = zip(way(), itertools.cycle(trial.alone), strict=False)
            wrong = [text for row, alone in pairs if (text := row.differs_from(alone)) is not None]
        except (TypeError, ValueError, NotImplementedError) as error:
            is_known = any(refusal in str(error) for refusal in REFUSALS)
            wrong = [] if is_known else [f"{type(error).__name__}: {error}"]
        except AssertionError as error:
            wrong = [str(error)]
        found += [f"{name}: {text}" for text in wrong[:1]]
    return [*found, f"in the trial, {first_operation(trial)}"] if found else []


@torch.no_grad()
def first_operation(trial: Trial) -> str:
    """The first layer whose output for a prompt differs in a padded batch from that of the prompt alone."""
    if trial.is_seq2seq:
        return whole_model.try_model(trial.model) or "no layer differs"
    model, inputs = trial.model, padded(trial.rows)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def alone() -> list[Tensor]:
        return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in trial.rows]

    def together() -> list[Tensor]:
        logits = model(**inputs, position_ids=positions, use_cache=False).logits
        return [row[-n:] for row, n in zip(logits, LENGTHS, strict=True)]

    for row, (own, beside) in enumerate(zip(alone(), together(), strict=True)):
        if not torch.equal(own, beside):
            return whole_model.first_difference(model, alone, together, row)
    return whole_model.try_model(model) or "no layer differs"


def prepared(family: str, dtype: torch.dtype) -> Any:
    """The exact model of a family; ``ValueError`` says why it cannot be."""
    model = ours(family)
    if not isinstance(model, torch.nn.Module):
        raise ValueError("exact: it is no torch module")
    return hfgen.exact(model.to(dtype).eval().requires_grad_(True))


def judge(family: str, dtype: str) -> tuple[bool | None, str]:
    """Whether a family is exact, and what is to be said; None if it is refused."""
    try:
        found = differences(prepared(family, DTYPES[dtype]), family)
    except (TypeError, ValueError) as error:
        return None, str(error).removeprefix("exact: ")
    finally:
        forget_models()
    return not found, "; ".join(found) or "exact in all ways"


def reason_of(text: str) -> str:
    """What refusals of several families have in common."""
    if " computes attention by itself" in text:
        return "attention that is not transformers' `AttentionInterface`"
    if " makes its attention mask by itself" in text:
        return "an attention mask of its own"
    if match := re.match(r"\w+ calls torch's (\w+) on activations", text):
        return f"`{match[1]}` of activations: scans, recurrences, indexers"
    if "besides the cache, in which padding counts" in text:
        return "states of rows besides the cache"
    if "counts positions by columns" in text:
        return "padding counts as positions in `generate`"
    if "could not be tried" in text and ("pixel_values" in text or "image" in text):
        return "a forward that needs an image"
    if match := re.search(r"is not exact padded on the (\w+)", text):
        return f"padding on the {match[1]} counts as positions"
    if "is not exact in steps with a cache" in text:
        return "a step with a cache gives other bits than the forward"
    if "could not be tried" in text:
        return "a forward that does not take rows of random tokens"
    return text


def write_table(refused: dict[str, str], exact: list[str]) -> None:
    """Write the families that are exact, and why others are not, to ``RESULTS``."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for family, text in refused.items():
        if isinstance(ours(family), PreTrainedModel):
            reasons[reason_of(text)].append(family)
    lines = [
        "# Exact families",
        "",
        "`python -m tests.parity.exact --all --write`: which families `hfgen.exact` takes, in float32 and bfloat16.",
        "",
        f"Exact ({len(exact)}): {', '.join(sorted(exact))}.",
        "",
        "| refused for | families |",
        "|---|---|",
    ]
    by_size = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    lines += [f"| {reason} | {', '.join(sorted(families))} |" for reason, families in by_size]
    RESULTS.write_text("\n".join(lines) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families", nargs="*", default=NAMED, help="names; by default those in NAMED"
    )
    parser.add_argument("--all", action="store_true", help="all families of text")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    names = options.families
    if options.all:
        kinds = ("decoder", "encoder-decoder", "vision")
        names = [f.name for f in FAMILIES.values() if f.kind in kinds]
    exact: list[str] = []
    refused: dict[str, str] = {}
    n_wrong = 0
    for family in names:
        judged = {dtype: judge(family, dtype) for dtype in DTYPES}
        for dtype, (_, text) in judged.items():
            print(f"{family}, {dtype}: {text}", flush=True)
        n_wrong += any(is_exact is False for is_exact, _ in judged.values())
        if all(is_exact for is_exact, _ in judged.values()):
            exact.append(family)
        else:
            refused[family] = next(text for is_exact, text in judged.values() if not is_exact)
    print(f"{len(exact)} families are exact, {len(refused) - n_wrong} refused, {n_wrong} differ")
    if options.write:
        write_table(refused, exact)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
