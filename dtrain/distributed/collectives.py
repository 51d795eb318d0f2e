"""Agreement between ranks outside of the training step: rank 0's decisions, errors of any rank, equal buffers.

All functions are collective: every rank must call them, in the same order. In a process without a process group, such as an
export, ``from_rank0`` and ``on_all_ranks`` only call their function, and ``from_all_ranks`` returns a list of one value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dtrain.errors import ConfigError

T = TypeVar("T")


def from_rank0(function: Callable[[], Any]) -> Any:
    """Calls ``function`` on rank 0 and returns its result on every rank.

    Args:
        function: Called on rank 0 only; its result must be representable in JSON.

    Raises:
        ConfigError: On every rank, if ``function`` raised it.
    """
    if not dist.is_initialized():
        return function()
    text = b""
    if dist.get_rank() == 0:
        try:
            text = json.dumps({"result": function()}).encode()
        except ConfigError as error:
            text = json.dumps({"error": str(error)}).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    payload = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
    dist.broadcast(payload, src=0)
    answer = json.loads(payload.numpy().tobytes())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def on_all_ranks(function: Callable[[], T]) -> T:
    """Calls ``function`` on every rank and returns each rank's own result.

    Without it, a rank that cannot read a shard, for example, would end while the others wait for it.

    Raises:
        ConfigError: On every rank, if ``function`` raised it on one; names the rank unless all have the same error.
    """
    if not dist.is_initialized():
        return function()
    result, problem = None, None
    try:
        result = function()
    except ConfigError as error:
        problem = str(error)
    problems = from_all_ranks(problem)
    for rank, text in enumerate(problems):
        if text is not None:
            same_everywhere = all(other == text for other in problems)
            raise ConfigError(text if same_everywhere else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def from_all_ranks(value: T) -> list[T]:
    """Gathers a small value of each rank, such as a text or None; returns all of them, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    """A barrier: returns on every rank when every rank has called it."""
    dist.all_reduce(torch.zeros(1))


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Copies rank 0's buffers, such as the BatchNorm statistics of its own rows, to all ranks."""
    if dist.get_world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
