"""What three and four processes run: models with encoders, forwards in one order, a process that is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfgen
from tests import rank_cases, tiny
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.rank_cases import EndsAfter, attempted, divided, prompt

#: After how many new tokens the rows of each of three ranks end.
ENDS = (6, 2, 4)

#: Arguments of each mode that models with encoders are decoded in.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "seed": 5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 1},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[40]]},
    "early exit": {"assistant_early_exit": 1},
    "guidance": {"guidance_scale": 1.5},
}

FAMILIES = {family.name: family for family in ENCODER_FAMILIES}
#: Encoder-decoders, and models that read images or sound.
CASES = [
    *(("t5", mode) for mode in [*MODES][:7]),
    *((name, mode) for name in ("llava", "qwen2_audio") for mode in [*MODES][:3]),
    ("t5", "early exit"),
    ("llava", "guidance"),
    ("mllama", "beams"),
]
NAMES = tuple(dict.fromkeys(name for name, _ in CASES))


def inputs_of(name: str, rank: int) -> dict[str, Any]:
    """What a rank gives to a family: two rows of its own."""
    family = FAMILIES[name]
    return family.inputs(family.build(), 2, False, rank)


def completed(model: Any, inputs: dict[str, Any], end: int, **arguments: Any) -> Any:
    """Tokens, as lists; all rows end after ``end`` new ones."""
    length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    given = {
        "max_new_tokens": 12,
        "max_length": None,
        "eos_token_id": None,
        "stopping_criteria": [EndsAfter(length + end)],
    }
    return model.generate(**inputs, **given | arguments).tolist()


def sharded(model: Any) -> Any:
    """The model, of which each process has a part of each layer and of what is around them (FSDP 2)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
    return hfgen.mix_into(fully_shard(model, mesh=mesh))


def of_three(rank: int, folder: str) -> dict[Any, Any]:
    """Models with encoders, drafts of sharded assistants, calls that do not go together, a killed rank."""
    results: dict[Any, Any] = {}
    models = {name: sharded(FAMILIES[name].build()) for name in NAMES}
    for name, mode in CASES:
        inputs, arguments = inputs_of(name, rank), MODES[mode]
        model = models[name]
        results[name, mode] = attempted(
            lambda m=model, i=inputs, a=arguments: completed(m, i, ENDS[rank], **a)
        )
    model = rank_cases.sharded()
    ids = {"input_ids": prompt(rank)}
    small = rank_cases.sharded(num_hidden_layers=1)
    for draws in (False, True):
        seed = {"do_sample": True, "seed": 3} if draws else {}
        results["a sharded assistant", draws] = attempted(
            lambda s=seed: completed(model, ids, ENDS[rank], assistant_model=small, **s)
        )

    def attempt(name: str, model: Any = model, inputs: Any = ids, **arguments: Any) -> None:
        results[name] = attempted(lambda: completed(model, inputs, 4, **arguments))

    image = inputs_of("llava", rank)
    text = {name: value for name, value in image.items() if name != "pixel_values"}
    attempt("an image for one", models["llava"], image if rank == 1 else text)
    attempt("guidance for one", guidance_scale=1.5 if rank == 1 else None)
    attempt("other layers", assistant_early_exit=1 if rank == 1 else 2)
    attempt("a guided encoder-decoder", models["t5"], inputs_of("t5", rank), guidance_scale=1.5)
    attempt("an early exit beside images", models["llava"], image, assistant_early_exit=1)
    results["heads"] = attempted(lambda: completed(divided(folder), ids, 4))
    results["in one order"] = attempted(lambda: in_one_order(rank))
    results["killed"] = ended_by_a_signal(model, prompt(0), is_killed=rank == 2)
    return results


def in_one_order(rank: int) -> list[Any]:
    """The modes of a whole model, each of whose layers waits for the same layer on all ranks.

    So does ZeRO-3, which gathers parameters by hooks. ``AssertionError`` for another layer on one.
    """
    model = hfgen.mix_into(tiny.llama())
    for place, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, place=place: meet(place))
    modes = ({}, {"assistant_early_exit": 1}, {"guidance_scale": 1.5}, {"penalty_alpha": 0.5})
    ids = {"input_ids": prompt(rank)}
    return [completed(model, ids, ENDS[rank], synced_gpus=True, top_k=2, **mode) for mode in modes]


def meet(place: int) -> None:
    """Wait for all ranks; ``AssertionError`` if one is at another place."""
    places = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(places, torch.tensor(place))
    assert {int(each) for each in places} == {place}


def ended_by_a_signal(model: Any, ids: torch.Tensor, is_killed: bool) -> tuple[str, float]:
    """What the others say once one rank has got a SIGTERM, and after how many seconds."""
    started = time.monotonic()

    def kill(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if is_killed and ids.shape[1] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return scores

    end = attempted(lambda: completed(model, {"input_ids": ids}, 9, logits_processor=[kill]))
    if dist.is_initialized():
        dist.destroy_process_group()  # as it is when its process ends
    return end, time.monotonic() - started


# ---------------------------------------------------------------- tensor parallelism

#: Modes of the table that four ranks decode in.
OF_FOUR = ("greedy", "sample, seed", "beams", "assistant", "guidance")


def of_four(rank: int, folder: str) -> dict[str, Any]:
    """A model with a head for each rank; calls that end, or do not go together; a killed rank."""
    model, ids = divided(folder), prompt(0)
    results: dict[str, Any] = {
        mode: attempted(lambda m=mode: rank_cases.generated(model, ids, 6, m)) for mode in OF_FOUR
    }
    given = {"input_ids": ids}
    ends = [EndsAfter(ids.shape[1] + 3 if rank == 1 else 99)]

    def attempt(name: str, **arguments: Any) -> None:
        results[name] = attempted(lambda: completed(model, given, 9, **arguments))

    attempt("one ends", stopping_criteria=ends, synced_gpus=True)
    attempt("other options", max_new_tokens=9 + rank)
    attempt("times of their own", max_time=[50.0, 60.0], synced_gpus=True)
    results["killed"] = ended_by_a_signal(model, ids, is_killed=rank == 2)
    return results
