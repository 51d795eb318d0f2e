"""Writes the pages of the site that are made of running dtrain, into ``build/site_pages``:

    python scripts/site_pages.py

* ``commands.md``: what every command says with ``--help``.
* ``report.html``: the report of three short trainings on the digits, one of them killed and resumed. They are kept in
  ``build/site_pages/runs``, so that the next call only writes the report again; delete the folder to train again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.fault_hook import faulty
from dtrain.__main__ import entry_point
from dtrain.runs.run_dir import read_status

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "site_pages"
#: Every command, and those of its commands that have a page of help.
COMMANDS = (
    ("train",),
    ("evaluate",),
    ("export",),
    ("export", "measure"),
    ("predict",),
    *(("pack", name) for name in ("imagefolder", "arrays", "text", "index")),
    ("show",),
    ("launch",),
    ("report",),
    ("doctor",),
    ("doctor", "memory"),
    ("doctor", "lr"),
    ("doctor", "numerics"),
)
_HEAD = """# Commands

What each command prints with `--help`. The [tour](tour.md) shows them in use,
and how [torchrun and srun](tour.md#torchrun-and-srun) start the same programs.
"""
#: Name of a run: its arguments. One is killed, and resumed by the same command.
RUNS = {
    "adamw": [],
    "adamw-bf16-killed": ["precision=bf16", faulty("nan@step=40", "kill@step=110")],
    "sgd": ["optimizer=sgd"],
}
_COMMON = ["experiment=digits", "tracker=none", "train.max_epochs=8", "train.log_every=4", "data.num_workers=0"]


def main() -> None:
    """Writes both pages."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "commands.md").write_text("\n".join([_HEAD, *map(section, COMMANDS)]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, RUNS))
    dtrain("report", str(FOLDER / "runs"), "--out", str(FOLDER / "report.html"))


def train(name: str) -> None:
    """Makes a run, unless an earlier call has finished it."""
    run_dir = FOLDER / "runs" / name
    if (read_status(run_dir) or {}).get("state") != "finished":
        dtrain("train", *_COMMON, f"run.dir={run_dir}", *RUNS[name], starts=2 if "killed" in name else 1)


def section(command: tuple[str, ...]) -> str:
    """The section of a command."""
    name, *words = command
    sys.argv = [f"dtrain {name}", *words, "--help"]
    os.environ["COLUMNS"] = "100"  # the width of argparse's texts
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        entry_point(name).main()
    # The list of all keys, which `train` adds, is a page of its own.
    shown = text.getvalue().partition("\nKeys with their current values")[0].strip()
    return f"## {' '.join(command)}\n\n```\n{shown}\n```\n"


def dtrain(*arguments: str, starts: int = 1) -> None:
    """Runs a command of dtrain ``starts`` times; ends this program with its message if the last one fails."""
    command = [sys.executable, "-m", "dtrain", *arguments]
    for _ in range(starts):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"dtrain {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
