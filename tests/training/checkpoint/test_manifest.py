"""The manifest of a checkpoint, and its verification by all ranks together."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.files import MAX_JSON_BYTES, size_and_hash
from dtrain.training.checkpoint import manifest as module
from dtrain.training.checkpoint.checkpoints import BadCheckpoint, Checkpoints, verify_folder
from dtrain.training.checkpoint.manifest import read_manifest
from dtrain.training.checkpoint.tensors import rank_file
from tests.refusals import refused
from tests.training.checkpoint.test_sharded_saves import manager, on_ranks
from tests.training.checkpoints_for_tests import content

RANKS = 3


@pytest.fixture
def sharded(tmp_path: Path) -> Checkpoints:
    """The checkpoints of steps 10 and 20 of a sharded run of three ranks."""

    def save(world: World) -> None:
        saves, run, _ = manager(tmp_path, world)
        for run.step.step in (10, 20):
            saves.save({}, final=True)

    on_ranks(RANKS, save)
    return Checkpoints(tmp_path)


def flip_a_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def hashed_by_ranks(checkpoints: Checkpoints, ranks: int) -> list[tuple[Any, list[str]]]:
    """By rank: the newest good checkpoint with the problems, and the names of the files whose content it has read."""

    def rank(world: World) -> tuple[Any, list[str]]:
        read: list[str] = []

        def recorded(path: Path) -> dict[str, Any]:
            read.append(path.name)
            return size_and_hash(path)

        pytest.MonkeyPatch().setattr(module, "size_and_hash", recorded)
        return checkpoints.newest_good(), sorted(read)

    return on_ranks(ranks, rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_divide_the_files_of_a_sharded_checkpoint_and_each_is_read_once(
    sharded: Checkpoints, ranks: int
) -> None:
    files = sorted([*(rank_file(rank, RANKS) for rank in range(RANKS)), "state.json"])
    found = hashed_by_ranks(sharded, ranks)
    assert [result for result, _ in found] == [(20, [])] * ranks
    assert sorted(name for _, read in found for name in read) == files
    most = max(len(read) for _, read in found)
    assert most == 3 if ranks == 2 else most == 2  # rank 0 reads state.json, too


@pytest.mark.slow
@pytest.mark.parametrize("damaged", range(RANKS))
def test_a_file_that_only_one_rank_reads_is_a_broken_checkpoint_for_all_with_the_message_of_one_process(
    sharded: Checkpoints, damaged: int
) -> None:
    flip_a_bit(sharded.path(20) / rank_file(damaged, RANKS))
    alone = sharded.newest_good()
    assert alone[0] == 10
    assert len(alone[1]) == 1
    assert rank_file(damaged, RANKS) in alone[1][0]
    assert "SHA-256" in alone[1][0]
    assert [result for result, _ in hashed_by_ranks(sharded, RANKS)] == [alone] * RANKS


def test_of_several_damaged_files_all_ranks_name_the_first(sharded: Checkpoints) -> None:
    (sharded.path(20) / rank_file(1, RANKS)).unlink()
    flip_a_bit(sharded.path(20) / rank_file(2, RANKS))

    def rank(world: World) -> str:
        with pytest.raises(BadCheckpoint) as error:
            sharded.verify(20)
        return str(error.value)

    (message,) = set(on_ranks(RANKS, rank))
    assert message.startswith(f"{sharded.path(20)}: {rank_file(1, RANKS)} ")
    assert "No such file" in message


def _empty(folder: object) -> list[str]:
    return []


def _gone(folder: object) -> list[str]:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.slow
@pytest.mark.parametrize("listdir", [_empty, _gone])
def test_a_machine_that_does_not_see_the_checkpoint_is_named_and_no_older_one_is_used(
    sharded: Checkpoints, listdir: Callable[[object], list[str]]
) -> None:
    def rank(world: World) -> str:
        if world.rank == 1:
            pytest.MonkeyPatch().setattr(os, "listdir", listdir)
            pytest.MonkeyPatch().setattr(module.socket, "gethostname", lambda: "node-7")
        with pytest.raises(ConfigError) as error:
            sharded.newest_good()
        assert not isinstance(error.value, BadCheckpoint)
        return str(error.value)

    (message,) = set(on_ranks(RANKS, rank))
    assert "node-7" in message
    assert str(sharded.path(20)) in message
    assert "share" in message


def test_what_rank_0_cannot_look_at_ends_all_ranks_with_its_reason(sharded: Checkpoints) -> None:
    def rank(world: World) -> str:
        if world.rank == 0:
            pytest.MonkeyPatch().setattr(Checkpoints, "path", lambda self, step: _gone(step))
        with pytest.raises(ConfigError) as error:
            sharded.verify(20)
        return str(error.value)

    (message,) = set(on_ranks(RANKS, rank))
    assert "Stale file handle" in message


def test_rank_0_alone_reads_a_checkpoint_that_is_not_sharded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, content(10.0))
    (result, read), other = hashed_by_ranks(checkpoints, 2)
    assert (result, other) == ((10, []), ((10, []), []))
    assert read == ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.slow
def test_the_manifest_of_ten_thousand_ranks_is_read_and_one_of_any_size_is_not(tmp_path: Path) -> None:
    ranks = 10_000
    folder = tmp_path / "step-000000010"
    folder.mkdir()
    first = folder / rank_file(0, ranks)
    first.write_bytes(b"the same part")
    (folder / "state.json").write_text(json.dumps({"format": 2, "ranks": ranks, "tensors": ["model"], "step": 10}))
    files = {rank_file(rank, ranks): size_and_hash(first) for rank in range(ranks)}
    for name in list(files)[1:]:
        os.link(first, folder / name)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(files | {"state.json": size_and_hash(folder / "state.json")}, indent=1))
    assert manifest.stat().st_size > 2**20
    verify_folder(folder)
    (folder / rank_file(ranks - 1, ranks)).unlink()
    with refused(BadCheckpoint, "step-000000010", rank_file(ranks - 1, ranks)):
        verify_folder(folder)

    manifest.write_text(manifest.read_text() + " " * MAX_JSON_BYTES)
    with refused(ValueError, f"more than {MAX_JSON_BYTES:,} bytes"):
        read_manifest(folder)
    with refused(BadCheckpoint, "step-000000010", "manifest.json"):
        verify_folder(folder)
