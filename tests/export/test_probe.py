"""A probe measures one artefact in a process of its own, and survives running out of memory there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.export import artefact
from dtrain.export.formats import FORMATS
from dtrain.export.probe import PeakMemory, Probe, made_up_rows
from dtrain.export.program import Program, RowSpec
from dtrain.precision import Precision
from tests.export.costly import MIB, write_costly
from tests.export.helpers import CPU, described
from tests.refusals import refused


def test_rows_are_made_up_for_any_model() -> None:
    pixels = made_up_rows(RowSpec("uint8", (4, 4, 3)), 5)
    assert (pixels.dtype, tuple(pixels.shape), pixels.is_contiguous()) == (torch.uint8, (5, 4, 4, 3), True)
    assert pixels.max() > 200
    assert torch.equal(pixels[0], pixels[4])
    assert not made_up_rows(RowSpec("int64", (7,)), 2).any()
    assert made_up_rows(RowSpec("float16", ()), 3).shape == (3,)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report peak memory")
def test_peak_memory_is_what_is_held_at_the_same_time_since_the_reset() -> None:
    memory = PeakMemory(CPU, 0)
    for mebibytes in (200, 100):
        memory.reset()
        for _ in range(2):
            torch.ones(mebibytes, 2**18)
        peak = memory.peak_bytes()
        assert peak is not None
        assert abs(peak / 2**20 - mebibytes) < 16
    of_weights = PeakMemory(CPU, 2**30)
    of_weights.reset()
    assert of_weights.peak_bytes() == pytest.approx(2**30, rel=0.01)


@pytest.mark.slow
def test_a_process_reports_that_it_runs_out_of_memory_and_continues(tmp_path: Path) -> None:
    with Probe(write_costly(tmp_path / "out"), CPU, trust=True) as probe:
        assert probe.wait_until_loaded() >= 1
        assert "allocate" in probe.run(10**6, 0.0)["out_of_memory"]  # 15 TiB
        assert probe.run(2, 0.0)["peak_bytes"] >= 2 * MIB * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parts"),
    [({"raises_at": 4}, ["4 rows are too many", "code 1"]), ({"exits_at": 4}, ["ended with code 7"])],
)
def test_an_artefact_that_fails_is_an_error_that_names_the_number_of_rows(
    tmp_path: Path, model: dict[str, Any], parts: list[str]
) -> None:
    with Probe(write_costly(tmp_path / "out", **model), CPU, trust=True) as probe:
        probe.wait_until_loaded()
        assert len(probe.run(1, 0.0)["calls"]) == 1
        with refused(ConfigError, str(tmp_path / "out"), "with 4 rows", *parts):
            probe.run(4, 0.0)


class ChannelsLast(nn.Linear):
    """Returns values of pixels in the memory format that convolutions of images return."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_outputs_in_any_memory_layout_are_returned(tmp_path: Path) -> None:
    model = ChannelsLast(3, 3).eval().requires_grad_(False)
    node = {"_target_": "tests.export.test_probe.ChannelsLast", "in_features": 3, "out_features": 3}
    folder = tmp_path / "out"
    with artefact.replacing(folder) as writing:
        description = described("safetensors", model=node, rows=RowSpec("float32", (2, 3, 3)))
        program = Program(model, None, torch.float32).eval()
        artefact.write(writing, program, description, torch.zeros(2, 2, 3, 3))
    rows = torch.rand(5, 2, 3, 3)
    assert not model(rows).is_contiguous()
    with Probe(folder, CPU, trust=True) as probe:
        probe.wait_until_loaded()
        assert torch.allclose(probe.outputs(rows), model(rows))


@pytest.mark.slow
def test_the_memory_of_an_onnx_model_is_what_the_runtime_holds_and_not_the_size_of_the_file(tmp_path: Path) -> None:
    spec = RowSpec("float32", (2048,))
    peaks = {}
    for dtype in ("fp32", "fp16"):
        folder = tmp_path / dtype
        folder.mkdir()
        compute = Precision(dtype).compute_dtype
        program = Program(nn.Linear(2048, 2048).eval().requires_grad_(False).to(compute), None, compute).eval()
        artefact.write(folder, program, described("onnx", dtype, rows=spec), torch.ones(2, 2048))
        with Probe(folder, CPU) as probe:
            probe.wait_until_loaded()
            peaks[dtype] = probe.run(1, 0.0)["peak_bytes"]
        assert (folder / FORMATS["onnx"].file).stat().st_size < 1.3 * peaks[dtype]
    assert peaks["fp32"] < 3 * 4 * 2048**2
    # Kernels that compute in fp32 hold the weights in fp32. On a CPU with fp16 kernels half is enough.
    assert 0.4 * peaks["fp32"] < peaks["fp16"] < 2 * peaks["fp32"]
