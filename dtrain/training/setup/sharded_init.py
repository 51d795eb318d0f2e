"""Initial values of a sharded model: rank 0 builds the model, the other ranks receive their parts of it.

1. ``build_on_meta``: rank 0 builds the model in host memory; the others build it on the meta device, which gives a tensor its
   shape but no memory. Rank 0 then keeps the values separately, so that the model is on the meta device on all ranks.
2. The caller changes the model in place and shards it.
3. ``fill`` allocates the parts of each rank, and broadcasts one tensor after the other.

A model whose code reads values, or keeps tensors that are neither parameters nor buffers, cannot be built on the meta device.
Then every rank builds it in host memory. In both cases all ranks use rank 0's values, as with DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import zip_longest
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.distributed.collectives import on_all_ranks
from dtrain.distributed.sharding import local_part, own_range
from dtrain.errors import ConfigError

_META = torch.device("meta")


def build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Collective. Builds a model without memory for its parameters and buffers; ``fill`` gives it that memory.

    torch's generator of the CPU is afterwards in the state of rank 0 on all ranks.

    Args:
        build: Builds the model on the CPU. It may draw from that generator, which has the same state on all ranks.

    Returns:
        The model, and on rank 0 the values of its parameters and buffers by name; {} on the others.

    Raises:
        ConfigError: On all ranks, if ``build`` raised it, or a rank's model has different tensors than rank 0's.
    """
    model = on_all_ranks(build if dist.get_rank() == 0 else lambda: _without_memory(build))
    values = {name: tensor.detach() for name, tensor in _tensors(model)}
    _replace(model, _META, _META)
    own = [f"{name} ({tensor.dtype}, {list(tensor.shape)})" for name, tensor in values.items()]
    rank0_tensors = [own]
    dist.broadcast_object_list(rank0_tensors, src=0)
    on_all_ranks(lambda: _require_same(own, rank0_tensors[0]))
    # What is built next, such as a task, may draw from the generator, which tensors on the meta device do not advance.
    state = torch.get_rng_state()
    dist.broadcast(state, src=0)
    torch.set_rng_state(state)
    return model, values if dist.get_rank() == 0 else {}


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor], parameter_device: torch.device, device: torch.device) -> None:
    """Collective. Gives a model of ``build_on_meta``, which was sharded since then, its memory and its values.

    Args:
        model: The model. Its tensors have the names that they had.
        values: From ``build_on_meta``; each value is removed when it was sent.
        parameter_device: For parameters, or this rank's parts of them.
        device: For buffers.
    """
    _replace(model, parameter_device, device)
    for name, tensor in _tensors(model):
        part = local_part(tensor)
        if dist.get_rank() == 0:
            whole = values.pop(name).to(part.device).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=part.device)
        dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)  # as bytes, because gloo does not send every dtype
        part.copy_(whole[own_range(tensor)])


def _without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device, or on the CPU if it cannot be built there."""
    state = torch.get_rng_state()
    try:
        with _META, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every weight that is loaded into a tensor without memory
            model = build()
        if not _keeps_other_tensors(model):
            return model
    except Exception:  # noqa: BLE001 - an ordinary construction decides whether this is an error of the model
        pass
    torch.set_rng_state(state)
    return build()


def _keeps_other_tensors(model: nn.Module) -> bool:
    """Whether it has tensors on the meta device that are neither parameters nor buffers, which ``fill`` would not fill."""
    seen = {id(tensor) for _, tensor in _tensors(model)}
    ahead: list[Any] = [model]
    while ahead:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, (type, FunctionType, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.is_meta:
                return True
        elif isinstance(value, dict):
            ahead += value.values()
        elif isinstance(value, (list, tuple, set)):
            ahead += value
        else:
            ahead += getattr(value, "__dict__", {}).values()
    return False


def _replace(model: nn.Module, parameter_device: torch.device, device: torch.device) -> None:
    """Replaces every parameter and buffer by an empty one. One that has several names stays one tensor."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, whose id must not be used again
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                is_parameter = isinstance(tensor, nn.Parameter)
                empty = torch.empty_like(tensor, device=parameter_device if is_parameter else device)
                made[id(tensor)] = tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            # Not in the module's dictionary: an RNN keeps its weights in a list as well.
            setattr(module, key, made[id(tensor)][1])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _require_same(own: list[str], rank0_tensors: list[str]) -> None:
    for mine, other in zip_longest(own, rank0_tensors, fillvalue="nothing"):
        if mine != other:
            raise ConfigError(
                f"model: this rank has built {mine} where rank 0 has built {other}. Build the same parameters and buffers on "
                "all ranks: their shapes must depend neither on the rank nor on unseeded numbers."
            )
