"""``dtrain.report``: everything a run has in one file, and a sentence for everything that it does not have."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from dtrain.report import main
from dtrain.tracking.charts import COLOURS
from dtrain.tracking.history import History
from dtrain.tracking.status import write_status
from tests.tiny_run import tiny_run


def make_run(folder: Path, steps: int = 40, *, state: str = "finished", fp16: bool = True, **config: Any) -> Path:
    """A run directory as the trainer writes it, a few skipped steps included."""
    folder.mkdir(parents=True)
    skipped, scale = 0, 65536.0
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record: dict[str, Any] = {"step": step, "applied_steps": step - skipped, "epoch": step / 10}
            record |= {"samples": 64 * step, "time": 1.7e9 + step}
            if fp16 and step in (3, 4, 20):
                skipped, scale = skipped + 1, scale / 2
            else:
                record |= {"train/loss": 2.5 / step, "train/grad_norm": 1.0, "train/lr": 1e-3 * (1 - step / 50)}
            record |= {"precision/skipped_steps": skipped, "throughput/samples_per_second": 1000.0 + step}
            record |= {"time/step_seconds": 0.064, "time/data_wait_fraction": 0.1, "data/bad_samples": 0}
            if fp16:
                record["precision/loss_scale"] = scale
            if step % 10 == 0:
                record |= {"eval/loss": 3.0 / step, "eval/accuracy": step / 50}
            file.write(json.dumps(record) + "\n")
    best = {"checkpoint": {"best": "eval/accuracy", "best_mode": "max"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"dir": str(folder)}, **best, **config}))
    (folder / "overrides.yaml").write_text(yaml.safe_dump({"overrides": ["experiment=digits"], "config_dirs": []}))
    write_status(folder, state, steps, "SIGTERM" if state == "stopped" else None)
    return folder


class Page(HTMLParser):
    """The page's text, and what a browser would fetch or run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.rows: dict[str, list[str]] = {}
        self._row: list[str] | None = None
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag == "tr":
            self._row = []
        if tag in ("th", "td") and self._row is not None:
            self._row.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self._row:
            self.rows[self._row[0]] = self._row[1:]
            self._row = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._row:
            self._row[-1] += data

    @property
    def pictures(self) -> list[str]:
        """The SVG documents."""
        return [base64.b64decode(source.partition("base64,")[2]).decode() for source in self.sources]


def test_a_run_becomes_one_file_with_all_its_curves_and_nothing_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = Page(run / "report.html")
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "script" not in page.tags
    # loss, two evaluation metrics, learning rate, gradient norm, scale, throughput, wait; there is no GPU memory
    assert len(page.pictures) == 8
    assert all(svg.rstrip().endswith("</svg>") and "step" in svg for svg in page.pictures)
    assert page.rows["state"] == ["finished"]
    assert page.rows["attempted steps"] == ["40"]
    assert page.rows["applied steps"] == ["37"]
    assert page.rows["samples"] == ["2,560"]
    assert page.rows["train/loss, last"] == ["0.0625"]
    assert page.rows["eval/accuracy, last"] == ["0.8"]
    assert page.rows["best"] == ["eval/accuracy 0.8 at step 40"]
    assert page.rows["skipped steps"] == ["3"]
    assert page.rows["samples a second, median"] == ["1020"]
    assert page.rows["time between first and last record"] == ["0:00:39"]
    assert page.rows["started with"] == ["experiment=digits"]
    assert "No run has memory/max_allocated_gib" in page.text


