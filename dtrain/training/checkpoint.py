"""One checkpoint: a folder that is whole or absent, checked when it is read, and never a pickle.

* It has safetensors files, ``state.json``, and ``manifest.json``, which holds the size and SHA-256 of each of them.
* It is written aside, synced and renamed, so that a folder of its name is complete; it may still be torn by a power cut, so
  reading trusts the manifest, not the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dtrain.config.errors import ConfigError

_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        tensors: File stem to named tensors, such as ``{"model": {...}, "optimizer": {...}, "ema": {...}}``.
        state: Everything else; JSON can hold it.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class BadCheckpoint(ConfigError):
    """A checkpoint that is incomplete or altered."""


def write_folder(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint.

    Args:
        folder: Where to; one that is there is replaced when the new one is safe.
        checkpoint: Tensors on the CPU.

    Raises:
        OSError: If it cannot be written.
    """
    aside, replaced = folder.with_name(f".{folder.name}.aside"), folder.with_name(f".{folder.name}.replaced")
    try:
        aside.mkdir()
        for name, tensors in checkpoint.tensors.items():
            _write_tensors(aside / f"{name}.safetensors", tensors)
        (aside / "state.json").write_text(json.dumps({"format": _FORMAT, **checkpoint.state}, indent=1))
        for path in aside.glob("*.safetensors"):  # the library lets nobody but the owner read them
            path.chmod((aside / "state.json").stat().st_mode)
        manifest = {path.name: _facts(path) for path in sorted(aside.iterdir())}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in (*aside.iterdir(), aside):
            _sync(path)
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(aside, folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        put_back_replaced(folder.parent)


def put_back_replaced(directory: Path) -> None:
    """Puts back each checkpoint that was moved away for a new one of its name, if that did not come.

    Args:
        directory: Where checkpoints are; whoever writes there was killed, or is the caller.
    """
    for replaced in directory.glob(".*.replaced"):
        folder = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not folder.exists():
            os.rename(replaced, folder)


def verify_folder(folder: Path) -> None:
    """Reads a checkpoint's files and compares them with its manifest.

    Raises:
        BadCheckpoint: If one is missing or differs; names it.
    """
    for name, facts in _manifest(folder).items():
        try:
            found = _facts(folder / name)
        except OSError as error:
            raise BadCheckpoint(f"{folder}: {name} cannot be read ({error})") from error
        if found != facts:
            raise BadCheckpoint(f"{folder}: {name} is {found}, the manifest says {facts}")


def read_folder(folder: Path) -> Checkpoint:
    """Reads the files that the manifest lists, as they are: ``verify_folder`` comes first, on one rank.

    Raises:
        BadCheckpoint: If it cannot be read or is of another format.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        files = [folder / name for name in _manifest(folder) if name.endswith(".safetensors")]
        tensors = {file.stem: safetensors.torch.load_file(file) for file in files}
    except (OSError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder} cannot be read: {error}") from error
    if state.get("format") != _FORMAT:
        raise BadCheckpoint(f"{folder} has format {state.get('format')!r}, this version of dtrain reads {_FORMAT}.")
    return Checkpoint(tensors, state)


def metrics_of(folder: Path) -> Mapping[str, float]:
    """The metrics that a checkpoint was saved with; none if its state is not whole."""
    path = folder / "state.json"
    try:
        # A flipped digit would make a best checkpoint that none surpasses.
        whole = _facts(path) == _manifest(folder)[path.name]
        metrics: Mapping[str, float] = json.loads(path.read_text())["metrics"] if whole else {}
    except (OSError, ValueError, KeyError):
        return {}
    return metrics


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict) or "state.json" not in manifest:
            raise ValueError("it lists no state.json")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: manifest.json cannot be read ({error})") from error
    return manifest


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path}: {error}") from error


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
