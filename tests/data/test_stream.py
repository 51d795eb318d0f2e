"""Real workers, kept over epochs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from dtrain.data import ShardLoader
from dtrain.data.batch import Batch
from dtrain.data.shard_file import ShardChanged
from dtrain.data.stream import Stream
from tests.data.shards_for_tests import LABEL, UNEVEN, epoch_of, write_numbered

ROOT = Path(__file__).parents[2]


def with_process_id(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"label": os.getpid()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN)


def loader_of(shards: list[str], **options: Any) -> ShardLoader:
    given = {"global_batch_size": 4, "num_workers": 2, "augment": with_process_id, **options}
    return ShardLoader(shards, LABEL, **given)


def workers_of(steps: list[list[dict[str, Any]]]) -> set[int]:
    return {int(process) for step in steps for batch in step for process in batch["label"]}


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class PackedInCpp:
    """Packing it takes the queue's thread into C++ and back, over and over for a few seconds."""

    def __reduce__(self) -> tuple[Any, ...]:
        for _ in range(500_000):
            torch.zeros(1).add_(1)
        return PackedInCpp, ()


class EndlessBatches(IterableDataset):
    def __iter__(self) -> Iterator[Batch]:
        valid = torch.ones(1, dtype=torch.bool)
        yield Batch({"label": torch.zeros(1)}, ["key"], valid)
        while True:
            yield Batch({"label": PackedInCpp()}, ["key"], valid)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_a_worker_that_is_packing_when_the_stream_is_closed_does_not_abort(
    start_method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loading = {"num_workers": 1, "prefetch_factor": 4, "multiprocessing_context": start_method}
    stream = Stream(EndlessBatches(), loading, (0, 0), (100, 100), 1)  # type: ignore[arg-type]
    stream.take()
    stream.close()
    assert capfd.readouterr().err == ""


def test_workers_end_with_a_loader_that_is_collected_in_a_reference_cycle(shards: list[str]) -> None:
    loader = loader_of(shards)
    workers = workers_of(epoch_of(loader))
    holder: dict[str, Any] = {"loader": loader}
    holder["holder"] = holder
    del loader, holder
    try:
        gc.collect()
        assert [process for process in workers if alive(process)] == []
    finally:
        for process in filter(alive, workers):  # else Python would wait for them at its end
            os.kill(process, signal.SIGKILL)


def test_workers_are_kept_over_epochs_and_a_pause_and_end_with_the_loader(shards: list[str]) -> None:
    loader = loader_of(shards)
    workers = workers_of(epoch_of(loader))
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert workers_of(epoch_of(loader)) == workers
    for batch in loader:
        assert int(batch["label"][0]) in workers
        loader.commit()
        break
    assert workers_of(epoch_of(loader)) == workers
    loader.close()
    assert not any(map(alive, workers))
    assert not workers & workers_of(epoch_of(loader))
    loader.close()


def test_evaluations_that_count_up_keep_their_workers_without_any_commit(shards: list[str]) -> None:
    loader = loader_of(shards, shuffle="none")
    workers = [workers_of(epoch_of(loader, epoch, commit=False)) for epoch in range(3)]
    assert workers[0] == workers[1] == workers[2]
    loader.close()


def test_workers_of_a_loader_that_is_dropped_end(shards: list[str]) -> None:
    loader = loader_of(shards)
    workers = {int(next(iter(loader))["label"][0])}
    del loader
    assert not any(map(alive, workers))


def test_a_stop_request_to_the_whole_group_leaves_workers_at_work(shards: list[str]) -> None:
    loader = loader_of(shards)
    batches = iter(loader)
    workers = {int(next(batches)["label"][0]) for _ in range(2)}
    for process in workers:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process, name)
    assert {int(process) for batch in batches for process in batch["label"]} == workers
    loader.close()


@pytest.mark.parametrize(
    "start_method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_a_stop_request_while_workers_start_leaves_them_at_work(shards: list[str], start_method: str) -> None:
    for _ in range(5 if start_method == "fork" else 1):
        loader = loader_of(shards, start_method=start_method, augment=None)
        batches = iter(loader)
        for process in multiprocessing.active_children():
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process.pid or 0, name)
        assert len(list(batches)) == 12
        loader.close()


def test_the_trainer_gets_its_own_signals_as_before(shards: list[str]) -> None:
    loader = loader_of(shards)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    got = []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        next(iter(loader))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, handler)
        loader.close()


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="at its end", marks=pytest.mark.slow),
        pytest.param("raise KeyError('a mistake')", id="after an error"),
    ],
)
def test_a_program_that_leaves_its_loader_open_exits(shards: list[str], ending: str) -> None:
    program = f"""
from dtrain.data import ShardLoader
loader = ShardLoader({shards!r}, {LABEL!r}, global_batch_size=4, num_workers=2, start_method="fork")
batches = iter(loader)
next(batches)
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == bool(ending), ended.stderr
    assert ("a mistake" in ended.stderr) == bool(ending)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_ends_a_worker_is_told_in_its_own_words(tmp_path: Path, num_workers: int) -> None:
    paths = write_numbered(tmp_path, [4, 4])
    loader = loader_of(paths, num_workers=num_workers, augment=None)
    Path(paths[0]).unlink()
    with pytest.raises(ShardChanged) as told:
        list(loader)
    # What other ranks print, and `status.json` holds, is the first line.
    assert str(told.value).startswith(f"shard {paths[0]!r} cannot be read at offset 512: ")


def no_augmentation(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    raise ZeroDivisionError("a mistake")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_users_code_names_the_sample(shards: list[str], num_workers: int) -> None:
    loader = loader_of(shards, num_workers=num_workers, augment=no_augmentation, shuffle="none")
    with pytest.raises(ZeroDivisionError, match="a mistake") as raised:
        list(loader)
    text = "".join(traceback.format_exception(raised.value))
    assert f"Sample 'shard-000.tar/sample00000', in {shards[0]} from 512 on." in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_runs_own_random_numbers_are_not_drawn_from(shards: list[str], num_workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = loader_of(shards, num_workers=num_workers)
    next(iter(loader))
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)
