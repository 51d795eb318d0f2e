"""Spikes of the gradient norm: the rule, on the host and on a device."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.precision.spike import HostSpikeRule, SpikeOptions, SpikeRule

OPTIONS = SpikeOptions(factor=6, window=16)


def found(norms: list[float], options: SpikeOptions = OPTIONS) -> list[int]:
    rule = HostSpikeRule(options)
    return [number for number, norm in enumerate(norms) if rule.is_spike(norm, True)]


def plain(norms: list[float], options: SpikeOptions = OPTIONS) -> list[int]:
    """The rule as the module's docstring has it."""
    spikes = []
    for number, norm in enumerate(norms):
        window = norms[max(0, number - options.window) : number]
        if len(window) < options.window:
            continue
        median = statistics.median_high(window)
        deviation = max(statistics.median_high([abs(each - median) for each in window]), 0.01 * median)
        if norm > median + options.factor * deviation:
            spikes.append(number)
    return spikes


def test_a_norm_far_above_the_last_ones_is_a_spike_once_the_window_is_full() -> None:
    norms = [1.0 + 0.01 * (n % 5) for n in range(40)]
    norms[7] = norms[25] = 5.0
    norms[30] = 0.01  # downwards is none
    assert found(norms) == plain(norms) == [25]


def test_a_lasting_rise_is_accepted_after_half_a_window() -> None:
    norms = [1.0] * 20 + [3.0] * 30
    assert found(norms) == list(range(20, 20 + OPTIONS.window // 2))


@pytest.mark.parametrize("seed", range(20))
def test_host_and_device_find_the_same_spikes_and_continue_alike_after_a_restart(seed: int) -> None:
    draw = random.Random(seed)
    options = SpikeOptions(factor=draw.choice([2, 6]), window=draw.choice([8, 9, 16]))
    norms = [draw.lognormvariate(0, 0.5) * (20 if draw.random() < 0.05 else 1) for _ in range(120)]
    finite = [draw.random() > 0.1 for _ in norms]
    host, device = HostSpikeRule(options), SpikeRule(options, torch.device("cpu"))
    spikes = []
    for number, (norm, good) in enumerate(zip(norms, finite, strict=True)):
        if number in (5, 50):
            assert host.state_dict() == device.state_dict()
            again, on_device = HostSpikeRule(options), SpikeRule(options, torch.device("cpu"))
            again.load_state_dict(host.state_dict())
            on_device.load_state_dict(device.state_dict())
            host, device = again, on_device
        one = host.is_spike(norm, good)
        other = device.is_spike(torch.tensor(norm, dtype=torch.float64), torch.tensor(good))
        assert one == bool(other)
        spikes += [number] * one
    good_norms = [norm for norm, good in zip(norms, finite, strict=True) if good]
    numbers = [number for number, good in enumerate(finite) if good]
    assert spikes == [numbers[place] for place in plain(good_norms, options)]


def test_a_smaller_window_keeps_the_last_norms_of_a_checkpoint() -> None:
    for rule in (HostSpikeRule(OPTIONS), SpikeRule(OPTIONS, torch.device("cpu"))):
        rule.load_state_dict([float(n) for n in range(40)])
        assert rule.state_dict() == [float(n) for n in range(24, 40)]


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        ("skip", ["train.spike", "'skip'", "factor: 6"]),
        ({"factor": 0}, ["train.spike.factor", "0", "above 0"]),
        ({"window": 3}, ["train.spike.window", "3", "at least 8"]),
        ({"action": "stop"}, ["train.spike.action", "stop", "warn or skip"]),
        ({"actoin": "skip"}, ["actoin", "action"]),
    ],
)
def test_impossible_options_are_refused(node: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        SpikeOptions.parse(node)
    for part in parts:
        assert part in str(raised.value)
