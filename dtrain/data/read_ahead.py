"""A remote shard as a file to walk through: few requests, each of many bytes."""

from __future__ import annotations

import os

from dtrain.data.remote import RemoteFile

# What a request takes, a connection that is open transfers 2 MiB in. Behind a gap of more than that, only a header is wanted.
_READ_THROUGH = 2 << 20
_PIECE, _HEADERS = 8 << 20, 64 << 10


class ReadAhead:
    """Reads forward through a remote file; ``seek`` and ``read`` are those of any binary file."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0
        self._start, self._piece = 0, b""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Goes to a byte, counted from the start or, with ``os.SEEK_END``, from the end."""
        self._at = offset + (self._file.size if whence == os.SEEK_END else 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """The next ``size`` bytes; fewer only where the file ends."""
        end = self._file.size if size < 0 else min(self._at + size, self._file.size)
        if self._at < self._start or end > self._start + len(self._piece):
            gap = self._at - (self._start + len(self._piece))
            ahead = _PIECE if gap <= _READ_THROUGH else _HEADERS
            self._start, self._piece = self._at, self._file.read(self._at, max(end - self._at, ahead))
        data = self._piece[self._at - self._start : end - self._start]
        self._at += len(data)
        return data
