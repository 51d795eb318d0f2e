from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import yaml

from dtrain.command_line import run
from dtrain.errors import ConfigError
from dtrain.runs.recompose import recompose, take
from dtrain.runs.run_dir import save_run
from dtrain.runs.run_spec import WITHOUT_EFFECT_ON_THE_RESULT, RunSpec, _digest, config_without_secrets, refuse_hidden
from tests.config.command_lines import compose
from tests.refusals import refused


def compose_run(*arguments: str) -> RunSpec:
    return RunSpec.from_composed(compose("experiment=digits", *arguments))


@pytest.mark.slow
def test_the_default_name_is_the_experiment_and_a_hash_of_what_makes_the_result() -> None:
    name = compose_run().name
    assert name.startswith("digits-")
    another = ("run.seed=1", "train.max_steps=5", "train.max_epochs=3", "optimizer.lr=0.1", "precision=bf16")
    another += ("train.freeze=['0']", "train.freeze=[{patterns: ['0'], until: 5}]")
    another += (
        "optimizer.groups={head: {patterns: ['8'], lr: 2}}",
        "optimizer.groups={head: {patterns: ['8'], lr: 3}}",
    )
    names = [name, *(compose_run(override).name for override in another)]
    assert len(set(names)) == len(names)


def test_keys_without_effect_on_the_result_exist_and_are_not_in_the_name() -> None:
    config = compose_run().config
    for key in WITHOUT_EFFECT_ON_THE_RESULT:
        changed = copy.deepcopy(config)
        *sections, name = key.split(".")
        section = functools.reduce(dict.__getitem__, sections, changed)
        assert name in section
        section[name] = "changed"
        assert _digest(changed) == _digest(config)
    assert _digest(config | {"precision": {"name": "bf16"}}) != _digest(config)


def test_metrics_are_part_of_the_result_and_may_change_on_resume(tmp_path: Path) -> None:
    """The weights do not depend on them, but the best checkpoint may, and others shall see how it was chosen."""
    f1 = "train.metrics={f1: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10, average: AVERAGE}}"
    macro, micro = f1.replace("AVERAGE", "macro"), f1.replace("AVERAGE", "micro")
    assert len({compose_run(*arguments).name for arguments in ((), (macro,), (micro,))}) == 3
    assert "train.metrics" not in WITHOUT_EFFECT_ON_THE_RESULT
    directory = f"run.dir={tmp_path / 'run'}"
    save_run(compose_run(directory, macro))
    assert compose_run(directory, macro).changes() == []
    assert compose_run(directory, micro).changes() == ['train.metrics.f1.average: "macro" -> "micro"']
    assert compose_run(directory, macro).published()["train"]["metrics"]["f1"]["average"] == "macro"


def test_the_name_does_not_depend_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for name, value in (("DTRAIN_CACHE", "cache"), ("DTRAIN_CIFAR10", "cifar10"), ("WORLD_SIZE", None)):
            monkeypatch.setenv(name, str(tmp_path / place / value) if value else str(len(names) + 1))
        monkeypatch.chdir(tmp_path / place)
        runs = [RunSpec.from_composed(compose(f"experiment={name}")) for name in ("digits", "cifar10_cpu")]
        assert place in runs[0].config["data"]["train"]
        names.add(tuple(run.name for run in runs))
    assert len(names) == 1


def test_a_key_of_a_later_version_does_not_change_the_name_while_it_has_its_default() -> None:
    config = compose_run().config
    older = config | {"train": {key: value for key, value in config["train"].items() if key != "hooks"}}
    del older["parallel"]
    assert _digest(older) == _digest(config)
    assert _digest(older | {"parallel": {"static_graph": True}}) != _digest(config)


def test_keys_of_a_mapping_may_be_of_several_types() -> None:
    names = [compose_run(f"+model.names={names}").name for names in ("{1:a,b:c}", "{b:c,1:a}", "{1:a,b:d}")]
    assert names[0] == names[1] != names[2]
    assert compose_run("+train.hooks=[{_target_:a.B,names:{1:a,b:c}}]").name.startswith("digits-")


