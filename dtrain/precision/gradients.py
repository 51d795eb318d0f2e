"""The gradients of one rank: listed as plain tensors, checked for non-finite values, divided by the loss scale.

* *Local* gradients are the tensors of this rank: the local shards of DTensors, the values of sparse gradients.
* The *flag* is 1.0 if any local gradient has a value that is not finite, else 0.0.

Nothing here communicates or waits for the device. ``grad_scaler`` sums the flags of all ranks. The training loop uses no
flag from this file: ``vote`` derives the overflow from ``norm_of``.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor


def refuse_unscalable(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose gradients cannot be scaled. Visits every parameter, so call it once per optimizer.

    Raises:
        ValueError: If a parameter is listed twice, is fp16, is updated inside the backward pass, or belongs to DDP's private
            mixed precision. Names the parameter by its number and shape. If the optimizer expects a scaler, by torch's
            deprecated contract.
    """
    takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
    if takes_scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"{type(optimizer).__name__}.step() takes grad_scaler, the deprecated way in which torch's GradScaler lets an "
            "optimizer unscale gradients and skip steps. dtrain does both for all ranks, and passes no scaler. Use an "
            "optimizer without that argument, such as torch.optim.AdamW"
        )
    seen: dict[int, str] = {}
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = f"parameter {number} of group {group_number} (shape {list(parameter.shape)})"
            if (other := seen.setdefault(id(parameter), name)) is not name:
                raise ValueError(
                    f"{name} is also {other}: its gradient would be divided by the loss scale twice and the parameter be "
                    "updated twice. List each parameter once"
                )
            if parameter.dtype == torch.float16:
                raise ValueError(_fp16_refused(name))
            if hasattr(parameter, "_in_backward_optimizers"):
                raise ValueError(
                    f"{name} is updated inside the backward pass, with a gradient that is still scaled and unchecked, "
                    "before the ranks can agree on a skip. Do not apply an optimizer in the backward to it"
                )
            if hasattr(parameter, "_mp_param"):
                raise ValueError(
                    f"{name} is in a DistributedDataParallel(mixed_precision=...), which is private to torch and sums "
                    "gradients in 16 bits before it divides them. Wrap the model without it and use autocast"
                )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups of an optimizer."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of the gradients of parameters, as plain dense tensors that share memory with them.

    DTensors yield their local shard, sparse gradients their values, complex ones a view of real and imaginary parts.
    Parameters without a gradient and shards without elements are left out.

    Raises:
        ValueError: If a gradient is fp16.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        dtype = gradient.dtype
        if dtype == torch.float16:
            raise ValueError(_fp16_refused(f"a parameter of shape {list(parameter.shape)}"))
        # The foreach check on DTensors reduces over the mesh of the first gradient only, and not at all if that one
        # is replicated. On local shards it never reduces, and the ranks combine their flags afterwards.
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            with torch.no_grad():  # it is then an attribute, and not an operation of autograd
                gradient = gradient.to_local()
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                # The values of one row may be in several places, each smaller than their sum.
                gradient = parameter.grad = gradient.coalesce()
            gradient = gradient._values()
        if dtype.is_complex:
            gradient = torch.view_as_real(gradient.detach())
        if gradient.numel():
            gradients.append(gradient)
    return gradients


def refuse_shared_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuses parameters whose gradients are the same memory: it would be divided by the loss scale twice.

    It visits every gradient, so call it once per optimizer, after a backward.

    Raises:
        ValueError: If two parameters share a gradient; names both by their numbers.
    """
    for _, name, other in _sharing_gradients(optimizer):
        raise ValueError(
            f"{name} and {other} have the same gradient tensor, which would be divided by the loss scale twice. "
            "Give each parameter its own gradient (p.grad = gradient.clone()), or share the parameter"
        )


def with_shared_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters whose gradient shares the memory of an earlier one's, as ``b``'s does in ``a.view(n) + b.view(n)``."""
    return [parameter for parameter, _, _ in _sharing_gradients(optimizer)]


def _sharing_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str, str]]:
    """Each such parameter, its name by number, and the name of the earlier one."""
    seen: dict[tuple[int, int], str] = {}
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if not local.numel():
                continue
            name = f"parameter {number} of group {group_number}"
            other = seen.setdefault((local.untyped_storage()._cdata, local.storage_offset()), name)
            if other is not name:
                yield parameter, name, other


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sets all gradients to None, as ``optimizer.zero_grad()``."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()  # a subclass that does more
        return
    # zero_grad() enters the profiler and builds lists per device even to set None: 19 us instead of 0.4 for an MLP.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sets dense gradients to zero in place and all others to None."""
    dense = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                dense.append(parameter.grad)
            else:
                parameter.grad = None
    torch._foreach_zero_(dense)


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The common 2-norm of one or more dense gradients on one device: shape ``[]``."""
    # What torch.nn.utils.get_total_norm() computes, without its grouping by device and dtype: 19 us instead of 66 for the
    # four gradients of an MLP on a CPU (torch 2.13).
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


@torch.no_grad()
def check_and_unscale_(gradients: Iterable[Tensor], scale: Tensor, recheck: bool = False) -> Tensor:
    """Divides gradients by the scale in place and returns the flag; does not wait for the device.

    Args:
        gradients: Dense floating-point tensors, on any devices.
        scale: fp32, shape ``[]``.
        recheck: Check the quotients as well: a scale below 1 may make finite gradients infinite.

    Returns:
        Exactly 0.0 or 1.0: fp32, shape ``[]``, on the scale's device.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    # In float64: an fp32 reciprocal may be off by one unit in the last place, and so would be every gradient.
    inverse = scale.double().reciprocal().float()
    found_inf = torch.zeros_like(scale)
    for (device, _), group in groups.items():
        local = found_inf if device == scale.device else torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, local, copy_to_device(inverse, device))
        if recheck:
            torch._amp_foreach_non_finite_check_and_unscale_(group, local, torch.ones_like(local))
        if local is not found_inf:
            found_inf = torch.maximum(found_inf, copy_to_device(local, scale.device))
    return found_inf


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; waits only if that is the CPU."""
    # A non-blocking copy to the CPU could be read before the data has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _fp16_refused(name: str) -> str:
    return (
        f"{name} is fp16. Loss scaling keeps small gradients from becoming zero, but an fp16 weight rounds small updates "
        "away (near 1 its spacing is 0.001), and fp16 gradients become zero again when they are unscaled. Keep parameters "
        "in fp32 and let autocast compute in fp16"
    )
