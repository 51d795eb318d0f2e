"""torchvision's transforms as augmentations, where torchvision is installed: nothing here imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.augment import image_of
from dtrain.data.fields import DataError


class TorchvisionTransform:
    """Calls a transform of ``torchvision.transforms.v2``, or anything like it, on one image.

    Such transforms draw from torch's global generator. Here it is seeded from the sample's, and put back afterwards, so
    that what happens to a sample still depends on (seed, epoch, sample) only.

    Args:
        transform: Called with a uint8 tensor ``[3, height, width]``; returns another of any height and width. Leave out
            ``ToDtype`` and ``Normalize``: images travel as uint8 and are normalised on the device.
        field: Name of the image.

    Raises:
        ValueError: If ``transform`` cannot be called.
    """

    def __init__(self, transform: Callable[[Tensor], Tensor], field: str = "image") -> None:
        if isinstance(transform, type) or not callable(transform):
            raise ValueError(
                f"transform {transform!r}: want an object such as torchvision.transforms.v2.RandAugment()."
            )
        self.transform = transform
        self.field = field

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The sample with its image, uint8 ``[height, width, 3]``, replaced by a new array.

        Raises:
            DataError: If the transform returns something else than uint8 ``[3, height, width]``.
        """
        image = torch.from_numpy(np.array(image_of(sample, self.field))).permute(2, 0, 1)
        seed = int(rng.integers(2**63))
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would also wake a GPU in the worker.
            torch.default_generator.manual_seed(seed)
            changed = self.transform(image)
        if not isinstance(changed, Tensor) or changed.dtype != torch.uint8 or changed.shape[:-2] != (3,):
            got = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
            raise DataError(
                f"the transform of {self.field!r} returns {got}, want uint8 [3, height, width]. Leave out ToDtype and "
                "Normalize: images are normalised on the device, by the field's mean and std."
            )
        return {**sample, self.field: np.ascontiguousarray(changed.permute(1, 2, 0).numpy())}
