"""Constraints of constrained beam search: words and phrases that the output must contain.

``force_words_ids`` takes phrases as token ids, or lists of phrases of which one suffices.
``constraints`` takes objects, of the classes here or of your own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import permutations
from typing import Any

from transformers import GenerationConfig

from ..settings.kinds import tokens_in


class Constraint(ABC):
    """Something that is met at some time if each generated token is one of ``advance()``; subclass it for your own."""

    def __init__(self) -> None:
        self.test()

    def test(self) -> None:
        """Raise ``ValueError`` if generating tokens of ``advance()`` does not meet the constraint."""
        check_can_be_met(self)
        self.reset()

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """The token, or the tokens, that would bring the constraint one step further."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Whether ``token_id`` would."""

    @abstractmethod
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a generated token into account: has it advanced, completed, reset the constraint?"""

    @abstractmethod
    def reset(self) -> None:
        """Forget what has been generated."""

    @abstractmethod
    def remaining(self) -> int:
        """How many tokens are missing, at most."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """The same constraint, with what has been generated if ``stateful``, anew otherwise."""


class _Words(Constraint):
    """One of several words has to be generated without a gap."""

    def __init__(self, words: list[list[int]]) -> None:
        self.trie: dict[int, Any] = {}
        for word in words:
            node = self.trie
            for token in word:
                node = node.setdefault(token, {})
        self.seqlen = max(map(len, words))
        self.reset()

    @property
    def shortest(self) -> int:
        """How many tokens are missing, at least."""
        return _height(self._node)

    def reset(self) -> None:
        self.current_seq: list[int] = []
        self._node = self.trie
        self.completed = False

    def does_advance(self, token_id: int) -> bool:
        if not isinstance(token_id, int):
            raise TypeError(f"`token_id` has to be an int, but is {token_id!r}.")
        return token_id in self._node

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        if not self.does_advance(token_id):
            self.reset()
            return False, False, True
        self.current_seq = [*self.current_seq, token_id]
        self._node = self._node[token_id]
        self.completed = not self._node
        return True, self.completed, False

    def remaining(self) -> int:
        return 0 if self.completed else self.seqlen - len(self.current_seq)

    def copy(self, stateful: bool = False) -> _Words:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)  # nothing in it is ever changed in place
        if not stateful:
            new.reset()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> _Words:
        return self.copy(stateful=True)


class PhrasalConstraint(_Words):
    """The tokens ``token_ids`` have to be generated, one after the other without a gap."""

    def __init__(self, token_ids: list[int]) -> None:
        if not _is_word(token_ids):
            raise ValueError(f"`token_ids` has to be a non-empty list of ids; it is {token_ids!r}.")
        self.token_ids = token_ids
        super().__init__([token_ids])

    def advance(self) -> int | None:
        return next(iter(self._node), None)


class DisjunctiveConstraint(_Words):
    """One of the words of ``nested_token_ids`` has to be generated; none may begin another."""

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        self.token_ids = words = nested_token_ids
        if not _are_words(words):
            raise ValueError(
                f"`nested_token_ids` has to be a non-empty list of words, lists of token ids; it is {words!r}."
            )
        super().__init__(words)
        if any(longer[: len(word)] == word for word, longer in permutations(words, 2)):
            raise ValueError(
                f"A word of `nested_token_ids` begins another, or is there twice: {words!r}. Drop the longer one."
            )

    def advance(self) -> list[int] | None:
        return list(self._node) or None


def _is_word(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(type(token) is int and token >= 0 for token in value)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_word, value))


def _height(node: dict[int, Any]) -> int:
    """Tokens to the nearest leaf."""
    return 1 + min(map(_height, node.values())) if node else 0


def wanted(constraint: Any) -> list[int]:
    """The tokens that bring ``constraint`` one step further."""
    if (tokens := constraint.advance()) is None:
        return []
    return [int(token) for token in tokens] if isinstance(tokens, Iterable) else [int(tokens)]


def check_can_be_met(constraint: Any) -> None:
    """Generate tokens of ``constraint.advance()``; raise ``ValueError`` if that does not meet it."""
    name, limit = type(constraint).__name__, 10_000
    for _ in range(limit):
        if not (tokens := wanted(constraint)):
            raise ValueError(f"{name} is not met, but its advance() names no token.")
        if not constraint.does_advance(tokens[0]):
            raise ValueError(f"{name} names the token {tokens[0]}, but does_advance() denies it.")
        if constraint.update(tokens[0])[1]:  # met
            break
    else:
        raise ValueError(f"{name} is not met after {limit} tokens of its advance().")
    if constraint.remaining() != 0:
        raise ValueError(f"{name} is met, but its remaining() is {constraint.remaining()}, not 0.")


def tokens_of(constraint: Any) -> list[int]:
    """The tokens that ``constraint`` may ask for, as far as is known before it is advanced."""
    words = getattr(constraint, "token_ids", None)
    return list(tokens_in(words)) if isinstance(words, list) else wanted(constraint)


def n_tokens(constraint: Any) -> int:
    """How many tokens it takes to meet ``constraint``, at least as far as is known."""
    shortest = getattr(constraint, "shortest", None)
    return int(constraint.remaining() if shortest is None else shortest)


def of_config(config: GenerationConfig) -> list[Any]:
    """The constraints of a call, as if nothing were generated; ``ValueError`` or ``TypeError`` for what is none."""
    passed = [] if config.constraints is None else config.constraints
    if not isinstance(passed, list | tuple):
        raise TypeError(f"`constraints` has to be a list of constraints, but is {passed!r}.")
    for constraint in passed:
        methods = ("advance", "does_advance", "update", "remaining", "copy")
        if lacks := [name for name in methods if not callable(getattr(constraint, name, None))]:
            raise TypeError(
                f"`constraints` has to hold objects like hfgen.Constraint, but {constraint!r} has no "
                f"{', '.join(name + '()' for name in lacks)}."
            )
        if not isinstance(constraint, _Words):
            check_can_be_met(constraint.copy(stateful=False))
    built = [constraint.copy(stateful=False) for constraint in passed]
    if (words := config.force_words_ids) is not None:
        is_list = isinstance(words, list) and len(words) > 0
        if not is_list or not all(_is_word(word) or _are_words(word) for word in words):
            raise ValueError(
                "`force_words_ids` has to be a non-empty list of phrases, each a non-empty list of token "
                f"ids (or of such lists, of which one suffices), but is {words!r}."
            )
        built += [PhrasalConstraint(w) if _is_word(w) else DisjunctiveConstraint(w) for w in words]
    if not built:
        raise ValueError("`constraints` is an empty list. Leave it out to search without any.")
    return built


def check_room(config: GenerationConfig, n_new: int) -> None:
    """Raise ``ValueError`` if the constraints take more than the ``n_new`` tokens to come."""
    needed = sum(map(n_tokens, of_config(config)))
    room = n_new - (config.forced_eos_token_id is not None)
    if needed > room:
        last = "" if room == n_new else ", one of which is `forced_eos_token_id`"
        raise ValueError(
            f"The constraints take at least {needed} tokens, but at most {n_new} are to be "
            f"generated{last}. Raise `max_new_tokens`."
        )
