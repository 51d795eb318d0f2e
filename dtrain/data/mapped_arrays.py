"""Arrays too large for every process to have its own: written once to disk, mapped by everyone from then on.

A *folder* holds one ``.npy`` file for each array. Its name tells all that its content depends on, so it is never changed:
it is written aside and published by a rename, and whoever comes second keeps what is there.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np


def write(folder: Path, shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Writes arrays piece by piece, so that they need not fit into memory.

    Args:
        folder: Where they are published.
        shapes: Final shape of each array.
        pieces: What to append to the arrays, in turn; the dtype of an array is that of its first piece.

    Raises:
        OSError: If the disk is full or cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{uuid.uuid4().hex}.tmp")
    aside.mkdir()
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(aside / f"{name}.npy", "wb")) for name in shapes}
            for piece in pieces:
                for name, rows in piece.items():
                    if not files[name].tell():
                        form = {"descr": rows.dtype.str, "fortran_order": False, "shape": shapes[name]}
                        np.lib.format.write_array_header_1_0(files[name], form)
                    files[name].write(np.ascontiguousarray(rows).data)
            for file in files.values():
                file.flush()
                # The name promises whole content, also after a power cut.
                os.fsync(file.fileno())
        try:
            os.rename(aside, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(folder: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a folder by name, mapped and read-only; None if it was not written yet."""
    if not folder.is_dir():
        return None
    # As plain arrays: slices of np.memmap take several times as long to make.
    return {file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in folder.glob("*.npy")}
