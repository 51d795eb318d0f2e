"""The number of workers, worker processes kept over epochs, and the micro-batches that each builds."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from dtrain.data import Batch, Generated, Limits, ShardLoader, WorkerOptions
from dtrain.data.fields.field import DataError
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading import field_buffer as field_buffer_module
from dtrain.data.loading import ipc as ipc_module
from dtrain.data.loading import workers as workers_module
from dtrain.data.loading.batch import Transfer
from dtrain.data.loading.ipc import SharedMemoryFull
from dtrain.data.loading.workers import (
    MicroBatches,
    RankShare,
    WorkerStream,
    choose_workers,
    cores_per_rank,
    number_of_workers,
    seconds_to_build,
)
from dtrain.data.order.epoch_order import EpochOrder, Layout
from dtrain.data.order.lines import Recipe
from dtrain.data.order.position import Position
from dtrain.data.shards.shard_file import ShardChanged
from dtrain.data.sources.shard_source import ShardSource
from dtrain.precision import Precision
from tests.refusals import assert_refused, refused
from tests.shards import LABEL, global_batches, make_loader, read_epoch, write_numbered


@pytest.mark.parametrize(
    ("seconds", "cores", "number", "told"),
    [
        (0.003, 8, 1, "3.0 ms to build: enough for one every 20 ms"),
        (0.02, 8, 1, "enough"),
        (0.05, 8, 3, "50.0 ms to build: enough for one every 20 ms"),
        (0.5, 8, 7, "one every 71 ms, limited by 8 cores for each rank"),
        (0.05, 2, 1, "one every 50 ms, limited by 2 cores"),
    ],
)
def test_workers_are_as_many_as_needed_and_no_more_than_cores_allow(
    seconds: float, cores: int, number: int, told: str
) -> None:
    chosen, reason = choose_workers(seconds, cores)
    assert chosen == number
    assert told in reason


def test_cores_are_shared_by_the_ranks_of_a_machine_and_granted_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert cores_per_rank({}) == 32
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "4"}) == 8
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "12"}) == 3
    assert cores_per_rank({"LOCAL_WORLD_SIZE": "64", "SLURM_CPUS_PER_TASK": "99"}) == 1


def test_a_single_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "process_cpu_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    number, reason = number_of_workers("auto", iter(()))
    assert number == 0
    assert "1 core for each rank" in reason


def test_more_workers_than_cores_are_named_in_the_banner_and_not_by_torch(
    uneven: list[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(workers_module, "process_cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    loader = make_loader(uneven, num_workers=3)
    next(iter(loader))
    loader.close()
    assert "more than its 2 cores" in loader.workers_reason
    # Python 3.12 and later warn of forks of a process with threads.
    assert not [warning for warning in recwarn if "worker" in str(warning.message)]
    assert not make_loader(uneven, num_workers=2).workers_reason


def test_the_time_is_the_median_without_the_first_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate([0, 0.04, 0, 0.01, 0, 0.02])
    monkeypatch.setattr(workers_module.time, "perf_counter", lambda: next(clock))
    threads = []
    before = torch.get_num_threads()
    assert seconds_to_build(iter(lambda: threads.append(torch.get_num_threads()), 1)) == pytest.approx(0.02)
    assert threads == [1] * 4
    assert torch.get_num_threads() == before


def test_slow_micro_batches_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate([0, 4])
    monkeypatch.setattr(workers_module.time, "perf_counter", lambda: next(clock))
    assert seconds_to_build(iter(lambda: 0, 1)) == 4


def test_a_loader_that_chooses_its_workers_hands_over_the_same_batches(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [20, 13])
    chosen = make_loader(shards, num_workers="auto")
    assert chosen.num_workers in range(os.cpu_count() or 1)
    assert re.match(r"a micro-batch takes \d+\.\d ms to build: |.*1 core for each rank", chosen.workers_reason)
    assert chosen.position == (0, 0)
    assert global_batches([chosen]) == global_batches([make_loader(shards)])
    chosen.close()
    assert make_loader(shards).workers_reason == ""


def test_what_was_built_to_measure_is_not_handed_over_and_counts_nothing() -> None:
    def sample(number: int, rng: np.random.Generator) -> dict[str, Any]:
        if number < 3:
            raise ValueError("bad")
        return {"x": number}

    loader = ShardLoader.over(
        Generated(sample, 9),
        {"x": {"name": "x"}},
        global_batch_size=3,
        num_workers="auto",
        shuffle="none",
        limits=Limits(max_bad=3),
    )
    assert loader.bad_samples == 0
    loader.close()


@pytest.mark.parametrize("asked", ["many", -1])
def test_what_is_no_number_of_workers_is_refused(tmp_path: Path, asked: Any) -> None:
    with refused(ValueError, "data.num_workers", repr(asked), "auto"):
        make_loader(write_numbered(tmp_path, [20]), num_workers=asked)


ROOT = Path(__file__).parents[3]
IMAGES = {"x": {"name": "x", "role": "image"}}


def with_process_id(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"label": os.getpid()}


def two_workers(shards: list[str], start_method: str | None = None, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 4, "num_workers": 2, "augment": with_process_id, **options}
    return ShardLoader(shards, LABEL, workers=WorkerOptions(start_method=start_method), **given)


def worker_numbers(steps: Sequence[Sequence[Mapping[str, Any]]]) -> set[int]:
    return {int(process) for step in steps for batch in step for process in batch["label"]}


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def call_cpp_for_ever() -> None:
    while True:
        torch.zeros(1).add_(1)


class BatchesWithThread(IterableDataset):
    """Batches of a worker in which a thread of a library is always in C++, or about to return from it."""

    def __iter__(self) -> Iterator[Batch]:
        threading.Thread(target=call_cpp_for_ever, daemon=True).start()
        while True:
            yield Batch({"label": torch.zeros(1)}, ["key"], torch.ones(1, dtype=torch.bool))


@pytest.mark.slow
def test_a_worker_with_a_thread_in_cpp_does_not_abort_at_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    loading = {"num_workers": 1, "prefetch_factor": 4, "multiprocessing_context": "spawn"}
    stream = WorkerStream(BatchesWithThread(), loading, (0, 0), lambda epoch: 100, 1)  # type: ignore[arg-type]
    stream.take()
    stream.close()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_workers_end_with_a_loader_that_is_collected_in_a_reference_cycle(uneven: list[str]) -> None:
    loader = two_workers(uneven)
    workers = worker_numbers(read_epoch(loader))
    holder: dict[str, Any] = {"loader": loader}
    holder["holder"] = holder
    del loader, holder
    try:
        gc.collect()
        assert [process for process in workers if alive(process)] == []
    finally:
        for process in filter(alive, workers):  # else Python would wait for them at its end
            os.kill(process, signal.SIGKILL)


def test_workers_are_kept_over_epochs_and_a_pause_and_end_with_the_loader(uneven: list[str]) -> None:
    loader = two_workers(uneven)
    workers = worker_numbers(read_epoch(loader))
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert worker_numbers(read_epoch(loader)) == workers
    for batch in loader:
        assert int(batch["label"][0]) in workers
        loader.commit()
        break
    assert worker_numbers(read_epoch(loader)) == workers
    loader.close()
    assert not any(map(alive, workers))
    assert not workers & worker_numbers(read_epoch(loader))
    loader.close()


def test_evaluations_that_count_up_keep_their_workers_without_any_commit(uneven: list[str]) -> None:
    loader = two_workers(uneven, shuffle="none")
    workers = [worker_numbers(read_epoch(loader, epoch, commit=False)) for epoch in range(3)]
    assert workers[0] == workers[1] == workers[2]
    loader.close()


def test_workers_of_a_loader_that_is_dropped_end(uneven: list[str]) -> None:
    loader = two_workers(uneven)
    workers = {int(next(iter(loader))["label"][0])}
    del loader
    assert not any(map(alive, workers))


def test_a_stop_request_to_the_whole_group_leaves_workers_at_work(uneven: list[str]) -> None:
    loader = two_workers(uneven)
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
def test_a_stop_request_while_workers_start_leaves_them_at_work(uneven: list[str], start_method: str) -> None:
    for _ in range(5 if start_method == "fork" else 1):
        loader = two_workers(uneven, start_method=start_method, augment=None)
        batches = iter(loader)
        for process in multiprocessing.active_children():
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process.pid or 0, name)
        assert len(list(batches)) == 12
        loader.close()


def test_the_trainer_gets_its_own_signals_as_before(uneven: list[str]) -> None:
    loader = two_workers(uneven)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="at its end"),
        pytest.param("raise KeyError('a mistake')", id="after an error"),
    ],
)
def test_a_program_that_leaves_its_loader_open_exits(uneven: list[str], ending: str) -> None:
    program = f"""
