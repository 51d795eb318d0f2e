"""The artefact: a folder that is complete or not there, and how it is read back.

Reading one back may run code: a model that is stored as safetensors is built by its ``_target_``, a program for torch holds
its own. ``trust`` says whose may.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.description import DESCRIPTION, Description
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.program import Program
from dtrain.deployment.trust import require_trusted
from dtrain.precision import Precision

REPORT = "report.json"
_OWN_FILES = {*(form.file for form in FORMATS.values()), DESCRIPTION, REPORT}


@dataclass(frozen=True)
class Artefact:
    """A model ready for use.

    Attributes:
        description: Where it comes from and what it takes.
        program: From rows to fp32 outputs, on the device.
        device: Where it is.
        warnings: What the user should know of this dtype on this device.
    """

    description: Description
    program: Callable[[Tensor], Tensor]
    device: torch.device
    warnings: list[str]

    @torch.inference_mode()
    def outputs(self, rows: Tensor) -> Tensor:
        """The model's outputs in fp32, on the device.

        Args:
            rows: What the loader hands over: uint8 ``[rows, height, width, 3]`` for an image model, else the model's
                argument itself; floats are cast.

        Raises:
            ConfigError: If a program without its model's code was made for other rows.
        """
        if self.description.format.traced and self.description.rows is not None:
            rows = self.description.rows.checked(rows)
        return self.program(rows.to(self.device))


def check_place(out: Path) -> None:
    """Looks whether an artefact may be written there: nothing lies there yet, or an empty folder, or an artefact.

    Raises:
        ConfigError: If something else does.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"export.out: {out} is a file. Name a folder that does not exist yet.")
    names = {entry.name for entry in out.iterdir()}
    foreign = sorted(names - _OWN_FILES)
    if foreign or (names and DESCRIPTION not in names):
        raise ConfigError(
            f"export.out: {out} exists and is not an artefact (it holds {(foreign or sorted(names))[0]}). Name a folder "
            "that does not exist yet, or an artefact to replace."
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends without an error; a link goes on leading there.

    Raises:
        ConfigError: If ``out`` is something else than an artefact, or the folder cannot be written.
    """
    check_place(out)
    out = out.resolve()
    aside, replaced = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left by a process of the same number that was killed
        aside.mkdir(parents=True)
        yield aside
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(out, replaced)
        os.rename(aside, out)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        if replaced.exists() and not out.exists():
            os.rename(replaced, out)
        raise ConfigError(f"export.out: {out} cannot be written ({error}).") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write(folder: Path, program: Program, description: Description, example: Tensor | None) -> None:
    """Writes model and description.

    Args:
        folder: Where to; exists.
        program: The cast model.
        description: Of it.
        example: Rows to trace it with; not needed for a format that is not traced.

    Raises:
        ConfigError: If it cannot be brought into the wanted form.
        OSError: If the disk refuses.
    """
    path = folder / description.file
    description.format.write(program, example, path)
    description.write(folder, _digest(path))
    path.chmod((folder / DESCRIPTION).stat().st_mode)  # safetensors lets nobody but the owner read its files


def load(folder: Path, device: torch.device | None, *, trust: bool = False) -> Artefact:
    """Reads an artefact and makes it ready.

    Args:
        folder: The artefact.
        device: Where to; None: to a GPU where there is one that it runs on, else to the CPU.
        trust: Also run what could do anything and was not exported by this user: programs that bring their own code, and
            a ``_target_`` that is not a class derived from ``torch.nn.Module``.

    Raises:
        ConfigError: If the folder is no artefact, its files do not agree, it needs ``trust``, its ``_target_`` cannot be
            imported, or the device has no such arithmetic.
    """
    description, expected = Description.read(folder)
    path = folder / description.file
    try:
        found = _digest(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}). Export again.") from error
    if found != expected:
        raise ConfigError(f"{path} has SHA-256 {found}, {DESCRIPTION} says {expected}. Export again.")
    if not trust:
        require_trusted(folder, description)
    if device is None:
        device = description.format.runs_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    warnings = Precision(description.dtype).apply(device) if description.format.in_torch else []
    return Artefact(description, description.format.read(path, description, device), device, warnings)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
