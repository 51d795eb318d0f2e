"""``dtrain doctor lr``: a learning rate finder (LR range test), which suggests a learning rate for a run.

    dtrain doctor lr experiment=digits [min=1e-7] [max=10] [steps=100] [key=value ...]

It trains the configured run in memory while the learning rate grows exponentially, one optimizer step at each rate, and
watches the loss: it falls where the rate is useful, and rises where the rate is too large (Smith, Cyclical Learning Rates for
Training Neural Networks, 2015, https://arxiv.org/abs/1506.01186; the exponential sweep is fastai's).

* The *loss of a rate* is the training loss of the step after the update with it, on a new global batch.
* The *smoothed* loss is a weighted mean over neighbouring rates on both sides, so that it does not lag behind.
* The suggested rate is the one at which the smoothed loss falls fastest (``RULE``). It is compared with the rate of the
  *lowest* smoothed loss, at which training is about to become unstable.
* The loss *diverges* where its running mean is above 4 times its own minimum, and above the first loss.

A skipped step does not advance the sweep. Nothing is read from or written to a run directory.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dtrain import command_line
from dtrain.command_line import add_json_option, output_file, write_json
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.schema import Config
from dtrain.console import align_rows, print_banner, progress
from dtrain.data.loading.batch import DeviceCopies
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.process_exit import exit_with_torchrun
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.torchrun import record_failure
from dtrain.distributed.world import World, join_srun
from dtrain.doctor.measure import endless_batches
from dtrain.errors import ConfigError, add_note
from dtrain.files import replace_file
from dtrain.runs.recompose import recompose_if_run, take
from dtrain.runs.trust import AS_TYPED
from dtrain.training.build import build_run
from dtrain.training.monitor.memory import out_of_memory_explained
from dtrain.training.step import TooManySkips

#: How the rate is chosen, and whose rule it is.
RULE = "the smoothed loss falls fastest there: the rule `steep` of fastai's lr_find, https://docs.fast.ai/callback.schedule.html"
_NARROWEST = 100.0  # max / min
_MARGIN = 3.0  # of the suggestion to both ends of the sweep
_DIVERGED = 4.0  # times the lowest running mean, as fastai
_RUNNING = 0.9  # decay of the running mean
_SMOOTHED = 0.25  # standard deviation of the weights in decades of the rate; at least _MIN_SMOOTHED steps
_MIN_SMOOTHED = 2.0
_MIN_STEPS = 20
_FALL_OVER_NOISE = 2.0  # noise alone makes the smoothed loss fall by about 1.5 times its own standard deviation
_PLOT_COLUMNS, _PLOT_ROWS, _TABLE_ROWS = 72, 14, 12


@dataclass(frozen=True)
class Sweep:
    """The rates of a range test, equally far apart on a logarithmic axis.

    Attributes:
        lowest: The first rate.
        highest: The last rate.
        steps: Their number.
    """

    lowest: float = 1e-7
    highest: float = 10.0
    steps: int = 100

    @classmethod
    def parse(cls, lowest: str, highest: str, steps: str) -> Sweep:
        """The sweep that ``min=``, ``max=`` and ``steps=`` describe.

        Raises:
            ConfigError: If one of them is no positive number, ``max`` is below 100 times ``min``, or there are fewer than 20
                steps.
        """
        low, high = _rate("min", lowest), _rate("max", highest)
        if not steps.isdecimal() or int(steps) < _MIN_STEPS:
            raise ConfigError(f"doctor lr: got steps={steps}, want a whole number of at least {_MIN_STEPS}.")
        if high < _NARROWEST * low:
            raise ConfigError(
                f"doctor lr: got min={lowest} and max={highest}, want max to be at least {_NARROWEST:g} times min."
            )
        return cls(low, high, int(steps))

    def rate(self, applied_steps: int) -> float:
        """The learning rate after this many applied steps; the highest one after the sweep."""
        share = min(applied_steps / (self.steps - 1), 1.0)
        return float(self.lowest * (self.highest / self.lowest) ** share)


def _rate(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"doctor lr: got {name}={text}, want a learning rate above 0, such as 1e-5.")
    return value


@dataclass(frozen=True, eq=False)
class Curve:
    """The losses of a range test.

    Attributes:
        rates: Learning rates, float64, shape ``[n]``, ascending.
        losses: Loss after the update with each rate, float64, shape ``[n]``, finite.
        first: Loss before the first update.
        skips: Skipped steps before the first update, and after the update with each rate, shape ``[n + 1]``; the last one
            has those that ended the sweep.
        end: Why the sweep ended before its highest rate; empty if it did not.
    """

    rates: np.ndarray
    losses: np.ndarray
    first: float
    skips: Sequence[int]
    end: str = ""

    def shown(self) -> np.ndarray:
        """The losses; larger ones are cut at as much above the first as the lowest is below it. float64, shape ``[n]``."""
        fall = self.first - float(self.losses.min())
        shown: np.ndarray = np.minimum(self.losses, self.first + max(fall, 0.1 * abs(self.first)))
        return shown

    def smoothed(self) -> np.ndarray:
        """Weighted means of ``shown`` over neighbouring rates, float64, shape ``[n]``."""
        positions = np.arange(len(self.rates))
        decades = math.log10(self.rates[-1] / self.rates[0]) if len(self.rates) > 1 else 1.0
        width = max(_MIN_SMOOTHED, _SMOOTHED * (len(self.rates) - 1) / decades)
        weights = np.exp(-0.5 * ((positions[:, None] - positions[None, :]) / width) ** 2)
        means: np.ndarray = weights @ self.shown() / weights.sum(1)
        return means


@dataclass(frozen=True)
class Suggestion:
    """The result of a range test.

    Attributes:
        rate: The suggested learning rate, two significant digits; None if there is a problem.
        lowest: Rate with the lowest smoothed loss; None if the loss does not fall.
        falling: Rate at which the smoothed loss has fallen by a tenth of its whole fall; None likewise.
        problem: Why there is no suggestion, and what to do; empty if there is one.
    """

    rate: float | None
    lowest: float | None = None
    falling: float | None = None
    problem: str = ""


def suggest(curve: Curve) -> Suggestion:
    """Applies ``RULE`` to a curve, unless the curve does not show where the loss falls fastest."""
    rates = curve.rates
    if len(rates) < _MIN_STEPS // 2:
        return Suggestion(None, problem=f"the sweep ended at once ({curve.end}). Set a lower min=RATE.")
    smoothed = curve.smoothed()
    bottom = int(smoothed.argmin())
    fall = smoothed[0] - smoothed[bottom]
    noise = float(np.std((curve.shown() - smoothed)[: bottom + 1]))
    if fall <= _FALL_OVER_NOISE * noise:
        wider = "a lower min=RATE" if curve.end else f"max={100 * rates[-1]:.1g}"
        return Suggestion(
            None,
            problem=f"the loss does not fall at any rate by more than its noise of {noise:.2g}. Set {wider}, more steps=N, "
            "or a larger train.global_batch_size, which has less noise. Otherwise the model does not learn from this data.",
        )
    slopes = np.gradient(smoothed, np.log10(rates))[: bottom + 1]
    steepest, lowest = float(rates[slopes.argmin()]), float(rates[bottom])
    falling = float(rates[int(np.argmax(smoothed <= smoothed[0] - 0.1 * fall))])
    if not curve.end and steepest * _MARGIN > rates[-1]:
        problem = f"the loss falls fastest at {steepest:.2g}, near the highest rate. Set max={100 * rates[-1]:.1g}."
        return Suggestion(None, lowest, falling, problem)
    if steepest < _MARGIN * rates[0]:
        problem = f"the loss falls fastest at {steepest:.2g}, near the lowest rate. Set min={rates[0] / 100:.1g}."
        return Suggestion(None, lowest, falling, problem)
    return Suggestion(float(f"{steepest:.2g}"), lowest, falling)


# -- the sweep


@dataclass(frozen=True, eq=False)
class RangeTest:
    """A finished range test of a run.

    Attributes:
        curve: Its losses.
        warnings: About the precision on this device, for this model.
        epochs: How often the training data was used.
    """

    curve: Curve
    warnings: Sequence[str]
    epochs: float


def range_test(
    cfg: Config, world: World, sweep: Sweep, on_progress: Callable[[int], None] = lambda steps: None
) -> RangeTest:
    """Collective. Trains a run in memory with the rates of the sweep in place of its schedule.

    Averaged weights and the search for spikes are turned off, because they do not change the losses or would hide the
    divergence. Parameter groups keep the ratio of their rates.

    Args:
        cfg: The composed config.
        world: The ranks.
        sweep: The rates.
        on_progress: Called with 1 after each applied step.

    Raises:
        ConfigError: On every rank, if the trainer would raise it, or ``optimizer.lr`` is 0.
        TooManySkips: On every rank, if no step can be applied with the initial weights.
    """
    cfg = deepcopy(cfg)
    cfg.train.ema_decay, cfg.train.spike = None, None
    run, warnings = build_run(cfg, Path(), world, with_eval_data=False)
    run.model.train()
    step, loader = run.step, run.train_loader
    base = _base_rate(cfg, run.optimizer)
    step.schedule = lambda applied_steps: sweep.rate(applied_steps) / base
    losses: list[float] = []  # before the first update, and after each of the others
    skips, divergence, end = [0], _Divergence(), ""
    to_device, micro_batches = DeviceCopies(world.device), loader.micro_batches_per_step
    explained = out_of_memory_explained(
        lambda: step.step + 1,
        rows=lambda: loader.rows_per_micro_batch,
        share=-(-cfg.train.global_batch_size // world.size),
        device=world.device,
        ranks=world.size,
    )
    with closing(loader), explained:
        batches = endless_batches(loader)
        while len(losses) <= sweep.steps and not end:
            step.accumulate(map(to_device, islice(batches, micro_batches)), micro_batches)
            step.apply()
            try:
                outcome = step.settle()
            except TooManySkips as error:
                if not losses:
                    add_note(error, "doctor lr: this is before any rate was tried.")
                    raise
                skips[-1] += 1
                end = f"{step.consecutive_skips} steps in a row were skipped"
                break
            assert outcome is not None  # a step was applied
            stats = outcome.stats
            if not stats.applied:
                skips[-1] += 1
                continue
            losses.append(stats.loss_sum / stats.count)
            skips.append(0)
            on_progress(1)
            end = divergence.after(losses[-1])
    rates = np.array([sweep.rate(number) for number in range(len(losses) - 1)])
    *skips, last = skips  # after the update that has no loss
    skips[-1] += last
    curve = Curve(rates, np.array(losses[1:]), losses[0], skips, end)
    return RangeTest(curve, warnings, step.step / loader.steps_per_epoch)


def _base_rate(cfg: Config, optimizer: Any) -> float:
    """The rate that ``optimizer.lr`` sets; parameter groups may have a different one."""
    configured = (cfg.optimizer or {}).get("lr")
    if not isinstance(configured, int | float):
        configured = optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"])
    if not float(configured) > 0:
        raise ConfigError(
            f"optimizer.lr: got {configured}, want a rate above 0: parameter groups keep their ratio to it."
        )
    return float(configured)


class _Divergence:
    """Finds where a sequence of losses diverges."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._first: float | None = None
        self._lowest = math.inf

    def after(self, loss: float) -> str:
        """The reason to stop after this loss; empty if there is none."""
        self._sum = _RUNNING * self._sum + (1 - _RUNNING) * loss
        self._weight = _RUNNING * self._weight + (1 - _RUNNING)
        mean = self._sum / self._weight
        self._first = mean if self._first is None else self._first
        self._lowest = min(self._lowest, mean)
        # A likelihood may be below zero, where 4 times the lowest loss says nothing.
        far = mean - self._lowest > (_DIVERGED - 1) * abs(self._lowest)
        return f"the loss rose above {_DIVERGED:g} times its lowest value" if far and mean > self._first else ""


