"""Records of a run that replay and trace read: ``starts.jsonl``, its starts, and ``steps.bin``, the votes of its steps.

* A *start* is one line of ``starts.jsonl``: the steps done before it, its command line and composed config, ranks, device and
  versions. Together with the data it determines every step up to the next start.
* A *segment* is a range of steps with one order of samples: the step after which it begins, ranks, micro-batch, settings of
  the order and the state of the loader. Each checkpoint has the segments up to its step, each start the one that it begins.
* ``steps.bin`` has the vote of every step as seven little-endian float64: 56 bytes per step, written on rank 0.

A resumed run repeats the steps after its checkpoint, so both files are cut there when it starts.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.files import open_regular, open_to_append, replace_file

STARTS, STEPS = "starts.jsonl", "steps.bin"
#: One record of ``steps.bin``.
VOTE = np.dtype([(name, "<f8") for name in ("step", "applied", "loss_sum", "count", "grad_norm", "lr", "loss_scale")])
_MOST_LINE = 2**24  # bytes of a start; a config has some ten thousand


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        step: Steps that were done before it.
        time: Unix time in seconds.
        overrides: The command line, without secrets.
        config_dirs: Folders given with ``--config-dir``.
        config: The composed keys that have an effect on the result.
        ranks: Number of ranks.
        micro_batch: Rows of a micro-batch of one rank.
        device: Kind of the device, of a CPU with its instruction set.
        threads: torch's threads of a rank.
        versions: Package to version.
        code: Git checkouts to commits.
        segment: The segment that begins with it.
        fork: Of the first start of a branch: ``dir``, ``step`` and ``data`` of ``run.fork``; empty otherwise.
    """

    step: int
    time: float
    overrides: Sequence[str]
    config_dirs: Sequence[str]
    config: Mapping[str, Any]
    ranks: int
    micro_batch: int
    device: str
    threads: int
    versions: Mapping[str, str]
    code: Mapping[str, str] = field(default_factory=dict)
    segment: Mapping[str, Any] = field(default_factory=dict)
    fork: Mapping[str, Any] = field(default_factory=dict)


def record_start(run_dir: Path, start: Start) -> None:
    """Appends a start, and cuts the starts after whose first step the run now continues.

    Raises:
        OSError: On a write failure; the file is unchanged.
    """
    starts = read_starts(run_dir)
    kept = [each for each in starts if each.step < start.step]
    # A fork that was resumed at its first step is still one.
    fork = next((each.fork for each in starts if each.step == start.step and each.fork), start.fork)
    start = replace(start, fork=start.fork or fork)
    with replace_file(run_dir / STARTS) as file:
        for each in (*kept, start):
            file.write(json.dumps(asdict(each), default=str).encode() + b"\n")


def read_starts(run_dir: Path) -> list[Start]:
    """The starts of a run in their order; [] without the file. Lines that are no starts are left out."""
    try:
        file = open_regular(run_dir / STARTS)
    except FileNotFoundError:
        return []
    known = {each.name for each in fields(Start)}
    starts: list[Start] = []
    with file:
        while line := file.readline(_MOST_LINE):
            try:
                start = Start(**{key: value for key, value in json.loads(line).items() if key in known})
                if _is_whole(start):
                    starts.append(start)
            except (ValueError, TypeError, AttributeError, RecursionError):
                continue
    return starts


def _is_whole(start: Start) -> bool:
    """Whether all values have their types; the file may have been edited."""
    numbers = (start.step >= 0, start.ranks >= 1, start.micro_batch >= 0, start.threads >= 0)
    texts = (*start.overrides, *start.config_dirs, start.device)
    mappings = (start.config, start.versions, start.code, start.segment, start.fork)
    lists = isinstance(start.overrides, list) and isinstance(start.config_dirs, list)
    return (
        lists
        and all(numbers)
        and all(isinstance(it, str) for it in texts)
        and all(isinstance(it, dict) for it in mappings)
    )


class StepLog:
    """Appends the votes of steps to ``steps.bin``.

    Args:
        run_dir: The run's directory.
        step: Votes of later steps are cut, because the run repeats these steps.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._file = open_to_append(run_dir / STEPS)
        self._size = len(read_votes(run_dir, last=step)) * VOTE.itemsize
        os.ftruncate(self._file.fileno(), self._size)
        self._pending = array("d")

    def add(self, *vote: float) -> None:
        """Keeps a vote, in the order of ``VOTE``, until ``write``."""
        self._pending.extend(vote)

    def write(self) -> None:
        """Writes the votes that are kept.

        Raises:
            OSError: On a write failure. The file has whole votes only, and the next call writes the missing ones.
        """
        if not self._pending:
            return
        data, descriptor = np.asarray(self._pending, "<f8").tobytes(), self._file.fileno()
        try:
            written = 0
            while written < len(data):  # not through a buffer, which would keep what could not be written
                written += os.write(descriptor, data[written:])
        except OSError:
            os.ftruncate(descriptor, self._size)
            raise
        self._size += len(data)
        self._pending = array("d")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_votes(run_dir: Path, last: int | None = None) -> np.ndarray:
    """The votes of a run's steps, ascending: ``VOTE``, shape ``[steps]``; none without the file.

    Args:
        run_dir: The run's directory.
        last: Leaves out later steps; None: all steps.
    """
    try:
        with open_regular(run_dir / STEPS) as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    votes = np.frombuffer(data[: len(data) // VOTE.itemsize * VOTE.itemsize], VOTE)
    steps = votes["step"]
    # A power failure may leave zeros or the steps of an earlier start: what follows them is not used.
    whole = np.diff(steps, prepend=0) > 0
    end = len(votes) if whole.all() else int(np.argmin(whole))
    return votes[:end] if last is None else votes[:end][steps[:end] <= last]


def segments_of(starts: Sequence[Start], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All segments of a run: those of a checkpoint, and of the starts since then.

    Args:
        starts: The starts of the run.
        saved: The segments of its newest checkpoint.
    """
    own = [start.segment for start in starts if start.segment]
    first = own[0]["step"] if own else float("inf")
    return [dict(each) for each in (*(one for one in saved if one["step"] < first), *own)]


def start_of(starts: Sequence[Start], step: int) -> int:
    """The number of the start that made a step; -1 if none of these did."""
    return max((number for number, start in enumerate(starts) if start.step < step), default=-1)
