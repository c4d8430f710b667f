
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
  section.innerHTML = `<h2>Samples</h2><div class="note">Whole groups from a few steps; samples/ has all of ${esc(total)}. Click a row to read it token by token.${data.live ? " A search of every step goes through all that were recorded." : ""}</div>
    <div class="row" style="margin-top:12px"><select id="place" aria-label="Step"></select>
    <select id="sort" aria-label="Order">${options(Object.keys(SORTS))}</select>
    <label>tokens by <select id="shade">${options(Object.keys(SHADES))}</select></label>
    <input type="search" id="search" placeholder="Words, reward&lt;0.5, tokens&gt;100, version=3, fault" title="Words of prompt, answer, response or fault; reward, advantage, tokens, step, version or a component with &lt; &gt; = &lt;= &gt;=; fault" aria-label="Search"><button id="search-more" type="button" hidden></button><span class="note" id="found" role="status"></span></div>
    <div class="pictures" id="pictures"></div>
    <table><thead><tr><th class="num optional">step</th><th style="width:34%">prompt</th><th class="optional" style="width:13%">answer</th><th>response</th><th class="num optional">tokens</th><th class="num">reward</th><th class="num">advantage</th></tr></thead><tbody id="rows"></tbody></table>`;
  fillPlaces(placeOf(data.samples[data.samples.length - 1]));
  for (const id of ["sort", "search"]) byId(id).addEventListener("input", fillRows);
  byId("search-more").addEventListener("click", () => {
    if (byId("place").value) { byId("place").value = ""; fillRows(); } else searchOn(everywhere);
  });
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
    if (!name) return s => [s.prompt, s.answer, s.response, ...Object.values(s.faults)].join("\n").toLowerCase().includes(word);
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

// Steps with samples: those in the page, and of a live page all. Thousands of them would delay the curves, so all but
// those in the page are added once the page is drawn.
function fillPlaces(chosen) {
  const inPage = [...new Set(data.samples.map(placeOf))];
  const fill = (places, value) => {
    byId("place").innerHTML = `<option value="">${data.live ? "every step" : "every step shown"}</option>` + places.map(place => `<option>${esc(place)}</option>`).join("");
    byId("place").value = value;
  };
  fill(inPage, chosen);
  if (data.recorded) setTimeout(() => fill(Object.entries(data.recorded).flatMap(([stage, steps]) => steps.map(step => `${stage} step ${step}`)), byId("place").value));
}

// A live page has the samples of a few steps, and asks for those of others.
async function askForPlace(place) {
  if (!place || data.samples.some(s => placeOf(s) === place)) return;
  const [, stage, step] = /^(.*) step (\d+)$/.exec(place);
  data.samples.push(...learn(await ask(`${data.live.samples}&stage=${encodeURIComponent(stage)}&step=${step}`)));
}

// A search of every recorded step: the server answers in parts, the newest steps first. {query, rows, matches, searched,
// steps, damaged, after: where the next part begins, most: rows until it pauses, isBusy, error}
let everywhere = null;
const MOST_ROWS = 320;

// Whether the query is to be looked for in every recorded step, not only in those of the page.
const isEverywhere = () => data.live && !byId("place").value && byId("search").value.trim() !== "";

function searchEverywhere() {
  const query = byId("search").value.trim();
  if (everywhere && everywhere.query === query) return;
  const asked = everywhere = { query, rows: [], matches: 0, searched: 0, steps: 0, damaged: 0, after: "", most: 0, isBusy: true, error: "" };
  setTimeout(() => { if (asked === everywhere) searchOn(asked); }, 300);  // of what is being typed, only the last query is asked for
}

async function searchOn(asked) {
  asked.most = asked.rows.length + MOST_ROWS;
  asked.isBusy = true;
  do {
    try {
      const part = await ask(`${data.live.search}&query=${encodeURIComponent(asked.query)}&after=${encodeURIComponent(asked.after)}`);
      asked.rows.push(...learn(part.samples));
      asked.matches += part.matches;
      asked.damaged += part.damaged;
      Object.assign(asked, { searched: part.searched, steps: part.steps, after: part.after, error: "" });
    } catch (error) {
      asked.error = error.message;
    }
    asked.isBusy = asked.after !== "" && asked.rows.length < asked.most && !asked.error;
    if (asked !== everywhere) return;
    if (isEverywhere()) fillRows();
  } while (asked.isBusy);
}

function foundWords(found) {
  if (!isEverywhere()) return counted(found.length, "sample");
  const { matches, searched, steps, damaged, isBusy, error } = everywhere;
  const left = matches > found.length ? `, ${found.length} of them shown` : "", broken = damaged ? ` · ${counted(damaged, "damaged file")} left out` : "";
  return `${counted(matches, "sample")}${left} · ${isBusy ? "searching: " : ""}${searched} of ${steps} steps searched${broken}${error ? ` · ${error}` : ""}`;
}

function moreWords() {
  if (!data.live || !byId("search").value.trim()) return "";
  if (byId("place").value) return "Search every step";
  return everywhere.isBusy || everywhere.after === "" && !everywhere.error ? "" : "Search on";
}

function fillRows() {
  const place = byId("place").value, key = SORTS[byId("sort").value];
  if (isEverywhere()) searchEverywhere();
  let found = isEverywhere() ? everywhere.rows : data.samples.filter(s => !place || placeOf(s) === place).filter(selects(byId("search").value));
  found = key ? found.map(s => [key(s), s]).sort((a, b) => a[0] - b[0]).map(pair => pair[1]) : inGroups(found);
  byId("found").textContent = foundWords(found);
  byId("search-more").textContent = moreWords();
  byId("search-more").hidden = !moreWords();
  const opened = new Set([...document.querySelectorAll("#rows tr.open")].map(row => row.sample)), focused = document.activeElement.sample;
  byId("rows").replaceChildren(...found.map((s, i) => sampleRow(s, !key && (i === 0 || groupOf(found[i - 1]) !== groupOf(s)))));
  for (const row of document.querySelectorAll("#rows tr.sample")) {
    if (opened.has(row.sample)) row.click();
    if (focused && focused === row.sample) row.focus({ preventScroll: true });
  }
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
  row.sample = s;
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

// j and k: the next and the previous sample.
addEventListener("keydown", event => {
  if (!["j", "k"].includes(event.key) || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const rows = [...document.querySelectorAll("tr.sample")], at = rows.indexOf(document.activeElement);
  const next = rows[event.key === "j" ? at + 1 : Math.max(0, at - 1)];
  if (next) next.focus();
});
