"""Generated problems with known answers, for ``dtrain.data.Generated``.

``line``, ``polynomial`` and ``sine`` take the sample's number (unused) and a generator seeded from (seed, epoch, sample).
"""

from __future__ import annotations

import numpy as np

Sample = dict[str, np.ndarray]


def line(sample: int, rng: np.random.Generator, points: int = 1) -> Sample:
    """Points of ``y = 5 x + 3`` with noise of standard deviation 0.1, x uniform in [-1, 1]: fp32 ``[points, 1]`` each."""
    x = rng.uniform(-1, 1, (points, 1))
    return _pair(x, 5 * x + 3 + rng.normal(0, 0.1, x.shape))


def polynomial(sample: int, rng: np.random.Generator, points: int = 1) -> Sample:
    """Points of ``y = 5 x^2 + 3``, x uniform in [-5, 5]: fp32 ``[points, 1]`` each."""
    x = rng.uniform(-5, 5, (points, 1))
    return _pair(x, 5 * x**2 + 3)


def sine(sample: int, rng: np.random.Generator, points: int = 1) -> Sample:
    """Points of ``y = sin(sum of x / 2)`` with noise of standard deviation 0.1, for ten normally distributed x.

    Returns:
        ``x``, fp32 ``[points, 10]``, and ``y``, fp32 ``[points, 1]``.
    """
    x = rng.normal(0, 1, (points, 10))
    return _pair(x, np.sin(x.sum(axis=1, keepdims=True) / 2) + rng.normal(0, 0.1, (points, 1)))


def checkerboard(size: int = 512, frequency: int = 8) -> Sample:
    """A checkerboard image; each sample is one line of pixels.

    Args:
        size: Number of pixels per side.
        frequency: Number of squares per side.

    Returns:
        ``coordinates``, x and y in [-1, 1], fp32 ``[size, 2, 1, size]``, and ``pixels``, 0 or 1, fp32 ``[size, 1, 1, size]``.

    Raises:
        ValueError: If ``frequency`` is not in ``[1, size]``.
    """
    if not 1 <= frequency <= size:
        raise ValueError(f"checkerboard: got frequency {frequency} and size {size}, want 1 <= frequency <= size.")
    field = np.arange(size) * frequency // size
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    y, x = np.meshgrid(axis, axis, indexing="ij")
    pixels = ((field[:, None] + field[None, :]) % 2).astype(np.float32)
    return {"coordinates": np.stack([x, y], axis=1)[:, :, None, :], "pixels": pixels[:, None, None, :]}


def _pair(x: np.ndarray, y: np.ndarray) -> Sample:
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}
