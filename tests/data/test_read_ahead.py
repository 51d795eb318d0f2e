"""A walk over a remote shard finds what ``tarfile`` finds, in few requests."""

from __future__ import annotations

from typing import cast

import pytest

from dtrain.data.read_ahead import ReadAhead
from dtrain.data.remote import RemoteFile
from dtrain.data.tar_walk import walk
from tests.data.tars import tar_bytes, tarfile_files


class Bytes:
    """Stands for a remote file: its size, and reads that are counted."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size, self.reads = content, len(content), 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        return self.content[offset : offset + size]


@pytest.mark.parametrize(
    ("sizes", "most"), [([10] * 9_000, 3), ([100_000] * 200, 5), ([6_000_000, 10, 6_000_000], 5), ([], 1)]
)
def test_small_members_are_read_through_and_large_ones_passed_over(sizes: list[int], most: int) -> None:
    content = tar_bytes((f"{number:06d}.bin", bytes(size)) for number, size in enumerate(sizes))
    remote = Bytes(content)
    found = [(name.decode(), offset, size) for name, offset, size in walk("x", ReadAhead(cast(RemoteFile, remote)))]
    assert found == tarfile_files(content)
    assert remote.reads <= most