@pytest.mark.slow
def test_a_run_with_a_directory_of_its_own_has_its_name() -> None:
    assert compose_run("run.dir=runs/mine").name == "mine"
    assert compose_run("run.dir=runs/mine/.").name == "mine"
    assert compose_run("run.dir=runs/mine", "run.name=other").name == "other"
    named = compose_run("run.name=other")
    assert (named.name, named.dir) == ("other", Path.cwd() / "runs" / "other")


def test_what_is_saved_composes_the_same_run_again(tmp_path: Path) -> None:
    run = compose_run(f"run.dir={tmp_path}", "optimizer.lr=0.1", "precision=fp16")
    save_run(run)
    again = RunSpec.from_composed(compose(*recompose([f"run.dir={tmp_path}", "--trust"])))
    assert again.config == run.config
    changed = RunSpec.from_composed(compose(*recompose([f"run.dir={tmp_path}", "precision=bf16"])))
    assert changed.config["precision"]["name"] == "bf16"
    assert changed.config["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize("other", ["model.width=8", "task.label_smoothing=0.1", "optimizer=sgd", "run.seed=1"])
def test_another_run_s_directory_is_refused_with_the_difference(tmp_path: Path, other: str) -> None:
    save_run(compose_run(f"run.dir={tmp_path}"))
    with pytest.raises(ConfigError, match=r"run\.dir") as raised:
        compose_run(f"run.dir={tmp_path}", other).changes()
    assert " -> " in str(raised.value)


def test_other_changes_are_allowed_and_listed(tmp_path: Path) -> None:
    save_run(compose_run(f"run.dir={tmp_path}"))
    assert compose_run(f"run.dir={tmp_path}").changes() == []
    changes = compose_run(f"run.dir={tmp_path}", "train.max_steps=9", "optimizer.lr=0.5").changes()
    assert "train.max_steps: null -> 9" in changes
    assert any(change.startswith("optimizer.lr: ") for change in changes)
    assert compose_run(f"run.dir={tmp_path}", "run.name=x", "tracker=none", "train.log_every=3").changes() == []


def test_no_secret_reaches_the_run_directory(tmp_path: Path) -> None:
    run = compose_run(f"run.dir={tmp_path}", "+model.api_key=hunter2", "+task.auth.token=hunter3")
    save_run(run)
    written = "".join(path.read_text() for path in tmp_path.glob("*.yaml"))
    assert "hunter" not in written
    assert config_without_secrets({"a": {"password": "x", "tokens_per_batch": 3}, "auth": ["me", 5, {"b": "x"}]}) == {
        "a": {"password": "<hidden>", "tokens_per_batch": 3},
        "auth": ["<hidden>", 5, {"b": "<hidden>"}],
    }


#: Overrides, and what is saved of them.
SECRETS = [
    ("+vars.storage.token=hunter2", "+vars.storage.token='<hidden>'"),
    (
        "+vars.storage={headers: {Authorization: Bearer hunter2, X-Trace: true}, retries: 3}",
        "+vars.storage={headers: {Authorization: '<hidden>', X-Trace: true}, retries: 3}",
    ),
    ("+vars.storage.auth=[me,hunter2]", "+vars.storage.auth=['<hidden>', '<hidden>']"),
    ("tracker.project=the-hunter2hunter2-project", "tracker.project='the-<hidden>-project'"),
    ("+vars.storage.token=${oc.env:MY_TOKEN}", None),
    ("+vars.storage.headers={Authorization: 'Bearer ${oc.env:MY_TOKEN}'}", None),
    ("+model.class_token=true", None),
    ("optimizer.lr=0.1", None),
]


@pytest.mark.parametrize(("override", "saved"), SECRETS)
def test_a_secret_is_saved_neither_by_its_key_nor_by_its_value_and_has_to_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, saved: str | None
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    run = compose_run(f"run.dir={tmp_path}", override)
    save_run(run)
    assert "hunter2" not in "".join(path.read_text() for path in tmp_path.glob("*.yaml"))
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text())["overrides"][-1] == (saved or override)
    again = RunSpec.from_composed(compose(*recompose([f"run.dir={tmp_path}"])))
    assert run.changes() == []
    if saved is None:
        refuse_hidden(again.config)
        assert again.config == run.config
        assert again.changes() == []
    else:
        with refused(ConfigError, override.lstrip("+").partition("=")[0], "<hidden>", "${oc.env:NAME}"):
            refuse_hidden(again.config)


