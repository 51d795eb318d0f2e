"""Augmentations. Oracles: numpy's padding, torchvision's crop loop, Pillow's enhancers, ``colorsys`` and float64."""

from __future__ import annotations

import colorsys
import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image, ImageEnhance

from dtrain.config.compose import conf_dir
from dtrain.config.instantiate import by_target
from dtrain.data import ShardLoader
from dtrain.data.augment import (
    ColorJitter,
    Compose,
    Flip,
    RandomCropFlip,
    RandomResizedCrop,
    TorchvisionTransform,
    begins_with,
)
from dtrain.data.fields.crop import Crop, resize
from tests.refusals import refused
from tests.shards import write_tar


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
    ("make", "names"),
    [
        (lambda: RandomCropFlip(padding=-1), ["padding -1"]),
        (lambda: RandomCropFlip(mode="wrap"), ["zero, reflect"]),
        (lambda: Flip(probability=1.5), ["probability 1.5"]),
        (lambda: Flip("pixels")({"image": image()}, np.random.default_rng(0)), ["'pixels'", "has 'image'"]),
        (lambda: Flip()({"image": "text"}, np.random.default_rng(0)), ["got str"]),
        (lambda: RandomResizedCrop(0), ["size 0"]),
        (lambda: RandomResizedCrop([1, 2, 3]), ["height, width"]),
        (lambda: RandomResizedCrop(4, scale=(0, 1)), ["scale"]),
        (lambda: RandomResizedCrop(4, scale=(0.5, 1.5)), ["up to 1"]),
        (lambda: RandomResizedCrop(4, ratio=(2, 1)), ["ratio"]),
        (lambda: RandomResizedCrop(4, ratio=(1, float("inf"))), ["ratio"]),
        (lambda: RandomResizedCrop(4, interpolation="nearest"), ["bilinear, bicubic"]),
        (lambda: RandomResizedCrop(4)({"image": np.zeros((9, 9))}, np.random.default_rng(0)), ["float64 [9, 9]"]),
        (lambda: Compose([Flip(), "flip"]), ["'flip'"]),
        (lambda: RandomCropFlip(mode="reflect")({"image": image(4, 9)}, np.random.default_rng(0)), ["too small"]),
    ],
)
def test_mistakes_are_named(make, names):
    with refused(ValueError, *names):
        make()


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
    ("options", "names"),
    [
        ({"brightness": -0.1}, ["brightness -0.1"]),
        ({"contrast": (0.5, 0.2)}, ["contrast"]),
        ({"saturation": (0.5, 1, 2)}, ["saturation"]),
        ({"brightness": float("inf")}, ["brightness inf"]),
        ({"brightness": float("nan")}, ["brightness nan"]),
        ({"hue": 0.6}, ["hue 0.6", "[-0.5, 0.5]"]),
    ],
)
def test_impossible_ranges_are_refused(options, names):
    with refused(ValueError, *names):
        ColorJitter(**options)


def test_only_images_have_colours():
    with refused(ValueError, "'image'", "float32 [3, 3]"):
        changed(np.zeros((3, 3), np.float32))


def rows_shuffled(pixels):
    """As torchvision's do: takes ``[3, height, width]`` and draws from the generator that everyone shares."""
    assert pixels.dtype == torch.uint8
    assert pixels.shape[0] == 3
    return pixels[:, torch.randperm(pixels.shape[1])]


def test_a_transform_draws_from_the_samples_own_generator_and_leaves_torchs_alone():
    augment = TorchvisionTransform(rows_shuffled)
    results = []
    for state in (0, 1):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        results.append(augment({"image": image(), "label": 7}, np.random.default_rng(5)))
        assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(results[0]["image"], results[1]["image"])
    assert results[0]["label"] == 7
    others = {augment({"image": image()}, np.random.default_rng(key))["image"].tobytes() for key in range(20)}
    assert len(others) > 10


def test_channels_are_last_before_and_after():
    pixels = image()
    result = TorchvisionTransform(lambda tensor: tensor[:, 1:, :3])({"image": pixels}, np.random.default_rng(0))
    np.testing.assert_array_equal(result["image"], pixels[1:, :3])
    assert result["image"].flags.c_contiguous


def test_a_transform_that_writes_in_place_does_not_reach_what_came_in():
    pixels = image()
    before = pixels.copy()
    result = TorchvisionTransform(lambda tensor: tensor.zero_())({"image": pixels}, np.random.default_rng(0))
    assert not result["image"].any()
    np.testing.assert_array_equal(pixels, before)


def test_a_failing_transform_leaves_torchs_generator_as_it_was():
    def fail(tensor):
        torch.rand(3)
        raise RuntimeError("inside")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        TorchvisionTransform(fail)({"image": image()}, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("transform", "got"),
    [
        (lambda tensor: tensor / 255, "float32 [3, 6, 5]"),
        (lambda tensor: tensor[:1], "uint8 [1, 6, 5]"),
        (lambda tensor: tensor[None], "uint8 [1, 3, 6, 5]"),
        (lambda tensor: tensor.numpy(), "ndarray"),
    ],
)
def test_what_is_no_image_any_more_is_refused_with_what_to_do(transform, got):
    with refused(ValueError, key="", got=got, remedy="Leave out ToDtype and Normalize"):
        TorchvisionTransform(transform)({"image": image()}, np.random.default_rng(0))


def test_a_class_in_place_of_an_object_is_told_apart():
    with refused(ValueError, key="", remedy="want an object such as"):
        TorchvisionTransform(torch.nn.Identity)


def smooth(height: int, width: int) -> bytes:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([y * 255 // height, x * 255 // width, (x + y) * 255 // (height + width)], axis=-1)
    return simplejpeg.encode_jpeg(pixels.astype(np.uint8), quality=95)


def test_the_imagenet_preset_crops_at_random_to_train_and_shows_the_middle_to_evaluate(tmp_path: Path) -> None:
    config = OmegaConf.create({"data": OmegaConf.load(conf_dir() / "data" / "imagenet.yaml")})
    preset = OmegaConf.merge(config, {"data": {"image_size": 224}}).data
    files = [smooth(300, 400), smooth(500, 260), smooth(100, 90)]
    shard = write_tar(tmp_path / "a.tar", [(f"s{n}", {"jpg": file, "cls": b"1"}) for n, file in enumerate(files)])
    fields, augment_node = (OmegaConf.to_container(preset[key], resolve=True) for key in ("fields", "augment"))
    augment = by_target("data.augment", augment_node)
    seen = {}
    for use in ("train", "eval"):
        loader = ShardLoader(
            [shard],
            fields,
            global_batch_size=3,
            num_workers=0,
            shuffle="none",
            augment=augment if use == "train" else None,
        )
        seen[use] = next(loader.epoch(0))["image"].numpy()
    assert seen["train"].shape == seen["eval"].shape == (3, 224, 224, 3)
    assert not np.array_equal(seen["train"], seen["eval"])
    for shown, file in zip(seen["eval"], files, strict=True):
        image = Image.open(io.BytesIO(file))
        scale = 256 / min(image.size)
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        middle = np.asarray(image.crop((left, top, left + 224, top + 224)))
        assert np.abs(shown.astype(int) - middle).max() <= 3
