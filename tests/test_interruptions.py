"""What a run survives, and how it ends, under the real torchrun. With ``-s`` the times are printed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.run import get_args_parser

from benchmarks.fault_hook import faulty
from dtrain.data import Batch
from dtrain.tasks import Classification
from dtrain.training.task import Output
from tests.forked_python import forked_python
from tests.whole_runs import alive, metrics, status, train_on, weights

pytestmark = [pytest.mark.usefixtures("digits"), pytest.mark.slow]
SMALL = ("tracker=none", "model.width=4", "data.num_workers=0", "checkpoint.best=null", "train.deterministic=true")
FOREVER = ("train.max_epochs=null", "train.max_steps=1000000", "train.eval_every=0")
FORWARDED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@contextmanager
def started(
    run_dir: Path,
    *overrides: str,
    options: tuple[str, ...] = ("--standalone", "--nproc-per-node=2"),
    python: str = sys.executable,
    **more: str,
) -> Iterator[subprocess.Popen[str]]:
    """torchrun with a run that continues until it is stopped; killed at the end of the block.

    ``python`` may be the forked one where torchrun ends itself: forks of a torchrun that is killed would live on.
    """
    command = [python, "-m", "torch.distributed.run", *options, "-m", "dtrain.train", "experiment=digits"]
    chosen = {override.partition("=")[0] for override in overrides}
    small = [override for override in (*SMALL, *FOREVER) if override.partition("=")[0] not in chosen]
    running = subprocess.Popen(
        [*command, f"run.dir={run_dir}", *small, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def wait_for(running: subprocess.Popen[str], folder: Path, name: str) -> None:
    deadline = time.monotonic() + 250
    while not list(folder.glob(name)):
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline, f"{folder / name} did not come"
        time.sleep(0.05)


def same_end(run_dir: Path, whole: Path, step: int) -> bool:
    ours, theirs = weights(run_dir, step), weights(whole, step)
    return metrics(run_dir) == metrics(whole) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.skipif("signals_to_handle" not in get_args_parser().format_help().replace("-", "_"), reason="older torch")
def test_sigusr1_to_a_torchrun_that_passes_it_on_stops_all_ranks_and_the_next_start_continues(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node=2", FORWARDED)
    # The limit ends the forks if this test fails.
    with started(tmp_path, "run.max_hours=0.1", options=options, python=forked_python()) as running:
        wait_for(running, tmp_path, "status.json")
        asked = time.monotonic()
        running.send_signal(signal.SIGUSR1)
        output = running.communicate(timeout=250)[0]
        print(f"SIGUSR1 to the end of torchrun: {time.monotonic() - asked:.1f} s")
    state = status(tmp_path)
    assert state["state"] == "stopped", output
    assert "SIGUSR1 (rank 0), SIGUSR1 (rank 1)" in state["reason"]
    assert weights(tmp_path, state["step"])
    train_on(2, tmp_path, f"train.max_steps={state['step'] + 2}", *SMALL, "train.max_epochs=null")
    assert (status(tmp_path)["state"], status(tmp_path)["restarts"]) == ("finished", 1)


def test_torchrun_restarts_a_run_that_crashes_and_it_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    common = (*SMALL, "train.max_steps=12", "checkpoint.every_steps=3")
    train_on(2, whole, *common)
    command = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    done = subprocess.run(
        [
            *command,
            "-m",
            "dtrain.train",
            "experiment=digits",
            f"run.dir={run_dir}",
            "train.log_every=1",
            *common,
            faulty("crash@rank=1,step=5"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert same_end(run_dir, whole, 12)
    assert (status(run_dir)["state"], status(run_dir)["restarts"]) == ("finished", 1)
    print({name: value for name, value in status(run_dir).items() if name.endswith("seconds")})


class SlowToEvaluate(Classification):
    """Waits in each micro-batch of an evaluation for as long as the environment says, and leaves a file beside it."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if not model.training and (seconds := os.environ.get("EVALUATION_WAITS")):
            Path(os.environ["EVALUATION_HAS_BEGUN"]).touch()
            time.sleep(float(seconds))
        return super().__call__(model, batch)


