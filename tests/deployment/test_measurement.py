"""What an artefact costs: right figures from fresh processes, and the largest batch that a budget allows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ExportConfig
from dtrain.deployment import artefact, cost, measure_command, measurement
from dtrain.deployment.batch_search import MOST, largest_batch
from dtrain.deployment.description import Description
from dtrain.deployment.measurement import Budget, measure
from dtrain.deployment.model_memory import ModelMemory
from dtrain.deployment.probe import Setup, made_up
from dtrain.deployment.probing import probing
from dtrain.deployment.program import Program, RowSpec
from tests.tiny_run import ROOT, tiny_run

CPU = torch.device("cpu")
ROWS = RowSpec("float32", (3,))
MIB = 16  # of a row of Costly
MILLISECONDS = 2.0


class Costly(nn.Module):
    """Takes a known time and memory a row, talks, and breaks down or ends its process at so many rows."""

    def __init__(self, breaks_at: int = 10**9, ends_at: int = 10**9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._breaks_at, self._ends_at = breaks_at, ends_at

    def forward(self, x: Tensor) -> Tensor:
        print("a model may print")
        if len(x) >= self._ends_at:
            raise SystemExit(7)
        if len(x) >= self._breaks_at:
            raise RuntimeError(f"{len(x)} rows are too many for me")
        time.sleep(len(x) * MILLISECONDS / 1e3)
        held = torch.ones(len(x), MIB * 2**18)
        return x * self.weight + 0 * held[:, :3]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement is of a few calls."""
    monkeypatch.setattr(measurement, "_SECONDS", 0.05)
    monkeypatch.setattr(measurement, "_TRIAL_SECONDS", 0.0)


def described(dtype: str, **model: Any) -> Description:
    target = {"_target_": "tests.deployment.test_measurement.Costly", **model}
    return Description("safetensors", target, dtype, [], [], None, ROWS, None, "cpu", {}, {})


