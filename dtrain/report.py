"""``python -m dtrain.report DIR [DIR ...] [--out FILE]``: runs as one HTML file that opens from disk.

What a run does not have, or has damaged, is said on the page. The exit code is 1 if a directory holds no run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.tracking.atomic import replacing
from dtrain.tracking.history import read_all
from dtrain.tracking.report_page import report_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.report",
        description="Shows runs as one self-contained HTML file: numbers, curves (several runs overlaid), and what differs "
        "between their configs.",
    )
    parser.add_argument("runs", metavar="DIR", nargs="+", type=Path, help="directory of a run, running or ended")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file (default: report.html in the first DIR)")
    options = parser.parse_args(arguments)
    out = options.out or options.runs[0] / "report.html"
    try:
        runs = read_all(options.runs)
        page = report_page(runs, time.time()).encode()
        with replacing(out) as file:
            file.write(page)
    except (ValueError, OSError) as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        for gap in run.gaps:
            print(f"report: {run.label}: {gap}", file=sys.stderr)
    print(out.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
