"""The run of one fault: starts jobs, waits for messages, and counts what was lost. For ``game_day.py``.

Below it are the network, the disk and the server that faults happen to.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.fault_hook import faulty
from dtrain.data import digits

ROOT = Path(__file__).resolve().parents[1]
AT, EPOCHS = 14, 2  # The fault's step, before its forward; epochs of 12 steps.
#: Seconds without progress that count as a hang (parallel.timeout_step).
LIMIT = 15
RUN = (
    *("experiment=digits", "tracker=none", "model.width=4", "checkpoint.best=null", "data.record_keys=true"),
    *(f"train.max_epochs={EPOCHS}", "train.global_batch_size=128", "train.log_every=1", "train.eval_every=0"),
    *("checkpoint.every_steps=4", "data.num_workers=0", f"parallel.timeout_step={LIMIT}"),
)
#: Of the screen: the line that says where a start begins, and that of a step.
BANNER = re.compile(r"^  starts +(?:after step (\d+)|new)", re.MULTILINE)
STEP = re.compile(r"^step (\d+)/", re.MULTILINE)


class NotPassed(Exception):
    """A fault was not survived; the text says in what."""


class NotPlayed(Exception):
    """A fault cannot be caused here; the text says why."""


class LocalJob:
    """One start of a run on this machine: torchrun with its ranks, or one process without torchrun.

    Args:
        words: Arguments of ``dtrain.train``.
        ranks: Number of processes.
        log: Its output is appended to this file.
        prefix: A command that starts the job, such as ``ip netns exec NAME``.
        options: Of torchrun; with several nodes the number of processes, too.
    """

    def __init__(
        self, words: list[str], ranks: int, log: Path, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> None:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *(options or ("--standalone",))]
        command += ["-m", "dtrain.train", *words]
        with log.open("a") as output:
            self._process = subprocess.Popen([*prefix, *command], stdout=output, stderr=output, cwd=ROOT)
        self._under_torchrun = ranks > 1

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
        return sorted(harness.children(self.torchrun)) if self._under_torchrun else [self.torchrun]

    def ask_to_stop(self) -> None:
        """What a scheduler does that needs the machine."""
        self._process.terminate()

    def kill(self, *pids: int) -> None:
        """SIGKILL to these processes; without any to all."""
        for pid in pids or (*self.ranks, self.torchrun):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            self._process.wait()


class SlurmJob:
    """One start of a run with ``dtrain.launch`` on two nodes, one process on each.

    Args:
        words: Arguments of ``dtrain.train``.
        run_dir: The run's directory.
        options: Further keys of ``launch``.
    """

    def __init__(self, words: list[str], run_dir: Path, options: tuple[str, ...]) -> None:
        shape = ("launch=slurm", "launch.nodes=2", "launch.processes_per_node=1", *options)
        harness.run(harness.python("-m", "dtrain.launch", *shape, *words))
        self._job = str(json.loads((run_dir / "launch.json").read_text())["job"])

    @property
    def alive(self) -> bool:
        """Whether it runs, or waits to be started (again)."""
        command = ["squeue", "-h", "-j", self._job, "-o", "%T"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        return bool(shown.stdout.strip())

    def ask_to_stop(self) -> None:
        """What SLURM does before the time limit; the job then requeues itself."""
        harness.run(["scancel", "--signal=USR1", "--batch", self._job])

    def kill(self) -> None:
        """Cancels the job."""
        subprocess.run(["scancel", self._job], check=False)


@dataclass
class Row:
    """What a fault cost.

    Attributes:
        fault: The first column.
        noticed: Seconds from the fault to its message; None if it needs none.
        again: Seconds to the second new step, from the next command, or from the fault if no command was needed.
        steps: Steps that were computed twice.
        lost: Samples that were used too seldom.
        doubled: Samples that were used too often.
        message: The line on the screen.
        problem: Why the fault is not passed; empty if it is.
    """

    fault: str
    noticed: float | None = None
    again: float | None = None
    steps: int | None = None
    lost: int | None = None
    doubled: int | None = None
    message: str = ""
    problem: str = ""


class Game:
    """The run of one fault.

    Args:
        fault: The first column of its row.
        folder: For the run and what belongs to it.
        patience: Seconds after which a wait counts as a hang.
        slurm: Further keys of ``launch``, on a cluster; None: on this machine.

    Attributes:
        row: The measurements.
        job: The latest start; None before the first.
        overrides: Further config of all starts.
    """

    def __init__(self, fault: str, folder: Path, patience: float, slurm: tuple[str, ...] | None) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "screen.log"
        self.row = Row(fault)
        self.job: LocalJob | SlurmJob | None = None
        self.overrides: tuple[str, ...] = ()
        self._patience, self._slurm = patience, slurm
        self.log.touch()
        self.happens()

    @property
    def alive(self) -> bool:
        """Whether the job runs."""
        return self.job is not None and self.job.alive

    @property
    def local(self) -> LocalJob:
        """The job, of a fault that is played on one machine only."""
        assert isinstance(self.job, LocalJob)
        return self.job

    def happens(self) -> None:
        """The moment of the fault: only what is printed from now on counts as its message."""
        self._happened, self._seen = time.monotonic(), len(self._screen())

    def start(
        self, *overrides: str, ranks: int = 2, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()
    ) -> None:
        """Starts the run. This is the moment of the fault until ``happens`` is called again."""
        self.happens()
        chosen = [f"run.dir={self.run_dir}", *self.overrides, *overrides]
        keys = {word.partition("=")[0] for word in chosen}
        words = [*(word for word in RUN if word.partition("=")[0] not in keys), *chosen]
        if self._slurm is not None:
            self.job = SlurmJob(words, self.run_dir, self._slurm)
        else:
            self.job = LocalJob(words, ranks, self.log, prefix, options)

    def begin(
        self,
        *overrides: str,
        fault: str = f"slow@step={AT},seconds=4",
        ranks: int = 2,
        options: tuple[str, ...] = (),
    ) -> None:
        """Starts the run and waits for a fault that it injects; by default for a pause in which the caller causes one."""
        self.start(*overrides, faulty(fault), ranks=ranks, options=options)
        self.await_injected(fault)

    def await_injected(self, fault: str) -> None:
        """Waits until a run has injected this fault."""
        kind, _, rest = fault.partition("@")
        values = {"rank": "0"} | dict(part.partition("=")[::2] for part in rest.split(","))
        marker = self.run_dir / "faults" / f"{kind}-rank-{values['rank']}-step-{values['step']}"
        self.wait(lambda: marker.exists() or not self.alive, "the fault's step")
        if not marker.exists():
            raise NotPassed("ended before the fault")
        self.happens()

    def killed(self) -> None:
        """A run of one process that was killed before step 14, with checkpoints of steps 8 and 12; made once and copied."""
        made = self.folder.parent / "killed"
        if not made.exists():
            game = Game("", made, self._patience, None)
            # Without the pause, the checkpoint of step 12 may not be written yet.
            game.start(faulty(f"slow@step={AT - 1},seconds=3", f"kill@step={AT}"), ranks=1)
            try:
                game.await_injected(f"kill@step={AT}")
                game.wait(lambda: not game.alive, "the end of the killed run")
            except BaseException:
                if game.job is not None and game.alive:
                    game.job.kill()
                shutil.copy(game.log, self.log)
                shutil.rmtree(made)  # the next fault needs a complete run
                raise
        shutil.copytree(made / "run", self.run_dir)
        shutil.copy(made / "screen.log", self.log)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits.

        Raises:
            NotPassed: If it takes longer than the patience.
        """
        deadline = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > deadline:
                raise NotPassed(f"waited {self._patience:.0f} s for {what}")
            time.sleep(0.05)

    def await_end(self, pids: list[int]) -> None:
        """Waits until processes have ended; also if their parent has not read their exit codes."""

        def runs(pid: int) -> bool:
            with suppress(OSError):
                return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
            return False

        self.wait(lambda: not any(map(runs, pids)), "the end of the ranks")

    def notice(self, message: str, *, ends: bool = True) -> None:
        """Waits for the message of the fault, a regular expression, and for the end of a job that does not restart itself.

        Raises:
            NotPassed: If it does not come.
        """
        found: list[str] = []

        def look() -> bool:
            alive = self.alive  # before the look: what it said last counts
            found[:] = [line.strip() for line in self._said().splitlines() if re.search(message, line)]
            return bool(found) or not alive

        self.wait(look, f"a message like {message!r}")
        if not found:
            raise NotPassed(f"ended without a message like {message!r}")
        self.row.noticed, self.row.message = time.monotonic() - self._happened, found[0]
        if ends and self._slurm is None:
            self.wait(lambda: not self.alive, "the end of the job")

    def again(self, *overrides: str, ranks: int = 2) -> None:
        """Gives the same command again, unless SLURM has started the job again, and waits until the run is finished.

        Raises:
            NotPassed: If it does not finish, or if there was no message and the new start mentions no restart either.
        """
        self.wait(lambda: not self.alive or BANNER.search(self._said()), "the end of the job")
        if not self.alive:
            self.start(*overrides, ranks=ranks)
        self.goes_on(restarted=True)
        if not self.row.message:
            restarts = re.search(r"^  (restarts .*)", self._said(), re.MULTILINE)
            if restarts is None:
                raise NotPassed("no message")
            self.row.message = " ".join(restarts[1].split())

    def goes_on(self, *, restarted: bool = False) -> None:
        """Waits until the run is finished, and counts.

        Args:
            restarted: Whether only steps of a start since the fault are new ones.

        Raises:
            NotPassed: If it does not finish.
        """

        def second_step() -> bool:
            _, start, new = self._said().rpartition("\n  starts  ")
            return len(STEP.findall(new)) >= 2 and bool(start or not restarted)

        self.wait(lambda: second_step() or not self.alive, "the second step")
        self.row.again = time.monotonic() - self._happened
        self.wait(lambda: not self.alive, "the end of the run")
        state = json.loads((self.run_dir / "status.json").read_text())["state"]
        if state != "finished":
            raise NotPassed(f"the run is {state}")
        screen = self._screen()
        starts = BANNER.findall(screen)
        if len(starts) < 2:
            self.row.steps = 0
        else:
            before = screen[: screen.rindex("\n  starts  ")]
            # The last step before an injected fault may not have been printed.
            least = AT - 1 if (self.run_dir / "faults").exists() else 0
            self.row.steps = max([least, *map(int, STEP.findall(before))]) - int(starts[-1] or 0)
        counts = collections.Counter(self._samples())
        missing = [EPOCHS - count for count in counts.values()]
        missing += [EPOCHS] * (digits.TRAIN_SAMPLES - len(counts))
        self.row.lost = sum(number for number in missing if number > 0)
        self.row.doubled = -sum(number for number in missing if number < 0)

    def shards(self) -> Path:
        """Makes own shards for this run; their folder."""
        folder = Path(shutil.copytree(digits.shard_dir(), self.folder / "shards"))
        self.overrides = (f"data.train={folder}/train-*.tar", f"data.eval={folder}/test-*.tar", "data.prepare=null")
        return folder

    def _screen(self) -> str:
        """What all starts have printed; on SLURM that is in the run's directory."""
        files = [self.log, *sorted(self.run_dir.glob("logs/slurm-*.out"), key=lambda path: path.stat().st_ctime_ns)]
        return "".join(path.read_text(errors="replace") for path in files)

    def _said(self) -> str:
        """What was printed since the fault."""
        return self._screen()[self._seen :]

    def _samples(self) -> Iterator[str]:
        """The key of each use of a sample, and of each bad sample."""
        logs = self.run_dir / "logs"
        for path in logs.glob("keys-rank-*.jsonl"):
            for line in path.read_text().splitlines():
                yield from json.loads(line)["keys"]
        for path in logs.glob("bad-rank-*.jsonl"):
            yield from (json.loads(line)["key"] for line in path.read_text().splitlines())


