"""Everything that a report shows of one run: its state, where its time went, whether it is healthy, and what limits it.

* The *state* is for example ``finished``, ``killed`` or ``queued``. ``dtrain launch status`` shows the same states.
* The *time breakdown* splits the time between records into waiting for data, the rest of the step, evaluating and saving, and
  interruptions.
* The *health* is a list of findings; its level is the worst of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.console import LEVELS, Finding
from dtrain.errors import printable
from dtrain.report.run_logs import (
    BadSamples,
    EvaluationFile,
    Hang,
    Medium,
    Message,
    read_bad_samples,
    read_evaluations,
    read_hangs,
    read_media,
    read_messages,
)
from dtrain.report.style import count_of, format_duration, format_number, format_percent, shorten
from dtrain.runs.history import History, as_float
from dtrain.runs.run_dir import is_plain, is_trained
from dtrain.runs.starts import STEPS, read_votes

#: Rows of ``TimeBreakdown.seconds``, and their names in the same order.
WAITING, STEPPING, PAUSING, INTERRUPTED = range(4)
TIME_NAMES = ("waiting for data", "rest of the step", "evaluating and saving", "interrupted")

_MAX_REASON = 100  # characters of a reason in a table
_MIN_SECONDS = 60.0  # of training; start-up dominates the times of shorter runs
# Values above these limits are problems.
_SILENT = 600.0  # seconds without a record or a status
_MUCH_WAITING, _MUCH_PAUSING, _MUCH_INTERRUPTED = 0.1, 0.25, 0.1  # shares of the time
# Share of the steps; number of steps, normal in fp16 until the loss scale has settled.
_MANY_SKIPS, _FEW_SKIPS = 0.02, 5
_MANY_SPIKES = 0.01  # share of the steps
_MOST_VOTES = 2**30  # bytes of steps.bin, of 20 million steps
_MANY_BAD = 0.001  # share of the samples
_MUCH_SLOWER = 0.1  # share of the step that the slowest rank costs
_UNEVEN = 2.0  # 95th percentile of step times over the median
_RISEN = 1.1  # last over first tenth of the losses
_WORDS = {"ok": "healthy", "warning": "needs attention", "error": "not healthy"}
_CONTINUE = "If it was killed, the same command resumes it."


@dataclass(frozen=True, eq=False)
class RunData:
    """Everything that a report shows of one run.

    Attributes:
        history: Metrics, status and config; its gaps name everything that is missing or damaged.
        times: Where the time went; None if the run has not recorded it.
        bad: Bad samples.
        hangs: Detected hangs.
        messages: Warnings and errors of all ranks.
        media: Newest pictures and texts.
        evaluations: Results of ``dtrain evaluate``.
        health: Whether the run is healthy.
    """

    history: History
    times: TimeBreakdown | None
    bad: BadSamples
    hangs: list[Hang]
    messages: list[Message]
    media: list[Medium]
    evaluations: list[EvaluationFile]
    health: Health

    @classmethod
    def read(cls, history: History, now: float) -> RunData:
        """Reads the logs, media and evaluations of a run; ``now`` is the time of the report in Unix seconds."""
        times, path, gaps = TimeBreakdown.from_run(history), history.path, history.gaps
        bad, hangs, messages = read_bad_samples(path, gaps), read_hangs(path, gaps), read_messages(path, gaps)
        media, evaluations = read_media(path, gaps), read_evaluations(path, gaps)
        return cls(history, times, bad, hangs, messages, media, evaluations, check_health(history, times, hangs, now))


def run_state(run: History) -> str:
    """The state of a run: from status.json, and without one from the other files of its directory.

    Returns:
        ``finished``, ``stopped``, ``failed``, ``running`` or ``killed`` (status.json says ``running``, but no process holds the
        run's lock); without a status ``queued``, ``not started``, ``starting``, ``failed before its first step``,
        ``starting, or failed before its first step``, or ``state unknown`` if there are metrics.
    """
    state = run.status.get("state")
    if state == "running" and is_plain(run.path / ".lock") and not is_trained(run.path):
        return "killed"
    if state is not None:
        return str(state)
    if len(run.columns.steps):
        return "state unknown"  # the status is lost or damaged
    if is_trained(run.path):
        return "starting"
    if (run.path / ".lock").exists():
        return "failed before its first step"
    if (run.path / "logs" / "torchrun").exists():
        return "starting, or failed before its first step"
    return "queued" if (run.path / ".job").exists() else "not started"


def run_state_with_reason(run: History) -> str:
    """The state on one line, with the reason if the run did not end as planned: ``failed: rank 1 failed: ...``."""
    state, reason = run_state(run), run.status.get("reason")
    because = f": {shorten(str(reason), _MAX_REASON)}" if reason and state in ("failed", "stopped", "finished") else ""
    return printable(f"{state}{because}")


def parameters(run: History) -> str:
    """Such as ``5,130 of 11,181,642 trained``, or ``11,181,642`` if all are; ``""`` if it is not known."""
    everything, trained = (as_float(run.status.get(name)) for name in ("parameters", "trained_parameters"))
    if not everything > 0:
        return ""
    return f"{trained:,.0f} of {everything:,.0f} trained" if trained < everything else f"{everything:,.0f}"


def last_activity(run: History) -> float:
    """Unix seconds of the newest record or status; NaN without one."""
    times = [*run.series("time")[1], as_float(run.status.get("time"))]
    return float(np.nanmax(times)) if np.isfinite(times).any() else float("nan")


@dataclass(frozen=True, eq=False)
class TimeBreakdown:
    """Where the time of a run went.

    Between two training records lie the steps of the second one (its mean step time, and the share of it that waited for data)
    and the rest of the wall-clock time: evaluating and saving, or, if the run was restarted in between, an interruption.

    Attributes:
        steps: Last step of each interval, float64, shape ``[n]``, ascending.
        seconds: Seconds for each of ``TIME_NAMES``, float64, shape ``[4, n]``, not negative.
    """

    steps: np.ndarray
    seconds: np.ndarray

    @classmethod
    def from_run(cls, run: History) -> TimeBreakdown | None:
        """The breakdown of a run; None if it has not recorded step times."""
        steps, clock, per_step = run.columns.in_common("step", "time", "time/step_seconds")
        waited = run.columns.in_common("time/step_seconds", "time/data_wait_fraction")[1]
        if len(waited) != len(per_step):
            waited = np.zeros_like(per_step)
        order = np.argsort(steps, kind="stable")
        steps, clock, per_step, waited = (array[order] for array in (steps, clock, per_step, waited))
        per_step, waited = (np.nan_to_num(array).clip(min=0.0) for array in (per_step, waited))
        trained = per_step * np.diff(steps, prepend=0.0).clip(min=0.0)
        if not trained.sum() > 0:
            return None
        other = (np.diff(np.nan_to_num(clock), prepend=np.nan) - trained).clip(min=0.0)
        other = np.nan_to_num(other)  # the first record has no record before it
        restarted = np.isin(steps, run.restarts)
        waiting = trained * waited.clip(max=1.0)
        return cls(steps, np.stack([waiting, trained - waiting, other * ~restarted, other * restarted]))

    def shares(self) -> np.ndarray:
        """Shares of the whole time, float64, shape ``[4]``."""
        total = self.seconds.sum(axis=1)
        shares: np.ndarray = total / total.sum()
        return shares


@dataclass(frozen=True)
class Health:
    """Whether a run is healthy: results of all checks, the worst first."""

    findings: tuple[Finding, ...]

    @property
    def level(self) -> str:
        """The worst level of the findings: ``ok``, ``warning`` or ``error``."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def word(self) -> str:
        """``healthy``, ``needs attention`` or ``not healthy``."""
        return _WORDS[self.level]

    @property
    def line(self) -> str:
        """All problems, and what limits the speed of the run."""
        return "; ".join(
            finding.text for finding in self.findings if finding.level != "ok" or finding.subject == "time"
        )


def check_health(run: History, times: TimeBreakdown | None, hangs: Sequence[Hang], now: float) -> Health:
    """Runs all checks at ``now``, in Unix seconds; ``times`` is None if unknown."""
    findings = [
        *_check_state(run, now),
        *_check_loss(run),
        *_check_skips(run),
        *_check_spikes(run),
        *_check_hangs(hangs),
        *_check_samples(run),
    ]
    trained = float(times.seconds[:INTERRUPTED].sum()) if times is not None else _MIN_SECONDS
    if trained < _MIN_SECONDS:
        text = f"too short to judge the speed: {format_duration(trained)} of training, at least {_MIN_SECONDS:.0f} s wanted"
        findings += [Finding("time", text), *_check_restarts(run, None)]
    else:
        findings += [
            *_check_time(times),
            *_check_step_times(run),
            *_check_stragglers(run),
            *_check_restarts(run, times),
        ]
    return Health(tuple(sorted(findings, key=lambda finding: -LEVELS.index(finding.level))))


def problems_of(run_dir: Path) -> str:
    """The problems of a run, in one line; ``""`` if it has none, or its files cannot be read."""
    try:
        run = History.read(run_dir, run_dir.name)
    except (ValueError, OSError):
        return ""
    health = check_health(run, TimeBreakdown.from_run(run), read_hangs(run_dir, []), time.time())
    return "; ".join(finding.text for finding in health.findings if finding.level != "ok")


def _check_state(run: History, now: float) -> Iterator[Finding]:
    state, reason = run_state(run), run.status.get("reason")
    because = f": {reason}" if reason else ""
    silent = now - last_activity(run)
    if state == "failed":
        yield Finding("state", f"failed{because}", "error", "The same command resumes from the newest checkpoint.")
    elif state == "stopped":
        yield Finding("state", f"stopped on request{because}", remedy="The same command resumes it.")
    elif state == "killed":
        text = "status.json says running, but no process on this machine trains the run"
        yield Finding("state", text, "warning", _CONTINUE)
    elif state == "running" and not silent <= _SILENT:
        text = f"status.json says running, but nothing was written for {format_duration(silent)}"
        yield Finding("state", text, "warning", _CONTINUE)
    elif state == "state unknown":
        yield Finding("state", state, "warning", "status.json is missing or damaged.")
    elif state.endswith("failed before its first step"):
        yield Finding("state", state, "warning", "The reason is in its logs.")
    else:
        yield Finding("state", f"{state}{because}" if state == "finished" else state)


def _check_loss(run: History) -> Iterator[Finding]:
    values = run.series("train/loss")[1]
    if not len(values):
        yield Finding("loss", "no training loss was logged", "warning")
        return
    finite = values[np.isfinite(values)]
    if lost := len(values) - len(finite):
        yield Finding("loss", f"{lost:,} of {len(values):,} logged losses were not finite", "warning")
    tenth = len(finite) // 10
    if tenth < 2:
        return
    first, final = float(np.median(finite[:tenth])), float(np.median(finite[-tenth:]))
    if final > _RISEN * first > 0:
        change = f"from {format_number(first)} to {format_number(final)} (medians of the first and last tenth)"
        remedy = "Try a lower learning rate or a longer warm-up."
        yield Finding("loss", f"training loss rose {change}", "warning", remedy)


def _check_skips(run: History) -> Iterator[Finding]:
    skipped, steps = run.last("precision/skipped_steps"), run.last("step")
    if run.config.get("train.spike.action") == "skip" and np.isfinite(spikes := run.last("train/spikes")):
        skipped -= spikes  # which have a check of their own
    if not (skipped > 0 and steps > 0):
        return
    text = f"{format_percent(skipped / steps)} of steps skipped ({skipped:,.0f} of {steps:,.0f})"
    samples = _samples_of_last_skip(run)
    if skipped > _FEW_SKIPS and skipped / steps > _MANY_SKIPS:
        remedy = "In fp16 a lower precision.loss_scale.init or a longer growth_interval; else `dtrain doctor numerics`."
        yield Finding("skips", text, "warning", f"{remedy}{samples}")
    else:
        yield Finding("skips", text, remedy=samples.strip())


def _samples_of_last_skip(run: History) -> str:
    """The command that shows which samples made the last skipped step; "" if the step is not known."""
    path = run.path / STEPS
    if not is_plain(path) or path.stat().st_size > _MOST_VOTES:
        return ""
    votes = read_votes(run.path)
    skipped = votes["step"][votes["applied"] == 0]
    if not len(skipped):
        return ""
    return f" Samples of the last one: `dtrain replay run.dir={run.path} replay.step={int(skipped[-1])} replay.samples=true`"


def _check_spikes(run: History) -> Iterator[Finding]:
    spikes, steps = run.last("train/spikes"), run.last("step")
    if spikes > 0 and steps > 0:
        text = (
            f"{spikes:,.0f} spikes of the gradient norm, the last of {format_number(run.last('train/spike_grad_norm'))}"
        )
        level = "warning" if spikes / steps > _MANY_SPIKES else "ok"
        remedy = "The messages of rank 0 name the first ones with a command that shows their samples."
        yield Finding("spikes", text, level, remedy if level == "warning" else "")


def _check_hangs(hangs: Sequence[Hang]) -> Iterator[Finding]:
    if hangs:
        text = f"hung at {hangs[-1].time} ({hangs[-1].reason})"
        yield Finding("hang", text, "warning", "The section Problems below shows where each rank was.")


def _check_time(times: TimeBreakdown | None) -> Iterator[Finding]:
    if times is None:
        yield Finding("time", "no step times were logged, so what limits the speed is unknown")
        return
    total = times.seconds[:INTERRUPTED].sum(axis=1)  # interruptions have their own check
    waiting, stepping, pausing = total / total.sum()
    per_step = total[:PAUSING].sum() / max(times.steps[-1], 1.0)
    if waiting > _MUCH_WAITING:
        remedy = "Use more data.num_workers, or less work per sample; `dtrain doctor` measures the loader alone."
        yield Finding("data", f"waits for data {format_percent(waiting)} of the time", "warning", remedy)
    if pausing > _MUCH_PAUSING:
        remedy = "Evaluate or save less often: train.eval_every, checkpoint.every_steps."
        yield Finding("pauses", f"evaluates and saves {format_percent(pausing)} of the time", "warning", remedy)
    limit = ("data loading", "model and device", "evaluating and saving")[int(total.argmax())]
    parts = (
        f"{format_percent(stepping)} step",
        f"{format_percent(waiting)} waiting for data",
        f"{format_percent(pausing)} evaluating and saving",
    )
    yield Finding("time", f"speed limited by {limit} ({', '.join(parts)}; {format_duration(per_step)} per step)")


def _check_stragglers(run: History) -> Iterator[Finding]:
    ranks, behind = run.columns.in_common("time/slowest_rank", "time/straggler_seconds")
    known = np.isfinite(ranks) & np.isfinite(behind)
    if not known.any():
        return
    step = run.series("time/step_seconds")[1]
    numbers, counts = np.unique(ranks[known], return_counts=True)
    slowest, often = numbers[counts.argmax()], float(counts.max() / known.sum())
    late = float(np.median(behind[known & (ranks == slowest)]))
    # If ranks are slow by chance, the slowest one changes from record to record.
    if often > 0.5 and np.isfinite(step).any() and late > _MUCH_SLOWER * np.nanmedian(step):
        text = f"rank {slowest:.0f} is slower than the others by {format_duration(late)} per step"
        remedy = "Look for another process on its cores or GPU, a throttled device, or a slow disk."
        yield Finding("ranks", f"{text} (in {format_percent(often)} of the records)", "warning", remedy)
    else:
        late = float(np.median(behind[known]))
        yield Finding("ranks", f"the slowest rank is {format_duration(late)} behind the median rank in a step")


def _check_step_times(run: History) -> Iterator[Finding]:
    medians, slow = run.columns.in_common("time/step_seconds_p50", "time/step_seconds_p95")
    known = np.isfinite(medians) & np.isfinite(slow)
    if not known.any():
        return
    median, late = float(np.median(medians[known])), float(np.median(slow[known]))
    if late > _UNEVEN * median > 0:
        text = f"step times vary: 5 % of the steps take more than {format_duration(late)}, the median takes "
        remedy = "Profile a few steps (profile.steps) to see where the slow ones spend their time."
        yield Finding("steps", f"{text}{format_duration(median)}", "warning", remedy)


def _check_samples(run: History) -> Iterator[Finding]:
    bad, samples = run.last("data/bad_samples"), run.last("samples")
    if bad > 0 and samples > 0:
        share = bad / samples  # samples include the bad ones
        level = "warning" if share > _MANY_BAD else "ok"
        remedy = "Their keys are in logs/bad-rank-*.jsonl." if level == "warning" else ""
        text = f"{count_of(int(bad), 'bad sample')} left out ({format_percent(share)})"
        yield Finding("samples", text, level, remedy)


def _check_restarts(run: History, times: TimeBreakdown | None) -> Iterator[Finding]:
    restarts = as_float(run.status.get("restarts"))
    if restarts > 0:
        repeated, down = (as_float(run.status.get(name)) for name in ("lost_seconds", "down_seconds"))
        share = float(times.shares()[INTERRUPTED]) if times is not None else 0.0
        took = f" took {format_percent(share)} of the time" if times is not None else ""
        cost = f"{format_duration(repeated)} of training repeated, {format_duration(down)} not running"
        text = f"{count_of(int(restarts), 'restart')}{took}: {cost}"
        yield Finding("restarts", text, "warning" if share > _MUCH_INTERRUPTED else "ok")
