"""Plays faults against small training runs, one after the other, and shows what each of them costs.

    python scripts/game_day.py [--only PATTERN] [--list] [--launcher slurm] [--json FILE]

Every fault has a run of its own: 24 steps of the digits on two processes, a checkpoint every fourth step, the fault before
step 14. Then the same command is given again. A fault is *passed* if a message names it, nothing waits longer than
``--patience``, and the run finishes with each sample used once an epoch, or in the log of bad samples. The exit code is 1 if
one is not passed.

``--launcher slurm`` plays the faults that make sense there, on two nodes; ``--dir`` must then be on a file system that all
nodes share. Keys for the jobs are given as ``--launch launch.partition=debug launch.time=10``.

Columns: *noticed*: seconds from the fault to its message; *again*: seconds from the next command to its second step, or from
the fault if no command was needed; *steps*: computed twice; *lost*, *doubled*: samples.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from game_day_run import AT, LIMIT, RUN, Game, LocalJob, NotPassed, NotPlayed, Row, ip, mounted, server, two_nodes

from benchmarks import harness
from benchmarks.fault_hook import faulty
from dtrain.data import digits

#: What is played, by the first column of the table; the second value: on clusters, too.
FAULTS: dict[str, tuple[Callable[[Game], None], bool]] = {}
PAUSE = f"slow@step={AT},seconds=4"
UNNOTICED = "- (goes on)"


def fault(play: Callable[[Game], None]) -> Callable[[Game], None]:
    """Adds a fault; its docstring is the first column."""
    FAULTS[play.__doc__ or ""] = play, False
    return play


def on_slurm(play: Callable[[Game], None]) -> Callable[[Game], None]:
    """Adds a fault that is played on clusters, too."""
    FAULTS[play.__doc__ or ""] = play, True
    return play


# -- faults that the run injects into itself: see benchmarks/fault_hook.py


def injected(what: str, message: str, ends: bool, game: Game) -> None:
    """Injects a fault, waits for the message, and gives the command again if it ends the run."""
    game.begin(fault=what)
    game.notice(message, ends=ends)
    if ends:
        game.again()
    else:
        game.goes_on()


GONE = r"another rank is gone|rank \d .*SIGKILL"
for text, what, message, ends in (
    ("rank 1 is killed", f"kill@rank=1,step={AT}", GONE, True),
    ("rank 0 is killed", f"kill@rank=0,step={AT}", GONE, True),
    ("rank 1 raises an exception", f"crash@rank=1,step={AT}", "^dtrain: .*InjectedFault|InjectedFault: ", True),
    ("rank 1 hangs", f"hang@rank=1,step={AT}", "  rank 1.*, step", True),
    ("a checkpoint cannot be written", "disk_full@step=16", "No space left", False),
    ("the gradients of rank 1 are NaN", f"nan@rank=1,step={AT}", "skip", False),
    ("a sample cannot be read", f"corrupt_sample@rank=1,step={AT}", "  bad [1-9]", False),
):
    FAULTS[text] = partial(injected, what, message, ends), True


# -- processes


@fault
def _(game: Game) -> None:
    """rank 1 is killed, torchrun --max-restarts=1"""
    game.begin(fault=f"kill@rank=1,step={AT}", options=("--standalone", "--max-restarts=1"))
    game.notice(GONE, ends=False)
    game.goes_on(restarted=True)


@fault
def _(game: Game) -> None:
    """torchrun is killed"""
    game.begin()
    ranks = game.local.ranks
    game.local.kill(game.local.torchrun)
    game.await_end(ranks)
    game.again()


@fault
def _(game: Game) -> None:
    """all processes are killed at once"""
    game.begin()
    game.local.kill()
    game.again()


@fault
def _(game: Game) -> None:
    """all are killed while a checkpoint is written"""
    game.begin("checkpoint.every_steps=1")
    folder = game.run_dir / "checkpoints"
    game.wait(lambda: any(path.name.startswith(".") for path in folder.iterdir()) or not game.alive, "a save")
    game.local.kill()
    game.again()


@fault
def _(game: Game) -> None:
    """a worker of the loader is killed"""
    game.begin("data.num_workers=1")
    game.local.kill(min(harness.children(game.local.ranks[0])))
    game.notice("loader worker .* was killed", ends=False)
    game.goes_on()


@fault
def _(game: Game) -> None:
    """rank 1 is suspended, longer than timeout_step"""
    game.begin()
    os.kill(rank := game.local.ranks[1], signal.SIGSTOP)
    try:
        game.notice("rank 1.*no answer", ends=False)
    finally:
        game.local.kill(rank)
    game.again()


@fault
def _(game: Game) -> None:
    """rank 1 is suspended, shorter than timeout_step"""
    game.begin()
    os.kill(rank := game.local.ranks[1], signal.SIGSTOP)
    time.sleep(LIMIT / 3)
    os.kill(rank, signal.SIGCONT)
    game.row.message = UNNOTICED
    game.goes_on()


@fault
def _(game: Game) -> None:
    """the network between two nodes is cut"""
    with two_nodes() as nodes:
        jobs = []
        for number, node in enumerate(nodes):
            options: tuple[str, ...] = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.98.0.1:29500")
            options += ("--nproc-per-node=1", f"--local-addr=10.98.0.{number + 1}", f"--rdzv-conf=is_host={1 - number}")
            words = [*RUN, f"run.dir={game.run_dir}", faulty(PAUSE)]
            jobs.append(LocalJob(words, 2, game.log, ("ip", "netns", "exec", node), options))
        game.job = jobs[0]
        game.await_injected(PAUSE)
        ranks = [rank for job in jobs for rank in job.ranks]
        ip("-n", nodes[0], "link", "set", nodes[0], "down")
        game.notice("no answer|has not answered", ends=False)
        game.await_end(ranks)
        # The store of torchrun itself has no time limit: on the node that is cut off, it waits for a quarter of an hour.
        for job in jobs:
            job.kill()
    game.again()


# -- stops


@on_slurm
def _(game: Game) -> None:
    """a file STOP in the run directory"""
    game.begin()
    (game.run_dir / "STOP").touch()
    game.notice("stopped at step")
    game.again()


@on_slurm
def _(game: Game) -> None:
    """SIGTERM (SLURM: SIGUSR1 before the time limit)"""
    game.begin()
    assert game.job is not None
    game.job.ask_to_stop()
    game.notice("stopped at step")
    game.again()


@fault
def _(game: Game) -> None:
    """Ctrl-C"""
    game.begin()
    os.kill(game.local.torchrun, signal.SIGINT)
    game.notice("stopped at step")
    game.again()


@on_slurm
def _(game: Game) -> None:
    """the job is cancelled"""
    game.begin()
    assert game.job is not None
    game.job.kill()
    game.again()


@fault
def _(game: Game) -> None:
    """the time of run.max_hours is over"""
    game.start("run.max_hours=0.0001")
    game.notice("stopped at step")
    game.again("run.max_hours=null")


@fault
def _(game: Game) -> None:
    """a second job in the same directory"""
    # Each of the steps is shorter than the time limit.
    game.begin(fault=f"slow@step={AT},seconds={LIMIT / 2},steps=10")
    first = game.local
    game.start(ranks=1)
    game.notice("error: ")
    first.kill()
    game.again()


# -- disks


@fault
def _(game: Game) -> None:
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
def _(game: Game) -> None:
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
def _(game: Game) -> None:
    """files of at most 24 KiB (ulimit -f)"""
    game.start(prefix=("bash", "-c", 'ulimit -f 24; exec "$@"', "--"))
    game.notice("File too large")
    game.again()


@fault
def _(game: Game) -> None:
    """the run directory is read-only"""
    game.killed()
    with mounted(game.run_dir, "size=16m", keep=True):
        subprocess.run(["mount", "-o", "remount,ro", game.run_dir], check=True)
        game.start(ranks=1)
        game.notice("cannot be written")
        subprocess.run(["mount", "-o", "remount,rw", game.run_dir], check=True)
        game.again(ranks=1)


# -- files of the run, between two starts


def damaged(damage: Callable[[Path], object], message: str, game: Game) -> None:
    """Damages files of a killed run; it resumes, with a message unless nothing is lost."""
    game.killed()
    damage(game.run_dir)
    game.start(ranks=1)
    if message:
        game.notice(message, ends=False)
    else:
        game.row.message = UNNOTICED
    game.goes_on()


def refused(damage: Callable[[Path], object], restore: Callable[[Path], object], game: Game) -> None:
    """Damages files of a killed run; it is refused until they are restored."""
    game.killed()
    damage(game.run_dir)
    game.start(ranks=1)
    game.notice("error: ")
    restore(game.run_dir)
    game.again(ranks=1)


def replace_by(make: Callable[[Path], object], path: Path) -> None:
    """Replaces a file by something else."""
    path.unlink()
    make(path)


def flip_bit(path: Path) -> None:
    """Changes a bit in the middle; the second time it changes it back."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_all(run: Path) -> None:
    """Changes a bit of each checkpoint."""
    for path in run.glob("checkpoints/step-*/model.safetensors"):
        flip_bit(path)


