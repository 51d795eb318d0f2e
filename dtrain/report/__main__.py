"""``dtrain report DIR [DIR ...] [--out FILE] [--png FOLDER]``: shows runs as one self-contained HTML file.

A DIR is a run, or a directory with runs below it, such as a sweep; or the URL of a mirror (``checkpoint.mirror``). Several
runs are compared in a table, on the page and on the terminal; of more than eight runs, the curves show a selection. The page
lists missing and damaged files of a run.
The exit code is 1 if a directory holds no run or the page cannot be written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from dtrain.console import until_reader_leaves
from dtrain.errors import escape_on_stdout, printable
from dtrain.files import replace_file
from dtrain.report.charts import run_charts, setting_charts
from dtrain.report.health import RunData
from dtrain.report.page import gap_lines, report_page
from dtrain.report.search import read_searches
from dtrain.report.sweep import Comparison
from dtrain.report.tables import comparison_text
from dtrain.runs.history import read_all, run_directories
from dtrain.runs.mirror import fetched_records
from dtrain.urls import is_url


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="dtrain report",
        description="Shows runs as one self-contained HTML file: whether they are healthy and what limits their speed, curves "
        "(several runs overlaid), numbers, pictures, evaluations, problems, and what differs between their configs. "
        "Several runs, such as a sweep, are compared in a table.",
    )
    parser.add_argument(
        "runs",
        metavar="DIR",
        nargs="+",
        help="directory of a finished or running run, or of several runs; or the URL of a mirror, s3://BUCKET/runs/NAME",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="the page (default: report.html in the first DIR, else in the current folder)",
    )
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="also write each chart as a PNG into this folder")
    options = parser.parse_intermixed_args(arguments)  # also directories after an option
    escape_on_stdout()
    try:
        with fetched_records(options.runs) as found:
            return _write_report(options, found)
    except (ValueError, OSError, ImportError) as error:
        return _fail(str(error))


def _write_report(options: argparse.Namespace, found: Mapping[Path, str]) -> int:
    """Writes the page, and charts as pictures; ``found`` has the directories to read, and what was typed for each."""
    out = options.out or (Path() if is_url(options.runs[0]) else Path(options.runs[0])) / "report.html"
    now = time.time()
    try:
        comparison = Comparison.from_runs(read_all(run_directories(list(found)), found))
        runs = [RunData.read(history, now) for history in comparison.shown]
    except (ValueError, OSError) as error:
        return _fail(str(error))
    damaged: list[str] = []
    sections = [search.section for search in read_searches(list(found), damaged)]
    page = report_page(runs, comparison, now, sections).encode(
        "utf-8", errors="replace"
    )  # file names may not be valid text
    try:
        with replace_file(out) as file:
            file.write(page)
        if options.png is not None:
            from dtrain.report.pictures import write_charts  # here because importing matplotlib takes half a second

            searched = [chart for section in sections for chart in section.charts]
            settings = chain(*map(setting_charts, comparison.sweeps))
            write_charts([*searched, *settings, *chain(*run_charts(runs).values())], options.png)
    except OSError as error:
        return _fail(f"{error}. Choose a different place: --out FILE for the page, --png FOLDER for the charts.")
    for line in (*gap_lines(comparison.runs), *damaged):
        print(f"report: {printable(line)}", file=sys.stderr)
    with until_reader_leaves():
        if len(comparison.runs) > 1:
            print(comparison_text(comparison))
        for run in runs:
            print(printable(f"{run.history.label}: {run.health.word}: {run.health.line}"))
        print(printable(str(out.resolve())))
    return 0


def _fail(reason: str) -> int:
    print(f"report: error: {printable(reason)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
