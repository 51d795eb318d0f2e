"""All GPU measurements of the project in less than ten minutes: results.json and a page with the machine's name.

    DTRAIN_CIFAR10=/data/cifar10 python -m benchmarks.gpu_session [--out DIR] [--minutes 9.5] [--only PART ...]
    python -m benchmarks.gpu_session --quick          # small, also on a CPU: shows that everything runs

* A *part* runs commands of the project, each in a process of its own, and yields its table line by line, so that the lines
  it has when its time is up are kept.
* The parts share the time. Unused time goes to the next part; a part without time or data is skipped with the reason.
* A failed part is recorded with its last lines, the others continue, and the exit code is 1.

Both files are written after each part. On several GPUs the parts ``strategies``, ``failure``, ``scaling`` and ``trace``
use all of them, the others the first. torch and dtrain's dependencies must be installed; dtrain itself need not be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.fault_hook import faulty
from benchmarks.gpu_processes import Bench, Failed, NoTimeLeft, OutOfTime, Skipped, adopt_orphans
from dtrain.distributed.world import process_cpu_count
from dtrain.errors import ConfigError
from dtrain.export.formats import FORMATS
from dtrain.training.monitor.profiler import TraceSummary
from dtrain.training.step import PARTS as STEP_PARTS
from dtrain.training.step import STEP

#: A line of a part's table: column to value, None where there is none.
Line = dict[str, "float | str | None"]

CIFAR10_ACCURACY, CIFAR10_SEEDS = 0.94, 5
#: Attempted steps of a run on noise; the last of them that are timed; those that are profiled.
STEPS, TIMED, PROFILED = 60, 20, (31, 35)
_PEAKS = "memory/max_allocated_gib", "memory/max_resident_gib"  # of tensors on a GPU; of the process on a CPU
LOOPS = ("bare loop", "dtrain, the step alone", "dtrain, everything on", "dtrain's vote")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run everything small, to show that it works")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-session"), help="folder of the results (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.quick:
        sys.exit("torch finds no GPU here. --quick runs everything small on a CPU, without meaningful figures.")
    # As an exception, so that child processes are killed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    adopt_orphans()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"about": about(), "parts": {}}
    started, shares = time.monotonic(), sum(PARTS[name].share for name in arguments.only)
    used = 0
    with tempfile.TemporaryDirectory(prefix="dtrain-") as folder:
        for name in arguments.only:
            part = PARTS[name]
            used += part.share
            deadline = started + arguments.minutes * 60 * used / shares
            log(started, f"{name}: {part.title}, {max(0.0, deadline - time.monotonic()):.0f} s")
            bench = Bench(Path(folder, name), arguments.out, deadline, quick=arguments.quick)
            result = {"title": part.title, **run_part(part.lines(bench), bench, started)}
            results["parts"][name] = result
            log(started, f"{name}: {result['state']}" + (f": {result['why']}" if result["why"] else ""))
            results["about"]["seconds"] = round(time.monotonic() - started, 1)
            (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            (arguments.out / "page.md").write_text(page(results))
    print(f"{arguments.out / 'page.md'} and results.json beside it")
    return int(any(part["state"] == "failed" for part in results["parts"].values()))


def run_part(lines: Iterator[Line], bench: Bench, started: float) -> dict[str, Any]:
    """The lines of a part, its state (done, cut short, skipped, failed) and the reason for it."""
    table: list[Line] = []
    state, why, began = "done", "", time.monotonic()
    try:
        for line in lines:
            table.append(line)
            log(started, ", ".join(f"{name} {cell(value)}" for name, value in line.items() if value is not None))
    except Skipped as reason:
        state, why = "skipped", str(reason)
    except NoTimeLeft as reason:
        state, why = ("cut short" if table else "skipped"), str(reason)
    except OutOfTime as reason:
        state, why = ("cut short" if table else "failed"), str(reason)
    except (Failed, OSError, LookupError, ValueError) as error:  # a command, or a file that it should have written
        state, why = "failed", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    return {"state": state, "why": why, "seconds": seconds, "lines": table, "commands": bench.commands}


def about() -> dict[str, Any]:
    """Machine, versions, date and command."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    versions = [harness.version("dtrain"), f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    return {
        "machine": f"{names}; {harness.machine()}",
        "versions": ", ".join([*versions, f"Python {sys.version.split()[0]}"]),
        "date": date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.gpu_session", *sys.argv[1:]]),
    }


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    facts = results["about"]
    blocks = [
        f"# {facts['machine']}",
        f"`{facts['command']}`, {facts['date']}, {facts['versions']}, {facts['seconds']:.0f} s in all. "
        "Commands run from the root of a checkout; RUNS is a folder.",
    ]
    for name, part in results["parts"].items():
        blocks.append(f"## {part['title']}")
        if part["lines"]:
            first, *columns = dict.fromkeys(column for line in part["lines"] for column in line)
            lines = dict(enumerate(part["lines"]))
            table = harness.Table(first, lines, {number: cell(line.get(first)) for number, line in lines.items()})
            for column in columns:
                table.text(column, {number: cell(line.get(column)) for number, line in lines.items()})
            blocks.append(f"```\n{table}\n```")
        if part["state"] != "done":
            reason, _, rest = part["why"].partition("\n")
            blocks.append(f"`{name}` {part['state']}: {reason}" + (f"\n\n```\n{rest}\n```" if rest else ""))
        if part["commands"]:
            blocks.append("```bash\n" + "\n".join(part["commands"]) + "\n```")
    return "\n\n".join(blocks) + "\n"


