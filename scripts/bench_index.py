"""Members a second that a tar is indexed at, on one core with the file in the page cache.

    python scripts/bench_index.py [--members 100000] [--rounds 7] [--json FILE]

``ustar`` and ``PAX`` (a modification time with a fraction gives every member an extended header, as webdataset's and
Python's writers do by default) hold small members, as of CIFAR-10; ``photographs`` holds members of 100 KB, which a walk
jumps over. Beside dtrain, what others need to list the same members: Python's tarfile and webdataset's iterator, which
reads all payloads too. ``kept`` is dtrain at every start but the first. CPU time; all of them run in this process.
"""

from __future__ import annotations

import functools
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import webdataset
from bench_common import command_line, finish, interleaved, ratio, spread, table

PHOTOGRAPH = 100_000


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--members", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    members, rounds = (2_000, 2) if arguments.quick else (arguments.members, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_CACHE"] = folder
        shards = {
            "ustar": (_small(Path(folder, "ustar.tar"), members, tarfile.USTAR_FORMAT, 0), members),
            "PAX": (_small(Path(folder, "pax.tar"), members, tarfile.PAX_FORMAT, 0.5), members),
            "photographs": (_photographs(Path(folder, "photographs.tar"), members // 10), members // 10),
        }
        report = {}
        for name, (path, number) in shards.items():
            report[name] = interleaved(rounds, READERS, functools.partial(_rate, path, number))
            title = f"index, {name}, {number:,} members, {os.path.getsize(path) / 1e6:,.0f} MB"
            base = report[name]["tarfile"]
            lines = [[reader, spread(rates), f"{ratio(rates, base):.1f}"] for reader, rates in report[name].items()]
            print(
                f"{table(title, ['members/s a core', 'ratio'], lines)}\n{rounds} interleaved rounds, median (min-max)\n"
            )
    finish(arguments, {"members_per_second": report}, ("dtrain", "webdataset", "numpy"))


# -- who lists the members: each returns how many there were


def _dtrain(path: str) -> int:
    from dtrain.data.tar_index import index_tar

    return len(index_tar(path).member_offset)


def _kept(path: str) -> int:
    from dtrain.data.index_store import load_or_build

    return len(load_or_build(path).member_offset)


def _tarfile(path: str) -> int:
    with tarfile.open(path, "r:") as tar:
        return len(tar.getmembers())


def _webdataset(path: str) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in webdataset.tariterators.tar_file_iterator(file))


READERS: dict[str, Callable[[str], int]] = {
    "dtrain": _dtrain,
    "dtrain, kept": _kept,
    "tarfile": _tarfile,
    "webdataset": _webdataset,
}


def _rate(path: str, members: int, reader: str) -> float:
    started = time.process_time()
    found = READERS[reader](path)
    spent = time.process_time() - started
    if found != members:
        raise ValueError(f"{reader} found {found} members in {path}, {members} were written")
    return members / spent


# -- tars


def _small(path: Path, members: int, form: int, mtime: float) -> str:
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(members):
            extension, content = ("cls", b"7") if number % 2 else ("jpg", b"\xff" * 900)
            tar.addfile(_member(f"{number // 2:08d}.{extension}", len(content), mtime), io.BytesIO(content))
    return _warm(path)


def _photographs(path: Path, members: int) -> str:
    blocks = -(-PHOTOGRAPH // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    with open(path, "wb") as file:
        for number in range(members):
            file.write(_member(f"{number:08d}.jpg", PHOTOGRAPH, 0).tobuf(tarfile.USTAR_FORMAT))
            file.seek(blocks, os.SEEK_CUR)  # payloads that take no room on the disk
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    return _warm(path)


def _member(name: str, size: int, mtime: float) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size, mtime
    return member


def _warm(path: Path) -> str:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
    _kept(str(path))
    return str(path)


if __name__ == "__main__":
    main()
