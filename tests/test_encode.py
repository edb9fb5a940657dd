"""What is encoded before the loop, with encoders that only say what they were given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

from hfgen.families import CACHE
from hfgen.prepare import encode, inputs

IDS = torch.tensor([[5, 6]])
CONFIG = SimpleNamespace(output_attentions=False, output_hidden_states=True)
ASKED = {"output_attentions": False, "output_hidden_states": True, "return_dict": True}


class Encoder(nn.Module):
    """Returns its arguments."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> dict:
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        return {name: value for name, value in given.items() if value is not None} | kwargs


class Strict(nn.Module):
    """An encoder that takes no other arguments than those it has names for."""

    def forward(
        self,
        input_ids: Any,
        langs: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
    ) -> dict:
        return {"input_ids": input_ids, "langs": langs}


class Model:
    """As much of a model as the stage reads."""

    main_input_name = "input_ids"
    _maybe = inputs.maybe_prepare_encoder_kwargs_for_generation
    _prepare_text_encoder_decoder_kwargs_for_generation = (
        encode.prepare_text_encoder_decoder_kwargs_for_generation
    )
    _prepare_multimodal_encoder_kwargs_for_generation = (
        encode.prepare_multimodal_encoder_kwargs_for_generation
    )
    _supports_mm_encoder_outputs = inputs.supports_mm_encoder_outputs

    def __init__(self, encoder: Any = None, modalities: tuple[str, ...] = ("text",)) -> None:
        self.config = SimpleNamespace(is_encoder_decoder=encoder is not None)
        self.encoder, self.input_modalities = encoder, modalities
        self.base_model = self

    def get_encoder(self) -> Any:
        return self.encoder

    def forward(self, input_ids: Any, mm_encoder_outputs: Any = None) -> None:
        raise AssertionError("nothing is forwarded here")


class Seeing(Model):
    """Images are doubled, videos are negated; both may be scaled."""

    def __init__(self) -> None:
        super().__init__(modalities=("text", "image", "video"))

    def get_image_features(self, pixel_values: Any, scale: int = 2, return_dict: Any = None) -> Any:
        return pixel_values * scale

    def get_video_features(
        self, pixel_values_videos: Any, scale: int = 1, return_dict: Any = None
    ) -> Any:
        return -pixel_values_videos * scale


def encoded(model: Model, **given: Any) -> dict[str, Any]:
    return model._maybe(IDS, given, None, CONFIG)


def test_the_encoder_gets_the_main_input_and_its_mask() -> None:
    mask = torch.tensor([[1, 1]])
    result = encoded(Model(Encoder()), attention_mask=mask)
    assert result["encoder_outputs"] == {"input_ids": IDS, "attention_mask": mask} | ASKED
    assert result["attention_mask"] is mask


def test_arguments_of_the_decoder_are_kept_from_the_encoder() -> None:
    names = ("decoder_input_ids", "cross_attn_head_mask", "use_cache", CACHE, "langs")
    result = encoded(Model(Encoder()), **dict.fromkeys(names, 1))
    assert set(result["encoder_outputs"]) == {"input_ids", "langs", *ASKED}
    assert set(result) == {"encoder_outputs", *names}


def test_an_encoder_that_names_its_arguments_gets_no_others() -> None:
    result = encoded(Model(Strict()), langs=3, unknown=4)
    assert result["encoder_outputs"] == {"input_ids": IDS, "langs": 3}


def test_the_main_input_comes_under_the_name_that_was_found() -> None:
    model = Model(Encoder())
    result = model._maybe(IDS, {}, "input_features", CONFIG)
    assert result["encoder_outputs"]["input_features"] is IDS
    assert "input_ids" not in result["encoder_outputs"]


def test_given_encoder_outputs_are_kept() -> None:
    assert encoded(Model(Encoder()), encoder_outputs="mine") == {"encoder_outputs": "mine"}


def test_a_model_of_text_alone_encodes_nothing() -> None:
    assert encoded(Model(), pixel_values=1) == {"pixel_values": 1}


def test_images_are_encoded_and_leave() -> None:
    result = encoded(Seeing(), pixel_values=torch.tensor([1.0, 2.0]), other=1)
    assert result.pop("mm_encoder_outputs")["image"].tolist() == [2.0, 4.0]
    assert result == {"other": 1}


def test_images_and_videos_may_share_arguments() -> None:
    result = encoded(
        Seeing(), pixel_values=torch.tensor(1), pixel_values_videos=torch.tensor(2), scale=5
    )
    assert result == {"mm_encoder_outputs": {"image": 5, "video": -10}}


def test_one_modality_may_come_encoded_and_the_callers_dict_stays() -> None:
    given = {"image": "mine"}
    result = encoded(Seeing(), mm_encoder_outputs=given, pixel_values_videos=torch.tensor(2))
    assert result == {"mm_encoder_outputs": {"image": "mine", "video": -2}}
    assert given == {"image": "mine"}


def test_raw_and_encoded_at_once_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"image.*pixels and encoded.*\['image'\]"):
        encoded(Seeing(), mm_encoder_outputs={"image": 1}, pixel_values=torch.tensor(1))


def test_a_model_that_sees_but_takes_nothing_encoded_encodes_nothing() -> None:
    class Raw(Seeing):
        def forward(self, input_ids: Any, pixel_values: Any) -> None: ...

    assert encoded(Raw(), pixel_values=1) == {"pixel_values": 1}


def test_an_encoder_that_accelerate_placed_answers_where_it_was_asked() -> None:
    model = Model(Encoder())
    model.hf_device_map = {"": "cpu"}
    encoded(model)
    hook = model.encoder._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.io_same_device
    hook.io_same_device = False
    encoded(model)
    assert model.encoder._hf_hook is hook
    assert hook.io_same_device