def tear_lines(run: Path) -> None:
    """Ends files of records within a line."""
    for path in (run / "metrics.jsonl", *run.glob("logs/keys-*")):
        os.truncate(path, path.stat().st_size - 10)


def date_tomorrow(run: Path) -> None:
    """Dates everything a day ahead."""
    tomorrow, status = time.time() + 86400, run / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"time": tomorrow}))
    for path in run.rglob("*"):
        os.utime(path, (tomorrow, tomorrow))


NEWEST, STATUS, SKIPPED = "step-000000012", "status.json", "skipped .*step-000000012"
WRONG = '{"state": 3, "step": "x", "time": [], "restarts": null}'
DAMAGES: tuple[tuple[str, Callable[[Path], object], str], ...] = (
    ("newest checkpoint: a file is truncated", lambda last: os.truncate(last / "model.safetensors", 999), SKIPPED),
    ("newest checkpoint: a file is empty", lambda last: os.truncate(last / "optimizer.safetensors", 0), SKIPPED),
    ("newest checkpoint: a bit has changed", lambda last: flip_bit(last / "model.safetensors"), SKIPPED),
    ("newest checkpoint: no manifest", lambda last: (last / "manifest.json").unlink(), SKIPPED),
    ("newest checkpoint: a FIFO", lambda last: replace_by(os.mkfifo, last / "state.json"), SKIPPED),
    (
        "newest checkpoint: a link to /dev/zero",
        lambda last: replace_by(lambda path: path.symlink_to("/dev/zero"), last / "model.safetensors"),
        SKIPPED,
    ),
)
for text, damage, message in DAMAGES:
    FAULTS[text] = (
        partial(damaged, partial(lambda damage, run: damage(run / "checkpoints" / NEWEST), damage), message),
        False,
    )
