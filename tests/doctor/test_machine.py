"""Findings about a machine, its precisions, and the versions of the ranks."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtrain.console import Finding
from dtrain.distributed.world import World
from dtrain.doctor import machine
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from tests.ranks import run_ranks


def one_rank(**other: object) -> World:
    values: dict[str, object] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "device": torch.device("cpu")}
    return World(**(values | {"backend": "gloo", "launched": False} | other))  # type: ignore[arg-type]


def found(subject: str, at: World | None = None) -> Finding:
    [finding] = [finding for finding in machine.examine_machine(at or one_rank()) if finding.subject == subject]
    return finding


def test_a_rank_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(rank: int) -> Finding:
        if rank == 1:
            monkeypatch.setattr(machine, "__version__", "0.0.1")
        return machine.ranks_agree(one_rank(rank=rank, size=dist.get_world_size()))

    for finding in run_ranks(2, one):
        assert finding.level == "error"
        assert "rank 1" in finding.text
        assert "dtrain 0.0.1" in finding.text


def test_precisions_are_checked_by_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(precision: Precision, device: torch.device) -> list[str]:
        if precision.name == "bf16":
            raise ConfigError("precision=bf16: OldGPU has no bf16 arithmetic")
        return ["precision=fp16: slow here"] if precision.name == "fp16" else []

    monkeypatch.setattr(Precision, "apply", apply)
    levels = {finding.subject: finding.level for finding in machine.examine_precisions(torch.device("cpu"))}
    assert levels == {
        "precision=fp32": "ok",
        "precision=tf32": "ok",
        "precision=bf16": "error",
        "precision=fp16": "warning",
    }


def test_more_threads_than_cores_and_idle_cores_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "process_cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert found("threads").level == "ok"
    crowded = found("threads", one_rank(size=4, local_size=4, launched=True))
    assert (crowded.level, crowded.remedy) == ("warning", "export OMP_NUM_THREADS=2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "fewer processes" in found("threads", one_rank(size=9, local_size=9, launched=True)).remedy
    idle = found("threads", one_rank(size=2, local_size=2, launched=True))
    assert (idle.level, idle.remedy) == ("warning", "export OMP_NUM_THREADS=4 before torchrun")


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, used=0, free=2**26))
    finding = found("/dev/shm")
    assert finding.level == "warning"
    assert "64 MiB" in finding.text
    assert "--shm-size" in finding.remedy


def test_a_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 20_000))
    finding = found("open files")
    assert (finding.level, finding.remedy) == ("warning", "ulimit -n 20000")


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", "/proc/dtrain")
    finding = found("cache")
    assert finding.level == "error"
    assert "/proc/dtrain cannot be written" in finding.text
    assert "DTRAIN_CACHE" in finding.remedy


def test_a_host_name_that_cannot_be_resolved_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "GLOO_SOCKET_IFNAME" in found("host name").remedy


@pytest.mark.parametrize(
    ("build", "driver", "part"), [("13.0", False, "finds no GPU"), (None, True, "built for the CPU")]
)
def test_a_gpu_that_torch_cannot_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str | None, driver: bool, part: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    finding = found("CUDA")
    assert finding.level == "warning"
    assert part in finding.text


def test_a_slurm_job_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert found("SLURM").text == "job 7: NTASKS=4"


def test_other_programs_that_compute_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (97.0, 1.0, 1.0))
    assert found("load").level == "warning"


def test_missing_packages_and_an_old_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_installed", lambda name: None if name in ("wandb", "simplejpeg") else "1.0")
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert found("torch").level == "error"
    assert found("simplejpeg").remedy == "pip install simplejpeg"
    assert found("wandb").level == "warning"


def test_the_extras_that_are_missing_are_named_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda extra: extra not in ("hf", "media"))
    [found] = [finding for finding in machine._versions() if finding.subject == "extras"]
    assert found.level == "ok"
    installed, _, missing = found.text.partition("; not installed: ")
    assert missing == "hf, media"
    assert sorted([*installed.split(", "), *missing.split(", ")]) == sorted(machine.EXTRAS)


def test_the_mode_of_wandb_is_shown_with_the_login_and_what_sends_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    shown = found("wandb mode").text
    assert shown.startswith("offline (logged in at https://wandb.example.org")
    assert "tracker.mode=online" in shown
    monkeypatch.setenv("WANDB_MODE", "online")
    assert found("wandb mode").text == "online (logged in at https://wandb.example.org)"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", "/nowhere")
    assert found("wandb mode").level == "error"


def test_a_clock_that_is_behind_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "clock" not in [finding.subject for finding in machine.examine_machine(one_rank())]
    monkeypatch.setattr(time, "time", lambda: 1e9)
    finding = found("clock")
    assert finding.level == "warning"
    assert "2001" in finding.text
    assert "timedatectl" in finding.remedy


def test_clocks_of_ranks_that_differ_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(rank: int, ahead: float) -> list[Finding]:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + ahead * rank)
        return machine.clocks_agree(one_rank(rank=rank, size=2))

    assert run_ranks(2, one, 0.0) == [[], []]
    for [finding] in run_ranks(2, one, 60.0):
        assert (finding.subject, finding.level) == ("clock", "warning")
        assert "60 s ahead" in finding.text


@pytest.mark.parametrize(
    ("levels", "line"),
    [
        ({}, "fit: no problem was found"),
        ({"open files": "ok"}, "fit: no problem was found"),
        ({"scikit-learn": "warning"}, "fit, with 1 warning: scikit-learn. First: repair scikit-learn"),
        ({"load": "warning", "/dev/shm": "warning"}, "fit, with 2 warnings: /dev/shm, load. First: repair /dev/shm"),
        ({"CUDA": "warning", "cache": "error"}, "not fit: cache. First: repair cache"),
        ({"extra of x": "error", "cache on b": "error"}, "not fit: cache on b, extra of x. First: repair cache on b"),
    ],
)
def test_the_verdict_names_the_problems_and_what_to_do_first(levels: dict[str, str], line: str) -> None:
    findings = [Finding(name, "", level, f"repair {name}\nor not") for name, level in levels.items()]
    assert machine.verdict(findings) == line
