"""Data that no batch can be made of: one message for a person, and an error on every rank."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dtrain import command_line, evaluate
from dtrain.tracking import sinks
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.shards import tar_bytes
from tests.whole_runs import status, train_on

pytestmark = pytest.mark.usefixtures("digits")


def png(height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, 8, 3), 99, np.uint8)).save(file, "PNG")
    return file.getvalue()


def shard(path: Path, *images: bytes) -> Path:
    """64 samples; ``images`` in turn."""
    members = [
        (f"{number:04d}.{ext}", content)
        for number in range(64)
        for ext, content in (("png", images[number % len(images)]), ("cls", b"1"))
    ]
    path.write_bytes(tar_bytes(members))
    return path


def error_message(capfd: pytest.CaptureFixture[str], ranks: int, run_dir: Path, *overrides: str) -> str:
    """What a failing training shows."""
    small = ("train.max_steps=1", "train.global_batch_size=16")
    with pytest.raises(RanksFailed) as failed:
        train_on(ranks, run_dir, *small, *overrides)
    assert set(failed.value.reports) == set(range(ranks))
    assert not failed.value.hung
    return capfd.readouterr().err


def assert_one_message(shown: str, *parts: str) -> None:
    # On a slow machine the store may be gone, with rank 0, before rank 1 could see there that the same has been said.
    errors = {line.replace("rank 1: ", "") for line in shown.splitlines() if line.startswith("dtrain: error: ")}
    assert len(errors) == 1
    assert "Traceback" not in shown
    assert_refused(errors.copy().pop(), *parts)


@pytest.mark.parametrize(
    ("split", "ranks", "workers"),
    [
        ("train", 2, 2),
        ("eval", 2, 0),
        pytest.param("eval", 1, 2, marks=pytest.mark.slow),
        pytest.param("train", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_data_of_which_nothing_can_be_read_are_one_message_that_names_the_first_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], split: str, ranks: int, workers: int
) -> None:
    bad = shard(tmp_path / "bad.tar", b"no image at all")
    overrides = (f"data.{split}={bad}", f"data.num_workers={workers}")
    shown = error_message(capfd, ranks, tmp_path / "run", *overrides)
    names = (
        "can be read",
        "first error",
        "bad.tar/0",
        f"in {bad} at byte ",
        "field 'image': not a readable image",
        "data.fields",
    )
    assert_one_message(shown, *names)
    assert status(tmp_path / "run")["state"] == "failed"
    assert "DataError: epoch 0: no sample " in status(tmp_path / "run")["reason"]


@pytest.mark.slow
def test_images_of_several_sizes_are_one_message_that_names_two_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mixed = shard(tmp_path / "mixed.tar", png(8), png(9))
    shown = error_message(capfd, 2, tmp_path / "run", f"data.train={mixed}", "data.num_workers=2")
    assert_one_message(shown, "field 'image'", "[8, 8, 3]", "[9, 8, 3]", "size: 224")


@pytest.mark.slow
def test_an_evaluation_of_which_nothing_can_be_read_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_on(1, tmp_path / "run", "train.max_steps=1")
    bad = shard(tmp_path / "bad.tar", b"no image at all")
    capfd.readouterr()
    arguments = [f"run.dir={tmp_path / 'run'}", f"data.eval={bad}"]

    def rank(number: int) -> None:
        command_line.run(
            lambda composed: evaluate.run_evaluation([composed], "", "", ""), arguments, rewrite=evaluate.recompose
        )

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert set(failed.value.reports) == {0, 1}
    assert_one_message(capfd.readouterr().err, "can be read", "first error", str(bad))


def test_a_missing_package_of_the_tracker_is_told_before_data_are_looked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    shown = error_message(capfd, 2, tmp_path / "run", "tracker=tensorboard", "data.train=/nowhere/train.tar")
    assert_one_message(shown, "tensorboard is not installed", "pip install 'dtrain[tensorboard]'", "tracker=none")
    assert not (tmp_path / "run" / "config.yaml").exists()