for text, damage, message in (
    ("status.json is torn", lambda run: os.truncate(run / STATUS, 20), r"status\.json"),
    ("status.json has wrong types", lambda run: (run / STATUS).write_text(WRONG), r"status\.json"),
    ("metrics and sample log end within a line", tear_lines, ""),
    ("the clock goes back by a day", date_tomorrow, ""),
):
    FAULTS[text] = partial(damaged, damage, message), False
FAULTS["all checkpoints are damaged; restored"] = partial(refused, flip_all, flip_all), False
FAULTS["all checkpoints are deleted; restored"] = (
    partial(
        refused,
        lambda run: (run / "checkpoints").rename(run.parent / "backup"),
        lambda run: (run.parent / "backup").rename(run / "checkpoints"),
    ),
    False,
)


# -- data


@fault
def _(game: Game) -> None:
    """four samples are no images"""
    for shard in sorted(game.shards().glob("train-*.tar"))[:4]:
        content = shard.read_bytes()
        start = content.index(b"\x89PNG")
        shard.write_bytes(content[:start] + b"poison__" + content[start + 8 :])
    game.start(ranks=1)
    game.notice("  bad [1-9]", ends=False)
    game.goes_on()


@fault
def _(game: Game) -> None:
    """a shard is truncated; restored"""
    shard = game.shards() / "train-000003.tar"
    game.begin(fault=f"kill@step={AT}", ranks=1)
    game.wait(lambda: not game.alive, "the end of the killed run")
    content = shard.read_bytes()
    os.truncate(shard, 5000)
    game.start(ranks=1)
    game.notice("error: ")
    shard.write_bytes(content)
    game.again(ranks=1)


