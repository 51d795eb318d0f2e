"""``train.micro_batch_size=auto``: the largest micro-batch that fits on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.data import Batch
from dtrain.doctor import memory
from dtrain.tasks import Classification
from dtrain.training import memory_retry, micro_batch
from dtrain.training.micro_batch import _largest_first, _window
from dtrain.training.task import Output
from tests.ranks import RanksFailed, run_ranks
from tests.training.test_memory_retry import needs_reset
from tests.whole_runs import QUIET, metrics, train_on, weights

pytestmark = pytest.mark.usefixtures("digits")
SMALL = (
    *("model._target_=tests.memory_faults.Counting", "model.width=64", "train.max_steps=3", "train.eval_every=0"),
    *("train.log_every=1", "checkpoint.best=null"),
)
FSDP = ("parallel=fsdp", "parallel.shard_modules=['1','3','5']")
MUCH = 2**40


class Limited(Classification):
    """A task that has memory for so many rows, on rank 0 twice as many as on others.

    Args:
        rows: So many.
        reads: Whether it reads values, so that it cannot run on fake tensors.
        gathers: Whether it calls a collective.
    """

    def __init__(self, rows: int = 9, reads: bool = False, gathers: bool = False) -> None:
        super().__init__()
        self._rows, self._reads, self._gathers = rows, reads, gathers

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        rank, is_fake = torch.distributed.get_rank(), hasattr(batch.valid, "fake_mode")
        if self._reads and not batch.valid.any().item():
            raise AssertionError
        if self._gathers:
            torch.distributed.all_reduce(torch.ones(1))
        if model.training and not is_fake and len(batch.valid) > self._rows * (2 - min(rank, 1)):
            if rank:
                raise MemoryError("injected")
            super().__call__(model, batch)  # all collectives of the forward, as if the backward were too much
            raise MemoryError("injected")
        return super().__call__(model, batch)


LIMITED = f"task._target_={__name__}.Limited"


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the memory of a device. A CPU kills what exceeds its memory, so there is nothing to find there."""
    return lambda nbytes: monkeypatch.setattr(micro_batch, "_available", lambda device: nbytes)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[int]]:
    """The sizes that rank 0 has tried since the last call, in their order."""
    file = tmp_path / "trials"

    def noting(run: Any, batch: Batch, micro_batches: int, state: int) -> Any:
        if not run.world.rank:
            with file.open("a") as lines:
                lines.write(f"{len(batch.valid)}\n")
        return _window(run, batch, micro_batches, state)

    def taken() -> list[int]:
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return [*map(int, text.split())]

    monkeypatch.setattr(micro_batch, "_window", noting)
    return taken


def train(ranks: int, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains, and returns the content of the run's file."""
    auto = ("train.micro_batch_size=auto",) if not any("micro_batch_size" in each for each in overrides) else ()
    given = {override.partition("=")[0] for override in overrides}
    train_on(ranks, run_dir, *(each for each in SMALL if each.partition("=")[0] not in given), *auto, *overrides)
    path = run_dir / micro_batch.FILE
    return list(json.loads(path.read_text())) if path.exists() else []


# -- the search


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(FSDP, marks=needs_reset),
        ("train.deterministic=false", "parallel.static_graph=true"),
    ],
    ids=["ddp", "fsdp", "static graph"],
)
def test_all_ranks_take_the_smallest_of_their_sizes_and_train_as_if_it_had_been_typed(
    tmp_path: Path, has: Callable[[int], None], overrides: tuple[str, ...]
) -> None:
    has(MUCH)
    [found] = train(2, tmp_path / "auto", LIMITED, *overrides)
    assert (found["micro_batch_size"], found["rows_of_a_rank"], found["ranks"]) == (8, 32, 2)
    train(2, tmp_path / "typed", LIMITED, *overrides, "train.micro_batch_size=8")
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "typed")
    for name, tensor in weights(tmp_path / "typed", 3).items():
        assert torch.equal(tensor, weights(tmp_path / "auto", 3)[name]), name


def needed(ranks: int, rows: int, folder: Path, *overrides: str) -> int:
    """Bytes of a step, as ``doctor memory`` computes them."""
    file = folder / "memory.json"
    given = {override.partition("=")[0] for override in overrides}
    quiet = [override for override in QUIET if override.partition("=")[0] not in given]
    arguments = ["experiment=digits", *quiet, *SMALL, *overrides, f"train.micro_batch_size={rows}"]

    def one(rank: int) -> None:
        memory.main([*arguments, f"ranks={ranks}", f"--json={file}"])

    run_ranks(1, one, init=False)
    return int(next(iter(json.loads(file.read_text())["strategies"].values()))["total"])


