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

// ---- samples

const meanLogprob = s => s.logprobs && s.logprobs.length ? finite(s.logprobs).reduce((a, b) => a + b, 0) / s.logprobs.length : null;
const thumbnails = {};  // of pictures in prompts, by digest
const learn = samples => { for (const s of samples) Object.assign(thumbnails, s.thumbnails); return samples; };
const placeOf = s => `${s.stage} step ${s.step}`;
const groupOf = s => `${s.stage}/${s.step}/${s.group}`;
const SORTS = {
  "in groups, those with signal first": null,
  "reward, high first": s => -s.reward, "reward, low first": s => s.reward,
  "advantage, high first": s => -s.advantage, "advantage, low first": s => s.advantage,
  "longest first": s => -s.num_tokens, "least likely first": s => meanLogprob(s) ?? 0,
};

function drawSamples() {
  const section = byId("samples");
  learn(data.samples);
  if (!data.samples.length) { section.innerHTML = `<h2>Samples</h2><div class="note">None were recorded.</div>`; return; }
  const options = list => list.map(o => `<option>${esc(o)}</option>`).join("");
  const total = Object.entries(data.recorded_steps).map(([stage, count]) => `${count} ${stage} steps`).join(", ");
  section.innerHTML = `<h2>Samples</h2><div class="note">Whole groups from a few steps; samples/ has all of ${esc(total)}. Click a row to read it token by token.</div>
    <div class="row" style="margin-top:12px"><select id="place" aria-label="Step"></select>
    <select id="sort" aria-label="Order">${options(Object.keys(SORTS))}</select>
    <label>tokens by <select id="shade">${options(Object.keys(SHADES))}</select></label>
    <input type="search" id="search" placeholder="Words, reward&lt;0.5, tokens&gt;100, version=3, fault" title="Words of prompt, answer or response; reward, advantage, tokens, step, version or a component with &lt; &gt; = &lt;= &gt;=; fault" aria-label="Search"><span class="note" id="found"></span></div>
    <div class="pictures" id="pictures"></div>
    <table><thead><tr><th class="num optional">step</th><th style="width:34%">prompt</th><th class="optional" style="width:13%">answer</th><th>response</th><th class="num optional">tokens</th><th class="num">reward</th><th class="num">advantage</th></tr></thead><tbody id="rows"></tbody></table>`;
  fillPlaces(placeOf(data.samples[data.samples.length - 1]));
  for (const id of ["sort", "search"]) byId(id).addEventListener("input", fillRows);
  byId("shade").addEventListener("input", () => document.querySelectorAll("#rows tr").forEach(row => row.shadeAnew && row.shadeAnew()));
  byId("place").addEventListener("input", async () => { await askForPlace(byId("place").value); fillRows(); });
  fillRows();
}

// A query's words are looked for in the texts. `fault`, and terms such as `reward<0.5`, select by values.
const TERM = /^([\w.:-]+)(<=|>=|=|<|>)(-?\d*\.?\d+)$/;
const RELATIONS = { "<": (a, b) => a < b, ">": (a, b) => a > b, "=": (a, b) => a === b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b };

function selects(query) {
  const tests = query.trim().split(/\s+/).filter(Boolean).map(term => {
    const [, name, relation, value] = TERM.exec(term) || [], word = term.toLowerCase();
    if (word === "fault") return s => Object.keys(s.faults).length > 0;
    if (!name) return s => `${s.prompt}\n${s.answer}\n${s.response}`.toLowerCase().includes(word);
    return s => valuesOf(s, name).some(v => typeof v === "number" && RELATIONS[relation](v, Number(value)));
  });
  return s => tests.every(test => test(s));
}

const valuesOf = (s, name) => name === "version" ? s.versions : [{ ...s.scores, tokens: s.num_tokens, reward: s.reward, advantage: s.advantage, step: s.step }[name]];

// Groups stay in their order; within each the samples that were reinforced come first.
function inGroups(samples) {
  const groups = new Map();
  for (const s of samples) groups.set(groupOf(s), [...groups.get(groupOf(s)) || [], s]);
  return [...groups.values()].flatMap(group => group.sort((a, b) => (b.advantage ?? b.reward ?? 0) - (a.advantage ?? a.reward ?? 0)));
}

// Steps with samples: those in the page, and of a live page all.
function fillPlaces(chosen) {
  const inPage = [...new Set(data.samples.map(placeOf))];
  const places = data.recorded ? Object.entries(data.recorded).flatMap(([stage, steps]) => steps.map(step => `${stage} step ${step}`)) : inPage;
  byId("place").innerHTML = `<option value="">every step shown</option>` + places.map(place => `<option>${esc(place)}</option>`).join("");
  byId("place").value = chosen;
}

