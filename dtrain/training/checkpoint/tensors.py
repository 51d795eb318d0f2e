"""The tensors of a checkpoint: the part of each that a rank writes, their files, and reading any part of them.

* A *part* is a box of a tensor: its values, its offset, and the shape of the whole tensor. A rank of a sharded run writes the
  parts that it holds. Of a part that several ranks hold, one of them, chosen by the tensor's name, writes it.
* A *whole* file has all tensors of one group, such as ``model.safetensors``. A *rank's* file, such as
  ``rank-00001-of-00004.safetensors``, has parts of all groups, named ``model.<name>``.
* ``StoredTensor`` reads any box of a tensor from files of either kind, and only this box. So a run may be resumed with a
  different number of ranks, sharded or not, and no rank ever holds a whole sharded model.

A rank's file has the format of PyTorch's distributed checkpoints in safetensors: ``HuggingFaceStorageReader`` of
``torch.distributed.checkpoint`` reads it. Its writer is not used: it holds two more copies of what the rank writes in memory,
and its save is a collective, which a thread would run concurrently with the collectives of the training loop.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.distributed.sharding import is_dtensor, local_part
from dtrain.distributed.world import World

# Names of torch.distributed.checkpoint._hf_utils (2.9 to 2.13).
_SHARDING = "DCP_SHARDING_INFO"
_OFFSET = "saved_offsets"
_SHAPE = "shape"  # of the whole tensor; torch ignores it
_MAX_PROBLEMS = 5  # that one message lists

Box = tuple[slice, ...]  # one slice without a step for each dimension


@dataclass(frozen=True)
class Part:
    """A box of a tensor.

    Attributes:
        values: The values in the box, on the CPU.
        offset: The first index in each dimension of the tensor.
        shape: Shape of the whole tensor.
    """

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _StoredPart:
    """A box of a tensor, under ``key`` in an open safetensors file."""

    file: Any
    key: str
    box: Box


class StoredTensor:
    """A tensor in the files of a checkpoint. Indexing it with a box reads the values in the box; ``...`` reads all.

    Args:
        shape: Of the whole tensor.

    Attributes:
        shape: The argument.
    """

    def __init__(self, shape: Iterable[int]) -> None:
        self.shape = torch.Size(shape)
        self._parts: list[_StoredPart] = []

    def add(self, file: Any, key: str, offset: Iterable[int]) -> None:
        """Adds the part that is ``key`` of an open safetensors file."""
        sizes = file.get_slice(key).get_shape()
        box = tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))
        self._parts.append(_StoredPart(file, key, box))

    @property
    def problem(self) -> str | None:
        """How many values are missing or found twice; None if the parts have each value of the tensor once."""
        found, expected = sum(prod(_sizes(part.box)) for part in self._parts), prod(self.shape)
        starts = [tuple(each.start for each in part.box) for part in self._parts if all(_sizes(part.box))]
        inside = all(
            len(part.box) == len(self.shape)
            and all(each.start >= 0 and each.stop <= n for each, n in zip(part.box, self.shape, strict=True))
            for part in self._parts
        )
        if inside and found == expected and len(set(starts)) == len(starts):
            return None
        return f"has {found:,} of {expected:,} values" + ("" if inside else ", some outside of its shape")

    def __getitem__(self, index: Box | EllipsisType) -> Tensor:
        """Reads a box of the tensor.

        Raises:
            OSError, SafetensorError: If a file cannot be read.
        """
        box = tuple(slice(0, n) for n in self.shape) if index is ... else index
        # Of an empty box no part has anything; the first one then gives the dtype.
        overlapping = [part for part in self._parts if _is_filled(_common(box, part.box))] or self._parts[:1]
        result: Tensor | None = None
        for part in overlapping:
            common = _common(box, part.box)
            values: Tensor = part.file.get_slice(part.key)[_seen_from(part.box, common)]
            if values.shape == torch.Size(_sizes(box)):
                return values  # the usual case: one part has the whole box
            if result is None:
                result = values.new_empty(_sizes(box))
            if values.numel():
                result[_seen_from(box, common)] = values
        assert result is not None
        return result


def like(target: Tensor, values: Tensor) -> Tensor:
    """A tensor with this rank's ``values``, distributed as ``target``, with its memory format and device."""
    new = torch.empty_like(target, dtype=values.dtype)
    local_part(new).copy_(values)
    return new


