/* Two windows and why the second is worse: a chart to choose them in, the verdict, attribution beside composition, evidence. */
import { address, fillForm, get, values } from "/static/api.js";
import { chart, colour, nothing } from "/static/chart.js";
import { $, count, date, el, facts, fill, percent, say, speak, seconds, signed, table, three, time } from "/static/dom.js";

const form = $("ask");
const over = $("over-time");
const answer = $("answer");
const METRIC = { ttft: "TTFT", tpot: "TPOT", e2e: "E2E" };
const FEW = 4;
let number = 0;
let drawing = 0;

const runOf = (text) => (text && !text.includes("/") ? text : text && text.includes("@") ? text.split("@")[0] : null);
const quantile = (text) => `P${(Number(text) * 100).toLocaleString("en")}`;

/** Both windows and a little on either side, where they are live ones between two instants in ns. */
function around(asked) {
  const ends = [asked.baseline, asked.suspect].filter(Boolean).flatMap((text) => text.split("/"));
  if (!ends.length || !ends.every((text) => /^\d{19}$/.test(text))) return null;
  const sorted = ends.map(BigInt).sort((a, b) => (a < b ? -1 : 1));
  const margin = (sorted.at(-1) - sorted[0]) / 10n;
  return `${sorted[0] - margin}/${sorted.at(-1) + margin}`;
}

/** The chart from which windows are chosen: the quantile over the time of both windows, or of the last day. */
async function overTime() {
  const asked = values(form);
  $("chart-title").textContent = `${quantile(asked.quantile)} ${METRIC[asked.metric]} over time`;
  const runs = [...new Set([asked.baseline, asked.suspect].map(runOf).filter(Boolean))];
  const windows = runs.length ? runs : [around(asked) ?? "-24h/now"];
  const series = () => Promise.all(windows.map((window) => get("/api/v1/series", { metric: asked.metric, stat: asked.quantile, window })));
  const told = ++drawing;
  try {
    let found = await series();
    if (!runs.length && found[0].series[0] && found[0].series[0].points.length < FEW) { // a young store: nearer to what there is
      windows[0] = `${found[0].series[0].points[0][0]}/${windows[0].split("/")[1]}`;
      found = await series();
    }
    if (told !== drawing) return undefined;
    const marked = await Promise.all(windows.map((window) => get("/api/v1/marks", { window })));
    const lines = found.flatMap((one, index) => one.series.map((line) => ({ name: windows[index], points: line.points })));
    if (!lines.some((line) => line.points.length)) return nothing(over, "No request is stored there. Import a run, or send some.");
    const marks = marked.flatMap((one) => one.marks).slice(0, 60);
    await chart(over, () => ({
      data: lines.map((line) => ({
        type: "scatter", mode: line.points.length < 40 ? "lines+markers" : "lines", name: line.name, x: line.points.map((point) => date(point[0])), y: line.points.map((point) => point[1]),
        customdata: line.points.map((point) => [seconds(point[1]), count(point[2])]), hovertemplate: "%{customdata[0]} of %{customdata[1]} requests<extra>%{fullData.name}</extra>",
      })).concat([{
        type: "scatter", mode: "markers", name: "marks", x: marks.map((mark) => date(mark.at_ns)), y: marks.map(() => 0), text: marks.map((mark) => `${mark.mark}: ${mark.text ?? mark.subject ?? ""}`),
        marker: { symbol: "triangle-up", size: 10 }, hovertemplate: "%{text}<extra></extra>", visible: marks.length > 0,
      }]),
      layout: { dragmode: "select", selectdirection: "h", yaxis: { title: { text: `${quantile(asked.quantile)} ${METRIC[asked.metric]}, s` } }, xaxis: { title: { text: "arrival" } }, showlegend: lines.length > 1 || marks.length > 0 },
    }), {
      label: `${quantile(asked.quantile)} ${METRIC[asked.metric]} over time; drag over it to choose a window`,
      numbers: { columns: [{ name: "window", key: 0 }, { name: "from", value: (row) => time(row[1]) }, { name: "value", num: true, value: (row) => seconds(row[2]) }, { name: "requests", num: true, key: 3 }], rows: lines.flatMap((line) => line.points.map((point) => [line.name, ...point])) },
    });
    over.removeAllListeners?.("plotly_selected");
    over.on("plotly_selected", (chosen) => {
      if (!chosen?.range) return;
      const [start, end] = chosen.range.x.map((at) => new Date(at).toISOString());
      const run = runs.length === 1 ? `${runs[0]}@` : runs.length ? `${runOf(asked[$("side").value]) ?? runs[0]}@` : "";
      form.elements[$("side").value].value = `${run}${start}/${end}`;
    });
  } catch (error) {
    nothing(over, error.message);
  }
}

