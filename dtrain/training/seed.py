"""Randomness that is counted, not carried: a generator is seeded from where it is used, so no state is saved."""

from __future__ import annotations

import os

import torch

_MASK = 2**64 - 1


def seed_generators(device: torch.device, *place: int) -> None:
    """Seeds torch's generators of the CPU and of ``device`` from a place such as (seed, step, micro-batch, rank)."""
    key = 0
    for part in place:
        key = (key + part + 0x9E3779B97F4A7C15) & _MASK  # splitmix64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def be_deterministic() -> None:
    """Makes torch use deterministic algorithms only; an operation that has none raises."""
    # Read by cuBLAS when it is first used; without it torch refuses matmuls on a GPU in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
