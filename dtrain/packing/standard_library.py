"""The Python standard library's own source as a corpus: some megabytes of real text on every machine, without a download."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from dtrain.config.cache_dir import cache_dir

#: Bytes that a row predicts.
LENGTH = 256
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "test")


def prepare(directory: str | None = None) -> None:
    """Packs ``train-*.tar`` and ``val-*.tar`` with ``python -m dtrain.pack text`` unless they are there: rows of bytes.

    A hundredth of the files is held out. What the library holds differs a little between versions of Python.

    Args:
        directory: Where to; None is ``standard_library`` in dtrain's cache directory.

    Raises:
        FileNotFoundError: If this Python has no source files.
        OSError: If packing fails; says why.
    """
    folder = Path(directory or cache_dir() / "standard_library")
    if (folder / "dataset.json").exists():
        return
    options = ["--length", str(LENGTH), "--val", "0.01", "--bad", "skip", "--shard-mb", "4", "--processes", "1"]
    command = [sys.executable, "-m", "dtrain.pack", "text", *_sources(), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"packing the standard library into {folder} failed: {done.stderr.strip()}")


def _sources() -> list[str]:
    """The library's modules, and its packages without their tests."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = [
        entry
        for entry in sorted(os.listdir(library))
        if entry not in _NOT_THE_LIBRARY and (library / entry / "__init__.py").exists()
    ]
    patterns = [str(library / "*.py"), *(str(library / package / "**/*.py") for package in packages)]
    sources = [pattern for pattern in patterns if glob.glob(pattern, recursive=True)]
    if not sources:
        raise FileNotFoundError(
            f"{library} has no source files. Install those of this Python, or pack a text of your own: python -m dtrain.pack "
            "text SRC DST."
        )
    return sources
