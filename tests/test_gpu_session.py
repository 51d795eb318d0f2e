"""scripts/gpu_session.py: parts that end in time with all they started, and a page that says what is there and what is not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    """Makes modules of the folder importable, as for a script that is started there."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


def in_a_process(body, tmp_path):
    """What a script prints that has ``timed_process`` and everything it needs at hand."""
    head = "import os, sys\nfrom pathlib import Path\nfrom timed_process import *\nimport timed_process\n"
    tail = f"\nhere, environment = Path({str(tmp_path)!r}), dict(os.environ)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + tail + body],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
@pytest.mark.parametrize("then", ["", "time.sleep(1000)"], ids=["ends", "hangs"])
def test_a_command_takes_with_it_what_it_started_in_a_session_of_its_own(tmp_path, then):
    body = f"""
adopt_orphans()
said, seconds = "", 0.5
while "child" not in said:  # on a busy machine it may not come so far
    seconds *= 2
    try:
        said = run([sys.executable, "-c", {LEAVES_A_CHILD + then!r}], seconds=seconds, cwd=here, environment=environment)
    except OutOfTime as ended:
        said = str(ended)
print(said)
"""
    printed = in_a_process(body, tmp_path).split()
    assert ("ended" in printed) >= bool(then)
    pid = int(printed[printed.index("child") + 1])
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_fails_is_told_by_its_last_lines_and_not_by_torchruns(tmp_path):
    body = """
says = "print('first'); print('the reason'); print('E1121 12 torch/distributed/elastic/x.py] failed'); sys.exit(3)"
try:
    run([sys.executable, "-c", "import sys;" + says], seconds=30, cwd=here, environment=environment)
except Failed as failed:
    print(failed)
"""
    assert in_a_process(body, tmp_path) == "exit code 3\nfirst\nthe reason\n"


def part(lines, error=None):
    yield from lines
    if error is not None:
        raise error


def test_a_part_that_ends_early_keeps_its_lines_and_says_why(scripts):
    from gpu_session import measured
    from gpu_session_bench import NoTimeLeft, Skipped
    from timed_process import Failed, OutOfTime

    bench = SimpleNamespace(commands=["python -m dtrain.train"])
    line = {"precision": "fp32", "ms": 2.0}
    states = {}
    for error in (None, Skipped("no data"), NoTimeLeft("late"), OutOfTime("ended"), Failed("exit code 1")):
        for lines in ([], [line]):
            found = measured(part(lines, error), bench, time.monotonic())
            assert found["lines"] == lines
            assert found["commands"] == bench.commands
            assert str(error or "") in found["why"]
            states[type(error).__name__, len(lines)] = found["state"]
    assert states == {
        ("NoneType", 0): "done",
        ("NoneType", 1): "done",
        ("Skipped", 0): "skipped",
        ("Skipped", 1): "skipped",
        ("NoTimeLeft", 0): "skipped",
        ("NoTimeLeft", 1): "cut short",
        ("OutOfTime", 0): "failed",
        ("OutOfTime", 1): "cut short",
        ("Failed", 0): "failed",
        ("Failed", 1): "failed",
    }


def test_the_page_has_a_table_a_reason_and_a_command_for_each_part(scripts):
    from gpu_session import page

    about = {"machine": "a GPU", "command": "python x", "date": "today", "versions": "torch", "seconds": 3.0}
    parts = {
        "one": {
            "title": "One",
            "state": "cut short",
            "why": "its time was up\nlast line",
            "lines": [{"way": "fp32", "ms": 12.345}, {"way": "bf16", "ms": 6.1, "MFU": "40%"}],
            "commands": ["python -m one"],
        },
        "two": {"title": "Two", "state": "skipped", "why": "no data", "lines": [], "commands": []},
    }
    text = page({"about": about, "parts": parts})
    assert text.startswith("# a GPU\n")
    assert "way     ms  MFU\nfp32  12.3    -\nbf16   6.1  40%\n" in text
    assert "`one` cut short: its time was up\n\n```\nlast line\n```" in text
    assert "```bash\npython -m one\n```" in text
    assert text.endswith("## Two\n\n`two` skipped: no data\n")


def test_without_a_gpu_only_the_quick_session_runs(scripts, monkeypatch, tmp_path):
    import gpu_session

    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--quick"):
        gpu_session.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_with_its_last_lines_and_the_others_go_on(tmp_path):
    (tmp_path / "train-00000.tar").write_bytes(b"no tar" * 1000)
    environ = os.environ | {"DTRAIN_CIFAR10": str(tmp_path), "DTRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, SCRIPTS / "gpu_session.py", "--quick", "--out", tmp_path / "out"]
    done = subprocess.run([*command, "--only", "cifar10", "checkerboard"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert {name: one["state"] for name, one in found.items()} == {"cifar10": "failed", "checkerboard": "done"}
    assert "train-00000.tar" in found["cifar10"]["why"]
    assert [line["precision"] for line in found["checkerboard"]["lines"]] == ["fp32", "bf16", "fp16"]
    assert "train-00000.tar" in (tmp_path / "out" / "page.md").read_text()
