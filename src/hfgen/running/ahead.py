"""Late stop checks: the next forward is launched before the host reads whether the call has ended.

A host that reads the flags at once waits for the device, and then the device waits for the host. Here
they are on their way to the host while the next forward computes. If the call turns out to be over, that
forward is dropped: it has written to the call's own cache, which nobody sees, and nothing else has been
done. (Transformers' ``DeferredStopCheck`` reads one whole step late; its generator has drawn once more.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .. import families
from ..state.run import Run
from .row_states import ASYNCHRONOUS, generator_states, has_own_hooks

#: Whether every call checks late that can, on any device: for tests.
ALWAYS = False


class Ahead:
    """The stop flags of a run that checks late, on their way to the host."""

    def __init__(self) -> None:
        #: The flags, the function that gets their values, and the event behind the copy of them.
        self.pending_flags: tuple[Tensor, Callable[[list[int]], None], Any] | None = None

    def ask(self, flags: Tensor, settle: Callable[[list[int]], None]) -> None:
        """Begin to copy ``flags (n,)`` to the host; ``read`` calls ``settle`` with their values."""
        values, copied = flags, None
        if flags.device.type in ASYNCHRONOUS:
            values = torch.empty_like(flags, device="cpu", pin_memory=flags.is_cuda)
            values.copy_(flags, non_blocking=True)
            copied = torch.Event(flags.device, enable_timing=False)
            module = torch.get_device_module(flags.device)
            # Without a stream, torch takes that of the current device, which may be another one.
            has_streams = hasattr(module, "current_stream")  # MPS has one alone
            copied.record(module.current_stream(flags.device) if has_streams else None)
        self.pending_flags = values, settle, copied

    def read(self) -> None:
        """Wait for the values, and pass them to the function that ``ask`` got."""
        assert self.pending_flags is not None
        (values, settle, copied), self.pending_flags = self.pending_flags, None
        if copied is not None:
            copied.synchronize()
        settle(values.tolist())


@contextmanager
def decided(run: Run, strategy: Any) -> Iterator[None]:
    """Enclose the prefill: set ``run.ahead`` behind it if checking late pays and changes nothing."""
    if not _may_check_late(run, strategy):
        yield
        return
    before = generator_states(run.ids.device)
    yield
    draws = not all(map(torch.equal, before, generator_states(run.ids.device)))  # dropout, noise
    run.ahead = None if draws else Ahead()


def forward_ahead(run: Run, strategy: Any) -> ModelOutput | None:
    """Forward the newest tokens, then read the flags; return ``None`` if the call is over."""
    limit = getattr(run.criteria, "max_length", None)
    is_last = limit is not None and run.ids.shape[1] >= limit  # the host knows it
    outputs = None if is_last else strategy.forward(run)
    run.ahead.read()
    return None if run.finished else outputs


def _may_check_late(run: Run, strategy: Any) -> bool:
    """Whether it pays, and the forward that is dropped changes nothing but a cache that is not seen.

    It pays where the host is ahead of the device, and no stream waits for each token. The host is behind where
    it launches each kernel: an EOS would cost one more forward.
    """
    device, executor = run.ids.device.type, getattr(strategy, "executor", None)
    is_ahead = device == "mps" or getattr(executor, "is_quick_to_launch", False)
    if not (ALWAYS or (is_ahead and device in ASYNCHRONOUS and not run.is_streamed)):
        return False
    cache = families.given_cache(run.model_kwargs)
    return (
        getattr(type(strategy), "checks_late", False)
        and not run.config.return_dict_in_generate  # the cache is returned
        and not (run.call is not None and run.call.prefix_session is not None)  # it is stored
        and not getattr(cache, "_is_user_defined", False)
        and not run.synced_gpus  # all devices forward as often
        and not run.config.is_assistant
        and strategy.active is None  # rows leave before the next forward
        and len(set(getattr(run.model, "hf_device_map", {}).values())) < 2
        and not families.keeps_other_state(run.model)
        and not hasattr(run.model, "generated_audio_codes")  # Moshi appends to them at each step
        and not has_own_hooks(run.model)
    )
