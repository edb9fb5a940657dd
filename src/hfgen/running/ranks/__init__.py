"""Several processes with one model: comparing their calls, and reporting an error to all of them.

A *rank* is one of these processes. Sharded parameters (FSDP, ZeRO-3) are gathered in each forward, so ranks
have prompts of their own and have to forward as often. Ranks of tensor parallelism compute each layer
together, so they have to choose the same tokens. Either way, a rank that stops leaves the others waiting.

``Ranks.agree`` compares the calls before the first forward, in one collective of a few numbers. An error
before the loop, and one between two forwards of a loop with ``synced_gpus``, travel with the collective
that comes next, and every rank raises. After a failure within a forward, the others raise once the process
that failed has ended.
"""

from .agreement import Ranks
from .in_step import (
    RankError,
    announce,
    any_unfinished,
    end_with,
    explain,
    is_together,
    of_config,
    together,
    wait,
)

__all__ = [
    "RankError",
    "Ranks",
    "announce",
    "any_unfinished",
    "end_with",
    "explain",
    "is_together",
    "of_config",
    "together",
    "wait",
]
