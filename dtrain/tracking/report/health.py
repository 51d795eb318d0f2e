"""Whether a run is healthy, and what limits it, in words that a person reads at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.diagnosis.finding import LEVELS, Finding
from dtrain.tracking.columns import number
from dtrain.tracking.history import History
from dtrain.tracking.report.standing import was_killed
from dtrain.tracking.report.times import INTERRUPTED, PAUSING, Times
from dtrain.tracking.report.trouble import Hang
from dtrain.tracking.report.wording import counted, figure, percent, span

_SILENT = 600.0  # seconds without a sign of life
_MUCH_WAITING, _MUCH_PAUSING, _MUCH_INTERRUPTED = 0.1, 0.25, 0.1  # shares of the time
_MANY_SKIPS, _FEW_SKIPS = 0.02, 5  # share of the steps; so many are no news in fp16, whose scale has to settle
_MANY_BAD = 0.001  # share of the samples
_MUCH_SLOWER = 0.1  # share of the step that the slowest rank costs
_UNEVEN = 2.0  # p95 over the median of step times
_RISEN = 1.1  # last over first tenth of the losses
_WORDS = {"ok": "healthy", "warning": "needs a look", "error": "not healthy"}


@dataclass(frozen=True)
class Health:
    """A verdict.

    Attributes:
        findings: What it is made of, the worst first.
    """

    findings: tuple[Finding, ...]

    @property
    def level(self) -> str:
        """The worst level of all: ``ok``, ``warning`` or ``error``."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    @property
    def word(self) -> str:
        """``healthy``, ``needs a look`` or ``not healthy``."""
        return _WORDS[self.level]

    @property
    def line(self) -> str:
        """What is wrong, and what limits the run."""
        return "; ".join(
            finding.text for finding in self.findings if finding.level != "ok" or finding.subject == "time"
        )


def health(run: History, times: Times | None, hangs: Sequence[Hang], now: float) -> Health:
    """Looks at a run.

    Args:
        run: The run.
        times: Where its time went.
        hangs: Where its ranks were when it hung.
        now: Unix seconds.
    """
    found = [
        *_state(run, now),
        *_loss(run),
        *_skips(run),
        *_hangs(hangs),
        *_time(times),
        *_uneven(run),
        *_stragglers(run),
        *_bad(run),
        *_restarts(run, times),
    ]
    return Health(tuple(sorted(found, key=lambda finding: -LEVELS.index(finding.level))))


def last(run: History, name: str) -> float:
    """A metric's last value; NaN if there is none, or it was not finite."""
    values = run.series(name)[1]
    return float(values[-1]) if len(values) else float("nan")


def sign_of_life(run: History) -> float:
    """Unix seconds of the newest record or status; NaN without one."""
    times = [*run.series("time")[1], number(run.status.get("time"))]
    return float(np.nanmax(times)) if np.isfinite(times).any() else float("nan")


def _state(run: History, now: float) -> Iterator[Finding]:
    state, reason = run.status.get("state"), run.status.get("reason")
    because = f": {reason}" if reason else ""
    if state == "failed":
        yield Finding("state", f"failed{because}", "error", "The same command continues from the newest checkpoint.")
    elif state == "stopped":
        yield Finding("state", f"stopped on request{because}", remedy="The same command continues.")
    elif was_killed(run):
        yield Finding(
            "state",
            "says it runs, but nothing trains it here",
            "warning",
            "If it was killed, the same command continues.",
        )
    elif state == "running" and not now - sign_of_life(run) <= _SILENT:
        silent = f"says it runs, with no sign of life for {span(now - sign_of_life(run))}"
        yield Finding("state", silent, "warning", "If it was killed, the same command continues.")
    elif state is not None:
        yield Finding("state", str(state))
    else:
        yield Finding("state", "how it stands is not known", "warning", "status.json is missing or damaged.")


def _loss(run: History) -> Iterator[Finding]:
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
        rose = f"training loss rose from {figure(first)} to {figure(final)} (medians of the first and last tenth)"
        yield Finding("loss", rose, "warning", "A lower learning rate or a longer warm-up?")


def _skips(run: History) -> Iterator[Finding]:
    skipped, steps = last(run, "precision/skipped_steps"), last(run, "step")
    if not (skipped > 0 and steps > 0):
        return
    text = f"{percent(skipped / steps)} of steps skipped ({skipped:,.0f} of {steps:,.0f})"
    if skipped > _FEW_SKIPS and skipped / steps > _MANY_SKIPS:
        remedy = "In fp16 a lower precision.loss_scale.init or a longer growth_interval; else `dtrain.doctor numerics`."
        yield Finding("skips", text, "warning", remedy)
    else:
        yield Finding("skips", text)


