"""The dataclasses of a trace, with JSON, page and notebook output."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent

#: Scripts of the page, in the order in which they run.
SCRIPTS = ("format.js", "tokens.js", "details.js", "charts.js", "main.js")

#: Digits that numbers keep in JSON.
DIGITS = 6

#: What becomes of a beam: it is returned, ended without being returned, ran on until the search ended,
#: or was continued by no later beam.
Fate = Literal["returned", "finished", "open", "died"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A column of scores: the model's logits, and what each processor made of them, in order."""

    #: As people say it: "logits", "temperature", "top k".
    name: str
    #: Numbers that it was made with: ``{"top_k": 50}``.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Whether it is a grammar's mask.
    is_grammar: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was likely at a position, before the processors or after them."""

    token_id: int
    #: The model's own: softmax of the logits.
    probability: float
    #: Softmax of the last scores: what sampling draws by.
    final_probability: float
    #: One for each of the trace's stages; ``-inf`` where the token is ruled out.
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Token(Candidate):
    """A generated token, and what else was likely in its place.

    Entropies are in bits. ``left`` and ``mass``: after each stage, how many tokens of the vocabulary are
    left, and which share of the model's probability they have.
    """

    #: 1 for the token with the highest logit.
    rank: int
    entropy: float
    final_entropy: float
    left: tuple[int, ...]
    mass: tuple[float, ...]
    #: Those with the highest logits, then those with the highest last scores that are not among them.
    candidates: tuple[Candidate, ...]
    #: Index of the step that brought it.
    step: int
    #: Whether it was drafted, and accepted.
    is_drafted: bool = False
    #: In a call with ``interventions``: the model's probability without them, after the same tokens.
    unedited_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, without padding: what the decoder continues, or what an encoder reads."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence that ``generate`` returns, from behind the prompt to its end."""

    #: Index of its prompt.
    prompt: int
    tokens: tuple[Token, ...]
    text: str | None
    finish_reason: str | None
    #: What ended it: a stop string, or the id of a token.
    stop: str | int | None = None
    #: Of beams: the sum of log-probabilities, by length to the power of the length penalty.
    score: float | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis after one step of a search."""

    #: Index among the beams of the step before; ``None`` at the first step.
    parent: int | None
    token_id: int
    #: The sum of its log-probabilities as processors leave them; of one that has ended, as it is ranked.
    score: float
    fate: Fate


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens drafted for one sequence in a round, and how many of them the model accepted."""

    sequence: int
    #: The generated position of the first of ``token_ids``.
    position: int
    token_ids: tuple[int, ...]
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the loop, and its times in seconds: all of it, and what forwards and drafting took."""

    #: Tokens that every sequence gained.
    n_tokens: int
    seconds: float
    forward_seconds: float
    draft_seconds: float
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """What happened in a call of ``generate``: made by ``hfgen.trace``."""

    #: As people say it: "sample", "beam search".
    mode: str
    model: str
    #: The fields of the config that are not as the defaults have them.
    settings: dict[str, Any]
    stages: tuple[Stage, ...]
    prompts: tuple[Prompt, ...]
    sequences: tuple[Sequence, ...]
    steps: tuple[Step, ...]
    #: Of each prompt, the beams after each step.
    beams: tuple[tuple[tuple[Beam, ...], ...], ...]
    #: Seconds until decoding began: arguments, caches, an encoder.
    prepare_seconds: float
    vocabulary_size: int
    #: How each id that occurs here is spelled; empty without a tokenizer.
    spelling: dict[int, str]

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
            return (HERE / "assets" / name).read_text(encoding="utf-8")

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
