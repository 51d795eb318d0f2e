"""Written shards as ``tarfile`` and webdataset read them; failures leave nothing behind; encoders."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dtrain.data.writer import RowBlock, balanced_sizes, check_key, encode, write_shard, write_shards
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import webdataset_reads


def samples(count):
    return [{"__key__": f"sample_{n:04d}", "bin": bytes([n % 256]) * (n % 700), "cls": n} for n in range(count)]


def members(path):
    with tarfile.open(path) as archive:
        return [(member.name, archive.extractfile(member).read()) for member in archive]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_webdataset_reads_what_was_written(tmp_path):
    paths = write_shards(samples(10), tmp_path, shards=3)
    assert [path.name for path in paths] == [f"train-{n:06d}.tar" for n in range(3)]
    read = list(webdataset_reads(*paths))
    assert [sample["__key__"] for sample in read] == [f"sample_{n:04d}" for n in range(10)]
    assert [int(sample["cls"]) for sample in read] == list(range(10))
    assert [sample["bin"] for sample in read] == [sample["bin"] for sample in samples(10)]


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="./\0", exclude_categories=("Cs",)), min_size=1, max_size=6),
        st.dictionaries(st.sampled_from(["bin", "tok", "left.jpg", "größe"]), st.integers(0, 3 * 512), min_size=1),
        max_size=4,
    ),
    st.sampled_from([0, 80, 89, 90, 91, 95, 150, 300]),
)
@examples(60)
def test_the_bytes_are_those_of_webdatasets_writer(tmp_path_factory, shapes, longer):
    directory = "d" * longer + "/" if longer else ""
    written = [
        {"__key__": directory + key, **{extension: bytes(size) for extension, size in members.items()}}
        for key, members in shapes.items()
        if not (key.startswith("__") or key in ("", "."))
    ]
    path = tmp_path_factory.mktemp("written") / "x.tar"
    write_shard(path, written)
    expected = io.BytesIO()
    with webdataset.TarWriter(expected, mtime=0, encoder=encode) as tar:
        for sample in written:
            tar.write(sample)
    assert path.read_bytes() == expected.getvalue()


@pytest.mark.parametrize("first", [0, 41, 10**9 - 2])
@pytest.mark.parametrize("values", [1, 255, 256, 1025])
def test_rows_are_written_as_the_same_samples_are(tmp_path, first, values):
    tokens = np.arange(5 * values, dtype="<u2").reshape(5, values)
    as_rows, as_samples = tmp_path / "rows.tar", tmp_path / "samples.tar"
    assert write_shard(as_rows, [RowBlock(first, "tok", tokens[:3]), RowBlock(first + 3, "tok", tokens[3:])]) == 5
    write_shard(as_samples, [{"__key__": f"{first + n:09d}", "tok": tokens[n].tobytes()} for n in range(5)])
    assert as_rows.read_bytes() == as_samples.read_bytes()


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_shards_are_balanced_and_complete(total, number):
    sizes = balanced_sizes(total, per_shard=number)
    assert sum(sizes) == total
    assert max(sizes) <= number
    assert max(sizes) - min(sizes) <= 1
    if total >= number:
        sizes = balanced_sizes(total, shards=number)
        assert (len(sizes), sum(sizes)) == (number, total)
        assert max(sizes) - min(sizes) <= 1


@examples(20)
@given(st.integers(0, 20), st.integers(1, 6), st.booleans())
def test_a_stream_of_unknown_length_is_written_whole(tmp_path_factory, total, per_shard, known):
    folder = tmp_path_factory.mktemp("shards")
    paths = write_shards(iter(samples(total)), folder, per_shard=per_shard, total=total if known else None)
    assert [sample["__key__"] for sample in webdataset_reads(*paths) if total] == [s["__key__"] for s in samples(total)]
    sizes = [len(members(path)) // 2 for path in paths]
    assert all(sizes) or total == 0
    assert sizes == balanced_sizes(total, per_shard=per_shard) if known else set(sizes[:-1]) <= {per_shard}


def test_the_same_samples_give_the_same_bytes(tmp_path):
    pixels = np.arange(75, dtype=np.uint8).reshape(5, 5, 3)
    rows = [{"__key__": f"ä/{n}" + "x" * 120, "png": pixels, "npy": np.ones(n), "json": {"n": n}} for n in range(4)]
    one = write_shards(rows, tmp_path / "one", shards=2)
    other = write_shards(iter(rows), tmp_path / "other", shards=2, total=4)
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


@pytest.mark.parametrize(
    ("sample", "names"),
    [
        ({"cls": 1}, ["__key__ None"]),
        ({"__key__": "../up", "cls": 1}, ["relative name"]),
        ({"__key__": "x"}, ["no field"]),
        ({"__key__": "x", "meta.pkl": b"\x80\x04."}, ["pickle"]),
        ({"__key__": "x", "npy": np.array([{}])}, ["'x': .npy cannot be written"]),
    ],
)
def test_what_cannot_be_read_again_is_refused_and_nothing_is_left(tmp_path, sample, names):
    with refused(ValueError, *names):
        write_shards([{"__key__": "good", "cls": 1}, sample], tmp_path, per_shard=1)
    assert files(tmp_path) == []


def test_members_are_named_by_key_and_extension(tmp_path):
    row = {"__key__": "folder.x/key", "__url__": "not a member", "left.png": b"as it is", "cls": 7}
    (path,) = write_shards([row], tmp_path, shards=1)
    assert sorted(members(path)) == [("folder.x/key.cls", b"7"), ("folder.x/key.left.png", b"as it is")]


def test_keys_must_differ_within_a_shard(tmp_path):
    with refused(ValueError, "the key 'x'", "two samples"):
        write_shards([{"__key__": "x", "cls": 1}] * 2, tmp_path, shards=1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_shard_behind(tmp_path, error):
    def failing():
        yield from samples(5)
        raise error

    with pytest.raises(error):
        write_shards(failing(), tmp_path, per_shard=2)
    assert files(tmp_path) == []


@pytest.mark.parametrize("total", [4, 6])
def test_a_wrong_total_is_found_and_nothing_is_left(tmp_path, total):
    with pytest.raises(ValueError, match=f"total={total}"):
        write_shards(iter(samples(5)), tmp_path, shards=2, total=total)
    assert files(tmp_path) == []


def test_old_shards_are_never_mixed_with_new_ones(tmp_path):
    old = write_shards(samples(4), tmp_path, shards=4)
    before = [path.read_bytes() for path in old]
    with refused(FileExistsError, "4 shards", "train-000000.tar"):
        write_shards(samples(2), tmp_path, shards=2)
    assert [path.read_bytes() for path in old] == before
    write_shards(samples(2), tmp_path, prefix="val", shards=1)


def test_shards_that_appear_meanwhile_are_not_overwritten(tmp_path):
    def meanwhile():
        yield from samples(1)
        (tmp_path / "train-000000.tar").write_bytes(b"somebody else's")

    with pytest.raises(FileExistsError, match="already"):
        write_shards(meanwhile(), tmp_path, per_shard=5)
    assert (tmp_path / "train-000000.tar").read_bytes() == b"somebody else's"
    assert files(tmp_path) == ["train-000000.tar"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["want one of them"]),
        ({"shards": 1, "per_shard": 1}, ["want one of them"]),
        ({"shards": 0}, ["at least 1"]),
        ({"per_shard": -1}, ["at least 1"]),
        ({"shards": 6}, ["Ask for 5 or fewer"]),
        ({"shards": 1, "prefix": "a/b"}, ["plain name"]),
        ({"shards": 1, "prefix": "{0..9}"}, ["plain name"]),
        ({"shards": 1, "prefix": ""}, ["plain name"]),
    ],
)
def test_impossible_sizes_and_names_are_refused(tmp_path, options, names):
    with refused(ValueError, *names):
        write_shards(samples(5), tmp_path, **options)
    assert files(tmp_path) == []


def test_a_stream_needs_its_length_for_a_number_of_shards(tmp_path):
    with pytest.raises(ValueError, match="pass total="):
        write_shards(iter(samples(5)), tmp_path, shards=2)


def test_values_are_encoded_by_extension() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    row = {
        "__key__": "folder.x/key",
        "__url__": "not a member",
        "cls": np.int64(7),
        "txt": "ä",
        "json": {"a": [1, None]},
        "npy": np.arange(3, dtype=np.float16),
        "png": pixels,
        "left.png": pixels[..., 0],
        "jpg": b"as it is",
        "mp3": memoryview(b"as it is"),
    }
    value = encode(row)
    assert value.pop("__key__") == "folder.x/key"
    assert set(value) == {ext for ext in row if not ext.startswith("_")}
    assert value["cls"] == b"7"
    assert value["txt"].decode() == "ä"
    assert json.loads(value["json"]) == {"a": [1, None]}
    array = np.load(io.BytesIO(value["npy"]))
    assert (array.dtype, array.tolist()) == (np.float16, [0, 1, 2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(value["png"]))), pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(value["left.png"]))), pixels[..., 0])
    assert value["jpg"] == value["mp3"] == b"as it is"


def stored(sample: dict[str, Any]) -> dict[str, Any]:
    """As the writer does it."""
    check_key(sample.get("__key__"), set())
    return encode(sample)


@pytest.mark.parametrize(
    ("sample", "names"),
    [
        ({"cls": 1}, ["__key__ None"]),
        ({"__key__": "", "cls": 1}, ["__key__ ''"]),
        ({"__key__": 3, "cls": 1}, ["__key__ 3"]),
        ({"__key__": "img_0.5", "cls": 1}, ["has a dot"]),
        ({"__key__": "/etc/passwd", "cls": 1}, ["relative name"]),
        ({"__key__": "../up", "cls": 1}, ["relative name"]),
        ({"__key__": "a//b", "cls": 1}, ["relative name"]),
        ({"__key__": "__meta__/x", "cls": 1}, ["skips them"]),
        ({"__key__": "x"}, ["no field"]),
        ({"__key__": "x", "CLS": 1}, ["lower case"]),
        ({"__key__": "x", ".cls": 1}, ["leading dot"]),
        ({"__key__": "x", "pyd": {}}, ["pickle"]),
        ({"__key__": "x", "meta.pkl": b"\x80\x04."}, ["pickle"]),
        ({"__key__": "x", "pth": b""}, ["pickle"]),
        ({"__key__": "x", "npy": np.array([{}])}, ["'x': .npy cannot be written"]),
        ({"__key__": "x", "cls": 1.5}, ["not an integer"]),
        ({"__key__": "x", "cls": [1]}, ["'x': .cls cannot be written"]),
        ({"__key__": "x", "json": {1, 2}}, ["'x': .json cannot be written"]),
        ({"__key__": "x", "png": np.ones((2, 2))}, ["float64"]),
        ({"__key__": "x", "jpg": np.ones((2, 2, 3), np.uint8)}, ["no encoder for .jpg"]),
    ],
)
def test_what_cannot_be_read_again_is_refused(sample: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        stored(sample)


def test_the_second_of_two_equal_keys_is_refused() -> None:
    seen: set[str] = set()
    check_key("x", seen)
    with refused(ValueError, "the key 'x'", "two samples"):
        check_key("x", seen)
    check_key("y", seen)
