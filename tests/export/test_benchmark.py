"""Latency, throughput and memory beside fp32, and the largest batch within a budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.schema import ExportConfig
from dtrain.errors import ConfigError
from dtrain.export import artefact, benchmark
from dtrain.export.benchmark import benchmark_export, benchmark_summary, check_budget, largest_batch
from dtrain.export.program import Program, RowSpec
from tests.export.costly import MIB, MILLISECONDS, ROWS, Costly, costly_description, write_costly
from tests.export.helpers import CPU, described
from tests.refusals import assert_refused, refused
from tests.whole_runs import ROOT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement consists of a few calls."""
    monkeypatch.setattr(benchmark, "_SECONDS", 0.05)
    monkeypatch.setattr(benchmark, "_TRIAL_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_an_artefact_and_its_fp32_twin_are_measured_in_separate_processes(tmp_path: Path) -> None:
    options = ExportConfig(batch=[1, 2], max_memory_gib=4 * MIB / 1024)
    folder = write_costly(tmp_path / "out", "bf16")
    cost = benchmark_export(options, folder, costly_description("bf16"), Costly, CPU)
    assert cost is not None
    assert (cost["base"], list(cost["artefacts"])) == ("fp32", ["bf16", "fp32"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for figures in cost["artefacts"].values():
        for batch, line in zip((1, 2), figures["batches"], strict=True):
            assert line["batch"] == batch
            assert MILLISECONDS * batch <= line["latency_ms"] <= line["latency_p95_ms"]
            assert line["samples_per_second"] == pytest.approx(1e3 * batch / line["latency_ms"])
            assert MIB * batch <= line["peak_mib"] < MIB * (batch + 1)
        best = figures["largest_batch"]
        assert best["batch"] == 3  # 4 rows fill the budget, and the weights need some of it
        assert best["ended_by"].startswith("memory: ")
    in_fp32, in_bf16 = (cost["artefacts"][name]["batches"] for name in ("fp32", "bf16"))
    assert "ratios" not in in_fp32[0]
    assert in_bf16[0]["ratios"]["samples_per_second"] == pytest.approx(1 / in_bf16[0]["ratios"]["latency"])
    text = benchmark_summary(cost)["cost"]
    for part in ("float32 [rows, 3] on ", "bf16, batch 2: ", "multiple of fp32", "fp32, largest batch "):
        assert part in text


class ScriptedProbe:
    """Returns given call times, one list for each request, and logs the requests."""

    def __init__(self, log: list[str], name: str, *rounds: list[float], peak: int = 1) -> None:
        self._log, self._name, self._rounds, self._peak = log, name, iter(rounds), peak

    def run(self, batch: int, seconds: float) -> dict[str, Any]:
        self._log.append(self._name)
        return {"calls": next(self._rounds), "peak_bytes": self._peak}


def test_a_ratio_is_the_median_over_rounds_and_probes_take_turns_in_starting_a_round() -> None:
    log: list[str] = []
    # Everything is ten times slower in the third round.
    own = ScriptedProbe(log, "own", [0.2, 0.1, 0.3], [0.2], [2.0, 2.0], [0.2], [0.2], peak=30)
    base = ScriptedProbe(log, "base", [0.1], [0.1], [1.0], [0.1], [0.05], peak=40)
    timings = benchmark._in_turns({"own": own, "base": base}, 4)  # type: ignore[dict-item]
    assert log == ["own", "base", "base", "own"] * 2 + ["own", "base"]
    line = timings["own"].to_json(4)
    assert (line["calls"], line["rounds"]) == (8, 5)
    assert line["latency_ms"] == pytest.approx(200.0)
    assert line["latency_p95_ms"] == pytest.approx(2000.0)
    assert line["samples_per_second"] == pytest.approx(20.0)
    assert timings["own"].ratios(timings["base"]) == pytest.approx(
        {"latency": 2.0, "samples_per_second": 0.5, "peak_memory": 0.75}
    )


def test_slow_calls_end_the_rounds_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    probes = {name: ScriptedProbe(log, name, [9.0]) for name in ("own", "base")}
    monkeypatch.setattr(benchmark, "_SECONDS", 0.0)
    timings = benchmark._in_turns(probes, 1)  # type: ignore[arg-type]
    assert log == ["own", "base"]
    assert timings["own"].to_json(1)["rounds"] == 1


def test_a_batch_that_runs_out_of_memory_is_reported_without_ratios() -> None:
    failed, other = benchmark._Timing(), benchmark._Timing()
    failed.add({"out_of_memory": "no room"})
    other.add({"calls": [0.1], "peak_bytes": None})
    assert failed.to_json(32) == {"batch": 32, "out_of_memory": "no room"}
    assert failed.ratios(other) is None
    assert other.ratios(failed) is None
    assert other.to_json(1)["peak_mib"] is None
    assert benchmark._exceeded(ExportConfig(max_latency_ms=1.0), 32, failed) == "memory: 32 rows fail with no room"
    with refused(ConfigError, "export.max_memory_gib", "got 2.0", "export.max_memory_gib=null"):
        benchmark._exceeded(ExportConfig(max_memory_gib=2.0), 32, other)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 64, 1000, 1023, 1024, 40_000])
def test_the_largest_batch_is_found_as_if_every_size_was_tried(most: int) -> None:
    tried: list[int] = []

    def limit_of(batch: int) -> str | None:
        tried.append(batch)
        return None if batch <= most else f"{batch} > {most}"

    batch, reason = largest_batch(limit_of)
    assert batch == max((size for size in tried if size <= most), default=0)
    assert most * (1 - 1 / 32) - 1 <= batch <= most
    assert reason == f"{min(size for size in tried if size > most)} > {most}"
    assert len(tried) == len(set(tried)) < 30


def test_a_search_without_a_limit_ends() -> None:
    batch, reason = largest_batch(lambda _: None)
    assert 65_536 * 0.95 < batch <= 65_536
    assert "ends at 65,536" in reason


def test_a_search_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_SEARCH_SECONDS", 0.0)
    probe: Any = ScriptedProbe([], "never asked")
    best = benchmark._largest_batch_within(ExportConfig(max_latency_ms=1e9), probe)
    assert best["batch"] == 0
    assert "the search, which ends after" in best["ended_by"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"batch": []}, ["export.batch", "got []", "[1,32]"]),
        ({"batch": [1, 0]}, ["export.batch", "got [1, 0]", "from 1 on"]),
        ({"max_latency_ms": 0.0}, ["export.max_latency_ms", "got 0.0", "above 0", "null"]),
        ({"max_memory_gib": float("nan")}, ["export.max_memory_gib", "got nan", "above 0", "null"]),
        ({"measure": False, "max_memory_gib": 1.0}, ["export.max_memory_gib=1.0", "export.measure=false", "Remove"]),
    ],
)
def test_impossible_measurements_are_refused(options: dict[str, Any], parts: list[str]) -> None:
    with refused(ConfigError, *parts):
        check_budget(ExportConfig(**options))


