"""Fused optimizers, which skip a step on the device: their kernels change nothing where ``optimizer.found_inf`` is 1.

* ``reads_found_inf(optimizer)``: whether an optimizer is one.
* ``prefill_momentum(optimizer)`` works around fused SGD, which leaves its momentum uninitialised if its first step is
  skipped on the device.
"""

from __future__ import annotations

import torch


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every parameter group is stepped by a kernel that changes nothing where ``optimizer.found_inf`` is 1.

    torch declares this for the whole optimizer, but the option ``fused`` may differ between its groups.
    """
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supported and all(group.get("fused", True) for group in optimizer.param_groups)


def prefill_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Gives fused SGD a zero momentum buffer for every gradient that has none yet.

    torch's fused SGD allocates its momentum buffers without initialising them and lets the kernel fill them in the first
    step. If that step is skipped on the device, the second one would train on arbitrary contents of the memory.

    A first step from zeros equals torch's first step (``0 * momentum + gradient``), except with dampening, which torch
    applies from the second step on.

    Returns:
        Whether the optimizer may now be stepped with ``found_inf`` on the device. False where dampening makes the first
        step differ: the host then has to decide.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if not group["fused"] or group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter].get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                return False
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return True
