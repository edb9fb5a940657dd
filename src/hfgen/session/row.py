"""One row of a session: its prompt, its arguments, and the tokens that it has."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..decoding.activations import Recorder
from ..decoding.loop import commit
from ..decoding.outputs import Ending, text_of
from ..decoding.recipes import recipe
from ..decoding.strategies import Sample
from ..logits import logprobs
from ..logits.processors.samplers import Feedback
from ..logits.stopping import FinishReason
from ..mixin import driven
from ..prepare.rows import folded
from ..prepare.stages import prepare, prepare_functions
from ..running.step_inputs import MEDIA
from ..settings.kinds import is_zero
from ..state import seeds
from ..state.call import Call, Request
from ..state.run import Run
from ..streaming import StreamEvent
from ..streaming.events import Rows
from ..streaming.plain import PlainRows
from .arguments import check
from .states import States

#: What an encoder has made of a prompt, which is not encoded again.
ENCODED = ("encoder_outputs", "mm_encoder_outputs")

#: Snapshots of a row at most: that of its prompt, and the last ones.
MAX_SNAPSHOTS = 8


class Continued(Sample):
    """Sampling that goes on after ``tokens (n,)``, which count as generated: what ``Session.call`` asks for.

    ``has_ended``: nothing comes after them.
    """

    takes_rows = True

    def __init__(self, run: Run, tokens: Sequence[int], has_ended: bool = False) -> None:
        columns = run.ids.new_tensor([tokens], dtype=torch.long).expand(len(run.ids), -1)
        run.ids = torch.cat([run.ids, columns], dim=1)
        super().__init__(run)
        run.finished = has_ended or run.ids.shape[1] >= run.config.max_length

    def prefill(self, run: Run) -> ModelOutput:
        """Forward the prompt, and then the tokens, one by one."""
        ids, run.ids = run.ids, run.prompts
        outputs = super().prefill(run)
        for length in range(run.prompts.shape[1] + 1, ids.shape[1] + 1):
            commit(run, outputs)
            run.ids = ids[:, :length]
            outputs = self.executor.forward(run)
        return outputs


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of a row's first ``length`` tokens, at ``place`` of ``states``, which nobody writes to.

    ``outputs``: those of the last of these tokens, if they are known; ``states``: ``None`` if a longer cache
    can be cropped to it.
    """

    length: int
    outputs: ModelOutput | None
    states: States | None
    place: int


