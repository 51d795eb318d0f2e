"""tests/forked_python.py: its programs see what those of the real interpreter see, and end as those end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forked_python as forked_python_module
from tests.forked_python import forked_python

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, os, signal, sys, threading, time
if __name__ == "__main__":
    import helper
    print(sys.argv, os.getcwd(), os.environ["WORD"], sys.stdin.read(), helper.__file__)
    print(__file__, sys.modules["__main__"].__dict__ is globals(), sys.path[:2], file=sys.stderr)
    if sys.argv[1] == "sleep":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
        print("pid", os.getpid(), flush=True)
        time.sleep(1000)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raise":
        raise ValueError("the reason")
    if sys.argv[1] == "text":
        sys.exit("the reason: a text")
    if sys.argv[1] == "interrupt":
        raise KeyboardInterrupt
    if sys.argv[1] == "later":
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("in a thread"))).start()
        sys.exit()
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "helper.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def start(python: str, folder: Path, *arguments: str) -> Any:
    environment = os.environ | {"WORD": "ä", "PYTHONPATH": str(folder / "more"), "PYTHONUTF8": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [python, *arguments], cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdin is not None
    process.stdin.write("typed")
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.parametrize(
    "arguments",
    [
        *(["-m", "program", "0"], ["-u", "-m", "program", "3"], ["{}/program.py", "4", "--x"]),
        *(["-m", "program", how] for how in ("256", "-1", "text", "later", "kill")),
    ],
)
def test_a_program_sees_and_gives_what_it_would_see_and_give(folder: Path, arguments: list[str]) -> None:
    seen = []
    for python in (sys.executable, forked_python()):
        process = start(python, folder, *(argument.format(folder) for argument in arguments))
        seen.append((*process.communicate(timeout=100), process.returncode))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "arguments", [["-m", "program", "raise"], ["-m", "program", "interrupt"], ["-m", "no_such_module"]]
)
def test_the_reason_of_a_failure_is_the_last_line(folder: Path, arguments: list[str]) -> None:
    ends = []
    for python in (sys.executable, forked_python()):
        process = start(python, folder, *arguments)
        ends.append((process.communicate(timeout=100)[1].splitlines()[-1].rpartition(":")[2], process.returncode))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_ends_the_program(folder: Path, number: int) -> None:
    process = start(forked_python(), folder, "-m", "program", "sleep")
    pid = int(next(line for line in process.stdout if line.startswith("pid")).split()[1])
    process.send_signal(number)
    assert process.wait(100) == (9 if number == signal.SIGUSR1 else -number)
    deadline = time.monotonic() + 100
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_that_comes_after_the_end_of_the_program_is_ignored() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    forked_python_module._forward(ended.pid, signal.SIGTERM)


def test_torch_is_there_before_a_program_asks_for_it_and_its_programs_are_forks_too(folder: Path) -> None:
    (folder / "outer.py").write_text(
        "import subprocess, sys\nprint('torch' in sys.modules)\nsubprocess.run([sys.executable, 'inner.py'], check=True)\n"
    )
    (folder / "inner.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    done = subprocess.run([forked_python(), "outer.py"], cwd=folder, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["True", "True"]
    assert subprocess.run([forked_python(), "-c", "import sys; sys.exit('torch' in sys.modules)"], check=True)


SPAWNS = """
import multiprocessing
import sys

def ask(pipe):
    pipe.send(["torch" in sys.modules, sys.argv, __name__])
    sys.exit(7)

if __name__ == "__main__":
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ask, args=(there,))
    process.start()
    print(*here.recv())
    process.join()
    print(process.exitcode)
"""


def test_a_process_that_a_program_spawns_is_a_fork_too(folder: Path) -> None:
    program = folder / "spawns.py"
    program.write_text(SPAWNS)
    real, forked = (
        subprocess.run([python, program, "word"], cwd=folder, capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, forked_python())
    )
    assert real.endswith("__mp_main__\n7\n")
    assert forked == real.replace("False", "True")


def test_a_program_has_the_open_files_of_its_client(folder: Path) -> None:
    (folder / "writes.py").write_text(
        "import os, sys\nfor number in map(int, sys.argv[1:]): os.write(number, b'written')\n"
    )
    pipes = [os.pipe() for _ in range(3)]
    numbers = [there for _, there in pipes]
    command = [forked_python(), "writes.py", *map(str, numbers)]
    subprocess.run(command, cwd=folder, pass_fds=numbers, check=True)
    for here, there in pipes:
        os.close(there)
        with os.fdopen(here) as file:
            assert file.read() == "written"


def test_a_reader_sees_that_a_program_has_closed_its_end_of_a_pipe(folder: Path) -> None:
    (folder / "closes.py").write_text("import os, sys\nos.close(int(sys.argv[1]))\nsys.stdin.read()\n")
    here, there = os.pipe()
    command = [forked_python(), "closes.py", str(there)]
    process = subprocess.Popen(command, cwd=folder, pass_fds=[there], stdin=subprocess.PIPE)
    os.close(there)
    with os.fdopen(here) as file:
        assert file.read() == ""  # the program still runs
    assert process.poll() is None
    process.communicate(timeout=100)


def test_a_program_without_standard_input_has_none(folder: Path) -> None:
    (folder / "stdin.py").write_text("import sys\nprint(sys.stdin)\n")
    command = ["sh", "-c", f"exec {forked_python()} stdin.py <&-"]
    assert subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout == "None\n"


def test_a_client_that_is_killed_at_once_takes_its_program_along(folder: Path) -> None:
    (folder / "late.py").write_text("import time\ntime.sleep(2)\nopen('went-on', 'w')\n")
    for delay in range(12):
        process = subprocess.Popen([forked_python(), "late.py"], cwd=folder)
        time.sleep(delay / 200)
        process.kill()
        process.wait()
    time.sleep(2.5)
    assert not (folder / "went-on").exists()


def test_a_program_sees_the_mounts_of_its_client(folder: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs the right to make a namespace of mounts")
    (folder / "reads.py").write_text("print(open('more/helper.py').read())")
    (folder / "other").mkdir()
    (folder / "other" / "helper.py").write_text("mounted")
    inside = f"mount --bind other more && exec {forked_python()} reads.py"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "mounted\n"