_SLOW_FSDP = [pytest.mark.slow, needs_reset]
# Otherwise several micro-batches need more memory for gradients than one.
_DDP, _FSDP = ("train.deterministic=false",), (*FSDP, "parallel.reduce_after=micro_batch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "overrides", "tried", "chosen"),
    [
        (9, _DDP, [8, 16], 8),
        (3, _DDP, [8, 4, 2], 2),
        (99, _DDP, [8, 16, 32], 32),
        pytest.param(9, _FSDP, [8, 16], 8, marks=_SLOW_FSDP),
        pytest.param(3, _FSDP, [8, 4, 2], 2, marks=_SLOW_FSDP),
    ],
    ids=["as computed", "fewer", "more", "as computed, fsdp", "fewer, fsdp"],
)
def test_the_search_begins_where_doctor_memory_says(
    tmp_path: Path,
    has: Callable[[int], None],
    trials: Callable[[], list[int]],
    capfd: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    limit: int,
    tried: list[int],
    chosen: int,
) -> None:
    has(int(1.005 * needed(2, 8, tmp_path, *overrides) / 0.9))
    [found] = train(2, tmp_path / "run", LIMITED, f"+task.rows={limit}", *overrides)
    assert (found["micro_batch_size"], trials()) == (chosen, tried)
    assert "a step with micro-batches of 8 rows is computed to need" in capfd.readouterr().out


def test_a_task_that_cannot_run_without_data_is_searched_from_the_whole_share_down(
    tmp_path: Path, has: Callable[[int], None], trials: Callable[[], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    has(MUCH)
    [found] = train(1, tmp_path / "run", LIMITED, "+task.reads=true", "task.rows=10")
    assert (found["micro_batch_size"], trials()) == (16, [64, 32, 16])
    [line] = [line for line in capfd.readouterr().out.splitlines() if "cannot be computed" in line]
    assert "sizes from 64 down are tried" in line
    assert "DataDependent" in line


def test_trials_leave_the_buffers_as_they_were(tmp_path: Path, has: Callable[[int], None]) -> None:
    has(MUCH)
    train(1, tmp_path / "run", LIMITED, "task.rows=10", "data.tail=drop")
    counted = weights(tmp_path / "run", 3)
    assert (int(counted["forwards"]), int(counted["rows"])) == (3 * 4, 3 * 64)


def test_the_rows_that_need_most_come_first() -> None:
    columns = {"text": ["a", "long", "", "abc"], "number": torch.arange(4)}
    batch = Batch(columns, list("wxyz"), torch.tensor([True, True, True, False]))
    assert _largest_first(batch).sample_keys == ["x", "w", "y", "z"]


def test_a_cpu_takes_the_whole_share_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [found] = train(1, tmp_path / "run")
    assert found["micro_batch_size"] == 64
    assert "micro-batches of 64 rows: a CPU has no limit" in capfd.readouterr().out


# -- later starts


@pytest.mark.slow
def test_a_later_start_does_not_search_again_and_other_ranks_have_their_own_size(
    tmp_path: Path,
    has: Callable[[int], None],
    trials: Callable[[], list[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    has(MUCH)
    run = tmp_path / "run"
    for number, (ranks, steps) in enumerate([(1, 1), (2, 2), (1, 3)]):
        sizes = [found["micro_batch_size"] for found in train(ranks, run, LIMITED, f"train.max_steps={steps}")]
        assert bool(trials()) == (number < 2)
    assert sizes == [8, 16]  # the last one that was used is the last one
    assert "micro-batches of 16 rows, as found by an earlier start" in capfd.readouterr().out


@pytest.mark.parametrize(
    "content", ["", "{}", '{"micro_batch_size": 1}', "[1]", '[{"micro_batch_size": 1}]', "[" * 10**5], ids=range(6)
)
def test_a_file_that_says_nothing_about_this_run_is_no_help(tmp_path: Path, content: str) -> None:
    (tmp_path / micro_batch.FILE).write_text(content)
    assert micro_batch._known(tmp_path, {"rows_of_a_rank": 8}) is None


# -- where it cannot be found


@pytest.mark.parametrize(
    "overrides", [(), pytest.param(FSDP, marks=[pytest.mark.slow, needs_reset])], ids=["ddp", "fsdp"]
)
def test_not_even_one_row(
    tmp_path: Path, has: Callable[[int], None], capfd: pytest.CaptureFixture[str], overrides: tuple[str, ...]
) -> None:
    has(MUCH)
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "run", LIMITED, "task.rows=0", *overrides)
    assert "not even one row fits" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (FSDP, f"before torch 2.13, and this is {torch.__version__}"),
        ((LIMITED, "+task.gathers=true"), "the task calls collectives"),
    ],
    ids=["fsdp", "collectives"],
)
def test_a_run_whose_ranks_would_wait_for_each_other_is_refused(
    tmp_path: Path,
    has: Callable[[int], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    reason: str,
) -> None:
    has(MUCH)
    monkeypatch.setattr(memory_retry, "can_reset", lambda model: False)
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "run", *overrides)
    shown = capfd.readouterr().err
    for text in ("train.micro_batch_size: got auto", reason, "dtrain doctor memory"):
        assert text in shown


@needs_reset
@pytest.mark.slow
def test_gradients_that_would_be_added_up_in_16_bits_are_refused(
    tmp_path: Path, has: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    has(MUCH)
    with pytest.raises(RanksFailed):
        train(2, tmp_path / "run", LIMITED, *FSDP, "parallel.reduce_dtype=bf16")
    assert "parallel.reduce_after=micro_batch" in capfd.readouterr().err


def test_another_word_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path / "run", "train.micro_batch_size=most")
    assert "train.micro_batch_size: got 'most', want a number of rows, auto, or null" in capfd.readouterr().err
