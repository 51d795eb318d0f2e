"""benchmarks.gpu_session: parts end in time with all processes that they started; the page has every result and reason."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_processes import Failed, NoTimeLeft, OutOfTime, Skipped, adopt_orphans, run_in_time
from tests.forked_python import forked_python
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
@pytest.mark.parametrize("then", ["", "time.sleep(1000)"], ids=["ends", "hangs"])
def test_processes_in_sessions_of_their_own_end_with_the_command(tmp_path, then):
    def body(rank):
        adopt_orphans()
        printed, seconds = "", 0.5
        while "child" not in printed:  # on a busy machine it may not come so far
            seconds *= 2
            try:
                command = [sys.executable, "-c", LEAVES_A_CHILD + then]
                printed = run_in_time(command, seconds=seconds, cwd=tmp_path, environment=dict(os.environ))
            except OutOfTime as ended:
                printed = str(ended)
        return printed

    (printed,) = run_ranks(1, body, init=False)
    words = printed.split()
    assert ("killed" in words) >= bool(then)
    pid = int(words[words.index("child") + 1])
    assert not Path(f"/proc/{pid}").exists()


def test_a_failed_command_shows_its_own_last_lines_and_not_torchruns_report(tmp_path):
    code = "print('first'); print('the reason'); print('E1121 12 torch/distributed/elastic/x.py] failed'); sys.exit(3)"
    with pytest.raises(Failed) as failed:
        run_in_time(
            [sys.executable, "-c", "import sys;" + code], seconds=30, cwd=tmp_path, environment=dict(os.environ)
        )
    assert str(failed.value) == "exit code 3\nfirst\nthe reason"


def part(lines, error=None):
    yield from lines
    if error is not None:
        raise error


def test_a_part_that_ends_early_keeps_its_lines_and_says_why():
    bench = SimpleNamespace(commands=["dtrain train"])
    line = {"precision": "fp32", "ms": 2.0}
    states = {}
    for error in (None, Skipped("no data"), NoTimeLeft("late"), OutOfTime("ended"), Failed("exit code 1")):
        for lines in ([], [line]):
            found = gpu_session.run_part(part(lines, error), bench, time.monotonic())
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


def test_the_page_has_a_table_a_reason_and_a_command_for_each_part():
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
    text = gpu_session.page({"about": about, "parts": parts})
    assert text.startswith("# a GPU\n")
    assert "way     ms  MFU\nfp32  12.3    -\nbf16   6.1  40%\n" in text
    assert "`one` cut short: its time was up\n\n```\nlast line\n```" in text
    assert "```bash\npython -m one\n```" in text
    assert text.endswith("## Two\n\n`two` skipped: no data\n")


def test_without_a_gpu_only_the_quick_session_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--quick"):
        gpu_session.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_with_its_last_lines_and_the_others_go_on(tmp_path):
    (tmp_path / "train-00000.tar").write_bytes(b"no tar" * 1000)
    environ = os.environ | {"DTRAIN_CIFAR10": str(tmp_path), "DTRAIN_CACHE": str(tmp_path / "cache")}
    command = [forked_python(), "-m", "benchmarks.gpu_session", "--quick", "--out", tmp_path / "out"]
    command += ["--only", "cifar10", "checkerboard"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert {name: one["state"] for name, one in found.items()} == {"cifar10": "failed", "checkerboard": "done"}
    assert "train-00000.tar" in found["cifar10"]["why"]
    assert [line["precision"] for line in found["checkerboard"]["lines"]] == ["fp32", "bf16", "fp16"]
    assert "train-00000.tar" in (tmp_path / "out" / "page.md").read_text()
