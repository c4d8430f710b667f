// ---- charts: uPlot (uplot/) in a card with a legend that reads values; this file says what is drawn, not how

const HEIGHT = 170, LEFT = 46;
const DASHES = [[], [8, 4], [2, 3]], STYLES = ["solid", "dashed", "dotted"];
const plots = new Map(); // key -> {plot, card}: charts on the page
const zooms = new Map(); // key -> {min, max} of x: what a reader has zoomed into, for the next redraw
let colors = {};

const cssColor = name => colors[name] ??= getComputedStyle(root).getPropertyValue(name).trim();
const colorOf = (s, k) => s.color || COLORS[k % COLORS.length];
addEventListener("theme", () => { colors = {}; plots.forEach(({ plot }) => plot.redraw()); });

// Noisy: it goes up and down several times its own range. Only then is a smoothed line drawn over it.
function isNoisy(values) {
  const found = finite(values);
  if (found.length < 30) return false;
  const travelled = found.slice(1).reduce((sum, v, i) => sum + Math.abs(v - found[i]), 0);
  return travelled > 3 * (Math.max(...found) - Math.min(...found));
}

// Measured in few steps, such as every tenth: without a line over the gaps nothing would be seen of it.
const isSparse = values => finite(values).length < values.length / 2;

// A weighted mean of the neighbours on both sides, so that the line does not lag behind its points.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((value, at) => {
    if (value === null) return null;
    let sum = 0, mass = 0;
    for (let i = Math.max(0, at - 2 * reach); i <= Math.min(values.length - 1, at + 2 * reach); i++) {
      if (values[i] === null) continue;
      const weight = Math.exp(-0.5 * ((i - at) / reach) ** 2);
      sum += weight * values[i];
      mass += weight;
    }
    return sum / mass;
  });
}

// The scale of y: fractions from 0, and others too unless they stay far from it.
function rangeOf(low, high, unit) {
  if (low === null) return [0, 1];
  if (unit === "fraction") { low = Math.min(0, low); high = high > 0.5 ? Math.max(1, high) : high; }
  if (low > 0 && low < 0.5 * high) low = 0;
  if (high === low) { high += Math.abs(high) * 0.1 || 1; if (low !== 0) low -= Math.abs(low) * 0.1; }
  return [low, unit === "fraction" && high === 1 ? 1 : high + (high - low) * 0.04];
}

// Of the marks of an axis: as short as tells them apart.
function tickTexts(splits) {
  const short = splits.map(number);
  if (new Set(short).size === short.length) return short;
  const digits = Math.min(8, Math.max(0, Math.ceil(-Math.log10(Math.abs(splits[1] - splits[0])))));
  return splits.map(v => v.toFixed(digits));
}

// Lines that uPlot draws for the series of a chart: {of: place of the series, xs, ys, how: uPlot's options}.
function linesOf(series) {
  const areas = series.filter(s => s.kind === "area"), lines = [];
  series.forEach((s, k) => {
    const stroke = () => cssColor(colorOf(s, k)), single = s.xs.length === 1;
    const add = (ys, how) => lines.push({ of: k, xs: s.xs, ys, how: { stroke, spanGaps: false, points: { show: single, size: 6, fill: stroke }, ...how } });
    if (s.kind === "area") {
      const below = lines.length ? lines[lines.length - 1].ys : s.ys.map(() => 0);
      add(s.ys.map((v, i) => (v || 0) + below[i]), { width: 0, fill: () => cssColor(colorOf(s, k)) + "d9", points: { show: false } });
    } else if (s.kind === "dots") {
      add(s.ys, { width: 1.2, dash: s.dash || [3, 3], spanGaps: true, points: { show: true, size: 7, fill: stroke } });
    } else if (isSparse(s.ys)) {
      add(s.ys, { width: 1.7, dash: s.dash, spanGaps: true, points: { show: true, size: 4, fill: stroke } });
    } else if (isNoisy(s.ys)) {
      add(s.ys, { width: 1, alpha: 0.28 });
      add(smooth(s.ys), { width: 1.8, dash: s.dash });
    } else add(s.ys, { width: 1.7, dash: s.dash });
  });
  return { lines, bands: areas.slice(1).map((_, k) => ({ series: [k + 2, k + 1] })) };
}

