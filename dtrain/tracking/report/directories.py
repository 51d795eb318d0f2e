"""Which runs the directories of a command line mean: themselves, or, of one that is no run, those below it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.tracking.history import is_run

_DEPTH = 4  # levels below a directory that is no run: sweeps/lr=0.1/seed=2


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """The run directories that these stand for, in their order.

    Raises:
        ValueError: If one is no directory, or there is no run in it or below it.
    """
    return [directory for path in paths for directory in _of(path)]


def _of(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"{path} is no directory. Name the directory of a run (run.dir), or one that holds runs.")
    if found := [path] if is_run(path) else list(_below(path, _DEPTH)):
        return found
    raise ValueError(
        f"{path} holds no run, in it or up to {_DEPTH} levels below it: no config.yaml, metrics.jsonl or status.json. "
        "Name the directory of a run (run.dir), or one that holds runs."
    )


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The runs below a folder; what is hidden, or may not be entered, is left out."""
    if depth == 0:
        return
    for path in sorted(folder.glob("[!.]*")):
        if not _may_be_entered(path):
            continue
        if is_run(path):
            yield path  # what is below a run is the run's own
        else:
            yield from _below(path, depth - 1)


def _may_be_entered(path: Path) -> bool:
    # Not through links: they may lead round in a circle, or to the same runs again.
    try:
        return not path.is_symlink() and path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except OSError:  # of a server that is gone, or of /proc
        return False
