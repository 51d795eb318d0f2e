"""The picture of a confusion table: pixels where they should be, at any number of classes."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dtrain.tracking import confusion
from dtrain.tracking.confusion import confusion_picture


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


def test_with_many_classes_a_cell_has_the_largest_share_of_its_block() -> None:
    share = np.random.default_rng(0).random((10, 10))
    share[3] = np.nan
    share[8:] = np.nan
    largest = confusion._largest_of(share, 4)
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
    with pytest.raises(ValueError, match=r"got a table of shape .*want \[classes, classes\]"):
        confusion_picture(table)
