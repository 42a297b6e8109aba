/* Small words for making pages: elements, numbers with their units, instants in the reader's zone, tables. */

/** An element. Attributes that are null are left out; children are nodes or text, null ones are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const $ = (id) => document.getElementById(id);

/** Seconds as people say them: three digits and a unit; a dash where unknown. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 120) return `${three(value / 60)} min`;
  if (size >= 1) return `${three(value)} s`;
  if (size >= 1e-3 || value === 0) return `${three(value * 1e3)} ms`;
  return `${three(value * 1e6)} µs`;
}

/** A signed number of seconds. */
export const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + seconds(value));

/** A number with three digits, grouped, never in powers of ten. */
export function three(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits });
}

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
export const percent = (value) => (value === null || value === undefined ? "–" : `${three(value * 100)} %`);

/** Nanoseconds since 1970 as a Date. JSON numbers lose the last digits of ns; milliseconds are what is shown. */
export const date = (ns) => new Date(ns / 1e6);

const ZONE = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false };

/** An instant in the reader's zone, with UTC where one points at it. */
export function time(ns, { short = false } = {}) {
  if (ns === null || ns === undefined) return "–";
  const at = date(ns);
  const text = short ? at.toLocaleTimeString("sv") : at.toLocaleString("sv", ZONE);
  return el("time", { datetime: at.toISOString(), title: utc(ns) }, text);
}

export const utc = (ns) => date(ns).toISOString().replace("T", " ").replace("Z", " UTC");

/**
 * A table. columns: [{name, key or value(row), num, sort}]; with onsort, columns that have `sort` get a button.
 */
export function table(columns, rows, { caption = null, sort = null, descending = true, onsort = null } = {}) {
  const head = columns.map((column) => {
    const sorted = column.sort && column.sort === sort ? (descending ? "descending" : "ascending") : null;
    const label = column.sort && onsort ? el("button", { type: "button", onclick: () => onsort(column.sort) }, column.name) : column.name;
    return el("th", { scope: "col", class: column.num ? "num" : null, "aria-sort": sorted }, label);
  });
  const body = rows.map((row) => line(columns, row));
  return el("table", {}, caption && el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

const LONG = 60;

/** A row of a table; names that are long are broken where they must be. */
export function line(columns, row) {
  return el("tr", {}, columns.map((column) => {
    const shown = column.value ? column.value(row) : row[column.key];
    const isLong = (typeof shown === "string" ? shown : shown?.textContent ?? "").length > LONG;
    return el("td", { class: column.num ? "num" : column.wrap || isLong ? "wrap" : null }, shown === null || shown === undefined || shown === "" ? "–" : shown);
  }));
}

/** Put children in place of what an element holds. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Draw anew in an element: what was unfolded stays so, and who stood on a link or a button stands on the like of it again. */
export function renew(node, draw) {
  const stood = node.contains(document.activeElement) ? document.activeElement : null;
  const open = [...node.querySelectorAll("details")].map((one) => one.open);
  draw();
  const folds = node.querySelectorAll("details");
  if (folds.length === open.length) folds.forEach((one, index) => { one.open = open[index]; });
  if (!stood || stood.isConnected) return;
  const alike = (one) => one.textContent === stood.textContent && one.getAttribute("href") === stood.getAttribute("href");
  [...node.querySelectorAll("a, button, summary")].find(alike)?.focus({ preventScroll: true });
}

/** Say what goes on, or what went wrong, in its place and to screen readers. */
export function say(node, text, bad = false) {
  fill(node, el("p", { class: bad ? "say bad" : "say", role: bad ? "alert" : null }, text));
  if (!bad) speak(text);
}

/** One sentence to screen readers: what came, where the page shows more than anybody wants to have read aloud. */
export function speak(text) {
  if ($("spoken").textContent !== text) $("spoken").textContent = text;
}

/** Facts as a list of term and value; unknown ones are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, known.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** Make every <time> that the server wrote speak the reader's zone. */
export function localise(root = document) {
  for (const node of root.querySelectorAll("time[datetime]")) {
    const at = new Date(node.getAttribute("datetime"));
    if (!node.title && !Number.isNaN(at.getTime())) {
      node.title = at.toISOString().replace("T", " ").replace(/\.\d+Z|Z/, " UTC");
      node.textContent = at.toLocaleString("sv", ZONE);
    }
  }
}

const offset = new Intl.DateTimeFormat("en", { timeZoneName: "longOffset" }).formatToParts(new Date()).find((part) => part.type === "timeZoneName").value;
$("zone").textContent = `Times are those of ${Intl.DateTimeFormat().resolvedOptions().timeZone} (${offset.replace("GMT", "UTC")}); point at one for UTC.`;

// On a narrow screen the list of pages scrolls; the page that is open should be seen in it.
document.querySelector(".bar [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
