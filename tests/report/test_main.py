"""``dtrain.report``: the page shows what a run directory has, and names what it lacks."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from dtrain.launch import __main__ as launch
from dtrain.report.__main__ import main
from dtrain.runs.history import History
from dtrain.runs.run_dir import write_status
from dtrain.tracking.sinks import write_media
from tests.report.runs_for_tests import point_of, run_of


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
    best = {"checkpoint": {"best": "eval/accuracy", "best_mode": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"dir": str(folder)}, **best, **config}))
    (folder / "overrides.yaml").write_text(yaml.safe_dump({"overrides": ["experiment=digits"], "config_dirs": []}))
    counts = {"parameters": 11_181_642, "trained_parameters": 5130}
    write_status(folder, state, steps, "SIGTERM" if state == "stopped" else None, **counts)
    return folder


class Page(HTMLParser):
    """The page's text, and what a browser would fetch or run.

    Attributes:
        tags: Name of each element.
        sources: What the browser would load.
        ids: All ids.
        text: The text of the page, without its CSS and scripts.
        rows: First cell of each row of the tables to the other cells.
        scripts: Content of each script.
        policy: The content security policy.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.rows: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.policy = ""
        self.content = path.read_text()
        self._row: list[str] | None = None
        self._charts: list[tuple[str, int | None]] = []
        self.feed(self.content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.sources += [given[name] for name in ("src", "href", "xlink:href", "srcset") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if given.get("role") == "img":
            self._charts.append((given["aria-label"], int(given["data-chart"]) if "data-chart" in given else None))
        if tag == "tr":
            self._row = []
        if tag in ("th", "td") and self._row is not None:
            self._row.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self._row:
            self.rows[self._row[0]] = self._row[1:]
            self._row = None

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data
            if self._row:
                self._row[-1] += data

    @property
    def charts(self) -> dict[str, list[dict[str, Any]]]:
        """Title to the lines that have a name; empty for a chart of bars."""
        charts = json.loads(self.scripts[0])
        lines = {title: [] if number is None else charts[number]["lines"] for title, number in self._charts}
        return {title: [line for line in each if line["label"]] for title, each in lines.items()}


def test_a_run_becomes_one_file_with_all_its_curves_and_nothing_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "report.html")
    page = Page(run / "report.html")
    assert all(source.startswith("#") for source in page.sources)
    assert not {"link", "iframe", "object"} & set(page.tags)
    _, *scripts = page.scripts
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{one}'" for one in hashes)
    assert page.policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {sources}"
    assert list(page.charts) == [
        *("Training loss", "Learning rate", "Gradient norm, before clipping", "Loss scale and skipped steps"),
        *("eval/loss", "eval/accuracy", "Where the time goes", "Step time (seconds, mean between records)"),
        *("Waiting for data (share of the step)", "Throughput (samples per second)"),
    ]
    assert len(page.ids) == len(set(page.ids))
    assert page.rows["state"] == ["finished"]
    assert page.rows["attempted steps"] == ["40"]
    assert page.rows["applied steps"] == ["37"]
    assert page.rows["samples"] == ["2,560"]
    assert page.rows["train/loss, last"] == ["0.0625"]
    assert page.rows["eval/accuracy, last"] == ["0.8"]
    assert page.rows["eval/accuracy, best"] == ["0.8 at step 40, largest"]
    assert page.rows["eval/loss, best"] == ["0.075 at step 40, smallest"]
    assert page.rows["parameters"] == ["5,130 of 11,181,642 trained"]
    assert page.rows["skipped steps"] == ["3"]
    assert page.rows["samples per second, median"] == ["1,020"]
    assert page.rows["time between first and last record"] == ["39 s"]
    assert page.rows["started with"] == ["experiment=digits"]
    assert "No run has logged any memory/ metric." in page.text


def test_a_directory_of_runs_is_a_table_of_them_on_the_page_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        rate, seed = 10.0 ** -(number % 4), number // 4
        settings = {"optimizer.lr": rate, "run.seed": seed}
        point_of(tmp_path / "sweep" / str(number), settings, [number / 100], best="eval/accuracy")
    alone = make_run(tmp_path / "<i>alone", steps=10)
    (tmp_path / "sweep" / "dead").mkdir()
    (tmp_path / "sweep" / "dead" / ".lock").touch()
    assert main([str(tmp_path / "sweep"), str(alone)]) == 0
    page = Page(tmp_path / "sweep" / "report.html")
    assert "14 runs" in page.text
    assert page.rows["best 1"][:3] == ["finished", "9 s", "<i>alone"]
    assert page.rows["2"][:7] == ["finished", "\N{EN DASH}", "11", "\N{EN DASH}", "0.001", "2", "0.1100"]
    assert "failed before its first step" in page.text
    assert "shown for 7 of 14 runs" in page.text
    assert "Best eval/accuracy over optimizer.lr" in page.charts
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:6] == ["*", "1", "finished", "9", "s", "<i>alone"]
    assert [line.split()[3] for line in out[2:5]] == ["11", "10", "9"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_the_points_of_a_sweep_are_found_by_the_settings_that_were_swept(tmp_path: Path, digits: Path) -> None:
    sweep = ("experiment=digits", "tracker=none", "train.max_steps=2", f"run.dir={tmp_path / 'r'}")
    assert launch.main(["--multirun", *sweep, "precision=fp32,bf16", "run.seed=1,2"]) == 0
    page = Page(make_report(tmp_path))
    assert {tuple(page.rows[place][3:5]) for place in ("best 1", "2", "3", "4")} == {
        (precision, seed) for precision in ("fp32", "bf16") for seed in "12"
    }


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
    assert [(line["label"], line["colour"]) for line in page.charts["Training loss"]] == [
        ("a", "run-0"),
        ("b", "run-1"),
    ]
    assert "No precision/loss_scale in b." in page.text


def test_runs_of_different_data_have_tables_of_their_own(tmp_path: Path) -> None:
    for name, data in (("a", "digits"), ("b", "digits"), ("c", "photos")):
        make_run(tmp_path / name, data={"eval": f"/data/{data}/test.tar"})
    page = Page(make_report(tmp_path))
    assert "measured on different data" in page.text
    assert page.text.index("Data: digits/test.tar") < page.text.index("Data: photos/test.tar")
    assert page.text.count("Ranked by eval/accuracy, the largest value first.") == 1  # one run is not ranked
    assert [label["label"] for label in page.charts["Training loss"]] == ["a", "b", "c"]
    assert "measured on different data" not in Page(make_report(tmp_path / "a", tmp_path / "b")).text


def test_marks_show_where_steps_were_skipped(tmp_path: Path) -> None:
    page = Page(make_report(make_run(tmp_path / "run")))
    marked = {title: line for title, lines in page.charts.items() for line in lines if line["colour"] == "bad"}
    assert list(marked) == ["Loss scale and skipped steps"]
    assert marked["Loss scale and skipped steps"]["columns"][0] == [3, 4, 20]
    assert "Skipped steps: 3 in run." in page.text


def make_report(*runs: Path) -> Path:
    assert main([str(run) for run in runs]) == 0
    return runs[0] / "report.html"


def test_a_killed_run_is_shown_and_what_it_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", state="running", fp16=False)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[4] = json.dumps(json.loads(lines[4]) | {"train/loss": None}) + "\n"
    (run / "metrics.jsonl").write_text("".join(line for line in lines[:9]) + lines[9][:25])
    (run / "config.yaml").unlink()
    page = Page(make_report(run))
    assert "last line is incomplete" in page.text
    assert "no config.yaml" in page.text
    assert "incomplete" in capsys.readouterr().err
    assert page.rows["state"][0].startswith("running (last activity")
    assert page.rows["attempted steps"] == ["9"]
    assert "Values that were not finite: run (1)" in page.text
    assert "No run has logged any eval/ metric." in page.text
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
    assert history.gaps == ["metrics.jsonl: lines that are not records are left out: 2, the first is line 2"]


def test_markup_in_a_run_directory_is_escaped(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--"
    run = make_run(tmp_path / "<script>$\\frac{alert(1)}_", note={"text": evil})
    other = make_run(tmp_path / "_b\x1b", note={"text": "&amp;"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, f"eval/{evil}": 1.0, f"train/{evil}": 1.0, f"memory/{evil}": 1.0}) + "\n")
    write_status(run, "failed", 40, evil)
    (run / "logs").mkdir()
    (run / "logs" / "bad-rank-00000.jsonl").write_text(json.dumps({"step": 1, "key": evil, "reason": evil}) + "\n")
    (run / "logs" / "hang-rank-00000.txt").write_text(
        f"2026-11-21 06:35:50 {evil}\nrank 0, step 1: {evil}\nlast samples: {evil}\n"
    )
    (run / "logs" / "rank-00000.log").write_text(f"2026-11-21 06:35:16,960 WARNING {evil}\n")
    folder = run / "media" / evil  # the slash makes it two levels
    folder.mkdir(parents=True)
    (folder / "step-000000001.txt").write_text(evil)
    (folder / "step-000000002.png").write_text(evil)
    (run / "evaluations").mkdir()
    (run / "evaluations" / f"{evil.replace('/', '')}.json").write_text(
        json.dumps({evil: evil, "classes": [{"name": evil, "recall": evil}]})
    )
    page = Page(make_report(run, other))
    assert "img" not in page.tags
    assert page.tags.count("script") == len(page.scripts) == 3
    assert page.rows["note.text"] == [evil, "&amp;"]
    # everywhere once at least: config, three metrics' titles, reason, sample, hang, message, two media, evaluation
    assert page.text.count(evil) > 12
    assert len([title for title in page.charts if evil in title]) == 3
    assert all(line["label"] for lines in page.charts.values() for line in lines)


@pytest.mark.filterwarnings("error")
def test_extreme_values_are_no_error(tmp_path: Path) -> None:
    values = [0, -1, 1e308, -1e308, 1e-308, 1e99, None, "x", True, 10**400, float("inf"), float("nan"), 5, [1], {}]
    names = ["time", "time/step_seconds", "time/data_wait_fraction", "time/restarts", "train/loss", "samples"]
    names += ["precision/loss_scale", "precision/skipped_steps", "data/bad_samples", "time/slowest_rank", "memory/x"]
    names += ["time/straggler_seconds", "time/step_seconds_p50", "time/step_seconds_p95", "eval/loss"]
    records = [
        {"step": step} | {name: values[(step * (place + 1) + place) % len(values)] for place, name in enumerate(names)}
        for step in range(700)
    ]
    run = run_of(tmp_path / "run", records, state="running", time="x", restarts=1e308, lost_seconds=None, reason={})
    page = Page(make_report(run.path))
    assert "Training loss" in page.charts
    assert page.rows["attempted steps"] == ["699"]


def test_more_runs_than_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / f"run-{number}", [{"step": 1, "train/loss": 1.0}]).path for number in range(8)]
    keys = re.findall(r'<th>(<svg class="key".*?</svg>)run-\d', Page(make_report(*runs)).content)
    assert len(set(keys)) == len(keys) / 2 == 8  # in two tables


