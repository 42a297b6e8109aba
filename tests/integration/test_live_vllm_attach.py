"""kvscope against a real vLLM: what it reports equals what the engine counted and what the clients saw.

One vLLM CPU server is started, loaded until it preempts and evicts, killed in mid-load, and started again, while the
plugin inside it and a real `kvscope attach` write to a real collector. See `tests/live_run.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_probe.adapters.vllm_provides import PLUGIN
from engine_probe.events import KINDS
from engine_probe.schema import table_from_rows
from store.evidence.one_request import one_requests
from store.interface import Batch
from store.open import open_store
from tests.live_run import NUM_BLOCKS, Life, Story, block_hashes, tell
from tests.servers import require

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

US = 1_000


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    require("vllm")
    return tell(tmp_path_factory.mktemp("live"))


class Rows:
    """The store after the story."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url, read_only=True)

    def all(self, sql: str, *params: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.store.query(sql, params).to_pylist(maps_as_pydicts="strict")
        return rows

    def one(self, sql: str, *params: Any) -> Any:
        (row,) = self.all(sql, *params)
        (value,) = row.values()
        return value

    def requests(self, name: str) -> dict[str, dict[str, Any]]:
        rows = self.all("SELECT * FROM request WHERE starts_with(request_id, ?)", name + "-")
        found = {row["request_id"]: row for row in rows}
        assert len(found) == len(rows), "a request was recorded twice"
        return found


@pytest.fixture(scope="module")
def rows(story: Story) -> Iterator[Rows]:
    opened = Rows(story.store)
    yield opened
    opened.store.close()


@pytest.fixture(params=["first", "second"])
def life(request: pytest.FixtureRequest, story: Story) -> tuple[str, Life]:
    """Each of the two lives of the engine that were measured from rest to rest."""
    return request.param, getattr(story, request.param)


def test_the_load_did_what_the_other_tests_need(story: Story) -> None:
    """Preemptions, hits, stored and removed blocks happened, and every request ended well: nothing below is vacuous."""
    assert [one.error for one in story.first.seen + story.second.seen if one.error] == []
    assert story.first.gain("vllm:num_preemptions_total") > 0
    assert story.first.gain("vllm:prefix_cache_hits_total") > 0
    assert story.first.events.stored > story.first.events.removed > 0
    assert any(one.error and one.first_ns for one in story.killed), "the kill interrupted nothing"


def test_steps_count_what_the_engine_counted(life: tuple[str, Life], rows: Rows) -> None:
    """Preemptions and generated tokens of the steps sum to the engine's counters; recompute comes on top of prefill."""
    _, facts = life
    (sums,) = rows.all(
        "SELECT sum(num_preempted) AS preempted, sum(decode_tokens) AS generated, sum(prefill_tokens) AS prefill, "
        "sum(recomputed_tokens) AS recomputed, max(blocks_used) AS used, min(blocks_total) AS total, "
        "max(num_running) AS running, max(num_waiting_prefill) AS waiting FROM step WHERE at_ns BETWEEN ? AND ?",
        facts.begin_ns,
        facts.end_ns,
    )
    assert sums["preempted"] == facts.gain("vllm:num_preemptions_total")
    assert sums["generated"] == facts.gain("vllm:generation_tokens_total")
    computed = facts.gain("vllm:prompt_tokens_total") - facts.gain("vllm:prefix_cache_hits_total")
    assert sums["prefill"] - sums["recomputed"] == computed
    assert (sums["recomputed"] > 0) == (sums["preempted"] > 0)
    assert sums["total"] == NUM_BLOCKS - 1
    assert NUM_BLOCKS - 8 < sums["used"] <= NUM_BLOCKS - 1
    assert 1 < sums["running"] <= 8
    assert 1 < sums["waiting"] < 12


def test_requests_count_what_the_engine_counted(life: tuple[str, Life], rows: Rows) -> None:
    """Numbers and seconds of the request rows sum to the engine's own counters and histograms."""
    name, facts = life
    found = rows.requests(name)
    assert len(found) == facts.gain("vllm:request_success_total") == len(facts.seen)
    sums = {
        "num_preemptions": "vllm:num_preemptions_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "output_tokens": "vllm:generation_tokens_total",
    }
    for column, counter in sums.items():
        assert sum(row[column] for row in found.values()) == facts.gain(counter), column
    seconds = {
        "queue_s": "vllm:request_queue_time_seconds_sum",
        "prefill_s": "vllm:request_prefill_time_seconds_sum",
        "decode_s": "vllm:request_decode_time_seconds_sum",
    }
    for column, counter in seconds.items():
        assert sum(row[column] for row in found.values()) == pytest.approx(facts.gain(counter), abs=1e-6), column
    ttft = sum(row["first_token_ns"] - row["arrival_ns"] for row in found.values()) / 1e9
    assert ttft == pytest.approx(facts.gain("vllm:time_to_first_token_seconds_sum"), abs=1e-4)
    e2e = sum(row["end_ns"] - row["arrival_ns"] for row in found.values()) / 1e9
    assert e2e == pytest.approx(facts.gain("vllm:e2e_request_latency_seconds_sum"), abs=1e-4)


def test_every_request_agrees_with_its_client(life: tuple[str, Life], rows: Rows) -> None:
    """The engine's view lies inside the client's: it arrives after it was sent, its token is there before it comes."""
    name, facts = life
    found = rows.requests(name)
    for seen in facts.seen:
        row = found[seen.request_id]
        assert (row["vantage"], row["state"], row["finish_reason"]) == ("engine", "finished", "length")
        assert row["prompt_tokens"] == seen.usage["prompt_tokens"] == len(seen.prompt)
        assert row["output_tokens"] == seen.usage["completion_tokens"]
        assert row["cached_tokens"] == seen.usage["prompt_tokens_details"]["cached_tokens"]
        assert seen.send_ns <= row["arrival_ns"] + US
        assert row["first_token_ns"] <= seen.first_ns + US
        assert row["first_token_ns"] - row["arrival_ns"] <= seen.first_ns - seen.send_ns + US
        assert row["end_ns"] <= seen.end_ns + US


def test_phases_sum_to_the_time_to_first_token(life: tuple[str, Life], rows: Rows) -> None:
    """frontend + queue + prefill is the first token, to the resolution of the engine's clock, for every request."""
    for row in rows.requests(life[0]).values():
        ttft = (row["first_token_ns"] - row["arrival_ns"]) / 1e9
        assert row["frontend_s"] + row["queue_s"] + row["prefill_s"] == pytest.approx(ttft, abs=1e-6)
        assert row["worker"] == "engine-0"


def test_spans_tell_of_every_request_what_the_plugin_tells(life: tuple[str, Life], story: Story, rows: Rows) -> None:
    """Two ways to look at one engine: one span a request, the same instants to a microsecond, phases and tokens."""
    name, facts = life
    found = rows.requests(name)
    spans = {row["request_id"]: row for row in story.spans if row["request_id"].startswith(name + "-")}
    assert spans.keys() == found.keys() == {seen.request_id for seen in facts.seen}
    for request_id, span in spans.items():
        row = found[request_id]
        for column in ("arrival_ns", "first_token_ns", "first_scheduled_ns", "last_token_ns"):
            assert span[column] == pytest.approx(row[column], abs=2 * US), column
        for column in ("queue_s", "prefill_s", "decode_s", "frontend_s"):
            assert span[column] == pytest.approx(row[column], abs=2e-6), column
        for column in ("prompt_tokens", "output_tokens", "state", "worker", "engine"):
            assert span[column] == row[column], column
        assert span["labels"]["engine_request_id"] == row["labels"]["engine_request_id"] == f"cmpl-{request_id}-0"


def test_plugin_and_spans_of_a_request_are_one(life: tuple[str, Life], story: Story, rows: Rows) -> None:
    """Sent to one store, the spans under a service name of their own: as many requests as the clients sent, not twice as many."""
    name, facts = life
    told = list(rows.requests(name).values())
    spans = [row | {"worker": "service"} for row in story.spans if row["request_id"].startswith(name + "-")]
    with open_store(":memory:") as store:
        store.append(Batch({"request": table_from_rows("request", [*told, *spans])}))
        found = one_requests(
            store, "run_id IS NULL", [], ["request_id", "worker", "cached_tokens", "trace_id"], order_by="request_id"
        )
    assert found.column("request_id").to_pylist() == sorted(seen.request_id for seen in facts.seen)
    assert set(found.column("worker").to_pylist()) == {"engine-0"}
    assert found.column("cached_tokens").null_count == found.column("trace_id").null_count == 0


def test_blocks_are_those_of_the_raw_events(life: tuple[str, Life], story: Story, rows: Rows) -> None:
    """Stored and removed blocks of each life equal the events counted without kvscope; no message was lost."""
    name, facts = life
    begin_ns = 0 if name == "first" else rows.one("SELECT max(at_ns) FROM block WHERE change = 'cleared'")
    counted = {
        row["change"]: row["n"]
        for row in rows.all(
            "SELECT change, count(*) AS n FROM block WHERE at_ns BETWEEN ? AND ? AND change <> 'cleared' GROUP BY 1",
            begin_ns,
            facts.end_ns,
        )
    }
    assert counted == {"stored": facts.events.stored, "evicted": facts.events.removed}
    assert story.summary["kv_events"]["lost_messages"] == 0


def test_prompts_are_found_again_as_blocks(story: Story, rows: Rows) -> None:
    """Every full prompt block of every request was stored under the hash that its prompt and the salt give."""
    stored = {row["block_hash"] for row in rows.all("SELECT DISTINCT block_hash FROM block WHERE change = 'stored'")}
    assert block_hashes(story.first.seen + story.second.seen, story.salt) <= stored


def test_scraped_counters_are_the_engines(story: Story, rows: Rows) -> None:
    """The last scrape of the first rest, and the last of all, hold the engine's own values."""
    names = {
        "preemptions_total": "vllm:num_preemptions_total",
        "prefix_hits_tokens_total": "vllm:prefix_cache_hits_total",
        "prefix_queries_tokens_total": "vllm:prefix_cache_queries_total",
        "prompt_tokens_total": "vllm:prompt_tokens_total",
        "output_tokens_total": "vllm:generation_tokens_total",
    }
    for facts in (story.first, story.second):
        for canonical, wire in names.items():
            value = rows.one(
                "SELECT arg_max(value, at_ns) FROM sample WHERE name = ? AND at_ns <= ?", canonical, facts.end_ns
            )
            assert value == facts.after[wire], canonical


def test_the_plugin_fills_what_is_declared_and_nothing_else(rows: Rows) -> None:
    """The table of what can be seen (docs/observability.md) is true of a real engine, column by column."""
    for kind in ("request", "step", "worker"):
        columns = [column.name for column in KINDS[kind]]
        counts = ", ".join(f"count({name}) AS {name}" for name in columns)
        (filled,) = rows.all(f"SELECT {counts} FROM {kind} WHERE source = 'vllm:engine-0'")
        declared = {name.removeprefix(f"{kind}.") for name in PLUGIN.names if name.startswith(f"{kind}.")}
        if kind == "step":
            declared.remove("batch_size")  # only with --enable-logging-iteration-details
        assert {name for name, count in filled.items() if count} == declared, kind


def test_geometry_is_told_by_page_and_plugin(rows: Rows) -> None:
    """39 usable blocks of 32 tokens; 2 * 2 layers * 2 heads * 32 * 2 bytes * 32 tokens = 16,384 bytes a block."""
    facts = rows.all("SELECT * FROM worker ORDER BY at_ns")
    assert {row["worker"] for row in facts} == {"engine-0"}
    for row in facts:
        assert (row["engine"], row["engine_version"], row["model"]) == ("vllm", "0.32.0", "tiny")
        assert (row["block_size"], row["num_blocks"], row["max_context"]) == (32, NUM_BLOCKS - 1, 1024)
        assert row["prefix_caching"] is True
    assert {row["kv_bytes_per_block"] for row in facts} >= {16_384}
    assert [row["dtype"] for row in facts].count("bfloat16") >= 2


def test_the_death_is_marked_and_what_nobody_saw_is_said(story: Story, rows: Rows) -> None:
    """Down after the kill, up again, and a gap for each source: counters, the plugin's rows, KV events."""
    marks = rows.all("SELECT * FROM mark WHERE at_ns > ? ORDER BY at_ns", story.kill_ns - 5_000_000_000)
    down = [m for m in marks if m["mark"] == "worker_down"]
    assert len(down) == 1
    assert 0 <= down[0]["at_ns"] - story.kill_ns < 5_000_000_000
    back = [m for m in marks if m["mark"] == "worker_up" and m["attrs"].get("seen_by") == "attach"]
    assert ["restarted" in m["text"] for m in back] == [True]
    gaps = {m["attrs"]["source"]: m["attrs"] for m in marks if m["mark"] == "gap"}
    assert gaps.keys() == {"metrics", "plugin", "kv_events"}
    for source in ("metrics", "plugin"):
        assert int(gaps[source]["first_ns"]) <= story.kill_ns + 1_000_000_000
        assert story.kill_ns <= int(gaps[source]["last_ns"])
    assert gaps["kv_events"]["messages"] == "unknown"
    assert rows.one("SELECT count(*) FROM block WHERE change = 'cleared' AND reason = 'restart'") == 1


def test_totals_are_the_sum_of_both_lives_as_far_as_they_were_scraped(story: Story, rows: Rows) -> None:
    """The last value scraped before the death plus that of the second life; the rest is in `unseen`."""
    summary = story.summary
    assert (summary["restarts"], len(summary["unseen"])) == (1, 1)
    for name, wire in (
        ("preemptions_total", "vllm:num_preemptions_total"),
        ("prefix_hits_tokens_total", "vllm:prefix_cache_hits_total"),
        ("output_tokens_total", "vllm:generation_tokens_total"),
    ):
        last = rows.one(
            "SELECT arg_max(value, at_ns) FROM sample WHERE name = ? AND at_ns < ?", name, story.kill_ns + 500_000_000
        )
        assert last >= story.first.after[wire]
        assert summary["counters"][name] == last + story.second.after[wire]


def test_requests_of_the_killed_load_are_recorded_or_in_the_gap(story: Story, rows: Rows) -> None:
    """Each request that its client saw finish is in the store, unless it ended inside the plugin's gap mark."""
    found = rows.requests("killed")
    (gap,) = rows.all("SELECT attrs FROM mark WHERE mark = 'gap' AND attrs['source'] = 'plugin'")
    since_ns = int(gap["attrs"]["first_ns"])
    finished = [seen for seen in story.killed if seen.error is None]
    missing = [seen for seen in finished if seen.request_id not in found]
    assert all(seen.end_ns >= since_ns for seen in missing)
    assert found.keys() <= {seen.request_id for seen in story.killed}


def test_attach_ends_well_and_said_what_it_saw(story: Story) -> None:
    """Exit code 0, nothing lost on its side, one line a source, the plugin's name taken."""
    assert (story.attach_code, story.summary["lost_rows"], story.summary["undelivered"]) == (0, {}, None)
    assert story.summary["worker"] == story.worker
    lines = story.attach_said.splitlines()
    seen = {line.split()[0]: line for line in lines if "  seen  " in line}
    assert seen.keys() == {"metrics", "requests", "steps", "blocks", "residency", "log"}
    assert "where the engine connects" in seen["blocks"]
    assert "vLLM 0.32.0 serving tiny" in seen["metrics"]


def test_an_absent_collector_does_not_hurt_the_engine(story: Story) -> None:
    """With the collector gone requests end as before, and the engine's log has no error of ours."""
    assert [one.error for one in story.orphans] == [None] * 4
    assert "kvscope could not start" not in story.engine_log
    assert "kvscope left out statistics" not in story.engine_log
    assert story.engine_log.count("kvscope records worker engine-0") == 2