from dtrain.data import ShardLoader, WorkerOptions
workers = WorkerOptions(start_method="fork")
loader = ShardLoader({uneven!r}, {LABEL!r}, global_batch_size=4, num_workers=2, workers=workers)
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
    loader = two_workers(paths, num_workers=num_workers, augment=None)
    Path(paths[0]).unlink()
    with pytest.raises(ShardChanged) as told:
        list(loader)
    # What other ranks print, and `status.json` holds, is the first line.
    assert str(told.value).startswith(f"shard {paths[0]!r} cannot be read at offset 512: ")


def test_shared_memory_that_is_full_is_named_with_its_size_and_no_sample(
    uneven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(cls: type, size: int, **options: Any) -> Any:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
        )

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", classmethod(no_space))
    monkeypatch.setattr(ipc_module, "MIN_FILE_BYTES", 1)
    monkeypatch.setattr(field_buffer_module, "get_worker_info", lambda: SimpleNamespace())
    # Not arrays, whose columns are taken at once.
    samples = [{"x": np.zeros((8, 8, 3), np.uint8)}] * 9
    images = ShardLoader.over(samples, IMAGES, global_batch_size=9, num_workers=0)
    size = f"{shutil.disk_usage('/dev/shm').total / 1e6:,.0f} MB"
    with refused(SharedMemoryFull, "/dev/shm", size, "--shm-size", "data.num_workers") as raised:
        next(iter(images))
    notes = getattr(raised.value, "__notes__", [])
    assert "sample" not in f"{raised.value} {notes}".lower()


