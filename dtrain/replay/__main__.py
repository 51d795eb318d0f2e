"""``dtrain replay run.dir=DIR replay.steps=[A,B]``: recomputes steps of a run and compares them with its records.

* Started by hand, this process plans, and starts ranks by torchrun: as many as made the steps, or ``--nproc N``. Parts of the
  run that had different numbers of ranks are recomputed one after the other. With one rank it recomputes itself.
* Started by torchrun or srun, the ranks plan and recompute all parts.
* Changed keys may follow. The steps are then recomputed under other conditions; see ``plan``.

Exit code: 0 within the tolerance, 1 beyond it, 2 if nothing could be compared or the command is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config.compose import Composed, compose
from dtrain.config.explain import check_command_line, options_last
from dtrain.console import progress, until_reader_leaves
from dtrain.data.shards.bad_shards import as_recorded
from dtrain.distributed.collectives import from_rank0, on_all_ranks, wait_for_all
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.process_exit import exit_with_torchrun
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.torchrun import record_failure
from dtrain.distributed.world import World, choose_device, join_srun, process_cpu_count
from dtrain.errors import ConfigError
from dtrain.files import read_json
from dtrain.replay.compare import (
    TOLERANCE,
    Comparison,
    StepComparison,
    compare_steps,
    differences,
    reasons_for_tolerance,
)
from dtrain.replay.looks import RowExaminer, Shell
from dtrain.replay.plan import OPTIONS, Part, Request, plan, ranks_of
from dtrain.replay.recompute import CheckpointGone, recompute
from dtrain.replay.recorded import NO_STARTS, RecordedRun
from dtrain.runs.excluded import copy_of
from dtrain.runs.recompose import recompose_start, run_dir_of, take
from dtrain.runs.run_spec import RunSpec, changed_keys
from dtrain.runs.starts import Start
from dtrain.runs.trust import TRUST
from dtrain.training.checkpoint.state import device_kind
from dtrain.training.validation import validate

USAGE = """Usage
  dtrain replay [--nproc N] run.dir=DIR replay.steps=[A,B] [OPTION=VALUE ...] [KEY=VALUE ...] [--json FILE]

Recomputes steps of a run from the newest checkpoint before them. Compares loss, gradient norm and learning rate with the
records, and each checkpoint on the way bit by bit. DIR is never written, and the run may still be training.

Options
  replay.step=N             one step
  replay.steps=[A,B]        the steps from A to B
  replay.windows=K          up to K short windows of steps spread over the run, each after a checkpoint
  replay.window=10          number of steps of a window
  replay.max_distance=N     refuse if more than N steps have to be recomputed before the first one (default: any number)
  replay.tolerance=X        largest relative difference (default: 0 where bits must be equal, else 1e-4)
  replay.samples=true       loss, gradient norm and share of the gradient of each row of the step, the largest loss first
  replay.rows=K             with replay.samples: norms and shares only for the K rows with the largest losses, to save time
  replay.page=FILE          with replay.samples: where to write the pictures of the rows (default: replay-RUN-step-N.html here)
  replay.shell=true         a Python prompt inside the step, before the update, on one rank
  --nproc N                 number of processes (default: the ranks that made the steps)
  --json FILE               also write all results to FILE as JSON
  --trust                   use a run that a different user started: its saved command line can run any code
  KEY=VALUE                 a changed key, such as precision=bf16 or parallel=fsdp; the replay then starts again from each
                            checkpoint on the way, so that differences do not add up; train.hooks=[] leaves hooks out

