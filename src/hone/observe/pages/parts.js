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

const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

function element(tag, className, html) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (html) node.innerHTML = html;
  return node;
}

// ---- alarms beside the curve that they are about

const alarmsOf = (stage, name) => data.alarms.filter(a => (!stage || a.stage === stage) && a.metric === name);
const alarmSteps = a => `${a.ended === null ? "since step" : "steps"} ${a.since}${a.ended === null ? "" : ` to ${a.ended}`}`;
const isAdvice = a => a.level === "tuning";
const alarmLine = a => `<span class="${isAdvice(a) ? "soft" : "neg"}" title="${esc(a.evidence.join("\n"))}">${isAdvice(a) ? "advice: " : ""}${esc(a.name)}, ${esc(alarmSteps(a))}</span>: ${esc(a.what)} <b>Change:</b> ${esc(a.change)}`;

// ---- theme

const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
byId("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  dispatchEvent(new Event("theme"));
});

// ---- keyboard: / goes to the search

addEventListener("keydown", event => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || !byId("search")) return;
  event.preventDefault();
  byId("search").focus();
});
