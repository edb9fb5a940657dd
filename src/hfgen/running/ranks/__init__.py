"""Several processes with one model: comparing their calls, and reporting an error to all of them.

A *rank* is one of these processes. Sharded parameters (FSDP, ZeRO-3) are gathered in each forward, so ranks
have prompts of their own and have to forward as often. Ranks of tensor parallelism compute each layer
together, so they have to choose the same tokens. Either way, a rank that stops leaves the others waiting.

``Ranks.agree`` compares the calls before the first forward, in one collective of a few numbers. An error
before the loop, and one between two forwards of a loop with ``synced_gpus``, travel with the collective
that comes next, and every rank raises. After a failure within a forward, the others raise once the process
that failed has ended.
"""

from .agreement import Ranks as Ranks
from .in_step import RankError as RankError
from .in_step import announce as announce
from .in_step import any_unfinished as any_unfinished
from .in_step import end_with as end_with
from .in_step import explain as explain
from .in_step import is_together as is_together
from .in_step import of_config as of_config
from .in_step import together as together
from .in_step import wait as wait
