"""The benchmarks: each runs in its quick mode, prints its tables and says what was measured where; nothing is timed here."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks import harness, loader, loader_work, low_precision, proof, scaling, soak
from benchmarks.loader_contenders import LOADERS, MODULES, rows
from benchmarks.shuffle_quality import SortedShards
from benchmarks.step import make_table
from benchmarks.step_contenders import Turn
from tests.forked_python import forked_python

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT = 270  # seconds; less than that of a test


def run(name: str, *arguments: str | Path, cache: Path) -> str:
    """What a benchmark prints."""
    environ = {key: value for key, value in os.environ.items() if key != "DTRAIN_TEST_CIFAR10"}
    environ |= {"OMP_NUM_THREADS": "1", "DTRAIN_CACHE": str(cache)}
    command = [forked_python(), "-m", f"benchmarks.{name}", *map(str, arguments)]
    environ["PYTHONFAULTHANDLER"] = "1"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each of its processes shows where it is
        raise AssertionError(f"no end after {_TIMEOUT} s\n{process.communicate()[1]}") from None
    assert process.returncode == 0, errors
    return printed


def quick(name: str, tmp_path: Path, *arguments: str | Path, rows: Iterable[str]) -> dict[str, Any]:
    """The results of a benchmark in its quick mode, whose tables must have these rows."""
    out = tmp_path / "out.json"
    printed = run(name, *arguments, "--quick", "--json", out, cache=tmp_path / "cache")
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["command"].startswith(f"python -m benchmarks.{name}")
    for fact in ("command", "versions", "machine", "date"):
        assert f"{fact}: {found[fact]}" in printed
    lines = printed.splitlines()
    assert not [row for row in rows if not any(line.startswith(f"{row} ") for line in lines)], printed
    return found


# -- the harness


def test_cpu_time_includes_running_and_ended_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"
    before = harness.cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "burnt\n"
    assert harness.cpu_seconds() - before >= 0.27  # the kernel counts in hundredths, user and system time each
    child.communicate("\n")
    assert harness.cpu_seconds() - before >= 0.27


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    assert harness.ratio([2, 40, 6], [1, 20, 1]) == 2  # a slow round is slow for both
    assert harness.spread([1, 3, 2000], 1) == "3.0 (1.0-2,000.0)"


def test_every_round_measures_every_row_and_starts_with_another() -> None:
    numbers = itertools.count()
    results = harness.interleaved(3, "abc", lambda row: next(numbers))
    assert results == {"a": [0, 5, 7], "b": [1, 3, 8], "c": [2, 4, 6]}


def test_a_table_is_aligned_and_says_what_is_not_installed() -> None:
    table = harness.Table("loader", ["ours", "theirs", "missing"])
    values = {"ours": [2.0, 4.0, 3.0], "theirs": [1.0, 1.0, 2.0], "missing": []}
    table.medians("rate", values, 1)
    table.ratios("ratio", values, values["theirs"])
    assert str(table).splitlines() == [
        "loader            rate  ratio",
        "ours     3.0 (2.0-4.0)   2.00",
        "theirs   1.0 (1.0-2.0)   1.00",
        "missing  not installed",
    ]


def test_config_behind_a_list_of_numbers_is_config(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = harness.command_line("", rounds=3, overrides=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--ranks", "1", "2", "model=mlp", "a.b=c"])
    arguments = harness.parse(parser, rounds=1, ranks=[8])
    assert (arguments.ranks, arguments.rounds, arguments.overrides) == ([1, 2], 1, ["model=mlp", "a.b=c"])


@pytest.mark.slow
def test_a_function_runs_in_another_process() -> None:
    assert harness.in_new_process(os.path.join, "a", "b") == "a/b"


# -- data


@pytest.mark.slow
def test_shuffle_quality(tmp_path: Path) -> None:
    rows = ("none", "full", "window, 1 lanes, windows of 1", "a random draw")
    found = {row["order"]: row for row in quick("shuffle_quality", tmp_path, rows=rows)["measured"]}
    assert any("(default)" in name for name in found)
    assert found["none"]["class_mix"] > 10 * found["a random draw"]["class_mix"]


def test_class_mix_is_pearsons_statistic_over_its_degrees_of_freedom() -> None:
    data = SortedShards(shards=16, per_shard=25, classes=8, batch=40)
    order = data.random_draw()
    expected = []
    for step in order.tolist():
        held = Counter(sample // 50 for sample in step)  # 400 samples in 8 equal, sorted classes
        expected.append(sum((held[label] - 5) ** 2 / 5 for label in range(8)) / 7)
    found = data.judge(order)
    assert found["class_mix"] == pytest.approx(np.mean(expected))
    ranks = [{sample // 25 for step in order.tolist() for sample in step[5 * rank : 5 * rank + 5]} for rank in range(8)]
    assert found["opened_most"] == max(map(len, ranks)) / 16


@pytest.mark.slow
def test_loader(tmp_path: Path) -> None:
    rows = ("dtrain", "webdataset", "litdata", "mosaicml-streaming", "Grain", "SPDL, 1 thread", "tf.data")
    rows += ("DALI, 1 thread", "decoding alone")
    found = quick("loader", tmp_path, "--work", "32x32", "tokens", "npy", "--workers", "0", rows=rows)["measured"]
    for measured in found.values():
        rates = {(row["loader"], row["dtype"]): row["rounds"] for row in measured}
        assert rates["dtrain", measured[0]["dtype"]][0]["samples/s"] > 0
        assert rates["webdataset", measured[0]["dtype"]]


@pytest.mark.parametrize("kind", ["tokens", "npy"])
def test_every_loader_makes_batches_of_the_stored_samples(kind: str, tmp_path: Path) -> None:
    harness.declare_torchvision_operators()
    work = loader_work.make_work(kind, tmp_path, None, quick=True)
    stored: dict[bytes, bytes | None] = {}
    for path in work.shards:
        with tarfile.open(path) as tar:
            content = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name, data in content.items():
            if name.endswith(".tok"):
                stored[data] = None
            elif name.endswith(".npy"):
                stored[np.load(io.BytesIO(data)).tobytes()] = content[name.replace(".npy", ".cls")]
    there = [row for row in rows(work, 0) if loader.is_installed(MODULES.get(row.loader, row.loader))]
    assert {"dtrain", "webdataset"} <= {row.loader for row in there}
    for row in there:
        order = []
        for data, labels, valid in itertools.islice(LOADERS[row.loader](work, 0, row), 4):
            loader_work.check(work, row, data, labels)
            payloads = [np.asarray(sample).tobytes() for sample in data]
            assert valid == len(payloads) == work.batch
            assert [stored[payload] for payload in payloads] == [
                None if labels is None else b"%d" % int(labels[place]) for place in range(valid)
            ]
            order += payloads
        assert len(set(order)) == len(order)
        assert order != list(stored)[: len(order)]


def test_notes_say_which_peer_is_faster_than_dtrain() -> None:
    work = loader_work.Work("npy", "npy", [], "", 64, None)
    row = {name: loader_work.Row(name, "", "fp32") for name in ("dtrain", "webdataset", "DALI", "Grain")}
    rates = {row["dtrain"]: [100.0], row["webdataset"]: [50.0], row["DALI"]: [200.0], row["Grain"]: []}
    costs = {row["dtrain"]: [10.0], row["webdataset"]: [30.0], row["DALI"]: [40.0], row["Grain"]: []}
    [line] = loader.compare(work, rates, costs)
    assert line == (
        "fp32: dtrain is slower than DALI: 0.50 times as fast; it needs 1/3.00 of the CPU time of the cheapest, webdataset"
    )


@pytest.mark.slow
def test_pack_text(tmp_path: Path) -> None:
    rows = ("webdataset", "litdata", "mosaicml-streaming", "dtrain", "dtrain, best fit")
    found = quick("pack_text", tmp_path, rows=rows)["measured"]
    assert found["dtrain"][0]["cut"] > found["dtrain, best fit"][0]["cut"] > 0
    assert 0 <= found["dtrain, best fit"][0]["waste"] < 0.1


@pytest.mark.slow
def test_index(tmp_path: Path) -> None:
    readers = ("dtrain", "dtrain, stored", "tarfile", "webdataset")
    found = quick("index", tmp_path, rows=readers)["members_per_second"]
    assert set(found) == {"ustar", "PAX", "photographs"}
    assert all(set(rates) == set(readers) for rates in found.values())


@pytest.mark.slow
def test_resume_reads_only_the_samples_that_it_returns(tmp_path: Path) -> None:
    rows = ("start of the epoch", "at 1 %", "at 50 %", "at 99 %")
    found = quick("resume", tmp_path, "--workers", "0", rows=rows)["bytes_read_and_own"]
    assert set(found) == set(rows)
    assert all(read == own for read, own in found.values())


@pytest.mark.slow
def test_documents_of_a_row_differ_from_separate_ones_by_rounding(tmp_path: Path) -> None:
    rows = ("rows of 32, task.documents=none", "rows of 32, task.documents=mask", "with a cache", "without")
    assert quick("language_model", tmp_path, rows=rows)["largest_difference"] < 1e-12


@pytest.mark.slow
def test_order_has_a_small_state(tmp_path: Path) -> None:
    state = quick("order", tmp_path, rows=("window", "full", "none", "state in a checkpoint, bytes"))["state"]
    assert state["data"]["num_shards"] == 10_000
    assert len(json.dumps(state)) < 400 + 20 * 10_000  # the list of shards, for data that grow


@pytest.mark.slow
def test_transports_and_threads_are_compared(tmp_path: Path) -> None:
    rows = ("0.1 MB, copies", "0.1 MB, pipe", "0.1 MB, file", "0.1 MB, slots")
    found = quick("transfer", tmp_path, "--megabytes", "0.1", rows=rows)["measured"]
    assert [one["way"] for one in found] == ["copies", "pipe", "file", "slots"]
    found = quick("transfer", tmp_path, "--threads", "1", "2", rows=("1 threads", "2 processes"))["measured"]
    assert len(found) == 4


@pytest.mark.slow
def test_smaller_photographs_are_smaller_and_load(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = quick("max_side", tmp_path, "--images", "500x375", "--workers", "0", rows=("unchanged", "--max-side 256"))
    packed = found["measured"]["500x375"]
    assert packed["--max-side 256"]["MB"] < packed["--max-side 384"]["MB"] < packed["unchanged"]["MB"]


@pytest.mark.slow
def test_transfer_has_the_bytes_of_its_dtype(tmp_path: Path) -> None:
    found = quick("transfer", tmp_path, rows=("fp32", "bf16", "fp16", "uint8"))["measured"]
    megabytes = {(row["kind"], row["dtype"]): row["rounds"][0]["MB"] for row in found}
    pixels, floats = 64 * 224 * 224 * 3, 64 * 4096
    expected = {("image", "uint8"): pixels, ("image", "bf16"): 2 * pixels, ("feature", "fp32"): 4 * floats}
    assert {row: megabytes[row] * 1e6 for row in expected} == expected


@pytest.mark.slow
def test_slow_storage_is_read_in_few_large_pieces(tmp_path: Path) -> None:
    cached, in_place = "shards, slow, through the cache", "shards, slow, in place"
    found = quick("slow_storage", tmp_path, rows=("shards, local", cached, in_place, "files, slow"))["measured"]
    assert found[cached][0]["reads"] < 32  # opens and reads of four shards, however many of their 256 samples were read
    assert found[in_place][0]["reads"] > found[in_place][0]["samples"]


@pytest.mark.slow
def test_many_sources_have_no_more_threads_than_one(tmp_path: Path) -> None:
    rows = ["1 source, in place", "all sources, in place", "1 source, cache", "all sources, cache", "later start"]
    found = quick("many_sources", tmp_path, rows=rows)["sources"]
    assert found["all sources, cache"][0]["threads"] == found["1 source, cache"][0]["threads"]


@pytest.mark.slow
def test_mixing_decodes_a_partner_again_only_if_it_is_in_another_step(tmp_path: Path) -> None:
    found = quick("mixing", tmp_path, rows=("nothing mixed", "mixup 0.2", "cutmix 1.0"))["measured"]
    assert len(found) == 10
    for row in found:
        [one] = row["rounds"]
        assert one["decoded"] > 1.5 if "another step" in row["case"] else one["decoded"] == 1


# -- steps, starts and saves


def test_a_turn_times_the_steps_after_the_first_ten() -> None:
    clock = iter(range(1000))
    batch: Any = "batch"
    turn = Turn(batch, 20, lambda: next(clock))
    seconds = []
    for _ in turn:
        next(clock)  # a step takes a second
        seconds.append(turn.seconds)
    assert len(seconds) == len(turn) == 31
    assert turn.seconds == 20 + 1  # and reading the clock another one
    assert all(value != value for value in seconds[:-1])


def test_the_cost_over_a_bare_loop_is_the_median_of_the_differences_of_each_round() -> None:
    times = {"bare loop": [100, 900, 200], "dtrain, everything on": [110, 950, 230], "dtrain's vote": [5, 6, 7]}
    lines = [line.split("  ") for line in str(make_table("title", "us", times | {"Lightning": []})).splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert cells["dtrain, everything on"] == ["230 (110-950)", "+30", "1.10"]
    assert cells["bare loop"] == ["200 (100-900)", "1.00"]
    assert cells["dtrain's vote"] == ["6 (5-7)"]
    assert cells["Lightning"] == ["not installed"]


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    rows = ("bare loop", "torch GradScaler, all-reduce, norm", "Lightning", "dtrain, everything on", "dtrain's vote")
    rows += ("FSDP2: bare loop, all-reduce, norm, finite check", "FSDP2: dtrain, the step alone")
    found = quick("step", tmp_path, "--cpu", rows=rows)["microseconds"]
    assert set(found) == {"1 rank", "2 ranks"}
    assert all(len(times["bare loop"]) == len(times["dtrain, everything on"]) == 1 for times in found.values())


@pytest.mark.slow
def test_the_parts_of_a_start_add_up_to_its_time(tmp_path: Path) -> None:
    rows = ("new run", "new run, shards indexed before", "killed run", "bare")
    found = quick("start", tmp_path, "--ranks", "1", rows=rows)["1"]
    assert set(found["seconds"]) == set(rows)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"][rows[1]][0])


@pytest.mark.slow
def test_save(tmp_path: Path) -> None:
    from benchmarks.save import SAVERS

    (found,) = quick("save", tmp_path, rows=tuple(SAVERS))["milliseconds"].values()
    for name, rounds in found.items():
        assert len(rounds) == (torch.cuda.is_available() if "pinned" in name else 1), name
        # The loop waits for all of a save that is not written in the background.
        assert all(one["stall"] <= one["durable"] for one in rounds), name


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    rows = ("eager", "whole", "whole, not split", "by block")
    found = quick("compile", tmp_path, rows=rows)
    for name in ("ms", "ms_under_no_sync", "ms_all_reduce"):
        assert {row: len(values) for row, values in found[name].items()} == dict.fromkeys(rows, 1)


@pytest.mark.slow
def test_scaling_has_no_communication_with_one_rank_and_as_many_rows_on_each_of_two(tmp_path: Path) -> None:
    one, two = quick("scaling", tmp_path, "--rows", "4", rows=("1 rank", "2 ranks"))["measured"]
    assert [one["ranks"], one["rows"], two["ranks"], two["rows"]] == [1, 4, 2, 4]
    assert one["alone"] == one["step"]


def test_the_efficiency_of_a_world_is_sharing_times_communication(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [(1, 0.1, 0.1), (4, 0.2, 0.25), (1, 1.0, 1.0), (4, 2.0, 2.5)]
    scaling.show([scaling.Measured(ranks, 8, alone, step) for ranks, alone, step in rounds], "a model")
    lone, four = capsys.readouterr().out.splitlines()[1:3]
    assert lone.startswith("1 rank ")
    assert four.startswith("4 ranks")
    assert "  0.40           0.50          20.0%  " in four


def test_scaling_completes_what_the_command_line_leaves_open() -> None:
    larger = scaling.with_defaults(["data.train.size=224", "precision=bf16"])
    assert {"model=resnet9", "++model.width=16", "++data.train.size=224", "precision=bf16"} <= set(larger)
    assert "++data.train.size=32" not in larger
    mine = scaling.with_defaults(["experiment=mine", "data=shards"])
    assert not [override for override in mine if override.startswith(("model", "++model", "++data.train"))]


# -- low precision


@pytest.mark.slow
def test_low_precision_curves(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    found = quick("low_precision", tmp_path, "curves", "--out", picture, rows=("step", "test accuracy"))
    assert set(found["smoothed_loss"]) == {"fp32", "bf16", "fp16", "fp32, other seed"}
    assert picture.exists()


def test_a_mean_is_within_the_spread_between_the_smallest_and_largest_fp32_result() -> None:
    results = {"bf16": [0.80, 0.86], "fp32": [0.8, 0.9, 0.85], "fp16": [0.92, 0.89]}
    _, *lines = str(low_precision.make_seeds_table("digits", "eval/accuracy", results)).splitlines()
    assert [line.split()[-4:] for line in lines] == [
        ["0.8300", "0.8000-0.8600", "-0.0200", "yes"],
        ["0.9000", "0.8500", "0.8500", "0.8000-0.9000"],
        ["0.9050", "0.8900-0.9200", "+0.0550", "NO"],
    ]


def test_only_a_finished_run_with_the_same_overrides_is_not_trained_again(tmp_path: Path) -> None:
    overrides, run = ["experiment=digits", "run.seed=1"], harness.Run(tmp_path)
    assert not low_precision.is_finished(run, overrides)
    stored = {"overrides": harness.train_overrides(tmp_path, overrides)}
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(stored))
    (tmp_path / "status.json").write_text('{"state": "stopped"}')
    assert not low_precision.is_finished(run, overrides)
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert low_precision.is_finished(run, overrides)
    assert not low_precision.is_finished(run, [*overrides, "train.max_epochs=2"])


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_seeds_reads_finished_runs_and_trains_the_others(tmp_path: Path) -> None:
    def trained(*precisions: str) -> dict[str, list[int]]:
        options = ("--runs", tmp_path / "runs", "--precisions", *precisions, "train.log_every=1")
        found: dict[str, list[int]] = quick("low_precision", tmp_path, "seeds", *options, rows=precisions)[
            "trained_now"
        ]
        return found

    assert trained("fp32") == {"fp32": [0]}
    assert trained("fp32", "bf16") == {"fp32": [], "bf16": [0]}


# -- published results and long runs


def test_only_finished_runs_are_shown_beside_the_published_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, state, accuracy in (
        ("fp32-seed-0", "finished", 0.3),
        ("fp32-seed-1", "finished", 0.33),
        ("fp16-seed-0", "running", 0.1),
    ):
        folder = tmp_path / "seeds-mnist1d_logistic" / name
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"state": state, "trained_seconds": 7}))
        losses = [{"step": 10 * n, "applied_steps": 10 * n - 1, "train/loss": 1.0} for n in (1, 2)]
        lines = [*losses, {"step": 20, "applied_steps": 19, "eval/accuracy": accuracy}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs, unfinished = proof.find(tmp_path)
    proof.show(runs, unfinished)
    _, line, left_out, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(line.split()) == "mnist1d_logistic fp32 31.5 % 31.5% (30.0%-33.0%) 0 1 20 1 1 7 7"
    assert "fp16-seed-0: running at step 20" in left_out
    proof.draw(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_soak_names_what_has_grown() -> None:
    before = dict.fromkeys(soak.COLUMNS, 100.0)
    assert soak.grown(before, before | {"memory, MiB": 104.0}) == []
    assert soak.grown(before, before | {"memory, MiB": 106.0, "descriptors": 101.0}) == [
        "memory, MiB 100.0 -> 106.0",
        "descriptors 100.0 -> 101.0",
    ]


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("digits")
def test_nothing_grows_over_100_000_steps(tmp_path: Path) -> None:
    assert run("soak", "--dir", tmp_path / "run", cache=tmp_path / "cache").splitlines()[-1] == "flat"


@pytest.mark.slow
def test_scale_counts_the_calls_of_ranks_that_join(tmp_path: Path) -> None:
    rows = [f"{ranks} ranks, {kind}" for ranks in (2, 4) for kind in ("full mesh", "lazy")]
    found = quick("scale", tmp_path, rows=[*rows, "1 clients", "MiB of the order"])
    # gloo's full mesh asks for the address of each rank, in two calls.
    assert [found["calls"][f"{ranks} ranks, full mesh"] for ranks in (2, 4)] == [9, 13]
    assert found["order"]["samples of the rank"] == 64
