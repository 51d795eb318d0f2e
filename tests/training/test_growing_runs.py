"""Runs whose shards change between two starts. The oracle counts the keys that ``data.record_keys`` has logged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain.runs.starts import read_starts
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.replay.replays import assert_trace_is_the_log, replay_on
from tests.shards import npy, stored_keys, vector, write_tar
from tests.whole_runs import status, train_on

FIELDS = "{npy: {name: x, role: feature}, y.npy: {name: y, role: target}}"


def write_shard(folder: Path, name: str, first: int, count: int = 10) -> None:
    samples = [(f"{n:06d}", {"npy": npy(vector(n)), "y.npy": npy(vector(n)[:1])}) for n in range(first, first + count)]
    write_tar(folder / f"{name}.tar", samples)


def keys_of(folder: Path, *names: str) -> set[str]:
    return set(stored_keys([str(folder / f"{name}.tar") for name in names]))


def train(ranks: int, run_dir: Path, shards: Path, *overrides: str) -> None:
    data = (f"data.train={shards}/*.tar", f"data.fields={FIELDS}", "data.eval=null", "data.prepare=null")
    usual = ("data.record_keys=true", "train.eval_every=0", "model.widths=[3,4,1]", "checkpoint.best=null")
    lasts = ("checkpoint.every_steps=1", "checkpoint.keep_last=99", "train.max_steps=null", "train.max_epochs=3")
    chosen = {override.partition("=")[0] for override in overrides}
    options = [it for it in (*data, *usual, *lasts) if it.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, *options, *overrides, experiment="regression")


def logged_steps(run_dir: Path) -> dict[int, list[str]]:
    steps: dict[int, list[str]] = {}
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["keys"])
    return steps


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    for number, name in enumerate(("b0", "b1", "b2", "b3")):
        write_shard(folder, name, 10 * number)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("when", ["next_epoch", "now"])
def test_a_killed_run_resumes_with_more_shards(tmp_path: Path, shards: Path, when: str) -> None:
    run_dir, first = tmp_path / "run", keys_of(shards, "b0", "b1", "b2", "b3")
    with pytest.raises(RanksFailed):
        train(2, run_dir, shards, "train.global_batch_size=6", faulty("kill@rank=1,step=4"))
    write_shard(shards, "a9", 100, 7)
    write_shard(shards, "b1x", 200, 4)
    new = keys_of(shards, "a9", "b1x")
    train(3, run_dir, shards, "train.global_batch_size=5", f"data.grow={when}")
    assert status(run_dir)["state"] == "finished"
    steps = logged_steps(run_dir)
    done = sum(len(keys) == 6 for keys in steps.values())
    assert 1 <= done <= 4
    in_order = [key for step in sorted(steps) for key in steps[step]]
    current = first | new if when == "now" else first
    assert Counter(in_order[: len(current)]) == Counter(current)  # the epoch that was killed
    later = Counter(in_order[len(current) :])
    assert later == Counter(dict.fromkeys(first | new, 2))  # two epochs on all shards
    if when == "now":  # in proportion to what is left of both
        left = len(current) - 6 * done
        for step in range(done + 1, done + left // 5):
            drawn = sum(key in new for n in range(done + 1, step + 1) for key in steps[n])
            assert abs(drawn - 5 * (step - done) * len(new) / left) <= 5
    assert assert_trace_is_the_log(run_dir) == len(in_order)
    # Steps before, at and after the growth can be recomputed from the records.
    for wanted in ([done, done + 1], [len(steps)] * 2):
        replayed = replay_on(1, run_dir, f"replay.steps=[{wanted[0]},{wanted[1]}]")["steps"]
        assert [step["step"] for step in replayed] == sorted(set(wanted))
        assert all(step["difference"] < 1e-6 for step in replayed)


@pytest.mark.slow
def test_the_schedule_stays_as_it_was_laid_out_and_the_banner_says_so(
    tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(1, run_dir, shards, "train.global_batch_size=10", "train.max_steps=2")
    write_shard(shards, "a9", 100)
    capfd.readouterr()
    train(1, run_dir, shards, "train.global_batch_size=10", "data.grow=next_epoch")
    shown = capfd.readouterr().out
    assert "new: 1 shard with 10 samples, joining at epoch 1" in shown
    assert "14 (5 an epoch), schedule over 12 (of the first start, with 4 an epoch)" in shown
    train(
        1,
        run_dir,
        shards,
        "train.global_batch_size=10",
        "data.grow=next_epoch",
        "train.max_epochs=4",
        "schedule.horizon=300000",
    )
    assert "schedule over 300,000, cut short" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_that_grew_continues_with_the_same_data_without_the_key(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    train(1, run_dir, shards, "train.global_batch_size=10", "train.max_steps=2")
    write_shard(shards, "a9", 100)
    train(1, run_dir, shards, "train.global_batch_size=10", "train.max_steps=3", "data.grow=now")
    train(2, run_dir, shards, "train.global_batch_size=10")
    everything = keys_of(shards, "a9", "b0", "b1", "b2", "b3")
    assert Counter(key for keys in logged_steps(run_dir).values() for key in keys) == Counter(
        dict.fromkeys(everything, 3)
    )
    assert_trace_is_the_log(run_dir)


@pytest.mark.slow
def test_changed_shards_are_refused_with_the_key_that_allows_them(
    tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(1, run_dir, shards, "train.global_batch_size=10", "train.max_steps=2")
    write_shard(shards, "a9", 100)
    with pytest.raises(RanksFailed):
        train(1, run_dir, shards, "train.global_batch_size=10")
    shown = capfd.readouterr().err
    assert all(text in shown for text in ("shards 4 -> 5", "a9.tar is new", "data.grow=next_epoch", "data.grow=now"))
    (shards / "b2.tar").unlink()
    with pytest.raises(RanksFailed):
        train(1, run_dir, shards, "train.global_batch_size=10", "data.grow=now")
    shown = capfd.readouterr().err
    assert "b2.tar is missing: data.grow_allow_removed=true" in shown


@pytest.mark.slow
def test_steps_of_which_all_samples_were_removed_change_nothing_and_do_not_end_the_run(
    tmp_path: Path, shards: Path
) -> None:
    run_dir, kept = tmp_path / "run", keys_of(shards, "b0", "b3")
    train(1, run_dir, shards, "data.shuffle=none", "train.global_batch_size=5", "train.max_steps=1")
    (shards / "b1.tar").unlink()
    (shards / "b2.tar").unlink()
    train(2, run_dir, shards, "data.shuffle=none", "train.global_batch_size=5", "data.grow_allow_removed=true")
    assert status(run_dir)["state"] == "finished"
    steps = logged_steps(run_dir)
    assert [step for step in range(1, 9) if not steps.get(step)] == [3, 4, 5, 6]
    assert Counter(key for keys in steps.values() for key in keys) == Counter(dict.fromkeys(kept, 3))


@pytest.mark.slow
def test_samples_of_removed_shards_are_left_out_and_counted(
    tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, kept = tmp_path / "run", keys_of(shards, "b0", "b3")
    train(2, run_dir, shards, "train.global_batch_size=10", "train.max_steps=1")
    gone = keys_of(shards, "b1", "b2")
    used = [key for key in logged_steps(run_dir)[1] if key in gone]
    (shards / "b1.tar").unlink()
    (shards / "b2.tar").unlink()
    capfd.readouterr()
    train(1, run_dir, shards, "train.global_batch_size=5", "data.grow_allow_removed=true")
    assert f"removed: 2 shards with 20 samples, {20 - len(used)} of them left out" in capfd.readouterr().out
    counts = Counter(key for keys in logged_steps(run_dir).values() for key in keys)
    assert counts == Counter(used) + Counter(dict.fromkeys(kept, 3))


@pytest.mark.slow
def test_damaged_shards_and_lack_of_memory_in_a_run_that_grows(
    tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, skip = tmp_path / "run", ("data.bad_shards=skip", "data.max_bad_shards=1", "data.grow=now")
    write_shard(shards, "b4", 40)
    whole = (shards / "b4.tar").read_bytes()
    (shards / "b4.tar").write_bytes(b"no tar" * 100 + bytes(1024))
    train(2, run_dir, shards, "train.global_batch_size=8", "train.max_steps=2", *skip)
    record = json.loads((run_dir / "bad-shards.json").read_text())
    assert list(record["train"][""]) == ["b4.tar"]
    write_shard(shards, "a9", 100, 7)
    (shards / "b4.tar").write_bytes(whole)  # repaired, but not new
    write_shard(shards, "b5", 50)
    (shards / "b5.tar").write_bytes((shards / "b5.tar").read_bytes()[:1536])  # still being written
    capfd.readouterr()
    hook = "train.hooks=[{_target_: tests.memory_faults.MemoryFaults, at: ['4:1:0:before', '8:0:0:after']}]"
    train(2, run_dir, shards, "train.global_batch_size=8", hook, *skip)
    shown = capfd.readouterr().out
    assert "47 samples in 5 shards, without 1 damaged: b4.tar" in shown
    assert "new: 1 shard with 7 samples, joining the rest of epoch 0" in shown
    assert json.loads((run_dir / "bad-shards.json").read_text()) == record
    every = keys_of(shards, "a9", "b0", "b1", "b2", "b3")
    steps = logged_steps(run_dir)
    assert Counter(key for keys in steps.values() for key in keys) == Counter(dict.fromkeys(every, 3))
    assert assert_trace_is_the_log(run_dir) == 3 * len(every)
    assert [start.micro_batch for start in read_starts(run_dir)] == [4, 4, 2, 1]
    for step in (2, 4, 9):
        assert replay_on(1, run_dir, f"replay.step={step}")["steps"][0]["difference"] < 1e-6


def test_a_new_shard_that_is_damaged_is_refused(
    tmp_path: Path, shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, skip = tmp_path / "run", ("data.bad_shards=skip", "data.grow=next_epoch")
    train(1, run_dir, shards, "train.max_steps=2", "train.global_batch_size=8", *skip)
    (shards / "b4.tar").write_bytes(b"no tar" * 100 + bytes(1024))
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        train(1, run_dir, shards, "train.global_batch_size=8", *skip)
    assert_refused(capfd.readouterr().err, "b4.tar", "data.bad_shards=skip", "data.grow", "take it out of data.train")
