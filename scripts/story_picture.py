"""Draws docs/assets/story.svg, the picture of the front page: a run that was killed, resumed on more ranks, and replayed.

    python scripts/story_picture.py run      trains (about a minute on two cores), writes docs/assets/story.json, and draws
    python scripts/story_picture.py          draws again

The first start is killed with SIGKILL, all of its processes at once. The same command with a different ``--nproc`` continues.
Then ``dtrain replay`` recomputes steps of both starts.
"""

from __future__ import annotations

import html
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
STORY, PICTURE = ASSETS / "story.json", ASSETS / "story.svg"
RANKS = (2, 4)
#: Step after which the run is killed, replayed steps of each start, and keys of the run.
KILLED, WINDOWS = 132, ((80, 84), (240, 244))
KEYS = ("experiment=digits", "train.deterministic=true", "checkpoint.every_steps=50", "checkpoint.keep_every=50")

_WIDTH, _HEIGHT = 1060, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 1030, 96, 330  # of the curve
_COLOURS = ("#0969da", "#8250df")
_TEXT, _WEAK, _RED, _GREEN = "#1f2328", "#57606a", "#cf222e", "#1a7f37"


# -- the run


def run(folder: Path, *keys: str, killed: int = KILLED, windows: Sequence[tuple[int, int]] = WINDOWS) -> dict[str, Any]:
    """Trains, kills, resumes and replays.

    Args:
        folder: Where the run is written to; empty.
        keys: More keys of the run.
        killed: The run is killed once it has logged this step.
        windows: First and last step of the replay of each start.

    Returns:
        What ``draw`` takes.
    """
    run_dir = folder / "run"
    train = ["train", *KEYS, f"run.dir={run_dir}", "train.log_every=1", "tracker=none", *keys]
    # A session of its own, so that nothing of it survives the kill.
    first = subprocess.Popen(_dtrain(*train, f"--nproc={RANKS[0]}"), start_new_session=True)
    while _last_step(run_dir) < killed:
        if first.poll() is not None:
            raise RuntimeError("the run ended before it was killed")
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    lost = _losses(run_dir / "metrics.jsonl")
    subprocess.run(_dtrain(*train, f"--nproc={RANKS[1]}"), check=True)
    starts = [json.loads(line)["step"] for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    losses = _losses(run_dir / "metrics.jsonl")
    replays = []
    for begin, end in windows:
        result = folder / f"replay-{begin}.json"
        steps = f"replay.steps=[{begin},{end}]"
        subprocess.run(_dtrain("replay", f"run.dir={run_dir}", steps, "--json", str(result)), check=True)
        compared = json.loads(result.read_text())["steps"]
        replays.append([[step["step"], step["recorded"]["loss"], step["recomputed"]["loss"]] for step in compared])
    return {
        "killed": max(lost),
        "resumed": starts[1],
        "losses": [losses[step] for step in sorted(losses)],
        "lost_losses": [lost[step] for step in sorted(lost) if step > starts[1]],
        "accuracy": _last(run_dir / "metrics.jsonl", "eval/accuracy"),
        "replays": replays,
    }


def _dtrain(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dtrain", *arguments]


def _records(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _losses(metrics: Path) -> dict[int, float]:
    return {record["step"]: record["train/loss"] for record in _records(metrics) if "train/loss" in record}


def _last(metrics: Path, name: str) -> float:
    return float([record[name] for record in _records(metrics) if name in record][-1])


def _last_step(run_dir: Path) -> int:
    return max(_losses(run_dir / "metrics.jsonl"), default=0)


# -- the picture


def draw(story: dict[str, Any]) -> str:
    """The picture of a story, as SVG."""
    losses, lost = story["losses"], story["lost_losses"]
    killed, resumed, last = story["killed"], story["resumed"], len(losses)
    first = [*losses[:resumed], *lost]
    title = f"One run, killed at step {killed}, resumed on {RANKS[1]} ranks, replayed with equal bits"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{title}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#ffffff"/>',
    ]
    for power in range(-3, 1):
        y = _y(10.0**power)
        parts.append(f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="#d8dee4"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{10.0**power:g}", 12, _WEAK, anchor="end"))
    parts.append(_text(_LEFT, _TOP - 8, "training loss", 12, _WEAK))
    parts.append(_text(_RIGHT, _BOTTOM + 34, f"step {last}, accuracy {story['accuracy']:.4f}", 12, _WEAK, anchor="end"))
    parts.append(_text(_LEFT, _BOTTOM + 34, "step 1", 12, _WEAK))

    # The steps after the checkpoint were done twice: the first time is drawn wider, below the second.
    x_kill, x_resume = _x(killed, last), _x(resumed, last)
    parts.append(
        f'<rect x="{x_resume}" y="{_TOP}" width="{x_kill - x_resume}" height="{_BOTTOM - _TOP}" fill="{_RED}" opacity="0.07"/>'
    )
    parts.append(_curve(first, 1, last, _COLOURS[0], 5))
    parts.append(_curve(losses[resumed:], resumed + 1, last, _COLOURS[1], 2))
    parts.append(f'<path d="M{x_kill} {_TOP}V{_BOTTOM}" stroke="{_RED}" stroke-width="1.5" stroke-dasharray="5 4"/>')
    parts.append(_text(x_kill + 8, _TOP + 14, f"kill -9 after step {killed}", 13, _RED, weight="bold"))
    again = f"steps {resumed + 1} to {killed} again, from the checkpoint of step {resumed}: the same samples"
    parts.append(_text(x_kill + 8, _TOP + 31, again, 12, _WEAK))

    for start, (ranks, (begin, end)) in enumerate(zip(RANKS, ((1, killed), (resumed + 1, last)), strict=True)):
        x, colour = (_LEFT, x_kill + 8)[start], _COLOURS[start]
        command = f"dtrain train --nproc {ranks} experiment=digits"
        parts.append(_text(x, 34, command, 15, _TEXT, weight="bold", family="monospace"))
        parts.append(f'<rect x="{x}" y="45" width="14" height="5" fill="{colour}"/>')
        parts.append(_text(x + 22, 53, f"{ranks} ranks, steps {begin} to {end}", 13, colour))
    for (ranks, replay), left in zip(zip(RANKS, story["replays"], strict=True), (_LEFT, 560), strict=True):
        parts += _replay(replay, ranks, left, last)
    return "\n".join((*parts, "</svg>", ""))


def _replay(steps: Sequence[Sequence[float]], ranks: int, left: float, last: int) -> list[str]:
    """A mark on the curve, and one recomputed step with the bits of its losses."""
    begin, end = (_x(steps[at][0], last) for at in (0, -1))
    step, recorded, recomputed = steps[0]
    equal = sum(one[1] == one[2] for one in steps)
    bits = f"{_bits(recorded)} {'=' if recorded == recomputed else '≠'} {_bits(recomputed)}"
    y, low = _BOTTOM + 64, _BOTTOM + 8
    command = f"dtrain replay run.dir=DIR 'replay.steps=[{steps[0][0]},{steps[-1][0]}]'"
    return [
        f'<rect x="{begin - 3}" y="{low}" width="{end - begin + 6}" height="9" rx="2" fill="{_GREEN}"/>',
        f'<path d="M{(begin + end) / 2:.1f} {low + 9}L{left + 120} {y - 14}" stroke="{_GREEN}"/>',
        _text(left, y, command, 13, _TEXT, weight="bold", family="monospace"),
        _text(
            left,
            y + 19,
            f"on {ranks} ranks: {equal} of {len(steps)} steps equal; loss of step {step}: {bits}",
            12,
            _GREEN,
        ),
    ]


def _bits(loss: float) -> str:
    return struct.pack(">f", loss).hex()


def _x(step: float, last: int) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * (step - 1) / (last - 1), 1)


def _y(loss: float) -> float:
    low, high = math.log10(5e-4), math.log10(3)
    return round(_BOTTOM - (_BOTTOM - _TOP) * (math.log10(max(loss, 5e-4)) - low) / (high - low), 1)


def _curve(losses: Sequence[float], begin: int, last: int, colour: str, width: float) -> str:
    points = " ".join(f"{_x(begin + number, last)},{_y(loss)}" for number, loss in enumerate(losses))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    colour: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    family: str = "",
) -> str:
    more = f' font-family="{family}"' if family else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"{more}>'
        f"{html.escape(text, quote=False)}</text>"
    )


def main(arguments: Sequence[str]) -> None:
    """Command line."""
    if list(arguments) == ["run"]:
        with tempfile.TemporaryDirectory() as folder:
            STORY.write_text(json.dumps(run(Path(folder))) + "\n")
    PICTURE.write_text(draw(json.loads(STORY.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
