"""A checkpoint on machines that have no common disk: rank 0 sends its files to each machine that does not see them.

For DDP only: every rank of a sharded run writes its own part of a checkpoint.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.files import open_regular, remove

_PIECE = 64 << 20  # bytes that are sent to other machines at a time


@contextmanager
def checkpoint_on_all_machines(folder: Path, world: World, run_dir: Path, *, is_sharded: bool) -> Iterator[Path]:
    """Collective. A folder on this machine with the files of a checkpoint that rank 0 sees.

    Args:
        folder: Of the checkpoint, verified by rank 0.
        world: The ranks.
        run_dir: The run directory; files that are received are put next to it, until the end of the block.
        is_sharded: Whether each rank writes its own part of checkpoints.

    Raises:
        ConfigError: On every rank, if a machine does not see the folder and the run is sharded; or the files cannot be written.
    """
    if world.size == world.local_size:
        yield folder
        return
    manifest = from_rank0(lambda: (folder / "manifest.json").read_text())
    sees = _text(folder / "manifest.json") == manifest  # not an older one of the same step
    seen = [sees] * world.size
    dist.all_gather_object(seen, sees)
    if all(seen):
        yield folder
        return
    if is_sharded:
        raise ConfigError(
            f"run.dir: {run_dir} on the machine of rank {seen.index(False)} is not the one of rank 0. Every rank of a sharded "
            "run writes its part of a checkpoint, so set run.dir to a folder that all machines share, train on one machine, or "
            "use parallel=ddp. checkpoint.mirror does not replace a shared folder."
        )
    name = from_rank0(lambda: uuid.uuid4().hex)
    received = run_dir.with_name(f".{run_dir.name}.{name}.received")
    try:
        _receive(folder, received, None if sees else world, json.loads(manifest), manifest)
        yield folder if sees else received
    finally:
        if not sees and world.local_rank == 0:
            remove(received)


def _text(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except (OSError, ValueError):
        return None


def _receive(
    folder: Path, received: Path, receiver: World | None, files: Mapping[str, Mapping[str, Any]], manifest: str
) -> None:
    """Collective. Rank 0 sends the files of ``folder``; the first rank of each machine without them writes ``received``.

    Args:
        folder: The checkpoint on rank 0.
        received: The new folder.
        receiver: This rank; None if it sees ``folder``.
        files: The content of the manifest.
        manifest: Its text.
    """
    writes = receiver is not None and receiver.local_rank == 0
    problem: OSError | None = None
    if writes:
        try:
            received.mkdir(parents=True)
            (received / "manifest.json").write_text(manifest)
        except OSError as error:
            problem = error
    for name, entry in files.items():
        with (folder / name).open("rb") if dist.get_rank() == 0 else open(os.devnull, "rb") as source:
            left = entry["size"]
            while left:
                piece = torch.empty(min(left, _PIECE), dtype=torch.uint8)
                if dist.get_rank() == 0:
                    piece = torch.frombuffer(bytearray(source.read(len(piece))), dtype=torch.uint8)
                dist.broadcast(piece, src=0)
                left -= len(piece)
                if writes and problem is None:
                    try:
                        with (received / name).open("ab") as target:
                            target.write(piece.numpy().tobytes())
                    except OSError as error:  # the others wait in the next broadcast
                        problem = error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, str(problem) if problem is not None else None)
    if text := next((it for it in problems if it is not None), None):
        raise ConfigError(f"run.dir: the checkpoint could not be copied to every machine: {text}")
