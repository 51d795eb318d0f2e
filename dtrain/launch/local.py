"""Runs on this machine, under torchrun as child processes; in the pods of a cluster, this machine's part of a run.

* A run is stopped with a file ``STOP`` in its directory, not with a signal: torchrun 2.9 does not forward SIGUSR1, and
  30 seconds after it forwards any signal it kills ranks that are still saving. With the file, the ranks agree on a step,
  save and exit by themselves, and then torchrun exits, too.
* With ``launch.max_running`` a run has a *share* of the cores and GPUs of this machine, and writes its output to
  ``logs/output.log`` instead of the terminal.
* A run that another process already trains is *taken over*: nothing is started, and the result is the other process's.
  It may have been started by a launcher that was killed, or by one that runs at the same time.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from dtrain.distributed.lock import START_ID, read_holder
from dtrain.distributed.services import check_gpus
from dtrain.distributed.world import choose_device, process_cpu_count, rendezvous_options
from dtrain.errors import ConfigError, as_config_error
from dtrain.files import try_lock
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job, JobResult, StatusJudge, StopRequest
from dtrain.launch.pool import Pool, Screen
from dtrain.runs.run_dir import is_plain, is_trained, tail

#: Output of a run in its directory, if it was not written to the terminal.
OUTPUT = Path("logs") / "output.log"
# Of the output of a refused run: bytes that are read, and lines that are shown if there is no message in them.
_SHOWN_OUTPUT, _SHOWN_LINES = 4000, 15


def check(jobs: Sequence[Job]) -> None:
    """Refuses jobs that cannot run on this machine.

    Raises:
        ConfigError: If a job has several nodes, the jobs that run at a time need more GPUs than this machine has, or several
            jobs are to run at a time on one of several machines.
    """
    for job in jobs:
        if job.launch.nodes != 1:
            raise ConfigError(
                f"launch.nodes: got {job.launch.nodes}, but launch=local starts processes on this machine only. "
                "Set launch=slurm, or start torchrun on each node."
            )
        running, gpus = max_running(job), len(_gpus())
        if running > 1 and not rendezvous_options():
            raise ConfigError(
                f"launch.max_running: got {running}, but this machine is one of several (PET_NNODES="
                f"{os.environ['PET_NNODES']}), which train one run at a time. Leave it out, or unset PET_NNODES."
            )
        share = shares(running)[0]
        wanted = processes(job, share)
        if running > 1 and gpus and wanted > len(share.gpus):
            raise ConfigError(
                f"launch.max_running: {running} runs of {wanted} processes at a time need {running * wanted} GPUs, but this "
                f"machine has {gpus}. Set at most {gpus // wanted}, or hide the GPUs to train on CPUs: CUDA_VISIBLE_DEVICES="
            )
        choose_device(wanted - 1, wanted, len(share.gpus))


def describe(jobs: Sequence[Job]) -> str:
    """The shell commands that ``launch`` would run."""
    running = max_running(jobs[0])
    share = shares(running)[0]
    head = f"# {running} at a time, each with {share}\n" if running > 1 else ""
    return head + "".join(describe_command(job, share) for job in jobs)


def launch(jobs: Sequence[Job]) -> list[JobResult]:
    """Runs the jobs, ``launch.max_running`` at a time; one that fails does not stop the others.

    A signal stops those that run, and later jobs are not started.
    """
    running = min(max_running(jobs[0]), len(jobs))
    screen = Screen(len(jobs)) if running > 1 else None
    results: dict[Path, JobResult] = {}
    waiting = deque(jobs)
    with Pool(running, starter(running, screen), screen) as pool:
        while pool.starts or (waiting and not pool.stopping):
            while waiting and pool.has_room:
                pool.start(waiting.popleft())
            for job, result, seconds in pool.wait():
                results[job.spec.dir] = result
                if screen is not None:
                    done = int(result.code != STOPPED)
                    screen.note(f"{job.name}: {result.state} after {seconds}{_because(result)}", done)
    for job in jobs:
        failed = results.get(job.spec.dir)
        # A single run that was refused has explained that itself, as the last lines of its output.
        if failed is not None and failed.code == FAILED and (failed.reason or len(jobs) > 1):
            where = job.spec.dir / OUTPUT if screen else job.spec.dir / "logs"
            logs = f" {'Its output' if screen else 'Logs of the ranks'}: {where}" if where.exists() else ""
            sys.stderr.write(f"dtrain: error: {job.name} failed{_because(failed)}.{logs}\n")
    return [results.get(job.spec.dir, JobResult("not started", STOPPED)) for job in jobs]


def _because(result: JobResult) -> str:
    return f": {result.reason.splitlines()[0].rstrip('.')}" if result.reason else ""


def max_running(job: Job) -> int:
    """How many jobs of a sweep or search run at a time."""
    return job.launch.max_running or 1


def processes(job: Job, share: MachineShare) -> int:
    """Number of processes: ``launch.processes_per_node``, by default one for each GPU, or one without GPUs."""
    return job.launch.processes_per_node or len(share.gpus) or 1


def command(job: Job, share: MachineShare, *options: str) -> list[str]:
    """The torchrun command of a job, with the current Python interpreter and further options of torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous_options()),
        f"--nproc-per-node={processes(job, share)}",
        # 0 is the default, but PET_MAX_RESTARTS in the environment could change it.
        *("--max-restarts=0", *options, *_tee(processes(job, share))),
        *("-m", "dtrain.train", *job.arguments),
    ]


