"""Plays faults against small training runs, one after the other, and shows what each of them costs.

    python scripts/game_day.py [--only PATTERN] [--list] [--launcher slurm] [--json FILE]

Every fault has a run of its own: 24 steps of the digits on two processes, a checkpoint every fourth step, the fault before step
14. Then the same command is given again, until the run is finished. A fault is *passed* if a message names it, nothing waits
longer than ``--patience``, and each sample was used once an epoch or is in the log of bad samples. The exit code is 1 if a
fault is not passed.

``--launcher slurm`` plays the faults that make sense there, on two nodes of this cluster; ``--dir`` must then be on a file
system that all nodes share. Options for the jobs are given as ``--launch launch.partition=debug``.

Columns: *noticed* is the time from the fault to its message; *again* from the next command to its second step, or from the
fault if no second command was needed; *steps* were computed twice; *lost* and *doubled* are samples.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from dtrain.data import digits  # noqa: E402

AT, STEPS, EPOCHS = 14, 24, 2  # the fault's step, steps in all, epochs
#: Seconds without progress that count as a hang (parallel.timeout_step).
LIMIT = 15
RUN = (
    *("experiment=digits", "tracker=none", "model.width=4", "checkpoint.best=null", "data.record_keys=true"),
    *(f"train.max_epochs={EPOCHS}", "train.global_batch_size=128", "train.log_every=1", "train.eval_every=0"),
    *("checkpoint.every_steps=4", "data.num_workers=0", f"parallel.timeout_step={LIMIT}"),
)


class NotPassed(Exception):
    """A fault was not survived; the text says in what."""


class NotPlayed(Exception):
    """A fault cannot be caused here; the text says why."""


# -- jobs: one start of a run


class LocalJob:
    """torchrun with its ranks; one process without torchrun.

    Args:
        words: Arguments of ``dtrain.train``.
        ranks: Number of processes.
        log: Its output is appended to this file.
        prefix: A command that starts the job, such as ``ip netns exec``.
        options: Of torchrun.
    """

    def __init__(
        self, words: list[str], ranks: int, log: Path, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> None:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *(options or ("--standalone",))]
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [*prefix, *command, "-m", "dtrain.train", *words], stdout=output, stderr=output, cwd=ROOT
            )
        self._ranks = ranks

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def torchrun(self) -> int:
        """Process id of torchrun."""
        return self._process.pid

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        return sorted(harness.children(self.torchrun)) if self._ranks > 1 else [self.torchrun]

    def ask_to_stop(self) -> None:
        """What a scheduler does that needs the machine."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self, *pids: int) -> None:
        """SIGKILL to these processes; without any to all."""
        for pid in pids or (*self.ranks, self.torchrun):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            self._process.wait()


class SlurmJob:
    """A job of ``dtrain.launch`` on two nodes, one process on each.

    Args:
        words: Arguments of ``dtrain.train``.
        log: The job's output is appended to this file.
        options: Further keys of ``launch``.
    """

    def __init__(self, words: list[str], log: Path, options: tuple[str, ...]) -> None:
        shape = ("launch=slurm", "launch.nodes=2", "launch.processes_per_node=1", "launch.gpus_per_node=0", *options)
        shape += ("launch.extra=['--open-mode=append','--output=" + str(log) + "']",)
        said = harness.run(harness.python("-m", "dtrain.launch", *shape, *words))
        run_dir = next(word.partition("=")[2] for word in words if word.startswith("run.dir="))
        self._job = str(json.loads((Path(run_dir) / "launch.json").read_text())["job"])
        if not self._job:
            raise NotPassed(said)

    @property
    def alive(self) -> bool:
        """Whether it runs, or waits to be started (again)."""
        states = subprocess.run(["squeue", "-h", "-j", self._job, "-o", "%T"], capture_output=True, text=True).stdout
        return bool(states.strip())

    def ask_to_stop(self) -> None:
        """What SLURM does before the time limit; the job requeues itself."""
        harness.run(["scancel", "--signal=USR1", "--batch", self._job])

    def kill(self, *_: int) -> None:
        """Cancels the job."""
        subprocess.run(["scancel", self._job], check=False)


# -- one fault


