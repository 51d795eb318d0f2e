"""The shell scripts: clean under shellcheck, idempotent, clear about what is missing, and right about when to requeue."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    assert calls(checkout, "install")[0][-1] == ".[dev,demo]"


def test_a_failed_installation_says_so_and_is_tried_again(checkout):
    python = checkout.parent / "venv" / "bin" / "python"
    good = python.read_text()
    python.write_text(good + "case $* in *install*) exit 1;; esac\n")
    for _ in range(2):
        done = call(checkout / "scripts" / "quickstart.sh")
        assert done.returncode == 1
        assert "pip could not install dtrain[demo]" in done.stderr
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


# -- slurm/one_node.sbatch, and with it what all jobs do after the training: stand-ins for srun and scontrol


@pytest.fixture
def job(tmp_path):
    """Starts the batch script; ``srun`` is the given shell text, ``scontrol requeue`` ends the script as SLURM does."""
    (tmp_path / "dtrain").symlink_to(ROOT / "dtrain")
    run_dir = tmp_path / "runs" / "digits-7"
    run_dir.mkdir(parents=True)
    executable(tmp_path / "bin" / "scontrol", f'#!/bin/bash\necho "$*" >>"{tmp_path}/requeued"\nkill -TERM $PPID\n')
    executable(tmp_path / "bin" / "squeue", "#!/bin/bash\necho ${WHY_ENDED:-None}\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "digits", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n1"}
    slurm |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environ = {name: value for name, value in os.environ.items() if name not in ("VENV", "RUN_DIR", "OMP_NUM_THREADS")}
    environ |= slurm | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def start(srun, *arguments, **settings):
        executable(tmp_path / "bin" / "srun", f'#!/bin/bash\ncd "{run_dir}"\n{srun}\n')
        script = ["bash", ROOT / "slurm" / "one_node.sbatch", *arguments]
        return subprocess.Popen(
            script, env=environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    start.run_dir = run_dir
    start.requeued = lambda: (tmp_path / "requeued").exists()
    return start


def status(state, step=50, reason="null"):
    return f"""echo '{{\n  "state": "{state}",\n  "step": {step},\n  "reason": {reason}\n}}' >status.json; """


@pytest.mark.parametrize(
    ("srun", "requeued", "code"),
    [
        (status("finished") + "exit 0", False, 0),
        (status("finished") + "exit 1", False, 0),  # torchrun's exit barrier may fail after all is done
        (status("stopped", reason='"SIGTERM"') + "exit 1", True, None),  # preempted: SLURM told torchrun
        (status("stopped", reason='"STOP file"') + "exit 0", False, 0),  # somebody else wrote STOP
        (status("running") + "exit 137", True, None),  # killed without a word
        (status("failed", reason='"ValueError: no"') + "exit 1", False, 1),
        ("exit 3", True, None),  # a bad node: it began in an earlier allocation
    ],
)
def test_a_job_goes_back_into_the_queue_only_if_its_run_can_go_on(job, srun, requeued, code):
    process = job(srun)
    process.communicate(timeout=250)
    assert job.requeued() == requeued
    assert process.returncode == (-signal.SIGTERM if code is None else code)


@pytest.mark.parametrize(("exit_code", "requeued"), [(0, False), (1, True)])
def test_a_run_that_was_finished_before_is_recognised_by_the_exit_code(job, exit_code, requeued):
    subprocess.run(["bash", "-c", status("finished")], cwd=job.run_dir, check=True)
    process = job(f"exit {exit_code}")
    process.communicate(timeout=250)
    assert job.requeued() == requeued


def test_a_run_that_never_began_is_not_tried_again(job):
    process = job("exit 3", SLURM_RESTART_COUNT="0")
    output, _ = process.communicate(timeout=250)
    assert not job.requeued()
    assert process.returncode == 3
    assert "the run ended before the first step" in output


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def test_the_signal_before_the_time_limit_becomes_a_stop_request_and_the_job_is_requeued(job):
    process = job("touch begun; until [ -e STOP ]; do sleep 0.05; done; " + status("stopped", reason='"STOP file"'))
    wait_for(job.run_dir / "begun")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=250)
    assert job.requeued()


def test_a_cancelled_job_does_not_come_back_to_life(job):
    process = job("touch begun; sleep 1; " + status("stopped", reason='"SIGTERM"') + "exit 143")
    wait_for(job.run_dir / "begun")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=250)
    assert not job.requeued()
    assert process.returncode == 143


def test_a_job_that_is_over_its_time_all_the_same_goes_on(job):
    """A step that takes longer than the warning, for example; what was saved before is not lost."""
    srun = "touch begun; sleep 1; mkdir -p checkpoints/step-000000050; " + status("stopped", reason='"SIGTERM"')
    process = job(srun + "exit 143", WHY_ENDED="TimeLimit")
    wait_for(job.run_dir / "begun")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=250)
    assert job.requeued()


def test_a_stop_request_of_the_last_start_does_not_stop_this_one(job):
    (job.run_dir / "STOP").touch()
    process = job("[ -e STOP ] && exit 9; " + status("finished"))
    process.communicate(timeout=250)
    assert process.returncode == 0


@pytest.mark.parametrize(("saved", "requeued", "kept"), [("", False, "2"), ("step-000000051", True, "0")])
def test_restarts_without_a_new_checkpoint_come_to_an_end_and_one_forgives_them(job, saved, requeued, kept):
    (job.run_dir / "checkpoints" / "step-000000050").mkdir(parents=True)
    (job.run_dir / ".requeue").write_text("2\n")
    process = job(f"mkdir -p checkpoints/{saved}; " + status("stopped", 51, '"SIGTERM"') + "exit 1")
    output, _ = process.communicate(timeout=250)
    assert job.requeued() == requeued
    assert (job.run_dir / ".requeue").read_text() == f"{kept}\n"
    assert requeued or "no new checkpoint in 3 allocations" in output


def test_every_start_has_its_own_rendezvous_and_the_same_run_directory(job):
    process = job('printf "%s\\n" "$@" OMP=$OMP_NUM_THREADS >arguments; ' + status("finished"), "optimizer.lr=1e-3")
    process.communicate(timeout=250)
    arguments = (job.run_dir / "arguments").read_text().splitlines()
    expected = {"--kill-on-bad-exit=1", "--cpus-per-task=8", "--nproc-per-node=2", "--rdzv-id=7.2", "OMP=4"}
    assert expected < set(arguments)
    assert arguments[-4:-1] == ["dtrain.train", "optimizer.lr=1e-3", f"run.dir='{job.run_dir}'"]


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
