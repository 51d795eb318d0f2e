"""Parts of all packing commands: options, splits, shard sizes, skipped files, and the preset of the packed data.

* *Shares* are the splits taken from the samples of a source: name to fraction. The samples that they leave go to the split
  named ``prefix``.
* *Bounds* are the positions where shards begin, int64, shape ``[shards + 1]``: shard ``n`` has the samples ``bounds[n]`` to
  ``bounds[n + 1]``. Sizes are bytes in the tar file, with headers and padding.
* The *preset* is a Hydra config next to the shards, so that users do not have to type ``data.fields`` on a command line.
"""

from __future__ import annotations

import glob
import json
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from dtrain.console import progress
from dtrain.data.writer import balanced_sizes
from dtrain.distributed.world import process_cpu_count
from dtrain.errors import printable
from dtrain.files import replace_file
from dtrain.pack.staging import BadFile, SampleProducer, StagedDataset, Written, is_finished

#: The preset in a folder of shards.
PRESET = Path("conf/data/packed.yaml")

# For less than this, starting another process takes longer than writing the data.
_BYTES_PER_PROCESS = 64 << 20
_TAR_BLOCK = 512
# Split names that become `data.eval` of the preset, in order of priority.
_EVAL_SPLITS = ("val", "valid", "validation", "test")


