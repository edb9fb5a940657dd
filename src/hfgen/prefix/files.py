"""Stored prefixes as a safetensors file, and back.

One tensor ``<node>.tokens`` and, per layer, ``<node>.<i>`` for keys and values. The metadata says
which model they are of (``fingerprint.content``), and of each node: its parent, where the first token
sits, when it was used, and a checksum of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import fingerprint
from .radix import Forest, Node, new_root

#: For each position of the first token: the nodes of its tree, parents before their children.
Trees = list[tuple[Hashable, list[Node]]]

#: Of files of this kind.
FORMAT = "hfgen prefixes 1"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the metadata says of a node. ``parent``: its index, -1 for none.

    ``offset``: position of the first token, ``["column", n]`` where a model counts none.
    """

    parent: int
    offset: int | list
    used: int
    n_states: int
    n_bytes: int
    checksum: str


class NotAPrefixFile(ValueError):
    """A file that is damaged, or that something else wrote."""

    def __init__(self, path: Any, reason: str) -> None:
        super().__init__(f"{os.fspath(path)!r} cannot be loaded as stored prefixes: {reason}.")


@torch.no_grad()
def save(trees: Trees, path: str | os.PathLike[str], model: Any) -> None:
    """Write the trees of ``model``, as it is now."""
    content = fingerprint.content(model)
    entries: list[Entry] = []
    tensors: dict[str, Tensor] = {}
    for offset, nodes in trees:
        indices: dict[Node, int] = {}
        for node in nodes:
            indices[node] = index = len(entries)
            parent = indices.get(node.parent, -1) if node.parent is not None else -1
            own = {f"{index}.tokens": node.tokens}
            own |= {f"{index}.{i}": states for i, states in enumerate(node.states)}
            place: Any = list(offset) if isinstance(offset, tuple) else offset
            sizes = len(node.states), node.n_bytes
            entries.append(Entry(parent, place, node.used, *sizes, _checksum(own.values())))
            tensors |= own
    metadata = {
        "format": FORMAT,
        "content": json.dumps(content),
        "nodes": json.dumps([asdict(entry) for entry in entries]),
    }
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


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
            identity = fingerprint.identity(model)
            nodes: dict[int, Node] = {}
            for index in _kept(entries, forest.max_bytes):
                entry = entries[index]
                node = _read_node(path, file, index, entry, model.device)
                parent = nodes.get(entry.parent)
                if parent is None:
                    place = tuple(entry.offset) if isinstance(entry.offset, list) else entry.offset
                    parent = forest.roots.setdefault((identity, place), new_root())
                nodes[index] = node
                forest.attach(parent, node)
            forest.clock = max((entry.used for entry in entries), default=0)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise NotAPrefixFile(path, f"it is damaged, or no safetensors file ({error})") from error


def _read_metadata(path: Any, metadata: dict[str, str], model: Any) -> list[Entry]:
    if metadata.get("format") != FORMAT:
        raise NotAPrefixFile(
            path, f"its format is {metadata.get('format')!r}, not {FORMAT!r} of PrefixCache.save()"
        )
    theirs, ours = json.loads(metadata["content"]), fingerprint.content(model)
    other = [name for name, value in ours.items() if theirs.get(name) != value]
    if other:
        pairs = ", ".join(f"{name} {theirs.get(name)!r}, not {ours[name]!r}" for name in other)
        raise ValueError(
            f"{os.fspath(path)!r} has prefixes of another model, or of this one as it was: {pairs}."
        )
    entries = [Entry(**entry) for entry in json.loads(metadata["nodes"])]
    if any(not -1 <= entry.parent < index for index, entry in enumerate(entries)):
        raise NotAPrefixFile(path, "its nodes are in no order")
    return entries


def _kept(entries: list[Entry], max_bytes: int) -> list[int]:
    """The most recently used nodes that fit, each behind its parent."""
    kept: set[int] = set()
    n_bytes = 0
    for index in sorted(range(len(entries)), key=lambda i: (-entries[i].used, i)):
        entry = entries[index]
        has_parent = entry.parent == -1 or entry.parent in kept
        if has_parent and n_bytes + entry.n_bytes <= max_bytes:
            kept.add(index)
            n_bytes += entry.n_bytes
    return sorted(kept)


def _read_node(path: Any, file: Any, index: int, entry: Entry, device: torch.device) -> Node:
    own = [file.get_tensor(f"{index}.{name}") for name in ("tokens", *range(entry.n_states))]
    if _checksum(own) != entry.checksum:
        raise NotAPrefixFile(path, f"the states of node {index} are not those that were saved")
    tokens, *states = own
    node = Node(tokens, tuple(s.to(device) for s in states), used=entry.used)
    if node.n_bytes != entry.n_bytes:
        raise NotAPrefixFile(path, f"node {index} does not have the size that was saved")
    return node


def _checksum(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(fingerprint.bytes_of(tensor))
    return digest.hexdigest()
