"""``pack repair``: the whole samples of a cut shard, byte for byte, as ``tarfile`` reads them; nothing else is touched."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.pack.__main__ import main
from tests.refusals import assert_refused
from tests.shards import write_tar

#: Payloads of one, two and no blocks; so a member starts at every third, fourth or second block.
SAMPLES = [(f"s{number}", {"jpg": bytes([number]) * 700, "txt": b"", "cls": b"%d" % number}) for number in range(4)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return Path(write_tar(tmp_path / "x.tar", SAMPLES))


def ends(data: bytes) -> list[int]:
    """The byte after the payload of each member."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [member.offset_data + member.size for member in tar]


def members(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def repaired(tmp_path: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Runs ``pack repair``; returns what its JSON file has about the shards."""
    assert main(["repair", *arguments, "--json", str(tmp_path / "result.json")]) == code
    found: list[dict[str, Any]] = json.loads((tmp_path / "result.json").read_text())["shards"]
    return found


def test_every_cut_keeps_all_whole_samples_and_no_part_of_another(tmp_path: Path) -> None:
    data = Path(write_tar(tmp_path / "whole.tar", SAMPLES)).read_bytes()
    member_ends = ends(data)
    whole = [(f"{key}.{extension}", payload) for key, of in SAMPLES for extension, payload in of.items()]
    before_end = -(-member_ends[-1] // 512) * 512 + 1024
    for size in sorted({*range(0, before_end, 256), *member_ends, *(end - 1 for end in member_ends)}):
        path = tmp_path / f"{size}.tar"
        path.write_bytes(data[:size])
        present = sum(end <= size for end in member_ends)
        samples = present // 3
        # The only sample of a shard has none that it could be compared with, unless the next one has begun.
        is_known = samples > 1 or (samples == 1 and size > -(-member_ends[2] // 512) * 512 + 511)
        (result,) = repaired(tmp_path, str(path), code=int(not is_known))
        copy = tmp_path / f"{size}.repaired.tar"
        assert copy.exists() == is_known
        if is_known:
            end = member_ends[3 * samples - 1]
            assert members(copy) == whole[: 3 * samples], size
            assert copy.read_bytes()[:end] == data[:end]
            assert DatasetIndex.build([str(copy)], ["cls"]).num_samples == result["samples"] == samples
            assert result["lost_bytes"] == max(0, size - end)


def test_what_was_lost_is_named(tmp_path: Path, shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data[: ends(data)[6] - 10])  # inside s2.jpg
    (result,) = repaired(tmp_path, str(shard))
    copy = tmp_path / "x.repaired.tar"
    assert (result["state"], result["samples"], result["lost_key"]) == ("repaired", 2, "s2")
    assert result["copy"] == str(copy)
    assert Path(f"{copy}.idx").exists()
    assert_refused(capsys.readouterr().out, "x.tar: 2 whole samples", "'s2'", "repaired: 1", "bytes not copied")
    assert shard.read_bytes() == data[: ends(data)[6] - 10]


def test_a_sample_before_a_member_of_another_sample_is_whole(tmp_path: Path) -> None:
    path = Path(
        write_tar(tmp_path / "x.tar", [("a", {"jpg": b"a" * 9}), ("b", {"txt": b"b" * 9}), ("c", {"cls": b"c" * 600})])
    )
    path.write_bytes(path.read_bytes()[: ends(path.read_bytes())[2] - 1])
    (result,) = repaired(tmp_path, str(path))
    assert (result["samples"], result["lost_key"]) == (2, "c")


def test_only_the_end_mark_is_missing(tmp_path: Path, shard: Path) -> None:
    whole = shard.read_bytes()
    end = -(-ends(whole)[-1] // 512) * 512
    for kept in (end, end + 512):
        shard.write_bytes(whole[:kept])
        (result,) = repaired(tmp_path, str(shard), "--out", str(tmp_path / str(kept)))
        copy = tmp_path / str(kept) / "x.tar"
        assert (result["samples"], result["lost_key"]) == (4, None)
        assert copy.read_bytes() == whole[: end + 1024]


def test_damaged_header_ends_the_copy(tmp_path: Path, shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    header = -(-ends(bytes(data))[5] // 512) * 512  # of s2.jpg
    data[header + 150] ^= 1
    shard.write_bytes(data)
    (result,) = repaired(tmp_path, str(shard))
    assert [name for name, _ in members(Path(result["copy"]))][-1] == "s1.cls"
    assert result["lost_bytes"] > 2000


def test_intact_shards_are_not_copied_and_others_continue(
    tmp_path: Path, shard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.tar").write_bytes(b"\x1f\x8bgzip")
    (tmp_path / "empty.tar").touch()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(shard.read_bytes()[: ends(shard.read_bytes())[4]])
    results = repaired(tmp_path, *(str(tmp_path / f"{name}.tar") for name in ("bad", "empty", "x", "cut")), code=1)
    assert [one["state"] for one in results] == ["failed", "failed", "intact", "repaired"]
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == [
        *("bad.tar", "cut.repaired.tar", "cut.tar", "empty.tar", "x.tar")
    ]
    shown = capsys.readouterr()
    assert "x.tar: intact, 4 samples" in shown.out
    assert_refused(shown.err, "bad.tar", "gzip", "gunzip", "2 of 4 shards were not repaired")


def test_nothing_is_overwritten(tmp_path: Path, shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard.write_bytes(shard.read_bytes()[:4000])
    (tmp_path / "x.repaired.tar").write_text("mine")
    repaired(tmp_path, str(shard), code=1)
    repaired(tmp_path, str(shard), "--out", str(tmp_path), code=1)
    assert (tmp_path / "x.repaired.tar").read_text() == "mine"
    assert len(shard.read_bytes()) == 4000
    assert_refused(capsys.readouterr().err, "x.repaired.tar", "exists", "--out DIR")


def test_other_faults_have_other_remedies(tmp_path: Path, shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard.write_bytes(shard.read_bytes() * 2)  # joined with cat
    twice = write_tar(tmp_path / "twice.tar", [("a", {"jpg": b"1"}), ("b", {"jpg": b"1", "JPG": b"2"})])
    assert [one["state"] for one in repaired(tmp_path, str(shard), twice, code=1)] == ["failed", "failed"]
    assert_refused(capsys.readouterr().err, "tar --concatenate", "occurs twice")
    cut = Path(twice)
    cut.write_bytes(cut.read_bytes()[: ends(cut.read_bytes())[-1]])
    repaired(tmp_path, twice, code=1)
    assert not (tmp_path / "twice.repaired.tar").exists()


def test_url_and_wrong_name_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["repair", "https://host/x.tar?signature=secret"]) == 1
    assert main(["repair", str(tmp_path / "none-*.tar")]) == 1
    shown = capsys.readouterr().err
    assert_refused(shown, "https://host/x.tar", "Download", "none-*.tar")
    assert "secret" not in shown
