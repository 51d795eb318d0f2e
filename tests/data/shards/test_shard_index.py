"""The index of a shard agrees with tarfile and webdataset; stored indexes are rebuilt when stale or damaged."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from dtrain.data.shards import shard_file, shard_index
from dtrain.data.shards.shard_index import ShardIndex, decode_name, index_tar, load_or_build, split_name, write_index
from dtrain.data.shards.tar import ShardError, walk
from tests.http_server import FileServer, serving
from tests.property_tests import examples
from tests.refusals import assert_refused, refused
from tests.shards import tar_bytes, tarfile_files, webdataset_samples, write_shard

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
KINDS = (
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.CONTTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    b"6",
    b"V",
)

part = st.text(st.sampled_from("aB0._- é\n木\udcff"), min_size=1, max_size=6)
long_part = st.text(st.sampled_from("ab.é"), min_size=90, max_size=300)
name_of = st.lists(part | part | long_part, min_size=1, max_size=4).map("/".join)


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(draw(name_of))
    info.type = draw(st.sampled_from(KINDS[:1] * 8 + KINDS))
    if info.type == tarfile.AREGTYPE:
        # Some versions of tarfile take such a file for a directory if its long name is cut behind a slash.
        info.name = info.name.replace("/", "")
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
            except ValueError:
                continue  # ustar cannot hold every name
    return out.getvalue()


def walked(content: bytes) -> list[tuple[str, int, int]]:
    return [(decode_name(name), offset, size) for name, offset, size in walk("x.tar", io.BytesIO(content))]


def indexed(content: bytes, path: Path) -> ShardIndex:
    path.write_bytes(content)
    return index_tar(str(path))


def read_samples(index: ShardIndex, content: bytes) -> list[dict[str, Any]]:
    """The samples that an index finds in a tar, in webdataset's form."""
    samples: list[dict[str, Any]] = [{"__key__": index.key(number)} for number in range(index.num_samples)]
    for number, extension, offset, size in zip(
        index.member_sample, index.member_extension, index.member_offset, index.member_size, strict=True
    ):
        samples[number][index.extensions[extension]] = content[offset : offset + size]
    return samples


@examples(150)
@given(st.lists(members(), max_size=8), st.sampled_from(FORMATS))
def test_files_are_where_tarfile_finds_them(files: list[tuple[tarfile.TarInfo, bytes]], format: int) -> None:
    content = write(files, format)
    assert walked(content) == tarfile_files(content)


colliding_name = st.lists(
    st.sampled_from(["a", "b", "A", ".", ".", "/", "_", "__", "é", "\n"]), min_size=1, max_size=7
).map("".join)


@examples(300)
@given(st.lists(colliding_name, max_size=8), st.sampled_from(FORMATS))
def test_samples_are_those_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], format: int
) -> None:
    content = tar_bytes([(name, name.encode() * 3) for name in names], format)
    path = tmp_path_factory.mktemp("shard") / "x.tar"
    try:
        expected = webdataset_samples(content)
    except ValueError:
        with pytest.raises(ShardError, match="occurs twice"):
            indexed(content, path)
        return
    assert read_samples(indexed(content, path), content) == expected


def test_every_short_name_is_split_as_webdataset_splits_it() -> None:
    for length in range(1, 8):
        for letters in itertools.product("a./\n", repeat=length):
            name = "".join(letters)
            match = split_name(name.encode())
            assert ((None, None) if match is None else tuple(map(decode_name, match.groups()))) == base_plus_ext(name)


@given(st.text(st.characters(codec="utf-8"), max_size=30) | st.text(st.sampled_from("é木./\n\udcff"), max_size=12))
def test_any_name_is_split_as_webdataset_splits_it(name: str) -> None:
    match = split_name(name.encode("utf-8", "surrogateescape"))
    assert ((None, None) if match is None else tuple(map(decode_name, match.groups()))) == base_plus_ext(name)


def test_what_webdatasets_writer_writes_is_what_the_index_finds(tmp_path: Path) -> None:
    from webdataset import TarWriter

    path = tmp_path / "x.tar"
    written = {f"{'long' * 40}/é{number}": bytes([number]) * 700 * number for number in range(5)}
    with TarWriter(str(path)) as writer:
        for key, value in written.items():
            writer.write({"__key__": key, "bin": value, "CLS.txt": key})
    content = path.read_bytes()
    found = read_samples(index_tar(str(path)), content)
    assert found == [{"__key__": key, "bin": value, "cls.txt": key.encode()} for key, value in written.items()]


