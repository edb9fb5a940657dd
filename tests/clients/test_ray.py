"""`hfgen.ray.Generate` on a local Ray: a job fails, and as it is resumed an actor is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hfgen

pytest.importorskip("ray.data", reason="needs hfgen[ray]")

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig

from hfgen.ray import Generate

N_ROWS = 24
KWARGS = {"do_sample": True, "max_new_tokens": 12, "max_rows": 8}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"worker_niceness": 0},  # else workers wait for what else runs here
    )
    DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def prompt(number: int) -> str:
    return f"def f{number}(x):\n" if number != 7 else ""


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """What each row says in a solo call; its seed is its number."""
    model, tokenizer = hfgen.builtin_model()
    texts = {7: ""}
    for number in (n for n in range(N_ROWS) if n != 7):
        inputs = tokenizer(prompt(number), return_tensors="pt")
        torch.manual_seed(0)
        kwargs = {"do_sample": True, "max_new_tokens": 12, "seed": number}
        ids = model.generate(**inputs, **kwargs)[0, inputs.input_ids.shape[1] :]
        texts[number] = tokenizer.decode(ids, skip_special_tokens=True)
    return texts


def ended_once(marker: Path, at: int, end: Any) -> Any:
    """A processor that ends its process, or its row, once: when the prompt ``at`` has 5 tokens more."""
    _, tokenizer = hfgen.builtin_model()
    begin = tokenizer(prompt(at)).input_ids
    marker_path, length = str(marker), len(begin) + 5

    def processor(input_ids: Any, scores: Any) -> Any:
        row = input_ids[0].tolist()
        if len(row) == length and row[: len(begin)] == begin and not os.path.exists(marker_path):
            open(marker_path, "w").close()
            end()
        return scores

    return processor


def test_a_failed_job_and_a_killed_actor_lose_and_repeat_no_row(
    tmp_path: Path, expected: dict[int, str]
):
    """The job fails at its last row, at which the actor is killed when the job is resumed."""
    source, target, checkpoint = (tmp_path / name for name in ("in", "out", "checkpoint"))
    source.mkdir()
    for first in range(0, N_ROWS, 8):
        items = [{"id": number, "prompt": prompt(number)} for number in range(first, first + 8)]
        pq.write_table(pa.Table.from_pylist(items), source / f"{first}.parquet")
    context = DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=str(checkpoint))
    size, context.target_max_block_size = context.target_max_block_size, 100  # a block of each file
    folder = str(checkpoint)

    def fail() -> None:
        """Once something is known to be done."""
        for _ in range(400):
            if os.path.isdir(folder) and os.listdir(folder):
                break
            time.sleep(0.1)
        raise RuntimeError("device lost")

    def run(processor: Any) -> None:
        kwargs = {"arguments": {"seed": "id"}, "logits_processor": [processor], **KWARGS}
        ray.data.read_parquet(str(source)).map_batches(
            Generate,
            fn_constructor_args=("builtin",),
            fn_constructor_kwargs=kwargs,
            batch_size=8,
            compute=ActorPoolStrategy(size=1),
        ).write_parquet(str(target))

    def written() -> list[dict[str, Any]]:
        return [
            row for path in target.rglob("*.parquet") for row in pq.read_table(path).to_pylist()
        ]

    killed = tmp_path / "killed"
    try:
        with pytest.raises(Exception, match="device lost"):
            run(ended_once(tmp_path / "failed", N_ROWS - 1, fail))
        assert 0 < len(written()) < N_ROWS
        run(ended_once(killed, N_ROWS - 1, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    finally:
        context.checkpoint_config, context.target_max_block_size = None, size
    rows = written()
    assert killed.exists()
    assert sorted(row["id"] for row in rows) == list(range(N_ROWS))
    assert {row["id"]: row["generated_text"] for row in rows} == expected
    errors = {row["id"]: row["generate_error"] for row in rows if row["generate_error"]}
    assert list(errors) == [7]
    assert "empty" in errors[7]
