from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.launching.job_script import array_script, job_script, seconds
from dtrain.launching.point import Point
from dtrain.launching.presets import frozen_arguments
from tests.launching.points import single, sweep

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


def digits(*arguments: str) -> Point:
    return single("launch=slurm", "experiment=digits", *arguments)


def directives(*arguments: str) -> list[str]:
    script = job_script(digits(*arguments))
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
    assert printed.split("\0")[:-1] == [str(point.run.dir), *frozen_arguments(point)]


def test_a_process_gets_a_gpu_and_cores_for_its_loader() -> None:
    asked = directives("launch.processes_per_node=4", "data.num_workers=3")
    assert "--gpus-per-node=4" in asked
    assert "--cpus-per-task=16" in asked
    assert "--cpus-per-task=8" in directives("launch.processes_per_node=4", "launch.cpus_per_process=2")
    assert not any("gpu" in line for line in directives("launch.gpus_per_node=0"))
    auto = ("launch.processes_per_node=4", "data.num_workers=auto")
    assert "--cpus-per-task=24" in directives(*auto, "launch.cpus_per_process=6")
    with pytest.raises(
        ConfigError, match=r"launch\.cpus_per_process: data\.num_workers=auto uses the cores that there are"
    ):
        directives(*auto)


def test_a_range_of_nodes_and_no_second_allocation_are_asked_for_in_slurms_words() -> None:
    script = job_script(digits("launch.nodes=4", "launch.min_nodes=2", "launch.requeue=false"))
    assert "#SBATCH --nodes=2-4\n" in script
    assert "#SBATCH --no-requeue\n" in script
    assert "\nrequeue=0\n" in script


@pytest.mark.parametrize(
    "arguments",
    [
        ("launch.container=[apptainer,exec,--nv,'my image.sif']",),
        ("launch.srun=['--container-image=my image.sqsh']",),
    ],
)
def test_a_container_is_put_around_the_interpreter_that_is_in_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    script = job_script(digits(f"run.dir={tmp_path}", "launch.python=/opt/python", *arguments))
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    words = (tmp_path / "words").read_text().splitlines()
    before = words[: words.index("/opt/python")]
    if "srun" in arguments[0]:
        assert before[-1] == "--container-image=my image.sqsh"
    else:
        assert before[-4:] == ["apptainer", "exec", "--nv", "my image.sif"]


def test_an_array_runs_the_script_of_the_point_that_its_number_names(tmp_path: Path) -> None:
    points = sweep(
        "launch=slurm", "experiment=digits", f"run.dir='{tmp_path}/a b'", "launch.max_running=2", "run.seed=1,2,3"
    )
    script = array_script(points, tmp_path / "50%a")
    assert "#SBATCH --array=0-2%2\n" in script
    assert f"#SBATCH --output={tmp_path}/50%%a/slurm-%A_%a.out\n" in script
    for number, point in enumerate(points):
        point.run.dir.mkdir()
        (point.run.dir / "job.sbatch").write_text(f"echo {number}\n")
        ran = subprocess.run(
            ["bash", "-c", script], env={"SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, text=True, check=True
        )
        assert ran.stdout == f"{number}\n"


def test_elements_of_an_array_cannot_ask_for_different_things(tmp_path: Path) -> None:
    points = sweep("launch=slurm", "experiment=digits", "launch.max_running=2", "launch.time=10,20", "run.seed=1,2")
    with pytest.raises(ConfigError, match=r"launch\.max_running: .* differ in --time=10, --time=20"):
        array_script(points, tmp_path)


def test_percent_signs_in_the_directory_are_not_taken_for_patterns() -> None:
    assert "--output=/r/50%%j/logs/slurm-%j.out" in directives("run.dir=/r/50%j")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch.gpus_per_node=1", "launch.processes_per_node=2"), r"launch\.gpus_per_node: got 1 for .*=2"),
        (("launch.processes_per_node=null",), r"launch\.processes_per_node: launch=slurm needs a number"),
        (("launch.extra=[qos]",), r"launch\.extra: got 'qos'"),
        (("launch.time=00:02:00",), r"launch\.time: got 00:02:00, which is not longer than launch\.stop_seconds=120"),
        (("launch.srun=[image.sqsh]",), r"launch\.srun: got 'image.sqsh', want options of srun"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        directives(*arguments)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("1:02:03", 3723),
        ("2-03", 51 * 3600),
        ("2-03:04", 51 * 3600 + 240),
        ("2-03:04:05", 51 * 3600 + 245),
        ("UNLIMITED", None),
        ("later", None),
        ("1:2:3:4", None),
    ],
)
def test_a_time_limit_means_what_slurm_says(time: str, expected: int | None) -> None:
    assert seconds(time) == expected
