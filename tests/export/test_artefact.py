"""Artefacts on disk: complete or absent, verified, and run only if they are trusted."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.export import artefact
from dtrain.export.program import Program, RowSpec
from tests.export.helpers import CPU, IMAGE, described, write_linear
from tests.refusals import refused
from tests.toys import NormNet


def read_width(out: Path) -> int:
    return int(json.loads((out / "model.json").read_text())["model"]["in_features"])


def rewrite(out: Path, **changes: Any) -> None:
    """Changes keys of ``model.json``; a value of ``...`` removes the key."""
    content = json.loads((out / "model.json").read_text()) | changes
    (out / "model.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing more bytes than ``size`` to a file fails; Python ignores the signal that comes with it."""
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = (
        True  # of a new environment: Python would leave half files, which no later import can read
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


class Flat(nn.Module):
    """Works only for images in contiguous layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 3), nn.Linear(2 * 6 * 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def test_a_model_gets_images_in_the_memory_layout_of_its_training(tmp_path: Path) -> None:
    model = Flat().eval().requires_grad_(False)
    pixels = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    mean, std = torch.tensor(IMAGE.mean), torch.tensor(IMAGE.std)
    expected = model(((pixels / 255 - mean) / std).permute(0, 3, 1, 2).contiguous())
    for channels_last in (False, True):
        description = described(
            model={"_target_": f"{__name__}.Flat"},
            input=IMAGE,
            rows=RowSpec.from_rows(pixels),
            channels_last=channels_last,
        )
        with artefact.replacing(tmp_path / str(channels_last)) as folder:
            artefact.write(folder, Program(model, IMAGE, torch.float32, channels_last).eval(), description, None)
    torch.testing.assert_close(artefact.load(tmp_path / "False", CPU, trust=True).outputs(pixels), expected)
    with pytest.raises(RuntimeError, match="view size"):
        artefact.load(tmp_path / "True", CPU, trust=True).outputs(pixels)


@pytest.mark.parametrize("stored_as", ["safetensors", "pt2", "onnx"])
def test_after_a_write_failure_the_old_artefact_is_unchanged_and_nothing_is_left(
    tmp_path: Path, stored_as: str
) -> None:
    out = write_linear(tmp_path / "out")
    with (
        file_size_limit(100_000),
        refused(ConfigError, "export.out", str(out), "cannot be written", "a different export.out"),
    ):
        write_linear(out, stored_as, width=300)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read_width(out) == 3


def test_leftovers_of_a_killed_export_are_removed(tmp_path: Path) -> None:
    out = write_linear(tmp_path / "out")
    for state in ("staged", "replaced"):
        (tmp_path / f".out.{state}").mkdir()
        (tmp_path / f".out.{state}" / "model.json").write_text("half")
    write_linear(out, width=5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read_width(out) == 5


def test_a_link_still_points_to_the_replaced_artefact(tmp_path: Path) -> None:
    write_linear(tmp_path / "out")
    (tmp_path / "newest").symlink_to("out")
    write_linear(tmp_path / "newest", width=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "out"]
    assert (tmp_path / "newest").is_symlink()
    assert read_width(tmp_path / "out") == 5


def test_model_and_description_have_the_same_permissions(tmp_path: Path) -> None:
    modes = {path.name: oct(path.stat().st_mode) for path in write_linear(tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["model.json"]


def test_only_a_free_place_an_empty_folder_or_an_artefact_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for free in ("absent/deeper", "empty", "empty"):
        write_linear(tmp_path / free)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "model.pt2").touch()
    for name, found in (("thesis", "thesis.tex"), ("unfinished", "model.pt2"), ("thesis/thesis.tex", "is a file")):
        with refused(ConfigError, "export.out", str(tmp_path / name), found, "does not exist yet"):
            write_linear(tmp_path / name)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"version": 99}, ["version 99", "reads 'dtrain-artefact' version 3", "Export"]),
        ({"folded": ...}, ["damaged", "'folded'", "Export"]),
        ({"dtype": "int8"}, ["damaged", "dtype 'int8'", "fp32, bf16, fp16"]),
        ({"stored_as": "gguf"}, ["damaged", "stored_as 'gguf'", "safetensors, pt2, aotinductor, onnx"]),
        ({"classes": "0123456789"}, ["damaged", "classes '0123456789'", "list of names"]),
        ({"rows": {"dtype": "float32"}}, ["damaged", "rows", "'shape'"]),
        ({"rows": {"dtype": "pixels", "shape": []}}, ["damaged", "'pixels' is not a torch dtype"]),
        ({"sha256": "0" * 64}, ["model.safetensors", "SHA-256", "0" * 64, "Export"]),
    ],
    ids=str,
)
def test_an_altered_description_is_refused(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    rewrite(write_linear(tmp_path / "out"), **changes)
    with refused(ConfigError, str(tmp_path / "out"), *parts):
        artefact.load(tmp_path / "out", CPU)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    out = write_linear(tmp_path / "out")
    save_file({"weight": torch.zeros(1)}, out / "model.safetensors")
    with refused(ConfigError, str(out / "model.safetensors"), "SHA-256", "Export the run again"):
        artefact.load(out, CPU)
    (out / "model.safetensors").unlink()
    with refused(ConfigError, str(out / "model.safetensors"), "cannot be read", "Export the run again"):
        artefact.load(out, CPU)
    (out / "model.json").write_text("{")
    with refused(ConfigError, str(out / "model.json"), "damaged", "Export the run again"):
        artefact.load(out, CPU)
    with refused(ConfigError, str(tmp_path), "is not an artefact", "dtrain export"):
        artefact.load(tmp_path, CPU)


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_a_model_that_would_block_or_never_end_is_refused(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    model = write_linear(tmp_path / "out") / "model.safetensors"
    model.unlink()
    plant(model)
    with refused(ConfigError, str(model), "cannot be read", "Export the run again"):
        artefact.load(tmp_path / "out", CPU)


@pytest.mark.slow
def test_an_artefact_of_this_user_is_loaded_and_that_of_another_only_if_it_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, program, graph = (
        write_linear(tmp_path / stored_as, stored_as) for stored_as in ("safetensors", "pt2", "onnx")
    )
    for harmless in (weights, graph):
        artefact.load(harmless, CPU)
    with refused(ConfigError, str(program), "model.pt2", "holds code", "--trust"):
        artefact.load(program, CPU)
    artefact.load(program, CPU, trust=True)
    artefact.mark_trusted(program)
    artefact.load(program, CPU)
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "of another user"))
    with refused(ConfigError, "model.pt2", "--trust"):
        artefact.load(program, CPU)


# OmegaConf resolves this while it builds a model, and would then build the result.
CREATES_FILE = "${oc.create:'{_target_: pathlib.Path.touch, _args_: [{_target_: pathlib.Path, _args_: [owned]}]}'}"


@pytest.mark.parametrize(
    ("node", "part"),
    [
        ({"_target_": "tests.toys.norm_net"}, "norm_net"),
        ({"_target_": "tests.toys.NormNet"}, "tests.toys.NormNet"),
        ({"_target_": "torch.nn.Flatten", "start_dim": {"_target_": "os.getpid"}}, "os.getpid"),
        ({"_target_": "torch.nn.Sequential", "_args_": [CREATES_FILE]}, "oc.create"),
        ({"_target_": "torch.nn.Sequential", "classes": "${oc.env:HOME}"}, "oc.env:HOME"),
    ],
    ids=[
        "function",
        "module class of somebody else",
        "function in an argument",
        "interpolation in a list",
        "interpolation",
    ],
)
def test_a_foreign_model_that_is_not_built_by_module_classes_only_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with artefact.replacing(tmp_path / "out") as folder:
        program = Program(NormNet().eval(), None, torch.float32)
        artefact.write(folder, program, described(model=node), None)
    with refused(ConfigError, str(tmp_path / "out"), part, "--trust"):
        artefact.load(tmp_path / "out", CPU)
    assert not (tmp_path / "owned").exists()
    if part == "norm_net":
        loaded = artefact.load(tmp_path / "out", CPU, trust=True).program
        assert isinstance(loaded, Program)
        assert isinstance(loaded.model, NormNet)


@pytest.mark.slow
def test_a_target_that_cannot_be_imported_is_refused_with_a_remedy(tmp_path: Path) -> None:
    rewrite(write_linear(tmp_path / "out"), model={"_target_": "nowhere.Net"})
    with refused(ConfigError, "nowhere.Net", "--trust"):
        artefact.load(tmp_path / "out", CPU)
    with refused(ConfigError, "nowhere.Net", "cannot be imported"):
        artefact.load(tmp_path / "out", CPU, trust=True)
