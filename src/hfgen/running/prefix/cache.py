"""``PrefixCache``: keys and values of prompts, kept across calls, and their safetensors files.

A file has one tensor ``<node>.tokens`` and, per layer, ``<node>.<i>`` for keys and values. The metadata names the model
(``fingerprint.content``), each node's parent, and checksums. ``load`` verifies these, and the structure: anybody can
compute a checksum.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

from ... import families
from ...families import CACHE
from ...memory import fingerprint
from ...settings.kinds import check_integer
from .radix import Forest, KeyValues, Match, Node

FORMAT = "hfgen prefixes 2"
#: Errors while a damaged file is read.
DAMAGE = (SafetensorError, json.JSONDecodeError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a ``PrefixCache`` did since it was made, and what it holds.

    ``lookups`` and ``tokens`` count prompts and their tokens; ``hits`` and ``tokens_saved``, what was
    reused. ``bytes`` and ``sequences`` (which no other continues) are held now; ``evictions`` counts
    runs of tokens. ``bypassed``: calls by the reason why they used no stored prefixes.
    """

    lookups: int
    hits: int
    tokens: int
    tokens_saved: int
    bytes: int
    sequences: int
    evictions: int
    bypassed: Mapping[str, int]


class PrefixCache:
    """Keys and values of prompts, for later calls whose prompts begin alike.

    Pass it to ``generate(prefix_cache=…)``, or set it once as ``model.prefix_cache``. Models and
    threads may share one. ``max_bytes`` limits keys, values and tokens; the least recently used go
    first. Raises ``TypeError`` or ``ValueError`` if it is no positive integer.
    """

    def __init__(self, max_bytes: int = 2 * 1024**3) -> None:
        check_integer(max_bytes, "max_bytes", 1)
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._forest = Forest(max_bytes)
        self._counts = dict.fromkeys(("lookups", "hits", "tokens", "tokens_saved"), 0)
        self._bypassed: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"PrefixCache(max_bytes={self.max_bytes}, bytes={self._forest.n_bytes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixCache:
        return self  # copies of a model may share it: their states have other keys

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[int]]:
        return PrefixCache, (self.max_bytes,)  # empty: in another process the keys say nothing

    @property
    def stats(self) -> PrefixStats:
        """Counts so far; a snapshot."""
        with self._lock:
            return PrefixStats(
                **self._counts,
                bytes=self._forest.n_bytes,
                sequences=sum(not node.children for node in self._forest.nodes),
                evictions=self._forest.n_evicted,
                bypassed=MappingProxyType(dict(self._bypassed)),
            )

    def clear(self) -> None:
        """Remove all prefixes; the counts stay."""
        with self._lock:
            self._forest = Forest(self.max_bytes, self._forest.n_evicted)

    def _match(self, keys: Sequence[Hashable], rows: Sequence[Tensor]) -> list[Match]:
        with self._lock:
            return [self._forest.match(key, row) for key, row in zip(keys, rows, strict=True)]

    def _insert(self, key: Hashable, tokens: Tensor, states: KeyValues) -> None:
        with self._lock:
            forest, self._forest = self._forest, Forest(self.max_bytes, self._forest.n_evicted)
            forest.insert(key, tokens, states)  # if that is interrupted, there may be half a node
            self._forest = forest

    def _count(self, rows: Sequence[Tensor], saved: Sequence[int]) -> None:
        """Count the prompts of a call, and how many tokens of each are not forwarded."""
        with self._lock:
            self._counts["lookups"] += len(rows)
            self._counts["hits"] += sum(n > 0 for n in saved)
            self._counts["tokens"] += sum(len(row) + 1 for row in rows)
            self._counts["tokens_saved"] += sum(max(n, 0) for n in saved)

    def _bypass(self, reason: str) -> None:
        with self._lock:
            self._bypassed[reason] += 1

    # ---------------------------------------------------------------- files

    @torch.no_grad()
    def save(self, path: str | os.PathLike[str], model: Any) -> None:
        """Write the prefixes of ``model``, as it is now, to a safetensors file.

        An existing file is replaced when the new one is complete; only this user may read it. Raises
        ``ValueError`` if the model has forward hooks or offloaded weights, which no file can tell.
        """
        content, identity = fingerprint.content(model), fingerprint.identity(model)
        with self._lock:  # splitting a node changes the parents of others
            items = reversed(self._forest.nodes.items())  # parents before children
            nodes = [(node, node.parent, key[1]) for node, key in items if key[0] == identity]
        entries: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        indices: dict[Node | None, int] = {}
        for index, (node, parent, offset) in enumerate(nodes):
            indices[node] = index
            of_node = {"tokens": node.tokens, **{str(i): s for i, s in enumerate(node.states)}}
            tensors |= {f"{index}.{name}": tensor for name, tensor in of_node.items()}
            above = indices.get(parent, -1)
            place = {"parent": above, "offset": list(offset) if above == -1 else None}
            entries.append({**place, "checksum": fingerprint.digest(of_node)})
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

    @classmethod
    @torch.no_grad()
    def load(
        cls, path: str | os.PathLike[str], model: Any, max_bytes: int = 2 * 1024**3
    ) -> PrefixCache:
        """Read a file of ``save``; if it is larger than ``max_bytes``, the most recently used prefixes.

        Raises ``FileNotFoundError``, or ``ValueError`` for a file that is damaged, not of ``save``,
        or of another model: other weights, config, dtype, adapters or kernels.
        """
        prefixes = cls(max_bytes)
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
                _read_nodes(prefixes._forest, path, file, entries, model)
        except DAMAGE as error:
            raise _unusable(path, f"it is damaged, or no safetensors file ({error})") from error
        for node in list(prefixes._forest.nodes):  # came with the most recently used first
            prefixes._forest.nodes.move_to_end(node, last=False)
        return prefixes


