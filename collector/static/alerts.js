/* Alerts: what is open, what ended, silences, and messages that no receiver took. */
import { get, post, remove, values } from "/static/api.js";
import { $, count, el, fill, renew, say, table, time } from "/static/dom.js";

const form = $("ask");
const labels = (row) => Object.entries(row.labels).filter(([name]) => name !== "alertname").flatMap(([name, value]) => [el("code", {}, `${name}="${value}"`), " "]);
const METRICS = new Set(["ttft", "tpot", "e2e"]);
const word = { firing: "bad", pending: "warn", resolved: "good", dismissed: "soft" };

/** Where to go from an alert: why, who, the report, what to do. [[name, address]]; windows are those of its report. */
function ways(row) {
  const { report, runbook_url: runbook, window } = row.annotations;
  const of = here(report) ? new URL(here(report), location.href).searchParams : new URLSearchParams();
  const known = {
    baseline: of.get("baseline") ?? row.baseline, suspect: of.get("suspect") ?? of.get("window") ?? window,
    metric: of.get("metric") ?? (METRICS.has(row.labels.metric) ? row.labels.metric : null),
  };
  const asked = new URLSearchParams(Object.entries(known).filter(([, value]) => value));
  const about = known.suspect ? [
    ["diagnosis", `/diagnosis?${asked}`], ["workers", `/workers?${new URLSearchParams({ suspect: known.suspect })}`], ["report", `/api/v1/reports?${asked}&format=html`],
  ] : [["report", here(report)]];
  return [...about, ["runbook", here(runbook)]].filter(([, href]) => href);
}

/** An address that others wrote, of http or https only. What this collector serves is asked of it by the name under which the page is open. */
function here(text) {
  if (!text) return null;
  let to;
  try {
    to = new URL(text, location.href);
  } catch {
    return null;
  }
  if (/^\/(api\/v1\/(reports|runbooks|hotspots)|workers)\b/.test(to.pathname)) return to.pathname + to.search;
  return to.protocol === "http:" || to.protocol === "https:" ? to.href : null;
}

/** What else is known of it: the verdict, why there is none, what to do. */
function words({ annotations: told }) {
  const found = [told.kvscope_verdict ?? told.description, told.kvscope_hotspots, told.kvscope_because && `No verdict: ${told.kvscope_because}`].filter(Boolean);
  const remedy = told.kvscope_remedy || told.remedy;
  return [...found.map((text) => el("p", { class: "soft" }, text)), remedy ? el("details", {}, el("summary", {}, "What to do"), el("p", {}, remedy)) : null];
}

const COLUMNS = [
  { name: "state", value: (row) => el("span", { class: `word ${word[row.state] ?? "soft"}` }, row.silenced_by.length ? `${row.state}, silenced` : row.inhibited_by.length ? `${row.state}, not told` : row.state) },
  { name: "alert", wrap: true, value: (row) => [el("b", {}, row.labels.alertname ?? "alert"), el("p", {}, row.annotations.summary ?? ""), ...words(row), row.why_muted ? el("p", { class: "soft" }, row.why_muted) : null].filter(Boolean) },
  { name: "of", wrap: true, value: labels },
  { name: "since", value: (row) => time(row.fired_ns ?? row.starts_ns) },
  { name: "until", value: (row) => (row.ends_ns === null ? null : time(row.ends_ns)) },
  { name: "look", wrap: true, value: (row) => ways(row).flatMap(([name, href], index) => [index ? " · " : "", el("a", { href }, name)]) },
];

const cells = (columns) => columns.map((column) => ({ ...column, value: column.value && ((row) => { const got = column.value(row); return Array.isArray(got) ? el("span", {}, ...got) : got; }) }));

const drawn = new Map();

/** Draw an answer; one that says what is shown already leaves it alone, so that nobody loses the place they were at. */
async function part(node, ask, draw) {
  try {
    const found = await ask;
    const text = JSON.stringify(found);
    if (drawn.get(node) === text) return;
    renew(node, () => draw(found));
    drawn.set(node, text);
  } catch (error) {
    drawn.delete(node);
    say(node, error.message, true);
  }
}

async function show() {
  await Promise.all([
    part($("open"), get("/api/v1/alerts", { state: "all" }), (found) => {
      const rank = (row) => (row.state === "pending" ? 2 : row.inhibited_by.length || row.silenced_by.length ? 1 : 0); // the reason before its symptoms
      const open = found.alerts.filter((row) => row.state === "firing" || row.state === "pending").sort((a, b) => rank(a) - rank(b));
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
        { name: "end", value: (row) => el("button", { type: "button", onclick: () => act(remove(`/api/v1/alerts/silences/${encodeURIComponent(row.silence_id)}`)), "aria-label": `End the silence of ${row.matchers.join(", ")}` }, "End") },
      ], found.silences));
    }),
    part($("letters"), get("/api/v1/alerts/deliveries", { state: "dead" }), (found) => {
      const dead = found.deliveries;
      if (!dead.length) say($("letters"), "None.");
      else fill($("letters"), table([{ name: "receiver", key: "receiver" }, { name: "tried", num: true, value: (row) => count(row.attempts) }, { name: "why", key: "message", wrap: true }], dead),
        el("button", { type: "button", onclick: () => act(post("/api/v1/alerts/deliveries/replay", { all: true })) }, "Send them again"), " ",
        el("button", { type: "button", onclick: () => act(post("/api/v1/alerts/deliveries/discard", { all: true })) }, "Forget them"));
    }),
  ]);
}

/** Wait for what was asked for, say where it failed, and look again. */
async function act(asked) {
  try {
    await asked;
    fill($("said"));
    await show();
    return true;
  } catch (error) {
    say($("said"), error.message, true);
    return false;
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = values(form);
  const asked = { matchers: [given.matcher], duration_s: Number(given.hours) * 3600, created_by: given.created_by, comment: given.comment ?? "" };
  if (await act(post("/api/v1/alerts/silences", asked))) form.reset();
});
show();
setInterval(show, 10_000);
