"""Decoders. Oracles: numpy, json, Pillow, float arithmetic. What is damaged is a ``SampleError``."""

import contextlib
import functools
import io
import json
import re
import zipfile
import zlib

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from PIL import Image, ImageOps

from dtrain.data.fields.crop import Crop, resize, whole
from dtrain.data.fields.decode import MAX_ARRAY_BYTES, MAX_PIXELS, check_image, decode, decode_image, tokens_of
from dtrain.data.fields.field import RAW_DTYPES, DataError, Field, SampleError
from dtrain.data.fields.parse import parse_fields
from tests.property_tests import examples
from tests.refusals import refused


def field(ext, **options):
    return parse_fields({ext: {"name": "x", **options}})[0]


def npy(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("ext", "payload", "got", "wanted"),
    [
        *(("cls", text.encode(), repr(text), "integer") for text in ("", "cat", "1.5", "1e3")),
        ("cls", b"\xff", "xff", "integer"),
        ("cls", b"9223372036854775808", "9223372036854775808", "64 bits"),
        ("txt", "café".encode("latin-1"), "byte 3", "UTF-8"),  # and not a guess
        *(("json", payload, "", "JSON") for payload in (b"", b"{", b"\xff\xfe\x00", b"[" * 200_000)),
        *(
            ("npy", npy(array), array.dtype, "store numbers")
            for array in (np.array(["text"]), np.zeros(2, "i4,f4"), np.zeros(2, "M8[s]"), np.zeros(1, "g"))
        ),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_not_of_its_format_is_a_bad_sample(ext, payload, got, wanted):
    with refused(SampleError, "field 'x'", got, wanted):
        decode(field(ext), payload)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_int64_label_survives(value):
    decoded = decode(field("cls"), str(value).encode())
    assert type(decoded) is int
    assert decoded == value


@given(st.text())
def test_text_is_utf8(text):
    assert decode(field("txt"), memoryview(text.encode())) == text


def test_json_is_what_it_says():
    value = {"a": [1, 2.5, None, "é"], "b": True}
    assert decode(field("json"), json.dumps(value).encode()) == value


ANNOTATION = {
    "label": 7,
    "meta": {"boxes": [[1, 2.5], [3, 4]], "yes": True},
    "text": "a b",
    "odd": [[1], [2, 3]],
    "no": None,
}


@pytest.mark.parametrize(
    ("key", "role", "want"),
    [
        ("label", "label", 7),
        ("meta.yes", "label", 1),
        ("label", "target", np.float32(7)),
        ("meta.boxes", "coord", np.array([[1, 2.5], [3, 4]], np.float32)),
        ("meta.boxes.1", "id", np.array([3, 4])),
        ("meta.boxes.0.1", "feature", np.float32(2.5)),
        ("text", "text", "a b"),
    ],
)
def test_a_key_finds_a_value_inside_json_whose_type_follows_from_the_role(key, role, want):
    got = decode(field("json", key=key, role=role), json.dumps(ANNOTATION).encode())
    np.testing.assert_array_equal(got, want, strict=isinstance(want, np.ndarray))
    assert np.asarray(got).dtype == np.asarray(want).dtype


@pytest.mark.parametrize(
    ("key", "role", "told"),
    [
        ("lable", "label", "an object with 'label', 'meta'"),
        ("meta.boxes.2", "coord", "'meta.boxes' is a list"),
        ("label.x", "label", "'label' is int"),
        ("meta", "label", "an object with 'boxes'"),
        ("text", "label", "'\"a b\"'"),
        ("meta.boxes", "label", "integers"),
        ("odd", "target", "a list '[[1], [2, 3]]'"),
        ("no", "target", "null"),
        ("label", "text", "want text"),
        (None, "label", "in the JSON"),
    ],
)
def test_a_value_that_is_missing_or_of_another_type_is_a_bad_sample(key, role, told):
    with pytest.raises(SampleError, match=f"field 'x': .*{re.escape(told)}"):
        decode(field("json", key=key, role=role), json.dumps(ANNOTATION).encode())


@pytest.mark.parametrize(("role", "number"), [("target", "1e39"), ("label", str(2**63)), ("label", "1.0")])
def test_a_json_number_outside_its_type_is_a_bad_sample(role, number):
    with pytest.raises(SampleError, match="field 'x'"):
        decode(field("json", role=role), number.encode())


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": "bytes", "length": 8}])
def test_json_text_with_half_a_character_is_a_bad_sample(tokenizer):
    with pytest.raises(SampleError, match=r"field 'x': .*surrogate"):
        decode(field("json", key="a", role="text", **tokenizer), rb'{"a": "\ud83d cut"}')
    with pytest.raises(SampleError, match=r"field 'x': .*surrogate"):
        tokens_of(field("json", key="a", role="text", tokenizer="bytes", length=8), "\ud83d cut")


@given(st.text(max_size=12))
def test_text_becomes_tokens_with_an_end_and_padding(text):
    row = decode(field("txt", tokenizer="bytes", length=8), text.encode())
    tokens = list(text.encode())[:7]
    assert row.dtype == np.int64
    assert row.tolist() == [*tokens, 256, *[-1] * (7 - len(tokens))]


def test_bytes_are_a_copy_of_the_member():
    source = bytearray(b"abc")
    decoded = decode(field("bin"), memoryview(source))
    source[0] = 0
    assert decoded == b"abc"


dtypes = st.sampled_from([*"?bBhHiIqQefdFD", ">f4", ">i8", "<u2"]).map(np.dtype)


@given(st.data())
@examples(100)
def test_arrays_come_back_in_their_own_type_and_writable(data):
    array = data.draw(
        np_st.arrays(data.draw(dtypes), np_st.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=5))
    )
    if data.draw(st.booleans()):
        array = np.asfortranarray(array)
    decoded = decode(field("npy"), data.draw(st.sampled_from([bytes, memoryview]))(npy(array)))
    assert decoded.dtype == array.dtype.newbyteorder("=")
    assert decoded.shape == array.shape
    np.testing.assert_array_equal(decoded, array)
    assert decoded.flags.writeable
    assert decoded.flags.c_contiguous


def test_an_npz_is_its_one_array():
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    decoded = decode(field("npy;npz"), npz(x=array))
    assert decoded.dtype == np.float16
    np.testing.assert_array_equal(decoded, array)


def test_an_npz_of_several_arrays_says_what_to_do():
    with refused(SampleError, "2 arrays", "", "own npy member"):
        decode(field("npz"), npz(x=np.ones(1), y=np.ones(1)))


def test_a_pickled_array_is_a_bad_sample_and_never_runs():
    ran = []

    class Evil:
        def __reduce__(self):
            return (ran.append, (1,))

    payload = npy(np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(SampleError, match="dtype object"):
        decode(field("npy"), payload)
    with pytest.raises(SampleError, match="dtype object"):
        decode(field("npz"), _zip("x.npy", payload))
    assert not ran


def test_a_header_that_promises_more_than_there_is_allocates_nothing():
    head = npy(np.zeros(1)).replace(b"(1,), }", b"(9999999999999,), }")
    with pytest.raises(SampleError):
        decode(field("npy"), head)
    payload = npy(np.zeros(1000))
    with pytest.raises(SampleError, match="8000 bytes"):
        decode(field("npy"), payload[:-1])


def test_a_zip_bomb_is_not_unpacked():
    payload = bytearray(_zip("x.npy", npy(np.zeros(10))))
    entry = payload.rindex(b"PK\1\2")
    payload[entry + 24 : entry + 28] = (MAX_ARRAY_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(SampleError, match="limit"):
        decode(field("npz"), bytes(payload))


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"PK\x03\x04", b"PK"])
)
@examples(200)
def test_garbage_is_a_bad_sample_for_every_kind(garbage, start):
    for ext in ("npy", "jpg", "json", "cls", "txt"):
        with contextlib.suppress(SampleError):
            decode(field(ext), start + garbage)


