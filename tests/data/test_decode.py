"""Bytes to values: numpy, json and Python's own readers say what is right; what is bad is a ``SampleError``."""

import contextlib
import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from PIL import Image

from dtrain.data.crop import Crop
from dtrain.data.decode import MAX_ARRAY_BYTES, SampleError, decode
from dtrain.data.field_options import parse_fields
from dtrain.data.fields import RAW_DTYPES, DataError, Field


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


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_int64_label_survives(value):
    decoded = decode(field("cls"), str(value).encode())
    assert type(decoded) is int
    assert decoded == value


@pytest.mark.parametrize("payload", [b"", b"cat", b"1.5", b"1e3", b"\xff", b"9223372036854775808"])
def test_a_label_that_is_no_int64_is_a_bad_sample(payload):
    with pytest.raises(SampleError, match=r"integer|64 bits"):
        decode(field("cls"), payload)


@given(st.text())
def test_text_is_utf8(text):
    assert decode(field("txt"), memoryview(text.encode())) == text


def test_other_text_is_a_bad_sample_and_not_a_guess():
    with pytest.raises(SampleError, match="not UTF-8"):
        decode(field("txt"), "café".encode("latin-1"))


def test_json_is_what_it_says():
    value = {"a": [1, 2.5, None, "é"], "b": True}
    assert decode(field("json"), json.dumps(value).encode()) == value


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\xfe\x00", b"[" * 200_000])
def test_damaged_json_is_a_bad_sample(payload):
    with pytest.raises(SampleError, match="not JSON"):
        decode(field("json"), payload)


def test_bytes_are_a_copy_of_the_member():
    source = bytearray(b"abc")
    decoded = decode(field("bin"), memoryview(source))
    source[0] = 0
    assert decoded == b"abc"


dtypes = st.sampled_from([*"?bBhHiIqQefdFD", ">f4", ">i8", "<u2"]).map(np.dtype)


@given(st.data())
@settings(max_examples=100)
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
    with pytest.raises(SampleError, match=r"2 arrays .*own npy member"):
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


@pytest.mark.parametrize("array", [np.array(["text"]), np.zeros(2, "i4,f4"), np.zeros(2, "M8[s]"), np.zeros(1, "g")])
def test_what_is_no_tensor_is_a_bad_sample(array):
    with pytest.raises(SampleError, match="store numbers"):
        decode(field("npy"), npy(array))


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
@settings(max_examples=200)
def test_garbage_is_a_bad_sample_for_every_kind(garbage, start):
    for ext in ("npy", "jpg", "json", "cls", "txt"):
        with contextlib.suppress(SampleError):
            decode(field(ext), start + garbage)


@given(st.data())
@settings(max_examples=100)
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
    with pytest.raises(SampleError, match=rf"{len(payload)} bytes are not .*numbers of uint16"):
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
    with pytest.raises(SampleError, match=r"float32 \[4, 6, 3\]"):
        decode(field("npy", role="image"), npy(pixels.astype(np.float32)))


def test_a_users_decoder_gets_the_bytes_and_its_complaints_are_bad_samples():
    assert decode(field("pkl", decoder=len), memoryview(b"abc")) == 3
    for error in (ValueError("why"), OSError("why"), EOFError("why")):
        with pytest.raises(SampleError, match="why"):
            decode(field("flac", decoder=_raising(error)), b"")
    for error in (TypeError("why"), NameError("why"), ImportError("why"), MemoryError("why")):
        with pytest.raises(type(error), match="why"):
            decode(field("flac", decoder=_raising(error)), b"")


def test_a_users_decoder_of_images_must_return_pixels():
    decoder = lambda payload: np.zeros((4, 4, 3), np.uint8)  # noqa: E731
    assert decode(field("raw", role="image", decoder=decoder, size=2), b"").shape == (2, 2, 3)
    with pytest.raises(DataError, match=r"float64 \[4, 4\]"):
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
