from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dtrain.config.errors import ConfigError
from dtrain.config.renamed_keys import RENAMED_KEYS
from dtrain.config.run import Run, _digest, recompose, take, without_secrets
from tests.config.command_lines import compose
from tests.refusals import refused


def compose_run(*arguments: str) -> Run:
    return Run.of(compose("experiment=digits", *arguments))


def test_the_default_name_is_the_experiment_and_a_hash_of_what_makes_the_result() -> None:
    name = compose_run().name
    assert name.startswith("digits-")
    assert compose_run("train.max_steps=5").name == name
    assert compose_run("tracker=none").name == name
    assert compose_run("launch=slurm").name == name
    assert compose_run("optimizer.lr=0.1").name != name
    assert compose_run("precision=bf16").name != name


def test_what_is_saved_composes_the_same_run_again(tmp_path: Path) -> None:
    run = compose_run(f"run.dir={tmp_path}", "optimizer.lr=0.1", "precision=fp16")
    run.save()
    again = Run.of(compose(*recompose([f"run.dir={tmp_path}"])))
    assert again.config == run.config
    changed = Run.of(compose(*recompose([f"run.dir={tmp_path}", "precision=bf16"])))
    assert changed.config["precision"]["name"] == "bf16"
    assert changed.config["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize("other", ["model.width=8", "task.label_smoothing=0.1", "optimizer=sgd", "run.seed=1"])
def test_another_run_s_directory_is_refused_with_the_difference(tmp_path: Path, other: str) -> None:
    compose_run(f"run.dir={tmp_path}").save()
    with pytest.raises(ConfigError, match="another run") as raised:
        compose_run(f"run.dir={tmp_path}", other).changes()
    assert " -> " in str(raised.value)


def test_other_changes_are_allowed_and_listed(tmp_path: Path) -> None:
    compose_run(f"run.dir={tmp_path}").save()
    assert compose_run(f"run.dir={tmp_path}").changes() == []
    changes = compose_run(f"run.dir={tmp_path}", "train.max_steps=9", "optimizer.lr=0.5").changes()
    assert "train.max_steps: null -> 9" in changes
    assert any(change.startswith("optimizer.lr: ") for change in changes)


def test_no_secret_reaches_the_run_directory(tmp_path: Path) -> None:
    run = compose_run(f"run.dir={tmp_path}", "+model.api_key=hunter2", "+task.auth.token=hunter3")
    run.save()
    written = "".join(path.read_text() for path in tmp_path.glob("*.yaml"))
    assert "hunter" not in written
    assert without_secrets({"a": {"password": "x", "tokens_per_batch": 3}}) == {
        "a": {"password": "<hidden>", "tokens_per_batch": 3}
    }


def test_no_secret_of_a_url_reaches_the_run_directory(tmp_path: Path) -> None:
    signed = "https://host/train-{0..1}.tar?X-Amz-Date=1&X-Amz-Signature=hunter2"
    run = compose_run(f"run.dir={tmp_path}", f"data.train='{signed}'", "data.eval='ftp://me:hunter3@host/a.tar'")
    run.save()
    written = "".join(path.read_text() for path in tmp_path.glob("*.yaml"))
    assert "hunter" not in written
    assert "https://host/train-{0..1}.tar?X-Amz-Date=1&X-Amz-Signature=<hidden>" in written
    assert "ftp://<hidden>@host/a.tar" in written


def test_an_override_is_kept_as_typed_not_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE", "hunter4")
    run = compose_run("tracker.entity=${oc.env:PRIVATE}")
    assert run.config["tracker"]["entity"] == "hunter4"
    assert run.overrides == ("experiment=digits", "tracker.entity=${oc.env:PRIVATE}")


def test_a_directory_with_a_damaged_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    with refused(ConfigError, "config.yaml"):
        compose_run(f"run.dir={tmp_path}").changes()


def test_the_saved_config_is_resolved(tmp_path: Path) -> None:
    compose_run(f"run.dir={tmp_path}").save()
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert "${" not in saved["data"]["train"]


def test_recomposing_needs_a_run(tmp_path: Path) -> None:
    with refused(ConfigError, "run.dir"):
        recompose([])
    with refused(ConfigError, "not a run directory"):
        recompose([f"run.dir={tmp_path}"])


def test_an_entry_point_s_own_options_are_taken_out() -> None:
    assert take(["checkpoint=best", "precision=bf16"], checkpoint="", weights="") == (
        {"checkpoint": "best", "weights": ""},
        ["precision=bf16"],
    )


# -- runs of earlier versions, whose keys had other names


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
@pytest.mark.parametrize("prefix", ["", "++"])
def test_a_run_started_with_an_old_key_continues_unchanged(tmp_path: Path, prefix: str, old: str, new: str) -> None:
    run = compose_run(f"run.dir={tmp_path}", f"{prefix}{new}=fp32")
    run.save()
    for name in ("config.yaml", "overrides.yaml"):
        text = (tmp_path / name).read_text()
        short_old, short_new = (key.rpartition(".")[2] for key in (old, new))
        (tmp_path / name).write_text(text.replace(f"{short_new}:", f"{short_old}:").replace(f"{new}=", f"{old}="))
        assert new not in (tmp_path / name).read_text()
    again = Run.of(compose(*recompose([f"run.dir={tmp_path}"])))
    assert again.config == run.config
    assert again.changes() == []
    other = Run.of(compose(*recompose([f"run.dir={tmp_path}", f"{new}=bf16"])))
    assert other.changes() == [f'{new}: "fp32" -> "bf16"']


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_renamed_key_does_not_change_the_default_name_of_a_run(old: str, new: str) -> None:
    section = new.partition(".")[0]
    before, now = (
        {"train": {}, "data": {}, section: {key.rpartition(".")[2]: "fp32", "other": 1}} for key in (old, new)
    )
    assert _digest(before) == _digest(now)
