"""The newest pictures and texts of a run are shown, and nothing that is no picture."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from dtrain.tracking.media import write_media
from dtrain.tracking.report.media import media


def png(shade: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (8, 8), shade).save(stream, "PNG")
    return stream.getvalue()


def test_the_newest_of_each_name_are_read_as_the_trainer_wrote_them(tmp_path: Path) -> None:
    for step in (50, 1000, 100, 2_000_000_000):
        write_media(tmp_path / "media", step, "confusion", png(step % 200))
    write_media(tmp_path / "media", 7, "samples", "Once upon")
    found = media(tmp_path, [], newest=2)
    assert [(one.name, one.step) for one in found] == [
        ("confusion", 1000),
        ("confusion", 2_000_000_000),
        ("samples", 7),
    ]
    assert found[0].png == png(0)
    assert found[2].text == "Once upon"


def bomb() -> bytes:
    """A PNG of 65,000 x 65,000 pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 65_000, 65_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<svg onload='alert(1)'/>", "no readable PNG"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "no readable PNG"),
        (png()[:-20], "no readable PNG"),
        (bomb(), ""),
        (png() + b"\0" * 3_000_000, "bytes are more than a report takes in"),
    ],
)
def test_what_is_no_picture_is_not_passed_on(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "media" / "x" / "step-000000001.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (found,) = media(tmp_path, [])
    assert found.png is None
    assert why in found.refused
    assert found.refused


def test_of_very_many_names_the_first_are_shown(tmp_path: Path) -> None:
    for number in range(120):
        write_media(tmp_path / "media", 1, f"name-{number:03d}", "text")
    gaps: list[str] = []
    assert [one.name for one in media(tmp_path, gaps)] == [f"name-{number:03d}" for number in range(100)]
    assert gaps == ["of the pictures and texts only those of the first 100 names are shown"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    folder = tmp_path / "run" / "media" / "x"
    folder.mkdir(parents=True)
    (folder / "step-000000001.txt").symlink_to(secret)
    (folder.parent / "y").symlink_to(folder)
    assert media(tmp_path / "run", []) == []
