"""``doctor lr``: the learning rate range test of a run, and the suggestion from a curve."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # shard_model imports it, which takes seconds: here once, and not in every rank
from PIL import Image
from torch.nn.functional import cross_entropy

from dtrain import __main__ as command
from dtrain import command_line
from dtrain.config.compose import Composed
from dtrain.data import Batch
from dtrain.distributed.process_group import process_group
from dtrain.doctor import lr
from dtrain.doctor.__main__ import main
from dtrain.doctor.lr import Curve, Sweep, plot, range_test, suggest
from dtrain.doctor.measure import endless_batches
from dtrain.errors import ConfigError
from dtrain.tasks import Classification
from dtrain.training.build import build_run
from dtrain.training.task import Output
from tests.ranks import run_ranks
from tests.refusals import assert_refused, refused
from tests.whole_runs import tree

QUIET = ("experiment=digits", "tracker=none", "data.num_workers=0")
SGD = (
    "optimizer=sgd",
    "optimizer.momentum=0",
    "optimizer.nesterov=false",
    "optimizer.weight_decay=0",
    "train.clip_norm=null",
)


class NotFinite(Classification):
    """A task whose losses are NaN."""

    def __call__(self, model: torch.nn.Module, batch: Batch) -> Output:
        output = super().__call__(model, batch)
        return Output(output.loss_sum * math.nan, output.count)


class NotFiniteAbove(Classification):
    """A task whose losses are NaN instead of above 3, so that the run skips all steps after it has diverged."""

    def __call__(self, model: torch.nn.Module, batch: Batch) -> Output:
        output = super().__call__(model, batch)
        factor = 1.0 if output.loss_sum < 3 * output.count else math.nan
        return Output(output.loss_sum * factor, output.count, output.metrics)


def outcome_of(*arguments: str, ranks: int = 1) -> tuple[list[int], str]:
    """The exit code of each rank, and rank 0's output."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return main(["lr", *QUIET, *arguments]), text.getvalue()

    results = run_ranks(ranks, one, init=False)
    assert not any(text for _, text in results[1:])
    return [code for code, _ in results], results[0][1]


