/* Runs beside each other; two of them to the diagnosis; and the document of an experiment, read in the browser. */
import { get } from "/static/api.js";
import { chart, nothing } from "/static/chart.js";
import { $, count, el, fill, percent, say, seconds, signed, table, three, time } from "/static/dom.js";

const chosen = new Set();
const compare = $("compare");

const tick = (row) => el("input", {
  type: "checkbox", "aria-label": `choose ${row.run_id}`, onchange: (event) => {
    if (event.target.checked) chosen.add(row.run_id);
    else chosen.delete(row.run_id);
    compare.disabled = chosen.size !== 2;
  },
});

async function runs() {
  try {
    const found = await get("/api/v1/runs");
    if (!found.runs.length) {
      say($("runs"), "No run is imported. `kvscope import PATH --run NAME` makes one.");
      nothing($("chart"), "There is nothing to compare yet.");
      return;
    }
    fill($("runs"), table([
      { name: "choose", value: tick }, { name: "run", value: (row) => el("a", { href: `/requests?window=${encodeURIComponent(row.run_id)}&sort=ttft` }, row.run_id) },
      { name: "from", value: (row) => time(row.start_ns) }, { name: "requests", num: true, value: (row) => count(row.requests) }, { name: "unfinished", num: true, value: (row) => count(row.unfinished) },
      { name: "TTFT mean", num: true, value: (row) => seconds(row.ttft_mean_s) }, { name: "P50", num: true, value: (row) => seconds(row.ttft_p50_s) }, { name: "P95", num: true, value: (row) => seconds(row.ttft_p95_s) }, { name: "P99", num: true, value: (row) => seconds(row.ttft_p99_s) },
      { name: "TPOT P50", num: true, value: (row) => seconds(row.tpot_p50_s) }, { name: "E2E P99", num: true, value: (row) => seconds(row.e2e_p99_s) }, { name: "token hit rate", num: true, value: (row) => percent(row.token_hit_rate) }, { name: "seen by", key: "vantage" },
    ], found.runs, { caption: found.truncated ? "the newest 500" : `${found.runs.length} runs, the newest first` }));
    const shown = found.runs.filter((row) => row.ttft_p50_s !== null).slice(0, 40);
    if (!shown.length) nothing($("chart"), "No run tells first tokens.");
    else await chart($("chart"), () => ({
      data: [["P50", "ttft_p50_s"], ["mean", "ttft_mean_s"], ["P95", "ttft_p95_s"], ["P99", "ttft_p99_s"]].map(([name, key]) => ({ type: "scatter", mode: "markers", marker: { size: 10 }, name, y: shown.map((row) => row.run_id), x: shown.map((row) => row[key]), customdata: shown.map((row) => seconds(row[key])), hovertemplate: `${name} %{customdata}<extra>%{y}</extra>` })),
      layout: { xaxis: { title: { text: "TTFT, s" }, rangemode: "tozero" }, yaxis: { type: "category", autorange: "reversed", rangemode: "normal" } },
    }), { label: `P50, mean, P95 and P99 of TTFT of ${shown.length} runs` });
  } catch (error) {
    say($("runs"), error.message, true);
  }
}

const estimate = (one, unit = seconds) => (one && one.value !== null ? `${unit(one.value)}${one.interval_95 ? ` (${one.interval_95.map((bound) => (bound === null ? "∞" : unit(bound))).join(" to ")})` : ""}` : one?.reason ?? "–");

function experiment(found) {
  const arms = found.arms ?? (found.levels ?? []).map((level) => ({ ...level, arm: String(level.load) }));
  const names = Object.keys(arms[0]?.latency?.ttft ?? {});
  fill($("document"), el("section", { class: "wide" }, el("h2", {}, found.name),
    (found.contrasts ?? []).map((contrast) => el("article", {},
      el("h3", {}, `${contrast.suspect} against ${contrast.baseline}`), contrast.reading.map((reading) => el("p", { class: "verdict" }, reading.statement ?? reading.text ?? JSON.stringify(reading))),
      table([{ name: "TTFT", key: 0 }, { name: "difference", num: true, value: (row) => estimate(row[1], signed) }], Object.entries(contrast.difference.ttft ?? {})))),
    el("h3", {}, found.arms ? "Arms" : `Levels (${found.unit})`),
    table([{ name: "arm", key: "arm" }, { name: "requests", num: true, value: (row) => count(row.num_requests) }, ...names.map((name) => ({ name: `TTFT ${name}`, num: true, value: (row) => estimate(row.latency.ttft[name]) })),
      { name: "goodput", num: true, value: (row) => estimate(row.goodput_rps, (value) => `${three(value)}/s`) }, { name: "reused", num: true, value: (row) => percent(row.reused_ratio) }, { name: "evicted blocks", num: true, value: (row) => count(row.evicted_blocks) }, { name: "preemptions", num: true, value: (row) => count(row.preemptions) }], arms),
    found.notes?.length ? el("ul", {}, found.notes.map((note) => el("li", {}, note))) : null));
}

$("file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  try {
    const found = JSON.parse(await file.text());
    if (!found.arms && !found.levels) throw new Error("it has neither arms nor levels");
    experiment(found);
  } catch (error) {
    say($("document"), `${file.name} is no document of an experiment (experiment.json): ${error.message}`, true);
  }
});
compare.addEventListener("click", () => {
  const [suspect, baseline] = [...document.querySelectorAll("#runs input:checked")].map((box) => box.getAttribute("aria-label").slice("choose ".length));
  location.href = `/diagnosis?baseline=${encodeURIComponent(baseline)}&suspect=${encodeURIComponent(suspect)}`;
});
runs();