@pytest.fixture(scope="module")
def whole() -> bytes:
    """Two samples with every kind of header that says something, and the shortest end mark."""
    info = tarfile.TarInfo("folder/b.jpg")
    info.size = 600
    parts = [
        tar_bytes({"folder/a.jpg": b"a" * 600, "folder/a.cls": b"1"}),
        info.tobuf(tarfile.PAX_FORMAT) + b"b" * 600 + bytes(424),
        tar_bytes({"folder/b" + "b" * 120 + ".cls": b"2" * 512}, tarfile.GNU_FORMAT),
        tar_bytes({"folder/é" + "c" * 120 + ".cls": b"3"}, tarfile.PAX_FORMAT),
    ]
    return b"".join(part.rstrip(b"\0") + bytes(-len(part.rstrip(b"\0")) % 512) for part in parts) + bytes(1024)


def test_shard_cut_anywhere_is_never_silently_short(whole: bytes) -> None:
    assert len(walked(whole)) == 5
    for length in range(len(whole)):
        with pytest.raises(ShardError):
            walked(whole[:length])
    assert walked(whole + bytes(10240)) == walked(whole)


def test_zeroed_or_overwritten_block_is_found_or_lies_in_a_payload(whole: bytes) -> None:
    files = walked(whole)
    payloads = {block for _, offset, size in files for block in range(offset, offset + size, 512)}
    # No checksum covers the block that holds a long name; what looks like a name passes for one.
    gnu_name = whole.index(b"././@LongLink") + 512
    for start in range(0, len(whole) - 1024, 512):
        for block in (bytes(512), b"\xa5" * 512):
            changed = whole[:start] + block + whole[start + 512 :]
            if start == gnu_name and any(block):
                continue
            if start in payloads or changed == whole:
                assert walked(changed) == files
            else:
                with pytest.raises(ShardError):
                    walked(changed)


def test_any_changed_byte_of_a_header_is_found() -> None:
    content = tar_bytes({"a.jpg": b"a" * 600, "b.jpg": b"b"})
    for place in range(512):
        changed = bytearray(content)
        changed[place] ^= 0x15
        if place in (154, 155):  # behind the digits of the checksum: nothing depends on them
            continue
        with pytest.raises(ShardError) as caught:
            walked(bytes(changed))
        assert caught.value.offset == 0


def test_damaged_header_is_named_even_if_the_walk_stumbles_later() -> None:
    content = bytearray(tar_bytes((f"{number}.txt", b"x" * 100) for number in range(3000)))
    content[1024 * 1000 + 124 : 1024 * 1000 + 135] = b"00000001000"
    with pytest.raises(ShardError, match="checksum is wrong") as caught:
        walked(bytes(content))
    assert caught.value.offset == 1024 * 1000


def test_archives_joined_with_cat_are_refused_with_the_remedy() -> None:
    one = tar_bytes({"a.txt": b"a"})
    with refused(ShardError, "byte 1024", "10240", "tar --concatenate"):
        walked(one + tar_bytes({"b.txt": b"b"}))
    # More zeros than are read at once.
    padded = one.ljust(1 << 20, b"\0")
    with refused(ShardError, "byte 1024", str(1 << 20), "tar --concatenate"):
        walked(padded + tar_bytes({"b.txt": b"b"}))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", ["the file is empty"]),
        (bytes(512), ["the two end blocks"]),
        (b"\x1f\x8b\x08" + bytes(range(200)) * 10, ["gzip data", "gunzip"]),
        (b"BZh91AY" + bytes(range(200)) * 10, ["bzip2 data", "bunzip2"]),
        (b"\xfd7zXZ\x00" + bytes(range(200)) * 10, ["xz data"]),
        (b"\x28\xb5\x2f\xfd" + bytes(range(200)) * 10, ["zstd data"]),
        (b"\x04\x22\x4d\x18" + bytes(range(200)) * 10, ["lz4 data", "unlz4"]),
        (b"PK\x03\x04" + bytes(range(200)) * 10, ["a zip archive"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["git lfs pull"]),
        (b"\n<!DOCTYPE html><html>404</html>", ["HTML or XML", "download it again"]),
        (b"hello world" * 100, ["b'hello worldhello'"]),
    ],
)
def test_what_is_no_tar_is_called_by_its_name(content: bytes, names: list[str]) -> None:
    with refused(ShardError, "shard 'x.tar', byte 0", *names):
        walked(content)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_old_style_file_is_no_directory_because_its_name_was_cut_behind_a_slash(format: Literal[1, 2]) -> None:
    info = tarfile.TarInfo("d" * 99 + "/a.txt")
    info.type, info.size = tarfile.AREGTYPE, 1
    content = write([(info, b"x")], format)
    assert walked(content) == [(info.name, 1536, 1)]


