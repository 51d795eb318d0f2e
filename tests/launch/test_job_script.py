from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.job import Job
from dtrain.launch.job_script import array_script, freeze_presets, frozen_arguments, job_script, time_limit_seconds
from tests.launch.compose import single, sweep
from tests.refusals import refused

GOLDEN = Path(__file__).parent / "golden" / "job.sbatch"
# As printed by: dtrain launch launch.dry_run=true ARGUMENTS
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


def digits(*arguments: str) -> Job:
    return single("launch=slurm", "experiment=digits", *arguments)


@cache
def plain() -> Job:
    """A job without other settings, composed once."""
    return digits()


def directives(*arguments: str) -> list[str]:
    script = job_script(digits(*arguments))
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_is_the_golden_file() -> None:
    assert job_script(single(*ARGUMENTS)) == GOLDEN.read_text()


def test_the_script_is_clean_shell() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", str(GOLDEN)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_bash_passes_every_argument_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dtrain.launch.job.validate", lambda cfg: None)  # which refuses some of these values
    job = single(*ARGUMENTS, "train.max_steps=1", "+model.note='it\\'s $HOME `x` \"quoted\"'")
    script = job_script(job).partition("set -uo pipefail")[0] + 'printf "%s\\0" "$run_dir" "${arguments[@]}"\n'
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split("\0")[:-1] == [str(job.spec.dir), *frozen_arguments(job)]


@pytest.mark.slow
def test_resources_follow_from_processes_and_workers() -> None:
    asked = directives("launch.processes_per_node=4", "data.num_workers=3")
    assert "--gpus-per-node=4" in asked
    assert "--cpus-per-task=16" in asked
    assert "--cpus-per-task=8" in directives("launch.processes_per_node=4", "launch.cpus_per_process=2")
    assert not any("gpu" in line for line in directives("launch.gpus_per_node=0"))
    auto = ("launch.processes_per_node=4", "data.num_workers=auto")
    assert "--cpus-per-task=24" in directives(*auto, "launch.cpus_per_process=6")
    assert "--cpus-per-task=20" in directives(*auto)


def test_min_nodes_and_requeue_become_options_of_sbatch() -> None:
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
def test_the_interpreter_runs_in_the_container(tmp_path: Path, arguments: tuple[str, ...]) -> None:
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


