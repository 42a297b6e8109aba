"""LMCache on an engine's page, on its own, and in an engine's log; Mooncake's master."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.adapter import Surroundings
from engine_probe.adapters.lmcache_log import LmcacheLog
from engine_probe.adapters.metric_names import Row, SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import adapter, recognise, tables_for
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
IN_PROCESS = (SAMPLES / "lmcache-0.5.6" / "in_process.prom").read_text()
SERVER = (SAMPLES / "lmcache-0.5.6" / "multiprocess.prom").read_text()
MASTER = (SAMPLES / "mooncake-0.3.13" / "master.prom").read_text()
VLLM = (SAMPLES / "vllm_metrics.synthetic.prom").read_text()
EXTERNAL = 'vllm:external_prefix_cache_queries_total{engine="0"} 4096\nvllm:external_prefix_cache_hits_total{engine="0"} 1024\n'
NOW = datetime(2026, 11, 29, 19, 0, 30, tzinfo=UTC)
NOW_NS = int(NOW.timestamp()) * 1_000_000_000


def rows(text: str, worker: str = "w") -> list[Row]:
    page = parse_page(text)
    return SampleMapper(worker, tables_for(page)).rows(page, 1)


def named(found: list[Row], name: str) -> list[float]:
    return [row[4] for row in found if row[2] == name]


@pytest.mark.parametrize(
    ("text", "engine"),
    [(IN_PROCESS, "lmcache"), (SERVER, "lmcache"), (MASTER, "mooncake"), (VLLM + IN_PROCESS, "vllm")],
)
def test_each_page_has_one_maker(text: str, engine: str) -> None:
    """LMCache's series beside vLLM's make no LMCache of the page."""
    maker = recognise(parse_page(text.replace("# EOF\n", "")))
    assert maker is not None
    assert maker.engine == engine


def test_its_series_beside_an_engine_are_read_with_it() -> None:
    """`attach vllm` reads them by its own tables: remote bytes, times, and the engine's own count of the hits."""
    page = parse_page(VLLM.replace("# EOF\n", "") + EXTERNAL + IN_PROCESS)
    found = SampleMapper("w", adapter("vllm").tables).rows(page, 1)
    assert named(found, "tier_read_bytes_total") == [33_554_432.0]
    assert named(found, "tier_written_bytes_total") == [16_777_216.0]
    assert named(found, "tier_read_time_seconds_count") == [1.0]
    assert 4096.0 in named(found, "external_queries_tokens_total")
    assert 2048.0 not in named(found, "external_queries_tokens_total")
    assert {row[0] for row in found if row[2] == "tier_read_bytes_total"} == {"w"}


def test_hits_are_lmcaches_where_the_engine_counts_none() -> None:
    """2,048 tokens looked up, 1,024 found."""
    found = rows(IN_PROCESS)
    assert named(found, "external_queries_tokens_total") == [2048.0]
    assert named(found, "external_hits_tokens_total") == [1024.0]


def test_times_of_the_remote_tier_become_seconds() -> None:
    """12.5 ms is 0.0125 s, in the sum and in the bounds of the buckets."""
    found = rows(IN_PROCESS)
    assert named(found, "remote_read_time_seconds_sum") == [0.0125]
    bounds = {float(row[3]["le"]) for row in found if row[2] == "remote_read_time_seconds_bucket"} - {float("inf")}
    wire = {
        float(line.split('le="')[1].split('"')[0])
        for line in IN_PROCESS.splitlines()
        if line.startswith("lmcache:remote_time_to_get_bucket")
    } - {float("inf")}
    assert sorted(bounds) == pytest.approx(sorted(bound / 1000 for bound in wire))


def test_the_servers_page_tells_hits_and_how_long_blocks_live() -> None:
    """OpenTelemetry's names with unit and `_total`; L1 and L2 keep their own."""
    found = rows(SERVER, "lmcache-0")
    assert named(found, "external_queries_tokens_total") == [8192.0]
    assert named(found, "external_hits_tokens_total") == [5120.0]
    assert named(found, "block_lifetime_seconds_sum") == [2.5]
    assert named(found, "lmcache_mp_lookup_hit_l2_tokens_total") == [1024.0]
    assert {row[0] for row in found} == {"lmcache-0"}


def test_names_that_an_exporter_rewrote_are_read() -> None:
    """lmcache_x for lmcache:x."""
    assert named(rows(IN_PROCESS.replace("lmcache:", "lmcache_")), "tier_read_bytes_total") == [33_554_432.0]


