// ---- the first alarm, on top of the page


function drawAlarms() {
  byId("alarms").innerHTML = data.broken ? `<p class="note">${esc(data.broken)}</p>` : "";
  if (!data.alarms.length) return;
  const [first, ...rest] = data.alarms;
  const row = (name, text) => `<dt class="soft">${esc(name)}</dt><dd>${esc(text)}</dd>`;
  byId("alarms").innerHTML += `<h2>${isAdvice(first) ? "Advice" : "First abnormal"}: ${esc(first.metric)}, ${esc(first.stage)} ${esc(alarmSteps(first))}</h2><div class="card"><dl>` +
    row(isAdvice(first) ? "advice" : "alarm", `${first.name} (${first.level}): ${first.pattern}`) + row("evidence", first.evidence.join("; ")) + row("likely cause", first.what) +
    row("change", first.change) + row("to confirm", first.confirm) + row("limit from", first.source) + `</dl></div>` +
    (rest.length ? `<details><summary class="soft">${rest.length} more${rest.some(isAdvice) ? ", advice among them" : ""}</summary><ul>${rest.map(a => `<li>${esc(a.stage)}: ${alarmLine(a)}</li>`).join("")}</ul></details>` : "");
}

// ---- the panels of a stage; names that a stage did not log leave no panel

const PANELS = [
  ["Reward", "reward", ["rollout/reward_mean", "eval/reward_mean"]],
  ["Accuracy", "fraction", ["rollout/accuracy", "eval/accuracy"]],
  ["Loss", "", ["sft/loss", "train/loss"]],
  ["Response length", "tokens", ["rollout/response_tokens_mean", "eval/response_tokens_mean"]],
  ["Entropy", "nats", ["train/entropy"]],
  ["KL to reference", "nats per token", ["train/kl_ref"]],
  ["Gradient norm", "", ["sft/grad_norm", "train/grad_norm"]],
  ["Learning rate", "", ["sft/lr", "train/lr"]],
  ["Clipped tokens", "fraction", ["train/clip_low_frac", "train/clip_high_frac"]],
  ["Groups without signal", "fraction", ["rollout/zero_std_group_frac"]],
  ["Truncated responses", "fraction", ["rollout/truncated_frac", "eval/truncated_frac"]],
  ["Speed", "tokens/s", ["rollout/tokens_per_s", "sft/tokens_per_s"]],
  ["Staleness", "policy updates", ["rollout/staleness_mean", "rollout/staleness_max"]],
  ["Groups waiting when an update begins", "groups", ["rollout/groups_ready", "rollout/groups_in_flight"]],
  ["Publishing weights", "s", ["time/publish_s"]],
  ["Memory", "GiB", ["memory/rss_gib", "memory/peak_rss_gib", "memory/cuda_peak_gib"]],
];

// ---- panels of one line for each engine, process or age; the first word in brackets is the line's name
const FAMILIES = [
  ["Score of each component", "score, before its weight", /^reward\/(.+)_mean$/, "line"],
  ["Age of the samples trained on", "fraction, by policy updates", /^rollout\/staleness_(\d+)_frac$/, "area"],
  ["Samples drawn by each engine", "samples per step", /^engine\/(.+)_samples$/, "line"],
  ["Queue of each engine", "samples, at most", /^engine\/(.+)_queue_peak$/, "line"],
  ["Cache of each engine, and its room", "tokens, at most", /^memory\/(.+_cache(?:_room)?)_tokens$/, "line"],
  ["Prompts found in the prefix cache", "fraction of their tokens", /^engine\/(.+)_prefix_hit_frac$/, "line"],
  ["Memory of each process", "GiB, resident", /^memory\/(.+)_process_rss_gib$/, "line"],
];

function familyOf(stage, pattern, kind) {
  const found = Object.keys(stage.steps.values).map(name => [name, pattern.exec(name)]).filter(([, match]) => match);
  return found.map(([name, match], k) => ({ name, label: match[1], xs: stage.steps.step, ys: stage.steps.values[name], kind, color: `--c${k % 7 + 1}` }));
}

