"""Replays and traces for tests: the entry points themselves, on forked ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dtrain.replay import __main__ as replay
from dtrain.replay import trace
from tests.ranks import run_ranks


def replay_on(ranks: int, run_dir: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON file of ``dtrain replay`` on forked ranks, all of which end with ``code``."""
    out = run_dir.parent / f"{run_dir.name}-replay.json"

    def rank(number: int) -> int:
        return replay.main([f"run.dir={run_dir}", *arguments, "--json", str(out)])

    assert run_ranks(ranks, rank, init=False, timeout=250) == [code] * ranks
    content = json.loads(out.read_text())
    assert isinstance(content, dict)
    return content


def traced(run_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """The uses that ``dtrain trace`` finds, in this process."""
    out = run_dir.parent / f"{run_dir.name}-trace.json"
    assert trace.main([f"run.dir={run_dir}", *arguments, "--json", str(out)]) == 0
    uses = json.loads(out.read_text())["uses"]
    assert isinstance(uses, list)
    return uses


def logged(run_dir: Path) -> Counter[tuple[str, int, int]]:
    """Key, step and rank of every use that ``data.record_keys`` has logged."""
    found: Counter[tuple[str, int, int]] = Counter()
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        rank = int(path.stem[-5:])
        for line in map(json.loads, path.read_text().splitlines()):
            found.update((key, line["step"], rank) for key in line["keys"])
    return found


def assert_trace_is_the_log(run_dir: Path) -> int:
    """Compares ``dtrain trace`` of all shards with the log; returns the number of uses."""
    log = logged(run_dir)
    found: Counter[tuple[str, int, int]] = Counter()
    for shard in sorted({key.rpartition("/")[0] for key, _, _ in log}):
        found.update((use["key"], use["step"], use["rank"]) for use in traced(run_dir, "--shard", shard))
    assert found == log
    return len(log)
