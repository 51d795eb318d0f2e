"""Runs that begin with the state of a different run: ``run.fork=DIR@STEP``. The oracle is that run itself, its *trunk*."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

from benchmarks.fault_hook import faulty
from dtrain import command_line, train
from dtrain.config.schema import Config
from dtrain.data import Mixture, ShardLoader
from dtrain.replay.__main__ import Replay
from dtrain.runs.recompose import recompose_if_run
from dtrain.runs.run_spec import RunSpec, changed_keys
from dtrain.runs.starts import read_starts, read_votes
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.state import TrainState
from tests.config.command_lines import compose
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused
from tests.replay.replays import assert_trace_is_the_log, logged, replay_on, traced
from tests.whole_runs import status, train_on, tree, weights

pytestmark = pytest.mark.usefixtures("digits")
EARLIER = (
    "run.name=trunk",
    "run.max_hours=5",
    "launch.processes_per_node=2",
    "model.width=4",
    "schedule=constant",
    "optimizer.lr=0.003",
    "train.max_steps=6",
    "train.max_epochs=null",
    "train.eval_every=0",
    "train.ema_decay=0.5",
    "train.global_batch_size=400",
    "data.record_keys=true",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "checkpoint.best=null",
)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Path]:
    """6 steps on 2 ranks, 4 to an epoch, with a checkpoint every 2. For reading only, which is checked."""
    folder = tmp_path_factory.mktemp("trunk") / "run"
    train_on(2, folder, *EARLIER)
    before = tree(folder)
    yield folder
    assert tree(folder) == before


def start(ranks: int, run_dir: Path, *arguments: str) -> None:
    """``dtrain train run.dir=DIR ...``, without an experiment."""

    def rank(number: int) -> None:
        command_line.run(train.train, [f"run.dir={run_dir}", *arguments], rewrite=recompose_if_run)

    run_ranks(ranks, rank, init=False, timeout=250)


def votes(run_dir: Path, after: int = 0, last: int | None = None) -> list[tuple[float, ...]]:
    found = read_votes(run_dir, last)
    rows: list[tuple[float, ...]] = found[found["step"] > after].tolist()
    return rows


def assert_continues(fork: Path, trunk: Path, after: int, last: int) -> None:
    """Compares all steps of a fork, and its weights after the last one, with those of the trunk."""
    assert votes(fork) == votes(trunk, after, last)
    assert [int(row[0]) for row in votes(fork)] == list(range(after + 1, last + 1))
    assert set(logged(fork)) == {use for use in logged(trunk) if after < use[1] <= last}
    for name in ("model", "ema"):
        ours, theirs = weights(fork, last, name), weights(trunk, last, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


# -- the steps of a fork


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fork_continues_exactly_as_its_trunk(trunk: Path, tmp_path: Path, step: int) -> None:
    fork = tmp_path / "fork"
    start(2, fork, f"run.fork={trunk}@{step}")
    assert_continues(fork, trunk, step, 6)
    assert status(fork)["state"] == "finished"
    (first,) = read_starts(fork)
    assert (first.step, first.fork) == (step, {"dir": str(trunk), "step": step, "data": "keep"})


@pytest.mark.slow
def test_step_0_is_a_run_of_its_own_with_the_command_of_the_trunk(trunk: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    start(2, fork, f"run.fork={trunk}@0", "train.max_steps=2")
    assert_continues(fork, trunk, 0, 2)


@pytest.mark.slow
def test_a_fork_needs_its_trunk_no_more_once_it_has_begun(trunk: Path, tmp_path: Path) -> None:
    copy, fork = tmp_path / "copy", tmp_path / "fork"
    shutil.copytree(trunk, copy)
    start(2, fork, f"run.fork={copy}@2", "train.max_steps=3")
    shutil.rmtree(copy)
    start(2, fork, "train.max_steps=6")
    assert_continues(fork, trunk, 2, 6)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_a_fork_that_was_killed_resumes_bit_for_bit(trunk: Path, tmp_path: Path, step: int) -> None:
    fork = tmp_path / "fork"
    command = (f"run.fork={trunk}@2", faulty(f"kill@step={step}", f"kill@step={step},rank=1"))
    with pytest.raises(RanksFailed):
        start(2, fork, *command)
    assert Checkpoints(fork / "checkpoints").steps()[0] == 2
    start(2, fork)
    assert_continues(fork, trunk, 2, 6)
    assert read_starts(fork)[0].fork["step"] == 2


@pytest.mark.slow
def test_a_fork_of_a_fork_is_replayed_and_traced_from_its_own_directory(trunk: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    start(2, one, f"run.fork={trunk}@2", "train.max_steps=5", "train.global_batch_size=320")
    start(3, two, f"run.fork={one}@4", "train.max_steps=8", "data.record_keys=true")
    for fork, ranks, first, last in ((one, 2, 3, 5), (two, 3, 5, 8)):
        assert replay_on(ranks, fork, f"replay.steps=[{first},{last}]")["equal"]
    # The log of the steps before is in the directories of the runs that made them.
    shutil.copytree(two, tmp_path / "all")
    for earlier, steps in ((trunk, range(1, 3)), (one, range(3, 5))):
        for path in (earlier / "logs").glob("keys-rank-*.jsonl"):
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] in steps]
            with (tmp_path / "all" / "logs" / path.name).open("a") as file:
                file.write("".join(line + "\n" for line in lines))
    assert assert_trace_is_the_log(tmp_path / "all") > 2 * 400 + 2 * 320


# -- its command line


def test_the_command_of_the_trunk_is_the_base_without_name_directory_and_launcher(trunk: Path) -> None:
    arguments = recompose_if_run([f"run.fork={trunk}@2", "optimizer.lr=0.5"])
    keys = [argument.partition("=")[0] for argument in arguments]
    assert {"experiment=digits", "model.width=4", "schedule=constant", "train.max_steps=6"} <= {*arguments}
    assert not {"run.name", "run.dir", "run.max_hours"} & {*keys}
    assert not [key for key in keys if key.startswith("launch")]
    assert keys.count("optimizer.lr") == 1
    assert "optimizer.lr=0.5" in arguments
    assert compose(*arguments).cfg.run.fork == f"{trunk}@2"


@pytest.mark.slow
def test_a_fork_of_a_fork_names_only_its_own_trunk(trunk: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    start(2, fork, f"run.fork={trunk}@2", "train.max_steps=3", "run.fork_data=restart")
    arguments = recompose_if_run([f"run.fork={fork}@2"])
    assert [argument for argument in arguments if argument.startswith("run.")] == [f"run.fork={fork}@2"]


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_the_directory_may_be_quoted(trunk: Path, quote: str) -> None:
    assert "model.width=4" in recompose_if_run([f"run.fork={quote}{trunk}@2{quote}"])


def test_an_experiment_that_is_typed_is_used_instead_of_the_command_of_the_trunk(trunk: Path) -> None:
    typed = ["experiment=digits", f"run.fork={trunk}@2"]
    assert recompose_if_run(typed) == typed


def test_a_trunk_whose_command_was_edited_needs_trust(
    trunk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trunk, tmp_path / "copy")
    saved = yaml.safe_load((copy / "overrides.yaml").read_text())
    saved["overrides"].append("task.label_smoothing=0.1")
    (copy / "overrides.yaml").write_text(yaml.safe_dump(saved))
    assert_refused(message_of(capfd, tmp_path / "fork", f"run.fork={copy}@2"), copy, "--trust")
    assert not (tmp_path / "fork").exists()
    assert "task.label_smoothing=0.1" in recompose_if_run([f"run.fork={copy}@2", "--trust"])


@pytest.mark.slow
def test_the_fork_makes_a_different_run_and_is_reported_as_a_change() -> None:
    names = {
        RunSpec.from_composed(compose("experiment=digits", *fork)).name
        for fork in ([], ["run.fork=runs/a@10"], ["run.fork=runs/a@20"], ["run.fork=runs/b@10"])
        for fork in (fork, *([[*fork, "run.fork_data=restart"]] if fork else []))
    }
    assert len(names) == 7
    config = RunSpec.from_composed(compose("experiment=digits")).with_effect()
    forked = RunSpec.from_composed(compose("experiment=digits", "run.fork=runs/a@10", "run.fork_data=restart"))
    changes = changed_keys(config, forked.with_effect())
    assert [change.partition(":")[0] for change in changes] == ["run.fork", "run.fork_data"]


def test_options_of_replay_are_no_keys_of_the_config(trunk: Path) -> None:
    options = ("replay.steps=[1,2]", "replay.tolerance=0.1", "replay.window=3", "replay.max_distance=9")
    replay = Replay([f"run.dir={trunk}", *options, "precision=bf16"])
    composed = replay.composed(0)
    assert composed.cfg.precision.name == "bf16"
    assert not [override for override in composed.overrides if "replay" in override]


# -- data from epoch 0


@pytest.mark.slow
def test_fork_data_restart_keeps_weights_optimizer_and_counters_and_reads_other_data_from_epoch_0(
    trunk: Path, tmp_path: Path
) -> None:
    some = tmp_path / "some"
    some.mkdir()
    fork, folder = tmp_path / "fork", Path(composed_data(trunk)).parent
    for number in (3, 1):
        shutil.copy(folder / f"train-{number:06d}.tar", some)
    typed = (f"run.fork={trunk}@4", "run.fork_data=restart", f"data.train={some}/train-*.tar", "data.prepare=null")
    start(2, fork, *typed, "train.max_steps=5", "train.global_batch_size=100")
    ours, theirs = (Checkpoints(run / "checkpoints").load(4) for run in (fork, trunk))
    for group in theirs.tensors:
        stored = theirs.stored(group)
        assert stored.keys() == ours.stored(group).keys()
        assert all(torch.equal(ours.stored(group)[name][...], stored[name][...]) for name in stored)
    assert ours.state["counters"] == theirs.state["counters"]
    assert ours.state["progress"]["samples"] == theirs.state["progress"]["samples"]
    assert (ours.state["loader"]["epoch"], ours.state["loader"]["position"]) == (0, 0)
    fields = {"cls": {"name": "label", "role": "label"}}
    new = ShardLoader(f"{some}/train-*.tar", fields, global_batch_size=100, num_workers=0)
    first = next(iter(new.epoch(0))).sample_keys
    assert {(key, step) for key, step, _ in logged(fork)} == {(key, 5) for key in first}
    assert assert_trace_is_the_log(fork) == 100


def composed_data(trunk: Path) -> str:
    pattern = yaml.safe_load((trunk / "config.yaml").read_text())["data"]["train"]
    assert isinstance(pattern, str)
    return pattern


# -- what is refused


def message_of(capfd: pytest.CaptureFixture[str], run_dir: Path, *arguments: str) -> str:
    """The only message of a start that is refused."""
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        start(1, run_dir, *arguments)
    shown = capfd.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("dtrain: error: ")]
    assert len(lines) == 1, shown
    assert "Traceback" not in shown
    return shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run.fork={trunk}@6"], ["train.max_steps=6", "step 6", "Increase"]),
        (["run.fork={trunk}@3"], ["run.fork", "step 3", "2, 4, 6"]),
        (["run.fork={trunk}@2", "optimizer=sgd"], ["run.fork", "AdamW", "run.weights_from"]),
        (["run.fork={trunk}@2", "model.width=8"], ["run.fork", "different model", "shape"]),
        (["run.fork={trunk}@2", "run.seed=7"], ["run.fork", "seed", "7", "run.fork_data=restart"]),
        (
            ["run.fork={trunk}@2", "data.train={folder}/train-000001.tar", "data.prepare=null"],
            ["run.fork", "dataset changed", "run.fork_data=restart"],
        ),
        (["run.fork={trunk}@2", "run.fork_data=again"], ["run.fork_data", "again", "keep", "restart"]),
        (["experiment=digits", "run.fork_data=restart"], ["run.fork_data", "run.fork"]),
        (["experiment=digits", "run.fork={trunk}"], ["run.fork", "DIR@STEP"]),
        (["experiment=digits", "run.fork={trunk}@last"], ["run.fork", "@last", "DIR@STEP"]),
        (["run.fork={trunk}@last"], ["run.fork", "@last", "DIR@STEP"]),
        (["run.fork={trunk}-none@2"], ["run.fork", "-none", "not a run directory"]),
        (["run.fork={trunk}"], ["run.fork", "DIR@STEP"]),
    ],
)
def test_an_impossible_fork_is_one_message_and_leaves_no_directory(
    trunk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    folder = Path(composed_data(trunk)).parent
    given = [argument.format(trunk=trunk, folder=folder) for argument in arguments]
    assert_refused(message_of(capfd, tmp_path / "fork", *given), *parts)
    assert not (tmp_path / "fork").exists()


def test_a_broken_checkpoint_is_one_message_and_leaves_no_directory(
    trunk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trunk, tmp_path / "copy")
    (copy / "checkpoints" / "step-000000002" / "model.safetensors").write_bytes(b"torn")
    assert_refused(message_of(capfd, tmp_path / "fork", f"run.fork={copy}@2"), "step-000000002", "model.safetensors")
    assert not (tmp_path / "fork").exists()


@pytest.mark.slow
def test_a_fork_has_no_step_0_of_its_own(trunk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fork = tmp_path / "fork"
    start(2, fork, f"run.fork={trunk}@2", "train.max_steps=3")
    assert_refused(message_of(capfd, tmp_path / "again", f"run.fork={fork}@0"), "run.fork", fork, f"{trunk}@2")


def test_a_run_that_was_no_fork_does_not_become_one(
    trunk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trunk, tmp_path / "copy")
    assert_refused(message_of(capfd, copy, f"run.fork={copy}@2", "train.max_steps=8"), "run.fork", copy)


# -- segments


def begin(loader: ShardLoader, step: int, segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The segments of a run on one rank that starts after a step with those of its checkpoint."""
    run: Any = SimpleNamespace(
        cfg=Config(),
        step=SimpleNamespace(step=step),
        world=SimpleNamespace(size=1),
        train_loader=loader,
        segments=segments,
    )
    cast("Any", TrainState).begin_segment(run)
    return json.loads(json.dumps(run.segments))  # type: ignore[no-any-return]


