
// ---- runs side by side: data.runs with their stages, data.settings that differ

const NAMES = data.runs.map(run => run.name.split("/").filter(Boolean).at(-1));
const LABELS = NAMES.map((name, i) => NAMES.indexOf(name) === NAMES.lastIndexOf(name) ? name : data.runs[i].name);
const AXES = { "step": null, "samples": "x/samples", "tokens": "x/tokens", "seconds": "x/time_s" };

function table(id, rows) {
  const cells = row => row.slice(1).map(cell => `<td>${esc(cell)}</td>`).join("");
  byId(id).innerHTML = `<div class="scroll"><table class="fit"><thead><tr><td></td>${LABELS.map((name, i) => `<th>${swatch(COLORS[i % COLORS.length], DASHES[i % DASHES.length])}${esc(name)}</th>`).join("")}</tr></thead>
    <tbody>${rows.map(row => `<tr><th scope="row">${esc(row[0])}</th>${cells(row)}</tr>`).join("")}</tbody></table></div>`;
}

function evaluation(found) {
  if (!found) return "–";
  const error = found.error === undefined ? "" : ` ± ${number(found.error)}`;
  const best = found.best === undefined ? "" : ` (best ${number(found.best)} at ${found.best_step})`;
  return `${number(found.last)}${error}${best}`;
}

function drawTables() {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.evaluations)))];
  const ends = data.shown.filter(name => data.runs.some(run => name in run.ends));
  const value = v => typeof v === "string" ? v : JSON.stringify(v);
  table("runs", [
    ["state", ...data.runs.map(run => run.state)],
    ["steps", ...data.runs.map(run => Object.entries(run.steps).map(([stage, step]) => `${stage} ${step}`).join(", "))],
    ["samples", ...data.runs.map(run => number(run.samples))], ["time", ...data.runs.map(run => duration(run.time_s))],
    ...names.map(name => [name, ...data.runs.map(run => evaluation(run.evaluations[name]))]),
    ...ends.map(name => [name, ...data.runs.map(run => number(run.ends[name]))]),
    ["first alarm", ...data.runs.map(run => run.alarms[0] || "none")],
    ...(data.runs.some(run => run.broken_lines.length) ? [["damaged lines", ...data.runs.map(run => `${run.broken_lines.length} left out`)]] : []),
  ]);
  const keys = Object.entries(data.settings);
  if (keys.length) table("differing", keys.map(([key, values]) => [key, ...values.map(value)]));
  else byId("differing").innerHTML = `<div class="note">None.</div>`;
}

function seriesOfRun(i, stageName, name, axis) {
  const stage = data.runs[i].stages.find(s => s.name === stageName), evaluated = name.startsWith("eval/");
  const part = stage && (evaluated ? stage.evals : stage.steps);
  if (!part || !part.values[name]) return null;
  const xs = AXES[axis] ? part.values[AXES[axis]] : part.step;
  return { name, label: LABELS[i], xs, ys: part.values[name], kind: evaluated ? "dots" : "line", color: COLORS[i % COLORS.length], dash: DASHES[i % DASHES.length] };
}

function drawCurves() {
  const axis = byId("axis").value, words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const stages = [...new Set(data.runs.flatMap(run => run.stages.map(s => s.name)))];
  forgetCharts();
  byId("curves").replaceChildren();
  for (const stageName of stages) {
    const section = element("section", "stage", `<h2>Stage ${esc(stageName)}</h2>`), grid = element("div", "charts");
    const names = [...new Set(data.runs.flatMap(run => run.stages.filter(s => s.name === stageName).flatMap(s => [...Object.keys(s.evals.values), ...Object.keys(s.steps.values)])))];
    const isMain = name => data.shown.includes(name) || name.startsWith("eval/accuracy") && !/_se(\[|$)/.test(name) || name === "eval/reward_mean" || name.endsWith("/loss");
    const wanted = names.filter(n => !n.startsWith("x/")).filter(n => words.length ? words.every(word => n.includes(word)) : isMain(n));
    section.append(grid);
    byId("curves").append(section);
    for (const name of wanted) {
      const series = data.runs.map((_, i) => seriesOfRun(i, stageName, name, axis)).filter(Boolean);
      const known = data.metrics[name] || {};
      addChart(grid, name, series, { unit: known.unit, meaning: known.meaning, axis, stage: `${stageName} ${axis}` });
    }
  }
}

function draw() {
  byId("title").textContent = "Runs side by side";
  byId("content").innerHTML = `<section id="runs"></section><h2>Settings that differ</h2><section id="differing"></section>
    <div class="row" style="margin-top:32px"><label>Curves over <select id="axis">${Object.keys(AXES).map(a => `<option>${a}</option>`).join("")}</select></label>
    <input type="search" id="search" placeholder="Metrics by name, such as entropy" aria-label="Metrics by name"></div><div id="curves"></div>`;
  for (const id of ["axis", "search"]) byId(id).addEventListener("input", drawCurves);
  drawTables();
  drawCurves();
}

draw();