def test_mooncakes_reads_are_those_of_both_pools() -> None:
    """Memory and SSD are two rows of one name; nothing else is canonical."""
    found = rows(MASTER.replace("mem_cache_hit_bytes_total 0", "mem_cache_hit_bytes_total 7"), "m")
    assert named(found, "tier_read_bytes_total") == [7.0, 0.0]
    assert named(found, "master_key_count") == [0.0]
    mooncake = adapter("mooncake")
    seen = mooncake.discover(None, parse_page(MASTER))  # type: ignore[arg-type]
    lines = [str(line) for line in mooncake.lines(seen, Surroundings())]
    assert lines[1] == "capacity   not seen  no client has mounted a segment yet, so the pool has no room"
    assert mooncake.facts(parse_page(MASTER), seen) == {}


def line(text: str, at: str = "2026-11-29 20:00:29,250") -> str:
    """A line as LMCache writes it into the engine's output, an hour ahead of UTC."""
    return f"(EngineCore pid=7) \x1b[32;20m[{at}] LMCache INFO:\x1b[0m {text} \x1b[3m(cache_engine.py:9:lmcache)\x1b[0m"


RETRIEVED = (
    "[req_id=cmpl-abc-0] Retrieved 512 out of 1024 required tokens (from 2048 total tokens). size: 0.1250 gb, "
    "cost 12.5000 ms, throughput: 10.0000 GB/s;"
)
STORED = (
    "[req_id=chatcmpl-abc] Stored 1024 out of total 1024 tokens. size: 0.2500 GB, cost 8.0000 ms, throughput: 31.2 GB/s; "
    "offload_time: 5.0 ms, put_time: 3.0 ms"
)
SKIPPED = (
    "Reqid: abc, Total tokens 300, Inference Engine computed tokens: 0, LMCache hit tokens: 256, but need to load: 256 "
    "< min_retrieve 512, skip retrieve but record for save skip"
)


def told(*lines: str, now_ns: int = NOW_NS) -> list[dict[str, Any]]:
    log = LmcacheLog("w", clock=lambda: now_ns)
    found = [row for text in lines for row in log.feed(text).get("transfer", [])]
    validate("transfer", table_from_rows("transfer", found), NOW_NS)
    return found


def test_a_load_is_a_transfer_from_the_cache() -> None:
    """Half of what was asked for came: 0.125 GiB in 12.5 ms; the client's own id; the zone is an hour."""
    assert told(line(RETRIEVED)) == [
        {
            "worker": "w",
            "at_ns": NOW_NS - 750_000_000,
            "request_id": "abc",
            "source_worker": "lmcache",
            "target_worker": "w",
            "num_bytes": 134_217_728,
            "outcome": "fell_back",
            "reason": "512 of 1024 tokens",
            "wire_s": 0.0125,
        }
    ]


def test_a_store_goes_the_other_way_and_a_small_hit_is_refused() -> None:
    """Stored whole: ok. A hit below min_retrieve is not loaded: refused, with the numbers."""
    stored, skipped = told(line(STORED), line(SKIPPED))
    assert (stored["source_worker"], stored["target_worker"], stored["outcome"]) == ("w", "lmcache", "ok")
    assert (stored["num_bytes"], stored["wire_s"], stored["reason"]) == (268_435_456, 0.008, None)
    assert (skipped["outcome"], skipped["reason"]) == ("refused", "a hit of 256 tokens is below min_retrieve 512")


def test_a_line_without_size_leaves_it_unknown() -> None:
    """The layerwise form tells tokens only."""
    (row,) = told(line("[req_id=abc] Retrieved 64 out of 64 out of total 128 tokens"))
    assert (row["outcome"], row["num_bytes"], row["wire_s"]) == ("ok", None, None)


def test_the_zone_is_learnt_from_lines_that_are_being_written() -> None:
    """An old line before it is passed over, one after it is read; a line 7 minutes off no quarter tells no zone."""
    old = line(RETRIEVED, "2026-11-29 17:53:00,000")
    assert told(old) == []
    assert [row["at_ns"] for row in told(line(STORED), old)][1] == NOW_NS - (2 * 3600 + 7 * 60 + 30) * 1_000_000_000
    assert told(line(RETRIEVED, "2026-11-29 20:07:00,000")) == []
    assert told(line(RETRIEVED, "2026-02-30 20:00:29,250")) == []


@given(st.text(max_size=200))
def test_strange_lines_tell_nothing(text: str) -> None:
    """No line makes the reader fail."""
    assert LmcacheLog("w").feed("LMCache " + text) == {}


def test_attach_vllm_reads_both_kinds_of_lines() -> None:
    """vLLM's start-up facts and LMCache's transfers are in one log."""
    reader = adapter("vllm").log_reader("w")
    assert reader is not None
    log = getattr(reader, "_lmcache")  # noqa: B009 - the clock of the test
    log._clock = lambda: NOW_NS
    assert "transfer" in reader.feed(line(RETRIEVED))
    assert reader.feed("INFO nothing") == {}
    assert "engine" in reader.worker_facts()
