"""Which parts of a run are recomputed, from which checkpoints, with which config and on how many ranks.

* A *part* is a range of steps of one start. It begins from a recorded checkpoint, from the initial weights, or from the state
  that the part before has reached.
* Under the *same conditions* as in the run (ranks, device, versions, keys) a range is recomputed in one go, from the newest
  checkpoint before it, so that each recorded checkpoint on the way tests all steps up to it.
* Under *other conditions* every recorded checkpoint on the way begins a new part, so that differences do not add up.
* *Windows* are short ranges after the checkpoints that lie nearest to equal parts of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import Start, start_of

OPTIONS = {
    "replay.steps": "",
    "replay.step": "",
    "replay.windows": "",
    "replay.window": "10",
    "replay.max_distance": "",
    "replay.tolerance": "",
    "replay.samples": "false",
    "replay.rows": "",
    "replay.page": "",
    "replay.shell": "false",
}


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        first: First step to compare; None: windows.
        last: Last step to compare; None: windows.
        windows: Number of windows; 0 without.
        window: Steps of a window.
        max_distance: Most steps between the checkpoint and ``first``; None: any number.
        tolerance: Largest relative difference; None: by the conditions.
        samples: Whether to examine the rows of the last step.
        rows: Rows for which parts of the gradient are computed; None: all.
        page: File for the pictures of the rows; None: a name in the current folder.
        shell: Whether to open a prompt within the last step.
    """

    first: int | None
    last: int | None
    windows: int
    window: int
    max_distance: int | None
    tolerance: float | None
    samples: bool = False
    rows: int | None = None
    page: str | None = None
    shell: bool = False

    @classmethod
    def parse(cls, options: dict[str, str]) -> Request:
        """Parses the values of ``OPTIONS``.

        Raises:
            ConfigError: If one is impossible, or they name no steps; names key, value and remedy.
        """
        chosen = [key for key in ("replay.steps", "replay.step", "replay.windows") if options[key]]
        if len(chosen) != 1:
            raise ConfigError(
                f"replay: got {' and '.join(chosen) or 'no steps'}. Name the steps by one of replay.step=N, replay.steps=[A,B] "
                "and replay.windows=K."
            )
        first = last = None
        if options["replay.step"]:
            first = last = _number("replay.step", options)
        elif options["replay.steps"]:
            found = re.fullmatch(r"\s*\[\s*(\d+)\s*,\s*(\d+)\s*\]\s*", options["replay.steps"].strip("'\""))
            first, last = (int(found[1]), int(found[2])) if found else (0, 0)
            if not 1 <= first <= last:
                raise ConfigError(f"replay.steps: got {options['replay.steps']}, want [A,B] with 1 <= A <= B.")
        try:
            tolerance = float(options["replay.tolerance"]) if options["replay.tolerance"] else None
        except ValueError:
            tolerance = -1.0
        if tolerance is not None and not tolerance >= 0:
            raise ConfigError(f"replay.tolerance: got {options['replay.tolerance']}, want a number of at least 0.")
        windows = _number("replay.windows", options) if options["replay.windows"] else 0
        distance = _number("replay.max_distance", options, 0) if options["replay.max_distance"] else None
        samples, shell = (_flag(key, options) for key in ("replay.samples", "replay.shell"))
        if (samples or shell) and not options["replay.step"]:
            raise ConfigError(
                f"replay.{'samples' if samples else 'shell'}=true looks into one step. Name it: replay.step=N."
            )
        if options["replay.rows"] and not samples:
            raise ConfigError("replay.rows limits replay.samples=true, which is not set. Add it.")
        if samples and shell:
            raise ConfigError("replay.samples and replay.shell both look into the step. Set one of them.")
        page = options["replay.page"]
        if page and not Path(page).expanduser().absolute().parent.is_dir():
            raise ConfigError(
                f"replay.page: {Path(page).parent} is not a folder, so {Path(page).name} cannot be written there."
            )
        return cls(
            first,
            last,
            windows,
            _number("replay.window", options),
            distance,
            tolerance,
            samples=samples,
            rows=_number("replay.rows", options) if options["replay.rows"] else None,
            page=str(Path(page).expanduser()) if page else None,
            shell=shell,
        )


