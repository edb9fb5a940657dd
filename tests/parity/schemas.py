"""Random JSON schemas: nested objects and lists, choices, numbers with bounds, texts with patterns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

#: Patterns that texts of a few characters match.
PATTERNS = (
    r"^[a-z]{1,8}$",
    r"^[A-Z][a-z]{0,5} [0-9]{1,3}$",
    r"^(foo|bar|baz)(_(x|y))?$",
    r"^\d{4}-\d{2}$",
    r"^[^@\s]{1,6}@[a-z]{2,5}\.(com|org)$",
    r"^é+ñ?$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
NAMES = ("id", "name", "kind", "a long name", "größe", 'with "quotes"', "x", "tags", "n_items", "é")
VALUES = (None, True, False, 0, -3, 2.5, "", "yes", "no", 'a "b"', "ü", [1, 2], {"a": 1})


def draw(rng: random.Random) -> Schema:
    """An object, or now and then anything else."""
    make = _object if rng.random() < 0.7 else rng.choice(KINDS)
    schema = make(rng, 0)
    if rng.random() < 0.1:  # a tree, by reference to itself
        node = {
            "type": "object",
            "properties": {
                "value": _integer(rng, 3),
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = LEAVES if depth >= 3 else KINDS
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0 if depth else 1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        schema["additionalProperties"] = _integer(rng, depth)
    return schema


def _list(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(rng, depth + 1), "minItems": least}
    schema["maxItems"] = least + rng.randint(0, 3)
    if rng.random() < 0.2:
        first = [_any(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        size = len(first)
        return {"type": "array", "prefixItems": first, "items": False, "minItems": size}
    return schema


def _text(rng: random.Random, depth: int) -> Schema:
    chance = rng.random()
    if chance < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if chance < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 10)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-200, 200)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.2:
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    if rng.random() < 0.15:
        schema = {
            "type": "integer",
            "multipleOf": rng.choice((2, 3, 5)),
            "minimum": 0,
            "maximum": 99,
        }
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-5, 5), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((0.5, 1, 40.25))}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(VALUES)}


def _simple(rng: random.Random, depth: int) -> Schema:
    return rng.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


Make = Callable[[random.Random, int], Schema]
LEAVES: tuple[Make, ...] = (_text, _text, _integer, _number, _enum, _const, _simple)
KINDS: tuple[Make, ...] = (*LEAVES, _object, _object, _list, _list, _either)