# -- output


def plot(curve: Curve, suggested: float | None, columns: int = _PLOT_COLUMNS, rows: int = _PLOT_ROWS) -> str:
    """The curve for a terminal, ``columns`` x ``rows`` characters without the axes.

    ``.`` are losses, cut as in ``Curve.shown``; ``*`` is the smoothed loss, ``|`` the suggested rate.
    """
    shown, smoothed = curve.shown(), curve.smoothed()
    low, high = float(shown.min()), float(shown.max())
    left, right = math.log10(curve.rates[0]), math.log10(curve.rates[-1])
    grid = [[" "] * columns for _ in range(rows)]

    def column(rate: float) -> int:
        return round((math.log10(rate) - left) / ((right - left) or 1.0) * (columns - 1))

    def row(loss: float) -> int:
        return round((high - loss) / ((high - low) or 1.0) * (rows - 1))

    if suggested is not None:
        for line in grid:
            line[column(suggested)] = "|"
    for mark, values in ((".", shown), ("*", smoothed)):
        for rate, loss in zip(curve.rates, values, strict=True):
            grid[row(float(loss))][column(float(rate))] = mark
    labels = {0: f"{high:.4g}", rows - 1: f"{low:.4g}"}
    width = max(map(len, labels.values()))
    lines = [f"{labels.get(number, ''):>{width}} |{''.join(line)}".rstrip() for number, line in enumerate(grid)]
    decades = [" "] * (columns + 8)
    for decade in range(math.ceil(left - 1e-9), math.floor(right + 1e-9) + 1):
        start = column(10.0**decade)
        text = f"1e{decade}"
        if not "".join(decades[max(start - 1, 0) : start + len(text) + 1]).strip():
            decades[start : start + len(text)] = text
    axis = [f"{'':>{width}} +{'-' * columns}", f"{'':>{width}}  {''.join(decades)}".rstrip()]
    return "\n".join(["loss ('.'), smoothed ('*')", *lines, *axis, f"{'':>{width}}  learning rate"])


