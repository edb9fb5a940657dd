"""A simulated engine: the real scheduler, a model of what a step costs, and a clock that does not wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from hfgen.engine.scheduler import Item, Scheduler


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step takes, in seconds: ``step + token * prefilled + row * decoding + move * moved``.

    The defaults are round numbers of the size that a model of 8 billion parameters has on one
    accelerator: 10 ms to read the weights, 20,000 tokens of prefill a second, and 128 KiB of keys and
    values per token that pass to the host and back at 20 GB/s.
    """

    step: float = 10e-3
    token: float = 50e-6
    row: float = 100e-6
    move: float = 7e-6

    def capacity(self, requests: Requests, max_rows: int) -> float:
        """Requests per second if all ``max_rows`` decode all the time."""
        per_output = self.step / max_rows + self.row
        return 1 / (self.token * requests.prompts.mean() + per_output * requests.outputs.mean())


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in the order of their arrival, at a mean of one per second; arrays ``(n,)``."""

    arrivals: Any
    prompts: Any
    outputs: Any
    priorities: Any

    #: Of lengths: median and sigma of the lognormal, least, greatest.
    PROMPTS = (150.0, 1.2, 8, 2000)
    OUTPUTS = (80.0, 1.0, 8, 500)
    #: The share of requests with priority 1; the others have 0.
    URGENT = 0.1

    @classmethod
    def drawn(cls, n: int, seed: int = 0) -> Requests:
        """Poisson arrivals, and lengths that do not depend on each other."""
        random = np.random.default_rng(seed)
        arrivals = random.exponential(size=n).cumsum()
        lengths = []
        for median, sigma, least, greatest in (cls.PROMPTS, cls.OUTPUTS):
            drawn = random.lognormal(np.log(median), sigma, n)
            lengths.append(drawn.clip(least, greatest).astype(int))
        return cls(arrivals, *lengths, (random.random(n) < cls.URGENT).astype(int))


@dataclass(slots=True)
class Job:
    """One request on its way; times are seconds."""

    arrived: float
    n_output: int
    item: Item
    first: float = 0.0
    last: float = 0.0
    n_decoded: int = 0
    joined: int = 0  # the step after which it decodes
    n_moves: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of the requests, in the order of their arrival; arrays ``(n,)`` in seconds."""

    first_token: Any
    per_token: Any
    waited: Any  # until prefill began
    prompts: Any
    priorities: Any
    seconds: float
    n_tokens: int
    n_steps: int
    n_decoded: int
    n_taken_out: int
    longest_queue: int

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.n_tokens / self.seconds

    @property
    def mean_rows(self) -> float:
        """Rows that decode in a step."""
        return self.n_decoded / self.n_steps


def simulate(
    requests: Requests,
    per_second: float,
    costs: Costs,
    *,
    max_new_tokens: int = Requests.OUTPUTS[3],
    **options: Any,
) -> Outcome:
    """Serve all requests, which arrive at a mean of ``per_second``, by ``Scheduler(**options)``.

    A byte is one token's: a request may need its prompt and ``max_new_tokens``.
    """
    run = _Run(Scheduler(**options), costs)
    columns = (requests.prompts, requests.outputs, requests.priorities)
    arrivals = (requests.arrivals / per_second).tolist()
    jobs = [
        Job(arrived, output, Item(prompt, 1, prompt + max_new_tokens, priority, n_bytes_now=prompt))
        for arrived, prompt, output, priority in zip(
            arrivals, *(c.tolist() for c in columns), strict=True
        )
    ]
    run.serve(jobs)
    outputs = np.array([job.n_output for job in jobs])
    first, last = (np.array([getattr(job, name) for job in jobs]) for name in ("first", "last"))
    arrived = np.array(arrivals)
    return Outcome(
        first_token=first - arrived,
        per_token=(last - first) / (outputs - 1),
        waited=np.array([job.item.admitted for job in jobs]) - arrived,
        prompts=requests.prompts,
        priorities=requests.priorities,
        seconds=run.clock,
        n_tokens=int(outputs.sum()),
        n_steps=run.n_steps,
        n_decoded=run.n_decoded,
        n_taken_out=sum(job.n_moves for job in jobs),
        longest_queue=run.longest_queue,
    )


@dataclass(slots=True)
class _Run:
    scheduler: Scheduler
    costs: Costs
    clock: float = 0.0
    n_steps: int = 0
    n_decoded: int = 0
    longest_queue: int = 0
    jobs: dict[Item, Job] = field(default_factory=dict)
    #: (the step after which it ends, its number among joins, its moves when it joined, the job)
    ends: list[tuple[int, int, int, Job]] = field(default_factory=list)

    def serve(self, jobs: list[Job]) -> None:
        scheduler, n_arrived, n_ended = self.scheduler, 0, 0
        while n_ended < len(jobs):
            if not (scheduler.waiting or scheduler.prefilling or scheduler.decoding):
                self.clock = max(self.clock, jobs[n_arrived].arrived)
            while n_arrived < len(jobs) and jobs[n_arrived].arrived <= self.clock:
                job = jobs[n_arrived]
                self.jobs[job.item] = job
                scheduler.add(job.item, job.arrived)
                n_arrived += 1
            n_ended += self.step()

    def step(self) -> int:
        """One step of the engine; how many requests end with it."""
        scheduler, costs = self.scheduler, self.costs
        if scheduler.optimistic:
            self.make_room()
        chunks = scheduler.plan(self.clock)
        n_rows = len(scheduler.decoding)
        self.n_steps += 1
        self.n_decoded += n_rows
        self.longest_queue = max(self.longest_queue, len(scheduler.waiting))
        prefilled = sum(chunk.n_tokens for chunk in chunks)
        self.clock += costs.step + costs.token * prefilled + costs.row * n_rows
        n_ended = self.end()
        for chunk in chunks:
            item = chunk.item
            scheduler.advance(item, chunk.n_tokens)
            if item.state == "decoding":
                self.join(self.jobs[item])
        return n_ended

    def join(self, job: Job) -> None:
        if job.n_moves:
            self.clock += self.costs.move * job.item.n_bytes_now
        if job.n_decoded == 0:
            job.first, job.n_decoded = self.clock, 1
        job.joined = self.n_steps
        end = self.n_steps + job.n_output - job.n_decoded
        heapq.heappush(self.ends, (end, id(job), job.n_moves, job))

    def end(self) -> int:
        n_ended = 0
        while self.ends and self.ends[0][0] <= self.n_steps:
            _, _, n_moves, job = heapq.heappop(self.ends)
            if n_moves == job.n_moves:  # it was not taken out meanwhile
                job.last = self.clock
                self.scheduler.leave(job.item)
                del self.jobs[job.item]
                n_ended += 1
        return n_ended

    def make_room(self) -> None:
        """Take out what does not fit once each row has one token more."""
        scheduler = self.scheduler
        for item in scheduler.decoding:
            scheduler.resize(item, item.n_bytes, item.n_bytes_now + 1)
        for item in scheduler.victims():
            job = self.jobs[item]
            job.n_moves += 1
            if item.state == "decoding":
                job.n_decoded += self.n_steps - job.joined
            self.clock += self.costs.move * item.n_bytes_now
            scheduler.readmit(item)


@contextmanager
def aging(rate: float) -> Iterator[None]:
    """Within, ``srpt`` ages at another rate."""
    with patch("hfgen.engine.scheduler.AGING", rate):
        yield
