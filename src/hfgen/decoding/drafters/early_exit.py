"""Drafts by the first layers of the model itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from ...running.ranks import RankError
from ...running.row_states import has_own_hooks
from ...running.views import view_of, without_own_hooks
from ...state.call import ModelKwargs
from ...state.run import Run
from .assistant import Assistant
from .base import Setup
from .checks import decoder_layers


class EarlyExit(Assistant):
    """Drafts with the first ``n_layers`` layers of the model itself (``assistant_early_exit``)."""

    def __init__(self, setup: Setup, n_layers: int) -> None:
        super().__init__(setup, first_layers(setup.run.model, n_layers))
        self.n_layers = n_layers

    def prepare(self, ids: torch.Tensor) -> Run:
        with self.explained():
            return super().prepare(ids)

    def encoded(
        self, kwargs: ModelKwargs, config: GenerationConfig, ids: torch.Tensor
    ) -> ModelKwargs:
        """``kwargs`` with what the encoder makes of its input, or has made: ranks run it once, together."""
        if self.process_group is None:
            return super().encoded(kwargs, config, ids)
        # Some decoders write to what they are given: Moonshine's.
        outputs = copy.deepcopy(self.setup.run.model_kwargs["encoder_outputs"])
        return kwargs | {"encoder_outputs": outputs}

    def next_logits(self, run: Run) -> torch.Tensor:
        with self.explained():
            return super().next_logits(run)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within, an error says that the first layers alone may be its cause."""
        try:
            yield
        except RankError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot decode with its first {self.n_layers} layers "
                f"alone (`assistant_early_exit`): {error}"
            ) from error


def first_layers(model: Any, n_layers: int) -> Any:
    """A view of ``model`` whose decoder has ``n_layers`` layers; the model itself is not touched.

    The modules from the model down to the list of layers and their configs are copied, all else shared. Hooks
    of no library that is known are left out.
    """
    if has_own_hooks(model):  # which would see drafts of a cache that is not the model's
        model = without_own_hooks(model)
    decoder, owner, name = decoder_layers(model)
    path = next(path for path, module in model.named_modules() if module is owner)
    configs: dict = {}  # of `deepcopy`: modules that share a config share its copy
    parent = view = _view(model, configs)
    for child in path.split(".") if path else ():
        parent._modules[child] = parent = _view(parent._modules[child], configs)
    parent._modules[name] = parent._modules[name][:n_layers]
    # Some models run as many layers as their config says, the others all that they have.
    config: Any = copy.deepcopy(decoder.config, configs)
    config.num_hidden_layers = n_layers
    return view


def _view(module: Any, configs: dict) -> Any:
    """``view_of`` with a config of its own."""
    view = view_of(module)
    if hasattr(module, "config"):
        view.config = config = copy.deepcopy(module.config, configs)
        config.output_hidden_states = config.output_attentions = False
        # Hooks that record outputs would be set on the shared layers a second time by the model.
        view._output_capturing_hooks_installed = True
    return view
