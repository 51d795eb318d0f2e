"""torch's private operators for scaled gradients and fused optimizers, each used only after it passed a self-test.

* ``self_test(device_type)`` tries the operators that ``torch.amp.GradScaler`` uses, once per process. They are private, so
  torch may change them. Where one does not behave as in torch 2.9 to 2.13, a slower path is used, with a warning.
* ``reads_found_inf(optimizer)``: whether its kernels skip a step by themselves.
* ``prefill_momentum(optimizer)`` works around fused SGD, which leaves its momentum uninitialised if its first step is
  skipped on the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

_SLOWER = {
    "check_and_unscale": "gradients are checked one by one",
    "update_scale": "the loss scale is updated with a dozen small operations",
    "fused_skip": "the host waits for the decision to skip before each optimizer step",
}


@dataclass(frozen=True)
class Kernels:
    """Which operators passed the self-test on a device type.

    Attributes:
        check_and_unscale: ``torch._amp_foreach_non_finite_check_and_unscale_``.
        update_scale: ``torch._amp_update_scale_``.
        fused_skip: Fused optimizers leave parameters, moments and step count alone where ``optimizer.found_inf`` is 1.
    """

    check_and_unscale: bool = True
    update_scale: bool = True
    fused_skip: bool = True


@cache
def self_test(device_type: str) -> Kernels:
    """Tries each operator on a few numbers, once per process; waits for the device. Warns about those that fail."""
    tests: dict[str, Callable[[str], bool]] = {
        "check_and_unscale": _check_and_unscale_works,
        "update_scale": _update_scale_works,
        "fused_skip": _fused_skip_works,
    }
    results = {name: _passes(test, device_type) for name, test in tests.items()}
    for name, passed in results.items():
        if not passed:
            warnings.warn(
                f"torch {torch.__version__} on {device_type}: {name} failed dtrain's self-test, so {_SLOWER[name]}. "
                "Training is correct, but slower",
                stacklevel=2,
            )
    return Kernels(**results)


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every parameter group is stepped by a kernel that changes nothing where ``optimizer.found_inf`` is 1.

    torch declares this for the whole optimizer, but the option ``fused`` may differ between its groups.
    """
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supported and all(group.get("fused", True) for group in optimizer.param_groups)


def prefill_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Gives fused SGD a zero momentum buffer for every gradient that has none yet.

    torch's fused SGD allocates its momentum buffers without initialising them and lets the kernel fill them in the first
    step. If that step is skipped on the device, the second one would train on whatever the memory held.

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


def _passes(test: Callable[[str], bool], device_type: str) -> bool:
    try:
        with torch.no_grad():
            return test(device_type)
    except (AttributeError, RuntimeError, TypeError):
        # The operator was renamed or removed, or takes other arguments.
        return False


def _check_and_unscale_works(device: str) -> bool:
    inverse = torch.full((), 0.5, device=device)
    finite, infinite = torch.tensor([4.0], device=device), torch.tensor([math.inf], device=device)
    clean, found = torch.zeros((), device=device), torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([finite], clean, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_([finite, infinite], found, inverse)
    return [finite.item(), clean.item(), found.item()] == [1.0, 0.0, 1.0]


def _update_scale_works(device: str) -> bool:
    seen = []
    for found in (1.0, 0.0):
        scale = torch.full((), 8.0, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        torch._amp_update_scale_(scale, tracker, torch.full((), found, device=device), 2.0, 0.5, 1)
        seen += [scale.item(), tracker.item()]
    return seen == [4.0, 0, 16.0, 0]


def _fused_skip_works(device: str) -> bool:
    weight = torch.ones(1, device=device, requires_grad=True)
    weight.grad = torch.ones(1, device=device)
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
    seen = []
    for found in (1.0, 0.0):
        optimizer.found_inf = torch.full((), found, device=device)  # type: ignore[attr-defined]
        optimizer.step()
        seen += [weight.item() == 1.0, optimizer.state[weight]["step"].item()]
    return seen == [True, 0.0, False, 1.0]
