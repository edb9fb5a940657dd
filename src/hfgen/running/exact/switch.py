"""``hfgen.exact``: prepares a model so that a row has the same bits, whatever is computed beside it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ... import families
from ..optimization import choice
from ..optimization.forward import PackedForward
from ..optimization.kernels import DTYPES
from ..prefix.eligibility import is_length_dependent
from ..row_states import foreign_code, foreign_hook
from . import layers, trial
from .attention import NAME
from .followed import with_followed_calls
from .trial import Operation

T = TypeVar("T", bound=nn.Module)

#: Functions that are set as the forwards of modules, besides ``TiledForward``.
FORWARDS = (layers.with_exact_calls, with_followed_calls, layers.with_recurrence)
#: Attributes of configs while a model is exact. Masks read the first one also where models compute attention themselves.
IMPLEMENTATIONS = {
    "_attn_implementation_internal": NAME,
    "_experts_implementation_internal": "eager",
}
NOT_ROW_WISE = (
    "exact: {} is not known to compute each row by itself. If it does, give it an attribute "
    "`is_row_wise = True`."
)


class InexactError(ValueError):
    """An operation of a model is not exact on this machine; ``operations`` are all that were tried."""

    def __init__(self, message: str, operations: tuple[Operation, ...] = ()) -> None:
        super().__init__(message)
        self.operations = operations


@dataclass(frozen=True)
class Report:
    """``model.exactness``: what was tried. ``str()`` is a line for each kind of operation.

    ``former``: the ``IMPLEMENTATIONS`` of the configs of the model and its parts before, for ``undo``.
    ``modules``: the names of all modules, since one that is added, as an adapter does, would not be exact.
    ``n_threads``: of torch, for which it was tried.
    """

    operations: tuple[Operation, ...]
    former: tuple[tuple[Any, dict[str, Any]], ...] = field(repr=False)
    modules: frozenset[str] = field(repr=False)
    n_threads: int = field(default_factory=torch.get_num_threads)

    def __str__(self) -> str:
        return "\n".join(f"{o.name} {o.shape} {o.dtype}: exact" for o in self.operations)

    def check(self, model: nn.Module) -> None:
        """Raise ``ValueError`` if ``model`` has been changed since, so that a call would not be exact."""
        layers.check_dropout(model)
        for name, module in model.named_modules():
            is_plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
            if is_plain or name not in self.modules:
                raise _changed(f"{name!r} has been added since")
            if module._compiled_call_impl is not None:
                raise _changed(f"{name!r} has been compiled since")
            # Trainers set one on the model: it calls the one of before.
            forward = None if module is model else vars(module).get("forward")
            if forward is not None and not _is_ours(forward):
                raise _changed(f"{name!r} got another forward since")
        if (hook := foreign_hook(model)) is not None:
            raise ValueError(NOT_ROW_WISE.format(hook))
        if (n := torch.get_num_threads()) > self.n_threads:  # they cut tensors elsewhere
            raise _changed(f"torch has {n} threads now, the model was tried with {self.n_threads}")
        for config, _ in self.former:
            if (name := getattr(config, "_attn_implementation", None)) != NAME:
                raise _changed(f"attention has been set to {name!r}")


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, layers.TiledForward) or getattr(forward, "func", None) in FORWARDS


def _changed(what: str) -> ValueError:
    return ValueError(f"exact: {what}. Call hfgen.restore(model), and prepare it again.")


def exact(model: T) -> T:
    """Prepare ``model`` in place for exact rows, and return it.

    From now on every number of a row, logits, log-probabilities and tokens, depends on the row's prompt,
    parameters and seed, and on this machine's kernels: not on the other rows, padding, order, caches, drafts, or
    how many tokens a forward has. ``hfgen.token_logprobs`` gives the same bits with gradients. Tokens may differ
    from those before by rounding. ``hfgen.restore(model)`` undoes it, and so does the end of
    ``with hfgen.exact(model):``, for models that generate with hfgen. ``model.exactness`` is a report.

    Raises:
        TypeError: ``model`` is no transformers model.
        ValueError: The model cannot be exact: it is spread over devices, of another dtype, quantised, training
            with dropout, has hooks or layers that are not known to be row-wise, computes attention by itself, or
            an operation of it fails the probe on this machine. The message names it; the model stays as it was.
    """
    _check(model)
    configs: dict[int, Any] = {}  # of the model and of its parts
    pending = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    former = tuple(
        (config, {name: getattr(config, name, None) for name in IMPLEMENTATIONS})
        for config in configs.values()
    )
    vars(model)["exactness"] = Report((), former, frozenset())
    try:
        expected = trial.logits_alone(model)
        for config, _ in former:
            vars(config).update(IMPLEMENTATIONS)
        with torch.no_grad():
            shapes = _set_forwards(model)
            operations = _probed(model, shapes)
            if trial.drops_positions(model):
                raise ValueError(
                    f"exact: {type(model).__name__} counts positions by columns in generate(), padding included."
                )
        forwards = (vars(module).get("forward") for module in model.modules())
        is_followed = any(getattr(f, "func", None) is with_followed_calls for f in forwards)
        if is_followed and not trial.differs_by_rounding(model, expected):
            raise ValueError(
                f"exact: {type(model).__name__} computes attention in a way that is not understood: its logits would be "
                "others, not by rounding alone."
            )
        # BigBird's first forward adds some.
        modules = frozenset(name for name, _ in model.named_modules())
        vars(model)["exactness"] = Report(operations, former, modules)
    except BaseException as error:
        undo(model)
        is_refusal = isinstance(error, ValueError) and str(error).startswith("exact: ")
        if is_refusal or not isinstance(error, Exception):
            raise
        raise ValueError(  # a forward does not take what others do
            f"exact: {type(model).__name__} could not be tried on rows of random tokens: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model


def is_exact(model: Any) -> bool:
    """Whether ``model`` is prepared by ``exact``."""
    return isinstance(getattr(model, "exactness", None), Report)


def restore(model: T) -> T:
    """Undo ``exact`` and ``optimize``, and return the model, which is then as it was before.

    Raises ``TypeError`` for what is no model, and ``ValueError`` if there is nothing to undo.
    """
    if not is_exact(model):
        return choice.restore(model)
    undo(model)
    return choice.restore(model) if choice.is_optimized(model) else model


def undo(model: nn.Module) -> None:
    """Undo ``exact``: the model is as it was before, kernels of ``hfgen.optimize`` included."""
    owner = next(part for part in model.modules() if "exactness" in vars(part))  # in a wrapper
    report: Report = vars(owner).pop("exactness")
    for config, implementations in report.former:
        vars(config).update(implementations)
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, layers.TiledForward) and forward.packed is not None:
            vars(module)["forward"] = forward.packed
        elif _is_ours(forward):
            del vars(module)["forward"]


def _check(model: Any) -> None:
    """Raise for a model that cannot be exact, before anything is changed."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"exact() takes a transformers model, but got {type(model).__name__}.")
    if is_exact(model):
        raise ValueError("exact: this model is exact already; hfgen.restore(model) undoes it.")
    devices: dict[str, str] = {}
    dtypes: dict[torch.dtype, str] = {}
    for name, weight in model.named_parameters():
        devices.setdefault(str(weight.device), name)
        dtypes.setdefault(weight.dtype, name)
        if isinstance(weight, DTensor):
            raise ValueError(
                f"exact: {name!r} is a part of a weight. Make the model exact before fully_shard; tensor parallel "
                "layers add the sums of processes in an order that is not fixed, so they cannot be exact."
            )
        if type(weight) is not nn.Parameter:
            raise ValueError(
                f"exact: {name!r} is quantised ({type(weight).__name__}). Load plain weights; for fewer bits, use "
                "hfgen.optimize(model, weights='int8')."
            )
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"exact: the model is on several devices ({places}). Load it on one.")
    if wrong := devices.keys() - {"cpu"}:
        raise ValueError(
            f"exact: kernels are probed on CPUs so far, but the model is on {wrong.pop()}."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("exact: the model is quantised. Load it with plain weights.")
    for dtype, name in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(
                f"exact: {name!r} is {dtype}; allowed are {', '.join(map(str, DTYPES))}."
            )
    if torch.is_autocast_enabled("cpu"):
        raise ValueError("exact: autocast changes dtypes between kernels. Leave torch.autocast.")
    layers.check_dropout(model)
    if families.keeps_other_state(model):
        raise ValueError(
            f"exact: {type(model).__name__} keeps positions or states of its rows besides the cache, in which "
            "padding counts."
        )
    if is_length_dependent(model, sys.maxsize):
        raise ValueError("exact: rotary positions of all rows change once one of them is long.")
    for name, module in model.named_modules():
        forward = next((vars(module)[p] for p in choice.PLACES if p in vars(module)), None)
        forward = forward or module._compiled_call_impl
        if forward is not None and not isinstance(forward, PackedForward):
            raise ValueError(
                f"exact: {name!r} has a forward that was set on it ({type(forward).__name__}), as compile and "
                "device maps do. Prepare the model without."
            )
    if (code := foreign_code(model)) is not None:
        raise ValueError(NOT_ROW_WISE.format(code))


def _set_forwards(model: nn.Module) -> set[tuple[int, int, int]]:
    """Let linear layers, what calls products by itself, and chunked scans compute in tiles; return ``Recorder.shapes``."""
    for module in filter(layers.scans, model.modules()):
        layers.set_forward(module, layers.with_recurrence)
    recorder = layers.Recorder()
    try:
        with recorder.following():
            trial.run_model(model)
    except Exception as error:  # a model with a scan does not take all ways
        for module, function in (recorder.refused | recorder.attending).items():
            raise layers.refusal(module, function) from error
        raise
    for module, function in recorder.refused.items():
        raise layers.refusal(module, function)
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, PackedForward) or type(module).forward is nn.Linear.forward:
            vars(module)["forward"] = layers.TiledForward(module, forward)
        elif forward is None and module in recorder.attending:
            layers.set_forward(module, with_followed_calls)
        elif forward is None and module in recorder.callers:
            layers.set_forward(module, layers.with_exact_calls)
    return recorder.shapes


def _probed(model: Any, shapes: set[tuple[int, int, int]]) -> tuple[Operation, ...]:
    """Probe each kind of operation, then the model; raise ``InexactError`` for what is not exact."""
    context = model.dtype, torch.get_num_threads()
    operations = (
        *trial.of_layers(model),
        *(trial.of_attention(*shape, *context) for shape in sorted(shapes)),
    )
    for operation in operations:
        if operation.differs is not None:
            raise InexactError(
                f"exact: {operation.name} of {operation.shape} in {operation.dtype} is not exact on this machine "
                f"({operation.differs}). Another dtype, number of threads or kernel (hfgen.optimize) may be.",
                operations,
            )
    if (difference := trial.try_model(model)) is not None:
        raise InexactError(f"exact: {type(model).__name__} is not exact {difference}.", operations)
    return operations