// Before the lines: the healthy range, and the steps of alarms about this chart. Behind everything, clipped to the plot.
function drawRanges(plot, healthy, alarms) {
  const { ctx, bbox } = plot, low = plot.scales.y.min, high = plot.scales.y.max;
  const y = v => plot.valToPos(Math.min(high, Math.max(low, v)), "y", true), x = v => plot.valToPos(v, "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  if (healthy) {
    const top = y(healthy[1] ?? high), bottom = y(healthy[0] ?? low);
    ctx.fillStyle = cssColor("--good") + "1a";
    ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
    ctx.strokeStyle = cssColor("--good");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const limit of healthy) if (limit !== null && limit > low && limit < high) line(ctx, bbox.left, y(limit), bbox.left + bbox.width, y(limit));
  }
  for (const alarm of alarms.filter(a => !isAdvice(a))) {
    const from = x(alarm.since), to = x(alarm.ended ?? plot.scales.x.max);
    ctx.fillStyle = cssColor("--bad") + "1f";
    ctx.fillRect(from, bbox.top, Math.max(2 * devicePixelRatio, to - from), bbox.height);
  }
  ctx.restore();
}

// Over the lines: when alarms about this chart began, and what happened to the run, as marks at the top.
function drawMarks(plot, alarms, events) {
  const { ctx, bbox } = plot, size = 5 * devicePixelRatio;
  ctx.save();
  for (const [steps, color] of [[events.map(e => e.step), "--soft"], [alarms.filter(a => !isAdvice(a)).map(a => a.since), "--bad"]]) {
    ctx.strokeStyle = ctx.fillStyle = cssColor(color);
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const step of new Set(steps)) {
      const at = plot.valToPos(step, "x", true);
      if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1) continue;
      line(ctx, at, bbox.top, at, bbox.top + bbox.height);
      ctx.beginPath();
      ctx.moveTo(at - size, bbox.top);
      ctx.lineTo(at + size, bbox.top);
      ctx.lineTo(at, bbox.top + 1.4 * size);
      ctx.fill();
    }
  }
  ctx.restore();
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

const swatch = (color, dash = []) => `<i style="border-top:3px ${STYLES[DASHES.indexOf(dash)] || "solid"} var(${color})"></i>`;
const rangeWords = ([low, high]) => low === null ? `up to ${number(high)}` : high === null ? `from ${number(low)}` : `${number(low)} to ${number(high)}`;

// What a chart shows, in words, for who cannot see it.
function inWords(title, series, options, alarms) {
  const each = series.slice(0, 12).map(s => {
    const found = finite(s.ys);
    return `${s.label}: first ${number(found[0])}, last ${number(found.at(-1))}, lowest ${number(Math.min(...found))}, highest ${number(Math.max(...found))}`;
  });
  const more = series.length > 12 ? `; and ${series.length - 12} more lines` : "";
  const healthy = options.healthy ? `; healthy ${rangeWords(options.healthy)}` : "";
  return `${title}, by ${options.axis || "step"}. ${each.join("; ")}${more}${healthy}${alarms.map(a => `; ${isAdvice(a) ? "advice" : "alarm"} ${a.name}, ${alarmSteps(a)}`).join("")}`;
}

