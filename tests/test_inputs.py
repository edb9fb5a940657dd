"""Stage 2 by hand: main input, mask, positions, decoder ids, and rows that are repeated."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from hfgen import GenerationMixin
from hfgen.families import CACHE

CPU = torch.device("cpu")


def model(**attributes: Any) -> Any:
    """What the hooks read of a model."""
    config = {"is_encoder_decoder": False} | attributes.pop("config", {})
    names = {"main_input_name": "input_ids", "device": CPU, "config": SimpleNamespace(**config)}
    return SimpleNamespace(**names | attributes)


def special(pad: int | None = None, eos: list[int] | None = None) -> Any:
    as_tensor = {"_pad_token_tensor": pad, "_eos_token_tensor": eos}
    return SimpleNamespace(
        **{k: None if v is None else torch.tensor(v) for k, v in as_tensor.items()}
    )


class TestPositions:
    def positions(self, ids: torch.Tensor, **kwargs: Any) -> Any:
        return GenerationMixin._prepare_position_ids_for_generation(model(), ids, kwargs).tolist()

    def test_they_count_attended_tokens(self):
        mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]])
        expected = [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 1]]
        assert self.positions(torch.zeros(3, 4), attention_mask=mask) == expected

    def test_they_are_one_row_without_a_mask(self):
        assert self.positions(torch.zeros(5, 3)) == [[0, 1, 2]]

    def test_they_cover_the_cache(self):
        cache = SimpleNamespace(get_seq_length=lambda: 2)
        assert self.positions(torch.zeros(5, 3), **{CACHE: cache}) == [[0, 1, 2, 3, 4]]

    def test_they_follow_ids_beside_embeddings(self):
        assert self.positions(torch.zeros(1, 9, 4), input_ids=torch.zeros(1, 2)) == [[0, 1]]


class TestMask:
    def mask(self, ids: Any, config: Any) -> Any:
        ids = torch.tensor(ids)
        return GenerationMixin._prepare_attention_mask_for_generation(
            model(), ids, config, {}
        ).tolist()

    def test_pads_are_masked(self):
        assert self.mask([[0, 0, 5], [0, 6, 0]], special(pad=0)) == [[0, 0, 1], [0, 1, 0]]

    def test_a_pad_that_ends_texts_is_text(self):
        assert self.mask([[2, 2, 5]], special(pad=2, eos=[1, 2])) == [[1, 1, 1]]

    def test_without_a_pad_everything_is_text(self):
        assert self.mask([[0, 5]], special()) == [[1, 1]]

    def test_embeddings_have_no_pads(self):
        assert self.mask([[[0.0], [0.0]]], special(pad=0)) == [[1, 1]]


class TestMainInput:
    def prepared(self, of: Any, inputs: Any = None, bos: Any = None, **kwargs: Any) -> Any:
        of._maybe_initialize_input_ids_for_generation = partial(
            GenerationMixin._maybe_initialize_input_ids_for_generation, of
        )
        return GenerationMixin._prepare_model_inputs(of, inputs, bos, kwargs)

    def test_no_prompt_is_a_bos_per_row(self):
        main, _, _ = self.prepared(model(), bos=torch.tensor(7), pixel_values=torch.zeros(3, 8))
        assert main.tolist() == [[7], [7], [7]]
        with pytest.raises(ValueError, match="no `bos_token_id`"):
            self.prepared(model())

    def test_embeddings_stand_in_for_ids(self):
        def prepare_inputs_for_generation(inputs_embeds: Any = None) -> None: ...

        of = model(prepare_inputs_for_generation=prepare_inputs_for_generation)
        embeds = torch.zeros(2, 3, 4)
        main, name, rest = self.prepared(of, inputs_embeds=embeds)
        assert main is embeds
        assert name == "inputs_embeds"
        assert rest["input_ids"].shape == (2, 0)  # what comes is appended to them


class TestDecoderIds:
    def ids(self, start: Any, batch: int = 2, **kwargs: Any) -> Any:
        config = {"is_encoder_decoder": True, "model_type": "t5"}
        return GenerationMixin._prepare_decoder_input_ids_for_generation(
            model(config=config), batch, "input_ids", kwargs, torch.tensor(start)
        )

    def test_they_start_with_the_start_token(self):
        assert self.ids(9)[0].tolist() == [[9], [9]]
        assert self.ids([8, 9])[0].tolist() == [[8], [9]]

    def test_it_is_put_before_what_lacks_it_and_the_mask_grows(self):
        given = torch.tensor([[5, 6], [7, 8]])
        mask = torch.tensor([[1, 1], [1, 0]])
        ids, kwargs = self.ids(9, decoder_input_ids=given, decoder_attention_mask=mask)
        assert ids.tolist() == [[9, 5, 6], [9, 7, 8]]
        assert kwargs["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]

    def test_it_is_not_put_twice(self):
        """One row that has it is enough, as upstream looks at it."""
        ids, _ = self.ids(9, decoder_input_ids=torch.tensor([[9, 6], [7, 8]]))
        assert ids.tolist() == [[9, 6], [7, 8]]


class TestExpansion:
    def expanded(self, n: int, ids: Any, **kwargs: Any) -> Any:
        return GenerationMixin._expand_inputs_for_generation(model(), n, False, ids, **kwargs)

    def test_each_row_follows_itself(self):
        ids, kwargs = self.expanded(
            2, torch.tensor([[1, 2], [3, 4]]), attention_mask=torch.tensor([[0, 1], [1, 1]]), flag=3
        )
        assert ids.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
        assert kwargs["attention_mask"].tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]
        assert kwargs["flag"] == 3

    def test_rows_of_positions_are_their_second_dimension(self):
        positions = torch.tensor([[[1], [2]], [[3], [4]], [[5], [6]]])  # (3, rows, length)
        _, kwargs = self.expanded(2, torch.zeros(2, 1), position_ids=positions)
        assert kwargs["position_ids"].squeeze(-1).tolist() == [
            [1, 1, 2, 2],
            [3, 3, 4, 4],
            [5, 5, 6, 6],
        ]

    def test_the_callers_encoder_outputs_stay(self):
        encoded = BaseModelOutput(last_hidden_state=torch.zeros(2, 3, 4))
        _, kwargs = GenerationMixin._expand_inputs_for_generation(
            model(), 3, True, torch.zeros(2, 1), encoder_outputs=encoded
        )
        assert kwargs["encoder_outputs"].last_hidden_state.shape == (6, 3, 4)
        assert encoded.last_hidden_state.shape == (2, 3, 4)

    def test_images_are_repeated_as_their_rows(self):
        """A row with images a and b, of one and two placeholders, and one with image c."""
        image = 99
        ids = torch.tensor([[99, 5, 99, 99], [6, 7, 8, 99]])
        features = [torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]]), torch.tensor([[4.0]])]
        outputs = {"image": SimpleNamespace(pooler_output=features)}
        of = model(config={"image_token_id": image})
        repeated = GenerationMixin._expand_multimodal_outputs(of, ids, outputs, 2)
        flat = [feature.flatten().tolist() for feature in repeated["image"].pooler_output]
        assert flat == [[1.0], [2.0, 3.0], [1.0], [2.0, 3.0], [4.0], [4.0]]
