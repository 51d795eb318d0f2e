"""Fields: what follows from an extension, which options go together, what a config may say, what is refused."""

import json
import pickle

import numpy as np
import pytest
from omegaconf import OmegaConf

from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import Field
from dtrain.data.fields.parse import parse_fields
from dtrain.precision.policy import ROLES
from tests.refusals import refused


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
    options = {"video": {"num_frames": 4}, "boxes": {"length": 4}}.get(role, {})
    field = Field("jpg" if role == "image" else "npy", "x", role, **options)
    assert field.role == role


def test_any_member_can_be_handed_over_as_bytes_or_text():
    assert one("jpg", role="bytes").kind == "bytes"
    assert one("caption", role="text").kind == "text"
    assert one("flac", role="bytes").kind == "bytes"


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({"jpg": {"name": "x", "role": "imgae"}}, ["'x'", "'imgae'", "Did you mean 'image'"]),
        ({"jpg": {"name": ""}}, ["'jpg'", "name: image"]),
        ({"jpgg": {"name": "x"}}, ["'x'", ".jpgg", "Did you mean 'jpg'"]),
        ({".jpg": {"name": "x"}}, ["'x'", "'.jpg'", "without the leading dot"]),
        ({"JPG": {"name": "x"}}, ["'x'", "'JPG'", "lower case"]),
        ({"jpg;;png": {"name": "x"}}, ["'x'", "''", "semicolon"]),
        ({"jpg;cls": {"name": "x"}}, ["'jpg;cls'", "image and integer", "one decoder"]),
        ({"jpg": {"name": "x", "size": 0}}, ["'x'", "size [0, 0]", "at least 1 pixel"]),
        (
            {"jpg": {"name": "x", "mean": [123.7, 116.3, 103.5]}},
            ["'x'", "mean [123.7, 116.3, 103.5]", "[0, 1]", "by 255"],
        ),
        ({"jpg": {"name": "x", "std": [0, 1, 1]}}, ["'x'", "std [0.0, 1.0, 1.0]", "1e-06", "by 255"]),
        ({"npy": {"name": "x", "size": 4}}, ["'x'", "size", "None", "role: image"]),
        ({"cls": {"name": "x", "exif": True}}, ["'x'", "exif", "'label'", "role: image"]),
        ({"jpg": {"name": "x", "shorter_side": 256}}, ["'x'", "shorter_side 256", "size None"]),
        ({"jpg": {"name": "x", "shorter_side": 223, "size": 224}}, ["shorter_side 223", "size [224, 224]"]),
        ({"jpg": {"name": "x", "decode": "half"}}, ["'x'", "decode 'half'", "full, reduced"]),
        ({"cls": {"name": "x", "decode": "reduced"}}, ["'x'", "decode", "'label'", "role: image"]),
        ({"tok": {"name": "x"}}, ["'x'", ".tok", "decoder", "dtype: uint16", "role: bytes"]),
        ({"tok": {"name": "x", "dtype": "int17"}}, ["'x'", "'int17'", "Did you mean 'int16'"]),
        ({"tok": {"name": "x", "dtype": "object"}}, ["'x'", "'object'", "uint16"]),
        ({"npy": {"name": "x", "length": 4}}, ["'x'", "length 4", "Add dtype"]),
        ({"json": {"name": "x", "key": "a"}}, ["'x'", "'a'", "role None", "role: ", "label"]),
        ({"json": {"name": "x", "key": "a", "role": "image"}}, ["'x'", "'a'", "role 'image'", "label"]),
        ({"json": {"name": "x", "key": "a..b", "role": "label"}}, ["'x'", "'a..b'", "key: meta.label"]),
        ({"npy": {"name": "x", "key": "a", "role": "label"}}, ["'x'", "'a'", ".npy", "Remove one"]),
        ({"json": {"name": "x", "key": "a", "role": "label", "decoder": "json.loads"}}, ["'x'", "'a'", "decoder"]),
        ({"txt": {"name": "x", "tokenizer": "bytes"}}, ["'x'", "'bytes'", "length None", "length: 64"]),
        ({"txt": {"name": "x", "tokenizer": "bytes", "length": 1}}, ["'x'", "length 1", "at least 2"]),
        ({"txt": {"name": "x", "tokenizer": "bpe", "length": 8}}, ["'x'", "'bpe'", "bytes, tiktoken:NAME"]),
        ({"cls": {"name": "x", "tokenizer": "bytes", "length": 8}}, ["'x'", "'label'", "role: text"]),
        ({"tok": {"name": "x", "dtype": "uint16", "length": 0}}, ["'x'", "length 0", "at least 1"]),
        ({"tok": {"name": "x", "dtype": "uint16", "role": "text"}}, ["'x'", "uint16", "role 'text'"]),
        ({"tok": {"name": "x", "dtype": "uint16", "decoder": "json.loads"}}, ["'x'", "uint16", "decoder"]),
        ({"png": {"name": "x", "role": "target"}}, ["'x'", ".png", "'target'", "decoder", "role: bytes"]),
        ({"txt": {"name": "x", "role": "image"}}, ["'x'", ".txt", "text"]),
    ],
)
def test_options_that_exclude_each_other_are_refused_with_the_remedy(mapping, parts):
    with refused(ValueError, *parts):
        parse_fields(mapping)


