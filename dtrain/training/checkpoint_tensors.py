"""The tensors of a checkpoint: the piece of each that a rank writes, their files, and reading any part of them.

* A *piece* is a box of a tensor: the values, their offset, and the shape of the whole tensor. A rank of a sharded run writes
  the pieces that it holds. Of a piece that several ranks hold, one of them, chosen by the tensor's name, writes it.
* A *whole* file has all tensors of one group, such as ``model.safetensors``. A *rank's* file, such as
  ``rank-00001-of-00004.safetensors``, has pieces of all groups, named ``model.<name>``.
* ``StoredTensor`` reads a part of a tensor from files of either kind, and only that part. So a run may be saved and resumed
  with any numbers of ranks, sharded or not, and no rank ever holds a whole sharded model.

A rank's file has the format of PyTorch's distributed checkpoints in safetensors: ``HuggingFaceStorageReader`` of
``torch.distributed.checkpoint`` reads them. Its writer is not used: it holds the shard twice more in memory, and needs
collectives of all ranks in the middle of a save, which would make them wait for each other's disks.
"""

from __future__ import annotations

import json
import sys
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

from dtrain.config.errors import ConfigError
from dtrain.distributed.world import World

# Names of torch.distributed.checkpoint._hf_utils (2.9 to 2.13).
_SHARDING = "DCP_SHARDING_INFO"
_OFFSET = "saved_offsets"
_SHAPE = "shape"  # of the whole tensor; torch ignores it
_DCP_METADATA = {"DCP_VERSION": "1.0", "format": "pt"}

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Attributes:
        values: The box's values, on the CPU.
        offset: Its first index in each dimension of the tensor.
        shape: Shape of the whole tensor.
    """

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor:
    """A tensor in the files of a checkpoint. Indexing it reads a part.

    Args:
        name: For messages.
        shape: Of the whole tensor.

    Attributes:
        shape: The argument.
    """

    def __init__(self, name: str, shape: Iterable[int]) -> None:
        self.shape = torch.Size(shape)
        self._name = name
        self._pieces: list[tuple[Any, str, tuple[int, ...], tuple[int, ...]]] = []

    def add(self, file: Any, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Adds a box: ``key`` of an open safetensors ``file``."""
        self._pieces.append((file, key, offset, sizes))

    @property
    def problem(self) -> str | None:
        """Why the files do not have each value of the tensor exactly once; None if they have."""
        inside = all(
            len(offset) == len(self.shape)
            and all(first >= 0 and first + size <= n for first, size, n in zip(offset, sizes, self.shape, strict=True))
            for _, _, offset, sizes in self._pieces
        )
        found, expected = sum(prod(sizes) for *_, sizes in self._pieces), prod(self.shape)
        offsets = [offset for _, _, offset, sizes in self._pieces if all(sizes)]
        if inside and found == expected and len(set(offsets)) == len(offsets):
            return None
        return f"{self._name} has {found:,} of {expected:,} values"

    def __getitem__(self, index: Box | EllipsisType) -> Tensor:
        """Reads a box, given as one slice without a step for each dimension, or the whole tensor (``...``).

        Raises:
            OSError, SafetensorError: If a file cannot be read.
        """
        box = tuple(slice(0, n) for n in self.shape) if index is ... else index
        sizes = tuple(part.stop - part.start for part in box)
        # Without any values no piece overlaps, and the first one gives the dtype.
        overlaps = [each for each in self._pieces if _overlap(box, each[2], each[3]) is not None] or self._pieces[:1]
        result: Tensor | None = None
        for file, key, offset, piece_sizes in overlaps:
            common = _overlap(box, offset, piece_sizes) or tuple(slice(first, first) for first in offset)
            values = file.get_slice(key)[_moved(common, offset)]
            if values.shape == torch.Size(sizes):
                return values  # the usual case: one piece has the whole box
            if result is None:
                result = values.new_empty(sizes)
            if values.numel():
                result[_moved(common, tuple(part.start for part in box))] = values
        assert result is not None
        return result


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank has a part."""
    # Importing it takes half a second, which only sharded runs should spend.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, sharing its memory; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_box(tensor: Tensor) -> Box:
    """Where this rank's part of a tensor lies in it: one slice for each dimension.

    Raises:
        ConfigError: If it is not a tensor of ``fully_shard``, of which each dimension is sharded at most once.
    """
    box = [slice(0, n) for n in tensor.shape]
    if is_sharded(tensor):
        for size, coordinate, placement in _placed(tensor):
            if type(placement).__name__ not in ("Shard", "Replicate"):
                raise ConfigError(f"a tensor is placed as {placement}, want Shard or Replicate, as fully_shard does.")
            if placement.is_shard():
                n = tensor.shape[placement.dim]
                rows = -(-n // size)  # as torch.chunk
                box[placement.dim] = slice(min(n, rows * coordinate), min(n, rows * (coordinate + 1)))
        if tuple(part.stop - part.start for part in box) != tuple(local(tensor).shape):
            raise ConfigError(
                f"a tensor of shape {list(tensor.shape)} is placed as {tensor.placements}, but this rank has "  # type: ignore[attr-defined]
                f"{list(local(tensor).shape)} of it. Shard each dimension at most once, as fully_shard does."
            )
    return tuple(box)


def like(target: Tensor, values: Tensor) -> Tensor:
    """A tensor with this rank's ``values``, distributed as ``target``, with its memory format and device."""
    new = torch.empty_like(target, dtype=values.dtype)
    local(new).copy_(values)
    return new


