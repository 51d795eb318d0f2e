"""Findings about one machine (hardware, software, limits), the precisions of its device, and what all ranks have in common.

A machine is *fit* if no finding is an error; ``verdict`` says so in one line.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain import __version__
from dtrain.console import LEVELS, Finding, size_text
from dtrain.distributed.collectives import wait_for_all
from dtrain.distributed.world import World, process_cpu_count
from dtrain.errors import ConfigError
from dtrain.extras import EXTRAS, is_installed
from dtrain.files import cache_dir
from dtrain.precision import Precision
from dtrain.tracking.sinks import wandb_logged_in, wandb_mode, wandb_server

SHARED_MEMORY = Path("/dev/shm")
#: Values of ``precision`` to examine.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_PACKAGES = ("webdataset", "hydra-core", "omegaconf", "numpy", "safetensors", "simplejpeg", "Pillow", "wandb")
_OLDEST_TORCH = (2, 9)
_MIN_SHARED_MEMORY = _MIN_CACHE = 2**30
# 64 lanes with shuffle windows of 8 shards need hundreds of open files, and batches in shared memory need one per tensor.
_MIN_OPEN_FILES = 4096
#: Subjects of findings in the order in which their problems are solved; others come last.
_ORDER = (
    *("python", "torch", "CUDA", "NCCL", "gloo", "host name", "ranks", "clock", "/dev/shm", "open files", "cache"),
    *("checkpoints", "prefetched", "memory", "packages", "extra"),
)
_MOST_CLOCK_SKEW = 5.0  # seconds
_DAY = 24 * 3600.0
_SYNCHRONISE = "Synchronise the clock: timedatectl set-ntp true, or chronyd"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def examine_machine(world: World) -> list[Finding]:
    """All findings about this machine, in the order of printing."""
    return [
        *_versions(),
        *_devices(world),
        *_processors(world),
        *_memory_and_files(),
        *_clock(),
        *_cache(),
        *_network(),
        *_slurm(),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("dtrain", __version__)
    too_old = tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH
    remedy = "dtrain needs torch >= 2.9: pip install -U torch" if too_old else ""
    yield Finding("torch", torch.__version__, "error" if too_old else "ok", remedy)
    found = {name: _installed(name) for name in _PACKAGES}
    yield Finding("packages", ", ".join(f"{name} {number}" for name, number in found.items() if number))
    for name in (name for name, number in found.items() if not number):
        if name == "wandb":
            yield Finding(name, "not installed", "warning", "pip install wandb, or set tracker=none")
        else:
            yield Finding(name, "not installed", "error", f"pip install {name}")
    extras = {is_there: [name for name in EXTRAS if is_installed(name) == is_there] for is_there in (True, False)}
    absent = f"; not installed: {', '.join(extras[False])}" if extras[False] else ""
    yield Finding("extras", f"{', '.join(extras[True]) or 'none'}{absent}")
    try:
        mode = wandb_mode(None)
        login = f"{'logged in' if wandb_logged_in() else 'not logged in'} at {wandb_server()}"
        hint = "; tracker.mode=online or WANDB_MODE=online sends records" if mode == "offline" else ""
        yield Finding("wandb mode", f"{mode} ({login}{hint})")
    except ConfigError as error:
        yield Finding("wandb mode", str(error), "error", "Correct WANDB_MODE, run `wandb login`, or set tracker=none")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices(world: World) -> Iterator[Finding]:
    built_for = torch.version.cuda
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(gpus):
        found = torch.cuda.get_device_properties(number)
        yield Finding(
            f"GPU {number}",
            f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}",
        )
    if gpus and not dist.is_nccl_available():
        yield Finding(
            "NCCL", "this torch build has no NCCL", "error", "Install a torch build with NCCL; runs on GPUs need it"
        )
    elif gpus:
        numbers = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("CUDA", f"{built_for}, cuDNN {torch.backends.cudnn.version()}, NCCL {numbers}")
    elif built_for is not None:
        yield Finding(
            "CUDA",
            f"torch is built for CUDA {built_for}, but finds no GPU",
            "warning",
            "On a machine with GPUs: check the driver (nvidia-smi), start the container with --gpus all, and check "
            "CUDA_VISIBLE_DEVICES",
        )
    elif _NVIDIA_DRIVER.exists():
        yield Finding(
            "CUDA",
            "this machine has an NVIDIA driver, but torch is built for the CPU",
            "warning",
            "Install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    else:
        yield Finding("CUDA", "none: training runs on the CPU, with gloo")
    if gpus > 1 and not world.launched:
        yield Finding(
            "ranks",
            f"1, with {gpus} GPUs",
            "ok",
            "dtrain train uses all GPUs, one process for each",
        )
    if not dist.is_gloo_available():
        yield Finding(
            "gloo", "this torch build has no gloo", "error", "Install a torch build with gloo; every run needs it"
        )


def _processors(world: World) -> Iterator[Finding]:
    cores = process_cpu_count()
    all_cores = os.cpu_count() or cores
    yield Finding("CPU cores", f"{cores} usable of {all_cores}" if cores < all_cores else str(cores))
    load = os.getloadavg()[0]
    if load > cores:
        yield Finding(
            "load",
            f"{load:.1f} on {cores} cores: other programs compute on this machine, so measurements are too slow",
            "warning",
            "Measure again when the machine is idle",
        )
    omp_num_threads = os.environ.get("OMP_NUM_THREADS")
    threads = torch.get_num_threads()
    text = (
        f"{threads} for each process (OMP_NUM_THREADS={omp_num_threads or 'not set'}), processes on this machine: "
        f"{world.local_size}"
    )
    share = max(cores // world.local_size, 1)
    if threads * world.local_size > cores:
        remedy = f"export OMP_NUM_THREADS={share}" if threads > share else "Start fewer processes on this machine"
        yield Finding("threads", f"{text}: more threads than cores", "warning", remedy)
    elif world.device.type == "cpu" and world.launched and threads == 1 and share > 1:
        # torchrun sets OMP_NUM_THREADS=1 if it is not set.
        yield Finding(
            "threads", f"{text}: some cores are idle", "warning", f"export OMP_NUM_THREADS={share} before torchrun"
        )
    else:
        yield Finding("threads", text)
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    yield Finding("start method", f"{method} (set data.start_method=forkserver if workers hang)")


def _memory_and_files() -> Iterator[Finding]:
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        text = f"{size_text(usage.free)} free of {size_text(usage.total)}"
        if usage.free < _MIN_SHARED_MEMORY:
            yield Finding(
                "/dev/shm",
                f"{text}: data workers pass batches through it, and are killed with 'Bus error' when it is full",
                "warning",
                "Start the container with --ipc=host or --shm-size=8g, or set data.num_workers=0",
            )
        else:
            yield Finding("/dev/shm", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        reachable = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        yield Finding(
            "open files", f"ulimit -n {limit}: many shards and workers need more", "warning", f"ulimit -n {reachable}"
        )
    else:
        yield Finding("open files", f"ulimit -n {limit}")


def _cache() -> Iterator[Finding]:
    folder = cache_dir().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding("cache", f"{folder} cannot be written ({error.strerror})", "error", "export DTRAIN_CACHE=FOLDER")
        return
    level, remedy = (
        ("warning", "export DTRAIN_CACHE=FOLDER, on a disk with more space") if free < _MIN_CACHE else ("ok", "")
    )
    yield Finding("cache", f"{folder}, {size_text(free)} free", level, remedy)


def _clock() -> Iterator[Finding]:
    """A warning if the clock is behind; certificates and downloads would be refused, and new files look older than old ones."""
    now, installed = time.time(), Path(torch.__file__).stat().st_mtime
    if now < installed - _DAY:
        dates = [f"{datetime.fromtimestamp(seconds):%Y-%m-%d}" for seconds in (now, installed)]
        yield Finding("clock", f"{dates[0]}, but torch was installed on {dates[1]}", "warning", _SYNCHRONISE)


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "host name",
            f"{name} cannot be resolved: gloo finds its address by this name, so it fails or hangs",
            "warning",
            "Add the name to /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE (such as lo or eth0)",
        )
    else:
        yield Finding("host name", f"{name}, {address}")


def _slurm() -> Iterator[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        where = shutil.which("sbatch")
        yield Finding("SLURM", f"not in a job; sbatch is {where}" if where else "not installed")
        return
    names = ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT")
    known = ", ".join(f"{name.removeprefix('SLURM_')}={os.environ[name]}" for name in names if name in os.environ)
    yield Finding("SLURM", f"job {job}{': ' + known if known else ''}")


def examine_precisions(device: torch.device) -> list[Finding]:
    """One finding for each precision on the device of this rank.

    Applies each precision to this process, and fp32 at the end.
    """
    findings = []
    for name in PRECISIONS:
        subject = f"precision={name}"
        try:
            messages = Precision(name).apply(device)
        except ConfigError as error:
            findings.append(Finding(subject, str(error), "error", "Choose a different precision on this machine"))
            continue
        findings += [Finding(subject, message.removeprefix(f"{subject}: "), "warning") for message in messages]
        if not messages:
            findings.append(
                Finding(subject, f"computes in {str(Precision(name).compute_dtype).removeprefix('torch.')}")
            )
    Precision("fp32").apply(device)
    return findings


def ranks_agree(world: World) -> Finding:
    """Collective. Whether all ranks have the same versions of dtrain, torch and Python."""
    versions = f"dtrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    by_rank: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(by_rank, (socket.gethostname(), versions))
    others = {f"rank {rank} ({host})": text for rank, (host, text) in enumerate(by_rank) if text != by_rank[0][1]}
    hosts = len({host for host, _ in by_rank})
    if not others:
        return Finding(
            "ranks",
            f"{world.size} on {hosts} machine{'s' * (hosts > 1)}, {world.backend.split(':')[-1]}, equal versions",
        )
    rank, text = next(iter(others.items()))
    return Finding(
        "ranks",
        f"{len(others)} of {world.size} have other versions: rank 0 has {by_rank[0][1]}; {rank} has {text}",
        "error",
        "Use the same environment on all machines",
    )


def clocks_agree(world: World) -> list[Finding]:
    """Collective. A warning if the clocks of the ranks differ: times in logs and in the status of a run would not agree."""
    wait_for_all()
    by_rank: list[tuple[str, float]] = [("", 0.0)] * world.size
    dist.all_gather_object(by_rank, (socket.gethostname(), time.time()))
    (early, first), (late, last) = (choose(by_rank, key=lambda it: it[1]) for choose in (min, max))
    if last - first < _MOST_CLOCK_SKEW:
        return []
    text = f"the clock of {late} is {last - first:,.0f} s ahead of that of {early}"
    return [Finding("clock", text, "warning", f"{_SYNCHRONISE}, on both machines")]


def verdict(findings: Sequence[Finding]) -> str:
    """One line: whether a machine with these findings is fit, its problems, and what to do first.

    Example:
        >>> from dtrain.console import Finding
        >>> verdict([Finding("cache", "cannot be written", "error", "export DTRAIN_CACHE=FOLDER")])
        'not fit: cache. First: export DTRAIN_CACHE=FOLDER'
    """
    problems = sorted((it for it in findings if it.level != "ok"), key=_severity)
    if not problems:
        return "fit: no problem was found"
    errors = [it for it in problems if it.level == "error"]
    subjects = ", ".join(dict.fromkeys(it.subject for it in errors or problems))
    remedy = (problems[0].remedy or problems[0].text).splitlines()[0]
    if errors:
        return f"not fit: {subjects}. First: {remedy}"
    return f"fit, with {len(problems)} warning{'s' * (len(problems) > 1)}: {subjects}. First: {remedy}"


def _severity(finding: Finding) -> tuple[int, int]:
    """Errors before warnings, each in ``_ORDER``."""
    place = next((place for place, subject in enumerate(_ORDER) if finding.subject.startswith(subject)), len(_ORDER))
    return -LEVELS.index(finding.level), place