def test_one_member_gives_several_fields():
    label, caption = parse_fields(
        OmegaConf.create(
            {"json": [{"name": "y", "role": "label", "key": "meta.y"}, {"name": "c", "role": "text", "key": "c"}]}
        )
    )
    assert (label.ext, label.kind, label.role, label.key) == ("json", "json", "label", "meta.y")
    assert (caption.ext, caption.kind, caption.role, caption.key) == ("json", "json", "text", "c")
    with refused(ValueError, "data.fields.json[1]", "'nam'", "Did you mean 'name'"):
        parse_fields({"json": [{"name": "y"}, {"nam": "c"}]})


def test_a_key_may_be_the_index_of_a_list():
    assert one("json", role="label", key=0).key == "0"


def test_the_mask_of_a_text_is_a_name_of_the_batch():
    tokens = {"name": "c", "role": "text", "tokenizer": "bytes", "length": 8}
    assert parse_fields({"txt": tokens})[0].columns == ("c", "c_mask")
    with refused(ValueError, "name", "'c_mask'", "Each needs its own"):
        parse_fields({"txt": tokens, "npy": {"name": "c_mask"}})


@pytest.mark.parametrize("ext", ["pyd", "pth", "pkl", "pickle", "pt", "meta.pkl"])
def test_a_pickle_is_refused_unless_the_user_decodes_it_or_takes_its_bytes(ext):
    for role in ({}, {"role": "feature"}, {"role": "text"}):
        with refused(ValueError, f".{ext}", "pickle", "role: bytes"):
            one(ext, **role)
    assert one(ext, decoder=len).kind == "custom"
    field = one(ext, role="bytes")
    assert decode(field, memoryview(b"\x80\x04.")) == b"\x80\x04."  # as they are: nothing is loaded


def test_what_a_decoder_returns_has_no_implied_role():
    assert one("cls", decoder=len).role is None
    assert one("jpg", decoder=len).role is None
    with refused(ValueError, key="role", remedy="declare role: image"):
        one("jpg", decoder=len, size=4)


def test_fields_travel_to_workers():
    field = one("jpg", role="image", size=3, shorter_side=4, decode="reduced", decoder="json.loads")
    assert pickle.loads(pickle.dumps(field)) == field


def test_a_field_made_in_code_is_checked_too():
    with refused(ValueError, "role", "'pixels'"):
        Field("jpg", "image", role="pixels")
    assert np.array_equal(Field("jpg", "image").mean, [0.5] * 3)


def make_decoder(decoder):
    return parse_fields({"flac": {"name": "x", "decoder": decoder}})[0].decoder


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
    ("mapping", "parts"),
    [
        ({}, ["data.fields", "empty", "{jpg: {name: image"]),
        ("jpg", ["data.fields", "'jpg'", "{jpg: {name: image"]),
        ({"jpg": {"name": "x", "sise": 4}}, ["data.fields.jpg", "'sise'", "Did you mean 'size'"]),
        ({"jpg": {"role": "image"}}, ["data.fields.jpg", "name: image"]),
        ({"jpg": {"name": 3}}, ["data.fields.jpg.name", "3", "a word"]),
        ({"jpg": "image"}, ["data.fields.jpg", "'image'", "{name: image, role: image}"]),
        ({"jpg": {"name": "x"}, "png": {"name": "x"}}, ["data.fields", "name 'x'"]),
        ({"jpg": {"name": "x"}, "png;jpg": {"name": "y"}}, ["data.fields", "extension 'jpg'"]),
        *(
            ({"jpg": {"name": "x", "size": size}}, ["data.fields.jpg.size", repr(size), "an int, or"])
            for size in ([1, 2, 3], 2.5, True, "224")
        ),
        ({"jpg": {"name": "x", "mean": 0.5}}, ["data.fields.jpg.mean", "0.5", "three numbers"]),
        ({"jpg": {"name": "x", "std": [float("nan"), 1, 1]}}, ["data.fields.jpg.std", "nan", "three numbers"]),
        ({"jpg": {"name": "x", "exif": "yes"}}, ["data.fields.jpg.exif", "'yes'", "true or false"]),
        (
            {"jpg": {"name": "x", "shorter_side": 256.0, "size": 224}},
            ["data.fields.jpg.shorter_side", "256.0", "an int"],
        ),
        ({"jpg": {"name": "x", "decode": True}}, ["data.fields.jpg.decode", "True", "a word"]),
        ({"tok": {"name": "x", "dtype": "uint16", "length": "9"}}, ["data.fields.tok.length", "'9'", "an int"]),
        ({"npy": {"name": "x", "decoder": "nowhere"}}, ["data.fields.npy.decoder", "'nowhere'", "dotted path"]),
        ({"npy": {"name": "x", "decoder": "no.such.module"}}, ["data.fields.npy.decoder", "'no.such.module'"]),
        ({"npy": {"name": "x", "decoder": "json.no_such"}}, ["data.fields.npy.decoder", "'json.no_such'"]),
        ({"npy": {"name": "x", "decoder": 3}}, ["data.fields.npy.decoder", "3", "a function"]),
        ({"npy": {"name": "x", "decoder": "decimal.Decimal"}}, ["data.fields.npy.decoder", "Decimal", "_target_"]),
    ],
)
def test_a_mistake_is_refused_with_its_key_and_value(mapping, parts):
    with refused(ValueError, *parts):
        parse_fields(mapping)


def test_a_decoder_is_a_callable_a_path_or_a_target():
    assert make_decoder(json.loads) is json.loads
    assert make_decoder("json.loads") is json.loads
    partial = {"_target_": "numpy.frombuffer", "_partial_": True, "dtype": "int16"}
    decoder = make_decoder(partial)
    assert decoder(b"\1\0\2\0").tolist() == [1, 2]