def cell(value: float | str | None) -> str:
    """A value as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def log(started: float, text: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"{time.monotonic() - started:5.0f} s  {text}", flush=True)


# -- parts


def checkerboard(bench: Bench) -> Iterator[Line]:
    """The textbook's size in three precisions, compared with fp32."""
    size = ["data.train.size=512", "model.width=256"]
    if bench.quick:
        size = ["data.train.size=16", "model.width=16", "train.max_steps=4", "train.log_every=2"]
    base = None
    for precision in ("fp32", "bf16", "fp16"):
        run = bench.train(precision, "experiment=checkerboard", f"precision={precision}", *size)
        base = base or run
        yield {"precision": precision, "loss": run.last("eval/loss"), "seconds": run.seconds, **cost(run, base)}


def resnet50(bench: Bench) -> Iterator[Line]:
    """The ImageNet recipe on noise, by precision, eager and compiled."""
    return steps_by_precision(bench, resnet50_recipe(bench), image_rows(bench), compiled=not bench.quick)


def gpt(bench: Bench) -> Iterator[Line]:
    """A GPT of GPT-2 small's size except for its vocabulary, on noise, by precision, eager and compiled."""
    return steps_by_precision(bench, gpt_recipe(bench), token_rows(bench), compiled=True)


def steps_by_precision(bench: Bench, recipe: list[str], rows: int, *, compiled: bool) -> Iterator[Line]:
    """A line for each precision of a recipe."""
    precisions = (
        ["fp32", "bf16"] if bench.quick else ["fp32", "tf32", "bf16", "fp16"]
    )  # a CPU has no fast tf32 and fp16
    cases = [(precision, False) for precision in precisions] + [("bf16", True)] * compiled
    base = None
    for precision, is_compiled in cases:
        name = f"{precision}-compiled" if is_compiled else precision
        run = bench.train(name, *recipe, f"precision={precision}", *["train.compile=true"] * is_compiled)
        base = base or run
        yield {
            f"{rows} rows": name,
            "steps/s": 1 / step_seconds(run),
            "samples/s": run.last("throughput/samples_per_second"),
            "tokens/s": run.last("throughput/tokens_per_second"),
            "TFLOP/s": run.last("throughput/tflops_per_second"),
            "MFU": percent(run.last("throughput/mfu")),
            **cost(run, base),
            "waiting for data": percent(run.last("time/data_wait_fraction")),
        }


