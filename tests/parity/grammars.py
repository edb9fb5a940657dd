"""Sample under random JSON schemas, and validate: ``python -m tests.parity.grammars --count 500``.

Rows of a batch have schemas of their own, and now and then none. At a high temperature nearly every
token that a grammar allows is drawn. What ends must parse and validate; the others are as long as can be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import torch

import hfgen
from tests.parity.schemas import Schema, draw

ROWS = 8
PROMPTS = ("def f(x):\n", "import os\n\nprint(", "x = {", "class Parser:\n    ")


@dataclass(frozen=True)
class Outcome:
    """What a row made of its schema: ``"valid"``, ``"cut off"``, ``"refused"`` or what is wrong."""

    schema: Schema
    text: str
    what: str

    @property
    def is_wrong(self) -> bool:
        return self.what not in ("valid", "cut off", "refused")


def judge(schema: Schema, text: str, has_ended: bool) -> Outcome:
    """Whether ``text`` is what the schema describes."""
    if not has_ended:
        return Outcome(schema, text, "cut off")
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return Outcome(schema, text, str(error).splitlines()[0])
    return Outcome(schema, text, "valid")


def is_refused(tokenizer: Any, grammar: hfgen.grammar.Grammar) -> bool:
    """Whether the library says that it cannot do it."""
    from hfgen.logits.grammar.llguidance import library_of

    try:
        library_of(tokenizer).matcher(grammar)
    except ValueError:
        return True
    return False


def run(seed: int, count: int, max_new_tokens: int = 200) -> list[Outcome]:
    """Sample a text for each of ``count`` schemas."""
    model, tokenizer = hfgen.builtin_model()
    tokenizer.padding_side = "left"
    rng, outcomes = random.Random(seed), []
    grammars: list[tuple[Schema, hfgen.grammar.Grammar]] = []
    while len(grammars) + len(outcomes) < count:
        schema = draw(rng)
        grammar = hfgen.grammar.json(schema, whitespace=rng.random() < 0.3)
        if is_refused(tokenizer, grammar):
            outcomes.append(Outcome(schema, "", "refused"))
        else:
            grammars.append((schema, grammar))
    torch.manual_seed(seed)
    for first in range(0, len(grammars), ROWS):
        part: list[Any] = [*grammars[first : first + ROWS], (None, None)]  # and a row that is free
        prompts = [rng.choice(PROMPTS) for _ in part]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        output = model.generate(
            **inputs,
            grammar=[grammar for _, grammar in part],
            tokenizer=tokenizer,
            do_sample=True,
            temperature=rng.choice((1.0, 3.0, 10.0)),
            top_k=rng.choice((0, 50)),
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        generated = output[:, inputs.input_ids.shape[1] :].tolist()
        for (schema, _), tokens in zip(part[:-1], generated, strict=False):
            ends = tokenizer.eos_token_id in tokens
            own = tokens[: tokens.index(tokenizer.eos_token_id)] if ends else tokens
            outcomes.append(judge(schema, tokenizer.decode(own), ends))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.grammars", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which random schemas (default 0)")
    parser.add_argument("--count", type=int, default=500, help="how many (default 500)")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    outcomes = run(options.seed, options.count)
    for outcome in outcomes:
        if outcome.is_wrong:
            print(f"{outcome.what}\n  {json.dumps(outcome.schema)}\n  {outcome.text!r}")
    counts = Counter("wrong" if outcome.is_wrong else outcome.what for outcome in outcomes)
    each = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    print(f"{len(outcomes)} schemas: {each}, in {time.perf_counter() - begin:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
