"""Train the built-in model and its draft from the source of the Python standard library and of its tests.

The text comes with Python, so the whole of `src/hfgen/tools/builtin` can be made again offline: a byte-level BPE
tokenizer, a small Llama that completes Python code, and a smaller Llama that is distilled from it (Hinton et
al. 2015, "Distilling the Knowledge in a Neural Network") to draft its tokens. Budgets are counted in steps,
not in seconds, and the order of data is fixed: one Python version, torch version and processor give one
result.

    python scripts/train_builtin_model.py                           # everything, about two hours on one core
    python scripts/train_builtin_model.py --steps 20 --draft-steps 20 --out /tmp/out --state /tmp/state
"""

from __future__ import annotations

import copy
import math
import platform
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import print_json
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

OUT = Path(__file__).resolve().parents[1] / "src" / "hfgen" / "tools" / "builtin"
STATE = Path(__file__).resolve().parents[1] / "build" / "builtin"

SEED = 0
VOCAB_SIZE = 2048
END, PAD = "<|endoftext|>", "<|pad|>"
POSITIONS = 1024

# Codec tables and generated files are numbers, and the build's own configuration differs from machine to
# machine.
SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "__pycache__"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "__phello__")
# These are read a third as often as the library, and none of them is held out.
OTHER_FOLDERS = {"test", "tests", "idlelib"}
LIBRARY_COPIES = 3
HELD_OUT_ONE_IN = 33
# A text is left out if more than this share of its blocks of lines is in texts before it, or held out.
MOST_REPEATED = 0.3
BLOCK_LINES = 3
SHORTEST_LINE = 10

# Learning rates of Muon, as steps of the size of AdamW's.
RATE, DRAFT_RATE = 4e-3, 4e-3

# Factors of the logits that are tried when the training is over.
SCALES = [n / 50 for n in range(40, 61)]

SAMPLE_PROMPT = "def main():\n    import getopt\n    try:\n        opts, args = getopt.getopt("

# A newline is always a token of its own: a prompt that ends with one is then split as the training text is.
# Indentation is one piece, so that the first word of a line carries no space.
PIECES = (
    r"\r?\n|(?<=\n)[ \t]+| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?= \S)|[ \t]+(?!\S)|\s"
)

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model is trained; a step sees `tokens` tokens, cut into rows of `length`."""

    steps: int
    rate: float  # of the layers' matrices, by Muon
    other_rate: float = 2e-3  # of embeddings and norms, by AdamW
    tokens: int = 4096
    length: int = 256
    long_length: int = POSITIONS
    long_share: float = 0.12  # of the steps, the last: positions beyond `length` are learnt too
    warmup: int = 100
    fall_share: float = 0.4
    decay: float = 0.1  # of the layers' matrices
    clip: float = 1.0
    data_weight: float = 0.2  # of the data's loss beside the teacher's, where there is a teacher
    save_every: int = 200

    def row_length(self, step: int) -> int:
        return self.long_length if step >= self.steps * (1 - self.long_share) else self.length

    def rate_factor(self, step: int) -> float:
        """Linear warmup, a constant rate, and a linear fall over the last `fall_share` of the steps.

        A run that is stopped before the fall can be resumed with another number of steps, and ends as if it
        had been started with it.
        """
        warm = min(1.0, (step + 1) / self.warmup)
        fall = min(1.0, (self.steps - step) / (self.steps * self.fall_share))
        return warm * fall


# ---------------------------------------------------------------------------------------------- data


def library_files() -> dict[str, Path]:
    """Every file of text, by its name relative to the standard library, in one order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return {
        name: names[name]
        for name in sorted(names)
        if not SKIPPED_FOLDERS.intersection(name.split("/"))
        and not name.startswith(SKIPPED_PREFIXES)
    }


def is_library(name: str) -> bool:
    return not OTHER_FOLDERS.intersection(name.split("/"))


