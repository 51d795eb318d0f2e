"""Small tars, and the two oracles that indexes are compared with: ``tarfile`` and webdataset."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from webdataset.tariterators import group_by_keys, tar_file_expander


def tar_bytes(files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar of regular files, given as a mapping or as pairs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, payload in files.items() if isinstance(files, Mapping) else files:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def write_shard(path: Path, count: int, *, first: int = 0, extensions: Iterable[str] = ("jpg", "cls")) -> Path:
    """A shard of ``count`` samples with keys 000000, ...; every payload differs."""
    names = [f"{number:06d}.{extension}" for number in range(first, first + count) for extension in extensions]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes((name, name.encode() * (1 + index % 5)) for index, name in enumerate(names)))
    return path


def tarfile_files(content: bytes) -> list[tuple[str, int, int]]:
    """Name, offset and size of each regular file, as ``tarfile`` reads them."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        return [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]


def webdataset_samples(content: bytes) -> list[dict[str, Any]]:
    """The samples that webdataset makes of a tar: ``__key__`` and the payload of each extension."""
    samples = group_by_keys(tar_file_expander([{"url": "", "stream": io.BytesIO(content)}]))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]