FULL = """
import numpy as np
from dtrain.data import ShardLoader, WorkerOptions
loader = ShardLoader.over(
    {"x": np.zeros((640, 4096), np.float32)}, {"x": {"name": "x", "role": "feature"}}, global_batch_size=128,
    num_workers=2, workers=WorkerOptions(start_method="fork", prefetch=4),
)
list(loader)
"""


@pytest.mark.slow
def test_a_small_shared_memory_ends_the_trainer_with_its_name() -> None:
    mount = "mount -t tmpfs -o size=5m none /dev/shm"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} -c '{FULL}'"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == 1
    assert_refused(ended.stderr.splitlines()[-1], "/dev/shm", "5 MB", "--shm-size")


def sample_that_cannot_be_sent(number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": number, "opened": lambda: None}


def test_a_value_that_cannot_be_sent_ends_the_loader_with_its_field() -> None:
    fields = {"x": {"name": "x"}, "opened": {"name": "opened"}}
    dataset = Generated(sample_that_cannot_be_sent, 8)
    workers = WorkerOptions(start_method="fork")
    loader = ShardLoader.over(dataset, fields, global_batch_size=4, num_workers=1, workers=workers)
    with refused(DataError, "'opened'", "pickle", "data.num_workers=0"):
        next(iter(loader))


def test_stopped_workers_end_by_themselves_when_the_loader_is_closed(
    uneven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = two_workers(uneven)
    batches = iter(loader)
    workers = {int(next(batches)["label"][0]) for _ in range(2)}
    for process in workers:
        os.kill(process, signal.SIGSTOP)
    killed, kill = [], multiprocessing.process.BaseProcess.kill
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "kill", lambda self: (killed.append(self), kill(self)))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 10)
    loader.close()
    assert not killed
    assert not any(map(alive, workers))


