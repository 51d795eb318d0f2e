"""Checkpoints of dtrain, ``torch.save``, ``torch.distributed.checkpoint`` and safetensors: same state, same disk.

    python -m benchmarks.save [--megabytes 200 2000 6000] [--rounds 5] [--dir FOLDER] [--json FILE]

A model whose parameters and AdamW state have this size trains; each round makes one save of each kind while it trains on.

* ``stall``: the time between two steps that the save adds.
* ``durable``: from the call until the files are synced to the disk. ``torch.save`` and safetensors do not do that by
  themselves, so here each of their files is synced; a power cut after a save without it may lose the file.
* ``a step meanwhile``: a step while the background writes. On a machine with few cores it waits for theirs.
* ``resume``: reading the newest checkpoint back into model and optimizer, from the page cache. dtrain's includes the
  comparison of all files with their hashes, which the others do not make.

A row of DCP is its ``async_save`` as documented, with staging memory that is used again (``cached``), in pinned memory,
which needs a GPU, or with a process that writes. All contenders write fp32 tensors of one process.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks import harness
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import AsyncWriter
from dtrain.training.checkpoint.optimizer_state import load_optimizer, optimizer_state
from dtrain.training.checkpoint.state import copy_into, host_copy

WIDTH = 1024


class Training:
    """Steps of an MLP whose parameters and AdamW state have ``megabytes`` together."""

    def __init__(self, megabytes: float) -> None:
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs = torch.randn(8, WIDTH)
        self.step()

    def step(self) -> None:
        """One optimizer step."""
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Saver(ABC):
    """A way to save.

    Args:
        training: What is saved.
        folder: A folder of this saver alone.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder

    @abstractmethod
    def start(self, number: int) -> None:
        """Returns when training may continue."""

    def is_writing(self) -> bool:
        """Whether the background is at work."""
        return False

    def wait(self) -> None:  # noqa: B027
        """Returns when the files are on the disk."""

    @abstractmethod
    def resume(self) -> None:
        """Restores the last checkpoint."""


class Dtrain(Saver):
    """dtrain's own functions, as its trainer calls them."""

    waits = False

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._checkpoints, self._writer = Checkpoints(folder, keep_last=1), AsyncWriter()

    def start(self, number: int) -> None:
        model, optimizer = self.training.model, self.training.optimizer
        tensors, values = optimizer_state(optimizer, model)
        groups = {"model": host_copy(model.state_dict()), "optimizer": host_copy(tensors)}
        checkpoint = Checkpoint(groups, {"optimizer": values})
        self._writer.start(number, lambda: self._checkpoints.save(number, checkpoint))
        if self.waits:
            self.wait()

    def is_writing(self) -> bool:
        return self._writer.is_writing

    def wait(self) -> None:
        self._writer.wait()

    def resume(self) -> None:
        step, _ = self._checkpoints.newest_good()
        assert step is not None
        checkpoint, model = self._checkpoints.load(step), self.training.model
        groups: Any = checkpoint.tensors  # whole tensors, not the parts of a rank
        copy_into(model, groups["model"])
        load_optimizer(self.training.optimizer, model, groups["optimizer"], checkpoint.state["optimizer"], [])


class DtrainWaits(Dtrain):
    """The same, but the loop waits for the disk, as at the end of a run."""

    waits = True


class TorchSave(Saver):
    """``torch.save`` of two ``state_dict``, and a sync."""

    def start(self, number: int) -> None:
        states = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        torch.save(states, self.folder / "state.pt")
        _sync(self.folder / "state.pt")

    def resume(self) -> None:
        states = torch.load(self.folder / "state.pt")
        self.training.model.load_state_dict(states["model"])
        self.training.optimizer.load_state_dict(states["optimizer"])


class Safetensors(Saver):
    """``safetensors.torch.save_file`` of the same tensors, and a sync."""

    def start(self, number: int) -> None:
        self.values = self.training.optimizer.state_dict()
        safetensors.torch.save_file(self._tensors(), self.folder / "state.safetensors")
        _sync(self.folder / "state.safetensors")

    def resume(self) -> None:
        tensors = safetensors.torch.load_file(self.folder / "state.safetensors")
        model, optimizer = self.training.model, self.training.optimizer
        model.load_state_dict({name: tensors[f"model/{name}"] for name in model.state_dict()})
        state = {
            number: {key: tensors[f"optimizer/{number}/{key}"] for key in one}
            for number, one in self.values["state"].items()
        }
        optimizer.load_state_dict(self.values | {"state": state})

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"model/{name}": tensor for name, tensor in self.training.model.state_dict().items()}
        for number, state in self.values["state"].items():
            found |= {f"optimizer/{number}/{key}": tensor for key, tensor in state.items()}
        return found


