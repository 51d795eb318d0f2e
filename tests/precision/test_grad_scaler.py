"""CrossRankGradScaler in one process: torch's, where torch's is right."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.precision import CrossRankGradScaler
from dtrain.precision.grad_scaler import _takes_found_inf
from tests.precision.skips import IMPLEMENTATIONS, OPTIMIZERS, Case, assert_equals_reference, ours, train
from tests.refusals import Refusal, refused
from tests.toys import train_step

BOTH: list[Callable[..., Any]] = [CrossRankGradScaler, torch.amp.GradScaler]


class Loop:
    """A weight, its optimizer and a scaler, driven call by call."""

    def __init__(self, scaler: Any, **options: Any) -> None:
        self.scaler = scaler
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, **options)

    def backward(self, overflow: bool = False) -> None:
        self.weight.grad = None
        self.scaler.scale(self.weight.square().sum()).backward()
        if overflow:
            assert self.weight.grad is not None
            self.weight.grad[0] = torch.inf

    def call(self, name: str) -> None:
        if name == "backward":
            self.backward()
        elif name == "update":
            self.scaler.update()
        else:
            getattr(self.scaler, name)(self.optimizer)

    def step(self, overflow: bool = False) -> float:
        self.backward(overflow)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())


# -- like torch's


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(
    "calls",
    [
        "backward step update",
        "backward unscale_ step update",
        "backward unscale_ step update backward unscale_ step update",
        "backward step update step update",
    ],
)
def test_the_orders_of_calls_that_torch_allows(make: Callable[..., Any], calls: str) -> None:
    loop = Loop(make("cpu", init_scale=4.0))
    for name in calls.split():
        loop.call(name)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(
    "calls",
    [
        "unscale_",
        "step",
        "update",
        "backward update",
        "backward unscale_ unscale_",
        "backward step unscale_",
        "backward step step",
        "backward step update update",
    ],
)
def test_the_orders_of_calls_that_torch_refuses(make: Callable[..., Any], calls: str) -> None:
    loop = Loop(make("cpu", init_scale=4.0))
    *before, last = calls.split()
    for name in before:
        loop.call(name)
    with pytest.raises((RuntimeError, AssertionError)):
        loop.call(last)


@pytest.mark.parametrize("make", BOTH)
def test_every_kind_of_outputs_is_scaled(make: Callable[..., Any]) -> None:
    scaler = make("cpu", init_scale=4.0)
    one = torch.ones(())
    assert scaler.scale(one).item() == 4.0
    assert scaler.scale([one, (one, one)]) == [4.0, (4.0, 4.0)]
    assert [value.item() for value in scaler.scale(iter([one]))] == [4.0]
    with pytest.raises(ValueError, match=r"want a tensor|must be a Tensor"):
        scaler.scale(3)


def test_the_scale_follows_torchs_step_by_step() -> None:
    overflows = [False, True, True, False, False, False, True, False, False, False]
    loops = [Loop(make("cpu", init_scale=256.0, growth_interval=2, growth_factor=4.0)) for make in BOTH]
    for overflow in overflows:
        scale, torchs = (loop.step(overflow) for loop in loops)
        assert scale == torchs
        assert torch.equal(loops[0].weight, loops[1].weight)


def test_a_state_moves_to_torchs_scaler_and_back() -> None:
    for make, other in (BOTH, BOTH[::-1]):
        source, target = Loop(make("cpu", init_scale=64.0, growth_interval=3)), Loop(other("cpu"))
        for overflow in (False, True, False, False):
            source.step(overflow)
        target.scaler.load_state_dict(source.scaler.state_dict())
        assert target.scaler.state_dict() == source.scaler.state_dict()
        assert target.step() == source.step() == 64.0


def test_a_hysteresis_is_one_key_more_that_torch_ignores() -> None:
    loop = Loop(CrossRankGradScaler("cpu", init_scale=64.0, hysteresis=3))
    assert [loop.step(overflow=True) for _ in range(2)] == [64.0, 64.0]
    state = loop.scaler.state_dict()
    assert state.pop("_hysteresis_tracker") == 1
    assert set(state) == set(torch.amp.GradScaler("cpu").state_dict())
    torch.amp.GradScaler("cpu").load_state_dict(loop.scaler.state_dict())
    continued = Loop(CrossRankGradScaler("cpu", hysteresis=3))
    continued.scaler.load_state_dict(loop.scaler.state_dict())
    assert continued.step(overflow=True) == 32.0


def test_disabled_it_only_steps() -> None:
    loop = Loop(CrossRankGradScaler("cuda", enabled=False))
    assert not loop.scaler.is_enabled()
    assert loop.step() == 1.0
    assert loop.weight.tolist() == pytest.approx([0.8, 0.8])
    assert loop.scaler.state_dict() == {}
    loop.scaler.load_state_dict({"anything": 1})
    loop.scaler.unscale_(loop.optimizer)


def test_every_public_method_of_torchs_scaler_is_there_with_its_parameters() -> None:
    for name, method in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        if not name.startswith("_"):
            parameters = inspect.signature(getattr(CrossRankGradScaler, name)).parameters
            assert list(parameters) == list(inspect.signature(method).parameters), name


def test_factors_are_read_and_set() -> None:
    scaler = CrossRankGradScaler("cpu")
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    with refused(ValueError, "backoff_factor=1.5"):
        scaler.set_backoff_factor(1.5)


# -- where torch's is wrong


def bad_steps_then_clean(loop: Loop) -> None:
    for _ in range(170):
        loop.step(overflow=True)
    for _ in range(3):
        loop.step()


def test_170_bad_steps_stop_at_the_floor_and_stay_finite() -> None:
    loop = Loop(CrossRankGradScaler("cpu"))
    bad_steps_then_clean(loop)
    assert loop.scaler.get_scale() == 1.0
    assert loop.weight.isfinite().all()
    assert (loop.weight < 1).all()


def test_torchs_scale_decays_to_zero_and_then_steps_with_nan() -> None:
    loop = Loop(torch.amp.GradScaler("cpu"))
    bad_steps_then_clean(loop)
    assert loop.scaler.get_scale() == 0.0
    assert loop.weight.isnan().all()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_any_gradient_counts_as_clean(fused: bool) -> None:
    unused = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=fused)
    loop, torchs = Loop(CrossRankGradScaler("cpu", growth_interval=1)), Loop(torch.amp.GradScaler("cpu"))
    for one in (loop, torchs):
        one.backward()
        one.scaler.step(one.optimizer)
    loop.scaler.step(unused)
    loop.scaler.update()
    assert loop.scaler.get_scale() == 131072.0
    if not fused:
        with pytest.raises(AssertionError, match="No inf checks"):
            torchs.scaler.step(unused)


def test_a_scale_below_one_that_makes_gradients_infinite_is_a_skip() -> None:
    loop = Loop(CrossRankGradScaler("cpu", init_scale=2.0**-10, min_scale=2.0**-12))
    loop.scaler.scale((loop.weight * 1e38).sum() * 1024).backward()
    assert loop.weight.grad is not None
    assert loop.weight.grad.isfinite().all()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.weight.tolist() == [1.0, 1.0]
    assert loop.scaler.get_scale() == 2.0**-11


def test_an_optimizer_that_expects_the_scaler_is_refused() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            return super().step(closure)

    loop = Loop(CrossRankGradScaler("cpu"))
    loop.optimizer = Old([loop.weight], lr=0.1)
    with refused(ValueError, "Old", "grad_scaler", "AdamW"):
        loop.step()
    with refused(ValueError, "optimizer", "Old", "grad_scaler"):  # as the training loop does, with any precision
        train_step(nn.Linear(1, 1), loop.optimizer)


def test_a_flag_on_another_device_is_never_left_to_an_optimizer_on_the_host() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    assert _takes_found_inf(optimizer, torch.device("cpu"))
    assert not _takes_found_inf(optimizer, torch.device("cuda"))


def test_groups_that_are_not_all_fused_are_skipped_by_the_host() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "fused": False}]
    optimizer, scaler = torch.optim.AdamW(groups, lr=0.1, fused=True), CrossRankGradScaler("cpu")
    for bad in (torch.inf, 1.0):
        before = [weight.detach().clone() for weight in weights]
        scaler.scale(sum(weight.square().sum() for weight in weights)).backward()
        assert weights[1].grad is not None
        weights[1].grad[0] = bad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert [torch.equal(*pair) for pair in zip(before, weights, strict=True)] == [bad == torch.inf] * 2


def test_a_users_own_grad_scale_still_divides() -> None:
    loop = Loop(CrossRankGradScaler("cpu"), fused=True)
    loop.optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    loop.step()
    assert loop.weight.tolist() == pytest.approx([0.95, 0.95])


# -- refusals


def with_closure(**options: Any) -> Callable[[Loop], Any]:
    def call(loop: Loop) -> None:
        loop.backward()
        loop.scaler.step(loop.optimizer, **options)

    return call


def fp16_parameters(loop: Loop) -> None:
    loop.weight.data = loop.weight.data.half()
    loop.scaler.scale(loop.weight.float().sum()).backward()
    loop.scaler.step(loop.optimizer)


def stepped_by_hand(after: str) -> Callable[[Loop], Any]:
    def call(loop: Loop) -> None:
        loop.backward()
        loop.call(after)
        loop.optimizer.step()

    return call


def scaled_by_torch_only(loop: Loop) -> None:
    torch.amp.GradScaler("cpu").scale(loop.weight.sum()).backward()
    loop.scaler.step(loop.optimizer)


def two_scalers(loop: Loop) -> None:
    other = CrossRankGradScaler("cpu")
    other.scale(loop.scaler.scale(loop.weight.square().sum())).backward()
    loop.scaler.unscale_(loop.optimizer)
    other.step(loop.optimizer)


def ddp_mixed_precision(loop: Loop) -> None:
    loop.weight._mp_param = torch.zeros(2)  # what DistributedDataParallel(mixed_precision=...) leaves on a parameter
    loop.backward()
    loop.scaler.step(loop.optimizer)


def optimizer_in_backward(loop: Loop) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, [loop.weight], {"lr": 0.1})
    loop.scaler.scale(loop.weight.square().sum())
    loop.scaler.step(loop.optimizer)


def unscaled_not_stepped(loop: Loop) -> None:
    loop.backward()
    loop.call("unscale_")
    loop.call("update")


# The call; what the message names: object or method, what was found, remedy; type of the error.
REFUSED: dict[str, tuple[Callable[[Loop], Any], str, str, str, type[Exception]]] = {
    "closure": (with_closure(closure=lambda: 0.0), "step()", "closure", "closure", RuntimeError),
    "fp16 parameters": (fp16_parameters, "parameter 0 of group 0", "fp16", "Keep parameters in fp32", ValueError),
    "stepped after unscale_": (
        stepped_by_hand("unscale_"),
        "SGD",
        "optimizer.step()",
        "scaler.step(optimizer)",
        RuntimeError,
    ),
    "stepped twice": (stepped_by_hand("step"), "SGD", "optimizer.step()", "one scaler for one optimizer", RuntimeError),
    "scaled by torch": (scaled_by_torch_only, "step()", "torch.amp.GradScaler", "scaler.scale(loss)", RuntimeError),
    "two scalers": (two_scalers, "SGD", "something else", "one scaler for one optimizer", RuntimeError),
    "DDP's mixed precision": (ddp_mixed_precision, "parameter 0", "mixed_precision=...", "use autocast", ValueError),
    "optimizer in the backward": (
        optimizer_in_backward,
        "parameter 0",
        "inside the backward pass",
        "Do not apply an optimizer",
        ValueError,
    ),
    "unscaled, not stepped": (
        unscaled_not_stepped,
        "update()",
        "unscaled but not stepped",
        "Call step()",
        RuntimeError,
    ),
    "no state": (lambda loop: loop.scaler.load_state_dict(None), "state", "NoneType", "state_dict()", ValueError),
    "another state": (lambda loop: loop.scaler.load_state_dict({"model": {}}), "scale", "model", "lacks", ValueError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused(name: str) -> None:
    call, key, got, remedy, error = REFUSED[name]
    Refusal(lambda: call(Loop(CrossRankGradScaler("cpu"))), key, got, remedy, error).check()


def test_a_positional_closure_is_refused() -> None:
    loop = Loop(CrossRankGradScaler("cpu"))
    loop.backward()
    with pytest.raises(RuntimeError, match="no closure"):
        loop.scaler.step(loop.optimizer, lambda: 0.0)


def test_a_new_scale_ends_a_round_that_was_not_stepped() -> None:
    loop = Loop(CrossRankGradScaler("cpu"))
    loop.backward()
    loop.call("unscale_")
    loop.scaler.update(new_scale=8.0)
    assert loop.scaler.get_scale() == 8.0


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_scaler_cannot_step_what_ours_unscaled(fused: bool) -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(CrossRankGradScaler("cpu", init_scale=4.0), fused=fused)
    torchs.scale(loop.scaler.scale(loop.weight.square().sum())).backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(RuntimeError, match=r"torch\.amp\.GradScaler"):
        torchs.step(loop.optimizer)
    assert loop.weight.tolist() == [1.0, 1.0]


def test_a_missing_device_is_refused_and_does_not_disable_the_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Refusal(CrossRankGradScaler, "CrossRankGradScaler", "device='cuda'", "enabled=False").check()


def test_a_loaded_scale_outside_the_bounds_is_clamped_with_a_warning() -> None:
    scaler = CrossRankGradScaler("cpu")
    with pytest.warns(UserWarning, match="continuing with"):
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
    assert scaler.get_scale() == 2.0**24


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copied_or_pickled_scaler_goes_on_as_the_original(duplicate: Callable[[Any], Any]) -> None:
    loop = Loop(CrossRankGradScaler("cpu", init_scale=64.0, growth_interval=2, hysteresis=2))
    loop.step()
    copied = Loop(duplicate(loop.scaler))
    assert copied.scaler.state_dict() == loop.scaler.state_dict()
    scales = [(loop.step(overflow), copied.step(overflow)) for overflow in (False, True, True, False, False)]
    assert scales == [(128.0, 128.0), (128.0, 128.0), (64.0, 64.0), (64.0, 64.0), (128.0, 128.0)]
    assert not pickle.loads(pickle.dumps(CrossRankGradScaler("cpu", enabled=False))).is_enabled()


def test_a_scaler_is_not_pickled_within_an_iteration() -> None:
    loop = Loop(CrossRankGradScaler("cpu"))
    loop.backward()
    loop.call("unscale_")
    with refused(RuntimeError, "CrossRankGradScaler", "update()"):
        pickle.dumps(loop.scaler)


def test_stepping_by_hand_between_iterations_and_after_the_scaler_is_gone_is_not() -> None:
    loop = Loop(CrossRankGradScaler("cpu"))
    loop.step()
    loop.optimizer.step()
    loop.backward()
    loop.call("unscale_")
    del loop.scaler
    loop.optimizer.step()


def test_a_fused_optimizer_is_left_without_attributes() -> None:
    loop = Loop(CrossRankGradScaler("cpu"), fused=True)
    loop.step()
    assert not hasattr(loop.optimizer, "found_inf")
    assert not hasattr(loop.optimizer, "grad_scale")


# -- the matrix


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_optimizer_equals_the_reference_that_skips_the_same_steps(optimizer: str, implementation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for overflow, clip, separate in product((None, 0, 1, 3), (False, True), (False, True)):
            overflows: dict[int, tuple[int, ...]] = {} if overflow is None else {overflow: (0,)}
            case = Case(optimizer, implementation, overflows, clip, separate)
            assert_equals_reference([train(0, ours(), case)], case, exact=True)