def export(bench: Bench) -> Iterator[Line]:
    """Forwards of the exported CIFAR network; its weights do not matter for their time, so it is hardly trained."""
    rows = 16 if bench.quick else 512
    noise = dict.fromkeys(image_data("train", rows, 32, 10) + image_data("test", rows, 32, 10))
    short = [f"train.global_batch_size={rows // 2}", "train.max_steps=4", "optimizer.lr=0.01", "data.num_workers=0"]
    run = bench.train("resnet9", "experiment=cifar10", f"model.width={8 if bench.quick else 64}", *noise, *short)
    batches = "[1,8]" if bench.quick else "[1,32,256]"
    # An untrained network would be refused for its metrics.
    accept = ["checkpoint=latest", "samples=16", "export.tolerance=10", "export.max_metric_difference=10"]
    for name in export_formats(bench):
        out = bench.folder / name
        options = [f"export.format={name}", "export.dtype=bf16", f"export.batch={batches}", f"export.out={out}"]
        bench.python("-m", "dtrain.export", f"run.dir={run.run_dir}", *options, *accept)
        for line in json.loads((out / "report.json").read_text())["cost"]["artefacts"]["bf16"]["batches"]:
            ratios = line.get("ratios", {})
            yield {
                "format, bf16": name,
                "rows": str(line["batch"]),
                "ms": line.get("latency_ms"),
                "p95": line.get("latency_p95_ms"),
                "rows/s": line.get("samples_per_second"),
                "of fp32's time": ratios.get("latency"),
                "MiB": line.get("peak_mib"),
                "of fp32's memory": ratios.get("peak_memory"),
            }


def export_formats(bench: Bench) -> list[str]:
    """The formats that work on this machine."""
    formats = ["safetensors", "pt2"]
    try:
        FORMATS["aotinductor"].check("bf16")
    except ConfigError:
        return formats
    return formats if bench.quick else [*formats, "aotinductor"]


def step(bench: Bench) -> Iterator[Line]:
    """Cost of training loops around a step that computes almost nothing, on the CPU of this machine."""
    out = bench.folder / "step.json"
    length = ["--quick"] if bench.quick else ["--rounds", "21"]
    bench.python("-m", "benchmarks.step", "--ranks", "1", "--json", out, *length, "--contenders", *LOOPS)
    [times] = json.loads(out.read_text())["microseconds"].values()
    for row, values in times.items():
        over = statistics.median(one - bare for one, bare in zip(values, times[LOOPS[0]], strict=True))
        compare = row not in (LOOPS[0], LOOPS[-1])  # the bare loop itself, and the vote, which is no loop
        yield {"loop": row, "us a step": statistics.median(values), "over bare": over if compare else None}


def parity(bench: Bench) -> Iterator[Line]:
    """Windows of a run on the CPU, recomputed on this device from the checkpoints of the run."""
    every, window = (2, 2) if bench.quick else (100, 10)
    steps = [f"train.max_steps={3 * every}", "train.max_epochs=null", "train.eval_every=0", "data.num_workers=1"]
    kept = [f"checkpoint.every_steps={every}", f"checkpoint.keep_every={every}", "train.deterministic=true"]
    run = bench.train("cpu", "experiment=checkerboard", *steps, *kept, CUDA_VISIBLE_DEVICES="")
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        out = bench.folder / f"{precision}.json"
        windows = ["replay.windows=3", f"replay.window={window}", "replay.tolerance=1e9", f"precision={precision}"]
        if precision == "fp16":
            windows.append("precision.loss_scale.init=1")  # a window is too short for the scale to adapt
        bench.python("-m", "dtrain.replay", f"run.dir={run.run_dir}", *windows, "--nproc", "1", "--json", out)
        replay = json.loads(out.read_text())
        differences = [step["difference"] for step in replay["steps"] if step["difference"] is not None]
        yield {
            "precision": precision,
            "steps": str(len(replay["steps"])),
            "equal": str(sum(step["equal"] for step in replay["steps"])),
            "median difference": statistics.median(differences),
            "largest difference": max(differences),
        }


