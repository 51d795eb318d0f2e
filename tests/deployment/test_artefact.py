"""Writing an artefact: what was there stays until the new one is whole, whatever a killed process left behind."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.deployment import artefact
from dtrain.deployment.description import Description
from dtrain.deployment.image_input import ImageInput
from dtrain.deployment.program import Program, RowSpec

CPU = torch.device("cpu")


def write(out: Path, stored_as: str = "safetensors", width: int = 3) -> None:
    model = nn.Linear(width, width).eval().requires_grad_(False)
    node = {"_target_": "torch.nn.Linear", "in_features": width, "out_features": width}
    rows = RowSpec("float32", (width,))
    with artefact.replacing(out) as folder:
        description = Description(stored_as, node, "fp32", [], [], None, rows, None, "cpu", {}, {})
        artefact.write(folder, Program(model, None, torch.float32).eval(), description, torch.zeros(2, width))


def width_of(out: Path) -> int:
    return int(json.loads((out / "model.json").read_text())["model"]["in_features"])


@contextmanager
def disk_that_refuses(size: int) -> Iterator[None]:
    """Files of this process end at so many bytes; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Flat(nn.Module):
    """Wants its images as torch has them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 3), nn.Linear(2 * 6 * 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def test_the_layout_of_the_training_is_kept(tmp_path: Path) -> None:
    model = Flat().eval().requires_grad_(False)
    image = ImageInput("image", (8, 8), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    pixels = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    wanted = model((pixels / 255 - 0.5).div(0.5).permute(0, 3, 1, 2).contiguous())
    node = {"_target_": f"{__name__}.Flat"}
    for channels_last in (False, True):
        folder = tmp_path / str(channels_last)
        program = Program(model, image, torch.float32, channels_last).eval()
        description = Description(
            "safetensors", node, "fp32", [], [], image, RowSpec.of(pixels), None, "cpu", {}, {}, channels_last
        )
        with artefact.replacing(folder) as aside:
            artefact.write(aside, program, description, None)
    torch.testing.assert_close(artefact.load(tmp_path / "False", CPU).outputs(pixels), wanted)
    with pytest.raises(RuntimeError, match="view size"):
        artefact.load(tmp_path / "True", CPU).outputs(pixels)


@pytest.mark.parametrize("stored_as", ["safetensors", "pt2", "onnx"])
def test_where_the_disk_refuses_the_old_artefact_stays_and_nothing_else_is_left(tmp_path: Path, stored_as: str) -> None:
    out = tmp_path / "out"
    write(out)
    with disk_that_refuses(100_000), pytest.raises(ConfigError, match=r"export\.out: .*out cannot be written"):
        write(out, stored_as, width=300)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert width_of(out) == 3


def test_what_a_killed_export_of_the_same_process_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out)
    for what in ("new", "old"):
        (tmp_path / f".out.{os.getpid()}.{what}").mkdir()
        (tmp_path / f".out.{os.getpid()}.{what}" / "model.json").write_text("half")
    write(out, width=5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert width_of(out) == 5


def test_a_link_goes_on_leading_to_the_artefact(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "newest").symlink_to("out")
    write(tmp_path / "newest", width=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "out"]
    assert (tmp_path / "newest").is_symlink()
    assert width_of(tmp_path / "out") == 5


def test_whoever_may_read_the_description_may_read_the_model(tmp_path: Path) -> None:
    write(tmp_path / "out")
    modes = {path.name: oct(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["model.json"]