def test_old_style_directory_is_no_file() -> None:
    info = tarfile.TarInfo("folder.d/")
    info.type = tarfile.AREGTYPE
    content = write([(info, b"")], tarfile.USTAR_FORMAT)
    assert walked(content) == tarfile_files(content) == []


def test_empty_archive_has_no_samples(tmp_path: Path) -> None:
    index = indexed(tar_bytes({}), tmp_path / "x.tar")
    assert (index.num_samples, index.extensions, len(index.member_offset)) == (0, (), 0)
    assert [column.shape for column in index.columns(["jpg", "cls"])] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sizes_beyond_8_gib_are_right(tmp_path: Path, format: Literal[1, 2]) -> None:
    path, size = tmp_path / "x.tar", 2**33 + 5
    large = tarfile.TarInfo("large.bin")
    large.size = size
    header = large.tobuf(format)
    # Almost all of the file is a hole, which takes no room on the disk.
    with open(path, "wb") as file:
        file.write(header)
        file.seek(len(header) + size + -size % 512)
        file.write(tar_bytes({"small.bin": b"x"}))
    index = index_tar(str(path))
    with tarfile.open(path) as tar:
        expected = [(info.offset_data, info.size) for info in tar]
    assert list(zip(index.member_offset.tolist(), index.member_size.tolist(), strict=True)) == expected
    assert index.member_size[0] == size


def signed(header: bytes) -> bytes:
    total = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 256
    return header[:148] + b"%06o\0 " % total + header[156:]


def test_checksums_of_other_writers_are_understood() -> None:
    content = tar_bytes({"é.txt": b"x"}, tarfile.GNU_FORMAT)
    header, rest = content[:512], content[512:]
    total = int(header[148:154], 8)
    for variant in (b"%6o\0 " % total, b"%07o\0" % total, b"%6o \0" % total, b"%08o" % total):
        assert walked(header[:148] + variant + header[156:] + rest) == [("é.txt", 512, 1)]
    assert walked(signed(header) + rest) == [("é.txt", 512, 1)]


def sealed(header: bytes) -> bytes:
    """The header with the checksum that belongs to it."""
    return header[:148] + b"%06o\0 " % (sum(header[:148] + header[156:]) + 256) + header[156:]