def trace(bench: Bench) -> Iterator[Line]:
    """Profiled steps on all ranks: how much communication is hidden."""
    first, last = (3, 4) if bench.quick else PROFILED
    for name, recipe in (("resnet50", resnet50_recipe), ("gpt", gpt_recipe)):
        overrides = [*recipe(bench, bench.ranks), "precision=bf16", f"profile.steps=[{first},{last}]"]
        run = bench.train(name, *overrides, ranks=bench.ranks)
        [path] = (run.run_dir / "profile").glob("*.json.gz")
        summary = TraceSummary.read(path, STEP, STEP_PARTS)
        (bench.out / f"trace-{name}.txt").write_text(summary.text(f"{name}, rank 0 of {bench.ranks}") + "\n")
        communication = summary.communication_ms
        yield {
            "model, bf16": name,
            "ranks": str(bench.ranks),
            "ms a step": summary.step_ms,
            "communication, ms": communication or None,
            "hidden": percent(summary.hidden_ms / communication if communication else None),
        }


def scaling(bench: Bench) -> Iterator[Line]:
    """1, 2, 4, ... ranks, up to all."""
    if bench.gpus == 1:
        raise Skipped("one GPU: there is nothing to scale to")
    out = bench.folder / "scaling.json"
    worlds = sorted({*(2**power for power in range(16) if 2**power <= bench.ranks), bench.ranks})
    full = ["--rounds", "1", "--seconds", "1", "precision=bf16", "model=resnet50", "data.train.size=224"]
    rows = ["--rows", str(image_rows(bench)), *(["--quick"] if bench.quick else full)]
    first = None
    for ranks in worlds:
        bench.python("-m", "benchmarks.scaling", "--json", out, "--ranks", str(ranks), *rows)
        [one] = json.loads(out.read_text())["measured"]
        first = first or one
        yield {
            "ranks": str(ranks),
            "samples/s a rank": one["rows"] / one["step"],
            "efficiency": first["step"] / one["step"],
            "without comm.": first["alone"] / one["alone"],
            "communication": percent(1 - one["alone"] / one["step"]),
        }


def strategies(bench: Bench) -> Iterator[Line]:
    """GPTs of 350 million and 1.3 billion parameters by strategy: speed, and memory beside what ``doctor memory`` predicts."""
    shapes = {"tiny": (16, 16, 2, 1)} if bench.quick else {"350M": (1024, 1024, 24, 16), "1.3B": (1024, 2048, 24, 16)}
    options = {"ddp": ["parallel=ddp"]}
    if bench.ranks > 1:
        options |= {
            "fsdp": ["parallel=fsdp"],
            "fsdp, gather compute": ["parallel=fsdp", "parallel.gather_dtype=compute"],
        }
    for size, shape in shapes.items():
        for name, chosen in options.items():
            overrides = [
                *gpt_recipe(bench, bench.ranks, shape, rows=2 if bench.quick else 4),
                *chosen,
                "precision=bf16",
            ]
            line: Line = {"GPT, bf16": size, "ranks": str(bench.ranks), "strategy": name}
            file = bench.folder / "memory.json"
            with suppress(Failed):  # exit code 1 if it does not fit; the file has the figures
                ranks = [f"ranks={bench.ranks}", f"ranks_per_node={bench.ranks}"]
                bench.python("-m", "dtrain.doctor", "memory", *overrides, *ranks, "--json", file)
            predicted = next(iter(json.loads(file.read_text())["strategies"].values()))["total"] / 2**30
            try:
                run = bench.train(f"{size}-{name.replace(', ', '-').replace(' ', '-')}", *overrides, ranks=bench.ranks)
            except Failed as error:
                if "out of memory" not in str(error):
                    raise
                yield line | {"ms a step": "out of memory", "predicted GiB": predicted}
                continue
            yield line | {
                "ms a step": step_seconds(run) * 1e3,
                "tokens/s": run.last("throughput/tokens_per_second"),
                "MFU": percent(run.last("throughput/mfu")),
                "GiB": max(run.values(*_PEAKS)),
                "predicted GiB": predicted,
                "MiB sent": (run.last("comm/bytes_per_step") or 0.0) / 2**20,
            }


