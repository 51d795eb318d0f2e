"""A scaler's state that only one rank has. S13."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.precision.scenarios.loops import (
    SCALE,
    STEPS,
    Net,
    Result,
    alone,
    assert_right,
    counted,
    flat,
    loss_of,
    with_both,
)


def resumed(rank: int, scaler: Any) -> Result:
    """The checkpoint's scale is that of ``SCALE``; the scalers were made with another one."""
    state = scaler.state_dict()
    scaler.load_state_dict(state | {"scale": 8 * SCALE})
    if hasattr(scaler, "peers"):
        scaler.load_state_dict(state if rank == 0 else None)
    elif rank == 0:
        scaler.load_state_dict(state)
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        scaler.scale(loss_of(ddp, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(flat(model.parameters()), scaler.get_scale(), counted(optimizer))


def test_s13_a_scale_that_one_rank_loaded_is_that_of_all() -> None:
    apart, together = with_both(2, resumed)
    (model, _) = alone(2, (), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert_right(together, flat(model.parameters()), ())
    assert apart[0].scale != apart[1].scale
    # Gradients of two scales were averaged, and each rank divided them by its own.
    assert not torch.equal(apart[0].weights, apart[1].weights)
