"""Objects of vLLM's `SamplingParams`, as the real class leaves their fields after its own checks.

`python -m tests.vllm_objects`, where vLLM is installed, writes `golden/vllm_objects.json`.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).parent / "golden" / "vllm_objects.json"

#: Arguments of the class: each argument once, and those that change each other's fields.
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.1, "seed": 7},
    {"temperature": 0.001, "top_k": -1, "seed": -1, "watermarking": False},
    {"temperature": 0.0, "top_p": 0.9, "top_k": 12, "detokenize": False},
    {"stop": ["ab", "c"], "stop_token_ids": [4, 5], "ignore_eos": True, "max_tokens": None},
    {"stop": "ab", "include_stop_str_in_output": True, "min_tokens": 2, "max_tokens": 9},
    {"logprobs": 4, "prompt_logprobs": 2, "flat_logprobs": True, "skip_special_tokens": False},
    {"logprobs": True, "prompt_logprobs": True, "extra_args": {}, "skip_clone": True},
    {"logprob_token_ids": [1, 2], "skip_reading_prefix_cache": True},
    {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"choice": ["a", "b"]}, "logit_bias": {"5": 2.0}},
    {"allowed_token_ids": [7, 8], "bad_words": ["no"], "thinking_token_budget": 30},
    {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}},
    {"repetition_detection": {}, "thinking_token_budget": -1},
)


def installed(arguments: dict[str, Any]) -> Any:
    """An object of the installed vLLM; ``ImportError`` without it."""
    from vllm import sampling_params as vllm

    nested = {
        "structured_outputs": vllm.StructuredOutputsParams,
        "repetition_detection": vllm.RepetitionDetectionParams,
    }
    made = {name: nested[name](**v) if name in nested else v for name, v in arguments.items()}
    return vllm.SamplingParams(**made)


def recorded(arguments: dict[str, Any]) -> Any:
    """An object with the recorded fields of the real one."""
    usual, *others = json.loads(FILE.read_text())["objects"]
    found = next(entry for entry in (usual, *others) if entry["arguments"] == arguments)
    fields = usual["fields"] | found["fields"]
    nested = ("structured_outputs", "repetition_detection")
    made = {n: SimpleNamespace(**v) if v and n in nested else v for n, v in fields.items()}
    return SimpleNamespace(__struct_fields__=tuple(fields), **made)


def fields_of(params: Any) -> dict[str, Any]:
    """The fields of a real object, as the recording has them."""
    return {name: _plain(getattr(params, name)) for name in params.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return sorted(value) if isinstance(value, set) else getattr(value, "__dict__", value)


if __name__ == "__main__":
    from vllm.version import __version__

    objects = [{"arguments": a, "fields": fields_of(installed(a))} for a in ARGUMENTS]
    usual = objects[0]["fields"]
    for entry in objects[1:]:  # the others differ in a few fields
        entry["fields"] = {n: v for n, v in entry["fields"].items() if v != usual[n]}
    lines = ",\n".join(map(json.dumps, objects))
    FILE.write_text(f'{{"vllm": "{__version__}", "objects": [\n{lines}\n]}}\n')
