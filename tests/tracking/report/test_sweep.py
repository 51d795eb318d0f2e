"""Runs side by side: in the order of their results, all of them in the table, a choice of them looked at closely."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dtrain.tracking.history import History
from dtrain.tracking.report.aligned import as_text
from dtrain.tracking.report.drawing import as_svg
from dtrain.tracking.report.seeds import over_seeds
from dtrain.tracking.report.setting_charts import setting_charts
from dtrain.tracking.report.sweep import Sweep
from dtrain.tracking.report.sweep_table import run_columns, seed_columns
from tests.tracking.report.runs_for_tests import point_of

RATES = (1e-4, 1e-3, 1e-2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    """Three rates by four seeds, of which one was killed half-way, one failed at once and one diverged; and one in a queue."""
    folder, draw = tmp_path_factory.mktemp("sweep"), random.Random(0)
    found = []
    for rate in RATES:
        for seed in range(4):
            results: list[float | None] = [draw.random() for _ in range(5)]
            status = {"restarts": seed}
            if (rate, seed) == (1e-3, 0):
                results, status = results[:2], status | {"state": "running"}
            elif (rate, seed) == (1e-3, 1):
                results, status = [], {"state": "failed", "reason": "ValueError: no"}
            elif (rate, seed) == (1e-2, 3):
                results = [None, None]
            run_dir = folder / f"{rate}-{seed}"
            found.append(point_of(run_dir, {"optimizer.lr": rate, "run.seed": seed}, results, **status))
    (folder / "0.001-0" / ".lock").touch()
    (folder / "waits").mkdir()
    (folder / "waits" / ".job").touch()
    return [*found, History.read(folder / "waits", "waits")]


def cells(sweep: Sweep) -> dict[str, dict[str, str]]:
    """Run to heading to cell."""
    columns = run_columns(sweep)
    heads = [column.head for column in columns]
    rows = [dict(zip(heads, row, strict=True)) for row in zip(*(column.cells for column in columns), strict=True)]
    return {row["run"]: row for row in rows}


def best_of(run: History) -> float:
    """The largest finite result, from the file itself."""
    values = run.series("eval/accuracy")[1].tolist()
    return max((value for value in values if value == value), default=-1.0)


def test_the_best_come_first_and_those_without_a_result_last(runs: list[History]) -> None:
    found = [best_of(run) for run in Sweep.of(runs).runs]
    assert found == sorted(found, reverse=True)
    assert found.count(-1.0) == 3


def test_a_row_tells_settings_results_and_state(runs: list[History]) -> None:
    rows = cells(Sweep.of(runs))
    whole = rows["0.0001-2"]
    values = runs[2].series("eval/accuracy")[1].tolist()
    assert (whole["lr"], whole["seed"], whole["restarts"], whole["state"]) == ("0.0001", "2", "2", "finished")
    assert float(whole["best eval/accuracy"]) == pytest.approx(max(values), abs=1e-4)
    assert whole["at step"] == str(10 * (values.index(max(values)) + 1))
    assert float(whole["last eval/accuracy"]) == pytest.approx(values[-1], abs=1e-4)
    assert rows["0.001-0"]["state"] == "killed"
    assert (rows["0.001-1"]["place"], rows["0.001-1"]["state"]) == ("", "failed: ValueError: no, nothing logged")
    assert (rows["0.01-3"]["best eval/accuracy"], rows["0.01-3"]["last eval/accuracy"]) == ("", "not finite")
    assert (rows["waits"]["lr"], rows["waits"]["state"]) == ("", "queued, nothing logged")


def test_seeds_are_averaged_over_finished_runs_with_a_result(runs: list[History]) -> None:
    groups = {group.values: group for group in over_seeds(Sweep.of(runs))}
    assert {values: (len(group.best), group.runs) for values, group in groups.items()} == {
        ("0.0001",): (4, 4),
        ("0.001",): (2, 4),
        ("0.01",): (3, 4),
    }
    columns = {column.head: column.cells for column in seed_columns(Sweep.of(runs))}
    place = columns["lr"].index("0.001")
    results = [best_of(run) for run in runs[6:8]]
    assert float(columns["best eval/accuracy: mean"][place]) == pytest.approx(sum(results) / 2, abs=1e-4)
    assert columns["seeds finished"][place] == "2 of 4"
    spread = next(column.cells for column in seed_columns(Sweep.of(runs)) if column.head.startswith("least"))[place]
    assert list(map(float, spread.split(" to "))) == pytest.approx([min(results), max(results)], abs=1e-4)


def test_without_a_seed_that_was_varied_there_is_nothing_to_average(runs: list[History]) -> None:
    assert over_seeds(Sweep.of([run for run in runs if run.label.endswith("-2")])) == []


def test_each_number_that_was_varied_and_is_no_seed_has_a_chart_over_its_decades(runs: list[History]) -> None:
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.title == "Best eval/accuracy over optimizer.lr"
    assert [label for label, _ in chart.keys] == ["finished", "not finished"]
    assert chart.draw is not None
    axes = chart.draw().axes[0]
    assert axes.get_xscale() == "log"
    points = sorted(float(y) for line in axes.lines[1:] for y in line.get_ydata())
    assert points == pytest.approx(sorted(best_of(run) for run in runs if best_of(run) >= 0))
    assert setting_charts(Sweep.of(runs[:8])) == []  # two values are no curve


def test_a_setting_that_may_be_zero_is_drawn_with_its_zero(tmp_path: Path) -> None:
    decays = (0.0, 1e-4, 1e-2)
    runs = [point_of(tmp_path / str(n), {"optimizer.weight_decay": n}, [0.5 + n]) for n in decays]
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.draw is not None
    assert chart.draw().axes[0].get_xscale() == "symlog"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values", [[-1e99, 0.0, 1e99], [0.0, 1e-99, 1e99], [1e-300, 1.0, 1e99], [-1e-300, 0.0, 1e-300]]
)
def test_values_beyond_all_measure_are_drawn_and_written_somehow(tmp_path: Path, values: list[float]) -> None:
    runs = [point_of(tmp_path / str(n), {"optimizer.lr": n}, [n, -n]) for n in values]
    sweep = Sweep.of(runs)
    (chart,) = setting_charts(sweep)
    assert as_svg(chart)
    assert len(list(as_text(run_columns(sweep)))) == 4


def test_lines_of_a_terminal_have_their_numbers_below_one_another(runs: list[History]) -> None:
    heading, *lines = as_text(run_columns(Sweep.of(runs)), "*")
    end = heading.index("best eval/accuracy") + len("best eval/accuracy")
    assert all(line[end - 1] in "0123456789-" and line[end] == " " for line in lines)
    assert [line[0] for line in lines] == ["*", *" " * 12]


def test_of_very_many_runs_the_best_the_middle_and_the_last_are_looked_at(tmp_path: Path) -> None:
    results = [n / 30 for n in range(30)]
    random.Random(0).shuffle(results)
    runs = [point_of(tmp_path / f"{n}", {"run.seed": n}, [result]) for n, result in enumerate(results)]
    sweep = Sweep.of([*runs, point_of(tmp_path / "new", {"run.seed": 99})])
    assert [best_of(run) for run in sweep.shown] == [n / 30 for n in (29, 28, 27, 26, 25, 12, 0)]
    assert sweep.choice == (
        "Of 31 runs, what follows shows 7: the 5 best, the middle one and the last one by eval/accuracy."
    )
    few = Sweep.of(runs[:8])
    assert (few.shown, few.choice) == (runs[:8], "")


def test_runs_that_differ_in_more_than_a_table_shows_are_not_averaged(tmp_path: Path) -> None:
    long = f"/{'long/' * 40}"
    for name, others in (
        ("values", [{"data.train": f"{long}{end}/{'x' * 40}.tar"} for end in "ab"]),
        ("keys", [{f"model.k{i}": n for i in range(20)} for n in (1, 2)]),
    ):
        points = [{"run.seed": seed} | other for other in others for seed in (1, 2)]
        runs = [point_of(tmp_path / name / str(place), point, [0.5]) for place, point in enumerate(points)]
        assert [group.runs for group in over_seeds(Sweep.of(runs))] == [2, 2], name


def test_runs_that_left_no_config_are_no_group(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / str(seed), {"run.seed": seed}, [0.5]) for seed in (1, 2)]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        runs.append(History.read(tmp_path / name, name))
    assert [group.runs for group in over_seeds(Sweep.of(runs))] == [2]


def test_a_key_with_a_slash_is_no_folder(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / str(n), {"a/<b>.C": n}, [0.5]) for n in (1, 2, 3)]
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.name == "setting-a-b-c"
