/* The SQL console: one statement, its rows as a table, as a chart where that makes sense, as CSV and Arrow. */
import { address, post } from "/static/api.js";
import { chart, plain } from "/static/chart.js";
import { $, count, el, fill, say, speak, table } from "/static/dom.js";

const form = $("ask");
const text = form.elements.sql;
const answer = $("answer");
const SHOWN = 500;
let stopper = null;
let last = null;

$("examples").addEventListener("change", (event) => { if (event.target.value) text.value = event.target.value; });
for (const button of document.querySelectorAll("button.column"))
  button.addEventListener("click", () => { text.setRangeText(button.dataset.name, text.selectionStart, text.selectionEnd, "end"); text.focus(); });

async function run() {
  stopper?.abort();
  stopper = new AbortController();
  address.set({ sql: text.value });
  say(answer, "Running …");
  $("chart").hidden = true;
  $("run").setAttribute("aria-disabled", "true");
  $("stop").disabled = false;
  $("csv").disabled = true;
  const started = performance.now();
  try {
    last = await post("/api/v1/sql", { sql: text.value, max_rows: Number(form.elements.max_rows.value) || 1000 }, { signal: stopper.signal });
    show(last, (performance.now() - started) / 1e3);
  } catch (error) {
    last = null;
    say(answer, error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  } finally {
    $("run").removeAttribute("aria-disabled");
    $("stop").disabled = true;
  }
}

const isNumber = (type) => /INT|DOUBLE|FLOAT|DECIMAL|HUGEINT/.test(type);
const shown = (value) => (value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(7)) : String(value));

function show(found, took) {
  const columns = found.columns.map((column, index) => ({ name: column.name, num: isNumber(column.type), value: (row) => shown(row[index]) }));
  const cut = found.truncated ? `, and more that were cut off` : "";
  const rest = found.rows.length > SHOWN ? `; the first ${SHOWN} are shown, CSV has all` : "";
  const caption = `${count(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"}${cut} in ${took.toFixed(2)} s${rest}`;
  fill(answer, table(columns, found.rows.slice(0, SHOWN), { caption }));
  speak(caption);
  $("csv").disabled = !found.rows.length;
  draw(found);
}

/** A chart where there are a name or an instant first and numbers after it. */
function draw(found) {
  const node = $("chart");
  const numbers = found.columns.map((column, index) => [column, index]).filter(([column]) => isNumber(column.type));
  const axis = found.columns.findIndex((column) => /TIMESTAMP|DATE|VARCHAR/.test(column.type));
  if (axis < 0 || !numbers.length || found.rows.length < 2) return;
  const isTime = !/VARCHAR/.test(found.columns[axis].type);
  const names = found.columns.findIndex((column, index) => index !== axis && /VARCHAR/.test(column.type));
  const [[measure, place]] = numbers.slice(-1);
  const groups = names >= 0 && isTime ? [...new Set(found.rows.map((row) => row[names]))].slice(0, 9) : [null];
  node.hidden = false;
  chart(node, () => ({
    data: groups.map((group) => {
      const rows = group === null ? found.rows : found.rows.filter((row) => row[names] === group);
      return { type: isTime ? "scatter" : "bar", mode: "lines", name: group ?? measure.name, x: rows.map((row) => row[axis]), y: rows.map((row) => row[place]) };
    }),
    layout: { xaxis: { title: { text: plain(found.columns[axis].name) } }, yaxis: { title: { text: plain(measure.name) } }, showlegend: groups.length > 1 },
  }), { label: `${measure.name} by ${found.columns[axis].name}` });
}

const save = (blob, name) => {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};

$("csv").addEventListener("click", () => {
  const cell = (value) => {
    const written = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    return /[",\r\n]/.test(written) ? `"${written.replaceAll('"', '""')}"` : written;
  };
  const lines = [last.columns.map((column) => cell(column.name)), ...last.rows.map((row) => row.map(cell))];
  save(new Blob([lines.map((line) => line.join(",")).join("\r\n")], { type: "text/csv" }), "kvscope.csv");
});
$("arrow").addEventListener("click", async () => {
  try {
    const got = await post("/api/v1/sql", { sql: text.value, max_rows: Number(form.elements.max_rows.value) || 1000 }, { accept: "application/vnd.apache.arrow.stream" });
    save(await got.blob(), "kvscope.arrow");
  } catch (error) {
    say(answer, error.message, true);
  }
});
$("stop").addEventListener("click", () => stopper?.abort());
form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } });
if (address.all().sql) {
  text.value = address.all().sql;
  run();
}
