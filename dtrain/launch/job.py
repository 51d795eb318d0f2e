"""A run to start, and its result.

* A *job* is a run and the arguments of ``dtrain train`` that start it from any directory.
* The *result* of a job is read from ``status.json``, because torchrun exits with 1 for every exit code but 0.
* A *stop request* is the file ``STOP`` in the run directory. A process that reads it deletes it when it stops.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from dtrain.config.compose import Composed, require_choice
from dtrain.config.schema import LaunchConfig
from dtrain.distributed.lock import read_holder
from dtrain.errors import ConfigError, printable
from dtrain.report.tables import Column, text_table
from dtrain.runs.recompose import chooses_what_to_train, refuse_foreign_links
from dtrain.runs.run_dir import status_or_none
from dtrain.runs.run_spec import RunSpec
from dtrain.runs.trust import AS_TYPED
from dtrain.training.validation import validate
from dtrain.urls import redacted

FINISHED = 0
FAILED = 1
#: EX_TEMPFAIL of sysexits.h: stopped on request; the same command resumes.
STOPPED = 75

# `run.dir` is added with its absolute path; `launch.dry_run` has no meaning for a run that starts.
_NOT_FORWARDED = ("run.dir", "launch.dry_run")
ALREADY_FINISHED = "already finished"
_MINIMUM = {
    "nodes": 1,
    "min_nodes": 1,
    "processes_per_node": 1,
    "gpus_per_node": 0,
    "cpus_per_process": 1,
    "stop_seconds": 1,
    "max_running": 1,
}


@dataclass(frozen=True)
class Job:
    """One run to start.

    Attributes:
        spec: The run; its directory may not exist yet.
        launch: The ``launch`` section of its config.
        varied: The overrides in which it differs from the other jobs of its sweep; empty without a sweep.
        trusted: Whether ``--trust`` was typed.
    """

    spec: RunSpec
    launch: LaunchConfig
    varied: tuple[str, ...] = ()
    trusted: bool = False

    @classmethod
    def from_composed(cls, composed: Composed) -> Job:
        """The job of a composed config.

        Raises:
            ConfigError: If the config has nothing to train or a wrong value, or ``run.dir`` holds a different run.
        """
        require_choice(composed)
        launch = composed.cfg.launch
        for name, minimum in _MINIMUM.items():
            value = getattr(launch, name)
            if value is not None and value < minimum:
                raise ConfigError(f"launch.{name}: got {value}, want at least {minimum}.")
        if launch.min_nodes is not None and launch.min_nodes > launch.nodes:
            raise ConfigError(f"launch.min_nodes: got {launch.min_nodes}, want at most launch.nodes={launch.nodes}.")
        validate(composed.cfg)
        spec = RunSpec.from_composed(composed)
        if not composed.trusted:
            refuse_foreign_links(spec.dir)
        spec.changes()
        return cls(spec, launch, trusted=composed.trusted)

    @property
    def name(self) -> str:
        """What differs from the other jobs of the sweep, or the name of the run."""
        return " ".join(self.varied) or self.spec.name

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished with this config before, so that starting it would change nothing."""
        status = status_or_none(self.spec.dir)
        return status is not None and status["state"] == "finished" and not self.spec.changes()

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``dtrain train``: the overrides of the user, the absolute path of the run directory."""
        folders = (part for folder in self.spec.config_dirs for part in ("--config-dir", folder))
        return [*folders, *self.overrides]

    @property
    def overrides(self) -> list[str]:
        """``arguments`` without ``--config-dir``."""
        # This process has composed all of it, so a rank must not read the run directory, which may have changed by then.
        forwarded = [override for override in self.spec.overrides if _key(override) not in _NOT_FORWARDED]
        is_whole = chooses_what_to_train(forwarded) and not self.trusted
        return [*forwarded, assignment("run.dir", str(self.spec.dir)), *([] if is_whole else [AS_TYPED])]


@contextmanager
def named_job(composed: Composed, arguments: Sequence[str]) -> Iterator[None]:
    """Adds to an error about a job of a sweep which job it is. ``arguments`` is the command line of the sweep."""
    try:
        yield
    except ConfigError as error:
        varied = [override for override in composed.overrides if override not in arguments]
        if {"--multirun", "-m"}.isdisjoint(arguments) or not varied:
            raise
        raise ConfigError(f"{' '.join(varied)}: {error}\n  No run of the sweep was started.") from error


def with_unique_dirs(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs of a sweep with ``varied`` set, each with its own run directory.

    Jobs have the same directory if ``run.dir`` is set, or if they differ only in keys that are not part of the run's
    name. Their directories and names get the differing overrides appended: ``runs/digits-1a2b3c4d-run.seed=1``. The same
    sweep always gets the same directories.

    Raises:
        ConfigError: If two jobs have the same overrides, or the same ``checkpoint.mirror``.
    """
    common = set.intersection(*(set(job.spec.overrides) for job in jobs)) if jobs else set()
    sweep = [replace(job, varied=tuple(o for o in job.spec.overrides if o not in common)) for job in jobs]
    directories = [job.spec.dir for job in sweep]
    sweep = [_with_suffix(job) if directories.count(job.spec.dir) > 1 else job for job in sweep]
    directories = [job.spec.dir for job in sweep]
    mirrors = [job.spec.config["checkpoint"]["mirror"] for job in sweep]
    if common_mirrors := [it for it in mirrors if it is not None and mirrors.count(it) > 1]:
        raise ConfigError(
            f"checkpoint.mirror: several jobs of the sweep have {redacted(common_mirrors[0])}, but a mirror has one run. Make "
            "it different for each: 'checkpoint.mirror=s3://BUCKET/runs/seed-${run.seed}'\n  No run of the sweep was started."
        )
    for job in sweep:
        if directories.count(job.spec.dir) > 1:
            same = (other for other in sweep if other.spec.dir == job.spec.dir)
            raise ConfigError(
                f"--multirun: several jobs of the sweep have the same directory {job.spec.dir}:\n"
                + "".join(f"    {' '.join(other.varied or other.spec.overrides)}\n" for other in same)
                + "  Remove repeated values, or give each job a name: 'run.name=${run.seed}-...'\n"
                "  No run of the sweep was started."
            )
    return sweep


