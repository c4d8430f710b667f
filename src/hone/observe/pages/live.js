
// ---- live pages of `hone ui`: data.live has where their data and changes come from

const live = data.live;

// What a reader has chosen survives a redraw: values of fields, open parts, opened samples, the place on the page.
function redraw(next) {
  const fields = [...document.querySelectorAll("#content select, #content input")].map(node => [node.id, node.type === "checkbox" ? node.checked : node.value]);
  const open = [...document.querySelectorAll("#content details[open] > summary")].map(node => node.textContent.replace(/\d+/g, ""));
  const samples = document.querySelector("tr.open") && byId("samples"), focused = document.activeElement.id, top = scrollY;
  data = { ...next, live, samples: merged(next.samples) };
  draw();
  if (samples) {
    byId("samples").replaceWith(samples);
    fillPlaces(byId("place").value);
  }
  for (const [id, value] of fields) {
    const node = id && byId(id);
    if (!node || samples && samples.contains(node)) continue;
    if (node.type === "checkbox") node.checked = value;
    else if (node.value !== value) { node.value = value; node.dispatchEvent(new Event("input")); }
  }
  document.querySelectorAll("#content details > summary").forEach(node => { if (open.includes(node.textContent.replace(/\d+/g, ""))) node.parentElement.open = true; });
  if (focused && byId(focused)) byId(focused).focus();
  scrollTo(0, top);
}

// Samples that were asked for stay.
function merged(samples) {
  if (!samples) return samples;
  const have = new Set(samples.map(placeOf));
  return [...samples, ...data.samples.filter(s => !have.has(placeOf(s)))];
}

async function ask(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error((await response.json()).detail);
  return response.json();
}

let asking = false, again = false;
async function refresh() {
  if (asking || document.hidden) { again = true; return; }
  asking = true; again = false;
  try {
    redraw(await ask(live.data));
    say("");
  } catch (error) {
    say(`not up to date: ${error.message}`);
  }
  setTimeout(() => { asking = false; if (again) refresh(); }, 2000);
}

const say = text => { byId("live").textContent = text; };
const changes = new EventSource(live.changes);
changes.onmessage = refresh;
changes.onerror = () => say("the server does not answer; `hone ui` may have ended");
changes.onopen = () => say("");
addEventListener("visibilitychange", () => { if (again && !document.hidden) refresh(); });
