"""The parts of ``gpu_session.py``: each runs commands and yields its table line by line, so that what is there when time is up
is kept. With ``quick`` they are as small as they can be."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import gpu_session_recipes as recipes
from gpu_session_bench import SCRIPTS, Bench, Line, Skipped, Trained

from dtrain.config.errors import ConfigError
from dtrain.deployment.formats import FORMATS
from dtrain.tracking.trace import TraceSummary
from dtrain.training import spans

_ACCURACY, _SEEDS = 0.94, 5
_LOOPS = ("bare loop", "dtrain, the step alone", "dtrain, everything on", "dtrain's vote")
_WAYS = (("fp32", False), ("tf32", False), ("bf16", False), ("fp16", False), ("bf16", True))


def checkerboard(bench: Bench) -> Iterator[Line]:
    """The textbook's size in three precisions, against fp32."""
    size = ["data.train.size=512", "model.width=256"]
    if bench.quick:
        size = ["data.train.size=16", "model.width=16", "train.max_steps=4", "train.log_every=2"]
    base = None
    for precision in ("fp32", "bf16", "fp16"):
        run = bench.train(precision, "experiment=checkerboard", f"precision={precision}", *size)
        base = base or run
        yield {"precision": precision, "loss": run.last("eval/loss"), "seconds": run.seconds, **_cost(run, base)}


def resnet50(bench: Bench) -> Iterator[Line]:
    """The ImageNet recipe on noise, by precision, eager and compiled."""
    # A CPU would compile for a minute.
    return _steps(bench, recipes.resnet50(bench), recipes.image_rows(bench), compiled=not bench.quick)


def gpt(bench: Bench) -> Iterator[Line]:
    """A GPT as large as GPT-2 small but for its vocabulary, on noise, by precision, eager and compiled."""
    return _steps(bench, recipes.gpt(bench), recipes.token_rows(bench), compiled=True)


def export(bench: Bench) -> Iterator[Line]:
    """What forwards of the exported CIFAR network take; weights do not matter for that, so it has hardly been trained."""
    rows = 16 if bench.quick else 512
    noise = dict.fromkeys(recipes.images("train", rows, 32, 10) + recipes.images("test", rows, 32, 10))
    short = [f"train.global_batch_size={rows // 2}", "train.max_steps=4", "optimizer.lr=0.01", "data.num_workers=0"]
    run = bench.train("resnet9", "experiment=cifar10", f"model.width={8 if bench.quick else 64}", *noise, *short)
    batches = "[1,8]" if bench.quick else "[1,32,256]"
    # It is not to be refused for what it says, only timed.
    anyhow = ["checkpoint=latest", "samples=16", "export.tolerance=10", "export.max_metric_difference=10"]
    for stored_as in _formats(bench):
        out = bench.folder / stored_as
        options = [f"export.format={stored_as}", "export.dtype=bf16", f"export.batch={batches}", f"export.out={out}"]
        bench.python("-m", "dtrain.export", f"run.dir={run.run_dir}", *options, *anyhow)
        for line in json.loads((out / "report.json").read_text())["cost"]["artefacts"]["bf16"]["batches"]:
            ratios = line.get("ratios", {})
            yield {
                "format, bf16": stored_as,
                "rows": str(line["batch"]),
                "ms": line.get("latency_ms"),
                "p95": line.get("latency_p95_ms"),
                "rows/s": line.get("samples_per_second"),
                "of fp32's time": ratios.get("latency"),
                "MiB": line.get("peak_mib"),
                "of fp32's memory": ratios.get("peak_memory"),
            }


def step(bench: Bench) -> Iterator[Line]:
    """What loops cost around a step that is nearly nothing, on this machine's CPU."""
    found = bench.folder / "step.json"
    length = ["--quick"] if bench.quick else ["--rounds", "21"]
    contenders = ["--contenders", *_LOOPS]
    bench.python(SCRIPTS / "bench_step.py", "--models", "mlp", "--ranks", "1", "--json", found, *length, *contenders)
    [by_model] = json.loads(found.read_text())["microseconds"].values()
    for row, times in by_model["mlp"].items():
        over = statistics.median(one - bare for one, bare in zip(times, by_model["mlp"][_LOOPS[0]], strict=True))
        is_loop = row not in (_LOOPS[0], _LOOPS[-1])
        yield {"loop": row, "us a step": statistics.median(times), "over bare": over if is_loop else None}


def trace(bench: Bench) -> Iterator[Line]:
    """Profiled steps with all ranks: how much of the communication is hidden."""
    window = (3, 4) if bench.quick else recipes.PROFILED
    for name, recipe in (("resnet50", recipes.resnet50), ("gpt", recipes.gpt)):
        overrides = [*recipe(bench, bench.ranks), "precision=bf16", f"profile.steps=[{window[0]},{window[1]}]"]
        run = bench.train(name, *overrides, ranks=bench.ranks)
        [path] = (run.run_dir / "profile").glob("*.json.gz")
        summary = TraceSummary.read(path, spans.STEP, spans.PARTS)
        (bench.out / f"trace-{name}.txt").write_text(summary.text(f"{name}, rank 0 of {bench.ranks}") + "\n")
        talking = summary.communication_ms
        yield {
            "model, bf16": name,
            "ranks": str(bench.ranks),
            "ms a step": summary.step_ms,
            "communication, ms": talking or None,
            "hidden": _percent(summary.hidden_ms / talking if talking else None),
        }