# -- where faults happen: networks, disks, servers


def ip(*arguments: str) -> None:
    """Calls ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPlayed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces as two nodes; their names, which are those of their network devices, too."""
    names = f"a{os.getpid()}", f"b{os.getpid()}"
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NotPlayed("needs ip and root")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.98.0.{number}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with suppress(NotPlayed):
                ip("netns", "del", name)


@contextmanager
def mounted(folder: Path, options: str, keep: bool = False) -> Iterator[None]:
    """A file system in memory at a folder; with ``keep`` it has the folder's files."""
    content = folder.rename(folder.with_name("content")) if keep else None
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotPlayed(done.stderr.strip())
    try:
        if content is not None:
            shutil.copytree(content, folder, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@contextmanager
def server(game: Game) -> Iterator[dict[str, str]]:
    """The shards on an HTTP server; yields how it treats a file, by name: ``404``, ``half`` or ``hang``."""
    answers: dict[str, str] = {}

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self) -> Any:
            while answers.get(Path(self.path).name) == "hang":
                time.sleep(0.1)
            if answers.get(Path(self.path).name) == "404":
                return self.send_error(404)
            return super().send_head()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            content = source.read()
            outputfile.write(content[: len(content) // 2] if answers.get(Path(self.path).name) == "half" else content)

        def log_message(self, *_: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=digits.shard_dir()))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{web.server_port}"
    game.overrides = (f"data.train='{address}/train-{{000000..000007}}.tar'", "data.prepare=null")
    try:
        yield answers
    finally:
        answers.clear()
        web.shutdown()
