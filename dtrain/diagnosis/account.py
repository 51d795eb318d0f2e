"""An examination in words: a line for each part of a run, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrain.diagnosis.advice import Facts
from dtrain.diagnosis.finding import Finding
from dtrain.diagnosis.loader_rate import LoaderRate
from dtrain.diagnosis.verdict import Times, Verdict


def samples_per_second(times: Times, able_to_read: float | None, rows: int) -> dict[str, float]:
    """Of the run if it had only that part, of the shards as files, and of the run as it is.

    Args:
        times: Of a step's parts.
        able_to_read: Of the shards, if it is known.
        rows: Of the global batch.
    """
    seconds = {"data": times.data, "compute": times.compute, "step": times.step, "together": times.together}
    told = {name: rows / value for name, value in seconds.items()} | {"run": rows / times.actual}
    return told | ({"shards": able_to_read} if able_to_read is not None else {})


def about_parts(facts: Facts, rate: LoaderRate, rows: int) -> Iterator[Finding]:
    """A line for each part, alone, and for loader and step together.

    Args:
        facts: Of the run.
        rate: Of rank 0's loader.
        rows: Of the global batch.
    """
    times = facts.times

    def alone(seconds: float) -> str:
        return f"{rows / seconds:,.0f} samples/s, {1e3 * seconds:,.1f} ms a step"

    workers = f"{facts.workers} workers a rank" if facts.workers else "no workers"
    busy = f", at work {rate.busy:.0%} of the time" if rate.busy is not None else ""
    bad = f"; {rate.bad} bad samples on rank 0" if rate.bad else ""
    yield Finding("loader alone", f"{alone(times.data)} ({workers}{busy}){bad}")
    if facts.ranks > 1:
        spent = times.step - times.compute
        yield Finding("step, no communication", alone(times.compute))
        share = f"communication {1e3 * spent:,.1f} ms, {spent / times.step:.0%}"
        size = (
            f"{facts.gradient_bytes / 2**20:,.1f} MiB of gradients, {1e3 * facts.reducing:,.1f} ms if nothing hid them"
        )
        yield Finding("step alone", f"{alone(times.step)} ({share}; {size})")
    else:
        yield Finding("step alone", alone(times.step))
    yield Finding("both together", alone(times.together))


def about_skips(steps: int, applied: int) -> Iterator[Finding]:
    """A warning where the optimizer was timed too rarely."""
    if applied < steps / 2:
        yield Finding(
            "skips",
            f"{steps - applied} of {steps} steps were skipped, so that the optimizer is timed too low",
            "warning",
            "Losses or gradients are not finite: python -m dtrain.doctor numerics says where",
        )


def about_verdict(verdict: Verdict, times: Times, rows: int, advice: Sequence[str]) -> Finding:
    """The last line, with the advice under it."""
    now = f"{rows / times.actual:,.0f} samples/s"
    limit = verdict.limit
    if limit == "balanced":
        text = f"loader and step take equally long: {now}"
    elif limit == "model":
        text = f"the model limits this run: {now}; the loader could do {rows / times.data:,.0f}"
    else:
        name = {"data": "the data limit", "communication": "communication limits", "saves": "saves limit"}
        who = name.get(limit, "too few cores limit")
        text = f"{who} this run: {now}, {verdict.gains[limit]:.1f} times as many without that limit"
    level = "ok" if limit in ("balanced", "model") else "warning"
    return Finding("verdict", text, level, "\n".join(advice))
