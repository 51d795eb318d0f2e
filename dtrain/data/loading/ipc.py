"""Batches on their way from a worker process to the trainer.

* A small tensor is sent *inline*: as bytes in the message.
* A large one lies in a *slot*: shared memory that a worker creates, sends once and uses again. To create, map and fault in
  the pages of new shared memory for each batch takes several times as long as to write the batch.
* A slot is *busy* from the moment its tensor is sent until the trainer has dropped the last tensor in its memory. So a batch
  that is kept does not change. A worker never waits for a slot: it creates a new one.
* With ``MAX_SLOTS`` of them, all busy, it sends the tensor inline or as a *file*: in its own shared memory, as torch does.
* A worker also notes in shared memory which sample it *reads*, so that the trainer knows it if the worker dies.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.fields.field import DataError
from dtrain.data.loading.batch import Batch
from dtrain.errors import Explained

#: Tensors of fewer bytes are sent inline, which costs them about as much as a slot.
MIN_SLOT_BYTES = 1 << 16
#: Without a free slot, tensors of fewer bytes are sent inline, which costs no more than a file, and the number of open
#: files is limited.
MIN_FILE_BYTES = 1 << 19
#: Slots of a worker. Batches that it has built ahead need ``prefetch`` of them for each large field; batches in use need a few
#: more.
MAX_SLOTS = 32
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


class IpcBatch:
    """A batch in the form in which a worker sends it; it is unpickled in another process as a ``ReceivedBatch``.

    Raises:
        SharedMemoryFull: If there is no space for a large tensor.
        DataError: If a value of a field cannot be pickled; names the field.
    """

    def __init__(self, batch: Batch) -> None:
        columns = {name: _to_ipc(column) if isinstance(column, Tensor) else column for name, column in batch.items()}
        rest = batch.rows.without_index(), _to_ipc(batch.valid), batch.bad
        # Not left to the thread of the queue: that would print an error and lose the batch, for which the trainer would
        # then wait for ever.
        with _full_memory_named():
            try:
                self._pickled = bytes(ForkingPickler.dumps((columns, *rest)))
            except _NOT_PICKLABLE as error:
                raise _not_picklable(columns, error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._pickled,)


class ReceivedBatch:
    """A batch in the trainer. It is no mapping: of a mapping, torch 2.9 page-locks the fields and not ``valid``."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def pin_memory(self) -> ReceivedBatch:
        """The batch in page-locked memory; torch's thread calls it."""
        return ReceivedBatch(self.batch.pin_memory())


class LostBatch:
    """A batch whose shared memory cannot be opened, because its worker ended before the trainer had received it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def pin_memory(self) -> LostBatch:
        """Itself; torch's thread calls it."""
        return self


def _unpickled(pickled: bytes) -> ReceivedBatch | LostBatch:
    try:
        return ReceivedBatch(Batch(*pickle.loads(pickled)))
    except (
        ConnectionError,
        FileNotFoundError,
        EOFError,
    ) as error:  # the worker passes the descriptor of its memory on request
        return LostBatch(error)


def _not_picklable(columns: Mapping[str, Any], error: Exception) -> DataError:
    for name, column in columns.items():
        try:
            ForkingPickler.dumps(column)
        except _NOT_PICKLABLE:
            return DataError(
                f"field {name!r}: a worker process cannot send its values, because they cannot be pickled: {error}. Return "
                "tensors, arrays, numbers, text or bytes, or set data.num_workers=0."
            )
    return DataError(f"a worker process cannot send a batch, because it cannot be pickled: {error}.")


