"""Interventions: what modules return is changed while a call decodes, for some rows and tokens.

``generate(…, interventions=[hfgen.Steer("model.layers.12", vector)])``. Hooks stand on the modules while a step
of the call runs, and are gone between steps: other calls, and requests beside it, are not changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..families import CACHE
from ..memory.caches.layers import decoder_cache
from ..state import hooks
from ..state.call import Call
from ..state.run import Run

#: Which tokens an intervention changes, beside a list of positions.
TOKENS = ("all", "prompt", "generated")


@dataclass(frozen=True, slots=True)
class Where:
    """What the rows and columns of a hidden state ``(rows, n, width)`` are."""

    prompts: Tensor  # ``(rows,)``: the prompt, from 0, that each row continues
    #: ``(rows, n)``: positions in the row's text, padding not counted; below 0 for padding.
    positions: Tensor
    is_generated: Tensor  # ``(n,)`` bools: whether the tokens were generated


class Edit:
    """Changes what a module returns: ``function(hidden, where) -> hidden``.

    Args:
        module: The name of a module in ``model.named_modules()``, a pattern such as
            ``"model.layers.*.mlp"``, or either with ``":in"`` behind it, for what the module is called with.
        function: Gets ``hidden (rows, n, width)``, which it must not write to, and a ``Where``; returns a tensor
            of the same shape and dtype. What it returns for other rows and tokens than these is not used.
        rows: Prompts, from 0, whose rows are changed; ``None`` for all.
        tokens: ``"all"``, ``"prompt"``, ``"generated"``, or positions in a row's text. A token that is changed
            influences those after it.

    Raises:
        TypeError, ValueError: an argument is of another kind, or out of range.
    """

    def __init__(
        self,
        module: str,
        function: Callable[[Tensor, Where], Tensor],
        *,
        rows: Sequence[int] | None = None,
        tokens: str | Sequence[int] = "all",
    ) -> None:
        if not isinstance(module, str):
            raise TypeError(f"`module` has to be the name of a module, but is {module!r:.80}.")
        if not callable(function):
            raise TypeError(f"`function` has to be callable, but is {function!r:.80}.")
        if isinstance(tokens, str) and tokens not in TOKENS:
            raise ValueError(f"`tokens` has to be one of {TOKENS} or positions, not {tokens!r}.")
        self.module, self.function = module, function
        self.rows = None if rows is None else _integers("rows", rows)
        self.tokens = tokens if isinstance(tokens, str) else _integers("tokens", tokens)

    def check_rows(self, n_prompts: int) -> None:
        """Raise ``ValueError`` for rows that do not exist."""
        if self.rows is not None and max(self.rows) >= n_prompts:
            raise ValueError(
                f"`rows` of an intervention are {self.rows}, but there are {n_prompts}."
            )

    def __call__(self, hidden: Tensor, where: Where) -> Tensor:
        """``hidden`` with the rows and tokens changed that the edit is for."""
        mask = torch.ones_like(where.positions, dtype=torch.bool)
        if self.tokens in ("prompt", "generated"):
            mask &= where.is_generated == (self.tokens == "generated")
        elif not isinstance(self.tokens, str):
            mask &= torch.isin(where.positions, where.positions.new_tensor(self.tokens))
        if self.rows is not None:
            mask &= torch.isin(where.prompts, where.prompts.new_tensor(self.rows))[:, None]
        if not mask.any():
            return hidden
        edited = self.function(hidden, where)
        if not isinstance(edited, Tensor) or edited.shape != hidden.shape:
            shape = getattr(edited, "shape", type(edited).__name__)
            raise ValueError(
                f"The intervention in {self.module!r} has to return a tensor of the shape "
                f"{tuple(hidden.shape)}, but returned {shape}."
            )
        mask = mask.view(*mask.shape, *(1,) * (hidden.ndim - 2)).to(hidden.device)
        return torch.where(mask, edited.to(hidden.dtype), hidden)


class Steer(Edit):
    """Adds ``scale * vector (width,)`` to what a module returns (activation addition, arXiv 2308.10248)."""

    def __init__(self, module: str, vector: Tensor, scale: float = 1.0, **where: Any) -> None:
        vector = scale * _vector("vector", vector)
        super().__init__(module, lambda hidden, _: hidden + _like(vector, hidden, module), **where)


class Ablate(Edit):
    """Removes the ``direction (width,)`` from what a module returns (arXiv 2406.11717); without one, all of it."""

    def __init__(self, module: str, direction: Tensor | None = None, **where: Any) -> None:
        unit = None if direction is None else _vector("direction", direction)
        if unit is not None and not unit.any():
            raise ValueError("`direction` is zero: there is nothing to remove.")
        unit = None if unit is None else unit / unit.norm()

        def ablate(hidden: Tensor, _: Where) -> Tensor:
            if unit is None:
                return torch.zeros_like(hidden)
            along = _like(unit, hidden, module)
            return hidden - (hidden @ along)[..., None] * along

        super().__init__(module, ablate, **where)


class Patch(Edit):
    """Replaces what a module returns at ``tokens``, positions, by ``values (len(tokens), width)``.

    The values are rows of ``output.activations[module][row]`` of another call (activation patching, arXiv
    2202.05262).
    """

    def __init__(
        self, module: str, values: Tensor, tokens: Sequence[int], rows: Sequence[int] | None = None
    ) -> None:
        positions = _integers("tokens", tokens)
        if not isinstance(values, Tensor) or values.ndim != 2 or len(values) != len(positions):
            shape = tuple(getattr(values, "shape", ()))
            raise ValueError(
                f"`values` have to be a tensor ({len(positions)}, width), one row for each of `tokens`, but "
                f"have the shape {shape}."
            )

        def patch(hidden: Tensor, where: Where) -> Tensor:
            patched = hidden.clone()
            for position, value in zip(positions, values, strict=True):
                patched[where.positions == position] = _like(value, hidden, module)
            return patched

        super().__init__(module, patch, rows=rows, tokens=positions)


def _integers(name: str, values: Any) -> list[int]:
    numbers = list(values) if isinstance(values, Iterable) else None
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError(f"`{name}` has to hold integers from 0 on, but is {values!r:.80}.")
    return numbers


def _vector(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 1 or not value.is_floating_point():
        raise TypeError(f"`{name}` has to be a tensor of numbers (width,), but is {value!r:.80}.")
    if not value.isfinite().all():
        raise ValueError(f"`{name}` has entries that are NaN or infinite.")
    return value.detach()


def _like(vector: Tensor, hidden: Tensor, module: str) -> Tensor:
    if len(vector) != hidden.shape[-1]:
        raise ValueError(
            f"{module!r} returns {hidden.shape[-1]} numbers a token, not {len(vector)}."
        )
    return vector.to(hidden)


# ---------------------------------------------------------------- in a call


def modules_named(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules whose name fits, by name. Raises ``ValueError`` if there are none."""
    name = pattern.removesuffix(":in")
    modules = dict(model.named_modules())
    found = {each: module for each, module in modules.items() if each and fnmatchcase(each, name)}
    if not found:
        nearest = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
        raise ValueError(
            f"{type(model).__name__} has no module {name!r}. "
            f"Nearest: {', '.join(nearest) or 'none'}; model.named_modules() has all."
        )
    return found