class DcpSave(Saver):
    """``dcp.save``, in the state that its tutorial recommends."""

    def start(self, number: int) -> None:
        dcp.save(self._state(), checkpoint_id=self._next(number), no_dist=True)

    def resume(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self._newest, no_dist=True)
        model, optimizer = self.training.model, self.training.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _next(self, number: int) -> Path:
        """The folder of a save; the one before the last is deleted, so that the disk does not fill up."""
        self._newest = self.folder / str(number)
        shutil.rmtree(self.folder / str(number - 2), ignore_errors=True)
        return self._newest


class DcpAsync(DcpSave):
    """``dcp.async_save``."""

    _future: Future[Any] | None = None

    def start(self, number: int) -> None:
        response = dcp.async_save(self._state(), checkpoint_id=self._next(number), no_dist=True, **self._options())
        self._future = response if isinstance(response, Future) else response.upload_completion
        if not isinstance(response, Future):  # before the next step changes the weights
            response.staging_completion.result()

    def is_writing(self) -> bool:
        return self._future is not None and not self._future.done()

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def _options(self) -> dict[str, Any]:
        return {}


class DcpCached(DcpAsync):
    """``async_save`` with staging memory that is used again."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._stager = self._make_stager()

    def _make_stager(self) -> Any:
        return DefaultStager(StagingOptions(False, False, False, False))

    def _options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}


class DcpPinned(DcpCached):
    """``async_save`` with pinned staging memory."""

    def _make_stager(self) -> Any:
        return DefaultStager(StagingOptions())


SAVERS: dict[str, type[Saver]] = {
    "dtrain": Dtrain,
    "dtrain, the loop waits": DtrainWaits,
    "torch.save, synced": TorchSave,
    "safetensors, synced": Safetensors,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, cached": DcpCached,
    "dcp.async_save, pinned": DcpPinned,
}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def milliseconds(function: Callable[..., object], *arguments: int) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - started) * 1e3


def measure(saver: Saver, number: int) -> dict[str, float]:
    """One save beside steps, and one resume; milliseconds."""
    gc.collect()
    step = statistics.median(milliseconds(saver.training.step) for _ in range(5))
    started = time.perf_counter()
    saver.start(number)
    stall = (time.perf_counter() - started) * 1e3
    during = []
    while saver.is_writing():
        during.append(milliseconds(saver.training.step))
    saver.wait()
    durable = (time.perf_counter() - started) * 1e3
    resume = milliseconds(saver.resume)
    return {
        "stall": stall,
        "durable": durable,
        "step": step,
        "slowed": statistics.median(during) / step if during else 1.0,
        "resume": resume,
    }


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        default=[200.0, 2000.0, 6000.0],
        help="size of the state (default 200 2000 6000)",
    )
    parser.add_argument("--only", nargs="+", choices=SAVERS, default=list(SAVERS), help="rows")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    arguments = harness.parse(parser, rounds=1, megabytes=[20.0])
    found = {}
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            found[megabytes] = _measure_all(Training(megabytes), Path(folder), arguments)
        _show(megabytes, found[megabytes], arguments.rounds)
    harness.finish(arguments, {"milliseconds": found}, ("torch", "safetensors"))


def _measure_all(training: Training, folder: Path, arguments: Any) -> dict[str, list[dict[str, float]]]:
    savers: dict[str, Saver] = {}
    for name in arguments.only:
        own = folder / SAVERS[name].__name__
        own.mkdir()
        if SAVERS[name] is not DcpPinned or torch.cuda.is_available():
            savers[name] = SAVERS[name](training, own)
    numbers = dict.fromkeys(savers, 0)

    def one(name: str) -> dict[str, float]:
        numbers[name] += 1
        return measure(savers[name], numbers[name])

    for name in savers:  # not counted: memory and modules are taken for the first time
        one(name)
    found = harness.interleaved(arguments.rounds, savers, one)
    return {name: found.get(name, []) for name in arguments.only}


def _show(megabytes: float, found: dict[str, list[dict[str, float]]], rounds: int) -> None:
    there = {name: rows for name, rows in found.items() if rows}
    table = harness.Table(f"{megabytes:,.0f} MB", found)
    for heading, name, decimals in (("stall, ms", "stall", 1), ("durable, ms", "durable", 0)):
        table.medians(heading, {row: [one[name] for one in rows] for row, rows in there.items()}, decimals)
    table.text(
        "a step meanwhile",
        {row: f"{statistics.median(one['slowed'] for one in rows):.2f}x" for row, rows in there.items()},
    )
    table.medians("resume, ms", {row: [one["resume"] for one in rows] for row, rows in there.items()})
    table.text("", {row: "needs a GPU" for row in found if row not in there})
    table.show(harness.rounds_note(rounds))


if __name__ == "__main__":
    main()
