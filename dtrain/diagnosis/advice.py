"""What to change, from what was measured: a function of facts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.diagnosis.verdict import Times, Verdict

_MOST_WORKERS = 32  # that wait rather than compute; more want trying
_MOST_OF_IT = 0.5
_UNEVEN = 1.3


@dataclass(frozen=True)
class Facts:
    """Of a run; seconds are those of one optimizer step.

    Attributes:
        times: Of its parts.
        ranks: How many.
        cores: That this machine has for each of its ranks.
        device: ``cpu`` or ``cuda``.
        precision: Its name.
        compiled: Whether the model is.
        workers: Of each rank.
        waiting: Whether they mostly wait for storage, or in the data set.
        micro_batches: Of each rank in a step.
        rows: Of a micro-batch.
        reading: Seconds to read the bytes of a step's samples from the disk, one after the other; None if unknown.
        gradient_bytes: What the ranks sum.
        reducing: Seconds to sum as much where nothing hides it; 0 in a world of one.
        comm_dtype: It is sent in this.
        comm_hook: Whether it is a hook that sends it.
        unevenness: The slowest rank's time without communication, over the fastest one's.
        writing: Seconds until a checkpoint is safe.
        between_saves: Seconds of training between two checkpoints.
        memory: Share of the device's memory that was used at most; None on a CPU.
    """

    times: Times
    ranks: int
    cores: int
    device: str
    precision: str
    compiled: bool
    workers: int
    waiting: bool
    micro_batches: int
    rows: int
    reading: float | None
    gradient_bytes: int
    reducing: float
    comm_dtype: str
    comm_hook: bool
    unevenness: float
    writing: float
    between_saves: float
    memory: float | None


def advise(verdict: Verdict, facts: Facts) -> list[str]:
    """What to change, the most useful first; each line says why."""
    about = {"data": _data, "communication": _communication, "saves": _saves, "cores": _cores}
    lines = [line for part in verdict.worthwhile() for line in about[part](facts)]
    if verdict.limit == "model":
        lines += _model(facts)
    if verdict.limit == "balanced":
        lines.append(
            "Nothing by itself: whoever speeds up the step needs a faster loader, too (more data.num_workers)."
        )
    return lines


def _data(facts: Facts) -> Iterator[str]:
    times, workers = facts.times, max(facts.workers, 1)
    if facts.reading is not None and facts.reading > _MOST_OF_IT * times.data:
        yield (
            f"Reading alone takes {_ms(facts.reading)} of the {_ms(times.data)}: keep the shards on a faster disk "
            "(data.storage=slow copies them to the one of data.cache.dir as they are needed), or pack smaller samples."
        )
    needed = math.ceil(1.1 * workers * times.data / times.step)
    if facts.waiting:
        yield (
            f"data.num_workers={min(needed, _MOST_WORKERS)}, though there are fewer cores: workers mostly wait, for storage or "
            f"in the data set itself. To keep up takes about {needed:,}."
        )
        return
    room = max(facts.cores - (facts.device == "cpu"), 1)  # on a CPU the step needs a core itself
    if facts.workers < min(needed, room):
        yield (
            f"data.num_workers={min(needed, room)}: to keep up takes about {needed:,} for each rank, {facts.workers} are "
            f"there, and {facts.cores} core{'s' * (facts.cores > 1)}."
        )
    if needed > room:
        yield (
            f"Cheaper samples: to keep up takes about {needed:,} cores for each rank, which has {facts.cores}. Pack images at "
            "the size that is used, augment less, or do on the device what can be done there."
        )


def _communication(facts: Facts) -> Iterator[str]:
    times = facts.times
    spent = times.step - times.compute
    size = f"{facts.gradient_bytes / 2**20:,.1f} MiB of gradients"
    if spent > 2 * facts.reducing + 1e-3:
        why = (
            "parallel.comm_hook (compare without it)" if facts.comm_hook else "ranks that wait for each other or a core"
        )
        yield f"{size} take {_ms(facts.reducing)} on this network, the step loses {_ms(spent)}: look at {why}."
    elif facts.comm_dtype == "fp32" and not facts.comm_hook:
        yield f"parallel.comm_dtype=bf16: it halves {size}, which take {_ms(facts.reducing)} on this network."
    if facts.unevenness > _UNEVEN:
        yield f"The slowest rank computes {facts.unevenness:.1f} times as long as the fastest, which waits for it."
    yield (
        "Sum gradients less often: twice the train.global_batch_size with train.micro_batch_size="
        f"{facts.rows} halves what communication costs a sample (and changes what is learnt)."
    )


def _saves(facts: Facts) -> Iterator[str]:
    if facts.writing > facts.between_saves:
        yield (
            f"A checkpoint takes {facts.writing:.1f} s to write, and the next is due after {facts.between_saves:.1f} s: save "
            "less often (checkpoint.every_steps), or put run.dir on a faster disk."
        )
    else:
        yield "Save less often (checkpoint.every_steps, checkpoint.every_minutes): each time all is copied to host memory."


def _cores(facts: Facts) -> Iterator[str]:
    yield (
        f"Loader and step slow each other down from {_ms(facts.times.expected)} to {_ms(facts.times.actual)}: {facts.workers} "
        f"workers, a step and {facts.cores} core{'s' * (facts.cores > 1)} for each rank. Fewer ranks or workers on this "
        "machine, fewer threads (OMP_NUM_THREADS), or cheaper samples."
    )


def _model(facts: Facts) -> Iterator[str]:
    yield "That is as it should be: data and communication keep up."
    options = []
    if facts.device == "cuda" and facts.precision in ("fp32", "tf32"):
        options.append(f"precision=bf16 (it is {facts.precision})")
    if facts.micro_batches > 1 and (facts.memory is None or facts.memory < _MOST_OF_IT):
        used = f", and {facts.memory:.0%} of the memory is used" if facts.memory is not None else ""
        options.append(
            f"train.micro_batch_size above {facts.rows} (a step has {facts.micro_batches} micro-batches{used})"
        )
    if not facts.compiled:
        options.append("train.compile=true")
    if facts.device == "cpu":
        options.append("a GPU, or more cores for each rank")
    if options:
        yield f"The step itself may get faster with {'; '.join(options)}."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
