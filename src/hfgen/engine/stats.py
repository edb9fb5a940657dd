"""The counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far."""

    n_steps: int = 0
    n_forwards: int = 0
    prefill_tokens: int = 0
    #: Of all sequences, as their events have them.
    decoded_tokens: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    #: Times that a request was taken out of the batch, since bytes had run out.
    n_taken_out: int = 0
    #: Cells of the cache over all decoding forwards, and those among them that were padding.
    n_cells: int = 0
    n_padding: int = 0

    @property
    def padding(self) -> float:
        """The share of padding in the cache, over all decoding forwards."""
        return self.n_padding / max(self.n_cells, 1)