def is_held_out(name: str) -> bool:
    return is_library(name) and zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def blocks(text: str) -> list[int]:
    """Checksums of every few lines in a row, without short ones."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) > SHORTEST_LINE]
    starts = range(len(lines) - BLOCK_LINES + 1)
    return [zlib.crc32("\n".join(lines[at : at + BLOCK_LINES]).encode()) for at in starts]


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of all files, by what they are for."""

    stdlib: list[str]
    other: list[str]
    held_out: list[str]
    vocabulary: list[str]  # for the tokenizer: all of the library that is not held out
    n_repeated: int  # files that were left out, since they repeat others


def read_texts() -> Texts:
    texts = {
        name: path.read_text(encoding="utf-8", errors="ignore")
        for name, path in library_files().items()
    }
    texts = {name: text for name, text in texts.items() if text.strip()}
    held_out = {name: text for name, text in texts.items() if is_held_out(name)}
    seen = {block for text in held_out.values() for block in blocks(text)}
    kept: dict[str, str] = {}
    for name in sorted(
        texts.keys() - held_out.keys(), key=lambda name: (not is_library(name), name)
    ):
        found = blocks(texts[name])
        if sum(block in seen for block in found) <= MOST_REPEATED * len(found):
            kept[name] = texts[name]
        seen.update(found)
    return Texts(
        stdlib=[text for name, text in kept.items() if is_library(name)],
        other=[text for name, text in kept.items() if not is_library(name)],
        held_out=list(held_out.values()),
        vocabulary=[texts[name] for name in texts if is_library(name) and not is_held_out(name)],
        n_repeated=len(texts) - len(held_out) - len(kept),
    )


