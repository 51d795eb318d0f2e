from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import profile

from dtrain.training import spans
from tests.ranks import RanksFailed
from tests.runs import metrics, status, train_on

pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "data.num_workers=0", "train.global_batch_size=256", "tracker=none")


def train(ranks: int, run_dir: Path, *overrides: str) -> None:
    train_on(ranks, run_dir, *SMALL, *overrides)


def profiles(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").glob("*"))


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"}


def test_a_profile_holds_the_parts_of_the_steps_on_the_ranks_asked_for(tmp_path: Path) -> None:
    # Steps 5 to 7: an epoch has six, and is followed by an evaluation.
    train(2, tmp_path, "train.max_steps=8", "profile.steps=[5,7]", "profile.ranks=[1]", "train.eval_every=6")
    stem = "rank-00001-steps-000000005-000000007"
    assert profiles(tmp_path) == [f"{stem}.json.gz", f"{stem}.txt"]
    assert {spans.STEP, *spans.PARTS, "gloo:all_reduce"} <= names_in(tmp_path / "profile" / f"{stem}.json.gz")
    page = (tmp_path / "profile" / f"{stem}.txt").read_text()
    assert page.startswith("steps 5 to 7 of rank 1: 3 steps, ")
    for row in (*spans.PARTS, "communication", "aten::convolution_backward"):
        assert f"\n  {row} " in page


def test_a_profile_changes_no_number_and_survives_a_stop_and_a_restart(tmp_path: Path) -> None:
    train(1, tmp_path / "plain", "train.max_steps=9")
    for last in (4, 9):  # the first run ends inside the window, the second begins there
        train(1, tmp_path / "seen", f"train.max_steps={last}", "profile.steps=[3,7]")
    assert metrics(tmp_path / "seen", "train/loss") == metrics(tmp_path / "plain", "train/loss")
    assert profiles(tmp_path / "seen") == [
        "rank-00000-steps-000000003-000000004.json.gz",
        "rank-00000-steps-000000003-000000004.txt",
        "rank-00000-steps-000000005-000000007.json.gz",
        "rank-00000-steps-000000005-000000007.txt",
    ]


def test_a_profile_that_fails_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refusing(self: profile, path: str) -> Any:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(profile, "export_chrome_trace", refusing)
    train(1, tmp_path, "train.max_steps=6", "profile.steps=[2,3]")
    assert status(tmp_path)["state"] == "finished"
    assert capfd.readouterr().out.count("WARNING: no profile (OSError: [Errno 28] No space left on device") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("profile.steps=[5]",), "profile.steps: got [5], want the first and the last attempted step"),
        (("profile.steps=[1,999]",), "of a window of at most 100"),
        (("profile.steps=[1,2]", "profile.ranks=[2]"), "profile.ranks: got 2, the run has ranks 0 to 0"),
    ],
)
def test_windows_and_ranks_that_cannot_be_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path, "train.max_steps=2", *overrides)
    assert message in capfd.readouterr().err
