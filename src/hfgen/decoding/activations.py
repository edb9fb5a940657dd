"""``record=``: what modules return for the finished text of each row, by one clean forward pass of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..families import CACHE
from ..memory.batch import take_rows
from ..running.executor import call as forward
from ..running.interventions import hook, modules_named
from ..settings.logs import logger
from ..state.call import Call
from ..state.run import Observer, Run, Strategy
from .outputs import endings

#: Arguments of forward that a text alone has.
OF_TEXT = (
    *("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"),
    *("encoder_outputs", "decoder_attention_mask", "decoder_position_ids", "mm_encoder_outputs"),
)


class Record:
    """What ``record=`` asks for; a list of names is short for ``Record(names)``.

    ``output.activations[name][row]`` is a tensor ``(tokens, width)`` for the prompt and the generated
    tokens of a returned row, without padding, in the model's dtype. ``modules``: names or patterns, as of
    ``hfgen.Edit``; raises ``TypeError`` for others. ``folder``: where a file ``ROW.safetensors`` is written
    for each row instead. ``max_bytes``: what the tensors may take, by an estimate before the call.
    """

    def __init__(
        self,
        modules: str | Sequence[str],
        folder: str | os.PathLike[str] | None = None,
        max_bytes: int = 2**30,
    ) -> None:
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        if not self.modules or not all(isinstance(name, str) for name in self.modules):
            raise TypeError(f"`record` has to hold names of modules, but is {modules!r:.80}.")
        self.folder = None if folder is None else Path(folder)
        self.max_bytes = max_bytes


def of_call(model: Any, call: Call) -> Record | None:
    """What a call records. Raises ``TypeError`` or ``ValueError`` if that cannot be recorded."""
    if (asked := call.request.kwargs.get("record")) is None:
        return None
    record = asked if isinstance(asked, Record) else Record(asked)
    names = [name for pattern in record.modules for name in modules_named(model, pattern)]
    config: Any = call.config
    prompt: Any = call.prompt
    if not config.return_dict_in_generate:
        raise ValueError("`record` puts tensors on the output: set `return_dict_in_generate=True`.")
    if call.strategy is None:
        raise ValueError(f"`record` needs hfgen's loop, and {call.who} decodes by itself.")
    if record.folder is not None and not record.folder.is_dir():
        raise ValueError(f"`record`: the folder {str(record.folder)!r} does not exist.")
    others = {n: v for n, v in prompt.model_kwargs.items() if n not in OF_TEXT}
    if media := sorted(n for n, v in others.items() if not (v is None or isinstance(v, bool))):
        raise ValueError(f"`record` forwards the finished text alone, but the prompt has {media}.")
    mask = prompt.model_kwargs.get("attention_mask")
    length = getattr(config, "_mask_length", None) if mask is None else mask.shape[-1]
    if length not in (None, prompt.ids.shape[1]) and not model.config.is_encoder_decoder:
        raise ValueError(
            f"`record` forwards the finished text alone, but `{CACHE}` holds tokens that `input_ids` "
            f"({prompt.ids.shape[1]} of {length}) lack: pass them all."
        )
    n_rows = prompt.batch_size * (config.num_return_sequences or 1)
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", 1)
    n_bytes = len(names) * n_rows * config.max_length * width * model.dtype.itemsize
    if record.folder is None and n_bytes > record.max_bytes:
        raise ValueError(
            f"`record`: {len(names)} modules of {n_rows} rows of up to {config.max_length} tokens take about {n_bytes:,} "
            f"bytes, more than `max_bytes`={record.max_bytes:,}. Record fewer, or give hfgen.Record a folder."
        )
    return record


class Recorder(Observer):
    """Forwards the finished text of each returned row once, and sets ``output.activations``."""

    def __init__(self, run: Run, record: Record) -> None:
        self.record = record

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Any]) -> None:
        sequences, found = result["sequences"], dict[str, list[Tensor]]()
        for row, ending in enumerate(endings(run, result)):
            self.keep(row, self.of_row(run, sequences, row, len(ending.ids)), found)
        run.extras["activations"] = found

    def keep(self, row: int, of_row: dict[str, Tensor], found: dict[str, list[Tensor]]) -> None:
        """Write the activations ``of_row`` to its file, or append them to those ``found``."""
        if self.record.folder is not None:
            save_file(of_row, self.record.folder / f"{row}.safetensors")
            return
        for name, tensor in of_row.items():
            found.setdefault(name, []).append(tensor)

    def of_row(self, run: Run, sequences: Tensor, row: int, n_new: int) -> dict[str, Tensor]:
        """``(tokens, width)`` of each module for one row that has ``n_new`` generated tokens."""
        model, n, (n_prompts, prompt_length) = run.model, len(sequences), run.prompts.shape
        call: Any = run.call
        kwargs, prompt_row = call.prompt.model_kwargs, row * n_prompts // n
        prefix = "decoder_" if run.is_encoder_decoder else ""
        sequence, mask = sequences[row : row + 1], kwargs.get(prefix + "attention_mask")
        prompt = sequence[:, :prompt_length]
        if mask is not None and mask.shape == run.prompts.shape:
            prompt = prompt[:, mask[prompt_row] != 0]
        ids = torch.cat([prompt, sequence[:, prompt_length : prompt_length + n_new]], dim=1)
        inputs: dict[str, Any] = {
            prefix + "input_ids": ids,
            prefix + "attention_mask": torch.ones_like(ids),
        }
        for name in ("encoder_outputs", "attention_mask") if run.is_encoder_decoder else ():
            index = torch.tensor([prompt_row])
            inputs[name] = take_rows(kwargs.get(name), index, n_prompts, name)
        modules: dict[str, Any] = {}
        for pattern in self.record.modules:
            suffix = ":in" if pattern.endswith(":in") else ""
            modules |= {n + suffix: module for n, module in modules_named(model, pattern).items()}
        if model._supports_logits_to_keep() and not any("lm_head" in name for name in modules):
            inputs["logits_to_keep"] = 1
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            if (interventions := call.interventions) is not None:
                number, no_padding = row * call.prompt.batch_size // n, ids.new_zeros(1)
                hooks = interventions.on(model, no_padding, prompt.shape[1], first_prompt=number)
                stack.enter_context(hooks)
            for name, module in modules.items():

                def keep(hidden: Tensor, name: str = name) -> Tensor:
                    if hidden.shape[:2] != ids.shape:
                        raise ValueError(
                            f"`record`: {name!r} has the shape {tuple(hidden.shape)}, and not (rows, tokens, …) "
                            f"= {tuple(ids.shape)}."
                        )
                    found[name] = hidden[0].detach().clone()
                    return hidden

                hook(stack, module, name, keep)
            forward(model, **inputs, use_cache=False)
        if missing := ", ".join(sorted(modules.keys() - found.keys())):
            logger.warning_once(f"`record`: {missing} were not called in a forward of the text.")
        return found
