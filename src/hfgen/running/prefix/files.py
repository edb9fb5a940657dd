"""Saving stored prefixes to a safetensors file, and loading them.

One tensor ``<node>.tokens`` and, per layer, ``<node>.<i>`` for keys and values. The metadata names the
model (``fingerprint.content``), the parent of each node (its index, or -1 and an offset), and checksums,
which ``load`` verifies: of the metadata, and of the tensors of each node.
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
from .padding import Offset
from .radix import Forest, Node

FORMAT = "hfgen prefixes 2"

#: A node, its parent, and where the first token of its tree is (``padding.Offset``).
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
        indices[node], above = index, indices.get(parent, -1)
        held = {"tokens": node.tokens} | {str(i): states for i, states in enumerate(node.states)}
        tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
        place = {"parent": above, "offset": list(offset) if above == -1 else None}
        entries.append({**place, "checksum": fingerprint.digest(held)})
    texts = {
        "format": FORMAT,
        "content": json.dumps(content),
        "nodes": json.dumps(entries),
    }
    texts["checksum"] = fingerprint.digest_of_text(sorted(texts.items()))
    target = Path(path)
    # A folder of its own, since some versions of safetensors make files that others may read.
    with tempfile.TemporaryDirectory(".partial", f".{target.name}.", target.parent) as folder:
        partial = Path(folder) / "file"
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
            texts = file.metadata() or {}
            _check_metadata(path, texts, model)
            _read_nodes(forest, path, file, json.loads(texts["nodes"]), model)
    except (SafetensorError, KeyError, TypeError) as error:
        raise NotAPrefixFile(path, f"it is damaged, or no safetensors file ({error})") from error
    for node in list(forest.nodes):  # came with the most recently used first
        forest.nodes.move_to_end(node, last=False)


def _check_metadata(path: Any, texts: dict[str, str], model: Any) -> None:
    """Raise ``ValueError`` for another format, a wrong checksum, or prefixes of another model."""
    if texts.get("format") != FORMAT:
        reason = f"its format is {texts.get('format')!r}, not {FORMAT!r} of PrefixCache.save()"
        raise NotAPrefixFile(path, reason)
    if texts.pop("checksum", None) != fingerprint.digest_of_text(sorted(texts.items())):
        raise NotAPrefixFile(path, "its metadata are not those that were saved")
    saved, content = json.loads(texts["content"]), fingerprint.content(model)
    differences = ", ".join(
        f"{name} {saved.get(name)!r}, not {value!r}"
        for name, value in content.items()
        if saved.get(name) != value
    )
    if differences:
        raise ValueError(
            f"{os.fspath(path)!r} has prefixes of another model, or of this one as it was: "
            f"{differences}."
        )


def _read_nodes(
    forest: Forest, path: Any, file: Any, entries: list[dict[str, Any]], model: Any
) -> None:
    """Attach the nodes that fit, each after its parent; all checksums are verified."""
    n_tensors = len(file.keys()) // max(len(entries), 1)
    names = ["tokens", *map(str, range(n_tensors - 1))]
    identity = fingerprint.identity(model)
    nodes: dict[int, Node] = {}
    for index, entry in enumerate(entries):
        tensors = {name: file.get_tensor(f"{index}.{name}") for name in names}
        if fingerprint.digest(tensors) != entry["checksum"]:
            raise NotAPrefixFile(path, f"the states of node {index} are not those that were saved")
        tokens, *states = tensors.values()
        node = Node(tokens, tuple(s.to(model.device) for s in states))
        parent = nodes.get(entry["parent"])
        if parent is None and entry["parent"] != -1:
            continue  # its parent did not fit
        key = forest.nodes[parent] if parent is not None else (identity, tuple(entry["offset"]))
        if forest.n_bytes + node.n_bytes <= forest.max_bytes:
            nodes[index] = node
            forest.attach(key, parent, node)
