from __future__ import annotations

import io
import subprocess
import sys
from contextlib import suppress

import pytest

from dtrain.command_line import EXIT_FAILED, run
from dtrain.config.compose import Composed, require_choice
from dtrain.errors import ConfigError, Explained, PeerFailed
from tests.config.command_lines import assert_not_composed, compose
from tests.refusals import refused


def test_presets_and_overrides_make_one_typed_config() -> None:
    composed = compose("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")
    assert composed.experiment == "digits"
    assert composed.cfg.precision.name == "bf16"
    assert composed.cfg.optimizer["lr"] == 0.5
    assert composed.cfg.train.max_steps == 7
    assert composed.overrides == ("experiment=digits", "precision=bf16", "optimizer.lr=0.5", "train.max_steps=7")


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
        require_choice(compose())


def test_an_experiment_without_data_asks_for_data_alone() -> None:
    with refused(ConfigError, "data.train", "is not set"):
        require_choice(compose("experiment=imagenet_resnet50"))


def test_a_character_that_the_terminal_lacks_does_not_end_the_run(monkeypatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    run(lambda composed: print("runs/caf\u00e9 and caf\udce9", flush=True), ["experiment=digits"])
    assert shown.getvalue() == b"runs/caf\\xe9 and caf\\udce9\n"


def test_only_rank_zero_explains(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit):
        run(lambda composed: None, ["precision=fp17"])
    assert capsys.readouterr().err == ""


def test_standard_output_and_error_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    run(lambda composed: written.append(sys.stdout.write("a") + sys.stderr.write("b")), ["experiment=digits"])
    sys.stdout.close()
    sys.stderr.close()
    assert written == [2]


def test_a_bug_shows_its_traceback_on_the_rank_that_has_it(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def main(composed: Composed) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        run(main, ["experiment=digits"])
    assert ended.value.code == EXIT_FAILED
    message = capsys.readouterr().err
    assert message.startswith("dtrain: rank 1 failed\nTraceback")
    assert "ZeroDivisionError: a bug" in message


def test_a_traceback_begins_with_the_code_of_the_user_and_the_last_line_says_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(composed: Composed) -> None:
        error = KeyError("here")
        error.last_line = "dtrain: failed at step 7"  # type: ignore[attr-defined]
        raise error

    def shown() -> list[str]:
        with pytest.raises(SystemExit):
            run(fails, ["experiment=digits"])
        return capsys.readouterr().err.splitlines()

    lines = shown()
    assert "test_compose.py" in lines[2]
    assert lines[-2:] == ["KeyError: 'here'", "dtrain: failed at step 7"]
    monkeypatch.setenv("DTRAIN_TRACEBACK", "1")
    assert "command_line.py" in shown()[2]
    assert "test_compose.py" not in shown()[2]


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "4", "LOCAL_RANK": "0"}, True),  # srun: nobody else tells what is missing on the second node
        ({"RANK": "4", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),  # torchrun shows it
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # the second pod of PyTorchJob
    ],
)
def test_a_wrong_config_is_shown_once_on_each_node(
    capsys: pytest.CaptureFixture[str], monkeypatch, environment: dict[str, str], shown: bool
) -> None:
    def main(composed: Composed) -> None:
        raise ConfigError("data.train: not on this node.")

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run(main, ["experiment=digits"])
    assert capsys.readouterr().err == "dtrain: error: data.train: not on this node.\n" * shown


@pytest.mark.parametrize("rank", [0, 1])
def test_an_explained_error_is_shown_by_the_rank_that_raised_it_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch, rank: int
) -> None:
    def main(composed: Composed) -> None:
        raise Explained("the disk is full. Make room.")

    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        run(main, ["experiment=digits"])
    assert ended.value.code == EXIT_FAILED
    assert capsys.readouterr().err == f"dtrain: error: {'rank 1: ' * rank}the disk is full. Make room.\n"


def test_the_error_of_another_rank_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(composed: Composed) -> None:
        raise PeerFailed("rank 1 failed: DataError: " + "a long story, " * 50 + "\nand more")

    with pytest.raises(SystemExit):
        run(main, ["experiment=digits"])
    shown = capsys.readouterr().err
    assert shown.startswith("dtrain: rank 0 stops: rank 1 failed: DataError: a long story")
    assert len(shown) < 160


@pytest.mark.parametrize("option", ["--help", "--cfg=job", "--info=defaults"])
def test_hydra_s_own_options_work(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with suppress(SystemExit):
        run(lambda composed: None, [*option.split("="), "experiment=digits"])
    assert "digits" in capsys.readouterr().out


def test_the_number_of_classes_comes_from_the_names_beside_the_shards(tmp_path) -> None:
    arguments = ["data=shards", f"data.train='{tmp_path}/train-{{000..003}}.tar'", "model=small_cnn"]
    assert compose(*arguments).cfg.model["classes"] == 10
    (tmp_path / "classes.json").write_text('["cat", "dog", "owl"]')
    assert compose(*arguments).cfg.model["classes"] == 3
    assert compose(*arguments, "model.classes=5").cfg.model["classes"] == 5


def test_a_users_own_values_can_be_used_in_other_keys() -> None:
    cfg = compose("experiment=digits", "vars.width=64", "vars.note=tried", "model.width=${vars.width}").cfg
    assert cfg.model["width"] == 64
    assert cfg.vars == {"width": 64, "note": "tried"}


@pytest.mark.parametrize(("width", "remedy"), [("${vars.width}", "vars.width=..."), ("${model.widths}", "Correct it")])
def test_a_value_that_leads_nowhere_is_refused(width: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_not_composed(capsys, ["experiment=digits", f"model.width={width}"], "model.width", width, remedy)


def test_help_may_be_cut_by_its_reader() -> None:
    code = "from dtrain.command_line import run; run(print, ['--help'])"
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "{code}" | true'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
