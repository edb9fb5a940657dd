"""``hfgen serve`` with a model that sees images: transformers reads them, the engine gets the tensors."""

from __future__ import annotations

import base64
import io
from functools import partial
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import hfgen
from tests import tiny
from tests.clients.server import running

TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def llava() -> tuple[Any, Any]:
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.5}
    special = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    chosen = {"vision_feature_select_strategy": "default"}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **sizes),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **sizes, **special),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        **chosen,
    )
    torch.manual_seed(0)
    square = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=square),
        tokenizer,
        patch_size=4,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        **chosen,
    )
    return hfgen.mix_into(LlavaForConditionalGeneration(config).eval()), processor


def image(colour: str) -> str:
    return url_of(Image.new("RGB", (8, 8), colour))


def url_of(picture: Any) -> str:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_answers_about_images_are_those_of_generate(is_stream: bool) -> None:
    model, processor = llava()
    found, expected = [], []
    with running(model, processor) as server:
        for colour in "red", "blue":
            parts = [{"type": "image", "url": image(colour)}, {"type": "text", "text": "what?"}]
            inputs = processor.apply_chat_template(
                [{"role": "user", "content": parts}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                tokenize=True,
            )
            options = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
            output = model.generate(**inputs, tokenizer=processor.tokenizer, **options)
            expected.append(output.texts[0])
            parts[0] = {"type": "image_url", "image_url": {"url": image(colour)}}
            answer: Any = server.client().chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": parts}],
                temperature=0,
                max_tokens=8,
                stream=is_stream,
            )
            choices = [chunk.choices[0] for chunk in (answer if is_stream else [answer])]
            texts = [(c.delta if is_stream else c.message).content or "" for c in choices]
            found.append("".join(texts))
    assert found == expected
    assert found[0] != found[1]


def test_a_large_picture_is_no_long_prompt() -> None:
    """Media have limits of their own; text beside them, and where no model reads media, counts."""
    picture = {
        "type": "image_url",
        "image_url": {"url": url_of(Image.effect_noise((1200, 1000), 99))},
    }
    assert len(picture["image_url"]["url"]) > 1_000_000  # type: ignore[index]
    with running(*llava()) as server:
        ask = partial(server.client().chat.completions.create, model="tiny", max_tokens=2)
        assert ask(messages=[{"role": "user", "content": [picture]}]).choices
        tool = {"function": {"name": "f"}, "content": [picture]}
        documents = {"documents": [{"content": [picture]}]}
        for fields in {"tools": [tool]}, {"extra_body": documents}:
            with pytest.raises(openai.BadRequestError, match="more than 1,000,000 characters"):
                ask(messages=[{"role": "user", "content": "x"}], **fields)


def test_refused_pictures_say_why_and_change_no_other_answer() -> None:
    """An image of one pixel's width would have gigabytes behind a processor that sets the shorter side."""
    odd = {
        "times the other": url_of(Image.new("1", (1, 201))),
        "pixels": url_of(Image.new("1", (16_000, 1001))),
        "no image of BMP": "data:image/png;base64,eHh4eA==",
        "truncated": url_of(Image.new("RGB", (64, 64), "red"))[:-120],
        "more than 16": image("red"),
    }
    with running(*llava()) as server:
        ask = partial(server.client().chat.completions.create, model="tiny", temperature=0)
        expected = ask(messages=[{"role": "user", "content": "x"}], max_tokens=60).choices
        answer: Any = ask(messages=[{"role": "user", "content": "x"}], max_tokens=60, stream=True)
        for why, url in odd.items():
            parts = [{"type": "image_url", "image_url": {"url": url}}] * (17 if "16" in why else 1)
            with pytest.raises(openai.BadRequestError, match=why) as refused:
                ask(messages=[{"role": "user", "content": parts}])
            assert " at 0x" not in str(refused.value)  # of the memory
        found = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        assert found == expected[0].message.content
