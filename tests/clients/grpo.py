"""TRL's GRPO on a tiny model, in one process, or with FSDP 2 in several."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import hfgen
import hfgen.trl
from hfgen.decoding import loop
from tests import tiny
from tests.clients.conftest import model

PROMPTS = ["one", "another prompt", "def f(", "x"]

FSDP = {
    "fsdp_version": 2,
    "reshard_after_forward": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "cpu_ram_efficient_loading": False,
}


def trained(
    folder: str, rollout_func: Any = None, weights: Any = None, **settings: Any
) -> tuple[list[str], Any]:
    """The completions of two steps of training ``weights``, by default ``model()``, and the trainer."""
    written: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        written.extend(completions)
        return [float(sum(map(ord, text)) % 7) for text in completions]

    config = GRPOConfig(
        folder,
        **{
            "max_steps": 2,
            "num_generations": 2,
            "learning_rate": 1e-2,
            "seed": 0,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        | settings,
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    tokenizer = tiny.byte_tokenizer()
    weights = model() if weights is None else weights
    trainer = GRPOTrainer(
        weights, reward, config, prompts, processing_class=tokenizer, rollout_func=rollout_func
    )
    trainer.train()
    return written, trainer


class State(AcceleratorState):
    """accelerate's, which honours FSDP on accelerators alone: here it does on a CPU as well."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if named.get("fsdp_plugin") is not None:
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = named["fsdp_plugin"]


def trained_rloo(folder: str) -> tuple[list[str], Any]:
    """The completions of two steps of RLOO, and the trainer. TRL's ``RLOOTrainer`` takes no ``rollout_func``."""
    written: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        written.extend(completions)
        return [float(len(set(text))) for text in completions]

    config = RLOOConfig(
        folder,
        beta=0.0,  # else it loads a second model by name
        max_steps=2,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=8,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    trainer = RLOOTrainer(model(), reward, config, prompts, processing_class=tiny.byte_tokenizer())
    trainer.train()
    return written, trainer


def train_sharded(rank: int, folder: str, is_ours: bool) -> dict[str, Any]:
    """Completions of this rank, how many forwards were for other ranks alone, and all weights."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # asked for, not used
    company = 0
    original = loop.commit

    def commit(run: Any, outputs: Any, **counts: int) -> None:
        nonlocal company
        company += run.finished
        original(run, outputs, **counts)

    state = mock.patch("accelerate.accelerator.AcceleratorState", State)
    watched = mock.patch.object(loop, "commit", commit)
    with state, watched, hfgen.patched() if is_ours else nullcontext():
        texts, trainer = trained(
            folder,
            per_device_train_batch_size=1,
            max_completion_length=64,
            generation_kwargs={
                "eos_token_id": [0, *range(2, 18)]
            },  # rows end at steps of their own
            fsdp=True,
            fsdp_config=FSDP,
        )
    weights = {
        name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for name, weight in trainer.model.state_dict().items()
    }
    return {
        "texts": texts,
        "company": company,
        "is sharded": any(isinstance(part, FSDPModule) for part in trainer.model.modules()),
        "weights": weights,
    }


def roll_out_sharded(rank: int, folder: str, n_steps: int) -> tuple[list[str], int]:
    """Completions of this rank by ``hfgen.trl``, which end at steps of their own, and its forwards in rollouts."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # asked for, not used
    rollout = hfgen.trl.rollout(prompt_lookup_num_tokens=2)
    with mock.patch("accelerate.accelerator.AcceleratorState", State):
        texts, trainer = trained(
            folder,
            rollout,
            max_steps=n_steps,
            learning_rate=1e-3,
            per_device_train_batch_size=1,
            max_completion_length=24,
            generation_kwargs={"eos_token_id": [0, *range(2, 34)]},
            fsdp=True,
            fsdp_config=FSDP,
        )
    assert any(isinstance(part, FSDPModule) for part in trainer.model.modules())
    return texts, sum(len(output.token_ids) for output in rollout.outputs)
