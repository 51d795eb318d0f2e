"""Ray, SageMaker, Vertex AI and Modal: the examples run as processes with the variables that these services document."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from dtrain.launch.job import STOPPED
from tests.doc_commands import accepted, compose_only
from tests.forked_python import forked_python
from tests.refusals import assert_refused
from tests.whole_runs import alive, records, status

ROOT = Path(__file__).resolve().parents[1]
SAGEMAKER = ROOT / "examples" / "sagemaker" / "train.sh"
VERTEX = ROOT / "examples" / "vertex" / "job.yaml"
#: Two machines of one: both names are the loopback interface.
HOSTS = ("127.0.0.1", "localhost")
NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
SHORT = ("tracker=none", "data.num_workers=0", "train.log_every=1", "train.max_epochs=300")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    """Starts a machine's command in a process group of its own, which is the end of the machine when it is killed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(command, env=environment, start_new_session=True)


def end(machines: list[subprocess.Popen[bytes]]) -> None:
    """Kills the machines, with the processes that they have started in sessions of their own; forks are none of these."""
    for machine in machines:
        for pid in [*descendants(machine.pid), machine.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.wait()


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def wait_until(holds: Callable[[], object], machines: list[subprocess.Popen[bytes]], seconds: float = 120) -> None:
    """Waits until something holds while the machines run."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        assert all(machine.poll() is None for machine in machines)
        time.sleep(0.1)


def path_with_dtrain(folder: Path, python: str) -> str:
    """A PATH that begins with a ``dtrain`` of this checkout, which is made in a folder."""
    program = folder / "bin" / "dtrain"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/bash\nexec "{python}" -m dtrain "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


# -- SageMaker


def sagemaker_hosts(disks: list[Path], opt_ml: Path, data: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """The hosts of a job. Each sees its own disk as ``opt_ml``."""
    port, hosts = str(free_port()), []
    script = SAGEMAKER.read_text().replace("/opt/ml", str(opt_ml))
    for disk, name in zip(disks, HOSTS, strict=True):
        # A fork enters the namespace of its client, which only root may.
        path = path_with_dtrain(opt_ml.parent, forked_python() if os.geteuid() == 0 else sys.executable)
        mounted = ["bash", "-c", 'mount --bind "$0" "$1" && exec bash -c "$2" "${@:2}"', str(disk), str(opt_ml), script]
        job = {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": name, "SM_NUM_GPUS": "0", "PET_MASTER_PORT": port}
        channels = {"SM_CHANNEL_TRAIN": str(data), "SM_CHANNEL_VAL": str(data)}
        hosts.append(start([*NAMESPACE, *mounted, *SHORT, *arguments], PATH=path, **job, **channels))
    return hosts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_of_sagemaker_stop_and_resume_from_the_files_that_it_copied(tmp_path: Path, digits: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("needs namespaces of mounts, for two hosts with disks of their own")
    disks, opt_ml = [tmp_path / "algo-1", tmp_path / "algo-2"], tmp_path / "ml"
    for folder in (*disks, opt_ml):
        folder.mkdir()
    first, second = (disk / "checkpoints" / "run" for disk in disks)
    hosts = sagemaker_hosts(disks, opt_ml, digits)
    try:
        wait_until((first / "metrics.jsonl").exists, hosts)
        os.kill(hosts[1].pid, signal.SIGTERM)
        assert [host.wait(120) for host in hosts] == [STOPPED, STOPPED]
        step = status(first)["step"]
        assert status(second)["state"] == "stopped"
        assert list((first / "checkpoints").glob("step-*"))
        assert not list((second / "checkpoints").glob("step-*"))  # on a disk of its own
        copied = tmp_path / "checkpoint_s3_uri"
        for disk in reversed(disks):  # both copy to the same place, and a bucket has files only
            for file in (path for path in disk.rglob("*") if path.is_file()):
                target = copied / file.relative_to(disk)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            shutil.rmtree(disk)
            disk.mkdir()
        for disk in disks:
            shutil.copytree(copied, disk, copy_function=shutil.copyfile, dirs_exist_ok=True)
        hosts = sagemaker_hosts(disks, opt_ml, digits, f"train.max_steps={step + 3}")
        assert [host.wait(120) for host in hosts] == [0, 0]
    finally:
        end(hosts)
    assert (status(first)["state"], status(first)["restarts"]) == ("finished", 1)
    assert [record["step"] for record in records(first) if "train/loss" in record] == [*range(1, step + 4)]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train"], ["launch", "launch=local"]])
def test_a_variable_that_is_not_as_documented_is_one_message(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [forked_python(), "-m", "dtrain", *command, "experiment=digits", f"run.dir={tmp_path / 'run'}"],
        env=os.environ | {"SM_HOSTS": "algo-1,algo-2", "SM_CURRENT_HOST": "algo-1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode != 0, done.stdout, (tmp_path / "run").exists()) == (True, "", False)
    (line,) = done.stderr.splitlines()
    assert_refused(line, "dtrain: error: SM_HOSTS", "algo-1,algo-2", "JSON list")


# -- Vertex AI


def test_the_pools_of_the_job_for_vertex_ai_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose_only(monkeypatch)
    first, others = yaml.safe_load(VERTEX.read_text())["workerPoolSpecs"]
    assert first == others
    assert first["replicaCount"] == 1  # of the first pool, as Vertex AI wants
    assert accepted(["dtrain", *first["containerSpec"]["args"]], monkeypatch)


def vertex_machines(python: str, disk: Path, bucket: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """The machines of the example's job, with a folder as /workspace and one as the bucket."""
    cluster = {"workerpool0": [f"{HOSTS[0]}:{free_port()}"], "workerpool1": [f"{HOSTS[1]}:2222"]}
    machines = []
    for number, pool in enumerate(yaml.safe_load(VERTEX.read_text())["workerPoolSpecs"]):
        words = [word.replace("/workspace", str(disk)) for word in pool["containerSpec"]["args"]]
        words = [word.replace("gs://BUCKET", f"file://{bucket}") for word in words]
        task = {"type": f"workerpool{number}", "index": 0, "trial": ""}
        spec = json.dumps({"cluster": cluster, "environment": "cloud", "task": task})
        machines.append(start([python, "-m", "dtrain", *words, *SHORT, *arguments], CLUSTER_SPEC=spec))
    return machines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_machines_of_vertex_ai_are_lost_and_new_ones_continue_from_the_bucket(tmp_path: Path, digits: Path) -> None:
    bucket, manifests = tmp_path / "bucket", "runs/digits/*/checkpoints/step-*/manifest.json"
    bucket.mkdir()
    machines = vertex_machines(sys.executable, tmp_path / "lost", bucket, "checkpoint.every_steps=20")
    try:
        wait_until(lambda: list(bucket.glob(manifests)), machines)
    finally:
        end(machines)
    steps = max(int(path.parent.name.split("-")[1]) for path in bucket.glob(manifests)) + 3
    machines = vertex_machines(
        forked_python(), tmp_path / "new", bucket, "checkpoint.every_steps=20", f"train.max_steps={steps}"
    )
    try:
        assert [machine.wait(120) for machine in machines] == [0, 0]
    finally:
        end(machines)
    run_dir = tmp_path / "new" / "runs" / "digits"
    assert (status(run_dir)["state"], status(run_dir)["restarts"]) == ("finished", 1)
    assert [record["step"] for record in records(run_dir) if "train/loss" in record] == [*range(1, steps + 1)]


# -- Ray


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_under_ray_survives_the_loss_of_a_worker(tmp_path: Path, digits: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'ray[train]'")
    run_dir = tmp_path / "run"
    overrides = ["experiment=digits", f"run.dir={run_dir}", *SHORT, "train.max_steps=200", "checkpoint.every_steps=20"]
    # Its own settings and results are in the home of the user.
    home = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    job = start([sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers=2", *overrides], **home)
    try:
        wait_until((run_dir / "checkpoints" / "step-000000020").exists, [job])
        ranks = [pid for pid in descendants(job.pid) if f"run.dir={run_dir}" in command_line(pid)]
        worker = parent(max(pid for pid in ranks if "dtrain.train" in command_line(pid)))
        os.kill(worker, signal.SIGKILL)
        assert job.wait(300) == 0
    finally:
        end([job])
    assert (status(run_dir)["state"], status(run_dir)["step"], status(run_dir)["restarts"]) == ("finished", 200, 1)
    assert [record["step"] for record in records(run_dir) if "train/loss" in record] == [*range(1, 201)]
    assert not any(alive(pid) for pid in ranks)


def command_line(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -- Modal


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_function_of_modal_that_is_interrupted_continues_on_an_empty_disk(tmp_path: Path, digits: Path) -> None:
    """``train.local`` runs the function's body here; what Modal does around it is not tested."""
    pytest.importorskip("modal", reason="needs Modal: pip install modal")
    bucket = tmp_path / "bucket"
    bucket.mkdir()

    def function(name: str, *more: str) -> subprocess.Popen[bytes]:
        mirror = f"checkpoint.mirror=file://{bucket}/runs/digits"
        overrides = ["experiment=digits", f"run.dir={tmp_path / name}", mirror, *SHORT, *more]
        code = f"from examples.modal_spot import train; train.local({overrides})"
        (tmp_path / name).mkdir()
        return start([sys.executable, "-c", code], PATH=path_with_dtrain(tmp_path, forked_python()), HOME=str(tmp_path))

    interrupted = function("first")
    try:
        wait_until((tmp_path / "first" / "metrics.jsonl").exists, [interrupted])
        os.kill(interrupted.pid, signal.SIGINT)
        assert interrupted.wait(120) != 0  # so that Modal starts it again
        stopped = status(tmp_path / "first")
        assert stopped["state"] == "stopped"
        again = function("second", f"train.max_steps={stopped['step'] + 3}")
        assert again.wait(120) == 0
    finally:
        end([interrupted])
    assert (status(tmp_path / "second")["state"], status(tmp_path / "second")["restarts"]) == ("finished", 1)