// A live page has the samples of a few steps, and asks for those of others.
async function askForPlace(place) {
  if (!place || data.samples.some(s => placeOf(s) === place)) return;
  const [, stage, step] = /^(.*) step (\d+)$/.exec(place);
  data.samples.push(...learn(await ask(`${data.live.samples}&stage=${encodeURIComponent(stage)}&step=${step}`)));
}

function fillRows() {
  const place = byId("place").value, key = SORTS[byId("sort").value];
  let found = data.samples.filter(s => !place || placeOf(s) === place).filter(selects(byId("search").value));
  found = key ? found.map(s => [key(s), s]).sort((a, b) => a[0] - b[0]).map(pair => pair[1]) : inGroups(found);
  byId("found").textContent = `${found.length} samples`;
  byId("rows").replaceChildren(...found.map((s, i) => sampleRow(s, !key && (i === 0 || groupOf(found[i - 1]) !== groupOf(s)))));
  byId("pictures").replaceChildren(...found.filter(s => s.picture).slice(0, 24).map(s => {
    const figure = element("figure", "", `step ${s.step} · reward ${number(s.reward)}`);
    figure.prepend(pictureOf(s));
    return figure;
  }));
}

function pictureOf(s) {
  const image = new Image();
  image.alt = `the response of step ${s.step}, sample ${s.index + 1}, drawn`;
  image.src = `data:image/png;base64,${s.picture}`;
  return image;
}

// The pictures of a prompt, in their order.
function shownTo(s) {
  const shows = element("div", "shows");
  shows.append(...s.shows.map((digest, i) => {
    const image = new Image();
    image.alt = `picture ${i + 1} of the prompt`;
    image.src = `data:image/jpeg;base64,${thumbnails[digest]}`;
    return image;
  }));
  return shows;
}

const signed = v => v === null ? "–" : `<span class="${v > 0 ? "pos" : v < 0 ? "neg" : "soft"}">${number(v)}</span>`;

function sampleRow(s, isFirst) {
  const row = element("tr", isFirst ? "sample first" : "sample");
  row.tabIndex = 0;
  row.innerHTML = `<td class="num soft optional">${s.step}</td><td class="clip mono">${esc(s.prompt.slice(0, 300))}</td><td class="clip mono optional">${esc((s.answer ?? "").slice(0, 80))}</td>
    <td class="clip mono">${esc(s.response.slice(0, 300))}</td><td class="num optional">${s.num_tokens}</td><td class="num">${s.reward === null ? '<span class="neg">fault</span>' : number(s.reward)}</td><td class="num">${signed(s.advantage)}</td>`;
  const toggle = () => {
    if (row.classList.toggle("open")) row.after(detailRow(s)); else row.nextElementSibling.remove();
  };
  row.addEventListener("click", toggle);
  row.addEventListener("keydown", event => { if (event.key === "Enter") toggle(); });
  return row;
}

function detailRow(s) {
  const facts = [["finish", s.finish_reason], ["policy version", s.versions.join(", ")], ["sample of group", s.index + 1], ["mean logprob", number(meanLogprob(s))],
    ...Object.entries(s.scores).map(([name, value]) => [`score ${name}`, value === null ? "none" : number(value)]), ...Object.entries(s.faults).map(([name, fault]) => [`fault ${name}`, fault])];
  const row = element("tr");
  row.innerHTML = `<td colspan="7"><div class="detail"><div><div class="label">Prompt</div><pre>${esc(s.prompt)}</pre><div class="label">Response, token by token</div><div class="response">${tokenView(s)}</div>
    ${s.answer === null ? "" : `<div class="label">Answer</div><pre>${esc(s.answer)}</pre>`}</div><dl>${facts.map(([name, value]) => `<dt>${esc(name)}</dt><dd>${esc(value)}</dd>`).join("")}</dl></div></td>`;
  row.shadeAnew = () => { row.querySelector(".response").innerHTML = tokenView(s); };
  if (s.shows) row.querySelector(".label").after(shownTo(s));
  if (s.picture) row.querySelector(".detail > div").append(pictureOf(s));
  return row;
}

