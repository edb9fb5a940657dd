"""From the messages of a request to the inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, Modality

from ..openai_api.prompts import template_options
from . import media
from .limits import Limits

#: The kinds of content of a message, and those of it that only some models read.
TEXTS = ("text", "input_text", "output_text")
SEEN = ("image_url", "input_image", "video_url")
HEARD = ("input_audio", "audio_url")


def inputs_of(
    model: Any,
    processor: Any,
    messages: Any,
    body: Mapping[str, Any],
    name: str,
    limits: Limits,
) -> Any:
    """The inputs of ``model``, on its device: ``messages``, of the field ``name``, in its chat template.

    Media are checked against ``limits``. ``body`` may have ``tools``, ``documents``, ``chat_template_kwargs``, ``add_generation_prompt`` and
    ``continue_final_message``. Raises ``ValueError`` for what cannot be read, or not by this model.
    """
    modality = ModelManager.get_model_modality(model, processor=processor)
    check_kinds(messages, modality, name)
    options = template_options(body)
    chat = [{n: v for n, v in message.items() if v is not None} for message in messages]
    try:
        chat = BaseHandler.get_processor_inputs_from_messages(chat, modality)
        media.inlined(chat, limits, name)
        parts = (part for each in chat for part in each["content"] if isinstance(part, dict))
        has_video = any(part["type"] == "video" for part in parts)
        inputs = processor.apply_chat_template(
            chat,
            tools=body.get("tools") or None,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            load_audio_from_video=modality is Modality.MULTIMODAL and has_video,
            **({"num_frames": 32} if has_video else {}),  # as upstream: all frames are too many
            **options,
        )
    except Exception as error:  # the template's own, of a wrong call, of an image that is none
        raise ValueError(f"`{name}` cannot be read: {error}") from error
    return inputs.to(model.device)


def check_kinds(messages: Any, modality: Modality, name: str) -> None:
    """Raise ``ValueError`` for content that the model does not read."""
    kinds = [*TEXTS, *(SEEN if modality is not Modality.LLM else ())]
    kinds += HEARD if modality is Modality.MULTIMODAL else ()
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in kinds:
                read = ", ".join(kinds)
                raise ValueError(
                    f"`{name}` has content of type {kind!r}, but this model reads {read}."
                )