def table(curve: Curve) -> str:
    """Some of the rates, with their losses, and with skipped steps if there are any."""
    smoothed = curve.smoothed()
    chosen = np.unique(np.linspace(0, len(curve.rates) - 1, _TABLE_ROWS).round().astype(int))
    chosen = np.union1d(chosen, [smoothed.argmin()])
    # Skips between two rows are in the second.
    sums = np.cumsum(curve.skips)[chosen + 1]
    columns = {
        "rate": [f"{rate:.2g}" for rate in curve.rates[chosen]],
        "loss": [f"{loss:.4g}" for loss in curve.losses[chosen]],
        "smoothed": [f"{loss:.4g}" for loss in smoothed[chosen]],
    }
    if sums[-1]:
        columns["skipped"] = [str(skipped) for skipped in np.diff(sums, prepend=0)]
    return align_rows([[*columns], *zip(*columns.values(), strict=True)], range(4))


def picture_of(curve: Curve, found: Suggestion, title: str) -> bytes:
    """The curve as a PNG file."""
    from dtrain.report.charts import Chart, Line  # here because importing matplotlib takes half a second
    from dtrain.report.pictures import picture

    shown = curve.shown()
    lines = [
        Line("loss", "soft", curve.rates, shown, style="dots"),
        Line("smoothed", "run-0", curve.rates, curve.smoothed(), style="steps"),
    ]
    if found.rate is not None:
        ends = np.array([shown.min(), shown.max()])
        lines.append(Line(f"suggested: {found.rate:g}", "good", np.full(2, found.rate), ends))
    return picture(Chart("lr", title, lines=tuple(lines), x_label="learning rate", x_scale="log"))


