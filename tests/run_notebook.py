"""Runs a notebook without a kernel: ``python -m tests.run_notebook FILE.ipynb`` prints what its cells print, and the first
error ends it. A line ``shown: TYPES`` stands for each output that is not text.

Not nbclient: the messages of a kernel pass through sockets, and on a busy machine an output is lost now and then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked_python import forked_python
from tests.whole_runs import ROOT


def run_notebook(path: Path, cwd: Path) -> str:
    """What the notebook prints when it is run from top to bottom in the folder ``cwd``."""
    pytest.importorskip("IPython")
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(cwd))),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(path.with_suffix(".ipython")),
    }
    command = [forked_python(), "-m", "tests.run_notebook", str(path)]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _main(path: str) -> None:
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    class Shown(DisplayPublisher):
        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            print("shown:", *data, flush=True)

    shell = InteractiveShell.instance(display_pub_class=Shown, colors="nocolor")
    for cell in json.loads(Path(path).read_text())["cells"]:
        if cell["cell_type"] == "code" and not shell.run_cell("".join(cell["source"])).success:
            raise SystemExit(1)


if __name__ == "__main__":
    _main(sys.argv[1])
