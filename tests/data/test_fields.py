"""The public ``fields`` mapping: what it may say, what follows from an extension, what is refused and how."""

import json
import pickle

import numpy as np
import pytest
from omegaconf import OmegaConf

from dtrain.data.fields import Field, parse_fields
from dtrain.precision.policy import ROLES


def one(ext, **options):
    return parse_fields({ext: {"name": "x", **options}})[0]


def test_the_public_example_becomes_two_fields():
    image, label = parse_fields(
        {"jpg": {"name": "image", "role": "image", "size": 224}, "cls": {"name": "label", "role": "label"}}
    )
    assert (image.ext, image.name, image.role, image.size, image.kind) == ("jpg", "image", "image", (224, 224), "image")
    assert (image.mean, image.std, image.exif, image.decoder) == ((0.5,) * 3, (0.5,) * 3, False, None)
    assert (label.ext, label.name, label.role, label.size, label.kind) == ("cls", "label", "label", None, "integer")


def test_a_hydra_config_is_taken_as_it_is():
    config = OmegaConf.create(
        {"jpg;png": {"name": "image", "size": [4, 6], "mean": [0.1, 0.2, 0.3], "std": [1, 0.5, 0.25], "exif": True}}
    )
    (field,) = parse_fields(config)
    assert (field.size, field.mean, field.std, field.exif) == ((4, 6), (0.1, 0.2, 0.3), (1.0, 0.5, 0.25), True)
    assert field.extensions == ("jpg", "png")


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
        ({}, "data.fields is empty"),
        ("jpg", "data.fields is 'jpg'. Name what to read"),
        ({"jpg": {"name": "x", "sise": 4}}, "did you mean 'size'"),
        ({"jpg": {"name": "x", "role": "imgae"}}, "did you mean 'image'"),
        ({"jpg": {"role": "image"}}, "has no name"),
        ({"jpg": {"name": ""}}, "has no name"),
        ({"jpg": {"name": 3}}, "want a word"),
        ({"jpg": "image"}, "want options such as"),
        ({"jpgg": {"name": "x"}}, "did you mean 'jpg'"),
        ({".jpg": {"name": "x"}}, "without the leading dot"),
        ({"JPG": {"name": "x"}}, "lower case"),
        ({"jpg;;png": {"name": "x"}}, "semicolon"),
        ({"jpg;cls": {"name": "x"}}, "mixes image and integer"),
        ({"jpg": {"name": "x"}, "png": {"name": "x"}}, "share the name 'x'"),
        ({"jpg": {"name": "x"}, "png;jpg": {"name": "y"}}, "share the extension 'jpg'"),
        ({"jpg": {"name": "x", "size": 0}}, "at least 1 pixel"),
        ({"jpg": {"name": "x", "size": [1, 2, 3]}}, "an int, or"),
        ({"jpg": {"name": "x", "size": 2.5}}, "an int, or"),
        ({"jpg": {"name": "x", "size": True}}, "an int, or"),
        ({"jpg": {"name": "x", "size": "224"}}, "an int, or"),
        ({"jpg": {"name": "x", "mean": 0.5}}, "three numbers"),
        ({"jpg": {"name": "x", "mean": [123.7, 116.3, 103.5]}}, "divide by 255"),
        ({"jpg": {"name": "x", "std": [0, 1, 1]}}, "divide by 255"),
        ({"jpg": {"name": "x", "std": [float("nan"), 1, 1]}}, "three numbers"),
        ({"jpg": {"name": "x", "exif": "yes"}}, "true or false"),
        ({"npy": {"name": "x", "size": 4}}, "size is for the role image"),
        ({"cls": {"name": "x", "exif": True}}, "exif is for the role image"),
        ({"jpg": {"name": "x", "shorter_side": 256}}, "shorter_side 256 with size None"),
        ({"jpg": {"name": "x", "shorter_side": 223, "size": 224}}, "cut from the middle"),
        ({"jpg": {"name": "x", "shorter_side": 256.0, "size": 224}}, "want an int"),
        ({"jpg": {"name": "x", "decode": "half"}}, "full, reduced"),
        ({"jpg": {"name": "x", "decode": True}}, "want a word"),
        ({"cls": {"name": "x", "decode": "reduced"}}, "decode is for the role image"),
        ({"tok": {"name": "x"}}, "dtype: uint16 or the like"),
        ({"tok": {"name": "x", "dtype": "int17"}}, "did you mean 'int16'"),
        ({"tok": {"name": "x", "dtype": "object"}}, "dtype 'object' is unknown"),
        ({"tok": {"name": "x", "length": 4}}, "Add dtype"),
        ({"tok": {"name": "x", "dtype": "uint16", "length": 0}}, "at least 1 number"),
        ({"tok": {"name": "x", "dtype": "uint16", "length": "9"}}, "want an int"),
        ({"tok": {"name": "x", "dtype": "uint16", "role": "text"}}, "role 'text'"),
        ({"tok": {"name": "x", "dtype": "uint16", "decoder": "json.loads"}}, "decoder of its own"),
        ({"png": {"name": "x", "role": "target"}}, "decoder"),
        ({"txt": {"name": "x", "role": "image"}}, "holds text"),
        ({"npy": {"name": "x", "decoder": "nowhere"}}, "dotted path"),
        ({"npy": {"name": "x", "decoder": "no.such.module"}}, "cannot be imported"),
        ({"npy": {"name": "x", "decoder": "json.no_such"}}, "cannot be imported"),
        ({"npy": {"name": "x", "decoder": 3}}, "want a function"),
        ({"npy": {"name": "x", "decoder": "decimal.Decimal"}}, "want a function"),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(mapping, says):
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


def test_a_decoder_is_a_callable_a_path_or_a_target():
    assert one("flac", decoder=json.loads).decoder is json.loads
    assert one("flac", decoder="json.loads").decoder is json.loads
    partial = {"_target_": "numpy.frombuffer", "_partial_": True, "dtype": "int16"}
    decoder = one("flac", decoder=partial).decoder
    assert decoder(b"\1\0\2\0").tolist() == [1, 2]


def test_fields_travel_to_workers():
    field = one("jpg", role="image", size=3, shorter_side=4, decode="reduced", decoder="json.loads")
    assert pickle.loads(pickle.dumps(field)) == field


def test_a_field_made_in_code_is_checked_too():
    with pytest.raises(ValueError, match="role 'pixels' is unknown"):
        Field("jpg", "image", role="pixels")
    assert np.array_equal(Field("jpg", "image").mean, [0.5] * 3)