def failure(bench: Bench) -> Iterator[Line]:
    """Seconds from the failure of a rank until all processes have ended; with NCCL the others are inside a collective."""
    if bench.gpus == 1:
        raise Skipped("one GPU: no other rank could wait for it")
    step = 3 if bench.quick else 20
    for kind in ("crash", "kill"):
        overrides = [*gpt_recipe(bench, bench.ranks), faulty(f"{kind}@rank=1,step={step}")]
        try:
            bench.train(kind, *overrides, ranks=bench.ranks)
        except Failed:
            ended = time.time()
            marker = next((bench.folder / kind).glob("faults/*"), None)  # written when the fault happens
            if marker is None:  # something else failed
                raise
        else:
            raise LookupError(f"the run survived {kind} of a rank")
        yield {"rank 1": kind, "seconds until all have ended": ended - marker.stat().st_mtime}


def cifar10(bench: Bench) -> Iterator[Line]:
    """The recipe to its end, seed by seed."""
    names = ("DTRAIN_CIFAR10", "DTRAIN_TEST_CIFAR10")  # as in conf/data/cifar10.yaml
    folder = next(filter(None, map(os.environ.get, names)), None)
    if folder is None or not list(Path(folder).glob("train-*.tar")):
        got = f"{folder} has no train-*.tar" if folder else "it is not set"
        raise Skipped(f"DTRAIN_CIFAR10 has to name the folder of CIFAR-10's shards: {got}")
    small = ["model.width=4", "train.max_steps=3", "train.global_batch_size=32", "data.num_workers=1"]
    accuracies = []
    for seed in range(2 if bench.quick else CIFAR10_SEEDS):
        options = small if bench.quick else ["precision=bf16"]
        run = bench.train(f"seed-{seed}", "experiment=cifar10", f"run.seed={seed}", *options)
        accuracy = run.last("eval/accuracy")
        if accuracy is None:
            raise LookupError(f"{run.run_dir}/metrics.jsonl has no eval/accuracy")
        accuracies.append(accuracy)
        waiting = percent(run.last("time/data_wait_fraction"))
        yield {"seed": str(seed), "accuracy": f"{accuracy:.4f}", "seconds": run.seconds, "waiting for data": waiting}
    mean = statistics.mean(accuracies)
    verdict = f"{CIFAR10_ACCURACY:.0%} {'reached' if mean >= CIFAR10_ACCURACY else 'missed'}"
    yield {"seed": f"mean: {verdict}", "accuracy": f"{mean:.4f} ({min(accuracies):.4f}-{max(accuracies):.4f})"}


class Part(NamedTuple):
    """A function that yields the lines of the table, its title, and the share of the time relative to the other parts."""

    lines: Callable[[Bench], Iterator[Line]]
    title: str
    share: int


#: In order; the part that can use up all the time comes last.
PARTS = {
    "checkerboard": Part(checkerboard, "A network learns a picture", 10),
    "resnet50": Part(resnet50, "ResNet-50, one training step", 20),
    "gpt": Part(gpt, "A byte-level GPT of GPT-2 small's size, one training step", 18),
    "export": Part(export, "The CIFAR network exported", 10),
    "step": Part(step, "Time around a step (on the CPU)", 3),
    "parity": Part(parity, "Steps of a CPU run, recomputed on this device", 5),
    "trace": Part(trace, "Communication hidden by computation", 7),
    "strategies": Part(strategies, "GPTs by strategy", 20),
    "failure": Part(failure, "A rank fails", 4),
    "scaling": Part(scaling, "Weak scaling of ResNet-50", 8),
    "cifar10": Part(cifar10, "CIFAR-10 to 94 %", 24),
}


