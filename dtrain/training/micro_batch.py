"""``train.micro_batch_size=auto``: the largest micro-batch that fits into the memory of every rank.

* A *guess* is computed: the largest divisor of a rank's share of the global batch whose step needs no more memory than any rank
  has (``memory_usage``, as in ``dtrain doctor memory``). Where a step cannot be computed, the guess is the whole share.
* A *trial* is one forward and backward on every rank, or two if a step has several, with memory for the optimizer's state. If
  it runs out of memory on any rank, all ranks try half as many rows; if the guess was computed and fits, they try up to two
  larger sizes. The ranks of a sharded model complete their collectives as in a step that is done again (``memory_retry``).
* The result is *kept* in ``micro_batch.json`` in the run directory, with everything that it depends on, so that a later start
  on such a device with as many ranks does not search again.

It changes neither the global batch nor the order of samples, and a trial changes no state of the run.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtrain.console import size_text
from dtrain.data import Batch
from dtrain.data.loading.stream import StreamLoader
from dtrain.data.order.randomness import seed_generators
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.sharding import check_accumulation, local_part
from dtrain.errors import ConfigError, in_brief
from dtrain.files import read_json, replace_file
from dtrain.training.breakpoints import without_breakpoints
from dtrain.training.build import wrap
from dtrain.training.checkpoint.state import TrainState, device_kind
from dtrain.training.memory_retry import CALLS, free_memory, rehearse, smaller, why_not
from dtrain.training.memory_usage import USABLE, Strategy, Usage, usage
from dtrain.training.monitor.memory import OutOfMemory, is_out_of_memory
from dtrain.training.setup.batchnorm import calls_collectives, has_batchnorm
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.step_memory import measure_fake_step
from dtrain.training.task import copy_of_task, run_task

AUTO = "auto"
FILE = "micro_batch.json"
#: Tensors of optimizer state per parameter, as of Adam, where the state is not computed.
_STATES = 2
#: Larger sizes than a computed one that are tried.
_LARGER = 2
_REFUSED = (
    "train.micro_batch_size: got auto, which cannot be determined here: {reason}, so a rank that runs out of memory would "
    "leave the others waiting. `dtrain doctor memory` with the arguments of this run computes what fits; set that number."
)


def choose_micro_batch(run: TrainState) -> list[str]:
    """Collective. Divides the steps of ``run`` into the largest micro-batches that fit; see the module.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: If the ranks cannot search by themselves, or the parallel options do not allow several micro-batches.
        OutOfMemory: On every rank, if not even one row fits on some rank.
    """
    loader = run.train_loader
    if isinstance(loader, StreamLoader):
        raise ConfigError(
            "train.micro_batch_size: got auto, but a stream (data=iterable) resumes within an epoch only with the same "
            "micro-batches. `dtrain doctor memory` with the arguments of this run computes what fits; set that number."
        )
    key = _key(run)
    known = from_rank0(lambda: _known(run.run_dir, key))
    if known is not None:
        lines = [f"micro-batches of {known} rows, as found by an earlier start on such a device ({FILE})"]
    elif _available(run.world.device) is None:
        known = loader.rows_per_micro_batch
        lines = [f"micro-batches of {known} rows: a CPU has no limit that can be found before it is exceeded"]
    else:
        known, lines = _search(run)
    loader.divide(known)
    if run.is_sharded:
        check_accumulation(run.cfg.parallel, loader.micro_batches_per_step)
    return lines


def remember(run: TrainState) -> None:
    """On rank 0: keeps the size of micro-batches for later starts. The run directory exists."""
    if run.world.rank:
        return
    key = _key(run)
    others = [entry for entry in _entries(run.run_dir) if _without_size(entry) != key]
    entries = [*others, key | {"micro_batch_size": run.train_loader.rows_per_micro_batch}]
    with suppress(OSError), replace_file(run.run_dir / FILE) as file:  # a later start would search again
        file.write(json.dumps(entries, indent=1).encode())


# -- the search


def _search(run: TrainState) -> tuple[int, list[str]]:
    """Collective. The largest size that fits, and lines for the user."""
    loader = run.train_loader
    share = loader.rows_per_micro_batch
    batch = _largest_first(loader.peek())
    _require_recoverable(run, batch)
    guess, lines = _guess(run, batch, share)
    sizes = _divisors(share)
    rows, tried = guess.rows, [guess.rows]
    fits = _fit(run, batch, guess.rows, guess.state)
    if fits and guess.is_computed:
        for larger in sizes[sizes.index(rows) + 1 :][:_LARGER]:
            tried.append(larger)
            if not _fit(run, batch, larger, guess.state):
                break
            rows = larger
    while not fits:
        fewer = smaller(rows, share)
        if fewer is None:
            raise OutOfMemory(
                "train.micro_batch_size=auto: on some rank not even one row fits. Try precision=bf16, "
                "train.checkpoint_activations=[PATTERN of modules] or parallel=fsdp."
            )
        rows = fewer
        tried.append(rows)
        fits = _fit(run, batch, rows, guess.state)
    if run.cfg.parallel.static_graph and run.world.size > 1:  # its hooks have run in the trials
        parallel, deterministic = run.cfg.parallel, run.cfg.train.deterministic
        run.step.begin_again(lambda bare: wrap(bare, parallel, run.world, deterministic))
    line = (
        f"micro-batches of {rows} rows, the largest of a rank's {share} that fit; tried: {', '.join(map(str, tried))}"
    )
    if has_batchnorm(run.model):
        line += ". BatchNorm uses the statistics of these rows"
    return rows, [*lines, line]


@dataclass(frozen=True)
class _Guess:
    """The size to begin with.

    Attributes:
        rows: Rows of a micro-batch.
        state: Bytes of the optimizer's state on a rank's device.
        is_computed: Whether it was computed.
    """

    rows: int
    state: int
    is_computed: bool


def _guess(run: TrainState, batch: Batch, share: int) -> tuple[_Guess, list[str]]:
    """Collective. What rank 0 computes for the rank with the least memory, and lines for the user."""
    capacity = torch.tensor(_available(run.world.device), dtype=torch.float64, device=run.world.device)
    if run.world.size > 1:
        dist.all_reduce(capacity, dist.ReduceOp.MIN)

    def compute() -> list[Any]:
        needs: dict[int, Usage] = {}

        def need(rows: int) -> int:
            needs[rows] = _usage(run, batch, rows)
            return needs[rows].total

        sizes, limit = _divisors(share), USABLE * float(capacity)
        try:
            # The whole share first: it often fits, and computing takes a while.
            number = len(sizes) if need(share) <= limit else bisect_right(sizes[:-1], limit, key=need)
        except Exception as error:  # noqa: BLE001 - anything that does not work without data
            return [0, 0, f"{type(error).__name__}: {in_brief(str(error))}"]
        rows = sizes[max(number - 1, 0)]
        found = needs.get(rows) or _usage(run, batch, rows)
        text = f"a step with micro-batches of {rows} rows is computed to need {size_text(found.total)} on each rank"
        return [rows, found.optimizer, text]

    rows, state, text = from_rank0(compute)
    available = size_text(float(capacity))
    if rows:
        return _Guess(rows, state, is_computed=True), [f"{text}, of {available} that a rank has"]
    parameters = [local_part(parameter) for parameter in run.model.parameters() if parameter.requires_grad]
    state = _STATES * sum(part.nbytes for part in parameters if part.device == run.world.device)
    line = f"train.micro_batch_size=auto: sizes from {share} down are tried, because a step cannot be computed: {text}"
    return _Guess(share, state, is_computed=False), [line]


def _usage(run: TrainState, batch: Batch, rows: int) -> Usage:
    """The memory of a step of this run with micro-batches of ``rows`` rows, computed without needing it."""
    world, loader = run.world, run.train_loader
    measured = measure_fake_step(run.cfg, run.precision, world.device, batch.chosen(range(rows)).to("cpu"))
    strategy = Strategy.of_run(run.cfg, world.size, world.local_size)
    return usage(measured, strategy, loader.rows_per_micro_batch // rows)


def _largest_first(batch: Batch) -> Batch:
    """The rows of a batch in another order: valid ones first, and of them those with the longest text or bytes.

    Tensors have one shape for all samples.
    """
    lists = [column for column in batch.values() if isinstance(column, list)]

    valid = batch.valid.tolist()

    def key(row: int) -> tuple[bool, int]:
        return not valid[row], -sum(len(column[row]) for column in lists if hasattr(column[row], "__len__"))

    return batch.chosen(sorted(range(len(valid)), key=key))


def _divisors(share: int) -> list[int]:
    return [size for size in range(1, share + 1) if share % size == 0]


def _available(device: torch.device) -> int | None:
    """Bytes that this process may have on a GPU, what it has now included; None for a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