def mixed(order: str, batch: int = 8) -> ShardLoader:
    sources = {name: {"x": np.arange(50, dtype=np.float32)[:, np.newaxis]} for name in order}
    weights = {name: {"a": 0.5, "b": 0.3, "c": 0.2}[name] for name in order}
    mixture = Mixture(sources, weights, epoch_of="a")
    return ShardLoader(mixture, {"x": {"name": "x", "role": "feature"}}, global_batch_size=batch, num_workers=0)


def after_steps(loader: ShardLoader, steps: int) -> dict[str, Any]:
    batches = iter(loader.epoch(0))
    for _ in range(steps):
        next(batches)
        loader.commit()
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return state


@pytest.mark.parametrize(
    ("order", "batch", "steps"),
    [("abc", 8, [0]), ("abc", 6, [0, 3]), ("cba", 8, [0, 3])],
)
def test_a_start_adds_a_segment_if_it_changes_the_order_of_samples(order: str, batch: int, steps: list[int]) -> None:
    first = mixed("abc")
    segments = begin(first, 0, [])
    state = after_steps(first, 3)
    second = mixed(order, batch)
    second.load_state_dict(state)
    assert [each["step"] for each in begin(second, 3, segments)] == steps


@pytest.mark.slow
def test_a_fork_of_a_fork_that_restarted_its_data_knows_the_steps_of_the_first(trunk: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    start(2, one, f"run.fork={trunk}@2", "run.fork_data=restart", "train.max_steps=4")
    start(2, two, f"run.fork={one}@4", "train.max_steps=5")
    uses = {(use["key"], use["step"], use["rank"]) for use in traced(two, "--step", "3")}
    assert uses == {use for use in logged(one) if use[1] == 3}
