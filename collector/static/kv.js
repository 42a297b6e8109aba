/* The KV map of a worker: lives of blocks as bars in slots, and beside it what its steps and block events tell. */
import { address, fillForm, get, values } from "/static/api.js";
import { chart, colour, nothing, palette } from "/static/chart.js";
import { $, count, date, el, fill, percent, say, seconds, three, time } from "/static/dom.js";

const form = $("ask");
let number = 0;

/** Workers that told steps in the window, else those that told blocks, for the list of the field; answers with the first. */
async function workers(window) {
  for (const metric of ["step.blocks_used", "block.stored"]) {
    const found = await get("/api/v1/series", { metric, by: "worker", window, stat: metric.startsWith("step") ? "last" : "count" });
    const names = found.series.map((one) => one.labels.worker).filter(Boolean);
    fill($("workers"), names.map((name) => el("option", { value: name })));
    if (names.length) return names[0];
  }
  return undefined;
}

const CHARTS = ["map", "states", "events", "gaps", "preemptions"];

async function show() {
  const asked = values(form);
  const window = asked.window ?? "-15m/now";
  const mine = ++number;
  try {
    const first = await workers(window);
    if (!asked.worker && first) asked.worker = form.elements.worker.value = first;
  } catch (error) {
    say($("said"), error.message, true);
    return;
  }
  address.set(asked);
  if (!asked.worker) {
    say($("said"), `No worker told its steps or blocks in ${window}. Choose an imported run as the window, or name a worker.`);
    CHARTS.forEach((id) => nothing($(id), "Nothing was told."));
    return;
  }
  say($("said"), "Following every block …");
  for (const id of CHARTS) if (!$(id).querySelector(".main-svg")) nothing($(id), "Looking …");
  const series = (metric, stat) => get("/api/v1/series", { metric, stat, by: "worker", window }).then((found) => found.series.find((one) => one.labels.worker === asked.worker)?.points ?? []);
  const part = async (ask, draw, ...nodes) => {
    try {
      const found = await ask;
      if (mine === number) draw(found);
    } catch (error) {
      if (mine === number) nodes.forEach((node) => nothing(node, error.message));
    }
  };
  await Promise.all([
    part(get("/api/v1/kv", { worker: asked.worker, window, colour: asked.colour }), (found) => { draw(found); gaps(found); }, $("map"), $("gaps")).then(() => mine === number && fill($("said"))),
    part(Promise.all(["blocks_used", "blocks_cached", "blocks_reserved", "blocks_total"].map((name) => series(`step.${name}`, "mean"))), ([used, cached, reserved, total]) => states(used, cached, reserved, total), $("states")),
    part(Promise.all(["stored", "hit", "evicted"].map((name) => series(`block.${name}`, "count"))), (found) => bars($("events"), ["stored", "hit", "evicted"], found, "blocks"), $("events")),
    part(series("step.num_preempted", "sum"), (found) => bars($("preemptions"), ["preempted"], [found], "requests"), $("preemptions")),
  ]);
}

function draw(found) {
  const node = $("map");
  if (!found.cells.length) return nothing(node, `Worker ${found.worker} told nothing of its blocks in ${found.window}.`);
  const names = found.legend;
  const share = found.drawn_share < 1 ? `; ${percent(found.drawn_share)} of the blocks are drawn, chosen by hash` : "";
  return chart(node, () => {
    const colours = palette();
    const steps = names.flatMap((_, index) => [[index / names.length, colours[index % colours.length]], [(index + 1) / names.length, colours[index % colours.length]]]);
    return {
      data: [
        { type: "heatmap", x: found.at_ns.map(date), z: found.cells.map((row) => row.map((cell) => (cell < 0 ? null : cell))), zmin: -0.5, zmax: names.length - 0.5, colorscale: steps, showscale: false, text: found.cells.map((row) => row.map((cell) => (cell < 0 ? "empty" : names[cell]))), hovertemplate: "%{text}<br>%{x}<br>slot %{y}<extra></extra>", xgap: 0, ygap: 0 },
        ...names.map((name, index) => ({ type: "scatter", mode: "markers", x: [null], y: [null], name, marker: { symbol: "square", size: 12, color: colours[index % colours.length] } })),
      ],
      layout: { height: 480, xaxis: { title: { text: "time" }, range: [date(found.start_ns), date(found.end_ns)] }, yaxis: { title: { text: `blocks that lay there at once${share ? " (a part)" : ""}` } }, showlegend: true },
    };
  }, { label: `KV map of ${found.worker}: at most ${count(found.blocks_drawn)} blocks at once, of ${names.join(", ")}${share}` });
}

function gaps(found) {
  const { hit, evicted } = found.gaps;
  const told = [["unused when hit (reuse gap)", hit], ["unused when evicted (residence)", evicted]].filter(([, list]) => list);
  if (!told.length) return nothing($("gaps"), "Nobody told how long blocks were unused when they were hit or evicted.");
  return chart($("gaps"), () => ({
    data: told.map(([name, list]) => ({ type: "scatter", mode: "lines", name, x: list, y: list.map((_, index) => index * 5), hovertemplate: "%{y} % had been unused for %{x:.3s}s or less<extra></extra>" })),
    layout: { xaxis: { title: { text: "s without use" } }, yaxis: { title: { text: "% of them" }, range: [0, 100] } },
  }), {
    label: told.map(([name, list]) => `${name}: half within ${seconds(list[10])}`).join("; "),
    numbers: { columns: [{ name: "what", key: 0 }, { name: "share of them", num: true, value: (row) => percent(row[1]) }, { name: "within", num: true, value: (row) => seconds(row[2]) }], rows: told.flatMap(([name, list]) => list.map((value, index) => [name, index * 0.05, value])) },
  });
}

function states(used, cached, reserved, total) {
  if (!used.length) return nothing($("states"), "Its steps tell no blocks.");
  const line = (name, points, more) => ({ type: "scatter", mode: "lines", name, x: points.map((point) => date(point[0])), y: points.map((point) => point[1]), hovertemplate: `%{y:,.0f} ${name}<extra></extra>`, ...more });
  const stacked = { stackgroup: "blocks", line: { width: 0.5 } };
  return chart($("states"), () => ({
    data: [line("used", used, stacked), line("cached", cached, stacked), ...(reserved.some((point) => point[1]) ? [line("reserved", reserved, stacked)] : []), line("all", total, { line: { dash: "dot", color: colour("--soft") } })],
    layout: { yaxis: { title: { text: "blocks" } }, xaxis: { title: { text: "time" } } },
  }), { label: `Used and cached blocks over time, of ${three(total.at(-1)?.[1])}`, numbers: { columns: [{ name: "from", value: (row) => time(row[0]) }, { name: "used", num: true, value: (row) => three(row[1]) }], rows: used } });
}

function bars(node, names, found, unit) {
  if (!found.some((points) => points.some((point) => point[1]))) return nothing(node, `None was told: ${names.join(", ")}.`);
  return chart(node, () => ({
    data: names.map((name, index) => ({ type: "bar", name, x: found[index].map((point) => date(point[0])), y: found[index].map((point) => point[1]), hovertemplate: `%{y:,} ${name}<extra></extra>` })),
    layout: { barmode: "group", yaxis: { title: { text: unit } }, xaxis: { title: { text: "time" } }, showlegend: true },
  }), { label: `${names.join(", ")} over time`, numbers: { columns: [{ name: "what", key: 0 }, { name: "from", value: (row) => time(row[1]) }, { name: unit, num: true, value: (row) => count(row[2]) }], rows: names.flatMap((name, index) => found[index].map((point) => [name, ...point])) } });
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
show();
