"""Hyperparameter search with Optuna: ``dtrain launch launch.search.trials=20 'optimizer.lr=interval(1e-4,1e-1)'``.

* The *space* is the overrides of the command line that have several values (``search_space``).
* A *trial* is one point of the space and the run that trains it, an ordinary run in the directory of the search. Two
  trials with the same values share a run.
* ``journal.log`` in that directory is Optuna's storage, and the only state: the same command continues the search from it
  (``search_journal``). Trials without a result are continued, from their checkpoints. ``search.json`` is a copy for
  ``dtrain report``.

What the sampler suggests for a trial depends on the seed, the number of the trial and the results so far, not on restarts: a
trial whose suggestion was interrupted gets the same values.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import shlex
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain.config.directions import direction
from dtrain.config.schema import SearchConfig
from dtrain.errors import ConfigError, as_config_error, nearest
from dtrain.extras import install_command
from dtrain.files import replace_file
from dtrain.launch import slurm
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job, JobResult
from dtrain.launch.pool import Pool, Screen, Start
from dtrain.launch.search_journal import open_study, refuse_other_search, search_lock
from dtrain.launch.search_space import TRIALS, CommandLine, assignments, distribution, first_value
from dtrain.report.search import FILE, SearchRecord
from dtrain.report.tables import text_table
from dtrain.runs.history import as_float
from dtrain.runs.run_dir import is_trained
from dtrain.urls import redacted

_DIRECTIONS = {"min": "minimize", "max": "maximize"}
_SAMPLERS, _PRUNERS = ("tpe", "random"), ("none", "median", "halving")
_ENOUGH_FOR_IMPORTANCE = 8  # finished trials


class Launcher(Protocol):
    """The functions of the modules ``local`` and ``slurm``."""

    def check(self, jobs: Sequence[Job]) -> None: ...
    def describe(self, jobs: Sequence[Job]) -> str: ...
    def launch(self, jobs: Sequence[Job]) -> list[JobResult]: ...
    def starter(self, running: int, screen: Screen | None) -> Callable[[Job, int], Start]: ...


def is_search(arguments: Sequence[str]) -> bool:
    """Whether a command line of ``dtrain launch`` asks for a search."""
    values = [value for key, _, value in (word.partition("=") for word in arguments) if key == TRIALS]
    return bool(values) and values[-1] != "null"


def search(arguments: Sequence[str], launcher_of: Callable[[Sequence[Job]], Launcher]) -> int:
    """Starts or continues a search; returns the exit code.

    Args:
        arguments: The command line.
        launcher_of: The launcher of a job.

    Raises:
        ConfigError: If the space or a setting of the search is wrong, or its directory has a different search. Then nothing
            was written.
    """
    line = CommandLine.parse(arguments)
    first = {key: first_value(sweep) for key, sweep in line.space.items()}
    base = line.compose(first, line.fixed)
    if base is None:  # Hydra only printed the config (--cfg, --info)
        return FINISHED
    settings = _checked(base)
    given = base.spec.config["run"]
    # Without the keys of the search itself; and in a directory that the user names, the default name of a run is needed.
    trial = line.trial(first) if given["dir"] or given["name"] or base.launch.dry_run else base
    definition = {
        "run": trial.spec.name,
        "space": line.texts,
        **{key: getattr(settings, key) for key in ("metric", "direction", "best", "sampler", "seed", "pruner")},
    }
    launcher = launcher_of([base])
    launcher.check([replace(trial, launch=base.launch)])
    folder = _folder(base, trial, definition)
    refuse_other_search(folder, definition)
    if base.launch.dry_run:
        print(f"# a search of {settings.trials} trials in {folder}; for example:")
        print(launcher.describe([replace(trial, spec=replace(trial.spec, dir=folder / trial.spec.name))]), end="")
        return FINISHED
    with search_lock(folder):
        return SearchRun(line, settings, definition, folder, launcher, base.launch.max_running or 1).run()


# -- the settings


def _checked(base: Job) -> SearchConfig:
    """The settings of the search, with its direction.

    Raises:
        ConfigError: If one of them is wrong, or Optuna is not installed.
    """
    given = base.launch.search
    for key in ("trials", "max_failures"):
        if getattr(given, key) < 1:
            raise ConfigError(f"launch.search.{key}: got {getattr(given, key)}, want at least 1.")
    if given.seed < 0:
        raise ConfigError(f"launch.search.seed: got {given.seed}, want at least 0.")
    for key, valid in (("sampler", _SAMPLERS), ("pruner", _PRUNERS), ("direction", (*_DIRECTIONS.values(), None))):
        if (value := getattr(given, key)) not in valid:
            names = sorted({str(name) for name in valid if name})
            raise ConfigError(f"launch.search.{key}: got {value!r}. {nearest(str(value), names)}")
    if not given.metric.startswith("eval/"):
        raise ConfigError(
            f"launch.search.metric: got {given.metric!r}, want a metric of the evaluations, such as eval/loss."
        )
    if (mirror := base.spec.config["checkpoint"]["mirror"]) is not None:
        raise ConfigError(
            f"checkpoint.mirror: got {redacted(mirror)}, but the runs of a search have no mirror. Leave it out."
        )
    if base.spec.config["data"].get("eval") is None:
        raise ConfigError(f"launch.search.metric: {given.metric} needs an evaluation. Set data.eval.")
    improves = given.direction or _DIRECTIONS.get(direction(given.metric) or "")
    if improves is None:
        raise ConfigError(
            f"launch.search.direction: not set, and the name {given.metric!r} does not say whether larger values "
            "are better. Set it to maximize or minimize."
        )
    require_optuna()
    return replace(given, direction=improves)


def require_optuna() -> None:
    """Silences Optuna's own messages.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"{TRIALS}: a search needs Optuna: {install_command('optuna')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _folder(base: Job, trial: Job, definition: Mapping[str, Any]) -> Path:
    """The directory of the search: ``run.dir``, ``runs/<run.name>``, or ``runs/<experiment>-search-<hash>``."""
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:8]
    given = base.spec.config["run"]
    if given["dir"] or given["name"]:
        return base.spec.dir
    return trial.spec.dir.with_name(f"{trial.spec.name.rpartition('-')[0]}-search-{digest}")


