"""``dtrain launch status|tail|stop|resume DIR``: commands for runs that were started."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.console import until_reader_leaves
from dtrain.errors import ConfigError, as_config_error, printable
from dtrain.files import cache_dir, open_regular
from dtrain.launch import slurm
from dtrain.launch.job import FINISHED, assignment, request_stop
from dtrain.launch.job_script import SCRIPT
from dtrain.report.health import last_activity, parameters, run_state, run_state_with_reason
from dtrain.report.sweep import varied_settings
from dtrain.report.tables import Column, setting_column, text_table
from dtrain.runs.history import History, read_all, run_directories
from dtrain.runs.mirror import fetched_records
from dtrain.runs.recompose import recompose
from dtrain.runs.records import parse_record
from dtrain.runs.run_dir import is_trained, status_or_none
from dtrain.runs.trust import TRUST
from dtrain.tracking.console_sink import PlainLines
from dtrain.urls import is_url, redacted

#: Starts the runs of a command line of ``dtrain launch``; returns the exit code.
Launch = Callable[[Sequence[str]], int]
_METRICS = "metrics.jsonl"
_TAIL_LINES, _TAIL_BYTES = 30, 200_000
_UNLIMITED = 10_000  # columns of a file or a pipe
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_START = 60.0  # that a start may take until a process holds the lock of the run


def run_command(arguments: Sequence[str], launch: Launch) -> int:
    """Runs a command; returns its exit code.

    Args:
        arguments: One of ``COMMANDS``, then run directories; with ``status`` also URLs of mirrors, with ``resume`` ``--trust``.
        launch: Starts a run on this machine; ``resume`` needs it.

    Raises:
        ConfigError: If a directory is missing, or the command cannot be applied to it.
    """
    name, *rest = arguments
    trusted = name == "resume" and TRUST in rest
    rest = [argument for argument in rest if not (trusted and argument == TRUST)]
    if urls := [argument for argument in rest if is_url(argument)]:
        if name != "status":
            raise ConfigError(
                f"{name}: got {redacted(urls[0])}, want the directory of a run on this machine (run.dir)."
            )
        with as_config_error(name), fetched_records(rest) as found:
            return run_command([name, *map(str, found)], launch)
    paths = [Path(argument).expanduser().absolute() for argument in rest]
    # A shell expands runs/* to files such as report.html and to broken links, too.
    directories = [path for path in paths if len(paths) == 1 or path.is_dir() or not os.path.lexists(path)]
    if not directories:
        raise ConfigError(f"{name}: give the directory of a run: dtrain launch {name} runs/NAME")
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{name}: {directory} is not a directory. Give the directory of a run (run.dir).")
    return resume(directories, launch, trusted=trusted) if name == "resume" else COMMANDS[name](directories, launch)


def status(directories: Sequence[Path]) -> int:
    """Prints a table with one line for each run."""
    with as_config_error("status"):
        table = status_table(directories, shutil.get_terminal_size((_UNLIMITED, 24)).columns)
    with until_reader_leaves():
        print(table, end="")
    return FINISHED


def status_table(directories: Sequence[Path], width: int) -> str:
    """A table with one line for each run: state, step, age of the newest record, name, varied settings, last metrics.

    Below it are the names of columns that do not fit into ``width`` characters, and a line for each run that failed, was
    stopped, or has a SLURM job.

    Args:
        directories: Run directories, or directories that hold run directories.
        width: Columns of the terminal.

    Raises:
        ValueError: If no directory holds a run.
    """
    found, without_run = [], []
    for directory in directories:
        try:
            found += run_directories([directory])
        except (ValueError, OSError) as error:
            if len(directories) == 1:
                raise
            without_run.append(printable(f"{directory.name}: {error}"))
    if not found:
        raise ValueError("\n".join(without_run))
    runs = read_all(found)
    jobs = slurm.active_jobs([run.path for run in runs])
    states = [_state(run, job) for run, job in zip(runs, jobs, strict=True)]
    columns = [
        Column("state", states, False),
        Column("step", [_steps(run) for run in runs], False),
        Column("age", [_age(run) for run in runs]),
        Column("run", [run.label for run in runs], False),
    ]
    settings, _ = varied_settings(runs)
    evaluated = dict.fromkeys(name for run in runs for name in run.names("eval/") if not name.endswith("samples"))
    metrics = (Column(name, [_last_value(run, name) for run in runs]) for name in ("train/loss", *evaluated))
    left_out = []
    counts = Column("parameters", [parameters(run) for run in runs])
    for column in (*map(setting_column, settings), *([counts] if any(counts.cells) else []), *metrics):
        if max(map(len, text_table([*columns, column]).splitlines())) <= width:
            columns.append(column)
        else:
            left_out.append(column.head)
    lines = [f"not shown in {width} columns: {', '.join(left_out)}"] if left_out else []
    for run, job, state in zip(runs, jobs, states, strict=True):
        reason = run_state_with_reason(run)
        if job is not None or reason != run_state(run):
            lines.append(printable(f"{run.label}: {f'{state}, {job}' if job is not None else reason}"))
    lines += without_run
    return text_table(columns) + ("\n" if lines else "") + "".join(f"{line}\n" for line in lines)


def _state(run: History, job: slurm.SlurmJob | None) -> str:
    """Such as ``finished``, ``stopped``, ``running``, ``killed``."""
    # On some file systems this machine does not see the lock that a run on another node holds.
    state = run_state(run)
    return "running" if job is not None and job.has_nodes and state == "killed" else state


def _steps(run: History) -> str:
    step, last = run.status.get("step"), run.status.get("last_step")
    logged = run.series("step")[1]
    if len(logged) and (step is None or logged[-1] > step):
        step = logged[-1]
    # A damaged file may have a number of a hundred digits.
    texts = [f"{number:.0f}" if number < 1e12 else f"{number:.3g}" for number in (step, last) if number]
    return "/".join(texts or ["0"]) if step is not None else ""


def _age(run: History) -> str:
    """Time since the newest record or status, such as ``12 s`` or ``3 h``."""
    seconds = time.time() - last_activity(run)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s" if math.isfinite(seconds) else ""


def _last_value(run: History, metric: str) -> str:
    return f"{run.last(metric):.4g}" if run.has(metric) else ""


def follow_log(directories: Sequence[Path]) -> int:
    """Prints the newest lines of a run as its console shows them, follows them until the run ends, and says how it ended."""
    if len(directories) != 1:
        raise ConfigError(f"tail: got {len(directories)} directories, want one.")
    (run_dir,) = directories
    with suppress(KeyboardInterrupt), as_config_error("tail"), until_reader_leaves():
        log = newest_log(run_dir)
        print(f"==> {log}", flush=True)
        for line in _followed(run_dir, log):
            print(printable(line), flush=True)
        run = History.read(run_dir, run_dir.name)
        print(printable(f"==> {run_state_with_reason(run)}, step {_steps(run) or '0'}: {run_dir}"))
    return FINISHED


def _followed(run_dir: Path, log: Path) -> Iterator[str]:
    """The last lines of a log, then new ones until the run has ended; records of metrics.jsonl as text."""
    last_step = (status_or_none(run_dir) or {}).get("last_step")
    records = PlainLines(sys.stdout, last_step if isinstance(last_step, int) else None)

    def texts(lines: list[bytes]) -> list[str]:
        if log.name != _METRICS:
            return [line.decode(errors="replace").rstrip() for line in lines]
        parsed = (parse_record(line) for line in lines)
        return [text for record in parsed if record is not None and "time" in record for text in records.lines(record)]

    with open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        yield from texts(file.readlines())[-_TAIL_LINES:]
        at = file.tell()
    while True:
        is_over = _is_over(run_dir)  # before reading, so that nothing after it is missed
        with suppress(OSError), open_regular(log) as file:
            # A resumed run has removed the records that it repeats.
            at = min(at, file.seek(0, os.SEEK_END))
            file.seek(at)
            whole = [line for line in file.readlines() if line.endswith(b"\n")]
            at += sum(map(len, whole))
            yield from texts(whole)
        if is_over:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_over(run_dir: Path) -> bool:
    """Whether a run has ended, or no process has trained it for a while."""
    if is_trained(run_dir) or slurm.active_job(run_dir) is not None:
        return False
    if (status_or_none(run_dir) or {}).get("state") in ("finished", "stopped", "failed"):
        return True
    # torchrun may be starting its ranks, now or again.
    changed = max(path.lstat().st_mtime for path in (run_dir, *run_dir.glob("*"), *run_dir.glob("logs/*")))
    return time.time() - changed > _SECONDS_TO_START


def newest_log(run_dir: Path) -> Path:
    """The log of the newest SLURM job of a run; without one its metrics, or before its first step the log of rank 0.

    Raises:
        ConfigError: If there is no log; names possible reasons.
    """
    job_id = slurm.read_job_id(run_dir)
    of_job = run_dir / "logs" / f"slurm-{job_id}.out"
    if of_job.is_file():  # not a pipe, which would block the reader
        return of_job
    others = sorted((run_dir / "logs").glob("slurm-*.out"), key=lambda path: path.lstat().st_mtime)
    for log in (*others[::-1], run_dir / _METRICS, run_dir / "logs" / "rank-00000.log"):
        if log.is_file():
            return log
    waiting = slurm.active_job(run_dir)
    raise ConfigError(
        f"{run_dir / 'logs'} has no log yet"
        + (f": {waiting}." if waiting else ".")
        + (f" If `scontrol show job {job_id}` shows FAILED, its node may not see this directory." if job_id else "")
    )


def stop(directories: Sequence[Path]) -> int:
    """Asks running runs to save and stop; cancels jobs that wait in the queue."""
    for run_dir in directories:
        job = slurm.queued_job(run_dir)
        if job is not None and not job.has_nodes:
            subprocess.run(["scancel", job.id], check=True)
            print(f"{run_dir}: cancelled {job}, which was waiting in the queue")
        elif job is not None or is_trained(run_dir):
            with as_config_error("stop"):
                request_stop(run_dir)
            print(f"{run_dir}: the run will save and stop")
        else:
            raise ConfigError(f"{run_dir}: no process trains this run, so there is nothing to stop.")
    return FINISHED


def resume(directories: Sequence[Path], launch: Launch, *, trusted: bool = False) -> int:
    """Starts runs again as they were started: by submitting their batch script, or on this machine.

    Args:
        directories: The run directories.
        launch: Starts a run on this machine.
        trusted: Whether ``--trust`` was typed: runs and batch scripts that this user did not write are used as well.
    """
    codes = []
    for run_dir in directories:
        if (script := run_dir / SCRIPT).exists():
            if not trusted and not slurm.is_submitted(run_dir):
                raise ConfigError(
                    f"{script}: dtrain launch did not write this batch script and its presets for you with this cache "
                    f"({cache_dir()}), or they were edited since. They could do anything: read them, and add {TRUST}."
                )
            if not _trains(script, run_dir):
                raise ConfigError(
                    f"{script}: this batch script trains a different directory, because {run_dir} is a copy of that run. Start "
                    "the copy with the command line of the run and its own run.dir."
                )
            slurm.require_sbatch()
            with slurm.submission([run_dir]) as locks:
                slurm.write_job_id(run_dir, submitted := slurm.submit(script, locks))
            print(f"{run_dir}: submitted job {submitted}")
            codes.append(FINISHED)
        elif job_id := slurm.read_job_id(run_dir):
            raise ConfigError(
                f"{run_dir}: dtrain launch did not write the batch script of job {job_id}. Submit that script again with the "
                f"run directory: RUN_DIR={shlex.quote(str(run_dir))} sbatch slurm/..."
            )
        else:
            trust = [TRUST] if trusted else []
            arguments = [*recompose([assignment("run.dir", str(run_dir)), *trust]), *trust]
            print(f"dtrain launch {shlex.join(arguments)}", file=sys.stderr, flush=True)
            codes.append(launch(arguments))
    return max(codes)


def _trains(script: Path, run_dir: Path) -> bool:
    """Whether a batch script of dtrain launch trains this run directory; a copied script names the original."""
    line = next((line for line in script.read_text().splitlines() if line.startswith("run_dir=")), "run_dir=")
    return all(os.path.isdir(name) and os.path.samefile(name, run_dir) for name in shlex.split(line.partition("=")[2]))


COMMANDS: dict[str, Callable[[Sequence[Path], Launch], int]] = {
    "status": lambda directories, launch: status(directories),
    "tail": lambda directories, launch: follow_log(directories),
    "stop": lambda directories, launch: stop(directories),
    "resume": resume,
}
