/* The course of one request: phases, tokens, the steps it shared and with whom, the blocks it missed, where it was sent. */
import { address, get } from "/static/api.js";
import { chart, nothing, palette } from "/static/chart.js";
import { $, count, date, el, facts, fill, percent, say, seconds, signed, table, time } from "/static/dom.js";

const id = decodeURIComponent(location.pathname.slice("/requests/".length));
const { window: run } = address.all();
const path = `/api/v1/requests/${encodeURIComponent(id)}`;
const query = run ? `?window=${encodeURIComponent(run)}` : "";
$("perfetto").href = `${path}/perfetto${query}`;
$("back").href = run ? `/requests?window=${encodeURIComponent(run)}` : "/requests";

const other = (row) => el("a", { href: `/requests/${encodeURIComponent(row.request_id)}${query}` }, row.request_id);

function cachedOf(row) {
  if (row.prompt_tokens === null || row.prompt_tokens === undefined) return null;
  if (row.cached_tokens === null) return `${count(row.prompt_tokens)} tokens; nobody told how many were cached`;
  return `${count(row.prompt_tokens)} tokens, ${count(row.cached_tokens)} of them cached (${percent(row.cached_tokens / Math.max(row.prompt_tokens, 1))})`;
}

function head(rows, course) {
  const boxes = rows.rows.map((row) =>
    el("section", {}, el("h2", {}, `Seen by the ${row.vantage}`, row.attempt ? ` · attempt ${row.attempt}` : ""), facts([
      ["state", el("span", { class: row.state === "finished" ? "word good" : "word bad" }, row.state)],
      ["TTFT", seconds(row.ttft_s)],
      ["TPOT", seconds(row.tpot_s)],
      ["E2E", seconds(row.e2e_s)],
      ["arrival", time(row.arrival_ns)],
      ["worker", row.worker],
      ["model", row.model],
      ["tenant", row.tenant],
      ["run", row.run_id],
      ["prompt", cachedOf(row)],
      ["output", row.output_tokens === null ? null : `${count(row.output_tokens)} tokens`],
      ["preempted", row.num_preemptions ? `${count(row.num_preemptions)} times, ${count(row.recomputed_tokens)} tokens computed again` : null],
      ["ended", [row.finish_reason, row.http_status && `HTTP ${row.http_status}`, row.error].filter(Boolean).join(" · ")],
    ])));
  fill($("answer"), el("div", { class: "cols" }, boxes));
  if (course.truncated.length) $("answer").append(el("p", { class: "warn" }, `Not all of its ${course.truncated.join(", ")} are shown.`));
}

function drawCourse(course) {
  const node = $("course");
  const phase = (event) => event.what.replace("phase ", "");
  const lane = (event) => (event.vantage ? `${event.vantage}${event.worker ? ` ${event.worker}` : ""}` : "transfer");
  const spans = course.events.filter((event) => event.what.startsWith("phase ") || event.what === "transfer");
  const moments = course.events.filter((event) => event.start_ns === event.end_ns && event.vantage);
  if (!spans.length && !moments.length) return nothing(node, "Nobody told the instants of this request.");
  const origin = Math.min(...course.events.map((event) => event.start_ns));
  const ms = (ns) => (ns - origin) / 1e6;
  const names = [...new Set(spans.map(phase))];
  const lengthOf = (event) => seconds((event.end_ns - event.start_ns) / 1e9) + (event.facts.tokens ? `, ${event.facts.tokens} tokens` : "");
  return chart(node, () => {
    const colours = palette();
    const bars = names.map((name, index) => {
      const mine = spans.filter((event) => phase(event) === name);
      return {
        type: "bar", orientation: "h", name, y: mine.map(lane), base: mine.map((event) => ms(event.start_ns)),
        x: mine.map((event) => (event.end_ns - event.start_ns) / 1e6), marker: { color: colours[index % colours.length] },
        customdata: mine.map(lengthOf), hovertemplate: `${name}: %{customdata}<extra></extra>`,
      };
    });
    const points = {
      type: "scatter", mode: "markers", name: "instants", x: moments.map((event) => ms(event.start_ns)), y: moments.map(lane),
      text: moments.map((event) => event.what), marker: { symbol: "line-ns-open", size: 22, line: { width: 2 } },
      hovertemplate: "%{text} at %{x:.1f} ms<extra></extra>",
    };
    const layout = { barmode: "overlay", xaxis: { title: { text: "after its first instant, ms" } }, yaxis: { rangemode: "normal" } };
    return { data: [...bars, points], layout };
  }, {
    label: `Phases of the request on a time axis: ${names.join(", ")}`,
    numbers: {
      columns: [
        { name: "phase", value: phase },
        { name: "at", key: "vantage" },
        { name: "starts", num: true, value: (row) => `${ms(row.start_ns).toFixed(1)} ms` },
        { name: "lasts", num: true, value: (row) => seconds((row.end_ns - row.start_ns) / 1e9) },
        { name: "tokens", num: true, value: (row) => count(row.facts.tokens) },
      ],
      rows: spans,
    },
  });
}

