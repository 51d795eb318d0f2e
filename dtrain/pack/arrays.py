"""``dtrain pack arrays``: numpy arrays as shards; row ``n`` of each array belongs to sample ``n``.

* Arrays are memory-mapped ``.npy`` files: memory holds one row. Arrays of an ``.npz`` are first unpacked to ``.npy`` files.
* The *storage* of an array in the shards follows from its dtype and shape: single integers as text (``.cls``), everything
  else as ``.npy``, which the loader reads in the same dtype. With ``--png`` images are stored as ``.png``.
* numpy has no bf16. A bf16 row is stored as ``V2``, two bytes without a numeric type, as ml_dtypes does.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from rich.console import Console

from dtrain.console import OnProgress, progress
from dtrain.data.writer import Sample
from dtrain.pack.command import (
    PackCommand,
    ShardSize,
    assign_to_splits,
    check_shares,
    permutation,
    print_train_command,
    tar_bytes,
    write_preset,
)
from dtrain.pack.staging import OnBadFile, SampleProducer, staged

#: Values of ``--dtype``.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NPY_HEADER = 128
# Float arrays of these names are targets; others are features.
_TARGETS = ("y", "target", "targets")
# Labels with more values are probably not classes.
_MOST_CLASSES = 10_000
# Height and width that the model small_cnn needs.
_SMALLEST_IMAGE = 8
_is_field_name = re.compile(r"[A-Za-z0-9_-]+").fullmatch


def pack_arrays(options: Namespace, console: Console) -> None:
    """Runs ``pack arrays FILE... DST``.

    Raises:
        ValueError: If an option or an array is wrong.
        OSError: If a file cannot be read, ``DST`` holds other shards, or the disk is full.
    """
    command = PackCommand(options, ShardSize(megabytes=64), console)
    check_shares(command.prefix, command.shares)
    dtypes = dict(options.dtype)
    found = _find_arrays(options.files, dict(options.field))
    stats = {array.name: array.path.stat() for array in found}
    plan = command.plan(
        command="arrays",
        arrays={name: f"{stat.st_size} bytes of {stat.st_mtime_ns}" for name, stat in stats.items()},
        members={array.name: array.member for array in found},
        shuffle=options.shuffle,
        dtype=dtypes,
        png=sorted(options.png),
    )
    if command.is_finished(plan):
        return
    with staged(command.destination, [command.prefix, *command.shares], plan) as dataset:
        jobs = {f"unpacked-{array.name}.npy": partial(_unpack, array) for array in found if array.member is not None}
        with progress(console, "arrays unpacked", len(jobs)) as on_progress:
            processes = command.processes(sum(stat.st_size for stat in stats.values()))
            unpacked = iter(dataset.compute(jobs, processes, on_progress))
        paths = {array.name: array.path if array.member is None else next(unpacked) for array in found}
        fields = _choose_storage(found, paths, dtypes, options.png)
        rows = [field.rows() for field in fields]
        count = len(rows[0])
        sample_bytes = sum(field.tar_bytes(row[0]) for field, row in zip(fields, rows, strict=True))
        written = {}
        for split, numbers in assign_to_splits(
            permutation(count, options.seed), command.prefix, command.shares
        ).items():
            if not len(numbers):
                raise ValueError(f"--split {split}: its share of {count} rows is none. Increase the share.")
            if options.shuffle:
                numbers = numbers[permutation(len(numbers), options.seed)]
            bounds = command.size.bounds(len(numbers), sample_bytes)
            make_producer = partial(_row_reader, fields, numbers)
            written[split] = command.write(dataset, split, bounds, make_producer, len(numbers) * sample_bytes)
        dataset.publish({})
        command.print_summary(written)
        declared = [field.config(np.asarray(row[0])) for field, row in zip(fields, rows, strict=True)]
        write_preset(command.destination, dict(zip((field.extension for field in fields), declared, strict=True)))
        model_and_task = _choose_model_and_task(declared, rows)
    print_train_command(command.destination, model_and_task)


def _choose_model_and_task(declared: Sequence[Mapping[str, str]], rows: Sequence[np.ndarray]) -> list[str] | None:
    """Overrides of the model and task that fit the first input and the first label or target; None: none does.

    Args:
        declared: Name and role of each field.
        rows: The array of each field, shape ``[samples, ...]``.
    """
    by_role: dict[str, tuple[str, np.ndarray]] = {}
    for field, array in zip(declared, rows, strict=True):
        if "role" in field:
            by_role.setdefault(field["role"], (field["name"], array))
    feature, array = by_role.get("feature", ("", np.empty(0)))
    inputs = array.shape[1] if array.ndim == 2 else 0
    if "label" in by_role:
        label, labels = by_role["label"]
        classes = int(labels.max()) + 1
        if labels.min() < 0 or classes > _MOST_CLASSES:
            return None
        task = ["task=classification", f"task.label={label}"]
        if "image" in by_role and min(by_role["image"][1].shape[1:3]) >= _SMALLEST_IMAGE:
            return ["model=small_cnn", f"model.classes={classes}", *task, f"task.input={by_role['image'][0]}"]
        if inputs:
            return ["model=mlp", f"model.widths=[{inputs},64,{classes}]", *task, f"task.input={feature}"]
    if "target" in by_role and inputs:
        target, targets = by_role["target"]
        if targets.ndim <= 2:
            outputs = targets.shape[1] if targets.ndim == 2 else 1
            task = ["task=regression", f"task.input={feature}", f"task.target={target}"]
            return ["model=mlp", f"model.widths=[{inputs},64,{outputs}]", *task]
    return None


# -- the arrays of the files


@dataclass(frozen=True)
class _FoundArray:
    """The array of a ``.npy`` file, or the array ``member`` of an ``.npz`` file."""

    name: str  # of the field that it becomes
    path: Path
    member: str | None = None


def _find_arrays(files: Sequence[Path], chosen: Mapping[str, str]) -> list[_FoundArray]:
    """The arrays to pack; ``chosen`` maps field names to array names, and empty packs all under their own names."""
    found: dict[str, _FoundArray] = {}
    for path in files:
        for array in _arrays_of_file(path):
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
        if not _is_field_name(name) or name.lower() in extensions:
            other = f" next to {extensions[name.lower()]!r}" if name.lower() in extensions else ""
            raise ValueError(
                f"array {name!r} cannot be the name of a field in a shard{other}. Choose a name of lower-case letters and "
                f"digits: --field x={name}."
            )
        extensions[name.lower()] = name
    return [_FoundArray(name, found[source].path, found[source].member) for name, source in named.items()]


def _arrays_of_file(path: Path) -> Iterator[_FoundArray]:
    if path.suffix == ".npy":
        yield _FoundArray(path.stem, path)
    elif path.suffix == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.namelist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path}: not a readable npz file: {error}.") from error
        yield from (_FoundArray(member.removesuffix(".npy"), path, member) for member in members)
    else:
        raise ValueError(f"{path}: want .npy or .npz files. Save an array with numpy.save.")


def _unpack(array: _FoundArray, file: BinaryIO, on_progress: OnProgress) -> None:
    """Copies the member of an ``.npz`` to a ``.npy`` file."""
    assert array.member is not None
    with zipfile.ZipFile(array.path) as archive, archive.open(array.member) as source:
        shutil.copyfileobj(source, file, 1 << 20)
    on_progress(1)


# -- fields and samples


@dataclass(frozen=True)
class _ArrayField:
    """An array and how its rows are stored in shards."""

    name: str
    path: Path  # of the .npy file
    storage: str  # cls, npy or png
    dtype: str | None = None  # key of DTYPES that floats are converted to; None keeps the dtype of the array

    @property
    def extension(self) -> str:
        """Extension of the members in the shards."""
        return f"{self.name.lower()}.{self.storage}"

    def rows(self) -> np.ndarray:
        """The memory-mapped array, shape ``[samples, ...]``; an error if its dtype or shape cannot be packed."""
        try:
            array: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(
                f"array {self.name!r}: {error} ({self.path}). Only arrays of numbers can be packed."
            ) from error
        # g and G are long doubles, which torch does not have.
        if array.dtype.kind not in "biufc" or array.dtype.char in "gG" or array.ndim < 1:
            raise ValueError(
                f"array {self.name!r}: got {array.dtype} {list(array.shape)}, want a dtype that torch has and one row for "
                "each sample. Convert it with numpy.ndarray.astype or reshape."
            )
        return array

    def encode(self, row: np.ndarray) -> Any:
        """The value of a row for the shard writer; an error if a finite value becomes infinite in ``dtype``."""
        if self.storage == "png":
            return row[..., 0] if row.ndim == 3 and row.shape[2] == 1 else row
        return row if self.dtype is None else _convert(row, DTYPES[self.dtype])

    def config(self, row: np.ndarray) -> dict[str, str]:
        """The entry of the field in ``data.fields``."""
        floats = row.dtype.kind == "f"
        if self.storage == "cls":
            role = "label"
        elif self.storage == "png" or (row.dtype == np.uint8 and row.ndim == 3 and row.shape[2] == 3):
            role = "image"
        else:
            is_target = not row.ndim or self.name.lower() in _TARGETS
            role = ("target" if is_target else "feature") if floats else "id"
        return {"name": self.name, "role": role}

    def tar_bytes(self, row: np.ndarray) -> int:
        """Approximate size of a row in a tar file."""
        if self.storage == "cls":
            return int(tar_bytes(1))
        if self.storage == "png":
            return int(tar_bytes(row.nbytes))
        width = row.itemsize if self.dtype is None else DTYPES[self.dtype].itemsize
        return int(tar_bytes(_NPY_HEADER + row.size * width))


def _choose_storage(
    found: Sequence[_FoundArray], paths: Mapping[str, Path], dtypes: Mapping[str, str], png: Sequence[str]
) -> list[_ArrayField]:
    """Chooses how each array is stored; the name ``""`` in ``dtypes`` stands for all arrays of floats."""
    names = [array.name for array in found]
    for option, chosen in (("--dtype", dtypes), ("--png", png)):
        unknown = [name for name in chosen if name and name not in names]
        if unknown:
            raise ValueError(f"{option}: there is no array {unknown[0]!r} among {', '.join(names)}.")
    if set(dtypes.values()) - set(DTYPES):
        raise ValueError(f"--dtype: got {', '.join(dtypes.values())}, want {', '.join(DTYPES)}.")
    fields, lengths = [], {}
    for name in names:
        rows = _ArrayField(name, paths[name], "npy").rows()
        lengths[name] = len(rows)
        floats = rows.dtype.kind == "f"
        if name in dtypes and not floats:
            raise ValueError(f"--dtype {name}={dtypes[name]}: {name} is {rows.dtype}. Only floats are converted.")
        pixels = rows.dtype == np.uint8 and (rows.ndim == 3 or (rows.ndim == 4 and rows.shape[3] in (1, 3)))
        if name in png and not pixels:
            raise ValueError(
                f"--png {name}: got {rows.dtype} {list(rows.shape)}, want uint8 [samples, height, width] or [..., 1 or 3]."
            )
        storage = "png" if name in png else "cls" if rows.ndim == 1 and rows.dtype.kind in "iu" else "npy"
        fields.append(_ArrayField(name, paths[name], storage, (dtypes.get(name) or dtypes.get("")) if floats else None))
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"arrays have different numbers of rows: {lengths}. Choose arrays of equal length with --field NAME=ARRAY."
        )
    if not lengths[names[0]]:
        raise ValueError(f"the arrays {', '.join(names)} have no rows.")
    return fields


def _row_reader(fields: list[_ArrayField], numbers: np.ndarray, start: int, stop: int) -> SampleProducer:
    return partial(_read_rows, fields, numbers[start:stop])


def _read_rows(fields: Sequence[_ArrayField], numbers: np.ndarray, on_bad_file: OnBadFile) -> Iterator[Sample]:
    """The samples of one shard; the key of a sample is the number of its row."""
    arrays = [(field, field.rows()) for field in fields]
    for number in numbers.tolist():
        sample: dict[str, Any] = {"__key__": f"{number:09d}"}
        for field, array in arrays:
            try:
                sample[field.extension] = field.encode(np.asarray(array[number]))
            except ValueError as error:
                raise ValueError(f"array {field.name!r}, row {number}: {error}") from error
        yield sample


def _convert(row: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    source = torch.from_numpy(np.array(row, dtype=row.dtype.newbyteorder("=")))
    result = source.to(dtype)
    overflowed = source.isfinite() & ~result.isfinite()
    if overflowed.any():
        value = source[overflowed].flatten()[0].item()
        raise ValueError(f"{value:g} is outside the range of {str(dtype).removeprefix('torch.')}. Store it in fp32.")
    return result.view(torch.int16).numpy().view("V2") if dtype == torch.bfloat16 else result.numpy()
