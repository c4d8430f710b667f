
// ---- all runs of a folder, the newest first

const stateOf = run => run.running ? "running" : run.outcome || "not running";

// What the run file calls the run, where that is not the folder's name; its group and tags.
const labelsOf = run => [run.name.split("/").pop() === run.title || run.name === "." ? "" : run.title, run.group, ...run.tags].filter(Boolean);

// What the search looks in.
const wordsOf = run => run.unreadable ? `${run.name} unreadable` : `${run.name} ${labelsOf(run).join(" ")} ${stateOf(run)} ${run.alarms.join(" ")}`;

function runRow(run) {
  const row = element("tr");
  const changed = `<td class="soft optional">${new Date(run.changed_unix_s * 1000).toLocaleString()}</td>`;
  if (run.unreadable) {
    row.innerHTML = `<td></td><td>${esc(run.name === "." ? data.folder : run.name)}</td><td class="neg">unreadable</td><td colspan="4" style="overflow-wrap:anywhere">${esc(run.unreadable)}</td>${changed}`;
    return row;
  }
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const metrics = Object.entries(run.metrics).map(([name, value]) => `${esc(name)} <b>${number(value)}</b>`).join(" · ");
  row.innerHTML = `<td><input type="checkbox" id="pick-${esc(run.name)}" value="${esc(run.name)}" aria-label="Compare ${esc(run.name)}"></td>
    <td><a href="/run?name=${encodeURIComponent(run.name)}">${esc(run.name === "." ? data.folder : run.name)}</a> <span class="soft">${esc(labelsOf(run).join(" · "))}</span></td>
    <td class="${run.running ? "pos" : "soft"}">${esc(stateOf(run))}</td>
    <td>${run.stage ? `${esc(run.stage)} ${run.step}${run.steps ? ` of ${run.steps}` : ""}<div class="bar"><i style="width:${100 * share}%"></i></div>` : "–"}</td>
    <td class="eta">${run.running && run.eta_s !== null ? duration(run.eta_s) : ""}</td><td>${metrics}</td>
    <td><span class="neg">${esc(run.alarms.join(", "))}</span> <span class="soft">${esc(run.advice.map(name => `advice: ${name}`).join(", "))}</span></td>${changed}`;
  return row;
}

const picked = () => [...document.querySelectorAll("#runs input:checked")].map(box => box.value);

function fillRuns() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), keep = picked();
  const found = data.runs.filter(run => words.every(word => wordsOf(run).toLowerCase().includes(word)));
  byId("runs").replaceChildren(...found.map(runRow));
  document.querySelectorAll("#runs input").forEach(box => { box.checked = keep.includes(box.value); box.addEventListener("input", tellPicked); });
  byId("found").textContent = `${found.length} of ${data.runs.length} runs`;
  tellPicked();
}

function tellPicked() {
  byId("compare").disabled = picked().length < 2;
}

function draw() {
  byId("title").textContent = "Runs";
  byId("outcome").textContent = data.folder;
  byId("content").innerHTML = `<div class="row" style="margin-top:20px"><input type="search" id="search" placeholder="Search names, tags, states, alarms" aria-label="Search">
    <button id="compare" type="button">Compare the chosen</button><span class="note" id="found"></span></div>
    <div class="scroll"><table class="fit list"><thead><tr><th>compare</th><th>run</th><th>state</th><th>stage</th><th>to its end</th><th>last</th><th>alarms</th><th class="optional">last change</th></tr></thead><tbody id="runs"></tbody></table></div>
    ${data.runs.length ? "" : `<p class="soft">No runs here yet. Each \`hone train\` makes a folder, run.dir.</p>`}`;
  byId("search").addEventListener("input", fillRuns);
  byId("compare").addEventListener("click", () => { location.href = `/compare?${picked().map(name => `name=${encodeURIComponent(name)}`).join("&")}`; });
  fillRuns();
}

draw();
