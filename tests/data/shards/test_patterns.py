"""Patterns to shards: the order that was asked for, and messages that tell a person what to correct."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.data.shards.patterns import expand, names
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train-000000.tar", "train-000001.tar", "train-000002.tar", "eval-0.tar", "README.md"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_braces_expand_in_the_order_that_they_name(folder: Path) -> None:
    assert expand("train-{000002..000000}.tar") == ["train-000002.tar", "train-000001.tar", "train-000000.tar"]


def test_globs_are_sorted_and_lists_keep_their_order(folder: Path) -> None:
    assert expand(["train-*.tar", "eval-0.tar"]) == [*(f"train-00000{i}.tar" for i in range(3)), "eval-0.tar"]
    assert expand(["eval-?.tar", "train-{000001,000000}.tar"]) == ["eval-0.tar", "train-000001.tar", "train-000000.tar"]


def test_braces_and_globs_combine(folder: Path) -> None:
    assert expand(str(folder / "{eval,train}-*0.tar")) == [str(folder / "eval-0.tar"), str(folder / "train-000000.tar")]


def test_path_objects_and_the_home_folder_are_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert expand(folder / "eval-0.tar") == [str(folder / "eval-0.tar")]
    assert expand("~/eval-0.tar") == [str(folder / "eval-0.tar")]


def test_file_whose_name_looks_like_a_pattern_is_a_file(folder: Path) -> None:
    for name in ("a[1].tar", "b{x.tar", "c{1,2}.tar"):
        (folder / name).touch()
        assert expand(name) == [name]


def test_glob_leaves_out_kept_indexes_and_folders(folder: Path) -> None:
    (folder / "train-000000.tar.idx").touch()
    (folder / "train-old").mkdir()
    assert expand("train-*") == [f"train-00000{i}.tar" for i in range(3)]


def test_wrong_number_of_digits_is_guessed(folder: Path) -> None:
    with pytest.raises(ValueError, match="matches no file") as caught:
        expand(str(folder / "train-{00000..00002}.tar"))
    message = str(caught.value)
    assert f"looked in {str(folder)!r}, which has 4 .tar files such as eval-0.tar" in message
    assert "6 digits instead of 5?" in message


def test_missing_shards_of_a_range_are_counted_and_the_last_is_named(folder: Path) -> None:
    with refused(FileNotFoundError, "5 paths", "2 of them", "'train-000003.tar'", "train-000002.tar"):
        expand("train-{000000..000004}.tar")


def test_missing_named_shard_is_a_file_not_found(folder: Path) -> None:
    with refused(FileNotFoundError, "'train-7.tar'", "does not exist", "6 digits instead of 1?"):
        expand("train-7.tar")


def test_glob_without_a_match_says_what_is_there_instead(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").touch()
    with refused(ValueError, "'sub/*.tar'", "sub', which has no .tar file but notes.txt"):
        expand("sub/*.tar")
    with refused(ValueError, "'nowhere/*/x-*.tar'", "has 4 .tar files such as eval-0.tar"):
        expand("nowhere/*/x-*.tar")


def test_empty_folder_is_called_empty(tmp_path: Path) -> None:
    with refused(ValueError, "*.tar", "is empty"):
        expand(str(tmp_path / "*.tar"))


def test_folder_is_refused_with_the_pattern_to_write(folder: Path) -> None:
    with refused(ValueError, "is a folder", "4 .tar files such as eval-0.tar", f"'{folder}/*.tar'"):
        expand(str(folder))


@pytest.mark.parametrize("patterns", [["eval-0.tar", "./eval-0.tar"], ["train-*.tar", "train-{000001..000001}.tar"]])
def test_shard_named_twice_is_refused(folder: Path, patterns: list[str]) -> None:
    with pytest.raises(ValueError, match="named more than once"):
        expand(patterns)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("pipe:cat x.tar", ["'pipe:cat x.tar'", "pipe", "a file first"]),
        ("-", ["'-'", "pipe", "a file first"]),
        ("train-{0..9}.tar.gz", ["'train-{0..9}.tar.gz'", "compressed", "gunzip"]),
        ("TRAIN.TGZ", ["'TRAIN.TGZ'", "compressed", "gunzip"]),
        ("train.tar.lz4", ["'train.tar.lz4'", "compressed", "unlz4"]),
        ("train.tar.zst", ["'train.tar.zst'", "compressed", "unzstd"]),
        ("https://me:secret@host/x.tar.gz?sig=1", ["'https://host/x.tar.gz'", "compressed", "gunzip"]),
        ("tape://robot/x.tar", ["'tape://robot/x.tar'", "https://, s3:// or a path"]),
        ("x{0..3.tar", ["'x{0..3.tar'", "1 braces", "{00000..00009}"]),
    ],
)
def test_what_cannot_be_indexed_is_refused_with_the_remedy(folder: Path, pattern: str, parts: list[str]) -> None:
    with refused(ValueError, *parts):
        expand(pattern)


def test_compressed_shard_found_by_a_glob_is_refused_too(folder: Path) -> None:
    (folder / "train-000003.tar.gz").touch()
    with refused(ValueError, "'train-000003.tar.gz'", "compressed"):
        expand("train-*")


def test_urls_expand_in_braces_and_are_asked_for_later(folder: Path) -> None:
    assert expand("https://host/{b,a}/x.tar?sig=*") == ["https://host/b/x.tar?sig=*", "https://host/a/x.tar?sig=*"]
    assert expand(["s3://bucket/train-{00..01}.tar"]) == ["s3://bucket/train-00.tar", "s3://bucket/train-01.tar"]


def test_url_of_a_file_is_a_path(folder: Path) -> None:
    assert expand(f"file://{folder}/eval-*.tar") == [str(folder / "eval-0.tar")]


def test_globs_of_urls_are_listed_where_the_file_system_can() -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for name in ("b.tar", "a.tar", "a.tar.idx"):
        files.pipe_file(f"/glob/{name}", b"")
    assert expand("memory://glob/*") == ["memory:///glob/a.tar", "memory:///glob/b.tar"]
    with refused(ValueError, "'memory://glob/x-*'", "brace pattern"):
        expand("memory://glob/x-*")


def test_url_named_twice_is_refused_without_its_secrets() -> None:
    with refused(ValueError, "'https://host/x.tar'", "more than once"):
        expand(["https://host/x.tar?sig=1"] * 2)


def test_urls_have_names_as_paths_have_and_signatures_are_none() -> None:
    urls = ["https://h/a/000.tar?sig=1", "https://h/b/000.tar?sig=2", "s3://bucket/001.tar"]
    assert names(urls) == ["a/000.tar", "b/000.tar", "001.tar"]
    with refused(ValueError, "'h/x'", "once"):
        names(["https://h/x?file=1", "https://h/x?file=2"])


def test_empty_list_is_refused() -> None:
    with refused(ValueError, "shards", "train-*.tar"):
        expand([])


def test_names_are_base_names_where_these_are_unique() -> None:
    assert names(["/data/a/000.tar", "/data/b/001.tar"]) == ["000.tar", "001.tar"]


def test_names_grow_only_where_they_must() -> None:
    paths = ["/x/a/000.tar", "/x/b/000.tar", "/y/a/000.tar", "/y/a/001.tar"]
    assert names(paths) == ["x/a/000.tar", "b/000.tar", "y/a/000.tar", "001.tar"]
    assert names(["/000.tar", "/a/000.tar"]) == ["/000.tar", "a/000.tar"]


def test_names_do_not_depend_on_how_a_path_was_written(folder: Path) -> None:
    assert names(["eval-0.tar", "sub/../x/eval-0.tar"]) == [f"{folder.name}/eval-0.tar", "x/eval-0.tar"]


def test_no_name_is_the_suffix_of_another_shards_path() -> None:
    paths = [os.path.join("/", *(f"d{digit}" for digit in f"{number:03b}"), "s.tar") for number in range(8)]
    for path, name in zip(paths, names(paths), strict=True):
        assert [other for other in paths if other.endswith(f"/{name}")] == [path]


def test_names_of_equal_paths_are_refused() -> None:
    with refused(ValueError, "'/a/x.tar'", "once"):
        names(["/a/x.tar", "/a/../a/x.tar"])
