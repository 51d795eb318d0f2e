from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.launching.job_script import job_script
from tests.launching.points import single

GOLDEN = Path(__file__).parent / "golden" / "job.sbatch"
# As printed by: python -m dtrain.launch launch.dry_run=true ARGUMENTS
ARGUMENTS = (
    "launch=slurm",
    "experiment=digits",
    "run.name=digits",
    "run.dir='/scratch/my runs/digits'",
    "launch.nodes=2",
    "launch.processes_per_node=4",
    "launch.time=12:00:00",
    "launch.partition=gpu",
    "launch.account=project",
    'launch.extra=["--qos=high","--exclude=n[7-8]"]',
    "data.num_workers=3",
    'data.train="shards/train-{00..09}.tar"',
)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/venv/bin/python")
    monkeypatch.setattr(Path, "cwd", classmethod(lambda cls: cls("/home/me/project")))


def directives(*arguments: str) -> list[str]:
    script = job_script(single("launch=slurm", "experiment=digits", *arguments))
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_changes_only_on_purpose() -> None:
    assert job_script(single(*ARGUMENTS)) == GOLDEN.read_text()


def test_the_script_is_clean_shell() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", str(GOLDEN)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_bash_hands_over_every_argument_as_it_was_typed(tmp_path: Path) -> None:
    point = single(*ARGUMENTS, "train.max_steps=1", "+model.note='it\\'s $HOME `x` \"quoted\"'")
    script = job_script(point).partition("set -uo pipefail")[0] + 'printf "%s\\0" "$run_dir" "${arguments[@]}"\n'
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split("\0")[:-1] == [str(point.run.dir), *point.arguments]


def test_a_process_gets_a_gpu_and_cores_for_its_loader() -> None:
    asked = directives("launch.processes_per_node=4", "data.num_workers=3")
    assert "--gpus-per-node=4" in asked
    assert "--cpus-per-task=16" in asked
    assert "--cpus-per-task=8" in directives("launch.processes_per_node=4", "launch.cpus_per_process=2")
    assert not any("gpu" in line for line in directives("launch.gpus_per_node=0"))


def test_percent_signs_in_the_directory_are_not_taken_for_patterns() -> None:
    assert "--output=/r/50%%j/logs/slurm-%j.out" in directives("run.dir=/r/50%j")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch.gpus_per_node=1", "launch.processes_per_node=2"), r"launch\.gpus_per_node: got 1 for .*=2"),
        (("launch.processes_per_node=null",), r"launch\.processes_per_node: launch=slurm needs a number"),
        (("launch.extra=[qos]",), r"launch\.extra: got 'qos'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        directives(*arguments)
