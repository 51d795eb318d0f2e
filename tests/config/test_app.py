from __future__ import annotations

import io
import sys
from contextlib import suppress

import pytest

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError, Explained, PeerFailed


def compose(*arguments: str) -> Composed:
    got: list[Composed] = []
    app.run(got.append, arguments)
    return got[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app.run(lambda composed: app.resolved(composed.cfg), arguments)
    assert ended.value.code != 0
    return capsys.readouterr().err


def test_presets_and_overrides_make_one_typed_config() -> None:
    composed = compose("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")
    assert composed.experiment == "digits"
    assert composed.cfg.precision.name == "bf16"
    assert composed.cfg.optimizer.lr == 0.5
    assert composed.cfg.train.max_steps == 7
    assert composed.overrides == ("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train.max_step=3"], ["train.max_step", "'max_steps'"]),
        (["train.max_steps=many"], ["train.max_steps", "'many'", "int"]),
        (["precision=fp17"], ["precision=fp17", "'fp16'", "bf16, fp16, fp32, tf32"]),
        (["experiment=digit"], ["experiment=digit", "'digits'"]),
        (["experimnt=digits"], ["experimnt", "'experiment'"]),
        (["experiment=digits", "optimizer.lrr=1"], ["optimizer.lrr", "'lr'", "+optimizer.lrr"]),
        (["+train.foo=1"], ["train.foo", "no such key"]),
        (["data.train=a-{0..3}.tar"], ["data.train=a-{0..3}.tar", "quote"]),
        (["data.train=a-0.tar", "data.train=a-1.tar"], ["data.train", "more than once", "quote"]),
        (["precision=16"], ["precision=16", "Valid: bf16, fp16, fp32, tf32"]),
        (["precision=16,32", "--multirun"], ["precision=16,32", "Valid: bf16, fp16, fp32, tf32"]),
        (["=3"], ["must be a string"]),
        (["--precision=bf16"], ["--precision=bf16", "precision=VALUE"]),
        (["-precision=bf16"], ["-precision=bf16", "precision=VALUE"]),
        (["experiment=train"], ["experiment=train: there is no such experiment", "digits"]),
        (["experiment=[digits,nope]"], ["experiment=nope: there is no such experiment", "digits"]),
        (["experiment=digits", "+experiment=line"], ["experiment is chosen twice", "experiment=[a,b]"]),
        (["experiment=digits", "~data.eval"], ["every config has data.eval", "data.eval=VALUE"]),
        (["experiment=digits", "~train"], ["every config has train", "train.global_batch_size"]),
        (["train=null"], ["train: got null. Set keys below it, such as train.global_batch_size"]),
        (["train.log_every=null"], ["train.log_every: got null. Want int."]),
        (["max_steps=3"], ["max_steps", "Did you mean train.max_steps?"]),
        (["experiment=digits", "train.lr=1"], ["train.lr", "Did you mean optimizer.lr?"]),
        (["train=3"], ["train: got 3", "train.global_batch_size"]),
        (["run.dir=~/runs/1"], ["run.dir=~/runs/1", "cannot be read. Write", "quote"]),
        (["train.max_epochs=many"], ["train.max_epochs", "or null."]),
        (["precision.keep_fp32=head"], ["precision.keep_fp32: ", "tuple. Want list[str]."]),
        (["--config-name=digits"], ["experiment=digits"]),
        (["--config-path=/usr"], ["--config-path", "--config-dir adds"]),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    message = refused(capsys, *arguments)
    assert message.startswith("dtrain: error: ")
    assert "Traceback" not in message
    for part in parts:
        assert part in message