async function judge() {
  const asked = values(form);
  address.set(asked);
  overTime();
  const mine = ++number;
  say(answer, "Judging: this reads every request, step and block of both windows …");
  try {
    const verdict = await get("/api/v1/diagnosis", asked);
    if (mine === number) show(verdict, asked);
  } catch (error) {
    if (mine === number) say(answer, error.message, true);
  }
}

function show(verdict, asked) {
  const report = new URLSearchParams(Object.entries(asked)).toString();
  const word = verdict.status === "explained" ? "warn" : verdict.status === "no_change" ? "good" : "soft";
  fill(answer,
    el("section", {},
      el("p", { class: "verdict" }, el("span", { class: `word ${word}` }, verdict.status.replaceAll("_", " ")), " ", verdict.verdict),
      windows(verdict),
      el("p", {}, el("a", { href: `/api/v1/reports?${report}&format=html`, target: "_blank" }, "the postmortem, to hand on"), " · ", el("a", { href: `/api/v1/diagnosis?${report}` }, "everything as JSON"))),
    el("div", { class: "cols" },
      el("section", {}, el("h2", {}, `Attribution: who owns the change of ${quantile(verdict.quantile)}`), el("div", { id: "waterfall", class: "chart" })),
      el("section", {}, el("h2", {}, "Composition: what slow requests are made of"), el("p", { class: "soft" }, "Describes, does not blame."), el("div", { id: "parts", class: "chart" }))),
    el("section", {}, el("h2", {}, "Causes"), verdict.causes.length ? verdict.causes.map((cause) => causeBox(cause, verdict)) : el("p", { class: "soft" }, "No cause is named.")),
    next(verdict),
    el("section", { class: "wide" }, el("h2", {}, "What else changed"), sideEffects(verdict)),
    el("section", { class: "wide" }, el("h2", {}, "Ruled out"), listed(verdict.excluded, (one) => [el("code", {}, one.cause), ` ${one.because}`])),
    verdict.not_observable?.length ? el("section", { class: "wide" }, el("h2", {}, "Not to be seen with what was sent"), listed(verdict.not_observable, (one) => [el("code", {}, one.cause ?? one), ` ${one.because ?? ""}`])) : null,
    el("section", { class: "wide" }, el("h2", {}, "Can the data be trusted?"), listed(verdict.quality, (one) => [el("span", { class: `word ${one.status === "ok" ? "good" : one.status === "warning" ? "warn" : "bad"}` }, one.status), ` ${one.statement}`])),
    el("section", { class: "wide" }, el("h2", {}, "How this was made"), listed(verdict.notes, (note) => [note])));
  speak(verdict.verdict);
  waterfall(verdict);
  parts(verdict);
}

