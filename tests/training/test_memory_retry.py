"""Steps that run out of memory on a rank: all ranks do them again with smaller micro-batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.vote import Vote
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import read_starts
from dtrain.training import memory_retry
from dtrain.training.memory_retry import rows_interact, smaller
from dtrain.training.step import TrainStep
from dtrain.training.task import Output
from dtrain.training.unfinished import StepOutOfMemory
from tests.ranks import RanksFailed, run_ranks
from tests.toys import Net, micro_batches, squared_error, train_step, world
from tests.whole_runs import metrics, records, status, torchrun, train_on, weights

pytestmark = pytest.mark.usefixtures("digits")
SMALL = (
    *("model._target_=tests.memory_faults.Layers", "model.width=1024", "parallel.bucket_cap_mb=1", "train.max_steps=6"),
    *("train.eval_every=0", "train.log_every=1", "checkpoint.best=null"),
    "data.eval='${dtrain.cache:digits}/test-000000.tar'",  # half of the samples
)
CPU = torch.device("cpu")
_HAS_RESET = hasattr(FSDPModule, "reset_iter_state")
needs_reset = pytest.mark.skipif(not _HAS_RESET, reason="a sharded model can be reset since torch 2.13")


def train(ranks: int, run_dir: Path, *at: str, overrides: tuple[str, ...] = (), hook: str = "") -> None:
    hook = f"train.hooks=[{{_target_: tests.memory_faults.MemoryFaults, at: {json.dumps(at)}}}{hook}]"
    keys = {override.partition("=")[0] for override in overrides}
    if "parallel" in keys:
        keys.add("parallel.bucket_cap_mb")  # of DDP only
    train_on(ranks, run_dir, *(each for each in SMALL if each.partition("=")[0] not in keys), hook, *overrides)


def assert_same(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The same steps with the same losses, norms and samples, up to rounding."""
    for name in ("step", "samples", "train/loss", "train/grad_norm", "eval/loss"):
        assert metrics(other, name) == pytest.approx(metrics(one, name), rel=tolerance), name


def retries(run_dir: Path) -> list[tuple[int, int]]:
    """Steps after which the micro-batch changed, and its rows."""
    starts = [(start.step, start.micro_batch) for start in read_starts(run_dir)]
    return starts[1:] if starts[0][1] in (32, 64) else starts  # if the first step was done again, its start is replaced


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(2, run_dir, overrides=("data.record_keys=true",))
    return run_dir


