"""What a machine with GPUs is to be asked, in one go of less than ten minutes: results.json and a page with its name.

    DTRAIN_CIFAR10=/data/cifar10 python scripts/gpu_session.py [--out DIR] [--minutes 9.5] [--only PART ...]
    python scripts/gpu_session.py --quick          # small, also on a CPU: shows that everything runs

Every figure comes from a command of the project in a process of its own. The parts share the time; what one leaves over is for
the next ones, and a part that has none left, or lacks data, is skipped with its reason. A part that fails is recorded with its
last lines and the others go on; the exit code is 1 then. Both files are written anew after each part. On several GPUs the
parts ``scaling`` and ``trace`` use all of them, the others the first.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import gpu_session_parts as parts
import torch
from bench_common import machine, table, version
from gpu_session_bench import Bench, Line, NoTimeLeft, Skipped
from timed_process import Failed, OutOfTime, adopt_orphans

#: Part: what it does, its title, its share of the time. The one that can use up all that is left comes last.
PARTS = {
    "checkerboard": (parts.checkerboard, "A network learns a picture", 10),
    "resnet50": (parts.resnet50, "ResNet-50, one training step", 20),
    "gpt": (parts.gpt, "A byte-level GPT of GPT-2 small's size, one training step", 18),
    "export": (parts.export, "The CIFAR network exported", 10),
    "step": (parts.step, "What is around a step (on the CPU)", 3),
    "trace": (parts.trace, "Communication behind computation", 7),
    "scaling": (parts.scaling, "Weak scaling of ResNet-50", 8),
    "cifar10": (parts.cifar10, "CIFAR-10 to 94 %", 24),
}


def main() -> int:
    """Command line; returns the exit code."""
    arguments = _parser().parse_args()
    if not torch.cuda.is_available() and not arguments.quick:
        sys.exit("torch sees no GPU here. --quick runs everything in small on a CPU, and measures nothing.")
    # As an exception, so that children are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    adopt_orphans()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"about": about(), "parts": {}}
    began, shares = time.monotonic(), sum(PARTS[name][2] for name in arguments.only)
    given = 0
    with tempfile.TemporaryDirectory(prefix="dtrain-") as folder:
        for name in arguments.only:
            function, title, share = PARTS[name]
            given += share
            deadline = began + arguments.minutes * 60 * given / shares
            _say(began, f"{name}: {title}, {max(0.0, deadline - time.monotonic()):.0f} s")
            bench = Bench(Path(folder, name), arguments.out, deadline, quick=arguments.quick)
            results["parts"][name] = found = {"title": title, **measured(function(bench), bench, began)}
            _say(began, f"{name}: {found['state']}" + (f": {found['why']}" if found["why"] else ""))
            results["about"]["seconds"] = round(time.monotonic() - began, 1)
            (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            (arguments.out / "page.md").write_text(page(results))
    print(f"{arguments.out / 'page.md'} and results.json beside it")
    return int(any(part["state"] == "failed" for part in results["parts"].values()))


def measured(lines: Iterator[Line], bench: Bench, began: float) -> dict[str, Any]:
    """The lines of a part as far as they come, its state (done, cut short, skipped, failed), and why."""
    found: list[Line] = []
    state, why, started = "done", "", time.monotonic()
    try:
        for line in lines:
            found.append(line)
            _say(began, ", ".join(f"{name} {_cell(value)}" for name, value in line.items() if value is not None))
    except Skipped as reason:
        state, why = "skipped", str(reason)
    except NoTimeLeft as reason:
        state, why = ("cut short" if found else "skipped"), str(reason)
    except OutOfTime as reason:
        state, why = ("cut short" if found else "failed"), str(reason)
    except (Failed, OSError, LookupError, ValueError) as error:  # a command, or what it should have left
        state, why = "failed", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started, 1)
    return {"state": state, "why": why, "seconds": seconds, "lines": found, "commands": bench.commands}


def about() -> dict[str, Any]:
    """Machine, versions, date and command."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    return {
        "machine": f"{names}; {machine()}",
        "versions": f"{version('dtrain')}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {sys.version.split()[0]}",
        "date": date.today().isoformat(),
        "command": f"python scripts/gpu_session.py {' '.join(sys.argv[1:])}".strip(),
    }


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    told = results["about"]
    lines = [
        f"# {told['machine']}",
        f"`{told['command']}`, {told['date']}, {told['versions']}, {told['seconds']:.0f} s in all. "
        "Commands with `PYTHONPATH=.:scripts`; RUNS is a folder.",
    ]
    for name, part in results["parts"].items():
        lines.append(f"## {part['title']}")
        if part["lines"]:
            columns = list(dict.fromkeys(column for line in part["lines"] for column in line))
            rows = [[_cell(line.get(column)) for column in columns] for line in part["lines"]]
            lines.append(f"```\n{table(columns[0], columns[1:], rows)}\n```")
        if part["state"] != "done":
            first, _, rest = part["why"].partition("\n")
            lines.append(f"`{name}` {part['state']}: {first}" + (f"\n\n```\n{rest}\n```" if rest else ""))
        if part["commands"]:
            lines.append("```bash\n" + "\n".join(part["commands"]) + "\n```")
    return "\n\n".join(lines) + "\n"


def _cell(value: float | str | None) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="everything small: shows that it runs")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-session"), help="folder of the results (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