# -- the search


@dataclass
class _Trial:
    """A trial whose run is in the pool.

    Attributes:
        number: Its number in the study.
        trial: Reports intermediate values to the pruner.
        metric: The values of the objective so far.
        reported: Steps whose value the pruner has.
    """

    number: int
    trial: Any
    metric: MetricReader
    reported: set[int] = field(default_factory=set)
    pruned: bool = False


class SearchRun:
    """Runs the trials of a search until there are enough.

    Args:
        line: The command line.
        settings: The checked settings.
        definition: What identifies the search; any difference makes it a different one.
        folder: Directory of the search, locked.
        launcher: Starts the runs.
        running: How many run at a time.
    """

    def __init__(
        self,
        line: CommandLine,
        settings: SearchConfig,
        definition: Mapping[str, Any],
        folder: Path,
        launcher: Launcher,
        running: int,
    ) -> None:
        import optuna

        self._optuna = optuna
        self._line = line
        self._settings = settings
        self._definition = definition
        self._folder = folder
        assert settings.trials is not None
        self._total = settings.trials
        self._names = {key.lstrip("+"): key for key in line.space}
        self._distributions = {name: distribution(line.space[key]) for name, key in self._names.items()}
        self._study = open_study(folder, definition, str(settings.direction), _pruner(settings.pruner))
        ended = [trial for trial in self._study.trials if trial.state.is_finished()]
        self._screen = Screen(max(self._total, len(self._study.trials)), len(ended))
        self._pool = Pool(running, launcher.starter(running, self._screen), self._screen)
        self._launcher = launcher
        self._running: dict[Path, list[_Trial]] = {}
        self._failures = 0  # in a row

    def run(self) -> int:
        """Runs the trials that are missing; prints the table and returns the exit code."""
        self._write()
        waiting = deque(self._without_result())
        if waiting or self._study.trials:
            ended = len(self._study.trials) - len(waiting)
            self._screen.note(
                f"the search in {self._folder} continues: {ended} trials have ended, {len(waiting)} continue"
            )
        else:
            self._screen.note(f"search of {self._total} trials in {self._folder}")
        with self._pool:
            while True:
                while self._pool.has_room and not self._is_hopeless:
                    if waiting:
                        self._begin(waiting.popleft())
                    elif len(self._study.trials) < self._total:
                        self._begin(self._ask(self._study))
                    else:
                        break
                if not self._pool.starts:
                    break
                for job, result, seconds in self._pool.wait():
                    self._end(job, result, seconds)
                for start in self._pool.starts:
                    if self._is_hopeless:
                        start.stop()
                    else:
                        self._prune(start)
        self._write()
        return self._finish()

    @property
    def _is_hopeless(self) -> bool:
        return self._failures >= self._settings.max_failures

    def _ask(self, study: Any) -> Any:
        """The next trial of a study."""
        number = len(study.trials)
        # A new sampler for each trial: the state of a generator would be lost when the search is stopped.
        seed = int(np.random.SeedSequence([self._settings.seed, number]).generate_state(1)[0])
        samplers = self._optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # constant_liar: trials that run at the same time avoid each other's values.
            study.sampler = (
                samplers.TPESampler(seed=seed, constant_liar=True)
                if self._settings.sampler == "tpe"
                else samplers.RandomSampler(seed=seed)
            )
        return study.ask(self._distributions)

    def _completed(self, trial: Any) -> Any:
        """The trial, with the values that it lacks if the search was killed inside ``ask``, after the trial was created."""
        if self._distributions.keys() <= trial.params.keys():
            return trial
        # A study in memory, in which this trial is the next one: it gets the values that it would have got.
        study = self._optuna.create_study(direction=self._study.direction)
        study.add_trials(self._study.get_trials()[: trial.number])
        for name, value in self._ask(study).params.items():
            if name not in trial.params:
                distribution = self._distributions[name]
                internal = distribution.to_internal_repr(value)
                trial.storage.set_trial_param(trial._trial_id, name, internal, distribution)
        return self._optuna.trial.Trial(self._study, trial._trial_id)

    def _values(self, trial: Any) -> dict[str, float | int | str]:
        """Key, as typed, to the value of a trial; other numbers than integers have six digits, so that people can read them.

        Without the values that a damaged journal lacks.
        """
        values = {}
        for name, key in self._names.items():
            if name not in trial.params:
                continue
            value, distribution = trial.params[name], self._distributions[name]
            self._line.require_possible(key, value, self._folder)
            if isinstance(value, float):
                value = min(max(float(f"{value:.6g}"), distribution.low), distribution.high)
            values[key] = value
        return values

    def _without_result(self) -> list[Any]:
        """The trials that an earlier command left without a result, to be continued.

        Raises:
            ConfigError: If one has no job of SLURM, but is trained by a process on this machine.
        """
        states = (self._optuna.trial.TrialState.RUNNING,)
        frozen = self._study.get_trials(deepcopy=False, states=states)
        for run_dir in (self._folder / trial.user_attrs["run"] for trial in frozen if "run" in trial.user_attrs):
            # The local launcher takes such a run over.
            if self._launcher is slurm and is_trained(run_dir) and slurm.queued_job(run_dir) is None:
                raise ConfigError(
                    f"run.dir: {run_dir}, a trial of this search, is still trained by a process of an earlier command. Wait "
                    f"until it ends, or stop it: dtrain launch stop {shlex.quote(str(run_dir))}"
                )
        return [self._optuna.trial.Trial(self._study, trial._trial_id) for trial in frozen]

    def _begin(self, trial: Any) -> None:
        """Starts the run of a trial, or takes the result of the same run."""
        trial = self._completed(trial)
        values = self._values(trial)
        shown = (f"{key}={f'{value:.4g}' if isinstance(value, float) else value}" for key, value in values.items())
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                job = self._line.trial(values)
            spec = replace(job.spec, dir=self._folder / job.spec.name)
            job = replace(job, spec=spec, varied=(f"trial {trial.number}", *shown))
            trial.set_user_attr("run", job.spec.name)
            mine = _Trial(trial.number, trial, MetricReader(job.spec.dir, self._settings.metric))
            mine.reported |= self._study.trials[trial.number].intermediate_values.keys()
            if job.spec.dir in self._running:
                self._running[job.spec.dir].append(mine)
            elif job.is_finished:
                self._settle(mine)
            else:
                self._pool.start(job)
                self._running[job.spec.dir] = [mine]
                self._write()
        except (ConfigError, SystemExit) as error:
            message = str(error) if isinstance(error, ConfigError) else printed.getvalue()
            self._fail(trial, message.removeprefix("dtrain: error: ").strip())

    def _prune(self, start: Start) -> None:
        """Reports new values of a running trial; stops it if the pruner says so."""
        trials = self._running[start.job.spec.dir]
        first = trials[0]
        if first.pruned or self._settings.pruner == "none" or self._pool.stopping:
            return
        first.metric.update()
        new = {step: value for step, value in first.metric.values.items() if step not in first.reported}
        for step, value in sorted(new.items()):
            first.reported.add(step)
            first.trial.report(value, step)
            if not first.trial.should_prune():
                continue
            start.stop()
            for trial in trials:
                trial.pruned = True
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.PRUNED)
            self._failures = 0
            numbers = " and ".join(str(trial.number) for trial in trials)
            text = f"trial {numbers}: pruned: {self._settings.metric} {value:.4g} at step {step}"
            self._screen.note(text, done=len(trials))
            self._write()
            return

    def _end(self, job: Job, result: JobResult, seconds: str) -> None:
        """Records the result of a run that has ended; one that was stopped stays without a result."""
        trials = [trial for trial in self._running.pop(job.spec.dir) if not trial.pruned]
        interrupted = result.code == STOPPED or (self._pool.stopping and result.code != FINISHED)
        # Refused, because another process trains this run with different settings.
        interrupted |= result.code != FINISHED and is_trained(job.spec.dir, without_locks=False)
        for trial in trials:
            if result.code == FINISHED:
                self._settle(trial, f" after {seconds}")
            elif interrupted:
                self._screen.note(f"trial {trial.number}: stopped after {seconds}")
            else:
                self._fail(trial.trial, result.reason or "before its first step")

    def _settle(self, trial: _Trial, after: str = " before") -> None:
        """Records the objective of a finished run; ``after`` is the end of ``trial 1: finished``."""
        trial.metric.update()
        value = trial.metric.objective(best=self._settings.best, largest=self._settings.direction == "maximize")
        if not math.isfinite(value):
            seen = ", ".join(sorted(trial.metric.evaluated)) or "none"
            self._fail(trial.trial, f"it has no finite {self._settings.metric}; its metrics of evaluations: {seen}")
            return
        self._failures = 0
        self._study.tell(trial.number, value)
        best = " (the best so far)" if self._study.best_trial.number == trial.number else ""
        self._screen.note(f"trial {trial.number}: finished{after}: {self._settings.metric} {value:.6g}{best}", done=1)
        self._write()

    def _fail(self, trial: Any, reason: str) -> None:
        self._failures += 1
        trial.set_user_attr("reason", reason)
        self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        self._screen.note(f"trial {trial.number}: failed: {next(iter(reason.splitlines()), '')}", done=1)
        self._write()

    def _finish(self) -> int:
        """Prints the table and what to do next; returns the exit code."""
        shown = SearchRecord.read(self._folder, [])
        assert shown is not None
        print(text_table(shown.columns), end="")
        print(f"\n{shown.summary}.")
        if (best := shown.best) is not None:
            values = self._values(self._study.trials[best.number])
            words = [*self._line.options, *self._line.of_a_trial, *assignments(values)]
            print(f"the best run:       {self._folder / best.run}")
            if len(values) == len(self._names):
                print(f"its values again:   dtrain launch {shlex.join(words)}")
        print(f"table and pictures: dtrain report {shlex.quote(str(self._folder))}")
        missing = self._total - sum(trial.state.is_finished() for trial in self._study.trials)
        if self._is_hopeless:
            sys.stderr.write(
                f"dtrain: error: launch.search.max_failures: {self._failures} trials in a row failed, so the search ended. "
                "Their reasons are in the table, their logs in their directories; the same command tries further values.\n"
            )
            return FAILED
        if missing > 0:
            sys.stderr.write(
                f"dtrain: {missing} of {self._total} trials have no result yet; the same command continues.\n"
            )
            return STOPPED
        return FINISHED if best is not None else FAILED

    def _write(self) -> None:
        """Replaces ``search.json``."""
        states = self._optuna.trial.TrialState
        names = {states.COMPLETE: "finished", states.PRUNED: "pruned", states.FAIL: "failed"}
        running = {trial.number for trials in self._running.values() for trial in trials}
        trials = [
            {
                "number": trial.number,
                "state": names.get(trial.state, "running" if trial.number in running else "stopped"),
                "value": value if (value := as_float(_value(trial))) == value else None,
                "values": {key.lstrip("+"): value for key, value in self._values(trial).items()},
                "run": trial.user_attrs.get("run"),
                "reason": trial.user_attrs.get("reason"),
            }
            for trial in self._study.get_trials(deepcopy=False)
        ]
        content = {"definition": self._definition, "trials": trials, "importance": self._importance()}
        with as_config_error("run.dir"), replace_file(self._folder / FILE) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")

    def _importance(self) -> dict[str, float]:
        """Key to its importance by PED-ANOVA (Watanabe et al. 2023); empty with too few trials."""
        finished = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        if len(self._names) < 2 or len(finished) < _ENOUGH_FOR_IMPORTANCE:
            return {}
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return dict(self._optuna.importance.get_param_importances(self._study, evaluator=evaluator))
            except (RuntimeError, ValueError):  # all values are the same
                return {}