# -- trials


def _require_recoverable(run: TrainState, batch: Batch) -> None:
    """Collective. Refuses a run in which a rank whose memory is exhausted would leave the others waiting."""
    reason = ""
    if run.is_sharded:
        reason = why_not(run.step.model, run.train_loader, retries=1)
    elif run.world.size > 1:
        few, calls = batch.chosen(range(min(2, len(batch.valid)))).to(run.world.device), False
        with suppress(MemoryError, torch.OutOfMemoryError):
            calls = calls_collectives(run.task, run.model, few, run.precision)
        # An error counts as a call, too; the trial raises it.
        if _on_any_rank(run, calls) and _fit(run, batch, len(few.valid), 0):
            reason = CALLS
    if reason:
        raise ConfigError(_REFUSED.format(reason=reason))


def _fit(run: TrainState, batch: Batch, rows: int, state: int) -> bool:
    """Collective. A trial: whether micro-batches of ``rows`` rows fit on every rank. Leaves nothing behind.

    Args:
        run: The run.
        batch: At least ``rows`` rows, in host memory.
        rows: Rows of a micro-batch.
        state: Bytes of the optimizer's state on this rank's device.
    """
    device = run.world.device
    # Of several, the second one finds gradients of the first.
    micro_batches = 1 if rows == run.train_loader.rows_per_micro_batch else 2
    fits, trial = True, _of_sharded if run.is_sharded else _alone
    try:
        trial(run, _window(run, batch.chosen(range(rows)), micro_batches, state), micro_batches)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    free_memory(device)
    if run.is_sharded:
        if not fits and not run.step.is_rehearsed:
            raise OutOfMemory("train.micro_batch_size=auto: not even one row fits on this rank.")
        if not fits:
            run.step.cannot_compute()
    fits = not _on_any_rank(run, not fits)
    if run.is_sharded:
        run.step.begin_again(lambda bare: bare)
        free_memory(device)
    return fits


