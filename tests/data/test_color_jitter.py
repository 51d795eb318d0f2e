"""Colours: Pillow's enhancers say what three of the changes are, Python's ``colorsys`` and float64 what the fourth is."""

import colorsys
import pickle

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from dtrain.data.color_jitter import ColorJitter


def image(height=9, width=7, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def changed(pixels, seed=0, **options):
    return ColorJitter(**options)({"image": pixels, "label": 3}, np.random.default_rng(seed))["image"]


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize(
    ("name", "enhancer"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_each_factor_does_what_pillows_enhancer_does(name, enhancer, factor):
    for seed in range(5):
        pixels = image(seed=seed)
        expected = np.asarray(enhancer(Image.fromarray(pixels)).enhance(factor))
        # Pillow rounds the greys, and drops what is behind the point.
        assert np.abs(changed(pixels, **{name: (factor, factor)}).astype(int) - expected).max() <= 2


@pytest.mark.parametrize("turns", [-0.5, -0.21, 0.0, 0.1, 0.3])
def test_a_hue_is_turned_in_the_direction_of_colorsys_at_the_luma_it_had(turns):
    values = np.random.default_rng(0).integers(100, 156, (9, 7, 3), dtype=np.uint8)  # what is turned stays in range
    got = changed(values, hue=(turns, turns)).astype(float)
    for before, after in zip(values.reshape(-1, 3), got.reshape(-1, 3), strict=True):
        y, i, q = colorsys.rgb_to_yiq(*before)
        angle = -2 * np.pi * turns
        turned = i * np.cos(angle) - q * np.sin(angle), i * np.sin(angle) + q * np.cos(angle)
        chroma = np.array(colorsys.rgb_to_yiq(*after)) - (y, *turned)
        assert np.abs(chroma).max() < 1.5
    red = np.full((1, 1, 3), (150, 100, 100), np.uint8)
    hue = colorsys.rgb_to_hsv(*(changed(red, hue=(turns, turns))[0, 0] / 255))[0]
    assert abs((hue - turns + 0.5) % 1 - 0.5) < 0.08  # YIQ and HSV mean nearly the same by an angle


@pytest.mark.parametrize("turns", [-0.4, 0.25])
def test_greys_have_no_hue(turns):
    grey = np.repeat(np.arange(0, 250, 5, dtype=np.uint8).reshape(10, 5, 1), 3, axis=2)
    np.testing.assert_array_equal(changed(grey, hue=(turns, turns), saturation=(0.2, 0.2)), grey)


def test_changes_come_in_a_fixed_order_each_on_top_of_the_one_before():
    options = {"brightness": (1.1, 1.1), "contrast": (0.6, 0.6), "saturation": (1.2, 1.2), "hue": (0.2, 0.2)}
    start = one_by_one = np.random.default_rng(0).integers(100, 156, (9, 7, 3), dtype=np.uint8)  # nothing is clipped
    for name, limits in options.items():
        one_by_one = changed(one_by_one, **{name: limits})
    assert np.abs(changed(start, **options).astype(int) - one_by_one).max() <= 2


def test_factors_are_drawn_evenly_from_their_range():
    grey = np.full((1, 1, 3), 100, np.uint8)
    rng = np.random.default_rng(0)
    jitter = ColorJitter(brightness=0.4)
    seen = [int(jitter({"image": grey}, rng)["image"][0, 0, 0]) for _ in range(1000)]
    assert 60 <= min(seen) < 63
    assert 137 < max(seen) <= 140
    assert 98 < np.mean(seen) < 102


def test_what_is_off_draws_its_number_all_the_same():
    after = set()
    for options in ({}, {"hue": 0.1}, {"brightness": 0.3, "saturation": (0.5, 2)}):
        rng = np.random.default_rng(0)
        ColorJitter(**options)({"image": image()}, rng)
        after.add(rng.random())
    assert len(after) == 1
    np.testing.assert_array_equal(changed(image()), image())


def test_what_came_in_stays_as_it_was_and_the_same_key_gives_the_same_colours():
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    pixels = image()
    before = pixels.copy()
    one = jitter({"image": pixels, "label": 3}, np.random.default_rng(5))
    other = pickle.loads(pickle.dumps(jitter))({"image": pixels}, np.random.default_rng(5))
    np.testing.assert_array_equal(one["image"], other["image"])
    np.testing.assert_array_equal(pixels, before)
    assert not np.shares_memory(one["image"], pixels)
    assert one["image"].flags.writeable
    assert one["label"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"brightness": -0.1}, "brightness -0.1"),
        ({"contrast": (0.5, 0.2)}, "contrast"),
        ({"saturation": (0.5, 1, 2)}, "saturation"),
        ({"brightness": float("inf")}, "brightness inf"),
        ({"brightness": float("nan")}, "brightness nan"),
        ({"hue": 0.6}, r"hue 0.6.*\[-0.5, 0.5\]"),
    ],
)
def test_impossible_ranges_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        ColorJitter(**options)


def test_only_images_have_colours():
    with pytest.raises(ValueError, match=r"'image' to be an image.*float32 \[3, 3\]"):
        changed(np.zeros((3, 3), np.float32))