def run_measure(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = benchmark.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_artefacts_with_different_rows_or_devices_are_not_measured_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, tokens, graph = write_costly(tmp_path / "weights"), tmp_path / "tokens", tmp_path / "graph"
    tokens.mkdir()
    program = Program(nn.Identity(), None, torch.float32)
    artefact.write(tokens, program, described(rows=RowSpec("int64", (7,))), None)
    graph.mkdir()
    described("onnx", rows=ROWS).write(graph, "")
    monkeypatch.setattr(
        benchmark, "World", SimpleNamespace(from_environment=lambda: SimpleNamespace(device=torch.device("cuda")))
    )
    for arguments, parts in (
        ((weights, tokens), ("float32 [rows, 3] and int64 [rows, 7]", "separately")),
        ((graph, weights), ("cpu and cuda", "onnx", "separately")),
        ((weights, "--batch", 0), ("export.batch", "got [0]")),
        ((tmp_path,), (str(tmp_path), "is not an artefact")),
    ):
        code, text = run_measure(capsys, *arguments)
        assert code == 1
        assert_refused(text, *parts)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_existing_artefacts_are_measured_beside_the_first_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_bf16, in_fp32 = write_costly(tmp_path / "half", "bf16"), write_costly(tmp_path / "full")
    code, text = run_measure(capsys, in_bf16, in_fp32, "--batch", 2, "--trust", f"--json={tmp_path / 'cost.json'}")
    assert code == 0, text
    assert f"{in_bf16}, batch 2: " in text
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert cost["base"] == str(in_fp32)
    assert "ratios" in cost["artefacts"][str(in_bf16)]["batches"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_an_export_measures_by_default_and_reports_every_figure(tmp_path: Path, finished_run: Path) -> None:
    out = tmp_path / "out"
    options = [f"run.dir={finished_run}", f"export.out={out}", "samples=64", "export.batch=[1,8]"]
    done = subprocess.run(
        [sys.executable, "-m", "dtrain.export", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    cost = json.loads((out / "report.json").read_text())["cost"]
    assert cost["rows"] == {"dtype": "uint8", "shape": [8, 8, 3]}
    assert {"date", "device", "threads", "torch", "memory", "budget"} <= cost.keys()
    for name in ("bf16", "fp32"):
        assert [line["batch"] for line in cost["artefacts"][name]["batches"]] == [1, 8]
        assert f"{name}, batch 8: " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
