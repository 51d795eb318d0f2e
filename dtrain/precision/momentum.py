"""Fused SGD's momentum before the first step.

torch's fused SGD makes its momentum buffers of uninitialised memory and lets the kernel fill them in the first step. A
first step that is skipped on the device leaves that memory as it was, and the second step trains on it.
"""

from __future__ import annotations

import torch


def prefill_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Gives fused SGD zeroed momentum buffers wherever a gradient has none yet.

    A first step from zeros equals torch's first step, for ``0 * momentum + gradient`` is the gradient, unless dampening
    multiplies the gradient from the second step on.

    Returns:
        Whether the optimizer may now be stepped with ``found_inf`` on the device. False while dampening makes a first
        step differ: then the host has to decide.
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