#: Fields that interventions do not go with, and why.
REFUSED = {
    "use_cuda_graph": "a recorded graph runs no hooks",
    "compile_config": "a compiled forward runs no hooks",
    "guidance_scale": "its second branch has other rows",
    "drop_finished": "rows that leave change the numbers of others",
}


def of_call(model: Any, call: Call) -> Interventions | None:
    """The interventions of a call. Raises ``TypeError`` or ``ValueError`` for those that it cannot apply."""
    edits = call.request.kwargs.get("interventions")
    if not edits and (edits is None or isinstance(edits, list | tuple)):
        return None
    if not isinstance(edits, list | tuple) or not all(isinstance(edit, Edit) for edit in edits):
        raise TypeError(
            "`interventions` has to be a list of hfgen.Steer, Ablate, Patch or Edit, but is "
            f"{edits!r:.80}."
        )
    assert call.prompt is not None
    n_prompts = call.prompt.batch_size
    placed = [(edit, list(modules_named(model, edit.module).values())) for edit in edits]
    for edit in edits:
        edit.check_rows(n_prompts)
    if call.strategy is None:
        raise ValueError(f"`interventions` need hfgen's loop, and {call.who} decodes by itself.")
    for name, reason in REFUSED.items():
        value = getattr(call.config, name, None)
        if value not in (None, False) and (name, value) != ("guidance_scale", 1):
            raise ValueError(f"`interventions` do not go with `{name}` (={value!r:.40}): {reason}.")
    return Interventions(placed, n_prompts)


