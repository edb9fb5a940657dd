"""Compare calls that reuse stored prefixes with calls that do not: ``python -m tests.parity.prefixes``.

Every family gets the same series of calls with one ``PrefixCache``: the same prompt again, a chat, a
prompt that diverges, batches whose rows match different lengths, beams, samples, drafts, chunks, static
caches. Tokens and scores have to be those of the call without it. Printed per family: how many tokens
each call saved, and why calls went by without stored prefixes. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import hfgen
from tests.parity.harness import FAMILIES, forget_models, ours
from tests.parity.options import vocab_size
from tests.parity.speculation import TOLERANCE, UNSTEADY

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
Call = dict[str, Any]


def batch(*rows: Tensor) -> Call:
    """Rows of different lengths, padded on the left."""
    length = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(length - len(row)), row]) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(length) >= length - lengths).long()}


def calls(
    model: Any, unsupported: dict[str, str], modes: Sequence[str]
) -> Iterator[tuple[str, Call]]:
    """The calls, by name; later ones go on from what earlier ones stored.

    None of a model for which text alone is no input.
    """
    generator = torch.Generator().manual_seed(1)
    vocab = min(vocab_size(model), 90)

    def new(n: int) -> Tensor:
        return torch.randint(5, vocab, (n,), generator=generator)

    prompt = new(12)
    plain = outcome(model, {"input_ids": prompt[None]})
    if isinstance(plain, Exception):
        return
    answer = plain.sequences[0].flatten()
    yield "first", {"input_ids": prompt[None]}
    yield "same", {"input_ids": prompt[None]}
    yield "chat", {"input_ids": torch.cat([answer[:17], new(4)])[None]}
    yield "diverging", {"input_ids": torch.cat([prompt[:7], new(6)])[None]}
    yield "shorter", {"input_ids": prompt[None, :5]}
    if "padding" not in unsupported:
        rows = [torch.cat([prompt, new(5)]), torch.cat([prompt[:4], new(3)]), new(9), prompt[:8]]
        yield "batch", batch(*rows)
        more = torch.cat([rows[0], new(2)]), torch.cat([rows[1][:6], new(8)]), new(5), rows[2]
        yield "mixed batch", batch(*more)
    longer = torch.cat([prompt, new(3)])[None]
    if any("beam" in mode for mode in modes):
        yield "beams", {"input_ids": longer, "num_beams": 3}
    yield "samples", {"input_ids": longer[:, :14], "do_sample": True, "num_return_sequences": 3}
    if "assisted" not in unsupported:
        repeated = torch.cat([prompt, prompt, new(2), prompt])[None]
        yield "drafts", {"input_ids": repeated, "prompt_lookup_num_tokens": 3}
    if "static" not in unsupported:
        yield "static", {"input_ids": longer[:, :14], "cache_implementation": "static"}
    if "chunked" not in unsupported:
        chunked = torch.cat([prompt, new(7)])[None]
        yield "chunks", {"input_ids": chunked, "prefill_chunk_size": 4}


def outcome(model: Any, call: Call) -> Any:
    torch.manual_seed(0)
    try:
        return model.generate(
            **GREEDY | {"return_dict_in_generate": True, "output_scores": True} | call
        )
    except Exception as error:
        return error


def difference(plain: Any, ours: Any, tolerance: float) -> str | None:
    if isinstance(plain, Exception) or isinstance(ours, Exception):
        return None if type(plain) is type(ours) else f"{plain!r}, {ours!r}"
    if not torch.equal(plain.sequences, ours.sequences):
        return f"tokens {plain.sequences.tolist()}, {ours.sequences.tolist()}"
    try:
        torch.testing.assert_close(ours.scores, plain.scores, atol=tolerance, rtol=tolerance)
    except AssertionError as error:
        return str(error).replace("\n", " ")
    return None


def check(name: str) -> list[str]:
    """Run a family's calls and print what they saved; returns what differs."""
    family, model, prefixes = FAMILIES[name], ours(name), hfgen.PrefixCache()
    tolerance = 100 * TOLERANCE if name in UNSTEADY else TOLERANCE
    differences, saved = [], []
    for what, call in calls(model, family.unsupported, family.modes):
        before = prefixes.stats.tokens_saved
        plain = outcome(model, call)
        model.prefix_cache = prefixes
        reused = outcome(model, call)
        del model.prefix_cache
        saved.append(f"{what} {prefixes.stats.tokens_saved - before}")
        if (found := difference(plain, reused, tolerance)) is not None:
            differences.append(f"{name}, {what}: {found}")
    print(name, ", ".join(saved), *prefixes.stats.bypassed, sep="; ")
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.prefixes", description=__doc__)
    parser.add_argument("family", nargs="*", choices=[[], *sorted(FAMILIES)], metavar="family")
    chosen = parser.parse_args(arguments).family or [
        name for name, family in FAMILIES.items() if family.kind in ("decoder", "vision")
    ]
    differences = []
    for name in chosen:
        differences += check(name)
        forget_models()
    print(f"{len(differences)} differences", *differences, sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