# -- shared by the parts


def step_seconds(run: harness.Run) -> float:
    """Median of the last logged steps, long after everything is compiled."""
    return run.values("time/step_seconds_p50")[-1]


def cost(run: harness.Run, base: harness.Run) -> Line:
    """Time of a step and memory, also as shares of those of ``base``; the aim in mixed precision is 0.5 and 0.67."""
    gib, base_gib = max(run.values(*_PEAKS)), max(base.values(*_PEAKS))
    return {
        "ms a step": step_seconds(run) * 1e3,
        "of fp32's time": step_seconds(run) / step_seconds(base),
        "GiB": gib,
        "of fp32's memory": gib / base_gib,
    }


def percent(share: float | None) -> str | None:
    """A share as text."""
    return None if share is None else f"{share:.1%}"


# -- recipes: overrides that replace the data by noise, and make a run short but large enough to fill a GPU


def image_rows(bench: Bench) -> int:
    """Rows of ResNet-50 on each rank."""
    return 4 if bench.quick else 256 if bench.has_large_gpu else 64


def token_rows(bench: Bench) -> int:
    """Rows of the GPT on each rank."""
    return 2 if bench.quick else 32 if bench.has_large_gpu else 8


def resnet50_recipe(bench: Bench, ranks: int = 1) -> list[str]:
    """The ImageNet recipe on images of noise."""
    size, number = (32, 64) if bench.quick else (224, 4 * image_rows(bench) * ranks)
    small = ["model.depth=18", "model.width=4"] if bench.quick else []
    data = image_data("train", number, size, classes=1000)
    rows = image_rows(bench) * ranks
    return ["experiment=imagenet_resnet50", *small, *data, f"train.global_batch_size={rows}", *short_run(bench)]


def gpt_recipe(
    bench: Bench, ranks: int = 1, shape: tuple[int, int, int, int] | None = None, rows: int | None = None
) -> list[str]:
    """The byte-level GPT with GPT-2 small's width and depth, or length, width, depth and heads, on rows of noise."""
    length, width, depth, heads = shape or ((16, 16, 1, 1) if bench.quick else (1024, 768, 12, 12))
    arguments = f"number: 1024, length: {length + 1}, vocabulary: 257"
    return [
        "experiment=bytes_gpt",
        f"model={{width: {width}, depth: {depth}, heads: {heads}, context: {length}}}",
        f"data.train={{_target_: benchmarks.harness.noise_tokens, {arguments}}}",
        "data.fields={tok: {dtype: null, length: null}}",
        "data.prepare=null",
        "task.sample=null",
        f"train.global_batch_size={(rows or token_rows(bench)) * ranks}",
        *short_run(bench),
    ]


def image_data(split: str, number: int, size: int, classes: int) -> list[str]:
    """Images of noise instead of a recipe's own."""
    arguments = f"number: {number}, size: {size}, classes: {classes}, split: {split}"
    return [
        "data=map",
        f"data.fields={{image: {{size: {size}}}}}",
        f"data.{'eval' if split == 'test' else split}={{_target_: benchmarks.harness.noise_images, {arguments}}}",
    ]


def short_run(bench: Bench) -> list[str]:
    """A few steps without evaluation."""
    steps, log_every = (6, 2) if bench.quick else (STEPS, TIMED)
    workers = 1 if bench.quick else min(8, max(1, process_cpu_count() // 2))
    return [
        f"train.max_steps={steps}",
        f"train.log_every={log_every}",
        "train.eval_every=0",
        "data.eval=null",
        f"data.num_workers={workers}",
        "optimizer.lr=0.001",  # at a recipe's own rate, training on noise could diverge
    ]


if __name__ == "__main__":
    sys.exit(main())
