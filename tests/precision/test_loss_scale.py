"""The loss scale against torch's and Megatron-LM's, and at its bounds."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from dtrain.precision.loss_scale import LossScale
from tests.refusals import Refusal

CPU = torch.device("cpu")


def make(**options: Any) -> LossScale:
    return LossScale(CPU, **options)


def feed(scale: LossScale, overflows: list[bool]) -> list[float]:
    seen = []
    for overflow in overflows:
        scale.update(torch.tensor(float(overflow)))
        seen.append(scale.scale.item())
    return seen


def megatron(
    overflows: list[bool], scale: float, growth: float, backoff: float, interval: int, hysteresis: int, low: float
) -> list[float]:
    """Megatron-LM's DynamicGradScaler, line by line, on Python numbers."""
    growth_tracker, hysteresis_tracker, seen = 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * backoff, low)
        else:
            growth_tracker += 1
            if growth_tracker == interval:
                growth_tracker = 0
                hysteresis_tracker = hysteresis
                scale = scale * growth
        seen.append(scale)
    return seen


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_any_history_gives_megatrons_scale(hysteresis: int) -> None:
    draw = random.Random(0)
    for _ in range(20):
        overflows = [draw.random() < 0.3 for _ in range(40)]
        scale = make(init=64.0, growth_interval=3, hysteresis=hysteresis, max_scale=2.0**40)
        assert feed(scale, overflows) == megatron(overflows, 64.0, 2.0, 0.5, 3, hysteresis, 1.0)


def test_without_hysteresis_it_is_torchs_scale() -> None:
    overflows = [False, True, False, False, False, True, True, False, False, False, False]
    stock = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for overflow in overflows:
        stock.scale(weight.sum()).backward()
        assert weight.grad is not None
        if overflow:
            weight.grad.fill_(torch.inf)
        stock.step(optimizer)
        stock.update()
        optimizer.zero_grad()
        expected.append(stock.get_scale())
    assert feed(make(init=256.0, growth_interval=2), overflows) == expected


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_scale_stays_between_floor_and_ceiling(hysteresis: int) -> None:
    scale = make(init=8.0, growth_interval=1, min_scale=0.5, max_scale=32.0, hysteresis=hysteresis)
    assert max(feed(scale, [False] * 200)) == 32.0
    assert feed(scale, [True] * 200)[-1] == 0.5
    assert feed(scale, [False])[-1] == 1.0


def test_the_scale_is_one_tensor_for_ever() -> None:
    scale = make(growth_interval=1, init=4.0)
    tensor = scale.scale
    feed(scale, [False, True])
    scale.set(16.0)
    scale.set(torch.tensor([8.0]))
    scale.load_state_dict(scale.state_dict())
    assert scale.scale is tensor
    assert tensor.item() == 8.0


def test_a_bool_is_a_decision_too() -> None:
    scale = make(init=8.0)
    scale.update(torch.tensor(True))
    assert scale.scale.item() == 4.0


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_state_continues_the_same(hysteresis: int) -> None:
    overflows = [False, True, False, False, True, True, True, False]
    options: dict[str, Any] = {"init": 64.0, "growth_interval": 2, "hysteresis": hysteresis}
    whole = feed(make(**options), overflows * 2)
    first, second = make(**options), make(**options)
    feed(first, overflows)
    second.load_state_dict(first.state_dict())
    assert feed(second, overflows) == whole[len(overflows) :]


def test_a_hysteresis_that_is_used_up_stays_so_in_a_loaded_state() -> None:
    first, second = (make(init=64.0, hysteresis=2) for _ in range(2))
    feed(first, [True, True, True])
    state = first.state_dict()
    assert state["_hysteresis_tracker"] == 0
    second.load_state_dict(state)
    assert feed(second, [True]) == feed(first, [True]) == [8.0]


def test_a_shortened_interval_still_grows() -> None:
    scale = make(init=2.0, growth_interval=100)
    feed(scale, [False] * 50)
    scale.configure(scale.growth_factor, scale.backoff_factor, growth_interval=10)
    assert feed(scale, [False])[-1] == 4.0


