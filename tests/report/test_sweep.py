"""Several runs: what was varied, their ranking, groups over seeds."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.report.sweep import Comparison, Goal, Sweep, runs_by_data, seed_groups, short_names, varied_settings
from dtrain.report.tables import seed_columns
from dtrain.runs.history import ABSENT, History
from tests.report.runs_for_tests import best_of, point_of, run_of, steady

KEYS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), max_size=8, unique=True)


def points(folder: Path, *overrides: dict[str, Any]) -> list[History]:
    return [point_of(folder / str(place), given) for place, given in enumerate(overrides)]


@given(keys=KEYS)
def test_a_short_name_is_the_end_of_one_key_only_and_no_shorter_one_is(keys: list[str]) -> None:
    names = short_names(keys)
    assert list(names) == keys
    for key, name in names.items():
        assert f".{key}".endswith(f".{name}")
        having = [other for other in keys if f".{other}".endswith(f".{name}")]
        assert having == [key] or name == key
        shorter = name.partition(".")[2]
        assert not shorter or len([other for other in keys if f".{other}".endswith(f".{shorter}")]) > 1


def test_a_target_is_named_with_what_it_builds() -> None:
    assert short_names(["optimizer.lr", "task._target_"]) == {"optimizer.lr": "lr", "task._target_": "task._target_"}


def test_keys_that_vary_are_named_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    shared = {"model.width": 8, "optimizer.name": "adamw", "run.name": "x", "tracker.mode": "offline"}
    runs = points(
        tmp_path,
        shared | {"optimizer.lr": 0.1, "run.seed": 1},
        shared | {"run.name": "y", "tracker.mode": "online", "optimizer.lr": 0.01, "run.seed": 1},
        shared | {"optimizer.lr": 0.01, "run.seed": 2},
    )
    settings, unshown = varied_settings(runs)
    assert [(one.key, one.name, one.texts, one.is_seed) for one in settings] == [
        ("optimizer.lr", "lr", ["0.1", "0.01", "0.01"], False),
        ("run.seed", "seed", ["1", "1", "2"], True),
    ]
    assert unshown == []


def test_a_number_is_the_same_however_it_was_typed(tmp_path: Path) -> None:
    runs = points(tmp_path, {"optimizer.lr": 0.001, "run.seed": 1}, {"optimizer.lr": 0.001, "run.seed": 2})
    (tmp_path / "0" / "config.yaml").unlink()  # of a run that has only its command line the text counts
    (tmp_path / "0" / "overrides.yaml").write_text("overrides: ['optimizer.lr=1e-3', 'run.seed=1']\n")
    settings, _ = varied_settings([History.read(tmp_path / "0", "0"), runs[1]])
    assert [one.key for one in settings] == ["run.seed"]


def test_a_choice_stands_for_what_it_sets_and_an_edited_preset_is_seen(tmp_path: Path) -> None:
    runs = points(tmp_path, {"precision.name": "fp16", "model.width": 8}, {"precision.name": "bf16", "model.width": 9})
    for run, precision in zip(runs, ("fp16", "bf16"), strict=True):
        run.overrides[:] = [f"precision={precision}"]
    settings, _ = varied_settings(runs)
    assert [(one.name, one.texts) for one in settings] == [
        ("precision", ["fp16", "bf16"]),
        ("width", ["8", "9"]),
    ]


def test_what_another_experiment_sets_is_named_and_fills_no_columns(tmp_path: Path) -> None:
    runs = points(tmp_path, *({f"model.k{i}": n for i in range(20)} for n in (1, 2)))
    for run, experiment in zip(runs, ("digits", "gpt"), strict=True):
        run.overrides[:] = [f"experiment={experiment}"]
    settings, unshown = varied_settings(runs)
    assert [(one.name, one.texts) for one in settings] == [("experiment", ["digits", "gpt"])]
    assert sorted(one.key for one in unshown) == sorted(f"model.k{i}" for i in range(20))


def test_more_keys_than_a_table_takes_are_named(tmp_path: Path) -> None:
    settings, unshown = varied_settings(points(tmp_path, *({f"model.k{i}": n for i in range(20)} for n in (1, 2))))
    assert [one.name for one in settings] == [f"k{i}" for i in range(8)]
    assert sorted(one.key for one in unshown) == sorted(f"model.k{i}" for i in range(8, 20))


def test_of_a_long_value_the_end_is_shown_too(tmp_path: Path) -> None:
    runs = points(tmp_path, *({"data.train": f"/{'long/' * 40}{end}.tar"} for end in "ab"))
    (setting,), _ = varied_settings(runs)
    first, second = setting.short_texts
    assert first.endswith("/a.tar")
    assert second.endswith("/b.tar")
    assert len(first) == 31


def test_a_fraction_that_was_drawn_at_random_is_short(tmp_path: Path) -> None:
    (setting,), _ = varied_settings(points(tmp_path, *({"optimizer.lr": rate} for rate in (0.00028304094924, 1e-3))))
    assert setting.short_texts == ["0.000283", "0.001"]
    (seed,), _ = varied_settings(points(tmp_path / "seeds", {"run.seed": 123456}, {"run.seed": 2}))
    assert seed.short_texts == ["123456", "2"]


def test_a_run_without_a_config_has_no_settings_and_makes_none(tmp_path: Path) -> None:
    runs = points(tmp_path, {"run.seed": 1}, {"run.seed": 1})
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / ".lock").touch()
    assert varied_settings([*runs, History.read(tmp_path / "dead", "dead")]) == ([], [])
    other = point_of(tmp_path / "2", {"run.seed": 2})
    (setting,), _ = varied_settings([*runs, other, History.read(tmp_path / "dead", "dead")])
    assert setting.values == (1, 1, 2, ABSENT)
    assert setting.texts[-1] == ""


def test_the_metric_of_the_best_checkpoint_is_taken_if_all_agree_else_a_usual_one(tmp_path: Path) -> None:
    one = point_of(tmp_path / "1", {"run.seed": 1}, [0.5], best="eval/accuracy")
    waits = point_of(tmp_path / "2", {"run.seed": 2}, best="eval/f1")  # nothing to compare it by yet
    assert Goal.from_runs([waits, one]) == Goal("eval/accuracy", largest=True)
    loss = run_of(tmp_path / "3", [{"step": 1, "eval/loss": 2.0, "train/loss": 1.0}])
    loss.config.update({"checkpoint.best": "train/loss", "checkpoint.best_mode": None})
    assert Goal.from_runs([loss]) == Goal("train/loss", largest=False)
    assert Goal.from_runs([loss, one]) == Goal("eval/accuracy", largest=True)
    assert Goal.from_runs([run_of(tmp_path / "4", steady())]) == Goal("train/loss", largest=False)
    assert Goal.from_runs([waits]) is None
    loss.config.update({"checkpoint.best": "train/loss", "checkpoint.best_mode": "max"})
    assert Goal.from_runs([loss]) == Goal("train/loss", largest=True)
    loss.config.update({"checkpoint.best": "train/quality", "checkpoint.best_mode": None})
    assert Goal.from_runs([loss]) == Goal("eval/loss", largest=False)  # no direction, so the usual one


def test_the_direction_of_a_metric_is_that_of_the_best_checkpoint_else_by_name(tmp_path: Path) -> None:
    run = point_of(tmp_path / "1", {}, [0.5], best="eval/loss")
    found = {name: Goal.of(run, f"eval/{name}") for name in ("loss", "accuracy", "quality")}
    assert found == {"loss": Goal("eval/loss", False), "accuracy": Goal("eval/accuracy", True), "quality": None}
    run.config["checkpoint.best_mode"] = "max"  # of eval/loss only
    assert Goal.of(run, "eval/loss") == Goal("eval/loss", True)
    assert Goal.of(run, "eval/perplexity") == Goal("eval/perplexity", False)


def test_runs_that_were_measured_on_different_data_are_ranked_by_themselves(tmp_path: Path) -> None:
    digits, photos = {"data.eval": "/x/digits/test-*.tar"}, {"data.eval": ["/x/photos/a.tar", "/x/photos/b.tar"]}
    runs = [
        point_of(tmp_path / "1", photos, [0.9]),
        point_of(tmp_path / "2", digits | {"data.train": "/a.tar"}, [0.5]),
        point_of(tmp_path / "3", digits | {"data.train": "/b.tar"}, [0.6]),  # different training data may be compared
    ]
    (tmp_path / "waits").mkdir()
    (tmp_path / "waits" / ".job").touch()
    found = Comparison.from_runs([*runs, History.read(tmp_path / "waits", "waits")])
    assert found.headings == ["digits/test-*.tar", "photos/a.tar, photos/b.tar"]
    assert [[run.label for run in sweep.runs] for sweep in found.sweeps] == [["3", "2", "waits"], ["1"]]
    assert [sweep.is_ranked for sweep in found.sweeps] == [True, False]
    assert Comparison.from_runs(runs[1:]).headings == [""]


def test_data_are_the_same_wherever_they_lie_if_their_fingerprints_are(tmp_path: Path) -> None:
    def run(name: str, path: str, **status: Any) -> History:
        return point_of(tmp_path / name, {"data.eval": path}, [0.5], **status)

    first = run("1", "/x/test.tar", data={"train": "t", "eval": "e"})
    copied = run("2", "/y/test.tar", data={"train": "u", "eval": "e"})
    begins = run("3", "/y/test.tar")
    packed_again = run("4", "/x/test.tar", data={"train": "t", "eval": "f"})
    damaged = run("5", "/x/test.tar", data=["e"])
    groups = runs_by_data([first, copied, begins, packed_again])
    assert [(name, [run.label for run in group]) for name, group in groups] == [
        ("x/test.tar fingerprint e", ["1", "2", "3"]),
        ("x/test.tar fingerprint f", ["4"]),
    ]
    assert len(runs_by_data([first, damaged])) == 1


def test_data_that_code_makes_are_the_same_if_their_arguments_are(tmp_path: Path) -> None:
    def run(name: str, size: int) -> History:
        return point_of(
            tmp_path / name, {"data.train._target_": "my.Waves", "data.train.size": size}, data={"train": "t"}
        )

    groups = runs_by_data([run("1", 8), run("2", 9), run("3", 8)])
    assert [[run.label for run in group] for _, group in groups] == [["1", "3"], ["2"]]


def test_of_many_runs_each_data_have_some_that_are_looked_at(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / f"a{n}", {"data.eval": "/a.tar", "run.seed": n}, [n / 30]) for n in range(30)]
    runs += [point_of(tmp_path / f"b{n}", {"data.eval": "/b.tar", "run.seed": n}, [n / 30]) for n in range(2)]
    found = Comparison.from_runs(runs)
    assert [len(sweep.shown) for sweep in found.sweeps] == [5, 2]
    assert found.sweeps[0].selection == (
        "Curves and details are shown for 5 of 30 runs: the 3 best, the middle one and the last one by eval/accuracy."
    )


def test_the_best_value_is_finite_and_comes_with_its_step(tmp_path: Path) -> None:
    run = point_of(tmp_path / "1", {}, [0.3, None, 0.9, 0.9, 0.1])
    assert Goal("eval/accuracy", largest=True).best(run) == (0.9, 40.0)  # the latest, as checkpoint=best
    assert Goal("eval/accuracy", largest=False).best(run) == (0.1, 50.0)
    lost = point_of(tmp_path / "2", {}, [None, None])
    assert Goal("eval/accuracy", largest=True).best(lost) is None
    assert Goal("eval/accuracy", largest=True).cost(lost) == math.inf


def test_the_best_come_first_and_those_without_a_result_last(runs: list[History]) -> None:
    found = [best_of(run) for run in Sweep.from_runs(runs).runs]
    assert found == sorted(found, reverse=True)
    assert found.count(-1.0) == 3


def test_runs_whose_directories_dtrain_named_are_called_by_what_was_varied(tmp_path: Path) -> None:
    names = ("digits-0123abcc", "digits-0123abcd", "mine")
    varied = [{"optimizer.lr": rate, "run.seed": seed} for rate, seed in ((0.1, 1), (0.2, 1), (0.2, 2))]
    sweep = Sweep.from_runs(
        [point_of(tmp_path / name, point, [0.5]) for name, point in zip(names, varied, strict=True)]
    )
    assert [run.label for run in sweep.runs] == ["lr=0.1 seed=1", "lr=0.2 seed=1", "mine"]
    assert sweep.names == list(names)
    twice = [point_of(tmp_path / name, {"run.seed": 1}, [0.5]) for name in ("digits-0123abce", "digits-0123abcf")]
    assert [run.label for run in Sweep.from_runs(twice).runs] == ["digits-0123abce", "digits-0123abcf"]


def test_a_run_without_a_choice_has_the_default_one(tmp_path: Path) -> None:
    runs = points(tmp_path, {"precision.name": "fp32"}, {"precision.name": "bf16"})
    runs[0].overrides[:] = []
    runs[1].overrides[:] = ["precision=bf16"]
    (setting,), _ = varied_settings(runs)
    assert (setting.name, setting.texts) == ("precision", ["fp32", "bf16"])


def test_without_a_seed_that_was_varied_there_is_nothing_to_average(runs: list[History]) -> None:
    assert seed_groups(Sweep.from_runs([run for run in runs if run.label.endswith("-2")])) == []


def test_of_very_many_runs_the_best_the_middle_and_the_last_are_looked_at(tmp_path: Path) -> None:
    results = [n / 30 for n in range(30)]
    random.Random(0).shuffle(results)
    runs = [point_of(tmp_path / f"{n}", {"run.seed": n}, [result]) for n, result in enumerate(results)]
    sweep = Sweep.from_runs([*runs, point_of(tmp_path / "new", {"run.seed": 99})])
    assert [best_of(run) for run in sweep.shown] == [n / 30 for n in (29, 28, 27, 26, 25, 12, 0)]
    assert sweep.selection == (
        "Curves and details are shown for 7 of 31 runs: the 5 best, the middle one and the last one by eval/accuracy."
    )
    few = Sweep.from_runs(runs[:8])
    assert (few.shown, few.selection) == (few.runs, "")


def test_runs_that_differ_in_more_than_a_table_shows_are_not_averaged(tmp_path: Path) -> None:
    long = f"/{'long/' * 40}"
    for name, others in (
        ("values", [{"data.train": f"{long}{end}/{'x' * 40}.tar"} for end in "ab"]),
        ("keys", [{f"model.k{i}": n for i in range(20)} for n in (1, 2)]),
    ):
        points = [{"run.seed": seed} | other for other in others for seed in (1, 2)]
        runs = [point_of(tmp_path / name / str(place), point, [0.5]) for place, point in enumerate(points)]
        assert [group.runs for group in seed_groups(Sweep.from_runs(runs))] == [2, 2], name


def test_runs_that_left_no_config_are_no_group(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / str(seed), {"run.seed": seed}, [0.5]) for seed in (1, 2)]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        runs.append(History.read(tmp_path / name, name))
    assert [group.runs for group in seed_groups(Sweep.from_runs(runs))] == [2]


def test_seeds_are_averaged_over_finished_runs_with_a_result(runs: list[History]) -> None:
    groups = {group.values: group for group in seed_groups(Sweep.from_runs(runs))}
    assert {values: (len(group.best), group.runs) for values, group in groups.items()} == {
        ("0.0001",): (4, 4),
        ("0.001",): (2, 4),
        ("0.01",): (3, 4),
    }
    columns = {column.head: column.cells for column in seed_columns(Sweep.from_runs(runs))}
    place = columns["lr"].index("0.001")
    results = [best_of(run) for run in runs[6:8]]
    assert float(columns["best eval/accuracy: mean"][place]) == pytest.approx(sum(results) / 2, abs=1e-4)
    assert columns["seeds finished"][place] == "2 of 4"
    spread = next(column.cells for column in seed_columns(Sweep.from_runs(runs)) if column.head == "range")[place]
    assert list(map(float, spread.split(" to "))) == pytest.approx([min(results), max(results)], abs=1e-4)
