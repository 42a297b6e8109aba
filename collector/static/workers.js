/* Workers beside each other: what ran and waited, how slow, how much was found, what routing cost, and hotspots. */
import { address, fillForm, get, values } from "/static/api.js";
import { chart, highest, nothing } from "/static/chart.js";
import { $, count, date, el, facts, fill, percent, say, speak, seconds, table, three, time } from "/static/dom.js";

const form = $("ask");
const RECENT = "-15m/now";
const MOST_LINES = 16;
let number = 0;

const lines = (node, found, unit, what) => {
  const { shown, which } = highest(found.series, MOST_LINES);
  $(`${node.id}-which`).textContent = which;
  if (!shown.length) return nothing(node, `Nobody told ${what} in this window.`);
  return chart(node, () => ({
    data: shown.map((one) => ({
      type: "scatter", mode: "lines", name: one.labels.worker ?? "no name", x: one.points.map((point) => date(point[0])), y: one.points.map((point) => point[1]),
      hovertemplate: `%{y:.3s} ${unit}<extra>%{fullData.name}</extra>`,
    })),
    layout: { yaxis: { title: { text: `${what}, ${unit}` } }, xaxis: { title: { text: "time" } }, showlegend: true },
  }), {
    label: `${what} of ${shown.length} workers over time${which && `, ${which}`}`,
    numbers: { columns: [{ name: "worker", key: 0 }, { name: "from", value: (row) => time(row[1]) }, { name: `${what}, ${unit}`, num: true, value: (row) => three(row[2]) }], rows: shown.flatMap((one) => one.points.map((point) => [one.labels.worker, ...point])) },
  });
};

async function show() {
  const asked = values(form);
  address.set(asked);
  const window = asked.suspect ?? RECENT;
  const mine = ++number;
  say($("verdict"), "Looking …");
  for (const id of ["load", "ttft", "balance", "regret", "hotspots", "prefixes"]) fill($(id));
  const part = async (ask, draw, nodes) => {
    try {
      const found = await ask;
      if (mine === number) draw(found);
    } catch (error) {
      if (mine === number) nodes.forEach((node) => say(node, error.message, true));
    }
  };
  await Promise.all([
    part(Promise.all([get("/api/v1/series", { metric: "step.num_running", stat: "mean", by: "worker", window }), get("/api/v1/series", { metric: "step.num_waiting_prefill", stat: "mean", by: "worker", window })]),
      ([running, waiting]) => lines($("load"), { series: [...waiting.series.map((one) => ({ ...one, labels: { worker: `${one.labels.worker} waiting` } })), ...running.series.map((one) => ({ ...one, labels: { worker: `${one.labels.worker} running` } }))] }, "requests", "in a step"), [$("load")]),
    part(get("/api/v1/series", { metric: "ttft", stat: "0.99", by: "worker", window }), (found) => lines($("ttft"), found, "s", "P99 TTFT"), [$("ttft")]),
    part(hitsAndLoad(window), balance, [$("balance")]),
    part(get("/api/v1/hotspots", { suspect: window, baseline: asked.baseline }), (found) => judged(found, window), [$("verdict"), $("regret"), $("hotspots"), $("prefixes")]),
  ]);
}

