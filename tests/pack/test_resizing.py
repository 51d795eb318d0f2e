"""``pack imagefolder --max-side``: which images are resized, to which pixels, and what becomes of all others."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageCms

from dtrain.data.fields.decode import decode_image
from dtrain.data.fields.field import SampleError
from dtrain.pack.__main__ import main
from dtrain.pack.resizing import Resizing
from dtrain.pack.staging import StagedDataset
from tests.refusals import assert_refused, refused

ORIENTATION = 0x0112


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture, whose resized pixels depend little on the filter, in any mode of Pillow."""
    rows, columns = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pixels = np.stack([255 * rows, 255 * columns, 255 * rows * columns], axis=-1).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + 77)
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(pixels[..., 2]))
        return image
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def opened(payload: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(payload))
    image.load()
    return image


@pytest.mark.parametrize(
    ("kind", "mode", "to", "stored"),
    [
        ("JPEG", "RGB", "jpg", "RGB"),
        ("JPEG", "L", "jpg", "L"),
        ("JPEG", "CMYK", "jpg", "RGB"),
        ("WEBP", "RGBA", "jpg", "RGB"),
        ("PNG", "RGB", "png", "RGB"),
        ("PNG", "RGBA", "png", "RGB"),
        ("PNG", "P", "png", "RGB"),
        ("PNG", "I;16", "png", "L"),
        ("PNG", "1", "png", "L"),
        ("GIF", "P", "png", "RGB"),
        ("BMP", "RGB", "png", "RGB"),
        ("TIFF", "CMYK", "png", "RGB"),
    ],
)
def test_a_large_image_of_any_format_has_the_decoded_pixels_resized(kind: str, mode: str, to: str, stored: str) -> None:
    original = encoded(picture(96, 60, mode), kind)
    resized = Resizing(48, quality=100).apply(original)
    assert resized is not None
    payload, extension = resized
    assert (extension, opened(payload).mode, opened(payload).size) == (to, stored, (30, 48))
    # The mean of each two by two pixels that the loader decodes: another filter, on a smooth picture.
    wanted = decode_image(original).reshape(48, 2, 30, 2, 3).mean(axis=(1, 3))
    difference = np.abs(decode_image(payload).astype(float) - wanted)[2:-2, 2:-2]
    dithered = mode in ("P", "1")  # Pillow's palette and its black and white are made of dots
    assert difference.mean() < (40 if dithered else 2.5)


def test_the_longer_side_decides_and_none_vanishes() -> None:
    sizes = {(100, 50): (40, 20), (50, 100): (20, 40), (40, 40): (40, 40), (41, 40): (40, 39), (9000, 3): (40, 1)}
    assert {size: Resizing(40).size(*size) for size in sizes} == sizes


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_that_is_small_enough_is_copied_unless_it_is_rotated(kind: str) -> None:
    assert Resizing(40).apply(encoded(picture(40, 30), kind)) is None
    assert Resizing(40).apply(encoded(picture(40, 30), kind, exif=oriented(1))) is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("max_side", [40, 20])