const shortName = name => name.startsWith("eval/") ? "evaluation" + (name.match(/\[.*\]|@.*/) || [""])[0].replace(/^\[(.*)\]$/, ", $1") : name.split("/")[1].replace(/_(mean|frac|gib)$/, "").replaceAll("_", " ");

function seriesOf(stage, name) {
  const evaluated = name.startsWith("eval/"), part = evaluated ? stage.evals : stage.steps;
  if (!part.values[name]) return null;
  return { name, label: shortName(name), xs: part.step, ys: part.values[name], kind: evaluated ? "dots" : "line" };
}

function timeSplit(stage) {
  const { step, values } = stage.steps, whole = values["time/step_s"];
  if (!whole) return null;
  const phases = data.phases.filter(p => finite(values[`time/${p}_s`]).some(v => v > 0));
  if (!phases.length) return null;
  const xs = binned(step, 120), spent = phases.map(p => binned(values[`time/${p}_s`], 120));
  const series = phases.map((p, k) => ({ label: p, xs, ys: spent[k], kind: "area", color: COLORS[data.phases.indexOf(p)] }));
  const rest = binned(whole, 120).map((v, i) => Math.max(0, v - spent.reduce((sum, ys) => sum + ys[i], 0)));
  series.push({ label: "other", xs, ys: rest, kind: "area", color: "--c7" });
  return series;
}

function binned(values, most) {
  const size = Math.ceil(values.length / most), out = [];
  for (let i = 0; i < values.length; i += size) {
    const part = values.slice(i, i + size);
    out.push(part.reduce((sum, v) => sum + (v || 0), 0) / part.length);
  }
  return out;
}

// What never changes says nothing for this run; it is among the other metrics.
const hasContent = series => series.some(s => s.xs.length === 1 || alarmsOf(null, s.name).length || new Set(finite(s.ys)).size > 1);

function drawStage(stage) {
  const section = element("section", "stage");
  const count = stage.steps.count, averaged = !data.has_every_line ? ` · curves are made of ${number(count)} steps, evenly spaced` : count > stage.steps.step.length ? ` · a point is the mean of about ${Math.round(count / stage.steps.step.length)} steps` : "";
  section.innerHTML = `<h2>Stage ${esc(stage.name)}</h2><div class="note">${number(stage.last_step)} steps in ${duration(stage.seconds)}${averaged} · bold lines are smoothed · point at a chart, or go there with Tab and the arrow keys, to read it; drag to zoom in, double-click to zoom out</div>`;
  const grid = element("div", "charts"), shown = new Set(), charts = [];
  section.append(grid);
  for (const [title, unit, names] of PANELS) {
    const parts = title === "Accuracy" ? [...names, ...Object.keys(stage.evals.values).filter(n => n.startsWith("eval/accuracy["))] : names;
    const found = parts.map(n => seriesOf(stage, n)).filter(Boolean);
    if (!hasContent(found)) continue;
    parts.forEach(n => shown.add(n));
    charts.push([title, found, { unit, meaning: parts.map(n => data.metrics[n] && `${n}: ${data.metrics[n].meaning}`).filter(Boolean).join("\n") }]);
  }
  for (const [title, unit, pattern, kind] of FAMILIES) {
    const found = familyOf(stage, pattern, kind);
    if (!hasContent(found)) continue;
    found.forEach(s => shown.add(s.name));
    charts.push([title, found, { unit, meaning: (data.metrics[found[0].name] || {}).meaning }]);
  }
  const every = [...Object.keys(stage.steps.values), ...Object.keys(stage.evals.values)];
  for (const n of every.filter(n => !shown.has(n) && alarmsOf(stage.name, n).length)) {  // the curve that an alarm is about
    const known = data.metrics[n] || {}, s = seriesOf(stage, n);
    if (!s) continue;
    shown.add(n);
    charts.unshift([n, [s], { unit: known.unit, meaning: known.meaning }]);
  }
  charts.push(["Where each step's time went", timeSplit(stage) || [], { unit: "seconds per step", wide: true }]);
  const others = every.filter(n => !shown.has(n)).sort();
  if (others.length) {
    const more = element("details", "", `<summary class="soft">${counted(others.length, "more metric")} of this stage</summary>`), inner = element("div", "charts");
    more.append(inner);
    more.addEventListener("toggle", () => {
      if (inner.childElementCount) return;
      for (const n of others) {
        const known = data.metrics[n] || {}, s = seriesOf(stage, n);
        if (s) addStageChart(stage, inner, [n, [s], { unit: known.unit, meaning: known.meaning }]);
      }
    });
    section.append(more);
  }
  const marks = data.marks.filter(m => m.stage === stage.name);
  if (marks.length) section.append(element("details", "", `<summary class="soft">${counted(marks.length, "event")}, marked at the top of the curves</summary><ul>${marks.map(m => `<li>step ${m.step}: ${esc(m.what)}</li>`).join("")}</ul>`));
  byId("stages").append(section);
  for (const chart of charts) addStageChart(stage, grid, chart);
}

