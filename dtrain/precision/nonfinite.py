"""Gradients of this rank: what they are, whether they are finite, and their division by the scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from dtrain.precision import kernels


def refuse_unscalable(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers whose gradients cannot be scaled. Looks at every parameter: once an optimizer is enough.

    Raises:
        ValueError: If a parameter is fp16, is updated inside the backward pass, or belongs to DDP's private mixed
            precision.
    """
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = f"parameter {number} of group {group_number} (shape {list(parameter.shape)})"
            if parameter.dtype == torch.float16:
                raise ValueError(_fp16_refused(name))
            if hasattr(parameter, "_in_backward_optimizers"):
                raise ValueError(
                    f"{name} is updated inside the backward pass, with a gradient that is still scaled and unchecked. "
                    "Do not apply an optimizer in backward to it: no rank can be asked whether to skip"
                )
            if hasattr(parameter, "_mp_param"):
                raise ValueError(
                    f"{name} is in a DistributedDataParallel(mixed_precision=...), which is private to torch and adds up "
                    "in 16 bits before it divides. Wrap the model without it and use autocast"
                )


def local_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank holds of the optimizer's gradients, as plain dense tensors that share their memory.

    The local part of a DTensor, the values of a sparse gradient, real and imaginary parts of a complex one. Parameters
    without a gradient, and shards without an element, contribute nothing.

    Raises:
        ValueError: If a gradient is fp16.
    """
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype == torch.float16:
                raise ValueError(_fp16_refused(f"a parameter of shape {list(parameter.shape)}"))
            # A DTensor's own dispatch reduces over the mesh of the first gradient only, and not at all where that one
            # is replicated: the ranks' vote does it for all.
            if hasattr(gradient, "to_local"):
                gradient = gradient.to_local()
            if gradient.is_sparse:
                gradient = gradient._values()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient.detach())
            if gradient.numel():
                gradients.append(gradient)
    return gradients


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.zero_grad()``, whose own bookkeeping takes twenty times as long as what it does."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()  # one that does more than that
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of at least one dense gradient, all on one device: shape ``[]``.

    The two operations that ``torch.nn.utils.get_total_norm`` comes down to, without its sorting by device and dtype.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


@torch.no_grad()
def check_and_unscale_(gradients: Iterable[Tensor], scale: Tensor, recheck: bool = False) -> Tensor:
    """Divides gradients by the scale in place and tells whether any was not finite; does not wait for the device.

    Args:
        gradients: Dense floating tensors, on any devices.
        scale: fp32, shape ``[]``.
        recheck: Look at the results as well. A scale below 1 may make finite gradients infinite.

    Returns:
        Exactly 0.0 or 1.0: fp32, shape ``[]``, on the scale's device.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    # An fp32 reciprocal may be off by one unit, and then the gradients are.
    inverse = scale.double().reciprocal().float()
    found_inf = torch.zeros_like(scale)
    for (device, _), group in groups.items():
        local = found_inf if device == scale.device else torch.zeros((), dtype=torch.float32, device=device)
        _check_and_unscale_group_(group, local, sent(inverse, device))
        if recheck:
            _check_and_unscale_group_(group, local, torch.ones_like(local))
        if local is not found_inf:
            found_inf = torch.maximum(found_inf, sent(local, scale.device))
    return found_inf


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, without waiting where that is safe."""
    # On the way to the host torch does not wait either if told so, and the host would read what has not arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _check_and_unscale_group_(group: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    if kernels.self_test(found_inf.device.type).check_and_unscale:
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
        return
    for gradient in group:
        found_inf.copy_(torch.maximum(found_inf, gradient.isfinite().all().logical_not().float()))
        gradient.mul_(inverse)


def _fp16_refused(name: str) -> str:
    return (
        f"{name} is fp16. Scaling keeps small gradients alive, but an fp16 weight cannot take up small updates (its "
        "spacing near 1 is 0.001), and unscaled fp16 gradients vanish again. Keep parameters in fp32 and let autocast "
        "compute in fp16"
    )
