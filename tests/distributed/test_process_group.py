from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed import process_group as module
from dtrain.distributed.process_group import (
    interface_for_gloo,
    limit_cleanup,
    process_group,
    set_timeout,
    settle_network,
)
from dtrain.errors import PeerFailed
from tests.forked_python import forked_python
from tests.ranks import RanksFailed, run_ranks


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group(timeout=5) as world:
        assert (world.rank, world.size) == (0, 1)
        assert dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("ranks", "mesh"), [(256, None), (4096, "1")])
def test_many_ranks_make_connections_when_they_are_used(ranks: int, mesh: str | None) -> None:
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8", "GLOO_SOCKET_IFNAME": "lo"}
    settle_network(environment)
    assert environment.get("TORCH_GLOO_LAZY_INIT") == mesh
    settle_network(environment := environment | {"TORCH_GLOO_LAZY_INIT": "0"})
    assert environment["TORCH_GLOO_LAZY_INIT"] == "0"
    settle_network(
        {"LOCAL_WORLD_SIZE": "8", "GLOO_SOCKET_IFNAME": "lo"}
    )  # World.from_environment refuses it in one line


def test_the_group_is_left_after_success_and_after_failure() -> None:
    def rank(number: int) -> list[bool]:
        with process_group(timeout=20) as world:
            dist.all_reduce(torch.ones(1))
        after_success = dist.is_initialized()
        return [after_success, world.size == 2]

    assert run_ranks(2, rank, init=False, agent=False) == [[False, True]] * 2


def test_a_timeout_is_that_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[object, float]] = []

    def record(timeout: timedelta, group: object) -> None:
        found.append((group, timeout.total_seconds()))

    monkeypatch.setattr(dist, "set_timeout", record, raising=False)
    with process_group(timeout=5):
        groups = [dist.group.WORLD, dist.new_group([0])]  # as those of a hybrid mesh
        found.clear()
        set_timeout(1)
        assert all((group, 1 + module.BACKSTOP) in found for group in groups)


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_the_others_learn_who_failed_first_instead_of_a_broken_connection(lazy: str) -> None:
    def rank(number: int) -> str:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        try:
            with process_group(timeout=20):
                if number == 1:
                    raise ZeroDivisionError("the culprit")
                dist.all_reduce(torch.ones(1))
                time.sleep(1)
        except (PeerFailed, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    culprit, *others = sorted(run_ranks(3, rank, init=False, agent=False), reverse=True)
    assert culprit == "ZeroDivisionError: the culprit"
    assert set(others) == {"PeerFailed: rank 1 failed: ZeroDivisionError: the culprit"}


def test_a_failed_rank_that_has_left_the_group_has_time_to_write_its_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def rank(number: int) -> None:
        with suppress(ZeroDivisionError), process_group(timeout=20):
            limit_cleanup(0.3, "took too long")
            raise ZeroDivisionError
        time.sleep(0.6)  # as the interpreter waits for the writer

    run_ranks(1, rank, init=False)
    assert "took too long" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_was_killed_is_named_as_the_reason_instead_of_a_broken_connection() -> None:
    def rank(number: int) -> None:
        with process_group(timeout=20):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert "dtrain.errors.PeerLost: another rank is gone without an error message" in failed.value.reports[0]


def test_a_collective_ends_after_the_time_out_of_a_step(tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    def rank(number: int) -> bool:
        with process_group(timeout=600):
            module.BACKSTOP = 0.0
            set_timeout(1.0)
            if number == 0:
                with pytest.raises(RuntimeError):
                    dist.all_reduce(torch.ones(1))
                ended.touch()
            deadline = time.monotonic() + 50
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            return ended.exists()

    assert run_ranks(2, rank, init=False) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [5, 20])
def test_ranks_end_if_they_leave_right_after_a_collective(rounds: int) -> None:
    """Every other time they hung, where DDP was the last to let go of the group."""

    def rank(number: int) -> bool:
        with process_group(timeout=20):
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
            model(torch.ones(2, 3)).sum().backward()
            dist.broadcast(torch.ones(5), src=0)
        return True

    for _ in range(rounds):
        assert run_ranks(2, rank, init=False, timeout=20) == [True, True]


THREADS_AT_EXIT = """
import atexit, time
from contextlib import suppress
from pathlib import Path

import dtrain.train


def threads_of_gloo():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text())
    return " ".join(names).count("gloo")


@atexit.register
def told():
    deadline = time.monotonic() + 5  # the kernel shows a thread a little longer than whoever has joined it
    while threads_of_gloo() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(f"threads of gloo: {threads_of_gloo()}", flush=True)


dtrain.train.main()
"""


@pytest.mark.slow
def test_threads_of_gloo_end_before_the_interpreter_does(digits: Path, tmp_path: Path) -> None:
    # Those that are left when it is torn down abort the process now and then.
    rank = tmp_path / "rank.py"
    rank.write_text(THREADS_AT_EXIT)
    overrides = ["experiment=digits", f"run.dir={tmp_path}", "train.max_steps=3", "tracker=none", "data.num_workers=0"]
    command = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    for _ in ("trains", "has finished"):
        done = subprocess.run(
            [*command, sys.executable, str(rank), *overrides],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("threads of gloo: 0") == 2


# -- network


TWO_MACHINES = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_nothing_is_set_if_all_ranks_are_on_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for environment in ({}, TWO_MACHINES | {"LOCAL_WORLD_SIZE": "4"}):
        before = dict(environment)
        settle_network(environment)
        assert environment == before
    assert capsys.readouterr().out == ""


def test_what_the_user_has_set_stays_and_all_of_it_is_printed_once_a_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    users = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}
    environment = TWO_MACHINES | users
    settle_network(environment)
    assert environment == TWO_MACHINES | users
    shown = "GLOO_SOCKET_IFNAME=eth7 (yours), NCCL_DEBUG=INFO (yours), NCCL_SOCKET_IFNAME=ib0 (yours)"
    assert capsys.readouterr().out == f"network of {socket.gethostname()}: {shown}\n"
    settle_network(environment | {"LOCAL_RANK": "1"})
    assert capsys.readouterr().out == ""


def test_nccl_debug_is_warn_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "eth0"}
    settle_network(environment)
    assert environment["NCCL_DEBUG"] == "WARN"


def test_no_interface_is_set_if_the_machines_name_resolves_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) is None


def test_an_interface_is_set_if_the_machines_name_resolves_to_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a network nothing can be told, and nothing is set."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) in {None} | {name for _, name in socket.if_nameindex()} - {
        "lo"
    }


def test_unresolvable_names_are_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) != "lo"
