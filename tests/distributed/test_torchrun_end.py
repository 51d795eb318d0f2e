"""A torchrun whose main thread waits for a lost store. ``tests/test_interruptions.py`` has the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("how", "code", "rank", "want"),
    [
        ("wait_in_one_call", 0, "rank", 0),
        ("wait_in_one_call", 3, "rank", 1),
        ("make_many_calls", 3, "rank", 7),
        ("_exit_barrier", 0, "rank", 0),
        ("wait_in_one_call", 0, "another child", 7),
    ],
    ids=["stopped", "failed", "asks again and again", "waits for others at its exit", "has no ranks"],
)
def test_a_torchrun_whose_ranks_have_ended_does_not_stay_in_one_call(
    tmp_path: Path, how: str, code: int, rank: str, want: int
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    done = subprocess.run(
        [forked_python(), str(program), how, str(code), rank], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == want, done.stderr
    assert ("its ranks have ended" in done.stderr) == (want != 7)
    assert ("still waiting" in done.stdout) == (how == "_exit_barrier")
