"""On a CPU the vote is computed in Python floats: bit for bit what the tensors of a GPU would say."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from dtrain.precision.host_vote import HostVote
from dtrain.precision.vote import Decision, Vote

CPU = torch.device("cpu")
RANKS = 3
SCALE = torch.tensor(1024.0)
OnDevice = partial(Vote, CPU)


def word(
    kind: Any, norm: float, loss: float, count: int, stop: bool, dtype: torch.dtype = torch.float32
) -> list[float]:
    """What a rank says that is alone; its two micro-batches bring tensors and plain numbers."""
    vote = kind(1)
    vote.add([torch.tensor(loss, requires_grad=True), torch.tensor(count), torch.tensor(0.3), 2])
    vote.add([0.1, 0, torch.tensor(7), torch.tensor(True)])
    shared = torch.tensor(norm, dtype=dtype)
    vote.cast(
        vote.overflow(shared),
        shared,
        SCALE,
        stop=stop,
        save=False,
        samples=count,
        bad=1,
        nbytes=2**40 + 1,
        own_norm=2 * shared if stop else None,
    )
    return [float(number) for number in vote.word]


def decision(kind: Any, said: list[tuple[float, float, int, bool]], clip_norm: float | None) -> Decision:
    """What the ranks decide: each casts as if it were alone, and the words are added by hand."""
    vote = kind(len(said))
    vote.word = [sum(numbers) for numbers in zip(*(word(kind, *rank) for rank in said), strict=True)]
    if kind is OnDevice:
        vote.word = torch.tensor(vote.word, dtype=torch.float64)
    return vote.decide(SCALE, 64, clip_norm)


FINE = (0.7, 3.3, 11, False)
SAID = {
    "fine": [FINE, (1e-3, 0.1, 7, True), (4e4, 2.2, 1, False)],
    "one inf norm": [FINE, (torch.inf, 0.1, 7, True), FINE],
    "two NaN losses": [(0.7, torch.nan, 11, False), (0.7, torch.nan, 7, True), FINE],
    "no rows": [(0.0, 0.0, 0, False)] * RANKS,
    "no rows on two ranks": [FINE, (0.0, 0.0, 0, False), (0.0, 0.0, 0, False)],
}


@pytest.mark.parametrize("said", SAID)
def test_words_are_equal(said: str) -> None:
    for rank in SAID[said]:
        assert word(HostVote, *rank) == word(OnDevice, *rank)


def test_a_norm_whose_square_is_beyond_float64_is_infinite_in_both() -> None:
    for kind in (HostVote, OnDevice):
        assert word(kind, 1e200, 1.0, 4, True, torch.float64)[3] == torch.inf


@pytest.mark.parametrize(("said", "clip_norm"), product(SAID, (None, 1.0, 1e-9, 1e9)))
def test_decisions_are_equal(said: str, clip_norm: float | None) -> None:
    on_host, on_device = (decision(kind, SAID[said], clip_norm) for kind in (HostVote, OnDevice))
    for host, device in zip(on_host, on_device, strict=True):
        assert device is not None
        host = torch.ones(()) if host is None else host
        assert (host.dtype, host.shape) == (device.dtype, device.shape)
        assert host.equal(device)
    assert bool(on_host.skip) == (said not in ("fine", "no rows on two ranks"))
    assert bool(on_host.overflowed) == (said in ("one inf norm", "two NaN losses"))


def test_gradients_that_are_right_already_are_left_alone() -> None:
    whole = HostVote(1)
    one = torch.ones(())
    whole.add([1.0, 64])
    whole.cast(torch.tensor(False), one, one, stop=False, save=False, samples=64, bad=0, nbytes=0)
    assert whole.decide(one, 64, None).coefficient is None
    assert whole.decide(one, 65, None).coefficient is not None
