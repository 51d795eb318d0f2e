"""``dtrain.doctor``: every trap that it knows is a line with what to do."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtrain import doctor as doctor_module
from dtrain.config.errors import ConfigError
from dtrain.config.run import recompose_if_run
from dtrain.diagnosis import machine, precisions, world
from dtrain.diagnosis.all_reduce import AllReduce
from dtrain.diagnosis.finding import Finding, as_text
from dtrain.distributed.world import World
from dtrain.doctor import main
from dtrain.precision import Precision
from tests.ranks import run_ranks


def one_rank(**other: object) -> World:
    values: dict[str, object] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "device": torch.device("cpu")}
    return World(**(values | {"backend": "gloo", "launched": False} | other))  # type: ignore[arg-type]


def found(subject: str, at: World | None = None) -> Finding:
    [finding] = [finding for finding in machine.machine(at or one_rank()) if finding.subject == subject]
    return finding


def doctor(ranks: int) -> list[tuple[int, str]]:
    """Exit code and output of each rank, in forked processes."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return main([]), text.getvalue()

    return run_ranks(ranks, one, init=False)


def test_the_command_shows_this_machine() -> None:
    [(code, text)] = doctor(1)
    assert code == 0, text
    for part in (f"torch  .*{re.escape(torch.__version__)}", "wandb mode  *offline", "/dev/shm", "open files", "SLURM"):
        assert re.search(part, text), part
    for name in ("fp32", "tf32", "bf16", "fp16"):
        assert re.search(rf"^  (ok|warning|error) +precision={name}  +\S", text, re.MULTILINE)
    assert os.environ["DTRAIN_CACHE"] in text
    assert "torchrun" in text.splitlines()[-2]
    assert "experiment=digits" in text.splitlines()[-1]


def test_ranks_measure_their_all_reduce_and_only_the_first_one_speaks() -> None:
    (code, text), (other_code, silence) = doctor(2)
    assert (code, other_code, silence) == (0, 0, "")
    assert "2 on 1 machine, gloo, equal versions" in text
    assert re.search(r"all-reduce latency +8 floats in [\d,]+ microseconds", text)
    assert re.search(r"all-reduce bandwidth +1 MiB in [\d.,]+ ms, [\d.]+ GB/s; 25 MiB in [\d.,]+ ms, [\d.]+ GB/s", text)


def test_a_rank_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(rank: int) -> Finding:
        if rank == 1:
            monkeypatch.setattr(world, "__version__", "0.0.1")
        return world.ranks_agree(one_rank(rank=rank, size=dist.get_world_size()))

    for finding in run_ranks(2, one):
        assert finding.level == "error"
        assert "rank 1" in finding.text
        assert "dtrain 0.0.1" in finding.text


def test_an_unknown_subcommand_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["numeric"])
    assert ended.value.code == 2
    assert "no subcommand 'numeric'" in capsys.readouterr().err


def test_presets_are_judged_by_the_policy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(precision: Precision, device: torch.device) -> list[str]:
        if precision.name == "bf16":
            raise ConfigError("precision=bf16: OldGPU has no bf16 arithmetic")
        return ["precision=fp16: slow here"] if precision.name == "fp16" else []

    monkeypatch.setattr(Precision, "apply", apply)
    levels = {finding.subject: finding.level for finding in precisions.precisions(torch.device("cpu"))}
    assert levels == {
        "precision=fp32": "ok",
        "precision=tf32": "ok",
        "precision=bf16": "error",
        "precision=fp16": "warning",
        "fp16 operators": "ok",
    }


def test_a_container_s_quota_counts_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "_CGROUP_CPU", tmp_path / "cpu.max")
    assert machine.usable_cores() == 64
    for text, cores in (("max 100000", 64), ("350000 100000", 4), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine.usable_cores() == cores


def test_more_threads_than_cores_and_idle_cores_are_traps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert found("threads").level == "ok"
    crowded = found("threads", one_rank(size=4, local_size=4, launched=True))
    assert (crowded.level, crowded.remedy) == ("warning", "export OMP_NUM_THREADS=2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "fewer processes" in found("threads", one_rank(size=9, local_size=9, launched=True)).remedy
    idle = found("threads", one_rank(size=2, local_size=2, launched=True))
    assert (idle.level, idle.remedy) == ("warning", "export OMP_NUM_THREADS=4 before torchrun")


def test_little_shared_memory_is_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, used=0, free=2**26))
    finding = found("/dev/shm")
    assert finding.level == "warning"
    assert "64 MiB" in finding.text
    assert "--shm-size" in finding.remedy


