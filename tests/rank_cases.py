"""What the processes of ``test_ranks.py`` run: every mode on sharded models, and calls that fail."""

from __future__ import annotations

import contextlib
import random
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hfgen
from hfgen.running import ranks
from tests import tiny

N_NEW = 12
#: After how many new tokens each rank's rows end, where they do by themselves.
ENDS = (2, 6)

#: Each mode of the table with what matters for ranks: caches, drafts, rows that leave, noise.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample, seed": {"do_sample": True, "seed": 5},
    "sample, torch's generator": {"do_sample": True, "top_k": 20},
    "samples of a prompt": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 1},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": "whole"},
    "sampled with an assistant": {"assistant_model": "whole", "do_sample": True, "seed": 2},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3},
    "contrastive, one by one": {"penalty_alpha": 0.5, "top_k": 3, "low_memory": True},
    "dola": {"dola_layers": [0, 1]},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[40]]},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 2},
    "quantised cache": {"cache_implementation": "quantized"},
    "chunks": {"prefill_chunk_size": 3},
    "rows leave": {"drop_finished": True, "eos_token_id": [7, 8, 9, 10, 11, 12, 13, 14, 15]},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "no cache": {"use_cache": False},
    "early exit": {"assistant_early_exit": 1},
    "sampled with an early exit": {"assistant_early_exit": 1, "do_sample": True, "seed": 3},
    "guidance": {"guidance_scale": 1.5},
    "guided beams": {"guidance_scale": 1.5, "num_beams": 2},
    "guided lookup": {"guidance_scale": 1.5, "prompt_lookup_num_tokens": 3},
}


#: How the parts of a sharded model beside its layers are kept.
RESTS = ("whole", "a head of its own", "gathered per forward")


class EndsAfter:
    """A stopping criterion: all rows end at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.length)


def arguments_of(mode: str) -> dict[str, Any]:
    """Arguments of ``generate`` for a mode."""
    given = {"max_new_tokens": N_NEW, "eos_token_id": None, **MODES[mode]}
    if given.get("assistant_model") == "whole":
        given["assistant_model"] = tiny.llama(num_hidden_layers=1)
    return given


def prompt(rank: int) -> torch.Tensor:
    """``(2, length)``: of other tokens, and of another length, on each rank."""
    return tiny.prompt(rows=2, length=7 + rank, seed=rank)


def generated(model: Any, ids: torch.Tensor, end: int | None, mode: str, **more: Any) -> Any:
    """The tokens of a mode, as lists; rows end after ``end`` new ones."""
    arguments = arguments_of(mode) | more
    if end is not None:
        arguments["stopping_criteria"] = [EndsAfter(ids.shape[1] + end)]
    torch.manual_seed(3)
    return model.generate(ids, **arguments).tolist()


def attempted(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or its error as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sharded(rest: str = "gathered once", **overrides: Any) -> Any:
    """A Llama of which each process has a part of each layer, and of the rest (FSDP 2)."""
    model = hfgen.mix_into(tiny.llama(**overrides))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if rest == "whole":
        return model
    if rest == "a head of its own":
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=rest == "gathered per forward")


# ---------------------------------------------------------------- FSDP


def fsdp(rank: int) -> dict[str, Any]:
    """Every mode, each rank with a prompt of its own that ends at a step of its own."""
    model = sharded()
    results: dict[str, Any] = {"is active": hfgen.is_active(model)}
    for mode in MODES:
        ids = prompt(0) if mode == "chunks" else prompt(rank)
        results[mode] = attempted(lambda m=mode, i=ids: generated(model, i, ENDS[rank], m))
    # Drafts come with the prompt, unless a row of it is all padding, as here on rank 0.
    ids, mask = prompt(0), torch.ones_like(prompt(0))
    mask[0] = rank
    lookup = {"attention_mask": mask, "prompt_lookup_num_tokens": 3}
    results["a masked row"] = attempted(lambda: generated(model, ids, 6, "greedy", **lookup))
    for rest in RESTS:
        of_parts = sharded(rest)
        for mode in ("greedy", "dola"):
            results[f"{mode}, {rest}"] = generated(of_parts, prompt(rank), ENDS[rank], mode)
    # Whole models that only count each other's steps, as with DDP.
    whole = hfgen.mix_into(tiny.llama())
    results["replicas"] = generated(whole, prompt(rank), ENDS[rank], "greedy", synced_gpus=True)
    return results


def fsdp_errors(rank: int) -> dict[str, Any]:
    """Calls that fail, on rank 1 alone or on all ranks; after each, the model decodes as before."""
    model = sharded()
    ids = prompt(rank)
    results: dict[str, Any] = {}

    def attempt(name: str, **arguments: Any) -> None:
        given = {"max_new_tokens": N_NEW, "eos_token_id": None, **arguments}
        results[name] = attempted(lambda: model.generate(ids, **given).tolist())

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if rank == 1 and ids.shape[1] == prompt(rank).shape[1] + 3:
            raise KeyError("step three")
        return scores

    class Streamer:
        n = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.n += 1
            if rank == 1 and self.n == 3:
                raise OSError("nobody listens")

        def end(self) -> None:
            pass

    attempt("a processor", logits_processor=[failing])
    attempt("a processor, beams", logits_processor=[failing], num_beams=2)
    attempt("a processor, drafts", logits_processor=[failing], prompt_lookup_num_tokens=2)
    attempt("a processor, contrastive", logits_processor=[failing], penalty_alpha=0.5, top_k=2)
    attempt("a streamer", streamer=Streamer())
    attempt("an argument", temperature=-1.0 if rank else 1.0, do_sample=True)
    attempt("a field", no_such_field=3) if rank else attempt("a field")
    attempt("another mode", num_beams=1 + rank)
    attempt("chunks", prefill_chunk_size=7)
    attempt("room", max_new_tokens=4 + 8 * rank, cache_implementation="static")
    with unittest.mock.patch.object(ranks, "__version__", f"0.{rank}"):
        attempt("versions")
    attempt("guided contrastive search", guidance_scale=2.0, penalty_alpha=0.5, top_k=3)
    attempt("guided drafts", guidance_scale=2.0, assistant_early_exit=1)
    attempt("a processor, guided", logits_processor=[failing], guidance_scale=2.0)
    attempt("a processor, early exit", logits_processor=[failing], assistant_early_exit=1)
    results["an engine"] = attempted(lambda: hfgen.Engine(model))
    results["a stream that is left"] = attempted(lambda: left_after(model, ids, 2 if rank else 99))
    prefixes = hfgen.PrefixCache()
    torch.manual_seed(3)
    results["greedy"] = generated(model, ids, ENDS[rank], "greedy", prefix_cache=prefixes)
    results["why no prefix"] = list(prefixes.stats.bypassed)
    if rank == 1:
        model.model.layers[1].register_forward_pre_hook(no_memory)
    attempt("within a forward")
    if rank == 1:
        dist.destroy_process_group()  # as it is when its process ends
    return results


def left_after(model: Any, ids: torch.Tensor, n: int) -> int:
    """Take ``n`` events of a stream, and leave it."""
    taken = 0
    with contextlib.closing(model.stream(ids, max_new_tokens=N_NEW, eos_token_id=None)) as events:
        for _ in events:
            taken += 1
            if taken == n:
                break
    return taken


# ---------------------------------------------------------------- tensor parallelism


def divided(folder: str) -> Any:
    """The model of a folder, of each of whose layers each process has a part."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    )
    return hfgen.mix_into(model.eval())


