"""The index of a shard is what tarfile and webdataset read, and is never silently short."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from dtrain.data import tar_index
from dtrain.data.tar_index import ShardError, ShardIndex, decode_name, index_tar, split_name
from dtrain.data.tar_walk import walk
from tests.data.tars import tar_bytes, tarfile_files, webdataset_samples

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, b"6", b"V")

part = st.text(st.sampled_from("aB0._- é\n木\udcff"), min_size=1, max_size=6)
long_part = st.text(st.sampled_from("ab.é"), min_size=90, max_size=300)
name_of = st.lists(part | part | long_part, min_size=1, max_size=4).map("/".join)


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(draw(name_of))
    info.type = draw(st.sampled_from(KINDS[:1] * 8 + KINDS))
    info.mtime = draw(st.sampled_from([0, 1_700_000_000, 1_700_000_000.25]))
    payload = b"" if info.type in KINDS[3:7] else draw(st.binary(max_size=1500))
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = draw(name_of)
    info.size = len(payload)
    return info, payload


def write(files: list[tuple[tarfile.TarInfo, bytes]], format: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for info, payload in files:
            try:
                tar.addfile(info, io.BytesIO(payload))
                # TarFile.addfile writes no payload for types that it does not know.
            except ValueError:
                continue  # ustar cannot hold every name
    return out.getvalue()


def walked(content: bytes) -> list[tuple[str, int, int]]:
    return [(decode_name(name), offset, size) for name, offset, size in walk("x.tar", io.BytesIO(content))]


def indexed(content: bytes, path: Path) -> ShardIndex:
    path.write_bytes(content)
    return index_tar(str(path))


def samples_of(index: ShardIndex, content: bytes) -> list[dict[str, Any]]:
    """The samples that an index finds in a tar, in webdataset's form."""
    samples: list[dict[str, Any]] = [{"__key__": index.key(number)} for number in range(index.num_samples)]
    for number, extension, offset, size in zip(
        index.member_sample, index.member_extension, index.member_offset, index.member_size, strict=True
    ):
        samples[number][index.extensions[extension]] = content[offset : offset + size]
    return samples


@settings(max_examples=150, deadline=None)
@given(st.lists(members(), max_size=8), st.sampled_from(FORMATS))
def test_files_are_where_tarfile_finds_them(files: list[tuple[tarfile.TarInfo, bytes]], format: int) -> None:
    content = write(files, format)
    assert walked(content) == tarfile_files(content)
