"""What the numbers of a model depend on, by name: versions, machine, kernels, weights, and what each layer gives."""

from __future__ import annotations

import json
import platform
from hashlib import sha256
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .. import __version__
from ..memory import fingerprint
from .exact.layers import hooked
from .exact.switch import is_exact
from .optimization.choice import is_optimized
from .views import view_of_all

#: The parts of an environment, in the order in which differences are looked for.
SECTIONS = ("versions", "machine", "model", "kernels", "weights", "tokenizer", "operations")
#: Hexadecimal digits of a digest.
DIGITS = 12
#: Ids that the operations of a model are tried on, modulo its vocabulary.
TRIED_IDS = (1, 5, 11, 23, 47, 95, 191, 383)


def of(model: Any, tokenizer: Any = None) -> dict[str, dict[str, str]]:
    """Values by name in each of ``SECTIONS``. All weights are read, and ``TRIED_IDS`` are forwarded."""
    device = model.device
    is_cuda = device.type == "cuda"
    return {
        "versions": {
            "hfgen": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": torch.cuda.get_device_name(device) if is_cuda else processor_name(),
            "device": device.type,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "onednn": str(torch.backends.mkldnn.enabled),
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        },
        "model": _model(model),
        "kernels": _kernels(model),
        "weights": {name: digest(tensor) for name, tensor in sorted(model.state_dict().items())},
        "tokenizer": _tokenizer(tokenizer),
        "operations": _operations(model),
    }


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.split(":")[1] for line in file if line.startswith("model name"))
            return next(names).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _model(model: Any) -> dict[str, str]:
    configs = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_attn_implementation_autoset"):
        configs.pop(name, None)
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    return {
        "class": type(model).__name__,
        **fingerprint.settings(model),
        "config": fingerprint.digest_of_text(sorted(configs.items(), key=str)),
        "parameters": f"{sum(weight.numel() for weight in model.parameters()):,}",
        "adapters": str(getattr(model, "active_adapters", "") if has_adapters else ""),
    }


def _kernels(model: Any) -> dict[str, str]:
    kernels = {"exact": str(is_exact(model)), "optimized": str(is_optimized(model))}
    if is_exact(model):
        kernels |= {f"{o.name} {o.shape} {o.dtype}": "exact" for o in model.exactness.operations}
    for name, module in model.named_modules():
        packed = getattr(vars(module).get("forward"), "packed", vars(module).get("forward"))
        if (kernel := getattr(packed, "kernel", None)) is not None:
            kernels[name] = kernel.name
    return kernels


def _tokenizer(tokenizer: Any) -> dict[str, str]:
    if tokenizer is None:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    calls = ("padding", "truncation")  # of the last call
    text = repr(sorted((name, rule) for name, rule in rules.items() if name not in calls))
    chat = str(getattr(tokenizer, "chat_template", None))
    parts = {"vocabulary and rules": text, "chat template": chat}
    return {name: sha256(part.encode()).hexdigest()[:DIGITS] for name, part in parts.items()}


def _operations(model: Any) -> dict[str, str]:
    """Digests of the outputs of layers without layers inside, for ``TRIED_IDS``; none of other models."""
    digests: dict[str, str] = {}
    view = view_of_all(model).eval()  # other threads' calls go on in the model's own mode
    names = {leaf: name for name, leaf in view.named_modules() if not any(leaf.children())}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module in names and isinstance(output, Tensor):
            digests[names[module]] = digest(output)

    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[token % vocab for token in TRIED_IDS]], device=model.device)
    try:
        with hooked(view, note), torch.no_grad():
            view(input_ids=ids, use_cache=False)
    except Exception:  # a model that takes no text alone
        return {}
    return digests


def digest(tensor: Tensor) -> str:
    """The beginning of a checksum of a tensor's shape, type and numbers."""
    return fingerprint.digest({"": tensor})[:DIGITS]
