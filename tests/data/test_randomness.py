from __future__ import annotations

import numpy as np

from dtrain.data.randomness import Randomness


def draw(generator: np.random.Generator) -> list[float]:
    # Odd counts of 32-bit draws leave half a number behind in numpy's buffer.
    half = [int(generator.integers(0, 1000, dtype=np.int32)) for _ in range(3)]
    return [*half, *generator.random(5).tolist(), *generator.normal(size=3).tolist()]


def test_the_numbers_of_a_key_are_those_of_a_generator_made_for_it() -> None:
    randomness = Randomness()
    for key in (0, 1, 2**63 + 5, 2**64 - 1, 1):
        assert draw(randomness.of(key)) == draw(np.random.Generator(np.random.Philox(key=key)))


def test_what_was_drawn_for_one_key_does_not_matter_for_the_next() -> None:
    randomness = Randomness()
    first = draw(randomness.of(7))
    randomness.of(8).random(1001)
    randomness.of(8).integers(0, 10, dtype=np.int32)
    assert draw(randomness.of(7)) == first