def _unusable(path: Any, reason: str) -> ValueError:
    """The error of a file that is damaged, or that something else wrote."""
    return ValueError(f"{os.fspath(path)!r} cannot be loaded as stored prefixes: {reason}.")


def _read_metadata(path: Any, texts: dict[str, str], model: Any) -> list[dict[str, Any]]:
    """The entry of each node. Raises ``ValueError`` for damaged metadata, and for another model."""
    if texts.get("format") != FORMAT:
        reason = f"its format is {texts.get('format')!r}, not {FORMAT!r} of PrefixCache.save()"
        raise _unusable(path, reason)
    if texts.pop("checksum", None) != fingerprint.digest_of_text(sorted(texts.items())):
        raise _unusable(path, "its metadata are not those that were saved")
    saved, current = dict(json.loads(texts["content"])), fingerprint.content(model)
    differing = {name: value for name, value in current.items() if saved.get(name) != value}
    if differing:
        pairs = ", ".join(f"{n} {saved.get(n)!r}, not {value!r}" for n, value in differing.items())
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
            raise _unusable(path, f"node {index} cannot be placed in a tree ({entry})")
    return entries


def _layout(model: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """The dtypes of the model's keys and values, and their heads and sizes; forwards a token."""
    media, cache = families.placeholder_tokens(model), DynamicCache(config=model.config)
    token = min({*range(len(media) + 1)} - {*media})
    ids = torch.full((1, 1), token, device=families.device_of(model))
    model(input_ids=ids, **{CACHE: cache}, use_cache=True, return_dict=True)
    layers = [layer for layer in cache.layers if not isinstance(layer, families.EMPTY_LAYERS)]
    return [(s.dtype, s.shape[1::2]) for layer in layers for s in (layer.keys, layer.values)]


def _read_nodes(forest: Forest, path: Any, file: Any, entries: list[Any], model: Any) -> None:
    """Attach the nodes that fit, each after its parent; all are verified."""
    identity = fingerprint.identity(model)
    n_states = len(file.keys()) // max(len(entries), 1) - 1
    names = ["tokens", *map(str, range(n_states))]
    if sorted(file.keys()) != sorted(f"{i}.{name}" for i in range(len(entries)) for name in names):
        raise _unusable(path, "its tensors are not those of its nodes")
    nodes: dict[int, Node] = {}
    expected = _layout(model) if entries else []
    for index, entry in enumerate(entries):
        # Copies: those of safetensors are the file's pages, which change with it after all checks.
        of_node = {name: file.get_tensor(f"{index}.{name}").clone() for name in names}
        if fingerprint.digest(of_node) != entry["checksum"]:
            raise _unusable(path, f"the states of node {index} are not those that were saved")
        tokens, *states = of_node.values()
        n = len(tokens) if tokens.ndim == 1 and tokens.dtype == torch.long else 0
        layout = [(s.dtype, s.shape[::2]) for s in states]
        is_sound = all(s.ndim == 3 and s.shape[1] == n and s.is_floating_point() for s in states)
        if not n or not is_sound or layout != expected:
            raise _unusable(path, f"node {index} does not have states of the model's shape")
        node = Node(tokens, tuple(s.to(model.device) for s in states))
        parent = nodes.get(entry["parent"])
        if parent is None and entry["parent"] != -1:
            continue  # its parent did not fit
        key = (identity, tuple(entry["offset"])) if parent is None else forest.nodes[parent]
        siblings = parent or forest.roots.get(key)
        if siblings is not None and int(tokens[0]) in siblings.children:
            raise _unusable(path, f"node {index} begins as another one does")
        if forest.n_bytes + node.n_bytes <= forest.max_bytes:
            nodes[index] = node
            forest.attach(key, parent, node)
