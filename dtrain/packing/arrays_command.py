"""``python -m dtrain.pack arrays``: find, plan, unpack, write, publish, tell."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import numpy as np
from rich.console import Console

from dtrain.packing import arrays
from dtrain.packing.command import YOUR_OWN, Command
from dtrain.packing.preset import print_command, write_preset
from dtrain.packing.progress import progress
from dtrain.packing.shares import check_shares, deal
from dtrain.packing.sizes import ShardSize
from dtrain.packing.unfinished import unfinished


def pack_arrays(options: Namespace, console: Console) -> None:
    """``arrays FILE... DST``.

    Raises:
        ValueError: If an option or an array is wrong.
        OSError: If a file cannot be read, or ``DST`` holds other shards or is full.
    """
    command = Command(options, ShardSize(megabytes=64), console)
    check_shares(command.prefix, command.shares)
    dtypes = dict(options.dtype)
    found = arrays.find(options.files, dict(options.field))
    stats = {array.name: array.path.stat() for array in found}
    plan = command.plan(
        command="arrays",
        arrays={name: f"{stat.st_size} bytes of {stat.st_mtime_ns}" for name, stat in stats.items()},
        members={array.name: array.member for array in found},
        shuffle=options.shuffle,
        dtype=dtypes,
        png=sorted(options.png),
    )
    with unfinished(command.destination, [command.prefix, *command.shares], plan) as work:
        unpacking = arrays.unpacking(found)
        with progress(console, "arrays unpacked", len(unpacking)) as tick:
            processes = command.processes(sum(stat.st_size for stat in stats.values()))
            unpacked = iter(work.compute(unpacking, processes, tick))
        paths = {array.name: array.path if array.member is None else next(unpacked) for array in found}
        fields = arrays.prepare(found, paths, dtypes, options.png)
        rows = [field.rows() for field in fields]
        count = len(rows[0])
        sample_bytes = sum(field.tar_bytes(row[0]) for field, row in zip(fields, rows, strict=True))
        # RandomState, because its numbers are frozen over numpy's versions; default_rng's may change.
        shuffled = np.random.RandomState(options.seed).permutation(count)
        written = {}
        for split, numbers in deal(shuffled, command.prefix, command.shares).items():
            if not len(numbers):
                raise ValueError(f"--split {split}: {count} rows give it none. Take a larger share.")
            if options.shuffle:
                numbers = np.random.RandomState(options.seed).permutation(numbers)
            cut = command.size.cut(len(numbers), sample_bytes)
            make = partial(_rows, fields, numbers)
            written[split] = command.write(work, split, cut, make, len(numbers) * sample_bytes)
        work.publish({})
        command.summarise(written)
        pairs = zip(fields, rows, strict=True)
        write_preset(command.destination, {field.extension: field.config(np.asarray(row[0])) for field, row in pairs})
    print_command(command.destination, YOUR_OWN)


def _rows(fields: list[arrays.Field], numbers: np.ndarray, start: int, stop: int) -> arrays.Rows:
    return arrays.Rows(fields, numbers[start:stop])