function drawTokens(rows) {
  const told = rows.rows.filter((row) => row.token_ns && row.token_ns.length > 1);
  if (!told.length) return nothing($("tokens"), "No instants of single tokens were told.");
  const gaps = told.map((row) => row.token_ns.slice(1).map((ns, index) => (ns - row.token_ns[index]) / 1e6));
  return chart($("tokens"), () => ({
    data: told.map((row, index) => ({
      type: "scatter", mode: "lines+markers", marker: { size: 4 }, name: `${row.vantage} ${row.worker ?? ""}`,
      x: gaps[index].map((_, token) => token + 2), y: gaps[index], hovertemplate: "token %{x}: %{y:.1f} ms<extra></extra>",
    })),
    layout: { xaxis: { title: { text: "token" } }, yaxis: { title: { text: "after the one before, ms" } }, showlegend: told.length > 1 },
  }), {
    label: `Time between tokens; the longest gap is ${seconds(gaps.flat().reduce((most, gap) => Math.max(most, gap), 0) / 1e3)}`,
    numbers: {
      columns: [{ name: "seen by", key: 0 }, { name: "token", num: true, value: (row) => count(row[1]) }, { name: "after the one before", num: true, value: (row) => seconds(row[2] / 1e3) }],
      rows: told.flatMap((row, index) => gaps[index].map((gap, token) => [`${row.vantage} ${row.worker ?? ""}`, token + 2, gap])),
    },
  });
}

function drawSteps(course) {
  const node = $("steps");
  if (!course.steps.length) {
    nothing(node, "Its workers told no steps, so what it waited behind is not known here.");
  } else if (!course.steps.some((step) => (step.prefill_tokens ?? step.decode_tokens ?? step.recomputed_tokens ?? null) !== null)) {
    nothing(node, `It lived through ${count(course.steps.length)} steps; none tells its tokens.`);
  } else {
    const middle = (step) => date(step.at_ns - (step.duration_s ?? 0) * 5e8);
    const kind = (name, of) => ({
      type: "bar", name, x: course.steps.map(middle), y: course.steps.map(of),
      width: course.steps.map((step) => Math.max((step.duration_s ?? 0) * 1e3, 0.1)),
      customdata: course.steps.map((step) => `step ${step.step}, ${seconds(step.duration_s)}, ${count(step.num_running)} running`),
      hovertemplate: `%{y} ${name}<br>%{customdata}<extra></extra>`,
    });
    chart(node, () => ({
      data: [
        kind("prefill tokens", (step) => step.prefill_tokens),
        kind("decode tokens", (step) => step.decode_tokens),
        kind("recomputed tokens", (step) => step.recomputed_tokens),
      ],
      layout: { barmode: "stack", yaxis: { title: { text: "tokens of the step" } }, xaxis: { title: { text: "time" } } },
    }), {
      label: `${course.steps.length} steps while it was there, with the tokens that each computed`,
      numbers: {
        columns: [
          { name: "step", num: true, value: (row) => count(row.step) }, { name: "ended", value: (row) => time(row.at_ns) }, { name: "took", num: true, value: (row) => seconds(row.duration_s) },
          { name: "running", num: true, value: (row) => count(row.num_running) }, { name: "prefill tokens", num: true, value: (row) => count(row.prefill_tokens) },
          { name: "decode tokens", num: true, value: (row) => count(row.decode_tokens) }, { name: "recomputed", num: true, value: (row) => count(row.recomputed_tokens) },
        ],
        rows: course.steps,
      },
    });
  }
  if (!course.neighbours.length) return;
  const mine = course.rows.find((row) => row.vantage === "engine") ?? course.rows[0];
  fill($("neighbours"), el("details", {}, el("summary", {}, `${count(course.neighbours.length)} other requests shared its workers meanwhile`), table([
    { name: "request", value: other },
    { name: "tenant", key: "tenant" },
    { name: "arrival", value: (row) => time(row.arrival_ns) },
    { name: "came later by", num: true, value: (row) => signed((row.arrival_ns - mine.arrival_ns) / 1e9) },
    { name: "TTFT", num: true, value: (row) => seconds(row.first_token_ns === null ? null : (row.first_token_ns - row.arrival_ns) / 1e9) },
    { name: "prompt", num: true, value: (row) => count(row.prompt_tokens) },
    { name: "cached", num: true, value: (row) => count(row.cached_tokens) },
    { name: "output", num: true, value: (row) => count(row.output_tokens) },
  ], course.neighbours)));
}

