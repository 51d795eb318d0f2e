"""torchvision has no part in these tests: anything that draws from torch's generator stands in for its transforms."""

import numpy as np
import pytest
import torch

from dtrain.data.torchvision_transform import TorchvisionTransform


def image(height=6, width=5):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


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
        (lambda tensor: tensor / 255, r"float32 \[3, 6, 5\]"),
        (lambda tensor: tensor[:1], r"uint8 \[1, 6, 5\]"),
        (lambda tensor: tensor[None], r"uint8 \[1, 3, 6, 5\]"),
        (lambda tensor: tensor.numpy(), "ndarray"),
    ],
)
def test_what_is_no_image_any_more_is_refused_with_what_to_do(transform, got):
    with pytest.raises(ValueError, match=rf"{got}.*Leave out ToDtype and Normalize"):
        TorchvisionTransform(transform)({"image": image()}, np.random.default_rng(0))


def test_a_class_in_place_of_an_object_is_told_apart():
    with pytest.raises(ValueError, match="want an object such as"):
        TorchvisionTransform(torch.nn.Identity)
