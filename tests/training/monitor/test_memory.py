from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dtrain.training.monitor.memory import OutOfMemory, forget_peak, out_of_memory_explained, peak, state_bytes

CPU = torch.device("cpu")


def too_much_for_this_machine() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def too_much_for_python() -> None:
    bytearray(2**62)


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("fail", [too_much_for_this_machine, too_much_for_python, too_much_for_a_gpu])
def test_out_of_memory_names_step_and_sizes_and_what_to_try(fail: object) -> None:
    assert callable(fail)
    explained = out_of_memory_explained(lambda: 12, rows=lambda: 32, share=96, device=CPU)
    with pytest.raises(OutOfMemory) as raised, explained:
        fail()
    text = str(raised.value)
    assert text.startswith(
        "out of memory in step 12, with micro-batches of 32 rows on the CPU. Try train.micro_batch_size=24, "
    )
    assert "precision=bf16" in text
    assert "train.checkpoint_activations=[" in text
    assert raised.value.__cause__ is not None


def test_what_ranks_could_share_is_said_and_the_command_that_computes_what_fits() -> None:
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = 4 * sum(parameter.nbytes for parameter in model.parameters()) + 2 * 4  # two counters of steps
    assert state_bytes(optimizer, model) == whole
    explained = out_of_memory_explained(
        lambda: 1, rows=lambda: 1, share=1, device=CPU, ranks=8, state=lambda: state_bytes(optimizer, model)
    )
    with pytest.raises(OutOfMemory) as raised, explained:
        raise MemoryError
    assert "parallel=fsdp, with which each of the 8 ranks holds 2 MiB of the 16 MiB" in str(raised.value)
    assert "`dtrain doctor memory ranks=8`" in str(raised.value)


def test_one_row_cannot_become_fewer() -> None:
    with pytest.raises(OutOfMemory) as raised, out_of_memory_explained(lambda: 1, rows=lambda: 1, share=4, device=CPU):
        raise MemoryError
    assert "micro_batch_size" not in str(raised.value)


def test_other_errors_pass_as_they_are() -> None:
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("a bug"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)) as raised,
            out_of_memory_explained(lambda: 1, rows=lambda: 1, share=4, device=CPU),
        ):
            raise error
        assert raised.value is error


# -- peaks


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