@dataclasses.dataclass
class Row:
    """A row of the table; see the head of this file."""

    fault: str
    noticed: float | None = None
    again: float | None = None
    steps: int | None = None
    lost: int | None = None
    doubled: int | None = None
    message: str = ""
    problem: str = ""


class Game:
    """The run of one fault, and its measurements.

    Args:
        folder: For the run and what belongs to it.
        arguments: The command line.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "screen.log"
        self.row = Row("")
        self._patience, self._slurm = arguments.patience, arguments.launcher == "slurm"
        self._launch = tuple(arguments.launch)
        self.overrides: tuple[str, ...] = ()
        self._happened = 0.0
        self._seen = 0
        self.job: LocalJob | SlurmJob | None = None
        self.log.touch()

    @property
    def alive(self) -> bool:
        """Whether the job runs."""
        return self.job is not None and self.job.alive

    @property
    def local(self) -> LocalJob:
        """The job, of a fault that is played on one machine only."""
        assert isinstance(self.job, LocalJob)
        return self.job

    def start(
        self, *overrides: str, ranks: int = 2, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> None:
        """Starts the run, and takes this as the moment of the fault until ``happens`` is called."""
        words = [*RUN, f"run.dir={self.run_dir}", *self.overrides, *overrides]
        self.happens()
        if self._slurm:
            self.job = SlurmJob(words, self.log, self._launch)
        else:
            self.job = LocalJob(words, ranks, self.log, prefix, options)

    def begin(
        self,
        *overrides: str,
        fault: str = f"slow@step={AT},seconds=4",
        ranks: int = 2,
        options: tuple[str, ...] = (),
    ) -> None:
        """Starts the run and waits for an injected fault; by default it waits for a few seconds, so that we can cause one."""
        kind, _, rest = fault.partition("@")
        rank = (re.findall(r"rank=(\d+)", rest) or ["0"])[0]
        self.start(*overrides, f'faults=["{fault}"]', ranks=ranks, options=options)
        step = re.findall(r"step=(\d+)", rest)[0]
        self.wait((self.run_dir / "faults" / f"{kind}-rank-{rank}-step-{step}").exists, "the fault's step")
        self.happens()

    def killed(self) -> None:
        """A run that was killed before step 14, with checkpoints of steps 8 and 12; made once and copied."""
        made = self.folder.parent / "killed"
        if not made.exists():
            game = Game(made, argparse.Namespace(patience=self._patience, launcher="local", launch=()))
            game.begin(fault=f"kill@step={AT}", ranks=1)
            game.wait(lambda: not game.alive, "the end of the killed run")
        shutil.copytree(made / "run", self.run_dir)
        shutil.copy(made / "screen.log", self.log)

    def happens(self) -> None:
        """The moment of the fault: only what is printed from now on counts as its message."""
        self._happened = time.monotonic()
        self._seen = self.log.stat().st_size

    def silent(self) -> None:
        """A fault that needs no message: it is over, or all that could speak is dead."""
        self.row.message = "-"

    def resumes(self, message: str = "") -> None:
        """Starts a run whose files were damaged: it has to say so and to go on."""
        self.start(ranks=1)
        if message:
            self.notice(message, ends=False)
        else:
            self.silent()
        self.goes_on()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits.

        Raises:
            NotPassed: If it takes too long.
        """
        deadline = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > deadline:
                raise NotPassed(f"waited {self._patience:.0f} s for {what}")
            time.sleep(0.05)

    def notice(self, message: str, *, ends: bool = True) -> None:
        """Waits for the message of the fault, a regular expression, and for the end of the job."""
        found: list[str] = []

        def look() -> bool:
            running = self.alive  # before the look at the file: what it said last counts
            with self.log.open("rb") as file:
                file.seek(self._seen)
                lines = file.read().decode(errors="replace").splitlines()
            found[:] = [line for line in lines if re.search(message, line)]
            return bool(found) or not running

        self.wait(look, f"a message like {message!r}")
        if not found:
            raise NotPassed(f"ended without a message like {message!r}")
        self.row.noticed = time.monotonic() - self._happened
        self.row.message = found[0].strip()
        if ends:
            self.wait(lambda: not self.alive, "the end of the job")

    def again(self, *overrides: str, ranks: int = 2) -> None:
        """Gives the same command again, and waits until the run is finished."""
        if self.alive:
            self.wait(lambda: not self.alive, "the end of the job")
        self.start(*overrides, ranks=ranks)
        self.goes_on()

    def goes_on(self) -> None:
        """Waits until the run is finished; without a new command, if it was not given again."""
        self.wait(lambda: self._second_step() or not self.alive, "the second step")
        self.row.again = time.monotonic() - self._happened if self._second_step() else None
        self.wait(lambda: not self.alive, "the end of the run")
        state = json.loads((self.run_dir / "status.json").read_text())["state"]
        if state != "finished":
            raise NotPassed(f"the run is {state}")
        before, banner, _ = self.log.read_text(errors="replace").rpartition("  starts  ")
        resumed = [int(step) for step in re.findall(r"  starts +after step (\d+),", self.log.read_text())]
        done = [int(step) for step in re.findall(r"^step (\d+)/", before, re.MULTILINE)]
        self.row.steps = (
            max([AT - 1, *done]) - resumed[-1] if resumed else max([0, *done]) if before.count(banner) else 0
        )
        counts = collections.Counter(self._used_samples())
        used = [EPOCHS - counts[key] for key in counts] + [EPOCHS] * (digits.TRAIN_SAMPLES - len(counts))
        self.row.lost = sum(max(0, missing) for missing in used)
        self.row.doubled = sum(max(0, -missing) for missing in used)

    def _second_step(self) -> bool:
        text = self.log.read_text(errors="replace")
        return len(re.findall(r"^step \d+/", text[self._seen :], re.MULTILINE)) >= 2

    def _used_samples(self) -> Iterator[str]:
        for path in (self.run_dir / "logs").glob("keys-rank-*.jsonl"):
            for line in path.read_text().splitlines():
                yield from json.loads(line)["keys"]
        for path in (self.run_dir / "logs").glob("bad-rank-*.jsonl"):
            yield from (json.loads(line)["key"] for line in path.read_text().splitlines())

    def checkpoint(self, name: str, step: int = 12) -> Path:
        """A file of a checkpoint of a killed run."""
        return self.run_dir / "checkpoints" / f"step-{step:09d}" / name

    def shards(self) -> Path:
        """Own shards for this run; its data from the first start on."""
        folder = Path(shutil.copytree(digits.shard_dir(), self.folder / "shards"))
        self.overrides = (f"data.train={folder}/train-*.tar", f"data.eval={folder}/test-*.tar", "data.prepare=null")
        return folder