def test_sparse_members_are_refused_with_the_remedy() -> None:
    content = tar_bytes({"a.bin": b"x"}, tarfile.GNU_FORMAT)
    with refused(ShardError, "a sparse file", "", "without tar's --sparse"):
        walked(sealed(content[:156] + b"S" + content[157:512]) + content[512:])
    info = tarfile.TarInfo("a.bin")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "10"}
    with pytest.raises(ShardError, match="a sparse file"):
        walked(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


def test_global_headers_may_say_anything_but_where_files_lie() -> None:
    def with_global(headers: dict[str, str]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            tar.addfile(tarfile.TarInfo("a.txt"))
        return out.getvalue()

    commented = with_global({"comment": "0123456789abcdef", "mtime": "1.5"})
    assert walked(commented) == tarfile_files(commented)
    for headers in ({"path": "b.txt"}, {"size": "3"}):
        with refused(ShardError, "global header"):
            walked(with_global(headers))


@pytest.mark.parametrize(
    "record", [b"9 size=x\n", b"99 path=b\n", b"0 path=b\n", b"path=b\n", b"11 path=bb", b"11 mtime=1\n\0"]
)
def test_extended_header_that_cannot_be_read_is_named(record: bytes) -> None:
    out = tarfile.TarInfo._create_header(  # type: ignore[attr-defined]
        {"name": "x", "type": b"x", "size": len(record), "magic": tarfile.POSIX_MAGIC},
        tarfile.USTAR_FORMAT,
        "ascii",
        "strict",
    )
    content = out + record + bytes(512 - len(record)) + tar_bytes({"a.txt": b""})
    with refused(ShardError, "byte 0", "extended header"):
        walked(content)


def with_records(*records: bytes) -> bytes:
    """A tar of one file of 999 bytes, with an extended header for each of the records."""
    content = b""
    for record in records:
        header = tarfile.TarInfo._create_header(  # type: ignore[attr-defined]
            {"name": "x", "type": b"x", "size": len(record), "magic": tarfile.POSIX_MAGIC},
            tarfile.USTAR_FORMAT,
            "ascii",
            "strict",
        )
        content += header + record + bytes(512 - len(record))
    return content + tar_bytes({"a.txt": bytes(999), "b.txt": b"b"})


@pytest.mark.parametrize("record", [b"33 size=000000000000000000000999\n", b"00000000000000000030 size=999\n"])
def test_numbers_of_an_extended_header_may_begin_with_zeros(record: bytes) -> None:
    assert (
        walked(with_records(record))
        == tarfile_files(with_records(record))
        == [("a.txt", 1536, 999), ("b.txt", 3072, 1)]
    )


@pytest.mark.parametrize("size", [b" 999", b"+999", b"-999", b"9_99", b"", b"9" * 20])
def test_a_size_that_is_no_number_is_refused(size: bytes) -> None:
    with refused(ShardError, "byte 0", "extended header", size.decode()):
        walked(with_records(b"%d size=%b\n" % (len(size) + 9 if size else 8, size)))


def test_of_two_sizes_of_a_member_the_first_counts() -> None:
    content = with_records(b"12 size=999\n", b"12 size=998\n")
    assert walked(content) == tarfile_files(content)
    assert walked(content)[0] == ("a.txt", 2560, 999)


def test_extended_header_without_a_member_is_an_error() -> None:
    info = tarfile.TarInfo("é" * 150)
    with pytest.raises(ShardError, match="no member after it"):
        walked(info.tobuf(tarfile.PAX_FORMAT)[:1024] + bytes(1024))


@pytest.mark.parametrize(("first", "second"), [("a.jpg", "a.jpg"), ("a.JPG", "a.jpg"), ("d/a.x.y", "d/a.X.Y")])
def test_extension_that_is_twice_in_a_sample_is_refused_with_both_places(
    tmp_path: Path, first: str, second: str
) -> None:
    content = tar_bytes([("z.jpg", b""), (first, b"1"), ("a", b"no key"), (second, b"2")])
    with refused(ShardError, "byte 3072", second.lower(), "byte 1024"):
        indexed(content, tmp_path / "x.tar")


@pytest.mark.parametrize("extension", ["__key__", "__URL__", "__bad__"])
def test_extension_that_webdataset_uses_itself_is_refused(tmp_path: Path, extension: str) -> None:
    with pytest.raises(ShardError, match="reserved by webdataset"):
        indexed(tar_bytes({f"a.{extension}": b"1"}), tmp_path / "x.tar")


def test_dotted_names_that_merge_samples_are_doubted(tmp_path: Path) -> None:
    index = indexed(tar_bytes({"img_0.5.jpg": b"", "img_0.7.jpg": b"", "img_0.7.cls": b""}), tmp_path / "x.tar")
    assert index.num_samples == 1
    assert index.doubts[0].startswith("'img_0.5.jpg' and 'img_0.7.jpg' belong to one sample, 'img_0'")
    fine = tar_bytes({"0.left.jpg": b"", "0.right.jpg": b"", "0.cls": b"", "1.5.jpg": b"", "1.5.cls": b""})
    assert indexed(fine, tmp_path / "x.tar").doubts == ()


@pytest.mark.parametrize(
    ("kind", "format"), [(tarfile.LNKTYPE, tarfile.PAX_FORMAT), (tarfile.SYMTYPE, tarfile.GNU_FORMAT)]
)
def test_links_are_doubted_by_name(kind: bytes, format: int, tmp_path: Path) -> None:
    link = tarfile.TarInfo("b.jpg")
    link.type, link.linkname = kind, "a.jpg"
    index = indexed(write([(tarfile.TarInfo("a.jpg"), b""), (link, b""), (link, b"")], format), tmp_path / "x.tar")
    for part in ("'b.jpg'", "2 links", "dtrain pack"):
        assert part in index.doubts[0]
    folder_link = tarfile.TarInfo("latest")  # no member of a sample
    folder_link.type, folder_link.linkname = tarfile.SYMTYPE, "2026"
    assert indexed(write([(folder_link, b"")], format), tmp_path / "x.tar").doubts == ()


class Miserly(io.BytesIO):
    """A file that hands over less than it is asked for, as one without a buffer may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size, 700) if size and size > 0 else size)


def test_a_file_that_is_read_in_pieces_is_walked_as_one(tmp_path: Path) -> None:
    content = tar_bytes([(f"{number}.jpg", bytes(3000)) for number in range(9)], tarfile.PAX_FORMAT)
    assert list(walk("x.tar", Miserly(content))) == list(walk("x.tar", io.BytesIO(content)))


def test_key_that_comes_back_is_doubted(tmp_path: Path) -> None:
    index = indexed(tar_bytes({"a.jpg": b"", "b.jpg": b"", "a.cls": b"", "b.cls": b""}), tmp_path / "x.tar")
    assert index.num_samples == 4
    assert "the key 'a'" in index.doubts[0]
    assert "Sort the names" in index.doubts[0]


def test_columns_take_the_first_alternative_that_a_sample_has(tmp_path: Path) -> None:
    names = ["a.png", "a.jpg", "a.cls", "b.png", "c.cls", "d.jpeg"]
    index = indexed(tar_bytes((name, bytes(number)) for number, name in enumerate(names)), tmp_path / "x.tar")
    _, sizes = index.columns(["jpg;jpeg;png", "png;jpg", "cls", "txt"])
    assert sizes.tolist() == [[1, 0, 2, -1], [3, 3, -1, -1], [-1, -1, 4, -1], [5, -1, -1, -1]]


def test_index_is_arrays_of_the_promised_types(tmp_path: Path) -> None:
    index = indexed(tar_bytes({"é.jpg": b"1", "é.cls": b"2"}), tmp_path / "x.tar")
    types = {name: value.dtype for name, value in vars(index).items() if isinstance(value, np.ndarray)}
    assert types == {
        "key_bytes": np.uint8,
        "key_starts": np.int64,
        "member_sample": np.int32,
        "member_extension": np.int32,
        "member_offset": np.int64,
        "member_size": np.int64,
    }
    assert (index.key(0), index.extensions, index.stamp.size) == ("é", ("jpg", "cls"), 10240)


def test_names_that_are_no_utf8_keep_their_bytes(tmp_path: Path) -> None:
    index = indexed(tar_bytes({"\udcff\udc80.\udcfe": b"1"}, tarfile.GNU_FORMAT), tmp_path / "x.tar")
    assert (index.key(0), index.extensions) == ("\udcff\udc80", ("\udcfe",))
    assert index.key_bytes.tobytes() == b"\xff\x80"


class Counting(io.BytesIO):
    """Counts the bytes that are read."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.total += len(data)
        return data


def test_payloads_of_large_members_are_not_read() -> None:
    count, size = 50, 300_000
    file = Counting(tar_bytes((f"{number}.bin", bytes(size)) for number in range(count)))
    assert len(list(walk("x.tar", file))) == count
    assert file.total < 2**19 + count * 5000


def test_named_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(ShardError, match="not a regular file"):
        index_tar(str(tmp_path / "x.tar"))


def test_shard_that_changes_while_it_is_indexed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tar"

    def walk_and_write(*args: Any) -> Any:
        yield from walk(*args)
        with open(path, "ab") as file:
            file.write(bytes(512))

    monkeypatch.setattr(shard_index, "walk", walk_and_write)
    with pytest.raises(ShardError, match="changed while it was indexed"):
        indexed(tar_bytes({"a.txt": b"1"}), path)


def test_error_survives_the_way_out_of_a_process() -> None:
    import pickle

    error = ShardError("a.tar", 512, "what", "Remedy.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "shard 'a.tar', byte 512: what. Remedy."


ARRAYS = ("key_bytes", "key_starts", "member_sample", "member_extension", "member_offset", "member_size")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "data" / "x.tar", 5)


@pytest.fixture
def read_only(shard: Path) -> Iterator[Path]:
    shard.parent.chmod(0o555)
    yield shard
    shard.parent.chmod(0o755)


def no_walk(path: str, *others: object) -> NoReturn:
    raise AssertionError(f"{path} was indexed again")


def assert_equal(index: ShardIndex, other: ShardIndex) -> None:
    for name, value in vars(other).items():
        if name in ARRAYS:
            assert getattr(index, name).dtype == value.dtype
            np.testing.assert_array_equal(getattr(index, name), value)
        else:
            assert getattr(index, name) == value


def test_second_look_reads_the_index_beside_the_shard(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = load_or_build(str(shard))
    assert sorted(os.listdir(shard.parent)) == ["x.tar", "x.tar.idx"]
    monkeypatch.setattr(shard_index, "index_tar", no_walk)
    assert_equal(load_or_build(str(shard)), built)


def test_index_goes_to_the_cache_where_the_folder_is_read_only(
    read_only: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_or_build(str(read_only))
    assert os.listdir(read_only.parent) == ["x.tar"]
    assert len(list(cache.glob("index/*.idx"))) == 1
    monkeypatch.setattr(shard_index, "index_tar", no_walk)
    assert_equal(load_or_build(str(read_only)), built)


def test_index_goes_to_the_cache_where_the_system_refuses(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any) -> Any:
        if path.parent == shard.parent:
            raise OSError(30, "Read-only file system")
        return real_open(path, *args)

    real_open = Path.open
    monkeypatch.setattr(Path, "open", refuse)
    assert write_index(index_tar(str(shard))).parent == cache / "index"


def test_shards_of_one_name_in_two_folders_have_two_indexes_in_the_cache(tmp_path: Path, cache: Path) -> None:
    shards = [write_shard(tmp_path / folder / "000.tar", 3, first=first) for folder, first in (("a", 0), ("b", 100))]
    for path in shards:
        path.parent.chmod(0o555)
    assert [load_or_build(str(path)).key(0) for path in shards * 2] == ["000000", "000100"] * 2
    assert len(list(cache.glob("index/*.idx"))) == 2


def test_nowhere_to_write_is_told_and_works(read_only: Path, cache: Path) -> None:
    cache.touch()
    with pytest.warns(UserWarning, match="DTRAIN_CACHE") as warned:
        assert load_or_build(str(read_only)).num_samples == 5
    assert_refused(str(warned[0].message), cache, remedy="DTRAIN_CACHE")


def test_shard_of_another_size_is_indexed_again(shard: Path) -> None:
    load_or_build(str(shard))
    status = shard.stat()
    write_shard(shard, 40)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load_or_build(str(shard)).num_samples == 40
    assert load_or_build(str(shard)).num_samples == 40


def test_shard_of_another_time_is_indexed_again(shard: Path) -> None:
    load_or_build(str(shard))
    status = shard.stat()
    write_shard(shard, 5, first=100)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert shard.stat().st_size == status.st_size
    assert load_or_build(str(shard)).key(0) == "000100"


def test_index_of_another_format_version_is_built_again(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = load_or_build(str(shard))
    monkeypatch.setattr(shard_index, "_VERSION", shard_index._VERSION + 1)
    kept = Path(f"{shard}.idx").read_bytes()
    assert_equal(load_or_build(str(shard)), built)
    assert Path(f"{shard}.idx").read_bytes() != kept


def test_stored_index_without_a_digest_is_used_and_has_the_same_digest(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_or_build(str(shard))
    arrays = {name: getattr(built, name) for name in ARRAYS}
    # As it was stored before there were digests.
    notes = {"version": 2, "stamp": built.stamp, "extensions": built.extensions, "doubts": built.doubts}
    notes["crc32"] = shard_index._checksum(notes, arrays)
    Path(f"{shard}.idx").write_bytes(safetensors.numpy.save(arrays, {"dtrain": json.dumps(notes)}))
    monkeypatch.setattr(shard_index, "index_tar", no_walk)
    assert_equal(load_or_build(str(shard)), built)


@pytest.mark.slow
def test_index_damaged_at_any_byte_is_never_believed(tmp_path: Path, cache: Path) -> None:
    shard = write_shard(tmp_path / "x.tar", 2)
    built = load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    content = kept.read_bytes()
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content))]
    cut = [content[:length] for length in range(len(content))]
    for damaged in flipped + cut[::7]:
        shutil.rmtree(cache, ignore_errors=True)
        kept.write_bytes(damaged)
        assert_equal(load_or_build(str(shard)), built)


def test_damaged_index_is_replaced(shard: Path) -> None:
    load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + b"?")
    load_or_build(str(shard))
    assert kept.read_bytes() == content


def test_index_file_of_another_tool_is_left_alone(shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = np.arange(5, dtype=np.int64).tobytes()
    Path(f"{shard}.idx").write_bytes(foreign)
    built = load_or_build(str(shard))
    assert Path(f"{shard}.idx").read_bytes() == foreign
    assert len(list(cache.glob("index/*.idx"))) == 1
    monkeypatch.setattr(shard_index, "index_tar", no_walk)
    assert_equal(load_or_build(str(shard)), built)


def test_file_is_plain_arrays_that_safetensors_reads(shard: Path) -> None:
    index = load_or_build(str(shard))
    arrays = safetensors.numpy.load_file(f"{shard}.idx")
    assert sorted(arrays) == sorted(ARRAYS)
    np.testing.assert_array_equal(arrays["member_offset"], index.member_offset)


def test_kept_index_can_be_read_by_whoever_the_umask_allows(shard: Path) -> None:
    previous = os.umask(0o027)
    try:
        load_or_build(str(shard))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(f"{shard}.idx").st_mode) == 0o640


def test_failed_write_leaves_nothing_behind(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="No space left"):
        load_or_build(str(shard))
    assert os.listdir(shard.parent) == ["x.tar"]


def _count_samples(path: str, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put([load_or_build(path).num_samples for _ in range(20)])  # type: ignore[attr-defined]


def test_many_processes_at_once_all_see_a_whole_index(shard: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_count_samples, args=(str(shard), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [[5] * 20] * 4
    for process in processes:
        process.join()
    assert sorted(os.listdir(shard.parent)) == ["x.tar", "x.tar.idx"]


@pytest.fixture
def server(shard: Path) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")
    with serving(shard.parent) as server:
        yield server


def assert_same_members(index: ShardIndex, other: ShardIndex) -> None:
    assert index.extensions == other.extensions
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(index, name), getattr(other, name))


def test_index_of_a_url_is_kept_in_the_cache(server: FileServer, shard: Path, cache: Path) -> None:
    built = load_or_build(server.url("x.tar"))
    assert_same_members(built, index_tar(str(shard)))
    assert os.listdir(shard.parent) == ["x.tar"]
    assert len(list(cache.glob("index/*.idx"))) == 1
    before = server.requests["x.tar"]
    assert_equal(load_or_build(server.url("x.tar")), built)
    assert server.requests["x.tar"] == before


def test_index_of_a_url_that_changed_is_built_again(server: FileServer, shard: Path) -> None:
    load_or_build(server.url("x.tar"))
    write_shard(shard, 5, first=100)
    assert load_or_build(server.url("x.tar")).key(0) == "000100"


def test_index_that_was_uploaded_with_a_shard_is_used(
    server: FileServer, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_or_build(str(shard))
    os.utime(shard, ns=(1, 1))  # what an upload does to it
    monkeypatch.setattr(shard_index, "index_tar", no_walk)
    assert_same_members(load_or_build(server.url("x.tar")), built)


@pytest.mark.parametrize("lie", ["another shard of its size", "another size", "a page", "damaged"])
def test_uploaded_index_that_lies_is_not_believed(server: FileServer, shard: Path, lie: str) -> None:
    load_or_build(str(shard))
    kept = Path(f"{shard}.idx")
    if lie == "another shard of its size":
        size = shard.stat().st_size
        shard.write_bytes(tar_bytes({"other.jpg": b"1" * 700}).ljust(size, b"\0"))
        assert shard.stat().st_size == size
    elif lie == "another size":
        write_shard(shard, 40)
    elif lie == "a page":
        kept.write_bytes(b"<html>not here</html>" * 50)
    else:
        kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert_same_members(load_or_build(server.url("x.tar")), index_tar(str(shard)))


def test_shard_behind_a_server_without_ranges_is_indexed_in_the_cache(
    server: FileServer, shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "_PIECE", 1024)
    monkeypatch.setattr(shard_file, "_HEADERS", 1024)
    server.ranges = False
    write_shard(shard, 500)
    assert_same_members(load_or_build(server.url("x.tar")), index_tar(str(shard)))
    assert len(list(cache.glob("shards/*.tar"))) == 1


def test_page_in_place_of_a_shard_is_refused_with_what_it_says(server: FileServer) -> None:
    server.page = b"<html>Sign in to the portal</html>".ljust(600)
    with refused(ShardError, "x.tar', byte 0", "b'<html>Sign in to the"):
        load_or_build(server.url("x.tar") + "?token=secret")