Exit code: 0 within the tolerance, 1 beyond it, 2 if nothing could be compared or the command is wrong.
"""
# The job of ranks that this command has started: JSON with the parts to recompute and the folder for states and the result.
_JOB = "DTRAIN_REPLAY_JOB"
_RESULT = "result.json"
_FEW_RANKS = 8  # which any machine can start


@dataclass(frozen=True)
class Conditions:
    """How the conditions of a replay compare with those of the run.

    Attributes:
        other: What is different, such as ``ranks: 2 -> 1``; [] if nothing is.
        reasons: Why bits may differ: the same, and what makes a run itself not reproducible.
    """

    other: list[str]
    reasons: list[str]


class Replay:
    """One command: what it asks for, and the records of the run.

    Args:
        arguments: The command line without ``--json`` and ``--nproc``.

    Attributes:
        arguments: The argument.
        request: The steps.
        run: The records.

    Raises:
        ConfigError: If the command is wrong or the directory has no run.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        options, self._typed = take(arguments, **OPTIONS)
        self.request = Request.parse(options)
        directory = run_dir_of(self._typed)
        if directory is None:
            raise ConfigError("run.dir=DIR is missing: name the directory of the run.")
        self.run = RecordedRun.read(directory)
        self._composed: dict[int, Composed] = {}

    def composed(self, number: int) -> Composed:
        """The config of a start, with what was typed on top."""
        if number not in self._composed:
            start = self.run.starts[number]
            saved = {"overrides": start.overrides, "config_dirs": start.config_dirs}
            arguments = recompose_start(self.run.dir, saved, self._typed)
            check_command_line(arguments)
            found: list[Composed] = []
            compose(found.append, options_last(arguments), trusted=TRUST in self._typed)
            listed = start.config.get("data", {}).get("exclude")
            if listed and not self.is_typed("data.exclude"):
                found[0].cfg.data.exclude = str(copy_of(self.run.dir, listed))  # its own file may have changed since
            found[0].cfg.data.bad_shards = as_recorded(found[0].cfg.data.bad_shards, self.run.dir)
            validate(found[0].cfg)
            self._composed[number] = found[0]
        return self._composed[number]

    def is_typed(self, key: str) -> bool:
        """Whether the command line of the replay sets a key."""
        return any(word.startswith(f"{key}=") for word in self._typed)

    def conditions(self, parts: Sequence[Part], ranks: int | None, device: torch.device) -> Conditions:
        """Compares the conditions of these parts with those of a replay on ``ranks`` (None: as in the run) and a device."""
        found = Conditions([], [])
        for number in sorted({part.start for part in parts}):
            start, composed = self.run.starts[number], self.composed(number)
            config = RunSpec.from_composed(composed).with_effect()
            now = dataclasses.replace(
                start,
                ranks=ranks or start.ranks,
                device=device_kind(device),
                threads=threads_for(start),
                versions={"torch": torch.__version__},
            )
            other = differences(start, now, changed_keys(start.config, config) if start.config else [])
            found.other.extend(other)
            found.reasons.extend(reasons_for_tolerance(other, device, deterministic=composed.cfg.train.deterministic))
        return Conditions([*dict.fromkeys(found.other)], [*dict.fromkeys(found.reasons)])

    def plan(self, ranks: int | None, device: torch.device) -> tuple[list[Part], Conditions]:
        """The parts to recompute on ``ranks`` (None: as in the run) and a device."""
        parts = plan(self.run, self.request, same=True)
        conditions = self.conditions(parts, ranks, device)
        return (plan(self.run, self.request, same=False) if conditions.other else parts), conditions

    def finish(self, done: Done, conditions: Conditions) -> Comparison:
        """The result of all parts."""
        tolerance = self.request.tolerance
        if tolerance is None:
            tolerance = TOLERANCE if conditions.reasons else 0.0
        # Under other conditions the state at a checkpoint differs by what its steps differ.
        checkpoints = {} if conditions.other else done.checkpoints
        return Comparison(done.steps, checkpoints, tolerance, conditions.reasons, done.ended)


@dataclass
class Done:
    """What was recomputed so far; ``samples`` is the content of the JSON file of ``replay.samples=true``."""

    steps: list[StepComparison] = field(default_factory=list)
    checkpoints: dict[int, list[str]] = field(default_factory=dict)
    ended: str = ""
    samples: dict[str, Any] | None = None


def threads_for(start: Start) -> int:
    """Threads of a rank: as in the run, at most one for each core."""
    return min(start.threads or torch.get_num_threads(), process_cpu_count())


def recompute_parts(
    replay: Replay, parts: Sequence[Part], world: World, watch: HangWatch, folder: Path, *, keep: bool
) -> Done:
    """Collective. Recomputes parts one after the other.

    Args:
        replay: The command.
        parts: The parts.
        world: The ranks.
        watch: Detects hangs.
        folder: For states that a part hands to the next one; all ranks see it.
        keep: Whether the last part hands its state on too.
    """
    done, total = Done(), sum(part.last - part.after for part in parts)
    with progress(Console(stderr=True), "replay: steps", total) as advance:
        for part, following in zip(parts, (*parts[1:], None), strict=True):
            cfg, made_by = replay.composed(part.start).cfg, replay.run.starts[part.start]
            if world.size == made_by.ranks and made_by.micro_batch and not replay.is_typed("train.micro_batch_size"):
                cfg.train.micro_batch_size = made_by.micro_batch  # smaller than the config's after memory ran out
            torch.set_num_threads(threads_for(replay.run.starts[part.start]))
            keeps = keep if following is None else following.from_before
            on_step = advance if world.rank == 0 else lambda steps: None
            look = _look(replay, world) if following is None else None
            result = recompute(cfg, part, replay.run, world, watch, folder, keep=keeps, on_step=on_step, look=look)
            done.steps += compare_steps(replay.run, result.votes, part.compared)
            done.checkpoints |= result.checkpoints
            done.samples = look.found if isinstance(look, RowExaminer) else None
            if result.ended:
                done.ended = result.ended
                break
    return done