class PackCommand:
    """One packing command while it runs.

    Args:
        options: The parsed command line; only options that all packing commands have are read.
        default_size: Shard size if the user gives none.
        console: Where progress and skipped files are shown.

    Attributes:
        destination: Folder of the shards.
        prefix: Name of the split that gets all samples that no other split takes.
        shares: Name to fraction of each other split.
        size: Shard size.
        seed: Seed of order and splits.
        skipped: Number of files skipped before writing began.

    Raises:
        ValueError: If ``--processes`` is less than 1.
    """

    def __init__(self, options: Namespace, default_size: ShardSize, console: Console) -> None:
        self.destination: Path = options.destination
        self.prefix: str = options.prefix
        self.shares: dict[str, float] = dict(options.split)
        if options.val is not None:
            self.shares["val"] = options.val
        size = options.shards, options.samples_per_shard, options.shard_mb
        self.size = default_size if size == (None, None, None) else ShardSize(*size)
        self.skipped = 0
        if options.processes is not None and options.processes < 1:
            raise ValueError(f"--processes {options.processes}: want at least 1.")
        self._processes: int | None = options.processes
        self.seed: int = options.seed
        self._skip_bad: bool = getattr(options, "bad", "error") == "skip"
        self._console = console
        self._started = time.perf_counter()

    def plan(self, **facts: Any) -> dict[str, Any]:
        """Everything that determines the bytes of the shards: ``facts`` and the common options."""
        return {
            **facts,
            "prefix": self.prefix,
            "splits": self.shares,
            "seed": self.seed,
            "shard_size": {name: value for name, value in vars(self.size).items() if value is not None},
        }

    def is_finished(self, plan: Mapping[str, Any]) -> bool:
        """Whether an equal command has packed the same files into the destination before; says so.

        Raises:
            FileExistsError: If a different command was interrupted in the destination.
        """
        if not is_finished(self.destination, plan, self._skip_bad):
            return False
        print(
            f"{self.destination}: this command has packed these files already. To pack them again, delete the shards."
        )
        return True

    def on_bad_file(self, path: Path, reason: str) -> None:
        """Counts and prints a file that is skipped.

        Raises:
            BadFile: If ``--bad skip`` was not given.
        """
        if not self._skip_bad:
            raise BadFile(path, reason)
        self.skipped += 1
        self._print_skipped(f"skipped {path}: {reason}")

    def processes(self, work: int) -> int:
        """Number of processes to use for work that takes as long as writing ``work`` bytes."""
        if self._processes is not None:
            return self._processes
        return max(min(process_cpu_count(), work // _BYTES_PER_PROCESS), 1)

    def write(
        self,
        dataset: StagedDataset,
        split: str,
        bounds: np.ndarray,
        make_producer: Callable[[int, int], SampleProducer],
        total_bytes: int,
    ) -> Written:
        """``StagedDataset.write`` with a progress bar."""
        with progress(self._console, f"{split} samples", int(bounds[-1])) as on_progress:
            processes = self.processes(total_bytes)
            return dataset.write(
                split, bounds, make_producer, processes, on_progress, self._print_skipped, self._skip_bad
            )

    def print_summary(self, written: Mapping[str, Written], *more: str) -> None:
        """Prints samples and shards of each split, further facts, and the duration."""
        for split, its in written.items():
            print(f"{self.destination}/{split}-*.tar: samples: {its.samples:,}, shards: {its.shards:,}")
        print(", ".join([*more, f"{time.perf_counter() - self._started:.1f} s"]))

    def _print_skipped(self, line: str) -> None:
        self._console.print(printable(line, keep="\n"), markup=False)


@dataclass(frozen=True)
class ShardSize:
    """Shard size as the user gave it; exactly one attribute is set.

    Attributes:
        shards: Number of shards of each split.
        samples: Maximum number of samples in a shard.
        megabytes: Approximate size of a shard in million bytes; samples are never cut.
    """

    shards: int | None = None
    samples: int | None = None
    megabytes: float | None = None

    def bounds(self, count: int, sample_bytes: np.ndarray | int) -> np.ndarray:
        """Where the shards of a split begin.

        Shards differ by at most one sample; with ``megabytes`` by about the bytes of one sample.

        Args:
            count: Number of samples of the split.
            sample_bytes: Size of each sample in a tar file, int64, shape ``[count]``, or one size for all samples.

        Returns:
            The bounds, int64, shape ``[shards + 1]``.

        Raises:
            ValueError: If the size is not positive, or there are fewer samples than shards.
        """
        if self.megabytes is None:
            return _cumulative(balanced_sizes(count, shards=self.shards, per_shard=self.samples))
        if not self.megabytes > 0:
            raise ValueError(f"--shard-mb {self.megabytes}: want more than 0.")
        if isinstance(sample_bytes, int):
            shards = -(-count * sample_bytes // round(self.megabytes * 1e6))
            return _cumulative(balanced_sizes(count, shards=min(max(shards, 1), max(count, 1))))
        ends = np.cumsum(sample_bytes)
        total = int(ends[-1]) if count else 0
        shards = max(-(-total // round(self.megabytes * 1e6)), 1)
        inner = np.searchsorted(ends, np.arange(1, shards) * (total / shards))
        # np.unique, because a sample larger than a shard would otherwise be followed by empty shards.
        return np.unique(np.concatenate([[0], inner, [count]])).astype(np.int64)


def _cumulative(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)


def tar_bytes(payload: np.ndarray | int) -> np.ndarray | int:
    """Size of a tar member with a payload of this many bytes: header, payload and padding."""
    return _TAR_BLOCK + -(-payload // _TAR_BLOCK) * _TAR_BLOCK


def check_shares(prefix: str, shares: Mapping[str, float]) -> None:
    """Checks the splits of a command.

    Raises:
        ValueError: If a share is not positive, the shares leave nothing for ``prefix``, or ``prefix`` has a share.
    """
    if not 0 <= sum(shares.values()) < 1 or not all(share > 0 for share in shares.values()) or prefix in shares:
        raise ValueError(
            f"splits {dict(shares)} and {prefix!r}: want different names, and shares above 0 that sum to less than 1."
        )


def permutation(count: int, seed: int | list[int]) -> np.ndarray:
    """The numbers below ``count`` in random order, int64, shape ``[count]``."""
    # RandomState, because its sequence is the same in all numpy versions; the one of default_rng may change.
    return np.random.RandomState(seed).permutation(count)


def assign_to_splits(shuffled: np.ndarray, prefix: str, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Assigns each sample to one split.

    Args:
        shuffled: Numbers of the samples in random order, int64, shape ``[samples]``.
        prefix: Name of the split that gets the samples that the shares leave.
        shares: Name to fraction of each other split.

    Returns:
        The sample numbers of each split, int64, sorted.
    """
    assigned, start = {}, 0
    for name, share in shares.items():
        count = round(share * len(shuffled))
        assigned[name] = np.sort(shuffled[start : start + count])
        start += count
    return {prefix: np.sort(shuffled[start:]), **assigned}


def write_preset(destination: Path, fields: Mapping[str, Mapping[str, Any]], **keys: Any) -> None:
    """Writes ``conf/data/packed.yaml`` with the shards of a folder and their fields, and prints the fields.

    Args:
        destination: Folder of the shards.
        fields: The value of ``data.fields``.
        keys: Further keys of the config section ``data``.
    """
    splits = splits_of(destination)
    train = "train" if "train" in splits else splits[0]
    evaluated = next((name for name in _EVAL_SPLITS if name in splits and name != train), None)
    folder = destination.resolve()
    shards = glob.escape(str(folder))
    # JSON is valid YAML, and it quotes any character that a path can have.
    lines = [
        f"# {', '.join(splits)}: written by `dtrain pack`. Use: --config-dir {folder / 'conf'} data=packed",
        f"train: {json.dumps(f'{shards}/{train}-*.tar')}",
        f"eval: {json.dumps(f'{shards}/{evaluated}-*.tar' if evaluated else None)}",
        "fields:",
        *(f"  {json.dumps(extension)}: {_as_yaml(options)}" for extension, options in fields.items()),
        *(f"{key}: {json.dumps(value)}" for key, value in keys.items()),
    ]
    path = destination / PRESET
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write("\n".join([*lines, ""]).encode())
    print(f"data.fields, in {path}:")
    print("\n".join(f"  {extension}: {_as_yaml(options)}" for extension, options in fields.items()))


def splits_of(destination: Path) -> list[str]:
    """Names of the splits in a folder of shards, sorted."""
    return sorted({path.name.rpartition("-")[0] for path in destination.glob("*-??????.tar")})


def print_train_command(destination: Path, model_and_task: Sequence[str] | None) -> None:
    """Prints the command that trains on the packed data.

    Args:
        destination: Folder of the shards.
        model_and_task: The overrides of the groups model and task; None: only the user can choose them.
    """
    print("to train on these shards:")
    if model_and_task is None:
        print("  none of dtrain's models fits these fields: name your own model and task instead of my_package.My...")
        model_and_task = ["model._target_=my_package.MyModel", "task._target_=my_package.MyTask"]
    overrides = ["--config-dir", str(destination / "conf"), "data=packed", *model_and_task, "train.max_epochs=1"]
    print(f"  dtrain train {shlex.join(overrides)}")


def _as_yaml(options: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=1000).strip()


def as_json(value: Any) -> bytes:
    """The content of a JSON file."""
    return json.dumps(value, indent=1).encode() + b"\n"
