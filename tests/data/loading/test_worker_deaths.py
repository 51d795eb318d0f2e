"""Loader workers that die. The oracle is a loader without workers, or one whose shards have bad samples in their place."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtrain.data import Batch, Limits, Mixture, ShardLoader, WorkerOptions
from dtrain.data.loading.stream import Stream, StreamLoader
from dtrain.data.loading.worker_deaths import WorkerEnded, WorkerRestarts, explain_ended
from dtrain.data.mixing import Mix
from dtrain.data.sources.datasets import SampleIndex
from tests.data.loading.test_worker_processes import descriptors
from tests.refusals import assert_refused, refused
from tests.shards import IMAGE, LABEL, jpeg, write_numbered, write_tar
from tests.whole_runs import metrics, train_on

NO_LIMIT = Limits(max_bad=None, max_bad_consecutive=None)
MANY = 1000
COUNTS = (17, 1, 30)
FIELDS = {**IMAGE, **LABEL}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_numbered(tmp_path_factory.mktemp("shards"), COUNTS, image=True)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = in_shared_memory()
    yield
    assert not multiprocessing.active_children()
    deadline = time.monotonic() + 5
    while not in_shared_memory() <= before and time.monotonic() < deadline:
        time.sleep(0.05)  # other tests may be starting workers
    assert in_shared_memory() <= before


def in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def enlarged(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """96 KiB of random pixels, so that a batch needs slots, and some time in which a worker can be killed."""
    time.sleep(0.002)
    return {**sample, "image": rng.integers(0, 256, (128, 128, 3), np.uint8)}


def make(shards: list[str], start_method: str | None = None, **options: Any) -> ShardLoader:
    restarts = options.pop("max_restarts", MANY)
    workers = WorkerOptions(start_method=start_method, max_restarts=restarts, prefetch=options.pop("prefetch", 2))
    given = {"global_batch_size": 8, "micro_batch_size": 4, "num_workers": 2, "seed": 3, "augment": enlarged, **options}
    return ShardLoader(shards, FIELDS, workers=workers, limits=NO_LIMIT, **given)


def pids(loader: ShardLoader) -> list[int]:
    assert loader._stream is not None
    return [worker.pid for worker in loader._stream._iterator._workers]  # type: ignore[union-attr]


def batches(loader: ShardLoader, epochs: int, before: Callable[[int], None] = lambda number: None) -> list[Batch]:
    """All micro-batches of some epochs; ``before(n)`` is called before the n-th is taken."""
    found: list[Batch] = []
    for epoch in range(epochs):
        iterator = loader.epoch(epoch)
        for _ in range(loader.steps_left):
            for _ in range(loader.micro_batches_per_step):
                before(len(found))
                found.append(next(iterator))
            loader.commit()
    return found


def assert_equal(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.sample_keys == other.sample_keys
        assert torch.equal(one.valid, other.valid)
        assert [record["key"] for record in one.bad] == [record["key"] for record in other.bad]
        for name in other:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_that_are_killed_at_random_change_no_bit(shards: list[str], num_workers: int) -> None:
    expected = batches(make(shards, num_workers=0), 3)
    rng = np.random.default_rng(num_workers)
    loader = make(shards, num_workers=num_workers, start_method="fork")
    apart = 2 * num_workers + 1  # of two kills, the second would else often hit the sample of the first
    kills = set(rng.choice(np.arange(0, len(expected), apart), 4, replace=False).tolist())

    def kill(number: int) -> None:
        if number in kills:
            time.sleep(rng.uniform(0, 0.03))
            os.kill(int(rng.choice(pids(loader))), rng.choice([signal.SIGKILL, signal.SIGSEGV]))

    assert_equal(batches(loader, 3, kill), expected)
    assert 1 <= loader.restarts.count <= 4
    assert not loader.restarts.deadly
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_start_method_does_not_matter(shards: list[str], start_method: str) -> None:
    loader = make(shards, start_method)

    def kill(number: int) -> None:
        if number == 5:
            os.kill(pids(loader)[1], signal.SIGKILL)

    assert_equal(batches(loader, 1, kill), batches(make(shards, num_workers=0), 1))
    assert loader.restarts.count == 1
    loader.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_batches_whose_worker_is_gone_before_they_are_received_are_built_again(shards: list[str]) -> None:
    loader = make(shards, start_method="fork")

    def kill(number: int) -> None:
        if number == 0:
            time.sleep(0.5)  # both workers have sent all that they may build ahead
            for pid in pids(loader):
                Path(f"/dev/shm/torch_{pid}_1234_0").touch()  # as if it had been about to remove the name of new memory
                os.kill(pid, signal.SIGKILL)

    assert_equal(batches(loader, 1, kill), batches(make(shards, num_workers=0), 1))
    assert loader.restarts.count == 1
    loader.close()


def test_locks_that_a_dead_worker_holds_do_not_matter(shards: list[str]) -> None:
    loader = make(shards, start_method="fork")

    def kill(number: int) -> None:
        if number == 4:
            torchs: Any = loader._stream._iterator  # type: ignore[union-attr]
            assert torchs._worker_result_queue._wlock.acquire(timeout=5)  # nobody releases them any more
            assert torchs._workers_done_event._cond.acquire(timeout=5)
            os.kill(pids(loader)[0], signal.SIGKILL)

    assert_equal(batches(loader, 1, kill), batches(make(shards, num_workers=0), 1))
    assert loader.restarts.count == 1
    loader.close()


def test_an_incomplete_message_of_a_dead_worker_is_not_waited_for(shards: list[str]) -> None:
    loader = make(shards, start_method="fork", num_workers=1)

    def kill(number: int) -> None:
        if number == 4:
            time.sleep(0.3)
            torchs: Any = loader._stream._iterator  # type: ignore[union-attr]
            for pid in pids(loader):
                os.kill(pid, signal.SIGKILL)
            os.write(torchs._worker_result_queue._writer.fileno(), b"\0\1\0\0" + b"the beginning of 64 KiB")

    assert_equal(batches(loader, 1, kill), batches(make(shards, num_workers=0), 1))
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("message", [b"", b"\0\1\0\0beginning"])
@pytest.mark.parametrize("holds_lock", [False, True])
def test_workers_die_while_a_thread_page_locks_batches(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, message: bytes, holds_lock: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    pinned: list[int] = []
    monkeypatch.setattr(Batch, "pin_memory", lambda self: pinned.append(len(self.valid)) or self)
    monkeypatch.setattr("threading.excepthook", lambda told: None)
    loader = make(shards, start_method="fork")
    loader._loading["pin_memory"] = True
    threads: list[Any] = []

    def kill(number: int) -> None:
        if number == 4:
            torchs: Any = loader._stream._iterator  # type: ignore[union-attr]
            threads.append(torchs._pin_memory_thread)
            time.sleep(0.3)
            if holds_lock:
                assert torchs._worker_result_queue._wlock.acquire(timeout=5)
            for pid in pids(loader):
                os.kill(pid, signal.SIGKILL)
            if message:
                os.write(torchs._worker_result_queue._writer.fileno(), message)

    assert_equal(batches(loader, 1, kill), batches(make(shards, num_workers=0), 1))
    assert loader.restarts.count == 1
    assert not any(thread.is_alive() for thread in threads)
    assert pinned  # by dtrain, as ``valid`` has to be, and not field by field by torch
    loader.close()


@pytest.mark.slow
def test_restarts_leave_no_descriptor_open(shards: list[str]) -> None:
    loader = make(shards, start_method="fork", augment=None)

    def kill(number: int) -> None:
        if number % 6 == 1:
            os.kill(pids(loader)[0], signal.SIGKILL)

    batches(loader, 1, kill)
    loader.close()
    time.sleep(0.2)
    before = descriptors()
    batches(loader, 2, kill)
    loader.close()
    assert descriptors(before) <= before


def test_a_resumed_epoch_with_a_different_batch_size_continues_where_a_worker_died(shards: list[str]) -> None:
    before = make(shards, num_workers=0, global_batch_size=12)
    iterator = before.epoch(1)
    for _ in range(before.micro_batches_per_step):
        next(iterator)
    before.commit()

    def rest(loader: ShardLoader, kill: bool) -> list[Batch]:
        loader.load_state_dict(before.state_dict())
        found = []
        for number, batch in enumerate(loader.epoch(1)):
            found.append(batch)
            if kill and number in (2, 5):
                os.kill(pids(loader)[number % 2], signal.SIGSEGV)
        loader.close()
        return found

    loader = make(shards, start_method="fork")
    assert_equal(rest(loader, True), rest(make(shards, num_workers=0), False))
    assert loader.restarts.count


# -- samples that kill workers


def segfault(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["label"] == 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return enlarged(sample, rng)


class Segfaulting:
    """A dataset that crashes the process that reads sample 20."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 20 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"x": np.full(3, number, np.float32), "n": number}


