"""Functions to edit: source text, a small change asked for, and the text with the change.

The functions are this project's own, as they once were; they stay as they are here, so that results
can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Edit:
    """``request``: the change in words. ``changes``: what it replaces in ``before``, everywhere."""

    request: str
    before: str
    changes: tuple[tuple[str, str], ...]

    @property
    def after(self) -> str:
        text = self.before
        for old, new in self.changes:
            text = text.replace(old, new)
        return text

    @property
    def prompt(self) -> str:
        return f"{self.before}\n\n# The same function: {self.request}.\n\n"


class Reference:
    """A logits processor that lets every row choose the next token of its reference text.

    The built-in model is too small to edit by instruction; so it does all of the work, and its
    choice is replaced. ``tokens (rows, n)`` follow the prompt of ``prompt_length`` tokens.
    """

    #: Rows may advance at their own pace, and may be asked about any length again.
    is_row_wise = True

    def __init__(self, tokens: torch.Tensor, prompt_length: int) -> None:
        self.columns = tokens.unbind(dim=1)
        self.columns = tuple(column[:, None] for column in self.columns)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids (rows, length)``, ``scores (rows, vocab)``."""
        position = min(input_ids.shape[1] - self.prompt_length, len(self.columns) - 1)
        return scores.scatter(1, self.columns[position], 1e4)


def editing(edits: Sequence[Edit], tokenizer: Any) -> dict[str, Any]:
    """Arguments of ``generate`` that let one row for each edit write its text; an EOS ends it."""
    prompts = tokenizer([edit.prompt for edit in edits], return_tensors="pt", padding=True)
    ends = [[*tokenizer(edit.after).input_ids, tokenizer.eos_token_id] for edit in edits]
    length = max(map(len, ends))
    tokens = torch.tensor([ids + [tokenizer.eos_token_id] * (length - len(ids)) for ids in ends])
    return {
        "input_ids": prompts.input_ids,
        "attention_mask": prompts.attention_mask,
        "logits_processor": [Reference(tokens, prompts.input_ids.shape[1])],
        "max_new_tokens": length,
    }


def beginnings(edits: Sequence[Edit], tokenizer: Any, length: int) -> dict[str, Any]:
    """Arguments of ``generate`` that let one row for each function complete its beginning."""
    ids = torch.tensor([tokenizer(edit.before).input_ids[:length] for edit in edits])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


