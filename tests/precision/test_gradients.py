"""The local check: every kind of gradient, one flag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.precision.gradients import (
    check_and_unscale_,
    drop_gradients,
    local_gradients,
    norm_of,
    parameters_of,
    refuse_shared_gradients,
    refuse_unscalable,
)
from tests.refusals import refused


def sgd(*gradients: Tensor | None) -> torch.optim.SGD:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(3, dtype=gradient.dtype) if gradient is not None else torch.zeros(3))
        if gradient is not None:
            parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
            parameter.grad = gradient
        parameters.append(parameter)
    return torch.optim.SGD(parameters, lr=0.1)


SCALE = torch.tensor(8.0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_bad_number_of_any_dtype_is_found(bad: float, where: int) -> None:
    gradients = [torch.full((5,), 4.0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    gradients[where][3] = bad
    assert check_and_unscale_(gradients, SCALE).tolist() == 1.0
    assert all((gradient[:3] == 0.5).all() for gradient in gradients)


def test_the_flag_is_always_there() -> None:
    assert check_and_unscale_([], SCALE).tolist() == 0.0
    assert check_and_unscale_(local_gradients(parameters_of(sgd(None, torch.empty(0, 3)))), SCALE).tolist() == 0.0


def test_sparse_and_complex_gradients_are_divided_in_place() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([8.0, 16.0, 24.0]), (4,), check_invariants=True
    )
    complex_ = torch.full((2,), 8 + 16j)
    optimizer = sgd(sparse, complex_)
    assert check_and_unscale_(local_gradients(parameters_of(optimizer)), SCALE).tolist() == 0.0
    first, second = (parameter.grad for parameter in optimizer.param_groups[0]["params"])
    assert first.to_dense().tolist() == [3.0, 0.0, 3.0, 0.0]
    assert norm_of(local_gradients(parameters_of(sgd(first)))).item() == pytest.approx(18**0.5)
    assert second.tolist() == [1 + 2j, 1 + 2j]
    complex_.imag[0] = torch.nan
    assert check_and_unscale_(local_gradients(parameters_of(optimizer)), SCALE).tolist() == 1.0


def test_a_scale_below_one_that_makes_infinity_is_found() -> None:
    small = torch.tensor(2.0**-10)
    assert check_and_unscale_([torch.tensor([1e38])], small, recheck=True).tolist() == 1.0
    assert check_and_unscale_([torch.tensor([1e30])], small, recheck=True).tolist() == 0.0


def test_the_reciprocal_is_exact_to_the_last_bit() -> None:
    scale = torch.tensor(65537.0)
    gradient = torch.rand(100)
    expected = (gradient.double() * (1 / 65537.0)).float()
    check_and_unscale_([gradient], scale)
    torch.testing.assert_close(gradient, expected, rtol=2**-23, atol=0)


def test_gradients_on_several_devices_share_one_flag_on_the_scales_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        gradients = [torch.ones(2, device=device) for device in ("cuda:1", "cpu", "cuda:0", "cuda:1")]
        flag = check_and_unscale_(gradients, torch.ones((), device="cuda:0"))
        assert flag.device == torch.device("cuda:0")
        assert flag.shape == ()


def test_fp16_parameters_are_refused_with_the_reason() -> None:
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ValueError, "parameter 0 of group 0 (shape [2, 2])", "fp16", "Keep parameters in fp32"):
        refuse_unscalable(optimizer)
    with refused(ValueError, "shape [3]", "fp16"):
        local_gradients(parameters_of(sgd(torch.zeros(3, dtype=torch.float16))))


def test_a_parameter_that_is_listed_twice_is_refused() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    optimizer.param_groups[0]["params"].append(weight)  # torch's constructor warns of it
    with refused(ValueError, "parameter 2 of group 0 (shape [2, 3])", "parameter 0 of group 0", "once"):
        refuse_unscalable(optimizer)


def test_parameters_that_share_a_gradient_are_refused() -> None:
    shared = torch.ones(4)
    with refused(ValueError, "parameter 2 of group 0", "parameter 0", "clone"):
        refuse_shared_gradients(sgd(shared, torch.ones(4), shared))
    # Different parts of one tensor, empty gradients, and one that is not dense.
    sparse = torch.ones(4).to_sparse()
    refuse_shared_gradients(sgd(shared[:2], shared[2:], torch.empty(0), torch.empty(0), None, sparse))


def test_an_optimizer_in_backward_is_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="updated inside the backward pass"):
        refuse_unscalable(torch.optim.SGD(model.parameters(), lr=0.1))


def test_gradients_are_dropped_as_by_zero_grad() -> None:
    optimizer = sgd(torch.ones(3), None)
    drop_gradients(optimizer)
    assert all(parameter.grad is None for parameter in optimizer.param_groups[0]["params"])


def test_an_optimizer_that_does_more_in_zero_grad_is_asked_to() -> None:
    class Counting(torch.optim.SGD):
        asked = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.asked += 1
            super().zero_grad(set_to_none)

    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = Counting([parameter])
    drop_gradients(optimizer)
    assert optimizer.asked == 1
    assert parameter.grad is None
