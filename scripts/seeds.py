"""Does lower precision learn as well? Trains one experiment in several precisions, several seeds each, and compares a metric.

    python scripts/seeds.py --experiment digits --precisions fp32 bf16 fp16 --seeds 0 1 2 [--ranks 2] [key=value ...]

The rule: a precision is within fp32's spread if the mean of its seeds is not below the smallest and not above the largest
result of an fp32 seed, which is what chance alone does to a run. Equal seeds have equal initial weights and equal batches.

The runs are kept in one folder, ``runs/seeds-<experiment>``. Run again, the script goes on: a finished run is read and not
trained, an unfinished one continues.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from bench_common import command_line, finish, table

BASE = "fp32"


def command(run_dir: Path, ranks: int, overrides: list[str]) -> list[str]:
    """What trains a run; with one rank, without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *torchrun, "-m", "dtrain.train", *overrides, f"run.dir={run_dir}"]


def is_finished(run_dir: Path, overrides: list[str]) -> bool:
    """Whether a run of these overrides has ended; one of others is for ``dtrain.train`` to continue or refuse."""
    status, composed = run_dir / "status.json", run_dir / "overrides.yaml"
    if not (status.exists() and composed.exists()):
        return False
    same = yaml.safe_load(composed.read_text())["overrides"] == [*overrides, f"run.dir={run_dir}"]
    return same and json.loads(status.read_text())["state"] == "finished"


def result(run_dir: Path, metric: str) -> float:
    """The last value of a metric."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    values = [record[metric] for record in records if metric in record]
    if not values:
        sys.exit(f"--metric: {run_dir}/metrics.jsonl has no {metric!r}. Take one that it has, such as eval/loss.")
    return float(values[-1])


def rows(results: dict[str, list[float]]) -> Iterator[list[str]]:
    """For each precision: its results, their mean, and whether that is within the spread of ``BASE``."""
    base = results.get(BASE)
    for precision, values in results.items():
        mean = statistics.mean(values)
        line = [precision, " ".join(f"{value:.4f}" for value in values), f"{mean:.4f}"]
        line.append(f"{min(values):.4f}-{max(values):.4f}")
        if base is None or precision == BASE:
            yield [*line, "", ""]
        else:
            within = "yes" if min(base) <= mean <= max(base) else "NO"
            yield [*line, f"{mean - statistics.mean(base):+.4f}", within]


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of a run, started by torchrun if there are several"
    )
    parser.add_argument("--metric", default="eval/accuracy", help="of metrics.jsonl; its last value is a run's result")
    parser.add_argument("--folder", type=Path, help="where the runs are; by default runs/seeds-EXPERIMENT")
    # Taken out first: argparse would count those that follow --seeds as seeds.
    overrides = [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    arguments = parser.parse_args([argument for argument in sys.argv[1:] if argument not in overrides])
    if arguments.quick:
        arguments.seeds, overrides = arguments.seeds[:1], [*overrides, "train.max_steps=3"]
    folder = (arguments.folder or Path("runs", f"seeds-{arguments.experiment}")).absolute()
    results: dict[str, list[float]] = {precision: [] for precision in arguments.precisions}
    # Seed by seed, so that what is there after an hour is a comparison.
    for seed in arguments.seeds:
        for precision, values in results.items():
            run_dir = folder / f"{precision}-seed-{seed}"
            own = [f"experiment={arguments.experiment}", f"precision={precision}", f"run.seed={seed}", "tracker=none"]
            if trained := not is_finished(run_dir, [*own, *overrides]):
                started = command(run_dir, arguments.ranks, [*own, *overrides])
                done = subprocess.run(started, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    sys.exit(f"{' '.join(started)} failed:\n{done.stderr}")
            values.append(result(run_dir, arguments.metric))
            said = "trained" if trained else "was finished, not trained again"
            print(f"{precision}, seed {seed}: {arguments.metric} {values[-1]:.4f} ({said})", flush=True)
    columns = [f"{arguments.metric} of each", "mean", "min-max", f"mean - {BASE}'s", f"within {BASE}'s spread"]
    title = " ".join([arguments.experiment, *overrides])
    print("", table(title, columns, list(rows(results))), "", sep="\n")
    print(
        f"within the spread: {BASE}'s smallest <= mean <= {BASE}'s largest; seeds {', '.join(map(str, arguments.seeds))}"
    )
    finish(arguments, {"results": results}, ("dtrain", "torch"))


if __name__ == "__main__":
    main()
