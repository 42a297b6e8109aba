/* The overview: its live part comes by server-sent events, the last hour as a chart that is asked for every half minute. */
import { get } from "/static/api.js";
import { chart, nothing } from "/static/chart.js";
import { $, date, fill, localise, seconds, time } from "/static/dom.js";

localise();

const pulse = $("pulse");
const source = new EventSource("/live");
source.addEventListener("now", (event) => {
  $("now").innerHTML = JSON.parse(event.data);
  localise($("now"));
  fill(pulse, "Live, as of ", time(Date.now() * 1e6, { short: true }), ".");
});
source.addEventListener("error", () => fill(pulse, "The collector does not answer; what is shown is older. Trying again."));

async function hour() {
  const node = $("chart");
  try {
    const [found, marked] = await Promise.all([
      get("/api/v1/series", { metric: "ttft", stat: "0.99", by: "worker", window: "-1h/now" }),
      get("/api/v1/marks", { window: "-1h/now" }),
    ]);
    const shown = found.series.filter((one) => one.points.length).slice(0, 9);
    if (!shown.length) {
      nothing(node, "No live request arrived in the last hour. Imported runs are under Requests and Diagnosis.");
      return;
    }
    const marks = marked.marks.slice(-20);
    await chart(node, () => ({
      data: shown.map((one) => ({
        name: one.labels.worker ?? "no name", x: one.points.map((point) => date(point[0])), y: one.points.map((point) => point[1]),
        type: "scatter", mode: "lines", hovertemplate: "%{y:.3s}s · %{x}<extra>%{fullData.name}</extra>",
      })),
      layout: {
        yaxis: { title: { text: "P99 TTFT, s" } }, xaxis: { title: { text: "arrival" } }, showlegend: true,
        shapes: marks.map((mark) => ({ type: "line", x0: date(mark.at_ns), x1: date(mark.at_ns), yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1 } })),
      },
    }), {
      label: `P99 time to first token of ${shown.length} workers over the last hour`,
      numbers: {
        columns: [{ name: "worker", key: 0 }, { name: "from", value: (row) => time(row[1]) }, { name: "P99 TTFT", num: true, value: (row) => seconds(row[2]) }, { name: "requests", num: true, key: 3 }],
        rows: shown.flatMap((one) => one.points.map((point) => [one.labels.worker, ...point])),
      },
    });
  } catch (error) {
    nothing(node, error.message);
  }
}

hour();
setInterval(hour, 30_000);
