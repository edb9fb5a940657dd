"""One request as a call, prepared and stepped as in ``generate``; it may share forward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache

from .. import families
from ..decoding import loop
from ..decoding.drafters.memory import SuffixMemory
from ..decoding.drafters.schedule import Depths
from ..decoding.strategies.sample import Sample
from ..families import CACHE
from ..memory.batch import Batch
from ..memory.caches import slots
from ..memory.caches.dynamic import GrowingCache
from ..memory.caches.layers import count, decoder_cache
from ..memory.caches.quantized import QuantizedCache
from ..prepare.stages import prepare
from ..running import graphs, prefix
from ..running.prefix import eligibility
from ..running.prompts import forward_part
from ..state import seeds
from ..streaming import StreamEvent
from ..streaming.events import Rows

if TYPE_CHECKING:
    from .request import EngineRequest

#: Tokens behind a part of a prompt that a CPU forwards at once, at most: its attention skips blocks of keys
#: that are hidden from all tokens only where it needs no mask, at the beginning.
PART = 512
#: Arguments of forward whose rows do not depend on each other.
KNOWN = frozenset({"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"})


class Decoding:
    """The call of one request: its run and strategy, with processors, criteria and observers of its own.

    ``joins``: its rows are forwarded together with those of other requests. Otherwise it decodes beside
    them, because its strategy forwards more than the newest token of each row and, if it ``drafts``, its draft.
    """

    def __init__(self, model: Any, request: EngineRequest) -> None:
        """Raises what ``generate`` raises for arguments that cannot be used."""
        self.request = request
        prefix_cache = request.engine.prefix_cache
        self.call = prepare(model, request.arguments, fills_prefix=False, prefix_cache=prefix_cache)
        try:
            config: Any = self.call.config
            prompt: Any = self.call.prompt
            if (n_prompts := prompt.batch_size) != 1:
                raise ValueError(f"A request has one prompt, but its inputs are of {n_prompts}.")
            # Drafts without scores are accepted as often by a seed's choice as by speculative sampling.
            is_drafted = config.prompt_lookup_num_tokens is not None or isinstance(
                self.call.request.assistant_model, SuffixMemory
            )
            takes_seeds = is_drafted or getattr(self.call.strategy, "joins", False)
            if takes_seeds and config.do_sample and self.call.row_keys is None:
                # A random seed for each row, so that no draw depends on other requests.
                n = len(prompt.ids) // config.num_beams
                self.call.row_keys = seeds.keys_of([None], n, prompt.ids.device)
            self.strategy: Any
            self.run, self.strategy = self.call.start(model)
        except BaseException:
            self.call.release()
            raise
        self.recording = loop.begin(self.run)
        self.rows = Rows(self.run, self.strategy)
        self.prompt_length = self.run.ids.shape[1]
        #: Whether it joins with its drafts, which are verified together with those of others.
        self.drafts = (
            getattr(self.strategy, "shares_rounds", False)
            and self.reads_ids_alone
            and not hasattr(model, "exactness")  # gaps would move the blocks of its sums
            and not self.recording.recorded
            and self.call.interventions is None  # hooks that are for its rows alone
        )
        cache = families.given_cache(self.run.model_kwargs)
        self.joins = self.drafts or (
            getattr(self.strategy, "joins", False)
            and not isinstance(decoder_cache(cache), QuantizedCache)  # in groups of a row's tokens
            and self.call.interventions is None
        )
        if self.joins and getattr(self.run.config, "use_cuda_graph", False):
            graphs.warn("the rows of an engine join and leave a cache that grows")
        #: Rows of the batch that are its own, in the order of ``run.ids``; written by ``JoinedRows``.
        self.places: list[int] = []
        #: Columns between the tokens of its rows that are none; written by ``DraftingRows``.
        self.n_gaps = 0
        #: How far its drafts were right.
        self.accepted = Depths()
        self.steps = loop.drive(self.run, self.strategy)  # if it decodes beside the batch
        #: Its rows (``PlainRows``), if they choose their tokens together with those of others.
        self.plain: Any = None
        #: Its rows while it waits after it was taken out of the batch, or out of prefill.
        self.waiting_rows: Batch | None = None

    @property
    def n_rows(self) -> int:
        return len(self.run.ids)

    @property
    def length(self) -> int:
        """Tokens of a row so far."""
        n_unwritten = 0 if self.plain is None else len(self.plain.unwritten)
        return self.run.ids.shape[1] + n_unwritten

    @property
    def newest(self) -> Tensor:
        """The newest token of each row ``(n_rows,)``."""
        return self.run.ids[:, -1] if self.plain is None else self.plain.newest

    @property
    def longest(self) -> int:
        """Tokens of a row at the end, at most."""
        return int(self.run.config.max_length)

    def check(self) -> None:
        """Raise ``ValueError`` if its rows cannot be in a batch with others."""
        cache, model = families.given_cache(self.run.model_kwargs), self.run.model
        if families.keeps_other_state(model):
            raise ValueError(
                f"{type(model).__name__} keeps per-row state on its modules, so requests cannot "
                "take turns. Decode with `generate`."
            )
        # A model that makes its cache itself, as Mamba, does so in its first forward.
        is_to_come = self.run.config.use_cache and self.length == self.prompt_length
        if not self.joins or (cache is None and is_to_come):
            return
        if not isinstance(cache, Cache):
            raise ValueError(
                f"{type(model).__name__} decodes this request without a cache of a known kind "
                f"({type(cache).__name__}), so its rows cannot share a batch with others. Decode it "
                "with `generate`."
            )
        slots.check_declared(cache)

    @property
    def reads_ids_alone(self) -> bool:
        """Whether its forwards depend on ids, masks and positions alone, and a cache that grows."""
        run = self.run
        kwargs = {name: value for name, value in run.model_kwargs.items() if value is not None}
        return (
            kwargs.keys() <= KNOWN
            and kwargs.get("use_cache", False)
            and type(kwargs.get(CACHE)) is GrowingCache
            and not run.is_encoder_decoder
            and run.body is None
        )

    @property
    def may_share_prompt(self) -> bool:
        """Whether the forward pass of its prompt depends on its ids alone, and may be that of others, too."""
        run, call = self.run, self.call
        return (
            type(self.strategy) is Sample
            and self.joins
            and self.n_rows == 1
            and self.reads_ids_alone
            and count(run.model_kwargs[CACHE]) is None
            and call.prefixes is None
            and run.config.prefill_chunk_size is None
            and not eligibility.is_length_dependent(run.model, self.longest)
        )

    @property
    def can_be_cut(self) -> bool:
        """Whether its prompt may be forwarded in parts, which give what one forward gives."""
        return self.joins and eligibility.can_be_cut(self.run)

    def begin(self) -> int:
        """Look for stored prefixes of the prompt; returns how many of its tokens are in the cache."""
        model, call = self.run.model, self.call
        assert call.prompt is not None
        prefix.begin(model, call, call.prompt)
        if call.prefix_session is None:
            return 0
        self.run.observers.append(call.prefix_session)
        return int(call.cache.get_seq_length())

    def prefill(self, n_tokens: int, is_last: bool) -> list[StreamEvent]:
        """Forward the next ``n_tokens`` of the prompt; with the last ones, choose the first token."""
        run = self.run
        may_need_mask = run.ids.is_cpu and n_tokens > PART and self.can_be_cut
        if may_need_mask and self.call.cache.get_seq_length() > 0:
            while n_tokens > PART:
                forward_part(run, PART)
                n_tokens -= PART
        if not is_last:
            forward_part(run, n_tokens)
            return []
        outputs = self.strategy.prefill(run)
        return self.rows.step(self.strategy.forward(run) if outputs is None else outputs)

    def advance(self) -> list[StreamEvent]:
        """Decode one step beside the batch; returns the new events."""
        if (step := next(self.steps, None)) is None:
            self.run.finished = True
            return []
        return self.rows.advance(step)

    def finish(self) -> tuple[list[StreamEvent], Any]:
        """The last events, and what ``generate`` returns."""
        result, output = loop.conclude(self.run, self.strategy, self.recording)
        return self.rows.finish(result), output

    def leave_cache(self, stand_in: Cache) -> None:
        """Replace the cache in the arguments by ``stand_in``: from now on a batch holds its rows."""
        self.run.model_kwargs = {
            name: stand_in if isinstance(value, Cache) else value
            for name, value in self.run.model_kwargs.items()
        }
        if self.drafts:
            self.strategy.cache = stand_in

    def close(self) -> None:
        self.steps.close()
        self.waiting_rows = None
        self.call.release()