def _look(replay: Replay, world: World) -> RowExaminer | Shell | None:
    request = replay.request
    if request.shell:
        if world.size > 1:
            raise ConfigError(
                f"replay.shell=true has one prompt, and there are {world.size} ranks. Start it with --nproc 1."
            )
        return Shell()
    if not request.samples:
        return None
    directory = replay.run.dir.resolve()
    page = Path(request.page or f"replay-{directory.name}-step-{request.last}.html")
    if request.page is None and directory in (here := Path.cwd().resolve(), *here.parents):
        page = Path(gettempdir()) / page  # nothing is written to the directory of the run
    return RowExaminer(request.rows, page, directory.name)


# -- the ranks


def replay_on_ranks(replay: Replay, json_file: Path | None) -> int:
    """Recomputes and compares on the ranks of this job, or in this process; returns the exit code."""
    exit_with_torchrun()
    cfg = replay.composed(len(replay.run.starts) - 1).cfg
    with process_group(cfg.parallel.timeout_start) as world, HangWatch(world, cfg.parallel) as watch:
        if _JOB in os.environ:
            return _do_job(replay, world, watch, json.loads(os.environ[_JOB]))
        result = None
        while result is None:
            times = from_rank0(lambda: [start.time for start in replay.run.starts])
            on_all_ranks(lambda: _require_same_starts(replay.run, times))  # noqa: B023 - called at once
            replay.run.unusable.update(from_rank0(lambda: sorted(replay.run.unusable)))
            parts, conditions = on_all_ranks(lambda: replay.plan(world.size, world.device))
            parts = [Part(**it) for it in from_rank0(lambda: list(map(asdict, parts)))]  # noqa: B023
            if any(part.from_before for part in parts) and world.local_size < world.size:
                begins = ", ".join(str(start.step) for start in replay.run.starts)
                raise ConfigError(
                    "replay.steps: several starts of the run made these steps. On several machines recompute those of one "
                    f"start at a time; starts begin after the steps {begins}."
                )
            if world.rank == 0:
                _announce(replay, parts, conditions)
            with TemporaryDirectory(prefix="dtrain-replay-") as own:
                folder = Path(from_rank0(lambda: own)) if world.local_size == world.size else Path(own)
                try:
                    done = recompute_parts(replay, parts, world, watch, folder, keep=False)
                except CheckpointGone as gone:
                    _note_gone(replay, gone, world.rank)
                    continue
                finally:
                    wait_for_all()  # rank 0 deletes the folder
                result = replay.finish(done, conditions)
        if world.rank == 0:
            _show(result, json_file, done.samples)
    code = result.exit_code
    for name in ("SIGINT", "SIGTERM"):
        if name in result.ended:
            code = 128 + getattr(signal, name)
    if code:
        record_failure("", shown=True)
    return code


def _do_job(replay: Replay, world: World, watch: HangWatch, job: Mapping[str, Any]) -> int:
    folder = Path(job["folder"])
    on_all_ranks(lambda: _require_same_starts(replay.run, job["times"]))
    try:
        done = recompute_parts(replay, [Part(**part) for part in job["parts"]], world, watch, folder, keep=job["keep"])
        content: dict[str, Any] = asdict(done)
    except CheckpointGone as gone:
        content = {"gone": gone.step}
    if world.rank == 0:
        (folder / _RESULT).write_text(json.dumps(content), encoding="utf-8")
    return 0


def _require_same_starts(run: RecordedRun, times: Sequence[float]) -> None:
    if times != [start.time for start in run.starts]:
        raise ConfigError("run.dir: the run was started again at this moment. Start the replay again.")


def _note_gone(replay: Replay, gone: CheckpointGone, rank: int = 0) -> None:
    replay.run.unusable.add(gone.step)
    if rank == 0:
        print(f"note: {gone}, so the one before it is used", file=sys.stderr, flush=True)


