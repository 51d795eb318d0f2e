from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from dtrain.data.samples import Arrays, Generated, as_dataset


def test_a_sample_is_a_row_of_each_array() -> None:
    x, y = np.arange(6).reshape(3, 2), ["a", "b", "c"]
    named, placed = Arrays({"x": x, "y": y}), Arrays((x, torch.arange(3)))
    assert len(named) == len(placed) == 3
    assert (named[1]["x"].tolist(), named[1]["y"]) == ([2, 3], "b")
    assert [value.tolist() for value in placed[2]] == [[4, 5], 2]


@pytest.mark.parametrize(
    ("arrays", "message"), [({"x": np.zeros(3), "y": np.zeros(4)}, r"lengths \[3, 4\]"), ({}, r"lengths \[\]")]
)
def test_arrays_of_different_lengths_are_refused(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrays(arrays)


def test_the_fingerprint_of_arrays_tells_them_apart() -> None:
    x = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    same = {Arrays({"x": copy}).fingerprint for copy in (x, x.copy(), np.asfortranarray(x))}
    others = [
        {"x": x + 1},
        {"x": x[::-1]},
        {"x": x[:-1]},
        {"x": x.astype(np.float64)},
        {"y": x},
        {"x": torch.from_numpy(x).bfloat16()},
        {"x": ["a"] * 500},
        {"x": ["b"] * 500},
        (x,),
    ]
    assert len(same) == 1
    assert len(same | {Arrays(other).fingerprint for other in others}) == 1 + len(others)


def draw(sample: int, rng: np.random.Generator, scale: float = 1.0) -> tuple[float, int]:
    return scale * rng.random(), sample


def test_generated_samples_are_told_apart_by_their_function() -> None:
    assert len(Generated(draw, 7)) == 7
    assert Generated(draw, 7).fingerprint == Generated(functools.partial(draw, scale=2), 9).fingerprint
    assert Generated(draw, 7).fingerprint != Generated(lambda sample, rng: 1, 7).fingerprint
    with pytest.raises(ValueError, match="got length 0"):
        Generated(draw, 0)


def test_dicts_and_tuples_are_arrays_and_map_style_data_sets_are_themselves() -> None:
    assert isinstance(as_dataset({"x": [1]}), Arrays)
    assert isinstance(as_dataset(([1], [2])), Arrays)
    for dataset in ([(1, 2)], TensorDataset(torch.zeros(2)), Generated(draw, 3), np.zeros(3)):
        assert as_dataset(dataset) is dataset


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


def test_what_has_no_length_or_no_items_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"got a Stream, want .*write it to shards"):
        as_dataset(Stream())
    with pytest.raises(ValueError, match=r"got a int, want a data set with __len__ and __getitem__"):
        as_dataset(3)
