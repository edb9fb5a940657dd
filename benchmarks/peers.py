"""What a reader would use instead: one random Llama, greedy, by transformers, hfgen, llama.cpp, OpenVINO and CTranslate2.

``python -m benchmarks.peers`` writes ``peers.{md,json,png}``. It needs ``pip install 'hfgen[peers]'``; a library that
is not installed has no row. OpenVINO's models are exported beforehand, in an environment of their own (optimum-intel
needs an older transformers):

    python -m benchmarks.peers --folder DIR --only-files
    optimum-cli export openvino --model DIR/model --task text-generation-with-past --weight-format fp16 DIR/openvino-fp16

and the same with ``int8``. Each way has a process of its own, so that its peak memory is its own. The processes take
turns: only one computes at a time. Linux, for the memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hfgen
from benchmarks import models, output
from benchmarks.execution import as_checkpoint
from benchmarks.output import RESULTS, OutOption
from benchmarks.peer_ways import ROWS, WAYS, token_name
from benchmarks.plots import save, subplots
from benchmarks.side_by_side import Spread, machine, read_bandwidth

SUBJECTS = models.SUBJECTS | {"1b": models.random_1b}
#: Tokens of a prompt whose time is measured by itself.
PROMPT = 128
# --- files --------------------------------------------------------------------------------------


def write_files(subject: models.Subject, folder: Path) -> None:
    """The model for each library; values of bfloat16, which all but the 8 bit ones keep."""
    target = folder / "model"
    if not target.exists():
        model = as_checkpoint(subject).model.to(torch.bfloat16)
        model.save_pretrained(target)
        hfgen.builtin_model()[1].save_pretrained(target)  # OpenVINO wants a tokenizer
        model.float()
    if find_spec("gguf"):
        for kind in ("f16", "q8_0"):
            if not (folder / f"{kind}.gguf").exists():
                write_gguf(subject.model, folder / f"{kind}.gguf", kind)
    if find_spec("ctranslate2") and not (folder / "ctranslate2").exists():
        write_ctranslate2(subject.model, folder / "ctranslate2")


def write_gguf(model: Any, path: Path, kind: str) -> None:
    """For llama.cpp: a matrix in fp16 or Q8_0, the norms in float32, words without merges."""
    import gguf
    import numpy

    config = model.config
    matrix = gguf.GGMLQuantizationType[kind.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token_name(i) for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        values = weight.detach().float()
        if (n := heads.get(name.split(".")[-2])) is not None:  # its rotary pairs are neighbours
            values = values.view(n, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        array = values.contiguous().numpy()
        kept = matrix if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = array if array.ndim == 1 else gguf.quants.quantize(array, kept)
        writer.add_tensor(
            names.get_name(name, (".weight",)), numpy.ascontiguousarray(data), raw_dtype=kept
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ctranslate2(model: Any, folder: Path) -> None:
    """By the specification of a decoder: its converter reads checkpoints of transformers 4 alone."""
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config.num_hidden_layers,
        config.num_attention_heads,
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config.rope_parameters["rope_theta"],
        num_heads_kv=config.num_key_value_heads,
    )

    def values(module: Any) -> Any:
        return module.weight.detach().float().numpy()

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = values(model.model.embed_tokens)
    decoder.layer_norm.gamma = values(model.model.norm)
    decoder.projection.weight = values(model.lm_head)
    for to, layer in zip(decoder.layer, model.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        to.self_attention.layer_norm.gamma = values(layer.input_layernorm)
        to.self_attention.linear[0].weight = (
            torch.cat([part.weight for part in three]).detach().numpy()
        )
        to.self_attention.linear[1].weight = values(attention.o_proj)
        to.ffn.layer_norm.gamma = values(layer.post_attention_layernorm)
        to.ffn.linear_0.weight = values(mlp.gate_proj)
        to.ffn.linear_0_noact.weight = values(mlp.up_proj)
        to.ffn.linear_1.weight = values(mlp.down_proj)
    spec.config.bos_token, spec.config.eos_token = token_name(1), token_name(2)
    spec.config.unk_token, spec.config.layer_norm_epsilon = token_name(0), config.rms_norm_eps
    spec.register_vocabulary([token_name(i) for i in range(config.vocab_size)])
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))


# --- measuring ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """One way. By number of rows: seconds of calls of one token, and of ``new_tokens``; bytes at most."""

    way: str
    bits: int
    new_tokens: int
    first: dict[int, list[float]] = field(default_factory=dict)
    whole: dict[int, list[float]] = field(default_factory=dict)
    prompt: list[float] = field(
        default_factory=list
    )  # seconds of a call of one token after ``PROMPT``
    peak_bytes: int = 0
    held_bytes: int = 0  # after the last call
    equal: float = 0.0  # share of the tokens of one row that are transformers' in float32

    def steps(self, rows: int) -> list[float]:
        """Milliseconds of a step, round by round."""
        pairs = zip(self.whole[rows], self.first[rows], strict=True)
        return [1e3 * (whole - first) / (self.new_tokens - 1) for whole, first in pairs]


class Child:
    """A process that decodes in one way."""

    def __init__(self, way: str, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peer_ways", way, str(folder), str(threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print as well
                return json.loads(line)
        raise EOFError

    def close(self) -> None:
        self.process.communicate()


def missing(way: str, folder: Path) -> str | None:
    """Why a way has no row, or None."""
    for package in WAYS[way].needs:
        if find_spec(package) is None:
            return f"{package} is not installed"
    return None if (folder / WAYS[way].files).exists() else f"{WAYS[way].files} is not there"


def measure(
    vocab: int,
    folder: Path,
    ways: list[str],
    n_rounds: int,
    new_tokens: int,
    threads: int,
    absent: dict[str, str],
    prompt: int = PROMPT,
) -> list[Result]:
    """All ways by turns: a warm-up and ``n_rounds``. ``prompt``: its tokens where its time is measured.

    A way whose process ends is added to ``absent``.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(5, vocab, (max(ROWS), prompt), generator=generator)
    prompts = [row[: models.PROMPT_LENGTH] for row in drawn.tolist()]
    children = {way: Child(way, folder, threads) for way in ways}
    results = {way: Result(way, WAYS[way].bits, new_tokens) for way in ways}
    texts: dict[str, list[int]] = {}
    for turn in range(n_rounds + 1):
        for way, child in list(children.items()):
            try:
                texts[way] = ask(
                    child, results[way], prompts, drawn[:1].tolist(), is_warm_up=turn == 0
                )
            except (BrokenPipeError, EOFError):
                children.pop(way).close()
                absent[way] = f"its process ended with {child.process.returncode}"
                del results[way]
    reference = texts.get("transformers, float32")
    for way, child in children.items():
        child.close()
        if reference is not None:
            pairs = zip(texts[way], reference, strict=True)
            results[way].equal = sum(a == b for a, b in pairs) / new_tokens
    return list(results.values())


