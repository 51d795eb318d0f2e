"""What an artefact does to an image is what the loader did in evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import ShardLoader
from dtrain.data.field_options import parse_fields
from dtrain.deployment.image_input import ImageInput
from tests.data.shards_for_tests import jpeg, write_tar


@pytest.mark.parametrize(
    "options", [{"size": [12, 10]}, {"size": 12, "shorter_side": 15}, {"size": 12, "decode": "reduced"}], ids=str
)
def test_a_decoded_file_is_what_evaluation_was_handed(tmp_path: Path, options: dict[str, Any]) -> None:
    fields = {"jpg": {"name": "image", "role": "image", **options}}
    payload = jpeg(0, 70, 95)
    loader = ShardLoader(
        [write_tar(tmp_path / "a.tar", [("s", {"jpg": payload})])], fields, global_batch_size=1, num_workers=0
    )
    wanted = ImageInput.from_json(json.loads(json.dumps(ImageInput.of(parse_fields(fields)[0]).to_json())))
    assert wanted == ImageInput.of(parse_fields(fields)[0])
    handed = next(loader.epoch(0))["image"][0].numpy()
    loader.close()
    np.testing.assert_array_equal(wanted.decode(payload), handed)


def test_a_decoder_of_the_training_s_own_is_remembered() -> None:
    fields = {"jpg": {"name": "image", "role": "image", "decoder": lambda payload: np.zeros((2, 2, 3), np.uint8)}}
    wanted = ImageInput.of(parse_fields(fields)[0])
    assert wanted.own_decoder
    assert ImageInput.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted


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
def test_a_description_that_was_damaged_is_refused_before_an_image_is_read(option: str, value: Any) -> None:
    described = ImageInput("image", (12, 10), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).to_json()
    with pytest.raises(ValueError, match="describes no image"):
        ImageInput.from_json(described | {option: value})
    with pytest.raises(ValueError, match="describes no image"):
        ImageInput.from_json({key: described[key] for key in described if key != option})