def test_rotations_are_applied_and_exif_data_removed(kind: str, max_side: int) -> None:
    original = encoded(picture(40, 30), kind, exif=oriented(6))
    resized = Resizing(max_side, quality=100).apply(original)
    assert resized is not None
    assert not opened(resized[0]).getexif()
    upright = decode_image(original, exif=True)
    assert upright.shape == (30, 40, 3)
    wanted = np.asarray(Image.fromarray(upright).resize((max_side, max_side * 3 // 4), Image.Resampling.BOX))
    assert np.abs(decode_image(resized[0]).astype(float) - wanted).mean() < 3


def test_the_colour_profile_is_kept_where_it_describes_the_pixels() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for mode, kept in (("RGB", profile), ("L", None)):
        resized = Resizing(20).apply(encoded(picture(40, 40, mode), "JPEG", icc_profile=profile))
        assert resized is not None
        assert opened(resized[0]).info.get("icc_profile") == kept


@pytest.mark.parametrize("payload", [b"", b"no image", encoded(picture(90, 90), "JPEG")[:700]])
def test_what_cannot_be_decoded_is_a_bad_file(payload: bytes) -> None:
    with pytest.raises(SampleError, match="not a readable image"):
        Resizing(40).apply(payload)


def test_pixels_without_a_fixed_range_are_refused() -> None:
    with refused(SampleError, "mode 'F'", remedy="range"):
        Resizing(40).apply(encoded(picture(90, 90).convert("F"), "TIFF"))


# -- the command


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes: large and small JPEGs, a large WebP and a small, rotated JPEG; 14 files, 9 to resize or rotate."""
    folder = tmp_path / "src"
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for n in range(6):
            side = 90 + n if n < 3 else 40 - n
            (folder / label / f"{n}.jpg").write_bytes(encoded(picture(side, side - 9), "JPEG"))
    (folder / "a" / "large.webp").write_bytes(encoded(picture(70, 90), "WEBP"))
    (folder / "b" / "rotated.jpg").write_bytes(encoded(picture(40, 30), "JPEG", exif=oriented(8)))
    (folder / "b" / "rotated_large.jpg").write_bytes(encoded(picture(80, 60), "JPEG", exif=oriented(3)))
    return folder


def pack(*arguments: object) -> int:
    return main(["imagefolder", *map(str, arguments)])


def members(folder: Path) -> dict[str, bytes]:
    """The image members of all shards, by name."""
    found = {}
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                assert stream is not None
                found[member.name] = stream.read()
    return {name: payload for name, payload in found.items() if not name.endswith(".cls")}


def test_shards_have_large_images_resized_and_all_others_unchanged(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = {path: path.read_bytes() for path in photos.rglob("*.*")}
    assert pack(photos, tmp_path / "dst", "--max-side", 45, "--shards", 3) == 0
    packed = members(tmp_path / "dst")
    assert len(packed) == len(originals) == 15
    assert {"a/large.jpg", "b/rotated.jpg"} <= set(packed)
    sizes = {name: opened(payload).size for name, payload in packed.items()}
    assert max(max(size) for size in sizes.values()) == 45
    assert (sizes["a/0.jpg"], sizes["a/large.jpg"], sizes["b/rotated.jpg"]) == ((40, 45), (45, 35), (40, 30))
    unchanged = {name for name, payload in packed.items() if payload in originals.values()}
    assert unchanged == {f"{label}/{n}.jpg" for label in "ab" for n in (3, 4, 5)}
    before, after = (sum(map(len, payloads.values())) / 1e6 for payloads in (originals, packed))
    printed = capsys.readouterr().out
    assert f"resized images: 9 of 15, {before:,.1f} MB -> {after:,.1f} MB" in printed
    preset = yaml.safe_load((tmp_path / "dst" / "conf" / "data" / "packed.yaml").read_text())
    assert list(preset["fields"]) == ["jpg", "cls"]
    assert preset["image_size"] == int(np.median([min(size) for size in sizes.values()])) // 8 * 8
    assert {path: path.read_bytes() for path in photos.rglob("*.*")} == originals


@pytest.mark.slow
def test_several_processes_and_an_interrupted_command_give_the_same_shards_and_counts(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-side", 45, "--quality", 80, "--shards", 3)
    assert pack(photos, tmp_path / "one", *options, "--processes", 1) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resized images: 9 of 15")]
    publish = StagedDataset.publish
    monkeypatch.setattr(StagedDataset, "publish", lambda self, extra_files: (_ for _ in ()).throw(KeyboardInterrupt))
    assert pack(photos, tmp_path / "two", *options, "--processes", 2) == 130
    monkeypatch.setattr(StagedDataset, "publish", publish)
    assert pack(photos, tmp_path / "two", "--max-side", 45, "--shards", 3) == 1
    assert_refused(capsys.readouterr().err, "resizing", "'quality': 80", "Repeat that command")
    assert pack(photos, tmp_path / "two", *options) == 0
    assert told == [line for line in capsys.readouterr().out.splitlines() if line in told]
    tars = sorted(path.name for path in (tmp_path / "one").glob("*.tar"))
    assert [(tmp_path / "one" / name).read_bytes() for name in tars] == [
        (tmp_path / "two" / name).read_bytes() for name in tars
    ]
    assert not (tmp_path / "two" / ".packing").exists()


@pytest.mark.parametrize(
    ("options", "key", "got", "remedy"),
    [
        (["--max-side", 0], "--max-side", "0", "at least 1"),
        (["--max-side", 40, "--quality", 101], "--quality", "101", "1 to 100"),
        (["--quality", 80], "--quality", "80", "--max-side"),
        (["--max-side", 40, "--shard-mb", 1], "--shard-mb", "1.0", "--samples-per-shard"),
    ],
)
def test_impossible_options_are_refused(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    key: str,
    got: str,
    remedy: str,
) -> None:
    assert pack(photos, tmp_path / "dst", *options) == 1
    assert_refused(capsys.readouterr().err, key, got, remedy)
    assert not (tmp_path / "dst").exists()


def test_a_damaged_image_is_skipped_on_request_and_not_counted(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = photos / "a" / "broken.jpg"
    broken.write_bytes(encoded(picture(90, 90), "JPEG")[:700])
    assert pack(photos, tmp_path / "dst", "--max-side", 45) == 1
    assert str(broken) in capsys.readouterr().err
    assert pack(photos, tmp_path / "dst", "--max-side", 45, "--bad", "skip") == 0
    out, error = capsys.readouterr()
    assert f"skipped {broken}" in error
    assert "resized images: 9 of 15" in out
    assert json.loads((tmp_path / "dst" / "classes.json").read_text()) == ["a", "b"]
