// Follows a job's event stream and keeps its page current. When the job is over, the page is
// loaded again: the server then shows all there is to say. EventSource reconnects by itself and
// resumes after the last event it has seen.
"use strict";

const card = document.getElementById("job");
const byId = (id) => document.getElementById(id);
const final = ["finished", "failed", "cancelled"];

function show(data) {
  if (data.phase === undefined) return;
  byId("step").textContent = `${data.phase}: ${data.done} of ${data.total}`;
  byId("progress").max = data.total || 1;
  byId("progress").value = data.done;
  if (data.best_us) byId("best-us").textContent = `${data.best_us.toFixed(data.best_us < 10 ? 3 : 2)} µs`;
  if (data.best) byId("best").textContent = data.best;
}

function note(kind, data) {
  const item = document.createElement("li");
  const at = document.createElement("span");
  at.className = "soft";
  at.textContent = `${data.at.slice(0, 19).replace("T", " ")} UTC`;
  const name = document.createElement("b");
  name.textContent = kind;
  const said = data.phase === undefined ? [] : [`${data.phase} ${data.done} of ${data.total}`];
  for (const key of ["message", "error", "reason", "use", "candidate", "owner"]) {
    if (data[key]) said.push(key === "message" ? `· ${data[key]}` : data[key]);
  }
  item.append(at, " ", name, " ", said.join(" "));
  byId("log").append(item);
}

const events = new EventSource(`${card.dataset.events}?after=${card.dataset.after}`);
for (const kind of ["created", "started", "progress", "trial", "winner", "requeued", ...final]) {
  events.addEventListener(kind, (event) => {
    const data = JSON.parse(event.data);
    show(data);
    note(kind, data);
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
