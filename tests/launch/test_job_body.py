"""job_body.sh, through slurm/one_node.sbatch and the script of the launcher: one job for each run, whatever ends a job.

SLURM's commands are small scripts. Their state is the file ``slurm``: state, restarts and reason of the job, as squeue prints
them; a line in ``calls`` for each call. The tests with a real SLURM are in test_slurm.py and test_slurm_cancel.py.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.launch.job import Job
from dtrain.launch.job_script import job_script
from tests.launch.compose import single

ROOT = Path(__file__).resolve().parents[2]
JOB, RUNNING, CANCELLED = "7", "RUNNING 2 None", "COMPLETING 2 None"
_LOG = 'echo "${0##*/} $*" >>calls'
_COMMANDS = {
    # Requeue as SLURM does it: with a lock, and with Incomplete only if the job runs. Then the shell of the job is ended.
    "scontrol": f"""{_LOG}
[[ ! -e refuse_requeue ]] || exit 1
exec 9<slurm; flock 9
read -r state restarts reason <slurm
[[ $2 != Incomplete || $state == RUNNING ]] || exit 0
echo "COMPLETING $((restarts + 1)) None" >slurm; touch requeued
kill -TERM $PPID""",
    "squeue": f"""{_LOG}
[[ ! -e no_answer ]] || exit 1
case $* in *--Format=*) cat slurm ;; *) echo "7 RUNNING"; cat others 2>/dev/null ;; esac""",
    "sbatch": f"{_LOG}; echo 9",
    "sleep": f"{_LOG}; exec /bin/sleep 0",
}


class Cluster:
    """Starts batch scripts with stand-ins for the commands of SLURM.

    Attributes:
        place: Working directory of the scripts and their commands.
        run_dir: Directory of the run.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.run_dir = place, place / "runs" / "digits-7"
        self.run_dir.mkdir(parents=True)
        (place / "dtrain").symlink_to(ROOT / "dtrain")
        for name, body in _COMMANDS.items():
            self.command(name, f'cd "{place}" || exit\n{body}')
        self.state(RUNNING)

    def command(self, name: str, body: str) -> None:
        path = self.place / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def state(self, text: str) -> None:
        (self.place / "slurm").write_text(f"{text}\n")

    def cancel(self, process: subprocess.Popen[str]) -> bool:
        """``scancel``; whether the job still ran, so that it counts as cancelled."""
        with (self.place / "slurm").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            runs = file.read().startswith("RUNNING")
            if runs:
                file.seek(0)
                file.write(f"{CANCELLED}\n")
                file.truncate()
        process.send_signal(signal.SIGTERM)
        return runs

    def start(self, srun: str, *arguments: str, script: Path | None = None, **settings: str) -> subprocess.Popen[str]:
        """Starts a script, by default one_node.sbatch; ``srun`` is shell code that is executed in the run directory."""
        self.command("srun", f'cd "{self.run_dir}" || exit\n{srun}')
        slurm = {
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NAME": "digits",
            "SLURM_RESTART_COUNT": "2",
            "SLURM_JOB_NODELIST": "n1",
        }
        slurm |= {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "2", "SLURM_SUBMIT_DIR": str(self.place)}
        environ = {
            name: value for name, value in os.environ.items() if name not in ("VENV", "RUN_DIR", "OMP_NUM_THREADS")
        }
        environ |= slurm | {"PATH": f"{self.place / 'bin'}:{os.environ['PATH']}"} | settings
        environ = {name: value for name, value in environ.items() if value}
        return subprocess.Popen(
            ["bash", script or ROOT / "slurm" / "one_node.sbatch", *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, srun: str, *arguments: str, **settings: str) -> tuple[int, str]:
        """Exit code and output of a job that nothing disturbs."""
        process = self.start(srun, *arguments, **settings)
        output, _ = process.communicate(timeout=250)
        return process.returncode, output

    def calls(self, command: str) -> list[str]:
        path = self.place / "calls"
        return [line for line in path.read_text().splitlines() if line.startswith(command)] if path.exists() else []

    @property
    def requeued(self) -> bool:
        return (self.place / "requeued").exists()

    @property
    def owner(self) -> str:
        return (self.run_dir / ".job").read_text().split()[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def status(state: str, step: int = 50, reason: str = "null") -> str:
    """Shell code that writes a status."""
    return f"""echo '{{\n  "state": "{state}",\n  "step": {step},\n  "reason": {reason}\n}}' >status.json; """


KILLED = status("running") + "exit 137"
SAVED = "mkdir -p checkpoints/step-000000050; "


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("srun", "requeued", "code"),
    [
        (status("finished") + "exit 0", False, 0),
        (status("finished") + "exit 1", False, 0),  # torchrun's exit barrier may fail after all is done
        (status("stopped", reason='"SIGTERM"') + "exit 1", True, None),  # preempted: SLURM told torchrun
        (status("stopped", reason='"STOP file"') + "exit 0", False, 0),  # somebody else wrote STOP
        (KILLED, True, None),
        (status("failed", reason='"ValueError: no"') + "exit 1", False, 1),
        ("exit 3", True, None),  # a bad node: it began in an earlier allocation
    ],
)
def test_a_job_goes_back_into_the_queue_only_if_its_run_can_go_on(
    cluster: Cluster, srun: str, requeued: bool, code: int | None
) -> None:
    returned, _ = cluster.run(srun)
    assert cluster.requeued == requeued
    assert returned == (-signal.SIGTERM if code is None else code)
    assert cluster.calls("sbatch") == []


@pytest.mark.parametrize(("exit_code", "requeued"), [(0, False), (1, True)])
def test_a_run_that_was_finished_before_is_recognised_by_the_exit_code(
    cluster: Cluster, exit_code: int, requeued: bool
) -> None:
    subprocess.run(["bash", "-c", status("finished")], cwd=cluster.run_dir, check=True)
    cluster.run(f"exit {exit_code}")
    assert cluster.requeued == requeued


def test_a_run_that_never_began_is_not_tried_again(cluster: Cluster) -> None:
    code, output = cluster.run("exit 3", SLURM_RESTART_COUNT="")
    assert not cluster.requeued
    assert code == 3
    assert "the run ended before the first step" in output


def test_the_signal_before_the_time_limit_becomes_a_stop_request_and_the_job_is_requeued(cluster: Cluster) -> None:
    process = cluster.start(
        "touch begun; until [ -e STOP ]; do /bin/sleep 0.05; done; " + status("stopped", reason='"STOP file"')
    )
    wait_for(cluster.run_dir / "begun")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=250)
    assert cluster.requeued


