"""Drafts by a smaller model, or by the first layers of the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList

from ... import families
from ... import running as execution
from ...families import CACHE
from ...logits.processors.lists import for_drafts, is_row_wise
from ...memory.caches.layers import record_past, roll_back
from ...running import ranks
from ...running.row_states import has_own_hooks
from ...running.views import view_of, without_own_hooks
from ...settings.fields import OWN_FIELDS
from ...state import survivors
from ...state.call import ModelKwargs, Request
from ...state.run import Run
from ..loop import commit
from .base import Draft, DraftContext, Drafter, Setup
from .schedule import relative_cost

DEFAULT_THRESHOLD = 0.4  # of a draft's tokens, where no config says; upstream's default
#: Fields of the call that an assistant decodes without.
OF_TARGET = (
    "max_length min_length min_new_tokens max_time stop_strings guidance_scale "
    "prompt_lookup_num_tokens assistant_early_exit assistant_confidence_threshold "
    "output_attentions output_hidden_states token_healing"
).split()
#: Arguments of the target's forward that an assistant has of its own, or decodes without.
NOT_SHARED = {
    *(CACHE, "encoder_outputs", "inputs_embeds", "use_cache"),
    *("output_attentions", "output_hidden_states"),
}


class Assistant(Drafter):
    """Decodes with the assistant, on a cache of its own that keeps what was accepted.

    Rows step together, known tokens too. A draft ends at an EOS, or after a token below the confidence threshold.
    """

    def __init__(self, setup: Setup, model: Any = None) -> None:
        self.setup = setup
        model = setup.assistant_model if model is None else model
        # An adapter's layers are in the model that PEFT has wrapped.
        model = getattr(model, "get_base_model", lambda: model)()
        self.model = setup.run.model._mixed_view(model)
        threshold = setup.of_assistant("assistant_confidence_threshold")
        #: The probability of a token below which a draft ends.
        self.threshold = float(DEFAULT_THRESHOLD if threshold is None else threshold)
        self.cost = relative_cost(self.model, setup.run.model)
        group, is_own = ranks.of_config(setup.run.config), setup.assistant_model is None
        is_beside = group is not None and group.forwards_beside(self.model, is_own)
        #: Other processes that take part in each forward, if parameters are sharded.
        self.process_group = group if is_beside else None
        self.run: Run | None = None  # made with the first draft, when the prompt is known
        #: EOS ids ``(n,)``, or ``(rows, n)`` where prompts have their own; -1 stands for none.
        self.eos: Tensor | None = None
        #: Positions that the assistant's cache holds, and ids that its masks are made for.
        self.cached = self.length = 0

    def draft(self, context: DraftContext) -> Draft | None:
        first = min(context.known)
        if first >= context.end:
            return None
        ids = context.ids[:, : context.end].to(families.device_of(self.model), copy=True)
        if self.run is None:
            self.run, self.length = self.prepare(ids[:, :first]), first
        self.forget(first - 1)
        return self.write(self.run, ids, first, context)

    def write(self, run: Run, ids: Tensor, first: int, context: DraftContext) -> Draft:
        """Fill ``ids (rows, end)`` from ``first`` on, as far as the assistant is confident."""
        known = torch.tensor(context.known, device=ids.device)
        is_open = known < context.end
        lengths = [context.n_tokens] * len(ids)  # as far as nothing ends a draft
        # A look at the device makes an accelerator wait, and makes draws depend on where drafts end.
        may_look = self.setup.is_exact or (ids.device.type == "cpu" and not self.setup.is_drawn)
        n_known = first - context.start
        tokens = ids[:, context.start :].clone()
        tokens[:, n_known:] = -1
        processors: Any = run.processors
        if not all(map(is_row_wise, processors)):  # what has a state is not to see drafts
            processors = copy.deepcopy(processors)
        all_scores: list[Tensor] = []
        for position in range(first, context.end):
            run.ids = ids[:, :position]
            logits = self.next_logits(run)
            scores = processors(run.ids, logits) if processors else logits
            chosen = scores.argmax(dim=-1)
            if (choice := self.setup.run.row_choice) is not None:  # the target's own noise
                chosen, _ = choice.choose(scores, position)
            elif run.config.do_sample:
                chosen = survivors.multinomial(scores).squeeze(1)
            is_known = position < known
            ids[:, position] = chosen = torch.where(is_known, ids[:, position], chosen)
            column = position - context.start
            tokens[:, column] = torch.where(is_known | is_open, chosen, -1)
            if self.setup.needs_logits:
                # Positions that a row knows have no scores of their own.
                all_scores += [] if all_scores else [torch.zeros_like(scores)] * n_known
                all_scores.append(scores)
            ends = self.ends(run, chosen, scores)
            was_open, is_open = is_open, is_open & (is_known | ~ends)
            if not may_look:
                continue
            for row in (was_open & ~is_open).nonzero().flatten().tolist():
                lengths[row] = column + 1
            if not is_open.any():
                break
        drafted = tokens[:, : position + 1 - context.start]
        stacked = torch.stack(all_scores, dim=1) if all_scores else None
        return Draft(drafted, stacked, tuple(lengths))

    def ends(self, run: Run, tokens: Tensor, scores: Tensor) -> Tensor:
        """Which rows' drafts end with ``tokens (rows,)``."""
        ends = torch.zeros_like(tokens, dtype=torch.bool)
        if self.eos is not None:
            ends = (tokens[:, None] == self.eos.to(tokens.device)).any(dim=1)
        if self.threshold > 0:
            confidence = scores.softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
            ends = ends | (confidence < self.threshold)
        return ends

    def next_logits(self, run: Run) -> Tensor:
        """Forward what the cache does not hold of ``run.ids``: logits ``(rows, vocab)``."""
        length = run.ids.shape[1]
        run.model_kwargs = execution.resized(run, length - self.length)
        if self.process_group is not None:
            self.process_group.announce()
        if self.cached == 0:
            outputs = execution.prefill(run.model, run.ids, run.config, run.model_kwargs, False)
        else:
            outputs = self.executor.forward(run, n_new=length - self.cached)
        commit(run, outputs)
        self.cached, self.length = length, length + 1
        return execution.last_logits(outputs, run.ids.device)

    def forget(self, n_valid: int) -> None:
        """Keep the first ``n_valid`` positions of the cache: what follows was not accepted."""
        if self.run is None or self.cached == 0:
            return
        n_kept = min(self.cached, n_valid)
        of_images = families.layers_of_images(self.model)
        roll_back(self.run.model_kwargs[CACHE], self.cached - n_kept, of_images)
        self.cached = n_kept

    def prepare(self, ids: Tensor) -> Run:
        """The assistant's own run on ``ids (rows, length)``."""
        target, model = self.setup.run, self.model
        config = self.config(target.config)
        config.max_new_tokens = max(self.setup.max_length - ids.shape[1], 1)
        name, model_kwargs = "input_ids", self.model_kwargs(target, ids)
        if model.config.is_encoder_decoder:
            name, model_kwargs = "decoder_input_ids", self.encoded(model_kwargs, config, ids)
        request = Request(
            inputs=model_kwargs.pop("inputs", None),
            generation_config=config,
            logits_processor=LogitsProcessorList(self.shared_processors(target)),
            kwargs={name: ids, **model_kwargs},
        )
        call = model._prepare_call(request)
        run = call.run(model)
        call.release()
        self.use_parameters_of_rows(run, target)
        cache = run.model_kwargs.get(CACHE)
        if cache is None:
            raise ValueError(
                f"`assistant_model` ({type(model).__name__}) has no cache to take drafted tokens back from."
            )
        record_past(cache)
        self.executor = execution.Executor(run, may_record=True)
        return run

    def use_parameters_of_rows(self, run: Run, target: Run) -> None:
        """Set EOS ids and processors of each row to those of its prompt, where prompts differ."""
        self.eos = run.config._eos_token_tensor
        if len(target.configs) == 1:
            return
        run.processors = LogitsProcessorList(self.shared_processors(target))
        none = run.ids.new_full((1,), -1)
        all_eos = [config._eos_token_tensor for config in target.configs]
        all_eos = [none if eos is None else eos.to(none) for eos in all_eos]
        padded = pad_sequence(all_eos, True, padding_value=-1)
        self.eos = padded.repeat_interleave(len(run.ids) // len(all_eos), dim=0)

    def shared_processors(self, target: Run) -> list[Any]:
        """The target's processors for the assistant; any with a state, or the caller's, only where drafts show."""
        shows = self.setup.is_exact or self.setup.is_streamed_row
        return for_drafts(p for p in target.processors if shows or is_row_wise(p))

    def config(self, target: GenerationConfig) -> GenerationConfig:
        """The call's config, without what is for the target alone."""
        config = copy.deepcopy(target)
        graph = getattr(target, "use_cuda_graph", False)  # hfgen's processors come from the target
        vars(config).update(dict.fromkeys(OF_TARGET) | OWN_FIELDS | {"use_cuda_graph": graph})
        # Chunks of a decoder's prompt are not worth it, and others would forward one of them.
        if self.model.config.is_encoder_decoder or self.process_group is not None:
            config.prefill_chunk_size = None
        config.num_return_sequences = 1  # the rows are expanded already
        if isinstance(starts := config.decoder_start_token_id, list):
            n = len(self.setup.run.ids) // len(starts)
            config.decoder_start_token_id = [start for start in starts for _ in range(n)]
        config.is_assistant, config.use_cache, config.use_mtp = True, True, False
        return config

    def model_kwargs(self, target: Run, ids: Tensor) -> ModelKwargs:
        """The target's arguments that the assistant's forward takes."""
        model, columns = self.model, ("attention_mask", "position_ids")
        names = families.accepted_names(model) - NOT_SHARED
        if not target.is_encoder_decoder:
            # Of embeddings, and of a prompt that the target's cache holds, it reads what comes after.
            values = [target.model_kwargs.get(name) for name in columns]
            if any(value is not None and value.shape[-1] != ids.shape[1] for value in values):
                names -= {*columns}
        if not model._supports_logits_to_keep():
            names -= {"logits_to_keep"}
        kwargs: ModelKwargs = {}
        for name, value in target.model_kwargs.items():
            if name in names and value is not None:
                # Masks and positions that have grown are parts of a buffer.
                is_tensor = isinstance(value, Tensor)
                value = value.to(ids.device).contiguous() if is_tensor else copy.deepcopy(value)
                kwargs[name] = value
        if (of_image := kwargs.get("image_embeds_position_mask")) is not None:
            # Kosmos: which ids stand for the image. What has been generated does not.
            n_generated = ids.shape[1] - of_image.shape[1]
            kwargs["image_embeds_position_mask"] = pad(of_image, (0, n_generated))
        if target.is_encoder_decoder and not model.config.is_encoder_decoder:
            kwargs["encoder_outputs"] = target.model_kwargs["encoder_outputs"]
            kwargs["attention_mask"] = torch.ones_like(ids) if target.mask is None else target.mask
        return kwargs

    def encoded(self, kwargs: ModelKwargs, config: GenerationConfig, ids: Tensor) -> ModelKwargs:
        """``kwargs`` with the input of the assistant's own encoder."""
        encoder_input: Any = self.setup.encoder_input
        is_embeds = encoder_input is not None and encoder_input.is_floating_point()
        # The caller may have given encoder outputs alone.
        if encoder_input is None or not (is_embeds or (encoder_input >= 0).all()):
            return kwargs | {"encoder_outputs": self.setup.run.model_kwargs["encoder_outputs"]}
        n_repeats = len(ids) // len(encoder_input)
        is_embeds = is_embeds and self.model.main_input_name == "input_ids"
        name = "inputs_embeds" if is_embeds else "inputs"
        return kwargs | {name: encoder_input.repeat_interleave(n_repeats, dim=0).to(ids.device)}


class EarlyExit(Assistant):
    """Drafts with the first ``n_layers`` layers of the model itself (``assistant_early_exit``)."""

    def __init__(self, setup: Setup, n_layers: int) -> None:
        super().__init__(setup, first_layers(setup.run.model, n_layers))
        self.n_layers = n_layers

    def prepare(self, ids: Tensor) -> Run:
        return self.explained(super().prepare, ids)

    def encoded(self, kwargs: ModelKwargs, config: GenerationConfig, ids: Tensor) -> ModelKwargs:
        """``kwargs`` with what the encoder makes of its input, or has made: ranks run it once, together."""
        if self.process_group is None:
            return super().encoded(kwargs, config, ids)
        # Some decoders write to what they are given: Moonshine's.
        outputs = copy.deepcopy(self.setup.run.model_kwargs["encoder_outputs"])
        return kwargs | {"encoder_outputs": outputs}

    def next_logits(self, run: Run) -> Tensor:
        return self.explained(super().next_logits, run)

    def explained(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """What ``function`` returns; an error says that the first layers alone may be its cause."""
        try:
            return function(argument)
        except ranks.RankError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot decode with its first {self.n_layers} layers "
                f"alone (`assistant_early_exit`): {error}"
            ) from error


def first_layers(model: Any, n_layers: int) -> Any:
    """A view of ``model`` whose decoder has ``n_layers`` layers; the model itself is not touched.

    Copied are the modules down to the list of layers, and their configs. Unknown hooks are left out.
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


def decoder_layers(model: Any) -> tuple[Any, nn.Module, str]:
    """The decoder, the module in it that has its list of layers, and its name there; ``ValueError`` without one."""
    decoder = model
    with suppress(AttributeError, NotImplementedError):
        decoder = model.get_decoder() or model
    n_layers = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    lists = (
        (module, name, child)
        for module in families.modules_of(decoder)
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    )
    module, name, layers = next(lists, (decoder, "", []))
    if len(layers) != n_layers or n_layers == 0:
        name = type(model).__name__
        raise ValueError(f"`assistant_early_exit` needs a list of decoder layers; {name} has none.")
    return decoder, module, name


def _view(module: Any, configs: dict) -> Any:
    view = view_of(module)
    if hasattr(module, "config"):
        view.config = config = copy.deepcopy(module.config, configs)
        config.output_hidden_states = config.output_attentions = False
        # Hooks that record outputs would be set on the shared layers a second time by the model.
        view._output_capturing_hooks_installed = True
    return view
