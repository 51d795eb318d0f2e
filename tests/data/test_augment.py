"""Augmentations: numpy's own padding and torchvision's loop are the oracles; what came in stays as it was."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.augment import Compose, Flip, RandomCropFlip, RandomResizedCrop, begins_with
from dtrain.data.crop import Crop, resize


def image(height=6, width=5, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def every_outcome(pixels, padding, flip, mode):
    height, width = pixels.shape[:2]
    pad = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(pixels, pad, mode="constant" if mode == "zero" else "reflect")
    windows = [
        padded[top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]
    return {window.tobytes() for window in windows} | ({w[:, ::-1].tobytes() for w in windows} if flip else set())


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["zero", "reflect"]),
    st.integers(0, 2**32),
)
def test_a_crop_is_one_of_those_that_padding_by_hand_gives(height, width, padding, flip, mode, seed):
    if mode == "reflect" and padding >= min(height, width):
        padding = min(height, width) - 1
    pixels = image(height, width)
    sample = RandomCropFlip(padding=padding, flip=flip, mode=mode)({"image": pixels}, np.random.default_rng(seed))
    assert sample["image"].shape == pixels.shape
    assert sample["image"].flags.c_contiguous
    assert sample["image"].tobytes() in every_outcome(pixels, padding, flip, mode)


@pytest.mark.parametrize("mode", ["zero", "reflect"])
def test_every_crop_and_flip_comes_up(mode):
    pixels, rng = image(), np.random.default_rng(0)
    crop = RandomCropFlip(padding=1, mode=mode)
    seen = {crop({"image": pixels}, rng)["image"].tobytes() for _ in range(500)}
    assert seen == every_outcome(pixels, 1, True, mode)


@pytest.mark.parametrize(
    "augment",
    [
        RandomCropFlip(padding=0, flip=False),
        RandomCropFlip(),
        RandomCropFlip(mode="reflect"),
        Flip(),
        RandomResizedCrop(4),
        RandomResizedCrop(8, scale=(1, 1), ratio=(1, 1)),
        Compose([Flip(), RandomCropFlip(padding=1)]),
    ],
)
def test_what_came_in_stays_as_it_was_and_shares_nothing(augment):
    pixels, label = image(8, 8), np.int64(3)
    before, sample = pixels.copy(), {"image": pixels, "label": label}
    for seed in range(20):
        result = augment(sample, np.random.default_rng(seed))
        assert not np.shares_memory(result["image"], pixels)
        assert result["label"] is label
        result["image"][...] = 0
    np.testing.assert_array_equal(pixels, before)
    assert sample["image"] is pixels


@pytest.mark.parametrize(
    "augment", [RandomCropFlip(), Flip(probability=0.3), Compose([RandomResizedCrop([4, 3]), Flip()])]
)
def test_the_same_key_gives_the_same_augmentation_in_any_process(augment):
    twin = pickle.loads(pickle.dumps(augment))
    for key in range(10):
        one = augment({"image": image()}, np.random.Generator(np.random.Philox(key=key)))
        other = twin({"image": image()}, np.random.Generator(np.random.Philox(key=key)))
        np.testing.assert_array_equal(one["image"], other["image"])


def test_each_draws_a_fixed_count_of_numbers():
    # So that what comes after in a chain does not depend on what came up before.
    for augment in (RandomCropFlip(), RandomCropFlip(flip=False), Flip(), RandomResizedCrop(4)):
        after = set()
        for pixels in (image(), image(9, 9)):
            rng = np.random.default_rng(0)
            augment({"image": pixels}, rng)
            after.add(rng.random())
        assert len(after) == 1


def test_a_flip_mirrors_left_to_right_as_often_as_asked():
    pixels, rng = image(), np.random.default_rng(0)
    mirrored = [
        np.array_equal(Flip(probability=0.25)({"image": pixels}, rng)["image"], pixels[:, ::-1]) for _ in range(2000)
    ]
    assert 0.2 < np.mean(mirrored) < 0.3


def test_a_flip_of_other_types_is_numpys():
    for dtype in (np.uint8, np.float32, ">u2", bool):
        array = image().astype(dtype)
        array.flags.writeable = False
        flipped = Flip(probability=1.0)({"image": array}, np.random.default_rng(0))["image"]
        np.testing.assert_array_equal(flipped, array[:, ::-1])
        assert flipped.dtype == array.dtype
        assert flipped.flags.c_contiguous


# -- random resized crops


def torchvisions_window(height, width, scale, ratio, uniforms):
    """``RandomResizedCrop.get_params`` of torchvision 0.20, with numbers that were drawn before."""
    down, right, *uniforms = uniforms
    area = height * width
    log_ratio = [math.log(ratio[0]), math.log(ratio[1])]
    for attempt in range(10):
        target_area = area * (scale[0] + uniforms[2 * attempt] * (scale[1] - scale[0]))
        aspect_ratio = math.exp(log_ratio[0] + uniforms[2 * attempt + 1] * (log_ratio[1] - log_ratio[0]))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w = width
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        h = height
        w = round(h * max(ratio))
    else:
        w = width
        h = height
    return (height - h) // 2, (width - w) // 2, h, w


@given(
    st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32), st.sampled_from([(0.08, 1), (0.5, 0.5), (1, 1)])
)
def test_a_random_resized_crop_takes_torchvisions_window(height, width, seed, scale):
    ratio = (3 / 4, 4 / 3)
    crop = RandomResizedCrop([4, 5], scale=scale).crop(height, width, np.random.default_rng(seed))
    expected = torchvisions_window(height, width, scale, ratio, np.random.default_rng(seed).random(22).tolist())
    assert crop == Crop(*expected, (4, 5))
    assert 0 <= crop.top <= crop.top + crop.height <= height
    assert 0 <= crop.left <= crop.left + crop.width <= width


def test_random_resized_crops_have_every_area_and_shape_that_was_asked_for():
    rng = np.random.default_rng(0)
    crops = [RandomResizedCrop(1).crop(1000, 1000, rng) for _ in range(3000)]
    areas = np.array([crop.height * crop.width for crop in crops]) / 1e6
    shapes = np.log([crop.width / crop.height for crop in crops])
    assert 0.075 < areas.min() < 0.1
    assert areas.max() > 0.95
    assert abs(shapes.mean()) < 0.02
    assert np.abs(shapes).max() < math.log(4 / 3) + 0.01
    # Of the windows that fit, the upper left corner is anywhere.
    assert 0.45 < np.mean([crop.top / (1001 - crop.height) for crop in crops]) < 0.55


def test_a_random_resized_crop_of_an_array_is_its_window_resized():
    pixels = image(50, 40)
    augment = RandomResizedCrop([8, 6], interpolation="bicubic")
    top, left, height, width, *_ = augment.crop(50, 40, np.random.default_rng(3))
    result = augment({"image": pixels, "label": 1}, np.random.default_rng(3))
    expected = resize(pixels[top : top + height, left : left + width], (8, 6), "bicubic")
    np.testing.assert_array_equal(result["image"], expected)
    assert result["label"] == 1


# -- several


def test_steps_follow_one_another_with_one_generator():
    steps = [RandomCropFlip(padding=2), RandomResizedCrop(5), Flip()]
    rng = np.random.default_rng(7)
    expected = {"image": image(9, 9)}
    for step in steps:
        expected = step(expected, rng)
    result = Compose(steps)({"image": image(9, 9)}, np.random.default_rng(7))
    np.testing.assert_array_equal(result["image"], expected["image"])


def test_only_a_crop_that_comes_first_can_be_done_while_decoding():
    crop, flip = RandomResizedCrop(5), Flip()
    assert begins_with(None) == (None, None)
    assert begins_with(flip) == (None, flip)
    assert begins_with(crop) == (crop, None)
    assert begins_with(Compose([crop])) == (crop, None)
    first, rest = begins_with(Compose([crop, flip]))
    assert first is crop
    assert rest.steps == (flip,)
    later = Compose([flip, crop])
    assert begins_with(later) == (None, later)
    assert begins_with(Compose([Compose([crop]), flip]))[0] is crop


def test_other_fields_can_be_named():
    sample = {"mask": np.arange(6).reshape(2, 3)}
    flipped = Flip(field="mask", probability=1.0)(sample, np.random.default_rng(0))["mask"]
    np.testing.assert_array_equal(flipped, [[2, 1, 0], [5, 4, 3]])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomCropFlip(padding=-1), "padding -1"),
        (lambda: RandomCropFlip(mode="wrap"), "zero, reflect"),
        (lambda: Flip(probability=1.5), "probability 1.5"),
        (lambda: Flip("pixels")({"image": image()}, np.random.default_rng(0)), "'pixels', the sample has 'image'"),
        (lambda: Flip()({"image": "text"}, np.random.default_rng(0)), "got str"),
        (lambda: RandomResizedCrop(0), "size 0"),
        (lambda: RandomResizedCrop([1, 2, 3]), "height, width"),
        (lambda: RandomResizedCrop(4, scale=(0, 1)), "scale"),
        (lambda: RandomResizedCrop(4, scale=(0.5, 1.5)), "up to 1"),
        (lambda: RandomResizedCrop(4, ratio=(2, 1)), "ratio"),
        (lambda: RandomResizedCrop(4, ratio=(1, float("inf"))), "ratio"),
        (lambda: RandomResizedCrop(4, interpolation="nearest"), "bilinear, bicubic"),
        (lambda: RandomResizedCrop(4)({"image": np.zeros((9, 9))}, np.random.default_rng(0)), r"float64 \[9, 9\]"),
        (lambda: Compose([Flip(), "flip"]), "'flip'"),
        (lambda: RandomCropFlip(mode="reflect")({"image": image(4, 9)}, np.random.default_rng(0)), "too small"),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()