@given(st.data())
@examples(100)
def test_a_damaged_array_is_a_bad_sample_or_an_array(data):
    payload = bytearray(
        data.draw(st.sampled_from([npy(np.arange(5)), npz(x=np.arange(5.0)), npy(np.ones((2, 3), "f4"))]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SampleError):
        assert isinstance(decode(field("npy"), bytes(payload)), np.ndarray)


@given(st.data())
def test_raw_numbers_are_little_endian_and_keep_their_type(data):
    dtype = data.draw(st.sampled_from(RAW_DTYPES))
    numbers = data.draw(np_st.arrays(dtype, st.integers(1, 9)))
    length = data.draw(st.sampled_from([None, len(numbers)]))
    stored = numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
    decoded = decode(field("tok", dtype=dtype, length=length), memoryview(b"?" + stored)[1:])
    assert decoded.dtype == dtype
    assert decoded.dtype.isnative
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, numbers)


@pytest.mark.parametrize(("payload", "length"), [(b"\0" * 7, None), (b"\0" * 6, 4), (b"\0" * 10, 4), (b"", 4)])
def test_a_row_of_tokens_that_is_cut_short_or_too_long_is_a_bad_sample(payload, length):
    with refused(SampleError, f"{len(payload)} bytes", "uint16"):
        decode(field("tok", dtype="uint16", length=length), payload)


def test_a_crop_takes_the_place_of_a_fields_own_size():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    window = lambda height, width: Crop(1, 2, 2, 3, (2, 3))  # noqa: E731
    png, array = field("png", size=9), field("npy", role="image", size=9)
    raw = field("raw", role="image", size=9, decoder=lambda payload: pixels)
    for one, payload in ((png, stream.getvalue()), (array, npy(pixels)), (raw, b"")):
        assert decode(one, payload).shape == (9, 9, 3)
        np.testing.assert_array_equal(decode(one, payload, crop=window), pixels[1:3, 2:5])


def test_images_decode_into_the_buffer_they_fit():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    out = np.zeros((4, 6, 3), np.uint8)
    assert decode(field("png"), stream.getvalue(), out) is out
    np.testing.assert_array_equal(out, pixels)
    assert decode(field("png", size=[2, 3]), stream.getvalue(), out).shape == (2, 3, 3)


def test_arrays_can_be_images():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    np.testing.assert_array_equal(decode(field("npy", role="image"), npy(pixels)), pixels)
    assert decode(field("npy", role="image", size=2), npy(pixels)).shape == (2, 2, 3)
    with refused(SampleError, "float32 [4, 6, 3]"):
        decode(field("npy", role="image"), npy(pixels.astype(np.float32)))


def test_a_users_decoder_gets_the_bytes_and_its_complaints_are_bad_samples():
    assert decode(field("pkl", decoder=len), memoryview(b"abc")) == 3
    for error in (ValueError("why"), OSError("why"), EOFError("why"), MemoryError("why")):
        with pytest.raises(SampleError, match="why"):
            decode(field("flac", decoder=_raising(error)), b"")
    for error in (TypeError("why"), NameError("why"), ImportError("why")):
        with pytest.raises(type(error), match="why"):
            decode(field("flac", decoder=_raising(error)), b"")


def test_a_users_decoder_of_images_must_return_pixels():
    decoder = lambda payload: np.zeros((4, 4, 3), np.uint8)  # noqa: E731
    assert decode(field("raw", role="image", decoder=decoder, size=2), b"").shape == (2, 2, 3)
    with refused(DataError, "float64 [4, 4]"):
        decode(field("raw", role="image", decoder=lambda payload: np.zeros((4, 4))), b"")


def test_a_member_can_be_read_as_plain_bytes_whatever_it_is():
    assert decode(field("jpg", role="bytes"), b"\xff\xd8 no image") == b"\xff\xd8 no image"
    assert decode(Field("vtt", "subtitles", role="text"), "ä".encode()) == "ä"


def _zip(name, payload):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, payload)
    return stream.getvalue()


