"""A ScriptModule trains like the module it was made of, and what it cannot do is refused by name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.schema import ParallelConfig, TrainConfig
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.precision.skip_diagnosis import SkipDiagnosis
from dtrain.training import build
from tests.forked_python import forked_python
from tests.refusals import refused
from tests.toys import Net, NormNet, world
from tests.whole_runs import metrics, train_on

STEPS = ("train.eval_every=4", "train.ema_decay=0.5", "checkpoint.every_steps=2", "data.num_workers=0")


def scripted(classes: int = 10, width: int = 8) -> nn.Module:
    return torch.jit.script(NormNet(classes, width))


def half_scripted() -> nn.Module:
    """An ordinary model with a traced part."""
    net = Net()
    net.trunk = torch.jit.trace(net.trunk, torch.ones(2, 3))
    return net


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_script_module_trains_and_resumes_as_the_module_it_was_made_of(
    digits: Path, tmp_path: Path, precision: str
) -> None:
    def trained(target: str, name: str, *lengths: int) -> list[float]:
        for steps in lengths:
            model = (f"model._target_={target}", "model.width=8")
            train_on(2, tmp_path / name, *model, *STEPS, f"precision={precision}", f"train.max_steps={steps}")
        run_dir = tmp_path / name
        return [*metrics(run_dir), metrics(run_dir, "eval/loss")[-1], *metrics(run_dir, "train/grad_norm")]

    ours = trained("tests.precision.test_modules.scripted", "scripted", 2, 4)
    plain = trained("tests.toys.NormNet", "plain", 4)
    assert len(ours) == 4 + 1 + 4
    # Autocast rounds at other places in compiled code.
    assert ours == pytest.approx(plain, rel=1e-4 if precision == "fp32" else 2e-2)
    if precision == "bf16":
        arguments = [f"run.dir={tmp_path / 'scripted'}", f"out={tmp_path}", "checkpoint=latest"]
        command = [forked_python(), "-m", "dtrain.evaluate", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = re.search(r"eval/loss +([\d.]+)", done.stdout)
        assert found is not None
        assert float(found[1]) == pytest.approx(metrics(tmp_path / "scripted", "eval/loss")[-1], rel=1e-3)


@pytest.mark.parametrize("model", [scripted, half_scripted])
def test_the_diagnosis_of_skipped_steps_leaves_script_modules_out(model: Any) -> None:
    diagnosis = SkipDiagnosis(model())
    diagnosis.follow(1)
    assert diagnosis.armed
    diagnosis.follow(0)
    assert not diagnosis.armed


@pytest.mark.parametrize(
    ("model", "train", "names"),
    [
        (scripted, {"compile": True}, ["train.compile: the model is a ScriptModule"]),
        (scripted, {"compile": ["conv1"]}, ["train.compile: conv1 is a ScriptModule"]),
        (
            half_scripted,
            {"checkpoint_activations": ["trunk"]},
            ["train.checkpoint_activations: trunk is a ScriptModule"],
        ),
    ],
)
def test_what_needs_python_to_run_the_module_is_refused(model: Any, train: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        build.prepare_model(model(), TrainConfig(**train), ParallelConfig(), world())


def test_a_script_module_is_not_kept_in_fp32() -> None:
    with refused(ConfigError, "precision.keep_fp32", "conv1", "ScriptModule"):
        Precision("bf16", ("conv1",)).wrap_keep_fp32(scripted())