def megabytes(texts: Iterable[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def to_stream(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> torch.Tensor:
    """All texts as one row of ids, each text after the token that ends texts."""
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.bos_token_id)
        ids.extend(tokenizer.backend_tokenizer.encode(text).ids)
    return torch.tensor([*ids, tokenizer.eos_token_id])


def batches(streams: Sequence[torch.Tensor], recipe: Recipe) -> Iterator[torch.Tensor]:
    """One `(rows, length)` batch of ids per step: epochs of shuffled rows, cut at another place each time."""
    random = torch.Generator().manual_seed(SEED)
    rows: list[torch.Tensor] = []
    for step in range(recipe.steps):
        length = recipe.row_length(step)
        if rows and len(rows[0]) != length:
            rows = []
        while len(rows) < recipe.tokens // length:
            cut: list[torch.Tensor] = []
            for stream in streams:
                shift = int(torch.randint(length, (), generator=random))
                count = (len(stream) - shift) // length
                cut.append(stream[shift : shift + count * length].view(count, length))
            epoch = torch.cat(cut)
            rows.extend(epoch[torch.randperm(len(epoch), generator=random)])
        yield torch.stack([rows.pop() for _ in range(recipe.tokens // length)])


# --------------------------------------------------------------------------------- tokenizer, models


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Sennrich et al. 2016, on the bytes): every string can be encoded and comes back whole."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def new_model(shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        **shape,
        **special,
    )
    set_seed(SEED)
    model = LlamaForCausalLM(config)
    # Every block adds to the residual stream twice; the sum should not grow with depth (GPT-2, section 2.3).
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.div_(math.sqrt(2 * config.num_hidden_layers))
    model.generation_config = GenerationConfig(**special)
    return model


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, generation config and bfloat16 weights; the model itself stays float32."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


# -------------------------------------------------------------------------------------------- training


Forward = Callable[..., Any]


def loss_of(
    forward: Forward, ids: torch.Tensor, teacher: Forward | None, data_weight: float
) -> torch.Tensor:
    """Mean loss per token in nats: cross entropy to the data, mixed with the one to the teacher if there is one."""
    logits = forward(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    data_loss = F.cross_entropy(logits, ids[:, 1:].flatten())
    if teacher is None:
        return data_loss
    with torch.no_grad():
        target = teacher(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    teacher_loss = F.kl_div(
        logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return data_weight * data_loss + (1 - data_weight) * teacher_loss


def optimizers_for(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for what is left."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=recipe.rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            others, lr=recipe.other_rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True
        ),
    ]


def compiled(model: LlamaForCausalLM) -> Forward:
    """The forward with eager attention: once compiled, it is a quarter faster than SDPA, on long rows as well."""
    model.set_attn_implementation("eager")
    return torch.compile(model, dynamic=False)  # type: ignore[no-any-return]


def train(
    name: str,
    model: LlamaForCausalLM,
    streams: Sequence[torch.Tensor],
    recipe: Recipe,
    folder: Path,
    state_file: Path,
    teacher: LlamaForCausalLM | None = None,
) -> None:
    """Train in place, from `state_file` on where it exists; `folder` gets the weights every `save_every` steps."""
    optimizers = optimizers_for(model, recipe)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    done = 0
    if state_file.exists():
        state = torch.load(state_file)
        done = state["done"]
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    save_model(model, folder)
    model.train()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    started, seen, mean, length = time.perf_counter(), 0, 0.0, 0
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=recipe.steps, completed=done)
        for step, ids in enumerate(batches(streams, recipe)):
            if step < done:
                continue
            if ids.shape[1] != length:
                length = ids.shape[1]
                torch.compiler.reset()
                forward = compiled(model)
                teach = compiled(teacher) if teacher else None
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * recipe.rate_factor(step)
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(forward, ids, teach, recipe.data_weight)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            for optimizer in optimizers:
                optimizer.step()

            mean = 0.95 * mean + 0.05 * loss.item() if seen else loss.item()
            seen += ids.numel()
            progress.update(task, advance=1, description=f"{name}: loss {mean:.3f}")
            if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
                save_model(model, folder)
                state = {
                    "done": step + 1,
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                }
                torch.save(state, state_file)
                speed = seen / (time.perf_counter() - started)
                progress.console.print(
                    f"{name}: step {step + 1}, loss {mean:.3f}, {speed:.0f} tokens/s"
                )
    model.eval()


# ----------------------------------------------------------------------------------- measures and card


@torch.no_grad()
def predictions(model: LlamaForCausalLM, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """For `(rows, length)` ids: greedy choices `(rows, length - 1)` and the mean loss per token in nats."""
    choices: list[torch.Tensor] = []
    losses: list[float] = []
    for ids in rows.split(4):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        choices.append(logits.argmax(-1))
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses.extend(loss.tolist())
    return torch.cat(choices), sum(losses) / len(losses)


@torch.no_grad()
def calibrate(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Scale the logits to the least loss on `rows` of ids, by the weight of the last norm; returns the factor.

    A model that has read a text several times is too sure of itself (Guo et al. 2017). Its greedy choices stay.
    """
    losses = torch.zeros(len(SCALES))
    for ids in rows.split(4):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        target = ids[:, 1:].flatten()
        losses += torch.stack([F.cross_entropy(logits * scale, target) for scale in SCALES])
    scale = SCALES[int(losses.argmin())]
    model.model.norm.weight.mul_(scale)
    return scale


def held_out_rows(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    stream = to_stream(tokenizer, texts)
    count = len(stream) // POSITIONS
    return stream[: count * POSITIONS].view(count, POSITIONS)


def measure(out: Path, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, float]:
    """The card's numbers, of the files as they are shipped and on held-out text."""
    model = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    draft = LlamaForCausalLM.from_pretrained(out / "draft", dtype=torch.float32).eval()
    rows = held_out_rows(tokenizer, texts)
    model_choices, model_loss = predictions(model, rows)
    draft_choices, draft_loss = predictions(draft, rows)

    prompts = rows[:: max(1, len(rows) // 32), :64]
    model.generation_config.eos_token_id = None  # every row goes on to its full length
    mask = torch.ones_like(prompts)
    continued = model.generate(prompts, attention_mask=mask, max_new_tokens=128)
    along, _ = predictions(draft, continued)

    n_tokens = len(to_stream(tokenizer, texts))
    bytes_per_token = sum(len(text.encode()) for text in texts) / n_tokens
    return {
        "held_out_tokens": n_tokens,
        "other_half_perplexity": math.exp(predictions(model, rows[1::2])[1]),
        "prompts": len(prompts),
        "bytes_per_token": bytes_per_token,
        "model_loss": model_loss,
        "draft_loss": draft_loss,
        "model_perplexity": math.exp(model_loss),
        "draft_perplexity": math.exp(draft_loss),
        "model_bits_per_byte": model_loss / math.log(2) / bytes_per_token,
        "draft_bits_per_byte": draft_loss / math.log(2) / bytes_per_token,
        "model_accuracy": (model_choices == rows[:, 1:]).float().mean().item(),
        "draft_accuracy": (draft_choices == rows[:, 1:]).float().mean().item(),
        "agreement": (model_choices == draft_choices).float().mean().item(),
        "continuation_agreement": (along == continued[:, 1:])[:, 63:].float().mean().item(),
        "model_parameters": model.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "cost_ratio": draft.num_parameters() / model.num_parameters(),
    }


def sample(out: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the model makes, by greedy search, of a prompt like many in the training text."""
    model = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    inputs = tokenizer(SAMPLE_PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=96)
    return tokenizer.decode(ids[0], skip_special_tokens=True).rstrip()


CARD = """\
# The built-in model

A small Llama that completes Python code, and a draft model with the same tokenizer for assisted decoding.
They are there so that examples, tests and benchmarks run without a download; as a programmer they are weak.
`hfgen.builtin_model()` and `hfgen.builtin_model(draft=True)` load them as float32.
`scripts/train_builtin_model.py` made everything in this folder, this card included.

| | model | draft |
|---|---|---|
| layers, hidden size, MLP size | {model_shape} | {draft_shape} |
| attention heads (key-value heads) | {model_heads} | {draft_heads} |
| parameters, all touched by every token (tied embedding counted once) | {model_parameters:,} | {draft_parameters:,} ({cost_ratio:.1%} of the model) |
| file of weights, bfloat16 | {model_megabytes:.2f} MB | {draft_megabytes:.2f} MB |
| training steps of {tokens:,} tokens | {steps:,} | {draft_steps:,} |
| held-out loss, nats per token | {model_loss:.3f} | {draft_loss:.3f} |
| held-out perplexity per token | {model_perplexity:.2f} | {draft_perplexity:.2f} |
| held-out bits per byte | {model_bits_per_byte:.3f} | {draft_bits_per_byte:.3f} |
| held-out tokens guessed right | {model_accuracy:.1%} | {draft_accuracy:.1%} |

The draft's greedy token is the model's on **{agreement:.1%}** of the held-out tokens, and on {continuation_agreement:.1%}
of the tokens that the model itself writes by greedy search (128 tokens after each of {prompts} prompts
of 64 held-out tokens). Everything is measured on the shipped files, in rows of {positions:,} tokens.

**Text.** The `.py` files of Python {python}'s standard library without `encodings` and `pydoc_data`: {train_files} files of
the library, {train_bytes:.1f} MB, {train_tokens:,} tokens; and {other_files} files of its tests and of `idlelib`, {other_bytes:.1f} MB,
{other_tokens:,} tokens, which are read a third as often. {n_repeated} files are left out, since more than {most_repeated:.0%} of their
blocks of {block_lines} lines are in other files or held out. One file of the library in {held_out_one_in}, chosen by a checksum of
its name, is held out: {held_out_files} files, {held_out_tokens:,} tokens.

**Tokenizer.** Byte-level BPE with {vocab_size:,} tokens, {bytes_per_token:.2f} bytes per token on held-out text.
`{end}` (id 0) begins and ends a file, `{pad}` (id 1) pads on the left. A newline is always a token of its own.

**Training.** Muon for the layers' matrices, AdamW for embeddings and norms, with a linear warmup, a constant learning rate and a linear fall over the last {fall_share:.0%} of the
steps; bfloat16 arithmetic on float32 weights; rows of {length} tokens and, in the last {long_share:.0%} of the steps, of
{long_length:,}. The draft learns from the model's distribution (weight {teacher_weight:.1f}) and from the text ({data_weight:.1f}).
At the end, the last norm is scaled by {model_scale} (draft: {draft_scale}), which makes the probabilities right and leaves the order
of the tokens: the factor of least loss on every second row of the held-out text. On the other rows, the perplexity is {other_half_perplexity:.2f}.
Seeds, order and thread count are fixed: the same Python, torch ({torch}) and processor give the same files.

**A completion**, greedy; the prompt ends with `getopt.getopt(`:

```python
{sample}
```

**Repetition.** Greedy decoding of such a small model falls into loops. `hfgen generate` therefore adds
`frequency_penalty=0.3`, `dry_multiplier=0.8`, `dry_allowed_length=3`, `dry_sequence_breakers=[]`, unless an option
says more than where to stop and what to show. Over 64 new tokens after each of 20 short prompts, 2% of the sequences of 6
tokens occurred before, against 35% of plain greedy decoding; 10 of the 20 texts can be parsed, against 7 (last line left out).
The generation config of the model has no such values: a call from Python is plain.

**Licence.** The training text is the Python standard library's source, under the Python Software Foundation License
(`LICENSE-PSF.txt`); that licence goes with these files.
"""


def main(
    steps: Annotated[int, typer.Option(help="Training steps of the model.")] = 5600,
    draft_steps: Annotated[int, typer.Option(help="Training steps of the draft.")] = 3000,
    threads: Annotated[
        int, typer.Option(help="Threads of torch; part of what fixes the result.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder that gets tokenizer, models and card.")] = OUT,
    state: Annotated[Path, typer.Option(help="Folder for what a later --resume needs.")] = STATE,
    resume: Annotated[bool, typer.Option(help="Carry on where an earlier run stopped.")] = False,
) -> None:
    """Train the built-in model and its draft, measure them on held-out files and write the model card."""
    torch.set_num_threads(threads)
    disable_progress_bar()
    state.mkdir(parents=True, exist_ok=True)
    if not resume:
        for name in ("model", "draft"):
            (state / f"{name}.pt").unlink(missing_ok=True)

    texts = read_texts()
    tokenizer = train_tokenizer(texts.vocabulary)
    tokenizer.save_pretrained(out / "tokenizer")
    library, other = to_stream(tokenizer, texts.stdlib), to_stream(tokenizer, texts.other)
    streams = [*[library] * LIBRARY_COPIES, other]

    model, draft = new_model(MODEL, tokenizer), new_model(DRAFT, tokenizer)
    recipe = Recipe(steps=steps, rate=RATE)
    train("model", model, streams, recipe, out / "model", state / "model.pt")
    draft_recipe = Recipe(steps=draft_steps, rate=DRAFT_RATE)
    train("draft", draft, streams, draft_recipe, out / "draft", state / "draft.pt", teacher=model)

    scales = {}
    for name, each in (("model", model), ("draft", draft)):
        scales[f"{name}_scale"] = calibrate(each, held_out_rows(tokenizer, texts.held_out)[::2])
        save_model(each, out / name)

    numbers = measure(out, tokenizer, texts.held_out)
    print_json(data=numbers)
    card = CARD.format(
        **numbers,
        **scales,
        **asdict(recipe),
        draft_steps=draft_steps,
        model_shape="{num_hidden_layers}, {hidden_size}, {intermediate_size}".format(**MODEL),
        draft_shape="{num_hidden_layers}, {hidden_size}, {intermediate_size}".format(**DRAFT),
        model_heads="{num_attention_heads} ({num_key_value_heads})".format(**MODEL),
        draft_heads="{num_attention_heads} ({num_key_value_heads})".format(**DRAFT),
        model_megabytes=(out / "model" / "model.safetensors").stat().st_size / 1e6,
        draft_megabytes=(out / "draft" / "model.safetensors").stat().st_size / 1e6,
        teacher_weight=1 - recipe.data_weight,
        positions=POSITIONS,
        train_files=len(texts.stdlib),
        train_bytes=megabytes(texts.stdlib),
        train_tokens=len(library),
        other_files=len(texts.other),
        other_bytes=megabytes(texts.other),
        other_tokens=len(other),
        n_repeated=texts.n_repeated,
        most_repeated=MOST_REPEATED,
        block_lines=BLOCK_LINES,
        held_out_files=len(texts.held_out),
        held_out_one_in=HELD_OUT_ONE_IN,
        vocab_size=VOCAB_SIZE,
        end=END,
        pad=PAD,
        python=platform.python_version(),
        torch=torch.__version__,
        sample=sample(out, tokenizer),
    )
    (out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