def _announce(replay: Replay, parts: Sequence[Part], conditions: Conditions) -> None:
    for line in conditions.other:
        print(f"other condition: {line}", flush=True)
    if replay.request.windows:
        print(f"windows after the checkpoints of steps {', '.join(str(part.after) for part in parts)}", flush=True)
        return
    begin, total = parts[0].after, parts[-1].last - parts[0].after
    where = f"the checkpoint of step {begin}" if begin else "the initial weights"
    before = (replay.request.first or 0) - 1 - begin
    extra = f", {before:,} of them before step {replay.request.first}" if before else ""
    print(f"from {where}: {total:,} {'step' if total == 1 else 'steps'}{extra}", flush=True)


def _show(result: Comparison, json_file: Path | None, samples: Mapping[str, Any] | None) -> None:
    write_json(json_file, samples or result.to_json())
    with until_reader_leaves():
        print(f"{result.table()}{result.last_line()}", flush=True)


# -- started by hand


def replay_by_hand(replay: Replay, ranks: int | None, json_file: Path | None) -> int:
    """Starts ranks for the parts, or recomputes in this process if one rank is enough; returns the exit code."""
    if not replay.run.has_starts:
        print(f"note: {NO_STARTS}", file=sys.stderr)
    if ranks is None and replay.request.windows:
        ranks = replay.run.starts[-1].ranks
    if ranks is None and replay.request.shell:
        ranks = 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    while True:
        parts, conditions = replay.plan(ranks, choose_device(0, 1, gpus)[0])
        groups = ranks_of(parts, replay.run.starts) if ranks is None else [(ranks, parts)]
        most = max(size for size, _ in groups)
        if ranks is None and most > max(_FEW_RANKS, process_cpu_count(), gpus):
            raise ConfigError(
                f"the run had {most} ranks, and this machine has {process_cpu_count()} cores and {gpus} GPUs. Name how many "
                "processes to start here: --nproc N. Or start it on as many machines as the run, with torchrun or srun."
            )
        if [size for size, _ in groups] == [1]:
            return replay_on_ranks(replay, json_file)
        _announce(replay, parts, conditions)
        try:
            done = _start_groups(replay, groups)
        except CheckpointGone as gone:
            _note_gone(replay, gone)
            continue
        if isinstance(done, int):
            return done
        result = replay.finish(done, conditions)
        _show(result, json_file, done.samples)
        return result.exit_code


def _start_groups(replay: Replay, groups: Sequence[tuple[int, list[Part]]]) -> Done | int:
    """Recomputes parts by torchrun, one job for each number of ranks; the exit code of a job that failed.

    Raises:
        CheckpointGone: If a checkpoint cannot be read.
    """
    done = Done()
    with TemporaryDirectory(prefix="dtrain-replay-") as folder:
        for (size, parts), following in zip(groups, (*groups[1:], None), strict=True):
            keep = following is not None and following[1][0].from_before
            times = [start.time for start in replay.run.starts]
            job = {"folder": folder, "parts": list(map(asdict, parts)), "keep": keep, "times": times}
            if code := _run_ranks(size, replay.arguments, {_JOB: json.dumps(job), "TMPDIR": folder}):
                return code
            content = read_json(Path(folder) / _RESULT)
            if "gone" in content:
                raise CheckpointGone(content["gone"])
            done.steps += [StepComparison(**step) for step in content["steps"]]
            done.checkpoints |= {int(step): names for step, names in content["checkpoints"].items()}
            done.ended, done.samples = content["ended"], content["samples"]
            if done.ended:
                break
    return done


def _run_ranks(ranks: int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of torchrun, which gets the signals of this process; 128 + N after signal N."""
    # As `dtrain train` does, so that Ctrl-C shows no traceback while the ranks import torch.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    received: list[int] = []
    child = subprocess.Popen(
        [*command, "-m", "dtrain", "replay", *arguments], env={"OMP_NUM_THREADS": "1", **os.environ, **environment}
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        child.send_signal(number)

    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(number, pass_on) for number in signals]
    try:
        code = child.wait()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return 128 + received[0] if received else code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"--help", "-h"} & set(words):
        print(USAGE)
        return 0
    parser = argparse.ArgumentParser(prog="dtrain replay", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=_processes)
    add_json_option(parser)
    options, words = parser.parse_known_args(words)
    join_srun()
    settle_network()
    launched = "RANK" in os.environ
    if launched and options.nproc is not None:
        parser.error("--nproc: a launcher has already started the processes; leave it out")

    def run() -> int:
        replay = Replay(words)
        return (
            replay_on_ranks(replay, options.json) if launched else replay_by_hand(replay, options.nproc, options.json)
        )

    return command_line.call(run)


def _processes(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text}, want a number of processes from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
