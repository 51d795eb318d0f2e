from __future__ import annotations

import io
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor

from dtrain.data import Batch
from dtrain.data.parcel import Parcel


class _FilesSent(ForkingPickler):
    """Pickles as torch does for another process, and counts the tensors that would be sent as open files."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, 5)
        self.files = 0

    def reducer_override(self, value: object) -> object:
        if isinstance(value, Tensor):
            self.files += 1
            return torch.Tensor.__reduce_ex__(value, 5)
        return NotImplemented


def arrived(batch: Batch) -> tuple[Batch, int]:
    stream = io.BytesIO()
    pickler = _FilesSent(stream)
    pickler.dump(Parcel(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of torch for read-only arrays
        return ForkingPickler.loads(stream.getvalue()), pickler.files


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)
def test_small_tensors_arrive_as_they_were_sent_without_a_file(dtype: torch.dtype) -> None:
    batch = Batch({"x": torch.arange(12).view(3, 4).to(dtype)}, ["s/0", "", "s/2"], torch.tensor([True, False, True]))
    got, files = arrived(batch)
    assert files == 0
    assert type(got) is Batch
    assert got["x"].dtype == dtype
    assert torch.equal(got["x"], batch["x"])
    assert torch.equal(got.valid, batch.valid)
    assert got.valid.dtype == torch.bool
    got["x"][0] = 1  # it can be written to


def test_large_tensors_are_sent_as_files_and_the_rest_as_it_is() -> None:
    columns = {"image": torch.zeros(64, 64, 64, 3, dtype=torch.uint8), "caption": ["a"] * 64, "label": torch.zeros(64)}
    batch = Batch(columns, ["s/0"] * 64, torch.ones(64, dtype=torch.bool), [{"key": "s/9", "reason": "torn"}])
    got, files = arrived(batch)
    assert files == 1
    assert list(got) == list(columns)
    assert got["caption"] == columns["caption"]
    assert (got.sample_keys, got.bad, got.wire_bytes) == (batch.sample_keys, batch.bad, batch.wire_bytes)


def test_empty_rows_arrive() -> None:
    got, _ = arrived(Batch({"x": torch.zeros(2, 0)}, ["s/0", "s/1"], torch.ones(2, dtype=torch.bool)))
    assert got["x"].shape == (2, 0)
    assert got["x"].dtype == torch.float32
