"""What one machine offers to training, and the traps that are known: each a finding."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from dtrain import __version__
from dtrain.config.cache_dir import cache_dir
from dtrain.config.errors import ConfigError
from dtrain.diagnosis.finding import Finding, size_text
from dtrain.distributed.world import World
from dtrain.tracking.wandb_login import wandb_mode

_PACKAGES = ("webdataset", "hydra-core", "omegaconf", "numpy", "safetensors", "simplejpeg", "Pillow", "wandb")
_OLDEST_TORCH = (2, 9)
SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHM = 2**30
# 64 lanes with windows of 8 shards keep so many files open, beside the shared memory of prefetched batches.
_FEW_FILES = 4096
_LITTLE_DISK = 2**30
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def machine(world: World) -> list[Finding]:
    """All findings about this machine, in the order of printing."""
    return [
        *_versions(),
        *_devices(world),
        *_processors(world),
        *_memory_and_files(),
        *_network(),
        *_slurm(),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("dtrain", __version__)
    if torch_version() < _OLDEST_TORCH:
        yield Finding("torch", torch.__version__, "error", "dtrain needs torch >= 2.9: pip install -U torch")
    else:
        yield Finding("torch", torch.__version__)
    found = {name: _installed(name) for name in _PACKAGES}
    yield Finding("packages", ", ".join(f"{name} {number}" for name, number in found.items() if number))
    for name in (name for name, number in found.items() if not number):
        if name == "wandb":
            yield Finding(name, "not installed", "warning", "pip install wandb, or train with tracker=none")
        else:
            yield Finding(name, "not installed", "error", f"pip install {name}")
    if not _installed("scikit-learn"):
        yield Finding("scikit-learn", "not installed: no experiment=digits", "warning", "pip install 'dtrain[demo]'")
    try:
        yield Finding("wandb mode", wandb_mode(None))
    except ConfigError as error:
        yield Finding("wandb mode", str(error), "error", "Correct WANDB_MODE, run `wandb login`, or use tracker=none")


def torch_version() -> tuple[int, int]:
    """Major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


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
    if gpus:
        numbers = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("CUDA", f"{built_for}, cuDNN {torch.backends.cudnn.version()}, NCCL {numbers}")
    elif built_for is not None:
        yield Finding(
            "CUDA",
            f"torch is built for CUDA {built_for}, but sees no GPU",
            "warning",
            "On a machine with GPUs: is the driver there (nvidia-smi), the container started with --gpus all, "
            "CUDA_VISIBLE_DEVICES not empty?",
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
            "ranks", "", "ok", f"To use all GPUs: torchrun --standalone --nproc-per-node={gpus} -m dtrain.train"
        )
    if not dist.is_gloo_available():
        yield Finding("gloo", "torch has none", "error", "Install a torch build with gloo; every run needs it")


def _processors(world: World) -> Iterator[Finding]:
    cores = usable_cores()
    all_cores = os.cpu_count() or cores
    yield Finding("CPU cores", f"{cores} usable of {all_cores}" if cores < all_cores else str(cores))
    load = os.getloadavg()[0]
    if load > cores:
        yield Finding(
            "load", f"{load:.1f} on {cores} cores: others compute here, what is measured is too slow", "warning", "Wait"
        )
    given = os.environ.get("OMP_NUM_THREADS")
    threads = torch.get_num_threads()
    text = f"{threads} threads a process (OMP_NUM_THREADS={given or 'not set'}), processes here: {world.local_size}"
    share = max(cores // world.local_size, 1)
    if threads * world.local_size > cores:
        remedy = f"export OMP_NUM_THREADS={share}" if threads > share else "Start fewer processes on this machine"
        yield Finding("threads", f"{text}: more than cores", "warning", remedy)
    elif world.device.type == "cpu" and world.launched and threads == 1 and share > 1:
        # torchrun sets one thread where the user has not said anything.
        yield Finding(
            "threads", f"{text}: cores stay idle", "warning", f"export OMP_NUM_THREADS={share} before torchrun"
        )
    else:
        yield Finding("threads", text)
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    yield Finding(
        "start method", f"{method} (data.start_method=forkserver, if workers hang after a library has forked)"
    )


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota that a container sets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def _memory_and_files() -> Iterator[Finding]:
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        text = f"{size_text(usage.free)} free of {size_text(usage.total)}"
        if usage.free < _LITTLE_SHM:
            yield Finding(
                "/dev/shm",
                f"{text}: data workers hand over batches here, and die of 'Bus error' when it is full",
                "warning",
                "Start the container with --ipc=host or --shm-size=8g; or data.num_workers=0",
            )
        else:
            yield Finding("/dev/shm", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = _limit(soft)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        reachable = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        yield Finding(
            "open files", f"ulimit -n {shown}: many shards and workers need more", "warning", f"ulimit -n {reachable}"
        )
    else:
        yield Finding("open files", f"ulimit -n {shown}")
    yield from _cache()


def _cache() -> Iterator[Finding]:
    place = cache_dir().absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding("cache", f"{place} cannot be written ({error.strerror})", "error", "export DTRAIN_CACHE=FOLDER")
        return
    level, remedy = ("warning", "export DTRAIN_CACHE=FOLDER with more room") if free < _LITTLE_DISK else ("ok", "")
    yield Finding("cache", f"{place}, {size_text(free)} free", level, remedy)


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "host name",
            f"{name} does not resolve: gloo looks itself up by it, and fails or waits",
            "warning",
            "Add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE (such as lo or eth0)",
        )
    else:
        yield Finding("host name", f"{name}, {address}")


def _slurm() -> Iterator[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        where = shutil.which("sbatch")
        yield Finding("SLURM", f"not in a job; sbatch is {where}" if where else "not here")
        return
    names = ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT")
    known = ", ".join(f"{name.removeprefix('SLURM_')}={os.environ[name]}" for name in names if name in os.environ)
    text = f"job {job}{': ' + known if known else ''}"
    yield Finding("SLURM", text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