def _hangs(hangs: Sequence[Hang]) -> Iterator[Finding]:
    if times := sorted({(hang.when, hang.why) for hang in hangs}):
        when, why = times[-1]
        yield Finding("hang", f"hung at {when} ({why})", "warning", "Where each rank was is under Trouble below.")


def _time(times: Times | None) -> Iterator[Finding]:
    if times is None:
        yield Finding("time", "no step times were logged, so what limits it is not known")
        return
    total = times.seconds[:INTERRUPTED].sum(axis=1)  # interruptions are a finding of their own
    waiting, stepping, pausing = total / total.sum()
    per_step = total[:PAUSING].sum() / max(times.steps[-1], 1.0)
    if waiting > _MUCH_WAITING:
        remedy = "More data.num_workers, or less work a sample; `dtrain.doctor` measures the loader alone."
        yield Finding("data", f"waits for data {percent(waiting)} of the time", "warning", remedy)
    if pausing > _MUCH_PAUSING:
        remedy = "Evaluate or save less often: train.eval_every, checkpoint.every_steps."
        yield Finding("pauses", f"evaluates and saves {percent(pausing)} of the time", "warning", remedy)
    limit = ("the data limit", "model and device limit", "evaluations and saves limit")[int(total.argmax())]
    shares = f"{percent(stepping)} step, {percent(waiting)} waiting for data, {percent(pausing)} evaluating and saving"
    yield Finding("time", f"{limit} its speed ({shares}; {span(per_step)} a step)")


def _stragglers(run: History) -> Iterator[Finding]:
    ranks, behind = run.columns.together("time/slowest_rank", "time/straggler_seconds")
    known = np.isfinite(ranks) & np.isfinite(behind)
    if not known.any():
        return
    step = run.series("time/step_seconds")[1]
    numbers, times = np.unique(ranks[known], return_counts=True)
    slowest, often = numbers[times.argmax()], float(times.max() / known.sum())
    late = float(np.median(behind[known & (ranks == slowest)]))
    # A rank that is the slowest by chance is another one each time.
    if often > 0.5 and np.isfinite(step).any() and late > _MUCH_SLOWER * np.nanmedian(step):
        text = (
            f"rank {slowest:.0f} is slower than the others by {span(late)} a step (in {percent(often)} of the records)"
        )
        yield Finding("ranks", text, "warning", "Another process on its cores or GPU, a throttled device, a slow disk?")
    else:
        yield Finding(
            "ranks", f"the slowest rank is {span(float(np.median(behind[known])))} behind the median in a step"
        )


def _uneven(run: History) -> Iterator[Finding]:
    halves, tails = run.columns.together("time/step_seconds_p50", "time/step_seconds_p95")
    known = np.isfinite(halves) & np.isfinite(tails)
    if not known.any():
        return
    typical, late = float(np.median(halves[known])), float(np.median(tails[known]))
    if late > _UNEVEN * typical > 0:
        text = f"steps are uneven: 5 % of them take more than {span(late)}, the median {span(typical)}"
        yield Finding("steps", text, "warning", "A profile of a few steps tells what the long ones do.")


def _bad(run: History) -> Iterator[Finding]:
    bad, samples = last(run, "data/bad_samples"), last(run, "samples")
    if bad > 0 and samples > 0:
        share = bad / samples  # which count the bad ones, too
        level = "warning" if share > _MANY_BAD else "ok"
        remedy = "Their keys are in logs/bad-rank-*.jsonl." if level == "warning" else ""
        yield Finding("samples", f"{counted(int(bad), 'bad sample')} left out ({percent(share)})", level, remedy)


def _restarts(run: History, times: Times | None) -> Iterator[Finding]:
    restarts = number(run.status.get("restarts"))
    if restarts > 0:
        lost, down = (number(run.status.get(name)) for name in ("lost_seconds", "down_seconds"))
        share = float(times.shares()[INTERRUPTED]) if times is not None else 0.0
        took = f" took {percent(share)} of the time" if times is not None else ""
        cost = f"{span(lost)} of training done again, {span(down)} between the starts"
        text = f"{counted(int(restarts), 'restart')}{took}: {cost}"
        yield Finding("restarts", text, "warning" if share > _MUCH_INTERRUPTED else "ok")