def test_a_preset_file_with_a_misspelt_key_is_named(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  max_step: 3\n")
    message = refused(capsys, "--config-dir", str(tmp_path), "experiment=mine")
    assert "experiment/mine.yaml" in message
    assert "'max_steps'" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  max_steps: 3\n", ["Make `# @package _global_` its first line"]),
        (
            "# mine\n# @package _global_\ndefaults:\n  - override /data: digits\n",
            ["`# @package _global_` its first line"],
        ),
        ("# @package _global_\ndefaults:\n  - override /dta: digits\n", ["override /dta", "'data'"]),
        ("# @package _global_\ndefaults:\n  - override /data: digit\n", ["data=digit", "'digits'"]),
        ("# @package _global_\ndefaults:\n  - data: digits\n", ["Write `- override /data: digits`"]),
        ("# @package _global_\ndefaults:\n  - /model: vit\n", ["model is chosen twice", "- override /model: vit"]),
        ("# @package _global_\ndefaults:\n  - digit\n", ["no experiment/digit.yaml", "'digits'"]),
        ("# @package _global_\nexperiment: digits\n", ["a group, not a key", "- experiment/NAME"]),
        ("# @package _global_\ntrain: 3\n", ["train: got 3, want keys below it"]),
        ("# @package _global_\ntrain:\n  max_steps: many\n", ["train.max_steps: Value 'many'", "Want int"]),
        ("# @package _global_\ntrain:\n\tmax_steps: 3\n", ["no YAML", "line 3, column 1"]),
        ("# @package _global_\n- train\n", ["holds a list"]),
    ],
)
def test_what_is_wrong_in_a_preset_is_said_with_its_file(
    tmp_path, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    message = refused(capsys, "--config-dir", str(tmp_path), "experiment=mine")
    assert message.startswith("dtrain: error: ")
    assert "Traceback" not in message
    assert "mine.yaml" in message or "override" in message or "there is no such data" in message
    for part in parts:
        assert part in message


def test_a_config_dir_that_is_the_group_itself_is_told(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\n")
    assert "wants the folder in which it is experiment/mine.yaml" in refused(
        capsys, "--config-dir", str(tmp_path), "experiment=mine"
    )


def test_keys_of_a_users_own_group_are_known_to_the_hint(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: torch.nn.Linear\nin_features: 3\n")
    message = refused(capsys, "--config-dir", str(tmp_path), "model=mine", "model.in_feature=4")
    assert "Did you mean 'in_features'?" in message


def test_a_preset_with_a_name_like_a_number_has_to_be_quoted(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "2024.yaml").write_text("# @package _global_\ntrain:\n  max_steps: 3\n")
    arguments = ["--config-dir", str(tmp_path)]
    assert """quoted twice: 'experiment="2024"'""" in refused(capsys, *arguments, "experiment=2024")
    assert compose(*arguments, 'experiment="2024"').cfg.train.max_steps == 3


def test_options_may_stand_between_keys(tmp_path) -> None:
    composed = compose("experiment=digits", "--config-dir", str(tmp_path), "train.max_steps=3")
    assert composed.config_dirs == (str(tmp_path),)
    assert composed.overrides == ("experiment=digits", "train.max_steps=3")


def test_own_presets_come_from_a_config_dir(tmp_path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  max_steps: 3\n")
    composed = compose("--config-dir", str(tmp_path), "experiment=mine")
    assert composed.cfg.train.max_steps == 3
    assert composed.config_dirs == (str(tmp_path),)


def test_an_empty_command_line_lists_the_experiments() -> None:
    with pytest.raises(ConfigError, match="digits"):
        app.require_choice(compose())


def test_an_experiment_without_data_asks_for_data_alone() -> None:
    with pytest.raises(ConfigError, match=r"^data.train is not set: name your shards"):
        app.require_choice(compose("experiment=imagenet_resnet50"))


def test_an_unset_environment_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.delenv("DTRAIN_CIFAR10", raising=False)
    monkeypatch.delenv("DTRAIN_TEST_CIFAR10", raising=False)
    assert "DTRAIN_CIFAR10" in refused(capsys, "experiment=cifar10")


def test_an_output_that_lacks_a_letter_ends_no_run(monkeypatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    app.run(lambda composed: print("runs/caf\u00e9 and caf\udce9", flush=True), ["experiment=digits"])
    assert shown.getvalue() == b"runs/caf\\xe9 and caf\\udce9\n"


def test_only_rank_zero_explains(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert refused(capsys, "precision=fp17") == ""


def test_a_bug_shows_its_traceback_on_the_rank_that_has_it(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def main(composed: Composed) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        app.run(main, ["experiment=digits"])
    assert ended.value.code == app.EXIT_FAILED
    message = capsys.readouterr().err
    assert message.startswith("dtrain: rank 1 failed\nTraceback")
    assert "ZeroDivisionError: a bug" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_meets_alone_it_says_itself_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch, rank: int
) -> None:
    def main(composed: Composed) -> None:
        raise Explained("the disk is full. Make room.")

    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        app.run(main, ["experiment=digits"])
    assert ended.value.code == app.EXIT_FAILED
    assert capsys.readouterr().err == f"dtrain: error: {'rank 1: ' * rank}the disk is full. Make room.\n"


def test_what_another_rank_has_said_in_full_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(composed: Composed) -> None:
        raise PeerFailed("rank 1 failed: DataError: " + "a long story, " * 50 + "\nand more")

    with pytest.raises(SystemExit):
        app.run(main, ["experiment=digits"])
    shown = capsys.readouterr().err
    assert shown.startswith("dtrain: rank 0 stops: rank 1 failed: DataError: a long story")
    assert len(shown) < 160


@pytest.mark.parametrize("option", ["--help", "--cfg=job", "--info=defaults"])
def test_hydra_s_own_options_work(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with suppress(SystemExit):
        app.run(lambda composed: None, [*option.split("="), "experiment=digits"])
    assert "digits" in capsys.readouterr().out
