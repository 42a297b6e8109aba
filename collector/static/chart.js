/* Charts in the page's own colours, each with a sentence for those who cannot see it, and its numbers as a table. */
import { el, fill, table, utc } from "/static/dom.js";

const drawn = new Map();
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", () => drawn.forEach((draw) => draw()));

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const palette = () => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((index) => colour(`--c${index}`));

/** Text as plotly takes it: it reads tags in names, and drops those that it does not know. */
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

const NAME = 32;
const named = (text) => plain(text.length > NAME ? `${text.slice(0, NAME - 9)}…${text.slice(-8)}` : text);
const deep = (value) => (typeof value === "string" ? plain(value) : Array.isArray(value) ? value.map(deep) : value);

/** Names along an axis, shortened where they stay different. */
function categories(values) {
  const each = (change) => values.map((value) => (typeof value === "string" ? change(value) : value));
  const short = each(named);
  return new Set(short).size === new Set(values).size ? short : each(plain);
}

/** A trace whose names stay text and leave the chart its room, and whose instants are told in UTC as well where one points. */
function told(trace) {
  const made = { ...trace };
  if (typeof made.name === "string") made.name = named(made.name);
  for (const part of ["text", "customdata"]) if (made[part]) made[part] = deep(made[part]);
  for (const axis of ["x", "y"]) if (made[axis]?.some?.((value) => typeof value === "string")) made[axis] = categories(made[axis]);
  if (made.x?.[0] instanceof Date && made.type !== "heatmap") {
    made.hovertext = made.x.map((at) => utc(at.getTime() * 1e6));
    made.hovertemplate = made.hovertemplate?.replace("<extra>", "<br>%{hovertext}<extra>");
  }
  return made;
}

/**
 * Draw into a node. make() answers {data, layout} and is called again when light turns to dark.
 * label: what the chart shows, in a sentence; numbers: {columns, rows} of the same as a table.
 */
export function chart(node, make, { label, numbers = null } = {}) {
  const draw = () => {
    const { data, layout = {} } = make();
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
    const { xaxis = {}, yaxis = {}, ...others } = layout;
    const axes = Object.fromEntries(Object.entries(others).filter(([name]) => /^[xy]axis\d/.test(name)).map(([name, value]) => [name, { ...axis, ...value }]));
    return window.Plotly.react(node, data.map(told), {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: palette(), font: { color: colour("--ink"), size: 13 },
      margin: { l: 56, r: 16, t: 16, b: 44 }, hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...others, ...axes,
      xaxis: { ...axis, ...xaxis }, yaxis: { rangemode: "tozero", ...axis, ...yaxis },
    }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "autoScale2d"] });
  };
  if (!drawn.has(node)) node.replaceChildren(); // what stood there in words
  node.classList.remove("empty");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  drawn.set(node, draw);
  const other = node.nextElementSibling;
  if (other && other.classList.contains("numbers")) other.remove();
  if (numbers && numbers.rows.length) {
    const details = el("details", { class: "numbers wide" }, el("summary", {}, "the numbers as a table"));
    details.addEventListener("toggle", () => details.children.length < 2 && details.append(table(numbers.columns, numbers.rows)), { once: true });
    node.after(details);
  }
  return draw();
}

/** Of series with points the highest by their mean, as many as a chart bears, and a word on how many those are of all. */
export function highest(series, most) {
  const told = series.filter((one) => one.points.length);
  if (told.length <= most) return { shown: told, which: "" };
  const mean = (one) => one.points.reduce((sum, point) => sum + (point[1] ?? 0), 0) / one.points.length;
  const shown = told.map((one) => [mean(one), one]).sort((a, b) => b[0] - a[0]).slice(0, most).map(([, one]) => one);
  return { shown, which: `the ${most} highest of ${told.length}` };
}

/** No chart, and why. */
export function nothing(node, why) {
  if (drawn.delete(node)) window.Plotly.purge(node);
  node.classList.add("empty");
  node.removeAttribute("role");
  node.removeAttribute("aria-label");
  const other = node.nextElementSibling;
  if (other && other.classList.contains("numbers")) other.remove();
  fill(node, el("p", { class: "say" }, why));
}
