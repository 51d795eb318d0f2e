"""The tables of a sweep, on the page and on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.report.sweep import Comparison, Sweep
from dtrain.report.tables import Column, best_text, comparison_text, run_columns, sweep_text, text_table
from dtrain.runs.history import History
from tests.report.runs_for_tests import point_of, run_of


def cells(sweep: Sweep) -> dict[str, dict[str, str]]:
    """Run to heading to cell."""
    columns = run_columns(sweep)
    heads = [column.head for column in columns]
    rows = [dict(zip(heads, row, strict=True)) for row in zip(*(column.cells for column in columns), strict=True)]
    return {row["run"]: row for row in rows}


def test_a_row_tells_settings_results_and_state(runs: list[History]) -> None:
    rows = cells(Sweep.from_runs(runs))
    whole = rows["0.0001-2"]
    values = runs[2].series("eval/accuracy")[1].tolist()
    heads = [column.head for column in run_columns(Sweep.from_runs(runs)) if not column.is_detail]
    assert heads == ["place", "state", "time", "run", "lr", "seed", "best eval/accuracy", "at step", "last train/loss"]
    assert (whole["lr"], whole["seed"], whole["restarts"], whole["state"]) == ("0.0001", "2", "2", "finished")
    assert float(whole["best eval/accuracy"]) == pytest.approx(max(values), abs=1e-4)
    assert whole["at step"] == str(10 * (values.index(max(values)) + 1))
    assert float(whole["last eval/accuracy"]) == pytest.approx(values[-1], abs=1e-4)
    assert rows["0.001-0"]["state"] == "killed"
    assert (rows["0.001-1"]["place"], rows["0.001-1"]["state"]) == ("", "failed")
    assert rows["0.001-1"]["note"] == "ValueError: no; nothing logged"
    assert (rows["0.01-3"]["best eval/accuracy"], rows["0.01-3"]["last eval/accuracy"]) == ("", "not finite")
    assert (rows["waits"]["lr"], rows["waits"]["state"], rows["waits"]["note"]) == ("", "queued", "nothing logged")


def test_numbers_in_a_terminal_are_aligned_and_the_best_run_is_marked(runs: list[History]) -> None:
    heading, *lines = sweep_text(Sweep.from_runs(runs)).splitlines()[: 1 + len(runs)]
    end = heading.index("best eval/accuracy") + len("best eval/accuracy")
    assert all(line[end - 1] in "0123456789-" and line[end] == " " for line in lines)
    assert [line[0] for line in lines] == ["*", *" " * 12]


def test_a_line_of_a_terminal_is_not_cut_and_a_name_is_no_markup() -> None:
    names = ["[red]x[/red]", ":bug:", "a" * 500, "", "\x1b[2J"]
    table = text_table([Column("n", ["1", "20", "", "3", "4"]), Column("[b]name", names, False)])
    assert table.splitlines() == [
        " n  [b]name",
        " 1  [red]x[/red]",
        "20  :bug:",
        f" -  {'a' * 500}",
        " 3  -",
        " 4  ?[2J",
    ]


def test_a_best_value_says_which_direction_is_better_and_an_unknown_direction_has_none(tmp_path: Path) -> None:
    records = [{"step": step, "eval/loss": loss, "eval/quality": loss} for step, loss in ((46, 0.355), (92, 0.175))]
    run = run_of(tmp_path / "run", records)
    assert best_text(run, "eval/loss") == "0.175 at step 92, smallest"
    assert best_text(run, "eval/quality") == ""
    run.config.update({"checkpoint.best": "eval/quality", "checkpoint.best_mode": "max"})
    assert best_text(run, "eval/quality") == "0.355 at step 46, largest"


def test_a_terminal_says_why_runs_of_different_data_are_apart(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / name, {"data.eval": f"/{name}.tar"}, [0.5]) for name in "aab"]
    runs[1] = point_of(tmp_path / "c", {"data.eval": "/a.tar"}, [0.4])
    reason, _, *lines = comparison_text(Comparison.from_runs(runs)).splitlines()
    assert "different data" in reason
    assert [line for line in lines if ".tar" in line] == ["/a.tar", "/b.tar"]
    assert lines.count("Ranked by eval/accuracy, the largest value first.") == 1
    assert comparison_text(Comparison.from_runs(runs[:2])) == sweep_text(Sweep.from_runs(runs[:2]))