def ask(
    child: Child, result: Result, prompts: list[Any], long: list[Any], is_warm_up: bool
) -> list[int]:
    """One turn of a way, which ``result`` gets unless it is a warm-up; the tokens of the first row."""
    for rows in reversed(ROWS):
        first = child.ask(prompts=prompts[:rows], n=1)
        whole = child.ask(prompts=prompts[:rows], n=result.new_tokens)
        assert [len(row) for row in whole["tokens"]] == [result.new_tokens] * rows, whole
        if not is_warm_up:
            result.first.setdefault(rows, []).append(first["seconds"])
            result.whole.setdefault(rows, []).append(whole["seconds"])
    answer = child.ask(prompts=long, n=1)
    if not is_warm_up:
        result.prompt.append(answer["seconds"])
    result.peak_bytes, result.held_bytes = answer["peak"], answer["held"]
    return whole["tokens"][0]


# --- the report ---------------------------------------------------------------------------------


def report(
    results: list[Result],
    absent: dict[str, str],
    subject: models.Subject,
    bandwidth: float,
    facts: dict[str, Any],
) -> str:
    """The page."""
    size = subject.bytes_per_token // 4
    lines = [
        "# Beside what a reader would use instead",
        "",
        f"{subject.title}, {subject.n_parameters / 1e6:.4g}M parameters with values of bfloat16, greedy, prompts of "
        f"{models.PROMPT_LENGTH} tokens, {results[0].new_tokens} new ones. Each way has a process, and they take turns; medians "
        "with quartiles. *Step*: a call less a call of one token, by the steps between. *Floor*: the time to read the weights "
        "of so many bits once. *Prompt*: a call of one token after "
        f"{PROMPT}. *Memory*: of the process at the end, and the most, loading included. *Equal*: tokens that are those of transformers "
        "in float32; after one that differs, a row is another text.",
        "",
        f"{facts['processor']}, {facts['threads']} thread(s), load {facts['load']}; {bandwidth / 1e9:.1f} GB/s are read. "
        f"torch {facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}.",
        "",
        "| way | bits | 1 row, ms a step | of the floor | 8 rows, ms a step | prompt, ms | memory, MB: end · most | equal |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        one, eight = (Spread.of(result.steps(rows)) for rows in ROWS)
        floor = 1e3 * size * result.bits / 8 / bandwidth
        lines.append(
            f"| {result.way} | {result.bits} | {cell(one)} | {one.median / floor:.1f} | {cell(eight)} | "
            f"{cell(Spread.of([1e3 * s for s in result.prompt]))} | "
            f"{result.held_bytes / 1e6:,.0f} · {result.peak_bytes / 1e6:,.0f} | {result.equal:.0%} |"
        )
    floors = ", ".join(
        f"{bits} bits {1e3 * size * bits / 8 / bandwidth:.1f} ms" for bits in (32, 16, 8)
    )
    lines += ["", f"Floors: {floors}."]
    lines += [f"* Not measured: {way}: {why}." for way, why in absent.items()]
    return "\n".join(lines) + "\n"


def cell(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"


def results_in(raw: dict[str, Any]) -> list[Result]:
    """The results of ``peers.json``."""
    return [
        Result(**each | {n: {int(k): v for k, v in each[n].items()} for n in ("first", "whole")})
        for each in raw["results"]
    ]


#: What docs/optimize.md does not quote: variants of ways that it quotes.
UNQUOTED = (
    "CTranslate2, float32",
    "hfgen, float32",
    "hfgen.optimize, bfloat16 model",
    "hfgen.optimize, int8",
)


def block(raw: dict[str, Any]) -> str:
    """The table of docs/optimize.md."""
    lines = [
        "| way | 1 row, ms a step | 8 rows | prompt, ms | memory, MB |",
        "|---|--:|--:|--:|--:|",
    ]
    for result in results_in(raw):
        if result.way in UNQUOTED:
            continue
        one, eight = (Spread.of(result.steps(rows)).median for rows in ROWS)
        prompt = 1e3 * Spread.of(result.prompt).median
        lines.append(
            f"| {result.way} | {one:.1f} | {eight:.1f} | {prompt:.0f} | {result.held_bytes / 1e6:,.0f} |"
        )
    facts = raw["machine"]
    more = "All figures: [peers.md](benchmarks/results/peers.md)."
    return "\n".join([*lines, "", f"{facts['processor']}, {facts['threads']} thread(s). {more}"])


def plot(results: list[Result], path: Path) -> None:
    figure, panels = subplots(1, 2, figsize=(12, 0.8 + 0.35 * len(results)), layout="constrained")
    for panel, rows in zip(panels, ROWS, strict=True):
        names = [result.way for result in results]
        colours = ["tab:blue" if name.startswith("hfgen") else "0.6" for name in names]
        steps = [Spread.of(result.steps(rows)).median for result in results]
        panel.bar_label(panel.barh(names, steps, color=colours), fmt="%.1f", padding=3, fontsize=8)
        panel.margins(x=0.12)
        panel.invert_yaxis()
        panel.set_title(f"{rows} row(s)", fontsize=10)
        panel.set_xlabel("ms a step")
    save(figure, path, dpi=120)


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)}.")] = "135m",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of all ways.")] = 7,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each row.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Of each way.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Of the models' files, which stay.")] = None,
    only_files: Annotated[bool, typer.Option("--only-files", help="Write the files.")] = False,
    only: Annotated[
        str, typer.Option(help="Ways whose names contain one of these, which `;` separates.")
    ] = "",
    out: OutOption = RESULTS,
) -> None:
    """Measure a model by several libraries."""
    if model not in SUBJECTS:
        raise typer.BadParameter(f"{model!r}: choose from {', '.join(SUBJECTS)}")
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(threads)
        subject = SUBJECTS[model]()
        with contextlib.redirect_stdout(io.StringIO()):
            write_files(subject, folder)
        if only_files:
            return
        absent = {way: why for way in WAYS if (why := missing(way, folder)) is not None}
        ways = [
            way
            for way in WAYS
            if way not in absent and any(part in way for part in only.split(";"))
        ]
        facts, bandwidth = machine(), read_bandwidth()
        vocab = subject.model.config.vocab_size
        results = measure(vocab, folder, ways, rounds, new_tokens, threads, absent)
    text = report(results, absent, subject, bandwidth, facts)
    raw = {
        "machine": facts,
        "bandwidth": bandwidth,
        "bytes_per_bit": subject.bytes_per_token / 32,
        "absent": absent,
        "results": list(map(asdict, results)),
    }
    print(output.write(out, "peers", text, raw, lambda path: plot(results, path)))


if __name__ == "__main__":
    typer.run(main)
