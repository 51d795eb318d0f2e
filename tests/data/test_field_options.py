"""The public ``fields`` mapping: what it may say, in code and in a config, and what is refused and how."""

import json

import pytest
from omegaconf import OmegaConf

from dtrain.data.field_options import parse_fields


def decoder_of(decoder):
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
    ("mapping", "says"),
    [
        ({}, "data.fields is empty"),
        ("jpg", "data.fields is 'jpg'. Name what to read"),
        ({"jpg": {"name": "x", "sise": 4}}, "did you mean 'size'"),
        ({"jpg": {"role": "image"}}, "has no name"),
        ({"jpg": {"name": 3}}, "want a word"),
        ({"jpg": "image"}, "want options such as"),
        ({"jpg": {"name": "x"}, "png": {"name": "x"}}, "share the name 'x'"),
        ({"jpg": {"name": "x"}, "png;jpg": {"name": "y"}}, "share the extension 'jpg'"),
        ({"jpg": {"name": "x", "size": [1, 2, 3]}}, "an int, or"),
        ({"jpg": {"name": "x", "size": 2.5}}, "an int, or"),
        ({"jpg": {"name": "x", "size": True}}, "an int, or"),
        ({"jpg": {"name": "x", "size": "224"}}, "an int, or"),
        ({"jpg": {"name": "x", "mean": 0.5}}, "three numbers"),
        ({"jpg": {"name": "x", "std": [float("nan"), 1, 1]}}, "three numbers"),
        ({"jpg": {"name": "x", "exif": "yes"}}, "true or false"),
        ({"jpg": {"name": "x", "shorter_side": 256.0, "size": 224}}, "want an int"),
        ({"jpg": {"name": "x", "decode": True}}, "want a word"),
        ({"tok": {"name": "x", "dtype": "uint16", "length": "9"}}, "want an int"),
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


def test_a_decoder_is_a_callable_a_path_or_a_target():
    assert decoder_of(json.loads) is json.loads
    assert decoder_of("json.loads") is json.loads
    partial = {"_target_": "numpy.frombuffer", "_partial_": True, "dtype": "int16"}
    decoder = decoder_of(partial)
    assert decoder(b"\1\0\2\0").tolist() == [1, 2]
