"""Counter-based randomness: generators, hash, permutation, seeding."""

from __future__ import annotations

import itertools
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.order.randomness import Randomness, hash64, permute, seed_generators


def draw(generator: np.random.Generator) -> list[float]:
    # Odd counts of 32-bit draws leave half a number behind in numpy's buffer.
    half = [int(generator.integers(0, 1000, dtype=np.int32)) for _ in range(3)]
    return [*half, *generator.random(5).tolist(), *generator.normal(size=3).tolist()]


def test_the_numbers_of_a_key_are_those_of_a_generator_made_for_it() -> None:
    randomness = Randomness()
    for key in (0, 1, 2**63 + 5, 2**64 - 1, 1):
        assert draw(randomness.generator(key)) == draw(np.random.Generator(np.random.Philox(key=key)))


def test_what_was_drawn_for_one_key_does_not_matter_for_the_next() -> None:
    randomness = Randomness()
    first = draw(randomness.generator(7))
    randomness.generator(8).random(1001)
    randomness.generator(8).integers(0, 10, dtype=np.int32)
    assert draw(randomness.generator(7)) == first


keys = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 3000), key=keys)
def test_every_place_is_taken_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, np.uint64(key)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**52), key=keys, data=st.data())
def test_places_of_a_huge_domain_stay_in_it_and_differ(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    places = permute(np.array(index), size, np.uint64(key)).tolist()
    assert all(0 <= place < size for place in places)
    assert len(set(places)) == len(index)


@given(data=st.data())
def test_an_index_goes_where_it_goes_alone(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, 100), keys, st.integers(0, 99)), min_size=1, max_size=20))
    size = np.array([row[0] for row in rows])
    index = np.array([row[2] % row[0] for row in rows])
    key = np.array([row[1] for row in rows], np.uint64)
    alone = [int(permute(index[i : i + 1], int(size[i]), key[i])[0]) for i in range(len(rows))]
    assert permute(index, size, key).tolist() == alone


def test_a_run_finds_its_order_again_after_an_upgrade() -> None:
    # These numbers may never change: checkpoints of all runs stand on them.
    assert permute(np.arange(10), 10, 0).tolist() == [9, 4, 2, 3, 0, 1, 5, 7, 8, 6]
    billions = [358586779, 9210533, 1461380097, 1953640609, 498528743]
    assert permute(np.arange(5), 2_000_000_000, 12345).tolist() == billions
    assert int(hash64(0)) == 0xE220A8397B1DCDAF  # splitmix64's first number, as its author published it
    assert [int(hash64(1, 2, 3)), int(hash64(-1))] == [7702586659592502839, 16490336266968443936]


def test_the_hash_of_arrays_is_that_of_each_of_their_numbers() -> None:
    numbers = np.arange(20).reshape(4, 5)
    together = hash64(3, numbers, 7)
    assert together.shape == (4, 5)
    assert together.dtype == np.uint64
    assert together.tolist() == [[int(hash64(3, int(number), 7)) for number in row] for row in numbers]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_all_permutations_of_a_few_are_about_equally_frequent(size: int) -> None:
    each = 20
    kinds = list(itertools.permutations(range(size)))
    count = each * len(kinds)
    places = permute(np.tile(np.arange(size), count), size, np.repeat(hash64(1, np.arange(count)), size))
    seen = dict.fromkeys(kinds, 0)
    for permutation in map(tuple, places.reshape(count, size).tolist()):
        seen[permutation] += 1
    # Chi squared over its degrees of freedom is 1 on average, with a deviation of sqrt(2 / freedom).
    freedom = len(kinds) - 1
    chi2 = sum((times - each) ** 2 / each for times in seen.values()) / freedom
    assert abs(chi2 - 1) < 4 * (2 / freedom) ** 0.5


def test_neighbours_do_not_stay_together_and_keys_do_not_resemble_each_other() -> None:
    size, count = 1000, 200
    places = permute(np.tile(np.arange(size), count), size, np.repeat(hash64(0, np.arange(count)), size))
    places = places.reshape(count, size)
    # One pair in a thousand is adjacent by chance, and one place in a thousand is the same under the next key.
    assert 0.8 < np.mean(np.diff(places) == 1) * size < 1.2
    assert 0.8 < np.mean(places[1:] == places[:-1]) * size < 1.2
    assert abs(np.corrcoef(np.tile(np.arange(size), count), places.ravel())[0, 1]) < 0.01


CPU = torch.device("cpu")


def drawn(*place: int) -> tuple[float, ...]:
    seed_generators(CPU, *place)
    return tuple(torch.rand(4).tolist())


def test_a_place_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    first = drawn(0, 7, 1, 2)
    torch.rand(1000)
    assert drawn(0, 7, 1, 2) == first


def test_every_place_draws_numbers_of_its_own() -> None:
    places = [*product((0, 1), (0, 1, 2**31), (0, 1), (0, 1, 2)), (0,), (1,), (0, 0), (0, 0, 0)]
    assert len({drawn(*place) for place in places}) == len(places)


def test_the_order_of_a_place_matters() -> None:
    assert drawn(1, 2, 3, 4) != drawn(4, 3, 2, 1)


def test_negative_and_huge_seeds_are_seeds() -> None:
    assert len({drawn(seed, 0, 0, 0) for seed in (-1, 0, 2**63, 2**64 - 2)}) == 4