class _Inline:
    """A small tensor that is pickled as bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, because numpy does not have every dtype of torch.
        return _from_bytes, (self._tensor.flatten().view(torch.uint8).numpy(), self._tensor.dtype, self._tensor.shape)


def _from_bytes(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _to_ipc(tensor: Tensor) -> Any:
    if _own_slots is not None and tensor.nbytes >= MIN_SLOT_BYTES:
        in_slot = _own_slots.sendable(tensor)
        if in_slot is not None:
            return in_slot
    return tensor if tensor.nbytes >= MIN_FILE_BYTES else _Inline(tensor)


# -- slots


class Slots:
    """The slots of all workers of a stream, as the trainer sees them. Picklable, for the workers.

    Args:
        workers: Number of workers.

    Attributes:
        busy: Which slots are in use, uint8, shape ``[workers, MAX_SLOTS]``.
        reads: What each worker reads, or was reading when it ended, int64, shape ``[workers, 2]``: epoch (of the source), and
            number of the sample, -1 between samples.

    Raises:
        SharedMemoryFull: If there is no space for one byte per slot.
    """

    def __init__(self, workers: int) -> None:
        self.name = uuid.uuid4().hex
        with _full_memory_named():
            self._shared = torch.zeros(workers, MAX_SLOTS, dtype=torch.uint8).share_memory_()
            self._reads = torch.full((workers, 2), -1, dtype=torch.int64).share_memory_()
        self.busy, self.reads = self._shared.numpy(), self._reads.numpy()
        self._memory: dict[tuple[int, int], np.ndarray] = {}
        self._leases: dict[tuple[int, int], Callable[[], np.ndarray | None]] = {}
        _of_streams[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfWorker, (self.name, self._shared, self._reads)

    def tensor(self, worker: int, slot: int, new: torch.UntypedStorage | None, *layout: Any) -> Tensor:
        """A tensor in a slot, which is free again when this tensor and all others in the same memory are dropped.

        Args:
            worker: Number of the worker.
            slot: Number of its slot.
            new: The memory of the slot if it is sent for the first time, or replaced.
            layout: Offset, dtype, shape and strides of the tensor.
        """
        place = worker, slot
        if new is not None:
            self._memory[place] = _bytes_of(new)
        lease = self._leases[place]() if place in self._leases else None  # alive: two tensors in one slot
        if lease is None:
            lease = self._memory[place][:]
            self._leases[place] = weakref.ref(lease, functools.partial(_free, self.busy, place, os.getpid()))
        return _tensor_in(torch.from_numpy(lease).untyped_storage(), *layout)


_of_streams: weakref.WeakValueDictionary[str, Slots] = weakref.WeakValueDictionary()


def _free(busy: np.ndarray, place: tuple[int, int], owner: int, _: Any) -> None:
    if os.getpid() == owner:  # a forked process has a copy of the tensor
        busy[place] = 0


def _from_slot(name: str, *arguments: Any) -> Tensor:
    return _of_streams[name].tensor(*arguments)


class _OfWorker:
    """What a worker process gets of ``Slots``."""

    def __init__(self, name: str, busy: Tensor, reads: Tensor) -> None:
        self.name = name
        self.busy = busy.numpy()
        self.reads = reads.numpy()


class _Slot:
    """A slot in the worker that writes it."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.storage = _new_shared(nbytes)
        self.memory = _bytes_of(self.storage)
        self.is_sent = False
        self._lease: Callable[[], np.ndarray | None] = lambda: None

    @property
    def is_used(self) -> bool:
        """Whether a tensor of this process is in the slot; it may never be sent."""
        return self._lease() is not None

    def lease(self, nbytes: int) -> torch.UntypedStorage:
        """The memory for a tensor, which uses the slot as long as it exists."""
        lease = self.memory[:nbytes]
        self._lease = weakref.ref(lease)
        return torch.from_numpy(lease).untyped_storage()