def _raising(error):
    def decoder(payload):
        raise error

    return decoder


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


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 197 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 197 bytes")],
    ids=lambda error: type(error).__name__,
)
def test_an_allocation_that_fails_is_a_bad_sample(error, monkeypatch):
    def fail(self, pixels):
        raise error

    monkeypatch.setattr(Crop, "cut", fail)
    with refused(SampleError, "field 'x'", "memory", "197"):
        decode(field("jpg", role="image", size=4), file(pixels(), "JPEG"))


def test_other_errors_of_torch_are_no_bad_samples(monkeypatch):
    def fail(self, pixels):
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(Crop, "cut", fail)
    with pytest.raises(RuntimeError, match="mistake"):
        decode(field("jpg", role="image", size=4), file(pixels(), "JPEG"))


def test_libtiff_does_not_write_to_stderr(capfd):
    payload = file(pixels(), "TIFF", compression="tiff_lzw")
    for byte in range(8, len(payload), 13):
        with contextlib.suppress(SampleError):
            decode_image(payload[:byte] + bytes([payload[byte] ^ 0x7F]) + payload[byte + 1 :])
    assert capfd.readouterr().err == ""


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
    for function in (decode_image, check_image):
        with pytest.raises(SampleError, match=r"limit|exceeds"):
            function(payload)


@given(st.data())
@examples(150)
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
    with refused(SampleError, "not a readable image", "6 bytes, starting b'<html>'"):
        decode_image(b"<html>")


def with_orientation(format, orientation):
    """A file of 4 x 6 pixels, and its pixels after the rotation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8))
    stream = io.BytesIO()
    image.save(stream, format, exif=exif, **({"quality": 95} if format == "JPEG" else {}))
    return stream.getvalue(), np.asarray(
        ImageOps.exif_transpose(Image.open(io.BytesIO(stream.getvalue()))).convert("RGB")
    )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF"])
def test_the_size_of_an_image_is_that_after_its_rotation(format, orientation):
    payload, upright = with_orientation(format, orientation)
    assert check_image(payload, exif=True) == upright.shape[:2]
    assert check_image(payload) == (upright.shape[:2] if format == "TIFF" else (4, 6))
    if format != "JPEG":  # whose decoders differ by some grey levels
        np.testing.assert_array_equal(decode_image(payload, exif=True), upright)