def with_bad(folder: Path, number: int) -> list[str]:
    """The same shards, in which an image cannot be decoded."""
    paths, first = [], 0
    for shard, count in enumerate(COUNTS):
        members = [
            (f"sample{n:05d}", {"jpg": b"bad" if n == number else jpeg(n), "cls": str(n).encode()})
            for n in range(first, first + count)
        ]
        paths.append(write_tar(folder / f"shard-{shard:03d}.tar", members))
        first += count
    return paths


def test_a_sample_that_kills_two_workers_is_masked_as_if_it_were_bad(
    shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(shards, start_method="fork", augment=segfault, max_restarts=3)
    with caplog.at_level(logging.WARNING, "dtrain"):
        ours = batches(loader, 2)
    loader.close()
    key = "shard-002.tar/sample00020"
    assert_equal(ours, batches(make(with_bad(tmp_path, 20), num_workers=0), 2))
    first, second = caplog.messages
    assert_refused(
        first, "loader worker ", "SIGSEGV", "PYTHONFAULTHANDLER", "restart 1", "data.max_worker_restarts=3", key
    )
    assert_refused(second, key, "restart 2", "masked")
    assert loader.restarts.count == 2
    bad = [record for batch in ours for record in batch.bad]
    assert [(record["key"], record["epoch"]) for record in bad] == [(key, 0), (key, 1)]
    assert {record["reason"] for record in bad} == {"a loader worker was killed by SIGSEGV while reading it, twice"}
    assert loader.bad_samples == 2


def test_a_resumed_loader_masks_it_with_any_ranks_and_workers(shards: list[str], tmp_path: Path) -> None:
    reason = "a loader worker was killed by SIGSEGV while reading it, twice"
    oracle = batches(make(with_bad(tmp_path, 20), num_workers=0, rank=1, world_size=2), 1)
    key = "shard-002.tar/sample00020"
    ranks = [make(shards, num_workers=n, augment=segfault if n else enlarged, rank=1, world_size=2) for n in (0, 2)]
    for loader in ranks:
        loader.mask({key: reason, "no such sample": reason})
        assert_equal(batches(loader, 1), oracle)
        assert not loader.restarts.count
        loader.close()


def test_a_map_style_dataset_that_kills_workers_loses_that_sample() -> None:
    fields = {"x": {"name": "x", "role": "feature"}, "n": {"name": "n"}}
    options: dict[str, Any] = {"global_batch_size": 8, "seed": 3, "limits": NO_LIMIT}
    workers = WorkerOptions(start_method="fork")
    loader = ShardLoader.over(Segfaulting(), fields, num_workers=2, workers=workers, **options)
    plain = ShardLoader.over(Segfaulting(), fields, num_workers=0, **options)
    plain.mask({"Segfaulting/20": "bad"})
    assert_equal(batches(loader, 2), batches(plain, 2))
    assert loader.restarts.count == 2
    loader.close()


@pytest.mark.slow
def test_a_sample_of_a_mixture_is_named_with_its_source(shards: list[str], tmp_path: Path) -> None:
    def mixture(of: list[str], **options: Any) -> list[Batch]:
        sources = Mixture({"a": of[0], "b": of[2]}, {"a": 1, "b": 2})
        loader = make(sources, start_method="fork", **options)  # type: ignore[arg-type]
        found = batches(loader, 2)
        counts.append(loader.restarts.count)
        loader.close()
        return found

    counts: list[int] = []
    ours = mixture(shards, augment=segfault)
    assert_equal(ours, mixture(with_bad(tmp_path, 20), num_workers=0))
    assert counts == [2, 0]
    assert {record["key"] for batch in ours for record in batch.bad} == {"b/shard-002.tar/sample00020"}


@pytest.mark.slow
def test_a_partner_of_mixup_that_kills_workers_is_masked_too(shards: list[str], tmp_path: Path) -> None:
    loader = make(shards, start_method="fork", augment=segfault, mix=Mix(48, mixup_alpha=0.4))
    plain = make(with_bad(tmp_path, 20), num_workers=0, mix=Mix(48, mixup_alpha=0.4))
    assert_equal(batches(loader, 2), batches(plain, 2))
    assert loader.restarts.count == 2
    loader.close()


# -- the end of the restarts


@pytest.mark.parametrize("limit", [0, 2])
def test_more_deaths_than_allowed_end_the_loader(shards: list[str], limit: int) -> None:
    loader = make(shards, start_method="fork", max_restarts=limit)
    names = ["data.max_worker_restarts", f"{limit} times"] if limit else []
    iterator = iter(loader)
    for _ in range(limit):
        next(iterator)
        os.kill(pids(loader)[0], signal.SIGKILL)
        while loader.restarts.count == _:
            next(iterator)
    (killed, _) = pids(loader)
    os.kill(killed, signal.SIGKILL)
    with refused(WorkerEnded, f"loader worker 0 (process {killed})", "SIGKILL", "memory", "data.num_workers", *names):
        while True:
            next(iterator)


def test_a_worker_that_exits_ends_the_loader(shards: list[str]) -> None:
    loader = make(shards, start_method="fork", augment=leaving)
    with refused(WorkerEnded, "loader worker", "exit code 3", "output is above"):
        list(loader)
    assert not loader.restarts.count


def leaving(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    os._exit(3)


class Numbers(torch.utils.data.IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(64):
            if number == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"n": number}


def test_a_stream_cannot_be_read_again_so_the_death_of_its_worker_ends_it() -> None:
    workers = WorkerOptions(start_method="fork")
    options: dict[str, Any] = {"global_batch_size": 4, "shuffle": "none", "num_workers": 2, "workers": workers}
    loader = StreamLoader(Stream(Numbers(), 64), {"n": {"name": "n", "role": "id"}}, **options)
    with refused(WorkerEnded, "loader worker", "SIGKILL", "memory"):
        list(loader)


def test_a_negative_limit_is_refused() -> None:
    with refused(ValueError, "data.max_worker_restarts", "-1", "0 or more"):
        WorkerOptions(max_restarts=-1)


def test_several_workers_that_end_at_once_are_one_restart(caplog: pytest.LogCaptureFixture) -> None:
    restarts = WorkerRestarts(1, SampleIndex("set", 10))
    ended = [SimpleNamespace(pid=7, exitcode=-signal.SIGKILL), SimpleNamespace(pid=8, exitcode=-signal.SIGKILL)]
    with caplog.at_level(logging.WARNING, "dtrain"):
        restarts.begin(ended, [(0, 5), (0, -1)])
    (told,) = caplog.messages
    assert (restarts.count, restarts.take_new(), restarts.take_new()) == (1, 1, 0)
    assert_refused(told, "process 7", "sample set/5", "restart 1")
    with refused(WorkerEnded, "process 7", "1 times"):
        restarts.begin(ended, [(0, 5), (0, -1)])


def test_a_worker_that_ended_is_explained_by_its_signal_or_code() -> None:
    ended = {
        -signal.SIGBUS: ("SIGBUS", "/dev/shm"),
        -signal.SIGSEGV: ("SIGSEGV", "PYTHONFAULTHANDLER"),
        3: ("code 3", ""),
    }
    for code, (got, remedy) in ended.items():
        workers = [SimpleNamespace(pid=7, exitcode=None), SimpleNamespace(pid=8, exitcode=code)]
        assert_refused(explain_ended(workers), "loader worker 1 (process 8)", got, remedy)
    assert explain_ended([SimpleNamespace(pid=7, exitcode=None)]) == ""


# -- whole runs


def killed_once(sample: dict[str, Any], rng: np.random.Generator, folder: str) -> dict[str, Any]:
    """Kills the first worker of each rank that augments after the first 60 samples."""
    global _augmented
    _augmented += 1
    parent = multiprocessing.parent_process()
    if parent is not None and _augmented > 60:
        with suppress(FileExistsError):
            (Path(folder) / f"killed-{os.getppid()}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return sample


_augmented = 0


def segfault_at(sample: dict[str, Any], rng: np.random.Generator, pixels: float) -> dict[str, Any]:
    """Crashes at the sample whose pixels have this sum."""
    if float(sample["image"].sum()) == pixels and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sample


def augment(name: str, **arguments: Any) -> str:
    given = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"data.augment={{_target_: {__name__}.{name}, _partial_: true{given}}}"


SHORT = (
    "train.max_steps=8",
    "train.eval_every=0",
    "checkpoint.every_steps=4",
    "data.start_method=fork",
    "data.prefetch=1",
)


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_a_run_whose_workers_are_killed_has_the_losses_of_one_without_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_on(2, tmp_path / "plain", *SHORT)
    train_on(2, tmp_path / "killed", *SHORT, "data.num_workers=2", augment("killed_once", folder=tmp_path))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "plain")
    assert metrics(tmp_path / "killed", "data/worker_restarts")[-1] == len(list(tmp_path.glob("killed-*"))) == 2
    shown = capfd.readouterr().err
    assert_refused(shown, "dtrain: WARNING: loader worker", "SIGKILL", "restart 1 of data.max_worker_restarts=3")
    for rank in range(2):
        assert "was killed by SIGKILL" in (tmp_path / "killed" / "logs" / f"rank-{rank:05d}.log").read_text()


def a_sample_of(digits: Path, keys: list[str]) -> tuple[str, int]:
    """One of these samples, whose pixels have a sum as no others, and this sum."""
    sums = {}
    for path in sorted(digits.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".png"):
                    picture = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")  # type: ignore[union-attr]
                    sums[f"{path.name}/{member.name.removesuffix('.png')}"] = int(np.array(picture).sum())
    same = Counter(sums.values())
    return next((key, sums[key]) for key in keys if same[sums[key]] == 1)


@pytest.mark.slow
def test_a_sample_that_kills_two_workers_is_masked_for_the_rest_of_the_run_on_any_ranks(
    digits: Path, tmp_path: Path
) -> None:
    ending, longer = ("train.max_steps=6", "checkpoint.every_steps=4"), ("train.max_steps=46", "data.start_method=fork")
    train_on(1, tmp_path / "plain", *ending, "data.record_keys=true", "train.eval_every=0")
    steps = [json.loads(line) for line in (tmp_path / "plain/logs/keys-rank-00000.jsonl").read_text().splitlines()]
    key, pixels = a_sample_of(digits, steps[4]["keys"])
    (tmp_path / "listed.txt").write_text(key)

    deadly = ("train.eval_every=0", "data.num_workers=2", augment("segfault_at", pixels=pixels))
    excluded = ("train.eval_every=0", f"data.exclude={tmp_path / 'listed.txt'}", augment("segfault_at", pixels=-1))
    for name, options in (("deadly", deadly), ("excluded", excluded)):
        train_on(1, tmp_path / name, *ending, "data.start_method=fork", *options)
        train_on(2, tmp_path / name, *longer, *options)
    assert metrics(tmp_path / "deadly") == metrics(tmp_path / "excluded")
    assert metrics(tmp_path / "deadly", "data/bad_samples")[-1] == 2
    assert metrics(tmp_path / "deadly", "data/worker_restarts")[-1] == 2  # all of them in the first start
    lines = [path.read_text() for path in (tmp_path / "deadly" / "logs").glob("bad-rank-*.jsonl")]
    records = [json.loads(line) for line in "".join(lines).splitlines()]
    assert sorted((record["step"] > 5, record["epoch"], record["key"]) for record in records) == [
        (False, 0, key),
        (True, 1, key),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_fifty_kills_at_random_moments_change_no_bit(shards: list[str], num_workers: int) -> None:
    epochs, rng = 15 * num_workers, np.random.default_rng(num_workers)
    loader = make(shards, num_workers=num_workers, start_method="fork")
    apart = 2 * num_workers + 1

    def kill(number: int) -> None:
        if number % apart == 0 and number // apart < 50:
            time.sleep(rng.uniform(0, 0.02))
            os.kill(int(rng.choice(pids(loader))), rng.choice([signal.SIGKILL, signal.SIGSEGV]))

    found = batches(loader, epochs, kill)
    loader.close()
    assert len(found) > 50 * apart
    assert_equal(found, batches(make(shards, num_workers=0), epochs))
    # The death of a worker whose batches were all sent may be noticed only with the next one.
    assert 25 < loader.restarts.count <= 50
    print(f"{num_workers} workers: {loader.restarts.count} restarts")
