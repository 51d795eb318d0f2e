"""Shared by all benchmarks: command line, interleaved rounds, tables, child processes, CPU time and test data.

* A benchmark compares *rows*: contenders, settings or datasets.
* In each *round* it measures every row once, in rotating order, so that a temporary slow-down of the machine affects all
  rows.
* A cell is the median over the rounds with ``(min-max)``. A ratio is the median of the ratios of each round.
* Under its tables a benchmark prints command, versions, machine and date. ``--json FILE`` writes these and every single
  measurement.

Benchmarks run from the root of a checkout, ``python -m benchmarks.NAME``; dtrain need not be installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

import dtrain
from dtrain.distributed.world import process_cpu_count

R = TypeVar("R", bound=Hashable)
T = TypeVar("T")

# -- command line and output


def command_line(doc: str | None, *, rounds: int | None = None, overrides: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; its help is the benchmark's docstring.

    Args:
        doc: The docstring.
        rounds: Default of ``--rounds``; None if the benchmark has no rounds.
        overrides: Whether it accepts ``KEY=VALUE`` words, which are config for dtrain.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="run everything once and small, to show that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to FILE")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="rounds to measure (default %(default)s)")
    if overrides:
        parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="config of the measured runs")
    return parser


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parses the command line; with ``--quick`` the options in ``quick`` have these defaults."""
    words, pairs = sys.argv[1:], []
    if "--quick" in words:
        parser.set_defaults(**quick)
    if parser.get_default("overrides") is not None:
        # Moved in front of the options: argparse would take a pair behind `--ranks 1 2` for a third rank.
        pairs = [word for word in words if "=" in word and not word.startswith("-")]
        words = [word for word in words if word not in pairs]
    options = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return parser.parse_args([*words[:options], *pairs, *words[options:]])


def interleaved(rounds: int, rows: Iterable[R], measure: Callable[[R], T]) -> dict[R, list[T]]:
    """Measures every row once in each round, starting with different rows; returns the measurements of each row."""
    order = list(rows)
    results: dict[R, list[T]] = {row: [] for row in order}
    stride = max(1, len(order) // max(1, rounds))
    for turn in range(rounds):
        first = turn * stride % len(order)
        for row in order[first:] + order[:first]:
            results[row].append(measure(row))
    return results


def column(results: Mapping[R, Sequence[Mapping[str, T]]], name: str) -> dict[R, list[T]]:
    """One value of measurements that have several."""
    return {row: [measurement[name] for measurement in measurements] for row, measurements in results.items()}


def spread(values: Sequence[float], decimals: int = 0) -> str:
    """``median (min-max)``."""
    middle, low, high = (f"{value:,.{decimals}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over the rounds of ``values / base``."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


class Table(Generic[R]):
    """A table that is filled column by column; cells of rows that a column does not mention stay empty.

    A row without measurements (an empty list) needs a package that is not installed.

    Args:
        title: Heading of the first column.
        rows: The rows.
        labels: The first column; None for the rows as text.
    """

    def __init__(self, title: str, rows: Iterable[R], labels: Mapping[R, str] | None = None) -> None:
        self._rows = list(rows)
        self._columns = [(title, dict(labels) if labels is not None else {row: str(row) for row in self._rows})]

    def text(self, heading: str, cells: Mapping[R, str]) -> None:
        """Adds a column of text."""
        self._columns.append((heading, dict(cells)))

    def medians(self, heading: str, values: Mapping[R, Sequence[float]], decimals: int = 0) -> None:
        """Adds a column of medians with their ranges."""
        self.text(
            heading, {row: spread(of_row, decimals) if of_row else "not installed" for row, of_row in values.items()}
        )

    def ratios(
        self,
        heading: str,
        values: Mapping[R, Sequence[float]],
        base: Sequence[float] | Mapping[R, Sequence[float]],
        decimals: int = 2,
    ) -> None:
        """Adds a column of ratios to ``base``: the same values for all rows, or those of each row."""
        bases = base if isinstance(base, Mapping) else dict.fromkeys(values, base)
        cells = {row: f"{ratio(values[row], bases[row]):.{decimals}f}" for row in values if values[row]}
        self.text(heading, cells)

    def __str__(self) -> str:
        lines = [[heading for heading, _ in self._columns]]
        lines += [[cells.get(row, "") for _, cells in self._columns] for row in self._rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )

    def show(self, *notes: str) -> None:
        """Prints the table with lines under it."""
        print(self, *notes, "", sep="\n", flush=True)


def rounds_note(rounds: int, extra: str = "") -> str:
    """The line under a table that explains its cells."""
    return f"{rounds} interleaved rounds, median (min-max){extra}"


def finish(arguments: argparse.Namespace, results: Mapping[str, Any], packages: Sequence[str] = ("torch",)) -> None:
    """Prints command, versions, machine and date; with ``--json`` writes them together with ``results``."""
    facts = {
        "command": shlex.join(["python", *_script(Path(sys.argv[0])), *sys.argv[1:]]),
        "versions": ", ".join([*map(version, ("dtrain", *packages, "numpy")), f"Python {platform.python_version()}"]),
        "machine": f"{machine()}; load {os.getloadavg()[0]:.1f} at the end",
        "date": date.today().isoformat(),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts | dict(results), indent=1) + "\n")


def _script(path: Path) -> list[str]:
    if path.parent.name == "scripts":
        return [f"scripts/{path.name}"]
    parts = path.with_suffix("").parts
    return ["-m", ".".join(part for part in parts[parts.index("benchmarks") :] if part != "__main__")]


def version(package: str) -> str:
    """Name and version of a package."""
    if package == "dtrain":  # a checkout need not be installed
        return f"dtrain {dtrain.__version__}"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


def machine() -> str:
    """Model of the CPU and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {process_cpu_count()} cores"


# -- processes


def python(*arguments: str | Path, ranks: int = 1) -> list[str]:
    """The command that starts Python with these arguments, under torchrun if there are several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *torchrun, *map(str, arguments)]


