"use strict";
let data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];

// ---- small helpers: text from the run reaches the page through esc() or textContent only

const esc = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const byId = id => document.getElementById(id);
const finite = values => (values || []).filter(v => v !== null && v !== undefined);

function number(v) {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (size >= 1e6) return (v / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return (v / 1e3).toFixed(1) + "k";
  if (size >= 100) return v.toFixed(0);
  if (size !== 0 && size < 1e-3) return v.toExponential(1);
  return String(+v.toPrecision(3));
}

function duration(seconds) {
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s} s` : `${seconds < 10 ? seconds.toFixed(1) : s} s`;
}

function element(tag, className, html) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (html) node.innerHTML = html;
  return node;
}

// ---- charts: an SVG string per panel, redrawn never; the cursor is moved over it

const W = 420, H = 170, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 20;

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// Noisy: it goes up and down several times its own range. Only then is a smoothed line drawn over it.
function isNoisy(values) {
  const found = finite(values);
  if (found.length < 30) return false;
  const travelled = found.slice(1).reduce((sum, v, i) => sum + Math.abs(v - found[i]), 0);
  return travelled > 3 * (Math.max(...found) - Math.min(...found));
}

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

function path(xs, ys, x, y) {
  let d = "", pen = false;
  ys.forEach((v, i) => {
    if (v === null) { pen = false; return; }
    d += `${pen ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    pen = true;
  });
  return d;
}

