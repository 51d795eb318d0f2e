"""The installed package. scripts/check_package.sh checks the files of the wheel and the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has dtrain from the wheel, and everything else from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True, timeout=240)
    venv.create(folder / "venv", symlinks=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *folder.glob("*.whl")], check=True, timeout=120)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_a_program_with_annotations_passes_strict_type_checks_against_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    program = shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed]
    # Options and cache of the checkout: analysing torch takes most of the time, and is then done once.
    mypy += ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    # Only what is installed: not the checkout.
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    checked = subprocess.run(
        [*mypy, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
