"""The arguments of sessions: what belongs to which row, and what no session takes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import families
from ..decoding.strategies import Sample
from ..families import CACHE, FORMER_NAMES
from ..memory.batch import TOKEN_DIM, take_rows
from ..prepare import rows as values_per_row
from ..running.interventions import Edit
from ..state.call import Call, Request

if TYPE_CHECKING:
    from .row import Row

#: Names of the ids of a prompt.
IDS = ("inputs", "input_ids")

#: Arguments of ``generate`` that a session does not take, and why.
REFUSED = {
    "streamer": "step() yields what it would get",
    "assistant_model": "a session decodes one token of each row at a time",
    "custom_generate": "a session decodes by hfgen's own sampling",
    **dict.fromkeys((CACHE, *FORMER_NAMES), "a session makes its own cache"),
    "inputs_embeds": "a session needs the ids of its prompts",
    "prefix_cache": "a session keeps its own cache",
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "prompt_logprobs"),
        "a session keeps tokens and logits alone",
    ),
    "synced_gpus": "a session decodes in one process",
}


def split(model: Any, request: Request) -> list[dict[str, Any]]:
    """The arguments of each row, without padding on the left."""
    arguments = request.arguments
    for name, why in REFUSED.items():
        if (value := arguments.get(name)) is not None and value is not False:
            raise ValueError(f"`{name}` cannot be used in a session: {why}. Leave it out.")
    inputs = (arguments.get(name) for name in (*IDS, model.main_input_name))
    n_each = (len(value) for value in inputs if isinstance(value, Tensor) and value.ndim > 0)
    n_rows = next(n_each, 1)
    requests = enumerate(values_per_row.for_each_prompt(request, n_rows))
    return [_row_of(model, each.arguments, index, n_rows) for index, each in requests]


def _row_of(model: Any, arguments: dict[str, Any], index: int, n_rows: int) -> dict[str, Any]:
    if n_rows == 1:
        return arguments
    if edits := arguments.get("interventions"):
        arguments["interventions"] = edits_of(edits, index, n_rows)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != n_rows):
            raise ValueError(
                f"`{name}` has the shape {tuple(value.shape)}, and there are {n_rows} prompts: it is not known "
                "what belongs to which. Make a session of each prompt, and join() them."
            )
        arguments[name] = take_rows(value, torch.tensor([index]), n_rows, name)
    mask = arguments.get("attention_mask")
    if mask is None or model.config.is_encoder_decoder:
        return arguments
    n_padding = int((mask.cumsum(dim=-1) == 0).sum())
    for name in (*TOKEN_DIM, *IDS):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.shape[-1] == mask.shape[-1]:
            arguments[name] = value[..., n_padding:]
    if arguments["attention_mask"].all():
        del arguments["attention_mask"]
    return arguments


def edits_of(edits: Any, index: int, n_rows: int) -> Any:
    """The interventions in row ``index`` of ``n_rows``. Raises ``ValueError`` for rows that do not exist."""
    if not isinstance(edits, list | tuple):
        return edits  # the row's call refuses it
    of_row = []
    for edit in edits:
        if isinstance(edit, Edit) and edit.rows is not None:
            edit.check_rows(n_rows)
            if index not in edit.rows:
                continue
            edit = copy.copy(edit)
            edit.rows = None
        of_row.append(edit)
    return of_row


def check(call: Call) -> None:
    """Raise ``ValueError`` for a call that is not plain decoding of one prompt with a cache that grows."""
    config: Any = call.config
    if call.strategy is not Sample:
        raise ValueError(f"A session decodes greedily or by sampling, but not by {call.who}.")
    if len(call.prompt.ids) != 1 or call.prompt.batch_size != 1:
        raise ValueError(
            "A session has one row for each prompt: fork() it in place of `num_return_sequences`."
        )
    if config.cache_implementation not in (None, "dynamic") or not config.use_cache:
        raise ValueError(
            f"A session keeps a dynamic cache, but is asked for `cache_implementation`="
            f"{config.cache_implementation!r} and `use_cache`={config.use_cache!r}."
        )
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise ValueError(
            "`guidance_scale` keeps a cache of its own, which a session cannot rewind."
        )


def ids_of(tokens: Any, row: Row) -> list[int]:
    """The ids of what is fed to ``row``."""
    if isinstance(tokens, str):
        tokenizer = families.text_tokenizer(row.arguments.get("tokenizer"))
        if not callable(tokenizer):
            raise ValueError("Text can be fed with a tokenizer: model.session(…, tokenizer=…).")
        tokens = tokenizer(tokens, add_special_tokens=False)["input_ids"]
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or not all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in tokens
    ):
        raise TypeError(f"A row is fed token ids or text, but not {tokens!r:.80}.")
    vocab = families.token_embedding(row.model)
    n_vocab = row.model.config.get_text_config(decoder=True).vocab_size
    n_vocab = n_vocab if vocab is None else vocab.num_embeddings
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ValueError(
                f"Token {token} is outside of the vocabulary, which has the ids 0 to {n_vocab - 1}."
            )
    if len(tokens) > (room := int(row.run.config.max_length) - row.n_tokens):
        raise ValueError(
            f"{len(tokens)} tokens are fed to a row that has room for {room}: set `max_new_tokens`."
        )
    return [int(token) for token in tokens]


def check_each(values: Any, name: str, n_rows: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what has not an entry for each of ``n_rows``."""
    if isinstance(values, str) or not isinstance(values, Sequence | Tensor):
        raise TypeError(f"`{name}` has to have an entry for each row, but is {values!r:.80}.")
    if len(values) != n_rows:
        raise ValueError(f"`{name}` has {len(values)} entries, and the session has {n_rows} rows.")
