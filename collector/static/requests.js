/* A list of requests, page after page by its cursor, however many there are. */
import { address, fillForm, get, values } from "/static/api.js";
import { $, count, el, fill, line, say, seconds, speak, table, time } from "/static/dom.js";

const PAGE = 100;
const form = $("ask");
const list = $("list");
const more = $("more");
let shown = 0;
let cursor = null;
let asked = {};
let number = 0;

const link = (row) => {
  const query = row.run_id ? `?window=${encodeURIComponent(row.run_id)}` : "";
  return el("a", { href: `/requests/${encodeURIComponent(row.request_id)}${query}` }, row.request_id);
};

const COLUMNS = [
  { name: "request", value: link },
  { name: "arrival", value: (row) => time(row.arrival_ns), sort: "arrival" },
  { name: "TTFT", num: true, value: (row) => seconds(row.ttft_s), sort: "ttft" },
  { name: "TPOT", num: true, value: (row) => seconds(row.tpot_s), sort: "tpot" },
  { name: "E2E", num: true, value: (row) => seconds(row.e2e_s), sort: "e2e" },
  { name: "queue", num: true, value: (row) => seconds(row.queue_s), sort: "queue" },
  { name: "prefill", num: true, value: (row) => seconds(row.prefill_s), sort: "prefill" },
  { name: "prompt", num: true, value: (row) => count(row.prompt_tokens), sort: "prompt_tokens" },
  { name: "cached", num: true, value: (row) => count(row.cached_tokens), sort: "cached_tokens" },
  { name: "output", num: true, value: (row) => count(row.output_tokens), sort: "output_tokens" },
  { name: "preempted", num: true, value: (row) => count(row.num_preemptions), sort: "preemptions" },
  { name: "worker", key: "worker" },
  { name: "tenant", key: "tenant" },
  { name: "seen by", key: "vantage" },
  { name: "state", value: (row) => el("span", { class: row.state === "finished" ? null : "bad" }, row.state) },
];

/** The first page of what the form asks for, or the next one of what was asked. */
async function ask(fresh) {
  if (fresh) {
    asked = values(form);
    address.set(asked);
    cursor = null;
    more.hidden = true;
    say(list, "Looking …");
  }
  const mine = ++number;
  more.setAttribute("aria-disabled", "true");
  try {
    const page = await get("/api/v1/requests", { ...asked, limit: PAGE, cursor });
    if (mine !== number) return;
    cursor = page.next_cursor;
    more.hidden = cursor === null;
    if (fresh) start(page);
    else list.querySelector("tbody").append(...page.requests.map((row) => line(COLUMNS, row)));
    shown = (fresh ? 0 : shown) + page.requests.length;
    const caption = list.querySelector("caption");
    if (caption) speak(caption.textContent = `${count(shown)}${cursor === null ? " and no more" : " so far"}, in ${page.window}`);
  } catch (error) {
    if (mine === number && fresh) say(list, error.message, true);
    else if (mine === number) say($("said"), error.message, true);
  } finally {
    if (mine === number) more.removeAttribute("aria-disabled");
  }
}

/** The table of the first page. */
function start(page) {
  fill($("said"));
  if (!page.requests.length) {
    say(list, `No request matches in ${page.window}. Choose an imported run as the window, or loosen what narrows the list.`);
    return;
  }
  fill(list, table(COLUMNS, page.requests, { caption: page.window, sort: asked.sort ?? "arrival", descending: asked.order !== "asc", onsort: sortBy }));
}

async function sortBy(name) {
  const again = form.elements.sort.value === name;
  form.elements.order.value = again && form.elements.order.value === "desc" ? "asc" : "desc";
  form.elements.sort.value = name;
  await ask(true);
  list.querySelector("th[aria-sort] button")?.focus({ preventScroll: true });
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); ask(true); });
more.addEventListener("click", () => { if (!more.hasAttribute("aria-disabled")) ask(false); });
ask(true);
