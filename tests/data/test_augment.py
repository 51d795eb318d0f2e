"""Augmentations: numpy's own padding is the oracle; the arrays that came in stay as they were."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.augment import Flip, RandomCropFlip


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
    "augment", [RandomCropFlip(padding=0, flip=False), RandomCropFlip(), RandomCropFlip(mode="reflect"), Flip()]
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


@pytest.mark.parametrize("augment", [RandomCropFlip(), Flip(probability=0.3)])
def test_the_same_key_gives_the_same_augmentation_in_any_process(augment):
    twin = pickle.loads(pickle.dumps(augment))
    for key in range(10):
        one = augment({"image": image()}, np.random.Generator(np.random.Philox(key=key)))
        other = twin({"image": image()}, np.random.Generator(np.random.Philox(key=key)))
        np.testing.assert_array_equal(one["image"], other["image"])


def test_each_draws_a_fixed_count_of_numbers():
    # So that what comes after in a chain does not depend on what came up before.
    for augment in (RandomCropFlip(), RandomCropFlip(flip=False), Flip()):
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
        (lambda: RandomCropFlip(mode="reflect")({"image": image(4, 9)}, np.random.default_rng(0)), "too small"),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()
