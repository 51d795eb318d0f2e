from __future__ import annotations

import copy

import pytest
import torch

from dtrain.data import Batch
from dtrain.data.field_options import parse_fields
from dtrain.data.fields import DataError
from dtrain.data.wire import Wire
from dtrain.precision import Precision

FIELDS = parse_fields({"jpg": {"name": "image", "role": "image"}, "txt": {"name": "caption"}, "cls": {"name": "label"}})


def batch_of(precision: str = "bf16") -> Batch:
    columns = {
        "image": torch.arange(24, dtype=torch.uint8).view(1, 4, 2, 3),
        "caption": ["a"],
        "label": torch.tensor([50257]),
    }
    return Batch(columns, ["s/0"], torch.tensor([True]), [{"key": "s/1"}], Wire(FIELDS, Precision(precision)))


def test_images_are_normalised_when_moved_and_only_once() -> None:
    batch = batch_of()
    moved = batch.to("cpu")
    assert (moved["image"].dtype, moved["image"].shape) == (torch.bfloat16, (1, 3, 4, 2))
    again = moved.to("cpu")
    assert torch.equal(again["image"], moved["image"])
    assert batch["image"].dtype == torch.uint8  # what was handed over is as it was


def test_everything_else_moves_as_it_is() -> None:
    moved = batch_of().to("cpu")
    assert (moved["label"].dtype, moved["label"].tolist()) == (torch.int64, [50257])
    assert moved["caption"] == ["a"]
    assert (moved.sample_keys, moved.valid.tolist(), moved.bad) == (["s/0"], [True], [{"key": "s/1"}])
    assert list(moved) == ["image", "caption", "label"]


def test_bytes_on_the_wire_are_those_that_the_worker_sent() -> None:
    batch = batch_of("fp32")
    assert batch.wire_bytes == 24 + 8
    assert batch.to("cpu").wire_bytes == 24 + 8


def test_a_batch_without_a_wire_moves_as_it_is() -> None:
    batch = Batch({"image": torch.zeros(1, 4, 2, 3, dtype=torch.uint8)}, ["s/0"], torch.tensor([True]))
    assert batch.to("cpu")["image"].dtype == torch.uint8


def test_a_copy_is_a_batch_with_all_that_belongs_to_it() -> None:
    batch = batch_of()
    for other in (copy.copy(batch), copy.deepcopy(batch)):
        assert isinstance(other, Batch)
        assert torch.equal(other.to("cpu")["image"], batch.to("cpu")["image"])
        assert (other.sample_keys, other.bad, other.wire_bytes) == (batch.sample_keys, batch.bad, batch.wire_bytes)


def test_a_field_that_the_batch_does_not_have_is_named_with_those_that_it_has() -> None:
    batch = Batch({"img": torch.zeros(1), "label": torch.zeros(1)}, ["a"], torch.ones(1, dtype=torch.bool))
    with pytest.raises(KeyError) as raised:
        batch["image"]
    assert isinstance(raised.value, DataError)
    assert str(raised.value).startswith(
        "the batch has no field 'image', but 'img', 'label'. Give one this name in data.fields"
    )
    assert batch.get("image") is None