// Append a chart to a part of the page. series: {label, name, xs, ys, kind: "line" | "dots" | "area", color, dash};
// areas are stacked in their order. options: unit, meaning, axis, stage, wide, healthy: [low, high], events: [{step}].
// Charts of one stage move their cursors and zoom together. Without a value there is no chart.
function addChart(parent, title, series, options = {}) {
  series = series.filter(s => finite(s.ys).length);
  if (!series.length) return;
  const alarms = series.flatMap(s => alarmsOf(options.stage, s.name)), healthy = options.healthy;
  const card = element("div", "card" + (options.wide ? " wide" : ""));
  card.innerHTML = `<div class="row between"><h3 title="${esc(options.meaning || "")}">${esc(title)}</h3><span class="note">${esc(options.unit || "")}</span></div>
    <div class="plot" role="img" tabindex="0" aria-label="${esc(inWords(title, series, options, alarms))}"></div><div class="legend"></div>`;
  if (alarms.length) card.append(element("div", "note", alarms.map(alarmLine).join("<br>")));
  parent.append(card);
  const place = card.querySelector(".plot"), legend = card.querySelector(".legend");
  const { lines, bands } = linesOf(series), key = `${options.stage}/${title}`;
  const readOut = at => {
    legend.innerHTML = (at === null ? "" : `<span>${options.axis || "step"} <b>${number(Math.round(at))}</b></span>`) + series.map((s, k) => {
      const i = at === null ? s.ys.findLastIndex(v => v !== null) : nearest(s.xs, at);
      return `<span>${swatch(colorOf(s, k), s.dash)}${esc(s.label)} <b>${number(s.ys[i])}</b></span>`;
    }).join("") + (healthy ? `<span><i class="healthy"></i>healthy ${rangeWords(healthy)}</span>` : "");
  };
  const axis = { stroke: () => cssColor("--soft"), font: "11px system-ui, sans-serif", ticks: { show: false }, values: (_, splits) => tickTexts(splits) };
  const plot = new uPlot({
    width: widthOf(place), height: HEIGHT, padding: [8, 16, 0, 0], legend: { show: false }, bands,
    scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 0.5, high + 0.5] : [low, high] }, y: { range: (_, low, high) => rangeOf(low, high, options.unit) } },
    axes: [{ ...axis, size: 24, gap: 4, grid: { show: false }, space: 54, incrs: WHOLE_STEPS }, { ...axis, size: LEFT, gap: 4, space: 34, grid: { stroke: () => cssColor("--grid"), width: 1 } }],
    series: [{}, ...lines.map(l => l.how)],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 8 }, sync: { key: `${options.stage}`, setSeries: false } },
    hooks: {
      drawClear: [plot => drawRanges(plot, healthy, alarms)], draw: [plot => drawMarks(plot, alarms, options.events || [])],
      setCursor: [plot => readOut(plot.cursor.idx == null ? null : plot.data[0][plot.cursor.idx])],
    },
  }, uPlot.join(lines.map(l => [l.xs, l.ys])), place);
  place.addEventListener("keydown", event => moveByKey(plot, legend, event));
  place.addEventListener("pointermove", () => legend.removeAttribute("aria-live"));
  if (zooms.has(key)) plot.setScale("x", zooms.get(key));
  plots.set(key, { plot, card });
  sizes.observe(place);
  readOut(null);
}

const WHOLE_STEPS = [1, 2, 5].flatMap(m => Array.from({ length: 13 }, (_, p) => m * 10 ** p)).sort((a, b) => a - b);
const widthOf = place => Math.max(120, place.clientWidth);
const sizes = new ResizeObserver(entries => {
  for (const { target } of entries) plots.forEach(({ plot }) => {
    if (plot.root.parentElement === target && target.clientWidth && plot.width !== widthOf(target)) plot.setSize({ width: widthOf(target), height: HEIGHT });
  });
});

// Arrows read the next and the previous value, Home and End the first and the last, Escape stops reading.
function moveByKey(plot, legend, event) {
  const xs = plot.data[0], at = plot.cursor.idx ?? (event.key === "ArrowLeft" ? xs.length : -1);
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1, Escape: null }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  legend.setAttribute("aria-live", "polite");
  const left = next === null ? -10 : plot.valToPos(xs[Math.min(xs.length - 1, Math.max(0, next))], "x");
  plot.setCursor({ left, top: next === null ? -10 : 10 }, true, true);
}

// Before the charts of the page are drawn anew: keep what was zoomed into, and let the old ones go.
function forgetCharts() {
  plots.forEach(({ plot }, key) => {
    const xs = plot.data[0], { min, max } = plot.scales.x;
    if (min > xs[0] || max < xs.at(-1)) zooms.set(key, { min, max }); else zooms.delete(key);
    sizes.unobserve(plot.root.parentElement);
    plot.destroy();
  });
  plots.clear();
}

function nearest(xs, at) {
  let best = 0;
  xs.forEach((v, i) => { if (Math.abs(v - at) < Math.abs(xs[best] - at)) best = i; });
  return best;
}