class WorkerSlots:
    """The slots of one worker, in its own process."""

    def __init__(self, name: str, busy: np.ndarray, worker: int) -> None:
        self._place = name, worker
        self._busy = busy[worker]
        self._slots: list[_Slot] = []

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """Memory for a tensor; None if all slots are busy."""
        free = [slot for slot in self._slots if not self._busy[slot.number] and not slot.is_used]
        is_room = len(self._slots) < MAX_SLOTS
        # Of about this size, so that small tensors do not use the slots of large ones, and texts may grow.
        usable = [slot for slot in free if nbytes <= 2 * len(slot.memory) <= 4 * nbytes] or ([] if is_room else free)
        if usable:
            slot = max(usable, key=lambda slot: (len(slot.memory) >= nbytes, -len(slot.memory)))
            if len(slot.memory) < nbytes:
                slot = self._slots[slot.number] = _Slot(slot.number, nbytes)
        elif is_room:
            slot = _Slot(len(self._slots), nbytes)
            self._slots.append(slot)
        else:
            return None
        return slot.lease(nbytes)

    def sendable(self, tensor: Tensor) -> _InSlot | None:
        """A tensor in the form in which it is sent, copied to a slot unless it is in one; None if all slots are busy."""
        slot = self._slot_of(tensor)
        if slot is None:
            storage = self.storage(tensor.nbytes)
            if storage is None:
                return None
            tensor = _tensor_in(storage, 0, tensor.dtype, tensor.shape, _strides(tensor.shape)).copy_(tensor)
            slot = self._slot_of(tensor)
            assert slot is not None
        return _InSlot(self._place, slot, tensor, self._busy)

    def _slot_of(self, tensor: Tensor) -> _Slot | None:
        pointer = tensor.untyped_storage().data_ptr()
        return next((slot for slot in self._slots if slot.storage.data_ptr() == pointer and slot.is_used), None)


class _InSlot:
    """The pickled form of a tensor in a slot."""

    def __init__(self, place: tuple[str, int], slot: _Slot, tensor: Tensor, busy: np.ndarray) -> None:
        self._place = place
        self._slot = slot
        self._tensor = tensor
        self._busy = busy

    def __reduce__(self) -> tuple[Any, ...]:
        slot, tensor = self._slot, self._tensor
        self._busy[slot.number] = 1
        new, slot.is_sent = None if slot.is_sent else slot.storage, True
        layout = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
        return _from_slot, (*self._place, slot.number, new, *layout)


_own_slots: WorkerSlots | None = None
_own_reads: memoryview | None = None


def use_slots(slots: _OfWorker | Slots, worker: int) -> None:
    """Called in worker number ``worker``: its large tensors are sent in slots from now on."""
    global _own_slots, _own_reads
    _own_slots = WorkerSlots(slots.name, slots.busy, worker)
    _own_reads = slots.reads[worker].data


def own_reads() -> memoryview | None:
    """In a worker: its row of ``Slots.reads``, in which it notes what it reads. None in other processes."""
    return _own_reads


# -- shared memory


class SharedMemoryFull(Explained):
    """There is no space in /dev/shm for a batch of a worker."""


def worker_storage(nbytes: int) -> torch.UntypedStorage:
    """Memory for a tensor of a worker, from which it can be sent without a copy if it is large.

    Raises:
        SharedMemoryFull: If there is no space for it.
    """
    if _own_slots is not None and nbytes >= MIN_SLOT_BYTES:
        storage = _own_slots.storage(nbytes)
        if storage is not None:
            return storage
    return _new_shared(nbytes) if nbytes >= MIN_FILE_BYTES else torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def shared_memory_is_full() -> str:
    """The message for a worker that found no space in /dev/shm."""
    is_there = os.path.isdir("/dev/shm")  # only on Linux
    total, _, free = shutil.disk_usage("/dev/shm") if is_there else (0, 0, 0)
    size = f": {free / 1e6:,.0f} MB of {total / 1e6:,.0f} MB are free" if is_there else ""
    return (
        f"/dev/shm, through which worker processes send batches, is full{size}. Start the container with a larger one "
        "(docker: --shm-size=8g, or --ipc=host), or use fewer data.num_workers, a smaller data.prefetch or "
        "train.micro_batch_size, or data.num_workers=0."
    )


def _new_shared(nbytes: int) -> torch.UntypedStorage:
    with _full_memory_named():
        # As torch's default_collate in a worker. There is no public way to do this.
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(nbytes)
        return storage


@contextmanager
def _full_memory_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise SharedMemoryFull(shared_memory_is_full()) from error


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()


def _tensor_in(
    storage: torch.UntypedStorage, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