def test_the_page_shows_pictures_texts_and_bad_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    for step in (10, 20, 30, 40):
        write_media(run / "media", step, "confusion", picture.getvalue())
    write_media(run / "media", 40, "samples", "Once upon a <time>")
    (run / "logs").mkdir()
    line = {"step": 9, "key": "train-000007.tar/digit_1250", "reason": "no JPEG"}
    (run / "logs" / "bad-rank-00000.jsonl").write_text(json.dumps(line) + "\n")
    page = Page(make_report(run))
    embedded = [source for source in page.sources if not source.startswith("#")]
    assert [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in embedded] == 3 * [
        picture.getvalue()
    ]
    for part in ("step 20step 30step 40", "Once upon a <time>", "1 time: no JPEG", "train-000007.tar/digit_1250"):
        assert part in page.text


def test_charts_are_written_as_pictures_under_safe_names(tmp_path: Path) -> None:
    records = [{"step": 1, "time": 2.0, "time/step_seconds": 0.1, "eval/../../x": 1.0, "eval/\ud800x": 3.0}]
    run = run_of(tmp_path / "_\x1b$run", records)
    folder = tmp_path / "pictures"
    assert main([str(run.path), "--out", str(tmp_path / "r.html"), "--png", str(folder)]) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["eval-x-1.png", "eval-x.png", "time-step-seconds.png", "time.png"]
    for path in folder.iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width > 900


