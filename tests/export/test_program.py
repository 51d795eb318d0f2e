"""A program checks its rows, and preprocesses images as the loader does in evaluation."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtrain.data import ShardLoader
from dtrain.data.fields.parse import parse_fields
from dtrain.errors import ConfigError
from dtrain.export.program import ImageInput, Program, RowSpec
from tests.refusals import refused
from tests.shards import jpeg, write_tar


@pytest.mark.parametrize(
    "options", [{"size": [12, 10]}, {"size": 12, "shorter_side": 15}, {"size": 12, "decode": "reduced"}], ids=str
)
def test_an_image_file_is_decoded_as_in_evaluation(tmp_path: Path, options: dict[str, Any]) -> None:
    fields = {"jpg": {"name": "image", "role": "image", **options}}
    payload = jpeg(0, 70, 95)
    loader = ShardLoader(
        [write_tar(tmp_path / "a.tar", [("s", {"jpg": payload})])], fields, global_batch_size=1, num_workers=0
    )
    image = ImageInput.from_json(json.loads(json.dumps(asdict(ImageInput.from_field(parse_fields(fields)[0])))))
    assert image == ImageInput.from_field(parse_fields(fields)[0])
    pixels = next(loader.epoch(0))["image"][0].numpy()
    loader.close()
    np.testing.assert_array_equal(image.decode(payload), pixels)


def test_a_custom_decoder_is_recorded() -> None:
    fields = {"jpg": {"name": "image", "role": "image", "decoder": lambda payload: np.zeros((2, 2, 3), np.uint8)}}
    image = ImageInput.from_field(parse_fields(fields)[0])
    assert image.own_decoder
    assert ImageInput.from_json(json.loads(json.dumps(asdict(image)))) == image


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("size", size) for size in ("12", [12], [12, 10.5], [0, 10], [12, 10, 3])),
        *(
            (option, value)
            for option in ("mean", "std")
            for value in ("abc", [0.5], [0.5, 0.5, "0.5"], [0.5, 0.5, 127])
        ),
        *(("shorter_side", side) for side in (5, "20", [20])),
        ("field", None),
    ],
    ids=str,
)
def test_a_damaged_image_input_is_refused_before_an_image_is_read(option: str, value: Any) -> None:
    content = asdict(ImageInput("image", (12, 10), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    for damaged in (content | {option: value}, {key: content[key] for key in content if key != option}):
        with pytest.raises(ValueError, match="is not an image input"):
            ImageInput.from_json(damaged)


def test_rows_of_another_dtype_or_shape_are_refused_and_floats_are_cast() -> None:
    spec = RowSpec("float32", (3,))
    assert spec.checked(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float32
    for rows, got in (
        (torch.ones(2, 4), "float32 [2, 4]"),
        (torch.ones(2, 3, dtype=torch.int64), "int64 [2, 3]"),
        (torch.ones(3), "float32 [3]"),
    ):
        with refused(ConfigError, "takes float32 [rows, 3]", f"got {got}", "Convert"):
            spec.checked(rows)


def test_a_model_that_returns_several_tensors_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows, rows

    with refused(ConfigError, "model", "Pair returns tuple", "returns only the tensor"):
        Program(Pair(), None, torch.float32)(torch.ones(1))
