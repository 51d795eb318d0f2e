"""The batch script of a run: what this run asks of SLURM and starts, then ``job_body.sh``, the same for all runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from dtrain.config.errors import ConfigError
from dtrain.launching.point import Point

_BODY = Path(__file__).with_name("job_body.sh")


def job_script(point: Point) -> str:
    """The script, complete: it can be read, edited and submitted by hand. Depends on the working directory.

    Raises:
        ConfigError: If the keys of ``launch`` contradict each other.
    """
    directives = "".join(f"#SBATCH {option}\n" for option in _options(point))
    arguments = "".join(f"  {shlex.quote(argument)}\n" for argument in point.arguments)
    body = _BODY.read_text().partition("\n\n")[2]  # without the line for shellcheck
    return (
        "#!/bin/bash\n"
        "# Written by dtrain.launch. The job goes back into the queue until the run is finished. To start it again:\n"
        f"#   sbatch {shlex.quote(str(script_path(point)))}\n"
        "#\n"
        f"{directives}"
        "\n"
        f"run_dir={shlex.quote(str(point.run.dir))}\n"
        f"python={shlex.quote(sys.executable)}\n"
        f"processes={processes(point)} # a node\n"
        f"arguments=(\n{arguments})\n"
        "\n" + body
    )


def script_path(point: Point) -> Path:
    """Where the script of a run is kept."""
    return point.run.dir / "job.sbatch"


def log_path(point: Point, job: str = "%j") -> Path:
    """Where the output of a job goes."""
    return point.run.dir / "logs" / f"slurm-{job}.out"


def processes(point: Point) -> int:
    """Processes on each node.

    Raises:
        ConfigError: If it is not given: this machine cannot know what the nodes have.
    """
    if point.launch.processes_per_node is None:
        raise ConfigError("launch.processes_per_node: launch=slurm needs a number. Set it to the GPUs that a node has.")
    return point.launch.processes_per_node


def _options(point: Point) -> list[str]:
    launch, run = point.launch, point.run
    gpus = processes(point) if launch.gpus_per_node is None else launch.gpus_per_node
    if 0 < gpus < processes(point):
        raise ConfigError(
            f"launch.gpus_per_node: got {gpus} for launch.processes_per_node={processes(point)}. Each process needs a "
            "GPU of its own; 0 trains on CPUs."
        )
    workers = int(run.config["data"]["num_workers"])
    cpus = (1 + workers if launch.cpus_per_process is None else launch.cpus_per_process) * processes(point)
    for option in launch.extra:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(f"launch.extra: got {option!r}, want options of sbatch, such as '--qos=high'.")
    # SLURM replaces %j in it, and %% by %.
    output = str(log_path(point)).replace("%", "%%").replace("%%j.out", "%j.out")
    return [
        f"--job-name={shlex.quote(run.name)}",
        f"--nodes={launch.nodes}",
        # One task a node: torchrun, which starts the processes.
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        f"--cpus-per-task={cpus}",
        f"--time={launch.time}",
        *([f"--partition={launch.partition}"] if launch.partition else []),
        *([f"--account={launch.account}"] if launch.account else []),
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        # The same file over all restarts; without append each would empty it.
        f"--output={shlex.quote(output)}",
        "--open-mode=append",
        "--requeue",
        # B: the batch shell alone is told. Without it the signal goes to torchrun, and what becomes of it there depends
        # on torch's version and on how the cluster tracks processes.
        f"--signal=B:USR1@{launch.stop_seconds}",
        *launch.extra,
    ]
