"""``data.exclude``: samples that a training leaves out, from the start or in a branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain.runs.excluded import describe, read_excluded
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.replay.replays import assert_trace_is_the_log, logged, replay_on, traced
from tests.whole_runs import records, train_on, weights

pytestmark = pytest.mark.usefixtures("digits")
USUAL = (
    *("train.max_steps=36", "checkpoint.every_steps=6", "checkpoint.keep_last=9", "checkpoint.best=null"),
    *("train.eval_every=0", "data.record_keys=true", "train.log_every=10"),
    "data.augment={_target_: dtrain.data.augment.RandomCropFlip, field: image, padding: 1}",
)


def train(ranks: int, run_dir: Path, *overrides: str) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    usual = [it for it in USUAL if it.partition("=")[0] not in chosen]
    train_on(ranks, run_dir, "model._target_=tests.toys.NetWithDropout", *usual, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_branch_without_samples_equals_a_run_that_never_used_them(tmp_path: Path, ranks: int) -> None:
    train(ranks, tmp_path / "whole")
    uses = logged(tmp_path / "whole")
    keys = [use["key"] for use in traced(tmp_path / "whole", "--step", "20")][:7]
    listed = tmp_path / "bad.txt"
    listed.write_text("\n".join([*reversed(keys), "", keys[0]]) + "\n")
    first = min(step for key, step, _ in uses if key in keys)
    begin = (first - 1) // 6 * 6
    train(ranks, tmp_path / "branch", f"run.fork={tmp_path / 'whole'}@{begin}", f"data.exclude={listed}")
    train(ranks, tmp_path / "never", f"data.exclude={listed}")
    for name in ("model", "optimizer"):
        branch, never = weights(tmp_path / "branch", 36, name), weights(tmp_path / "never", 36, name)
        assert all(branch[key].equal(never[key]) for key in never)
    assert any(
        not tensor.equal(weights(tmp_path / "whole", 36)[key])
        for key, tensor in weights(tmp_path / "branch", 36).items()
    )
    assert not {key for key, _, _ in logged(tmp_path / "never")} & set(keys)
    assert_trace_is_the_log(tmp_path / "never")
    assert traced(tmp_path / "branch", keys[0]) == []
    left_out = sum(times for (key, _, _), times in uses.items() if key in keys)
    assert records(tmp_path / "never")[-2]["data/excluded_samples"] == left_out
    # The list of the run is used, wherever the file is now.
    listed.unlink()
    assert replay_on(ranks, tmp_path / "never", "replay.steps=[18,24]")["equal"]


@pytest.mark.slow
def test_a_changed_list_is_printed_and_a_killed_run_counts_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listed, run_dir = tmp_path / "bad.txt", tmp_path / "run"
    train(1, tmp_path / "short", "train.max_steps=1")
    keys = [use["key"] for use in traced(tmp_path / "short", "--step", "3")]
    listed.write_text("\n".join(keys[:2]))
    with pytest.raises(RanksFailed):  # step 12 is saved once the checkpoint of step 6 is complete
        train(1, run_dir, "train.max_steps=20", f"data.exclude={listed}", faulty("kill@rank=0,step=14"))
    listed.write_text("\n".join(keys[:3]))
    train(1, run_dir, "train.max_steps=20", f"data.exclude={listed}")
    shown = capfd.readouterr().out
    two, three = describe(sorted(keys[:2])), describe(sorted(keys[:3]))
    assert f'data.exclude: "{two}" -> "{three}"' in shown
    assert records(run_dir)[-2]["data/excluded_samples"] == 2
    assert len(list(run_dir.glob("exclude-*.txt"))) == 2
    assert_trace_is_the_log(run_dir)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("nothing/here\n", ["data.exclude", "nothing/here", "Keys look like train-00"]),
        ("\n \n", ["data.exclude", "has no key"]),
        (None, ["data.exclude", "cannot be read"]),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str | None, parts: list[str]
) -> None:
    listed = tmp_path / "bad.txt"
    if content is not None:
        listed.write_text(content)
    with pytest.raises(RanksFailed):
        train(1, tmp_path / "run", f"data.exclude={listed}")
    assert_refused(capfd.readouterr().err, *parts)
    assert not (tmp_path / "run").exists()


def test_the_description_depends_on_the_keys_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("b\na\n\nb\n")
    (tmp_path / "b").write_text("a\nb")
    assert describe(read_excluded(tmp_path / "a")) == describe(read_excluded(tmp_path / "b"))
    assert describe(["a"]) != describe(["b"])
