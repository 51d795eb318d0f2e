"""Batch scripts for SLURM, and the presets that a job uses.

A script has two parts: ``#SBATCH`` options and variables, written here, and ``job_body.sh``, which is the same for all
runs. Presets are copied into the run directory when the job is submitted, because users may edit them while the job waits
or between its allocations.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtrain.config.compose import conf_dir
from dtrain.errors import ConfigError, as_config_error
from dtrain.launch.job import Job

#: Name of the batch script in the run directory.
SCRIPT = "job.sbatch"
_BODY = Path(__file__).with_name("job_body.sh")
PRESETS = "presets"
_REQUEUE_COMMENT = {
    True: "The job asks for new allocations until the run is finished.",
    False: "The job has one allocation.",
}
# Asked for with data.num_workers=auto: enough for most data, and few enough for most clusters.
_CORES_FOR_WORKERS = 4
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
_NAMES = re.compile(r"[\w.@+:=/-]+(,[\w.@+:=/-]+)*")
_NO_LIMIT = ("UNLIMITED", "INFINITE")
_OPTION_LISTS = {"extra": "options of sbatch, such as '--qos=high'", "srun": "options of srun, such as '--mpi=none'"}


def job_script(job: Job) -> str:
    """The complete batch script of a run. It can be read, edited and submitted by hand.

    The result depends on the working directory.

    Raises:
        ConfigError: If a value cannot stand in the script, or keys of ``launch`` contradict each other.
    """
    launch = job.launch
    # Each #SBATCH option, and the comment with the path, is one line; the rest of a second one would be shell code.
    for key, value in (
        ("run.name", job.spec.name),
        ("run.dir", str(job.spec.dir)),
        ("working directory", str(Path.cwd())),
    ):
        _refuse_control_characters(key, value)
    # The comments before this line are for scripts that source job_body.sh.
    body = _BODY.read_text().partition("\nset -uo pipefail\n")[2]
    return (
        "#!/bin/bash\n"
        f"# Written by dtrain launch. {_REQUEUE_COMMENT[launch.requeue]} To start it again:\n"
        f"#   sbatch {shlex.quote(str(script_path(job)))}\n"
        "#\n"
        f"{_directives([_job_name(job.spec.name), *_resources(job), *_output(log_path(job))])}"
        "\n"
        f"run_dir={shlex.quote(str(job.spec.dir))}\n"
        f"python={shlex.quote(launch.python or sys.executable)}\n"
        f"processes={processes(job)} # on each node\n"
        f"arguments=({_words(frozen_arguments(job))})\n"
        f"srun_options=({_words(launch.srun)})\n"
        f"container=({_words(launch.container)})\n"
        f"requeue={int(launch.requeue)}\n"
        "\n"
        "set -uo pipefail\n" + body
    )


def array_script(jobs: Sequence[Job], folder: Path) -> str:
    """The batch script of a job array with one element for each job, ``launch.max_running`` of them at a time.

    Args:
        jobs: The jobs of a sweep.
        folder: Folder for the output of the elements.

    Raises:
        ConfigError: If the jobs ask for different resources.
    """
    resources = [_resources(job) for job in jobs]
    for other in resources[1:]:
        if other != resources[0]:
            differing = sorted(set(resources[0]) ^ set(other))
            raise ConfigError(
                f"launch.max_running: all runs of a job array need the same resources, but these differ in "
                f"{', '.join(differing)}. Remove launch.max_running; then each run is a separate job."
            )
    array = f"--array=0-{len(jobs) - 1}%{jobs[0].launch.max_running}"
    return (
        "#!/bin/bash\n"
        "# Written by dtrain launch: a sweep. Each element is one run and executes the script of that run.\n"
        "#\n"
        f"{_directives([_job_name(folder.name), array, *resources[0], *_output(folder / array_log_name('%A', '%a'))])}"
        "\n"
        f"scripts=({_words(str(script_path(job)) for job in jobs)})\n"
        'exec bash "${scripts[SLURM_ARRAY_TASK_ID]}"\n'
    )


def script_path(job: Job) -> Path:
    """Path of the batch script of a run."""
    return job.spec.dir / SCRIPT


def log_path(job: Job, job_id: str = "%j") -> Path:
    """Path of the output of a SLURM job; sbatch replaces ``%j`` by the job id."""
    return job.spec.dir / "logs" / f"slurm-{job_id}.out"


def array_log_name(array_id: str, element: int | str) -> str:
    """File name of the output of an array element."""
    return f"slurm-{array_id}_{element}.out"


def processes(job: Job) -> int:
    """Number of processes on each node.

    Raises:
        ConfigError: If ``launch.processes_per_node`` is not set: this machine cannot know how many GPUs the nodes have.
    """
    if job.launch.processes_per_node is None:
        raise ConfigError("launch.processes_per_node: launch=slurm needs a number. Set it to the GPUs of a node.")
    return job.launch.processes_per_node


def _cpus_per_process(job: Job) -> int:
    if job.launch.cpus_per_process is not None:
        return job.launch.cpus_per_process
    workers = job.spec.config["data"]["num_workers"]
    # auto: the loader then starts at most as many workers as it is given cores.
    return 1 + (_CORES_FOR_WORKERS if workers == "auto" else int(workers))


def _resources(job: Job) -> list[str]:
    """The sbatch options of a run that are the same for all elements of an array."""
    launch = job.launch
    gpus = processes(job) if launch.gpus_per_node is None else launch.gpus_per_node
    if 0 < gpus < processes(job):
        raise ConfigError(
            f"launch.gpus_per_node: got {gpus} for launch.processes_per_node={processes(job)}. Each process needs its own "
            "GPU; set 0 to train on CPUs."
        )
    cpus = _cpus_per_process(job) * processes(job)
    for key in ("partition", "account"):
        value = getattr(launch, key)
        if value and not _NAMES.fullmatch(value):
            raise ConfigError(f"launch.{key}: got {value!r}, want a name, or names separated by commas without spaces.")
    allocation = time_limit_seconds(launch.time)
    if allocation is None and launch.time.upper() not in _NO_LIMIT:
        raise ConfigError(
            f"launch.time: got {launch.time!r}, want minutes, hours:minutes:seconds such as 08:00:00, "
            f"days-hours:minutes:seconds such as 2-12:00:00, or {_NO_LIMIT[0]}."
        )
    if allocation is not None and allocation <= launch.stop_seconds:
        raise ConfigError(
            f"launch.time: got {launch.time}, which is not longer than launch.stop_seconds={launch.stop_seconds}: the run "
            "would stop as soon as it starts. Increase launch.time, or decrease launch.stop_seconds."
        )
    for name, wanted in _OPTION_LISTS.items():
        for option in getattr(launch, name):
            if not option.startswith("-"):
                raise ConfigError(f"launch.{name}: got {option!r}, want {wanted}.")
            _refuse_control_characters(f"launch.{name}", option)
    return [
        # No --ntasks-per-node: with a range of nodes SLURM would compute the tasks from its minimum and never use more.
        f"--nodes={launch.nodes if launch.min_nodes is None else f'{launch.min_nodes}-{launch.nodes}'}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        f"--cpus-per-task={cpus}",
        f"--time={launch.time}",
        *([f"--partition={launch.partition}"] if launch.partition else []),
        *([f"--account={launch.account}"] if launch.account else []),
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        "--requeue" if launch.requeue else "--no-requeue",
        # B: signals the batch shell only. Without it torchrun gets the signal, and its reaction depends on its version
        # and on how the cluster tracks processes.
        f"--signal=B:USR1@{launch.stop_seconds}",
        *launch.extra,
    ]


def time_limit_seconds(time: str) -> int | None:
    """A time limit in SLURM's notation, such as ``90``, ``90:00``, ``1:30:00`` or ``1-12``, in seconds.

    None for other texts, such as ``UNLIMITED``.
    """
    days, dash, clock = time.rpartition("-")
    parts = [*days.split("-"), *clock.split(":")] if dash else ["0", *clock.split(":")]
    if not all(part.isascii() and part.isdecimal() for part in parts) or not 2 <= len(parts) <= 4:
        return None
    numbers = [int(part) for part in parts]
    if not dash and len(numbers) < 4:  # without days, one number is minutes and two are minutes:seconds
        numbers.insert(1, 0)
    day, hour, minute, second = (*numbers, 0, 0)[:4]
    return ((24 * day + hour) * 60 + minute) * 60 + second


def _refuse_control_characters(key: str, value: str) -> None:
    if _CONTROL_CHARACTERS.search(value):
        raise ConfigError(
            f"{key}: got {value!r}, which has a line break or another control character. The batch script needs it on one "
            "line: remove the character."
        )


def _job_name(name: str) -> str:
    return f"--job-name={shlex.quote(name)}"


def _output(path: Path) -> list[str]:
    # sbatch replaces patterns such as %j. Those in the file name are wanted; a % in the folder is escaped.
    folder = str(path.parent).replace("%", "%%")
    # append, because a requeued job writes to the same file and would otherwise empty it.
    return [f"--output={shlex.quote(f'{folder}/{path.name}')}", "--open-mode=append"]


def _directives(options: Iterable[str]) -> str:
    return "".join(f"#SBATCH {option}\n" for option in options)


def _words(words: Iterable[str]) -> str:
    lines = "".join(f"  {shlex.quote(word)}\n" for word in words)
    return f"\n{lines}" if lines else ""


def frozen_arguments(job: Job) -> list[str]:
    """``job.arguments`` with the presets that ``freeze_presets`` copies into the run directory."""
    folder = job.spec.dir / PRESETS
    config_dirs = [
        part for number in range(len(job.spec.config_dirs)) for part in ("--config-dir", str(folder / str(number)))
    ]
    return ["--config-path", str(folder / "conf"), *config_dirs, *job.overrides]


def freeze_presets(job: Job) -> None:
    """Copies the presets of dtrain and of the user into the run directory.

    Raises:
        ConfigError: If they cannot be written.
    """
    folder = job.spec.dir / PRESETS
    with as_config_error("run.dir"):
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(conf_dir(), folder / "conf")
        for number, config_dir in enumerate(job.spec.config_dirs):
            shutil.copytree(config_dir, folder / str(number))