@pytest.mark.parametrize(("saved", "requeued", "kept"), [("", False, "2"), ("step-000000051", True, "0")])
def test_restarts_without_a_new_checkpoint_come_to_an_end_and_one_forgives_them(
    cluster: Cluster, saved: str, requeued: bool, kept: str
) -> None:
    (cluster.run_dir / "checkpoints" / "step-000000050").mkdir(parents=True)
    (cluster.run_dir / ".requeue").write_text("2\n")
    _, output = cluster.run(f"mkdir -p checkpoints/{saved}; " + status("stopped", 51, '"SIGTERM"') + "exit 1")
    assert cluster.requeued == requeued
    assert (cluster.run_dir / ".requeue").read_text() == f"{kept}\n"
    assert requeued or "no new checkpoint in 3 allocations" in output


def test_every_start_has_its_own_rendezvous_and_the_same_run_directory(cluster: Cluster) -> None:
    cluster.run('printf "%s\\n" "$@" OMP=$OMP_NUM_THREADS >arguments; ' + status("finished"), "optimizer.lr=1e-3")
    arguments = (cluster.run_dir / "arguments").read_text().splitlines()
    expected = {"--kill-on-bad-exit=1", "--cpus-per-task=8", "--nproc-per-node=2", "--rdzv-id=7.2", "OMP=4"}
    assert expected < set(arguments)
    assert arguments[-4:-1] == ["dtrain.train", "optimizer.lr=1e-3", f"run.dir='{cluster.run_dir}'"]