def sleeping(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["label"] > 10:
        time.sleep(600)
    return {"label": os.getpid()}


def test_a_worker_that_does_not_notice_the_end_is_killed(uneven: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    loader = two_workers(uneven, augment=sleeping, shuffle="none")
    batches = iter(loader)
    workers = {int(next(batches)["label"][0]) for _ in range(2)}
    loader.close()
    assert not any(map(alive, workers))


TRAINER = """
import os
from dtrain.data import ShardLoader
from tests.data.loading.test_workers import two_workers
if __name__ == "__main__":
    loader = two_workers({shards!r}, start_method={start_method!r})
    batches = iter(loader)
    print(*{{int(next(batches)["label"][0]) for _ in range(2)}}, flush=True)
    input()
    {ending}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's signal at the end of a parent")
@pytest.mark.parametrize(
    ("start_method", "ending"),
    [
        ("fork", "os.kill(os.getpid(), 9)"),
        ("forkserver", "os.kill(os.getpid(), 9)"),
        ("fork", "raise KeyError"),
    ],
)
def test_stopped_workers_end_with_their_trainer(
    uneven: list[str], tmp_path: Path, start_method: str, ending: str
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.format(shards=uneven, start_method=start_method, ending=ending))
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environ)
    assert trainer.stdout is not None
    workers = set(map(int, trainer.stdout.readline().split()))
    assert len(workers) == 2
    try:
        for process in workers:
            os.kill(process, signal.SIGSTOP)
        trainer.communicate("\n", timeout=100)
        deadline = time.monotonic() + 60
        while any(map(runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(runs, workers))
    finally:
        trainer.kill()
        for process in filter(alive, workers):
            os.kill(process, signal.SIGKILL)


def runs(process: int) -> bool:
    """Whether a process exists and is no zombie, which process 1 of a container may never end."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def no_augmentation(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    raise ZeroDivisionError("a mistake")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_users_code_names_the_sample(uneven: list[str], num_workers: int) -> None:
    loader = two_workers(uneven, num_workers=num_workers, augment=no_augmentation, shuffle="none")
    with pytest.raises(ZeroDivisionError, match="a mistake") as raised:
        list(loader)
    text = "".join(traceback.format_exception(raised.value))
    assert f"Sample 'shard-000.tar/sample00000', in {uneven[0]} at byte 512." in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_runs_own_random_numbers_are_not_drawn_from(uneven: list[str], num_workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = two_workers(uneven, num_workers=num_workers)
    next(iter(loader))
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


@given(batch=st.integers(1, 60), world=st.integers(1, 70), data=st.data())
def test_ranks_and_micro_batches_cover_the_slots_in_order(batch: int, world: int, data: st.DataObject) -> None:
    rows = -(-batch // world)
    micro = data.draw(st.sampled_from([m for m in range(1, rows + 1) if batch % world or rows % m == 0]) | st.none())
    shares = [RankShare.from_sizes(batch, micro, rank, world) for rank in range(world)]
    assert len({share.micro_batches_per_step for share in shares}) == 1
    slots = [share.slots(np.arange(share.micro_batches_per_step)) for share in shares]
    assert {part.shape for part in slots} == {(shares[0].micro_batches_per_step, micro or rows)}
    assert [slot for part in slots for slot in part.ravel().tolist() if slot >= 0] == list(range(batch))
    of_rank = [int((part >= 0).sum()) for part in slots]
    assert max(of_rank) - min(of_rank) <= 1


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((32, 5, 0, 4), ["micro_batch_size: 5 does not fit: each of 4 ranks has 8", "Sizes that fit: 1, 2, 4, 8"]),
        ((32, 16, 0, 4), ["16 does not fit"]),
        ((32, 0, 0, 4), ["0 does not fit"]),
        ((0, None, 0, 1), ["at least one sample"]),
        ((8, None, 2, 2), ["rank 2, world_size 2", "rank in [0, world_size)"]),
        ((8, None, -1, 2), ["rank -1"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    sizes: tuple[int, int | None, int, int], names: list[str]
) -> None:
    with refused(ValueError, *names):
        RankShare.from_sizes(*sizes)


@pytest.fixture(scope="module")
def source(uneven: list[str]) -> ShardSource:
    return ShardSource.build(uneven, parse_fields(LABEL))


def make_stream(
    source: ShardSource, share: RankShare, epoch: int, layouts: Sequence[Layout], step: int
) -> MicroBatches:
    position = Position(source.index, Recipe(0), Layout(share.global_batch_size, share.global_batch_size))
    position.epoch, position.step = epoch, step
    position.order = EpochOrder(source.index.counts, Recipe(0), epoch, layouts)
    return MicroBatches(source, position, share, Transfer(source.fields, Precision("fp32")))


def handed_over(stream: MicroBatches, workers: int, count: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What ``workers`` copies of the stream give in turn, as DataLoader asks them."""

    def worker(number: int) -> Iterator[Batch]:
        monkeypatch.setattr(workers_module, "get_worker_info", lambda: SimpleNamespace(id=number, num_workers=workers))
        yield from stream

    turns = itertools.cycle([worker(number) for number in range(workers)])
    return [next(next(turns)).sample_keys for _ in range(count)]


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_in_turn_give_what_one_gives_from_epoch_to_epoch(
    source: ShardSource, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 steps of 3 micro-batches are left of a first epoch that was cut anew; each one after it has 4 steps too.
    share = RankShare.from_sizes(12, 2, 1, 2)
    stream = make_stream(source, share, 4, [Layout(5, 5, 1), Layout(12, 4)], 1)
    alone = [batch.sample_keys for batch in itertools.islice(iter(stream), 45)]
    assert handed_over(stream, workers, 45, monkeypatch) == alone


def test_the_stream_is_that_of_the_order(source: ShardSource) -> None:
    share = RankShare.from_sizes(6, None, 0, 1)
    batches = iter(make_stream(source, share, 0, [Layout(6, 6)], 3))
    for epoch, first in ((0, 3), (1, 0)):
        order = EpochOrder(source.index.counts, Recipe(0), epoch, [Layout(6, 6)])
        for step in range(first, order.num_steps):
            samples = order.locate(step, np.arange(6)).tolist()
            assert next(batches).sample_keys == [
                source.index.keys([sample])[0] if sample >= 0 else "" for sample in samples
            ]


def test_a_rank_without_slots_gets_masked_rows_of_the_right_shape(source: ShardSource) -> None:
    ranks = [
        iter(make_stream(source, RankShare.from_sizes(2, None, rank, 3), 0, [Layout(2, 2)], 0)) for rank in range(3)
    ]
    for _ in range(23):  # whole steps of an epoch of 47 samples
        idle, first, second = (next(rank) for rank in ranks)
        assert (idle["label"].shape, idle.valid.tolist(), idle.sample_keys) == ((1,), [False], [""])
        assert first.valid.all()
        assert second.valid.all()
