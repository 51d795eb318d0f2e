"""Arrays as samples: row ``n`` of each is sample ``n``.

* A *file array* is a ``.npy`` file, mapped: memory holds one row. Those of an ``.npz`` are unpacked to such files first.
* How a row is stored follows from its array: single integers as text (``.cls``), all others as ``.npy``, which the loader
  reads back in the same dtype; pixels as ``.png`` where the user says so.
* bf16, which numpy does not have, is stored as ml_dtypes does it: as ``V2``, two bytes without meaning of their own.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtrain.data.writer import Sample
from dtrain.packing.sizes import tar_bytes
from dtrain.packing.workers import Tick

#: What floats can be stored in, by the names of precisions.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NPY_HEADER = 128
_MAPPED = "\x93NUMPY"
_name_fits = re.compile(r"[A-Za-z0-9_-]+").fullmatch


@dataclass(frozen=True)
class Found:
    """An array in a file, by the name it was found under."""

    name: str
    path: Path
    member: str | None = None  # of an .npz

    @property
    def unpacked_name(self) -> str:
        """File name for what is unpacked."""
        return f"unpacked-{self.name}.npy"

    def unpack(self, path: Path, tick: Tick) -> None:
        """Writes the member of an ``.npz`` to a file of its own."""
        assert self.member is not None
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        tick(1)


def find(files: Sequence[Path], chosen: Mapping[str, str]) -> list[Found]:
    """The arrays to pack.

    Args:
        files: ``.npy``, each an array of the file's name, and ``.npz``.
        chosen: New name to name of those wanted; empty takes all under their own.

    Raises:
        ValueError: If a file is of another kind, names collide or cannot be that of a field, or a chosen one is missing.
        OSError: If a file cannot be read.
    """
    found: dict[str, Found] = {}
    for path in files:
        for array in _in_file(path):
            if array.name in found:
                raise ValueError(
                    f"{path} and {found[array.name].path} both have an array {array.name!r}. Pack one of them, or rename it."
                )
            found[array.name] = array
    missing = [name for name in chosen.values() if name not in found]
    if missing:
        raise ValueError(f"--field: there is no array {missing[0]!r} among {', '.join(found)}.")
    named = chosen or {name: name for name in found}
    extensions: dict[str, str] = {}
    for name in named:
        if not _name_fits(name) or name.lower() in extensions:
            other = f", like that of {extensions[name.lower()]!r}" if name.lower() in extensions else ""
            raise ValueError(
                f"array {name!r}: its name cannot be a field's in a shard{other}. Give it one of lower-case letters and "
                f"digits: --field x={name}."
            )
        extensions[name.lower()] = name
    return [Found(name, found[source].path, found[source].member) for name, source in named.items()]


def _in_file(path: Path) -> Iterator[Found]:
    if path.suffix == ".npy":
        yield Found(path.stem, path)
    elif path.suffix == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.namelist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path}: not a readable npz file: {error}.") from error
        yield from (Found(member.removesuffix(".npy"), path, member) for member in members)
    else:
        raise ValueError(f"{path}: want .npy or .npz files. Save an array with numpy.save.")


@dataclass(frozen=True)
class Field:
    """One array, ready to be read by rows.

    Args:
        name: Of the field.
        path: ``.npy`` file.
        store: ``"cls"``, ``"npy"`` or ``"png"``.
        dtype: One of ``DTYPES`` that floats are converted to; None keeps them.
    """

    name: str
    path: Path
    store: str
    dtype: str | None = None

    @property
    def extension(self) -> str:
        """In the shards."""
        return f"{self.name.lower()}.{self.store}"

    def rows(self) -> np.ndarray:
        """The array, mapped, ``[samples, ...]``.

        Raises:
            ValueError: If it holds no numbers, or has no rows.
        """
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(
                f"array {self.name!r}: {error} ({self.path}). Only arrays of numbers can be packed."
            ) from error
        # long doubles are numbers that no tensor can hold
        if array.dtype.kind not in "biufc" or array.dtype.char in "gG" or array.ndim < 1:
            raise ValueError(
                f"array {self.name!r}: {array.dtype} {list(array.shape)}, want numbers as tensors have them, with one row for "
                "each sample."
            )
        return array

    def encode(self, row: np.ndarray) -> Any:
        """A row as the writer takes it.

        Raises:
            ValueError: If it does not fit the dtype.
        """
        if self.store == "png":
            return row[..., 0] if row.ndim == 3 and row.shape[2] == 1 else row
        return row if self.dtype is None else _converted(row, DTYPES[self.dtype])

    def config(self, row: np.ndarray) -> dict[str, str]:
        """What ``data.fields`` says of it."""
        floats = row.dtype.kind == "f"
        if self.store == "cls":
            role = "label"
        elif self.store == "png" or (row.dtype == np.uint8 and row.ndim == 3 and row.shape[2] == 3):
            role = "image"
        else:
            role = ("feature" if row.ndim else "target") if floats else "id"
        return {"name": self.name, "role": role}

    def tar_bytes(self, row: np.ndarray) -> int:
        """About what a row takes in a tar."""
        if self.store == "cls":
            return int(tar_bytes(1))
        if self.store == "png":
            return int(tar_bytes(row.nbytes))
        width = row.itemsize if self.dtype is None else DTYPES[self.dtype].itemsize
        return int(tar_bytes(_NPY_HEADER + row.size * width))


def prepare(
    found: Sequence[Found], paths: Mapping[str, Path], dtypes: Mapping[str, str], png: Sequence[str]
) -> list[Field]:
    """Decides how arrays are stored.

    Args:
        found: The arrays.
        paths: Name to ``.npy`` file.
        dtypes: Name to one of ``DTYPES``; the name ``""`` stands for all floats.
        png: Names of those whose rows are stored as PNG.

    Raises:
        ValueError: If a name or a dtype is unknown or does not suit its array, or arrays have not the same number of rows.
    """
    names = [array.name for array in found]
    for option, asked in (("--dtype", dtypes), ("--png", png)):
        unknown = [name for name in asked if name and name not in names]
        if unknown:
            raise ValueError(f"{option}: there is no array {unknown[0]!r} among {', '.join(names)}.")
    if set(dtypes.values()) - set(DTYPES):
        raise ValueError(f"--dtype: got {', '.join(dtypes.values())}, want {', '.join(DTYPES)}.")
    fields, lengths = [], {}
    for name in names:
        rows = Field(name, paths[name], "npy").rows()
        lengths[name] = len(rows)
        floats = rows.dtype.kind == "f"
        if name in dtypes and not floats:
            raise ValueError(f"--dtype {name}={dtypes[name]}: it holds {rows.dtype}. Only floats are converted.")
        pixels = rows.dtype == np.uint8 and (rows.ndim == 3 or (rows.ndim == 4 and rows.shape[3] in (1, 3)))
        if name in png and not pixels:
            raise ValueError(
                f"--png {name}: it is {rows.dtype} {list(rows.shape)}, want uint8 [samples, height, width] or [..., 1 or 3]."
            )
        store = "png" if name in png else "cls" if rows.ndim == 1 and rows.dtype.kind in "iu" else "npy"
        fields.append(Field(name, paths[name], store, (dtypes.get(name) or dtypes.get("")) if floats else None))
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"arrays have different numbers of rows: {lengths}. Choose those that belong together with --field NAME=ARRAY."
        )
    if not lengths[names[0]]:
        raise ValueError(f"the arrays {', '.join(names)} have no rows.")
    return fields


@dataclass(frozen=True)
class Rows:
    """The samples of one shard.

    Args:
        fields: The arrays.
        numbers: Of the rows, int64, in order.
    """

    fields: Sequence[Field]
    numbers: np.ndarray

    def __call__(self, on_bad: Callable[[Path, str], None]) -> Iterator[Sample]:
        """The samples; their keys are the numbers of the rows."""
        arrays = [(field, field.rows()) for field in self.fields]
        for number in self.numbers.tolist():
            sample: dict[str, Any] = {"__key__": f"{number:09d}"}
            for field, array in arrays:
                try:
                    sample[field.extension] = field.encode(np.asarray(array[number]))
                except ValueError as error:
                    raise ValueError(f"array {field.name!r}, row {number}: {error}") from error
            yield sample


def _converted(row: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    source = torch.from_numpy(np.array(row, dtype=row.dtype.newbyteorder("=")))
    result = source.to(dtype)
    lost = source.isfinite() & ~result.isfinite()
    if lost.any():
        value = source[lost].flatten()[0].item()
        raise ValueError(f"{value:g} is outside the range of {str(dtype).removeprefix('torch.')}. Store it in fp32.")
    return result.view(torch.int16).numpy().view("V2") if dtype == torch.bfloat16 else result.numpy()


def unpacking(found: Sequence[Found]) -> dict[str, Callable[[Path, Tick], None]]:
    """What has to be unpacked first: file name to the job that writes it."""
    return {array.unpacked_name: partial(Found.unpack, array) for array in found if array.member is not None}
