"""The console command ``dtrain``: what it starts, with how many processes, and what it refuses."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dtrain import __main__ as command
from dtrain import __version__, train
from tests.refusals import assert_refused

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "PET_NNODES", "SLURM_STEP_NUM_TASKS", "SM_HOSTS", "CLUSTER_SPEC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of trainings in this process, which are not started."""
    calls: list[list[str]] = []
    monkeypatch.setattr(train, "main", lambda: calls.append(sys.argv[1:]))
    return calls


@pytest.mark.parametrize(("option", "shown"), [("--help", "evaluate"), ("--version", __version__), ("-h", "--nproc N")])
def test_help_and_version_import_neither_torch_nor_hydra(option: str, shown: str) -> None:
    code = (
        "import sys; from dtrain.__main__ import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'hydra', 'numpy'} & sys.modules.keys(); sys.exit(f'loaded: {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_python_m_dtrain_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dtrain", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(f"dtrain {__version__}")


def test_the_version_names_torch_python_and_the_commit_of_a_checkout_but_not_of_one_around_it(tmp_path: Path) -> None:
    def shown(folder: Path) -> list[str]:
        package = shutil.copytree(ROOT / "dtrain", folder / "dtrain", ignore=shutil.ignore_patterns("__pycache__"))
        code = "import sys; from dtrain.__main__ import main; sys.exit(main(['--version']))"
        environment = os.environ | {"PYTHONPATH": str(package.parent)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder.parent, check=True
        )
        return done.stdout.splitlines()

    assert shown(tmp_path / "plain")[0] == f"dtrain {__version__}"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    first, *others = shown(tmp_path)
    assert first == f"dtrain {__version__} (commit {commit[:12]})"
    assert others == [f"torch {metadata.version('torch')}", f"Python {platform.python_version()}"]
    assert shown(tmp_path / "venv" / "site-packages")[0] == f"dtrain {__version__}"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["'trian'", "'train'", "evaluate"]),
        (["experiment=digits"], ["experiment=digits", "dtrain train experiment=digits"]),
        (["train", "--nproc", "two"], ["--nproc", "two", "from 1 on"]),
        (["train", "--nproc=0"], ["--nproc", "0", "from 1 on"]),
        (["train", "--nproc"], ["--nproc", "nothing", "from 1 on"]),
        (["train", "--nproc-per-node=2"], ["--nproc-per-node=2", "torchrun", "--nproc N"]),
        (["completion", "tcsh"], ["completion", "tcsh", "bash, zsh, fish"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    assert command.main(arguments) == command.EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith("dtrain: error: ")
    assert len(message.splitlines()) == 1
    assert_refused(message, *parts)


@pytest.mark.parametrize("launched", [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "4"}], ids=["torchrun", "srun"])
def test_under_a_launcher_no_other_one_is_started(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torchrun: list[list[str]],
    in_process: list[list[str]],
    launched: dict[str, str],
) -> None:
    monkeypatch.setattr(command, "_gpus", lambda: 8)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert command.main(["train", "experiment=digits"]) == 0
    assert (in_process, torchrun) == ([["experiment=digits"]], [])
    assert command.main(["train", "--nproc=2", "experiment=digits"]) == command.EXIT_USAGE
    assert_refused(capsys.readouterr().err, "--nproc", "2", "Leave --nproc out")


@pytest.mark.parametrize(("option", "gpus"), [(["--nproc", "2"], 0), (["--nproc=2"], 8), ([], 2)])
def test_torchrun_is_started_for_several_processes(
    monkeypatch: pytest.MonkeyPatch, torchrun: list[list[str]], option: list[str], gpus: int
) -> None:
    monkeypatch.setattr(command, "_gpus", lambda: gpus)
    assert command.main(["train", "experiment=digits", *option, "precision=bf16"]) == 0
    expected = ["--standalone", "--nproc-per-node=2", "-m", "dtrain", "train", "experiment=digits", "precision=bf16"]
    assert [call[1:] for call in torchrun] == [expected]


@pytest.mark.parametrize(
    ("nodes", "expected"), [("2", ["--nproc-per-node=1"]), ("1:4", ["--nproc-per-node=1"]), ("1", None), ("1:1", None)]
)
def test_in_a_pod_of_several_torchrun_joins_the_others(
    monkeypatch: pytest.MonkeyPatch,
    torchrun: list[list[str]],
    in_process: list[list[str]],
    nodes: str,
    expected: list[str] | None,
) -> None:
    monkeypatch.setattr(command, "_gpus", lambda: 1)
    monkeypatch.setenv("PET_NNODES", nodes)
    assert command.main(["train", "experiment=digits"]) == 0
    assert [call[1:-4] for call in torchrun] == ([expected] if expected else [])
    assert command.main(["train", "--cfg", "job"]) == 0
    assert len(in_process) == (0 if expected else 1)


@pytest.mark.parametrize(("nodes", "options"), [("1", ["--standalone"]), ("2", [])])
def test_torchrun_is_started_in_the_pods_of_pytorchjob_which_have_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    torchrun: list[list[str]],
    in_process: list[list[str]],
    nodes: str,
    options: list[str],
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", nodes), ("PET_NNODES", nodes)):
        monkeypatch.setenv(name, value)
    assert command.main(["train", "experiment=digits"]) == 0
    assert [call[1:-4] for call in torchrun] == [[*options, "--nproc-per-node=1"]]
    monkeypatch.setenv("LOCAL_RANK", "0")  # torchrun's own process
    assert command.main(["train", "experiment=digits"]) == 0
    assert len(in_process) == len(torchrun) == 1


@pytest.mark.parametrize(
    ("arguments", "trainings"),
    [(["--cfg", "job"], 0), (["-m", "run.seed=1,2"], 1), (["--nproc=1"], 1)],
)
def test_one_process_needs_no_torchrun(
    monkeypatch: pytest.MonkeyPatch,
    torchrun: list[list[str]],
    in_process: list[list[str]],
    arguments: list[str],
    trainings: int,
) -> None:
    monkeypatch.setattr(command, "_gpus", lambda: 8)
    assert command.main(["train", *arguments]) == 0
    assert (len(in_process), torchrun) == (trainings, [])


def test_the_cores_are_divided_among_the_processes(monkeypatch: pytest.MonkeyPatch, torchrun: list[list[str]]) -> None:
    monkeypatch.setattr("dtrain.distributed.world.process_cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS")
    command.main(["train", "--nproc=5"])
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("name", ["launch", "report"])
def test_an_entry_point_gets_its_arguments_and_gives_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    seen: list[Any] = []

    def main() -> int:
        seen.extend([sys.argv[1:], sys.path])
        return 3

    monkeypatch.setattr(command.entry_point(name), "main", main)
    path = ["/venv/bin", *(folder for folder in sys.path if folder)]
    monkeypatch.setattr(sys, "path", [*path])
    monkeypatch.chdir(tmp_path)
    assert command.main([name, "a", "b"]) == 3
    # The classes of the user are in the current folder. It comes last: it can be a run of somebody else, with a numpy.py.
    assert seen == [["a", "b"], [*path, str(tmp_path)] if name == "launch" else path]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_before_the_training_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main", interrupted)
    monkeypatch.setenv("RANK", rank)
    assert command.main(["train", "experiment=digits"]) == 130
    assert capsys.readouterr().err == ("dtrain: interrupted\n" if rank == "0" else "")
