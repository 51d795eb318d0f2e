"""What grows with the number of ranks: joining, the vote, calls to the store; and the order and the index of 1e9 samples.

    python -m benchmarks.scale [--rounds 5] [--ranks 2 8 32 64] [--json FILE]

The ranks are processes of this machine, forked from one that has imported torch, and talk over the loopback interface. So the
number of calls to the store is that of a cluster, while wall times are those of processes that share a few cores: CPU times and
the growth with the number of ranks are what can be compared. docs/scale.md extrapolates to 4,096 ranks, and says how.

* ``calls to join`` counts what one rank asks of the store until it is in the process group, at the median rank. With ``gloo``'s
  full mesh it waits for the address of every other rank; with lazy connections (``TORCH_GLOO_LAZY_INIT``) for none.
* ``store`` is one TCPStore that several processes ask at once, with the call of ``HangWatch``.
* ``order`` is a rank of 4,096 in the middle of an epoch over 1e9 samples in 1e5 shards.
* ``verification`` is that of a sharded checkpoint at a start: the ranks divide its files among them.
* ``manifest`` is what rank 0 reads of it, ``headers`` what every rank reads.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.order import epoch_order, milliseconds, resident_bytes
from dtrain.data.loading.workers import RankShare
from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.lines import Recipe
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.distributed.collectives import on_all_ranks
from dtrain.distributed.store import fresh_store
from dtrain.distributed.world import World
from dtrain.files import size_and_hash
from dtrain.precision.vote import payload_bytes
from dtrain.training.checkpoint import manifest
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints, verify_folder
from dtrain.training.checkpoint.tensors import Part, rank_file, read_parts

TIMEOUT = timedelta(seconds=300)
VOTES = 50
CLIENTS, CALLS = (1, 4, 16), 2000
VERIFIERS, FILES, FILE_MIB = (1, 2, 8, 32), 64, 8
RANKS, SHARDS, PER_SHARD, ROWS = 4096, 100_000, 10_000, 64
_CALLS = ("set", "get", "add", "check", "wait", "append")


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64], metavar="N", help="numbers of ranks")
    arguments = harness.parse(parser, rounds=1, ranks=[2, 4])
    shards, per_shard = (1000, 100) if arguments.quick else (SHARDS, PER_SHARD)
    calls = 50 if arguments.quick else CALLS
    results: dict[str, Any] = {}

    rows = {f"{ranks} ranks, {kind}": (ranks, kind) for ranks in arguments.ranks for kind in ("full mesh", "lazy")}
    joined = harness.interleaved(arguments.rounds, rows, lambda row: of_ranks(*rows[row], calls=False))
    counted = {row: of_ranks(*choice, calls=True) for row, choice in rows.items()}
    table = harness.Table("joining the process group, and agreeing in it (gloo, loopback)", rows)
    table.text("calls to join", {row: f"{found['calls']:,.0f}" for row, found in counted.items()})
    for heading, name, decimals in (
        ("s to join", "join_s", 2),
        ("CPU ms to join", "join_cpu_ms", 1),
        ("connections", "sockets", 0),
        ("CPU us a vote", "vote_cpu_us", 0),
        ("ms a vote", "vote_ms", 1),
        ("ms on_all_ranks", "agree_ms", 1),
    ):
        table.medians(heading, harness.column(joined, name), decimals)
    table.show(harness.rounds_note(arguments.rounds))
    results |= {"ranks": joined, "calls": {row: found["calls"] for row, found in counted.items()}}

    clients = {f"{count} clients": count for count in (CLIENTS[:1] if arguments.quick else CLIENTS)}
    asked = harness.interleaved(arguments.rounds, clients, lambda row: of_store(clients[row], calls))
    table = harness.Table("one store", clients)
    for heading, name, decimals in (("calls/s", "per_s", 0), ("CPU us of the server a call", "server_us", 1)):
        table.medians(heading, harness.column(asked, name), decimals)
    table.show(harness.rounds_note(arguments.rounds))
    results["store"] = asked

    order = measured_order(shards, per_shard)
    results["order"] = order
    _show(f"order and index, {shards * per_shard:,} samples in {shards:,} shards, rank 2,049 of {RANKS:,}", order)
    verifiers = {f"{ranks} ranks": ranks for ranks in (VERIFIERS[:2] if arguments.quick else VERIFIERS)}
    file_mib = 1 if arguments.quick else FILE_MIB
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = written_checkpoint(Path(folder), FILES, file_mib)
        verified = harness.interleaved(
            arguments.rounds, verifiers, lambda row: of_verification(checkpoint, verifiers[row])
        )
    table = harness.Table(f"verification of a sharded checkpoint, {FILES} files of {file_mib} MiB", verifiers)
    table.medians("MiB read by a rank", harness.column(verified, "mib"), 0)
    table.medians("CPU ms of a rank", harness.column(verified, "cpu_ms"), 0)
    table.medians("ms", harness.column(verified, "ms"), 0)
    table.show(harness.rounds_note(arguments.rounds))
    results["verification"] = verified

    files = measured_checkpoint(64 if arguments.quick else RANKS)
    results["checkpoint"] = files
    _show(f"a sharded checkpoint of {64 if arguments.quick else RANKS:,} ranks", files)
    harness.finish(arguments, results)


def _show(title: str, values: dict[str, float]) -> None:
    table = harness.Table(title, values)
    table.text("", {name: f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for name, value in values.items()})
    table.show()


# -- ranks


def of_ranks(ranks: int, kind: str, *, calls: bool) -> dict[str, float]:
    """Forks ranks that join a process group and vote; returns the medians over the ranks."""
    environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # It decides only whether a rank makes a connection to each other one when it joins.
    environment["TORCH_GLOO_LAZY_INIT"] = "1" if kind == "lazy" else "0"
    return _joined(ranks, environment, lambda rank: _rank(rank, ranks, environment, calls))


def _joined(ranks: int, environment: dict[str, str], function: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """The medians over ranks that find each other through a store."""
    with Server() as server:
        environment["MASTER_PORT"] = str(server.port)
        found = _forked(function, range(ranks))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


class Server:
    """A store in a process of its own, as that of torchrun. This process has no threads, because it forks.

    Attributes:
        port: Of the store.
        cpu_s: CPU seconds of the store, after the ``with`` block.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,))

    def _serve(self, pipe: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        began = time.process_time()
        pipe.send(store.port)
        pipe.recv()
        pipe.send(time.process_time() - began)
        os._exit(0)

    def __enter__(self) -> Server:
        self._process.start()
        self.port: int = self._pipe.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.send(None)
        self.cpu_s = self._pipe.recv()
        self._process.join()


def _rank(rank: int, ranks: int, environment: dict[str, str], count: bool) -> dict[str, float]:
    os.environ.update(environment)
    torch.set_num_threads(1)
    sockets = _sockets()
    began, cpu = time.monotonic(), time.process_time()
    store = fresh_store(rank, ranks, TIMEOUT)
    counter = CountingStore(store)
    dist.init_process_group("gloo", store=counter if count else store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    result = {"join_s": time.monotonic() - began, "join_cpu_ms": (time.process_time() - cpu) * 1e3}
    payload = torch.zeros(payload_bytes(metrics=1) // 8, dtype=torch.float64)
    dist.all_reduce(payload)  # lazy connections are made now
    # Of fresh_store: append, wait, get and add.
    result["calls"] = 4 + sum(counter.calls.values())
    result["sockets"] = _sockets() - sockets
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(VOTES):
        dist.all_reduce(payload)
    result |= {"vote_ms": _ms(began) / VOTES, "vote_cpu_us": (time.process_time() - cpu) * 1e6 / VOTES}
    began = time.monotonic()
    on_all_ranks(lambda: None)
    result["agree_ms"] = _ms(began)
    _leave(store, ranks)
    return result


def _leave(store: dist.Store, ranks: int) -> None:
    """Returns when all ranks have called it."""
    if store.add("done", 1) == ranks:
        store.set("all done", "")
    store.wait(["all done"], TIMEOUT)


class CountingStore(dist.Store):
    """Counts the calls of a process group; the store itself is another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        for name in _CALLS:
            setattr(self, name, self._counted(name, getattr(store, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call


def _sockets() -> int:
    paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(path) and os.readlink(path).startswith("socket:") for path in paths)


def _ms(began: float) -> float:
    return (time.monotonic() - began) * 1e3


def _forked(function: Callable[[int], dict[str, float]], numbers: Iterable[int]) -> list[dict[str, float]]:
    """The results of calls in processes that start at the same time."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()

    def call(number: int) -> None:
        results.put(function(number))
        os._exit(0)  # without the end of gloo, which would wait for others

    processes = [context.Process(target=call, args=(number,)) for number in numbers]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


# -- the store


def of_store(clients: int, calls: int) -> dict[str, float]:
    """Calls a second that a store answers to so many clients at once, and the CPU time that it takes for one."""

    def client(number: int) -> dict[str, float]:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        began = time.monotonic()
        for _ in range(calls):
            store.check(["dtrain/hang"])
        return {"seconds": time.monotonic() - began}

    with Server() as server:
        found = _forked(client, range(clients))
    server_us = server.cpu_s * 1e6 / (clients * calls)
    return {"per_s": clients * calls / max(one["seconds"] for one in found), "server_us": server_us}


# -- data and checkpoints


def measured_order(shards: int, per_shard: int) -> dict[str, float]:
    """Times and memory of the order and of what the index has for each shard."""
    counts = per_shard + np.arange(shards, dtype=np.int64) % 21 - 10
    before = resident_bytes()
    order = epoch_order(counts, "window", ROWS * RANKS)
    memory = (resident_bytes() - before) / 2**20
    share = RankShare.from_sizes(ROWS * RANKS, ROWS, RANKS // 2 + 1, RANKS)
    slots = share.slots(np.zeros(1, np.int64))[0]
    starts = np.concatenate(([0], np.cumsum(counts)))

    def read(order: EpochOrder) -> tuple[int, int]:
        """Samples that the rank reads in an epoch, and the shards that they are in."""
        located = order.locate(np.arange(order.num_steps)[:, np.newaxis], slots)
        samples = located[located >= 0]
        return samples.size, np.unique(np.searchsorted(starts, samples, side="right")).size

    samples, opened = read(order)
    lanes = choose_lanes(ROWS * RANKS, None, "window", RANKS)
    _, opened_with_lanes = read(EpochOrder(counts, Recipe(0, "window"), 0, [Layout(ROWS * RANKS, lanes)]))
    unmapped = np.broadcast_to(np.int64(0), (int(counts.sum()), 2))
    arrays = {"counts": counts, "shard_sizes": counts, "offsets": unmapped, "sizes": unmapped}
    arrays |= {"key_bytes": np.zeros(0, np.uint8), "key_starts": np.zeros(1, np.int64)}
    arrays |= {"shard_digests": np.zeros(shards, np.uint64)}
    paths = [f"/data/train-{number:07d}.tar" for number in range(shards)]
    before = resident_bytes()
    index_ms = statistics.median(milliseconds(lambda: DatasetIndex(paths, arrays)) for _ in range(3))
    return {
        "ms to start an epoch": statistics.median(
            milliseconds(lambda: epoch_order(counts, "window", ROWS * RANKS)) for _ in range(3)
        ),
        f"ms to locate {ROWS} samples": statistics.median(
            milliseconds(lambda: order.locate(order.num_steps // 2, slots)) for _ in range(21)
        ),
        "MiB of the order": memory,
        "steps of an epoch": float(order.num_steps),
        "samples of the rank": float(samples),
        "its share of the shards": shards / RANKS,
        "shards that it opens, in a run that began on 64 ranks (64 lanes)": float(opened),
        f"shards that it opens, in a run that began on these ({lanes:,} lanes)": float(opened_with_lanes),
        "ms to open the index and compute its fingerprint": index_ms,
        "bytes of a sample in the index, two fields, keys of 10 bytes": 2 * 2 * 8 + 8 + 10.0,
    }


def written_checkpoint(folder: Path, ranks: int, mib: int) -> Path:
    """A sharded checkpoint with a file of each rank."""
    checkpoints = Checkpoints(folder)
    staged, entries, values = checkpoints.stage(1), [], torch.arange(mib << 18, dtype=torch.float32)
    content: Checkpoint | None = None
    for rank in range(ranks):
        part = Part(values + rank, (len(values) * rank,), (len(values) * ranks,))
        content = Checkpoint({"model": {"weight": part}}, {})
        world = World(rank, ranks, rank, ranks, torch.device("cpu"), "gloo", True)
        entries.append(checkpoints.write_rank(staged, content, world))
    assert content is not None
    return checkpoints.complete(1, staged, content, entries)


def of_verification(folder: Path, ranks: int) -> dict[str, float]:
    """Medians over ranks that verify a checkpoint together. It is in the page cache: this measures SHA-256 and not the disk."""
    environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def rank(number: int) -> dict[str, float]:
        os.environ.update(environment)
        torch.set_num_threads(1)
        store = fresh_store(number, ranks, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=TIMEOUT)
        read: list[int] = []  # bytes; several threads append

        def counted(path: Path) -> dict[str, Any]:
            read.append(path.stat().st_size)
            return size_and_hash(path)

        mock.patch.object(manifest, "size_and_hash", counted).start()
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        verify_folder(folder)
        result = {"mib": sum(read) / 2**20, "ms": _ms(began), "cpu_ms": (time.process_time() - cpu) * 1e3}
        _leave(store, ranks)
        return result

    return _joined(ranks, environment, rank)


def measured_checkpoint(ranks: int) -> dict[str, float]:
    """The manifest of so many files, the headers of the files, and the rate of SHA-256 of one thread."""
    block = bytes(1 << 24)
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for files in (ranks, 16 * ranks):
            entry = {"size": 10**9, "sha256": hashlib.sha256(b"").hexdigest()}
            content = {rank_file(rank, files): entry for rank in range(files)} | {"state.json": entry}
            (folder / manifest.MANIFEST).write_text(json.dumps(content, indent=1))
            measured[f"KiB of a manifest of {files:,} files"] = (folder / manifest.MANIFEST).stat().st_size / 1024
            measured[f"ms to read a manifest of {files:,} files"] = statistics.median(
                milliseconds(lambda: manifest.read_manifest(folder)) for _ in range(5)
            )
        checkpoint = written_checkpoint(folder, ranks, 0)
        paths = [checkpoint / rank_file(rank, ranks) for rank in range(ranks)]
        measured["ms to read the headers of its files, on each rank"] = statistics.median(
            milliseconds(lambda: read_parts(paths)) for _ in range(3)
        )
    measured["GB/s of SHA-256, one thread"] = (
        len(block) / 1e6 / min(milliseconds(lambda: hashlib.sha256(block)) for _ in range(9))
    )
    return measured


if __name__ == "__main__":
    main()
