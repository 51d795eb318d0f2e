from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.diagnosis import traps as module
from dtrain.diagnosis.finding import Finding
from dtrain.diagnosis.traps import place_of_checkpoints, traps
from dtrain.distributed.world import World


def found(workers: int = 0, device: str = "cpu", optimizer: Any = torch.optim.SGD, **options: Any) -> list[Finding]:
    values = {"x": np.zeros((8, 1000), np.float32)}
    fields = {"x": {"name": "x", "role": "feature"}}
    loader = ShardLoader.over(values, fields, global_batch_size=4, num_workers=0)
    window = [next(iter(loader))]
    loader.num_workers = workers
    world = World(0, 2, 0, 2, torch.device(device), "gloo", True)
    return traps(Config(), world, loader, window, optimizer(nn.Linear(1, 1).parameters(), lr=0.1, **options))


def about(subject: str, findings: list[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.subject == subject), None)


def test_more_workers_than_cores_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    assert about("workers", found(workers=4)) is None
    crowded = about("workers", found(workers=5))
    assert crowded is not None
    assert crowded.level == "warning"
    assert "data.num_workers=4" in crowded.remedy


def test_batches_that_shared_memory_cannot_hold_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    # 16,000 bytes a batch, 2 prefetched and one being built, 3 workers, 2 ranks.
    needed = 16_000 * 3 * 3 * 2
    for free, level in ((needed - 1, "error"), (needed, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        finding = about("prefetched", found(workers=3))
        assert finding is not None
        assert finding.level == level
    assert about("prefetched", found(workers=0)) is None


def test_an_optimizer_that_waits_for_the_gpu_is_a_trap() -> None:
    waiting = about("optimizer", found(device="cuda", fused=False))
    assert waiting is not None
    assert waiting.level == "warning"
    dampened = about("optimizer", found(device="cuda", fused=True, momentum=0.9, dampening=0.1))
    assert dampened is not None
    assert "dampening" in dampened.text
    for fine in (found(device="cuda", fused=True, momentum=0.9), found(fused=False)):
        finding = about("optimizer", fine)
        assert finding is not None
        assert finding.level == "ok"


def test_checkpoints_in_memory_or_without_room_are_traps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "file_system", lambda folder: "ext4")
    assert list(place_of_checkpoints(tmp_path, 10, 3)) == []
    [full] = place_of_checkpoints(tmp_path, 10**18, 3)
    assert full.level == "error"
    monkeypatch.setattr(module, "file_system", lambda folder: "tmpfs")
    [lost] = place_of_checkpoints(tmp_path, 10, 3)
    assert "tmpfs" in lost.text
    assert lost.level == "warning"