FAULTS: dict[str, Callable[[Game], None]] = {}
ON_SLURM: set[str] = set()


def fault(function: Callable[[Game], None]) -> Callable[[Game], None]:
    """Adds a fault; its docstring is its name in the table."""
    FAULTS[function.__name__] = function
    return function


def on_slurm(function: Callable[[Game], None]) -> Callable[[Game], None]:
    """Adds a fault that is played on clusters, too."""
    ON_SLURM.add(function.__name__)
    return fault(function)


# -- faults: processes


@on_slurm
def kill_rank(game: Game) -> None:
    """rank 1 is killed"""
    game.begin(fault=f"kill@rank=1,step={AT}")
    game.notice("another rank is gone|rank 1 .*SIGKILL")
    game.again()


@on_slurm
def kill_rank_0(game: Game) -> None:
    """rank 0 is killed"""
    game.begin(fault=f"kill@rank=0,step={AT}")
    game.notice("another rank is gone|rank 0 .*SIGKILL")
    game.again()


@fault
def kill_rank_restarts(game: Game) -> None:
    """rank 1 is killed, torchrun --max-restarts=1"""
    game.begin(fault=f"kill@rank=1,step={AT}", options=("--standalone", "--max-restarts=1"))
    game.notice("another rank is gone|rank 1 .*SIGKILL", ends=False)
    game.goes_on()


@fault
def kill_torchrun(game: Game) -> None:
    """torchrun is killed"""
    game.begin()
    ranks = game.local.ranks
    game.local.kill(game.local.torchrun)
    game.notice("dtrain: ", ends=False)
    game.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the end of the ranks")
    game.again()


