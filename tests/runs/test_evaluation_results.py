from __future__ import annotations

import io
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dtrain.runs import evaluation_results
from dtrain.runs.evaluation_results import (
    CheckpointEvaluation,
    aligned,
    class_table,
    class_table_omissions,
    confusion_picture,
    evaluation_banner,
    explain_not_finite,
    per_class,
    side_by_side,
    worst_first,
)
from tests.refusals import refused


def evaluated(precision: str = "fp32", tables: dict[str, Any] | None = None, **metrics: float) -> CheckpointEvaluation:
    return CheckpointEvaluation(
        checkpoint=Path("/run/checkpoints/step-000000050"),
        weights="ema",
        precision=precision,
        data={"eval": "test-*.tar", "fingerprint": "0123456789abcdef"},
        config={"task": {"_target_": "a.Task"}},
        ranks=2,
        metrics={"loss": 0.5, **metrics, "samples": 100, "bad_samples": 2},
        tables=tables or {},
        seconds=4.0,
        memory={"memory/max_resident_gib": 0.25},
    )


def test_precisions_are_compared_with_their_differences_from_the_first() -> None:
    several = [evaluated(accuracy=0.91), evaluated("bf16", accuracy=0.9), evaluated("fp16", accuracy=0.91)]
    heading, *lines = side_by_side(several)
    shown = [dict(zip(heading, line, strict=True)) for line in lines]
    assert [line["precision"] for line in shown] == ["fp32", "bf16", "fp16"]
    assert [line["eval/accuracy"] for line in shown] == ["0.91", "0.9 (-0.01)", "0.91 (+0)"]
    assert {line["eval/samples"] for line in shown} == {"100"}
    assert {line["throughput/samples_per_second"] for line in shown} == {"25"}
    assert {line["memory/max_resident_gib"] for line in shown} == {"0.25"}
    assert len({len(line) for line in aligned([heading, *lines]).splitlines()}) == 1


def test_a_metric_that_one_precision_lacks_leaves_an_empty_cell() -> None:
    spoilt = evaluated("fp16", loss=math.nan)
    for several in ([evaluated(perplexity=1.5), spoilt], [spoilt, evaluated(perplexity=1.5)]):
        heading, *lines = side_by_side(several)
        column = heading.index("eval/perplexity")
        assert sorted(line[column] for line in lines) == ["", "1.5"]


def test_a_metric_that_is_not_finite_is_named_with_its_precision_and_checkpoint() -> None:
    assert explain_not_finite([evaluated(), evaluated("bf16")]) == ""
    text = explain_not_finite(
        [evaluated(rare=math.nan), evaluated("bf16"), evaluated("fp16", loss=math.inf, rare=math.nan)]
    )
    assert "eval/rare is nan in fp32; eval/loss is inf, eval/rare is nan in fp16" in text
    assert "step-000000050" in text


def test_the_banner_names_weights_data_and_cost() -> None:
    shown = evaluation_banner(evaluated(accuracy=0.123456789, tokens=12_345_678))
    assert shown["checkpoint"].endswith("step-000000050 (ema weights)")
    assert shown["data"] == "test-*.tar"
    assert shown["eval/accuracy"] == "0.123457"
    assert shown["eval/tokens"] == "12345678"
    assert shown["memory/max_resident_gib"] == "0.25"


def test_the_files_have_everything_and_their_names_say_what_was_evaluated(tmp_path: Path) -> None:
    tables = {"confusion": torch.tensor([[3, 1], [0, 0]]), "other": torch.tensor([7])}
    paths = evaluation_results.write_evaluation(tmp_path / "new", evaluated(tables=tables, rare=math.nan), ["cat"])
    stem = "step-000000050-ema-fp32-01234567"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}-confusion.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    content = json.loads(paths[0].read_text())
    assert content["metrics"] == {"eval/loss": 0.5, "eval/rare": None, "eval/samples": 100, "eval/bad_samples": 2}
    assert content["not_finite"] == ["eval/rare"]
    assert content["tables"] == {"confusion": [[3, 1], [0, 0]], "other": [7]}
    assert [(one["name"], one["count"], one["recall"]) for one in content["classes"]] == [
        ("cat", 4, 0.75),
        ("1", 0, None),
    ]
    assert content["data"]["eval"] == "test-*.tar"
    assert content["cost"]["throughput/samples_per_second"] == 25


def test_without_a_confusion_there_is_no_picture(tmp_path: Path) -> None:
    (path,) = evaluation_results.write_evaluation(tmp_path, evaluated(), None)
    assert "classes" not in json.loads(path.read_text())


# -- per class