def swept(file: Path, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """The JSON that a test writes."""
    outcome_of(*arguments, f"--json={file}", ranks=ranks)
    found = json.loads(file.read_text())
    assert isinstance(found, dict)
    return found


# -- the sweep


@pytest.mark.slow
def test_the_losses_are_those_of_a_plain_loop_with_growing_rates(digits: Path) -> None:
    def rank(number: int) -> tuple[Curve, list[float]]:
        results: list[tuple[Curve, list[float]]] = []

        def job(composed: Composed) -> None:
            with process_group(60) as world:
                curve = range_test(composed.cfg, world, Sweep(0.001, 1.0, 20)).curve
                run, _ = build_run(composed.cfg, Path(), world, with_eval_data=False)
                model, batches = run.model.train(), endless_batches(run.train_loader)
                losses = []
                for step in range(21):
                    batch = next(batches).to(world.device)
                    loss = cross_entropy(model(batch["image"]), batch["label"])
                    losses.append(loss.item())
                    model.zero_grad()
                    loss.backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            assert parameter.grad is not None
                            parameter -= 0.001 * 1000 ** (step / 19) * parameter.grad
                results.append((curve, losses))

        command_line.run(job, [*QUIET, *SGD])
        return results[0]

    [(curve, losses)] = run_ranks(1, rank, init=False)
    np.testing.assert_allclose(curve.rates, np.geomspace(0.001, 1, 20))
    np.testing.assert_allclose([curve.first, *curve.losses], losses, rtol=1e-4)
    assert (sum(curve.skips), curve.end) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_find_the_losses_of_one(tmp_path: Path, digits: Path, parallel: str) -> None:
    options = (*SGD, "steps=20", "min=1e-3", "max=1", f"parallel={parallel}")
    one, two = (swept(tmp_path / f"{ranks}.json", *options, ranks=ranks) for ranks in (1, 2))
    losses = [[point["loss"] for point in found["points"]] for found in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert two["suggestion"] == one["suggestion"]


def test_parameter_groups_keep_their_ratio(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(number: int) -> list[float]:
        runs = []
        build = lr.build_run
        monkeypatch.setattr(lr, "build_run", lambda *args, **options: runs.append(build(*args, **options)) or runs[-1])
        groups = "+optimizer.groups={first: {patterns: ['0'], lr: 0.1}}"
        main(["lr", *QUIET, groups, "steps=20", "min=1e-4", "max=1e-2"])
        return [group["lr"] for group in runs[0][0].optimizer.param_groups]

    [rates] = run_ranks(1, rank, init=False)
    assert sorted(rates) == pytest.approx([1e-3, 1e-2])


def test_skipped_steps_of_fp16_are_counted_and_do_not_advance_the_rate(tmp_path: Path, digits: Path) -> None:
    # Convolutions in fp16 are slow on a CPU.
    options = ("precision=fp16", "precision.loss_scale.init=16777216", "model.width=4", "train.global_batch_size=16")
    options += ("steps=20", "min=1e-5", "max=1e-2")
    _, text = outcome_of(*options, f"--json={tmp_path / 'lr.json'}")
    found = json.loads((tmp_path / "lr.json").read_text())
    assert found["first_skipped"] >= 5
    assert len(found["points"]) == 20
    assert f"skipped     {found['first_skipped'] + sum(it['skipped'] for it in found['points'])} steps" in text
    assert "skipped" in next(line for line in text.splitlines() if line.startswith("   rate"))


def test_the_sweep_ends_where_all_steps_are_skipped(tmp_path: Path, digits: Path) -> None:
    task = "task._target_=tests.doctor.test_lr.NotFiniteAbove"
    found = swept(tmp_path / "lr.json", task, "steps=40", "min=1e-5", "max=1e3", "train.max_consecutive_skips=4")
    assert "4 steps in a row were skipped" in found["end"]
    assert found["points"][-1]["skipped"] >= 4
    assert len(found["points"]) < 40
    assert all(math.isfinite(point["loss"]) for point in found["points"])


def test_losses_that_are_never_finite_are_an_error(digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["lr", *QUIET, "task._target_=tests.doctor.test_lr.NotFinite"])
        return ended.value.code

    assert run_ranks(1, rank, init=False) == [1]
    assert_refused(capfd.readouterr().err, "not finite", "10 steps in a row", "before any rate was tried")


def test_an_unusable_config_is_refused(digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["lr", *QUIET, "optimizer.lr=0"])
        return ended.value.code

    assert run_ranks(1, rank, init=False) == [1]
    assert_refused(capfd.readouterr().err, "optimizer.lr", "0", "above 0")


# -- the command


@pytest.mark.slow
def test_the_digits_get_a_rate_that_trains_them(tmp_path: Path, digits: Path) -> None:
    png, file = tmp_path / "curve.png", tmp_path / "lr.json"
    options = (f"run.dir={tmp_path / 'run'}", "train.ema_decay=0.9", "train.spike={action: skip}")
    [code], text = outcome_of(*options, f"--png={png}", f"--json={file}")
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "lr.json"]
    with Image.open(png) as picture:
        assert picture.width > 500
    found = json.loads(file.read_text())
    assert 5e-4 < found["suggestion"] < 1e-2  # docs/doctor.md: 3e-3 reaches 98.6 %, 5e-4 only 94 %
    assert found["falling"] < found["suggestion"] < found["lowest"]
    assert "4 times" in found["end"]
    for part in (f"optimizer.lr={found['suggestion']:g}", lr.RULE, "used 3.", "schedule", "global batch", "fastai"):
        assert part in text, part


def test_a_curve_that_ends_too_early_has_no_suggestion(digits: Path) -> None:
    [code], text = outcome_of("min=1e3", "max=1e6")
    assert code == 1
    assert_refused(text, "suggestion  none", "4 times", "lower min=")


@pytest.mark.slow
def test_a_run_is_read_and_stays_as_it_is(
    finished_run: Path, torchrun: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(finished_run)
    sweep = ["steps=60", "min=1e-5", "max=10"]
    assert command.main(["doctor", "lr", "--nproc", "2", f"run.dir={finished_run}", *sweep]) == 0
    [called] = torchrun
    assert called[called.index("-m") :][:4] == ["-m", "dtrain", "doctor", "lr"]
    arguments = called[called.index("lr") :]

    def rank(number: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return main(arguments), text.getvalue()

    (code, text), _ = run_ranks(2, rank, init=False)
    assert code == 0, text
    assert re.search(r"use it +optimizer\.lr=[\d.e-]+$", text, re.MULTILINE)
    assert tree(finished_run) == before


@pytest.mark.slow
def test_the_command_to_use_the_rate_has_what_was_typed_and_the_processes(digits: Path) -> None:
    codes, text = outcome_of("steps=20", "min=1e-5", "max=1", "train.clip_norm=2.0", ranks=2)
    assert codes == [0, 0]
    assert f"dtrain train --nproc 2 {' '.join(QUIET)} train.clip_norm=2.0 optimizer.lr=" in text


# -- the suggestion


def curve_of(losses: Any, rates: Any, end: str = "") -> Curve:
    return Curve(rates, np.asarray(losses, dtype=np.float64), float(losses[0]), [0] * (len(rates) + 1), end)


RATES = np.geomspace(1e-7, 10, 100)
#: Falls from 2 to 1, fastest at a rate of 1e-3 on the logarithmic axis, and rises above 1.
FALLING = 1 + 1 / (1 + (RATES / 1e-3) ** 2) + RATES**2


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rate_at_which_the_loss_falls_fastest_is_suggested(scale: float, noise: float) -> None:
    for seed in range(20):
        noisy = FALLING * (1 + noise * np.random.default_rng(seed).standard_normal(100))
        found = suggest(curve_of(scale * noisy, RATES, "it diverged"))
        assert found.problem == ""
        assert found.rate == pytest.approx(1e-3, rel=0.3 if noise == 0 else 0.8)
        assert found.lowest is not None
        assert 1e-3 < found.lowest < 1


def test_losses_below_zero_have_a_suggestion_too() -> None:
    assert suggest(curve_of(FALLING - 5, RATES, "it diverged")).rate == pytest.approx(1e-3, rel=0.3)


def test_one_huge_loss_does_not_move_the_suggestion() -> None:
    losses = FALLING.copy()
    losses[-20:] = 1e30
    assert suggest(curve_of(losses, RATES, "it diverged")).rate == pytest.approx(1e-3, rel=0.3)


def test_a_loss_that_only_fluctuates_has_no_suggestion() -> None:
    for seed in range(50):
        noise = 2 + 0.1 * np.random.default_rng(seed).standard_normal(100)
        assert_refused(suggest(curve_of(noise, RATES)).problem, "noise", "", "max=1e+03", "steps=N")


def test_a_loss_that_still_falls_at_the_highest_rate_asks_for_a_higher_one() -> None:
    rates = np.geomspace(1e-7, 1e-3, 100)
    losses = 1 + 1 / (1 + (rates / 1e-3) ** 2)
    assert_refused(suggest(curve_of(losses, rates)).problem, "falls fastest", "near the highest", "max=0.1")


def test_a_loss_that_falls_at_once_asks_for_a_lower_rate() -> None:
    rates = np.geomspace(1e-3, 10, 100)
    losses = 1 + 1 / (1 + (rates / 1e-3) ** 2) + rates**2
    assert_refused(
        suggest(curve_of(losses, rates, "it diverged")).problem, "falls fastest", "near the lowest", "min=1e-05"
    )


def test_a_plateau_is_no_obstacle() -> None:
    losses = 1 + 1 / (1 + (RATES / 1e-3) ** 2)
    assert suggest(curve_of(losses, RATES)).rate == pytest.approx(1e-3, rel=0.3)


def test_the_sweep_ends_where_the_running_mean_is_four_times_its_lowest() -> None:
    divergence = lr._Divergence()
    assert not any(divergence.after(loss) for loss in (2.0, 1.5, 1.0, 0.5, 1.9, 0.5))
    assert [bool(divergence.after(loss)) for loss in (5.0, 40.0)] == [False, True]


def test_the_sweep_does_not_end_below_the_first_loss() -> None:
    divergence = lr._Divergence()
    assert not any(divergence.after(loss) for loss in (2.0, *[1e-3] * 100, 0.5, 0.5))
    assert divergence.after(60.0)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ({"lowest": "0"}, "min=0"),
        ({"lowest": "small"}, "min=small"),
        ({"highest": "inf"}, "max=inf"),
        ({"highest": "1e-6"}, "max=1e-6"),
        ({"steps": "19"}, "steps=19"),
        ({"steps": "1e2"}, "steps=1e2"),
    ],
)
def test_an_impossible_sweep_is_refused(bad: dict[str, str], got: str) -> None:
    with refused(ConfigError, "doctor lr", got, "want"):
        Sweep.parse(**{"lowest": "1e-7", "highest": "10", "steps": "100"} | bad)


def test_the_plot_shows_losses_the_smoothed_loss_and_the_suggestion() -> None:
    lines = plot(curve_of(FALLING, RATES), 1e-3, columns=81, rows=10).splitlines()
    drawn = [line.partition("|")[2] for line in lines[1:11]]
    assert all(len(line) <= 81 for line in drawn)
    assert drawn[5].startswith("***")  # the first losses, 2 of 1 to 3
    assert sum(line[40:41] in ("|", "*") for line in drawn) == 10  # 1e-3 is in the middle of 1e-7 to 10
    assert float(lines[1].split("|")[0]) == pytest.approx(3, rel=1e-2)  # losses are cut at 2 + (2 - 1)
    assert [mark.strip() for mark in lines[12].split()] == [f"1e{decade}" for decade in range(-7, 2)]