@fault
def kill_job(game: Game) -> None:
    """all processes are killed at once"""
    game.begin()
    game.local.kill()
    game.silent()
    game.again()


@fault
def kill_in_save(game: Game) -> None:
    """all processes are killed while a checkpoint is written"""
    game.begin("checkpoint.every_steps=1")
    staged = game.run_dir / "checkpoints"
    game.wait(lambda: any(path.name.startswith(".") for path in staged.iterdir()) or not game.alive, "a save")
    game.local.kill()
    game.silent()
    game.again()


@fault
def kill_worker(game: Game) -> None:
    """a worker of the loader is killed"""
    game.begin("data.num_workers=1")
    workers = [pid for rank in game.local.ranks for pid in harness.children(rank)]
    game.local.kill(workers[0])
    game.notice("worker")
    game.again()


@on_slurm
def crash(game: Game) -> None:
    """rank 1 raises an exception"""
    game.begin(fault=f"crash@rank=1,step={AT}")
    game.notice("rank 1 failed|InjectedFault")
    game.again()


@on_slurm
def hang(game: Game) -> None:
    """rank 1 hangs"""
    game.begin(fault=f"hang@rank=1,step={AT}")
    game.notice("  rank 1, step")
    game.again()


@fault
def suspended(game: Game) -> None:
    """rank 1 is suspended for longer than parallel.timeout_step"""
    game.begin()
    suspended = game.local.ranks[1]
    os.kill(suspended, signal.SIGSTOP)
    try:
        game.notice("rank 1.*no answer")
    finally:
        game.local.kill(suspended)
    game.again()


@fault
def suspended_briefly(game: Game) -> None:
    """rank 1 is suspended for a third of parallel.timeout_step"""
    game.begin()
    rank = game.local.ranks[1]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(LIMIT / 3)
    os.kill(rank, signal.SIGCONT)
    game.silent()
    game.goes_on()


@fault
def network_cut(game: Game) -> None:
    """the network between two nodes is cut"""
    with two_nodes() as nodes:
        jobs = []
        for node, name in enumerate(nodes):
            options: tuple[str, ...] = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.98.0.1:29500")
            options += (f"--local-addr=10.98.0.{node + 1}", f"--rdzv-conf=is_host={1 - node}", "--nproc-per-node=1")
            words = [*RUN, f"run.dir={game.run_dir}", f'faults=["slow@step={AT},seconds=4"]']
            jobs.append(LocalJob(words, 2, game.log, ("ip", "netns", "exec", name), options))
        game.job = jobs[0]
        game.wait((game.run_dir / "faults" / f"slow-rank-0-step-{AT}").exists, "the fault's step")
        ranks = [rank for job in jobs for rank in job.ranks]
        ip("-n", nodes[0], "link", "set", nodes[0], "down")
        game.happens()
        game.notice("no answer|has not answered", ends=False)
        game.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the end of the ranks of both nodes")
        # torchrun's own store has no time limit: on the node that is cut off, it waits for a quarter of an hour.
        for job in jobs:
            job.kill()
    game.again()


@on_slurm
def stop_file(game: Game) -> None:
    """a file STOP in the run directory"""
    game.begin()
    (game.run_dir / "STOP").touch()
    game.notice("stopped at step")
    game.again()


@on_slurm
def asked_to_stop(game: Game) -> None:
    """SIGTERM; on SLURM the signal before the time limit"""
    game.begin()
    assert game.job is not None
    game.job.ask_to_stop()
    game.notice("stopped at step", ends=isinstance(game.job, LocalJob))
    if isinstance(game.job, LocalJob):
        game.again()
    else:
        game.goes_on()


@fault
def interrupted(game: Game) -> None:
    """Ctrl-C"""
    game.begin()
    os.kill(game.local.torchrun, signal.SIGINT)
    game.notice("stopped at step")
    game.again()


@fault
def time_limit(game: Game) -> None:
    """the time of run.max_hours is over"""
    game.begin("run.max_hours=0.0001")
    game.notice("stopped at step")
    game.again("run.max_hours=null")


@fault
def second_job(game: Game) -> None:
    """a second job in the same directory"""
    game.begin(fault=f"slow@step={AT},seconds=60")
    first = game.local
    game.start(ranks=1)
    game.notice("is used by|in use|another")
    first.kill()
    game.again()


