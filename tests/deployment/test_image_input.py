"""What an artefact does to an image is what the loader did in evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import ShardLoader
from dtrain.data.fields import parse_fields
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
