"""Pixels of image files. Pillow is the oracle for what a file shows, float arithmetic for how 16 bits become 8."""

import functools
import io
import zlib

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dtrain.data.crop import Crop, resize, whole
from dtrain.data.fields import SampleError
from dtrain.data.image import MAX_PIXELS, check_image, decode_image

HEIGHT, WIDTH = 24, 17


def pixels(height=HEIGHT, width=WIDTH, seed=0):
    # Smooth enough that lossy formats stay near, with different channels and no symmetry.
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(seed).integers(0, 8, (height, width, 3))
    return (np.stack([y * 7, x * 9, (x + y) * 4], axis=-1) % 240 + noise).astype(np.uint8)


def photograph(height, width):
    """Edges, ramps and texture at every scale, as real ones have, without a file."""
    rng = np.random.default_rng(0)
    image = np.zeros((height, width, 3))
    for cells in (3, 6, 12, 24, 48, 96):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        image += np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR)) / cells**0.7
    return ((image - image.min()) / np.ptp(image) * 255).astype(np.uint8)


def file(image, fmt, **options):
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, fmt, **options)
    return stream.getvalue()


def to(*size):
    return functools.partial(whole, size=size)


def pillow(payload):
    return np.array(Image.open(io.BytesIO(payload)).convert("RGB"))


JPEG = file(pixels(), "JPEG", quality=90)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(JPEG, id="jpeg"),
        pytest.param(file(pixels(), "JPEG", progressive=True), id="progressive"),
        pytest.param(file(pixels(), "JPEG", quality=75, subsampling="4:4:4"), id="jpeg 4:4:4"),
        pytest.param(file(Image.fromarray(pixels()).convert("L"), "JPEG"), id="grey jpeg"),
        pytest.param(file(pixels(), "PNG"), id="png"),
        pytest.param(file(Image.fromarray(pixels()).convert("L"), "PNG"), id="grey png"),
        pytest.param(file(Image.fromarray(pixels()).convert("1"), "PNG"), id="bilevel png"),
        pytest.param(file(Image.fromarray(pixels()).convert("P"), "PNG"), id="palette png"),
        pytest.param(file(Image.fromarray(pixels()).convert("P"), "PNG", transparency=3), id="transparent palette"),
        pytest.param(file(Image.fromarray(pixels()).convert("LA"), "PNG"), id="grey alpha"),
        pytest.param(file(pixels(), "WEBP", quality=80), id="webp"),
        pytest.param(file(pixels(), "BMP"), id="bmp"),
        pytest.param(file(pixels(), "PPM"), id="ppm"),
        pytest.param(file(Image.fromarray(pixels()).convert("P"), "GIF"), id="gif"),
        pytest.param(file(pixels(), "TIFF"), id="tiff"),
        pytest.param(file(Image.fromarray(pixels()).convert("CMYK"), "TIFF"), id="cmyk tiff"),
    ],
)
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_every_format_gives_the_pixels_that_pillow_sees(payload, kind):
    decoded = decode_image(kind(payload))
    assert decoded.dtype == np.uint8
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, pillow(payload))
    out = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    assert decode_image(kind(payload), out=out) is out
    np.testing.assert_array_equal(out, decoded)


@pytest.mark.parametrize("adobe", [True, False], ids=["inverted, as Adobe writes it", "not inverted"])
def test_cmyk_jpegs_have_the_colours_that_pillow_sees(adobe):
    payload = file(Image.fromarray(pixels()).convert("CMYK"), "JPEG", quality=95)
    if not adobe:
        start = payload.index(b"\xff\xee")
        payload = payload[:start] + payload[start + 2 + int.from_bytes(payload[start + 2 : start + 4], "big") :]
    difference = np.abs(decode_image(payload).astype(int) - pillow(payload))
    assert difference.max() <= 1


def test_the_first_bytes_tell_the_format_and_not_the_name():
    # The member may be called .jpg: the name never gets here.
    np.testing.assert_array_equal(decode_image(file(pixels(), "PNG")), pixels())


def test_alpha_is_dropped_and_not_composited():
    rgba = np.dstack([pixels(), np.zeros((HEIGHT, WIDTH), np.uint8)])
    np.testing.assert_array_equal(decode_image(file(rgba, "PNG")), pixels())


