"""``dtrain pack repair``: copies the whole samples of shards that are cut or lack their end mark.

* A copy consists of the original's bytes up to the end of its last *whole sample*, and an end mark. It is written under a
  temporary name and renamed, and then indexed; nothing is ever overwritten.
* The members of a sample are adjacent. So only the last sample before the damage may have lost members: it is whole if the next
  member is known to belong to a different sample, or if it has the extensions of an earlier sample.
* Only damage after which nothing can be found is repaired. A shard that is compressed, has sparse files, or consists of several
  tars needs a different remedy, which is printed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from dtrain.command_line import write_json
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.shard_index import decode_name, index_tar, is_meta, load_or_build, split_name
from dtrain.data.shards.tar import COPY_AGAIN, ShardError, walk
from dtrain.errors import printable
from dtrain.files import replace_file
from dtrain.urls import is_url, redacted

_BLOCK = 512
_END_MARK = bytes(2 * _BLOCK)
_PIECE = 8 << 20


@dataclass(frozen=True)
class Repair:
    """What became of one shard.

    Attributes:
        shard: Its path.
        state: ``intact``, ``repaired`` or ``failed``.
        samples: Samples of the intact shard, or of the copy; 0 if it failed.
        copy: Path of the copy; None without one.
        lost_key: Key of the sample that was cut; None if none is known to be.
        lost_bytes: Bytes of the original that the copy lacks.
        problem: The damage, or the reason of the failure; "" if it is intact.
    """

    shard: str
    state: str
    samples: int = 0
    copy: str | None = None
    lost_key: str | None = None
    lost_bytes: int = 0
    problem: str = ""

    def __str__(self) -> str:
        if self.state == "intact":
            return f"{self.shard}: intact, {self.samples:,} samples"
        if self.state == "failed":
            return f"{self.shard}: failed: {self.problem}"
        key = "no sample known to be cut" if self.lost_key is None else f"lost the sample {self.lost_key!r}"
        return (
            f"{self.shard}: {self.samples:,} whole samples in {self.copy}, {key}, {self.lost_bytes:,} bytes not copied "
            f"({self.problem})"
        )


def repair_shards(patterns: Sequence[str], out: Path | None, json_file: Path | None, console: Console) -> None:
    """Runs ``pack repair SHARD...``: repairs shards, one after the other, and prints a line about each.

    Args:
        patterns: Paths, globs, brace patterns and lists of local shards, as ``dtrain.data.shards.patterns.expand`` takes them.
        out: Folder of the copies, under the names of the shards; it is made if it does not exist. None: next to the shards, as
            ``NAME.repaired.tar``.
        json_file: Gets ``{"shards": [...]}`` with the attributes of ``Repair``; None: no file.
        console: Where errors are shown.

    Raises:
        ValueError: If a pattern matches nothing, or a shard could not be repaired; raised after all others were.
        OSError: If a file cannot be read or written for a reason that has to do with all shards.
    """
    paths = expand(patterns)
    if remote := next(filter(is_url, paths), None):
        raise ValueError(f"{redacted(remote)} is a URL. Download the shard, repair it, and upload the copy.")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    done: list[Repair] = []
    for path in paths:
        result = repair(path, _destination(Path(path), out))
        done.append(result)
        if result.state == "failed":
            console.print(printable(str(result)), markup=False)
        else:
            print(printable(str(result)), flush=True)
    write_json(json_file, {"shards": [asdict(one) for one in done]})
    counts = {state: sum(one.state == state for one in done) for state in ("intact", "repaired", "failed")}
    print(f"shards: {len(done):,}, " + ", ".join(f"{state}: {number:,}" for state, number in counts.items()))
    if counts["failed"]:
        raise ValueError(f"{counts['failed']} of {len(done)} shards were not repaired; they are listed above.")


def repair(path: str, destination: Path) -> Repair:
    """Copies the whole samples of one shard, unless it is intact.

    Args:
        path: The shard.
        destination: The copy; its folder exists.
    """
    try:
        try:
            index = index_tar(path)
        except ShardError as error:
            return _copy(path, destination, error)
    except OSError as error:
        return Repair(path, "failed", problem=f"{error.strerror or error}: {error.filename or path}")
    return Repair(path, "intact", index.num_samples)


def _copy(path: str, destination: Path, damage: ShardError) -> Repair:
    problem = f"byte {damage.offset}: {damage.problem}"
    if not stat.S_ISREG(os.stat(path).st_mode) or damage.remedy != COPY_AGAIN:
        return Repair(path, "failed", problem=f"{problem}. {damage.remedy}")
    size = os.stat(path).st_size
    samples, lost_key = _whole_samples(path)
    if not samples:
        return Repair(
            path, "failed", 0, None, lost_key, size, f"{problem}. No sample is known to be whole. {COPY_AGAIN}"
        )
    if os.path.lexists(destination):
        return Repair(
            path, "failed", problem=f"{destination} exists and is not overwritten. Move it away, or set --out DIR"
        )
    end = samples[-1].end
    with open(path, "rb") as source, replace_file(destination) as copy:
        left = end
        while left and (piece := source.read(min(left, _PIECE))):
            copy.write(piece)
            left -= len(piece)
        copy.write(bytes(-copy.tell() % _BLOCK) + _END_MARK)
    try:
        index = load_or_build(str(destination))
    except ShardError as error:  # such as two members of one name, which no copy of whole samples would cure
        destination.unlink()
        return Repair(path, "failed", problem=f"{problem}; and byte {error.offset}: {error.problem}. {error.remedy}")
    return Repair(path, "repaired", index.num_samples, str(destination), lost_key, max(0, size - end), problem)


@dataclass
class _Sample:
    key: bytes
    extensions: set[bytes]
    end: int  # byte after its last member, without padding


def _whole_samples(path: str) -> tuple[list[_Sample], str | None]:
    """The samples before the damage that are whole, and the key of the one that is not; None if none is known."""
    damage: ShardError | None = None
    found: list[_Sample] = []
    members: list[tuple[bytes, int, int]] = []
    with open(path, "rb", buffering=0) as file:
        try:
            for member in walk(path, file):
                members.append(member)
        except ShardError as error:
            damage = error
    for key, extension, end in _keyed(members):
        if damage is not None and end > damage.offset:  # after a header that is damaged
            break
        if not found or found[-1].key != key:
            found.append(_Sample(key, set(), end))
        found[-1].extensions.add(extension)
        found[-1].end = end
    cut = (
        None
        if damage is None or damage.member is None
        else next((key for key, *_ in _keyed([(damage.member, 0, 0)])), None)
    )
    has_ended = damage is not None and damage.has_end_mark
    if found and not has_ended:
        last = found[-1]
        is_known = any(one.extensions == last.extensions for one in found[:-1])
        if cut == last.key or (cut is None and not is_known):
            found.pop()
            cut = last.key
    return found, None if cut is None else decode_name(cut)


def _keyed(members: Sequence[tuple[bytes, int, int]]) -> Iterator[tuple[bytes, bytes, int]]:
    """Key, extension and end of the members that belong to samples."""
    for name, offset, size in members:
        match = None if is_meta(name) else split_name(name)
        if match is not None:
            yield match[1], match[2].lower(), offset + size


def _destination(path: Path, out: Path | None) -> Path:
    return path.with_name(f"{path.stem}.repaired{path.suffix}") if out is None else out / path.name