# -- faults: disks


@on_slurm
def disk_full_once(game: Game) -> None:
    """a checkpoint cannot be written (ENOSPC)"""
    game.begin(fault="disk_full@step=16")
    game.notice("No space left", ends=False)
    game.goes_on()


@fault
def disk_full(game: Game) -> None:
    """the disk is full"""
    with mounted(game.run_dir, "size=16m"):
        game.begin()
        filler = game.run_dir / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        game.notice("No space left")
        filler.unlink()
        game.again()


@fault
def no_inodes(game: Game) -> None:
    """the disk has no free inodes"""
    with mounted(game.run_dir, "size=16m,nr_inodes=60"):
        game.begin()
        (filler := game.run_dir / "filler").mkdir()
        with suppress(OSError):
            for number in range(60):
                (filler / str(number)).touch()
        game.notice("No space left", ends=False)
        shutil.rmtree(filler)
        game.goes_on()


@fault
def file_size_limit(game: Game) -> None:
    """files may not be larger than 24 KiB (ulimit -f)"""
    game.start(prefix=("bash", "-c", 'ulimit -f 24; exec "$@"', "--"))
    game.notice("File too large|record_keys=true, but")
    game.again()


@fault
def read_only(game: Game) -> None:
    """the run directory is read-only"""
    game.killed()
    with mounted(game.run_dir, "size=16m", keep=True):
        subprocess.run(["mount", "-o", "remount,ro", game.run_dir], check=True)
        game.start(ranks=1)
        game.notice("Read-only file system")
        subprocess.run(["mount", "-o", "remount,rw", game.run_dir], check=True)
        game.again(ranks=1)


# -- faults: files of the run, between two starts


@fault
def torn_checkpoint(game: Game) -> None:
    """newest checkpoint: a file is truncated"""
    game.killed()
    os.truncate(game.checkpoint("model.safetensors"), 1000)
    game.resumes("step-000000012")


@fault
def empty_file(game: Game) -> None:
    """newest checkpoint: a file is empty"""
    game.killed()
    os.truncate(game.checkpoint("optimizer.safetensors"), 0)
    game.resumes("step-000000012")


@fault
def flipped_bit(game: Game) -> None:
    """newest checkpoint: one bit has changed"""
    game.killed()
    flip_bit(game.checkpoint("model.safetensors"))
    game.resumes("step-000000012")


@fault
def lost_manifest(game: Game) -> None:
    """newest checkpoint: no manifest"""
    game.killed()
    game.checkpoint("manifest.json").unlink()
    game.resumes("step-000000012")


@fault
def pipe(game: Game) -> None:
    """newest checkpoint: a FIFO instead of a file"""
    game.killed()
    game.checkpoint("state.json").unlink()
    os.mkfifo(game.checkpoint("state.json"))
    game.resumes("step-000000012")


@fault
def endless_link(game: Game) -> None:
    """newest checkpoint: a link to /dev/zero instead of a file"""
    game.killed()
    game.checkpoint("model.safetensors").unlink()
    game.checkpoint("model.safetensors").symlink_to("/dev/zero")
    game.resumes("step-000000012")


@fault
def all_damaged(game: Game) -> None:
    """all checkpoints are damaged, and restored later"""
    game.killed()
    for step in (8, 12):
        flip_bit(game.checkpoint("model.safetensors", step))
    game.start(ranks=1)
    game.notice("error: ")
    for step in (8, 12):
        flip_bit(game.checkpoint("model.safetensors", step))
    game.again(ranks=1)


@fault
def lost_checkpoints(game: Game) -> None:
    """all checkpoints were deleted (a purge of scratch), and restored later"""
    game.killed()
    (game.run_dir / "checkpoints").rename(game.folder / "backup")
    game.start(ranks=1)
    game.notice("error: ")
    (game.folder / "backup").rename(game.run_dir / "checkpoints")
    game.again(ranks=1)


@fault
def torn_status(game: Game) -> None:
    """status.json is torn"""
    game.killed()
    os.truncate(game.run_dir / "status.json", 20)
    game.resumes("status.json")


