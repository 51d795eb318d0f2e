"""Runs that live in a bucket (``checkpoint.mirror``): whole machines are lost, and the runs continue from the bucket alone.

The soak is ``python -m pytest -m soak -s tests/test_mirrored_runs.py``: 20 kills of torchrun with two ranks. It prints a table.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.training.step import StepOutcome
from tests.forked_python import forked_python
from tests.s3_server import FaultyProxy, faulty_bucket
from tests.whole_runs import metrics, records, status, train_on

pytestmark = pytest.mark.usefixtures("digits")
MIRROR = "s3://bucket/runs/mine"
SMALL = ("experiment=digits", "tracker=none", "model.width=4", "data.num_workers=0", "train.deterministic=true")
RUN = (
    *SMALL,
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every_steps=4",
    "checkpoint.best=null",
    "train.max_epochs=null",
)
_DEADLINE = 250.0  # seconds


class Pace:
    """A hook that makes steps take long enough that uploads and steps alternate, on any machine.

    Args:
        quick: Number of steps of this start that take 20 ms; a later one takes a second.
        until: A file; steps after the sixth wait until it exists.
    """

    def __init__(self, quick: int = 1_000_000, until: str | None = None) -> None:
        self._left, self._until = quick, until

    def on_step(self, run: Any, outcome: StepOutcome) -> None:
        self._left -= 1
        time.sleep(0.02 if self._left >= 0 else 1)
        while self._until and run.step.step > 6 and not Path(self._until).exists():  # after the first save
            time.sleep(0.01)


def paced(**arguments: int | str) -> str:
    text = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return f"train.hooks=[{{_target_: tests.test_mirrored_runs.Pace, {text}}}]"


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def bucket() -> Iterator[tuple[FaultyProxy, Any]]:
    with faulty_bucket("bucket") as made:
        yield made
        for process in _started:  # of a test that failed
            kill_all(process)
        _started.clear()


def start(run_dir: Path, *overrides: str, ranks: int = 1) -> subprocess.Popen[bytes]:
    """A start of the run; with several ranks under the real torchrun."""
    arguments = [*RUN, f"run.dir={run_dir}", f"checkpoint.mirror={MIRROR}", *overrides]
    # A whole interpreter where the kill of every process is what is tested.
    command = [forked_python(), "-m", "dtrain.train"]
    if ranks > 1:
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        command = [sys.executable, "-m", *torchrun, "-m", "dtrain.train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    _started.append(process)
    return process


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and everything it has started, as the end of a machine does."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    family = [process.pid]
    for pid in family:
        family += children.get(pid, [])
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Waits for a condition; False if the process ends before."""
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return True


