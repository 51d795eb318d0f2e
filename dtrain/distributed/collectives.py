"""What ranks tell each other outside the step: rank 0's decisions, everybody's problems, equal buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dtrain.config.errors import ConfigError

T = TypeVar("T")


def decided_by_rank_zero(function: Callable[[], Any]) -> Any:
    """Calls ``function`` on rank 0 and gives its result, which JSON must be able to hold, to every rank.

    Raises:
        ConfigError: On every rank, if ``function`` raised it.
    """
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            answer = {"result": function()}
        except ConfigError as error:
            answer = {"error": str(error)}
    text = json.dumps(answer).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8) if dist.get_rank() == 0 else None
    payload = payload if payload is not None else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, src=0)
    answer = json.loads(payload.numpy().tobytes())
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def together(function: Callable[[], T]) -> T:
    """Calls ``function`` on every rank; if it raises ``ConfigError`` on one, every rank raises that.

    Without this a rank that, say, does not see a shard would end alone, while the others wait for it.
    """
    result, problem = None, None
    try:
        result = function()
    except ConfigError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            everywhere = all(other == text for other in problems)
            raise ConfigError(text if everywhere else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def wait_for_all() -> None:
    """Returns on every rank when every rank has called it."""
    dist.all_reduce(torch.zeros(1))


@torch.no_grad()
def equalise_buffers(module: nn.Module) -> None:
    """Gives every rank rank 0's buffers, such as BatchNorm statistics, which each rank updates from its own rows."""
    if dist.get_world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