function windows(verdict) {
  const row = (side) => {
    const { [side]: window } = verdict.windows;
    return { side, run: window.run ?? "live", from: window.start_ns, to: window.end_ns, n: verdict.n[side], effective: verdict.n_effective[side], ...verdict.delta[side] };
  };
  return el("div", { class: "wide" }, table([
    { name: "window", key: "side" }, { name: "run", key: "run" }, { name: "from", value: (one) => time(one.from) }, { name: "to", value: (one) => time(one.to) },
    { name: "requests", num: true, value: (one) => count(one.n) }, { name: "worth independent", num: true, value: (one) => count(Math.round(one.effective)) },
    { name: "mean", num: true, value: (one) => seconds(one.mean_s) }, { name: quantile(verdict.quantile), num: true, value: (one) => seconds(one.judged_s) },
  ], [row("baseline"), row("suspect")]));
}

function waterfall(verdict) {
  const node = $("waterfall");
  const byMean = verdict.delta.judged_s.interval_95 === null;
  const key = byMean ? "mean_s" : "judged_s";
  const what = byMean ? "mean" : quantile(verdict.quantile);
  const rows = verdict.attribution.filter((row) => row[key] !== null);
  if (!rows.length) return nothing(node, "There is no change to attribute.");
  const names = ["baseline", ...rows.map((row) => row.cause), "suspect"];
  const start = verdict.delta.baseline[key];
  return chart(node, () => ({
    data: [{
      type: "waterfall", x: names, measure: ["absolute", ...rows.map(() => "relative"), "total"], y: [start, ...rows.map((row) => row[key]), 0],
      text: [seconds(start), ...rows.map((row) => signed(row[key])), seconds(verdict.delta.suspect[key])], textposition: "outside", cliponaxis: false,
      increasing: { marker: { color: colour("--c3") } }, decreasing: { marker: { color: colour("--c2") } }, totals: { marker: { color: colour("--c0") } }, connector: { line: { color: colour("--line") } },
      customdata: ["", ...rows.map((row) => row.text), ""], hovertemplate: "%{x}: %{text}<br>%{customdata}<extra></extra>",
    }],
    layout: { xaxis: { tickangle: -35 }, yaxis: { title: { text: `${what} ${METRIC[verdict.metric]}, s` } }, margin: { l: 60, r: 16, t: 30, b: 130 } },
  }), {
    label: `Waterfall from ${seconds(start)} to ${seconds(verdict.delta.suspect[key])}: ${rows.map((row) => `${row.cause} ${signed(row[key])}`).join(", ")}`,
    numbers: {
      columns: [{ name: "row", key: "cause" }, { name: "what it is", key: "text", wrap: true }, { name: "mean", num: true, value: (row) => signed(row.mean_s) }, { name: quantile(verdict.quantile), num: true, value: (row) => signed(row.judged_s) },
        { name: "95 %", num: true, value: (row) => interval(byMean ? row.mean_interval_95 : row.interval_95) }, { name: "shortfall beyond", num: true, value: (row) => signed(row.es_s) }],
      rows,
    },
  });
}

const interval = (bounds) => (bounds && bounds.length === 2 ? `${signed(bounds[0])} to ${signed(bounds[1])}` : "–");

function parts(verdict) {
  const rows = verdict.composition;
  if (!rows.length) return nothing($("parts"), "Nobody told the phases of these requests.");
  return chart($("parts"), () => ({
    data: ["baseline_s", "suspect_s"].map((side) => ({ type: "bar", name: side.slice(0, -2), x: rows.map((row) => row.cause), y: rows.map((row) => row[side]), text: rows.map((row) => row.text), customdata: rows.map((row) => seconds(row[side])), textposition: "none", hovertemplate: "%{text}: %{customdata}<extra>%{fullData.name}</extra>" })),
    layout: { barmode: "group", xaxis: { tickangle: -35 }, yaxis: { title: { text: `around ${quantile(verdict.quantile)}, s` } }, margin: { l: 60, r: 16, t: 16, b: 120 } },
  }), {
    label: `Parts of the time of requests around ${quantile(verdict.quantile)}, baseline and suspect`,
    numbers: { columns: [{ name: "part", key: "cause" }, { name: "what it is", key: "text", wrap: true }, { name: "baseline", num: true, value: (row) => seconds(row.baseline_s) }, { name: "suspect", num: true, value: (row) => seconds(row.suspect_s) }], rows },
  });
}