def test_a_secret_that_changes_is_no_change_of_the_run(tmp_path: Path) -> None:
    save_run(compose_run(f"run.dir={tmp_path}", "+model.api_key=hunter2", "data.train='https://me:hunter2@host/a.tar'"))
    now = ("+model.api_key=other3", "data.train='https://me:other3@host/a.tar'")
    assert compose_run(f"run.dir={tmp_path}", *now).changes() == []
    (change,) = compose_run(f"run.dir={tmp_path}", now[0], "data.train='https://me:other3@host/b.tar'").changes()
    assert "other3" not in change


@pytest.mark.slow
def test_how_a_start_resumes_is_not_part_of_the_saved_command_line(tmp_path: Path) -> None:
    save_run(compose_run(f"run.dir={tmp_path}", "run.resume=never"))
    assert RunSpec.from_composed(compose(*recompose([f"run.dir={tmp_path}"]))).config["run"]["resume"] == "auto"
    assert (
        RunSpec.from_composed(compose(*recompose([f"run.dir={tmp_path}", "run.resume=must"]))).config["run"]["resume"]
        == "must"
    )


@pytest.mark.parametrize("option", [["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--info", "config"]])
def test_no_secret_is_printed_with_the_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    secrets = ("experiment=digits", "+vars.auth=hunter3", "tracker.project=${oc.env:MY_TOKEN}", "+model.token=5")
    run(lambda composed: None, [*secrets, *option])
    printed = capsys.readouterr().out
    assert "hunter" not in printed
    assert "auth: <hidden>" in printed
    assert "token: 5" in printed
    assert ("project: ${oc.env:MY_TOKEN}" in printed) == ("--resolve" not in option)


def test_tokens_that_are_no_secrets_are_saved(tmp_path: Path) -> None:
    arguments = ("task=language_modelling", "task.tokens=rows", "+model.class_token=true", "+model.max_tokens=77")
    save_run(compose_run(f"run.dir={tmp_path}", *arguments))
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["task"]["tokens"] == "rows"
    assert recompose([f"run.dir={tmp_path}"])[1:-1] == list(arguments)


def test_no_secret_of_a_url_reaches_the_run_directory(tmp_path: Path) -> None:
    signed = "https://host/train-{0..1}.tar?X-Amz-Date=1&X-Amz-Signature=hunter2"
    run = compose_run(f"run.dir={tmp_path}", f"data.train='{signed}'", "data.eval='ftp://me:hunter3@host/a.tar'")
    save_run(run)
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
    save_run(compose_run(f"run.dir={tmp_path}"))
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


def test_ranks_with_other_overrides_than_rank_0_are_refused() -> None:
    run = compose_run("optimizer.lr=0.1")
    run.require_same_overrides(list(run.overrides))
    with refused(ConfigError, "rank 0", "optimizer.lr=0.1", "same command"):
        run.require_same_overrides([override for override in run.overrides if "lr" not in override])


def test_the_message_about_other_overrides_has_no_secret() -> None:
    run = compose_run("+model.api_key=abcsecret")
    with refused(ConfigError, "rank 0", "model.api_key") as raised:
        run.require_same_overrides([override for override in run.overrides if "api_key" not in override])
    assert "abcsecret" not in str(raised.value)