def summary(
    cfg: Config, world: World, sweep: Sweep, test: RangeTest, found: Suggestion, command: str
) -> dict[str, str]:
    """The rows of the result: what was run, the losses, the suggestion with its rule, and what is not known."""
    curve, batch = test.curve, cfg.train.global_batch_size
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    rows = {
        "run": f"precision={cfg.precision.name} on {world.device.type}, {ranks}, global batch {batch}",
        "sweep": f"{sweep.lowest:g} to {sweep.highest:g}, {len(curve.rates)} of {sweep.steps} rates, one step each"
        + (f"; ended at {sweep.rate(max(len(curve.rates) - 1, 0)):.2g}: {curve.end}" if curve.end else ""),
    }
    if test.epochs > 1.05:
        rows["data"] = (
            f"used {test.epochs:.1f} times: losses of samples that were seen before are lower than of new ones"
        )
    if skipped := sum(curve.skips):
        rows["skipped"] = f"{skipped} steps, whose rate was used again"
    if found.rate is None:
        return rows | {"suggestion": f"none: {found.problem}"}
    falls = f"{curve.first:.4g} at first; falls from a rate of {found.falling:.2g} on, lowest at {found.lowest:.2g}"
    return rows | {
        "loss": falls if curve.end else f"{falls}. It does not diverge up to {curve.rates[-1]:g}",
        "suggestion": f"{found.rate:g}: {RULE}",
        "use it": command,
        "not known": "the best rate of a whole run, which also depends on its length and on the schedule, which multiplies\n"
        f"this rate. In short runs compare {found.rate / 3:.1g}, {found.rate:.1g} and {found.rate * 3:.1g}. With a different "
        "global batch, repeat the test.",
    }