// With the events of the stage, and the range that is healthy for the metrics of the chart, where it is one.
function addStageChart(stage, parent, [title, series, options]) {
  const ranges = series.map(s => (data.healthy[stage.name] || {})[s.name]).filter(Boolean), same = new Set(ranges.map(String)).size === 1;
  addChart(parent, title, series, { ...options, stage: stage.name, healthy: same ? ranges[0] : undefined, events: data.marks.filter(m => m.stage === stage.name) });
}

// ---- summary

function drawSummary() {
  const { title, outcome, began_unix_s: began, ended_unix_s: ended } = data.summary;
  byId("title").textContent = title;
  const [what, when] = ended ? ["", ended] : ["began ", began];
  byId("outcome").textContent = `${outcome}${when ? ` · ${what}${new Date(when * 1000).toLocaleString()}` : ""}`;
  const tile = (label, value, note) => byId("tiles").append(element("div", "tile", `<span class="label">${esc(label)}</span><b>${esc(value)}</b><span class="note">${esc(note)}</span>`));
  const everywhere = name => data.stages.flatMap(s => [s.steps, s.evals].flatMap(part => (part.values[name] || []).map((v, i) => ({ v, step: part.step[i], stage: s.name })))).filter(p => p.v !== null);
  const change = (label, name) => {
    const points = everywhere(name);
    if (!points.length) return false;
    const best = points.reduce((a, b) => b.v > a.v ? b : a), last = points[points.length - 1];
    tile(label, number(last.v), `from ${number(points[0].v)} · best ${number(best.v)} at ${best.stage} step ${number(best.step)}`);
    return true;
  };
  if (!change("Eval accuracy", "eval/accuracy")) change("Accuracy", "rollout/accuracy");
  change("Reward", "rollout/reward_mean");
  const seconds = data.stages.reduce((sum, s) => sum + s.seconds, 0);
  tile("Run time", duration(seconds), data.stages.map(s => `${s.name} ${duration(s.seconds)}`).join(" · "));
  tile("Steps", data.stages.map(s => number(s.last_step)).join(" + "), data.stages.map(s => s.name).join(", then "));
  const speed = finite(everywhere("rollout/samples_per_s").map(p => p.v));
  if (speed.length) tile("Speed", number(speed.reduce((a, b) => a + b) / speed.length), "samples per second, mean over steps");
  const peaks = everywhere("memory/peak_rss_gib").map(p => p.v);
  if (peaks.length) tile("Peak memory", number(Math.max(...peaks)), "GiB, resident, main process");
  const seed = /^seed:\s*(\d+)/m.exec(data.config);
  if (seed) tile("Seed", seed[1], "every random choice derives from it");
}

