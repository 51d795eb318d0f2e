"""Reads whole .wandb files, record by record: the slow and obvious way, as an oracle."""

import json
import struct
import zlib

from wandb.proto.wandb_internal_pb2 import Record


def records(path):
    """Every record of a file from its first byte to its last whole one (LevelDB log format, zlib's CRC)."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts, found = 7, b"", []
    while position + 7 <= len(data):
        if position % 32768 > 32768 - 7:
            position += 32768 - position % 32768
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        chunk = data[position + 7 : position + 7 + length]
        if zlib.crc32(bytes([kind]) + chunk) != crc:
            break
        parts += chunk
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def rows(path):
    """The history of a file: a dict of name to value for each row."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def run_of(path):
    """The run record of a file, with its config as a dict."""
    (run,) = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"]
    return run, {update.key: json.loads(update.value_json) for update in run.config.update if update.key != "_wandb"}