# -- command line


def main(arguments: Sequence[str]) -> int:
    """Runs ``doctor lr`` with the arguments after ``lr``; returns the exit code: 1 if there is no suggestion.

    Raises:
        SystemExit: If the config cannot be composed or the run cannot be built.
    """
    options, rest = _parser().parse_known_args(arguments)
    chosen, rest = take(rest, min="1e-7", max="10", steps="100")
    codes: list[int] = []

    def job(composed: Composed) -> None:
        compose.require_choice(composed)
        sweep = Sweep.parse(chosen["min"], chosen["max"], chosen["steps"])
        codes.append(_run(composed.cfg, sweep, options, rest))

    join_srun()
    settle_network()
    command_line.run(job, rest, rewrite=recompose_if_run)
    return codes[0] if codes else 0


def _run(cfg: Config, sweep: Sweep, options: argparse.Namespace, typed: Sequence[str]) -> int:
    exit_with_torchrun()
    with process_group(cfg.parallel.timeout_start) as world, HangWatch(world, cfg.parallel):
        shown = progress(Console(stderr=True), "steps of the range test", sweep.steps + 1)
        with shown if world.rank == 0 else nullcontext(lambda steps: None) as on_progress:
            test = range_test(cfg, world, sweep, on_progress)
    found = suggest(test.curve)
    if world.rank == 0:
        for warning in test.warnings:
            print(warning, file=sys.stderr)
        if len(test.curve.rates) > 1:
            print(f"{plot(test.curve, found.rate)}\n\n{table(test.curve)}")
        print_banner("learning rate range test", summary(cfg, world, sweep, test, found, _command(found, typed, world)))
        if options.png is not None and len(test.curve.rates) > 1:
            with replace_file(options.png) as file:
                file.write(picture_of(test.curve, found, "Learning rate range test"))
        write_json(options.json, _to_json(test, found))
    if found.rate is None:
        record_failure("", shown=True)  # the problem is on the terminal
    return int(found.rate is None)


def _command(found: Suggestion, typed: Sequence[str], world: World) -> str:
    """The command that trains with the suggested rate; only the override if the config is that of a run."""
    override = f"optimizer.lr={found.rate:g}" if found.rate is not None else ""
    if AS_TYPED in typed or any(argument.startswith("run.dir=") for argument in typed):
        return override
    others = [argument for argument in typed if not argument.startswith("optimizer.lr=")]
    processes = ["--nproc", str(world.size)] if 1 < world.size == world.local_size else []
    return shlex.join(["dtrain", "train", *processes, *others, override])


def _to_json(test: RangeTest, found: Suggestion) -> dict[str, Any]:
    curve = test.curve
    smoothed = curve.smoothed() if len(curve.rates) else curve.losses
    points = zip(curve.rates, curve.losses, smoothed, curve.skips[1:], strict=True)
    return {
        "suggestion": found.rate,
        "rule": RULE,
        "problem": found.problem,
        "lowest": found.lowest,
        "falling": found.falling,
        "end": curve.end,
        "first_loss": curve.first,
        "first_skipped": curve.skips[0],
        "points": [
            {"rate": float(rate), "loss": float(loss), "smoothed": float(smooth), "skipped": skipped}
            for rate, loss, smooth, skipped in points
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain doctor lr",
        usage="%(prog)s [--nproc N] experiment=NAME [min=1e-7] [max=10] [steps=100] [key=value ...] [--png FILE] [--json FILE]",
        description="Learning rate finder: trains the configured run in memory while the learning rate grows from min=RATE to\n"
        "max=RATE in steps=N steps, shows the loss at each rate, and suggests a rate. It ends early if the loss\n"
        "diverges. Use the precision and the global batch size of the run; the number of processes may differ.\n"
        "Only FILE is written. The exit code is 1 if there is no suggestion.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--png", type=output_file, metavar="FILE", help="also write the curve to FILE as PNG")
    add_json_option(parser)
    return parser