def _with_suffix(job: Job) -> Job:
    suffix = re.sub(r"[^\w.+=-]+", "_", "-".join(job.varied))
    if not suffix:
        return job
    spec = job.spec
    name = f"{spec.name}-{suffix}"
    overrides = [o for o in spec.overrides if _key(o) != "run.name"]
    spec = replace(
        spec,
        name=name,
        dir=spec.dir.with_name(f"{spec.dir.name}-{suffix}"),
        overrides=(*overrides, assignment("run.name", name)),
    )
    spec.changes()
    return replace(job, spec=spec)


def assignment(key: str, value: str) -> str:
    """An override ``key='value'``, quoted for Hydra's command line."""
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        state: ``finished``, ``already finished``, ``stopped``, ``failed``, ``not started``, or ``job 123`` for a submitted
            SLURM job.
        code: Exit code: 0 finished or submitted, 75 stopped, a different code on failure.
        reason: Why it failed; None if it did not, or ended before its first step, after it printed the reason itself.
    """

    state: str
    code: int
    reason: str | None = None


class StatusJudge:
    """Reads the result of one start of a run from ``status.json``.

    Create it before the start. A file of an earlier start does not count; it is recognised because every status holds the
    time when it was written.

    Args:
        run_dir: The run directory.
        start: Id of the start, which its processes write into the run's lock. Then a status of a different start does not count
            either. None: the status of any start counts.
    """

    def __init__(self, run_dir: Path, start: str | None = None) -> None:
        self._run_dir = run_dir
        self._start = start
        self._before = status_or_none(run_dir)

    @property
    def has_status(self) -> bool:
        """Whether the run has written a status since its start: then it was accepted, and its directory exists."""
        return self._status() is not None

    def _status(self) -> dict[str, Any] | None:
        status = status_or_none(self._run_dir)
        if status == self._before:
            return None
        return status if self._start in (None, read_holder(self._run_dir).get("start", self._start)) else None

    def __call__(self) -> JobResult:
        """The result of a start that has ended."""
        status = self._status()
        if status is None:
            return JobResult("failed", FAILED)
        if status["state"] == "finished":
            return JobResult("finished", FINISHED)
        if status["state"] == "stopped":
            return JobResult("stopped", STOPPED)
        reason = str(status.get("reason") or "it was killed and could not record a reason").splitlines()[0]
        return JobResult("failed", FAILED, printable(f"step {status.get('step')}: {reason}"))


def request_stop(run_dir: Path) -> None:
    """Writes the STOP file, empty: a batch script then knows that it is not its own, and asks for no new allocation."""
    (run_dir / "STOP").unlink(missing_ok=True)
    (run_dir / "STOP").touch()


class StopRequest:
    """A request of this command that a run saves and stops, whichever process trains it when it is read.

    Args:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._holder: dict[str, Any] | None = None

    def write(self) -> None:
        """Writes the STOP file, as soon as the run has its directory; again if another process has the run's lock since then.

        The process before it may have read and deleted the file.
        """
        if not self._run_dir.is_dir():
            return
        holder = read_holder(self._run_dir)
        if self._holder is None or holder not in ({}, self._holder):
            self._holder = holder
            request_stop(self._run_dir)

    def withdraw(self) -> None:
        """Deletes the file of a run that has ended before it read it: it must not stop the next start."""
        if self._holder is not None:
            (self._run_dir / "STOP").unlink(missing_ok=True)


def exit_code(results: Sequence[JobResult]) -> int:
    """Exit code of a sweep: the code of a failed job if there is one, else 75 if a job was stopped, else 0."""
    codes = {result.code for result in results}
    failures = sorted(codes - {FINISHED, STOPPED})
    return failures[0] if failures else max(codes, default=FINISHED)


def print_results(jobs: Sequence[Job], results: Sequence[JobResult]) -> None:
    """Prints a table with a line for each job of a sweep."""
    columns = {
        "run": [job.name for job in jobs],
        "result": [result.state for result in results],
        "directory": [str(job.spec.dir) for job in jobs],
    }
    sys.stdout.write(text_table([Column(head, cells, is_number=False) for head, cells in columns.items()]))
