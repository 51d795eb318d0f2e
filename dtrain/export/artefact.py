"""Writes, verifies and loads artefacts, and decides which of them may run code.

An artefact is a folder that is either complete or absent. Loading one may run code: a safetensors artefact builds its model
by ``_target_``, and torch programs contain code. Without ``trust``, only two kinds of artefacts are loaded:

* artefacts that this user exported: their ``model.json``, which holds the SHA-256 of the model, is marked (``runs.trust``).
* *harmless* artefacts: a graph without code, or a model that is built only from classes of torch.nn, torch.optim and dtrain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtrain.data.fields.tokenizers import VOCABULARY
from dtrain.errors import ConfigError
from dtrain.export import adapter
from dtrain.export.description import DESCRIPTION, Description
from dtrain.export.formats import FORMATS
from dtrain.export.program import Program
from dtrain.files import replace_folder
from dtrain.precision import Precision
from dtrain.runs.hub import sha256
from dtrain.runs.trust import is_own, mark_as_own, require_harmless

REPORT = "report.json"
#: The run's config for other people; the model card of ``export.push``.
CONFIG, CARD = "config.yaml", "README.md"
OWN_FILES = {*(form.file for form in FORMATS.values()), DESCRIPTION, REPORT, VOCABULARY, CONFIG, CARD}
_ADAPTER = {adapter.CONFIG, adapter.WEIGHTS, adapter.CARD}  # of export.adapter=separate
MARKS = "exported"
_TRUST = "If you trust the origin of the artefact, add --trust."


@dataclass(frozen=True)
class Artefact:
    """A loaded model.

    Attributes:
        description: Content of ``model.json``.
        program: Maps rows on the device to fp32 outputs.
        device: Device that it is loaded on.
        warnings: Warnings for the user about this dtype on this device.

    Example:
        ``load(Path("runs/digits/export"), None).outputs(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))``
    """

    description: Description
    program: Callable[[Tensor], Tensor]
    device: torch.device
    warnings: list[str]

    @torch.inference_mode()
    def outputs(self, rows: Tensor) -> Tensor:
        """Computes the model's outputs, fp32 on the artefact's device.

        Args:
            rows: On any device: uint8 ``[rows, height, width, 3]`` for an image model, else the model's argument; floats are
                cast to the model's dtype.

        Returns:
            fp32, ``[rows, ...]``: for a classifier the logits, ``[rows, classes]``.

        Raises:
            ConfigError: If a traced program was exported for rows of a different dtype or shape.
        """
        if FORMATS[self.description.stored_as].traced and self.description.rows is not None:
            rows = self.description.rows.checked(rows)
        return self.program(rows.to(self.device))


def load(folder: Path, device: torch.device | None, *, trust: bool = False) -> Artefact:
    """Loads an artefact.

    Args:
        folder: The artefact.
        device: Device to load it on; None: a GPU if there is one and the format runs on it, else the CPU.
        trust: Also load artefacts of other users that may run any code: programs that contain code, and models with a
            ``_target_`` that is not a class of torch.nn, torch.optim or dtrain.

    Returns:
        The loaded model.

    Raises:
        ConfigError: If the folder is not an artefact, its files do not match each other, it needs ``trust``, its
            ``_target_`` cannot be imported, or the device does not support its dtype.
    """
    description, expected, content = _read(folder)
    form = FORMATS[description.stored_as]
    path = folder / form.file
    try:
        found = sha256(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}). Export the run again.") from error
    if found != expected:
        raise ConfigError(f"{path} has SHA-256 {found}, {DESCRIPTION} says {expected}. Export the run again.")
    if not trust and not is_own(content, MARKS):
        _require_harmless(folder, description)
    if device is None:
        device = form.runs_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    warnings = Precision(description.dtype).apply(device) if form.in_torch else []
    return Artefact(description, form.read(path, description, device), device, warnings)


def read_description(folder: Path) -> tuple[Description, str]:
    """Reads ``model.json``: the description, and the expected SHA-256 of the model's file.

    Raises:
        ConfigError: If the folder is not an artefact, or its ``model.json`` is damaged or of a different version.
    """
    return _read(folder)[:2]


def _read(folder: Path) -> tuple[Description, str, bytes]:
    description, sha256, content = Description.read(folder)
    if description.stored_as not in FORMATS:
        raise ConfigError(
            f"{folder / DESCRIPTION} is damaged (stored_as {description.stored_as!r} is none of {', '.join(FORMATS)}). "
            "Export the run again."
        )
    return description, sha256, content


def write(folder: Path, program: Program, description: Description, example: Tensor | None) -> None:
    """Writes the model and ``model.json`` into an existing folder.

    Args:
        folder: The folder.
        program: The program, its weights cast.
        description: Its description.
        example: Example rows on the program's device; may be None for a format that is not traced.

    Raises:
        ConfigError: If the model cannot be stored in the format.
        OSError: On a write failure.
    """
    form = FORMATS[description.stored_as]
    form.write(program, example, folder / form.file, description.facts)
    description.write(folder, sha256(folder / form.file))


def check_place(out: Path) -> None:
    """Checks that an artefact may be written to ``out``.

    Raises:
        ConfigError: If ``out`` exists and is neither an empty folder, an artefact, nor a separate adapter.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"export.out: {out} is a file. Set export.out to a folder that does not exist yet.")
    names = {entry.name for entry in out.iterdir()}
    if names == _ADAPTER:
        return
    foreign = sorted(names - OWN_FILES)
    if foreign or (names and DESCRIPTION not in names):
        raise ConfigError(
            f"export.out: {out} exists and is not an artefact (it contains {(foreign or sorted(names))[0]}). Set export.out "
            "to a folder that does not exist yet, or to an artefact to replace."
        )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces ``out``, or the target of this link, when the block ends without an error.

    Raises:
        ConfigError: If no artefact may be written to ``out``, or on a write failure; ``out`` is then unchanged.
    """
    check_place(out)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(out) as staged:
            yield staged
    except OSError as error:
        raise ConfigError(
            f"export.out: {out} cannot be written ({error}). Free some space or set a different export.out."
        ) from error


def mark_trusted(folder: Path) -> None:
    """Marks an artefact as exported by this user, so that ``load`` does not need ``trust``; needs a writable cache."""
    for path in (folder / DESCRIPTION, folder / CONFIG):
        if path.exists():
            mark_as_own(path.read_bytes(), MARKS)


def _require_harmless(folder: Path, description: Description) -> None:
    form = FORMATS[description.stored_as]
    if form.holds_code:
        raise ConfigError(f"{folder}: {form.file} is a program that holds code, which could do anything. {_TRUST}")
    if not form.traced:  # a traced graph builds no model
        require_harmless(description.model, folder, "model")
