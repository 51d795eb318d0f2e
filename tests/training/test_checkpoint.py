from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dtrain.training.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    metrics_of,
    read_folder,
    verify_folder,
    write_folder,
)
from tests.training.checkpoints_for_tests import content


def written(folder: Path, value: float = 1.0) -> Path:
    write_folder(folder, content(value, {"eval/loss": 0.5}))
    return folder


def test_what_was_saved_is_loaded_with_its_dtypes(tmp_path: Path) -> None:
    loaded = read_folder(written(tmp_path / "saved", 3.0))
    for group, tensors in content(3.0).tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded.tensors[group][name], tensor)
            assert loaded.tensors[group][name].dtype == tensor.dtype
    assert loaded.state["metrics"] == metrics_of(tmp_path / "saved") == {"eval/loss": 0.5}


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    assert {path.suffix for path in written(tmp_path / "saved").iterdir()} == {".safetensors", ".json"}


def test_one_that_is_there_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    (folder / "ema.safetensors").write_bytes(b"of another model")
    written(folder, 2.0)
    verify_folder(folder)
    assert read_folder(folder).state["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not (folder / "ema.safetensors").exists()


def test_only_files_of_the_manifest_are_loaded(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    (folder / "ema.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert set(read_folder(folder).tensors) == {"model", "optimizer"}


@pytest.mark.parametrize("manifest", ["[]", "{}", "{", '{"model.safetensors": {}}'])
def test_a_manifest_that_does_not_list_the_state_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = written(tmp_path / "saved")
    (folder / "manifest.json").write_text(manifest)
    for use in (verify_folder, read_folder):
        with pytest.raises(BadCheckpoint, match=r"saved: manifest\.json cannot be read"):
            use(folder)
    assert metrics_of(folder) == {}


def test_a_state_that_was_altered_has_no_metrics(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"metrics": {"eval/loss": 0.1}}))
    assert metrics_of(folder) == {}
    with pytest.raises(BadCheckpoint, match=r"state\.json is .*, the manifest says"):
        verify_folder(folder)


def test_a_checkpoint_of_another_format_is_refused_with_both(tmp_path: Path) -> None:
    write_folder(tmp_path / "saved", Checkpoint({}, {"format": 99, "metrics": {}}))
    with pytest.raises(BadCheckpoint, match="has format 99, this version of dtrain reads 1"):
        read_folder(tmp_path / "saved")