def _value(trial: Any) -> float | None:
    """The objective of a trial; of one that was pruned or runs, the last intermediate value."""
    if trial.values:
        return float(trial.values[0])
    return None if trial.last_step is None else float(trial.intermediate_values[trial.last_step])


def _pruner(name: str) -> Any:
    from optuna import pruners

    return {"none": pruners.NopPruner, "median": pruners.MedianPruner, "halving": pruners.SuccessiveHalvingPruner}[
        name
    ]()


class MetricReader:
    """Reads one metric from the ``metrics.jsonl`` of a run, also while it is written.

    Attributes:
        values: Step to value; NaN if it was not finite.
        evaluated: Names of all metrics of evaluations.
    """

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._metric = metric
        self._read = 0
        self.values: dict[int, float] = {}
        self.evaluated: set[str] = set()

    def update(self) -> None:
        """Reads the lines that were added since the last call."""
        try:
            size = self._path.stat().st_size
        except OSError:  # not there yet
            return
        if size < self._read:  # a run that resumes truncates the file to its checkpoint
            self._read, self.values = 0, {}
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    values = json.loads(line)
                    self.evaluated |= {name for name in values if name.startswith("eval/")}
                    if self._metric in values:
                        self.values[int(values["step"])] = as_float(values[self._metric])

    def objective(self, *, best: bool, largest: bool) -> float:
        """The best or last value; NaN without one."""
        if not best:
            return self.values[max(self.values)] if self.values else math.nan
        finite = [value for value in self.values.values() if math.isfinite(value)]
        return (max if largest else min)(finite, default=math.nan)
