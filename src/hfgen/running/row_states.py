"""State of a forward outside its cache and arguments: modules, hooks, lists, random generators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin as UpstreamMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import families
from ..memory.caches.dynamic import replaced_method
from ..memory.caches.growing import n_writes
from ..state.call import ModelKwargs

#: Packages whose hooks, of models and of modules, look at each row by itself.
LIBRARIES = ("accelerate", "torch", "transformers", __name__.partition(".")[0])

#: Packages whose layers, adapters and quantised layers among them, do so in eval mode.
LIBRARIES_OF_LAYERS = (
    *LIBRARIES,
    *("aqlm", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu"),
    *("fp_quant", "gptqmodel", "hqq", "huggingface_hub", "liger_kernel", "optimum", "peft"),
    *("quark", "sinq", "spqr_quant", "torchao", "vptq"),
)

#: Packages that wrap transformers' attention. kvpress does when it is imported, and changes what a module
#: attends to only with a press, whose hooks are of no known library.
LIBRARIES_OF_ATTENTION = (*LIBRARIES_OF_LAYERS, "kvpress")

#: Methods in whose place a model may have an object: nnsight's forward is one.
CALLED = frozenset(("forward", "prepare_inputs_for_generation", "_prefill"))
_FUNCTIONS = frozenset((FunctionType, MethodType, partial))

#: Tensors by the ids of their modules, their names and ids, and how often they were written to.
ModuleTensors = dict[tuple[int, str, int, int | None], torch.Tensor]


def is_row_wise(model: Any) -> bool:
    """Whether a forward is known to compute each row by itself, without states or dropout's noise."""
    return foreign_code(model) is None and not any(part.training for part in model.modules())


def foreign_code(model: Any) -> str | None:
    """The name of code in ``model`` that is not known to compute each row by itself, if there is any.

    Libraries' code is known; other classes, functions and hooks say so by an attribute ``is_row_wise``.
    """
    if not isinstance(model, nn.Module):
        return type(model).__name__
    classes: dict[type, None] = {}
    attentions: set[str | None] = set()
    for module in model.modules():
        attentions.add(getattr(vars(module).get("config"), "_attn_implementation", None))
        if vars(module).get("moe_eval_capacity_token_fraction", 1) < 1:
            return type(module).__name__  # NLLB-MoE's rows compete for places at its experts
        for name, value in tuple(vars(module).items()):  # other threads may add some now
            is_function = type(value) in _FUNCTIONS
            code = value if is_function else type(value)
            if (is_function or name in CALLED) and not _is_known(code):
                return f"{type(module).__name__}.{name}"
        if type(module) not in classes:
            classes |= dict.fromkeys(type(module).__mro__)
    classes.pop(object, None)  # nnsight gives every object a method
    for cls in classes:
        attributes = vars(cls)
        if attributes.get("is_row_wise"):  # a subclass has to say so again
            continue
        for value in tuple(attributes.values()):
            value = getattr(value, "__func__", value)  # of a class method
            if type(value) in _FUNCTIONS and not _is_known(value):
                return cls.__name__
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        if name in attentions and not _is_known(function, LIBRARIES_OF_ATTENTION):
            return str(name)
    return replaced_method() or foreign_hook(model)


def foreign_hook(model: Any) -> str | None:
    """The name of a hook that is not known to look at each row by itself, if there is one."""
    hooks = (hook for hook in _hooks(model) if not _is_known(hook, LIBRARIES))
    return next((str(getattr(hook, "__qualname__", type(hook).__name__)) for hook in hooks), None)


def has_list_of_rows(model_kwargs: ModelKwargs, n_rows: int) -> bool:
    """Whether an argument is a list with an entry per row, which may be the caller's for all rows."""
    lists = (value for value in model_kwargs.values() if isinstance(value, list | tuple))
    return any(len(value) == n_rows for value in lists)


def has_own_hooks(model: Any) -> bool:
    """Whether a hook is of no library that is known: it may count forwards, say."""
    return not all(map(is_of, _hooks(model)))


def _hooks(model: Any) -> Iterator[Any]:
    yield from tuple(torch_module._global_forward_pre_hooks.values())
    yield from tuple(torch_module._global_forward_hooks.values())
    for module in families.modules_of(model):
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if (hook := vars(module).get("_hf_hook")) is not None:  # accelerate's
            yield from (hook, *getattr(hook, "hooks", ()))


def _is_known(function: Any, libraries: tuple[str, ...] = LIBRARIES_OF_LAYERS) -> bool:
    """Whether a function or hook is declared to look at each row by itself, or is of ``libraries``."""
    if (declared := getattr(function, "is_row_wise", None)) is not None:
        return bool(declared)
    return is_of(function, libraries)


def is_of(function: Any, libraries: tuple[str, ...] = LIBRARIES) -> bool:
    """Whether a function or hook, and what it wraps, is of ``libraries``."""
    while function is not None:
        inner = getattr(function, "func", function)  # of a partial
        inner = getattr(inner, "__func__", inner)
        module = getattr(inner, "__globals__", {}).get("__name__") or getattr(
            inner, "__module__", ""
        )
        package = str(module).partition(".")[0]
        if package not in libraries and package not in sys.stdlib_module_names:  # contextlib's, …
            return False
        function = getattr(function, "__wrapped__", None) or getattr(inner, "__wrapped__", None)
    return True


def is_replaced(name: str, cls: type = UpstreamMixin) -> bool:
    """Whether the method ``name`` of ``cls``, by default of transformers' mixin, is of no library."""
    return not is_of(getattr(cls, name, None))


def module_tensors(model: Any) -> ModuleTensors:
    """The tensors that modules hold as plain attributes, and how often each was written to."""
    return {
        (id(module), name, id(value), n_writes(value)): value
        for module in families.modules_of(model)
        for name, value in tuple(vars(module).items())
        if isinstance(value, torch.Tensor)
    }


def have_changed(model: Any, before: ModuleTensors) -> bool:
    """Whether a module got another tensor since ``module_tensors``, or one was written to."""
    return not module_tensors(model).keys() <= before.keys()


#: Devices that have generators of their own, and copy to the host while they compute.
ASYNCHRONOUS = ("cuda", "mps", "xpu")


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators that a forward on ``device`` may draw from."""
    if device.type not in ASYNCHRONOUS:
        return [torch.get_rng_state()]
    index = () if device.type == "mps" else (device,)  # MPS has one device
    return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state(*index)]


class Draws(TorchDispatchMode):
    """Notes whether an operation of this thread draws; other threads have the same generators."""

    supports_higher_order_operators, has_drawn = True, False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        self.has_drawn |= may_draw and "attention" not in str(op)  # which draws in training alone
        return op(*args, **kwargs or {})


def set_generator_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Set what ``generator_states`` has returned."""
    torch.set_rng_state(states[0])
    if len(states) == 2:
        index = () if device.type == "mps" else (device,)
        torch.get_device_module(device).set_rng_state(states[1], *index)
