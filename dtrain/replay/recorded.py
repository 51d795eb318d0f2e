"""The records of a run that replay and trace read: starts, segments, votes, bad samples and metrics.

Each is read once, from a directory in which the run may be training.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.errors import ConfigError, as_config_error
from dtrain.files import parse_yaml, read_bounded
from dtrain.runs.records import read_records
from dtrain.runs.run_dir import bounded_lines, plain_files, status_or_none
from dtrain.runs.starts import Start, read_starts, read_votes, segments_of
from dtrain.training.checkpoint.checkpoints import BadCheckpoint, Checkpoints

NO_STARTS = (
    "this run has no starts.jsonl, because an earlier version of dtrain made it: only its last start is known, from the "
    "oldest checkpoint of that start on"
)


@dataclass(frozen=True)
class RecordedRun:
    """A run directory.

    Attributes:
        dir: The directory.
        starts: Its starts; of a run of an earlier version one, the last, without config and segment.
        votes: ``steps.bin``, see ``dtrain.runs.starts.read_votes``.
        checkpoints: Its checkpoints.
        saved: The state of its newest checkpoint that can be read; {} without one.
        unusable: Steps of checkpoints that turned out to be broken or deleted.
    """

    dir: Path
    starts: Sequence[Start]
    votes: np.ndarray
    checkpoints: Checkpoints
    saved: dict[str, Any]
    unusable: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, run_dir: Path) -> RecordedRun:
        """Reads a run directory.

        Raises:
            ConfigError: If it has no run.
        """
        if not (run_dir / "overrides.yaml").exists():
            raise ConfigError(
                f"run.dir: {run_dir} is not a run directory (it has no overrides.yaml). Name that of a run."
            )
        checkpoints = Checkpoints(run_dir / "checkpoints")
        saved: dict[str, Any] = {}
        for step in reversed(checkpoints.steps()):
            with suppress(BadCheckpoint):
                saved = checkpoints.load(step).state
                break
        starts = read_starts(run_dir) or [_last_start(run_dir, checkpoints, saved)]
        return cls(run_dir, starts, read_votes(run_dir), checkpoints, saved)

    @property
    def last_step(self) -> int:
        """The last step that the records say was done."""
        votes = self.votes["step"][-1] if len(self.votes) else 0
        status = (status_or_none(self.dir) or {}).get("step", 0)
        return int(max(votes, status, self.checkpoints.recorded() or 0, self.saved.get("step", 0)))

    @property
    def has_starts(self) -> bool:
        """False for a run of an earlier version."""
        return bool(self.starts[0].config)

    def segments(self) -> list[dict[str, Any]]:
        """The segments of the run, oldest first; [] for a run of an earlier version."""
        saved = [] if self.starts[0].fork.get("data") == "restart" else self.saved.get("segments", [])
        return segments_of(self.starts, saved)

    def bad_samples(self) -> dict[int, set[str]]:
        """Step to the keys of the samples that could not be read in it, on any rank."""
        found: defaultdict[int, set[str]] = defaultdict(set)
        for line in self._lines("bad"):
            found[line["step"]].add(line["key"])
        return dict(found)

    def masked(self) -> set[tuple[int, str]]:
        """Epoch (of the source) and key of every sample that could not be read."""
        return {(line["epoch"], line["key"]) for line in self._lines("bad") if "epoch" in line}

    def windows(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Of each record of metrics.jsonl about steps: the step before its first, its last step, and the record."""
        before = 0
        for record in read_records(self.dir / "metrics.jsonl"):
            if "train/loss" in record or "precision/skipped_steps" in record:
                yield before, int(record["step"]), dict(record)
                before = int(record["step"])

    def _lines(self, kind: str) -> Iterator[dict[str, Any]]:
        for path in plain_files(self.dir / "logs", f"{kind}-rank-*.jsonl", []):
            with path.open("rb") as file:
                for text in bounded_lines(file):
                    with suppress(ValueError, RecursionError):
                        line = json.loads(text)
                        if isinstance(line, dict) and isinstance(line.get("step"), int) and "key" in line:
                            yield line


def _last_start(run_dir: Path, checkpoints: Checkpoints, saved: Mapping[str, Any]) -> Start:
    """What the checkpoints and ``overrides.yaml`` say about the last start of a run without ``starts.jsonl``."""
    environment, restarts = saved.get("environment", {}), saved.get("progress", {}).get("restarts", 0)
    first = 0
    # Several starts may have the same number of restarts: extending a finished run is none.
    states = [checkpoints.load(step).state for step in checkpoints.steps()]
    if not all(_is_of_one_start(state, saved) for state in states):
        same = itertools.takewhile(lambda state: _is_of_one_start(state, saved), reversed(states))
        first = min((state["step"] for state in same), default=saved["step"])
    elif restarts:
        first = states[0]["step"]
    with as_config_error(f"run.dir: {run_dir / 'overrides.yaml'} cannot be read"):
        command = parse_yaml(read_bounded(run_dir / "overrides.yaml"))
    return Start(
        step=first,
        time=0.0,
        overrides=command["overrides"],
        config_dirs=command["config_dirs"],
        config={},
        ranks=environment.get("ranks", 1),
        micro_batch=0,
        device=environment.get("device", ""),
        threads=0,
        versions=saved.get("versions", {}),
    )


def _is_of_one_start(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two checkpoints may be of one start: restarts, ranks and global batch size are the same."""

    def conditions(each: Mapping[str, Any]) -> list[Any]:
        loader = each["loader"]
        batch = loader["plan"] if "plan" in loader else loader["layouts"][-1][0]
        return [each["progress"]["restarts"], each.get("environment", {}).get("ranks"), batch]

    return conditions(state) == conditions(other)
