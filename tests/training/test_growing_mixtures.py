"""A run on a mixture that is killed, and resumed with more and fewer shards. The oracle counts the logged keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.replay.replays import logged, replay_on, traced
from tests.training.test_growing_runs import FIELDS, keys_of, logged_steps, write_shard
from tests.whole_runs import status, train_on


def train(ranks: int, run_dir: Path, shards: Path, *overrides: str) -> None:
    mixture = ", ".join(
        f"{name}: {{shards: '{shards}/{name}/*.tar', weight: {weight}}}" for name, weight in (("web", 2), ("books", 1))
    )
    data = (f"data.mixture={{{mixture}}}", f"data.fields={FIELDS}", "data.eval=null", "data.prepare=null")
    usual = ("data.record_keys=true", "train.eval_every=0", "model.widths=[3,4,1]", "checkpoint.best=null")
    lasts = ("checkpoint.every_steps=1", "checkpoint.keep_last=99", "train.max_steps=null", "train.max_epochs=3")
    chosen = {override.partition("=")[0] for override in overrides}
    options = [it for it in (*data, *usual, *lasts) if it.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, *options, *overrides, experiment="regression")


@pytest.mark.slow
def test_a_killed_mixture_resumes_with_more_shards_of_one_source_and_fewer_of_the_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, shards = tmp_path / "run", tmp_path / "shards"
    for number, name in enumerate(("b0", "b1", "b2", "b3")):
        write_shard(shards / "web", name, 10 * number)
    for number, name in enumerate(("c0", "c1")):
        write_shard(shards / "books", name, 100 + 10 * number)
    with pytest.raises(RanksFailed):
        train(2, run_dir, shards, "train.global_batch_size=6", faulty("kill@rank=1,step=4"))
    write_shard(shards / "web", "a9", 200, 7)
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        train(1, run_dir, shards, "train.global_batch_size=5")
    assert_refused(capfd.readouterr().err, "data.mixture.web", "a9.tar is new", "data.grow=now")
    (shards / "books" / "c0.tar").unlink()
    train(3, run_dir, shards, "train.global_batch_size=9", "data.grow=now", "data.grow_allow_removed=true")
    assert status(run_dir)["state"] == "finished"
    shown = capfd.readouterr().out
    assert "web: new: 1 shard with 7 samples, joining the rest of epoch 0" in shown
    assert "books: removed: 1 shard with 10 samples" in shown
    assert "(of the first start, with" in shown
    steps = logged_steps(run_dir)
    in_order = [key for step in sorted(steps) for key in steps[step]]
    every, web = {f"web/{key}" for key in keys_of(shards / "web", "b0", "b1", "b2", "b3", "a9")}, Counter[str]()
    for step in sorted(steps):
        web.update(key for key in steps[step] if key.startswith("web/"))
        whole, more = divmod(web.total(), len(every))
        assert Counter(web[key] - whole for key in every) == Counter({0: len(every) - more, 1: more})
    # Epochs of the mixture are those of web: three, and at most one step of the fourth.
    assert 3 * len(every) <= web.total() < 3 * len(every) + 9
    books = Counter(key for key in in_order if key.startswith("books/"))
    assert max(books.values()) - min(books[f"books/{key}"] for key in keys_of(shards / "books", "c1")) <= 1
    assert all(books[key] <= 1 for key in books if key.startswith("books/c0"))
    # The keys of a removed shard are not known any more, its uses are.
    log, gone = Counter[tuple[str, int, int]](), "books/c0.tar/"
    for (key, step, rank), times in logged(run_dir).items():
        log[gone if key.startswith(gone) else key, step, rank] += times
    found = [
        use for shard in {key.rpartition("/")[0] for key, _, _ in log} for use in traced(run_dir, "--shard", shard)
    ]
    assert Counter((use["key"], use["step"], use["rank"]) for use in found) == log
    # The first step after the growth, and the last one.
    for step in (max(step for step in steps if len(steps[step]) == 6) + 1, len(steps)):
        assert replay_on(1, run_dir, f"replay.step={step}")["steps"][0]["difference"] < 1e-6
