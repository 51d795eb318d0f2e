from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dtrain.distributed.process_exit import exit_unless, in_time
from tests.forked_python import forked_python
from tests.ranks import RanksFailed, run_ranks
from tests.whole_runs import alive

WORKER = """
import time
from dtrain.distributed import process_exit
if {polling}:
    process_exit.sys.platform, process_exit._POLL_SECONDS = "another", 0.05
process_exit.exit_with_torchrun({environment})
print("ready", flush=True)
time.sleep(600)
"""
FOLLOWER = """
import time
from dtrain.distributed.process_exit import exit_with_parent
exit_with_parent({pid})
time.sleep(600)
"""
AGENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("polling", [False, True], ids=["by the kernel", "by a thread"])
def test_a_worker_ends_with_a_killed_torchrun(polling: bool) -> None:
    assert ends_with_its_parent({"TORCHELASTIC_RUN_ID": "one"}, polling, patience=250)


def test_a_process_that_torchrun_did_not_start_outlives_its_parent() -> None:
    assert not ends_with_its_parent({}, False, patience=0.3)


@pytest.mark.parametrize(("first", "code"), [("an init", 1), ("python torchrun", 0)])
def test_a_worker_whose_torchrun_ended_before_the_call_ends_at_once(first: str, code: int) -> None:
    worker = (
        "import os; from dtrain.distributed import process_exit; os.getppid = lambda: 1; "
        f"process_exit._init_may_be_torchrun = lambda: 'python' in {first!r}; "
        "process_exit.exit_with_torchrun({'TORCHELASTIC_RUN_ID': 'one'})"
    )
    assert subprocess.run([sys.executable, "-c", worker], timeout=250, check=False).returncode == code


def test_a_process_ends_if_its_parent_had_ended_before_the_call() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert (
        subprocess.run([sys.executable, "-c", FOLLOWER.format(pid=gone.pid)], timeout=250, check=False).returncode == 1
    )


def test_a_process_ends_if_its_parent_is_a_zombie() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    zombie.kill()
    assert (
        subprocess.run([sys.executable, "-c", FOLLOWER.format(pid=zombie.pid)], timeout=250, check=False).returncode
        == 1
    )
    zombie.wait()


def ends_with_its_parent(environment: dict[str, str], polling: bool, patience: float) -> bool:
    worker = WORKER.format(environment=environment, polling=polling)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, worker], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    agent.stdout.close()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not alive(pid):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


# -- time limits


def test_a_call_in_time_returns_or_raises_and_a_late_one_is_abandoned() -> None:
    assert in_time(lambda: "done", 100) == "done"
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, 100)
    forever = threading.Event()
    with pytest.raises(TimeoutError) as late:
        in_time(forever.wait, 0.01)
    assert late.value.args[0].is_alive()
    forever.set()


@pytest.mark.parametrize("done", [False, True])
def test_a_process_whose_main_thread_is_stuck_ends_with_the_message_unless_it_is_done(
    done: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def stuck(number: int) -> None:
        event = threading.Event()
        if done:
            event.set()
        exit_unless(event, 0.1, "the others did not come")
        time.sleep(0.5 if done else 100)

    if done:
        run_ranks(1, stuck, init=False)
    else:
        with pytest.raises(RanksFailed, match="ended with code 1"):
            run_ranks(1, stuck, init=False)
    assert ("the others did not come" in capfd.readouterr().err) is not done


FAILS = """
import sys, threading, time
from dtrain import train

def fail(*args, **kwargs):
    sys.exit(3)

def write():
    time.sleep(0.5)
    print("the checkpoint is whole")

train.CLEANUP, train.command_line.run = 0.1, fail
threading.Thread(target=write, name="checkpoint").start()
threading.Thread(target=time.sleep, args=(600,), name="thread of a hook").start()
train.main()
"""


@pytest.mark.slow
def test_a_failed_process_ends_although_a_hook_has_left_a_thread_and_writes_its_checkpoint(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    done = subprocess.run([forked_python(), str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "the checkpoint is whole\n")
    assert "thread of a hook" in done.stderr