# -- SLURM decides: a cancelled or requeued job asks for nothing


@pytest.mark.parametrize(
    "state",
    [
        CANCELLED,
        "COMPLETING 3 None",  # requeued after the failure of a node
        "PENDING 3 BeginTime",
        "RUNNING 3 None",  # and running elsewhere; this shell is on a node that lost its network
        "COMPLETING 3 TimeLimit",
        "COMPLETING 2 NodeDown",  # the failure of a node, where SLURM may not requeue
    ],
)
@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_slurm_has_cancelled_or_requeued_asks_for_no_allocation(
    cluster: Cluster, state: str, refused: bool
) -> None:
    if refused:
        (cluster.place / "refuse_requeue").touch()
    cluster.command("squeue", f'cd "{cluster.place}"; cat slurm')
    cluster.state(state)
    code, _ = cluster.run(KILLED)
    assert code == 137
    assert cluster.calls("scontrol") == cluster.calls("sbatch") == []
    assert cluster.owner == JOB


def test_a_cancelled_job_does_not_come_back_to_life(cluster: Cluster) -> None:
    process = cluster.start("touch begun; /bin/sleep 0.3; " + status("stopped", reason='"SIGTERM"') + "exit 143")
    wait_for(cluster.run_dir / "begun")
    assert cluster.cancel(process)
    output, _ = process.communicate(timeout=250)
    assert not cluster.requeued
    assert cluster.calls("sbatch") == []
    assert process.returncode == 143
    assert "exit code 143, after SIGTERM" in output


def test_a_job_that_is_over_its_time_all_the_same_goes_on(cluster: Cluster) -> None:
    """A step that takes longer than the warning, for example; what was saved before is not lost."""
    stopped = status("stopped", reason='"SIGTERM"')
    process = cluster.start(f"touch begun; /bin/sleep 0.3; {SAVED}{stopped} exit 143")
    wait_for(cluster.run_dir / "begun")
    cluster.state("COMPLETING 2 TimeLimit")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=250)
    assert cluster.requeued


def test_a_slurm_that_does_not_answer_does_not_forbid_requeue(cluster: Cluster) -> None:
    (cluster.place / "no_answer").touch()
    code, output = cluster.run(KILLED)
    assert code == 137
    assert "SLURM did not answer" in output
    assert cluster.calls("scontrol") == cluster.calls("sbatch") == []
    (cluster.place / "no_answer").unlink()
    cluster.run(KILLED)
    assert cluster.requeued


@pytest.mark.parametrize(("state", "dependency"), [(RUNNING, "afterok"), ("COMPLETING 2 TimeLimit", "afterany")])
def test_where_requeue_is_refused_one_job_continues_if_this_one_is_not_cancelled(
    cluster: Cluster, state: str, dependency: str
) -> None:
    (cluster.place / "refuse_requeue").touch()
    cluster.command("sbatch", f'cd "{cluster.place}"; {_LOG}; echo "$DTRAIN_STARTS $RUN_DIR" >given; echo "9;cluster"')
    cluster.state(state)
    code, _ = cluster.run(KILLED)
    assert code == 0  # or the dependency of the other job would not be satisfied
    (call,) = cluster.calls("sbatch")
    assert f"--dependency={dependency}:{JOB} --kill-on-invalid-dep=yes" in call
    assert (cluster.place / "given").read_text() == f"3 {cluster.run_dir}\n"
    assert cluster.owner == "9"