def written_by(name: str, tensor: Tensor, world: World) -> bool:
    """Whether this rank, of all ranks that hold the same part of a tensor, writes it.

    Args:
        name: Decides which of them it is.
        tensor: A ``DTensor``, or a tensor that is equal on all ranks.
        world: The ranks.
    """
    copies, number = world.size, world.rank
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        copies, number = 1, 0
        for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
            if placement.is_replicate():
                copies, number = copies * size, number * size + coordinate
    return zlib.crc32(name.encode()) % copies == number


# -- files


def rank_file(rank: int, ranks: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def write_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors of one group.

    Raises:
        OSError: On a write failure.
    """
    _write(path, tensors, None)


def write_parts(path: Path, groups: Mapping[str, Mapping[str, Part]]) -> None:
    """Writes a rank's file.

    Args:
        path: The file.
        groups: Group to name to part, such as ``{"model": {...}, "optimizer": {...}}``.

    Raises:
        OSError: On a write failure.
    """
    parts = {f"{group}.{name}": part for group, named in groups.items() for name, part in named.items()}
    # Equal checkpoints are equal files: names are sorted, and of several entries safetensors would choose the order at random.
    sharding = {key: {_OFFSET: part.offset, _SHAPE: part.shape} for key, part in sorted(parts.items())}
    _write(path, {key: part.values for key, part in parts.items()}, {_SHARDING: json.dumps(sharding)})


def read_whole(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one group; their values are read on use.

    Raises:
        OSError, SafetensorError: If the file cannot be read.
    """
    file = safe_open(path, "pt")
    names = file.keys()
    tensors = {name: StoredTensor(file.get_slice(name).get_shape()) for name in names}
    for name, tensor in tensors.items():
        tensor.add(file, name, [0] * len(tensor.shape))
    return tensors


def read_parts(paths: Iterable[Path]) -> dict[str, dict[str, StoredTensor]]:
    """Group to the tensors in the files of all ranks; their values are read on use.

    Raises:
        OSError, SafetensorError: If a file cannot be read.
        ValueError: If a file was not written by a rank, or values are missing; names the first few tensors.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    problems = []
    for path in paths:
        file = safe_open(path, "pt")
        keys = file.keys()
        try:
            sharding = json.loads((file.metadata() or {})[_SHARDING])
            for key in keys:
                group, _, name = key.partition(".")
                tensor = groups.setdefault(group, {}).setdefault(name, StoredTensor(sharding[key][_SHAPE]))
                tensor.add(file, key, sharding[key][_OFFSET])
                if list(tensor.shape) != sharding[key][_SHAPE]:
                    problems.append(f"{key} has different shapes in {path.name} and another file")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} does not say where its parts lie ({error!r})") from error
    for group, named in groups.items():
        problems += [f"{group}.{name} {problem}" for name, each in named.items() if (problem := each.problem)]
    if problems:
        more = f" and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise ValueError("; ".join(problems[:_MAX_PROBLEMS]) + more)
    return groups


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the layout that safetensors requires.

    Call it where nothing waits, such as in the thread that writes: for weights in channels_last it takes as long as the copy to
    the host.
    """
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    try:
        safetensors.torch.save_file(contiguous(tensors), path, metadata)
    except SafetensorError as error:  # raised instead of OSError, also for a full disk
        raise OSError(f"{path}: {error}") from error


# -- boxes


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in box)


def _common(one: Box, other: Box) -> Box:
    """The common part of two boxes. In a dimension in which they do not overlap, it is empty and begins inside of ``other``."""
    starts = [min(max(a.start, b.start), b.stop) for a, b in zip(one, other, strict=True)]
    ends = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(start, max(start, end)) for start, end in zip(starts, ends, strict=True))


def _is_filled(box: Box) -> bool:
    return all(_sizes(box))


def _seen_from(origin: Box, box: Box) -> Box:
    """The indices of ``box`` in a tensor that has the values of ``origin``."""
    return tuple(slice(each.start - at.start, each.stop - at.start) for at, each in zip(origin, box, strict=True))
