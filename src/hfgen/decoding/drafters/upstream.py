"""Drafts for one row by transformers' own candidate generators, asked what and when upstream's loop asks them.

Those are: heads that predict several tokens (``use_mtp=True``); assistants that denoise a block of
tokens (``speculation_type="dflash"``); Gemma's assistants, which attend to the target's keys; and any
``CandidateGenerator`` passed as ``assistant_model`` or returned by ``_get_candidate_generator``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import candidate_generator as kinds
from transformers.utils import ModelOutput

from ...families import CACHE
from ...logits.processors.lists import for_drafts, reads_replaced
from ...running.row_states import is_replaced
from ...state.run import Run
from .base import Draft, DraftContext, Drafter, Setup
from .schedule import DEFAULT_TOKENS, Schedule

MANY_TOKENS = 128  # more than a generator drafts at once, unless the call has room for still more
SINGLE_POSITION = kinds.SinglePositionMultiTokenCandidateGenerator
READ_PROMPTS = (kinds.MTPCandidateGenerator, kinds.DFlashTokenCandidateGenerator, SINGLE_POSITION)


class FromGenerator(Drafter):
    """Drafts what upstream's ``CandidateGenerator`` drafts, for one row whose prompt it can read; else ``ValueError``."""

    def __init__(self, setup: Setup, generator: Any = None) -> None:
        """``generator``: by default what the model's hook makes."""
        if (rows := len(setup.run.ids)) > 1:
            name = "transformers' generator" if generator is None else type(generator).__name__
            raise ValueError(
                f"{name} drafts for one sequence, and there are {rows}. Decode them one by one, or draft "
                "with another model, `prompt_lookup_num_tokens` or a `hfgen.Drafter`."
            )
        self.setup = setup
        self.generator = generator = _call_hook(setup) if generator is None else generator
        if type(generator) in READ_PROMPTS:
            _check_prompt(setup.run, type(generator).__name__)
        #: Drafts may go beyond the last token, and are made for it too, where draws or a caller's object show it.
        self.is_always_asked = setup.is_exact or type(generator) not in READ_PROMPTS
        room = setup.max_length - setup.run.ids.shape[1]
        self.schedule = Schedule(max(room, MANY_TOKENS))
        #: Whether ``get_candidates`` takes what the target model returned in the last round.
        self.reads_outputs = getattr(generator, "requires_model_outputs", False)
        if self.reads_outputs:
            self.forward_arguments = dict(getattr(generator, "model_kwargs_overrides", {}))
            if setup.run.config.output_hidden_states:  # all, and not only those that it reads
                self.forward_arguments.pop("output_hidden_states", None)
        self.outputs: ModelOutput | None = None
        self.n_matches = 0

    def draft(self, context: DraftContext) -> Draft | None:
        ids, outputs, arguments = context.ids[:, : context.start], self.outputs, dict[str, Any]()
        if self.reads_outputs:
            arguments = {"model_kwargs": self.model_kwargs(), "model_outputs": outputs}
            arguments |= {"is_first_iteration": outputs is None, "n_last_matches": self.n_matches}
        candidates, logits = self.generator.get_candidates(ids, **arguments)
        length, shape = ids.shape[1], tuple(candidates.shape)
        if len(shape) != 2 or shape[0] != 1 or shape[1] < length:
            raise ValueError(
                f"{type(self.generator).__name__}.get_candidates() has to return the {length} ids that it "
                f"was given and drafted ones after them, (1, {length} or more), but returned {shape}."
            )
        tokens = candidates[:, length:][:, : context.n_tokens].to(context.ids)
        n = tokens.shape[1]
        is_used = logits is not None and self.setup.needs_logits
        return Draft(tokens, logits[:, :n].to(context.ids.device) if is_used else None, (n,))

    def model_kwargs(self) -> dict[str, Any]:
        """The target's arguments; a mask and positions are among them even if plain."""
        run = self.setup.run
        kwargs = dict(run.model_kwargs)
        if not run.is_encoder_decoder:
            kwargs.setdefault("attention_mask", None)  # which is: there is no padding
            if kwargs.get("position_ids") is None:
                positions = torch.arange(run.ids.shape[1], device=run.ids.device)
                kwargs["position_ids"] = positions.expand_as(run.ids)
        return kwargs

    def see(self, run: Run, model_outputs: Any, scores: Any, n_advanced: int) -> None:
        self.outputs, self.n_matches = model_outputs, n_advanced - 1
        if (update := getattr(self.generator, "update_candidate_strategy", None)) is not None:
            update(run.ids, torch.stack(scores, dim=1), self.n_matches)


def has_own_hook(model: Any) -> bool:
    """Whether the model has a hook of its own, or other code has replaced transformers', or what it makes."""
    name = "_get_candidate_generator"
    upstreams: Any = getattr(GenerationMixin, name)
    if getattr(getattr(model, name), "__func__", None) is not upstreams or is_replaced(name):
        return True
    drafting = (kinds.AssistedCandidateGenerator, kinds.PromptLookupCandidateGenerator)
    return reads_replaced(upstreams) or any(is_replaced("get_candidates", k) for k in drafting)


def _check_prompt(run: Run, kind: str) -> None:
    """Raise ``ValueError`` for a prompt without ids or hidden states, all of which ``kind`` reads."""
    cache = run.model_kwargs.get(CACHE)
    if run.model_kwargs.get("inputs_embeds") is not None and not run.is_encoder_decoder:
        raise ValueError(f"{kind} reads ids of the prompt: pass `input_ids`, not `inputs_embeds`.")
    if cache is not None and (n_cached := cache.get_seq_length()) > 0:
        raise ValueError(
            f"{kind} reads hidden states of the whole prompt, but `{CACHE}` holds {n_cached} tokens."
        )


def _call_hook(setup: Setup) -> Any:
    run = setup.run
    generator = run.model._get_candidate_generator(
        generation_config=run.config,
        input_ids=run.ids,
        inputs_tensor=setup.encoder_input,
        assistant_model=setup.assistant_model,
        logits_processor=LogitsProcessorList(for_drafts(run.processors)),
        target_tokenizer=setup.tokenizer,
        assistant_tokenizer=setup.assistant_tokenizer,
        model_kwargs=run.model_kwargs,
    )
    if isinstance(generator, SINGLE_POSITION) and generator.num_assistant_tokens is None:
        generator.num_assistant_tokens = run.config.num_assistant_tokens or DEFAULT_TOKENS
    return generator