def scaling(bench: Bench) -> Iterator[Line]:
    """1, 2, 4, ... ranks, up to all."""
    if bench.gpus == 1:
        raise Skipped("one GPU: there is nothing to scale to")
    found = bench.folder / "scaling.json"
    worlds = sorted({*(2**power for power in range(16) if 2**power <= bench.ranks), bench.ranks})
    what = ["--rounds", "1", "precision=bf16", "model=resnet50", "data.train.size=224"]
    bench.python(
        SCRIPTS / "bench_scaling.py",
        *("--json", found, "--rows", str(recipes.image_rows(bench)), "--ranks", *map(str, worlds)),
        *(["--quick"] if bench.quick else what),
    )
    measured = json.loads(found.read_text())["measured"]
    first = next(one for one in measured if one["ranks"] == 1)
    for one in measured:
        yield {
            "ranks": str(one["ranks"]),
            "samples/s a rank": one["rows"] / one["step"],
            "efficiency": first["step"] / one["step"],
            "without comm.": first["alone"] / one["alone"],
            "communication": _percent(1 - one["alone"] / one["step"]),
        }


def cifar10(bench: Bench) -> Iterator[Line]:
    """The recipe to its end, seed by seed."""
    _require_cifar10()
    small = ["model.width=4", "train.max_steps=3", "train.global_batch_size=32", "data.num_workers=1"]
    accuracies = []
    for seed in range(2 if bench.quick else _SEEDS):
        how = small if bench.quick else ["precision=bf16"]
        run = bench.train(f"seed-{seed}", "experiment=cifar10", f"run.seed={seed}", *how)
        accuracy = run.last("eval/accuracy")
        if accuracy is None:
            raise LookupError(f"{run.run_dir}/metrics.jsonl has no eval/accuracy")
        accuracies.append(accuracy)
        waiting = _percent(run.last("time/data_wait_fraction"))
        yield {"seed": str(seed), "accuracy": f"{accuracy:.4f}", "seconds": run.seconds, "waiting for data": waiting}
    mean = statistics.mean(accuracies)
    verdict = f"{_ACCURACY:.0%} {'reached' if mean >= _ACCURACY else 'missed'}"
    yield {"seed": f"mean: {verdict}", "accuracy": f"{mean:.4f} ({min(accuracies):.4f}-{max(accuracies):.4f})"}


def _require_cifar10() -> None:
    names = ("DTRAIN_CIFAR10", "DTRAIN_TEST_CIFAR10")  # as conf/data/cifar10.yaml has them
    folder = next(filter(None, map(os.environ.get, names)), None)
    if folder is None or not list(Path(folder).glob("train-*.tar")):
        got = f"{folder} has no train-*.tar" if folder else "it is not set"
        raise Skipped(f"DTRAIN_CIFAR10 has to name the folder of CIFAR-10's shards: {got}")


def _formats(bench: Bench) -> list[str]:
    formats = ["safetensors", "pt2"]
    try:
        FORMATS["aotinductor"].check("bf16")
    except ConfigError:
        return formats
    return formats if bench.quick else [*formats, "aotinductor"]


def _steps(bench: Bench, recipe: list[str], rows: int, *, compiled: bool) -> Iterator[Line]:
    base = None
    for precision, is_compiled in _WAYS:
        if (is_compiled and not compiled) or (bench.quick and precision in ("tf32", "fp16")):
            continue  # a CPU has neither of these two, or not as one would wait for
        name = f"{precision}-compiled" if is_compiled else precision
        run = bench.train(name, *recipe, f"precision={precision}", *(["train.compile=true"] if is_compiled else []))
        base = base or run
        yield {
            f"{rows} rows": name,
            "steps/s": 1 / run.step_seconds,
            "samples/s": run.last("throughput/samples_per_second"),
            "tokens/s": run.last("throughput/tokens_per_second"),
            "TFLOP/s": run.last("throughput/tflops_per_second"),
            "MFU": _percent(run.last("throughput/mfu")),
            **_cost(run, base),
            "waiting for data": _percent(run.last("time/data_wait_fraction")),
        }


def _cost(run: Trained, base: Trained) -> Line:
    """Time of a step and memory, and both as parts of those in fp32: the aim is 0.5 and 0.67 in mixed precision."""
    return {
        "ms a step": run.step_seconds * 1e3,
        "of fp32's time": run.step_seconds / base.step_seconds,
        "GiB": run.gib,
        "of fp32's memory": run.gib / base.gib,
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