function causeBox(cause, verdict) {
  const run = verdict.windows.suspect.run;
  const request = (id) => el("a", { href: `/requests/${encodeURIComponent(id)}${run ? `?window=${encodeURIComponent(run)}` : ""}` }, id);
  const evidence = cause.evidence.map((one) => el("li", {}, one.statement,
    one.value === null || one.value === undefined ? null : el("span", { class: "soft" }, ` (${three(one.value)} ${one.unit ?? ""})`),
    one.request_ids?.length ? el("span", { class: "soft" }, " for example ", one.request_ids.slice(0, 3).flatMap((id, index) => [index ? ", " : "", request(id)])) : null,
    one.sql ? el("details", {}, el("summary", {}, "the query"), el("pre", {}, one.sql), el("a", { href: `/sql?sql=${encodeURIComponent(one.sql)}` }, "open in the console")) : null));
  return el("article", {},
    el("h3", {}, el("a", { href: `/runbooks/${cause.cause}`, title: "what it is, what refutes it, what to do" }, el("code", {}, cause.cause)), " ", el("span", { class: `word ${cause.confidence_word === "high" ? "good" : "warn"}` }, `${cause.confidence_word} confidence, ${three(cause.confidence)}`)),
    el("p", {}, cause.summary),
    facts([
      ["owns", cause.share_p99 === null ? null : `${percent(cause.share_p99)} of the change (${signed(cause.p99_s)})`],
      ["where", cause.subject ? `${cause.subject.kind} ${cause.subject.id}` : null],
      ["when", cause.interval ? el("span", {}, time(cause.interval.start_ns), " to ", time(cause.interval.end_ns)) : null],
      ["what to do", el("ul", {}, (cause.remedy ?? []).map((one) => el("li", {}, one)))],
      ["would be refuted by", cause.refuted_by],
      ["evidence", el("ul", {}, evidence)],
    ]));
}

function next(verdict) {
  const { next_experiment: experiment } = verdict;
  if (!experiment) return null;
  return el("section", {}, el("h2", {}, "What to try next"), el("p", {}, experiment.statement), experiment.command ? el("pre", {}, experiment.command) : null,
    experiment.requests_per_window ? el("p", { class: "soft" }, `${count(experiment.requests_per_window)} requests a window, for a power of 0.9`) : null);
}

function sideEffects(verdict) {
  if (!verdict.side_effects.length) return el("p", { class: "soft" }, "Nothing else was measured in both windows.");
  const unit = (name) => (name.endsWith("_per_s") ? (value) => `${three(value)}/s` : name.endsWith("_s") ? seconds : three);
  return table([
    { name: "metric", key: "metric" }, { name: "baseline", num: true, value: (row) => unit(row.metric)(row.baseline) }, { name: "suspect", num: true, value: (row) => unit(row.metric)(row.suspect) },
    { name: "95 % of the difference", num: true, value: (row) => (row.interval_95 ? row.interval_95.map((bound) => unit(row.metric)(bound)).join(" to ") : "–") },
    { name: "changed", value: (row) => (row.changed ? el("b", {}, "yes") : "not beyond noise") },
  ], verdict.side_effects);
}

function listed(items, children) {
  if (!items || !items.length) return el("p", { class: "soft" }, "Nothing.");
  return el("ul", {}, items.map((item) => el("li", { class: "wrap" }, children(item))));
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); judge(); });
for (const name of ["metric", "quantile", "baseline", "suspect"]) form.elements[name].addEventListener("change", overTime);
if (address.all().suspect) judge();
else {
  overTime();
  say(answer, "Choose windows, then ask why.");
}
