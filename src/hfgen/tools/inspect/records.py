"""The dataclasses of a trace, with JSON, page and notebook output."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

#: Scripts of the page, in the order in which they run.
SCRIPTS = ("format.js", "tokens.js", "details.js", "charts.js", "main.js")

DIGITS = 6  # digits that numbers keep in JSON

#: A beam is returned, ended otherwise, ran on until the search ended, or was continued by no later beam.
Fate = Literal["returned", "finished", "open", "died"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A column of scores: the model's logits, and what each processor made of them, in order."""

    name: str  # as people say it: "logits", "temperature", "top k"
    settings: dict[str, Any] = field(default_factory=dict)  # its numbers: {"top_k": 50}
    is_grammar: bool = False  # whether it is a grammar's mask


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was likely at a position, before the processors or after them."""

    token_id: int
    probability: float  # the model's own: softmax of the logits
    final_probability: float  # softmax of the last scores: what sampling draws by
    scores: tuple[float, ...]  # one for each of the trace's stages; -inf where it is ruled out


@dataclass(frozen=True, slots=True)
class Token(Candidate):
    """A generated token, and what else was likely in its place.

    Entropies are in bits. ``left`` and ``mass``: after each stage, how many tokens of the vocabulary are
    left, and which share of the model's probability they have. ``candidates``: those with the highest
    logits, then those with the highest last scores that are not among them.
    """

    rank: int  # 1 for the token with the highest logit
    entropy: float
    final_entropy: float
    left: tuple[int, ...]
    mass: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    step: int  # index of the step that brought it
    is_drafted: bool = False  # whether it was drafted, and accepted
    unedited_probability: float | None = None  # the model's without the call's interventions


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, without padding: what the decoder continues, or what an encoder reads."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence that ``generate`` returns, from behind the prompt to its end."""

    prompt: int  # index of its prompt
    tokens: tuple[Token, ...]
    text: str | None
    finish_reason: str | None
    stop: str | int | None = None  # what ended it: a stop string, or the id of a token
    score: float | None = None  # of beams: log-probability by length to the power of length_penalty

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis after one step of a search."""

    parent: int | None  # index among the beams of the step before; None at the first step
    token_id: int
    score: float  # log-probability as processors leave it; of one that has ended, as it is ranked
    fate: Fate


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens drafted for one sequence in a round, and how many of them the model accepted."""

    sequence: int
    position: int  # the generated position of the first of token_ids
    token_ids: tuple[int, ...]
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the loop, and its times in seconds: all of it, and what forwards and drafting took."""

    n_tokens: int  # tokens that every sequence gained
    seconds: float
    forward_seconds: float
    draft_seconds: float
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """What happened in a call of ``generate``: made by ``hfgen.trace``."""

    mode: str  # as people say it: "sample", "beam search"
    model: str
    settings: dict[str, Any]  # the fields of the config that are not as the defaults have them
    stages: tuple[Stage, ...]
    prompts: tuple[Prompt, ...]
    sequences: tuple[Sequence, ...]
    steps: tuple[Step, ...]
    beams: tuple[tuple[tuple[Beam, ...], ...], ...]  # of each prompt, the beams after each step
    prepare_seconds: float  # until decoding began: arguments, caches, an encoder
    vocabulary_size: int
    spelling: dict[int, str]  # how each id that occurs here is spelled; empty without a tokenizer

    @property
    def text(self) -> str | None:
        """The text of the first sequence, with a tokenizer."""
        return self.sequences[0].text

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it: scores of tokens that are ruled out are ``None``."""
        return plain(self)

    def to_json(self) -> str:
        """``to_dict`` as text, in ASCII."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no other file."""

        def asset(name: str) -> str:
            return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")

        page = asset("page.html").replace("{{style}}", asset("page.css"))
        page = page.replace("{{script}}", "\n".join(map(asset, SCRIPTS)))
        before, _, after = page.partition("{{data}}")
        before = before.replace("{{title}}", html.escape(self.title))
        # What ends a script, or begins a comment in one, has a "<", which JSON spells in another way too.
        return before + self.to_json().replace("<", "\\u003c") + after

    def save(self, path: str | Path) -> None:
        """Write the page to ``path``, or JSON if it ends in ``.json``. Raises ``OSError``."""
        path = Path(path)
        text = self.to_json() if path.suffix == ".json" else self.to_html()
        path.write_text(text, encoding="utf-8")

    @property
    def title(self) -> str:
        start = " ".join((self.prompts[0].text or "").split())
        return f"{start[:60] or 'A call of generate'} · hfgen"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        return (
            f'<iframe srcdoc="{html.escape(self.to_html())}" title="{html.escape(self.title)}" '
            'style="width: 100%; height: 720px; border: 1px solid #8884"></iframe>'
        )

    def __repr__(self) -> str:
        n = sum(len(sequence.tokens) for sequence in self.sequences)
        return (
            f"<Trace of {self.mode}: {len(self.sequences)} sequences, {n} tokens, {len(self.steps)} "
            "steps; .save('page.html') writes a page>"
        )


def plain(value: Any) -> Any:
    """``value`` as JSON has it, with ``DIGITS`` digits; numbers that are not finite are ``None``."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, int | str | None):
        return value
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(each) for each in value]
    return repr(value)