@pytest.mark.parametrize("fmt", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(fmt):
    values = np.random.default_rng(0).integers(0, 65_536, (HEIGHT, WIDTH), dtype=np.uint16)
    decoded = decode_image(file(values, fmt))
    assert (decoded[..., 0] == decoded[..., 1]).all()
    assert (decoded[..., 0] == decoded[..., 2]).all()
    assert np.abs(decoded[..., 0] - values / 65_535 * 255).max() <= 1


def test_sixteen_bit_colour_is_scaled_too():
    values = np.random.default_rng(0).integers(0, 65_536, (4, 5, 3), dtype=np.uint16)
    decoded = decode_image(_png16(values))
    assert np.abs(decoded - values / 65_535 * 255).max() <= 1


def test_floating_point_images_have_no_scale_and_are_refused():
    with pytest.raises(SampleError, match="no fixed range"):
        decode_image(file(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_is_applied_when_asked_for(fmt, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    payload = file(pixels(), fmt, exif=exif.tobytes())
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(payload))).convert("RGB"))
    np.testing.assert_array_equal(decode_image(payload, exif=True), upright)
    np.testing.assert_array_equal(decode_image(payload), pillow(payload))
    out = np.zeros_like(upright)
    assert decode_image(payload, None, out, True) is out
    np.testing.assert_array_equal(out, upright)
    # The size is that of the upright image.
    assert decode_image(payload, to(10, 20), exif=True).shape == (10, 20, 3)


@pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
def test_size_resizes_whatever_the_format(fmt):
    payload = file(pixels(), fmt)
    expected = resize(pillow(payload), (11, 13))
    np.testing.assert_array_equal(decode_image(payload, to(11, 13)), expected)
    out = np.zeros((11, 13, 3), np.uint8)
    assert decode_image(payload, to(11, 13), out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_crop_is_asked_for_once_with_the_size_of_the_upright_image(fmt, reduced):
    asked = []

    def corner(height, width):
        asked.append((height, width))
        return Crop(2, 3, 8, 12, (4, 5), interpolation="bicubic")

    exif = Image.Exif()
    exif[0x0112] = 6
    payload = file(pixels(), fmt, exif=exif.tobytes())
    for turned in (False, True):
        seen = pillow(payload)
        upright = np.rot90(seen, -1) if turned else seen
        decoded = decode_image(payload, corner, exif=turned, reduced=reduced)
        np.testing.assert_array_equal(decoded, resize(upright[2:10, 3:15], (4, 5), "bicubic"))
        assert asked.pop() == upright.shape[:2]
        assert not asked


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}, {"grey": True}])
def test_a_large_jpeg_may_be_decoded_at_a_part_of_its_size_and_looks_the_same(options):
    options = dict(options)
    image = photograph(531, 702)
    if options.pop("grey", False):
        image = np.repeat(image[..., :1], 3, axis=2)
        payload = file(image[..., 0], "JPEG", quality=90)
    else:
        payload = file(image, "JPEG", quality=90, **options)
    for side, factor in ((130, 2), (66, 4), (31, 8)):
        shown = functools.partial(whole, size=(side, side + 5))
        assert shown(531, 702).reduction == factor
        difference = np.abs(decode_image(payload, shown, reduced=True).astype(int) - decode_image(payload, shown))
        assert 0 < difference.mean() < 1.5
        out = np.zeros((side, side + 5, 3), np.uint8)
        assert decode_image(payload, shown, out, reduced=True) is out
        np.testing.assert_array_equal(out, decode_image(payload, shown, reduced=True))