def test_an_array_element_runs_the_script_of_its_run(tmp_path: Path) -> None:
    jobs = sweep(
        "launch=slurm", "experiment=digits", f"run.dir='{tmp_path}/a b'", "launch.max_running=2", "run.seed=1,2,3"
    )
    script = array_script(jobs, tmp_path / "50%a")
    assert "#SBATCH --array=0-2%2\n" in script
    assert f"#SBATCH --output={tmp_path}/50%%a/slurm-%A_%a.out\n" in script
    for number, job in enumerate(jobs):
        job.spec.dir.mkdir()
        (job.spec.dir / "job.sbatch").write_text(f"echo {number}\n")
        ran = subprocess.run(
            ["bash", "-c", script], env={"SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, text=True, check=True
        )
        assert ran.stdout == f"{number}\n"


def test_an_array_of_runs_with_different_resources_is_refused(tmp_path: Path) -> None:
    jobs = sweep("launch=slurm", "experiment=digits", "launch.max_running=2", "launch.time=10,20", "run.seed=1,2")
    with refused(ConfigError, "launch.max_running", "--time=10, --time=20", "Remove launch.max_running"):
        array_script(jobs, tmp_path)


def test_percent_signs_in_the_directory_are_escaped() -> None:
    assert "--output=/r/50%%j/logs/slurm-%j.out" in directives("run.dir=/r/50%j")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ("launch.gpus_per_node=1", "launch.processes_per_node=2"),
            ("launch.gpus_per_node", "got 1", "launch.processes_per_node=2", "set 0"),
        ),
        (
            ("launch.processes_per_node=null",),
            ("launch.processes_per_node", "launch=slurm needs a number", "Set it to"),
        ),
        (("launch.extra=[qos]",), ("launch.extra", "got 'qos'", "options of sbatch")),
        (("launch.srun=[image.sqsh]",), ("launch.srun", "got 'image.sqsh'", "options of srun")),
        (
            ("launch.time=00:02:00",),
            ("launch.time", "got 00:02:00", "launch.stop_seconds=120", "Increase launch.time"),
        ),
    ],
)
def test_contradicting_keys_are_refused(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        directives(*arguments)
    assert [name for name in names if name not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("launch.account", "a\ntouch pwned", "a name"),
        ("launch.account", "a b", "without spaces"),
        ("launch.partition", "gpu --exclusive", "without spaces"),
        ("launch.partition", "gpu,'x'", "a name"),
        ("launch.time", "10\ntouch pwned", "08:00:00"),
        ("launch.time", "10 --exclusive", "08:00:00"),
        ("launch.time", "later", "UNLIMITED"),
        ("launch.extra", ["--qos=high\ntouch pwned"], "remove the character"),
        ("launch.srun", ["--mpi=none\ntouch pwned"], "remove the character"),
        ("run.name", "a\ntouch pwned", "remove the character"),
        ("run.dir", "/r/a\ntouch pwned", "remove the character"),
    ],
)
def test_a_value_cannot_add_shell_code_or_an_option(key: str, value: str | list[str], remedy: str) -> None:
    job = plain()
    section, _, name = key.partition(".")
    if section == "launch":
        job = replace(job, launch=replace(job.launch, **{name: value}))
    else:
        job = replace(job, spec=replace(job.spec, **{name: type(getattr(job.spec, name))(value)}))
    with refused(ConfigError, key, repr(value[0] if isinstance(value, list) else value), remedy):
        job_script(job)


def test_a_working_directory_with_a_line_break_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "cwd", classmethod(lambda cls: cls("/home/a\nb")))
    with refused(ConfigError, "working directory", repr("/home/a\nb"), "remove the character"):
        job_script(plain())


def test_names_and_times_of_slurm_are_accepted() -> None:
    asked = directives('launch.partition="gpu-a100,cpu_2"', "launch.account=group.project@site", "launch.time=1-12")
    assert {"--partition=gpu-a100,cpu_2", "--account=group.project@site", "--time=1-12"} < set(asked)
    assert "--time=unlimited" in directives("launch.time=unlimited")


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
def test_time_limits_are_parsed_as_slurm_does(time: str, expected: int | None) -> None:
    assert time_limit_seconds(time) == expected


@pytest.mark.slow
def test_presets_edited_after_the_submission_do_not_change_the_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "experiment").mkdir(parents=True)
    preset = mine / "experiment" / "e.yaml"
    preset.write_text("# @package _global_\ndefaults:\n  - digits\nrun: {seed: 7}\n")
    job = single("--config-dir", str(mine), "experiment=e", f"run.dir='{tmp_path}/my run'")
    job.spec.dir.mkdir()
    freeze_presets(job)
    preset.write_text("# @package _global_\ndefaults:\n  - digits\nrun: {seed: 8}\n")
    again = single(*frozen_arguments(job))
    assert again.spec.dir == job.spec.dir
    ours, theirs = ({key: value for key, value in run.config.items() if key != "run"} for run in (job.spec, again.spec))
    assert ours == theirs
    assert again.spec.config["run"]["seed"] == 7
    # The presets of dtrain are frozen, too.
    (job.spec.dir / "presets" / "conf" / "precision" / "fp32.yaml").write_text("name: bf16\n")
    assert single(*frozen_arguments(job)).spec.config["precision"]["name"] == "bf16"
    freeze_presets(job)
    assert single(*frozen_arguments(job)).spec.config["precision"]["name"] == "fp32"