function drawRoutes(rows) {
  if (!rows.routes.length) return say($("routes"), "No router told a decision about it.");
  return fill($("routes"), rows.routes.map((route) => table([
    { name: "worker", value: (row) => (row.worker === route.chosen ? el("b", {}, `${row.worker} (chosen)`) : row.worker) },
    { name: "matched tokens", num: true, value: (row) => count(row.matched_tokens) },
    { name: "load", num: true, value: (row) => count(row.load) },
    { name: "queue", num: true, value: (row) => count(row.queue) },
    { name: "score", num: true, value: (row) => count(row.score) },
  ], route.candidates ?? [], { caption: `${route.policy ?? "unknown policy"}, decided in ${seconds(route.decision_s)}` })));
}

function drawLineage(course) {
  if (!course.lineage.length) return say($("lineage"), "None is known: every reusable block was found, or the engine tells no block hashes.");
  return fill($("lineage"), table([
    { name: "blocks", num: true, value: (row) => count(row.num_blocks) },
    { name: "from block", num: true, value: (row) => count(row.first_block) },
    { name: "what became of them", key: "fate" },
    { name: "before arrival", num: true, value: (row) => seconds(row.before_s) },
    { name: "by request", value: (row) => (row.caused_by ? other({ request_id: row.caused_by }) : null) },
    { name: "unused until then", num: true, value: (row) => seconds(row.idle_s) },
    { name: "reason", key: "reason" },
    { name: "worker", key: "worker" },
  ], course.lineage));
}

/** Blocks that fared alike at one moment are one line. */
function merged(events) {
  const lines = new Map();
  for (const event of events) {
    const isBlock = event.what.startsWith("block ");
    const key = isBlock ? [event.what, event.start_ns, event.facts.tier, event.facts.reason].join() : lines.size;
    const line = lines.get(key);
    if (line) line.number += 1;
    else lines.set(key, { ...event, number: 1 });
  }
  return [...lines.values()].map(({ number, ...line }) =>
    number === 1 ? line : { ...line, what: line.what.replace("block", `${number} blocks`), facts: { tier: line.facts.tier, reason: line.facts.reason } });
}

function drawEvents(course) {
  const origin = course.events.length ? course.events[0].start_ns : 0;
  const text = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
  fill($("events"), table([
    { name: "after", num: true, value: (row) => `${((row.start_ns - origin) / 1e6).toFixed(1)} ms` },
    { name: "lasts", num: true, value: (row) => (row.end_ns > row.start_ns ? seconds((row.end_ns - row.start_ns) / 1e9) : null) },
    { name: "at", key: "vantage" },
    { name: "what", key: "what" },
    { name: "facts", wrap: true, value: (row) => Object.entries(row.facts).filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${text(value)}`).join(" · ") },
  ], merged(course.events)));
}

try {
  say($("answer"), "Looking …");
  const [rows, course] = await Promise.all([get(path, { window: run }), get(`${path}/timeline`, { window: run })]);
  head(rows, course);
  drawCourse(course);
  drawTokens(rows);
  drawSteps(course);
  drawRoutes(rows);
  drawLineage(course);
  drawEvents(course);
} catch (error) {
  say($("answer"), error.message, true);
}
