"""Builds the sdist and the wheel, checks their files, and uses the wheel where nothing else of the checkout is visible.

    python scripts/check_package.py [FOLDER]

FOLDER receives the sdist and the wheel. The tools for it are installed into an environment that is deleted at the end. All
other packages are those of the Python that runs this file: dtrain's dependencies, with the extra ``demo``.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["build", "hatchling", "hatch-fancy-pypi-readme", "twine", "check-wheel-contents"]
PIP = ["pip", "--disable-pip-version-check", "-q"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    kept = parser.parse_args().folder
    version = re.search(r'__version__ = "(.+)"', (ROOT / "dtrain" / "__init__.py").read_text())[1]  # type: ignore[index]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        built = build(folder)
        check_files(*built, version)
        use(built[0], folder, version)
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
            for file in built:
                shutil.copy(file, kept)
    print("the wheel and the sdist are as they should be")


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist; an error if the sdist, unpacked elsewhere and at another time, does not build the same bytes."""
    tools = folder / "tools" / "bin" / "python"
    venv.create(folder / "tools", with_pip=True)
    run(tools, "-m", *PIP, "install", "-c", ROOT / "constraints.txt", *TOOLS, quiet=True)

    def built(source: Path, out: Path) -> list[Path]:
        run(tools, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, source, quiet=True)
        return sorted(out.iterdir())

    wheel, sdist = built(ROOT, folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "elsewhere")
    source = next((folder / "elsewhere").iterdir())
    for path in source.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700 if path.is_dir() or os.access(path, os.X_OK) else 0o600)
    for first, second in zip((wheel, sdist), built(source, folder / "again"), strict=True):
        require(filecmp.cmp(first, second, shallow=False), f"{first.name} differs if it is built from the sdist")

    run(tools, "-m", "twine", "check", "--strict", wheel, sdist)
    run(folder / "tools" / "bin" / "check-wheel-contents", "--config", ROOT / "pyproject.toml", wheel)
    return wheel, sdist


def check_files(wheel: Path, sdist: Path, version: str) -> None:
    """The wheel has the package with ``conf`` inside it, the sdist has the repository, and both have nothing else."""
    info = f"dtrain-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        got = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    want = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    want |= {f"{info}/licenses/{name}" for name in ("LICENSE", "dtrain/report/uplot/LICENSE")}
    for place, inside in ((ROOT / "dtrain", "dtrain"), (ROOT / "conf", "dtrain/conf")):
        files = (path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        want |= {f"{inside}/{path.relative_to(place).as_posix()}" for path in files}
    require("dtrain/py.typed" in want and got == want, f"the files of the wheel: {sorted(got ^ want)}")
    require(metadata["Version"] == version, f"version {metadata['Version']}, want {version}")
    relative = re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.get_payload())
    require(not relative, f"links that PyPI cannot follow: {relative}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    # Nothing is known without git, such as in an unpacked sdist.
    listed = subprocess.run(["git", "-c", "core.quotePath=false", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = set(listed.stdout.splitlines())
    require(bool(listed.returncode) or packed == tracked, f"the files of the sdist: {sorted(packed ^ tracked)}")


def use(wheel: Path, folder: Path, version: str) -> None:
    """Trains, reports, exports and predicts with the wheel."""
    venv.create(folder / "user", symlinks=True)
    site = next((folder / "user").glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    python = folder / "user" / "bin" / "python"
    run(python, "-m", *PIP, "install", "--no-deps", "--ignore-installed", wheel, quiet=True)
    work = folder / "work"
    work.mkdir()

    def dtrain(*arguments: str) -> str:
        return run(python.with_name("dtrain"), *arguments, cwd=work, quiet=True)

    where = run(python, "-c", "import dtrain; print(dtrain.__file__)", cwd=work, quiet=True)
    require(Path(where.strip()).is_relative_to(site), f"dtrain is {where.strip()}, not that of the wheel")
    require(version in dtrain("--version"), "dtrain --version")
    require("train" in dtrain("--help"), "dtrain --help")
    dtrain("train", "--nproc", "2", "experiment=digits", "run.dir=run", "train.max_steps=3", "tracker=none")
    dtrain("report", "run")
    require("uPlot" in (work / "run" / "report.html").read_text(), "the report has no charts")
    dtrain("export", "run.dir=run", "export.out=artefact")
    picture = "import numpy, PIL.Image; PIL.Image.fromarray(numpy.zeros((8, 8, 3), numpy.uint8)).save('digit.png')"
    run(python, "-c", picture, cwd=work)
    require("digit.png" in dtrain("predict", "artefact", "digit.png"), "dtrain predict")


def run(*command: object, cwd: Path = ROOT, quiet: bool = False) -> str:
    """Runs a command without the checkout on its path; returns its output, which is shown if it fails or is not quiet."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if done.returncode or not quiet:
        print(done.stdout, end="", flush=True)
    require(not done.returncode, f"{' '.join(map(str, command))} failed with exit code {done.returncode}")
    return done.stdout


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(f"error: {message}")


if __name__ == "__main__":
    main()