@pytest.mark.parametrize(
    "at",
    [
        ("3:1:0:before",),
        pytest.param(("3:1:0:after",), marks=pytest.mark.slow),
        pytest.param(("3:1:0:4",), marks=pytest.mark.slow),  # one bucket was begun
        ("1:0:0:3",),  # before DDP rebuilds its buckets
        ("2:0:0:7", "2:1:0:0"),  # both ranks
        ("3:1:0:2", "3:0:1:after", "6:1:0:1"),  # again with the smaller ones, and in the last step
    ],
    ids=lambda at: " ".join(at),
)
@pytest.mark.parametrize("deterministic", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_result_is_that_of_a_run_with_enough_memory(
    tmp_path: Path, undisturbed: Path, at: tuple[str, ...], deterministic: str
) -> None:
    train(2, tmp_path / "run", *at, overrides=(f"train.deterministic={deterministic}",))
    assert_same(undisturbed, tmp_path / "run")
    steps = [int(each.partition(":")[0]) - 1 for each in at if each != "2:1:0:0"]
    rows = {step: 32 >> number for number, step in enumerate(steps, 1)}  # after the last try of a step
    assert retries(tmp_path / "run") == [*rows.items()]
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert f"step {steps[0] + 1}: rank {at[0][2]}" in log
    assert "train.micro_batch_size=16" in log


UNITS = "parallel.shard_modules=['1','3','5']"


@pytest.mark.slow
@needs_reset
@pytest.mark.parametrize(
    ("at", "rows"),
    [
        (("3:1:0:before",), "null"),
        (("3:1:0:after", "3:0:0:2"), "null"),  # both ranks
        # In the backward; again with the smaller ones, and in the last step.
        (("2:0:0:3", "4:1:1:1", "6:1:0:0"), "16"),
    ],
    ids=str,
)
def test_a_sharded_model_does_it_too(tmp_path: Path, undisturbed: Path, at: tuple[str, ...], rows: str) -> None:
    sharded = ("parallel=fsdp", UNITS, f"train.micro_batch_size={rows}")
    train(2, tmp_path / "run", *at, overrides=sharded)
    assert_same(undisturbed, tmp_path / "run")
    assert read_starts(tmp_path / "run")[-1].micro_batch == {1: 16, 2: 16, 3: 2}[len(at)]


@pytest.mark.slow
def test_one_rank_without_others(tmp_path: Path) -> None:
    for name, at in (("whole", ()), ("again", ("2:0:0:3", "5:0:1:before"))):
        train(1, tmp_path / name, *at)
    assert_same(tmp_path / "whole", tmp_path / "again")
    assert retries(tmp_path / "again") == [(1, 32), (4, 16)]


def keys_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    lines = (run_dir / "logs" / f"keys-rank-{rank:05d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_logged_samples_are_those_of_the_steps_that_count(tmp_path: Path, undisturbed: Path) -> None:
    train(2, tmp_path / "again", "4:1:0:2", overrides=("data.record_keys=true",))
    assert keys_of(tmp_path / "again", 1) == keys_of(undisturbed, 1)


@pytest.mark.slow
def test_a_replay_of_such_a_step_takes_the_micro_batch_that_made_it(tmp_path: Path) -> None:
    train(2, tmp_path / "run", "3:1:0:4")
    command = (
        f"run.dir={tmp_path / 'run'}",
        "replay.steps=[2,5]",
        "train.hooks=[]",
        f"--json={tmp_path / 'found.json'}",
    )
    done = torchrun(2, *command, module="dtrain.replay")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [step["difference"] for step in found["steps"]] == [0.0] * 4
    assert [start.micro_batch for start in RecordedRun.read(tmp_path / "run").starts] == [32, 16]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_thirty_random_places(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ranks, precision = rng.choice([1, 2, 3]), rng.choice(["fp32", "fp32", "fp16"])
    steps = rng.sample(range(1, 7), 3)
    at = [f"{step}:{rng.randrange(ranks)}:0:{rng.choice(['before', 'after', *range(8)])}" for step in sorted(steps)]
    given: tuple[str, ...] = (
        f"precision={precision}",
        f"run.seed={seed}",
        f"train.deterministic={rng.choice(['true', 'false'])}",
    )
    if ranks > 1 and rng.random() < 0.5 and _HAS_RESET:
        given += ("parallel=fsdp", UNITS)
        at = [each if each[-1] in "0123er" else f"{each[:-1]}3" for each in at]  # it has four layers
        at = [each for each in at if not each.startswith("1:")]  # the first calls of the task are checks
    if precision == "fp16":
        given += ("precision.loss_scale.init=1024", "precision.loss_scale.growth_interval=2")
    train(ranks, tmp_path / "whole", overrides=given)
    train(ranks, tmp_path / "again", *at, overrides=given)
    assert_same(tmp_path / "whole", tmp_path / "again", 1e-5 if precision == "fp32" else 2e-3)
    scale = [record.get("train/loss_scale") for record in records(tmp_path / "whole")]
    assert [record.get("train/loss_scale") for record in records(tmp_path / "again")] == scale
    assert read_starts(tmp_path / "again")[-1].micro_batch < read_starts(tmp_path / "whole")[-1].micro_batch


@pytest.mark.slow
def test_a_run_that_a_hook_ends_before_such_a_step_is_evaluated_and_saved(tmp_path: Path) -> None:
    hook = ", {_target_: tests.memory_faults.EndsEarly, after: 3}"
    train(2, tmp_path / "run", "4:1:0:4", hook=hook)
    assert metrics(tmp_path / "run", "step") == [1, 2, 3, 3]
    assert len(metrics(tmp_path / "run", "eval/loss")) == 1
    assert status(tmp_path / "run")["state"] == "finished"
    assert weights(tmp_path / "run", 3)


@pytest.mark.slow
def test_a_step_whose_forward_spoilt_a_buffer_before_memory_ran_out_is_done_again(tmp_path: Path) -> None:
    forwards_before = 4  # a check of the task's loss makes three, and one counts operations
    spoilt = ("model._target_=tests.memory_faults.SpoiltOnce", f"+model.forward={forwards_before + 3}")
    train(2, tmp_path / "run", "3:1:0:after", overrides=spoilt)
    assert status(tmp_path / "run")["state"] == "finished"
    assert retries(tmp_path / "run") == [(2, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=needs_reset)])
def test_buffers_count_what_was_trained_and_nothing_of_a_failed_attempt(tmp_path: Path, parallel: str) -> None:
    given = ("model._target_=tests.memory_faults.Counting", f"parallel={parallel}", "data.tail=drop")
    given += (UNITS,) if parallel == "fsdp" else ()
    # The rank that fails in step 3 has run its forward; the one whose buffers all ranks get fails in step 5.
    train(2, tmp_path / "run", "3:1:0:after", "5:0:1:after", overrides=given)
    counted = weights(tmp_path / "run", 6)
    assert float(counted["rows"]) == 6 * 32
    assert int(counted["forwards"]) == 2 * 1 + 2 * 2 + 2 * 4  # one for each micro-batch of an applied step


@pytest.mark.slow
@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("on_device", [False, True], ids=["host decides", "device decides"])
def test_an_overflow_in_a_step_that_is_done_again_is_not_counted(on_device: bool, hysteresis: int) -> None:
    def scales(number: int, exhausted: bool) -> list[dict[str, Any]]:
        model, scale = Net(), LossScale(CPU, init=1024.0, growth_interval=3, hysteresis=hysteresis)
        step = train_step(
            DistributedDataParallel(model),
            torch.optim.SGD(model.parameters(), lr=0.1, fused=on_device),
            world=world(number, 2),
            precision="fp16",
            loss_scale=scale,
        )
        if on_device:
            step._decides_on_device, step._vote = True, Vote(CPU, 2)
        seen = []
        for at in range(5):
            window = micro_batches(at, 12, ranks=2, rank=number)
            if exhausted and at in (1, 3):  # rank 0 overflows, while rank 1 has no memory
                with pytest.raises(StepOutOfMemory):
                    attempt(step, window, overflows=number == 0, exhausted=number == 1)
                step.begin_again(DistributedDataParallel)
            attempt(step, window)
            seen.append(scale.state_dict())
        return seen

    def attempt(step: TrainStep, window: list[Batch], overflows: bool = False, exhausted: bool = False) -> None:
        def given() -> Iterator[Batch]:
            if exhausted:
                raise MemoryError("injected")
            yield from window

        try:
            step.accumulate(given(), 1)
        except MemoryError:
            step.cannot_compute()
        if overflows:
            next(step.bare_model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        step.apply()
        step.settle()

    assert run_ranks(2, scales, True) == run_ranks(2, scales, False)


# -- runs that end after such a step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "task"),
    [
        (("3:1:0:4",), "tests.memory_faults.contrast"),  # the step cannot be done again
        (("3:1:0:4", "4:0:0:error"), ""),  # an error before all ranks know
    ],
    ids=["refused", "error"],
)
def test_no_sample_is_lost_if_the_run_ends_with_an_error_and_continues(
    tmp_path: Path, undisturbed: Path, at: tuple[str, ...], task: str
) -> None:
    given, whole = ("data.record_keys=true",), undisturbed
    if task:
        given += ("task._target_=hydra.utils.get_method", f"+task.path={task}")
        train(2, whole := tmp_path / "whole", overrides=given)
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "again", *at, overrides=given)
    assert status(tmp_path / "again")["step"] == 2
    assert weights(tmp_path / "again", 2)
    train(2, tmp_path / "again", overrides=given)
    assert [keys_of(tmp_path / "again", rank) for rank in (0, 1)] == [keys_of(whole, rank) for rank in (0, 1)]
    assert_same(whole, tmp_path / "again")


# -- where it cannot be done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("train.max_memory_retries=0",), "train.max_memory_retries=0"),
        (("parallel=fsdp",), f"before torch 2.13, and this is {torch.__version__}"),
        pytest.param(("parallel=fsdp", "parallel.reduce_dtype=bf16"), "added up in bf16", marks=needs_reset),
        (("model._target_=tests.toys.NormNet", "model.width=8"), "BatchNorm"),
        (("train.micro_batch_size=1", "train.global_batch_size=2"), "one row"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_message_says_why_the_step_is_not_done_again(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    reason: str,
) -> None:
    if "torch" in reason:
        monkeypatch.setattr(memory_retry, "can_reset", lambda model: False)
    ranks = 2 if "parallel=fsdp" in overrides else 1
    with pytest.raises(RanksFailed):
        train(ranks, tmp_path / "run", "2:0:0:before", overrides=overrides)
    shown = capfd.readouterr().err
    assert "out of memory in step 2" in shown
    assert reason in shown
    assert status(tmp_path / "run")["state"] == "failed"


def test_more_retries_than_allowed_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path / "run", "2:0:0:0", "3:0:0:0", overrides=("train.max_memory_retries=1",))
    shown = capfd.readouterr().err
    assert "out of memory in step 3, with micro-batches of 32 rows" in shown
    assert "train.micro_batch_size=16" in shown
    assert "train.max_memory_retries=1" in shown


def contrast(model: nn.Module, batch: Batch) -> Output:
    """The loss of each row depends on the mean of all rows."""
    outputs = model(batch["x"]).flatten()
    return Output((outputs - outputs.mean()).square().sum(), batch.valid.sum())


def test_a_loss_whose_rows_depend_on_each_other_is_noticed() -> None:
    columns = {"x": torch.arange(18.0).reshape(6, 3), "y": torch.ones(6)}
    batch, model = Batch(columns, list("abcdef"), torch.ones(6, dtype=torch.bool)), Net()
    arguments: tuple[Any, ...] = (model, batch, Precision("fp32"), CPU)
    assert rows_interact(contrast, *arguments)
    assert not rows_interact(squared_error, *arguments)
    assert model.training


class OwnNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if self.training else x


def test_a_normalisation_over_the_batch_that_is_no_batchnorm_is_noticed_and_dropout_is_not() -> None:
    columns = {"x": 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), "y": torch.ones(6, 1)}
    batch, precision = Batch(columns, list("abcdef"), torch.ones(6, dtype=torch.bool)), Precision("fp32")
    assert rows_interact(squared_error, nn.Sequential(OwnNorm(), Net()), batch, precision, CPU)
    assert not rows_interact(squared_error, nn.Sequential(nn.Dropout(0.5), Net()), batch, precision, CPU)


def test_random_numbers_of_a_loss_are_not_taken_for_rows_that_depend_on_each_other() -> None:
    def denoise(model: nn.Module, batch: Batch) -> Output:
        noise = torch.randn(len(batch["x"]))
        return Output((model(batch["x"]).flatten() - noise).square().sum(), batch.valid.sum())

    def noisy_contrast(model: nn.Module, batch: Batch) -> Output:
        outputs = model(batch["x"]).flatten() + 0.1 * torch.randn(len(batch["x"]))
        return Output((outputs - outputs.mean()).square().sum(), batch.valid.sum())

    columns = {"x": 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0))}
    batch, precision = Batch(columns, list("abcdef"), torch.ones(6, dtype=torch.bool)), Precision("fp32")
    assert not rows_interact(denoise, Net(), batch, precision, CPU)
    assert rows_interact(noisy_contrast, Net(), batch, precision, CPU)


@pytest.mark.parametrize(
    ("rows", "share", "expected"), [(32, 32, 16), (22, 22, 11), (11, 22, 2), (9, 9, 3), (1, 8, None)]
)
def test_the_next_size_divides_the_rows_of_a_rank(rows: int, share: int, expected: int | None) -> None:
    assert smaller(rows, share) == expected