function drawMemory() {
  const memory = data.memory;
  if (!memory || !Object.keys(memory.measured).length) return;
  const mib = bytes => bytes === undefined ? "" : `${number(bytes / 2 ** 20)} MiB`;
  const rows = Object.entries(memory.measured).flatMap(([stage, phases]) => Object.entries(phases).map(([phase, seen]) => {
    const planned = (memory.expected[stage] || {})[phase] || {};
    const ratio = planned.bytes ? `\u00d7${(seen / planned.bytes).toFixed(2)}` : "";
    return `<tr><td>${esc(stage)}</td><td>${esc(phase)}</td><td class="num">${mib(seen)}</td><td class="num">${mib(planned.bytes)}</td><td class="num">${ratio}</td><td class="optional">${esc(planned.moment || "not planned")}</td></tr>`;
  }));
  const changes = memory.changes.map(c => `<li>${esc(`${c.stage} step ${c.step}: ${c.key} ${c.old} \u2192 ${c.new}, ${c.reason}${c.reason === "room" ? "" : ` in ${c.phase}`}`)}</li>`);
  byId("memory").innerHTML = `<h2>Memory</h2><div class="note">Most of each phase since the last change of a setting: ${esc(memory.what)}. Planned for the longest responses allowed.</div>
    <table><thead><tr><th>stage</th><th>phase</th><th class="num">measured</th><th class="num">planned</th><th class="num"></th><th class="optional">at its most in</th></tr></thead><tbody>${rows.join("")}</tbody></table>` +
    (data.timeline ? `<div class="note">Stage rl moment by moment. Point at a piece to see what it is and how it was counted.</div>${data.timeline}` : "") +
    (changes.length ? `<div class="note">Changed while it ran</div><ul>${changes.join("")}</ul>` : "");
}

// Where the run comes from, below the title.
function drawOrigin() {
  const { origin, versions } = data.summary, hashes = Object.entries(origin.inputs || {});
  const { group, tags } = data.summary;
  const rows = [["group", group], ["tags", (tags || []).join(" · ")], ["command", origin.command], ["git commit", origin.git_commit],
    ["machine", [origin.hardware, ...Object.entries(versions).map(([name, version]) => `${name} ${version}`)].filter(Boolean).join(" · ")],
    ["inputs", hashes.map(([name, hash]) => `${name} ${String(hash).replace("sha256:", "").slice(0, 12)}`).join(" · ")]];
  byId("origin").innerHTML = rows.filter(([, text]) => text).map(([name, text]) => `<dt>${name}</dt><dd>${esc(text)}</dd>`).join("");
}

function drawSettings() {
  if (data.config) byId("settings").innerHTML = `<h2>Settings</h2><details><summary class="soft">run.yaml, every value resolved</summary><pre class="card">${esc(data.config)}</pre></details>`;
}

// ---- what is happening now, on a live page

function drawNow() {
  if (!data.now) return;
  const { stage, step, steps, phase, eta_s: eta, replicas, recent } = data.now, rows = Object.entries(replicas), services = data.services;
  byId("now").innerHTML = `<h2>Now</h2><div class="card"><div>${stage ? `${esc(stage)} step ${step}${steps ? ` of ${steps}` : ""}` : "no step yet"}${phase && data.now.running ? ` · ${esc(phase)}` : ""}${eta !== null && data.now.running ? ` · ${duration(eta)} to its end` : ""}</div>
    ${rows.length ? `<div class="note">${rows.map(([name, replica]) => `${esc(name)}: ${esc(replica.state)}${replica.version === null ? "" : `, version ${replica.version}`}${replica.why ? `, ${esc(replica.why)}` : ""}`).join("<br>")}</div>` : ""}
    <details><summary class="soft">last events</summary><pre>${esc(recent.join("\n"))}</pre></details>
    ${services.length ? `<div class="note">${services.map(s => `service ${esc(s.name)}: ${esc(s.state)}, ${esc(s.url)}${s.restarts ? `, ${s.restarts} restarts` : ""}`).join("<br>")}</div>` : ""}
    ${Object.entries(data.logs).map(([name, end]) => `<details><summary class="soft">end of logs/${esc(name)}</summary><pre tabindex="0">${esc(end)}</pre></details>`).join("")}</div>`;
}

// ---- page

function draw() {
  forgetCharts();
  byId("content").innerHTML = `<dl class="origin" id="origin"></dl><section class="tiles" id="tiles" aria-label="Summary"></section><section id="now"></section><section id="alarms"></section>
    <div id="stages"></div><section id="samples"></section><section id="memory"></section><section id="settings"></section>`;
  drawOrigin();
  drawSummary();
  drawNow();
  drawAlarms();
  data.stages.forEach(drawStage);
  drawSamples();
  drawMemory();
  drawSettings();
}

draw();
