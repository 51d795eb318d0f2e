"""A keyed permutation of ``range(size)`` that is computed, not stored.

A generalized Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): the
domain is written row by row into a table that is about as wide as high, and in turn each row is shifted by a hash of the
column, each column by a hash of the row. The few cells of the table that are not in the domain are walked through. It maps
each index alone, so that place 1,999,999,999 of a permutation costs what place 0 does. numpy's own
``Generator.permutation`` promises no stable stream between versions, and a run must find its order again after an upgrade.
"""

from __future__ import annotations

import numpy as np

# With twelve half-rounds some permutations of eight come a third more often than others, with twenty the counts are those of
# chance. Nothing here may change any more: a run must find its order again.
_HALF_ROUNDS = 20
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_U64 = np.uint64


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
    """Where a keyed permutation of ``range(size)`` puts ``index``.

    Args:
        index: int64, shape ``[n]``, each in ``[0, size)``.
        size: Size of the domain, at most 2**52; one for all or one for each index.
        key: uint64 key of the permutation; one for all or one for each index.

    Returns:
        int64, shape ``[n]``, each in ``[0, size)``; distinct for distinct indices of equal size and key.
    """
    index = np.asarray(index, np.int64)
    size = np.broadcast_to(np.asarray(size, np.int64), index.shape)
    key = np.broadcast_to(np.asarray(key, _U64), index.shape)
    rows, columns = _table(size)
    place = _network(index.astype(_U64), rows, columns, key)
    outside = np.flatnonzero(place >= size.astype(_U64))
    while outside.size:
        place[outside] = _network(place[outside], rows[outside], columns[outside], key[outside])
        outside = outside[place[outside] >= size[outside].astype(_U64)]
    return place.astype(np.int64)


def _table(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # An even number of rows, for cyclic shifts of an odd number of cells are even permutations: half of them all.
    half = np.ceil(np.sqrt(size.astype(np.float64)) / 2).astype(_U64)
    rows = half + half
    return rows, (size.astype(_U64) + rows - _U64(1)) // rows


def _network(cell: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row = cell // columns
    column = cell - row * columns
    with np.errstate(over="ignore"):
        for half_round in range(0, _HALF_ROUNDS, 2):
            row = _shift(row, rows, _mix(column + (key + _U64(half_round * _GOLDEN & (2**64 - 1)))))
            column = _shift(column, columns, _mix(row + (key + _U64((half_round + 1) * _GOLDEN & (2**64 - 1)))))
    return row * columns + column


def _shift(place: np.ndarray, length: np.ndarray, by: np.ndarray) -> np.ndarray:
    """``place`` moved on in a ring of ``length`` by a share of it that 64 random bits tell."""
    shifted = place + ((by >> _U64(32)) * length >> _U64(32))
    return np.where(shifted >= length, shifted - length, shifted)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
    return z ^ (z >> _U64(31))