def test_sigterm_in_a_long_evaluation_stops_it_and_the_next_start_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    whole, run_dir, begun = tmp_path / "whole", tmp_path / "run", tmp_path / "begun"
    # 48 micro-batches: more seconds than torchrun waits before it kills.
    common = (
        *("task._target_=tests.test_interruptions.SlowToEvaluate", "train.eval_every=3", "train.max_steps=6"),
        *("train.max_epochs=null", "train.micro_batch_size=4", "checkpoint.every_steps=1000"),
    )
    train_on(2, whole, *SMALL, *common)
    slow: dict[str, Any] = {"EVALUATION_WAITS": "1", "EVALUATION_HAS_BEGUN": str(begun)}
    with started(run_dir, "train.log_every=1", *common, python=forked_python(), **slow) as running:
        wait_for(running, tmp_path, begun.name)
        asked = time.monotonic()
        running.send_signal(signal.SIGTERM)
        output = running.communicate(timeout=250)[0]
        print(f"SIGTERM in an evaluation to the end of torchrun: {time.monotonic() - asked:.1f} s")
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("stopped", 3), output
    assert "SIGTERM (rank 0), SIGTERM (rank 1)" in status(run_dir)["reason"]
    assert not metrics(run_dir, "eval/loss")
    train_on(2, run_dir, *SMALL, *common)
    assert status(run_dir)["state"] == "finished"
    assert metrics(run_dir, "eval/loss") == metrics(whole, "eval/loss")
    assert same_end(run_dir, whole, 6)


def test_sigterm_to_a_run_that_hangs_says_where_before_torchrun_kills_it(tmp_path: Path) -> None:
    hang = faulty("hang@rank=1,step=5")
    with started(tmp_path, hang, python=forked_python(), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="12") as running:
        wait_for(running, tmp_path, "faults/hang-rank-1-step-5")
        asked = time.monotonic()
        running.send_signal(signal.SIGTERM)
        output = running.communicate(timeout=250)[0]
        print(f"SIGTERM to the end of torchrun: {time.monotonic() - asked:.1f} s")
    assert "asked to stop, but the ranks did not agree within" in status(tmp_path)["reason"], output
    assert output.count("dtrain: the run hangs") == 1
    assert "  rank 1, step 5: in _inject" in output


def test_no_rank_outlives_a_killed_torchrun_and_the_run_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path, "data.num_workers=1", "checkpoint.every_steps=50") as running:
        wait_for(running, tmp_path, "checkpoints/step-*")
        running.kill()
        killed = time.monotonic()
        # Whoever holds the pipe is a process of that job.
        assert running.stdout is not None
        running.stdout.read()
        print(f"SIGKILL to torchrun until none of its processes is left: {time.monotonic() - killed:.1f} s")
    train_on(2, tmp_path, *SMALL, "train.max_epochs=null", "train.max_steps=1000000", "run.max_hours=0.0003")
    assert status(tmp_path)["state"] == "stopped"
    assert status(tmp_path)["reason"] == "run.max_hours=0.0003 (rank 0)"
    assert status(tmp_path)["step"] > 50


def test_a_node_that_leaves_shrinks_the_world_and_the_run_goes_on(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    patience = "join_timeout=250,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"

    def node(is_host: bool) -> tuple[str, ...]:
        return (
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"),
            *(f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={patience},is_host={is_host}"),
        )

    loopback: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    more = ("checkpoint.every_steps=50",)
    with started(tmp_path, *more, options=node(True), **loopback) as first:
        with started(tmp_path, *more, options=node(False), **loopback) as second:
            wait_for(second, tmp_path, "checkpoints/step-*")
        left, before = time.monotonic(), status(tmp_path)["step"]
        while status(tmp_path)["restarts"] < 1 or status(tmp_path)["step"] <= before:
            assert time.monotonic() - left < 250
            time.sleep(0.1)
        print(f"a node leaves until the others train on: {time.monotonic() - left:.1f} s")
        (tmp_path / "STOP").touch()
        output = first.communicate(timeout=250)[0]
    assert "2 ranks x 1 micro-batch x 32 rows" in output
    assert "global batch  64 = 1 rank x 1 micro-batch x 64 rows" in output
    assert status(tmp_path)["state"] == "stopped"


def test_a_torchrun_that_is_cut_off_ends_soon_after_its_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"

    def node(is_host: bool) -> tuple[str, ...]:
        return (
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=cut"),
            *(f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={is_host}"),
        )

    loopback: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    more = ("parallel.timeout_step=5", "parallel.timeout_start=60")
    with (
        started(tmp_path, *more, options=node(True), **loopback) as first,
        started(tmp_path, *more, options=node(False), **loopback) as second,
    ):
        wait_for(second, tmp_path, "status.json")
        time.sleep(1)
        # A machine that does not answer any more, as after a cut of the network: the store and a rank.
        stopped = [first.pid, *(child for child in children(first.pid))]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        cut = time.monotonic()
        try:
            (rank,) = children(second.pid)
            while alive(rank):
                assert time.monotonic() - cut < 100
                time.sleep(0.1)
            ended = time.monotonic()
            output = second.communicate(timeout=100)[0]
            print(f"the rank ended after {ended - cut:.1f} s, torchrun {time.monotonic() - ended:.1f} s later")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
    assert second.returncode == 1
    assert "its ranks have ended" in output


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return [int(child) for child in listed.split()]
