"""The names of classes beside the shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dtrain.config.errors import ConfigError
from dtrain.config.schema import DataConfig
from dtrain.data.class_names import class_names


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "a-0.tar").touch()
    config: DataConfig = OmegaConf.structured(DataConfig)
    config.eval = f"{tmp_path}/a-*.tar"
    return config


def test_names_are_those_beside_the_first_shards_that_have_any(data: DataConfig, tmp_path: Path) -> None:
    assert class_names(data) is None  # and data.train is not set
    (tmp_path / "classes.json").write_text(json.dumps(["cat", "dog"]))
    data.train = "gone/*.tar"
    assert class_names(data) == ["cat", "dog"]


@pytest.mark.parametrize("content", ["{", '{"cat": 0}', '["cat", 1]', '"cat"'])
def test_a_file_that_is_no_list_of_names_is_refused(data: DataConfig, tmp_path: Path, content: str) -> None:
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(ConfigError, match=r"classes\.json .*Correct or delete it"):
        class_names(data)