@fault
def _(game: Game) -> None:
    """a shard is replaced while it is read; restored"""
    shard = game.shards() / "train-000003.tar"
    game.begin(fault="slow@step=4,seconds=4")
    content = shard.read_bytes()
    shutil.copy(shard.with_name("train-000004.tar"), shard.with_name("new"))
    shard.with_name("new").replace(shard)
    game.notice(shard.name)
    shard.write_bytes(content)
    game.again()


def served(answer: str, message: str, game: Game) -> None:
    """The shards are on a server that treats one of them badly, and is repaired."""
    with server(game) as answers:
        answers["train-000003.tar"] = answer
        if message:
            game.start(ranks=1)
            game.notice(message)
            answers.clear()
            game.again(ranks=1)
        else:
            threading.Timer(2 * LIMIT, answers.clear).start()
            game.start(ranks=1)
            game.row.message = UNNOTICED
            game.goes_on()


for text, answer, message in (
    ("the server of the shards: 404; repaired", "404", "train-000003.tar"),
    ("the server of the shards sends half a file", "half", "train-000003.tar"),
    (f"the server of the shards hangs for {2 * LIMIT} s", "hang", ""),
):
    FAULTS[text] = partial(served, answer, message), False


# -- the command


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression: faults whose text has it")
    parser.add_argument("--list", action="store_true", help="list the faults, and play none")
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local")
    parser.add_argument("--launch", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the SLURM jobs")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds that count as a hang (default %(default)s)"
    )
    parser.add_argument("--dir", type=Path, help="for the runs; default: a temporary folder, kept if one is not passed")
    arguments = parser.parse_args()
    slurm = tuple(arguments.launch) if arguments.launcher == "slurm" else None
    texts = [text for text, (_, too) in FAULTS.items() if re.search(arguments.only, text) and (too or slurm is None)]
    if arguments.list or not texts:
        print("\n".join(texts) or f"no fault has {arguments.only!r}: see --list")
        raise SystemExit(not texts)
    folder = (arguments.dir or Path(tempfile.mkdtemp(prefix="game-day-"))).resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    digits.prepare()
    rows: list[Row] = []
    try:
        for number, text in enumerate(texts, 1):
            game = Game(text, folder / re.sub(r"\W+", "-", text), arguments.patience, slurm)
            rows.append(play(game))
            print(f"{number}/{len(texts)} {text}: {rows[-1].problem or rows[-1].message}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: the other faults were not played")
    if rows:
        show(rows)
        harness.finish(arguments, {"faults": [dataclasses.asdict(row) for row in rows]})
    if len(rows) < len(texts) or any(row.problem for row in rows):
        raise SystemExit(f"not all faults were passed: see the runs in {folder}")
    if arguments.dir is None:
        shutil.rmtree(folder)


def play(game: Game) -> Row:
    """Plays a fault; its row."""
    row = game.row
    try:
        FAULTS[row.fault][0](game)
        if row.lost or row.doubled:
            row.problem = "samples were lost or doubled"
    except (NotPassed, OSError, ValueError) as error:
        row.problem = str(error)
    except NotPlayed as error:
        row.message = f"not played: {error}"
    finally:
        if game.job is not None and game.alive:
            game.job.kill()
    return row


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = harness.Table("fault", range(len(rows)), {at: row.fault for at, row in enumerate(rows)})
    for name, decimals in (("noticed", 1), ("again", 1), ("steps", 0), ("lost", 0), ("doubled", 0)):
        values = {at: getattr(row, name) for at, row in enumerate(rows)}
        table.text(name, {at: "-" if value is None else f"{value:.{decimals}f}" for at, value in values.items()})
    lines = [re.sub(r"\S*/(?=\S)", "", f"NOT PASSED: {row.problem}" if row.problem else row.message) for row in rows]
    width = min(80, max(map(len, lines)))
    table.text("message".ljust(width), {at: line[:width].ljust(width) for at, line in enumerate(lines)})
    print()
    table.show()


if __name__ == "__main__":
    main()