def test_the_last_lines_say_how_each_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", fp16=False)
    write_status(second, "failed", 40, "rank 1 failed: ValueError: no")
    make_report(first, second)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("a: ")
    assert lines[-2].startswith("b: not healthy: failed: rank 1 failed: ValueError: no")


def test_control_characters_of_a_run_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", note=[{"text": 1}])
    other = make_run(tmp_path / "other", note=[{dt.date(2026, 1, 1): 1}])  # YAML has such keys, JSON has not
    write_status(run, "failed", 40, "\x1b[2J no\nreport: all is well \ud800")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "eval/\ud800": 1.0}) + "\n")
    out = tmp_path / "\udcff.html"  # the name of a file need not be UTF-8
    assert main([str(run), str(other), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines())
    assert "failed: ?[2J no?report: all is well ?" in printed.splitlines()[-3]
    assert Page(out).rows["note"] == ['[{"text": 1}]', "[{datetime.date(2026, 1, 1): 1}]"]


@pytest.mark.parametrize(("name", "part"), [("missing", "is not a directory"), (".", "holds no run")])
def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    assert main([str(tmp_path / name)]) == 1
    assert part in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_an_error_that_names_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=1)
    assert main([str(run), "--out", str(tmp_path / "missing" / "report.html")]) == 1
    assert "--out FILE" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m dtrain.report {make_run(tmp_path / 'run', steps=1)} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert (tmp_path / "run" / "report.html").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, precious = make_run(tmp_path / "run", steps=1), tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", ".report.html.staged"):
        (run / name).symlink_to(precious)
    assert main([str(run)]) == 0
    assert precious.read_text() == "mine"
    assert not (run / "report.html").is_symlink()


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8_000, fp16=False)
    assert make_report(run).stat().st_size < 2_000_000


@pytest.mark.slow  # the run
def test_a_real_run_has_no_gaps(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main([str(finished_run), "--out", str(out)]) == 0
    page = Page(out)
    assert "Missing or damaged" not in page.text
    assert page.rows["attempted steps"] == ["15"]
    assert page.rows["state"] == ["finished"]
    assert len(page.charts) >= 9
