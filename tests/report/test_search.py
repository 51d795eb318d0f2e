from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.report import __main__ as report
from dtrain.report.search import FILE, SearchRecord, read_searches
from dtrain.report.tables import text_table
from dtrain.runs.run_dir import write_status


def trial(number: int, state: str, value: float | None, lr: float, width: str, **more: str) -> dict[str, Any]:
    values = {"optimizer.lr": lr, "model.width": width}
    return {
        "number": number,
        "state": state,
        "value": value,
        "values": values,
        "run": f"r{number}",
        "reason": None,
    } | more


TRIALS = [
    trial(0, "finished", 0.5, 1e-4, "8"),
    trial(1, "failed", None, 1.0, "16", reason="step 3: out of memory\nand more"),
    trial(2, "finished", 0.9, 0.012345678, "16"),
    trial(3, "pruned", 0.3, 0.1, "8"),
    trial(4, "stopped", None, 0.2, "8"),
    trial(5, "finished", 0.8, 0.01, "32"),
]


def write(path: Path, direction: str = "maximize", trials: list[dict[str, Any]] = TRIALS) -> Path:
    space = {"optimizer.lr": "tag(log,interval(1e-4,1))", "model.width": "8,16,32"}
    definition = {"metric": "eval/accuracy", "direction": direction, "space": space}
    path.mkdir(exist_ok=True)
    content = {"definition": definition, "trials": trials, "importance": {"optimizer.lr": 0.75, "model.width": 0.25}}
    (path / FILE).write_text(json.dumps(content))
    return path


def read(path: Path) -> SearchRecord:
    search = SearchRecord.read(path, gaps := [])
    assert search is not None
    assert gaps == []
    return search


def test_the_table_has_a_row_for_each_trial_and_marks_the_best(tmp_path: Path) -> None:
    search = read(write(tmp_path))
    rows = [line.split() for line in text_table(search.columns).splitlines()]
    assert rows[0] == ["trial", "lr", "width", "eval/accuracy", "state", "run"]
    assert rows[1] == ["0", "0.0001", "8", "0.5", "finished", "r0"]
    assert rows[2] == ["1", "1", "16", "-", "failed:", "step", "3:", "out", "of", "memory", "r1"]
    assert rows[3] == ["best", "2", "0.01235", "16", "0.9", "finished", "r2"]
    assert rows[5] == ["4", "0.2", "8", "-", "stopped", "r4"]
    assert "3 finished, 1 pruned, 1 failed, 1 stopped" in search.summary
    assert "optimizer.lr 75 %" in search.summary


def test_the_best_is_the_smallest_of_a_loss(tmp_path: Path) -> None:
    best = read(write(tmp_path, "minimize")).best
    assert best is not None
    assert best.number == 0


def test_the_chart_has_the_best_so_far_and_the_pruned_ones(tmp_path: Path) -> None:
    (chart,) = read(write(tmp_path)).section.charts
    shown = {line.label.partition(",")[0]: (line.x.tolist(), line.y.tolist()) for line in chart.lines}
    assert shown == {
        "best so far": ([0, 2, 5], [0.5, 0.9, 0.9]),
        "finished": ([0, 2, 5], [0.5, 0.9, 0.8]),
        "pruned": ([3], [0.3]),
    }


def test_a_search_without_results_has_a_note(tmp_path: Path) -> None:
    search = read(write(tmp_path, trials=TRIALS[1:2]))
    assert search.best is None
    (chart,) = search.section.charts
    assert not chart.is_drawn
    assert chart.note


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"definition": {}, "trials": []}',
        '{"definition": 3, "trials": [3]}',
        "[" * 100_000,
        '{"trials": 1e999}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    gaps: list[str] = []
    assert read_searches([tmp_path], gaps) == []
    assert len(gaps) == 1
    assert FILE in gaps[0]


def test_a_link_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "other")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / FILE).symlink_to(tmp_path / "other" / FILE)
    gaps: list[str] = []
    assert read_searches([tmp_path / "s"], gaps) == []
    assert "link" in gaps[0]


def test_the_report_of_the_directory_shows_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "s", trials=[*TRIALS, trial(6, "failed", None, 1.0, "16", reason="<script>alert(1)</script>")])
    run = tmp_path / "s" / "r0"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    write_status(run, "finished", 1)
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Search of 7 trials, eval/accuracy maximized" in page
    assert "<script>alert" not in page
    assert [search.path for search in read_searches([tmp_path], [])] == [tmp_path / "s"]