def test_a_job_that_is_cancelled_while_requeue_is_refused_has_no_successor(cluster: Cluster) -> None:
    cluster.command("scontrol", f'cd "{cluster.place}"; {_LOG}; echo "{CANCELLED}" >slurm; exit 1')
    code, _ = cluster.run(KILLED)
    assert code == 137
    assert len(cluster.calls("scontrol")) == 1
    assert cluster.calls("sbatch") == []


def test_a_time_limit_signal_while_a_successor_is_submitted_does_not_lose_it(cluster: Cluster) -> None:
    (cluster.place / "refuse_requeue").touch()
    cluster.command("sbatch", f'cd "{cluster.place}"; {_LOG}; kill -USR1 $PPID; echo 9')
    code, _ = cluster.run(KILLED)
    assert (code, cluster.owner) == (0, "9")


# -- .job names the only job that may train the run


@pytest.mark.parametrize(
    "settings", [{}, {"SLURM_RESTART_COUNT": "", "DTRAIN_STARTS": "1"}], ids=["requeued", "successor"]
)
def test_a_job_that_handed_the_run_over_does_nothing_when_slurm_starts_it(
    cluster: Cluster, settings: dict[str, str]
) -> None:
    (cluster.run_dir / ".job").write_text("9\n")
    code, output = cluster.run("touch begun", **settings)
    assert code == 0
    assert "the run belongs to job 9" in output
    assert not (cluster.run_dir / "begun").exists()
    assert cluster.owner == "9"


@pytest.mark.parametrize(
    ("others", "starts"), [("9 PENDING", False), ("9 RUNNING", False), ("9 COMPLETING", True), ("", True)]
)
def test_a_job_that_a_user_submits_starts_if_the_run_has_no_other_job(
    cluster: Cluster, others: str, starts: bool
) -> None:
    (cluster.run_dir / ".job").write_text("9\n")
    (cluster.place / "others").write_text(f"{others}\n")
    code, output = cluster.run("touch begun; " + status("finished"), SLURM_RESTART_COUNT="")
    assert code == int(not starts)
    assert (cluster.run_dir / "begun").exists() == starts
    assert cluster.owner == (JOB if starts else "9")
    assert starts or f"already has job {others}" in output
    assert starts or "scancel 9" in output


def test_a_copy_of_a_run_does_not_have_the_job_of_the_original(cluster: Cluster) -> None:
    (cluster.run_dir / ".job").write_text(f"9\n{cluster.place}\n")
    (cluster.place / "others").write_text("9 RUNNING\n")
    code, _ = cluster.run("touch begun; " + status("finished"), SLURM_RESTART_COUNT="")
    assert code == 0
    assert (cluster.run_dir / ".job").read_text().splitlines() == [JOB, str(cluster.run_dir)]


def test_a_job_that_a_user_submits_does_not_start_while_slurm_does_not_answer(cluster: Cluster) -> None:
    (cluster.run_dir / ".job").write_text("9\n")
    (cluster.place / "no_answer").touch()
    code, output = cluster.run("touch begun", SLURM_RESTART_COUNT="")
    assert code == 1
    assert "job 9" in output
    assert not (cluster.run_dir / "begun").exists()


def test_elements_of_an_array_may_share_a_run(cluster: Cluster) -> None:
    """A chain of jobs, submitted in advance; the launcher writes the id of the whole array."""
    for before in ("7", "7_3"):
        (cluster.run_dir / ".job").write_text(f"{before}\n")
        (cluster.place / "others").write_text("7_5 PENDING\n")
        array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4", "SLURM_RESTART_COUNT": ""}
        code, _ = cluster.run(status("finished"), RUN_DIR=str(cluster.run_dir), **array)
        assert code == 0
        assert cluster.owner == "7_4"


