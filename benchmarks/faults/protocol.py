"""What all contenders share: samples, model, constants, the order of ranks, and the log from which losses are counted.

A contender is a program that torchrun starts; ``folder`` is that of its run. It trains ``EPOCHS`` epochs of
``SAMPLES`` samples in steps of ``BATCH`` samples over all ranks, and saves every ``SAVE_EVERY`` steps or as its documentation
has it. Started again in the same folder, it goes on from what it saved.

Before the backward of a step, each rank logs the samples of the step. Gradients are averaged in the backward, so no rank can
finish, or save, a step that another one has not logged. Lines of a contender that end in ``# resume`` exist only for saving
and resuming; they are counted in the table.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

SAMPLES, BATCH, EPOCHS, SAVE_EVERY = 20_000, 80, 2, 20
STEPS = EPOCHS * SAMPLES // BATCH
FEATURES, SEED, RATE = 32, 7, 0.01


def resize(samples: int) -> None:
    """Sets the number of samples, in this process and in the contenders that it starts."""
    global SAMPLES, STEPS
    SAMPLES, STEPS = samples, EPOCHS * samples // BATCH
    os.environ["FAULTS_SAMPLES"] = str(samples)


resize(int(os.environ.get("FAULTS_SAMPLES", SAMPLES)))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Features, fp32, ``[SAMPLES, FEATURES]``, and targets, fp32, ``[SAMPLES]``; the number of a sample is its row."""
    generator = np.random.default_rng(SEED)
    features = generator.standard_normal((SAMPLES, FEATURES), dtype=np.float32)
    targets = np.sin(features @ generator.standard_normal(FEATURES, dtype=np.float32))
    return features, targets.astype(np.float32)


class Samples(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """The samples as a map-style dataset of ``(number, features, target)``."""

    def __init__(self) -> None:
        features, targets = arrays()
        self._features, self._targets = torch.from_numpy(features), torch.from_numpy(targets)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        return number, self._features[number], self._targets[number]


def model() -> nn.Module:
    """The model, with the same weights in every process."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0))


def optimizer(parameters: nn.Module) -> torch.optim.Optimizer:
    """The optimizer: momentum, so that a wrong state shows."""
    return torch.optim.SGD(parameters.parameters(), RATE, momentum=0.9)


def train_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, log: Log, samples: Tensor, features: Tensor, targets: Tensor
) -> None:
    """One step of a loop that a user writes."""
    loss = nn.functional.mse_loss(net(features), targets)
    log.step(samples, loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def data_folder() -> Path:
    """Where ``prepare`` of a contender stores the samples in its own format, before its runs."""
    return folder().parent / "data"


def rank() -> int:
    """This rank; with torchft, the replica group."""
    return int(os.environ.get("REPLICA_GROUP_ID", os.environ.get("RANK", 0)))


def ranks() -> int:
    """Number of ranks."""
    return int(os.environ.get("WORLD_SIZE", 1))


def folder() -> Path:
    """The folder of the run."""
    return Path(os.environ["FAULTS_FOLDER"])


class Log:
    """Writes what this rank does: ``{"from": step}``, then ``{"step": n, "samples": [...], "loss": mean}`` for each step.

    Args:
        first: The step that this start begins with; 0 for a new run.
    """

    def __init__(self, first: int = 0) -> None:
        # Each process has a file: that of a rank may be started again while the others continue.
        name = f"start-{os.environ['FAULTS_START']}-rank-{rank()}-{os.getpid()}.jsonl"
        self._file = (folder() / name).open("w", buffering=1)
        self._step = first
        print(json.dumps({"from": first}), file=self._file)

    def step(self, samples: Tensor, loss: Tensor, number: int | None = None) -> None:
        """Logs the samples of this rank and their mean loss; call it before the backward.

        Args:
            samples: Their numbers, int64, ``[samples]``.
            loss: Their mean loss.
            number: The step; None: the one after the last.
        """
        self._step = self._step if number is None else number
        line = {"step": self._step, "samples": samples.tolist(), "loss": loss.item()}
        print(json.dumps(line), file=self._file)
        self._step += 1