def written(folder: Path, dtype: str = "fp32", **model: Any) -> Path:
    """An artefact of a ``Costly``."""
    folder.mkdir()
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    artefact.write(folder, Program(Costly(**model).to(compute), None, compute), described(dtype, **model), None)
    return folder


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_an_artefact_and_its_fp32_twin_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    description = described("bf16")
    options = ExportConfig(batch=[1, 2], max_memory_gib=4 * MIB / 1024)
    told = cost.measured(options, written(tmp_path / "out", "bf16"), description, Costly, CPU)
    assert told is not None
    assert (told["base"], list(told["artefacts"])) == ("fp32", ["bf16", "fp32"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for of_one in told["artefacts"].values():
        for batch, line in zip((1, 2), of_one["batches"], strict=True):
            assert line["batch"] == batch
            assert MILLISECONDS * batch <= line["latency_ms"] <= line["latency_p95_ms"]
            assert line["samples_per_second"] == pytest.approx(1e3 * batch / line["latency_ms"])
            assert MIB * batch <= line["peak_mib"] < MIB * (batch + 1)
        best = of_one["largest_batch"]
        assert best["batch"] == 3  # of 4 the memory is full already, and something else is held as well
        assert best["ended_by"].startswith("memory: ")
    twin, half = (told["artefacts"][name]["batches"] for name in ("fp32", "bf16"))
    assert "ratios" not in twin[0]
    assert half[0]["ratios"]["samples_per_second"] == pytest.approx(1 / half[0]["ratios"]["latency"])
    shown = cost.summary(told)["cost"]
    for part in ("float32 [rows, 3] on ", "bf16, batch 2: ", "multiple of fp32", "fp32, largest batch "):
        assert part in shown


class Scripted:
    """Stands in for a probe: says how long its calls took, as a list for each time that it is asked."""

    def __init__(self, log: list[str], name: str, *rounds: list[float], peak: int = 1) -> None:
        self._log, self._name, self._rounds, self._peak = log, name, iter(rounds), peak

    def ask(self, batch: int, seconds: float) -> dict[str, Any]:
        self._log.append(self._name)
        return {"calls": next(self._rounds), "peak_bytes": self._peak}


def test_a_ratio_is_the_median_of_those_of_the_rounds_and_every_probe_begins_in_turn() -> None:
    log: list[str] = []
    # All is slower by ten in the third round.
    own = Scripted(log, "own", [0.2, 0.1, 0.3], [0.2], [2.0, 2.0], [0.2], [0.2], peak=30)
    base = Scripted(log, "base", [0.1], [0.1], [1.0], [0.1], [0.05], peak=40)
    found = measurement._in_turns({"own": own, "base": base}, 4)  # type: ignore[dict-item]
    assert log == ["own", "base", "base", "own"] * 2 + ["own", "base"]
    line = found["own"].to_json(4)
    assert (line["calls"], line["rounds"]) == (8, 5)
    assert line["latency_ms"] == pytest.approx(200.0)
    assert line["latency_p95_ms"] == pytest.approx(2000.0)
    assert line["samples_per_second"] == pytest.approx(20.0)
    assert found["own"].ratios(found["base"]) == pytest.approx(
        {"latency": 2.0, "samples_per_second": 0.5, "peak_memory": 0.75}
    )


def test_slow_calls_end_the_rounds_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    probes = {name: Scripted(log, name, [9.0]) for name in ("own", "base")}
    monkeypatch.setattr(measurement, "_SECONDS", 0.0)
    found = measurement._in_turns(probes, 1)  # type: ignore[arg-type]
    assert log == ["own", "base"]
    assert found["own"].to_json(1)["rounds"] == 1


def test_a_batch_that_does_not_fit_is_told_as_such_and_has_no_ratio() -> None:
    full, other = measurement._Found(), measurement._Found()
    full.add({"out_of_memory": "no room"})
    other.add({"calls": [0.1], "peak_bytes": None})
    assert full.to_json(32) == {"batch": 32, "out_of_memory": "no room"}
    assert full.ratios(other) is None
    assert other.ratios(full) is None
    assert other.to_json(1)["peak_mib"] is None
    assert Budget(latency_ms=1.0).broken_by(32, full) == "memory: 32 rows end in no room"


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 64, 1000, 1023, 1024, 40_000])
def test_the_largest_batch_is_what_trying_every_size_would_find(most: int) -> None:
    tried: list[int] = []

    def broken_by(batch: int) -> str | None:
        tried.append(batch)
        return None if batch <= most else f"{batch} > {most}"

    batch, reason = largest_batch(broken_by)
    assert batch == max((size for size in tried if size <= most), default=0)
    assert most * (1 - 1 / 32) - 1 <= batch <= most
    assert reason == f"{min(size for size in tried if size > most)} > {most}"
    assert len(tried) == len(set(tried)) < 30


def test_a_search_that_nothing_stops_ends() -> None:
    batch, reason = largest_batch(lambda _: None)
    assert batch > MOST * 0.95
    assert "ends at 65,536" in reason


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell")
def test_peak_memory_is_what_was_held_at_once_and_not_what_was_held_before() -> None:
    memory = ModelMemory(CPU, 0)
    for mebibytes in (200, 100):
        memory.reset()
        for _ in range(2):
            torch.ones(mebibytes, 2**18)
        peak = memory.bytes()
        assert peak is not None
        assert abs(peak / 2**20 - mebibytes) < 16
    of_weights = ModelMemory(CPU, 2**30)
    of_weights.reset()
    assert of_weights.bytes() == pytest.approx(2**30, rel=0.01)