class Interventions:
    """The interventions of one call: hooks that are on the model while a step runs."""

    def __init__(self, placed: list[tuple[Edit, list[nn.Module]]], n_prompts: int) -> None:
        self.placed, self.n_prompts = placed, n_prompts
        self.unused = {edit for edit, _ in placed}  # their modules were not called as yet
        self.where: Where | None = None  # of the forward that is running

    def during(self, run: Run, steps: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield what ``steps`` yields, with the hooks on the model only while it decodes."""
        mask = run.mask
        if mask is None or mask.ndim != 2:  # one of ones was dropped
            length = getattr(run.config, "_mask_length", run.ids.shape[1])
            mask = run.ids.new_ones(len(run.ids), length)
        padding = (mask[:: len(mask) // self.n_prompts].cumsum(dim=1) == 0).sum(dim=1)
        n_without_ids = mask.shape[1] - run.ids.shape[1]  # embeddings, or what a cache holds
        prompt_length = run.prompts.shape[1] + n_without_ids

        def n_columns() -> int:
            return run.ids.shape[1] + n_without_ids

        try:
            while True:
                with self.on(run.model, padding, prompt_length, n_columns):
                    try:
                        step = next(steps)
                    except StopIteration:
                        return
                self.check_used()
                yield step
        finally:
            steps.close()  # type: ignore[attr-defined]

    def check_used(self) -> None:
        """Raise ``ValueError`` if a forward did not call a module."""
        if unused := [edit.module for edit in self.unused]:
            raise ValueError(
                f"The modules {unused} of `interventions` are not called when tokens are decoded: an "
                "encoder's are called before, those of compiled layers not at all."
            )

    @contextmanager
    def on(
        self,
        model: Any,
        padding: Tensor,
        prompt_length: int,
        n_columns: Callable[[], int] | None = None,
        first_prompt: int = 0,
    ) -> Iterator[None]:
        """Put the hooks on ``model``, whose rows continue the prompts from ``first_prompt`` on.

        ``padding (prompts,)``: columns before each of them. ``n_columns``: returns how many there are up to those
        that are forwarded; only caches without columns need it.
        """

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Note what the rows and columns of the forward are, by its arguments."""
            names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
            passed = [*(kwargs[n] for n in names if kwargs.get(n) is not None), *args[:1]]
            (n_rows, n), device = passed[0].shape[:2], passed[0].device
            cache, past = decoder_cache(kwargs.get(CACHE)), 0
            if any(hasattr(layer, "keys") for layer in getattr(cache, "layers", ())):
                past = int(cache.get_seq_length())
            elif n_columns is not None:  # recurrent states, or no cache
                past = max(n_columns() - n, 0)
            columns = past + torch.arange(n, device=device)
            prompts = torch.arange(n_rows, device=device) // max(n_rows // len(padding), 1)
            positions = columns - padding.to(device)[prompts][:, None]
            self.where = Where(prompts + first_prompt, positions, columns >= prompt_length)

        with ExitStack() as stack:
            hooks.add(stack, model.register_forward_pre_hook, before, with_kwargs=True)
            for edit, modules in self.placed:
                for module in modules:
                    hook(stack, module, edit.module, partial(self._apply, edit))
            yield

    def _apply(self, edit: Edit, hidden: Tensor) -> Tensor:
        self.unused.discard(edit)
        assert self.where is not None
        expected = self.where.positions.shape
        if hidden.ndim < 3 or hidden.shape[:2] != expected:
            raise ValueError(
                f"{edit.module!r} has a tensor {tuple(hidden.shape)}, but interventions need (rows, tokens, "
                f"width), with rows and tokens = {tuple(expected)}."
            )
        return edit(hidden, self.where)


def hook(stack: ExitStack, module: nn.Module, name: str, change: Any) -> None:
    """Let ``change`` the first tensor that a module returns, or is called with, in this thread within ``stack``."""
    if not name.endswith(":in"):

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            if isinstance(output, Tensor):
                return change(output)
            first = next(iter(output))  # a ModelOutput
            output[first] = change(output[first])
            return output

        hooks.add(stack, module.register_forward_hook, after)
        return

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {first: change(kwargs[first])}

    hooks.add(stack, module.register_forward_pre_hook, before, with_kwargs=True)
