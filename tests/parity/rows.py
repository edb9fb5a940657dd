"""Compare rows of a batch with their solo calls, on any family: ``python -m tests.parity.rows``.

Every case is one batch whose prompts have random parameters and seeds of their own; each row has to
get the tokens that its prompt gets alone, or to leave them at a near-tie: a position whose two best
tokens (noise included) are closer than rounding can tell. Near-ties are counted.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import hfgen
from hfgen.state.seeds import gumbel, keys_of
from tests.parity.family import Limit
from tests.parity.harness import FAMILIES, forget_models, ours

#: Fields that prompts differ in, and values of each.
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.5, 1.0, 1.7, 0.0],
    "top_k": [0, 3, 20],
    "top_p": [1.0, 0.9, 0.4],
    "min_p": [None, 0.05, 0.3],
    "typical_p": [1.0, 0.8],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "no_repeat_ngram_size": [0, 2],
    "suppress_tokens": [None, [3, 4, 5]],
    "min_new_tokens": [None, 3],
    "min_tokens": [None, 2, 5],
    "max_new_tokens": [1, 4, 8],
    "renormalize_logits": [None, True],
    "frequency_penalty": [None, 0.7],
    "presence_penalty": [None, -0.5],
    "penalty_window": [None, 3],
    "dry_multiplier": [None, 1.0],
    "dry_penalty_last_n": [None, 4],
    "xtc_probability": [None, 0.6],
    "top_n_sigma": [None, 1.0],
    "top_a": [None, 0.2],
    "p_less": [None, True],
    "dynatemp_range": [None, 0.4],
    "smoothing_factor": [None, 0.3],
    "mirostat": [0, 1, 2],
    "adaptive_target": [None, 0.3],
    "eos_token_id": [2, [2, 11, 12, 13, 14, 15], None],
    "stop_token_ids": [None, [16, 17, 18, 19, 20]],
    "ignore_eos": [None, True],
    "repetition_detection": [None, {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}],
    "allowed_token_ids": [None, list(range(5, 60))],
}

#: Ways to run the batch; drafts and caches must not show.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop_finished": {"drop_finished": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "copies": {"num_return_sequences": 2, "do_sample": True, "temperature": 0.9},
    "beams": {"num_beams": 2, "do_sample": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
}

#: Scores closer than this are a near-tie: rounding decides between them.
NEAR = 1e-3

#: Of the ways, those that a family rules out by a limit.
RULED_OUT = {
    "lookup": Limit.ASSISTED,
    "beams": Limit.BEAMS,
    "static": Limit.STATIC,
    "copies": Limit.NUM_RETURN_SEQUENCES,
}

#: Families whose rows depend on each other, also in transformers.
ENTANGLED = {
    "rwkv": "its attention in plain torch mixes the states of all rows",
    "rag_token": "its inputs have a row per document",
}

#: Families whose scores depend on how long a static cache is, also in transformers; a batch has one
#: for its longest row.
LENGTH_OF_CACHE = (
    "axk2 deepseek_v32 dots3_note_text fsmt glm_moe_dsa gpt_neo hy_v4 imagegpt led nllb_moe".split()
)

#: Families of text alone, whose inputs have a row per prompt.
TEXT_FAMILIES = [
    family.name
    for family in FAMILIES.values()
    if family.kind in ("decoder", "encoder-decoder") and family.name not in ENTANGLED
]


@dataclass(frozen=True)
class RowCase:
    """A batch of ``rows`` prompts with random parameters, run in one of ``WAYS``."""

    family: str
    way: str
    rows: int
    padded: bool
    seed: int

    @property
    def command(self) -> str:
        """The shell command that runs this case alone."""
        values = f"{self.family}:{self.way}:{self.rows}:{int(self.padded)}:{self.seed}"
        return f"python -m tests.parity.rows --only {values}"

    @classmethod
    def parse(cls, text: str) -> RowCase:
        family, way, rows, padded, seed = text.split(":")
        return cls(family, way, int(rows), bool(int(padded)), int(seed))


def draw_case(rng: random.Random) -> RowCase:
    family = FAMILIES[rng.choice(TEXT_FAMILIES)]
    ways = [way for way in WAYS if RULED_OUT.get(way) not in family.unsupported]
    if family.name in LENGTH_OF_CACHE:
        ways = [way for way in ways if way != "static"]
    padded = "padding" not in family.unsupported and rng.random() < 0.5
    return RowCase(
        family.name, rng.choice(ways), rng.choice((2, 3, 4)), padded, rng.randrange(1000)
    )


def random_config(rng: random.Random, way: str) -> GenerationConfig:
    names = rng.sample(sorted(CHOICES), rng.randint(1, 6))
    values = {"max_new_tokens": 6, **{name: rng.choice(CHOICES[name]) for name in names}}
    values["dry_sequence_breakers"] = []  # the strings of the default need a tokenizer
    values |= {"do_sample": rng.random() < 0.7, "pad_token_id": 0, **WAYS[way]}
    return GenerationConfig(seed=rng.randrange(2**62), **values)


def solo(config: GenerationConfig) -> GenerationConfig:
    """What a row asks for, alone: without drafts, and with nobody to leave."""
    of_batch = {"drop_finished": False, "prompt_lookup_num_tokens": None}
    return GenerationConfig.from_dict(config.to_dict() | of_batch)


def differences(case: RowCase, dtype: torch.dtype, counts: Counter[str]) -> list[str]:
    """Which rows of a case have other tokens than alone, as ``rows_beside_solo`` says it."""
    rng, model = random.Random(case.seed), ours(case.family)
    if isinstance(model, torch.nn.Module):  # others compute in one dtype
        model.to(dtype)
    inputs = FAMILIES[case.family].inputs(model, case.rows, case.padded, case.seed)
    configs = [random_config(rng, case.way) for _ in range(case.rows)]
    rows = range(case.rows)
    each = [{name: take(v, row, case.rows) for name, v in inputs.items()} for row in rows]
    return rows_beside_solo(model, inputs, each, configs, NEAR, counts)


def of_the_builtin(seed: int, n_rows: int, dtype: torch.dtype, counts: Counter[str]) -> list[str]:
    """The same of ``n_rows`` prompts of Python code, on the built-in model, which is trained."""
    model, tokenizer = hfgen.builtin_model()
    rng, lines = random.Random(seed), inspect.getsource(argparse).splitlines()
    starts = [rng.randrange(len(lines) - 6) for _ in range(n_rows)]
    prompts = ["\n".join(lines[i : i + rng.randint(1, 5)]) + "\n" for i in starts]
    configs = [
        GenerationConfig(
            do_sample=True,
            temperature=rng.choice((0.0, 0.5, 0.8, 1.0, 1.3)),
            seed=rng.randrange(2**62),
            max_new_tokens=64,
        )
        for _ in prompts
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    # Spacing of numbers between 8 and 16, where the scores are.
    near = 8 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else NEAR
    each = [tokenizer([prompt], return_tensors="pt") for prompt in prompts]  # without padding
    return rows_beside_solo(model.to(dtype), inputs, each, configs, near, counts)


def rows_beside_solo(
    model: Any,
    inputs: Any,
    each: list[Any],
    configs: list[GenerationConfig],
    near: float,
    counts: Counter[str],
) -> list[str]:
    """Which rows have other tokens than alone, other than from a near-tie on; these are counted.

    ``inputs`` are those of the batch, ``each`` those of every prompt alone.
    """
    together = model.generate(**inputs, generation_config=configs)
    n, found = len(together) // len(configs), []
    for row, (own, config) in enumerate(zip(each, map(solo, configs), strict=True)):
        recorded = {"return_dict_in_generate": True, "output_scores": True}
        alone = model.generate(**own, generation_config=config, **recorded)
        start, own_start = (
            1 if model.config.is_encoder_decoder else of["input_ids"].shape[1]
            for of in (inputs, own)
        )
        for copy in range(n):
            there = alone.sequences[copy, own_start:].tolist()
            here = together[row * n + copy, start:].tolist()[: len(there)]
            step = next((i for i, token in enumerate(here) if token != there[i]), None)
            counts["tokens"] += len(there) if step is None else step + 1
            if step is None:
                continue
            counts["rows with other tokens"] += 1
            margin = None
            if config.num_beams in (None, 1):
                best, second = margin_of(alone.scores[step][copy], config, copy, step)
                if (margin := best - second) <= near:
                    counts["of these, from a near-tie on"] += 1
                    continue
            place = f"row {row}.{copy}, step {step}, margin {margin}"
            found.append(f"{place}: {here} beside {there}, {config}")
    return found


def take(value: Any, row: int, rows: int) -> Any:
    """The row of a tensor that has one for each of ``rows`` prompts."""
    is_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
    return value[row : row + 1] if is_rows else value


def margin_of(scores: Tensor, config: GenerationConfig, copy: int, step: int) -> list[float]:
    """The two best of ``scores (vocab,)``, with the noise of the row."""
    scores = scores.float()
    if config.do_sample and config.temperature:
        key = keys_of([config.seed], copy + 1, scores.device)[copy:]
        scores = scores + gumbel(key, step, torch.arange(len(scores)))
    return list(scores.topk(2).values.tolist())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", help="one case, as a difference prints it")
    parser.add_argument("--bfloat16", action="store_true", help="count differences, do not fail")
    parser.add_argument("--builtin", action="store_true", help="COUNT rows of the built-in model")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    rng, counts, n_different = random.Random(options.seed), Counter[str](), 0
    if options.builtin:
        found = of_the_builtin(options.seed, options.count, dtype, counts)
        print(*found, f"{options.count} rows; {dict(counts)}", sep="\n")
        return int(bool(found))
    cases = [draw_case(rng) for _ in range(options.count)]
    if options.only:
        cases = [RowCase.parse(options.only)]
    for case in sorted(cases, key=lambda case: case.family):
        try:
            found = differences(case, dtype, counts)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        forget_models()
        n_different += bool(found)
        if found and not options.bfloat16:
            print(*found, case.command, sep="\n", flush=True)
    print(f"{len(cases)} batches, {n_different} with differences; {dict(counts)}")
    return int(n_different > 0 and not options.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