def whole_in(client: Any) -> list[tuple[int, int]]:
    """Claim and step of each checkpoint with a manifest, from the listing alone; oldest first."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="runs/mine/")
    keys = [each["Key"] for page in pages for each in page.get("Contents", [])]
    form = re.compile(r"runs/mine/(\d+)-\w+/checkpoints/step-(\d+)-\d+/manifest\.json")
    return sorted((int(found[1]), int(found[2])) for key in keys if (found := form.fullmatch(key)))


def claims(client: Any) -> int:
    """Number of starts that have claimed the mirror."""
    return len(client.list_objects_v2(Bucket="bucket", Prefix="runs/mine/claims/").get("Contents", []))


def manifests(proxy: FaultyProxy, first: int) -> int:
    """Checkpoints that were completed since a request."""
    return sum(method == "PUT" and path.endswith("/manifest.json") for method, path in proxy.requests[first:])


def lose_machines(
    kills: int, steps: int, proxy: FaultyProxy, client: Any, folder: Path, seed: int, ranks: int = 1
) -> list[str]:
    """Kills starts of a run at random requests of their uploads, deletes their disks, and finishes the run.

    Returns:
        A line for each kill.
    """
    chance = random.Random(seed)
    lines = []
    for number in range(kills):
        machine = folder / f"machine-{number}"
        expected = max(whole_in(client), default=(0, 0))[1]
        # Within the uploads that follow some complete ones; the first kill may come before any is complete.
        after, complete = chance.randrange(1, 45), chance.randrange(0, 3) if number == 0 else chance.randrange(1, 3)
        first = len(proxy.requests)
        process = start(machine / "run", f"train.max_steps={steps}", paced(quick=40), ranks=ranks)
        assert until((machine / "run" / "status.json").exists, process), "it has ended"
        assert until(lambda first=first, complete=complete: manifests(proxy, first) >= complete, process), (
            "it has ended"
        )  # type: ignore[misc]
        base = len(proxy.requests)
        assert until(lambda base=base, after=after: len(proxy.requests) >= base + after, process), "it has ended"  # type: ignore[misc]
        kill_all(process)
        begun = json.loads((machine / "run" / "starts.jsonl").read_text().splitlines()[-1])["step"]
        assert begun == expected, f"kill {number}: it began after step {begun}, the bucket had step {expected}"
        logged = max((line["step"] for line in records(machine / "run")), default=0)
        shutil.rmtree(machine)
        saved = max(whole_in(client), default=(0, 0))[1]
        lines.append(f"{number:4} {begun:7} {logged:7} {after:9} {saved:7} {logged - saved:9}   {base - first}")
    # Else every start would have begun at step 0, and nothing would be shown.
    assert max(whole_in(client), default=(0, 0))[1] > 0
    process = start(folder / "last" / "run", f"train.max_steps={steps}", ranks=ranks)
    assert process.wait(_DEADLINE) == 0
    return lines


def compare(run_dir: Path, folder: Path, steps: int, ranks: int = 1) -> None:
    """Asserts that a run has each step once, with the losses of a run that was never interrupted."""
    train_on(ranks, folder / "whole", *RUN, f"train.max_steps={steps}")
    assert [line["step"] for line in records(run_dir) if "train/loss" in line] == list(range(1, steps + 1))
    assert metrics(run_dir) == metrics(folder / "whole")
    assert status(run_dir)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_machines_are_lost_continues_from_the_bucket_alone(
    bucket: tuple[FaultyProxy, Any], tmp_path: Path
) -> None:
    print("\n".join(lose_machines(3, 400, *bucket, tmp_path, seed=int(time.time()))))
    compare(tmp_path / "last" / "run", tmp_path, 400)
    assert max(whole_in(bucket[1]))[1] == 400


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2])
def test_twenty_machines_are_lost(bucket: tuple[FaultyProxy, Any], tmp_path: Path, ranks: int) -> None:
    seed = int(os.environ.get("DTRAIN_SOAK_SEED", "0")) or int(time.time())
    lines = lose_machines(20, 3000, *bucket, tmp_path, seed, ranks)
    print(f"\nseed {seed}\nkill  begins  logged  requests  bucket  repeated   requests of the start")
    print("\n".join(lines))
    compare(tmp_path / "last" / "run", tmp_path, 3000, ranks)


@pytest.mark.slow
def test_of_two_starts_at_once_one_has_the_mirror(bucket: tuple[FaultyProxy, Any], tmp_path: Path) -> None:
    proxy, client = bucket
    pace = paced(until=str(tmp_path / "both have claimed it"))
    # A start does not claim the mirror if a different start has a whole checkpoint there: no manifest is accepted until both
    # have claimed it.
    proxy.fault = lambda method, path: 503 if method == "PUT" and path.endswith("/manifest.json") else None
    both = [start(tmp_path / name / "run", "train.max_steps=120", pace) for name in "ab"]
    assert until(lambda: claims(client) >= 2, both[0]), "it has ended"
    proxy.fault, refused = lambda method, path: None, len(proxy.requests)
    (tmp_path / "both have claimed it").touch()
    assert [process.wait(_DEADLINE) for process in both] == [0, 0]
    states = [status(tmp_path / name / "run")["mirror"] for name in "ab"]
    (loser,) = (state for state in states if state["superseded"])
    (winner,) = (state for state in states if not state["superseded"])
    assert winner["claim"] > (loser["claim"] or 0)
    assert max(whole_in(client)) == (winner["claim"], 120)
    of_winner = re.compile(rf"/bucket/runs/mine/{winner['claim']:06d}-\w+/")
    accepted = [
        path.partition("?")[0]
        for number, (method, path) in enumerate(proxy.requests)
        if method == "PUT" and not (number < refused and path.endswith("/manifest.json"))
    ]
    put = list(filter(of_winner.match, accepted))
    assert put
    assert len(put) == len(set(put)), "an object was written twice"
    elsewhere = start(tmp_path / "c" / "run", "train.max_steps=120", pace)
    assert elsewhere.wait(_DEADLINE) == 0
    compare(tmp_path / "c" / "run", tmp_path, 120)


@pytest.mark.slow
def test_a_bucket_that_fails_stops_no_training(bucket: tuple[FaultyProxy, Any], tmp_path: Path) -> None:
    proxy, client = bucket
    requests = random.Random(0)
    ends: list[bool] = []

    def fault(method: str, path: str) -> int | str | None:
        if ends:
            return 503
        return requests.choices([None, "cut", "lost", 503], [8, 1, 1, 1])[0] if method in ("PUT", "POST") else None

    proxy.fault = fault
    first = start(tmp_path / "a" / "run", "train.max_steps=60", "checkpoint.mirror_seconds=1", paced(quick=20))
    assert until(lambda: len(whole_in(client)) > 1, first), "nothing was uploaded"
    ends.append(True)
    assert first.wait(_DEADLINE) == 0
    state = status(tmp_path / "a" / "run")
    assert (state["state"], state["step"]) == ("finished", 60)
    assert state["mirror"]["step"] < 60
    assert state["mirror"]["error"]
    log = (tmp_path / "a" / "run" / "logs" / "rank-00000.log").read_text()
    assert "checkpoint.mirror_seconds=1" in log
    assert log.count("cannot be written") <= 3, "it warns at each attempt"
    proxy.fault = lambda method, path: None
    # Elsewhere it continues from what was uploaded.
    assert start(tmp_path / "b" / "run", "train.max_steps=60").wait(_DEADLINE) == 0
    compare(tmp_path / "b" / "run", tmp_path, 60)
