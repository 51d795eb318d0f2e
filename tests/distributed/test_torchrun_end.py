"""A torchrun whose main thread waits for a lost store. ``tests/test_interruptions.py`` has the real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.forked_python import forked_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
AGENT = """
import os, subprocess, sys, threading, time
from dtrain.distributed import torchrun_end
torchrun_end._STUCK, torchrun_end._POLL = 0.4, 0.05

def wait_in_one_call():
    threading.Event().wait(20)

def _exit_barrier():
    wait_in_one_call()

def delay():  # as a rendezvous that waits for other machines calls it
    time.sleep(0.02)

def make_many_calls():
    for _ in range(100):
        delay()

how, code, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "rank"
if how == "_exit_barrier":
    torchrun_end._AT_BARRIER = 1.5
torchrun_end.end_if_stuck()
program = f"import sys, time; time.sleep(0.3); sys.exit({code})"
child = subprocess.Popen([sys.executable, "-c", program], env=os.environ | ({"LOCAL_RANK": "0"} if rank else {}))
began = time.monotonic()
if how == "_exit_barrier":
    threading.Timer(1.2, lambda: print("still waiting", flush=True)).start()
    _exit_barrier()
elif how == "make_many_calls" or not rank:
    make_many_calls()
    child.wait()
    sys.exit(7)
else:
    wait_in_one_call()
"""


# Arguments of the agent, and its exit code.
CASES = {
    "stopped": (("wait_in_one_call", "0", "rank"), 0),
    "failed": (("wait_in_one_call", "3", "rank"), 1),
    "asks again and again": (("make_many_calls", "3", "rank"), 7),
    "waits for others at its exit": (("_exit_barrier", "0", "rank"), 0),
    "has no ranks": (("wait_in_one_call", "0", "another child"), 7),
}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """An agent for each case: they wait at the same time."""
    program = tmp_path_factory.mktemp("agent") / "agent.py"
    program.write_text(AGENT)
    pipe, agents = subprocess.PIPE, {}
    for name, (arguments, _) in CASES.items():
        command = [forked_python(), str(program), *arguments]
        agents[name] = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    yield agents
    for agent in agents.values():
        agent.kill()
        agent.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_torchrun_whose_ranks_have_ended_does_not_stay_in_one_call(
    agents: dict[str, subprocess.Popen[str]], name: str
) -> None:
    (how, *_), want = CASES[name]
    out, error = agents[name].communicate(timeout=100)
    assert agents[name].returncode == want, error
    assert ("its ranks have ended" in error) == (want != 7)
    assert ("still waiting" in out) == (how == "_exit_barrier")