const NOT_KEPT = "are not known: they are kept of the first sixteenth of the prompts in the first ten updates and in every tenth";
// What tokens are coloured by: values of a sample's tokens, null where unknown; `near` is a value that is half as strong
// as the strongest colour. Signed values are green and solid above 0, red and dashed below.
const SHADES = {
  surprisal: {
    what: "surprisal, minus the sampler's logprob in nats; its mean is an estimate of the entropy", near: 1.4, more: "less likely",
    values: s => s.logprobs.map(p => p === null ? null : -p),
  },
  entropy: {
    what: "entropy of the policy at the token, in nats", near: 0.7, more: "less certain",
    values: s => s.entropy || null,
    missing: `The entropies of this sample ${NOT_KEPT}.`,
  },
  advantage: {
    what: "advantage", near: 0.5, signed: ["reinforced", "made less likely"],
    values: s => s.advantages || (s.advantage === null ? null : s.token_ids.map(() => s.advantage)),
    missing: "This group was not trained on.",
  },
  mismatch: {
    what: "mismatch, the sampler's logprob minus the trainer's in nats", near: 0.03, signed: ["likelier for the sampler", "likelier for the trainer"],
    values: s => s.mismatch || null,
    missing: `The trainer's logprobs of this sample ${NOT_KEPT}, and of all prompts where the algorithm computes them beforehand.`,
  },
};

function shadeStyle(value, { near, signed }) {
  const strength = (0.55 * (1 - Math.exp(-Math.abs(value) / near * Math.LN2))).toFixed(2);
  const line = !signed || value === 0 ? "" : `;border-bottom:2px ${value > 0 ? "solid var(--good)" : "dashed var(--bad)"}`;
  return `background:rgba(var(${signed && value > 0 ? "--well" : "--shade"}),${strength})${line}`;
}

function shadeLegend(shade) {
  const steps = shade.signed ? [-4, -1, 1, 4] : [0.25, 1, 2, 4];
  const marks = steps.map(step => `<span class="mono mark" style="${shadeStyle(step * shade.near, shade)}">&nbsp;${number(step * shade.near)}&nbsp;</span>`);
  const signs = shade.signed ? ` Above 0, underlined: ${shade.signed[0]}; below, underlined with dashes: ${shade.signed[1]}.` : ` The redder, the ${shade.more}.`;
  return `<div class="note">Colour: ${esc(shade.what)}. ${marks.join(" ")}${signs}</div>`;
}

// The texts of a sample's tokens, as far as they are known.
function textsOf(s) {
  const characters = [...s.response], byCharacter = characters.length === s.token_ids.length || characters.length === s.token_ids.length - 1;
  return s.token_ids.map((id, i) => data.pieces[id] ?? (byCharacter ? characters[i] ?? "" : `#${id} `));
}

function tokenView(s) {
  if (!s.token_ids) return `<pre>${esc(s.response)}</pre>`;
  const shade = SHADES[byId("shade").value] || SHADES.surprisal, values = shade.values(s), texts = textsOf(s);
  const figure = (name, value) => value === null || value === undefined ? "" : ` · ${name} ${number(value)}`;
  const tokens = texts.map((text, i) => {
    const p = s.logprobs[i], advantage = SHADES.advantage.values(s), value = values && values[i];
    const title = `token ${i + 1}, id ${s.token_ids[i]} · logprob ${p === null ? "not finite" : `${p} · probability ${number(Math.exp(p))}`}${figure("advantage", advantage && advantage[i])}${figure("entropy", s.entropy && s.entropy[i])}${figure("mismatch", s.mismatch && s.mismatch[i])}`;
    return `<span style="${value === null || value === undefined ? "" : shadeStyle(value, shade)}" title="${esc(title)}">${esc(text) || "◦"}</span>`;
  });
  return `${values ? shadeLegend(shade) : `<div class="note">${shade.missing}</div>`}<div class="tokens mono">${tokens.join("")}</div>${values ? inNumbers(values, texts) : ""}`;
}

// What the colours show, in words: the mean, and the tokens of the largest values.
function inNumbers(values, texts) {
  const known = values.map((value, i) => [value, i]).filter(([value]) => value !== null);
  if (!known.length) return "";
  const most = [...known].sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 5);
  const same = known.every(([value]) => value === known[0][0]);
  const mean = known.reduce((sum, [value]) => sum + value, 0) / known.length;
  return `<div class="note">${same ? `${number(mean)} at every token.` : `Mean ${number(mean)}; largest: ${most.map(([value, i]) => `<code>${esc(texts[i]) || "◦"}</code> (token ${i + 1}) ${number(value)}`).join(", ")}.`}</div>`;
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

// j and k: the next and the previous sample.
addEventListener("keydown", event => {
  if (!["j", "k"].includes(event.key) || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const rows = [...document.querySelectorAll("tr.sample")], at = rows.indexOf(document.activeElement);
  const next = rows[event.key === "j" ? at + 1 : Math.max(0, at - 1)];
  if (next) next.focus();
});

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
