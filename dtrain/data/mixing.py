"""Mixup and cutmix: images mixed with another image of the training set, and labels as probabilities.

* The *partner* of a sample is its neighbour in the epoch's order (``EpochOrder.partners``). It is usually in the same
  micro-batch, so that nothing is read twice; otherwise it is read for this purpose only.
* Both images are augmented exactly as in the rows where they are the main image, then mixed. Random numbers depend on (seed,
  epoch, sample) only, not on the worker or on other rows.
* Images stay uint8. A label becomes the probability of each class: exactly the shares in which the pixels were mixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtrain.data.fields.field import REGIONS, DataError, Field
from dtrain.data.order.randomness import Randomness, hash64

# Uses of (seed, epoch) need different keys: the order has 1 to 3, augmentation 4, generated samples 5.
_MIXING = 6
# Shares of a blend are multiples of 1/256: the sum of two weighted pixels then fits into 16 bits.
_PARTS = 256


class Blend(NamedTuple):
    """Mixup (Zhang et al. 2018): each pixel is the weighted mean of both, rounded, so at most half a grey level off.

    Attributes:
        parts: Weight of the partner, of 256.
    """

    parts: int

    def put(self, image: np.ndarray, other: np.ndarray) -> float:
        """Writes the mixture into ``image``, both uint8, ``[height, width, 3]``; returns the share of ``other``."""
        mixture = np.multiply(image, _PARTS - self.parts, dtype=np.uint16)
        mixture += np.multiply(other, self.parts, dtype=np.uint16)
        mixture += _PARTS // 2
        mixture >>= 8
        image[...] = mixture
        return self.parts / _PARTS


class Patch(NamedTuple):
    """Cutmix (Yun et al. 2019): a rectangle of the partner replaces the same rectangle of the image, clipped at its border.

    Attributes:
        side: Height and width of the rectangle, as shares of the image's.
        down: Centre of the rectangle, as a share of the height.
        right: Centre of the rectangle, as a share of the width.
    """

    side: float
    down: float
    right: float

    def put(self, image: np.ndarray, other: np.ndarray) -> float:
        """Writes the mixture into ``image``, both uint8, ``[height, width, 3]``; returns the share of ``other``."""
        height, width = image.shape[:2]
        rows, columns = self._span(self.down, height), self._span(self.right, width)
        image[rows, columns] = other[rows, columns]
        return float((rows.stop - rows.start) * (columns.stop - columns.start) / max(1, height * width))

    def _span(self, middle: float, length: int) -> slice:
        pixels = round(self.side * length)
        first = int(middle * length) - pixels // 2
        return slice(max(first, 0), min(first + pixels, length))


@dataclass(frozen=True)
class Mix:
    """Settings of mixup and cutmix; one draw for each sample, as in timm's ``Mixup`` with ``mode="elem"``.

    Args:
        classes: Number of classes.
        mixup_alpha: The share of the partner is drawn from Beta(alpha, alpha), in steps of 1/256; 0 for no mixup.
        cutmix_alpha: The area of a patch is drawn from Beta(alpha, alpha); 0 for no cutmix.
        probability: Probability that a sample is mixed at all.
        switch_probability: Probability that a mixed sample gets cutmix instead of mixup, if both are on.
        image: Name of the image.
        label: Name of the class number, which becomes the probability of each class, fp32, shape ``[classes]``.

    Raises:
        ValueError: If a number is out of range, or neither mixup nor cutmix is on.

    Example:
        >>> import numpy as np
        >>> from dtrain.data import ShardLoader
        >>> from dtrain.data.mixing import Mix
        >>> images, fields = (np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)), {0: {"name": "image", "role": "image"}}
        >>> fields[1] = {"name": "label", "role": "label"}
        >>> loader = ShardLoader.over(images, fields, global_batch_size=4, num_workers=0, mix=Mix(classes=4, cutmix_alpha=1.0))
        >>> next(loader.epoch(0))["label"].shape
        torch.Size([4, 4])
    """

    classes: int
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        if not isinstance(self.classes, int) or self.classes < 1:
            raise ValueError(f"classes {self.classes!r}: want the number of classes, as in the model.")
        for name in ("probability", "switch_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: want a number from 0 to 1.")
        alphas = self.mixup_alpha, self.cutmix_alpha
        if not (all(0 <= alpha < math.inf for alpha in alphas) and any(alphas)):
            raise ValueError(
                f"mixup_alpha {alphas[0]} and cutmix_alpha {alphas[1]}: want numbers, 0 or more, and one of them above 0."
            )

    def fields(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """The fields of a source after mixing: the label holds probabilities instead of a class number.

        Raises:
            ValueError: If there is no such image or label, or the image has a mask or boxes.
        """
        roles = {field.name: field.role for field in fields}
        if roles.get(self.image) != "image":
            images = [name for name, role in roles.items() if role == "image"]
            raise ValueError(f"data.mix.image: {self.image!r} is not an image. Images: {', '.join(images) or 'none'}.")
        if self.label not in roles or roles[self.label] == "image":
            others = [name for name, role in roles.items() if role != "image"]
            raise ValueError(f"data.mix.label: {self.label!r} is not a label. Labels: {', '.join(others) or 'none'}.")
        if regions := [field.name for field in fields if field.role in REGIONS and field.of == self.image]:
            raise ValueError(
                f"data.mix mixes {self.image!r}, but not {regions[0]!r}, which belongs to it. Remove data.mix or the field."
            )
        return tuple(replace(field, role="target") if field.name == self.label else field for field in fields)

    def draw(self, rng: np.random.Generator) -> Blend | Patch | None:
        """The mixture for one sample; None if it is not mixed."""
        mixed, switch, down, right = rng.random(4).tolist()
        if mixed >= self.probability:
            return None
        if self.cutmix_alpha and (not self.mixup_alpha or switch < self.switch_probability):
            return Patch(math.sqrt(rng.beta(self.cutmix_alpha, self.cutmix_alpha)), down, right)
        parts = round(rng.beta(self.mixup_alpha, self.mixup_alpha) * _PARTS)
        return Blend(parts) if parts else None


class Mixer:
    """Draws the mixtures of micro-batches in one worker."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._seed = seed
        self._randomness = Randomness()

    def plan(self, epoch: int, samples: np.ndarray, partners: np.ndarray) -> Mixtures:
        """The mixtures of one micro-batch.

        Args:
            epoch: Number of the epoch.
            samples: Sample number of each row, int64, shape ``[rows]``; -1 where the row is masked.
            partners: Sample number of each row's partner, int64, shape ``[rows]``; the sample itself if it has none.
        """
        keys = hash64(self._seed, epoch, _MIXING, samples)
        draws = [
            self._mix.draw(self._randomness.generator(key)) if apart else None
            for key, apart in zip(keys.tolist(), (samples != partners).tolist(), strict=True)
        ]
        return Mixtures(self._mix, samples, partners, draws)


