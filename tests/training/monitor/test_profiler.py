from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import profile

from dtrain.training.monitor.profiler import TraceSummary, intersection, union
from dtrain.training.step import PARTS, STEP
from tests.ranks import RanksFailed
from tests.whole_runs import metrics, status, train_on

# -- profiler


pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "data.num_workers=0", "train.global_batch_size=256", "tracker=none")


def train(ranks: int, run_dir: Path, *overrides: str) -> None:
    train_on(ranks, run_dir, *SMALL, *overrides)


def profiles(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").glob("*"))


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"}


@pytest.mark.slow
def test_a_profile_holds_the_parts_of_the_steps_on_the_ranks_asked_for(tmp_path: Path) -> None:
    # Steps 5 to 7: an epoch has six, and is followed by an evaluation.
    train(2, tmp_path, "train.max_steps=8", "profile.steps=[5,7]", "profile.ranks=[1]", "train.eval_every=6")
    stem = "rank-00001-steps-000000005-000000007"
    assert profiles(tmp_path) == [f"{stem}.json.gz", f"{stem}.txt"]
    assert {STEP, *PARTS, "gloo:all_reduce"} <= names_in(tmp_path / "profile" / f"{stem}.json.gz")
    page = (tmp_path / "profile" / f"{stem}.txt").read_text()
    assert page.startswith("steps 5 to 7 of rank 1: 3 steps, ")
    for row in (*PARTS, "communication", "aten::convolution_backward"):
        assert f"\n  {row} " in page
    [sent, *same] = metrics(tmp_path, "comm/bytes_per_step")
    assert set(same) <= {sent}
    gradients = re.search(r"all-reduce of gradients in fp32 over 2 ranks +(\d+) KiB +(\d+) KiB", page)
    assert gradients is not None
    assert gradients[1] == gradients[2]  # two ranks send as much as there is
    assert int(gradients[1]) == pytest.approx(sent / 2**10, abs=1)


@pytest.mark.slow
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
        (("profile.steps=[1,999]",), "at most 100"),
        (("profile.steps=[1,2]", "profile.ranks=[2]"), "profile.ranks: got 2, the run has ranks 0 to 0"),
    ],
)
def test_windows_and_ranks_that_cannot_be_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed):
        train(1, tmp_path, "train.max_steps=2", *overrides)
    assert message in capfd.readouterr().err


# -- trace


interval = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
intervals = st.lists(interval, max_size=8)


def array(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.float64).reshape(-1, 2)


def points(pairs: list[tuple[int, int]] | np.ndarray) -> set[int]:
    """Which unit pieces of the line are covered."""
    return {point for start, end in pairs for point in range(int(start), int(end))}


@given(intervals, intervals)
def test_union_and_intersection_cover_the_right_points(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    merged = [union(array(one)), union(array(other))]
    for found, given_ in zip(merged, (one, other), strict=True):
        assert points(found) == points(given_)
        assert (found[1:, 0] > found[:-1, 1]).all()
    assert points(intersection(*merged)) == points(one) & points(other)


def event(name: str, start: float, duration: float, kind: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 7, "tid": thread}


def test_time_is_counted_inside_of_steps_once_and_for_the_innermost_operator() -> None:
    step = [
        event("step", 0, 10_000, "user_annotation"),
        event("forward", 1_000, 4_000, "user_annotation"),
        event("aten::linear", 1_000, 3_000),
        event("aten::addmm", 2_000, 1_000),
        event("autograd::engine::evaluate_function: X", 5_000, 4_000),  # waits for gloo: no compute
        event("gloo:all_reduce", 3_000, 3_000, "user_annotation", 2),
        event("aten::evaluation", 11_000, 9_000),  # between the steps
    ]
    again = [{**one, "ts": one["ts"] + 50_000} for one in step]
    summary = TraceSummary.from_events(step + again, "step", ("data", "forward"))
    assert (summary.steps, summary.step_ms, summary.parts) == (2, 10.0, {"forward": 4.0})
    assert (summary.communication_ms, summary.hidden_ms) == (3.0, 1.0)
    own = {name: (calls, ms) for name, calls, ms in summary.top}
    assert own["aten::linear"] == (1.0, 2.0)
    assert own["aten::addmm"] == (1.0, 1.0)
    assert "aten::evaluation" not in own
    assert "33% of it hidden behind compute" in summary.text("steps 1 to 2")


def test_on_a_gpu_kernels_are_counted_and_nccl_is_communication() -> None:
    events = [
        event("step", 0, 10_000, "user_annotation"),
        event("aten::mm", 0, 9_000),
        event("gemm", 2_000, 4_000, "kernel", 100),
        event("ncclDevKernel_AllReduce", 4_000, 8_000, "kernel", 101),  # ends behind the host's step
    ]
    summary = TraceSummary.from_events(events, "step", ())
    assert summary.on_device
    assert (summary.communication_ms, summary.hidden_ms) == (8.0, 2.0)
    assert [name for name, _, _ in summary.top] == ["gemm"]


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 1)]}))
    with pytest.raises(ValueError, match="holds no step"):
        TraceSummary.read(path, "step", ())