def replicated(target: Tensor, values: Tensor) -> Tensor:
    """Equal ``values`` of all ranks as a ``DTensor`` on the mesh of ``target``, if that is one."""
    if not is_sharded(target):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = target.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def written_by(name: str, tensor: Tensor, world: World) -> bool:
    """Whether this rank writes its part of a tensor of a sharded run, rather than another rank that holds the same part.

    Args:
        name: Decides which of them it is.
        tensor: A ``DTensor``, or a tensor that is equal on all ranks.
        world: The ranks.
    """
    copies, number = world.size, world.rank
    if is_sharded(tensor):
        copies, number = 1, 0
        for size, coordinate, placement in _placed(tensor):
            if not placement.is_shard():
                copies, number = copies * size, number * size + coordinate
    return zlib.crc32(name.encode()) % copies == number


def rank_file(rank: int, ranks: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def write_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors of one group.

    Raises:
        OSError: On a write failure.
    """
    _write(path, tensors, None)


def write_pieces(path: Path, groups: Mapping[str, Mapping[str, Piece]]) -> None:
    """Writes a rank's file.

    Args:
        path: The file.
        groups: Group to name to piece, such as ``{"model": {...}, "optimizer": {...}}``.

    Raises:
        OSError: On a write failure.
    """
    pieces = {f"{group}.{name}": piece for group, named in groups.items() for name, piece in named.items()}
    sharding = {key: {_OFFSET: piece.offset, _SHAPE: piece.shape} for key, piece in pieces.items()}
    tensors = {key: piece.values for key, piece in pieces.items()}
    _write(path, tensors, {_SHARDING: json.dumps(sharding), **_DCP_METADATA})


def read_whole(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one group; their values are read on use.

    Raises:
        OSError, SafetensorError: If the file cannot be read.
    """
    file = safe_open(path, "pt")
    names = file.keys()
    tensors = {}
    for name in names:
        shape = tuple(file.get_slice(name).get_shape())
        tensors[name] = StoredTensor(name, shape)
        tensors[name].add(file, name, (0,) * len(shape), shape)
    return tensors


def read_pieces(paths: Iterable[Path]) -> dict[str, dict[str, StoredTensor]]:
    """Group to the tensors in the files of all ranks; their values are read on use.

    Raises:
        OSError, SafetensorError: If a file cannot be read.
        ValueError: If a file is not one of a rank, or values are missing; names the first few.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    for path in paths:
        file = safe_open(path, "pt")
        keys = file.keys()
        try:
            sharding = json.loads((file.metadata() or {})[_SHARDING])
            for key in keys:
                group, _, name = key.partition(".")
                shape, offset = tuple(sharding[key][_SHAPE]), tuple(sharding[key][_OFFSET])
                tensor = groups.setdefault(group, {}).setdefault(name, StoredTensor(key, shape))
                tensor.add(file, key, offset, tuple(file.get_slice(key).get_shape()))
                if tuple(tensor.shape) != shape:
                    raise ValueError(f"{key} has shape {list(shape)}, in another file {list(tensor.shape)}")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name} does not say where its pieces lie ({error!r})") from error
    problems = [problem for named in groups.values() for each in named.values() if (problem := each.problem)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("; ".join(problems[:5]) + more)
    return groups


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    # Here and not in the training loop: making a channels_last weight contiguous takes as long as copying it.
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(contiguous, path, metadata)
    except SafetensorError as error:  # raised instead of OSError, also for a full disk
        raise OSError(f"{path}: {error}") from error


def _placed(tensor: Any) -> list[tuple[int, int, Any]]:
    """Size, this rank's coordinate and the placement of each dimension of a DTensor's mesh."""
    mesh = tensor.device_mesh
    return list(zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True))


def _overlap(box: Box, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
    """The common part of a box and a piece; None if there is none."""
    common = tuple(
        slice(max(part.start, first), min(part.stop, first + size))
        for part, first, size in zip(box, offset, sizes, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    """A box as seen from ``origin``."""
    return tuple(slice(part.start - first, part.stop - first) for part, first in zip(box, origin, strict=True))
