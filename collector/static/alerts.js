/* Alerts: what is open, what ended, silences, and messages that no receiver took. */
import { get, post, values } from "/static/api.js";
import { $, count, el, fill, say, seconds, table, time } from "/static/dom.js";

const form = $("ask");
const labels = (row) => Object.entries(row.labels).filter(([name]) => name !== "alertname").flatMap(([name, value]) => [el("code", {}, `${name}="${value}"`), " "]);
const word = { firing: "bad", pending: "warn", resolved: "good", dismissed: "soft" };

const COLUMNS = [
  { name: "state", value: (row) => el("span", { class: `word ${word[row.state] ?? "soft"}` }, row.silenced_by.length ? "silenced" : row.inhibited_by.length ? "inhibited" : row.state) },
  { name: "alert", wrap: true, value: (row) => [el("b", {}, row.labels.alertname ?? "alert"), el("p", {}, row.annotations.summary ?? ""), row.why_muted ? el("p", { class: "soft" }, row.why_muted) : null].filter(Boolean) },
  { name: "of", wrap: true, value: labels },
  { name: "since", value: (row) => time(row.fired_ns ?? row.starts_ns) },
  { name: "until", value: (row) => (row.ends_ns === null ? null : time(row.ends_ns)) },
  { name: "look", value: (row) => ["report", "runbook"].filter((name) => row.annotations[name]).flatMap((name, index) => [index ? " · " : "", el("a", { href: row.annotations[name] }, name)]) },
];

const cells = (columns) => columns.map((column) => ({ ...column, value: column.value && ((row) => { const got = column.value(row); return Array.isArray(got) ? el("span", {}, ...got) : got; }) }));

async function part(node, ask, draw) {
  try {
    draw(await ask);
  } catch (error) {
    say(node, error.message, true);
  }
}

async function show() {
  await Promise.all([
    part($("open"), get("/api/v1/alerts", { state: "all" }), (found) => {
      const open = found.alerts.filter((row) => row.state === "firing" || row.state === "pending");
      const ended = found.alerts.filter((row) => row.state === "resolved");
      if (open.length) fill($("open"), table(cells(COLUMNS), open));
      else say($("open"), "Nothing is open.");
      if (ended.length) fill($("ended"), table(cells(COLUMNS), ended.slice(0, 100)));
      else say($("ended"), "None yet.");
    }),
    part($("silences"), get("/api/v1/alerts/silences"), (found) => {
      if (!found.silences.length) say($("silences"), "None.");
      else fill($("silences"), table([
        { name: "matchers", wrap: true, value: (row) => el("code", {}, row.matchers.join(", ")) }, { name: "until", value: (row) => time(row.ends_ns) }, { name: "by", key: "created_by" }, { name: "because", key: "comment", wrap: true },
        { name: "", value: (row) => el("button", { type: "button", onclick: () => end(row) }, "End") },
      ], found.silences));
    }),
    part($("letters"), get("/api/v1/alerts/deliveries", { state: "dead" }), (found) => {
      const dead = found.deliveries;
      if (!dead.length) say($("letters"), "None.");
      else fill($("letters"), table([{ name: "receiver", key: "receiver" }, { name: "tried", num: true, value: (row) => count(row.attempts) }, { name: "why", key: "message", wrap: true }], dead),
        el("button", { type: "button", onclick: async () => { await post("/api/v1/alerts/deliveries/replay", { all: true }); show(); } }, "Send them again"));
    }),
  ]);
}

async function end(row) {
  await fetch(`/api/v1/alerts/silences/${encodeURIComponent(row.silence_id)}`, { method: "DELETE" });
  show();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = values(form);
  try {
    await post("/api/v1/alerts/silences", { matchers: [given.matcher], duration_s: Number(given.hours) * 3600, created_by: given.created_by, comment: given.comment ?? "" });
    form.reset();
    show();
  } catch (error) {
    window.alert(error.message);
  }
});
show();
setInterval(show, 10_000);
