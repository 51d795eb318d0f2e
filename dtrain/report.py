"""``python -m dtrain.report DIR [DIR ...] [--out FILE] [--png FOLDER]``: runs as one HTML file that opens from disk.

A DIR is a run, or stands for all runs below it, as the directory of a sweep does. Several runs are compared in a table, on
the page and on the terminal; of more than eight, the curves show a choice. What a run does not have, or has damaged, is said
on the page. The exit code is 1 if a directory holds no run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.tracking.atomic import replacing
from dtrain.tracking.history import printable, read_all
from dtrain.tracking.report.directories import run_directories
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.page import report_page
from dtrain.tracking.report.pictures import write_pictures
from dtrain.tracking.report.sections import gap_lines
from dtrain.tracking.report.sweep import Sweep
from dtrain.tracking.report.sweep_table import sweep_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.report",
        description="Shows runs as one self-contained HTML file: whether they are healthy and what limits them, curves "
        "(several runs overlaid), numbers, pictures, evaluations, trouble, and what differs between their configs. Several "
        "runs, a sweep for one, are compared in a table.",
    )
    parser.add_argument(
        "runs",
        metavar="DIR",
        nargs="+",
        type=Path,
        help="directory of a run, running or ended, or one with runs below it",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file (default: report.html in the first DIR)")
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="write each chart as a PNG into it, too")
    options = parser.parse_args(arguments)
    out = options.out or options.runs[0] / "report.html"
    now = time.time()
    try:
        sweep = Sweep.of(read_all(run_directories(options.runs)))
        runs = [Evidence.of(history, now) for history in sweep.shown]
    except (ValueError, OSError) as error:
        return _failed(str(error))
    page = report_page(runs, sweep, now).encode("utf-8", errors="replace")  # names of files may be no text
    try:
        with replacing(out) as file:
            file.write(page)
        if options.png is not None:
            write_pictures(runs, sweep, options.png)
    except OSError as error:
        return _failed(f"{error}. Another place: --out FILE for the page, --png FOLDER for the charts.")
    for line in gap_lines(sweep.runs):
        print(f"report: {printable(line)}", file=sys.stderr)
    if len(sweep.runs) > 1:
        print("\n".join(sweep_text(sweep)), end="\n\n")
    for run in runs:
        print(printable(f"{run.history.label}: {run.health.word}: {run.health.line}"))
    print(printable(str(out.resolve())))
    return 0


def _failed(why: str) -> int:
    print(f"report: error: {printable(why)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