def test_a_window_of_a_reduced_jpeg_shows_the_same_part():
    image = photograph(531, 702)
    payload = file(image, "JPEG", quality=95)
    for top, left in ((0, 0), (13, 27), (131, 293)):
        window = Crop(top, left, 400, 409, (40, 41))
        assert window.reduction == 4
        shown = decode_image(payload, lambda height, width, window=window: window, reduced=True)
        expected = resize(image[top : top + 400, left : left + 409], (40, 41))
        assert np.abs(shown.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("size", [(40, 41), (350, 360)], ids=["reduced", "not reduced"])
def test_a_large_jpeg_that_is_cut_short_or_flawed_is_treated_as_at_full_size(size):
    payload = file(photograph(531, 702), "JPEG", quality=90)
    with pytest.raises(SampleError, match="not a readable image"):
        decode_image(payload[: len(payload) // 2], to(*size), reduced=True)
    at = payload.index(b"\xff\xdb")
    flawed = payload[:at] + b"\0\0\0" + payload[at:]
    np.testing.assert_array_equal(decode_image(flawed, to(*size), reduced=True), decode_image(payload, to(*size)))


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "GIF"])
def test_other_formats_are_never_reduced(fmt):
    payload = file(photograph(200, 300), fmt)
    np.testing.assert_array_equal(decode_image(payload, to(9, 9), reduced=True), decode_image(payload, to(9, 9)))


def test_pillow_says_nothing_of_images_that_are_good_enough(recwarn):
    damaged_exif = file(pixels(), "TIFF").replace(b"\x03\x01\x03\x00", b"\x03\x01\x03\x00", 1)
    palette = Image.fromarray(pixels()).convert("P")
    palette.info["transparency"] = bytes(range(256))
    decode_image(damaged_exif, exif=True)
    decode_image(file(palette, "PNG", transparency=bytes(range(256))), exif=True)
    assert not recwarn.list


@pytest.mark.parametrize("shape", [(HEIGHT, WIDTH + 1), (WIDTH, HEIGHT), (1, 1), (100, 100)])
@pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
def test_a_buffer_of_another_shape_is_not_returned(shape, fmt):
    payload = file(pixels(), fmt)
    out = np.zeros((*shape, 3), np.uint8)
    decoded = decode_image(payload, out=out)
    assert not np.shares_memory(decoded, out)
    np.testing.assert_array_equal(decoded, pillow(payload))


def test_a_buffer_may_be_strided():
    out = np.zeros((HEIGHT, 2 * WIDTH, 3), np.uint8)[:, :WIDTH]
    assert decode_image(JPEG, out=out) is out
    np.testing.assert_array_equal(out, pillow(JPEG))


def test_a_buffer_of_another_type_is_a_mistake_in_the_code():
    with pytest.raises(TypeError, match="float32"):
        decode_image(JPEG, out=np.zeros((HEIGHT, WIDTH, 3), np.float32))


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_file_cut_short_is_a_bad_sample(fmt, share):
    payload = file(pixels(), fmt)
    with pytest.raises(SampleError, match="not a readable image"):
        decode_image(payload[: int(len(payload) * share)])
    with pytest.raises(SampleError):
        decode_image(payload[: int(len(payload) * share)], out=np.zeros((HEIGHT, WIDTH, 3), np.uint8))


def test_stray_bytes_that_libjpeg_only_warns_of_are_accepted_as_by_pillow():
    at = JPEG.index(b"\xff\xdb")
    payload = JPEG[:at] + b"\0\0\0" + JPEG[at:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(payload)
    np.testing.assert_array_equal(decode_image(payload), pillow(payload))


@pytest.mark.parametrize(
    "payload", [b"", b"text", b"<html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xff\xd8\xff" + bytes(100)]
)
def test_what_is_no_image_is_a_bad_sample(payload):
    with pytest.raises(SampleError, match="not a readable image"):
        decode_image(payload)
    with pytest.raises(SampleError, match="not a readable image"):
        check_image(payload)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_460, 60_000], ids=["just above the limit", "far above"])
@pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
def test_a_decompression_bomb_is_refused_by_its_header(fmt, side):
    assert side * side > MAX_PIXELS
    payload = _claim(file(pixels(), fmt), fmt, side)
    for decode in (decode_image, check_image):
        with pytest.raises(SampleError, match=r"limit|exceeds"):
            decode(payload)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_an_image_or_a_bad_sample(data):
    payload = bytearray(data.draw(st.sampled_from(DAMAGEABLE)))
    for _ in range(data.draw(st.integers(1, 5))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_image(bytes(payload), exif=data.draw(st.booleans()))
    except SampleError:
        return
    assert decoded.dtype == np.uint8
    assert decoded.shape[2:] == (3,)


DAMAGEABLE = [JPEG, *(file(pixels(), fmt) for fmt in ("PNG", "WEBP", "BMP", "PPM")), file(pixels()[..., 0], "GIF")]


def _chunk(kind, content):
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def _png16(values):
    height, width, _ = values.shape
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _claim(payload, fmt, side):
    """The file with other numbers for height and width in its header."""
    if fmt == "PNG":
        head = side.to_bytes(4, "big") * 2 + payload[24:29]
        return payload[:8] + _chunk(b"IHDR", head) + payload[33:]
    at = payload.index(b"\xff\xc0") + 5
    return payload[:at] + side.to_bytes(2, "big") * 2 + payload[at + 4 :]


def test_the_reason_of_a_bad_image_is_the_same_every_time():
    with pytest.raises(SampleError, match=r"not a readable image \(6 bytes, starting b'<html>'\): of no known format$"):
        decode_image(b"<html>")