function judged(found, window) {
  speak(found.verdict);
  fill($("verdict"), el("p", { class: "verdict" }, el("span", { class: `word ${found.status === "hotspots" ? "warn" : found.status === "none" ? "good" : "soft"}` }, found.status.replaceAll("_", " ")), " ", found.verdict),
    el("p", {}, el("a", { href: `/api/v1/reports?${new URLSearchParams({ suspect: window, format: "html" })}`, target: "_blank" }, "the postmortem of this window"), ", against a baseline chosen by rule"));
  const workers = found.regret?.by_worker ?? [];
  if (!workers.length) nothing($("regret"), found.has_routes ? "No decision could be judged." : "No router sends its decisions, so what they cost is not known.");
  else chart($("regret"), () => ({
    data: [{ type: "bar", x: workers.map((one) => one.worker), y: workers.map((one) => one.regret_s), customdata: workers.map((one) => [seconds(one.regret_s), count(one.decisions)]), hovertemplate: "%{x}: %{customdata[0]} lost in %{customdata[1]} decisions<extra></extra>" }],
    layout: { yaxis: { title: { text: "regret, s" } }, xaxis: { title: { text: "worker" }, type: "category" } },
  }), { label: `Regret by worker: ${workers.map((one) => `${one.worker} ${seconds(one.regret_s)}`).join(", ")}`, numbers: { columns: [{ name: "worker", key: "worker" }, { name: "decisions", num: true, key: "decisions" }, { name: "regret", num: true, value: (row) => seconds(row.regret_s) }, { name: "prefill tokens/s", num: true, value: (row) => count(Math.round(row.tokens_per_s ?? 0)) }], rows: workers } });
  if (!found.hotspots.length) say($("hotspots"), `None, with at most ${percent(found.false_alarm_rate)} false alarms an interval of ${seconds(found.interval_s)}.`);
  else fill($("hotspots"), found.hotspots.map((one) => el("article", {}, el("h3", {}, el("code", {}, one.cause), ` ${one.subject?.id ?? ""}`), el("p", {}, one.statement ?? one.verdict ?? ""), facts([
    ["why", one.because],
    ["when", one.interval ? el("span", {}, time(one.interval.start_ns), " to ", time(one.interval.end_ns)) : null], ["cost", seconds(one.regret_s)],
    ["there before", one.in_baseline === null || one.in_baseline === undefined ? null : one.in_baseline ? "yes" : "no"],
    ["evidence", el("ul", {}, (one.evidence ?? []).map((line) => el("li", {}, line.statement ?? String(line))))], ["what to do", el("ul", {}, el("li", {}, one.advice?.text ?? "–"))],
  ]))));
  const prefixes = (found.regret?.by_prefix ?? []).slice(0, 20);
  if (!prefixes.length) say($("prefixes"), "No prefix was told with the decisions.");
  else fill($("prefixes"), table([{ name: "prefix", value: (row) => el("code", {}, row.prefix) }, { name: "decisions", num: true, value: (row) => count(row.decisions) }, { name: "regret", num: true, value: (row) => seconds(row.regret_s) }], prefixes));
}

const hitsAndLoad = (window) => Promise.all(["cached_tokens", "prompt_tokens"].map((metric) => get("/api/v1/series", { metric, stat: "sum", by: "worker", window })));

function balance([hits, requests]) {
  const node = $("balance");
  const total = (one) => one.points.reduce((sum, point) => sum + (point[1] ?? 0), 0);
  const served = Object.fromEntries(requests.series.map((one) => [one.labels.worker, { tokens: total(one), n: one.points.reduce((sum, point) => sum + point[2], 0) }]));
  const points = hits.series.filter((one) => served[one.labels.worker]?.tokens).map((one) => ({ worker: one.labels.worker, n: served[one.labels.worker].n, rate: total(one) / served[one.labels.worker].tokens }));
  if (!points.length) return nothing(node, "Nobody told cached tokens in this window.");
  const mean = points.reduce((sum, one) => sum + one.n, 0) / points.length;
  return chart(node, () => ({
    data: (points.length <= MOST_LINES ? points.map((one) => [one]) : [points]).map((some) => ({
      type: "scatter", mode: "markers", name: some.length === 1 ? some[0].worker ?? "no name" : "workers", x: some.map((one) => one.n / mean), y: some.map((one) => one.rate * 100), marker: { size: 11 },
      customdata: some.map((one) => [one.worker ?? "no name", count(one.n)]), hovertemplate: "%{customdata[0]}: %{x:.2f} times the mean load, %{y:.1f} % of tokens found<extra></extra>", cliponaxis: false,
    })),
    layout: { xaxis: { title: { text: "load, times the mean" }, rangemode: "tozero" }, yaxis: { title: { text: "tokens found, %" } }, showlegend: points.length <= MOST_LINES },
  }), { label: `Load against hit rate of ${points.length} workers`, numbers: { columns: [{ name: "worker", key: "worker" }, { name: "requests", num: true, key: "n" }, { name: "token hit rate", num: true, value: (row) => percent(row.rate) }], rows: points } });
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
show();
