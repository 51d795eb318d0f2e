"""The table is complete, and says nothing that is not tested."""

from __future__ import annotations

import importlib

import pytest

from tests.precision.scenarios.table import SCENARIOS, Scenario


def test_every_scenario_has_its_row() -> None:
    numbers = {int(scenario.number[1:3]) for scenario in SCENARIOS}
    assert numbers == set(range(29)) - {24, 27}
    assert len({scenario.number for scenario in SCENARIOS}) == len(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.number)
def test_every_row_names_tests_that_exist(scenario: Scenario) -> None:
    assert scenario.shown
    for place in scenario.shown:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name, None)), place
