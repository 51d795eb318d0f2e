"""Every kind of step on fake CUDA tensors: its collectives, one vote, no wait of the host, everything on the device.

The steps and what they prove are in ``tests/fake_cuda_steps.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
VOTE = 14  # elements: of a task with one metric
#: Case to the all-reduces of gradients in a step, where it is not one of all elements.
BUCKETS = {"bf16, several buckets": 3, "fp16, no DDP": 0, "bf16, fsdp": 0}
WAITING = {"fp16, foreach", "fp16, one group that is not fused"}
CASES = [
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp16, hysteresis, amsgrad",
    "bf16, reduced in bf16",
    "fp16, reduced in fp16",
    "bf16, bucket views, 3 micro-batches",
    "bf16, several buckets",
    "bf16, no clipping, no average, 1 micro-batch",
    "fp16, no DDP",
    "bf16, fsdp",
    "fp16, spikes are skipped",
    *sorted(WAITING),
]
# The first test waits for all cases, half a minute of a core.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of all cases, from one process that forks for each."""
    if torch.backends.cuda.is_built():
        pytest.skip("needs a torch without CUDA, whose place the fake one takes")
    library = tmp_path_factory.mktemp("fake-cuda") / "libfakecuda.so"
    build(library)
    code = (
        f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL); "
        "from tests.fake_cuda_steps import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def build(library: Path) -> None:
    """Compiles the library, or skips the tests with the reason."""
    compiler, torch_dir = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("needs g++")
    if not (torch_dir / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").exists():
        pytest.skip("needs the C++ headers of torch")
    for standard in ("c++20", "c++17"):  # from torch 2.13 on its headers need C++20
        command: list[str | Path] = [compiler, "-shared", "-fPIC", f"-std={standard}", f"-I{torch_dir / 'include'}"]
        command += [ROOT / "tests" / "fake_cuda_guard.cpp", "-o", library, f"-L{torch_dir / 'lib'}"]
        command += [f"-Wl,-rpath,{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    pytest.fail(f"{compiler}: {done.stderr[-2000:]}")


def test_every_case_was_run(results: dict[str, dict[str, Any]]) -> None:
    assert sorted(results) == sorted(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if case not in WAITING])
def test_a_step_has_its_buckets_and_one_vote_and_the_host_does_not_wait(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[case]
    assert "error" not in result, result["error"]
    assert "waits" not in result, result["waits"]
    elements = result["elements"]
    for step in result["steps"]:
        found = Counter(name for name, _ in step["collectives"])
        reduced = [size for name, size in step["collectives"] if name == "allreduce_"]
        assert reduced[-1] == VOTE
        assert len(reduced) == BUCKETS.get(case, 1) + 1
        assert sum(reduced[:-1]) == (elements if BUCKETS.get(case, 1) else 0)
        # Floating-point and integer buffers of BatchNorm, once a window; nothing else.
        assert found.pop("allreduce_") + found.pop("broadcast_", 0) == len(reduced) + 2 * (case != "fp16, no DDP")
        if case == "bf16, fsdp":
            # In the last of two micro-batches alone, once for each unit.
            assert found.pop("_reduce_scatter_base_") == 3
            assert found.pop("_allgather_base_") > 3
        assert not found
    first, *others = result["steps"]
    # The mean and standard deviation of the images, once a process.
    assert len(first["blocking"]) <= 1
    assert all("batch.py" in place for place in first["blocking"])
    assert [step["blocking"] for step in others] == [[], []]


@pytest.mark.parametrize("case", [case for case in CASES if case not in WAITING])
def test_weights_averages_buffers_and_optimizer_state_stay_on_the_device_in_fp32(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[case]
    assert result["devices"] == ["cuda:0"]
    assert result["dtypes"] == ["torch.float32"]
    assert result["optimizer_tensors"] >= 3 * 9  # step, first and second moment of each parameter


@pytest.mark.parametrize("case", ["fp32", "bf16", "fp16"])
def test_an_evaluation_of_the_averages_adds_up_on_the_device(case: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[case]["evaluation"] == []


@pytest.mark.parametrize("case", sorted(WAITING))
def test_an_optimizer_that_is_not_fused_in_every_group_is_caught_waiting(
    case: str, results: dict[str, dict[str, Any]]
) -> None:
    assert results[case].get("waits", "").startswith("step.py: if not skip.item():"), results[case]
