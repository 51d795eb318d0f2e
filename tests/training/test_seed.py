from __future__ import annotations

from itertools import product

import torch

from dtrain.training.seed import seed_generators

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
