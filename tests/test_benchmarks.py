"""The benchmarks: each runs to its end and says what was measured where; their statistics are right."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    """Makes modules of the folder importable, as for a script that is started there."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


def quick(name, tmp_path, *arguments):
    """The results of a benchmark in its quick mode."""
    environ = {key: value for key, value in os.environ.items() if key not in ("DTRAIN_TEST_CIFAR10", "DTRAIN_CACHE")}
    command = [sys.executable, SCRIPTS / f"{name}.py", "--quick", "--json", tmp_path / "out.json", *arguments]
    environ |= {"OMP_NUM_THREADS": "1", "DTRAIN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    for fact in ("command", "versions", "machine", "date"):
        assert f"{fact}: {found[fact]}" in done.stdout
    return found


@pytest.mark.slow
def test_shuffle_quality_compares_orders_with_a_random_draw(tmp_path):
    rows = {row["order"]: row for row in quick("shuffle_quality", tmp_path)["measured"]}
    assert any("(default)" in name for name in rows)
    assert rows["none"]["class_mix"] > 10 * rows["random"]["class_mix"]


def test_the_class_mix_is_pearsons_statistic_over_its_degrees_of_freedom(scripts):
    from shuffle_quality import Sorted

    data = Sorted(shards=16, per_shard=25, classes=8, batch=40)
    order = data.random_draw()
    expected = []
    for step in order.tolist():
        held = Counter(sample // 50 for sample in step)  # 400 samples in 8 equal, sorted classes
        expected.append(sum((held[label] - 5) ** 2 / 5 for label in range(8)) / 7)
    found = data.judge(order)
    assert found["class_mix"] == pytest.approx(np.mean(expected))
    ranks = [{sample // 25 for step in order.tolist() for sample in step[5 * rank : 5 * rank + 5]} for rank in range(8)]
    assert found["opened_most"] == max(map(len, ranks)) / 16


def test_cpu_time_counts_children_that_run_and_those_that_ended(scripts):
    from bench_common import cpu_seconds

    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"
    before = cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "burnt\n"
    assert cpu_seconds() - before >= 0.27  # the kernel counts in hundredths, user and system time each
    child.communicate("\n")
    assert cpu_seconds() - before >= 0.27


def test_the_ratio_is_the_median_of_the_ratios_of_each_round(scripts):
    from bench_common import ratio, spread

    assert ratio([2, 40, 6], [1, 20, 1]) == 2  # a slow round is slow for both
    assert spread([1, 3, 2000], 1) == "3.0 (1.0-2,000.0)"


@pytest.mark.slow
def test_the_loaders_that_are_there_are_compared_and_the_others_are_named(tmp_path):
    measured = quick("bench_loader", tmp_path, "--works", "32x32", "--workers", "0")["measured"]["32x32 JPEG"]
    rates = {(row["loader"], row["decoder"]): row["rounds"] for row in measured}
    assert rates["dtrain", "simplejpeg"][0]["samples/s"] > 0
    assert rates["webdataset", "Pillow"]
    assert {"litdata", "mosaicml-streaming", "decoding alone"} < {loader for loader, _ in rates}


@pytest.mark.slow
def test_the_index_benchmark_finds_all_members_with_every_reader(tmp_path):
    rates = quick("bench_index", tmp_path)["members_per_second"]
    assert set(rates) == {"ustar", "PAX", "photographs"}
    assert all(len(by_reader) == 4 for by_reader in rates.values())


@pytest.mark.slow
def test_a_resumed_loader_reads_only_the_samples_it_returns(tmp_path):
    found = quick("bench_resume", tmp_path, "--workers", "0")["bytes_read_and_own"]
    assert len(found) == 4
    assert all(got == own for got, own in found.values())


@pytest.mark.slow
def test_the_state_of_a_run_over_many_shards_is_a_few_numbers(tmp_path):
    state = quick("bench_order", tmp_path)["state"]
    assert state["data"]["num_shards"] == 10_000
    assert len(json.dumps(state)) < 400


@pytest.mark.slow
def test_the_wire_weighs_what_its_dtype_says(tmp_path):
    rows = {(row["what"], row["wire"]): row["rounds"][0] for row in quick("bench_wire", tmp_path)["measured"]}
    pixels, floats = 64 * 224 * 224 * 3, 64 * 4096
    weights = {("image", "uint8"): pixels, ("image", "bf16"): 2 * pixels, ("feature", "fp32"): 4 * floats}
    for row, expected in weights.items():
        assert rows[row]["MB"] * 1e6 == expected


@pytest.mark.slow
def test_slow_storage_is_read_in_few_large_pieces(tmp_path):
    rows = quick("bench_slow_storage", tmp_path)["measured"]
    (cached,), (one_by_one,) = rows["shards, slow, through the cache"], rows["shards, slow, where they lie"]
    assert cached["reads"] < 32  # opens and reads of four shards, whatever was measured of their 256 samples
    assert one_by_one["reads"] > one_by_one["samples"]


@pytest.mark.slow
def test_mixing_reads_nothing_twice_where_partners_are_side_by_side(tmp_path):
    rows = quick("bench_mixing", tmp_path)["measured"]
    assert len(rows) == 10
    for row in rows:
        (one,) = row["rounds"]
        assert one["decoded"] > 1.5 if "elsewhere" in row["case"] else one["decoded"] == 1


def test_a_turn_times_the_steps_after_the_first_ten_and_not_what_follows(scripts):
    from bench_step_setting import Turn

    clock = iter(range(1000))
    turn = Turn("batch", 20, lambda: next(clock))
    done = []
    for batch in turn:
        assert batch == "batch"
        next(clock)  # a step takes a second
        done.append(turn.seconds)
    assert len(done) == len(turn) == 31
    assert turn.seconds == 20 + 1  # and looking at the clock another one
    assert all(seconds != seconds for seconds in done[:-1])


def test_what_a_step_costs_over_a_bare_loop_is_the_median_of_the_differences_of_each_round(scripts):
    from bench_step import show

    times = {"bare loop": [100, 900, 200], "dtrain, everything on": [110, 950, 230], "dtrain's vote": [5, 6, 7]}
    lines = [line.split("  ") for line in show("title", "us", times, ["Lightning"]).splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert cells["dtrain, everything on"] == ["230 (110-950)", "+30", "1.10"]
    assert cells["bare loop"] == ["200 (100-900)", "1.00"]
    assert cells["dtrain's vote"] == ["6 (5-7)"]
    assert cells["Lightning"] == ["not installed"]


@pytest.mark.slow
def test_every_loop_that_is_there_trains_in_one_rank_and_in_two(tmp_path):
    found = quick("bench_step", tmp_path, "--models", "mlp", "--cpu")["microseconds"]
    assert set(found) == {"1 rank", "2 ranks"}
    for by_model in found.values():
        assert {"bare loop", "dtrain, everything on", "dtrain's vote"} <= set(by_model["mlp"])
        assert all(0 < time < 1e6 for times in by_model["mlp"].values() for time in times)


@pytest.mark.slow
def test_the_parts_of_a_start_add_up_to_its_time(tmp_path):
    found = quick("bench_start", tmp_path, "--ranks", "1")["1"]
    seconds = found["seconds"]
    assert set(seconds) == {"new run", "new run, shards indexed before", "killed run", "bare"}
    assert sum(found["parts"].values()) == pytest.approx(seconds["new run, shards indexed before"][0])


@pytest.mark.slow
def test_a_lone_rank_does_not_communicate_and_two_have_as_many_rows_each(tmp_path):
    one, two = sorted(quick("bench_scaling", tmp_path, "--rows", "4")["measured"], key=lambda found: found["ranks"])
    assert [one["ranks"], one["rows"], two["ranks"], two["rows"]] == [1, 4, 2, 4]
    assert one["alone"] == one["step"] > 0
    assert two["alone"] > 0


def test_the_efficiency_of_a_world_is_what_sharing_leaves_times_what_communication_leaves(scripts, capsys):
    from bench_scaling import Measured, show

    rounds = [Measured(1, 8, 0.1, 0.1), Measured(4, 8, 0.2, 0.25), Measured(1, 8, 1.0, 1.0), Measured(4, 8, 2.0, 2.5)]
    show(rounds, 2, "a model")
    _, lone, four, *_ = capsys.readouterr().out.splitlines()
    assert lone.split()[:2] == ["1", "rank"]
    assert four.startswith("4 ranks on 2 cores")
    assert four.split()[7:10] == ["0.40", "0.50", "20.0%"]


def test_a_scaling_run_keeps_the_defaults_of_what_the_command_line_leaves_open(scripts):
    from bench_scaling import completed

    larger = completed(["data.train.size=224", "precision=bf16"])
    assert {"model=resnet9", "++model.width=16", "++data.train.size=224", "precision=bf16"} <= set(larger)
    assert "++data.train.size=32" not in larger
    mine = completed(["experiment=mine", "data=shards"])
    assert not [override for override in mine if override.startswith(("model", "++model", "++data.train"))]


@pytest.mark.slow
def test_compiled_models_are_measured_with_and_without_communication(tmp_path):
    found = quick("bench_compile", tmp_path)
    assert len(found["ms"]) == 4
    assert all(
        len(found[what][row]) == 1 for what in ("ms", "ms_under_no_sync", "ms_all_reduce") for row in found["ms"]
    )
