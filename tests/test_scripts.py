"""The scripts: shell scripts clean under shellcheck, idempotent, clear about what is missing; what a game day counts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import forked_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted(ROOT.glob("scripts/*.sh")), *sorted(ROOT.glob("slurm/*")), ROOT / ".ci" / "run"]


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", "-x", script.relative_to(ROOT)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -- scripts/: the environment


@pytest.fixture
def checkout(tmp_path):
    """What the scripts need of a checkout, with a stand-in for the environment's programs that notes its calls."""
    shutil.copytree(ROOT / "scripts", tmp_path / "a checkout" / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "a checkout")
    note = f'printf "%s|" "$(basename "$0")" "$PWD" "$@" >>"{tmp_path}/calls"; echo >>"{tmp_path}/calls"\n'
    for name in ("python", "dtrain"):
        executable(tmp_path / "venv" / "bin" / name, f"#!/bin/bash\n{note}case $* in *count*) echo 0;; esac\n")
    return tmp_path / "a checkout"


def call(script, *arguments, **environment):
    """Runs a script from a directory that has nothing to do with it."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OMP_NUM_THREADS")}
    environ |= {"DTRAIN_VENV": str(script.parents[2] / "venv")} | environment
    return subprocess.run(
        ["bash", script, *arguments], cwd="/", env=environ, capture_output=True, text=True, timeout=250
    )


def calls(checkout, word):
    """The noted calls that have ``word`` among their arguments."""
    lines = (checkout.parent / "calls").read_text().splitlines()
    return [found for line in lines if word in (found := line.rstrip("|").split("|"))]


def test_a_second_call_installs_nothing_until_the_constraints_change(checkout):
    for expected in (1, 1):
        assert call(checkout / "scripts" / "quickstart.sh").returncode == 0
        assert len(calls(checkout, "install")) == expected
    (checkout / "constraints.txt").write_text("torch==3.0\n")
    call(checkout / "scripts" / "quickstart.sh")
    (_, install) = calls(checkout, "install")
    assert install[-4:] == ["-c", "constraints.txt", "-e", ".[demo]"]
    assert len(calls(checkout, "experiment=digits")) == 3


def test_overrides_reach_the_training_as_they_are_typed(checkout):
    overrides = ["precision=bf16", 'data.train="a b/{0..9}.tar"', "model.name='x y'"]
    done = call(checkout / "scripts" / "quickstart.sh", *overrides)
    (train,) = calls(checkout, "experiment=digits")
    assert train[:5] == ["dtrain", str(checkout), "train", "--nproc", "2"]
    assert train[-4:] == ["experiment=digits", *overrides]
    assert "The run directory has config.yaml" in done.stderr


def test_the_test_command_hands_its_arguments_to_pytest_in_the_checkout(checkout):
    assert call(checkout / "scripts" / "test.sh", "-m", "slow or soak").returncode == 0
    assert calls(checkout, "pytest") == [["python", str(checkout), "-m", "pytest", "-m", "slow or soak"]]
    *_, update, install = calls(checkout, "install")
    assert update[-1] == "pip>=25.1"  # the first with --group
    assert install[-4:] == ["-e", ".", "--group", "dev"]


def test_a_failed_installation_says_so_and_is_tried_again(checkout):
    python = checkout.parent / "venv" / "bin" / "python"
    good = python.read_text()
    python.write_text(good + "case $* in *install*) exit 1;; esac\n")
    for _ in range(2):
        done = call(checkout / "scripts" / "quickstart.sh")
        assert done.returncode == 1
        assert "pip could not install demo" in done.stderr
    assert len(calls(checkout, "install")) == 2
    assert not calls(checkout, "experiment=digits")


@pytest.mark.parametrize(
    ("pretend", "message"),
    [
        ("sys.version_info = (3, 9, 18)", "is Python 3.9; dtrain needs 3.10 or newer"),
        ("sys.modules['ensurepip'] = None", "apt-get install python3.{minor}-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_the_way_out(checkout, pretend, message):
    python = executable(
        checkout.parent / "python3",
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "import sys; {pretend}; exec(sys.argv[1])" "$2"\nexit 1\n',
    )
    done = call(checkout / "scripts" / "test.sh", PYTHON=str(python), DTRAIN_VENV=str(checkout.parent / "new"))
    assert done.returncode == 1
    assert message.format(minor=sys.version_info.minor) in done.stderr
    assert not (checkout.parent / "new").exists()


def test_no_python_at_all_is_named_too(checkout):
    done = call(checkout / "scripts" / "test.sh", PYTHON="python9.9", DTRAIN_VENV=str(checkout.parent / "new"))
    assert done.returncode == 1
    assert "python9.9 is not on the path" in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(checkout):
    mine = checkout.parent / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    done = call(checkout / "scripts" / "test.sh", PYTHON=sys.executable, DTRAIN_VENV=str(mine))
    assert done.returncode == 1
    assert "Set another folder: DTRAIN_VENV=DIR" in done.stderr
    assert os.listdir(mine) == ["thesis.tex"]


# -- scripts/wandb_sync.sh


def test_pieces_of_a_run_are_sent_in_the_order_of_their_starts_without_those_that_hold_nothing(checkout):
    run_dir = checkout / "runs" / "a run"
    for name, size in (("20261121_070334-id", 900), ("20261121_070335-id", 7), ("20261120_235959-id", 50_000)):
        executable(run_dir / "wandb" / f"offline-run-{name}" / "run-id.wandb", "x" * size)
    (run_dir / "wandb" / "offline-run-20261121_090000-id").mkdir()
    executable(checkout.parent / "venv" / "bin" / "wandb", f'#!/bin/bash\nprintf "%s\n" "$@" >"{checkout}/sent"\n')
    done = call(checkout / "scripts" / "wandb_sync.sh", str(run_dir))
    assert done.returncode == 0, done.stderr
    pieces = [f"{run_dir}/wandb/offline-run-{name}-id" for name in ("20261120_235959", "20261121_070334")]
    assert (checkout / "sent").read_text().splitlines() == ["sync", "--skip-synced", *pieces]
    empty = call(checkout / "scripts" / "wandb_sync.sh", str(checkout))
    assert empty.returncode == 1
    assert "no wandb/offline-run-*" in empty.stderr


# -- scripts/game_day.py


def test_a_game_day_counts_the_samples_that_a_run_lost_or_used_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from game_day_run import EPOCHS, Game, digits

    game = Game("", tmp_path / "fault", patience=1, slurm=None)
    (game.run_dir / "logs").mkdir(parents=True)
    (game.run_dir / "status.json").write_text('{"state": "finished"}')
    keys = [f"train-000000.tar/{number}" for number in range(digits.TRAIN_SAMPLES)] * EPOCHS
    *lines, bad = [{"step": 1, "keys": keys[4:]}, {"step": 2, "keys": keys[:1] * 3}, {"step": 2, "key": keys[1]}]
    logs = {"keys-rank-00000.jsonl": lines, "bad-rank-00001.jsonl": [bad]}
    for name, content in logs.items():
        (game.run_dir / "logs" / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    game.goes_on()
    assert (game.row.lost, game.row.doubled) == (2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("digits", "forked_programs")
def test_a_game_day_passes_and_one_without_patience_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import game_day as script

    def game_day(*arguments):
        monkeypatch.setattr(sys, "argv", [script.__file__, "--json", str(tmp_path / "table.json"), *arguments])
        script.main()

    played = ["rank 1 is killed", "newest checkpoint: a file is empty"]
    game_day("--only", f"^({'|'.join(played)})$", "--dir", str(tmp_path / "day"))
    rows = json.loads((tmp_path / "table.json").read_text())["faults"]
    assert [row["fault"] for row in rows] == played
    assert [(row["lost"], row["doubled"], row["problem"]) for row in rows] == [(0, 0, "")] * 2
    assert all(row["message"] and row["steps"] > 0 for row in rows)
    with pytest.raises(SystemExit, match="not all faults were passed"):
        game_day("--only", "a file is empty", "--patience", "0", "--dir", str(tmp_path / "no patience"))
    assert "NOT PASSED: waited" in capsys.readouterr().out
    listed = subprocess.run([forked_python(), script.__file__, "--list"], capture_output=True, text=True, check=True)
    assert set(played) < set(listed.stdout.splitlines())
