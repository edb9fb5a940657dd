"""Scheduling policies: each is one sort key with aging."""

from __future__ import annotations

from collections.abc import Callable

from .item import Item

#: ``srpt``: tokens that a request is moved ahead by, per token prefilled since it arrived. It is taken
#: from ``benchmarks/results/scheduler.md``: with less, the mean hardly gains, and the longest wait grows.
AGING = 1 / 32
#: Tokens that a request counts for besides its prompt when it begins, so that many tiny prompts do not pass a
#: short one: it is moved ahead by a token for each.
PER_REQUEST = 32

#: ``priority``: one level is worth so many seconds of waiting.
SECONDS_PER_LEVEL = 60.0


def fcfs(item: Item) -> float:
    """First come, first served: the time of arrival."""
    return item.arrived


def srpt(item: Item) -> float:
    """Shortest remaining prefill first, with aging: ``n_left + AGING * clock_at_arrival``.

    The order is that of ``n_left - AGING * (clock - clock_at_arrival)`` at any moment. The clock counts
    the tokens that have been prefilled for all requests, and ``PER_REQUEST`` for each that began, so that
    the rate fits every device, and the order does not depend on measured times. A request is overtaken
    only by shorter ones that arrive while ``n_left / AGING`` more tokens are prefilled (64,000 for a prompt
    of 2,000) and ``n_left`` more requests begin.

    That waiting time and remaining prefill make up the priority is the idea of arXiv 2606.09061; the
    formula here is hfgen's own.
    """
    return item.n_left + AGING * item.clock_at_arrival


def priority(item: Item) -> float:
    """The higher number first, with aging: ``arrived - SECONDS_PER_LEVEL * priority``.

    The order is that of ``priority + waiting_seconds / SECONDS_PER_LEVEL`` at any moment, highest first.
    """
    return item.arrived - SECONDS_PER_LEVEL * item.priority


#: The lesser key is served first. What all requests gain at the same rate while they wait is left out:
#: keys then stay as they are, and a queue is sorted once, when a request enters.
POLICIES: dict[str, Callable[[Item], float]] = {"fcfs": fcfs, "srpt": srpt, "priority": priority}