EDITS = (
    Edit(
        "allocate half as many spare columns",
        '''\
def grow(
    tensor: torch.Tensor, count: int, fill: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """``tensor`` with ``count`` more columns in its last dimension.

    ``fill(tensor, n)`` makes the ``n`` columns that follow ``tensor``; it has to be the same
    columns whether they are made at once or one after the other.
    """
    length = tensor.shape[-1] + count
    buffer, version = getattr(tensor, _BUFFER, (None, None))
    if buffer is None or buffer.shape[-1] < length or version != _version(tensor):
        spare = count + max(SPARE_COLUMNS, tensor.shape[-1])
        buffer = torch.cat([tensor, fill(tensor, spare)], dim=-1)
    view = buffer[..., :length]
    setattr(view, _BUFFER, (buffer, _version(view)))
    return view
''',
        (("max(SPARE_COLUMNS, tensor.shape[-1])", "max(SPARE_COLUMNS, tensor.shape[-1]) // 2"),),
    ),
    Edit(
        "take the revision of the repository, and pass it on",
        '''\
def generate_from_repository(model: Any, request: Request, trust_remote_code: bool | None) -> Any:
    """Run ``custom_generate/generate.py`` of the repository that ``custom_generate`` names.

    It gets the arguments of ``generate``, with ``model`` for ``self``. Its code is loaded only
    with ``trust_remote_code=True``.
    """
    function = model.load_custom_generate(
        request.custom_generate, trust_remote_code=trust_remote_code, **request.kwargs
    )
    names = (name for name in request.__slots__ if name not in ("kwargs", "custom_generate"))
    return function(
        model=model, **{name: getattr(request, name) for name in names}, **request.kwargs
    )
''',
        (
            ("bool | None) -> Any", 'bool | None, revision: str = "main") -> Any'),
            ("=trust_remote_code, **", "=trust_remote_code, revision=revision, **"),
        ),
    ),
    Edit(
        "rename `config` to `settings`",
        '''\
def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a field of the config that lacks what it works with.

    The stages that build from these fields check them too, but come after the encoder has run.
    ``heal_tokens`` alone says what healing needs: a model may override it and do without.
    """
    config = plan.config
    if config.stop_strings is not None:
        require_tokenizer(plan.mode_kwargs.get("tokenizer"), "stop_strings", config.stop_strings)
    if (penalty := config.exponential_decay_length_penalty) is not None:
        require_eos(config.eos_token_id, penalty)
    if config.output_speculation and not config.return_dict_in_generate:
        raise ValueError(
            "`output_speculation=True` puts statistics on the output object: set "
            "`return_dict_in_generate=True`, too."
        )
''',
        (("config.", "settings."), ("config =", "settings ="), ("plan.settings", "plan.config")),
    ),
    Edit(
        "name the number of rows in the warning",
        """\
def _warn_of_right_padding(plan: Plan, prompt: Prompt) -> None:
    pad, ids = plan.config._pad_token_tensor, prompt.main_input
    if pad is None or prompt.batch_size == 1 or ids.ndim != 2:
        return
    mask = prompt.model_kwargs.get("attention_mask")
    # The mask knows; the ids can only be guessed from, since the pad may be an ordinary token.
    if mask is not None and mask.shape == ids.shape:
        is_right_padded = (mask[:, -1] == 0).any()
    else:
        is_right_padded = (ids[:, -1] == pad).any()
    if is_right_padded:
        logger.warning(
            "Some rows end in padding. A decoder-only model continues from the last token: set "
            "`padding_side='left'` on the tokenizer."
        )
""",
        (
            ("is_right_padded = (mask[:, -1] == 0).any()", "n_padded = (mask[:, -1] == 0).sum()"),
            ("is_right_padded = (ids[:, -1] == pad).any()", "n_padded = (ids[:, -1] == pad).sum()"),
            ("if is_right_padded:", "if n_padded:"),
            ('"Some rows end', 'f"{n_padded} rows end'),
        ),
    ),
    Edit(
        "take the seed as an argument",
        '''\
def batches(stream: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """One `(rows, length)` batch of ids per step: epochs of shuffled rows, cut at another place each time."""
    random = torch.Generator().manual_seed(SEED)
    rows: list[torch.Tensor] = []
    for step in range(recipe.steps):
        length = recipe.row_length(step)
        if rows and len(rows[0]) != length:
            rows = []
        while len(rows) < recipe.tokens // length:
            shift = int(torch.randint(length, (), generator=random))
            count = (len(stream) - shift) // length
            epoch = stream[shift : shift + count * length].view(count, length)
            rows.extend(epoch[torch.randperm(count, generator=random)])
        yield torch.stack([rows.pop() for _ in range(recipe.tokens // length)])
''',
        (("recipe: Recipe)", "recipe: Recipe, seed: int)"), ("SEED", "seed")),
    ),
    Edit(
        "report seconds in place of milliseconds",
        '''\
def table(result: Result) -> str:
    """One row per mode, times in milliseconds per call."""
    rows = [
        "| mode | upstream, ms | hfgen, ms | ratio | quartiles | CPU ratio | pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for comparison in result.comparisons:
        theirs, ours = (f"{comparison.milliseconds(library):.1f}" for library in LIBRARIES)
        wall, cpu = comparison.ratio, comparison.cpu_ratio
        rows.append(
            f"| {comparison.name} | {theirs} | {ours} | **{wall.median:.3f}** "
            f"| {wall.low:.3f} to {wall.high:.3f} | {cpu.median:.3f} | {comparison.n_pairs} |"
        )
    return "\\n".join(rows)
''',
        (("milliseconds", "seconds"), (", ms", ", s"), (":.1f", ":.4f")),
    ),
    Edit(
        "stop at the end of the input, too",
        '''\
def turn(conversation: Conversation, line: str, config: Any) -> None:
    """Stream the answer to ``line``; Ctrl-C keeps what was said so far, an error undoes the turn."""
    conversation.add("user", line)
    clock = measure.Clock(text_streamer(conversation.loaded))
    try:
        measure.generate(conversation.loaded, conversation.inputs(), config, streamer=clock)
    except KeyboardInterrupt:
        clock.end()
        say("[dim]stopped[/]")
    except CliError as error:
        conversation.messages.pop()
        say(f"[red]hfgen:[/] {one_line(str(error))} (/reset starts again)")
        return
    answer = conversation.loaded.tokenizer.decode(clock.tokens, skip_special_tokens=True)
    conversation.add("assistant", answer)
''',
        (
            ("except KeyboardInterrupt:", "except (KeyboardInterrupt, EOFError):"),
            ("Ctrl-C keeps", "Ctrl-C or Ctrl-D keeps"),
        ),
    ),
    Edit(
        "rename `implementations` to `kernels`",
        '''\
def optimize_model_for_decode(self: Any) -> Iterator[None]:
    """Within, mixture-of-experts layers use the kernel that is faster for few tokens.

    On accelerators, that is ``batched_mm`` in place of ``grouped_mm``. Experts may sit in a
    sub-model, so the implementation of every part is read, and put back.
    """
    implementations = self.get_experts_implementation()
    if self.device.type == "cpu" or "grouped_mm" not in implementations.values():
        yield
        return
    logger.info_once("Decoding with the `batched_mm` experts instead of `grouped_mm`.")
    self.set_experts_implementation(
        {
            part: "batched_mm" if name == "grouped_mm" else name
            for part, name in implementations.items()
        }
    )
    try:
        yield
    finally:
        self.set_experts_implementation(implementations)
''',
        (("implementations", "kernels"),),
    ),
)
