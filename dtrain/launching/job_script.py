"""The batch scripts of runs: what each asks of SLURM and starts, then ``job_body.sh``, the same for all runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtrain.config.errors import ConfigError
from dtrain.launching.point import Point
from dtrain.launching.presets import frozen_arguments

_BODY = Path(__file__).with_name("job_body.sh")


def job_script(point: Point) -> str:
    """The script, complete: it can be read, edited and submitted by hand. Depends on the working directory.

    Raises:
        ConfigError: If the keys of ``launch`` contradict each other.
    """
    launch = point.launch
    body = _BODY.read_text().partition("\nset -uo pipefail\n")[2]  # without what it says to those who source it
    return (
        "#!/bin/bash\n"
        f"# Written by dtrain.launch. {_AGAIN[launch.requeue]} To start it again:\n"
        f"#   sbatch {shlex.quote(str(script_path(point)))}\n"
        "#\n"
        f"{_directives([_name(point.run.name), *_resources(point), *_output(log_path(point))])}"
        "\n"
        f"run_dir={shlex.quote(str(point.run.dir))}\n"
        f"python={shlex.quote(launch.python or sys.executable)}\n"
        f"processes={processes(point)} # a node\n"
        f"arguments=({_words(frozen_arguments(point))})\n"
        f"srun_options=({_words(launch.srun)})\n"
        f"container=({_words(launch.container)})\n"
        f"requeue={int(launch.requeue)}\n"
        "\n"
        "set -uo pipefail\n" + body
    )


def array_script(points: Sequence[Point], folder: Path) -> str:
    """The script of a job array whose elements are these runs, ``launch.max_running`` of them at once.

    Args:
        points: A sweep.
        folder: Where the output of the elements goes.

    Raises:
        ConfigError: If the runs ask for different things, which elements of an array cannot.
    """
    asked = [_resources(point) for point in points]
    for other in asked[1:]:
        if other != asked[0]:
            differ = sorted(set(asked[0]) ^ set(other))
            raise ConfigError(
                f"launch.max_running: the runs of one job array ask for the same, but these differ in "
                f"{', '.join(differ)}. Leave launch.max_running out: then each run is a job of its own."
            )
    array = f"--array=0-{len(points) - 1}%{points[0].launch.max_running}"
    return (
        "#!/bin/bash\n"
        "# Written by dtrain.launch: a sweep. Each element is a run, and does what its own script says.\n"
        "#\n"
        f"{_directives([_name(folder.name), array, *asked[0], *_output(folder / array_log_name('%A', '%a'))])}"
        "\n"
        f"scripts=({_words(str(script_path(point)) for point in points)})\n"
        'exec bash "${scripts[SLURM_ARRAY_TASK_ID]}"\n'
    )


def script_path(point: Point) -> Path:
    """Where the script of a run is kept."""
    return point.run.dir / "job.sbatch"


def log_path(point: Point, job: str = "%j") -> Path:
    """Where the output of a job goes."""
    return point.run.dir / "logs" / f"slurm-{job}.out"


def array_log_name(job: str, element: int | str) -> str:
    """The file of an element's output."""
    return f"slurm-{job}_{element}.out"


def processes(point: Point) -> int:
    """Processes on each node.

    Raises:
        ConfigError: If it is not given: this machine cannot know what the nodes have.
    """
    if point.launch.processes_per_node is None:
        raise ConfigError("launch.processes_per_node: launch=slurm needs a number. Set it to the GPUs that a node has.")
    return point.launch.processes_per_node


def seconds(time: str) -> int | None:
    """SLURM's notations of a time limit, such as ``90``, ``90:00``, ``1:30:00`` and ``1-12``, in seconds; None for others."""
    days, dash, clock = time.rpartition("-")
    parts = [*days.split("-"), *clock.split(":")] if dash else ["0", *clock.split(":")]
    if not all(part.isdecimal() for part in parts) or not 2 <= len(parts) <= 4:
        return None
    numbers = [int(part) for part in parts]
    if not dash and len(numbers) < 4:  # minutes come first, not hours
        numbers.insert(1, 0)
    day, hour, minute, second = (*numbers, 0, 0)[:4]
    return ((24 * day + hour) * 60 + minute) * 60 + second


_AGAIN = {True: "The job asks for new allocations until the run is finished.", False: "One allocation and no more."}


def _cpus_per_process(point: Point) -> int:
    if point.launch.cpus_per_process is not None:
        return point.launch.cpus_per_process
    workers = point.run.config["data"]["num_workers"]
    if workers == "auto":
        raise ConfigError(
            "launch.cpus_per_process: data.num_workers=auto uses the cores that there are, so it needs a number. Set it to "
            "what a process may have, such as a node's cores divided by its GPUs."
        )
    return 1 + int(workers)


def _resources(point: Point) -> list[str]:
    """What a run asks for; the same for all elements of an array."""
    launch = point.launch
    gpus = processes(point) if launch.gpus_per_node is None else launch.gpus_per_node
    if 0 < gpus < processes(point):
        raise ConfigError(
            f"launch.gpus_per_node: got {gpus} for launch.processes_per_node={processes(point)}. Each process needs a "
            "GPU of its own; 0 trains on CPUs."
        )
    cpus = _cpus_per_process(point) * processes(point)
    allocation = seconds(launch.time)
    if allocation is not None and allocation <= launch.stop_seconds:
        raise ConfigError(
            f"launch.time: got {launch.time}, which is not longer than launch.stop_seconds={launch.stop_seconds}: the run "
            "would be asked to stop as soon as it starts. Give it more time, or less to stop in."
        )
    for name in ("extra", "srun"):
        for option in getattr(launch, name):
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(f"launch.{name}: got {option!r}, want options of {_COMMAND[name]}.")
    return [
        # Without --ntasks-per-node=1: SLURM would take it for what the least number of nodes needs, and give no more.
        f"--nodes={launch.nodes if launch.min_nodes is None else f'{launch.min_nodes}-{launch.nodes}'}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        f"--cpus-per-task={cpus}",
        f"--time={launch.time}",
        *([f"--partition={launch.partition}"] if launch.partition else []),
        *([f"--account={launch.account}"] if launch.account else []),
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        "--requeue" if launch.requeue else "--no-requeue",
        # B: the batch shell alone is told. Without it the signal goes to torchrun, and what becomes of it there depends
        # on torch's version and on how the cluster tracks processes.
        f"--signal=B:USR1@{launch.stop_seconds}",
        *launch.extra,
    ]


_COMMAND = {"extra": "sbatch, such as '--qos=high'", "srun": "srun, such as '--container-image=image.sqsh'"}


def _name(name: str) -> str:
    return f"--job-name={shlex.quote(name)}"


def _output(path: Path) -> list[str]:
    # SLURM replaces patterns such as %j, and %% by %. Those of the file's name are meant.
    folder = str(path.parent).replace("%", "%%")
    # The same file over all restarts; without append each would empty it.
    return [f"--output={shlex.quote(f'{folder}/{path.name}')}", "--open-mode=append"]


def _directives(options: Iterable[str]) -> str:
    return "".join(f"#SBATCH {option}\n" for option in options)


def _words(words: Iterable[str]) -> str:
    lines = "".join(f"  {shlex.quote(word)}\n" for word in words)
    return f"\n{lines}" if lines else ""