def test_each_class_has_its_recall_precision_count_and_worst_confusion() -> None:
    draw = random.Random(0)
    pairs = [(draw.choice("aabbbc"), draw.choice("abbcd")) for _ in range(200)]
    confusion = torch.tensor([[pairs.count((true, predicted)) for predicted in "abcd"] for true in "abcd"])
    classes = per_class(confusion, ["ape", "bee", "cat"])
    assert [one.name for one in classes] == ["ape", "bee", "cat", "3"]
    for letter, one in zip("abcd", classes, strict=True):
        own = [predicted for true, predicted in pairs if true == letter]
        named = [true for true, predicted in pairs if predicted == letter]
        assert one.count == len(own)
        assert one.precision == named.count(letter) / len(named)
        if own:
            assert one.recall == own.count(letter) / len(own)
            others = {other: own.count(other) for other in "abcd" if other != letter}
            assert one.taken == max(others.values())
            assert one.taken_for == classes["abcd".index(max(others, key=lambda other: others[other]))].name


def test_a_class_without_predictions_has_no_precision_and_one_without_samples_no_recall() -> None:
    first, second = per_class(torch.tensor([[0, 3], [0, 0]]))
    assert (first.recall, first.taken_for, first.taken) == (0, "1", 3)
    assert first.precision != first.precision
    assert second.recall != second.recall
    assert (second.count, second.precision, second.taken_for) == (0, 0, "")


def test_the_worst_classes_come_first_and_the_omitted_ones_are_summarised() -> None:
    confusion = torch.diag(torch.arange(1, 101))
    confusion[:, 0] += 10
    confusion[50] = 0
    classes = per_class(confusion)
    assert [one.name for one in worst_first(classes)] == [str(n) for n in (*range(1, 50), *range(51, 100), 0)]
    nobody_names_them = per_class(torch.tensor([[0, 0, 9], [0, 0, 5], [2, 0, 6]]))
    assert [one.name for one in worst_first(nobody_names_them)] == ["0", "1", "2"]
    lines = class_table(classes)
    assert len(lines) == 21
    assert lines[0][:2] == ["class", "samples"]
    assert lines[1] == ["1", "12", "16.67%", "100.00%", "0 (83.3%)"]
    assert class_table_omissions(classes) == "79 more with a recall from 68.75% to 100.00%, 1 without a sample"
    few = per_class(torch.eye(3, dtype=torch.int64), ["a" * 50, "b", "c"])
    assert class_table_omissions(few) == ""
    assert class_table(few)[1] == ["a" * 31 + "…", "1", "100.00%", "100.00%", ""]


# -- picture of the confusion table


def pixels(png: bytes) -> np.ndarray:
    """Brightness, ``[height, width]``."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=np.float64)


def cells(png: bytes, classes: int) -> np.ndarray:
    """Brightness of each cell's upper left quarter, where no count is written, ``[classes, classes]``."""
    picture = pixels(png)
    # The frame of the matrix is black, and longer than anything else that is: half of the picture's height or width.
    columns = np.flatnonzero((picture < 40).sum(axis=0) > 0.5 * len(picture))
    rows = np.flatnonzero((picture < 40).sum(axis=1) > 0.4 * picture.shape[1])
    top, bottom, left, right = rows[0] + 1, rows[-1], columns[0] + 1, columns[-1]
    places = (np.arange(classes) + 0.15) / classes
    return picture[np.ix_((top + places * (bottom - top)).astype(int), (left + places * (right - left)).astype(int))]


@pytest.mark.slow
def test_a_cell_is_the_darker_the_larger_its_share_of_the_row() -> None:
    table = torch.tensor([[0, 10, 90], [500, 500, 0], [0, 0, 1]])
    shares = table.double() / table.sum(1, keepdim=True)
    seen = cells(confusion_picture(table), 3)
    for brighter, darker in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        assert seen[shares == brighter].min() > seen[shares == darker].max()


def test_a_class_without_samples_is_a_grey_row() -> None:
    seen = cells(confusion_picture(torch.diag(torch.tensor([5, 0, 5, 5]))), 4)
    assert np.ptp(seen[1]) == 0
    assert seen[1, 0] < seen[0, 1]  # of which no share is white


def test_the_same_table_gives_the_same_bytes_and_names_may_hold_anything() -> None:
    names = ["$a_b$", "日本", "x" * 200]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (confusion_picture(torch.eye(3, dtype=torch.int64), names) for _ in range(2))
    assert first == second
    assert first != confusion_picture(torch.eye(3, dtype=torch.int64))


@pytest.mark.slow
def test_with_many_classes_a_cell_has_the_largest_share_of_its_block() -> None:
    share = np.random.default_rng(0).random((10, 10))
    share[3] = np.nan
    share[8:] = np.nan
    largest = evaluation_results._block_maxima(share, 4)
    assert largest.shape == (3, 3)
    for row in range(3):
        for column in range(3):
            block = share[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            numbers = [value for value in block.flatten().tolist() if value == value]
            assert largest[row, column] == max(numbers) if numbers else np.isnan(largest[row, column])
    picture = pixels(confusion_picture(torch.eye(300, dtype=torch.int64), [f"name of {n}" for n in range(300)]))
    assert max(picture.shape) <= 1800


@pytest.mark.parametrize("table", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64)], ids=str)
def test_a_table_that_is_not_square_is_refused(table: Tensor) -> None:
    with refused(ValueError, key="table", remedy="[classes, classes]"):
        confusion_picture(table)
