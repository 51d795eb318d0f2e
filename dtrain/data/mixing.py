"""Mixup and cutmix: an image with another one of the training set in it, and a label that says how much of which.

* The *partner* of a sample comes next to it in the epoch's order (``EpochOrder.partners``): as a rule it is in the same
  micro-batch, so that nothing is read twice. Where it is not, it is read for this alone.
* Both are augmented as each is in its own row, and only then mixed. What is drawn depends on (seed, epoch, sample) only,
  never on who builds the row or what else lies beside it.
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

from dtrain.data.fields import DataError, Field
from dtrain.data.permutation import hash64
from dtrain.data.randomness import Randomness

# Beside the uses of (seed, epoch) elsewhere, with which this one must not share a key.
_MIXING = 6
# Shares of a blend are so many parts: the sum of two weighted pixels then fits into 16 bits.
_PARTS = 256


class Blend(NamedTuple):
    """Mixup (Zhang et al. 2018): each pixel the weighted mean of both, rounded, so at most half a grey level off.

    Attributes:
        parts: What the partner has, of 256.
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
    """Cutmix (Yun et al. 2019): a rectangle of the partner, in the same place; what is outside the image is cut off.

    Attributes:
        side: Height and width, as shares of the image's.
        down: Where its middle is, as a share of the height.
        right: The same of the width.
    """

    side: float
    down: float
    right: float

    def put(self, image: np.ndarray, other: np.ndarray) -> float:
        """Writes the mixture into ``image``, both uint8, ``[height, width, 3]``; returns the share of ``other``."""
        height, width = image.shape[:2]
        rows, columns = self._span(self.down, height), self._span(self.right, width)
        image[rows, columns] = other[rows, columns]
        return (rows.stop - rows.start) * (columns.stop - columns.start) / max(1, height * width)

    def _span(self, middle: float, length: int) -> slice:
        pixels = round(self.side * length)
        first = int(middle * length) - pixels // 2
        return slice(max(first, 0), min(first + pixels, length))


@dataclass(frozen=True)
class Mix:
    """What is mixed, and how much: as timm's ``Mixup`` with ``mode="elem"``, a draw for each sample.

    Args:
        classes: How many there are.
        mixup_alpha: A blend's share is drawn from Beta(alpha, alpha), in steps of 1/256; 0 for no mixup.
        cutmix_alpha: The area of a patch is drawn from Beta(alpha, alpha); 0 for no cutmix.
        probability: How often a sample is mixed at all.
        switch_probability: How often it is cutmix, where there are both.
        image: Name of the image.
        label: Name of the class number, which becomes the probability of each class, fp32, shape ``[classes]``.

    Raises:
        ValueError: If a number is impossible, or there is nothing to do.
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
            raise ValueError(f"classes {self.classes!r}: want how many the labels count, as the model has them.")
        for name in ("probability", "switch_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: want a number from 0 to 1.")
        alphas = self.mixup_alpha, self.cutmix_alpha
        if not (all(0 <= alpha < math.inf for alpha in alphas) and any(alphas)):
            raise ValueError(
                f"mixup_alpha {alphas[0]} and cutmix_alpha {alphas[1]}: want numbers, 0 or more, and one of them above 0."
            )

    def fields(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """The fields of a source as they are after mixing: the label holds no class number any more.

        Raises:
            ValueError: If there is no such image or label.
        """
        roles = {field.name: field.role for field in fields}
        if roles.get(self.image) != "image":
            images = [name for name, role in roles.items() if role == "image"]
            raise ValueError(f"data.mix.image: {self.image!r} is none of the images: {', '.join(images) or 'none'}.")
        if self.label not in roles or roles[self.label] == "image":
            others = [name for name, role in roles.items() if role != "image"]
            raise ValueError(f"data.mix.label: {self.label!r} is none of the labels: {', '.join(others) or 'none'}.")
        return tuple(replace(field, role="target") if field.name == self.label else field for field in fields)

    def draw(self, rng: np.random.Generator) -> Blend | Patch | None:
        """What is done to a sample; None if nothing."""
        mixed, switch, down, right = rng.random(4).tolist()
        if mixed >= self.probability:
            return None
        if self.cutmix_alpha and (not self.mixup_alpha or switch < self.switch_probability):
            return Patch(math.sqrt(rng.beta(self.cutmix_alpha, self.cutmix_alpha)), down, right)
        parts = round(rng.beta(self.mixup_alpha, self.mixup_alpha) * _PARTS)
        return Blend(parts) if parts else None


class Mixer:
    """Plans the mixtures of micro-batches; used in one worker.

    Args:
        mix: What is mixed.
        seed: Key of what is drawn.
    """

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._seed = seed
        self._randomness = Randomness()

    def plan(self, epoch: int, samples: np.ndarray, partners: np.ndarray) -> Mixtures:
        """What is to be done in one micro-batch.

        Args:
            epoch: Number of the epoch.
            samples: Number of each row's sample, int64, shape ``[rows]``; -1 where the row is masked.
            partners: Number of each one's partner, int64, shape ``[rows]``; itself if it has none.
        """
        keys = hash64(self._seed, epoch, _MIXING, samples)
        draws = [
            self._mix.draw(self._randomness.of(key)) if apart else None
            for key, apart in zip(keys.tolist(), (samples != partners).tolist(), strict=True)
        ]
        return Mixtures(self._mix, samples, partners, draws)


class Mixtures:
    """The mixtures of one micro-batch.

    Attributes:
        samples: Those of the rows, and after them partners that are in no row, int64, shape ``[rows + others]``.
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
        """Makes each of ``rows`` what the row at its place in ``sources`` is; others than rows of the batch are left alone."""
        for source, row in zip(sources, rows, strict=True):
            if row < self._rows:
                self._draws[row], self._partners[row] = self._draws[source], self._partners[source]

    def mixed(self, columns: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """The columns of the micro-batch: mixed, and without what is in no row. Changes images in place.

        Args:
            columns: Of all ``samples``, by name.
            keys: Of all ``samples``; empty where one is bad. Whose partner is bad stays as it is.

        Raises:
            DataError: If labels are no class numbers; names the sample.
        """
        mix, rows = self._mix, self._rows
        numbers = self._class_numbers(columns[mix.label], keys)
        images = columns[mix.image].numpy()
        before, shares = images.copy(), np.zeros(rows)
        for row, (draw, partner) in enumerate(zip(self._draws, self._partners, strict=True)):
            if draw is not None and keys[partner]:
                shares[row] = draw.put(images[row], before[partner])
        own, others = numbers[:rows], numbers[self._partners]
        shares[own == others] = 0  # all of it is of one class, exactly
        probabilities = np.zeros((rows, mix.classes), np.float32)
        probabilities[np.arange(rows), own] = 1 - shares
        probabilities[np.arange(rows), others] += shares
        return {name: column[:rows] for name, column in columns.items()} | {mix.label: torch.from_numpy(probabilities)}

    def _class_numbers(self, labels: Any, keys: Sequence[str]) -> np.ndarray:
        if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
            got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else "values that are no numbers"
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
