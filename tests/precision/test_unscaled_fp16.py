"""``precision.loss_scale=none``: fp16 without loss scaling, whose small gradients become zero."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.distributed.process_group import process_group
from dtrain.doctor.measure import endless_batches
from dtrain.errors import ConfigError
from dtrain.models import MLP
from dtrain.precision import Precision
from dtrain.tasks import textbook
from dtrain.training.build import build_run
from tests.config.command_lines import compose
from tests.refusals import refused
from tests.whole_runs import metrics, records, train_on

UNIT = 1e-4  # of the outputs: a network whose results are small numbers
NETWORK = (f"model._target_={__name__}.SmallOutputs", "model.widths=[10,20,1]")
DATA = (f"data.train.function._target_={__name__}.small_targets", "data.train.function.points=8")


class SmallOutputs(MLP):
    """10, 20 and 1 units, and outputs of about 1e-4."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * UNIT


def small_targets(sample: int, rng: np.random.Generator, points: int = 1) -> dict[str, np.ndarray]:
    made = textbook.sine(sample, rng, points)
    return {"x": made["x"], "y": made["y"] * np.float32(UNIT)}


def zeros_in_the_first_layer(*overrides: str) -> float:
    """Share of zeros in the gradient of the first layer's weights, over ten steps of a training."""
    cfg = compose("experiment=regression", *NETWORK, *DATA, "data.num_workers=0", *overrides).cfg
    seen: list[Tensor] = []
    with process_group(60.0) as world:
        run, _ = build_run(cfg, Path(), world, with_eval_data=False)
        first = next(run.model.parameters())
        assert first.shape == (20, 10)
        first.register_hook(lambda gradient: seen.append(gradient == 0))
        with closing(run.train_loader):
            for batch in islice(endless_batches(run.train_loader), 10):
                run.step.accumulate([batch], 1)
                run.step.apply()
                outcome = run.step.settle()
                assert outcome is not None
                assert outcome.stats.applied
    return torch.stack(seen).double().mean().item()


@pytest.mark.slow
def test_without_scaling_the_first_layers_gradient_is_zero_and_with_it_it_is_not() -> None:
    in_fp32 = zeros_in_the_first_layer("precision=fp32")
    unscaled = zeros_in_the_first_layer("precision=fp16", "precision.loss_scale=none")
    scaled = zeros_in_the_first_layer("precision=fp16", "precision.loss_scale.init=16777216")
    assert in_fp32 < 0.05
    assert unscaled == 1.0
    assert scaled < in_fp32 + 0.05


@pytest.mark.slow
def test_a_run_without_scaling_warns_resumes_and_logs_no_scale(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ("precision=fp16", "data.num_workers=0", "model.widths=[10,4,1]", "data.eval=null")
    for steps in (2, 4):
        unscaled = ("precision.loss_scale=none", f"train.max_steps={steps}")
        train_on(1, tmp_path, *small, *unscaled, experiment="regression")
        shown = capfd.readouterr()
        assert "fp16 (autocast fp16, no loss scaling)" in shown.out
        assert "precision.loss_scale=none" in shown.out + shown.err
        assert "become zero" in shown.out + shown.err
    assert not any("precision/loss_scale" in record for record in records(tmp_path))
    assert metrics(tmp_path, "applied_steps") == [1, 2, 3, 4]
    # The same run may go on with a scale, which starts at its first value.
    train_on(1, tmp_path, *small, "train.max_steps=5", experiment="regression")
    assert "precision.loss_scale: " in capfd.readouterr().out
    assert metrics(tmp_path, "precision/loss_scale") == [65536.0]


@pytest.mark.parametrize("value", ["dynamic", "128", "null", "true"])
def test_any_other_value_is_refused(value: str) -> None:
    cfg: Any = compose("experiment=regression", "precision=fp16", f"precision.loss_scale={value}").cfg
    with process_group(60.0) as world, refused(ConfigError, "precision.loss_scale", "none", "init"):
        build_run(cfg, Path(), world, with_eval_data=False)


def test_only_fp16_has_gradients_to_scale() -> None:
    assert Precision("fp16").scales_gradients
    assert not Precision("fp16", loss_scaling=False).scales_gradients
    assert not Precision("bf16").scales_gradients
