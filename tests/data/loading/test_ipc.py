"""Batches between processes: what is sent how, and that no slot is written again while a tensor is in it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data import Batch, ShardLoader, WorkerOptions
from dtrain.data.loading import ipc as ipc_module
from dtrain.data.loading.ipc import MAX_SLOTS, MIN_SLOT_BYTES, Slots, WorkerSlots

FORK = WorkerOptions(start_method="fork")
ROWS, WIDTH = 8, 8192  # a feature of 256 KiB


def make_loader(samples: int = 64, **options: Any) -> ShardLoader:
    values = np.arange(samples, dtype=np.float32).repeat(WIDTH).reshape(samples, WIDTH)
    fields = {"x": {"name": "x", "role": "feature"}, "n": {"name": "n", "role": "label"}}
    given = {"global_batch_size": ROWS, "num_workers": 2, "shuffle": "none", "workers": FORK, **options}
    return ShardLoader.over({"x": values, "n": np.arange(samples)}, fields, **given)


def is_whole(batch: Batch) -> bool:
    return bool((batch["x"] == batch["n"][:, None]).all())


def memory_of(batch: Batch) -> int:
    return batch["x"].untyped_storage().data_ptr()


def mapped_files() -> int:
    return sum("/dev/shm/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_batches_that_are_dropped_use_few_slots_again_and_again() -> None:
    loader = make_loader(1024)
    places = []
    for batch in loader:
        assert is_whole(batch)
        places.append(memory_of(batch))
    loader.close()
    # Of each worker: two built ahead, one being built, and one or two in the trainer.
    assert len(places) == 128
    assert len(set(places)) <= 2 * 5


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_batches_that_are_kept_stay_as_they_are_and_need_no_slot(start_method: str) -> None:
    loader = make_loader(16 * ROWS * MAX_SLOTS // 4, workers=WorkerOptions(start_method=start_method))
    kept = list(loader)
    assert len(kept) > 2 * MAX_SLOTS  # more than there are slots: the rest have memory of their own
    assert len({memory_of(batch) for batch in kept}) == len(kept)
    loader.close()
    assert all(map(is_whole, kept))
    assert sorted(int(n) for batch in kept for n in batch["n"]) == list(range(len(kept) * ROWS))


def test_any_view_keeps_its_slot() -> None:
    loader = make_loader(512)
    views = [(batch["x"][3, 100:200], int(batch["n"][3])) for batch in loader]
    columns = [(batch["x"].numpy()[0], int(batch["n"][0])) for batch in loader]
    loader.close()
    assert all((view == number).all() for view, number in views + columns)


def test_every_third_batch_kept_in_random_order() -> None:
    loader, kept = make_loader(1024), []
    random = np.random.default_rng(0)
    for place, batch in enumerate(loader):
        if place % 3 == 0:
            kept.append(batch)
        if len(kept) > 6:
            assert is_whole(kept.pop(int(random.integers(len(kept)))))
    loader.close()
    assert all(map(is_whole, kept))


@pytest.mark.slow
def test_slots_survive_epochs_and_are_unmapped_with_the_loader() -> None:
    gc.collect()  # loaders of other tests
    before = mapped_files()
    loader = make_loader()
    for _ in range(4):
        for batch in loader:
            assert is_whole(batch)
            loader.commit()
    assert mapped_files() > before
    last = batch
    del batch
    loader.close()
    del loader
    gc.collect()
    assert mapped_files() == before + 1  # that of the batch that is kept
    assert is_whole(last)
    del last
    assert mapped_files() == before


def test_a_forked_process_that_drops_a_batch_frees_no_slot_of_its_parent() -> None:
    slots, worker = a_worker()
    tensor = sent(worker, torch.ones(WIDTH))
    child = os.fork()
    if not child:
        del tensor
        os._exit(int(slots.busy.sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    del tensor
    assert not slots.busy.any()


# -- one worker's slots, in this process


def a_worker() -> tuple[Slots, WorkerSlots]:
    """The slots of one worker, as the trainer, which has to keep them, and as the worker see them."""
    slots = Slots(1)
    return slots, WorkerSlots(slots.name, slots.busy, 0)


def sent(worker: WorkerSlots, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the trainer gets it, or the tensor itself if all slots are busy."""
    message = worker.sendable(tensor)
    if message is None:
        return tensor
    function, arguments = message.__reduce__()
    arrived: torch.Tensor = function(*arguments)
    return arrived


