// Follows a job's event stream and updates its page. When the job is over, the page is loaded again,
// because the server then shows more. EventSource reconnects by itself and resumes after the last
// event that it received.
"use strict";

const card = document.getElementById("job");
const byId = (id) => document.getElementById(id);
const final = ["finished", "failed", "cancelled"];

function show(data) {
  if (data.phase === undefined) return;
  byId("step").textContent = `${data.phase}: ${data.done} of ${data.total}`;
  byId("progress").max = data.total || 1;
  byId("progress").value = data.done;
  const us = data.best_us;
  if (us) byId("best-us").textContent = `${us < 1000 ? us.toPrecision(4) : us.toFixed(0)} µs`;
  if (data.best) byId("best").textContent = data.best;
  if (data.recorded) {
    byId("recorded").textContent = `recorded ${data.recorded.replace(/^NVIDIA /, "")}`;
    byId("recorded").hidden = false;
  }
}

// The service draws the chart of the best time so far; it is fetched again after progress.
const AT_MOST_EVERY_MS = 1500;
let drawnAt = 0;

async function draw() {
  if (Date.now() - drawnAt < AT_MOST_EVERY_MS) return;
  drawnAt = Date.now();
  const section = byId("convergence");
  const answer = await fetch(section.dataset.source);
  if (!answer.ok) return;
  const drawn = new DOMParser().parseFromString(await answer.text(), "text/html");
  const chart = drawn.querySelector("svg");
  if (chart === null) return;
  section.hidden = false;
  section.querySelector(".wide").replaceChildren(chart);
}

const utc = (at) => `${at.slice(0, 19).replace("T", " ")} UTC`;

// An event as the macro `event` of the templates writes it.
function note(kind, data) {
  const at = document.createElement("time");
  at.dateTime = data.at;
  at.title = utc(data.at);
  at.textContent = data.at.slice(11, 19);
  const when = document.createElement("span");
  when.className = "soft";
  when.append(at);
  const name = document.createElement("b");
  name.textContent = kind;
  const words = data.phase === undefined ? [] : [`${data.phase} ${data.done} of ${data.total}`];
  if (kind === "built") {
    words.push(`${data.compiled} kernels compiled, ${data.found} found, ${data.failed} failed`);
  }
  for (const key of ["message", "error", "reason", "use", "candidate", "owner"]) {
    const before = { message: "· ", owner: "by " }[key] ?? "";
    if (data[key]) words.push(before + data[key]);
  }
  const item = document.createElement("li");
  item.append(when, " ", name, " ", words.join(" "));
  byId("log").prepend(item);
}

const events = new EventSource(`${card.dataset.events}?after=${card.dataset.after}`);
for (const kind of ["created", "started", "progress", "built", "winner", "requeued", ...final]) {
  events.addEventListener(kind, (event) => {
    const data = JSON.parse(event.data);
    show(data);
    note(kind, data);
    if (kind === "started") {
      byId("attempt").textContent = data.attempt;
      byId("started").textContent = utc(data.at);
    }
    if (kind === "progress") draw().catch(() => {});  // the next event tries again
    if (kind === "started" || kind === "requeued") {
      const state = kind === "started" ? "running" : "waiting";
      const tag = byId("state").firstElementChild;
      tag.textContent = state;
      tag.className = `tag state ${state}`;
    }
    if (final.includes(kind)) {
      events.close();
      location.reload();
    }
  });
}