class Mixtures:
    """The mixtures of one micro-batch.

    Attributes:
        samples: Samples to read: first those in the rows, then partners that are in no row, int64, shape ``[rows + others]``.
    """

    def __init__(
        self, mix: Mix, samples: np.ndarray, partners: np.ndarray, draws: Sequence[Blend | Patch | None]
    ) -> None:
        wanted = partners[[draw is not None for draw in draws]]
        self.samples = np.concatenate([samples, np.setdiff1d(wanted, samples)])
        self._mix = mix
        self._rows = len(samples)
        self._draws = list(draws)
        row_of = {sample: row for row, sample in enumerate(self.samples.tolist())}
        self._partners = [row_of.get(partner, row) for row, partner in enumerate(partners.tolist())]

    def repeat(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copies the mixture of row ``sources[i]`` to row ``rows[i]``."""
        for source, row in zip(sources, rows, strict=True):
            if row < self._rows:  # the others are partners that are in no row
                self._draws[row], self._partners[row] = self._draws[source], self._partners[source]

    def mixed(self, columns: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """The fields of the micro-batch, mixed and without the partners that are in no row. Changes images in place.

        Args:
            columns: Fields of all ``samples``, by name.
            keys: Keys of all ``samples``; empty where one is bad. A row whose partner is bad is not mixed.

        Raises:
            DataError: If labels are not class numbers; names the sample.
        """
        mix, rows = self._mix, self._rows
        numbers = self._class_numbers(columns[mix.label], keys)
        images = columns[mix.image].numpy()
        before, shares = images.copy(), np.zeros(rows)
        for row, (draw, partner) in enumerate(zip(self._draws, self._partners, strict=True)):
            if draw is not None and keys[partner]:
                shares[row] = draw.put(images[row], before[partner])
        own, others = numbers[:rows], numbers[self._partners]
        shares[own == others] = 0  # both of one class: its probability is exactly 1, without rounding
        probabilities = np.zeros((rows, mix.classes), np.float32)
        probabilities[np.arange(rows), own] = 1 - shares
        probabilities[np.arange(rows), others] += shares
        return {name: column[:rows] for name, column in columns.items()} | {mix.label: torch.from_numpy(probabilities)}

    def _class_numbers(self, labels: Any, keys: Sequence[str]) -> np.ndarray:
        if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
            got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else "no numbers"
            raise DataError(
                f"data.mix.label: {self._mix.label!r} holds {got}, want the number of a class for each row."
            )
        numbers = labels.numpy().astype(np.int64)
        outside = np.flatnonzero((numbers < 0) | (numbers >= self._mix.classes))
        if outside.size:
            row = min(outside.tolist(), key=lambda row: not keys[row])  # a masked row repeats one that has a key
            raise DataError(
                f"data.mix: sample {keys[row]!r} is of class {numbers[row]}, but there are {self._mix.classes} classes, 0 to "
                f"{self._mix.classes - 1}. Set data.mix.classes, as in the model."
            )
        return numbers