def test_runs_are_overlaid_and_their_configs_compared(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", precision={"name": "fp16"}, model={"width": 8, "depth": None})
    second = make_run(tmp_path / "b", fp16=False, precision={"name": "bf16"}, model={"width": 8})
    out = tmp_path / "both.html"
    assert main([str(first), str(second), "--out", str(out)]) == 0
    assert not (first / "report.html").exists()
    page = Page(out)
    assert page.rows["precision.name"] == ["fp16", "bf16"]
    assert page.rows["model.depth"] == ["null", "\N{EN DASH}"]
    assert "model.width" not in page.rows
    assert "run.dir" not in page.rows
    assert page.rows["skipped steps"] == ["3", "0"]
    loss = page.pictures[0].lower()
    assert COLOURS[0].lower() in loss
    assert COLOURS[1].lower() in loss
    assert "No precision/loss_scale in b." in page.text


def test_marks_show_where_steps_were_skipped(tmp_path: Path) -> None:
    page = Page(make_report(make_run(tmp_path / "run")))
    marked = [svg for svg in page.pictures if "#b00020" in svg]
    assert len(marked) == 1
    # A marker is defined once and then used at each place.
    assert len(re.findall(r"<use [^>]*#b00020", marked[0])) == 3
    assert "Skipped steps: 3 in run." in page.text


def make_report(*runs: Path) -> Path:
    assert main([str(run) for run in runs]) == 0
    return runs[0] / "report.html"


def test_a_killed_run_shows_what_is_there_and_says_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", state="running", fp16=False)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[4] = json.dumps(json.loads(lines[4]) | {"train/loss": None}) + "\n"
    (run / "metrics.jsonl").write_text("".join(line for line in lines[:9]) + lines[9][:25])
    (run / "config.yaml").unlink()
    page = Page(make_report(run))
    assert "last line is torn" in page.text
    assert "no config.yaml" in page.text
    assert "torn" in capsys.readouterr().err
    assert page.rows["state"][0].startswith("running (last sign of life")
    assert page.rows["attempted steps"] == ["9"]
    assert "Values that were not finite: run (1)" in page.text
    assert "No run has been evaluated yet" in page.text
    assert "No run scales gradients" in page.text


def test_a_run_that_has_just_begun_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: new}\n")
    page = Page(make_report(tmp_path))
    for part in ("no metrics.jsonl", "no status.json", "No run has train/loss"):
        assert part in page.text
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "status.json").write_text("{}")
    page = Page(make_report(tmp_path))
    assert "metrics.jsonl is empty" in page.text
    assert "no 'state' among" in page.text


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[1], lines[2] = "\0\0\0\n", '["step"]\n'
    (run / "metrics.jsonl").write_text("".join(lines))
    history = History.read(run, "run")
    assert len(history.series("step")[1]) == 38
    assert history.gaps == ["metrics.jsonl: 2 lines are no records (the first is line 2); they are left out"]


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"), note={"text": "<img src=x onerror=y>"})
    other = make_run(tmp_path / "b", note={"text": "&amp;"})
    page = Page(make_report(run, other))
    assert "script" not in page.tags
    assert page.rows["note.text"] == ["<img src=x onerror=y>", "&amp;"]


@pytest.mark.parametrize(("name", "part"), [("missing", "is no directory"), (".", "holds no run")])
def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    assert main([str(tmp_path / name)]) == 1
    assert part in capsys.readouterr().err


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8_000, fp16=False)
    assert make_report(run).stat().st_size < 2_000_000


def test_a_real_run_has_no_gaps(tmp_path_factory: pytest.TempPathFactory, digits: Path, tmp_path: Path) -> None:
    run = tiny_run(tmp_path_factory.getbasetemp())
    out = tmp_path / "report.html"
    assert main([str(run), "--out", str(out)]) == 0
    page = Page(out)
    assert "Missing or damaged" not in page.text
    assert page.rows["attempted steps"] == ["15"]
    assert page.rows["state"] == ["finished"]
    assert len(page.pictures) == 7


@pytest.mark.browser
def test_a_browser_shows_the_curves(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    page = make_report(make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=30, fp16=False))
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2600", "--enable-logging=stderr"]
    done = subprocess.run(
        [browser, *flags, f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    for colour in (*COLOURS[:2], "#B00020"):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        # More than the swatches in the tables have.
        assert (abs(pixels - wanted).sum(axis=1) < 12).sum() > (1000 if colour in COLOURS else 20)