def tensor_parallel(rank: int, folder: str, undivided: str) -> dict[str, Any]:
    """Every mode on a model whose layers are divided, and what its ranks have to agree on."""
    model = divided(folder)
    ids = prompt(0)
    results: dict[str, Any] = {
        "parts": model.model.layers[0].mlp.up_proj.weight.to_local().shape[0]
    }
    for mode in MODES:
        results[mode] = attempted(lambda m=mode: generated(model, ids, 6, m))
    prefixes = hfgen.PrefixCache()
    for _ in range(2):
        results["prefix cache"] = generated(model, ids, 6, "greedy", prefix_cache=prefixes)
    results["prefix hits"] = prefixes.stats.hits
    results["engine"] = attempted(
        lambda: [
            one.token_ids
            for one in hfgen.generate_many(
                model, [row.tolist() for row in ids], max_new_tokens=6, eos_token_id=None
            )
        ]
    )
    own = {"max_new_tokens": N_NEW, "eos_token_id": None}

    def attempt(name: str, ids: torch.Tensor = ids, **arguments: Any) -> None:
        results[name] = attempted(lambda: model.generate(ids, **own | arguments).tolist())

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if rank == 1 and ids.shape[1] == 10:
            raise KeyError("step three")
        return scores

    torch.manual_seed(rank)
    attempt("another random state", do_sample=True)
    attempt("a seed", do_sample=True, seed=4)
    attempt("another prompt", ids=tiny.prompt(2, seed=rank))
    attempt("another parameter", top_k=3 + rank)
    attempt("an argument", temperature=-1.0 if rank else 1.0, do_sample=True)
    attempt("a time", max_time=5.0)
    attempt("a time, in step", max_time=500.0, synced_gpus=True)
    attempt("a processor, in step", logits_processor=[failing], synced_gpus=True)
    results["optimize"] = attempted(lambda: hfgen.optimize(model))
    model = divided(undivided)
    attempt("heads")
    model = divided(folder)
    attempt("a processor", logits_processor=[failing])
    if rank == 1:
        dist.destroy_process_group()  # as it is when its process ends
    return results


def no_memory(*arguments: Any) -> None:
    raise MemoryError("no room")


class Gathering(torch.nn.Linear):
    """A cheap sharded model: each forward is a collective in which all ranks have to take part."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, **_: object) -> int:
        present = torch.ones(())
        dist.all_reduce(present)
        return int(present)


def rounds_of_any_length(rank: int, n: int, fails_in: int | None) -> int:
    """Forward as often as each rank likes in ``n`` rounds; one of rank 1 fails. Returns the forwards of this rank."""
    model, lengths = Gathering(1, 1), random.Random(rank)
    n_forwards = 0
    with unittest.mock.patch("hfgen.families.is_sharded", return_value=True):
        for number in range(n):
            with ranks.together(model):
                for _ in range(lengths.choice((0, 0, 1, 1, 2, 3, 9))):
                    if number == fails_in and rank == 1:
                        raise ArithmeticError("a rank fails")
                    assert model(torch.zeros(1, 1)) == 2
                    n_forwards += 1
    return n_forwards


def error_of_rounds(rank: int) -> str:
    """The error of this rank where rank 1 fails in a round, while rank 0 forwards or waits."""
    errors = []
    for seed in range(20):
        try:
            rounds_of_any_length(rank + 2 * seed if rank == 0 else 1, 8, 3)
        except (ArithmeticError, ranks.RankError) as error:
            errors.append(type(error).__name__)
    return " ".join(sorted(set(errors)))
