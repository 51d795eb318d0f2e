from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.tracking.trace import TraceSummary, intersection, union

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
    summary = TraceSummary.of(step + again, "step", ("data", "forward"))
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
    summary = TraceSummary.of(events, "step", ())
    assert summary.on_device
    assert (summary.communication_ms, summary.hidden_ms) == (8.0, 2.0)
    assert [name for name, _, _ in summary.top] == ["gemm"]


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 1)]}))
    with pytest.raises(ValueError, match="holds no step"):
        TraceSummary.read(path, "step", ())
