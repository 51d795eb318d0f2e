"""The source code of the Python standard library as a text corpus: a few megabytes that every machine has."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from dtrain.files import cache_dir
from dtrain.pack.staging import is_published

#: Number of targets of a row; a token is a byte.
LENGTH = 256
_EXCLUDED = ("site-packages", "dist-packages", "test")


def prepare(directory: str | None = None) -> None:
    """Packs the library as rows of bytes with ``dtrain pack text``, unless the shards exist.

    The split ``val`` gets one percent of the files, ``train`` all others. The text differs slightly between versions of
    Python.

    Args:
        directory: Folder of the shards; None is ``standard_library`` in dtrain's cache directory.

    Raises:
        FileNotFoundError: If this Python was installed without source files.
        OSError: If packing fails; the message holds the reason.
    """
    folder = Path(directory or cache_dir() / "standard_library")
    if is_published(folder, "dataset.json"):
        return
    options = ["--length", str(LENGTH), "--val", "0.01", "--bad", "skip", "--shard-mb", "4", "--processes", "1"]
    command = [sys.executable, "-m", "dtrain.pack", "text", *_sources(), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"packing the standard library into {folder} failed: {done.stderr.strip()}")


def _sources() -> list[str]:
    """Glob patterns of the modules and packages of the library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = [
        entry
        for entry in sorted(os.listdir(library))
        if entry not in _EXCLUDED and (library / entry / "__init__.py").exists()
    ]
    patterns = [str(library / "*.py"), *(str(library / package / "**/*.py") for package in packages)]
    sources = [pattern for pattern in patterns if glob.glob(pattern, recursive=True)]
    if not sources:
        raise FileNotFoundError(
            f"{library} has no source files. Install a Python with its standard library, or pack a different text: python -m "
            "dtrain.pack text SRC DST --length N."
        )
    return sources