def test_few_open_files_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 20_000))
    finding = found("open files")
    assert (finding.level, finding.remedy) == ("warning", "ulimit -n 20000")


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", "/proc/dtrain")
    finding = found("cache")
    assert finding.level == "error"
    assert "/proc/dtrain cannot be written" in finding.text
    assert "DTRAIN_CACHE" in finding.remedy


def test_a_host_that_cannot_look_itself_up_is_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "GLOO_SOCKET_IFNAME" in found("host name").remedy


@pytest.mark.parametrize(
    ("build", "driver", "part"), [("13.0", False, "sees no GPU"), (None, True, "built for the CPU")]
)
def test_a_gpu_that_torch_does_not_use_is_a_trap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str | None, driver: bool, part: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    finding = found("CUDA")
    assert finding.level == "warning"
    assert part in finding.text


def test_a_slurm_job_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert found("SLURM").text == "job 7: NTASKS=4"


def test_tasks_of_srun_are_ranks_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[World] = []
    monkeypatch.setattr(doctor_module, "look_at_machine", lambda options: seen.append(World.of()))
    names = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "4", "PROCID": "2", "LOCALID": "0", "NODEID": "2"}
    for name, value in {**names, "STEP_TASKS_PER_NODE": "1(x4)", "STEP_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    main([])
    assert (seen[0].rank, seen[0].size, seen[0].launched) == (2, 4, True)


def test_others_that_compute_here_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (97.0, 1.0, 1.0))
    assert found("load").level == "warning"


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        (["run.dir=RUN"], ["experiment=digits", "train.max_steps=7", "run.dir=RUN"]),
        (["run.dir=RUN", "train.max_steps=8"], ["experiment=digits", "run.dir=RUN", "train.max_steps=8"]),
        (["experiment=line", "run.dir=RUN"], ["experiment=line", "run.dir=RUN"]),
        (["data=digits", "model=mlp", "run.dir=NEW"], ["data=digits", "model=mlp", "run.dir=NEW"]),
    ],
)
def test_the_config_is_that_of_the_run_unless_another_is_named(
    tmp_path: Path, typed: list[str], composed: list[str]
) -> None:
    overrides = "overrides: [experiment=digits, train.max_steps=7]\nconfig_dirs: []\n"
    (tmp_path / "overrides.yaml").write_text(overrides)
    given = [argument.replace("RUN", str(tmp_path)).replace("NEW", str(tmp_path / "new")) for argument in typed]
    want = [argument.replace("RUN", str(tmp_path)).replace("NEW", str(tmp_path / "new")) for argument in composed]
    assert recompose_if_run(given) == want


def test_a_directory_that_holds_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        recompose_if_run([f"run.dir={tmp_path}"])


def test_between_the_sizes_that_were_measured_an_all_reduce_is_estimated() -> None:
    measured = AllReduce(2, {32: 1e-4, 2**20: 1e-3, 25 * 2**20: 1e-2})
    assert measured.estimate(16) == pytest.approx(1e-4)
    assert measured.estimate(2**20) == pytest.approx(1e-3)
    assert measured.estimate(13 * 2**20) == pytest.approx((1e-3 + 1e-2) / 2)
    assert measured.estimate(250 * 2**20) == pytest.approx(1e-1)


def test_missing_packages_and_an_old_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_installed", lambda name: None if name in ("wandb", "simplejpeg") else "1.0")
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert found("torch").level == "error"
    assert found("simplejpeg").remedy == "pip install simplejpeg"
    assert found("wandb").level == "warning"


def test_each_remedy_stands_under_its_finding() -> None:
    lines = as_text([Finding("a", "fine"), Finding("long name", "bad", "warning", "do this\nor that")]).splitlines()
    assert lines == [
        "  ok       a          fine",
        "  warning  long name  bad",
        "                      -> do this",
        "                      -> or that",
    ]


def test_a_run_directory_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(doctor_module, "_surroundings", lambda world: pytest.fail("something was measured"))

    def rank(number: int) -> object:
        with pytest.raises(SystemExit) as ended:
            main(["experiment=digits", f"run.dir={in_the_way / 'run'}"])
        return ended.value.code

    assert run_ranks(1, rank, init=False) == [1]
    assert f"run.dir: {in_the_way / 'run'} cannot be written, choose another one" in capfd.readouterr().err