def numbers_of(worker: WorkerSlots) -> list[int]:
    return [len(slot.memory) for slot in worker._slots]


def test_a_tensor_that_a_worker_drops_unsent_frees_its_slot() -> None:
    _slots, worker = a_worker()
    for _ in range(2 * MAX_SLOTS):
        assert worker.storage(MIN_SLOT_BYTES) is not None
    assert numbers_of(worker) == [MIN_SLOT_BYTES]


def test_a_tensor_that_a_worker_still_has_keeps_the_slot_that_the_trainer_has_dropped() -> None:
    slots, worker = a_worker()
    mine = torch.empty(0, dtype=torch.uint8).set_(worker.storage(MIN_SLOT_BYTES))
    mine.fill_(7)
    got = sent(worker, mine)
    del got
    assert not slots.busy.any()
    sent(worker, torch.zeros(MIN_SLOT_BYTES, dtype=torch.uint8))
    assert (mine == 7).all()


@pytest.mark.parametrize("dropped", [0, 1])
def test_two_views_of_one_tensor_free_the_slot_together(dropped: int) -> None:
    slots, worker = a_worker()
    both = torch.arange(2.0 * WIDTH)
    whole = torch.empty(0).set_(worker.storage(both.nbytes), 0, both.shape, (1,)).copy_(both)
    halves = [sent(worker, whole[:WIDTH]), sent(worker, whole[WIDTH:])]
    del whole, halves[dropped]
    assert slots.busy.sum() == 1
    assert torch.equal(halves[0], both[:WIDTH] if dropped else both[WIDTH:])
    del halves[0]
    assert not slots.busy.any()


def test_tensors_that_grow_replace_a_slot_of_about_their_size() -> None:
    _slots, worker = a_worker()
    for size in range(100_000, 1_000_000, 10_000):
        assert (sent(worker, torch.full((size,), size % 251, dtype=torch.uint8)) == size % 251).all()
    assert len(worker._slots) == 1


def test_small_tensors_leave_the_slots_of_large_ones() -> None:
    _slots, worker = a_worker()
    for _ in range(5):
        for nbytes in (900_000, 100_000, 880_000):
            sent(worker, torch.zeros(nbytes, dtype=torch.uint8))
    assert numbers_of(worker) == [900_000, 100_000]


def test_with_all_slots_in_use_a_free_one_of_any_size_serves() -> None:
    _slots, worker = a_worker()
    kept = [sent(worker, torch.full((100_000 * 3 ** (n % 2),), n, dtype=torch.uint8)) for n in range(MAX_SLOTS)]
    assert worker.storage(100_000) is None
    del kept[0]
    large = sent(worker, torch.full((10_000_000,), 77, dtype=torch.uint8))
    assert max(numbers_of(worker)) == 10_000_000
    assert (large == 77).all()
    assert all((tensor == number).all() for number, tensor in enumerate(kept, start=1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64])
def test_dtype_shape_and_strides_arrive(dtype: torch.dtype) -> None:
    _slots, worker = a_worker()
    for tensor in (torch.arange(24).view(2, 3, 4).to(dtype), torch.arange(24).view(4, 6).t().to(dtype)):
        got = sent(worker, tensor)
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert torch.equal(got, tensor)
        got[0] = 0  # it can be written to


@pytest.mark.parametrize("file_bytes", [1, 1 << 30], ids=["as files", "inline"])
def test_without_a_free_slot_batches_arrive_too(monkeypatch: pytest.MonkeyPatch, file_bytes: int) -> None:
    monkeypatch.setattr(ipc_module, "MAX_SLOTS", 0)
    monkeypatch.setattr(ipc_module, "MIN_FILE_BYTES", file_bytes)
    loader = make_loader()
    assert all(map(is_whole, loader))
    loader.close()