def run(command: Sequence[str], *, stdin: str | None = None, **environment: str) -> str:
    """Runs a command and returns its standard output.

    Raises:
        SystemExit: If it fails; shows the end of its standard error.
    """
    environ = {"OMP_NUM_THREADS": "1"} | os.environ | environment
    done = subprocess.run(command, input=stdin, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def in_new_process(function: Callable[..., T], *arguments: Any, **environment: str) -> T:
    """Calls a function of a benchmark in a Python process of its own; arguments and result travel as JSON."""
    module = importlib.import_module(function.__module__)
    name = module.__spec__.name if module.__spec__ is not None else module.__name__  # of a module that runs as __main__
    command = python("-m", "benchmarks.harness", name, function.__name__)
    result: T = json.loads(run(command, stdin=json.dumps(arguments), **environment).splitlines()[-1])
    return result


def answer(module: str, function: str) -> None:
    """The child process of ``in_new_process``: reads the arguments, prints the result."""
    arguments = json.loads(sys.stdin.read())
    print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)))


@dataclass(frozen=True)
class Run:
    """The directory of a run that has trained."""

    run_dir: Path

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def status(self) -> dict[str, Any]:
        """Content of status.json."""
        return dict(json.loads((self.run_dir / "status.json").read_text()))

    @property
    def seconds(self) -> float:
        """Time spent in the training loop."""
        return float(self.status["trained_seconds"])

    def values(self, *names: str) -> list[float]:
        """All values of these metrics."""
        return [float(record[name]) for record in self.records for name in names if name in record]

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if the run has none."""
        return values[-1] if (values := self.values(name)) else None


def train(run_dir: Path, *overrides: str, ranks: int = 1) -> Run:
    """Trains in ``run_dir`` without a tracker.

    Raises:
        SystemExit: If training fails.
    """
    run(python("-m", "dtrain.train", *train_overrides(run_dir, overrides), ranks=ranks))
    return Run(run_dir)


def train_overrides(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """The command line of ``train``, as the run stores it in overrides.yaml."""
    return [*overrides, "tracker=none", f"run.dir={run_dir}"]


def children(pid: int) -> set[int]:
    """Processes that a process has started and that still run (Linux: from /proc; elsewhere none)."""
    pids: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            pids |= set(map(int, (thread / "children").read_text().split()))
    return pids


def cpu_seconds() -> float:
    """CPU time of this process and of all its descendants, including those that ended (Linux: from /proc)."""
    ticks, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile; its time is in its parent's
            # Behind the name in parentheses: user and system time of the process, then of the children it waited for.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        pids += children(pid)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds_since(start: float) -> float:
    """What ``cpu_seconds`` has grown since it was ``start``, at least one tick of its clock, so that rates are finite."""
    return max(cpu_seconds() - start, 1 / os.sysconf("SC_CLK_TCK"))


@contextmanager
def scratch(keep: Path | None = None) -> Iterator[Path]:
    """A temporary folder, or ``keep``; dtrain's cache lies in it, so nothing stays in the user's."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep or Path(temporary)).resolve()
        os.environ |= {"DTRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        yield folder


def declare_torchvision_operators() -> None:
    """Makes torchvision importable where its operators are missing, as beside a CPU build of torch.

    litdata, mosaicml-streaming and Lightning import torchvision; the benchmarks use nothing of it.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        if _libraries:
            return  # a namespace is defined once
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


_libraries: list[torch.library.Library] = []  # operators disappear with their library

# -- test data

#: Fields of the shards that ``jpeg_shards`` writes.
IMAGE_FIELDS = {"jpg": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}
CLASSES = 10


def noise_images(number: int, size: int, classes: int, split: str = "train") -> dict[str, np.ndarray]:
    """Arrays for ``data=memory``, the same on every start; another ``split`` has other noise.

    Returns:
        ``image``, uint8 ``[number, size, size, 3]``, and ``label``, int64 ``[number]``, in ``[0, classes)``.
    """
    rng = _generator(split)
    pixels = np.frombuffer(rng.bytes(number * size * size * 3), np.uint8).reshape(number, size, size, 3)
    return {"image": pixels, "label": rng.integers(classes, size=number)}


def noise_tokens(number: int, length: int, vocabulary: int, split: str = "train") -> dict[str, np.ndarray]:
    """``tok``, uint16 ``[number, length]``, in ``[0, vocabulary)``: the field that ``dtrain pack text`` writes."""
    return {"tok": _generator(split).integers(vocabulary, size=(number, length), dtype=np.uint16)}


def _generator(split: str) -> np.random.Generator:
    return np.random.default_rng(["train", "test"].index(split))


def jpeg_shards(folder: Path, *, number: int, width: int, height: int, shards: int) -> list[str]:
    """Writes shards of ``jpg`` and ``cls`` members, the same bytes on every run; reuses those that are there.

    Each image is a different piece of one of scikit-learn's two sample photographs, scaled, mirrored, brightened and with
    noise, so that files have the size of photographs (about 60 KB at 500x375) and no cache meets the same bytes twice.

    Args:
        folder: Where to write.
        number: Number of images.
        width: Of every image, in pixels.
        height: Of every image, in pixels.
        shards: Number of shards.

    Returns:
        Paths of the shards.
    """
    from dtrain.data.writer import write_shards  # needs webdataset, which not every benchmark needs

    paths = sorted(map(str, folder.glob("train-*.tar")))
    if len(paths) == shards:
        return paths
    return [str(path) for path in write_shards(jpegs(number, (width, height)), folder, shards=shards, total=number)]


def jpegs(number: int, size: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """The samples of ``jpeg_shards``: ``__key__``, ``jpg`` and ``cls``; ``size`` is width and height."""
    from PIL import Image

    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise SystemExit("the images are made from scikit-learn's photographs: pip install scikit-learn") from error
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    rng = np.random.default_rng(0)
    aspect = size[0] / size[1]
    for place in range(number):
        photograph = photographs[place % len(photographs)]
        width = min(photograph.width, photograph.height * aspect) * rng.uniform(0.6, 1)
        left = rng.uniform(0, photograph.width - width)
        top = rng.uniform(0, photograph.height - width / aspect)
        box = (left, top, left + width, top + width / aspect)
        piece = photograph.resize(size, Image.Resampling.BICUBIC, box=box)
        pixels = np.asarray(piece, np.float32) * rng.uniform(0.7, 1.2)
        if rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        # Noise of a camera, without which the files would be smaller than photographs.
        pixels = pixels + rng.normal(0, 3, (*pixels.shape[:2], 1))
        stream = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
        yield {"__key__": f"{place:08d}", "jpg": stream.getvalue(), "cls": int(rng.integers(CLASSES))}


if __name__ == "__main__":
    answer(*sys.argv[1:])
