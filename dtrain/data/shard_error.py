"""What is wrong with a shard, where, and what to do about it."""

from __future__ import annotations

from dtrain.data.urls import shown

COPY_AGAIN = "Copy or write the shard again."
_OTHER_FORMATS = (
    (b"\x1f\x8b", "gzip data, inside which no sample can be reached directly", "Unpack it once, with gunzip."),
    (b"BZh", "bzip2 data, inside which no sample can be reached directly", "Unpack it once, with bunzip2."),
    (b"\xfd7zXZ\x00", "xz data, inside which no sample can be reached directly", "Unpack it once, with unxz."),
    (b"\x28\xb5\x2f\xfd", "zstd data, inside which no sample can be reached directly", "Unpack it once, with unzstd."),
    (b"PK\x03\x04", "a zip archive, not a tar", "Unpack it and write a tar."),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file, with git lfs pull."),
    (b"<", "HTML or XML, not a tar", "Was an error page saved under this name? Download it again."),
)


class ShardError(ValueError):
    """A shard that cannot be indexed.

    Args:
        path: The shard; a URL is shown without its secrets.
        offset: Byte of the shard at which the fault lies.
        what: What is wrong there.
        remedy: What to do, as a sentence.
    """

    def __init__(self, path: str, offset: int, what: str, remedy: str) -> None:
        super().__init__(shown(path), offset, what, remedy)
        self.path, self.offset, self.what, self.remedy = shown(path), offset, what, remedy

    def __str__(self) -> str:
        return f"shard {self.path!r}, byte {self.offset}: {self.what}. {self.remedy}"


def no_header(path: str, offset: int, header: bytes) -> ShardError:
    """The error of bytes that are no header; those of the shard's first block may tell what it is instead of a tar.

    Args:
        path: The shard.
        offset: Where they are.
        header: The bytes, at most a block.
    """
    if offset:
        return ShardError(path, offset, "no tar header, or one whose checksum is wrong", COPY_AGAIN)
    if not header:
        return ShardError(path, 0, "the file is empty", COPY_AGAIN)
    for magic, what, remedy in _OTHER_FORMATS:
        if header.lstrip().startswith(magic):
            begins = f": it begins with {header[:40]!r}" if magic == b"<" else ""
            return ShardError(path, 0, what + begins, remedy)
    return ShardError(path, 0, f"no tar: it starts with {header[:16]!r}", COPY_AGAIN)
