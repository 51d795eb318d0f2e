"""Whether ranks that should hold the same parameters do: one sum of bits for each parameter, compared at each save.

Gradients that bypass the reduction, or a hook that changes a model on one rank only, let replicas drift apart without an error.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.distributed.sharding import copies_of, is_dtensor, local_part
from dtrain.errors import ConfigError

_PIECE = 2**20  # elements at a time, to limit memory
_MULTIPLIER = 6364136223846793005  # odd
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(ConfigError):
    """The parameters of the ranks have drifted apart, so no rank's state is the run's state."""


@torch.no_grad()
def require_equal_replicas(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Collective. Refuses parameters that differ between ranks which hold the same part of them.

    The ranks compare weighted sums of all bit patterns as integers, modulo 2^64, so equal NaNs are equal and no difference is
    rounded away.

    Args:
        model: The bare model, as DDP or ``shard_model`` left it.
        ignored: Names of parameters that DDP leaves to each rank.

    Raises:
        ReplicasDiffer: On every rank; names the first parameter that differs.
    """
    ranks = dist.get_world_size()
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name not in ignored and copies_of(parameter, ranks) > 1
    ]
    if not named:
        return
    lowest = torch.iinfo(torch.int64).min
    # The largest and, by the complement, the smallest sum of each part in one all-reduce.
    slots = ranks // min(copies_of(parameter, ranks) for _, parameter in named)
    sums = torch.full((2, len(named), slots), lowest, dtype=torch.int64)
    found = torch.stack([sum_of_bits(local_part(parameter)) for _, parameter in named]).cpu()
    for place, (_, parameter) in enumerate(named):
        slot = _number_of_part(parameter)
        sums[0, place, slot], sums[1, place, slot] = found[place], ~found[place]
    dist.all_reduce(sums, dist.ReduceOp.MAX)
    differs = ((sums[0] != ~sums[1]) & (sums[0] != lowest)).any(dim=1)
    if differs.any():
        count = int(differs.sum())
        first = named[int(differs.int().argmax())][0]
        which = f"{first} and {count - 1} more parameters differ" if count > 1 else f"{first} differs"
        raise ReplicasDiffer(
            f"model: {which} between ranks that should hold the same values, so no checkpoint was written. A hook, task or "
            "optimizer changes them on some ranks only, or gradients bypass the reduction, or the "
            "ranks run on different kinds of hardware. Start again after the change: the run resumes from its last checkpoint."
        )


def sum_of_bits(part: Tensor) -> Tensor:
    """The sum of the bit patterns, each times an odd number that depends on its place, so that swapped values differ.

    int64, shape ``[]``, modulo 2^64; on the device of ``part``, which is not sharded.
    """
    if part.is_complex():
        part = torch.view_as_real(part)
    bits = part.view(_INTEGERS[part.element_size()]).flatten()
    odd = 2 * torch.arange(min(len(bits), _PIECE), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        total = total * _MULTIPLIER + (odd[: len(piece)] * piece).sum()
    return total


def _number_of_part(parameter: Tensor) -> int:
    """Which part of a parameter this rank holds."""
    if not is_dtensor(parameter):
        return 0
    mesh, number = parameter.device_mesh, 0  # type: ignore[attr-defined]
    for dim, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number
