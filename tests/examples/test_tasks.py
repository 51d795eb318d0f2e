"""examples/own_task and examples/image_text, as real runs in small."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dtrain.data import ShardLoader
from dtrain.data.writer import write_shards
from tests.whole_runs import ROOT, metrics, records, train_on

OWN_TASK, IMAGE_TEXT = ROOT / "examples" / "own_task", ROOT / "examples" / "image_text"


def test_the_readme_prints_the_task_of_the_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    imports, task = block.split("\n\n\n")
    file = (OWN_TASK / "my_package.py").read_text()
    assert task in file
    assert {*imports.splitlines()} <= {*file.splitlines()}


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_the_task_of_the_readme_reports_its_own_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN_TASK))
    presets = ("--config-dir", str(OWN_TASK / "presets"))
    train_on(2, tmp_path, *presets, "train.max_steps=20", "data.num_workers=0", experiment="mine")
    losses = metrics(tmp_path)
    assert losses[-1] < losses[0] / 2
    (accuracy,) = metrics(tmp_path, "eval/top2_accuracy")
    assert 0.5 < accuracy <= 1
    assert metrics(tmp_path, "train/top2_accuracy")


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dataset of the image-text example, in small; the working directory contains it."""
    monkeypatch.syspath_prepend(str(IMAGE_TEXT))
    from shapes import write  # type: ignore[import-not-found]

    write(tmp_path / "shapes", train=200, test=50)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_pairs(ranks: int, run_dir: Path, *overrides: str) -> None:
    presets = ("--config-dir", str(IMAGE_TEXT / "presets"), "data.num_workers=0", "model.width=8")
    train_on(ranks, run_dir, *presets, *overrides, experiment="image_text")


@pytest.mark.slow
def test_pairs_train_alike_on_one_and_two_ranks(shapes: Path) -> None:
    for ranks in (1, 2):
        train_pairs(ranks, shapes / f"run-{ranks}", "train.max_steps=3", "train.global_batch_size=20")
    one, two = records(shapes / "run-1"), records(shapes / "run-2")
    assert len(one) == len(two) == 4
    for ours, theirs in zip(one, two, strict=True):
        for name in ("train/loss", "eval/loss", "eval/first_to_second", "eval/second_to_first", "train/grad_norm"):
            assert (name in ours) == (name in theirs)
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3), name
    assert one[0]["train/loss"] == pytest.approx(math.log(20), abs=0.7)  # as guessing among the 20 of a global batch


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_captions_find_their_images_in_half_precision(precision: str, shapes: Path) -> None:
    steps = 8 if precision == "fp16" else 60
    train_pairs(2, shapes / "run", f"precision={precision}", f"train.max_steps={steps}", "train.max_epochs=null")
    losses = metrics(shapes / "run")
    assert len(losses) >= steps - 3  # in fp16 the first scale may be too large: skipped steps have no loss
    assert losses[-1] < losses[0] - (0.1 if precision == "fp16" else 1.5)
    assert metrics(shapes / "run", "eval/first_to_second")[-1] > (0 if precision == "fp16" else 0.1)


def test_captions_in_text_files_give_the_same_batches_as_in_json(shapes: Path) -> None:
    with_text = [
        {"__key__": f"{number}", "txt": f"a caption of {number}", "json": {"caption": f"a caption of {number}"}}
        for number in range(10)
    ]
    write_shards(with_text, shapes / "text", shards=1)
    options = {"name": "caption", "role": "text", "tokenizer": "bytes", "length": 64}
    first, second = (
        next(ShardLoader(f"{shapes}/text/*.tar", fields, global_batch_size=10, num_workers=0).epoch(0))
        for fields in ({"txt": options}, {"json": {**options, "key": "caption"}})
    )
    assert first["caption"].tolist() == second["caption"].tolist()
    assert bytes(first["caption"][0, :12].tolist()) == b"a caption of"