@dataclass(frozen=True)
class Part:
    """A range of steps of one start.

    Attributes:
        start: Number of the start.
        after: Step of the state it begins from; 0 is the initial state.
        last: Its last step.
        compared: Its first step that is compared.
        from_before: Whether it begins from the state that the part before has reached, not from a checkpoint.
    """

    start: int
    after: int
    last: int
    compared: int
    from_before: bool = False


def plan(run: RecordedRun, request: Request, *, same: bool) -> list[Part]:
    """The parts to recompute, in the order of their steps.

    Args:
        run: The records.
        request: The steps.
        same: Whether they are recomputed under the conditions of the run.

    Raises:
        ConfigError: If the steps were not done, or are too far from a checkpoint.
    """
    done, known = run.last_step, run.starts[0].step
    if request.windows:
        return list(_windows(run, request))
    first, last = request.first, request.last
    assert first is not None
    assert last is not None
    if first <= known and run.starts[0].fork:
        origin = run.starts[0].fork
        raise ConfigError(
            f"replay.steps: step {first} was done by the run that this one was forked from at step {origin['step']}. Replay it "
            f"there: run.dir={origin['dir']}"
        )
    if first <= known:
        raise ConfigError(f"replay.steps: step {first} is not known, the records of this run begin after step {known}.")
    if last > done:
        raise ConfigError(f"replay.steps: got step {last}, but the run in {run.dir} has done {done} steps.")
    checkpoints = saved_steps(run)
    begin = max((step for step in checkpoints if step < first), default=known)
    distance = first - 1 - begin
    if request.max_distance is not None and distance > request.max_distance:
        raise ConfigError(
            f"replay.max_distance: the newest checkpoint before step {first} is that of step {begin}, so {distance} steps have "
            f"to be recomputed first, more than {request.max_distance}. Name steps after a checkpoint "
            f"({', '.join(map(str, checkpoints)) or 'there is none'}), or leave replay.max_distance out."
        )
    cuts = {begin, *(start.step for start in run.starts if begin < start.step < last)}
    forced = {step for step in checkpoints if begin < step < last} if not same else set()
    ends = [*sorted(cuts | forced)[1:], last]
    parts = []
    for after, end in zip(sorted(cuts | forced), ends, strict=True):
        from_before = after != begin and after not in forced
        parts.append(Part(start_of(run.starts, after + 1), after, end, max(first, after + 1), from_before))
    return parts


def _windows(run: RecordedRun, request: Request) -> Iterator[Part]:
    done = run.last_step
    begins = [step for step in saved_steps(run) if step < done]
    if not begins:
        raise ConfigError(
            f"replay.windows: {run.checkpoints.directory} has no checkpoint before the last step, {done}."
        )
    aims = [done * number // request.windows for number in range(request.windows)]
    for begin in sorted({min(begins, key=lambda step: abs(step - aim)) for aim in aims}):
        number = start_of(run.starts, begin + 1)
        end = run.starts[number + 1].step if number + 1 < len(run.starts) else done
        yield Part(number, begin, min(begin + request.window, end), begin + 1)


def saved_steps(run: RecordedRun) -> list[int]:
    """Steps from whose state the run can be continued: those of its checkpoints, and 0 where it began."""
    known = run.starts[0].step
    steps = [step for step in run.checkpoints.steps() if step >= known and step not in run.unusable]
    return steps if known else sorted({0, *steps})


def ranks_of(parts: Sequence[Part], starts: Sequence[Start]) -> list[tuple[int, list[Part]]]:
    """The parts in groups of equal numbers of ranks, as the run had them."""
    groups: list[tuple[int, list[Part]]] = []
    for part in parts:
        ranks = starts[part.start].ranks
        if groups and groups[-1][0] == ranks:
            groups[-1][1].append(part)
        else:
            groups.append((ranks, [part]))
    return groups


def _number(key: str, options: dict[str, str], least: int = 1) -> int:
    text = options[key]
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{key}: got {text}, want a whole number of at least {least}.")
    return int(text)


def _flag(key: str, options: dict[str, str]) -> bool:
    text = options[key].lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{key}: got {options[key]}, want true or false.")
    return text == "true"