// series: {label, xs, ys, kind: "line" | "dots" | "area"}; areas are stacked in their order
function chart(title, series, options = {}) {
  series = series.filter(s => finite(s.ys).length);
  if (!series.length) return null;
  const width = options.wide ? W * 3 : W, areas = series.filter(s => s.kind === "area");
  const stackTops = [];
  areas.forEach((s, k) => stackTops.push(s.ys.map((v, i) => (v || 0) + (k ? stackTops[k - 1][i] : 0))));
  const all = areas.length ? [0, ...stackTops[areas.length - 1]] : series.flatMap(s => finite(s.ys));
  const xAll = series.flatMap(s => s.xs), x0 = Math.min(...xAll), x1 = Math.max(...xAll);
  let y0 = Math.min(...all), y1 = Math.max(...all);
  if (options.unit === "fraction") { y0 = Math.min(0, y0); y1 = y1 > 0.5 ? 1 : y1; }
  if (y0 > 0 && y0 < 0.5 * y1) y0 = 0;
  if (y1 === y0) { y1 += Math.abs(y1) * 0.1 || 1; if (y0 !== 0) y0 -= Math.abs(y0) * 0.1; }
  y1 += options.unit === "fraction" && y1 === 1 ? 0 : (y1 - y0) * 0.04;
  const x = v => LEFT + (v - x0) / (x1 - x0 || 1) * (width - LEFT - RIGHT);
  const y = v => H - BOTTOM - (v - y0) / (y1 - y0) * (H - TOP - BOTTOM);
  const color = k => `var(${series[k].color || COLORS[k % COLORS.length]})`;
  let svg = "";
  for (const t of ticks(y0, y1, 4)) svg += `<line x1="${LEFT}" x2="${width - RIGHT}" y1="${y(t)}" y2="${y(t)}" stroke="var(--grid)"/><text x="${LEFT - 7}" y="${y(t) + 4}" text-anchor="end">${number(t)}</text>`;
  for (const t of ticks(x0, x1, options.wide ? 10 : 5)) if (Number.isInteger(t)) svg += `<text x="${x(t)}" y="${H - 4}" text-anchor="middle">${number(t)}</text>`;
  series.forEach((s, k) => {
    if (s.kind === "area") {
      const below = k ? stackTops[k - 1] : s.ys.map(() => 0), back = s.xs.map((_, i) => i).reverse();
      svg += `<path d="${path(s.xs, stackTops[k], x, y)}${back.map(i => `L${x(s.xs[i]).toFixed(1)} ${y(below[i]).toFixed(1)}`).join("")}Z" fill="${color(k)}" opacity="0.85"/>`;
    } else if (s.kind === "dots") {
      svg += `<path d="${path(s.xs, s.ys, x, y)}" fill="none" stroke="${color(k)}" stroke-width="1.2" stroke-dasharray="3 3"/>`;
      s.ys.forEach((v, i) => { if (v !== null) svg += `<circle cx="${x(s.xs[i]).toFixed(1)}" cy="${y(v).toFixed(1)}" r="3.4" fill="${color(k)}" stroke="var(--card)" stroke-width="1.2"/>`; });
    } else {
      const noisy = isNoisy(s.ys);
      svg += `<path d="${path(s.xs, s.ys, x, y)}" fill="none" stroke="${color(k)}" stroke-width="${noisy ? 1 : 1.7}" opacity="${noisy ? 0.28 : 1}" stroke-linejoin="round"/>`;
      if (noisy) svg += `<path d="${path(s.xs, smooth(s.ys), x, y)}" fill="none" stroke="${color(k)}" stroke-width="1.8" stroke-linejoin="round"/>`;
      if (s.xs.length === 1) svg += `<circle cx="${x(s.xs[0])}" cy="${y(s.ys[0])}" r="3" fill="${color(k)}"/>`;
    }
  });
  svg += `<line class="cursor" y1="${TOP}" y2="${H - BOTTOM}" stroke="var(--soft)" stroke-width="1" visibility="hidden"/>`;
  const card = element("div", "card" + (options.wide ? " wide" : ""));
  card.innerHTML = `<div class="row between"><h3 title="${esc(options.meaning || "")}">${esc(title)}</h3><span class="note">${esc(options.unit || "")}</span></div>
    <svg viewBox="0 0 ${width} ${H}" role="img" aria-label="${esc(title)}">${svg}</svg><div class="legend"></div>`;
  const legend = card.querySelector(".legend");
  const readOut = at => {
    legend.innerHTML = (at === null ? "" : `<span>${options.axis || "step"} <b>${number(Math.round(at))}</b></span>`) + series.map((s, k) => {
      const i = at === null ? s.ys.findLastIndex(v => v !== null) : nearest(s.xs, at);
      return `<span><i style="background:${color(k)}"></i>${esc(s.label)} <b>${number(s.ys[i])}</b></span>`;
    }).join("");
  };
  readOut(null);
  const alarms = series.flatMap(s => alarmsOf(options.stage, s.name));
  if (alarms.length) card.append(element("div", "note", alarms.map(alarmLine).join("<br>")));
  card.cursor = at => {
    const line = card.querySelector(".cursor");
    line.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) { const px = x(Math.min(x1, Math.max(x0, at))); line.setAttribute("x1", px); line.setAttribute("x2", px); }
    readOut(at);
  };
  const svgNode = card.querySelector("svg");
  svgNode.addEventListener("pointermove", event => {
    const box = svgNode.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * width;
    const at = x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0), longest = series.reduce((a, b) => b.xs.length > a.xs.length ? b : a);
    moveCursors(card, longest.xs[nearest(longest.xs, at)]);
  });
  svgNode.addEventListener("pointerleave", () => moveCursors(card, null));
  return card;
}

// ---- alarms beside the curve that they are about

const alarmsOf = (stage, name) => data.alarms.filter(a => (!stage || a.stage === stage) && a.metric === name);
const alarmSteps = a => `${a.ended === null ? "since step" : "steps"} ${a.since}${a.ended === null ? "" : ` to ${a.ended}`}`;
const alarmLine = a => `<span class="neg" title="${esc(a.evidence.join("\n"))}">${esc(a.name)}, ${esc(alarmSteps(a))}</span>: ${esc(a.what)} <b>Change:</b> ${esc(a.change)}`;

const moveCursors = (card, at) => card.closest(".stage").querySelectorAll(".card").forEach(c => c.cursor && c.cursor(at));

function nearest(xs, at) {
  let best = 0;
  xs.forEach((v, i) => { if (Math.abs(v - at) < Math.abs(xs[best] - at)) best = i; });
  return best;
}

// ---- theme

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
byId("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });

// ---- keyboard: / goes to the search

addEventListener("keydown", event => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || !byId("search")) return;
  event.preventDefault();
  byId("search").focus();
});
