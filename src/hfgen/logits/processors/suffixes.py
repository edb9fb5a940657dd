"""The suffix automaton of a row: which tokens followed earlier occurrences of its last tokens."""

from __future__ import annotations

from typing import Any

_ROOT = 0


class SuffixAutomaton:
    """Finds which tokens would continue a repeat, in about constant time per token.

    Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for
    substrings that end at the same places; ``lengths`` has the length of the longest of them. Its link leads
    to the state of the longest suffix that also ends elsewhere. ``pop`` takes a ``push`` back.

    Repeats of fewer than ``least`` tokens, at least 1, do not count.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.lengths, self.links = [0], [-1]
        self.next: list[dict[int, int]] = [{}]
        #: The state of all tokens so far.
        self.whole = _ROOT
        #: The state of the last ``least`` tokens, or of all if there are fewer.
        self.shortest = _ROOT
        #: The changes of each push, for ``pop``.
        self._log: list[tuple[Any, ...]] = []

    def push(self, token: int) -> None:
        lengths, links, following = self.lengths, self.links, self.next
        n_states, before, shortest = len(lengths), self.whole, self.shortest
        new = n_states
        lengths.append(lengths[before] + 1)
        links.append(_ROOT)
        following.append({})
        added, moved = [], []
        state = before
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            added.append(state)
            state = links[state]
        target, old_link = -1, -1
        if state >= 0:
            target = following[state][token]
            if lengths[target] == lengths[state] + 1:
                links[new] = target
                target = -1
            else:
                copy = len(lengths)
                lengths.append(lengths[state] + 1)
                links.append(links[target])
                following.append(following[target].copy())
                old_link = links[target]
                links[target] = links[new] = copy
                while state >= 0 and following[state].get(token) == target:
                    following[state][token] = copy
                    moved.append(state)
                    state = links[state]
        self.whole = new
        self._log.append((n_states, before, shortest, token, added, moved, target, old_link))
        # A copy may have taken the shorter substrings over.
        self.shortest = self._shortened(following[self._shortened(shortest)][token])

    def _shortened(self, state: int) -> int:
        """The state of the last ``least`` of the tokens that ``state`` stands for."""
        while state != _ROOT and self.lengths[self.links[state]] >= self.least:
            state = self.links[state]
        return state

    def pop(self) -> None:
        """Take the last ``push`` back."""
        n_states, self.whole, self.shortest, token, added, moved, target, link = self._log.pop()
        for state in moved:
            self.next[state][token] = target
        if target >= 0:
            self.links[target] = link
        for state in added:
            del self.next[state][token]
        del self.lengths[n_states:], self.links[n_states:], self.next[n_states:]

    def repeats(self) -> dict[int, int]:
        """Tokens that followed the last ``n >= least`` tokens when they occurred before, and the largest ``n``."""
        state = self.links[self.whole]
        longest: dict[int, int] = {}
        if state < 0 or self.lengths[state] < self.least:
            return longest
        n_all = len(self.next[self.shortest])
        while len(longest) < n_all:
            # All that follows a state follows its suffixes, too: equal numbers are equal tokens.
            if len(self.next[state]) > len(longest):
                for token in self.next[state]:
                    longest.setdefault(token, self.lengths[state])
            state = self.links[state]
        return longest

    def copy(self) -> SuffixAutomaton:
        other = SuffixAutomaton(self.least)
        other.lengths, other.links = self.lengths.copy(), self.links.copy()
        other.next = [following.copy() for following in self.next]
        other.whole, other.shortest, other._log = self.whole, self.shortest, self._log.copy()
        return other
