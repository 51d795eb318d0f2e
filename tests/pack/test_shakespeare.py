"""Tiny Shakespeare: a folder without the text is refused; tests/test_plain.py packs it."""

from __future__ import annotations

from pathlib import Path

from dtrain.pack.shakespeare import prepare
from tests.refusals import refused


def test_a_missing_text_is_refused_with_the_command_that_downloads_it(tmp_path: Path) -> None:
    with refused(FileNotFoundError, tmp_path / "tinyshakespeare.txt", remedy="curl -o"):
        prepare(str(tmp_path), str(tmp_path / "shards"), 64)
    assert list(tmp_path.iterdir()) == []


def test_shards_that_exist_need_no_text(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    prepare(str(tmp_path / "nothing"), str(tmp_path), 64)
    # A command that was killed while it moved the shards is completed.
    (tmp_path / ".packing").mkdir()
    (tmp_path / ".packing" / "publishing").touch()
    with refused(FileNotFoundError, tmp_path / "nothing", remedy="curl -o"):
        prepare(str(tmp_path / "nothing"), str(tmp_path), 64)
