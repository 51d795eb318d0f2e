"""``dtrain.predict``: what the trained network says of a file, and that a bad file does not spoil the others."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dtrain import export
from dtrain.deployment.artefact import load
from dtrain.predict import main, rank
from tests.tiny_run import ROOT, STEPS, NormNet, tiny_run

CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    return tiny_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory, run_dir: Path, digits: Path) -> Path:
    """An fp32 artefact whose classes have names, as those packed by ``dtrain.pack imagefolder`` have."""
    folder = tmp_path_factory.mktemp("predict")
    for path in digits.glob("*.tar"):
        (folder / path.name).symlink_to(path)
    (folder / "classes.json").write_text(json.dumps(CLASSES))
    arguments = [
        f"run.dir={run_dir}",
        "checkpoint=latest",
        "samples=64",
        "export.dtype=fp32",
        f"export.out={folder / 'artefact'}",
        f"data.train={folder}/train-*.tar",
        f"data.eval={folder}/test-*.tar",
    ]
    with mock.patch.object(sys, "argv", ["export", *arguments]):
        export.main()
    return folder / "artefact"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> list[Path]:
    """Three test images as files."""
    folder = tmp_path_factory.mktemp("images")
    with tarfile.open(digits / "test-000000.tar") as archive:
        members = [member for member in archive if member.name.endswith(".png")][:3]
        for member in members:
            payload = archive.extractfile(member)
            assert payload is not None
            (folder / Path(member.name).name).write_bytes(payload.read())
    return sorted(folder.iterdir())


def probabilities(run_dir: Path, path: Path) -> torch.Tensor:
    """float64, ``[10]``: the unfolded network on an image read with Pillow."""
    model = NormNet().double().eval()
    model.load_state_dict(load_file(run_dir / "checkpoints" / f"step-{STEPS:09d}" / "ema.safetensors"))
    pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"), dtype=np.float64))
    with torch.no_grad():
        return model(((pixels / 255 - 0.5) / 0.5).permute(2, 0, 1)[None])[0].softmax(0)


def test_the_command_names_bad_files_and_predicts_the_others(
    artefact: Path, images: list[Path], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.png").write_text("no image")
    files = [str(images[0]), str(tmp_path / "text.png"), str(images[1]), str(tmp_path / "missing.jpg"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "dtrain.predict", str(artefact), *files],
        cwd=tmp_path,  # without the run's config and folder
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [str(images[0]), str(images[1])]
    for path, row in zip(images[:2], rows, strict=True):
        expected = probabilities(run_dir, path)
        assert row[1] == CLASSES[int(expected.argmax())]
        assert float(row[2]) == pytest.approx(expected.max().item(), abs=1e-4)
    for file, reason in ((files[1], "not a readable image"), (files[3], "No such file"), (files[4], "Is a directory")):
        assert f"{file}: {reason}" in done.stderr
    assert "Traceback" not in done.stderr


def test_json_has_the_most_probable_classes_first(
    artefact: Path, images: list[Path], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(artefact), *map(str, images), "missing.png", "--json", "--top=3", "--batch-size=2"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == [*map(str, images), "missing.png"]
    assert lines.pop()["error"] == "No such file or directory"
    for path, line in zip(images, lines, strict=True):
        values, labels = probabilities(run_dir, path).topk(3)
        assert [found["label"] for found in line["predictions"]] == labels.tolist()
        assert [found["class"] for found in line["predictions"]] == [CLASSES[label] for label in labels]
        assert [found["probability"] for found in line["predictions"]] == pytest.approx(values.tolist(), abs=1e-5)


def test_an_image_of_another_size_and_kind_is_brought_to_that_of_the_training(
    artefact: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = Image.open(images[0]).convert("L").resize((64, 64), Image.Resampling.NEAREST)
    large.save(tmp_path / "grey.webp", lossless=True)
    assert main([str(artefact), str(images[0]), str(tmp_path / "grey.webp"), "--json"]) == 0
    small, scaled = (json.loads(line)["predictions"][0] for line in capsys.readouterr().out.splitlines())
    assert scaled["label"] == small["label"]
    assert scaled["probability"] == pytest.approx(small["probability"], abs=0.05)


def test_what_is_no_artefact_is_refused(tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(images[0])]) == 1
    assert "is no artefact" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), str(images[0]), "--top=0"])
    assert ended.value.code == 2


def test_names_that_do_not_fit_the_outputs_are_refused(
    artefact: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = json.loads((artefact / "model.json").read_text())
    for path in artefact.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.json").write_text(json.dumps(description | {"classes": ["cat", "dog"]}))
    assert main([str(tmp_path), str(images[0])]) == 1
    assert "names 2 classes, its model has 10 outputs" in capsys.readouterr().err
    (tmp_path / "model.json").write_text(json.dumps(description | {"classes": "0123456789"}))
    assert main([str(tmp_path), str(images[0])]) == 1
    assert "'0123456789' is no list of names" in capsys.readouterr().err
    own = description["input"] | {"own_decoder": True}
    (tmp_path / "model.json").write_text(json.dumps(description | {"input": own}))
    assert main([str(tmp_path), str(images[0])]) == 1
    assert "'image' as a decoder of its own" in capsys.readouterr().err
    (tmp_path / "model.json").write_text(json.dumps(description | {"input": None}))
    assert main([str(tmp_path), str(images[0])]) == 1
    assert "does not take an image" in capsys.readouterr().err


def test_an_image_that_the_model_fails_on_is_named_and_the_others_are_predicted(
    artefact: Path, images: list[Path], tmp_path: Path
) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "tiny.png")
    loaded = load(artefact, torch.device("cpu"))
    assert loaded.description.input is not None
    own_size = dataclasses.replace(loaded.description.input, size=None)

    def fails_on_tiny(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] < 8:
            raise RuntimeError("output size is too small\nand more")
        return loaded.program(rows)

    picky = dataclasses.replace(
        loaded, program=fails_on_tiny, description=dataclasses.replace(loaded.description, input=own_size)
    )
    tiny, good = rank(picky, [str(tmp_path / "tiny.png"), str(images[0])], top=1, batch_size=8)
    assert tiny.error == "the model fails on 1 x [2, 2, 3] pixels (output size is too small)"
    assert (good.error, len(good.classes)) == ("", 1)
