"""Members a second at which a tar is indexed, on one core, with the file in the page cache.

    python -m benchmarks.index [--members 100000] [--rounds 7] [--json FILE]

* ``ustar`` and ``PAX`` tars hold small members, like CIFAR-10. PAX gives every member an extended header, as webdataset's
  and Python's writers do when a modification time has a fraction.
* ``photographs`` holds members of 100 KB, whose content dtrain skips.
* Rows are dtrain, dtrain with an index stored by an earlier start (``stored``), Python's tarfile, and webdataset's
  iterator, which also reads the content. All run in this process; the rate is by CPU time.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import webdataset

from benchmarks import harness
from dtrain.data.shards.shard_index import index_tar, load_or_build

PHOTOGRAPH_BYTES = 100_000


def webdataset_members(path: str) -> int:
    """Number of members that webdataset finds."""
    with open(path, "rb") as file:
        return sum(1 for _ in webdataset.tariterators.tar_file_iterator(file))


def tarfile_members(path: str) -> int:
    """Number of members that Python's tarfile finds."""
    with tarfile.open(path, "r:") as tar:
        return len(tar.getmembers())


#: Each returns the number of members of a tar.
READERS: dict[str, Callable[[str], int]] = {
    "dtrain": lambda path: len(index_tar(path).member_offset),
    "dtrain, stored": lambda path: len(load_or_build(path).member_offset),
    "tarfile": tarfile_members,
    "webdataset": webdataset_members,
}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=7)
    parser.add_argument("--members", type=int, default=100_000, help="of the tars with small members")
    arguments = harness.parse(parser, members=2_000, rounds=2)
    members, rates = arguments.members, {}
    with harness.scratch() as folder:
        tars = {
            "ustar": (_small(folder / "ustar.tar", members, tarfile.USTAR_FORMAT, 0), members),
            "PAX": (_small(folder / "pax.tar", members, tarfile.PAX_FORMAT, 0.5), members),
            "photographs": (_photographs(folder / "photographs.tar", members // 10), members // 10),
        }
        for name, (path, number) in tars.items():
            with open(path, "rb") as file:
                while file.read(1 << 24):  # brings it into the page cache
                    pass
            load_or_build(str(path))  # stores the index

            def rate(reader: str, path: str = str(path), number: int = number) -> float:
                started = time.process_time()
                members = READERS[reader](path)
                seconds = time.process_time() - started
                if members != number:
                    raise ValueError(f"{reader} found {members} members in {path}; it has {number}")
                return number / seconds

            rates[name] = harness.interleaved(arguments.rounds, READERS, rate)
            table = harness.Table(f"index, {name}, {number:,} members, {os.path.getsize(path) / 1e6:,.0f} MB", READERS)
            table.medians("members/s a core", rates[name])
            table.ratios("ratio", rates[name], rates[name]["tarfile"], 1)
            table.show(harness.rounds_note(arguments.rounds))
    harness.finish(arguments, {"members_per_second": rates}, ["webdataset"])


def _small(path: Path, members: int, form: int, mtime: float) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(members):
            extension, content = ("cls", b"7") if number % 2 else ("jpg", b"\xff" * 900)
            tar.addfile(_member(f"{number // 2:08d}.{extension}", len(content), mtime), io.BytesIO(content))
    return path


def _photographs(path: Path, members: int) -> Path:
    blocks = -(-PHOTOGRAPH_BYTES // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    with open(path, "wb") as file:
        for number in range(members):
            file.write(_member(f"{number:08d}.jpg", PHOTOGRAPH_BYTES, 0).tobuf(tarfile.USTAR_FORMAT))
            file.seek(blocks, os.SEEK_CUR)  # a hole: the content takes no space on the disk
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    return path


def _member(name: str, size: int, mtime: float) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size, mtime
    return member


if __name__ == "__main__":
    main()
