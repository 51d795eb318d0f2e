"use strict";
// Draws the charts of a report with uPlot: values below the cursor, runs to click on, zoom, a logarithmic axis.

const CHARTS = JSON.parse(document.getElementById("charts").textContent);
const PLOTS = new Map(); // index of the chart to its uPlot
const HIDDEN = new Set(); // indices of the runs that were clicked away
const WHOLE = [...Array(16).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power)); // distances of ticks

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function text(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e15)) return value.toExponential(2);
  return value.toLocaleString("en", Number.isInteger(value) ? {} : {maximumSignificantDigits: 4});
}

function tick(value) {
  if (value == null) return "";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: 4});
  return size && size < 1e-4 ? value.toExponential(0) : value.toLocaleString("en", {maximumSignificantDigits: 4});
}

// The value at the cursor; without a cursor the last one.
function shown(column, index) {
  return index == null ? column.findLast(value => value != null) : column[index];
}

// Columns of uPlot, and their series: of each line the values, and the ends of its band if it has one.
function columns(chart) {
  const tables = [], bands = [];
  const series = [{label: chart.x_label, value: (_, step) => step == null ? "last" : text(step)}];
  for (const line of chart.lines) {
    const [x, ...values] = line.columns;
    // A logarithmic axis has no place for zero.
    tables.push([x, ...values.map(column => chart.is_log ? column.map(value => value > 0 ? value : null) : column)]);
    const stroke = colour(line.colour), width = line.style === "thin" ? 0.8 : 1.6, at = series.length;
    const paths = {steps: uPlot.paths.stepped({align: 1}), dots: () => null}[line.style] ?? uPlot.paths.linear();
    const points = {size: 5, fill: stroke, stroke, ...{dots: {show: true, size: 7}, thin: {show: false}}[line.style]};
    const common = {run: line.run, show: !HIDDEN.has(line.run), spanGaps: true, stroke, width, paths};
    const value = (plot, _, number, index) => text(shown(plot.data[number], index));
    series.push({...common, label: line.label, value, dash: line.dashes, points, class: line.label ? null : "unnamed"});
    for (let end = 1; end < values.length; end++)
      series.push({...common, label: "", width: 0, points: {show: false}, class: "unnamed"});
    if (values.length > 1) bands.push({series: [at + 2, at + 1], fill: stroke + "30"});
  }
  return {data: uPlot.join(tables), series, bands};
}

// The first tick of a logarithmic axis has one digit: with more, uPlot 1.6 never comes to an end.
function firstTick(low) {
  const size = 10 ** Math.floor(Math.log10(low / 1.1));
  return Math.floor(low / 1.1 / size) * size;
}

function scales(chart, data) {
  const values = chart.is_log ? data.slice(1).flat().filter(value => value != null) : [];
  const base = Math.max(...values) < 1e3 * Math.min(...values) ? 2 : 10;
  const y = (_, low, high) => {
    if (low == null) return chart.is_log ? [1, 10] : [0, 1];
    if (chart.is_log && base === 2) return [2 ** Math.floor(Math.log2(low)), 2 ** Math.ceil(Math.log2(high))];
    if (chart.is_log) return [firstTick(low), high * 1.2];
    high = Math.min(high, chart.top ?? high);
    low = Math.min(chart.floor ?? low, high);
    const room = 0.05 * (high - low || Math.abs(high) || 1);
    return [chart.floor == null ? low - room : low, high + room];
  };
  const x = {linear: {}, log: {distr: 3}, symlog: {distr: 4, asinh: firstTick(chart.x_threshold)}}[chart.x_scale];
  const wide = (_, low, high) => chart.x_scale === "log" ? [firstTick(low), high * 1.2] : [low, high + 0.02 * (high - low)];
  return {x: {time: false, ...x, range: chart.x_label === "step" ? (_, low, high) => [low, Math.max(high, low + 1)] : wide},
    y: {range: y, distr: chart.is_log ? 3 : 1, log: base}};
}

function markRestarts(plot, chart) {
  const {ctx, bbox: {top, height}} = plot;
  for (const [run, name, step] of chart.restarts) {
    const x = plot.valToPos(step, "x", true);
    if (HIDDEN.has(run) || step < plot.scales.x.min || step > plot.scales.x.max) continue;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(name);
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.textAlign = "center";
    ctx.font = `${10 * devicePixelRatio}px system-ui`;
    ctx.fillText("▲", x, top + height);
    ctx.restore();
  }
}

// A run that is clicked away is hidden in all charts.
function toggle(plot, number, {show}) {
  const run = plot.series[number]?.run;
  if (show == null || run == null) return; // only the focus has changed, or the line belongs to no run
  show ? HIDDEN.delete(run) : HIDDEN.add(run);
  for (const each of PLOTS.values())
    each.series.forEach((other, place) => other.run === run && other.show !== show && each.setSeries(place, {show}, false));
}

function draw(box) {
  const place = Number(box.dataset.chart), chart = CHARTS[place];
  const zoom = PLOTS.get(place)?.scales.x;
  PLOTS.get(place)?.destroy();
  const ink = colour("soft"), grid = {stroke: colour("line"), width: 1}, ticks = {show: false};
  const {data, series, bands} = columns(chart);
  const whole = chart.is_whole && {incrs: WHOLE};
  // On an axis of less than two decades, uPlot would label the powers of ten only.
  const [first, last] = [data[0].find(x => x > 0), data[0].at(-1)];
  const narrow = chart.x_scale === "log" && last < 100 * first
    && {filter: (_, splits) => splits.map(value => /^[125]/.test(value.toExponential()) ? value : null)};
  const axis = {stroke: ink, grid, ticks, font: "11px system-ui", values: (_, splits) => splits.map(tick)};
  const plot = new uPlot({
    width: box.clientWidth, height: 230, series, bands, scales: scales(chart, data),
    axes: [{...axis, size: 30, ...whole, ...narrow, ...(chart.x_label !== "step" && {label: chart.x_label, labelSize: 16, labelFont: axis.font})},
      {...axis, size: 58}],
    cursor: {y: false, focus: {prox: 20}, ...(chart.x_label === "step" ? {sync: {key: "step", scales: ["x", null]}} : {hover: {skip: []}})},
    focus: {alpha: 0.25},
    hooks: {setSeries: [toggle], draw: [plot => markRestarts(plot, chart)]},
  }, data, box);
  PLOTS.set(place, plot);
  box.dataset.drawn = "";
  if (zoom?.min != null) plot.setScale("x", {min: zoom.min, max: zoom.max});
}

const boxes = [...document.querySelectorAll("[data-chart]")];
boxes.forEach(draw);
for (const button of document.querySelectorAll("button.log"))
  button.addEventListener("click", () => {
    const box = button.closest("figure").querySelector("[data-chart]"), chart = CHARTS[box.dataset.chart];
    button.setAttribute("aria-pressed", chart.is_log = !chart.is_log);
    draw(box);
  });
addEventListener("resize", () => boxes.forEach(box =>
  PLOTS.get(Number(box.dataset.chart)).setSize({width: box.clientWidth, height: 230})));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => boxes.forEach(draw));
