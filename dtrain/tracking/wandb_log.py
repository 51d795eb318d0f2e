"""What wandb's own log files hold, read back.

wandb keeps each start of a run in a directory of its own, ``offline-run-*`` or ``run-*``, with one ``.wandb`` file:
a 7-byte header, then blocks of 32 KiB in LevelDB's log format, whose records are wandb's protobuf messages. wandb
writes whole blocks, at once when one is full and every 15 seconds else, and a killed run loses the rest. So the files
themselves, and nothing that is noted beside them, say which records wandb has.

Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, with zlib's CRC-32 in place of CRC-32C.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # protobuf makes it at import

from dtrain.tracking.record import Mark, has_evaluation

BLOCK = 32768
FILE_HEADER = 7
HEADER = struct.Struct("<IHB")  # CRC-32 of kind and payload, length of the payload, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def last_mark(path: Path, until: float = math.inf) -> Mark | None:
    """The newest record in a ``.wandb`` file; reads its end only, however long the run was.

    Args:
        path: The file; it may be torn at its end.
        until: The last step to look at.

    Returns:
        The mark of the last row of its history, in which wandb has gathered the records of one step; None if there is none.
    """
    blocks = -(-path.stat().st_size // BLOCK)
    look = 2
    while True:
        start = max(0, blocks - look)
        found = [mark for record in _records(path, start * BLOCK) if (mark := _mark(record)) and mark[0] <= until]
        if found:
            return max(found)
        if start == 0:
            return None
        look *= 4


def _records(path: Path, start: int) -> Iterator[bytes]:
    """The records that begin at or after ``start`` (a multiple of BLOCK), until the first that is not whole."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = FILE_HEADER if start == 0 else 0
    parts: list[bytes] | None = None  # None while inside a record that began before ``start``
    while at + HEADER.size <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER.size:
            at += left
            continue
        crc, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        payload = data[at : at + length]
        at += length
        if zlib.crc32(bytes([kind]) + payload) != crc:
            return
        if kind in (FULL, FIRST):
            parts = []
        if parts is None:
            continue
        parts.append(payload)
        if kind in (FULL, LAST):
            yield b"".join(parts)


def _mark(record: bytes) -> Mark | None:
    message = Record()
    message.ParseFromString(record)
    row = {item.key or "/".join(item.nested_key): item.value_json for item in message.history.item}
    return (int(json.loads(row["_step"])), has_evaluation(row)) if "_step" in row else None
