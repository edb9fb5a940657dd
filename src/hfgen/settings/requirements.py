"""Requirements of fields, with the error of a call that lacks one."""

from __future__ import annotations

from typing import Any


def require_tokenizer(tokenizer: Any, field: str, value: Any) -> None:
    """Raise ``ValueError`` if a config field that works on text has no tokenizer to do it with."""
    if tokenizer is None:
        raise ValueError(
            f"`{field}` (={value!r}) needs text: pass the model's tokenizer to `generate` as "
            "`tokenizer`."
        )


def require_eos(eos: Any, penalty: Any) -> None:
    """Raise ``ValueError`` if there is no EOS for ``exponential_decay_length_penalty`` to raise."""
    if eos is None:
        raise ValueError(
            f"`exponential_decay_length_penalty` (={penalty}) raises the score of the EOS token, "
            "but there is none: set `eos_token_id`."
        )
