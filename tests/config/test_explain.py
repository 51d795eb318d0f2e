"""What Hydra refuses is explained with the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.command_lines import assert_not_composed, compose

PRECISIONS = "Valid: bf16, fp16, fp32, tf32"


@pytest.mark.parametrize(
    ("arguments", "key", "remedy"),
    [
        # a misspelt key
        (["train.max_step=3"], "train.max_step", "'max_steps'"),
        (["+train.foo=1"], "train.foo", "Valid: "),
        (["experimnt=digits"], "experimnt", "'experiment'"),
        (["experiment=digits", "optimizer.lrr=1"], "optimizer.lrr", "'lr'"),
        (["experiment=digits", "optimizer.lrr=1"], "optimizer.lrr", "Valid: _target_, amsgrad"),
        (["data=digits", "model.width=3"], "model.width", "model=NAME"),
        # a key in the wrong group
        (["max_steps=3"], "max_steps", "Did you mean train.max_steps?"),
        (["experiment=digits", "train.lr=1"], "train.lr", "Did you mean optimizer.lr?"),
        # an unknown preset
        (["precision=fp17"], "precision=fp17", "'fp16'"),
        (["precision=fp17"], "precision=fp17", PRECISIONS),
        (["experiment=digit"], "experiment=digit", "'digits'"),
        (["experiment=train"], "experiment=train", "digits"),
        (["experiment=[digits,nope]"], "experiment=nope", "digits"),
        (["precision=16"], "precision=16", PRECISIONS),
        (["task=null"], "task=null", "task._target_=package.Class"),
        (["schedule=null"], "schedule=null", "Valid: constant, cosine"),
        (["experiment=digits", "+my_note=hello"], "my_note", "vars.my_note=..."),
        (["experiment=digits", "+experiment=line"], "experiment", ""),
        (["--config-name=digits"], "digits", ""),
        (["experiment=digits", "~data.eval"], "~data.eval", "data.eval=null"),
        (["experiment=digits", "~train"], "~train", "Set it"),
        (["experiment=digits", "~model", "+model._target_=tests.toys.Net"], "~model", "model._target_="),
        # a wrong type or value
        (["train.max_steps=many"], "train.max_steps: Value 'many'", "Want int or null."),
        (["train.log_every=null"], "train.log_every: got null", "Want int."),
        (["precision.keep_fp32=head"], "precision.keep_fp32", "Want list[str]."),
        (["train=3"], "train: got 3", "train.global_batch_size"),
        (["train=null"], "train: got null", "train.global_batch_size"),
        # an override that cannot be parsed, or that the shell expanded
        (["data.train=a-{0..3}.tar"], "data.train=a-{0..3}.tar", "quote"),
        (["run.dir=~/runs/1"], "run.dir=~/runs/1", "quote"),
        (["data.train=a-0.tar", "data.train=a-1.tar"], "data.train is set more than once", "quote"),
        (["train.max_steps=1", "train.max_steps=2"], "train.max_steps=1 and train.max_steps=2", "Keep one"),
        (["=3"], "string", ""),
        # several values without -m
        (["experiment=digits", "optimizer.lr=1e-3,1e-2"], "optimizer.lr=1e-3,1e-2", "needs -m"),
        (["data.train=a.tar,b.tar"], "data.train=a.tar,b.tar", "data.train=[a.tar,b.tar]"),
        # an option where a key is meant
        (["--precision=bf16"], "--precision=bf16", "precision=VALUE"),
        (["-precision=bf16"], "-precision=bf16", "precision=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], key: str, remedy: str
) -> None:
    assert_not_composed(capsys, arguments, key, remedy)


GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        (f"{GLOBAL}train:\n  max_step: 3\n", "experiment/mine.yaml: train.max_step", "'max_steps'"),
        (f"{GLOBAL}train:\n  max_steps: many\n", "experiment/mine.yaml: train.max_steps: Value 'many'", "Want int"),
        (f"{GLOBAL}train: 3\n", "mine.yaml: train: got 3", "train.global_batch_size"),
        (f"{GLOBAL}experiment: digits\n", "mine.yaml: experiment is a group", "- experiment/NAME"),
        (f"{GLOBAL}train:\n\tmax_steps: 3\n", "mine.yaml", "line 3, column 1"),
        (f"{GLOBAL}- train\n", "mine", ""),
        ("train:\n  max_steps: 3\n", "mine.yaml", "Make `# @package _global_` its first line"),
        (
            f"# mine\n{GLOBAL}defaults:\n  - override /data: digits\n",
            "mine.yaml",
            "Make `# @package _global_` its first",
        ),
        (f"{GLOBAL}defaults:\n  - override /dta: digits\n", "experiment/mine", "'dta'"),
        (f"{GLOBAL}defaults:\n  - override /data: digit\n", "data=digit", "'digits'"),
        (f"{GLOBAL}defaults:\n  - data: digits\n", "experiment/data/digits", ""),
        (f"{GLOBAL}defaults:\n  - /model: vit\n", "model", "override model"),
        (f"{GLOBAL}defaults:\n  - digit\n", "mine.yaml: experiment=digit", "'digits'"),
    ],
)
def test_a_wrong_preset_is_refused_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, key: str, remedy: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert_not_composed(capsys, ["--config-dir", str(tmp_path), "experiment=mine"], key, remedy)


def test_keys_of_a_users_own_preset_are_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: torch.nn.Linear\nin_features: 3\n")
    arguments = ["--config-dir", str(tmp_path), "model=mine", "model.in_feature=4"]
    assert_not_composed(capsys, arguments, "model.in_feature", "Did you mean 'in_features'?")


def test_a_preset_named_like_a_number_has_to_be_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "2024.yaml").write_text(f"{GLOBAL}train:\n  max_steps: 3\n")
    arguments = ["--config-dir", str(tmp_path)]
    assert_not_composed(
        capsys, [*arguments, "experiment=2024"], "experiment=2024", """quoted twice: 'experiment="2024"'"""
    )
    assert compose(*arguments, 'experiment="2024"').cfg.train.max_steps == 3


def test_an_unset_environment_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRAIN_CIFAR10", raising=False)
    monkeypatch.delenv("DTRAIN_TEST_CIFAR10", raising=False)
    assert_not_composed(capsys, ["experiment=cifar10"], "DTRAIN_CIFAR10", "Set it")
