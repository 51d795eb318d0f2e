"""``manifest.json``: the size and SHA-256 of each file of a checkpoint, and the comparison with what is on the disk.

* It is JSON with one line for each of ``{"size": ..., "sha256": ...}``, about 150 bytes for each file, so that a checkpoint of
  4,096 ranks has one of 0.6 MB. It is read up to 64 MiB, which is that of 400,000 ranks.
* ``first_damaged`` is collective. The files of a sharded checkpoint are on a file system that all machines share, so each rank
  reads its share of them: rank r of N the files r, r + N, ... Any other checkpoint is read by rank 0 alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtrain.distributed.collectives import from_all_ranks
from dtrain.errors import ConfigError
from dtrain.files import open_regular, read_json, size_and_hash

MANIFEST = "manifest.json"
_THREADS = 8  # hashlib releases the interpreter lock
Manifest = dict[str, dict[str, Any]]


def read_manifest(folder: Path) -> Manifest:
    """File name to its entry.

    Raises:
        OSError, ValueError: If it cannot be read, or is not one that dtrain has written.
    """
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or "state.json" not in manifest:
        raise ValueError("it lists no state.json")
    for name, expected in manifest.items():
        if Path(name).name != name or not isinstance(expected, dict) or set(expected) != {"size", "sha256"}:
            raise ValueError(f"it lists {name!r} as {expected!r}, want the name, size and sha256 of a file")
    return manifest


def compare(path: Path, expected: Mapping[str, Any]) -> None:
    """Compares a file with its entry.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it differs.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected["size"]:  # before reading it, which would take long for a file of any size
        raise ValueError(f"has {size} bytes, the manifest says {expected['size']}")
    if (found := size_and_hash(path)) != expected:
        short = [str(entry["sha256"])[:12] for entry in (found, expected)]
        raise ValueError(f"has changed since it was saved: SHA-256 {short[0]}..., the manifest says {short[1]}...")


def first_damaged(folder: Path, files: Manifest, *, divided: bool) -> str | None:
    """Collective. Compares the files of a checkpoint with their entries.

    Args:
        folder: The checkpoint.
        files: Entries of the files to compare, equal on all ranks.
        divided: Whether the ranks divide the files among them; False: rank 0 reads all.

    Returns:
        Name and problem of the first file, in the order of ``files``, that is missing or differs, whichever rank has read it;
        None if there is none. Equal on all ranks.

    Raises:
        ConfigError: On every rank, if a machine that should read a file does not see the folder; names it.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = list(enumerate(files))
    mine = mine[rank::ranks] if divided else mine if rank == 0 else []

    def problem(numbered: tuple[int, str]) -> tuple[int, str] | None:
        number, name = numbered
        try:
            compare(folder / name, files[name])
        except (OSError, ValueError) as error:
            return number, f"{name} {error}"
        return None

    # A folder that rank 0 sees and this machine does not is no damage: an older checkpoint would be no better. Listing asks
    # the server; a network file system may answer for a single name from its cache.
    def is_visible() -> bool:
        try:
            return folder.name in os.listdir(folder.parent)
        except OSError:  # raised here, it would leave the other ranks waiting
            return False

    if mine and rank and not is_visible():
        found: tuple[int, str] | None = (-1, socket.gethostname())
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = next((each for each in threads.map(problem, mine) if each is not None), None)
    number, text = min((each for each in from_all_ranks(found) if each is not None), default=(0, None))
    if number < 0:
        raise ConfigError(
            f"{folder} is not on {text}. Every rank reads its part of a sharded checkpoint, so all machines must share the "
            "file system that it is on."
        )
    return text
