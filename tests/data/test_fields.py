"""Fields: what follows from an extension, which options go together, what is refused and how."""

import pickle

import numpy as np
import pytest

from dtrain.data.field_options import parse_fields
from dtrain.data.fields import Field
from dtrain.precision.policy import ROLES


def one(ext, **options):
    return parse_fields({ext: {"name": "x", **options}})[0]


@pytest.mark.parametrize(
    ("ext", "role", "kind"),
    [
        ("jpg", "image", "image"),
        ("left.png", "image", "image"),
        ("cls", "label", "integer"),
        ("fine.cls", "label", "integer"),
        ("index", None, "integer"),
        ("txt", "text", "text"),
        ("json", None, "json"),
        ("npy", None, "array"),
        ("bin", "bytes", "bytes"),
    ],
)
def test_an_extension_implies_a_role_or_leaves_it_undeclared(ext, role, kind):
    field = one(ext)
    assert (field.role, field.kind) == (role, kind)


@pytest.mark.parametrize(
    ("ext", "dtype", "role"),
    [("tok", "uint16", "id"), ("bin", "uint32", "id"), ("npy", "int64", "id"), ("f", "float16", None)],
)
def test_a_dtype_makes_raw_numbers_of_any_extension_whole_ones_are_ids(ext, dtype, role):
    field = one(ext, dtype=dtype, length=8)
    assert (field.kind, field.role, field.length) == ("raw", role, 8)
    assert one(ext, dtype=dtype, role="target").role == "target"


def test_a_size_is_a_crop_of_the_whole_image_or_of_its_middle():
    assert one("jpg").crop is None
    assert one("jpg", size=[4, 6]).crop(80, 60) == (0, 0, 80, 60, (4, 6), None, "bilinear")
    assert one("jpg", size=4, shorter_side=6).crop(80, 60) == (0, 0, 80, 60, (8, 6), (4, 4), "bilinear")


@pytest.mark.parametrize("role", ROLES)
def test_every_role_of_the_policy_is_known(role):
    assert one("npy" if role not in ("image",) else "jpg", role=role).role == role


def test_any_member_can_be_handed_over_as_bytes_or_text():
    assert one("jpg", role="bytes").kind == "bytes"
    assert one("caption", role="text").kind == "text"
    assert one("flac", role="bytes").kind == "bytes"


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"jpg": {"name": "x", "role": "imgae"}}, "did you mean 'image'"),
        ({"jpg": {"name": ""}}, "has no name"),
        ({"jpgg": {"name": "x"}}, "did you mean 'jpg'"),
        ({".jpg": {"name": "x"}}, "without the leading dot"),
        ({"JPG": {"name": "x"}}, "lower case"),
        ({"jpg;;png": {"name": "x"}}, "semicolon"),
        ({"jpg;cls": {"name": "x"}}, "mixes image and integer"),
        ({"jpg": {"name": "x", "size": 0}}, "at least 1 pixel"),
        ({"jpg": {"name": "x", "mean": [123.7, 116.3, 103.5]}}, "divide by 255"),
        ({"jpg": {"name": "x", "std": [0, 1, 1]}}, "divide by 255"),
        ({"npy": {"name": "x", "size": 4}}, "size is for the role image"),
        ({"cls": {"name": "x", "exif": True}}, "exif is for the role image"),
        ({"jpg": {"name": "x", "shorter_side": 256}}, "shorter_side 256 with size None"),
        ({"jpg": {"name": "x", "shorter_side": 223, "size": 224}}, "cut from the middle"),
        ({"jpg": {"name": "x", "decode": "half"}}, "full, reduced"),
        ({"cls": {"name": "x", "decode": "reduced"}}, "decode is for the role image"),
        ({"tok": {"name": "x"}}, "dtype: uint16 or the like"),
        ({"tok": {"name": "x", "dtype": "int17"}}, "did you mean 'int16'"),
        ({"tok": {"name": "x", "dtype": "object"}}, "dtype 'object' is unknown"),
        ({"tok": {"name": "x", "length": 4}}, "Add dtype"),
        ({"tok": {"name": "x", "dtype": "uint16", "length": 0}}, "at least 1 number"),
        ({"tok": {"name": "x", "dtype": "uint16", "role": "text"}}, "role 'text'"),
        ({"tok": {"name": "x", "dtype": "uint16", "decoder": "json.loads"}}, "decoder of its own"),
        ({"png": {"name": "x", "role": "target"}}, "decoder"),
        ({"txt": {"name": "x", "role": "image"}}, "holds text"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_to_do(mapping, says):
    with pytest.raises(ValueError, match=says):
        parse_fields(mapping)


@pytest.mark.parametrize("ext", ["pyd", "pth", "pkl", "pickle", "pt", "meta.pkl"])
@pytest.mark.parametrize("role", [None, "bytes"])
def test_a_pickle_is_refused_unless_the_user_decodes_it(ext, role):
    with pytest.raises(ValueError, match="pickle"):
        one(ext, **({"role": role} if role else {}))
    assert one(ext, decoder=len).kind == "custom"


def test_what_a_decoder_returns_has_no_implied_role():
    assert one("cls", decoder=len).role is None
    assert one("jpg", decoder=len).role is None
    with pytest.raises(ValueError, match="declare role: image"):
        one("jpg", decoder=len, size=4)


def test_fields_travel_to_workers():
    field = one("jpg", role="image", size=3, shorter_side=4, decode="reduced", decoder="json.loads")
    assert pickle.loads(pickle.dumps(field)) == field


def test_a_field_made_in_code_is_checked_too():
    with pytest.raises(ValueError, match="role 'pixels' is unknown"):
        Field("jpg", "image", role="pixels")
    assert np.array_equal(Field("jpg", "image").mean, [0.5] * 3)
