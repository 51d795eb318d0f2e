"""The parts of tensors in a checkpoint's files, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from dtrain.training.checkpoint.tensors import Part, rank_file, read_parts, read_whole, write_parts, write_whole
from tests.refusals import refused

SHAPES = ((7, 3), (3,), (), (2, 3, 2), (0, 3))


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def cuts(n: int, ranks: int) -> list[slice]:
    """As ``fully_shard`` cuts a dimension."""
    ends = [0]
    for chunk in torch.arange(n).chunk(ranks):
        ends.append(ends[-1] + len(chunk))
    return [slice(first, last) for first, last in pairwise(ends)]


def write_ranks(folder: Path, tensors: dict[str, Tensor], ranks: int, dim: int = 0) -> list[Path]:
    """A file of each rank, with the tensors cut along a dimension."""
    paths = []
    for rank in range(ranks):
        parts = {}
        for name, tensor in tensors.items():
            if tensor.dim() <= dim or not tensor.numel():
                if rank == 0:
                    parts[name] = Part(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
            elif rank < len(rows := cuts(tensor.shape[dim], ranks)):
                box = [slice(0, n) for n in tensor.shape]
                box[dim] = rows[rank]
                parts[name] = Part(tensor[tuple(box)], tuple(part.start for part in box), tuple(tensor.shape))
        paths.append(folder / rank_file(rank, ranks))
        write_parts(paths[-1], {"model": parts})
    return paths


def boxes(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Every box of a small tensor, empty ones included."""
    yield from product(*([slice(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_any_box_of_a_tensor_can_be_read_from_the_parts_of_any_ranks(tmp_path: Path, ranks: int, dim: int) -> None:
    tensors = {str(number): numbers(shape) for number, shape in enumerate(SHAPES)}
    stored = read_parts(write_ranks(tmp_path, tensors, ranks, dim))["model"]
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name][...], tensor)
        for box in boxes(tensor.shape):
            assert torch.equal(stored[name][box], tensor[box]), (tensor.shape, box)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_every_dtype_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = numbers((5, 3), dtype)
    stored = read_parts(write_ranks(tmp_path, {"x": tensor}, 2))["model"]["x"]
    write_whole(tmp_path / "model.safetensors", {"x": tensor})
    whole = read_whole(tmp_path / "model.safetensors")["x"]
    for box in ((slice(0, 5), slice(0, 3)), (slice(1, 5), slice(1, 2)), (slice(4, 4), slice(0, 3))):
        for found in (stored[box], whole[box]):
            assert torch.equal(found, tensor[box])
            assert found.dtype == dtype


def test_a_whole_file_is_one_of_safetensors_in_any_memory_layout(tmp_path: Path) -> None:
    images = numbers((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    write_whole(tmp_path / "x", {"images": images})
    assert torch.equal(load_file(tmp_path / "x")["images"], images)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_distributed_checkpoints_of_torch_read_the_files(tmp_path: Path, ranks: int) -> None:
    tensors = {"blocks.0.weight": numbers((7, 5)), "bias": numbers((3,), torch.bfloat16)}
    write_ranks(tmp_path, tensors, ranks)
    found: dict[str, Any] = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[f"model.{name}"], tensor)


def test_equal_parts_give_equal_files_in_any_order(tmp_path: Path) -> None:
    names = ["b", "a", "c"]
    for path, order in ((tmp_path / "1", names), (tmp_path / "2", names[::-1])):
        write_parts(path, {"model": {name: Part(torch.ones(2), (0,), (2,)) for name in order}})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("spoilt", ["missing", "twice", "outside"])
def test_a_tensor_whose_parts_do_not_cover_it_once_is_refused_by_name(tmp_path: Path, spoilt: str) -> None:
    rows = {
        "missing": [((2, 3), (0, 0))],
        "twice": [((2, 3), (0, 0)), ((2, 3), (0, 0))],
        "outside": [((2, 3), (0, 0)), ((2, 3), (3, 0))],
    }[spoilt]
    paths = [tmp_path / rank_file(rank, len(rows)) for rank in range(len(rows))]
    for path, (sizes, offset) in zip(paths, rows, strict=True):
        write_parts(path, {"model": {"weight": Part(torch.ones(sizes), offset, (4, 3))}})
    with refused(ValueError, "model.weight"):
        read_parts(paths)


def test_a_file_that_is_none_of_a_rank_is_refused_by_name(tmp_path: Path) -> None:
    write_whole(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    with refused(ValueError, "model.safetensors"):
        read_parts([tmp_path / "model.safetensors"])
