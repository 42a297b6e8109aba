/* Charts in the page's own colours, each with a sentence for those who cannot see it, and its numbers as a table. */
import { el, fill, table } from "/static/dom.js";

const drawn = new Map();
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
scheme.addEventListener("change", () => drawn.forEach((draw) => draw()));

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const palette = () => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((index) => colour(`--c${index}`));

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
    return window.Plotly.react(node, data, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: palette(), font: { color: colour("--ink"), size: 13 },
      margin: { l: 56, r: 16, t: 16, b: 44 }, hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...others, ...axes,
      xaxis: { ...axis, ...xaxis }, yaxis: { rangemode: "tozero", ...axis, ...yaxis },
    }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "autoScale2d"] });
  };
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
