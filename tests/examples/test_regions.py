"""examples/segmentation.py and examples/boxes.py: metrics of any number of ranks, and runs that are killed and resumed."""

from __future__ import annotations

import importlib
import io
import json
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.fault_hook import faulty
from dtrain.data import Batch, ShardLoader
from dtrain.precision import Precision
from dtrain.training.evaluation import evaluate
from tests.ranks import RanksFailed, run_ranks
from tests.toys import world
from tests.whole_runs import ROOT, metrics, records, train_on, weights

EXAMPLES = ROOT / "examples"
FIELDS: dict[str, dict[str, Any]] = {
    "segmentation": {
        "image.png": {"name": "image", "role": "image", "size": 48},
        "mask.png": {"name": "mask", "role": "mask"},
    },
    "boxes": {
        "png": {"name": "image", "role": "image", "size": 64},
        "json": {"name": "boxes", "role": "boxes", "key": "boxes", "length": 8},
    },
}
FOLDERS = {"segmentation": "shapes-masks", "boxes": "shapes-boxes"}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The two examples; the working directory contains their datasets, in small."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    found = {name: importlib.import_module(name) for name in FOLDERS}
    for name, module in found.items():
        module.write(Path(FOLDERS[name]), train=90, test=34)
    return found


def members(folder: str) -> list[dict[str, bytes]]:
    """The samples of the test shards, by extension, read with tarfile."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(Path(folder).glob("test-*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, extension = member.name.partition(".")
                samples.setdefault(key, {})[extension] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return list(samples.values())


def opened(payload: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(payload)))


def outputs(model: torch.nn.Module, images: list[bytes]) -> Tensor:
    pixels = torch.from_numpy(np.stack([opened(payload) for payload in images])).permute(0, 3, 1, 2)
    with torch.no_grad():
        return model.eval()((pixels / 255 - 0.5) / 0.5)


def evaluated(name: str, model: torch.nn.Module, task: Any) -> list[dict[str, float]]:
    """The result of each rank of one, two and three; the last batches of ranks have masked rows."""

    def rank(number: int, ranks: int) -> dict[str, float]:
        data = ShardLoader(
            f"{FOLDERS[name]}/test-*.tar",
            FIELDS[name],
            global_batch_size=12,
            rank=number,
            world_size=ranks,
            num_workers=0,
            shuffle="none",
        )
        return dict(evaluate(model, task, data, world=world(number, ranks), precision=Precision("fp32")))

    return [result for ranks in (1, 2, 3) for result in run_ranks(ranks, rank, ranks)]


@pytest.mark.slow
def test_the_iou_is_that_of_scikit_learn_and_equal_to_the_last_bit_on_one_to_three_ranks(
    modules: dict[str, Any],
) -> None:
    scores = pytest.importorskip("sklearn.metrics")
    segmentation = modules["segmentation"]
    torch.manual_seed(1)
    model = segmentation.UNet(width=4)
    results = evaluated("segmentation", model, segmentation.Segmentation())
    samples = members("shapes-masks")
    predicted = outputs(model, [sample["image.png"] for sample in samples]).argmax(dim=1).numpy().flatten()
    classes = np.stack([opened(sample["mask.png"]) for sample in samples]).flatten()
    known = classes != 255
    assert 0 < known.sum() < known.size
    assert len(np.unique(predicted)) > 1
    want = scores.jaccard_score(classes[known], predicted[known], average=None, labels=range(4))
    for name in ("mean_iou", *(f"iou_{name}" for name in segmentation.CLASSES)):
        assert len({result[name] for result in results}) == 1, name
    assert results[0]["mean_iou"] == pytest.approx(want.mean(), abs=1e-9)
    assert [results[0][f"iou_{name}"] for name in segmentation.CLASSES] == pytest.approx(want.tolist(), abs=1e-9)
    assert results[0]["pixel_accuracy"] == pytest.approx((classes == predicted)[known].mean(), abs=1e-9)
    assert results[0]["samples"] == 34


def average_precision(scored: list[tuple[float, bool]], boxes: int) -> float:
    """Area below the precision, made monotone, over the recall; predictions in the same thousandth of scores count at once."""
    ranked: dict[int, list[bool]] = {}
    for score, correct in scored:
        ranked.setdefault(int(np.float32(score) * np.float32(1000)), []).append(correct)
    points, right, every = [], 0, 0
    for score in sorted(ranked, reverse=True):
        right, every = right + sum(ranked[score]), every + len(ranked[score])
        points.append((right / boxes, right / every))
    area, before = 0.0, 0.0
    for number, (recall, _) in enumerate(points):
        area += (recall - before) * max(precision for _, precision in points[number:])
        before = recall
    return area


@pytest.mark.slow
def test_the_average_precision_is_that_of_a_loop_and_equal_to_the_last_bit_on_one_to_three_ranks(
    modules: dict[str, Any],
) -> None:
    boxes = modules["boxes"]
    torch.manual_seed(0)
    model = boxes.Detector(width=4)
    with torch.no_grad():  # some boxes of the usual size in every image
        model[-1].weight.mul_(3)
        model[-1].bias[2:] = torch.tensor([-1.1, -1.1, 1.1, 1.1])
    results = evaluated("boxes", model, boxes.Detection(most=100))
    samples = members("shapes-boxes")
    predicted = outputs(model, [sample["png"] for sample in samples])
    scored: list[tuple[float, bool]] = []
    count = 0
    for output, sample in zip(predicted, samples, strict=True):
        missing = json.loads(sample["json"])["boxes"]
        count += len(missing)
        found = [
            (output[kind, row, column].sigmoid().item(), kind, row, column)
            for kind in range(2)
            for row in range(8)
            for column in range(8)
        ]
        for score, kind, row, column in sorted(found, key=lambda it: -it[0])[:100]:
            left, top, right, bottom = (8 * output[2:, row, column].double()).tolist()
            box = (8 * column + 4 + left, 8 * row + 4 + top, 8 * column + 4 + right, 8 * row + 4 + bottom)
            overlaps = [iou(box, other) if other[4] == kind else 0.0 for other in missing]
            correct = max(overlaps, default=0.0) >= 0.5
            scored.append((score, correct))
            if correct:
                del missing[int(np.argmax(overlaps))]
    assert sum(correct for _, correct in scored) > 5
    assert len({result["ap50"] for result in results}) == 1
    assert results[0]["ap50"] == pytest.approx(average_precision(scored, count), abs=1e-9)


def iou(one: Any, other: Any) -> float:
    width, height = (min(one[2 + axis], other[2 + axis]) - max(one[axis], other[axis]) for axis in (0, 1))
    shared = max(width, 0) * max(height, 0)
    areas = [max(box[2] - box[0], 0) * max(box[3] - box[1], 0) for box in (one, other)]
    return float(shared / (sum(areas) - shared))


def test_boxes_count_where_their_centre_is_and_padding_and_masked_rows_do_not(modules: dict[str, Any]) -> None:
    boxes = modules["boxes"]
    task, image = boxes.Detection(), torch.zeros(2, 3, 64, 64)
    given = torch.zeros(2, 3, 5)
    given[0, 0] = torch.tensor([8.0, 16, 24, 24, 1])  # the centre, (16, 20), is in row 2, column 2
    exact = torch.full((2, 6, 8, 8), -30.0)
    exact[0, 1, 2, 2] = 30
    exact[0, 2:, 2, 2] = (given[0, 0, :4] - 20) / 8

    def batch(valid: list[bool]) -> Batch:
        columns = {"image": image, "boxes": given, "boxes_count": torch.tensor([1, 0])}
        return Batch(columns, ["a", "b"], torch.tensor(valid), [])

    model = torch.nn.Module()
    model.forward = lambda images: exact  # type: ignore[method-assign]
    model.eval()
    output = task(model, batch([True, True]))
    assert output.loss_sum.item() == pytest.approx(0, abs=1e-6)
    assert output.tables["boxes"].tolist() == [1]
    assert output.tables["predictions"].sum(1).tolist() == [1, 20]
    exact[1, 0, 0, 0] = 30  # a box where there is none
    assert task(model, batch([True, True])).loss_sum.item() > 20
    assert task(model, batch([True, False])).loss_sum.item() == pytest.approx(0, abs=1e-6)
    assert task(model, batch([True, False])).tables["predictions"].sum(1).tolist() == [1, 10]


def train(name: str, ranks: int, run_dir: Path, *overrides: str, steps: int = 12) -> None:
    small = ("--config-dir", str(EXAMPLES / "presets"), "model.width=4", "train.global_batch_size=12")
    train_on(ranks, run_dir, *small, "train.max_epochs=null", f"train.max_steps={steps}", *overrides, experiment=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_killed_and_resumed_on_two_ranks_a_run_equals_an_undisturbed_one_bit_for_bit(
    name: str, modules: dict[str, Any], tmp_path: Path
) -> None:
    often, workers = "checkpoint.every_steps=3", "data.num_workers=1"
    train(name, 2, tmp_path / "whole", often)
    with pytest.raises(RanksFailed) as failed:
        train(name, 2, tmp_path / "run", often, workers, faulty("kill@rank=1,step=9"))
    assert str(-signal.SIGKILL) in str(failed.value) or "SIGKILL" in str(failed.value)
    assert len(metrics(tmp_path / "run")) < 12
    train(name, 2, tmp_path / "run", often, workers)
    for step in (9, 12):  # one of them in the second epoch
        ours, theirs = weights(tmp_path / "run", step), weights(tmp_path / "whole", step)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    metric = {"segmentation": "eval/mean_iou", "boxes": "eval/ap50"}[name]
    assert metrics(tmp_path / "run", metric)[-1] == metrics(tmp_path / "whole", metric)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_it_trains_alike_on_one_to_three_ranks(name: str, modules: dict[str, Any], tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        train(name, ranks, tmp_path / f"{ranks}", steps=4)
    first = records(tmp_path / "1")
    for ranks in (2, 3):
        for ours, theirs in zip(records(tmp_path / f"{ranks}"), first, strict=True):
            for key in ("train/loss", "train/grad_norm", "eval/loss"):
                assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-3), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs", "metric", "least"), [("segmentation", 1, "mean_iou", 0.8), ("boxes", 2, "ap50", 0.6)]
)
def test_it_learns(name: str, epochs: int, metric: str, least: float, modules: dict[str, Any], tmp_path: Path) -> None:
    modules[name].write(tmp_path / "data" / FOLDERS[name])
    data = (
        f"data.train={tmp_path}/data/{FOLDERS[name]}/train-*.tar",
        f"data.eval={tmp_path}/data/{FOLDERS[name]}/test-*.tar",
    )
    presets = ("--config-dir", str(EXAMPLES / "presets"))
    train_on(2, tmp_path / "run", *presets, *data, f"train.max_epochs={epochs}", experiment=name)
    assert metrics(tmp_path / "run", f"eval/{metric}")[-1] > least
