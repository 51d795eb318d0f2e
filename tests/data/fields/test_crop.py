"""Crops: Pillow is the oracle for resizing, torchvision's published arithmetic for where a crop lies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dtrain.data.fields.crop import Crop, resize, whole
from tests.property_tests import examples

sides = st.integers(1, 60)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(sides, sides, st.tuples(sides, sides), st.integers(0, 2**31 - 1))
@examples(40)
def test_resizing_follows_pillows_antialiased_bilinear_filter(height, width, size, seed):
    image = noise(height, width, seed)
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    resized = resize(image, size)
    assert resized.dtype == np.uint8
    # One in some thousands of noise images has a pixel that is off by two.
    assert np.abs(resized.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("size", [(20, 31), (90, 64)])
def test_bicubic_is_pillows_but_for_how_overshoots_are_clipped(size):
    y, x = np.mgrid[:50, :60]
    image = np.stack([128 + 100 * np.sin(x / 6), 128 + 100 * np.cos(y / 5), 2.0 * (x + y)], axis=-1).astype(np.uint8)
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))
    assert np.abs(resize(image, size, "bicubic").astype(int) - expected).max() <= 2


def test_pixels_that_may_not_be_written_can_be_resized(recwarn):
    image = noise(9, 9)
    image.flags.writeable = False
    assert resize(image, (4, 5)).shape == (4, 5, 3)
    assert not recwarn.list


@given(st.integers(20, 80), st.integers(20, 80), st.data())
@examples(50)
def test_an_evaluation_crop_is_torchvisions_resize_and_center_crop(height, width, data):
    shorter = data.draw(st.integers(1, 40))
    rows, columns = data.draw(st.integers(1, shorter)), data.draw(st.integers(1, shorter))
    image = noise(height, width)
    # functional.py of torchvision 0.20: _compute_resized_output_size, center_crop.
    short, long = (width, height) if width <= height else (height, width)
    new_long = int(shorter * long / short)
    new_width, new_height = (shorter, new_long) if width <= height else (new_long, shorter)
    top, left = round((new_height - rows) / 2.0), round((new_width - columns) / 2.0)
    resized = np.asarray(Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR))
    shown = whole(height, width, (rows, columns), shorter).cut(image)
    assert shown.shape == (rows, columns, 3)
    assert np.abs(shown.astype(int) - resized[top : top + rows, left : left + columns]).max() <= 2


def cut_after_scaling(crop, image):
    (height, width), (rows, columns) = crop.size, crop.center
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    return resize(image, crop.size, crop.interpolation)[top : top + rows, left : left + columns]


@given(st.integers(1, 60), st.floats(1, 16), st.booleans(), st.integers(1, 40), st.data())
@examples(60)
def test_an_image_that_is_not_thin_is_scaled_and_then_cut(short, aspect, tall, shorter, data):
    shape = (int(short * aspect), short) if tall else (short, int(short * aspect))
    size = data.draw(st.integers(1, shorter)), data.draw(st.integers(1, shorter))
    image = noise(*shape)
    crop = whole(*shape, size, shorter)
    assert np.array_equal(crop.cut(image), cut_after_scaling(crop, image))


@given(
    short=st.integers(1, 30), aspect=st.integers(18, 60), tall=st.booleans(), shorter=st.integers(1, 40), data=st.data()
)
@examples(60)
@pytest.mark.parametrize(("interpolation", "levels"), [("bilinear", 1), ("bicubic", 2)])
def test_a_thin_image_is_cut_and_then_scaled_which_is_the_same(
    short, aspect, tall, shorter, data, interpolation, levels
):
    long = short * aspect + data.draw(st.integers(0, short))
    shape = (long, short) if tall else (short, long)
    size = data.draw(st.integers(1, shorter)), data.draw(st.integers(1, shorter))
    image = noise(*shape)
    crop = whole(*shape, size, shorter)._replace(interpolation=interpolation)
    shown = crop.cut(image)
    assert shown.dtype == np.uint8
    assert shown.shape == (*size, 3)
    assert np.abs(shown.astype(int) - cut_after_scaling(crop, image)).max() <= levels


@pytest.mark.parametrize("shape", [(1, 1_000_000), (1_000_000, 1)])
def test_the_size_of_a_thin_image_does_not_decide_what_is_allocated(shape, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "dtrain.data.fields.crop.resize", lambda pixels, size, *rest: sizes.append(size) or resize(pixels, size, *rest)
    )
    assert whole(*shape, (224, 224), 256).cut(np.zeros((*shape, 3), np.uint8)).shape == (224, 224, 3)
    assert all(height * width <= 256 * 224 for height, width in sizes)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300))
def test_a_reduction_leaves_two_pixels_for_each_that_is_wanted(height, width, rows, columns):
    factor = Crop(0, 0, height, width, (rows, columns)).reduction
    assert factor in (1, 2, 4, 8)
    if factor > 1:
        assert height >= 2 * factor * rows
        assert width >= 2 * factor * columns
    if factor < 8:
        assert height < 4 * factor * rows or width < 4 * factor * columns


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_reduced_crop_lies_in_the_reduced_image_and_within_half_a_pixel_of_the_whole_one(height, width, factor, data):
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    crop = Crop(top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)), (1, 1))
    small = crop.reduced(factor)
    assert small.top >= 0
    assert small.top + small.height <= -(-height // factor)
    assert small.left + small.width <= -(-width // factor)
    for edge, reduced in (
        (crop.top, small.top),
        (crop.left + crop.width, small.left + small.width),
    ):
        assert abs(edge / factor - reduced) <= 0.5
