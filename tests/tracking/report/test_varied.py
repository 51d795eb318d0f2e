"""The columns of a sweep are what was varied, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dtrain.tracking.history import ABSENT, History
from dtrain.tracking.report.varied import short_names, varied
from tests.tracking.report.runs_for_tests import point_of

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


def test_keys_that_vary_are_named_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    shared = {"model.width": 8, "optimizer.name": "adamw", "run.name": "x", "tracker.mode": "offline"}
    runs = points(
        tmp_path,
        shared | {"optimizer.lr": 0.1, "run.seed": 1},
        shared | {"run.name": "y", "tracker.mode": "online", "optimizer.lr": 0.01, "run.seed": 1},
        shared | {"optimizer.lr": 0.01, "run.seed": 2},
    )
    settings, unshown = varied(runs)
    assert [(one.key, one.name, one.texts, one.is_seed) for one in settings] == [
        ("optimizer.lr", "lr", ["0.1", "0.01", "0.01"], False),
        ("run.seed", "seed", ["1", "1", "2"], True),
    ]
    assert unshown == []


def test_a_number_is_the_same_however_it_was_typed(tmp_path: Path) -> None:
    runs = points(tmp_path, {"optimizer.lr": 0.001, "run.seed": 1}, {"optimizer.lr": 0.001, "run.seed": 2})
    (tmp_path / "0" / "config.yaml").unlink()  # of a run that has only its command line the text counts
    (tmp_path / "0" / "overrides.yaml").write_text("overrides: ['optimizer.lr=1e-3', 'run.seed=1']\n")
    settings, _ = varied([History.read(tmp_path / "0", "0"), runs[1]])
    assert [one.key for one in settings] == ["run.seed"]


def test_a_choice_stands_for_what_it_sets_and_an_edited_preset_is_seen(tmp_path: Path) -> None:
    runs = points(tmp_path, {"precision.name": "fp16", "model.width": 8}, {"precision.name": "bf16", "model.width": 9})
    for run, precision in zip(runs, ("fp16", "bf16"), strict=True):
        run.overrides[:] = [f"precision={precision}"]
    settings, _ = varied(runs)
    assert [(one.name, one.texts) for one in settings] == [
        ("precision", ["fp16", "bf16"]),
        ("width", ["8", "9"]),
    ]


def test_what_another_experiment_sets_is_named_and_fills_no_columns(tmp_path: Path) -> None:
    runs = points(tmp_path, *({f"model.k{i}": n for i in range(20)} for n in (1, 2)))
    for run, experiment in zip(runs, ("digits", "gpt"), strict=True):
        run.overrides[:] = [f"experiment={experiment}"]
    settings, unshown = varied(runs)
    assert [(one.name, one.texts) for one in settings] == [("experiment", ["digits", "gpt"])]
    assert sorted(one.key for one in unshown) == sorted(f"model.k{i}" for i in range(20))


def test_more_keys_than_a_table_takes_are_named(tmp_path: Path) -> None:
    settings, unshown = varied(points(tmp_path, *({f"model.k{i}": n for i in range(20)} for n in (1, 2))))
    assert [one.name for one in settings] == [f"k{i}" for i in range(8)]
    assert sorted(one.key for one in unshown) == sorted(f"model.k{i}" for i in range(8, 20))


def test_of_a_long_value_the_end_is_shown_too(tmp_path: Path) -> None:
    runs = points(tmp_path, *({"data.train": f"/{'long/' * 40}{end}.tar"} for end in "ab"))
    (setting,), _ = varied(runs)
    first, second = setting.brief
    assert first.endswith("/a.tar")
    assert second.endswith("/b.tar")
    assert len(first) == 59


def test_a_run_without_a_config_has_no_settings_and_makes_none(tmp_path: Path) -> None:
    runs = points(tmp_path, {"run.seed": 1}, {"run.seed": 1})
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / ".lock").touch()
    assert varied([*runs, History.read(tmp_path / "dead", "dead")]) == ([], [])
    other = point_of(tmp_path / "2", {"run.seed": 2})
    (setting,), _ = varied([*runs, other, History.read(tmp_path / "dead", "dead")])
    assert setting.values == (1, 1, 2, ABSENT)
    assert setting.texts[-1] == ""
