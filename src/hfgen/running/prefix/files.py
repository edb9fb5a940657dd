"""Saving stored prefixes to a safetensors file, and loading them.

One tensor ``<node>.tokens`` and, per layer, ``<node>.<i>`` for keys and values. The metadata names the
model (``fingerprint.content``), each node's parent, and checksums. ``load`` verifies these, and the structure: anybody
can compute a checksum.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...memory import fingerprint
from .radix import Forest, Node, Offset

FORMAT = "hfgen prefixes 2"

#: A node, its parent, and where the first token of its tree is (``Offset``).
Placed = tuple[Node, Node | None, Offset]


class NotAPrefixFile(ValueError):
    """A file that is damaged, or that something else wrote."""

    def __init__(self, path: Any, reason: str) -> None:
        super().__init__(f"{os.fspath(path)!r} cannot be loaded as stored prefixes: {reason}.")


@torch.no_grad()
def save(nodes: Iterable[Placed], path: str | os.PathLike[str], content: dict[str, str]) -> None:
    """Write nodes of the model of ``content``: the most recently used first, parents before children."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    indices: dict[Node | None, int] = {}
    for index, (node, parent, offset) in enumerate(nodes):
        indices[node] = index
        of_node = {"tokens": node.tokens} | {str(i): states for i, states in enumerate(node.states)}
        tensors |= {f"{index}.{name}": tensor for name, tensor in of_node.items()}
        entry: dict[str, Any] = {"parent": indices.get(parent, -1), "offset": None}
        if entry["parent"] == -1:
            entry["offset"] = list(offset)
        entries.append(entry | {"checksum": fingerprint.digest(of_node)})
    texts = {"format": FORMAT, "content": json.dumps(content), "nodes": json.dumps(entries)}
    texts["checksum"] = fingerprint.digest_of_text(sorted(texts.items()))
    # Only this user may enter the folder.
    target = Path(path)
    with tempfile.TemporaryDirectory(".partial", f".{target.name}.", target.parent) as folder:
        partial = Path(folder, "file")
        save_file(tensors, partial, texts)
        with partial.open("rb+") as file:
            os.chmod(partial, 0o600)
            os.fsync(file.fileno())
        os.replace(partial, path)


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


def _read_metadata(path: Any, texts: dict[str, str], model: Any) -> list[dict[str, Any]]:
    """The entry of each node. Raises ``ValueError`` for damaged metadata, and for another model."""
    if texts.get("format") != FORMAT:
        reason = f"its format is {texts.get('format')!r}, not {FORMAT!r} of PrefixCache.save()"
        raise NotAPrefixFile(path, reason)
    if texts.pop("checksum", None) != fingerprint.digest_of_text(sorted(texts.items())):
        raise NotAPrefixFile(path, "its metadata are not those that were saved")
    saved, current = dict(json.loads(texts["content"])), fingerprint.content(model)
    differing = [name for name, value in current.items() if saved.get(name) != value]
    if differing:
        pairs = ", ".join(
            f"{name} {saved.get(name)!r}, not {current[name]!r}" for name in differing
        )
        raise ValueError(
            f"{os.fspath(path)!r} has prefixes of another model, or of this one as it was: {pairs}."
        )
    entries = list(json.loads(texts["nodes"]))
    for index, entry in enumerate(entries):
        parent, offset = entry["parent"], entry["offset"]
        is_root = parent == -1 and [type(part) for part in offset or ()] == [str, int]
        is_child = parent != -1 and offset is None
        is_placed = type(parent) is int and -1 <= parent < index and (is_root or is_child)
        if not is_placed or entry.keys() != {"parent", "offset", "checksum"}:
            raise NotAPrefixFile(path, f"node {index} cannot be placed in a tree ({entry})")
    return entries


def _read_nodes(
    forest: Forest, path: Any, file: Any, entries: list[dict[str, Any]], model: Any
) -> None:
    """Attach the nodes that fit, each after its parent; all are verified."""
    identity = fingerprint.identity(model)
    n_states = len(file.keys()) // max(len(entries), 1) - 1
    names = ["tokens", *map(str, range(n_states))]
    if sorted(file.keys()) != sorted(f"{i}.{name}" for i in range(len(entries)) for name in names):
        raise NotAPrefixFile(path, "its tensors are not those of its nodes")
    nodes: dict[int, Node] = {}
    expected = None
    for index, entry in enumerate(entries):
        of_node = {name: file.get_tensor(f"{index}.{name}") for name in names}
        if fingerprint.digest(of_node) != entry["checksum"]:
            raise NotAPrefixFile(path, f"the states of node {index} are not those that were saved")
        tokens, *states = of_node.values()
        n = len(tokens) if tokens.ndim == 1 and tokens.dtype == torch.long else 0
        layout = [(s.dtype, s.shape[::2]) for s in states]
        expected = expected or layout
        is_sound = all(s.ndim == 3 and s.shape[1] == n and s.is_floating_point() for s in states)
        if not n or not is_sound or layout != expected:
            raise NotAPrefixFile(path, f"node {index} does not have one state per token and layer")
        node = Node(tokens, tuple(s.to(model.device) for s in states))
        parent = nodes.get(entry["parent"])
        if parent is None and entry["parent"] != -1:
            continue  # its parent did not fit
        key = (identity, tuple(entry["offset"])) if parent is None else forest.nodes[parent]
        siblings = parent or forest.roots.get(key)
        if siblings is not None and int(tokens[0]) in siblings.children:
            raise NotAPrefixFile(path, f"node {index} begins as another one does")
        if forest.n_bytes + node.n_bytes <= forest.max_bytes:
            nodes[index] = node
            forest.attach(key, parent, node)
