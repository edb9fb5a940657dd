"""Saving stored prefixes to a safetensors file, and loading them.

One tensor ``<node>.tokens`` and, per layer, ``<node>.<i>`` for keys and values. The metadata names the
model (``fingerprint.content``), each node's parent, and checksums. ``load`` checks the structure, too.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...memory import fingerprint
from ...memory.caches.dynamic import GrowingCache
from .padding import Offset
from .radix import Forest, Node
from .windows import attention_layers

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves behind stays
    fcntl = None  # type: ignore[assignment]

FORMAT = "hfgen prefixes 2"

#: A node, its parent, and where the first token of its tree is (``padding.Offset``).
Placed = tuple[Node, Node | None, Offset]


@dataclass(frozen=True, slots=True)
class Entry:
    """The metadata of a node: the index of its ``parent``, or -1 and an ``offset``."""

    parent: int
    offset: list | None
    checksum: str

    def is_valid(self, index: int) -> bool:
        """Whether fields are of their types, and the parent comes before the node ``index``."""
        types = [str, int] if self.parent == -1 else []
        is_placed = [type(part) for part in self.offset or ()] == types
        return type(self.parent) is int and -1 <= self.parent < index and is_placed


class NotAPrefixFile(ValueError):
    """A file that is damaged, or that something else wrote."""

    def __init__(self, path: Any, reason: str) -> None:
        super().__init__(f"{os.fspath(path)!r} cannot be loaded as stored prefixes: {reason}.")


@torch.no_grad()
def save(nodes: Iterable[Placed], path: str | os.PathLike[str], content: dict[str, str]) -> None:
    """Write nodes of the model of ``content``: the most recently used first, parents before children."""
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    indices: dict[Node | None, int] = {}
    for index, (node, parent, offset) in enumerate(nodes):
        indices[node], above = index, indices.get(parent, -1)
        of_node = {"tokens": node.tokens} | {str(i): states for i, states in enumerate(node.states)}
        tensors |= {f"{index}.{name}": tensor for name, tensor in of_node.items()}
        entries.append(
            Entry(above, list(offset) if above == -1 else None, fingerprint.digest(of_node))
        )
    texts = {
        "format": FORMAT,
        "content": json.dumps(content),
        "nodes": json.dumps([asdict(entry) for entry in entries]),
    }
    texts["checksum"] = fingerprint.digest_of_text(sorted(texts.items()))
    with _private_folder(Path(path)) as folder:
        partial = folder / "file"
        save_file(tensors, partial, texts)
        with partial.open("rb+") as file:
            os.chmod(partial, 0o600)
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextmanager
def _private_folder(target: Path) -> Iterator[Path]:
    """A locked folder beside ``target`` that only this user may enter; dead writers' are removed."""
    prefix, suffix = f".{target.name}.", ".partial"
    while True:
        folder = Path(tempfile.mkdtemp(suffix, prefix, target.parent))
        with suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(folder)  # unless another writer, who takes it for a dead one's, was faster
            break
    try:
        for other in target.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
            with suppress(OSError):
                if other != folder and (its_lock := _lock(other)) is not None:
                    shutil.rmtree(other, ignore_errors=True)
                    os.close(its_lock)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks ``folder`` until it is closed; ``None`` where folders have no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise
        return None
    return descriptor


@torch.no_grad()
def load(forest: Forest, path: str | os.PathLike[str], model: Any) -> None:
    """Put what ``save`` wrote into the empty ``forest``, the most recently used if not all fits."""
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"Prefixes cannot be loaded for a model on several devices ({sorted(map(str, devices))}): "
            "the file does not say which layer is where."
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r} with stored prefixes.")
    try:
        with safe_open(path, framework="pt") as file:
            entries = _read_metadata(path, file.metadata() or {}, model)
            _read_nodes(forest, path, file, entries, model)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise NotAPrefixFile(path, f"it is damaged, or no safetensors file ({error})") from error
    for node in list(forest.nodes):  # came with the most recently used first
        forest.nodes.move_to_end(node, last=False)


def _read_metadata(path: Any, texts: dict[str, str], model: Any) -> list[Entry]:
    if texts.get("format") != FORMAT:
        reason = f"its format is {texts.get('format')!r}, not {FORMAT!r} of PrefixCache.save()"
        raise NotAPrefixFile(path, reason)
    if texts.pop("checksum", None) != fingerprint.digest_of_text(sorted(texts.items())):
        raise NotAPrefixFile(path, "its metadata are not those that were saved")
    theirs, ours = dict(json.loads(texts["content"])), fingerprint.content(model)
    other = [name for name, value in ours.items() if theirs.get(name) != value]
    if other:
        pairs = ", ".join(f"{name} {theirs.get(name)!r}, not {ours[name]!r}" for name in other)
        raise ValueError(
            f"{os.fspath(path)!r} has prefixes of another model, or of this one as it was: {pairs}."
        )
    entries = [Entry(**entry) for entry in json.loads(texts["nodes"])]
    for index, entry in enumerate(entries):
        if not entry.is_valid(index):
            raise NotAPrefixFile(path, f"node {index} cannot be placed in a tree ({entry})")
    return entries


def _read_nodes(forest: Forest, path: Any, file: Any, entries: list[Entry], model: Any) -> None:
    """Attach the nodes that fit, each after its parent; all are checked."""
    cache = GrowingCache(config=model.config.get_text_config(decoder=True))
    names = ["tokens", *map(str, range(2 * len(attention_layers(cache))))]
    if sorted(file.keys()) != sorted(f"{i}.{name}" for i in range(len(entries)) for name in names):
        raise NotAPrefixFile(path, "its tensors are not those of its nodes and the model's layers")
    identity = fingerprint.identity(model)
    nodes: dict[int, Node] = {}
    expected = None
    for index, entry in enumerate(entries):
        of_node = {name: file.get_tensor(f"{index}.{name}") for name in names}
        if fingerprint.digest(of_node) != entry.checksum:
            raise NotAPrefixFile(path, f"the states of node {index} are not those that were saved")
        tokens, *states = of_node.values()
        n = len(tokens) if tokens.ndim == 1 and tokens.dtype == torch.long else 0
        layout = [(s.dtype, s.shape[::2]) for s in states]
        expected = expected or layout
        is_sound = all(s.ndim == 3 and s.shape[1] == n and s.is_floating_point() for s in states)
        if not n or not is_sound or layout != expected:
            raise NotAPrefixFile(path, f"node {index} does not have one state per token and layer")
        node = Node(tokens, tuple(s.to(model.device) for s in states))
        if (parent := nodes.get(entry.parent)) is None and entry.parent != -1:
            continue  # its parent did not fit
        key = (identity, tuple(entry.offset)) if entry.offset else forest.nodes[parent]  # type: ignore[index]
        siblings = parent or forest.roots.get(key)
        if siblings is not None and int(tokens[0]) in siblings.children:
            raise NotAPrefixFile(path, f"node {index} begins as another one does")
        if forest.n_bytes + node.n_bytes <= forest.max_bytes:
            nodes[index] = node
            forest.attach(key, parent, node)