def test_rows_are_made_up_that_any_model_takes() -> None:
    pixels = made_up(RowSpec("uint8", (4, 4, 3)), 5)
    assert (pixels.dtype, tuple(pixels.shape), pixels.is_contiguous()) == (torch.uint8, (5, 4, 4, 3), True)
    assert pixels.max() > 200
    assert torch.equal(pixels[0], pixels[4])
    assert not made_up(RowSpec("int64", (7,)), 2).any()
    assert made_up(RowSpec("float16", ()), 3).shape == (3,)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"batch": []}, "export.batch: got []"),
        ({"batch": [1, 0]}, "export.batch: got [1, 0]"),
        ({"max_latency_ms": 0.0}, "export.max_latency_ms: got 0.0"),
        ({"max_memory_gib": float("nan")}, "export.max_memory_gib: got nan"),
        ({"measure": False, "max_memory_gib": 1.0}, "export.measure=false"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cost.check(ExportConfig(**options))
    assert part in str(refused.value)


def run_measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = measure_command.main(arguments)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_artefacts_that_take_different_rows_are_not_measured_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = written(tmp_path / "first"), tmp_path / "second"
    second.mkdir()
    other = dataclasses.replace(described("fp32"), rows=RowSpec("int64", (7,)))
    artefact.write(second, Program(Costly(), None, torch.float32), other, None)
    for arguments, part in (
        ([str(first), str(second)], "float32 [rows, 3] and int64 [rows, 7]"),
        ([str(first), "--batch", "0"], "got [0]"),
        ([str(tmp_path)], "is no artefact"),
    ):
        code, said = run_measure(capsys, *arguments)
        assert (code, part in said) == (1, True), said


def test_artefacts_that_run_on_different_devices_are_not_measured_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (graph := tmp_path / "graph").mkdir()
    dataclasses.replace(described("fp32"), stored_as="onnx").write(graph, "")
    gpu = SimpleNamespace(of=lambda: SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(measure_command, "World", gpu)
    code, said = run_measure(capsys, str(graph), str(written(tmp_path / "weights")))
    assert (code, "run on cpu and cuda" in said) == (1, True), said


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_artefacts_that_are_there_are_measured_against_the_first_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, full, out = written(tmp_path / "half", "bf16"), written(tmp_path / "full"), tmp_path / "cost.json"
    code, said = run_measure(capsys, str(half), str(full), "--batch", "2", f"--json={out}")
    assert code == 0, said
    assert f"{half}, batch 2: " in said
    told = json.loads(out.read_text())
    assert told["base"] == str(full)
    assert "ratios" in told["artefacts"][str(half)]["batches"][0]


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_says_so_and_goes_on(tmp_path: Path) -> None:
    with probing(Setup(str(written(tmp_path / "out")), ROWS, "cpu", True, 2**28)) as probe:
        assert probe.reply()["threads"] >= 1
        assert "allocate" in probe.ask(1000, 0.0)["out_of_memory"]
        assert probe.ask(2, 0.0)["peak_bytes"] >= 2 * MIB * 2**20


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("model", "parts"),
    [({"breaks_at": 4}, ["4 rows are too many for me", "code 1"]), ({"ends_at": 4}, ["ended with code 7"])],
)
def test_an_artefact_that_breaks_down_is_an_error_that_says_at_how_many_rows(
    tmp_path: Path, model: dict[str, Any], parts: list[str]
) -> None:
    folder = written(tmp_path / "out", **model)
    with pytest.raises(ConfigError) as refused:
        measure({"fp32": folder}, ROWS, CPU, batches=[1, 4], trust=True)
    for part in [str(folder), "with 4 rows", *parts]:
        assert part in str(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_search_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_SEARCH_SECONDS", 0.0)
    told = measure(
        {"fp32": written(tmp_path / "out")},
        ROWS,
        CPU,
        batches=[1],
        budget=Budget(latency_ms=1e9),
        trust=True,
    )
    best = told["artefacts"]["fp32"]["largest_batch"]
    assert best["batch"] == 0
    assert "the search, which ends after" in best["ended_by"]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_an_export_measures_by_itself_and_its_report_has_all_of_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, out = tiny_run(tmp_path_factory.getbasetemp()), tmp_path / "out"
    options = [f"run.dir={run_dir}", f"export.out={out}", "samples=64", "export.batch=[1,8]"]
    done = subprocess.run(
        [sys.executable, "-m", "dtrain.export", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((out / "report.json").read_text())["cost"]
    assert told["rows"] == {"dtype": "uint8", "shape": [8, 8, 3]}
    assert {"date", "device", "threads", "torch", "memory", "budget"} <= told.keys()
    for name in ("bf16", "fp32"):
        assert [line["batch"] for line in told["artefacts"][name]["batches"]] == [1, 8]
        assert f"{name}, batch 8: " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
