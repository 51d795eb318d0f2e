"""Stateless randomness: every random number is a function of a key such as (seed, epoch, sample); no state is saved.

* ``hash64`` mixes integers into a key.
* ``permute`` is a keyed permutation of ``range(size)`` that is computed, not stored. It is a generalized Feistel
  network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): the domain is written
  row by row into a table that is about as wide as high; in turn, each row is rotated by a hash of the column and each
  column by a hash of the row; the few cells of the table outside the domain are skipped. Each index is mapped on its
  own, so place 1,999,999,999 costs as much as place 0. ``unpermute`` is the inverse. numpy's ``Generator.permutation``
  is not used, because it promises no stable result between versions, and a run must find its order again after an upgrade.
* ``Randomness`` is one sample's generator: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
  set to a key. Neighbouring keys give independent numbers, so none have to be drawn and thrown away.
* ``generators_at`` seeds the global generators of Python, numpy and torch with a key, for code that draws from them.
* ``seed_generators`` sets torch's global generators for one micro-batch of a training step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

# Measured on permutations of 8 elements: with 12 half-rounds some come a third more often than others, with 20 they are
# uniform. Never change anything here: a run must find its order again.
_HALF_ROUNDS = 20
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_U64 = np.uint64
_MASK = 2**64 - 1


def hash64(*parts: int | np.ndarray) -> np.ndarray:
    """Mixes integers into a uint64 key (splitmix64's finaliser over a running sum).

    Args:
        parts: Integers, or int64 arrays that broadcast together.

    Returns:
        uint64, of the broadcast shape.
    """
    state = np.zeros((), _U64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + np.asarray(part).astype(_U64) + _U64(_GOLDEN))
    return state


def permute(index: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """The place of ``index`` in a keyed permutation of ``range(size)``.

    Args:
        index: int64, shape ``[n]``, each in ``[0, size)``.
        size: Size of the domain, at most 2**52; one for all or one for each index.
        key: uint64 key of the permutation; one for all or one for each index.

    Returns:
        int64, shape ``[n]``, each in ``[0, size)``; distinct for distinct indices of equal size and key.
    """
    return _walked(_network, index, size, key)


def unpermute(place: np.ndarray, size: np.ndarray | int, key: np.ndarray | int) -> np.ndarray:
    """The inverse of ``permute``: ``unpermute(permute(index, size, key), size, key)`` is ``index``; arguments as there."""
    return _walked(_inverse_network, place, size, key)


class Randomness:
    """One generator that is set to a key at a time; setting it takes a sixth of the time of creating a new one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._start: Any = self._philox.state

    def generator(self, key: int) -> np.random.Generator:
        """The generator at the start of the numbers of ``key``, 64 bits; valid until the next call."""
        self._start["state"]["key"][0] = key
        self._philox.state = self._start
        return self._generator


@contextmanager
def generators_at(key: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch with ``key``, 64 bits, within the ``with`` block.

    Outside a worker they are restored afterwards, because the run draws from them too.
    """
    if get_worker_info() is not None:  # in a worker, only code under such a key draws from them
        _seed(key)
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _seed(key)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_generators(device: torch.device, *place: int) -> None:
    """Seeds torch's global generators of the CPU and of ``device``.

    Args:
        device: The device of the model.
        place: Integers that identify the micro-batch, such as (seed, step, micro-batch, rank).
    """
    key = 0
    for part in place:
        key = (key + part + _GOLDEN) & _MASK  # as hash64, in Python's integers, which are faster for a few of them
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def be_deterministic() -> None:
    """Makes torch use deterministic algorithms only; an operation without one raises."""
    # cuBLAS reads it at its first use; without it torch refuses matrix products on a GPU in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _walked(
    network: Callable[..., np.ndarray], start: np.ndarray, size: np.ndarray | int, key: np.ndarray | int
) -> np.ndarray:
    """Applies a network of the table until each cell is inside the domain."""
    start = np.asarray(start, np.int64)
    size = np.broadcast_to(np.asarray(size, np.int64), start.shape)
    key = np.broadcast_to(np.asarray(key, _U64), start.shape)
    rows, columns = _table(size)
    cell = network(start.astype(_U64), rows, columns, key)
    outside = np.flatnonzero(cell >= size.astype(_U64))
    while outside.size:
        cell[outside] = network(cell[outside], rows[outside], columns[outside], key[outside])
        outside = outside[cell[outside] >= size[outside].astype(_U64)]
    return cell.astype(np.int64)


def _table(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the table for a domain of ``size``."""
    # The number of rows is even: a rotation of an odd number of cells is an even permutation, so with odd sides only
    # half of all permutations could be reached.
    half = np.ceil(np.sqrt(size.astype(np.float64)) / 2).astype(_U64)
    rows = half + half
    return rows, (size.astype(_U64) + rows - _U64(1)) // rows


def _network(cell: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row = cell // columns
    column = cell - row * columns
    with np.errstate(over="ignore"):
        for half_round in range(0, _HALF_ROUNDS, 2):
            row = _shift(row, rows, _mix(column + (key + _U64(half_round * _GOLDEN & _MASK))))
            column = _shift(column, columns, _mix(row + (key + _U64((half_round + 1) * _GOLDEN & _MASK))))
    place: np.ndarray = row * columns + column
    return place


def _inverse_network(cell: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row = cell // columns
    column = cell - row * columns
    with np.errstate(over="ignore"):
        for half_round in reversed(range(0, _HALF_ROUNDS, 2)):
            column = _shift(column, columns, _mix(row + (key + _U64((half_round + 1) * _GOLDEN & _MASK))), back=True)
            row = _shift(row, rows, _mix(column + (key + _U64(half_round * _GOLDEN & _MASK))), back=True)
    index: np.ndarray = row * columns + column
    return index


def _shift(place: np.ndarray, length: np.ndarray, by: np.ndarray, back: bool = False) -> np.ndarray:
    """``place`` rotated in a ring of ``length`` by a random share of it, taken from 64 random bits; overwrites ``by``."""
    by >>= _U64(32)
    by *= length
    by >>= _U64(32)
    if back:
        np.subtract(length, by, out=by)
    by += place
    shifted: np.ndarray = np.minimum(by, by - length)  # the difference of a smaller one wraps to a huge number
    return shifted


def _mix(z: np.ndarray) -> np.ndarray:
    """Overwrites ``z``."""
    z ^= z >> _U64(30)
    z *= _U64(0xBF58476D1CE4E5B9)
    z ^= z >> _U64(27)
    z *= _U64(0x94D049BB133111EB)
    z ^= z >> _U64(31)
    return z


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    # Not torch.manual_seed, which would also initialise CUDA in the worker.
    torch.default_generator.manual_seed(key)