def _on_any_rank(run: TrainState, flag: bool) -> bool:
    """Collective."""
    number = torch.tensor(int(flag), device=run.world.device)
    if run.world.size > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def _window(run: TrainState, batch: Batch, micro_batches: int, state: int) -> Iterator[Batch]:
    """The same micro-batch several times, on the device, while memory of the optimizer's state is taken."""
    device = run.world.device
    if run.is_sharded and not run.step.is_rehearsed and (reason := rehearse(run, batch.chosen([0]).to(device))):
        raise ConfigError(_REFUSED.format(reason=reason))
    held = torch.empty(0 if run.optimizer.state else state, dtype=torch.uint8, device=device)
    for _ in range(micro_batches):
        yield batch.to(device)
    del held


def _of_sharded(run: TrainState, window: Iterator[Batch], micro_batches: int) -> None:
    """Collective. A window as in a step, which is not applied."""
    task = run.task
    run.step.task = copy_of_task(task)
    try:
        with without_breakpoints():
            run.step.accumulate(window, micro_batches)
    finally:
        run.step.task = task


def _alone(run: TrainState, window: Iterator[Batch], micro_batches: int) -> None:
    """A window without the other ranks, on the bare model: with DDP, memory for its buckets is taken already."""
    device, model = run.world.device, run.model
    buffers = BufferGuard(model)
    buffers.save()
    seed_generators(device, run.cfg.run.seed)
    try:
        for batch in window:
            with without_breakpoints(), run.precision.autocast(device.type):
                output = run_task(copy_of_task(run.task), model, batch)
            output.loss_sum.backward()
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))


# -- the file


def _entries(run_dir: Path) -> list[dict[str, Any]]:
    try:
        entries = read_json(run_dir / FILE)
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _known(run_dir: Path, key: dict[str, Any]) -> int | None:
    found = (entry.get("micro_batch_size") for entry in _entries(run_dir) if _without_size(entry) == key)
    rows = next(found, None)
    return rows if isinstance(rows, int) and rows >= 1 and key["rows_of_a_rank"] % rows == 0 else None


def _without_size(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "micro_batch_size"}


def _key(run: TrainState) -> dict[str, Any]:
    """What the result of a search depends on."""
    cfg, train = run.cfg, run.cfg.train
    device, ranks = run.world.device, run.world.size
    shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in run.model.named_parameters()]
    parallel = {name: value for name, value in asdict(cfg.parallel).items() if not name.startswith("timeout")}
    settings = [
        *(cfg.model, cfg.task, cfg.optimizer, parallel, cfg.data.fields, cfg.data.augment),
        *(train.checkpoint_activations, train.compile, train.ema_decay, train.channels_last, train.deterministic),
    ]
    return {
        "device": device_kind(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "ranks": ranks,
        "rows_of_a_rank": -(-train.global_batch_size // ranks),
        "precision": run.precision.name,
        "parallel": Strategy.of_run(cfg, ranks, run.world.local_size).name,
        "model": _hash(shapes),
        "settings": _hash(settings),
        "torch": torch.__version__,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