def test_a_scale_outside_the_bounds_is_clamped_with_a_warning() -> None:
    scale = make(init=8.0, min_scale=4.0, max_scale=16.0)
    state = scale.state_dict()
    with pytest.warns(UserWarning, match=r"64 is outside \[4, 16\]; continuing with 16"):
        scale.load_state_dict(state | {"scale": 64.0})
    with pytest.warns(UserWarning, match="continuing with 4"):
        scale.set(1.0)
    scale.set(torch.tensor(1e9))
    assert scale.scale.item() == 16.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale.load_state_dict(state)


# -- refusals: what is at fault, the value, what is wanted

STATES: dict[str, tuple[Any, str, str, str]] = {
    "None": (None, "gradient scaler state", "NoneType", "state_dict()"),
    "a string": ("scale", "gradient scaler state", "str", "state_dict()"),
    "of a disabled scaler": ({}, "gradient scaler state", "empty dict", "start with a new scaler"),
    "of something else": ({"scale": 1.0, "step": 3}, "growth_factor", "scale, step", "lacks"),
    "no number": ({"scale": "big"}, "gradient scaler state", "big", "not a number"),
    "several numbers": ({"scale": torch.ones(3)}, "gradient scaler state", "tensor", "not a number"),
    **{
        f"{key}={value}": ({key: value}, "precision.loss_scale", f"{key}={value}", want)
        for key, value, want in (
            ("scale", float("nan"), "finite number above 0"),
            ("scale", 0.0, "finite number above 0"),
            ("growth_factor", 1.0, "> 1"),
            ("backoff_factor", 2.0, "between 0 and 1"),
            ("growth_interval", 0, ">= 1"),
            ("_growth_tracker", -1, ">= 0"),
            ("_hysteresis_tracker", -1, ">= 0"),
        )
    },
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_no_state_is_refused_and_changes_nothing(name: str) -> None:
    state, key, got, remedy = STATES[name]
    scale = make(init=32.0)
    before = scale.state_dict()
    if isinstance(state, dict) and len(state) == 1:
        state = before | state
    Refusal(lambda: scale.load_state_dict(state), key, got, remedy).check()
    assert scale.state_dict() == before


@pytest.mark.parametrize(
    ("options", "got", "remedy"),
    [
        ({"init": 2.0, "min_scale": 4.0}, "init=2.0, min=4.0", "min <= init"),
        ({"init": 2.0, "max_scale": 1.0}, "max=1.0", "init <= max"),
        ({"min_scale": 0.0}, "min=0.0", "0 < min"),
        ({"max_scale": float("inf")}, "max=inf", "max < inf"),
        ({"hysteresis": 0}, "hysteresis=0", ">= 1"),
        ({"growth_interval": 0}, "growth_interval=0", ">= 1"),
        ({"growth_factor": 0.5}, "growth_factor=0.5", "> 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0", "between 0 and 1"),
    ],
)
def test_impossible_schedules_are_refused_with_the_value(options: dict[str, Any], got: str, remedy: str) -> None:
    Refusal(lambda: make(**options), "precision.loss_scale", got, remedy).check()


@pytest.mark.parametrize(("saved", "loaded"), [(None, 3), (0, 0), (2, 2), (5, 3)])
def test_a_hysteresis_that_was_not_saved_is_full_and_a_saved_one_is_kept_within_it(
    saved: int | None, loaded: int
) -> None:
    scale = LossScale(torch.device("cpu"), hysteresis=3)
    state = scale.state_dict()
    del state["_hysteresis_tracker"]
    scale.load_state_dict(state if saved is None else state | {"_hysteresis_tracker": saved})
    assert int(scale.hysteresis_tracker) == loaded


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("overflows", [(), (3, 6)], ids=["clean", "overflows"])
def test_a_step_that_is_done_again_is_not_counted_twice(
    steps: int, hysteresis: int, overflows: tuple[int, ...]
) -> None:
    once, twice = (LossScale(CPU, init=8, growth_interval=3, max_scale=16, hysteresis=hysteresis) for _ in range(2))
    for number in range(steps):
        overflow = torch.tensor(number in overflows)
        once.update(overflow)
        if number % 2:
            twice.update(~overflow)  # whatever it was the first time
            twice.uncount()
        twice.update(overflow)
    assert once.state_dict() == twice.state_dict()
