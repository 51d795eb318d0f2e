"""Packs that are killed and continued: the bytes are those of one that was left alone."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dtrain.pack import main
from dtrain.packing import unfinished

KILL_AFTER = """
import os, signal, sys
from dtrain.pack import main
from dtrain.packing import unfinished

count, where, write, replace = int(sys.argv[1]), sys.argv[2], unfinished.write_shard, os.replace

def killing(path, samples):
    def some():
        yield next(samples)
        os.kill(os.getpid(), signal.SIGKILL)
    global count
    count -= 1
    return write(path, samples if count >= 0 else some())

def killing_move(source, target):
    global count
    if ".packing" in str(source) and str(target).endswith(".tar") and ".packing" not in str(target):
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

if where == "writing":
    unfinished.write_shard = killing
else:
    unfinished.os.replace = killing_move
main(sys.argv[3:])
"""


@pytest.fixture
def command(tmp_path):
    """``pack text`` of some documents in eight shards: the arguments, but for DST."""
    (tmp_path / "src").mkdir()
    for number in range(6):
        (tmp_path / "src" / f"{number}.txt").write_text(f"document {number}\n" * 200)
    return ["text", str(tmp_path / "src"), "--length", "32", "--val", "0.4", "--shards", "4"]


def content(folder):
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if path.suffix not in (".idx", ".yaml")}


def killed(tmp_path, where, count, command, destination):
    (tmp_path / "kill.py").write_text(KILL_AFTER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kill.py"), str(count), where, *command, str(destination)], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(("where", "count"), [("writing", 2), ("moving", 3)])
def test_a_pack_that_is_killed_continues_to_the_same_bytes(command, tmp_path, where, count):
    assert main([*command, str(tmp_path / "whole")]) == 0
    killed(tmp_path, where, count, command, tmp_path / "dst")
    finished = set((tmp_path / "dst").rglob("*.tar"))
    kept = {path.name: path.stat().st_mtime_ns for path in finished}
    assert len(finished) == (2 if where == "writing" else 8)
    assert main([*command, str(tmp_path / "dst")]) == 0
    assert content(tmp_path / "dst") == content(tmp_path / "whole")
    for name, written in kept.items():
        assert (tmp_path / "dst" / name).stat().st_mtime_ns == written
    assert len(list((tmp_path / "dst").glob("*.tar.idx"))) == 8


def test_another_plan_is_refused_with_the_difference(command, tmp_path, capsys):
    killed(tmp_path, "writing", 1, command, tmp_path / "dst")
    before = content(tmp_path / "dst")
    assert main([*command, "--seed", "3", str(tmp_path / "dst")]) == 1
    assert "seed was 0 and is 3" in capsys.readouterr().err
    (tmp_path / "src" / "0.txt").write_text("changed\n" * 500)
    assert main([*command, str(tmp_path / "dst")]) == 1
    assert "documents was '6 (" in capsys.readouterr().err
    assert content(tmp_path / "dst") == before


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(command, tmp_path):
    for processes in ("1", "3"):
        assert main([*command, "--processes", processes, str(tmp_path / processes)]) == 0
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_two_packs_at_once_are_refused(command, tmp_path, capsys):
    with unfinished.unfinished(tmp_path / "dst", ["train"], {}):
        assert main([*command, str(tmp_path / "dst")]) == 1
    assert "another process is packing there" in capsys.readouterr().err


def test_shards_that_appear_meanwhile_are_not_overwritten(tmp_path):
    with unfinished.unfinished(tmp_path, ["train"], {}) as work:
        work.write("train", np.array([0, 1]), lambda start, stop: one_sample, 1, lambda count: None, print)
        (tmp_path / "train-000007.tar").write_bytes(b"somebody else's")
        with pytest.raises(FileExistsError, match="already"):
            work.publish({"dataset.json": b"{}"})
    assert not (tmp_path / "dataset.json").exists()
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["train-000007.tar"]


def one_sample(leave_out):
    return [{"__key__": "x", "cls": 1}]


FULL = """
import resource, signal, sys
from dtrain.pack import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def test_a_full_disk_is_one_message_and_nothing_half_written(tmp_path):
    # A limit on the size of files: to the writer, the disk is full from there on.
    np.save(tmp_path / "x.npy", np.zeros((100, 5000)))
    command = [sys.executable, "-c", FULL, str(1 << 20), "arrays", str(tmp_path / "x.npy"), str(tmp_path / "dst")]
    done = subprocess.run([*command, "--shards", "1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "dst").iterdir()) == []


@pytest.mark.slow
def test_several_processes_killed_at_once_continue_to_the_same_bytes(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3_000_000.0).reshape(300, 10_000))
    command = ["arrays", str(tmp_path / "x.npy"), "--shards", "100", "--processes", "3"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    pack = subprocess.Popen([sys.executable, "-m", "dtrain.pack", *command, str(tmp_path / "dst")])
    # Stopped, it hands out no more work: if it was caught in the middle, it stays there.
    while not list((tmp_path / "dst").rglob("*.tar")) and pack.poll() is None:
        time.sleep(0.001)
    if pack.poll() is None:
        os.kill(pack.pid, signal.SIGSTOP)
        pack.kill()
    pack.wait()
    if len(list((tmp_path / "dst").glob("*.tar"))) < 100:
        assert main([*command, str(tmp_path / "dst")]) == 0
    assert content(tmp_path / "dst") == content(tmp_path / "whole")