@fault
def wrong_status(game: Game) -> None:
    """status.json has values of other types"""
    game.killed()
    (game.run_dir / "status.json").write_text('{"state": 3, "step": "x", "time": [], "restarts": null}')
    game.resumes("status.json")


@fault
def torn_metrics(game: Game) -> None:
    """metrics.jsonl and the sample log end within a line"""
    game.killed()
    for path in (game.run_dir / "metrics.jsonl", game.run_dir / "logs" / "keys-rank-00000.jsonl"):
        os.truncate(path, path.stat().st_size - 10)
    game.resumes()


@fault
def clock(game: Game) -> None:
    """the clock goes back by a day between two starts"""
    game.killed()
    tomorrow = time.time() + 86400
    status = json.loads((game.run_dir / "status.json").read_text())
    (game.run_dir / "status.json").write_text(json.dumps(status | {"time": tomorrow}))
    for path in game.run_dir.rglob("*"):
        os.utime(path, (tomorrow, tomorrow))
    game.resumes()


# -- faults: data and arithmetic


@on_slurm
def not_a_number(game: Game) -> None:
    """the gradients of rank 1 are NaN"""
    game.begin(fault=f"nan@rank=1,step={AT}")
    game.notice("skip", ends=False)
    game.goes_on()


@on_slurm
def bad_sample(game: Game) -> None:
    """a sample cannot be read"""
    game.begin(fault=f"corrupt_sample@rank=1,step={AT}")
    game.notice("bad|could not be read", ends=False)
    game.goes_on()


@fault
def poison(game: Game) -> None:
    """a sample in each of four shards is no image"""
    for path in sorted(game.shards().glob("train-*.tar"))[:4]:
        damage_image(path)
    game.start(ranks=1)
    game.notice("bad|could not be read", ends=False)
    game.goes_on()


@fault
def truncated_shard(game: Game) -> None:
    """a shard is truncated between two starts, and restored later"""
    shard = game.shards() / "train-000003.tar"
    game.begin(fault=f"kill@step={AT}", ranks=1)
    content = shard.read_bytes()
    game.wait(lambda: not game.alive, "the end of the killed run")
    os.truncate(shard, 5000)
    game.start(ranks=1)
    game.notice("error: ")
    shard.write_bytes(content)
    game.again(ranks=1)


@fault
def replaced_shard(game: Game) -> None:
    """a shard is replaced by another one while the run reads it, and restored later"""
    folder = game.shards()
    game.begin(fault="slow@step=4,seconds=4")
    shard = folder / "train-000003.tar"
    content = shard.read_bytes()
    shutil.copy(folder / "train-000004.tar", folder / "new")
    (folder / "new").replace(shard)
    game.notice("train-000003.tar", ends=False)
    shard.write_bytes(content)
    game.again()


@fault
def missing_object(game: Game) -> None:
    """the server of the shards answers 404 for one, and has it later"""
    with server(game) as answers:
        answers["train-000003.tar"] = "404"
        game.start(ranks=1)
        game.notice("train-000003.tar")
        answers.clear()
        game.again(ranks=1)


@fault
def hanging_server(game: Game) -> None:
    """the server of the shards does not answer for ten seconds"""
    with server(game) as answers:
        answers["train-000003.tar"] = "hang"
        threading.Timer(20, answers.clear).start()
        game.start(ranks=1)
        game.silent()
        game.goes_on()


@fault
def lying_server(game: Game) -> None:
    """the server of the shards sends half of a shard"""
    with server(game) as answers:
        answers["train-000003.tar"] = "lie"
        game.start(ranks=1)
        game.notice("train-000003.tar")
        answers.clear()
        game.again(ranks=1)


# -- helpers of faults


