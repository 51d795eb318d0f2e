"""The report in a real browser: a run with all kinds of faults, overlaid runs, and a sweep."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.fault_hook import faulty
from dtrain.report.__main__ import main
from tests.browser import View, view
from tests.report.runs_for_tests import point_of, steady
from tests.report.test_search import trial
from tests.report.test_search import write as write_search
from tests.whole_runs import status, torchrun

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.usefixtures("digits")]

# Title, position and size of each chart.
CHARTS = """[...document.querySelectorAll('.charts [role=img]')].map(svg => {
    const place = svg.getBoundingClientRect();
    return [svg.getAttribute('aria-label'), place.left + scrollX, place.top + scrollY, place.width, place.height] })"""
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
COLOURS = """[document.body, ...document.querySelectorAll('.u-legend th, .u-legend td, .findings span, td, tbody th')].map(
    element => getComputedStyle(element).color)"""
# Texts that share a place with another text of the same chart or table, or are cut off at the edge of the page or of a box.
OVERLAPS = """[...document.querySelectorAll('.charts figure, .cards')].flatMap(box => {
    const places = [], found = [], walk = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const range = document.createRange();
        const text = walk.currentNode.data.trim();
        range.selectNodeContents(walk.currentNode);
        for (const {left, top, right, bottom, width} of range.getClientRects())
            if (width > 0 && text) places.push([left, top, right, bottom, text]);
    }
    const edge = document.documentElement.clientWidth;
    places.forEach((one, place) => {
        if (one[0] < 0 || one[2] > edge) found.push([one[4], 'is cut off']);
        const shared = (other, start) => Math.min(one[start + 2], other[start + 2]) - Math.max(one[start], other[start]);
        for (const other of places.slice(place + 1))
            if (shared(other, 0) > 1 && shared(other, 1) > 3) found.push([one[4], other[4]]);
    });
    return found })"""
CARDS = "[...document.querySelectorAll('.cards')].map(table => table.getBoundingClientRect().right)"
TEXT = "document.body.innerText"
TABLE_WIDTH = "document.querySelector('table').getBoundingClientRect().right"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A 2-rank digits run with a killed rank, bad samples, and steps skipped for a loss scale that is too large."""
    folder = tmp_path_factory.mktemp("report") / "run"
    faults = ("corrupt_sample@step=9", "nan@rank=1,step=47", "slow@rank=1,step=30,seconds=0.5", "kill@rank=1,step=60")
    command = ("experiment=digits", "precision=fp16", "precision.loss_scale.init=16777216", "train.max_epochs=4")
    more = ("tracker=none", "train.log_every=2", "checkpoint.every_steps=25", faulty(*faults), f"run.dir={folder}")
    assert torchrun(2, *command, *more).returncode != 0
    second = torchrun(2, *command, *more)
    assert second.returncode == 0, second.stderr
    assert status(folder)["restarts"] == 1
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 420])
def test_the_report_of_a_run_with_faults_is_readable_and_loads_nothing(
    run: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = tmp_path / "report.html"
    assert main([str(run), "--out", str(page)]) == 0
    seen = view(page, CHARTS, TOO_WIDE, COLOURS, PAPER, width=width, dark=dark)
    assert seen.complaints == []
    assert seen.requests == [page.as_uri()]
    assert seen.results[TOO_WIDE] == 0
    charts = seen.results[CHARTS]
    assert {"Training loss", "Loss scale and skipped steps", "Where the time goes"} <= {title for title, *_ in charts}
    pixels = np.asarray(Image.open(io.BytesIO(seen.picture)).convert("RGB")).astype(int)
    for title, *place in charts:
        left, top, wide, high = map(round, place)
        assert wide > 350, title
        assert high > (15 if title == "Where the time goes" else 150), title
        chart = pixels[top : top + high, left : left + wide]
        assert chart.shape[:2] == (high, wide), title
        assert ((chart.max(axis=2) - chart.min(axis=2)) > 60).sum() > 100, f"{title}: no coloured line"
    assert (_luminance(seen.results[PAPER]) < 0.1) == dark
    _is_readable(seen)


def test_overlaid_runs_are_readable_and_load_nothing(run: Path, tmp_path: Path) -> None:
    copies = []
    for name in "ab":
        copies.append(tmp_path / name)
        copies[-1].mkdir()
        for file in ("metrics.jsonl", "status.json", "config.yaml", "overrides.yaml"):
            (copies[-1] / file).write_bytes((run / file).read_bytes())
    page = tmp_path / "report.html"
    assert main([str(run), *map(str, copies), "--out", str(page)]) == 0
    seen = view(page, CHARTS, TOO_WIDE, width=420)
    assert seen.complaints == []
    assert seen.requests == [page.as_uri()]
    assert seen.results[TOO_WIDE] == 0
    assert all(wide > 350 for _, _, _, wide, _ in seen.results[CHARTS])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_table_of_a_sweep_is_readable_and_loads_nothing(tmp_path: Path, dark: bool) -> None:
    for number in range(30):
        settings = {"optimizer.lr": 1.2345 * 10.0 ** -(number % 5), "run.seed": number // 5}
        point_of(tmp_path / str(number), settings, [number / 40, number / 30])
    assert main([str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    seen = view(page, CHARTS, TOO_WIDE, COLOURS, PAPER, OVERLAPS, width=390, dark=dark)
    assert seen.complaints == []
    assert seen.requests == [page.as_uri()]
    assert seen.results[TOO_WIDE] == 0
    assert "Best eval/accuracy over optimizer.lr" in [title for title, *_ in seen.results[CHARTS]]
    assert seen.results[OVERLAPS] == []
    laptop = view(page, TABLE_WIDTH, width=1280)
    assert laptop.results[TABLE_WIDTH] <= 1280
    _is_readable(seen)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_long_names_do_not_overlap_values_and_are_shown_to_their_ends(tmp_path: Path, width: int, dark: bool) -> None:
    names = [f"{'a-run-with-a-long-name-' * 4}"[:78] + end for end in ("-1", "-2")] + ["_" * 79 + "x", "short"]
    for number, name in enumerate(names):
        data = {"data.eval": "/data/digits/test-*.tar" if number < 3 else "/data/photos/val.tar"}
        run = point_of(tmp_path / name, data | {"optimizer.lr": 0.1**number}, [0.5, None, 0.7])
        records = steady(30, **{"precision/loss_scale": 2.0**number, "precision/skipped_steps": number})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in records)
    assert main([str(tmp_path)]) == 0
    seen = view(tmp_path / "report.html", TOO_WIDE, OVERLAPS, CARDS, TEXT, COLOURS, PAPER, width=width, dark=dark)
    assert seen.complaints == []
    assert seen.results[TOO_WIDE] == 0
    assert seen.results[OVERLAPS] == []
    assert max(seen.results[CARDS]) <= width
    assert "measured on different data" in seen.results[TEXT]
    assert all(name in seen.results[TEXT] for name in names)
    _is_readable(seen)


def test_numbers_of_trials_and_steps_are_whole_and_a_short_logarithmic_axis_has_labels(tmp_path: Path) -> None:
    trials = [trial(number, "finished", 0.5, 0.1, "8") for number in range(3)]
    write_search(tmp_path, trials=trials)
    for number, rate in enumerate((0.003, 0.01, 0.05)):
        point_of(tmp_path / f"r{number}", {"optimizer.lr": rate}, [0.5 + rate])
    assert main([str(tmp_path)]) == 0
    splits = (
        "[...PLOTS].filter(([place]) => CHARTS[place].x_scale === 'linear').map(([_, plot]) => plot.axes[0]._splits)"
    )
    labels = "PLOTS.get(CHARTS.findIndex(chart => chart.x_scale === 'log')).axes[0]._values"
    seen = view(tmp_path / "report.html", splits, labels, width=390)
    assert seen.complaints == []
    assert all(len(ticks) > 1 for ticks in seen.results[splits])
    assert [tick for ticks in seen.results[splits] for tick in ticks if not float(tick).is_integer()] == []
    assert {"0.005", "0.01", "0.02", "0.05"} <= set(seen.results[labels])


def test_charts_show_values_below_the_cursor_hide_runs_zoom_and_have_a_logarithmic_axis(tmp_path: Path) -> None:
    for number, rate in enumerate((0.1, 0.2)):
        run = point_of(tmp_path / str(number), {"optimizer.lr": rate}, [0.5, 0.6, 0.7 + number / 10])
        with (run.path / "metrics.jsonl").open("a") as file:
            file.writelines(f'{{"step": {step + number}, "train/loss": {10 * rate / step}}}\n' for step in range(1, 21))
    assert main([str(tmp_path)]) == 0
    # The loss is the first chart. The cursor is placed as a mouse event would place it.
    plot = "const plot = PLOTS.get(0);"
    hover = f"{{ {plot} plot.setCursor({{left: plot.valToPos(10, 'x'), top: 20}}); }}"
    values = "[...PLOTS.get(0).root.querySelectorAll('.u-series:not(.unnamed) .u-value')].map(cell => cell.textContent)"
    click = "document.querySelector('.charts .u-series:nth-of-type(2) th').click()"
    shown = "[...PLOTS.values()].map(plot => plot.series.filter(line => line.run === 0).map(line => line.show))"
    zoom = f"{{ {plot} plot.setSelect({{left: 50, width: 100, top: 0, height: 99}}); plot.setScale('x', {{min: 5, max: 9}}); }}"
    log = "document.querySelector('button.log').click()"
    axis = "[PLOTS.get(0).scales.y.distr, PLOTS.get(0).scales.x.min, PLOTS.get(0).scales.x.max]"
    frame = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done({}), 50)))"
    steps = (
        hover,
        frame.format(1),
        values,
        click,
        frame.format(2),
        shown,
        zoom,
        frame.format(3),
        log,
        frame.format(4),
        axis,
    )
    seen = view(tmp_path / "report.html", *steps)
    assert seen.complaints == []
    # Ranked by accuracy, the run with 0.2 is first. Each run has a loss at step 10.
    assert seen.results[values] == ["10", "0.2222", "0.1"]
    assert [show for each in seen.results[shown] for show in each] == [False] * 2
    assert seen.results[axis] == [3, 5, 9]


def _is_readable(seen: View) -> None:
    paper = _luminance(seen.results[PAPER])
    for colour in set(seen.results[COLOURS]):
        light, deep = sorted((paper, _luminance(colour)), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5, f"{colour} on {seen.results[PAPER]}"


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