class Row:
    """A call of one prompt, prepared as by ``generate``, and where its states are.

    ``n_cached``: how many of its tokens are in the cache, prompt included. ``states`` may hold more of them.
    """

    @classmethod
    def prepared(
        cls, model: Any, arguments: dict[str, Any], tokens: Sequence[int] = (), encoded: Any = None
    ) -> Row:
        """The row of a call. Raises what ``generate`` raises for ``arguments`` that cannot be used.

        ``encoded``: what an encoder has made of the prompt already.
        """
        inputs = arguments
        if encoded and "mm_encoder_outputs" in encoded:
            inputs = {name: value for name, value in arguments.items() if name not in MEDIA}
        inputs = folded(inputs | {"return_dict_in_generate": True}) | (encoded or {})
        call = prepare(model, driven(model, Request.of(**inputs)))
        try:
            if call.prefix_session is not None:  # its windows record all tokens, to store them
                call.prefix_session.detach()
            check(call)
            if call.config.do_sample and call.row_keys is None:  # a seed that ``call`` can name
                arguments = arguments | {"seed": int(torch.randint(2**62, ()))}
                call.row_keys = seeds.keys_of([arguments["seed"]], 1, call.prompt.ids.device)
            return cls(model, arguments, call, tokens)
        except BaseException:
            call.release()
            raise

    def __init__(
        self, model: Any, arguments: dict[str, Any], call: Call, tokens: Sequence[int] = ()
    ) -> None:
        self.model, self.arguments, self.call = model, arguments, call
        self.states: States | None = None
        self.place = self.n_cached = 0
        self.outputs: ModelOutput | None = None  # of the last token, until the next one is chosen
        self.snapshots: list[Snapshot] = []
        self.set_tokens(tokens, len(tokens))

    @property
    def n_prompt(self) -> int:
        return int(self.run.prompts.shape[1])

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, fed ones included."""
        return self.run.ids[0, self.n_prompt :].tolist()

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt and after it."""
        return int(self.run.ids.shape[1])

    def set_tokens(self, tokens: Sequence[int], n_foreign: int) -> None:
        """Replace the generated tokens, of which ``n_foreign`` were not chosen under the arguments and seed of now."""
        call = self.call
        prepare_functions(self.model, call, call.prompt)  # criteria remember where rows ended
        run = call.run(self.model)
        run.model_kwargs = {n: v for n, v in run.model_kwargs.items() if not isinstance(v, Cache)}
        if run.asks_for("logprobs", "logprob_token_ids"):
            recorder = logprobs.Recorder(run)
            recorder.positions += [None] * len(tokens)  # type: ignore[list-item]
            run.observers = [recorder]
        events = Rows(run, Continued(run, tokens), len(tokens))
        shown = events.row(0)
        shown.ids = list(tokens)
        shown.new_text()
        #: A processor's state depends on how tokens were scored, and has begun anew.
        self.is_restarted = any(isinstance(processor, Feedback) for processor in run.processors)
        n_foreign = len(tokens) if self.is_restarted else n_foreign
        run.finished = run.finished or is_zero(run.config.max_new_tokens)
        reason = FinishReason("length") if run.finished else None
        #: The row, if it chooses its token together with others.
        plain = PlainRows.of(events, kind=Continued)
        self.run, self.events, self.plain = run, events, plain  # at last: an interrupt may come
        self.reason, self.n_foreign = reason, n_foreign

    def take(self) -> list[StreamEvent]:
        """Append the token that was chosen with others, or else choose it by ``outputs``; returns the events, of row 0."""
        if self.plain is None:
            events = self.events.step(self.outputs)
        else:
            events = self.plain.take()
            self.plain.write()
        self.reason = next((e.finish_reason for e in events if e.finish_reason), None)
        self.outputs = None
        return events

    def text(self) -> str:
        """The generated text, without what stopped it unless that is asked for."""
        if not hasattr(self.run.tokenizer, "decode"):
            raise ValueError("`text` needs the tokenizer: model.session(…, tokenizer=tokenizer).")
        cause = None
        if self.reason is not None:
            causes = self.events.causes(self.events.row(0))
            cause = Ending.of(self.run, causes, 0, 1, self.tokens, is_end=True).cause
        reason = self.reason or FinishReason("unfinished")
        return text_of(self.run, 0, Ending(self.tokens, reason, cause), 1)

    def as_call(self) -> dict[str, Any]:
        """Arguments with which ``generate`` decodes this row from an empty cache."""
        if not self.n_foreign:
            return folded(self.arguments)
        tokens = self.tokens[: self.n_foreign]
        has_ended = self.run.finished and self.n_foreign == self.n_tokens - self.n_prompt
        continued = recipe(Continued, tokens=tokens, has_ended=has_ended)
        return folded(self.arguments) | {"custom_generate": continued}

    def copy(self, number: int = 0, **arguments: Any) -> Row:
        """A row with the same tokens and states, with other ``arguments`` if there are any.

        A copy with a ``number`` above 0 samples by a seed of its own. One with ``arguments`` takes the place of this
        row: the states have no more rows than before.
        """
        is_fork = not arguments
        call, keys = self.call, self.call.row_keys
        if not is_fork:
            kwargs = call.prompt.model_kwargs
            encoded = {name: kwargs[name] for name in ENCODED if kwargs.get(name)}
            twin = Row.prepared(self.model, self.arguments | arguments, self.tokens, encoded)
        else:  # all that is prepared holds for the twin as well, but for its noise
            if number and call.config.do_sample:
                seed = self.arguments.get("seed", getattr(call.config, "seed", None))
                arguments["seed"] = seeds.split(int(seed), number, len(self.tokens))  # type: ignore[arg-type]
                keys = seeds.keys_of([arguments["seed"]], 1, call.prompt.ids.device)
            config, edits = copy.copy(call.config), copy.copy(call.interventions)
            call = dataclasses.replace(call, config=config, row_keys=keys, interventions=edits)
            twin = Row(self.model, self.arguments | arguments, call, self.tokens)
        if not (arguments or twin.is_restarted):
            twin.n_foreign = self.n_foreign
        if self.run.finished and not (arguments and self.reason == "length"):
            twin.run.finished, twin.reason = True, self.reason
        if "interventions" in arguments:  # the states are of others
            return twin
        twin.outputs, twin.snapshots = self.outputs, list(self.snapshots)
        if self.states is not None:
            self.states.is_shared |= is_fork
            twin.states, twin.place, twin.n_cached = self.states, self.place, self.n_cached
        return twin

    def rewind(self, n: int) -> None:
        """Remove the last ``n`` generated tokens, of as many at least."""
        if n == 0:
            return
        self.set_tokens(tokens := self.tokens[:-n], min(self.n_foreign, len(tokens)))
        length = self.n_tokens
        self.snapshots = [s for s in self.snapshots if s.length <= length]
        outputs = next((s.outputs for s in self.snapshots if s.length == length), None)
        is_known = outputs is not None
        can_crop = self.states is not None and self.states.can_crop
        if can_crop and (is_known or length > self.n_prompt):
            self.n_cached = length if is_known else min(self.n_cached, length - 1)
        else:
            self.leave_states()
            usable = [s for s in self.snapshots if s.states and (s.length < length or is_known)]
            if usable:
                last = usable[-1]
                self.states, self.place, self.n_cached = last.states, last.place, last.length
        self.outputs = outputs if self.states is not None else None

    def take_snapshot(self, is_prompt: bool = False) -> None:
        """Keep the states of now, if the cache cannot be cropped; of a prompt, at least the outputs."""
        if self.states is None:
            return
        states = None if self.states.can_crop else self.states
        if states is not None or is_prompt:
            snapshots = [s for s in self.snapshots if s.length != self.n_cached]
            self.snapshots = [*snapshots, Snapshot(self.n_cached, self.outputs, states, self.place)]
            del self.snapshots[1 : 1 - MAX_SNAPSHOTS]
        if states is not None:
            states.is_shared = True

    def leave_states(self) -> None:
        """Drop the states: they are computed anew when they are needed."""
        if self.states is not None:
            self.states.drop(self)
        self.states, self.n_cached, self.outputs = None, 0, None

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens that the row did not choose."""
        if tokens:
            self.set_tokens(all_tokens := [*self.tokens, *tokens], len(all_tokens))
            self.outputs = None

    def activations(self, number: int, by_module: dict[str, list[Tensor]]) -> None:
        """Add what ``record=`` asks for to ``by_module``, or write it to the file of row ``number``."""
        if self.call.record is None:
            raise ValueError("`activations` need names of modules: model.session(…, record=[…]).")
        recorder = Recorder(self.run, self.call.record)
        n_new = self.n_tokens - self.n_prompt
        recorder.keep(number, recorder.of_row(self.run, self.run.ids, 0, n_new), by_module)
