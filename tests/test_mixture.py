"""A mixture of three sources that is killed, and resumed on other ranks with another global batch size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fault_hook import faulty
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.shards import npy, stored_keys, vector, write_tar
from tests.whole_runs import records, status, train_on

SHARES = {"web": 0.7, "books": 0.2, "code": 0.1}
SIZES = {"web": 300, "books": 97, "code": 23}
FIELDS = "{npy: {name: x, role: feature}, y.npy: {name: y, role: target}}"


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, str]:
    for name, size in SIZES.items():
        for shard, numbers in enumerate(np.array_split(np.arange(size), 4)):
            samples = [(f"{n:06d}", {"npy": npy(vector(n)), "y.npy": npy(vector(n)[:1])}) for n in numbers.tolist()]
            write_tar(tmp_path / name / f"part-{shard}.tar", samples)
    return {name: str(tmp_path / name / "part-*.tar") for name in SIZES}


def train(
    ranks: int, run_dir: Path, shards: dict[str, str], *overrides: str, shares: dict[str, float] = SHARES
) -> None:
    mixture = ", ".join(f"{name}: {{shards: '{shards[name]}', weight: {share}}}" for name, share in shares.items())
    train_on(
        ranks,
        run_dir,
        *(f"data.mixture={{{mixture}}}", f"data.fields={FIELDS}", "data.record_keys=true", "train.eval_every=0"),
        *("model.widths=[3,4,1]", "checkpoint.every_steps=5", "data.prepare=null", "train.max_epochs=null"),
        *(f"data.eval={{web: '{shards['web']}', code: '{shards['code']}'}}", *overrides),
        experiment="regression",
    )


@pytest.mark.slow
def test_a_killed_mixture_resumes_on_other_ranks_with_another_batch(tmp_path: Path, shards: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RanksFailed):
        train(3, run_dir, shards, "train.max_steps=30", "train.global_batch_size=24", faulty("kill@rank=1,step=18"))
    train(2, run_dir, shards, "train.max_steps=40", "train.global_batch_size=32", "data.num_workers=1")
    assert status(run_dir)["state"] == "finished"
    keys: dict[int, list[str]] = {}
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            keys.setdefault(line["step"], []).extend(line["keys"])
    done = sum(len(found) == 24 for found in keys.values())
    assert done in (5, 10, 15)  # the step of the last checkpoint before the kill
    assert {step: len(found) for step, found in keys.items()} == {s: 24 if s <= done else 32 for s in range(1, 41)}
    used = Counter(key for found in keys.values() for key in found)
    samples = sum(map(len, keys.values()))
    for name, share in SHARES.items():
        stored = [f"{name}/{key}" for key in stored_keys(sorted(map(str, Path(shards[name]).parent.glob("*.tar"))))]
        count = sum(used[key] for key in stored)
        assert abs(count - samples * share) < 24
        assert {used[key] - count // len(stored) for key in stored} <= {0, 1}
        for window in (range(1, done + 1), range(done + 1, 41), range(3, 12), range(30, 35)):
            ours = sum(key.startswith(f"{name}/") for step in window for key in keys[step])
            assert abs(ours - share * sum(len(keys[step]) for step in window)) < 24
        assert next(record[f"data/samples/{name}"] for record in records(run_dir) if record["step"] == 40) == count
        assert any(f"train/loss/{name}" in record for record in records(run_dir))
    last = records(run_dir)[-1]
    assert (last["eval/web/samples"], last["eval/code/samples"], last["eval/samples"]) == (300, 23, 323)
    whole = last["eval/web/loss"] * 300 + last["eval/code/loss"] * 23
    assert last["eval/loss"] == pytest.approx(whole / 323)
    for record in records(run_dir):
        if "train/loss" in record and record["step"] <= done:
            of_sources = [record.get(f"train/loss/{name}") for name in SHARES]
            assert min(filter(None, of_sources)) <= record["train/loss"] <= max(filter(None, of_sources))


@pytest.mark.slow
def test_other_weights_continue_and_other_sources_are_refused(
    tmp_path: Path, shards: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(1, run_dir, shards, "train.max_steps=10", "train.global_batch_size=20")
    before = records(run_dir)
    with pytest.raises(RanksFailed):
        train(1, run_dir, shards, "train.max_steps=20", shares={"web": 1, "books": 1})
    assert_refused(capfd.readouterr().err, "data.mixture", "code was removed", "weight of 0")
    assert records(run_dir) == before
    train(
        1,
        run_dir,
        shards,
        "train.max_steps=20",
        "train.global_batch_size=20",
        shares={"web": 1e-9, "books": 1, "code": 1},
    )
    counts = {
        record["step"]: [record[f"data/samples/{name}"] for name in SHARES]
        for record in records(run_dir)
        if "train/loss" in record
    }
    assert counts[10] == [140, 40, 20]
    assert counts[20] == [140, 140, 120]