def flip_bit(path: Path) -> None:
    """Changes a bit in the middle; the second time it changes it back."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_image(shard: Path) -> None:
    """Overwrites the first image of a shard; the tar stays valid."""
    content = shard.read_bytes()
    start = content.index(b"\x89PNG")
    shard.write_bytes(content[:start] + b"poison__" + content[start + 8 :])


def ip(*arguments: str) -> None:
    """Calls ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPlayed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable; their names, which are those of their devices, too."""
    names = (f"day-{os.getpid()}-a"[-15:], f"day-{os.getpid()}-b"[-15:])
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NotPlayed("needs ip and root")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.98.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(NotPlayed):
                ip("netns", "del", name)


@contextmanager
def mounted(folder: Path, options: str, keep: bool = False) -> Iterator[None]:
    """A file system in memory at a folder; with ``keep`` it has the folder's files."""
    content = folder.with_name("content")
    if keep:
        folder.rename(content)
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        raise NotPlayed(done.stderr.strip())
    try:
        if keep:
            shutil.copytree(content, folder, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@contextmanager
def server(game: Game) -> Iterator[dict[str, str]]:
    """The shards on an HTTP server: yields what it does with which name, ``404``, ``hang`` or ``lie``."""
    folder, answers = Path(digits.shard_dir()), dict[str, str]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = Path(self.path).name
            while answers.get(name) == "hang":
                time.sleep(0.1)
            if answers.get(name) == "404":
                return self.send_error(404)
            content = (folder / name).read_bytes()
            first, last = (
                re.findall(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))[0]
                if "Range" in self.headers
                else (0, "")
            )
            part = content[int(first) : int(last) + 1 if last else None]
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Accept-Ranges", "bytes")
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part[: len(part) // 2] if answers.get(name) == "lie" else part)
                self.close_connection = answers.get(name) == "lie"

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{web.server_port}"
    game.overrides = (f"data.train='{address}/train-{{000000..000007}}.tar'", "data.prepare=null")
    try:
        yield answers
    finally:
        web.shutdown()


# -- the command


def play(name: str, folder: Path, arguments: argparse.Namespace) -> Row:
    """Plays one fault; its row."""
    game = Game(folder / name, arguments)
    game.row.fault = (FAULTS[name].__doc__ or name).strip()
    try:
        FAULTS[name](game)
        if game.row.lost or game.row.doubled:
            game.row.problem = "samples"
    except NotPassed as error:
        game.row.problem = str(error)
    except NotPlayed as error:
        game.row.message = f"(not played: {error})"
    finally:
        if game.job is not None and game.alive:
            game.job.kill()
    return game.row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="faults whose name or text has this regular expression"
    )
    parser.add_argument("--list", action="store_true", help="list the faults, and play none")
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local")
    parser.add_argument("--launch", nargs="*", default=[], metavar="KEY=VALUE", help="options of the SLURM jobs")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds until a wait counts as a hang (default %(default)s)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="where the runs go and stay; default: a temporary folder, kept if a fault is not passed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    arguments = parser.parse_args()
    names = [name for name in FAULTS if arguments.launcher == "local" or name in ON_SLURM]
    names = [name for name in names if re.search(arguments.only, f"{name} {FAULTS[name].__doc__}")]
    if arguments.list or not names:
        print(
            "\n".join(f"{name:20} {FAULTS[name].__doc__}" for name in names) or f"no fault matches {arguments.only!r}"
        )
        raise SystemExit(not names)
    folder = (arguments.dir or Path(tempfile.mkdtemp(prefix="game-day-"))).resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    digits.prepare()
    rows = []
    for number, name in enumerate(names, 1):
        rows.append(row := play(name, folder, arguments))
        print(f"{number}/{len(names)} {row.fault}: {row.problem or 'passed'}", flush=True)
    show(rows)
    harness.finish(arguments, {"faults": [dataclasses.asdict(row) for row in rows]})
    if any(row.problem for row in rows):
        raise SystemExit(f"not passed: see the runs in {folder}")
    if arguments.dir is None:
        shutil.rmtree(folder)


def show(rows: list[Row]) -> None:
    """Prints the table."""

    def cell(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    table = harness.Table("fault", range(len(rows)), dict(enumerate(row.fault for row in rows)))
    columns = {"noticed": 1, "again": 1, "steps": 0, "lost": 0, "doubled": 0}
    for name, decimals in columns.items():
        table.text(name, {at: cell(getattr(row, name), decimals) for at, row in enumerate(rows)})
    print()
    table.show()
    for row in rows:
        message = re.sub(r"/\S*/", "", f"NOT PASSED: {row.problem}" if row.problem else row.message)
        print(f"{row.fault}: {message[:110]}")


if __name__ == "__main__":
    main()
