"""Peak memory of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dtrain.training.monitor.memory import forget_peak, peak

CPU = torch.device("cpu")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux forgets a peak")
def test_a_peak_of_memory_is_seen_after_its_memory_is_given_back_and_can_be_forgotten() -> None:
    forget_peak(CPU)
    name, before = peak(CPU)
    assert name == "memory/max_resident_gib"
    block = torch.ones(1 << 26)  # a quarter of a GiB
    del block
    assert 0.2 < peak(CPU)[1] - before < 0.3
    forget_peak(CPU)
    assert peak(CPU)[1] - before < 0.1


@pytest.mark.slow
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    block = torch.ones(1 << 28)  # a GiB, held while the other process begins
    code = "import torch; from dtrain.training.monitor.memory import peak; print(peak(torch.device('cpu'))[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.05 < float(done.stdout) < block.nbytes / 2**30
