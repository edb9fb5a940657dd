"""DeepSpeed's ZeRO-3 on two processes: parameters are gathered by hooks of each module."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import hfgen
from tests import processes, tiny
from tests.rank_cases import ENDS, MODES, attempted, generated, prompt

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

#: Prompts of one length alone may come in chunks; assistants are sharded here, too.
TRIED = [mode for mode in MODES if mode != "chunks"]
SETTINGS = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def zero(rank: int, target: str, draft: str) -> dict[str, Any]:
    """Every mode with sharded parameters, and greedy tokens of transformers' own generation."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    import deepspeed
    import deepspeed.comm.torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    # Shared memory between processes, which takes a compiler.
    with mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", return_value=None):
        deepspeed.init_distributed("gloo")
    # Models are sharded as they are loaded, while it is there.
    settings = HfDeepSpeedConfig(SETTINGS)
    whole = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, draft))
    model, small = (deepspeed.initialize(model=m, config=SETTINGS)[0].module.eval() for m in whole)
    results: dict[str, Any] = {"size": model.lm_head.weight.numel()}
    own = {"max_new_tokens": ENDS[rank], "eos_token_id": None}
    results["theirs"] = model.generate(prompt(rank), **own, do_sample=False).tolist()
    hfgen.mix_into(model)
    for mode in TRIED:
        arguments = {"assistant_model": small} if "assistant_model" in MODES[mode] else {}
        results[mode] = attempted(
            lambda m=mode, a=arguments: generated(model, prompt(rank), ENDS[rank], m, **a)
        )
    del settings
    return results


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_zero_3(tmp_path: Path) -> None:
    """Each mode gives the tokens of a whole model, and the greedy ones are transformers'."""
    folders = [str(tmp_path / name) for name in ("target", "draft")]
    alone, small = hfgen.mix_into(tiny.llama()), tiny.llama(num_hidden_layers=1)
    alone.save_pretrained(folders[0])
    small.save_pretrained(folders[1])
    for rank, results in enumerate(processes.run(zero, *folders)):
        assert results["size"] == 0
        assert results["theirs"] == results["greedy"]
        for mode in TRIED:
            assert results[mode] == generated(alone, prompt(rank), ENDS[rank], mode), mode
