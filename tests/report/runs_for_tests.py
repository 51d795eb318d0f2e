"""Makes run directories with given records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from dtrain.runs.history import History


def run_of(folder: Path, records: Iterable[dict[str, Any]], **status: Any) -> History:
    """A run with these records; ``status`` changes keys of the status of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "step": 0, "reason": None} | status))
    return History.read(folder, folder.name)


def steady(steps: int = 50, **more: Any) -> list[dict[str, Any]]:
    """Records of a healthy run: 1.25 s per step, 5 % of it waiting for data, with a falling loss."""
    return [
        {"step": step, "applied_steps": step, "samples": 64 * step, "time": 1e9 + 1.25 * step, "train/loss": 1 / step}
        | {"time/step_seconds": 1.25, "time/data_wait_fraction": 0.05, "precision/skipped_steps": 0}
        | more
        for step in range(1, steps + 1)
    ]


def point_of(
    folder: Path, overrides: dict[str, Any], results: Iterable[float | None] = (), *, best: str = "", **status: Any
) -> History:
    """A run of a sweep that evaluated every ten steps.

    Args:
        folder: Its directory.
        overrides: Dotted key to value, for the command line and the config.
        results: Values of ``eval/accuracy``.
        best: ``checkpoint.best``; empty for none.
        status: As for :func:`run_of`.
    """
    records = [{"step": 10 * (place + 1), "eval/accuracy": value} for place, value in enumerate(results)]
    run_of(folder, records, **status)
    config: dict[str, Any] = {"checkpoint": {"best": best or None, "best_mode": None}}
    for key, value in overrides.items():
        *parents, name = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [f"{key}={value}" for key, value in overrides.items()]
    (folder / "overrides.yaml").write_text(yaml.safe_dump({"overrides": command, "config_dirs": []}))
    return History.read(folder, folder.name)


def best_of(run: History) -> float:
    """The largest finite result, from the file itself."""
    values = run.series("eval/accuracy")[1].tolist()
    return max((value for value in values if value == value), default=-1.0)
