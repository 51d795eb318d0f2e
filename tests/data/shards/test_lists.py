"""Lists of shards in files: the same shards as their entries, and one clear message for a wrong list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.data.shards import patterns
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.patterns import expand, first_shard
from tests.refusals import assert_refused, refusal_of
from tests.shards import write_numbered


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data [1]").mkdir()
    for name in ("a-0.tar", "a-1.tar", "b#1.tar", "#c.tar", "@d.tar"):
        (tmp_path / "data [1]" / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data [1]"


def listed(path: Path, text: str) -> str:
    path.write_text(text)
    return f"@{path}"


def test_text_list_has_entries_relative_to_its_folder_patterns_comments_and_blank_lines(folder: Path) -> None:
    text = "\ufeff# the first part\n\na-*.tar\r\n  b#1.tar  \n./#c.tar\n   # no shard\n./@d.tar"
    names = ["a-0.tar", "a-1.tar", "b#1.tar", "./#c.tar", "./@d.tar"]
    assert expand(listed(folder / "l.txt", text)) == [str(folder / name) for name in names[:3]] + [
        f"{folder}/{name}" for name in names[3:]
    ]
    assert expand("@data [1]/l.txt")[0] == "data [1]/a-0.tar"


def test_json_list_equals_the_text_list(folder: Path) -> None:
    as_text = listed(folder / "l.txt", "b#1.tar\na-{0,1}.tar\n")
    assert expand(listed(folder / "l.json", json.dumps(["b#1.tar", "a-{0,1}.tar"]))) == expand(as_text)


def test_lists_combine_with_patterns_in_their_order(folder: Path) -> None:
    first = listed(folder / "l.txt", "a-1.tar")
    assert [Path(path).name for path in expand(["data [[]1]/b*.tar", first])] == ["b#1.tar", "a-1.tar"]


def test_urls_and_absolute_paths_stay(folder: Path) -> None:
    entries = ["https://host/x.tar?signature=1", f"{folder}/a-0.tar", "s3://bucket/y.tar"]
    assert expand(listed(folder / "l.txt", "\n".join(entries))) == entries


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("l.txt", "# nothing\n\n", ["@", "l.txt", "has no entry", "per line"]),
        ("l.json", "[]", ["l.json", "has no entry"]),
        ("l.json", "[1]", ["entry 0", "l.json", "'1'", "array of texts"]),
        ("l.json", '{"shards": []}', ["l.json", "dict", "array of texts"]),
        ("l.json", "a.tar\n", ["l.json", "not JSON", "array of texts"]),
        ("l.txt", "@other.txt", ["l.txt", "'@other.txt'", "Write the shards of that list"]),
        ("l.txt", "a-0.tar\nmissing.tar", ["missing.tar", "matches no file", "entry of @", "l.txt"]),
        ("l.txt", "a-0.tar\na-*.tar", ["a-0.tar", "more than once"]),
        ("l.txt", "pipe:cat a-0.tar", ["pipe:cat", "is a pipe"]),
        ("l.txt", "a-0.tar.gz", ["is compressed", "gunzip"]),
    ],
)
def test_wrong_list_is_refused(folder: Path, name: str, text: str, parts: list[str]) -> None:
    assert_refused(refusal_of(expand, listed(folder / name, text)), *parts)


def test_list_that_is_missing_or_a_shard_is_refused(folder: Path) -> None:
    assert_refused(refusal_of(expand, "@data [1]/m.txt"), "@data [1]/m.txt", "does not exist", "data [1]")
    assert_refused(refusal_of(expand, "@"), "'@'", "@shards.txt")
    (folder / "x.tar").write_bytes(b"\xff\xfe" * 400)
    assert_refused(refusal_of(expand, f"@{folder}/x.tar"), "not UTF-8", "without '@'")


def test_content_of_a_list_counts_and_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    shards = write_numbered(tmp_path / "s", (3, 4, 2))
    lists = [listed(tmp_path / "one.txt", "\n".join(shards)), listed(tmp_path / "s" / "two.json", json.dumps(shards))]
    same = [DatasetIndex.build(expand(given), ["cls"]).fingerprint for given in (*lists, shards)]
    assert len(set(same)) == 1
    other = DatasetIndex.build(expand(listed(tmp_path / "one.txt", "\n".join(shards[::-1]))), ["cls"])
    assert other.fingerprint != same[0]


def test_plain_names_of_a_long_list_are_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for called in ("braceexpand", "_glob"):
        monkeypatch.setattr(patterns, called, lambda *_: pytest.fail("a plain name was expanded"))
    urls = [f"https://host/train-{number:06d}.tar" for number in range(2_000)]
    given = listed(tmp_path / "l.txt", "\n".join(urls))
    assert expand(given) == urls
    assert first_shard(given) == urls[0]
