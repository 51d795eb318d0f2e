"""The Dockerfile and the examples for Kubernetes and SkyPilot: schemas, command lines, and what stopping depends on."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.distributed.world import rendezvous_options
from dtrain.errors import ConfigError
from dtrain.launch import local
from dtrain.launch.job import STOPPED
from tests.doc_commands import accepted, compose_only
from tests.forked_python import forked_python
from tests.launch.compose import single
from tests.refusals import refused
from tests.whole_runs import status

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SKYPILOT = sorted((ROOT / "examples" / "skypilot").glob("*.yaml"))
SPOT = ROOT / "examples" / "spot" / "cloud-init.yaml"
#: What torchrun needs to know on several machines.
RENDEZVOUS = {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """The specs of all pods below a node of a YAML file."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The ``batch/v1`` jobs inside a JobSet or the runtime of Kubeflow Trainer."""
    if document["kind"] == "JobSet":
        replicated = document["spec"]["replicatedJobs"]
    elif document["kind"] == "TrainingRuntime":
        replicated = document["spec"]["template"]["spec"]["replicatedJobs"]
    else:
        return []
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job["template"]} for job in replicated]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_pods_jobs_and_volumes_have_kubernetes_own_schema(path: Path) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install -c constraints.txt -e . --group dev"
    )
    found = 0
    for document in documents(path):
        pod_objects = [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": spec} for spec in pods(document)]
        own = [document] if document["apiVersion"] == "v1" else []
        for one in (*pod_objects, *jobs(document), *own):
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
            found += 1
    assert found


@pytest.mark.slow
def test_the_commands_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [spec["args"] for path in KUBERNETES for document in documents(path) for spec in _with_args(document)]
    assert len(commands) == 5
    commands += [shlex.split(documents(path)[0]["run"].splitlines()[-1])[2:] for path in SKYPILOT]
    service = documents(SPOT)[0]["write_files"][0]["content"]
    (line,) = (line for line in service.splitlines() if line.startswith("ExecStart="))
    commands.append(line.split(" dtrain:cuda ")[1].split())
    monkeypatch.chdir(tmp_path)
    compose_only(monkeypatch)
    for words in commands:
        assert words[:2] == ["launch", "launch=local"]  # it ends with 75 when it was stopped, on every machine
        assert accepted(["dtrain", *words], monkeypatch), words
        assert next(word for word in words if word.startswith("run.dir=")).startswith("run.dir=/workspace/")
    mirrored = [words for words in commands if "checkpoint.mirror=s3://BUCKET/runs/digits" in words]
    assert len(mirrored) == 3  # on Kubernetes, with SkyPilot, and on a machine of its own


def _with_args(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "args" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from _with_args(value)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_a_pod_has_the_time_to_save_the_memory_to_share_and_our_user(path: Path) -> None:
    for spec in (spec for document in documents(path) for spec in pods(document)):
        assert spec["terminationGracePeriodSeconds"] >= 300
        assert spec["securityContext"]["runAsUser"] == 1000  # of the Dockerfile
        (container,) = spec["containers"]
        assert "command" not in container  # it would replace tini
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounts.values()) == set(volumes)
        # Without a disk that outlives the pod, the run has to live elsewhere.
        is_mirrored = any(word.startswith("checkpoint.mirror=") for word in container.get("args", []))
        assert ("emptyDir" if is_mirrored else "persistentVolumeClaim") in volumes[mounts["/workspace"]]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_what_is_stopped_starts_again_and_what_fails_does_so_a_few_times() -> None:
    every = [document for path in KUBERNETES for document in documents(path)]
    by_kind = {document["kind"]: document["spec"] for document in every}
    job_sets = [document["spec"] for document in every if document["kind"] == "JobSet"]
    assert len(job_sets) == 2
    for job_set in (*job_sets, by_kind["TrainingRuntime"]["template"]["spec"]):
        policy = job_set["failurePolicy"]
        assert policy["restartStrategy"] == "BlockingRecreate"
        assert 0 < policy["maxRestarts"] < 10
        assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
            ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
        ]
        (replicated,) = job_set["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert job["backoffLimit"] == 0
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
        codes, conditions = job["podFailurePolicy"]["rules"]
        assert codes["onExitCodes"] == {
            "containerName": job["template"]["spec"]["containers"][0]["name"],
            "operator": "In",
            "values": [STOPPED],
        }
        assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    replicas = by_kind["PyTorchJob"]["pytorchReplicaSpecs"].values()
    assert [one["restartPolicy"] for one in replicas] == ["OnFailure", "OnFailure"]
    for resources in (one["resources"] for path in SKYPILOT for one in documents(path)):
        assert resources["job_recovery"]["recover_on_exit_codes"] == [STOPPED]


def test_a_spot_machine_trains_by_itself_and_has_the_time_to_upload() -> None:
    assert SPOT.read_text().startswith("#cloud-config\n")  # else cloud-init ignores it
    (document,) = documents(SPOT)
    (file,) = document["write_files"]
    service = configparser.ConfigParser(strict=False, interpolation=None)
    service.optionxform = str  # type: ignore[assignment, method-assign]
    service.read_string(file["content"])
    assert Path(file["path"]).name in document["runcmd"][0]
    (start,) = (service["Service"]["ExecStart"],)
    options = dict(word.lstrip("-").split("=", 1) for word in start.split() if "=" in word)
    # The launcher, then docker, then systemd, each within the time of the next one.
    assert float(options["checkpoint.mirror_seconds"]) + 30 <= float(options["stop-timeout"])
    assert float(options["stop-timeout"]) < float(service["Service"]["TimeoutStopSec"])
    assert service["Service"]["Restart"] == "on-failure"  # 75 is one; 0 is the end of the run


@pytest.mark.parametrize("name", ["jobset", "jobset-mirror"])
def test_machines_know_each_other_where_the_cluster_does_not_tell_them(name: str) -> None:
    (job_set,) = documents(ROOT / "examples" / "kubernetes" / f"{name}.yaml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    job, name = replicated["template"]["spec"], str(job_set["metadata"]["name"])
    assert environment.keys() >= RENDEZVOUS
    assert environment["PET_NNODES"] == str(job["completions"]) == str(job["parallelism"])
    assert environment["PET_MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert {int(environment["PET_MASTER_PORT"])} == {port["containerPort"] for port in container["ports"]}
    for path in SKYPILOT:
        assert {word.partition("=")[0] for word in documents(path)[0]["run"].split()} >= RENDEZVOUS
    assert rendezvous_options(environment) == []


def test_the_dockerfile_passes_the_linter() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install -c constraints.txt -e . --group dev")
    ended = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_the_context_of_the_image_has_what_the_wheel_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "conf", "dtrain"}
    assert all((ROOT / name).exists() for name in kept)


def test_several_runs_at_a_time_are_refused_on_one_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    job = single("experiment=digits", "launch.max_running=2")
    local.check([job])
    monkeypatch.setenv("PET_NNODES", "2")
    with refused(ConfigError, "launch.max_running", 2, "PET_NNODES"):
        local.check([job])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_pod_stops_both_and_both_resume(tmp_path: Path, digits: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def pod(python: str, rank: int, *arguments: str) -> subprocess.Popen[bytes]:
        where = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        run = ["launch=local", "experiment=digits", f"run.dir={tmp_path / 'run'}", "tracker=none", "data.num_workers=0"]
        command = [python, "-m", "dtrain", "launch", *run, "train.max_epochs=300", "train.log_every=1", *arguments]
        # As process 1 of a container, whose end is the end of all of its processes.
        is_container = python == sys.executable and os.geteuid() == 0 and shutil.which("unshare")
        namespace = ["unshare", "--pid", "--fork", "--kill-child"] if is_container else []
        return subprocess.Popen([*namespace, *command], env=os.environ | {"OMP_NUM_THREADS": "1"} | where)

    running = [pod(sys.executable, rank) for rank in range(2)]
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert all(one.poll() is None for one in running)
            time.sleep(0.1)
        os.kill(_innermost(running[1].pid), signal.SIGTERM)
        assert [one.wait(300) for one in running] == [STOPPED, STOPPED]
        stopped = status(tmp_path / "run")
        assert stopped["state"] == "stopped"
        running = [pod(forked_python(), rank, f"train.max_steps={stopped['step'] + 2}") for rank in range(2)]
        assert [one.wait(300) for one in running] == [0, 0]
        assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["restarts"]) == ("finished", 1)
    finally:
        for one in running:
            one.kill()


def _innermost(pid: int) -> int:
    """The launcher: what ``unshare`` has started, or the process itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    is_unshare = Path(f"/proc/{pid}/comm").read_text().strip() == "unshare"
    return int(children[0]) if is_unshare else pid