def describe_command(job: Job, share: MachineShare) -> str:
    """The line of a shell that starts a job."""
    return f"OMP_NUM_THREADS={_threads(job, share)} {shlex.join(command(job, share))}\n"


# -- shares of the machine


@dataclass(frozen=True)
class MachineShare:
    """The part of this machine that one of several runs uses.

    Attributes:
        cores: Numbers of the cores.
        gpus: GPUs as in CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
        is_all: Whether it is the whole machine.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    is_all: bool

    def __str__(self) -> str:
        """Such as ``8 cores and 1 GPU``."""
        counts = [(len(self.cores), "core"), *([(len(self.gpus), "GPU")] if self.gpus else [])]
        return " and ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)

    @contextmanager
    def affinity(self) -> Iterator[None]:
        """Processes started in the block run on the cores of the share. The number of workers follows from them, too."""
        if self.is_all or not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)  # of this thread; the new process inherits it
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def shares(number: int) -> list[MachineShare]:
    """Divides the cores and GPUs that this process may use into ``number`` equal shares.

    With fewer cores than shares, each share has all cores. With fewer GPUs than shares, no share has a GPU.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(process_cpu_count())
    cores, gpus = tuple(sorted(affinity)), _gpus()
    several = len(cores) >= number
    return [
        MachineShare(
            cores[place * len(cores) // number : (place + 1) * len(cores) // number] if several else cores,
            tuple(gpus[place * (len(gpus) // number) :][: len(gpus) // number]),
            number == 1,
        )
        for place in range(number)
    ]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    count = check_gpus(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


# -- one start


def starter(running: int, screen: Screen | None) -> Callable[[Job, int], LocalStart]:
    """The function with which a pool of ``running`` slots starts jobs on this machine."""
    parts = shares(running)
    note = screen.note if screen is not None else lambda text: sys.stderr.write(f"dtrain: {text}\n")
    return lambda job, slot: LocalStart(job, parts[slot], to_file=screen is not None, note=note)


class LocalStart:
    """A torchrun process that does not get the signals of the terminal, or a start of another command that trains the run.

    Args:
        job: The job.
        share: The cores and GPUs that it may use.
        to_file: Whether its output goes to ``logs/output.log`` instead of the terminal.
        note: Called with a message if the run is taken over.
    """

    def __init__(self, job: Job, share: MachineShare, to_file: bool, note: Callable[[str], object]) -> None:
        self.job = job
        self._note = note
        self._stop = StopRequest(job.spec.dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: _Output | None = None
        self._is_left = False
        settle_outputs(job.spec.dir)
        if not self._takes_over():
            self._start(share, to_file)

    def _start(self, share: MachineShare, to_file: bool) -> None:
        job, start = self.job, uuid.uuid4().hex
        # Of several machines, one holds the lock, so the others would not recognise their start.
        self._judge = StatusJudge(job.spec.dir, start if rendezvous_options() else None)
        self._output = _Output(job.spec.dir, start) if to_file else None
        line = describe_command(job, share)
        if self._output is None:
            sys.stderr.write(line)
            sys.stderr.flush()
        else:
            self._output.file.write(line.encode())
            self._output.file.flush()
        environment = os.environ | {"OMP_NUM_THREADS": _threads(job, share), START_ID: start}
        if share.gpus and not share.is_all:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        # Not in the run directory: torchrun creates its folder even if the run is refused.
        self._torchrun_logs = tempfile.TemporaryDirectory(prefix="dtrain-")
        with share.affinity():
            # In a new session, because Ctrl-C signals every process of the terminal, and torchrun would exit at once.
            self._process = subprocess.Popen(
                command(job, share, f"--log-dir={self._torchrun_logs.name}"),
                env=environment,
                start_new_session=True,
                stdout=self._output.file if self._output else None,
                stderr=subprocess.STDOUT if self._output else None,
            )

    def _takes_over(self) -> bool:
        """Takes the run over if another process trains it with the same settings; returns whether it does."""
        judge = StatusJudge(self.job.spec.dir)  # read first: the other process may end now
        # The processes of one run on several machines start independently of each other.
        if not rendezvous_options() or not is_trained(self.job.spec.dir, without_locks=False):
            return False
        if not self._has_same_settings():
            return False
        self._process, self._judge = None, judge
        settle_outputs(self.job.spec.dir)
        holder = read_holder(self.job.spec.dir)
        by = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
        self._note(f"{self.job.name}: already trained by another command ({by}): waiting until it ends")
        return True

    def result(self) -> JobResult | None:
        """The result; None while the run is trained."""
        if self._process is not None:
            ended = self._process.poll() is not None
            if self._output is not None and self._judge.has_status:
                self._output.keep()
            if not ended:
                return None
            self._torchrun_logs.cleanup()
            printed = self._output.close() if self._output else ""
            # The start may have been refused because another one was faster.
            if not self._judge.has_status and self._takes_over():
                return None
            result = self._judge()
            result = replace(result, reason=_error(printed)) if printed and result.code == FAILED else result
        elif self._is_left:
            return JobResult("still trained", STOPPED)
        elif is_trained(self.job.spec.dir, without_locks=False):
            return None
        else:
            result = self._judge()
            if result.code == FAILED and result.reason is None:
                result = replace(result, reason="the process that trained it was killed and could not record a reason")
        self._stop.withdraw()
        if result.code == FAILED and self._has_same_settings() and self.job.is_finished:
            return JobResult("finished", FINISHED)  # by another command, between two looks
        return result

    def _has_same_settings(self) -> bool:
        try:
            return not self.job.spec.changes()
        except ConfigError:  # a different run has the directory by now
            return False

    def stop(self) -> None:
        """Asks the process that trains the run to save and stop."""
        self._stop.write()

    def kill(self) -> None:
        """Terminates torchrun, which forwards SIGTERM to the ranks and kills them after 30 s.

        Does not wait for a run that was taken over any longer.
        """
        if self._process is not None:
            self._process.terminate()
        self._is_left = True


class _Output:
    """The output of one start: next to the run directory until the run is accepted, then ``logs/output.log`` in it.

    A refused run must not leave anything in its directory, nor create it. The processes of the start inherit the lock on the
    file, so that the file of a start that has ended can be told from one that is written.
    """

    def __init__(self, run_dir: Path, start: str) -> None:
        self._kept_at = run_dir / OUTPUT
        self._path = run_dir.with_name(f".{run_dir.name}.{start}.output")
        with as_config_error("run.dir"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[bytes] = self._path.open("wb")
        try_lock(self.file)  # settle_outputs of another command leaves it alone

    def keep(self) -> None:
        """Moves the file into the run directory, if that was not done; the processes continue to write to it."""
        if self._path != self._kept_at:
            self._kept_at.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another command has moved it
                os.replace(self._path, self._kept_at)
            self._path = self._kept_at

    def close(self) -> str:
        """Closes the file; of a refused run also deletes it and returns its end."""
        self.file.close()
        if self._path == self._kept_at:
            return ""
        with suppress(FileNotFoundError):  # another command has deleted it
            end = tail(self._path, _SHOWN_OUTPUT)
            self._path.unlink()
            return end
        return ""


def settle_outputs(run_dir: Path) -> None:
    """Moves the output of a run into its directory, if the launcher was killed first; deletes the output of refused starts."""
    newest = read_holder(run_dir).get("start")
    for path in run_dir.parent.glob(f".{glob.escape(run_dir.name)}.*.output"):
        start = path.name.removeprefix(f".{run_dir.name}.").removesuffix(".output")
        if not re.fullmatch("[0-9a-f]{32}", start) or not is_plain(path):
            continue
        with suppress(OSError):  # not ours
            if start == newest:
                (run_dir / OUTPUT).parent.mkdir(exist_ok=True)
                os.replace(path, run_dir / OUTPUT)
                continue
            with path.open("rb") as file:
                if try_lock(file, without_locks=False):
                    path.unlink()


def _error(printed: str) -> str:
    """The error message of dtrain in an output, else its last lines."""
    message = printed.rpartition("dtrain: error: ")[2] if "dtrain: error: " in printed else ""
    return message.strip() or "\n".join(printed.strip().splitlines()[-_SHOWN_LINES:])


def _tee(processes: int) -> list[str]:
    # Rank 0 writes to the terminal directly, for its progress line. Standard error of all ranks stays on the terminal:
    # through a log file, a traceback would appear after the error report of torchrun. torchrun parses one-digit ranks only.
    ranks = ",".join(f"{rank}:1" for rank in range(1, min(processes, 10)))
    return [f"--tee={ranks}"] if ranks else []


def _threads(job: Job, share: MachineShare) -> str:
    """``OMP_NUM_THREADS`` of each process: as in the environment, else cores / processes. torchrun would set 1."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(share.cores) // processes(job, share)))
