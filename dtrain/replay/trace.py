"""``dtrain trace run.dir=DIR KEY ...``: every step that used a sample, computed from the seed and the record of the starts.

Nothing is logged for it: the order of samples is a pure function, so it can be inverted. For each segment of the run, which is
a range of steps with one order, the place of the sample in each epoch gives step and slot, and the number of ranks then gives
rank and row. Samples that could not be read are left out of the steps in which they were masked.

A profiler's trace is something else: ``profile.steps`` records one.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config import schema
from dtrain.config.compose import Composed
from dtrain.config.schema import Config
from dtrain.console import align_rows, until_reader_leaves
from dtrain.data import ShardLoader
from dtrain.data.shards.bad_shards import as_recorded
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error, printable
from dtrain.replay.recorded import NO_STARTS, RecordedRun
from dtrain.runs.excluded import read_copy
from dtrain.runs.recompose import recompose, run_dir_of
from dtrain.training.build import make_precision
from dtrain.training.setup.loaders import train_loader

_MOST_SHOWN = 200  # uses on the terminal; the JSON file has all
_SEARCHED_AHEAD = 8  # doublings of the steps in which the next use is searched


@dataclass(frozen=True, order=True)
class Use:
    """A use of a sample.

    Attributes:
        step: Attempted step, from 1, as in metrics.jsonl.
        rank: The rank.
        row: Row among the rows of the rank in this step, from 0, masked ones included.
        epoch: Epoch of the data; of a mixture, that of the sample's source.
        key: As in ``logs/keys-rank-*.jsonl``.
    """

    step: int
    rank: int
    row: int
    epoch: int
    key: str


class Tracer:
    """Finds uses of samples in the steps of a run.

    Args:
        run: The records of the run.
        loader: A loader of its training data; ranks and position do not matter. It then reads the shards that the run knows.

    Raises:
        ConfigError: If the run trains on a stream, or has neither starts nor checkpoints.
    """

    def __init__(self, run: RecordedRun, loader: ShardLoader) -> None:
        self._loader = loader
        self._last, self._run_dir = run.last_step, run.dir
        self._segments = run.segments() or _without_starts(run, loader)
        with as_config_error("data"):
            loader.read_as(self._segments[-1]["state"])  # it knows all shards of the run
        self._bad = run.bad_samples()
        self._lists: dict[str, np.ndarray] = {}  # of data.exclude

    @property
    def first_step(self) -> int:
        """The first step that is known."""
        return int(self._segments[0]["step"]) + 1

    def uses(self, samples: np.ndarray, *, ahead: bool = False) -> list[Use]:
        """All uses of samples so far, by step.

        Args:
            samples: Numbers of samples, int64, shape ``[n]``.
            ahead: Also the next use of each.

        Raises:
            ConfigError: If the data have changed.
        """
        found: list[Use] = []
        ends = [*(int(each["step"]) for each in self._segments[1:]), self._last]
        for segment, end in zip(self._segments, ends, strict=True):
            if (steps := min(end, self._last) - int(segment["step"])) > 0:
                found += self._in_segment(segment, samples, steps)
        found = [use for use in found if use.key not in self._bad.get(use.step, ())]
        if ahead:
            found += self._next(samples)
        return sorted(found)

    def step(self, step: int) -> list[Use]:
        """The samples of a step, by rank and row; of a step that was not done yet, as it will be.

        Raises:
            ConfigError: If the step is not known, or the data have changed.
        """
        if step < self.first_step:
            raise ConfigError(f"--step {step}: the records of this run begin with step {self.first_step}.")
        segment = [each for each in self._segments if each["step"] < step][-1]
        with as_config_error("data"):
            epochs, samples = self._loader.samples_of(segment, step - 1 - int(segment["step"]))
        slots = np.flatnonzero((samples >= 0) & ~np.isin(samples, self._excluded(segment)))
        found = self._placed(segment, samples[slots], epochs[slots], np.full(len(slots), step), slots)
        return sorted(use for use in found if use.key not in self._bad.get(step, ()))

    def _in_segment(self, segment: Mapping[str, Any], samples: np.ndarray, steps: int, after: int = 0) -> list[Use]:
        samples = np.setdiff1d(samples, self._excluded(segment))
        with as_config_error("data"):
            uses = self._loader.uses(segment, samples, steps)
        later = np.flatnonzero(uses.step >= after)
        step = int(segment["step"]) + 1 + uses.step[later]
        return self._placed(segment, samples[uses.sample[later]], uses.epoch[later], step, uses.slot[later])

    def _excluded(self, segment: Mapping[str, Any]) -> np.ndarray:
        """Samples that ``data.exclude`` left out in a segment."""
        if "excluded" not in segment:
            return np.zeros(0, np.int64)
        listed = segment["excluded"]
        if listed not in self._lists:
            self._lists[listed] = find_samples(self._loader, read_copy(self._run_dir, listed), None)
        return self._lists[listed]

    def _next(self, samples: np.ndarray) -> list[Use]:
        segment = self._segments[-1]
        done = self._last - int(segment["step"])
        more = 2 * self._loader.steps_per_epoch
        for _ in range(_SEARCHED_AHEAD):
            first: dict[str, Use] = {}
            for use in sorted(self._in_segment(segment, samples, done + more, after=done)):
                first.setdefault(use.key, use)
            if len(first) == len(np.setdiff1d(samples, self._excluded(segment))):
                break
            more *= 2
        return list(first.values())

    def _placed(
        self, segment: Mapping[str, Any], samples: np.ndarray, epochs: np.ndarray, steps: np.ndarray, slots: np.ndarray
    ) -> list[Use]:
        """Uses, with ranks and rows of their slots."""
        ranks, settings = int(segment["ranks"]), segment["settings"]
        batch = int(settings.get("plan", settings)["global_batch_size"])
        starts = np.arange(ranks) * batch // ranks
        rank = np.searchsorted(starts, slots, side="right") - 1
        columns = (column.tolist() for column in (steps, rank, slots - starts[rank], epochs))
        return [Use(*use) for use in zip(*columns, self._loader.index.keys(samples), strict=True)]


def trace_loader(cfg: Config) -> ShardLoader:
    """A loader of a run's training data in this process, which starts no worker.

    Raises:
        ConfigError: If the data are a stream, or cannot be found.
    """
    cfg = copy.deepcopy(cfg)
    cfg.data.num_workers, cfg.train.micro_batch_size, cfg.data.exclude = 0, None, None
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", False)
    loader = train_loader(cfg, world, make_precision(cfg.precision))
    if not loader.segment():
        raise ConfigError(
            "data.train is a stream, whose order is its own: dtrain cannot say which step used a sample. Write it to shards, "
            "or set data.record_keys=true."
        )
    return loader


def _without_starts(run: RecordedRun, loader: ShardLoader) -> list[dict[str, Any]]:
    """The segment of the last start of a run without ``starts.jsonl``."""
    print(f"note: {NO_STARTS}", file=sys.stderr)
    start, fresh = run.starts[0], loader.segment()
    state = run.checkpoints.load(start.step).state["loader"] if start.step else fresh["state"]
    return [{"step": start.step, "state": state, "ranks": start.ranks, "settings": fresh["settings"]}]


def find_samples(loader: ShardLoader, keys: Sequence[str], shard: str | None) -> np.ndarray:
    """The numbers of samples with these keys, and of a whole shard.

    Raises:
        ConfigError: If there is no such sample or shard; names one that exists.
    """
    try:
        found = [loader.index.find_all(keys)]
    except KeyError as error:
        example = loader.index.keys(np.zeros(1, np.int64))[0]
        raise ConfigError(
            f"{error.args[0]}: the training data have no sample with this key. Keys look like {example}."
        ) from None
    if shard is not None:
        found.append(loader.index.find_shard(shard))
        if not found[-1].size:
            raise ConfigError(
                f"--shard {shard}: the training data have no shard of this name. {loader.source.summary()}."
            )
    return np.unique(np.concatenate(found))


def trace(composed: Composed, keys: Sequence[str], options: argparse.Namespace) -> None:
    """Prints and writes the uses that the command line asks for."""
    directory = run_dir_of(composed.overrides)
    assert directory is not None
    run = RecordedRun.read(directory)
    composed.cfg.data.bad_shards = as_recorded(composed.cfg.data.bad_shards, directory)
    loader = trace_loader(composed.cfg)
    tracer = Tracer(run, loader)
    if options.step is not None:
        uses = tracer.step(options.step)
    else:
        uses = tracer.uses(find_samples(loader, keys, options.shard), ahead=options.ahead)
    write_json(options.json, {"uses": [_as_json(use) for use in uses]})
    if composed.cfg.data.mix is not None:
        print("note: data.mix: uses as the partner of another sample are not listed", file=sys.stderr)
    with until_reader_leaves():
        print("\n".join(_table(uses, run.last_step, tracer.first_step)), flush=True)


def _as_json(use: Use) -> dict[str, Any]:
    content = asdict(use)
    return {name: content[name] for name in ("key", "epoch", "step", "rank", "row")}


def _table(uses: Sequence[Use], last: int, first: int) -> Iterator[str]:
    if uses:
        rows = [[printable(use.key), *map(str, (use.epoch, use.step, use.rank, use.row))] for use in uses[:_MOST_SHOWN]]
        rows[0:0] = [["key", "epoch", "step", "rank", "row"]]
        yield align_rows(rows, numbers=range(1, 5))
    if len(uses) > _MOST_SHOWN:
        yield f"and {len(uses) - _MOST_SHOWN:,} more; --json FILE has all"
    ahead = sum(use.step > last for use in uses)
    yield f"{len(uses) - ahead:,} {'use' if len(uses) - ahead == 1 else 'uses'} in steps {first:,} to {last:,}" + (
        f", {ahead:,} to come" if ahead else ""
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="dtrain trace",
        usage="%(prog)s run.dir=DIR KEY [KEY ...] [--ahead] [--json FILE]\n"
        "       %(prog)s run.dir=DIR --shard NAME [--ahead] [--json FILE]\n"
        "       %(prog)s run.dir=DIR --step N [--json FILE]",
        description="Shows in which steps of a run samples were used: epoch, step, rank and row of each use. This is computed\n"
        "from the seed and the record of the run's starts, without a log. KEY is written as in the logs of a run: SHARD/KEY,\n"
        "or KEY alone; in a mixture SOURCE/SHARD/KEY.",
        epilog="example: dtrain trace run.dir=runs/digits train-000000.tar/000017 --ahead",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shard", metavar="NAME", help="all samples of a shard")
    parser.add_argument("--step", type=_step, metavar="N", help="the samples of a step, also of a future one")
    parser.add_argument("--ahead", action="store_true", help="also the next use of each sample")
    parser.add_argument(
        "--trust", action="store_true", help="use a run that a different user started; its config runs code"
    )
    add_json_option(parser)
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    groups = {each.name for each in dataclasses.fields(schema.Config)}
    overrides = [word for word in rest if "=" in word and word.lstrip("+~").split("=")[0].split(".")[0] in groups]
    keys = [word for word in rest if word not in overrides]
    if unknown := [word for word in keys if word.startswith("-")]:
        parser.error(f"unrecognized option: {unknown[0]}")
    asked = bool(keys) + (options.shard is not None) + (options.step is not None)
    if not asked or (options.step is not None and asked > 1):
        parser.error("name samples by KEY or --shard NAME, or a step by --step N")
    command_line.run(
        lambda composed: trace(composed, keys, options), [*overrides, *["--trust"] * options.trust], rewrite=recompose
    )
    return 0


def _step(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**52):
        raise argparse.ArgumentTypeError(f"got {text}, want a step from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
