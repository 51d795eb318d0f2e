"""``dtrain trace`` of real runs. The oracle is ``data.record_keys``, which logs the keys of every step on every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import Generated, ShardLoader
from dtrain.replay import trace
from dtrain.replay.recorded import RecordedRun
from dtrain.replay.trace import Tracer
from tests.refusals import assert_refused
from tests.replay.replays import assert_trace_is_the_log, logged, traced
from tests.shards import npy, vector, write_tar
from tests.whole_runs import train_on, tree

#: An epoch of the digits has a few such steps.
LITTLE = (
    "model.width=8",
    "train.eval_every=0",
    "checkpoint.best=null",
    "checkpoint.keep_last=9",
    "data.record_keys=true",
)


def step_logged(run_dir: Path, step: int) -> list[tuple[int, int, str]]:
    """Rank, number among the unmasked rows, and key of each sample of a step."""
    found = []
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["step"] == step]
        keys = [key for line in lines for key in line["keys"]]
        found += [(int(path.stem[-5:]), row, key) for row, key in enumerate(keys)]
    return sorted(found)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """5 steps on 2 ranks, then 4 on 3 with a different batch size; the second start begins in mid-epoch. For reading only."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    train_on(2, folder, *LITTLE, "train.max_steps=5", "train.global_batch_size=600", "checkpoint.every_steps=2")
    train_on(3, folder, *LITTLE, "train.max_steps=9", "train.global_batch_size=480", "checkpoint.every_steps=2")
    return folder


def message_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The only message of a command that is refused."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        trace.main(arguments)
    assert ended.value.code in (1, 2)
    shown = capfd.readouterr().err
    assert shown.count("error: ") == 1
    assert "Traceback" not in shown
    return shown


@pytest.mark.slow
def test_every_use_is_found_and_none_is_invented_after_a_start_with_other_ranks_and_batch(run_dir: Path) -> None:
    before = tree(run_dir)
    assert assert_trace_is_the_log(run_dir) > 3 * 1400
    assert tree(run_dir) == before


