"""``dtrain.predict``: the classes of image files, also if some files cannot be used."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dtrain.export import __main__ as export
from dtrain.export.artefact import load
from dtrain.predict import main, rank_classes
from tests.forked_python import forked_python
from tests.refusals import assert_refused
from tests.toys import NormNet

CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory, finished_run: Path, digits: Path) -> Path:
    """An fp32 artefact with names of its classes, as ``dtrain.pack imagefolder`` writes them."""
    folder = tmp_path_factory.mktemp("predict")
    for path in digits.glob("*.tar"):
        (folder / path.name).symlink_to(path)
    (folder / "classes.json").write_text(json.dumps(CLASSES))
    arguments = [
        f"run.dir={finished_run}",
        "checkpoint=latest",
        "samples=64",  # shows the size of the images
        "export.dtype=fp32",
        "export.measure=false",
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
    model.load_state_dict(load_file(run_dir / "checkpoints" / "step-000000015" / "ema.safetensors"))
    pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"), dtype=np.float64))
    with torch.no_grad():
        return model(((pixels / 255 - 0.5) / 0.5).permute(2, 0, 1)[None])[0].softmax(0)


@pytest.mark.slow
def test_the_command_reports_unusable_files_and_predicts_the_others(
    artefact: Path,
    images: list[Path],
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # not the folder of the run's config
    (tmp_path / "text.png").write_text("no image")
    files = [str(images[0]), str(tmp_path / "text.png"), str(images[1]), str(tmp_path / "missing.jpg"), str(tmp_path)]
    assert main([str(artefact), *files]) == 1
    out, error = capsys.readouterr()
    rows = [line.split("  ") for line in out.splitlines()]
    assert [row[0] for row in rows] == [str(images[0]), str(images[1])]
    for path, row in zip(images[:2], rows, strict=True):
        expected = probabilities(finished_run, path)
        assert row[1] == CLASSES[int(expected.argmax())]
        assert float(row[2]) == pytest.approx(expected.max().item(), abs=1e-4)
    for file, reason in ((files[1], "not a readable image"), (files[3], "No such file"), (files[4], "Is a directory")):
        assert f"{file}: {reason}" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_json_has_the_most_probable_classes_first(
    artefact: Path, images: list[Path], finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(artefact), *map(str, images), "missing.png", "--json", "--top=3", "--batch-size=2"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == [*map(str, images), "missing.png"]
    assert lines.pop()["error"] == "No such file or directory"
    for path, line in zip(images, lines, strict=True):
        values, labels = probabilities(finished_run, path).topk(3)
        assert [found["label"] for found in line["predictions"]] == labels.tolist()
        assert [found["class"] for found in line["predictions"]] == [CLASSES[label] for label in labels]
        assert [found["probability"] for found in line["predictions"]] == pytest.approx(values.tolist(), abs=1e-5)


def test_an_image_of_another_size_and_kind_is_converted_as_in_training(
    artefact: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = Image.open(images[0]).convert("L").resize((64, 64), Image.Resampling.NEAREST)
    large.save(tmp_path / "grey.webp", lossless=True)
    assert main([str(artefact), str(images[0]), str(tmp_path / "grey.webp"), "--json"]) == 0
    small, scaled = (json.loads(line)["predictions"][0] for line in capsys.readouterr().out.splitlines())
    assert scaled["label"] == small["label"]
    assert scaled["probability"] == pytest.approx(small["probability"], abs=0.05)


def test_options_may_stand_between_the_files(
    artefact: Path, images: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = map(str, images)
    for arguments in (
        ["--json", str(artefact), first, second, third],
        [str(artefact), "--json", first, second, third],
        [str(artefact), first, "--json", second, "--top", "2", third],
        [str(artefact), "--json", "--", first, second, third],
    ):
        assert main(arguments) == 0, arguments
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["file"] for line in lines] == [first, second, third]
        assert len(lines[0]["predictions"]) == (2 if "--top" in arguments else 1)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_file_name_that_no_terminal_can_show_does_not_end_the_others(
    artefact: Path, images: list[Path], tmp_path: Path, encoding: str
) -> None:
    names = [os.fsdecode(b"a\xff.png"), "b\x1b[31m.png", "c\u00e9.png"]
    for name in names:
        shutil.copy(images[0], tmp_path / name)
    environ = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict", "OMP_NUM_THREADS": "1"}
    command = [forked_python(), "-m", "dtrain.predict", str(artefact), *names]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    last = {"utf-8": "c\u00e9.png".encode(), "ascii": b"c\\xe9.png"}[encoding]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [b"a?.png", b"b?[31m.png", last]


def test_json_has_the_exact_names_of_files(
    artefact: Path, images: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = os.fsdecode(b"missing\xff\n.png")
    assert main([str(artefact), missing, str(images[0]), "--json"]) == 1
    out, error = capsys.readouterr()
    assert [json.loads(line)["file"] for line in out.splitlines()] == [missing, str(images[0])]
    assert "missing??.png" in error


def test_a_class_name_of_a_foreign_artefact_cannot_command_the_terminal(
    artefact: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(artefact, tmp_path / "copy"))
    content = json.loads((copy / "model.json").read_text())
    (copy / "model.json").write_text(json.dumps(content | {"classes": ["\x1b]0;title\x07"] * 10}))
    assert main([str(copy), str(images[0]), "--trust"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_reader_that_leaves_ends_the_command_silently(artefact: Path, images: list[Path]) -> None:
    command = [forked_python(), "-m", "dtrain.predict", str(artefact), *map(str, images)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_wrong_arguments_are_refused(tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(images[0])]) == 1
    assert f"{tmp_path} is not an artefact" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path), str(images[0]), "--top=0"])
    assert exit.value.code == 2
    assert "'0': want a number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"classes": ["cat", "dog"]}, ["2 classes", "10 outputs", "'classes' in model.json", "null"]),
        ({"input": {"own_decoder": True}}, ["'image'", "custom decoder", "outputs(pixels)"]),
        ({"input": None}, ["does not take images"]),
    ],
    ids=str,
)
def test_an_artefact_that_cannot_predict_classes_of_files_is_refused(
    artefact: Path,
    images: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    parts: list[str],
) -> None:
    copy = shutil.copytree(artefact, tmp_path / "artefact")
    description = json.loads((copy / "model.json").read_text())
    if changes.get("input"):
        changes = {"input": description["input"] | changes["input"]}
    (copy / "model.json").write_text(json.dumps(description | changes))
    assert main([str(copy), str(images[0]), "--trust"]) == 1
    text = capsys.readouterr().err
    assert_refused(text, *parts)


def test_an_image_that_the_model_fails_on_is_reported_and_the_others_are_predicted(
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
    tiny, good = rank_classes(picky, [str(tmp_path / "tiny.png"), str(images[0])], top=1, batch_size=8)
    for part in ("the model fails", "1 x [2, 2, 3] pixels", "output size is too small"):
        assert part in tiny.error
    assert "and more" not in tiny.error
    assert (good.error, len(good.classes)) == ("", 1)
