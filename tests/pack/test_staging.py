"""Interrupted packing: the same command continues and gives the same bytes."""

import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dtrain.pack import staging
from dtrain.pack.__main__ import main


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


def in_a_fork(body):
    """Calls ``body`` in a forked process; its exit code, negative for a signal."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(where, count, command, destination):
    """Packs in a process that is killed while it writes, or moves, the shard after ``count``."""
    left = count
    write, replace = staging.write_shard, os.replace

    def dying(samples):
        yield next(samples)
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(path, samples):
        nonlocal left
        left -= 1
        return write(path, samples if left >= 0 else dying(samples))

    def move_or_die(source, target):
        nonlocal left
        if ".packing" in str(source) and str(target).endswith(".tar") and ".packing" not in str(target):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def body():
        if where == "writing":
            staging.write_shard = write_or_die
        else:
            os.replace = move_or_die
        return main([*command, str(destination)])

    assert in_a_fork(body) == -signal.SIGKILL


@pytest.mark.parametrize(("where", "count"), [("writing", 2), ("moving", 3)])
def test_a_killed_command_continues_to_the_same_bytes(command, tmp_path, where, count):
    assert main([*command, str(tmp_path / "whole")]) == 0
    killed(where, count, command, tmp_path / "dst")
    finished = set((tmp_path / "dst").rglob("*.tar"))
    kept = {path.name: path.stat().st_mtime_ns for path in finished}
    assert len(finished) == (2 if where == "writing" else 8)
    assert main([*command, str(tmp_path / "dst")]) == 0
    assert content(tmp_path / "dst") == content(tmp_path / "whole")
    for name, written in kept.items():
        assert (tmp_path / "dst" / name).stat().st_mtime_ns == written
    assert len(list((tmp_path / "dst").glob("*.tar.idx"))) == 8


@pytest.mark.slow
def test_a_command_killed_at_any_step_after_its_last_shard_can_be_repeated(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((9, 2)))
    command = ["arrays", str(tmp_path / "x.npz")]
    assert main([*command, str(tmp_path / "whole")]) == 0
    expected, code, steps = content(tmp_path / "whole"), -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        destination = tmp_path / str(steps)
        code = in_a_fork(partial(killed_at_the_end, steps, [*command, str(destination)]))
        assert main([*command, str(destination)]) == 0
        assert content(destination) == expected
        assert not (destination / ".packing").exists()
        steps += 1
    assert code == 0
    assert steps > 5  # preset, record, and files of the staging folder


def killed_at_the_end(steps, arguments):
    """Packs, and kills this process before the file operation after ``steps`` others that follow the last shard."""
    left, shards = steps, 1

    def counted(operation, path, *more, **options):
        nonlocal left, shards
        if not shards:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        operation(path, *more, **options)
        if more and str(path).endswith(".tar") and ".packing" not in str(more[0]):
            shards -= 1

    for name in ("replace", "unlink", "rmdir"):
        setattr(os, name, partial(counted, getattr(os, name)))
    return main(arguments)


def test_an_equal_command_finds_the_dataset_finished(command, tmp_path, capsys):
    destination = tmp_path / "dst"
    assert main([*command, str(destination)]) == 0
    written = {path: path.stat().st_mtime_ns for path in destination.rglob("*")}
    capsys.readouterr()
    assert main([*command, str(destination)]) == 0
    output = capsys.readouterr()
    assert str(destination) in output.out
    assert "already" in output.out
    assert not output.err
    assert {path: path.stat().st_mtime_ns for path in destination.rglob("*")} == written


def other_seed(destination):
    return ["--seed", "3"]


def changed_input(destination):
    (destination.parent / "src" / "0.txt").write_text("changed\n" * 500)
    return []


def a_shard_is_missing(destination):
    (destination / "train-000001.tar").unlink()
    return []


def a_shard_is_shorter(destination):
    os.truncate(destination / "val-000000.tar", 512)
    return []


@pytest.mark.parametrize("change", [other_seed, changed_input, a_shard_is_missing, a_shard_is_shorter])
def test_a_finished_dataset_of_another_command_or_input_is_refused(command, tmp_path, capsys, change):
    destination = tmp_path / "dst"
    assert main([*command, str(destination)]) == 0
    options = change(destination)
    before = content(destination)
    assert main([*command, *options, str(destination)]) == 1
    error = capsys.readouterr().err
    assert "already" in error
    assert "Delete them" in error
    assert content(destination) == before


def test_each_command_of_a_folder_finds_its_own_shards(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((9, 2)))

    def packed(prefix, seed=0):
        return main(["arrays", str(tmp_path / "x.npy"), str(tmp_path / "dst"), "--prefix", prefix, "--seed", str(seed)])

    assert [packed("train"), packed("val"), packed("train"), packed("val")] == [0, 0, 0, 0]
    (tmp_path / "dst" / "train-000000.tar").unlink()
    # Shards of the same sizes, so that only the record tells whose they are.
    assert [packed("train", seed=1), packed("train", seed=0), packed("train", seed=1)] == [0, 1, 0]


def test_another_plan_is_refused_with_the_difference(command, tmp_path, capsys):
    killed("writing", 1, command, tmp_path / "dst")
    before = content(tmp_path / "dst")
    assert main([*command, "--seed", "3", str(tmp_path / "dst")]) == 1
    error = capsys.readouterr().err
    assert "seed was 0 and is 3" in error
    assert "delete this folder" in error
    (tmp_path / "src" / "0.txt").write_text("changed\n" * 500)
    assert main([*command, str(tmp_path / "dst")]) == 1
    assert "documents was '6 (" in capsys.readouterr().err
    assert content(tmp_path / "dst") == before


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(command, tmp_path):
    for processes in ("1", "3"):
        assert main([*command, "--processes", processes, str(tmp_path / processes)]) == 0
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_two_commands_with_one_destination_are_refused(command, tmp_path, capsys):
    with staging.staged(tmp_path / "dst", ["train"], {}):
        assert main([*command, str(tmp_path / "dst")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "dst") in error
    assert "Wait until it ends, or stop it" in error


def test_shards_that_appeared_since_the_start_are_not_overwritten(tmp_path):
    with staging.staged(tmp_path, ["train"], {}) as dataset:
        dataset.write("train", np.array([0, 1]), lambda start, stop: one_sample, 1, lambda count: None, print)
        (tmp_path / "train-000007.tar").write_bytes(b"somebody else's")
        with pytest.raises(FileExistsError, match="already"):
            dataset.publish({"dataset.json": b"{}"})
    assert not (tmp_path / "dataset.json").exists()
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["train-000007.tar"]


def one_sample(on_bad_file):
    return [{"__key__": "x", "cls": 1}]


def a_bad_file(on_bad_file):
    on_bad_file(Path("bad.jpg"), "no image")
    return one_sample(on_bad_file)


def test_after_a_bad_file_the_finished_shards_are_kept(tmp_path):
    readers = {0: one_sample, 1: a_bad_file}

    def write():
        with staging.staged(tmp_path, ["train"], {}) as dataset:
            dataset.write("train", np.arange(3), lambda start, stop: readers[start], 1, lambda count: None, print)
            dataset.publish({})

    with pytest.raises(staging.BadFile, match="no image"):
        write()
    assert [path.name for path in (tmp_path / ".packing").glob("*.tar")] == ["train-000000.tar"]
    readers[1] = one_sample  # the user removes the file, and the command is repeated
    write()
    assert len(list(tmp_path.glob("train-*.tar"))) == 2


def test_a_full_disk_is_one_error_and_leaves_no_partial_file(tmp_path, capfd):
    np.save(tmp_path / "x.npy", np.zeros((100, 5000)))

    def body():
        # A limit on the file size: writing beyond it fails as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        code = main(["arrays", str(tmp_path / "x.npy"), str(tmp_path / "dst"), "--shards", "1"])
        sys.stderr.flush()
        return code

    assert in_a_fork(body) == 1
    error = capfd.readouterr().err
    assert "the disk is full" in error
    assert error.count("\n") == 1
    assert list((tmp_path / "dst").iterdir()) == []


@pytest.mark.slow
def test_several_processes_killed_at_once_continue_to_the_same_bytes(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3_000_000.0).reshape(300, 10_000))
    command = ["arrays", str(tmp_path / "x.npy"), "--shards", "100", "--processes", "3"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    pack = subprocess.Popen([sys.executable, "-m", "dtrain.pack", *command, str(tmp_path / "dst")])
    # A stopped parent gives its workers no more jobs, so that the kill comes between the first and the last shard.
    while not list((tmp_path / "dst").rglob("*.tar")) and pack.poll() is None:
        time.sleep(0.001)
    if pack.poll() is None:
        os.kill(pack.pid, signal.SIGSTOP)
        pack.kill()
    pack.wait()
    if len(list((tmp_path / "dst").glob("*.tar"))) < 100:
        assert main([*command, str(tmp_path / "dst")]) == 0
    assert content(tmp_path / "dst") == content(tmp_path / "whole")
