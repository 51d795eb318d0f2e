from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.data import mounts


@pytest.mark.parametrize(
    ("kind", "network"),
    [("nfs4", True), ("lustre", True), ("fuse.gcsfuse", True), ("ext4", False), ("overlay", False), ("fuseblk", False)],
)
def test_the_type_of_the_mount_decides(
    kind: str, network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    listing = tmp_path / "mountinfo"
    listing.write_text(
        "22 27 0:999 / /proc rw,relatime - proc proc rw\n"
        f"36 35 {number} / /with\\040space rw,noatime master:1 shared:2 - {kind} host:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTS", listing)
    mounts.is_network.cache_clear()
    assert mounts.is_network(tmp_path) is network
    mounts.is_network.cache_clear()


def test_what_cannot_be_known_is_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "none")
    mounts.is_network.cache_clear()
    assert not mounts.is_network(tmp_path)
    assert not mounts.is_network(tmp_path / "not" / "there")
    mounts.is_network.cache_clear()
