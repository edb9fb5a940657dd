"""The ways to decode that ``benchmarks.peers`` compares, each in a process of its own: this module imports no library at first.

``python -m benchmarks.peer_ways WAY FOLDER THREADS`` answers questions on stdin.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

#: Numbers of rows that are measured.
ROWS = (1, 8)
#: Generates ``n`` tokens after each of ``prompts`` (lists of ids of one length), and returns them.
Decode = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. ``bits``: of the weights as a step reads them; ``needs``: packages."""

    bits: int
    load: Callable[[Path, int], Decode]
    needs: tuple[str, ...] = ()
    files: str = "model"  # in the folder, without which it has no row


def token_name(i: int) -> str:
    """Of a vocabulary of words, where a library wants one."""
    return f"t{i}"


def torch_model(
    folder: Path,
    threads: int,
    dtype: str,
    ours: bool = True,
    options: dict[str, Any] | None = None,
    offloads: bool = False,
) -> Decode:
    """``options``: of ``hfgen.optimize``, if it is called; ``offloads``: with weights in files."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(threads)
    model: Any = LlamaForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, dtype)
    ).eval()
    if ours:
        import hfgen

        hfgen.mix_into(model)
        if options is not None:
            hfgen.optimize(model, **options, offload=folder if offloads else None)

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        given = {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
        found = model.generate(ids, **given, max_new_tokens=n, do_sample=False)
        return found[:, ids.shape[1] :].tolist()

    return decode


def llama_cpp(folder: Path, threads: int, kind: str) -> Decode:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"{kind}.gguf")
    params.n_parallel, params.n_ctx = max(ROWS), max(ROWS) * 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def one(prompt: list[int], n: int) -> list[int]:
        asked = {"prompt": prompt, "n_predict": n, "temperature": 0.0}
        answer = server.handle_completions(asked | {"ignore_eos": True, "cache_prompt": False})
        return [int(number) for number in re.findall(r"t(\d+)", answer["choices"][0]["text"])]

    pool = ThreadPoolExecutor(max(ROWS))

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        return list(pool.map(lambda prompt: one(prompt, n), prompts))

    return decode


def openvino(folder: Path, threads: int, kind: str) -> Decode:
    import numpy
    import openvino_genai
    from openvino import Tensor

    pipe = openvino_genai.LLMPipeline(
        str(folder / f"openvino-{kind}"), "CPU", INFERENCE_NUM_THREADS=threads
    )

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False)
        ids = numpy.array(prompts, dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(numpy.ones_like(ids)))
        return [list(tokens) for tokens in pipe.generate(inputs, config).tokens]

    return decode


def ctranslate2(folder: Path, threads: int, kind: str) -> Decode:
    import ctranslate2

    generator = ctranslate2.Generator(
        str(folder / "ctranslate2"), compute_type=kind, intra_threads=threads
    )

    def decode(prompts: list[list[int]], n: int) -> list[list[int]]:
        found = generator.generate_batch(
            [[token_name(i) for i in prompt] for prompt in prompts],
            max_length=n,
            min_length=n,
            include_prompt_in_result=False,
            end_token=[],
        )
        return [result.sequences_ids[0] for result in found]

    return decode


_LLAMA = ("xllamacpp", "gguf")
WAYS: dict[str, Way] = {
    "llama.cpp, F16": Way(16, partial(llama_cpp, kind="f16"), _LLAMA, "f16.gguf"),
    "llama.cpp, Q8_0": Way(8, partial(llama_cpp, kind="q8_0"), _LLAMA, "q8_0.gguf"),
    "OpenVINO GenAI, fp16": Way(
        16, partial(openvino, kind="fp16"), ("openvino_genai",), "openvino-fp16"
    ),
    "OpenVINO GenAI, int8": Way(
        8, partial(openvino, kind="int8"), ("openvino_genai",), "openvino-int8"
    ),
    "CTranslate2, float32": Way(
        32, partial(ctranslate2, kind="float32"), ("ctranslate2",), "ctranslate2"
    ),
    "CTranslate2, int8": Way(8, partial(ctranslate2, kind="int8"), ("ctranslate2",), "ctranslate2"),
    "transformers, bfloat16": Way(16, partial(torch_model, dtype="bfloat16", ours=False)),
    "transformers, float32": Way(32, partial(torch_model, dtype="float32", ours=False)),
    "hfgen, float32": Way(32, partial(torch_model, dtype="float32")),
    "hfgen.optimize": Way(16, partial(torch_model, dtype="float32", options={})),
    "hfgen.optimize, bfloat16 model": Way(16, partial(torch_model, dtype="bfloat16", options={})),
    "hfgen.optimize, bfloat16 model, compiled": Way(
        16, partial(torch_model, dtype="bfloat16", options={"compile": True})
    ),
    "hfgen.optimize, compiled": Way(
        16, partial(torch_model, dtype="float32", options={"compile": True})
    ),
    "hfgen.optimize, int8": Way(
        8, partial(torch_model, dtype="float32", options={"weights": "int8"})
    ),
    "hfgen.optimize, int8, compiled": Way(
        8, partial(torch_model, dtype="float32", options={"weights": "int8", "compile": True})
    ),
    "hfgen.optimize, compiled, weights in files": Way(
        16, partial(torch_model, dtype="float32", options={"compile": True}, offloads=True)
    ),
    "hfgen.optimize, int8, compiled, weights in files": Way(
        8,
        partial(
            torch_model,
            dtype="float32",
            options={"weights": "int8", "compile": True},
            offloads=True,
        ),
    ),
}


def serve(way: str, folder: Path, threads: int) -> None:
    """Answer questions on stdin: time a call."""
    decode = WAYS[way].load(folder, threads)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = decode(asked["prompts"], asked["n"])
        seconds = time.perf_counter() - start
        status = Path("/proc/self/status").read_text()  # rusage counts the process that started it
        peak, held = (
            1024 * int(status.partition(name)[2].split()[0]) for name in ("VmHWM:", "VmRSS:")
        )
        print(
            json.dumps({"seconds": seconds, "tokens": tokens, "peak": peak, "held": held}),
            flush=True,
        )


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
