/* The capacity curve: hit rate against the number of KV blocks, with its knee. */
import { address, fillForm, get, values } from "/static/api.js";
import { chart, nothing } from "/static/chart.js";
import { $, count, el, facts, fill, percent, say, seconds, speak } from "/static/dom.js";

const form = $("ask");
let number = 0;

async function show() {
  const asked = values(form);
  address.set(asked);
  const mine = ++number;
  fill($("caching"));
  say($("answer"), "Replaying every prompt block through caches of each size …");
  try {
    const found = await get("/api/v1/capacity", asked);
    if (mine !== number) return;
    const sized = found.points.filter((point) => point.blocks !== null && point.hit_rate !== null);
    const ceiling = found.points.find((point) => point.blocks === null);
    if (!sized.length) {
      say($("answer"), "No request of this window told its prompt blocks, so there is nothing to replay.");
      nothing($("curve"), "The engine or its plugin has to send prompt_blocks.");
      fill($("caching"));
      return;
    }
    worth(found.caching);
    const { knee } = found;
    const sentence = `With caches of any size ${percent(ceiling?.hit_rate)} of the prompt blocks could be found` + (knee?.blocks ? `; ${count(knee.blocks)} blocks a worker find ${percent(knee.share_of_ceiling)} of that.` : ".");
    fill($("answer"), el("p", { class: "verdict" }, sentence));
    speak(sentence);
    await chart($("curve"), () => ({
      data: [
        { type: "scatter", mode: "lines+markers", name: "found", x: sized.map((point) => point.blocks), y: sized.map((point) => point.hit_rate * 100), hovertemplate: "%{x:,} blocks: %{y:.1f} %<extra></extra>" },
        { type: "scatter", mode: "lines", name: "ceiling", x: [sized[0].blocks, sized.at(-1).blocks], y: [ceiling?.hit_rate * 100, ceiling?.hit_rate * 100], line: { dash: "dot" }, hoverinfo: "skip" },
      ],
      layout: { xaxis: { type: "log", title: { text: "KV blocks of each worker" } }, yaxis: { title: { text: "prompt blocks found, %" } } },
    }), { label: sentence, numbers: { columns: [{ name: "blocks", num: true, value: (row) => (row.blocks === null ? "no end" : count(row.blocks)) }, { name: "hit rate", num: true, value: (row) => percent(row.hit_rate) }, { name: "blocks found", num: true, value: (row) => count(row.hit_blocks) }, { name: "asked for", num: true, value: (row) => count(row.requested_blocks) }], rows: found.points } });
  } catch (error) {
    if (mine !== number) return;
    say($("answer"), error.message, true);
    fill($("caching"));
  }
}

/** Would caching pay here? In seconds, where the window tells what a token costs. */
function worth(caching) {
  if (!caching) {
    say($("caching"), "The prompts of this window do not tell how many tokens they have, so what a cache would save cannot be said.");
    return;
  }
  const [word, kind] = caching.pays === null ? ["not known", "soft"] : caching.pays ? ["it pays", "good"] : caching.served_ratio ? ["in use already", "soft"] : ["it does not pay", "warn"];
  const pair = (times) => times && `mean ${seconds(times[0])}, P99 ${seconds(times[1])}`;
  fill($("caching"), el("p", { class: "verdict" }, el("span", { class: `word ${kind}` }, word), " ", caching.sentence), facts([
    ["served from a cache as it was", caching.served_ratio === null ? null : percent(caching.served_ratio)], ["would be served", percent(caching.hit_ratio)],
    ["computing a prompt token", caching.token_s === null ? null : seconds(caching.token_s)], ["saved a request", caching.saved_s === null ? null : seconds(caching.saved_s)], ["look-up of a request", seconds(caching.lookup_s)],
    ["pays from a hit rate of", caching.break_even_ratio === null ? null : percent(caching.break_even_ratio)],
    ["TTFT as it was", pair(caching.ttft_s)], ["TTFT at the same waiting", pair(caching.ttft_then_s)],
  ]));
}

fillForm(form, address.all());
form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
if (address.all().window !== undefined) show();
else say($("answer"), "Choose a window or a run.");
