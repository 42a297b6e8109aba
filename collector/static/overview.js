/* The overview: its live part comes by server-sent events, the last hour as a chart that is asked for every half minute. */
import { get } from "/static/api.js";
import { chart, highest, nothing } from "/static/chart.js";
import { $, date, fill, localise, renew, seconds, time } from "/static/dom.js";

localise();

const node = $("now");
const pulse = $("pulse");
const RETRY_MS = 10_000;

/** Follow the stream; the browser connects again by itself, unless the collector refused it. */
function follow() {
  const source = new EventSource("/live");
  source.addEventListener("now", (event) => show(JSON.parse(event.data), "Live, as of "));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) refused();
    else fill(pulse, "The collector does not answer; what is shown is older. Trying again.");
  });
}

/** No stream for this reader: ask for one picture, and try the stream again a little later. */
async function refused() {
  setTimeout(follow, RETRY_MS);
  try {
    const found = await get("/live/once");
    const why = found.readers >= found.most_readers ? "too many readers" : "the stream was refused";
    show(found.html, `Live tiles paused: ${why}, polling every ${RETRY_MS / 1000} s. As of `);
  } catch (error) {
    fill(pulse, `Live tiles paused: ${error.message}`);
  }
}

function show(html, words) {
  const marked = document.getSelection();
  if (!marked.isCollapsed && node.contains(marked.anchorNode)) return; // somebody is marking words in it
  renew(node, () => {
    node.innerHTML = html;
    localise(node);
  });
  fill(pulse, words, time(Date.now() * 1e6, { short: true }), ".");
}

follow();

async function hour() {
  const node = $("chart");
  try {
    const [found, marked] = await Promise.all([
      get("/api/v1/series", { metric: "ttft", stat: "0.99", by: "worker", window: "-1h/now" }),
      get("/api/v1/marks", { window: "-1h/now" }),
    ]);
    const { shown, which } = highest(found.series, 9);
    $("which").textContent = which;
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
      label: `P99 time to first token of ${shown.length} workers over the last hour${which && `, ${which}`}`,
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