@pytest.mark.parametrize("srun", [KILLED, status("stopped", reason='"SIGTERM"') + "exit 1"])
def test_a_job_that_lost_its_run_to_another_one_asks_for_no_allocation(cluster: Cluster, srun: str) -> None:
    code, output = cluster.run("echo 9 >.job; " + srun)
    assert code != 0
    assert "the run belongs to job 9" in output
    assert cluster.calls("scontrol") == cluster.calls("sbatch") == []
    assert cluster.owner == "9"


# -- the STOP file: of a time limit, or of a user


def test_the_stop_request_of_a_time_limit_does_not_stop_the_next_allocation(cluster: Cluster) -> None:
    (cluster.run_dir / "STOP").write_text("time limit\n")
    code, _ = cluster.run("[ -e STOP ] && exit 9; " + status("finished"))
    assert code == 0


def test_the_stop_request_of_a_user_outlives_a_requeue_but_not_a_new_job(cluster: Cluster) -> None:
    (cluster.run_dir / "STOP").touch()
    code, output = cluster.run("touch begun")
    assert code == 0
    assert "STOP file" in output
    assert not (cluster.run_dir / "begun").exists()
    (cluster.run_dir / "STOP").touch()
    code, _ = cluster.run("[ -e STOP ] && exit 9; touch begun; " + status("finished"), SLURM_RESTART_COUNT="")
    assert code == 0
    assert (cluster.run_dir / "begun").exists()


def test_a_stop_request_of_a_user_that_comes_during_the_last_save_is_not_lost(cluster: Cluster) -> None:
    stopped = status("stopped", reason='"end of the SLURM allocation in 0.01 h"')
    code, _ = cluster.run(f"{SAVED}{stopped} touch STOP; exit 0")
    assert code == 0
    assert not cluster.requeued
    assert not (cluster.run_dir / "STOP").exists()


# -- signals at random moments


def _cancel_at_a_random_moment(job: Job, place: Path, seed: int) -> str:
    """Cancels a job of the launcher, before or after its run has ended; what became of the signal."""
    draw = random.Random(seed)
    cluster = Cluster(place)
    if refuse := draw.random() < 0.5:
        (place / "refuse_requeue").touch()
    script = place / "job.sbatch"
    script.write_text(job_script(replace(job, spec=replace(job.spec, dir=cluster.run_dir))))
    waits = f'until [ -e "{place}/go" ]; do /bin/sleep 0.01; done; '
    process = cluster.start(waits + SAVED + KILLED, script=script)
    before_the_end = draw.random() < 0.7
    if not before_the_end:
        wait_for(cluster.run_dir / ".job")
        (place / "go").touch()
    time.sleep(draw.uniform(0, 0.15))
    cancelled = cluster.cancel(process)
    (place / "go").touch()
    output, _ = process.communicate(timeout=250)
    if not cancelled:
        return "requeued before"
    # SLURM does not start a job that depends on the success of a cancelled one.
    assert all("--dependency=afterok:7 --kill-on-invalid-dep=yes" in call for call in cluster.calls("sbatch")), output
    assert not cluster.requeued, output
    assert refuse or not cluster.calls("sbatch"), output
    if "unexpected EOF" in output:  # as bash reports a handler that it could not execute
        return "lost"
    if before_the_end and process.returncode != -signal.SIGTERM:
        return "lost" if ", after SIGTERM" not in output else "noted"
    return "cancelled"


def _cancelled(place: Path, rounds: Iterable[int]) -> dict[str, int]:
    job = single("launch=slurm", "experiment=digits")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda seed: _cancel_at_a_random_moment(job, place / str(seed), seed), rounds))
    return {result: results.count(result) for result in sorted(set(results))}


@pytest.mark.parametrize("rounds", [pytest.param(10, id="10"), pytest.param(60, id="60", marks=pytest.mark.slow)])
def test_no_cancelled_job_comes_back_and_no_signal_is_lost(tmp_path: Path, rounds: int) -> None:
    results = _cancelled(tmp_path, range(rounds))
    print(results)
    assert results.get("lost", 0) == 0
    assert results["noted"] > 0
