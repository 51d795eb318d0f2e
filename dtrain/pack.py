"""Makes shards, and indexes them ahead of time.

    python -m dtrain.pack imagefolder SRC DST                      from a folder of images, one folder per class
    python -m dtrain.pack index 'DST/train-{000000..000009}.tar'   finds where every sample lies, before training does
    python -m dtrain.pack digits                                   the data of experiment=digits

What goes wrong with the input is told in one line; the exit code is 1 then, and 2 for a wrong usage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dtrain.data import digits, image_folder, index_store, shards
from dtrain.data.tar_index import ShardError
from dtrain.data.writer import Sample, balanced_sizes, shard_set

_SAMPLES_PER_SHARD = 1000
_CLASSES = "classes.json"
# Starting another process takes as long as indexing some dozens of shards.
_SHARDS_PER_PROCESS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if options.command == "imagefolder":
            _image_folder(options, console)
        elif options.command == "index":
            _index(options.patterns, options.processes, console)
        else:
            _digits(options.destination)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        console.print(f"pack: error: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("pack: interrupted; no shard was left half written")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.pack", description="Make tar shards for training, or index shards ahead of time."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    folder = commands.add_parser(
        "imagefolder",
        help="a folder of images, one folder per class",
        description="Packs SRC/CLASS/IMAGE, or SRC/{train,val,test}/CLASS/IMAGE, into DST/train-000000.tar and on. "
        "Files are copied unchanged; their order is shuffled so that classes mix. Labels are the places of the class "
        "names in DST/classes.json. The shards appear when all are written; an interrupted run leaves none.",
    )
    folder.add_argument("source", metavar="SRC", type=Path)
    folder.add_argument("destination", metavar="DST", type=Path)
    sizes = folder.add_mutually_exclusive_group()
    sizes.add_argument("--shards", type=int, metavar="N", help="shards of each split")
    sizes.add_argument(
        "--samples-per-shard", type=int, metavar="N", help=f"samples in a shard at most (default {_SAMPLES_PER_SHARD})"
    )
    folder.add_argument("--prefix", default="train", help="name of the split, if SRC has none (default train)")
    folder.add_argument(
        "--split",
        type=_share,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="take a split from SRC, if it has none, such as val=0.1: that share of every class; may be repeated",
    )
    folder.add_argument("--seed", type=int, default=0, help="decides order and splits (default 0)")
    folder.add_argument("--skip-bad", action="store_true", help="list files that are not images and leave them out")
    folder.add_argument("--verify", action="store_true", help="decode every image, rather than look at its header only")

    index = commands.add_parser(
        "index",
        help="index shards ahead of time",
        description="Finds where every field of every sample lies and keeps it beside the shard (in the cache where "
        "the folder is read-only). Training does so itself when it starts; done ahead, it starts at once.",
    )
    index.add_argument("patterns", metavar="PATTERN", nargs="+", help="path, glob or 'train-{00000..00009}.tar'")
    index.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"default: one for each {_SHARDS_PER_PROCESS} shards, up to all cores",
    )

    demo = commands.add_parser(
        "digits", help="the demo's data", description="Makes the shards of scikit-learn's digits."
    )
    demo.add_argument("destination", metavar="DST", nargs="?", help="folder to make (default: the user's cache)")
    return parser


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: want a name and a share, such as val=0.1") from None


def _image_folder(options: argparse.Namespace, console: Console) -> None:
    source, destination = options.source, options.destination
    if destination.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{destination} lies inside {source}, where it would be read as a class. Choose another DST.")
    skipped = 0

    def on_bad(path: Path, reason: str) -> None:
        nonlocal skipped
        if not options.skip_bad:
            raise ValueError(f"{path}: {reason}. Remove it, or list such files and leave them out with --skip-bad.")
        skipped += 1
        console.print(f"left out {path}: {reason}", markup=False)

    start = time.perf_counter()
    per_shard = _SAMPLES_PER_SHARD if options.shards is options.samples_per_shard is None else options.samples_per_shard
    folder = image_folder.scan(
        source,
        on_bad,
        prefix=options.prefix,
        shares=dict(options.split),
        seed=options.seed,
        classes=_known_classes(destination),
    )
    written = Counter[str]()
    with closing(folder), _progress(console) as progress, ExitStack() as together:
        writers = {split: together.enter_context(shard_set(destination, split)) for split in folder.splits}
        for split, listing in folder.splits.items():
            # RandomState, because its numbers are frozen over numpy's versions; default_rng's may change.
            order = np.random.RandomState(options.seed).permutation(len(listing))
            sizes = balanced_sizes(len(listing), shards=options.shards, per_shard=per_shard)
            task = progress.add_task(split, total=len(listing))
            for number, rows in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
                samples = image_folder.samples(listing, rows, on_bad, options.verify)
                written[split] += writers[split].write(number, _advancing(samples, progress, task))
        _write_classes(destination, folder.classes)
    for split, writer in writers.items():
        print(f"{destination}/{split}-*.tar: {written[split]:,} images, shards: {len(writer.paths):,}")
    print(f"classes: {len(folder.classes):,}, files left out: {skipped:,}, {time.perf_counter() - start:.1f} s")
    print(
        f'data.fields: {{"{";".join(sorted(folder.extensions))}": {{name: image, role: image}}, cls: {{name: label}}}}'
    )


@dataclass(frozen=True)
class _Looked:
    """What ``index`` tells of a shard: little enough to come from another process."""

    samples: int = 0
    payload: int = 0
    members: Mapping[str, int] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    error: str = ""


def _look(path: str) -> _Looked:
    try:
        index = index_store.load_or_build(path)
    except ShardError as error:
        return _Looked(error=str(error))
    counts = np.bincount(index.member_extension, minlength=len(index.extensions)).tolist()
    members = dict(zip(index.extensions, counts, strict=True))
    return _Looked(index.num_samples, int(index.member_size.sum()), members, tuple(index.doubts))


def _index(patterns: Sequence[str], processes: int | None, console: Console) -> None:
    paths = shards.expand(patterns)
    if processes is None:
        processes = min(os.cpu_count() or 1, -(-len(paths) // _SHARDS_PER_PROCESS))
    if processes < 1:
        raise ValueError(f"--processes {processes}: want at least 1.")
    start = time.perf_counter()
    samples, payload, damaged, members = 0, 0, 0, Counter[str]()
    with _progress(console) as progress, ExitStack() as pool:
        looks: Iterable[_Looked] = map(_look, paths)
        if processes > 1:
            # spawn: forking a process with a thread that draws the progress bar may hang the child.
            executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
            looks = pool.enter_context(executor).map(_look, paths, chunksize=8)
        for path, looked in zip(paths, progress.track(looks, len(paths), description="index"), strict=True):
            samples += looked.samples
            payload += looked.payload
            members.update(looked.members)
            for doubt in looked.doubts:
                console.print(f"shard {path!r}: {doubt}", markup=False)
            if looked.error:
                damaged += 1
                console.print(f"pack: error: {looked.error}", markup=False)
    seconds = time.perf_counter() - start
    print(f"shards: {len(paths):,}, samples: {samples:,}, {payload / 1e9:,.3f} GB")
    print(", ".join(f"{extension} {count:,}" for extension, count in members.most_common()))
    print(f"{seconds:.1f} s, {members.total() / seconds:,.0f} members/s")
    if damaged:
        raise ValueError(f"{damaged} of {len(paths)} shards are damaged; they were named above.")


def _digits(destination: str | None) -> None:
    digits.prepare(destination)
    print(f"{destination or digits.shard_dir()}: {digits.TRAIN_SAMPLES:,} train and {digits.TEST_SAMPLES} test images")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _advancing(samples: Iterable[Sample], progress: Progress, task: TaskID) -> Iterator[Sample]:
    for sample in samples:
        yield sample
        progress.advance(task)


def _known_classes(destination: Path) -> list[str] | None:
    """The classes of what was packed there before, so that labels agree between splits that are packed one by one."""
    path = destination / _CLASSES
    if not path.exists():
        return None
    classes = json.loads(path.read_text("utf-8"))
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path} is not a list of class names. Delete it, or choose another DST.")
    return classes


def _write_classes(destination: Path, classes: list[str]) -> None:
    aside = destination / f".{_CLASSES}.{os.getpid()}"
    aside.write_text(json.dumps(classes, indent=1) + "\n", "utf-8")
    os.replace(aside, destination / _CLASSES)


if __name__ == "__main__":
    sys.exit(main())
