/* What the stored rows tell, and which causes that lets us judge. */
import { address, fillForm, get, values } from "/static/api.js";
import { $, count, el, fill, percent, say, table } from "/static/dom.js";

const form = $("ask");

async function show() {
  const asked = values(form);
  address.set(asked);
  say($("causes"), "Looking …");
  fill($("columns"));
  try {
    const found = await get("/api/v1/sight", asked);
    const able = found.causes.filter((one) => !one.lacks.length).length;
    const metrics = found.metrics.length ? found.metrics.map((name) => name.toUpperCase()).join(", ") : "no latency";
    fill($("causes"),
      el("p", { class: "verdict" }, `In ${found.window}: changes of ${metrics} can be judged, and ${able} of ${found.causes.length} causes.`),
      table([
        { name: "cause", value: (row) => el("code", {}, row.cause) },
        { name: "here", value: (row) => el("span", { class: `word ${row.lacks.length ? "warn" : "good"}` }, row.lacks.length ? "not observable" : "can be judged") },
        { name: "what it is", key: "summary", wrap: true },
        { name: "lacks", wrap: true, value: (row) => row.lacks.flatMap((name, index) => [index ? ", " : "", el("code", {}, name)]) },
      ], found.causes));
    fill($("columns"), found.kinds.map((kind) => el("details", {}, el("summary", {}, el("code", {}, kind.kind), ` ${count(kind.rows)} rows, ${kind.columns.filter((one) => one.told).length} of ${kind.columns.length} columns told`), table([
      { name: "column", value: (row) => el("code", {}, row.name) },
      { name: "told by", num: true, value: (row) => (row.told === null ? "no rows" : row.told ? `${percent(row.told)} of rows` : "nobody") },
    ], kind.columns))));
  } catch (error) {
    say($("causes"), error.message, true);
  }
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
show();