def assert_is_the_logged_step(uses: list[dict[str, Any]], run_dir: Path, step: int, batch: int) -> None:
    log = step_logged(run_dir, step)
    assert {use["step"] for use in uses} == {step}
    assert [(use["rank"], use["key"]) for use in uses] == [(rank, key) for rank, _, key in log]
    if len(log) == batch:  # else there are masked rows between them, which the log does not have
        assert [use["row"] for use in uses] == [row for _, row, _ in log]
    assert [(use["rank"], use["row"]) for use in uses] == sorted({(use["rank"], use["row"]) for use in uses})
    assert max(use["row"] for use in uses) < -(-batch // (1 + max(use["rank"] for use in uses)))


@pytest.mark.parametrize(("step", "batch"), [(1, 600), (3, 600), (5, 600), (6, 480), (7, 480), (9, 480)])
def test_a_step_is_the_log_of_that_step_with_rank_and_row(run_dir: Path, step: int, batch: int) -> None:
    assert_is_the_logged_step(traced(run_dir, "--step", str(step)), run_dir, step, batch)


def test_a_step_and_its_samples_have_the_same_uses(run_dir: Path) -> None:
    of_step = traced(run_dir, "--step", "4")
    of_samples = traced(run_dir, *(use["key"] for use in of_step))
    assert [use for use in of_samples if use["step"] == 4] == of_step


@pytest.mark.slow
def test_the_next_use_is_the_one_that_further_training_makes(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    keys = [key for _, _, key in step_logged(run_dir, 2)[:40]]
    before = traced(copy, *keys, "--ahead")
    of_a_step_to_come = traced(copy, "--step", "11")
    train_on(3, copy, *LITTLE, "train.max_steps=15", "train.global_batch_size=480")
    after = traced(copy, *keys)
    ahead = [use for use in before if use["step"] > 9]
    assert sorted(use["key"] for use in ahead) == sorted(keys)
    nexts: dict[str, dict[str, Any]] = {}
    for use in after:
        if use["step"] > 9:
            nexts.setdefault(use["key"], use)
    assert {use["key"]: use for use in ahead if use["step"] <= 15} == nexts
    assert len(nexts) == len(keys)
    assert [use for use in before if use["step"] <= 9] == [use for use in after if use["step"] <= 9]
    assert_is_the_logged_step(of_a_step_to_come, copy, 11, 480)


def test_a_key_is_found_with_and_without_the_name_of_its_shard(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, _, key = step_logged(run_dir, 1)[0]
    uses = traced(run_dir, key.rpartition("/")[2])
    assert uses
    assert uses == traced(run_dir, key)
    shown = capfd.readouterr().out
    assert key in shown
    assert f"{len(uses)} uses in steps 1 to 9" in shown


def test_an_unknown_key_is_one_message_with_an_example(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = message_of(capfd, f"run.dir={run_dir}", "train-000000.tar/nothing")
    example = shown.strip().rstrip(".").split()[-1]
    assert_refused(shown, "train-000000.tar/nothing", "no sample")
    assert example in {key for key, _, _ in logged(run_dir)}


def test_an_unknown_shard_is_one_message_that_says_what_there_is(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = message_of(capfd, f"run.dir={run_dir}", "--shard", "nothing.tar")
    assert_refused(shown, "--shard nothing.tar", "shards")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["KEY", "--shard", "--step"]),
        (["--step", "0"], ["--step", "got 0", "from 1"]),
        (["--step", "two"], ["--step", "got two"]),
        (["--step", "1", "key"], ["--step"]),
        (["--unknown", "key"], ["--unknown"]),
    ],
)
def test_a_wrong_command_is_one_message(
    run_dir: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    assert_refused(message_of(capfd, f"run.dir={run_dir}", *arguments), *parts)


def test_a_directory_without_a_run_is_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(message_of(capfd, f"run.dir={tmp_path}", "key"), "run.dir", tmp_path, "not a run directory")


# -- runs whose starts are not recorded


def without_starts(run_dir: Path, copy: Path, *, segments: bool) -> Path:
    """A copy of a run as an earlier version has left it: without starts, and its checkpoints without segments."""
    shutil.copytree(run_dir, copy)
    (copy / "starts.jsonl").unlink()
    for path in [] if segments else (copy / "checkpoints").glob("step-*/state.json"):
        state = json.loads(path.read_text())
        del state["segments"]
        path.write_text(json.dumps(state))
    return copy


@pytest.mark.slow
def test_a_run_that_lost_its_starts_is_known_from_its_checkpoints(run_dir: Path, tmp_path: Path) -> None:
    copy = without_starts(run_dir, tmp_path / "run", segments=True)
    key = step_logged(run_dir, 1)[0][2]
    assert traced(copy, key) == traced(run_dir, key)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_known_for_its_only_start_and_says_so(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train_on(2, folder, *LITTLE, "train.max_steps=3", "train.global_batch_size=600")
    copy = without_starts(folder, tmp_path / "earlier", segments=False)
    for step in (1, 3):
        assert_is_the_logged_step(traced(copy, "--step", str(step)), folder, step, 600)
    shown = capfd.readouterr().err
    assert "note: " in shown
    assert_refused(shown, "starts.jsonl", "last start")


def test_a_run_of_an_earlier_version_that_was_extended_is_known_from_the_first_checkpoint_of_its_last_start(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = without_starts(run_dir, tmp_path / "run", segments=False)
    log = {(key, step, rank) for key, step, rank in logged(run_dir)}
    shard = step_logged(run_dir, 1)[0][2].rpartition("/")[0]
    found = {(use["key"], use["step"], use["rank"]) for use in traced(copy, "--shard", shard)}
    assert found == {use for use in log if use[1] > 6 and use[0].startswith(f"{shard}/")}  # it was saved after step 6


# -- kinds of data


@pytest.mark.slow
def test_rows_that_begin_anywhere_in_a_text_are_found_by_the_key_of_their_row(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 65, 8 * 40 + 1).astype("<u2")
    for shard in range(2):
        rows = [text[begin : begin + 9] for begin in range(160 * shard, 160 * (shard + 1), 8)]
        write_tar(
            tmp_path / f"train-{shard:06d}.tar", [(f"{n:06d}", {"tok": row.tobytes()}) for n, row in enumerate(rows)]
        )
    train_on(
        2,
        tmp_path / "run",
        *("data.prepare=null", f"data.train={tmp_path}/train-*.tar", "data.eval=null", "data.record_keys=true"),
        *("data.fields={tok: {name: tokens, role: id, dtype: uint16, length: 9}}", "task.sample=''"),
        *("model.width=8", "model.depth=1", "model.heads=1", "model.context=8", "train.max_steps=9"),
        *("train.eval_every=0", "checkpoint.best=null"),
        experiment="shakespeare_cpu",
    )
    assert assert_trace_is_the_log(tmp_path / "run") > 40


class Numbers:
    """A map-style dataset of vectors."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return vector(number), vector(number)[:1]


def arrays() -> dict[str, np.ndarray]:
    return {"x": np.stack([vector(n) for n in range(50)]), "y": np.stack([vector(n)[:1] for n in range(50)])}


VECTORS = (
    "data.eval=null",
    "~data.fields.image",
    "~data.fields.label",
    "+data.fields.x={name: x, role: feature}",
    "+data.fields.y={name: y, role: target}",
    "model.widths=[3,4,1]",
    "train.global_batch_size=16",
    "data.record_keys=true",
    "train.max_steps=10",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dataset"), [("memory", "tests.replay.test_trace.arrays"), ("map", "tests.replay.test_trace.Numbers")]
)
def test_samples_without_shards_are_found_by_name_and_number(tmp_path: Path, kind: str, dataset: str) -> None:
    folder = tmp_path / "run"
    removed = {
        "memory": ["~data.train.split", f"data.train._target_={dataset}"],
        "map": [f"+data.train._target_={dataset}"],
    }
    without = ["~data.train.function", "~data.train.length"]  # of the experiment
    train_on(2, folder, f"data={kind}", *without, *removed[kind], *VECTORS, experiment="regression")
    log = logged(folder)
    names = {key.rpartition("/")[0] for key, _, _ in log}
    (name,) = names
    found = [(use["key"], use["step"], use["rank"]) for use in traced(folder, *(f"{name}/{n}" for n in range(50)))]
    assert sorted(found) == sorted(log.elements())
    assert traced(folder, "7") == traced(folder, f"{name}/7")
    for step in (1, 4):
        assert_is_the_logged_step(traced(folder, "--step", str(step)), folder, step, 16)


@pytest.mark.slow
def test_a_bad_sample_is_left_out_of_the_steps_in_which_it_was_masked(tmp_path: Path) -> None:
    samples = [
        (f"{n:03d}", {"npy": npy(vector(n)) if n != 5 else b"bad", "y.npy": npy(vector(n)[:1])}) for n in range(32)
    ]
    write_tar(tmp_path / "a.tar", samples)
    folder = tmp_path / "run"
    train_on(
        2,
        folder,
        *(f"data.train={tmp_path}/a.tar", "data.prepare=null", "data.eval=null", "data.record_keys=true"),
        "data.fields={npy: {name: x, role: feature}, y.npy: {name: y, role: target}}",
        *("model.widths=[3,4,1]", "train.max_steps=6", "train.global_batch_size=16", "data.max_bad=10"),
        experiment="regression",
    )
    assert traced(folder, "a.tar/005") == []
    (coming,) = traced(folder, "a.tar/005", "--ahead")
    assert coming["step"] in (7, 8)  # of the next epoch
    masked = [step for step in range(1, 7) if len(step_logged(folder, step)) == 15]
    assert len(masked) == 3
    assert "a.tar/005" not in {use["key"] for use in traced(folder, "--step", str(masked[0]))}
    assert assert_trace_is_the_log(folder) == 6 * 16 - 3


def test_a_run_on_a_stream_is_refused_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train_on(
        1,
        folder,
        *("data=iterable", "~data.train.function", "data.train.length=100", "data.train.divided=true"),
        "data.train.dataset={_target_: tests.training.test_stream_runs.Line}",
        *("data.eval=null", "~data.fields.image", "~data.fields.label", "train.global_batch_size=16"),
        *("+data.fields.x={name: x, role: feature}", "+data.fields.y={name: y, role: target}", "train.max_steps=2"),
        experiment="line",
    )
    assert_refused(message_of(capfd, f"run.dir={folder}", "key"), "data.train", "stream", "data.record_keys=true")


# -- large data


def nothing(sample: int, rng: np.random.Generator) -> tuple[np.ndarray]:
    raise AssertionError("no sample is read")


def generated(batch: int) -> ShardLoader:
    data = Generated(nothing, 10**9)
    fields = {"x": {"name": "x", "role": "feature"}}
    return ShardLoader.over(data, fields, name="many", global_batch_size=batch, num_workers=0, seed=3)


@pytest.fixture
def long_run(tmp_path: Path) -> tuple[RecordedRun, ShardLoader]:
    """Two segments of a run on 10^9 samples: the second begins in the second epoch, with a different batch size."""
    first, second = generated(2**16), generated(50_000)
    segments = [{"step": 0, "ranks": 8, **first.segment()}]
    first.epoch(1)
    done = first.steps_per_epoch
    state = first.state_dict() | {
        "position": 2**16 * 700,
        "layouts": [[2**16, first.segment()["settings"]["lanes"], 700]],
    }
    second.load_state_dict(state)
    segments.append({"step": done + 700, "ranks": 3, **second.segment()})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "overrides.yaml").write_text("overrides: []\nconfig_dirs: []\n")
    run = RecordedRun.read(tmp_path / "run")
    run.saved.update(segments=segments, step=done + 700 + 30_000)
    return run, second


def test_a_sample_of_a_billion_is_found_and_is_where_the_order_says(long_run: tuple[RecordedRun, ShardLoader]) -> None:
    run, loader = long_run
    samples = np.array([0, 123_456_789, 10**9 - 1])
    uses = Tracer(run, loader).uses(samples)
    assert len(uses) >= 2 * len(samples)
    for use in uses:
        segment = [each for each in run.saved["segments"] if each["step"] < use.step][-1]
        epochs, numbers = loader.samples_of(segment, use.step - 1 - segment["step"])
        batch = segment["settings"]["global_batch_size"]
        slot = batch * use.rank // segment["ranks"] + use.row
        assert use.key == f"many/{numbers[slot]}"
        assert use.epoch == epochs[slot]
    # Each exactly once in each of the first two epochs, though the second one was cut anew.
    for sample in samples.tolist():
        epochs_of = [use.epoch for use in uses if use.key == f"many/{sample}"]
        assert epochs_of[:2] == [0, 1]
        assert len(set(epochs_of)) == len(epochs_of)
